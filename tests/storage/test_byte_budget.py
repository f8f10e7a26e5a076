"""Threads share bytes: never more than the limit, first come, first served."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from shardfs.storage.byte_budget import ByteBudget
from shardfs.storage.cache import nothing
from tests.scheduling import bool_true, explore
from tests.virtual_threads import install, wait
from tests.waiting import wait_until
from tests.write.scale import times

if TYPE_CHECKING:
    from tests.scheduling import Schedule


def totals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes that are taken after each time that some are taken."""
    recorded: list[int] = []
    take = ByteBudget._take

    def recording(self: ByteBudget, nbytes: int) -> None:
        take(self, nbytes)
        recorded.append(self.used)

    monkeypatch.setattr(ByteBudget, "_take", recording)
    return recorded


def test_threads_never_take_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all orders of three threads, of which one needs more than the limit."""
    install(monkeypatch)

    def scenario(schedule: Schedule) -> None:
        budget = ByteBudget(100, nothing)

        def work(*sizes: int) -> None:
            for nbytes in sizes:
                with budget.taken(nbytes):
                    wait(bool_true)  # another thread may take some now
                    assert nbytes <= budget.used <= max(budget.limit, nbytes)

        schedule.together(lambda: work(60, 50), lambda: work(50), lambda: work(1000))
        assert budget.used == 0

    assert explore(scenario, preemptions=1 + (times() > 1)) > 60


def test_bytes_that_fit_are_taken_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = totals(monkeypatch)
    budget, barrier = ByteBudget(100, nothing), threading.Barrier(3)

    def take(nbytes: int) -> None:
        with budget.taken(nbytes):
            barrier.wait(60)

    threads = [threading.Thread(target=take, args=(nbytes,)) for nbytes in (50, 30, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(recorded), barrier.broken) == (100, False)


def test_more_than_the_limit_is_taken_alone_and_not_for_ever_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = totals(monkeypatch)
    order: list[str] = []
    waits: list[int] = []
    budget = ByteBudget(100, lambda: waits.append(0))

    def take(name: str, nbytes: int) -> None:
        with budget.taken(nbytes):
            order.append(name)
            assert nbytes <= budget.limit or budget.used == nbytes

    with budget.taken(10):
        threads = [threading.Thread(target=take, args=("large", 1000))]
        threads[0].start()
        wait_until(lambda: len(budget._queue) == 1)
        threads.append(threading.Thread(target=take, args=("small", 1)))  # fits, but came later
        threads[1].start()
        wait_until(lambda: len(budget._queue) == 2)
        assert order == []
    for thread in threads:
        thread.join()
    assert (order, len(waits), max(recorded)) == (["large", "small"], 2, 1000)


def test_an_error_gives_the_bytes_back() -> None:
    budget = ByteBudget(100, nothing)
    with pytest.raises(ValueError, match="damaged"), budget.taken(70):
        raise ValueError("damaged")
    assert budget.used == 0
