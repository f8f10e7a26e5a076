"""python-blosc2 at work on a mount: `through_blosc2 PATH OUT.npz`; the array `ramp.b2nd` is changed in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.clients.expected import Expected, main

if TYPE_CHECKING:
    from pathlib import Path

NAME = "ramp.b2nd"


def work(path: Path, told: Expected) -> None:
    import blosc2

    def array(mode: str) -> blosc2.NDArray:
        return blosc2.open(str(path / NAME), mode=mode)

    data = np.array(array("r")[:])
    array("a")[3:20, 2:9] = data[3:20, 2:9] = np.random.default_rng(5).integers(0, 2**30, (17, 7))  # no chunk as small
    array("a")[21:28, 8:16] = data[21:28, 8:16] = 0  # a chunk that is gone
    told(NAME, array("r"), data)
    zeros = array("a")
    try:
        zeros[21:28, 8:16] = 5
    except RuntimeError:
        told(NAME, array("r"), data)
        return
    raise AssertionError("python-blosc2 gives such a chunk a new number, which the frame does not have")


if __name__ == "__main__":
    main(__doc__, work)
