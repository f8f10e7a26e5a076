"""Buffers for files open for writing: in memory, or in an unnamed file once they are large."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from shardfs.model.blobs import FilePart, read_file
from shardfs.storage import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Bytes

SPILL = 8 << 20
"""Maximum bytes of one file in memory. A larger file moves to an unnamed file on the disk."""


class Budget:
    """Memory limit in bytes that all buffers share. Thread-safe.

    `make_file` returns the descriptor of a new unnamed file, which the caller owns. It raises OSError.
    """

    def __init__(self, limit: int, make_file: Callable[[], int]) -> None:
        self.limit = limit
        self.make_file = make_file
        self.used = 0
        self._lock = threading.Lock()

    def change(self, nbytes: int) -> None:
        """Add `nbytes` to the memory in use; a negative number releases memory. The limit is not checked."""
        with self._lock:
            self.used += nbytes

    def is_short(self, more: int) -> bool:
        """Return whether `more` bytes would exceed the limit."""
        return self.used + more > self.limit


class Buffer:
    """Contents of one file, readable and writable at any offset. Not thread-safe.

    Args:
        limit: maximum size of the file in bytes. Beyond it, `write` and `truncate` raise OSError (EFBIG).

    Attributes:
        edition: increases with each change.
    """

    def __init__(self, budget: Budget, limit: int) -> None:
        self._budget = budget
        self._limit = limit
        self._memory = bytearray()
        self._fd = -1
        self._size = 0
        self.edition = 0  # increases with each change

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._size if self._fd >= 0 else len(self._memory)

    def _grow(self, size: int) -> None:
        """Make room for a file of `size` bytes. Move the contents to an unnamed file if memory is short."""
        if size > self._limit:
            raise OSError(
                errno.EFBIG, f"the file would have {size} bytes; a file on this mount has at most {self._limit}"
            )
        more = size - len(self._memory)
        if self._fd < 0 and (size > SPILL or self._budget.is_short(more)):
            fd = self._budget.make_file()
            syscalls.pwrite_all(fd, self._memory, 0)
            self._fd = fd
            self._size = len(self._memory)
            self._budget.change(-len(self._memory))
            self._memory = bytearray()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at `offset`. A gap before `offset` is filled with zeros.

        Raise OSError: EFBIG, or the errors of the unnamed file, such as ENOSPC.
        """
        self.edition += 1
        end = offset + len(data)
        if end > self.size:
            self._grow(end)
        if self._fd >= 0:
            syscalls.pwrite_all(self._fd, data, offset)
            self._size = max(self._size, end)
            return
        memory, before = self._memory, len(self._memory)
        if offset == before:
            memory += data
        else:
            if offset > before:
                memory.extend(bytes(offset - before))
            memory[offset:end] = data
        if len(memory) != before:
            self._budget.change(len(memory) - before)

    def truncate(self, size: int) -> None:
        """Shorten the file to `size` bytes, or extend it with zeros. Raise as `write`."""
        self.edition += 1
        if size > self.size:
            self._grow(size)
        if self._fd >= 0:
            syscalls.ftruncate(self._fd, size)
            self._size = size
            return
        before = len(self._memory)
        if size < before:
            del self._memory[size:]
        else:
            self._memory.extend(bytes(size - before))
        self._budget.change(len(self._memory) - before)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on; fewer at the end of the file, b"" beyond it."""
        if self._fd >= 0:
            return read_file(self._fd, max(min(size, self._size - offset), 0), offset)
        return bytes(memoryview(self._memory)[offset : offset + size])

    def content(self) -> Bytes:
        """Return all bytes of the file.

        Bytes in memory are copied. For a file on the disk, the result refers to the unnamed file: it changes with the
        buffer, and is valid until `close`.
        """
        return FilePart(self._fd, 0, self._size) if self._fd >= 0 else bytes(self._memory)

    def close(self) -> None:
        """Release the memory and the unnamed file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._size = 0
        self._budget.change(-len(self._memory))
        self._memory = bytearray()

    def __del__(self) -> None:
        self.close()
