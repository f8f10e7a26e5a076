"""The journal in use: what is acknowledged is there again, the disk may fail, room is taken and given back."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import FilePart
from shardfs.storage import syscalls
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.pending import Backlog, Pending
from tests.write.journals import MiB, content, kill, open_journal, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.write.journal import Record


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    yield
    syscalls.hook = None


def fail(name: str, number: int, times: int = 1 << 30, after: int = 0) -> Callable[[], int]:
    """Calls of that name fail with that errno, `times` times, after so many good ones. How many failed is told."""
    counts = [0, 0]

    def hook(called: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if called == name:
            counts[0] += 1
            if after < counts[0] <= after + times:
                counts[1] += 1
                raise OSError(number, os.strerror(number))
        return function(*args)

    syscalls.hook = hook
    return lambda: counts[1]


def files(directory: Path, ending: str = ".wal") -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(ending))


# ------------------------------------------------------------------------------------------- what is acknowledged


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65536, 3 * MiB])
def test_a_killed_process_leaves_all_that_was_appended(tmp_path: Path, size: int) -> None:
    journal = open_journal(tmp_path / "j")
    data = random.Random(size).randbytes(size)
    record = put(journal, "c/0", data)
    assert record.data is not None
    assert record.data.start % 4096 == 0 or size < 4096
    assert journal.read(record.data) == data
    journal.append(RecordKind.DEL, {"path": "c/1", "base": [1, 2]})
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert journal.problems == []
    assert content(journal) == [(1, RecordKind.PUT, "c/0", data), (2, RecordKind.DEL, "c/1", None)]
    journal.close(clean=False)


def test_data_may_come_from_memory_or_from_a_file(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    whole = random.Random(1).randbytes(3 * MiB + 5)
    (tmp_path / "spill").write_bytes(b"xx" + whole)
    fd = os.open(tmp_path / "spill", os.O_RDONLY)
    parts = [
        journal.append(RecordKind.PUT, {"path": "a"}, whole),
        journal.append(RecordKind.PUT, {"path": "c"}, FilePart(fd, 2, len(whole))),
    ]
    os.close(fd)
    assert all(record.data and journal.read(record.data) == whole for record in parts)
    assert parts[0].data is not None
    assert journal.read(parts[0].data, 10, 20) == whole[10:30]
    assert journal.read(parts[0].data, len(whole) - 1, 20) == whole[-1:]
    with journal.using([parts[0].data]) as (part,):
        assert os.pread(part.fd, part.size, part.start) == whole
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert [peek.read(r.data) == whole for r in peek.recovered if r.data] == [True] * 2


def test_a_file_that_ends_early_leaves_no_record(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    with open(tmp_path / "spill", "w+b") as file, pytest.raises(OSError, match="ends 10 bytes early"):
        journal.append(RecordKind.PUT, {"path": "c"}, FilePart(file.fileno(), 0, 10))
    put(journal, "d")
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert content(peek) == [(1, RecordKind.PUT, "d", b"data")]


def test_names_that_are_not_utf8_come_back(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    name = os.fsdecode(b"c/\xff\xfe \xe2\x82\xac\n")
    put(journal, name)
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert peek.recovered[0].meta["path"] == name


def test_what_is_huge_has_a_segment_of_its_own(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, "a")
    put(journal, "b", bytes(5 * MiB))
    put(journal, "c")
    assert len(files(tmp_path / "j")) == 3
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert [r.meta["path"] for r in journal.recovered] == ["a", "b", "c"]
    journal.close(clean=False)


def test_a_clean_end_removes_the_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    journal.release([put(journal, str(i), bytes(60000)).lsn for i in range(5)])
    (tmp_path / "j/lost+scratch").mkdir()
    journal.close(clean=True)
    assert os.listdir(tmp_path) == []


def test_a_power_failure_while_it_is_removed_brings_nothing_back(tmp_path: Path) -> None:
    """Older segments are gone from the disk before the one that says so."""
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    journal.release([put(journal, str(i), bytes(60000)).lsn for i in range(5)])
    calls: list[str] = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        calls.append(f"{name} {os.path.basename(args[0])}" if name in ("unlink", "rmdir") else name)
        return function(*args)

    syscalls.hook = hook
    journal.close(clean=True)
    syscalls.hook = None
    last = [call for call in calls if call.endswith(".wal")][-1]
    assert calls[calls.index(last) - 1] == "fsync_directory"
    later_calls = [call for call in calls[calls.index(last) + 1 :] if call != "close"]
    assert later_calls == ["unlink lock", "rmdir j"]


@pytest.mark.parametrize(
    "file_name", ["lost+scratch/1-a.partial", "0000000000000001.torn", "discarded-1/x", "of the user's"]
)
def test_what_is_kept_aside_keeps_the_journal_and_numbers_go_on(file_name: str, tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    (tmp_path / "j" / file_name).parent.mkdir(exist_ok=True)
    (tmp_path / "j" / file_name).write_bytes(b"kept")
    first = put(journal, "c/0", bytes(MiB))
    journal.release([first.lsn])
    assert journal.nbytes == 0
    journal.close(clean=True)
    (name,) = files(tmp_path / "j")
    assert (tmp_path / "j" / name).stat().st_size < 8192
    assert (tmp_path / "j" / file_name).read_bytes() == b"kept"
    journal = open_journal(tmp_path / "j")
    assert [r.kind for r in journal.recovered] == [RecordKind.CLEAN]
    Backlog(journal)
    assert put(journal, "c/1").lsn > journal.recovered[-1].lsn
    journal.close(clean=False)


def test_a_mount_that_writes_nothing_leaves_no_journal(tmp_path: Path) -> None:
    open_journal(tmp_path / "j").close(clean=True)
    assert os.listdir(tmp_path) == []


def test_everything_is_private(tmp_path: Path) -> None:
    os.umask(os.umask(0))  # whatever it is
    journal = open_journal(tmp_path / "state" / "j")
    put(journal, "a")
    journal.tidy()
    assert stat.S_IMODE((tmp_path / "state" / "j").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state" / "j").iterdir()} == {0o600}
    journal.close(clean=False)


def test_credentials_are_not_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", "https://user:hunter2@host/data?token=hunter2")
    put(journal, "a")
    kill(journal)
    for path in (tmp_path / "j").iterdir():
        assert b"hunter2" not in path.read_bytes()
    with Journal.peek(tmp_path / "j") as peek:
        assert "host/data" in peek.source


@given(st.data())
def test_any_sequence_of_records_crashes_and_releases_recovers_what_was_acknowledged(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("any") / "j"
    options: dict[str, Any] = {"limit_bytes": 4 * MiB, "segment_bytes": 64 << 10}
    journal, pending = open_journal(directory, **options), Pending()
    model: dict[str, bytes | None] = {}

    def apply(record: Record) -> None:
        journal.release(pending.apply(record))

    def check() -> None:
        contents = {p: v.data and journal.read(v.data) for p, v in pending.versions.items()}
        assert contents == model

    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(("put", "put", "put", "del", "move", "done", "sync", "tidy", "hard", "kill")))
        path = data.draw(st.sampled_from("abcd"))
        version = pending.versions.get(path)
        if step == "put":
            value = bytes([data.draw(st.integers(0, 255))]) * data.draw(st.sampled_from((0, 3, 4096, 30000, 100000)))
            apply(put(journal, path, value))
            model[path] = value
        elif step == "del":
            apply(journal.append(RecordKind.DEL, {"path": path}, reserve=True))
            model[path] = None
        elif step == "move" and version and version.data:
            apply(journal.append(RecordKind.MOVE, {"from": path, "to": "e", "lsn": version.lsn}))
            model["e"] = model.pop(path)
        elif step == "done" and version:
            meta = {"key": "s", "lsns": [version.lsn], "entries": {path: None}}
            apply(journal.append(RecordKind.DONE, meta, reserve=True))
            del model[path]
        elif step == "sync":
            journal.sync()
        elif step in ("tidy", "hard"):
            journal.tidy(hard=step == "hard")
        elif step == "kill":
            kill(journal)
            journal = open_journal(directory, **options)
            assert journal.problems == []
            pending = Backlog(journal).pending
            assert pending.lost == {}
        check()
    clean = not model
    journal.close(clean=clean)
    journal = open_journal(directory, **options)
    assert journal.problems == []
    pending = Pending(journal.recovered)
    check()
    journal.close(clean=clean)


@given(st.data())
def test_a_torn_tail_costs_only_what_was_not_on_disk(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The last segment is cut, or zeroed, anywhere behind what was synced."""
    directory = tmp_path_factory.mktemp("torn") / "j"
    journal = open_journal(directory)
    sizes = data.draw(st.lists(st.sampled_from((0, 10, 5000)), min_size=1, max_size=6))
    synced = data.draw(st.integers(0, len(sizes)))
    safe, ends = 4096, []
    for i, size in enumerate(sizes):
        put(journal, str(i), bytes([i + 1]) * size)
        assert journal._appender.current is not None
        ends.append(journal._appender.current.end)
        if i + 1 == synced:
            journal.sync()
            safe = ends[-1]
    kill(journal)
    (name,) = files(directory)
    at = data.draw(st.integers(safe, ends[-1]))
    with open(directory / name, "r+b") as file:
        file.truncate(at)
        if data.draw(st.booleans()):
            file.truncate(MiB)
    journal = open_journal(directory)
    paths = [path for _, _, path, _ in content(journal)]
    whole = sum(end - 64 < at for end in ends)  # a record ends up to 63 bytes before the next one begins
    assert synced <= len(paths)
    assert paths == [str(i) for i in range(len(paths))]
    assert whole - 1 <= len(paths) <= whole
    assert journal.damaged_paths == []
    kill(journal)
    journal = open_journal(directory)  # a second recovery finds nothing to do
    assert journal.problems == []
    assert [path for _, _, path, _ in content(journal)] == paths
    journal.close(clean=False)


# ------------------------------------------------------------------------------------------------------ syncing


def test_one_fdatasync_serves_all_who_wait(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    calls, entered, go_on = [0], threading.Event(), threading.Event()

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "fdatasync":
            calls[0] += 1
            entered.set()
            assert go_on.wait(60)
        return function(*args)

    syscalls.hook = hook
    put(journal, "first")
    threads = [threading.Thread(target=journal.sync)]
    threads[0].start()
    assert entered.wait(60)
    for i in range(8):
        put(journal, str(i))  # nobody waits for the disk to append
        threads.append(threading.Thread(target=journal.sync))
        threads[-1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert 2 <= calls[0] <= 4  # the committer may sync, too
    journal.close(clean=False)


def test_the_committer_syncs_by_itself(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", commit_s=0.02)
    synced = threading.Event()

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = function(*args)
        if name == "fdatasync":
            synced.set()
        return result

    syscalls.hook = hook
    put(journal, "a")
    assert synced.wait(60)
    syscalls.hook = None
    journal.close(clean=False)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_failed_fdatasync_moves_the_records_to_another_segment(tmp_path: Path, pinned: bool) -> None:
    """T11: fails once, then works."""
    journal = open_journal(tmp_path / "j")
    before = put(journal, "before", b"1" * 5000)
    journal.sync()
    records = [put(journal, str(i), bytes([i]) * 5000) for i in range(5)]
    journal.append(RecordKind.DEL, {"path": "gone"})
    assert records[0].data is not None
    with journal.using([records[0].data]) if pinned else nullcontext():
        failed = fail("fdatasync", errno.EIO, 1)
        journal.sync()
        assert failed() == 1
        assert journal.read_only is None
        assert len(files(tmp_path / "j")) == 2
        for record in [before, *records]:
            assert record.data is not None
            assert journal.read(record.data)
    put(journal, "after")
    journal.sync()
    kill(journal)
    # The disk has lost what it could not write.
    with open(tmp_path / "j" / files(tmp_path / "j")[0], "r+b") as file:
        file.seek(records[0].data.start + 5000 + 24)
        file.write(bytes(60000))
    journal = open_journal(tmp_path / "j")
    assert journal.problems == []
    assert [r.meta["path"] for r in journal.recovered] == ["before", *"01234", "gone", "after"]
    assert content(journal)[1:3] == [(2, RecordKind.PUT, "0", b"\0" * 5000), (3, RecordKind.PUT, "1", b"\1" * 5000)]
    journal.close(clean=False)


def test_a_disk_that_stays_broken_makes_the_journal_read_only(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, "first")
    journal.sync()
    last = put(journal, "last")
    fail("fdatasync", errno.EIO)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be written to disk") as caught:
            journal.sync()
        assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="cannot be written to disk") as caught:
        put(journal, "more")
    assert caught.value.errno == errno.EROFS
    assert last.data is not None
    assert journal.read(last.data) == b"data"
    syscalls.hook = None
    with pytest.raises(OSError, match="cannot be written to disk"):
        journal.sync()  # for ever: nobody knows what the disk has
    with pytest.raises(OSError, match="cannot be written to disk"):
        journal.close(clean=True)
    journal = open_journal(tmp_path / "j")
    assert "first" in [r.meta.get("path") for r in journal.recovered]
    journal.close(clean=False)


@pytest.mark.parametrize("call", ["pwrite", "fallocate", "fsync", "open", "fsync_directory"])
@pytest.mark.parametrize("times", [1, 1 << 30])
def test_whatever_fails_in_append_nothing_acknowledged_is_lost(tmp_path: Path, call: str, times: int) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    record_numbers = [put(journal, "a", bytes(60000)).lsn]
    failed = fail(call, errno.EINTR, times)
    for i in range(4):
        with suppress(InterruptedError):
            record_numbers.append(put(journal, str(i), bytes(60000)).lsn)
    assert failed()
    syscalls.hook = None
    record_numbers.append(put(journal, "z").lsn)
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert [r.lsn for r in journal.recovered] == record_numbers
    assert journal.problems == []
    journal.close(clean=False)


def test_a_short_write_goes_on(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(args[0], args[1][:1000], args[2]) if name == "pwrite" else function(*args)

    syscalls.hook = hook
    put(journal, "a", bytes(range(256)) * 40)
    syscalls.hook = None
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert content(peek) == [(1, RecordKind.PUT, "a", bytes(range(256)) * 40)]


# --------------------------------------------------------------------------------------------------------- room


def test_segments_go_oldest_first_and_only_when_the_disk_has_what_supersedes_them(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    records = [put(journal, "a", bytes(60000)) for _ in range(4)]
    journal.release([r.lsn for r in records[:3]])
    assert len(files(tmp_path / "j")) == 4
    synced: list[bool] = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "unlink":
            synced.append(journal._appender.durable >= records[-1].lsn)
        return function(*args)

    syscalls.hook = hook
    journal.tidy()
    assert synced == [True] * 3
    syscalls.hook = None
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert [r.lsn for r in journal.recovered] == [records[-1].lsn]
    assert journal.problems == []
    journal.close(clean=False)


def test_a_failed_sync_keeps_the_segments(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    records = [put(journal, "a", bytes(60000)) for _ in range(4)]
    journal.release([r.lsn for r in records[:3]])
    fail("fdatasync", errno.EIO)
    with pytest.raises(OSError, match="cannot be written"):
        journal.tidy()
    syscalls.hook = None
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert len(peek.recovered) == 4


def test_one_old_record_does_not_keep_the_whole_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", limit_bytes=32 * MiB, segment_bytes=MiB)
    old_record = put(journal, "kept", b"k" * 5000)
    for _ in range(20):
        records = [put(journal, "a", bytes(500_000)) for _ in range(8)]
        journal.release([r.lsn for r in records])
        journal.tidy()
        assert journal.nbytes < 8 * MiB
    assert old_record.data is not None
    assert journal.read(old_record.data) == b"k" * 5000
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert content(journal)[0] == (old_record.lsn, RecordKind.PUT, "kept", b"k" * 5000)
    assert journal.problems == []
    journal.close(clean=False)


@pytest.mark.parametrize("call", ["fallocate", "pwrite"])
def test_room_that_cannot_be_made_costs_nothing(tmp_path: Path, call: str) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    record_numbers = [put(journal, str(i), bytes([i]) * 5000).lsn for i in range(5)]
    for _ in range(8):
        journal.release([put(journal, "x", bytes(50_000)).lsn])
    failed = fail(call, errno.ENOSPC, after=2 if call == "pwrite" else 0)
    with nullcontext() if call == "fallocate" else pytest.raises(OSError, match="cannot be written"):
        journal.tidy(hard=True)
    assert failed()
    assert (journal.read_only is not None) == (call == "pwrite")  # where room was allocated that should not fail
    syscalls.hook = None
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert set(record_numbers) <= {r.lsn for r in peek.recovered}
        assert peek.problems == []


def test_readers_keep_a_segment_until_they_are_done(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    old = put(journal, "a", b"o" * 60000)
    put(journal, "a", b"n" * 60000)
    assert old.data is not None
    with journal.using([old.data]) as (part,):
        journal.release([old.lsn])
        journal.tidy()
        assert os.pread(part.fd, part.size, part.start) == b"o" * 60000
    journal.tidy()
    with pytest.raises(OSError, match="not in the journal any more"):
        journal.read(old.data)
    journal.close(clean=False)


def test_at_the_limit_only_what_makes_room_goes_on(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", limit_bytes=8 * MiB, segment_bytes=MiB)
    records: list[Record] = []
    while journal.nbytes + 204_000 < 6 * MiB:
        records.append(put(journal, str(len(records)), bytes(200_000)))
    with pytest.raises(OSError, match="limit") as caught:
        put(journal, "x", bytes(200_000))
    assert caught.value.errno == errno.ENOSPC
    assert journal.nbytes <= journal.limit_bytes == 6 * MiB
    with pytest.raises(OSError, match="limit"):
        journal.append(RecordKind.MOVE, {"from": "0", "to": "x", "lsn": 1}, bytes(200_000))
    removal = journal.append(RecordKind.DEL, {"path": "0"}, reserve=True)
    journal.append(RecordKind.BEGIN, {"key": "s"}, reserve=True)
    journal.append(RecordKind.DONE, {"key": "s", "lsns": [removal.lsn], "entries": {"0": None}}, reserve=True)
    journal.release([r.lsn for r in records[:20]])
    put(journal, "after", bytes(200_000))  # room is made at once
    kill(journal)


def test_a_small_journal_can_be_filled_again_and_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", limit_bytes=MiB)
    for i in range(40):
        record = put(journal, str(i), bytes(600_000))
        journal.release([record.lsn])
    journal.close(clean=True)


def fill_with_tombstones(journal: Journal) -> None:
    for i in range(30):
        journal.append(RecordKind.DEL, {"path": str(i), "why": "x" * 1000}, reserve=True)


def test_on_a_full_disk_tombstones_use_the_spare_room(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    put(journal, "a", bytes(50000))
    journal.tidy()  # makes the spare file
    fail("fallocate", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        put(journal, "b", bytes(50000))
    fill_with_tombstones(journal)
    with pytest.raises(OSError, match="No space"):
        put(journal, "c", bytes(20000))  # not into what is kept for tombstones
    syscalls.hook = None
    put(journal, "d", bytes(50000))  # heals by itself
    journal.tidy()
    assert files(tmp_path / "j", "spare") == ["spare"]
    kill(journal)
    journal = open_journal(tmp_path / "j")
    assert [r.meta["path"] for r in journal.recovered] == ["a", *map(str, range(30)), "d"]
    journal.close(clean=False)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "fsync_directory"])
def test_a_failure_with_the_spare_room_does_not_block_later_records(call: str, tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    put(journal, "a", bytes(50000))
    journal.tidy()  # makes the spare file
    renamed: list[str] = []

    def hook(name: str, function: Any, args: Any) -> Any:
        if name == "fallocate":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == call and renamed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name == "rename":
            renamed.append(args[1])
        return function(*args)

    syscalls.hook = hook
    with pytest.raises(OSError, match="Input/output"):
        fill_with_tombstones(journal)
    assert renamed
    syscalls.hook = None
    put(journal, "b", bytes(50000))
    assert files(tmp_path / "j", "spare") == ["spare"]
    journal.close(clean=False)


def test_on_a_full_disk_a_journal_that_is_not_needed_any_more_is_closed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10, reserve_bytes=0)
    journal.release([put(journal, "a", bytes(50000)).lsn])
    fail("fallocate", errno.ENOSPC)
    (tmp_path / "j/kept.torn").touch()
    journal.close(clean=True)
    (name,) = files(tmp_path / "j")
    assert (tmp_path / "j" / name).stat().st_size < 64 << 10, "what was allocated is given back"


def test_many_threads_append_read_and_release(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j", segment_bytes=256 << 10, commit_s=0.005)

    def work(number: int) -> list[Record]:
        chance = random.Random(number)
        records = []
        for i in range(100):
            data = chance.randbytes(chance.choice((10, 5000, 40000)))
            record = put(journal, f"{number}/{i}", data)
            if i % 10 == 0:
                journal.sync()
            assert record.data is not None
            assert journal.read(record.data) == data
            if i % 20:
                journal.release([record.lsn])
            else:
                records.append(record)
        return records

    with ThreadPoolExecutor(4) as threads:
        all_records = [record for records in threads.map(work, range(4)) for record in records]
    for record in all_records:
        assert record.data is not None
        journal.read(record.data)
    kill(journal)
    with Journal.peek(tmp_path / "j") as peek:
        assert {r.lsn for r in all_records} <= {r.lsn for r in peek.recovered}
        assert peek.problems == []
