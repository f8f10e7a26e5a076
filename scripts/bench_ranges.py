"""What the clients of a distant store cost: CPU time of the start, CPU time and speed for each byte range, requests.

    python scripts/bench_ranges.py [--size 65536] [--ranges 1000] [--threads 8] [--rounds 3] [--latency-ms 0]

`delaying_server.py` serves one file. It answers GET as S3 and Google Cloud Storage do, so it serves all protocols.
Each measurement is a fresh process; the clients take turns, and the best of the rounds counts. *Start* is the CPU time
of the process until the first bytes, with all imports. `http.client` is the standard library's client, with one
connection for each thread; shardfs does not use it. Nothing depends on the result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_BYTES = 64 << 20
CLIENTS = {
    "http": {"obstore": "obstore", "fsspec": "aiohttp", "http.client": "http.client"},
    "s3": {"obstore": "obstore", "fsspec": "s3fs"},
    "gs": {"obstore": "obstore", "fsspec": "gcsfs"},
}


class Cost(NamedTuple):
    """CPU seconds until the first bytes; CPU and wall-clock seconds for each range; requests for all ranges."""

    start: float
    cpu: float
    wall: float
    requests: int


def standard_client(url: str) -> Callable[[int, int], bytes]:
    """Return a function that reads a range with the client of the standard library."""
    import http.client

    connections = threading.local()

    def read(start: int, stop: int) -> bytes:
        if not hasattr(connections, "client"):
            connections.client = http.client.HTTPConnection(url.removeprefix("http://"))
        connections.client.request("GET", "/data/file", headers={"Range": f"bytes={start}-{stop - 1}"})
        return connections.client.getresponse().read()

    return read


def reader(protocol: str, client: str, url: str) -> Callable[[int, int], bytes]:
    """Return a function that reads a range of the file."""
    if client == "http.client":
        return standard_client(url)
    from shardfs.model.blobs import ByteRange
    from shardfs.storage import range_client
    from shardfs.storage.open_store import open_store

    if client == "fsspec":
        range_client.RangeClient.suits = lambda self, path: False  # type: ignore[method-assign]
    options = {
        "http": {},
        "s3": {"key": "k", "secret": "s", "endpoint_url": url, "config_kwargs": {"max_pool_connections": 64}},
        "gs": {"token": "anon", "endpoint_url": url},
    }
    blob = open_store(f"{url}/data" if protocol == "http" else f"{protocol}://data", options[protocol]).open("file")
    return lambda start, stop: blob.read([ByteRange(start, stop)])[0]


def measure(protocol: str, client: str, url: str, size: int, ranges: int, threads: int) -> Cost:
    """Return the costs in this process, which has imported nothing yet."""
    read = reader(protocol, client, url)
    assert len(read(0, 10)) == 10
    start = time.process_time()
    chance = random.Random(1)
    starts = [chance.randrange(FILE_BYTES - size) for _ in range(ranges)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: read(0, 10), range(4 * threads)))
        urllib.request.urlopen(f"{url}/.requests").read()
        cpu, wall = time.process_time(), time.perf_counter()
        for data in pool.map(lambda at: read(at, at + size), starts):
            assert len(data) == size
        cpu, wall = (time.process_time() - cpu) / ranges, (time.perf_counter() - wall) / ranges
    return Cost(start, cpu, wall, len(json.load(urllib.request.urlopen(f"{url}/.requests"))))


def compare(url: str, arguments: list[str], rounds: int, size: int) -> None:
    """Let the clients of each protocol take turns, and print a line for each."""
    for protocol, clients in CLIENTS.items():
        costs: dict[str, list[Cost]] = {name: [] for name in clients}
        for _ in range(rounds):
            for name, found in costs.items():
                words = [*arguments, protocol, name, url]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                found.append(Cost(*json.loads(done.stdout)))
        for name, found in costs.items():
            best = Cost(*(min(values) for values in zip(*found, strict=True)))
            speed = size / best.wall / 1e6
            print(
                f"{protocol:5}{clients[name]:12} start {best.start:5.2f} s CPU   "
                f"{1e3 * best.cpu:6.3f} ms CPU a range {speed:7.1f} MB/s {best.requests:6} requests",
                flush=True,
            )


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--ranges", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # without it, gcsfs asks a Google host for each bucket
    if options.one:
        print(json.dumps(measure(*options.one, options.size, options.ranges, options.threads)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "data").mkdir()
        (Path(root) / "data" / "file").write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
        for api in ("storage", "download/storage"):  # the paths of Google's JSON interface
            (Path(root) / api / "v1/b/data").mkdir(parents=True)
            (Path(root) / api / "v1/b/data/o").symlink_to(Path(root) / "data")
        command = [sys.executable, str(Path(__file__).with_name("delaying_server.py")), root]
        command += ["--latency-ms", str(options.latency_ms), "--bandwidth-mb", "0"]
        arguments = [sys.executable, __file__, "--size", str(options.size), "--ranges", str(options.ranges)]
        arguments += ["--threads", str(options.threads), "--one"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            try:
                compare(url, arguments, options.rounds, options.size)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
