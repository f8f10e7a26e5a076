"""The server alone: requests come through a socket that stands for /dev/fuse, from a tree made up here.

What a kernel would do with the answers is shown by the tests beside this one; here answers are taken apart.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from shardfs.fuse import invalidation, protocol, readdir
from shardfs.fuse.access import AccessLog
from shardfs.fuse.server import Server
from shardfs.fuse.settings import FuseSettings
from shardfs.model.attributes import Attributes, Extent
from shardfs.model.errors import CorruptShardError
from shardfs.model.file_tree import KernelHooks
from shardfs.model.listing import Batch
from shardfs.model.listing import EntryRow as SmallEntry
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.inodes import ROOT, TABLE_END
from tests.failing_starts import FailingStarts
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DOCUMENT, DIRECTORY, CHUNK = 7, 8, TABLE_END + 5
MTIME_NS = 1_700_000_000_000_000_123


class Reply(NamedTuple):
    unique: int
    error: int
    body: bytes


class FakeTree:
    """A directory of `names`, a document, and chunks that a test replaces as it likes."""

    def __init__(self) -> None:
        self.names = [b"c", b"zarr.json"]
        self.numbers = [CHUNK, DOCUMENT]
        self.sizes = [3, 5]
        self.known: dict[bytes, Attributes] = {b"zarr.json": Attributes(DOCUMENT, False, 5, MTIME_NS)}
        self.lookups = {DOCUMENT: 0}
        self.data = b"hello"
        self.hooks = KernelHooks()
        self.note_read = None
        self.small: list[SmallEntry] | None = None
        self.scans: list[int] = []
        self.by_name_from = 1 << 62
        self.read: Callable[[int, int, int], bytes] = lambda number, offset, size: self.data[offset : offset + size]

    def shown_path(self, number: int) -> str:
        return str(number)

    def lookup(self, parent: int, name: bytes) -> Attributes:
        assert parent == ROOT
        if name not in self.known:
            raise FileNotFoundError(name)
        return self.known[name]

    def chunk_number(self, parent: int, name: bytes) -> int | None:
        """This tree has no chunks."""
        return None

    def is_chunk(self, number: int) -> bool:
        """This tree has no chunks."""
        return False

    def attributes(self, number: int) -> Attributes:
        for entry in self.known.values():
            if entry.number == number:
                return entry
        raise FileNotFoundError(number)

    def remember(self, number: int) -> None:
        self.lookups[number] = self.lookups.get(number, 0) + 1

    def forget(self, number: int, count: int) -> None:
        self.lookups[number] -= count

    def xattrs(self, number: int) -> dict[str, bytes]:
        return {"user.shardfs.shard": b"c/0/0"} if number == CHUNK else {}

    def statvfs(self) -> None:
        return None

    def small_listing(self, number: int, limit: int) -> list[SmallEntry] | None:
        return self.small if self.small is not None and len(self.small) <= limit else None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        self.scans.append(cookie)
        for start in range(cookie, len(self.names), 4):
            part = slice(start, start + 4)
            n = len(self.names[part])
            yield Batch(
                np.array(self.names[part]),
                np.array(self.numbers[part], np.uint64),
                np.zeros(n, np.bool_),
                np.array(self.sizes[part], np.int64),
                np.full(n, MTIME_NS),
                np.arange(start + 1, start + 1 + n, dtype=np.uint64),
                by_name=start >= self.by_name_from,
            )


class Kernel:
    """The other end of the socket."""

    def __init__(self, device: socket.socket, tree: FakeTree, server: Server, ended: threading.Event) -> None:
        self._device, self.tree, self.server, self._ended = device, tree, server, ended
        self.waiting = server.waiting
        self._unique = 0

    def hang_up(self) -> None:
        """The mount is gone; the server must notice."""
        with suppress(OSError):
            self._device.shutdown(socket.SHUT_RDWR)
        assert self._ended.wait(60)

    def send(self, opcode: int, node: int, body: bytes = b"") -> int:
        self._unique += 2
        header = struct.pack(
            "=IIQQIIII", 40 + len(body), opcode, self._unique, node, 0, 0, threading.get_native_id(), 0
        )
        self._device.send(header + body)
        return self._unique

    def receive(self) -> Reply:
        data = self._device.recv(1 << 21)
        length, error, unique = struct.unpack_from("=IiQ", data)
        assert length == len(data)
        return Reply(unique, -error, data[16:])

    def ask(self, opcode: int, node: int, body: bytes = b"") -> Reply:
        unique = self.send(opcode, node, body)
        reply = self.receive()
        assert reply.unique == unique
        return reply

    def lookup(self, name: bytes) -> Reply:
        return self.ask(protocol.LOOKUP, ROOT, name + b"\0")

    def read(self, node: int, offset: int, size: int) -> Reply:
        return self.ask(protocol.READ, node, read_body(offset, size))

    def quiet(self) -> bool:
        self._device.settimeout(0.1)
        try:
            self._device.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._device.settimeout(60)
        return False


def read_body(offset: int, size: int) -> bytes:
    return struct.pack("=QQIIQII", 0, offset, size, 0, 0, 0, 0)


class FakeSession:
    def __init__(self, fd: int) -> None:
        self.fd = fd


@contextmanager
def serving(
    tree: Any = None,
    on_end: Callable[[Kernel], object] = lambda kernel: None,
    access: AccessLog | None = None,
    **settings: Any,
) -> Iterator[Kernel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(60)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
        serves = Server(FuseSettings(**settings), access)
        tree = FakeTree() if tree is None else tree
        session: Any = FakeSession(theirs.fileno())
        ended, before = threading.Event(), {*threading.enumerate()}
        kernel = Kernel(ours, tree, serves, ended)

        def finish() -> None:
            on_end(kernel)
            ended.set()

        serves.start(tree, session, finish)
        try:
            yield kernel
        finally:
            kernel.hang_up()
            # A thread that still waits would later answer to a descriptor that belongs to another test by then. The
            # one that tells the kernel of changes waits for ever, and only for us.
            for thread in {*threading.enumerate()} - before:
                if thread.name != "shardfs-notices":
                    thread.join(60)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with serving() as kernel:
        yield kernel


# ---- names and attributes

ATTR = "QQQqqqIIIIIIIIII"


@pytest.mark.parametrize(("timeout", "seconds", "nanoseconds"), [(2.5, 2, 500_000_000), (float("inf"), 1 << 31, 0)])
def test_absent_names_are_remembered_as_long_as_is_asked_for(timeout: float, seconds: int, nanoseconds: int) -> None:
    with serving(negative_timeout=timeout) as kernel:
        reply = kernel.lookup(b"nothing")
    assert (reply.error, len(reply.body)) == (0, 128)
    assert struct.unpack_from("=QQQQII", reply.body) == (0, 0, seconds, 0, nanoseconds, 0)


def test_absent_names_are_not_remembered_with_a_time_out_of_0() -> None:
    with serving(negative_timeout=0) as kernel:
        assert kernel.lookup(b"nothing") == Reply(2, errno.ENOENT, b"")


def test_many_are_forgotten_at_once(kernel: Kernel) -> None:
    kernel.tree.lookups = {DOCUMENT: 9, DIRECTORY: 3}
    pairs = [(DOCUMENT, 4), (CHUNK, 1), (DIRECTORY, 3), (CHUNK + 1, 1)]
    body = struct.pack("=II", len(pairs), 0) + b"".join(struct.pack("=QQ", *pair) for pair in pairs)
    kernel.send(protocol.BATCH_FORGET, 0, body)
    wait_until(lambda: kernel.tree.lookups == {DOCUMENT: 5, DIRECTORY: 0})
    assert kernel.quiet()


# ---- bytes


@pytest.fixture
def chunk(kernel: Kernel, tmp_path: Path) -> Path:
    """The shard of a chunk of 300,000 bytes that lie in a local file, 100 bytes from its start."""
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(100) + bytes(range(250)) * 1200 + b"behind")
    blob = LocalStore(str(tmp_path)).open("shard")
    kernel.tree.known[b"c"] = Attributes(CHUNK, False, 300_000, MTIME_NS, Extent(blob, 100))
    return path


def test_bytes_that_are_gone_from_the_file_are_asked_of_the_tree(kernel: Kernel, chunk: Path) -> None:
    """Which knows what else may be done, or says what is wrong. Nothing is padded or cut."""
    os.truncate(chunk, 1000)

    def fail(number: int, offset: int, size: int) -> bytes:
        raise CorruptShardError("a", "c/0", f"chunk {number}: cut off")

    kernel.tree.read = fail
    assert kernel.read(CHUNK, 0, 4096) == Reply(2, errno.EIO, b"")
    kernel.tree.read = lambda number, offset, size: b"new" * 100
    assert kernel.read(CHUNK, 0, 4096).body == b"new" * 100


def test_a_resized_file_is_not_read_before_the_kernel_has_asked_for_its_size(kernel: Kernel) -> None:
    def invalid(number: int) -> Reply:
        return Reply(0, -2, struct.pack("=Qqq", number, -1, 0))  # notification 2: an inode; -1: but none of its pages

    def read(number: int, offset: int, size: int) -> bytes:
        kernel.tree.hooks.resized(np.array(resized, np.uint64))
        return b"new"

    kernel.tree.known |= {b"c": Attributes(CHUNK, False, 3, 0), b"d": Attributes(CHUNK + 1, False, 3, 0)}
    kernel.tree.read, resized = read, [CHUNK, CHUNK + 1]
    unique = kernel.send(protocol.READ, CHUNK, read_body(0, 4096))
    replies = [kernel.receive() for _ in range(4)]
    assert replies == [invalid(CHUNK), invalid(CHUNK + 1), invalid(CHUNK), Reply(unique, errno.ESTALE, b"")]
    resized.clear()
    assert kernel.read(DOCUMENT, 0, 4096).body == b"new"
    unique = kernel.send(protocol.READ, CHUNK, read_body(0, 4096))
    assert [kernel.receive(), kernel.receive()] == [invalid(CHUNK), Reply(unique, errno.ESTALE, b"")]
    assert kernel.ask(protocol.GETATTR, CHUNK).error == 0
    assert kernel.read(CHUNK, 0, 4096).body == b"new"
    for tell in (lambda: kernel.lookup(b"d"), lambda: listed(kernel)):
        kernel.tree.hooks.resized(np.array([CHUNK + 1], np.uint64))
        assert kernel.receive() == invalid(CHUNK + 1)
        kernel.tree.names, kernel.tree.numbers, kernel.tree.sizes = [b"d"], [CHUNK + 1], [3]
        tell()
        assert kernel.read(CHUNK + 1, 0, 4096).body == b"new"


def test_what_is_kept_between_lookup_and_read_is_bounded(kernel: Kernel) -> None:
    for i in range(2 * invalidation.CAPACITY):
        kernel.tree.known[b"x"] = Attributes(CHUNK + i, False, 5, 0)
        kernel.lookup(b"x")
        kernel.tree.known = {b"y": Attributes(CHUNK + i, False, 5, 0)}
        assert kernel.read(CHUNK + i, 0, 10).body == b"hello"


# ---- directories


class Entry(NamedTuple):
    node: int
    size: int
    mode: int
    ino: int
    position: int
    name: bytes


def entries(body: bytes, *, plus: bool = True) -> list[Entry]:
    """What the kernel takes out of a page of a listing."""
    listing, at = [], 0
    while at < len(body):
        node, size, mode = 0, 0, 0
        if plus:
            node, size, mode = struct.unpack_from("=Q40xQ44xI", body, at)
            at += 128
        ino, position, length, kind = struct.unpack_from("=QQII", body, at)
        name = body[at + 24 : at + 24 + length]
        assert not mode or kind == mode >> 12
        listing.append(Entry(node, size, mode, ino, position, name))
        at += -(-(24 + length) // 8) * 8
    assert at == len(body)
    return listing


def listed(kernel: Kernel, size: int = 4096, position: int = 0, *, plus: bool = True) -> list[Entry]:
    opcode = protocol.READDIRPLUS if plus else protocol.READDIR
    listing: list[Entry] = []
    while page := entries(kernel.ask(opcode, ROOT, read_body(position, size)).body, plus=plus):
        listing += page
        position = page[-1].position
    return listing


@pytest.fixture
def many(kernel: Kernel) -> FakeTree:
    """Entries whose names have all lengths, in batches of four."""
    tree = kernel.tree
    tree.names = [b"n" * length for length in range(1, 40)]
    tree.numbers = [TABLE_END + i if i % 3 else 100 + i for i in range(39)]
    tree.sizes = [1000 + i if i % 5 else -1 for i in range(39)]
    return tree


def test_nodes_that_were_listed_with_their_attributes_are_counted(kernel: Kernel, many: FakeTree) -> None:
    many.lookups = {}
    listed(kernel)
    assert many.lookups == {number: 1 for number, size in zip(many.numbers, many.sizes, strict=True) if
                            number < TABLE_END and size >= 0}  # fmt: skip


def test_listings_go_on_at_any_position(kernel: Kernel, many: FakeTree) -> None:
    whole = listed(kernel)
    for i, entry in enumerate(whole):
        assert listed(kernel, position=entry.position) == whole[i + 1 :]
    many.scans.clear()
    page = entries(kernel.ask(protocol.READDIRPLUS, ROOT, read_body(0, 1000)).body)
    further = listed(kernel, position=page[-1].position)
    assert page + further == whole
    assert many.scans == [0]  # and without beginning anew


def test_more_listings_at_once_than_are_kept(kernel: Kernel, many: FakeTree) -> None:
    whole = listed(kernel)
    for _ in range(2):
        positions = dict.fromkeys(range(3 * readdir.LISTINGS), 0)
        for node in positions:
            page = entries(kernel.ask(protocol.READDIRPLUS, node + 1000, read_body(0, 1000)).body)
            positions[node] = page[-1].position
        for node, position in positions.items():
            page = entries(kernel.ask(protocol.READDIRPLUS, node + 1000, read_body(position, 1000)).body)
            at = [e.position for e in whole].index(position) + 1
            assert page == whole[at : at + len(page)]


def test_behind_a_million_entries_only_names_are_listed(
    kernel: Kernel, many: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readdir, "NODES_PER_LISTING", 10)
    many.sizes = [5] * len(many.names)
    listing = listed(kernel)
    assert [e.name for e in listing] == [b".", b"..", *many.names]
    assert [e.node != 0 for e in listing] == [i in range(2, 12) for i in range(len(listing))]


# ---- extended attributes and the rest


def test_changes_are_refused_and_what_is_not_needed_is_not_asked_again(kernel: Kernel) -> None:
    assert {kernel.ask(opcode, ROOT, bytes(64)).error for opcode in protocol.MODIFYING} == {errno.EROFS}
    for opcode in (protocol.OPEN, protocol.OPENDIR, protocol.INTERRUPT, 25, 34, 46, 200):
        assert kernel.ask(opcode, ROOT, bytes(64)).error == errno.ENOSYS
    assert kernel.ask(protocol.IOCTL, CHUNK, bytes(64)).error == errno.ENOTTY
    assert len(kernel.ask(protocol.STATFS, ROOT).body) == 80


def test_large_files_are_opened_past_the_page_cache_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(300_000))
    blob = LocalStore(str(tmp_path)).open("shard")
    with serving(direct_io=True) as kernel:
        for size, flags in [(131_072, protocol.OPEN_KEEP_CACHE), (131_073, protocol.OPEN_DIRECT_IO)]:
            kernel.tree.known[b"c"] = Attributes(CHUNK + size, False, size, 0, Extent(blob, 0))
            assert struct.unpack("=QI4x", kernel.ask(protocol.OPEN, CHUNK + size, bytes(8)).body) == (0, flags)
            assert kernel.ask(protocol.RELEASE, CHUNK + size, bytes(24)).error == 0


# ---- errors


def test_errors_are_told_once_in_a_while(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    def damaged(number: int, offset: int, size: int) -> bytes:
        raise CorruptShardError("a/0", "c/0/0", "its index is cut off")

    kernel.lookup(b"zarr.json")
    kernel.tree.read = damaged
    assert [kernel.read(DOCUMENT, 0, 10).error for _ in range(5)] == [errno.EIO] * 5
    assert [record.getMessage() for record in caplog.records] == ["a/0: c/0/0: its index is cut off"]


def test_a_bug_is_eio_and_a_traceback_and_the_mount_goes_on(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    def bug(number: int, offset: int, size: int) -> bytes:
        raise ZeroDivisionError("what?")

    kernel.lookup(b"zarr.json")
    kernel.tree.read = bug
    assert [kernel.read(DOCUMENT, 0, 10).error for _ in range(3)] == [errno.EIO] * 3
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert kernel.lookup(b"zarr.json").error == 0


def test_bytes_are_counted_before_they_are_there(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a mount would not have served what somebody has read already."""
    told, writev = threading.Event(), os.writev

    def slow(fd: int, parts: Any) -> int:
        sent = writev(fd, parts)
        told.wait(60)
        return sent

    kernel.lookup(b"zarr.json")
    monkeypatch.setattr(os, "writev", slow)
    assert kernel.read(DOCUMENT, 0, 10).error == 0
    try:
        assert kernel.server.counts().nbytes == 5
    finally:
        told.set()


# ---- threads


class Slow:
    """A store that answers when it is told to, and says how many wait for it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self.arrived, self.answers = kernel, threading.Semaphore(0), threading.Semaphore(0)
        self.threads: set[int] = set()
        kernel.lookup(b"zarr.json")
        kernel.tree.read = self.read

    def read(self, number: int, offset: int, size: int) -> bytes:
        if not offset:
            return b"at once"
        self._kernel.waiting()
        self.threads.add(threading.get_ident())
        self.arrived.release()
        assert self.answers.acquire(timeout=60)
        return b"%d" % offset

    def ask(self, offset: int) -> int:
        return self._kernel.send(protocol.READ, DOCUMENT, read_body(offset, 10))


def test_who_waits_for_the_store_holds_up_nobody_else(kernel: Kernel) -> None:
    slow = Slow(kernel)
    offsets = {slow.ask(offset): offset for offset in range(1, 9)}
    for _ in offsets:
        assert slow.arrived.acquire(timeout=60)
    assert kernel.read(DOCUMENT, 0, 10).body == b"at once"
    assert kernel.lookup(b"zarr.json").error == 0
    slow.answers.release(len(offsets))
    replies = [kernel.receive() for _ in offsets]
    assert {reply.unique: int(reply.body) for reply in replies} == offsets
    assert len(slow.threads) == 8


def test_threads_are_used_again(kernel: Kernel) -> None:
    slow = Slow(kernel)
    for offset in range(1, 30):
        slow.ask(offset)
        assert slow.arrived.acquire(timeout=60)
        slow.answers.release()
        assert kernel.receive().body == b"%d" % offset
        wait_until(lambda: kernel.server.load()["waiting"] == 0)  # who has answered is there for the next one
    assert len(slow.threads) <= 3


def test_the_end_does_not_wait_for_the_store() -> None:
    with serving() as kernel:
        slow = Slow(kernel)
        slow.ask(1)
        assert slow.arrived.acquire(timeout=60)
        kernel.hang_up()
        slow.answers.release()


def test_no_more_threads_than_allowed() -> None:
    with serving(threads=3) as kernel:
        slow = Slow(kernel)
        offsets = {slow.ask(offset): offset for offset in range(1, 7)}
        for _ in range(2):
            assert slow.arrived.acquire(timeout=60)
        assert not slow.arrived.acquire(timeout=0.2)
        # All that may wait do so, and others are still answered.
        assert kernel.read(DOCUMENT, 0, 10).body == b"at once"
        assert kernel.lookup(b"zarr.json").error == 0
        slow.answers.release(len(offsets))
        assert {reply.unique: int(reply.body) for reply in (kernel.receive() for _ in offsets)} == offsets
        assert len(slow.threads) <= 3
        assert kernel.read(DOCUMENT, 0, 10).body == b"at once"


def test_requests_that_want_what_a_postponed_one_was_to_load() -> None:
    """The leader gives up its load; who waited for that load asks again, and nobody sees an error."""
    with serving(threads=3) as kernel:
        slow = Slow(kernel)
        cache = ByteLRU(1 << 20, kernel.waiting)

        def read(number: int, offset: int, size: int) -> bytes:
            if not offset:
                return b"at once"
            key = offset % 3
            return cache.get(key, lambda: (slow.read(number, offset, size)[:0] + b"%d" % key, 100, math.inf))

        kernel.tree.read = read
        offsets = {slow.ask(offset): offset for offset in range(1, 60)}
        for _ in range(2):
            assert slow.arrived.acquire(timeout=60)
        assert kernel.read(DOCUMENT, 0, 10).body == b"at once"
        slow.answers.release(len(offsets))
        assert {r.unique: int(r.body) for r in (kernel.receive() for _ in offsets)} == {
            unique: offset % 3 for unique, offset in offsets.items()
        }


def test_a_postponed_request_has_one_line_in_the_access_log(tmp_path: Path) -> None:
    with serving(access=AccessLog.open(str(tmp_path / "log")), threads=3) as kernel:
        slow = Slow(kernel)
        offsets = {slow.ask(offset): offset for offset in range(1, 20)}
        for _ in range(2):
            assert slow.arrived.acquire(timeout=60)
        assert kernel.read(DOCUMENT, 0, 10).body == b"at once"
        assert kernel.server.load()["postponed"] > 0
        slow.answers.release(len(offsets))
        assert {kernel.receive().unique for _ in offsets} == offsets.keys()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(line["offset"] for line in lines if line.get("offset")) == sorted(offsets.values())
    assert {line["errno"] for line in lines} == {0}


def test_one_thread_alone_serves_as_well() -> None:
    with serving(threads=1) as kernel:
        slow = Slow(kernel)
        slow.answers.release(4)
        for offset in range(1, 5):
            slow.ask(offset)
            assert kernel.receive().body == b"%d" % offset
        assert len(slow.threads) == 1


def test_after_the_end_no_other_thread_is_taken_for_the_leader() -> None:
    """The system gives a new thread the number of one that has ended. A publisher that starts then must not fail."""
    with serving() as kernel:
        leaders: list[int] = []

        def read(number: int, offset: int, size: int) -> bytes:
            leaders.append(threading.get_ident())
            return b"x"

        kernel.tree.read = read
        kernel.lookup(b"zarr.json")
        kernel.read(DOCUMENT, 0, 10)
        (leader,) = (thread for thread in threading.enumerate() if thread.ident == leaders[0])
        kernel.hang_up()
        leader.join(60)
        postponed = kernel.server.load()["postponed"]

        def publish() -> int:
            kernel.waiting()
            return threading.get_ident()

        idents: list[int] = []
        while leaders[0] not in idents:
            assert len(idents) < 1000
            with ThreadPoolExecutor(1) as publisher:
                idents.append(publisher.submit(publish).result(60))
        assert kernel.server.load()["postponed"] == postponed == 0


def test_the_end_of_a_mount_is_no_place_to_hand_over_the_lead() -> None:
    """What is done at the end may wait, in the thread that was the last leader."""
    ended = list[str]()

    def end(kernel: Kernel) -> None:
        kernel.waiting()
        ended.append(threading.current_thread().name)

    with serving(on_end=end) as kernel:
        kernel.lookup(b"zarr.json")
    assert ended == ["shardfs-1"]


def test_without_another_thread_the_only_one_waits_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as kernel:
        slow = Slow(kernel)
        starts = FailingStarts(monkeypatch)
        slow.answers.release(2)
        for offset in (1, 2):
            slow.ask(offset)
            assert kernel.receive().body == b"%d" % offset
        assert kernel.server.load() == {"threads": 1, "waiting": 0, "postponed": 0}
        assert ["cannot start thread 2 of" in record.getMessage() for record in caplog.records] == [True]
        starts.fails = False
        unique = slow.ask(3)
        assert slow.arrived.acquire(timeout=60)
        assert slow.arrived.acquire(timeout=60)
        assert slow.arrived.acquire(timeout=60)
        assert kernel.lookup(b"zarr.json").error == 0
        slow.answers.release()
        assert kernel.receive() == Reply(unique, 0, b"3")


def test_without_a_third_thread_requests_wait_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as kernel:
        slow = Slow(kernel)
        offsets = {slow.ask(1): 1}
        assert slow.arrived.acquire(timeout=60)
        FailingStarts(monkeypatch)
        offsets |= {slow.ask(offset): offset for offset in (2, 3)}
        assert kernel.read(DOCUMENT, 0, 10).body == b"at once"
        assert kernel.lookup(b"zarr.json").error == 0
        assert kernel.server.load() == {"threads": 2, "waiting": 1, "postponed": 2}
        slow.answers.release(len(offsets))
        assert {reply.unique: int(reply.body) for reply in (kernel.receive() for _ in offsets)} == offsets


@pytest.mark.parametrize("poll_us", [0, 200])
def test_an_idle_mount_sleeps(poll_us: int) -> None:
    with serving(poll_us=poll_us) as kernel:
        for _ in range(50):
            kernel.lookup(b"zarr.json")
        start_s, cpu_start_s = time.monotonic(), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - cpu_start_s < 0.2 * (time.monotonic() - start_s)
        assert kernel.lookup(b"zarr.json").error == 0
