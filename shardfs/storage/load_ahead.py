"""Loads the next items of a sequence while the consumer still works on one, for stores where each load takes long."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

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
    room: float = math.inf,
) -> Iterator[tuple[A, T]]:
    """Yield each item and what `load` returns for it, in order. Threads of `pool` load the next items meanwhile.

    The number of loads under way doubles from `first` up to the connections of the pool. An exception of `load` or of
    `items` is raised at its place in the order. Loads that wait are cancelled if the caller closes the generator.

    Args:
        pool: None if nothing is loaded ahead.
        weigh: returns the weight of a result. The results ahead weigh at most `room`, if all are like those before.
    """
    if pool is None or not pool.usable:
        for item in items:
            yield item, load(item)
        return
    remaining = iter(items)
    width, heaviest = first, 1
    loads: deque[tuple[A, Future[T]]] = deque()
    failure: Exception | None = None
    try:
        while True:
            try:
                for item in islice(remaining, max(width - len(loads), 0) if failure is None else 0):
                    loads.append((item, pool.start(partial(load, item))))
            except Exception as e:  # noqa: BLE001 - raised below, after the items before
                failure = e
            if not loads:
                break
            item, future = loads.popleft()
            loaded = _outcome(pool, future, partial(load, item))
            yield item, loaded
            heaviest = max(heaviest, weigh(loaded))
            width = max(int(min(2 * width, pool.connections, room // heaviest)), 1)
    finally:
        for _, future in loads:
            future.cancel()
    if failure is not None:
        raise failure


def _outcome(pool: ReadAhead, future: Future[T], call: Callable[[], T]) -> T:
    """Return the result of a load. A load that is still in the queue is done here, so that it waits for no other."""
    if future.cancel():
        return call()
    if not future.done():
        pool.waiting()
    return future.result()
