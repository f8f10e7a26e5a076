"""What can be done with a journal that a mount has left."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.storage.source_locks import journal_directory
from shardfs.write import recover
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.pending import Backlog, Pending
from tests.write.journals import SOURCE, kill, open_journal, put

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a mount that was killed: one version of each state."""
    journal = open_journal(tmp_path / "j")
    times = {"mtime_ns": 1_700_000_000_000_000_000, "mode": 0o644}
    journal.append(RecordKind.PUT, {"path": "a/c/0/0", "base": None, **times}, b"chunk")
    journal.append(RecordKind.DEL, {"path": "a/c/0/1", "base": [1, 2]})
    journal.append(RecordKind.PUT, {"path": "a/c/0/2.1234.partial", "scratch": True, **times}, b"half")
    journal.append(RecordKind.PUT, {"path": "a/zarr.json", **times}, b"{}")
    lost = journal.append(RecordKind.PUT, {"path": "a/c/0/3", "base": [9, 9], **times}, b"ours")
    journal.append(RecordKind.CONFLICT, {"path": "a/c/0/3", "lsn": lost.lsn, "why": "somebody else"})
    journal.append(RecordKind.BEGIN, {"key": "a/c/0", "temp": ".shardfs-1.tmp", "lsns": [1]})
    kill(journal)
    return tmp_path / "j"


def versions(directory: Path) -> dict[str, Any]:
    with Journal.peek(directory) as peek:
        return dict(Pending(peek.recovered).versions)


def test_journals_are_found_by_source_and_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert recover.journals() == []
    journal = open_journal(journal_directory(SOURCE))
    put(journal, "a")
    kill(journal)
    assert recover.journals() == [journal_directory(SOURCE)] == [recover.find(SOURCE)]
    assert recover.find(str(directory)) == directory
    with pytest.raises(FileNotFoundError, match="no journal"):
        recover.find("memory://other")


def test_readers_are_told_of_what_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert recover.unpublished_warning(SOURCE) is None
    journal = open_journal(journal_directory(SOURCE))
    put(journal, "a")
    assert recover.unpublished_warning(SOURCE) is None  # a mount sees to it
    kill(journal)
    told = recover.unpublished_warning(SOURCE)
    assert told is not None
    assert told.startswith("its journal has 1 unpublished file, not shown here")
    recover.discard(journal_directory(SOURCE))
    assert recover.unpublished_warning(SOURCE) is None


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//x", "", "a/\0", "a/."])
def test_export_never_leaves_its_directory(tmp_path: Path, path: str) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, path)
    kill(journal)
    report = recover.export(tmp_path / "j", tmp_path / "out")
    assert list(report.failed) == [path]
    assert list((tmp_path / "out").rglob("*")) in ([], [tmp_path / "out/a"])


def test_export_goes_on_where_one_path_is_below_another(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for path in ("a", "a/b", "c"):
        put(journal, path)
    kill(journal)
    report = recover.export(tmp_path / "j", tmp_path / "out")
    assert (report.files, list(report.failed)) == (2, ["a/b"])


def test_a_directory_stands_for_its_conflicts_and_nothing_is_decided_both_ways(directory: Path) -> None:
    for wrong in (
        {"ours": ["."], "theirs": ["a/c/0/3"]},
        {"ours": ["."], "theirs": ["a/c/1"]},
        {"ours": ["a/c/0/3/x"]},
    ):
        with pytest.raises(OSError, match=r"cannot be|no conflict"):
            recover.decide(directory, **wrong)
        assert versions(directory)["a/c/0/3"].conflict
    recover.decide(directory, ours=["./a/c/0/"])
    assert not versions(directory)["a/c/0/3"].conflict
    assert len(versions(directory)) == 5


def test_discard_puts_aside_and_keeps_for_a_week(directory: Path) -> None:
    aside = recover.discard(directory)
    assert aside is not None
    assert recover.read(directory).entries == []
    assert len(recover.read(aside).entries) == 5
    assert recover.discard(directory) is None
    open_journal(directory).close(clean=True)
    assert aside.exists()
    os.utime(aside, (0, time.time() - 8 * 24 * 3600))
    open_journal(directory).close(clean=True)
    assert not aside.exists()


def test_the_journal_of_a_mount_that_was_killed_before_its_first_write_is_removed(tmp_path: Path) -> None:
    directory = journal_directory(SOURCE, tmp_path)
    kill(open_journal(directory))
    assert os.listdir(directory) == ["lock"]
    recover.sweep(tmp_path)
    assert not directory.exists()


def test_unfinished_files_are_kept_apart(directory: Path) -> None:
    journal = open_journal(directory)
    assert recover.park_scratch(Backlog(journal)) == ["a/c/0/2.1234.partial"]
    kill(journal)
    (scratch,) = (directory / "lost+scratch").iterdir()
    assert scratch.name == "3-a%2fc%2f0%2f2.1234.partial"
    assert scratch.read_bytes() == b"half"
    assert "a/c/0/2.1234.partial" not in versions(directory)
    os.utime(scratch, (0, 0))
    open_journal(directory).close(clean=False)
    assert not scratch.exists()
