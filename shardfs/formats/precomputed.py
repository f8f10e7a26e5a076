"""Neuroglancer precomputed volumes.

https://github.com/google/neuroglancer/blob/master/src/datasource/precomputed/volume.md and sharded.md
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs import Gunzip
from shardfs.errors import CorruptShardError
from shardfs.formats import parse_json, print_json
from shardfs.grid import BoxNames, MortonCode
from shardfs.model import U64, Blob, Collection, Coords, Dataset, Facts, Layer, Pair, Problem
from shardfs.shards.uint64_sharded import ENTRY, ShardingSpec, Uint64Sharded, integer

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM_SIZES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float32": 4,
}  # fmt: skip
MAX_SCALES = 1000
"""A volume of more scales is taken for damaged; each halves the last, so that real ones have some ten."""


class Precomputed:
    """See `formats.Format`."""

    documents = ("info",)

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get("info")
        if raw is None or not raw.lstrip().startswith(b"{"):
            return None  # "info" is a common name for other things
        info = parse_json(path, "info", raw)
        if not _is_volume(info):
            return None
        return _open_volume(path, info)


def _is_volume(info: Any) -> bool:
    kind = info.get("@type")
    return kind == "neuroglancer_multiscale_volume" or (kind is None and isinstance(info.get("scales"), list))


def _open_volume(path: str, info: dict[str, Any]) -> Dataset:
    collections, problems, scales = [], [], []
    listed = info.get("scales")
    if not isinstance(listed, list):
        raise CorruptShardError(path, "info", f"scales should be a list, not {type(listed).__name__}")
    if len(listed) > MAX_SCALES:
        raise CorruptShardError(path, "info", f"{len(listed)} scales; {MAX_SCALES} is the limit")
    for i, scale in enumerate(listed):
        scales.append(scale)
        if not isinstance(scale, dict) or scale.get("sharding") is None:
            continue
        try:
            collections.append(_open_scale(info, scale))
        except (ValueError, TypeError, KeyError) as e:
            why = f"no member {e}" if isinstance(e, KeyError) else str(e)
            problems.append(Problem(f"{path}/{scale.get('key', i)}".lstrip("/"), f"info, scale {i}: {why}"))
            continue
        # `sharding: null` would not do: Neuroglancer itself refuses that.
        scales[-1] = {k: v for k, v in scale.items() if k != "sharding"}
    unwalked = frozenset(_top(scale) for scale in listed)
    if not collections:
        return Dataset("precomputed", problems=tuple(problems), unwalked=unwalked)
    try:
        shown = print_json({**info, "scales": scales})
    except ValueError as e:
        raise CorruptShardError(path, "info", str(e)) from e
    return Dataset("precomputed", tuple(collections), {"info": shown}, tuple(problems), unwalked=unwalked)


def _top(scale: Any) -> str:
    """The subdirectory in which the chunks of a scale lie, sharded or not."""
    key = scale.get("key") if isinstance(scale, dict) else None
    return posixpath.normpath(key).split("/")[0] if isinstance(key, str) else ""


def _open_scale(info: dict[str, Any], scale: dict[str, Any]) -> Collection:
    spec = ShardingSpec.parse(scale["sharding"])
    size, chunk, offset = _geometry(scale)
    item = ITEM_SIZES.get(str(info.get("data_type")).lower())
    channels = integer(info.get("num_channels", 1), "num_channels", 1)
    encoding = str(scale.get("encoding"))
    names = BoxNames(size, chunk, offset)
    shard_format = Uint64Sharded(spec, MortonCode(names.grid))
    sizes = None
    if encoding == "raw" and item is not None:
        voxel_bytes = np.uint64(item * channels)

        def sizes(coords: U64) -> U64:
            return names.voxels_many(coords) * voxel_bytes

    return Collection(
        format="precomputed",
        path=_key_path(scale["key"]),
        names=names,
        layers=(Layer(shard_format, pair=Pair(".index", ".data", ENTRY << spec.minishard_bits)),),
        codecs=(encoding,),
        facts=Facts(
            shape=(*size, channels),
            chunk_shape=(*chunk, channels),
            shard_shape=None,
            data_type=str(info.get("data_type")),
            sharding=str(spec),
        ),
        transform=Gunzip(sizes) if spec.data_encoding == "gzip" else None,
    )


def _key_path(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"key should be a relative path, not {key!r}")
    path = posixpath.normpath(key)
    if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(f"key {key!r} leads out of the volume's directory")
    return path


def _triple(value: Any, name: str, least: int) -> Coords:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{name} should be a list of 3 integers, not {value!r}")
    return tuple(integer(v, name, least) for v in value)


def _geometry(scale: dict[str, Any]) -> tuple[Coords, Coords, Coords]:
    chunks = scale["chunk_sizes"]
    if not isinstance(chunks, list) or len(chunks) != 1:
        raise ValueError(f"chunk_sizes of a sharded scale should have one entry, not {chunks!r}")
    offset = scale.get("voxel_offset", [0, 0, 0])
    return (
        _triple(scale["size"], "size", 0),
        _triple(chunks[0], "chunk_sizes", 1),
        _triple(offset, "voxel_offset", -(2**63)),
    )


PRECOMPUTED = Precomputed()
