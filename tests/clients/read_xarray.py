"""xarray on zarr-python 2: `read_xarray PATH VARIABLE OUT.npy`, by name and not by number of axes."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, variable: str) -> npt.NDArray[Any]:
    import xarray

    opened = xarray.open_zarr(path)
    return np.asarray(opened[variable].transpose("y", "x").values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("variable")
    parser.add_argument("out")
    args = parser.parse_args()
    report(lambda: read(args.path, args.variable), args.out)
