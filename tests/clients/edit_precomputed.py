"""Documents of precomputed written by cloud-volume: `edit_precomputed ACTION PATH`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _volume(path: str, **arguments: Any) -> Any:
    from cloudvolume import CloudVolume

    return CloudVolume(f"file://{path}", progress=False, **arguments)


def create(path: str) -> None:
    from cloudvolume import CloudVolume

    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation",
        data_type="uint64",
        encoding="compressed_segmentation",
        resolution=[4, 4, 40],
        voxel_offset=[-8, 16, 0],
        chunk_size=[8, 8, 8],
        volume_size=[100, 64, 40],
    )
    _volume(path, info=info).commit_info()


def add_scale(path: str) -> None:
    volume = _volume(path)
    volume.add_scale((2, 2, 1))
    volume.commit_info()


def grow(path: str) -> None:
    volume = _volume(path)
    volume.info["scales"][0]["size"][2] += 8
    volume.info["by"] = {"exactly": [1.5]}
    volume.commit_info()


def remove_scale(path: str) -> None:
    volume = _volume(path)
    del volume.info["scales"][-1]
    volume.commit_info()


ACTIONS: dict[str, Callable[[str], None]] = {f.__name__: f for f in (create, add_scale, grow, remove_scale)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("path")
    args = parser.parse_args()
    ACTIONS[args.action](args.path)
