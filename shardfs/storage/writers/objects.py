"""Replace whole objects of remote stores with conditional requests, which fail if the object has changed.

Each new object carries a random mark in its metadata. If the answer to a request is lost, or a repeated request is
refused, the mark shows whether the first request succeeded. No request is repeated without that check.
"""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardfs.model.errors import StaleShardError, UnsupportedError
from shardfs.model.write_plan import is_same
from shardfs.storage import syscalls
from shardfs.storage.blob_views import absolute
from shardfs.storage.cache import nothing
from shardfs.storage.remote import store_errors, tagged
from shardfs.storage.writers.common import Begun, Make, PlannedBlob, nobody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.blobs import Blob, ByteRange, ByteRequest, Stat
    from shardfs.storage.remote import FsspecStore

FIRST = 8 << 20
"""Bytes that the first request for an object fetches. Most shards are no larger, so one request fetches them whole."""

PUT_S = 120.0
"""Time-out in seconds of requests that change an object. It is long because they may upload much data."""

MARK = "shardfs-put"
"""The metadata key under which an object stores the mark of the update that made it."""

RACE_S = 60.0
"""Seconds during which an update is retried because another writer was faster."""

PAUSE_S = 0.05
"""Longest pause before an update is retried, in seconds.

The pause is random, so that two writers do not collide again.
"""


ABANDONED_S = 3600.0
"""Age in seconds from which a temporary object belongs to no running writer: all retries of a writer take minutes."""

_TEMPORARY = re.compile(r"\.shardfs-[0-9a-f]{16}\.tmp")


def temporary_path(directory: str) -> str:
    """Return a random path in `directory` for a temporary object."""
    return f"{directory}/.shardfs-{secrets.token_hex(8)}.tmp"


def is_abandoned(path: str, age_s: float) -> bool:
    """Return whether a crashed writer left the object behind."""
    return age_s > ABANDONED_S and _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None


class Changed(Exception):
    """Another writer changed the object after it was read. The request had no effect."""


class Known(NamedTuple):
    """One version of an object.

    Args:
        tag: the store's identifier of the version.
        mark: the random mark of the update that made the version; "" if another program made it.
        facts: metadata that updates preserve, such as the content type.
        age_s: age in seconds when the store answered, by the store's own clock.
        shown: the tag that the store's fsspec file system reports; None if it reports none.
    """

    tag: Any
    size: int
    mtime_ns: int
    mark: str = ""
    facts: Mapping[str, Any] = {}
    age_s: float = 0.0
    shown: str | None = None

    def stat(self) -> Stat:
        """Return the `Stat` that the store's file system would report for this version."""
        return tagged(self.shown, self.size, self.mtime_ns)


class Objects(Protocol):
    """The requests to one kind of store. Paths are those of the store's fsspec file system.

    `conditional`, `removes`: whether the store enforces the conditions of `put` and of `remove`. All methods raise
    OSError for errors of the store. `base` None requires that the object does not exist.
    """

    conditional: bool
    removes: bool

    def head(self, path: str) -> Known | None:
        """Return the current version; None if there is no object."""

    def look(self, path: str, size: int) -> tuple[Known, bytes] | None:
        """Return the current version and its first `size` bytes; None if there is no object."""

    def read(self, path: str, known: Known, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Read byte ranges of the version `known`. Raise Changed if another version has replaced it."""

    def put(self, path: str, base: Known | None, new: PlannedBlob, mark: str, begun: Callable[[str], None]) -> Known:
        """Replace the version `base`. Raise Changed if another version is current.

        `begun` is called before the switch, with the argument for `abandon`.
        """

    def remove(self, path: str, base: Known) -> None:
        """Remove the version `base`. Raise Changed if another version is current; a missing object is no error."""

    def abandon(self, path: str, temp: str) -> None:
        """Remove the remains of an interrupted `put`; `temp` is the argument of its `begun` call.

        `temp` is the id of a multipart upload, or the path of a temporary object.
        """


def cut(r: ByteRange, parts: Iterable[tuple[ByteRange, bytes]]) -> bytes:
    """Return the bytes of a range from the one of `parts` that covers it; empty if none does."""
    for whole, data in parts:
        if whole.start <= r.start and r.stop <= whole.stop:
            return data[r.start - whole.start : r.stop - whole.start]
    return b""


class PinnedBlob:
    """One version of an object. Reading raises Changed if another version has replaced it."""

    __slots__ = ("__weakref__", "_first", "_objects", "_path", "base", "fd", "known")

    def __init__(self, objects: Objects, path: str, known: Known, first: bytes) -> None:
        self.fd, self.base = -1, 0
        self._objects, self._path, self.known, self._first = objects, path, known, first

    def stat(self) -> Stat:
        return self.known.stat()

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        wanted = [absolute(r, self.known.size) for r in requests]
        far = [r for r in wanted if r.stop > len(self._first)]
        rest = iter(self._objects.read(self._path, self.known, far) if far else ())
        return [next(rest) if r.stop > len(self._first) else self._first[r.start : r.stop] for r in wanted]


def put_once(
    objects: Objects, path: str, base: Known | None, new: PlannedBlob, begun: Callable[[str], None] = nobody
) -> Known:
    """Replace `base`, even if answers get lost.

    Raise Changed, or OSError if the change has not happened or is not confirmed.
    """
    mark = secrets.token_hex(8)
    try:
        return objects.put(path, base, new, mark, begun)
    except (Changed, OSError) as e:
        known = _after(e, objects, path)
        if known is not None and known.mark == mark:
            return known
        raise


def remove_once(objects: Objects, path: str, base: Known) -> None:
    """Remove `base`, even if answers get lost.

    Raise Changed if another version is current, OSError if `base` may still exist.
    """
    try:
        objects.remove(path, base)
    except (Changed, OSError) as e:
        if _after(e, objects, path) is not None:
            raise


def _after(failure: Changed | OSError, objects: Objects, path: str) -> Known | None:
    """Return the current version after a request failed; None if there is no object.

    The store may have executed the request although its answer got lost. Or the client library repeated the request,
    and the store refused the repetition. Raise OSError if the store does not answer: then `Changed` is not certain.
    """
    try:
        return objects.head(path)
    except OSError as e:
        raise (failure if isinstance(failure, OSError) else e) from failure


class ObjectWriter:
    """Changes the objects of `store` through the requests of `objects`; see `Writer`. `close` calls `unlock`."""

    local = False

    def __init__(
        self, store: FsspecStore, objects: Objects, unlock: Callable[[], None] = nothing, *, race_s: float = RACE_S
    ) -> None:
        self._store, self._objects, self._unlock, self._race_s = store, objects, unlock, race_s

    @property
    def conditional(self) -> bool:
        return self._objects.conditional

    def update(
        self,
        key: str,
        make: Make,
        begun: Callable[[Begun], None] = nobody,
        check: Callable[[Blob], None] = nobody,
        in_place: int = 0,
    ) -> Stat | None:
        path, deadline = self._path(key), time.monotonic() + self._race_s
        try:
            while True:
                try:
                    return self._attempt(key, path, make, begun, check)
                except Changed:
                    if time.monotonic() > deadline:
                        raise StaleShardError(f"{key}: others do not stop replacing it") from None
                    time.sleep(random.uniform(0.0, PAUSE_S))
        finally:
            self._store.reopen(key)

    def _attempt(
        self, key: str, path: str, make: Make, begun: Callable[[Begun], None], check: Callable[[Blob], None]
    ) -> Stat | None:
        found = self._objects.look(path, FIRST)
        old = None if found is None else PinnedBlob(self._objects, path, *found)
        plan, base = make(old), None if old is None else old.known
        tag, size = (None, None) if base is None else (base.tag, base.size)
        if is_same(plan, size):
            return None if base is None else base.stat()
        if plan is None and base is not None:
            begun(Begun(key, tag))
            remove_once(self._objects, path, base)
            return None
        new = PlannedBlob(plan or [], old)
        check(new)
        return put_once(self._objects, path, base, new, lambda temp: begun(Begun(key, tag, temp))).stat()

    def recover(self, begun: Begun) -> None:
        if begun.temp:
            self._objects.abandon(self._path(begun.key), begun.temp)

    def require_writable(self, key: str) -> None:
        """Nothing to do: only an attempt shows whether the store permits a write."""

    def recovered(self) -> None:
        """Nothing to do: before `begun`, an update creates no object, at most an incomplete multipart upload."""

    def close(self) -> None:
        unlock, self._unlock = self._unlock, nothing
        unlock()

    def put(self, key: str, data: bytes) -> Stat:
        new = self.update(key, lambda _: [data])
        if new is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return new

    def delete(self, key: str) -> None:
        path, found = self._path(key), []

        def gone(old: Blob | None) -> None:
            found.append(old is not None)

        self.update(key, gone)
        if not any(found):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def make_directory(self, key: str, mode: int | None = None) -> None:
        """Nothing to do: in an object store, a directory exists while an object is below it."""

    def sync_directory(self, key: str) -> None:
        """Nothing to do: an acknowledged change of an object store is durable."""

    def remove_directory(self, key: str) -> None:
        if next(iter(self._store.scan(key)), None) is not None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), key)

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        """Copy the object, then delete the old one. Raise OSError (EXDEV) for directories.

        This is not atomic. Another client may see both objects, or find neither with two separate look-ups.
        """
        source, target = self._path(old), self._path(new)
        if self._store.entry(old).directory:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)
        if noreplace and self._objects.head(target) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        run = self._store.patience.run
        with store_errors(source):
            syscalls.call("copy_object", run, "copy", self._store.fs.cp_file, source, target)
        self._store.reopen(new)
        self.delete(old)

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        raise UnsupportedError("objects of a remote store are no files")

    def stat(self, key: str, *, follow: bool = True) -> os.stat_result:
        raise UnsupportedError("objects of a remote store are no files")

    def set_mode(self, key: str, mode: int) -> None:
        raise UnsupportedError("objects of a remote store have no mode")

    def set_times(self, key: str, mtime_ns: int, *, follow: bool = True) -> None:
        raise UnsupportedError("objects of a remote store have times of their own")

    def make_link(self, key: str, target: str) -> None:
        raise UnsupportedError("a remote store has no symbolic links")

    def link_target(self, key: str) -> str | None:
        return None

    def links(self, key: str) -> dict[str, str]:
        return {}

    def copy(self, fd: int, key: str) -> None:
        raise UnsupportedError("objects of a remote store are no files")

    def named(self, key: str, *, follow: bool = True) -> AbstractContextManager[int]:
        raise UnsupportedError("objects of a remote store are no files")

    def _path(self, key: str) -> str:
        if (key and {"", ".", ".."} & set(key.split("/"))) or "\0" in key:
            raise PermissionError(errno.EACCES, "is no path in the source", key)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), key) from None
        return self._store.path(key)
