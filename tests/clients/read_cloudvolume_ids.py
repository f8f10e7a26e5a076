"""cloud-volume: `read_cloudvolume_ids PATH OUT.npy LABELS`, meshes and skeletons of a volume, as JSON in an array.

Each mesh at all of its levels of detail; of each the vertices and faces or edges.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, labels: list[int]) -> npt.NDArray[Any]:
    from cloudvolume import CloudVolume

    volume = CloudVolume(f"file://{os.path.abspath(path)}", cache=False, progress=False)
    out = {}
    for label in labels:
        for lod in range(volume.mesh.get_manifest(label).num_lods):
            mesh = volume.mesh.get(label, lod=lod)[label]
            out[f"mesh {label} {lod}"] = [mesh.vertices.tolist(), mesh.faces.tolist()]
        skeleton = volume.skeleton.get(label)
        out[f"skeleton {label}"] = [skeleton.vertices.tolist(), skeleton.edges.tolist(), skeleton.radius.tolist()]
    return np.frombuffer(json.dumps(out).encode(), np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("labels", type=json.loads)
    args = parser.parse_args()
    report(lambda: read(args.path, args.labels), args.out)
