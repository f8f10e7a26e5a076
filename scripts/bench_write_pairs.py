"""Compare writing in two checkouts, in pairs: `bench_write_pairs.py A B [--runs 5] [--tools zarr,tensorstore,cp,four]`.

A and B are directories of checkouts. `DIR:NAME=VALUE` sets a variable of the environment of its daemon. Each pair
writes the array of `bench_write.py` through a mount of A and a mount of B, one right after the other, in changing
order. The table shows the median of the ratios of the pairs, which a busy machine disturbs less than times. `written`
ends when the programs end, `published` when all shards are in the source. `processor` is the time that the daemon has
used until then. `--strace` counts the system calls of the daemons instead. The environment variable
SHARDFS_BENCH_ROWS (32) is the number of rows of 32 chunks; shards have 8 rows.

Tools: `zarr`, `tensorstore` (syncs each chunk), `cp` (copies files with `cp -r`), `direct` (writes files), `four` (four
processes of zarr-python), `over` (each chunk twice before it is published).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench_lib import ENVIRONMENT
from bench_write import CHUNK, CHUNKS, GRID, Bench, go, started

Seconds = tuple[float, float, float]


class Side:
    """One checkout, with the environment of its daemon."""

    def __init__(self, given: str) -> None:
        place, *words = given.split(":")
        self.name, self.environment = given, {**ENVIRONMENT, "PYTHONPATH": str(Path(place).resolve())}
        for word in words:
            name, _, value = word.partition("=")
            self.environment[name] = value

    def shardfs(self, *words: str | Path) -> None:
        command = [sys.executable, "-m", "shardfs", *map(str, words)]
        subprocess.run(command, check=True, env=self.environment, cwd=self.environment["PYTHONPATH"])


def write(tool: str, mountpoint: Path, plain: Path) -> float:
    """Write all chunks with a tool. Return the seconds."""
    if tool == "cp":
        began = time.perf_counter()
        subprocess.run(["cp", "-r", str(plain / "a/c"), str(mountpoint / "a")], check=True)
        return time.perf_counter() - began
    real = {"four": "zarr", "over": "direct"}.get(tool, tool)
    with started(real, mountpoint / "a", 4 if tool == "four" else 1) as processes:
        began = time.perf_counter()
        go(processes)
        return time.perf_counter() - began


def measure(bench: Bench, side: Side, tool: str, plain: Path, trace: Path | None) -> Seconds:
    """Return the seconds until all is written, until all is published, and of processor time."""
    top, mountpoint = bench.store(sharded=True), bench.home / "mnt"
    mountpoint.mkdir(exist_ok=True)
    options = f"journal={bench.home / 'journal'}" + (",idle=600,age=600,dirty_limit=1G" if tool == "over" else "")
    side.shardfs("mount", "--rw", "-o", options, top, mountpoint)
    tracer = None
    try:
        pid = os.getxattr(mountpoint, "user.shardfs.pid").decode()
        before = used(pid)
        if trace is not None:
            tracer = subprocess.Popen(["strace", "-c", "-f", "-o", str(trace), "-p", pid], stderr=subprocess.DEVNULL)
            time.sleep(1)
        written = write(tool, mountpoint, plain)
        if tool == "over":
            written = write(tool, mountpoint, plain)
        began = time.perf_counter()
        os.setxattr(mountpoint, "user.shardfs.flush", b"600")
        published, busy = time.perf_counter() - began, used(pid) - before
        if tracer is not None:
            tracer.terminate()
            tracer.wait()
        side.shardfs("umount", mountpoint)
    finally:
        subprocess.run(["fusermount3", "-uzq", mountpoint], check=False)
    bench.check(top)
    return written, written + published, busy


def used(pid: str) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def calls(trace: Path) -> dict[str, float]:
    """Return the system calls of each kind per chunk."""
    found = {}
    for line in trace.read_text().splitlines()[2:]:
        parts = line.split()
        if len(parts) >= 5 and parts[-1] != "total" and parts[3].isdigit():
            found[parts[-1]] = int(parts[3]) / CHUNKS
    return found


def report(times: dict[str, list[list[Seconds]]], sides: list[Side]) -> None:
    print(f"{CHUNKS} chunks of {CHUNK[0] * CHUNK[1] >> 10} KiB; chunks/s are medians; B/A: median of the pairs (range)")
    for tool, pairs in times.items():
        for i, what in enumerate(("written", "published", "processor")):
            speeds = [statistics.median(CHUNKS / pair[s][i] for pair in pairs) for s in range(len(sides))]
            ratios = sorted(pair[0][i] / pair[1][i] for pair in pairs)
            span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{tool:12} {what:10} A {speeds[0]:7.0f}  B {speeds[1]:7.0f}  "
                  f"speed B/A {statistics.median(ratios):.2f} ({span}, {len(pairs)} pairs)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sides", nargs=2, type=Side)
    parser.add_argument("--dir", type=Path, help="directory on a real disk, not on tmpfs")
    parser.add_argument("--tools", default="zarr,tensorstore,cp,four")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--strace", action="store_true")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="shardfs-bench-", dir=given.dir))
    times: dict[str, list[list[Seconds]]] = defaultdict(list)
    try:
        bench = Bench(home)
        plain = home / "plain"
        for y in range(GRID[0]):
            (plain / f"a/c/{y}").mkdir(parents=True)
            for x in range(GRID[1]):
                where = tuple(slice(i * c, (i + 1) * c) for i, c in zip((y, x), CHUNK, strict=True))
                (plain / f"a/c/{y}/{x}").write_bytes(bench.wanted[where].tobytes())
        for run in range(1 if given.strace else given.runs):
            for tool in given.tools.split(","):
                pair: list[Seconds] = [(0.0, 0.0, 0.0)] * 2
                for s in (0, 1) if run % 2 else (1, 0):
                    trace = home / "trace" if given.strace else None
                    pair[s] = measure(bench, given.sides[s], tool, plain, trace)
                    if trace is not None:
                        found = calls(trace)
                        top = sorted(found.items(), key=lambda item: -item[1])[:14]
                        print(f"{tool} {'AB'[s]}: {sum(found.values()):.1f} calls per chunk:",
                              ", ".join(f"{name} {n:.2f}" for name, n in top), flush=True)  # fmt: skip
                times[tool].append(pair)
                text = "run %d %s: %.2f %.2f s written, %.2f %.2f s published, %.2f %.2f s busy"
                seconds = [second for two in zip(*pair, strict=True) for second in two]
                print(text % (run, tool, *seconds), file=sys.stderr, flush=True)
        report(times, given.sides)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
