"""The layout `bcolz`: arrays that are cut along the first axis alone, as bcolz 1.x reads them.

A chunk is a Blosc chunk behind 16 bytes. What is compressed with Blosc passes; everything else is decoded and put into
Blosc chunks that are not compressed.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardfs import zarr_values
from shardfs.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.errors import UnsupportedError
from shardfs.formats import print_strict
from shardfs.formats.bcolz.carrays import ATTRS, HEAD, TAIL, Carray, Compression, carray_documents, json_line
from shardfs.grid import MappedNames, NumberedNames
from shardfs.model import Collection, Dataset
from shardfs.shards import MAX_BLOSC_CHUNKS
from shardfs.transcode import FillValue, memory_order, transcoder, without_checks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shardfs.model import ChunkNames

MAX_CHUNK = 2**31 - 1 - 16
"""Bytes, of Blosc."""


def laid_out(dataset: Dataset) -> Dataset:
    """A dataset of any other format. Raise UnsupportedError, with the reason, for what bcolz has not."""
    if why := "; ".join(p.why for p in dataset.problems) or dataset.indescribable:
        raise UnsupportedError(why)
    stored = (*dataset.collections, *dataset.unsharded)
    is_array = len(stored) == 1 and not dataset.multiscales
    if dataset.closed and not is_array:
        raise UnsupportedError(f"{dataset.format} does not tell what it is")
    placed = [_Placed(c, "" if is_array else c.path) for c in stored]
    documents = {} if is_array or not dataset.attributes else {ATTRS: _attributes(dataset.attributes)}
    for p in placed:
        documents |= p.documents()
    return Dataset(
        "bcolz",
        tuple(p.collection() for p in placed),
        documents,
        closed=dataset.closed,
        unwalked=dataset.unwalked,
        hidden=dataset.hidden | dataset.form,
        scope=dataset.scope,
    )


def _attributes(attributes: Mapping[str, Any]) -> bytes:
    """Without the numbers that JSON does not have."""
    return json_line(json.loads(print_strict(attributes)))


class _Placed:
    """An array of any source, shown at a path below its dataset."""

    def __init__(self, stored: Collection, path: str) -> None:
        if stored.array is None:
            what = f"{stored.facts.data_type or 'what is no array'} in codecs {', '.join(stored.codecs)}"
            raise UnsupportedError(f"{stored.path}: {what} has no description")
        self._stored, self._path, self._array = stored, path, stored.array
        self._shown = shown_encoding(self._array)

    def _below(self, name: str) -> str:
        return f"{self._path}/{name}" if self._path else name

    def collection(self) -> Collection:
        stored = self._stored
        return replace(
            stored,
            path=self._below("data"),
            names=self._names(),
            codecs=("blosc",),
            transform=transcoder(self._array, self._shown),
            shards=stored.path if stored.shards is None else stored.shards,
            filler=FillValue(self._array, self._shown),  # bcolz wants every chunk
        )

    def _names(self) -> ChunkNames:
        axis, rank = self._array.grid_axes[0], len(self._stored.layers[-1].format.grid)
        names = NumberedNames(self._array.grid[0], HEAD, TAIL)
        return names if (axis, rank) == (0, 1) else MappedNames(names, (axis,), rank)

    def documents(self) -> dict[str, bytes]:
        array, dtype = self._array, np.dtype(self._shown.data_type)
        told = self._shown.codecs[0].configuration
        compression = Compression(told["cname"], told["clevel"], zarr_values.SHUFFLES.index(told["shuffle"]))
        nbytes = math.prod(array.shape) * dtype.itemsize
        attributes = dict(array.attributes)
        if array.offset is not None and any(array.offset):
            attributes.setdefault("offset", list(array.offset))
        documents = carray_documents(Carray(array.shape, array.chunk[0], dtype, nbytes, compression), {})
        documents[ATTRS] = _attributes(attributes)
        return {self._below(name): data for name, data in documents.items()}


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding for which least has to be done. Raise UnsupportedError, with the reason, if bcolz has none."""
    shape, chunk, dtype = array.shape, array.chunk, np.dtype(array.data_type)
    if not shape:
        raise UnsupportedError("bcolz has no arrays without axes")
    if any(n > 1 for n in array.grid[1:]):
        raise UnsupportedError(f"bcolz cuts arrays along the first axis only, and chunks of {shape} are {chunk}")
    if 0 in shape[1:]:
        raise UnsupportedError(f"an array of {shape} has rows without elements")
    if dtype.name not in zarr_values.NUMBERS:
        raise UnsupportedError(f"data type {dtype.name} has no form in bcolz")
    if chunk[0] * math.prod(shape[1:]) * dtype.itemsize > MAX_CHUNK or array.grid[0] > MAX_BLOSC_CHUNKS:
        raise UnsupportedError(f"chunks of {chunk} are too large or too many for Blosc")
    stored, order = array.encoding, tuple(range(len(shape)))
    told = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0, "typesize": dtype.itemsize}
    around = without_checks(stored.codecs)
    passes = (
        stored.serializer == BYTES
        and memory_order(stored.order, chunk) == memory_order(order, chunk)
        and [c.name for c in around] == ["blosc"]
    )
    if passes:
        told |= {name: value for name, value in around[0].configuration.items() if name in told}
        if told["shuffle"] not in zarr_values.SHUFFLES:
            told["shuffle"] = "shuffle"
    return ChunkEncoding(
        stored.data_type if stored.serializer == BYTES else dtype.newbyteorder("<").str,
        order,
        # Rows must have the length that the array says; in a last chunk there may be more of them.
        clipped=stored.clipped if passes and chunk[1:] == shape[1:] else True,
        codecs=(Codec("blosc", told),),
        frame="bcolz",
    )
