"""Mounts under load: many readers, unmounting while they read, a daemon that dies, a store that is slow.

`SHARDFS_STRESS_SECONDS=600` lets the readers run longer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorstore as ts

from tests import conftest
from tests.conftest import daemon_pid, mount_entry
from tests.datasets import ROOT
from tests.mount.programs import attempt, end, errno_of, lines, link_tree, shardfs
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Mounted
    from tests.datasets import Dataset

SECONDS = float(os.environ.get("SHARDFS_STRESS_SECONDS", "5"))
READERS = 8

pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(300 + SECONDS)]


# -------------------------------------------------------------------------------------------- data and readers


@pytest.fixture(scope="module")
def source(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every way of reading in one directory, and what a reader must find there.

    Chunks as they lie in the shards, chunks and whole shards that must be decoded, flat and nested names, absent ones.
    """
    root = tmp_path_factory.mktemp("stress")
    plain = tmp_path_factory.mktemp("stress-plain")
    _write_large(root / "large", plain / "large")
    twins = {"large": plain / "large"}
    for kind, name in (
        ("zarr3", "zarr_python"),
        ("zarr3", "gzip_after_zstd_inside"),
        ("zarr3", "nested_three"),
        ("zarr3", "sparse"),
        ("precomputed", "index_gzip_data_gzip"),
        ("precomputed", "sparse_murmur"),
    ):
        variant = dataset(kind, name)
        link_tree(variant.path, root / name)
        twins[name] = variant.twin
    expected = tmp_path_factory.mktemp("stress-expected") / "expected.json"
    expected.write_text(json.dumps(_expected(twins)))
    return root, expected


def _write_large(sharded: Path, plain: Path) -> None:
    """16 shards of 64 chunks of 16 KiB."""
    values = np.random.default_rng(7).integers(1, 255, (4096, 4096), dtype=np.uint8)
    codec = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [128, 128],
            "codecs": [{"name": "bytes"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
    }
    for path, chunk, codecs in ((sharded, 1024, [codec]), (plain, 128, [{"name": "bytes"}])):
        metadata = {
            "shape": [4096, 4096],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, chunk]}},
            "codecs": codecs,
            "fill_value": 0,
        }
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
        ts.open(spec, create=True).result().write(values).result()


def _expected(twins: dict[str, Path]) -> dict[str, object]:
    sums, directories = {}, {}
    for name, twin in twins.items():
        for path in twin.rglob("*"):
            shown_path = f"{name}/{path.relative_to(twin)}"
            if path.is_dir():
                # Directories without chunks exist on a mount, too.
                if name not in ("sparse", "sparse_murmur") or path.name not in ("c",):
                    directories[shown_path] = len(os.listdir(path))
            elif path.name not in ("zarr.json", "info"):
                sums[shown_path] = hashlib.md5(path.read_bytes()).hexdigest()
    absent = [f"sparse/c/{y}/{x}" for y in range(2, 9) for x in range(2, 5)]
    absent += ["large/c/32/0", "large/c/0/32", "large/c/01/1", "large/c/0/x", "sparse_murmur/8_8_40/2-4_2-4_2-4"]
    return {"files": sums, "absent": absent, "directories": directories}


@contextmanager
def reading(mount: Path, expected: Path, count: int, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Readers in processes of their own, in the directory of the mount; what is left of them is ended."""
    script = ROOT / "tests/clients/read_at_random.py"
    with ExitStack() as stack:
        readers = []
        for seed in range(count):
            command = [sys.executable, "-IS", str(script), str(expected), str(seconds), str(seed)]
            reader = subprocess.Popen(command, cwd=mount, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(_leave, reader)
            readers.append(reader)
        yield readers


def _leave(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        end(process, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def outcome(reader: subprocess.Popen[str], timeout: float) -> dict[str, int]:
    """What a reader did; it must have met nothing unexpected."""
    out, said = reader.communicate(timeout=timeout)
    assert reader.returncode == 0, said
    counts: dict[str, int] = json.loads(out)
    return counts


# --------------------------------------------------------------------------------------------------- the daemon


def resident_bytes(pid: int) -> int:
    match = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def is_gone(pid: int, seconds: float = 60) -> bool:
    return conftest._wait_gone(pid, conftest._start_time(pid), seconds)


# -------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("options", [(), ("-o", "index_cache=16K,chunk_cache=256K")], ids=["caches", "small caches"])
def test_parallel_readers(
    options: tuple[str, ...], source: tuple[Path, Path], mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes right, and memory, descriptors and threads of the daemon stay as they are after the first quarter."""
    seconds = SECONDS if options else SECONDS / 2
    monkeypatch.setattr(conftest, "HELD_SECONDS", seconds + 200)
    root, expected = source
    with mounted(root, *options) as mount:
        pid = daemon_pid(mount)
        with reading(mount, expected, READERS, seconds) as readers:
            time.sleep(seconds / 3)
            wait_until(lambda: _reads(mount) > 200)
            warm = resident_bytes(pid), descriptors(pid)
            peak = max(_most_threads(pid, seconds / 3), threads(pid))
            for reader in readers:
                outcome(reader, seconds + 60)
        resident, opened = resident_bytes(pid), descriptors(pid)
    assert resident < warm[0] + (8 << 20), (warm, resident)
    assert resident < 150 << 20
    # Every shard may stay open, and there are fewer than 100.
    assert opened <= 150
    assert opened <= warm[1] + 20
    assert peak <= 20


def _reads(mount: Path) -> int:
    """Requests to read that the daemon has answered."""
    answered: int = json.loads((mount / ".shardfs/status.json").read_text())["requests"].get("read", 0)
    return answered


def _most_threads(pid: int, seconds: float) -> int:
    peak, stop = 0, time.monotonic() + seconds
    while time.monotonic() < stop:
        peak = max(peak, threads(pid))
        time.sleep(0.1)
    return peak


def test_unmount_under_load(source: tuple[Path, Path], mounted: Mounted) -> None:
    root, expected = source
    with mounted(root) as mount:
        pid = daemon_pid(mount)
        with reading(mount, expected, 4, 60) as readers:
            time.sleep(1)
            refused = attempt("fusermount3", "-u", mount)
            assert refused.returncode != 0
            assert "busy" in refused.stderr
            refused = shardfs("umount", str(mount))
            assert refused.returncode == 4
            assert "busy" in refused.stderr
            assert mount_entry(mount) is not None
            time.sleep(0.5)
            assert [reader.poll() for reader in readers] == [None] * 4

            start_s = time.monotonic()
            lazily = shardfs("umount", "-l", str(mount))
            assert lazily.returncode == 0, lazily.stderr
            assert time.monotonic() - start_s < 30
            assert mount_entry(mount) is None
            assert os.listdir(mount) == []
            # They stand in the mount's directory and go on; the daemon serves them for as long as they do.
            time.sleep(1)
            assert [reader.poll() for reader in readers] == [None] * 4
            assert conftest._start_time(pid) is not None
            for reader in readers:
                reader.terminate()
            assert all(outcome(reader, 20)["read"] for reader in readers)
        assert is_gone(pid)


def test_a_daemon_that_dies(source: tuple[Path, Path], mounted: Mounted) -> None:
    """Programs get ENOTCONN instead of hanging, and the next mount clears what is left."""
    root, expected = source
    name = "zarr_python/c/0/0/0"
    with mounted(root) as mount:
        pid = daemon_pid(mount)
        data = (mount / name).read_bytes()
        with reading(mount, expected, 2, 60) as readers:
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            assert is_gone(pid)
            for reader in readers:
                _, said = reader.communicate(timeout=20)
                assert reader.returncode == 1
                assert "Transport endpoint is not connected" in said or "Software caused connection abort" in said
        # What the kernel knows by heart it still tells.
        assert errno_of((mount / "never asked for").stat) == errno.ENOTCONN
        assert errno_of(lambda: os.getxattr(mount, "user.shardfs.pid")) == errno.ENOTCONN

        again = shardfs("mount", str(root), str(mount))
        assert again.returncode == 0, again.stderr
        second = daemon_pid(mount)
        assert second != pid
        assert (mount / name).read_bytes() == data
        assert len([entry for entry in conftest.mount_entries() if entry.path == mount]) == 1
        ended = shardfs("umount", str(mount))
        assert ended.returncode == 0, ended.stderr
        assert is_gone(second)


# ------------------------------------------------------------------------------------------------- a slow store


class SlowServer(ThreadingHTTPServer):
    """Serves byte ranges of the files of a directory; requests for those below `held` wait until `released`.

    While it is `broken` it answers with that status, or with 0 hangs up.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.held: str | None = None
        self.waiting = 0
        self.released = threading.Event()
        self.broken: int | None = None
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def hold(self, path: str) -> None:
        if self.held is not None and path.startswith(self.held):
            with self.lock:
                self.waiting += 1
            self.released.wait(60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowServer

    def do_GET(self) -> None:
        path = self.path.strip("/")
        self.server.hold(path)
        if self.server.broken is not None:
            self.close_connection = True
            if self.server.broken:
                self._answer(self.server.broken, b"")
            return
        try:
            data = (self.server.root / path).read_bytes()
        except OSError:
            self._answer(404, b"")
            return
        part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self._answer(200, data)
            return
        first, last = part.groups()
        start = max(len(data) - int(last), 0) if not first else int(first)
        wanted = data[start : int(last) + 1 if first and last else None]
        self._answer(206, wanted, f"bytes {start}-{start + len(wanted) - 1}/{len(data)}")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            if content_range is not None:
                self.send_header("Content-Range", content_range)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def slow_server(root: Path) -> Iterator[SlowServer]:
    server = SlowServer(root)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_slow_store_delays_only_those_who_wait_for_it(
    dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    """Shards of 16 x 16 x 8 in chunks of 4 x 4 x 4; the array has 30 x 20 x 10."""
    variant = dataset("zarr3", "zarr_python")
    names = [f"c/{x}/{y}/2" for x in range(4, 8) for y in range(3)]
    outputs = [tmp_path / f"{number}.out" for number in range(len(names))]
    with slow_server(variant.path) as server, mounted(server.url) as mount, ExitStack() as stack:
        pid = daemon_pid(mount)
        warm = (mount / "c/0/0/0").read_bytes()
        assert warm == (variant.twin / "c/0/0/0").read_bytes()
        server.held = "c/1/0/1"
        cats = []
        for name, out in zip(names, outputs, strict=True):
            file = stack.enter_context(out.open("wb"))
            cats.append(subprocess.Popen(["cat", mount / name], stdout=file, stdin=subprocess.DEVNULL))
            stack.callback(end, cats[-1], signal.SIGKILL)
        stack.callback(server.released.set)  # before the programs are ended: they wait for an answer
        wait_until(lambda: server.waiting > 0)
        time.sleep(0.5)

        start_s = time.monotonic()
        assert (mount / "c/0/0/0").read_bytes() == warm  # from the page cache
        assert (mount / "c/3/3/1").read_bytes() == (variant.twin / "c/3/3/1").read_bytes()  # from a known index
        assert (mount / "c/0/4/0").read_bytes() == (variant.twin / "c/0/4/0").read_bytes()  # from another shard
        assert not (mount / "c/8/0/0").exists()
        assert lines("ls", mount / "c") == [str(x) for x in range(8)]
        assert lines("ls", mount / "c/0/0") == ["0", "1", "2"]
        assert attempt("df", mount).returncode == 0
        assert attempt("fusermount3", "-u", mount).returncode != 0
        assert shardfs("umount", str(mount)).returncode == 4
        assert shardfs("umount", "-l", str(mount)).returncode == 0
        assert mount_entry(mount) is None
        assert time.monotonic() - start_s < 30  # mostly the start of programs
        assert [cat.poll() for cat in cats] == [None] * len(cats)

        server.released.set()
        assert [cat.wait(20) for cat in cats] == [0] * len(cats)
        assert is_gone(pid)
    for name, out in zip(names, outputs, strict=True):
        assert out.read_bytes() == (variant.twin / name).read_bytes()


@pytest.mark.parametrize("broken", [0, 500, 503], ids=["hangs up", "500", "503"])
def test_a_store_that_fails(broken: int, dataset: Callable[[str, str], Dataset], mounted: Mounted) -> None:
    """What was read stays readable, the rest is an error and not absent, and works when the store is back."""
    variant = dataset("zarr3", "zarr_python")
    fresh = ["c/7/4/2", "c/4/0/0", "c/3/3/0"]  # of a shard that was not met; of another one; of a known index
    with slow_server(variant.path) as server, mounted(server.url, "-o", "store_retries=1") as mount:
        (mount / "c/0/0/0").read_bytes()
        server.broken = broken
        assert (mount / "c/0/0/0").read_bytes() == (variant.twin / "c/0/0/0").read_bytes()
        start_s = time.monotonic()
        assert [errno_of((mount / name).read_bytes) for name in fresh] == [errno.EIO] * 3
        # There may be other files; a listing that cannot tell does not pass for complete.
        listed = attempt("ls", mount / "c")
        assert sorted(listed.stdout.split()) == [str(x) for x in range(8)]
        assert "Input/output error" in listed.stderr
        assert time.monotonic() - start_s < 30
        server.broken = None
        assert lines("ls", mount / "c") == [str(x) for x in range(8)]
        # For a second, the kernel may know a size of files that could not be read: "open it again".
        wait_until(lambda: all(errno_of((mount / name).read_bytes) != errno.ESTALE for name in fresh))
        for name in fresh:
            assert (mount / name).read_bytes() == (variant.twin / name).read_bytes()
