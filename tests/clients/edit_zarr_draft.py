"""Documents of the draft of 2022 written by zarr-python 2.18: `edit_zarr_draft ACTION ROOT`."""

from __future__ import annotations

import argparse
from typing import Any

from tests.clients.zarr_draft import zarr_of_the_draft

ACTIONS = ("create", "create_sharded", "resize", "attributes", "consolidate", "fill")


def act(action: str, root: str) -> None:
    zarr: Any = zarr_of_the_draft(sharding=True)
    store = zarr.Store(root)
    if action in ("create", "create_sharded"):
        zarr.api.open_group(store, path="g", mode="a", zarr_version=3)
        transformers = [zarr.Sharding("indexed", chunks_per_shard=(2, 2))] if action == "create_sharded" else []
        name, shape = f"g/{action}", (7, 10)
        zarr.api.create(
            shape, chunks=(2, 3), dtype="u2", store=store, path=name, zarr_version=3, storage_transformers=transformers
        )[:] = 1
        return
    if action == "consolidate":
        zarr.api.consolidate_metadata(store, path="g")
        return
    array = zarr.api.open(store, path="g/create_sharded", mode="r+", zarr_version=3)
    if action == "fill":
        array[:] = 2
    elif action == "resize":
        array.resize(9, 20)
    else:
        array.attrs["b"] = {"c": [1.5, None]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("root")
    args = parser.parse_args()
    act(args.action, args.root)
