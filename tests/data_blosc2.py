"""Contiguous Blosc2 frames: written by python-blosc2 beside their sparse twins, and put together byte by byte.

The bytes are those of c-blosc2's README_CFRAME_FORMAT.rst and README_CHUNK_FORMAT.rst; nothing here uses shardfs.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Array = npt.NDArray[Any]

ZEROS = -(2**63) + 2**56
"""The entry of a chunk that is all zeros and has no bytes."""


def chunk(data: bytes, typesize: int = 1) -> bytes:
    """A Blosc2 chunk that is not compressed."""
    n = len(data)
    return struct.pack("<BBBBIII16x", 5, 1, 0x17, typesize, n, n, 32 + n) + data


def frame(
    chunks: Sequence[bytes | None],
    chunk_bytes: int,
    *,
    entries: Sequence[tuple[int, int]] = (),
    index: bytes | None = None,
    gap: bytes = b"",
    nbytes: int | None = None,
) -> bytes:
    """A frame of these chunks (None: zeros); `entries` replaces entries of its index, `index` the whole of it."""
    body, table = b"", []
    for part in chunks:
        table.append(ZEROS if part is None else len(body) + len(gap))
        body += b"" if part is None else gap + part
    for i, entry in entries:
        table[i] = entry
    if index is None:
        index = chunk(struct.pack(f"<{len(table)}q", *table), 8) if table else b""
    trailer = b"\x94\x01\x93\xcd\0\x06\xde\0\0\xdc\0\0\xce\0\0\0\x23\xd8\0".ljust(35, b"\0")
    meta = b"\x93\xcd\0\x07\xde\0\0\xdc\0\0"
    length = 0x57 + len(meta)
    head = b"\x9e\xa8b2frame\0\xd2" + struct.pack(">i", length)
    head += b"\xcf" + struct.pack(">Q", length + len(body) + len(index) + len(trailer)) + b"\xa4\x12\0\x05\x02"
    head += b"\xd3" + struct.pack(">q", chunk_bytes * len(chunks) if nbytes is None else nbytes)
    head += b"\xd3" + struct.pack(">q", len(body)) + b"\xd2" + struct.pack(">i", 1) + b"\xd2" + struct.pack(">i", 0)
    head += b"\xd2" + struct.pack(">i", chunk_bytes) + b"\xd1\0\x02\xd1\0\x02\xc2\xd8\x06" + bytes(16)
    return head + meta + body + index + trailer


# ------------------------------------------------------------------------------- written by python-blosc2


def _array(array: Array, chunks: Sequence[int], **more: Any) -> Callable[[Path, bool], None]:
    def write(path: Path, contiguous: bool) -> None:
        import blosc2

        blosc2_array = blosc2.asarray(
            array, chunks=tuple(chunks), urlpath=str(path), contiguous=contiguous, mode="w", **more
        )
        for name, value in more.get("vlmeta", {}).items():
            blosc2_array.schunk.vlmeta[name] = value

    return write


def _super_chunk(path: Path, contiguous: bool) -> None:
    """Chunks that were changed: one is larger now, one is all zeros, one is gone; and metadata of variable length."""
    import blosc2

    rng = np.random.default_rng(3)
    super_chunk = blosc2.SChunk(
        chunksize=80, urlpath=str(path), contiguous=contiguous, mode="w", cparams={"typesize": 4}
    )
    for _ in range(300):
        super_chunk.append_data(rng.integers(0, 9, 20, dtype="<i4"))
    super_chunk.vlmeta["steps"] = list(range(1000))
    super_chunk.update_data(3, rng.integers(0, 2**30, 20, dtype="<i4"), copy=True)
    super_chunk.update_data(7, np.zeros(20, "<i4"), copy=True)
    super_chunk.delete_chunk(11)


def _objects(path: Path, contiguous: bool) -> None:
    """Chunks that differ in size."""
    import blosc2

    objects = blosc2.ObjectArray(urlpath=str(path), contiguous=contiguous, mode="w")
    for i in range(20):
        objects.append({"a": [1] * i})


_RAMP = np.arange(40 * 23, dtype="<i4").reshape(40, 23)
_ISLANDS = np.where((_RAMP > 400) & (_RAMP < 500), _RAMP, 0).astype("<i4")

WRITERS: dict[str, Callable[[Path, bool], None]] = {
    "ramp.b2nd": _array(_RAMP, (7, 8)),
    "islands.b2nd": _array(_ISLANDS, (4, 8)),
    "zeros.b2nd": _array(np.zeros((10, 10)), (4, 4)),
    "nans.b2nd": _array(np.full(100, np.nan), (30,)),
    "empty.b2nd": _array(np.zeros((0, 4), "<i2"), (1, 4)),
    "scalar.b2nd": _array(np.array(3.5), ()),
    "one_chunk.b2nd": _array(_RAMP, (40, 23)),
    "big_endian.b2nd": _array(_RAMP.astype(">u8"), (7, 8)),
    "structured.b2nd": _array(np.array([(i, i / 2) for i in range(50)], dtype=[("x", "<i4"), ("y", "<f8")]), (8,)),
    "named.b2nd": _array(_RAMP, (7, 8), meta={"unit": b"nm" * 20_000}),
    "changed.b2frame": _super_chunk,
    "objects.b2f": _objects,
}
