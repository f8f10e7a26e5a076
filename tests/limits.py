"""Limits of processor time that mean the same on any machine."""

from __future__ import annotations

import time
import zlib

_USUAL_S = 0.08  # what `_some_work` took where the limits were set


def usual_seconds(seconds: float) -> float:
    """So many seconds of this process, right now, in seconds of the machine on which limits were set, unless that one
    is slower."""
    if seconds < 1:  # no limit is as low
        return seconds
    return seconds / max(1.0, _some_work() / _USUAL_S)


def _some_work() -> float:
    start_s = time.process_time()
    squares = sum(i * i for i in range(1_000_000))
    assert len(zlib.decompress(zlib.compress(bytes(16 << 20), 1))) < squares
    return time.process_time() - start_s
