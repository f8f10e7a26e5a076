"""Group commit: of the threads that wait for the disk, one is the leader and works for all."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Leader:
    """Lets one thread at a time lead. `lock` guards the state that the leader's work changes."""

    def __init__(self, lock: threading.Lock) -> None:
        self._changed = threading.Condition(lock)
        self._leading = False

    @contextmanager
    def lead(self, is_done: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for the present leader, then lead for the length of a `with` block, which runs without the lock.

        `is_done` is called with the lock held. As soon as it returns True, give False and do not lead.
        """
        with self._changed:
            while not (done := is_done()) and self._leading:
                self._changed.wait()
            self._leading = self._leading or not done
        try:
            yield not done
        finally:
            if not done:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
