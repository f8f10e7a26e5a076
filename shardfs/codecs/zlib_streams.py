"""Compressed streams, decoded with a limit on the size of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfs.codecs.fast_zlib import zlib

if TYPE_CHECKING:
    from collections.abc import Callable

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


def decompress_streams(data: bytes, new: Callable[[], Any], limit: int, *, many: bool = True) -> bytes:
    """Decode one compressed stream, or `many`, one after the other. Raise ValueError for more than `limit` bytes.

    The loop decodes in pieces, because zlib needs twice the memory of the result if it decodes all at once. zlib copies
    the input behind the end of a stream. There may be a million streams, so later ones get small input windows first.

    Args:
        new: makes a decompressor of the standard library. Those of zlib return the input that they did not use; the
            others keep it, and report whether they need more.
    """
    out, total, at, window = list[bytes](), 0, 0, len(data)
    while True:
        decoder = new()
        while not decoder.eof:
            needs_input = getattr(decoder, "needs_input", True)
            source = data[at : at + window] if needs_input else b""
            part = decoder.decompress(source, PIECE)
            at += len(source) - len(decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b""))
            total += len(part)
            if total > limit:
                raise ValueError(f"grows beyond {limit} bytes when decompressed")
            if part:
                out.append(part)
            elif needs_input and at == len(data) and not decoder.eof:
                raise ValueError("the compressed stream ends too early")
            window = min(2 * window, PIECE)
        if not many or at == len(data):
            return out[0] if len(out) == 1 else b"".join(out)
        window = FIRST_WINDOW


def gunzip(data: bytes, limit: int = MAX_DECODED) -> bytes:
    """Decode gzip members. Raise ValueError, with the reason, for damaged data or a result over `limit` bytes."""
    if not data:
        raise ValueError("not gzip data: empty")
    try:
        return decompress_streams(data, lambda: zlib.decompressobj(31), limit)
    except _DeflateError as e:
        raise ValueError(f"not gzip data: {e}") from e


def inflate(data: bytes, limit: int) -> bytes:
    """Decode one zlib stream. Raise ValueError, with the reason, for damaged data or a result over `limit` bytes."""
    try:
        return decompress_streams(data, zlib.decompressobj, limit, many=False)
    except _DeflateError as e:
        raise ValueError(f"not zlib data: {e}") from e
