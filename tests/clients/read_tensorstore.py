"""tensorstore: `read_tensorstore DRIVER PATH OUT.npy [--scale N]`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(driver: str, path: str, scale: int | None) -> npt.NDArray[Any]:
    import tensorstore

    spec: dict[str, Any] = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}
    if scale is not None:
        spec["scale_index"] = scale
    return np.asarray(tensorstore.open(spec).result().read().result())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("driver")
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("--scale", type=int)
    args = parser.parse_args()
    report(lambda: read(args.driver, args.path, args.scale), args.out)
