"""A writable mount's answers, taken apart: what a kernel cannot be made to show, or only with luck."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import pytest

from shardfs.fuse import control, protocol
from shardfs.fuse.leadership import Postponed
from shardfs.fuse.write_requests import NameRequests
from shardfs.vfs.inodes import ROOT
from tests import handmade
from tests.mount.test_server import ATTR, Kernel, Reply, entries, serving
from tests.waiting import wait_until
from tests.write.engines import mounted
from tests.write.semantics import cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.model.attributes import Attributes


class Writer:
    """Asks what programs make a kernel ask."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tree: Any = kernel.tree
        self.directory = ROOT

    @property
    def handles(self) -> int:
        """The number of open files."""
        return len(self.tree._calls._open_files.handles)

    def look_up(self, *names: bytes) -> int:
        """The number of a file or directory below the root."""
        number = ROOT
        for name in names:
            (number,) = struct.unpack_from("=Q", self.ask(protocol.LOOKUP, number, name + b"\0").body)
        return number

    def ask(self, opcode: int, node: int, body: bytes = b"") -> Reply:
        return self.kernel.ask(opcode, node, body)

    def create(self, name: bytes, flags: int = os.O_CREAT | os.O_WRONLY, mode: int = 0o100644) -> tuple[int, int]:
        """Number and handle."""
        reply = self.ask(protocol.CREATE, self.directory, struct.pack("=IIII", flags, mode, 0o022, 0) + name + b"\0")
        assert reply.error == 0, errno.errorcode[reply.error]
        (number,) = struct.unpack_from("=Q", reply.body)
        (handle,) = struct.unpack_from("=Q", reply.body, 128)
        return number, handle

    def open(self, number: int, flags: int) -> Reply:
        return self.ask(protocol.OPEN, number, struct.pack("=II", flags, 0))

    def write(self, number: int, handle: int, offset: int, data: bytes) -> Reply:
        head = struct.pack("=QQIIQII", handle, offset, len(data), 0, 0, 0, 0)
        return self.ask(protocol.WRITE, number, head + data)

    def setattr(self, number: int, valid: int, **values: int) -> Reply:
        fields = dict.fromkeys(("handle", "size", "lock", "atime", "mtime", "ctime"), 0)
        small = dict.fromkeys(("atime_ns", "mtime_ns", "ctime_ns", "mode", "unused", "uid", "gid", "padding"), 0)
        fields |= {name: value for name, value in values.items() if name in fields}
        small |= {name: value for name, value in values.items() if name in small}
        body = struct.pack("=II6Q8I", valid, 0, *fields.values(), *small.values())
        return self.ask(protocol.SETATTR, number, body)

    def opendir(self) -> int:
        (handle,) = struct.unpack_from("=Q", self.ask(protocol.OPENDIR, self.directory, bytes(8)).body)
        return int(handle)

    def readdir(self, handle: int, offset: int, size: int, *, plus: bool = True) -> list[Any]:
        opcode = protocol.READDIRPLUS if plus else protocol.READDIR
        body = struct.pack("=QQIIQII", handle, offset, size, 0, 0, 0, 0)
        return list(entries(self.ask(opcode, self.directory, body).body, plus=plus))

    def notices(self, count: int) -> list[Reply]:
        return [self.kernel.receive() for _ in range(count)]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Any]:
    """The writable tree of an array with a stored chunk, `c/0/0`. Other files are passed through."""
    handmade.write_files(tmp_path / "source", cases.SOURCES["zarr"]())
    (tmp_path / "journal").mkdir(mode=0o700)
    with mounted(tmp_path / "source", tmp_path / "journal") as files:
        yield files.tree


@pytest.fixture
def writer(tree: Any) -> Iterator[Writer]:
    with serving(tree, rw=True, file_mode=0o644, dir_mode=0o755) as kernel:
        yield Writer(kernel)


def test_a_file_is_created_written_and_read(writer: Writer) -> None:
    number, handle = writer.create(b"f")
    assert struct.unpack("=II", writer.write(number, handle, 0, b"hello").body) == (5, 0)
    assert writer.kernel.read(number, 1, 100).body == b"ello"
    for opcode in (protocol.FLUSH, protocol.FSYNC, protocol.RELEASE):
        assert writer.ask(opcode, number, struct.pack("=QIIQ", handle, 0, 0, 0)) == Reply(ANY, 0, b"")
    assert writer.handles == 0


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


ANY: Any = _Any()


def test_only_handles_that_read_are_not_flushed(writer: Writer) -> None:
    number, _ = writer.create(b"f")
    keep, quiet = protocol.OPEN_KEEP_CACHE, protocol.OPEN_KEEP_CACHE | protocol.OPEN_NO_FLUSH
    for flags, wanted in (
        (os.O_RDONLY, quiet),
        (os.O_RDONLY | os.O_TRUNC, keep),
        (os.O_WRONLY, keep),
        (os.O_RDWR | os.O_APPEND, keep),
    ):
        assert struct.unpack_from("=QI", writer.open(number, flags).body)[1] == wanted


def test_a_handle_that_nobody_got_is_released(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    number, _ = writer.create(b"f")
    before = writer.handles
    unsent = threading.Event()

    def gone(fd: int, data: object) -> int:
        unsent.set()
        raise OSError(errno.ENOENT, "interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", gone)
        writer.kernel.send(protocol.OPEN, number, struct.pack("=II", os.O_RDWR, 0))
        assert unsent.wait(30)
        wait_until(lambda: writer.handles == before)


def test_nothing_is_done_by_half(writer: Writer) -> None:
    """Who may not change the owner changes nothing else in the same request."""
    number, handle = writer.create(b"f")
    writer.write(number, handle, 0, b"content")
    stranger = os.getuid() + 1
    both = protocol.SET_SIZE | protocol.SET_UID
    assert writer.setattr(number, both, size=0, uid=stranger).error == errno.EPERM
    assert writer.setattr(number, protocol.SET_SIZE | protocol.SET_MODE, size=0, mode=0o4755).error == errno.EPERM
    assert writer.kernel.read(number, 0, 10).body == b"content"
    assert writer.setattr(number, both, size=3, uid=os.getuid()).error == 0
    assert writer.kernel.read(number, 0, 10).body == b"con"


def test_times(writer: Writer) -> None:
    number, _ = writer.create(b"f")
    for seconds, nanoseconds in ((1, 2), (2**33, 5), (2**64 - 5, 7)):  # the last is before 1970
        reply = writer.setattr(number, protocol.SET_MTIME, mtime=seconds, mtime_ns=nanoseconds)
        told = struct.unpack("=QII" + ATTR, reply.body)
        signed = seconds - 2**64 if seconds >= 2**63 else seconds
        assert (told[7], told[10]) == (signed, nanoseconds)
        assert writer.tree.attributes(number).mtime_ns == signed * 10**9 + nanoseconds


def _names(old: bytes, new: bytes, flags: int) -> bytes:
    return struct.pack("=QII", ROOT, flags, 0) + old + b"\0" + new + b"\0"


@pytest.mark.parametrize("failure", [None, errno.ENOSPC])
def test_a_file_that_mknod_makes_has_no_handle(
    failure: int | None, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    if failure is not None:
        monkeypatch.setattr(writer.tree, "flush", fail)
    node = struct.pack("=IIII", stat.S_IFREG | 0o644, 0, 0, 0) + b"f\0"
    assert writer.ask(protocol.MKNOD, ROOT, node).error == (failure or 0)
    assert writer.handles == 0


def test_mknod_waits_before_it_makes_a_file(tree: Any) -> None:
    """A request that has to wait may be dropped and repeated, and would find the file that it has made itself."""
    waiting = Mock(side_effect=Postponed)
    request = bytes(protocol.BODY) + struct.pack("=IIII", stat.S_IFREG | 0o644, 0, 0, 0) + b"f\0"
    requests = NameRequests(tree, Mock(), Mock(request=memoryview(request)), Mock(), waiting)
    with pytest.raises(Postponed):
        requests.handlers()[protocol.MKNOD](1, ROOT, len(request))
    with pytest.raises(FileNotFoundError):
        tree.lookup(ROOT, b"f")


def test_publishing_is_asked_for(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    set_xattr = Mock()
    monkeypatch.setattr(writer.tree, "set_xattr", set_xattr)
    body = struct.pack("=II", 2, 0) + b"user.shardfs.flush\x0060"
    assert writer.ask(protocol.SETXATTR, ROOT, body).error == 0
    set_xattr.assert_called_once_with(ROOT, "user.shardfs.flush", b"60", 0)


def test_the_mount_itself_cannot_be_changed(writer: Writer) -> None:
    control_name, inside = control.NAME + b"\0", control.DIRECTORY
    for opcode, node, body in (
        (protocol.CREATE, ROOT, bytes(16) + control_name),
        (protocol.MKDIR, ROOT, bytes(8) + control_name),
        (protocol.UNLINK, ROOT, control_name),
        (protocol.RMDIR, ROOT, control_name),
        (protocol.RENAME2, ROOT, _names(b"a", control.NAME, 0)),
        (protocol.CREATE, inside, bytes(16) + b"x\0"),
        (protocol.UNLINK, inside, b"status.json\0"),
        (protocol.LINK, ROOT, struct.pack("=Q", inside + 1) + b"x\0"),
        (protocol.SETATTR, inside, bytes(88)),
        (protocol.OPEN, inside + 1, struct.pack("=II", os.O_RDWR, 0)),
    ):
        assert writer.ask(opcode, node, body).error == errno.EPERM, protocol.NAMES[opcode]
    assert writer.open(inside + 1, os.O_RDONLY).error == 0
    for opcode in (protocol.FLUSH, protocol.RELEASE, protocol.FSYNC, protocol.FSYNCDIR):
        assert writer.ask(opcode, inside + 1, bytes(24)).error == 0


# ---- what the kernel is told is true when it arrives


@pytest.fixture
def chunk(writer: Writer) -> tuple[int, int]:
    """Number and handle of a chunk that lies in a shard until it is written to."""
    number = writer.look_up(b"c", b"0", b"0")
    (handle,) = struct.unpack_from("=Q", writer.open(number, os.O_RDWR).body)
    return number, handle


def test_attributes_that_are_kept_do_not_outlive_a_change(writer: Writer, chunk: tuple[int, int]) -> None:
    number, handle = chunk
    assert writer.kernel.read(number, 0, 100).body == cases.STORED
    writer.write(number, handle, 0, b"NEW!!")
    assert writer.kernel.read(number, 0, 100).body == b"NEW!!"
    writer.look_up(b"c", b"0", b"0")
    writer.setattr(number, protocol.SET_SIZE, size=1)
    assert writer.kernel.read(number, 0, 100).body == b"N"
    writer.look_up(b"c", b"0", b"0")
    writer.open(number, os.O_WRONLY | os.O_TRUNC)
    assert writer.kernel.read(number, 0, 100).body == b""


def test_attributes_that_were_asked_for_before_a_change_are_not_kept_after_it(
    writer: Writer, chunk: tuple[int, int]
) -> None:
    """A look-up waits for the store while another thread answers a write."""
    number, handle = chunk
    directory = writer.look_up(b"c", b"0")
    is_asked, go = threading.Event(), threading.Event()
    lookup = writer.tree.lookup

    def slow(parent: int, name: bytes) -> Attributes:
        found: Attributes = lookup(parent, name)
        if not is_asked.is_set():
            is_asked.set()
            writer.kernel.waiting()
            go.wait(60)
        return found

    writer.tree.__dict__["lookup"] = slow
    unique = writer.kernel.send(protocol.LOOKUP, directory, b"0\0")
    assert is_asked.wait(60)
    writer.write(number, handle, 0, b"NEW!!")
    go.set()
    assert writer.kernel.receive().unique == unique
    assert writer.kernel.read(number, 0, 100).body == b"NEW!!"


def _filled(writer: Writer, count: int = 100) -> list[bytes]:
    """Make files in a directory of their own."""
    names = [b"name%03d" % i for i in range(count)]
    writer.ask(protocol.MKDIR, ROOT, struct.pack("=II", 0o755, 0o022) + b"d\0")
    writer.directory = writer.look_up(b"d")
    for name in names:
        writer.create(name)
    return names


def test_a_listing_tells_attributes_until_something_changes(writer: Writer) -> None:
    names = _filled(writer)
    handle = writer.opendir()
    first = writer.readdir(handle, 0, 4096)
    assert all(entry.node for entry in first[2:])
    writer.create(b"another")
    tail, position = [], first[-1].position
    while page := writer.readdir(handle, position, 4096):
        tail += page
        position = page[-1].position
    assert [entry.name for entry in first[2:] + tail if entry.name != b"another"] == names
    assert not any(entry.node for entry in tail)
    assert all(entry.ino for entry in tail)
    # From the beginning again, the kernel is told all.
    again = writer.readdir(handle, 0, 1 << 20)
    assert all(entry.node for entry in again[2:])
    assert b"another" in [entry.name for entry in again]


@pytest.mark.parametrize("plus", [True, False])
def test_a_listing_goes_on_at_any_position(writer: Writer, plus: bool) -> None:
    names = _filled(writer)
    handle = writer.opendir()
    whole = writer.readdir(handle, 0, 1 << 20, plus=plus)
    assert [entry.name for entry in whole] == [b".", b"..", *names]
    for at in (0, 1, 2, 50, 99, 3, 100):
        tail = writer.readdir(handle, whole[at].position, 1 << 20, plus=plus)
        assert [entry.name for entry in tail] == [entry.name for entry in whole[at + 1 :]]
    assert writer.readdir(handle, whole[-1].position, 4096, plus=plus) == []
    writer.ask(protocol.RELEASEDIR, writer.directory, struct.pack("=QIIQ", handle, 0, 0, 0))


def test_what_the_listing_told_is_remembered(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(writer, 3)
    remember = Mock(wraps=writer.tree.remember)
    monkeypatch.setattr(writer.tree, "remember", remember)
    listed = writer.readdir(writer.opendir(), 0, 4096)[2:]
    assert remember.mock_calls == [call(entry.node) for entry in listed]


def test_the_kernel_is_told_of_changes_that_it_did_not_make(writer: Writer) -> None:
    writer.create(b"f")
    writer.tree.hooks.invalidate(ROOT, b"f")
    (told,) = writer.notices(1)
    assert (told.unique, -told.error) == (0, 3)
    assert told.body == struct.pack("=QII", ROOT, 1, 0) + b"f\0"
    writer.tree.hooks.invalidate_content(5)
    (told,) = writer.notices(1)
    assert (told.unique, -told.error) == (0, 2)
    assert told.body == struct.pack("=Qqq", 5, 0, 0)


def test_a_request_that_was_postponed_is_done_once(tree: Any) -> None:
    """All threads wait; what changes something then waits as a whole."""
    gates = [threading.Event() for _ in range(20)]
    turns = iter(gates)

    def fsync(handle: int) -> None:
        kernel.waiting()
        next(turns).wait(60)

    tree.fsync = fsync
    with serving(tree, rw=True, file_mode=0o644, dir_mode=0o755) as kernel:
        number, handle = Writer(kernel).create(b"f")
        requests = [kernel.send(protocol.FSYNC, number, struct.pack("=QIIQ", handle, 0, 0, 0)) for _ in gates]
        kernel.send(protocol.GETATTR, ROOT, bytes(16))
        assert kernel.receive().error == 0  # someone answers
        for gate in gates:
            gate.set()
        assert sorted(kernel.receive().unique for _ in requests) == sorted(requests)
        assert next(turns, None) is None
