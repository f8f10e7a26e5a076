"""Threads in all orders: a race is found by search, not by chance.

`explore(scenario)` calls a scenario once for each schedule. The scenario makes its objects and gives the calls of its
threads to `Schedule.together`. One thread runs at a time. At a *switch point* another one may go on. Switch points are

- where a lock is taken or released; or, if `steps` names modules, each call and each access to an attribute or an item
  in these modules instead;
- wherever a thread must wait, and between two calls of a thread.

To stop a thread that could go on is a *preemption*; so is to let another thread than the first one go on when one must
wait. All schedules with at most so many preemptions are tried: nearly all races need one or two. With `state`, equal
states are left alone the second time.

`tests.virtual_threads.install` puts locks, conditions, queues, threads and clocks that a schedule decides into the
modules of shardfs. Time passes only when all threads wait: `Schedule.elapsed_s` shows a wait that no wake-up has ended.
"""

from __future__ import annotations

import dis
import math
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from types import CodeType, FrameType

Calls: TypeAlias = "Callable[[], object] | Sequence[Callable[[], object]]"

HANG_S = 120
"""Seconds of real time after which a schedule is given up: a thread waits for what is not of this module."""

MOST_WAITS = 1_000
"""Waits that end because time passes; a schedule with more has no end."""

ACCESSES = ("CALL", "LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "BINARY_SUBSCR", "STORE_SUBSCR",
            "DELETE_SUBSCR", "CONTAINS_OP", "BEFORE_WITH", "FOR_ITER")  # fmt: skip


HIDDEN = (__file__, str(Path(__file__).with_name("virtual_threads.py")), threading.__file__)
"""The modules whose functions are not shown as the place of a thread."""


class Abandoned(BaseException):
    """Raised in the threads of a schedule that is over."""


class Pruned(BaseException):
    """Raised by `together` in a state that another schedule has reached before."""


class World:
    """What all schedules share: the present one, and the time in seconds, which goes on between them."""

    schedule: Schedule | None = None
    now = 0.0
    thread = threading.local()  # `task`: the task of this thread
    workers: ClassVar[list[Worker]] = []  # those without a task

    @classmethod
    def task(cls) -> Task | None:
        return getattr(cls.thread, "task", None)


def bool_true() -> bool:
    return True


@cache
def accesses(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions that call something, or access an attribute or an item."""
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname.startswith(ACCESSES))


class Worker:
    """A thread that runs tasks, one after the other. It waits for `turn`, which is free while the thread runs."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.task: Task | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            task, self.task = self.task, None
            if task is not None:
                task.run()


class Task:
    """A thread of a schedule. It goes on when `is_ready` returns True, or at `deadline`."""

    def __init__(self, schedule: Schedule, calls: Sequence[Callable[[], object]], *, is_called: bool) -> None:
        self.schedule = schedule
        self.is_called = is_called
        self.is_ready: Callable[[], bool] = bool_true
        self.deadline = math.inf
        self.has_ended = False
        self.worker = World.workers.pop() if World.workers else Worker()
        self._calls = calls

    def start(self) -> None:
        """Take part in the schedule: run at the first turn."""
        self.schedule.tasks.append(self)
        self.worker.task = self

    def run(self) -> None:
        """Make the calls, in the thread of the worker."""
        World.thread.task = self
        schedule = self.schedule
        try:
            for number, call in enumerate(self._calls if not schedule.is_over else ()):
                if number:
                    schedule.switch(self, is_free=True)
                if schedule.steps:
                    sys.settrace(self._trace)
                try:
                    call()
                finally:
                    sys.settrace(None)
        except Abandoned:
            pass
        except BaseException as e:  # noqa: BLE001 - raised by `together`
            schedule.fail(e)
        self.has_ended = True
        World.workers.append(self.worker)
        schedule.leave(self)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if not any(part in frame.f_code.co_filename for part in self.schedule.steps):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode" and frame.f_lasti in accesses(frame.f_code):
            self.schedule.switch(self)
        return self._trace

    def place(self) -> tuple[tuple[str, int], ...]:
        """Where the thread is: its functions, without those of this module, and the instruction in each."""
        return tuple((frame.f_code.co_name, frame.f_lasti) for frame in self._frames())

    def line(self) -> str:
        """The same for people: the innermost function, and its line."""
        frame = next(self._frames(), None)
        if frame is None:
            return "its end"
        return f"{frame.f_code.co_filename.rpartition('shardfs/')[2]}:{frame.f_lineno} ({frame.f_code.co_qualname})"

    def _frames(self) -> Iterator[FrameType]:
        frame: FrameType | None = None if self.has_ended else sys._current_frames().get(self.worker.thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_filename not in HIDDEN:
                yield frame
            frame = frame.f_back


class Schedule:
    """One order of threads. `choices` decide its first switch points; at later ones, the thread goes on if it can.

    Attributes:
        others: the choices of the schedules that leave this one at later switch points.
        blocked: after `together`, where threads are that still wait. The code has started them, not the test.
        is_over: whether all threads that the test has called have ended.
    """

    def __init__(
        self, choices: tuple[int, ...], preemptions: float, steps: Sequence[str], states: set[Hashable]
    ) -> None:
        self.steps = steps
        self.others: list[tuple[int, ...]] = []
        self.tasks: list[Task] = []
        self.blocked: list[str] = []
        self._failure: BaseException | None = None
        self.is_over = False
        self._choices = choices
        self._taken: list[int] = []
        self._preemptions = preemptions
        self._is_in_turns = not preemptions
        self._switches: list[str] = []
        self._states = states
        self._state: Callable[[], Hashable] | None = None
        self._waits = 0
        self._is_pruned = False
        self._end = threading.Semaphore(0)
        self._abandoned = threading.Semaphore(0)
        self._begin_s = World.now

    @property
    def elapsed_s(self) -> float:
        """The seconds that have passed because all threads waited."""
        return World.now - self._begin_s

    def together(self, *threads: Calls, state: Callable[[], Hashable] | None = None) -> None:
        """Make calls in threads of their own, and return when these have ended. Raise their first error.

        Args:
            threads: for each thread, a call or several, one after the other.
            state: returns all that decides how the run goes on, apart from where the threads are.
        """
        self._state = state
        for calls in threads:
            Task(self, [calls] if callable(calls) else calls, is_called=True).start()
        self._give_turn(self._next(None))
        in_time = self._end.acquire(timeout=HANG_S)
        waiting = [task for task in self.tasks if not task.has_ended]
        self.blocked = [task.line() for task in waiting]
        forever = [task.line() for task in waiting if task.is_called]
        self.is_over = True
        for task in waiting:
            task.worker.turn.release()
        for _ in waiting:
            self._abandoned.acquire(timeout=10)
        if self._failure is not None:
            raise self._failure
        if self._is_pruned:
            raise Pruned
        assert in_time, f"a thread waits for what no schedule decides: {forever}"
        assert not forever, f"threads wait forever: {forever}"

    def switch(
        self, task: Task, is_ready: Callable[[], bool] = bool_true, seconds: float = math.inf, *, is_free: bool = False
    ) -> bool:
        """Let other threads run, and go on when `is_ready`. Return False if the seconds have passed before.

        `is_free`: another thread may go on although there are no preemptions.
        """
        if self.is_over:
            raise Abandoned
        task.is_ready = is_ready
        task.deadline = World.now + seconds
        following = self._next(task, is_free=is_free)
        if following is not task:
            self._give_turn(following)
            task.worker.turn.acquire()
            if self.is_over:
                raise Abandoned
        return is_ready()

    def fail(self, failure: BaseException) -> None:
        """Note the first error of a thread, which ends the schedule."""
        if not self.is_over and self._failure is None:
            self._failure = failure

    def leave(self, task: Task) -> None:
        """Let another thread run after the end of one."""
        if self.is_over:
            self._abandoned.release()
        else:
            self._give_turn(None if self._failure is not None else self._next(task))

    def _give_turn(self, task: Task | None) -> None:
        (self._end if task is None else task.worker.turn).release()

    def _next(self, present: Task | None, *, is_free: bool = False) -> Task | None:
        """Return the thread that goes on; None if there is none, or the rest is known."""
        while not (ready := [task for task in self.tasks if not task.has_ended and _can_go_on(task)]):
            if not self._let_time_pass():
                return None
        if present in ready:
            ready.remove(present)
            ready.insert(0, present)
        try:
            self._is_pruned = self._is_known(present)
        except AssertionError as e:  # of `state`, in the thread that is to be stopped
            self.fail(e)
        if self._is_pruned or self._failure is not None:
            return None
        is_free = present is None or present.has_ended or (self._is_in_turns and (is_free or present not in ready))
        if len(ready) == 1 or not (is_free or self._preemptions):
            return ready[0]
        chosen = self._choose(ready)
        if chosen is not present and present is not None:
            self._switches.append(present.line())
            self._preemptions -= not is_free
        return chosen

    def _is_known(self, present: Task | None) -> bool:
        """Return whether another schedule has been in this state."""
        if self._state is None or len(self._taken) < len(self._choices):
            return False
        places = tuple((task.has_ended, task.place()) for task in self.tasks)
        # Without a bound, it does not matter which thread runs now.
        bounded = None if self._preemptions == math.inf else (self._preemptions, present and self.tasks.index(present))
        state = self._state(), places, bounded
        is_known = state in self._states
        self._states.add(state)
        return is_known

    def _choose(self, ready: Sequence[Task]) -> Task:
        number = 0
        if len(self._taken) < len(self._choices):
            number = min(self._choices[len(self._taken)], len(ready) - 1)
        else:
            self.others += [(*self._taken, other) for other in range(1, len(ready))]
        self._taken.append(number)
        return ready[number]

    def _let_time_pass(self) -> bool:
        """End the shortest wait. Return False if none has an end, or all threads that were called have ended."""
        waiting = [task for task in self.tasks if not task.has_ended]
        deadline = min((task.deadline for task in waiting), default=math.inf)
        if deadline == math.inf or not any(task.is_called for task in waiting):
            return False
        self._waits += 1
        if self._waits > MOST_WAITS:
            self.fail(AssertionError(f"threads wait again and again: {[task.line() for task in waiting]}"))
            return False
        World.now = deadline
        return True

    def __str__(self) -> str:
        return f"schedule {tuple(self._taken)}: threads were stopped at {', '.join(self._switches) or 'no place'}"


def _can_go_on(task: Task) -> bool:
    return task.deadline <= World.now or task.is_ready()


def explore(scenario: Callable[[Schedule], object], *, preemptions: float = math.inf, steps: Sequence[str] = ()) -> int:
    """Call a scenario with all schedules, and return how many there are. The first error is raised, with its schedule.

    Args:
        preemptions: the most in one schedule. 0: the calls are made one after the other, in all orders.
        steps: parts of the paths of the modules whose steps are switch points.
    """
    number = 0
    states: set[Hashable] = set()
    todo: list[tuple[int, ...]] = [()]
    while todo:
        schedule = Schedule(todo.pop(), preemptions, steps, states)
        World.schedule = schedule
        try:
            scenario(schedule)
            number += 1
        except Pruned:
            pass
        except BaseException as e:
            e.add_note(str(schedule))
            raise
        finally:
            World.schedule = None
        todo += schedule.others
    return number


def explore_outcomes(scenario: Callable[[Schedule], Hashable], *, preemptions: float, steps: Sequence[str] = ()) -> int:
    """Call a scenario with all schedules, and return how many there are.

    What each returns is what one returns that makes the calls one after the other.
    """
    expected: set[Hashable] = set()

    def check(schedule: Schedule) -> None:
        outcome = scenario(schedule)
        assert outcome in expected, f"{outcome} is none of {expected}"

    explore(lambda schedule: expected.add(scenario(schedule)), preemptions=0)
    return explore(check, preemptions=preemptions, steps=steps)
