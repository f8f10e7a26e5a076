"""Mounts under load: many readers, unmounting while they read, a daemon that dies.

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
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorstore as ts

from tests import conftest
from tests.conftest import daemon_pid, mount_entry
from tests.datasets import ROOT
from tests.mount.programs import attempt, end, errno_of, link_tree, shardfs
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
