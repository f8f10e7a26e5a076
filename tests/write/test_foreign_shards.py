"""Shards that others wrote, or write meanwhile, under the whole engine: what is not ours is not lost."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests import handmade, handmade_ids
from tests.suites.walking import walk
from tests.write.engines import NEVER, TreeFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def _writable(source: Path, journal: Path, seconds: float = 5) -> Iterator[TreeFiles]:
    tokens = Journal.open(journal, str(source), limit_bytes=2 << 20, reserve_bytes=256 << 10, commit_s=0)
    tree = open_write_tree(open_tree(str(source)), tokens, publishing=Publishing(idle_s=NEVER, age_s=NEVER))
    try:
        yield TreeFiles(tree, tokens)
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


# ---- meshes: a manifest and its fragments are two files of one chunk

_LEVELS, _OTHER_LEVELS = [[3, 4], [5]], [[5, 4], [3]]


def _meshes(path: Path, fragments: bytes = b"0" * 12, levels: list[list[int]] = _LEVELS) -> Path:
    """The mesh 0, and another one before it."""
    handmade.write_json(path / "info", {**handmade_ids.MESHES, "sharding": handmade.sharding()})
    meshes = {2: (b"22", handmade_ids.manifest([[2]])), 0: (fragments, handmade_ids.manifest(levels))}
    handmade.write_files(path, {"new": handmade_ids.mesh_shard([meshes, {}])})
    (path / "new").rename(path / "0.shard")
    return path


def _publish_without_open_files(files: TreeFiles) -> None:
    (shard,) = files.tree.pending.shards
    files.tree.pending.publisher.publish(shard)


def test_fragments_that_others_changed_are_a_conflict(tmp_path: Path) -> None:
    """The manifest before them is the same."""
    path = _meshes(tmp_path / "source")
    with _writable(path, tmp_path / "journal", 0.1) as files:
        files.write("0", b"o" * 12)
        files.write("2", b"oo")
        _meshes(path, b"t" * 12)
        with pytest.raises(OSError, match="the stored chunk was changed"):
            files.publish()
    tree_files = walk(open_tree(str(path)))
    assert (tree_files["0"], tree_files["2"]) == (b"t" * 12, b"oo")


def test_a_manifest_is_no_conflict_if_others_changed_its_fragments(tmp_path: Path) -> None:
    path = _meshes(tmp_path / "source")
    with _writable(path, tmp_path / "journal") as files:
        files.write("0.index", handmade_ids.manifest(_OTHER_LEVELS))
        _meshes(path, b"t" * 12)
        files.publish()
    tree_files = walk(open_tree(str(path)))
    assert (tree_files["0"], tree_files["0.index"]) == (b"t" * 12, handmade_ids.manifest(_OTHER_LEVELS))


@pytest.mark.parametrize(("first", "second"), [("0", "0.index"), ("0.index", "0")])
@pytest.mark.parametrize("crash", [False, True])
def test_one_file_of_a_mesh_may_wait_for_a_later_publish(first: str, second: str, crash: bool, tmp_path: Path) -> None:
    path, new = _meshes(tmp_path / "source"), {"0": b"o" * 12, "0.index": handmade_ids.manifest(_OTHER_LEVELS)}
    with _writable(path, tmp_path / "journal") as files:
        files.write(second, new[second])
        handle = files.tree.open(files.tree.resolve(second).number, os.O_RDWR)
        files.write(first, new[first])
        _publish_without_open_files(files)
        files.tree.release(handle)
        if crash:
            files.die()
        else:
            files.publish()
    with _writable(path, tmp_path / "journal") as files:
        files.publish()
    tree_files = walk(open_tree(str(path)))
    assert {name: tree_files[name] for name in new} == new


def test_fragments_are_verified_before_they_are_published(tmp_path: Path) -> None:
    path = _meshes(tmp_path / "source")
    before = (path / "0.shard").read_bytes()
    with _writable(path, tmp_path / "journal", 0.1) as files:
        files.write("0", b"o" * 12)
        data = files.tree.pending.backlog.versions["0"].data
        assert data is not None
        (segment,) = (tmp_path / "journal").glob("*.wal")
        with segment.open("r+b") as file:
            file.seek(data.start)
            file.write(b"damage")
        with pytest.raises(OSError, match="0"):
            files.publish()
    assert (path / "0.shard").read_bytes() == before
