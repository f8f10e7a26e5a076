"""Zarr v2's names of documents, compressors and filters, and their conversion; and xarray's marker of missing values.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

from __future__ import annotations

import base64
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.decoders import SAME_SIZE
from shardfs.formats import zarr_metadata
from shardfs.formats.zarr_metadata import CODEC_PARAMETERS, DEFAULTS, NAMES_OF_FLOATS, SHUFFLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.zarr_metadata import Named
    from shardfs.model.arrays import Array, Codec

FORMAT = "zarr2"
ARRAY, GROUP, ATTRIBUTES, CONSOLIDATED = ".zarray", ".zgroup", ".zattrs", ".zmetadata"
DOCUMENTS = (ARRAY, GROUP, ATTRIBUTES)

OMITTED: Mapping[str, Sequence[str]] = {
    "gzip": (),
    "zstd": ("checksum",),  # tensorstore refuses it, and decoding does not need it
    "blosc": ("typesize",),
}
"""The codecs that both Zarr v2 and v3 have, with the parameters that only v3 has.

Codecs named `numcodecs.*` keep all their parameters.
"""

MARK = "_FillValue"
"""The attribute with the value that xarray, netCDF-C and GDAL take for missing."""


def compressor(codec: Codec) -> dict[str, Any] | None:
    """The member `compressor` of Zarr v2 for a codec; None if some readers of Zarr v2 lack the codec."""
    name = codec.name.removeprefix("numcodecs.")
    if name in DEFAULTS and name != codec.name:
        return {"id": name, **DEFAULTS[name], **codec.configuration}
    if name not in OMITTED:
        return None
    defaults = {member: value for member, value in CODEC_PARAMETERS[name].items() if member not in OMITTED[name]}
    parameters = {member: codec.configuration.get(member, default) for member, default in defaults.items()}
    if isinstance(shuffle := parameters.get("shuffle"), str):
        parameters["shuffle"] = SHUFFLES.index(shuffle) if shuffle in SHUFFLES else 0
    return {"id": name, **parameters}


def codec_of(name: str, configuration: Mapping[str, Any], itemsize: int) -> Named:
    """The Zarr v3 codec of a compressor or of a filter that turns bytes into bytes: the inverse of `compressor`.

    Raise ValueError, with the reason, if shardfs knows no such codec. `itemsize` is the number of bytes of an element.
    """
    if name in SAME_SIZE:
        return f"numcodecs.{name}", configuration
    return zarr_metadata.of_numcodecs(name, configuration, itemsize)


def named(value: Any) -> Named:
    """The name and the configuration of a compressor or filter. Raise ValueError if `value` is none."""
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise ValueError(f"a codec should be an object with an id, not {value!r:.80}")
    return value["id"], {name: member for name, member in value.items() if name != "id"}


# ---- fill values ----


def padded(value: Any, data_type: str) -> Any:
    """A fill value; that of bytes, in base64, has the size of an element, which tensorstore requires."""
    dtype = np.dtype(data_type)
    if dtype.kind == "S" and isinstance(value, str):
        with suppress(ValueError):  # the source has no base64
            return base64.b64encode(base64.b64decode(value, validate=True).ljust(dtype.itemsize, b"\0")).decode()
    return value


def unpadded(value: str) -> str:
    """The fill value of bytes, in base64, without zeros at its end. Raise ValueError if it is no base64."""
    return base64.b64encode(base64.b64decode(value, validate=True).rstrip(b"\0")).decode()


# ---- the marker of missing values ----


def mark_of(array: Array) -> Any:
    """The marker of missing values, as a fill value; None if the array has none, or one of another type."""
    mark = array.attributes.get(MARK)
    try:
        return None if mark is None else zarr_metadata.fill_value(_decoded(mark, array.data_type), array.data_type)
    except ValueError:
        return None


def _decoded(mark: Any, data_type: str) -> Any:
    """The marker as JSON numbers. xarray writes floats in Zarr v3 as base64 of a float64, complex numbers as two."""
    kind = np.dtype(data_type).kind
    if kind == "c" and isinstance(mark, list):
        return [_decoded(part, "f8") for part in mark]
    if kind != "f" or not isinstance(mark, str) or mark in NAMES_OF_FLOATS:
        return mark
    raw = base64.b64decode(mark, validate=True)
    return struct.unpack("<d", raw)[0] if len(raw) == struct.calcsize("<d") else mark


def as_mark(value: Any, data_type: str) -> Any:
    """A fill value in the form of the attribute `_FillValue` in Zarr v3: the inverse of `_decoded`."""
    kind = np.dtype(data_type).kind
    if kind == "c":
        return [as_mark(part, "f8") for part in value]
    if kind != "f":
        return value
    return base64.b64encode(struct.pack("<d", float(NAMES_OF_FLOATS.get(value, value)))).decode()
