"""`pack --in-place`: chunk files become shards one after the other, and at any point the job continues or goes back."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from shardfs.jobs.in_place import pack_in_place
from shardfs.jobs.pack import pack
from tests.datasets import ZARR3, Dataset, same
from tests.jobs.test_pack import files, ome04, plain, problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ome04", "plain"]  # fixtures

HOW: Any = {"chunks_per_shard": (5, 3)}


def started(root: Path, reports: int, **how: Any) -> None:
    """Begin to pack, and stop after some reports, as if the process had been killed between two tasks."""
    begun: Any = pack_in_place(str(root), **how)
    for _ in range(reports):
        next(begun)
    begun.close()


# ---- what other libraries wrote


def there_and_back(root: Path, tmp_path: Path, **how: Any) -> None:
    """Pack in place as `pack` does to another directory; abort in the middle restores the files."""
    before = files(root)
    list(pack(str(root), str(tmp_path / "packed"), **how))
    started(root, 2, **how)
    assert files(root) != before
    assert problems(pack_in_place(str(root), abort=True)) == []
    assert files(root) == before
    assert problems(pack_in_place(str(root), **how)) == []
    assert files(root) == files(tmp_path / "packed")


@pytest.mark.parametrize("name", sorted(set(ZARR3) - {"rectilinear"}))
def test_zarr3(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    given = dataset("zarr3", name)
    root = shutil.copytree(given.twin, tmp_path / "x")
    there_and_back(root, tmp_path)
    for member, data in given.arrays.items():
        assert same(np.asarray(ts.open(given.spec(root, member)).result().read().result()), data)
