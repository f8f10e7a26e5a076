"""The cost of one chunk in a large shard: `bench_large_shard.py [--dir DIR] [--mib 64,512,2048] [--runs 3]`.

Each run writes one chunk of 64 KiB through a mount and waits until it is published into a shard of the given size: for
Zarr, for precomputed, and for precomputed with `inplace=uint64`. The table has medians of seconds, the bytes that the
mount's process has given to the disk (`/proc/PID/io`), both also as ratios to the smallest shard, and the growth of the
file. All bytes of the shards are allocated. Before each run they leave the page cache. After each mount, tensorstore
reads the chunks from the source.

DIR must be on the disk to measure, and have room for the largest shard twice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_lib import ENVIRONMENT
from google_crc32c import value as crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK = 64 << 10
MINISHARD = 512  # chunks
RANDOM = np.random.default_rng(7)


def payload(chunks: int) -> Iterator[bytes]:
    """The bytes of the shard's chunks, in pieces. They repeat every 64 MiB; no file system here notices that."""
    block = RANDOM.bytes(min(chunks, 1024) * CHUNK)
    for start in range(0, chunks, 1024):
        yield block[: (chunks - start) * CHUNK]


def sides(chunks: int, dimensions: int) -> list[int]:
    """The numbers of chunks along the axes: powers of two, as equal as possible."""
    bits = chunks.bit_length() - 1
    return [1 << (bits + i) // dimensions for i in range(dimensions)]


# ---- formats ----


@dataclass
class Zarr:
    """An array of one shard, with an index at the end. `chunks`: a power of two."""

    top: Path
    chunks: int

    def __post_init__(self) -> None:
        self.grid = sides(self.chunks, 2)
        self.shard = self.top / "a/c/0/0"

    def create(self) -> None:
        shape = [256 * n for n in self.grid]
        raw = [{"name": "bytes"}]
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inside = {"chunk_shape": [256, 256], "codecs": raw, "index_codecs": index, "index_location": "end"}
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "sharding_indexed", "configuration": inside}],
            "attributes": {},
        }
        self.shard.parent.mkdir(parents=True)
        (self.top / "a/zarr.json").write_text(json.dumps(document))
        entries = np.full((self.chunks, 2), CHUNK, "<u8")
        entries[:, 0] = np.arange(self.chunks) * CHUNK
        with self.shard.open("wb") as file:
            file.writelines(payload(self.chunks))
            file.write(entries.tobytes() + crc32c(entries.tobytes()).to_bytes(4, "little"))

    def chunk(self, number: int) -> tuple[str, tuple[slice, ...]]:
        """The path of a chunk on the mount, and its place in the array that tensorstore shows."""
        y, x = divmod(number, self.grid[1])
        return f"a/c/{y}/{x}", (slice(256 * y, 256 * y + 256), slice(256 * x, 256 * x + 256))

    def spec(self) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.top}/a/"}}


@dataclass
class Precomputed:
    """A volume of one shard, with an index at the start. `chunks`: a power of two, at least `MINISHARD`."""

    top: Path
    chunks: int

    def __post_init__(self) -> None:
        self.grid = sides(self.chunks, 3)[::-1]
        self.minishards = self.chunks // MINISHARD
        self.shard = self.top / "s/0.shard"

    def create(self) -> None:
        sharding = {
            "@type": "neuroglancer_uint64_sharded_v1",
            "preshift_bits": MINISHARD.bit_length() - 1,
            "hash": "identity",
            "minishard_bits": self.minishards.bit_length() - 1,
            "shard_bits": 0,
            "minishard_index_encoding": "raw",
            "data_encoding": "raw",
        }
        scale = {
            "key": "s",
            "size": [n * side for n, side in zip(self.grid, (64, 64, 16), strict=True)],
            "resolution": [1, 1, 1],
            "voxel_offset": [0, 0, 0],
            "chunk_sizes": [[64, 64, 16]],
            "encoding": "raw",
            "sharding": sharding,
        }
        info = {"type": "image", "data_type": "uint8", "num_channels": 1, "scales": [scale]}
        self.shard.parent.mkdir(parents=True)
        (self.top / "info").write_text(json.dumps({"@type": "neuroglancer_multiscale_volume", **info}))
        starts = self.chunks * CHUNK + np.arange(self.minishards) * 24 * MINISHARD
        with self.shard.open("wb") as file:
            file.write(np.stack([starts, starts + 24 * MINISHARD], axis=1).astype("<u8").tobytes())
            file.writelines(payload(self.chunks))
            for first in range(0, self.chunks, MINISHARD):
                index = np.ones((3, MINISHARD), "<u8")  # numbers and starts: the first one, then differences
                index[0, 0] = first
                index[1] = 0
                index[1, 0] = first * CHUNK
                index[2] = CHUNK
                file.write(index.tobytes())

    def chunk(self, number: int) -> tuple[str, tuple[slice, ...]]:
        """The path of a chunk on the mount, and its place in the array that tensorstore shows."""
        cell = np.unravel_index(number, self.grid)
        begins = [int(c) * side for c, side in zip(cell, (64, 64, 16), strict=True)]
        ends = [begin + side for begin, side in zip(begins, (64, 64, 16), strict=True)]
        name = "_".join(f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))
        return f"s/{name}", (*map(slice, begins, ends), slice(0, 1))

    def spec(self) -> dict[str, Any]:
        return {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{self.top}/"}}


WAYS: dict[str, tuple[Callable[[Path, int], Zarr | Precomputed], tuple[str, ...]]] = {
    "zarr": (Zarr, ()),
    "precomputed": (Precomputed, ()),
    "precomputed, inplace=uint64": (Precomputed, ("-o", "inplace=uint64")),
}


# ---- measurements ----


@dataclass
class Cost:
    """What one publish took. `written`, `grown`: bytes given to the disk, and by which the shard became longer."""

    seconds: float
    written: int
    grown: int


def shardfs(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "shardfs", *map(str, words)], check=True, env=ENVIRONMENT)


def counted(pid: int) -> int:
    """The bytes that a process has given to the disk."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes:")).split()[1])


def measured(home: Path, form: Zarr | Precomputed, words: tuple[str, ...], runs: int) -> list[Cost]:
    """Publish `runs` chunks, one after the other, and compare them with what tensorstore reads."""
    mountpoint = home / "mnt"
    mountpoint.mkdir(exist_ok=True)
    numbers = [int(n) for n in RANDOM.choice(form.chunks, runs, replace=False)]
    contents = [RANDOM.bytes(CHUNK) for _ in numbers]
    shardfs("mount", "--rw", "-o", f"journal={home / 'journal'}", *words, form.top, mountpoint)
    try:
        pid = int(os.getxattr(mountpoint, "user.shardfs.pid"))
        costs = [published(form, mountpoint, pid, number, data) for number, data in zip(numbers, contents, strict=True)]
        shardfs("umount", mountpoint)
    finally:
        subprocess.run(["fusermount3", "-uzq", mountpoint], check=False)
    check(form, numbers, contents)
    return costs


def published(form: Zarr | Precomputed, mountpoint: Path, pid: int, number: int, data: bytes) -> Cost:
    """Write one chunk, and wait until it is in the shard and on the disk."""
    path, _ = form.chunk(number)
    fd = os.open(form.shard, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    os.sync()
    before, size, begin = counted(pid), form.shard.stat().st_size, time.perf_counter()
    (mountpoint / path).write_bytes(data)
    os.setxattr(mountpoint, "user.shardfs.flush", b"600")
    seconds = time.perf_counter() - begin
    return Cost(seconds, counted(pid) - before, form.shard.stat().st_size - size)


def check(form: Zarr | Precomputed, numbers: list[int], contents: list[bytes]) -> None:
    import tensorstore

    array = tensorstore.open(form.spec()).result()
    for number, data in zip(numbers, contents, strict=True):
        values = array[form.chunk(number)[1]].read().result()
        if (values.T if isinstance(form, Precomputed) else values).tobytes() != data:
            raise SystemExit(f"{form.shard}: chunk {number} differs from the written one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="directory on a real disk, not on tmpfs")
    parser.add_argument("--mib", default="64,512,2048", help="sizes of shards in MiB, powers of two from 64")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    sizes = [int(text) << 20 for text in given.mib.split(",")]
    if any(size < 64 << 20 or not math.log2(size).is_integer() for size in sizes):
        parser.error("--mib: give powers of two from 64")
    print(f"{'one chunk of 64 KiB into a shard of':44} {'seconds':>16} {'written, MiB':>20} {'longer, KiB':>12}")
    for way, (kind, words) in WAYS.items():
        smallest: tuple[float, float] | None = None
        for size in sizes:
            home = Path(tempfile.mkdtemp(prefix="shardfs-bench-", dir=given.dir))
            try:
                form = kind(home / "store", size // CHUNK)
                form.create()
                costs = measured(home, form, words, given.runs)
            finally:
                shutil.rmtree(home, ignore_errors=True)
            seconds = statistics.median(cost.seconds for cost in costs)
            written = statistics.median(cost.written for cost in costs) / 2**20
            grown = statistics.median(cost.grown for cost in costs) / 2**10
            smallest = smallest or (seconds, written)
            ratios = f"{seconds:8.3f} ({seconds / smallest[0]:4.1f}x) {written:12.1f} ({written / smallest[1]:4.1f}x)"
            print(f"{way + ', ' + str(size >> 20) + ' MiB':44} {ratios} {grown:12.0f}", flush=True)


if __name__ == "__main__":
    main()
