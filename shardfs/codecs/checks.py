"""Checks of stored chunks, by arithmetic and by decoding, with which `verify` finds damage. Pure; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.codecs import decoders, images, n5_blocks
from shardfs.codecs.decoders import can_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from shardfs.model.arrays import Codec
    from shardfs.model.values import U64, Coords, Sizes

CRC32C = "crc32c"
HEADS: Mapping[str, int] = {"blosc": 16, "blosc2": 16, "zstd": 18, "gzip": 3}
"""The number of first bytes that identify a codec's output, and often give the size of its input."""


class Image(NamedTuple):
    """What an encoding of voxels (`images`) must know about the chunks.

    `shape` returns the shape of the chunk at some coordinates: (c, z, y, x) or (z, y, x).
    """

    channels: int
    data_type: str
    configuration: Mapping[str, Any]
    shape: Callable[[Coords], Coords]


class Chain:
    """A `model.ChunkCheck`: elements in some encoding, and bytes-to-bytes codecs around it.

    Args:
        codecs: in the order of encoding; `unchecked` names the first one that shardfs cannot decode.
        encoded: returns the encoded sizes of chunks (n, d), before `codecs`; None if these depend on the content.
        encoding: the name of the encoding; "" if all bytes of the right number are valid.
        image: needed to decode encodings of voxels. Chunks in other named encodings are not decoded.
    """

    def __init__(
        self,
        codecs: Sequence[Codec] = (),
        encoded: Callable[[U64], U64] | None = None,
        encoding: str = "",
        image: Image | None = None,
    ) -> None:
        self._codecs = tuple(codecs)
        self._encoded = encoded
        self._encoding = encoding
        self._image = image
        names = [c.name for c in codecs]
        self._around = len(names)  # only checksums follow from here, and these keep the bytes before them readable
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
                decoders.require_crc32c(head.data)
                head = head[:-4]
            size = len(head)
        if self._last in _LAST:
            inner = _LAST[self._last](size, head[: HEADS[self._last]].tobytes())
            self._compare(coords, self._around - 1, inner)

    def _compare(self, coords: Coords, around: int, size: int) -> None:
        """Raise ValueError unless the first `around` codecs may give `size` bytes; -1 stands for an unknown size."""
        if size < 0 or self._encoded is None or any(c.name != CRC32C for c in self._codecs[:around]):
            return
        wanted = int(self._encoded(np.array([coords], np.uint64))[0]) + 4 * around
        if size != wanted:
            raise ValueError(f"{wanted} bytes expected inside {self._codecs[around].name}, its header says {size}")

    def deep(self, coords: Coords, stored_bytes: bytes) -> None:
        size = None if self._encoded is None else int(self._encoded(np.array([coords], np.uint64))[0])
        data = self.decoded(stored_bytes, size)
        if data is None:
            return
        if size is not None:
            _require(size, len(data), "found after decoding")
        if self._encoding and self._image is not None and not self.unchecked:
            image = self._image
            images.decode(self._encoding, data, image.shape(coords), np.dtype(image.data_type), image.configuration)

    def decoded(self, encoded: bytes, size: int | None) -> bytes | None:
        """The chunk without its codecs; None if one is unknown. Raise ValueError, with the reason, if one fails.

        `size` is that of the decoded chunk, if it is known.
        """
        start = len(self._codecs)
        while start and can_decode(self._codecs[start - 1]):
            start -= 1
        data = decoders.decode(self._codecs[start:], encoded, None if start else size)
        return None if start else data


class Blocks:
    """A `model.ChunkCheck` for N5 blocks: a header, then a payload with codecs around it.

    Args:
        codecs: see `Chain`.
        shape: the shape of a full block, x first.
        itemsize: the size of an element in bytes.
    """

    plain = False

    def __init__(self, codecs: Sequence[Codec], shape: Coords, itemsize: int) -> None:
        self._chain = Chain(codecs)
        self._raw = {c.name for c in codecs} <= {CRC32C}
        self._sums = 4 * len(codecs)
        self._shape = shape
        self._itemsize = itemsize
        self.head = None if self._chain.head is None else 8 + 4 * len(shape)
        self.unchecked = self._chain.unchecked

    def sizes(self, coords: U64) -> None:
        return None  # a block at the edge may be clipped or full

    def quick(self, coords: Coords, size: int, head: npt.NDArray[np.uint8]) -> None:
        start, elements = self._header(head[: 8 + 4 * len(self._shape)].tobytes())
        if self.head is None:
            self._chain.quick(coords, size - start, head[start:])
        if self._raw and elements >= 0:
            _require(start + elements * self._itemsize + self._sums, size, "stored")

    def _header(self, block: bytes) -> tuple[int, int]:
        """The header's size, and the number of elements; -1 for an object."""
        header = n5_blocks.parse_header(block)
        if header.elements >= 0:
            header.require_within(self._shape)
        return header.size, header.elements

    def deep(self, coords: Coords, block: bytes) -> None:
        start, elements = self._header(block)
        data = self._chain.decoded(block[start:], elements * self._itemsize if elements >= 0 else None)
        if data is not None and elements >= 0:
            _require(elements * self._itemsize, len(data), "found after decoding")


def require_made_of(codecs: Sequence[Codec], data: bytes | memoryview, nbytes: int) -> None:
    """Raise ValueError, with the reason, unless at most one codec can have made `data` of `nbytes` bytes.

    Data are decoded only if they have no size at the expected place: several gzip members, and streamed zstd frames.
    """
    if not codecs:
        _require(nbytes, len(data), "found")
    elif codecs[0].name in _LAST:
        size = _LAST[codecs[0].name](len(data), bytes(data[: HEADS[codecs[0].name]]))
        size = int.from_bytes(data[-4:], "little") if codecs[0].name == "gzip" else size
        if size != nbytes:
            _require(nbytes, len(decoders.decode(codecs, bytes(data), nbytes)), "found after decoding")


def _require(wanted: int, size: int, where: str) -> None:
    if size != wanted:
        raise ValueError(f"{wanted} bytes expected, {size} {where}")


# ---- the size of a codec's input from the first bytes of its output, -1 if these do not contain the size


def _blosc(size: int, head: bytes) -> int:
    """From https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst; Blosc 2 has the same 16 bytes."""
    if len(head) < 16:
        raise ValueError(f"no Blosc header in {size} bytes")
    decoded, encoded = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
    if encoded != size:
        raise ValueError(f"its Blosc header says {encoded} bytes, but it has {size}")
    return decoded


def _zstd(size: int, head: bytes) -> int:
    if head[:4] != decoders.ZSTD_MAGIC:
        raise ValueError(f"no zstd frame: it begins with {head[:4].hex()}")
    return decoders.zstd_size(head)


def _gzip(size: int, head: bytes) -> int:
    if head != b"\x1f\x8b\x08":
        raise ValueError(f"not gzip data: it begins with {head.hex()}")
    return -1


_LAST: Mapping[str, Callable[[int, bytes], int]] = {"blosc": _blosc, "blosc2": _blosc, "zstd": _zstd, "gzip": _gzip}


def _undecodable(encoding: str, image: Image | None) -> str:
    """The name of the encoding if this installation cannot decode it, else ""."""
    if image is None:
        return encoding
    return encoding if encoding and images.lacking(encoding, image.data_type, image.channels) else ""
