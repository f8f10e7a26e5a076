"""Have zarr-python 2.18 write hierarchies of the draft of 2022: `write_zarr_draft JOBS.json`.

A job has a `root` to write to, and `arrays`: each with its `path`, the file `data` of its elements, `chunks`,
`chunks_per_shard` of each sharding transformer from the array to the store (none: unsharded), and what else is not as
usual. `erase` lists boxes (first and last corner) that are filled with zeros afterwards.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.clients.zarr_draft import zarr_of_the_draft


def write_array(zarr: SimpleNamespace, store: Any, job: dict[str, Any]) -> None:
    data = np.load(job["data"])
    transformers = [zarr.Sharding("indexed", chunks_per_shard=per) for per in job["chunks_per_shard"]]
    dummy = [zarr.Dummy("dummy_type", test_value=zarr.Dummy.TEST_CONSTANT)]
    before, after = ([], []) if "dummy" not in job else (dummy, []) if job["dummy"] == "before" else ([], dummy)
    array = zarr.api.create(
        data.shape,
        chunks=tuple(job["chunks"]),
        dtype=data.dtype,
        compressor=zarr.codecs.GZip(job["gzip"]) if "gzip" in job else None,
        fill_value=0,
        order=job.get("order", "C"),
        store=store,
        path=job["path"],
        zarr_version=3,
        dimension_separator=job.get("separator", "/"),
        storage_transformers=[*before, *transformers, *after],
        write_empty_chunks=False,
    )
    array[...] = data
    for begin, end in job.get("erase", ()):
        array[tuple(map(slice, begin, end))] = 0


def write(zarr: SimpleNamespace, job: dict[str, Any]) -> None:
    root = Path(job["root"])
    if "suffix" in job:  # of names of documents: it is read from here, and nothing sets it
        document = json.loads(zarr.Store._metadata_class.encode_hierarchy_metadata())
        root.mkdir(parents=True)
        (root / "zarr.json").write_text(json.dumps({**document, "metadata_key_suffix": job["suffix"]}))
    store = zarr.Store(str(root))
    for path in job.get("groups", ()):
        zarr.api.open_group(store, path=path, mode="w", zarr_version=3)
    for array in job["arrays"]:
        write_array(zarr, store, array)
    if job.get("consolidated"):
        zarr.api.consolidate_metadata(store, path=job["consolidated"])  # of all; a group must be named to be opened


if __name__ == "__main__":
    # The library notes in every gzip member when it was made; the same chunk must be the same bytes in both forms.
    setattr(gzip, "time", SimpleNamespace(time=lambda: 0))  # noqa: B010 - to mypy the module has no such name
    library = zarr_of_the_draft(sharding=True)
    for one in json.loads(Path(sys.argv[1]).read_text()):
        write(library, one)
