"""FUSE requests -> `Tree`: what the kernel is told, what it may remember, and which thread asks.

Exactly one thread, the leader, reads requests and answers them. Before a request has to wait (for the store, or for a
disk) its thread passes leadership on to another one and finishes the request aside. So requests that can be answered
from memory never pay for a switch of threads, and never queue behind one that waits. See docs/concurrency.md.
"""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
import select
import threading
from collections import Counter, deque
from threading import get_ident
from time import monotonic as clock
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np

from shardfs import __version__
from shardfs.counting import OPCODES, Histogram, Tally
from shardfs.errors import ShardfsError, errno_of
from shardfs.fuse import control, lowlevel
from shardfs.fuse.access import Noting
from shardfs.fuse.changes import RECENT, Changes, Changing
from shardfs.fuse.complaints import Complaints
from shardfs.fuse.listings import Listings
from shardfs.inodes import ROOT, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.chunk_tree import Attributes, Extent
    from shardfs.fuse.access import AccessLog
    from shardfs.fuse.changes import WriteTree
    from shardfs.fuse.settings import FuseSettings
    from shardfs.tree import Tree
    from shardfs.writing.overlay import Overlay

    Handler: TypeAlias = Callable[[int, int, int], None]
    """Answers one kind of request; given its unique number, the node it is about, and its length."""

log = logging.getLogger("shardfs.fuse")

DIRECT_IO_OVER = 128 << 10  # up to the kernel's readahead one READ fills the page cache, and that pays

USAGE = ("user.shardfs.live", "user.shardfs.dead")

TIMED = 64
"""One in so many requests of a kind is timed, if it does not wait."""

_PAGE = 4096
_CAPABILITIES = b"security.capability"


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
        self.changing = Changing(settings.encoder()) if settings.rw else None
        self.recent: dict[int, Attributes] = self.changing.recent.kept if self.changing is not None else {}
        self.listings = Listings(settings.encoder())
        self.complaints = Complaints()
        self.control = control.Control({})
        self._tallies: list[Tally] = []
        self._leader: _Worker | None = None
        self._over = False
        self._workers = self._idle = 0
        self._postponed: deque[tuple[bytes, float]] = deque()
        self._mutex = threading.Lock()  # guards the two counts, and what is postponed
        self._leadership = threading.Lock()  # whoever takes it leads; given back by whoever has led
        self._leadership.acquire()

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

    def start(self, tree: Tree | Overlay | WriteTree, session: lowlevel.Session, ended: Callable[[], object]) -> None:
        """Begin to serve, in threads of its own. `ended` is called, in one of them, when the mount is gone.

        The tree is a `WriteTree` if the settings say `rw`.
        """
        self.tree, self.session, self._ended = tree, session, ended
        if self.changing is not None:
            self.changing.start(cast("WriteTree", tree), session.fd)
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
        self._changes: Changes | None = None
        if server.changing is not None:
            tree = cast("WriteTree", server.tree)
            self._changes = Changes(tree, server.changing, self._encoder, self._request, self._send, server.waiting)
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
            lowlevel.OPENDIR: nosys if self._server.settings.keep_listings else self._opendir,
            lowlevel.RELEASE: self._refusal(0),
            lowlevel.RELEASEDIR: self._refusal(0),
            # Nobody could be told in time: see docs/concurrency.md.
            lowlevel.INTERRUPT: nosys,
            lowlevel.IOCTL: self._refusal(errno.ENOTTY),  # Python asks every file whether it is a terminal
            **dict.fromkeys(lowlevel.MODIFYING, self._refusal(errno.EROFS)),
        }
        if self._changes is not None:
            known |= self._written(self._changes)
        table = [known.get(opcode, nosys) for opcode in range(OPCODES)]
        if self._server.access is None:
            return table
        return [self._noting.around(opcode, handler) for opcode, handler in enumerate(table)]

    def _written(self, changes: Changes) -> dict[int, Handler]:
        """What is answered otherwise on a mount that can be written to."""
        # The kernel goes on by itself: it says EOPNOTSUPP and does not ask again.
        nosys = self._refusal(errno.ENOSYS)
        unknown = dict.fromkeys((lowlevel.COPY_FILE_RANGE, lowlevel.TMPFILE), nosys)
        listing = {
            lowlevel.OPENDIR: lambda unique, number, _size: changes.opendir(unique, number, self._place_of(number)),
            lowlevel.READDIR: lambda unique, _number, _size: self._list_opened(unique, plus=False),
            lowlevel.READDIRPLUS: lambda unique, _number, _size: self._list_opened(unique, plus=True),
        }
        return {**unknown, lowlevel.LOOKUP: self._lookup_written, **listing, **changes.handlers()}

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

    def _lookup_written(self, unique: int, parent: int, size: int) -> None:
        name, changes = self._request[lowlevel.BODY : size - 1], cast("Changes", self._changes)
        try:
            if (parent == ROOT or parent == control.DIRECTORY) and self._is_control(parent, name):
                self._lookup_control(unique, parent, bytes(name))
                return
            found = changes.lookup(parent, bytes(name))
        except FileNotFoundError:
            self._tally.errors[lowlevel.LOOKUP, errno.ENOENT] += 1
            self._send(self._encoder.absent(unique))
            return
        changes.send_entry(unique, found)

    def _is_control(self, parent: int, name: memoryview) -> bool:
        return parent == control.DIRECTORY or name == control.NAME

    def _lookup_control(self, unique: int, parent: int, name: bytes) -> None:
        number, directory, length, mtime_ns, _, _ = self._control.lookup(parent, name)
        reply = self._control_encoder.entry(unique, number, directory, length, mtime_ns)
        if not self._send(lowlevel.with_inode(reply, control.inode(number))):
            self._control.forget(number)

    def _fresh_attributes(self, number: int) -> Attributes:
        """Kept for a while, as those of a LOOKUP are: who opens a file wants to know them and then to read it."""
        if number >= control.DIRECTORY:
            return self._control.attributes(number)
        if self._changes is not None:
            return self._changes.attributes(number)
        found = self._tree.attributes(number)
        if len(self._recent) >= RECENT:
            self._recent.clear()
        self._recent[number] = found
        return found

    def _getattr(self, unique: int, number: int, _size: int) -> None:
        found = self._fresh_attributes(number)
        if found.mode and self._changes is not None:
            self._changes.send_attributes(unique, found)
            return
        encoder = self._encoder if number < control.DIRECTORY else self._control_encoder
        reply = encoder.attributes(unique, number, found.directory, found.size, found.mtime_ns)
        self._send(reply if number < control.DIRECTORY else lowlevel.with_inode(reply, control.inode(number)))

    def _forget(self, _unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            self._control.forget(number)
        self._tree.forget(number, *lowlevel.FORGET_IN.unpack_from(self._request, lowlevel.BODY))

    def _batch_forget(self, _unique: int, _number: int, _size: int) -> None:
        (count,) = lowlevel.BATCH_FORGET_IN.unpack_from(self._request, lowlevel.BODY)
        start = lowlevel.BODY + lowlevel.BATCH_FORGET_IN.size
        pairs = np.frombuffer(self._request, np.uint64, 2 * count, start).reshape(-1, 2)
        end = TABLE_END if self._changes is None else control.DIRECTORY
        for number, times in pairs[pairs[:, 0] < np.uint64(end)].tolist():
            self._tree.forget(number, times)
        for number in pairs[pairs[:, 0] >= control.DIRECTORY, 0].tolist():
            self._control.forget(number)

    # ---- bytes

    def _open(self, unique: int, number: int, _size: int) -> None:
        found = self._recent.get(number) or self._fresh_attributes(number)
        direct = found.size > DIRECT_IO_OVER
        self._send(lowlevel.opened(unique, lowlevel.OPEN_DIRECT_IO if direct else lowlevel.OPEN_KEEP_CACHE))

    def _opendir(self, unique: int, _number: int, _size: int) -> None:
        self._send(lowlevel.opened(unique, 0))  # what is listed is not kept for who opens it next

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
                sent += size  # before it arrives, where the count may be asked for at once
                send(outbox[head : _PAGE + size])
            else:
                self._recent.pop(number, None)
                self._send_bytes(unique, number, offset, size)

        self._tally.sent = lambda: sent
        return answer

    def _send_bytes(self, unique: int, number: int, offset: int, size: int) -> None:
        """Of a file that is not simply a part of a local one."""
        data = self._place_of(number).read(number, offset, size)
        self._tally.nbytes += len(data)
        self._send_data(unique, data)

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
        place = cast("Tree | control.Control", self._place_of(number))
        self._send_page(unique, *self._server.listings.page(place, number, offset, size, plus=plus))

    def _list_opened(self, unique: int, *, plus: bool) -> None:
        handle, offset, size = lowlevel.READDIR_IN.unpack_from(self._request, lowlevel.BODY)
        directories = cast("Changing", self._server.changing).directories
        self._send_page(unique, *directories.page(handle, offset, size, plus=plus))

    def _place_of(self, number: int) -> Tree | Overlay | WriteTree | control.Control:
        return self._tree if number < control.DIRECTORY else self._control

    def _send_page(self, unique: int, page: memoryview | bytes, remembered: list[int]) -> None:
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
        if self._request[start : size - 1] == _CAPABILITIES:  # asked for before a file is first written to
            self._tally.errors[lowlevel.GETXATTR, errno.EOPNOTSUPP] += 1
            self._send(lowlevel.error(unique, errno.EOPNOTSUPP))
            return
        name = os.fsdecode(bytes(self._request[start : size - 1]))
        if not name.startswith("user."):
            # ENODATA would be true as well, but on this answer `ls -l` stops asking every file for its ACL.
            raise OSError(errno.EOPNOTSUPP, name)
        # What costs much is not listed, so that `cp -a` does not ask for it.
        value = self._tree.usage(number).get(name) if name in USAGE else self._xattrs(number).get(name)
        if value is None:
            raise OSError(errno.ENODATA, name)
        self._send_xattr(unique, value)

    def _listxattr(self, unique: int, number: int, _size: int) -> None:
        self._send_xattr(unique, b"".join(os.fsencode(name) + b"\0" for name in self._xattrs(number)))

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
