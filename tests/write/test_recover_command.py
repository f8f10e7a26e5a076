"""`shardfs recover`: what a mount has left is listed, published, exported, decided, and given up."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardfs.storage.source_locks import journal_directory
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.stored import ANYTHING
from tests.conftest import read_with
from tests.mount.programs import copy_tree, shardfs
from tests.write.journals import make_newer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

CHUNK = np.full((2, 3), 7, "<u2").tobytes()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/shardfs"


@pytest.fixture
def source(dataset: Get, tmp_path: Path) -> Path:
    """With a chunk written, one deleted, and an orphan, as a daemon leaves them that was killed."""
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    journal = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20, commit_s=0)
    meta = {"mtime_ns": 10**18, "mode": 0o644, "scratch": False, "base": ANYTHING.to_json()}
    journal.append(RecordKind.PUT, {"path": "c/0/0", **meta}, CHUNK)
    journal.append(RecordKind.PUT, {"path": "c/99", **meta}, b"orphan")
    journal.append(RecordKind.DEL, {"path": "c/3/3", "base": ANYTHING.to_json()})
    journal.close(clean=False)
    return path


def test_it_is_listed(source: Path, state: Path) -> None:
    assert shardfs("recover", source).stdout.splitlines()[1:] == [
        "  pending        12 B  c/0/0",
        "  deleted         0 B  c/3/3",
        "  pending         6 B  c/99",
    ]
    (directory,) = state.iterdir()
    told = [json.loads(line) for line in shardfs("recover", "--json", directory).stdout.splitlines()]
    assert [line.get("path", line["type"]) for line in told] == ["journal", "c/0/0", "c/3/3", "c/99"]
    assert (told[0]["source"], told[0]["entries"], told[0]["owner"]) == (str(source), 3, None)
    assert shardfs("recover").stdout == f"{source}: 2 pending, 1 deleted\n  {directory}\n"
    assert shardfs("recover", "--verify", source).returncode == 0


@pytest.mark.interop
def test_it_is_published_without_a_mount(dataset: Get, source: Path, tmp_path: Path) -> None:
    data = dataset("zarr3", "default")
    completed = shardfs("recover", "--apply", source)
    assert (completed.returncode, completed.stderr) == (3, "shardfs: c/99: is not published\n")
    wanted = data.arrays[""].copy()
    wanted[:2, :3], wanted[6:, 9:] = 7, 0
    assert np.array_equal(read_with("tensorstore", data, source), wanted)
    assert [line.split()[-1] for line in shardfs("recover", source).stdout.splitlines()[1:]] == ["c/99"]
    again = shardfs("recover", "--apply", source)
    assert (again.returncode, again.stderr) == (3, "shardfs: c/99: is not published\n")
    assert np.array_equal(read_with("tensorstore", data, source), wanted)
    assert sorted(p.name for p in source.rglob(".shardfs*")) == []


def test_it_says_why_a_file_is_not_published(dataset: Get, tmp_path: Path, state: Path) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    journal = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20, commit_s=0)
    meta = {"mtime_ns": 10**18, "mode": 0o644, "scratch": False, "base": ANYTHING.to_json()}
    journal.append(RecordKind.PUT, {"path": "c/0/0", **meta}, b"")
    journal.append(RecordKind.PUT, {"path": "c/0/1", **meta, "conflict": "another program has changed it"}, CHUNK)
    journal.close(clean=False)
    completed = shardfs("recover", "--apply", path)
    assert completed.returncode == 3
    assert completed.stderr.splitlines() == [
        "shardfs: c/0/0: is not published: is an empty file, which readers take for damage: write or remove it",
        "shardfs: c/0/1: is not published: another program has changed it",
    ]


@pytest.mark.interop
def test_a_copy_of_the_directory_will_do(dataset: Get, source: Path, state: Path, tmp_path: Path) -> None:
    (directory,) = state.iterdir()
    (tmp_path / "copy").mkdir(mode=0o700)
    shutil.copytree(directory, tmp_path / "copy/j", dirs_exist_ok=False)
    assert shardfs("recover", "--apply", tmp_path / "copy/j").returncode == 3
    assert (read_with("tensorstore", dataset("zarr3", "default"), source)[:2, :3] == 7).all()
    assert len(shardfs("recover", directory).stdout.splitlines()) == 4  # the original is as it was


def test_it_is_exported(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source)  # it is not needed
    completed = shardfs("recover", source, "--export", tmp_path / "out")
    assert (completed.returncode, completed.stdout) == (0, f"2 files in {tmp_path / 'out'}; 1 deleted\n")
    assert (tmp_path / "out/c/0/0").read_bytes() == CHUNK
    assert (tmp_path / "out/c/99").read_bytes() == b"orphan"
    assert shardfs("recover", source, "--export", tmp_path / "out").returncode == 3  # there is something already


def test_it_is_given_up(source: Path, state: Path) -> None:
    completed = shardfs("recover", "--discard", source)
    assert (completed.returncode, "would give up 3 files" in completed.stderr) == (2, True)
    completed = shardfs("recover", "--discard", "--yes", source)
    assert (completed.returncode, completed.stdout.endswith(", for seven days\n")) == (0, True)
    completed = shardfs("recover", source)
    assert (completed.returncode, completed.stdout) == (
        0,
        f"{source}: nothing to be published: there is no journal of it\n",
    )


def test_only_what_needs_a_decision_is_listed(source: Path, state: Path) -> None:
    """What is not needed is removed; what a mount publishes is listed when asked for."""
    (directory,) = state.iterdir()
    finished_journal = state / ("0" * 32)
    open_journal = state / ("1" * 32)
    busy = state / ("2" * 32)
    other = state / "of the user's"
    journal = Journal.open(finished_journal, None, limit_bytes=64 << 20, commit_s=0)
    meta = {"path": "c/0/0", "mtime_ns": 1, "mode": 0o644, "scratch": False, "base": ANYTHING.to_json()}
    lsn = journal.append(RecordKind.PUT, meta, CHUNK).lsn
    journal.append(RecordKind.DONE, {"key": "x", "lsns": [lsn], "entries": {"c/0/0": None}})
    journal.close(clean=False)  # as a kill leaves it
    for path in (open_journal, other):
        path.mkdir(mode=0o700)
        (path / "lock").touch()
    journal = Journal.open(busy, "memory://busy", limit_bytes=64 << 20, commit_s=0, mountpoint="/mnt/busy")
    try:
        journal.append(RecordKind.PUT, meta, CHUNK)
        assert shardfs("recover").stdout == f"{source}: 2 pending, 1 deleted\n  {directory}\n"
        assert sorted(state.iterdir()) == sorted([directory, busy, other])
        listed = shardfs("recover", "--all").stdout
        assert (listed.count("\n  "), "memory://busy: 1 pending, mounted rw by pid" in listed) == (2, True)
        assert shardfs("recover", "--discard", "--yes", source).returncode == 0
        assert shardfs("recover").stdout == "nothing needs a decision; --all lists 1 more journal\n"
    finally:
        journal.close(clean=False)


@pytest.mark.interop
def test_when_all_is_published_or_given_up_the_journal_is_gone(source: Path, state: Path) -> None:
    journal = Journal.open(journal_directory(str(source)), str(source), limit_bytes=64 << 20, commit_s=0)
    lsn = next(record.lsn for record in journal.recovered if record.meta["path"] == "c/99")
    journal.append(RecordKind.CONFLICT, {"path": "c/99", "lsn": lsn, "why": "somebody"})
    journal.close(clean=False)
    assert shardfs("recover", "--apply", source).returncode == 3
    assert len(list(state.iterdir())) == 1
    assert shardfs("recover", "--theirs", ".", source).returncode == 0
    assert list(state.iterdir()) == []
    for words in (["--apply"], ["--verify"], []):  # doing it twice changes nothing
        completed = shardfs("recover", *words, source)
        assert (completed.returncode, "nothing to be published" in completed.stdout) == (0, True)
    assert shardfs("recover", "--theirs", ".", source).returncode == 3
    assert shardfs("status", source).stdout == f"{source}: all data is published\n"


@pytest.mark.interop
@pytest.mark.parametrize(("word", "value"), [("--ours", 7), ("--theirs", 1)])
def test_conflicts_are_decided(word: str, value: int, dataset: Get, source: Path) -> None:
    journal = Journal.open(journal_directory(str(source)), str(source), limit_bytes=64 << 20, commit_s=0)
    lsn = next(record.lsn for record in journal.recovered if record.meta["path"] == "c/0/0")
    journal.append(RecordKind.CONFLICT, {"path": "c/0/0", "lsn": lsn, "why": "somebody"})
    journal.close(clean=False)
    listed = shardfs("recover", source).stdout
    assert "  conflict       12 B  c/0/0  (somebody)\n" in listed
    assert shardfs("recover", source, "--ours", "c/99").returncode == 3
    assert shardfs("recover", source, word, "c/0/0").returncode == 0
    assert shardfs("recover", "--apply", source).returncode == 3
    assert read_with("tensorstore", dataset("zarr3", "default"), source)[0, 0] == value


def test_damage_is_told_and_put_aside_when_asked(source: Path, state: Path) -> None:
    (directory,) = state.iterdir()
    assert shardfs("recover", "--salvage", source).stdout == "there is no damage\n"
    (segment,) = directory.glob("*.wal")
    data = bytearray(segment.read_bytes())
    data[data.index(CHUNK)] ^= 1
    segment.write_bytes(data)
    for words in (["--verify"], []):
        completed = shardfs("recover", *words, source)
        assert (completed.returncode, "  problem: " in completed.stdout, "  lost: c/0/0" in completed.stdout) == (
            7,
            True,
            True,
        )
    assert shardfs("recover", "--export", source.parent / "out", source).returncode == 7
    completed = shardfs("recover", "--salvage", source)
    assert (completed.returncode, "moved aside in " in completed.stdout) == (0, True)
    assert shardfs("recover", "--verify", source).returncode == 0


@pytest.mark.interop
@pytest.mark.parametrize("synced", [False, True])
def test_what_is_sound_is_published_beside_damage(synced: bool, dataset: Get, tmp_path: Path) -> None:
    """`--apply` says with its exit code that a file is lost, and the source keeps the former chunk."""
    data = dataset("zarr3", "default")
    path = copy_tree(data.path, tmp_path / "x")
    directory = journal_directory(str(path))
    journal = Journal.open(directory, str(path), limit_bytes=64 << 20, commit_s=0)
    meta = {"mtime_ns": 10**18, "mode": 0o644, "scratch": False, "base": ANYTHING.to_json()}
    journal.append(RecordKind.PUT, {"path": "c/0/0", **meta}, CHUNK)
    if synced:
        journal.sync()
    journal.append(RecordKind.PUT, {"path": "c/3/3", **meta}, CHUNK[::-1])
    journal.close(clean=False)
    (segment,) = directory.glob("*.wal")
    segment.write_bytes(segment.read_bytes().replace(CHUNK, b"?" + CHUNK[1:]))
    completed = shardfs("recover", "--apply", path)
    assert (completed.returncode, "(c/0/0)" in completed.stderr) == (7, True)
    wanted = data.arrays[""].copy()
    wanted[6:, 9:] = 7 << 8
    assert np.array_equal(read_with("tensorstore", data, path), wanted)
    assert shardfs("recover", "--apply", path).returncode == 0  # the loss was reported, and nothing is left
    assert len(list(directory.glob("*.damaged"))) == 1  # for those who know how to rescue bytes


def test_a_mount_has_it(source: Path) -> None:
    journal = Journal.open(journal_directory(str(source)), str(source), limit_bytes=64 << 20)
    try:
        for words in (["--apply"], ["--salvage"], ["--discard", "--yes"], ["--ours", "c/0/0"]):
            completed = shardfs("recover", source, *words)
            assert (completed.returncode, "already mounted rw by pid" in completed.stderr) == (4, True), words
        assert shardfs("recover", source).returncode == 0
    finally:
        journal.close(clean=False)


def test_a_journal_that_cannot_be_read_does_not_hide_others(source: Path, state: Path) -> None:
    make_newer(next(state.glob("*/*.wal")))
    other = state / ("3" * 32)
    journal = Journal.open(other, "memory://other", limit_bytes=64 << 20, commit_s=0)
    journal.append(RecordKind.DEL, {"path": "c/0", "base": ANYTHING.to_json()})
    journal.close(clean=False)
    completed = shardfs("recover")
    assert (completed.returncode, completed.stdout) == (0, f"memory://other: 1 deleted\n  {other}\n")
    assert "this journal cannot be read: " in completed.stderr


def test_words_that_make_no_sense(tmp_path: Path) -> None:
    assert shardfs("recover").stdout == "no journals\n"
    assert shardfs("recover", "--apply").returncode == 2
    completed = shardfs("recover", tmp_path)
    assert (completed.returncode, "there is no journal" in completed.stderr) == (3, True)
