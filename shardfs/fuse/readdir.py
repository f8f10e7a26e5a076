"""Requests about directories, and the pages of listings: a tree's `scan` as records for the kernel."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from shardfs.fuse import control, protocol
from shardfs.vfs.inodes import CREATED, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

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
        self._encoder, self._resized = encoder, resized
        self._streams: OrderedDict[tuple[int, int, bool], RecordStream | OnePage] = OrderedDict()

    def page(self, tree: Listable, number: int, offset: int, size: int, *, plus: bool) -> Page:
        """At most `size` bytes of records from position `offset`; `plus`: with attributes."""
        # `pop`: no other thread uses the stream meanwhile.
        stream = self._streams.pop((number, offset, plus), None)
        if stream is None:
            stream = _stream(self._encoder, tree, number, offset, size, plus=plus, resized=self._resized)
        page, counted, offset = stream.take(size)
        if page:
            self._streams[number, offset, plus] = stream
            if len(self._streams) > LISTINGS:
                with contextlib.suppress(KeyError):  # another thread may have removed the last one
                    self._streams.popitem(last=False)
        return page, counted


class OnePage:
    """The records of a small directory: one page, then nothing."""

    def __init__(self, page: bytes, end: int) -> None:
        self._page, self._end = page, end

    def take(self, size: int) -> tuple[bytes, list[int], int]:
        page, self._page = self._page, b""
        return page, [], self._end

    def seek(self, offset: int) -> bool:
        return False


class RecordStream:
    """The records of one directory, from one position on.

    Args:
        cache: given on a writable mount. When its stamp changes, the attributes in the batches may be outdated. From
            then on, entries are sent as names only. Otherwise the kernel would replace new sizes by old ones and would
            find names again that it has just removed.
        resized: given on a read-only mount; is told which attributes the kernel gets.
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
        self._encoder, self._plus = encoder, plus
        self._batches = (batch for batch in batches if len(batch.names))
        self._dots = encoder.dots(number, offset, plus=plus) if offset < DOTS else b""
        self._inodes_left = NODES_PER_LISTING if plus else 0
        # The records of the current batch, and for each record its node (0: name only), its end and its position.
        self._body, self._nodes = memoryview(b""), np.empty(0, np.uint64)
        self._ends, self._offsets = np.empty(0, np.int64), np.empty(0, np.uint64)
        self._records_sent, self._bytes_sent = 0, 0
        self._offset = max(offset, DOTS)
        self._has_counted_nodes = False
        self._resized = resized
        self._cache, self._first_stamp = cache, cache.stamp if cache is not None else 0

    def seek(self, offset: int) -> bool:
        """Move to a position behind one of the records of the current batch; False if it is none of these."""
        index = int(self._offsets.searchsorted(np.uint64(offset))) + 1
        if index > len(self._offsets) or int(self._offsets[index - 1]) != offset or not len(self._body):
            return False
        self._records_sent, self._bytes_sent = index, int(self._ends[index - 1])
        self._offset, self._dots = offset, b""
        return True

    def take(self, size: int) -> tuple[memoryview | bytes, list[int], int]:
        """The next records that fit into `size` bytes, the counted numbers among them, and the position behind them."""
        # The dots go with the first entries: a page of their own would cost small directories one more request.
        dots, self._dots = self._dots, b""
        if self._records_sent == len(self._ends) and not self._build():
            return dots, [], self._offset
        if self._cache is not None and self._first_stamp != self._cache.stamp:
            self._reduce_to_names()
        last = int(self._ends.searchsorted(self._bytes_sent + size - len(dots), "right"))
        end = int(self._ends[last - 1])
        nodes = self._nodes[self._records_sent : last]
        page, self._offset = self._body[self._bytes_sent : end], int(self._offsets[last - 1])
        self._records_sent, self._bytes_sent = last, end
        if last == len(self._ends) and self._cache is None:
            self._body = memoryview(b"")
        counted = nodes[(nodes != 0) & _are_counted(nodes)].tolist() if self._has_counted_nodes else []
        return dots + page if dots else page, counted, self._offset

    def _reduce_to_names(self) -> None:
        """Remove the nodes from the records of the current batch, so that the kernel ignores the attributes."""
        if self._plus and len(self._nodes):
            starts = np.concatenate((np.zeros(1, np.int64), self._ends[:-1]))
            np.frombuffer(self._body, np.uint64)[starts // 8] = 0
            self._nodes = np.zeros_like(self._nodes)

    def _build(self) -> bool:
        """Make the records of the next batch; False if there is none."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        self._nodes = batch.numbers
        if batch.by_name:
            self._inodes_left = 0
        if len(self._nodes) > self._inodes_left or batch.sizes.min() < 0:
            self._nodes = np.where(batch.sizes >= 0, batch.numbers, np.uint64(0))
            self._nodes[self._inodes_left :] = 0
        self._inodes_left = max(self._inodes_left - len(self._nodes), 0)
        self._has_counted_nodes = bool(_are_counted(self._nodes).any())
        self._offsets = batch.cookies + np.uint64(DOTS)
        self._body, self._ends = self._encoder.records(batch, self._nodes, self._offsets, plus=self._plus)
        self._records_sent = self._bytes_sent = 0
        if self._resized is not None and self._resized.numbers:
            self._resized.told(self._nodes.tolist())
        return True


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
        resized.told(child for _, child, *_ in entries)
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
        self._encoder, self._tree, self._number, self._cache = encoder, tree, number, cache
        self._stream: RecordStream | OnePage = OnePage(b"", -1)
        self._offset = -1

    def page(self, offset: int, size: int, *, plus: bool) -> Page:
        """At most `size` bytes of records from position `offset`; `plus`: with attributes."""
        if offset != self._offset and not (offset and self._stream.seek(offset)):
            self._stream = _stream(self._encoder, self._tree, self._number, offset, size, plus=plus, cache=self._cache)
        page, counted, self._offset = self._stream.take(size)
        return page, counted


class DirRequests:
    """READDIR, READDIRPLUS and OPENDIR on a read-only mount, for one thread. Directories have no handles."""

    def __init__(self, tree: FileTree, files: control.Control, listings: Listings, device: Device) -> None:
        self._tree, self._files, self._listings, self._device = tree, files, listings, device

    def handlers(self) -> dict[int, Handler]:
        return {
            protocol.READDIR: lambda unique, number, _size: self._list(unique, number, plus=False),
            protocol.READDIRPLUS: lambda unique, number, _size: self._list(unique, number, plus=True),
            protocol.OPENDIR: self._open,
        }

    def _open(self, unique: int, _number: int, _size: int) -> None:
        # No FOPEN_CACHE_DIR among the flags: the kernel does not cache the listing.
        self._device.send(protocol.opened(unique, 0))

    def _list(self, unique: int, number: int, *, plus: bool) -> None:
        offset, size = protocol.READ_IN.unpack_from(self._device.request, protocol.BODY)
        source = self._tree if number < control.DIRECTORY else self._files
        page, counted = self._listings.page(source, number, offset, size, plus=plus)
        _send_page(self._tree, self._device, unique, page, counted)


class WritableDirRequests:
    """Requests about directories on a writable mount, for one thread. Each open directory has a handle.

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
        self._tree, self._files, self._cache, self._device = tree, files, cache, device
        self._directories, self._handles = directories, handles

    def handlers(self) -> dict[int, Handler]:
        return {
            protocol.OPENDIR: self._open,
            protocol.READDIR: lambda unique, _number, _size: self._list(unique, plus=False),
            protocol.READDIRPLUS: lambda unique, _number, _size: self._list(unique, plus=True),
            protocol.RELEASEDIR: self._release,
        }

    def _open(self, unique: int, number: int, _size: int) -> None:
        source = self._tree if number < control.DIRECTORY else self._files
        handle = next(self._handles)
        self._directories[handle] = OpenDirectory(self._device.encoder, source, number, self._cache)
        if not self._device.send(protocol.opened(unique, 0, handle)):
            del self._directories[handle]

    def _list(self, unique: int, *, plus: bool) -> None:
        handle, offset, size = protocol.READDIR_IN.unpack_from(self._device.request, protocol.BODY)
        page, counted = self._directories[handle].page(offset, size, plus=plus)
        _send_page(self._tree, self._device, unique, page, counted)

    def _release(self, unique: int, _number: int, _size: int) -> None:
        (handle,) = protocol.HANDLE_IN.unpack_from(self._device.request, protocol.BODY)
        self._directories.pop(handle, None)
        self._device.send(protocol.error(unique, 0))


def _send_page(tree: FileTree, device: Device, unique: int, page: memoryview | bytes, counted: list[int]) -> None:
    """Reply with a page of a listing, after which the kernel refers to the numbers `counted`."""
    for number in counted:
        tree.remember(number)
    if not device.send_data(unique, page):
        for number in counted:
            tree.forget(number, 1)
