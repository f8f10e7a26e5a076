"""Which chunks are predicted: loops in any order of axes, disorder, several readers; nothing for random access."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.shards.read_patterns import GROWTH, Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardfs.model.values import Coords

DIMS = (8, 16, 16)
WHOLE = list(itertools.product(*map(range, DIMS)))
ROOM = 64


class Prediction(NamedTuple):
    """The share of accesses that were predicted, and the number of chunks that were predicted in vain."""

    hits: float
    waste: int


def follow(accesses: Sequence[Coords], dims: Coords = DIMS, room: int = ROOM) -> Prediction:
    streams, ahead, past, hits = Streams(dims), set[tuple[int, ...]](), set[tuple[int, ...]](), 0
    for coords in accesses:
        hits += coords in ahead or coords in past
        past.add(coords)
        coming = streams.access(coords, room)
        assert len(coming) <= room
        assert all(0 <= c < d for chunk in coming for c, d in zip(chunk, dims, strict=True))
        ahead.update(coming)
    return Prediction(hits / len(accesses), len(ahead - past))


def disordered(accesses: Iterable[Coords], under_way: int) -> list[Coords]:
    """As `under_way` readers that share the work ask for it."""
    out: list[Coords] = []
    pending: list[Coords] = []
    chance = random.Random(1)
    for coords in accesses:
        pending.append(coords)
        if len(pending) == under_way:
            out.append(pending.pop(chance.randrange(under_way)))
    chance.shuffle(pending)
    return out + pending


def box(*ranges: tuple[int, int]) -> list[Coords]:
    return list(itertools.product(*[range(*r) for r in ranges]))


@pytest.mark.parametrize(("under_way", "hits"), [(1, 0.99), (4, 0.98), (16, 0.95), (64, 0.9)])
def test_a_whole_array_is_predicted_and_nothing_beyond_it(under_way: int, hits: float) -> None:
    prediction = follow(disordered(WHOLE, under_way))
    assert prediction.hits > hits
    assert prediction.waste == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("backwards", [False, True])
def test_loops_run_along_the_axes_in_any_order_and_direction(order: tuple[int, ...], backwards: bool) -> None:
    accesses = sorted(WHOLE, key=lambda c: tuple(c[axis] for axis in order), reverse=backwards)
    prediction = follow(accesses)
    assert prediction.hits > 0.98
    assert prediction.waste == 0


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("under_way", [1, 4])
def test_a_plane_costs_nothing_beyond_it(axis: int, under_way: int) -> None:
    prediction = follow(disordered([c for c in WHOLE if c[axis] == 3], under_way))
    assert prediction.hits > 0.85
    assert prediction.waste == 0


@pytest.mark.parametrize(("end", "whole"), [(16, True), (15, False)])
def test_a_reader_that_crosses_the_array_from_edge_to_edge_gets_far_ahead(end: int, whole: bool) -> None:
    plane = box((3, 4), (0, 16), (0, end))
    streams = Streams(DIMS)
    ahead = [streams.access(coords, 1000) for coords in plane[:64]]
    assert all(len(coming) <= count for count, coming in enumerate(ahead, 1)) is not whole
    assert (sum(map(len, ahead)) >= 180) is whole


def test_a_run_is_recognised_by_the_chunk_that_fills_its_gap() -> None:
    streams = Streams((64,))
    assert [streams.access((i,), 4) for i in (0, 2, 4, 1, 3)][-1] == [(5,), (6,), (7,), (8,)]
    streams = Streams((64,))
    assert [streams.access((i,), 2) for i in (9, 8, 7, 6)][-1] == [(5,), (4,)]


def test_a_pencil_costs_nothing_beyond_it() -> None:
    assert follow([(z, 4, 5) for z in range(8)]) == Prediction(4 / 8, 0)


def pencils(chance: random.Random) -> list[Coords]:
    lines = chance.sample(box((0, DIMS[0]), (0, DIMS[1])), 16)
    return [(*line, x) for line in lines for x in range(DIMS[2])]


def random_walk(chance: random.Random) -> list[Coords]:
    cell, walk = [d // 2 for d in DIMS], []
    for _ in range(256):
        axis = chance.randrange(len(DIMS))
        cell[axis] = min(max(cell[axis] + chance.choice((-1, 1)), 0), DIMS[axis] - 1)
        walk.append(tuple(cell))
    return walk


@pytest.mark.parametrize("accesses_of", [pencils, random_walk])
def test_pencils_and_random_walks_fetch_little_in_vain(accesses_of: Callable[[random.Random], list[Coords]]) -> None:
    runs = [accesses_of(random.Random(seed)) for seed in range(10)]
    wasted = sum(follow(accesses, room=1000).waste for accesses in runs)
    assert wasted <= 0.35 * sum(len(set(accesses)) for accesses in runs)


def test_chunks_that_do_not_exist_cost_no_trust() -> None:
    chance, dims = random.Random(1), (32, 32, 32)
    accesses = [c for c in itertools.product(*map(range, dims)) if not c[0] or chance.random() < 0.1]
    exists, streams, ahead, hits = set(accesses), Streams(dims), set[tuple[int, ...]](), 0
    for coords in accesses:
        hits += coords in ahead
        coming = streams.access(coords, ROOM)
        ahead.update(coming)
        for c in coming:
            if c not in exists:
                streams.give_up(c)
    assert hits / len(accesses) > 0.9


def test_a_walk_that_was_predicted_in_vain_does_not_slow_what_comes_later() -> None:
    for begin in (0, 1):
        accesses = [*random_walk(random.Random(begin)), *WHOLE]
        assert follow(accesses, room=1000).hits > 0.85


@pytest.mark.parametrize("under_way", [1, 4])
def test_a_block_wastes_less_than_it_has(under_way: int) -> None:
    prediction = follow(disordered(box((2, 6), (4, 8), (4, 8)), under_way))
    assert prediction.hits > 0.7
    assert prediction.waste < 64


def test_a_sequence_of_blocks_of_chunks_is_predicted() -> None:
    blocks = box((0, 4), (0, 8), (0, 8))
    accesses = [(2 * z + k, 2 * y + j, 2 * x + i) for z, y, x in blocks for k, j, i in box((0, 2), (0, 2), (0, 2))]
    prediction = follow(disordered(accesses, 6))
    assert prediction.hits > 0.8
    assert prediction.waste == 0


@pytest.mark.parametrize(("under_way", "shift"), [(1, 0), (4, 0), (1, 1)])
def test_blocks_at_random_places_are_fetched_as_wholes(under_way: int, shift: int) -> None:
    """From the third on, if they are cells of a grid, and also if they begin anywhere but each with its corner."""
    corners = random.Random(1).sample(box((0, 6), (0, 6), (0, 6)), 32)
    accesses: list[Coords] = []
    for n, (z, y, x) in enumerate(corners):
        z, y, x = 4 * z + shift * (n % 3), 4 * y + shift * (n % 2), 4 * x
        accesses += disordered(box((z, z + 4), (y, y + 4), (x, x + 4)), under_way)
    prediction = follow(accesses, (32, 32, 32), 200)
    assert prediction.hits > 0.85
    assert prediction.waste < 0.3 * len(accesses)


def test_blocks_side_by_side_are_fetched_as_wholes() -> None:
    blocks = box((0, 2), (0, 4), (0, 4))
    accesses = [(4 * z + k, 4 * y + j, 4 * x + i) for z, y, x in blocks for k, j, i in box((0, 4), (0, 4), (0, 4))]
    prediction = follow(accesses, DIMS, 200)
    assert prediction.hits > 0.85
    assert prediction.waste == 0


def test_interleaved_readers_have_a_stream_each() -> None:
    parts = [WHOLE[i * 128 : (i + 1) * 128] for i in range(16)]
    prediction = follow([c for together in zip(*parts, strict=True) for c in together])
    assert prediction.hits > 0.98
    assert prediction.waste == 0


def test_random_access_predicts_next_to_nothing() -> None:
    chance = random.Random(7)
    assert follow([chance.choice(WHOLE) for _ in range(64)]).waste == 0
    assert follow([chance.choice(WHOLE) for _ in range(256)]).waste < 26


def test_parts_of_one_chunk_are_no_stream() -> None:
    assert follow([(0, 0, 0)] * 50).waste == 0


def test_no_room_predicts_nothing_and_catches_up_later() -> None:
    streams = Streams((64,))
    for i in range(8):
        assert streams.access((i,), 0) == []
    assert streams.access((8,), 4) == [(9,), (10,), (11,), (12,)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), max_size=200), st.integers(0, 40))
def test_any_order_of_accesses_stays_in_the_grid_and_in_its_bounds(accesses: list[Coords], room: int) -> None:
    dims = (4, 6, 5)
    streams, ahead = Streams(dims), list[tuple[int, ...]]()
    for count, coords in enumerate(accesses, 1):
        coming = streams.access(coords, room)
        assert len(coming) <= min(room, count * GROWTH ** (len(dims) - 1))
        ahead += coming
    assert all(0 <= c < d for chunk in ahead for c, d in zip(chunk, dims, strict=True))
