"""Neuroglancer precomputed: volumes, and what is keyed by ids: meshes, skeletons, annotations.

https://github.com/google/neuroglancer/tree/master/src/datasource/precomputed (volume.md, meshes.md, skeletons.md,
annotations.md, sharded.md)
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardfs.arrays import Codec
from shardfs.checks import Chain, Image
from shardfs.codecs import Gunzip
from shardfs.errors import CorruptShardError
from shardfs.formats import System, parse_json, print_json
from shardfs.grid import BoxNames, FlatNames, IdNames, MortonCode
from shardfs.model import U64, Blob, Collection, Coords, Dataset, Facts, Layer, Lead, Pair, Problem
from shardfs.shards.uint64_sharded import ENTRY, Ids, ShardingSpec, Uint64Sharded, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Describe: TypeAlias = Callable[[dict[str, Any], ShardingSpec], Collection]

ITEM_SIZES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float32": 4,
}  # fmt: skip
MAX_PARTS = 1000
"""A document of more scales, relationships or spatial levels is taken for damaged: real ones have some ten."""

MAX_RANK = 64
"""Of the cells of annotations: a name must fit in 255 bytes."""

_SEGMENT_PROPERTIES = re.compile(rb'\s*\{\s*"@type"\s*:\s*"neuroglancer_segment_properties"')
"""How a document begins that is all data and describes no shards; it may be too large to be parsed."""


class Precomputed:
    """See `formats.Format`."""

    documents = ("info",)
    systems = (
        System(
            "precomputed",
            "Neuroglancer volumes",
            "`info` with `scales`",
            "the volume: `0-64_0-64_0-16`",
            "tensorstore, cloud-volume",
            "tensorstore, cloud-volume",
        ),
        System(
            "precomputed",
            "Neuroglancer multi-resolution meshes",
            "`info`, `neuroglancer_multilod_draco`",
            "`ID.index` and `ID`",
            "igneous with cloud-volume",
            "cloud-volume",
        ),
        System(
            "precomputed",
            "Neuroglancer skeletons",
            "`info`, `neuroglancer_skeletons`",
            "`ID`",
            "igneous with cloud-volume; tensorstore (shards)",
            "cloud-volume, igneous",
        ),
        System(
            "precomputed",
            "Neuroglancer annotations",
            "`info`, `neuroglancer_annotations_v1`",
            "`ID`, and cells as `1_2_3`",
            "neuroglancer with tensorstore (shards)",
            "neuroglancer",
        ),
    )

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get("info")
        if raw is None or not raw.lstrip().startswith(b"{") or _SEGMENT_PROPERTIES.match(raw):
            return None  # "info" is a common name for other things
        info = parse_json(path, "info", raw)
        match info.get("@type"):
            case "neuroglancer_multiscale_volume":
                return _open_volume(path, info)
            case "neuroglancer_multilod_draco":
                return _open_whole(path, info, _meshes)
            case "neuroglancer_skeletons":
                return _open_whole(path, info, _skeletons)
            case "neuroglancer_annotations_v1":
                return _open_annotations(path, info)
            case "neuroglancer_legacy_mesh":
                return Dataset("precomputed", closed=True)
            case None if isinstance(info.get("scales"), list):
                return _open_volume(path, info)
        return None


class _Parts:
    """The parts of an info document that may each have a member `sharding`, and what they describe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._collections: list[Collection] = []
        self._problems: list[Problem] = []
        self._unwalked: set[str] = set()

    def unshard(self, part: Any, called: str, describe: Describe) -> Any:
        """What is shown of a part: the same without `sharding` if its chunks are shown one by one, else as it is.

        `called` is what messages call the part; "" is the whole document.
        """
        if not isinstance(part, dict):
            return part
        key = part.get("key") if called else None
        if isinstance(key, str) and "/" not in key:  # of a longer path other parts may hold datasets
            self._unwalked.add(key)
        if part.get("sharding") is None:
            return part
        try:
            self._collections.append(describe(part, ShardingSpec.parse(part["sharding"])))
        except (ValueError, TypeError, KeyError) as e:
            why = f"no member {e}" if isinstance(e, KeyError) else str(e)
            where = f"{self.path}/{key if isinstance(key, str) else called}".strip("/")
            self._problems.append(Problem(where, f"info{called and ', '}{called}: {why}"))
            return part
        # `sharding: null` would not do: Neuroglancer itself refuses that.
        return {k: v for k, v in part.items() if k != "sharding"}

    def unshard_all(self, listed: Any, member: str, called: str, describe: Describe) -> list[Any]:
        """`unshard` of each item of a list. Raise CorruptShardError if it is none, or absurdly long."""
        if not isinstance(listed, list):
            raise CorruptShardError(self.path, "info", f"{member} should be a list, not {type(listed).__name__}")
        if len(listed) > MAX_PARTS:
            raise CorruptShardError(self.path, "info", f"{len(listed)} {member}; {MAX_PARTS} is the limit")
        return [self.unshard(part, f"{called} {i}", describe) for i, part in enumerate(listed)]

    def dataset(self, shown: dict[str, Any], *, closed: bool = False) -> Dataset:
        """All of it. Raise CorruptShardError if `shown` is nested too deeply."""
        documents = {}
        if self._collections:
            try:
                documents["info"] = print_json(shown)
            except ValueError as e:
                raise CorruptShardError(self.path, "info", str(e)) from e
        return Dataset(
            "precomputed",
            tuple(self._collections),
            documents,
            tuple(self._problems),
            closed=closed,
            unwalked=frozenset(self._unwalked),
        )


def _layers(spec: ShardingSpec, ids: Ids | MortonCode) -> tuple[Layer, ...]:
    return (Layer(Uint64Sharded(spec, ids), pair=Pair(".index", ".data", ENTRY << spec.minishard_bits)),)


def _around(spec: ShardingSpec) -> tuple[Codec, ...]:
    """The container around each chunk."""
    return (Codec("gzip", {}),) if spec.data_encoding == "gzip" else ()


def _key_path(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"key should be a relative path, not {key!r}")
    path = posixpath.normpath(key)
    if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(f"key {key!r} leads out of the directory of the info document")
    return path


# ---- volumes ----


def _open_volume(path: str, info: dict[str, Any]) -> Dataset:
    parts = _Parts(path)
    scales = parts.unshard_all(info.get("scales"), "scales", "scale", partial(_scale, info))
    return parts.dataset({**info, "scales": scales})


def _scale(info: dict[str, Any], scale: dict[str, Any], spec: ShardingSpec) -> Collection:
    size, chunk, offset = _geometry(scale)
    item = ITEM_SIZES.get(str(info.get("data_type")).lower())
    channels = integer(info.get("num_channels", 1), "num_channels", 1)
    encoding = str(scale.get("encoding"))
    names = BoxNames(size, chunk, offset)
    sizes = None
    if encoding == "raw" and item is not None:
        voxel_bytes = np.uint64(item * channels)

        def sizes(coords: U64) -> U64:
            return names.voxels_many(coords) * voxel_bytes

    def image(coords: Coords) -> Image:
        return Image((*names.shape(coords), channels), str(info.get("data_type")).lower())

    return Collection(
        format="precomputed",
        path=_key_path(scale["key"]),
        names=names,
        layers=_layers(spec, MortonCode(names.grid)),
        codecs=(encoding,),
        facts=Facts((*size, channels), (*chunk, channels), None, str(info.get("data_type")), str(spec)),
        transform=Gunzip(sizes) if spec.data_encoding == "gzip" else None,
        check=Chain(_around(spec), sizes, "" if encoding == "raw" else encoding, image),
    )


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


def _triple(value: Any, name: str, least: int) -> Coords:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{name} should be a list of 3 integers, not {value!r}")
    return tuple(integer(v, name, least) for v in value)


# ---- meshes, skeletons, annotations ----


def _open_whole(path: str, info: dict[str, Any], describe: Describe) -> Dataset:
    """A directory of which the whole info document is the only part."""
    parts = _Parts(path)
    return parts.dataset(parts.unshard(info, "", describe), closed=True)


def _open_annotations(path: str, info: dict[str, Any]) -> Dataset:
    parts, shown = _Parts(path), dict(info)
    if "by_id" in info:
        shown["by_id"] = parts.unshard(info["by_id"], "by_id", _annotations_by_id)
    for member, called, describe in (
        ("relationships", "relationship", _annotations_by_id),
        ("spatial", "spatial level", _annotations_by_cell),
    ):
        if member in info:
            shown[member] = parts.unshard_all(info[member], member, called, describe)
    return parts.dataset(shown)


def _annotations_by_id(index: dict[str, Any], spec: ShardingSpec) -> Collection:
    return _by_id(_key_path(index["key"]), "annotations", spec)


def _annotations_by_cell(level: dict[str, Any], spec: ShardingSpec) -> Collection:
    shape = level["grid_shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_RANK:
        raise ValueError(f"grid_shape should be a list of 1 to {MAX_RANK} integers, not {shape!r}")
    grid = tuple(integer(n, "grid_shape", 1) for n in shape)
    return Collection(
        format="precomputed",
        path=_key_path(level["key"]),
        names=FlatNames(grid, b"", b"_", b""),
        layers=_layers(spec, MortonCode(grid)),
        codecs=(),
        facts=Facts(grid, (1,) * len(grid), None, "annotations", str(spec)),
        transform=Gunzip() if spec.data_encoding == "gzip" else None,
        check=Chain(_around(spec), encoding="annotations"),
    )


def _skeletons(_: dict[str, Any], spec: ShardingSpec) -> Collection:
    return _by_id("", "skeletons", spec)


def _by_id(path: str, what: str, spec: ShardingSpec) -> Collection:
    return Collection(
        format="precomputed",
        path=path,
        names=IdNames(),
        layers=_layers(spec, Ids()),
        codecs=(),
        facts=Facts((), (), None, what, str(spec)),
        transform=Gunzip() if spec.data_encoding == "gzip" else None,
        check=Chain(_around(spec), encoding=what),
    )


def _meshes(_: dict[str, Any], spec: ShardingSpec) -> Collection:
    """What the index of a shard names is the manifest; the fragments lie right before it, never in a container."""
    return Collection(
        format="precomputed",
        path="",
        names=IdNames((b".index", b"")),
        layers=_layers(spec, Ids(files=2)),
        codecs=(),
        facts=Facts((), (), None, "meshes", str(spec)),
        lead=Lead(fragments_size, Gunzip() if spec.data_encoding == "gzip" else None),
    )


def fragments_size(manifest: bytes) -> int:
    """How many bytes all fragments of a multi-resolution mesh have together, by its manifest.

    All is little-endian. Chunk shape and grid origin (3 float32 each), the number L of levels of detail (uint32), their
    scales (L float32), vertex offsets (3 L float32) and numbers of fragments (L uint32); then, for each level of n
    fragments, their positions (3 n uint32) and their sizes (n uint32; meshes.md calls those offsets).

    Raise ValueError, with the reason, if its length is not what it says. Nothing is allocated by what it says.
    """
    if len(manifest) < 28:
        raise ValueError(f"a mesh manifest has at least 28 bytes, not {len(manifest)}")
    levels = int.from_bytes(manifest[24:28], "little")
    head = 28 + 20 * levels
    if head > len(manifest):
        raise ValueError(f"a mesh manifest of {levels} levels has at least {head} bytes, not {len(manifest)}")
    counts = np.frombuffer(manifest, "<u4", levels, head - 4 * levels).astype(np.int64)
    wanted = head + 16 * int(counts.sum())
    if wanted != len(manifest):
        raise ValueError(f"this mesh manifest should have {wanted} bytes, not {len(manifest)}")
    counts = counts[counts > 0]
    if not len(counts):
        return 0
    ends = 4 * counts.cumsum()
    # In turn the sizes of one level and the positions of the next.
    bounds = np.stack([ends - counts, ends], axis=1).ravel()[:-1]
    return int(np.add.reduceat(np.frombuffer(manifest, "<u4", offset=head), bounds, dtype=np.uint64)[::2].sum())


PRECOMPUTED = Precomputed()
