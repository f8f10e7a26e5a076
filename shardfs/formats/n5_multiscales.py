"""Reads and writes multiscale images in N5, which are attributes of groups and of the datasets in them.

N5 itself does not define images. There are these conventions:

- N5-viewer (https://github.com/saalfeldlab/n5-viewer) and BigDataViewer
  (https://github.com/bigdataviewer/bigdataviewer-core, "BDV N5 format"): the levels are named s0, s1, ..., and the
  group has `scales` or a list of `downsamplingFactors`.
- Neuroglancer (https://github.com/google/neuroglancer, src/datasource/n5): reads further members, such as `units`.
- COSEM: `multiscales` of the group has a transformation for each level.

All lists have x first, except COSEM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import truediv
from typing import TYPE_CHECKING, Any

from shardfs.formats.documents import UNFIT, is_inner_path
from shardfs.model.arrays import Axis, Level, Multiscale, finest_first, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardfs.model.arrays import Array

MAX_LEVELS = 1000
DEFAULT_AXES = ("x", "y", "z", "c", "t")
"""The axes of images without names of axes: the order of OME-Zarr's five axes, reversed."""
KINDS = {"x": "space", "y": "space", "z": "space", "t": "time", "c": "channel"}

PREFIXES = {
    "": ("", 0), "yotta": ("Y", 24), "zetta": ("Z", 21), "exa": ("E", 18), "peta": ("P", 15), "tera": ("T", 12),
    "giga": ("G", 9), "mega": ("M", 6), "kilo": ("k", 3), "hecto": ("h", 2), "deca": ("da", 1), "deci": ("d", -1),
    "centi": ("c", -2), "milli": ("m", -3), "micro": ("u", -6), "nano": ("n", -9), "pico": ("p", -12),
    "femto": ("f", -15), "atto": ("a", -18), "zepto": ("z", -21), "yocto": ("y", -24),
}  # fmt: skip
"""The prefixes of units: the symbol, and the power of ten."""

SYMBOLS = {prefix + unit: short + symbol for prefix, (short, _) in PREFIXES.items() for unit, symbol in (
    ("meter", "m"), ("second", "s")
)}  # fmt: skip
"""OME-NGFF's names of units, and the symbols that N5's viewers read."""

MICRO = {"µm": "micrometer", "μm": "micrometer", "µs": "microsecond"}
WORDS = {symbol: word for word, symbol in SYMBOLS.items()} | MICRO
ANGSTROM = "angstrom"


# ---- reading ----


def axes_of(attributes: Mapping[str, Any], rank: int) -> tuple[str, ...] | None:
    """The names of the axes from the attribute `axes`, x first; None if it is missing or invalid."""
    axes = attributes.get("axes")
    if not isinstance(axes, list) or len(axes) != rank or len(set(map(str, axes))) != rank:
        return None
    return tuple(axes) if all(isinstance(a, str) for a in axes) else None


def is_accepted(name: str, value: Any, rank: int) -> bool:
    """Whether tensorstore accepts a dataset with this attribute.

    tensorstore refuses datasets whose `axes`, `units` or `resolution` is not a list with one value for each axis. In
    other conventions, `units` is a single word.
    """
    match name:
        case "axes":
            return axes_of({name: value}, rank) is not None
        case "units" | "resolution":
            kind = str if name == "units" else int | float
            return isinstance(value, list) and len(value) == rank and all(isinstance(v, kind) for v in value)
    return True


@dataclass(frozen=True)
class LevelsBelow:
    """The `Levels` of an N5 group: finds an image from the attributes of the group and of its levels.

    Args:
        attributes: the attributes of the group.
    """

    attributes: Mapping[str, Any]

    def paths(self) -> Iterable[str]:
        if (listed := _cosem_of(self.attributes)) is not None:
            paths = [d.get("path") for d in listed["datasets"][:MAX_LEVELS]]
            return [p for p in paths if p and is_inner_path(p)]
        factors = _listed_factors(self.attributes)
        return (f"s{i}" for i in range(MAX_LEVELS if factors is None else len(factors[:MAX_LEVELS])))

    def image(self, levels: Mapping[str, Array]) -> Multiscale | None:
        try:
            if (listed := _cosem_of(self.attributes)) is not None:
                return _cosem(listed) if len(levels) == len(listed["datasets"]) else None
            return _of_factors(self.attributes, list(levels.values())) if levels else None
        except (*UNFIT, AttributeError):
            return None  # the attributes are invalid


def image_of_dataset(array: Array) -> Multiscale | None:
    """The image with one level that a dataset's own attributes describe; None if they describe no image."""
    attributes = array.attributes
    try:
        if isinstance(attributes.get("transform"), dict):
            return _cosem({"datasets": [{"path": "", "transform": attributes["transform"]}]})
        if any(name in attributes for name in ("pixelResolution", "resolution", "downsamplingFactors")):
            return _of_factors({"scales": [attributes.get("downsamplingFactors", [1] * len(array.shape))]}, [array])
    except (*UNFIT, AttributeError):
        pass
    return None


def _listed_factors(attributes: Mapping[str, Any]) -> Sequence[Any] | None:
    """The downsampling factors of all levels, if the group has them."""
    factors = attributes.get("scales", attributes.get("downsamplingFactors"))
    return factors if isinstance(factors, list) and factors and all(isinstance(f, list) for f in factors) else None


SPACE = ("axes", "units", "resolution", "pixelResolution", "offset")


def _of_factors(group: Mapping[str, Any], levels: Sequence[Array]) -> Multiscale | None:
    """The image of these levels, s0 first; None if levels are missing, or if no attribute describes an image."""
    rank, listed = len(levels[0].shape), _listed_factors(group)
    own_factors = [level.attributes.get("downsamplingFactors") for level in levels]
    if listed is None and "multiScale" not in group and not any(own_factors):
        return None
    level_factors = [own_factors[0] or [1] * rank, *own_factors[1:]] if listed is None else listed
    if len(level_factors) != len(levels):
        return None
    factors = [numbers(f, rank) for f in level_factors]
    if min(map(min, factors)) <= 0:
        raise ValueError("a factor should be positive")
    attributes = {name: of[name] for of in (levels[0].attributes, group) for name in SPACE if name in of}
    names = axes_of(attributes, rank) or (*DEFAULT_AXES, *(f"d{i}" for i in range(len(DEFAULT_AXES), rank)))[:rank]
    resolution, units = _resolution(attributes, rank)
    offset = numbers(attributes.get("offset", [0.0] * rank), rank)
    out = []
    for i, by in enumerate(factors):
        # A coarser level's first element is centred on the elements that it was averaged from.
        shift = (o + (f - 1) / 2 * r for o, f, r in zip(offset, by, resolution, strict=True))
        scale = (f * r for f, r in zip(by, resolution, strict=True))
        out.append(Level(f"s{i}", numbers(scale, rank)[::-1], numbers(shift, rank)[::-1]))
    axes = tuple(Axis(n, KINDS.get(n), u) for n, u in zip(names, units, strict=True))
    return Multiscale(str(group.get("name", "")), axes[::-1], finest_first(out))


def _resolution(attributes: Mapping[str, Any], rank: int) -> tuple[Sequence[float], Sequence[str | None]]:
    """The resolution of the finest level, x first, and its units in OME-NGFF's names."""
    resolution = attributes.get("pixelResolution", attributes.get("resolution", [1.0] * rank))
    unit = None
    if isinstance(resolution, dict):
        resolution, unit = resolution.get("dimensions", [1.0] * rank), resolution.get("unit")
    units = attributes.get("units", [unit] * rank)
    if len(units) != rank:
        raise ValueError(f"{rank} units expected, not {units!r:.80}")
    return numbers(resolution, rank), [_word(u) for u in units]


def _word(unit: Any) -> str | None:
    return None if not unit else WORDS.get(str(unit), str(unit))


def _cosem_of(attributes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first item of `multiscales`, if it follows COSEM's convention."""
    listed = attributes.get("multiscales")
    image = listed[0] if isinstance(listed, list) and listed else None
    datasets = image.get("datasets") if isinstance(image, dict) else None
    if not isinstance(datasets, list) or not datasets:
        return None
    return image if all(isinstance(d, dict) and "transform" in d for d in datasets) else None


def _cosem(image: Mapping[str, Any]) -> Multiscale:
    """The image that an item of COSEM's `multiscales` describes. Its transformations have the axes in C order."""
    datasets = image["datasets"]
    first = datasets[0]["transform"]
    names, units = first["axes"], first["units"]
    axes = tuple(Axis(str(n), KINDS.get(str(n)), _word(u)) for n, u in zip(names, units, strict=True))
    return Multiscale(str(image.get("name") or ""), axes, finest_first(_cosem_level(d, len(axes)) for d in datasets))


def _cosem_level(dataset: Mapping[str, Any], rank: int) -> Level:
    path, transform = dataset["path"], dataset["transform"]
    return Level(path, numbers(transform["scale"], rank), numbers(transform["translate"], rank))


# ---- writing ----


def can_be_written(image: Multiscale) -> bool:
    """Whether N5 can express the image: every level is a downsampled finest level, and axis names are unique."""
    finest, rank = image.levels[0].scale if image.levels else (), len(image.axes)
    return (
        bool(finest)
        and all(
            len(level.scale) == rank and min(level.scale) > 0 and _is_larger(level.scale, finest)
            for level in image.levels
        )
        and len({axis.name for axis in image.axes}) == rank
    )


def _is_larger(scale: Sequence[float], finest: Sequence[float]) -> bool:
    factors = list(map(truediv, scale, finest))
    return bool(min(factors) >= 1 - 1e-6 and max(factors) < math.inf)


def group_attributes(image: Multiscale) -> dict[str, Any]:
    """The attributes of the group that contains the levels of the image as s0, s1, ...

    `can_be_written` must be true for the image. Of the translations, only that of the finest level is written.
    """
    members = {"multiScale": True, **_space(image), "scales": [_factors(image, i) for i in range(len(image.levels))]}
    return {"name": image.name, **members} if image.name else members


def level_attributes(image: Multiscale, i: int) -> dict[str, Any]:
    """The attributes of level `i`, for readers of a single level. The resolution is that of the finest level."""
    return {**_space(image), "downsamplingFactors": _factors(image, i)}


def _factors(image: Multiscale, i: int) -> list[float]:
    finest, level = image.levels[0].scale, image.levels[i].scale
    return [tidy(a / b) for a, b in zip(level, finest, strict=True)][::-1]


def _space(image: Multiscale) -> dict[str, Any]:
    """The attributes for axes, units, resolution and offset."""
    converted = [_symbol(a.unit) for a in image.axes][::-1]
    units = [symbol for symbol, _ in converted]
    by = [factor for _, factor in converted]
    finest = image.levels[0]
    resolution = [tidy(s * f) for s, f in zip(finest.scale[::-1], by, strict=True)]
    out: dict[str, Any] = {"axes": [a.name for a in image.axes][::-1], "units": units, "resolution": resolution}
    if len(set(units)) == 1 and units[0]:
        out["pixelResolution"] = {"unit": units[0], "dimensions": resolution}
    if any(finest.translation):
        out["offset"] = [tidy(s * f) for s, f in zip(finest.translation[::-1], by, strict=True)]
    return out


def _symbol(unit: str | None) -> tuple[str, float]:
    """The symbol of a unit for N5's viewers, and the factor to convert to it; ("", 1.0) for units they do not know."""
    if unit == ANGSTROM:
        return "nm", 0.1
    return (SYMBOLS.get(unit, unit if unit in WORDS else ""), 1.0) if unit else ("", 1.0)


def tidy(value: float) -> float:
    """The value, rounded to an integer if it is nearly one, since N5-viewer reads factors as integers."""
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-9) else value
