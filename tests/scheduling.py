"""Runs threads in all orders: one runs at a time, and at each switch point, each thread that can continue does so once.

A run is decided by its choices at the switch points. Equal states are left alone the second time, so the number of runs
is that of the states and not of the orders.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import FrameType


class Abandoned(BaseException):
    """Raised in the threads of a run that ends early."""


class Task:
    """A thread of a run. `ready` returns whether it can continue at its switch point."""

    def __init__(self, scheduler: Scheduler, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.ready: Callable[[], bool] = bool_true
        self.ended = False
        self.failure: BaseException | None = None
        self.turn = threading.Semaphore(0)
        self._scheduler = scheduler
        self._target = target
        self._arguments = arguments
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Let the task take part in the run."""
        self._scheduler.tasks.append(self)
        self.thread.start()

    def _run(self) -> None:
        self._scheduler.local.task = self
        self.turn.acquire()
        try:
            self._target(*self._arguments)
        except Abandoned:
            pass
        except BaseException as e:  # noqa: BLE001 - raised by `run`
            self.failure = e
        self.ended = True
        self._scheduler.control.release()

    def place(self) -> tuple[tuple[str, int], ...]:
        """Where the thread is: its functions, without those of this module, and the instruction in each."""
        frame: FrameType | None = None if self.thread.ident is None else sys._current_frames().get(self.thread.ident)
        calls = []
        while frame is not None:
            if frame.f_code.co_filename not in (__file__, threading.__file__):
                calls.append((frame.f_code.co_name, frame.f_lasti))
            frame = frame.f_back
        return tuple(calls)


def bool_true() -> bool:
    return True


class Scheduler:
    """One run. `choices` decide its first switch points; at later ones, the first thread that can continue does so."""

    def __init__(self, choices: tuple[int, ...] = ()) -> None:
        self.tasks: list[Task] = []
        self.taken: list[int] = []
        self.local = threading.local()
        self.control = threading.Semaphore(0)
        self._choices = choices
        self._over = False
        self.blocked: list[tuple[tuple[str, int], ...]] = []
        """At the end of the run: where the threads are that wait forever."""

    def threading(self) -> Any:
        """What to put in the place of the module `threading`."""
        return SimpleNamespace(Lock=lambda: Lock(self), Thread=self._thread, local=threading.local)

    def _thread(self, target: Callable[..., object], args: tuple[Any, ...] = (), **_: object) -> Task:
        return Task(self, target, args)

    def switch(self, ready: Callable[[], bool] = bool_true) -> None:
        """A switch point: other threads may run now, and this one continues when `ready`."""
        task: Task | None = getattr(self.local, "task", None)
        if task is None:  # the thread of the test, before the run
            return
        if self._over:
            raise Abandoned
        task.ready = ready
        self.control.release()
        task.turn.acquire()
        if self._over:
            raise Abandoned

    def run(self, state: Callable[[], Hashable], states: set[Hashable], todo: list[tuple[int, ...]]) -> bool:
        """Run to the end; add states to `states`, and other choices to `todo`. Return False at a state seen before."""
        try:
            while runnable := [n for n, task in enumerate(self.tasks) if not task.ended and task.ready()]:
                chosen = 0
                if len(self.taken) < len(self._choices):
                    chosen = self._choices[len(self.taken)]
                else:
                    now = (state(), tuple((task.ended, task.place()) for task in self.tasks))
                    if now in states:
                        return False
                    states.add(now)
                    todo += [(*self.taken, other) for other in range(1, len(runnable))]
                self.taken.append(chosen)
                task = self.tasks[runnable[chosen]]
                task.turn.release()
                self.control.acquire()
                if task.failure is not None:
                    raise task.failure
            return True
        finally:
            self.blocked = [task.place() for task in self.tasks if not task.ended]
            self._over = True
            for task in self.tasks:
                task.turn.release()
            for task in self.tasks:
                task.thread.join(10)


class Lock:
    """A lock whose `acquire` and `release` are switch points."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.locked = False
        self._scheduler = scheduler

    def acquire(self) -> None:
        self._scheduler.switch(lambda: not self.locked)
        assert not self.locked
        self.locked = True

    def release(self) -> None:
        assert self.locked
        self.locked = False
        self._scheduler.switch()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
