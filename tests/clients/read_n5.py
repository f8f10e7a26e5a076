"""N5 datasets, x first whoever reads: `read_n5 CLIENT CONTAINER MEMBER OUT.npy`; zarr-python's must be 2."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(client: str, path: str, member: str) -> npt.NDArray[Any]:
    if client == "tensorstore":
        import tensorstore

        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/{member}/"}}
        return np.asarray(tensorstore.open(spec).result().read().result())
    if client == "z5":
        import z5py

        return np.asarray(z5py.File(path, mode="r", use_zarr_format=False)[member][...]).T
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that N5Store will go
        store: Any = zarr.N5Store(path)  # type: ignore[attr-defined] # gone in 3
        group: Any = zarr.open_group(store, mode="r")
        return np.asarray(group[member][...]).T


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=("tensorstore", "z5", "n5store"))
    parser.add_argument("path")
    parser.add_argument("member")
    parser.add_argument("out")
    args = parser.parse_args()
    report(lambda: read(args.client, args.path, args.member), args.out)
