"""Waiting for what happens in another thread or process, on a machine that may be busy."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 100) -> None:
    """Return as soon as it is so; the time is only there so that a test which fails has an end."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)


def read_terminal(master: int) -> bytes:
    """Return what a program writes to a terminal, until it ends."""
    seen = b""
    with suppress(OSError):  # EIO: the end of a terminal
        while part := os.read(master, 1 << 16):
            seen += part
    return seen
