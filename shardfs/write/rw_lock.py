"""Who makes files, and who changes what names stand for, keep out of each other's way."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardfs.storage.cache import nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RWLock:
    """Many at a time pass it, or one alone, before whom all others are let out and none in.

    Who has passed may pass again. `hook` is called before a thread waits to pass together with others.
    """

    def __init__(self, hook: Callable[[], None] = nothing) -> None:
        self._hook = hook
        self._condition = threading.Condition()
        self._mine = threading.local()
        self._inside, self._waiting = 0, 0
        self._alone, self._owner = False, 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Together with others."""
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            if self._alone or self._waiting:
                self._hook()
            with self._condition:
                while self._alone or self._waiting:
                    self._condition.wait()
                self._inside += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            if not depth:
                with self._condition:
                    self._inside -= 1
                    if self._waiting:
                        self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Without anybody else. Who has passed with others is out meanwhile, and in again behind it."""
        if self._owner == threading.get_ident():
            yield
            return
        depth = getattr(self._mine, "depth", 0)
        with self._condition:
            self._inside -= bool(depth)
            self._waiting += 1
            self._condition.notify_all()
            while self._alone or self._inside:
                self._condition.wait()
            self._waiting -= 1
            self._alone, self._owner = True, threading.get_ident()
        self._mine.depth = depth + 1  # what it calls may make files
        try:
            yield
        finally:
            self._mine.depth = depth
            with self._condition:
                self._alone, self._owner = False, 0
                self._inside += bool(depth)
                self._condition.notify_all()
