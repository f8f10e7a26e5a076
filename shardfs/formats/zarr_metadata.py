"""Converts data types, fill values and codecs of Zarr metadata to the form of `shardfs.model.arrays`.

https://zarr-specs.readthedocs.io/en/latest/v3/data-types/index.html and .../v3/codecs/index.html
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.encoded_chunks import fill_element
from shardfs.formats.documents import choice, named_number
from shardfs.model.arrays import BYTES, ChunkEncoding, Codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import UnionType

NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
           "float16", "float32", "float64", "complex64", "complex128", "bool")  # fmt: skip
STRING = "|O"
"""The data type of variable-length strings, in numpy's notation."""

VLEN_UTF8 = "vlen-utf8"
"""The codec that makes bytes of variable-length strings."""

FIXED_LENGTH = {"fixed_length_utf32": ("U", 4), "null_terminated_bytes": ("S", 1)}
"""zarr-python's data types of fixed-length strings: numpy's kind, and the bytes per character."""

MAX_LENGTH = 1 << 20

NAMES_OF_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

IDENTITIES = frozenset(("bitround", "numcodecs.bitround"))
"""Array-to-array codecs that round when encoding, and whose decoding changes nothing."""

ALIASES = {f"numcodecs.{name}": name for name in ("gzip", "zstd", "crc32c")} | {"endian": "bytes"}
"""Other names of codecs, with the same bytes and parameters."""

SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""The names of Blosc's shuffles; the index is the number in Zarr v2 and numcodecs."""

CODEC_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "gzip": {"level": 5},
    "zstd": {"level": 0, "checksum": False},
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 1, "blocksize": 0},
    "crc32c": {},
}
"""The codecs of the Zarr v3 specification, with default parameters for sources that omit them.

Only encoding uses the parameters, but readers need all of them.
"""

COMPRESSORS = {"gzip": "gzip", "zstd": "zstd", "blosc": "numcodecs.blosc"} | {
    name: f"numcodecs.{name}" for name in ("zlib", "bz2", "lzma", "lz4")
}
"""The Zarr v3 names of the compressors of numcodecs, which Zarr v2 and the draft of 2022 use."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "zlib": {"level": 1},
    "bz2": {"level": 1},
    "lzma": {"format": 1, "check": -1, "preset": None, "filters": None},
    "lz4": {"acceleration": 1},
}
"""The parameters that numcodecs writes for its own compressors; a source may omit them."""

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute with xarray's names of axes, in versions of Zarr without `dimension_names`."""

Named = tuple[str, "Mapping[str, Any]"]


# ---- data types, fill values and names of axes ----


def axis_names(names: Any, rank: int, kind: type | UnionType = str) -> tuple[Any, ...] | None:
    """The names of all axes; None unless there is one of type `kind` for each axis."""
    if not isinstance(names, list) or not names or len(names) != rank or not all(isinstance(n, kind) for n in names):
        return None
    return tuple(names)


def split_dimensions(attributes: Mapping[str, Any], rank: int) -> tuple[tuple[str, ...] | None, Mapping[str, Any]]:
    """The names of all axes in the attribute `DIMENSIONS`, and the attributes without it if it is valid."""
    names = axis_names(attributes.get(DIMENSIONS), rank)
    if names is not None or (not rank and attributes.get(DIMENSIONS) == []):
        attributes = {name: value for name, value in attributes.items() if name != DIMENSIONS}
    return names, attributes


def number_type(name: Any) -> np.dtype[Any]:
    """The type of numbers with this name in numpy, such as <u2, i1, bool. Raise one of `UNFIT` for other types."""
    if not isinstance(name, str) or re.fullmatch(r"bool|[<>|]?[biufc][0-9]{1,2}", name) is None:
        raise ValueError(f"data type {name!r:.80} is no number type")
    return np.dtype(name)  # raises TypeError


def numpy_type(data_type: Any) -> str:
    """The data type of Zarr v3 in numpy's notation and native byte order. Raise ValueError for an unsupported type."""
    if data_type == "string":
        return STRING
    if isinstance(data_type, str) and data_type in NUMBERS:
        return np.dtype(data_type).str
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    if isinstance(data_type, dict) and name in FIXED_LENGTH:
        kind, width = FIXED_LENGTH[name]
        length = data_type["configuration"]["length_bytes"]
        if type(length) is int and 0 < length <= MAX_LENGTH and length % width == 0:
            return np.dtype(f"{kind}{length // width}").str
    raise ValueError(f"data type {name!r:.80} is none that layouts know")


def written_type(data_type: str) -> Any:
    """The data type of Zarr v3 for a type in numpy's notation: the inverse of `numpy_type`."""
    if data_type == STRING:
        return "string"
    dtype = np.dtype(data_type)
    names = {kind: name for name, (kind, _) in FIXED_LENGTH.items()}
    if dtype.kind not in names:
        return dtype.name
    return {"name": names[dtype.kind], "configuration": {"length_bytes": dtype.itemsize}}


def name_of(data_type: str) -> str:
    """The name, for messages, of a data type in numpy's notation."""
    return "string" if data_type == STRING else np.dtype(data_type).name


def fill_value(value: Any, data_type: str) -> Any:
    """A fill value of Zarr v3 or v2 in the form of `arrays.Array.fill_value`. An undefined fill value (None) is zero.

    Raise ValueError if the value does not fit the data type.
    """
    dtype = np.dtype(data_type)
    if data_type == STRING or dtype.kind in "US":  # both versions write bytes in base64
        if value is not None and not isinstance(value, str):
            raise _unfit(value, "string")
        return value or ""
    if value is None:
        value = False if dtype.kind == "b" else 0
    if dtype.kind == "b" and (isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))):
        return bool(value)
    if dtype.kind in "iu":
        return _integer(value, dtype)
    if dtype.kind == "f":
        return _float(value, dtype)
    if dtype.kind == "c":
        parts = value if isinstance(value, list) else [value, 0.0]
        if len(parts) == 2:
            return [_float(part, np.dtype(f"f{dtype.itemsize // 2}")) for part in parts]
    raise _unfit(value, dtype.name)


def is_same_element(a: Any, b: Any, data_type: str) -> bool:
    """Whether two fill values are the same element, also if their numbers have other digits."""
    try:
        first, second = (fill_element(fill_value(value, data_type), data_type) for value in (a, b))
        return bool(first == second)
    except (ValueError, TypeError, OverflowError):
        return False


def _integer(value: Any, dtype: np.dtype[Any]) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    limits = np.iinfo(dtype)
    if isinstance(value, bool) or not isinstance(value, int) or not limits.min <= value <= limits.max:
        raise _unfit(value, dtype.name)
    return value


def _float(value: Any, dtype: np.dtype[Any]) -> float | str:
    """A finite value as a float, others by name. The payload of a NaN is lost, as other formats cannot store it."""
    if isinstance(value, str) and value.startswith("0x"):
        bits = int(value, 16)  # raises ValueError
        if len(value) != 2 + 2 * dtype.itemsize:
            raise _unfit(value, f"{dtype.name}, whose bits have another number of digits")
        value = np.array(bits, f"u{dtype.itemsize}").view(dtype).item()
    if isinstance(value, str) and value in NAMES_OF_FLOATS:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or (type(value) is int and abs(value) > 2**1023):
        raise _unfit(value, dtype.name)
    return named_number(float(value))


def _unfit(value: Any, expected: str) -> ValueError:
    return ValueError(f"fill_value {value!r:.80} should be of type {expected}")


# ---- codecs ----


def chunk_encoding(data_type: str, rank: int, chain: Sequence[Named]) -> ChunkEncoding:
    """The encoding that a chain of Zarr v3 codecs describes: transposes, a serializer, bytes-to-bytes codecs.

    Unknown serializers and unknown codecs after them stay as they are: many chunks can be shown without decoding them.
    Raise ValueError, with the reason, for unknown codecs before the serializer and for invalid parameters.
    """
    order = tuple(range(rank))
    at = 0
    while at < len(chain) and (chain[at][0] == "transpose" or chain[at][0] in IDENTITIES):
        name, configuration = chain[at]
        order = transposed(order, configuration.get("order")) if name == "transpose" else order
        at += 1
    if at == len(chain):
        raise ValueError("codecs: none that makes bytes of elements")
    if any(ALIASES.get(name, name) == "bytes" for name, _ in chain[at + 1 :]):
        raise ValueError(f"codec {chain[at][0]!r:.80} is none that layouts know")
    name, configuration = chain[at]
    serializer = Codec(ALIASES.get(name, name), configuration)
    if serializer.name == "bytes":
        data_type, serializer = _ordered(data_type, configuration.get("endian")), BYTES
    codecs = tuple(_normal(*c) for c in chain[at + 1 :])
    return ChunkEncoding(data_type, order, serializer=serializer, codecs=codecs)


def transposed(order: tuple[int, ...], by: Any) -> tuple[int, ...]:
    """The order of axes after one more transposition. Raise ValueError if `by` is not a permutation."""
    axes = list(range(len(order)))
    by = {"C": axes, "F": axes[::-1]}.get(by, by) if isinstance(by, str) else by
    if not isinstance(by, list) or any(type(i) is not int for i in by) or sorted(by) != axes:
        raise ValueError(f"transpose: order {by!r:.80} is no permutation of the axes")
    return tuple(order[i] for i in by)


def _ordered(data_type: str, endian: Any) -> str:
    dtype = np.dtype(data_type)
    if data_type == STRING:
        raise ValueError("codec 'bytes' cannot make bytes of strings")
    if dtype.itemsize == 1 or dtype.kind == "S" or (dtype.kind == "c" and dtype.itemsize == 2):
        return dtype.str
    is_little = choice(endian, "bytes: endian", "little", "big") == "little"
    return dtype.newbyteorder("<" if is_little else ">").str


def _normal(name: str, configuration: Mapping[str, Any]) -> Codec:
    if name == "numcodecs.blosc":
        shuffle = configuration.get("shuffle", 1)
        name = SHUFFLES[shuffle] if type(shuffle) is int and 0 <= shuffle < len(SHUFFLES) else "shuffle"
        return Codec("blosc", {**configuration, "shuffle": name})
    return Codec(ALIASES.get(name, name), configuration)


def of_numcodecs(name: str, configuration: Mapping[str, Any], itemsize: int) -> Named:
    """The Zarr v3 codec of a compressor of numcodecs. Raise ValueError if shardfs does not know the compressor.

    `itemsize` is the number of bytes of an element, which numcodecs gets from the array.
    """
    if name not in COMPRESSORS:
        raise ValueError(f"compressor or filter {name!r:.200} is unknown")
    parameters = {"typesize": itemsize} if name == "blosc" else {}
    return COMPRESSORS[name], {**DEFAULTS.get(name, {}), **configuration, **parameters}
