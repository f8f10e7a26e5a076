"""T16: a long time under load, with kills: nothing is lost, and the daemon does not grow.

It takes `SHARDFS_SOAK` minutes, if that is set, else `SHARDFS_TORTURE` of them. In the first quarter of that the daemon
is killed every few seconds; then one daemon has to last.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import linear_regression, median
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.conftest import _run
from tests.datasets import ROOT
from tests.write.mounts import WritableMount, client, succeeded, writable
from tests.write.oracle import Oracle
from tests.write.scale import times
from tests.write.targets import TARGETS, Target
from tests.write.test_many_writers import _hammered, made

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow, pytest.mark.torture]

MINUTES = float(os.environ.get("SHARDFS_SOAK", times()))

MIB = 1 << 20
MOST_MEMORY = 512 * MIB
GROWTH = MIB / 600
"""Bytes per second."""

SHORT = 300
"""Seconds of samples below which there is no telling growth from ups and downs."""


class Sample(NamedTuple):
    """Of a daemon: `at` seconds, bytes of memory, how many descriptors and threads."""

    at: float
    memory: int
    descriptors: int
    threads: int


def sampled(pid: int, seconds: float) -> list[Sample]:
    """One per second; fewer only if the daemon died."""
    out: list[Sample] = []
    start = time.monotonic()
    process = Path(f"/proc/{pid}")
    while (at := time.monotonic() - start) < seconds:
        lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
        told = {key: value.split()[0] for key, _, value in lines if key in ("VmRSS", "Threads")}
        files = len(list((process / "fd").iterdir()))
        out.append(Sample(at, int(told["VmRSS"]) * 1024, files, int(told["Threads"])))
        time.sleep(1)
    return out


def per_ten_minutes(samples: list[Sample]) -> float:
    """MiB by which the memory grows."""
    return linear_regression([s.at for s in samples], [s.memory for s in samples]).slope * 600 / MIB


def grown(samples: list[Sample]) -> list[str]:
    """What grows that should not. The first third is for warming up."""
    late = samples[len(samples) // 3 :]
    out = []
    if (peak := max(s.memory for s in samples)) > MOST_MEMORY:
        out.append(f"{peak / MIB:.0f} MiB of memory")
    if late[-1].at - late[0].at >= SHORT and (slope := per_ten_minutes(late)) * MIB > GROWTH * 600:
        out.append(f"{slope:.2f} MiB more every ten minutes")
    quarter = len(late) // 4
    for resource in ("descriptors", "threads"):
        before, after = (median(getattr(s, resource) for s in part) for part in (late[:quarter], late[-quarter:]))
        if after > before + 2:
            out.append(f"{before:g}, later {after:g} {resource}")
    return out


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    with Oracle() as found:
        yield found


class Array(NamedTuple):
    """One that is written to: where it lies in the store, its first chunks and the log of its writers."""

    target: Target
    root: Path
    held: dict[int, int]
    log: Path

    def wrong(self, oracle: Oracle, level: str | None, readers: list[str] | None = None) -> list[str]:
        return oracle.wrong(self.target, self.root, self.log, self.held, level, readers)


def array(top: Path, name: str, target: str) -> Array:
    target_ = TARGETS[target]
    tokens = {number: 100 + number for number in range(len(target_.chunks))}
    log = top / f"{name}.log"
    log.touch()
    return Array(target_, made(target_, top / "store" / name, tokens), tokens, log)


@pytest.mark.timeout(60 * MINUTES + 300)
def test_a_long_time_under_load(tmp_path: Path, oracle: Oracle) -> None:
    rough, busy = array(tmp_path, "rough", "zarr_end"), array(tmp_path, "busy", "zarr_start")
    with writable(tmp_path / "store", tmp_path, "-o", "idle=0.5,age=2") as mount:
        _killed_often(mount, rough, oracle, 15 * MINUTES)
        samples = _busy(mount, rough, busy, 45 * MINUTES)
        (tmp_path / "samples.json").write_text(json.dumps(samples))
        slope = per_ten_minutes(samples[len(samples) // 3 :])
        print(f"{len(samples)} samples, at last {samples[-1]}; {slope:.2f} MiB more every ten minutes")
        assert grown(samples) == []
        mount.mount()
        assert mount.flush().returncode == 0
        assert _journaled(mount) == 0
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
    for written in (rough, busy):
        assert written.wrong(oracle, "closed", list(written.target.readers)) == []
    assert not [p for p in (tmp_path / "store").rglob("*") if ".tmp" in p.name]


def _journaled(mount: WritableMount) -> int:
    """Bytes in the journal."""
    completed = _run([sys.executable, "-m", "shardfs", "status", "--json", mount.path], 30, cwd=ROOT)
    told: int = json.loads(completed.stdout)["writing"]["journal_bytes"]
    return told


def _killed_often(mount: WritableMount, rough: Array, oracle: Oracle, seconds: float) -> None:
    chance, end, cycle = random.Random(16), time.monotonic() + seconds, 0
    with client("hammer", mount.path / "rough/array", rough.target.name, rough.log, 2) as hammer:
        while time.monotonic() < end:
            mount.mount()
            _hammered(hammer, mount, chance.uniform(0.5, 8))
            mount.clear()
            assert rough.wrong(oracle, None) == [], f"natively, after kill {cycle}"
            if cycle % 4 == 0:
                mount.mount()
                completed = mount.umount()
                assert completed.returncode == 0, completed.stderr
                assert rough.wrong(oracle, "closed") == [], f"after kill {cycle}"
            cycle += 1


def _busy(mount: WritableMount, rough: Array, busy: Array, seconds: float) -> list[Sample]:
    """Writers and readers of all kinds on one daemon, which is killed at last; its life, in samples."""
    mount.mount()
    with ExitStack() as stack:
        readers = [
            stack.enter_context(_reader(tool, path, busy.target, seconds, seed))
            for seed, (tool, path) in enumerate(
                [("zarr", busy.root), ("zarr3", busy.root), ("zarr", mount.path / "busy/array")]
            )
        ]
        writers = [
            stack.enter_context(
                client("write_tokens", tool, mount.path / "busy/array", busy.target.name, busy.log, writer, 2, 10**6)
            )
            for writer, tool in enumerate(["zarr", "tensorstore"])
        ]
        hammer = stack.enter_context(client("hammer", mount.path / "rough/array", rough.target.name, rough.log, 2))
        assert hammer.stdin is not None
        hammer.stdin.write("go\n")
        hammer.stdin.flush()
        samples = sampled(mount.pid, seconds)
        reports = succeeded(readers, 60)
        assert [writer.poll() for writer in writers] == [None, None]
        mount.kill()
        said, _ = hammer.communicate(timeout=250)
        for writer in writers:
            writer.communicate(timeout=250)
        mount.clear()  # when nobody writes any more: below it is a directory like any other
        assert not set(json.loads(said)) - {"ENOTCONN", "ECONNABORTED", "EIO"}, said
    assert [f["wrong"] for f in reports] == [[] for _ in reports]
    assert min(f["reads"] for f in reports) > seconds
    return samples


@contextmanager
def _reader(tool: str, path: Path, target: Target, seconds: float, seed: int) -> Iterator[subprocess.Popen[str]]:
    grid, chunk = json.dumps(target.grid), json.dumps(target.chunk)
    with client("read_tokens", tool, path, grid, chunk, seconds, seed) as process:
        yield process
