"""Zip files as sources: of uncompressed members, only the wanted ranges are read."""

from __future__ import annotations

import io
import os
import random
import tracemalloc
import zipfile
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardfs.model.blobs import ByteRange, Suffix
from shardfs.storage.open_store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.model.blobs import ByteRequest
    from shardfs.storage.store import Store

CONTENT = random.Random(0).randbytes(3 << 20)


@pytest.fixture
def store() -> Iterator[Store]:
    """A zip file with an uncompressed and a compressed member in memory."""
    fs, raw = fsspec.filesystem("memory"), io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("first", b"x" * 1000)
        with archive.open("in/stored", "w", force_zip64=True) as member:
            member.write(CONTENT)
        archive.writestr("in/deflated", CONTENT, zipfile.ZIP_DEFLATED)
    fs.pipe_file("/x.zip", raw.getvalue())
    yield open_store("zip://in::memory://x.zip")
    fs.rm("/x.zip")


@pytest.mark.parametrize("name", ["stored", "deflated"])
def test_ranges_of_members(name: str, store: Store) -> None:
    rng = random.Random(1)
    for _ in range(50):
        start = rng.randrange(len(CONTENT))
        wanted: list[ByteRequest] = [
            ByteRange(start, start + rng.randrange(1 << 16)),
            ByteRange(0, 7),
            Suffix(rng.randrange(1, 100)),
        ]
        rng.shuffle(wanted)
        expected = [CONTENT[-w.size :] if isinstance(w, Suffix) else CONTENT[w.start : w.stop] for w in wanted]
        assert store.open(name).read(wanted) == expected
    assert store.open(name).read([ByteRange(len(CONTENT), len(CONTENT) + 1)]) == [b""]
    with pytest.raises(FileNotFoundError):
        store.open("none").read([ByteRange(0, 1)])


def test_only_the_ranges_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        read.append(end - start)
        return original(self, path, start, end)

    original = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    blob = store.open("stored")
    for _ in range(2):
        assert blob.read([ByteRange(2 << 20, (2 << 20) + 100)]) == [CONTENT[2 << 20 : (2 << 20) + 100]]
    assert read == [30, 100, 100]


def test_a_replaced_zip_file(store: Store, tmp_path: Path) -> None:
    """The bytes of the old file, not bytes of the new one at the old positions."""
    raw = fsspec.filesystem("memory").cat_file("/x.zip")
    (tmp_path / "x.zip").write_bytes(raw)
    opened = open_store(str(tmp_path / "x.zip"))
    (tmp_path / "new.zip").write_bytes(bytes(len(raw)))
    os.replace(tmp_path / "new.zip", tmp_path / "x.zip")
    assert opened.open("in/stored").read([ByteRange(100, 5000)]) == [CONTENT[100:5000]]


def test_a_damaged_header_of_a_member(store: Store) -> None:
    fs = fsspec.filesystem("memory")
    raw = bytearray(fs.cat_file("/x.zip"))
    at = raw.index(b"PK\3\4", 4)
    raw[at : at + 4] = b"PK\0\0"
    fs.pipe_file("/x.zip", bytes(raw))
    with pytest.raises(OSError, match="the zip file is damaged"):
        store.open("stored").read([ByteRange(0, 10)])


def test_members_are_listed_by_directory(tmp_path: Path) -> None:
    names = ["a", "a-b", "a/x", "a/y/z", "a0", "b/", "c/d", ".shardfs-x", "é/f"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"" if name.endswith("/") else name.encode())
    store = open_store(str(tmp_path / "x.zip"))
    listed = {key: [(e.name, e.directory) for e in store.scan(key)] for key in ("", "a", "a/y", "b", "none", "c/d")}
    assert listed == {
        "": [("a-b", False), ("a", True), ("a0", False), ("b", True), ("c", True), ("é", True)],
        "a": [("x", False), ("y", True)],
        "a/y": [("z", False)],
        "b": [],
        "none": [],
        "c/d": [],
    }
    assert [store.entry(key).directory for key in ("", "a", "b", "a/y", "a0")] == [True, True, True, True, False]
    for missing in ("none", "a/z", "a0/x"):
        with pytest.raises(FileNotFoundError):
            store.entry(missing)


def test_a_listing_keeps_little_for_each_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for n in range(20_000):
            archive.writestr(f"c/{n}", b"x")
        archive.writestr("d/0", b"x")
    store = open_store(str(tmp_path / "x.zip"))
    tracemalloc.start()
    try:
        assert sum(1 for _ in store.scan("c")) == 20_000
        assert [entry.name for entry in store.scan("d")] == ["0"]
        assert store.entry("c/17").stat is not None
        assert tracemalloc.get_traced_memory()[1] < 20_000 * 20
    finally:
        tracemalloc.stop()
