"""Reads and writes the documents of arrays of bcolz 1.x.

Only the source code of bcolz defines its files: https://github.com/Blosc/bcolz, `carray_ext.pyx`, `ctable.py`,
`attrs.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.codecs.encoded_chunks import BCOLZ_HEADER
from shardfs.formats import zarr_metadata
from shardfs.formats.bcolz.values import integers, numpy_dtype
from shardfs.formats.documents import UNFIT, integer, mapping_or_empty, parse_json, reason
from shardfs.model.arrays import Array, ChunkEncoding, Codec
from shardfs.model.collection import Collection, Facts, Layer, Transform
from shardfs.model.dataset import Dataset
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import NumberedNames, ceil_div
from shardfs.shards.byte_layouts.single_page import BLOSC_HEADER, blosc_size
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    import numpy as np

    from shardfs.model.values import U64, Coords, Sizes

SIZES, STORAGE, ATTRS, COLUMNS = "meta/sizes", "meta/storage", "__attrs__", "__rootdirs__"
FORM = frozenset(("meta", "data", ATTRS))
HEAD, TAIL = b"__", b".blp"
"""The parts of a chunk's name before and after its number, such as `__0.blp`."""


class BlpHeader(Transform):
    """Adds bcolz's 16-byte header to each chunk: magic, version 1, and the number 1 of chunks."""

    name = "bcolz header"
    unwritable = None
    head = BCOLZ_HEADER

    def sizes(self, coords: U64, stored_sizes: Sizes) -> Sizes:
        return stored_sizes + len(self.head)

    def show(self, coords: Coords, stored_bytes: bytes) -> bytes:
        return self.head + self._whole(stored_bytes)

    def work(self, coords: Coords, stored_size: int) -> int:
        return len(self.head) + stored_size

    def store(self, coords: Coords, shown_bytes: bytes) -> bytes:
        if not shown_bytes.startswith(self.head[:4]):
            raise ValueError(f"not a chunk of bcolz: it should begin with {self.head[:4]!r}, not {shown_bytes[:4]!r}")
        return self._whole(shown_bytes[len(self.head) :])

    def _whole(self, chunk: bytes) -> bytes:
        if blosc_size(chunk[:BLOSC_HEADER]) != len(chunk):
            raise ValueError(f"not a whole Blosc chunk: {len(chunk)} bytes are not the size in its header")
        return chunk

    def is_exact(self, coords: Coords, shown_bytes: bytes) -> bool:
        return shown_bytes.startswith(self.head)


class Compression(NamedTuple):
    """The compression of new chunks by bcolz. Readers do not need it."""

    library: str = "blosclz"
    level: int = 5
    shuffle: int = 1


class Carray(NamedTuple):
    """An array with chunks along the first axis. `cbytes`, the compressed size, is informational."""

    shape: Coords
    chunklen: int
    dtype: np.dtype[Any]
    cbytes: int
    compression: Compression

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return ceil_div(self.shape[0], self.chunklen)


def json_line(document: Any) -> bytes:
    """The document as a line of ASCII JSON, the only encoding that bcolz can read."""
    return json.dumps(document, ensure_ascii=True).encode("ascii") + b"\n"


def carray_documents(array: Carray, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """The documents of an array of bcolz 1.x, by path."""
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    library, level, shuffle = array.compression
    storage = {
        "dtype": _dtype_member(array.dtype),
        "cparams": {"clevel": level, "shuffle": shuffle, "cname": library, "quantize": 0},
        "chunklen": array.chunklen,
        "expectedlen": array.shape[0],
        "dflt": _zero(array.dtype),
    }
    return {
        SIZES: json_line({"shape": list(array.shape), "nbytes": nbytes, "cbytes": array.cbytes}),
        STORAGE: json_line(storage),
        ATTRS: json_line(attributes),
    }


def _dtype_member(dtype: np.dtype[Any]) -> Any:
    """The member `dtype` in a form that bcolz can pass to numpy, which refuses the list of fields that bcolz writes."""
    if dtype.names is None:
        return str(dtype) if dtype.subdtype is None else [_dtype_member(dtype.subdtype[0]), list(dtype.shape)]
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": list(dtype.names),
        "formats": [_dtype_member(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _zero(dtype: np.dtype[Any]) -> Any:
    if dtype.fields is not None and dtype.names is not None:
        return [_zero(dtype.fields[name][0]) for name in dtype.names]
    return {"b": False, "U": "", "S": "", "f": 0.0}.get(dtype.kind, 0)


# ---- what other layouts need to know ----


def described(array: Carray, frame: Literal["none", "bcolz"], attributes: Mapping[str, Any]) -> Array:
    """The description of an array for other layouts.

    Raise ValueError, with the reason, if the elements are not numbers or the rows have no elements.
    """
    dtype = array.dtype
    shape = array.shape
    if dtype.name not in zarr_metadata.NUMBERS:
        raise ValueError(f"data type {dtype!s:.80} is not a number type")
    if 0 in shape[1:]:
        raise ValueError(f"the rows of an array of shape {shape} have no elements")
    library, level, shuffle = array.compression
    parameters = {"cname": library, "clevel": level, "shuffle": zarr_metadata.SHUFFLES[shuffle]}
    encoding = ChunkEncoding(
        dtype.str,
        tuple(range(len(shape))),
        clipped=True,  # the last chunk may also be full, as its header says; bcolz reads both
        codecs=(Codec("blosc", {**parameters, "typesize": dtype.itemsize, "blocksize": 0}),),
        frame=frame,
    )
    return Array(
        shape,
        (array.chunklen, *shape[1:]),
        dtype.newbyteorder("=").str,
        encoding,
        (0, *[None] * (len(shape) - 1)),
        zarr_metadata.fill_value(None, dtype.str),  # unused, since bcolz stores all chunks
        attributes=attributes,
    )


def open_carray(path: str, sizes: Mapping[str, Any], storage: Mapping[str, Any], attributes: bytes | None) -> Dataset:
    """The dataset of a bcolz 1.x array, which already has a file for each chunk.

    It is `indescribable`, with the reason, if its documents are not those of such an array.
    """
    dataset = Dataset("bcolz", closed=True, format_names=FORM)
    try:
        shape = integers(sizes["shape"], "shape", 0)
        if not shape:
            raise ValueError("shape should have at least one axis")
        dtype = numpy_dtype(storage["dtype"], "little")
        array = Carray(shape, integer(storage["chunklen"], "chunklen", 1), dtype, 0, compression_of(storage))
        description = described(array, "bcolz", {} if attributes is None else attributes_of(path, attributes))
    except (*UNFIT, CorruptShardError) as e:
        return replace(dataset, indescribable=reason(e))
    names = NumberedNames(array.chunks, HEAD, TAIL)
    layer = Layer(Unsharded((array.chunks,), lambda coords: f"__{coords[0]}.blp", lambda key: _coords_of(names, key)))
    facts = Facts(shape, description.chunk, None, str(dtype), "none")
    collection = Collection("bcolz", "data", names, (layer,), ("blosc",), facts, array=description)
    return replace(dataset, unsharded=(collection,))


def _coords_of(names: NumberedNames, key: str) -> Coords | None:
    number = names.parse(0, key.encode(errors="surrogateescape"))
    return None if number is None else (number,)


def compression_of(storage: Mapping[str, Any]) -> Compression:
    """The compression in the member `cparams` of `meta/storage`. Invalid values become bcolz's defaults."""
    default, parameters = Compression(), mapping_or_empty(storage.get("cparams"))
    level, shuffle = parameters.get("clevel"), parameters.get("shuffle")
    return Compression(
        str(parameters.get("cname", default.library)),
        level if isinstance(level, int) and 0 <= level <= 9 else default.level,
        int(shuffle) if isinstance(shuffle, int) and 0 <= shuffle < len(zarr_metadata.SHUFFLES) else default.shuffle,
    )


def attributes_of(path: str, raw: bytes) -> Mapping[str, Any]:
    """The attributes in the document `__attrs__`. Raise CorruptShardError if it is not JSON."""
    return mapping_or_empty(parse_json(path, ATTRS, raw))
