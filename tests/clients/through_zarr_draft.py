"""zarr-python 2.18, with the draft of 2022 or with N5: `through_zarr_draft draft|n5 PATH OUT.npz`, as through_zarr3."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.expected import Expected
from tests.clients.zarr_draft import zarr_of_the_draft


def work(zarr: Any, store: Any, told: Expected, prefix: str, **version: int) -> None:
    def opened() -> Any:
        return zarr.open_array(store, path="g/a", mode="r", **version)

    if version:
        zarr.open_group(store, path="g", mode="w", **version)
    else:
        zarr.open_group(store, mode="w").create_group("g")
    data = np.arange(40 * 36, dtype="i4").reshape(40, 36)
    array = zarr.create(data.shape, chunks=(5, 6), dtype="i4", store=store, path="g/a", **version)
    array[:] = data
    array[3:17, 5:30] = data[3:17, 5:30] = -1
    told(f"{prefix}g/a", opened(), data)
    array.attrs["unit"] = "mm"
    array.resize(60, 48)
    data = np.pad(data, [(0, 20), (0, 12)])
    told(f"{prefix}g/a", opened(), data)
    array[50:60, 40:48] = data[50:60, 40:48] = 3
    array.resize(30, 24)
    data = data[:30, :24]
    told(f"{prefix}g/a", opened(), data)
    array.append(np.ones((7, 24), "i4"))
    data = np.vstack([data, np.ones((7, 24), "i4")])
    told(f"{prefix}g/a", opened(), data)
    if dict(opened().attrs) != {"unit": "mm"}:
        raise AssertionError(dict(array.attrs))
    new_array = zarr.create((10,), chunks=(3,), dtype="f8", store=store, path="g/x", **version)
    new_array[:] = 1
    new_array = zarr.create((9,), chunks=(2,), dtype="u2", store=store, path="g/x", overwrite=True, **version)
    new_array[:] = np.arange(9)
    told(f"{prefix}g/x", zarr.open_array(store, path="g/x", mode="r", **version), np.arange(9, dtype="u2"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("draft", "n5"))
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    expected, library = Expected(), zarr_of_the_draft(sharding=True)
    if args.what == "draft":
        work(library.api, library.Store(str(args.path)), expected, "", zarr_version=3)
    else:
        work(library.api, library.api.N5Store(str(args.path / "c.n5")), expected, "c.n5/")
    expected.save(args.out)
