"""neuroglancer's Python package: `read_neuroglancer PATH OUT.npy NAMES`, annotations as JSON in an array.

NAMES: for each directory of an index the names of its unsharded form, ids or cells.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.clients.outcome import report


def read(path: str, names: dict[str, list[str]]) -> npt.NDArray[Any]:
    from neuroglancer.read_precomputed_annotations import AnnotationReader

    reader = AnnotationReader(f"file://{os.path.abspath(path)}/")
    out: dict[str, Any] = {}
    for name in names[reader.metadata["by_id"]["key"]]:
        out[f"id {name}"] = repr(reader.by_id[int(name)])
    for index in reader.relationships.values():
        key = index.metadata["key"]
        out.update({f"{key} {name}": [repr(a) for a in index[int(name)]] for name in names[key]})
    for level in reader.spatial:
        key = level.metadata["key"]
        out.update({f"{key} {name}": [repr(a) for a in level[tuple(map(int, name.split("_")))]] for name in names[key]})
    return np.frombuffer(json.dumps(out).encode(), np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("out")
    parser.add_argument("names", type=json.loads)
    args = parser.parse_args()
    report(lambda: read(args.path, args.names), args.out)
