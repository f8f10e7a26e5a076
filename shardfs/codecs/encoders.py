"""Encoders of bytes-to-bytes codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.fast_zlib import zlib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.arrays import Codec
    from shardfs.model.values import U64, Coords, Sizes

from shardfs.codecs.decoders import NOT_IN_BLOSC, SAME_SIZE
from shardfs.codecs.zlib_streams import MAX_DECODED, PRECOMPUTED_LEVEL, gunzip


class Gunzip:
    """A `model.Transform` for chunks that are stored as gzip and shown decompressed.

    Args:
        known: returns the decompressed sizes of chunks (n, d), if the encoding fixes these sizes.
    """

    name = "gzip"

    def __init__(self, known: Callable[[U64], U64] | None = None) -> None:
        self._known = known

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        return np.full(len(coords), -1, np.int64) if self._known is None else self._known(coords).astype(np.int64)

    def show(self, coords: Coords, stored: bytes) -> bytes:
        if self._known is None:
            return gunzip(stored)
        wanted = int(self._known(np.array([coords], np.uint64))[0])
        data = gunzip(stored, min(wanted, MAX_DECODED))
        if len(data) != wanted:
            raise ValueError(f"{wanted} bytes expected after decompression, {len(data)} found")
        return data

    def require(self, coords: Coords, shown: bytes) -> None:
        wanted = None if self._known is None else int(self._known(np.array([coords], np.uint64))[0])
        if wanted not in (None, len(shown)):
            raise ValueError(f"should have {wanted} bytes, not {len(shown)}")
        if len(shown) > MAX_DECODED:
            raise ValueError(f"has {len(shown)} bytes; the limit is {MAX_DECODED}")

    def store(self, coords: Coords, shown: bytes) -> bytes:
        self.require(coords, shown)
        return _to_gzip(shown, {"level": PRECOMPUTED_LEVEL})


def _to_same_size(name: str) -> Callable[[bytes, Mapping[str, Any]], bytes]:
    def do(data: bytes, configuration: Mapping[str, Any]) -> bytes:
        import numcodecs

        return bytes(numcodecs.get_codec({**configuration, "id": name}).encode(np.frombuffer(data, np.uint8)))

    return do


def can_encode(codec: Codec) -> bool:
    """Whether `encode` knows this codec."""
    return codec.name in ENCODERS


def encode(codecs: Sequence[Codec], data: bytes) -> bytes:
    """Apply bytes-to-bytes codecs, the first one first. Raise ValueError, with the reason, for invalid parameters."""
    for codec in codecs:
        try:
            data = ENCODERS[codec.name](data, codec.configuration)
        except Exception as e:  # each library raises its own exception for invalid parameters
            raise ValueError(f"{codec.name}: {e}") from e
    return data


def _add_crc32c(data: bytes, _: Mapping[str, Any]) -> bytes:
    import google_crc32c

    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def _to_gzip(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    import gzip

    return gzip.compress(data, configuration.get("level", 5), mtime=0)


def _to_zstd(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    from numcodecs.zstd import Zstd

    return bytes(Zstd(configuration.get("level", 0)).encode(data))


BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")


def _to_blosc(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    from numcodecs.blosc import Blosc

    c = configuration
    shuffle, cname = BLOSC_SHUFFLES.index(c.get("shuffle", "noshuffle")), c.get("cname", "lz4")
    if cname == NOT_IN_BLOSC:
        cname = "lz4"  # readers accept that, because each chunk names its compressor
    codec = Blosc(cname, c.get("clevel", 5), shuffle, c.get("blocksize", 0))
    size = c.get("typesize", 1)
    if len(data) % size:
        size = 1  # the data are the output of another codec, not elements
    return bytes(codec.encode(np.frombuffer(data, f"V{size}")))


def _to_bz2(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    import bz2

    return bz2.compress(data, configuration.get("level", 1))


def _to_lzma(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    from numcodecs.lzma import LZMA

    known = {name: configuration[name] for name in ("format", "check", "preset", "filters") if name in configuration}
    return bytes(LZMA(**known).encode(data))


def _to_zlib(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    encoded: bytes = zlib.compress(data, configuration.get("level", 1))
    return encoded


def _to_lz4(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    from numcodecs.lz4 import LZ4

    return bytes(LZ4(configuration.get("acceleration", 1)).encode(data))


ENCODERS: Mapping[str, Callable[[bytes, Mapping[str, Any]], bytes]] = {
    **{f"numcodecs.{name}": _to_same_size(name) for name in SAME_SIZE},
    "crc32c": _add_crc32c,
    "gzip": _to_gzip,
    "zstd": _to_zstd,
    "blosc": _to_blosc,
    "numcodecs.bz2": _to_bz2,
    "numcodecs.lzma": _to_lzma,
    "numcodecs.zlib": _to_zlib,
    "numcodecs.lz4": _to_lz4,
}
