"""When the leader polls, shown by its own loop on a simulated device with a simulated clock; and an idle mount."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.fuse import polling, protocol
from shardfs.fuse.leadership import ErrorLog, RequestLoop
from shardfs.fuse.polling import DENSE, Polling
from shardfs.storage.counters import OPCODES, RequestTally
from tests.conftest import daemon_pid
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Mounted
    from tests.datasets import Dataset

POLL_US, ANSWER_S, LOOK_S = 100, 10e-6, 1e-6
SOON, LATE = 20e-6, 500e-6
"""Times between an answer and the next request: within `POLL_US`, and beyond."""


class Simulation:
    """Requests of threads, each some time after the answer before. `polled` has an interval for each call that polled.

    Args:
        requests: thread and gap in seconds.
        yield_s: how long another program uses the CPU when the leader yields.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, float]],
        cpus: int = 2,
        poll_us: int = POLL_US,
        yield_s: float = 0.0,
        alone: bool = True,
    ) -> None:
        self.now = self.arrival = 0.0
        self.polled: list[tuple[float, float]] = []
        self.before: list[int] = []  # the number of requests before each of `polled`
        self._requests, self._next = requests, 0
        self.request = memoryview(bytearray(64))
        self.tally = RequestTally()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(polling, "clock", lambda: self.now)
            patch.setattr("os.sched_yield", lambda: self._pass(yield_s))
            patch.setattr("os.sched_getaffinity", lambda _: range(cpus))
            self.polling = Polling(self._look, poll_us, lambda: alone)
            self._poll, self.polling.poll = self.polling.poll, self._recorded  # type: ignore[method-assign]
            device: Any = self
            loop = RequestLoop(device, [self._answer] * OPCODES, self.polling, ErrorLog())
            self._arrive()
            assert not loop.lead()

    def copy_of_request(self) -> bytes:
        return bytes(self.request)

    def receive(self, request: memoryview) -> int:
        if self._next > len(self._requests):
            return 0  # the mount has ended
        self.now = max(self.now, self.arrival)
        thread = self._requests[self._next - 1][0]
        protocol.HEADER_IN.pack_into(request, 0, protocol.BODY, protocol.LOOKUP, 2 * self._next, 1, thread)
        return protocol.BODY

    def _answer(self, _unique: int, _number: int, _size: int) -> None:
        self.now += ANSWER_S
        self._arrive()

    def _arrive(self) -> None:
        self._next += 1
        if self._next <= len(self._requests):
            self.arrival = self.now + self._requests[self._next - 1][1]

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _look(self, _timeout: int) -> bool:
        self.now += LOOK_S
        return self.now >= self.arrival

    def _recorded(self) -> int:
        start_s = self.now
        answer = self._poll()
        if self.now > start_s:
            self.polled.append((start_s, self.now))
            self.before.append(self._next - 1)
        return answer

    def polled_within(self, begin: float, end: float) -> float:
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in self.polled)


def test_polls_for_one_thread_that_asks_densely() -> None:
    simulation = Simulation([(7, SOON)] * 300)
    assert min(simulation.before) == DENSE + 1
    assert len(simulation.polled) > 250


def test_requests_without_a_thread_change_nothing() -> None:
    """The kernel sends FORGET and RELEASE without the thread of the client."""
    simulation = Simulation([(7, SOON), (0, SOON)] * 300)
    assert len(simulation.polled) > 250


@pytest.mark.parametrize("run", [1, 2, DENSE])
def test_never_polls_for_two_threads(run: int) -> None:
    assert not Simulation(([(7, SOON)] * run + [(8, SOON)] * run) * 100).polled


def test_stops_at_once_for_a_second_thread() -> None:
    requests = [(7, SOON)] * 50 + [(8, SOON), (7, SOON)] * 50
    assert max(Simulation(requests).before) <= 50


@pytest.mark.parametrize(
    "settings", [{"cpus": 1}, {"poll_us": 0}, {"alone": False}], ids=["one CPU", "switched off", "a busy worker"]
)
def test_never_polls(settings: dict[str, Any]) -> None:
    assert not Simulation([(7, SOON)] * 500, **settings).polled


def test_backs_off_while_requests_come_late() -> None:
    simulation = Simulation([(7, LATE)] * 5000)
    assert len(simulation.polled) < 20
    assert simulation.polled_within(0, simulation.now) < 0.001 * simulation.now


def test_a_second_thread_does_not_end_the_back_off() -> None:
    simulation = Simulation(([(7, LATE)] * (DENSE + 2) + [(8, LATE)] * (DENSE + 2)) * 50)
    assert len(simulation.polled) < 20


def test_polls_again_when_requests_are_dense_again() -> None:
    simulation = Simulation([(7, LATE)] * 5000 + [(7, SOON)] * 3000)
    assert sum(n > 5000 for n in simulation.before) > 1000


def test_forgets_late_requests_after_dense_ones() -> None:
    simulation = Simulation([(7, LATE)] * 5000 + [(7, SOON)] * 2000 + ([(7, LATE)] + [(7, SOON)] * 50) * 40)
    assert sum(n > 7000 for n in simulation.before) > 1000


@pytest.mark.parametrize("gap_s", [30e-6, 90e-6])
def test_polling_takes_its_share_where_it_could_take_more(gap_s: float) -> None:
    simulation = Simulation([(7, gap_s)] * 5000)
    polled = simulation.polled_within(0, simulation.now)
    assert (
        0.8 * Polling.SHARE * simulation.now < polled <= Polling.SHARE * simulation.now + Polling.BURST_S + 2 * LOOK_S
    )


def test_backs_off_while_another_program_needs_the_cpu() -> None:
    assert len(Simulation([(7, SOON)] * 1000, yield_s=0.003).polled) == 1


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 2), st.integers(0, 150)), max_size=20),
    st.integers(0, 20_000),
)
def test_polling_takes_its_share_at_most(runs: list[tuple[int, int, int]], poll_us: int) -> None:
    """At no time, whatever the length of runs, threads and gaps."""
    simulation = Simulation([(thread, gap / 1e6) for n, thread, gap in runs for _ in range(n)], poll_us=poll_us)
    slack = Polling.BURST_S + 2 * LOOK_S
    for start_s, _ in simulation.polled[::50]:
        for _, ended in simulation.polled[::50]:
            assert simulation.polled_within(start_s, ended) <= Polling.SHARE * max(ended - start_s, 0) + slack


def test_an_idle_mount_wakes_nobody(mounted: Mounted, dataset: Callable[[str, str], Dataset]) -> None:
    with mounted(dataset("zarr3", "default").path) as path:
        for file in path.rglob("*"):
            if file.is_file():
                file.read_bytes()
        pid = daemon_pid(path)
        wait_until(lambda: _slept_for(pid, 2), 30)  # on a busy machine the last replies take some time


def _slept_for(pid: int, seconds: float) -> bool:
    before = _times_asleep(pid)
    time.sleep(seconds)
    return _times_asleep(pid) == before


def _times_asleep(pid: int) -> dict[str, int]:
    """How often each thread of a process went to sleep."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        counts[task.name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
    return counts
