"""Contents of chunks that can be told apart: a number, its *token*, turned into elements that no other token has.

Whoever reads a chunk can tell a torn or mixed one from a whole one. numpy only: virtualenvs of clients have no more.
"""

from __future__ import annotations

import hashlib
import itertools
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Array = npt.NDArray[Any]
Coords = tuple[int, ...]

DTYPE = np.dtype("<u4")


def content(token: int, chunk: Coords) -> Array:
    """The elements of a chunk of this shape; none is zero, and the first one is the token."""
    raw = hashlib.shake_128(str(token).encode()).digest(DTYPE.itemsize * prod(chunk))
    out = np.frombuffer(raw, DTYPE) | np.uint32(1)
    out[0] = token
    return out.reshape(chunk)


def token_of(block: Array) -> int | None:
    """The inverse of `content`; None for a chunk of zeros. Raise ValueError for what is no chunk as a whole."""
    token = int(block.flat[0])
    wanted = content(token, block.shape) if token else np.zeros_like(block)
    if np.array_equal(block, wanted):
        return token or None
    raise ValueError(f"torn: it begins as {token} and differs in {int((block != wanted).sum())} of {block.size}")


def grid_of(grid: Sequence[int]) -> list[Coords]:
    """All chunks of a grid, in C order; a chunk's number is its position here."""
    return list(itertools.product(*map(range, grid)))


def where(coords: Coords, chunk: Coords) -> tuple[slice, ...]:
    """The elements of one of them."""
    return tuple(slice(i * c, (i + 1) * c) for i, c in zip(coords, chunk, strict=True))


def split(array: Array, grid: Coords, chunk: Coords) -> Iterator[tuple[int, Array]]:
    """The chunks of a whole array."""
    for number, coords in enumerate(grid_of(grid)):
        yield number, array[where(coords, chunk)]
