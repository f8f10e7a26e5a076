"""Shards that others wrote, or write meanwhile, under the whole engine: what is not ours is not lost."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

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
