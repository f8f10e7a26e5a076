"""A pool of daemon threads."""

from __future__ import annotations

import errno
import os
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

IDLE_S = 10.0
"""A thread ends after so many seconds without a call, so that sources which nobody uses any more keep no threads."""


class DaemonThreads:
    """A pool of daemon threads. Unlike the standard library's executor, it does not delay the program's exit.

    Thread-safe. A child process after a fork has a pool without threads; calls that waited in the parent are not done
    in the child.

    Args:
        name: of the threads.
        limit: the most threads. It may change: threads beyond it end after their calls.

    Attributes:
        count: the number of threads.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.count = 0
        # The number of idle threads minus the number of waiting calls, so it can be negative. It changes in `submit`
        # and after a call, not when a thread takes a call: the thread might report that too late.
        self._free = 0

    @property
    def busy(self) -> bool:
        """Whether calls wait for a thread."""
        return self._free < 0

    def submit(self, call: Callable[[], T], *, may_wait: bool = True) -> Future[T]:
        """Let a thread do a call, and return at once; what the call raises is raised by `Future.result`.

        If no thread can be started, the call waits for one that can, or for a busy one. A call that still waits can be
        cancelled. Without `may_wait`, raise OSError (EAGAIN) if the pool has no thread and none can be started.
        """
        future: Future[T] = Future()
        with self._locked():
            if self._free <= 0 and self.count < self.limit:
                try:
                    self._add_thread()
                except RuntimeError as e:  # the limit of threads is reached
                    if not (self.count or may_wait):
                        why = f"cannot start a thread for a request: {e}"
                        raise OSError(errno.EAGAIN, f"{why}; raise `ulimit -u` or the limits of the container") from e
            self._free -= 1
            self._jobs.put((future, call))
        return future

    def _locked(self) -> threading.Lock:
        if self._pid != os.getpid():  # no thread survives a fork, and one may have held the lock
            self._lock = threading.Lock()
            self._begin()
        return self._lock

    def _add_thread(self) -> None:
        threading.Thread(target=self._work, name=self.name, daemon=True).start()
        self.count += 1
        self._free += 1

    def _work(self) -> None:
        while True:
            try:
                future, call = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self.count -= 1
                        self._free -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # noqa: BLE001 - `Future.result` raises it in the waiting thread
                    future.set_exception(e)
            del future, call
            with self._lock:
                if self.count > self.limit:
                    self.count -= 1
                    return
                self._free += 1
