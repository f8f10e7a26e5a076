"""Loading the next items of a sequence: order, errors, bounds."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import TYPE_CHECKING

import pytest

from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.read_ahead import ReadAhead
from shardfs.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator


def pool(connections: int = 8) -> ReadAhead:
    return ReadAhead(1 << 20, connections, RetryPolicy())


class Loads:
    """A load that notes the items, and how many loads ran at the same time."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, item: int) -> int:
        with self._lock:
            self.items.append(item)
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.002)
        with self._lock:
            self.running -= 1
        return item * item


@pytest.mark.parametrize("shared", [None, pool()])
def test_items_and_results_come_in_order(shared: ReadAhead | None) -> None:
    loads = Loads()
    assert list(load_ahead(shared, loads, range(100))) == [(i, i * i) for i in range(100)]
    assert sorted(loads.items) == list(range(100))
    assert loads.most <= (9 if shared else 1)


def test_loads_run_at_the_same_time() -> None:
    together = threading.Barrier(4)
    pairs = list(load_ahead(pool(), lambda _: together.wait(60), range(4), first=5))
    assert sorted(place for _, place in pairs) == list(range(4))


def test_nothing_is_loaded_that_the_consumer_did_not_come_near() -> None:
    loads = Loads()
    items = load_ahead(pool(), loads, count())
    assert [next(items) for _ in range(3)] == [(0, 0), (1, 1), (2, 4)]
    items.close()  # type: ignore[attr-defined]
    assert max(loads.items) <= 8


def test_heavy_results_are_loaded_one_by_one() -> None:
    loads = Loads()
    list(load_ahead(pool(), loads, range(1, 30), weigh=lambda _: 100, room=150))
    assert loads.most <= 2


def collect(pairs: Iterator[tuple[int, int]], loads: list[int]) -> None:
    loads.extend(item for item, _ in pairs)


def test_errors_are_raised_at_their_place() -> None:
    def load(item: int) -> int:
        if item == 5:
            raise OSError("five")
        return item

    loads: list[int] = []
    with pytest.raises(OSError, match="five"):
        collect(load_ahead(pool(), load, range(10), first=8), loads)
    assert loads == list(range(5))


def test_an_error_of_the_items_comes_after_the_items_before() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no more")

    loads: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        collect(load_ahead(pool(), Loads(), items(), first=8), loads)
    assert loads == list(range(5))


def test_loads_do_not_wait_for_busy_threads() -> None:
    shared, release, running = pool(2), threading.Event(), threading.Semaphore(0)

    def occupy() -> None:
        running.release()
        release.wait(30)

    for _ in range(2):
        shared.start(occupy)
    assert all(running.acquire(timeout=60) for _ in range(2))
    try:
        assert [item for item, _ in load_ahead(shared, Loads(), range(20))] == list(range(20))
    finally:
        release.set()
