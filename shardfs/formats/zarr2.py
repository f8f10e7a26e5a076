"""The layout `zarr2`: any dataset as Zarr v2, images as OME-Zarr 0.4.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html. Stored chunks are shown as they are wherever Zarr v2 has
their codec; others are decoded and shown uncompressed.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs import ome
from shardfs.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.codecs import can_store
from shardfs.errors import UnsupportedError
from shardfs.formats import OfDocuments, Pairing, System, parse_json, print_json, print_strict
from shardfs.grid import FlatNames, NestedNames
from shardfs.layouts import Placed, arrays_of, laid_out, shown, with_offset
from shardfs.model import Consolidation, Dataset
from shardfs.transcode import memory_order, without_checks
from shardfs.zarr_values import SHUFFLES, STRING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model import ChunkNames, Collection

ARRAY, GROUP, ATTRIBUTES, CONSOLIDATED = ".zarray", ".zgroup", ".zattrs", ".zmetadata"

MEMBERS: Mapping[str, Sequence[str]] = {
    "gzip": ("level",),
    "zstd": ("level",),  # no `checksum`: tensorstore refuses it, and decoding does without
    "blosc": ("cname", "clevel", "shuffle", "blocksize"),
}
"""The parameters of codecs that both versions have; those that are called `numcodecs.` keep theirs."""

DEFAULTS: Mapping[str, Any] = {"level": 5, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0}

PASSING = frozenset(("bz2", "zlib", "lzma", "lz4"))
"""Further compressors of numcodecs, by their name in Zarr v2: those that all its readers bring."""

KINDS = "biufc"
FLOAT64 = 8


class Zarr2(OfDocuments):
    """See `formats.Format` and `formats.View`. Of Zarr v2 itself it says only that it is there."""

    name = "zarr2"
    renames = False
    systems: Sequence[System] = ()  # the native layout shows none of it otherwise
    pairings = (
        Pairing(
            "zarr3",
            "pass in Blosc, Zstandard, gzip, a codec of numcodecs or none; else decoded",
            "zarr-python 2.18 and 3, tensorstore, z5py, GDAL, netCDF-C, xarray, ome-zarr",
        ),
        Pairing("zarr3-draft", "pass, as Zarr v3's", "zarr-python 2.18 and 3"),
        Pairing(
            "precomputed",
            "volumes only: raw ones pass, padded where they end with the volume; images are decoded",
            "zarr-python 2.18 and 3, tensorstore",
        ),
        Pairing(
            "n5",
            "pass without their headers, padded where they end with the array",
            "zarr-python 2.18 and 3, tensorstore",
        ),
        Pairing("bcolz", "pass without their headers", "zarr-python 3, tensorstore"),
        Pairing("bloscpack", "pass, if they are rows of an array", "zarr-python 3, tensorstore"),
    )
    documents = (ARRAY, GROUP, ATTRIBUTES)

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        found = {name: raw for name, raw in documents.items() if name in self.documents}
        if ARRAY not in found and GROUP not in found:
            return None
        return Dataset("zarr2", documents=found, closed=ARRAY in found, form=frozenset(found))

    def children(self, dataset: Dataset) -> Sequence[str]:
        return ()

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        if dataset is None:
            return Dataset("zarr2", documents=_group_documents(None), consolidation=CONSOLIDATION)
        if dataset.format == self.name:
            return dataset if dataset.closed else replace(dataset, consolidation=CONSOLIDATION)
        is_array, arrays = arrays_of(dataset)
        placed = [_Placed.of(c, at, shown_encoding) for c, at in arrays]
        documents = {} if is_array else _group_documents(dataset)
        for p in placed:
            documents |= p.documents()
        consolidation = None if is_array else CONSOLIDATION
        return laid_out("zarr2", dataset, (p.collection() for p in placed), documents, consolidation=consolidation)


# ---- groups ----


def _group_documents(dataset: Dataset | None) -> dict[str, bytes]:
    """Of a group; None for a directory that is one only because of what lies below."""
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


class _Placed(Placed):
    def collection(self) -> Collection:
        axes, codecs = self.array.grid_axes, (c.name for c in self.encoding.codecs)
        return shown(self.stored, self.path, self.encoding, self._names(), axes, codecs)

    @property
    def _separator(self) -> str:
        names = self.stored.names
        return names.separator.decode() if isinstance(names, FlatNames) else "/"

    def _names(self) -> ChunkNames:
        grid = self.array.grid
        if self._separator == "/" and grid:
            return NestedNames(grid)
        return FlatNames(grid, b"", self._separator.encode(), b"0")

    def documents(self) -> dict[str, bytes]:
        """Of the array, and of the groups on the way to it."""
        parts = self.path.split("/") if self.path else []
        documents = {"/".join([*parts[:n], GROUP]): print_json({"zarr_format": 2}) for n in range(1, len(parts))}
        documents["/".join([*parts, ARRAY])] = print_json(self._document())
        documents["/".join([*parts, ATTRIBUTES])] = print_strict(self._attributes())
        return documents

    def _document(self) -> dict[str, Any]:
        array, encoding = self.array, self.encoding
        return {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.chunk,
            "dtype": encoding.data_type,
            "order": "C" if encoding.order == tuple(range(len(array.shape))) else "F",
            "fill_value": array.fill_value,
            "dimension_separator": self._separator,
            "filters": None if encoding.serializer == BYTES else [{"id": encoding.serializer.name}],
            "compressor": compressor(encoding.codecs[0]) if encoding.codecs else None,
        }

    def _attributes(self) -> dict[str, Any]:
        array = self.array
        attributes = dict(array.attributes)
        if "_FillValue" in attributes and np.dtype(array.data_type).kind == "f":
            attributes["_FillValue"] = _missing_value(attributes["_FillValue"])
        names = array.names if array.shape else ()  # without the member, xarray opens not even a scalar
        if names is not None and None not in names:
            attributes["_ARRAY_DIMENSIONS"] = list(names)
        return with_offset(attributes, array)


def _missing_value(told: Any) -> Any:
    """What marks missing values, as a number: xarray writes the bytes of a float64 in base64 to Zarr v3, and netCDF-C
    aborts on any text."""
    try:
        raw = base64.b64decode(told, validate=True) if isinstance(told, str) else b""
    except ValueError:
        return told
    return struct.unpack("<d", raw)[0] if len(raw) == FLOAT64 else told


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of Zarr v2 that needs least to be done. Raise UnsupportedError if it has no such data type."""
    stored, rank = array.encoding, len(array.shape)
    dtype = np.dtype(array.data_type)
    orders = tuple(range(rank)), tuple(range(rank))[::-1]
    order = next((o for o in orders if memory_order(o, array.chunk) == memory_order(stored.order, array.chunk)), None)
    around = without_checks(stored.codecs)
    is_cut = stored.clipped and any(s % c for s, c in zip(array.shape, array.chunk, strict=True))
    if array.data_type == STRING:
        if order is None or stored.serializer.name != "vlen-utf8" or len(around) > 1 or None in map(compressor, around):
            raise UnsupportedError("strings are shown only as they are stored, and Zarr v2 has not these codecs")
        return ChunkEncoding(STRING, order, serializer=Codec("vlen-utf8"), codecs=around)
    if dtype.kind not in KINDS:
        raise UnsupportedError(f"data type {dtype.name} has no form in Zarr v2 that its readers share")
    is_known = len(around) == 1 and compressor(around[0]) and (can_store(around) or not is_cut)
    if order is not None and stored.serializer == BYTES and (not around or is_known):
        return ChunkEncoding(stored.data_type, order, codecs=around)
    return ChunkEncoding(dtype.newbyteorder("<").str, orders[0])


def compressor(codec: Codec) -> dict[str, Any] | None:
    """The codec as Zarr v2 calls it; None if readers of Zarr v2 do not all have it."""
    name = codec.name.removeprefix("numcodecs.")
    if name in PASSING and name != codec.name:
        return {"id": name, **codec.configuration}
    if name not in MEMBERS:
        return None
    found = {member: codec.configuration.get(member, DEFAULTS[member]) for member in MEMBERS[name]}
    if isinstance(shuffle := found.get("shuffle"), str):
        found["shuffle"] = SHUFFLES.index(shuffle) if shuffle in SHUFFLES else 0
    return {"id": name, **found}


ZARR2 = Zarr2()
