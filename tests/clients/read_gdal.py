"""GDAL, as rasterio's wheel has it: `read_gdal PATH OUT.npy [--decoded]`.

Bands are what stands before the last two axes. With `--decoded` numbers are unpacked, and NaN where GDAL masks them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, *, decoded: bool = False) -> npt.NDArray[Any]:
    import rasterio

    with rasterio.open(f'ZARR:"{path}"') as opened:
        if not decoded:
            return np.asarray(opened.read())
        values = opened.read(masked=True).astype("float64") * opened.scales[0] + opened.offsets[0]
        return np.asarray(values.filled(np.nan))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--decoded", action="store_true")
    args = parser.parse_args()
    report(lambda: read(args.path, decoded=args.decoded), args.out)
