"""A remote store of which the bytes that were read stay on the local disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from shardfs.model.blobs import Stat, Suffix
from shardfs.model.redact import public_name, redacted_values
from shardfs.storage.counters import WARM_HITS
from shardfs.storage.disk_cache import NAME_BYTES, TAG_BYTES, TOUCH_S
from shardfs.storage.remote import identifies_bytes, requested_size
from shardfs.storage.store import LARGE, DirEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardfs.model.blobs import ByteRequest
    from shardfs.model.values import Version
    from shardfs.storage.disk_cache import DiskCache
    from shardfs.storage.remote import FsspecBlob, FsspecStore

T = TypeVar("T")

ANSWER = bytes(TAG_BYTES)
"""The tag of entries that have no version: answers that are kept for `offline`."""


class CachedStore:
    """A store whose objects consult a cache on the local disk before they send requests.

    Everything else is answered by `inner`: metadata documents, listings and attributes. These answers are kept for
    `offline` only. Each opened object asks for its version at most once.

    Attributes:
        asks_for_versions: whether answers to requests for bytes do not name the version.

    Args:
        source: the URL of the store; with `options`, it is part of the names of entries, without the secrets of both.
        options: the storage options.
        offline: send no request; raise OSError (EHOSTUNREACH) for what is not in the cache.
    """

    remote = True

    def __init__(
        self,
        inner: FsspecStore,
        cache: DiskCache,
        source: str,
        options: Mapping[str, Any],
        waiting: Callable[[], None],
        *,
        offline: bool = False,
    ) -> None:
        self.inner = inner
        self.cache = cache
        self.waiting = waiting
        self.offline = offline
        self.blind = inner.blind
        self.name = inner.name
        self.read_ahead = inner.read_ahead
        self.retry = inner.retry
        settings = json.dumps(redacted_values(options), sort_keys=True, default=str)
        # The query may be a signature, or select the object; nobody can recover it from the hash.
        self._source = f"{settings}\0{urlsplit(source).query}\0{public_name(source).rstrip('/')}"
        self.asks_for_versions = False
        self.retry.counters.hits_in_a_row = WARM_HITS  # nothing is fetched ahead before the first miss

    def open(self, key: str) -> CachedBlob:
        return CachedBlob(self, self.inner.open(key), self._name(key))

    def _name(self, key: str) -> str:
        return f"{self._source}/{key}" if key else self._source

    def reopen(self, key: str) -> None:
        self.inner.reopen(key)

    def reopen_below(self, key: str) -> None:
        self.inner.reopen_below(key)

    def entry(self, key: str) -> DirEntry:
        return self.answer("entry", self._name(key), lambda: self.inner.entry(key), _entry)

    def scan(self, key: str) -> Iterator[DirEntry]:
        return iter(self.answer("scan", self._name(key), lambda: [*self.inner.scan(key)], _entries))

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        def ask() -> dict[str, str]:
            return {n: data.decode("latin-1") for n, data in self.inner.documents(directory, names, limit).items()}

        return self.answer("\0".join(("documents", *names)), self._name(directory), ask, _documents)

    def answer(self, question: str, name: str, ask: Callable[[], Any], convert: Callable[[Any], T]) -> T:
        """Return the answer of `ask`, which is kept as JSON; if offline, the answer kept last.

        Args:
            question: what is asked of the object, such as "stat"; with `name`, the key of the kept answer.
            name: the object with its source, see `_name`.
            ask: asks the source. Its errors are raised; a FileNotFoundError is kept as an answer, too.
            convert: makes the result of the JSON value, and of what `ask` returns. Raises ValueError, TypeError or
                AttributeError for JSON of another form: a damaged answer counts as none.

        If offline, raise FileNotFoundError if that was the last answer, OSError (EHOSTUNREACH) if none is kept.
        """
        if not self.offline:
            try:
                answer = ask()
            except FileNotFoundError:
                self.keep(question, name, None)
                raise
            self.keep(question, name, answer)
            return convert(answer)
        self.waiting()
        entry = self.cache.get(_digest(f"{name}\0{question}", NAME_BYTES))
        if entry is None:
            raise self.unreachable()
        try:
            answer = json.loads(entry[1])
            if answer is not None:
                return convert(answer)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise self.unreachable() from None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def keep(self, question: str, name: str, answer: Any) -> None:
        """Keep an answer for `answer`; None if there is no such object. An answer that is no JSON value is not kept."""
        with suppress(TypeError):  # some file systems have versions that JSON does not know
            self.cache.put(_digest(f"{name}\0{question}", NAME_BYTES), ANSWER, json.dumps(answer).encode())

    def unreachable(self) -> OSError:
        """Return the error for what is not in the cache."""
        return OSError(errno.EHOSTUNREACH, "is not in the disk cache, and -o offline forbids to ask the source")

    def require_ranges(self, keys: Iterable[str]) -> None:
        if not self.offline:
            self.inner.require_ranges(keys)

    def statvfs(self) -> None:
        return self.inner.statvfs()


class CachedBlob:
    """An object of a `CachedStore`, in the version that the store reported first.

    `read` asks the source only for what the cache does not have of this version. Raises StaleShardError if the source
    has another version by then, OSError (EHOSTUNREACH) for missing bytes if offline.
    """

    __slots__ = (
        "__weakref__",
        "_first",
        "_hash",
        "_inner",
        "_name",
        "_stat",
        "_store",
        "_used",
        "fd",
        "file_offset",
    )

    def __init__(self, store: CachedStore, inner: FsspecBlob, name: str) -> None:
        self.fd = -1
        self.file_offset = 0
        self._store = store
        self._inner = inner
        self._name = name
        self._hash = _hash(f"{name}\0", NAME_BYTES)
        self._first: bytes | None = None
        self._used = 0.0
        self._stat: Stat | None = None

    def stat(self) -> Stat:
        if self._stat is None:
            self._stat = self._store.answer("stat", self._name, self._inner.stat, _stat)
        return self._stat

    def _known(self) -> Stat | None:
        return self._stat or self._inner.known

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        store = self._store
        if store.cache.slow or sum(map(requested_size, requests)) >= LARGE:
            store.waiting()
        names = [self._entry(request) for request in requests]
        self._use_first(names)
        entries = [
            store.cache.get(name) if requested_size(r) > 0 else None for name, r in zip(names, requests, strict=True)
        ]
        # Without a version in the answers, the version must be known before the bytes are read and be the same after,
        # or else the bytes could be kept as those of another version (see `_fetch`).
        if any(entries) or store.asks_for_versions or store.offline:
            self._ask_for_version()
        pieces = [self._usable(entry, request) for entry, request in zip(entries, requests, strict=True)]
        missing = [i for i, data in enumerate(pieces) if data is None]
        hits, nbytes = len(pieces) - len(missing), sum(len(data) for data in pieces if data)
        if missing:
            store.waiting()
        store.retry.counters.cache(hits=hits, misses=len(missing), nbytes=nbytes)
        fetched = iter(self._fetch([names[i] for i in missing], [requests[i] for i in missing]) if missing else ())
        return [next(fetched) if data is None else data for data in pieces]

    def _entry(self, request: ByteRequest) -> bytes:
        """Return the name of the entry with these bytes."""
        hashed = self._hash.copy()
        hashed.update(b"%d" % _start(request))
        return hashed.digest()

    def _use_first(self, names: Sequence[bytes]) -> None:
        """Let the first entry, usually the shard's index, count as used when its chunks are used.

        A mount reads an index once, and its chunks again and again. Without this, the index would be evicted first.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = next(iter(names), None)
            self._used = now
        elif now - self._used > TOUCH_S:
            self._used = now
            self._store.cache.get(self._first)

    def _fetch(self, names: Sequence[bytes], requests: Sequence[ByteRequest]) -> list[bytes]:
        """Return bytes from the source, and keep them under these names if their version is certain."""
        if self._store.offline:
            raise self._store.unreachable()
        had_version = self._inner.known is not None
        try:
            fetched, is_certain = self._inner.read_version(requests)
        except FileNotFoundError:
            self._store.keep("stat", self._name, None)
            raise
        if self._inner.known is None and not self._store.asks_for_versions:  # no answer names the version
            self._store.asks_for_versions = had_version = True
            self._ask_for_version()
            fetched, is_certain = self._inner.read_version(requests)
        tag = self._tag()
        if tag is not None and (is_certain or (had_version and self._is_current())):
            for name, data in zip(names, fetched, strict=True):
                if data:
                    self._store.cache.put(name, tag, data)
            self.stat()
        return fetched

    def _is_current(self) -> bool:
        """Return whether bytes that were read after the version was known are certainly of this version.

        Raise StaleShardError if the object was replaced.
        """
        with suppress(OSError):
            return self._inner.is_current()
        return False

    def _ask_for_version(self) -> None:
        try:
            self.stat()
        except FileNotFoundError:
            raise
        except OSError:  # the request for the bytes may succeed
            pass

    def _tag(self) -> bytes | None:
        """Return what identifies the version; None if it is not known, or could be that of other bytes, too."""
        stat = self._known()
        return None if stat is None or not identifies_bytes(stat) else _tag_of(stat.version)

    def _usable(self, entry: tuple[bytes, bytes] | None, request: ByteRequest) -> bytes | None:
        """Return the requested bytes if the entry has this version and enough bytes. It may have more."""
        wanted = requested_size(request)
        if wanted <= 0:
            return b""
        if entry is None or entry[0] != self._tag():
            return None
        data = entry[1]
        if isinstance(request, Suffix):
            return data
        complete = len(data) >= wanted or request.start + len(data) == self.stat().size
        return data[:wanted] if complete else None


def _stat(value: Any) -> Stat:
    """Convert the JSON form of a `Stat`, or the `Stat` itself."""
    size, mtime_ns, version = value
    if not (type(size) is int and size >= 0 and type(mtime_ns) is int and isinstance(version, list | tuple)):
        raise ValueError("is no size, time and version")
    return Stat(size, mtime_ns, tuple(version))


def _entry(value: Any) -> DirEntry:
    """Convert the JSON form of a `DirEntry`, or the entry itself."""
    name, directory, stat, page = value
    if not (isinstance(name, str) and isinstance(directory, bool)):
        raise ValueError("is no entry of a directory")
    return DirEntry(name, directory, None if stat is None else _stat(stat), page)


def _entries(value: Any) -> list[DirEntry]:
    return [_entry(entry) for entry in value]


def _documents(value: Any) -> dict[str, bytes]:
    return {name: text.encode("latin-1") for name, text in value.items()}


def _start(request: ByteRequest) -> int:
    """Return where the bytes begin; negative if from the end of the object."""
    return -request.size if isinstance(request, Suffix) else request.start


@lru_cache(1024)
def _tag_of(version: Version) -> bytes:
    return _digest(repr(version), TAG_BYTES)


def _digest(text: str, size: int) -> bytes:
    return _hash(text, size).digest()


def _hash(text: str, size: int) -> hashlib.blake2b:
    return hashlib.blake2b(os.fsencode(text), digest_size=size)
