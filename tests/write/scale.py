"""How much of it is done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def times() -> int:
    """1, or `SHARDFS_TORTURE`: how many times as much as in the quick tests."""
    return int(os.environ.get("SHARDFS_TORTURE", "1"))


def sample(values: Iterable[Any], every: int, *kept: Any) -> list[Any]:
    """Parameters of which the quick tests try `kept` and every `every`-th; `scripts/torture` tries all."""
    tried = list(values)
    quick = [*tried[::every], *kept]
    assert set(kept) <= set(tried)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.torture) for value in tried]
