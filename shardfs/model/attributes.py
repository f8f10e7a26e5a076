"""Attributes of a file or directory, as `stat` returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob


class Extent(NamedTuple):
    """Bytes shown verbatim: byte i of the shown file is byte `start + i` of `blob`, which has a file descriptor."""

    blob: Blob
    start: int


class Attributes(NamedTuple):
    """The attributes of a file or directory.

    Args:
        number: the inode number.
        size: bytes; 0 for a directory, and -1 in a listing where the size is unknown or would cost a request.
        mtime_ns: nanoseconds since 1970 UTC; 0 if the store has no time.
        extent: given if a local file has the shown bytes.
        mode: file type and permission bits, as `st_mode`; 0 means those that all files, or directories, of the mount
            have.
    """

    number: int
    directory: bool
    size: int
    mtime_ns: int
    extent: Extent | None = None
    mode: int = 0
