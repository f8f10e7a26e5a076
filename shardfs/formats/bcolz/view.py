"""The layout `bcolz`: shows arrays with chunks along the first axis only, as bcolz 1.x writes them.

A chunk is a Blosc chunk after a 16-byte header. Stored Blosc chunks pass unchanged behind the header. Other chunks are
decoded and written as uncompressed Blosc chunks.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from shardfs.codecs.encoded_chunks import without_checks
from shardfs.codecs.transcode import FillValue, memory_order
from shardfs.formats import zarr_metadata
from shardfs.formats.bcolz.carrays import ATTRS, HEAD, TAIL, Carray, Compression, carray_documents, json_line
from shardfs.formats.documents import print_strict
from shardfs.formats.layouts import PlacedArray, arrays_of, join, laid_out, shown, with_offset
from shardfs.model.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import NumberedNames
from shardfs.shards.byte_layouts.single_page import MAX_BLOSC_CHUNKS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset

MAX_CHUNK = 2**31 - 1 - 16
"""The largest chunk, in bytes, that Blosc supports."""


def shown_as_bcolz(dataset: Dataset) -> Dataset:
    """The dataset in this layout. Raise UnsupportedError, with the reason, if bcolz cannot express it."""
    is_array, arrays = arrays_of(dataset)
    placed = [_ShownCarray.from_collection(c, at, shown_encoding) for c, at in arrays]
    documents = {} if is_array or not dataset.attributes else {ATTRS: _attributes(dataset.attributes)}
    for p in placed:
        documents |= p.documents()
    return laid_out("bcolz", dataset, (p.collection() for p in placed), documents)


def _attributes(attributes: Mapping[str, Any]) -> bytes:
    """The document of attributes, with NaN and infinities as strings."""
    return json_line(json.loads(print_strict(attributes)))


class _ShownCarray(PlacedArray):
    def collection(self) -> Collection:
        names = NumberedNames(self.array.grid[0], HEAD, TAIL)
        filler = FillValue(self.array, self.encoding)  # bcolz requires every chunk
        axes = self.array.grid_axes[:1]
        return shown(self.stored, join(self.path, "data"), self.encoding, names, axes, ("blosc",), filler)

    def documents(self) -> dict[str, bytes]:
        array, dtype = self.array, np.dtype(self.encoding.data_type)
        parameters = self.encoding.codecs[0].configuration
        compression = Compression(
            parameters["cname"], parameters["clevel"], zarr_metadata.SHUFFLES.index(parameters["shuffle"])
        )
        nbytes = math.prod(array.shape) * dtype.itemsize
        documents = carray_documents(Carray(array.shape, array.chunk[0], dtype, nbytes, compression), {})
        documents[ATTRS] = _attributes(with_offset(array.attributes, array))
        return {join(self.path, name): data for name, data in documents.items()}


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of bcolz with the fewest conversions. Raise UnsupportedError, with the reason, if there is none."""
    shape, chunk, dtype = array.shape, array.chunk, np.dtype(array.data_type)
    if not shape:
        raise UnsupportedError("bcolz has no arrays without axes")
    if any(n > 1 for n in array.grid[1:]):
        raise UnsupportedError(
            f"bcolz cuts arrays along the first axis only, but an array of {shape} has chunks of {chunk}"
        )
    if 0 in shape[1:]:
        raise UnsupportedError(f"the rows of an array of shape {shape} have no elements")
    if dtype.name not in zarr_metadata.NUMBERS:
        raise UnsupportedError(f"data type {zarr_metadata.name_of(array.data_type)} is not one of bcolz")
    if chunk[0] * math.prod(shape[1:]) * dtype.itemsize > MAX_CHUNK or array.grid[0] > MAX_BLOSC_CHUNKS:
        raise UnsupportedError(f"chunks of {chunk} are too large or too many for Blosc")
    encoding, order = array.encoding, tuple(range(len(shape)))
    parameters = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0, "typesize": dtype.itemsize}
    around = without_checks(encoding.codecs)
    passes = (
        encoding.serializer == BYTES
        and memory_order(encoding.order, chunk) == memory_order(order, chunk)
        and [c.name for c in around] == ["blosc"]
    )
    if passes:
        parameters |= {name: value for name, value in around[0].configuration.items() if name in parameters}
        if parameters["shuffle"] not in zarr_metadata.SHUFFLES:
            parameters["shuffle"] = "shuffle"
    return ChunkEncoding(
        encoding.data_type if encoding.serializer == BYTES else dtype.newbyteorder("<").str,
        order,
        # Rows must have the array's length. The last chunk may have more rows than the array.
        clipped=encoding.clipped if passes and chunk[1:] == shape[1:] else True,
        codecs=(Codec("blosc", parameters),),
        frame="bcolz",
    )
