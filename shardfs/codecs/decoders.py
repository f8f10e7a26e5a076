"""Bytes-to-bytes codecs around chunks and whole shards. Established libraries do the work, imported when needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.fast_zlib import zlib
from shardfs.codecs.zlib_streams import MAX_DECODED, decompress_streams, gunzip, inflate
from shardfs.model.arrays import Codec
from shardfs.model.shard_format import Checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

SUFFIXES = {
    ".gz": Codec("gzip"),
    ".zstd": Codec("zstd"),
    ".xz": Codec("numcodecs.lzma"),
    ".bz2": Codec("numcodecs.bz2"),
}
"""Codecs of compressed files, by the suffixes of the names."""


def decompressed(data: bytes, suffix: str) -> bytes:
    """Decode a file by the compression suffix of its name. Raise ValueError, with the reason, if that fails."""
    if suffix not in SUFFIXES:
        raise ValueError(f"shardfs cannot decompress {suffix} files; it can decompress {', '.join(SUFFIXES)}")
    return decode((SUFFIXES[suffix],), data)


# ---- decoders by codec name. `wanted` is the exact number of decoded bytes, None if unknown.

Decoder = Callable[[bytes, Mapping[str, Any], "int | None"], bytes]


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
    computed, checksum = google_crc32c.value(np.frombuffer(data, np.uint8)[:-4]), int.from_bytes(data[-4:], "little")
    if computed != checksum:
        raise ValueError(f"it has crc32c {computed:08x}, but {checksum:08x} is stored")


def _zstd(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    from numcodecs.zstd import Zstd

    if wanted is not None:
        return bytes(Zstd().decode(_zstd_of(data, wanted))) if wanted else b""
    size = zstd_size(data)
    if (size if size >= 0 else _zstd_most(data)) > MAX_DECODED:
        raise ValueError(f"expected a zstd frame that is decoded to at most {MAX_DECODED} bytes")
    return bytes(Zstd().decode(data)) if size else b""


def _zstd_of(data: bytes, size: int) -> bytes:
    """The frame with `size` in its header, which a streaming writer omits. Raise ValueError for another size."""
    header_size = zstd_size(data)
    if header_size < 0 and data[:4] == ZSTD_MAGIC and len(data) > 5:
        return _with_zstd_size(data, size)
    if header_size != size:
        raise ValueError(f"expected a zstd frame of {size} decoded bytes, the header says {header_size}")
    return data


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_DICTIONARY_BYTES = (0, 1, 2, 4)
"""Sizes of the dictionary id by the lowest two bits of a frame header's descriptor."""


def _with_zstd_size(data: bytes, size: int) -> bytes:
    """Add the missing content size to a frame header: 8 bytes after the window and the dictionary id.

    RFC 8878, section 3.1.1.1. Decoding fails later if the size is wrong.
    """
    descriptor = data[4]
    at = 6 + _DICTIONARY_BYTES[descriptor & 3]
    return ZSTD_MAGIC + bytes([descriptor | 0xC0]) + data[5:at] + size.to_bytes(8, "little") + data[at:]


ZSTD_BLOCK = 128 << 10
"""Most bytes that a compressed block is decoded to."""


def _zstd_most(data: bytes) -> int:
    """Most bytes that a frame without content size is decoded to, from the headers of its blocks.

    RFC 8878, section 3.1.1.2. Raise ValueError if this is no single frame.
    """
    if data[:4] != ZSTD_MAGIC or len(data) < 6:
        raise ValueError(f"expected a zstd frame, found {data[:6].hex()}")
    at, total, is_last = 6 + _DICTIONARY_BYTES[data[4] & 3], 0, False
    while not is_last:
        header = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += ZSTD_BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if kind == 3 or at > len(data):
            raise ValueError("a block of the zstd frame is damaged or truncated")
    if at + (4 if data[4] & 4 else 0) != len(data):
        raise ValueError(f"the zstd frame should end at {at}, but {len(data)} bytes are stored")
    return total


def zstd_size(data: bytes) -> int:
    """The content size in a frame's header, -1 if the header has none (RFC 8878, section 3.1.1.1)."""
    if len(data) < 6 or data[:4] != ZSTD_MAGIC:
        return -1
    descriptor = data[4]
    single = descriptor >> 5 & 1
    size = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + _DICTIONARY_BYTES[descriptor & 3]
    if not size:
        return -1
    return int.from_bytes(data[start : start + size], "little") + (256 if size == 2 else 0)


def _blosc(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    import blosc

    _require_blosc(data, wanted)
    blosc.set_releasegil(True)  # otherwise other requests would wait for the decoder
    return bytes(blosc.decompress(data))


def _require_blosc(data: bytes, wanted: int | None) -> None:
    decoded, encoded = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
    if len(data) < 16 or decoded > MAX_DECODED or (wanted is not None and decoded != wanted):
        limit = wanted or f"at most {MAX_DECODED}"
        raise ValueError(f"expected a Blosc chunk of {limit} decoded bytes, the header says {decoded}")
    if encoded != len(data):  # the library would read beyond the data
        raise ValueError(f"a Blosc chunk has {len(data)} bytes, but its header says {encoded}")


def _bz2(data: bytes, _: Mapping[str, Any], wanted: int | None) -> bytes:
    import bz2

    return decompress_streams(data, bz2.BZ2Decompressor, _limit(wanted))


def _lzma(data: bytes, configuration: Mapping[str, Any], wanted: int | None) -> bytes:
    import lzma

    form = {1: lzma.FORMAT_XZ, 2: lzma.FORMAT_ALONE, 3: lzma.FORMAT_RAW}[configuration.get("format", 1)]
    options: dict[str, Any] = {"memlimit": MAX_DECODED}  # limits memory: a header may ask for any amount
    if form == lzma.FORMAT_RAW:
        options = {"filters": configuration.get("filters")}
    return decompress_streams(data, lambda: lzma.LZMADecompressor(form, **options), _limit(wanted))


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


def _hash(name: str) -> Checksum:
    new = partial(hashlib.new, name, usedforsecurity=False)
    return Checksum(name, new().digest_size, lambda data: new(data).digest())


CHECKSUMS = (
    Checksum("none", 0, lambda _: b""),
    Checksum("adler32", 4, lambda data: zlib.adler32(data).to_bytes(4, "little")),
    Checksum("crc32", 4, lambda data: zlib.crc32(data).to_bytes(4, "little")),
    *map(_hash, ("md5", "sha1", "sha224", "sha256", "sha384", "sha512")),
)
"""bloscpack's checksums, in the order of their numbers in bloscpack."""


def blosc2_index(chunk: bytes) -> bytes:
    """Return the decoded bytes of the Blosc2 chunk that holds a frame's offsets. Raise ValueError with the reason.

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
    except Exception as e:  # the library raises any exception for damaged input, also SystemError
        raise ValueError(f"its index cannot be decoded: {e}") from e


def _same_size(data: bytes, configuration: Mapping[str, Any], wanted: int | None, *, name: str) -> bytes:
    """Decode by a numcodecs codec that keeps the size or adds a few bytes."""
    import numcodecs

    return bytes(numcodecs.get_codec({**configuration, "id": name}).decode(data))


SAME_SIZE = ("shuffle", "crc32", "adler32", "fletcher32")

DECODERS: Mapping[str, Decoder] = {
    **{f"numcodecs.{name}": partial(_same_size, name=name) for name in SAME_SIZE},
    "crc32c": _crc32c,
    "gzip": lambda data, _, wanted: gunzip(data, _limit(wanted)),
    "zstd": _zstd,
    "blosc": _blosc,
    "numcodecs.bz2": _bz2,
    "numcodecs.lzma": _lzma,
    "numcodecs.zlib": lambda data, _, wanted: inflate(data, _limit(wanted)),
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
    """`decode` to `out`, which must be filled exactly. Faster than `decode` and a copy: touching new memory is slow.

    Raise ValueError, with the reason, if a codec fails or the decoded size is not that of `out`.
    """
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
