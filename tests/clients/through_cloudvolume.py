"""cloud-volume at work on a mount: `through_cloudvolume WHAT PATH OUT.npz`, as through_zarr3.

volume, volume_gz: a new one is written, changed, and partly deleted, with chunks as they are or compressed.
ids: skeletons and meshes of the volume at PATH get other labels: each is uploaded anew as label + 1, and deleted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.expected import Expected
from tests.clients.read_cloudvolume_ids import read

LABELS = (1, 20, 300, 12345)


def _open(path: Path, **more: Any) -> Any:
    from cloudvolume import CloudVolume

    return CloudVolume(f"file://{path}", progress=False, cache=False, fill_missing=True, **more)


def volume(path: Path, told: Expected, *, compress: bool) -> None:
    from cloudvolume import CloudVolume

    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation",
        data_type="uint32",
        encoding="raw",
        resolution=[4, 4, 40],
        voxel_offset=[-8, 16, 0],
        chunk_size=[8, 8, 8],
        volume_size=[40, 32, 24],
    )
    cloud_volume = _open(path / "v", info=info, compress=compress, delete_black_uploads=True)
    cloud_volume.commit_info()
    cloud_volume.provenance.owners = ["nobody@example.org"]
    cloud_volume.commit_provenance()
    data = np.arange(40 * 32 * 24, dtype="u4").reshape(40, 32, 24, 1) + 1
    cloud_volume[:] = data
    told("v", _open(path / "v"), data)
    cloud_volume[0:16, 24:40, 8:16] = data[8:24, 8:24, 8:16] = 77
    told("v", _open(path / "v"), data)
    cloud_volume[-8:0, 16:24, 0:8] = data[:8, :8, :8] = 0  # black: deleted
    told("v", _open(path / "v"), data)
    from cloudvolume import Bbox

    cloud_volume.delete(Bbox((-8, 24, 0), (0, 32, 8)))
    data[:8, 8:16, :8] = 0
    told("v", _open(path / "v"), data)


def ids(path: Path, told: Expected) -> None:
    from cloudfiles import CloudFiles  # type: ignore[import-not-found] # in a virtualenv of its own

    before = json.loads(read(str(path), list(LABELS)).tobytes())
    cloud_volume = _open(path)
    for kind in ("skeletons", "mesh"):
        files = CloudFiles(f"file://{path}/{kind}", progress=False)
        for label in LABELS:
            for suffix in ("", ".index") if kind == "mesh" else ("",):
                data = (path / kind / f"{label}{suffix}").read_bytes()
                files.put(f"{label + 1}{suffix}", data, compress="gzip" if kind == "skeletons" else None)
    for label in LABELS[:2]:
        skeleton = cloud_volume.skeleton.get(label)
        skeleton.id = label + 1
        cloud_volume.skeleton.upload(skeleton)
    skeleton_files = CloudFiles(f"file://{path}/skeletons", progress=False)
    skeleton_files.delete([str(label) for label in LABELS])
    for label in LABELS:
        for name in (str(label), f"{label}.index"):
            (path / "mesh" / name).unlink()
    after = json.loads(read(str(path), [label + 1 for label in LABELS]).tobytes())
    wanted = {f"{kind} {int(n) + 1} {tail}".strip(): v for k, v in before.items() for kind, n, tail in [_parts(k)]}
    if after != wanted:
        raise AssertionError("meshes or skeletons are not what they were")
    told("ids", np.frombuffer(json.dumps(after).encode(), np.uint8), np.frombuffer(json.dumps(after).encode(), "u1"))


def _parts(name: str) -> tuple[str, str, str]:
    kind, number, *words = name.split()
    return kind, number, " ".join(words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("volume", "volume_gz", "ids"))
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    expected = Expected()
    if args.what == "ids":
        ids(args.path, expected)
    else:
        volume(args.path, expected, compress=args.what == "volume_gz")
    expected.save(args.out)
