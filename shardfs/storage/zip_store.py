"""A store for zip files. fsspec's file system reads each member from its beginning, and this store ranges of it."""

from __future__ import annotations

import errno
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipInfo

from shardfs.model.blobs import ByteRange
from shardfs.model.write_plan import read_file
from shardfs.storage.blob_views import absolute
from shardfs.storage.range_client import Answer
from shardfs.storage.remote import FsspecStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.blobs import ByteRequest

_HEADER = struct.Struct("<4s22x2H")
"""The signature of a member's header, and the sizes of name and extra fields: APPNOTE.TXT of PKWARE, section 4.3.7."""

ENCRYPTED = 1
"""Flag of a member."""


class ZipStore(FsspecStore):
    """Reads ranges of uncompressed members from the zip file's own store. fsspec reads all other members."""

    def __init__(self, fs: Any, *args: Any) -> None:
        super().__init__(fs, *args)
        self._starts: dict[str, int] = {}
        self._fd = -1
        with suppress(OSError):  # the zip file is not a local file
            self._fd = fs.fo.fileno()

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
