"""Programs create arrays in their own format through a layout; the source then has sharded arrays of another format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from tests.clients.create_anew import DATA
from tests.conftest import need_fuse
from tests.write.mounts import writable
from tests.write.test_creating import as_zarr3, create

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop]


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
    made = zarr.open_array(source / "new/x", mode="r")
    assert json.loads((source / "new/x/zarr.json").read_bytes())["dimension_names"] == ["y", "x"]
    assert made.attrs["unit"] == "nm"
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


@pytest.mark.parametrize("tool", ["z5py", "n5store"])
def test_n5_becomes_sharded_zarr_v3(tmp_path: Path, tool: str) -> None:
    source = _created(tmp_path, tool, "n5", "zarr3:chunks_per_shard=2x4")
    array = zarr.open_array(source / "f.n5/x", mode="r")
    assert (array.shape, array.shards, array.attrs["k"]) == (DATA.shape, (20, 40), 1)
    np.testing.assert_array_equal(array[:], DATA)
    assert not list(source.rglob("attributes.json"))


def test_a_volume_becomes_a_sharded_image(tmp_path: Path) -> None:
    source = _created(tmp_path, "plainvolume", "precomputed", "zarr3:chunks_per_shard=1x4x4")
    image = json.loads((source / "v/zarr.json").read_bytes())["attributes"]["ome"]["multiscales"][0]
    assert [level["path"] for level in image["datasets"]] == ["1_1_1", "2_2_1"]
    for path, wanted in (("1_1_1", DATA), ("2_2_1", DATA[::2, ::2])):
        array = zarr.open_array(source / "v" / path, mode="r")
        assert array.shards == (1, 40, 40)
        np.testing.assert_array_equal(array[:], wanted.T[None])


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
        assert json.loads((mount.path / "g/.zattrs").read_text()) == {}
        mount.umount()
    assert json.loads((tmp_path / "source/g/zarr.json").read_bytes())["node_type"] == "group"
    assert not (tmp_path / "source/a/zarr.json").exists()
