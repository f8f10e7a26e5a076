"""Programs create arrays in their own format through a layout; the source then has sharded arrays of another format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.storage import FsspecStore

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests.clients.create_anew import DATA
from tests.conftest import need_fuse
from tests.write.mounts import writable
from tests.write.test_creating import as_zarr3, create

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]


def _created(tmp_path: Path, tool: str, layout: str, rule: str) -> Path:
    need_fuse()
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    with writable(source, tmp_path, "--layout", layout, "--create", rule) as mount:
        create(mount, tool)
    return source


def test_zarr_v2_becomes_sharded_zarr_v3(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "source")
    for name in ("old", "anew"):
        array = group.create_array(name, shape=DATA.shape, chunks=(10, 10), shards=(40, 40), dtype="uint16")
        array[:] = DATA
    source = _created(tmp_path, "zarr2", "zarr2", "zarr3:chunks_per_shard=4x4")
    assert not list(source.rglob(".z*"))
    grown = np.zeros((100, 100), "uint16")
    grown[:70, :90], grown[70:90, :90], grown[90:] = DATA, 1, 7
    for name, wanted in (("new/x", DATA), ("old", grown), ("anew", DATA + 1)):
        array = zarr.open_array(source / name, mode="r")
        assert (array.shards, array.chunks) == ((40, 40), (10, 10))
        np.testing.assert_array_equal(array[:], wanted)
        np.testing.assert_array_equal(as_zarr3(source / name).read().result(), wanted)
    zarr_array = zarr.open_array(source / "new/x", mode="r")
    assert json.loads((source / "new/x/zarr.json").read_bytes())["dimension_names"] == ["y", "x"]
    assert zarr_array.attrs["unit"] == "nm"
    turned = np.full(DATA.shape, np.nan, "float32")
    turned[:50] = DATA[:50]
    for name, codecs in (("zlib", ["numcodecs.zlib"]), ("lz4", ["numcodecs.lz4"]), ("raw", [])):
        array = zarr.open_array(source / "forms" / name, mode="r")
        assert array.shards == (120, 80)
        document = json.loads((source / "forms" / name / "zarr.json").read_bytes())
        chain = document["codecs"][0]["configuration"]["codecs"]
        assert [codec["name"] for codec in chain] == ["transpose", "bytes", *codecs]
        np.testing.assert_array_equal(array[:], turned)
    np.testing.assert_array_equal(zarr.open_array(source / "forms/text", mode="r")[:], DATA[0].astype("U5"))


def test_an_undefined_fill_value_marks_nothing_as_missing(tmp_path: Path) -> None:
    source = _created(tmp_path, "xarray", "zarr2", "zarr3:chunks_per_shard=4x4")
    for name, marker in (("i", {}), ("flag", {"dtype": "bool"}), ("marked", {"_FillValue": 0})):
        array = zarr.open_array(source / "d" / name, mode="r")
        assert (array.fill_value, dict(array.attrs)) == (0, marker)


@pytest.mark.parametrize("tool", ["z5py", "n5store"])
def test_n5_becomes_sharded_zarr_v3(tmp_path: Path, tool: str) -> None:
    source = _created(tmp_path, tool, "n5", "zarr3:chunks_per_shard=2x4")
    array = zarr.open_array(source / "f.n5/x", mode="r")
    assert (array.shape, array.shards, array.attrs["k"]) == (DATA.shape, (20, 40), 1)
    np.testing.assert_array_equal(array[:], DATA)
    assert not list(source.rglob("attributes.json"))


def test_a_volume_becomes_a_sharded_image(tmp_path: Path) -> None:
    source = _created(tmp_path, "cloudvolume", "precomputed", "zarr3:chunks_per_shard=1x4x4")
    image = json.loads((source / "v/zarr.json").read_bytes())["attributes"]["ome"]["multiscales"][0]
    assert [level["path"] for level in image["datasets"]] == ["1_1_1", "2_2_1"]
    for path, wanted in (("1_1_1", DATA), ("2_2_1", DATA[::2, ::2])):
        array = zarr.open_array(source / "v" / path, mode="r")
        assert array.shards == (1, 40, 40)
        np.testing.assert_array_equal(array[:], wanted.T[None])


@pytest.mark.parametrize(
    ("tool", "layout", "path"), [("bigendian", "zarr2", "n/x"), ("cloudvolume", "precomputed", "v/s0")]
)
def test_others_become_sharded_n5(tmp_path: Path, tool: str, layout: str, path: str) -> None:
    """No library of Python reads sharded N5, so tensorstore reads the native mount."""
    source = _created(tmp_path, tool, layout, "n5:chunks_per_shard=4x4")
    document = json.loads((source / path / "attributes.json").read_bytes())
    assert (document["blockSize"][:2], document["codecs"][0]["name"]) == ([40, 40], "sharding_indexed")
    (tmp_path / "native").mkdir()
    with writable(source, tmp_path / "native") as mount:
        mount.mount()
        store = {"driver": "file", "path": f"{mount.path}/{path}/"}
        values = np.asarray(ts.open({"driver": "n5", "kvstore": store}).result().read().result())
        assert mount.umount().returncode == 0
    np.testing.assert_array_equal(values, DATA.T if tool == "bigendian" else DATA[:, :, None])


def test_attributes_may_come_first(tmp_path: Path) -> None:
    """zarr-python 3 writes all documents of Zarr v2 at the same time."""
    source = tmp_path / "source"
    source.mkdir()
    need_fuse()
    with writable(source, tmp_path, "--layout", "zarr2", "--create", "zarr3:chunks_per_shard=4x4") as mount:
        mount.mount()
        (mount.path / "a").mkdir()
        (mount.path / "a/.zattrs").write_text('{"first": 1}')
        group = zarr.open_group(mount.path, mode="a", zarr_format=2, attributes={"top": 1})
        for i in range(4):
            array = group.create_array(f"x{i}", shape=(40, 30), chunks=(10, 10), dtype="u2", attributes={"k": i})
            array[:] = i
        (mount.path / "a/.zarray").write_bytes((mount.path / "x0/.zarray").read_bytes())
        assert mount.umount().returncode == 0
    assert not list(source.rglob(".z*"))
    for i in range(4):
        array = zarr.open_array(source / f"x{i}", mode="r")
        assert (array.shards, dict(array.attrs)) == ((40, 40), {"k": i})
        assert (np.asarray(array[:]) == i).all()
    zarr_array = zarr.open_array(source / "a", mode="r")
    assert (zarr_array.shards, dict(zarr_array.attrs)) == ((40, 40), {"first": 1})


@pytest.mark.parametrize("order", [("0", ".zarray", ".zattrs", "1"), ("0", ".zattrs", ".zarray", "1")])
def test_documents_between_chunks(tmp_path: Path, order: Sequence[str]) -> None:
    """cp makes directories in any order. What was published meanwhile must not show those that it has not made yet."""
    source, plain = tmp_path / "source", tmp_path / "plain"
    source.mkdir()
    need_fuse()
    keys: Any = {"name": "v2", "separator": "/"}
    zarr.create_array(
        plain, data=DATA, chunks=(10, 10), chunk_key_encoding=keys, attributes={"k": 1}, zarr_format=2, overwrite=True
    )
    with writable(source, tmp_path, "--layout", "zarr2", "--create", "zarr3:chunks_per_shard=4x4") as mount:
        mount.mount()
        (mount.path / "a").mkdir()
        for name in order:
            copy = shutil.copytree if (plain / name).is_dir() else shutil.copyfile
            copy(plain / name, mount.path / "a" / name)
        assert sorted(os.listdir(mount.path / "a")) == sorted(order)


@pytest.mark.parametrize("by", ["cp", "rsync", "rsync, documents last"])
def test_copies_of_zarr_v2_are_sharded(tmp_path: Path, by: str) -> None:
    """Chunks wait for their document. cp creates each document, which the mount must not show before."""
    source, plain = tmp_path / "source", tmp_path / "plain"
    source.mkdir()
    need_fuse()
    group = zarr.create_group(plain, zarr_format=2, attributes={"top": 1})
    for name, separator in (("a", "/"), ("g/b", ".")):
        keys: Any = {"name": "v2", "separator": separator}
        group.create_array(
            name, shape=DATA.shape, chunks=(10, 10), dtype="u2", chunk_key_encoding=keys, attributes={"k": 1}
        )[:] = DATA
    zarr.consolidate_metadata(plain)
    with writable(source, tmp_path, "--layout", "zarr2", "--create", "zarr3:chunks_per_shard=4x4") as mount:
        mount.mount()
        copies = (
            [["rsync", "-a", f"{plain}/"]]
            if by != "cp"
            else [["cp", f"{plain}/.zmetadata"], ["cp", "-r", f"{plain}/."]]
        )
        if by == "rsync, documents last":
            copies.insert(0, [*copies[0], "--exclude", ".z*"])
        for copy in copies:
            subprocess.run([*copy, f"{mount.path}/"], check=True, timeout=250)
        assert mount.umount().returncode == 0
    assert len([p for p in source.rglob("*") if p.is_file()]) == 2 + 2 + 2 * 6
    for name in ("a", "g/b"):
        array = zarr.open_array(source / name, mode="r")
        assert (array.shards, dict(array.attrs)) == ((40, 40), {"k": 1})
        np.testing.assert_array_equal(array[:], DATA)


def test_arrays_in_an_object_store_are_created_through_fsspec(tmp_path: Path) -> None:
    """Object stores have no directories, so nothing exists before the first document."""
    url = f"memory://{tmp_path}/source"
    zarr.create_array(url, name="old", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="u1")
    options = {"journal": str(tmp_path / "journals"), "create": "zarr3:chunks_per_shard=4,4"}
    fs = ShardFileSystem(url, layout="zarr2", rw=True, write_options=options, skip_instance_cache=True)
    store = FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path="/")
    group = zarr.open_group(store, mode="a", zarr_format=2).create_group("g")
    group.create_array("x", shape=DATA.shape, chunks=(10, 10), dtype="u2", attributes={"k": 1})[:] = DATA
    fs.publish()
    fs.close()
    array = zarr.open_array(url, path="g/x", mode="r")
    assert (array.shards, dict(array.attrs)) == ((40, 40), {"k": 1})
    np.testing.assert_array_equal(array[:], DATA)


def test_chunks_may_come_between_attributes_and_their_array(tmp_path: Path) -> None:
    """Until then, the source has a group there. A file that becomes no chunk gets its own name in the source."""
    group = zarr.create_group(tmp_path / "plain", zarr_format=2)
    group.create_array("a", data=DATA, chunks=(10, 10), attributes={"k": 1}, chunk_key_encoding={"name": "v2"})
    zarr.create_array(tmp_path / "source/old", shape=(4,), chunks=(2,), shards=(4,), dtype="uint16")
    options = {"journal": str(tmp_path / "journals"), "create": "zarr3:chunks_per_shard=4,4", "idle": "0.01"}
    fs = ShardFileSystem(str(tmp_path / "source"), layout="zarr2", rw=True, write_options=options)
    files = sorted((tmp_path / "plain/a").rglob("*"), key=lambda path: (path.name == ".zarray", path.name))
    for path in files[:4] + files[-1:] + files[4:-1]:
        fs.pipe_file(f"/a/{path.name}", path.read_bytes())
    fs.pipe_file("/g/.zattrs", b'{"k": 2}')
    fs.pipe_file("/g/0", b"no chunk")
    fs.close()
    array = zarr.open_array(tmp_path / "source/a", mode="r")
    assert (array.shards, dict(array.attrs)) == ((40, 40), {"k": 1})
    np.testing.assert_array_equal(array[:], DATA)
    assert (tmp_path / "source/g/0").read_bytes() == b"no chunk"


def test_an_image_of_ome_zarr_04_becomes_one_of_05(tmp_path: Path) -> None:
    source = _created(tmp_path, "omezarr", "zarr2", "zarr3:chunks_per_shard=4x4")
    for path, wanted in (("i", DATA), ("i/labels/cells", DATA % 3)):
        ome = json.loads((source / path / "zarr.json").read_bytes())["attributes"]["ome"]
        assert ome["version"] == "0.5"
        assert ("image-label" in ome) is (path != "i")
        levels = [level["path"] for level in ome["multiscales"][0]["datasets"]]
        assert len(levels) > 1
        array = zarr.open_array(source / path / levels[0], mode="r")
        assert array.shards == (40, 40)
        np.testing.assert_array_equal(array[:], wanted)


def test_an_array_without_a_rule_is_refused(tmp_path: Path) -> None:
    need_fuse()
    group = zarr.create_group(tmp_path / "source")
    group.create_array("old", shape=(4,), chunks=(2,), shards=(4,), dtype="uint16")
    document: dict[str, Any] = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<u2", "order": "C"}
    document |= {"fill_value": 0, "filters": None, "compressor": None}
    with writable(tmp_path / "source", tmp_path, "--layout", "zarr2") as mount:
        mount.mount()
        (mount.path / "a").mkdir()
        with pytest.raises(OSError, match="Invalid argument"):
            (mount.path / "a/.zarray").write_text(json.dumps(document))
        (mount.path / "g").mkdir()
        (mount.path / "g/.zgroup").write_text(json.dumps({"zarr_format": 2}))
        assert sorted(p.name for p in (mount.path / "g").iterdir()) == [".zgroup"]
        mount.umount()
    assert json.loads((tmp_path / "source/g/zarr.json").read_bytes())["node_type"] == "group"
    assert not (tmp_path / "source/a/zarr.json").exists()


def test_nothing_is_created_in_an_omitted_array(tmp_path: Path) -> None:
    need_fuse()
    source = tmp_path / "source"
    zarr.create_group(source).create_array("words", shape=(4,), chunks=(2,), shards=(4,), dtype="S4")
    before = sorted(source.rglob("*"))
    with writable(source, tmp_path, "--layout", "n5", "--create", "zarr3", "-o", "unsupported=skip") as mount:
        mount.mount()
        omitted = mount.path / "words"
        for create_name in (omitted.joinpath("new").mkdir, omitted.joinpath("new").touch):
            with pytest.raises(PermissionError):
                create_name()
        (mount.path / "file").touch()
        with pytest.raises(PermissionError):
            (mount.path / "file").rename(omitted / "file")
        (mount.path / "file").unlink()
        assert not list(omitted.iterdir())
        assert mount.umount().returncode == 0
    assert sorted(source.rglob("*")) == before


def test_the_documents_of_a_group_may_be_copied_after_its_arrays(tmp_path: Path) -> None:
    """In any order, as cp finds them in a directory."""
    need_fuse()
    source, plain = tmp_path / "source", tmp_path / "plain"
    source.mkdir()
    zarr.create_group(plain, zarr_format=2).create_array("g/b", shape=(8, 8), chunks=(2, 2), dtype="u2")
    with writable(source, tmp_path, "--layout", "zarr2", "--create", "zarr3") as mount:
        mount.mount()
        (mount.path / "g").mkdir()
        for name in ("b", ".zattrs", ".zgroup"):
            subprocess.run(["cp", "-r", f"{plain}/g/{name}", f"{mount.path}/g/"], check=True, timeout=250)
        assert mount.umount().returncode == 0
    assert (source / "g/zarr.json").exists()
