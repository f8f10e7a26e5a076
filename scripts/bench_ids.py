"""Measure listings of directories with very many ids, as for meshes and skeletons:

plain      as many empty files
skeletons  ids from 0 upwards
root ids   ids of 60 bits, as proofread segmentations have them
meshes     two files for each id

    python scripts/bench_ids.py [--names 1000000] [--repetitions 3]

All contestants take turns within each repetition. The columns are: names per second through the mount, median and best;
the ratio to `plain` in the same repetition; names per second in a separate process without a mount (Tree); the daemon's
CPU time per name, which other processes on the machine hardly change; and the growth of the daemon's memory. This is no
test: missed goals are printed, but do not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import mmh3
import numpy as np
import numpy.typing as npt
from bench_lib import ENVIRONMENT, Mount, adopt_daemons, prefault, resident_mib

GOAL_NAMES, GOAL_MIB = 300_000, 16
MINISHARD_BITS, SHARD_BITS = 6, 4
CHUNK = 4
PLAIN = "plain"

_SCAN = """
import sys, time
from shardfs.vfs.tree import open_tree
tree = open_tree(sys.argv[1])
began = time.perf_counter()
names = sum(len(batch.names) for batch in tree.scan(1))
print(names / (time.perf_counter() - began))
"""


@dataclass
class Row:
    names_per_s: list[float] = field(default_factory=list)
    tree_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    grown_mib: list[float] = field(default_factory=list)


def write_sharded(path: Path, kind: str, ids: npt.NDArray[np.uint64]) -> None:
    """Write chunks of 4 bytes. Uses no code of shardfs, so that an error in shardfs cannot hide itself."""
    spec = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 0,
        "hash": "murmurhash3_x86_128",
        "minishard_bits": MINISHARD_BITS,
        "shard_bits": SHARD_BITS,
    }
    path.mkdir()
    (path / "info").write_text(json.dumps({"@type": f"neuroglancer_{kind}", "sharding": spec}))
    hashes = (mmh3.hash64(i.to_bytes(8, "little"), 0, False, signed=False)[0] for i in ids.tolist())
    home = np.fromiter(hashes, np.uint64, len(ids)) % np.uint64(1 << MINISHARD_BITS + SHARD_BITS)
    order = np.argsort(home, kind="stable")
    parts = np.split(ids[order], np.searchsorted(home[order], np.arange(1, 1 << MINISHARD_BITS + SHARD_BITS)))
    for shard in range(1 << SHARD_BITS):
        minishards = parts[shard << MINISHARD_BITS : (shard + 1) << MINISHARD_BITS]
        (path / f"{shard:x}.shard").write_bytes(shard_of(minishards))


def shard_of(minishards: list[npt.NDArray[np.uint64]]) -> bytes:
    size = CHUNK * sum(map(len, minishards))
    bounds, indices, position, end = [], [], 0, size
    for ids in minishards:
        offsets = np.zeros(len(ids), np.uint64)
        offsets[:1] = position
        rows = [np.diff(ids, prepend=np.uint64(0)), offsets, np.full(len(ids), CHUNK, np.uint64)]
        indices.append(np.concatenate(rows).astype("<u8").tobytes())
        bounds += [end, end + len(indices[-1])]
        position += CHUNK * len(ids)
        end = bounds[-1]
    return np.array(bounds, "<u8").tobytes() + bytes(size) + b"".join(indices)


def write_all(home: Path, count: int) -> dict[str, Path]:
    few = np.arange(count, dtype=np.uint64)
    write_sharded(home / "skeletons", "skeletons", few)
    write_sharded(home / "root-ids", "skeletons", few * np.uint64(977) + np.uint64(720575940621826310))
    write_sharded(home / "meshes", "multilod_draco", few[: count // 2])
    (home / PLAIN).mkdir()
    for i in range(count):
        os.close(os.open(home / PLAIN / str(i), os.O_CREAT | os.O_WRONLY))
    return {PLAIN: home / PLAIN, **{n: home / n.replace(" ", "-") for n in ("skeletons", "root ids", "meshes")}}


def scan(path: Path) -> int:
    with os.scandir(path) as entries:
        return sum(1 for _ in entries)


def cpu_s(pids: set[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(row: Row, path: Path, mountpoint: Path, count: int) -> None:
    python = sys.executable
    # A small index cache: the memory for cached indices is not part of this measurement.
    command = [python, "-m", "shardfs", "mount", str(path), str(mountpoint), "-o", "index_cache=4M"]
    mount = Mount(command, mountpoint, "info", stays=False)
    try:
        prefault(100 * count)
        before, used = resident_mib(mount.pids), cpu_s(mount.pids)
        began = time.perf_counter()
        names = scan(mountpoint)
        row.names_per_s.append(names / (time.perf_counter() - began))
        row.cpu_us.append((cpu_s(mount.pids) - used) / names * 1e6)
        row.grown_mib.append(resident_mib(mount.pids) - before)
        if names < count:
            raise RuntimeError(f"{path} shows {names} names instead of {count}")
    finally:
        mount.close()
    run = subprocess.run([python, "-c", _SCAN, path], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    row.tree_per_s.append(float(run.stdout))


def tell(rows: dict[str, Row]) -> None:
    print(f"{'':10} {'names/s':>10} {'best':>10} {'of plain':>9} {'Tree':>10} {'us CPU':>7} {'MiB':>6}")
    plain = rows[PLAIN].names_per_s
    for name, row in rows.items():
        speed, best = statistics.median(row.names_per_s), max(row.names_per_s)
        line = f"{name:10} {speed:10,.0f} {best:10,.0f}"
        if name == PLAIN:
            print(line)
            continue
        ratio = statistics.median(a / b for a, b in zip(row.names_per_s, plain, strict=True))
        tree, cpu, grown = (statistics.median(values) for values in (row.tree_per_s, row.cpu_us, row.grown_mib))
        met = "met" if best >= GOAL_NAMES and grown <= GOAL_MIB else "NOT MET"
        print(f"{line} {ratio:8.2f}x {tree:10,.0f} {cpu:7.2f} {grown:6.1f}  {met}")
    print(f"goals: {GOAL_NAMES:,} names/s through the mount at best, the daemon grows by {GOAL_MIB} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    adopt_daemons()
    with tempfile.TemporaryDirectory(prefix="shardfs-ids-") as directory:
        paths = write_all(Path(directory), args.names)
        mountpoint = Path(directory, "mnt")
        mountpoint.mkdir()
        rows = {name: Row() for name in paths}
        for _ in range(args.repetitions):
            for name, path in paths.items():
                if name == PLAIN:
                    began = time.perf_counter()
                    rows[name].names_per_s.append(scan(path) / (time.perf_counter() - began))
                else:
                    measure(rows[name], path, mountpoint, args.names)
        tell(rows)


if __name__ == "__main__":
    main()
