"""How much of it is done."""

from __future__ import annotations

import os


def times() -> int:
    """1, or `SHARDFS_TORTURE`: how many times as much as in the quick tests."""
    return int(os.environ.get("SHARDFS_TORTURE", "1"))
