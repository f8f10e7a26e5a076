"""The layout `zarr3`: any dataset as Zarr v3 without shards, images as OME-Zarr 0.5.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html. Stored chunks are shown unchanged if Zarr v3 has their
codecs, which is usual, since it supports all byte orders and axis orders. The headers of N5 and bcolz are removed, and
chunks that are cropped at the edge of the array are padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.encoded_chunks import without_checks
from shardfs.codecs.encoders import can_encode, can_store
from shardfs.codecs.transcode import ZLIB
from shardfs.formats import ome, zarr_metadata
from shardfs.formats.documents import print_strict
from shardfs.formats.format import View
from shardfs.formats.layouts import PlacedArray, arrays_of, levels_below, shown, with_offset
from shardfs.formats.zarr_arrays import ChunkKeys, laid_out_zarr, separator_of, with_groups
from shardfs.formats.zarr_metadata import CODEC_PARAMETERS, STRING, VLEN_UTF8
from shardfs.model.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.model.dataset import Dataset
from shardfs.model.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Surroundings

DOCUMENT = "zarr.json"
NUMCODECS = "numcodecs."


class Zarr3View(View):
    """The layout `zarr3`.

    Args:
        creates: print documents of new arrays, which keep all codecs that shardfs can encode, also those outside the
            specification, and the separator in the names of chunks. They differ from shown ones in nothing else.
    """

    name = "zarr3"

    def __init__(self, *, creates: bool = False) -> None:
        self._creates = creates

    def children(self, dataset: Dataset, names: Set[str]) -> Sequence[str]:
        return levels_below(dataset) if dataset.format != self.name else ()

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        if dataset is None:
            return Dataset(self.name, documents=_group({}))
        if dataset.format == self.name:
            return dataset  # the native layout is this one
        is_array, arrays = arrays_of(dataset)
        encode = created_encoding if self._creates else shown_encoding
        placed = [_Zarr3Array.from_collection(c, at, encode) for c, at in arrays]
        if self._creates:
            placed = [replace(p, separator=separator_of(p.stored.names)) for p in placed]
        if around.level_of is not None:  # OME-Zarr 0.5 requires the image's axis names in the levels, too
            axes = tuple(axis.name for axis in around.level_of.axes)
            placed = [replace(p, array=replace(p.array, names=axes)) for p in placed]
        documents = {} if is_array else _group(_attributes(dataset, around.below))
        return laid_out_zarr(self.name, dataset, ((p.collection(), p.documents()) for p in placed), documents)


# ---- groups ----


def _group(attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """The documents of a group."""
    return {DOCUMENT: print_strict({"zarr_format": 3, "node_type": "group", "attributes": attributes})}


def _attributes(dataset: Dataset, below: Mapping[str, Dataset]) -> Mapping[str, Any]:
    """The user's attributes, with the images as OME-Zarr 0.5."""
    attributes = ome.as_05(dataset.attributes or {})
    ranks = {}
    for path, child in below.items():
        arrays = [collection.array for collection in child.all_collections]
        ranks[path] = len(arrays[0].shape) if len(arrays) == 1 and arrays[0] is not None else -1
    ranks |= {c.path: len(c.array.shape) for c in dataset.all_collections if c.array is not None}
    images = [image for image in dataset.multiscales if all(ranks.get(x.path) == len(image.axes) for x in image.levels)]
    if not images or ome.multiscales(attributes):
        return attributes
    return {**attributes, **ome.attributes_05(images)}


# ---- arrays ----


@dataclass(frozen=True)
class _Zarr3Array(PlacedArray):
    """An array shown as Zarr v3. `separator` is between the numbers in the names of its chunks."""

    separator: str = "/"

    def collection(self) -> Collection:
        grid = self.array.grid
        axes = self.array.grid_axes
        names = ChunkKeys(f"c{self.separator}", self.separator, "c", len(grid)).names(grid)
        return shown(self.stored, self.path, self.encoding, names, axes, (c["name"] for c in _chain(self.encoding)))

    def documents(self) -> dict[str, bytes]:
        """The documents of the array and of the groups above it, by path."""
        return with_groups(self.path, _group({}), {DOCUMENT: print_strict(self._document())})

    def _document(self) -> dict[str, Any]:
        array = self.array
        document: dict[str, Any] = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": array.shape,
            "data_type": zarr_metadata.written_type(array.data_type),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": self.separator}},
            "fill_value": _fill_value(array),
            "codecs": _chain(self.encoding),
            "attributes": with_offset(array.attributes, array),
        }
        return {**document, "dimension_names": array.names} if array.names else document


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of Zarr v3 with the fewest conversions. Raise UnsupportedError for an unsupported data type."""
    encoding, dtype = array.encoding, np.dtype(array.data_type)
    codecs = _with_gzip(encoding.codecs)
    passes = all(c.name in CODEC_PARAMETERS for c in codecs) and (not array.is_cropped or can_store(codecs))
    if array.data_type == STRING:
        if encoding.serializer.name != VLEN_UTF8 or encoding.codecs != codecs or not passes:
            raise UnsupportedError("strings are shown only as they are stored, and Zarr v3 lacks these codecs")
        return ChunkEncoding(STRING, encoding.order, serializer=encoding.serializer, codecs=codecs)
    if dtype.name not in zarr_metadata.NUMBERS and dtype.kind not in "US":
        raise UnsupportedError(f"data type {dtype.name} is none of Zarr v3")
    if encoding.serializer != BYTES:
        return ChunkEncoding(dtype.newbyteorder("<").str, tuple(range(len(array.shape))))
    return ChunkEncoding(encoding.data_type, encoding.order, codecs=codecs if passes else ())


def created_encoding(array: Array) -> ChunkEncoding:
    """The encoding of a new array for chunks in the encoding of `array`. Raises the errors of `shown_encoding`."""
    encoding, codecs = shown_encoding(array), array.encoding.codecs
    keeps = all(c.name in CODEC_PARAMETERS or (c.name.startswith(NUMCODECS) and can_encode(c)) for c in codecs)
    return replace(encoding, codecs=codecs) if keeps and encoding.serializer == array.encoding.serializer else encoding


def _with_gzip(codecs: tuple[Codec, ...]) -> tuple[Codec, ...]:
    """The codecs with gzip in place of zlib, which the specification lacks. `transcode` replaces only the wrapper."""
    inner = without_checks(codecs)
    if not inner or inner[-1].name != ZLIB:
        return codecs
    return *inner[:-1], Codec("gzip", CODEC_PARAMETERS["gzip"]), *codecs[len(inner) :]


def _chain(encoding: ChunkEncoding) -> list[dict[str, Any]]:
    """The member `codecs` for this encoding."""
    chain: list[dict[str, Any]] = []
    if encoding.order != tuple(range(len(encoding.order))):
        chain.append({"name": "transpose", "configuration": {"order": encoding.order}})
    if encoding.serializer != BYTES:
        return [*chain, {"name": encoding.serializer.name}, *map(_codec, encoding.codecs)]
    dtype = np.dtype(encoding.data_type)
    endian = {"endian": "big" if dtype.str[0] == ">" else "little"} if dtype.itemsize > 1 else {}
    chain.append({"name": "bytes", "configuration": endian} if endian else {"name": "bytes"})
    return [*chain, *map(_codec, encoding.codecs)]


def _codec(codec: Codec) -> dict[str, Any]:
    defaults = CODEC_PARAMETERS.get(codec.name, codec.configuration)
    configuration = {member: codec.configuration.get(member, default) for member, default in defaults.items()}
    needs_member = configuration or codec.name.startswith(NUMCODECS)  # zarr-python requires it there, even if empty
    return {"name": codec.name, "configuration": configuration} if needs_member else {"name": codec.name}


def _fill_value(array: Array) -> Any:
    """The member `fill_value`, in the form that the specification requires for the data type."""
    kind, value = np.dtype(array.data_type).kind, array.fill_value
    if kind == "b":
        return bool(value)
    if kind == "c" and not isinstance(value, list | tuple):
        return [value, 0.0]
    return value


ZARR3_VIEW = Zarr3View()
ZARR3_CREATION = Zarr3View(creates=True)
