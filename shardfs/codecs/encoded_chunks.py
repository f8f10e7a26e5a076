"""The chunks of an array in one encoding: their shapes and sizes, their elements, and serialization of elements."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs import checks, images, n5_blocks
from shardfs.codecs.decoders import can_decode, decode, require_crc32c
from shardfs.codecs.encoders import can_encode, can_store, encode, store, stored_sizes
from shardfs.codecs.zlib_streams import MAX_DECODED
from shardfs.model.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardfs.model.arrays import Array, ChunkEncoding, Codec
    from shardfs.model.values import U64, Bool, Coords, Sizes

CRC32C, CHECK_SIZE = "crc32c", 4
BCOLZ_HEADER = b"blpk" + bytes([1, 0, 0, 0]) + (1).to_bytes(8, "little")
"""The 16 bytes before the Blosc chunk, which bcolz skips: magic, version, reserved, one chunk."""


def without_checks(codecs: Sequence[Codec]) -> tuple[Codec, ...]:
    """The codecs without the final checksums, which can be cut off without decoding."""
    while codecs and codecs[-1].name == CRC32C:
        codecs = codecs[:-1]
    return tuple(codecs)


class EncodedChunks:
    """The chunks of an array in an encoding: shapes, sizes, decoding to elements, and serialization of elements.

    `coords` are positions in the collection's chunk grid; cells are positions in the order of the array's axes.

    Args:
        compress: really compress chunks; else their sizes are known without making them.
    """

    def __init__(self, array: Array, encoding: ChunkEncoding, *, compress: bool = False) -> None:
        self.array = array
        self.encoding = encoding
        self.rank = len(array.shape)
        self.header_size = {"none": 0, "n5": 4 + 4 * self.rank, "bcolz": len(BCOLZ_HEADER)}[encoding.frame]
        self.codecs = without_checks(encoding.codecs)
        self.checks = encoding.codecs[len(self.codecs) :]
        self.overhead = self.header_size + CHECK_SIZE * len(self.checks)
        self.is_bytes = encoding.serializer.name == "bytes"
        self.is_plain = self.is_bytes and not self.codecs
        self.stores = not compress and self.is_bytes and can_store(encoding.codecs)
        # The header of a Blosc chunk has its number of rows. bcolz clips the last chunk when it flushes an array, even
        # if that chunk was shown full, and writes the chunk before it changes the array's length.
        varies = encoding.clipped or encoding.frame == "bcolz"
        self.has_rows = varies and self.rank > 0 and [c.name for c in self.codecs] == ["blosc"]
        self.dtype = np.dtype(encoding.data_type)
        self._chunk = np.array(array.chunk, np.uint64)
        self._shape = np.array(array.shape, np.uint64)

    # ---- shapes and sizes ----

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest chunk, with its header and without compression."""
        return self._nbytes(self.shape((0,) * self.rank)) + self.overhead

    @property
    def is_small(self) -> bool:
        """Whether a chunk is within the limit for decoding in memory."""
        return self._nbytes(self.shape((0,) * self.rank)) <= MAX_DECODED

    def require_small(self) -> None:
        """Raise UnsupportedError if chunks are too large to be decoded in memory."""
        if not self.is_small:
            largest = self.shape((0,) * self.rank)
            raise UnsupportedError(f"chunks of {largest} must be decoded; the limit is {MAX_DECODED} bytes")

    def cell(self, coords: Coords) -> Coords:
        """The cell of a chunk at these grid coordinates; 0 along axes that the grid omits."""
        return tuple(0 if a is None else coords[a] for a in self.array.grid_axes)

    def cells(self, coords: U64) -> U64:
        """`cell` of many chunks: from (n, d) coordinates to (n, rank) cells."""
        out = np.zeros((len(coords), self.rank), np.uint64)
        for i, axis in enumerate(self.array.grid_axes):
            if axis is not None:
                out[:, i] = coords[:, axis]
        return out

    def clipped_shape(self, cell: Coords) -> Coords:
        """The number of elements along each axis of the array that are in this chunk and inside the array."""
        a = self.array
        return tuple(min((c + 1) * n, s) - c * n for c, n, s in zip(cell, a.chunk, a.shape, strict=True))

    def shape(self, cell: Coords) -> Coords:
        """The shape of a newly serialized chunk: full, or clipped if the encoding clips chunks at the edge."""
        return self.clipped_shape(cell) if self.encoding.clipped else self.array.chunk

    def are_whole(self, cells: U64) -> Bool:
        """Which (n,) of these cells (n, d) have all their elements inside the array. Clipping does not change those."""
        return np.asarray(((cells + np.uint64(1)) * self._chunk <= self._shape).all(axis=1))

    def sizes(self, cells: U64) -> Sizes:
        """Sizes in bytes (n,) of newly serialized chunks at cells (n, rank), by arithmetic; -1 if compressed."""
        if not self.is_plain and not self.stores:
            return np.full(len(cells), -1, np.int64)
        starts = cells * self._chunk
        extents = np.minimum(starts + self._chunk, self._shape) - starts
        if not self.encoding.clipped:
            extents[:] = self._chunk
        nbytes = extents.prod(axis=1, dtype=np.uint64).astype(np.int64) * self.dtype.itemsize
        return np.asarray(stored_sizes(self.encoding.codecs, nbytes) + self.header_size)

    def _nbytes(self, shape: Coords) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def decoded_size(self, shape: Coords) -> int | None:
        """Bytes of the elements, if at most one codec makes the payload of them; else None."""
        return self._nbytes(shape) if self.is_bytes and len(self.codecs) <= 1 else None

    # ---- from bytes to elements ----

    def parse_header(self, cell: Coords, data: bytes) -> tuple[int, Coords]:
        """The position of the payload, and the shape of the elements in it, in the array's axes.

        Raise ValueError for a wrong header.
        """
        if self.encoding.frame == "n5":
            return self._parse_n5_header(data)
        if self.encoding.frame == "bcolz" and not data.startswith(BCOLZ_HEADER[:4]):
            raise ValueError(f"a bcolz chunk begins with {BCOLZ_HEADER[:4].hex()}, found {data[:4].hex()}")
        start = self.header_size
        whole = self.array.chunk
        if not self.has_rows:
            return start, self.shape(cell)
        nbytes, inside = int.from_bytes(data[start + 4 : start + 8], "little"), self.clipped_shape(cell)
        if nbytes == self._nbytes(whole):
            return start, whole
        rows, remainder = divmod(nbytes, self._nbytes((1, *inside[1:])))
        return start, inside if remainder or not 0 < rows <= whole[0] else (rows, *inside[1:])

    def _parse_n5_header(self, data: bytes) -> tuple[int, Coords]:
        header = n5_blocks.parse_header(data)
        header.require_within(self.array.chunk[::-1])
        if header.elements != math.prod(header.shape):
            raise ValueError("an N5 block of variable length cannot be converted to another layout")
        return header.size, header.shape[::-1]

    def payload(self, data: bytes, start: int) -> bytes | memoryview:
        """The data without header and checksums, not copied. Raise ValueError if a checksum is wrong."""
        if not start and not self.checks:
            return data
        payload = memoryview(data)[start:]
        for _ in self.checks:
            require_crc32c(payload)
            payload = payload[:-CHECK_SIZE]
        return payload

    def require_valid(self, cell: Coords, data: bytes) -> None:
        """Raise ValueError, with the reason, if a chunk from a client lacks elements or its size is wrong.

        Compressed data are decoded only if their headers do not have the decoded size.
        """
        start, shape = self.parse_header(cell, data)
        inside = self.clipped_shape(cell)
        if not self.has_rows and any(n < m for n, m in zip(shape, inside, strict=True)):
            raise ValueError(f"a chunk of {shape} is too small: the array has {inside} elements there")
        if (nbytes := self.decoded_size(shape)) is not None:
            checks.require_made_of(self.codecs, self.payload(data, start), nbytes)

    def require_no_more(self, cell: Coords, data: bytes) -> None:
        """Raise ValueError if a chunk has rows for a longer array. A full chunk may be padded instead."""
        rows, inside = self.parse_header(cell, data)[1][0], self.clipped_shape(cell)[0]
        if inside < rows < self.array.chunk[0]:
            raise ValueError(f"a chunk of {rows} rows is too large: the array has {inside} there; resize it first")

    def elements(self, payload: bytes, shape: Coords) -> npt.NDArray[Any]:
        """The decoded elements, axes in the array's order.

        Raise ValueError, with the reason, if they cannot be decoded.
        """
        encoding, memory = self.encoding, tuple(shape[a] for a in self.encoding.order)
        if self.is_bytes:
            size = self._nbytes(shape)
            data = decode(encoding.codecs, payload, size)
            if len(data) != size:
                raise ValueError(f"{size} bytes expected for a chunk of {memory} {self.dtype}, {len(data)} found")
            elements = np.frombuffer(data, self.dtype).reshape(memory)
        else:
            name, configuration = (
                encoding.serializer.name.removeprefix(images.PREFIX),
                encoding.serializer.configuration,
            )
            elements = images.decode(name, decode(encoding.codecs, payload), memory, self.dtype, configuration)
        return elements.transpose(np.argsort(encoding.order)) if memory else elements

    # ---- from elements to bytes ----

    def made_of(self, cell: Coords, elements: npt.NDArray[Any]) -> bytes | memoryview:
        """The bytes of a chunk with these elements, cropped or padded with the fill value as needed.

        Raise ValueError, with the reason, if they cannot be encoded.
        """
        encoding, wanted = self.encoding, self.shape(cell)
        buffer, room = self.room(wanted)
        # One copy transposes, changes byte order, and places elements behind the header: chunks are large.
        memory = room.view(self.dtype).reshape(tuple(wanted[a] for a in encoding.order))
        out = memory.transpose(np.argsort(encoding.order)) if wanted else memory
        if elements.shape == wanted:
            out[...] = elements
        else:
            out[...] = fill_element(self.array.fill_value, self.dtype)
            common = tuple(slice(0, min(a, b)) for a, b in zip(elements.shape, wanted, strict=True))
            out[common] = elements[common]
        if self.is_plain and not self.checks:
            return buffer
        put = store if self.stores else encode
        return self._header(wanted) + put(encoding.codecs, self._serialized(memory))

    def _serialized(self, memory: npt.NDArray[Any]) -> bytes:
        if self.is_bytes:
            return memory.tobytes()
        serializer = self.encoding.serializer
        return images.encode(serializer.name.removeprefix(images.PREFIX), memory, serializer.configuration)

    def room(self, shape: Coords) -> tuple[memoryview, npt.NDArray[np.uint8]]:
        """Memory for a chunk of this shape, with its header filled in, and the part of it for the elements.

        Raise ValueError for a chunk of more than `MAX_DECODED` bytes.
        """
        header, nbytes = self._header(shape), self._nbytes(shape)
        if nbytes > MAX_DECODED:  # only found now, because any N5 block may be smaller than a full one
            raise ValueError(f"a chunk of {shape} must be decoded; the limit is {MAX_DECODED} bytes")
        buffer = np.empty(len(header) + nbytes, np.uint8)
        buffer[: len(header)] = np.frombuffer(header, np.uint8)
        return buffer.data.toreadonly(), buffer[len(header) :]

    def framed(self, shape: Coords, payload: bytes | memoryview) -> bytes | memoryview:
        """The payload with header and checksums; not copied if there are none."""
        return self._header(shape) + encode(self.checks, bytes(payload)) if self.overhead else payload

    def _header(self, shape: Coords) -> bytes:
        if self.encoding.frame == "n5":
            return n5_blocks.header_of(shape[::-1])
        return BCOLZ_HEADER if self.encoding.frame == "bcolz" else b""

    # ---- what this installation lacks ----

    def undecodable(self) -> str | None:
        """Why shardfs cannot decode the chunks; None if it can. Does not look at data."""
        name = self.encoding.serializer.name
        for codec in self.encoding.codecs:
            if not can_decode(codec):
                inner = f" of {codec.configuration['cname']!r:.80}" if "cname" in codec.configuration else ""
                return f"codec {codec.name!r}{inner} must be undone, and is unknown"
        if self.is_bytes:
            return None
        if not name.startswith(images.PREFIX):
            return f"codec {name!r:.80} must be undone, and is unknown"
        channels = self.array.shape[0] if self.rank == images.RANK else 1
        return images.lacking(name.removeprefix(images.PREFIX), self.array.data_type, channels) or None

    def unencodable(self) -> str | None:
        """Why shardfs cannot make such chunks of elements without loss; None if it can. The chunks are decodable."""
        for codec in self.encoding.codecs:
            if not can_encode(codec):
                return f"chunks cannot be written: shardfs can decode codec {codec.name!r:.80}, but not encode it"
        name = self.encoding.serializer.name.removeprefix(images.PREFIX)
        if not self.is_bytes and images.is_lossy(name):
            return f"chunks cannot be written: encoding {name!r:.80} is lossy"
        return None


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
