"""The access log: one line of JSON for each request."""

from __future__ import annotations

import errno
import json
import os
import time
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.fuse.device import Device
from shardfs.fuse.leadership import Postponed
from shardfs.model.errors import errno_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.device import Handler
    from shardfs.fuse.settings import FuseSettings


class AccessLog:
    """The file of the access log. Thread-safe: each line is one write with O_APPEND."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> AccessLog:
        """The log in the file at `path`, open for the rest of the process. Raise OSError if that is not possible.

        A new file is readable by its owner only, since it shows which user reads which file.
        """
        return cls(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, line: dict[str, object]) -> None:
        """Append one line, as JSON. Errors are ignored: a full disk must not stop the mount."""
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except OSError:
            return


class RecordingDevice(Device):
    """A device that writes each request and its result to the access log. For one thread.

    `path_of` gives the path of a node on the mount, "" if it is unknown.
    """

    def __init__(self, fd: int, settings: FuseSettings, log: AccessLog, path_of: Callable[[int], str]) -> None:
        super().__init__(fd, settings)
        self._log = log
        self._path_of = path_of
        self._errno = self._bytes = 0  # of the reply sent last

    def send(self, reply: memoryview | bytes | bytearray) -> bool:
        self._bytes = len(reply) - protocol.HEADER_SIZE
        self._errno = -protocol.HEADER_OUT.unpack_from(reply)[1]
        if protocol.is_cached_absence(reply):
            self._errno = errno.ENOENT
        return super().send(reply)

    def send_data(self, unique: int, body: memoryview | bytes) -> bool:
        self._bytes = len(body)
        self._errno = 0
        return super().send_data(unique, body)

    def recorded(self, opcode: int, handler: Handler) -> Handler:
        """A handler that calls `handler`, raises what it raises, and adds a line to the log after each request."""
        name = protocol.NAMES.get(opcode, str(opcode))

        def answer(unique: int, node: int, size: int) -> None:
            self._errno = self._bytes = 0
            # Described before the handler runs: afterwards the node may have another path.
            line = {"time": time.time(), "op": name, **self._described(opcode, node, size)}
            start = time.monotonic()
            try:
                handler(unique, node, size)
            except Postponed:  # the request is answered later, from its beginning, and gets its line then
                raise
            except BaseException as e:
                self._record(line, errno_of(e), start)
                raise
            self._record(line, self._errno, start)

        return answer

    def _record(self, line: dict[str, object], number: int, start: float) -> None:
        seconds = round(time.monotonic() - start, 7)
        self._log.write({**line, "errno": number, "bytes": self._bytes, "seconds": seconds})

    def _described(self, opcode: int, node: int, size: int) -> dict[str, object]:
        uid, gid, pid = protocol.CALLER_IN.unpack_from(self.request, protocol.CALLER)
        path = self._path_of(node) if opcode not in (protocol.FORGET, protocol.BATCH_FORGET) else ""
        fields: dict[str, object] = {"uid": uid, "gid": gid, "pid": pid, "node": node, "path": path}
        if (before := _BEFORE_NAME.get(opcode)) is not None:
            name, _, new = bytes(self.request[protocol.BODY + before : size - 1]).partition(b"\0")
            fields["name"] = os.fsdecode(name)
            if opcode in (protocol.RENAME, protocol.RENAME2):
                fields["new"] = os.fsdecode(new)
        elif opcode in _RANGED:
            fields["offset"], fields["size"] = protocol.READ_IN.unpack_from(self.request, protocol.BODY)
        return fields


_BEFORE_NAME = {
    protocol.LOOKUP: 0,
    protocol.UNLINK: 0,
    protocol.RMDIR: 0,
    protocol.SYMLINK: 0,
    protocol.CREATE: protocol.CREATE_IN.size,
    protocol.MKNOD: protocol.MKNOD_IN.size,
    protocol.MKDIR: protocol.MKDIR_IN.size,
    protocol.RENAME: protocol.RENAME_IN.size,
    protocol.RENAME2: protocol.RENAME2_IN.size,
    protocol.LINK: protocol.LINK_IN.size,
    protocol.GETXATTR: protocol.GETXATTR_IN.size,
    protocol.SETXATTR: protocol.SETXATTR_IN.size,
}
"""Requests that carry a name: how many bytes of the body precede the name."""

_RANGED = {protocol.READ, protocol.WRITE, protocol.READDIR, protocol.READDIRPLUS}
