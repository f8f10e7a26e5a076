"""A store for zip files.

fsspec's file system reads each member from its beginning, and this store ranges of it. It also lists the members of a
directory without a look at all others, and keeps nothing for each member but its name in the sorted list of all names.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from bisect import bisect_left
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipInfo

from shardfs.model.blobs import ByteRange, absolute, read_file
from shardfs.model.kinds import OWN_PREFIX
from shardfs.storage.range_client import Answer
from shardfs.storage.remote import FsspecStore, tagged
from shardfs.storage.store import DirEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardfs.model.blobs import ByteRequest, Stat

_HEADER = struct.Struct("<4s22x2H")
"""The signature of a member's header, and the sizes of name and extra fields: APPNOTE.TXT of PKWARE, section 4.3.7."""

ENCRYPTED = 1
"""Flag of a member."""


class ZipStore(FsspecStore):
    """Reads ranges of uncompressed members from the zip file's own store. fsspec reads all other members.

    Arguments as of `FsspecStore`; `fs` is fsspec's file system of the zip file.
    """

    def __init__(self, fs: Any, *args: Any) -> None:
        super().__init__(fs, *args)
        self._starts: dict[str, int] = {}
        self._sorted: list[str] | None = None
        self._lock = threading.Lock()
        self._fd = -1
        with suppress(OSError):  # the zip file is not a local file
            self._fd = fs.fo.fileno()

    def reopen(self, key: str) -> None:
        """Does nothing: the members of a zip file that is read do not change."""

    def reopen_below(self, key: str) -> None:
        """Does nothing, as `reopen`."""

    def stat(self, key: str) -> Stat:
        entry = self.entry(key)
        if entry.stat is None:
            raise IsADirectoryError(errno.EISDIR, "is a directory", key)
        return entry.stat

    def entry(self, key: str) -> DirEntry:
        path, name = self.path(key), key.rsplit("/", 1)[-1]
        if not path or self._is_directory(path):
            return DirEntry(name, True, None)
        member = self.fs.zip.NameToInfo.get(path)
        if member is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return DirEntry(name, False, _stat(member))

    def scan(self, key: str) -> Iterator[DirEntry]:
        path = self.path(key)
        prefix, names = f"{path}/" if path else "", self._names()
        at = bisect_left(names, prefix)
        while at < len(names) and names[at].startswith(prefix):
            name, slash, _ = names[at][len(prefix) :].partition("/")
            below = f"{prefix}{name}/"
            is_directory = bool(slash) or self._is_directory(below[:-1])
            if name not in ("", ".", "..") and "\0" not in name and not name.startswith(OWN_PREFIX):
                if not is_directory:
                    yield DirEntry(name, False, _stat(self.fs.zip.NameToInfo[names[at]]))
                elif slash:
                    yield DirEntry(name, True, None)
            # "0" is the character behind "/", so this skips all members of a directory.
            at = bisect_left(names, f"{below[:-1]}0", at + 1) if slash else at + 1

    def _is_directory(self, path: str) -> bool:
        names = self._names()
        at = bisect_left(names, f"{path}/")
        return at < len(names) and names[at].startswith(f"{path}/")

    def _names(self) -> list[str]:
        """Return the names of all members, sorted."""
        with self._lock:
            if self._sorted is None:
                self._waiting()
                self._sorted = sorted(self.fs.zip.NameToInfo)
            return self._sorted

    def _answers(self, path: str, requests: Sequence[ByteRequest], tag: str | None) -> list[Answer]:
        member = self.fs.zip.NameToInfo.get(path)
        if member is None or member.compress_type != ZIP_STORED or member.flag_bits & ENCRYPTED:
            return super()._answers(path, requests, tag)
        begin = self._start(path, member)
        wanted = [absolute(request, member.file_size) for request in requests]
        parts = iter(self._read([ByteRange(begin + r.start, begin + r.stop) for r in wanted if r.stop > r.start]))
        return [Answer(next(parts) if r.stop > r.start else b"", {}) for r in wanted]

    def _start(self, path: str, member: ZipInfo) -> int:
        """Return the position of a member's first byte in the zip file. Its header is read once."""
        if path not in self._starts:
            at = member.header_offset
            (header,) = self._read([ByteRange(at, at + _HEADER.size)])
            if len(header) < _HEADER.size or not header.startswith(b"PK\3\4"):
                raise OSError(errno.EIO, "the zip file is damaged: no member begins where its directory says", path)
            _, name, extra = _HEADER.unpack(header)
            self._starts[path] = at + _HEADER.size + name + extra
        return self._starts[path]

    def _read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return bytes of the zip file: of the local file that was opened, even if another one now has its name."""
        if self._fd >= 0:
            return [read_file(self._fd, r.stop - r.start, r.start) for r in ranges]
        file, starts, stops = self.fs.of, [r.start for r in ranges], [r.stop for r in ranges]
        paths = [file.path] * len(ranges)
        parts = self.retry.run("read", file.fs.cat_ranges, paths, starts, stops, on_error="raise")
        return [bytes(part) for part in parts]


def _stat(member: ZipInfo) -> Stat:
    """Return size and time of a member. Zip files have local times; an invalid one becomes 0."""
    mtime_ns = 0
    with suppress(ValueError, OverflowError):
        mtime_ns = int(datetime(*member.date_time).timestamp() * 1e9)
    return tagged(None, member.file_size, mtime_ns)
