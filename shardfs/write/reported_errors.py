"""Errors to report to programs later: errors of publishing, and errors of `close` that the program may have ignored.

An error of publishing is reported once to each handle open at that time, and to later handles until one of them has
received it. An error of `close` is reported until the file is written again.
"""

from __future__ import annotations

import errno
import logging
import threading
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from shardfs.model.kinds import is_in
from shardfs.write.files import upwards

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

MOST_REFUSED = 10_000
"""Maximum number of files with a remembered error of `close`. One entry for the whole mount covers the rest."""


class Failures:
    """Errors of publishing, by the path of a file or of the array around it. Thread-safe.

    Works like error reporting of the Linux page cache (errseq_t): errors are numbered, and each handle remembers the
    newest number at its opening. The next handle also gets an error that no handle has received yet.

    `failed` is called with each path and error at once.
    """

    def __init__(self) -> None:
        self.failed: Callable[[str, OSError], object] = lambda path, failure: None
        self._lock = threading.Lock()
        self._errors: dict[str, tuple[int, OSError]] = {}
        self._unseen: set[str] = set()
        self._count = 0

    def record(self, path: str, failure: OSError) -> None:
        """Store an error for handles to get. A newer error of the same path replaces it."""
        with self._lock:
            self._count += 1
            self._errors[path] = self._count, failure
            self._unseen.add(path)
        self.failed(path, failure)

    def _newest(self, path: str) -> tuple[int, OSError, str] | None:
        """Return the newest error of `path` and of the directories above it: its number, the error and its path."""
        errors = [(*self._errors[at], at) for at in upwards(path) if at in self._errors]
        return max(errors, default=None, key=itemgetter(0))

    def seen(self, path: str) -> int:
        """Return the number that a new handle passes to `since`.

        This is the number of the newest error. If no handle has received that error yet, it is one less, so the new
        handle gets the error.
        """
        if not self._errors:
            return 0
        with self._lock:
            newest = self._newest(path)
            return 0 if newest is None else newest[0] - (newest[2] in self._unseen)

    def since(self, path: str, last: int) -> tuple[int, OSError | None]:
        """Return the number of the newest error, and the error if it is newer than `last`, else None."""
        if not self._errors:
            return last, None
        with self._lock:
            newest = self._newest(path)
            if newest is None or newest[0] <= last:
                return last, None
            self._unseen.discard(newest[2])
            return newest[0], OSError(newest[1].errno, newest[1].strerror, newest[1].filename)


class Refused:
    """Files whose last version was refused at `close` or `fsync`, so that it is lost.

    The system call returned the error. Some programs (z5py) ignore it. The first error is logged and passed to
    `failures.failed`.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._whys: dict[str, OSError] = {}

    def record(self, path: str, failure: OSError) -> None:
        """Remember the error of a file. Beyond `MOST_REFUSED` files, store it for the root."""
        if not self._whys:
            log.warning("%s: its last version was refused at close and is lost: %s", path, failure)
            self._failures.failed(path, failure)
        self._whys[path if len(self._whys) < MOST_REFUSED else ""] = failure

    def clear(self, path: str) -> None:
        """Drop the error of a file that has a newer version or is removed."""
        self._whys.pop(path, None)

    def clear_below(self, path: str) -> None:
        """Drop the errors of all files in a removed directory."""
        for name in [name for name in self._whys if name and is_in(name, path)]:
            self.clear(name)

    def first(self, path: str) -> OSError | None:
        """Return the error of one file at or below `path`; None if there is none."""
        for name, why in list(self._whys.items()):
            if is_in(name, path) or not name:
                return OSError(
                    why.errno or errno.EIO,
                    f"its last version was refused at close and is lost: {why.strerror or why}",
                    name,
                )
        return None

    def state(self, limit: int) -> dict[str, str]:
        """Return the reasons by path, for at most `limit` files."""
        return {path: str(why.strerror or why) for path, why in islice(list(self._whys.items()), limit)}

    def __len__(self) -> int:
        return len(self._whys)
