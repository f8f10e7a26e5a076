"""The parts of bench_read.py: data sets, mounts, waiting for a quiet machine, and the timed clients.

Run as a program, `bench_lib.py read|scan|array|requests ...` is one client: it works in a fresh process and prints one
JSON object. A client imports no more than it needs. Only `scan` and `requests` use code of shardfs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).resolve().parent
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Python has no name for it
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(HERE.parent),
    "PYTHONDONTWRITEBYTECODE": "",  # installed programs have their bytecode
    "LC_ALL": "C.UTF-8",
}

# ---- data ----


@dataclass(frozen=True)
class DataSet:
    """One Zarr v3 array of uint8 whose `grid` of chunks is a multiple of `per_shard`.

    Args:
        twin: also write the unsharded form. Without it, the shards are written without a library, because only the
            number of chunks matters.
    """

    name: str
    grid: tuple[int, ...]
    chunk: tuple[int, ...]
    per_shard: tuple[int, ...]
    twin: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk)

    @property
    def bytes(self) -> int:
        return self.count * self.chunk_bytes

    def metadata(self, *, sharded: bool) -> dict[str, Any]:
        per = self.per_shard if sharded else (1,) * len(self.grid)
        raw = [{"name": "bytes"}]
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inside = {"chunk_shape": self.chunk, "codecs": raw, "index_codecs": index, "index_location": "end"}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": _times(self.grid, self.chunk),
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _times(per, self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "sharding_indexed", "configuration": inside}] if sharded else raw,
            "attributes": {},
        }


def _times(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x * y for x, y in zip(a, b, strict=True)]


class Data:
    """Writes data sets to one directory, each at its first use."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.made: list[Path] = []

    def path(self, of: DataSet, form: str) -> Path:
        """`form`: `sharded`, `plain` (its unsharded twin), or `table` for least_fuse."""
        return self.home / of.name / form

    def need(self, of: DataSet) -> None:
        root = self.home / of.name
        if root in self.made:
            return
        self.made.append(root)
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            write_with_tensorstore(of, root) if of.twin else write_shards(of, root)
            write_table(of, root)
            (root / "complete").touch()
        os.sync()  # so that the disk is idle during the measurement

    def remove(self) -> None:
        for root in self.made:
            shutil.rmtree(root, ignore_errors=True)


def write_with_tensorstore(of: DataSet, root: Path) -> None:
    """Write both forms with the same writer, and compare their bytes."""
    import numpy as np
    import tensorstore

    data = np.random.default_rng(3).integers(1, 256, _times(of.grid, of.chunk), np.uint8)
    for form in ("sharded", "plain"):
        store = {"driver": "file", "path": f"{root / form}/", "file_io_sync": False}
        spec = {"driver": "zarr3", "kvstore": store, "metadata": of.metadata(sharded=form == "sharded")}
        tensorstore.open(spec, create=True).result().write(data).result()
    starts, shards, paths = locations(of, root)
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    for key in itertools.product(*map(range, of.grid)):
        plain = (root / "plain" / "c" / "/".join(map(str, key))).read_bytes()
        if plain != os.pread(opened[shards[key]], of.chunk_bytes, int(starts[key])):
            raise SystemExit(f"{of.name}: chunk {key} differs between the sharded array and its unsharded twin")
    for fd in opened:
        os.close(fd)


def write_shards(of: DataSet, root: Path) -> None:
    """Write all chunks; all shards contain the same bytes."""
    import google_crc32c
    import numpy as np

    n = math.prod(of.per_shard)
    index = np.full((n, 2), of.chunk_bytes, "<u8")
    index[:, 0] *= np.arange(n, dtype="<u8")
    tail = index.tobytes()
    tail += google_crc32c.value(tail).to_bytes(4, "little")
    shard = np.random.default_rng(3).integers(1, 256, n * of.chunk_bytes, np.uint8).tobytes() + tail
    for path in shard_paths(of, root):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shard)
    (root / "sharded" / "zarr.json").write_text(json.dumps(of.metadata(sharded=True)))
    (root / "zarr.json").write_text(json.dumps(of.metadata(sharded=False)))


def shard_paths(of: DataSet, root: Path) -> list[Path]:
    grid = [g // p for g, p in zip(of.grid, of.per_shard, strict=True)]
    return [root / "sharded" / "c" / "/".join(map(str, key)) for key in itertools.product(*map(range, grid))]


def locations(of: DataSet, root: Path) -> tuple[Any, Any, list[Path]]:
    """The start of each chunk in its shard, the position of this shard in the paths, and the paths of all shards.

    The first two are arrays of the shape of the grid. The starts come from the shard indices.
    """
    import numpy as np

    starts, shards = np.empty(of.grid, "<u8"), np.empty(of.grid, "<u4")
    size = 16 * math.prod(of.per_shard)
    paths = shard_paths(of, root)
    for i, path in enumerate(paths):
        key = [int(part) for part in path.relative_to(root / "sharded" / "c").parts]
        here = tuple(slice(k * p, (k + 1) * p) for k, p in zip(key, of.per_shard, strict=True))
        with path.open("rb") as file:
            file.seek(-size - 4, os.SEEK_END)
            index = np.frombuffer(file.read(size), "<u8").reshape(*of.per_shard, 2)
        starts[here], shards[here] = index[..., 0], i
        if not (index[..., 1] == of.chunk_bytes).all():
            raise SystemExit(f"{path}: not all of its chunks have {of.chunk_bytes} bytes: delete the data set")
    return starts, shards, paths


def write_table(of: DataSet, root: Path) -> None:
    """Write the table for least_fuse.c. Its last shard is the unsharded metadata document."""
    import numpy as np

    document = root / ("plain/zarr.json" if of.twin else "zarr.json")
    starts, shards, paths = locations(of, root)
    node = np.dtype([("start", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("first", "<u4"), ("entries", "<u4")])
    levels = [math.prod(of.grid[:i]) for i in range(len(of.grid) + 1)]  # `c`, the entries of `c`, ...
    nodes = np.zeros(3 + sum(levels), node)
    nodes[1]["first"], nodes[1]["entries"] = 2, 2
    nodes[2]["size"], nodes[2]["shard"] = document.stat().st_size, len(paths)
    at = 3
    for entries, n in zip(of.grid, levels, strict=False):
        nodes["first"][at : at + n] = at + n + np.arange(n) * entries
        nodes["entries"][at : at + n] = entries
        at += n
    nodes["start"][at:], nodes["shard"][at:], nodes["size"][at:] = starts.ravel(), shards.ravel(), of.chunk_bytes
    with (root / "table").open("wb") as file:
        np.array([len(nodes), len(paths) + 1], "<u8").tofile(file)
        nodes.tofile(file)
        file.write(b"".join(os.fsencode(path) + b"\0" for path in [*paths, document]))


def warm(path: Path) -> None:
    """Read every file below the path, so that the files behind a mount are in the page cache."""
    for directory, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(directory, name), "rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass


# ---- the machine ----


def prefault(size: int) -> None:
    """Touch this many bytes of memory and free them.

    A virtual machine may have returned its free pages to the host. The first access to such a page costs more than the
    measured operations.
    """
    area = mmap.mmap(-1, size + (64 << 20))
    try:
        area.madvise(POPULATE_WRITE)
    except OSError:
        for page in range(0, len(area), mmap.PAGESIZE):
            area[page] = 1
    area.close()


class Calm:
    """Waits until other processes pause, at most `budget_s` seconds in total, and counts the waits in vain."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.asked = self.disturbed = 0

    def wait(self) -> None:
        self.asked += 1
        while busy_share() > 0.2:
            if self.budget_s <= 0:
                self.disturbed += 1
                return
            time.sleep(0.25)
            self.budget_s -= 0.3


def busy_share() -> float:
    """The fraction of all CPU time that was in use during 50 ms."""
    (idle, total), _, (idle_after, total_after) = _cpu_ticks(), time.sleep(0.05), _cpu_ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def _cpu_ticks() -> tuple[int, int]:
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


@contextlib.contextmanager
def on_cpus(cpus: set[int] | None) -> Iterator[None]:
    """Context manager: processes started inside run on these CPUs only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def adopt_daemons() -> None:
    """Make later daemons children of this process, so that their PIDs are known."""
    if ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) failed: the PIDs of daemons would be unknown")


def descendants() -> set[int]:
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


def resident_mib(pids: set[int], line: str = "VmRSS") -> float:
    """Resident memory of these processes; with the line `VmHWM`, the peak."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            total += sum(int(text.split()[1]) for text in file if text.startswith(line))
    return total / 1024


class Mount:
    """One mount, from its command to the end of its processes.

    Args:
        probe: a file in the mount. `ready_s` is the time from the start of the command until its first byte was read
            and, if the command returns, it has returned.
    """

    def __init__(self, command: Sequence[str], mountpoint: Path, probe: str, *, stays: bool) -> None:
        self.root, self._probe, self._stays = mountpoint, mountpoint / probe, stays
        if is_mounted(mountpoint):
            raise SystemExit(f"{mountpoint} is mounted already: unmount it first")
        self._before = descendants()
        began = time.perf_counter()
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
        try:
            self._await(began + 90)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began
        self.pids = self._running()

    def _await(self, deadline: float) -> None:
        if not self._stays and self._process.wait(90):
            raise RuntimeError(
                f"the mount command failed with exit code {self._process.returncode}: {self._process.args!r}"
            )
        while not self._answers():
            if time.perf_counter() > deadline or self._process.poll():
                raise RuntimeError(f"the mount does not answer: {self._process.args!r}")
            time.sleep(0.001)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), open(self._probe, "rb", buffering=0) as file:
            return len(file.read(1)) == 1
        return False

    def close(self) -> None:
        """Unmount (lazily if a program uses the mount), and end the processes that this block started, by PID."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 10 and (is_mounted(self.root) or self._running()):
            if is_mounted(self.root):
                unmount(self.root, lazily=waited > 1)
            time.sleep(0.01)
        for pid in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if is_mounted(self.root):
            unmount(self.root, lazily=True)
        self._running()

    def _running(self) -> set[int]:
        """The running processes that were started since the constructor. Reaps processes that have exited."""
        self._process.poll()
        found = descendants() - self._before
        for pid in found - {self._process.pid}:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    found.discard(pid)
        return found if self._process.returncode is None else found - {self._process.pid}


def is_mounted(path: Path) -> bool:
    """Whether the path is a mount, even if its daemon has died. os.path.ismount returns False for dead mounts."""
    with open("/proc/self/mountinfo") as lines:
        return any(line.split()[4] == str(path).replace(" ", "\\040") for line in lines)


def unmount(path: Path, *, lazily: bool) -> None:
    root = os.getuid() == 0
    command = ["umount", *(["-l"] if lazily else [])] if root else ["fusermount3", "-u", *(["-z"] if lazily else [])]
    subprocess.run([*command, str(path)], stderr=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def tracer(tracing: Path) -> Iterator[Tracer]:
    """Context manager for a tracer in an instance of its own. Needs root. Leaves the traces of other programs alone."""
    tracing.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tracefs", "tracefs", str(tracing)], check=True)
    try:
        instance = tracing / "instances" / f"bench-{os.getpid()}"
        instance.mkdir()
        try:
            (instance / "buffer_size_kb").write_text("8192")
            yield Tracer(instance)
        finally:
            instance.rmdir()
    finally:
        subprocess.run(["umount", "-l", str(tracing)], check=True)


class Tracer:
    """Counts the FUSE requests of one mount by kind. The kernel does not trace FORGET."""

    def __init__(self, instance: Path) -> None:
        self._trace = instance / "trace"
        self._event = instance / "events" / "fuse" / "fuse_request_send"

    def count(self, root: Path, action: Callable[[], object]) -> dict[str, int]:
        device = root.stat().st_dev
        (self._event / "filter").write_text(f"connection == {os.major(device) << 20 | os.minor(device)}")
        self._trace.write_text("")
        (self._event / "enable").write_text("1")
        action()
        (self._event / "enable").write_text("0")
        found: dict[str, int] = {}
        with self._trace.open() as lines:
            for line in lines:
                kind = line.partition("(FUSE_")[2].partition(")")[0]
                if kind:
                    found[kind] = found.get(kind, 0) + 1
        return found


# ---- clients ----


def client(*arguments: object) -> Any:
    """Run a client in a fresh process; return its JSON output."""
    command = [sys.executable, str(HERE / "bench_lib.py"), *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT).stdout)


def read_chunks(root: str, grid: str, limit: str, processes: str) -> dict[str, Any]:
    """Read `limit` chunks twice by key, in random order, without listing; return microseconds per chunk and bytes."""
    keys = itertools.product(*(map(str, range(int(n))) for n in grid.split(",")))
    paths = [f"{root}/c/{'/'.join(key)}" for key in keys]
    random.Random(5).shuffle(paths)
    del paths[int(limit) :]
    parts = [paths[i :: int(processes)] for i in range(int(processes))]
    timed = [_read_alone(paths) if len(parts) == 1 else _read_together(parts) for _ in range(2)]
    return {"us": [seconds / len(paths) * 1e6 for seconds, _ in timed], "bytes": [size for _, size in timed]}


def _read_alone(paths: list[str]) -> tuple[float, int]:
    began = time.perf_counter()
    size = _read_files(paths)
    return time.perf_counter() - began, size


def _read_together(parts: list[list[str]]) -> tuple[float, int]:
    """Read each part in its own process. All start together; the time ends when the last process has finished."""
    context = multiprocessing.get_context("fork")
    gate, total = context.Barrier(len(parts) + 1), context.Value("q", 0)

    def work(part: list[str]) -> None:
        gate.wait()
        size = _read_files(part)
        gate.wait()
        with total.get_lock():
            total.value += size

    workers = [context.Process(target=work, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    time.sleep(0.1)
    gate.wait()
    began = time.perf_counter()
    gate.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds, total.value


def _read_files(paths: list[str]) -> int:
    """Read files as cat and tensorstore do: open, fstat, read to the end, close."""
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        left = os.fstat(fd).st_size
        while left > 0 and (got := len(os.read(fd, left))):
            left -= got
            total += got
        os.close(fd)
    return total


def read_array(library: str, root: str) -> dict[str, float]:
    """Seconds to read a whole array, without the time for import and opening."""
    if library == "tensorstore":
        import tensorstore

        store = {"driver": "file", "path": f"{root}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}, recheck_cached_data="open").result()
        began = time.perf_counter()
        data = array.read().result()
    else:
        import zarr

        opened = zarr.open_array(root, mode="r")
        began = time.perf_counter()
        data = opened[...]
    return {"s": time.perf_counter() - began, "sum": int(data[::5, ::3].sum(dtype="u8"))}


def scan_tree(source: str) -> dict[str, float]:
    """List the directory `c` as `shardfs ls` does; return the number of names, seconds and growth of this process."""
    from shardfs.vfs.tree import open_tree

    tree = open_tree(source, index_cache_bytes=4 << 20)
    directory = tree.resolve("c").number
    names, before = len(next(tree.scan(directory)).names), resident_mib({os.getpid()})
    began = time.perf_counter()
    names = sum(len(batch.names.tolist()) for batch in tree.scan(directory))
    seconds = time.perf_counter() - began
    # Not ru_maxrss: a child starts with the value of its parent.
    return {"names": names, "s": seconds, "grown_mib": resident_mib({os.getpid()}, "VmHWM") - before}


REQUESTS: list[str] = []


def store_requests(zarr: str, precomputed: str) -> dict[str, list[str]]:
    """The requests to an fsspec store for chunks: with a cold and a warm index, missing, and adjacent chunks."""
    import fsspec

    fsspec.register_implementation("counted", _counting_file_system())
    return {**_zarr_requests(zarr), **_precomputed_requests(precomputed)}


def _counting_file_system() -> type:
    """A file system of local files that acts as a remote store: each operation counts as one request."""
    from fsspec import AbstractFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Counted(AbstractFileSystem):  # type: ignore[misc]
        protocol = "counted"
        root_marker = "/"
        near = LocalFileSystem()

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            REQUESTS.append("GET")
            return self.near.cat_file(self._strip_protocol(path), start, end, **options)

        def info(self, path: str, **options: Any) -> Any:
            REQUESTS.append("HEAD")
            return self.near.info(self._strip_protocol(path))

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            REQUESTS.append("LIST")
            return self.near.ls(self._strip_protocol(path), detail=detail)

    return Counted


def _requests_for(tree: Any, directory: str, *names: str) -> list[str]:
    """The kinds of requests, such as HEAD or GET, to read these files in a directory that is resolved already."""
    tree.resolve(directory)
    REQUESTS.clear()
    with contextlib.suppress(FileNotFoundError):
        tree.read_many([(tree.number(f"{directory}/{name}"), 0, 1 << 62) for name in names])
    return list(REQUESTS)


def _zarr_requests(source: str) -> dict[str, list[str]]:
    from shardfs.vfs.tree import open_tree

    tree = open_tree(f"counted://{source}")
    _requests_for(tree, "c", "16")  # so that requests made once per array are not counted
    return {
        "zarr3, cold index": _requests_for(tree, "c", "0"),
        "zarr3, warm index": _requests_for(tree, "c", "1"),
        "zarr3, missing chunk, warm index": _requests_for(tree, "c", str(MISSING)),
        "zarr3, 8 neighbours, warm index": _requests_for(tree, "c", *map(str, range(8, 16))),
    }


def _precomputed_requests(source: str) -> dict[str, list[str]]:
    from shardfs.vfs.tree import open_tree

    tree = open_tree(f"counted://{source}")
    _requests_for(tree, "s0", "0-32_0-32_0-32")
    return {
        "precomputed, cold index": _requests_for(tree, "s0", "0-32_64-96_64-96"),
        "precomputed, warm index": _requests_for(tree, "s0", "32-64_64-96_64-96"),
    }


MISSING = 3


def write_for_requests(root: Path) -> tuple[Path, Path]:
    """Write a Zarr array with 16 chunks per shard, one of them missing, and a precomputed volume of 4 shards."""
    import numpy as np
    import tensorstore

    of = DataSet("small", (64,), (1024,), (16,))
    values = np.ones(64 * 1024, np.uint8)
    values[MISSING * 1024 : (MISSING + 1) * 1024] = 0
    store = {"driver": "file", "path": f"{root / 'zarr'}/"}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": of.metadata(sharded=True)}
    tensorstore.open(spec, create=True).result().write(values).result()
    sharding = {"@type": "neuroglancer_uint64_sharded_v1", "preshift_bits": 3, "minishard_bits": 1, "shard_bits": 2}
    scale = {"key": "s0", "size": [128] * 3, "resolution": [1, 1, 1], "chunk_size": [32] * 3, "encoding": "raw"}
    volume = tensorstore.open(
        {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{root / 'precomputed'}/"},
            "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
            "scale_metadata": {**scale, "sharding": {**sharding, "hash": "identity"}},
        },
        create=True,
    ).result()
    volume.write(np.ones((128, 128, 128, 1), np.uint8)).result()
    return root / "zarr", root / "precomputed"


def main() -> None:
    clients: dict[str, Callable[..., object]] = {
        "read": read_chunks,
        "array": read_array,
        "scan": scan_tree,
        "requests": store_requests,
    }
    print(json.dumps(clients[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    main()
