"""Has the kernel read chunks of slow local files before a reader asks for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardfs.storage.read_ahead import ReadAhead
from shardfs.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.model.values import Coords
    from shardfs.storage.read_ahead import Piece

SLOW = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse"}
"""Types of file systems whose files are behind a network or another program."""

ADVICE = 128 << 10
"""Most bytes of one call: the kernel ignores what exceeds its own read-ahead, which is seldom less."""


class KernelReadAhead(ReadAhead):
    """Advises the kernel of the chunks that come next, and keeps none of their bytes.

    Args:
        limit: the most bytes that were advised and not read yet.
    """

    def __init__(self, limit: int, waiting: Callable[[], None]) -> None:
        super().__init__(limit, 1, RetryPolicy(), waiting)

    def take(self, key: tuple[int, Coords], where: ByteRange, since: float, *, keep: bool) -> None:
        """Note that a chunk is read, and return None: the reader reads it by itself."""
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is not None:
                self._counters.add(bytes_ahead_used=fetch.nbytes)
                self._drop(key)

    def _read(self, owner: int, members: Sequence[tuple[Coords, Piece]]) -> None:
        """Advise the kernel of neighbouring chunks of one shard."""
        blob, ranges = members[0][1].blob, [piece.where for c, piece in members if (owner, c) in self._fetches]
        start, stop = min((r.start for r in ranges), default=0), max((r.stop for r in ranges), default=0)
        for at in range(start, stop, ADVICE) if blob.fd >= 0 else ():  # not of a decoded shard, which is in memory
            os.posix_fadvise(blob.fd, blob.file_offset + at, min(ADVICE, stop - at), os.POSIX_FADV_WILLNEED)


def is_slow(path: str) -> bool:
    """Return whether a file or directory is in a file system of a type in `SLOW`.

    Raise OSError if it is not accessible.
    """
    from shardfs.storage.mount_table import entries  # with its imports; the daemon has them already

    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(e.device == number and e.type.partition(".")[0] in SLOW for e in entries())
