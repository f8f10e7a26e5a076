"""Inode numbers that are made from names: the same in every mount."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardfs.model.values import U64

ROOT = 1
TABLE_END = 1 << 48
"""Numbers of nodes that stand in a table are below; those from here on are arithmetic (`ChunkTree`)."""

CREATED = 1 << 62
"""Numbers from here on are those of files that were made on a mount (`WriteTree`)."""


def number_of(path: str) -> int:
    """The number for a path, unless two paths share one."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=6).digest()
    return int.from_bytes(digest, "little") % (TABLE_END - 2) + 2


def numbers_of_ids(path: str, coords: U64) -> U64:
    """The numbers for chunks (n, d) of the collection at a path, whose first coordinate is an id: a splitmix64 hash."""
    x = coords[:, 0] + np.uint64(number_of(path))
    for axis in range(1, coords.shape[1]):
        x += coords[:, axis] * np.uint64(
            0x9E3779B97F4A7C15
        )  # any large odd number; a small one would not keep all bits
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (x ^ x >> np.uint64(31)) % np.uint64(TABLE_END - 2) + np.uint64(2)
