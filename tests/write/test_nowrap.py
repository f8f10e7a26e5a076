"""`u64=nowrap`: no difference in an index of a minishard is below zero, whatever was written before."""

from __future__ import annotations

import gzip
import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import tensorstore as ts

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.shard_format import Put
from shardfs.shards import rewriting
from tests import handmade, handmade_ids
from tests.suites.shard_format import MemoryBlob
from tests.write.test_rewriting import precomputed, published

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords

MINISHARD_BITS = 2
IDS = [*range(40), 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


class Minishard(NamedTuple):
    """As it is stored, with differences as they are, and decoded by adding them up, without a modulus."""

    ids: list[int]
    starts: list[int]
    sizes: list[int]


def strictly_read(shard: bytes, bits: int = MINISHARD_BITS, *, deflated: bool = False) -> Iterator[Minishard]:
    """Minishards that are not empty. All numbers are unsigned, and sums may become of any size."""
    header = 16 << bits
    for page in range(1 << bits):
        start, stop = struct.unpack_from("<QQ", shard, 16 * page)
        if start == stop:
            continue
        raw = shard[header + start : header + stop]
        raw = gzip.decompress(raw) if deflated else raw
        n = len(raw) // 24
        numbers = struct.unpack(f"<{3 * n}Q", raw)
        out, key, end = Minishard([], [], list(numbers[2 * n :])), 0, header
        for id_delta, gap, size in zip(numbers[:n], numbers[n : 2 * n], out.sizes, strict=True):
            key, end = key + id_delta, end + gap + size
            out.ids.append(key)
            out.starts.append(end - size)
        yield out


def wraps(shard: bytes, bits: int = MINISHARD_BITS, *, deflated: bool = False) -> bool:
    """Whether somebody who does not count modulo 2^64 would find other ids or positions."""
    return any(
        max(found.ids) >= 2**64 or max(map(sum, zip(found.starts, found.sizes, strict=True))) > len(shard)
        for found in strictly_read(shard, bits, deflated=deflated)
    )


def skeletons(hash_: str, data: str, index: str) -> Collection:
    spec = handmade.sharding(hash=hash_, minishard=MINISHARD_BITS, shard=0, data=data, index=index)
    return precomputed({**handmade_ids.SKELETONS, "sharding": spec})


def natively(path: Path, spec: Any, shard: bytes, keys: Iterable[int]) -> dict[int, bytes]:
    (path / "0.shard").write_bytes(shard)
    base = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": spec}).result()
    found = {key: store.read(key.to_bytes(8, "big")).result() for key in keys}
    return {key: bytes(result.value) for key, result in found.items() if result.state == "value"}


@pytest.mark.parametrize("hash_", ["identity", "murmurhash3_x86_128"])
@pytest.mark.parametrize(("data", "index"), [("raw", "raw"), ("gzip", "gzip"), ("gzip", "raw")])
@pytest.mark.parametrize("forward", [False, True], ids=["wrap", "nowrap"])
def test_only_with_nowrap_differences_never_wrap(
    hash_: str, data: str, index: str, forward: bool, tmp_path: Path
) -> None:
    """Rounds of chunks that are changed, added and dropped, sometimes packed; the values are those natively."""
    spec = handmade.sharding(hash=hash_, minishard=MINISHARD_BITS, shard=0, data=data, index=index)
    collection, rng = skeletons(hash_, data, index), random.Random(4)
    shard: bytes | None = None
    wanted: dict[int, bytes] = {}
    wrapped = 0
    for turn in range(20):
        chosen = rng.sample(IDS, 8)
        puts = {key: b"%d " % key * rng.randrange(1, 30) + b"%d" % turn for key in chosen[:5]}
        drops, pack = set(chosen[5:]), turn % 7 == 6
        before = shard
        at: dict[Coords, bytes] = {(key,): chunk for key, chunk in puts.items()}
        shard = published(collection, before, at, {(key,) for key in drops}, forward=forward, pack=pack)
        assert shard is not None
        wanted = {key: chunk for key, chunk in {**wanted, **puts}.items() if key not in drops}
        header = 16 << MINISHARD_BITS
        assert pack or before is None or shard[header : len(before)] == before[header:]
        assert natively(tmp_path, spec, shard, IDS) == wanted
        wrapped += wraps(shard, deflated=index == "gzip")
        if forward:
            found = [key for minishard in strictly_read(shard, deflated=index == "gzip") for key in minishard.ids]
            assert sorted(found) == sorted(wanted)
        if pack:
            assert rewriting.usage(collection, 0, MemoryBlob(shard)).dead == 0
    assert not wrapped if forward else wrapped > 10


def test_what_lies_in_order_is_not_copied() -> None:
    """Nor are other minishards, not even those that wrap."""
    collection = skeletons("identity", "raw", "raw")
    first: dict[Coords, bytes] = {(key,): bytes([key]) * 1000 for key in (0, 4, 8, 1, 5)}
    old = published(collection, None, first)
    assert old is not None
    behind = published(collection, old, {(12,): b"x"}, {(4,)}, forward=True)
    assert behind is not None
    assert len(behind) - len(old) == 1 + 24 * 3
    wrapping = published(collection, behind, {(1,): b"changed"})
    assert wrapping is not None
    assert wraps(wrapping)
    other = published(collection, wrapping, {(0,): b"changed"}, forward=True)
    assert other is not None
    assert len(other) - len(wrapping) == len(b"changed") + 1000 + 1 + 24 * 3
    assert wraps(other)
    assert published(collection, other, {(0,): b"changed"}, forward=True) == other
    dropped = published(collection, other, {}, {(5,)}, forward=True)
    assert dropped is not None
    assert not wraps(dropped)


def test_copies_of_what_follows_itself_are_one_piece() -> None:
    collection = skeletons("identity", "raw", "raw")
    old = published(collection, None, {(4 * n,): bytes([n]) * 10 for n in range(100)})
    assert old is not None
    plan = rewriting.plan(collection, 0, MemoryBlob(old), {(200,): Put(b"new")}, frozenset(), forward=True)
    assert plan is not None
    assert len(plan) == len(("shard index", "body", "before", "new", "behind", "index"))


@pytest.mark.parametrize("forward", [False, True], ids=["wrap", "nowrap"])
@pytest.mark.parametrize("data", ["raw", "gzip"])
def test_meshes_go_with_their_fragments(forward: bool, data: str) -> None:
    """All are in the order of ids: fragments, manifest, fragments, manifest. Without nowrap ids wrap, not offsets."""
    spec = handmade.sharding(minishard=MINISHARD_BITS, data=data)
    collection, rng = precomputed({**handmade_ids.MESHES, "sharding": spec}), random.Random(4)
    shard: bytes | None = None
    wanted: dict[int, bytes] = {}
    wrapped = 0
    for turn in range(20):
        chosen = rng.sample(IDS, 6)
        puts: dict[Coords, bytes] = {}
        for key in chosen[:4]:
            wanted[key] = bytes([turn]) * rng.randrange(1, 30)
            puts |= {(key, 0): handmade_ids.manifest([[len(wanted[key])]]), (key, 1): wanted[key]}
        for key in chosen[4:]:
            wanted.pop(key, None)
        drops = {(key, file) for key in chosen[4:] for file in (0, 1)}
        before, pack = shard, turn % 7 == 6
        shard = published(collection, before, puts, drops, forward=forward, pack=pack)
        assert shard is not None
        header = 16 << MINISHARD_BITS
        assert pack or before is None or shard[header : len(before)] == before[header:]
        wrapped += wraps(shard)
        for key, fragments in wanted.items():
            entry = rewriting.entry(collection, MemoryBlob(shard), (key, 0))
            assert entry is not None
            stored = shard[entry[0] : sum(entry)]
            assert (gzip.decompress(stored) if data == "gzip" else stored) == handmade_ids.manifest([[len(fragments)]])
            assert shard[entry[0] - len(fragments) : entry[0]] == fragments
        if forward:
            found = [key for minishard in strictly_read(shard) for key in minishard.ids]
            assert sorted(found) == sorted(wanted)
    assert not wrapped if forward else wrapped > 10


def test_what_cannot_be_copied_is_refused() -> None:
    """A chunk that is cut off, until it is written anew; and many that share the same bytes."""
    collection = skeletons("identity", "raw", "raw")
    cut = [handmade.Entry(0, b"", at=0, size=5000), handmade.Entry(4, b"sound")]
    old = handmade.uint64_shard([cut, [], [], []])
    with pytest.raises(CorruptShardError, match="outside the shard"):
        published(collection, old, {(8,): b"new"}, forward=True)
    mended = published(collection, old, {(0,): b"new"}, forward=True)
    assert mended is not None
    assert [found.ids for found in strictly_read(mended)] == [[0, 4]]
    assert not wraps(mended)
    shared = [handmade.Entry(4 * n, b"", at=0, size=1000) for n in range(1000)]
    old = handmade.uint64_shard([shared, [], [], []], junk=bytes(1000))
    with pytest.raises(UnsupportedError, match="share bytes"):
        published(collection, old, {(8,): b"new"}, forward=True)


@pytest.mark.parametrize("u64", ["wrap", "nowrap"])
def test_the_option_is_heeded(u64: str, tmp_path: Path) -> None:
    source = tmp_path / "volume"
    spec = handmade.sharding(minishard=MINISHARD_BITS)
    handmade.write_json(source / "info", handmade.volume_info((16, 16, 1), (1, 1, 1), spec))
    settings = {"journal": str(tmp_path / "journals"), "u64": u64}
    fs = ShardFileSystem(source=str(source), rw=True, write_options=settings, skip_instance_cache=True)
    data = np.zeros((16, 16, 1, 1), np.uint8)
    for turn in range(3):
        for x in range(turn, 16):
            for y in range(16 - 5 * turn):
                data[x, y] = 50 * turn + x + y
                fs.pipe_file(f"s/{x}-{x + 1}_{y}-{y + 1}_0-1", data[x, y].tobytes())
        fs.publish(timeout=60)
    assert fs.close(60) == []
    store = {"driver": "file", "path": str(source)}
    found = ts.open({"driver": "neuroglancer_precomputed", "kvstore": store}).result().read().result()
    assert np.array_equal(np.asarray(found), data)
    (shard,) = source.glob("s/*.shard")
    assert wraps(shard.read_bytes()) == (u64 == "wrap")
