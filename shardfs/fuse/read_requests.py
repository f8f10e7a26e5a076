"""Requests for the content of files: READ, and OPEN on a read-only mount with `direct_io`."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from shardfs.fuse import control, protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.invalidation import ResizedFiles
    from shardfs.model.attributes import Attributes, Extent
    from shardfs.model.file_tree import FileTree

DIRECT_IO_OVER = 128 << 10
"""With `direct_io`, files over this size bypass the page cache. Up to the kernel's readahead, which this is, one READ
fills the page cache, and later reads profit."""

_PAGE = 4096


class ReadRequests:
    """Answers READ and OPEN, for one thread.

    Args:
        recent: attributes by number, shared by all threads. READ removes those that turn out to be outdated.
        attributes: gives the attributes of a number that is not in `recent`.
        waiting: called right before a request waits for a disk.
    """

    def __init__(
        self,
        tree: FileTree,
        files: control.Control,
        recent: dict[int, Attributes],
        attributes: Callable[[int], Attributes],
        resized: ResizedFiles,
        device: Device,
        waiting: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._files = files
        self._recent = recent
        self._resized = resized
        self._get_attributes = attributes
        self._device = device
        self._tally = device.tally
        self._waiting = waiting
        # A reply's header is right before its data, so that one write sends both. The data begins on a page.
        self._outbox = memoryview(mmap.mmap(-1, _PAGE + protocol.MAX_TRANSFER))

    def handler(self) -> Handler:
        """The handler of READ. A closure: attribute look-ups would cost as much as some of its work."""
        request = self._device.request
        outbox = self._outbox
        send = self._device.send
        recent = self._recent
        attributes = self._attributes_now
        arguments = protocol.READ_IN.unpack_from
        header = protocol.HEADER_OUT.pack_into
        begin = protocol.BODY
        head = _PAGE - protocol.HEADER_SIZE
        tally = self._tally
        preadv = os.preadv
        nowait = os.RWF_NOWAIT

        def answer(unique: int, number: int, _size: int) -> None:
            offset, size = arguments(request, begin)
            _, _, length, _, extent, _ = recent.get(number) or attributes(number)
            if extent is None:
                self._send_bytes(unique, number, offset, size)
                return
            blob, start = extent
            if size > length - offset:
                size = max(length - offset, 0)
            data = outbox[_PAGE : _PAGE + size]
            try:
                got = preadv(blob.fd, (data,), blob.file_offset + start + offset, nowait)
            except OSError:  # not in the page cache, or the file system does not support RWF_NOWAIT
                got = -1
            if got == size or self._read_slowly(extent, data, offset):
                header(outbox, head, size + _PAGE - head, 0, unique)
                tally.nbytes += size  # before sending: a client that has the data may ask for the count at once
                send(outbox[head : _PAGE + size])
            else:
                recent.pop(number, None)
                self._send_bytes(unique, number, offset, size)

        return answer if self._tree.note_read is None else self._noted(answer, self._tree.note_read)

    def _noted(self, answer: Handler, note: Callable[[int], None]) -> Handler:
        """Return the handler of READ for a slow local source, whose chunks are read ahead."""
        request = self._device.request

        def noted(unique: int, number: int, size: int) -> None:
            if number < control.DIRECTORY and not protocol.READ_IN.unpack_from(request, protocol.BODY)[0]:
                note(number)
            answer(unique, number, size)

        return noted

    def _send_bytes(self, unique: int, number: int, offset: int, size: int) -> None:
        """Reply with bytes from the tree: the file is not simply a part of a local file."""
        source = self._tree if number < control.DIRECTORY else self._files
        data = source.read(number, offset, size)
        self._resized.require_known(number)
        self._tally.nbytes += len(data)
        self._device.send_data(unique, data)

    def _attributes_now(self, number: int) -> Attributes:
        attributes = self._get_attributes(number)
        self._resized.require_known(number)
        return attributes

    def _read_slowly(self, extent: Extent, data: memoryview, offset: int) -> bool:
        """Read from a disk or a file server while another thread leads; False if the file is shorter by now."""
        self._waiting()
        return os.preadv(extent.blob.fd, (data,), extent.blob.file_offset + extent.start + offset) == len(data)

    def open(self, unique: int, number: int, _size: int) -> None:
        """The handler of OPEN: large files bypass the page cache. Raises the errors of `FileTree.attributes`."""
        attributes = self._recent.get(number) or self._get_attributes(number)
        direct = attributes.size > DIRECT_IO_OVER
        self._device.send(protocol.open_reply(unique, protocol.OPEN_DIRECT_IO if direct else protocol.OPEN_KEEP_CACHE))
