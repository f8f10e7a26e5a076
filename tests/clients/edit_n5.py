"""Documents of N5 written by z5py, or by zarr-python 2.18 where that is installed: `edit_n5 ACTION PATH`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _n5store(path: str) -> Any:
    import zarr as library

    zarr: Any = library  # of version 2
    return zarr, zarr.N5Store(path)


def attributes_of_zarr(path: str) -> None:
    zarr, store = _n5store(path)
    zarr.open_group(store=store, mode="r+")["a"].attrs["b"] = {"c": [1.5, None]}


def resize_of_zarr(path: str) -> None:
    zarr, store = _n5store(path)
    zarr.open_group(store=store, mode="r+")["a"].resize(20, 30)


def create_of_zarr(path: str) -> None:
    zarr, store = _n5store(path)
    compressor = zarr.storage.default_compressor.__class__("lz4", clevel=3)
    zarr.open_group(store=store, mode="a").create_dataset(
        "a", shape=(70, 110), chunks=(2, 3), dtype="u2", compressor=compressor
    )


def attributes_of_z5(path: str) -> None:
    import z5py

    with z5py.File(path, mode="a") as file:
        file["a"].attrs["b"] = {"c": [1.5, None]}


def create_of_z5(path: str) -> None:
    import z5py

    with z5py.File(path, mode="a", use_zarr_format=False) as file:
        file.create_dataset("a", shape=(70, 110), chunks=(2, 3), dtype="uint16", compression="gzip", level=3)


ACTIONS: dict[str, Callable[[str], None]] = {
    f.__name__: f for f in (attributes_of_zarr, resize_of_zarr, create_of_zarr, attributes_of_z5, create_of_z5)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("path")
    args = parser.parse_args()
    ACTIONS[args.action](args.path)
