"""Waiting for what happens in another thread or process, on a machine that may be busy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Return as soon as it is so; the time is only there so that a test which fails has an end."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)
