"""Reads, writes and converts OME-Zarr metadata of versions 0.4 and 0.5, which are attributes of groups.

https://ngff.openmicroscopy.org/0.4/ and https://ngff.openmicroscopy.org/0.5/. In version 0.5 all members are in the
attribute `ome`, which has the version. In version 0.4 the members are attributes, and most have a version themselves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardfs.formats.documents import is_inner_path
from shardfs.model.arrays import Axis, Level, Multiscale, finest_first, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

VERSIONED = ("multiscales", "plate", "well", "image-label", "omero")
"""Members that have their own `version` in 0.4; it is optional in `omero`."""

MEMBERS = (*VERSIONED, "labels", "series", "bioformats2raw.layout")

MAX_LEVELS = 1000


def as_04(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes converted from version 0.5 to 0.4. Attributes without a 0.5 member `ome` are unchanged."""
    ome = attributes.get("ome")
    if not isinstance(ome, dict) or not str(ome.get("version", "0.5")).startswith("0.5"):
        return attributes
    user_attributes = {name: value for name, value in attributes.items() if name != "ome"}
    return user_attributes | {name: _versioned(name, value, "0.4") for name, value in ome.items() if name != "version"}


def as_05(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes converted from version 0.4 to 0.5. Attributes without 0.4 metadata or with `ome` are unchanged."""
    members = {name: _versioned(name, v, None) for name, v in attributes.items() if name in MEMBERS and _is_04(name, v)}
    if not members or "ome" in attributes:
        return attributes
    user_attributes = {name: value for name, value in attributes.items() if name not in members}
    return {"ome": {"version": "0.5", **members}, **user_attributes}


def _is_04(name: str, value: Any) -> bool:
    """Whether this attribute is OME-Zarr metadata. Other conventions have an attribute `multiscales`, too."""
    if name == "multiscales":
        return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "axes" in v for v in value)
    return isinstance(value, list if name in ("labels", "series") else dict) or name == "bioformats2raw.layout"


def _versioned(name: str, value: Any, version: str | None) -> Any:
    """A member with `version` in it; None removes the version."""
    if name not in VERSIONED:
        return value
    if isinstance(value, list):
        return [_versioned(name, member, version) for member in value]
    if not isinstance(value, dict):
        return value
    members = {member: v for member, v in value.items() if member != "version"}
    if version is None or (name == "omero" and "version" not in value):
        return members
    return {"version": version, **members}


# ---- reading ----


def multiscales(attributes: Mapping[str, Any]) -> tuple[Multiscale, ...]:
    """The images that the attributes of a group describe, in either version. Invalid descriptions are skipped."""
    ome = attributes.get("ome")
    members = ome if isinstance(ome, dict) else attributes
    items = members.get("multiscales")
    images = []
    for image in items if isinstance(items, list) else ():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            images.append(_multiscale(image, "image-label" in members))
    return tuple(images)


def _multiscale(image: Mapping[str, Any], segmentation: bool) -> Multiscale:
    axes = tuple(_axis(a) for a in image["axes"])
    datasets = image["datasets"]
    if not axes or not isinstance(datasets, list) or len(datasets) > MAX_LEVELS:
        raise ValueError("no axes, or too many levels")
    common = _transformation(image.get("coordinateTransformations", ()), len(axes))
    levels = finest_first(_level(d, common, len(axes)) for d in datasets)
    return Multiscale(str(image.get("name", "")), axes, levels, segmentation)


def _axis(value: Any) -> Axis:
    if isinstance(value, str):  # 0.3
        return Axis(value, "space" if value in "xyz" else None)
    name, kind, unit = value["name"], value.get("type"), value.get("unit")
    return Axis(str(name), None if kind is None else str(kind), None if unit is None else str(unit))


_Affine = tuple[tuple[float, ...], tuple[float, ...]]


def _level(dataset: Mapping[str, Any], common: _Affine, rank: int) -> Level:
    path = dataset["path"]
    if not is_inner_path(path):
        raise ValueError(f"a level cannot be at {path!r:.80}")
    (scale, shift), (outer, move) = _transformation(dataset.get("coordinateTransformations", ()), rank), common
    return Level(
        path,
        numbers([a * b for a, b in zip(scale, outer, strict=True)], rank),
        numbers([a * b + c for a, b, c in zip(shift, outer, move, strict=True)], rank),
    )


def _transformation(steps: Iterable[Mapping[str, Any]], rank: int) -> _Affine:
    """The steps combined into one scale and a translation after it."""
    scale, shift = (1.0,) * rank, (0.0,) * rank
    for step in steps:
        if step["type"] == "scale":
            by = numbers(step["scale"], rank)
            scale = tuple(a * b for a, b in zip(scale, by, strict=True))
            shift = tuple(a * b for a, b in zip(shift, by, strict=True))
        elif step["type"] == "translation":
            shift = tuple(a + b for a, b in zip(shift, numbers(step["translation"], rank), strict=True))
        elif step["type"] != "identity":
            raise ValueError(f"unknown transformation {step['type']!r:.80}")
    return scale, shift


# ---- writing ----


def attributes_04(images: Sequence[Multiscale]) -> dict[str, Any]:
    """The attributes of version 0.4 that describe these images."""
    out: dict[str, Any] = {"multiscales": [{"version": "0.4", **_written(image)} for image in images]}
    if any(image.segmentation for image in images):
        out["image-label"] = {"version": "0.4"}
    return out


def attributes_05(images: Sequence[Multiscale]) -> dict[str, Any]:
    """The attributes of version 0.5 that describe these images."""
    return dict(as_05(attributes_04(images)))


def _written(image: Multiscale) -> dict[str, Any]:
    name = {"name": image.name} if image.name else {}
    axes = ({"name": axis.name, "type": axis.type, "unit": axis.unit} for axis in image.axes)
    return {
        **name,
        "axes": [{member: value for member, value in axis.items() if value is not None} for axis in axes],
        "datasets": list(map(_written_level, image.levels)),
    }


def _written_level(level: Level) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "scale", "scale": list(level.scale)}]
    if any(level.translation):
        steps.append({"type": "translation", "translation": list(level.translation)})
    return {"path": level.path, "coordinateTransformations": steps}
