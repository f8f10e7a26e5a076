"""Mounts of stores that delay, hang, cut, refuse: what is known is answered within a second, and the end comes soon.

The stores are tests/clients/faulty.py: one whose calls block, and one of coroutines.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.conftest import mount_entry, unmount
from tests.datasets import ROOT
from tests.mount.programs import PLAIN_ENVIRONMENT, attempt, end, run
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.datasets import Dataset

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

TIMEOUT_S = 1
"""Of the mounts' stores; an operation takes twice that at most."""

WARM = "c/0/0/0"
READERS = 24
"""More than the daemon has threads."""


class Faulty:
    """A mount of a store that does what it is told."""

    def __init__(self, mount: Path, twin: Path, faults: Path, process: subprocess.Popen[str]) -> None:
        self.mount, self.twin, self._faults, self.process = mount, twin, faults, process

    def tell(self, fault: str) -> None:
        self._faults.with_suffix(".new").write_text(fault)
        self._faults.with_suffix(".new").rename(self._faults)

    def slowest(self, seconds: float) -> dict[str, float]:
        """Seconds the slowest answers took to what the mount knows."""
        probe, file = ROOT / "tests/clients/probe.py", self.mount / WARM
        out = run(sys.executable, "-IS", probe, self.mount, file, str(seconds), timeout=seconds + 20)
        told: dict[str, float] = json.loads(out)
        return told if told.pop("rounds") > 5 else {"all": seconds}

    def cold(self) -> list[str]:
        """Chunks of shards that were not met, of which there are enough for all readers."""
        return [f"c/{x}/{y}/{z}" for x in range(4, 8) for y in range(5) for z in (0, 2)][:READERS]


@contextmanager
def reading(faulty: Faulty, names: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        cats = []
        for name in names:
            command = ["cat", str(faulty.mount / name)]
            cat = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN_ENVIRONMENT)
            stack.callback(_leave, cat)
            cats.append(cat)
        yield cats


def _leave(cat: subprocess.Popen[bytes]) -> None:
    if cat.poll() is None:
        end(cat, signal.SIGKILL)
    for stream in (cat.stdout, cat.stderr):
        if stream is not None:
            stream.close()


Mounts = Callable[..., AbstractContextManager[Faulty]]


@pytest.fixture(params=["faulty", "faultyasync"])
def mounts(request: pytest.FixtureRequest, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> Mounts:
    """`with mounts() as faulty`, once or more."""
    variant = dataset("zarr3", "zarr_python")
    return partial(_mounted, request.param, variant, tmp_path)


@pytest.fixture
def faulty(mounts: Mounts) -> Iterator[Faulty]:
    with mounts() as mount:
        yield mount


@contextmanager
def _mounted(
    protocol: str, variant: Dataset, scratch: Path, timeout_s: float = TIMEOUT_S, more: str = ""
) -> Iterator[Faulty]:
    mount, faults = scratch / "mnt", scratch / "faults"
    mount.mkdir(exist_ok=True)
    faults.write_text("ok")
    words = f"store_timeout={timeout_s},store_retries=3{more}"
    command = [sys.executable, "-m", "tests.clients.faulty", "mount", "-f", "-o", words]
    command += [f"{protocol}://{variant.path}", str(mount)]
    environment = {**os.environ, "FAULTS": str(faults)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    faulty_mount = Faulty(mount, variant.twin, faults, process)
    try:
        wait_until(lambda: mount_entry(mount) is not None or process.poll() is not None)
        assert mount_entry(mount) is not None, process.communicate()[1]
        # What is to be known: a chunk, its shard's index, and the directory. On a busy machine the store is late, too.
        wait_until(lambda: attempt("cmp", mount / WARM, variant.twin / WARM).returncode == 0)
        wait_until(lambda: attempt("ls", mount).returncode == 0)
        yield faulty_mount
    finally:
        faulty_mount.tell("ok")
        end(process)
        assert process.stderr is not None
        process.stderr.close()
        unmount(mount)


@pytest.mark.parametrize("fault", ["delay", "hang", "cut", "storm", "some"])
def test_what_is_known_is_answered_whatever_the_store_does(fault: str, mounts: Mounts) -> None:
    """With `direct_io`, shardfs keeps each chunk that was read; otherwise it leaves whole chunks to the kernel."""
    for more_tries in reversed(range(6)):  # of which one must find the machine with time for it
        with mounts(TIMEOUT_S if fault == "hang" else 30, ",direct_io") as faulty:
            slowest = _slowest_during(fault, faulty)
        if max(slowest.values()) < 1:
            break
        assert more_tries, slowest


def _slowest_during(fault: str, faulty: Faulty) -> dict[str, float]:
    names = faulty.cold()
    faulty.tell(fault)
    with reading(faulty, names) as cats:
        slowest = faulty.slowest(2)
        outcomes = [cat.communicate(timeout=250) for cat in cats]
    if fault in ("delay", "some"):
        assert [out for out, _ in outcomes] == [(faulty.twin / name).read_bytes() for name in names]
        return slowest
    assert [out for out, _ in outcomes] == [b""] * len(names)  # never a part of a chunk
    expected = os.strerror(errno.ETIMEDOUT if fault == "hang" else errno.EIO)
    assert {said.decode().strip().rsplit(": ", 1)[-1] for _, said in outcomes} == {expected}
    faulty.tell("ok")
    for name in names[:3]:  # damage is remembered for five seconds
        wait_until(partial(_is_right, faulty, name))
    return slowest


def _is_right(faulty: Faulty, name: str) -> bool:
    return attempt("cmp", faulty.mount / name, faulty.twin / name).returncode == 0


def test_a_hung_store_gives_errors_within_the_time_that_was_set(faulty: Faulty) -> None:
    faulty.tell("hang")
    start_s = time.monotonic()
    with reading(faulty, faulty.cold()) as cats:
        for cat in cats:
            cat.communicate(timeout=250)
    # Twice the time-out for those that had a thread; the others are told at once, or after one probe.
    assert time.monotonic() - start_s < 4 * TIMEOUT_S + 10


@pytest.mark.parametrize(
    ("mounts", "number"), [("faulty", signal.SIGTERM), ("faultyasync", signal.SIGINT)], indirect=["mounts"]
)
def test_a_hung_store_does_not_hold_up_the_end(number: signal.Signals, faulty: Faulty) -> None:
    faulty.tell("hang")
    with reading(faulty, faulty.cold()) as cats:
        time.sleep(0.5)
        start_s = time.monotonic()
        faulty.process.send_signal(number)
        wait_until(lambda: mount_entry(faulty.mount) is None)
        faulty.process.wait(30)
        assert time.monotonic() - start_s < 20
        for cat in cats:
            cat.communicate(timeout=250)


def test_unmounting_by_force_does_not_wait_for_the_store(faulty: Faulty) -> None:
    faulty.tell("hang")
    with reading(faulty, faulty.cold()) as cats:
        time.sleep(0.3)
        start_s = time.monotonic()
        completed = attempt(sys.executable, "-m", "shardfs", "umount", "--lazy", faulty.mount, timeout=120, cwd=ROOT)
        assert completed.returncode == 0, completed.stderr
        assert mount_entry(faulty.mount) is None
        assert time.monotonic() - start_s < 20
        for cat in cats:
            cat.communicate(timeout=250)
    faulty.process.wait(20)


def test_a_source_that_hangs_is_not_mounted(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    """The daemon says so itself, before the time in which it must be ready is over."""
    mount, faults = tmp_path / "mnt", tmp_path / "faults"
    mount.mkdir()
    faults.write_text("hang")
    source = f"faultyasync://{dataset('zarr3', 'zarr_python').path}"
    command = [sys.executable, "-m", "tests.clients.faulty", "mount", "-o", "store_timeout=0.5", source, str(mount)]
    completed = attempt(*command, timeout=120, cwd=ROOT, env={**os.environ, "FAULTS": str(faults)})
    assert completed.returncode == 3, completed.stderr
    assert "does not answer within 0.5 s" in completed.stderr
    assert mount_entry(mount) is None
