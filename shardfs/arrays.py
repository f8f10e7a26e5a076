"""What an array is, whatever ecosystem stores it: the values in which formats and views meet. No I/O, no arithmetic."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Codec(NamedTuple):
    """A codec with its parameters, called as Zarr v3 calls it ("gzip", "zstd", "blosc", "crc32c", "jpeg", ...)."""

    name: str
    configuration: Mapping[str, Any] = MappingProxyType({})


BYTES = Codec("bytes")
"""Lays elements out as they are."""


@dataclass(frozen=True, slots=True)
class ChunkEncoding:
    """What the bytes of a chunk mean: everything that is needed to decode it, or to make another's bytes of it.

    Args:
        data_type: of the elements as they are laid out, as numpy writes it: "|u1", "<u2", ">f8".
        order: memory axis i, slowest first, is array axis `order[i]`.
        clipped: a chunk at the edge holds the elements inside the array only; else it is full.
        serializer: what makes bytes of the elements; "bytes" lays them out as they are.
        codecs: from bytes to bytes, in the order of encoding.
        frame: what stands before the payload: "none", "n5" (block header), "bcolz" (16 bytes).
    """

    data_type: str
    order: tuple[int, ...]
    clipped: bool = False
    serializer: Codec = BYTES
    codecs: tuple[Codec, ...] = ()
    frame: Literal["none", "n5", "bcolz"] = "none"


@dataclass(frozen=True)
class Array:
    """An array as all ecosystems understand it. Axes in C order: the last one varies fastest in an ordinary chunk.

    Args:
        chunk: shape of a full chunk.
        data_type: as numpy writes it, in native byte order or without one: "|u1", "<u2".
        fill_value: of chunks that do not exist; a number, bool, [re, im], "NaN", "Infinity" or "-Infinity".
        encoding: of its chunks.
        grid_axes: array axis i is axis `grid_axes[i]` of the collection's chunk grid; None if there is one chunk
            along it, which the grid does not mention.
        names: of the axes, if they have any.
        offset: where the array's first element lies, in elements.
        attributes: the user's own.
        codec: the only codec in which layouts may show the chunks, "raw" for none; None leaves it to the layout.
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
        """Chunks along each axis."""
        return tuple(-(-s // c) for s, c in zip(self.shape, self.chunk, strict=True))


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a multiscale image, as OME-NGFF describes it: type is "space", "time", "channel" or None."""

    name: str
    type: str | None = None
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One resolution. `scale` and `translation`, one number for each axis, in the axes' units."""

    path: str
    scale: tuple[float, ...]
    translation: tuple[float, ...]


MOST = sys.float_info.max


def numbers(values: Any, count: int) -> tuple[float, ...]:
    """So many numbers. Raise ValueError if they are others, or beyond all floats."""
    found = tuple(values)
    if len(found) != count or not all(isinstance(v, int | float) and abs(v) <= MOST for v in found):
        raise ValueError(f"{count} numbers expected, not {found!r:.80}")
    return tuple(map(float, found))


def finest_first(levels: Iterable[Level]) -> tuple[Level, ...]:
    """In the order in which an image has them, whatever the source lists first."""
    return tuple(sorted(levels, key=lambda level: math.prod(map(abs, level.scale))))


@dataclass(frozen=True, slots=True)
class Multiscale:
    """An image in several resolutions, finest first. Axes in C order."""

    name: str
    axes: tuple[Axis, ...]
    levels: tuple[Level, ...]
    segmentation: bool = False
