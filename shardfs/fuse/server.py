"""FUSE requests -> `Tree`: what the kernel is told, what it may remember, and which thread asks.

Exactly one thread, the leader, reads requests and answers them. Before a request has to wait (for the store, or for a
disk) its thread passes leadership on to another one and finishes the request aside. So requests that can be answered
from memory never pay for a switch of threads, and never queue behind one that waits. See docs/concurrency.md.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import mmap
import os
import select
import stat
import threading
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from math import inf
from threading import get_ident
from time import monotonic as clock
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardfs import __version__
from shardfs.counting import OPCODES, Histogram, Tally
from shardfs.errors import ShardfsError, errno_of
from shardfs.fuse import control, lowlevel
from shardfs.fuse.access import Noting
from shardfs.inodes import ROOT, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.chunk_tree import Attributes, Extent
    from shardfs.fuse.access import AccessLog
    from shardfs.tree import Tree

    Handler: TypeAlias = Callable[[int, int, int], None]
    """Answers one kind of request; given its unique number, the node it is about, and its length."""

log = logging.getLogger("shardfs.fuse")

RECENT = 512  # attributes kept between the LOOKUP of a file and its READs
DIRECT_IO_OVER = 128 << 10  # up to the kernel's readahead one READ fills the page cache, and that pays
LISTINGS = 32  # directories being listed at the same time, before some must start over at their position

NODES_PER_LISTING = 1 << 20
"""Entries of one directory that the kernel is given inodes for while it lists. It keeps about 1 KiB for each until it
is short of memory; behind that many only names are sent, and a `stat` of one costs a request."""

DOTS = 2
"""Positions in a directory are cookies of the tree plus this: before its entries come `.` and `..`."""

TIMED = 64
"""One in so many requests of a kind is timed, if it does not wait."""

_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseSettings:
    """How a mount behaves towards the kernel and its users; names as mount.fuse3(8) has them.

    Args:
        file_mode, dir_mode: permission bits, before `umask`.
        attr_timeout, entry_timeout, negative_timeout: seconds the kernel may remember attributes, names, and that
            a name does not exist. The source of a read-only mount is taken not to change.
        max_read, max_readahead: bytes; 0 leaves the kernel's own.
        threads: requests that may wait for the store at the same time, plus one.
        poll_us: microseconds to look for the next request before going to sleep, while requests come densely.
        direct_io: read chunks over 128 KiB past the page cache: faster once, but they cannot be mapped shared.
        kernel: further mount options for the kernel, such as nodev or noexec.
    """

    allow_other: bool = False
    allow_root: bool = False
    default_permissions: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int = 0
    file_mode: int = 0o444
    dir_mode: int = 0o555
    attr_timeout: float = 3600.0
    entry_timeout: float = 3600.0
    negative_timeout: float = 3600.0
    max_read: int = 0
    max_readahead: int = 0
    threads: int = 16
    poll_us: int = 0
    direct_io: bool = False
    kernel: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The mount options for libfuse. A mount is read-only to the kernel too, so that it asks for no changes."""
        flags = ("allow_other", "allow_root", "default_permissions")
        return ["ro", *(name for name in flags if getattr(self, name)), *self.kernel]

    def encoder(self, *, remembered: bool = True) -> lowlevel.Encoder:
        """The encoder of replies that shows files as these settings want them; the kernel may not remember some."""
        return lowlevel.Encoder(
            file_mode=stat.S_IFREG | self.file_mode & ~self.umask,
            dir_mode=stat.S_IFDIR | self.dir_mode & ~self.umask,
            uid=os.getuid() if self.uid is None else self.uid,
            gid=os.getgid() if self.gid is None else self.gid,
            attr_timeout=self.attr_timeout if remembered else 0,
            entry_timeout=self.entry_timeout if remembered else 0,
            negative_timeout=self.negative_timeout if remembered else 0,
        )

    def limits(self) -> lowlevel.Limits:
        """What INIT settles. Readahead is a background request, of which the kernel sends few at a time by itself."""
        return lowlevel.Limits(self.max_read, self.max_readahead, max(64, 2 * self.threads))


class _Postponed(BaseException):
    """The request was put aside as a whole, since all threads wait. No handler of errors is meant to catch it."""


class Counts(NamedTuple):
    """What was answered: requests by opcode, failures by opcode and errno, durations by opcode, bytes of files.

    Of requests that were answered from memory one in 64 is timed, and counts 64 times in the durations; of those that
    had to wait each one is.
    """

    calls: dict[int, int]
    errors: Counter[tuple[int, int]]
    times: dict[int, Histogram]
    nbytes: int


class Server:
    """Serves one tree on one session."""

    def __init__(self, settings: FuseSettings, access: AccessLog | None = None) -> None:
        self.settings, self.access = settings, access
        self.recent: dict[int, Attributes] = {}
        self.listings = _Listings(settings.encoder())
        self.complaints = _Complaints()
        self.control = control.Control({})
        self._tallies: list[Tally] = []
        self._leader: _Worker | None = None
        self._over = False
        self._workers = self._idle = 0
        self._postponed: deque[tuple[bytes, float]] = deque()
        self._mutex = threading.Lock()  # guards the two counts, and what is postponed
        self._leadership = threading.Semaphore(0)

    def waiting(self) -> None:
        """Called in the thread of a request right before it waits: another thread shall read the next request.

        If all others wait already, the request is postponed until one of them is done, and this does not return. In
        any other thread, and if there is only one, this does nothing.
        """
        leader = self._leader
        if leader is None or leader.ident != get_ident() or self.settings.threads == 1:
            return
        if not self._find_follower(leader.request):
            raise _Postponed
        leader.leading, leader.since = False, clock()
        self._leader = None
        self._leadership.release()

    def start(self, tree: Tree, session: lowlevel.Session, ended: Callable[[], object]) -> None:
        """Begin to serve, in threads of its own. `ended` is called, in one of them, when the mount is gone."""
        self.tree, self.session, self._ended = tree, session, ended
        if self.settings.poll_us:
            os.set_blocking(session.fd, False)
        self._find_follower(bytes)
        self._leadership.release()

    def _find_follower(self, request: Callable[[], bytes]) -> bool:
        """Whether there is one, or one could be made; else the request is postponed."""
        with self._mutex:
            if self._idle:
                return True
            if self._workers == self.settings.threads:
                self._postponed.append((request(), clock()))
                return False
            self._workers += 1
            self._idle += 1
        threading.Thread(target=self._work, name=f"shardfs-{self._workers}", daemon=True).start()
        return True

    def _work(self) -> None:
        tally = Tally()
        self._tallies.append(tally)
        worker = _Worker(self, tally)
        while self._take_the_lead(worker):
            while (request := self._next_postponed()) is not None:
                worker.answer(*request)

    def _next_postponed(self) -> tuple[bytes, float] | None:
        """A request for a thread that has none; without one it is idle from now on."""
        with self._mutex:
            if self._postponed:
                return self._postponed.popleft()
            self._idle += 1
            return None

    def postpone(self, request: bytes) -> None:
        """Put a request behind those that wait for a thread."""
        with self._mutex:
            self._postponed.append((request, clock()))

    def load(self) -> dict[str, int]:
        """How many threads there are, how many of them wait for the source, and how many requests for a thread."""
        with self._mutex:
            busy = max(self._workers - self._idle - 1, 0)
            return {"threads": self._workers, "waiting": busy, "postponed": len(self._postponed)}

    def counts(self) -> Counts:
        """What was answered so far, by all threads."""
        errors, times, tallies = Counter[tuple[int, int]](), dict[int, Histogram](), list(self._tallies)
        for tally in tallies:
            errors += Counter(dict(tally.errors.copy()))
        calls = {op: n for op in range(OPCODES) if (n := sum(t.calls[op] + TIMED * t.rounds[op] for t in tallies))}
        for op in calls:
            times[op] = Histogram()
            for tally in tallies:
                times[op].merge(tally.times[op])
        return Counts(calls, errors, times, sum(tally.nbytes + tally.sent() for tally in tallies))

    def _take_the_lead(self, worker: _Worker) -> bool:
        """Wait for leadership, and lead until it was passed on; False if there is nothing to lead any more."""
        self._leadership.acquire()
        with self._mutex:
            self._idle -= 1
        if not self._over:
            self._leader, worker.leading = worker, True
            if worker.lead():
                return True
            self._over = True
            self._ended()
        self._leadership.release()  # the next one shall see it, too
        return False


class _Worker:
    """One thread's buffers, and the requests it knows to answer."""

    def __init__(self, server: Server, tally: Tally) -> None:
        self.ident = get_ident()
        self.leading, self.since = False, 0.0
        self._server, self._tree, self._control, self._tally = server, server.tree, server.control, tally
        self._encoder, self._recent = server.settings.encoder(), server.recent
        self._control_encoder = server.settings.encoder(remembered=False)
        self._fd = server.session.fd
        # Unlike `os.read`, a FileIO says that nothing is there without raising: half a microsecond when polling.
        self._device = io.FileIO(self._fd, "r+", closefd=False)
        self._request = memoryview(mmap.mmap(-1, lowlevel.REQUEST_BUFFER))
        # A reply with data lies behind its header, so that it leaves in one piece; the data begins on a page.
        self._outbox = memoryview(mmap.mmap(-1, _PAGE + lowlevel.MAX_TRANSFER))
        self._poll_s = server.settings.poll_us / 1e6
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._dense = False
        if server.access is not None:
            self._noting = Noting(server.access, self._request, self._path_of)
            self._note_replies()
        self._handlers = self._table()

    def _note_replies(self) -> None:
        send, send_data, noting = self._send, self._send_data, self._noting

        def noted(reply: memoryview | bytes | bytearray) -> bool:
            noting.reply(reply)
            return send(reply)

        def noted_data(unique: int, body: memoryview | bytes) -> bool:
            noting.body(len(body))
            return send_data(unique, body)

        self.__dict__.update(_send=noted, _send_data=noted_data)

    def _path_of(self, number: int) -> str:
        return self._tree.shown_path(number) if number < control.DIRECTORY else os.fsdecode(control.NAME)

    def _table(self) -> list[Handler]:
        """By opcode."""
        nosys = self._refusal(errno.ENOSYS)  # the kernel mostly does not ask again
        known = {
            lowlevel.LOOKUP: self._lookup_handler(),
            lowlevel.FORGET: self._forget,
            lowlevel.BATCH_FORGET: self._batch_forget,
            lowlevel.GETATTR: self._getattr,
            lowlevel.READ: self._read_handler(),
            lowlevel.READDIR: self._readdir,
            lowlevel.READDIRPLUS: self._readdirplus,
            lowlevel.STATFS: self._statfs,
            lowlevel.GETXATTR: self._getxattr,
            lowlevel.LISTXATTR: self._listxattr,
            # Told so once, the kernel opens files by itself, and keeps listings and pages from one open to the next.
            lowlevel.OPEN: self._open if self._server.settings.direct_io else nosys,
            lowlevel.OPENDIR: nosys,
            lowlevel.RELEASE: self._refusal(0),
            # Nobody could be told in time: see docs/concurrency.md.
            lowlevel.INTERRUPT: nosys,
            lowlevel.IOCTL: self._refusal(errno.ENOTTY),  # Python asks every file whether it is a terminal
            **dict.fromkeys(lowlevel.MODIFYING, self._refusal(errno.EROFS)),
        }
        table = [known.get(opcode, nosys) for opcode in range(OPCODES)]
        if self._server.access is None:
            return table
        return [self._noting.around(opcode, handler) for opcode, handler in enumerate(table)]

    # ---- the loop

    def lead(self) -> bool:
        """Serve until leadership was passed on (then True) or the mount is gone (then False)."""
        receive, request, header = self._device.readinto, self._request, lowlevel.HEADER_IN.unpack_from
        handlers, calls, timed, opcode = self._handlers, self._tally.calls, TIMED, 0
        while self.leading:
            try:
                size = receive(request)
                if size is None:  # only if the device does not block
                    size = self._poll()
            except OSError as failure:
                if failure.errno == errno.ENOENT:  # whoever asked was interrupted in that moment
                    continue
                if failure.errno != errno.ENODEV:
                    log.error("cannot read requests: %s", failure)
                return False
            if not size:
                if size is None:
                    continue
                return False
            _, opcode, unique, node = header(request)
            nth = calls[opcode] + 1  # up to 256 Python has the numbers ready, which makes this four times as fast
            if nth == timed:
                self._timed(opcode, unique, node, size)
                continue
            calls[opcode] = nth
            try:
                handlers[opcode](unique, node, size)
            except BaseException as failure:  # noqa: BLE001 - told to who asked, and logged
                self._fail(opcode, unique, node, failure)
        self._tally.times[opcode].add(clock() - self.since)
        return True

    def _timed(self, opcode: int, unique: int, node: int, size: int) -> None:
        began = clock()
        self._tally.calls[opcode] = 0
        self._tally.rounds[opcode] += 1
        self._answer(opcode, unique, node, size)
        if self.leading:
            self._tally.times[opcode].add(clock() - began, TIMED)

    def answer(self, request: bytes, since: float) -> None:
        """Answer a request that was postponed; it may wait."""
        self._request[: len(request)] = request
        _, opcode, unique, node = lowlevel.HEADER_IN.unpack_from(request)
        self._answer(opcode, unique, node, len(request))
        self._tally.times[opcode].add(clock() - since)

    def _answer(self, opcode: int, unique: int, node: int, size: int) -> None:
        try:
            self._handlers[opcode](unique, node, size)
        except BaseException as failure:  # noqa: BLE001 - told to who asked, and logged
            self._fail(opcode, unique, node, failure)

    def request(self) -> bytes:
        """A copy of the request at hand."""
        return bytes(self._request[: lowlevel.HEADER_IN.unpack_from(self._request)[0]])

    def _fail(self, opcode: int, unique: int, node: int, failure: BaseException) -> None:
        if isinstance(failure, _Postponed):
            # Not ours: we waited for what another thread was to load, and that one's request was postponed.
            if not self.leading:
                self._server.postpone(self.request())
            return
        number = errno_of(failure)
        self._tally.errors[opcode, number] += 1
        self._send(lowlevel.error(unique, number))
        if isinstance(failure, OSError | ShardfsError):
            self._server.complaints.about(failure)
        elif self._server.complaints.are_due(repr(failure)):
            log.error("request %d of node %d failed: this is a bug", opcode, node, exc_info=failure)

    def _poll(self) -> int | None:
        """Wait for a request; its size, if it was found without sleeping. Sleeps at once unless they come densely."""
        began = clock()
        while self._dense and clock() - began < self._poll_s:
            os.sched_yield()
            size = self._device.readinto(self._request)
            if size is not None:
                return size
        self._poller.poll()
        self._dense = clock() - began < self._poll_s
        return None

    def _send(self, reply: memoryview | bytes | bytearray) -> bool:
        """Send a reply; False if nobody waits for it any more."""
        try:
            os.write(self._fd, reply)
        except OSError as failure:
            return self._lost(failure)
        return True

    def _send_data(self, unique: int, body: memoryview | bytes) -> bool:
        try:
            os.writev(self._fd, (lowlevel.data(unique, len(body)), body))
        except OSError as failure:
            return self._lost(failure)
        return True

    def _lost(self, failure: OSError) -> bool:
        if failure.errno not in (errno.ENOENT, errno.ENODEV):  # whoever asked was interrupted, or the mount is gone
            log.error("cannot send a reply: %s", failure)
        return False

    # ---- names and attributes

    def _lookup_handler(self) -> Handler:
        """LOOKUP. It and READ are closures, as the way to an attribute costs them as much as their work."""
        request, recent, send, encoder = self._request, self._recent, self._send, self._encoder
        lookup, remember, forget, entry = self._tree.lookup, self._tree.remember, self._tree.forget, encoder.entry
        begin, errors, absent = lowlevel.BODY, self._tally.errors, (lowlevel.LOOKUP, errno.ENOENT)
        around_control = frozenset((ROOT, control.DIRECTORY))

        def answer(unique: int, parent: int, size: int) -> None:
            try:
                if parent in around_control and self._is_control(parent, request[begin : size - 1]):
                    self._lookup_control(unique, parent, bytes(request[begin : size - 1]))
                    return
                found = lookup(parent, bytes(request[begin : size - 1]))
            except FileNotFoundError:
                errors[absent] += 1
                send(encoder.absent(unique))
                return
            number, directory, length, mtime_ns, _, _ = found
            if len(recent) >= RECENT:
                recent.clear()
            recent[number] = found
            if number >= TABLE_END:
                send(entry(unique, number, directory, length, mtime_ns))
                return
            remember(number)
            if not send(entry(unique, number, directory, length, mtime_ns)):
                forget(number, 1)

        return answer

    def _is_control(self, parent: int, name: memoryview) -> bool:
        return parent == control.DIRECTORY or name == control.NAME

    def _lookup_control(self, unique: int, parent: int, name: bytes) -> None:
        number, directory, length, mtime_ns, _, _ = self._control.lookup(parent, name)
        if not self._send(self._control_encoder.entry(unique, number, directory, length, mtime_ns)):
            self._control.forget(number)

    def _fresh_attributes(self, number: int) -> Attributes:
        """Kept for a while, as those of a LOOKUP are: who opens a file wants to know them and then to read it."""
        if number >= control.DIRECTORY:
            return self._control.attributes(number)
        found = self._tree.attributes(number)
        if len(self._recent) >= RECENT:
            self._recent.clear()
        self._recent[number] = found
        return found

    def _getattr(self, unique: int, number: int, _size: int) -> None:
        found = self._fresh_attributes(number)
        encoder = self._encoder if number < control.DIRECTORY else self._control_encoder
        self._send(encoder.attributes(unique, number, found.directory, found.size, found.mtime_ns))

    def _forget(self, _unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            self._control.forget(number)
        self._tree.forget(number, *lowlevel.FORGET_IN.unpack_from(self._request, lowlevel.BODY))

    def _batch_forget(self, _unique: int, _number: int, _size: int) -> None:
        (count,) = lowlevel.BATCH_FORGET_IN.unpack_from(self._request, lowlevel.BODY)
        start = lowlevel.BODY + lowlevel.BATCH_FORGET_IN.size
        pairs = np.frombuffer(self._request, np.uint64, 2 * count, start).reshape(-1, 2)
        for number, times in pairs[pairs[:, 0] < TABLE_END].tolist():
            self._tree.forget(number, times)
        for number in pairs[pairs[:, 0] >= control.DIRECTORY, 0].tolist():
            self._control.forget(number)

    # ---- bytes

    def _open(self, unique: int, number: int, _size: int) -> None:
        found = self._recent.get(number) or self._fresh_attributes(number)
        direct = found.size > DIRECT_IO_OVER
        self._send(lowlevel.opened(unique, lowlevel.OPEN_DIRECT_IO if direct else lowlevel.OPEN_KEEP_CACHE))

    def _read_handler(self) -> Handler:
        request, outbox, send = self._request, self._outbox, self._send
        recent, attributes = self._recent, self._fresh_attributes
        arguments, header, begin = lowlevel.READ_IN.unpack_from, lowlevel.HEADER_OUT.pack_into, lowlevel.BODY
        head = _PAGE - lowlevel.HEADER_SIZE
        preadv, nowait, sent = os.preadv, os.RWF_NOWAIT, 0

        def answer(unique: int, number: int, _size: int) -> None:
            nonlocal sent
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
                got = preadv(blob.fd, (data,), blob.base + start + offset, nowait)
            except OSError:  # not in the page cache, or on a file system that cannot say
                got = -1
            if got == size or self._read_slowly(extent, data, offset):
                header(outbox, head, size + _PAGE - head, 0, unique)
                send(outbox[head : _PAGE + size])
                sent += size
            else:
                self._recent.pop(number, None)
                self._send_bytes(unique, number, offset, size)

        self._tally.sent = lambda: sent
        return answer

    def _send_bytes(self, unique: int, number: int, offset: int, size: int) -> None:
        """Of a file that is not simply a part of a local one."""
        where = self._tree if number < control.DIRECTORY else self._control
        data = where.read(number, offset, size)
        self._send_data(unique, data)
        self._tally.nbytes += len(data)

    def _read_slowly(self, extent: Extent, data: memoryview, offset: int) -> bool:
        """Read from a disk or a server, while another thread leads; False if the bytes are not there any more."""
        self._server.waiting()
        return os.preadv(extent.blob.fd, (data,), extent.blob.base + extent.start + offset) == len(data)

    # ---- directories

    def _readdirplus(self, unique: int, number: int, _size: int) -> None:
        self._list(unique, number, plus=True)

    def _readdir(self, unique: int, number: int, _size: int) -> None:
        self._list(unique, number, plus=False)

    def _list(self, unique: int, number: int, *, plus: bool) -> None:
        offset, size = lowlevel.READ_IN.unpack_from(self._request, lowlevel.BODY)
        tree = self._tree if number < control.DIRECTORY else self._control
        page, remembered = self._server.listings.page(tree, number, offset, size, plus=plus)
        for entry in remembered:
            self._tree.remember(entry)
        if not self._send_data(unique, page):
            for entry in remembered:
                self._tree.forget(entry, 1)

    # ---- everything else

    def _statfs(self, unique: int, _number: int, _size: int) -> None:
        known = self._tree.statvfs()
        if known is None:  # nobody knows how large a bucket is
            known = os.statvfs_result((lowlevel.BLOCK, lowlevel.BLOCK, 0, 0, 0, 0, 0, 0, 0, 255))
        self._send(lowlevel.filesystem(unique, known))

    def _getxattr(self, unique: int, number: int, size: int) -> None:
        start = lowlevel.BODY + lowlevel.GETXATTR_IN.size
        name = str(self._request[start : size - 1], "utf8", "surrogateescape")
        if not name.startswith("user."):
            # ENODATA would be true as well, but on this answer `ls -l` stops asking every file for its ACL.
            raise OSError(errno.EOPNOTSUPP, name)
        value = self._xattrs(number).get(name)
        if value is None:
            raise OSError(errno.ENODATA, name)
        self._send_xattr(unique, value)

    def _listxattr(self, unique: int, number: int, _size: int) -> None:
        self._send_xattr(unique, b"".join(name.encode() + b"\0" for name in self._xattrs(number)))

    def _xattrs(self, number: int) -> dict[str, bytes]:
        own = {}
        if number == ROOT:
            own = {"user.shardfs.pid": b"%d" % os.getpid(), "user.shardfs.version": __version__.encode()}
        return {**(self._tree.xattrs(number) if number < control.DIRECTORY else {}), **own}

    def _send_xattr(self, unique: int, value: bytes) -> None:
        (room,) = lowlevel.GETXATTR_IN.unpack_from(self._request, lowlevel.BODY)
        if room == 0:
            self._send(lowlevel.xattr_size(unique, len(value)))
        elif room < len(value):
            raise OSError(errno.ERANGE, "no room for the extended attribute")
        else:
            self._send_data(unique, value)

    def _refusal(self, number: int) -> Handler:
        """A handler that always answers the same errno."""

        def refuse(unique: int, _number: int, _size: int) -> None:
            if number:
                self._tally.errors[lowlevel.HEADER_IN.unpack_from(self._request)[1], number] += 1
            self._send(lowlevel.error(unique, number))

        return refuse


class _Listings:
    """Directories being listed: what was built of them but not sent yet, by node and position.

    There are no directory handles, as OPENDIR is not answered. A listing that is not found here goes on with a new
    scan from its position.
    """

    def __init__(self, encoder: lowlevel.Encoder) -> None:
        self._encoder = encoder
        self._streams: OrderedDict[tuple[int, int, bool], _Stream | _End] = OrderedDict()

    def page(
        self, tree: Tree | control.Control, number: int, offset: int, size: int, *, plus: bool
    ) -> tuple[memoryview | bytes, list[int]]:
        """At most `size` bytes of records from position `offset`, and which table nodes they tell the kernel of."""
        # Taking the stream out makes this thread its only user.
        stream = self._streams.pop((number, offset, plus), None)
        if stream is None:
            few = tree.few(number, size // lowlevel.SHORT_RECORD - DOTS) if plus and not offset else None
            if few is not None:
                self._keep(number, few[-1][-1] + DOTS if few else DOTS, plus, _End())
                return self._encoder.few(number, few), []
            stream = _Stream(self._encoder, tree, number, offset, plus=plus)
        page, remembered, offset = stream.take(size)
        if page:
            self._keep(number, offset, plus, stream)
        return page, remembered

    def _keep(self, number: int, offset: int, plus: bool, stream: _Stream | _End) -> None:
        self._streams[number, offset, plus] = stream
        if len(self._streams) > LISTINGS:
            with contextlib.suppress(KeyError):  # two threads may be here
                self._streams.popitem(last=False)


class _End:
    """What is left of a directory that was sent as a whole."""

    def take(self, size: int) -> tuple[bytes, list[int], int]:
        return b"", [], 0


class _Stream:
    """One directory, as records, from one position on."""

    def __init__(
        self, encoder: lowlevel.Encoder, tree: Tree | control.Control, number: int, offset: int, *, plus: bool
    ) -> None:
        self._encoder, self._plus = encoder, plus
        self._batches = (batch for batch in tree.scan(number, max(offset - DOTS, 0)) if len(batch.names))
        self._dots = encoder.dots(number, offset, plus=plus) if offset < DOTS else b""
        self._room = NODES_PER_LISTING if plus else 0
        self._body, self._nodes = memoryview(b""), np.empty(0, np.uint64)
        self._ends, self._offsets = np.empty(0, np.int64), np.empty(0, np.uint64)
        self._at, self._sent = 0, 0  # records and bytes of this body that were sent
        self._offset = max(offset, DOTS)
        self._has_table_nodes = False

    def take(self, size: int) -> tuple[memoryview | bytes, list[int], int]:
        """The next records that fit into `size` bytes, the table nodes among them, and the position behind them."""
        # With the first entries, or each small directory would cost a request more.
        dots, self._dots = self._dots, b""
        if self._at == len(self._ends) and not self._build():
            return dots, [], self._offset
        last = int(self._ends.searchsorted(self._sent + size - len(dots), "right"))
        end = int(self._ends[last - 1])
        nodes = self._nodes[self._at : last]
        page, self._offset = self._body[self._sent : end], int(self._offsets[last - 1])
        self._at, self._sent = last, end
        if last == len(self._ends):
            self._body = memoryview(b"")
        remembered = nodes[(nodes != 0) & (nodes < TABLE_END)].tolist() if self._has_table_nodes else []
        return dots + page if dots else page, remembered, self._offset

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
        self._has_table_nodes = bool(self._nodes.min() < TABLE_END)
        self._offsets = batch.cookies + np.uint64(DOTS)
        self._body, self._ends = self._encoder.records(batch, self._nodes, self._offsets, plus=self._plus)
        self._at = self._sent = 0
        return True


class _Complaints:
    """Says each thing once in a while: a broken shard that is read in a loop must not fill the log."""

    AGAIN_S = 60.0
    KEPT = 1000

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def about(self, failure: Exception) -> None:
        """Log what stands behind an errno, unless it is an ordinary answer."""
        if (isinstance(failure, OSError) and failure.errno in _ORDINARY) or isinstance(failure, FileNotFoundError):
            return
        message = str(failure) or repr(failure)
        if self.are_due(message):
            log.warning("%s", message)

    def are_due(self, message: str) -> bool:
        """Whether this was not said for a while."""
        now = clock()
        if now - self._said.get(message, -inf) < self.AGAIN_S:
            return False
        if len(self._said) >= self.KEPT:
            self._said.clear()
        self._said[message] = now
        return True


_ORDINARY = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENODATA, errno.EOPNOTSUPP, errno.ERANGE}
