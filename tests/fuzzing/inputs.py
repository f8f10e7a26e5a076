"""Sound things made unsound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c
from hypothesis import strategies as st

from shardfs.model.errors import ShardfsError

if TYPE_CHECKING:
    from collections.abc import Iterator

Draw = st.DataObject

DECLARED = (ShardfsError, OSError)
"""What may come of any input; see `errors.is_expected`."""

NUMBERS = st.integers(0, 80) | st.sampled_from((2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1))
"""For offsets and sizes."""

MOST_SLOTS = 64


def bent(draw: Draw, data: bytes) -> bytes:
    """The data with some of it changed, cut, doubled or gone."""
    out = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, max(len(out) - 1, 0)))
        size = draw.draw(st.integers(0, 64))
        match draw.draw(st.sampled_from(("set", "cut", "double", "remove", "end"))):
            case "set":
                new = draw.draw(st.binary(min_size=1, max_size=16))
                out[at : at + len(new)] = new
            case "double":
                out[at:at] = out[at : at + size]
            case "remove":
                del out[at : at + size]
            case "cut":
                out[at : at + size] = bytes(len(out[at : at + size]))
            case "end":
                del out[at:]
    return bytes(out)


def with_other_numbers(draw: Draw, data: bytes) -> bytes:
    """Some of its 64-bit numbers are others, and the checksums that were right are right again.

    Words are counted from the start, or from where an index at the end would have its checksum.
    """
    out, sums = bytearray(data), list(_sums(data))
    for _ in range(draw.draw(st.integers(1, 4))):
        number = draw.draw(NUMBERS | NUMBERS.map(lambda n: -n % 2**64))
        word = draw.draw(st.integers(0, max(len(out) // 8 - 1, 0)))
        behind = draw.draw(st.sampled_from((None, 0, 4)))
        at = 8 * word if behind is None else max(len(out) - behind - 8 * (word + 1), 0)
        out[at : at + 8] = number.to_bytes(8, draw.draw(st.sampled_from(("little", "big"))))[: len(out) - at]
    for start, stop in sums:
        out[stop : stop + 4] = _crc32c(out[start:stop])
    return bytes(out)


def _sums(data: bytes) -> Iterator[tuple[int, int]]:
    """The ranges behind which their crc32c lies: of an index at either end, and of all."""
    size = len(data)
    ranges = [(0, 16 * n) for n in range(1, MOST_SLOTS)]
    ranges += [(size - 4 - 16 * n, size - 4) for n in range(1, MOST_SLOTS)]
    for start, stop in [*ranges, (0, size - 4)]:
        if 0 <= start < stop <= size - 4 and _crc32c(data[start:stop]) == data[stop : stop + 4]:
            yield start, stop


def _crc32c(data: bytes | bytearray) -> bytes:
    return int(google_crc32c.value(bytes(data))).to_bytes(4, "little")
