"""The access log: each request as a line of JSON. Written as requests are answered, by whoever answers them."""

from __future__ import annotations

import errno
import json
import os
import time
from typing import TYPE_CHECKING

from shardfs.errors import errno_of
from shardfs.fuse import lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.server import Handler


class AccessLog:
    """One file. Lines of several threads do not mix: each is one write to its end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> AccessLog:
        """Append to the file, which others may not read: it tells who reads what."""
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, told: dict[str, object]) -> None:
        """One line. A full disk must not stop the mount."""
        try:
            os.write(self._fd, json.dumps(told).encode() + b"\n")
        except OSError:
            return


class Noting:
    """Notes what one thread answers, for the access log."""

    def __init__(self, log: AccessLog, request: memoryview, path_of: Callable[[int], str]) -> None:
        self._log, self._request, self._path_of = log, request, path_of
        self._errno = self._bytes = 0

    def reply(self, reply: memoryview | bytes | bytearray) -> None:
        """A reply is about to be sent."""
        self._bytes = len(reply) - lowlevel.HEADER_SIZE
        self._errno = -lowlevel.HEADER_OUT.unpack_from(reply)[1]
        if lowlevel.tells_absence(reply):
            self._errno = errno.ENOENT

    def body(self, size: int) -> None:
        """The same of one with so many bytes of data."""
        self._bytes, self._errno = size, 0

    def around(self, opcode: int, handler: Handler) -> Handler:
        """The handler, with a line for each request."""
        name = lowlevel.NAMES.get(opcode, str(opcode))

        def noted(unique: int, node: int, size: int) -> None:
            self._errno = self._bytes = 0
            # Before the request is answered: a thread that waits may find the next one in its place.
            told = {"time": time.time(), "op": name, **self._asked(opcode, node, size)}
            began = time.monotonic()
            try:
                handler(unique, node, size)
            except Exception as e:
                self._errno = errno_of(e)
                raise
            finally:
                seconds = round(time.monotonic() - began, 7)
                self._log.write({**told, "errno": self._errno, "bytes": self._bytes, "seconds": seconds})

        return noted

    def _asked(self, opcode: int, node: int, size: int) -> dict[str, object]:
        uid, gid, pid = lowlevel.CALLER_IN.unpack_from(self._request, lowlevel.CALLER)
        path = self._path_of(node) if opcode not in (lowlevel.FORGET, lowlevel.BATCH_FORGET) else ""
        told: dict[str, object] = {"uid": uid, "gid": gid, "pid": pid, "node": node, "path": path}
        if (before := _NAMED.get(opcode)) is not None:
            name, _, new = bytes(self._request[lowlevel.BODY + before : size - 1]).partition(b"\0")
            told["name"] = os.fsdecode(name)
            if opcode in (lowlevel.RENAME, lowlevel.RENAME2):
                told["new"] = os.fsdecode(new)
        elif opcode in _RANGED:
            told["offset"], told["size"] = lowlevel.READ_IN.unpack_from(self._request, lowlevel.BODY)
        return told


_NAMED = {
    lowlevel.LOOKUP: 0,
    lowlevel.UNLINK: 0,
    lowlevel.RMDIR: 0,
    lowlevel.SYMLINK: 0,
    lowlevel.CREATE: lowlevel.CREATE_IN.size,
    lowlevel.MKNOD: lowlevel.MKNOD_IN.size,
    lowlevel.MKDIR: lowlevel.MKDIR_IN.size,
    lowlevel.RENAME: lowlevel.RENAME_IN.size,
    lowlevel.RENAME2: lowlevel.RENAME2_IN.size,
    lowlevel.LINK: lowlevel.LINK_IN.size,
    lowlevel.GETXATTR: lowlevel.GETXATTR_IN.size,
    lowlevel.SETXATTR: lowlevel.SETXATTR_IN.size,
}
"""What has a name, and how many bytes come before it."""

_RANGED = {lowlevel.READ, lowlevel.WRITE, lowlevel.READDIR, lowlevel.READDIRPLUS}
