"""Reads the index of a shard: the one place that turns the requests of a `ShardFormat` into decoded pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardfs.model.blobs import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.model.blobs import Blob, ByteRequest
    from shardfs.model.shard_format import Index, ShardFormat

T = TypeVar("T")

MAX_OBJECT = 1 << 50
"""Assumed maximum size of a remote object, because the actual size would cost a request."""

PAGES = 256
"""Number of pages that are read at once."""


def read_root(format: ShardFormat, blob: Blob, block: int) -> bytes | None:
    """Return a block of the root with one request; None if this format has no root."""
    where = format.root_request(block)
    return None if where is None else blob.read([where])[0]


def read_page(
    format: ShardFormat, shard: int, page: int, root: bytes | None, blob: Blob, size: int = MAX_OBJECT
) -> Index | None:
    """Return one page; None if it is empty. Raise ValueError, with the reason, if it cannot be read."""
    if format.walk is not None:
        return format.walk(blob)
    decode = partial(format.decode_page, shard)
    for _, _, found in read_pages(format, shard, [page], root, blob, decode, size):
        if isinstance(found, ValueError):
            raise found
        return found
    return None


def read_pages(
    format: ShardFormat,
    shard: int,
    pages: Sequence[int],
    root: bytes | None,
    blob: Blob,
    decode: Callable[[int, bytes], T],
    size: int = MAX_OBJECT,
) -> Iterator[tuple[int, ByteRequest | None, T | ValueError]]:
    """Yield the nonempty ones of these pages: number, request, and what `decode` makes of the page and its bytes.

    A page that cannot be read has a ValueError with the reason instead, and no request if its range is impossible.

    Args:
        root: the block of the root to which all these pages belong.
        size: the size of the object.
    """
    for i in range(0, len(pages), PAGES):
        wanted: list[tuple[int, ByteRequest]] = []
        for page in pages[i : i + PAGES]:
            try:
                request = format.page_request(shard, page, root)
                if isinstance(request, ByteRange) and request.stop > size:
                    where = f"[{request.start}, {request.stop})"
                    raise ValueError(f"{_name(page, root)} should be at {where}, but the object has {size} bytes")
            except ValueError as e:
                yield page, None, e
            else:
                if request is not None:
                    wanted.append((page, request))
        found = blob.read([request for _, request in wanted]) if wanted else []
        for (page, request), raw in zip(wanted, found, strict=True):
            try:
                if isinstance(request, ByteRange) and len(raw) != request.stop - request.start:
                    where = f"[{request.start}, {request.stop})"
                    raise ValueError(f"{_name(page, root)} at {where} is cut off after {len(raw)} bytes")
                yield page, request, decode(page, raw)
            except ValueError as e:
                yield page, request, e


def _name(page: int, root: bytes | None) -> str:
    return "its index" if root is None else f"the index of minishard {page}"
