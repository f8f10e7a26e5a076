"""The recipes of docs/recipes/create.md do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests.conftest import need_fuse
from tests.datasets import ROOT, client_python
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (ROOT / "docs/recipes/create.md").read_text()
RECIPES: dict[str, str] = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", TEXT, re.DOTALL))
RULES = "zarr3:chunks_per_shard=8x8x8;n5;precomputed"

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.filterwarnings("ignore:Object at")]


def check(recipe: str, source: Path) -> None:
    """Read natively what is there now."""
    if recipe in ("zarr", "dask", "tensorstore"):
        name = {"zarr": "brain.zarr/raw", "dask": "ones.zarr", "tensorstore": "stored.zarr"}[recipe]
        array = zarr.open_array(source / name, mode="r")
        assert (array.shards, array.chunks) == ((64, 64, 64), (8, 8, 8))
        data = np.asarray(array[:])
        assert data.max() == (65535 if recipe == "zarr" else 1)
        assert data[-1].max() == (0 if recipe == "tensorstore" else 1)
        return
    if recipe == "z5py":
        (shard,) = (p for p in (source / "brain.n5" / "raw").rglob("*") if p.is_file() and p.suffix != ".json")
        assert shard.stat().st_size > 512 * 16
        return
    for index in (0, 1):
        spec: Any = {"driver": "neuroglancer_precomputed", "scale_index": index}
        spec["kvstore"] = {"driver": "file", "path": f"{source}/segmentation/"}
        assert np.asarray(ts.open(spec).result().read().result()).all()
    assert len(list(source.glob("segmentation/*/*.shard"))) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe(tmp_path: Path, recipe: str) -> None:
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    python = str(client_python("cv")) if recipe == "cloudvolume" else sys.executable
    with writable(source, tmp_path, "--create", RULES) as mount:
        mount.mount()
        program = RECIPES[recipe].replace("/mnt/new", str(mount.path))
        run = subprocess.run(
            [python, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert mount.umount().returncode == 0
    check(recipe, source)
