"""What threads wait for, as a schedule decides it (`tests.scheduling`): locks, conditions, queues, threads, time.

The thread of the test takes part in no schedule: to it, no other thread runs, and time passes when it waits.
"""

from __future__ import annotations

import concurrent.futures
import math
import queue
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tests.scheduling import Task, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

T = TypeVar("T")


def wait(is_ready: Callable[[], bool], seconds: float | None = None) -> bool:
    """Wait, as a thread of a schedule, until it is so; return False if the seconds have passed before.

    The thread of the test waits for nothing that could happen: to it, only time passes.
    """
    task = World.task()
    if task is not None:
        return task.schedule.switch(task, is_ready, math.inf if seconds is None else seconds)
    if not is_ready():
        assert seconds is not None, "the test waits for a thread that does not run"
        World.now += seconds
    return is_ready()


def _step() -> None:
    """A switch point at a lock; not if there are others."""
    task = World.task()
    if task is not None and (not task.schedule.steps or task.schedule.is_over):
        task.schedule.switch(task)


class Lock:
    """A lock of `threading`. Any thread may release it."""

    def __init__(self) -> None:
        self._depth = 0
        self._owner: object = None

    def _is_free(self) -> bool:
        return not self._depth

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        _step()
        if not self._is_free() and not (blocking and wait(self._is_free, None if timeout < 0 else timeout)):
            return False
        self._depth += 1
        self._owner = World.task() or threading.get_ident()
        return True

    def release(self) -> None:
        assert self._depth, "the lock is not held"
        self._depth -= 1
        if not self._depth:
            self._owner = None
            _step()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A reentrant lock. Only its holder may release it."""

    def _is_mine(self) -> bool:
        return self._owner == (World.task() or threading.get_ident())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_mine():
            return super().acquire(blocking, timeout)
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._is_mine(), "another thread holds the lock"
        super().release()


class Condition:
    """A condition of `threading`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiting: list[list[bool]] = []

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        woken, lock, depth = [False], self._lock, self._lock._depth
        assert depth, "the lock is not held"
        self._waiting.append(woken)
        lock._depth = 1
        lock.release()
        try:
            wait(lambda: woken[0], timeout)
        finally:
            self._waiting = [other for other in self._waiting if other is not woken]
            lock.acquire()
            lock._depth = depth
        return woken[0]

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        assert timeout is None
        while not (value := predicate()):
            self.wait()
        return value

    def notify(self, n: int = 1) -> None:
        assert self._lock._depth, "the lock is not held"
        for woken in self._waiting[:n]:
            woken[0] = True
        self._waiting = self._waiting[n:]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """An event of `threading`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _step()

    def wait(self, timeout: float | None = None) -> bool:
        return wait(self.is_set, timeout)


class SimpleQueue:
    """A queue of `queue`."""

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()

    def empty(self) -> bool:
        return not self._entries

    def put(self, entry: Any) -> None:
        self._entries.append(entry)
        _step()

    def get(self, timeout: float | None = None) -> Any:
        if not wait(lambda: bool(self._entries), timeout):
            raise queue.Empty
        return self._entries.popleft()


class Future(concurrent.futures.Future[T]):
    """A future whose waiting threads are those of a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class Thread:
    """A thread of the present schedule. Outside of a schedule, it never runs."""

    def __init__(
        self, target: Callable[..., object], args: Iterable[Any] = (), *, name: str = "", daemon: bool = False
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._call = partial(target, *args)
        self._task: Task | None = None

    def start(self) -> None:
        if World.schedule is not None:
            self._task = Task(World.schedule, [self._call], is_called=False)
            self._task.start()
            _step()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        wait(lambda: not self.is_alive(), timeout)


class Module:
    """A module of which some members are others."""

    def __init__(self, module: object, **members: object) -> None:
        self._module = module
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def monotonic() -> float:
    """The time, which passes only when all threads wait."""
    return World.now


def sleep(seconds: float) -> None:
    wait(lambda: False, seconds)


_LOCKS = {"Lock": Lock, "RLock": RLock, "Condition": Condition, "Event": Event, "Thread": Thread}
_REPLACED: list[tuple[object, object]] = [
    (threading, Module(threading, **_LOCKS)),
    (threading.RLock, RLock),
    (queue, Module(queue, SimpleQueue=SimpleQueue)),
    (concurrent.futures.Future, Future),
    (time, Module(time, monotonic=monotonic, sleep=sleep)),
    (time.monotonic, monotonic),
]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what threads wait for, in all modules of shardfs. Objects that were made before keep theirs."""
    for module in [module for name, module in sys.modules.items() if name.startswith("shardfs.")]:
        for name, value in list(vars(module).items()):
            for original, replacement in _REPLACED:
                if value is original:
                    monkeypatch.setattr(module, name, replacement)
