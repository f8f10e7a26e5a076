"""Encoders of bytes-to-bytes codecs.

Each codec also has a form for incompressible data: any decoder accepts it, and its size is known in advance.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.codecs.decoders import NOT_IN_BLOSC, SAME_SIZE, ZSTD_MAGIC, decode
from shardfs.codecs.fast_zlib import zlib
from shardfs.codecs.zlib_streams import MAX_DECODED, PRECOMPUTED_LEVEL, gunzip
from shardfs.model.arrays import Codec
from shardfs.model.collection import Transform

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardfs.model.values import U64, Coords, Sizes


DEFLATE_RATIO = 1032
"""Deflated data cannot be decoded to more bytes than this multiple of theirs."""


class Gunzip(Transform):
    """For chunks that are stored as gzip and shown decompressed.

    Args:
        size_of: returns the decompressed sizes of chunks (n, d), if the encoding fixes these sizes.
    """

    name = "gzip"
    unwritable = None

    def __init__(self, size_of: Callable[[U64], U64] | None = None) -> None:
        self._size_of = size_of

    def _size(self, coords: Coords) -> int | None:
        return None if self._size_of is None else int(self._size_of(np.array([coords], np.uint64))[0])

    def sizes(self, coords: U64, stored_sizes: Sizes) -> Sizes:
        return np.full(len(coords), -1, np.int64) if self._size_of is None else self._size_of(coords).astype(np.int64)

    def show(self, coords: Coords, stored_bytes: bytes) -> bytes:
        size = self._size(coords)
        data = gunzip(stored_bytes, MAX_DECODED if size is None else min(size, MAX_DECODED))
        if size not in (None, len(data)):
            raise ValueError(f"{size} bytes expected after decompression, {len(data)} found")
        return data

    def work(self, coords: Coords, stored_size: int) -> int:
        size = self._size(coords)
        return 2 * min(MAX_DECODED, DEFLATE_RATIO * stored_size if size is None else size)  # pieces, and these joined

    def store(self, coords: Coords, shown_bytes: bytes) -> bytes:
        size = self._size(coords)
        if size not in (None, len(shown_bytes)):
            raise ValueError(f"should have {size} bytes, not {len(shown_bytes)}")
        if len(shown_bytes) > MAX_DECODED:
            raise ValueError(f"has {len(shown_bytes)} bytes; the limit is {MAX_DECODED}")
        return _to_gzip(shown_bytes, {"level": PRECOMPUTED_LEVEL})

    def is_exact(self, coords: Coords, shown_bytes: bytes) -> bool:
        return True


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


def _by_numcodecs(
    data: bytes, configuration: Mapping[str, Any], *, name: str, parameters: Collection[str] | None = None
) -> bytes:
    """Encode by a codec of numcodecs, which gets these parameters of the configuration; None for all."""
    import numcodecs

    arguments = {key: value for key, value in configuration.items() if parameters is None or key in parameters}
    return bytes(numcodecs.get_codec({**arguments, "id": name}).encode(np.frombuffer(data, np.uint8)))


def _add_crc32c(data: bytes, _: Mapping[str, Any]) -> bytes:
    import google_crc32c

    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def _to_gzip(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    import gzip

    return gzip.compress(data, configuration.get("level", 5), mtime=0)


def _to_zstd(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    from numcodecs.zstd import Zstd

    return bytes(Zstd(configuration.get("level", 0), bool(configuration.get("checksum"))).encode(data))


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


def _to_zlib(data: bytes, configuration: Mapping[str, Any]) -> bytes:
    encoded: bytes = zlib.compress(data, configuration.get("level", 1))
    return encoded


ENCODERS: Mapping[str, Callable[[bytes, Mapping[str, Any]], bytes]] = {
    **{f"numcodecs.{name}": partial(_by_numcodecs, name=name) for name in SAME_SIZE},
    "crc32c": _add_crc32c,
    "gzip": _to_gzip,
    "zstd": _to_zstd,
    "blosc": _to_blosc,
    "numcodecs.bz2": partial(_by_numcodecs, name="bz2", parameters=("level",)),
    "numcodecs.lzma": partial(_by_numcodecs, name="lzma", parameters=("format", "check", "preset", "filters")),
    "numcodecs.zlib": _to_zlib,
    "numcodecs.lz4": partial(_by_numcodecs, name="lz4", parameters=("acceleration",)),
}


# ---- forms for incompressible data

DEFLATE_BLOCK, ZSTD_BLOCK = 0xFFFF, 128 << 10

BLOSC_VERSION, BLOSC_COPIED, BLOSC_MAX_TYPESIZE = (2, 1), 0x02, 255

_BLOSC_HEADER = struct.Struct("<BBBBIII")


class _StoredEncoder(NamedTuple):
    """A codec's form for incompressible data: `size` returns the number of bytes of `store` from the data's size."""

    size: Callable[[Sizes], Sizes]
    store: Callable[[bytes, Mapping[str, Any]], bytes]


def _gzip_member(data: bytes, deflated: Sequence[bytes | memoryview]) -> bytes:
    """A gzip member without name or time, of an unknown operating system (RFC 1952)."""
    return b"".join([b"\x1f\x8b\x08\0\0\0\0\0\0\xff", *deflated, _gzip_sums(data)])


def gzip_of_zlib(stream: bytes, limit: int | None = None) -> bytes:
    """Wrap the deflated data of a zlib stream as gzip. The data are decoded for gzip's checksum, but not compressed.

    Raise ValueError, with the reason, if the stream is damaged, decodes to more than `limit` bytes, or is followed by
    other bytes.
    """
    data = decode((Codec("numcodecs.zlib"),), stream, limit)
    if stream[-4:] != zlib.adler32(data).to_bytes(4, "big"):
        raise ValueError("other bytes follow the zlib stream")
    return _gzip_member(data, [memoryview(stream)[2:-4]])  # RFC 1950


def zlib_of_gzip(member: bytes, limit: int | None = None) -> bytes | None:
    """Wrap the deflated data of a gzip member as zlib, without compressing them.

    None if the bytes are not exactly one undamaged member, without a name or comment, of at most `limit` decoded bytes.
    """
    if not member.startswith(b"\x1f\x8b\x08\0"):
        return None
    inflater = zlib.decompressobj(-15)  # no wrapper
    try:
        data = inflater.decompress(member[10:], (MAX_DECODED if limit is None else limit) + 1)
    except zlib.error:
        return None
    if inflater.unused_data != _gzip_sums(data):
        return None
    return b"".join([b"\x78\x01", memoryview(member)[10:-8], struct.pack(">I", zlib.adler32(data))])


def _gzip_sums(data: bytes) -> bytes:
    return struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


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
    return _BLOSC_HEADER.pack(*BLOSC_VERSION, BLOSC_COPIED, typesize, n, n, _BLOSC_HEADER.size + n) + data


STORED_ENCODERS: Mapping[str, _StoredEncoder] = {
    "crc32c": _StoredEncoder(lambda n: n + 4, _add_crc32c),
    "gzip": _StoredEncoder(
        lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 18, lambda data, _: _gzip_member(data, _deflated(data))
    ),
    "zstd": _StoredEncoder(lambda n: n + 3 * _blocks(n, ZSTD_BLOCK) + 13, _store_zstd),
    "blosc": _StoredEncoder(lambda n: n + _BLOSC_HEADER.size, _store_blosc),
    "numcodecs.zlib": _StoredEncoder(lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 6, _store_zlib),
}


def can_store(codecs: Sequence[Codec]) -> bool:
    """Whether `store` knows these codecs."""
    return all(codec.name in STORED_ENCODERS for codec in codecs)


def stored_sizes(codecs: Sequence[Codec], sizes: Sizes) -> Sizes:
    """How many bytes `store` makes of data of these sizes (n,). The codecs must satisfy `can_store`."""
    for codec in codecs:
        sizes = STORED_ENCODERS[codec.name].size(sizes)
    return sizes


def store(codecs: Sequence[Codec], data: bytes) -> bytes:
    """Apply the codecs like `encode`, but without compression. `decode` undoes both.

    The codecs must satisfy `can_store`.
    """
    for codec in codecs:
        data = STORED_ENCODERS[codec.name].store(data, codec.configuration)
    return data
