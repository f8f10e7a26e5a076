"""A program that knows one format changes a part of an array: `read LIBRARY FORMAT CONTAINER MEMBER CORNERS`.

It rolls the elements of the box along the first axis, and returns the whole array as it reads it afterwards. Axes are
z, y, x in each format, as in the source.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt


def read(library: str, format: str, container: str, member: str, corners: list[list[int]]) -> npt.NDArray[Any]:
    opened, box = OPEN[library.split()[0]], tuple(slice(*corner) for corner in corners)
    array = opened(format, container, member)
    axis = len(corners) - len([c for c in corners if c != [0, 1]])
    array[box] = np.roll(np.asarray(array[box]), 1, axis)
    elements = np.asarray(opened(format, container, member)[...])
    return np.array(elements.tolist()) if elements.dtype.kind in "OT" else elements


def tensorstore(format: str, container: str, member: str) -> Any:
    import tensorstore as ts

    driver = {"zarr2": "zarr", "precomputed": "neuroglancer_precomputed"}.get(format, format)
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{container}/{member}/"}}
    array = ts.open(spec, open=True).result()
    if format == "precomputed":
        array = array[..., 0]
    return array.T if format in ("precomputed", "n5") else array


def zarr_python(format: str, container: str, member: str) -> Any:
    """Version 2 or 3; version 2 also knows N5."""
    import zarr as library

    zarr: Any = library
    if format != "n5":
        return zarr.open_array(f"{container}/{member}", mode="r+")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # N5Store is deprecated
        return zarr.open_group(zarr.N5Store(container), mode="r+")[member]


def z5py(format: str, container: str, member: str) -> Any:
    import z5py as library

    return library.File(container, mode="r+", use_zarr_format=format != "n5")[member]


def bcolz(_: str, container: str, member: str) -> Any:
    import bcolz as library

    return _Rows(library.open(f"{container}/{member}", mode="a"))


class _Rows:
    """bcolz assigns whole rows only."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, box: Any) -> Any:
        return self._array[:][box]

    def __setitem__(self, box: Any, values: Any) -> None:
        rows = self._array[box[0]]
        rows[(slice(None), *box[1:])] = values
        self._array[box[0]] = rows
        self._array.flush()


def cloudvolume(_: str, container: str, member: str) -> Any:
    from cloudvolume import CloudVolume

    url = f"file://{container}/{member}"
    return _Volume(CloudVolume(url, non_aligned_writes=True, fill_missing=True, cache=False, progress=False))


class _Volume:
    """A volume of one channel without its axis, z first."""

    def __init__(self, volume: Any) -> None:
        self._volume = volume

    def __getitem__(self, box: Any) -> Any:
        whole = np.asarray(self._volume[:])[..., 0].T
        return whole[box]

    def __setitem__(self, box: Any, values: Any) -> None:
        self._volume[box[::-1]] = np.ascontiguousarray(values.T)[..., None]


OPEN = {
    "tensorstore": tensorstore,
    "zarr-python": zarr_python,
    "z5py": z5py,
    "bcolz-zipline": bcolz,
    "cloud-volume": cloudvolume,
}
