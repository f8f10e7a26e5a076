"""zarr-python 2.18 with its draft of Zarr v3: `read_zarr_draft PATH OUT.npy [--member a/b] [--sharding]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report
from tests.clients.zarr_draft import zarr_of_the_draft


def read(path: str, member: str, sharding: bool, consolidated: bool = False) -> npt.NDArray[Any]:
    zarr = zarr_of_the_draft(sharding)
    if consolidated:
        return np.asarray(zarr.api.open_consolidated(zarr.Store(path), path=member, mode="r")[...])
    return np.asarray(zarr.api.open_array(zarr.Store(path), path=member, mode="r", zarr_version=3)[...])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--member", default="")
    parser.add_argument("--sharding", action="store_true", help="read shards, too")
    args = parser.parse_args()
    report(lambda: read(args.path, args.member, args.sharding), args.out)
