"""Objects of remote stores replaced as a whole, by conditional requests: only if they still are what was looked at.

Each new object carries a mark that is drawn for it. If the answer to the request that made it is lost, or the request
was sent twice and the second one refused, the mark tells whether it is there: nothing is repeated blindly.
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
"""Bytes of an object that come with the first look at it: most shards are no larger, and then that is all of it."""

PUT_S = 120.0
"""How long a request may take that changes something, in seconds: it may have much to send."""

MARK = "shardfs-put"
"""Under this name an object's metadata tells which update made it."""

RACE_S = 60.0
"""How long an update begins anew whenever somebody else was faster, in seconds."""

PAUSE_S = 0.05
"""At most, before it begins anew, in seconds: two that are equally fast must not stay so."""


ABANDONED_S = 3600.0
"""Age in seconds from which a temporary object belongs to no running writer: all retries of a writer take minutes."""

_TEMPORARY = re.compile(r"\.shardfs-[0-9a-f]{16}\.tmp")


def temporary_path(directory: str) -> str:
    """Return a path in `directory` that no other object ever had."""
    return f"{directory}/.shardfs-{secrets.token_hex(8)}.tmp"


def is_abandoned(path: str, age_s: float) -> bool:
    """Return whether a crashed writer left the object behind."""
    return age_s > ABANDONED_S and _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None


class Changed(Exception):
    """The object is not what it was when it was looked at: nothing has been done."""


class Known(NamedTuple):
    """One version of an object.

    Args:
        tag: what the store tells versions apart by.
        mark: what a writer of ours has drawn for it; "" if it is somebody else's.
        facts: what else belongs to it and is kept: its content type, for instance.
        age_s: how old it was when this was told, by the store's own clock, in seconds.
        shown: the tag by which the store's file system knows it, if it does.
    """

    tag: Any
    size: int
    mtime_ns: int
    mark: str = ""
    facts: Mapping[str, Any] = {}
    age_s: float = 0.0
    shown: str | None = None

    def stat(self) -> Stat:
        """As the store says it."""
        return tagged(self.shown, self.size, self.mtime_ns)


class Objects(Protocol):
    """The requests of one kind of store. Keys are as the store's file system knows them.

    `conditional`, `removes`: whether the conditions of `put`, of `remove` hold. All raise OSError for what the store
    says; `base` None means "if there is none".
    """

    conditional: bool
    removes: bool

    def head(self, path: str) -> Known | None:
        """What is there now; None if nothing."""

    def look(self, path: str, size: int) -> tuple[Known, bytes] | None:
        """The same, and its first `size` bytes."""

    def read(self, path: str, known: Known, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Raise Changed if it is another version by now."""

    def put(self, path: str, base: Known | None, new: PlannedBlob, mark: str, begun: Callable[[str], None]) -> Known:
        """Raise Changed. `begun` is called before the switch, with what `abandon` needs."""

    def remove(self, path: str, base: Known) -> None:
        """Raise Changed. It is no error if it is gone."""

    def abandon(self, path: str, temp: str) -> None:
        """Remove what `begun` was given of an update that has not ended: an upload in parts, or a temporary object."""


def cut(r: ByteRange, parts: Iterable[tuple[ByteRange, bytes]]) -> bytes:
    """The bytes of a range out of those of ranges that cover it."""
    for whole, data in parts:
        if whole.start <= r.start and r.stop <= whole.stop:
            return data[r.start - whole.start : r.stop - whole.start]
    return b""


class PinnedBlob:
    """One version of an object; raises Changed if another one is there by now."""

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
    """Replace `base`, also if answers get lost on the way. Raise Changed, or OSError if it has not happened (yet)."""
    mark = secrets.token_hex(8)
    try:
        return objects.put(path, base, new, mark, begun)
    except (Changed, OSError) as e:
        known = _after(e, objects, path)
        if known is not None and known.mark == mark:
            return known
        raise


def remove_once(objects: Objects, path: str, base: Known) -> None:
    """Remove `base`, even if answers get lost. Raise Changed if another version is there, OSError if `base` may be."""
    try:
        objects.remove(path, base)
    except (Changed, OSError) as e:
        if _after(e, objects, path) is not None:
            raise


def _after(failure: Changed | OSError, objects: Objects, path: str) -> Known | None:
    """Return what is there after a request failed.

    The store may have done it and the answer got lost, or a client library repeated it and the store refused the
    repetition. Raise OSError if the store does not say what is there: then `Changed` is not certain.
    """
    try:
        return objects.head(path)
    except OSError as e:
        raise (failure if isinstance(failure, OSError) else e) from failure


class ObjectWriter:
    """Changes the objects of `store` by the requests `objects`; see `Writer`. `unlock` is called by `close`."""

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
        """Nothing to do: what a store lets us write shows when it is asked to."""

    def recovered(self) -> None:
        """Nothing to do: what had not begun was nothing but requests."""

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
        """Nothing to do: a directory is there as long as something is in it."""

    def sync_directory(self, key: str) -> None:
        """Nothing is to be done: what a store has said that it has, it has."""

    def remove_directory(self, key: str) -> None:
        if next(iter(self._store.scan(key)), None) is not None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), key)

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        """A copy and a removal: others see both, or neither if they look between. Directories: EXDEV."""
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
