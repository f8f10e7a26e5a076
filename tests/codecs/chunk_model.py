"""A model of encoded chunks that shares no code with shardfs: numpy lays chunks out, other libraries pack them."""

from __future__ import annotations

import bz2
import gzip
import itertools
import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import google_crc32c
import numpy as np
from hypothesis import strategies as st
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd

from shardfs.model.arrays import Array, ChunkEncoding, Codec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardfs.model.values import Coords

Elements: TypeAlias = Any


def streamed_zstd(data: bytes) -> bytes:
    """A frame that does not tell its size, as a library writes it that is given its input bit by bit: one raw block."""
    blocks = [data[i : i + 100] for i in range(0, len(data), 100)] or [b""]
    heads = [(len(b) << 3 | (i == len(blocks) - 1)).to_bytes(3, "little") for i, b in enumerate(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(h + b for h, b in zip(heads, blocks, strict=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda d: gzip.compress(d, 1),
    "zstd": lambda d: bytes(Zstd(1).encode(d)),
    "blosc": lambda d: bytes(Blosc("lz4", 5, 0).encode(d)),
    "numcodecs.bz2": bz2.compress,
    "numcodecs.zlib": zlib.compress,
    "numcodecs.lz4": lambda d: bytes(LZ4().encode(d)),
    "crc32c": lambda d: d + struct.pack("<I", google_crc32c.value(d)),
}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "zstd": lambda d: bytes(Zstd().decode(d)),
    "blosc": lambda d: bytes(Blosc().decode(d)),
    "numcodecs.bz2": bz2.decompress,
    "numcodecs.zlib": zlib.decompress,
    "numcodecs.lz4": lambda d: bytes(LZ4().decode(d)),
    "crc32c": lambda d: d[:-4],
}
CHAINS: list[tuple[str, ...]] = [
    *[(name,) for name in PACK],
    (),
    (),
    ("gzip", "crc32c"),
    ("zstd", "gzip"),
    ("crc32c", "blosc"),
    ("crc32c", "crc32c"),
]
TYPES = ["|b1", "|u1", "|i1"] + [
    order + kind for order in "<>" for kind in ("u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16")
]


def head(frame: str, shape: Coords) -> bytes:
    if frame == "n5":
        return struct.pack(f">HH{len(shape)}I", 0, len(shape), *shape[::-1])
    return b"blpk" + struct.pack("<BBBBq", 1, 0, 0, 0, 1) if frame == "bcolz" else b""


def laid_out(block: Elements, encoding: ChunkEncoding, pack: dict[str, Callable[[bytes], bytes]] = PACK) -> bytes:
    """The bytes of a chunk of these elements, axes in the array's order."""
    data = np.array(block, encoding.data_type).transpose(encoding.order).tobytes()  # a scalar has no byte order
    for codec in encoding.codecs:
        data = pack[codec.name](data)
    return head(encoding.frame, block.shape) + data


def taken_in(chunk: bytes, encoding: ChunkEncoding, shape: Coords) -> Elements:
    """The inverse."""
    start = head(encoding.frame, shape)
    assert chunk.startswith(start)
    data = chunk[len(start) :]
    for codec in reversed(encoding.codecs):
        data = UNPACK[codec.name](data)
    memory = np.frombuffer(data, encoding.data_type).reshape(tuple(shape[a] for a in encoding.order))
    return memory.transpose(np.argsort(encoding.order)) if shape else memory


@dataclass
class Case:
    data: Elements
    array: Array
    shown: ChunkEncoding

    def box(self, cell: Coords) -> tuple[slice, ...]:
        a = self.array
        return tuple(slice(c * n, min((c + 1) * n, s)) for c, n, s in zip(cell, a.chunk, a.shape, strict=True))

    def padded(self, cell: Coords, pad: Any) -> Elements:
        inside = self.data[self.box(cell)]
        block = np.full(self.array.chunk, pad, self.data.dtype)
        block[tuple(slice(0, n) for n in inside.shape)] = inside
        return block

    def stored(self, cell: Coords) -> bytes:
        block = self.data[self.box(cell)] if self.array.encoding.clipped else self.padded(cell, 3)
        return laid_out(block, self.array.encoding)

    def cells(self) -> list[Coords]:
        return list(itertools.product(*map(range, self.array.grid)))


@st.composite
def encodings(draw: st.DrawFn, rank: int, data_type: str) -> ChunkEncoding:
    dtype = np.dtype(data_type).newbyteorder(draw(st.sampled_from("<>")))
    return ChunkEncoding(
        dtype.str,
        tuple(draw(st.permutations(range(rank)))),
        clipped=draw(st.booleans()),
        codecs=tuple(Codec(name) for name in draw(st.sampled_from(CHAINS))),
        frame=draw(st.sampled_from(("none", "n5", "bcolz"))),
    )


FILLS: dict[str, list[Any]] = {
    "b": [False, True],
    "u": [0, 7, 255],
    "i": [0, -1, 100],
    "f": [0, 1.5, "NaN", "Infinity", "-Infinity"],
    "c": [0, [1.5, "NaN"], ["-Infinity", 0]],
}


def fill_of(value: Any) -> Any:
    """A fill value as Python has it."""
    if isinstance(value, list):
        return complex(*map(fill_of, value))
    return float(value.replace("Infinity", "inf")) if isinstance(value, str) else value


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    data_type = draw(st.sampled_from(TYPES))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2 if data_type == "|b1" else 100, shape)
    data = np.asarray(values).astype(np.dtype(data_type).newbyteorder("="))
    if data.dtype.kind == "c":
        data = data * np.asarray(1 + 2j, data.dtype)
    axes = tuple(draw(st.permutations(range(rank))))
    encoding = draw(encodings(rank, data_type))
    fill = draw(st.sampled_from(FILLS[data.dtype.kind]))
    array = Array(shape, chunk, data_type, encoding, axes, fill)
    shown_encoding = encoding if draw(st.integers(0, 5)) == 0 else draw(encodings(rank, data_type))
    return Case(data, array, shown_encoding)


def coords_of(array: Array, cell: Coords) -> Coords:
    """Array axis i is axis `grid_axes[i]` of the chunks' grid."""
    out = [0] * len(cell)
    for c, axis in zip(cell, array.grid_axes, strict=True):
        assert axis is not None
        out[axis] = c
    return tuple(out)


def alike(a: Elements, b: Elements) -> bool:
    """In value, NaN or not."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def plain(data_type: str = "<u2", rank: int = 2, **members: Any) -> ChunkEncoding:
    return ChunkEncoding(data_type, tuple(range(rank)), **members)


def array(encoding: ChunkEncoding, shape: Coords = (5, 4), chunk: Coords = (2, 4)) -> Array:
    return Array(shape, chunk, encoding.data_type, encoding, tuple(range(len(shape))))


def block(shape: Coords = (2, 4), data_type: str = "<u2") -> npt.NDArray[Any]:
    return np.arange(math.prod(shape)).astype(data_type).reshape(shape)


# ---- clients


def inside(elements: Elements, like: Elements) -> Elements:
    """The part of a chunk that is inside the array."""
    return elements[tuple(slice(0, n) for n in like.shape)]


def written(case: Case, cell: Any, draw: st.DataObject) -> bytes:
    """What a client of the layout writes: N5 and Blosc permit full chunks at the edge."""
    may_be_full = case.shown.frame == "n5" or [c.name for c in case.shown.codecs] == ["blosc"]
    clipped = case.shown.clipped and not (may_be_full and draw.draw(st.booleans()))
    if case.shown.frame == "n5" and not clipped:
        clipped = draw.draw(st.booleans())
    return laid_out(case.data[case.box(cell)] if clipped else case.padded(cell, 3), case.shown)
