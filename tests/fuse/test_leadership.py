"""Three threads share the requests of a mount, in all orders in which they can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardfs.fuse import protocol
from shardfs.fuse.leadership import ErrorLog, Leadership, RequestLoop
from shardfs.fuse.polling import DENSE
from shardfs.storage.counters import OPCODES, RequestTally
from tests.scheduling import explore
from tests.virtual_threads import install, wait
from tests.write import bugs

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tests.scheduling import Schedule


class Kernel:
    """The requests of one mount. It ends when all are answered.

    `requests` has a letter for each one: `m` is answered from memory, `s` waits for the store. The store answers when
    all requests from memory have their answers: these must not wait for it.
    """

    def __init__(self, requests: str, threads: int) -> None:
        self.answers: list[int] = []
        self.tally = RequestTally()
        self.reading = 0
        self.ends = 0
        self.most_waiting = 0
        self.leadership = Leadership(threads)
        self._requests = requests
        self._threads = threads
        self._sent = 0

    def start(self) -> None:
        self.leadership.start(self._make_loop, self._end)

    def _make_loop(self) -> RequestLoop:
        device: Any = Device(self)
        polling: Any = NoPolling()
        return RequestLoop(device, [device.answer] * OPCODES, polling, ErrorLog())

    def _end(self) -> None:
        self.ends += 1

    def next_request(self) -> int | None:
        """Wait for a request; None when the mount has ended. Only one thread may read at a time."""
        self.reading += 1
        assert self.reading == 1, "two threads read requests"
        wait(lambda: self._sent < len(self._requests) or self._is_done())
        self.reading -= 1
        if self._sent == len(self._requests):
            return None
        self._sent += 1
        return self._sent - 1

    def answer(self, number: int) -> None:
        if self._requests[number] == "s":
            self.leadership.waiting()
            load = self.leadership.load()
            assert 0 <= load["waiting"] <= load["threads"] <= self._threads
            wait(self._memory_is_done)
        self.answers.append(number)

    def _is_done(self) -> bool:
        return len(self.answers) == len(self._requests)

    def _memory_is_done(self) -> bool:
        return {n for n, kind in enumerate(self._requests) if kind == "m"} <= set(self.answers)

    def state(self) -> Hashable:
        shared = self.leadership
        assert sum(loop.leading for loop in shared._loops) <= 1, "two threads lead"
        self.most_waiting = max(self.most_waiting, len(shared._loops) - shared._idle - 1)
        locks: Any = (shared._mutex, shared._leadership)
        loops = tuple((loop.leading, bytes(loop._device.request)) for loop in shared._loops)
        postponed = tuple(request for request, _ in shared._postponed)
        locked = tuple(lock.locked() for lock in locks)
        return (
            self._sent,
            tuple(sorted(self.answers)),
            self.reading,
            shared._idle,
            shared._ended,
            locked,
            loops,
            postponed,
        )


class Device:
    """One thread's end of the kernel. The node of a request is its number."""

    def __init__(self, kernel: Kernel) -> None:
        self.request = memoryview(bytearray(protocol.BODY))
        self.tally = kernel.tally
        self._kernel = kernel

    def receive(self, request: memoryview) -> int:
        number = self._kernel.next_request()
        if number is None:
            return 0
        protocol.HEADER_IN.pack_into(request, 0, protocol.BODY, protocol.READ, number, number, 1)
        return protocol.BODY

    def copy_of_request(self) -> bytes:
        return bytes(self.request)

    def answer(self, _unique: int, number: int, _size: int) -> None:
        self._kernel.answer(number)

    def send(self, reply: object) -> None:
        raise AssertionError(f"a request failed: {reply!r}")


class NoPolling:
    def poll(self) -> int:
        return DENSE


def try_requests(requests: str, most_waiting: int, threads: int = 3) -> int:
    """Return the number of orders in which all is answered; equal states are tried once."""
    kernels: list[Kernel] = []

    def scenario(schedule: Schedule) -> None:
        kernel = Kernel(requests, threads)
        kernels.append(kernel)
        kernel.start()
        schedule.together(state=kernel.state)
        assert schedule.blocked == [], "threads wait forever"
        assert sorted(kernel.answers) == list(range(len(requests)))
        assert kernel.ends == 1

    number = explore(scenario)
    assert max(kernel.most_waiting for kernel in kernels) == most_waiting
    return number


@pytest.mark.every_case
@pytest.mark.parametrize(("requests", "most_waiting"), [("sm", 1), ("ssm", 2), ("sms", 2), ("sssm", 2)])
def test_each_request_has_one_answer_and_none_from_memory_waits_for_the_store(
    requests: str, most_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all orders. `sssm`: all threads but the leader wait, so the third request is postponed."""
    install(monkeypatch)
    assert try_requests(requests, most_waiting) > 0


@pytest.mark.every_case
@pytest.mark.parametrize(("bug", "requests", "threads"), [
    ("a thread reads on after it has handed the lead over", "ssm", 3),
    ("a request is postponed while a thread that has found none becomes idle", "mss", 2),
])  # fmt: skip
def test_a_race_for_the_lead_is_found(bug: str, requests: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    bugs.seed(monkeypatch, bug)
    with pytest.raises(AssertionError, match=r"forever|two"):
        try_requests(requests, 1, threads)
