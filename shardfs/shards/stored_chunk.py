"""`StoredChunk`: where the bytes of a chunk are stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardfs.model.blobs import ByteRange

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob
    from shardfs.model.shard_format import Checksum


class StoredChunk(NamedTuple):
    """A chunk's stored bytes: `[start, start + size)` of `blob`. If there is a checksum, it follows these bytes.

    Cached bytes of the chunk must not outlive `expires`, a time of `time.monotonic`. Then the index is read again, and
    the attributes may be those of other bytes.
    """

    blob: Blob
    start: int
    size: int
    checksum: Checksum | None = None
    expires: float = math.inf

    def range(self, part: ByteRange | None = None) -> ByteRange:
        """Return the range in `blob` of a part of the chunk; without `part`, of the chunk and its checksum.

        `part` is relative to the beginning of the chunk, and is clipped to the chunk.
        """
        end = self.start + self.size
        if part is not None:
            return ByteRange(min(self.start + part.start, end), min(self.start + part.stop, end))
        return ByteRange(self.start, end if self.checksum is None else end + self.checksum.size)

    def read(self, part: ByteRange | None = None) -> bytes:
        """Return the stored bytes, verified if all are read. Raise ValueError, with the reason, if they are wrong."""
        try:
            return self.verified(self.blob.read([self.range(part)])[0], part)
        except FileNotFoundError as e:
            raise ValueError("its shard was removed") from e

    def verified(self, data: bytes, part: ByteRange | None = None) -> bytes:
        """Return the stored bytes, given `data`, which should be the bytes of `range(part)`, without the checksum.

        The checksum is verified only without `part`. Raise ValueError, with the reason, for another length or checksum.
        """
        start, stop = self.range(part)
        if len(data) != stop - start:
            raise ValueError(f"{stop - start} bytes expected at {start}, {len(data)} found")
        if part is not None or self.checksum is None:
            return data
        self.checksum.verify(data[: self.size], data[self.size :])
        return data[: self.size]
