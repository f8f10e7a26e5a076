"""Containers of compressed formats that hold their data uncompressed: sizes follow by arithmetic."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.codecs.fast_zlib import zlib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardfs.model.arrays import Codec
    from shardfs.model.values import Sizes

from shardfs.codecs.decoders import (
    BLOSC_COPIED,
    BLOSC_MAX_TYPESIZE,
    BLOSC_VERSION,
    DEFLATE_BLOCK,
    ZSTD_BLOCK,
    ZSTD_MAGIC,
    _gzip_member,
)
from shardfs.codecs.encoders import _add_crc32c

BLOSC_HEADER = struct.Struct("<BBBBIII")


class _StoredEncoder(NamedTuple):
    """A codec's form for incompressible data: `store` makes the bytes, `size` their number from the data's size."""

    size: Callable[[Sizes], Sizes]
    store: Callable[[bytes, Mapping[str, Any]], bytes]


def _blocks(sizes: Sizes, block: int) -> Sizes:
    return np.maximum(-(-sizes // block), 1)


def _pieces(data: bytes, block: int) -> Iterator[tuple[bool, memoryview]]:
    """Split data into blocks, at least one; each comes with whether it is the last."""
    for start in range(0, max(len(data), 1), block):
        yield start + block >= len(data), memoryview(data)[start : start + block]


def _deflated(data: bytes) -> list[bytes | memoryview]:
    """The data as non-compressed deflate blocks (RFC 1951, section 3.2.4)."""
    out: list[bytes | memoryview] = []
    for last, piece in _pieces(data, DEFLATE_BLOCK):
        out += [struct.pack("<BHH", last, len(piece), len(piece) ^ 0xFFFF), piece]
    return out


def _store_gzip(data: bytes, _: Mapping[str, Any]) -> bytes:
    return _gzip_member(data, _deflated(data))


def _store_zlib(data: bytes, _: Mapping[str, Any]) -> bytes:
    """A zlib stream of non-compressed blocks (RFC 1950)."""
    return b"".join([b"\x78\x01", *_deflated(data), struct.pack(">I", zlib.adler32(data))])


def _store_zstd(data: bytes, _: Mapping[str, Any]) -> bytes:
    """A single-segment zstd frame of raw blocks, with its size in 8 bytes (RFC 8878, section 3.1.1)."""
    out: list[bytes | memoryview] = [ZSTD_MAGIC, b"\xe0", len(data).to_bytes(8, "little")]
    for last, piece in _pieces(data, ZSTD_BLOCK):
        out += [(last | len(piece) << 3).to_bytes(3, "little"), piece]
    return b"".join(out)


def _store_blosc(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    """A Blosc chunk whose data are copied: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst."""
    n, typesize = len(data), configuration.get("typesize", 1)
    if not isinstance(typesize, int) or not 0 < typesize <= BLOSC_MAX_TYPESIZE:
        typesize = 1
    return BLOSC_HEADER.pack(*BLOSC_VERSION, BLOSC_COPIED, typesize, n, n, BLOSC_HEADER.size + n) + data


STORED_ENCODERS: Mapping[str, _StoredEncoder] = {
    "crc32c": _StoredEncoder(lambda n: n + 4, _add_crc32c),
    "gzip": _StoredEncoder(lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 18, _store_gzip),
    "zstd": _StoredEncoder(lambda n: n + 3 * _blocks(n, ZSTD_BLOCK) + 13, _store_zstd),
    "blosc": _StoredEncoder(lambda n: n + BLOSC_HEADER.size, _store_blosc),
    "numcodecs.zlib": _StoredEncoder(lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 6, _store_zlib),
}


def can_store(codecs: Sequence[Codec]) -> bool:
    """Whether `store` knows these codecs."""
    return all(codec.name in STORED_ENCODERS for codec in codecs)


def stored_sizes(codecs: Sequence[Codec], sizes: Sizes) -> Sizes:
    """How many bytes `store` makes of data of these sizes."""
    for codec in codecs:
        sizes = STORED_ENCODERS[codec.name].size(sizes)
    return sizes


def store(codecs: Sequence[Codec], data: bytes) -> bytes:
    """Apply the codecs like `encode`, but without compression. `decode` undoes both."""
    for codec in codecs:
        data = STORED_ENCODERS[codec.name].store(data, codec.configuration)
    return data
