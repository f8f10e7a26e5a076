"""One thread's end of the FUSE device."""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
from typing import TYPE_CHECKING, Protocol

from shardfs.fuse import protocol
from shardfs.storage.counters import RequestTally

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from shardfs.fuse.settings import FuseSettings

    Handler: TypeAlias = Callable[[int, int, int], None]
    """Answers one kind of request. Arguments: the request's unique number, its node number, its length in bytes."""

log = logging.getLogger("shardfs.fuse")


class Requests(Protocol):
    """Answers some kinds of requests to one tree, in one thread."""

    def handlers(self) -> dict[int, Handler]:
        """The handler of each kind, by opcode. A handler sends one reply, or raises an exception, and then the caller
        replies with its errno (`errno_of`)."""


class Device:
    """Reads requests into the buffer `request` and sends replies. For one thread.

    Attributes:
        encoder: makes replies for this thread.
        tally: the counters of the thread.
        receive: reads the next request into a buffer, and returns its length; 0 or None at the end of the mount.
        request: the buffer, whose content is valid until the next request is read.

    Args:
        fd: the descriptor of the session, which must stay open.
    """

    def __init__(self, fd: int, settings: FuseSettings) -> None:
        self._fd = fd
        self.encoder = settings.encoder()
        self.tally = RequestTally()
        self.receive: Callable[[memoryview], int | None] = io.FileIO(fd, "r+", closefd=False).readinto
        self.request = memoryview(mmap.mmap(-1, protocol.REQUEST_BUFFER))

    def copy_of_request(self) -> bytes:
        """A copy of the whole request in the buffer."""
        return bytes(self.request[: protocol.HEADER_IN.unpack_from(self.request)[0]])

    def send(self, reply: memoryview | bytes | bytearray) -> bool:
        """Send a reply; False if the kernel does not wait for it any more. Other errors are logged, and give False."""
        try:
            os.write(self._fd, reply)
        except OSError as failure:
            return self._not_sent(failure)
        return True

    def send_data(self, unique: int, body: memoryview | bytes) -> bool:
        """Send the reply to request `unique` that consists of a header and `body`; False as in `send`."""
        try:
            os.writev(self._fd, (protocol.data_header(unique, len(body)), body))
        except OSError as failure:
            return self._not_sent(failure)
        return True

    def _not_sent(self, failure: OSError) -> bool:
        # ENOENT: the client was interrupted. ENODEV: the mount has ended.
        if failure.errno not in (errno.ENOENT, errno.ENODEV):
            log.error("cannot send a reply to the kernel: %s", failure)
        return False
