"""GDAL, as rasterio's wheel has it: `read_gdal PATH OUT.npy`. Bands are what stands before the last two axes."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str) -> npt.NDArray[Any]:
    import rasterio

    with rasterio.open(f'ZARR:"{path}"') as opened:
        return np.asarray(opened.read())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    args = parser.parse_args()
    report(lambda: read(args.path), args.out)
