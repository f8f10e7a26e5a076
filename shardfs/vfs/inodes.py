"""Inode numbers computed from names, so that every mount uses the same ones."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardfs.model.values import U64

ROOT = 1
TABLE_END = 1 << 48
"""Inode numbers below are those of nodes in a table (`NodeTable`); numbers from here on are computed (`ChunkDirs`)."""

CREATED = 1 << 62
"""Inode numbers from here on belong to files created on a mount (`WriteTree`)."""


def number_of(path: str) -> int:
    """Return the inode number of a path. Two paths may collide."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=6).digest()
    return int.from_bytes(digest, "little") % (TABLE_END - 2) + 2


def numbers_of_ids(path: str, coords: U64) -> U64:
    """Return the inode numbers of chunks (n, d) of the collection at `path`, whose first coordinate is an id.

    The numbers are splitmix64 hashes.
    """
    x = coords[:, 0] + np.uint64(number_of(path))
    for axis in range(1, coords.shape[1]):
        x += coords[:, axis] * np.uint64(0x9E3779B97F4A7C15)  # any large odd number; a small one would lose bits
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (x ^ x >> np.uint64(31)) % np.uint64(TABLE_END - 2) + np.uint64(2)
