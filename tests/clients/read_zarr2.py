"""zarr-python, 2.18 or 3, of which only Zarr v2 is wanted: `read_zarr2 PATH OUT.npy [--member a/b]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, member: str) -> npt.NDArray[Any]:
    """By the consolidated metadata of the hierarchy, if there is a member."""
    import zarr as library

    zarr: Any = library  # of one version or the other
    if zarr.__version__.startswith("2."):
        if not member:
            return np.asarray(zarr.open_array(path, mode="r")[...])
        return np.asarray(zarr.open_consolidated(path, mode="r")[member][...])
    if not member:
        return np.asarray(zarr.open_array(path, mode="r", zarr_format=2)[...])
    array = zarr.open_consolidated(path, mode="r", zarr_format=2)[member]
    return np.asarray(array[...])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--member", default="")
    args = parser.parse_args()
    report(lambda: read(args.path, args.member), args.out)
