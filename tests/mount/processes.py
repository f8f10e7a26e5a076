"""The end of a process, and a pause."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


def end(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> None:
    """End a process that a test started, and its children if it leads a group; wait for it."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """With every thread of it: one that has not noticed yet might take a request that nobody answers then."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(_state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
