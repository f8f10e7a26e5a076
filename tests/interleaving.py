"""Races without chance: one call is stopped at each of its steps, and another call is made there."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

PATIENCE_S = 0.005
"""Time after which the other call is taken to wait for a lock of the stopped one, which then goes on."""


def interleaved(
    call: Callable[[], object], other: Callable[[], object], *parts: str, prepare: Callable[[], object] = bool
) -> Iterator[int]:
    """Do `call()`, with `other()` in another thread before its step 0; again before step 1, and so on to its last step.

    Each time, `prepare()` is called first. Yield the number of the step after each. Raise the errors of both. A step is
    an instruction of Python in a module whose path contains one of `parts`.
    """
    for step in itertools.count():
        prepare()
        before = _Before(step, other, parts)
        sys.settrace(before.trace)
        try:
            call()
        finally:
            sys.settrace(None)
        if before.thread is None:
            return
        before.thread.join(60)
        if before.failure is not None:
            raise before.failure
        yield step


class _Before:
    def __init__(self, step: int, other: Callable[[], object], parts: tuple[str, ...]) -> None:
        self._left = step
        self._other = other
        self._parts = parts
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._parts):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and self.thread is None:
            if not self._left:
                self.thread = threading.Thread(target=self._run)
                self.thread.start()
                self.thread.join(PATIENCE_S)
            self._left -= 1
        return self.trace

    def _run(self) -> None:
        try:
            self._other()
        except BaseException as e:  # noqa: BLE001 - raised by `interleaved`
            self.failure = e
