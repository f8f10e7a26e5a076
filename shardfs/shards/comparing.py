"""Finds the chunks that are stored already, so that publishing does not store them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardfs.model.blobs import ByteRange
from shardfs.model.write_plan import SPAN, bytes_of, chunks_of, piece_size, pieces_of, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.errors import CorruptShardError
    from shardfs.model.shard_format import ChunkExtent, Put

K = TypeVar("K")


def stored_already(
    puts: Mapping[K, tuple[Put | None, ChunkExtent | CorruptShardError | None]], blob: Blob | None
) -> set[K]:
    """Return the keys of the chunks that a shard has with the same bytes.

    Of a shard that is no local file, small chunks are read together. After a group of which all differ, the rest counts
    as different too, because each group may cost a request.

    Args:
        puts: new chunks, None for one that is dropped; and the extents of the stored ones, None for an absent one, an
            error for a damaged one.
        blob: the shard without the codecs around it; None if there is none.
    """
    equal: set[K] = set()
    group: list[tuple[K, Plan, ByteRange]] = []
    size = 0
    for key, (put, extent) in puts.items():
        where = _stored_at(put, extent) if put is not None and isinstance(extent, tuple) else None
        if put is None or where is None or blob is None:
            continue
        group.append((key, _whole(put), where))
        size += piece_size(where)
        if size >= SPAN or blob.fd >= 0:
            equal |= (group_equal := _equal(group, blob))
            if not group_equal and blob.fd < 0:
                return equal
            group, size = [], 0
    return equal if blob is None else equal | _equal(group, blob)


def _whole(put: Put) -> Plan:
    return pieces_of(put.data) if put.lead is None else [*pieces_of(put.lead), *pieces_of(put.data)]


def _stored_at(put: Put, extent: ChunkExtent) -> ByteRange | None:
    """Return the range of a stored chunk and its lead; None if the new chunk has another size."""
    start = extent[0] - (0 if put.lead is None else size_of(put.lead))
    return ByteRange(start, sum(extent)) if size_of(put.data) == extent[1] and start >= 0 else None


def _equal(group: Sequence[tuple[K, Plan, ByteRange]], blob: Blob) -> set[K]:
    """Return the keys of the chunks that are equal. Large chunks are read in pieces."""
    small = [member for member in group if piece_size(member[2]) <= SPAN]
    contents = blob.read([where for *_, where in small]) if small else []
    equal = {key for (key, plan, _), data in zip(small, contents, strict=True) if bytes_of(plan, blob) == data}
    return equal | {key for key, plan, where in group if piece_size(where) > SPAN and _is_at(plan, blob, where.start)}


def _is_at(plan: Plan, blob: Blob, position: int) -> bool:
    """Return whether the blob has the bytes of the plan at this position."""
    for part in chunks_of(plan, blob):
        for start in range(0, len(part), SPAN):
            wanted = bytes(part[start : start + SPAN])
            if blob.read([ByteRange(position, position + len(wanted))])[0] != wanted:
                return False
            position += len(wanted)
    return True
