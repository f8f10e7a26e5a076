"""Meshes, skeletons and annotations, whose keys are 64-bit ids."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.checks import Chain
from shardfs.formats.documents import form_of
from shardfs.formats.precomputed.parts import Parts, around, codes, gunzip, key_path, layers
from shardfs.model.collection import Collection, Facts, Lead
from shardfs.model.grid import FlatNames, IdNames, MortonCode
from shardfs.shards.byte_layouts.uint64_spec import Ids, ShardingSpec, integer

if TYPE_CHECKING:
    from shardfs.formats.precomputed.parts import Describe
    from shardfs.model.collection import ChunkNames
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Coords

MAX_RANK = 64
"""The largest rank of cells of annotations, so that their names fit in 255 bytes."""


def open_whole(describe: Describe, path: str, info: dict[str, Any]) -> Dataset:
    """The dataset of a directory whose only part is the whole info document.

    Raise CorruptShardError as `Parts.dataset`.
    """
    parts = Parts(path)
    return parts.dataset(parts.unshard(info, "", describe), closed=True)


def open_annotations(path: str, info: dict[str, Any]) -> Dataset:
    """The dataset that the info document of annotations describes. Raise CorruptShardError if it is damaged."""
    parts, document = Parts(path), dict(info)
    if "by_id" in info:
        document["by_id"] = parts.unshard(info["by_id"], "by_id", _annotations_by_id)
    for member, called, describe in (
        ("relationships", "relationship", _annotations_by_id),
        ("spatial", "spatial level", _annotations_by_cell),
    ):
        if member in info:
            document[member] = parts.unshard_all(info[member], member, called, describe)
    return parts.dataset(document)


def _annotations_by_id(index: dict[str, Any], spec: ShardingSpec) -> Collection:
    return _collection(key_path(index["key"]), IdNames(), Ids(), "annotations", spec)


def _annotations_by_cell(level: dict[str, Any], spec: ShardingSpec) -> Collection:
    shape = level["grid_shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_RANK:
        raise ValueError(f"grid_shape should be a list of 1 to {MAX_RANK} integers, not {shape!r:.80}")
    grid = tuple(integer(n, "grid_shape", 1) for n in shape)
    names = FlatNames(grid, b"", b"_", b"")
    return _collection(key_path(level["key"]), names, MortonCode(grid), "annotations", spec, grid)


def skeletons(_: dict[str, Any], spec: ShardingSpec) -> Collection:
    """The collection of all skeletons in a directory."""
    return _collection("", IdNames(), Ids(), "skeletons", spec)


def meshes(_: dict[str, Any], spec: ShardingSpec) -> Collection:
    """The collection of all meshes in a directory, with two files for each mesh: the manifest, and the fragments.

    The index of a shard points to the manifest. The fragments are stored right before it, never compressed with gzip.
    """
    collection = _collection("", IdNames((b".index", b"")), Ids(files=2), "meshes", spec)
    return replace(collection, transform=None, check=None, lead=Lead(fragments_size, collection.transform))


def _collection(
    path: str, names: ChunkNames, ids: Ids | MortonCode, encoding: str, spec: ShardingSpec, grid: Coords = ()
) -> Collection:
    return Collection(
        format="precomputed",
        path=path,
        names=names,
        layers=layers(spec, ids),
        codecs=(),
        facts=Facts(grid, (1,) * len(grid), None, encoding, str(spec)),
        transform=gunzip(spec),
        check=Chain(around(spec), encoding=encoding),
        compressible=True,
        form=form_of("precomputed", encoding, codes(grid), astuple(spec)),
    )


def fragments_size(manifest: bytes) -> int:
    """The total size in bytes of all fragments of a multi-resolution mesh, from its manifest.

    The manifest, all little-endian, has these fields (meshes.md):

    - chunk shape and grid origin (3 float32 each), the number L of levels of detail (uint32);
    - for all levels: scales (L float32), vertex offsets (3 L float32), numbers of fragments (L uint32);
    - for each level of n fragments: positions (3 n uint32), sizes (n uint32; meshes.md names them offsets).

    Raise ValueError, with the reason, if the manifest's length contradicts its fields. The memory used depends on the
    length alone, never on the numbers in the fields.
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
    # Alternating sums over the sizes of one level and the positions of the next; only the sizes are used.
    bounds = np.stack([ends - counts, ends], axis=1).ravel()[:-1]
    return int(np.add.reduceat(np.frombuffer(manifest, "<u4", offset=head), bounds, dtype=np.uint64)[::2].sum())
