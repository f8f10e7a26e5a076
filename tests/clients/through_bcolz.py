"""bcolz at work on a mount: `through_bcolz PATH OUT.npz`; each array there is changed in place, as through_zarr3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.clients.expected import Expected, main

if TYPE_CHECKING:
    from pathlib import Path


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
    main(__doc__, work)
