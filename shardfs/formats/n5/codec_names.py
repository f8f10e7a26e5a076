"""N5's names of document members, data types and codecs, and their conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from shardfs.formats.documents import choice, listed, mapping
from shardfs.model.arrays import Codec

if TYPE_CHECKING:
    from collections.abc import Mapping


DOCUMENT = "attributes.json"

ITEM_SIZES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float32": 4, "float64": 8,
}  # fmt: skip

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "raw": {},
    "gzip": {"level": -1, "useZlib": False},
    "bzip2": {"blockSize": 9},
    "xz": {"preset": 6},
    "lz4": {"blockSize": 65536},
    "blosc": {"cname": "blosclz", "clevel": 6, "shuffle": 0, "blocksize": 0},
    "zstd": {"level": 3},
}
"""The members of `compression` that readers require, with their defaults.

tensorstore refuses documents with further members. z5py and zarr-python refuse documents without one of the members.
"""

SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
"""Zarr's names of Blosc's `shuffle`, and the numbers in N5."""

HEADERLESS: Mapping[str, Literal["little", "big"]] = {"raw-bytes": "big", "bytes": "little"}
"""The codecs that write elements without a header, and their default byte order.

n5-zarr writes `bytes` in the byte order of the machine by default.
"""

FIRST_CODECS = ("n5bytes", *HEADERLESS)
"""The codecs that make bytes of elements: the first of each chain."""

_FIRST = " or ".join(FIRST_CODECS)

FORM = frozenset((DOCUMENT,))

STRUCTURAL = frozenset(
    ("n5", "dimensions", "blockSize", "dataType", "compression", "compressionType", "codecs", "storage_transformers")
)
"""The members of a dataset's document that N5 defines; all others are the user's attributes."""

DEFAULT_LEVEL = 6
"""The level that zlib uses for -1."""

XZ = 1
"""The `format` of numcodecs' LZMA codec for .xz containers."""


def compression_as(name: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The member `compression`, with all parameters that readers require. Raise ValueError for an unknown codec."""
    defaults = PARAMETERS.get(name)
    if defaults is None:
        raise ValueError(f"plain N5 has no compression {name!r:.80} that shardfs knows")
    out: dict[str, Any] = {"type": name}
    for parameter, default in defaults.items():
        value = configuration.get(parameter, default)
        if parameter == "shuffle" and isinstance(value, str):
            value = SHUFFLES.get(value, value)
        if type(value) is not type(default):
            raise ValueError(f"{name}: {parameter} should be of the kind of {default!r}, not {value!r:.80}")
        out[parameter] = value
    return out


def compression_in(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The member `compression`, or `compressionType` of N5 before 1.0 in its form. Raise ValueError without a type."""
    compression = mapping(doc.get("compression", {"type": doc.get("compressionType")}), "compression")
    if not isinstance(compression.get("type"), str):
        raise ValueError(f"compression should have a type, not {compression!r:.80}")
    return compression


def compression_of(codec: Codec) -> dict[str, Any]:
    """The member `compression` for a codec with its name in Zarr v3: the inverse of `as_in_zarr`.

    Raise ValueError if N5 has no such codec.
    """
    name, parameters = codec
    match name:
        case "gzip" | "zstd" | "n5.lz4":
            return compression_as(name.removeprefix("n5."), parameters)
        case "blosc":
            return compression_as("blosc", {"cname": "lz4", "clevel": 5, "shuffle": 1, **parameters})
        case "numcodecs.zlib":
            return compression_as("gzip", {"level": parameters.get("level", 1), "useZlib": True})
        case "numcodecs.bz2":
            return compression_as("bzip2", {"blockSize": parameters.get("level", 1)})
        case "numcodecs.lzma" if parameters.get("format", XZ) == XZ:
            preset = parameters.get("preset")
            return compression_as("xz", {} if preset is None else {"preset": preset})
    raise ValueError(f"plain N5 has no codec {name!r:.80}")


def as_in_zarr(codec: Codec, itemsize: int) -> Codec:
    """The Zarr v3 codec that writes the same bytes; a codec `n5.*` if Zarr has none."""
    if codec.name == "crc32c":
        return codec
    parameters = compression_as(codec.name, codec.configuration)
    match codec.name:
        case "gzip":
            level = parameters["level"] if 0 <= parameters["level"] <= 9 else DEFAULT_LEVEL
            return Codec("numcodecs.zlib" if parameters["useZlib"] else "gzip", {"level": level})
        case "zstd":
            return Codec("zstd", {"level": parameters["level"], "checksum": False})
        case "bzip2":
            return Codec("numcodecs.bz2", {"level": parameters["blockSize"]})
        case "xz":
            members = {"format": XZ, "check": -1, "preset": parameters["preset"], "filters": None}
            return Codec("numcodecs.lzma", members)
        case "blosc":
            number, blocksize = parameters["shuffle"], parameters["blocksize"]
            shuffle = list(SHUFFLES)[number] if 0 <= number < len(SHUFFLES) else "shuffle"
            members = {"cname": parameters["cname"], "clevel": parameters["clevel"], "shuffle": shuffle}
            return Codec("blosc", {**members, "typesize": itemsize, "blocksize": blocksize})
        case "lz4" if "acceleration" in codec.configuration:  # zarr-python writes numcodecs' LZ4 format
            return Codec("numcodecs.lz4", {"acceleration": codec.configuration["acceleration"]})
    del parameters["type"]
    return Codec(f"n5.{codec.name}", parameters)


def endian_of(codec: str, configuration: Mapping[str, Any]) -> Literal["little", "big"]:
    """The byte order of a codec in `HEADERLESS`. Raise ValueError if its parameter is invalid."""
    endian = choice(configuration.get("endian", HEADERLESS[codec]), f"{codec}: endian", "little", "big")
    return cast("Literal['little', 'big']", endian)


def has_header(codec: Codec) -> bool:
    """Whether the first codec of a chain writes a header before the elements. Raise ValueError for an unknown one."""
    if codec.name not in FIRST_CODECS:
        raise ValueError(f"codec {codec.name!r:.80} cannot be the first one, which should be {_FIRST}")
    return codec.name == "n5bytes"


def chain_of(value: Any) -> tuple[Codec, list[Codec]]:
    """The first codec in a list, and the others but `raw`, which changes nothing. Raise ValueError for other values."""
    if not (chain := [_named(c) for c in listed(value, "codecs")]):
        raise ValueError("codecs should not be empty")
    return chain[0], [c for c in chain[1:] if c.name != "raw"]


def _named(value: Any) -> Codec:
    """The codec in an object with a name and an optional configuration. Raise ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a codec should have a name: {value!r:.80}")
    return Codec(value["name"], mapping(value.get("configuration", {}), f"{value['name']}: configuration"))
