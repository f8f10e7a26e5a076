"""Plain types that every floor uses: coordinates and columns of numbers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Coords: TypeAlias = tuple[int, ...]
"""The position of a chunk in its collection's grid, or its id: see `Collection`."""

AxisPosition: TypeAlias = tuple[int, int]
"""An axis of an array, and the number of a chunk along it: for all chunks there."""

U64: TypeAlias = npt.NDArray[np.uint64]

Bool: TypeAlias = npt.NDArray[np.bool_]

Sizes: TypeAlias = npt.NDArray[np.int64]

Version: TypeAlias = Hashable
"""An object's version in the notation of its store. Different bytes have different versions. None: unknown or absent.
"""
