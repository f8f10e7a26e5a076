"""Turn a stored chunk into the chunk that another layout shows, and back, with as little work as possible.

There are three ways, from cheap to expensive: pass the bytes unchanged; keep the payload and change its frame; decode,
transpose, crop or pad, and serialize again. Decoded chunks are shown uncompressed where a layout permits that.
Otherwise they get their codec's form for incompressible data, so that their size is known without work. Chunks to be
stored are really compressed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.decoders import decode_into
from shardfs.codecs.encoded_chunks import EncodedChunks, fill_element, without_checks
from shardfs.codecs.encoders import encode, gzip_of_zlib, zlib_of_gzip
from shardfs.codecs.zlib_streams import MAX_DECODED
from shardfs.model.arrays import Codec
from shardfs.model.collection import Filler, Transform
from shardfs.model.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.arrays import Array, ChunkEncoding
    from shardfs.model.values import U64, AxisPosition, Coords, Sizes

ZLIB, REWRAPPED_SIZE = "numcodecs.zlib", 12
"""`REWRAPPED_SIZE` is the difference between the wrappers around deflated data: 18 bytes of gzip, 6 of zlib."""


def transcoder(array: Array, encoding: ChunkEncoding) -> Transform | None:
    """The transform from an array's stored chunks to `encoding`; None if no bytes differ.

    Raise UnsupportedError, with the reason, if the chunks must be decoded and shardfs cannot decode them.
    """
    a = array.encoding
    same_around = _sums(a) == _sums(encoding) and a.frame == encoding.frame and a.clipped == encoding.clipped
    return None if same_around and _same_payload(array.chunk, a, encoding) else Transcoder(array, encoding)


def memory_order(order: Coords, chunk: Coords) -> Coords:
    """An order of axes without axes of chunk length 1, whose place makes no difference in memory."""
    return tuple(axis for axis in order if chunk[axis] != 1)


def _sums(encoding: ChunkEncoding) -> int:
    return len(encoding.codecs) - len(without_checks(encoding.codecs))


def _same_payload(chunk: Coords, a: ChunkEncoding, b: ChunkEncoding) -> bool:
    """Whether the bytes of a full chunk in `a` are also its bytes in `b`, except for frames and checksums."""
    return (
        _layout_type(a.data_type) == _layout_type(b.data_type)
        and memory_order(a.order, chunk) == memory_order(b.order, chunk)
        and _decoded_alike((a.serializer, *without_checks(a.codecs)), (b.serializer, *without_checks(b.codecs)))
    )


def _is_rewrapped(chunk: Coords, a: ChunkEncoding, b: ChunkEncoding) -> bool:
    """Whether the only difference is that a full chunk is deflated as zlib in `a` and as gzip in `b`."""
    inner = without_checks(a.codecs)
    if not inner or inner[-1].name != ZLIB:
        return False
    return _same_payload(chunk, replace(a, codecs=(*inner[:-1], Codec("gzip"))), b)


def _differ_in_byte_order(chunk: Coords, a: ChunkEncoding, b: ChunkEncoding) -> bool:
    """Whether `b` is uncompressed, and its elements differ from the decoded ones of `a` at most in byte order."""
    little = [replace(e, codecs=(), data_type=np.dtype(e.data_type).newbyteorder("<").str) for e in (a, b)]
    return b.serializer.name == "bytes" and not b.codecs and _same_payload(chunk, *little)


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


class _Conversion:
    """One direction: from the chunks of an array in one encoding to its chunks in another.

    Args:
        rewrap: changes only the wrapper of a payload, given its decoded size if known; returns None if that is
            impossible. Given if payloads then pass.
    """

    def __init__(
        self,
        source: EncodedChunks,
        target: EncodedChunks,
        rewrap: Callable[[bytes, int | None], bytes | None] | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._rewrap = rewrap
        chunk = source.array.chunk
        a = source.encoding
        b = target.encoding
        self._makes_bools = target.dtype.kind == "b" != source.dtype.kind
        self.passes = not self._makes_bools and (rewrap is not None or _same_payload(chunk, a, b))
        # The header of an N5 block has its shape, which may be any.
        self.changes_edges = a.clipped != b.clipped or a.frame == "n5" or source.has_rows
        self._swaps_bytes = not self.passes and not self._makes_bools and _differ_in_byte_order(chunk, a, b)
        has_edges = any(s % c for s, c in zip(source.array.shape, chunk, strict=True))
        self.decodes = not self.passes or (self.changes_edges and has_edges)

    def convert(self, cell: Coords, data: bytes) -> bytes | memoryview:
        """The chunk in the other encoding. Raise ValueError, with the reason, if `data` cannot be this chunk."""
        source = self._source
        target = self._target
        start, shape = source.parse_header(cell, data)
        if shape == target.shape(cell) and self.passes and not self._is_always_made(cell):
            payload: bytes | memoryview | None = source.payload(data, start)
            if self._rewrap is not None and payload is not None:
                payload = self._rewrap(bytes(payload), source.decoded_size(shape))
            if payload is not None:
                return target.framed(shape, payload)
        if shape == target.shape(cell) and self._swaps_bytes:
            return self._swapped(data[start:], shape)
        elements = source.elements(data[start:], shape)
        if self._makes_bools and elements.max(initial=0) > 1:
            raise ValueError("an element of an array of bools should be 0 or 1")
        return target.made_of(cell, elements)

    def _swapped(self, payload: bytes, shape: Coords) -> memoryview:
        """Decode and change the byte order in place: touching memory for the first time is slow."""
        buffer, room = self._target.room(shape)
        decode_into(self._source.encoding.codecs, payload, room.data)
        a = self._source.dtype
        b = self._target.dtype
        if a.byteorder != b.byteorder and a.itemsize > 1:
            room.view(b)[...] = room.view(a)  # in place, and faster than `byteswap`
        return buffer

    def _is_always_made(self, cell: Coords) -> bool:
        """Whether a chunk at the edge is always serialized again, so that its size does not depend on its bytes."""
        target = self._target
        ends_with_array = target.clipped_shape(cell) != target.array.chunk
        return self.changes_edges and ends_with_array and target.stores and not target.is_plain


class ClippedBlockError(ValueError):
    """A stored chunk ends where the array ended before it grew. Its shown size does not follow from its stored size.

    Args:
        positions: as `Transcoder.clipped`, which does not have them yet.
    """

    def __init__(self, positions: set[AxisPosition]) -> None:
        self.positions = positions
        super().__init__("the chunk was stored before the array grew, and has another size than listed; open it again")


class Transcoder(Transform):
    """Converts chunks between encodings. Raise UnsupportedError if shardfs cannot decode what must be decoded.

    Args:
        compress: really compress shown chunks that must be decoded.

    Attributes:
        clipped: the positions of chunks that may be stored clipped, although they are inside of the array. Then they
            must be padded, and their sizes do not follow from their stored sizes.
    """

    unwritable: str | None = None

    def __init__(self, array: Array, encoding: ChunkEncoding, *, compress: bool = False) -> None:
        self._stored = EncodedChunks(array, array.encoding, compress=True)
        self._shown = EncodedChunks(array, encoding, compress=compress)
        self._rewraps = _is_rewrapped(array.chunk, array.encoding, encoding)
        self._showing = _Conversion(self._stored, self._shown, gzip_of_zlib if self._rewraps else None)
        self._storing = _Conversion(self._shown, self._stored, zlib_of_gzip if self._rewraps else None)
        if self._showing.decodes:
            if why := self._stored.undecodable():
                raise UnsupportedError(why)
            self._shown.require_small()
        self.clipped: set[AxisPosition] = set()
        needed = self._storing.decodes
        self.unwritable = (self._shown.undecodable() or self._stored.unencodable()) if needed else None

    @property
    def name(self) -> str:
        return "reframed" if self._showing.passes else "decoded"

    @property
    def decodes(self) -> str:
        """Which chunks `show` may have to decode, for messages; "" if none."""
        if not self._showing.decodes:
            return ""
        return "chunks at the edge of the array" if self._showing.passes else "all chunks"

    def compressing(self) -> Transcoder:
        """The same transform, but `show` really compresses chunks that it decodes.

        Raise UnsupportedError, with the reason, if shardfs cannot encode them.
        """
        compressing = Transcoder(self._stored.array, self._shown.encoding, compress=True)
        if why := self._shown.unencodable():
            raise UnsupportedError(why)
        return compressing

    def sizes(self, coords: U64, stored_sizes: Sizes) -> Sizes:
        cells = self._shown.cells(coords)
        serialized_sizes = self._shown.sizes(cells)
        if not self._showing.passes or self._shown.is_plain:
            return serialized_sizes
        passed_sizes = stored_sizes - self._stored.overhead + self._shown.overhead + REWRAPPED_SIZE * self._rewraps
        passed_sizes = np.where(stored_sizes < self._stored.overhead, -1, passed_sizes)
        if not self._showing.changes_edges:
            return passed_sizes
        for axis, position in self.clipped:
            passed_sizes[cells[:, axis] == position] = -1
        return np.where(self._shown.are_whole(cells), passed_sizes, serialized_sizes)

    def show(self, coords: Coords, stored_bytes: bytes) -> bytes | memoryview:
        cell = self._shown.cell(coords)
        shown_bytes = self._showing.convert(cell, stored_bytes)
        listed = self.sizes(np.array([coords], np.uint64), np.array([len(stored_bytes)], np.int64))[0]
        if len(shown_bytes) != listed >= 0:  # programs may already have seen the listed size
            if self._stored.encoding.frame == "n5":
                shape, inside = self._stored.parse_header(cell, stored_bytes)[1], self._stored.clipped_shape(cell)
                raise ClippedBlockError({(a, c) for a, c in enumerate(cell) if shape[a] < inside[a]})
            wanted = f"{self._stored.array.chunk} {self._stored.array.data_type}"
            raise ValueError(f"{len(stored_bytes)} stored bytes cannot be a chunk of {wanted}")
        return shown_bytes

    def work(self, coords: Coords, stored_size: int) -> int:
        if not self._showing.decodes:
            return stored_size + self._shown.overhead
        between = MAX_DECODED if len(self._stored.codecs) > 1 else 0  # what the outer codecs decode to has any size
        return between + self._stored.most_bytes + self._shown.most_bytes

    def store(self, coords: Coords, shown_bytes: bytes) -> bytes:
        if self.unwritable is not None:
            raise UnsupportedError(self.unwritable)
        cell = self._shown.cell(coords)
        self._shown.require_valid(cell, shown_bytes)
        if self._shown.has_rows and self._stored.encoding.clipped:
            self._shown.require_no_more(cell, shown_bytes)
        return bytes(self._storing.convert(cell, shown_bytes))

    def is_exact(self, coords: Coords, shown_bytes: bytes) -> bool:
        cells = self._shown.cells(np.array([coords], np.uint64))
        keeps_edges = self._shown.encoding.clipped or self._shown.are_whole(cells)[0]
        is_made = self._shown.is_plain and not self._shown.checks
        return bool(is_made and keeps_edges and self._shown.sizes(cells)[0] == len(shown_bytes))


class FillValue(Filler):
    """Makes chunks full of the array's fill value.

    Raise UnsupportedError, with the reason, if chunks are too large, or the parameters of a codec are invalid.

    Args:
        lazy: refuse too large chunks only when a chunk is opened that is not stored, since all may be stored.
    """

    def __init__(self, array: Array, encoding: ChunkEncoding, *, lazy: bool = False) -> None:
        self._shown = EncodedChunks(array, encoding, compress=True)  # cheap, as chunks of one shape are compressed once
        if not lazy:
            self._shown.require_small()
        try:
            encode(encoding.codecs, bytes(np.dtype(encoding.data_type).itemsize))
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
        encoding = self._shown.encoding
        value = self._shown.array.fill_value
        if encoding.serializer.name == "vlen-utf8":
            return encode(encoding.codecs, _strings(math.prod(shape), value.encode()))
        element = fill_element(value, encoding.data_type)
        return bytes(self._shown.made_of(cell, np.broadcast_to(element, shape)))


def _strings(count: int, string: bytes) -> bytes:
    """`count` copies of a string, serialized by the codec vlen-utf8 of numcodecs."""
    if count * (len(string) + 4) > MAX_DECODED:
        raise UnsupportedError(f"a chunk of {count} strings is too large to make; the limit is {MAX_DECODED} bytes")
    return count.to_bytes(4, "little") + count * (len(string).to_bytes(4, "little") + string)
