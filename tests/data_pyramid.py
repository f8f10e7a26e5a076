"""A sharded OME-Zarr 0.5 image in several resolutions, written by tensorstore."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    Image = npt.NDArray[Any]

CHUNK, SHARD = 32, 128


def halved(image: Image) -> Image:
    """The means of 2 x 2 x 2 voxels; an odd slice at an end is left out."""
    z, y, x = (n // 2 * 2 for n in image.shape)
    cells = image[:z, :y, :x].reshape(z // 2, 2, y // 2, 2, x // 2, 2)
    means: Image = cells.mean(axis=(1, 3, 5)).round().astype(image.dtype)
    return means


def write_pyramid(path: Path, image: Image, levels: int, scale: Sequence[float], unit: str) -> list[Image]:
    """An image (z, y, x), and smaller ones made of it; give back all. `scale` is of the first one's voxels."""
    images, datasets = [image], []
    while len(images) < levels:
        images.append(halved(images[-1]))
    for number, level in enumerate(images):
        by = 2**number
        steps = [
            {"type": "scale", "scale": [s * by for s in scale]},
            {"type": "translation", "translation": [s * (by - 1) / 2 for s in scale]},
        ]
        datasets.append({"path": str(number), "coordinateTransformations": steps})
        _write(path / str(number), level)
    axes = [{"name": name, "type": "space", "unit": unit} for name in "zyx"]
    ome = {"version": "0.5", "multiscales": [{"name": path.name, "axes": axes, "datasets": datasets}]}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
    (path / "zarr.json").write_text(json.dumps(group))
    return images


def _write(path: Path, image: Image) -> None:
    little: Any = {"name": "bytes"} if image.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [CHUNK] * 3,
        "codecs": [little, {"name": "zstd", "configuration": {"level": 3}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    metadata = {
        "shape": image.shape,
        "data_type": image.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD] * 3}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": ["z", "y", "x"],
    }
    store = {"driver": "file", "path": f"{path}/"}
    array = ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result()
    array.write(np.ascontiguousarray(image)).result()
