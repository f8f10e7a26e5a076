"""How many requests a chunk costs that is written through a mount, and how many publishes a shard."""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.storage import syscalls
from shardfs.write import stored as stored_module
from shardfs.write.journal import Journal
from shardfs.write.journal.records import RecordKind
from shardfs.write.stored import digest_of
from tests.write.engines import Whole
from tests.write.mounts import WritableMount, writable
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.model.blobs import Blob

pytestmark = pytest.mark.fuse

TARGET = TARGETS["zarr_one_shard"]
ASKED = {"lookup", "create", "write", "flush", "release", "rename", "open", "setattr", "mkdir", "fsync"}


@pytest.mark.parametrize("call", ["write", "write_locked", "unlink"])
def test_no_stored_chunk_is_read_while_all_names_are_locked(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests need that lock, and a chunk may have gigabytes."""
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    TARGET.create(tmp_path / "store")
    TARGET.fill(tmp_path / "store", TARGET.array({0: 100, 1: 101}))
    with Whole().open(TARGET, tmp_path / "store", tmp_path / "journal") as files:
        requests = list[str]()

        def digest(chunk: Blob | None) -> str:
            with ThreadPoolExecutor(1) as other:
                lookup = other.submit(files.tree.resolve, TARGET.path(1))
                requests.append("waits" if wait([lookup], 60).not_done else "answered")
            return digest_of(chunk)

        monkeypatch.setattr(stored_module, "digest_of", digest)
        if call == "unlink":
            files.unlink(TARGET.path(0))
        else:
            getattr(files, call)(TARGET.path(0), TARGET.shown(7))
        assert requests == ["answered"]


def in_place(path: Path, data: bytes) -> None:
    """As z5py, cloud-volume and `cp` do."""
    path.write_bytes(data)


def by_rename(path: Path, data: bytes) -> None:
    """As zarr-python does."""
    beside = path.with_name(f"{path.name}.{os.urandom(16).hex()}.partial")
    beside.write_bytes(data)
    beside.rename(path)


def told(mount: WritableMount) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mount.path / ".shardfs/status.json").read_text())
    return found


@pytest.mark.parametrize(
    ("write", "limits"),
    [
        (in_place, {"lookup": 2, "create": 1, "write": 1, "flush": 1, "release": 1}),
        (by_rename, {"lookup": 3, "create": 1, "write": 1, "flush": 1, "release": 1, "rename": 1}),
    ],
)
def test_requests_for_each_chunk(write: Callable[[Path, bytes], None], limits: dict[str, int], tmp_path: Path) -> None:
    """And a shard that is written as a whole is published once, and no byte of it twice."""
    (tmp_path / "store").mkdir()
    TARGET.create(tmp_path / "store")
    chunks = [TARGET.path(n) for n in range(len(TARGET.chunks))]
    with writable(tmp_path / "store", tmp_path, "-o", "entry_timeout=60,attr_timeout=60,idle=60,age=60") as mount:
        mount.mount()
        for directory in {(mount.path / path).parent for path in chunks}:
            directory.mkdir(parents=True, exist_ok=True)
        before = Counter(told(mount)["requests"])
        for number, path in enumerate(chunks):
            write(mount.path / path, TARGET.shown(100 + number))
        requests = Counter(told(mount)["requests"]) - before
        per_chunk = {name: -(-(n - 8) // len(chunks)) for name, n in requests.items() if name in ASKED and n > 8}
        assert all(n <= limits.get(name, 0) for name, n in per_chunk.items()), per_chunk
        assert mount.flush().returncode == 0
        writing = told(mount)["writing"]
        assert writing["published_shards"] == 1
        stored_nbytes = sum(p.stat().st_size for p in (tmp_path / "store/c").rglob("*") if p.is_file())
        assert writing["published_bytes"] == stored_nbytes
        assert mount.umount().returncode == 0


def test_records_for_each_chunk_that_tensorstore_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens the file twice, closes one of the two, and writes: that is journaled with its name, and synced once."""
    appended: list[RecordKind] = []
    synced: list[int] = []
    append, sync = Journal.append, syscalls.fdatasync

    def counted(self: Journal, kind: RecordKind, *arguments: Any, **more: Any) -> Any:
        appended.append(kind)
        return append(self, kind, *arguments, **more)

    def counted_sync(fd: int) -> None:
        synced.append(fd)
        sync(fd)

    monkeypatch.setattr(Journal, "append", counted)
    monkeypatch.setattr(syscalls, "fdatasync", counted_sync)
    (tmp_path / "store").mkdir()
    TARGET.create(tmp_path / "store")
    with Whole().open(TARGET, tmp_path / "store", tmp_path / "journal") as files:
        parent, name = files._parent(TARGET.path(0), make=True)
        _, first = files.tree.create(parent, name + b".__lock", os.O_WRONLY | os.O_CREAT, 0o644)
        _, second = files.tree.create(parent, name + b".__lock", os.O_WRONLY | os.O_CREAT, 0o644)
        files.tree.flush(second)
        files.tree.release(second)
        files.tree.write(first, 0, memoryview(TARGET.shown(1)))
        files.tree.fsync(first)
        files.tree.rename(parent, name + b".__lock", parent, name, False)
        files.tree.sync_directory(parent)
        files.tree.flush(first)
        files.tree.release(first)
        assert files.read(TARGET.path(0)) == TARGET.shown(1)
        assert appended == [RecordKind.MOVE]
        assert len(synced) == 1
