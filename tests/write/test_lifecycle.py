"""How a writable mount begins and ends: what is published when, what is told, and with which exit codes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardfs import mounted
from shardfs.daemon import unmount
from shardfs.write.journal.records import HEADER_SIZE
from tests.alone import alone
from tests.conftest import MountFailed, _start_time, daemon_pid, mount_entry, read_with
from tests.datasets import ROOT
from tests.mount.processes import stopped
from tests.mount.programs import attempt, copy_tree, run, shardfs, status
from tests.mount.test_observing import parsed
from tests.waiting import wait_until
from tests.write.mounts import WritableMount, held, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.datasets import Array, Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

LATER = ("-o", "idle=1h,age=1h")
"""Nothing is published by itself."""


@pytest.fixture
def data(dataset: Get) -> Dataset:
    return dataset("zarr3", "default")  # (7, 10) of uint16 in shards of (4, 6) and chunks of (2, 3)


@pytest.fixture
def source(data: Dataset, tmp_path: Path) -> Path:
    return copy_tree(data.path, tmp_path / "source")


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[WritableMount]:
    with writable(source, tmp_path / "m", *LATER) as made:
        made.mount()
        yield made


def chunk(value: int) -> bytes:
    return np.full((2, 3), value, "<u2").tobytes()


def write(path: Path, content: bytes) -> None:
    """Another process writes: it might hang."""
    completed = attempt(sys.executable, "-c", _WRITE, str(path), content.hex(), timeout=120)
    assert completed.returncode == 0, completed.stderr


_WRITE = "import sys; open(sys.argv[1], 'wb').write(bytes.fromhex(sys.argv[2]))"


def synced(path: Path, content: bytes) -> str:
    """What another process is told that writes and syncs: the name of an error, or "ok"."""
    return run(sys.executable, "-c", _SYNC, str(path), content.hex()).strip()


_SYNC = """\
import errno, os, sys
try:
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(bytes.fromhex(sys.argv[2]))
        os.fsync(file.fileno())
    print("ok")
except OSError as e:
    print(errno.errorcode[e.errno])
"""


def stored(data: Dataset, source: Path) -> Array:
    """What the source holds, as tensorstore sees it."""
    return read_with("tensorstore", data, source)


def first(array: Array) -> set[int]:
    """The values in the first chunk."""
    return set(array[:2, :3].ravel().tolist())


def gone(pid: int) -> bool:
    return _start_time(pid) is None


def files(source: Path) -> list[str]:
    """Of the source, without what belongs to it."""
    return [p.name for p in source.rglob("*") if p.name.startswith(".shardfs") or p.name.endswith("__lock")]


# --------------------------------------------------------------------------------------------------------- the end


def test_umount_publishes(mount: WritableMount, data: Dataset, source: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    assert first(stored(data, source)) != {7}
    completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    wanted = data.arrays[""].copy()
    wanted[:2, :3] = 7
    assert np.array_equal(stored(data, source), wanted)
    assert gone(mount.pid)
    assert files(source) == []
    assert list(mount.journal.iterdir()) == [], "the journal is not needed any more"
    completed = shardfs("status", "--wait", "-o", f"journal={mount.journal}", source)
    assert (completed.returncode, completed.stdout) == (0, f"{source}: all data is published\n")
    assert shardfs("status", mount.path).returncode == 5, "of a mountpoint it is still told that nothing is mounted"


_FAILING_AT_THE_END = """\
import sys
from shardfs.cli import main
from shardfs.daemon import serving

def failing(*_, **__):
    raise RuntimeError("a bug at the end of the mount")

serving.drain = failing
main()
"""


def test_a_daemon_that_fails_after_it_was_ready_leaves_the_journal_alone(source: Path, tmp_path: Path) -> None:
    """The pipe to the first process is closed by then, and a segment of the journal may have its number."""
    with writable(source, tmp_path / "m", *LATER) as mount:
        options = (*LATER, "-o", f"journal={mount.journal}")
        completed = attempt(
            sys.executable, "-c", _FAILING_AT_THE_END, "mount", "--rw", *options, str(source), str(mount.path)
        )
        assert completed.returncode == 0, completed.stderr
        pid = daemon_pid(mount.path)
        assert synced(mount.path / "c/0/0.tmp", chunk(7)) == "ok"  # opens no file but the segment
        (segment,) = mount.journal.rglob("*.wal")
        before = segment.read_bytes()[:HEADER_SIZE]
        mount.clear()
        wait_until(lambda: gone(pid), 30)
        assert segment.read_bytes()[:HEADER_SIZE] == before


@pytest.fixture
def unsynced(source: Path, tmp_path: Path) -> Iterator[WritableMount]:
    """Its journal does nothing unless a program asks for it."""
    with writable(source, tmp_path / "m", "-o", "idle=1h,age=1h,commit=1h") as made:
        made.mount()
        yield made


def test_a_journal_that_is_deleted_is_reported_and_begun_anew(unsynced: WritableMount) -> None:
    """By one error; what is acknowledged after it survives, and so does what had been before."""
    mount = unsynced
    write(mount.path / "c/0/0", chunk(7))
    shutil.rmtree(mount.journal)
    assert [synced(mount.path / f"c/3/{n}", chunk(8)) for n in range(3)] == ["EIO", "ok", "ok"]
    told = shardfs("status", mount.path).stdout
    assert "another program has removed the journal; the " in told
    mount.kill()
    mount.clear()
    mount.mount()
    assert (mount.path / "c/0/0").read_bytes() == chunk(7)
    assert [(mount.path / f"c/3/{n}").read_bytes() for n in (1, 2)] == [chunk(8)] * 2, "the daemon was killed"
    completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert list(mount.journal.iterdir()) == []


def test_a_journal_that_is_deleted_is_begun_anew_at_the_end(mount: WritableMount, data: Dataset, source: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    shutil.rmtree(mount.journal)
    assert mount.umount().returncode == 0
    assert first(stored(data, source)) == {7}


def test_what_a_journal_held_that_cannot_be_begun_anew_is_not_taken_for_published(mount: WritableMount) -> None:
    write(mount.path / "c/0/0", chunk(7))
    shutil.rmtree(mount.journal)
    mount.journal.symlink_to("/nonexistent")
    assert [synced(mount.path / "c/0/1", chunk(8)) for _ in range(2)] == ["EIO", "EIO"]
    completed = mount.umount()
    assert (completed.returncode, "another program has removed the journal " in completed.stderr) == (3, True)


def test_flush_publishes_and_the_mount_stays(mount: WritableMount, data: Dataset, source: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    write(mount.path / "c/3/3", chunk(8))
    assert mount.flush(mount.path / "c/0/0").returncode == 0
    now = stored(data, source)
    assert (first(now), 8 in now[6:, 9:]) == ({7}, False)
    assert mount.flush().returncode == 0
    assert (stored(data, source)[6:, 9:] == 8).all()
    assert run("cat", mount.path / ".shardfs/status.json").count('"dirty_chunks": 0') == 1
    assert mount.umount().returncode == 0


def test_what_belongs_to_no_array_is_told_and_kept(mount: WritableMount) -> None:
    write(mount.path / "c/99", b"orphan")
    completed = mount.umount()
    assert completed.returncode == 3
    assert completed.stderr.startswith("shardfs: 1 file left unpublished in the journal ")
    assert ":\n  c/99\nThe journal is kept for the next writable mount, and for shardfs recover /" in completed.stderr
    mount.mount()
    assert run("cat", mount.path / "c/99") == "orphan"
    run("rm", mount.path / "c/99")
    assert mount.umount().returncode == 0


def test_the_end_of_a_mount_of_which_the_source_was_moved_away(
    mount: WritableMount, data: Dataset, source: Path
) -> None:
    write(mount.path / "c/0/0", chunk(7))
    source.rename(source.with_name("away"))
    write(mount.path / "c/0/1", chunk(8))
    flushed = mount.flush()
    assert (flushed.returncode, "Stale file handle; shardfs status" in flushed.stderr) == (3, True)
    completed = mount.umount()
    assert (completed.returncode, completed.stderr.count("  c/0/")) == (3, 2)
    assert gone(mount.pid)
    source.with_name("away").rename(source)
    mount.mount()
    assert mount.umount().returncode in (0, 3)  # c/0/1 is a conflict if it was there: nobody saw what it replaced
    assert first(stored(data, source)) == {7}


def test_what_is_damaged_in_the_journal_is_told_at_the_end(mount: WritableMount, tmp_path: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    (segment,) = tmp_path.rglob("*.wal")
    data = bytearray(segment.read_bytes())
    data[data.index(chunk(7))] ^= 1
    segment.write_bytes(data)
    completed = mount.umount()
    assert (completed.returncode, "  problem: 0000000000000001.wal, bytes" in completed.stderr) == (3, True)


def test_who_uses_the_mount_is_told(mount: WritableMount) -> None:
    write(mount.path / "c/0/0", chunk(7))
    with subprocess.Popen(["sleep", "60"], cwd=mount.path) as sleeper:
        try:
            completed = mount.umount()
            assert (completed.returncode, f"{sleeper.pid} (sleep)" in completed.stderr) == (4, True)
            assert mount_entry(mount.path) is not None
        finally:
            sleeper.kill()
    assert mount.umount().returncode == 0


def test_waiting_has_an_end_and_the_daemon_goes_on(mount: WritableMount, data: Dataset, source: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    with held(source / "c/0/0"):
        completed = shardfs("umount", "--timeout", "1", mount.path)
        assert (completed.returncode, "still publishes what was written" in completed.stderr) == (5, True)
        assert mount_entry(mount.path) is None
        assert not gone(mount.pid)
    wait_until(lambda: gone(mount.pid))
    assert first(stored(data, source)) == {7}


def test_of_a_source_it_is_told_what_waits_for_whom(mount: WritableMount, source: Path) -> None:
    def told_of(*words: str) -> tuple[int, str]:
        completed = shardfs("status", "-o", f"journal={mount.journal}", *words, source)
        return completed.returncode, completed.stdout

    assert told_of() == (0, f"{source}: all data is published\n")
    write(mount.path / "c/0/0", chunk(7))
    code, told = told_of()
    assert (code, told.splitlines()[0].startswith(f"{source}: 1 unpublished file in {mount.journal}/")) == (0, True)
    assert f"mounted rw by pid {mount.pid} at {mount.path}" in told
    mount.kill()
    code, told = told_of("--wait")  # for nobody
    assert (code, told.splitlines()[1:]) == (
        1,
        [f"  no process publishes the data: mount with --rw, or use shardfs recover {source}", "  c/0/0"],
    )
    (mount.path.parent / "ro").mkdir()
    refusal = shardfs("mount", "-o", f"journal={mount.journal}", source, mount.path.parent / "ro")
    assert shardfs("umount", mount.path.parent / "ro").returncode == 0
    assert (refusal.returncode, f"{source}: its journal has 1 unpublished file" in refusal.stderr) == (0, True)
    mount.mount()
    with held(source / "c/0/0"):
        run("fusermount3", "-u", mount.path)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "shardfs", "status", "--wait", "--json", "-o", f"journal={mount.journal}", source],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)
    out, _ = waiting.communicate(timeout=30)
    assert (waiting.returncode, '"files": 0' in out) == (0, True)


def test_a_daemon_that_says_nothing_is_not_taken_for_done(
    mount: WritableMount, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(mount.path / "c/0/0", chunk(7))
    monkeypatch.setattr(unmount, "ANSWER_S", 0.5)
    with stopped(mount.pid):
        assert unmount.umount(str(mount.path), timeout=1, lazy=False) == 5
        assert "does not say whether all is published" in capsys.readouterr().err
        assert mount_entry(mount.path) is None
    wait_until(lambda: gone(mount.pid))


def test_a_mount_that_root_may_not_ask_is_not_taken_for_done(mount: WritableMount, data: Dataset, source: Path) -> None:
    """The kernel lets nobody but the user who mounted in. Here that is root, so another real user id plays root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    write(mount.path / "c/0/0", chunk(7))
    with held(source / "c/0/0"):
        completed = attempt(sys.executable, "-c", _AS_OTHER_ROOT, str(mount.path), cwd=ROOT)
        assert (completed.returncode, mount_entry(mount.path)) == (5, None), completed
        assert "does not say whether all is published: `shardfs recover` of the user root lists" in completed.stderr
    wait_until(lambda: gone(mount.pid))
    assert first(stored(data, source)) == {7}


def test_a_read_only_mount_that_root_may_not_ask_has_nothing_to_publish(source: Path, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    (tmp_path / "ro").mkdir()
    assert shardfs("mount", source, tmp_path / "ro").returncode == 0
    completed = attempt(sys.executable, "-c", _AS_OTHER_ROOT, str(tmp_path / "ro"), cwd=ROOT)
    assert (completed.returncode, completed.stderr) == (0, "")


_AS_OTHER_ROOT = """\
import os, sys
os.setresuid(65534, 0, 0)
from shardfs.cli import run
sys.exit(run(["umount", sys.argv[1]]))
"""


@pytest.mark.parametrize("command", [["fusermount3", "-u"], ["umount", "-l"]])
def test_other_programs_unmount_and_the_daemon_publishes(
    command: list[str], mount: WritableMount, data: Dataset, source: Path
) -> None:
    if command[0] == "umount" and os.geteuid() != 0:
        pytest.skip("needs root")
    write(mount.path / "c/0/0", chunk(7))
    run(*command, mount.path)
    wait_until(lambda: gone(mount.pid))
    assert first(stored(data, source)) == {7}


def test_an_array_tells_what_is_dirty_and_what_is_dead(mount: WritableMount) -> None:
    def told(name: str) -> str:
        return run("getfattr", "--absolute-names", "--only-values", "-n", f"user.shardfs.{name}", mount.path).strip()

    assert [told(name) for name in ("dirty", "dead")] == ["0", "0"]
    live = int(told("live"))
    for value in (7, 8):
        write(mount.path / "c/0/0", chunk(value))
        write(mount.path / "c/0/1", chunk(value))
        assert told("dirty") == "2"
        assert mount.flush().returncode == 0
    assert (told("dirty"), int(told("live"))) == ("0", live)
    assert int(told("dead")) > 4 * len(chunk(0))  # four chunks, and two indices
    assert "dead" not in run("getfattr", "-d", "-m", "-", "--absolute-names", mount.path)
    assert mount.umount().returncode == 0


# -------------------------------------------------------------------------------------------------------- signals


@contextmanager
def foreground(mount: WritableMount) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "shardfs", "mount", "-f", "--rw", "-o", f"journal={mount.journal}", *LATER]
    process = subprocess.Popen(
        [*command, str(mount.source), str(mount.path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: mount_entry(mount.path) is not None or process.poll() is not None)
        run("stat", mount.path / "zarr.json")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def unmounted(source: Path, tmp_path: Path) -> Iterator[WritableMount]:
    with writable(source, tmp_path / "m", *LATER) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_publishes(number: signal.Signals, unmounted: WritableMount, data: Dataset, source: Path) -> None:
    with foreground(unmounted) as process:
        write(unmounted.path / "c/0/0", chunk(7))
        process.send_signal(number)
        assert process.wait(30) == 0
        assert mount_entry(unmounted.path) is None
    assert first(stored(data, source)) == {7}


def test_what_is_left_after_a_signal_is_an_exit_code(unmounted: WritableMount) -> None:
    with foreground(unmounted) as process:
        write(unmounted.path / "c/0/0", chunk(7))
        write(unmounted.path / "c/99", b"orphan")
        process.terminate()
        _, told = process.communicate(timeout=250)
        assert process.returncode == 3
        assert "the journal keeps 1 file: c/99" in told


@pytest.mark.torture
def test_after_a_signal_publishing_has_half_a_minute(unmounted: WritableMount, data: Dataset, source: Path) -> None:
    with held(source / "c/0/0"), foreground(unmounted) as process:
        write(unmounted.path / "c/0/0", chunk(7))
        start = time.monotonic()
        process.terminate()
        assert process.wait(60) == 3
        assert 28 < time.monotonic() - start < 45
        assert "c/0/0" in process.stderr.read()  # type: ignore[union-attr]
    unmounted.mount()
    assert unmounted.umount().returncode == 0
    assert first(stored(data, source)) == {7}


# ---------------------------------------------------------------------------------------------------------- crash


def test_after_kill_9_the_next_mount_has_it_and_publishes_it(mount: WritableMount, data: Dataset, source: Path) -> None:
    write(mount.path / "c/0/0", chunk(7))
    run("rm", mount.path / "c/3/3")
    mount.kill()
    mount.mount()  # which clears the dead mount away
    assert bytes.fromhex(run("xxd", "-p", mount.path / "c/0/0").strip()) == chunk(7)
    assert attempt("stat", mount.path / "c/3/3").returncode == 1
    assert first(stored(data, source)) != {7}
    assert mount.umount().returncode == 0
    now = stored(data, source)
    assert (first(now), (now[6:, 9:] == 0).all()) == ({7}, True)


def test_damage_of_the_journal_is_told_by_who_mounts(mount: WritableMount, source: Path) -> None:
    for number, name in enumerate(("c/0/0", "c/0/1", "c/0/2")):
        write(mount.path / name, chunk(70 + number))
    mount.kill()
    mount.clear()
    (segment,) = mount.journal.rglob("*.wal")
    data = bytearray(segment.read_bytes())
    data[data.index(chunk(71))] ^= 255
    segment.write_bytes(data)
    completed = shardfs("mount", "--rw", "-o", f"journal={mount.journal}", source, mount.path)
    assert completed.returncode == 0
    assert completed.stderr.startswith("shardfs: warning: ")
    assert status(mount.path).stdout.count(completed.stderr.splitlines()[0].removeprefix("shardfs: warning: "))
    assert bytes.fromhex(run("xxd", "-p", mount.path / "c/0/2").strip()) == chunk(72)
    assert mount.umount().returncode in (0, 3)


def test_who_has_it_mounted_is_told_to_the_second(mount: WritableMount, source: Path, tmp_path: Path) -> None:
    with writable(source, tmp_path / "2") as other:
        other.journal = mount.journal
        with pytest.raises(MountFailed) as told:
            other.mount()
        assert told.value.returncode == 4
        assert f"already mounted rw by pid {mount.pid} at {mount.path} since " in told.value.stderr
        other.journal = tmp_path / "elsewhere"  # the source itself is locked, too
        with pytest.raises(MountFailed, match="already mounted rw by pid"):
            other.mount()
        assert shardfs("mount", source, other.path).returncode == 0
        assert shardfs("umount", other.path).returncode == 0
        mount.kill()
        other.mount()  # at once: nobody has it any more
        assert other.umount().returncode == 0


def test_a_mount_waits_for_one_that_still_publishes(mount: WritableMount, source: Path, data: Dataset) -> None:
    write(mount.path / "c/0/0", chunk(7))
    before = mount.pid
    with held(source / "c/0/0"):
        run("fusermount3", "-u", mount.path)
        start_s = time.monotonic()
        again = threading.Thread(target=mount.mount)
        again.start()
        again.join(2)
        assert again.is_alive()
    again.join(30)
    assert mount.pid not in (0, before)
    assert time.monotonic() - start_s > 2
    assert first(stored(data, source)) == {7}
    assert mount.umount().returncode == 0


# -------------------------------------------------------------------------------------------------------- options


def test_a_mount_is_writable_by_its_word_in_fstab_too(source: Path, tmp_path: Path) -> None:
    with writable(source, tmp_path / "m") as mount:
        words = f"rw,writable,nodev,journal={mount.journal}"
        assert shardfs(source, mount.path, "-o", words).returncode == 0
        line = run("findmnt", "-no", "OPTIONS", mount.path).strip().split(",")
        assert {"rw", "nosuid", "nodev"} <= set(line)
        modes = {name: stat.S_IMODE(os.stat(mount.path / name).st_mode) for name in ("zarr.json", "c", "c/0/0")}
        assert modes == {"zarr.json": 0o644, "c": 0o755, "c/0/0": 0o644}
        assert mount.umount().returncode == 0


def test_a_close_can_wait_until_it_is_published(source: Path, data: Dataset, tmp_path: Path) -> None:
    with writable(source, tmp_path / "m", *LATER, "-o", "close=publish") as mount:
        mount.mount()
        write(mount.path / "c/0/0", chunk(7))
        assert first(stored(data, source)) == {7}
        assert mount.umount().returncode == 0


def test_a_command_is_told_of_errors(source: Path, tmp_path: Path) -> None:
    """A conflict: in the source the chunk is deleted, for it is zero."""
    told, script = tmp_path / "told", tmp_path / "tell.sh"
    script.write_text(f'echo "$SHARDFS_PATH: $SHARDFS_ERROR" >>{told}\n')
    with writable(source, tmp_path / "m", *LATER, "-o", f"on_error=sh {script}") as mount:
        mount.mount()
        write(mount.path / "c/0/0", chunk(7))
        change = "import sys, zarr; zarr.open_array(sys.argv[1], mode='r+')[:2, :3] = 0"
        run(sys.executable, "-W", "ignore", "-c", change, source)
        completed = mount.flush()
        assert (completed.returncode, "Stale file handle" in completed.stderr) == (3, True)
        wait_until(told.exists)
        assert told.read_text().startswith("c/0/0: ")
        assert bytes.fromhex(run("xxd", "-p", mount.path / "c/0/0").strip()) == chunk(7)
        assert status(mount.path).stdout.count("c/0/0") == 1
        assert mount.umount().returncode == 3


def test_the_source_of_a_mount_that_cannot_be_written_says_why(dataset: Get, tmp_path: Path) -> None:
    source = dataset("zarr3", "default").path
    for words, code, why in [
        ("create=zarr4", 2, "is no rule such as"),
        ("layout=n6", 2, "n6"),
        (f"journal={source}/j", 3, "cannot be inside the source"),
    ]:
        (tmp_path / "mnt").mkdir(exist_ok=True)
        completed = shardfs("mount", "--rw", "-o", words, source, tmp_path / "mnt")
        assert (completed.returncode, why in completed.stderr) == (code, True), completed.stderr
    assert not (source / "j").exists()


MAKE = "import sys, zarr; zarr.create_array(sys.argv[1], shape=(8, 8), chunks=(2, 2), dtype='u2')[:] = 5"
READ = "import sys, zarr; assert (zarr.open_array(sys.argv[1], mode='r')[:] == 5).all()"


@pytest.mark.parametrize("inside", ["group", "array"])
def test_new_arrays_are_stored_sharded_where_a_rule_says_so(
    inside: str, dataset: Get, source: Path, tmp_path: Path
) -> None:
    """But not inside of an array, where nobody looks for another one."""
    if inside == "group":
        source = copy_tree(dataset("zarr3", "group").path, tmp_path / "groups")
    with writable(source, tmp_path / "m", "-o", "create=**/a=zarr3:chunks_per_shard=2x2;none") as mount:
        mount.mount()
        for name in ("a", "b"):
            run(sys.executable, "-W", "ignore", "-c", MAKE, mount.path / "new" / name)
        run(sys.executable, "-W", "ignore", "-c", READ, mount.path / "new/a")
        assert (mount.path / "new/a/c/3/3").exists()
        assert mount.umount().returncode == 0
    documents = {name: json.loads((source / "new" / name / "zarr.json").read_text()) for name in ("a", "b")}
    sharded = inside == "group"
    assert documents["a"]["chunk_grid"]["configuration"]["chunk_shape"] == ([4, 4] if sharded else [2, 2])
    assert documents["a"]["codecs"][0]["name"] == ("sharding_indexed" if sharded else "bytes")
    assert documents["b"]["codecs"][0]["name"] == "bytes"
    assert sorted(os.listdir(source / "new/a/c")) == ["0", "1", "2", "3"][: 2 if sharded else 4]
    for name in ("a", "b"):
        run(sys.executable, "-W", "ignore", "-c", READ, source / "new" / name)


def test_for_the_length_of_a_block(
    source: Path, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDFS_JOURNAL", str(tmp_path / "j"))
    with mounted(source, rw=True, idle="1h", age="1h") as path:
        write(path / "c/0/0", chunk(7))
    assert first(stored(data, source)) == {7}
    with pytest.raises(OSError, match="files stay in the journal"):  # noqa: SIM117
        with mounted(source, rw=True) as path:
            write(path / "c/99", b"orphan")


def test_metrics(mount: WritableMount) -> None:
    write(mount.path / "c/0/0", chunk(7))
    metrics = parsed(run("cat", mount.path / ".shardfs/metrics"))
    assert (metrics["shardfs_dirty_chunks"], metrics["shardfs_written_bytes_total"]) == (1, 12)
    assert mount.flush().returncode == 0
    metrics = parsed(run("cat", mount.path / ".shardfs/metrics"))
    assert (metrics["shardfs_dirty_chunks"], metrics["shardfs_published_shards_total"]) == (0, 1)
    assert (metrics["shardfs_read_only"], metrics["shardfs_orphans"]) == (0, 0)
    assert mount.umount().returncode == 0


def test_a_source_that_can_only_be_read_is_refused(source: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (tmp_path / "ro").mkdir()
    (tmp_path / "mnt").mkdir()
    bind = 'mount --bind "$0" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    command = [sys.executable, "-m", "shardfs", "mount", "--rw", "-o", f"journal={tmp_path / 'j'}"]
    words: list[str | Path] = [source, tmp_path / "ro", *command, tmp_path / "ro", tmp_path / "mnt"]
    completed = attempt(*alone(), "sh", "-c", bind, *words, cwd=ROOT)
    if "unshare" in completed.stderr or "permission denied" in completed.stderr:
        pytest.skip("no namespace can be made here")
    assert (completed.returncode, completed.stderr) == (3, f"shardfs: {tmp_path / 'ro'}: Read-only file system\n")


# ----------------------------------------------------------------------------------------------------- many times


ENDS: dict[str, Callable[[WritableMount], object]] = {
    "umount": lambda mount: mount.umount(),
    "fusermount3": lambda mount: attempt("fusermount3", "-u", mount.path),
    "lazily": lambda mount: shardfs("umount", "-l", mount.path),
    "SIGTERM": lambda mount: os.kill(mount.pid, signal.SIGTERM),
    "SIGINT": lambda mount: os.kill(mount.pid, signal.SIGINT),
    "kill -9": lambda mount: mount.kill(),
}


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=[pytest.mark.torture, pytest.mark.timeout(600)])])
def test_again_and_again_under_load(rounds: int, source: Path, data: Dataset, tmp_path: Path) -> None:
    """Somebody writes all the time. What was closed is there in the end, whatever ended the mount."""
    with writable(source, tmp_path / "m", "-o", "idle=0.01") as mount:
        for n in range(rounds):
            mount.mount()
            write(mount.path / "c/0/0", chunk(n))
            with subprocess.Popen(
                [sys.executable, "-c", _WRITE_ON, mount.path / "c/2/2"], stderr=subprocess.DEVNULL
            ) as writer:
                time.sleep(0.1)
                name = list(ENDS)[n % len(ENDS)]
                ENDS[name](mount)
                writer.kill()
            if name in ("umount", "fusermount3") and mount_entry(mount.path) is not None:  # it was busy
                assert mount.umount().returncode == 0
            wait_until(lambda: gone(mount.pid), 40)
        mount.mount()
        assert mount.umount().returncode == 0
        assert first(stored(data, source)) == {rounds - 1}
        assert files(source) == []


_WRITE_ON = """\
import os, sys
n = 0
while True:
    with open(sys.argv[1] + ".tmp", "wb") as file:
        file.write(n.to_bytes(2, "little") * 6)
    os.replace(sys.argv[1] + ".tmp", sys.argv[1])
    n = (n + 1) % 1000
"""


_TWO_MOUNTS = """\
import os, sys
from shardfs import mounted
for _ in range(2):
    with mounted(sys.argv[1], rw=True) as path, open(f"{path}/c/0/0", "wb") as file:
        file.write(bytes.fromhex(sys.argv[2]))
    print(len(os.listdir("/proc/self/fd")))
"""


def test_a_mount_in_python_leaves_no_descriptor_open(source: Path) -> None:
    words = [sys.executable, "-c", _TWO_MOUNTS, str(source), chunk(1).hex()]
    first, second = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert first == second


def test_umount_waits_for_a_daemon_beyond_a_thousand_open_files(mount: WritableMount) -> None:
    write(mount.path / "c/0/0", chunk(7))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert unmount.umount(str(mount.path), timeout=60, lazy=False) == 0
    assert _start_time(mount.pid) is None
