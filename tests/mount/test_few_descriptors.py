"""A daemon with few descriptors (`ulimit -n`): no program gets EMFILE because shardfs keeps files open for later."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import handmade
from tests.conftest import daemon_pid
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Mounted

pytestmark = pytest.mark.fuse

SHARDS, MORE = 15, 16
"""Shards along each of two axes, and the descriptors that the daemon may open beside those it has at its start."""

_READ = """\
import os, sys
from concurrent.futures import ThreadPoolExecutor

def fail(error):
    raise error

def read(path):
    with open(path, "rb") as file:
        data = file.read()
    expected = expected_of(path)
    return None if expected is None or data == expected else f"{path}: {data!r}"

def expected_of(path):
    parts = path.removeprefix(sys.argv[1]).strip("/").split("/")
    if parts[0] == "plain":
        return parts[1].encode()
    numbers = [part for part in "/".join(parts).replace(".", "/").split("/") if part.isdecimal()]
    return bytes(map(int, numbers)) * 3 if len(numbers) == 2 else None

walk = [each for each in os.walk(sys.argv[1], onerror=fail) if "/.shardfs" not in each[0]]
paths = [os.path.join(at, name) for at, _, names in walk for name in names]
with ThreadPoolExecutor(4) as pool:
    wrong = list(filter(None, pool.map(read, paths)))
print(len(paths), wrong[:3])
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    grid = 2 * SHARDS
    handmade.write_json(root / "zarr.json", handmade.zarr_metadata((grid * 2, grid * 3), (4, 6), (2, 3)))
    for y, x in itertools.product(range(SHARDS), repeat=2):
        members = [bytes((2 * y + i, 2 * x + j)) * 3 for i, j in itertools.product(range(2), repeat=2)]
        path = root / f"c/{y}/{x}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(handmade.zarr_shard(members))
    (root / "plain").mkdir()
    for number in range(100):
        (root / "plain" / f"{number}.txt").write_text(f"{number}.txt")
    return root


def limit(pid: int) -> None:
    """From now on, the process may have few descriptors more than now."""
    descriptors = len(os.listdir(f"/proc/{pid}/fd")) + MORE
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))


def all_read(mount: Path) -> str:
    completed = subprocess.run([sys.executable, "-c", _READ, str(mount)], capture_output=True, text=True, timeout=250)
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout.strip()


@pytest.mark.parametrize("options", [[], ["-o", "layout=zarr2,chunk_codec=raw"]], ids=["native", "layout"])
def test_readers_get_no_error(options: list[str], source: Path, mounted: Mounted) -> None:
    with mounted(source, *options) as mount:
        limit(daemon_pid(mount))
        for _ in range(2):
            count, wrong = all_read(mount).split(" ", 1)
            assert (wrong, int(count) >= 4 * SHARDS**2 + 100) == ("[]", True)


def test_writers_get_no_error_and_all_is_published(source: Path, tmp_path: Path) -> None:
    with writable(source, tmp_path / "m", "-o", "idle=1h,age=1h") as mount:
        mount.mount()
        limit(mount.pid)
        assert all_read(mount.path).endswith(" []")
        for y, x in itertools.product(range(0, 2 * SHARDS, 3), repeat=2):
            (mount.path / f"c/{y}/{x}").write_bytes(bytes((y, x, 1, 2, 3, 4)))
        for number in range(0, 100, 3):
            (mount.path / "plain" / f"{number}.txt").write_text("new")
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
    for y, x in itertools.product(range(0, 2 * SHARDS, 3), repeat=2):
        assert bytes((y, x, 1, 2, 3, 4)) in (source / f"c/{y // 2}/{x // 2}").read_bytes()
    assert {(source / "plain" / f"{number}.txt").read_text() for number in range(0, 100, 3)} == {"new"}
