"""z5py, whose C++ core does its own file I/O: `read_z5 PATH OUT.npy [--member a/b]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, member: str) -> npt.NDArray[Any]:
    import z5py

    # A container may be an array itself; it is then its own member ".".
    return np.asarray(z5py.File(path, mode="r", use_zarr_format=True)[member or "."][...])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--member", default="")
    args = parser.parse_args()
    report(lambda: read(args.path, args.member), args.out)
