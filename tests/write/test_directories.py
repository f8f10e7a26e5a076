"""Directories of chunks: which ones exist, and which ones programs create."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardfs.vfs.inodes import ROOT
from tests import handmade
from tests.write.engines import TreeFiles, mounted

if TYPE_CHECKING:
    from pathlib import Path


def exist(files: TreeFiles, *paths: str) -> list[bool]:
    names = []
    for path in paths:
        try:
            names.append(files.tree.resolve(path).directory)
        except FileNotFoundError:
            names.append(False)
    return names


def test_an_array_without_shards_has_those_that_were_created(tmp_path: Path) -> None:
    """As a new unsharded array on a disk. With a shard, all of them exist."""
    handmade.write_json(tmp_path / "a/zarr.json", handmade.zarr_metadata((8, 8), (4, 4), (1, 1)))
    with mounted(tmp_path / "a", tmp_path / "journal") as files:
        assert exist(files, "c", "c/6") == [False, False]
        files.tree.mkdir(ROOT, b"c", 0o755)
        assert exist(files, "c", "c/6") == [True, False]
        files.tree.mkdir(files.tree.resolve("c").number, b"6", 0o755)
        files.tree.create(files.tree.resolve("c/6").number, b"1", os.O_CREAT | os.O_RDWR, 0o644)
        files.write("c/6/1", b"x")
        files.publish()
        assert exist(files, "c/6", "c/2") == [True, False]
    with mounted(tmp_path / "a", tmp_path / "journal") as files:
        assert exist(files, "c/6", "c/2") == [True, True]
        with pytest.raises(FileExistsError):
            files.tree.mkdir(files.tree.resolve("c").number, b"2", 0o755)


def test_filled_chunks_have_directories(tmp_path: Path) -> None:
    """In a layout that shows chunks that are not stored."""
    document = handmade.zarr_metadata((8, 8), (4, 4), (1, 1), fill_value=5)
    handmade.write_json(tmp_path / "a/zarr.json", document)
    with mounted(tmp_path / "a", tmp_path / "journal", "n5") as files:
        assert exist(files, "0", "6") == [True, True]
