"""The stored bytes of chunks that the mount shows with other bytes. They are made once, when a file is closed."""

from __future__ import annotations

import errno
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shardfs.codecs.decoders import decompressed
from shardfs.model.kinds import compression

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.vfs.chunk_dirs import Target
    from shardfs.write.buffers import Buffer

log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """The stored bytes of a chunk, made from the bytes `written`, which the `buffer` had in this `edition`.

    `shown` are the bytes that the mount shows for them. They may differ from the written ones: in padding at the edge
    of the array, or in how they are compressed.
    """

    stored: bytes
    written: bytes
    shown: bytes
    target: Target
    buffer: Buffer
    edition: int

    def is_of(self, target: Target | None, buffer: Buffer) -> bool:
        """Return whether these are the bytes of this chunk with the present contents of the buffer."""
        return self.target == target and self.buffer is buffer and self.edition == buffer.edition


def encode(target: Target | None, buffer: Buffer) -> Encoded | None:
    """Return the stored bytes of a chunk; None if the journal gets the bytes of the file.

    That is so for files that are stored unchanged or are no chunks yet, and for empty files. Takes as long as the
    codecs, so no lock should be held. Raise OSError (EINVAL) if the bytes are no valid chunk of the array.
    """
    transform = None if target is None else target.transform
    if target is None or transform is None or not buffer.size:
        return None
    edition, data = buffer.edition, buffer.read(0, buffer.size)
    with _refusing(_chunk(target)):
        stored_bytes = transform.store(target.coords, data)
        exact = transform.is_exact(target.coords, data)
        shown_bytes = data if exact else bytes(transform.show(target.coords, stored_bytes))
        return Encoded(stored_bytes, data, shown_bytes, target, buffer, edition)


def uncompressed(path: str, data: bytes) -> bytes:
    """Decode a chunk that a program has compressed as the suffix of its name says. Raise OSError (EINVAL)."""
    with _refusing(path):
        return decompressed(data, compression(path))


def to_journal(target: Target | None, data: bytes) -> tuple[bytes, bool]:
    """Return the bytes of a whole file for the journal, and whether they are the stored bytes of a chunk.

    They are `data` itself for files that `encode` leaves unchanged. Raise OSError (EINVAL) as `encode`.
    """
    if target is None or target.transform is None or not data:
        return data, False
    with _refusing(_chunk(target)):
        return target.transform.store(target.coords, data), True


def cleared(target: Target) -> tuple[bytes, bytes] | None:
    """Return the stored and the shown bytes of a removed chunk, if a missing chunk means zeros to clients only.

    None in all other layouts, where the chunk is removed from its shard. Raise OSError (EINVAL) if zeros are no valid
    chunk.
    """
    zeros = target.tree.collection.zeros
    transform = target.transform
    if zeros is None:
        return None
    data = zeros.show(target.coords)
    if transform is None:
        return data, data
    with _refusing(_chunk(target)):
        stored_bytes = transform.store(target.coords, data)
        return stored_bytes, bytes(transform.show(target.coords, stored_bytes))


def _chunk(target: Target) -> str:
    return f"{target.tree.path or '/'}: chunk {target.coords}"


@contextmanager
def _refusing(subject: str) -> Iterator[None]:
    """Turn a ValueError into an OSError (EINVAL), and log it: some programs ignore errors of `close`."""
    try:
        yield
    except ValueError as e:
        log.warning("%s is refused: %s", subject, e)
        raise OSError(errno.EINVAL, str(e)) from e
