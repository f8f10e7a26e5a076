"""zarr-python 2.18 or 3 writes arrays of Zarr v2: `write_zarr2 DIRECTORY`, one for each of `VARIANTS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt

NUMBERS = ("|b1", "|u1", "|i1", "<u2", ">u2", "<i4", "<u8", ">i8", "<f2", "<f4", ">f8", "<c8", ">c16")
COMPRESSORS = {
    "none": None,
    "zstd": numcodecs.Zstd(1),
    "gzip": numcodecs.GZip(1),
    "zlib": numcodecs.Zlib(1),
    "bz2": numcodecs.BZ2(1),
    "lz4": numcodecs.LZ4(),
    "lzma": numcodecs.LZMA(),
    "blosc": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE),
    "autoshuffle": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.AUTOSHUFFLE),
}
STRINGS = ("|S5", "<U4", ">U3")
FILTERS = {"shuffle": numcodecs.Shuffle(2), "crc32": numcodecs.CRC32(), "fletcher32": numcodecs.Fletcher32()}

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"dtype_{np.dtype(t).name}_{'big' if t[0] == '>' else 'little'}": {"dtype": t} for t in (*NUMBERS, *STRINGS)},
    **{f"compressor_{name}": {"compressor": codec, "fill_value": 7} for name, codec in COMPRESSORS.items()},
    **{f"filter_{name}": {"filters": [codec]} for name, codec in FILTERS.items()},
    "order_f": {"order": "F"},
    "order_f_slash": {"order": "F", "dimension_separator": "/", "compressor": None},
    "slash": {"dimension_separator": "/"},
    "scalar": {"shape": (), "chunks": ()},
    "rows": {"shape": (9,), "chunks": (4,)},
    "slabs": {"shape": (9, 3), "chunks": (4, 3), "dtype": ">f8"},
    "volume": {"shape": (5, 7, 6), "chunks": (2, 4, 6), "order": "F"},
    "channels": {"shape": (2, 5, 7, 6), "chunks": (2, 2, 4, 6), "dtype": "|u1"},
    "no_fill_value": {"fill_value": None},
}


def data_of(name: str) -> npt.NDArray[Any]:
    """The elements of a variant: half of them are its fill value, so that chunks are missing."""
    variant = VARIANTS[name]
    shape = variant.get("shape", (5, 7))
    data = np.arange(int(np.prod(shape))).reshape(shape) % 100
    if shape:
        data[shape[0] // 2 :] = variant.get("fill_value") or 0
    dtype = np.dtype(variant.get("dtype", "<u2"))
    if dtype.kind not in "SU":
        return data.astype(dtype)
    return np.where(data > 0, data.astype(dtype), np.zeros((), dtype)).astype(dtype)


def write(root: Path) -> None:
    """Write all variants into a group."""
    import zarr as library

    zarr: Any = library  # of one version or the other
    is_2 = zarr.__version__.startswith("2.")
    version = {} if is_2 else {"zarr_format": 2}
    sparse = {"write_empty_chunks": False} if is_2 else {}  # as 3 does anyway
    zarr.open_group(str(root), mode="w", **version).attrs["note"] = "of the group"
    for name, variant in VARIANTS.items():
        usual = {"shape": (5, 7), "chunks": (2, 3), "dtype": "<u2", "fill_value": 0}
        if np.dtype(variant.get("dtype", "<u2")).kind in "SU":
            usual["fill_value"] = np.zeros((), variant["dtype"])[()]
        array = zarr.create(store=str(root / name), **sparse, **version, **{**usual, **variant})
        array[...] = data_of(name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
