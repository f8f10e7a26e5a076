"""`shardfs.shards.rewriting`: what it says of shards, of half meshes, of damage; and what it reads to say so."""

from __future__ import annotations

import gzip
import json
import os
import struct
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs.encoders import Gunzip
from shardfs.formats.bcolz.carrays import BlpHeader
from shardfs.formats.n5.stored import PlainBlocks
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.zarr3 import ZARR3
from shardfs.model.blobs import ByteRange, FilePart
from shardfs.model.collection import Collection, Layer
from shardfs.model.errors import CorruptShardError, UnfitChunkError, UnsupportedError
from shardfs.model.grid import MortonCode
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import bytes_of, is_same
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.blosc2_frame import Frames
from shardfs.shards.byte_layouts.superchunk import Superchunks
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree, open_tree
from tests import data_n5, handmade, handmade_ids
from tests.conftest import run_client
from tests.data_bcolz import BLP, SUMS, Superchunk, compressed, stored
from tests.datasets import client_python
from tests.strategies import sharding_specs
from tests.suites.republishing import Shards
from tests.suites.shard_format import MemoryBlob
from tests.suites.walking import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from shardfs.model.values import Coords
    from tests.handmade import Case

GOLDEN = Path(__file__).parents[1] / "golden/bloscpack"
CASES = {**handmade.CASES, **handmade_ids.CASES, **{f"n5_{name}": case for name, case in data_n5.DAMAGED.items()}}


def zarr(shape: tuple[int, ...], shard: tuple[int, ...], inner: tuple[int, ...], **members: Any) -> Collection:
    document = handmade.zarr_metadata(shape, shard, inner, **members)
    dataset = ZARR3.open("", {"zarr.json": json.dumps(document).encode()})
    assert dataset is not None
    (collection,) = dataset.collections
    return collection


def precomputed(info: Any) -> Collection:
    dataset = PRECOMPUTED.open("", {"info": json.dumps(info).encode()})
    assert dataset is not None
    (collection,) = dataset.collections
    return collection


def published(
    collection: Collection,
    old: bytes | None,
    puts: Mapping[Coords, bytes],
    drops: Set[Coords] = frozenset(),
    **how: Any,
) -> bytes | None:
    """The shard with chunks of these shown bytes."""
    blob = None if old is None else MemoryBlob(old)
    shard = rewriting.shard_of(collection, next(iter((*puts, *drops))))
    put = {c: Put(t.store(c, data) if (t := collection.transform_of(c)) else data) for c, data in puts.items()}
    plan = StoredShard(collection, shard, blob).plan(put, drops, **how)
    return None if plan is None else bytes_of(plan, blob)


def entry_of(collection: Collection, shard: bytes, coords: Coords) -> tuple[int, int] | None:
    """Where a chunk starts, in the decoded bytes if codecs surround the shard, and its size."""
    number = rewriting.shard_of(collection, coords)
    (chunk,) = StoredShard(collection, number, MemoryBlob(shard)).stored_chunks([coords])
    return None if chunk is None else (chunk.file_offset, chunk.stat().size)


def stored_chunk(collection: Collection, shard: bytes, coords: Coords) -> bytes | None:
    entry = entry_of(collection, shard, coords)
    return None if entry is None else shard[entry[0] : sum(entry)]


# ---- shards that are written at once are those of other writers ----


def test_a_new_shard_is_that_of_tensorstore(tmp_path: Path) -> None:
    data = np.arange(16 * 16, dtype="<u2").reshape(16, 16)
    document = handmade.zarr_metadata((16, 16), (8, 16), (4, 4), data_type="uint16")
    document["codecs"][0]["configuration"]["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    store = {"driver": "file", "path": f"{tmp_path}/"}
    ts.open({"driver": "zarr3", "kvstore": store, "metadata": document}, create=True).result().write(data).result()
    collection = zarr((16, 16), (8, 16), (4, 4), data_type="uint16")
    for shard in range(2):
        cells = product(range(2 * shard, 2 * shard + 2), range(4))
        chunks: dict[Coords, bytes] = {(i, j): data[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].tobytes() for i, j in cells}
        assert published(collection, None, chunks) == (tmp_path / f"c/{shard}/0").read_bytes()


@pytest.mark.parametrize("hash_", ["identity", "murmurhash3_x86_128"])
def test_a_new_shard_of_ids_is_that_of_tensorstore(hash_: str, tmp_path: Path) -> None:
    spec = handmade.sharding(hash=hash_, minishard=3, shard=0, preshift=1)
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = ts.KvStore.open({"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": spec}).result()
    chunks: dict[Coords, bytes] = {(number,): b"%d" % number for number in (7, 3, 2**63 + 1, 2**64 - 1, 40, 41, 42)}
    with ts.Transaction() as transaction:
        for (number,), data in chunks.items():
            store.with_transaction(transaction)[number.to_bytes(8, "big")] = data
    collection = precomputed({**handmade_ids.SKELETONS, "sharding": spec})
    assert published(collection, None, chunks) == (tmp_path / "0.shard").read_bytes()


# ---- what is told of a collection ----


@given(st.data())
def test_a_shard_holds_as_many_chunks_as_are_placed_there(data: st.DataObject) -> None:
    spec = data.draw(sharding_specs())
    grid = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    format = Uint64Sharded(spec, MortonCode(grid))
    homes = [format.place(cell)[0] for cell in product(*map(range, grid))]
    for shard in {0, *homes}:
        assert format.capacity(shard) in (None, homes.count(shard))
    few = spec.preshift_bits + spec.minishard_bits <= 12
    assert spec.hash != "identity" or not few or format.capacity(0) is not None


def test_slots_are_those_inside_of_the_array() -> None:
    collection = zarr((9, 10), (8, 8), (2, 4))
    assert [rewriting.slots(collection, shard) for shard in range(4)] == [8, 4, 2, 1]
    inner = [{"name": "sharding_indexed", "configuration": {**_sharding((2, 4))}}]
    nested = zarr((9, 10), (8, 8), (4, 4), codecs=inner)
    assert [rewriting.slots(nested, shard) for shard in range(4)] == [8, 4, 2, 1]
    assert rewriting.key(collection, 2) == "c/1/0"
    assert rewriting.shard_of(nested, (4, 2)) == 3


def _sharding(inner: tuple[int, ...]) -> dict[str, Any]:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {"chunk_shape": list(inner), "codecs": [{"name": "bytes"}], "index_codecs": index}


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    collection = zarr((4, 4), (4, 4), (2, 2))
    assert rewriting.unwritable(collection) is None
    frames = Collection(**{**vars(collection), "layers": (Layer(Frames(3, even=False)),)})
    assert "Blosc2" in (rewriting.unwritable(frames) or "")
    handmade.CASES["zarr_sound"](tmp_path / "z")
    (other,) = open_tree(str(tmp_path / "z"), layout="n5").collections()
    assert rewriting.unwritable(other.collection) is None
    lossy = Collection(**{**vars(collection), "transform": SimpleNamespace(unwritable="jpeg loses data")})
    assert rewriting.unwritable(lossy) == "jpeg loses data"


def test_chunks_beyond_the_array_are_those_of_no_other() -> None:
    collection = zarr((5, 5), (4, 4), (2, 2))
    assert rewriting.shard_of(collection, (1, 3)) == 1  # a slot that is there
    for beyond in ((0, 4), (4, 0)):
        with pytest.raises(UnfitChunkError):
            rewriting.shard_of(collection, beyond)
    with pytest.raises(UnfitChunkError, match="belongs in shard 1"):
        StoredShard(collection, 0, None).plan({(0, 2): Put(b"x")}, frozenset())
    told: dict[Coords, str] = {}
    plan = StoredShard(collection, 0, None).plan({(0, 4): Put(b"x"), (0, 0): Put(b"y")}, {(9, 9)}, unfit=told)
    assert plan is not None
    assert told.keys() == {(0, 4), (9, 9)}
    assert stored_chunk(collection, bytes_of(plan), (0, 0)) == b"y"


# ---- what is read and written ----


class Counting(MemoryBlob):
    @property
    def nbytes(self) -> int:
        return sum(r.stop - r.start for read in self.reads for r in read)


@pytest.mark.parametrize("location", ["start", "end"])
def test_of_a_large_shard_only_the_index_is_read(location: handmade.Location) -> None:
    collection = zarr((64, 64), (64, 64), (8, 8), location=location)
    old = handmade.zarr_shard([bytes(10_000)] * 64, location=location)
    blob = Counting(old)
    plan = StoredShard(collection, 0, blob).plan({(0, 0): Put(b"x" * 500)}, {(1, 1)})
    assert plan is not None
    assert blob.nbytes <= 2 * (64 * 16 + 4)
    assert sum(isinstance(piece, ByteRange) for piece in plan) == 1
    new = bytes_of(plan, blob)
    assert len(new) == len(old) + 500 + (64 * 16 + 4 if location == "end" else 0)


def test_bytes_of_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"....new chunk....")
    fd = os.open(tmp_path / "journal", os.O_RDONLY)
    try:
        collection = zarr((4, 4), (4, 4), (2, 2))
        part = FilePart(fd, 4, 9)
        plan = StoredShard(collection, 0, None).plan({(0, 0): Put(part)}, frozenset())
        assert plan is not None
        assert part in plan
        new = MemoryBlob(bytes_of(plan))
        assert is_same(StoredShard(collection, 0, new).plan({(0, 0): Put(part)}, frozenset()), new.stat().size)
    finally:
        os.close(fd)


def test_shards_in_shards_do_not_grow_inside() -> None:
    inner = [{"name": "sharding_indexed", "configuration": _sharding((2, 2))}]
    collection = zarr((8, 8), (8, 8), (4, 4), codecs=inner)
    old: bytes | None = None
    for turn in range(20):
        old = published(collection, old, {(turn % 2, 0): bytes([turn]) * 100, (3, 3): bytes([turn])})
    assert old is not None
    usage = StoredShard(collection, 0, MemoryBlob(old)).usage()
    assert usage.live == 2 * (4 * 16 + 4) + 201
    assert usage.size == usage.index + usage.live + usage.dead
    packed = StoredShard(collection, 0, MemoryBlob(old)).plan({(3, 3): Put(b"end")}, frozenset(), pack=True)
    assert packed is not None
    after = bytes_of(packed, MemoryBlob(old))
    assert StoredShard(collection, 0, MemoryBlob(after)).usage().dead == 0
    assert stored_chunk(collection, after, (1, 0)) == bytes([19]) * 100


def test_what_lies_beyond_the_array_stays_and_keeps_the_shard() -> None:
    collection = zarr((2, 4), (4, 4), (2, 2))
    old = handmade.zarr_shard([b"one", b"two", b"beyond", None])
    shard = published(collection, old, {}, {(0, 0), (0, 1)})
    assert shard is not None
    assert stored_chunk(collection, shard, (1, 0)) == b"beyond"
    assert published(collection, shard, {}, {(1, 0)}) is None
    assert published(collection, None, {}, {(0, 0)}) is None


# ---- meshes ----

_MESH = precomputed({**handmade_ids.MESHES, "sharding": handmade.sharding(minishard=1, data="gzip")})
_THREE, _FIVE = handmade_ids.manifest([[3]]), handmade_ids.manifest([[2], [3]])


def _mesh() -> bytes:
    shard = published(_MESH, None, {(4, 0): _THREE, (4, 1): b"abc", (5, 0): _FIVE, (5, 1): b"12345"})
    assert shard is not None
    return shard


def _meshes(shard: bytes) -> dict[int, bytes]:
    """Fragments, by what lies before manifests."""
    out = {}
    for number in (4, 5, 6):
        entry = entry_of(_MESH, shard, (number, 0))
        if entry is not None:
            manifest = gzip.decompress(shard[entry[0] : sum(entry)])
            size = 3 if manifest == _THREE else 5 if manifest == _FIVE else 0
            out[number] = shard[entry[0] - size : entry[0]]
        assert (stored_chunk(_MESH, shard, (number, 1)) or b"") == out.get(number, b"")
    return out


def test_a_manifest_and_its_fragments_move_together() -> None:
    old = _mesh()
    assert _meshes(old) == {4: b"abc", 5: b"12345"}
    changed: list[tuple[dict[Coords, bytes], set[Coords], dict[int, bytes]]] = [
        ({(4, 1): b"xyz"}, set(), {4: b"xyz", 5: b"12345"}),
        ({(4, 0): _THREE}, set(), {4: b"abc", 5: b"12345"}),
        ({(4, 0): _FIVE, (4, 1): b"hello"}, set(), {4: b"hello", 5: b"12345"}),
        ({(4, 0): handmade_ids.manifest([[0]])}, {(4, 1)}, {4: b"", 5: b"12345"}),
        ({(6, 0): handmade_ids.manifest([])}, {(5, 0), (5, 1)}, {4: b"abc", 6: b""}),
    ]
    for puts, drops, wanted in changed:
        for pack in (False, True):
            new = published(_MESH, old, puts, drops, pack=pack)
            assert new is not None
            assert _meshes(new) == wanted
            assert pack or new[32 : len(old)] == old[32:]
    assert published(_MESH, old, {}, {(n, file) for n in (4, 5) for file in (0, 1)}) is None


@pytest.mark.parametrize(
    ("puts", "drops"),
    [
        ({(6, 1): b"abc"}, set()),
        ({(6, 0): _THREE}, set()),
        ({(4, 1): b"four"}, set()),
        ({(4, 0): _FIVE}, set()),
        ({(4, 0): b"no manifest", (4, 1): b"abc"}, set()),
        ({(4, 1): b"abc"}, {(4, 0)}),
        ({(4, 0): _THREE}, {(4, 1)}),
        ({}, {(4, 0)}),
        ({}, {(4, 1)}),
    ],
)
def test_half_a_mesh_waits_for_the_other_half(puts: dict[Coords, bytes], drops: set[Coords]) -> None:
    old = _mesh()
    with pytest.raises(UnfitChunkError):
        published(_MESH, old, puts, drops)
    told: dict[Coords, str] = {}
    new = published(_MESH, old, {**puts, (5, 1): b"54321"}, drops, unfit=told)
    assert new is not None
    assert _meshes(new) == {4: b"abc", 5: b"54321"}
    assert told.keys() == {*puts, *drops}


def test_meshes_are_packed_with_their_fragments() -> None:
    old = _mesh()
    for turn in range(5):
        new = published(_MESH, old, {(4, 1): bytes([turn]) * 3})
        assert new is not None
        old = new
    before = StoredShard(_MESH, 0, MemoryBlob(old)).usage()
    plan = StoredShard(_MESH, 0, MemoryBlob(old)).repack()
    assert plan is not None
    packed = bytes_of(plan, MemoryBlob(old))
    after = StoredShard(_MESH, 0, MemoryBlob(packed)).usage()
    assert (after.live, after.dead) == (before.live, 0)
    assert before.dead > 0
    assert _meshes(packed) == {4: b"\4\4\4", 5: b"12345"}


# ---- damage ----

REFUSED = {"zarr_truncated_start", "n5_cut", "volume_legacy_pair", "mesh_legacy_pair"}
"""Cut-off chunks, which would seem to have the bytes that come behind; and shards that are two files."""


@pytest.mark.parametrize("name", sorted(CASES))
def test_beside_damage_chunks_are_written_or_refused(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name](tmp_path / "x")
    tree = _tree(case.path)
    refused = set()
    for chunks in tree.collections():
        for unit in _units(tree, chunks, case):
            before = {path: path.read_bytes() for path in case.path.rglob("*") if path.is_file()}
            puts = {c: _changed(data) if chunks.collection.lead is None or c[1] else data for c, data in unit}
            try:
                Shards(chunks, case.path).write(puts, ())
            except (CorruptShardError, UnsupportedError) as e:
                refused.add(str(e))
                continue
            _check(case, {chunks.chunk_path(c): data for c, data in puts.items()})
            for path, data in before.items():
                path.write_bytes(data)
    assert bool(refused) == (name in REFUSED), refused


def _changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def _tree(path: Path) -> Tree:
    return Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20)))


def _units(tree: Tree, chunks: Any, case: Case) -> list[list[tuple[Coords, bytes]]]:
    """Chunks that are sound, with both files of each that is two."""
    found: dict[Coords, list[Coords]] = {}
    with suppress(CorruptShardError):
        for batch in chunks.chunks.layer.scan(0):
            for c in map(tuple, batch.coords.tolist()):
                found.setdefault(c if chunks.collection.lead is None else c[:1], []).append(c)
    units = ([(c, case.good.get(chunks.chunk_path(c), MISSING)) for c in unit] for unit in found.values())
    return [unit for unit in units if all(data is not MISSING for _, data in unit)]


MISSING = b"no such chunk"


def _check(case: Case, changed: Mapping[str, bytes]) -> None:
    """All is as it was, but for what was changed."""
    tree = _tree(case.path)
    for file, data in {**case.good, **changed}.items():
        assert read_all(tree, tree.resolve(file)) == data
    for file in case.bad - changed.keys():
        with pytest.raises(CorruptShardError):
            read_all(tree, tree.resolve(file))
    for file in case.absent - changed.keys():
        with pytest.raises(FileNotFoundError):
            tree.resolve(file)


def test_a_shard_whose_checksum_does_not_hold_is_not_written() -> None:
    collection = zarr((4, 4), (4, 4), (2, 2))
    collection = replace(collection, layers=(replace(collection.layers[0], trailer=8),))
    old = published(collection, None, {(0, 0): b"one", (1, 1): b"two"})
    assert old is not None
    assert old[-8:-4] == google_crc32c.value(old[:-8]).to_bytes(4, "little")
    assert old[-4:] == google_crc32c.value(old[:-4]).to_bytes(4, "little")
    new = published(collection, old, {(0, 1): b"three"})
    assert new is not None
    assert new[: len(old) - 8] == old[:-8]
    for at in (0, len(old) - 1):
        damaged = bytearray(old)
        damaged[at] ^= 1
        with pytest.raises(CorruptShardError, match="crc32c of the whole shard"):
            published(collection, bytes(damaged), {(0, 1): b"three"})
        assert published(collection, bytes(damaged), {(1, 1): b"two"}) == bytes(damaged), "which changes nothing"


def test_an_index_that_cannot_be_read_is_not_written() -> None:
    collection = zarr((4, 4), (4, 4), (2, 2))
    for old in (handmade.zarr_shard([b"1"] * 4, checksum="wrong"), b"short"):
        with pytest.raises(CorruptShardError, match="index"):
            published(collection, old, {(0, 0): b"x"})


# ---- what is around chunks ----


@given(st.binary(max_size=200))
def test_what_is_deflated_is_shown_as_it_was(data: bytes) -> None:
    transform = Gunzip()
    assert transform.show((0,), transform.store((0,), data)) == data


def test_a_chunk_of_the_wrong_size_is_refused() -> None:
    transform = Gunzip(lambda coords: np.full(len(coords), 12, np.uint64))
    assert transform.show((0,), transform.store((0,), bytes(12))) == bytes(12)
    with pytest.raises(ValueError, match="12 bytes"):
        transform.store((0,), bytes(22))


@given(st.binary(max_size=60))
def test_the_header_of_bcolz_is_left_out(data: bytes) -> None:
    transform, chunk = BlpHeader(), stored(data)
    assert transform.store((0,), BLP + chunk) == chunk
    for wrong in (chunk, BLP + chunk + b"x", BLP + chunk[:-1], BLP[:10]):
        with pytest.raises(ValueError, match=r"Blosc|bcolz"):
            transform.store((0,), wrong)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("swap", [1, 2])
def test_blocks_without_header_are_stored_whole(swap: int, checksum: bool) -> None:
    data = np.arange(6, dtype=">u2").reshape(3, 2)
    header = data_n5.header((2, 3))
    transform = PlainBlocks(checksum, header, 12, swap)
    block = transform.store((0, 0), header + data.tobytes())
    assert transform.show((0, 0), block) == header + data.tobytes()
    assert len(block) == 12 + 4 * checksum
    assert block[:12] == (data.astype("<u2") if swap == 2 else data).tobytes()
    cut = np.zeros((3, 2), ">u2")
    cut[:2, :1] = data[:2, :1]
    block = transform.store((0, 0), data_n5.header((1, 2)) + data[:2, :1].tobytes())
    assert transform.show((0, 0), block) == header + cut.tobytes()
    for wrong in (
        b"",
        header,
        header + bytes(11),
        data_n5.header((3, 2)) + bytes(12),
        data_n5.header((2, 2)) + bytes(7),
        data_n5.header((2,)) + bytes(4),
        data_n5.header((2, 3), 6) + bytes(12),
    ):
        with pytest.raises(ValueError, match="block"):
            transform.store((0, 0), wrong)


def test_compressed_blocks_without_header_cannot_be_made_whole() -> None:
    transform = PlainBlocks(False, data_n5.header((2, 3)), None)
    assert transform.store((0, 0), data_n5.header((2, 3)) + b"deflated") == b"deflated"
    with pytest.raises(ValueError, match="the block has the shape"):
        transform.store((0, 0), data_n5.header((1, 3)) + b"deflated")


@given(st.binary(max_size=30), st.integers(0, 3))
def test_the_checksum_of_a_block_is_made_anew(payload: bytes, rank: int) -> None:
    block = data_n5.header((1,) * rank) + payload
    if rank:
        transform = PlainBlocks(True)
        assert transform.show((0,), transform.store((0,), block)) == block


# ---- chunks that lie one behind the other ----


def _files(chunks: int, per_file: int) -> Collection:
    layer = Layer(Superchunks(chunks, per_file))
    return replace(zarr((4, 4), (4, 4), (2, 2)), layers=(layer,), transform=BlpHeader())


def _packed(collection: Collection, shard: bytes) -> list[bytes]:
    """By walking, as readers do that look at no offsets."""
    _, _, options, checksum, _, _, _, n, room = struct.unpack_from("<4sBBBBiiqq", shard)
    position, out = 32 + (8 * (n + room) if options & 1 else 0), []
    for i in range(n):
        if options & 1:
            assert struct.unpack_from("<q", shard, 32 + 8 * i)[0] == position
        (size,) = struct.unpack_from("<I", shard, position + 12)
        out.append(shard[position : position + size])
        position += size + len(SUMS[checksum](b""))
        assert shard[position - len(SUMS[checksum](b"")) : position] == SUMS[checksum](out[-1])
    assert position == len(shard)
    return out


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("checksum", [0, 1, 5])
def test_superchunks_are_written_in_order(checksum: int, offsets: bool) -> None:
    collection = _files(10, 4)
    a, b, c, d = (stored(bytes([i]) * 8) for i in range(4))
    old = Superchunk(checksum=checksum, offsets=offsets, room=2 * offsets).write([a, b], (8, 8))
    new = published(collection, old, {(0,): BLP + d})
    assert new is not None
    assert _packed(collection, new) == [d, b]
    grown = published(collection, new, {(3,): BLP + c[:4] + stored(bytes(3))[4:], (2,): BLP + c})
    assert grown is not None
    assert _packed(collection, grown)[:3] == [d, b, c]
    assert struct.unpack_from("<iiqq", grown, 8) == (8, 3, 4, 0)
    less = published(collection, grown, {}, {(3,), (2,)})
    assert less is not None
    assert _packed(collection, less) == [d, b]
    assert struct.unpack_from("<iiqq", less, 8) == (8, 8, 2, 2 * offsets)
    assert published(collection, less, {}, {(0,), (1,)}) is None


def test_what_superchunks_cannot_hold_is_refused() -> None:
    collection = _files(10, 4)
    eight, three = BLP + stored(bytes(8)), BLP + stored(bytes(3))
    old = published(collection, None, {(4,): eight, (5,): eight})
    assert old is not None
    assert StoredShard(collection, 1, MemoryBlob(old)).usage().dead == 0
    refused: list[tuple[dict[Coords, bytes], set[Coords]]] = [
        ({(7,): eight}, set()),
        ({}, {(4,)}),
        ({(4,): three}, set()),
        ({(6,): three, (7,): eight}, set()),
        ({(6,): BLP + stored(bytes(9))}, set()),
    ]
    for puts, drops in refused:
        with pytest.raises(UnsupportedError):
            published(collection, old, puts, drops)
    with pytest.raises(ValueError, match=r"not a chunk"):
        published(collection, old, {(4,): b"no chunk"})
    with pytest.raises(CorruptShardError):
        published(collection, old[:-1], {(4,): BLP + stored(b"12345678")})
    assert published(collection, old[:-1], {(5,): three}) is not None


@pytest.mark.interop
@pytest.mark.parametrize("name", ["plain-defaults", "plain-no-offsets-sha512", "plain-metadata", "plain-none"])
def test_bloscpack_reads_what_was_written(name: str, tmp_path: Path) -> None:
    golden = GOLDEN / f"{name}.blp"
    (tmp_path / f"{name}.blp").write_bytes(golden.read_bytes())
    tree = open_tree(str(golden))
    (chunks,) = tree.collections()
    wanted = bytearray(range(256)) + bytearray(range(144))
    new = compressed(bytes(96), 4)
    Shards(chunks, tmp_path / f"{name}.blp").write({(1,): BLP + new}, ())
    wanted[96:192] = bytes(96)
    run_client("read_bloscpack", tmp_path / f"{name}.blp", tmp_path / "out.npy", python=client_python("bcolz"))
    assert np.load(tmp_path / "out.npy").tobytes() == wanted


@pytest.mark.parametrize("extent", [(4_398_046_511_104, 13_194_139_533_312), (0, 2**63), (2**63, 2**63), (0, 1000)])
def test_a_chunk_whose_entry_leaves_the_shard_is_damage(extent: tuple[int, int], tmp_path: Path) -> None:
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    shard = handmade.zarr_shard([b"one", b"two", b"three", None], entries={1: extent})
    handmade.write_files(tmp_path, {"c/0/0": shard})
    (chunks,) = _tree(tmp_path).collections()
    stored_shard = StoredShard(chunks.collection, 0, MemoryBlob(shard))
    whole, absent = stored_shard.stored_chunks([(1, 0), (1, 1)])
    assert whole is not None
    assert whole.read([ByteRange(0, 9)]) == [b"three"]
    assert absent is None
    with pytest.raises(CorruptShardError, match=f"leaves the object of {len(shard)} bytes"):
        stored_shard.stored_chunks([(0, 1)])
    assert not stored_shard.replaces_all({(0, 0), (0, 1), (1, 0), (1, 1)})


def test_readers_and_writers_give_the_same_reason_for_a_broken_entry(tmp_path: Path) -> None:
    compared = set()
    for name, case in CASES.items():
        tree = _tree(case(tmp_path / name).path)
        for chunks in (each for each in tree.collections() if each.collection.lead is None):
            for cell in _broken_cells(chunks):
                read = _error(partial(chunks.chunks.layer.locate, cell))
                if read is None or read.slot is None:  # the whole page is damaged
                    continue
                blob = chunks.shards.outermost.source.stored(chunks.shards.number_of(cell))
                shard = StoredShard(chunks.collection, chunks.shards.number_of(cell), blob)
                written = _error(partial(shard.stored_chunks, [cell]))
                assert written is not None
                assert (written.why, written.slot) == (read.why, read.slot)
                compared.add(name)
    assert len(compared) > 5, compared


def test_a_shard_with_a_broken_entry_is_not_repacked(tmp_path: Path) -> None:
    """A chunk that is only hidden by the damage would be lost. (An inner shard is kept as it is, with its entries.)"""
    refused = set()
    for name, case in CASES.items():
        for chunks in _tree(case(tmp_path / name).path).collections():
            collection = chunks.collection
            for cell in _broken_cells(chunks) if len(collection.layers) == 1 and collection.lead is None else ():
                number = chunks.shards.number_of(cell)
                with pytest.raises((CorruptShardError, UnsupportedError, OSError)):
                    StoredShard(collection, number, chunks.shards.outermost.source.stored(number)).repack()
                refused.add(type(collection.layers[0].format).__name__)
    assert refused == {"ShardingIndexed", "Uint64Sharded"}


def _broken_cells(chunks: Any) -> list[Coords]:
    with suppress(CorruptShardError):
        return [tuple(c) for batch in chunks.chunks.layer.scan(0) for c in batch.coords[batch.sizes < 0].tolist()]
    return []


def _error(ask: Callable[[], object]) -> CorruptShardError | None:
    try:
        ask()
    except CorruptShardError as e:
        return e
    return None
