"""Programs that know N5 or precomputed remove a chunk in order to write zeros; the source has another fill value."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from shardfs.model.errors import CorruptShardError
from tests.conftest import need_fuse
from tests.datasets import ROOT
from tests.write.engines import TreeFiles, mounted
from tests.write.mounts import writable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

FILL, OLD = 7, 5
LAYOUTS = ["n5", "precomputed"]


def _source(
    path: Path, shape: tuple[int, ...] = (10, 8), *, sharded: bool = True, compressed: bool = False, fill: int = FILL
) -> None:
    """The last four rows are not stored."""
    chunks, shards = (4,) * len(shape), (8,) * len(shape)
    array = zarr.create_group(path).create_array(
        "a", shape=shape, chunks=chunks, shards=shards if sharded else None, dtype="<i2", fill_value=fill,
        compressors="auto" if compressed else None,
    )  # fmt: skip
    array[:6] = OLD


def _natively(path: Path) -> np.ndarray:
    return np.asarray(zarr.open_array(path / "a", mode="r")[...])


def _mounted(top: Path, layout: str) -> AbstractContextManager[TreeFiles]:
    return mounted(top / "store", top / "journal", layout)


def _name(layout: str, row: int, column: int) -> str:
    if layout == "n5":
        return f"a/{column}/{row}"
    return f"a/1_1_1/{4 * column}-{4 * column + 4}_{4 * row}-{min(4 * row + 4, 10)}_0-1"


def _elements(files: TreeFiles, layout: str, path: str) -> set[int]:
    data = files.read(path)
    assert data is not None, path
    header, data_type = (12, ">i2") if layout == "n5" else (0, "<i2")
    return set(np.frombuffer(data[header:], data_type).tolist())


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_removed_chunk_becomes_one_of_zeros(layout: str, sharded: bool, tmp_path: Path) -> None:
    """Stored ones, also with rows behind the edge of the array, and those that are shown but not stored."""
    _source(tmp_path / "store", sharded=sharded)
    expected = _natively(tmp_path / "store")
    for cycle, cells in enumerate([[(0, 0), (2, 1)], [(1, 0), (2, 0)]]):
        with _mounted(tmp_path, layout) as files:
            for row, column in cells:
                expected[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 0
                files.unlink(_name(layout, row, column))
                assert _elements(files, layout, _name(layout, row, column)) == {0}
            if cycle:
                files.die()
        with _mounted(tmp_path, layout) as files:
            assert [_elements(files, layout, _name(layout, *cell)) for cell in cells] == [{0}, {0}]
            files.publish()
            assert [_elements(files, layout, _name(layout, *cell)) for cell in cells] == [{0}, {0}]
        np.testing.assert_array_equal(_natively(tmp_path / "store"), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_is_renamed_leaves_zeros(layout: str, tmp_path: Path) -> None:
    _source(tmp_path / "store")
    expected = _natively(tmp_path / "store")
    with _mounted(tmp_path, layout) as files:
        files.rename(_name(layout, 0, 0), _name(layout, 0, 1))
        files.rename(_name(layout, 1, 0), "elsewhere")
        files.publish()
    expected[:8, :4] = 0
    np.testing.assert_array_equal(_natively(tmp_path / "store"), expected)


def _names(files: TreeFiles, path: str) -> list[tuple[str, bool]]:
    batches = files.tree.scan(files.tree.resolve(path).number)
    rows = (zip(b.names.tolist(), b.directories.tolist(), strict=True) for b in batches)
    return [(f"{path}/{name.decode()}", directory) for row in rows for name, directory in row]


def _remove_tree(files: TreeFiles, path: str, *, first: str = "") -> None:
    """What `rm -r` does, with one name before the others."""
    for name, directory in sorted(_names(files, path), key=lambda entry: entry[0] != first):
        if directory:
            _remove_tree(files, name)
        else:
            files.unlink(name)
    files.tree.rmdir(*files._parent(path))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("first", ["", "a/attributes.json"])
@pytest.mark.parametrize("shape", [(10, 8), (10,)])
def test_an_array_can_be_removed(
    shape: tuple[int, ...], first: str, publishes: bool, compressed: bool, tmp_path: Path
) -> None:
    """Neither the chunks of zeros nor their shards are left."""
    _source(tmp_path / "store", shape, compressed=compressed)
    with _mounted(tmp_path, "n5") as files:
        files.unlink("a/0/0" if len(shape) == 2 else "a/0")
        if publishes:
            files.publish()
        _remove_tree(files, "a", first=first)
        files.publish()
        assert files.read("a/attributes.json") is None
    assert [p.name for p in (tmp_path / "store").rglob("*")] == ["zarr.json"]


@pytest.mark.parametrize("fill", [0, FILL])
def test_a_scale_can_be_removed_and_written_again(fill: int, tmp_path: Path) -> None:
    """The source has no directory of this name, and must not get one."""
    _source(tmp_path / "store", fill=fill)
    expected = np.full((10, 8), fill, "<i2")
    with _mounted(tmp_path, "precomputed") as files:
        _remove_tree(files, "a/1_1_1")
        assert [name for name, _ in _names(files, "a")] == ["a/info"]
        assert files.read(_name("precomputed", 0, 0)) is None
        files.publish()
        assert not list((tmp_path / "store/a").glob("c/*/*"))
        files.write(_name("precomputed", 1, 1), np.full(16, 9, "<i2").tobytes())  # creates the directory
        assert ("a/1_1_1", True) in _names(files, "a")
        files.publish()
    assert not (tmp_path / "store/a/1_1_1").exists()
    expected[4:8, 4:] = 9
    np.testing.assert_array_equal(_natively(tmp_path / "store"), expected)


@pytest.mark.parametrize("fill", [0, FILL])
@pytest.mark.parametrize("first", ["", "a/info"])
def test_a_volume_can_be_removed(first: str, fill: int, tmp_path: Path) -> None:
    _source(tmp_path / "store", fill=fill)
    with _mounted(tmp_path, "precomputed") as files:
        _remove_tree(files, "a", first=first)
        files.publish()
        assert files.read("a/info") is None
    assert [p.name for p in (tmp_path / "store").rglob("*")] == ["zarr.json"]


@pytest.mark.fuse
def test_rm_removes_a_scale_and_a_volume(tmp_path: Path) -> None:
    need_fuse()
    _source(tmp_path / "store")
    with writable(tmp_path / "store", tmp_path, "--layout", "precomputed") as mount:
        mount.mount()
        script = "rm -r a/1_1_1 && ! ls a/1_1_1 2> /dev/null && mkdir a/1_1_1 && ls -A a/1_1_1 && rm -r a && ls -A"
        run = subprocess.run(
            ["sh", "-c", script], cwd=mount.path, capture_output=True, text=True, timeout=250, check=False
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert "a" not in run.stdout.split()
        assert mount.umount().returncode == 0
    assert [p.name for p in (tmp_path / "store").rglob("*")] == ["zarr.json"]


def test_chunks_of_other_elements_keep_their_directory(tmp_path: Path) -> None:
    _source(tmp_path / "store")
    with _mounted(tmp_path, "n5") as files:
        files.unlink("a/0/0")
        with pytest.raises(OSError, match="not empty"):
            files.tree.rmdir(*files._parent("a/0"))
        files.publish()
    assert set(_natively(tmp_path / "store").ravel().tolist()) == {0, OLD, FILL}


TENSORSTORE = """
import sys, numpy as np, tensorstore as ts
driver, path = sys.argv[1:]
spec = {"driver": driver, "kvstore": {"driver": "file", "path": path + "/a/"}}
ts.open(spec).result()[0:4, 0:4].write(np.int16(0)).result()
"""
Z5PY = """
import sys, numpy as np, z5py
z5py.File(sys.argv[2], mode="a", use_zarr_format=False)["a"][0:4, 0:4] = np.zeros((4, 4), "int16")
"""


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.parametrize(
    ("program", "layout", "driver"),
    [
        (TENSORSTORE, "n5", "n5"),
        (TENSORSTORE, "precomputed", "neuroglancer_precomputed"),
        (Z5PY, "n5", "z5py"),
    ],
    ids=["tensorstore n5", "tensorstore precomputed", "z5py"],
)
def test_programs_write_zeros(program: str, layout: str, driver: str, tmp_path: Path) -> None:
    need_fuse()
    if driver == "z5py":
        pytest.importorskip("z5py")
    _source(tmp_path / "store", compressed=True)
    expected = _natively(tmp_path / "store")
    expected[:4, :4] = 0
    with writable(tmp_path / "store", tmp_path, "--layout", layout) as mount:
        mount.mount()
        command = [sys.executable, "-W", "ignore", "-c", program, driver, str(mount.path)]
        subprocess.run(command, check=True, timeout=250, cwd=ROOT)
        assert mount.umount().returncode == 0
    np.testing.assert_array_equal(_natively(tmp_path / "store"), expected)


def test_a_damaged_chunk_can_be_removed_and_replaced_while_a_program_has_it_open(tmp_path: Path) -> None:
    """Its bytes cannot be kept for that program, because nobody can read them."""
    _source(tmp_path / "store", compressed=True, fill=0)
    shard = tmp_path / "store/a/c/0/0"
    data = bytearray(shard.read_bytes())
    data[: len(data) - 4 * 16 - 4] = bytes(len(data) - 4 * 16 - 4)  # all but the index
    shard.write_bytes(data)
    first, second = _name("precomputed", 0, 0), _name("precomputed", 1, 1)
    with _mounted(tmp_path, "precomputed") as files:
        for name in (first, second):
            number = files.tree.resolve(name).number
            files.tree.open(number, os.O_RDONLY)
            with pytest.raises(CorruptShardError):
                files.tree.read(number, 0, 32)
        files.unlink(first)
        temporary = f"{second}.{'0' * 32}.partial"
        files.write(temporary, np.full(16, 3, "<i2").tobytes())
        files.rename(temporary, second)
        assert _elements(files, "precomputed", second) == {3}
        files.publish()
    array = zarr.open_array(tmp_path / "store/a", mode="r")
    np.testing.assert_array_equal(array[4:8, 4:8], np.full((4, 4), 3))
