"""Reads stored documents of Zarr v2. Its arrays have no shards, so the native layout shows them unchanged."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.formats import ome, zarr_metadata
from shardfs.formats.documents import (
    UNFIT,
    choice,
    integers,
    listed,
    mapping,
    mapping_or_empty,
    parse_json,
    reason,
    require_rank,
)
from shardfs.formats.zarr2.codec_names import (
    ARRAY,
    ATTRIBUTES,
    CONSOLIDATED,
    DOCUMENTS,
    FORMAT,
    MARK,
    as_mark,
    codec_of,
    named,
    unpadded,
)
from shardfs.formats.zarr_arrays import ChunkKeys, described_array, unsharded_array
from shardfs.formats.zarr_metadata import IDENTITIES, MAX_LENGTH, STRING, VLEN_UTF8
from shardfs.model.dataset import Dataset
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.zarr_metadata import Named
    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection


def open_node(path: str, documents: Mapping[str, bytes]) -> Dataset:
    """The dataset of an array or a group with these documents. `indescribable` is set if they are not understood."""
    is_array = ARRAY in documents
    dataset = Dataset(FORMAT, documents=documents, closed=is_array, format_names=frozenset((*DOCUMENTS, CONSOLIDATED)))
    try:
        attributes = mapping_or_empty(parse_json(path, ATTRIBUTES, documents.get(ATTRIBUTES, b"{}")))
        if is_array:
            document = mapping(parse_json(path, ARRAY, documents[ARRAY]), "the document")
            return replace(dataset, unsharded=(_collection(document, attributes),))
        return replace(dataset, attributes=attributes, multiscales=ome.multiscales(attributes))
    except CorruptShardError as e:
        return replace(dataset, indescribable=f"{e.key}: {e.why}")
    except (*UNFIT, RecursionError) as e:
        return replace(dataset, indescribable=f"{ARRAY}: {reason(e)}")


def _collection(doc: Mapping[str, Any], attributes: Mapping[str, Any]) -> Collection:
    """The collection of an array. Raise one of `UNFIT`, with the reason, if the array is not understood."""
    if doc["zarr_format"] != 2:
        raise ValueError(f"zarr_format should be 2, not {doc['zarr_format']!r:.80}")
    rank = len(integers(doc["shape"], "shape", 0))
    chunk = integers(doc["chunks"], "chunks", 1)
    require_rank(chunk, rank, "chunks")
    stored_type = STRING if doc["dtype"] == STRING else _fixed_size_type(doc["dtype"]).str
    chain = _chain(doc, stored_type)
    data_type = np.dtype(stored_type).newbyteorder("=").str
    names, attributes = zarr_metadata.split_dimensions(attributes, rank)
    described = {**doc, "fill_value": _fill_value(doc.get("fill_value"), data_type)}
    array = _with_mark(described_array(described, chunk, data_type, chain, names, attributes), doc.get("fill_value"))
    keys = ChunkKeys("", choice(doc.get("dimension_separator", "."), "dimension_separator", ".", "/"), "0", rank)
    return unsharded_array(FORMAT, array, keys, tuple(c.name for c in array.encoding.codecs), stored_type)


def _fixed_size_type(value: Any) -> np.dtype[Any]:
    """The numpy type of numbers or of strings of one length. Raise one of `UNFIT` for other types."""
    if isinstance(value, str) and re.fullmatch(r"[<>|]?[US][0-9]{1,7}", value):
        dtype = np.dtype(value)
        if 0 < dtype.itemsize <= MAX_LENGTH:
            return dtype
    return zarr_metadata.number_type(value)


def _chain(doc: Mapping[str, Any], data_type: str) -> list[Named]:
    """The order, filters and compressor as a chain of Zarr v3 codecs."""
    codecs = [named(c) for c in listed(doc.get("filters") or [], "filters")]
    if data_type != STRING:
        serializer: Named = ("bytes", {"endian": "big" if np.dtype(data_type).str[0] == ">" else "little"})
    elif codecs and codecs[0][0] == VLEN_UTF8:
        serializer, codecs = (VLEN_UTF8, {}), codecs[1:]
    else:
        raise ValueError(f"data type {STRING}: shardfs knows objects in the filter {VLEN_UTF8} only")
    if (compressor := doc.get("compressor")) is not None:
        codecs.append(named(compressor))
    order = choice(doc.get("order", "C"), "order", "C", "F")
    around = [codec_of(*c, np.dtype(data_type).itemsize) for c in codecs if c[0] not in IDENTITIES]
    return [("transpose", {"order": order}), serializer, *around]


def _fill_value(value: Any, data_type: str) -> Any:
    """The fill value in the form of Zarr v3. zarr-python 2 writes that of strings also as the number 0."""
    if data_type != STRING and np.dtype(data_type).kind not in "US":
        return value
    if np.dtype(data_type).kind == "S" and isinstance(value, str):
        return unpadded(value)
    return value or ""


def _with_mark(array: Array, fill_value: Any) -> Array:
    """The array with the attribute `_FillValue` if the fill value is the marker of missing values.

    It is, as `view.py` explains, if all axes have names, which xarray needs to open an array. NaN needs no marker.
    """
    if fill_value is None or array.fill_value == "NaN" or (array.shape and not array.names):
        return array
    mark = as_mark(array.fill_value, array.data_type)
    return replace(array, attributes={**array.attributes, MARK: mark})
