"""Waiting for what happens in another thread or process, on a machine that may be busy."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.storage.read_ahead import ReadAhead


def wait_until(condition: Callable[[], object], seconds: float = 100) -> None:
    """Return as soon as it is so; the time is only there so that a test which fails has an end."""
    end, pause = time.monotonic() + seconds, 0.001
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def settle(shared: ReadAhead, seconds: float = 10) -> None:
    """Let all threads end what they have to fetch, as they do before the next read on a machine that is not busy.

    They may wait for an index that the caller loads: then this ends after so many seconds.
    """
    with suppress(AssertionError):
        wait_until(lambda: shared._threads._free == shared._threads.count, seconds)


def read_terminal(master: int) -> bytes:
    """Return what a program writes to a terminal, until it ends."""
    output = b""
    with suppress(OSError):  # EIO: the end of a terminal
        while part := os.read(master, 1 << 16):
            output += part
    return output
