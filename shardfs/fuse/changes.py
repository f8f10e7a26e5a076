"""The requests that only a writable mount gets, and those that it answers otherwise: `WriteTree` for the kernel.

On such a mount files and directories are opened, with handles. What the kernel is told must be true when it arrives:
`Recent` and `listings.Stream` see to it that nothing told is older than a change that was answered.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
from typing import TYPE_CHECKING, Protocol

from shardfs.fuse import control, lowlevel
from shardfs.fuse.listings import Listed, OpenDirectories
from shardfs.inodes import CREATED, ROOT, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from shardfs.chunk_tree import Attributes
    from shardfs.model import Batch

    Handler: TypeAlias = Callable[[int, int, int], None]

log = logging.getLogger("shardfs.fuse")

RECENT = 512  # attributes kept between the LOOKUP of a file and its READs

PERMISSIONS = 0o1777
"""Bits that may be set: nobody becomes somebody else by a file of a mount."""


ALLOCATIONS = 1 | 2 | 16
"""FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE: those of which the kernel knows what they change."""

OPEN_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
"""What a tree is told of how a file is opened. The rest is the kernel's work: O_SYNC comes as FSYNC after each WRITE,
and O_DIRECT must not be asked of another file in turn."""


class WriteTree(Listed, Protocol):
    """What a writable mount shows. Thread-safe; what may fail raises OSError.

    Content belongs to a number, not to a name: a file that was removed or replaced is read, written and described
    under its number until the last handle is released. A new file has a number that was not used before on this mount;
    a rename carries it. `Attributes` of a file that was changed have no `extent`, or one in which nothing changes. A
    mode of 0 is that of all files; who wants no permission at all sets the bits of the file's type. Entries of `scan`
    that have a mode have a size of -1, so that they are asked for one by one.

    The kernel's look-ups of numbers below `TABLE_END` and from `CREATED` on are counted by `remember`; `forget` comes
    for all numbers. `open` of a number whose file has no name any more, and that nobody has open, may fail with ESTALE:
    the kernel then looks for the name anew.

    The hook `waiting` may drop a request to have it begun anew (docs/concurrency.md). So it is called before anything
    is changed, and not between two changes.

    Handles that are open when the mount ends are released by the tree itself: the kernel does not send what it has not
    sent by then.
    """

    invalidate: Callable[[int, bytes], None]
    """Set by the server: a name in a directory is not what it was, without a request having changed it."""
    invalidate_content: Callable[[int], None]
    """Set by the server: the same of a file's bytes or attributes. Neither waits, and both may be called anywhere."""
    forget_content: Callable[[int], None]
    """Set by the server: the same, and the kernel has forgotten them when it returns. It may wait for requests, so not
    in one, and with no lock held that one may want."""
    shows_links: bool
    """Set by the server: symbolic links need not be shown as what they lead to. `Attributes.mode` tells their type."""

    # As `Tree` has them.
    def lookup(self, parent: int, name: bytes) -> Attributes: ...
    def attributes(self, number: int) -> Attributes: ...
    def read(self, number: int, offset: int, size: int) -> bytes | memoryview: ...
    def remember(self, number: int) -> None: ...
    def forget(self, number: int, count: int) -> None: ...
    def xattrs(self, number: int) -> dict[str, bytes]: ...
    def usage(self, number: int) -> dict[str, bytes]: ...
    def statvfs(self) -> os.statvfs_result | None: ...
    def shown_path(self, number: int) -> str: ...

    def scan(self, number: int) -> Iterator[Batch]:
        """The entries of a directory as it is at the call. Cookies rise; the same entries get the same ones again."""

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        """A file, made if it does not exist, and a handle of it. `flags` are those of open(2): O_EXCL, O_TRUNC, ..."""

    def open(self, number: int, flags: int) -> int:
        """A handle. With O_TRUNC the file is empty afterwards. Offsets of O_APPEND are the kernel's work."""

    def write(self, handle: int, offset: int, data: memoryview) -> int:
        """The number of bytes written: all, or OSError. `data` is the request's own memory, good until the return.

        May come between `flush` and `release`, from a shared mapping, through any handle that may write.
        """

    def flush(self, handle: int) -> None:
        """A descriptor of the handle was closed: what was written becomes a version. More may follow."""

    def fsync(self, handle: int) -> None:
        """What was written is on disk at the return."""

    def release(self, handle: int) -> None:
        """The handle is not used any more. Nobody is told of an error."""

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        """Cut off, or add zeros. By name if there is no handle."""

    def allocate(self, handle: int, offset: int, size: int, mode: int) -> None:
        """As fallocate(2), with a mode of `ALLOCATIONS`; EOPNOTSUPP for files that cannot have it."""

    def set_mode(self, number: int, mode: int) -> None:
        """Permission bits, of a file or a directory."""

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """None: now."""

    def unlink(self, parent: int, name: bytes) -> None: ...
    def rmdir(self, parent: int, name: bytes) -> None: ...
    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes: ...
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None: ...

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        """Another file with the same content, with a number of its own."""

    def sync_directory(self, number: int) -> None:
        """Names in the directory are on disk at the return."""

    def symlink(self, parent: int, name: bytes, target: bytes) -> Attributes:
        """A symbolic link. EPERM if who follows it would leave the mount."""

    def read_link(self, number: int) -> bytes:
        """Where a symbolic link leads. Who follows it stays on the mount. EINVAL if it is none."""

    def set_xattr(self, number: int, name: str, value: bytes, flags: int) -> None:
        """`user.shardfs.flush` publishes what is at or below within so many seconds; EOPNOTSUPP for what cannot be set.

        `flags` are those of setxattr(2).
        """

    def remove_xattr(self, number: int, name: str) -> None: ...


class Recent:
    """Attributes between the LOOKUP of a file and its READs, none of which outlives a change.

    `stamp` is counted up by each change, when it was made and before it is answered. Attributes that were asked for
    before that may be old, and are not kept.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Attributes] = {}
        self.stamp = 0
        self._lock = threading.Lock()

    def keep(self, stamp: int, found: Attributes) -> None:
        """Keep what was asked for when the stamp was this."""
        with self._lock:
            if stamp != self.stamp:
                return
            if len(self.kept) >= RECENT:
                self.kept.clear()
            self.kept[found.number] = found

    def changed(self, number: int | None = None) -> None:
        """A file was changed; or anything."""
        with self._lock:
            self.stamp += 1
            if number is None:
                self.kept.clear()
            else:
                self.kept.pop(number, None)


class Notices:
    """Tells the kernel what it must forget, mostly in a thread of its own: it may take until requests are answered."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue = queue.SimpleQueue[bytes]()
        self._lock = threading.Lock()
        self._started = False

    def send(self, message: bytes) -> None:
        """Does not wait."""
        self._queue.put(message)
        with self._lock:
            started, self._started = self._started, True
        if not started:
            threading.Thread(target=self._work, name="shardfs-notices", daemon=True).start()

    def _work(self) -> None:
        while self.tell(self._queue.get()):
            pass

    def tell(self, message: bytes) -> bool:
        """Send it now; False if the mount is gone."""
        try:
            os.write(self._fd, message)
        except OSError as failure:
            if failure.errno == errno.ENODEV:
                return False
            if failure.errno != errno.ENOENT:  # the kernel does not know it, so need not forget it
                log.error("cannot tell the kernel of a change: %s", failure)
        return True


class Changing:
    """What all threads of a writable mount share: see its parts."""

    def __init__(self, encoder: lowlevel.Encoder) -> None:
        self.recent = Recent()
        self.directories = OpenDirectories(encoder, lambda: self.recent.stamp)

    def start(self, tree: WriteTree, fd: int) -> None:
        """Let the tree tell the kernel, through the descriptor of the session."""
        notices = Notices(fd)

        def invalidate(parent: int, name: bytes) -> None:
            self.recent.changed()
            notices.send(lowlevel.forget_entry(parent, name))

        def invalidate_content(number: int) -> None:
            self.recent.changed(number)
            notices.send(lowlevel.forget_content(number))

        def forget_content(number: int) -> None:
            self.recent.changed(number)
            notices.tell(lowlevel.forget_content(number))

        tree.invalidate, tree.invalidate_content = invalidate, invalidate_content
        tree.forget_content = forget_content
        tree.shows_links = True


class Changes:
    """Answers requests in one thread. `request` is the buffer in which they lie, `send` sends a reply."""

    def __init__(
        self,
        tree: WriteTree,
        shared: Changing,
        encoder: lowlevel.Encoder,
        request: memoryview,
        send: Callable[[memoryview | bytes | bytearray], bool],
        waiting: Callable[[], None],
    ) -> None:
        self._tree, self._encoder, self._request = tree, encoder, request
        self._send, self._waiting = send, waiting
        self._recent, self._directories = shared.recent, shared.directories
        self._owner = encoder.owner

    def handlers(self) -> dict[int, Handler]:
        """By opcode; LOOKUP, GETATTR and listings are not among them."""
        return {
            lowlevel.OPEN: self._open,
            lowlevel.CREATE: self._create,
            lowlevel.MKNOD: self._mknod,
            lowlevel.WRITE: self._write_handler(),
            lowlevel.FALLOCATE: self._fallocate,
            lowlevel.FLUSH: self._flush,
            lowlevel.FSYNC: self._fsync,
            lowlevel.RELEASE: self._release,
            lowlevel.SETATTR: self._setattr,
            lowlevel.UNLINK: self._unlink,
            lowlevel.RMDIR: self._rmdir,
            lowlevel.MKDIR: self._mkdir,
            lowlevel.RENAME: self._rename,
            lowlevel.RENAME2: self._rename2,
            lowlevel.LINK: self._link,
            lowlevel.SYMLINK: self._symlink,
            lowlevel.READLINK: self._readlink,
            lowlevel.SETXATTR: self._setxattr,
            lowlevel.REMOVEXATTR: self._removexattr,
            lowlevel.RELEASEDIR: self._releasedir,
            lowlevel.FSYNCDIR: self._fsyncdir,
        }

    def _done(self, unique: int) -> None:
        self._send(lowlevel.error(unique, 0))

    # ---- names

    def _name(self, parent: int, start: int, end: int) -> bytes:
        """A name that is to be made or removed. Raise OSError if it cannot be."""
        name = bytes(self._request[start:end])
        if parent == control.DIRECTORY or (parent == ROOT and name == control.NAME):
            raise PermissionError(errno.EPERM, "belongs to the mount itself", name)
        if len(name) > lowlevel.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name[:32])
        return name

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Of the tree. Raise FileNotFoundError, or another OSError."""
        if len(name) > lowlevel.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name[:32])
        stamp = self._recent.stamp
        found = self._tree.lookup(parent, name)
        self._recent.keep(stamp, found)
        return found

    def attributes(self, number: int) -> Attributes:
        """Of the tree."""
        stamp = self._recent.stamp
        found = self._tree.attributes(number)
        self._recent.keep(stamp, found)
        return found

    def send_attributes(self, unique: int, found: Attributes) -> None:
        """Reply to GETATTR and SETATTR."""
        reply = self._encoder.attributes(unique, found.number, found.directory, found.size, found.mtime_ns)
        self._send(lowlevel.attributes_with_mode(reply, found.mode) if found.mode else reply)

    def _entry(self, unique: int, found: Attributes) -> bytearray:
        reply = self._encoder.entry(unique, found.number, found.directory, found.size, found.mtime_ns)
        return lowlevel.entry_with_mode(reply, found.mode) if found.mode else reply

    def send_entry(self, unique: int, found: Attributes) -> None:
        """Reply to LOOKUP, and to what makes a file or directory."""
        self._send_node(found.number, self._entry(unique, found))

    def _send_node(self, number: int, reply: bytes | bytearray) -> bool:
        """Send a reply with which the kernel gets to know a number."""
        if TABLE_END <= number < CREATED:
            return self._send(reply)
        self._tree.remember(number)
        if self._send(reply):
            return True
        self._tree.forget(number, 1)
        return False

    def _mkdir(self, unique: int, parent: int, size: int) -> None:
        mode, _ = lowlevel.MKDIR_IN.unpack_from(self._request, lowlevel.BODY)
        name = self._name(parent, lowlevel.BODY + lowlevel.MKDIR_IN.size, size - 1)
        try:
            found = self._tree.mkdir(parent, name, mode & PERMISSIONS)
        finally:
            self._recent.changed()
        self.send_entry(unique, found)

    def _unlink(self, unique: int, parent: int, size: int) -> None:
        name = self._name(parent, lowlevel.BODY, size - 1)
        try:
            self._tree.unlink(parent, name)
        finally:
            self._recent.changed()
        self._done(unique)

    def _rmdir(self, unique: int, parent: int, size: int) -> None:
        name = self._name(parent, lowlevel.BODY, size - 1)
        try:
            self._tree.rmdir(parent, name)
        finally:
            self._recent.changed()
        self._done(unique)

    def _rename(self, unique: int, parent: int, size: int) -> None:
        (new_parent,) = lowlevel.RENAME_IN.unpack_from(self._request, lowlevel.BODY)
        self._move(unique, parent, new_parent, lowlevel.BODY + lowlevel.RENAME_IN.size, size, noreplace=False)

    def _rename2(self, unique: int, parent: int, size: int) -> None:
        new_parent, flags = lowlevel.RENAME2_IN.unpack_from(self._request, lowlevel.BODY)
        if flags & ~lowlevel.RENAME_NOREPLACE:
            # Nothing must be done by half: who exchanges two files and is told of success has still both.
            raise OSError(errno.EINVAL, "names cannot be exchanged")
        start = lowlevel.BODY + lowlevel.RENAME2_IN.size
        self._move(unique, parent, new_parent, start, size, noreplace=bool(flags))

    def _move(self, unique: int, parent: int, new_parent: int, start: int, size: int, *, noreplace: bool) -> None:
        middle = start + bytes(self._request[start:size]).index(b"\0")
        name = self._name(parent, start, middle)
        new_name = self._name(new_parent, middle + 1, size - 1)
        try:
            self._tree.rename(parent, name, new_parent, new_name, noreplace)
        finally:
            self._recent.changed()
        self._done(unique)

    def _link(self, unique: int, new_parent: int, size: int) -> None:
        (number,) = lowlevel.LINK_IN.unpack_from(self._request, lowlevel.BODY)
        if number >= control.DIRECTORY:
            raise PermissionError(errno.EPERM, "belongs to the mount itself", control.NAME)
        name = self._name(new_parent, lowlevel.BODY + lowlevel.LINK_IN.size, size - 1)
        try:
            found = self._tree.link(number, new_parent, name)
        finally:
            self._recent.changed()
        self.send_entry(unique, found)

    def _symlink(self, unique: int, parent: int, size: int) -> None:
        names = bytes(self._request[lowlevel.BODY : size - 1])
        middle = names.index(b"\0")
        name = self._name(parent, lowlevel.BODY, lowlevel.BODY + middle)
        try:
            found = self._tree.symlink(parent, name, names[middle + 1 :])
        finally:
            self._recent.changed()
        self.send_entry(unique, found)

    def _readlink(self, unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), control.NAME)
        target = self._tree.read_link(number)
        self._send(lowlevel.data(unique, len(target)) + target)

    # ---- files

    def _open(self, unique: int, number: int, _size: int) -> None:
        (flags,) = lowlevel.OPEN_IN.unpack_from(self._request, lowlevel.BODY)
        flags &= OPEN_FLAGS
        reads = flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY
        if number >= control.DIRECTORY:
            if not reads:
                raise PermissionError(errno.EPERM, "belongs to the mount itself", control.NAME)
            self._send(lowlevel.opened(unique, lowlevel.OPEN_KEEP_CACHE | lowlevel.OPEN_NO_FLUSH))
            return
        try:
            handle = self._tree.open(number, flags)
        except OSError as failure:
            if failure.errno != errno.ESTALE:
                raise
            self._send(lowlevel.error(unique, errno.ESTALE))  # nothing is wrong: the kernel asks again by name
            return
        if flags & os.O_TRUNC:
            self._recent.changed(number)
        how = lowlevel.OPEN_KEEP_CACHE | lowlevel.OPEN_NO_FLUSH if reads else lowlevel.OPEN_KEEP_CACHE
        if not self._send(lowlevel.opened(unique, how, handle)):
            self._tree.release(handle)

    def _create(self, unique: int, parent: int, size: int) -> None:
        flags, mode, _ = lowlevel.CREATE_IN.unpack_from(self._request, lowlevel.BODY)
        name = self._name(parent, lowlevel.BODY + lowlevel.CREATE_IN.size, size - 1)
        try:
            found, handle = self._tree.create(parent, name, flags & OPEN_FLAGS, mode & PERMISSIONS)
        finally:
            self._recent.changed()
        reply = lowlevel.created(self._entry(unique, found), lowlevel.OPEN_KEEP_CACHE, handle)
        if not self._send_node(found.number, reply):
            self._tree.release(handle)

    def _mknod(self, unique: int, parent: int, size: int) -> None:
        mode, _, _ = lowlevel.MKNOD_IN.unpack_from(self._request, lowlevel.BODY)
        name = self._name(parent, lowlevel.BODY + lowlevel.MKNOD_IN.size, size - 1)
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "neither a file nor a directory", name)
        try:
            found, handle = self._tree.create(parent, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & PERMISSIONS)
            self._tree.flush(handle)
            self._tree.release(handle)
        finally:
            self._recent.changed()
        self.send_entry(unique, found)

    def _write_handler(self) -> Handler:
        """A closure, as the way to an attribute costs as much as some of its work."""
        request, write, changed, send = self._request, self._tree.write, self._recent.changed, self._send
        arguments, begin, reply = lowlevel.WRITE_IN.unpack_from, lowlevel.BODY, lowlevel.written
        start = begin + lowlevel.WRITE_IN.size

        def answer(unique: int, number: int, _size: int) -> None:
            handle, offset, size = arguments(request, begin)
            try:
                done = write(handle, offset, request[start : start + size])
            finally:
                changed(number)
            send(reply(unique, done))

        return answer

    def _fallocate(self, unique: int, number: int, _size: int) -> None:
        handle, offset, size, mode = lowlevel.FALLOCATE_IN.unpack_from(self._request, lowlevel.BODY)
        if mode & ~ALLOCATIONS or number >= control.DIRECTORY:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(number))
        self._waiting()
        try:
            self._tree.allocate(handle, offset, size, mode)
        finally:
            self._recent.changed(number)
        self._done(unique)

    def _flush(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            (handle,) = lowlevel.HANDLE_IN.unpack_from(self._request, lowlevel.BODY)
            try:
                self._tree.flush(handle)
            finally:
                self._recent.changed()  # a document describes other files
        self._done(unique)

    def _fsync(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            (handle,) = lowlevel.HANDLE_IN.unpack_from(self._request, lowlevel.BODY)
            try:
                self._tree.fsync(handle)
            finally:
                self._recent.changed()
        self._done(unique)

    def _release(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            (handle,) = lowlevel.HANDLE_IN.unpack_from(self._request, lowlevel.BODY)
            self._tree.release(handle)
        self._done(unique)

    def _setattr(self, unique: int, number: int, _size: int) -> None:
        what, handle, size, seconds, nanoseconds, mode, uid, gid = lowlevel.SETATTR_IN.unpack_from(
            self._request, lowlevel.BODY
        )
        if number >= control.DIRECTORY:
            raise PermissionError(errno.EPERM, "belongs to the mount itself", control.NAME)
        self._check_owner(uid if what & lowlevel.SET_UID else None, gid if what & lowlevel.SET_GID else None)
        if what & lowlevel.SET_MODE and mode & (stat.S_ISUID | stat.S_ISGID):
            raise PermissionError(errno.EPERM, "no set-user-id or set-group-id here")
        tree = self._tree
        try:
            if what & lowlevel.SET_SIZE:
                tree.truncate(number, size, handle if what & lowlevel.SET_HANDLE else None)
            if what & lowlevel.SET_MODE:
                tree.set_mode(number, mode & PERMISSIONS)
            if what & lowlevel.SET_MTIME:
                now = what & lowlevel.SET_MTIME_NOW
                tree.set_times(number, None if now else seconds * 1_000_000_000 + nanoseconds)
        finally:
            self._recent.changed(number)
        self.send_attributes(unique, tree.attributes(number))

    def _check_owner(self, uid: int | None, gid: int | None) -> None:
        for given, own in zip((uid, gid), self._owner, strict=True):
            if given is not None and given != own:
                raise PermissionError(errno.EPERM, "all files belong to who has mounted")

    def _setxattr(self, unique: int, number: int, size: int) -> None:
        length, flags = lowlevel.SETXATTR_IN.unpack_from(self._request, lowlevel.BODY)
        start = lowlevel.BODY + lowlevel.SETXATTR_IN.size
        raw, _, value = bytes(self._request[start:size]).partition(b"\0")
        name = self._attribute(number, raw)
        self._waiting()
        self._tree.set_xattr(number, name, value[:length], flags)
        self._done(unique)

    def _removexattr(self, unique: int, number: int, size: int) -> None:
        name = self._attribute(number, bytes(self._request[lowlevel.BODY : size - 1]))
        self._waiting()
        self._tree.remove_xattr(number, name)
        self._done(unique)

    def _attribute(self, number: int, raw: bytes) -> str:
        """The name of an extended attribute. Raise OSError if none of this name can be set or removed."""
        name = os.fsdecode(raw)
        if number >= control.DIRECTORY or not name.startswith("user."):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        return name

    # ---- directories

    def opendir(self, unique: int, number: int, tree: Listed) -> None:
        """Reply to OPENDIR: a directory of `tree`."""
        handle = self._directories.open(tree, number)
        if not self._send(lowlevel.opened(unique, 0, handle)):
            self._directories.release(handle)

    def _releasedir(self, unique: int, _number: int, _size: int) -> None:
        self._directories.release(*lowlevel.HANDLE_IN.unpack_from(self._request, lowlevel.BODY))
        self._done(unique)

    def _fsyncdir(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            self._waiting()
            self._tree.sync_directory(number)
        self._done(unique)
