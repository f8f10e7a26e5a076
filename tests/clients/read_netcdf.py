"""netCDF-C (NCZarr), by netCDF4-python: `read_netcdf PATH VARIABLE OUT.npy [--mode xarray]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, variable: str, mode: str) -> npt.NDArray[Any]:
    import netCDF4

    with netCDF4.Dataset(f"file://{path}#mode={mode},file") as opened:
        opened.set_auto_maskandscale(False)
        return np.asarray(opened[variable][...])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("variable")
    parser.add_argument("out")
    parser.add_argument("--mode", default="zarr", choices=("zarr", "xarray", "nczarr"))
    args = parser.parse_args()
    report(lambda: read(args.path, args.variable, args.mode), args.out)
