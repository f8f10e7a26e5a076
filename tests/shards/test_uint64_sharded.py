"""Neuroglancer's uint64 shards: the conformance suite, the specification's examples, tensorstore as writer."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import mmh3
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.grid import MortonCode
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.shards.byte_layouts.uint64_spec import Ids, ShardingSpec, murmurhash3_x86_128, murmurhash3_x86_128_many
from tests import handmade
from tests.strategies import U64, sharding_specs, spec_json, uint64_sharded_samples
from tests.suites import Sample, ShardFormatSuite

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.values import Coords


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return uint64_sharded_samples()


@pytest.mark.parametrize(
    ("chunk_id", "h", "minishard", "key"),
    [
        (0, 0x4772B084E028AE41, 1, "48.shard"),
        (1, 0xE8BD67D616D4CE9A, 2, "53.shard"),
        (12345, 0x1D31307E3A65E510, 0, "22.shard"),
        (2**63 + 5, 0xCA2865055AC2893D, 5, "27.shard"),
        (720575940621826310, 0x2CEAD9C3921B3F23, 3, "64.shard"),
    ],
)
def test_murmur_table(chunk_id: int, h: int, minishard: int, key: str) -> None:
    assert murmurhash3_x86_128(chunk_id) == h
    shards = Uint64Sharded(ShardingSpec(0, "murmurhash3_x86_128", 3, 7), Ids())
    shard, page, slot = shards.place((chunk_id,))
    assert (page, slot, shards.key(shard)) == (minishard, chunk_id, key)


@given(st.lists(U64 | st.sampled_from((0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1)), max_size=50))
def test_many_hashes_are_those_of_mmh3(values: list[int]) -> None:
    hashes = [int.from_bytes(mmh3.hash_bytes(v.to_bytes(8, "little"), 0, False)[:8], "little") for v in values]
    assert murmurhash3_x86_128_many(np.array(values, np.uint64)).tolist() == hashes


@pytest.mark.parametrize(
    ("grid", "cell", "spec", "minishard", "key"),
    [
        ((538, 618, 805), (300, 17, 512), ShardingSpec(9, "identity", 6, 15), 17, "4201.shard"),
        ((3, 2, 2), (2, 0, 1), ShardingSpec(1, "identity", 2, 3), 2, "1.shard"),
    ],
)
def test_places_of_the_specification(grid: Coords, cell: Coords, spec: ShardingSpec, minishard: int, key: str) -> None:
    shards = Uint64Sharded(spec, MortonCode(grid))
    shard, page, _ = shards.place(cell)
    assert (page, shards.key(shard)) == (minishard, key)


@pytest.mark.parametrize(
    ("bits", "good", "bad"),
    [
        (
            0,
            ["0.shard"],
            ["1.shard", "00.shard", "0", "shard", ".shard", "0.shards", "0.SHARD", "-0.shard", "\u0660.shard"],
        ),
        (3, ["0.shard", "7.shard"], ["8.shard", "07.shard", "f.shard"]),
        (5, ["06.shard", "1f.shard"], ["6.shard", "1F.shard", "20.shard", "006.shard", "+6.shard", " 6.shard"]),
        (15, ["4201.shard", "7fff.shard"], ["8000.shard", "4201.shard.gz", "4201.data"]),
        (64, ["f" * 16 + ".shard"], ["f" * 17 + ".shard"]),
    ],
)
def test_names_of_shards(bits: int, good: list[str], bad: list[str]) -> None:
    shards = Uint64Sharded(ShardingSpec(0, "identity", 0, bits), Ids())
    for name in good:
        number = shards.shard_of(name)
        assert number is not None
        assert shards.key(number) == name
    assert [shards.shard_of(name) for name in bad] == [None] * len(bad)


def test_the_example_minishard_index() -> None:
    shards = Uint64Sharded(ShardingSpec(1, "identity", 2, 3, "gzip", "gzip"), Ids())
    root = bytes.fromhex("0201000000000000 2201000000000000".replace(" ", "")) + bytes(48)
    assert shards.page_request(0, 0, root) == (64 + 258, 64 + 290)
    raw = gzip.compress(np.array([[0, 1], [0, 0], [130, 128]], "<u8").tobytes())
    index = shards.decode_page(0, 0, raw)
    assert [index.extent_at(index.position(i)) for i in (0, 1)] == [(64, 130), (194, 128)]


@given(
    sharding_specs(),
    st.lists(st.tuples(U64, st.integers(0, 2**40), st.integers(0, 2**30)), max_size=20, unique_by=lambda e: e[0]),
)
def test_ids_and_offsets_wrap(spec: ShardingSpec, entries: list[tuple[int, int, int]]) -> None:
    raw = handmade.minishard_index(entries)
    page_bytes = gzip.compress(raw) if spec.minishard_index_encoding == "gzip" else raw
    index = Uint64Sharded(spec, Ids()).decode_page(0, 0, page_bytes)
    head = 16 << spec.minishard_bits
    assert index.all_slots().tolist() == sorted(e[0] for e in entries)
    for chunk_id, offset, size in entries:
        assert index.extent_at(index.position(chunk_id)) == (head + offset, size)


def test_an_id_that_occurs_twice_is_listed_once() -> None:
    raw = handmade.minishard_index([(7, 0, 1), (3, 1, 2), (7, 3, 4)])
    index = Uint64Sharded(ShardingSpec(0, "identity", 0, 0), Ids()).decode_page(0, 0, raw)
    assert index.all_slots().tolist() == [3, 7]
    assert index.extent_at(index.position(7)) == (16, 1)


def test_the_memory_of_ids_that_occur_again_counts() -> None:
    """Or a small hostile file would fill memory beyond the bound of the index cache."""
    shards = Uint64Sharded(ShardingSpec(0, "identity", 0, 0), Ids())
    index = shards.decode_page(0, 0, np.zeros((3, 1000), "<u8").tobytes()).checked(1 << 40)
    assert index.repeated is not None
    assert len(index.repeated) == 999
    assert index.nbytes >= 24 * 1000


def test_an_id_in_the_wrong_minishard_is_not_valid() -> None:
    shards = Uint64Sharded(ShardingSpec(0, "identity", 1, 1), Ids())
    _, valid = shards.coords(1, 0, np.array([0, 1, 2, 3, 4, 6], np.uint64))
    assert valid.tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [(10, 5, "impossible"), (0, 2**63, "impossible"), (2**64 - 1, 2**64 - 1, None), (0, 2**40, "is the limit")],
)
def test_impossible_entries_of_the_shard_index(start: int, end: int, why: str | None) -> None:
    shards = Uint64Sharded(ShardingSpec(0, "identity", 0, 0), Ids())
    root = start.to_bytes(8, "little") + end.to_bytes(8, "little")
    if why is None:
        assert shards.page_request(0, 0, root) is None
    else:
        with pytest.raises(ValueError, match=why):
            shards.page_request(0, 0, root)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (gzip.compress(bytes(48), mtime=0)[:-9], "ends too early"),
        (b"", "not gzip data"),
        (b"\x1f\x8bnonsense", "not gzip data"),
        (gzip.compress(bytes(47), mtime=0), "no multiple of 24"),
        (gzip.compress(bytes(64 << 20), mtime=0), "grows beyond"),
    ],
)
def test_damaged_minishard_indices(raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Uint64Sharded(ShardingSpec(0, "identity", 0, 0, "gzip"), Ids()).decode_page(0, 0, raw)


@pytest.mark.interop
@given(
    sharding_specs().filter(lambda s: s.preshift_bits < 64),
    st.dictionaries(U64 | st.integers(0, 40), st.binary(max_size=20), min_size=1, max_size=12),
)
def test_reads_what_tensorstore_writes(
    tmp_path_factory: pytest.TempPathFactory, spec: ShardingSpec, values: dict[int, bytes]
) -> None:
    path = tmp_path_factory.mktemp("shards")
    _write(path, spec, values)
    shards = Uint64Sharded(spec, Ids())
    for chunk_id, data in values.items():
        shard, page, slot = shards.place((chunk_id,))
        content = (path / shards.key(shard)).read_bytes()
        where = shards.root_request()
        request = shards.page_request(shard, page, content[where.start : where.stop])
        assert request is not None
        index = shards.decode_page(shard, page, content[request.start : request.stop])
        start, size = index.extent_at(index.position(slot))
        assert content[start : start + size] == data


def _write(path: Path, spec: ShardingSpec, values: dict[int, bytes]) -> None:
    base = {"driver": "file", "path": f"{path}/"}
    document = spec_json(spec)
    store = ts.KvStore.open({"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": document}).result()
    with ts.Transaction() as transaction:
        for chunk_id, data in values.items():
            store.with_transaction(transaction)[chunk_id.to_bytes(8, "big")] = data
