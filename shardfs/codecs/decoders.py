"""Bytes-to-bytes codecs around chunks and whole shards. Established libraries do the work, imported when needed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.fast_zlib import zlib
from shardfs.model.arrays import Codec
from shardfs.model.shard_format import Checksum

if TYPE_CHECKING:
    from collections.abc import Sequence


from shardfs.codecs.zlib_streams import FIRST_WINDOW, MAX_DECODED, PIECE, _inflate, gunzip


def decompressed(data: bytes, suffix: str) -> bytes:
    """Decode a file by the compression suffix of its name. Raise ValueError, with the reason, if that fails."""
    match suffix:
        case ".gz":
            return gunzip(data)
        case ".zstd":
            return _zstd(data, {}, None)
        case ".xz":
            return _lzma(data, {}, None)
        case ".bz2":
            return _unpack(_bz2_decoder)(data, {}, None)
    raise ValueError(f"shardfs cannot decompress {suffix} files; it can decompress .gz, .zstd, .xz and .bz2")


# ---- decoders by codec name. `wanted` is the exact number of decoded bytes, None if unknown.


def _limit(wanted: int | None) -> int:
    return MAX_DECODED if wanted is None else min(wanted, MAX_DECODED)


def _crc32c(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    require_crc32c(data)
    return data[:-4]


def require_crc32c(data: bytes | memoryview) -> None:
    """Raise ValueError unless the last four bytes are the crc32c of the bytes before them."""
    import google_crc32c

    if len(data) < 4:
        raise ValueError(f"has {len(data)} bytes, too few for a crc32c")
    # google_crc32c accepts arrays but no memoryviews; a copy would cost more than the checksum.
    computed, stored = google_crc32c.value(np.frombuffer(data, np.uint8)[:-4]), int.from_bytes(data[-4:], "little")
    if computed != stored:
        raise ValueError(f"it has crc32c {computed:08x}, but says {stored:08x}")


def _gzip(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    return gunzip(data, _limit(wanted))


def _zstd(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    from numcodecs.zstd import Zstd

    if wanted is not None:
        return bytes(Zstd().decode(_zstd_of(data, wanted))) if wanted else b""
    if not 0 <= zstd_size(data) <= MAX_DECODED:
        raise ValueError(f"expected a zstd frame with a content size of at most {MAX_DECODED} bytes in its header")
    return bytes(Zstd().decode(data)) if zstd_size(data) else b""


def _zstd_of(data: bytes, size: int) -> bytes:
    """The frame with `size` in its header, which a streaming writer omits. Raise ValueError for another size."""
    header_size = zstd_size(data)
    if header_size < 0 and data[:4] == ZSTD_MAGIC and len(data) > 5:
        return _with_zstd_size(data, size)
    if header_size != size:
        raise ValueError(f"expected a zstd frame of {size} decoded bytes, the header says {header_size}")
    return data


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _with_zstd_size(data: bytes, size: int) -> bytes:
    """Add the missing content size to a frame header: 8 bytes after the window and the dictionary id.

    RFC 8878, section 3.1.1.1. Decoding fails later if the size is wrong.
    """
    descriptor = data[4]
    at = 6 + (0, 1, 2, 4)[descriptor & 3]
    return ZSTD_MAGIC + bytes([descriptor | 0xC0]) + data[5:at] + size.to_bytes(8, "little") + data[at:]


def zstd_size(data: bytes) -> int:
    """The content size in a frame's header, -1 if the header has none (RFC 8878, section 3.1.1.1)."""
    if len(data) < 6 or data[:4] != ZSTD_MAGIC:
        return -1
    descriptor = int.from_bytes(data[4:5])
    single = descriptor >> 5 & 1
    size = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if not size:
        return -1
    return int.from_bytes(data[start : start + size], "little") + (256 if size == 2 else 0)


def _blosc(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    import blosc

    _require_blosc(data, wanted)
    blosc.set_releasegil(True)  # otherwise other requests would wait for the decoder
    return bytes(blosc.decompress(data))


def _require_blosc(data: bytes, wanted: int | None) -> None:
    decoded, stored = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
    if len(data) < 16 or decoded > MAX_DECODED or (wanted is not None and decoded != wanted):
        limit = wanted or f"at most {MAX_DECODED}"
        raise ValueError(f"expected a Blosc chunk of {limit} decoded bytes, the header says {decoded}")
    if stored != len(data):  # the library would read beyond the data
        raise ValueError(f"the header of a Blosc chunk of {len(data)} bytes says {stored} bytes")


Decoder = Callable[[bytes, Mapping[str, Any], "int | None"], bytes]


def _unpack(decoder: Callable[[], Any]) -> Decoder:
    """A decoder by one of the standard library's decompressors, which all take an output limit."""

    def undo(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
        out: list[bytes] = []
        total, limit, at, window = 0, _limit(wanted), 0, len(data)
        while at < len(data):  # command line tools may write several streams, one after the other
            unpacker = decoder()
            while not unpacker.eof:
                source = data[at : at + window] if unpacker.needs_input else b""
                at += len(source)
                part = unpacker.decompress(source, PIECE)
                total += len(part)
                if total > limit:
                    raise ValueError(f"grows beyond {limit} bytes when decompressed")
                if not part and at == len(data) and not unpacker.eof and unpacker.needs_input:
                    raise ValueError("the compressed data end too early")
                out.append(part)
                window = min(2 * window, PIECE)
            at -= len(unpacker.unused_data)
            window = FIRST_WINDOW  # see `_inflate`
        if not out:
            raise ValueError("the compressed data are empty")
        return b"".join(out)

    return undo


def _bz2_decoder() -> Any:
    import bz2

    return bz2.BZ2Decompressor()


def _lzma(data: bytes, configuration: Mapping[str, Any], wanted: int | None) -> bytes:
    import lzma

    c = configuration
    forms = {1: lzma.FORMAT_XZ, 2: lzma.FORMAT_ALONE, 3: lzma.FORMAT_RAW}
    form, limit = forms[c.get("format", 1)], MAX_DECODED  # limits memory: a header may ask for any amount
    if form == lzma.FORMAT_RAW:
        return _unpack(lambda: lzma.LZMADecompressor(form, filters=c.get("filters")))(data, c, wanted)
    return _unpack(lambda: lzma.LZMADecompressor(form, memlimit=limit))(data, c, wanted)


def _zlib(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    return _inflate(data, zlib.MAX_WBITS, _limit(wanted))


def _lz4(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    """Decode numcodecs' form: the decoded size in 4 bytes, then one LZ4 block."""
    from numcodecs.lz4 import LZ4

    if len(data) < 4 or int.from_bytes(data[:4], "little") > _limit(wanted):
        raise ValueError("not LZ4 data, or the decoded size in its header is too large")
    return bytes(LZ4().decode(data))


LZ4_MAGIC, LZ4_HEADER, LZ4_STORED, LZ4_PACKED = b"LZ4Block", 21, 0x10, 0x20


def _n5_lz4(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    """Decode the framing of lz4-java's `LZ4BlockOutputStream`: blocks of magic, token, two sizes and a checksum.

    The checksum is an xxHash and is not verified, as no installed library computes it; the LZ4 data and the sizes are
    checked. z5 writes a bare LZ4 block without a size instead. A bare block cannot begin with the magic, because the
    magic would decode to a match offset before the block's beginning.
    """
    if wanted is not None and not data.startswith(LZ4_MAGIC):
        return _lz4(wanted.to_bytes(4, "little") + data, {}, wanted)
    out: list[bytes] = []
    total = 0
    while True:
        head, token = data[:LZ4_HEADER], data[8:9]
        if len(head) < LZ4_HEADER or not head.startswith(LZ4_MAGIC):
            raise ValueError(f"expected an LZ4 block that begins with {LZ4_MAGIC!r}, found {head[:8]!r}")
        packed, size = int.from_bytes(head[9:13], "little"), int.from_bytes(head[13:17], "little")
        body, data = data[LZ4_HEADER : LZ4_HEADER + packed], data[LZ4_HEADER + packed :]
        total += size
        if len(body) != packed or total > _limit(wanted):
            raise ValueError("an LZ4 block is truncated or too large")
        if not size:
            return b"".join(out)
        kind = token[0] & 0xF0
        if kind not in (LZ4_STORED, LZ4_PACKED):
            raise ValueError(f"an LZ4 block has the unknown compression method {kind:#x}")
        out.append(body if kind == LZ4_STORED else _lz4(head[13:17] + body, {}, size))
        if len(out[-1]) != size:
            raise ValueError(f"the header of an LZ4 block of {len(out[-1])} decoded bytes says {size}")


def _word(digest: Callable[[bytes], int]) -> Callable[[bytes], bytes]:
    return lambda data: digest(data).to_bytes(4, "little")


def _hash(name: str) -> Checksum:
    new = partial(hashlib.new, name, usedforsecurity=False)
    return Checksum(name, new().digest_size, lambda data: new(data).digest())


CHECKSUMS = (
    Checksum("none", 0, lambda _: b""),
    Checksum("adler32", 4, _word(zlib.adler32)),
    Checksum("crc32", 4, _word(zlib.crc32)),
    *map(_hash, ("md5", "sha1", "sha224", "sha256", "sha384", "sha512")),
)
"""bloscpack's checksums, in the order of their numbers in bloscpack."""


def blosc2_index(chunk: bytes) -> bytes:
    """Decode the Blosc2 chunk that holds a frame's offsets. Raise ValueError with the reason.

    https://github.com/Blosc/c-blosc2/blob/main/README_CHUNK_FORMAT.rst. Only the built-in codecs and filters that
    Blosc2 uses for such chunks are accepted: other ones could make the library load plugins.
    """
    if len(chunk) < 32 or chunk[2] & 5 != 5 or chunk[2] >> 5 > 4 or max(chunk[16:22]) > 2:
        raise ValueError("its index is not a Blosc2 chunk with a built-in codec and filters")
    try:
        import blosc2
    except ImportError:
        raise ValueError("needs python-blosc2: pip install blosc2") from None
    try:
        return bytes(blosc2.decompress2(chunk))
    except (RuntimeError, ValueError) as e:
        raise ValueError(f"its index cannot be decoded: {e}") from e


def _same_size(name: str) -> Decoder:
    """A decoder by a numcodecs codec that keeps the size or adds a few bytes."""

    def undo(data: bytes, configuration: Mapping[str, Any], wanted: int | None) -> bytes:
        import numcodecs

        return bytes(numcodecs.get_codec({**configuration, "id": name}).decode(data))

    return undo


SAME_SIZE = ("shuffle", "crc32", "adler32", "fletcher32")

DECODERS: Mapping[str, Decoder] = {
    **{f"numcodecs.{name}": _same_size(name) for name in SAME_SIZE},
    "crc32c": _crc32c,
    "gzip": _gzip,
    "zstd": _zstd,
    "blosc": _blosc,
    "numcodecs.bz2": _unpack(_bz2_decoder),
    "numcodecs.lzma": _lzma,
    "numcodecs.zlib": _zlib,
    "numcodecs.lz4": _lz4,
    "n5.lz4": _n5_lz4,
}


NOT_IN_BLOSC = "snappy"
"""A Blosc compressor that tensorstore has, but the packages `blosc` and `numcodecs` are built without."""


def can_decode(codec: Codec) -> bool:
    """Whether `decode` knows this codec."""
    return codec.name in DECODERS and codec.configuration.get("cname") != NOT_IN_BLOSC


def decode(codecs: Sequence[Codec], data: bytes, size: int | None = None) -> bytes:
    """Undo bytes-to-bytes codecs, the last one first. Raise ValueError with the reason if one fails.

    `size` is the size of the result, if known: then no decoder allocates more than that.
    """
    for n, codec in reversed(list(enumerate(codecs))):
        try:
            data = DECODERS[codec.name](data, codec.configuration, None if n else size)
        except ValueError:
            raise
        except Exception as e:  # each library raises its own exception for damaged input
            raise ValueError(f"{codec.name}: {e}") from e
        if len(data) > MAX_DECODED:
            raise ValueError(f"{codec.name}: grows beyond {MAX_DECODED} bytes when decoded")
    return data


def decode_into(codecs: Sequence[Codec], data: bytes, out: memoryview) -> None:
    """`decode` to `out`, which must be filled exactly. Faster than `decode` and a copy: touching new memory is slow."""
    if not codecs or codecs[0].name not in DECODE_INTO:
        decoded = decode(codecs, data, len(out))
        if len(decoded) != len(out):
            raise ValueError(f"{len(out)} bytes expected after decoding, {len(decoded)} found")
        out[:] = decoded
        return
    data = decode(codecs[1:], data)
    try:
        DECODE_INTO[codecs[0].name](data, out)
    except ValueError:
        raise
    except Exception as e:
        raise ValueError(f"{codecs[0].name}: {e}") from e


def _zstd_into(data: bytes, out: memoryview) -> None:
    from numcodecs import zstd

    zstd.decompress(_zstd_of(data, len(out)), out)


def _blosc_into(data: bytes, out: memoryview) -> None:
    from numcodecs import blosc  # the package `blosc` needs the address of the output

    _require_blosc(data, len(out))
    blosc.decompress(data, out)


DECODE_INTO: Mapping[str, Callable[[bytes, memoryview], None]] = {"zstd": _zstd_into, "blosc": _blosc_into}


# ---- encoders that do not compress: any decoder accepts their output, and its size is known in advance

DEFLATE_BLOCK, ZSTD_BLOCK = 0xFFFF, 128 << 10

BLOSC_VERSION, BLOSC_COPIED, BLOSC_MAX_TYPESIZE = (2, 1), 0x02, 255


def _gzip_member(data: bytes, deflated: Sequence[bytes | memoryview]) -> bytes:
    """A gzip member without name or time, of an unknown operating system (RFC 1952)."""
    sums = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return b"".join([b"\x1f\x8b\x08\0\0\0\0\0\0\xff", *deflated, sums])


def gzip_of_zlib(stream: bytes, most: int | None = None) -> bytes:
    """Wrap the deflated data of a zlib stream as gzip. The data are decoded for gzip's checksum, but not compressed.

    Raise ValueError, with the reason, if the stream is damaged, decodes to more than `most` bytes, or is followed by
    other bytes.
    """
    data = decode((Codec("numcodecs.zlib"),), stream, most)
    if stream[-4:] != zlib.adler32(data).to_bytes(4, "big"):
        raise ValueError("other bytes follow the zlib stream")
    return _gzip_member(data, [memoryview(stream)[2:-4]])  # RFC 1950
