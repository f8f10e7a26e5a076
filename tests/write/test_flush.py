"""The verb `flush`: which mount is asked, and what becomes of its answer."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from shardfs import cli
from shardfs.daemon import asking
from shardfs.storage import mount_table
from shardfs.storage.mount_table import MountInfo
from tests.mount.programs import shardfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset


def test_the_mount_of_a_path_is_found_without_touching_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = [MountInfo("/", "ext4", "x"), MountInfo("/m", "fuse.shardfs", "a"), MountInfo("/m/in", "tmpfs", "y")]
    mounts.append(MountInfo("/m 2", "fuse.shardfs", "b"))
    monkeypatch.setattr(mount_table, "entries", lambda: iter(mounts))
    (tmp_path / "link").symlink_to("/m 2")
    mount_by_path = {path: mount_table.mount_of(path) for path in ("/m", "/m/t/c/0", "/m/in/x", "/mx", "/", "/m 2/c")}
    assert mount_by_path == {"/m": "/m", "/m/t/c/0": "/m", "/m/in/x": None, "/mx": None, "/": None, "/m 2/c": "/m 2"}
    assert mount_table.mount_of(str(tmp_path / "link/c")) == "/m 2"


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (0, 0, ""),
        (errno.ENOSPC, 3, "/x: No space left on device; shardfs status / names the files and the reasons"),
        (errno.ESTALE, 3, "/x: Stale file handle; shardfs status / names the files and the reasons"),
        (errno.ETIMEDOUT, 5, "/x: Connection timed out"),
        (errno.EROFS, 2, "/ is mounted read-only: mount it with --rw to write"),
    ],
)
def test_exit_codes(number: int, code: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(path: str, seconds: float, look: Callable[[], object]) -> None:
        assert (path, seconds) == ("/x", 60)
        if number:
            raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(mount_table, "mount_of", lambda path: "/")
    monkeypatch.setattr(asking, "flush", flush)
    runner = CliRunner()
    with runner.isolation() as (_, err, *_):
        assert cli.run(["flush", "/x", "--timeout", "1m"]) == code
        assert err.getvalue().decode().removeprefix("shardfs: ").strip() == told


def test_of_a_read_only_mount(dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path) -> None:
    with mounted(dataset("zarr3", "default").path) as mount:
        completed = shardfs("flush", mount / "zarr.json")
        told = f"shardfs: {mount} is mounted read-only: mount it with --rw to write\n"
        assert (completed.returncode, completed.stderr) == (2, told)
