"""Serves one tree to the kernel: which function answers which request, and what all threads share and have counted."""

from __future__ import annotations

import errno
import itertools
import os
import select
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, cast

from shardfs.fuse import control, libfuse, protocol
from shardfs.fuse.access import RecordingDevice
from shardfs.fuse.device import Device
from shardfs.fuse.invalidation import ANY, AttributeCache, Notices, ResizedFiles
from shardfs.fuse.leadership import TIMED, ErrorLog, Leadership, RequestLoop
from shardfs.fuse.node_requests import NodeRequests, WritableNodeRequests, XattrRequests, forget_handlers
from shardfs.fuse.polling import Polling
from shardfs.fuse.read_requests import ReadRequests
from shardfs.fuse.readdir import DirRequests, Listings, WritableDirRequests
from shardfs.fuse.unreadable import MOST_S, UnreadableChunks
from shardfs.fuse.write_requests import NameRequests, WriteRequests
from shardfs.storage import descriptors
from shardfs.storage.counters import OPCODES, Histogram
from shardfs.vfs.inodes import TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardfs.fuse.access import AccessLog
    from shardfs.fuse.device import Handler
    from shardfs.fuse.readdir import OpenDirectory
    from shardfs.fuse.settings import FuseSettings
    from shardfs.fuse.write_requests import WritableTree
    from shardfs.model.attributes import Attributes
    from shardfs.model.file_tree import FileTree
    from shardfs.model.values import U64


class Counts(NamedTuple):
    """The requests answered so far: their number by opcode, failures by opcode and errno, durations by opcode, and the
    bytes of files sent.

    Durations cover each request that waited. Of the others, one in 64 is timed and counts 64 times.
    """

    calls: dict[int, int]
    errors: Counter[tuple[int, int]]
    times: dict[int, Histogram]
    nbytes: int


class Server:
    """Serves one tree on one session, until the session's mount has ended.

    Attributes:
        control: the files of `.shardfs`, by default none. May be replaced before `start`.
    """

    def __init__(self, settings: FuseSettings, access: AccessLog | None = None) -> None:
        self._settings = settings
        self._access = access
        self.control = control.Control({})
        self._error_log = ErrorLog()
        self._leadership = Leadership(settings.threads)
        self._resized = ResizedFiles()
        # Of a read-only mount
        self._recent: dict[int, Attributes] = {}
        self._listings = Listings(settings.encoder(), self._resized)
        # Of a writable mount
        self._cache = AttributeCache()
        self._directories: dict[int, OpenDirectory] = {}
        self._directory_handles = itertools.count(1)

    def start(self, tree: FileTree, session: libfuse.Session, on_end: Callable[[], object]) -> None:
        """Begin to serve, in threads of its own. `on_end` is called in one of them when the mount has ended.

        The session must be mounted and negotiated, and its `fd` stay open. The tree must be a `WritableTree` if the
        settings say `rw`; its hooks are set here. Raise RuntimeError or OSError if no thread can be started.
        """
        self._tree = tree
        self._fd = session.fd
        descriptors.register(self)
        notices = Notices(session.fd)
        if self._settings.rw or not self._settings.keep_listings:  # else names and documents do not change
            notices.start()
        self._resized.send = notices.send
        tree.hooks.former_resized = self._resized.invalidate
        if self._settings.rw:
            _connect(cast("WritableTree", tree), self._cache, notices)
        else:
            tree.hooks.resized = self._resized.invalidate
            tree.hooks.invalidate_all = notices.invalidate_names
        poller = select.poll()
        poller.register(session.fd, select.POLLIN)
        self._polling = Polling(poller.poll, self._settings.poll_us, self._leadership.is_alone)
        self._leadership.start(self._make_loop, on_end)

    def waiting(self) -> None:
        """Have another thread read requests. The tree calls this right before a request waits for the store or a disk.

        May raise `Postponed`: see `Leadership.waiting`.
        """
        self._leadership.waiting()

    def load(self) -> dict[str, int]:
        """The numbers of `threads`, of those `waiting` for the store, and of `postponed` requests, by these names."""
        return self._leadership.load()

    def counts(self) -> Counts:
        """The requests answered so far, by all threads. May be called in any thread."""
        errors, times, tallies = Counter[tuple[int, int]](), dict[int, Histogram](), self._leadership.tallies()
        for tally in tallies:
            errors += Counter(dict(tally.errors.copy()))
        calls = {op: n for op in range(OPCODES) if (n := sum(t.calls[op] + TIMED * t.rounds[op] for t in tallies))}
        for op in calls:
            times[op] = Histogram()
            for tally in tallies:
                times[op].merge(tally.times[op])
        return Counts(calls, errors, times, sum(tally.nbytes for tally in tallies))

    def release_descriptors(self) -> None:
        """Drop the attributes between LOOKUP and READ, which keep local files open.

        `storage.descriptors` calls this, in any thread, when the process has no descriptor left.
        """
        self._recent.clear()
        self._cache.evict()

    # ---- for each thread

    def _make_loop(self) -> RequestLoop:
        if self._access is None:
            device = Device(self._fd, self._settings)
            handlers = self._handlers(device)
        else:
            device = recording = RecordingDevice(self._fd, self._settings, self._access, self._path_of)
            handlers = [recording.recorded(opcode, handler) for opcode, handler in enumerate(self._handlers(device))]
        return RequestLoop(device, handlers, self._polling, self._error_log)

    def _path_of(self, number: int) -> str:
        return self._tree.shown_path(number) if number < control.DIRECTORY else os.fsdecode(control.NAME)

    def _handlers(self, device: Device) -> list[Handler]:
        """By opcode."""
        # INTERRUPT gets ENOSYS, too: a thread that blocks in a read cannot be stopped (docs/concurrency.md).
        not_implemented = _refusal(device, errno.ENOSYS)  # the kernel mostly does not ask again
        handlers: dict[int, Handler] = {
            protocol.STATFS: self._statfs_handler(device),
            protocol.IOCTL: _refusal(device, errno.ENOTTY),  # Python asks of each file if it is a terminal
            **XattrRequests(self._tree, device).handlers(),
            **(self._writable(device) if self._settings.rw else self._read_only(device)),
        }
        return [handlers.get(opcode, not_implemented) for opcode in range(OPCODES)]

    def _read_only(self, device: Device) -> dict[int, Handler]:
        tree, files, success = self._tree, self.control, _refusal(device, 0)
        replies = self._control_replies(device)
        nodes = NodeRequests(tree, self._recent, self._resized, self._unreadable(), device, replies)
        reads = ReadRequests(tree, files, self._recent, nodes.attributes_for_reads, self._resized, device, self.waiting)
        handlers: dict[int, Handler] = {
            **nodes.handlers(),
            **forget_handlers(tree, files, device.request, end=TABLE_END),
            **DirRequests(tree, files, self._listings, device).handlers(),
            protocol.RELEASEDIR: success,
            protocol.OPEN: reads.open,
            protocol.READ: reads.handler(),
            protocol.RELEASE: success,
            **dict.fromkeys(protocol.MODIFYING, _refusal(device, errno.EROFS)),
        }
        # After ENOSYS for OPEN or OPENDIR, the kernel does not send them again. It then keeps a file's pages or a
        # directory's listing from one open to the next.
        if not self._settings.direct_io:
            del handlers[protocol.OPEN]
        if self._settings.keep_listings:
            del handlers[protocol.OPENDIR]
        return handlers

    def _writable(self, device: Device) -> dict[int, Handler]:
        # COPY_FILE_RANGE and TMPFILE get ENOSYS: the kernel returns EOPNOTSUPP to clients and does not ask again.
        tree, files, cache, waiting = cast("WritableTree", self._tree), self.control, self._cache, self.waiting
        resized, replies = self._resized, self._control_replies(device)
        nodes = WritableNodeRequests(tree, tree.is_unlinked, cache, resized, self._unreadable(), device, replies)
        reads = ReadRequests(tree, files, cache.entries, nodes.attributes_for_reads, resized, device, waiting)
        directories = WritableDirRequests(tree, files, cache, self._directories, self._directory_handles, device)
        return {
            **nodes.handlers(),
            **forget_handlers(tree, files, device.request, end=control.DIRECTORY),
            **directories.handlers(),
            protocol.READ: reads.handler(),
            **WriteRequests(tree, cache, device, nodes, waiting).handlers(),
            **NameRequests(tree, cache, device, nodes, waiting).handlers(),
        }

    def _control_replies(self, device: Device) -> control.ControlReplies:
        return control.ControlReplies(self.control, self._settings.encoder(most_s=0), device)

    def _unreadable(self) -> UnreadableChunks:
        return UnreadableChunks(self._tree, self._resized, self._settings.encoder(most_s=MOST_S))

    def _statfs_handler(self, device: Device) -> Handler:
        def answer(unique: int, _number: int, _size: int) -> None:
            sizes = self._tree.statvfs()
            if sizes is None:  # the size of a bucket is unknown
                sizes = os.statvfs_result((protocol.BLOCK, protocol.BLOCK, 0, 0, 0, 0, 0, 0, 0, 255))
            device.send(protocol.statfs_reply(unique, sizes))

        return answer


def _refusal(device: Device, number: int) -> Handler:
    """A handler that always replies the same errno; 0 is success."""

    def refuse(unique: int, _number: int, _size: int) -> None:
        if number:
            device.tally.errors[protocol.HEADER_IN.unpack_from(device.request)[1], number] += 1
        device.send(protocol.error_reply(unique, number))

    return refuse


def _connect(tree: WritableTree, cache: AttributeCache, notices: Notices) -> None:
    """Set the hooks by which the tree invalidates what the server and the kernel have cached."""

    def invalidate(parent: int, name: bytes) -> None:
        cache.invalidate()
        notices.queue([protocol.invalidate_entry(parent, name)])

    def invalidate_all(parent: int, names: Iterable[bytes]) -> None:
        cache.invalidate()
        notices.invalidate_names(parent, names, cache.drop_pages(ANY))

    def invalidate_content(number: int) -> None:
        cache.invalidate(number)
        notices.queue([protocol.invalidate_content(number)], cache.drop_pages(number))

    def reshaped(numbers: U64) -> None:
        cache.invalidate()
        for number in numbers.tolist():
            notices.send(protocol.invalidate_attributes(number))
        notices.queue((protocol.invalidate_content(int(n)) for n in numbers), cache.drop_pages(ANY))

    hooks = tree.hooks
    hooks.reshaped = reshaped
    hooks.invalidate = invalidate
    hooks.invalidate_all = invalidate_all
    hooks.invalidate_content = invalidate_content
