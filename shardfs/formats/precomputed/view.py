"""The layout `precomputed`: shows arrays as volumes, and images as volumes with a scale for each level.

Arrays may have up to three spatial axes and one axis of channels. Chunks are shown raw, cropped to the volume. Chunks
that are stored uncompressed, little-endian and with x as the fastest axis are shown unchanged; others are decoded.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.formats import n5_multiscales
from shardfs.formats.documents import print_strict
from shardfs.formats.layouts import (
    CODECS,
    PACKED,
    array_of,
    from_above,
    is_compressed,
    join,
    laid_out,
    require_described,
    shown,
    zero_fillers,
)
from shardfs.formats.zarr_metadata import name_of
from shardfs.model.arrays import Axis, ChunkEncoding, Level, Multiscale
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import BoxNames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset, Surroundings
    from shardfs.model.values import Coords

DATA_TYPES = frozenset(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"))
"""The data types that all readers support."""

SEGMENT_IDS = frozenset(("uint32", "uint64"))
"""The data types that count as segmentations even without metadata, unless there are several channels."""

XYZ = ("x", "y", "z")
KINDS = {"x": "space", "y": "space", "z": "space", "t": "time", "time": "time", "c": "channel", "channel": "channel"}

NANOMETERS = {f"{prefix}meter": float(f"1e{power + 9}") for prefix, (_, power) in n5_multiscales.PREFIXES.items()} | {
    "angstrom": 0.1, "inch": 2.54e7, "foot": 3.048e8, "yard": 9.144e8, "mile": 1.609344e12
}  # fmt: skip
"""The nanometers in each unit of OME-NGFF. Other or missing units count as nanometers, precomputed's only unit."""


def shown_as_volumes(dataset: Dataset, around: Surroundings) -> Dataset:
    """The dataset in this layout. Raise UnsupportedError, with the reason, if precomputed cannot express it."""
    require_described(dataset)
    collections = {c.path: c for c in dataset.all_collections}
    if dataset.closed and len(collections) != 1:
        raise UnsupportedError(f"{dataset.format} is shown in its own layout only")
    image = around.level_of or next(iter(dataset.multiscales), None)
    levels = [level.path for level in image.levels] if image is not None else []
    volumes = {}
    if image is not None:
        volumes[""] = _of_image(image, collections, around)
    for path, collection in collections.items():
        if path not in levels:
            volumes["" if dataset.closed else path] = _of_array(collection)
    return laid_out(
        "precomputed",
        dataset,
        (scale.collection(path) for path, volume in volumes.items() for scale in volume.scales),
        {join(path, "info"): print_strict(volume.info()) for path, volume in volumes.items()},
        unwalked=(scale.key for volume in volumes.values() for scale in volume.scales),
        hidden=(path for path in levels if "/" not in path),
    )


# ---- volumes ----


@dataclass(frozen=True)
class _Volume:
    """A volume: scales, finest first, with one data type and number of channels."""

    scales: Sequence[_ShownScale]
    segmentation: bool

    def info(self) -> dict[str, Any]:
        first = self.scales[0]
        is_segmentation = (self.segmentation or first.data_type in SEGMENT_IDS) and first.data_type != "float32"
        return {
            "@type": "neuroglancer_multiscale_volume",
            "type": "segmentation" if is_segmentation and first.channels == 1 else "image",
            "data_type": first.data_type,
            "num_channels": first.channels,
            "scales": [scale.member() for scale in self.scales],
        }


def _of_image(image: Multiscale, collections: Mapping[str, Collection], around: Surroundings) -> _Volume:
    if not image.levels:
        raise UnsupportedError("the image has no levels")
    finest, scales = min(image.levels, key=lambda level: math.prod(level.scale)), []
    for level in image.levels:
        try:
            collection = collections.get(level.path) or _collection_below(level.path, around.below.get(level.path))
            scales.append(replace(_scale(collection, image.axes, level, finest), home=level.path))
        except UnsupportedError as e:
            raise UnsupportedError(f"{level.path}: {e}") from e
    directories = {level.path.split("/")[0] for level in image.levels}
    return _volume(scales, segmentation=image.segmentation, reserved=around.names | directories)


def _collection_below(path: str, dataset: Dataset | None) -> Collection:
    """The collection of the level at `path`, with its stored path relative to the image's directory."""
    if dataset is not None:
        require_described(dataset)
    collections = () if dataset is None else dataset.all_collections
    if len(collections) != 1:
        raise UnsupportedError("no array is there")
    return from_above(path, collections[0])


def _of_array(collection: Collection) -> _Volume:
    """The volume of an array outside of images. Attributes of N5 viewers may give its resolution and offset."""
    array = array_of(collection)
    alone = n5_multiscales.image_of_dataset(array)
    names = array.names or (None,) * len(array.shape)
    axes = [Axis(name or "", KINDS.get((name or "").lower())) for name in names]
    level = Level("", (1.0,) * len(axes), tuple(map(float, array.offset or (0,) * len(axes))))
    if alone is not None:
        axes = [replace(axis, unit=described.unit) for axis, described in zip(axes, alone.axes, strict=True)]
        level = alone.levels[0]
    return _volume([_scale(collection, axes, level, level)], segmentation=False)


def _volume(scales: Sequence[_ShownScale], *, segmentation: bool, reserved: Set[str] = frozenset()) -> _Volume:
    """The volume of these scales, with unique keys. `reserved` are further names in the source that keys must avoid.

    A scale may have the name of its own directory, which is hidden.
    """
    if len({(scale.data_type, scale.channels) for scale in scales}) != 1:
        raise UnsupportedError(
            "the levels of the image differ in data type or number of channels, which precomputed cannot express"
        )
    named: list[_ShownScale] = []
    for scale in sorted(scales, key=lambda s: math.prod(s.resolution)):
        keys = {other.key for other in named} | (reserved - {scale.home})
        number = next(n for n in itertools.count() if _numbered(scale.key, n) not in keys)
        named.append(replace(scale, key=_numbered(scale.key, number)))
    gzipped = any(scale.array.codec == PACKED and is_compressed(scale.array) for scale in named)
    return _Volume([replace(scale, gzipped=gzipped) for scale in named], segmentation)


def _numbered(key: str, number: int) -> str:
    return f"{key}_{number}" if number else key


# ---- scales ----


class _Roles(NamedTuple):
    """The roles of an array's axes.

    Args:
        space: the axes x, y and z, or None for each missing one.
        channel: the axis of channels, if there is one.
        others: further axes, which have one element each.
    """

    space: tuple[int | None, ...]
    channel: int | None
    others: tuple[int, ...]

    @property
    def order(self) -> Coords:
        """The order of axes in memory, slowest first."""
        fastest = (self.channel, *self.space[::-1])
        return (*self.others, *(axis for axis in fastest if axis is not None))


@dataclass(frozen=True)
class _ShownScale:
    """An array shown as a scale.

    Args:
        resolution, offset: in nm and in voxels, x first.
        home: the stored directory of a level of an image.
        gzipped: whether chunks are compressed, as shards with `data_encoding: gzip` have them.
    """

    key: str
    stored: Collection
    array: Array
    data_type: str
    roles: _Roles
    resolution: tuple[float, ...]
    offset: Coords
    home: str = ""
    gzipped: bool = False

    @property
    def channels(self) -> int:
        return 1 if self.roles.channel is None else self.array.shape[self.roles.channel]

    def _spatial(self, values: Coords) -> Coords:
        return tuple(1 if axis is None else values[axis] for axis in self.roles.space)

    def member(self) -> dict[str, Any]:
        """The item of `scales` for this scale."""
        return {
            "key": self.key,
            "size": self._spatial(self.array.shape),
            "resolution": self.resolution,
            "voxel_offset": self.offset,
            "chunk_sizes": [self._spatial(self.array.chunk)],
            "encoding": "raw",
        }

    def collection(self, path: str) -> Collection:
        """The collection of this scale, with its chunks in the directory `key` of the volume at `path`."""
        array = self.array
        codecs = CODECS["gzip"] if self.gzipped else ()
        data_type = np.dtype(self.data_type).newbyteorder("<").str
        encoding = ChunkEncoding(data_type, self.roles.order, clipped=True, codecs=codecs)
        names = BoxNames(self._spatial(array.shape), self._spatial(array.chunk), self.offset)
        axes = [None if axis is None else array.grid_axes[axis] for axis in self.roles.space]
        fillers = zero_fillers(array, encoding)
        around = ("raw", *(codec.name for codec in codecs))
        collection = shown(self.stored, join(path, self.key), encoding, names, axes, around, *fillers)
        return replace(collection, compressible=True)


def _scale(collection: Collection, axes: Sequence[Axis], level: Level, finest: Level) -> _ShownScale:
    """The array as the scale of a level. Raise UnsupportedError, with the reason, if precomputed cannot express it."""
    array = array_of(collection)
    if len(array.shape) != len(axes):
        raise UnsupportedError(f"an array of {len(array.shape)} axes in an image of {len(axes)}")
    dtype = np.dtype(array.data_type)
    data_type = "uint8" if dtype.kind == "b" else name_of(array.data_type)
    if data_type not in DATA_TYPES:
        raise UnsupportedError(f"precomputed has no data type {data_type}")
    roles = _roles(array, axes)
    factors = [NANOMETERS.get(axis.unit or "", 1.0) for axis in axes]
    resolution = tuple(1.0 if a is None else level.scale[a] * factors[a] for a in roles.space)
    if not all(math.isfinite(r) and r > 0 for r in resolution):
        raise UnsupportedError(f"the size of a voxel should be finite and positive, not {resolution} nm")
    offset = tuple(0 if a is None else _voxel_offset(level, finest, a) for a in roles.space)
    key = "_".join(np.format_float_positional(r, 6, unique=True, fractional=False, trim="-") for r in resolution)
    return _ShownScale(key, collection, array, data_type, roles, tuple(map(n5_multiscales.tidy, resolution)), offset)


def _voxel_offset(level: Level, finest: Level, axis: int) -> int:
    """The offset of a level in its voxels, rounded to the nearest integer, as precomputed requires; ties round down.

    The position of a voxel is its centre in an image, but its corner in precomputed. The origin here is the corner of
    the finest voxel with its centre at 0, so that levels that cover the same space have the same origin.
    """
    place = (level.translation[axis] + finest.scale[axis] / 2) / level.scale[axis]
    if not abs(place) < 2**53:
        raise UnsupportedError(f"the offset of axis {axis} should be less than 2**53 voxels, not {place}")
    return math.ceil(round(place, 6) - 1)


def _roles(array: Array, axes: Sequence[Axis]) -> _Roles:
    kinds = [axis.type if axis.type in KINDS.values() else KINDS.get(axis.name.lower()) for axis in axes]
    space = [i for i, kind in enumerate(kinds) if kind in ("space", None)]
    channels = [i for i, kind in enumerate(kinds) if kind == "channel"]
    if len(space) > len(XYZ) and not channels and kinds[space[-4]] is None:
        channels.append(space.pop(-4))  # an axis without a type counts as channels, because channels precede z
    single_axes = [i for i, kind in enumerate(kinds) if kind == "time"] + space[:-3] + channels[1:]
    space = space[-3:]
    for i in single_axes:
        if array.shape[i] != 1:
            name = axes[i].name or f"number {i}"
            raise UnsupportedError(f"axis {name!r:.80} has {array.shape[i]} elements; precomputed has no such axis")
    if channels and (chunks := array.grid[channels[0]]) > 1:
        many = array.shape[channels[0]]
        raise UnsupportedError(f"its {many} channels are in {chunks} chunks; precomputed has all channels in one chunk")
    if not array.shape:
        raise UnsupportedError("precomputed has no arrays without axes")
    if channels and not array.shape[channels[0]]:
        raise UnsupportedError("its axis of channels has no elements")
    return _Roles(_placed(space, axes), channels[0] if channels else None, tuple(sorted(single_axes)))


def _placed(space: Sequence[int], axes: Sequence[Axis]) -> tuple[int | None, ...]:
    """The axes x, y and z, by their names; if they have other names, the last axis is x, the one before it y."""
    by_name = {axes[i].name.lower(): i for i in space}
    if len(by_name) != len(space) or not by_name.keys() <= set(XYZ):
        by_name = dict(zip(XYZ, space[::-1], strict=False))
    return tuple(by_name.get(name) for name in XYZ)
