"""cloud-volume: `read_cloudvolume PATH OUT.npy [--fill-missing] [--mip N]`; axes x, y, z, channel."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, mip: int, fill_missing: bool) -> npt.NDArray[Any]:
    from cloudvolume import CloudVolume

    url = f"file://{os.path.abspath(path)}"
    volume = CloudVolume(url, mip=mip, fill_missing=fill_missing, cache=False, progress=False)
    return np.array(volume[:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--fill-missing", action="store_true")
    parser.add_argument("--mip", type=int, default=0)
    args = parser.parse_args()
    report(lambda: read(args.path, args.mip, args.fill_missing), args.out)
