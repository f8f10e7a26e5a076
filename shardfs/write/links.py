"""Symbolic links of a source, where a mount shows them as such: which those are."""

from __future__ import annotations


def stays_inside(directory: str, target: str) -> bool:
    """Whether who follows a link in a directory stays below the root, whatever other links are on the way.

    Those are followed from where they lie, and this holds for each; but a `..` behind one of them could lead anywhere.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    depth = directory.count("/") + 1 if directory else 0
    return up <= depth and ".." not in parts[up:]
