"""What all writers share: their interface, names of temporary files, and blobs of planned objects."""

from __future__ import annotations

import errno
import random
import re
import secrets
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, cast

from shardfs.model.blobs import ByteRange, FilePart, Stat, read_file
from shardfs.model.changes import Whole
from shardfs.model.errors import StaleShardError, UnsupportedError
from shardfs.model.write_plan import piece_size
from shardfs.storage.blob_views import absolute

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.blobs import Blob, ByteRequest, Content, Piece, Plan
    from shardfs.model.changes import Begun, Change


AT_A_TIME = 16
"""Objects that `create` writes at the same time: disks and stores take much longer for one than for one of many."""


def nobody(_: object) -> None:
    """Ignore the argument: the default of optional callbacks."""


class Writer(Protocol):
    """Changes the objects of one store. Thread-safe. Keys are paths in the store.

    The methods with a body here are those of a store whose objects are no files.

    `local`: the objects are files of this machine.
    `pins`: shardfs reads a chunk only from the version of the shard whose index it has read.
    """

    @property
    def pins(self) -> bool:
        return False

    @property
    def local(self) -> bool: ...

    def update(self, key: str, change: Change) -> Stat | None:
        """Replace the object `key` atomically; return its new `Stat`, None if it was removed.

        Raise StaleShardError if other writers keep changing the object, OSError for errors of the store. After an error
        the object is unchanged, unless the store failed after the switch. A repeated update detects that case.
        """

    def require_writable(self, key: str) -> None:
        """Raise OSError if every `update` of this object is certain to fail, such as for a write-protected file.

        Only an attempt shows whether a remote store permits a write.
        """
        return

    def recover(self, begun: Begun) -> None:
        """Clean up after an interrupted update: finish or undo its switch, and remove its temporary data."""

    def recovered(self) -> None:
        """Declare that `recover` was called for every begun update. Remaining temporary files may now be removed."""
        return

    def close(self) -> None:
        """Release the source for other writable mounts. Afterwards only `close` may be called again."""
        return

    def create(self, files: Sequence[tuple[str, Content]]) -> None:
        """Write objects that no other program uses yet, several at a time. All are on disk when this returns.

        Before that, an object may be incomplete. Objects that exist are overwritten; two writers of the same bytes do
        not disturb each other.
        """
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for _ in pool.map(self._create, files):
                pass

    def _create(self, file: tuple[str, Content]) -> None:
        key, content = file
        self.update(key, Whole(content, first=None))

    def put(self, key: str, data: bytes) -> Stat:
        """Replace or create the object without regard to its current version."""
        return cast("Stat", self.update(key, Whole(data)))

    def delete(self, key: str) -> None:
        """Remove the object. Raise FileNotFoundError if it does not exist."""

    def make_directory(self, key: str, mode: int | None = None) -> None:
        """Create a directory. `mode` None applies the umask.

        In an object store, a directory exists while an object is below it.

        Raise FileExistsError if the name exists, FileNotFoundError if the parent directory does not.
        """
        return

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory. Raise OSError (ENOTEMPTY) if it has entries."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or a directory with its contents.

        On a local disk, raise PermissionError for a symbolic link.
        """

    def sync_directory(self, key: str) -> None:
        """Flush a directory: names created, renamed or removed in it survive a power failure after the return.

        An acknowledged change of an object store is durable.
        """
        return

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        """Return a descriptor, as `os.open` does, but with exactly this `mode` whatever the umask is."""
        raise _only_local(key)

    def stat(self, key: str) -> os.stat_result:
        """Return the attributes of a file or directory."""
        raise _only_local(key)

    def set_mode(self, key: str, mode: int) -> None:
        """Set the permission bits of a file or directory."""
        raise _only_local(key)

    def set_times(self, key: str, mtime_ns: int) -> None:
        """Set the modification time of a file or directory."""
        raise _only_local(key)

    def require_own_name(self, key: str) -> None:
        """Raise OSError (EROFS) if `key` is below a symbolic link to a directory, so that its file has another name."""
        return

    def copy(self, fd: int, key: str) -> None:
        """Create a file with the bytes, mode, times and extended attributes of the open file `fd`.

        Raise FileExistsError.
        """
        raise _only_local(key)

    def named(self, key: str) -> AbstractContextManager[int]:
        """Open a file or directory with O_PATH (open(2)): to call `fstat`, or to use its path in /proc/self/fd."""
        raise _only_local(key)


def _only_local(key: str) -> UnsupportedError:
    why = "an object of a remote store has no descriptor, mode or owner of its own"
    return UnsupportedError(f"{key}: {why}; use a local copy of the source for this")


class Changed(Exception):
    """Another writer changed the object after it was read. The attempt to change it had no effect."""


def repeated(key: str, race_s: float, attempt: Callable[[], Stat | None], pause_s: float = 0.0) -> Stat | None:
    """Return the result of `attempt`, which is called again while it raises Changed.

    Raise StaleShardError after `race_s` seconds. A random pause of at most `pause_s` seconds follows each attempt, so
    that two writers do not collide again.
    """
    deadline = time.monotonic() + race_s
    while True:
        try:
            return attempt()
        except Changed:
            if time.monotonic() > deadline:
                why = f"other writers kept replacing it for {race_s:g} s; try again when they have ended"
                raise StaleShardError(f"{key}: {why}") from None
        time.sleep(random.uniform(0.0, pause_s))


def require_inside(key: str) -> None:
    """Raise PermissionError if a key has parts such as `..`, which could lead out of the source."""
    if (key and {"", ".", ".."} & set(key.split("/"))) or "\0" in key:
        raise PermissionError(errno.EACCES, "is not the path of a file in the source; remove `.`, `..` and `//`", key)


_TEMPORARY = re.compile(r"\.shardfs-[0-9a-f]{16}\.tmp")


def temporary_name() -> str:
    """Return a random name for a temporary file or object."""
    return f".shardfs-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether the name is one of `temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None


def part_of(piece: Piece, start: int, stop: int) -> Piece:
    """Return bytes `[start, stop)` of a piece, without reading them."""
    if isinstance(piece, ByteRange):
        return ByteRange(piece.start + start, piece.start + stop)
    if isinstance(piece, FilePart):
        return FilePart(piece.fd, piece.start + start, stop - start)
    return memoryview(piece)[start:stop]


class PlannedBlob:
    """The content that a plan makes of an old object, readable before it is written. Holds only the plan in memory."""

    __slots__ = ("__weakref__", "_old", "_stops", "base", "fd", "plan")

    def __init__(self, plan: Plan, old: Blob | None) -> None:
        self.fd, self.base = -1, 0
        self.plan, self._old = plan, old
        self._stops = list(accumulate(map(piece_size, plan)))

    @property
    def size(self) -> int:
        return self._stops[-1] if self._stops else 0

    def stat(self) -> Stat:
        return Stat(self.size, 0, None)

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return [self.bytes(self._between(absolute(r, self.size))) for r in requests]

    def _between(self, wanted: ByteRange) -> Plan:
        out = []
        for i in range(bisect_right(self._stops, wanted.start), len(self.plan)):
            begin = self._stops[i] - piece_size(self.plan[i])
            if begin >= wanted.stop:
                break
            out.append(part_of(self.plan[i], max(wanted.start - begin, 0), min(wanted.stop, self._stops[i]) - begin))
        return out

    def bytes(self, plan: Plan) -> bytes:
        """Return all bytes of a plan. The ranges of the old object are read with one call."""
        ranges = [piece for piece in plan if isinstance(piece, ByteRange)]
        old = iter(self._old.read(ranges) if self._old is not None and ranges else ())
        joined = []
        for piece in plan:
            if isinstance(piece, ByteRange):
                data: bytes | memoryview = next(old)
            elif isinstance(piece, FilePart):
                data = read_file(piece.fd, piece.size, piece.start)
            else:
                data = piece
            if len(data) != piece_size(piece):
                raise OSError(errno.EIO, f"{piece_size(piece)} bytes were expected, but only {len(data)} are there")
            joined.append(data)
        return b"".join(joined)
