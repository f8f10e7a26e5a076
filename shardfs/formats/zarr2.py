"""The layout `zarr2`: any dataset as Zarr v2, images as OME-Zarr 0.4.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html. Stored chunks are shown unchanged if Zarr v2 has their codec;
other chunks are decoded and shown uncompressed.
"""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.encoders import can_store
from shardfs.codecs.transcode import FillValue, memory_order, without_checks
from shardfs.formats import ome, zarr_values
from shardfs.formats.documents import parse_json, print_json, print_strict
from shardfs.formats.format import Format
from shardfs.formats.layouts import PlacedArray, arrays_of, levels_below, shown, with_offset
from shardfs.formats.zarr_arrays import ChunkKeys, laid_out_zarr, with_groups
from shardfs.formats.zarr_values import CODEC_PARAMETERS, SHUFFLES, STRING
from shardfs.model.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.model.dataset import Consolidation, Dataset
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import FlatNames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.collection import Collection

ARRAY, GROUP, ATTRIBUTES, CONSOLIDATED = ".zarray", ".zgroup", ".zattrs", ".zmetadata"

OMITTED: Mapping[str, Sequence[str]] = {
    "gzip": (),
    "zstd": ("checksum",),  # tensorstore refuses it, and decoding does not need it
    "blosc": ("typesize",),
}
"""The codecs that both Zarr v2 and v3 have, with the parameters that only v3 has.

Codecs named `numcodecs.*` keep all their parameters.
"""

PASSING = frozenset(("bz2", "zlib", "lzma", "lz4"))
"""Further compressors of numcodecs, by their name in Zarr v2, that all readers of Zarr v2 support."""

KINDS = "biufcUS"
MARK = "_FillValue"


class Zarr2(Format):
    """The layout `zarr2`, and a format that detects Zarr v2 datasets but does not describe their arrays."""

    name = "zarr2"
    renames = False
    dataset_formats = ("zarr2",)
    documents = (ARRAY, GROUP, ATTRIBUTES)

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        own = {name: raw for name, raw in documents.items() if name in self.documents}
        if ARRAY not in own and GROUP not in own:
            return None
        return Dataset("zarr2", documents=own, closed=ARRAY in own, format_names=frozenset(own))

    def children(self, dataset: Dataset) -> Sequence[str]:
        return levels_below(dataset) if dataset.format != self.name else ()

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        if dataset is None:
            return Dataset("zarr2", documents=_group_documents(None), consolidation=CONSOLIDATION)
        if dataset.format == self.name:
            return dataset if dataset.closed else replace(dataset, consolidation=CONSOLIDATION)
        is_array, arrays = arrays_of(dataset)
        levels = {level.path for image in dataset.multiscales for level in image.levels}
        is_level = dataset.level_of is not None
        placed = [replace(_Zarr2Array.of(c, at, shown_encoding), is_level=is_level or at in levels) for c, at in arrays]
        shown_arrays = ((p.collection(), p.documents()) for p in placed)
        if is_array:
            return laid_out_zarr(self.name, dataset, children, shown_arrays, {})
        return laid_out_zarr(self.name, dataset, children, shown_arrays, _group_documents(dataset), CONSOLIDATION)


# ---- groups ----


def _group_documents(dataset: Dataset | None) -> dict[str, bytes]:
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
        if path.rsplit("/", 1)[-1] in Zarr2.documents
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
        names = ChunkKeys("", self._separator, "0", len(array.grid)).names(array.grid)
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
        own = self.array.fill_value
        if self.is_level or self._axes is None:
            return own
        mark = _mark(self.array)
        return own if mark is None and own == "NaN" else mark  # readers treat NaN as missing without a marker, too

    @property
    def _separator(self) -> str:
        names = self.stored.names
        return names.separator.decode() if isinstance(names, FlatNames) else "/"

    def documents(self) -> dict[str, bytes]:
        """The documents of the array and of the groups above it, by path."""
        array = {ARRAY: print_json(self._document()), ATTRIBUTES: print_strict(self._attributes())}
        return with_groups(self.path, _group_documents(None), array)

    def _document(self) -> dict[str, Any]:
        array, encoding = self.array, self.encoding
        return {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.chunk,
            "dtype": encoding.data_type,
            "order": "C" if encoding.order == tuple(range(len(array.shape))) else "F",
            "fill_value": self._fill_value,
            "dimension_separator": self._separator,
            "filters": None if encoding.serializer == BYTES else [{"id": encoding.serializer.name}],
            "compressor": compressor(encoding.codecs[0]) if encoding.codecs else None,
        }

    def _attributes(self) -> dict[str, Any]:
        array = self.array
        attributes = {name: value for name, value in array.attributes.items() if not _is_nan(name, value)}
        if (mark := _mark(array)) is not None:
            attributes[MARK] = mark  # netCDF-C reads the marker from here
            if isinstance(mark, str) and np.dtype(array.data_type).kind == "f":
                del attributes[MARK]  # NaN and infinities are JSON strings, which crash netCDF-C here
        if self._axes is not None:
            attributes["_ARRAY_DIMENSIONS"] = list(self._axes)
        return with_offset(attributes, array)


def _is_nan(name: str, value: Any) -> bool:
    """Whether the attribute declares NaN as missing. It is omitted: readers know it, and JSON has no NaN."""
    return name == "missing_value" and isinstance(value, float) and math.isnan(value)


def _mark(array: Array) -> Any:
    """The marker of missing values, as a fill value; None if the array has none, or one of another type."""
    mark = array.attributes.get(MARK)
    try:
        return None if mark is None else zarr_values.fill_value(_decoded(mark, array.data_type), array.data_type)
    except ValueError:
        return None


def _decoded(mark: Any, data_type: str) -> Any:
    """The marker as JSON numbers. xarray writes floats in Zarr v3 as base64 of a float64, complex numbers as two."""
    kind = np.dtype(data_type).kind
    if kind == "c" and isinstance(mark, list):
        return [_decoded(part, "f8") for part in mark]
    if kind != "f" or not isinstance(mark, str) or mark in zarr_values.NAMES_OF_FLOATS:
        return mark
    raw = base64.b64decode(mark, validate=True)
    return struct.unpack("<d", raw)[0] if len(raw) == struct.calcsize("<d") else mark


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of Zarr v2 with the fewest conversions. Raise UnsupportedError for an unsupported data type."""
    stored, rank = array.encoding, len(array.shape)
    dtype = np.dtype(array.data_type)
    orders = tuple(range(rank)), tuple(range(rank))[::-1]
    order = next((o for o in orders if memory_order(o, array.chunk) == memory_order(stored.order, array.chunk)), None)
    around = without_checks(stored.codecs)
    if array.data_type == STRING:
        if order is None or stored.serializer.name != "vlen-utf8" or len(around) > 1 or None in map(compressor, around):
            raise UnsupportedError("strings are shown only as they are stored, and Zarr v2 lacks these codecs")
        return ChunkEncoding(STRING, order, serializer=Codec("vlen-utf8"), codecs=around)
    if dtype.kind not in KINDS:
        raise UnsupportedError(f"data type {dtype.name} has no form in Zarr v2 that its readers share")
    is_known = len(around) == 1 and compressor(around[0]) and (can_store(around) or not array.is_cropped)
    if order is not None and stored.serializer == BYTES and (not around or is_known):
        return ChunkEncoding(stored.data_type, order, codecs=around)
    return ChunkEncoding(dtype.newbyteorder("<").str, orders[0])


def compressor(codec: Codec) -> dict[str, Any] | None:
    """The member `compressor` of Zarr v2 for a codec; None if some readers of Zarr v2 lack the codec."""
    name = codec.name.removeprefix("numcodecs.")
    if name in PASSING and name != codec.name:
        return {"id": name, **codec.configuration}
    if name not in OMITTED:
        return None
    defaults = {member: value for member, value in CODEC_PARAMETERS[name].items() if member not in OMITTED[name]}
    parameters = {member: codec.configuration.get(member, default) for member, default in defaults.items()}
    if isinstance(shuffle := parameters.get("shuffle"), str):
        parameters["shuffle"] = SHUFFLES.index(shuffle) if shuffle in SHUFFLES else 0
    return {"id": name, **parameters}


ZARR2 = Zarr2()
