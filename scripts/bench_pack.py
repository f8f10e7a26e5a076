"""Measure `shardfs pack` relative to other ways to copy the same chunk files, all in one run and in turns.

    python scripts/bench_pack.py [GROUP]... [--bytes 2G] [--times 5] [--directory DIRECTORY]

files   chunks of 1 MiB: `cp -r`, `cp -r` and a sync, two `cp -r` of one half each at the same time, `pack`,
        `pack --jobs 2`. `pack` syncs each shard.
small   the same for chunks of 16 KiB
decode  zstd chunks: tensorstore and zarr-python copy shard by shard through decode and encode; `pack`
remote  a web server with 20 ms for each request and a limited bandwidth (variable LIMIT_MB), relative to the limit
many    files of 32 bytes: 100,000 and 1,000,000; memory of the main process and of the workers

Prints one JSON line per command: the fewest and the median seconds of wall time, the fewest of CPU time, the largest
resident memory of one process, and the wall time of the first command of the group divided by that of this command. All
data stays in the page cache. The start of Python is measured with a source of 8 files. Only ratios are comparable
between machines. This is no test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench_lib import ENVIRONMENT, descendants, resident_mib

from shardfs.config.parsers import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PACK = [sys.executable, "-m", "shardfs", "pack"]
TWO_COPIES = 'mkdir "$1"; to=$1; n=$2; shift 2; cp -r "${@:1:$n}" "$to" & cp -r "${@:$n+1}" "$to"; wait'
LATENCY_MS, LIMIT_MB = 20, int(os.environ.get("LIMIT_MB", "100"))


class Run(NamedTuple):
    """One run of a command: seconds of wall time and of CPU time, and MiB of its largest process."""

    wall: float
    cpu: float
    peak: float


def timed(command: Sequence[str]) -> Run:
    """Run a command and its children."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {command}")
    return Run(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def use_memory(nbytes: int) -> None:
    """Write to free memory. Otherwise a virtual machine may have to ask its host for memory during the next command."""
    subprocess.run([sys.executable, "-c", f"bytes([1]) * {nbytes}"], check=True)


def compared(group: str, commands: dict[str, list[str]], target: Path, times: int, **facts: Any) -> None:
    """Run the commands in turns and print the results. Each one creates `target` anew."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            shutil.rmtree(target, ignore_errors=True)
            os.sync()  # so that the disk is idle
            use_memory(int(facts.get("gib", 0) * 2**30))
            runs[name].append(timed(command))
    shutil.rmtree(target, ignore_errors=True)
    first, *_ = runs.values()
    for name, found in runs.items():
        best, median = (pick(run.wall for run in found) for pick in (min, statistics.median))
        show(
            group,
            command=name,
            s=round(best, 2),
            median=round(median, 2),
            cpu=round(min(run.cpu for run in found), 2),
            peak_mib=round(max(run.peak for run in found)),
            ratio=round(min(run.wall for run in first) / best, 2),
            ratio_of_medians=round(statistics.median(run.wall for run in first) / median, 2),
            **facts,
        )


def show(group: str, **facts: Any) -> None:
    print(json.dumps({"group": group, **facts, "load": os.getloadavg()[0]}), flush=True)


# ---- data


def document(grid: Sequence[int], chunk: Sequence[int], data_type: str, codecs: Sequence[dict[str, Any]]) -> str:
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [n * c for n, c in zip(grid, chunk, strict=True)],
        "data_type": data_type,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": list(codecs),
        "attributes": {},
    }
    return json.dumps(fields)


def write_raw(root: Path, grid: Sequence[int], nbytes: int) -> Path:
    """Write an array of noise with chunk files of `nbytes`."""
    noise = memoryview(os.urandom(nbytes + (1 << 20)))
    root.mkdir(parents=True)
    (root / "zarr.json").write_text(document(grid, (*[1] * (len(grid) - 1), nbytes), "uint8", [{"name": "bytes"}]))
    for i, above in enumerate(product(*map(range, grid[:-1]))):
        directory = root.joinpath("c", *map(str, above))
        directory.mkdir(parents=True)
        for k in range(grid[-1]):
            at = (i * grid[-1] + k) * 64 % (1 << 20)
            fd = os.open(f"{directory}/{k}", os.O_WRONLY | os.O_CREAT)
            os.write(fd, noise[at : at + nbytes])
            os.close(fd)
    os.sync()
    return root


def write_zstd(root: Path, side: int) -> Path:
    """Write an image of uint16 in zstd chunks of 64 x 64 x 64, which need half of the space."""
    import numpy as np
    import tensorstore

    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
    ]
    metadata = json.loads(document((side,) * 3, (64,) * 3, "uint16", codecs))
    kvstore = {"driver": "file", "path": f"{root}/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}, create=True).result()
    random = np.random.default_rng(1)
    for z in range(side):
        data = random.normal(1000, 40, (64, 64 * side, 64 * side)).astype(np.uint16)
        array[64 * z : 64 * (z + 1)].write(data).result()
    os.sync()
    return root


# ---- groups


def files(home: Path, total: int, times: int, nbytes: int = 1 << 20) -> None:
    """`cp -r` and `pack`."""
    target, tiny = home / "target", write_raw(home / "tiny", (2, 2, 2), 16)
    compared("start", {"pack": [*PACK, str(tiny), str(target)]}, target, times)
    rows = max(1, total // nbytes // 32 // 32)
    source = write_raw(home / "source", (rows, 32, 32), nbytes)
    both = [str(source), str(target)]
    commands = {
        "cp -r": ["cp", "-r", *both],
        "cp -r, sync": ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", *both],
        "pack": [*PACK, *both],
        "pack --jobs 2": [*PACK, "--jobs", "2", *both],
    }
    if rows > 1:
        halves = [str(source / "c" / str(row)) for row in range(rows)]
        commands["two cp -r"] = ["bash", "-c", TWO_COPIES, "bash", str(target), str(rows // 2), *halves]
    compared("files", commands, target, times, chunk=nbytes, gib=rows * 1024 * nbytes / 2**30)


def small(home: Path, total: int, times: int) -> None:
    """The same with small chunks."""
    files(home, total, times, 16 << 10)


def decode(home: Path, total: int, times: int) -> None:
    """Copy through decode and encode."""
    side = max(2, round((total / (2 * 64**3)) ** (1 / 3)))
    source, target = write_zstd(home / "source", side), home / "target"
    subprocess.run([*PACK, str(source), str(home / "model")], check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    paths = [str(path) for path in (source, target, home / "model" / "zarr.json")]
    commands = {name: [sys.executable, __file__, "--copy-with", name, *paths] for name in COPIES}
    commands |= {"pack": [*PACK, *paths[:2]], "pack --jobs 2": [*PACK, "--jobs", "2", *paths[:2]]}
    compared("decode", commands, target, times, gib=round(2 * (64 * side) ** 3 / 2**30, 2))


def boxes(shape: Sequence[int], shard: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The regions of all shards."""
    for corner in product(*(range(0, n, s) for n, s in zip(shape, shard, strict=True))):
        yield tuple(slice(c, min(c + s, n)) for c, s, n in zip(corner, shard, shape, strict=True))


def copy_with_tensorstore(source: str, target: str, metadata: dict[str, Any]) -> None:
    """Copy shard by shard, two at a time."""
    import tensorstore

    def opened(path: str, **more: Any) -> Any:
        return tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **more}).result()

    old, new = opened(source), opened(target, metadata=metadata, create=True)
    shard = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda box: new[box].write(old[box]).result(), boxes(metadata["shape"], shard)))


def copy_with_zarr(source: str, target: str, metadata: dict[str, Any]) -> None:
    """Copy shard by shard."""
    import zarr

    Path(target).mkdir()
    Path(target, "zarr.json").write_text(json.dumps(metadata))
    old: Any = zarr.open_array(source, mode="r")
    new: Any = zarr.open_array(target, mode="r+")
    for box in boxes(old.shape, new.shards):
        new[box] = old[box]


COPIES: dict[str, Callable[[str, str, dict[str, Any]], None]]
COPIES = {"tensorstore": copy_with_tensorstore, "zarr-python": copy_with_zarr}


def remote(home: Path, total: int, times: int) -> None:
    """A store with latency and a limited bandwidth for all connections together."""
    nbytes = 256 << 10
    rows = max(1, total // 4 // nbytes // 256)
    source = write_raw(home / "source", (rows, 16, 16), nbytes)
    limits = ["--latency-ms", str(LATENCY_MS), "--bandwidth-mb", "0", "--total-mb", str(LIMIT_MB)]
    command = [sys.executable, str(Path(__file__).with_name("delaying_server.py")), str(source), *limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url, target = server.stdout.readline().strip(), home / "target"
            least = rows * 256 * nbytes / LIMIT_MB / 1e6
            commands = {"the limit": ["sleep", str(least)], "pack": [*PACK, url, str(target)]}
            compared("remote", commands, target, times, chunk=nbytes, mb_per_s=LIMIT_MB, latency_ms=LATENCY_MS)
        finally:
            server.kill()


def many(home: Path, _total: int, _times: int) -> None:
    """The memory for 100,000 and 1,000,000 files."""
    for n in (100_000, 1_000_000):
        if os.statvfs(home).f_favail < 2 * n:
            raise SystemExit(f"too few free inodes in {home}")
        source, target = write_raw(home / "source", (n // 1000, 1000), 32), home / "target"
        began, peaks = time.perf_counter(), dict[int, float]()
        command = [*PACK, "--jobs", "2", "--chunks-per-shard", "1,1000", str(source), str(target)]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            for pid in descendants():
                peaks[pid] = max(peaks.get(pid, 0), resident_mib({pid}, "VmHWM"))
            time.sleep(0.05)
        main, workers = peaks.pop(process.pid), [round(peak) for peak in sorted(peaks.values())[-2:]]
        took = round(time.perf_counter() - began, 1)
        show("many", files=n, s=took, exit_code=process.returncode, main_mib=round(main, 1), workers_mib=workers)
        for path in (source, target):
            shutil.rmtree(path)


GROUPS: dict[str, Callable[[Path, int, int], None]]
GROUPS = {"files": files, "small": small, "decode": decode, "remote": remote, "many": many}


def main() -> None:
    """Parse the arguments, and run the groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all")
    parser.add_argument("--bytes", type=size, default=size("2G"))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--directory", help="where to write (default: the directory for temporary files)")
    parser.add_argument("--copy-with", choices=COPIES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copy_with:
        source, target, model = given.groups
        COPIES[given.copy_with](source, target, json.loads(Path(model).read_text()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which removes the files
    for name in given.groups or GROUPS:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            GROUPS[name](Path(directory), given.bytes, given.times)


if __name__ == "__main__":
    main()
