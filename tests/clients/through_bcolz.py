"""bcolz at work on a mount: `through_bcolz PATH OUT.npz`; each array there is changed in place, as through_zarr3."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from tests.clients.expected import Expected


def work(path: Path, told: Expected) -> None:
    import bcolz

    for member in sorted(p.name for p in path.iterdir()):
        array = bcolz.open(str(path / member), mode="a")
        data = np.array(array[:])
        array[3:40] = data[3:40] = data[3:40][::-1].copy()
        array[-1] = data[-1] = data[0]
        array.flush()
        told(member, bcolz.open(str(path / member), mode="r"), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    expected = Expected()
    work(args.path, expected)
    expected.save(args.out)
