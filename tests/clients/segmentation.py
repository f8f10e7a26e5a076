"""cloud-volume with its defaults, which compress files: `segmentation write PATH` writes a segmentation with skeletons
and legacy meshes, `segmentation compare PATH OTHER` fails unless both have the same voxels, skeletons and meshes.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

LABELS = (1, 2, 5)
TRIANGLES = np.array([[0, 1, 2], [1, 2, 3]], np.uint32)


def open_volume(path: str, info: Any = None) -> Any:
    from cloudvolume import CloudVolume

    return CloudVolume(f"file://{path}", info=info, progress=False, cache=False)


def write(path: str) -> None:
    from cloudvolume import CloudVolume, Mesh, Skeleton

    random = np.random.default_rng(0)
    data = random.integers(0, 9, (50, 40, 30)).astype(np.uint64)
    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation",
        data_type="uint64",
        encoding="raw",
        resolution=[4, 4, 40],
        voxel_offset=[3, 0, -5],
        chunk_size=[16, 16, 16],
        volume_size=data.shape,
        mesh="mesh",
        skeletons="skeletons",
    )
    volume = open_volume(path, info)
    volume.commit_info()
    volume.commit_provenance()
    volume[:] = data
    volume.skeleton.meta.info = volume.skeleton.meta.default_info()
    volume.skeleton.meta.commit_info()
    edges = np.array([[0, 1], [1, 2], [2, 3]], np.uint32)
    volume.skeleton.upload([Skeleton(random.random((4, 3), np.float32), edges, segid=label) for label in LABELS])
    volume.mesh.put([Mesh(random.random((4, 3), np.float32), TRIANGLES, None, segid=label) for label in LABELS])


def compare(path: str, other: str) -> None:
    a, b = open_volume(path), open_volume(other)
    if not np.array_equal(a[:], b[:]):
        raise ValueError("the voxels differ")
    for label in LABELS:
        for x, y in ((a.skeleton, b.skeleton), (a.mesh, b.mesh)):
            if not np.array_equal(x.get(label).vertices, y.get(label).vertices):
                raise ValueError(f"a skeleton or mesh of {label} differs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", choices=("write", "compare"))
    parser.add_argument("paths", nargs="+")
    args = parser.parse_args()
    if args.call == "write":
        write(*args.paths)
    else:
        compare(*args.paths)
