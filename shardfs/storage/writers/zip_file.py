"""Write a new zip file without compression. It gets its name when it is complete and on disk."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from zipfile import ZipFile, ZipInfo

from shardfs.model.blobs import Stat
from shardfs.model.errors import BusyError
from shardfs.model.write_plan import chunks_of, size_of
from shardfs.storage import syscalls
from shardfs.storage.store import OWN
from shardfs.storage.writers.files import DIRECTORY, ObjectPlace, identity_at
from shardfs.storage.writers.names import require_inside
from shardfs.storage.writers.replace import name_new
from shardfs.storage.writers.writer import NewObjects

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Plan
    from shardfs.model.changes import Change

_MODE = 0o100644 << 16
"""Mode of extracted files, in the attributes of an entry."""

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
"""The records at the end: APPNOTE.TXT of PKWARE, sections 4.3.14 to 4.3.16."""


class ZipWriter(NewObjects):
    """Appends objects to a new zip file at `path`. Existing objects cannot be changed.

    The file has a temporary name beside `path` until `commit`. What an interrupted process has left under this name is
    written anew. The directory at its end needs memory until then, about 400 bytes for each object.

    Raise FileExistsError if `path` exists, BusyError if another process writes this zip file.
    """

    local = True

    def __init__(self, path: str) -> None:
        directory, name = os.path.split(os.path.abspath(path))
        os.makedirs(directory, exist_ok=True)
        self._place = ObjectPlace(path, syscalls.open(directory, DIRECTORY), name)
        self._temp = f"{OWN}-{name}.tmp"
        self._named = False
        self._lock = threading.Lock()
        try:
            self._file = _Appended(_opened(self._place, self._temp))
        except BaseException:
            os.close(self._place.at)
            raise
        self._zip = ZipFile(self._file, "w")  # type: ignore[call-overload]
        self._time = time.localtime()[:6]
        self._broken = False
        if os.path.lexists(path):
            self.close()
            raise FileExistsError(errno.EEXIST, "exists already; give a new name, or remove it", path)

    def update(self, key: str, change: Change) -> Stat | None:
        """Append an object. After the first error, only call `plan`: the zip file cannot be completed any more."""
        plan = change.plan(None)
        if plan is None:
            return None
        require_inside(key)
        with self._lock:
            if not self._broken:
                self._append(key, plan)
        return Stat(size_of(plan), 0, None)

    def _append(self, key: str, plan: Plan) -> None:
        if key in self._zip.NameToInfo:
            raise FileExistsError(errno.EEXIST, "is in the zip file already", key)
        entry = ZipInfo(key, self._time)
        entry.external_attr = _MODE
        self._broken = True
        try:
            with self._zip.open(entry, "w", force_zip64=True) as content:
                for part in chunks_of(plan, None):
                    content.write(part)
        except UnicodeEncodeError:
            raise OSError(errno.EILSEQ, "has a name that is not UTF-8, which zip files need; rename it", key) from None
        self._broken = False

    def commit(
        self,
        comment: bytes,
        order: Callable[[str], tuple[bool, int, str]],
        complete: Callable[[os.stat_result], object] = bool,
    ) -> None:
        """Complete the zip file, sync it, and give it its name.

        Args:
            comment: the comment of the whole file.
            order: sort key of the objects' names in the directory at the end of the file.
            complete: called with the attributes of the file when the file is complete and has no name yet.

        Raise FileExistsError if another program has made a file with this name.
        """
        if self._broken:
            raise OSError(errno.EIO, "cannot be completed, because an object could not be written", self._place.key)
        self._zip.infolist().sort(key=lambda entry: order(entry.filename))
        self._zip.comment = comment
        self._zip.close()
        self._add_zip64_end(len(comment))
        syscalls.fsync(self._file.fd)
        complete(os.fstat(self._file.fd))
        name_new(self._place, self._temp)
        self._named = True
        syscalls.fsync_directory(self._place.at)

    def _add_zip64_end(self, comment: int) -> None:
        """Add the end record of ZIP64, which `ZipFile` writes only for large files. RFC-9 of OME-Zarr recommends it."""
        end = self._file.tell() - _END.size - comment
        tail = os.pread(self._file.fd, _END.size + comment, end)
        n, size, start = _END.unpack_from(tail)[4:7]
        if end != start + size:  # the record is there
            return
        record = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, n, n, size, start)
        syscalls.pwrite_all(self._file.fd, record + _END64_LOCATOR.pack(b"PK\6\7", 0, end, 1) + tail, end)

    def close(self) -> None:
        """Remove the zip file unless it is complete."""
        if self._file.fd < 0:
            return
        if not self._named:
            with suppress(OSError):
                syscalls.unlink(self._temp, self._place.at)
        os.close(self._file.fd)
        os.close(self._place.at)
        self._file.fd = -1


def _opened(place: ObjectPlace, temp: str) -> int:
    """Open and empty the temporary file. Its lock ends with the process. Raise BusyError if another process has it."""
    while True:
        fd = syscalls.open(temp, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, place.at)
        try:
            _lock(fd, place.key)
            named = identity_at(temp, place.at)
            if named is not None and named[0] == os.fstat(fd).st_ino:  # else another process has just renamed the file
                syscalls.ftruncate(fd, 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: str) -> None:
    try:
        syscalls.lock(fd)
    except BlockingIOError:
        raise BusyError(errno.EBUSY, "another process writes this zip file; wait until it has ended", path) from None
    except OSError:
        return  # a file system without locks


class _Appended:
    """What `ZipFile` needs of a file. Writes to a closed file are ignored: `ZipFile.__del__` writes to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._at = 0

    def write(self, data: bytes | memoryview) -> int:
        if self.fd >= 0:
            syscalls.pwrite_all(self.fd, data, self._at)
        self._at += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> int:
        self._at = at
        return at

    def flush(self) -> None:
        """Does nothing: `write` does not buffer."""
