"""Directories as records for the kernel: pages of what a tree's `scan` gives."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardfs.fuse import lowlevel
from shardfs.inodes import CREATED, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.model import U64, Batch, Bool, Entry


class Listed(Protocol):
    """What is needed of a tree to list its directories; see `Tree`."""

    def few(self, number: int, most: int) -> list[Entry] | None: ...

    def scan(self, number: int) -> Iterator[Batch]: ...


class ListedFrom(Listed, Protocol):
    """The same of one that does not change, so that a listing can go on at any position."""

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]: ...


LISTINGS = 32  # directories being listed at the same time, before some must start over at their position

NODES_PER_LISTING = 1 << 18
"""Entries of one directory that the kernel is given inodes for while it lists. It keeps about 1 KiB for each until it
is short of memory; behind that many only names are sent, five times as fast, and a `stat` of one costs a request."""

DOTS = 2
"""Positions in a directory are cookies of the tree plus this: before its entries come `.` and `..`."""


class Listings:
    """Directories being listed: what was built of them but not sent yet, by node and position.

    There are no directory handles, as OPENDIR is not answered. A listing that is not found here goes on with a new
    scan from its position.
    """

    def __init__(self, encoder: lowlevel.Encoder) -> None:
        self._encoder = encoder
        self._streams: OrderedDict[tuple[int, int, bool], Stream | End] = OrderedDict()

    def page(
        self, tree: ListedFrom, number: int, offset: int, size: int, *, plus: bool
    ) -> tuple[memoryview | bytes, list[int]]:
        """At most `size` bytes of records from position `offset`, and which counted nodes they tell the kernel of."""
        # Taking the stream out makes this thread its only user.
        stream = self._streams.pop((number, offset, plus), None)
        if stream is None:
            few = tree.few(number, size // lowlevel.SHORT_RECORD - DOTS) if plus and not offset else None
            if few is not None:
                end = few[-1][-1] + DOTS if few else DOTS
                self._keep(number, end, plus, End(end))
                return self._encoder.few(number, few), []
            batches = tree.scan(number, max(offset - DOTS, 0))
            stream = Stream(self._encoder, batches, number, offset, plus=plus)
        page, remembered, offset = stream.take(size)
        if page:
            self._keep(number, offset, plus, stream)
        return page, remembered

    def _keep(self, number: int, offset: int, plus: bool, stream: Stream | End) -> None:
        self._streams[number, offset, plus] = stream
        if len(self._streams) > LISTINGS:
            with contextlib.suppress(KeyError):  # two threads may be here
                self._streams.popitem(last=False)


class End:
    """What is left of a directory that was sent as a whole."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def take(self, size: int) -> tuple[bytes, list[int], int]:
        return b"", [], self._offset

    def seek(self, offset: int) -> bool:
        return False


class Stream:
    """One directory, as records, from one position on.

    `stamp` changes whenever what was said of a file may not be true any more. A scan that began before that is sent as
    names alone from then on: else the kernel would take old sizes for new, and find names again that it has just
    removed.
    """

    def __init__(
        self,
        encoder: lowlevel.Encoder,
        batches: Iterable[Batch],
        number: int,
        offset: int,
        *,
        plus: bool,
        stamp: Callable[[], int] | None = None,
    ) -> None:
        self._encoder, self._plus = encoder, plus
        self._batches = (batch for batch in batches if len(batch.names))
        self._dots = encoder.dots(number, offset, plus=plus) if offset < DOTS else b""
        self._room = NODES_PER_LISTING if plus else 0
        self._body, self._nodes = memoryview(b""), np.empty(0, np.uint64)
        self._ends, self._offsets = np.empty(0, np.int64), np.empty(0, np.uint64)
        self._at, self._sent = 0, 0  # records and bytes of this body that were sent
        self._offset = max(offset, DOTS)
        self._has_counted_nodes = False
        self._stamp, self._began = stamp, stamp() if stamp is not None else 0

    def seek(self, offset: int) -> bool:
        """Go back, or ahead, to a position behind one of the records at hand; False if it is none of these."""
        at = int(self._offsets.searchsorted(np.uint64(offset))) + 1
        if at > len(self._offsets) or int(self._offsets[at - 1]) != offset or not len(self._body):
            return False
        self._at, self._sent, self._offset, self._dots = at, int(self._ends[at - 1]), offset, b""
        return True

    def take(self, size: int) -> tuple[memoryview | bytes, list[int], int]:
        """The next records that fit into `size` bytes, the counted nodes among them, and the position behind them."""
        # With the first entries, or each small directory would cost a request more.
        dots, self._dots = self._dots, b""
        if self._at == len(self._ends) and not self._build():
            return dots, [], self._offset
        if self._stamp is not None and self._began != self._stamp():
            self._strip()
        last = int(self._ends.searchsorted(self._sent + size - len(dots), "right"))
        end = int(self._ends[last - 1])
        nodes = self._nodes[self._at : last]
        page, self._offset = self._body[self._sent : end], int(self._offsets[last - 1])
        self._at, self._sent = last, end
        if last == len(self._ends) and self._stamp is None:
            self._body = memoryview(b"")
        remembered = nodes[(nodes != 0) & _are_counted(nodes)].tolist() if self._has_counted_nodes else []
        return dots + page if dots else page, remembered, self._offset

    def _strip(self) -> None:
        """Leave the names alone of what was scanned before something changed."""
        if self._plus and len(self._nodes):
            starts = np.concatenate((np.zeros(1, np.int64), self._ends[:-1]))
            np.frombuffer(self._body, np.uint64)[starts // 8] = 0
            self._nodes = np.zeros_like(self._nodes)

    def _build(self) -> bool:
        batch = next(self._batches, None)
        if batch is None:
            return False
        self._nodes = batch.numbers
        if batch.by_name:
            self._room = 0
        if len(self._nodes) > self._room or batch.sizes.min() < 0:
            self._nodes = np.where(batch.sizes >= 0, batch.numbers, np.uint64(0))
            self._nodes[self._room :] = 0
        self._room = max(self._room - len(self._nodes), 0)
        self._has_counted_nodes = bool(_are_counted(self._nodes).any())
        self._offsets = batch.cookies + np.uint64(DOTS)
        self._body, self._ends = self._encoder.records(batch, self._nodes, self._offsets, plus=self._plus)
        self._at = self._sent = 0
        return True


def _are_counted(nodes: U64) -> Bool:
    return (nodes < np.uint64(TABLE_END)) | (nodes >= np.uint64(CREATED))


class Opened:
    """A directory that a program has open: one scan, which goes on from request to request.

    What the scan gives is settled when the first entry is read, or read again after `rewinddir`. A position that is not
    the next one is looked for in what was sent last, as the kernel drops what did not fit into a program's buffer, and
    else in a new scan.
    """

    def __init__(self, encoder: lowlevel.Encoder, tree: Listed, number: int, stamp: Callable[[], int]) -> None:
        self._encoder, self._tree, self._number, self._stamp = encoder, tree, number, stamp
        self._stream: Stream | End = End(-1)
        self._offset = -1

    def page(self, offset: int, size: int, *, plus: bool) -> tuple[memoryview | bytes, list[int]]:
        """As `Listings.page`."""
        if offset != self._offset and not (offset and self._stream.seek(offset)):
            few = self._tree.few(self._number, size // lowlevel.SHORT_RECORD - DOTS) if plus and not offset else None
            if few is not None:
                self._offset = few[-1][-1] + DOTS if few else DOTS
                self._stream = End(self._offset)
                return self._encoder.few(self._number, few), []
            batches = _behind(self._tree.scan(self._number), offset - DOTS)
            self._stream = Stream(self._encoder, batches, self._number, offset, plus=plus, stamp=self._stamp)
        page, remembered, self._offset = self._stream.take(size)
        return page, remembered


def _behind(batches: Iterable[Batch], cookie: int) -> Iterator[Batch]:
    """What comes behind a position."""
    for batch in batches:
        if not len(batch.names) or int(batch.cookies[-1]) <= cookie:
            continue
        yield batch.only(slice(int(batch.cookies.searchsorted(np.uint64(max(cookie, 0)), "right")), None))


class OpenDirectories:
    """Directories that programs have open, by handle."""

    def __init__(self, encoder: lowlevel.Encoder, stamp: Callable[[], int]) -> None:
        self._encoder, self._stamp = encoder, stamp
        self._opened: dict[int, Opened] = {}
        self._handles = itertools.count(1)

    def open(self, tree: Listed, number: int) -> int:
        """A handle."""
        handle = next(self._handles)
        self._opened[handle] = Opened(self._encoder, tree, number, self._stamp)
        return handle

    def release(self, handle: int) -> None:
        """The handle is not used any more."""
        self._opened.pop(handle, None)

    def page(self, handle: int, offset: int, size: int, *, plus: bool) -> tuple[memoryview | bytes, list[int]]:
        """As `Listings.page`."""
        return self._opened[handle].page(offset, size, plus=plus)
