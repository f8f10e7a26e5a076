"""Remove and apply the codecs that surround a whole shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfs.codecs import decoders, encoders, zlib_streams
from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.errors import UnsupportedError
from shardfs.model.write_plan import bytes_of, chunks_of, size_of
from shardfs.storage.blob_views import BytesBlob, SliceBlob

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Layer
    from shardfs.model.shard_format import ShardIndex


def unwrapped(layer: Layer, stored: Blob | None) -> Blob | None:
    """Return the shard without the codecs around it. Raise ValueError, with the reason, if it cannot be decoded."""
    if stored is None or not (layer.trailer or layer.codecs):
        return stored
    size = stored.stat().size
    if layer.trailer:
        return SliceBlob(stored, 0, max(0, size - layer.trailer))
    if size > zlib_streams.MAX_STORED:
        raise ValueError(f"a shard of {size} bytes that is decoded as a whole; {zlib_streams.MAX_STORED} is the limit")
    return BytesBlob(decoders.decode(layer.codecs, stored.read([ByteRange(0, size)])[0]), stored)


def wrapped(layer: Layer, plan: Plan | None, stored: Blob | None, blob: Blob | None) -> Plan | None:
    """Apply the layer's codecs to a new shard. `blob` is the old shard without codecs; the plan refers to its bytes."""
    if plan is None:
        return None
    if layer.codecs:
        if size_of(plan) > zlib_streams.MAX_DECODED:
            raise UnsupportedError(
                f"a shard that is encoded as a whole can have {zlib_streams.MAX_DECODED} bytes at most"
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
        told = stored.read([ByteRange(max(n - size, 0), n)])[0]
        if len(told) != size or _sums([ByteRange(0, n - size)], stored, size) != told:
            raise ValueError("the crc32c of the whole shard does not hold")
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


def read_page(layer: Layer, shard: int, page: int, blob: Blob) -> ShardIndex | None:
    """Return an index page of a shard; None if the page is empty. Raise ValueError, with the reason."""
    format = layer.format
    if format.walk is not None:
        return format.walk(blob)
    where = format.root_request(format.block_of(page))
    root = None if where is None else blob.read([where])[0]
    request = format.page_request(shard, page, root)
    if request is None:
        return None
    raw = blob.read([request])[0]
    if not isinstance(request, Suffix) and len(raw) != request.stop - request.start:
        raise ValueError(f"an index at [{request.start}, {request.stop}) is cut off after {len(raw)} bytes")
    return format.decode_page(shard, page, raw).arrays()
