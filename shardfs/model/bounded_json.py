"""Parses JSON from outside sources, with bounds for time and memory."""

from __future__ import annotations

import json
from typing import Any

MAX_CONTAINERS = 500_000

MAX_ITEMS = 1_000_000
"""Beyond these limits JSON counts as damaged, because parsing could need more memory than the mount may use."""


def load_json(raw: bytes, max_bytes: int) -> Any:
    """The parsed JSON text of at most `max_bytes`, with integers as `int`.

    Raise ValueError, with the reason, for invalid JSON, duplicate names, deep nesting, or a text beyond the limits.
    """
    if len(raw) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    if raw.count(b"{") + raw.count(b"[") > MAX_CONTAINERS or raw.count(b",") > MAX_ITEMS:
        raise ValueError("too many members")
    try:
        return json.loads(raw, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a member occurs twice")
    return out
