"""The kernel's FUSE protocol: the structs of requests, and replies. No policy.

Requests are read from the session's descriptor and answered on it directly, as packed structs. That costs half a
microsecond; a ctypes callback and reply cost three. Also, the kernel's structs never change, while libfuse's
(`fuse_file_info`, `fuse_conn_info`) moved fields in 3.15 and 3.17. See
docs/decisions/0004-requests-are-answered-without-libfuse.md.

Struct layouts are those of `include/uapi/linux/fuse.h`, protocol 7.23 and later, in the byte order of the host.
"""

from __future__ import annotations

import errno
import stat
import struct
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from shardfs.model.listing import Batch, EntryRow
    from shardfs.model.values import U64

# Opcodes
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, GETXATTR, LISTXATTR = 1, 2, 3, 14, 15, 17, 18, 22, 23
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, IOCTL, BATCH_FORGET, READDIRPLUS = 26, 27, 28, 29, 36, 39, 42, 44
SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE = 4, 6, 8, 9, 10, 11, 12, 13, 16
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
    COPY_FILE_RANGE: "copy_file_range", TMPFILE: "tmpfile", FSYNC: "fsync", FLUSH: "flush",
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
HEADER_IN = Struct("=IIQQ8xI")  # length, opcode, unique, node, thread of the client (0 if none is known)
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
_MODE = _LINKS = Struct("=I")
_ENTRY_MODE, _ATTR_MODE = 116, 92  # byte offsets in the replies
BLOCK = 4096  # st_blksize: the buffer size that many programs use


# ---- replies. `unique` is the number of the request. Each has a header and can be written to the descriptor as it is.


def error_reply(unique: int, number: int) -> bytes:
    """A reply without data: an errno, or 0 for success."""
    return HEADER_OUT.pack(HEADER_SIZE, -number, unique)


def data_header(unique: int, size: int) -> bytes:
    """The header of a reply with `size` bytes of data, which the caller appends."""
    return HEADER_OUT.pack(HEADER_SIZE + size, 0, unique)


def open_reply(unique: int, flags: int, handle: int = 0) -> bytes:
    """A reply to OPEN and OPENDIR; `flags` are `OPEN_DIRECT_IO` and its like."""
    return _OPEN_OUT.pack(_OPEN_OUT.size, 0, unique, handle, flags)


def create_reply(entry: bytearray, flags: int, handle: int) -> bytes:
    """A reply to CREATE, made from a reply of `Encoder.entry_reply`, which is not changed."""
    (unique,) = _UNIQUE.unpack_from(entry, 8)
    size = len(entry) + _CREATE_OUT.size
    return HEADER_OUT.pack(size, 0, unique) + entry[HEADER_SIZE:] + _CREATE_OUT.pack(handle, flags)


def write_reply(unique: int, size: int) -> bytes:
    """A reply to WRITE: `size` bytes were written."""
    return _WRITE_OUT.pack(_WRITE_OUT.size, 0, unique, size)


def attributes_without_name(reply: bytearray) -> bytearray:
    """A copy of a reply of `Encoder.attributes_reply` for a file without a name: its number of links is 0."""
    copy = reply.copy()
    _LINKS.pack_into(copy, _ATTR_MODE + _MODE.size, 0)
    return copy


def with_inode(reply: bytearray, inode: int) -> bytearray:
    """Change the inode number in a reply of `entry_reply` or `attributes_reply` of an encoder, and return the reply."""
    _UNIQUE.pack_into(reply, 56 if len(reply) == _ENTRY_OUT.size else 32, inode)
    return reply


def invalidate_entry(parent: int, name: bytes) -> bytes:
    """A message that invalidates a name. Sending it may block until requests about that directory are answered."""
    size = _INVALID_ENTRY.size + len(name) + 1
    return _INVALID_ENTRY.pack(size, _NOTIFY_ENTRY, 0, parent, len(name)) + name + b"\0"


def invalidate_content(number: int) -> bytes:
    """A message that invalidates a file's attributes and pages. Sending it may block until its READs are answered."""
    return _INVALID_INODE.pack(_INVALID_INODE.size, _NOTIFY_INODE, 0, number, 0, 0)


def invalidate_attributes(number: int) -> bytes:
    """A message that invalidates a file's attributes. Sending it never blocks."""
    return _INVALID_INODE.pack(_INVALID_INODE.size, _NOTIFY_INODE, 0, number, -1, 0)


def xattr_size_reply(unique: int, size: int) -> bytes:
    """A reply to GETXATTR and LISTXATTR of a client that asks for the size it must allocate."""
    return _XATTR_SIZE_OUT.pack(_XATTR_SIZE_OUT.size, 0, unique, size)


def statfs_reply(unique: int, s: os.statvfs_result) -> bytes:
    """A reply to STATFS, with the figures that os.statvfs returns."""
    return _STATFS_OUT.pack(
        _STATFS_OUT.size, 0, unique, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax,
        s.f_frsize,
    )  # fmt: skip


def is_cached_absence(reply: memoryview | bytes | bytearray) -> bool:
    """Return whether a reply is one of `Encoder.absent_reply` that the kernel caches."""
    return len(reply) == _ENTRY_OUT.size and not any(reply[HEADER_SIZE : HEADER_SIZE + 8])


def _timeout(seconds: float) -> tuple[int, int]:
    """Whole seconds and nanoseconds."""
    if seconds >= 1 << 31:  # does not expire
        return 1 << 31, 0
    return int(seconds), int(seconds % 1 * 1e9)


class Encoder:
    """Makes the replies that describe files, given the attributes that all files of a mount share.

    For one thread: the next call of `entry_reply`, `attributes_reply` or `absent_reply` overwrites the reply.
    """

    def __init__(
        self, *, file_mode: int, dir_mode: int, uid: int, gid: int, attr_timeout: float, entry_timeout: float,
        negative_timeout: float, umask: int = 0,
    ) -> None:  # fmt: skip
        """Modes include the file type. Time-outs are in seconds, and may be infinite.

        `umask` is removed from the modes of single files only (`entry_with_mode`).
        """
        self.owner = uid, gid
        self._umask = umask
        files, directories = (file_mode, 1, uid, gid, 0, BLOCK, 0), (dir_mode, 2, uid, gid, 0, BLOCK, 0)
        attr, entry, negative = _timeout(attr_timeout), _timeout(entry_timeout), _timeout(negative_timeout)
        timeouts = (entry[0], attr[0], entry[1], attr[1])
        blank = (0,) * 9
        # Templates, by `directory`. Filling in the fields that differ takes a third of the time of packing all of them.
        self._entries = [
            bytearray(_ENTRY_OUT.pack(_ENTRY_OUT.size, 0, 0, 0, 0, *timeouts, *blank, *shared))
            for shared in (files, directories)
        ]
        self._attributes = [
            bytearray(_ATTR_OUT.pack(_ATTR_OUT.size, 0, 0, *attr, 0, *blank, *shared))
            for shared in (files, directories)
        ]
        nothing = (0, 0, negative[0], 0, negative[1], 0, *blank, *(0,) * 7)
        self._absent = bytearray(_ENTRY_OUT.pack(_ENTRY_OUT.size, 0, 0, *nothing))
        self._remembers_absent = any(negative)
        self._rows = [
            np.frombuffer(_DIRENTPLUS.pack(0, 0, *timeouts, *blank, *shared, 0, 0, 0, shared[0] >> 12), np.uint64)
            for shared in (files, directories)
        ]
        self._timeouts = struct.pack("=QQQII", 0, *timeouts)
        self._shared = [struct.pack("=IIIIIII", *shared) for shared in (files, directories)]

    def entry_reply(self, unique: int, number: int, directory: bool, size: int, mtime_ns: int) -> bytearray:
        """A reply to LOOKUP, with the mode of all files, or of all directories. Valid until the next call."""
        reply = self._entries[directory]
        seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
        _UNIQUE_NODE.pack_into(reply, 8, unique, number)
        _ATTR_START.pack_into(
            reply, 56, number, size, (size + 511) >> 9, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds
        )
        return reply

    def entry_with_mode(self, reply: bytearray, mode: int) -> bytearray:
        """A copy of an `entry_reply` with the permissions of `mode`, less `umask`, and its file type if it has one."""
        return self._with_mode(reply, _ENTRY_MODE, mode)

    def attributes_with_mode(self, reply: bytearray, mode: int) -> bytearray:
        """A copy of an `attributes_reply` with the permissions of `mode`, as `entry_with_mode` makes of an entry."""
        return self._with_mode(reply, _ATTR_MODE, mode)

    def _with_mode(self, reply: bytearray, where: int, mode: int) -> bytearray:
        copy = reply.copy()  # the encoder reuses `reply`
        (before,) = _MODE.unpack_from(copy, where)
        _MODE.pack_into(copy, where, (stat.S_IFMT(mode) or stat.S_IFMT(before)) | stat.S_IMODE(mode) & ~self._umask)
        return copy

    def absent_reply(self, unique: int) -> bytes | bytearray:
        """A reply to LOOKUP of a name that does not exist, which the kernel caches for `negative_timeout`.

        Valid until the next call. If the time-out is 0, an `error_reply` with ENOENT.
        """
        if not self._remembers_absent:
            return error_reply(unique, errno.ENOENT)
        _UNIQUE.pack_into(self._absent, 8, unique)
        return self._absent

    def attributes_reply(self, unique: int, number: int, directory: bool, size: int, mtime_ns: int) -> bytearray:
        """A reply to GETATTR, with the mode of all files, or of all directories. Valid until the next call."""
        reply = self._attributes[directory]
        seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
        _UNIQUE.pack_into(reply, 8, unique)
        _ATTR_START.pack_into(
            reply, 32, number, size, (size + 511) >> 9, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds
        )
        return reply

    def dots(self, number: int, offset: int, *, plus: bool) -> bytes:
        """The records of `.` and `..` in directory `number`, from position 0 or 1 on. `plus`: for READDIRPLUS.

        They have no attributes, since the kernel ignores these.
        """
        names = ((1, b"."), (2, b".."))[offset:]
        records = (_DIRENT.pack(number, at, len(name), stat.S_IFDIR >> 12, name) for at, name in names)
        return b"".join(bytes(8 * _DIRENT_INO if plus else 0) + record for record in records)

    def few_entries(self, number: int, entries: Iterable[EntryRow]) -> bytes:
        """The body of a reply to READDIRPLUS with all of directory `number`. Names must have at most 8 bytes.

        The same bytes as from `dots` and `records`, but for a dozen entries in a third of the time.
        """
        record, types = _SHORT_DIRENTPLUS.pack, (stat.S_IFREG >> 12, stat.S_IFDIR >> 12)
        out = [_DOTS_PLUS.pack(number, 1, 1, types[1], b".", number, 2, 2, types[1], b"..")]
        last_mtime_ns = seconds = nanoseconds = 0
        for name, child, directory, size, mtime_ns, cookie in entries:
            if mtime_ns != last_mtime_ns:
                last_mtime_ns = mtime_ns
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
        """The body of replies to READDIRPLUS or READDIR: the records of n entries, and their bounds in bytes (n + 1,).

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
        words[:, _NODE] = nodes
        words[:, _INO] = batch.numbers
        words[:, _DIRENT_INO] = batch.numbers
        sizes = np.maximum(batch.sizes, 0)
        words[:, _SIZE], words[:, _BLOCKS], words[:, _DIRENT_OFFSET] = sizes, (sizes + 511) >> 9, offsets
        _fill_times(words, batch.mtimes_ns)
        words.view(np.uint32)[:, _DIRENT_NAMELEN] = lengths
        words[:, _NAME:] = names.view(np.uint64)
        return _packed(words[:, 0 if plus else _DIRENT_INO :], width - (lengths + 7) // 8)


def _fill_times(words: U64, mtimes_ns: npt.NDArray[np.int64]) -> None:
    first = mtimes_ns[0]
    seconds, nanoseconds = np.divmod(first if (mtimes_ns == first).all() else mtimes_ns[:, None], 1_000_000_000)
    words.view(np.int64)[:, _TIMES] = seconds
    words.view(np.uint32)[:, _NANOSECONDS] = nanoseconds


def _packed(rows: U64, spare: npt.NDArray[np.int64]) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """The rows concatenated, each without its last `spare` words, and the bytes before each and behind the last."""
    columns = rows.shape[1]
    lengths = columns - spare
    body = rows[np.arange(columns) < lengths[:, None]] if spare.any() else rows.ravel()
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(8 * lengths, out=bounds[1:])
    return body.data.cast("B"), bounds


_POWERS = np.uint64(256) ** np.arange(8, dtype=np.uint64)
"""A little-endian word of a name is at least as large as n of these if n of its 8 bytes are used."""

# Columns of a fuse_direntplus (a fuse_entry_out and a fuse_dirent): the first line in 64-bit words, the last in 32-bit.
_NODE, _INO, _SIZE, _BLOCKS, _TIMES = 0, 5, 6, 7, slice(8, 11)

_DIRENT_INO, _DIRENT_OFFSET, _NAME = 16, 17, 19

_NANOSECONDS, _DIRENT_NAMELEN = slice(22, 25), 36
