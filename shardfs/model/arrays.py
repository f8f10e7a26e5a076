"""Descriptions of arrays and images that all formats and layouts share. Plain values; no I/O."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Codec(NamedTuple):
    """A codec with its parameters, by its name in Zarr v3 ("gzip", "zstd", "blosc", "crc32c", "jpeg", ...)."""

    name: str
    configuration: Mapping[str, Any] = MappingProxyType({})


BYTES = Codec("bytes")
"""The serializer that writes the elements' memory unchanged."""


@dataclass(frozen=True, slots=True)
class ChunkEncoding:
    """How the bytes of a chunk encode its elements: all that a decoder or an encoder needs.

    Args:
        data_type: the elements' type in memory, in numpy's notation: "|u1", "<u2", ">f8".
        order: memory axis i, slowest first, is array axis `order[i]`.
        clipped: whether chunks at the edge hold only the elements inside the array; else they are full.
        serializer: turns elements into bytes; "bytes" writes their memory unchanged.
        codecs: bytes-to-bytes codecs, in the order of encoding.
        frame: the header before the payload: "none", "n5" (block header), "bcolz" (16 bytes).
    """

    data_type: str
    order: tuple[int, ...]
    clipped: bool = False
    serializer: Codec = BYTES
    codecs: tuple[Codec, ...] = ()
    frame: Literal["none", "n5", "bcolz"] = "none"


@dataclass(frozen=True)
class Array:
    """An array, independent of its format. Axes are in C order: the last one varies fastest in an ordinary chunk.

    Args:
        chunk: the shape of a full chunk.
        data_type: numpy's notation, in native byte order or without one: "|u1", "<u2".
        fill_value: the elements of chunks that are not stored: a number, bool, [re, im], "NaN", "Infinity" or
            "-Infinity".
        encoding: how the stored chunks are encoded.
        grid_axes: array axis i is axis `grid_axes[i]` of the collection's chunk grid. None: the array has one chunk
            along this axis, and the grid omits the axis.
        names: the names of the axes, if they have any.
        offset: the position of the array's first element, in elements.
        attributes: the user's attributes.
        codec: the only codec in which layouts may show the chunks, "raw" for none; None lets the layout choose.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    data_type: str
    encoding: ChunkEncoding
    grid_axes: tuple[int | None, ...]
    fill_value: Any = 0
    names: tuple[str | None, ...] | None = None
    offset: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    codec: str | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each of the array's axes, those at the edge included."""
        return tuple(-(-s // c) for s, c in zip(self.shape, self.chunk, strict=True))

    def inside(self, coords: Sequence[int]) -> tuple[int, ...]:
        """The number of the array's elements along each axis in the chunk at these grid coordinates.

        Below 1 along an axis on which the coordinates are outside of the grid.
        """
        cells = (0 if axis is None else coords[axis] for axis in self.grid_axes)
        return tuple(min(c, n - cell * c) for cell, n, c in zip(cells, self.shape, self.chunk, strict=True))

    @property
    def is_cropped(self) -> bool:
        """Whether stored chunks at the edge are smaller than `chunk`."""
        return self.encoding.clipped and any(s % c for s, c in zip(self.shape, self.chunk, strict=True))


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a multiscale image, as in OME-NGFF: `type` is "space", "time", "channel" or None."""

    name: str
    type: str | None = None
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One resolution of an image. `scale` and `translation` have one number for each axis, in the axis's unit."""

    path: str
    scale: tuple[float, ...]
    translation: tuple[float, ...]


MOST = sys.float_info.max


def numbers(values: Any, count: int) -> tuple[float, ...]:
    """The values as `count` floats. Raise ValueError if they are not `count` finite numbers."""
    elements = tuple(values)
    if len(elements) != count or not all(isinstance(v, int | float) and abs(v) <= MOST for v in elements):
        raise ValueError(f"{count} numbers expected, not {elements!r:.80}")
    return tuple(map(float, elements))


def finest_first(levels: Iterable[Level]) -> tuple[Level, ...]:
    """Sort levels by the volume of a voxel, smallest first."""
    return tuple(sorted(levels, key=lambda level: math.prod(map(abs, level.scale))))


@dataclass(frozen=True, slots=True)
class Multiscale:
    """An image in several resolutions, finest first. Axes are in C order."""

    name: str
    axes: tuple[Axis, ...]
    levels: tuple[Level, ...]
    segmentation: bool = False
