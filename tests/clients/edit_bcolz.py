"""bcolz 1.x changes and lengthens an array: `edit_bcolz PATH`."""

from __future__ import annotations

import sys

import numpy as np


def main(path: str) -> None:
    import bcolz

    array = bcolz.open(path, mode="a")
    array[3:5] = 7
    array.append(np.arange(100, 125, dtype="int32"))
    array.attrs["k"] = {"a": [1.5]}
    array.flush()


if __name__ == "__main__":
    main(sys.argv[1])
