"""Hooks of `shardfs.storage.syscalls` for tests: they count changing calls, and act at one of them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardfs.storage import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Recorder:
    """Notes every call; before call number `at` (from 0), or behind it, `do` is called.

    Calls of threads that other tests have left are done, but neither noted nor counted.
    """

    def __init__(self, at: int = -1, do: Callable[[], None] | None = None, *, behind: bool = False) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._at, self._do, self._behind = at, do, behind
        self._lock = threading.Lock()
        self._acting = 0
        self._others = {*threading.enumerate()} - {threading.current_thread()}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        # What `do` does is no call of those that are looked at.
        if self._acting == threading.get_ident() or threading.current_thread() in self._others:
            return function(*args)
        with self._lock:
            number = len(self.calls)
            self.calls.append((name, args))
        if number == self._at and not self._behind:
            self._act()
        result = function(*args)
        if number == self._at and self._behind:
            self._act()
        return result

    def _act(self) -> None:
        self._acting = threading.get_ident()
        try:
            if self._do is not None:
                self._do()
        finally:
            self._acting = 0


@contextmanager
def hooked(hook: syscalls.Hook) -> Iterator[None]:
    syscalls.hook = hook
    try:
        yield
    finally:
        syscalls.hook = None


def fail(number: int) -> Callable[[], None]:
    def raise_it() -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


def in_child(job: Callable[[], None], seconds: float = 60) -> int:
    """The exit status of a child process that does `job` (0 then, 1 if it raised)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
