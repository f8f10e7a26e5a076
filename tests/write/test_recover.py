"""What can be done with a journal that a mount has left."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.errors import BusyError
from shardfs.storage.source_locks import journal_directory
from shardfs.write import recover
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.pending import Backlog, Pending
from shardfs.write.stored import ANYTHING
from tests.write.journals import SOURCE, kill, open_journal, put

if TYPE_CHECKING:
    from collections.abc import Iterable
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


def states(entries: Iterable[recover.PendingFile]) -> dict[str, str]:
    return {entry.path: entry.state for entry in entries}


def versions(directory: Path) -> dict[str, Any]:
    with Journal.peek(directory) as peek:
        return dict(Pending(peek.recovered).versions)


def test_look_tells_paths_sizes_and_states(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    left = recover.look(directory)
    assert states(left.entries) == {
        "a/c/0/0": "pending", "a/c/0/1": "deleted", "a/c/0/2.1234.partial": "scratch", "a/c/0/3": "conflict",
        "a/zarr.json": "pending",
    }  # fmt: skip
    assert [(e.size, e.lsn) for e in left.entries] == [(5, 1), (0, 2), (4, 3), (4, 5), (2, 4)]
    assert left.entries[3].why == "somebody else"
    assert (left.source, left.owner, left.problems, left.unfinished) == (SOURCE, None, [], ["a/c/0"])
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_look_finds_every_damaged_byte(directory: Path) -> None:
    (segment,) = directory.glob("*.wal")
    with open(segment, "r+b") as file:
        file.seek(segment.read_bytes().index(b"chunk"))
        file.write(b"x")
    left = recover.look(directory)
    assert "a/c/0/0" not in states(left.entries)
    assert left.problems


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


def test_export_writes_plain_files(tmp_path: Path, directory: Path) -> None:
    done = recover.export(directory, tmp_path / "out")
    assert (done.files, done.deleted, done.failed) == (3, ["a/c/0/1"], {})
    found = {str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"a/c/0/0": b"chunk", "a/c/0/3": b"ours", "a/zarr.json": b"{}"}
    assert (tmp_path / "out/a/c/0/0").stat().st_mtime_ns == 1_700_000_000_000_000_000
    with pytest.raises(OSError, match="not empty"):
        recover.export(directory, tmp_path / "out")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//x", "", "a/\0", "a/."])
def test_export_never_leaves_its_directory(tmp_path: Path, path: str) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, path)
    kill(journal)
    done = recover.export(tmp_path / "j", tmp_path / "out")
    assert list(done.failed) == [path]
    assert list((tmp_path / "out").rglob("*")) in ([], [tmp_path / "out/a"])


def test_export_goes_on_where_one_path_is_below_another(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for path in ("a", "a/b", "c"):
        put(journal, path)
    kill(journal)
    done = recover.export(tmp_path / "j", tmp_path / "out")
    assert (done.files, list(done.failed)) == (2, ["a/b"])


def test_a_conflict_is_decided_for_us(directory: Path) -> None:
    recover.decide(directory, ours=["a/c/0/3"])
    version = versions(directory)["a/c/0/3"]
    assert (version.conflict, version.base) == ("", ANYTHING)
    with pytest.raises(FileNotFoundError, match="no conflict"):
        recover.decide(directory, ours=["a/c/0/3"])


def test_a_conflict_is_decided_for_them(directory: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no conflict"):
        recover.decide(directory, theirs=["a/c/0/3", "a/c/0/0"])
    assert "a/c/0/3" in versions(directory)
    recover.decide(directory, theirs=["a/c/0/3"])
    assert "a/c/0/3" not in versions(directory)
    assert len(versions(directory)) == 4
    open_journal(directory).close(clean=False)  # it still belongs to its source


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


def test_salvage_goes_on_without_what_is_damaged(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    bad = put(journal, "g/a", b"1" * 100)
    put(journal, "g/b", b"2" * 100)
    journal.sync()
    put(journal, "g/c")
    kill(journal)
    (segment,) = (tmp_path / "j").glob("*.wal")
    assert bad.data is not None
    with open(segment, "r+b") as file:
        file.seek(bad.data.start)
        file.write(b"x")
    assert recover.look(tmp_path / "j").damaged_paths == ["g/a"]
    assert "g/a" in recover.salvage(tmp_path / "j")[0]
    left = recover.look(tmp_path / "j")
    assert (list(states(left.entries)), left.problems, left.damaged_paths) == (["g/b", "g/c"], [], [])
    assert segment.with_suffix(".damaged").exists()


def test_discard_puts_aside_and_keeps_for_a_week(directory: Path) -> None:
    aside = recover.discard(directory)
    assert aside is not None
    assert recover.look(directory).entries == []
    assert len(recover.look(aside).entries) == 5
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


def test_nothing_is_changed_while_a_mount_writes(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, "a")
    for change in (recover.discard, recover.salvage):
        with pytest.raises(BusyError):
            change(tmp_path / "j")
    assert states(recover.look(tmp_path / "j").entries) == {"a": "pending"}
    journal.close(clean=False)


def test_unfinished_files_are_kept_apart(directory: Path) -> None:
    journal = open_journal(directory)
    assert recover.park_scratch(Backlog(journal)) == ["a/c/0/2.1234.partial"]
    kill(journal)
    (kept,) = (directory / "lost+scratch").iterdir()
    assert kept.name == "3-a%2fc%2f0%2f2.1234.partial"
    assert kept.read_bytes() == b"half"
    assert "a/c/0/2.1234.partial" not in versions(directory)
    os.utime(kept, (0, 0))
    open_journal(directory).close(clean=False)
    assert not kept.exists()
