"""From the chunk that is stored to the chunk that another layout shows: as little as must be done is done.

Three ways, from cheap to dear: the stored bytes as they are; the payload as it is in another frame; decode, turn, crop
or pad, and lay out again. What is shown after decoding is not compressed again where a layout has the choice, so that
its size is known without work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs import MAX_DECODED, can_decode, can_decode_array, decode, decode_array, encode, encode_array
from shardfs.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardfs.arrays import Array, ChunkEncoding, Codec
    from shardfs.model import U64, Bool, Coords, Sizes, Transform

CRC32C = "crc32c"
BCOLZ_HEADER = b"blpk" + bytes([1, 0, 0, 0]) + (1).to_bytes(8, "little")
"""bcolz skips the 16 bytes before the Blosc chunk: magic, version, reserved, one chunk."""

N5_DEFAULT, N5_VARLENGTH = 0, 1


def transcoder(array: Array, shown: ChunkEncoding) -> Transform | None:
    """What makes chunks of an array, as they are stored, those of `shown`; None if they are the same.

    Raise UnsupportedError, with the reason, if something must be undone and cannot be.
    """
    stored = array.encoding
    same_around = len(_checks(stored)) == len(_checks(shown)) and stored.frame == shown.frame
    if _same_payload(array, shown) and same_around and stored.clipped == shown.clipped:
        return None
    return Transcoder(array, shown)


def without_checks(codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The codecs without the checksums behind everything else, which can be cut without decoding."""
    n = len(codecs)
    while n and codecs[n - 1].name == CRC32C:
        n -= 1
    return tuple(codecs[:n])


def memory_order(order: Coords, chunk: Coords) -> Coords:
    """An order of axes without those along which chunks have one element: wherever these stand, nothing moves."""
    return tuple(axis for axis in order if chunk[axis] != 1)


def _checks(encoding: ChunkEncoding) -> tuple[Codec, ...]:
    return encoding.codecs[len(_inner(encoding)) :]


def _inner(encoding: ChunkEncoding) -> tuple[Codec, ...]:
    return without_checks(encoding.codecs)


def _same_payload(array: Array, b: ChunkEncoding) -> bool:
    """Whether a full chunk has the same bytes as it is stored and in `b`, but for frames and checksums."""
    a = array.encoding
    return (
        _layout_type(a.data_type) == _layout_type(b.data_type)
        and memory_order(a.order, array.chunk) == memory_order(b.order, array.chunk)
        and a.serializer.name == b.serializer.name
        and [c.name for c in _inner(a)] == [c.name for c in _inner(b)]
    )


def _layout_type(data_type: str) -> str:
    """Elements of one byte look the same in any order, and truth values look as the numbers 0 and 1."""
    dtype = np.dtype(data_type)
    return dtype.str.replace("b", "u")


def _header_size(frame: str, rank: int) -> int:
    return {"none": 0, "n5": 4 + 4 * rank, "bcolz": len(BCOLZ_HEADER)}[frame]


class _Shown:
    """The chunks of an array as they are shown: shapes, sizes, and the way from elements to bytes.

    Coordinates are those of the collection's chunk grid.
    """

    def __init__(self, array: Array, encoding: ChunkEncoding) -> None:
        self.array, self.encoding = array, encoding
        self.rank = len(array.shape)
        self.header_size = _header_size(encoding.frame, self.rank)
        self.checks = 4 * len(_checks(encoding))
        self.is_plain = encoding.serializer.name == "bytes" and not _inner(encoding)
        self._itemsize = np.dtype(encoding.data_type).itemsize
        self._chunk, self._shape = np.array(array.chunk, np.uint64), np.array(array.shape, np.uint64)

    def cell(self, coords: Coords) -> Coords:
        """Chunk coordinates in the order of the array's axes."""
        return tuple(0 if a is None else coords[a] for a in self.array.grid_axes)

    def cells(self, coords: U64) -> U64:
        out = np.zeros((len(coords), self.rank), np.uint64)
        for i, axis in enumerate(self.array.grid_axes):
            if axis is not None:
                out[:, i] = coords[:, axis]
        return out

    def clipped_shape(self, cell: Coords) -> Coords:
        a = self.array
        return tuple(min((c + 1) * n, s) - c * n for c, n, s in zip(cell, a.chunk, a.shape, strict=True))

    def shape(self, cell: Coords) -> Coords:
        return self.clipped_shape(cell) if self.encoding.clipped else self.array.chunk

    def are_whole(self, cells: U64) -> Bool:
        """Which chunks lie in the array with all their elements: those are the same, clipped or not."""
        return np.asarray(((cells + np.uint64(1)) * self._chunk <= self._shape).all(axis=1))

    def sizes(self, cells: U64) -> Sizes:
        """By arithmetic; -1 if they are compressed."""
        if not self.is_plain:
            return np.full(len(cells), -1, np.int64)
        around = self.header_size + self.checks
        if not self.encoding.clipped:
            return np.full(len(cells), math.prod(self.array.chunk) * self._itemsize + around, np.int64)
        starts = cells * self._chunk
        extents = np.minimum(starts + self._chunk, self._shape) - starts
        return np.asarray(extents.prod(axis=1, dtype=np.uint64).astype(np.int64) * self._itemsize + around)

    def made_of(self, cell: Coords, elements: npt.NDArray[Any]) -> bytes:
        """The shown bytes of a chunk of these elements, which are cropped or padded as needed."""
        wanted = self.shape(cell)
        if elements.shape != wanted:
            out = np.full(wanted, fill_element(self.array.fill_value, elements.dtype), elements.dtype)
            common = tuple(slice(0, min(a, b)) for a, b in zip(elements.shape, wanted, strict=True))
            out[common] = elements[common]
            elements = out
        return self.encoded(elements)

    def encoded(self, elements: npt.NDArray[Any]) -> bytes:
        """The shown bytes of these elements, axes in the array's order."""
        encoding, shape = self.encoding, elements.shape
        elements = elements.astype(encoding.data_type, copy=False).transpose(encoding.order)
        return self.framed(shape, encode(encoding.codecs, encode_array(encoding.serializer, elements)))

    def framed(self, shape: Coords, payload: bytes) -> bytes:
        if self.encoding.frame == "n5":
            return n5_header(shape) + payload
        return BCOLZ_HEADER + payload if self.encoding.frame == "bcolz" else payload


class Transcoder:
    """A `model.Transform`."""

    def __init__(self, array: Array, shown: ChunkEncoding) -> None:
        self._stored, self._shown = array.encoding, _Shown(array, shown)
        self._array = array
        self._passes = _same_payload(array, shown)
        self._checks = _checks(self._stored)
        self._around = 4 * len(self._checks) + _header_size(self._stored.frame, self._shown.rank)
        if not self._passes or self._stored.clipped != shown.clipped or self._stored.frame == "n5":
            _require_decodable(self._stored)
            _require_small(array, "decoded")

    @property
    def name(self) -> str:
        return "reframed" if self._passes else "decoded"

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        cells = self._shown.cells(coords)
        made = self._shown.sizes(cells)
        if not self._passes or self._shown.is_plain:
            return made
        kept = stored - self._around + self._shown.header_size + self._shown.checks
        if self._stored.frame == "n5" or self._stored.clipped != self._shown.encoding.clipped:
            # At the edge an N5 block may have any shape, and tells it itself.
            return np.where(self._shown.are_whole(cells), kept, made)
        return kept

    def show(self, coords: Coords, stored: bytes) -> bytes:
        cell = self._shown.cell(coords)
        payload, shape = self._unframed(cell, stored)
        if not self._passes or shape != self._shown.shape(cell):
            shown = self._shown.made_of(cell, self._elements(payload, shape))
        else:
            payload = encode(_checks(self._shown.encoding), decode(self._checks, payload))
            shown = self._shown.framed(shape, payload)
        # A block of N5 tells its shape itself, and may tell another than it should have.
        told = self.sizes(np.array([coords], np.uint64), np.array([len(stored)], np.int64)).item()
        if told not in (-1, len(shown)):
            raise ValueError(f"{len(stored)} bytes are none of a chunk of {shape} {self._array.data_type}")
        return shown

    def _unframed(self, cell: Coords, stored: bytes) -> tuple[bytes, Coords]:
        """The payload, and the shape of the elements in it."""
        if self._stored.frame == "n5":
            return self._n5_unframed(stored)
        shape = self._shown.clipped_shape(cell) if self._stored.clipped else self._array.chunk
        return stored[_header_size(self._stored.frame, self._shown.rank) :], shape

    def _n5_unframed(self, stored: bytes) -> tuple[bytes, Coords]:
        """N5 file-system specification: mode, number of axes, size along each, x first; big-endian."""
        n = self._shown.rank
        mode, axes, start = int.from_bytes(stored[:2], "big"), int.from_bytes(stored[2:4], "big"), 4 + 4 * n
        if mode not in (N5_DEFAULT, N5_VARLENGTH) or axes != n or len(stored) < start:
            raise ValueError(f"no block of {n} axes: its header begins {stored[:4].hex()}")
        shape = tuple(np.frombuffer(stored, ">u4", n, 4)[::-1].tolist())
        if mode == N5_VARLENGTH:
            if int.from_bytes(stored[start : start + 4], "big") != math.prod(shape):
                raise ValueError("a block of variable length has no other form")
            start += 4
        if any(s > c for s, c in zip(shape, self._array.chunk, strict=True)):
            raise ValueError(f"a block of {shape[::-1]} elements, where {self._array.chunk[::-1]} is the most")
        return stored[start:], shape

    def _elements(self, payload: bytes, shape: Coords) -> npt.NDArray[Any]:
        """The decoded elements, axes in the array's order."""
        stored = self._stored
        memory, dtype = tuple(shape[a] for a in stored.order), np.dtype(stored.data_type)
        elements = decode_array(stored.serializer, decode(stored.codecs, payload), memory, dtype)
        return elements.transpose(np.argsort(stored.order)) if memory else elements


def n5_header(shape: Coords) -> bytes:
    """The header of a default block; `shape` in C order, written x first."""
    sizes = np.array(shape[::-1], ">u4").tobytes()
    return N5_DEFAULT.to_bytes(2, "big") + len(shape).to_bytes(2, "big") + sizes


def fill_element(value: Any, dtype: npt.DTypeLike) -> Any:
    """A fill value of metadata as an element: a number, bool, [re, im], or the name of a float that JSON has not."""
    if isinstance(value, list | tuple):
        value = complex(*(fill_element(part, np.float64) for part in value))
    if isinstance(value, str):
        value = float({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value))
    return np.array(0 if value is None else value).astype(dtype)[()]


class FillValue:
    """A `model.Filler`: chunks full of the array's fill value."""

    def __init__(self, array: Array, shown: ChunkEncoding) -> None:
        _require_small(array, "made")
        self._shown = _Shown(array, shown)
        self._last: tuple[Coords, bytes] | None = None  # most are whole chunks, all alike
        self._sizes: dict[Coords, int] = {}

    def sizes(self, coords: U64) -> Sizes:
        cells = self._shown.cells(coords)
        sizes = self._shown.sizes(cells)
        for i in np.flatnonzero(sizes < 0).tolist():
            shape = self._shown.shape(tuple(cells[i].tolist()))
            if shape not in self._sizes:  # of compressed ones: by making one of each shape
                self._sizes[shape] = len(self._made(shape))
            sizes[i] = self._sizes[shape]
        return sizes

    def show(self, coords: Coords) -> bytes:
        return self._made(self._shown.shape(self._shown.cell(coords)))

    def _made(self, shape: Coords) -> bytes:
        last = self._last
        if last is None or last[0] != shape:
            element = fill_element(self._shown.array.fill_value, self._shown.encoding.data_type)
            self._last = last = shape, self._shown.encoded(np.full(shape, element))
        return last[1]


def _require_small(array: Array, done: str) -> None:
    if math.prod(array.chunk) * max(np.dtype(array.data_type).itemsize, 1) > MAX_DECODED:
        raise UnsupportedError(f"chunks of {array.chunk!r:.80} must be {done}; {MAX_DECODED} bytes is the limit")


def _require_decodable(encoding: ChunkEncoding) -> None:
    for codec in encoding.codecs:
        if not can_decode(codec):
            raise UnsupportedError(f"codec {codec.name!r} must be undone, and is unknown")
    if not can_decode_array(encoding.serializer):
        raise UnsupportedError(f"codec {encoding.serializer.name!r} must be undone, and is unknown")
