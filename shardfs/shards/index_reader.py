"""Reads the index of a shard: the one place that turns the requests of a `ShardFormat` into decoded pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.blobs import ByteRange, absolute
from shardfs.model.byte_ranges import cover
from shardfs.model.shard_format import IndexPart, ShardIndex, StoredIndex, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.model.blobs import Blob, ByteRequest
    from shardfs.model.shard_format import Index, Leads, ShardFormat
    from shardfs.model.values import U64

MAX_OBJECT = 1 << 50
"""Assumed maximum size of a remote object, because the actual size would cost a request."""

PAGES = 256
"""Number of pages that are read at once."""


def read_root(format: ShardFormat, blob: Blob) -> bytes | None:
    """Return the root, fewer bytes if the shard is shorter, with one request; None if this format has no root.

    Raise FileNotFoundError if the shard is absent, and another OSError if the store fails.
    """
    where = format.root_request()
    return None if where is None else blob.read([where])[0]


def read_page(
    format: ShardFormat, shard: int, page: int, root: bytes | None, blob: Blob, size: int = MAX_OBJECT
) -> Index | None:
    """Return one page; None if it is empty. Raise ValueError, with the reason, if it is damaged, and OSError."""
    for _, _, index in read_pages(format, shard, [page], root, blob, size):
        if isinstance(index, ValueError):
            raise index
        return index
    return None


def read_pages(
    format: ShardFormat, shard: int, pages: Sequence[int], root: bytes | None, blob: Blob, size: int = MAX_OBJECT
) -> Iterator[tuple[int, ByteRequest | None, Index | ValueError]]:
    """Yield the nonempty ones of these pages: number, request, and decoded page.

    A page that cannot be read has a ValueError with the reason instead, and no request if its range is impossible.

    Args:
        root: the root of the shard, if the format has one.
        size: the size of the object.
    """
    if format.walk is not None:
        for page in pages:
            yield page, None, _walked(format.walk, blob)
        return
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
        read = blob.read([request for _, request in wanted]) if wanted else []
        for (page, request), raw in zip(wanted, read, strict=True):
            try:
                if isinstance(request, ByteRange) and len(raw) != request.stop - request.start:
                    where = f"[{request.start}, {request.stop})"
                    raise ValueError(f"{_name(page, root)} at {where} is cut off after {len(raw)} bytes")
                yield page, request, format.decode_page(shard, page, raw)
            except ValueError as e:
                yield page, request, e


def _walked(walk: Callable[[Blob], ShardIndex], blob: Blob) -> ShardIndex | ValueError:
    try:
        return walk(blob)
    except ValueError as e:
        return e


def _name(page: int, root: bytes | None) -> str:
    return "its index" if root is None else f"the index of minishard {page}"


def why_broken(format: ShardFormat, shard: int, page: int, index: ShardIndex, i: int) -> str:
    """Return why the entry at position `i`, which is broken, has no chunk."""
    coords, _ = format.coords(shard, page, index.all_slots()[i : i + 1])
    return f"chunk {tuple(coords[0].tolist())}: {index.reason(i)}"


def require_sound(format: ShardFormat, shard: int, page: int, index: ShardIndex) -> None:
    """Raise ValueError, with the reason, if an entry is broken."""
    for i in index.broken[:1].tolist():
        raise ValueError(why_broken(format, shard, page, index, i))


class ShardIndexReader(StoredIndex):
    """A `StoredIndex` that keeps what it has read and decoded.

    Args:
        keep: False for one pass over a shard of any size.
    """

    def __init__(self, format: ShardFormat, shard: int, blob: Blob, *, keep: bool = True) -> None:
        self.blob = blob
        self.size = blob.stat().size
        self._format = format
        self._shard = shard
        self._keeps = keep
        self._root: bytes | None = None
        self._parts: dict[int, IndexPart] = {}

    def root(self) -> bytes | None:
        if self._root is None:
            self._root = read_root(self._format, self.blob)
        return self._root

    def parts(self, pages: Sequence[int] | None = None) -> Iterator[IndexPart]:
        root = self.root()
        if pages is None:
            pages = self._format.nonempty_pages(root).tolist()
        unread = [page for page in pages if page not in self._parts]
        yield from [self._parts[page] for page in pages if page in self._parts]
        for page, request, index in read_pages(self._format, self._shard, unread, root, self.blob, self.size):
            where = None if request is None else absolute(request, self.size)
            entries = index if isinstance(index, ValueError) else index.checked(self.size).arrays()
            part = IndexPart(page, where, entries)
            if self._keeps:
                self._parts[page] = part
            yield part

    def page(self, number: int) -> ShardIndex:
        for part in self.parts([number]):
            if isinstance(part.entries, ValueError):
                raise part.entries
            return part.entries
        return ShardIndex.empty()

    def usage(self, leads: Leads | None) -> Usage:
        root = self._format.root_request()
        index_ranges = [] if root is None else [root]
        chunks: list[tuple[U64, U64]] = [ShardIndex.empty().valid_ranges()]
        for part in self.parts():
            if not isinstance(part.entries, ValueError):
                index_ranges += [part.where] if part.where is not None else []
                chunks.append(part.entries.valid_ranges())
            elif root is None:
                raise part.entries
        starts, sizes = (np.concatenate(column) for column in zip(*chunks, strict=True))
        before = np.zeros_like(starts) if leads is None else leads(starts, sizes)
        live, indices = cover(starts - before, starts + sizes), cover(*np.array(index_ranges, np.uint64).T)
        needed = cover(np.append(live.starts, indices.starts), np.append(live.stops, indices.stops)).nbytes
        return Usage(self.size, indices.nbytes, live.nbytes, self.size - needed)
