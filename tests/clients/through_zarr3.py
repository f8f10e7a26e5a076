"""zarr-python 3 at work on a mount: `through_zarr3 PATH OUT.npz`; what the arrays hold at last, by their paths."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.clients.expected import Expected, main

if TYPE_CHECKING:
    from pathlib import Path


def work(path: Path, told: Expected) -> None:
    import zarr

    root = zarr.open_group(path / "g", mode="w")
    data = np.arange(40 * 36, dtype="i4").reshape(40, 36)
    array = root.create_array("a/b", shape=data.shape, chunks=(5, 6), dtype="i4", fill_value=7)
    array[:] = data
    told("g/a/b", array, data)
    array[3:17, 5:30] = data[3:17, 5:30] = -1
    told("g/a/b", _open(path / "g/a/b"), data)
    array.attrs["unit"] = "mm"

    array.resize((60, 48))
    grown = np.full((60, 48), 7, "i4")
    grown[:40, :36] = data
    told("g/a/b", _open(path / "g/a/b"), grown)
    array[50:60, 40:48] = grown[50:60, 40:48] = 3
    array.resize((28, 20))
    told("g/a/b", _open(path / "g/a/b"), grown[:28, :20])
    array.resize((60, 48))  # what was outside is gone
    again = np.full((60, 48), 7, "i4")
    again[:30, :24] = np.where(np.add.outer(np.arange(30) < 28, np.arange(24) < 20) == 2, grown[:30, :24], 7)
    elements = np.asarray(_open(path / "g/a/b")[:])
    np.testing.assert_array_equal(elements[30:], 7)
    np.testing.assert_array_equal(elements[:, 24:], 7)
    array[:28, :20] = again[:28, :20]
    array[28:, :] = array[:, 20:] = 7
    again[28:, :] = again[:, 20:] = 7
    array.append(np.ones((7, 48), "i4"))
    again = np.vstack([again, np.ones((7, 48), "i4")])
    told("g/a/b", _open(path / "g/a/b"), again)
    if dict(_open(path / "g/a/b").attrs) != {"unit": "mm"}:
        raise AssertionError(dict(array.attrs))

    # Deleted, and made again with mode "w".
    for name in ("x", "y"):
        root.create_array(name, shape=(10,), chunks=(3,), dtype="f8")[:] = np.arange(10)
    del root["x"]
    if sorted(root.keys()) != ["a", "y"]:
        raise AssertionError(sorted(root.keys()))
    anew = zarr.create_array(path / "g/y", shape=(8,), chunks=(2,), dtype="u2", overwrite=True)
    anew[2:] = np.arange(2, 8)
    told("g/y", _open(path / "g/y"), np.array([0, 0, 2, 3, 4, 5, 6, 7], "u2"))
    opened = zarr.open_array(path / "g/y", mode="w", shape=(9,), chunks=(2,), dtype="u2", zarr_format=3)
    opened[:] = np.arange(9)
    told("g/y", _open(path / "g/y"), np.arange(9, dtype="u2"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path / "g")
        consolidated = zarr.open_consolidated(path / "g", mode="r")
    told("g/a/b", consolidated["a/b"], again)
    # Of format 2, which stays as it is written.
    old = zarr.create_array(path / "old", shape=(9,), chunks=(2,), dtype="u2", zarr_format=2)
    old[:] = np.arange(9)
    told("old", _open(path / "old"), np.arange(9, dtype="u2"))


def _open(path: Path) -> Any:
    import zarr

    return zarr.open_array(path, mode="r")


if __name__ == "__main__":
    main(__doc__, work)
