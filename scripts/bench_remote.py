"""Reading a distant store through a mount, measured against tensorstore on the same store, in the same run.

    python scripts/bench_remote.py [--latency-ms 20] [--repeat 3]

The store is `delaying_server.py`: each answer waits for the latency, then flows at 100 MB/s per connection. The array
has 1,024 raw chunks of 32 KiB in 4 shards. Contestants take turns, each in a fresh process and on a fresh mount. Times
are the best of the repetitions, requests and bytes are exact. It is no test: nothing depends on the result.

native    tensorstore reads the shards; for `cp`, nothing
demand    shardfs with prefetch=0: each chunk is fetched when it is asked for
shardfs   shardfs without options
cached    shardfs with cache_dir, after a mount that has read the same
plain     no store: the chunks as local plain files
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE, CHUNK, SHARD = (128, 512, 512), (32, 32, 32), (128, 256, 256)
PARTS = {
    "whole array": 1.0,
    "z plane": 1 / 4,
    "y plane": 1 / 16,
    "x plane": 1 / 16,
    "64 random": 64 / 1024,
    "cp -r": 1.0,
}
"""The share of the chunks that each workload needs."""

CONTESTANTS = ("native", "demand", "shardfs", "cached", "plain")

CLIENT = """
import json, random, sys, time
import tensorstore as ts
workload, where = sys.argv[1:]
store = {"driver": "file", "path": where} if where.startswith("/") else where
array = ts.open({"driver": "zarr3", "kvstore": store, "open": True}).result()
begin = time.perf_counter()
if workload == "whole array": array.read().result()
elif workload == "z plane": array[0].read().result()
elif workload == "y plane": array[:, 0].read().result()
elif workload == "x plane": array[:, :, 0].read().result()
else:
    chance = random.Random(1)
    for _ in range(64): array[tuple(32 * chance.randrange(n // 32) for n in array.shape)].read().result()
print(time.perf_counter() - begin)
"""


def make(path: Path) -> None:
    """Write the array."""
    import numpy as np
    import tensorstore as ts

    data = np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8)
    codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": CHUNK, "codecs": [{"name": "bytes"}]}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": SHARD}}
    metadata = {"shape": SHAPE, "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    ts.open(spec, create=True).result().write(data).result()


def make_plain(scratch: Path) -> None:
    """Copy the chunks of the array to local plain files."""
    (scratch / "mount").mkdir()
    shardfs("mount", str(scratch / "served" / "a"), str(scratch / "mount"))
    try:
        shutil.copytree(scratch / "mount", scratch / "plain")
    finally:
        shardfs("umount", str(scratch / "mount"))


@contextmanager
def serving(root: Path, latency_ms: float) -> Iterator[str]:
    """Serve a directory; yield the URL."""
    command = [sys.executable, str(Path(__file__).with_name("delaying_server.py")), str(root)]
    with subprocess.Popen([*command, "--latency-ms", str(latency_ms)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def shardfs(*arguments: str) -> None:
    """Run a verb of shardfs."""
    subprocess.run([sys.executable, "-m", "shardfs", *arguments], check=True)


def measure(contestant: str, workload: str, url: str, scratch: Path) -> tuple[float, list[dict[str, Any]]]:
    """Return seconds, and the requests for bytes of shards."""
    mount = scratch / ("plain" if contestant == "plain" else "mount")
    mount.mkdir(exist_ok=True)
    options = {"demand": ("-o", "prefetch=0"), "cached": ("-o", f"cache_dir={scratch / 'cache'}")}.get(contestant, ())
    mounts = contestant not in ("native", "plain")
    if mounts:
        shardfs("mount", f"{url}/a", str(mount), *options)
    urllib.request.urlopen(f"{url}/.requests").read()
    try:
        begin = time.perf_counter()
        if workload == "cp -r":
            subprocess.run(["cp", "-r", mount / "c", scratch / "copy"], check=True)
            seconds = time.perf_counter() - begin
            shutil.rmtree(scratch / "copy")
        else:
            where = f"{url}/a/" if contestant == "native" else str(mount)
            client = [sys.executable, "-c", CLIENT, workload, where]
            seconds = float(subprocess.run(client, check=True, capture_output=True, text=True).stdout)
        found = json.load(urllib.request.urlopen(f"{url}/.requests"))
    finally:
        if mounts:
            shardfs("umount", str(mount))
    return seconds, [r for r in found if r["method"] == "GET" and "/c/" in r["path"]]


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    chunk_bytes, chunks = 32**3, 1024
    print(f"| {options.latency_ms:g} ms | contestant | s | x native | requests | bytes / needed |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        make(scratch / "served" / "a")
        make_plain(scratch)
        with serving(scratch / "served", options.latency_ms) as url:
            for workload, share in PARTS.items():
                contestants = [c for c in CONTESTANTS if (workload, c) != ("cp -r", "native")]
                measure("cached", workload, url, scratch)
                runs: dict[str, list[tuple[float, list[dict[str, Any]]]]] = {c: [] for c in contestants}
                for _ in range(options.repeat):
                    for c in contestants:
                        runs[c].append(measure(c, workload, url, scratch))
                base = min(s for s, _ in runs.get("native", runs["demand"]))
                for c in contestants:
                    seconds, requests = min(runs[c], key=lambda run: run[0])
                    ratio = sum(r["bytes"] for r in requests) / (share * chunks * chunk_bytes)
                    row = f"{seconds:.2f} | {seconds / base:.1f} | {len(requests)} | {ratio:.2f}"
                    print(f"| {workload} | {c} | {row} |", flush=True)


if __name__ == "__main__":
    main()
