"""Errors of `close` that a program ignores, as z5py does, are reported by `flush`, `status` and `umount`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.write import reported_errors
from shardfs.write.reported_errors import Refused
from tests.conftest import need_fuse
from tests.mount.programs import shardfs
from tests.write.engines import TreeFiles, Whole
from tests.write.faults import Args, Calls, Function, hooked
from tests.write.mounts import writable
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TARGET = TARGETS["zarr_end"]
PATH = TARGET.path(0)


class FullJournal(Calls):
    """The journal's disk is full as long as `full` is set."""

    full = False

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if self.full and name in ("write", "pwrite", "fallocate", "open"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args)


@pytest.fixture
def disk() -> Iterator[FullJournal]:
    with hooked(hook := FullJournal()):
        yield hook


@pytest.fixture
def files(tmp_path: Path, disk: FullJournal) -> Iterator[TreeFiles]:
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    TARGET.create(tmp_path / "store")
    with Whole().open(TARGET, tmp_path / "store", tmp_path / "journal") as opened:
        yield opened
        disk.full = False


def refused(files: TreeFiles, disk: FullJournal, path: str = PATH) -> None:
    """Write a chunk on a full disk, and ignore the error."""
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        files.write(path, TARGET.shown(1))
    disk.full = False


def reported(files: TreeFiles, path: str = "") -> int | None:
    try:
        files.tree.pending.publish(path)
    except OSError as e:
        return e.errno
    return None


def test_it_is_reported_again_and_again_until_the_file_is_written(files: TreeFiles, disk: FullJournal) -> None:
    refused(files, disk)
    assert [reported(files), reported(files), reported(files, PATH)] == [errno.ENOSPC] * 3
    assert reported(files, "elsewhere") is None
    assert files.tree.state()["refused_paths"] == {PATH: "No space left on device"}
    files.write(TARGET.path(1), TARGET.shown(2))
    assert reported(files) == errno.ENOSPC
    files.write(PATH, TARGET.shown(1))
    assert reported(files) is None
    assert files.tree.state()["refused"] == 0


def test_a_version_that_comes_by_rename_counts(files: TreeFiles, disk: FullJournal) -> None:
    refused(files, disk)
    files.write_locked(PATH, TARGET.shown(1))
    assert reported(files) is None


def test_a_close_without_a_write_puts_nothing_right(files: TreeFiles, disk: FullJournal) -> None:
    files.write(PATH, TARGET.shown(1))
    refused(files, disk)
    handle = files.tree.open(files.tree.resolve(PATH).number, os.O_RDWR)
    files.tree.flush(handle)
    files.tree.release(handle)
    assert reported(files) == errno.ENOSPC


def test_a_removed_file_is_not_missed(files: TreeFiles, disk: FullJournal) -> None:
    files.write(PATH, TARGET.shown(1))
    refused(files, disk)
    files.unlink(PATH)
    assert reported(files) is None


def test_a_temporary_file_is_not_missed(files: TreeFiles, disk: FullJournal) -> None:
    """Its name may never be used again, and its rename fails."""
    refused(files, disk, f"{PATH}.partial")
    assert reported(files) is None


def test_inner_flushes_do_not_report_it(files: TreeFiles, disk: FullJournal) -> None:
    """A rename or removal of a directory publishes first; an older error of another file is no reason to fail."""
    refused(files, disk)
    files.tree.pending.flush()


KEYS = list(TARGET.shards())[:2]
FIRST, SECOND = (TARGET.shards()[key][0] for key in KEYS)


@pytest.fixture
def handles(files: TreeFiles, tmp_path: Path) -> list[int]:
    """One of a changed chunk in each of two shards. Another program has damaged the first shard since it was opened."""
    opened = []
    for number in (FIRST, SECOND):
        parent, name = files._parent(TARGET.path(number), make=True)
        _, handle = files.tree.create(parent, name, os.O_WRONLY | os.O_CREAT, 0o644)
        files.tree.write(handle, 0, TARGET.shown(number))
        opened.append(handle)
    (tmp_path / "store" / KEYS[0]).parent.mkdir(parents=True)
    (tmp_path / "store" / KEYS[0]).write_bytes(b"no shard" * 100)
    files.tree.source_tree.collection("").shards.invalidate([TARGET.chunks[FIRST]], moved=True)
    return opened


def test_a_damaged_shard_is_reported_until_the_file_is_written(
    files: TreeFiles, handles: list[int], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="its index") as caught:
        files.tree.flush(handles[0])
    assert caught.value.errno == errno.EIO
    files.tree.release(handles[0])
    assert reported(files) == errno.EIO
    assert "its index" in files.tree.state()["refused_paths"][TARGET.path(FIRST)]
    (tmp_path / "store" / KEYS[0]).unlink()
    files.tree.source_tree.collection("").shards.invalidate([TARGET.chunks[FIRST]], moved=True)
    files.write(TARGET.path(FIRST), TARGET.shown(1))
    assert reported(files) is None


def test_the_end_of_a_mount_saves_all_files_but_those_of_damaged_shards(
    files: TreeFiles, handles: list[int], tmp_path: Path
) -> None:
    assert files.tree.close(30) == []
    (tmp_path / "store" / KEYS[0]).unlink()
    assert np.array_equal(TARGET.readers["zarr"](tmp_path / "store"), TARGET.array({SECOND: SECOND}))
    assert files.tree.state()["refused_paths"].keys() == {TARGET.path(FIRST)}


def test_memory_does_not_grow_with_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_errors, "MOST_REFUSED", 3)
    refused = Refused(reported_errors.Failures())
    for n in range(10):
        refused.record(f"a/{n}", OSError(errno.ENOSPC, "full"))
    assert len(refused) == 4
    for n in range(10):
        refused.clear(f"a/{n}")
    refused.clear_below("")
    assert refused.first("a/9") is not None, "it is not known whether all were written again"


# ---- a real z5py on a mount


WRITE = """
import sys
import numpy as np
import z5py
file = z5py.File(sys.argv[1], mode="a", use_zarr_format=True, zarr_format=3)
file[sys.argv[2]][...] = np.full(file[sys.argv[2]].shape, 7, file[sys.argv[2]].dtype)
"""


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.parametrize("close", ["journal", "sync", "publish"])
def test_z5py_succeeds_but_the_verbs_report_the_loss(close: str, tmp_path: Path) -> None:
    need_fuse()
    pytest.importorskip("z5py")
    target = TARGETS["zarr_one_shard"]
    array = tmp_path / "store/array"
    array.mkdir(parents=True)
    target.create(array)
    (tmp_path / "store/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    (tmp_path / "write.py").write_text(WRITE)

    def write(mount: Path) -> None:
        command = [sys.executable, str(tmp_path / "write.py"), str(mount), "array"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert completed.returncode == 0, completed.stderr  # also if all writes failed

    with writable(tmp_path / "store", tmp_path, "-o", f"journal_limit=1K,stall=0.1,close={close}") as mount:
        mount.mount()
        write(mount.path)
        flushed = mount.flush()
        assert (flushed.returncode, "No space left on device" in flushed.stderr) == (3, True)
        status = shardfs("status", mount.path)
        assert status.returncode == 1
        assert "LOST, REFUSED AT CLOSE: array/c/0/0: the journal has reached its limit" in status.stdout
        ended = mount.umount()
        assert ended.returncode == 3
        assert "array/c/0/0: the journal has reached its limit" in ended.stderr
    with writable(tmp_path / "store", tmp_path / "again") as mount:
        mount.mount()
        write(mount.path)
        assert [mount.flush().returncode, mount.umount().returncode] == [0, 0]
    assert (target.readers["tensorstore"](array) == 7).all()
