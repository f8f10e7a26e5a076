"""Errors that nobody waited for: each is told once to all who have the file open, and to one who opens it later.

And errors of `close` that the program may have ignored: they are reported until the file is written again.
"""

from __future__ import annotations

import errno
import threading
from itertools import islice

MOST_REFUSED = 10_000
"""Files of which the error of `close` is kept. Beyond that, an entry for the whole mount stands for all others."""


def is_below(path: str, directory: str) -> bool:
    """Return whether a path is a directory, or in it."""
    return not directory or path == directory or path.startswith(f"{directory}/")


class Refused:
    """Files whose last version was refused when a program closed or synced them, so that it is lost.

    The system call returned the error. Some programs (z5py) ignore it.
    """

    def __init__(self) -> None:
        self._whys: dict[str, OSError] = {}

    def note(self, path: str, failure: OSError) -> None:
        """Remember a file. If there are too many, the root stands for it."""
        self._whys[path if len(self._whys) < MOST_REFUSED else ""] = failure

    def forget(self, path: str) -> None:
        """The file has a newer version, or is removed."""
        self._whys.pop(path, None)

    def forget_below(self, path: str) -> None:
        """The directory is removed."""
        for known in [known for known in self._whys if known and is_below(known, path)]:
            self.forget(known)

    def first(self, path: str) -> OSError | None:
        """Return the error of one file at or below a path."""
        for known, why in list(self._whys.items()):
            if is_below(known, path) or not known:
                return OSError(why.errno or errno.EIO, f"was refused when it was closed: {why.strerror or why}", known)
        return None

    def state(self, most: int) -> dict[str, str]:
        """Return why, by path; of so many files at most."""
        return {path: str(why.strerror or why) for path, why in islice(list(self._whys.items()), most)}

    def __len__(self) -> int:
        return len(self._whys)


class Failures:
    """By path, of a file or of the array around it. Thread-safe.

    As Linux does it for its own page cache: errors are counted, and a handle knows how many there were when it was
    opened; one that nobody has seen yet is told to a handle that is opened afterwards, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[str, tuple[int, OSError]] = {}
        self._unseen: set[str] = set()
        self._count = 0

    def note(self, path: str, failure: OSError) -> None:
        """Remember an error until it was told."""
        with self._lock:
            self._count += 1
            self._errors[path] = self._count, failure
            self._unseen.add(path)

    def _newest(self, path: str) -> tuple[int, OSError, str] | None:
        """Of a path, or of the array around it."""
        found = None
        while True:
            known = self._errors.get(path)
            if known is not None and (found is None or known[0] > found[0]):
                found = (*known, path)
            if not path:
                return found
            path = path.rpartition("/")[0]

    def seen(self, path: str) -> int:
        """The number of the newest error that somebody was told, for one who opens the file now."""
        if not self._errors:
            return 0
        with self._lock:
            found = self._newest(path)
            return 0 if found is None else found[0] - (found[2] in self._unseen)

    def since(self, path: str, seen: int) -> tuple[int, OSError | None]:
        """The error that came up since; and its number."""
        if not self._errors:
            return seen, None
        with self._lock:
            found = self._newest(path)
            if found is None or found[0] <= seen:
                return seen, None
            self._unseen.discard(found[2])
            return found[0], OSError(found[1].errno, found[1].strerror, found[1].filename)
