"""The `sharding` member of Neuroglancer's `info`, chunk ids, and the hashes of ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import mmh3
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shardfs.model.values import U64, Bool, Coords

U32 = npt.NDArray[np.uint32]

TYPE = "neuroglancer_uint64_sharded_v1"

ENTRY = 16

MAX_MINISHARD_BITS = 21
"""Limit of this reader: a shard index of 32 MiB, which is read as a whole. A sparse file could claim any number."""


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The `sharding` member of an info document."""

    preshift_bits: int
    hash: Literal["identity", "murmurhash3_x86_128"]
    minishard_bits: int
    shard_bits: int
    minishard_index_encoding: Literal["raw", "gzip"] = "raw"
    data_encoding: Literal["raw", "gzip"] = "raw"

    @classmethod
    def parse(cls, sharding: Any) -> Self:
        """Parse a JSON object. Raise ValueError, with the reason, or KeyError if it is invalid."""
        if not isinstance(sharding, dict):
            raise ValueError(f"sharding should be an object, not {sharding!r}")
        if sharding.get("@type") != TYPE:
            raise ValueError(f"sharding @type should be {TYPE}, not {sharding.get('@type')!r}")
        minishard_bits = integer(sharding["minishard_bits"], "minishard_bits", 0, MAX_MINISHARD_BITS)
        return cls(
            preshift_bits=integer(sharding.get("preshift_bits", 0), "preshift_bits", 0, 64),
            hash=_choice(sharding, "hash", ("identity", "murmurhash3_x86_128")),
            minishard_bits=minishard_bits,
            shard_bits=integer(sharding["shard_bits"], "shard_bits", 0, 64 - minishard_bits),
            minishard_index_encoding=_choice(sharding, "minishard_index_encoding", ("raw", "gzip"), "raw"),
            data_encoding=_choice(sharding, "data_encoding", ("raw", "gzip"), "raw"),
        )

    def __str__(self) -> str:
        return (
            f"uint64_sharded, {self.hash}, preshift {self.preshift_bits}, "
            f"{self.minishard_bits} minishard bits, {self.shard_bits} shard bits"
        )


def integer(value: Any, name: str, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return the value of a member if it is an integer in this range; raise ValueError, with the reason, if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name} should be an integer in [{minimum}, {maximum}], not {value!r}")
    return value


def _choice(sharding: dict[str, Any], name: str, choices: tuple[str, ...], default: str | None = None) -> Any:
    """Return a member, which is one of the choices, in lower case. Neuroglancer ignores the case of these values."""
    value = sharding.get(name, default)
    if not isinstance(value, str) or value.lower() not in choices:
        raise ValueError(f"{name} should be one of {', '.join(choices)}, not {value!r}")
    return value.lower()


class ChunkIds(Protocol):
    """The mapping between grid coordinates and uint64 chunk ids."""

    grid: Coords

    def encode(self, cell: Coords) -> int:
        """Return the id of the chunk at these coordinates, which are inside the grid."""

    def encode_many(self, cells: U64) -> U64:
        """Return the ids (n) of chunks at coordinates (n, d)."""

    def decode_many(self, codes: U64) -> tuple[U64, Bool]:
        """Return the coordinates (n, d) of chunks with these ids (n), and which ids are those of chunks in the grid."""


class Ids:
    """Object ids as coordinates. With several files per object, the second coordinate is the number of the file."""

    def __init__(self, files: int = 1) -> None:
        self.grid: Coords = (2**64,) if files == 1 else (2**64, files)

    def encode(self, cell: Coords) -> int:
        return cell[0]

    def encode_many(self, cells: U64) -> U64:
        return cells[:, 0]

    def decode_many(self, codes: U64) -> tuple[U64, Bool]:
        """Return the coordinates of the first file of each object. All ids are valid."""
        cells = np.zeros((len(codes), len(self.grid)), np.uint64)
        cells[:, 0] = codes
        return cells, np.ones(len(codes), np.bool_)


def murmurhash3_x86_128(value: int) -> int:
    """Return the low 8 bytes, as a little-endian number, of the 128-bit x86 hash of `value`.

    The key is the 8 little-endian bytes of `value`.
    """
    # False selects the x86 variant; the default, x64, has other results
    return mmh3.hash64(value.to_bytes(8, "little"), 0, False, signed=False)[0]


def murmurhash3_x86_128_many(values: U64) -> U64:
    """Return `murmurhash3_x86_128` of many values, for thousands fifteen times as fast.

    A listing hashes every id. The algorithm (public domain, https://github.com/aappleby/smhasher) is simplified for
    keys of 8 bytes. Such a key has no 16-byte block, so only tail and finalization remain. The last two of the four
    lanes get no bytes, so they are equal.
    """
    low, high = (values & np.uint64(_U32)).astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
    h1 = _rotated(low * _C1, 15) * _C2 ^ _LENGTH
    h2 = _rotated(high * _C2, 16) * _C3 ^ _LENGTH
    h1 += h2 + _LENGTH + _LENGTH
    h2 += h1
    h3 = _mixed(h1 + _LENGTH)
    h1, h2 = _mixed(h1), _mixed(h2)
    h1 += h2 + h3 + h3
    h2 += h1
    return h1.astype(np.uint64) | h2.astype(np.uint64) << np.uint64(32)


_U32 = 0xFFFFFFFF

_C1, _C2, _C3, _LENGTH = (np.uint32(c) for c in (0x239B961B, 0xAB0E9789, 0x38B34AE5, 8))


def _rotated(x: U32, bits: int) -> U32:
    return x << np.uint32(bits) | x >> np.uint32(32 - bits)


def _mixed(x: U32) -> U32:
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _shift_right(values: U64, bits: int) -> U64:
    return np.zeros_like(values) if bits >= 64 else values >> np.uint64(bits)
