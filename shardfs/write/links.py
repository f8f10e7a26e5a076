"""Symbolic links of a source: the rule that decides which links a mount may show."""

from __future__ import annotations


def stays_inside(directory: str, target: str) -> bool:
    """Return whether a symbolic link in `directory` resolves inside the source.

    The kernel follows a link relative to the directory of that link. A chain of links therefore stays inside if each
    link does. A `..` after a name is refused, because the name may itself be a link to any directory.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    depth = directory.count("/") + 1 if directory else 0
    return up <= depth and ".." not in parts[up:]
