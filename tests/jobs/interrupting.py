"""Jobs that end early: between two tasks, or at a system call (`python -m tests.jobs.interrupting CALL COMMAND…`)."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from shardfs.cli import commands
from shardfs.storage.pack_state import STATE
from tests.write.faults import KILLED, KillAt, hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.jobs.runs import PackReport


def interrupted(reports: Iterator[PackReport], after: int) -> None:
    """Begin a job, and give it up after some reports, as if the process had been killed between two tasks."""
    begun: Any = reports
    for _ in range(after):
        next(begun)
    begun.close()


def aborted_and_done(
    job: Callable[..., Iterator[PackReport]], root: Path, content: Callable[[Path], object], **how: Any
) -> None:
    """Interrupt a job in place, and go back to the same `content`. Then do the whole job."""
    before = content(root)
    interrupted(job(str(root), **how), 2)
    assert (root / STATE).exists()
    assert not any(report.problems for report in job(str(root), abort=True))
    assert content(root) == before
    assert not any(report.problems for report in job(str(root), **how))


def calls_until_end(call: int, *command: str) -> int | None:
    """Run a command of shardfs; return the number of its system calls, or None if it was killed before call `call`."""
    words = [sys.executable, "-m", "tests.jobs.interrupting", str(call), *command]
    completed = subprocess.run(words, check=False, timeout=250, capture_output=True, text=True)
    if completed.returncode == KILLED:
        return None
    assert completed.returncode == 0, completed.stderr
    return int(completed.stdout.splitlines()[-1])


if __name__ == "__main__":
    with hooked(kill := KillAt(int(sys.argv[1]), after=False)):
        commands(sys.argv[2:], standalone_mode=False)
    print(len(kill.names))
