"""Turn a stored chunk into the chunk that another layout shows, with as little work as possible.

There are three ways, from cheap to expensive: pass the stored bytes unchanged; keep the payload and change its frame;
decode, transpose, crop or pad, and serialize again. Decoded chunks are shown uncompressed where a layout permits that.
Otherwise they get their codec's form for incompressible data, so that their size is known without work.
"""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs import images, n5_blocks
from shardfs.codecs.decoders import can_decode, decode, decode_into, require_crc32c
from shardfs.codecs.encoders import can_store, encode, gzip_of_zlib, store, stored_sizes
from shardfs.codecs.zlib_streams import MAX_DECODED
from shardfs.model.arrays import Codec
from shardfs.model.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardfs.model.arrays import Array, ChunkEncoding
    from shardfs.model.collection import Transform
    from shardfs.model.values import U64, Bool, Coords, Sizes

CRC32C, CHECK_SIZE = "crc32c", 4
BCOLZ_HEADER = b"blpk" + bytes([1, 0, 0, 0]) + (1).to_bytes(8, "little")
"""The 16 bytes before the Blosc chunk, which bcolz skips: magic, version, reserved, one chunk."""

ZLIB, REWRAPPED_SIZE = "numcodecs.zlib", 12
"""`REWRAPPED_SIZE` is the difference between the wrappers around deflated data: 18 bytes of gzip, 6 of zlib."""


def transcoder(array: Array, shown: ChunkEncoding) -> Transform | None:
    """The transform from an array's stored chunks to the encoding `shown`; None if no bytes differ.

    Raise UnsupportedError, with the reason, if the chunks must be decoded and shardfs cannot decode them.
    """
    stored = array.encoding
    same_around = len(_checks(stored)) == len(_checks(shown)) and stored.frame == shown.frame
    is_same = _same_payload(array, shown) and same_around and stored.clipped == shown.clipped
    return None if is_same else Transcoder(array, shown)


def without_checks(codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The codecs without the final checksums, which can be cut off without decoding."""
    while codecs and codecs[-1].name == CRC32C:
        codecs = codecs[:-1]
    return tuple(codecs)


def memory_order(order: Coords, chunk: Coords) -> Coords:
    """An order of axes without axes of chunk length 1, whose place makes no difference in memory."""
    return tuple(axis for axis in order if chunk[axis] != 1)


def _checks(encoding: ChunkEncoding) -> tuple[Codec, ...]:
    return encoding.codecs[len(_inner(encoding)) :]


def _inner(encoding: ChunkEncoding) -> tuple[Codec, ...]:
    return without_checks(encoding.codecs)


def _same_payload(array: Array, b: ChunkEncoding) -> bool:
    """Whether the stored bytes of a full chunk are also its bytes in `b`, except for frames and checksums."""
    a = array.encoding
    return (
        _layout_type(a.data_type) == _layout_type(b.data_type)
        and memory_order(a.order, array.chunk) == memory_order(b.order, array.chunk)
        and _decoded_alike((a.serializer, *_inner(a)), (b.serializer, *_inner(b)))
    )


def _is_rewrapped(array: Array, b: ChunkEncoding) -> bool:
    """Whether the only difference is that a full chunk is deflated as zlib when stored and as gzip in `b`."""
    inner = _inner(array.encoding)
    if not inner or inner[-1].name != ZLIB:
        return False
    as_gzip = replace(array.encoding, codecs=(*inner[:-1], Codec("gzip")))
    return _same_payload(replace(array, encoding=as_gzip), b)


def _differ_in_byte_order(array: Array, b: ChunkEncoding) -> bool:
    """Whether `b` is uncompressed, and its elements differ from the decoded stored ones at most in byte order."""
    little = [replace(e, codecs=(), data_type=np.dtype(e.data_type).newbyteorder("<").str) for e in (array.encoding, b)]
    is_plain = b.serializer.name == "bytes" and not b.codecs
    return is_plain and _same_payload(replace(array, encoding=little[0]), little[1])


SELF_DESCRIBING = frozenset(
    ("bytes", "crc32c", "gzip", "zstd", "blosc", "numcodecs.bz2", "numcodecs.zlib", "numcodecs.lz4")
)
"""Codecs whose output can be decoded without knowing the encoder's parameters."""


def _decoded_alike(a: Sequence[Codec], b: Sequence[Codec]) -> bool:
    """Whether the same steps decode both."""
    return len(a) == len(b) and all(
        x.name == y.name and (x.name in SELF_DESCRIBING or x.configuration == y.configuration)
        for x, y in zip(a, b, strict=True)
    )


def _layout_type(data_type: str) -> str:
    """A type with the same bytes in memory: bools are stored as the numbers 0 and 1."""
    return np.dtype(data_type).str.replace("b", "u")


def _header_size(frame: str, rank: int) -> int:
    return {"none": 0, "n5": 4 + 4 * rank, "bcolz": len(BCOLZ_HEADER)}[frame]


class _ShownChunks:
    """The chunks of an array in the encoding that is shown: shapes, sizes, and serialization of elements.

    `coords` are positions in the collection's chunk grid; cells are positions in the order of the array's axes.

    Args:
        compress: really compress chunks; else their sizes are known without making them.
    """

    def __init__(self, array: Array, encoding: ChunkEncoding, *, compress: bool = False) -> None:
        self.array, self.encoding = array, encoding
        self.rank = len(array.shape)
        self.header_size = _header_size(encoding.frame, self.rank)
        self.checks = _checks(encoding)
        self.is_plain = encoding.serializer.name == "bytes" and not _inner(encoding)
        self.stores = not compress and encoding.serializer.name == "bytes" and can_store(encoding.codecs)
        self._dtype = np.dtype(encoding.data_type)
        self._chunk, self._shape = np.array(array.chunk, np.uint64), np.array(array.shape, np.uint64)

    @property
    def is_small(self) -> bool:
        """Whether a chunk is within the limit for decoding in memory."""
        return math.prod(self.shape((0,) * self.rank)) * self._dtype.itemsize <= MAX_DECODED

    def require_small(self) -> None:
        """Raise UnsupportedError if chunks are too large to be decoded in memory."""
        if not self.is_small:
            largest = self.shape((0,) * self.rank)
            raise UnsupportedError(f"chunks of {largest} must be decoded; the limit is {MAX_DECODED} bytes")

    def cell(self, coords: Coords) -> Coords:
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
        """Which chunks have all their elements inside the array, so that clipping does not change them."""
        return np.asarray(((cells + np.uint64(1)) * self._chunk <= self._shape).all(axis=1))

    def sizes(self, cells: U64) -> Sizes:
        """Sizes of newly serialized chunks, by arithmetic; -1 if they are compressed."""
        if not self.is_plain and not self.stores:
            return np.full(len(cells), -1, np.int64)
        starts = cells * self._chunk
        extents = np.minimum(starts + self._chunk, self._shape) - starts
        if not self.encoding.clipped:
            extents[:] = self._chunk
        nbytes = extents.prod(axis=1, dtype=np.uint64).astype(np.int64) * self._dtype.itemsize
        return np.asarray(stored_sizes(self.encoding.codecs, nbytes) + self.header_size)

    def made_of(self, cell: Coords, elements: npt.NDArray[Any]) -> bytes | memoryview:
        """The shown bytes of a chunk with these elements, cropped or padded with the fill value as needed."""
        encoding, wanted = self.encoding, self.shape(cell)
        buffer, room = self.room(wanted)
        # One copy transposes, changes byte order, and places elements behind the header: chunks are large.
        memory = room.view(self._dtype).reshape(tuple(wanted[a] for a in encoding.order))
        out = memory.transpose(np.argsort(encoding.order)) if wanted else memory
        if elements.shape == wanted:
            out[...] = elements
        else:
            out[...] = fill_element(self.array.fill_value, self._dtype)
            common = tuple(slice(0, min(a, b)) for a, b in zip(elements.shape, wanted, strict=True))
            out[common] = elements[common]
        if self.is_plain and not self.checks:
            return buffer
        put = store if self.stores else encode
        return self._header(wanted) + put(encoding.codecs, memory.tobytes())

    def room(self, shape: Coords) -> tuple[memoryview, npt.NDArray[np.uint8]]:
        """Memory for a chunk of this shape, with its header filled in, and the part of it for the elements."""
        header, nbytes = self._header(shape), math.prod(shape) * self._dtype.itemsize
        if nbytes > MAX_DECODED:  # only found now, because any N5 block may be smaller than a full one
            raise ValueError(f"a chunk of {shape} must be decoded; the limit is {MAX_DECODED} bytes")
        buffer = np.empty(len(header) + nbytes, np.uint8)
        buffer[: len(header)] = np.frombuffer(header, np.uint8)
        return buffer.data.toreadonly(), buffer[len(header) :]

    def framed(self, shape: Coords, payload: bytes) -> bytes:
        return self._header(shape) + payload

    def _header(self, shape: Coords) -> bytes:
        if self.encoding.frame == "n5":
            return n5_blocks.header_of(shape[::-1])
        return BCOLZ_HEADER if self.encoding.frame == "bcolz" else b""


class Transcoder:
    """A `model.Transform` between encodings. Raise UnsupportedError if shardfs cannot decode what must be decoded."""

    def __init__(self, array: Array, shown: ChunkEncoding) -> None:
        self._stored, self._shown = array.encoding, _ShownChunks(array, shown)
        self._array = array
        self._rewraps = _is_rewrapped(array, shown)
        self._passes = self._rewraps or _same_payload(array, shown)
        self._checks = _checks(self._stored)
        self._overhead = CHECK_SIZE * len(self._checks) + _header_size(self._stored.frame, self._shown.rank)
        # An N5 block at the edge may have any shape; its header has the shape. A Blosc chunk there may be full even so.
        self._may_be_full = self._stored.clipped and [c.name for c in _inner(self._stored)] == ["blosc"]
        self._changes_edges = self._stored.clipped != shown.clipped or self._stored.frame == "n5" or self._may_be_full
        self._swaps_bytes = not self._passes and _differ_in_byte_order(array, shown)
        if not self._passes or (
            self._changes_edges and any(s % c for s, c in zip(array.shape, array.chunk, strict=True))
        ):
            _require_decodable(array)
            self._shown.require_small()

    unwritable = "layouts other than native are read-only: use layout=native to write"

    @property
    def name(self) -> str:
        return "reframed" if self._passes else "decoded"

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        cells = self._shown.cells(coords)
        made = self._shown.sizes(cells)
        if not self._passes or self._shown.is_plain:
            return made
        passed = stored - self._overhead + self._shown.header_size + CHECK_SIZE * len(self._shown.checks)
        passed += REWRAPPED_SIZE * self._rewraps
        passed = np.where(stored < self._overhead, -1, passed)
        return np.where(self._shown.are_whole(cells), passed, made) if self._changes_edges else passed

    def show(self, coords: Coords, stored: bytes) -> bytes | memoryview:
        cell = self._shown.cell(coords)
        start, shape = self._begin(cell, stored)
        shown: bytes | memoryview
        if self._swaps_bytes and shape == self._shown.shape(cell):
            shown = self._swapped(stored[start:], shape)
        elif not self._passes or shape != self._shown.shape(cell) or self._is_always_made(cell):
            shown = self._shown.made_of(cell, self._elements(stored[start:], shape))
        elif not (self._rewraps or self._shown.checks or self._shown.header_size):
            shown = memoryview(stored)[start:]  # no copy, as chunks are large
            for _ in self._checks:
                require_crc32c(shown)
                shown = shown[:-CHECK_SIZE]
        else:
            payload = decode(self._checks, stored[start:])
            payload = gzip_of_zlib(payload, self._decoded_size(shape)) if self._rewraps else payload
            shown = self._shown.framed(shape, encode(self._shown.checks, payload))
        listed = self.sizes(np.array([coords], np.uint64), np.array([len(stored)], np.int64))[0]
        if len(shown) != listed >= 0:  # programs may already have seen the listed size
            raise ValueError(f"{len(stored)} stored bytes cannot be a chunk of {shape} {self._array.data_type}")
        return shown

    def store(self, coords: Coords, shown: bytes) -> bytes:
        raise UnsupportedError("layouts other than native are read-only: use layout=native to write")

    def _swapped(self, payload: bytes, shape: Coords) -> memoryview:
        """Decode and change the byte order in place: touching memory for the first time is slow."""
        buffer, room = self._shown.room(shape)
        decode_into(self._stored.codecs, payload, room.data)
        stored, shown = np.dtype(self._stored.data_type), np.dtype(self._shown.encoding.data_type)
        if stored.byteorder != shown.byteorder and stored.itemsize > 1:
            room.view(shown)[...] = room.view(stored)  # in place, and faster than `byteswap`
        return buffer

    def _decoded_size(self, shape: Coords) -> int | None:
        """Bytes of an uncompressed chunk, if one codec makes the stored chunk of it; else None."""
        size = math.prod(shape) * np.dtype(self._stored.data_type).itemsize
        return size if len(_inner(self._stored)) == 1 and self._stored.serializer.name == "bytes" else None

    def _is_always_made(self, cell: Coords) -> bool:
        """Whether a chunk at the edge is always serialized again, so that its size does not depend on its bytes."""
        ends_with_array = self._shown.clipped_shape(cell) != self._array.chunk
        return self._changes_edges and ends_with_array and self._shown.stores and not self._shown.is_plain

    def _begin(self, cell: Coords, stored: bytes) -> tuple[int, Coords]:
        """The position of the payload, and the shape of the elements in it."""
        if self._stored.frame == "n5":
            return self._n5_begin(stored)
        if self._stored.frame == "bcolz" and not stored.startswith(BCOLZ_HEADER[:4]):
            raise ValueError(f"a bcolz chunk begins with {BCOLZ_HEADER[:4].hex()}, found {stored[:4].hex()}")
        start, whole = _header_size(self._stored.frame, self._shown.rank), self._array.chunk
        nbytes = math.prod(whole) * np.dtype(self._stored.data_type).itemsize
        is_whole = self._may_be_full and int.from_bytes(stored[start + 4 : start + 8], "little") == nbytes
        return start, self._shown.clipped_shape(cell) if self._stored.clipped and not is_whole else whole

    def _n5_begin(self, stored: bytes) -> tuple[int, Coords]:
        header = n5_blocks.parse_header(stored)
        header.require_within(self._array.chunk[::-1])
        if header.elements != math.prod(header.shape):
            raise ValueError("an N5 block of variable length cannot be shown in another layout")
        return header.size, header.shape[::-1]

    def _elements(self, payload: bytes, shape: Coords) -> npt.NDArray[Any]:
        """The decoded elements, axes in the array's order."""
        stored, dtype = self._stored, np.dtype(self._stored.data_type)
        memory, size = tuple(shape[a] for a in stored.order), math.prod(shape) * dtype.itemsize
        if stored.serializer.name == "bytes":
            data = decode(stored.codecs, payload, size)
            if len(data) != size:
                raise ValueError(f"{size} bytes expected for a chunk of {memory} {dtype}, {len(data)} found")
            elements = np.frombuffer(data, dtype).reshape(memory)
        else:
            name, configuration = stored.serializer.name.removeprefix(images.PREFIX), stored.serializer.configuration
            elements = images.decode(name, decode(stored.codecs, payload), memory, dtype, configuration)
        return elements.transpose(np.argsort(stored.order)) if memory else elements


def fill_element(value: Any, dtype: npt.DTypeLike) -> Any:
    """Convert a fill value of metadata: a number, bool, [re, im], string, "NaN", "Infinity" or "-Infinity"."""
    kind = np.dtype(dtype).kind
    if kind in "US":
        return np.array(base64.b64decode(value) if kind == "S" else value, dtype)[()]
    if isinstance(value, list | tuple):
        value = complex(*(fill_element(part, np.float64) for part in value))
    if isinstance(value, str):
        value = float({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value))
    return np.array(0 if value is None else value).astype(dtype)[()]


def is_filled(value: Any, dtype: npt.DTypeLike) -> bool:
    """Whether an element of this value has non-zero bytes; -0.0 has. Layouts without fill values imply zero bytes."""
    return any(fill_element(value, dtype).tobytes())


class FillValue:
    """A `model.Filler` that makes chunks full of the array's fill value.

    Raise UnsupportedError, with the reason, if chunks are too large, or the parameters of a codec are invalid.

    Args:
        lazy: refuse too large chunks only when a chunk is opened that is not stored, since all may be stored.
    """

    def __init__(self, array: Array, shown: ChunkEncoding, *, lazy: bool = False) -> None:
        self._shown = _ShownChunks(array, shown, compress=True)  # cheap, as chunks of one shape are compressed once
        if not lazy:
            self._shown.require_small()
        try:
            encode(shown.codecs, bytes(np.dtype(shown.data_type).itemsize))
        except ValueError as e:
            raise UnsupportedError(f"chunks that are not stored cannot be made: {e}") from e
        self._last: tuple[Coords, bytes] | None = None  # most chunks are full, and all full ones are equal
        self._sizes: dict[Coords, int] = {}

    def sizes(self, coords: U64) -> Sizes:
        cells = self._shown.cells(coords)
        sizes = self._shown.sizes(cells)
        for i in np.flatnonzero(sizes < 0).tolist() if self._shown.is_small else ():  # else `show` raises the error
            cell = tuple(cells[i].tolist())
            shape = self._shown.shape(cell)
            if shape not in self._sizes:  # the size of a compressed chunk is known only by making one
                self._sizes[shape] = len(self._made(cell, shape))
            sizes[i] = self._sizes[shape]
        return sizes

    def show(self, coords: Coords) -> bytes:
        cell = self._shown.cell(coords)
        return self._made(cell, self._shown.shape(cell))

    def _made(self, cell: Coords, shape: Coords) -> bytes:
        last = self._last
        if last is None or last[0] != shape:
            self._last = last = shape, self._make(cell, shape)
        return last[1]

    def _make(self, cell: Coords, shape: Coords) -> bytes:
        self._shown.require_small()
        encoding, value = self._shown.encoding, self._shown.array.fill_value
        if encoding.serializer.name == "vlen-utf8":
            return encode(encoding.codecs, _strings(math.prod(shape), value.encode()))
        element = fill_element(value, encoding.data_type)
        return bytes(self._shown.made_of(cell, np.broadcast_to(element, shape)))


def _strings(count: int, string: bytes) -> bytes:
    """`count` copies of a string, serialized by the codec vlen-utf8 of numcodecs."""
    if count * (len(string) + 4) > MAX_DECODED:
        raise UnsupportedError(f"a chunk of {count} strings is too large to make; the limit is {MAX_DECODED} bytes")
    return count.to_bytes(4, "little") + count * (len(string).to_bytes(4, "little") + string)


def _require_decodable(array: Array) -> None:
    """Raise UnsupportedError, with the reason, if shardfs cannot decode the array's chunks. Does not look at data."""
    encoding, name = array.encoding, array.encoding.serializer.name
    for codec in encoding.codecs:
        if not can_decode(codec):
            inner = f" of {codec.configuration['cname']!r:.80}" if "cname" in codec.configuration else ""
            raise UnsupportedError(f"codec {codec.name!r}{inner} must be undone, and is unknown")
    if name != "bytes" and not name.startswith(images.PREFIX):
        raise UnsupportedError(f"codec {name!r:.80} must be undone, and is unknown")
    channels = array.shape[0] if len(array.shape) == images.RANK else 1
    if name != "bytes" and (why := images.lacking(name.removeprefix(images.PREFIX), array.data_type, channels)):
        raise UnsupportedError(why)
