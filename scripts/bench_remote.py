"""The table of remote workloads: shardfs against native clients on the same store, in the same run.

    python scripts/bench_remote.py [--latency-ms 20] [--repeat 3] [--size 512] [--only REGEX]

The store is `delaying_server.py`: each answer waits for the latency, then flows at 100 MB/s per connection. S3 is moto
behind it. The array has zstd chunks of 64^3 in 4 shards: with 512 MiB, 2,048 chunks of about 81 KB. Contestants take
turns, each in a fresh process and on a fresh mount. Times are the best of the repetitions; requests and bytes are
exact. Nothing depends on the result.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK = 64
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

CLIENT = """
import itertools, json, random, sys, time
from concurrent.futures import ThreadPoolExecutor
client, workload, where = sys.argv[1:]
count = 0  # chunks that the workload needs, if only this run knows
local = where.startswith("/")
if client == "tensorstore":
    import tensorstore as ts
    begin = time.perf_counter()
    store = {"driver": "file", "path": where} if local else where + "/"
    array = ts.open({"driver": "zarr3", "kvstore": store, "open": True}).result()
    read = lambda *box: array[box].read().result()
elif client == "zarr":
    import numpy, zarr
    if not local:
        import obstore.store
        web = obstore.store.HTTPStore.from_url(where, client_options={"allow_http": True})
        where = zarr.storage.ObjectStore(web, read_only=True)
    begin = time.perf_counter()
    array = zarr.open_array(where, mode="r")
    read = lambda *box: array[box]
else:
    shape = json.load(open(where + "/zarr.json"))["shape"]
    grid = [(z, y, x) for z in range(shape[0] // 64) for y in range(shape[1] // 64) for x in range(shape[2] // 64)]
    begin = time.perf_counter()
    def fetch(chunk):
        with open(where + "/c/%d/%d/%d" % chunk, "rb", buffering=0) as file: file.read()
    with ThreadPoolExecutor(int(client)) as pool: list(pool.map(fetch, grid if workload == "whole" else grid[:256]))
if client in ("tensorstore", "zarr"):
    if workload == "whole": read(...)
    elif workload == "random":
        cells = itertools.product(*(range(n // 64) for n in array.shape))
        for cell in random.Random(1).sample(list(cells), 64): read(*(slice(64 * i, 64 * i + 64) for i in cell))
    elif workload in ("blocks", "fortran", "pencils", "walk"):
        sides, chance, asked = [n // 64 for n in array.shape], random.Random(1), set()
        if workload == "blocks": cells = itertools.product(*(range(0, n - n % 2, 2) for n in sides))
        elif workload == "fortran": cells = (cell[::-1] for cell in itertools.product(*(range(n) for n in sides[::-1])))
        elif workload == "pencils":
            lines = chance.sample(list(itertools.product(range(sides[0]), range(sides[1]))), 16)
            cells = ((*line, x) for line in lines for x in range(sides[2]))
        else:
            cells, cell = [], [n // 2 for n in sides]
            for _ in range(256):
                axis = chance.randrange(3)
                cell[axis] = min(max(cell[axis] + chance.choice((-1, 1)), 0), sides[axis] - 1)
                cells.append(tuple(cell))
        width = 2 if workload == "blocks" else 1
        for cell in cells:
            read(*(slice(64 * i, 64 * (i + width)) for i in cell))
            asked.update(itertools.product(*(range(i, i + width) for i in cell)))
        count = len(asked)
    else: read(*(0 if axis == workload else slice(None) for axis in "zyx"))
print(time.perf_counter() - begin, count)
sys.stdout.flush()
import os
os._exit(0)
"""


class Measured(NamedTuple):
    """One run of one contestant: seconds, requests to the store, CPU seconds of the daemon, a remark.

    Last, the bytes that the workload needed if only the run knows them.
    """

    seconds: float
    requests: Sequence[dict[str, Any]] = ()
    cpu_s: float = 0
    remark: str = ""
    needed: float = 0


@dataclass
class Row:
    """A row of the table. The first contestant is the base of the ratios. `needed`: bytes that the workload needs."""

    name: str
    goal: str
    contestants: dict[str, Callable[[], Measured]]
    needed: float = 0
    skipped: str = ""


def command(*words: str | Path, **options: Any) -> str:
    """Run a program that must succeed; return its output."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=600, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr[-500:]}")
    return done.stdout


def shardfs(*words: str | Path) -> str:
    """Run a verb of shardfs."""
    return command(sys.executable, "-m", "shardfs", *words)


def in_a_row(requests: list[dict[str, Any]]) -> int:
    """Return the length of the longest chain of requests that each came after the answer to the one before."""
    longest: list[tuple[float, int]] = []
    for r in sorted(requests, key=lambda r: r["came"]):
        longest.append((r["answered"], 1 + max((n for at, n in longest if at <= r["came"]), default=0)))
    return max((n for _, n in longest), default=0)


@dataclass
class Bench:
    """The data, the servers and the measurements."""

    scratch: Path
    latency_ms: float
    side: int
    url: str = ""
    s3_url: str = ""
    chunk_bytes: float = field(init=False, default=0)

    @property
    def chunks(self) -> int:
        return 4 * (self.side // CHUNK) ** 3

    @property
    def mountpoint(self) -> Path:
        return self.scratch / "mount"

    # ---- data and servers ----

    def write(self) -> None:
        """Write the array sharded (`a`) and with one file per chunk (`plain`), and a small one to be written to."""
        import numpy as np
        import tensorstore as ts

        zstd = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}]
        sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [CHUNK] * 3, "codecs": zstd}}
        data = np.random.default_rng(1)
        forms = {"a": (self.side, [sharding]), "plain": (CHUNK, zstd), "empty/w": (4 * CHUNK, [sharding])}
        arrays = []
        for name, (grid, codecs) in forms.items():
            shape = [4 * CHUNK] * 3 if name == "empty/w" else [self.side, 2 * self.side, 2 * self.side]
            chunk_grid = {"name": "regular", "configuration": {"chunk_shape": [grid] * 3}}
            metadata = {"shape": shape, "data_type": "uint8", "chunk_grid": chunk_grid, "codecs": codecs}
            store = {"driver": "file", "path": str(self.scratch / "served" / name)}
            arrays.append(ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result())
        for y, x in ((0, 0), (0, self.side), (self.side, 0), (self.side, self.side)):
            block = data.integers(100, 104, (self.side,) * 3, np.uint8)
            for array in arrays[:2]:
                array[:, y : y + self.side, x : x + self.side].write(block).result()
        stored = [file.stat().st_size for file in (self.scratch / "served/plain/c").rglob("*") if file.is_file()]
        self.chunk_bytes = sum(stored) / len(stored)

    @contextmanager
    def serving(self) -> Iterator[Bench]:
        """Start the servers."""
        os.environ.update(KEYS)
        with delaying(str(self.scratch / "served"), self.latency_ms) as self.url, self._moto() as origin:
            if not origin:
                yield self
                return
            with delaying(origin, self.latency_ms) as self.s3_url:
                yield self

    @contextmanager
    def _moto(self) -> Iterator[str]:
        try:
            import boto3
            from moto.server import ThreadedMotoServer
        except ImportError:
            yield ""
            return
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        url = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="data")
        document = (self.scratch / "served/empty/w/zarr.json").read_bytes()
        client.put_object(Bucket="data", Key="w/zarr.json", Body=document)
        yield url
        server.stop()

    def asked(self, url: str = "") -> list[dict[str, Any]]:
        """Return the requests since the last call."""
        with urllib.request.urlopen(f"{url or self.url}/.requests") as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    # ---- measurements ----

    @contextmanager
    def mounted(self, source: str = "", *options: str) -> Iterator[Path]:
        self.mountpoint.mkdir(exist_ok=True)
        shardfs("mount", source or f"{self.url}/a", self.mountpoint, *options)
        try:
            yield self.mountpoint
        finally:
            shardfs("umount", self.mountpoint)

    def client(self, client: str, workload: str, where: str | Path) -> Measured:
        self.asked()
        seconds, count = command(sys.executable, "-c", CLIENT, client, workload, str(where)).split()[-2:]
        return Measured(float(seconds), data_requests(self.asked()), needed=int(count) * self.chunk_bytes)

    def native(self, client: str, workload: str) -> Callable[[], Measured]:
        return lambda: self.client(client, workload, f"{self.url}/a")

    def through(self, client: str, workload: str, *options: str) -> Callable[[], Measured]:
        def run() -> Measured:
            with self.mounted("", *options) as mount:
                pid = int(os.getxattr(mount, "user.shardfs.pid"))
                before = cpu_seconds(pid)
                found = self.client(client, workload, mount)
                return found._replace(cpu_s=cpu_seconds(pid) - before)

        return run

    def shell(self, *words: str) -> Callable[[], Measured]:
        """Measure a program on a mount: `{mount}` and `{copy}` are its arguments."""

        def run() -> Measured:
            with self.mounted() as mount:
                return self.program([w.format(mount=mount, copy=self.scratch / "copy") for w in words])

        return run

    def program(self, words: list[str]) -> Measured:
        self.asked()
        begin = time.perf_counter()
        command(*words)
        seconds = time.perf_counter() - begin
        shutil.rmtree(self.scratch / "copy", ignore_errors=True)
        return Measured(seconds, self.asked())

    def rclone(self) -> Measured:
        """Copy the plain files with 64 transfers."""
        web = ["--http-url", f"{self.url}/plain/c", "--http-no-head", "--config", "/dev/null"]
        return self.program(
            ["rclone", "copy", ":http:", str(self.scratch / "copy"), "--transfers", "64", "--checkers", "64", *web]
        )

    def downloads(self) -> Measured:
        """Fetch the plain files with 64 requests at a time: what `rclone copy` does, without its own work."""
        root = self.scratch / "served/plain"
        urls = [f"{self.url}/plain/{f.relative_to(root)}" for f in (root / "c").rglob("*") if f.is_file()]
        names = "".join(f'url = "{url}"\noutput = "{i}"\n' for i, url in enumerate(urls))
        (self.scratch / "copy").mkdir()
        (self.scratch / "urls").write_text(names)
        fetch = ["curl", "-s", "--parallel", "--parallel-max", "64", "--output-dir", str(self.scratch / "copy")]
        return self.program([*fetch, "-K", str(self.scratch / "urls")])

    def first_byte(self, source: str = "") -> Measured:
        """Measure from the mount command to the first byte of a chunk; the server also answers GET as S3 does."""
        self.asked()
        options = ["-o", f"storage_option.endpoint_url={self.url}"] if source else []
        begin = time.perf_counter()
        with self.mounted(source, *options) as mount, (mount / "c/0/1/1").open("rb", buffering=0) as file:
            file.read(1)
            seconds, requests = time.perf_counter() - begin, self.asked()
        return Measured(seconds, requests, remark=f"{in_a_row(requests)} in a row")

    def remount(self) -> Measured:
        """Read 256 chunks on a second mount with the same disk cache."""
        options = ("-o", f"cache_dir={self.scratch / 'cache'}")
        self.through("16", "some", *options)()
        return self.through("16", "some", *options)()

    def written(self, *, again: bool) -> Callable[[], Measured]:
        """Write 64 chunks, a whole shard, through a mount of S3, and flush; `again`: the shard exists already."""
        options = ["--rw", "-o", f"storage_option.endpoint_url={self.s3_url}"]
        fill = (
            "import sys, numpy, tensorstore as ts; where, seed = sys.argv[1:]; store = dict(driver='file', path=where);"
            "array = ts.open(dict(driver='zarr3', kvstore=store)).result();"
            "array.write(numpy.random.default_rng(int(seed)).integers(0, 4, array.shape, 'u1')).result()"
        )

        def run() -> Measured:
            with self.mounted("s3://data/w", *options) as mount:
                if not again:
                    shutil.rmtree(mount / "c", ignore_errors=True)
                for seed in ("1", "2") if again else ("1",):
                    shardfs("flush", mount)
                    self.asked(self.s3_url)
                    begin = time.perf_counter()
                    command(sys.executable, "-c", fill, mount, seed)
                    shardfs("flush", mount)
                seconds, requests = time.perf_counter() - begin, self.asked(self.s3_url)
                new = sum(f.stat().st_size for f in (mount / "c").rglob("*") if f.is_file())
            up = sum(r["received"] for r in requests)
            return Measured(seconds, requests, remark=f"{up / new:.2f} bytes up / new")

        return run


def data_requests(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in requests if r["method"] == "GET" and "/c/" in r["path"] and r["bytes"]]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def delaying(origin: str, latency_ms: float) -> Iterator[str]:
    """Serve a directory or another server with latency; yield the URL."""
    words = [sys.executable, str(Path(__file__).with_name("delaying_server.py")), origin]
    with subprocess.Popen([*words, "--latency-ms", str(latency_ms)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def rows(b: Bench) -> Iterator[Row]:
    """Yield the rows of the table."""
    whole = b.chunks * b.chunk_bytes
    n = b.side // CHUNK
    native = {"native tensorstore": b.native("tensorstore", "whole")}
    yield Row("whole, tensorstore", "1.5 x", native | {"shardfs": b.through("tensorstore", "whole")}, whole)
    yield Row("whole, 16 readers", "1.0 x; 0.3 ms CPU a chunk", native | {"shardfs": b.through("16", "whole")}, whole)
    base = {"native zarr on obstore": b.native("zarr", "whole")}
    yield Row("whole, zarr-python 3", "1.2 x", base | {"shardfs": b.through("zarr", "whole")}, whole)
    for axis, count in (("z", 4 * n * n), ("y", 2 * n * n), ("x", 2 * n * n)):
        base = {"native tensorstore": b.native("tensorstore", axis)}
        mine = {"shardfs": b.through("tensorstore", axis)}
        yield Row(f"{axis} plane, tensorstore", "2.0 x; 1.3 bytes", base | mine, count * b.chunk_bytes)
    base, mine = (
        {"native tensorstore": b.native("tensorstore", "random")},
        {"shardfs": b.through("tensorstore", "random")},
    )
    yield Row("64 random", "1.1 requests a chunk; 1.1 bytes", base | mine, 64 * b.chunk_bytes)
    for workload, goal in (
        ("blocks", "3 x faster"),
        ("fortran", "3 x faster"),
        ("pencils", "3 x faster; 1.35 bytes"),
        ("walk", "1.35 bytes"),
    ):
        base = {"shardfs, prefetch=0": b.through("tensorstore", workload, "-o", "prefetch=0")}
        yield Row(f"{workload}, tensorstore", goal, base | {"shardfs": b.through("tensorstore", workload)})
    copy = {"rclone": b.rclone} if shutil.which("rclone") else {"curl, 64 at a time": b.downloads}
    yield Row("cp -r", "1.5 x", copy | {"shardfs": b.shell("cp", "-r", "{mount}/c", "{copy}")}, whole)
    yield Row("ls -lR", "20 requests", {"shardfs": b.shell("ls", "-lR", "{mount}")})
    first = {"shardfs": b.first_byte, "shardfs, S3": lambda: b.first_byte("s3://a")}
    yield Row("first byte", "3 in a row; 0.3 s at 20 ms", first)
    text = (Path(__file__).parents[1] / "docs/options.md").read_text()
    lacking = "" if "`cache_dir`" in text else "there is no option cache_dir"
    local = {"local plain files": lambda: b.client("16", "some", b.scratch / "served/plain")}
    yield Row("256 chunks after a remount", "3 x; 0 requests", local | {"shardfs": b.remount}, skipped=lacking)
    lacking = "" if b.s3_url else "moto's server is not installed"
    yield Row("S3: a new shard", "8 requests", {"shardfs": b.written(again=False)}, skipped=lacking)
    yield Row("S3: all of a shard again", "1.1 bytes up", {"shardfs": b.written(again=True)}, skipped=lacking)


def measure(row: Row, repeat: int, chunks: int) -> None:
    """Run the contestants in turns, and print their lines."""
    runs: dict[str, list[Measured]] = {name: [] for name in row.contestants}
    for _ in range(repeat):
        for name, run in row.contestants.items():
            runs[name].append(run())
    best = {name: min(found, key=lambda m: m.seconds) for name, found in runs.items()}
    base = next(iter(best.values())).seconds
    for name, m in best.items():
        needed = row.needed or m.needed
        ratio = f"{sum(r['bytes'] for r in m.requests) / needed:.2f}" if needed else ""
        remark = m.remark or (f"{1e3 * m.cpu_s / chunks:.2f} ms CPU a chunk" if m.cpu_s and "whole" in row.name else "")
        goal = row.goal if name == "shardfs" else ""
        times = f"{m.seconds:.2f} | {m.seconds / base:.1f} | {len(m.requests)} | {ratio}"
        print(f"| {row.name} | {name} | {times} | {remark} | {goal} |", flush=True)


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--size", type=int, default=512, help="MiB of the array, at least 8")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows to measure")
    options = parser.parse_args()
    side = CHUNK * max(round((options.size * 2**18) ** (1 / 3) / CHUNK), 1)
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # installed programs have their bytecode
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        bench = Bench(Path(name), options.latency_ms, side)
        bench.write()
        print(f"| {options.latency_ms:g} ms | contestant | s | x | requests | bytes / needed | | goal |")
        print("|---|---|---|---|---|---|---|---|")
        with bench.serving():
            for row in rows(bench):
                if row.skipped and re.search(options.only, row.name):
                    print(f"| {row.name} | | | | | | skipped: {row.skipped} | {row.goal} |")
                elif re.search(options.only, row.name):
                    measure(row, options.repeat, bench.chunks)


if __name__ == "__main__":
    main()
