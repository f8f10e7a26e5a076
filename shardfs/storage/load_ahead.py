"""Loads the next items of a sequence while the consumer still works on one, for stores where each load takes long."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.storage.read_ahead import ReadAhead

A = TypeVar("A")
T = TypeVar("T")


def load_ahead(
    pool: ReadAhead | None,
    load: Callable[[A], T],
    items: Iterable[A],
    *,
    first: int = 1,
    weigh: Callable[[T], int] = lambda _: 1,
    most: float = math.inf,
) -> Iterator[tuple[A, T]]:
    """Yield each item and what `load` returns for it, in order. Threads of `pool` load the next items meanwhile.

    The number of loads under way doubles from `first` up to the connections of the pool. An exception of `load` or of
    `items` is raised at its place in the order.

    Args:
        pool: None if nothing is loaded ahead.
        weigh: returns the weight of a result. The results ahead weigh at most `most`, if all are like those before.
    """
    if pool is None or not pool.usable:
        for item in items:
            yield item, load(item)
        return
    rest, width, heaviest = iter(items), first, 1
    begun: deque[tuple[A, Future[T]]] = deque()
    failure: Exception | None = None
    try:
        while True:
            try:
                for item in islice(rest, max(width - len(begun), 0) if failure is None else 0):
                    begun.append((item, _start(pool, partial(load, item))))
            except Exception as e:  # noqa: BLE001 - raised below, after the items before
                failure = e
            if not begun:
                break
            item, future = begun.popleft()
            result = _result(pool, future, partial(load, item))
            yield item, result
            heaviest = max(heaviest, weigh(result))
            width = max(int(min(2 * width, pool.connections, most // heaviest)), 1)
    finally:
        for _, future in begun:
            future.cancel()
    if failure is not None:
        raise failure


def _start(pool: ReadAhead, call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as e:  # noqa: BLE001 - raised in the consumer
                future.set_exception(e)

    pool.start(run)
    return future


def _result(pool: ReadAhead, future: Future[T], call: Callable[[], T]) -> T:
    """Return the result of a load. A load that is still in the queue is done here, so that it waits for no other."""
    if future.cancel():
        return call()
    if not future.done():
        pool.waiting()
    return future.result()
