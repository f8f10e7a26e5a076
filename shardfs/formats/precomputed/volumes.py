"""Volumes: an array for each scale, and all scales as one image."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.checks import Chain, Image
from shardfs.codecs.images import PREFIX
from shardfs.formats.documents import UNFIT, form_of, integer, integers, listed, reason
from shardfs.formats.precomputed.parts import Parts, around, codes, gunzip, key_path, layers
from shardfs.model.arrays import BYTES, Array, Axis, ChunkEncoding, Codec, Level, Multiscale, finest_first, numbers
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.grid import BoxNames, MortonCode
from shardfs.shards.byte_layouts.uint64_spec import ShardingSpec
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.model.dataset import Dataset
    from shardfs.model.values import U64, Coords

DATA_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32")
SPACE = ("z", "y", "x")
NANOMETER = "nanometer"

CODECS = {"compressed_segmentation": ("compressed_segmentation_block_size", "block_size")}
"""Encodings whose decoding needs a member of the scale: the member's name, and the codec parameter's name."""

NAMED = ("mesh", "skeletons", "segment_properties")


def open_volume(path: str, info: dict[str, Any]) -> Dataset:
    """The dataset that a volume's info document describes. Raise CorruptShardError if it has no list of scales."""
    parts = Parts(path)
    scales = parts.unshard_all(info.get("scales"), "scales", "scale", partial(_sharded, info))
    return _described(replace(parts.dataset({**info, "scales": scales}), named=tuple(_named(info))), info)


def _named(info: Mapping[str, Any]) -> Iterator[str]:
    """The directories of meshes, skeletons and segment properties, unless outside of the volume's directory."""
    for member in NAMED:
        with suppress(ValueError):
            yield key_path(info.get(member))


# ---- one scale ----


class _StoredScale:
    """The members of a scale that sharding needs. Raise one of `UNFIT` for an invalid scale."""

    def __init__(self, info: Mapping[str, Any], scale: Mapping[str, Any], *, is_sharded: bool) -> None:
        chunks = scale["chunk_sizes"]
        if not isinstance(chunks, list) or not chunks or (is_sharded and len(chunks) != 1):
            raise ValueError(f"chunk_sizes of a sharded scale should have one entry, not {chunks!r}")
        self.size = _triple(scale["size"], "size", 0)
        self.chunk = _triple(chunks[0], "chunk_sizes", 1)  # each further chunk size is another copy of the data
        self.offset = _triple(scale.get("voxel_offset", [0, 0, 0]), "voxel_offset", -(2**63))
        self.data_type = str(info.get("data_type"))
        dtype = self.data_type.lower()
        self.dtype = np.dtype(dtype) if dtype in DATA_TYPES else None
        self.channels = integer(info.get("num_channels", 1), "num_channels", 1)
        self.encoding = str(scale.get("encoding"))
        self.names = BoxNames(self.size, self.chunk, self.offset)
        self.path = key_path(scale["key"])

    def collection(self, layers: tuple[Layer, ...], sharding: str) -> Collection:
        """The collection of this scale, without a transform."""
        shape, chunk = (*self.size, self.channels), (*self.chunk, self.channels)
        return Collection(
            format="precomputed",
            path=self.path,
            names=self.names,
            layers=layers,
            codecs=(self.encoding,),
            facts=Facts(shape, chunk, None, self.data_type, sharding, self.offset),
            compressible=True,
        )

    def form(self, part: Mapping[str, Any], spec: ShardingSpec) -> str:
        """The `Collection.form` of this scale. Chunks end with the volume, so its edges count where they cut chunks."""
        edges = [s if s % c else None for s, c in zip(self.size, self.chunk, strict=True)]
        block = part.get("compressed_segmentation_block_size")
        kind = self.data_type, self.channels, self.encoding, block
        return form_of("precomputed", kind, self.chunk, self.offset, edges, codes(self.names.grid), astuple(spec))


def _triple(value: Any, name: str, minimum: int) -> Coords:
    triple = integers(value, name, minimum)
    if len(triple) != 3:
        raise ValueError(f"{name} should be a list of 3 integers, not {value!r:.80}")
    return triple


def _sharded(info: dict[str, Any], part: dict[str, Any], spec: ShardingSpec) -> Collection:
    scale = _StoredScale(info, part, is_sharded=True)
    names, sizes = scale.names, None
    if scale.encoding == "raw" and scale.dtype is not None:
        voxel_bytes = np.uint64(scale.dtype.itemsize * scale.channels)

        def sizes(coords: U64) -> U64:
            return names.voxels_many(coords) * voxel_bytes

    return replace(
        scale.collection(layers(spec, MortonCode(names.grid)), str(spec)),
        transform=gunzip(spec, sizes),
        check=Chain(around(spec), sizes, "" if scale.encoding == "raw" else scale.encoding, _image_check(scale, part)),
        form=scale.form(part, spec),
    )


def _image_check(scale: _StoredScale, part: Mapping[str, Any]) -> Image | None:
    """The facts that the check of image chunks needs; None if the document lacks them."""
    try:
        configuration = _serializer(scale.encoding, part).configuration
    except UNFIT:
        return None
    if scale.dtype is None:
        return None
    return Image(
        scale.channels,
        scale.dtype.name,
        configuration,
        lambda coords: (scale.channels, *scale.names.shape(coords)[::-1]),
    )


# ---- what other layouts need to know ----


def _described(dataset: Dataset, info: Mapping[str, Any]) -> Dataset:
    """The dataset with descriptions of its arrays and image, or with `indescribable`."""
    sharded = {c.path: c for c in dataset.collections}
    described: dict[str, Collection] = {}
    try:
        scales = [_described_scale(info, part, sharded) for part in info["scales"]]
        for collection in scales:
            if described.setdefault(collection.path, collection) is not collection:
                raise ValueError(f"two scales have the key {collection.path!r:.80}")
        image = _image(info, [c.path for c in scales])
    except (*UNFIT, AttributeError) as e:
        return replace(dataset, indescribable=f"info: {reason(e)}")
    return replace(
        dataset,
        collections=tuple(described[path] for path in sharded),
        unsharded=tuple(c for path, c in described.items() if path not in sharded),
        attributes={},
        multiscales=(image,) if image.levels else (),
    )


def _described_scale(info: Mapping[str, Any], part: Mapping[str, Any], sharded: Mapping[str, Collection]) -> Collection:
    sharding = part.get("sharding")
    scale = _StoredScale(info, part, is_sharded=sharding is not None)
    if sharding is not None:
        return replace(sharded[scale.path], array=_array(scale, part, around(ShardingSpec.parse(sharding))))
    layer = Layer(Unsharded(scale.names.grid, scale.names.name, scale.names.cell))
    return replace(scale.collection((layer,), "none"), array=_array(scale, part, ()))


def _array(scale: _StoredScale, part: Mapping[str, Any], container: tuple[Codec, ...]) -> Array:
    """The array of a scale, with axes (z, y, x), or (c, z, y, x) if there are several channels, all in one chunk."""
    if scale.dtype is None:
        raise ValueError(f"data_type should be one of {', '.join(DATA_TYPES)}, not {scale.data_type!r:.80}")
    head = (scale.channels,) if scale.channels > 1 else ()
    rank = len(head) + 3
    encoding = ChunkEncoding(
        scale.dtype.newbyteorder("<").str,
        tuple(range(rank)),
        clipped=True,
        serializer=_serializer(scale.encoding.lower(), part),
        codecs=container,
    )
    return Array(
        (*head, *scale.size[::-1]),
        (*head, *scale.chunk[::-1]),
        scale.dtype.str,
        encoding,
        (*(None for _ in head), 2, 1, 0),
        names=(*("c" for _ in head), *SPACE),
        offset=(*(0 for _ in head), *scale.offset[::-1]),
    )


def _serializer(encoding: str, scale: Mapping[str, Any]) -> Codec:
    if encoding == "raw":
        return BYTES
    if encoding not in CODECS:
        return Codec(PREFIX + encoding)
    member, parameter = CODECS[encoding]
    return Codec(PREFIX + encoding, {parameter: list(_triple(scale[member], member, 1))})


def _image(info: Mapping[str, Any], paths: Sequence[str]) -> Multiscale:
    """The image of all scales.

    The position of a voxel is its corner in precomputed, but its centre in an image. The positions in the image are the
    centres, shifted by half a voxel of the finest scale, so that the finest scale keeps its offset.
    """
    head = [Axis("c", "channel")] if integer(info.get("num_channels", 1), "num_channels", 1) > 1 else []
    scales = [(path, _resolution(s["resolution"]), s.get("voxel_offset", [0, 0, 0]))
              for path, s in zip(paths, info["scales"], strict=True)]  # fmt: skip
    finest = min((r for _, r, _ in scales), key=math.prod, default=())
    levels = []
    for path, resolution, offset in scales:
        corner = ((o + 0.5) * r - 0.5 * f for o, r, f in zip(offset, resolution, finest, strict=True))
        scale = (*(1.0 for _ in head), *resolution[::-1])
        shift = (*(0.0 for _ in head), *tuple(corner)[::-1])
        levels.append(Level(path, scale, numbers(shift, len(shift))))
    axes = (*head, *(Axis(name, "space", NANOMETER) for name in SPACE))
    return Multiscale("", axes, finest_first(levels), str(info.get("type")).lower() == "segmentation")


def _resolution(value: Any) -> tuple[float, ...]:
    """The resolution of a scale in nanometers, x first. Raise ValueError for anything but 3 positive numbers."""
    resolution = tuple(float(v) for v in listed(value, "resolution"))
    if len(resolution) != 3 or not all(math.isfinite(v) and v > 0 for v in resolution):
        raise ValueError(f"resolution should be a list of 3 positive numbers, not {value!r:.80}")
    return resolution
