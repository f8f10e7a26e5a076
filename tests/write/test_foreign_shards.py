"""Shards that others wrote, or write meanwhile, under the whole engine: what is not ours is not lost."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publishing import Publishing
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.suites.walking import walk
from tests.write.engines import NEVER, TreeFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def _writable(source: Path, journal: Path, seconds: float = 5) -> Iterator[TreeFiles]:
    held = Journal.open(journal, str(source), limit_bytes=2 << 20, reserve_bytes=256 << 10, commit_s=0)
    tree = open_write_tree(open_tree(str(source)), held, publishing=Publishing(idle_s=NEVER, age_s=NEVER))
    try:
        yield TreeFiles(tree, held)
    finally:
        tree.pending.close(seconds)


def test_a_shard_in_two_files_is_only_read(tmp_path: Path) -> None:
    case = handmade.CASES["volume_legacy_pair"](tmp_path / "source")
    before = {path: path.read_bytes() for path in case.path.rglob("*") if path.is_file()}
    (index,) = case.path.rglob("*.index")
    name = next(n for n in case.good if index.parent.name in n)
    with _writable(case.path, tmp_path / "journal") as files:
        for change, more in (("write", (b"new!",)), ("unlink", ()), ("patch", (0, b"x"))):
            with pytest.raises(OSError, match=r"two files.*which shardfs only reads.*shardfs pack") as e:
                getattr(files, change)(name, *more)
            assert e.value.errno == errno.EROFS
        assert files.read(name) == case.good[name]
        files.publish()
    assert {path: path.read_bytes() for path in case.path.rglob("*") if path.is_file()} == before


_OLD = [b"one ", b"two ", b"three", None]


def _array(path: Path) -> Path:
    handmade.write_json(path / "zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    handmade.write_files(path, {"c/0/0": handmade.zarr_shard(_OLD)})
    return path


def _replace(path: Path, data: bytes) -> None:
    (path / "new").write_bytes(data)
    (path / "new").rename(path / "c/0/0")


def test_a_chunk_that_others_only_moved_is_no_conflict(tmp_path: Path) -> None:
    path = _array(tmp_path / "source")
    with _writable(path, tmp_path / "journal") as files:
        files.write("c/0/0", b"ours")
        _replace(path, handmade.zarr_shard([*_OLD[:3], b"theirs"], backwards=True))
        files.publish()
    wanted = {"c/0/0": b"ours", "c/0/1": b"two ", "c/1/0": b"three", "c/1/1": b"theirs"}
    assert {name: data for name, data in walk(open_tree(str(path))).items() if name != "zarr.json"} == wanted


def test_a_chunk_that_others_changed_is_a_conflict(tmp_path: Path) -> None:
    path = _array(tmp_path / "source")
    with _writable(path, tmp_path / "journal", 0.1) as files:
        files.write("c/0/0", b"ours")
        files.write("c/0/1", b"too")
        _replace(path, handmade.zarr_shard([b"1st ", *_OLD[1:]]))
        with pytest.raises(OSError, match="the stored chunk") as e:
            files.publish()
        assert e.value.errno == errno.ESTALE
        assert files.read("c/0/0") == b"ours"
    wanted = {"c/0/0": b"1st ", "c/0/1": b"too", "c/1/0": b"three"}
    assert {name: data for name, data in walk(open_tree(str(path))).items() if name != "zarr.json"} == wanted


def test_an_empty_shard_takes_no_chunk(tmp_path: Path) -> None:
    """Its chunks may be lost: a new shard in its place would show the others as if they never were."""
    path = _array(tmp_path / "source")
    (path / "c/0/0").write_bytes(b"")
    with _writable(path, tmp_path / "journal") as files:
        for change, more in (("write", (b"new!",)), ("unlink", ()), ("patch", (0, b"x"))):
            with pytest.raises(CorruptShardError, match="68 bytes, but the shard ends after 0"):
                getattr(files, change)("c/0/0", *more)
        files.publish()
    assert (path / "c/0/0").read_bytes() == b""


def test_a_chunk_outlives_that_its_shard_is_emptied(tmp_path: Path) -> None:
    path = _array(tmp_path / "source")
    with _writable(path, tmp_path / "journal") as files:
        files.write("c/1/1", b"ours")
        (path / "c/0/0").write_bytes(b"")
        with pytest.raises(OSError, match="ends after 0") as e:
            files.publish()
        assert e.value.errno == errno.EIO
        assert files.read("c/1/1") == b"ours"
        assert (path / "c/0/0").read_bytes() == b""
        _replace(path, handmade.zarr_shard(_OLD))  # restored from a backup
        files.publish()
    wanted = {"c/0/0": b"one ", "c/0/1": b"two ", "c/1/0": b"three", "c/1/1": b"ours"}
    assert {name: data for name, data in walk(open_tree(str(path))).items() if name != "zarr.json"} == wanted
