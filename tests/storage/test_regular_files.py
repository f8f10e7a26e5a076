"""Files of shardfs itself are hostile input: whatever has their name, nothing waits, grows or happens elsewhere."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from shardfs.cli import commands
from shardfs.jobs.in_place_shards import LOCK, take_over, working
from shardfs.model.bounded_json import load_json
from shardfs.storage import disk_cache, regular_files
from shardfs.storage.disk_cache import FOLDER, DiskCache
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import DIRECTORY, STATE, PackState
from shardfs.storage.source_locks import MAX_RECORD, describe, owner_in, owner_record, read_owner
from shardfs.storage.writers.local import LocalWriter
from shardfs.write.journal import places
from shardfs.write.journal.overlaps import refuse
from shardfs.write.journal.reading import read
from tests import handmade

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEEP = b"[" * 100_000


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    """A device that is no terminal: a read of it does not end."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make devices")


def link_to_endless_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_out(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"{}")
    path.symlink_to(path.parent.parent / "outside")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 6 << 30)


def deep(path: Path) -> None:
    path.write_bytes(b'{"stage": ' + DEEP)


NO_FILES = [fifo, device, link_to_endless_zeros, link_out]
HOSTILE = [*NO_FILES, sparse, deep]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is opened otherwise than with O_PATH, and is no regular file or directory."""
    special: list[str] = []
    original = os.open

    def open_noted(path: Any, flags: int, *args: Any, **options: Any) -> int:
        fd = original(path, flags, *args, **options)
        mode = os.fstat(fd).st_mode
        if not flags & os.O_PATH and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            special.append(os.fspath(path))
        return fd

    monkeypatch.setattr(os, "open", open_noted)
    return special


@pytest.mark.parametrize("make", HOSTILE)
def test_state_of_a_job(make: Callable[[Path], None], tmp_path: Path, opened: list[str]) -> None:
    root = tmp_path / "source"
    root.mkdir()
    make(root / STATE)
    with pytest.raises(OSError, match=r"damaged|neither a file") as e:
        PackState.read(str(root))
    assert e.value.errno in (errno.EEXIST, errno.EACCES)
    assert opened == []


SOUND = {"direction": "pack", "stage": "mixed", "plain": ["a/.zarray"], "sharded": [], "options": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "pack"},
        {"direction": "sideways"},
        {"stage": "gone"},
        {"stage": []},
        {"plain": "abc"},
        {"plain": [1]},
        {"plain": ["../secret"]},
        {"sharded": ["/etc/passwd"]},
        {"sharded": ["a/../../b"]},
        {"options": [1]},
        {"options": {"source": "x"}},
        {"options": {"chunks_per_shard": ["1"]}},
        {"options": {"arrays": "abc"}},
        {"surplus": 1},
    ],
)
def test_state_of_a_job_of_another_form(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(json.dumps(SOUND))
    assert PackState.read(str(tmp_path)) is not None
    (tmp_path / STATE).write_text(json.dumps(SOUND | changes))
    with pytest.raises(FileExistsError, match="damaged"):
        PackState.read(str(tmp_path))
    (tmp_path / STATE).write_text('{"stage": "mixed"}')
    with pytest.raises(FileExistsError, match="damaged"):
        PackState.read(str(tmp_path))


@pytest.mark.parametrize("name", [DIRECTORY, f"{DIRECTORY}/plain", f"{DIRECTORY}/sharded"])
def test_directories_of_a_job_are_no_links(name: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    (root / name).parent.mkdir(parents=True)
    (tmp_path / "precious").mkdir()
    (root / name).symlink_to(tmp_path / "precious")
    (root / STATE).write_text(json.dumps(SOUND))
    with pytest.raises(PermissionError, match="should be a directory"):
        PackState.read(str(root))


@pytest.mark.parametrize("make", HOSTILE)
def test_locks(make: Callable[[Path], None], tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "lock"
    make(path)
    assert read_owner(str(path)) == {}
    if make in NO_FILES:
        with pytest.raises(PermissionError):
            places.is_locked(str(path))
        with pytest.raises(PermissionError):
            places.Lock.take(str(path), "/mnt")
    assert opened == []
    assert not (tmp_path / "outside").exists() or (tmp_path / "outside").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "raw",
    [
        DEEP,
        b"[]",
        b"{" + b" " * MAX_RECORD + b"}",
        json.dumps({"since": 1e300, "pid": {}, "mountpoint": [DEEP.decode()], "host": 1}).encode(),
        b'{"since": ' + b"9" * 400 + b"}",
        b'{"sources": [1], "started": "x"}',
        b'{"since": true, "sources": {"a": 1}}',
    ],
)
def test_owner_records_of_another_form(raw: bytes) -> None:
    owner = owner_in(raw)
    assert owner == {}
    assert "pid ?" in describe(owner)


def test_owner_records_come_back() -> None:
    record = owner_record("/mnt", "/data") | {"journal": [1, 2]}
    assert owner_in(json.dumps(record).encode()) == record


def test_journal_locks_of_other_processes(tmp_path: Path, opened: list[str]) -> None:
    """Another process may hold open anything that is named like a lock."""
    path = tmp_path / ("0" * 32) / "lock"
    path.parent.mkdir()
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    del opened[:]
    try:
        refuse(str(tmp_path / "elsewhere"))
    finally:
        os.close(fd)
    assert opened == []


@pytest.mark.parametrize("make", NO_FILES)
def test_segments_of_a_journal(make: Callable[[Path], None], tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "journal").mkdir()
    make(tmp_path / "journal" / f"{1:016x}.wal")
    with pytest.raises(PermissionError):
        read(tmp_path / "journal", None, write=False)
    assert opened == []


def test_forged_numbers_of_segments(tmp_path: Path) -> None:
    for number in (1, 3, 7, 2**64 - 1):
        (tmp_path / f"{number:016x}.wal").touch()
    with read(tmp_path, None, write=False) as reading:
        assert [p for p in reading.problems if "missing" in p] == [
            "0000000000000002.wal is missing",
            "0000000000000004.wal to 0000000000000006.wal are missing",
            "0000000000000008.wal to fffffffffffffffe.wal are missing",
        ]


def test_discarded_files_of_a_journal_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    link = tmp_path / "journal" / f"{places.DISCARDED}1"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "precious")
    long_ago = time.time() - 2 * places.KEPT_S
    os.utime(link, (long_ago, long_ago), follow_symlinks=False)
    places.purge(link.parent)
    assert not link.is_symlink()
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("make", [fifo, link_out, sparse])
def test_entries_of_the_disk_cache(make: Callable[[Path], None], tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "cache"), 1 << 30)
    path = tmp_path / "cache" / FOLDER / disk_cache._path(b"n" * disk_cache.NAME_BYTES)
    path.parent.mkdir()
    make(path)
    assert cache.get(b"n" * disk_cache.NAME_BYTES) is None
    cache.put(b"n" * disk_cache.NAME_BYTES, bytes(disk_cache.TAG_BYTES), b"data")
    cache.flush(60)
    assert cache.get(b"n" * disk_cache.NAME_BYTES) == (bytes(disk_cache.TAG_BYTES), b"data")


@pytest.mark.parametrize("make", [fifo, device, link_to_endless_zeros])
def test_special_files_in_a_source_are_not_opened(
    make: Callable[[Path], None], tmp_path: Path, opened: list[str]
) -> None:
    make(tmp_path / "x")
    store, writer = LocalStore(str(tmp_path)), LocalWriter(LocalStore(str(tmp_path)))
    for call in (
        lambda: store.open("x"),
        lambda: store.documents("", ["x"], 10),
        lambda: writer.disk.open_file("x", os.O_RDWR),
        lambda: writer.put("x", b"new"),
        lambda: writer.create([("x", b"new")]),
    ):
        with pytest.raises(OSError):  # noqa: PT011 - any of EACCES, EROFS
            call()
    assert opened == []


@pytest.mark.parametrize("make", [fifo, device, link_to_endless_zeros])
def test_special_files_in_place_of_chunk_files_are_not_read(
    make: Callable[[Path], None], tmp_path: Path, opened: list[str]
) -> None:
    """Jobs open chunk files with few calls: at most what has the name itself is opened, not what a link leads to."""
    make(tmp_path / "x")
    with pytest.raises(PermissionError) as e:
        LocalStore(str(tmp_path)).open_once("x")
    assert e.value.filename == "x"
    assert opened == ([] if make is link_to_endless_zeros else ["x"])


def test_sockets_and_directories_in_place_of_chunk_files(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    store = LocalStore(str(tmp_path))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        store.open_once("directory")
    with pytest.raises(PermissionError, match="neither a file"):
        store.open_once("socket")
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1  # the store keeps the directory above open


def test_growth_while_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert regular_files.read_regular(str(tmp_path / "x"), 10) == b"0123456789"
    with pytest.raises(ValueError, match="at most 9"):
        regular_files.read_regular(str(tmp_path / "x"), 9)


def test_a_directory_above_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "old").write_bytes(b"precious")
    (tmp_path / "source" / "d").symlink_to(tmp_path / "outside")
    for name in ("old", "new"):
        with pytest.raises(PermissionError, match="leads out"):
            regular_files.open_or_create(
                str(tmp_path / "source" / "d" / name), os.O_RDWR, 0o600, inside=str(tmp_path / "source")
            )
    assert os.listdir(tmp_path / "outside") == ["old"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (DEEP, "deeply"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" + b"1," * 1_000_001 + b"1]", "too many"),
        (b"{" + b" " * 100, "more than 100 bytes"),
        (b"nonsense", "Expecting"),
        (b"\xff\xfe\xff", "codec"),
    ],
)
def test_json_with_bounds(raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_json(raw, 100 if "bytes" in why else 1 << 30)


@pytest.mark.parametrize("make", [*HOSTILE, lambda path: path.write_text('{"stage":"mixed"}')])
def test_a_source_with_anything_named_like_the_state_of_a_job(
    make: Callable[[Path], None], tmp_path: Path, opened: list[str]
) -> None:
    root = tmp_path / "source"
    handmade.zarr_sound(root)
    make(root / STATE)
    invocation = CliRunner().invoke(commands, ["info", str(root)], standalone_mode=False)
    if make in NO_FILES:
        assert isinstance(invocation.exception, PermissionError)
        assert STATE in str(invocation.exception)
    else:
        assert "chunks" in invocation.output
    assert opened == []


@pytest.mark.parametrize("make", NO_FILES)
def test_the_lock_of_a_job(make: Callable[[Path], None], tmp_path: Path, opened: list[str]) -> None:
    root = tmp_path / "source"
    (root / DIRECTORY).mkdir(parents=True)
    make(root / LOCK)
    for call in (lambda: take_over(str(root), 1), lambda: working(str(root), 1).__enter__()):
        with pytest.raises(PermissionError):
            call()
    assert opened == []
