"""Headers of N5 blocks, https://github.com/saalfeldlab/n5#file-system-specification. Integers are big-endian."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardfs.model.values import Coords

DEFAULT, VARLENGTH, OBJECT = range(3)
"""The modes. A block of variable length has a number of elements after its shape; an object has only a size."""


class BlockHeader(NamedTuple):
    """A header of `size` bytes: the shape of the block, x first, and its number of elements; -1 for an object."""

    size: int
    shape: Coords
    elements: int

    def require_within(self, full: Coords) -> None:
        """Raise ValueError if the block is not inside a full block of this shape, x first."""
        if len(self.shape) != len(full):
            raise ValueError(f"not an N5 block: its header has {len(self.shape)} axes, the array {len(full)}")
        if any(n > whole for n, whole in zip(self.shape, full, strict=True)):
            raise ValueError(f"the block has the shape {self.shape}, larger than a full block of {full}")


def parse_header(block: bytes) -> BlockHeader:
    """Parse the header of a block. Raise ValueError, with the reason, if it is invalid."""
    mode, rank = int.from_bytes(block[:2], "big"), int.from_bytes(block[2:4], "big")
    if len(block) < (6 if mode == OBJECT else 4) or mode > OBJECT:
        raise ValueError(f"not an N5 block: its mode should be 0, 1 or 2, not {mode} (in {len(block)} bytes)")
    if mode == OBJECT:
        return BlockHeader(6, (), -1)
    size = 4 + 4 * rank + 4 * mode
    if size > len(block):
        raise ValueError(f"not an N5 block: its header should have {size} bytes, found {len(block)}")
    shape = struct.unpack_from(f">{rank}I", block, 4)
    return BlockHeader(size, shape, int.from_bytes(block[size - 4 : size], "big") if mode else math.prod(shape))


def header_of(shape: Coords) -> bytes:
    """Return the header of a block in default mode; `shape` has x first."""
    return struct.pack(f">HH{len(shape)}I", DEFAULT, len(shape), *shape)
