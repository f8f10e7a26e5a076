"""igneous at work on a mount: a volume of cloud-volume gets a smaller scale. Both write compressed chunks (`X.gz`)."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import numpy as np

from tests.clients.expected import Expected, main

if TYPE_CHECKING:
    from pathlib import Path


def downsample(path: Path, told: Expected) -> None:
    from cloudvolume import CloudVolume
    from igneous.task_creation import create_downsampling_tasks

    url = f"file://{path / 'v'}"
    info = CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation",
        data_type="uint32",
        encoding="raw",
        resolution=[4, 4, 40],
        voxel_offset=[0, 0, 0],
        chunk_size=[16, 16, 16],
        volume_size=[64, 48, 16],
    )
    volume = CloudVolume(url, info=info, progress=False, compress="gzip")
    volume.commit_info()
    volume.commit_provenance()
    small = np.random.default_rng(0).integers(1, 1 << 30, (32, 24, 16, 1), np.uint32)
    volume[:] = small.repeat(2, 0).repeat(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        for task in create_downsampling_tasks(url, num_mips=1, chunk_size=(16, 16, 16), compress="gzip"):
            task()
    told("v", CloudVolume(url, mip=1, progress=False), small)


if __name__ == "__main__":
    main(__doc__, downsample)
