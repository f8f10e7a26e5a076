"""The CPU time that a process needs to read byte ranges of a distant store: with obstore, and with fsspec's clients.

    python scripts/bench_ranges.py [--size 80000] [--ranges 1000] [--threads 1 8]

`delaying_server.py` serves one file without latency. It answers GET as S3 does, so it serves both protocols. Each row
is a fresh process, whose CPU time is measured without imports and without the first requests. It is no test.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE_BYTES = 64 << 20
CLIENTS = {("http", "fsspec"): "aiohttp", ("s3", "fsspec"): "s3fs"}


def measure(protocol: str, client: str, url: str, size: int, ranges: int, threads: int) -> float:
    """Return the CPU seconds of this process for reading random ranges."""
    from shardfs.model.blobs import ByteRange
    from shardfs.storage import range_client
    from shardfs.storage.open_store import open_store

    if client == "fsspec":
        range_client.RangeClient.suits = lambda self, path: False  # type: ignore[method-assign]
    s3 = {"key": "k", "secret": "s", "endpoint_url": url, "config_kwargs": {"max_pool_connections": 64}}
    store = open_store(f"{url}/data", {}) if protocol == "http" else open_store("s3://data", s3)
    blob, chance = store.open("file"), random.Random(1)
    starts = [chance.randrange(FILE_BYTES - size) for _ in range(ranges)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: blob.read([ByteRange(0, 10)]), range(4 * threads)))
        begin = time.process_time()
        for data in pool.map(lambda start: blob.read([ByteRange(start, start + size)])[0], starts):
            assert len(data) == size
        return time.process_time() - begin


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=80_000)
    parser.add_argument("--ranges", type=int, default=1000)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        protocol, client, url, threads = options.one
        print(measure(protocol, client, url, options.size, options.ranges, int(threads)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "data").mkdir()
        (Path(root) / "data" / "file").write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
        command = [sys.executable, str(Path(__file__).with_name("delaying_server.py")), root]
        command += ["--latency-ms", "0", "--bandwidth-mb", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            arguments = ["--size", str(options.size), "--ranges", str(options.ranges)]
            for protocol in ("http", "s3"):
                for threads in options.threads:
                    for client in ("fsspec", "obstore"):
                        one = [sys.executable, __file__, *arguments, "--one", protocol, client, url, str(threads)]
                        seconds = float(subprocess.run(one, check=True, capture_output=True, text=True).stdout)
                        name = CLIENTS.get((protocol, client), client)
                        print(f"{protocol:5}{name:8} {threads:3} threads {1e3 * seconds / options.ranges:6.3f} ms CPU")
            server.terminate()


if __name__ == "__main__":
    main()
