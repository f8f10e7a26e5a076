"""The status that a mount reports about itself. Any user and any version may have mounted it, so it is checked."""

from __future__ import annotations

from typing import Any, TypeAlias

from shardfs.model.bounded_json import load_json

MAX_STATUS = 16 << 20
"""Most bytes of a status. The lists of failed files in it are bounded."""

Shape: TypeAlias = Any
"""A type, a tuple of alternatives, a list with the shape of its items, or a dictionary with the shapes of its members.
The shape of the member `ANY` is that of all members that are not named."""

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

_STORE: Shape = {
    "requests": _COUNTS,
    "errors": _COUNTS,
    "silent": bool,
    "latency": (None, _LATENCY),
    **dict.fromkeys(
        ("bytes_fetched", "bytes_ahead_used", "bytes_ahead_wasted", "disk_cache_hits", "disk_cache_misses"), COUNT
    ),
    **dict.fromkeys(("bytes_from_disk_cache", "retries", "timeouts"), COUNT),
}

_WRITING: Shape = {
    "journal": str,
    "read_only": (None, str),
    "errors": _TEXTS,
    "refused_paths": _TEXTS,
    "orphan_paths": [str],
    "problems": [str],
    **dict.fromkeys(("dirty_chunks", "dirty_shards", "journal_bytes", "journal_limit", "written_bytes"), COUNT),
    **dict.fromkeys(("published_bytes", "published_shards", "failing", "refused", "orphans"), COUNT),
}

STATUS: Shape = {
    "pid": COUNT,
    "layout": str,
    "started": NUMBER,
    "uptime": NUMBER,
    "resident_bytes": COUNT,
    "bytes_served": COUNT,
    "waiting": COUNT,
    "postponed": COUNT,
    "requests": _COUNTS,
    "errors": {ANY: _COUNTS},
    "latencies": {ANY: _LATENCY},
    "caches": {ANY: dict.fromkeys(("hits", "misses", "bytes", "limit"), COUNT)},
    "store": (None, _STORE),
    "writing": (None, _WRITING),
}
"""The members that commands use. A status may have more."""

MOST = 1 << 63
"""Numbers are between this and its negative. No comparison with NaN is true."""


def parse_status(data: bytes) -> dict[str, Any] | None:
    """Return the status in the file `status.json` of a mount; None for anything else."""
    try:
        status = load_json(data, MAX_STATUS)
    except ValueError:
        return None
    return status if _fits(status, STATUS) else None


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, tuple):
        return any(_fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict) or any(name not in value for name in shape if name is not ANY):
            return False
        of_others = shape.get(ANY)
        return all(
            _fits(item, shape[name]) if name in shape else of_others is None or _fits(item, of_others)
            for name, item in value.items()
        )
    if shape is None:
        return value is None
    return type(value) is shape and (shape in (str, bool) or -MOST < value < MOST)
