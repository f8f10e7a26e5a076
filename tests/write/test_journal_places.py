"""T27: who may have a journal, where it may lie, and how fast another takes over."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardfs.model.errors import BusyError, exit_code
from shardfs.storage.source_locks import SOURCE_LOCK, canonical, describe, journal_directory, source_id
from shardfs.write.journal import Journal
from shardfs.write.journal.places import Lock, file_system, lock_source
from tests.datasets import ROOT
from tests.write.journals import SOURCE, content, kill, open_journal, put

HOLD = """\
import sys, time
from shardfs.write.journal import Journal, RecordKind
journal = Journal.open(sys.argv[1], sys.argv[2], limit_bytes=1 << 30, commit_s=0, mountpoint="/mnt/x")
journal.append(RecordKind.PUT, {"path": "a"}, b"data")
print("ready", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_told_who_is_the_first(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", mountpoint="/mnt/here")
    with pytest.raises(BusyError, match=f"already mounted rw by pid {os.getpid()} at /mnt/here since 20") as caught:
        open_journal(tmp_path / "j")
    assert exit_code(caught.value) == 4
    with Journal.peek(tmp_path / "j") as found:  # which is always allowed
        assert found.owner is not None
        assert found.owner["pid"] == os.getpid()
    put(journal, "a")
    journal.close(clean=False)
    with Journal.peek(tmp_path / "j") as found:
        assert found.owner is None
    open_journal(tmp_path / "j").close(clean=True)


def test_a_local_source_is_locked_for_writers_with_another_journal(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    journal = open_journal(tmp_path / "j1", str(source), mountpoint="/mnt/here")
    assert (source / SOURCE_LOCK).exists()
    with pytest.raises(BusyError, match="/mnt/here"):
        open_journal(tmp_path / "j2", f"file://{source}/")
    journal.close(clean=True)
    assert os.listdir(source) == []
    open_journal(tmp_path / "j2", str(source)).close(clean=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_source_that_cannot_be_written_to_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir(mode=0o555)
    pid = os.fork()
    if not pid:
        try:
            os.seteuid(65534)
            os._exit(len(lock_source(str(tmp_path / "source"), "")))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_after_kill_9_another_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, source = tmp_path / "j", tmp_path / "source"
    source.mkdir()
    command = [sys.executable, "-c", HOLD, str(directory), str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(BusyError, match=f"pid {process.pid} at /mnt/x"):
            open_journal(directory, str(source))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        waits: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", waits.append)
            journal = open_journal(directory, str(source))
    assert waits == []  # it neither polls nor waits for a lock to expire
    assert [data for *_, data in content(journal)][-1] == b"data"
    journal.close(clean=False)


def test_of_many_who_want_a_fleeting_lock_one_has_it(tmp_path: Path) -> None:
    path, holders, highest, errors = str(tmp_path / "lock"), [0], [0], [0]
    guard = threading.Lock()

    def work() -> None:
        for _ in range(200):
            try:
                lock = Lock.take(path, "", fleeting=True)
            except BusyError:
                errors[0] += 1
                continue
            with guard:
                holders[0] += 1
                highest[0] = max(highest[0], holders[0])
            with guard:
                holders[0] -= 1
            lock.free()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert highest == [1]
    assert errors[0] < 800
    assert not os.path.exists(path)


def test_the_lock_file_of_the_next_owner_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = Lock.take(str(path), "", fleeting=True)
    path.unlink()  # by another program, so that another process can take the lock
    second = Lock.take(str(path), "", fleeting=True)
    first.free()
    assert second.is_at_its_path()
    second.free()
    assert not path.exists()


def test_of_many_who_open_a_journal_that_is_removed_one_has_it(tmp_path: Path) -> None:
    """One ends, and removes the directory, while others make and lock it."""
    holders, highest, errors = [0], [0], list[BaseException]()
    guard = threading.Lock()

    def work() -> None:
        rounds = 20
        while rounds:
            try:
                journal = open_journal(tmp_path / "j")
            except BusyError:
                continue
            except BaseException as e:  # noqa: BLE001 - shown by the test
                errors.append(e)
                return
            with guard:
                holders[0] += 1
                highest[0] = max(highest[0], holders[0])
            rounds -= 1
            if rounds % 4 == 0:
                journal.release([put(journal, "a").lsn])
            with guard:
                holders[0] -= 1
            journal.close(clean=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert (errors, highest) == ([], [1])
    assert os.listdir(tmp_path) == []


def test_describe_tells_another_host() -> None:
    assert describe({"pid": 7, "host": "elsewhere"}) == "mounted rw by pid 7 on elsewhere"
    assert describe({}) == "mounted rw by pid ? on another host"


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o704])
def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "j").mkdir()
    (tmp_path / "j").chmod(mode)
    with pytest.raises(PermissionError, match="other users can access the journal"):
        open_journal(tmp_path / "j")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_users_directory_or_segment_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, "a")
    kill(journal)
    (segment,) = (tmp_path / "j").glob("*.wal")
    os.chown(segment, 65534, 65534)
    with pytest.raises(PermissionError, match="not a file of its user"):
        open_journal(tmp_path / "j")
    os.chown(tmp_path / "j", 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        open_journal(tmp_path / "j")
    with Journal.peek(tmp_path / "j") as found:  # another user's copy can be looked into
        assert len(found.recovered) == 1


def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "real" / "j").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "to").symlink_to(tmp_path / "real" / "j")
    for path in (tmp_path / "link" / "j", tmp_path / "real" / "to"):
        with pytest.raises(OSError, match="symbolic link") as caught:
            open_journal(path)
        assert caught.value.errno == errno.ELOOP
    open_journal(tmp_path / "real" / "j").close(clean=True)
    (tmp_path / "real" / "j").mkdir(mode=0o700)
    (tmp_path / "real" / "j" / "0000000000000001.wal").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="neither a file"):
        open_journal(tmp_path / "real" / "j")


def test_it_may_not_lie_inside_the_source_or_the_mount(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="inside the source"):
        open_journal(tmp_path / "data" / "j", str(tmp_path / "data"))
    with pytest.raises(OSError, match="inside the mount"):
        open_journal(tmp_path / "mnt" / "j", SOURCE, mountpoint=str(tmp_path / "mnt"))
    assert not (tmp_path / "data" / "j").exists()
    assert not (tmp_path / "mnt" / "j").exists()


def test_on_tmpfs_a_warning_says_what_it_is_worth(tmp_path: Path) -> None:
    if file_system(os.path.realpath("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    directory = Path("/dev/shm") / f"shardfs-{os.getpid()}"
    directory.mkdir(mode=0o700)
    try:
        journal = open_journal(directory / "j")
        assert "do not survive a power failure" in journal.problems[0]
        journal.close(clean=True)
    finally:
        subprocess.run(["rm", "-r", directory], check=True, timeout=250)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "fuse", "virtiofs"])
def test_network_and_fuse_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("shardfs.write.journal.places.file_system", lambda path: kind)
    with pytest.raises(OSError, match=f"not on {kind}"):
        open_journal(tmp_path / "j")


def test_one_source_has_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    names = [f"{tmp_path}/data", f"{tmp_path}/data/", f"file://{tmp_path}/data", f"{tmp_path}/link", "data"]
    monkeypatch.chdir(tmp_path)
    assert {journal_directory(name) for name in names} == {tmp_path / "state" / "shardfs" / source_id("data").hex()}
    assert canonical("s3://key:secret@bucket/a/b/?x=1") == "s3://bucket/a/b"
    assert journal_directory("s3://bucket/a") != journal_directory("s3://bucket/b")
    assert journal_directory("data", tmp_path / "x").parent == tmp_path / "x"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # as the specification says: to be ignored
    assert journal_directory("data").is_relative_to(Path.home())
