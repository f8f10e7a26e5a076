"""The model of power loss finds what real disks do to writers that forget an fsync, and nothing else."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from shardfs import disk
from tests.write.faults import hooked
from tests.write.powerloss import Recorder, states, walk_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD, NEW = b"old" * 700, b"new" * 900


def _replace(root: Path, mark: Callable[[str], None], without: str) -> None:
    """`file` is replaced by the rules, but for one call."""
    temp = str(root / "temp")
    fd = disk.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    disk.pwrite_all(fd, NEW, 0)
    if without == "rename after fsync":
        disk.rename(temp, str(root / "file"))
    if without != "fsync":
        disk.fsync(fd)
    disk.close(fd)
    if without != "rename after fsync":
        disk.rename(temp, str(root / "file"))
    if without != "fsync_directory":
        disk.fsync_directory(str(root))
    mark("done")


def _found(tmp_path: Path, without: str) -> list[tuple[bool, bytes]]:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(OLD)
    recorder = Recorder([root])
    with hooked(recorder):
        _replace(root, recorder.mark, without)
    out = []
    for n, (lines, state) in enumerate(walk_states(recorder, more=20, seed=1)):
        target = tmp_path / f"state{n}"
        state.write({str(root): target})
        out.append((bool(lines), (target / "file").read_bytes()))
    return out


def test_nothing_is_found_if_all_is_synced(tmp_path: Path) -> None:
    found = _found(tmp_path, "")
    assert len(found) > 5
    assert all(data == NEW if done else data in (OLD, NEW) for done, data in found)


@pytest.mark.parametrize("without", ["fsync", "rename after fsync"])
def test_data_that_nobody_synced_may_be_missing(tmp_path: Path, without: str) -> None:
    assert any(data not in (OLD, NEW) for _, data in _found(tmp_path, without))


def test_a_name_that_nobody_synced_may_be_missing(tmp_path: Path) -> None:
    found = _found(tmp_path, "fsync_directory")
    assert any(done and data == OLD for done, data in found)
    assert all(data in (OLD, NEW) for _, data in found)


def test_all_that_is_done_is_seen(tmp_path: Path) -> None:
    """The state in which nothing is missing is what lies on the disk."""
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "inside/b").write_bytes(b"b")
    recorder = Recorder([root])
    with hooked(recorder):
        disk.mkdir(str(root / "made"))
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        fd = disk.open("made/a", os.O_RDWR | os.O_CREAT, at=at)
        disk.write_all(fd, b"12345")
        disk.write_all(fd, b"678")
        disk.ftruncate(fd, 6)
        disk.fallocate(fd, 0, 9)
        source = disk.open("inside/b", os.O_RDONLY, at=at)
        disk.copy_range(source, fd, 0, 1, 2)
        disk.exchange("made/a", "inside/b", at=at, b_at=at)
        disk.link("inside/b", "c", at=at, new_at=at)
        disk.rename_new("c", "inside/d", at=at, new_at=at)
        disk.rename("inside/d", "made/d", at=at, new_at=at)
        disk.unlink("inside/b", at=at)
        disk.mkdir("gone", at=at)
        disk.rmdir("gone", at=at)
        for number in (fd, source, at):
            os.close(number)
    for event in recorder.events:
        recorder.start.step(event)
    whole = next(states(recorder.start, recorder.roots, random.Random(1), 0))
    whole.write({str(root): tmp_path / "state"})

    def tree(top: Path) -> dict[str, bytes | None]:
        return {str(p.relative_to(top)): p.read_bytes() if p.is_file() else None for p in top.rglob("*")}

    assert tree(tmp_path / "state") == tree(root)


def test_after_a_failed_sync_only_what_is_written_again_is_sure(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(bytes(2000))
    recorder = Recorder([root], failing=lambda n, name: n == 2)
    with hooked(recorder):
        fd = disk.open(str(root / "file"), os.O_RDWR)
        disk.pwrite_all(fd, b"a" * 1000, 0)
        with pytest.raises(OSError, match="Input"):
            disk.fsync(fd)
        disk.fsync(fd)
        recorder.mark("believed")
        disk.pwrite_all(fd, b"a" * 600, 200)
        disk.fsync(fd)
        recorder.mark("again")
        disk.ftruncate(fd, 500)
        disk.pwrite_all(fd, b"b", 500)
        disk.fsync(fd)
        recorder.mark("cut")
        os.close(fd)
    found: dict[int, set[bytes]] = {}
    for n, (lines, state) in enumerate(walk_states(recorder, more=20, seed=1, marks_only=True)):
        state.write({str(root): tmp_path / f"state{n}"})
        found.setdefault(len(lines), set()).add((tmp_path / f"state{n}" / "file").read_bytes())
    assert bytes(2000) in found[1]
    assert all(data[200:800] == b"a" * 600 and not any(data[1000:]) for data in found[2])
    assert {b"a" in data[:200] for data in found[2]} == {b"a" in data[800:1000] for data in found[2]} == {True, False}
    assert all(len(data) == 501 and data[200:] == b"a" * 300 + b"b" for data in found[3])
    assert {b"a" in data[:200] for data in found[3]} == {True, False}
