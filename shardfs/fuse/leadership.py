"""Which thread reads requests: exactly one, the leader.

Before a request waits (for the store or a disk), its thread hands leadership over to another thread and finishes the
request on its own. So requests that can be answered from memory never pay for a thread switch, and never queue behind
one that waits. See docs/concurrency.md.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from math import inf
from threading import get_ident
from time import monotonic as clock
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.fuse.polling import DENSE
from shardfs.model.errors import ShardfsError, errno_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.polling import Polling

log = logging.getLogger("shardfs.fuse")

TIMED = 64
"""Of requests that do not wait, one in so many of each kind is timed."""

_EVERYDAY = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENODATA, errno.EOPNOTSUPP, errno.ERANGE, errno.EEXIST,
    errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EPERM, errno.EXDEV,
}  # fmt: skip
"""The errors that are ordinary answers to clients, and thus not logged."""


class Postponed(BaseException):
    """The request was queued to be answered later, from its beginning. Error handlers must not catch this."""


class Leadership:
    """The threads of a server, and which of them leads."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._leader: RequestLoop | None = None
        self._ended = False
        self._threads = self._idle = 0
        self._postponed: deque[tuple[bytes, float]] = deque()
        self._mutex = threading.Lock()  # guards the numbers of threads and the postponed requests
        # Held by the leader. Acquired by the thread that becomes the leader, released by the thread that was.
        self._leadership = threading.Lock()
        self._leadership.acquire()

    def start(self, make_loop: Callable[[], RequestLoop], on_end: Callable[[], object]) -> None:
        """Begin to serve.

        Args:
            make_loop: makes the request loop of a new thread; called in that thread.
            on_end: called once, in the leader, when the mount has ended.
        """
        self._make_loop, self._on_end = make_loop, on_end
        self._find_follower(bytes)
        self._leadership.release()

    def waiting(self) -> None:
        """Hand leadership over, since the request of this thread is about to wait.

        If all other threads wait already, the request is postponed until one of them is free, and `Postponed` is
        raised. In a thread that does not lead, and with a single thread, this does nothing.
        """
        leader = self._leader
        if leader is None or leader.ident != get_ident() or self._max_threads == 1:
            return
        if not self._find_follower(leader.copy_of_request):
            raise Postponed
        leader.leading, leader.since = False, clock()
        self._leader = None
        self._leadership.release()

    def postpone(self, request: bytes) -> None:
        """Queue a request behind those that wait for a free thread."""
        with self._mutex:
            self._postponed.append((request, clock()))

    def load(self) -> dict[str, int]:
        """The numbers of threads, of those that wait for the store, and of requests that wait for a free thread."""
        with self._mutex:
            busy = max(self._threads - self._idle - 1, 0)
            return {"threads": self._threads, "waiting": busy, "postponed": len(self._postponed)}

    def is_alone(self) -> bool:
        """Return whether no thread but the leader works on a request."""
        return self._threads - self._idle == 1

    def _find_follower(self, copy_of_request: Callable[[], bytes]) -> bool:
        """Return True if a thread is idle or can be made. Otherwise postpone the request and return False."""
        with self._mutex:
            if self._idle:
                return True
            if self._threads == self._max_threads:
                self._postponed.append((copy_of_request(), clock()))
                return False
            self._threads += 1
            self._idle += 1
        threading.Thread(target=self._work, name=f"shardfs-{self._threads}", daemon=True).start()
        return True

    def _work(self) -> None:
        loop = self._make_loop()
        while self._lead(loop):
            while (request := self._next_postponed()) is not None:
                loop.answer(*request)

    def _next_postponed(self) -> tuple[bytes, float] | None:
        """The next postponed request, for a thread that is free. Without one, the thread counts as idle."""
        with self._mutex:
            if self._postponed:
                return self._postponed.popleft()
            self._idle += 1
            return None

    def _lead(self, loop: RequestLoop) -> bool:
        """Wait for leadership and lead. True after another thread took the lead, False when the mount has ended."""
        self._leadership.acquire()
        with self._mutex:
            self._idle -= 1
        if not self._ended:
            self._leader, loop.leading = loop, True
            if loop.lead():
                return True
            self._ended = True
            self._on_end()
        self._leadership.release()  # wakes the next thread, which ends as well
        return False


class RequestLoop:
    """Answers requests in the thread that made it.

    `leading` and `since` are written by `Leadership` while a request is being answered: `leading` becomes False when
    the request is about to wait, and `since` is that moment.

    Args:
        handlers: by opcode.
        polling: polls before this thread sleeps, while one thread of a client asks densely.
        postpone: queues a copy of a request to be answered later.
    """

    def __init__(
        self,
        device: Device,
        handlers: Sequence[Handler],
        polling: Polling,
        error_log: ErrorLog,
        postpone: Callable[[bytes], None],
    ) -> None:
        self.ident = get_ident()
        self.leading, self.since = False, 0.0
        self.copy_of_request = device.copy_of_request
        self._device, self._handlers, self._tally = device, handlers, device.tally
        self._polling, self._error_log, self._postpone = polling, error_log, postpone

    def lead(self) -> bool:
        """Read and answer requests. Return True after another thread took the lead, False when the mount has ended."""
        receive, request, header = self._device.receive, self._device.request, protocol.HEADER_IN.unpack_from
        handlers, calls, timed, opcode = self._handlers, self._tally.calls, TIMED, 0
        poll, client, unpolled = self._polling.poll, 0, DENSE
        while self.leading:
            try:
                if not unpolled:
                    unpolled = poll()
                size = receive(request)
            except OSError as failure:
                if failure.errno == errno.ENOENT:  # the client was interrupted while we read its request
                    continue
                if failure.errno != errno.ENODEV:
                    log.error("cannot read requests from the kernel: %s", failure)
                return False
            if not size:
                return False
            _, opcode, unique, node, thread = header(request)
            if thread != client:
                if thread:
                    client, unpolled = thread, DENSE if unpolled < DENSE else unpolled  # `max` takes 0.1 us
            elif unpolled:
                unpolled -= 1
            nth = calls[opcode] + 1  # Python has the integers up to 256 ready: four times as fast as larger ones
            if nth == timed:
                self._answer_timed(opcode, unique, node, size)
                continue
            calls[opcode] = nth
            try:
                handlers[opcode](unique, node, size)
            except BaseException as failure:  # noqa: BLE001 - sent to the client, and logged
                self._fail(opcode, unique, node, failure)
        self._tally.times[opcode].add(clock() - self.since)
        return True

    def _answer_timed(self, opcode: int, unique: int, node: int, size: int) -> None:
        began = clock()
        self._tally.calls[opcode] = 0
        self._tally.rounds[opcode] += 1
        self._answer(opcode, unique, node, size)
        if self.leading:
            self._tally.times[opcode].add(clock() - began, TIMED)

    def answer(self, request: bytes, since: float) -> None:
        """Answer a request that was postponed at the time `since`. It may wait."""
        self._device.request[: len(request)] = request
        _, opcode, unique, node, _ = protocol.HEADER_IN.unpack_from(request)
        self._answer(opcode, unique, node, len(request))
        self._tally.times[opcode].add(clock() - since)

    def _answer(self, opcode: int, unique: int, node: int, size: int) -> None:
        try:
            self._handlers[opcode](unique, node, size)
        except BaseException as failure:  # noqa: BLE001 - sent to the client, and logged
            self._fail(opcode, unique, node, failure)

    def _fail(self, opcode: int, unique: int, node: int, failure: BaseException) -> None:
        if isinstance(failure, Postponed):
            # `Leadership` has queued the leader's request. A thread that does not lead gets this exception when it
            # waited for a load of the leader that was given up; then its own request is not queued yet.
            if not self.leading:
                self._postpone(self.copy_of_request())
            return
        number = errno_of(failure)
        self._tally.errors[opcode, number] += 1
        self._device.send(protocol.error(unique, number))
        if isinstance(failure, OSError | ShardfsError):
            self._error_log.warn(failure)
        elif self._error_log.is_due(repr(failure)):
            name = protocol.NAMES.get(opcode, str(opcode))
            log.error("%s of node %d failed because of a bug in shardfs", name, node, exc_info=failure)


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
