"""The `sharding` member of Neuroglancer's `info`, chunk ids and their hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

import mmh3
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shardfs.model.values import U64, Bool, Coords

    pass

U32 = npt.NDArray[np.uint32]

TYPE = "neuroglancer_uint64_sharded_v1"

ENTRY = 16

BLOCK_BITS = 16
"""The shard index is read in blocks of 2**16 entries (1 MiB): whole in practice, bounded if the bits are absurd."""


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
        """Of a JSON object. Raise ValueError with the reason, or KeyError, if it cannot be."""
        if not isinstance(sharding, dict):
            raise ValueError(f"sharding should be an object, not {sharding!r}")
        if sharding.get("@type") != TYPE:
            raise ValueError(f"sharding @type should be {TYPE}, not {sharding.get('@type')!r}")
        minishard_bits = integer(sharding["minishard_bits"], "minishard_bits", 0, 32)
        return cls(
            preshift_bits=integer(sharding.get("preshift_bits", 0), "preshift_bits", 0, 64),
            hash=cast(
                "Literal['identity', 'murmurhash3_x86_128']",
                _choice(sharding.get("hash"), "hash", ("identity", "murmurhash3_x86_128")),
            ),
            minishard_bits=minishard_bits,
            shard_bits=integer(sharding["shard_bits"], "shard_bits", 0, 64 - minishard_bits),
            minishard_index_encoding=_encoding(sharding, "minishard_index_encoding"),
            data_encoding=_encoding(sharding, "data_encoding"),
        )

    def __str__(self) -> str:
        return (
            f"uint64_sharded, {self.hash}, preshift {self.preshift_bits}, "
            f"{self.minishard_bits} minishard bits, {self.shard_bits} shard bits"
        )


def integer(value: Any, name: str, least: int, most: int = 2**63 - 1) -> int:
    """An integer of a document. Raise ValueError, with the reason, if it is none or beyond its bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} should be an integer in [{least}, {most}], not {value!r}")
    return value


def _encoding(sharding: dict[str, Any], name: str) -> Literal["raw", "gzip"]:
    return cast("Literal['raw', 'gzip']", _choice(sharding.get(name, "raw"), name, ("raw", "gzip")))


def _choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """Neuroglancer compares these without regard to case."""
    if not isinstance(value, str) or value.lower() not in choices:
        raise ValueError(f"{name} should be one of {', '.join(choices)}, not {value!r}")
    return value.lower()


class ChunkIds(Protocol):
    """Which uint64 id stands for which coordinates."""

    grid: Coords

    def encode(self, cell: Coords) -> int: ...
    def encode_many(self, cells: U64) -> U64: ...
    def decode_many(self, codes: U64) -> tuple[U64, Bool]: ...


class Ids:
    """The ids of objects, which are their only coordinate; or the first of two where each has several files."""

    def __init__(self, files: int = 1) -> None:
        self.grid: Coords = (2**64,) if files == 1 else (2**64, files)

    def encode(self, cell: Coords) -> int:
        return cell[0]

    def encode_many(self, cells: U64) -> U64:
        return cells[:, 0]

    def decode_many(self, codes: U64) -> tuple[U64, Bool]:
        """Of the first file of each."""
        cells = np.zeros((len(codes), len(self.grid)), np.uint64)
        cells[:, 0] = codes
        return cells, np.ones(len(codes), np.bool_)


def murmurhash3_x86_128(value: int) -> int:
    """The low 8 bytes, as a little-endian number, of the 128-bit x86 hash of the 8 little-endian bytes of `value`."""
    # mmh3 computes the x64 variant, which gives other numbers, unless told otherwise
    return mmh3.hash64(value.to_bytes(8, "little"), 0, False, signed=False)[0]


def murmurhash3_x86_128_many(values: U64) -> U64:
    """The same of thousands of values in a fifteenth of the time: listing hashes every id there is.

    The algorithm (public domain, https://github.com/aappleby/smhasher) for a key of 8 bytes: no whole block of 16, so
    that only tail and end are left, and of the four lanes of the state the last two, which no byte reaches, are equal.
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


LAST_ID = 2**64 - 1


def _shift_right(values: U64, bits: int) -> U64:
    return np.zeros_like(values) if bits >= 64 else values >> np.uint64(bits)
