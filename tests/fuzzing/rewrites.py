"""A rewrite of a shard is refused, or all that could be read before can be read afterwards and is the same."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardfs.model.errors import CorruptShardError, UnfitChunkError, UnsupportedError
from shardfs.shards.rewriting import StoredShard
from tests import handmade
from tests.fuzzing.inputs import NUMBERS, Draw, bent
from tests.suites.shard_format import MemoryBlob
from tests.write.test_rewriting import precomputed, published, stored_chunk, zarr

if TYPE_CHECKING:
    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords

_END = zarr((4, 4), (4, 4), (2, 2))
_START = zarr((4, 4), (4, 4), (2, 2), location="start")
_IDS = precomputed(handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(minishard=1, index="raw", data="raw")))
_CELLS: list[Coords] = [(i, j) for i in range(2) for j in range(2)]


def zarr_shards(draw: Draw) -> None:
    if draw.draw(st.booleans()):
        _rewritten(draw, _START, _zarr_shard(draw, "start"), _CELLS)
    else:
        _rewritten(draw, _END, _zarr_shard(draw, "end"), _CELLS)


def id_shards(draw: Draw) -> None:
    _rewritten(draw, _IDS, _ids_shard(draw), [(i, j, k) for i, j in _CELLS for k in range(2)])


def _zarr_shard(draw: Draw, location: handmade.Location) -> bytes:
    entries = draw.draw(st.dictionaries(st.integers(0, 3), st.tuples(NUMBERS, NUMBERS)))
    return handmade.zarr_shard([b"0000", b"11", b"222222", None], location=location, entries=entries)


def _ids_shard(draw: Draw) -> bytes:
    """Numbers anywhere in both indices of a sound shard."""
    original = published(_IDS, None, {(0, 0, 0): b"0000", (1, 1, 0): b"1111", (0, 1, 1): b"2222"})
    assert original is not None
    shard = bytearray(original)
    for at, number in draw.draw(
        st.dictionaries(st.integers(0, len(shard) // 8 - 1), NUMBERS | NUMBERS.map(lambda n: -n % 2**64))
    ).items():
        shard[8 * at : 8 * at + 8] = number.to_bytes(8, "little")
    return bytes(shard)


def _rewritten(draw: Draw, collection: Collection, old: bytes, cells: list[Coords]) -> None:
    if draw.draw(st.integers(0, 9)) == 0:
        old = bent(draw, old)
    puts = draw.draw(st.dictionaries(st.sampled_from(cells), st.binary(min_size=4, max_size=4), max_size=3))
    drops = {c for c in draw.draw(st.sets(st.sampled_from(cells), max_size=2)) if c not in puts}
    if not puts and not drops:
        return
    before = {c: _chunk(collection, old, c) for c in cells}
    for pack in (False, True):
        try:
            new = published(collection, old, puts, drops, pack=pack)
        except (CorruptShardError, UnfitChunkError, UnsupportedError):
            continue
        untouched = {c: data for c, data in before.items() if data is not None and c not in puts and c not in drops}
        if new is None:
            assert not puts
            assert not untouched
            continue
        after = {c: _chunk(collection, new, c) for c in cells}
        assert {c: after[c] for c in untouched} == untouched
        assert {c: after[c] for c in puts} == puts
        assert {after[c] for c in drops} <= {None}
    with suppress(CorruptShardError):
        usage = StoredShard(collection, 0, MemoryBlob(old)).usage()
        assert 0 <= usage.dead <= usage.size == len(old)
    with suppress(CorruptShardError, UnsupportedError):
        StoredShard(collection, 0, MemoryBlob(old)).repack()


def _chunk(collection: Collection, shard: bytes, coords: Coords) -> bytes | None:
    """None if there is none, or none that can be read."""
    try:
        return stored_chunk(collection, shard, coords)
    except CorruptShardError:
        return None
