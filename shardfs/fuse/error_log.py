"""Logs why requests failed, since programs only see an errno."""

from __future__ import annotations

import errno
import logging
from math import inf
from time import monotonic as clock

log = logging.getLogger("shardfs.fuse")


class ErrorLog:
    """Logs each message at most once a minute: a broken shard that is read in a loop must not fill the log."""

    AGAIN_S = 60.0
    KEPT = 1000

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def warn(self, failure: Exception) -> None:
        """Log the reason of a failed request, unless its errno is an everyday answer such as ENOENT."""
        if (isinstance(failure, OSError) and failure.errno in _EVERYDAY) or isinstance(failure, FileNotFoundError):
            return
        message = str(failure) or repr(failure)
        if self.is_due(message):
            log.warning("%s", message)

    def is_due(self, message: str) -> bool:
        """Return whether this message was not logged within the last minute, and count it as logged now."""
        now = clock()
        if now - self._logged.get(message, -inf) < self.AGAIN_S:
            return False
        if len(self._logged) >= self.KEPT:
            self._logged.clear()
        self._logged[message] = now
        return True


_EVERYDAY = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENODATA, errno.EOPNOTSUPP, errno.ERANGE, errno.EEXIST,
    errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EPERM, errno.EXDEV,
}  # fmt: skip
