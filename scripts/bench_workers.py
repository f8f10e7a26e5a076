"""What a second serving process could bring at most: readers of one mount against the same readers of two mounts.

    python scripts/bench_workers.py [--repeat 5] [--readers 8 16]

Both mounts show the same source, so together they are what a mount with two serving processes would be if these shared
nothing. The two ways take turns. A gain is the median of the ratios of the repetitions; the gain of the best
repetitions follows. This is no test. Requires numpy and tensorstore, and aiohttp for the remote source.

local       warm chunks of local shards
transcoded  zstd chunks of local shards, shown without compression
remote      chunks of a web server (`delaying_server.py`, without delay), read for the second time
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench_lib import ENVIRONMENT, Calm, DataSet, Mount, adopt_daemons, write_with_tensorstore
from bench_remote import delaying

if TYPE_CHECKING:
    from collections.abc import Sequence

CUBE = (4, 4, 4)
RAW = {
    "16 KiB": DataSet("16k", (16, 32, 32), (16, 32, 32), CUBE),
    "1 MiB": DataSet("1m", (8, 8, 8), (64, 128, 128), CUBE),
}

READER = """
import os, sys
number, readers, *mounts = sys.argv[1:]
root = mounts[int(number) % len(mounts)]
paths = sorted(os.path.join(r, name) for r, _, names in os.walk(root) for name in names if name.isdigit())
sys.stdin.readline()
for path in paths[int(number)::int(readers)]:
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
"""


def read(source: str, scratch: Path, mounts: int, readers: int, options: Sequence[str], *, twice: bool) -> float:
    """Return the seconds that the readers take; `twice`: the second time, without the kernel's cache."""
    with ExitStack() as stack:
        roots = [scratch / f"mount{number}" for number in range(mounts)]
        for root in roots:
            root.mkdir(exist_ok=True)
            probe = ".zarray" if "zarr2" in options else "zarr.json"
            command = [sys.executable, "-m", "shardfs", "mount", source, str(root), *options]
            stack.callback(Mount(command, root, probe, stays=False).close)
        for _ in range(1 + twice):
            seconds = run_readers(roots, readers)
            if twice:
                Path("/proc/sys/vm/drop_caches").write_text("1")
        return seconds


def run_readers(roots: Sequence[Path], readers: int) -> float:
    arguments = [sys.executable, "-c", READER]
    processes = [
        subprocess.Popen([*arguments, str(n), str(readers), *map(str, roots)], stdin=subprocess.PIPE, env=ENVIRONMENT)
        for n in range(readers)
    ]
    time.sleep(1)  # until all have listed the files
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # lets it begin
    for process in processes:
        process.wait()
    return time.perf_counter() - began


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="+", default=[8, 16])
    options = parser.parse_args()
    adopt_daemons()
    calm = Calm(120)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        home = Path(name)
        for data in RAW.values():
            (home / data.name).mkdir()
            write_with_tensorstore(data, home / data.name)
        write_compressed(home / "zstd")
        url = stack.enter_context(delaying(str(home), 0))
        sources: dict[str, tuple[str, list[str], bool]] = {
            **{f"local, {size}": (str(home / data.name / "sharded"), [], False) for size, data in RAW.items()},
            "transcoded, 128 KiB": (str(home / "zstd"), ["--layout", "zarr2", "-o", "chunk_codec=raw"], False),
            "remote, 1 MiB": (f"{url}/1m/sharded", ["-o", "chunk_cache=1G"], True),
        }
        print("| chunks | readers | one process, s | gain by a second process |\n|---|---|---|---|")
        for what, (source, flags, twice) in sources.items():
            for readers in options.readers:
                times: dict[int, list[float]] = {1: [], 2: []}
                for _ in range(options.repeat):
                    for mounts, found in times.items():
                        calm.wait()
                        found.append(read(source, home, mounts, readers, flags, twice=twice))
                gain = statistics.median(a / b for a, b in zip(times[1], times[2], strict=True))
                best = min(times[1]), min(times[2])
                print(f"| {what} | {readers} | {best[0]:.2f} | {gain:.2f} ({best[0] / best[1]:.2f}) |", flush=True)


def write_compressed(path: Path) -> None:
    import numpy as np
    import tensorstore as ts

    data = (np.add.outer(np.add.outer(np.arange(128), np.arange(1024)), np.arange(1024)) // 3).astype(np.uint8)
    inside = {"chunk_shape": [32, 64, 64], "codecs": [{"name": "bytes"}, {"name": "zstd"}]}
    grid = {"name": "regular", "configuration": {"chunk_shape": [128, 512, 512]}}
    codecs = [{"name": "sharding_indexed", "configuration": inside}]
    metadata = {"shape": data.shape, "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    ts.open(spec, create=True).result().write(data).result()


if __name__ == "__main__":
    main()
