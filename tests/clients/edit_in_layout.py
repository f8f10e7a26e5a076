"""A program resizes an array and changes attributes in the only format that it knows: `edit_in_layout TOOL PATH`.

The array `a` of shape (8, 6), or the reverse in formats with x first, gets 4 more rows of the value 7.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

ROWS = np.full((4, 6), 7, "uint16")


def zarr2(path: str) -> None:
    """zarr-python 2.18, by regions, by `append`, and with metadata consolidated before and after."""
    import zarr as library

    zarr: Any = library  # of version 2
    assert zarr.open_consolidated(path)["a"].shape == (8, 6)
    array = zarr.open_array(f"{path}/a", mode="r+")
    array.resize(10, 6)
    array[8:] = ROWS[:2]
    array.append(ROWS[2:])
    array.attrs.update({"_ARRAY_DIMENSIONS": ["y", "x"], "nested": {"list": [1, 2.5, None]}})
    array.attrs["gone"] = 1
    del array.attrs["gone"]
    assert zarr.open_consolidated(path)["a"].shape == (12, 6)
    zarr.consolidate_metadata(path)
    document = zarr.util.json_loads(array.store[".zarray" if ".zarray" in array.store else "a/.zarray"])
    try:
        array.store[".zarray"] = zarr.util.json_dumps({**document, "chunks": [3, 3]})
    except OSError:
        return
    raise AssertionError("other chunks were accepted")


def consolidated(path: str) -> None:
    """zarr-python 2.18, which opens everything by `.zmetadata` after each change."""
    import zarr as library

    zarr: Any = library  # of version 2
    top = zarr.open_group(path, mode="a")
    array = top["deep/group/a"]

    def require_shown(**attributes: int) -> None:
        for above in ("", "/deep", "/deep/group"):
            consolidated_array = zarr.open_consolidated(path + above)["deep/group/a"[len(above) :]]
            assert (consolidated_array.shape, dict(consolidated_array.attrs)) == (
                array.shape,
                {"kept": 1, **attributes},
            ), above

    for i in range(20):
        array.attrs["i"] = top.attrs["i"] = i
        require_shown(i=i)
        assert dict(zarr.open_consolidated(path).attrs) == {"i": i}
        array.resize(8 + i, 6)
        require_shown(i=i)
        del array.attrs["i"], top.attrs["i"]
        require_shown()
        assert not dict(zarr.open_consolidated(path).attrs)
        created = top.create_dataset("new", shape=4, chunks=2, dtype="u1")
        zarr.consolidate_metadata(path)
        assert zarr.open_consolidated(path)["new"].shape == created.shape
        del top["new"]
        assert "new" not in zarr.open_consolidated(path)


def xarray(path: str) -> None:
    """xarray, by zarr-python 2.18, which writes the attributes of everything, and .zmetadata."""
    import xarray as library

    xr: Any = library
    more = xr.Dataset({"a": (("y", "x"), ROWS, {"kept": 1})}, attrs={"title": "x"})
    more.to_zarr(path, append_dim="y", consolidated=True)
    assert xr.open_zarr(path).a.shape == (12, 6)


def zarr3(path: str) -> None:
    """zarr-python 3."""
    import zarr

    array = zarr.open_array(f"{path}/a", mode="r+")
    array.resize((12, 6))
    array[8:] = ROWS
    array.attrs["nested"] = {"list": [1, 2.5, None]}


def tensorstore_n5(path: str) -> None:
    """tensorstore, which writes no attributes."""
    import tensorstore as ts

    array = ts.open({"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/a/"}}, open=True).result()
    array = array.resize(exclusive_max=[6, 12]).result()
    array[:, 8:].write(ROWS.T).result()


def tensorstore_zarr(path: str) -> None:
    """tensorstore, which writes the whole `.zarray`."""
    import tensorstore as ts

    array = ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/a/"}}, open=True).result()
    array = array.resize(exclusive_max=[12, 6]).result()
    array[8:].write(ROWS).result()


def z5py(path: str) -> None:
    """z5py cannot resize; it writes attributes of datasets and groups."""
    tensorstore_n5(path)
    import z5py as library

    z5: Any = library
    container = z5.N5File(path, "r+")
    container["a"].attrs["nested"] = {"list": [1, 2.5, None]}
    container.attrs["title"] = "x"


def bcolz(path: str) -> None:
    """bcolz 1.x, which appends rows and cuts them off; it can write only whole documents of attributes."""
    import bcolz as library

    bc: Any = library
    array = bc.open(f"{path}/a", mode="a")
    array.append(ROWS)
    array.append(ROWS[:1])
    array.flush()
    array = bc.open(f"{path}/a", mode="a")
    assert array.shape == (13, 6)
    array.resize(12)
    array.flush()
    array.attrs["nested"] = {"list": [1, 2.5, None]}


if __name__ == "__main__":
    tool, path = sys.argv[1:]
    globals()[tool](path)
