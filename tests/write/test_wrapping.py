"""Differences in the index of a minishard wrap modulo 2^64, and native readers find each chunk nevertheless."""

from __future__ import annotations

import gzip
import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import tensorstore as ts

from shardfs.shards.rewriting import StoredShard
from tests import handmade, handmade_ids
from tests.suites.shard_format import MemoryBlob
from tests.write.test_rewriting import entry_of, precomputed, published

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
    values = {key: store.read(key.to_bytes(8, "big")).result() for key in keys}
    return {key: bytes(result.value) for key, result in values.items() if result.state == "value"}


@pytest.mark.parametrize("hash_", ["identity", "murmurhash3_x86_128"])
@pytest.mark.parametrize(("data", "index"), [("raw", "raw"), ("gzip", "gzip"), ("gzip", "raw")])
def test_native_readers_find_chunks_whose_differences_wrap(hash_: str, data: str, index: str, tmp_path: Path) -> None:
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
        shard = published(collection, before, at, {(key,) for key in drops}, pack=pack)
        assert shard is not None
        wanted = {key: chunk for key, chunk in {**wanted, **puts}.items() if key not in drops}
        header = 16 << MINISHARD_BITS
        assert pack or before is None or shard[header : len(before)] == before[header:]
        assert natively(tmp_path, spec, shard, IDS) == wanted
        wrapped += wraps(shard, deflated=index == "gzip")
        if pack:
            assert StoredShard(collection, 0, MemoryBlob(shard)).usage().dead == 0
    assert wrapped > 10


@pytest.mark.parametrize("data", ["raw", "gzip"])
def test_meshes_go_with_their_fragments(data: str) -> None:
    """All are in the order of ids: fragments, manifest, fragments, manifest. Ids wrap, not offsets."""
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
        shard = published(collection, before, puts, drops, pack=pack)
        assert shard is not None
        header = 16 << MINISHARD_BITS
        assert pack or before is None or shard[header : len(before)] == before[header:]
        wrapped += wraps(shard)
        for key, fragments in wanted.items():
            entry = entry_of(collection, shard, (key, 0))
            assert entry is not None
            source_bytes = shard[entry[0] : sum(entry)]
            assert (gzip.decompress(source_bytes) if data == "gzip" else source_bytes) == handmade_ids.manifest(
                [[len(fragments)]]
            )
            assert shard[entry[0] - len(fragments) : entry[0]] == fragments
    assert wrapped > 10
