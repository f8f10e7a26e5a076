"""The end of a process."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from typing import Any


def end(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> None:
    """End a process that a test started, and its children if it leads a group; wait for it."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
