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
    from collections.abc import Callable

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Layer
    from shardfs.model.values import Version
    from shardfs.storage.cache import ByteLRU


class DecodedShards:
    """The decoded bytes of whole shards: entries of a shared cache, by name and version of the shard.

    An entry of another version is never found, so nothing must be invalidated.
    """

    def __init__(self, cache: ByteLRU) -> None:
        self._cache = cache

    def get(self, key: str, version: Version, size: int, decode: Callable[[], bytes]) -> bytes:
        """Return the decoded shard. If it is not cached, `decode` makes it of `size` bytes."""

        def load() -> tuple[bytes, int, float]:
            with self._cache.decoding.taken(size + zlib_streams.MAX_DECODED):
                data = decode()
            return data, len(data), math.inf

        return self._cache.get((key, version, "decoded"), load)


def unwrapped(layer: Layer, stored: Blob, key: str = "", decoded: DecodedShards | None = None) -> Blob:
    """Return the shard without the codecs around it. Raise ValueError, with the reason, if it cannot be decoded.

    `key` is the shard's name in the cache `decoded`; None for no cache.
    """
    if layer.trailer:
        return SliceBlob(stored, 0, max(0, stored.stat().size - layer.trailer))
    if not layer.codecs:
        return stored
    size, _, version = stored.stat()
    if size > zlib_streams.MAX_STORED:
        raise ValueError(f"a shard of {size} bytes that is decoded as a whole; {zlib_streams.MAX_STORED} is the limit")

    def decode() -> bytes:
        return decoders.decode(layer.codecs, stored.read([ByteRange(0, size)])[0])

    return BytesBlob(decode() if decoded is None else decoded.get(key, version, size, decode), stored)


def wrapped(layer: Layer, plan: Plan | None, stored: Blob | None, blob: Blob | None) -> Plan | None:
    """Apply the layer's codecs to a new shard. `blob` is the old shard without codecs; the plan refers to its bytes."""
    if plan is None:
        return None
    if layer.codecs:
        if size_of(plan) > zlib_streams.MAX_DECODED:
            limit = zlib_streams.MAX_DECODED
            raise UnsupportedError(
                f"a shard of {size_of(plan)} bytes is encoded as a whole; {limit} bytes is the limit"
            )
        return [encoders.encode(layer.codecs, bytes_of(plan, blob))]
    if not layer.trailer:
        return plan
    return [*plan, _trailer(layer.trailer, plan, stored)]


def _trailer(size: int, plan: Plan, stored: Blob | None) -> bytes:
    """Return the checksums of a new shard.

    Raise ValueError if the checksums of the old shard are wrong, because new ones would hide its damage.
    """

    if stored is not None:
        n = stored.stat().size
        old = stored.read([ByteRange(max(n - size, 0), n)])[0]
        if len(old) != size or _sums([ByteRange(0, n - size)], stored, size) != old:
            raise ValueError("the crc32c of the whole shard is wrong")
    return _sums(plan, stored, size)


def _sums(plan: Plan, stored: Blob | None, size: int) -> bytes:
    """Return `size` bytes of CRC-32C checksums, each of all bytes before it."""
    import google_crc32c

    crc, out = 0, b""
    for data in chunks_of(plan, stored):
        crc = google_crc32c.extend(crc, bytes(data))
    while len(out) < size:
        word = crc.to_bytes(4, "little")
        crc, out = google_crc32c.extend(crc, word), out + word
    return out
