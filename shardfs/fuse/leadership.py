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
from time import monotonic as clock
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.fuse.polling import DENSE
from shardfs.model.errors import ShardfsError, errno_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.polling import Polling
    from shardfs.storage.counters import RequestTally

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
    """The threads of a server, and which of them leads.

    A thread's own request loop says whether the thread leads. Threads of other parts of the program have no loop.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._ended = False
        self._idle = 0
        self._loops: list[RequestLoop] = []  # one for each thread
        self._thread = threading.local()  # `loop`: the request loop of this thread
        self._postponed: deque[tuple[bytes, float]] = deque()  # requests, each with the time when it was postponed
        self._error_log = ErrorLog()
        self._mutex = threading.Lock()  # guards the number of idle threads and the postponed requests
        # Held by the leader. Acquired by the thread that becomes the leader, released by the thread that was.
        self._leadership = threading.Lock()
        self._leadership.acquire()

    def start(self, make_loop: Callable[[], RequestLoop], on_end: Callable[[], object]) -> None:
        """Begin to serve, in new threads. Raise RuntimeError or OSError if no thread can be started.

        Args:
            make_loop: makes the request loop of a new thread.
            on_end: called once, in the thread that was the last leader, when the mount has ended.
        """
        self._make_loop = make_loop
        self._on_end = on_end
        self._add_thread()
        self._leadership.release()

    def waiting(self) -> None:
        """Hand leadership over, since the request of this thread is about to wait.

        If all other threads wait already, the request is postponed until one of them is free, and `Postponed` is
        raised. In a thread that does not lead, and if there can be no other thread, this does nothing.
        """
        loop: RequestLoop | None = getattr(self._thread, "loop", None)
        if loop is None or not loop.leading:
            return
        if not self._idle and len(self._loops) < self._max_threads:
            self._try_to_add_thread()
        with self._mutex:
            if not self._idle:
                if len(self._loops) == 1:
                    return
                self._postponed.append((loop.copy_of_request(), clock()))
                raise Postponed
        loop.resign()
        self._leadership.release()

    def load(self) -> dict[str, int]:
        """The numbers of `threads`, of those `waiting` for the store, and of `postponed` requests, by these names."""
        with self._mutex:
            threads = len(self._loops)
            return {
                "threads": threads,
                "waiting": max(threads - self._idle - 1, 0),
                "postponed": len(self._postponed),
            }

    def tallies(self) -> list[RequestTally]:
        """The request counters of all threads, which continue to count."""
        return [loop.tally for loop in list(self._loops)]

    def is_alone(self) -> bool:
        """Return whether no thread but the leader works on a request. Takes no lock, so it may be outdated at once."""
        return len(self._loops) - self._idle == 1

    def _try_to_add_thread(self) -> None:
        try:
            self._add_thread()
        except (RuntimeError, MemoryError, OSError) as e:
            if self._error_log.is_due("no thread"):
                log.warning(
                    "cannot start thread %d of %d to answer requests: %s; requests wait for the other threads. "
                    "Raise `ulimit -u` or the limits of the container, or lower -o threads",
                    len(self._loops) + 1, self._max_threads, e,
                )  # fmt: skip

    def _add_thread(self) -> None:
        """Start an idle thread. Only the leader calls this."""
        loop = self._make_loop()
        name = f"shardfs-{len(self._loops) + 1}"
        threading.Thread(target=self._serve, args=(loop,), name=name, daemon=True).start()
        with self._mutex:  # the new thread waits for leadership until it is counted
            self._loops.append(loop)
            self._idle += 1

    def _serve(self, loop: RequestLoop) -> None:
        self._thread.loop = loop
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
            if loop.lead():
                return True
            self._ended = True
            self._on_end()
        self._leadership.release()  # wakes the next thread, which ends as well
        return False


class RequestLoop:
    """Answers the requests of one thread.

    Attributes:
        leading: whether this thread leads, from the begin of `lead` until `resign` or the end of the mount.
        tally: the request counters of this thread.

    Args:
        handlers: by opcode. What a handler raises is sent to the client as an errno, and logged.
        polling: polls before this thread sleeps, while one thread of a client asks densely.
    """

    def __init__(self, device: Device, handlers: Sequence[Handler], polling: Polling, error_log: ErrorLog) -> None:
        self.leading = False
        self.tally = device.tally
        self.copy_of_request = device.copy_of_request
        self._resigned = 0.0
        self._device = device
        self._handlers = handlers
        self._polling = polling
        self._error_log = error_log

    def resign(self) -> None:
        """Stop leading after the present request, which is about to wait."""
        self.leading = False
        self._resigned = clock()

    def lead(self) -> bool:
        """Read and answer requests. Return True after another thread took the lead.

        Its last request has then been answered without the lead. Return False when the mount has ended, or if requests
        cannot be read, which is logged. The caller has taken the lead.
        """
        self.leading = True
        opcode = self._answer_requests()
        if self.leading:
            self.leading = False
            return False
        self.tally.times[opcode].add(clock() - self._resigned)
        return True

    def _answer_requests(self) -> int:
        """Return the opcode of the request that made this thread resign, or the last one before the mount ended."""
        receive = self._device.receive
        request = self._device.request
        header = protocol.HEADER_IN.unpack_from
        handlers, calls, timed, opcode = self._handlers, self.tally.calls, TIMED, 0
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
                break
            if not size:
                break
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
        return opcode

    def _answer_timed(self, opcode: int, unique: int, node: int, size: int) -> None:
        start = clock()
        self.tally.calls[opcode] = 0
        self.tally.rounds[opcode] += 1
        self._answer(opcode, unique, node, size)
        if self.leading:
            self.tally.times[opcode].add(clock() - start, TIMED)

    def answer(self, request: bytes, since: float) -> None:
        """Answer a postponed request, which may wait, because this thread does not lead. Errors go to the client.

        `since`: when it was postponed, in seconds of `time.monotonic`.
        """
        self._device.request[: len(request)] = request
        _, opcode, unique, node, _ = protocol.HEADER_IN.unpack_from(request)
        self._answer(opcode, unique, node, len(request))
        self.tally.times[opcode].add(clock() - since)

    def _answer(self, opcode: int, unique: int, node: int, size: int) -> None:
        try:
            self._handlers[opcode](unique, node, size)
        except BaseException as failure:  # noqa: BLE001 - sent to the client, and logged
            self._fail(opcode, unique, node, failure)

    def _fail(self, opcode: int, unique: int, node: int, failure: BaseException) -> None:
        if isinstance(failure, Postponed):
            return
        number = errno_of(failure)
        self.tally.errors[opcode, number] += 1
        self._device.send(protocol.error_reply(unique, number))
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
