"""Requests that a writable mount alone answers, and the tree that they change.

On such a mount, files and directories are opened and have handles.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Protocol

from shardfs.fuse import control, protocol
from shardfs.fuse.device import Requests
from shardfs.model.file_tree import FileTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.invalidation import AttributeCache
    from shardfs.fuse.node_requests import WritableNodeRequests
    from shardfs.model.attributes import Attributes

PERMISSIONS = 0o1777
"""Mode bits that clients may set: not set-user-id and set-group-id."""

ALLOCATIONS = 1 | 2 | 16
"""FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE: the kernel knows which bytes these modes change."""

OPEN_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
"""Flags of open(2) that reach the tree. The kernel handles the others: O_SYNC arrives as an FSYNC after each WRITE, and
O_DIRECT concerns the file on the mount, not the files that the tree opens."""


class WritableTree(FileTree, Protocol):
    """The file tree of a writable mount. Thread-safe. Methods that may fail raise OSError or ShardfsError.

    Content belongs to a number, not to a name: a file that was removed or replaced is read, written and described
    under its number until its last handle is released. A new file gets a number that was not used before on this
    mount; a rename keeps the number. `Attributes` of a changed file have no `extent`, or an extent whose bytes never
    change. A mode of 0 stands for the default mode of all files; a file without any permission has the bits of its
    type set. Entries of `scan` with a mode of their own have a size of -1, so that the kernel looks them up one by one.

    `open` of a number whose file has neither a name nor a handle may fail with ESTALE: the kernel then looks up the
    name again.

    The hook `waiting` may drop a request to repeat it from its beginning (docs/concurrency.md). So a method calls it
    before its first change, and not between two changes.

    The tree itself releases the handles that are open when the mount ends: the kernel sends no more requests then.
    """

    def create(self, parent: int, name: bytes, flags: int, mode: int) -> tuple[Attributes, int]:
        """Open a file, and make it with the permission bits `mode` if it does not exist; its attributes and a handle.

        `flags` are `OPEN_FLAGS` of open(2). Raise FileExistsError if it exists and `flags` have O_EXCL.
        """

    def open(self, number: int, flags: int) -> int:
        """A handle, to be released. O_TRUNC empties the file. The kernel handles the offsets of O_APPEND."""

    def write(self, handle: int, offset: int, data: memoryview) -> int:
        """Write all of `data`, which is valid until this returns, and return its length.

        May be called between `flush` and `release`, because of a shared mapping, with any writable handle of the file.
        """

    def flush(self, handle: int) -> None:
        """A client closed a descriptor of the handle: the data written becomes a version. More writes may follow.

        Raise OSError if it cannot, such as EINVAL for bytes that are no such chunk. Also raise the error of an earlier
        version that could not be published, if this handle has not received it.
        """

    def fsync(self, handle: int) -> None:
        """Commit as `flush` does, and return when the version survives a power failure.

        A `*.__lock` file gets that when it has another name (docs/decisions/0018).
        """

    def release(self, handle: int) -> None:
        """Drop the handle for good. Data written since `flush` are committed. The kernel ignores errors."""

    def truncate(self, number: int, size: int, handle: int | None) -> None:
        """Cut the file, or extend it with zeros, to `size` bytes. `handle` is None for truncate(2) of a path."""

    def allocate(self, handle: int, offset: int, size: int, mode: int) -> None:
        """fallocate(2) with a mode made of `ALLOCATIONS`. Raise OSError (EOPNOTSUPP) for files that lack it."""

    def set_mode(self, number: int, mode: int) -> None:
        """Set the permission bits, and the sticky bit, of a file or directory."""

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """Set the time of modification, in nanoseconds since the epoch; None stands for now."""

    def is_unlinked(self, number: int) -> bool:
        """Whether the file is open and has no name any more."""

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name of a file. Raise IsADirectoryError for a directory."""

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Raise OSError (ENOTEMPTY) if it has entries."""

    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes:
        """Make a directory with these permission bits. Raise FileExistsError if the name exists."""

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None:
        """Rename a file or directory. An existing file of the new name is replaced; `noreplace`: FileExistsError."""

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        """Make a copy of a file, with a number of its own; its attributes. Raise FileExistsError if the name exists."""

    def sync_directory(self, number: int) -> None:
        """Return when the names in the directory survive a power failure."""

    def set_xattr(self, number: int, name: str, value: bytes, flags: int) -> None:
        """Set an extended attribute; `flags` are those of setxattr(2). Raise OSError (EOPNOTSUPP) if it cannot be set.

        `user.shardfs.flush` publishes the file, or all files below the directory, within `value` seconds, a decimal
        number; 0 and nothing are no limit. Raise the first error, or TimeoutError.
        """

    def remove_xattr(self, number: int, name: str) -> None:
        """Remove an extended attribute. Raise OSError (EOPNOTSUPP) if it cannot be removed."""


class _TreeRequests(Requests):
    """What requests to a writable tree need. For one thread."""

    def __init__(
        self,
        tree: WritableTree,
        cache: AttributeCache,
        device: Device,
        nodes: WritableNodeRequests,
        waiting: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._nodes = nodes
        self._waiting = waiting
        self._request = device.request
        self._device = device
        self._owner = device.encoder.owner


class WriteRequests(_TreeRequests):
    """Answers requests that open, change and close files: OPEN, WRITE, SETATTR and their like. For one thread."""

    def handlers(self) -> dict[int, Handler]:
        return {
            protocol.OPEN: self._open_file,
            protocol.WRITE: self._write_handler(),
            protocol.FALLOCATE: self._fallocate,
            protocol.FLUSH: self._sync_handler(self._tree.flush),
            protocol.FSYNC: self._sync_handler(self._tree.fsync),
            protocol.FSYNCDIR: self._fsyncdir,
            protocol.RELEASE: self._release,
            protocol.SETATTR: self._setattr,
            protocol.SETXATTR: self._setxattr,
            protocol.REMOVEXATTR: self._removexattr,
        }

    def _open_file(self, unique: int, number: int, _size: int) -> None:
        (flags,) = protocol.OPEN_IN.unpack_from(self._request, protocol.BODY)
        flags &= OPEN_FLAGS
        reads = flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY
        if number >= control.DIRECTORY:
            if not reads:
                raise control.not_permitted()
            self._device.send(protocol.open_reply(unique, protocol.OPEN_KEEP_CACHE | protocol.OPEN_NO_FLUSH))
            return
        try:
            handle = self._tree.open(number, flags)
        except OSError as failure:
            if failure.errno != errno.ESTALE:
                raise
            # No failure of the client's open(2), so not logged: the kernel looks up the name and opens again.
            self._device.send(protocol.error_reply(unique, errno.ESTALE))
            return
        if flags & os.O_TRUNC:
            self._cache.invalidate(number)
        reply_flags = 0 if self._cache.is_dropping(number) else protocol.OPEN_KEEP_CACHE
        reply_flags |= protocol.OPEN_NO_FLUSH if reads else 0
        if not self._device.send(protocol.open_reply(unique, reply_flags, handle)):
            self._tree.release(handle)

    def _write_handler(self) -> Handler:
        """A closure: attribute look-ups would cost as much as some of its work."""
        request = self._request
        write = self._tree.write
        invalidate = self._cache.invalidate
        send = self._device.send
        arguments = protocol.WRITE_IN.unpack_from
        begin = protocol.BODY
        reply = protocol.write_reply
        start = begin + protocol.WRITE_IN.size

        def answer(unique: int, number: int, _size: int) -> None:
            handle, offset, size = arguments(request, begin)
            try:
                count = write(handle, offset, request[start : start + size])
            finally:
                invalidate(number)
            send(reply(unique, count))

        return answer

    def _fallocate(self, unique: int, number: int, _size: int) -> None:
        handle, offset, size, mode = protocol.FALLOCATE_IN.unpack_from(self._request, protocol.BODY)
        if mode & ~ALLOCATIONS or number >= control.DIRECTORY:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(number))
        self._waiting()
        try:
            self._tree.allocate(handle, offset, size, mode)
        finally:
            self._cache.invalidate(number)
        self._device.send(protocol.error_reply(unique, 0))

    def _sync_handler(self, sync: Callable[[int], None]) -> Handler:
        """The handler of FLUSH or FSYNC, which calls `sync` with the handle."""

        def answer(unique: int, number: int, _size: int) -> None:
            if number < control.DIRECTORY:
                (handle,) = protocol.HANDLE_IN.unpack_from(self._request, protocol.BODY)
                try:
                    sync(handle)
                finally:
                    self._cache.invalidate()  # of all files: a metadata document describes other files
            self._device.send(protocol.error_reply(unique, 0))

        return answer

    def _fsyncdir(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            self._waiting()
            self._tree.sync_directory(number)
        self._device.send(protocol.error_reply(unique, 0))

    def _release(self, unique: int, number: int, _size: int) -> None:
        if number < control.DIRECTORY:
            (handle,) = protocol.HANDLE_IN.unpack_from(self._request, protocol.BODY)
            self._tree.release(handle)
        self._device.send(protocol.error_reply(unique, 0))

    def _setattr(self, unique: int, number: int, _size: int) -> None:
        fields, handle, size, seconds, nanoseconds, mode, uid, gid = protocol.SETATTR_IN.unpack_from(
            self._request, protocol.BODY
        )
        if number >= control.DIRECTORY:
            raise control.not_permitted()
        self._check_owner(uid if fields & protocol.SET_UID else None, gid if fields & protocol.SET_GID else None)
        if fields & protocol.SET_MODE and mode & (stat.S_ISUID | stat.S_ISGID):
            raise PermissionError(errno.EPERM, "files of a mount cannot be set-user-id or set-group-id")
        tree = self._tree
        try:
            if fields & protocol.SET_SIZE:
                tree.truncate(number, size, handle if fields & protocol.SET_HANDLE else None)
            if fields & protocol.SET_MODE:
                tree.set_mode(number, mode & PERMISSIONS)
            if fields & protocol.SET_MTIME:
                now = fields & protocol.SET_MTIME_NOW
                tree.set_times(number, None if now else seconds * 1_000_000_000 + nanoseconds)
        finally:
            self._cache.invalidate(number)
        self._nodes.send_attributes(unique, tree.attributes(number))

    def _check_owner(self, uid: int | None, gid: int | None) -> None:
        for wanted, owner in zip((uid, gid), self._owner, strict=True):
            if wanted is not None and wanted != owner:
                raise PermissionError(errno.EPERM, "all files belong to the user of the mount; chown is not supported")

    def _setxattr(self, unique: int, number: int, size: int) -> None:
        length, flags = protocol.SETXATTR_IN.unpack_from(self._request, protocol.BODY)
        start = protocol.BODY + protocol.SETXATTR_IN.size
        raw, _, value = bytes(self._request[start:size]).partition(b"\0")
        name = _changeable_xattr(number, raw)
        self._waiting()
        self._tree.set_xattr(number, name, value[:length], flags)
        self._device.send(protocol.error_reply(unique, 0))

    def _removexattr(self, unique: int, number: int, size: int) -> None:
        name = _changeable_xattr(number, bytes(self._request[protocol.BODY : size - 1]))
        self._waiting()
        self._tree.remove_xattr(number, name)
        self._device.send(protocol.error_reply(unique, 0))


def _changeable_xattr(number: int, raw: bytes) -> str:
    """The name of an extended attribute. Raise OSError (EOPNOTSUPP) if clients cannot set or remove it."""
    name = os.fsdecode(raw)
    if number >= control.DIRECTORY or not name.startswith("user."):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
    return name


class NameRequests(_TreeRequests):
    """Answers requests that make, rename and remove names: CREATE, RENAME, UNLINK and their like. For one thread."""

    def handlers(self) -> dict[int, Handler]:
        changes = {
            protocol.MKNOD: self._mknod,
            protocol.MKDIR: self._mkdir,
            protocol.UNLINK: self._unlink,
            protocol.RMDIR: self._rmdir,
            protocol.RENAME: self._rename,
            protocol.RENAME2: self._rename2,
            protocol.LINK: self._link,
            protocol.SYMLINK: self._symlink,
        }
        change_handlers = {opcode: self._change_handler(change) for opcode, change in changes.items()}
        return {**change_handlers, protocol.CREATE: self._create}

    def _change_handler(self, change: Callable[[int, int], Attributes | None]) -> Handler:
        """A handler that calls `change` with the request's node number and size.

        The reply describes the file or directory that `change` returns, if there is one.
        """

        def answer(unique: int, number: int, size: int) -> None:
            try:
                attributes = change(number, size)
            finally:
                self._cache.invalidate()
            if attributes is None:
                self._device.send(protocol.error_reply(unique, 0))
            else:
                self._nodes.send_entry(unique, attributes)

        return answer

    def _name(self, parent: int, start: int, end: int) -> bytes:
        """A name in the request that is to be made or removed. Raise OSError if that is not possible."""
        name = bytes(self._request[start:end])
        if control.is_control_name(parent, name):
            raise control.not_permitted()
        if len(name) > protocol.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name[:32])
        return name

    def _create(self, unique: int, parent: int, size: int) -> None:
        flags, mode, _ = protocol.CREATE_IN.unpack_from(self._request, protocol.BODY)
        name = self._name(parent, protocol.BODY + protocol.CREATE_IN.size, size - 1)
        try:
            attributes, handle = self._tree.create(parent, name, flags & OPEN_FLAGS, mode & PERMISSIONS)
        finally:
            self._cache.invalidate()
        if not self._nodes.send_created(unique, attributes, handle):
            self._tree.release(handle)

    def _mknod(self, parent: int, size: int) -> Attributes:
        mode, _, _ = protocol.MKNOD_IN.unpack_from(self._request, protocol.BODY)
        name = self._name(parent, protocol.BODY + protocol.MKNOD_IN.size, size - 1)
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "a mount holds only files and directories", name)
        self._waiting()  # `flush` may wait, and a request that was repeated would find the new file
        attributes, handle = self._tree.create(parent, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & PERMISSIONS)
        try:
            self._tree.flush(handle)
        finally:
            self._tree.release(handle)
        return attributes

    def _mkdir(self, parent: int, size: int) -> Attributes:
        mode, _ = protocol.MKDIR_IN.unpack_from(self._request, protocol.BODY)
        name = self._name(parent, protocol.BODY + protocol.MKDIR_IN.size, size - 1)
        return self._tree.mkdir(parent, name, mode & PERMISSIONS)

    def _unlink(self, parent: int, size: int) -> None:
        self._tree.unlink(parent, self._name(parent, protocol.BODY, size - 1))

    def _rmdir(self, parent: int, size: int) -> None:
        self._tree.rmdir(parent, self._name(parent, protocol.BODY, size - 1))

    def _rename(self, parent: int, size: int) -> None:
        (new_parent,) = protocol.RENAME_IN.unpack_from(self._request, protocol.BODY)
        self._move(parent, new_parent, protocol.BODY + protocol.RENAME_IN.size, size, noreplace=False)

    def _rename2(self, parent: int, size: int) -> None:
        new_parent, flags = protocol.RENAME2_IN.unpack_from(self._request, protocol.BODY)
        if flags & ~protocol.RENAME_NOREPLACE:
            # An exchange done as a plain rename would lose one of the two files.
            raise OSError(errno.EINVAL, "renames support no flag but RENAME_NOREPLACE", f"{flags:#x}")
        self._move(parent, new_parent, protocol.BODY + protocol.RENAME2_IN.size, size, noreplace=bool(flags))

    def _move(self, parent: int, new_parent: int, start: int, size: int, *, noreplace: bool) -> None:
        middle = start + bytes(self._request[start:size]).index(b"\0")
        name, new_name = self._name(parent, start, middle), self._name(new_parent, middle + 1, size - 1)
        self._tree.rename(parent, name, new_parent, new_name, noreplace)

    def _link(self, new_parent: int, size: int) -> Attributes:
        (number,) = protocol.LINK_IN.unpack_from(self._request, protocol.BODY)
        if number >= control.DIRECTORY:
            raise control.not_permitted()
        name = self._name(new_parent, protocol.BODY + protocol.LINK_IN.size, size - 1)
        return self._tree.link(number, new_parent, name)

    def _symlink(self, _parent: int, size: int) -> Attributes:
        name, _, _ = bytes(self._request[protocol.BODY : size - 1]).partition(b"\0")
        why = "a mount has no symbolic links of its own; make the link in the source, and the mount follows it"
        raise PermissionError(errno.EPERM, why, os.fsdecode(name))
