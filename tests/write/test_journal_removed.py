"""Another program removes or moves the journal, or parts of it, while a mount writes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.errors import BusyError
from shardfs.storage.source_locks import LOCK
from shardfs.write.journal import RecordKind
from shardfs.write.journal.places import Lock
from tests.write.faults import FailAt, KillAt, hooked
from tests.write.journals import content, kill, open_journal, put

if TYPE_CHECKING:
    from shardfs.write.journal import Journal

Remove = Callable[[Path], object]
BEFORE, AFTER = 5, 4
SMALL: dict[str, Any] = {"segment_bytes": 64 << 10}


def unlink_first(directory: Path) -> None:
    min(directory.glob("*.wal")).unlink()


def unlink_last(directory: Path) -> None:
    max(directory.glob("*.wal")).unlink()


def replace_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir(0o700)


REMOVALS: list[Remove] = [
    shutil.rmtree,
    lambda directory: shutil.rmtree(directory.parent),
    lambda directory: directory.rename(directory.with_name("aside")),
    replace_directory,
    unlink_first,
    unlink_last,
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state" / "j"


def begun(directory: Path, **options: Any) -> tuple[Journal, dict[str, bytes]]:
    """With records in three segments, all on disk."""
    journal = open_journal(directory, **{**SMALL, **options})
    wanted = {str(i): bytes([i]) * 20_000 for i in range(BEFORE)}
    for path, data in wanted.items():
        put(journal, path, data)
    journal.sync()
    assert len(list(directory.glob("*.wal"))) == 3
    return journal, wanted


def found(directory: Path) -> dict[str, bytes | None]:
    """What the next mount finds; nothing may be damaged."""
    journal = open_journal(directory)
    assert (journal.problems, journal.damaged_paths) == ([], [])
    out = {path: data for _, kind, path, data in content(journal) if kind is RecordKind.PUT}
    journal.close(clean=False)
    return out


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_sync_fails_once_and_later_ones_tell_the_truth(
    remove: Remove, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, wanted = begun(directory)
    remove(directory)
    with pytest.raises(OSError, match="another program has removed the journal") as caught:
        journal.sync()
    assert caught.value.errno == errno.EIO
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert f"the {BEFORE} records that are needed are in a new one" in str(journal.problems)
    for i in range(AFTER):
        put(journal, f"after/{i}", b"a" * 20_000)
        wanted[f"after/{i}"] = b"a" * 20_000
        journal.sync()
    kill(journal)
    assert found(directory) == wanted


@pytest.mark.parametrize("remove", [*REMOVALS[:4], unlink_last])
@pytest.mark.parametrize("size", [100, 60_000])
def test_a_close_is_not_acknowledged(remove: Remove, size: int, directory: Path) -> None:
    """Also if a segment must be begun for it, in a directory that is not there."""
    journal, wanted = begun(directory)
    remove(directory)
    with pytest.raises(OSError, match="another program has removed the journal") as caught:
        put(journal, "lost", bytes(size))
    assert caught.value.errno == errno.EIO
    put(journal, "after", bytes(size))
    kill(journal)
    assert found(directory) == {**wanted, "after": bytes(size)}


def test_readers_and_positions_stay_good(directory: Path) -> None:
    journal, _ = begun(directory)
    record = put(journal, "pinned", b"p" * 20_000)
    assert record.data is not None
    with journal.using([record.data]) as (part,):
        shutil.rmtree(directory)
        with pytest.raises(OSError, match="removed"):
            journal.sync()
        journal.sync()  # although the old segment is still open
        assert os.pread(part.fd, part.size, part.start) == b"p" * 20_000
        assert journal.read(record.data) == b"p" * 20_000
    journal.release([record.lsn])
    kill(journal)


def test_what_was_superseded_does_not_come_back(directory: Path) -> None:
    journal, wanted = begun(directory)
    journal.release([journal.append(RecordKind.DEL, {"path": "0"}).lsn, 1])
    put(journal, "1", b"new")
    journal.release([2])
    shutil.rmtree(directory)
    with pytest.raises(OSError, match="removed"):
        journal.sync()
    journal.sync()
    kill(journal)
    del wanted["0"]
    assert found(directory) == {**wanted, "1": b"new"}


def test_the_mount_is_not_looked_at(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that restores the journal may be the one that answers the mount's requests."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    journal, wanted = begun(directory, mountpoint=str(mountpoint))
    shutil.rmtree(directory)
    looked: list[str] = []
    for name in ("lstat", "stat", "readlink", "open"):
        function = getattr(os, name)

        def spy(path: Any, *args: Any, _function: Any = function, **kwargs: Any) -> Any:
            looked.append(str(path))
            return _function(path, *args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    with pytest.raises(OSError, match="are in a new one"):
        journal.sync()
    monkeypatch.undo()
    assert any(path.startswith(str(directory)) for path in looked)
    assert not [path for path in looked if path.startswith(str(mountpoint))]
    kill(journal)
    assert found(directory) == wanted


def test_it_is_noticed_without_a_sync(directory: Path) -> None:
    journal, wanted = begun(directory)
    shutil.rmtree(directory)
    with pytest.raises(OSError, match="removed"):
        journal.tidy()
    kill(journal)
    assert found(directory) == wanted


def test_an_error_while_it_is_restored_is_no_loss(directory: Path) -> None:
    for at in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        journal, wanted = begun(directory)
        shutil.rmtree(directory)
        with hooked(FailAt(at, errno.ENOSPC)) as hook:
            with pytest.raises(OSError, match="removed the journal") as caught:
                journal.sync()
            assert caught.value.errno == errno.EIO
            with suppress(OSError):
                put(journal, "after", b"after")
                wanted["after"] = b"after"
            with suppress(OSError):
                journal.sync()
        journal.sync()
        kill(journal)
        assert found(directory) == wanted, at
        if not hook.happened:
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("remove", [shutil.rmtree, unlink_first])
def test_killed_while_it_is_restored_the_loss_is_reported(remove: Remove, directory: Path) -> None:
    """Nothing was acknowledged since; what is in the new journal is sound, and it is known whether that is all."""
    for at in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        journal, wanted = begun(directory)
        child = os.fork()
        if not child:
            remove(directory)
            with hooked(KillAt(at, after=False)), suppress(OSError):
                journal.sync()
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        kill(journal)
        journal = open_journal(directory)
        contents = {path: data for _, kind, path, data in content(journal) if kind is RecordKind.PUT}
        assert contents.items() <= wanted.items()
        assert contents == wanted or journal.damaged_paths or not contents, at
        kill(journal)
        if not killed:
            assert contents == wanted
            return
    pytest.fail("it never ended")


def test_what_cannot_be_read_any_more_is_never_acknowledged_again(directory: Path) -> None:
    journal, wanted = begun(directory)
    segment = min(directory.glob("*.wal"))
    os.truncate(segment, 4096)  # as `shred -u` does
    shutil.rmtree(directory)
    for _ in range(3):
        with pytest.raises(OSError, match="cannot be") as caught:
            journal.sync()
        assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="cannot be"):
        put(journal, "more")
    with suppress(OSError):
        journal.close(clean=False)
    journal = open_journal(directory)
    contents = {path: data for _, kind, path, data in content(journal) if kind is RecordKind.PUT}
    assert contents == {path: data for path, data in wanted.items() if path not in "01"}, "the rest is saved"
    assert journal.damaged_paths
    journal.close(clean=False)


# --------------------------------------------------------------------------------------------------------- the lock


def test_a_lock_file_that_was_deleted_is_made_again(directory: Path) -> None:
    journal, wanted = begun(directory)
    (directory / LOCK).unlink()
    journal.sync()  # nothing was at risk
    with pytest.raises(BusyError, match="already mounted rw by pid"):
        open_journal(directory)
    kill(journal)
    assert found(directory) == wanted


def test_after_another_process_has_taken_the_journal_nothing_is_acknowledged(directory: Path) -> None:
    journal, _ = begun(directory)
    (directory / LOCK).unlink()
    other = Lock.take(str(directory / LOCK), "/mnt/other")
    for _ in range(2):
        with pytest.raises(OSError, match=r"already mounted rw by pid \d+ at /mnt/other") as caught:
            journal.sync()
        assert caught.value.errno == errno.EIO
    other.free()
    journal.sync()
    kill(journal)


def test_another_journal_at_its_place_is_left_alone(directory: Path, tmp_path: Path) -> None:
    journal, wanted = begun(directory)
    directory.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", directory)
    directory.chmod(0o700)
    before = sorted(directory.iterdir())
    for _ in range(2):
        with pytest.raises(OSError, match="there is another journal at its place") as caught:
            journal.sync()
        assert caught.value.errno == errno.EIO
    assert sorted(directory.iterdir()) == before
    shutil.rmtree(directory)
    with pytest.raises(OSError, match="are in a new one"):
        journal.sync()
    kill(journal)
    assert found(directory) == wanted


def test_a_journal_without_records_is_locked_again(directory: Path) -> None:
    journal = open_journal(directory)
    shutil.rmtree(directory)
    journal.tidy()
    with pytest.raises(BusyError):
        open_journal(directory)
    journal.close(clean=True)
