"""xarray on zarr-python 3: `write_xarray PATH [--strings]` writes a sharded dataset in Zarr v3.

It has what xarray encodes: packed numbers, times, durations, flags, sparse arrays. `--strings` adds those, truth values
and scalars; netCDF-C cannot open a group with them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np


def variables() -> dict[str, Any]:
    values = np.random.default_rng(0).normal(size=(6, 8)).round(2)
    values[0, 0], values[1, 1] = np.nan, 0
    few = np.zeros((6, 8), "int32")
    few[0, 0] = 5
    hours = np.arange(6).astype("timedelta64[h]").astype("timedelta64[ns]")
    days = np.datetime64("2000-01-01", "ns") + hours * 24
    flags = np.arange(48, dtype="int8").reshape(6, 8) % 3
    plane = ("time", "x")
    return {
        "measured": (plane, values),
        "packed": (plane, values, {"units": "K"}),
        "packed_without_mark": (plane, np.arange(48.0).reshape(6, 8) / 2),
        "marked": (plane, values),
        "marked_by_nan": (plane, values),
        "few": (plane, few),
        "few_floats": (plane, few.astype("float32")),
        "filled": (plane, np.where(few == 0, 7, few)),
        "flags": (plane, flags, {"flag_values": np.array([0, 1, 2], "int8"), "flag_meanings": "a b c"}),
        "no_time": ("time", np.where(np.arange(6) == 2, np.datetime64("NaT"), days)),
        "span": ("time", np.where(np.arange(6) == 5, np.timedelta64("NaT"), hours)),
        "large": ("x", np.array([0, 1, 2**63, 2**64 - 1, 4, 5, 6, 7], "uint64")),
        "big_endian": ("x", np.arange(8, dtype=">i4")),
        "time": ("time", days),
        "x": ("x", np.arange(8.0)),
        "label": ("x", np.arange(8, dtype="int16")),
    }


STRINGS: dict[str, Any] = {
    "truth": (("time", "x"), np.arange(48).reshape(6, 8) % 3 > 0),
    "half": ("x", np.arange(8, dtype="float16")),
    "complex": ("x", np.arange(8) * 1j),
    "words": ("x", np.array(["", "a", "bc", "déf", "", "g", "h", "i"], object)),
    "short_words": ("x", np.array(["", "a", "bc", "déf", "", "g", "h", "i"])),
    "bytes": ("x", np.array([b"", b"a", b"bc", b"g", b"", b"h", b"i", b"j"])),
    "no_words": ("x", np.array([""] * 8, object)),
    "name": ((), "hello"),
    "reference": ((), np.datetime64("2000-01-01", "ns")),
    "zero": ((), np.int32(0)),
}
ENCODINGS: dict[str, dict[str, Any]] = {
    "packed": {"dtype": "int16", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -9999},
    "packed_without_mark": {"dtype": "uint16", "scale_factor": 0.5},
    "marked": {"_FillValue": -1e30, "missing_value": -1e30},
    "marked_by_nan": {"_FillValue": np.nan, "missing_value": np.nan},
    "filled": {"fill_value": 7},
}


def write(path: str, *, strings: bool) -> None:
    import xarray

    data = variables() | (STRINGS if strings else {})
    dataset = xarray.Dataset(data, attrs={"title": "a dataset", "version": 3}).set_coords("label")
    encoding = {}
    for name, variable in dataset.variables.items():
        if variable.ndim and variable.dtype.kind in "biufcmM":
            chunks = {"chunks": (2, 4)[2 - variable.ndim :] if variable.ndim == 2 else (2,), "shards": variable.shape}
            encoding[name] = {**chunks, **ENCODINGS.get(str(name), {})}
    dataset.to_zarr(path, zarr_format=3, encoding=encoding, write_empty_chunks=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--strings", action="store_true")
    args = parser.parse_args()
    write(args.path, strings=args.strings)
