"""What all versions of Zarr share: chunk keys, the description of stored arrays, and the tree of shown arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.checks import Chain
from shardfs.formats import zarr_metadata
from shardfs.formats.documents import UNFIT, choice, integers, mapping_or_empty, print_json, reason
from shardfs.formats.layouts import join, laid_out
from shardfs.model.arrays import Array
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Problem
from shardfs.model.grid import FlatNames, HeadedNames, NestedNames, cell_of
from shardfs.shards.byte_layouts.single_page import MAX_INDEX_BYTES
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardfs.formats.zarr_metadata import Named
    from shardfs.model.arrays import Codec
    from shardfs.model.collection import ChunkNames
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Coords

MAX_NESTING = 16
"""The largest number of shards in each other."""


@dataclass(frozen=True)
class ChunkKeys:
    """The names of the chunks and shards of an array.

    Args:
        head: the text before the first number, such as "c/".
        separator: the text between two numbers: "/" or ".".
        scalar: the name of the only chunk of an array without axes.
        rank: the number of axes.
    """

    head: str
    separator: str
    scalar: str
    rank: int

    def names(self, grid: Coords) -> ChunkNames:
        """The names of the chunks of this grid."""
        if self.separator != "/" or not grid:
            return FlatNames(grid, self.head.encode(), self.separator.encode(), self.scalar.encode())
        if self.head and not self.head.endswith("/"):
            return HeadedNames(grid, self.head.encode())
        return NestedNames(grid, self.head.rstrip("/").encode())

    def key(self, coords: Coords) -> str:
        """The name of one chunk or shard."""
        return self.head + self.separator.join(map(str, coords)) if coords else self.scalar

    def coords(self, key: str) -> Coords | None:
        """The inverse of `key`; None if no chunk has this name."""
        if not self.rank:
            return () if key == self.scalar else None
        return cell_of(key[len(self.head) :], self.separator, self.rank) if key.startswith(self.head) else None


def separator_of(names: ChunkNames) -> str:
    """The text between two numbers in the names of stored chunks, if Zarr has such names; else a slash."""
    return names.separator.decode() if isinstance(names, FlatNames) else "/"


# ---- stored arrays ----


def opened(
    dataset: Dataset,
    path: str,
    name: str,
    doc: Any,
    unshard: Callable[[Any], tuple[Collection, dict[str, Any]] | None],
    describe: Callable[[dict[str, Any]], Collection],
) -> Dataset:
    """The dataset of an array's document `name`, sharded or not.

    A problem is added if the array cannot be shown unsharded. `indescribable` is set if other layouts cannot show it.

    Args:
        dataset: gets the collection and the shown document.
        doc: the parsed document.
        unshard: the collection of a sharded array, and the document to show; None for other arrays. Raises one of
            `UNFIT`.
        describe: the collection that the document of an unsharded array describes, with its `Array`. Raises one of
            `UNFIT`.
    """
    try:
        unsharded = unshard(doc)
        if unsharded is not None:
            documents = {name: print_json(unsharded[1])}
            dataset = replace(dataset, collections=unsharded[:1], documents=documents)
    except UNFIT as e:
        return replace(dataset, problems=(Problem(path, f"{name}: {reason(e)}"),))
    try:
        described = describe(doc if unsharded is None else unsharded[1])
    except (*UNFIT, RecursionError) as e:
        return replace(dataset, indescribable=f"{name}: {reason(e)}")
    if unsharded is None:
        return replace(dataset, unsharded=(described,))
    return replace(dataset, collections=(replace(unsharded[0], array=described.array),))


def unsharded_array(format: str, array: Array, keys: ChunkKeys, codecs: tuple[str, ...], data_type: str) -> Collection:
    """The collection of an array with an object for each chunk."""
    grid = array.grid or (1,) * keys.rank
    facts = Facts(array.shape, array.chunk, None, data_type, "none")
    layer = Layer(Unsharded(grid, keys.key, keys.coords))
    return Collection(format, "", keys.names(grid), (layer,), codecs, facts, array=array)


def described_array(
    doc: Mapping[str, Any],
    chunk: Coords,
    data_type: str,
    chain: Sequence[Named],
    names: tuple[str | None, ...] | None,
    attributes: Mapping[str, Any],
) -> Array:
    """The array of an unsharded document, whose codecs are written as the chain of Zarr v3.

    Raise one of `UNFIT` if `shape`, the fill value or the chain is invalid.

    Args:
        doc: `shape` and `fill_value` are read from it, the latter in the form of Zarr v3 or v2.
        names: the names of the axes.
    """
    shape = integers(doc["shape"], "shape", 0)
    encoding = zarr_metadata.chunk_encoding(data_type, len(shape), chain)
    fill_value = zarr_metadata.fill_value(doc.get("fill_value"), data_type)
    return Array(shape, chunk, data_type, encoding, tuple(range(len(shape))), fill_value, names, attributes=attributes)


def full_chunks(codecs: Sequence[Codec], chunk: Sequence[int], item_size: int | None) -> Chain:
    """The check of stored chunks that have their full size also at the edges of the array."""
    size = math.prod(chunk) * (item_size or 2**63)
    return Chain(codecs, (lambda coords: np.full(len(coords), size, np.uint64)) if size < 2**62 else None)


def object_member(doc: Any, name: str) -> dict[str, Any]:
    """The member of a document if it is an object; else an empty object."""
    return mapping_or_empty(mapping_or_empty(doc).get(name))


def chunks_per_shard(transformer: Mapping[str, Any], rank: int) -> Coords:
    """The chunks along each axis of the shards of a storage transformer of 2022. Raise one of `UNFIT`."""
    choice(transformer["type"], "type of shards", "indexed")
    per_shard = transformer["configuration"]["chunks_per_shard"]
    # As in zarr-python, a bare number is allowed, and shards are one chunk long along axes without a number.
    numbers = integers(per_shard if isinstance(per_shard, list) else [per_shard], "chunks_per_shard", 1)
    if len(numbers) > rank:
        raise ValueError(f"chunks_per_shard has {len(numbers)} axes, the array {rank}")
    if 16 * math.prod(numbers) > MAX_INDEX_BYTES:
        raise ValueError(f"chunks_per_shard {list(numbers)} needs an index above the limit of {MAX_INDEX_BYTES} bytes")
    return numbers + (1,) * (rank - len(numbers))


# ---- shown arrays ----


def with_groups(path: str, group: Mapping[str, bytes], array: Mapping[str, bytes]) -> dict[str, bytes]:
    """The documents `array` of the array at `path`, and the documents `group` of the groups above it, by path."""
    parts = path.split("/")
    documents = {join(*parts[:n], name): raw for n in range(1, len(parts)) for name, raw in group.items()}
    return documents | {join(path, name): raw for name, raw in array.items()}


def laid_out_zarr(
    name: str,
    dataset: Dataset,
    arrays: Iterable[tuple[Collection, Mapping[str, bytes]]],
    documents: Mapping[str, bytes],
) -> Dataset:
    """The dataset in a layout of Zarr, with the collections and documents of its arrays."""
    collections = []
    for collection, of_array in arrays:
        collections.append(collection)
        documents = {**documents, **of_array}
    return laid_out(name, dataset, collections, documents)
