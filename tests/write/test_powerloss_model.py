"""The model of power loss finds what real disks do to writers that forget an fsync, and nothing else."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from shardfs.storage import syscalls
from tests.write.faults import hooked
from tests.write.powerloss import Recorder, states, walk_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD, NEW = b"old" * 700, b"new" * 900


def _replace(root: Path, mark: Callable[[str], None], without: str) -> None:
    """`file` is replaced by the rules, but for one call."""
    temp = str(root / "temp")
    fd = syscalls.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    syscalls.pwrite_all(fd, NEW, 0)
    if without == "rename after fsync":
        syscalls.rename(temp, str(root / "file"))
    if without != "fsync":
        syscalls.fsync(fd)
    syscalls.close(fd)
    if without != "rename after fsync":
        syscalls.rename(temp, str(root / "file"))
    if without != "fsync_directory":
        syscalls.fsync_directory(str(root))
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
    states = _found(tmp_path, "")
    assert len(states) > 5
    assert all(data == NEW if done else data in (OLD, NEW) for done, data in states)


@pytest.mark.parametrize("without", ["fsync", "rename after fsync"])
def test_data_that_nobody_synced_may_be_missing(tmp_path: Path, without: str) -> None:
    assert any(data not in (OLD, NEW) for _, data in _found(tmp_path, without))


def test_a_name_that_nobody_synced_may_be_missing(tmp_path: Path) -> None:
    states = _found(tmp_path, "fsync_directory")
    assert any(done and data == OLD for done, data in states)
    assert all(data in (OLD, NEW) for _, data in states)


def test_all_that_is_done_is_seen(tmp_path: Path) -> None:
    """The state in which nothing is missing is what lies on the disk."""
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "inside/b").write_bytes(b"b")
    recorder = Recorder([root])
    with hooked(recorder):
        syscalls.mkdir(str(root / "made"))
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        fd = syscalls.open("made/a", os.O_RDWR | os.O_CREAT, at=at)
        syscalls.write_all(fd, b"12345")
        syscalls.write_all(fd, b"678")
        syscalls.ftruncate(fd, 6)
        syscalls.fallocate(fd, 0, 9)
        source = syscalls.open("inside/b", os.O_RDONLY, at=at)
        syscalls.copy_range(source, fd, 0, 1, 2)
        syscalls.exchange("made/a", "inside/b", at=at, b_at=at)
        syscalls.link("inside/b", "c", at=at, new_at=at)
        syscalls.rename_new("c", "inside/d", at=at, new_at=at)
        syscalls.rename("inside/d", "made/d", at=at, new_at=at)
        syscalls.unlink("inside/b", at=at)
        syscalls.mkdir("gone", at=at)
        syscalls.rmdir("gone", at=at)
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
        fd = syscalls.open(str(root / "file"), os.O_RDWR)
        syscalls.pwrite_all(fd, b"a" * 1000, 0)
        with pytest.raises(OSError, match="Input"):
            syscalls.fsync(fd)
        syscalls.fsync(fd)
        recorder.mark("believed")
        syscalls.pwrite_all(fd, b"a" * 600, 200)
        syscalls.fsync(fd)
        recorder.mark("again")
        syscalls.ftruncate(fd, 500)
        syscalls.pwrite_all(fd, b"b", 500)
        syscalls.fsync(fd)
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
