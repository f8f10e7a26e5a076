"""What stands behind the errnos that programs are told, for the log."""

from __future__ import annotations

import errno
import logging
from math import inf
from time import monotonic as clock

log = logging.getLogger("shardfs.fuse")


class Complaints:
    """Says each thing once in a while: a broken shard that is read in a loop must not fill the log."""

    AGAIN_S = 60.0
    KEPT = 1000

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def about(self, failure: Exception) -> None:
        """Log what stands behind an errno, unless it is an ordinary answer."""
        if (isinstance(failure, OSError) and failure.errno in _ORDINARY) or isinstance(failure, FileNotFoundError):
            return
        message = str(failure) or repr(failure)
        if self.are_due(message):
            log.warning("%s", message)

    def are_due(self, message: str) -> bool:
        """Whether this was not said for a while."""
        now = clock()
        if now - self._said.get(message, -inf) < self.AGAIN_S:
            return False
        if len(self._said) >= self.KEPT:
            self._said.clear()
        self._said[message] = now
        return True


_ORDINARY = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENODATA, errno.EOPNOTSUPP, errno.ERANGE, errno.EEXIST,
    errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EPERM, errno.EXDEV,
}  # fmt: skip
