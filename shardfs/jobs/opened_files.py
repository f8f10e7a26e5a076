"""The content of files that are copied: open files of a local source, and the bytes of all other files."""

from __future__ import annotations

import errno
import os
import resource
import threading
from functools import cache
from itertools import chain
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from shardfs.model.blobs import ByteRange, FilePart, read_file
from shardfs.model.changes import FIRST
from shardfs.storage import descriptors
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.blobs import Blob, Bytes

COPIED_SIZE = 256 << 10
"""Files of at least this size stay open, so that the kernel copies them. Smaller ones are read into memory."""


@cache
def _descriptors() -> threading.Semaphore:
    """The number of files that all tasks of this process may keep open. Without a free one, files are read."""
    return threading.Semaphore(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 8192) // 4)


class Files(Protocol):
    """Files of a source that can be opened."""

    def blob(self, key: str) -> Blob:
        """Return the opened file of the source that is copied to this key. Raise OSError if it cannot be opened."""


class Permit:
    """The right to keep one file open. It is given back with the last reference, as the descriptor itself is."""

    @classmethod
    def take(cls) -> Self | None:
        """Return a permit; None if there is none left in this process. Never waits."""
        if not _descriptors().acquire(blocking=False):
            return None
        return cls()

    def __del__(self) -> None:
        _descriptors().release()


class OpenedFile(NamedTuple):
    """The content of a file in the source.

    If `content` is a `FilePart`, `blob` keeps its descriptor open, and `permit` counts it: the content is valid only as
    long as this object.
    """

    content: Bytes
    blob: Blob | None = None
    permit: Permit | None = None

    @classmethod
    def from_key(cls, files: Files, key: str) -> OpenedFile:
        """Return the content of a file. A remote one of several requests is copied to a temporary file first.

        Small files are read at once, and so are all others while too many are open. Raise OSError if the file cannot be
        read or copied, or ends early; StaleShardError if a remote object is replaced meanwhile.
        """
        blob = files.blob(key)
        if blob.fd >= 0:
            return cls._local(blob, key)
        pieces = _pieces(blob, key)
        first = next(pieces)
        if len(first) < FIRST.stop or (permit := Permit.take()) is None:
            return cls(b"".join([first, *pieces]))
        with TemporaryFile() as file:
            file.writelines(chain([first], pieces))
            file.flush()
            copy = LocalBlob(descriptors.dup(file.fileno()), os.fstat(file.fileno()), nothing)
        return cls(FilePart(copy.fd, 0, copy.stat().size), copy, permit)

    @classmethod
    def _local(cls, blob: Blob, key: str) -> OpenedFile:
        size, start = blob.stat().size, max(blob.file_offset, 0)
        if size >= COPIED_SIZE and (permit := Permit.take()) is not None:
            return cls(FilePart(blob.fd, start, size), blob, permit)
        data = read_file(blob.fd, size, start)
        _require_whole(key, len(data), size)
        return cls(data)


def _pieces(blob: Blob, key: str) -> Iterator[bytes]:
    """Yield the bytes of a remote file. Raise OSError if it becomes shorter meanwhile.

    One request has at most the size of `FIRST`, so that `store_timeout` holds for files of any size.
    """
    first = blob.read([FIRST])[0]  # then most stores report the size without a request
    size, length = blob.stat().size, len(first)
    yield first
    for start in range(FIRST.stop, size, FIRST.stop):
        piece = blob.read([ByteRange(start, min(start + FIRST.stop, size))])[0]
        length += len(piece)
        yield piece
    _require_whole(key, length, size)


def _require_whole(key: str, length: int, size: int) -> None:
    if length != size:
        raise OSError(errno.EIO, f"{size} bytes expected, {length} found: it changed while it was read", key)
