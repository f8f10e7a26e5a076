"""libfuse 3 and the kernel's FUSE protocol: mount, negotiate, decode requests, encode replies. No policy.

libfuse mounts (through fusermount3 where necessary), negotiates the protocol, and unmounts. Requests are read from the
session's descriptor and answered on it directly, as packed structs. That costs half a microsecond; a ctypes callback
and reply cost three. Also, the kernel's structs never change, while libfuse's (`fuse_file_info`, `fuse_conn_info`)
moved fields in 3.15 and 3.17. See docs/decisions/0004-requests-are-answered-without-libfuse.md.

Struct layouts are those of `include/uapi/linux/fuse.h`, protocol 7.23 and later, in the byte order of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardfs.errors import MountError
from shardfs.mount_calls import attach, clone, detach
from shardfs.mounts import mount_number, mounted_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

    from shardfs import mounts
    from shardfs.model import U64, Batch, Entry

# Opcodes
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, GETXATTR, LISTXATTR = 1, 2, 3, 14, 15, 17, 18, 22, 23
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, IOCTL, BATCH_FORGET, READDIRPLUS = 26, 27, 28, 29, 36, 39, 42, 44
SETATTR, READLINK, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE = 4, 5, 6, 8, 9, 10, 11, 12, 13, 16
FSYNC, FLUSH, FSYNCDIR = 20, 25, 30
SETXATTR, REMOVEXATTR, CREATE, FALLOCATE, RENAME2, COPY_FILE_RANGE, TMPFILE = 21, 24, 35, 43, 45, 47, 51
MODIFYING = (SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, SETXATTR, REMOVEXATTR, CREATE,
             FALLOCATE, RENAME2, COPY_FILE_RANGE, TMPFILE)  # fmt: skip

NAMES = {
    LOOKUP: "lookup", FORGET: "forget", GETATTR: "getattr", OPEN: "open", READ: "read", STATFS: "statfs",
    RELEASE: "release", GETXATTR: "getxattr", LISTXATTR: "listxattr", INIT: "init", OPENDIR: "opendir",
    READDIR: "readdir", RELEASEDIR: "releasedir", INTERRUPT: "interrupt", IOCTL: "ioctl",
    BATCH_FORGET: "batch_forget", READDIRPLUS: "readdirplus", SETATTR: "setattr", SYMLINK: "symlink", MKNOD: "mknod",
    MKDIR: "mkdir", UNLINK: "unlink", RMDIR: "rmdir", RENAME: "rename", LINK: "link", WRITE: "write",
    SETXATTR: "setxattr", REMOVEXATTR: "removexattr", CREATE: "create", FALLOCATE: "fallocate", RENAME2: "rename2",
    COPY_FILE_RANGE: "copy_file_range", TMPFILE: "tmpfile", READLINK: "readlink", FSYNC: "fsync", FLUSH: "flush",
    FSYNCDIR: "fsyncdir", 31: "getlk", 32: "setlk", 33: "setlkw", 34: "access", 37: "bmap", 38: "destroy", 40: "poll",
    46: "lseek", 52: "statx",
}  # fmt: skip
"""Names of opcodes, for the access log and metrics."""

OPEN_DIRECT_IO, OPEN_KEEP_CACHE, OPEN_NO_FLUSH = 1, 2, 1 << 5  # flags of fuse_open_out

# Which fields a SETATTR sets
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_MTIME, SET_HANDLE, SET_MTIME_NOW = 1, 2, 4, 8, 1 << 5, 1 << 6, 1 << 8

RENAME_NOREPLACE = 1

NAME_MAX = 255
"""Maximum length of a name in bytes. The kernel does not check it."""

MAX_TRANSFER = 1 << 20
"""Maximum bytes of data in one request; libfuse derives the kernel's pages per request from it."""

REQUEST_BUFFER = MAX_TRANSFER + 4096
"""Size of a request buffer: the kernel refuses smaller ones, although only WRITE would fill it."""

# Requests. Offsets count from the start of the request, whose header has 40 bytes.
BODY = 40
HEADER_IN = Struct("=IIQQ")  # length, opcode, unique, node
CALLER, CALLER_IN = 24, Struct("=III")  # in the header: user, group, process
FORGET_IN = Struct("=Q")  # number of references
BATCH_FORGET_IN = Struct("=I4x")  # count; then pairs of node and number of references
READ_IN = Struct("=8xQI")  # offset, size (of READ, READDIR, READDIRPLUS)
READDIR_IN = Struct("=QQI")  # handle, offset, size
HANDLE_IN = Struct("=Q")  # the first field of RELEASE, FLUSH, FSYNC, RELEASEDIR, FSYNCDIR
OPEN_IN = Struct("=I4x")  # flags
CREATE_IN = Struct("=III4x")  # flags, mode, umask; then the name
MKNOD_IN = Struct("=III4x")  # mode, device, umask; then the name
MKDIR_IN = Struct("=II")  # mode, umask; then the name
WRITE_IN = Struct("=QQI20x")  # handle, offset, size; then the data
SETATTR_IN = Struct("=I4xQQ16xq12xI4xI4xII4x")  # fields set, handle, size, mtime, its nsec, mode, user, group
RENAME_IN, RENAME2_IN = Struct("=Q"), Struct("=QI4x")  # new directory, flags; then both names
LINK_IN = Struct("=Q")  # node; then the name
FALLOCATE_IN = Struct("=QQQI4x")  # handle, offset, size, mode
SETXATTR_IN = Struct("=II")  # size, flags; then the name and the value
GETXATTR_IN = Struct("=I4x")  # size; then the name

# Replies
HEADER_OUT = Struct("=IiQ")  # length, -errno, unique
HEADER_SIZE = HEADER_OUT.size
_ATTR = "QQQqqqIIIIIIIIII"  # ino size blocks atime mtime ctime their-nsec*3 mode nlink uid gid rdev blksize flags
_ENTRY_OUT = Struct("=IiQ" + "QQQQII" + _ATTR)  # node, generation, entry and attribute timeout, their nsec
_DIRENTPLUS = Struct("=" + "QQQQII" + _ATTR + "QQII")  # fuse_entry_out, then ino, offset, length and type of the name
_SHORT_DIRENTPLUS = Struct("=Q32sQQQqqqIII28sQQII8s")  # with a short name; common parts are strings of bytes
_DOTS_PLUS = Struct("=128xQQII8s128xQQII8s")  # two by name only
_DIRENT = Struct("=" + "QQII8s")  # ino, offset, length and type of a name; a short name
_ATTR_OUT = Struct("=IiQ" + "QII" + _ATTR)  # attribute timeout, its nsec
SHORT_RECORD = _SHORT_DIRENTPLUS.size
_UNIQUE = Struct("=Q")  # `unique`, at byte 8 of every reply
_UNIQUE_NODE = Struct("=QQ")  # `unique` and node of a reply with an entry
_ATTR_START = Struct("=QQQqqqIII")  # the fields that differ from file to file
_OPEN_OUT = Struct("=IiQ" + "QI4x")  # handle, flags
_STATFS_OUT = Struct("=IiQ" + "QQQQQIII28x")  # blocks free available files ffree bsize namelen frsize
_XATTR_SIZE_OUT = Struct("=IiQ" + "I4x")
_WRITE_OUT = Struct("=IiQ" + "I4x")
_CREATE_OUT = Struct("=QI4x")  # follows an entry: handle, flags
_INVALID_ENTRY, _INVALID_INODE = Struct("=IiQ" + "QI4x"), Struct("=IiQ" + "Qqq")
_NOTIFY_INODE, _NOTIFY_ENTRY = 2, 3
_MODE = Struct("=I")
_ENTRY_MODE, _ATTR_MODE = 116, 92  # byte offsets in the replies

BLOCK = 4096  # st_blksize: the buffer size that many programs use

# Capabilities that INIT requests or declines (FUSE_CAP_*; the numbers are part of libfuse's ABI)
_CAP_READDIRPLUS, _CAP_READDIRPLUS_AUTO = 1 << 13, 1 << 14
_CAP_SPLICE = 1 << 7 | 1 << 8 | 1 << 9

# Flags of INIT itself, at this offset of both its request and its reply.
_INIT_FLAGS, _INIT_AT = Struct("=I"), 12
_HANDLE_KILLPRIV_V2 = 1 << 28
"""Files of a mount cannot be set-user-id, so the kernel need not ask before each write which bits to remove. libfuse
supports this flag since 3.17."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that INIT negotiates with the kernel, in bytes and requests; 0 keeps the kernel's default."""

    max_read: int = 0
    max_readahead: int = 0
    max_background: int = 0


class Session:
    """One mount. Use it in this order: construct, `mount`, `negotiate`, serve `fd`, `unmount`, `close`.

    In the place of a dead mount: construct, `mount_detached`, `negotiate`, serve `fd`, `replace`, `unmount`, `close`.
    """

    def __init__(self, options: Sequence[str], limits: Limits) -> None:
        """`options` are mount options, `key` or `key=value`, as mount.fuse3(8) knows them."""
        self._fuse = _libfuse()
        self._limits = limits
        self._negotiated = False
        if limits.max_read:
            options = [*options, f"max_read={limits.max_read}"]  # libfuse wants it here and in INIT
        argv = (ctypes.c_char_p * 3)(
            b"shardfs", b"-o", ",".join(map(_escaped, options)).encode("utf8", "surrogateescape")
        )
        self._arguments = (_Arguments(3, argv, 0), argv)
        # The table of operations is a list of pointers that begins with `init`; a shorter one is allowed.
        self._init = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self._on_init)
        operations = ctypes.cast(self._init, ctypes.c_void_p)
        with _stderr() as said:
            self._handle = self._fuse.new(self._arguments[0], ctypes.byref(operations), ctypes.sizeof(operations), None)
        if not self._handle:
            raise MountError(errno.EINVAL, _reason(said, "libfuse refused the mount options"))
        self.fd = -1
        self._detached = -1
        self._attached: list[tuple[str, int]] = []  # what `replace` leaves to `unmount`: mountpoint and number

    def mount(self, mountpoint: str) -> None:
        """Mount; requests can be read from `fd` afterwards, INIT first (`negotiate` does that)."""
        with _stderr() as said:
            failed = self._fuse.mount(self._handle, os.fsencode(mountpoint))
        if failed:
            why = _reason(said, "the kernel refused the mount")
            raise MountError(errno.EIO, f"cannot mount: {why}; `shardfs doctor` looks for the cause", mountpoint)
        # Our own descriptor: libfuse closes its one in `unmount`, while a thread may still be reading.
        self.fd = os.dup(self._fuse.fd(self._handle))

    def mount_detached(self) -> None:
        """As `mount`, but where no path leads. Only root may, from Linux 5.2 on: raise OSError (EPERM, ENOSYS)."""
        place = tempfile.mkdtemp(prefix="shardfs-")
        try:
            os.close(clone(place))  # raises while nothing is mounted yet
            self.mount(place)
            try:
                self._detached = clone(place)
            finally:
                detach(place, lazy=True)
        finally:
            os.rmdir(place)

    def replace(self, dead: mounts.Entry) -> None:
        """Attach what `mount_detached` has made in the place of a dead mount.

        At each moment clients see one of the two mounts, never the directory below them.
        """
        here = dead.mountpoint
        self._attached = [(here, mount_number(self._detached)), (here, dead.number)]
        try:
            attach(self._detached, here, beneath=True)
        except MountError as e:
            if e.errno != errno.EINVAL:
                raise
            attach(self._detached, here, beneath=False)  # before Linux 6.5; `unmount` detaches the dead one as well
        else:
            _detach_top(*self._attached.pop())
        os.close(self._detached)

    def negotiate(self) -> None:
        """Answer INIT. The mount serves from then on."""
        buffer = ctypes.create_string_buffer(REQUEST_BUFFER)
        while not self._negotiated:
            size = os.readv(self.fd, [buffer])
            request = self._fuse.Buffer(size=size, mem=ctypes.addressof(buffer))
            with self._intercepted() as reply:
                self._fuse.process(self._handle, ctypes.byref(request))
                told = bytearray(reply())
            if self._negotiated:
                _accept(told, HEADER_SIZE + _INIT_AT, buffer.raw[:size], BODY + _INIT_AT)
            os.write(self.fd, told)

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[Callable[[], bytes]]:
        """Intercept libfuse's reply: gives a function that returns the reply, which is not sent to the kernel."""
        fd = self._fuse.fd(self._handle)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            os.dup2(theirs.fileno(), fd, inheritable=False)
            try:
                yield lambda: ours.recv(MAX_TRANSFER)
            finally:
                os.dup2(self.fd, fd, inheritable=False)

    def unmount(self) -> None:
        """Detach the mount, if it is still there. Programs that have files open on it keep it alive."""
        if self._detached < 0:
            self._fuse.unmount(self._handle)
        while self._attached:
            _detach_top(*self._attached.pop(0))

    def close(self) -> None:
        """Free everything. No thread may be serving `fd` any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._fuse.destroy(self._handle)

    def _on_init(self, _userdata: int, connection: int) -> None:
        conn = ctypes.cast(connection, self._fuse.Connection).contents
        # Not READDIRPLUS_AUTO: find, du and cp list first and stat later, which makes the kernel guess wrong.
        conn.want = (conn.want | conn.capable & _CAP_READDIRPLUS) & ~(_CAP_READDIRPLUS_AUTO | _CAP_SPLICE)
        conn.max_write = MAX_TRANSFER
        conn.max_read = self._limits.max_read
        if self._limits.max_readahead:
            conn.max_readahead = min(conn.max_readahead, self._limits.max_readahead)
        if self._limits.max_background:
            conn.max_background = self._limits.max_background
        self._negotiated = True


def _detach_top(mountpoint: str, number: int) -> None:
    """Detach the mount of this number, if it is still the topmost one: another one may be there by now."""
    top = mounted_at(mountpoint)
    if top is not None and top.number == number:
        detach(mountpoint, lazy=True)


def _accept(reply: bytearray, at: int, request: bytes, offered_at: int) -> None:
    """Add the flags to an INIT reply that the kernel offers and libfuse does not know."""
    (offered,), (accepted,) = _INIT_FLAGS.unpack_from(request, offered_at), _INIT_FLAGS.unpack_from(reply, at)
    _INIT_FLAGS.pack_into(reply, at, accepted | offered & _HANDLE_KILLPRIV_V2)


class _Arguments(ctypes.Structure):
    _fields_ = (("argc", ctypes.c_int), ("argv", ctypes.POINTER(ctypes.c_char_p)), ("allocated", ctypes.c_int))


class _Library:
    """The functions of libfuse that are used, and the two structs that mfusepy defines for every version of it."""

    def __init__(self, mfusepy: ModuleType, library: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.Buffer: Any = mfusepy.fuse_buf
        self.Connection: Any = ctypes.POINTER(mfusepy.fuse_conn_info)

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, f"fuse_session_{name}")
            found.restype, found.argtypes = result, arguments
            return found

        self.new = function("new", pointer, ctypes.POINTER(_Arguments), pointer, ctypes.c_size_t, pointer)
        self.mount = function("mount", integer, pointer, ctypes.c_char_p)
        self.fd = function("fd", integer, pointer)
        self.process = function("process_buf", None, pointer, ctypes.POINTER(mfusepy.fuse_buf))
        self.unmount = function("unmount", None, pointer)
        self.destroy = function("destroy", None, pointer)


@functools.cache
def _libfuse() -> _Library:
    """Load libfuse 3. By default, mfusepy would load libfuse 2 if installed, and run compilers to find it."""
    for name in ("libfuse3.so.4", "libfuse3.so.3"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            break
    else:
        raise MountError(errno.ENOENT, "libfuse 3 is not installed: apt install fuse3")
    before = os.environ.get("FUSE_LIBRARY_PATH")
    os.environ["FUSE_LIBRARY_PATH"] = name
    try:
        import mfusepy
    finally:
        if before is None:
            del os.environ["FUSE_LIBRARY_PATH"]
        else:
            os.environ["FUSE_LIBRARY_PATH"] = before
    return _Library(mfusepy, library)


def _escaped(option: str) -> str:
    return option.replace("\\", "\\\\").replace(",", "\\,")


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """Collect what libfuse and fusermount3 write to standard error, the only place where they give reasons."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said += file.read().decode("utf8", "replace").split("\n")


def _reason(said: list[str], otherwise: str) -> str:
    return "; ".join(filter(None, map(str.strip, said))) or otherwise


# ---- replies


def error(unique: int, number: int) -> bytes:
    """A reply without data: an errno, or 0 for success."""
    return HEADER_OUT.pack(HEADER_SIZE, -number, unique)


def data(unique: int, size: int) -> bytes:
    """The header of a reply with `size` bytes of data, which the caller appends."""
    return HEADER_OUT.pack(HEADER_SIZE + size, 0, unique)


def opened(unique: int, flags: int, handle: int = 0) -> bytes:
    """A reply to OPEN and OPENDIR."""
    return _OPEN_OUT.pack(_OPEN_OUT.size, 0, unique, handle, flags)


def created(entry: bytearray, flags: int, handle: int) -> bytes:
    """A reply to CREATE, made from a reply to LOOKUP."""
    (unique,) = _UNIQUE.unpack_from(entry, 8)
    size = len(entry) + _CREATE_OUT.size
    return HEADER_OUT.pack(size, 0, unique) + entry[HEADER_SIZE:] + _CREATE_OUT.pack(handle, flags)


def written(unique: int, size: int) -> bytes:
    """A reply to WRITE."""
    return _WRITE_OUT.pack(_WRITE_OUT.size, 0, unique, size)


def entry_with_mode(reply: bytearray, mode: int) -> bytearray:
    """A copy of a reply of `Encoder.entry` with the permission bits of `mode`, and with its file type if it has one."""
    return _with_mode(reply, _ENTRY_MODE, mode)


def attributes_with_mode(reply: bytearray, mode: int) -> bytearray:
    """As `entry_with_mode`, for a reply of `Encoder.attributes`."""
    return _with_mode(reply, _ATTR_MODE, mode)


def _with_mode(reply: bytearray, where: int, mode: int) -> bytearray:
    own = reply.copy()  # the encoder reuses `reply`
    (before,) = _MODE.unpack_from(own, where)
    _MODE.pack_into(own, where, (stat.S_IFMT(mode) or stat.S_IFMT(before)) | stat.S_IMODE(mode))
    return own


def with_inode(reply: bytearray, inode: int) -> bytearray:
    """Change the inode number in a reply of `Encoder.entry` or `Encoder.attributes`."""
    _UNIQUE.pack_into(reply, 56 if len(reply) == _ENTRY_OUT.size else 32, inode)
    return reply


def forget_entry(parent: int, name: bytes) -> bytes:
    """A message that invalidates a name. Sending it may block until requests about that directory are answered."""
    size = _INVALID_ENTRY.size + len(name) + 1
    return _INVALID_ENTRY.pack(size, _NOTIFY_ENTRY, 0, parent, len(name)) + name + b"\0"


def forget_content(number: int) -> bytes:
    """A message that invalidates a file's attributes and pages. Sending it may block until its READs are answered."""
    return _INVALID_INODE.pack(_INVALID_INODE.size, _NOTIFY_INODE, 0, number, 0, 0)


def xattr_size(unique: int, size: int) -> bytes:
    """A reply to GETXATTR and LISTXATTR of a client that asks for the size it must allocate."""
    return _XATTR_SIZE_OUT.pack(_XATTR_SIZE_OUT.size, 0, unique, size)


def filesystem(unique: int, s: os.statvfs_result) -> bytes:
    """A reply to STATFS."""
    return _STATFS_OUT.pack(
        _STATFS_OUT.size, 0, unique, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax,
        s.f_frsize,
    )  # fmt: skip


def tells_absence(reply: memoryview | bytes | bytearray) -> bool:
    """Return whether a reply is one of `Encoder.absent` that the kernel caches."""
    return len(reply) == _ENTRY_OUT.size and not any(reply[HEADER_SIZE : HEADER_SIZE + 8])


def _timeout(seconds: float) -> tuple[int, int]:
    """Whole seconds and nanoseconds."""
    if seconds >= 1 << 31:  # does not expire
        return 1 << 31, 0
    return int(seconds), int(seconds % 1 * 1e9)


class Encoder:
    """Makes the replies that describe files, given the attributes that all files of a mount share.

    For one thread: the next call of `entry`, `attributes` or `absent` overwrites the reply.
    """

    def __init__(
        self, *, file_mode: int, dir_mode: int, uid: int, gid: int, attr_timeout: float, entry_timeout: float,
        negative_timeout: float,
    ) -> None:  # fmt: skip
        """Modes include the file type. Time-outs are in seconds."""
        self.owner = uid, gid
        files, directories = (file_mode, 1, uid, gid, 0, BLOCK, 0), (dir_mode, 2, uid, gid, 0, BLOCK, 0)
        attr, entry, negative = _timeout(attr_timeout), _timeout(entry_timeout), _timeout(negative_timeout)
        timeouts = (entry[0], attr[0], entry[1], attr[1])
        blank = (0,) * 9
        # Templates, by `directory`. Filling in the fields that differ takes a third of the time of packing all of them.
        self._entries, self._attributes = (
            [bytearray(out.pack(out.size, 0, 0, *head, *blank, *shared)) for shared in (files, directories)]
            for out, head in ((_ENTRY_OUT, (0, 0, *timeouts)), (_ATTR_OUT, (*attr, 0)))
        )
        nothing = (0, 0, negative[0], 0, negative[1], 0, *blank, *(0,) * 7)
        self._absent = bytearray(_ENTRY_OUT.pack(_ENTRY_OUT.size, 0, 0, *nothing))
        self._remembers_absent = any(negative)
        self._rows = [
            np.frombuffer(_DIRENTPLUS.pack(0, 0, *timeouts, *blank, *shared, 0, 0, 0, shared[0] >> 12), np.uint64)
            for shared in (files, directories)
        ]
        self._timeouts = struct.pack("=QQQII", 0, *timeouts)
        self._shared = [struct.pack("=IIIIIII", *shared) for shared in (files, directories)]

    def entry(self, unique: int, number: int, directory: bool, size: int, mtime_ns: int) -> bytearray:
        """A reply to LOOKUP."""
        reply = self._entries[directory]
        seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
        _UNIQUE_NODE.pack_into(reply, 8, unique, number)
        _ATTR_START.pack_into(
            reply, 56, number, size, (size + 511) >> 9, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds
        )
        return reply

    def absent(self, unique: int) -> bytes | bytearray:
        """A reply to LOOKUP of a name that does not exist; the kernel caches it if `negative_timeout` is not 0."""
        if not self._remembers_absent:
            return error(unique, errno.ENOENT)
        _UNIQUE.pack_into(self._absent, 8, unique)
        return self._absent

    def attributes(self, unique: int, number: int, directory: bool, size: int, mtime_ns: int) -> bytearray:
        """A reply to GETATTR."""
        reply = self._attributes[directory]
        seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
        _UNIQUE.pack_into(reply, 8, unique)
        _ATTR_START.pack_into(
            reply, 32, number, size, (size + 511) >> 9, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds
        )
        return reply

    def dots(self, number: int, offset: int, *, plus: bool) -> bytes:
        """The records of `.` and `..` from position 0 or 1 on.

        They have no attributes, since the kernel ignores these.
        """
        names = ((1, b"."), (2, b".."))[offset:]
        records = (_DIRENT.pack(number, at, len(name), stat.S_IFDIR >> 12, name) for at, name in names)
        return b"".join(bytes(8 * _DIRENT_INO if plus else 0) + record for record in records)

    def few(self, number: int, entries: Iterable[Entry]) -> bytes:
        """The body of a reply to READDIRPLUS with all of directory `number`. Names must have at most 8 bytes.

        The same bytes as from `dots` and `records`, but for a dozen entries in a third of the time.
        """
        record, types = _SHORT_DIRENTPLUS.pack, (stat.S_IFREG >> 12, stat.S_IFDIR >> 12)
        out = [_DOTS_PLUS.pack(number, 1, 1, types[1], b".", number, 2, 2, types[1], b"..")]
        known = seconds = nanoseconds = 0
        for name, child, directory, size, mtime_ns, cookie in entries:
            if mtime_ns != known:
                known = mtime_ns
                seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
            node = child
            if size < 0:  # unknown: name only
                node = size = 0
            out.append(
                record(
                    node, self._timeouts, child, size, (size + 511) >> 9, seconds, seconds, seconds,
                    nanoseconds, nanoseconds, nanoseconds, self._shared[directory],
                    child, cookie + 2, len(name), types[directory], name,
                )
            )  # fmt: skip
        return b"".join(out)

    def records(
        self, batch: Batch, nodes: U64, offsets: U64, *, plus: bool
    ) -> tuple[memoryview, npt.NDArray[np.int64]]:
        """The body of replies to READDIRPLUS or READDIR: all records concatenated, and the end of each.

        Args:
            batch: the entries; its cookies are ignored.
            nodes: the numbers that the kernel keeps with the attributes; 0 makes an entry of a name only.
            offsets: the position behind each entry, with which the kernel continues the listing.
            plus: with attributes, for READDIRPLUS.
        """
        width = -(-batch.names.itemsize // 8)
        names = batch.names.astype(f"S{8 * width}").view("<u8").reshape(-1, width)
        # Not `np.char`: numpy would import it at the first use, in the middle of the first listing.
        lengths = _POWERS.searchsorted(names, "right").sum(axis=1)
        words = np.empty((len(lengths), _NAME + width), np.uint64)
        words[:, :_NAME] = self._rows[0]
        if batch.directories.any():
            words[batch.directories, :_NAME] = self._rows[1]
        if batch.links is not None:
            words.view(np.uint32)[batch.links, _LISTED_MODE] = stat.S_IFLNK | 0o777
            words.view(np.uint32)[batch.links, _DIRENT_TYPE] = stat.S_IFLNK >> 12
        words[:, _NODE], words[:, _INO], words[:, _DIRENT_INO] = nodes, batch.numbers, batch.numbers
        sizes = np.maximum(batch.sizes, 0)
        words[:, _SIZE], words[:, _BLOCKS], words[:, _DIRENT_OFFSET] = sizes, (sizes + 511) >> 9, offsets
        _fill_times(words, batch.mtimes_ns)
        words.view(np.uint32)[:, _DIRENT_NAMELEN] = lengths
        words[:, _NAME:] = names.view(np.uint64)
        return _packed(words[:, 0 if plus else _DIRENT_INO :], width - (lengths + 7) // 8)


def _fill_times(words: U64, mtimes_ns: npt.NDArray[np.int64]) -> None:
    first = mtimes_ns[0]
    seconds, nanoseconds = np.divmod(first if (mtimes_ns == first).all() else mtimes_ns[:, None], 1_000_000_000)
    words.view(np.int64)[:, _TIMES], words.view(np.uint32)[:, _NANOSECONDS] = seconds, nanoseconds


def _packed(rows: U64, spare: npt.NDArray[np.int64]) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """The rows concatenated, each without its last `spare` words, and the byte at which each ends."""
    columns = rows.shape[1]
    used = columns - spare
    body = rows[np.arange(columns) < used[:, None]] if spare.any() else rows.ravel()
    return body.data.cast("B"), np.cumsum(used) * 8


_POWERS = np.uint64(256) ** np.arange(8, dtype=np.uint64)
"""A little-endian word of a name is at least as large as n of these if n of its 8 bytes are used."""

# Columns of a fuse_direntplus (a fuse_entry_out and a fuse_dirent): the first line in 64-bit words, the last in 32-bit.
_NODE, _INO, _SIZE, _BLOCKS, _TIMES = 0, 5, 6, 7, slice(8, 11)
_DIRENT_INO, _DIRENT_OFFSET, _NAME = 16, 17, 19
_NANOSECONDS, _LISTED_MODE, _DIRENT_NAMELEN, _DIRENT_TYPE = slice(22, 25), 25, 36, 37
