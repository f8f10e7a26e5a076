"""Programs that know one format resize arrays and change attributes through its layout; the source has another."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests.clients.edit_in_layout import ROWS
from tests.conftest import client_python, need_fuse
from tests.data_n5 import Index, attributes, sharding
from tests.datasets import ROOT
from tests.handmade import write_json
from tests.write.mounts import writable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

DATA = np.arange(48, dtype="uint16").reshape(8, 6)
NESTED = {"list": [1, 2.5, None]}


def _zarr3(path: Path, columns: int = 3) -> None:
    group, chunks = zarr.create_group(path), (2, columns)
    array = group.create_array("a", shape=(8, 6), chunks=chunks, shards=(4, 6), dtype="uint16", attributes={"kept": 1})
    array[:] = DATA


def _labelled(path: Path) -> None:
    """With names of axes, and consolidated."""
    group = zarr.create_group(path)
    group.create_array("a", shape=(8, 6), chunks=(2, 3), shards=(4, 6), dtype="uint16", dimension_names=["y", "x"])
    array = zarr.open_array(path / "a", mode="r+")
    array.attrs["kept"] = 1
    array[:] = DATA
    zarr.consolidate_metadata(path)


def _n5(path: Path) -> None:
    """Without shards, so all values are 0."""
    codecs = [sharding((3, 2), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 5}}], Index())]
    write_json(path / "attributes.json", {"n5": "4.0.0"})
    write_json(path / "a/attributes.json", attributes((6, 8), (6, 4), "uint16", codecs=codecs, kept=1))


SOURCES: dict[str, Callable[[Path], None]] = {
    "zarr3": _zarr3,
    "rows": partial(_zarr3, columns=6),
    "labelled": _labelled,
    "n5": _n5,
}
CASES = [
    ("zarr2", "zarr2", "zarr3", True),
    ("zarr2", "zarr2", "n5", True),
    ("xarray", "zarr2", "labelled", False),
    ("tensorstore_zarr", "zarr2", "zarr3", False),
    ("zarr3", "zarr3", "n5", True),
    ("tensorstore_n5", "n5", "zarr3", False),
    ("z5py", "n5", "zarr3", True),
    ("bcolz", "bcolz", "rows", True),
]


PYTHONS: dict[str, Any] = {"zarr2": "zarr2", "consolidated": "zarr2", "xarray": "zarr2", "bcolz": "bcolz"}


def _edit(source: Path, top: Path, layout: str, tool: str, *options: str) -> None:
    name = PYTHONS.get(tool)
    python = sys.executable if name is None else str(client_python(name))
    with writable(source, top, "--layout", layout, *options) as mount:
        mount.mount()
        command = [python, "-W", "ignore", "-m", "tests.clients.edit_in_layout", tool, str(mount.path)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr


def _read(source: Path, format: str, copy: Path) -> tuple[Any, dict[str, Any]]:
    """The array and its attributes, without a mount; blocks of N5 by way of a copy without shards."""
    if format != "n5":
        array = zarr.open_array(source / "a", mode="r")
        assert array.shards == (4, 6)
        return array[:], dict(array.attrs)
    fsspec.filesystem("shardfs", source=str(source)).get("", str(copy), recursive=True)
    blocks = ts.open({"driver": "n5", "kvstore": {"driver": "file", "path": f"{copy}/a/"}}).result()
    return blocks.read().result().T, json.loads((source / "a/attributes.json").read_text())


@pytest.mark.parametrize(("tool", "layout", "source", "has_attributes"), CASES)
def test_an_array_is_resized_and_described(
    tool: str, layout: str, source: str, has_attributes: bool, tmp_path: Path
) -> None:
    need_fuse()
    if tool == "z5py":
        pytest.importorskip("z5py")
    SOURCES[source](tmp_path / "source")
    _edit(tmp_path / "source", tmp_path, layout, tool)
    data, values = _read(tmp_path / "source", source, tmp_path / "copy")
    np.testing.assert_array_equal(data, np.concatenate([0 * DATA if source == "n5" else DATA, ROWS]))
    assert values["kept"] == 1
    assert values.get("nested") == (NESTED if has_attributes else None)
    assert not {"gone", "_ARRAY_DIMENSIONS"} & values.keys()
    if source == "labelled":
        values = json.loads((tmp_path / "source/zarr.json").read_text())["consolidated_metadata"]["metadata"]
        assert values["a"]["shape"] == [12, 6]
    assert not list((tmp_path / "source").rglob(".z*"))


def test_consolidated_metadata_follow_every_change(tmp_path: Path) -> None:
    need_fuse()
    zarr.create_group(tmp_path / "source")
    _zarr3(tmp_path / "source/deep/group")
    _edit(
        tmp_path / "source", tmp_path, "zarr2", "consolidated", "--create", "zarr3", "--log-file", str(tmp_path / "log")
    )
    assert zarr.open_array(tmp_path / "source/deep/group/a").shape == (27, 6)
    assert "another program" not in (tmp_path / "log").read_text()
