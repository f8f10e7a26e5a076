"""Inode numbers computed from names and coordinates, so that every mount uses the same ones."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.model.grid import SMALL_IDS, IdNames, ravel_many, unravel

if TYPE_CHECKING:
    from shardfs.model.collection import ChunkNames
    from shardfs.model.values import U64, Coords

ROOT = 1
TABLE_END = 1 << 48
"""Inode numbers below are those of nodes in a table (`NodeTable`); numbers from here on are computed (`ChunkDirs`)."""

CREATED = 1 << 62
"""Inode numbers from here on belong to files created on a mount (`WriteTree`)."""


def number_of(path: str) -> int:
    """Return the inode number of a path. Two paths may collide."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=6).digest()
    return int.from_bytes(digest, "little") % (TABLE_END - 2) + 2


class TreePosition(NamedTuple):
    """A node of the tree: `level` components below the collection's top directory, the `nth` of the nodes of its level.

    Nodes of a level are counted in C order of the values of their components (`ChunkNames`).
    """

    level: int
    nth: int


TOP = TreePosition(0, 0)


class ChunkNumbers:
    """Arithmetic between inode numbers, positions in the tree and coordinates of one collection.

    An inode number is `first` plus a position: first all directories of level 1, then those of level 2, and so on; the
    chunks come last.

    Args:
        first: the first of `count` inode numbers reserved for the collection.
        salt: distinguishes the numbers of large ids from those of other collections at the same path.
    """

    def __init__(self, names: ChunkNames, first: int, salt: int = 0) -> None:
        self.names = names
        self.first = first
        self._salt = salt
        self.dims = names.dims
        self.depth = len(names.dims)
        self.bases, position, n = [0], int(bool(names.prefix)), 1  # the position at which each level begins
        for d in names.dims:
            self.bases.append(position)
            n *= d
            position += n
        self.count = position
        self.directories = self.bases[-1]

    def position(self, number: int | None) -> TreePosition:
        """Return the position of an inode number. None stands for the dataset's directory."""
        if number is None:
            return TOP
        position = number - self.first
        level = bisect_right(self.bases, position, 1) - 1
        return TreePosition(level, position - self.bases[level])

    def number(self, place: TreePosition, value: int) -> int:
        """Return the inode number of the child of a directory whose name has this value."""
        level, nth = place
        return self.first + self.bases[level + 1] + nth * self.dims[level] + value

    def numbers(self, place: TreePosition, values: U64) -> U64:
        """Return the inode numbers (n,) of the children of a directory whose names have these values (n,).

        Not for ids from `SMALL_IDS` on, whose numbers `of_ids` returns.
        """
        return values + np.uint64(self.number(place, 0))

    def coords(self, number: int) -> Coords:
        """Return the grid coordinates of the chunk with this inode number."""
        return self.names.coords(unravel(number - self.first - self.directories, self.dims))

    def coords_in(self, place: TreePosition, value: int) -> Coords:
        """Return the grid coordinates of the chunk in a directory whose name has this value."""
        return self.names.coords((*unravel(place.nth, self.dims[:-1]), value))

    def of_chunk(self, path: str, coords: Coords) -> int:
        """Return the inode number of a chunk of the collection at `path`."""
        return int(self.of_chunks(path, np.array([coords], np.uint64))[0])

    def of_chunks(self, path: str, coords: U64) -> U64:
        """Return the inode numbers (n,) of chunks (n, d) of the collection at `path`."""
        numbers = ravel_many(self.names.values(coords), self.dims) + np.uint64(self.first + self.directories)
        if isinstance(self.names, IdNames):
            large = coords[:, 0] >= SMALL_IDS
            numbers[large] = self.of_ids(path, coords[large])
        return numbers

    def of_ids(self, path: str, coords: U64) -> U64:
        """Return inode numbers (n,) below `TABLE_END` of chunks (n, d) of the collection at `path`, addressed by ids.

        The first coordinate is the id. The numbers are splitmix64 hashes, so two ids may collide.
        """
        x = coords[:, 0] + np.uint64(number_of(path)) + np.uint64(self._salt)
        for axis in range(1, coords.shape[1]):
            x += coords[:, axis] * np.uint64(0x9E3779B97F4A7C15)  # any large odd number; a small one would lose bits
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return (x ^ x >> np.uint64(31)) % np.uint64(TABLE_END - 2) + np.uint64(2)
