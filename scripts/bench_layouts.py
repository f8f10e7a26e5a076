"""The cost of a layout: ratios of alternating turns in one run, because the machine is shared.

    python scripts/bench_layouts.py [--work DIR] [--repetitions N] [--json FILE]

Unchanged bytes: chunks of a sharded Zarr v3 array are read once through fresh mounts, in the native layout and in
`zarr2`, which shows the same bytes under other names. A second run has a checksum after each chunk, which `zarr2`
verifies and removes. Goal: at most 1.1 times the time.

Changed bytes: little-endian chunks in zstd are read through the layout `n5`, which decodes them and swaps their bytes.
The comparison is a loop of numcodecs that decodes the same chunks on the same CPUs. The mount has a small chunk cache,
so that the cache is full, as after long use; the loop decodes into memory that it has used before. One run uses the
default options, one `direct_io`. Goal: at least 0.7 times the throughput. With several CPUs, as many threads read
through the mount; they are compared with one loop, and, without a goal, with as many loops.

Writing: the same stored chunks are written to all files of a writable mount, in the layouts `native` and `zarr2`, and
published. Goal: at most 1.15 times the time. Chunks written through `n5` must be encoded: `Transcoder.store` is
compared with a loop of numcodecs that encodes the same chunks. Goal: at least 0.7 times the throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from bench_lib import Calm, Mount, adopt_daemons, on_cpus, warm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIDE, CHUNK, PER_SHARD = 384, 96, 2
GRID = list(itertools.product(range(SIDE // CHUNK), repeat=3))
CHUNK_BYTES = 2 * CHUNK**3
CACHE = 16 << 20
BEFORE = CACHE // CHUNK_BYTES + 1  # chunks read first: loads libraries, fills the cache
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
CRC = {"name": "crc32c"}
MOST, MOST_WRITING, LEAST = 1.1, 1.15, 0.7


class Row(NamedTuple):
    name: str
    ratio: float
    goal: str
    met: bool
    spread: str


def image() -> Any:
    """A smooth image with noise, as from a microscope: uint16, which zstd compresses to about half."""
    axis = np.sin(np.arange(SIDE) / 30) * 700
    smooth = axis[:, None, None] + axis[None, :, None] + axis[None, None, :] + 3000
    return (smooth + np.random.default_rng(1).normal(0, 20, smooth.shape)).astype("<u2")


def write(path: Path, data: Any, codecs: Sequence[Any], *, sharded: bool) -> Path:
    import tensorstore

    index = [LITTLE, CRC]
    inside = {"chunk_shape": [CHUNK] * 3, "codecs": list(codecs), "index_codecs": index}
    metadata = {
        "shape": data.shape,
        "data_type": "uint16",
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [CHUNK * (PER_SHARD if sharded else 1)] * 3},
        },
        "codecs": [{"name": "sharding_indexed", "configuration": inside}] if sharded else list(codecs),
    }
    store = {"driver": "file", "path": f"{path}/", "file_io_sync": False}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(data).result()
    return path


def names(layout: str) -> list[str]:
    keys = ["/".join(map(str, key[::-1] if layout == "n5" else key)) for key in GRID]
    return [f"c/{key}" for key in keys] if layout == "native" else keys


BUFFERS = threading.local()


def read(path: str) -> int:
    """Read into memory that is allocated already, like that of the decoder in the loop."""
    if not hasattr(BUFFERS, "room"):
        BUFFERS.room = memoryview(bytearray(CHUNK_BYTES + 4096))
    fd, total = os.open(path, os.O_RDONLY), 0
    try:
        while got := os.readv(fd, [BUFFERS.room[total:]]):
            total += got
    finally:
        os.close(fd)
    return total


def timed(work: Callable[[Any], int], items: Sequence[Any], threads: int) -> tuple[float, int]:
    """Seconds and bytes to apply a function to all items."""
    if threads == 1:
        began = time.perf_counter()
        total = sum(map(work, items))
        return time.perf_counter() - began, total
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(len, [b""] * threads))  # starts the threads
        began = time.perf_counter()
        total = sum(pool.map(work, items))
        return time.perf_counter() - began, total


def through_mount(source: Path, mountpoint: Path, layout: str, threads: int, words: str = "ro") -> tuple[float, int]:
    """Read chunks for the first time: none is in the kernel's cache."""
    mountpoint.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "shardfs", "mount", str(source), str(mountpoint), "--layout", layout, "-o", words]
    probe = {"native": "zarr.json", "zarr2": ".zarray", "n5": "attributes.json"}[layout]
    mount = Mount(command, mountpoint, probe, stays=False)
    try:
        paths = [str(mountpoint / name) for name in names(layout)]
        for path in paths[:BEFORE]:
            read(path)
        return timed(read, paths[BEFORE:], threads)
    finally:
        mount.close()


def written(source: Path, mountpoint: Path, layout: str, chunks: Sequence[bytes]) -> float:
    """Seconds until chunks are written, and all are published."""
    mountpoint.mkdir(exist_ok=True)
    words = f"journal={mountpoint.parent / 'journal'},chunk_cache={CACHE}"
    command = [sys.executable, "-m", "shardfs", "mount", "--rw", "--layout", layout, "-o", words]
    probe = {"native": "zarr.json", "zarr2": ".zarray"}[layout]
    mount = Mount([*command, str(source), str(mountpoint)], mountpoint, probe, stays=False)
    try:
        began = time.perf_counter()
        for name, chunk in zip(names(layout), chunks, strict=True):
            (mountpoint / name).write_bytes(chunk)
        os.setxattr(mountpoint, "user.shardfs.flush", b"60")
        return time.perf_counter() - began
    finally:
        mount.close()


def n5_transform() -> Any:
    """The transform to the layout n5 of the stored array."""
    from shardfs.codecs.transcode import Transcoder
    from shardfs.model.arrays import Array, ChunkEncoding, Codec

    axes = tuple(range(3))
    stored = ChunkEncoding("<u2", axes, codecs=(Codec("zstd", ZSTD["configuration"]),))
    array = Array((SIDE,) * 3, (CHUNK,) * 3, "<u2", stored, axes)
    return Transcoder(array, ChunkEncoding(">u2", axes, clipped=True, frame="n5"))


class Bench:
    def __init__(self, work: Path, repetitions: int) -> None:
        self.work, self.repetitions = work, repetitions
        self.calm = Calm(60)
        self.rows: list[Row] = []

    def turns(self, *contestants: Callable[[], float]) -> list[list[float]]:
        """The results of contestants that take turns. Each contestant is first equally often."""
        found: list[list[float]] = [[] for _ in contestants]
        for turn in range(self.repetitions + 1):
            for i in range(len(contestants)):
                k = (i + turn) % len(contestants)
                self.calm.wait()
                result = contestants[k]()
                if turn:  # the first turn only warms up
                    found[k].append(result)
        return found

    def put(self, name: str, ratios: list[float], *, most: float = 0, least: float = 0) -> None:
        ratio = statistics.median(ratios)
        goal = f"<= {most}" if most else f">= {least}" if least else "no goal"
        met = ratio <= most if most else ratio >= least
        state = "" if goal == "no goal" else "met" if met else "MISSED"
        self.rows.append(Row(name, ratio, goal, met, f"{min(ratios):.2f}-{max(ratios):.2f}"))
        print(f"{name:<58} {ratio:5.2f}  {goal:<7}  {state:<6}  ({self.rows[-1].spread})", flush=True)

    def keeping(self, name: str, source: Path, expected: int, *, most: float = MOST) -> None:
        warm(source)

        def turn(layout: str) -> float:
            seconds, total = through_mount(source, self.work / "mnt", layout, 1)
            if layout == "zarr2" and total != expected:
                raise SystemExit(f"{name}: {total} bytes read, {expected} expected")
            return seconds

        native, shown = self.turns(lambda: turn("native"), lambda: turn("zarr2"))
        self.put(name, [b / a for a, b in zip(native, shown, strict=True)], most=most)

    def changing(self, name: str, source: Path, chunks: Sequence[bytes], cpus: set[int], words: str) -> None:
        from numcodecs.zstd import Zstd

        codec, threads = Zstd(), len(cpus)
        warm(source)

        def loop(loops: int = 1) -> float:
            seconds, total = timed(lambda chunk: len(codec.decode(chunk)), chunks, loops)
            return total / seconds

        def layout() -> float:
            seconds, total = through_mount(source, self.work / "mnt", "n5", threads, f"chunk_cache={CACHE},{words}")
            if total != (len(GRID) - BEFORE) * (CHUNK_BYTES + 16):
                raise SystemExit(f"{name}: {total} bytes read")
            return total / seconds

        with on_cpus(cpus):
            alone, together, shown = self.turns(loop, lambda: loop(threads), layout)
        self.put(name, [b / a for a, b in zip(alone, shown, strict=True)], least=LEAST)
        if threads > 1:
            ratios = [b / a for a, b in zip(together, shown, strict=True)]
            self.put(f"    / {threads} loops", ratios)
        rates = (f"{statistics.median(found) / 1e6:.0f} MB/s" for found in (alone, shown))
        print("    numcodecs in a loop {}, mount {}".format(*rates))

    def writing(self, name: str, source: Path, chunks: Sequence[bytes]) -> None:
        native, shown = self.turns(
            lambda: written(source, self.work / "mnt", "native", chunks),
            lambda: written(source, self.work / "mnt", "zarr2", chunks),
        )
        self.put(name, [b / a for a, b in zip(native, shown, strict=True)], most=MOST_WRITING)

    def storing(self, name: str, image: Any, cpu: int) -> None:
        from numcodecs.zstd import Zstd

        codec, transform = Zstd(ZSTD["configuration"]["level"]), n5_transform()
        corners = [tuple(slice(CHUNK * i, CHUNK * (i + 1)) for i in cell) for cell in GRID[:: CHUNK // 12]]
        blocks = [image[corner].copy() for corner in corners]
        header = struct.pack(">HH3I", 0, 3, CHUNK, CHUNK, CHUNK)
        shown = [header + block.astype(">u2").tobytes() for block in blocks]

        def loop() -> float:
            return timed(lambda block: len(codec.encode(block)), blocks, 1)[0]

        def store() -> float:
            return timed(lambda chunk: len(transform.store((0, 0, 0), chunk)), shown, 1)[0]

        with on_cpus({cpu}):
            alone, stored = self.turns(loop, store)
        self.put(name, [a / b for a, b in zip(alone, stored, strict=True)], least=LEAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the data are made (default: a new directory in /tmp)")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="bench-layouts-"))
    work.mkdir(parents=True, exist_ok=True)
    adopt_daemons()
    bench = Bench(work, given.repetitions)
    try:
        data = image()
        plain = write(work / "plain", data, [LITTLE, ZSTD], sharded=False)
        chunks = [(plain / name).read_bytes() for name in names("native")]
        size = sum(map(len, chunks[BEFORE:]))
        print(f"{len(GRID)} chunks of {CHUNK_BYTES / 1e6:.1f} MB, {size / (len(GRID) - BEFORE) / 1e6:.2f} MB in zstd")
        shards = write(work / "sharded", data, [LITTLE, ZSTD], sharded=True)
        bench.keeping("time of zarr2 / native, stored bytes as they are", shards, size)
        summed = write(work / "summed", data, [LITTLE, ZSTD, CRC], sharded=True)
        bench.keeping("the same, a checksum verified and cut", summed, size, most=0)
        cpus = sorted(os.sched_getaffinity(0))
        for n, words in itertools.product(dict.fromkeys((1, len(cpus))), ("ro", "direct_io")):
            name = f"throughput of n5 from zstd / a loop, {n} CPU, {words}"
            bench.changing(name, shards, chunks, set(cpus[:n]), words)
        bench.writing("time to write zarr2 / native, bytes stored as they are", shards, chunks)
        bench.storing("throughput of storing n5 as zstd / a loop", data, cpus[0])
    finally:
        shutil.rmtree(work, ignore_errors=given.work is None)
    if given.json:
        given.json.write_text(json.dumps([row._asdict() for row in bench.rows]))
    sys.exit(not all(row.met for row in bench.rows))


if __name__ == "__main__":
    main()
