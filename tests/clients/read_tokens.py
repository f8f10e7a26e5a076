"""Reads chunks natively at random for a while, from an array that stays open, as readers have it.

`read_tokens TOOL PATH GRID CHUNK SECONDS SEED` prints JSON: how many reads, and what was wrong. On a slow machine it
takes longer than SECONDS, for there are ten reads at least in each. A token's last two digits are the chunk's number.
Needs numpy and the tool only.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.write import tokens

if TYPE_CHECKING:
    from collections.abc import Callable

Coords = tuple[int, ...]


def opened(tool: str, path: str) -> Callable[[tuple[slice, ...]], Any]:
    """What reads a part of the array."""
    if tool == "zarr":
        import zarr

        array = zarr.open_array(path, mode="r")
        return lambda where: np.asarray(array[where])
    if tool == "cloudvolume":
        from cloudvolume import CloudVolume

        volume = CloudVolume(f"file://{path}", progress=False, fill_missing=True)
        return lambda where: np.asarray(volume[where])[..., 0]
    if tool == "z5":
        import z5py

        group, _, name = path.rpartition("/")
        dataset = z5py.File(group, mode="r", use_zarr_format=True, zarr_format=3)[name]
        return lambda where: np.asarray(dataset[where])
    import tensorstore as ts

    store = {"driver": "file", "path": f"{path}/"}
    tensor = ts.open({"driver": tool, "kvstore": store}).result()
    if tool == "neuroglancer_precomputed":
        tensor = tensor[..., 0]
    return lambda where: np.asarray(tensor[where].read().result())


def main(tool: str, path: str, grid: Coords, chunk: Coords, seconds: float, seed: int) -> dict[str, Any]:
    read, chance = opened(tool, path), random.Random(seed)
    chunks = tokens.grid_of(grid)
    reads, wrong = 0, list[str]()
    end = time.monotonic() + seconds
    while (time.monotonic() < end or reads < 10 * seconds) and len(wrong) < 10:
        number = chance.randrange(len(chunks))
        reads += 1
        try:
            token = tokens.token_of(read(tokens.where(chunks[number], chunk)))
        except Exception as e:  # noqa: BLE001 - whatever a library says of a shard that it cannot read
            wrong.append(f"chunk {number}: {type(e).__name__}: {str(e)[:500]}")
            continue
        if token is None or token % 100 != number:
            wrong.append(f"chunk {number}: {token}")
    return {"reads": reads, "wrong": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    grid, chunk = (tuple(json.loads(word)) for word in words[2:4])
    report = main(words[0], words[1], grid, chunk, float(words[4]), int(words[5]))
    print(json.dumps(report))
