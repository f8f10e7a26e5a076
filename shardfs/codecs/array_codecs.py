"""Array-to-bytes codecs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs import images

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardfs.model.arrays import Codec
    from shardfs.model.values import Coords


# ---- from elements to bytes


def undecodable(serializer: Codec, shape: Coords, dtype: npt.DTypeLike) -> str:
    """Why `decode_array` cannot decode chunks of this shape and type; "" if it can. Does not look at data."""
    name = serializer.name
    if name == "bytes":
        return ""
    if not name.startswith(images.PREFIX):
        return f"codec {name!r:.80} must be undone, and is unknown"
    return images.lacking(name.removeprefix(images.PREFIX), dtype, shape[0] if len(shape) == images.RANK else 1)


def decode_array(serializer: Codec, data: bytes, shape: Coords, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Decode the elements of a chunk, axes in memory order. Raise ValueError, with the reason, if that fails."""
    if serializer.name != "bytes":
        return images.decode(serializer.name.removeprefix(images.PREFIX), data, shape, dtype, serializer.configuration)
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise ValueError(f"{wanted} bytes expected for a chunk of {shape} {dtype}, {len(data)} found")
    return np.frombuffer(data, dtype).reshape(shape)
