"""Measure the speed of `shardfs verify` relative to the speed of `cat` on the same files.

    python scripts/bench_verify.py [--bytes 32G] [--distinct 1G] [--chunk 1M] [--times 3] [--data zstd]

Writes raw, crc32c and zstd arrays, then runs `cat FILES >/dev/null` and `shardfs verify` in turn, several times. Only
`--distinct` bytes are written; the other shards are hard links to the same files. So all data stays in the page cache,
and the programs run much longer than they take to start. Prints one JSON line per command: the fewest seconds of wall
time and of CPU time, bytes per second, and the ratios to cat. Only the ratios are comparable between machines. This is
no test.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
from numcodecs.zstd import Zstd

from shardfs.config.parsers import size

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOTS = 64
CODECS = {"raw": [], "crc32c": [{"name": "crc32c"}], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}


def encoded(kind: str, data: bytes) -> bytes:
    """Encode a chunk."""
    if kind == "crc32c":
        return data + struct.pack("<I", google_crc32c.value(data))
    return bytes(Zstd(level=1).encode(data)) if kind == "zstd" else data


def shard(kind: str, chunk: int) -> bytes:
    """The bytes of a shard with all its chunks; half of each chunk is noise."""
    stored = [encoded(kind, os.urandom(chunk // 2) + bytes(chunk - chunk // 2)) for _ in range(SLOTS)]
    sizes = list(map(len, stored))
    starts = [sum(sizes[:i]) for i in range(SLOTS)]
    index = b"".join(struct.pack("<QQ", *entry) for entry in zip(starts, sizes, strict=True))
    return b"".join(stored) + index + struct.pack("<I", google_crc32c.value(index))


def write(root: Path, kind: str, total: int, distinct: int, chunk: int) -> list[str]:
    """Write an array of `total` bytes in chunks of `chunk` bytes; return the paths of its shards."""
    shards = max(1, total // (SLOTS * chunk))
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [1, chunk],
        "codecs": [{"name": "bytes"}, *CODECS[kind]],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shards * SLOTS, chunk],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SLOTS, chunk]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    root.mkdir(parents=True)
    (root / "zarr.json").write_text(json.dumps(document))
    names = []
    for i in range(shards):
        path = root / "c" / str(i) / "0"
        path.parent.mkdir(parents=True)
        if i * SLOTS * chunk < distinct:
            path.write_bytes(shard(kind, chunk))
        else:
            path.hardlink_to(names[i % max(1, distinct // (SLOTS * chunk))])
        names.append(str(path))
    return names


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall time and CPU time of a command."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used


def measured(root: Path, files: list[str], times: int) -> Iterator[dict[str, object]]:
    verify = [sys.executable, "-m", "shardfs", "verify", str(root)]
    commands = {"cat": ["cat", *files], "verify": verify, "verify --deep": [*verify, "--deep"]}
    commands |= {f"verify --deep --jobs {n}": [*verify, "--deep", "--jobs", str(n)] for n in (2, 4)}
    took = {name: [(float("inf"), float("inf"))] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            took[name].append(seconds(command))
    stored = sum(os.path.getsize(f) for f in files)
    clock = {name: min(t for t, _ in both) for name, both in took.items()}
    used = {name: min(t for _, t in both) for name, both in took.items()}
    for name in commands:
        yield {
            "data": root.name,
            "command": name,
            "seconds": round(clock[name], 2),
            "GB/s": round(stored / clock[name] / 1e9, 2),
            "of cat": round(clock["cat"] / clock[name], 2),
            "processor seconds": round(used[name], 2),
            "processor, of cat": round(used["cat"] / used[name], 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=size, default=size("32G"))
    parser.add_argument("--distinct", type=size, default=size("1G"))
    parser.add_argument("--chunk", type=size, default=size("1M"))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--data", choices=CODECS, action="append", help="only these (default: all)")
    parser.add_argument("--directory", help="where to write (default: the directory for temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        for kind in given.data or CODECS:
            root = Path(directory, kind)
            files = write(root, kind, given.bytes, given.distinct, given.chunk)
            for row in measured(root, files, given.times):
                print(json.dumps(row), flush=True)
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
