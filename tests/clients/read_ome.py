"""ome-zarr-py before it knew Zarr v3: `read_ome PATH LEVEL OUT.npy [--axes FILE]` writes a level of an image, and what
it takes the axes and the scales to be. `read_ome photo - OUT.npy` writes a photograph that scikit-image ships.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, level: int, told: str | None) -> npt.NDArray[Any]:
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    location = parse_url(path)
    if location is None:
        raise ValueError(f"ome-zarr finds no Zarr at {path}")
    node = next(iter(Reader(location)()))
    if told:
        axes = [a["name"] for a in node.metadata["axes"]]
        scales = [steps[0]["scale"] for steps in node.metadata["coordinateTransformations"]]
        description = {
            "axes": axes,
            "scales": scales,
            "version": location.fmt.version,
            "shapes": [d.shape for d in node.data],
        }
        Path(told).write_text(json.dumps(description))
    return np.asarray(node.data[level])


def photo() -> npt.NDArray[Any]:
    from skimage.data import astronaut

    return np.asarray(astronaut())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("level")
    parser.add_argument("out")
    parser.add_argument("--told")
    args = parser.parse_args()
    report(photo if args.path == "photo" else lambda: read(args.path, int(args.level), args.told), args.out)
