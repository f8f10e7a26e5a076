"""The cost of writing, as ratios measured in one run: `bench_write.py [--dir DIR] [--tools zarr,direct] [--runs 3]`.

Each run writes an array of 64 MiB chunk by chunk, with chunks of 64 KiB and 64 chunks per shard: through a mount, up to
the end of the unmount that publishes all shards; with the same tool to plain files on the same disk; and with the tool
directly into shards. The ways take turns, and the table shows medians. `plain+sync` syncs the plain files, so that they
survive a power failure as the published shards do. After each run, the stored data is compared with the written data.

`bench_write.py write TOOL PATH WRITER WRITERS` runs one writer in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_lib import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GRID, CHUNK, PER_SHARD = (int(os.environ.get("SHARDFS_BENCH_ROWS", "32")), 32), (256, 256), (8, 8)
CHUNKS = math.prod(GRID)
BYTES = CHUNKS * math.prod(CHUNK)


def metadata(*, sharded: bool) -> dict[str, Any]:
    """The Zarr v3 metadata document of the array of uint8."""
    raw = [{"name": "bytes"}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    inside = {"chunk_shape": CHUNK, "codecs": raw, "index_codecs": index, "index_location": "end"}
    shard = [c * p for c, p in zip(CHUNK, PER_SHARD, strict=True)]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [g * c for g, c in zip(GRID, CHUNK, strict=True)],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard if sharded else CHUNK}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": inside}] if sharded else raw,
        "attributes": {},
    }


def data() -> np.ndarray[Any, Any]:
    """The values of the array: all chunks differ, and none can be compressed."""
    shape = [g * c for g, c in zip(GRID, CHUNK, strict=True)]
    return np.random.default_rng(5).integers(1, 256, shape, np.uint8)


# ---- one writer ----


def opened(tool: str, path: Path) -> Callable[[int, int, tuple[slice, slice], Any], None]:
    """The function that writes one chunk with a tool."""
    if tool == "direct":

        def write(y: int, x: int, where: tuple[slice, slice], chunk: Any) -> None:
            (path / f"c/{y}").mkdir(parents=True, exist_ok=True)
            (path / f"c/{y}/{x}").write_bytes(chunk.tobytes())

        return write
    array: Any
    if tool == "zarr":
        import zarr

        array = zarr.open_array(path, mode="r+")
    elif tool == "z5":
        import z5py

        array = z5py.File(str(path.parent), mode="a", use_zarr_format=True, zarr_format=3)[path.name]
    else:
        import tensorstore

        store = {"driver": "file", "path": f"{path}/", "file_io_sync": tool == "tensorstore"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()

    def assign(y: int, x: int, where: tuple[slice, slice], chunk: Any) -> None:
        array[where] = chunk

    return assign


def write(tool: str, path: Path, writer: int, writers: int) -> None:
    """Write the rows of chunks of this writer, so that writers share shards. Prints the seconds."""
    warnings.simplefilter("ignore")
    values, put = data(), opened(tool, path)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for y in range(writer, GRID[0], writers):
        for x in range(GRID[1]):
            where = tuple(slice(i * c, (i + 1) * c) for i, c in zip((y, x), CHUNK, strict=True))
            put(y, x, where, values[where])
    print(time.perf_counter() - begin, flush=True)


@contextlib.contextmanager
def started(tool: str, path: Path, writers: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start writers, which import and open everything they need, then wait for the start signal."""
    command = [sys.executable, __file__, "write", tool, str(path)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(n), str(writers)], stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        for n in range(writers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def go(processes: list[subprocess.Popen[str]]) -> None:
    """Send the start signal, and wait for the last writer."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
        if process.wait(600):
            raise SystemExit("a writer failed: its error is printed above")


# ---- measurements ----


@dataclass
class Daemon:
    """The peak memory of a mount's process."""

    pid: int
    rss: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> threading.Thread:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            try:
                status = Path(f"/proc/{self.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                return
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    self.rss = max(self.rss, int(line.split()[1]) << 10)


def shardfs(*words: str | Path) -> None:
    # No time-out: with one, subprocess notices the end of a command up to 50 ms late.
    subprocess.run([sys.executable, "-m", "shardfs", *map(str, words)], check=True, env=ENVIRONMENT)


class Bench:
    """Runs each way of writing in its own directory, and records seconds and other values by name."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.wanted = data()
        self.found: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        self.found.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.found[name])

    def store(self, *, sharded: bool) -> Path:
        """Create an array without chunks, in a group, because z5py needs a group."""
        top = self.home / "store"
        shutil.rmtree(top, ignore_errors=True)
        (top / "a").mkdir(parents=True)
        (top / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
        (top / "a/zarr.json").write_text(json.dumps(metadata(sharded=sharded)))
        os.sync()
        return top

    def check(self, top: Path) -> None:
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{top / 'a'}/"}}
        found = tensorstore.open(spec, context=tensorstore.Context()).result().read().result()
        if not np.array_equal(found, self.wanted):
            raise SystemExit(f"{top}: the stored data differs from the written data")

    def natively(self, name: str, tool: str, *, sharded: bool, writers: int = 1) -> None:
        top = self.store(sharded=sharded)
        with started(tool, top / "a", writers) as processes:
            begin = time.perf_counter()
            go(processes)
            self.note(name, time.perf_counter() - begin)
            os.sync()
            self.note(f"{name}+sync", time.perf_counter() - begin)
        self.check(top)

    def mounted(self, name: str, tool: str, *, writers: int = 1) -> None:
        top, mountpoint = self.store(sharded=True), self.home / "mnt"
        mountpoint.mkdir(exist_ok=True)
        shardfs("mount", "--rw", "-o", f"journal={self.home / 'journal'}", top, mountpoint)
        try:
            daemon = Daemon(int(os.getxattr(mountpoint, "user.shardfs.pid")))
            thread = daemon.watch()
            with started(tool, mountpoint / "a", writers) as processes:
                begin = time.perf_counter()
                go(processes)
                self.note(f"{name} written", time.perf_counter() - begin)
            rest = time.perf_counter()
            os.setxattr(mountpoint, "user.shardfs.flush", b"600")
            told = json.loads((mountpoint / ".shardfs/status.json").read_text())["writing"]
            shardfs("umount", mountpoint)
            # The time for imports and for the exit of writers does not count.
            self.note(name, self.found[f"{name} written"][-1] + time.perf_counter() - rest)
            thread.join(10)
            self.note(f"{name} rss", daemon.rss)
            self.note(f"{name} bytes", told["published_bytes"])
            self.note(f"{name} shards", told["published_shards"])
        finally:
            subprocess.run(["fusermount3", "-uzq", mountpoint], check=False)
        self.check(top)


def report(bench: Bench, tools: list[str]) -> None:
    """Print the table."""
    mib = BYTES / 2**20
    print(f"{mib:.0f} MiB, {CHUNKS} chunks of {math.prod(CHUNK) >> 10} KiB, {math.prod(PER_SHARD)} per shard; medians")
    for tool in tools:
        plain, synced = bench.median(f"{tool} plain"), bench.median(f"{tool} plain+sync")
        mounted, written = bench.median(f"{tool} mounted"), bench.median(f"{tool} mounted written")
        print(f"\n{tool}:")
        print(f"  plain files           {plain:8.2f} s   and synced {synced:.2f} s")
        print(f"  mount, all published  {mounted:8.2f} s   of which writers {written:.2f} s")
        print(f"    = {mounted / plain:.2f} x plain files, {mounted / synced:.2f} x plain files that are synced")
        if f"{tool} native" in bench.found:
            native = bench.median(f"{tool} native")
            print(f"  natively into shards  {native:8.2f} s   = {native / mounted:.1f} x the mount")
        if f"{tool} four" in bench.found:
            four = bench.median(f"{tool} four")
            print(f"  mount, four writers   {four:8.2f} s   = {four / mounted:.2f} x one writer")
        amplified = bench.median(f"{tool} mounted bytes") / BYTES
        published, shards = bench.median(f"{tool} mounted shards"), CHUNKS // math.prod(PER_SHARD)
        print(
            f"  bytes written to the store per byte of data: {amplified:.2f}",
            f"({published:.0f} publishes of {shards} shards)",
        )
        print(f"  peak memory of the mount: {bench.median(f'{tool} mounted rss') / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="directory on a real disk, not on tmpfs")
    parser.add_argument("--tools", default="zarr,tensorstore,direct")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    tools = given.tools.split(",")
    home = Path(tempfile.mkdtemp(prefix="shardfs-bench-", dir=given.dir))
    try:
        bench = Bench(home)
        for run in range(given.runs):
            for tool in tools:
                bench.natively(f"{tool} plain", tool, sharded=False)
                bench.mounted(f"{tool} mounted", tool)
                bench.mounted(f"{tool} four", tool, writers=4)
                if tool == "zarr" and not run:  # minutes, not seconds
                    bench.natively(f"{tool} native", tool, sharded=True)
        report(bench, tools)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
