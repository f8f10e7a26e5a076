"""`unpack --in-place`: shards become chunk files one by one, and at any point the job continues or goes back."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

import shardfs
from shardfs.cli import commands
from shardfs.jobs.in_place import InPlaceRun
from shardfs.model.errors import BusyError, NotADatasetError, UnsupportedError
from shardfs.storage.pack_state import STATE
from tests import data_n5, data_precomputed_ids
from tests.conftest import read_with
from tests.datasets import PRECOMPUTED, ZARR3, Dataset, same
from tests.jobs.interrupting import aborted_and_done, interrupted
from tests.jobs.packing import pack_in_place, unpack_in_place
from tests.jobs.test_pack import files, ome04, parsed, plain, problems
from tests.jobs.test_unpack import shown, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ome04", "plain"]  # fixtures


def there_and_back(root: Path, tmp_path: Path, **how: Any) -> None:
    """Unpack in place as `unpack` does to another directory; abort in the middle brings back the shards."""
    unpacked(root, tmp_path / "unpacked", **how)
    aborted_and_done(unpack_in_place, root, lambda root: (files(root).keys(), shown(root)), **how)
    assert parsed(files(root)) == parsed(files(tmp_path / "unpacked"))


# ---- what other libraries wrote


@pytest.mark.parametrize("name", sorted(set(ZARR3) - {"rectilinear"}))
def test_zarr3(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    given = dataset("zarr3", name)
    root = shutil.copytree(given.path, tmp_path / "x")
    there_and_back(root, tmp_path)
    for member, data in given.arrays.items() if "tensorstore" in given.readers else ():
        assert same(np.asarray(ts.open(given.spec(root, member)).result().read().result()), data)


@pytest.mark.parametrize(
    "name", [*sorted(set(PRECOMPUTED) - {"legacy_pair"}), pytest.param("legacy_pair", marks=pytest.mark.every_case)]
)
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


# ---- another layout


@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr2_packed_and_unpacked(separator: Any, tmp_path: Path) -> None:
    """The original chunk files come back, and a reader never sees a part of an array meanwhile."""
    root = tmp_path / "x"
    group = zarr.create_group(root, zarr_format=2, attributes={"who": "me"})
    for name, filled in (("a", 0), ("below/b", 7)):
        array = group.create_array(
            name, shape=(20, 20), chunks=(4, 4), dtype="u2", order="F", fill_value=filled, attributes={"of": name},
            chunk_key_encoding={"name": "v2", "separator": separator},
        )  # fmt: skip
        array[:10] = np.arange(1, 201).reshape(10, 20)
    (root / "README").write_text("by hand")
    before = files(root)
    assert problems(pack_in_place(str(root), chunks_per_shard=(2, 2))) == []
    packed = files(root)
    interrupted(unpack_in_place(str(root), layout="zarr2"), 2)
    assert problems(unpack_in_place(str(root), abort=True)) == []
    assert files(root) == packed
    run: Any = unpack_in_place(str(root), layout="zarr2")
    next(run)
    for _ in range(2 * 6):  # of each array, two of three rows of shards are not empty
        with pytest.raises(BusyError, match="is being unpacked in place; finish with"):
            shown(root)
        next(run)
    assert list(run)[-1].problems == []
    after = files(root)
    assert after.keys() - before.keys() == {".zmetadata", "below/.zmetadata"}
    assert {n: r for n, r in after.items() if ".z" not in n} == {n: r for n, r in before.items() if ".z" not in n}
    original = shutil.copytree(root, tmp_path / "original")
    for name, raw in before.items():
        (original / name).write_bytes(raw)
    for name in ("a", "below/b"):
        arrays: Any = [zarr.open_array(path / name, mode="r", zarr_format=2) for path in (root, original)]
        assert arrays[0].metadata.to_dict() == arrays[1].metadata.to_dict()
        assert same(arrays[0][:], arrays[1][:])


@pytest.mark.parametrize("name", sorted(set(ZARR3) - {"rectilinear"}))
def test_zarr2_is_what_unpack_writes_or_refused(
    name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    root = shutil.copytree(dataset("zarr3", name).path, tmp_path / "x")
    before, why = files(root), ""
    try:
        assert problems(unpack_in_place(str(root), layout="zarr2")) == []
    except UnsupportedError as e:
        why = str(e)
    if why:
        assert re.search("must keep all chunks unchanged; unpack to another DEST|cannot be shown as zarr2", why)
        assert files(root) == before
        return
    unpacked(dataset("zarr3", name).path, tmp_path / "unpacked", layout="zarr2")
    assert files(root) == files(tmp_path / "unpacked")


def test_layouts_that_are_refused(plain: Path, tmp_path: Path) -> None:
    assert problems(pack_in_place(str(plain), arrays=["b"], chunks_per_shard=(5, 5))) == []
    n5 = data_n5.VARIANTS[next(iter(data_n5.VARIANTS))].write(tmp_path / "n5", "n5").path
    filled = tmp_path / "filled"
    array = zarr.create_array(
        filled, shape=(9, 9), chunks=(1, 1), shards=(3, 3), dtype="i4", dimension_names=("y", "x")
    )
    array[:3] = 1
    refused = [
        (plain, "zarr2", "a: has no shards"),
        (plain, "n5", "its chunks would change; in place, the layout n5 must keep all chunks unchanged"),
        (n5, "zarr2", "its chunks would change"),
        (filled, "zarr2", "its missing chunks would become files"),
    ]
    for root, layout, why in refused:
        before = files(root)
        with pytest.raises(UnsupportedError, match=why):
            list(unpack_in_place(str(root), layout=layout))
        assert files(root) == before
    zarr.open_array(filled)[:] = 1
    (filled / ".zattrs").write_text("{}")
    with pytest.raises(FileExistsError, match="has the name of a document of zarr2; move it out of the source first"):
        list(unpack_in_place(str(filled), layout="zarr2"))
    (filled / ".zattrs").unlink()
    assert problems(unpack_in_place(str(filled), layout="zarr2")) == []
    assert same(np.asarray(zarr.open_array(filled, mode="r", zarr_format=2)[:]), np.ones((9, 9), "i4"))


def test_a_job_that_was_killed_at_its_beginning_keeps_its_options(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(pack_in_place(str(plain), chunks_per_shard=(5, 5))) == []
    with monkeypatch.context() as patch:
        patch.delattr(InPlaceRun, "_write")
        with pytest.raises(AttributeError):
            list(unpack_in_place(str(plain), layout="zarr2"))
    assert (plain / STATE).exists()
    assert problems(unpack_in_place(str(plain))) == []
    assert (plain / "a" / ".zarray").exists()


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
    for option in ("chunk_codec=raw", "unsupported=skip"):
        assert "do not go with --in-place" in str(run("unpack", "--layout", "zarr2", "-o", option).exception)
        assert "do not go with pack" in str(run("pack", "-o", option).exception)
    assert "do not go with --in-place" in str(run("unpack", "-o", "unsupported=skip").exception)
    assert "the layout native shows chunks only as" in str(run("unpack", "-o", "chunk_codec=raw").exception)
    interrupted(unpack_in_place(str(plain)), 3)
    assert "with other options" in str(run("unpack", "--layout", "zarr2").exception)
    assert "has an unfinished unpack: repeat shardfs unpack --in-place" in str(run("pack").exception)
    assert run("unpack", "--abort").stdout.startswith("51 files become 3 ")
    assert run("unpack").stdout.startswith("8 files become 200 ")
    assert parsed(files(plain)) == parsed(before)
    assert shardfs.pack(plain, chunks_per_shard=(5, 5), in_place=True).finished
    assert run("unpack", "--layout", "zarr2").stdout.startswith("8 files become 200 ")
    assert (plain / "b" / ".zarray").exists()
    assert shardfs.pack(plain, in_place=True).finished
    assert shardfs.unpack(plain, layout="zarr2", in_place=True).finished
    assert not list(plain.rglob("zarr.json"))
