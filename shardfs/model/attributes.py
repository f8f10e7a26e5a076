"""Attributes of a file or directory, as `stat` returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob


class Extent(NamedTuple):
    """Bytes shown exactly as they lie in a local file: byte i of the shown file is byte `start + i` of `blob`."""

    blob: Blob
    start: int


class Attributes(NamedTuple):
    """What `stat` tells of a file or directory. `extent` is given if its bytes may be read straight from a file.

    `mode` are permission bits; 0 means those of all files, or directories, of the mount.
    """

    number: int
    directory: bool
    size: int
    mtime_ns: int
    extent: Extent | None = None
    mode: int = 0
