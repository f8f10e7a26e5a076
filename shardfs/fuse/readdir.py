"""Requests about directories, and the pages of listings: a tree's `scan` as records for the kernel."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from shardfs.fuse import control, protocol
from shardfs.fuse.device import Requests
from shardfs.vfs.inodes import CREATED, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    import numpy.typing as npt

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.invalidation import AttributeCache, ResizedFiles
    from shardfs.model.file_tree import FileTree, Listable
    from shardfs.model.listing import Batch
    from shardfs.model.values import U64, Bool

    Page: TypeAlias = tuple[memoryview | bytes, list[int]]
    """Records, and the numbers among them that the kernel refers to from now on and that the tree must count."""

LISTINGS = 32
"""At most so many listings can be continued at once. Others are scanned again from their position."""

NODES_PER_LISTING = 1 << 18
"""The kernel gets inodes for at most so many entries of one directory. It keeps about 1 KiB for each until memory is
short. The entries behind them are sent as names only, which is five times as fast, but a `stat` costs a request."""

DOTS = 2
"""A position in a directory is a cookie of the tree plus this number, since `.` and `..` precede the entries."""


class Listings:
    """Listings of directories that have no handles, since OPENDIR is not answered. Thread-safe.

    Records that were built and not sent yet are kept by directory and position. If a position is not found, the
    directory is scanned again from there.
    """

    def __init__(self, encoder: protocol.Encoder, resized: ResizedFiles) -> None:
        self._encoder = encoder
        self._resized = resized
        # By directory, position, and whether with attributes
        self._streams: OrderedDict[tuple[int, int, bool], RecordStream | OnePage] = OrderedDict()

    def listing_page(self, tree: Listable, number: int, offset: int, size: int, *, plus: bool) -> Page:
        """The next records from position `offset`, of at most `size` bytes; none at the end. `plus`: with attributes.

        Raise the errors of `Listable.scan`.
        """
        # `pop`: no other thread uses the stream meanwhile.
        stream = self._streams.pop((number, offset, plus), None)
        if stream is None:
            stream = _stream(self._encoder, tree, number, offset, size, plus=plus, resized=self._resized)
        page, counted, offset = stream.next_page(size)
        if page:
            self._streams[number, offset, plus] = stream
            if len(self._streams) > LISTINGS:
                with contextlib.suppress(KeyError):  # another thread may have removed the last one
                    self._streams.popitem(last=False)
        return page, counted


class OnePage:
    """The records of a small directory: one page, then nothing. `end` is the position behind them."""

    def __init__(self, page: bytes, end: int) -> None:
        self._page = page
        self._end = end

    def next_page(self, size: int) -> tuple[bytes, list[int], int]:
        """All records, whatever `size` is, at the first call; then none. See `RecordStream.next_page`."""
        page, self._page = self._page, b""
        return page, [], self._end

    def seek(self, offset: int) -> bool:
        """Always False: the directory is listed again."""
        return False


class Records:
    """The encoded records of one batch. Boundary n is the place behind the first n records.

    Args:
        body: all records, one after the other.
        nodes: for each record, the inode number that the kernel keeps with the attributes; 0 if it gets only the name.
        bounds: for each boundary, the number of bytes of `body` before it.
        positions: for each boundary, the position in the directory from which a client continues there.
    """

    def __init__(self, body: memoryview, nodes: U64, bounds: npt.NDArray[np.int64], positions: U64) -> None:
        self._body = body
        self._nodes = nodes
        self._bounds = bounds
        self._positions = positions
        self._has_counted = bool(_are_counted(nodes).any())
        self.end = len(nodes)
        """The last boundary."""

    def boundary_at(self, position: int) -> int | None:
        """The boundary with this position in the directory; None if there is none."""
        boundary = int(self._positions.searchsorted(np.uint64(position)))
        return boundary if boundary <= self.end and self.position(boundary) == position else None

    def boundary_within(self, start: int, size: int) -> int:
        """The last boundary for which the records from boundary `start` on have at most `size` bytes."""
        ends = self._bounds[1:]
        return int(ends.searchsorted(int(self._bounds[start]) + size, "right"))

    def position(self, boundary: int) -> int:
        """The position of a boundary in the directory."""
        return int(self._positions[boundary])

    def bytes_between(self, start: int, stop: int) -> memoryview:
        """The records between two boundaries, not copied."""
        return self._body[int(self._bounds[start]) : int(self._bounds[stop])]

    def counted_between(self, start: int, stop: int) -> list[int]:
        """The numbers in the records between two boundaries whose references the tree must count."""
        nodes = self._nodes[start:stop]
        return nodes[(nodes != 0) & _are_counted(nodes)].tolist() if self._has_counted else []

    def reduce_to_names(self) -> None:
        """Remove the nodes from the records, so that the kernel ignores the attributes."""
        np.frombuffer(self._body, np.uint64)[self._bounds[:-1] // 8] = 0
        self._nodes = np.zeros_like(self._nodes)


class RecordStream:
    """The records of one directory, from one position on.

    Args:
        cache: given on a writable mount. When its stamp changes, the attributes in the batches may be outdated. From
            then on, entries are sent as names only. Otherwise the kernel would replace new sizes by old ones and would
            find names again that it has just removed.
        batches: what `scan` of the directory gives from this position on.
        number: the number of the directory, for the records of `.` and `..`.
        offset: the position: a cookie plus `DOTS`, or less at the dots.
        plus: with attributes, for READDIRPLUS.
        resized: given on a read-only mount. Files whose attributes the kernel gets are removed from it.
    """

    def __init__(
        self,
        encoder: protocol.Encoder,
        batches: Iterable[Batch],
        number: int,
        offset: int,
        *,
        plus: bool,
        cache: AttributeCache | None = None,
        resized: ResizedFiles | None = None,
    ) -> None:
        self._encoder = encoder
        self._plus = plus
        self._batches = (batch for batch in batches if len(batch.names))
        self._dots = encoder.dots(number, offset, plus=plus) if offset < DOTS else b""
        self._inodes_left = NODES_PER_LISTING if plus else 0
        self._records: Records | None = None  # of the current batch
        self._boundary = 0  # behind the records of it that were sent
        self._offset = max(offset, DOTS)
        self._resized = resized
        self._cache = cache
        self._first_stamp = cache.stamp if cache is not None else 0

    def seek(self, offset: int) -> bool:
        """Move to a position in the current batch; False if the batch does not have it."""
        boundary = self._records.boundary_at(offset) if self._records is not None else None
        if boundary is None:
            return False
        self._boundary = boundary
        self._offset = offset
        self._dots = b""
        return True

    def next_page(self, size: int) -> tuple[memoryview | bytes, list[int], int]:
        """The next records that fit into `size` bytes, the numbers among them to be counted, and the position behind.

        All records of a page are from one batch. A page without records is the end.
        """
        # The dots go with the first entries: a page of their own would cost small directories one more request.
        dots, self._dots = self._dots, b""
        if self._records is None or self._boundary == self._records.end:
            records = self._next_records()
            if records is None:
                return dots, [], self._offset
            self._records = records
            self._boundary = 0
        records = self._records
        if self._plus and self._cache is not None and self._first_stamp != self._cache.stamp:
            records.reduce_to_names()
        start = self._boundary
        stop = records.boundary_within(start, size - len(dots))
        page = records.bytes_between(start, stop)
        self._boundary = stop
        self._offset = records.position(stop)
        if stop == records.end and self._cache is None:
            self._records = None  # frees the memory. With a cache, a client may still go back.
        return dots + page if dots else page, records.counted_between(start, stop), self._offset

    def _next_records(self) -> Records | None:
        """The records of the next batch; None if there is none."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        nodes = batch.numbers
        if batch.by_name:
            self._inodes_left = 0
        if len(nodes) > self._inodes_left or batch.sizes.min() < 0:
            nodes = np.where(batch.sizes >= 0, batch.numbers, np.uint64(0))
            nodes[self._inodes_left :] = 0
        self._inodes_left = max(self._inodes_left - len(nodes), 0)
        positions = np.concatenate((np.array([self._offset], np.uint64), batch.cookies + np.uint64(DOTS)))
        body, bounds = self._encoder.records(batch, nodes, positions[1:], plus=self._plus)
        if self._resized is not None and self._resized.numbers:
            self._resized.remove(nodes.tolist())
        return Records(body, nodes, bounds, positions)


def _stream(
    encoder: protocol.Encoder,
    tree: Listable,
    number: int,
    offset: int,
    size: int,
    *,
    plus: bool,
    cache: AttributeCache | None = None,
    resized: ResizedFiles | None = None,
) -> RecordStream | OnePage:
    """The records of a directory from position `offset`, of which the first page may have `size` bytes."""
    entries = tree.small_listing(number, size // protocol.SHORT_RECORD - DOTS) if plus and not offset else None
    if entries is None:
        batches = tree.scan(number, max(offset - DOTS, 0))
        return RecordStream(encoder, batches, number, offset, plus=plus, cache=cache, resized=resized)
    if resized is not None and resized.numbers:
        resized.remove(child for _, child, *_ in entries)
    return OnePage(encoder.few_entries(number, entries), entries[-1][-1] + DOTS if entries else DOTS)


def _are_counted(nodes: U64) -> Bool:
    return (nodes < np.uint64(TABLE_END)) | (nodes >= np.uint64(CREATED))


class OpenDirectory:
    """A directory that a client has open: one scan, which continues from request to request.

    The entries are those at the time when the first entry is read, or read again after `rewinddir`. The kernel drops
    records that do not fit into a client's buffer, so a request may go back. Such a position is looked for in the
    current batch; if it is not there, the directory is scanned again.
    """

    def __init__(self, encoder: protocol.Encoder, tree: Listable, number: int, cache: AttributeCache) -> None:
        self._encoder = encoder
        self._tree = tree
        self._number = number
        self._cache = cache
        self._stream: RecordStream | OnePage = OnePage(b"", -1)
        self._offset = -1

    def listing_page(self, offset: int, size: int, *, plus: bool) -> Page:
        """The next records from position `offset`, of at most `size` bytes; none at the end. `plus`: with attributes.

        Raise the errors of `Listable.scan`.
        """
        if offset != self._offset and not (offset and self._stream.seek(offset)):
            self._stream = _stream(self._encoder, self._tree, self._number, offset, size, plus=plus, cache=self._cache)
        page, counted, self._offset = self._stream.next_page(size)
        return page, counted


class DirRequests(Requests):
    """Answers READDIR, READDIRPLUS and OPENDIR on a read-only mount, for one thread. Directories have no handles."""

    def __init__(self, tree: FileTree, files: control.Control, listings: Listings, device: Device) -> None:
        self._tree = tree
        self._files = files
        self._listings = listings
        self._device = device

    def handlers(self) -> dict[int, Handler]:
        return {
            protocol.READDIR: lambda unique, number, _size: self._list(unique, number, plus=False),
            protocol.READDIRPLUS: lambda unique, number, _size: self._list(unique, number, plus=True),
            protocol.OPENDIR: self._opendir,
        }

    def _opendir(self, unique: int, _number: int, _size: int) -> None:
        # No FOPEN_CACHE_DIR among the flags: the kernel does not cache the listing.
        self._device.send(protocol.open_reply(unique, 0))

    def _list(self, unique: int, number: int, *, plus: bool) -> None:
        offset, size = protocol.READ_IN.unpack_from(self._device.request, protocol.BODY)
        source = self._tree if number < control.DIRECTORY else self._files
        page, counted = self._listings.listing_page(source, number, offset, size, plus=plus)
        _send_page(self._tree, self._device, unique, page, counted)


class WritableDirRequests(Requests):
    """Answers requests about directories on a writable mount, for one thread. Each open directory has a handle.

    All threads share `directories`, which has the open directories by handle, and `handles`, which gives new handles.
    """

    def __init__(
        self,
        tree: FileTree,
        files: control.Control,
        cache: AttributeCache,
        directories: dict[int, OpenDirectory],
        handles: Iterator[int],
        device: Device,
    ) -> None:
        self._tree = tree
        self._files = files
        self._cache = cache
        self._device = device
        self._directories = directories
        self._handles = handles

    def handlers(self) -> dict[int, Handler]:
        return {
            protocol.OPENDIR: self._opendir,
            protocol.READDIR: lambda unique, _number, _size: self._list(unique, plus=False),
            protocol.READDIRPLUS: lambda unique, _number, _size: self._list(unique, plus=True),
            protocol.RELEASEDIR: self._release,
        }

    def _opendir(self, unique: int, number: int, _size: int) -> None:
        source = self._tree if number < control.DIRECTORY else self._files
        handle = next(self._handles)
        self._directories[handle] = OpenDirectory(self._device.encoder, source, number, self._cache)
        if not self._device.send(protocol.open_reply(unique, 0, handle)):
            del self._directories[handle]

    def _list(self, unique: int, *, plus: bool) -> None:
        handle, offset, size = protocol.READDIR_IN.unpack_from(self._device.request, protocol.BODY)
        page, counted = self._directories[handle].listing_page(offset, size, plus=plus)
        _send_page(self._tree, self._device, unique, page, counted)

    def _release(self, unique: int, _number: int, _size: int) -> None:
        (handle,) = protocol.HANDLE_IN.unpack_from(self._device.request, protocol.BODY)
        self._directories.pop(handle, None)
        self._device.send(protocol.error_reply(unique, 0))


def _send_page(tree: FileTree, device: Device, unique: int, page: memoryview | bytes, counted: list[int]) -> None:
    """Reply with a page of a listing, after which the kernel refers to the numbers `counted`."""
    for number in counted:
        tree.remember(number)
    if not device.send_data(unique, page):
        for number in counted:
            tree.forget(number, 1)
