"""z5py at work on a mount, with several threads: `through_z5 PATH OUT.npz`, as through_zarr3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import z5py

from tests.clients.expected import Expected, main

if TYPE_CHECKING:
    from pathlib import Path


def work(path: Path, told: Expected) -> None:
    with z5py.File(str(path / "c.n5"), mode="a", use_zarr_format=False) as file:
        group = file.create_group("g")
        group.attrs["name"] = "group"
        for name, compression in (("gzip", "gzip"), ("raw", "raw")):
            data = np.arange(40 * 36, dtype="u2").reshape(40, 36) + 1
            dataset = group.create_dataset(
                name, shape=data.shape, chunks=(5, 6), dtype="uint16", compression=compression
            )
            dataset.n_threads = 4
            dataset[:] = data
            told(f"c.n5/g/{name}", dataset, data)
            dataset[7:19, 3:30] = data[7:19, 3:30] = 5
            dataset.attrs["unit"] = {"x": "mm"}
            told(f"c.n5/g/{name}", dataset, data)
    with z5py.File(str(path / "c.n5"), mode="r", use_zarr_format=False) as file:
        for name in ("gzip", "raw"):
            told(f"c.n5/g/{name}", file[f"g/{name}"], told.arrays[f"c.n5/g/{name}"])
            if file[f"g/{name}"].attrs["unit"] != {"x": "mm"}:
                raise AssertionError("the attributes are lost")


if __name__ == "__main__":
    main(__doc__, work)
