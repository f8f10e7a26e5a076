"""What every `ShardFormat` must do that can be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import ByteRange
from shardfs.model.shard_format import Put, ShardChange
from shardfs.model.values import Coords
from shardfs.model.write_plan import bytes_of
from shardfs.shards.index_reader import ShardIndexReader
from tests.suites.shard_format import MemoryBlob, Sample, read_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

Chunks = dict[Coords, bytes]


def written(
    sample: Sample,
    old: bytes | None,
    puts: Mapping[Coords, bytes],
    drops: Set[Coords] = frozenset(),
    *,
    pack: bool = False,
) -> bytes | None:
    """The new shard object, put together."""
    fmt = sample.format
    shard = fmt.place(next(iter((*puts, *drops))))[0]
    blob = None if old is None else MemoryBlob(old)
    index = None if blob is None else ShardIndexReader(fmt, shard, blob)
    placed = {fmt.place(cell)[1:]: Put(data) for cell, data in puts.items()}
    dropped = {fmt.place(cell)[1:] for cell in drops}
    plan = fmt.rewrite(shard, index, ShardChange(placed, dropped, pack=pack))
    return None if plan is None else bytes_of(plan, blob)


def chunks_in(sample: Sample, shard: bytes, cells: Set[Coords]) -> Chunks:
    """What a reader finds."""
    extents = {cell: extent_of(sample, shard, cell) for cell in cells}
    return {cell: shard[e[0] : sum(e)] for cell, e in extents.items() if e is not None}


def extent_of(sample: Sample, shard: bytes, cell: Coords) -> tuple[int, int] | None:
    index = read_index(sample, cell, shard)
    return None if index is None else index.find(sample.format.place(cell)[2])


@st.composite
def _changes(draw: st.DrawFn, sample: Sample) -> list[tuple[Chunks, set[Coords]]]:
    """Chunks of one shard, written and dropped in some steps."""
    cells = draw(st.lists(sample.cells, min_size=1, max_size=12, unique=True))
    near = [cell for cell in cells if sample.home(cell) == sample.home(cells[0])]
    chosen = st.sets(st.sampled_from(near))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        puts = {cell: draw(st.binary(max_size=9)) for cell in sorted(draw(chosen))}
        steps.append((puts, draw(chosen) - puts.keys()))
    return [(puts, drops) for puts, drops in steps if puts or drops]


class RewriteSuite:
    """Subclass it with a strategy for `Sample`s."""

    def samples(self) -> st.SearchStrategy[Sample]:
        raise NotImplementedError

    @given(st.data())
    def test_a_shard_holds_what_was_written_last(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        wanted: Chunks = {}
        shard: bytes | None = None
        for puts, drops in data.draw(_changes(sample)):
            before = shard
            shard = written(sample, before, puts, drops, pack=data.draw(st.booleans()))
            wanted = {cell: chunk for cell, chunk in {**wanted, **puts}.items() if cell not in drops}
            assert (shard is None) == (not wanted)
            if shard is not None:
                assert chunks_in(sample, shard, {*puts, *drops, *wanted}) == wanted

    @given(st.data())
    def test_what_was_in_a_shard_stays_where_it_was(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        shard: bytes | None = None
        chunk_at: dict[tuple[int, int], bytes] = {}
        for puts, drops in data.draw(_changes(sample)):
            shard = written(sample, shard, puts, drops)
            if shard is None:
                chunk_at = {}
                continue
            for (start, size), chunk in chunk_at.items():
                assert shard[start : start + size] == chunk
            for cell in puts:
                extent = extent_of(sample, shard, cell)
                assert extent is not None
                chunk_at[extent] = puts[cell]

    @given(st.data())
    def test_a_packed_shard_has_the_same_chunks_and_nothing_dead(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        wanted: Chunks = {}
        content: bytes | None = None
        for puts, drops in data.draw(_changes(sample)):
            content = written(sample, content, puts, drops)
            wanted = {cell: chunk for cell, chunk in {**wanted, **puts}.items() if cell not in drops}
        if content is None:
            return
        shard, blob = sample.format.place(next(iter(wanted)))[0], MemoryBlob(content)
        index = ShardIndexReader(sample.format, shard, blob)
        before = sample.format.usage(index)
        assert (before.size, before.live) == (len(content), sum(map(len, wanted.values())))
        assert before.size == before.index + before.live + before.dead
        plan = sample.format.rewrite(shard, index, ShardChange(pack=True, strict=True))
        assert plan is not None
        packed = bytes_of(plan, blob)
        assert chunks_in(sample, packed, set(wanted)) == wanted
        index = ShardIndexReader(sample.format, shard, MemoryBlob(packed))
        after = sample.format.usage(index)
        assert (after.size, after.live, after.dead) == (len(packed), before.live, 0)
        again = sample.format.rewrite(shard, index, ShardChange(pack=True, strict=True))
        assert again is not None
        assert bytes_of(again, MemoryBlob(packed)) == packed

    @given(st.data())
    def test_no_chunk_of_a_damaged_shard_is_lost_or_made_up(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        (chunks, _), *_ = [*data.draw(_changes(sample).filter(lambda steps: bool(steps) and bool(steps[0][0])))]
        shard = bytearray(written(sample, None, chunks) or b"")
        for _ in range(data.draw(st.integers(0, 4))):
            shard[data.draw(st.integers(0, len(shard) - 1))] = data.draw(st.integers(0, 255))
        del shard[data.draw(st.just(len(shard)) | st.integers(0, len(shard))) :]
        changed = data.draw(st.sampled_from(sorted(chunks)))
        before = {cell: _read(sample, bytes(shard), cell) for cell in chunks if cell != changed}
        try:
            new = written(sample, bytes(shard), {changed: b"new chunk"}, pack=data.draw(st.booleans()))
        except ValueError:
            return
        assert new is not None
        assert _read(sample, new, changed) == b"new chunk"
        for cell, chunk in before.items():
            assert _read(sample, new, cell) == chunk

    @given(st.data())
    def test_pieces_of_the_old_object_lie_in_it(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        (chunks, _), *_ = [*data.draw(_changes(sample).filter(lambda steps: bool(steps) and bool(steps[0][0])))]
        content = written(sample, None, chunks) or b""
        fmt, cell = sample.format, next(iter(chunks))
        shard, *slot = fmt.place(cell)
        index = ShardIndexReader(fmt, shard, MemoryBlob(content))
        plan = fmt.rewrite(shard, index, ShardChange({(slot[0], slot[1]): Put(b"x")}))
        assert plan is not None
        for piece in plan:
            assert not isinstance(piece, ByteRange) or 0 <= piece.start < piece.stop <= len(content)


def _read(sample: Sample, shard: bytes, cell: Coords) -> bytes | str | None:
    try:
        extent = extent_of(sample, shard, cell)
    except ValueError:
        return "broken"
    return None if extent is None else shard[extent[0] : sum(extent)]
