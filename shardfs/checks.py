"""What stored chunks must be: the arithmetic and the decoding by which `verify` finds damage. Pure; no I/O."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs import codecs, images
from shardfs.codecs import can_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from shardfs.arrays import Codec
    from shardfs.model import U64, Coords, Sizes

CRC32C = "crc32c"
HEADS: Mapping[str, int] = {"blosc": 16, "blosc2": 16, "zstd": 18, "gzip": 3}
"""How many first bytes of a codec's output tell whether it can be that, and often how much is in it."""


class Image(NamedTuple):
    """What an encoding of voxels (`images`) is told of the chunks that it should hold, and the shape of each."""

    channels: int
    data_type: str
    configuration: Mapping[str, Any]
    shape: Callable[[Coords], Coords]


class Chain:
    """A `model.ChunkCheck`: elements in some encoding, and bytes-to-bytes codecs around it.

    Args:
        codecs: in the order of encoding; unknown ones are told by `unchecked`.
        encoded: how many bytes the encoding makes of each of the chunks (n, d); None if that depends on the content.
        encoding: its name; "" if any bytes of the right number will do.
        image: for encodings of voxels; others that have a name are not looked into.
    """

    def __init__(
        self,
        codecs: Sequence[Codec] = (),
        encoded: Callable[[U64], U64] | None = None,
        encoding: str = "",
        image: Image | None = None,
    ) -> None:
        self._codecs, self._encoded, self._encoding, self._image = tuple(codecs), encoded, encoding, image
        names = [c.name for c in codecs]
        self._around = len(names)  # from here on checksums only, which do not hide what is below
        while self._around and names[self._around - 1] == CRC32C:
            self._around -= 1
        self._fixed = encoded is not None and set(names) <= {CRC32C}
        self._last = names[self._around - 1] if self._around else ""
        self.head = None if names[-1:] == [CRC32C] else HEADS.get(self._last, 0)
        self.unchecked = next((c.name for c in self._codecs if not can_decode(c)), "") or _undecodable(encoding, image)
        self.plain = self._fixed and not encoding

    def sizes(self, coords: U64) -> Sizes | None:
        if not self._fixed or self._encoded is None:
            return None
        return self._encoded(coords).astype(np.int64) + 4 * len(self._codecs)

    def quick(self, coords: Coords, size: int, head: npt.NDArray[np.uint8]) -> None:
        if self.head is None:
            for _ in self._codecs[self._around :]:
                head = _without_crc32c(head)
            size = len(head)
        if self._last:
            told = _LAST.get(self._last, _anything)(size, head[: HEADS.get(self._last, 0)].tobytes())
            self._compare(coords, self._around - 1, told)

    def _compare(self, coords: Coords, around: int, size: int) -> None:
        """Whether the encoding with so many codecs around it may have this size; -1 is unknown."""
        if size < 0 or self._encoded is None or any(c.name != CRC32C for c in self._codecs[:around]):
            return
        wanted = int(self._encoded(np.array([coords], np.uint64))[0]) + 4 * around
        if size != wanted:
            raise ValueError(f"{wanted} bytes expected inside {self._codecs[around].name}, {size} told")

    def deep(self, coords: Coords, stored: bytes) -> None:
        data = self.decoded(stored)
        if data is None:
            return
        if self._encoded is not None:
            _require(int(self._encoded(np.array([coords], np.uint64))[0]), len(data), "found after decoding")
        if self._encoding and self._image is not None and not self.unchecked:
            image = self._image
            images.decode(self._encoding, data, image.shape(coords), np.dtype(image.data_type), image.configuration)

    def decoded(self, stored: bytes) -> bytes | None:
        """Without the codecs; None if not all are known. Raise ValueError, with the reason, if one fails."""
        known = len(self._codecs)
        while known and can_decode(self._codecs[known - 1]):
            known -= 1
        data = codecs.decode(self._codecs[known:], stored)
        return None if known else data


class Blocks:
    """A `model.ChunkCheck`: N5 blocks, of which the codecs are around what follows the header.

    Args:
        codecs: as for `Chain`.
        shape: of a whole block, x first.
        itemsize: bytes of an element.
    """

    plain = False

    def __init__(self, codecs: Sequence[Codec], shape: Coords, itemsize: int) -> None:
        self._chain = Chain(codecs)
        self._raw = {c.name for c in codecs} <= {CRC32C}
        self._sums = 4 * len(codecs)
        self._shape, self._itemsize = shape, itemsize
        self.head = None if self._chain.head is None else 8 + 4 * len(shape)
        self.unchecked = self._chain.unchecked

    def sizes(self, coords: U64) -> None:
        return None  # a block at the edge may be clipped, or not

    def quick(self, coords: Coords, size: int, head: npt.NDArray[np.uint8]) -> None:
        start, elements = self._header(head[: 8 + 4 * len(self._shape)].tobytes())
        if self.head is None:
            self._chain.quick(coords, size - start, head[start:])
        if self._raw and elements >= 0:
            _require(start + elements * self._itemsize + self._sums, size, "stored")

    def _header(self, head: bytes) -> tuple[int, int]:
        """Its size, and the number of elements, -1 if they are objects of any size."""
        mode, rank = int.from_bytes(head[:2], "big"), int.from_bytes(head[2:4], "big")
        if len(head) < 6 or mode > 2:
            raise ValueError(f"no N5 block: mode {mode} in {len(head)} bytes")
        if mode == 2:
            return 6, -1
        start = 4 + 4 * rank + 4 * mode
        if rank != len(self._shape) or start > len(head):
            raise ValueError(f"no N5 block: its header has {rank} axes, the array {len(self._shape)}")
        shape = [int.from_bytes(head[i : i + 4], "big") for i in range(4, 4 + 4 * rank, 4)]
        if any(n > whole for n, whole in zip(shape, self._shape, strict=True)):
            raise ValueError(f"a block of {shape} elements, where a whole one has {list(self._shape)}")
        return start, int.from_bytes(head[start - 4 : start], "big") if mode else math.prod(shape)

    def deep(self, coords: Coords, stored: bytes) -> None:
        start, elements = self._header(stored[: 8 + 4 * len(self._shape)])
        data = self._chain.decoded(stored[start:])
        if data is not None and elements >= 0:
            _require(elements * self._itemsize, len(data), "found after decoding")


def _require(wanted: int, size: int, where: str) -> None:
    if size != wanted:
        raise ValueError(f"{wanted} bytes expected, {size} {where}")


def _without_crc32c(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    import google_crc32c

    if len(data) < 4:
        raise ValueError(f"no crc32c in {len(data)} bytes")
    found, told = google_crc32c.value(data[:-4]), int.from_bytes(data[-4:].tobytes(), "little")
    if found != told:
        raise ValueError(f"it has crc32c {found:08x}, but says {told:08x}")
    return data[:-4]


# ---- what the first bytes of a codec's output tell: the size of its input, -1 if not


def _anything(size: int, head: bytes) -> int:
    return -1


def _blosc(size: int, head: bytes) -> int:
    """https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst; Blosc 2 begins with the same 16 bytes."""
    if len(head) < 16:
        raise ValueError(f"no Blosc header in {size} bytes")
    inside, whole = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
    if whole != size:
        raise ValueError(f"its Blosc header tells {whole} bytes, but it has {size}")
    return inside


def _zstd(size: int, head: bytes) -> int:
    if head[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("does not begin as a zstd frame does")
    return codecs.zstd_size(head)


def _gzip(size: int, head: bytes) -> int:
    if head != b"\x1f\x8b\x08":
        raise ValueError("does not begin as gzip does")
    return -1


_LAST: Mapping[str, Callable[[int, bytes], int]] = {"blosc": _blosc, "blosc2": _blosc, "zstd": _zstd, "gzip": _gzip}


def _undecodable(encoding: str, image: Image | None) -> str:
    """The encoding, if it cannot be decoded here."""
    known = not encoding or (image is not None and not images.lacking(encoding, image.data_type, image.channels))
    return "" if known else encoding
