"""Replies about chunks that cannot be looked up now: their index is damaged, or the store does not answer."""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING

from shardfs.model.errors import ShardfsError, errno_of

if TYPE_CHECKING:
    from shardfs.fuse.invalidation import ResizedFiles
    from shardfs.fuse.protocol import Encoder
    from shardfs.model.file_tree import FileTree

MOST_S = 1.0
"""Seconds for which the kernel may cache these replies."""

SIZE = 1 << 20
"""The size that is shown. The kernel answers reads beyond it without asking: most readers must begin before it, and
few should reserve memory in vain."""

_DEFINITE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ESTALE))
"""After these, a chunk does not exist, or the kernel looks it up again."""


class UnreadableChunks:
    """Has the kernel see a file where it is not known whether a chunk exists, and reading the file fails.

    Some programs, such as zarr-python 2, take each file for absent that they cannot `stat`, and show fill values.

    Args:
        resized: gets the numbers, because the kernel does not know the size if the chunk can be read later.
        encoder: makes replies that the kernel caches for `MOST_S`.
    """

    def __init__(self, tree: FileTree, resized: ResizedFiles, encoder: Encoder) -> None:
        self._tree = tree
        self._resized = resized
        self._encoder = encoder

    def entry_reply(self, unique: int, parent: int, name: bytes, failure: Exception) -> tuple[int, bytearray]:
        """Return the number of a chunk and a reply to LOOKUP, whose tree has raised `failure`.

        Raise `failure` itself if the name is none of a chunk, or if it says that there is no such chunk.
        """
        number = self._tree.chunk_number(parent, name) if _is_open(failure) else None
        if number is None:
            raise failure
        self._resized.add(number)
        reply = self._encoder.entry_reply(unique, number, False, SIZE, 0)
        return number, self._encoder.entry_with_mode(reply, stat.S_IRUSR)

    def attributes_reply(self, unique: int, number: int, failure: Exception) -> bytearray:
        """Return a reply to GETATTR, whose tree has raised `failure`. Raise that as `entry_reply` does."""
        if not _is_open(failure) or not self._tree.is_chunk(number):
            raise failure
        self._resized.add(number)
        return self._encoder.attributes_with_mode(
            self._encoder.attributes_reply(unique, number, False, SIZE, 0), stat.S_IRUSR
        )


def _is_open(failure: Exception) -> bool:
    """Return whether a chunk may exist after its look-up has failed so."""
    return isinstance(failure, OSError | ShardfsError) and errno_of(failure) not in _DEFINITE
