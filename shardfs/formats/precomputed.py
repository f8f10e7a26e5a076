"""Neuroglancer precomputed volumes.

https://github.com/google/neuroglancer/blob/master/src/datasource/precomputed/volume.md and sharded.md
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from shardfs.errors import CorruptShardError
from shardfs.formats import parse_json, print_json
from shardfs.grid import BoxNames, MortonCode
from shardfs.model import U64, ChunkEncoding, Collection, Coords, Dataset, Facts, Layer, Pair, Problem
from shardfs.shards.uint64_sharded import ENTRY, ShardingSpec, Uint64Sharded

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM_SIZES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float32": 4,
}  # fmt: skip
MAX_SCALES = 1000
"""A volume of more scales is taken for damaged; each halves the last, so that real ones have some ten."""

SHARDED = "neuroglancer_uint64_sharded_v1"


class Precomputed:
    """See `formats.Format`."""

    documents = ("info",)

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
    if not collections:
        return Dataset("precomputed", problems=tuple(problems), closed=True)
    try:
        shown = print_json({**info, "scales": scales})
    except ValueError as e:
        raise CorruptShardError(path, "info", str(e)) from e
    return Dataset("precomputed", tuple(collections), {"info": shown}, tuple(problems), closed=True)


def _open_scale(info: dict[str, Any], scale: dict[str, Any]) -> Collection:
    spec = _sharding_spec(scale["sharding"])
    size, chunk, offset = _geometry(scale)
    item = ITEM_SIZES.get(str(info.get("data_type")).lower())
    channels = _integer(info.get("num_channels", 1), "num_channels", 1)
    encoding = str(scale.get("encoding"))
    names = BoxNames(size, chunk, offset)
    shard_format = Uint64Sharded(spec, MortonCode(names.grid))
    gzip = spec.data_encoding == "gzip"
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
        encoding=ChunkEncoding("gzip" if gzip else "raw", (encoding,)),
        facts=Facts(
            shape=(*size, channels),
            chunk_shape=(*chunk, channels),
            shard_shape=None,
            data_type=str(info.get("data_type")),
            sharding=f"uint64_sharded, {spec.hash}, preshift {spec.preshift_bits}, "
            f"{spec.minishard_bits} minishard bits, {spec.shard_bits} shard bits",
        ),
        shown_sizes=sizes,
    )


def _key_path(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"key should be a relative path, not {key!r}")
    path = posixpath.normpath(key)
    if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(f"key {key!r} leads out of the volume's directory")
    return path


def _integer(value: Any, name: str, least: int, most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} should be an integer in [{least}, {most}], not {value!r}")
    return value


def _triple(value: Any, name: str, least: int) -> Coords:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{name} should be a list of 3 integers, not {value!r}")
    return tuple(_integer(v, name, least) for v in value)


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


def _sharding_spec(sharding: Any) -> ShardingSpec:
    if not isinstance(sharding, dict):
        raise ValueError(f"sharding should be an object, not {sharding!r}")
    if sharding.get("@type") != SHARDED:
        raise ValueError(f"sharding @type should be {SHARDED}, not {sharding.get('@type')!r}")
    minishard_bits = _integer(sharding["minishard_bits"], "minishard_bits", 0, 32)
    return ShardingSpec(
        preshift_bits=_integer(sharding.get("preshift_bits", 0), "preshift_bits", 0, 64),
        hash=cast(
            "Literal['identity', 'murmurhash3_x86_128']",
            _choice(sharding.get("hash"), "hash", ("identity", "murmurhash3_x86_128")),
        ),
        minishard_bits=minishard_bits,
        shard_bits=_integer(sharding["shard_bits"], "shard_bits", 0, 64 - minishard_bits),
        minishard_index_encoding=_encoding(sharding, "minishard_index_encoding"),
        data_encoding=_encoding(sharding, "data_encoding"),
    )


def _encoding(sharding: dict[str, Any], name: str) -> Literal["raw", "gzip"]:
    return cast("Literal['raw', 'gzip']", _choice(sharding.get(name, "raw"), name, ("raw", "gzip")))


def _choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """Neuroglancer compares these without regard to case."""
    if not isinstance(value, str) or value.lower() not in choices:
        raise ValueError(f"{name} should be one of {', '.join(choices)}, not {value!r}")
    return value.lower()


PRECOMPUTED = Precomputed()
