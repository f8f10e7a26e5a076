"""Have igneous make shards of unsharded skeletons: `reshard_igneous PATH TARGET OUT.npy LABELS`.

It finds the skeletons of the volume PATH by listing and writes their shards to TARGET, which has the volume's info.
What cloud-volume reads from there is in the array (see read_cloudvolume_ids).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report
from tests.clients.read_cloudvolume_ids import open_volume, skeletons


def reshard(path: str, target: str, labels: list[int]) -> npt.NDArray[Any]:
    from igneous.task_creation.skeleton import create_sharded_skeletons_from_unsharded_tasks

    source, destination = (f"file://{os.path.abspath(p)}" for p in (path, target))
    with contextlib.redirect_stdout(sys.stderr):
        for task in create_sharded_skeletons_from_unsharded_tasks(source, destination, skel_dir="skeletons"):
            task()
    return np.frombuffer(json.dumps(skeletons(open_volume(target), labels)).encode(), np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("target")
    parser.add_argument("out")
    parser.add_argument("labels", type=json.loads)
    args = parser.parse_args()
    report(lambda: reshard(args.path, args.target, args.labels), args.out)
