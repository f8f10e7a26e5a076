"""Any fsspec file system as a store."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, cast

from shardfs.model.blobs import ByteRange, ByteRequest, Stat, Suffix
from shardfs.model.errors import NOT_FOUND, ShardfsError, errno_of
from shardfs.storage.cache import nothing
from shardfs.storage.range_client import THROTTLED, Answer, ServerError, replaced
from shardfs.storage.retry import RetryPolicy, StoreTimeout, UnsuitedError, http_status, is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

    from shardfs.storage.range_client import RangeClient
    from shardfs.storage.read_ahead import ReadAhead

from shardfs.model.kinds import OWN_PREFIX
from shardfs.storage.store import DirEntry, absent_documents, read_merged


class FsspecBlob:
    """One version of an object of an fsspec file system: that of the first answer. Creating it sends no request.

    Later reads raise StaleShardError if their answers are of another version (`same_version`).
    """

    __slots__ = ("__weakref__", "_known", "_lock", "_store", "fd", "file_offset", "key")

    def __init__(self, store: FsspecStore, key: str) -> None:
        self.fd = -1
        self.file_offset = 0
        self._store = store
        self.key = key
        self._known: Stat | None = None
        self._lock = threading.Lock()

    @property
    def known(self) -> Stat | None:
        """What is known of the object without a request; None before the first answer."""
        return self._known

    def stat(self) -> Stat:
        if self._known is None:
            self._note(self._store.stat(self.key))
        return cast("Stat", self._known)

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return self.read_version(requests)[0]

    def read_version(self, requests: Sequence[ByteRequest]) -> tuple[list[bytes], bool]:
        """Return the bytes of each request, and whether all answers name the version that is `known`.

        Raise StaleShardError if an answer is of another version.
        """
        tag = None if self._known is None else strong_tag(self._known)
        data, answers = self._store.read(self.key, requests, tag)
        return data, all([self._note(answer) for answer in answers])

    def is_current(self) -> bool:
        """Return whether the store still has the version that is `known`, as far as it names versions. One request.

        Raise StaleShardError for another version.
        """
        self._store.reopen(self.key)  # a cached listing may describe an older version
        return self._note(self._store.stat(self.key))

    def _note(self, answer: Stat | None) -> bool:
        """Note the first answer. Return whether this answer names the same version; raise StaleShardError for another.

        None stands for an answer that describes no version.
        """
        if answer is None:
            return False
        with self._lock:
            version = self._known = self._known or answer
        is_same = same_version(version, answer)
        if is_same is False:
            raise replaced(self._store.path(self.key))
        return is_same is True


class FsspecStore:
    """A store on any fsspec file system.

    All methods block until the answer or a time-out; fsspec's event loop stays internal.

    Args:
        fs: the file system.
        root: the path of the source in `fs`.
        ranges: what reads byte ranges where it can; None if `fs` reads everything.
    """

    remote, blind = True, False

    client_retries = True
    """Whether fsspec's client repeats failed requests by itself, more often than `RetryPolicy`."""

    def __init__(
        self,
        fs: Any,
        root: str,
        waiting: Callable[[], None] = nothing,
        retry: RetryPolicy | None = None,
        read_ahead: ReadAhead | None = None,
        ranges: RangeClient | None = None,
    ) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._waiting = waiting
        self.name = self.root.rsplit("/", 1)[-1]
        self.retry = retry or RetryPolicy()
        self.read_ahead = read_ahead
        self._ranges = ranges
        self._denied: dict[str, bool] = {}  # answers of `_denied_if_missing`

    def path(self, key: str) -> str:
        """Return the object's path in its fsspec file system, for web servers its URL."""
        return f"{self.root}/{key}" if key and self.root else key or self.root

    def open(self, key: str) -> FsspecBlob:
        return FsspecBlob(self, key)

    def reopen(self, key: str) -> None:
        """Drop fsspec's cached listing of the directory of `key`."""
        self.fs.invalidate_cache(self.path(key).rpartition("/")[0])

    def reopen_below(self, key: str) -> None:
        """Drop all cached listings of fsspec, which caches by directory."""
        self.fs.invalidate_cache()

    def stat(self, key: str) -> Stat:
        """Return size, time and version of an object.

        Raise IsADirectoryError for a directory, OSError if the size is unknown.
        """
        info = self._info(key)  # of object stores, a listing that fsspec has cached answers this without a request
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", key)
        return stat_of_info(info)

    def _client(self, path: str) -> RangeClient | None:
        """Return the client of obstore if it may be asked for an object."""
        return self._ranges if self._ranges is not None and self._ranges.suits(path) else None

    def ask(self, kind: str, path: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `method` returns, called with time-outs and retries. The client's exceptions become OSError.

        `kind` is the name under which `StoreCounters` count the request.
        """
        with store_errors(path):
            return self.retry.run(kind, method, *args, **kwargs)

    def _info(self, key: str) -> Mapping[str, Any]:
        self._waiting()
        path = self.path(key)
        return cast("Mapping[str, Any]", self.ask("stat", path, self.fs.info, path))

    def read(
        self, key: str, requests: Sequence[ByteRequest], tag: str | None = None
    ) -> tuple[list[bytes], list[Stat | None]]:
        """Return the bytes of each request, and what each answer says about the object: None, with some clients.

        There may be fewer answers than requests, because neighbours are read together. Raise StaleShardError if the
        object has another version than `tag`, OSError (EIO) if the store ignores ranges.

        Args:
            tag: a strong ETag; None for any version. If the client can, it reads no other version.
        """
        self._waiting()
        answers: list[Answer] = []
        fetch = partial(self._noted, self.path(key), tag, answers)
        if len(requests) == 1:
            data = [bytes(fetch(requests)[0]) if requested_size(requests[0]) > 0 else b""]
        else:
            parts = iter(read_merged([r for r in requests if isinstance(r, ByteRange)], fetch))
            data = [bytes(fetch([r])[0]) if isinstance(r, Suffix) else next(parts) for r in requests]
        return data, [None if a.info.get("size") is None else stat_of_info(a.info) for a in answers]

    def _noted(
        self, path: str, tag: str | None, answers: list[Answer], requests: Sequence[ByteRequest]
    ) -> list[bytes | memoryview]:
        """Return the bytes of each request, and add the answers to `answers`."""
        replies = self._fetch(path, requests, tag)
        answers += replies
        return [reply.data for reply in replies]

    def _fetch(self, path: str, requests: Sequence[ByteRequest], tag: str | None) -> list[Answer]:
        """Return the answers to one suffix or any number of ranges, none of which is empty."""
        with store_errors(path):
            answers = self._answers(path, requests, tag)
        self.retry.counters.received(sum(len(answer.data) for answer in answers))
        for answer, request in zip(answers, requests, strict=True):
            _require_part(answer.data, requested_size(request), path)
        return answers

    def _answers(self, path: str, requests: Sequence[ByteRequest], tag: str | None) -> list[Answer]:
        if (client := self._client(path)) is None:
            return self._ask_for(path, requests, tag)
        try:
            if len(requests) == 1:
                return [self.retry.run("read", client.get, path, requests[0], tag)]
            answers = self.retry.run("read", client.get_many, [(path, request, tag) for request in requests])
            return [answer_or_raise(a) for a in answers]
        except UnsuitedError as e:
            answers = self._ask_for(path, requests, tag)
            if any(answer.data for answer in answers) and e.status not in THROTTLED:
                client.give_up(e)
            return answers

    def _ask_for(self, path: str, requests: Sequence[ByteRequest], tag: str | None) -> list[Answer]:
        """Return the answers of fsspec's file system."""
        if len(requests) == 1:
            request = requests[0]
            start, stop = (-request.size, None) if isinstance(request, Suffix) else request
            try:
                data = self.retry.run("read", self.fs.cat_file, path, start=start, end=stop)
            except Exception as e:  # noqa: BLE001 - raised again, but for one
                data = e
            return [Answer(_bytes_or_raise(data), {})]
        paths, (starts, stops) = [path] * len(requests), zip(*requests, strict=True)
        parts = self.retry.run("read", self.fs.cat_ranges, paths, [*starts], [*stops], on_error="return")
        return [Answer(_bytes_or_raise(data), {}) for data in parts]

    def _ask_for_documents(self, directory: str, paths: Sequence[str], limit: int) -> list[bytes | Exception]:
        """Return the first bytes of each object, or the exception that it caused.

        May return more than `limit` bytes.
        """
        if (documents := self._read_documents(paths, limit)) is not None:
            return documents
        starts, stops = [0] * len(paths), [limit + 1] * len(paths)  # without ranges, s3fs asks for each size first
        answers = self.retry.run("documents", self.fs.cat_ranges, list(paths), starts, stops, on_error="return")
        return cast("list[bytes | Exception]", answers)

    def _read_documents(self, paths: Sequence[str], limit: int) -> list[bytes | Exception] | None:
        """Return what `_ask_for_documents` returns, through obstore; None if obstore cannot tell.

        That is so if no request of obstore has succeeded yet, or if an answer is neither the plain range nor a clear
        refusal; and if the server fails, but fsspec's client tries more often.
        """
        clients = [self._client(path) for path in paths]
        client = clients[0] if all(clients) else None
        if client is None:
            return None
        calls = [(path, ByteRange(0, limit + 1), None) for path in paths]
        answers = self.retry.run("documents", client.get_many, calls)
        out: list[bytes | Exception] = []
        for path, answer in zip(paths, answers, strict=True):
            if isinstance(answer, UnsuitedError):
                if not client.proven or answer.status not in (401, 403, 404, 410):
                    return None
                number = errno.EACCES if answer.status in (401, 403) else errno.ENOENT
                out.append(OSError(number, os.strerror(number), path))
            elif isinstance(answer, Answer):
                if answer.encoded:
                    return None
                out.append(bytes(answer.data))
            elif isinstance(answer, ServerError) and (self.client_retries or not client.proven):
                return None
            else:
                out.append(answer)
        return out

    def entry(self, key: str) -> DirEntry:
        info = self._info(key)
        directory = info.get("type") == "directory"
        return DirEntry(key.rsplit("/", 1)[-1], directory, None if directory else stat_of_info(info))

    def scan(self, key: str) -> Iterator[DirEntry]:
        self._waiting()
        path = self.path(key)
        try:
            listed = self.ask("list", path, self.fs.ls, path, detail=True)
        except NOT_FOUND:
            return
        directories = {info["name"].rstrip("/") for info in listed if info.get("type") == "directory"}
        for info in listed:
            directory, name = info.get("type") == "directory", info["name"].rstrip("/").rsplit("/", 1)[-1]
            if info["name"].rstrip("/") == path:
                continue  # some stores list the directory's own marker object
            if not directory and info["name"] in directories:
                continue  # object stores may have both; lookups find the directory
            if name not in ("", ".", "..") and "\0" not in name and not name.startswith(OWN_PREFIX):
                yield DirEntry(name, directory, None if directory or info.get("size") is None else stat_of_info(info))

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        self._waiting()
        paths = [self.path(f"{directory}/{n}" if directory else n) for n in names]
        with store_errors(self.path(directory)):
            got = self._ask_for_documents(self.path(directory), paths, limit)
        self.retry.counters.received(sum(len(data) for data in got if isinstance(data, bytes)))
        out: dict[str, bytes] = {}
        refused: dict[str, PermissionError] = {}
        for name, path, data in zip(names, paths, got, strict=True):
            try:
                with absent_documents(name, path), store_errors(path):
                    out[name] = _bytes_or_raise(data)[: limit + 1]
            except PermissionError as e:
                refused[name] = e
        denied = self._denied_if_missing(refused)
        for name, error in refused.items():
            at_root = not (out or directory or "/" in name)
            if at_root or name not in denied:
                raise error
        return out

    def _denied_if_missing(self, names: Iterable[str]) -> Set[str]:
        """Return those names for which the store denies access also if they do not exist.

        Object stores do so if listing is not permitted, and web servers that hide names which begin with a dot. The
        store is asked once for names of the same kind, which cannot exist.
        """
        if unknown := [name for name in names if name not in self._denied]:
            paths = [self.path(f"{name[0]}{uuid.uuid4().hex}{name.replace('/', '-')}") for name in unknown]
            with store_errors(self.root):
                answers = self._ask_for_documents(self.root, paths, 0)
            for name, path, answer in zip(unknown, paths, answers, strict=True):
                is_denied = False
                try:
                    with suppress(*NOT_FOUND), store_errors(path):
                        _bytes_or_raise(answer)
                except PermissionError:
                    is_denied = True
                self._denied[name] = is_denied
        return {name for name, is_denied in self._denied.items() if is_denied}

    def require_ranges(self, keys: Iterable[str]) -> None:
        pass

    def statvfs(self) -> None:
        return None


@contextmanager
def store_errors(path: str) -> Iterator[None]:
    """Convert the exceptions of store clients to OSError: each client library has its own exceptions.

    Errors of the network become EIO: programs do not expect ECONNRESET or EAGAIN of a file, and an object is not
    missing because its server could not be reached.
    """
    try:
        yield
    except (OSError, ShardfsError) as e:
        if isinstance(e, StoreTimeout) and e.filename is None:
            e.filename = path
        if isinstance(e, PermissionError) and e.filename is None:
            why = e.strerror or str(e) or os.strerror(errno.EACCES)
            raise PermissionError(errno.EACCES, why, path) from e.__cause__ or e
        if isinstance(e, TimeoutError) or errno_of(e) == errno.EIO or not is_transient(e):
            raise
        raise OSError(errno.EIO, f"{type(e).__name__}: {e}", path) from e
    except Exception as e:
        number = errno.EACCES if http_status(e) in (401, 403) else errno.EIO
        raise OSError(number, f"{type(e).__name__}: {e}", path) from e


def _bytes_or_raise(data: bytes | Exception) -> bytes:
    if isinstance(data, Exception):
        if http_status(data) == 416:  # the range begins after the end of the object
            return b""
        raise data
    return data


def answer_or_raise(answer: Answer | BaseException) -> Answer:
    """Return the answer, or raise the exception that stands in its place."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


def requested_size(request: ByteRequest) -> int:
    """Return the number of bytes that are asked for; the object may have fewer."""
    return request.size if isinstance(request, Suffix) else request.stop - request.start


def range_header(request: ByteRequest) -> str:
    """Return the value of the header Range (RFC 9110)."""
    return f"bytes=-{request.size}" if isinstance(request, Suffix) else f"bytes={request.start}-{request.stop - 1}"


def _require_part(data: bytes | memoryview, wanted: int, path: str) -> None:
    if len(data) > wanted:
        why = f"the store ignores byte ranges: {wanted} bytes were asked for, and {len(data)} came"
        raise OSError(errno.EIO, f"{why}; use a store that honours ranges, or a copy of the source", path)


def _mtime_ns(info: Mapping[str, Any]) -> int:
    """Return the modification time from fsspec's `info`; 0 if unknown.

    File systems report seconds, a datetime, an HTTP header or the fields of a zip directory.
    """
    when = info.get("mtime") or info.get("LastModified") or info.get("last_modified") or info.get("created")
    with suppress(ValueError, TypeError):
        if when is None and "Last-Modified" in info:
            from email.utils import parsedate_to_datetime  # this import is slow

            when = parsedate_to_datetime(info["Last-Modified"])
        elif when is None and "date_time" in info:
            when = datetime(*info["date_time"])
    seconds = when.timestamp() if isinstance(when, datetime) else when
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0


def stat_of_info(info: Mapping[str, Any]) -> Stat:
    """Convert fsspec's `info` of an object to a `Stat`. Raise OSError (EIO) if the size is missing."""
    if info.get("size") is None:
        why = "the store does not report the size, without which the object cannot be read; use another kind of store"
        raise OSError(errno.EIO, why, info.get("name"))
    tag = info.get("ETag") or info.get("etag")
    if info.get("generation"):  # the ETags of Google's APIs differ from one another
        tag = generation_tag(info["generation"])
    return tagged(tag, int(info["size"]), _mtime_ns(info))


def generation_tag(generation: str) -> str:
    """Return the ETag that stands for a generation of Google Cloud Storage."""
    return f'"{generation}"'


def tagged(tag: Any, size: int, mtime_ns: int) -> Stat:
    """Return the `Stat` of an object, with the version `(tag, time or None, size)`.

    `tag` is the store's version tag; None if the store has none. A strong tag identifies the version without the time,
    which some stores report differently from request to request. With a weak tag or none, the time is part of the
    version.
    """
    weak = tag is None or str(tag).startswith("W/")
    return Stat(size, mtime_ns, (tag, mtime_ns if weak else None, size))


def strong_tag(stat: Stat) -> str | None:
    """Return the ETag that identifies the object's version.

    None if the ETag is weak or invalid (without quotes), or the store has none.
    """
    tag = stat.version[0] if isinstance(stat.version, tuple) else None
    return tag if isinstance(tag, str) and tag.startswith('"') else None


def same_version(a: Stat, b: Stat) -> bool | None:
    """Return whether two answers are of the same version of an object; None if they leave that open.

    Tags are compared with tags of the same strength. Without strong tags, equal versions have equal times.
    """
    if a.size != b.size:
        return False
    tag, other = _tag(a), _tag(b)
    if tag and other and tag.startswith("W/") == other.startswith("W/"):
        if tag != other:
            return False
        if not tag.startswith("W/"):
            return True
    if not a.mtime_ns or not b.mtime_ns:
        return None
    if a.mtime_ns != b.mtime_ns:
        return False
    return True if tag == other else None


def _tag(stat: Stat) -> str:
    """Return the ETag without quotes, which some listings omit; "" if there is none."""
    tag = stat.version[0] if isinstance(stat.version, tuple) else None
    return "" if tag is None else str(tag).replace('"', "")


SETTLED_S = 60.0
"""Seconds after which an object that changes again gets another time, also in stores that round times."""


def identifies_bytes(stat: Stat) -> bool:
    """Return whether two objects with this version have the same bytes: not if times of changes are unknown or new."""
    _, mtime_ns, _ = cast("tuple[Any, int | None, int]", stat.version)  # see `tagged`
    return mtime_ns is None or 0 < mtime_ns < (time() - SETTLED_S) * 1e9
