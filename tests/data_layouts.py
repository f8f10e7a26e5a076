"""Arrays of Zarr v3 for layouts to show: any data type, chunk, codecs, keys and fill value that tensorstore writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from hypothesis import strategies as st

from tests.datasets import BIG, BLOSC, CRC, GZIP, LITTLE, ZSTD, sharding, transpose

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.datasets import Array as Data

BYTE: Any = {"name": "bytes"}


@dataclass(frozen=True)
class Written:
    """An array and how it is stored; in shards, if `shard` is given. `members` are further ones of its document."""

    data: Data
    chunk: Sequence[int]
    chain: Sequence[Any] = (LITTLE,)
    shard: Sequence[int] = ()
    members: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        write_zarr(path, self.data, self.chunk, self.chain, shard=self.shard, **self.members)


def write_zarr(
    path: Path, data: Data, chunk: Sequence[int], chain: Sequence[Any], *, shard: Sequence[int] = (), **members: Any
) -> None:
    """An array written by tensorstore, in the place of any other; in shards, if `shard` is given."""
    metadata = {
        "shape": list(data.shape),
        "data_type": data.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard or chunk)}},
        "codecs": [sharding(chunk, chain)] if shard else list(chain),
        "fill_value": [0, 0] if data.dtype.kind == "c" else np.zeros((), data.dtype).item(),
        **members,
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    ts.open(spec, create=True, delete_existing=True).result().write(data).result()


DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
FILLS: dict[str, list[Any]] = {
    "b": [False, True],
    "u": [0, 1, 255],
    "i": [0, -1],
    "f": [0.0, -0.5, "NaN", "-Infinity"],
    "c": [[0, 0], [1.5, "NaN"], ["Infinity", -0.5]],
}
AROUND: tuple[list[Any], ...] = ([], [GZIP], [ZSTD], [BLOSC], [CRC], [GZIP, CRC], [ZSTD, CRC], [ZSTD, GZIP])


Grid = tuple[list[int], list[int], dict[str, Any]]
"""The shape of an array and of its chunks, and members of its document that belong to them."""


def element(fill: Any, dtype: Any) -> Any:
    """A fill value of a document as an element."""
    if isinstance(fill, list):
        return np.array(complex(*(element(part, "f8") for part in fill))).astype(dtype)
    return np.array(float(fill.replace("Infinity", "inf")) if isinstance(fill, str) else fill).astype(dtype)


@st.composite
def grids(draw: st.DrawFn, least_rank: int = 0) -> Grid:
    rank = draw(st.integers(least_rank, 4))
    chunk = [draw(st.integers(1, 4)) for _ in range(rank)]
    return [draw(st.integers(1, 9)) for _ in range(rank)], chunk, {}


@st.composite
def arrays(draw: st.DrawFn, dtypes: Sequence[str] = DTYPES, of_grids: st.SearchStrategy[Grid] | None = None) -> Written:
    """With islands of the fill value, so that chunks are missing."""
    shape, chunk, members = draw(grids() if of_grids is None else of_grids)
    rank = len(shape)
    shard = [c * draw(st.integers(1, 3)) for c in chunk] if rank and draw(st.booleans()) else []
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    blosc = {**BLOSC, "configuration": {**BLOSC["configuration"], "typesize": dtype.itemsize}}
    chain = [blosc if c is BLOSC else c for c in draw(st.sampled_from(AROUND))]
    chain.insert(0, draw(st.sampled_from((LITTLE, BIG))) if dtype.itemsize > 1 else BYTE)
    order = draw(st.sampled_from((None, tuple(range(rank))[::-1], tuple(draw(st.permutations(range(rank)))))))
    if order:
        chain.insert(0, transpose(*order))
    name, separator = draw(st.sampled_from(("default", "v2"))), draw(st.sampled_from("/."))
    fill = draw(st.sampled_from(FILLS[dtype.kind]))
    data = (np.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 2))):
        box = tuple(slice(draw(st.integers(0, n - 1)), draw(st.integers(1, n))) for n in shape)
        data[box] = element(fill, dtype)
    keys = {"name": name, "configuration": {"separator": separator}}
    return Written(data, chunk, chain, shard, {"fill_value": fill, "chunk_key_encoding": keys, **members})


def equal(one: Data, other: Data) -> bool:
    """In shape, kind and value, NaN or not; byte orders may differ."""
    if one.shape != other.shape or one.dtype.newbyteorder("=") != other.dtype.newbyteorder("="):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
