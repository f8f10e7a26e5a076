"""Gzip and zlib streams, decoded with a limit on the size of the result."""

from __future__ import annotations

from shardfs.codecs.fast_zlib import zlib

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


def inflate(data: bytes, size: int) -> bytes:
    """Decode zlib data to `size` bytes. Raise ValueError, with the reason, for damaged data or another size."""
    try:
        decoded: bytes = zlib.decompressobj().decompress(data, size + 1)
    except _DeflateError as e:
        raise ValueError(f"not zlib data: {e}") from e
    if len(decoded) != size:
        raise ValueError(f"{size} bytes expected after decompression, {len(decoded)} or more found")
    return decoded
