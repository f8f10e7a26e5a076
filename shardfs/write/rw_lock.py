"""Reader-writer lock of the name space: file creation holds it shared, changes of what names stand for exclusively."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from shardfs.storage.cache import nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RWLock:
    """Reader-writer lock in which writers take precedence. Reentrant.

    An exclusive holder waits for all shared holders to leave; new shared holders wait behind it. `hook` is called
    before a thread waits for a shared hold.
    """

    def __init__(self, hook: Callable[[], None] = nothing) -> None:
        self._hook = hook
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._mine = threading.local()  # of each thread: `depth`, its nested holds, and `alone`, if it is exclusive
        self._inside = 0
        self._waiting = 0
        self._alone = False

    def shared(self) -> Self:
        """Hold the lock together with other shared holders, in a `with` statement."""
        return self

    def __enter__(self) -> None:
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            if self._alone or self._waiting:
                self._hook()
            with self._mutex:
                while self._alone or self._waiting:
                    self._condition.wait()
                self._inside += 1
        self._mine.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            with self._mutex:
                self._inside -= 1
                if self._waiting:
                    self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock exclusively.

        A thread that holds the lock shared gives up that hold for the duration, and has it back on leaving.
        """
        if getattr(self._mine, "alone", False):
            yield
            return
        depth = getattr(self._mine, "depth", 0)
        with self._mutex:
            self._inside -= bool(depth)
            self._waiting += 1
            self._condition.notify_all()
            while self._alone or self._inside:
                self._condition.wait()
            self._waiting -= 1
            self._alone = True
        self._mine.alone = True
        self._mine.depth = depth + 1  # the exclusive holder may create files, which takes a shared hold
        try:
            yield
        finally:
            self._mine.depth = depth
            self._mine.alone = False
            with self._mutex:
                self._alone = False
                self._inside += bool(depth)
                self._condition.notify_all()
