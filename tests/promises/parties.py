"""The other programs, which write the source without shardfs."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
import zarr

from tests.promises.forms import VOLUMES
from tests.write.tokens import content, where

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.promises.place import Place
    from tests.write.tokens import Array


def _new_shard(place: Place, number: int, token: int | None) -> tuple[str, bytes | None]:
    """The key of a chunk's shard, and its new bytes as the form's own library writes them; None if it is empty."""
    tokens = place.stored_tokens()
    tokens.pop(number, None)
    key = place.target.shard_key(place.target.chunks[number])
    return key, place.rendered(tokens if token is None else {**tokens, number: token}).get(key)


def replaces(place: Place, number: int, token: int | None) -> None:
    """Write the shard beside the old one and rename it, or put the object."""
    key, data = _new_shard(place, number, token)
    if data is None:
        place.store.remove(key)
    else:
        place.store.put(key, data)


def overwrites(place: Place, number: int, token: int | None) -> None:
    """Write into the same file."""
    key, data = _new_shard(place, number, token)
    assert data is not None
    (place.top / "source" / key).write_bytes(data)


def _block(place: Place, number: int, token: int | None) -> tuple[tuple[slice, ...], Array]:
    chunk = place.target.chunk
    block = np.zeros(chunk, np.uint32) if token is None else content(token, chunk)
    return where(place.target.chunks[number], chunk), block


def write_zarr(place: Place, number: int, token: int | None) -> None:
    """zarr-python reads the shard, and writes it whole, without locks and conditions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of codecs behind shards
        array = zarr.open_array(place.store.url, mode="r+", storage_options=place.store.options or None)
        region, block = _block(place, number, token)
        array[region] = block


def write_tensorstore(mode: str, place: Place, number: int, token: int | None) -> None:
    """tensorstore, with a kind of lock (`file_io_locking`)."""
    store = {"driver": "file", "path": f"{place.store.url}/", "file_io_sync": False}
    region, block = _block(place, number, token)
    spec: Any = {"driver": "zarr3", "kvstore": store}
    if place.cell.form in VOLUMES:
        spec["driver"] = "neuroglancer_precomputed"
        region = (*region, slice(None))
        block = block[..., None]
    context = ts.Context({"file_io_locking": {"mode": mode}})
    ts.open(spec, context=context).result()[region].write(block).result()


PROGRAMS: dict[str, Callable[[Place, int, int | None], None]] = {
    "replaces": replaces,
    "overwrites": overwrites,
    "zarr-python": write_zarr,
    **{f"tensorstore-{m}": partial(write_tensorstore, m) for m in ("os", "lockfile", "none", "non_atomic")},
}
"""Write a chunk of this number and token; None: remove it."""
