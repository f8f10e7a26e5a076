"""Bytes-to-bytes codecs around chunks and whole shards. Established libraries do the work, imported when needed."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs import images
from shardfs.arrays import Codec
from shardfs.model import Checksum

try:
    from zlib_ng import zlib_ng as zlib  # the extra `fast`
except ImportError:
    import zlib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shardfs.model import U64, Coords, Sizes

_DeflateError: type[Exception] = zlib.error

MAX_DECODED = 128 << 20
"""Most bytes of a decoded chunk or shard: a larger one is refused, so a small hostile file cannot fill the memory."""

MAX_STORED = MAX_DECODED + (MAX_DECODED >> 6)
"""Most bytes of an encoded chunk or shard: `MAX_DECODED` and what a codec adds to incompressible data."""

PIECE = 16 << 20
"""Bytes that one call of a decompressor may return."""

FIRST_WINDOW = 1 << 12
"""Input bytes of the first call for each stream after the first; the size doubles with each further call."""

PRECOMPUTED_LEVEL = 9
"""The gzip level for chunks of precomputed shards, the same as tensorstore's."""


def gunzip(data: bytes, limit: int = MAX_DECODED) -> bytes:
    """Decode gzip members. Raise ValueError, with the reason, for damaged data or a result over `limit` bytes."""
    if not data:
        raise ValueError("not gzip data: empty")
    try:
        return _inflate(data, 31, limit, members=True)
    except _DeflateError as e:
        raise ValueError(f"not gzip data: {e}") from e


def _inflate(data: bytes, wbits: int, limit: int, *, members: bool = False) -> bytes:
    """Decode one zlib stream, or all gzip `members`.

    The loop decodes in pieces, because zlib needs twice the memory of the result if it decodes all at once. zlib copies
    the input behind the end of a stream. There may be a million members, so later ones get small input windows first.
    """
    out, total, at, window = list[bytes](), 0, 0, len(data)
    while True:
        decoder = zlib.decompressobj(wbits)
        while not decoder.eof:
            source = data[at : at + window]
            part = decoder.decompress(source, PIECE)
            at += len(source) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
            total += len(part)
            if total > limit:
                raise ValueError(f"grows beyond {limit} bytes when decompressed")
            if part:
                out.append(part)
            elif at == len(data) and not decoder.eof:
                raise ValueError("the deflate stream ends too early")
            window = min(2 * window, PIECE)
        if not members or at == len(data):
            return out[0] if len(out) == 1 else b"".join(out)
        window = FIRST_WINDOW


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


def inflate(data: bytes, size: int) -> bytes:
    """Decode zlib data to `size` bytes. Raise ValueError, with the reason, for damaged data or another size."""
    try:
        decoded: bytes = zlib.decompressobj().decompress(data, size + 1)
    except _DeflateError as e:
        raise ValueError(f"not zlib data: {e}") from e
    if len(decoded) != size:
        raise ValueError(f"{size} bytes expected after decompression, {len(decoded)} or more found")
    return decoded


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


def _to_same_size(name: str) -> Callable[[bytes, Mapping[str, Any]], bytes]:
    def do(data: bytes, configuration: Mapping[str, Any]) -> bytes:
        import numcodecs

        return bytes(numcodecs.get_codec({**configuration, "id": name}).encode(np.frombuffer(data, np.uint8)))

    return do


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
    if not codecs or codecs[0].name not in INTO:
        decoded = decode(codecs, data, len(out))
        if len(decoded) != len(out):
            raise ValueError(f"{len(out)} bytes expected after decoding, {len(decoded)} found")
        out[:] = decoded
        return
    data = decode(codecs[1:], data)
    try:
        INTO[codecs[0].name](data, out)
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


INTO: Mapping[str, Callable[[bytes, memoryview], None]] = {"zstd": _zstd_into, "blosc": _blosc_into}


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


# ---- encoders that do not compress: any decoder accepts their output, and its size is known in advance

DEFLATE_BLOCK, ZSTD_BLOCK = 0xFFFF, 128 << 10
BLOSC_HEADER = struct.Struct("<BBBBIII")
BLOSC_VERSION, BLOSC_COPIED, BLOSC_MAX_TYPESIZE = (2, 1), 0x02, 255


class _Storer(NamedTuple):
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


STORERS: Mapping[str, _Storer] = {
    "crc32c": _Storer(lambda n: n + 4, _add_crc32c),
    "gzip": _Storer(lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 18, _store_gzip),
    "zstd": _Storer(lambda n: n + 3 * _blocks(n, ZSTD_BLOCK) + 13, _store_zstd),
    "blosc": _Storer(lambda n: n + BLOSC_HEADER.size, _store_blosc),
    "numcodecs.zlib": _Storer(lambda n: n + 5 * _blocks(n, DEFLATE_BLOCK) + 6, _store_zlib),
}


def can_store(codecs: Sequence[Codec]) -> bool:
    """Whether `store` knows these codecs."""
    return all(codec.name in STORERS for codec in codecs)


def stored_sizes(codecs: Sequence[Codec], sizes: Sizes) -> Sizes:
    """How many bytes `store` makes of data of these sizes."""
    for codec in codecs:
        sizes = STORERS[codec.name].size(sizes)
    return sizes


def store(codecs: Sequence[Codec], data: bytes) -> bytes:
    """Apply the codecs like `encode`, but without compression. `decode` undoes both."""
    for codec in codecs:
        data = STORERS[codec.name].store(data, codec.configuration)
    return data


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
