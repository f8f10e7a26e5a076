"""One collection: shards that change or vanish under the reader, many threads, errors that name their chunk."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import fsspec
import pytest
import zarr
import zarr.codecs

from shardfs.model.errors import (
    CorruptShardError,
    NotADatasetError,
    ShardfsError,
    StaleShardError,
    UnsupportedError,
    errno_of,
    is_expected,
)
from shardfs.shards.shard_indices import ShardIndices
from shardfs.shards.stored_chunk import StoredChunk
from shardfs.storage.cache import WINDOW, ByteLRU
from shardfs.storage.local import LocalBlob, LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.suites.walking import entries, read_all

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.shard_format import Placement
    from shardfs.model.values import Coords

OLD = [bytes([n]) * 4 for n in range(1, 5)]
NEW = [bytes([n]) * 9 for n in range(11, 15)]


def _write(path: Path, chunks: list[bytes] | list[bytes | None], *, in_place: bool = False) -> None:
    shard, data = path / "c/0/0", handmade.zarr_shard(chunks)
    if in_place:
        shard.write_bytes(data)
    else:
        shard.parent.mkdir(parents=True, exist_ok=True)
        (path / "c/0/new").write_bytes(data)
        (path / "c/0/new").rename(shard)


@pytest.fixture
def array(tmp_path: Path) -> Path:
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    _write(tmp_path, OLD)
    return tmp_path


def _tree(path: Path, ttl: float = math.inf, limit: int = 1 << 20) -> Tree:
    return Tree(Datasets(LocalStore(str(path)), ByteLRU(limit), ByteLRU(limit), ttl))


def _get(tree: Tree, name: str) -> bytes:
    return read_all(tree, tree.resolve(name))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_replaced_shard_is_seen_once_its_index_has_expired(array: Path, in_place: bool) -> None:
    tree = _tree(array, ttl=0.0)
    assert _get(tree, "c/1/1") == OLD[3]
    _write(array, NEW, in_place=in_place)
    assert _get(tree, "c/1/1") == NEW[3]
    assert {e.size for e in entries(tree, tree.resolve("c/1").number)} == {9}


def test_a_shard_replaced_by_rename_is_read_on_as_it_was(array: Path) -> None:
    tree = _tree(array)
    assert _get(tree, "c/0/0") == OLD[0]
    _write(array, NEW)
    assert [_get(tree, f"c/{i}/{j}") for i in (0, 1) for j in (0, 1)] == OLD


@pytest.mark.parametrize("how", ["expired", "closed"])
def test_chunks_of_another_size_are_reported_before_they_are_shown(array: Path, how: str) -> None:
    tree = _tree(array, ttl=0.0 if how == "expired" else math.inf)
    numbers = [tree.resolve(f"c/{i}/{j}").number for i in (0, 1) for j in (0, 1)]
    reports: list[list[int]] = []
    tree.hooks.resized = lambda resized: reports.append(resized.tolist())

    def read_after(chunks: list[bytes | None]) -> list[int]:
        _write(array, chunks)
        if how == "closed":
            tree.store.reopen("c/0/0")
        reports.clear()
        with suppress(FileNotFoundError):
            _get(tree, "c/1/1")
        return sorted({number for report in reports for number in report})

    assert read_after([*OLD[::-1]]) == []
    assert read_after([OLD[0], b"longer", b"", OLD[3]]) == numbers[1:3]
    assert read_after([OLD[0], b"longer", None, OLD[3]]) == numbers[2:3]
    assert read_after([None, *OLD[1:]]) == numbers[:2]
    assert read_after([None] * 4) == numbers[1:]
    assert read_after([*NEW]) == []


def test_a_shard_that_shrank_is_looked_up_again_and_read_once_more(array: Path) -> None:
    tree = _tree(array)
    attributes = tree.resolve("c/1/1")
    assert attributes.size == 4
    (array / "c/0/0").write_bytes(b"")  # what the index says is no longer there
    with pytest.raises(CorruptShardError, match="ends after 0"):
        tree.read(attributes.number, 0, 4)
    _write(array, [bytes(100)] * 4, in_place=True)
    tree = _tree(array)
    attributes = tree.resolve("c/1/1")
    _write(array, OLD, in_place=True)
    assert bytes(tree.read(attributes.number, 0, 100)) == OLD[3]


def test_a_shard_cut_off_in_place_is_corrupt(array: Path) -> None:
    tree = _tree(array)
    attributes = tree.resolve("c/1/1")
    os.truncate(array / "c/0/0", 10)
    with pytest.raises(CorruptShardError) as e:
        tree.read(attributes.number, 0, 4)
    assert errno_of(e.value) == errno.EIO
    assert "c/0/0" in str(e.value)


def test_a_shard_that_vanished(array: Path) -> None:
    tree = _tree(array, ttl=0.0)
    attributes = tree.resolve("c/1/1")
    (array / "c/0/0").unlink()
    with pytest.raises(FileNotFoundError):
        tree.read(attributes.number, 0, 4)
    with pytest.raises(FileNotFoundError):
        tree.resolve("c/1/1")
    assert list(entries(tree, tree.resolve("c/1").number)) == []


def test_a_missing_shard_that_appears(array: Path) -> None:
    (array / "c/0/0").unlink()
    tree = _tree(array, ttl=0.0)
    with pytest.raises(FileNotFoundError):
        tree.resolve("c/1/1")
    _write(array, NEW)
    assert _get(tree, "c/1/1") == NEW[3]


def test_a_shard_that_keeps_changing_is_stale(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = handmade.volume_info((2, 1, 1), (1, 1, 1), handmade.sharding(minishard=0, data="gzip"), encoding="jpeg")
    handmade.write_json(array / "v/info", document)

    def write(text: bytes) -> None:
        shard = handmade.uint64_shard([[handmade.Entry(0, text)]])
        handmade.write_files(array / "v", {"s/new": shard})
        (array / "v/s/new").rename(array / "v/s/0.shard")

    write(b"no gzip")
    tree = _tree(array / "v")
    number = tree.resolve("s").number
    reads = 0
    real = StoredChunk.read

    def read(*args: object) -> bytes:
        nonlocal reads
        reads += 1
        write(b"no gzip" + bytes(reads))
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredChunk, "read", read)
    with pytest.raises(StaleShardError) as e:
        tree.lookup(number, b"0-1_0-1_0-1")
    assert errno_of(e.value) == errno.ESTALE
    assert reads == 2


def test_damage_is_remembered_for_a_while_and_logged_once(array: Path, caplog: pytest.LogCaptureFixture) -> None:
    (array / "c/0/0").write_bytes(handmade.zarr_shard(OLD, checksum="wrong"))
    tree = _tree(array)
    with caplog.at_level(logging.WARNING, "shardfs"):
        for name in ("c/0/0", "c/0/1", "c/1/0", "c/1/1") * 3:
            with pytest.raises(CorruptShardError):
                tree.resolve(name)
    assert len(caplog.records) == 1


def test_an_error_that_is_raised_again_does_not_grow(array: Path) -> None:
    (array / "c/0/0").write_bytes(handmade.zarr_shard(OLD, checksum="wrong"))
    tree = _tree(array)
    depths = []
    for _ in range(5):
        with pytest.raises(CorruptShardError) as e:
            tree.resolve("c/0/0")
        depths.append(len(e.traceback))
    assert len(set(depths[1:])) == 1


def test_a_log_line_names_collection_shard_chunk_and_expectation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nested = tmp_path / "deep/er"
    handmade.zarr_wrong_checksum(nested)
    handmade.write_files(nested, {"c/0/1": handmade.zarr_shard(OLD, entries={1: (0, 10**6)})})
    tree = _tree(tmp_path)
    with caplog.at_level(logging.WARNING, "shardfs"), pytest.raises(CorruptShardError):
        tree.resolve("deep/er/c/0/0")
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("deep/er: deep/er/c/0/0: its index has crc32c")
    with pytest.raises(CorruptShardError) as e:
        tree.resolve("deep/er/c/0/3")
    assert str(e.value) == (
        "deep/er: deep/er/c/0/1, slot 1: chunk (0, 3): its range [0, 1000000) leaves the object of 84 bytes"
    )


def test_many_threads_read_one_cold_shard_once(array: Path) -> None:
    opened: list[str] = []

    class Store(LocalStore):
        def _open(self, key: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
            opened.append(key)
            return super()._open(key)

    tree = Tree(Datasets(Store(str(array)), ByteLRU(1 << 20), ByteLRU(1 << 20)))
    tree.resolve("c")
    barrier = threading.Barrier(8)

    def work(n: int) -> bytes:
        barrier.wait()
        return _get(tree, f"c/{n >> 1 & 1}/{n & 1}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == OLD * 2
    assert opened.count("c/0/0") == 1


def test_threads_under_replacement_see_old_or_new(array: Path) -> None:
    tree, stop, bad = _tree(array, ttl=0.0), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                data = bytes(tree.read(tree.resolve("c/1/1").number, 0, 100))
            except (StaleShardError, FileNotFoundError):
                continue
            if data not in (OLD[3], NEW[3]):
                bad.append(data)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(read) for _ in range(3)]
        for n in range(200):
            _write(array, OLD if n % 2 else NEW)
        stop.set()
        for r in running:
            r.result()
    assert bad == []


def _volume(path: Path, texts: list[bytes]) -> None:
    """A shard of one minishard; the more bytes, the further away its index lies."""
    shard = handmade.uint64_shard([[handmade.Entry(n, text) for n, text in enumerate(texts)]])
    handmade.write_files(path, {"s/new": shard})
    (path / "s/new").rename(path / "s/0.shard")


def test_who_looks_while_a_shard_is_forgotten_does_not_bring_it_back(
    array: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _tree(array)
    chunks = tree.collection("")
    extents = [chunks.chunks.layer.locate((1, 1))]
    _write(array, NEW)
    real = LocalStore.reopen

    def reopen(store: LocalStore, key: str) -> None:
        extents.append(chunks.chunks.layer.locate((1, 1)))  # and has it open from now on
        real(store, key)

    monkeypatch.setattr(LocalStore, "reopen", reopen)
    chunks.renew([(1, 1)])
    assert [extent.size for extent in extents if extent] == 2 * [len(OLD[3])]
    assert _get(tree, "c/1/1") == NEW[3]


def test_a_root_goes_with_the_shard_it_was_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread finds a shard replaced between our opening the old one and our look at the root of its index."""
    handmade.write_json(tmp_path / "info", handmade.volume_info((2, 1, 1), (1, 1, 1), handmade.sharding(minishard=0)))
    _volume(tmp_path, [b"a", b"b"])
    tree = _tree(tmp_path)
    chunks, real = tree.collection("s"), LocalStore.open
    replaced: list[bool] = []

    def opened(store: LocalStore, key: str) -> LocalBlob:
        blob = real(store, key)
        if key == "s/0.shard" and not replaced:
            replaced.append(True)
            _volume(tmp_path, [b"A" * 100, b"B" * 100])
            chunks.renew([(0, 0, 0), (1, 0, 0)])
            assert _get(tree, "s/1-2_0-1_0-1") == b"B" * 100
        return blob

    monkeypatch.setattr(LocalStore, "open", opened)
    assert chunks.chunks.stored_bytes((1, 0, 0)) == b"B" * 100


def test_evicted_descriptors_are_opened_again(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfs.storage.local.MAX_DESCRIPTORS", 1)
    handmade.write_files(array, {"note": b"x"})
    tree = _tree(array)
    for _ in range(3):
        assert _get(tree, "c/1/1") == OLD[3]
        assert _get(tree, "note") == b"x"
    _write(array, NEW)
    tree.resolve("note")
    assert _get(tree, "c/1/1") == NEW[3], "the descriptor has gone, and the index is of another version"


def test_names_beside_the_directory_of_chunks_are_those_of_none(array: Path) -> None:
    handmade.write_files(array, {"5": b"five", "0/1": b"zero", "c/c": b"c", "c/7/note": b"note"})
    tree = _tree(array)
    assert {e.name for e in entries(tree, ROOT)} == {b"zarr.json", b"c", b"5", b"0"}
    assert [_get(tree, path) for path in ("5", "0/1", "c/c")] == [b"five", b"zero", b"c"]
    with pytest.raises(FileNotFoundError):
        _get(tree, "c/7/note")


def test_a_foreign_file_that_changes_is_seen_with_a_time_to_live(array: Path) -> None:
    handmade.write_files(array, {"note": b"old"})
    tree = _tree(array, ttl=0.0)
    assert _get(tree, "note") == b"old"
    handmade.write_files(array, {"new": b"newer"})
    (array / "new").rename(array / "note")
    assert _get(tree, "note") == b"newer"
    assert {e.size for e in entries(tree, ROOT) if e.name == b"note"} == {5}


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (CorruptShardError("a", "k", "why"), errno.EIO),
        (CorruptShardError("", "k", "why", 3), errno.EIO),
        (StaleShardError("x"), errno.ESTALE),
        (UnsupportedError("x"), errno.ENOTSUP),
        (NotADatasetError("x"), errno.ENOTSUP),
        (ShardfsError("x"), errno.EIO),
        (FileNotFoundError("x"), errno.ENOENT),
        (NotADirectoryError("x"), errno.ENOTDIR),
        (IsADirectoryError("x"), errno.EISDIR),
        (PermissionError("x"), errno.EACCES),
        (PermissionError(errno.EPERM, "x"), errno.EPERM),
        (TimeoutError(), errno.ETIMEDOUT),
        (OSError("x"), errno.EIO),
        (OSError(errno.ENAMETOOLONG, "x"), errno.ENAMETOOLONG),
        (ConnectionResetError(errno.ECONNRESET, "x"), errno.ECONNRESET),
        (ValueError("a bug"), errno.EIO),
        (KeyError("a bug"), errno.EIO),
        (MemoryError(), errno.EIO),
    ],
)
def test_every_error_has_an_errno(error: BaseException, number: int) -> None:
    assert errno_of(error) == number
    assert is_expected(error) == isinstance(error, ShardfsError | OSError)


def test_an_error_tells_where() -> None:
    assert str(CorruptShardError("a/b", "a/b/c/0", "why", 3)) == "a/b: a/b/c/0, slot 3: why"
    assert str(CorruptShardError("", "info", "why")) == "/: info: why"


SMALL, LARGE = 16, WINDOW + 5
"""Bytes of a chunk; parts of large ones are cached in several windows."""

LAYOUTS = {"unchanged": {}, "decoded": {"layout": "zarr2", "chunk_codec": "raw"}, "filled": {"layout": "precomputed"}}


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("spent", [None, 1 << 20])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_locates_its_chunk_once(
    tmp_path: Path, layout: str, remote: bool, spent: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two chunks is stored. Each part is read from a new tree, and then again."""
    array = zarr.create_array(
        tmp_path, shape=(2 * size, 1, 1), shards=(2 * size, 1, 1), chunks=(size, 1, 1), dtype="uint8", fill_value=5,
        compressors=zarr.codecs.GzipCodec(level=1) if layout == "decoded" else None,
    )  # fmt: skip
    array[:size] = 7
    source = str(tmp_path)
    if remote:
        source = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(f"{tmp_path}/", f"/{tmp_path.name}/", recursive=True)
    locates: list[Coords] = []
    real = ShardIndices.at

    def at(index: ShardIndices, placement: Placement, coords: Coords) -> StoredChunk | None:
        locates.append(coords)
        return real(index, placement, coords)

    monkeypatch.setattr(ShardIndices, "at", at)
    for offset, length in [(0, size), (0, 1 << 62), (3, 4), (size - 5, 5), (size - 1, 9), (size, 9)]:
        tree = open_tree(source, **LAYOUTS[layout], chunk_cache_bytes=4 * LARGE, spent_bytes=spent)  # type: ignore[arg-type]
        (chunks,) = tree.collections()
        for coords, value in [((0, 0, 0), b"\7"), ((1, 0, 0), b"\5" if layout == "filled" else None)] * 2:
            number = chunks.numbers.of_chunk(chunks.path, coords)
            locates.clear()
            if value is None:
                with pytest.raises(FileNotFoundError):
                    tree.read(number, offset, length)
            else:
                assert bytes(tree.read(number, offset, length)) == value * len(
                    range(offset, min(offset + length, size))
                )
            assert locates in ([], [coords]), (offset, length)
