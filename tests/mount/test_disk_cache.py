"""Mounts with a disk cache: what a second mount asks the store for, and disks that fail."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.data_layouts import write_zarr
from tests.datasets import LITTLE
from tests.mount.distant import in_words, serving
from tests.mount.test_read_ahead import ALL, DATA, SHARDS, read
from tests.mount.test_read_ahead import store as store  # a fixture
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
    store_status: dict[str, Any] = json.loads((mount / ".shardfs/status.json").read_text())["store"]
    return store_status


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


def test_a_shard_that_was_replaced_is_read_anew(mounted: Mounted, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    path, words = tmp_path / "served" / "a", options(tmp_path / "cache", "index_ttl=0")

    def expect(mount: Path, chunks: Sequence[int], plus: int) -> None:
        for i in chunks:
            assert np.frombuffer((mount / f"c/{i}").read_bytes(), "u2")[0] == 4 * i + plus

    write_zarr(path, np.arange(256, dtype=np.uint16), (4,), [LITTLE], shard=(128,))
    with serving(tmp_path / "served") as store:
        with mounted(f"{store.url}/a", *words) as mount:
            expect(mount, range(20), 0)
            write_zarr(path, np.arange(256, dtype=np.uint16) + 1000, (4,), [LITTLE], shard=(128,))
            expect(mount, range(0, 64, 3), 1000)
        write_zarr(path, np.arange(256, dtype=np.uint16) + 2000, (4,), [LITTLE], shard=(128,))
        for _ in range(2):
            with mounted(f"{store.url}/a", *words) as mount:
                expect(mount, range(0, 64, 3), 2000)


def test_offline(mounted: Mounted, tmp_path: Path) -> None:
    """The server is gone."""
    pytest.importorskip("aiohttp")
    path, words = tmp_path / "served" / "a", options(tmp_path / "cache")
    write_zarr(path, np.arange(256, dtype=np.uint16), (4,), [LITTLE], shard=(128,))
    with serving(tmp_path / "served") as store, mounted(f"{store.url}/a", *words) as mount:
        names = sorted(os.listdir(mount))
        contents = {i: (mount / f"c/{i}").read_bytes() for i in range(20)}
    with mounted(f"{store.url}/a", *words, "-o", "offline") as mount:
        assert sorted(os.listdir(mount)) == names
        assert {i: (mount / f"c/{i}").read_bytes() for i in contents} == contents
        with pytest.raises(OSError, match="No route to host") as failed:
            (mount / "c/63").read_bytes()
        assert failed.value.errno == errno.EHOSTUNREACH
        assert status(mount)["requests"].keys() <= {"open"}


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


@pytest.mark.s3
def test_a_writable_mount_never_serves_old_chunks(mounted: Mounted, tmp_path: Path) -> None:
    """Published shards have a new version, here and for the next mount."""
    pytest.importorskip("s3fs")
    target, versions = TARGETS["zarr_end"], {0: 1, 1: 2, 5: 6}
    with object_store() as server:
        filled(target, server, tmp_path / "natively", versions)
        words = in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})
        words += options(tmp_path / "cache", f"journal={tmp_path / 'journals'}")
        for version in range(1, 3):
            with mounted("s3://data/root", *words, "-o", "writable,idle=0.1") as mount:
                for number in versions:
                    assert (mount / target.path(number)).read_bytes() == target.shown(versions[number])
                versions |= {0: 10 * version, 3: 20 * version}
                for number in (0, 3):
                    (mount / target.path(number)).write_bytes(target.shown(versions[number]))
                subprocess.run([sys.executable, "-m", "shardfs", "flush", mount], check=True, timeout=250)
                for number in versions:
                    assert (mount / target.path(number)).read_bytes() == target.shown(versions[number])
            with mounted("s3://data/root", *words) as mount:
                for number in versions:
                    assert (mount / target.path(number)).read_bytes() == target.shown(versions[number])
        assert entries(tmp_path / "cache")
