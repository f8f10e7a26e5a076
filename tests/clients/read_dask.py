"""dask, one task per chunk on a few threads: `read_dask PATH OUT.npy [--member a/b]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, member: str) -> npt.NDArray[Any]:
    import dask.array

    array = dask.array.from_zarr(path, component=member or None)  # type: ignore[no-untyped-call]
    return np.asarray(array.compute(scheduler="threads", num_workers=4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--member", default="")
    args = parser.parse_args()
    report(lambda: read(args.path, args.member), args.out)
