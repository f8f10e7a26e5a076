"""The status that a mount reports about itself. Any user and any version may have mounted it, so it is checked."""

from __future__ import annotations

from typing import Any, TypeAlias

from shardfs.daemon.status_fields import Figure, Kind, complete, of_group
from shardfs.model.bounded_json import load_json

MAX_STATUS = 16 << 20
"""Most bytes of a status. The lists of failed files in it are bounded."""

Shape: TypeAlias = Any
"""A type, a figure, a tuple of alternatives, a list with the shape of its items, or a dictionary with the shapes of its
members. The shape of the member `ANY` is that of all members that are not named. All members but figures are required.
"""

ANY = object()

NUMBER, COUNT = (int, float), int

_COUNTS: Shape = {ANY: COUNT}
_TEXTS: Shape = {ANY: str}
_LATENCY: Shape = {
    "count": COUNT,
    "mean": NUMBER,
    "median_below": (None, *NUMBER),
    "p99_below": (None, *NUMBER),
}

_STORE: Shape = {"latency": (None, _LATENCY)}

_WRITING: Shape = {
    "journal": str,
    "errors": _TEXTS,
    "refused_paths": _TEXTS,
    "orphan_paths": [str],
    "problems": [str],
}

_STATUS: Shape = {
    "pid": COUNT,
    "layout": str,
    "uptime": NUMBER,
    "errors": {ANY: _COUNTS},
    "latencies": {ANY: _LATENCY},
}


def status_shape() -> Shape:
    """The shape of a snapshot (`Status.snapshot`): the members that commands use, and all figures.

    A snapshot may have other members.
    """
    return {
        **_STATUS,
        **of_group(""),
        "caches": {ANY: of_group("caches")},
        "store": (None, {**_STORE, **of_group("store")}),
        "writing": (None, {**_WRITING, **of_group("writing")}),
    }


def _shape_of(figure: Figure) -> Shape:
    if figure.label:
        return _COUNTS
    if figure.kind is Kind.FLAG:
        return (None, bool, str)
    return NUMBER if figure.unit == "seconds" else COUNT


MOST = 1 << 63
"""Numbers are between this and its negative. No comparison with NaN is true."""


def parse_status(data: bytes) -> dict[str, Any] | None:
    """Return the snapshot in the file `status.json` of a mount; None if `data` is anything else, or too long.

    Figures that the mount's version does not have are 0, empty, or None, as `status_fields.complete` adds them.
    """
    try:
        status: dict[str, Any] = load_json(data, MAX_STATUS)
    except ValueError:
        return None
    if not _fits(status, status_shape()):
        return None
    complete(status)
    return status


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, Figure):
        return _fits(value, _shape_of(shape))
    if isinstance(shape, tuple):
        return any(_fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(element, shape[0]) for element in value)
    if isinstance(shape, dict):
        required = {name for name, member in shape.items() if name is not ANY and not isinstance(member, Figure)}
        if not isinstance(value, dict) or not required <= value.keys():
            return False
        of_others = shape.get(ANY)
        return all(
            _fits(element, shape[name]) if name in shape else of_others is None or _fits(element, of_others)
            for name, element in value.items()
        )
    if shape is None:
        return value is None
    return type(value) is shape and (shape in (str, bool) or -MOST < value < MOST)
