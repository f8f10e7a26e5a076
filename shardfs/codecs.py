"""Bytes-to-bytes codecs around chunks and whole shards. The field's libraries do the work, imported when needed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_DECODED = 1 << 30
"""A chunk or shard that decodes to more than this is refused, so that a small hostile file cannot fill the memory."""


class BytesCodec(NamedTuple):
    """A bytes-to-bytes codec as metadata names it."""

    name: str
    configuration: Mapping[str, Any]


def gunzip(data: bytes, limit: int = MAX_DECODED) -> bytes:
    """Decode gzip members. Raise ValueError, with the reason, if that fails or gives more than `limit` bytes."""
    out: list[bytes] = []
    total = 0
    while data:
        decoder = zlib.decompressobj(31)
        try:
            part = decoder.decompress(data, limit - total + 1)
        except zlib.error as e:
            raise ValueError(f"not gzip data: {e}") from e
        total += len(part)
        if total > limit:
            raise ValueError(f"grows beyond {limit} bytes when decompressed")
        if not decoder.eof:
            raise ValueError("a gzip member ends too early")
        out.append(part)
        data = decoder.unused_data
    if not out:
        raise ValueError("not gzip data: empty")
    return out[0] if len(out) == 1 else b"".join(out)


def _crc32c(data: bytes, _: Mapping[str, Any]) -> bytes:
    import google_crc32c

    body, told = data[:-4], int.from_bytes(data[-4:], "little")
    if len(data) < 4 or google_crc32c.value(body) != told:
        raise ValueError("its crc32c does not hold")
    return body


def _gzip(data: bytes, _: Mapping[str, Any]) -> bytes:
    return gunzip(data)


def _zstd(data: bytes, _: Mapping[str, Any]) -> bytes:
    from numcodecs.zstd import Zstd

    return bytes(Zstd().decode(data))


def _blosc(data: bytes, _: Mapping[str, Any]) -> bytes:
    import blosc

    if len(data) < 16 or int.from_bytes(data[4:8], "little") > MAX_DECODED:
        raise ValueError("no Blosc data, or too large")
    return bytes(blosc.decompress(data))


DECODERS: Mapping[str, Callable[[bytes, Mapping[str, Any]], bytes]] = {
    "crc32c": _crc32c,
    "gzip": _gzip,
    "zstd": _zstd,
    "blosc": _blosc,
}


def can_decode(codec: BytesCodec) -> bool:
    """Whether `decode` knows this codec."""
    return codec.name in DECODERS


def decode(codecs: Sequence[BytesCodec], data: bytes) -> bytes:
    """Undo bytes-to-bytes codecs, the last one first. Raise ValueError with the reason if one fails."""
    for codec in reversed(codecs):
        try:
            data = DECODERS[codec.name](data, codec.configuration)
        except ValueError:
            raise
        except Exception as e:  # every library has its own exception for damaged input
            raise ValueError(f"{codec.name}: {e}") from e
        if len(data) > MAX_DECODED:
            raise ValueError(f"{codec.name}: grows beyond {MAX_DECODED} bytes when decoded")
    return data
