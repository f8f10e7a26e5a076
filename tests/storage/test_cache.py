"""The cache loads a key once, stays within its bound, and keeps no errors."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.storage.cache import OVERHEAD, ByteLRU
from tests.scheduling import explore
from tests.virtual_threads import install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.scheduling import Schedule


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what nobody holds any more is freed, without a look for what holds each other."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_what_failed_is_let_go_at_once() -> None:
    """A shard of 100 MB that cannot be decoded is tried again: there must not be two of it."""
    references: list[ref[set[int]]] = []

    def load() -> tuple[str, int, float]:
        large = {1}
        references.append(ref(large))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - it has no message
        ByteLRU(10_000).get("k", load)
    assert references[0]() is None


def test_a_key_is_loaded_once_however_many_threads_ask() -> None:
    lru, loads, waited = ByteLRU(10_000), [], []
    lru = ByteLRU(10_000, lambda: waited.append(1))
    start = threading.Event()

    def load() -> tuple[str, int, float]:
        loads.append(1)
        start.wait(60)
        return "value", 5, math.inf

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(lru.get, "k", load) for _ in range(8)]
        while len(waited) < 7:
            time.sleep(0.001)
        start.set()
        assert [a.result() for a in futures] == ["value"] * 8
    assert len(loads) == 1
    assert lru.get("k", load) == "value"
    assert len(loads) == 1


def test_threads_that_come_just_when_a_load_ends_do_not_load_again(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    def scenario(schedule: Schedule) -> None:
        lru, loads = ByteLRU(1 << 20), list[int]()

        def load() -> tuple[str, int, float]:
            loads.append(1)
            return "value", 1, math.inf

        def ask() -> None:
            assert lru.get("key", load) == "value"

        schedule.together(ask, ask, ask)
        assert loads == [1]
        assert lru._flights == {}

    assert explore(scenario, preemptions=1, steps=("storage/cache",)) > 300


def test_an_error_reaches_all_who_wait_and_is_not_kept() -> None:
    waited: list[int] = []
    lru = ByteLRU(10_000, lambda: waited.append(1))
    go = threading.Event()

    def fail() -> tuple[str, int, float]:
        go.wait(60)
        raise OSError("no")

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(lru.get, "k", fail) for _ in range(4)]
        while len(waited) < 3:
            time.sleep(0.001)
        go.set()
        assert [str(a.exception()) for a in futures] == ["no"] * 4
    assert lru.get("k", lambda: ("good", 1, math.inf)) == "good"


def test_a_load_that_is_given_up_is_done_by_a_thread_that_waits_for_it() -> None:
    """The thread that gives up a load answers later. Other threads, such as those that publish, must not fail."""

    class GivenUp(BaseException):
        pass

    waits, gives_up = threading.Event(), threading.Event()
    lru = ByteLRU(10_000, waits.set)

    def give_up() -> tuple[str, int, float]:
        assert gives_up.wait(60)
        raise GivenUp

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lru.get, "k", give_up)
        while "k" not in lru._flights:
            time.sleep(0.001)
        second = pool.submit(lru.get, "k", lambda: ("good", 1, math.inf))
        assert waits.wait(60)
        gives_up.set()
        assert second.result(60) == "good"
        assert isinstance(first.exception(60), GivenUp)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 900), st.booleans()), max_size=40))
def test_the_bound_holds_and_the_count_is_true(script: list[tuple[int, int, bool]]) -> None:
    limit = 2000
    lru = ByteLRU(limit)
    order: list[int] = []
    sizes: dict[int, int] = {}
    for key, size, drop in script:
        if drop:
            lru.invalidate(key)
            order = [k for k in order if k != key]
            continue
        assert lru.get(key, lambda key=key, size=size: ((key, size), size, math.inf))[0] == key  # type: ignore[misc]
        if key in order:
            order.remove(key)
        else:
            sizes[key] = size + OVERHEAD
        order.append(key)
        while sum(sizes[k] for k in order) > limit:
            order.pop(0)
        assert [k for k in range(7) if lru.peek(k) is not None] == sorted(order)
        order = [*(k for k in order if k not in range(7)), *sorted(order)]  # `peek` used them in this order
        assert lru.nbytes == sum(sizes[k] for k in order) <= limit


def test_of_values_larger_than_the_cache_the_last_one_is_kept() -> None:
    lru = ByteLRU(1000)
    assert lru.get("small", lambda: (1, 10, math.inf)) == 1
    assert lru.get("big", lambda: (2, 5000, math.inf)) == 2
    assert (lru.peek("small"), lru.peek("big"), lru.nbytes) == (1, 2, 10 + OVERHEAD)
    assert lru.get("bigger", lambda: (3, 6000, math.inf)) == 3
    assert (lru.peek("small"), lru.peek("big"), lru.peek("bigger")) == (1, None, 3)
    lru.expire("bigger")
    assert (lru.peek("bigger"), lru.former("bigger")) == (None, 3)
    assert lru.get("bigger", lambda: (4, 6000, math.inf)) == 4
    lru.invalidate("bigger")
    assert (lru.peek("small"), lru.former("bigger")) == (1, None)


def test_values_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lru = ByteLRU(10_000)
    assert lru.get("k", lambda: ("old", 1, 5.0)) == "old"
    now[0] = 104.9
    assert lru.get("k", lambda: ("new", 1, 5.0)) == "old"
    now[0] = 105.1
    assert lru.peek("k") is None
    assert lru.get("k", lambda: ("new", 1, 5.0)) == "new"
    assert lru.nbytes == 1 + OVERHEAD


def test_what_is_dropped_while_it_is_loaded_is_not_kept() -> None:
    lru, start, go = ByteLRU(10_000), threading.Event(), threading.Event()

    def old() -> tuple[str, int, float]:
        start.set()
        go.wait(60)
        return "old", 1, math.inf

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lru.get, "k", old)
        start.wait(60)
        lru.invalidate("k")
        assert lru.get("k", lambda: ("new", 1, math.inf)) == "new"
        go.set()
        assert slow.result() == "old"
    assert lru.peek("k") == "new"


def test_many_threads_on_a_small_cache() -> None:
    lru, interval = ByteLRU(20 * (OVERHEAD + 10)), sys.getswitchinterval()

    def work(seed: int) -> None:
        for i in range(2000):
            key = (seed * 31 + i * 7) % 60
            assert lru.get(key, lambda key=key: (key + 1, 10, math.inf)) == key + 1  # type: ignore[misc]
            if i % 50 == 0:
                lru.invalidate(key)

    sys.setswitchinterval(1e-6)  # so that a thread is interrupted anywhere
    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, n) for n in range(4)]:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    assert 0 <= lru.nbytes <= lru.limit


def test_of_spent_values_few_are_kept_and_others_stay() -> None:
    lru = ByteLRU(1 << 20, spent=3 * (100 + OVERHEAD))
    for key in range(10):
        lru.get(key, lambda: ("value", 100, math.inf))
    for key in (5, 5, 1, 2, 3, 4):
        lru.mark_read(key)
    assert [key for key in range(10) if lru.peek(key) is None] == [1, 5]
    assert lru.nbytes == 8 * (100 + OVERHEAD)
    lru.invalidate(3)
    lru.mark_read(3)
    lru.mark_read(6)
    assert lru.peek(2) == "value"
    lru.mark_read(7)
    assert lru.peek(2) is None


def test_two_spent_values_are_kept_however_large() -> None:
    lru = ByteLRU(1 << 20, spent=0)
    for key in range(3):
        lru.get(key, lambda: ("value", 100_000, math.inf))
        lru.mark_read(key)
    assert [lru.peek(key) for key in range(3)] == [None, "value", "value"]


def test_nothing_is_spent_unless_it_is_said_how_much_is_kept() -> None:
    lru = ByteLRU(1 << 20)
    for key in range(10):
        lru.get(key, lambda: ("value", 100, math.inf))
        lru.mark_read(key)
    assert all(lru.peek(key) for key in range(10))
