"""xarray with default settings: `describe_xarray PATH OUT.json [--engine netcdf4]`.

It writes all variables, decoded, as text: dimensions, type, values and attributes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

NOT_DECODED = "dtype"
"""An attribute that says how durations are encoded, which xarray before 2025.6 leaves where it is."""


def described(variable: Any) -> dict[str, Any]:
    values = np.asarray(variable.values)
    kind = "string" if values.dtype.kind in "TO" else values.dtype.newbyteorder("=").str
    values = values.astype(str) if values.dtype.kind in "mM" else values
    attributes = {name: np.asarray(value).tolist() for name, value in sorted(variable.attrs.items())}
    attributes.pop(NOT_DECODED, None)
    return {"dims": variable.dims, "type": kind, "values": repr(values.tolist()), "attributes": attributes}


def describe(path: str, engine: str) -> dict[str, Any]:
    import xarray

    if engine == "zarr":
        opened = xarray.open_zarr(path)
    else:
        opened = xarray.open_dataset(f"file://{path}#mode=zarr,file", engine=engine)
    dataset = opened.load()
    variables = {str(name): described(variable) for name, variable in dataset.variables.items()}
    return {"variables": variables, "coordinates": sorted(map(str, dataset.coords)), "title": dataset.attrs["title"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", default="zarr", choices=("zarr", "netcdf4"))
    args = parser.parse_args()
    args.out.write_text(json.dumps(describe(args.path, args.engine)))
