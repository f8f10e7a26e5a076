"""The exit codes of the command line, and the table that the documentation and `shardfs --help` print."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a verb. Two names of one number are two causes with the same consequence for a script."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNREADABLE = 3
    LEFT = 3
    UNSUPPORTED = 4
    BUSY = 4
    NOT_MOUNTED = 5
    LATE = 5
    NOT_READY = 6
    DAMAGED = 7
    INTERRUPTED = 128 + signal.SIGINT


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.PROBLEM: "unexpected error, or a problem found by status or doctor",
    ExitCode.USAGE: "wrong usage",
    ExitCode.UNREADABLE: "source not found or unreadable, or not all is published or packed",
    ExitCode.UNSUPPORTED: "no supported sharded dataset, or in use",
    ExitCode.NOT_MOUNTED: "mount failed, nothing is mounted there, or the daemon is still running",
    ExitCode.NOT_READY: "mount not ready in time",
    ExitCode.DAMAGED: "damage found",
}
"""What each exit code tells the user. The help of a verb says what the code means for this verb."""
