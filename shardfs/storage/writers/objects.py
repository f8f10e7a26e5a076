"""Replace whole objects of remote stores with conditional requests, which fail if the object has changed.

Each new object carries a random mark in its metadata. If the answer to a request is lost, or a repeated request is
refused, the mark shows whether the first request succeeded. No request is repeated without that check.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardfs.model.blobs import ByteRange, Suffix, absolute
from shardfs.model.changes import FIRST, UNREAD, Begun, Removal
from shardfs.model.write_plan import is_same
from shardfs.storage import syscalls
from shardfs.storage.byte_budget import ByteBudget
from shardfs.storage.cache import nothing
from shardfs.storage.remote import store_errors, tagged
from shardfs.storage.retry import RetryPolicy, http_status
from shardfs.storage.store import read_merged
from shardfs.storage.writers.names import is_temporary, require_inside
from shardfs.storage.writers.planned_blob import PlannedBlob
from shardfs.storage.writers.writer import Changed, Writer, repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    from shardfs.model.blobs import ByteRequest, Stat
    from shardfs.model.changes import Change
    from shardfs.storage.remote import FsspecStore

PUT_S = 120.0
"""Time-out in seconds of requests that change an object. It is long because they may upload much data."""

MARK = "shardfs-put"
"""The metadata key under which an object stores the mark of the update that made it."""

RACE_S = 60.0
"""Seconds during which an update is retried because another writer was faster."""

PAUSE_S = 0.05
"""Longest pause in seconds before an update is retried."""

MOST_HELD = 256 << 20
"""Bytes of memory for all uploads that a writer sends at the same time. One larger upload is sent alone."""

ABANDONED_S = 3600.0
"""Age in seconds from which a temporary object belongs to no running writer: all retries of a writer take minutes."""


def is_abandoned(path: str, age_s: float) -> bool:
    """Return whether an object of this age in seconds is a temporary one that a crashed writer has left behind."""
    return age_s > ABANDONED_S and is_temporary(path.rpartition("/")[2])


class ObjectVersion(NamedTuple):
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


@contextmanager
def conditional_errors(path: str) -> Iterator[None]:
    """Convert the exceptions of a client within a block to OSError, and refused conditions to Changed."""
    try:
        with store_errors(path):
            yield
    except OSError as e:
        # 412: another version; 409: a concurrent update. gcsfs raises FileExistsError for 412.
        if isinstance(e, FileExistsError) or http_status(e.__cause__ or e) in (409, 412):
            raise Changed from e
        raise


class Requests:
    """Sends the requests of a writer with time-outs and retries. All methods raise OSError or Changed.

    Args:
        errors: a context manager that converts the client's exceptions; gets the path.

    Attributes:
        reading, writing: the policies for both kinds of requests; only the time-out differs.
    """

    def __init__(
        self, store: FsspecStore, errors: Callable[[str], AbstractContextManager[None]] = conditional_errors
    ) -> None:
        self.reading = store.retry
        self._errors = errors
        self.writing = RetryPolicy(max(PUT_S, self.reading.timeout_s), self.reading.retries)
        self.writing.counters = self.reading.counters

    def ask(self, kind: str, path: str, method: Callable[..., Any], *args: Any, **words: Any) -> Any:
        """Send a request that changes nothing, and return what `method` returns. `kind` is for the counters."""
        with self._errors(path):
            return self.reading.run(kind, method, *args, **words)

    def change(self, name: str, path: str, method: Callable[..., Any], *args: Any, **words: Any) -> Any:
        """Send a request that changes the store, and return what `method` returns.

        Tests know the request by its `name`.
        """
        with self._errors(path):
            return syscalls.call(name, partial(self.writing.run, "write", method, *args, **words))


class Upload(NamedTuple):
    """A new version of an object.

    Args:
        content: the bytes.
        mark: see `ObjectVersion`.
        on_switch: to be called before the request that switches versions, with the argument for `Objects.abandon`.
    """

    content: PlannedBlob
    mark: str
    on_switch: Callable[[str], None]

    def whole(self) -> bytes:
        """Return all bytes, for a single request that switches versions and is sent next."""
        data = self.content.bytes(self.content.plan)
        self.on_switch("")
        return data


class Objects(Protocol):
    """The requests to one kind of store. Paths are those of the store's fsspec file system.

    All methods raise OSError for errors of the store. `base` None requires that the object does not exist.

    Attributes:
        conditional, removes: whether the store enforces the conditions of `put` and of `remove`.
        pins: see `Writer`.
        private: no other process can change the store.
    """

    conditional: bool = True
    removes: bool = True
    pins: bool = False
    private: bool = False

    def prepare(self, root: str, *, alone: bool) -> None:
        """Find out what the store can do, if that is not known.

        `root` is the path of the source. `alone`: no other program changes the objects, so no conditions are needed.

        Raise UnsupportedError if the store cannot be written, OSError if it gives no definite answer.
        """
        return

    def head(self, path: str) -> ObjectVersion | None:
        """Return the current version; None if there is no object."""
        with suppress(FileNotFoundError):
            return self._head(path)
        return None

    def _head(self, path: str) -> ObjectVersion:
        """Return the current version. Raise FileNotFoundError if there is no object."""

    def look(self, path: str, part: ByteRequest) -> tuple[ObjectVersion, bytes] | None:
        """Return the current version and a part of it, with one request if possible; None if there is no object.

        The part begins in the object, or is at its end.
        """
        version = self.head(path)
        if version is None:
            return None
        return version, self.read(path, version, [absolute(part, version.size)])[0] if version.size else b""

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return byte ranges, none of which is empty, of this version, in their order.

        Raise Changed if another version has replaced it.
        """

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        """Replace the version `base`; return the new one. Raise Changed if another version is current.

        The change may have happened even if this raises: see `put_once`.
        """

    def held(self, size: int) -> int:
        """Return the bytes of memory that `put` needs for an object of `size` bytes."""
        return 2 * size

    def remove(self, path: str, base: ObjectVersion) -> None:
        """Remove the version `base`. Raise Changed if another version is current; FileNotFoundError if none is.

        The change may have happened even if this raises: see `remove_once`.
        """

    def abandon(self, path: str, temp: str) -> None:
        """Remove the remains of an interrupted `put`; `temp` is the argument of its call of `Upload.on_switch`.

        `temp` is the id of a multipart upload, or the path of a temporary object.
        """
        return


def require_version(objects: Objects, path: str, base: ObjectVersion | None) -> None:
    """Raise Changed unless `base` is the current version; None: unless there is no object.

    A change after this comparison goes unnoticed.
    """
    current = objects.head(path)
    if (None if current is None else current.tag) != (None if base is None else base.tag):
        raise Changed


def age_s(date: str | None, modified: datetime) -> float:
    """Return the age in seconds when the store answered. `date` is the answer's header; without one, the age is 0."""
    return (parsedate_to_datetime(date) - modified).total_seconds() if date else 0.0


class PinnedBlob:
    """One version of an object. Reading raises Changed if another version has replaced it.

    Args:
        first, data: the part of the object that is known, and its bytes; they are not read again.
    """

    __slots__ = ("__weakref__", "_data", "_objects", "_path", "_start", "fd", "file_offset", "version")

    def __init__(self, objects: Objects, path: str, version: ObjectVersion, first: ByteRequest, data: bytes) -> None:
        self.fd = -1
        self.file_offset = 0
        self._objects = objects
        self._path = path
        self.version = version
        self._data = data
        self._start = version.size - len(data) if isinstance(first, Suffix) else first.start

    def stat(self) -> Stat:
        return self.version.stat()

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        wanted = [absolute(r, self.version.size) for r in requests]
        far = [r for r in wanted if not self._has(r)]
        answers = iter(read_merged(far, lambda merged: self._objects.read(self._path, self.version, merged)))
        return [
            self._data[r.start - self._start : r.stop - self._start] if self._has(r) else next(answers) for r in wanted
        ]

    def _has(self, part: ByteRange) -> bool:
        return self._start <= part.start and part.stop <= self._start + len(self._data)


def put_once(
    objects: Objects,
    path: str,
    base: ObjectVersion | None,
    new: PlannedBlob,
    on_switch: Callable[[str], None] = lambda _: None,
) -> ObjectVersion:
    """Replace `base` and return the new version, even if answers get lost. Arguments as of `Objects.put` and `Upload`.

    Raise Changed if another version is current, OSError if the change has not happened or is not confirmed.
    """
    mark = secrets.token_hex(8)
    try:
        return objects.put(path, base, Upload(new, mark, on_switch))
    except (Changed, OSError) as e:
        current = _after(e, objects, path)
        if current is not None and current.mark == mark:
            return current
        raise


def remove_once(objects: Objects, path: str, base: ObjectVersion) -> None:
    """Remove `base`, even if answers get lost.

    Raise Changed if another version is current, OSError if `base` may still exist.
    """
    try:
        with suppress(FileNotFoundError):
            objects.remove(path, base)
    except (Changed, OSError) as e:
        if _after(e, objects, path) is not None:
            raise


def _after(failure: Changed | OSError, objects: Objects, path: str) -> ObjectVersion | None:
    """Return the current version after a request failed; None if there is no object.

    The store may have executed the request although its answer got lost. Or the client library repeated the request,
    and the store refused the repetition. Raise OSError if the store does not answer: then `Changed` is not certain.
    """
    try:
        return objects.head(path)
    except OSError as e:
        raise (failure if isinstance(failure, OSError) else e) from failure


class ObjectWriter(Writer):
    """Changes the objects of `store` through the requests of `objects`; see `Writer`.

    Args:
        unlock: called once, by `close`.
        race_s: seconds during which an update is retried because another writer was faster.
    """

    local = False

    def __init__(
        self, store: FsspecStore, objects: Objects, unlock: Callable[[], None] = nothing, *, race_s: float = RACE_S
    ) -> None:
        self._store = store
        self._objects = objects
        self._unlock = unlock
        self._race_s = race_s
        self._uploads = ByteBudget(MOST_HELD, nothing)

    @property
    def pins(self) -> bool:
        return self._objects.pins and self._objects.conditional

    def update(self, key: str, change: Change) -> Stat | None:
        first = change.first
        later = UNREAD if first == UNREAD else FIRST  # an expectation that proves wrong is given up
        parts = chain([first], repeat(later))
        try:
            return repeated(key, self._race_s, lambda: self._attempt(key, change, next(parts)), PAUSE_S)
        finally:
            self._store.reopen(key)

    def _attempt(self, key: str, change: Change, first: ByteRequest | None) -> Stat | None:
        path = self._path(key)
        old = None if first is None else self._pinned(path, first)
        plan, base = change.plan(old), None if old is None else old.version
        tag, size = (None, None) if base is None else (base.tag, base.size)
        if is_same(plan, size):
            return None if base is None else base.stat()
        if plan is None and base is not None:
            change.begun(Begun(key, tag))
            remove_once(self._objects, path, base)
            return None
        new = PlannedBlob(plan or [], old)
        change.verify(new)
        with self._uploads.taken(self._objects.held(new.size)):
            return put_once(self._objects, path, base, new, lambda temp: change.begun(Begun(key, tag, temp))).stat()

    def _pinned(self, path: str, first: ByteRequest) -> PinnedBlob | None:
        if first == UNREAD:
            version = self._objects.head(path)
            return None if version is None else PinnedBlob(self._objects, path, version, first, b"")
        answer = self._objects.look(path, first)
        return None if answer is None else PinnedBlob(self._objects, path, answer[0], first, answer[1])

    def recover(self, note: Begun) -> None:
        if note.temp:
            self._objects.abandon(self._path(note.key), note.temp)

    def close(self) -> None:
        unlock = self._unlock
        self._unlock = nothing
        unlock()

    def delete(self, key: str) -> None:
        removal = Removal()
        self.update(key, removal)
        if not removal.existed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path(key))

    def remove_directory(self, key: str) -> None:
        if next(iter(self._store.scan(key)), None) is not None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), key)

    def rename(self, old: str, new: str) -> None:
        """Copy the object, then delete the old one. Raise OSError (EXDEV) for directories.

        This is not atomic. Another client may see both objects, or find neither with two separate look-ups.
        """
        source, target = self._path(old), self._path(new)
        if self._store.entry(old).directory:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)
        run = self._store.retry.run
        with store_errors(source):
            syscalls.call("copy_object", run, "copy", self._store.fs.cp_file, source, target)
        self._store.reopen(new)
        self.delete(old)

    def _path(self, key: str) -> str:
        require_inside(key)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), key) from None
        return self._store.path(key)
