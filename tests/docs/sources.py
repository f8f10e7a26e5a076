"""The data that README.md and the recipes read: `/data/brain.zarr` and others. Nothing here uses shardfs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
import xarray
import z5py
import zarr
from zarr.codecs import BloscCodec, GzipCodec

from tests.data_pyramid import write_pyramid
from tests.datasets import ramp

if TYPE_CHECKING:
    from pathlib import Path


def write(data: Path) -> None:
    """Write all sources into a directory."""
    data.mkdir()
    _write_brain(data / "brain.zarr")
    _write_volume(data / "em")
    _write_n5(data / "brain.n5")
    rows = zarr.open_group(data / "tables.zarr", mode="w")
    rows.create_array(
        "traces", data=ramp((100, 8)), chunks=(10, 8), shards=(40, 8), compressors=BloscCodec(cname="lz4", typesize=2)
    )
    plain = zarr.open_group(data / "plain.zarr", mode="w", zarr_format=2)
    plain.create_array("raw", data=ramp((32, 32)), chunks=(8, 8))


def _write_brain(path: Path) -> None:
    """Write a group with an array, an OME-Zarr 0.5 image, and a dataset of xarray."""
    voxels = ramp((64, 64, 64), "uint8")
    group = zarr.open_group(path, mode="w")
    group.create_array("t1", data=voxels, chunks=(16,) * 3, shards=(32,) * 3, compressors=GzipCodec())
    (path / "image").mkdir()
    write_pyramid(path / "image", voxels, 3, [0.5, 0.25, 0.25], "micrometer")
    for level in range(3):
        (path / f"image/{level}").rename(path / f"image/s{level}")
    document = path / "image/zarr.json"
    document.write_text(document.read_text().replace('"path": "', '"path": "s'))
    table = xarray.Dataset(
        {"temperature": (("time", "x"), np.linspace(0, 30, 24 * 10).reshape(24, 10))},
        {"time": np.arange(24.0), "x": np.linspace(0, 1, 10)},
    )
    encoding = {"temperature": {"chunks": (4, 10), "shards": (12, 10)}}
    table.to_zarr(path / "table", zarr_format=3, encoding=encoding, consolidated=False)


def _write_volume(path: Path) -> None:
    sharding = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 3,
        "hash": "identity",
        "minishard_bits": 0,
        "shard_bits": 1,
        "minishard_index_encoding": "gzip",
        "data_encoding": "gzip",
    }
    spec: Any = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
        "scale_metadata": {
            "size": [64, 64, 64],
            "chunk_size": [32, 32, 32],
            "resolution": [4, 4, 40],
            "encoding": "raw",
            "sharding": sharding,
        },
    }
    ts.open(spec, create=True).result().write(ramp((64, 64, 64, 1), "uint8")).result()


def _write_n5(path: Path) -> None:
    """Write a container with an image of two levels."""
    with z5py.File(path, mode="w", use_zarr_format=False) as file:
        image = file.create_group("image")
        for level in range(2):
            image.create_dataset(f"s{level}", data=ramp((64 >> level,) * 3), chunks=(16,) * 3, compression="gzip")
    described = {"axes": ["x", "y", "z"], "units": ["nm"] * 3, "resolution": [4, 4, 40], "scales": [[1] * 3, [2] * 3]}
    (path / "image/attributes.json").write_text(json.dumps(described))
