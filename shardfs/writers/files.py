"""Local files as their writers see them: where they lie, which version is there, and how they are filled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from shardfs import disk
from shardfs.disk import FilePart
from shardfs.model import ByteRange
from shardfs.plans import piece_size

if TYPE_CHECKING:
    from shardfs.model import Plan
    from shardfs.store import LocalBlob

MAX_JOINED = 1 << 20
"""Bytes in memory that are written at once."""


class Place(NamedTuple):
    """Where an object lies: in the open directory `at`, called `name`."""

    key: str
    at: int
    name: str


def identity(blob: LocalBlob | None) -> list[int] | None:
    """What tells a version of a file from others in its directory. Not the device: its number may be another one after
    a restart."""
    if blob is None:
        return None
    info = os.fstat(blob.fd)
    return [info.st_ino, blob.stat().size, blob.stat().mtime_ns]


def identity_at(name: str, at: int) -> list[int] | None:
    """The same of what has this name."""
    try:
        return identity_in(os.stat(name, dir_fd=at, follow_symlinks=False))
    except FileNotFoundError:
        return None


def identity_in(info: os.stat_result) -> list[int]:
    """The same as the system tells it."""
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def fill(fd: int, old: LocalBlob | None, plan: Plan, position: int = 0) -> None:
    """Write the pieces one behind the other, from `position` on."""
    joined, waiting = list[bytes | memoryview](), 0
    for piece in plan:
        if isinstance(piece, ByteRange | FilePart) or waiting >= MAX_JOINED:
            disk.pwrite_all(fd, b"".join(joined), position - waiting)
            joined, waiting = [], 0
        if isinstance(piece, FilePart):
            disk.copy_range(piece.fd, fd, piece.start, piece.size, position)
        elif isinstance(piece, ByteRange):
            if old is None:
                raise ValueError("a new object cannot have bytes of an old one")
            disk.copy_range(old.fd, fd, piece.start, piece_size(piece), position)
        else:
            joined.append(piece)
            waiting += piece_size(piece)
        position += piece_size(piece)
    disk.pwrite_all(fd, b"".join(joined), position - waiting)
