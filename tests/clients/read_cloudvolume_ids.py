"""cloud-volume: `read_cloudvolume_ids PATH OUT.npy LABELS`, meshes and skeletons of a volume, as JSON in an array.

Of each mesh vertices and faces at all levels of detail, of each skeleton vertices, edges and radii.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def open_volume(path: str) -> Any:
    from cloudvolume import CloudVolume

    return CloudVolume(f"file://{os.path.abspath(path)}", cache=False, progress=False)


def meshes(volume: Any, labels: list[int]) -> dict[str, Any]:
    out = {}
    for label in labels:
        for lod in range(volume.mesh.get_manifest(label).num_lods):
            mesh = volume.mesh.get(label, lod=lod)[label]
            out[f"mesh {label} {lod}"] = [mesh.vertices.tolist(), mesh.faces.tolist()]
    return out


def skeletons(volume: Any, labels: list[int]) -> dict[str, Any]:
    by_label = {label: volume.skeleton.get(label) for label in labels}
    return {f"skeleton {n}": [s.vertices.tolist(), s.edges.tolist(), s.radius.tolist()] for n, s in by_label.items()}


def read(path: str, labels: list[int]) -> npt.NDArray[Any]:
    volume = open_volume(path)
    out = meshes(volume, labels) | skeletons(volume, labels)
    return np.frombuffer(json.dumps(out).encode(), np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("labels", type=json.loads)
    args = parser.parse_args()
    report(lambda: read(args.path, args.labels), args.out)
