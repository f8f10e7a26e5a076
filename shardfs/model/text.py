"""Words for messages and output."""

from __future__ import annotations


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 shard", "2 shards". `plural` is for nouns that do not just take an s."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"
