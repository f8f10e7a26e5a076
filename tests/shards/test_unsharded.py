"""Chunks that are objects by themselves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardfs.model.grid import cell_of
from shardfs.shards.byte_layouts.unsharded import Unsharded
from tests.suites.shard_format import Sample, ShardFormatSuite

if TYPE_CHECKING:
    from shardfs.model.values import Coords
    from tests.suites.shard_format import Extents


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A chunk is all there is in its object, which may have no bytes."""
    grid = tuple(draw(st.lists(st.integers(1, 2**15), min_size=1, max_size=4)))

    def key(cell: Coords) -> str:
        return ".".join(map(str, cell))

    def whole(extents: Extents) -> bytes:
        return bytes(sum(size for _, size in extents.values()))

    cells = st.tuples(*(st.integers(0, n - 1) for n in grid))
    one = st.builds(lambda cell, size: {cell: (0, size)}, cells, st.integers(0, 50))
    return Sample(Unsharded(grid, key, partial(cell_of, separator=".", rank=len(grid))), cells, key, whole, one)


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return samples()
