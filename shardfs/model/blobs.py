"""Byte ranges, stored objects to be read (`Blob`), and the pieces that new objects are made of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.values import Version


class ByteRange(NamedTuple):
    """The bytes `[start, stop)` of an object."""

    start: int
    stop: int


class Suffix(NamedTuple):
    """The last `size` bytes of an object."""

    size: int


ByteRequest: TypeAlias = ByteRange | Suffix


def absolute(request: ByteRequest, size: int) -> ByteRange:
    """Return the byte range of a request in an object of `size` bytes, clipped to the object."""
    if isinstance(request, Suffix):
        return ByteRange(max(0, size - request.size), size)
    return ByteRange(min(request.start, size), min(request.stop, size))


class FilePart(NamedTuple):
    """Bytes `[start, start + size)` of the file with the open descriptor `fd`, mostly of the journal.

    Its receiver does not close `fd`, and uses it only as long as the giver promises.
    """

    fd: int
    start: int
    size: int


Bytes: TypeAlias = bytes | FilePart

Piece: TypeAlias = bytes | memoryview | ByteRange | FilePart
"""A part of a new object. A `ByteRange` stands for these bytes of the object that is replaced."""

Plan: TypeAlias = list[Piece]
"""A new object as the concatenation of its pieces."""


Content: TypeAlias = Bytes | Plan
"""The content of a chunk or object to be written. A plan may refer to the object that is replaced."""


class Stat(NamedTuple):
    """An object's attributes in its store: `size` in bytes and `mtime_ns` in nanoseconds since 1970 UTC, 0 if unknown.

    `version` differs whenever the bytes may differ.
    """

    size: int
    mtime_ns: int
    version: Version


class Blob(Protocol):
    """One object of a store, or a part or decoded form of one, in the version that was opened.

    `fd` is a file descriptor with the same bytes, the first one at position `file_offset`; -1 if there is none. The
    blob owns the descriptor. All methods raise OSError (FileNotFoundError if the object is gone) if the store fails.
    """

    fd: int
    file_offset: int

    def stat(self) -> Stat:
        """Size, time and version. The first call may cost one request."""

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        """The bytes of each request, in the order of the requests; fewer where the object ends.

        Adjacent requests are coalesced.
        """


def whole(blob: Blob) -> bytes:
    """All bytes of an object. Raise the errors of `Blob.read`."""
    return bytes(blob.read([ByteRange(0, blob.stat().size)])[0])


def read_file(fd: int, size: int, start: int) -> bytes:
    """The `size` bytes at offset `start` of a file, fewer at its end. Raise OSError.

    One pread(2) returns at most 2,147,479,552 bytes.
    """
    data = os.pread(fd, size, start)
    if len(data) == size or not data:
        return data
    parts, total = [data], len(data)
    while total < size and (data := os.pread(fd, size - total, start + total)):
        parts.append(data)
        total += len(data)
    return b"".join(parts)
