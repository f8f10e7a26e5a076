"""Zarr v3 `sharding_indexed` shards: the conformance suite, and the specification's examples."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES
from tests import handmade
from tests.strategies import sharding_indexed_samples
from tests.suites import Sample, ShardFormatSuite

if TYPE_CHECKING:
    from hypothesis import strategies as st


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return sharding_indexed_samples()


def _format(
    axes: list[ShardedAxis], order: list[int] | None = None, index: IndexEncoding | None = None
) -> ShardingIndexed:
    return ShardingIndexed(
        axes,
        list(range(len(axes))) if order is None else order,
        index or IndexEncoding(),
        lambda g: "/".join(map(str, g)),
        lambda key: tuple(map(int, key.split("/"))),
    )


def test_the_example_of_shape_7_10() -> None:
    # shape (7, 10), shard (4, 6), inner (2, 3): chunk (2, 3) is in c/1/1 at (0, 1)
    shards = _format([ShardedAxis(4, 2), ShardedAxis(4, 2)])
    assert shards.place((2, 3)) == (3, 0, 1)
    assert shards.key(3) == "1/1"
    assert shards.page_request(0, 0, None).size == 68  # type: ignore[union-attr]


def test_the_example_of_a_transpose() -> None:
    # shard (4, 6, 8), order [2, 0, 1], chunk_shape [4, 2, 3]: inner (2, 3, 4) in array order, 2 slots along each axis
    shards = _format([ShardedAxis(4, 2), ShardedAxis(4, 2), ShardedAxis(4, 2)], [2, 0, 1])
    for local in product(range(2), repeat=3):
        x, y, z = local
        assert shards.place(local)[2] == 4 * z + 2 * x + y


def test_slots_beyond_the_array_are_not_valid() -> None:
    shards = _format([ShardedAxis(3, 2), ShardedAxis(4, 2)])
    coords, valid = shards.coords(2, 0, np.arange(4, dtype=np.uint64))
    assert coords[valid].tolist() == [[2, 0], [2, 1]]


def test_a_scalar_has_one_slot() -> None:
    shards = _format([])
    assert shards.place(()) == (0, 0, 0)
    raw = handmade.zarr_index([(0, 2)])
    assert shards.decode_page(0, 0, raw).find(0) == (0, 2)
    coords, valid = shards.coords(0, 0, np.zeros(1, np.uint64))
    assert (coords.shape, valid.tolist()) == ((1, 0), [True])


@pytest.mark.parametrize("entry", [(handmade.ABSENT, 4), (0, handmade.ABSENT)])
def test_a_half_empty_entry_is_damage_to_that_chunk_alone(entry: tuple[int, int]) -> None:
    index = _format([ShardedAxis(2, 2)]).decode_page(0, 0, handmade.zarr_index([entry, (0, 1)])).checked(100)
    with pytest.raises(ValueError, match="half-empty index entry"):
        index.find(0)
    assert index.find(1) == (0, 1)


@pytest.mark.parametrize("entry", [(handmade.ABSENT, 4), (0, handmade.ABSENT), (handmade.ABSENT, handmade.ABSENT)])
def test_a_half_empty_entry_is_empty_in_n5(entry: tuple[int, int]) -> None:
    encoding = IndexEncoding(either_is_empty=True)
    index = (
        _format([ShardedAxis(2, 2)], index=encoding)
        .decode_page(0, 0, handmade.zarr_index([entry, (0, 1)]))
        .checked(100)
    )
    assert index.find(0) is None
    assert not len(index.arrays().broken)
    assert index.find(1) == (0, 1)


def test_a_wrong_checksum_says_what_was_expected() -> None:
    raw = handmade.zarr_index([(0, 1)], checksum="wrong")
    with pytest.raises(ValueError, match=r"has crc32c [0-9a-f]{8}, but says [0-9a-f]{8}"):
        _format([ShardedAxis(1, 1)]).decode_page(0, 0, raw)


def test_an_index_beyond_the_limit_is_not_even_asked_for() -> None:
    shards = _format([ShardedAxis(2**40, 2**40)])
    with pytest.raises(ValueError, match=f"{MAX_INDEX_BYTES} is the limit"):
        shards.page_request(0, 0, None)


def test_more_shards_than_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="beyond any real array"):
        _format([ShardedAxis(2**40, 1), ShardedAxis(2**40, 1)])


def test_more_slots_than_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="beyond any real array"):
        _format([ShardedAxis(1, 2**40), ShardedAxis(1, 2**40)])
    with pytest.raises(ValueError, match="beyond any real array"):
        _format([ShardedAxis(2**40, 0, (0, 2**40)), ShardedAxis(3, 2**40)])


@pytest.mark.parametrize("entry", [(10**9, 5), (handmade.ABSENT, 5)])
def test_very_many_broken_entries_all_stay_damage_and_cost_a_byte_each(entry: tuple[int, int]) -> None:
    n = 300_000
    rows = np.empty((n, 2), "<u8")
    rows[:] = entry
    rows[7] = (1, 5)
    shards = _format([ShardedAxis(n, n)], index=IndexEncoding(crc32c=False))
    index = shards.decode_page(0, 0, rows.tobytes()).checked(1000).arrays()
    assert index.find(7) == (1, 5)
    for slot in (0, 8, n - 1):
        with pytest.raises(ValueError, match=r"leaves the object of 1000 bytes|half-empty"):
            index.find(slot)
    assert len(index.broken) == n - 1
    assert (index.sizes_at(index.broken) == -1).all()
    assert index.nbytes <= 17 * n
