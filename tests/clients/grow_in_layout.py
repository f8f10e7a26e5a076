"""A program grows arrays whose last chunk is not full, and prints what it then reads: `grow_in_layout TOOL PATH`.

It reads before each change, so that the kernel and shardfs may have cached the chunk at the former edge.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def n5(path: str) -> list[list[int]]:
    """tensorstore and z5py, on an array of ten elements 3 in chunks of four."""
    import tensorstore as ts
    import z5py

    def opened() -> Any:
        return ts.open({"driver": "n5", "kvstore": f"file://{path}/a/"}, open=True, context=ts.Context()).result()

    contents = [opened().read().result().tolist()]
    opened()[9:10].write([8]).result()
    for size in (11, 12, 9):
        opened().resize(exclusive_max=[size]).result()
        contents.append(opened().read().result().tolist())
    opened().resize(exclusive_max=[11]).result()
    array = z5py.File(path, mode="a", use_zarr_format=False)["a"]
    array[10:11] = 6
    return [*contents, array[:].tolist(), opened().read().result().tolist()]


def bcolz(path: str) -> list[list[int]]:
    """bcolz 1.x, which writes the last chunk before the length, on an array of ten elements 3 in chunks of four."""
    import bcolz as library

    contents = []
    for size in (1, 3, 1, -2, -3, 6):
        array = library.open(f"{path}/a", mode="a")
        array.append(np.full(size, size, "uint16")) if size > 0 else array.trim(-size)
        array.flush()
        del array
        contents.append(library.open(f"{path}/a", mode="r")[:].tolist())
    return contents


if __name__ == "__main__":
    print(json.dumps({"n5": n5, "bcolz": bcolz}[sys.argv[1]](sys.argv[2])))
