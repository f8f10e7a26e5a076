"""bcolz 1.x: `read_bcolz PATH OUT.npy [--attributes JSON]`; a table gives a structured array."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, attributes: str = "") -> npt.NDArray[Any]:
    import bcolz

    array = bcolz.open(path, mode="r")
    if attributes and array.attrs.getall() != json.loads(attributes):
        raise ValueError(f"attributes {array.attrs.getall()}")
    return np.asarray(array[:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--attributes", default="")
    args = parser.parse_args()
    report(lambda: read(args.path, args.attributes), args.out)
