"""Have igneous make meshes and skeletons of a small segmentation: `write_igneous ROOT MESH_SHARDING SKELETON_SHARDING`.

They are written to ROOT/plain, and to ROOT/sharded by cloud-volume; a kind whose sharding is `null` lies unsharded in
both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LABELS = (1, 20, 300, 12345, 720575940621826310, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 2)
RESOLUTION = (4, 4, 40)
MESH_INFO = {
    "@type": "neuroglancer_multilod_draco",
    "vertex_quantization_bits": 16,
    "transform": [4, 0, 0, 0, 0, 4, 0, 0, 0, 0, 40, 0],
    "lod_scale_multiplier": 1.0,
    "mip": 0,
}


def segmentation() -> npt.NDArray[np.uint64]:
    """A box for each label, all of unlike size, apart from each other."""
    data = np.zeros((60, 60, 24), np.uint64)
    for i, label in enumerate(LABELS):
        x, y = 20 * (i % 3) + 2, 20 * (i // 3) + 2
        data[x : x + 8 + i, y : y + 6 + i, 2 : 12 + i] = label
    return data


def open_volume(path: Path) -> Any:
    from cloudvolume import CloudVolume

    data = segmentation()
    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation",
        data_type="uint64",
        encoding="raw",
        resolution=RESOLUTION,
        voxel_offset=[0, 0, 0],
        chunk_size=[30, 30, 24],
        volume_size=data.shape,
        mesh="mesh",
        skeletons="skeletons",
    )
    volume = CloudVolume(f"file://{path}", info=info, compress=False, progress=False)
    volume.commit_info()
    volume[:] = data
    (path / "mesh").mkdir()
    (path / "mesh/info").write_text(json.dumps(MESH_INFO))
    return CloudVolume(f"file://{path}", progress=False)


def make_meshes(volume: Any) -> dict[int, tuple[bytes, bytes]]:
    """For each label manifest and fragments, of one to three levels of detail."""
    import zmesh
    from cloudvolume import Mesh
    from igneous.tasks.mesh.multires import process_mesh

    mesher = zmesh.Mesher(RESOLUTION)
    mesher.mesh(segmentation())
    out = {}
    for label in LABELS:
        surface = mesher.get(label, normals=False)
        mesh = Mesh(surface.vertices, surface.faces, None)
        manifest, fragments = process_mesh(volume, label, mesh, num_lod=2, min_chunk_size=(3, 3, 3))
        out[label] = manifest.to_binary(), fragments
    return out


def make_skeletons() -> dict[int, bytes]:
    import kimimaro

    skeletons = kimimaro.skeletonize(
        segmentation(),
        teasar_params={"scale": 1.5, "const": 20},
        dust_threshold=0,
        anisotropy=RESOLUTION,
        parallel=1,
        progress=False,
    )
    return {label: skeleton.to_precomputed() for label, skeleton in skeletons.items()}


def shards(sharding: Any, data: dict[int, bytes], offsets: dict[int, int] | None = None) -> dict[str, bytes]:
    from cloudvolume.datasource.precomputed.sharding import ShardingSpecification

    files: dict[str, bytes] = ShardingSpecification.from_dict(sharding).synthesize_shards(data, data_offset=offsets)
    return files


def put(directory: Path, info: dict[str, Any], sharding: Any, files: dict[str, bytes]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "info").write_text(json.dumps(info if sharding is None else {**info, "sharding": sharding}))
    for name, data in files.items():
        (directory / name).write_bytes(data)


def write(root: Path, mesh_sharding: Any, skeleton_sharding: Any) -> None:
    volume = [open_volume(root / form) for form in ("sharded", "plain")][-1]
    skeleton_info = {**volume.skeleton.meta.default_info(), "mip": 0}
    del skeleton_info["sharding"]  # null, which cloud-volume takes for unsharded and neuroglancer for a mistake
    meshes, skeletons = make_meshes(volume), make_skeletons()
    mesh_files = {f"{label}.index": manifest for label, (manifest, _) in meshes.items()}
    mesh_files |= {str(label): fragments for label, (_, fragments) in meshes.items()}
    skeleton_files = {str(label): data for label, data in skeletons.items()}
    put(root / "plain/mesh", MESH_INFO, None, mesh_files)
    put(root / "plain/skeletons", skeleton_info, None, skeleton_files)
    if mesh_sharding is not None:
        # the index of a shard is to name the manifest alone
        whole = {label: fragments + manifest for label, (manifest, fragments) in meshes.items()}
        mesh_files = shards(mesh_sharding, whole, {label: len(manifest) for label, (manifest, _) in meshes.items()})
    if skeleton_sharding is not None:
        skeleton_files = shards(skeleton_sharding, skeletons)
    put(root / "sharded/mesh", MESH_INFO, mesh_sharding, mesh_files)
    put(root / "sharded/skeletons", skeleton_info, skeleton_sharding, skeleton_files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("mesh_sharding", type=json.loads)
    parser.add_argument("skeleton_sharding", type=json.loads)
    args = parser.parse_args()
    write(args.root, args.mesh_sharding, args.skeleton_sharding)
