"""The recipes of docs/recipes/create.md write shards that other libraries read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests.datasets import ramp
from tests.docs.blocks import Workshop, run_page

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.slow
def test_arrays_are_sharded(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "data/plain", mode="w")
    group.create_array("copied", data=ramp((64, 64, 64)), chunks=(8, 8, 8))
    run_page("docs/recipes/create.md", Workshop(tmp_path))
    new = tmp_path / "data/new"
    for name, first, last in (("copied", 1, 8), ("brain.zarr/raw", 0, 1), ("ones.zarr", 1, 1), ("stored.zarr", 1, 0)):
        array: Any = zarr.open_array(new / name, mode="r")
        assert (array.shards, array.chunks) == ((64, 64, 64), (8, 8, 8))
        data = np.asarray(array[:])
        assert (data.flat[0], data.flat[-1]) == (first, last if name != "copied" else ramp((64, 64, 64)).flat[-1])
    (shard,) = (p for p in (new / "brain.n5/raw").rglob("*") if p.is_file() and p.suffix != ".json")
    assert shard.stat().st_size > 512 * 16
    for index in (0, 1):
        spec: Any = {"driver": "neuroglancer_precomputed", "scale_index": index}
        spec["kvstore"] = {"driver": "file", "path": f"{new}/segmentation/"}
        assert np.asarray(ts.open(spec).result().read().result()).all()
    assert len(list(new.glob("segmentation/*/*.shard"))) == 2
