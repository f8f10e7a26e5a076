"""Remove and apply the codecs that surround a whole shard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardfs.codecs import decoders, encoders, zlib_streams
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import UnsupportedError
from shardfs.model.write_plan import bytes_of, chunks_of, size_of
from shardfs.storage.blob_views import BytesBlob, SliceBlob

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Layer
    from shardfs.storage.cache import ByteLRU


def unwrapped(layer: Layer, blob: Blob, key: str = "", cache: ByteLRU | None = None) -> Blob:
    """Return the shard without the codecs around it. Raise ValueError, with the reason, if it cannot be decoded.

    The whole shard is read if it has codecs. `cache` keeps decoded shards by `key`, the shard's name, and version. An
    entry of another version is never found, so nothing must be invalidated.
    """
    if layer.trailer:
        return SliceBlob(blob, 0, max(0, blob.stat().size - layer.trailer))
    if not layer.codecs:
        return blob
    size, _, version = blob.stat()
    if size > zlib_streams.MAX_STORED:
        raise ValueError(f"a shard of {size} bytes that is decoded as a whole; {zlib_streams.MAX_STORED} is the limit")

    def decode() -> bytes:
        return decoders.decode(layer.codecs, blob.read([ByteRange(0, size)])[0])

    if cache is None:
        return BytesBlob(decode(), blob)

    def load() -> tuple[bytes, int, float]:
        with cache.decoding.taken(size + zlib_streams.MAX_DECODED):
            data = decode()
        return data, len(data), math.inf

    return BytesBlob(cache.get((key, version, "decoded"), load), blob)


def wrapped(layer: Layer, plan: Plan | None, blob: Blob | None, inner: Blob | None) -> Plan | None:
    """Return the plan of a shard with the layer's codecs around it; None for no shard.

    `blob` is the old shard, `inner` the same without codecs: `plan` refers to its bytes. Raise UnsupportedError for a
    shard that is too large to encode, and ValueError if a checksum of the old shard is wrong.
    """
    if plan is None:
        return None
    if layer.codecs:
        if size_of(plan) > zlib_streams.MAX_DECODED:
            limit = zlib_streams.MAX_DECODED
            raise UnsupportedError(
                f"a shard of {size_of(plan)} bytes is encoded as a whole; {limit} bytes is the limit"
            )
        return [encoders.encode(layer.codecs, bytes_of(plan, inner))]
    if not layer.trailer:
        return plan
    return [*plan, _trailer(layer.trailer, plan, blob)]


def _trailer(size: int, plan: Plan, blob: Blob | None) -> bytes:
    """Return the checksums of a new shard.

    Raise ValueError if the checksums of the old shard are wrong, because new ones would hide its damage.
    """

    if blob is not None:
        n = blob.stat().size
        old = blob.read([ByteRange(max(n - size, 0), n)])[0]
        if len(old) != size or _sums([ByteRange(0, n - size)], blob, size) != old:
            raise ValueError("the crc32c of the whole shard is wrong")
    return _sums(plan, blob, size)


def _sums(plan: Plan, blob: Blob | None, size: int) -> bytes:
    """Return `size` bytes of CRC-32C checksums, each of all bytes before it."""
    import google_crc32c

    crc, out = 0, b""
    for data in chunks_of(plan, blob):
        crc = google_crc32c.extend(crc, bytes(data))
    while len(out) < size:
        word = crc.to_bytes(4, "little")
        crc, out = google_crc32c.extend(crc, word), out + word
    return out
