"""python-blosc2: `read_blosc2 PATH OUT.npy`; of what is no array the bytes. Metadata is read, too."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, vlmeta: dict[str, Any] | None = None) -> npt.NDArray[Any]:
    import blosc2

    container = blosc2.open(path, mode="r")
    if isinstance(container, blosc2.ObjectArray):
        return np.asarray([json.dumps(container[i]) for i in range(len(container))])
    array = isinstance(container, blosc2.NDArray)
    told = (container.schunk if array else container).vlmeta.getall()
    if vlmeta is not None and told != vlmeta:
        raise ValueError(f"vlmeta {told}")
    return np.asarray(container[...]) if array else np.frombuffer(container[:], np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    args = parser.parse_args()
    report(lambda: read(args.path), args.out)
