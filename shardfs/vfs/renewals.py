"""Which directories are to be read again, so that what a thread has read before is not kept."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from shardfs.model.kinds import is_in

if TYPE_CHECKING:
    from collections.abc import Callable

REMEMBERED = 64
"""Number of renewals whose paths are remembered. What was read before them counts as outdated."""


class OutdatedError(Exception):
    """The metadata changed while it was read; read it again."""


class Renewals:
    """Counts the changes of metadata. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self.count = 0

    def add(self, path: str) -> None:
        """Note that metadata at a path, or below, has changed."""
        with self._lock:
            self.count += 1
            self._paths.append((self.count, path))

    def keep(self, path: str, since: int, install: Callable[[], None]) -> None:
        """Call `install`, or raise OutdatedError if metadata of `path` has changed since `count` was `since`.

        The lock is held meanwhile, so a renewal that begins waits. `install` must not call this object. Its errors are
        passed on.
        """
        with self._lock:
            if self.count - since > REMEMBERED or any(n > since and is_in(path, at) for n, at in self._paths):
                raise OutdatedError
            install()
