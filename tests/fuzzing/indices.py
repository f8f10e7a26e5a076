"""An index says where chunks are, all of them in the shard, or why it cannot; so does what rewrites the shard."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardfs.model.errors import UnsupportedError
from shardfs.model.shard_format import Put, ShardChange
from shardfs.shards.index_reader import ShardIndexReader
from tests.fuzzing.inputs import Draw, bent, with_other_numbers
from tests.suites.shard_format import MemoryBlob, Sample, extents_of, read_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.shard_format import Usage


def damaged(samples: st.SearchStrategy[Sample]) -> Callable[[Draw], None]:
    """The target for shards of one kind."""

    def target(draw: Draw) -> None:
        sample = draw.draw(samples)
        extents = draw.draw(extents_of(sample))
        cell = draw.draw(st.sampled_from(sorted(extents)) if extents else sample.cells)
        content = sample.shard(extents)
        if draw.draw(st.integers(0, 3)):
            content = with_other_numbers(draw, content)
        if draw.draw(st.integers(0, 3)) == 0:
            content = bent(draw, content)
        form, blob = sample.format, MemoryBlob(content)
        shard, page, slot = form.place(cell)
        index = ShardIndexReader(form, shard, blob)
        steps: list[Callable[[], object]] = [
            lambda: _read(sample, cell, content),
            lambda: _count(form.usage(index), len(content)),
            lambda: form.rewrite(shard, index, ShardChange(pack=True, strict=True)),
            lambda: form.rewrite(shard, index, ShardChange({(page, slot): Put(b"x" * 20)})),
            lambda: form.rewrite(shard, index, ShardChange(drops={(page, slot)}, pack=True)),
        ]
        for step in steps:
            with suppress(ValueError, UnsupportedError):
                step()

    return target


def _count(usage: Usage, size: int) -> None:
    assert usage.size == size
    assert 0 <= min(usage.index, usage.live, usage.dead) <= max(usage.index, usage.live, usage.dead) <= size


def _read(sample: Sample, cell: tuple[int, ...], content: bytes) -> None:
    index = read_index(sample, cell, content)
    if index is None:
        return
    arrays, (shard, page, _) = index.arrays(), sample.format.place(cell)
    sample.format.coords(shard, page, arrays.all_slots())
    for slot in arrays.all_slots().tolist():
        try:
            extent = arrays.extent_at(arrays.position(slot))
        except ValueError:
            continue
        assert 0 <= extent[0] <= sum(extent) <= len(content)
        assert index.find(slot) in (None, extent)
