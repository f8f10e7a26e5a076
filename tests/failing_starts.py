"""A system that starts no more threads, as with `ulimit -u` or the limit of a container."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class FailingStarts:
    """While `fails`, no thread of shardfs can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        self._start = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self._started(thread))

    def _started(self, thread: threading.Thread) -> None:
        if self.fails and thread.name.startswith("shardfs"):
            raise RuntimeError("can't start new thread")
        self._start(thread)
