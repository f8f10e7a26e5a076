"""The layout `zarr2`: shows any dataset as Zarr v2, images as OME-Zarr 0.4.

Stored chunks are shown unchanged if Zarr v2 has their codec; other chunks are decoded and shown uncompressed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.encoded_chunks import without_checks
from shardfs.codecs.encoders import can_store
from shardfs.codecs.transcode import FillValue, memory_order
from shardfs.formats import ome
from shardfs.formats.documents import parse_json, print_json, print_strict
from shardfs.formats.layouts import PlacedArray, arrays_of, shown, with_offset
from shardfs.formats.zarr2.codec_names import (
    ARRAY,
    ATTRIBUTES,
    CONSOLIDATED,
    DOCUMENTS,
    FORMAT,
    GROUP,
    MARK,
    compressor,
    mark_of,
    padded,
)
from shardfs.formats.zarr_arrays import ChunkKeys, laid_out_zarr, separator_of, with_groups
from shardfs.formats.zarr_metadata import DIMENSIONS, STRING, VLEN_UTF8
from shardfs.model.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.model.dataset import Consolidation, Dataset
from shardfs.model.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.model.collection import Collection

KINDS = "biufcUS"


def shown_as_zarr2(dataset: Dataset, *, is_level: bool) -> Dataset:
    """The dataset in this layout; `is_level`: it is an array, and a level of an image that a group above describes.

    Raise UnsupportedError, with the reason, if Zarr v2 cannot express it.
    """
    is_array, arrays = arrays_of(dataset)
    levels = {level.path for image in dataset.multiscales for level in image.levels}
    placed = [
        replace(_Zarr2Array.from_collection(c, at, shown_encoding), is_level=is_level or at in levels)
        for c, at in arrays
    ]
    shown_arrays = ((p.collection(), p.documents()) for p in placed)
    return laid_out_zarr(FORMAT, dataset, shown_arrays, {} if is_array else group_documents(dataset))


# ---- groups ----


def group_documents(dataset: Dataset | None) -> dict[str, bytes]:
    """The documents of a group. `dataset` is None for a directory without documents above datasets."""
    documents = {GROUP: print_json({"zarr_format": 2})}
    if dataset is not None:
        attributes = dict(ome.as_04(dataset.attributes or {}))
        if dataset.multiscales and not ome.multiscales(attributes):
            attributes |= ome.attributes_04(dataset.multiscales)
        documents[ATTRIBUTES] = print_strict(attributes)
    return documents


def _consolidated(documents: Mapping[str, bytes]) -> bytes:
    wanted = {
        path: parse_json(path, path.rsplit("/", 1)[-1], raw)
        for path, raw in sorted(documents.items())
        if path.rsplit("/", 1)[-1] in DOCUMENTS
    }
    return print_json({"zarr_consolidated_format": 1, "metadata": wanted})


CONSOLIDATION = Consolidation(CONSOLIDATED, _consolidated)


# ---- arrays ----


@dataclass(frozen=True)
class _Zarr2Array(PlacedArray):
    """An array shown as Zarr v2. `is_level` marks a level of an image."""

    is_level: bool = False

    def collection(self) -> Collection:
        array, axes, codecs = self.array, self.array.grid_axes, (c.name for c in self.encoding.codecs)
        filler = None if self._fill_value == array.fill_value else FillValue(array, self.encoding, lazy=True)
        names = ChunkKeys("", separator_of(self.stored.names), "0", len(array.grid)).names(array.grid)
        return shown(self.stored, self.path, self.encoding, names, axes, codecs, filler)

    @property
    def _axes(self) -> tuple[str | None, ...] | None:
        """The names of all axes, which xarray needs to open an array; None if an axis has no name."""
        names = self.array.names if self.array.shape else ()
        return None if names is None or None in names else names

    @property
    def _fill_value(self) -> Any:
        """The member `fill_value`, which xarray, netCDF-C and GDAL interpret as the marker of missing values.

        Zarr v3 has this marker in the attribute `_FillValue`. Therefore `fill_value` is the marker, or None without a
        marker, and chunks that are not stored are shown, filled with the array's own fill value. Arrays without names
        of axes and levels of images do not follow these conventions. They keep their fill value and their missing
        chunks.
        """
        value = self.array.fill_value
        if self.is_level or self._axes is None:
            return value
        mark = mark_of(self.array)
        return value if mark is None and value == "NaN" else mark  # readers treat NaN as missing without a marker, too

    def documents(self) -> dict[str, bytes]:
        """The documents of the array and of the groups above it, by path."""
        array = {ARRAY: print_json(self._document()), ATTRIBUTES: print_strict(self._attributes())}
        return with_groups(self.path, group_documents(None), array)

    def _document(self) -> dict[str, Any]:
        array = self.array
        encoding = self.encoding
        return {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.chunk,
            "dtype": encoding.data_type,
            "order": "C" if encoding.order == tuple(range(len(array.shape))) else "F",
            "fill_value": padded(self._fill_value, array.data_type),
            "dimension_separator": separator_of(self.stored.names),
            "filters": None if encoding.serializer == BYTES else [{"id": encoding.serializer.name}],
            "compressor": compressor(encoding.codecs[0]) if encoding.codecs else None,
        }

    def _attributes(self) -> dict[str, Any]:
        array = self.array
        attributes = {name: value for name, value in array.attributes.items() if not _is_nan(name, value)}
        if (mark := mark_of(array)) is not None:
            attributes[MARK] = mark  # netCDF-C reads the marker from here
            if isinstance(mark, str) and np.dtype(array.data_type).kind == "f":
                del attributes[MARK]  # NaN and infinities are JSON strings, which crash netCDF-C here
        if self._axes is not None:
            attributes[DIMENSIONS] = list(self._axes)
        return with_offset(attributes, array)


def _is_nan(name: str, value: Any) -> bool:
    """Whether the attribute declares NaN as missing. It is omitted: readers know it, and JSON has no NaN."""
    return name == "missing_value" and isinstance(value, float) and math.isnan(value)


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of Zarr v2 with the fewest conversions. Raise UnsupportedError for an unsupported data type."""
    encoding, rank = array.encoding, len(array.shape)
    dtype = np.dtype(array.data_type)
    orders = tuple(range(rank)), tuple(range(rank))[::-1]
    order = next((o for o in orders if memory_order(o, array.chunk) == memory_order(encoding.order, array.chunk)), None)
    around = without_checks(encoding.codecs)
    if array.data_type == STRING:
        if order is None or encoding.serializer.name != VLEN_UTF8 or len(around) > 1 or None in map(compressor, around):
            raise UnsupportedError("strings are shown only as they are stored, and Zarr v2 lacks these codecs")
        return ChunkEncoding(STRING, order, serializer=Codec(VLEN_UTF8), codecs=around)
    if dtype.kind not in KINDS:
        raise UnsupportedError(f"data type {dtype.name} has no form in Zarr v2 that its readers share")
    is_known = len(around) == 1 and compressor(around[0]) and (can_store(around) or not array.is_cropped)
    if order is not None and encoding.serializer == BYTES and (not around or is_known):
        return ChunkEncoding(encoding.data_type, order, codecs=around)
    return ChunkEncoding(dtype.newbyteorder("<").str, orders[0])
