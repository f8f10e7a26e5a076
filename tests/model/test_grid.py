"""Grid arithmetic against the specification's examples and its own inverses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model import grid
from shardfs.model.grid import BoxNames, FlatNames, HeadedNames, MortonCode, NestedNames
from tests import handmade
from tests.strategies import cells, grids

if TYPE_CHECKING:
    from shardfs.model.collection import ChunkNames
    from shardfs.model.values import Coords


@pytest.mark.parametrize(
    ("dims", "cell", "code"),
    [
        ((5, 1, 3), (4, 0, 2), 24),
        ((5, 1, 3), (3, 0, 1), 7),
        ((3, 2, 2), (2, 0, 1), 12),
        ((538, 618, 805), (300, 17, 512), 553689666),
        ((2, 3, 4, 5), (1, 2, 3, 4), 181),
        ((1, 1, 1), (0, 0, 0), 0),
        ((2**64,), (2**64 - 1,), 2**64 - 1),
    ],
)
def test_morton_vectors(dims: Coords, cell: Coords, code: int) -> None:
    assert MortonCode(dims).encode(cell) == code
    assert MortonCode(dims).encode_many(np.array([cell], np.uint64)).tolist() == [code]


@given(st.data())
def test_morton_code_and_its_inverse(data: st.DataObject) -> None:
    dims = data.draw(grids())
    some = data.draw(st.lists(cells(dims), min_size=1, max_size=10))
    code = MortonCode(dims)
    codes = code.encode_many(np.array(some, np.uint64))
    assert codes.tolist() == [code.encode(c) for c in some] == [handmade.morton(c, dims) for c in some]
    back, inside = code.decode_many(codes)
    assert inside.all()
    assert [tuple(c) for c in back.tolist()] == some


@given(grids(), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=10))
def test_a_code_is_inside_only_if_a_cell_has_it(dims: Coords, codes: list[int]) -> None:
    cells, inside = MortonCode(dims).decode_many(np.array(codes, np.uint64))
    for number, cell, ok in zip(codes, cells.tolist(), inside.tolist(), strict=True):
        within = all(c < n for c, n in zip(cell, dims, strict=True))
        assert ok == (within and handmade.morton(cell, dims) == number)


def test_a_code_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="65 bits"):
        MortonCode((2**40, 2**25))


@given(st.lists(st.integers(1, 2**21), max_size=3), st.data())
def test_ravel_and_unravel(dims: list[int], data: st.DataObject) -> None:
    some = data.draw(st.lists(cells(dims), min_size=1, max_size=5))
    numbers = [grid.ravel(c, dims) for c in some]
    table = np.array(some, np.uint64).reshape(len(some), len(dims))
    assert grid.ravel_many(table, dims).tolist() == numbers
    assert [grid.unravel(n, dims) for n in numbers] == some
    assert grid.unravel_many(np.array(numbers, np.uint64), dims).tolist() == table.tolist()
    assert numbers == [sum(c * s for c, s in zip(cell, grid.strides(dims), strict=True)) for cell in some]


def test_an_axis_of_length_zero_has_a_first_cell_all_the_same() -> None:
    assert grid.unravel(0, (0, 4)) == (0, 0)


NUMBERS = ["00", "01", "+1", "-1", " 1", "1 ", "1_0", "\u0661", "1.0", "", "x", "0x1", "9" * 19, "9" * 40, "1\n", "²"]


@pytest.mark.parametrize("text", NUMBERS)
def test_only_canonical_numbers_are_names(text: str) -> None:
    name = text.encode()
    assert NestedNames((10, 10)).parse(0, name) is None
    assert NestedNames((10, 10), b"c").parse(1, name) is None
    assert HeadedNames((10, 10), b"c").parse(0, b"c" + name) is None
    assert HeadedNames((10, 10), b"c").parse(1, name) is None
    assert FlatNames((10, 10), b"c.", b".", b"c").parse(0, b"c.0." + name) is None
    assert FlatNames((10, 10), b"", b".", b"0").parse(0, name + b".3") is None
    box = BoxNames((10, 10, 10), (1, 1, 1), (0, 0, 0))
    assert box.parse(0, b"0-1_0-1_" + name + b"-1") is None
    assert box.parse(0, b"0-1_0-1_0-" + (name if name != b"1" else b"x")) is None


def _chunk_names() -> st.SearchStrategy[ChunkNames]:
    dims = st.lists(st.integers(1, 2**15), min_size=1, max_size=4).map(tuple)
    return st.one_of(
        st.builds(NestedNames, dims, st.sampled_from((b"c", b""))),
        st.builds(HeadedNames, dims, st.just(b"c")),
        st.builds(FlatNames, dims | st.just(()), st.just(b"c."), st.just(b"."), st.just(b"c")),
        st.builds(FlatNames, dims | st.just(()), st.just(b""), st.just(b"."), st.just(b"0")),
        boxes(),
    )


@st.composite
def boxes(draw: st.DrawFn) -> BoxNames:
    chunk = tuple(draw(st.integers(1, 2**20)) for _ in range(3))
    size = tuple(draw(st.integers(1, 2**20 * c)) for c in chunk)
    offset = tuple(draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)) for _ in range(3))
    return BoxNames(size, chunk, offset)


@given(_chunk_names(), st.data())
def test_parse_is_the_inverse_of_render(names: ChunkNames, data: st.DataObject) -> None:
    for level, n in enumerate(names.dims):
        values = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
        rendered = names.render(level, np.array(values, np.uint64)).tolist()
        assert [names.parse(level, name) for name in rendered] == values
        assert all(names.reserved(level, name) for name in rendered)
        assert names.render(level, np.empty(0, np.uint64)).tolist() == []
    one = tuple(data.draw(st.integers(0, n - 1)) for n in names.dims)
    coords = names.coords(one)
    assert names.values(np.array([coords], np.uint64).reshape(1, -1)).tolist() == [list(one)]


def test_only_the_first_component_has_the_head() -> None:
    names = HeadedNames((10, 10), b"c")
    assert [names.parse(0, name) for name in (b"c3", b"3", b"cc3", b"c10", b"C3")] == [3, None, None, None, None]
    assert [names.parse(1, name) for name in (b"3", b"c3")] == [3, None]
    assert [names.reserved(0, name) for name in (b"c10", b"10", b"c", b"cx")] == [True, False, False, False]


@given(_chunk_names(), st.binary(max_size=12) | st.from_regex(rb"\A-?[0-9]{1,3}([-_.]-?[0-9]{1,3}){0,5}\Z"))
def test_a_name_that_parses_is_printed_alike(names: ChunkNames, name: bytes) -> None:
    for level in range(len(names.dims)):
        value = names.parse(level, name)
        if value is not None:
            assert 0 <= value < names.dims[level]
            assert names.render(level, np.array([value], np.uint64)).tolist() == [name]


def test_box_names_are_clipped_and_may_be_negative() -> None:
    names = BoxNames((10, 7, 5), (4, 4, 4), (-3, 100, 7))
    assert names.dims == (3 * 2 * 2,)
    assert names.render(0, np.array([0, 11], np.uint64)).tolist() == [b"-3-1_100-104_7-11", b"5-7_104-107_11-12"]
    assert names.parse(0, b"-3-1_100-104_7-11") == 0
    for wrong in (
        b"-3-1_100-104_7-12",
        b"-3-01_100-104_7-11",
        b"--3-1_100-104_7-11",
        b"-2-2_100-104_7-11",
        b"-3-1_100-104_7-11_0-1",
        b"-3-1_100-104_7-11 ",
        b"-3--1_100-104_7-11",
        b"5-9_104-108_11-15",
        b"-0-4_100-104_7-11",
        b"1-5_100-104",
        b"_-_-_",
        b"---_---_---",
    ):
        assert names.parse(0, wrong) is None
    assert names.shape((2, 1, 1)) == (2, 3, 1)


@given(boxes(), st.data())
def test_voxels_of_a_box(names: BoxNames, data: st.DataObject) -> None:
    some = data.draw(st.lists(cells(names.grid), min_size=1, max_size=5))
    assert names.voxels_many(np.array(some, np.uint64)).tolist() == [math.prod(names.shape(c)) for c in some]


def test_a_volume_of_no_size_has_no_names() -> None:
    names = BoxNames((0, 4, 4), (4, 4, 4), (0, 0, 0))
    assert names.dims == (0,)
    assert names.parse(0, b"0-0_0-4_0-4") is None
