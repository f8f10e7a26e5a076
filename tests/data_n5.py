"""Sharded N5 datasets put together byte by byte, for no Python library writes them; and their unsharded twins.

The layouts are those of N5 4.x (`codecs` with `sharding_indexed`) and of the shards of the 2022 storage transformer
under N5 names. Nothing here uses shardfs, so that it can contradict it. Blocks come from tensorstore or z5py, which
wrote the twin; only the shards around them are made here. Shapes and positions are x first, as N5 has them.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import google_crc32c
import numcodecs
import numpy as np
import numpy.typing as npt

from tests.datasets import Array, ramp
from tests.handmade import Case, write_files, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Json = Any
Coords = tuple[int, ...]
Client = Literal["tensorstore", "z5", "n5store"]
EMPTY = 2**64 - 1
MEMBER = "volumes/raw"
SEED_URL = "https://purl.org/zarr/spec/extensions/storage_transformers/sharding/1.0"
"""As the draft of 2022 has it; zarr-python 2 wrote another."""


# ------------------------------------------------------------------------------------------------------- blocks


def header(size: Sequence[int], elements: int | None = None) -> bytes:
    """Of a block of this size in the default mode, or with a number of elements in the mode for varying lengths."""
    start = struct.pack(f">HH{len(size)}I", elements is not None, len(size), *size)
    return start if elements is None else start + struct.pack(">I", elements)


def object_block(payload: bytes) -> bytes:
    return struct.pack(">HI", 2, len(payload)) + payload


def header_size(block: bytes) -> int:
    mode, rank = struct.unpack(">HH", block[:4])
    return (4 + 4 * rank, 8 + 4 * rank, 6)[mode]


def crc32c(data: bytes) -> bytes:
    return struct.pack("<I", int(google_crc32c.value(data)))


def block_with_crc(block: bytes) -> bytes:
    """As the chain `n5bytes, ..., crc32c` has it: codecs see what follows the header, so the sum does, too."""
    return block + crc32c(block[header_size(block) :])


def lz4_blocks(data: bytes, size: int = 65536) -> bytes:
    """As Java's `LZ4BlockOutputStream` has it; nothing but the sum, of which no reader here has the function."""
    out = b""
    for start in range(0, len(data), size):
        part = data[start : start + size]
        packed = bytes(numcodecs.LZ4().encode(part))[4:]
        kind, body = (0x20, packed) if len(packed) < len(part) else (0x10, part)
        out += struct.pack("<8sBIII", b"LZ4Block", kind + 6, len(body), len(part), 0) + body
    return out + struct.pack("<8sBIII", b"LZ4Block", 0x16, 0, 0, 0)


# ------------------------------------------------------------------------------------------------------- shards


@dataclass(frozen=True)
class Index:
    """How a shard's index is written, and which axis of the slots is the fastest."""

    endian: Literal["little", "big"] = "little"
    checksum: bool = True
    location: Literal["start", "end"] = "end"
    fastest: Literal["first", "last"] = "first"
    named: str = "raw-bytes"
    raw: bool = False

    @property
    def codecs(self) -> Json:
        configuration = {} if self.named == "n5bytes" else {"configuration": {"endian": self.endian}}
        around = [{"name": "raw"}] * self.raw + [{"name": "crc32c"}] * self.checksum
        return [{"name": self.named, **configuration}, *around]

    def header(self, per: Coords) -> bytes:
        """N5 4.x (`N5BlockCodecs.java`) writes it before the codecs around the values see them."""
        return header((2, *per)) if self.named == "n5bytes" else b""

    def size(self, per: Coords) -> int:
        return len(self.header(per)) + 16 * prod(per) + (4 if self.checksum else 0)

    def encode(self, entries: Iterable[tuple[int, int]], per: Coords) -> bytes:
        order = "<" if self.endian == "little" else ">"
        packed = b"".join(struct.pack(f"{order}QQ", *e) for e in entries)
        return self.header(per) + packed + (crc32c(packed) if self.checksum else b"")


SEED_INDEX = Index(checksum=False, fastest="last")


def slot_of(local: Coords, per: Coords, fastest: Literal["first", "last"]) -> int:
    """The slot of the chunk at a position inside a shard of `per` chunks."""
    slot, step = 0, 1
    axes = range(len(per)) if fastest == "first" else range(len(per) - 1, -1, -1)
    for axis in axes:
        slot += local[axis] * step
        step *= per[axis]
    return slot


def shard(
    chunks: Mapping[Coords, bytes],
    per: Coords,
    index: Index,
    *,
    gap: bytes = b"",
    entries: Mapping[int, tuple[int, int]] | None = None,
) -> bytes:
    """Chunks by position inside the shard, in the order of their slots; `entries` replaces index entries."""
    base = index.size(per) if index.location == "start" else 0
    listed, body = [(EMPTY, EMPTY)] * prod(per), bytearray()
    for slot, chunk in sorted((slot_of(local, per, index.fastest), chunk) for local, chunk in chunks.items()):
        body += gap
        listed[slot] = (base + len(body), len(chunk))
        body += chunk
    for slot, entry in (entries or {}).items():
        listed[slot] = entry
    encoded = index.encode(listed, per)
    return encoded + bytes(body) if index.location == "start" else bytes(body) + encoded


def shards(chunks: Mapping[Coords, bytes], per: Coords, index: Index, *, gap: bytes = b"") -> dict[Coords, bytes]:
    """Chunks by position in the grid -> the shards that hold any, by theirs."""
    grouped: dict[Coords, dict[Coords, bytes]] = {}
    for position, chunk in chunks.items():
        g, local = zip(*map(divmod, position, per), strict=True)
        grouped.setdefault(g, {})[local] = chunk
    return {g: shard(members, per, index, gap=gap) for g, members in grouped.items()}


def key(position: Iterable[int]) -> str:
    return "/".join(map(str, position))


def sharding(chunk: Sequence[int], codecs: Sequence[Json], index: Index) -> Json:
    """The codec; Java reverses `chunk_shape`, and only that."""
    configuration = {"chunk_shape": list(chunk)[::-1], "codecs": list(codecs), "index_codecs": index.codecs}
    return {"name": "sharding_indexed", "configuration": {**configuration, "index_location": index.location}}


def transformer(per: Sequence[int], url: str = SEED_URL) -> Json:
    return {"extension": url, "type": "indexed", "configuration": {"chunks_per_shard": list(per)}}


def attributes(dimensions: Sequence[int], block: Sequence[int], data_type: str, **members: Json) -> dict[str, Json]:
    """Of a dataset; `members` come last."""
    return {"dataType": data_type, "dimensions": list(dimensions), "blockSize": list(block), **members}


# ----------------------------------------------------------------------------------------------------- variants

RAW: Json = {"type": "raw"}
GZIP: Json = {"type": "gzip", "level": 5, "useZlib": False}
ZLIB: Json = {"type": "gzip", "level": 5, "useZlib": True}
BZIP2: Json = {"type": "bzip2", "blockSize": 9}
XZ: Json = {"type": "xz", "preset": 6}
BLOSC: Json = {"type": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
ZSTD: Json = {"type": "zstd", "level": 3}

ALL: frozenset[Client] = frozenset(("tensorstore", "z5", "n5store"))


@dataclass(frozen=True)
class Dataset:
    name: str
    path: Path
    """A container, of which `MEMBER` is sharded."""
    twin: Path
    """The same container unsharded: what a view of `path` must look like, byte for byte."""
    array: Array
    """x first, as tensorstore reads it; z5py and zarr-python reverse the axes."""
    readers: frozenset[Client]


@dataclass(frozen=True)
class Variant:
    """A dataset that a library writes unsharded, and that is then put in shards.

    `levels` are chunks per shard, innermost first; each has its index in `indices` (the last one is used for what is
    left). `encoding` is the codec inside: blocks as they are, or their payloads without headers in a byte order.
    """

    shape: Coords
    chunk: Coords
    levels: Sequence[Coords]
    compression: Json = None
    dtype: str = "uint16"
    writer: Literal["tensorstore", "z5"] = "tensorstore"
    indices: Sequence[Index] = (Index(),)
    encoding: Literal["n5bytes", "raw-bytes", "bytes"] = "n5bytes"
    endian: Literal["little", "big"] | None = None
    checksum: bool = False
    seed: bool = False
    gap: bytes = b""
    data: Callable[[Sequence[int], str], Array] = ramp
    members: Mapping[str, Json] | None = None
    readers: frozenset[Client] = ALL

    @property
    def shown(self) -> Json:
        return self.compression or GZIP

    def write(self, root: Path, name: str) -> Dataset:
        """Both forms below `root`."""
        path, twin = root / "sharded", root / "plain"
        data = self.data(self.shape, self.dtype)
        write_twin(twin, data, self.chunk, self.shown, self.writer)
        members = dict(self.members or {})
        plain = {
            "before": 1,
            **attributes(self.shape, self.chunk, self.dtype, compression=self.shown),
            **members,
        }
        write_json(twin / MEMBER / "attributes.json", plain)
        write_json(path / "attributes.json", json.loads((twin / "attributes.json").read_bytes()))
        shard_files = {p: self._stored(block) for p, block in blocks_of(twin / MEMBER, len(self.shape)).items()}
        size, codecs = self.chunk, self._codecs()
        for i, per in enumerate(self.levels):
            index = self.indices[min(i, len(self.indices) - 1)]
            shard_files = shards(shard_files, per, index, gap=self.gap)
            codecs = [sharding(size, codecs, index)]
            size = tuple(s * n for s, n in zip(size, per, strict=True))
        how = {"codecs": codecs}
        if self.seed:
            size = self.chunk
            how = {"compression": self.shown, "storage_transformers": [transformer(self.levels[0])]}
        sharded = {"before": 1, **attributes(self.shape, size, self.dtype), **how, **members}
        write_json(path / MEMBER / "attributes.json", sharded)
        write_files(path / MEMBER, {key(p): data for p, data in shard_files.items()})
        for place in (path, twin):
            write_files(place, {"volumes/labels/attributes.json": b'{"user": {"n5": [1, 2]}}', f"{MEMBER}/note": b"x"})
        return Dataset(name, path, twin, data, self.readers)

    def _codecs(self) -> list[Json]:
        first: Json = {"name": self.encoding}
        if self.endian is not None:
            first["configuration"] = {"endian": self.endian}
        parameters = {name: value for name, value in self.shown.items() if name != "type"}
        codecs = [first] if self.shown == RAW else [first, {"name": self.shown["type"], "configuration": parameters}]
        return [*codecs, {"name": "crc32c"}] if self.checksum else codecs

    def _stored(self, block: bytes) -> bytes:
        """What stands in a shard for a block of the twin."""
        if self.encoding == "n5bytes":
            return block_with_crc(block) if self.checksum else block
        payload = block[header_size(block) :]
        if block[: header_size(block)] != header(self.chunk):
            raise AssertionError("chunks without header are whole")
        little = "little" if self.encoding == "bytes" else "big"
        if (self.endian or little) == "little":
            payload = np.frombuffer(payload, self.dtype).byteswap().tobytes()
        return payload + crc32c(payload) if self.checksum else payload


def write_twin(
    container: Path, data: Array, chunk: Coords, compression: Json, writer: Literal["tensorstore", "z5"]
) -> None:
    """An unsharded container with `MEMBER`. tensorstore writes whole blocks at the edge, z5py cuts them."""
    if writer == "z5":
        import z5py

        file = z5py.File(str(container), mode="a", use_zarr_format=False)
        shape, dtype = data.T.shape, data.dtype.name
        created = file.create_dataset(
            MEMBER, shape=shape, chunks=chunk[::-1], dtype=dtype, compression=compression["type"]
        )
        created[...] = np.ascontiguousarray(data.T)
        return
    import tensorstore as ts

    write_json(container / "attributes.json", {"n5": "4.0.0", "user": {"b": 2**64, "a": None}})
    store = {"driver": "file", "path": f"{container / MEMBER}/"}
    metadata = attributes(data.shape, chunk, data.dtype.name, compression=compression)
    array = ts.open({"driver": "n5", "kvstore": store, "metadata": metadata}, create=True).result()
    array.write(data).result()


def blocks_of(dataset: Path, rank: int) -> dict[Coords, bytes]:
    """The block files of an unsharded dataset."""
    paths = (p for p in dataset.glob("/".join(["[0-9]*"] * rank)) if p.is_file())
    return {tuple(map(int, p.relative_to(dataset).parts)): p.read_bytes() for p in paths}


def _islands(shape: Sequence[int], dtype: str) -> Array:
    """Most chunks and some shards are empty, and so are not stored."""
    data: npt.NDArray[Any] = np.zeros(shape, dtype)
    data[tuple(slice(0, 2) for _ in shape)] = 7
    data[tuple(-1 for _ in shape)] = 9
    return data


_FLAT = ((11, 7), (3, 2), [(3, 2)])  # a shape that is a multiple of neither chunk nor shard
_LINE = ((100,), (8,), [(4,)])
_CUBE = ((9, 7, 11), (2, 3, 2), [(2, 1, 3)])
_FOUR = ((5, 4, 7, 3), (2, 2, 3, 1), [(2, 1, 2, 3)])
_START = Index(location="start")
_BIG = Index("big", checksum=False)

VARIANTS: dict[str, Variant] = {
    **{
        f"{c['type']}{'_zlib' if c is ZLIB else ''}_{writer}": Variant(*_FLAT, c, writer=writer)
        for c in (RAW, GZIP, ZLIB, BZIP2, XZ, BLOSC, ZSTD)
        for writer in ("tensorstore", "z5")
        if not (c is ZLIB and writer == "z5")
    },
    **{
        f"dtype_{dtype}": Variant(*_CUBE, dtype=dtype)
        for dtype in ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float32", "float64")
    },
    "rank_1": Variant(*_LINE),
    "rank_3": Variant(*_CUBE),
    "rank_3_cut": Variant(*_CUBE, writer="z5"),
    "rank_4": Variant(*_FOUR),
    "rank_4_cut": Variant(*_FOUR, writer="z5"),
    "index_start": Variant(*_CUBE, indices=[_START]),
    "index_big": Variant(*_CUBE, indices=[_BIG]),
    "index_big_crc_start": Variant(*_CUBE, indices=[Index("big", location="start")]),
    "index_bytes": Variant(*_CUBE, indices=[Index(named="bytes")]),
    "index_n5bytes": Variant(*_CUBE, indices=[Index("big", checksum=False, named="n5bytes")]),
    "index_n5bytes_crc_start": Variant(*_CUBE, indices=[Index("big", location="start", named="n5bytes")]),
    "index_n5bytes_raw_crc": Variant(*_FLAT, indices=[Index("big", named="n5bytes", raw=True)]),
    "index_n5bytes_nested": Variant((20, 15), (2, 2), [(2, 2), (2, 3)], indices=[Index("big", named="n5bytes")]),
    "index_raw": Variant(*_CUBE, indices=[Index(checksum=False, raw=True)]),
    "gaps": Variant(*_CUBE, gap=b"hole!"),
    "sparse": Variant((20, 24), (2, 4), [(4, 2)], data=_islands),
    "nested": Variant((20, 15), (2, 2), [(2, 2), (2, 2)], indices=[_START, Index()]),
    "nested_three": Variant((20, 15), (1, 2), [(2, 2), (2, 1), (1, 3)], indices=[_BIG, _START, Index()]),
    "nested_sparse": Variant((20, 20), (2, 2), [(2, 1), (1, 3)], data=_islands),
    "checksum": Variant(*_CUBE, checksum=True),
    "checksum_raw_cut": Variant(*_CUBE, RAW, checksum=True, writer="z5"),
    "headerless_big": Variant(*_CUBE, RAW, encoding="raw-bytes", endian="big"),
    "headerless_unsaid": Variant(*_CUBE, RAW, encoding="raw-bytes"),
    "headerless_little": Variant(*_CUBE, RAW, encoding="raw-bytes", endian="little", dtype="float64"),
    "headerless_little_checksum": Variant(*_CUBE, RAW, encoding="bytes", endian="little", checksum=True),
    "headerless_bytes_unsaid": Variant(*_CUBE, RAW, encoding="bytes", dtype="int32"),
    "headerless_big_gzip": Variant(*_CUBE, GZIP, encoding="raw-bytes", endian="big"),
    "headerless_byte_zstd": Variant(*_CUBE, ZSTD, encoding="bytes", dtype="uint8"),
    "headerless_nested": Variant(
        (20, 15), (2, 2), [(2, 2), (2, 2)], RAW, encoding="raw-bytes", endian="little", indices=[_START, Index()]
    ),
    "shard_larger_than_array": Variant((5, 4), (2, 2), [(16, 16)]),
    "one_chunk_per_shard": Variant((9, 7), (4, 2), [(1, 1)]),
    "two_digit_keys": Variant((40, 40), (2, 2), [(8, 8)], RAW),
    "seed": Variant(*_FLAT, indices=[SEED_INDEX], seed=True),
    "seed_cut": Variant(*_CUBE, indices=[SEED_INDEX], seed=True, writer="z5"),
    "seed_rank_4": Variant(*_FOUR, ZSTD, indices=[SEED_INDEX], seed=True),
    "seed_sparse": Variant((20, 24), (2, 4), [(4, 2)], RAW, indices=[SEED_INDEX], seed=True, data=_islands),
    "members": Variant(
        *_FLAT,
        members={
            "resolution": [4.0, 40.0],
            "big": 2**64 - 1,
            "text": "µm \u2028",
            "nested": {"z": [1, {"a": None}], "codecs": [{"name": "sharding_indexed"}]},
        },
    ),
}

# ------------------------------------------------------------------------------------------------- golden files

GOLDEN = Path(__file__).parent / "golden" / "n5"
Files = dict[str, bytes]

# One block of 1x2x3 uint16 elements, 1 to 6, from "File-system specification" in N5's README, version 4.0.0.
_SPEC_HEADER = "0000 0003 00000001 00000002 00000003"
_SPEC = {
    "raw": (RAW, "0001 0002 0003 0004 0005 0006"),
    "bzip2": (
        BZIP2,
        "425a6839 31415926 5359023e 0dd20000 0040007f 00200031 0c010d31 a8739433 7c5dc914 e1424008 f83748",
    ),
    "gzip": (GZIP, "1f8b0800 00000000 00006360 64606260 66606160 65600300 aaea6d bf 0c000000"),
    "xz": (
        XZ,
        "fd377a58 5a000004 e6d6b446 02002101 16000000 742fe5a3 01000b00 01000200 03000400 05000600 0d0309ca 34ec15a7"
        "0001240c a618d8d8 1fb6f37d 01000000 0004595a",
    ),
}
# Written by N5 Java, from just behind release 4.0.2: see the README beside the golden files.
_JAVA_BLOCK = "00000002 00000002 00000001 1f8b08000000000000ff e379c2f314002341acb904000000"
_JAVA_INDEX = (16 * 3 * "ff") + "0000000000000000 2400000000000000" + (16 * 2 * "ff") + "377e004f"
_JAVA_STRINGS = "0001 0001 00000003 00000006 61 62 00 63 00 00"
_JAVA_OBJECT = "0002 00000003 010203"
_JAVA_FIVE = "0001 0001 00000004 00000005 0102030405"


def _document(document: Json) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"


def _pair(metadata: Json, shown_metadata: Json, shard_files: Files, blocks: Files) -> tuple[Files, Files]:
    return {"attributes.json": _document(metadata), **shard_files}, {
        "attributes.json": _document(shown_metadata),
        **blocks,
    }


def golden() -> dict[str, tuple[Files, Files]]:
    """What the golden files hold, by name: a sharded dataset, and what it must be shown as."""
    out = {}
    n5bytes, crc, five = {"name": "n5bytes"}, {"name": "crc32c"}, {"name": "gzip", "configuration": {"level": 5}}
    block = bytes.fromhex(_JAVA_BLOCK)
    out["java"] = _pair(
        attributes((11, 7), (9, 4), "uint16", codecs=[sharding((3, 2), [n5bytes, five], Index())]),
        attributes((11, 7), (3, 2), "uint16", compression=GZIP),
        {"1/1": block + bytes.fromhex(_JAVA_INDEX)},
        {"3/3": block},
    )
    for name, (compression, payload) in _SPEC.items():
        block = bytes.fromhex(_SPEC_HEADER + payload)
        chain = [n5bytes, {"name": name}] if name != "raw" else [n5bytes]
        shown_compression = {**compression, **({"level": -1} if name == "gzip" else {})}  # not said in the codec
        out[f"specification_{name}"] = _pair(
            attributes((2, 4, 3), (2, 2, 3), "uint16", codecs=[sharding((1, 2, 3), chain, Index())]),
            attributes((2, 4, 3), (1, 2, 3), "uint16", compression=shown_compression),
            {"0/1/0": shard({(1, 0, 0): block}, (2, 1, 1), Index())},
            {"1/1/0": block},
        )
    for name, kind, blocks in (
        ("string", "string", [_JAVA_STRINGS]),
        ("object", "object", [_JAVA_OBJECT]),
        ("varlength", "uint8", ["0000 0001 00000004 01020304", _JAVA_FIVE]),
    ):
        block_bytes: dict[Coords, bytes] = {(i,): bytes.fromhex(text) for i, text in enumerate(blocks)}
        out[name] = _pair(
            attributes((8,), (8,), kind, codecs=[sharding((4,), [n5bytes], _START)]),
            attributes((8,), (4,), kind, compression=RAW),
            {"0": shard(block_bytes, (2,), _START)},
            {key(p): data for p, data in block_bytes.items()},
        )
    chunks: dict[Coords, bytes] = {
        (x, y): bytes([16 * x + y, 255]) for x in range(4) for y in range(6) if (x, y) != (1, 2)
    }
    little = [{"name": "raw-bytes", "configuration": {"endian": "little"}}, crc]
    inner = shards({p: data + crc32c(data) for p, data in chunks.items()}, (1, 2), _BIG)
    out["nested_headerless"] = _pair(
        attributes((4, 6), (2, 6), "int16", codecs=[
            sharding((1, 2), [sharding((1, 1), little, _BIG)], _START)
        ]),
        attributes((4, 6), (1, 1), "int16", compression=RAW),
        {key(p): data for p, data in shards(inner, (2, 3), _START).items()},
        {key(p): header((1, 1)) + data[::-1] for p, data in chunks.items()},
    )  # fmt: skip
    seeded: dict[Coords, bytes] = {(x, y): header((1, 1)) + bytes([x, y]) for x in range(3) for y in range(5) if x != y}
    plain = attributes((3, 5), (1, 1), "uint16", compression=RAW)
    out["seed"] = _pair(
        {**plain, "storage_transformers": [transformer((2, 3))]},
        plain,
        {key(p): data for p, data in shards(seeded, (2, 3), SEED_INDEX).items()},
        {key(p): data for p, data in seeded.items()},
    )
    return out


# ----------------------------------------------------------------------------------------------- damage, hostility

# The dataset of most cases: 8x4 uint8, two shards `0/0` and `1/0` of 2x2 slots, blocks of 2x2. The second shard is
# always sound. Blocks of the first shard, in the order of their slots, x fastest:
_KEYS = ("0/0", "1/0", "0/1", "1/1")
_LOCAL: tuple[Coords, ...] = ((0, 0), (1, 0), (0, 1), (1, 1))
_BLOCKS = [header((2, 2)) + bytes([10 * slot + i for i in range(4)]) for slot in range(4)]
_OTHERS: dict[Coords, bytes] = {(2 + x, y): header((2, 2)) + bytes([x, y, 9, 9]) for x, y in _LOCAL}
_N5BYTES: Json = {"name": "n5bytes"}
DAMAGED: dict[str, Callable[[Path], Case]] = {}


def _damaged(
    name: str,
    first: bytes,
    *,
    bad: Iterable[int] = (),
    absent: Iterable[int] = (),
    index: Index = _START,
    blocks: Sequence[bytes] = _BLOCKS,
    codecs: Sequence[Json] = (_N5BYTES,),
    encode: Callable[[bytes], bytes] = bytes,
) -> None:
    """Register a case: `first` as the first shard; slots of it are bad, absent, or shown as `blocks` are.

    `encode` makes of the blocks of the second shard what is stored.
    """

    def write(path: Path) -> Case:
        shard_files = shards({p: encode(block) for p, block in _OTHERS.items()}, (2, 2), index)
        write_json(
            path / "attributes.json", attributes((8, 4), (4, 4), "uint8", codecs=[sharding((2, 2), codecs, index)])
        )
        write_files(path, {"0/0": first, "1/0": shard_files[1, 0]})
        good = {_KEYS[i]: block for i, block in enumerate(blocks) if i not in {*bad, *absent}}
        good |= {key(p): block for p, block in _OTHERS.items()}
        return Case(path, good, frozenset(_KEYS[i] for i in bad), frozenset(_KEYS[i] for i in absent))

    DAMAGED[name] = write


def _first(index: Index = _START, chunks: Sequence[bytes] = _BLOCKS, **options: Any) -> bytes:
    return shard(dict(zip(_LOCAL, chunks, strict=True)), (2, 2), index, **options)


_PLAIN = Index(checksum=False)
_damaged("sound", _first())
_damaged("index_checksum_wrong", bytes([_first()[0] ^ 1]) + _first()[1:], bad=range(4))
_damaged("index_checksum_wrong_end", _first(Index())[:-1] + b"?", bad=range(4), index=Index())
_damaged("cut", _first()[:-1], bad=[3])
_damaged("cut_end", _first(Index())[:-5], bad=range(4), index=Index())
_damaged("shorter_than_index", _first()[:67], bad=range(4))
_damaged("zero_bytes", b"", bad=range(4))
_N5_INDEX = Index("big", location="start", named="n5bytes")
_damaged("index_header_wrong", _first(_N5_INDEX)[:7] + b"?" + _first(_N5_INDEX)[8:], bad=range(4), index=_N5_INDEX)
_damaged("offset_alone_is_ones", _first(entries={1: (EMPTY, 16)}), absent=[1])
_damaged("size_alone_is_ones", _first(entries={2: (0, EMPTY)}), absent=[2])
_damaged("range_past_end", _first(entries={0: (10**6, 4), 3: (0, 10**6)}), bad=[0, 3])
_damaged("range_wraps", _first(entries={0: (EMPTY - 1, 10), 1: (2**63, 2**63)}), bad=[0, 1])
_damaged("enormous_chunk", _first(entries={1: (0, 2**40)}), bad=[1])
# A header that says something else than there is, or no header at all, is passed through: readers see to it.
_LIES = [header((2**32 - 1, 2**32 - 1)) + b"1234", struct.pack(">HH", 0, 0xFFFF), b"", b"\xff" * 16]
_damaged("headers_lie", _first(chunks=_LIES), blocks=_LIES)
_SUMS = [block_with_crc(block) for block in _BLOCKS]
_damaged(
    "chunk_checksum_wrong",
    _first(chunks=[_SUMS[0], _SUMS[1][:-1] + b"?", _SUMS[2][:-4], _SUMS[3][:3]]),
    bad=[1, 2, 3],
    codecs=[_N5BYTES, {"name": "crc32c"}],
    encode=block_with_crc,
)
_damaged(
    "headerless_of_wrong_size",
    _first(chunks=[_BLOCKS[0][12:], _BLOCKS[1][13:], _BLOCKS[2][12:] + b"?", b""]),
    bad=[1, 2, 3],
    codecs=[{"name": "raw-bytes"}],
    encode=lambda block: block[12:],
)


def _nested_index_wrong(path: Path) -> Case:
    """A damaged shard in a shard harms the blocks in it alone."""
    inner = shards({**dict(zip(_LOCAL, _BLOCKS, strict=True)), **_OTHERS}, (1, 2), _PLAIN)
    inner[1, 0] = inner[1, 0][:20]
    document = attributes((8, 4), (4, 4), "uint8", codecs=[
        sharding((2, 4), [sharding((2, 2), [_N5BYTES], _PLAIN)], _START)
    ])  # fmt: skip
    write_json(path / "attributes.json", document)
    write_files(path, {key(p): data for p, data in shards(inner, (2, 1), _START).items()})
    good = {"0/0": _BLOCKS[0], "0/1": _BLOCKS[2], **{key(p): block for p, block in _OTHERS.items()}}
    return Case(path, good, frozenset(("1/0", "1/1")))


def _outside(path: Path) -> Case:
    """Entries for blocks outside the dataset are hidden; shards outside of it are no files of the view either."""
    document = attributes((5, 4), (4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES], _START)])
    write_json(path / "attributes.json", document)
    content = shards(_OTHERS, (2, 2), _START)[1, 0]
    write_files(path, {"0/0": _first(), "1/0": content, "0/1": content, "2/0": content, "00/0": content})
    good = {**dict(zip(_KEYS, _BLOCKS, strict=True)), "2/0": _OTHERS[2, 0], "2/1": _OTHERS[2, 1]}
    return Case(path, good, absent=frozenset(("3/0", "3/1", "4/0", "0/2", "1/2")))


def _seed(path: Path) -> Case:
    """The transformer's own rules: the last axis is the fastest, and half an empty entry is damage."""
    document = attributes((8, 4), (2, 2), "uint8", compression=RAW, storage_transformers=[transformer((2, 2))])
    write_json(path / "attributes.json", document)
    first = _first(SEED_INDEX, entries={0: (EMPTY, EMPTY), 1: (EMPTY, 16), 2: (0, 10**6)})
    write_files(path, {"0/0": first, "1/0": shards(_OTHERS, (2, 2), SEED_INDEX)[1, 0]})
    good = {"1/1": _BLOCKS[3], **{key(p): block for p, block in _OTHERS.items()}}
    return Case(path, good, frozenset(("0/1", "1/0")), frozenset(("0/0",)))


DAMAGED |= {"nested_index_wrong": _nested_index_wrong, "outside": _outside, "seed": _seed}


def _deep(depth: int) -> Json:
    codec = sharding((1, 1), [_N5BYTES], _START)
    for _ in range(depth):
        codec = sharding((1, 1), [codec], _START)
    return codec


HOSTILE: dict[str, Json] = {
    "dimensions_2_63": attributes((2**63 - 1,) * 2, (4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES], _START)]),
    "dimensions_2_80": attributes((2**80, 4), (4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES], _START)]),
    "tera_slots": attributes((2**40, 4), (2**40, 4), "uint8", codecs=[sharding((1, 1), [_N5BYTES], _START)]),
    "slots_overflow": attributes((2**62,) * 2, (2**62,) * 2, "uint8", codecs=[sharding((1, 1), [_N5BYTES], _START)]),
    "headers_of_2_31": attributes((2**31, 4), (2**31, 4), "uint64", codecs=[
        sharding((2**31, 4), [{"name": "raw-bytes"}], _START)
    ]),
    "rank_1000": attributes((1,) * 1000, (1,) * 1000, "uint8", codecs=[sharding((1,) * 1000, [_N5BYTES], _START)]),
    "rank_100000": attributes((1,) * 100_000, (1,) * 100_000, "uint8", codecs=[
        sharding((1,) * 100_000, [{"name": "raw-bytes"}], _START)
    ]),
    "nested_100_deep": attributes((4, 4), (1, 1), "uint8", codecs=[_deep(100)]),
    "ranks_differ": attributes((4, 4), (4, 4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES], _START)]),
    "chunks_do_not_divide": attributes((8, 4), (4, 4), "uint8", codecs=[sharding((3, 2), [_N5BYTES], _START)]),
    "many_codecs": attributes((8, 4), (4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES] * 100_000, _START)]),
    "empty_axis": attributes((0, 4), (4, 4), "uint8", codecs=[sharding((2, 2), [_N5BYTES], _START)]),
    "seed_tera_slots": attributes((2**40, 4), (1, 1), "uint8", compression=RAW, storage_transformers=[
        transformer((2**40, 4))
    ]),
    "seed_per_2_63": attributes((4, 4), (2**62, 1), "uint8", compression=RAW, storage_transformers=[
        transformer((2**62, 1))
    ]),
    "seed_overflow": attributes((2**62, 4), (1, 1), "uint8", compression=RAW, storage_transformers=[
        transformer((2**70, 1))
    ]),
}  # fmt: skip


def hostile(path: Path, document: Json) -> Case:
    """A container with a sound dataset `good` beside one of this document, which has files that may be shards."""
    good = DAMAGED["sound"](path / "good")
    write_json(path / "attributes.json", {"n5": "4.0.0"})
    write_json(path / "evil/attributes.json", document)
    write_files(path / "evil", {"0/0": _first(), "1": _first(), "x/0": b"not a shard"})
    return Case(path, {f"good/{name}": data for name, data in good.good.items()})


if __name__ == "__main__":
    for _name, _forms in golden().items():
        for _form, _files in zip(("stored", "shown"), _forms, strict=True):
            write_files(GOLDEN / _name / _form, _files)
