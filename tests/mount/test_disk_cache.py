"""Mounts with a disk cache: what a second mount asks the store for, and disks that fail."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conftest import daemon_pid
from tests.mount.distant import in_words, serving
from tests.mount.test_read_ahead import ALL, DATA, SHARDS, read, write
from tests.mount.test_read_ahead import store as store  # a fixture
from tests.waiting import wait_until
from tests.write.object_store import object_store
from tests.write.targets import TARGETS
from tests.write.test_remote_writes import filled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.mount.distant import Store

pytestmark = [pytest.mark.fuse, pytest.mark.interop]


def options(directory: Path, *more: str) -> tuple[str, str]:
    return "-o", ",".join((f"cache_dir={directory}", *more))


def status(mount: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mount / ".shardfs/status.json").read_text())["store"]
    return found


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("prefetch", ["0", "256M"])
def test_a_second_mount_asks_for_versions_only(prefetch: str, store: Store, mounted: Mounted, tmp_path: Path) -> None:
    """Chunks that were read one by one, and chunks that were fetched ahead, share their entries."""
    with mounted(f"{store.url}/a", *options(tmp_path / "cache", f"prefetch={prefetch}")) as mount:
        read(mount, ALL, 4)
    other = {"0": "256M", "256M": "0"}[prefetch]
    with mounted(f"{store.url}/a", *options(tmp_path / "cache", f"prefetch={other}")) as mount:
        store.requests()
        read(mount, ALL, 4)
        assert store.requests() == []
        counters = status(mount)
        metrics = (mount / ".shardfs/metrics").read_text()
    assert counters["requests"].get("stat", 0) <= SHARDS
    assert counters["disk_cache_misses"] == 0
    assert counters["bytes_from_disk_cache"] >= DATA.nbytes
    assert f"shardfs_store_bytes_from_disk_cache_total {counters['bytes_from_disk_cache']}" in metrics


def test_cached_chunks_are_looked_up_once_and_not_fetched_ahead(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    with mounted(f"{store.url}/a", *options(tmp_path / "cache")) as mount:
        read(mount, ALL, 4)
    with mounted(f"{store.url}/a", *options(tmp_path / "cache")) as mount:
        read(mount, ALL, 4)
        counters = status(mount)
    assert counters["disk_cache_hits"] == len(ALL) + SHARDS
    assert (counters["bytes_ahead_used"], counters["bytes_ahead_wasted"]) == (0, 0)


def test_two_mounts_share_a_cache(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    given = options(tmp_path / "cache", "prefetch=0")
    with mounted(f"{store.url}/a", *given) as one, mounted(store.url, *given) as other:
        read(one, ALL[:200])
        wait_until(lambda: len(entries(tmp_path / "cache")) >= 200)
        store.requests()
        read(other / "a", ALL[:200])
        assert store.requests() == []


def test_a_shard_that_was_replaced_is_read_anew(mounted: Mounted, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    path, given = tmp_path / "served" / "a", options(tmp_path / "cache", "index_ttl=0")

    def expect(mount: Path, chunks: Sequence[int], plus: int) -> None:
        for i in chunks:
            assert np.frombuffer((mount / f"c/{i}").read_bytes(), "u2")[0] == 4 * i + plus

    write(path, (4,), (128,), np.arange(256, dtype=np.uint16))
    with serving(tmp_path / "served") as store:
        with mounted(f"{store.url}/a", *given) as mount:
            expect(mount, range(20), 0)
            write(path, (4,), (128,), np.arange(256, dtype=np.uint16) + 1000)
            expect(mount, range(0, 64, 3), 1000)
        write(path, (4,), (128,), np.arange(256, dtype=np.uint16) + 2000)
        for _ in range(2):
            with mounted(f"{store.url}/a", *given) as mount:
                expect(mount, range(0, 64, 3), 2000)


def test_offline(mounted: Mounted, tmp_path: Path) -> None:
    """The server is gone."""
    pytest.importorskip("aiohttp")
    path, given = tmp_path / "served" / "a", options(tmp_path / "cache")
    write(path, (4,), (128,), np.arange(256, dtype=np.uint16))
    with serving(tmp_path / "served") as store, mounted(f"{store.url}/a", *given) as mount:
        names = sorted(os.listdir(mount))
        kept = {i: (mount / f"c/{i}").read_bytes() for i in range(20)}
    with mounted(f"{store.url}/a", *given, "-o", "offline") as mount:
        assert sorted(os.listdir(mount)) == names
        assert {i: (mount / f"c/{i}").read_bytes() for i in kept} == kept
        with pytest.raises(OSError, match="No route to host") as failed:
            (mount / "c/63").read_bytes()
        assert failed.value.errno == errno.EHOSTUNREACH
        assert status(mount)["requests"].keys() <= {"open"}


def test_damaged_entries_are_fetched_again(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    given, some = options(tmp_path / "cache", "prefetch=0"), ALL[:100]
    with mounted(f"{store.url}/a", *given) as mount:
        read(mount, some)
    rng = random.Random(1)
    for path in entries(tmp_path / "cache"):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1
        path.write_bytes(data[: rng.choice((len(data), len(data) // 2))])
    with mounted(f"{store.url}/a", *given) as mount:
        read(mount, some)
        assert status(mount)["bytes_from_disk_cache"] == 0
    with mounted(f"{store.url}/a", *given) as mount:
        read(mount, some)
        assert status(mount)["disk_cache_misses"] == 0


@contextmanager
def disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of this size."""
    if os.geteuid():
        pytest.skip("only root can mount a tmpfs")
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", path], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_fails_no_read(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "2M") as path:
        with mounted(f"{store.url}/a", *options(path)) as mount:
            read(mount, ALL, 4)
            read(mount, ALL[:50], 4)
        free = os.statvfs(path)
        assert free.f_bavail >= free.f_blocks // 20
        assert entries(path)
        (path / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
        with mounted(f"{store.url}/a", *options(path)) as mount:
            read(mount, ALL, 4)


def test_a_read_only_disk_serves_what_it_has(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "100M") as path:
        with mounted(f"{store.url}/a", *options(path)) as mount:
            read(mount, ALL[:100])
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        with mounted(f"{store.url}/a", *options(path, "prefetch=0")) as mount:
            read(mount, ALL[:100])
            assert status(mount)["disk_cache_misses"] == 0
            read(mount, ALL)
            wait_until(lambda: b"cache" in (mount / ".shardfs/log").read_bytes())
            assert (mount / ".shardfs/log").read_text().count("WARNING") == 1
        with mounted(f"{store.url}/a", *options(path / "below")) as mount:
            read(mount, ALL[:100])
            assert "no disk cache" in (mount / ".shardfs/log").read_text()


def test_a_daemon_killed_while_it_writes_leaves_nothing_wrong(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    given = options(tmp_path / "cache")
    for delay in (0.0, 0.03, 0.1):
        with mounted(f"{store.url}/a", *given) as mount:
            pid = daemon_pid(mount)
            reader = subprocess.Popen(["cp", "-r", mount / "c", tmp_path / "copy"], stderr=subprocess.DEVNULL)
            wait_until(lambda: bool(entries(tmp_path / "cache")))
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            reader.wait(60)
    with mounted(f"{store.url}/a", *given) as mount:
        read(mount, ALL, 4)
    with mounted(f"{store.url}/a", *given) as mount:
        read(mount, ALL, 4)
        assert status(mount)["disk_cache_misses"] == 0


def test_a_small_cache_keeps_what_was_read_last(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    with mounted(f"{store.url}/a", *options(tmp_path / "cache", "cache_size=2M", "prefetch=0")) as mount:
        read(mount, ALL)
    assert sum(path.stat().st_blocks * 512 for path in entries(tmp_path / "cache")) <= 2 << 20
    with mounted(f"{store.url}/a", *options(tmp_path / "cache", "cache_size=2M", "prefetch=0")) as mount:
        read(mount, ALL[-20:])
        assert status(mount)["disk_cache_misses"] <= 2  # the indices may be gone: they were used first


@pytest.mark.s3
def test_a_writable_mount_never_serves_old_chunks(mounted: Mounted, tmp_path: Path) -> None:
    """Published shards have a new version, here and for the next mount."""
    pytest.importorskip("s3fs")
    target, held = TARGETS["zarr_end"], {0: 1, 1: 2, 5: 6}
    with object_store() as server:
        filled(target, server, tmp_path / "natively", held)
        words = in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})
        words += options(tmp_path / "cache", f"journal={tmp_path / 'journals'}")
        for version in range(1, 3):
            with mounted("s3://data/root", *words, "-o", "writable,idle=0.1") as mount:
                for number in held:
                    assert (mount / target.path(number)).read_bytes() == target.shown(held[number])
                held |= {0: 10 * version, 3: 20 * version}
                for number in (0, 3):
                    (mount / target.path(number)).write_bytes(target.shown(held[number]))
                subprocess.run([sys.executable, "-m", "shardfs", "flush", mount], check=True, timeout=250)
                for number in held:
                    assert (mount / target.path(number)).read_bytes() == target.shown(held[number])
            with mounted("s3://data/root", *words) as mount:
                for number in held:
                    assert (mount / target.path(number)).read_bytes() == target.shown(held[number])
        assert entries(tmp_path / "cache")
