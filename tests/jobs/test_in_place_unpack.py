"""`unpack --in-place`: shards become chunk files one by one, and at any point the job continues or goes back."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

from shardfs.cli import commands
from shardfs.jobs.in_place import pack_in_place, unpack_in_place
from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.storage.pack_state import STATE
from tests import data_n5, data_precomputed_ids
from tests.conftest import read_with
from tests.datasets import PRECOMPUTED, ZARR3, Dataset, same
from tests.jobs.test_pack import files, ome04, parsed, plain, problems
from tests.jobs.test_unpack import shown, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ome04", "plain"]  # fixtures


def started(root: Path, reports: int, **how: Any) -> None:
    """Begin to unpack, and stop after some reports, as if the process had been killed between two tasks."""
    begun: Any = unpack_in_place(str(root), **how)
    for _ in range(reports):
        next(begun)
    begun.close()


def there_and_back(root: Path, tmp_path: Path, **how: Any) -> None:
    """Unpack in place as `unpack` does to another directory; abort in the middle brings back the shards."""
    before, seen = files(root), shown(root)
    unpacked(root, tmp_path / "unpacked", **how)
    started(root, 2, **how)
    assert (root / STATE).exists()
    assert problems(unpack_in_place(str(root), abort=True)) == []
    assert files(root).keys() == before.keys()
    assert shown(root) == seen
    assert problems(unpack_in_place(str(root), **how)) == []
    assert parsed(files(root)) == parsed(files(tmp_path / "unpacked"))


# ---- what other libraries wrote


@pytest.mark.parametrize("name", sorted(set(ZARR3) - {"rectilinear"}))
def test_zarr3(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    given = dataset("zarr3", name)
    root = shutil.copytree(given.path, tmp_path / "x")
    there_and_back(root, tmp_path)
    for member, data in given.arrays.items() if "tensorstore" in given.readers else ():
        assert same(np.asarray(ts.open(given.spec(root, member)).result().read().result()), data)


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_volumes(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    root = shutil.copytree(dataset("precomputed", name).path, tmp_path / "x")
    if name == "legacy_pair":
        before = files(root)
        with pytest.raises(UnsupportedError, match="is stored as two files"):
            list(unpack_in_place(str(root)))
        assert files(root) == before
        return
    there_and_back(root, tmp_path)


@pytest.mark.interop
def test_cloudvolume_reads_a_volume(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    given = dataset("precomputed", next(n for n in sorted(PRECOMPUTED) if "raw" in n))
    root = shutil.copytree(given.path, tmp_path / "x")
    assert problems(unpack_in_place(str(root))) == []
    assert same(read_with("cloudvolume", given, root), given.array)


@pytest.mark.parametrize("name", sorted(data_n5.VARIANTS))
def test_n5(name: str, tmp_path: Path) -> None:
    given = data_n5.VARIANTS[name].write(tmp_path / "made", name)
    there_and_back(shutil.copytree(given.path, tmp_path / "x"), tmp_path)


def test_packed_and_unpacked(plain: Path) -> None:
    before = files(plain)
    assert problems(pack_in_place(str(plain), chunks_per_shard=(3, 4))) == []
    assert problems(unpack_in_place(str(plain), workers=2)) == []
    assert parsed(files(plain)) == parsed(before)
    assert not any(path.is_dir() and not any(path.iterdir()) for path in plain.rglob("*"))


def test_arrays_that_are_not_named_keep_their_shards(plain: Path, tmp_path: Path) -> None:
    assert problems(pack_in_place(str(plain), chunks_per_shard=(3, 4))) == []
    there_and_back(plain, tmp_path, arrays=("b",))
    group: Any = zarr.open_group(plain, mode="r")
    assert (group["a"].shards, group["b"].shards) == ((30, 40), None)
    assert same(group["a"][:], group["b"][:].astype("u2"))


# ---- bad input


def test_sources_that_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError):
        list(unpack_in_place(str(plain)))
    assert problems(pack_in_place(str(plain), chunks_per_shard=(3, 4))) == []
    (plain / "a" / "c" / "9").mkdir(exist_ok=True)
    (plain / "a" / "c" / "9" / "9").write_bytes(b"left behind")
    before = files(plain)
    with pytest.raises(FileExistsError, match="has the name of a chunk, but is no shard"):
        list(unpack_in_place(str(plain)))
    assert files(plain) == before
    (plain / "a" / "c" / "9" / "9").unlink()
    (plain / "a" / "c" / "0" / "0").rename(plain / "kept")
    (plain / "a" / "c" / "0" / "0").symlink_to("../../../kept")
    with pytest.raises(OSError, match="is a symbolic link"):
        list(unpack_in_place(str(plain)))
    meshes = data_precomputed_ids.DATASETS[next(iter(data_precomputed_ids.DATASETS))](tmp_path / "ids").path
    before = files(meshes)
    with pytest.raises(UnsupportedError, match="nothing was unpacked"):
        list(unpack_in_place(str(meshes)))
    assert files(meshes) == before


def test_a_damaged_shard_stops_nothing_else(plain: Path) -> None:
    assert problems(pack_in_place(str(plain), chunks_per_shard=(5, 5))) == []
    seen = shown(plain)
    shard = plain / "b" / "c" / "1" / "1"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (problem,) = problems(unpack_in_place(str(plain)))
    assert problem.damaged
    assert [p for p in (plain / ".shardfs-pack" / "sharded").rglob("c/*/*") if p.is_file()] == [
        plain / ".shardfs-pack" / "sharded" / "b" / "c" / "1" / "1"
    ]
    assert not (plain / "zarr.json").exists()
    (plain / ".shardfs-pack" / "sharded" / "b" / "c" / "1" / "1").write_bytes(whole)
    assert problems(unpack_in_place(str(plain))) == []
    assert parsed(files(plain)) == parsed(seen)


# ---- the command


def test_the_command(plain: Path) -> None:
    def run(verb: str, *words: str) -> Any:
        return CliRunner().invoke(commands, [verb, "--in-place", str(plain), *words], standalone_mode=False)

    before = files(plain)
    assert run("pack", "--chunks-per-shard", "5,5").return_value == 0
    assert "--layout does not go with --in-place" in str(run("unpack", "--layout", "zarr2").exception)
    started(plain, 3)
    assert "has an unfinished unpack: repeat shardfs unpack --in-place" in str(run("pack").exception)
    assert run("unpack", "--abort").stdout.startswith("51 files become 3 ")
    assert run("unpack").stdout.startswith("8 files become 200 ")
    assert parsed(files(plain)) == parsed(before)
