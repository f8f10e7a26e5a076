"""What every `ShardFormat` must do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import ByteRange, ByteRequest, Stat, Suffix, absolute
from shardfs.model.values import Coords

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.shard_format import Index, ShardFormat

Extents = Mapping[Coords, tuple[int, int]]


@dataclass(frozen=True)
class Sample:
    """A format beside an independent idea of it.

    `shard` makes the whole shard object in which chunks lie at the extents given, all of them of one shard;
    `home` says in which shard object, by key, a chunk lies. `extents` are given where chunks cannot lie anywhere.
    """

    format: ShardFormat
    cells: st.SearchStrategy[Coords]
    home: Callable[[Coords], str]
    shard: Callable[[Extents], bytes]
    extents: st.SearchStrategy[Extents] | None = None


class MemoryBlob:
    """A `model.Blob` of bytes; `reads` are the requests of each read."""

    fd, file_offset = -1, 0

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads: list[list[ByteRange]] = []

    def stat(self) -> Stat:
        return Stat(len(self._data), 0, None)

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        where = [absolute(r, len(self._data)) for r in requests]
        self.reads.append(where)
        return [self._data[r.start : r.stop] for r in where]


def read_index(sample: Sample, coords: Coords, content: bytes) -> Index | None:
    """The index page in which a chunk of a shard object stands, as a reader would fetch it."""
    fmt = sample.format
    shard, page, _ = fmt.place(coords)
    if fmt.walk is not None:
        return fmt.walk(MemoryBlob(content)).checked(len(content))
    where = fmt.root_request()
    root = None if where is None else content[where.start : where.stop]
    request = fmt.page_request(shard, page, root)
    if request is None:
        return None
    raw = content[-request.size :] if isinstance(request, Suffix) else content[request.start : request.stop]
    return fmt.decode_page(shard, page, raw).checked(len(content))


class ShardFormatSuite:
    """Subclass it with a strategy for `Sample`s."""

    def samples(self) -> st.SearchStrategy[Sample]:
        raise NotImplementedError

    @given(st.data())
    def test_coords_is_the_inverse_of_place(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        cell = data.draw(sample.cells)
        shard, page, slot = sample.format.place(cell)
        cells, valid = sample.format.coords(shard, page, np.array([slot], np.uint64))
        assert valid.tolist() == [True]
        assert tuple(cells[0].tolist()) == cell

    @given(st.data())
    def test_place_many_is_place(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        cells = data.draw(st.lists(sample.cells, max_size=20))
        many = sample.format.place_many(np.array(cells, np.uint64).reshape(len(cells), len(sample.format.grid)))
        one_by_one = [sample.format.place(cell) for cell in cells]
        assert list(zip(many.shard.tolist(), many.page.tolist(), many.slot.tolist(), strict=True)) == one_by_one

    @given(st.data())
    def test_the_place_in_a_row_is_place(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        cell = data.draw(sample.cells)
        if cell:
            assert sample.format.row(cell[:-1])(cell[-1]) == sample.format.place(cell)

    @given(st.data())
    def test_a_chunk_lies_in_the_shard_object_that_the_specification_says(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        cell = data.draw(sample.cells)
        assert sample.format.key(sample.format.place(cell)[0]) == sample.home(cell)

    @given(st.data())
    def test_shard_of_is_the_inverse_of_key(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        shard = sample.format.place(data.draw(sample.cells))[0]
        key = sample.format.key(shard)
        assert sample.format.shard_of(key) == shard
        for other in (f"0{key}", f"{key}0", f"{key}/", key.upper() + "x", f" {key}", ""):
            assert (
                sample.format.shard_of(other) in (None, shard)
                or sample.format.key(sample.format.shard_of(other) or 0) == other
            )

    @given(st.data())
    def test_an_index_says_what_was_put_into_the_shard(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        extents = data.draw(extents_of(sample))
        content = sample.shard(extents)
        for cell, extent in extents.items():
            index = read_index(sample, cell, content)
            assert index is not None
            slot = sample.format.place(cell)[2]
            assert index.find(slot) == extent
            arrays = index.arrays()
            assert arrays.extent_at(arrays.position(slot)) == extent
            assert arrays.positions(np.array([slot], np.uint64)).tolist() == [arrays.position(slot)]

    @given(st.data())
    def test_what_was_not_put_into_the_shard_is_absent(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        extents = data.draw(extents_of(sample))
        other = data.draw(sample.cells)
        if other in extents or not extents or sample.home(other) != sample.home(next(iter(extents))):
            return
        index = read_index(sample, other, sample.shard(extents))
        if index is not None:
            assert index.find(sample.format.place(other)[2]) is None
            assert index.arrays().position(sample.format.place(other)[2]) == -1

    @given(st.data())
    def test_listing_the_pages_of_a_shard_gives_its_chunks(self, data: st.DataObject) -> None:
        sample, fmt = (drawn := data.draw(self.samples())), drawn.format
        extents = data.draw(extents_of(sample))
        if not extents:
            return
        content, shard = sample.shard(extents), fmt.place(next(iter(extents)))[0]
        where = fmt.root_request()
        pages = fmt.nonempty_pages(None if where is None else content[where.start : where.stop])
        cells = []
        for page in pages.tolist():
            if fmt.walk is not None:
                coords, valid = fmt.coords(shard, page, fmt.walk(MemoryBlob(content)).all_slots())
                cells += [tuple(c) for c, ok in zip(coords.tolist(), valid.tolist(), strict=True) if ok]
                continue
            request = fmt.page_request(shard, page, None if where is None else content[where.start : where.stop])
            if request is None:
                continue
            raw = content[-request.size :] if isinstance(request, Suffix) else content[request.start : request.stop]
            coords, valid = fmt.coords(shard, page, fmt.decode_page(shard, page, raw).arrays().all_slots())
            cells += [tuple(c) for c, ok in zip(coords.tolist(), valid.tolist(), strict=True) if ok]
        assert sorted(cells) == sorted(extents)

    @given(st.data())
    def test_any_bytes_for_an_index_give_an_index_or_a_reason(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        cell = data.draw(sample.cells)
        content = data.draw(st.binary(max_size=400))
        try:
            index = read_index(sample, cell, content)
        except ValueError:
            return
        if index is None:
            return
        arrays = index.arrays()
        for slot in arrays.all_slots().tolist():
            with suppress(ValueError):
                start, size = arrays.extent_at(arrays.position(slot))
                assert 0 <= start <= start + size <= len(content)
                assert index.find(slot) == (start, size)

    @given(st.data())
    def test_a_cut_or_changed_shard_never_shows_bytes_outside_of_it(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        extents = data.draw(extents_of(sample))
        content = bytearray(sample.shard(extents))
        cell = data.draw(st.sampled_from(sorted(extents)) if extents else sample.cells)
        for _ in range(data.draw(st.integers(0, 4))):
            if content:
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        del content[data.draw(st.integers(0, len(content))) :]
        try:
            index = read_index(sample, cell, bytes(content))
            start, size = (index and index.find(sample.format.place(cell)[2])) or (0, 0)
        except ValueError:
            return
        assert start + size <= len(content)

    @given(st.data())
    def test_a_request_stays_below_the_limit_and_is_not_negative(self, data: st.DataObject) -> None:
        sample = data.draw(self.samples())
        shard, page, _ = sample.format.place(data.draw(sample.cells))
        where = sample.format.root_request()
        root = None if where is None else data.draw(_bytes_of(where.stop - where.start))
        try:
            request = sample.format.page_request(shard, page, root)
        except ValueError:
            return
        size = 0 if request is None else request.size if isinstance(request, Suffix) else request.stop - request.start
        assert 0 <= size <= 33 << 20
        assert not isinstance(request, ByteRange) or request.start >= 0


def _bytes_of(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=16, max_size=16).map(lambda entry: (entry * (size // 16 + 1))[:size])


def extents_of(sample: Sample) -> st.SearchStrategy[Extents]:
    """Chunks of one shard, without overlap; where they can, their bytes are the first of it (see `Sample.shard`)."""
    if sample.extents is not None:
        return sample.extents

    def of_one_shard(drawn: list[tuple[Coords, int]]) -> Extents:
        extents, position = {}, 0
        for cell, size in drawn:
            if cell in extents or sample.home(cell) != sample.home(drawn[0][0]):
                continue
            extents[cell] = (position, size)
            position += size
        return extents

    return st.lists(st.tuples(sample.cells, st.integers(0, 9)), max_size=12).map(of_one_shard)


__all__ = ["MemoryBlob", "Sample", "ShardFormatSuite", "extents_of"]
