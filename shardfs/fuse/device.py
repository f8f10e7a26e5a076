"""One thread's end of the FUSE device."""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
import select
from time import monotonic as clock
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.storage.counters import RequestTally

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from shardfs.fuse.settings import FuseSettings

    Handler: TypeAlias = Callable[[int, int, int], None]
    """Answers one kind of request. Arguments: the request's unique number, its node number, its length in bytes."""

log = logging.getLogger("shardfs.fuse")


class Device:
    """Reads requests into the buffer `request` and sends replies. For one thread, whose counters are `tally`."""

    def __init__(self, fd: int, settings: FuseSettings) -> None:
        self._fd, self.encoder, self.tally = fd, settings.encoder(), RequestTally()
        # Without a request to read, `os.read` raises; FileIO returns None, which saves half a microsecond per poll.
        file = io.FileIO(fd, "r+", closefd=False)
        self.receive: Callable[[memoryview], int | None] = file.readinto
        self.request = memoryview(mmap.mmap(-1, protocol.REQUEST_BUFFER))
        self._poll_s = settings.poll_us / 1e6
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)
        self._dense = False  # whether the last request came within `poll_us`

    def copy_of_request(self) -> bytes:
        """A copy of the request in the buffer."""
        return bytes(self.request[: protocol.HEADER_IN.unpack_from(self.request)[0]])

    def poll(self) -> int | None:
        """Wait for a request on a device that does not block.

        While requests come densely, look for the next one for `poll_us` before sleeping. Return the size of a request
        read meanwhile, or None after sleeping: then a request can be read.
        """
        began = clock()
        while self._dense and clock() - began < self._poll_s:
            os.sched_yield()
            size = self.receive(self.request)
            if size is not None:
                return size
        self._poller.poll()
        self._dense = clock() - began < self._poll_s
        return None

    def send(self, reply: memoryview | bytes | bytearray) -> bool:
        """Send a reply; False if the kernel does not wait for it any more."""
        try:
            os.write(self._fd, reply)
        except OSError as failure:
            return self._not_sent(failure)
        return True

    def send_data(self, unique: int, body: memoryview | bytes) -> bool:
        """Send a reply that consists of a header and `body`; False as in `send`."""
        try:
            os.writev(self._fd, (protocol.data(unique, len(body)), body))
        except OSError as failure:
            return self._not_sent(failure)
        return True

    def _not_sent(self, failure: OSError) -> bool:
        # ENOENT: the client was interrupted. ENODEV: the mount has ended.
        if failure.errno not in (errno.ENOENT, errno.ENODEV):
            log.error("cannot send a reply to the kernel: %s", failure)
        return False
