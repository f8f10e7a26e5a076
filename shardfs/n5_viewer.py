"""Multiscale images in N5, as attributes of groups and of the datasets in them: read, and written.

N5 itself has no word for them. Conventions: N5-viewer's (https://github.com/saalfeldlab/n5-viewer) and BigDataViewer's
(https://github.com/bigdataviewer/bigdataviewer-core, "BDV N5 format"), in which levels are called s0, s1, ..., with
`scales` or a list of `downsamplingFactors` at the group, and the members that Neuroglancer reads beside them
(https://github.com/google/neuroglancer, src/datasource/n5); and that of COSEM, in which `multiscales` tells a
transformation for each level. All lists are x first, but for COSEM's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardfs.arrays import Axis, Level, Multiscale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_LEVELS = 1000
DEFAULT_AXES = ("x", "y", "z", "t", "c")
KINDS = {"x": "space", "y": "space", "z": "space", "t": "time", "c": "channel"}

PREFIXES = {
    "": "", "yotta": "Y", "zetta": "Z", "exa": "E", "peta": "P", "tera": "T", "giga": "G", "mega": "M", "kilo": "k",
    "hecto": "h", "deca": "da", "deci": "d", "centi": "c", "milli": "m", "micro": "u", "nano": "n", "pico": "p",
    "femto": "f", "atto": "a", "zepto": "z", "yocto": "y",
}  # fmt: skip
SYMBOLS = {prefix + unit: short + symbol for prefix, short in PREFIXES.items() for unit, symbol in (
    ("meter", "m"), ("second", "s")
)}  # fmt: skip
"""Units as OME-NGFF writes them, and what N5's viewers read."""

WORDS = {symbol: word for word, symbol in SYMBOLS.items()} | {
    "µm": "micrometer",
    "μm": "micrometer",
    "µs": "microsecond",
}
ANGSTROM = "angstrom"

UNFIT = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


# ---- reading ----


def axes_of(attributes: Mapping[str, Any], rank: int) -> tuple[str, ...] | None:
    """The names that `axes` gives the axes, x first; None if it does not."""
    axes = attributes.get("axes")
    if not isinstance(axes, list) or len(axes) != rank or len(set(map(str, axes))) != rank:
        return None
    return tuple(axes) if all(isinstance(a, str) for a in axes) else None


def multiscales(attributes: Mapping[str, Any]) -> tuple[Multiscale, ...]:
    """The images that the attributes of a group describe; what makes no sense is left out."""
    try:
        if _is_cosem(attributes.get("multiscales")):
            return tuple(_cosem(item) for item in attributes["multiscales"])
        factors = attributes.get("scales", attributes.get("downsamplingFactors"))
        if isinstance(factors, list) and factors and all(isinstance(f, list) for f in factors):
            return (_of_factors(attributes, factors),)
    except UNFIT:
        pass
    return ()


def _of_factors(attributes: Mapping[str, Any], listed: Sequence[Any]) -> Multiscale:
    rank = len(listed[0])
    factors = [_numbers(f, rank) for f in listed[:MAX_LEVELS]]
    if min(map(min, factors)) <= 0:
        raise ValueError("a factor should be positive")
    names = axes_of(attributes, rank) or (*DEFAULT_AXES, *(f"d{i}" for i in range(len(DEFAULT_AXES), rank)))[:rank]
    resolution, units = _resolution(attributes, rank)
    offset = _numbers(attributes.get("offset", [0.0] * rank), rank)
    levels = []
    for i, by in enumerate(factors):
        # The first element of a coarser level has its centre in that of those it was made of.
        shift = (o + (f - 1) / 2 * r for o, f, r in zip(offset, by, resolution, strict=True))
        scale = tuple(f * r for f, r in zip(by, resolution, strict=True))
        levels.append(Level(f"s{i}", scale[::-1], tuple(shift)[::-1]))
    axes = tuple(Axis(n, KINDS.get(n), u) for n, u in zip(names, units, strict=True))
    return Multiscale(str(attributes.get("name", "")), axes[::-1], tuple(levels))


def _resolution(attributes: Mapping[str, Any], rank: int) -> tuple[Sequence[float], Sequence[str | None]]:
    """Of the finest level, x first, and its units in OME-NGFF's words."""
    told = attributes.get("pixelResolution", attributes.get("resolution", [1.0] * rank))
    unit = None
    if isinstance(told, dict):
        told, unit = told.get("dimensions", [1.0] * rank), told.get("unit")
    units = attributes.get("units", [unit] * rank)
    if len(units) != rank:
        raise ValueError(f"{rank} units expected, not {units!r:.80}")
    return _numbers(told, rank), [_word(u) for u in units]


def _word(unit: Any) -> str | None:
    return None if not unit else WORDS.get(str(unit), str(unit))


def _is_cosem(listed: Any) -> bool:
    return isinstance(listed, list) and bool(listed) and all(
        isinstance(item, dict) and all("transform" in d for d in item.get("datasets", [{}])) for item in listed
    )  # fmt: skip


def _cosem(item: Mapping[str, Any]) -> Multiscale:
    """COSEM's transformations have their axes in C order."""
    datasets = item["datasets"][:MAX_LEVELS]
    first = datasets[0]["transform"]
    names, units = first["axes"], first["units"]
    axes = tuple(Axis(str(n), KINDS.get(str(n)), _word(u)) for n, u in zip(names, units, strict=True))
    return Multiscale(str(item.get("name") or ""), axes, tuple(_cosem_level(d, len(axes)) for d in datasets))


def _cosem_level(dataset: Mapping[str, Any], rank: int) -> Level:
    path, transform = dataset["path"], dataset["transform"]
    if not isinstance(path, str) or ".." in path.split("/"):
        raise ValueError(f"a level cannot lie at {path!r:.80}")
    return Level(path, _numbers(transform["scale"], rank), _numbers(transform["translate"], rank))


def _numbers(values: Any, rank: int) -> tuple[float, ...]:
    if len(values) != rank or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise ValueError(f"{rank} numbers expected, not {values!r:.80}")
    return tuple(float(v) for v in values)


# ---- writing ----


def can_be_written(image: Multiscale) -> bool:
    """Whether every level is the finest one, taken larger."""
    return bool(image.levels) and all(len(x.scale) == len(image.axes) and min(x.scale) > 0 for x in image.levels)


def group_attributes(image: Multiscale) -> dict[str, Any]:
    """Of the group in which the levels of an image lie as s0, s1, ..."""
    members = {"multiScale": True, **_space(image), "scales": [_factors(image, i) for i in range(len(image.levels))]}
    return {"name": image.name, **members} if image.name else members


def level_attributes(image: Multiscale, i: int) -> dict[str, Any]:
    """Of its level `i`, to be read by itself: the resolution is the finest level's, too."""
    return {**_space(image), "downsamplingFactors": _factors(image, i)}


def _factors(image: Multiscale, i: int) -> list[float]:
    finest, level = image.levels[0].scale, image.levels[i].scale
    return [_tidy(a / b) for a, b in zip(level, finest, strict=True)][::-1]


def _space(image: Multiscale) -> dict[str, Any]:
    """Axes, units, resolution, and where the image begins."""
    converted = [_symbol(a.unit) for a in image.axes][::-1]
    units = [symbol for symbol, _ in converted]
    by = [factor for _, factor in converted]
    finest = image.levels[0]
    resolution = [_tidy(s * f) for s, f in zip(finest.scale[::-1], by, strict=True)]
    out: dict[str, Any] = {"axes": [a.name for a in image.axes][::-1], "units": units, "resolution": resolution}
    if len(set(units)) == 1 and units[0]:
        out["pixelResolution"] = {"unit": units[0], "dimensions": resolution}
    if any(finest.translation):
        out["offset"] = [_tidy(s * f) for s, f in zip(finest.translation[::-1], by, strict=True)]
    return out


def _symbol(unit: str | None) -> tuple[str, float]:
    """What N5's viewers call a unit, and how many of it one of the other is; nothing for what they do not know."""
    if unit == ANGSTROM:
        return "nm", 0.1
    return (SYMBOLS.get(unit, unit if unit in WORDS else ""), 1.0) if unit else ("", 1.0)


def _tidy(value: float) -> float:
    """An integer where it is one: N5-viewer reads factors as such."""
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-9) else value
