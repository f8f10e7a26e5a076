"""zarr-python 3: `read_zarr3 PATH OUT.npy [--member a/b]`; a member is reached through its group, as users do."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, member: str) -> npt.NDArray[Any]:
    import zarr

    if not member:
        return np.asarray(zarr.open_array(path, mode="r")[...])
    array = zarr.open_group(path, mode="r")[member]
    if not isinstance(array, zarr.Array):
        raise TypeError(f"{member} is not an array")
    return np.asarray(array[...])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--member", default="")
    args = parser.parse_args()
    report(lambda: read(args.path, args.member), args.out)
