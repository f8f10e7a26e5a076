"""Files of a local source that are passed through: extended attributes, allocation, copies and symbolic links."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs.model.attributes import Attributes
from shardfs.model.kinds import NameKind
from shardfs.storage import syscalls
from shardfs.vfs.inodes import TABLE_END, number_of
from shardfs.write.files import WritableFile, join
from shardfs.write.links import stays_inside
from shardfs.write.open_files import OpenFiles
from shardfs.write.overlay import stale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.vfs.chunk_dirs import Spot

USER, OURS = "user.", "user.shardfs."
"""Prefix of extended attributes that programs may set, and the prefix within it that shardfs generates."""


class PassedThrough(OpenFiles):
    """The part of `WriteTree` for extended attributes, fallocate and symbolic links. Thread-safe."""

    shows_links = False

    def xattrs(self, number: int) -> dict[str, bytes]:
        """Return the extended attributes; for a passed-through file or directory, those stored on the disk."""
        file = self._files.by_number.get(number)
        if file is not None and file.is_link:
            return {}
        with self._passed(number) as path:
            return super().xattrs(number) if path is None else {**_stored(path), **self._told(number)}

    def _told(self, number: int) -> dict[str, bytes]:
        """Return the attributes that shardfs adds to a directory of the source.

        A file gets none, so that programs can copy all its attributes.
        """
        return {} if number in self._files.by_number else super().xattrs(number)

    def set_xattr(self, number: int, name: str, value: bytes, flags: int = 0) -> None:
        """Set a `user.*` attribute on a file or directory of a local source; `flags` as for setxattr(2)."""
        with self._to_change(number, name) as path:
            syscalls.setxattr(path, name, value, flags)

    def remove_xattr(self, number: int, name: str) -> None:
        """Remove a `user.*` attribute from a file or directory of a local source."""
        with self._to_change(number, name) as path:
            syscalls.removexattr(path, name)

    def copy_on_disk(self, number: int, path: str) -> bool:
        """Copy a file of a local source to `path` inside the store. Return False if the file is not stored as such.

        The kernel copies the bytes; no byte passes through shardfs.
        """
        with self._passed(number) as there:
            if there is None:
                return False
            fd = os.open(there, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.writer.copy(fd, path)
        finally:
            os.close(fd)
        self.base.changed(path)
        return True

    def allocate(self, handle: int, offset: int, size: int, mode: int) -> None:
        """Reserve or change a byte range of a passed-through file; `mode` as for fallocate(2)."""
        file = self._writable(handle).file
        if file is None or file.fd < 0:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._waiting()
        syscalls.allocate(file.fd, offset, size, mode)

    # ---- symbolic links ----

    def symlink(self, parent: int, name: bytes, target: bytes) -> Attributes:
        """Create a symbolic link to a path in the source. Raise OSError (EPERM) where links cannot be shown."""
        directory = self._directory(parent)
        path, leads_to = join(directory, name), os.fsdecode(target)
        if self._find(directory, parent, name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._waiting()
        self._require_link(directory, name, self._spot_to_write(directory, name), leads_to)
        with self._naming():
            self.writer.make_link(path, leads_to)
            with self._lock:
                file = self._new_link(directory, name)
            self.base.changed(path)
        return self._attributes(file)

    def read_link(self, number: int) -> bytes:
        """Return the target of a symbolic link.

        Raise OSError (EACCES) if the target is outside of the source; another program may have changed the link.
        """
        file = self._files.by_number.get(number)
        if file is None or not file.is_link:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(number))
        target = self.writer.link_target(file.path) if file.path is not None else None
        if target is None:
            raise stale(number)
        if not stays_inside(file.parent or "", target):
            raise PermissionError(errno.EACCES, "a symbolic link leads out of the source", file.path)
        return os.fsencode(target)

    def _stored(self, directory: str, number: int, name: bytes) -> Attributes:
        """Return the attributes of a name in the source, including symbolic links that are dangling or circular."""
        failure: OSError | None = None
        try:
            found = super()._stored(directory, number, name)
            if found.number >= TABLE_END:
                return found
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.EACCES, errno.ELOOP):
                raise
            failure = e
        link = self._link_at(directory, number, name)
        if link is not None:
            return self._attributes(link)
        if failure is not None:
            raise failure
        return found

    def _link_at(self, directory: str, number: int, name: bytes) -> WritableFile | None:
        """Return the file for a symbolic link that the mount shows as one, else None.

        The target keeps its own name and inode number.
        """
        if not self.shows_links or not self.writer.local or self.base.is_virtual(number):
            return None
        path = join(directory, name)
        target = self.writer.link_target(path)
        if target is None or not self._may_show_link(directory, name, target):
            return None
        with self._lock:
            known = (self._files.directory(directory) or {}).get(name)
            if known is None:
                own = number_of(path)
                known = self._new_link(directory, name, 0 if own in self._files.by_number else own)
        return known

    def _new_link(self, directory: str, name: bytes, number: int = 0) -> WritableFile:
        file = self._files.new(directory, name, NameKind.PLAIN, number=number)
        file.is_link = True
        return file

    def _may_show_link(self, directory: str, name: bytes, target: str) -> bool:
        return stays_inside(directory, target) and self.spot(directory, name).kind is NameKind.PLAIN

    def _links_in(self, directory: str, number: int) -> list[bytes]:
        if not self.shows_links or not self.writer.local or self.base.is_virtual(number):
            return []
        self._waiting()
        found = ((os.fsencode(name), target) for name, target in self.writer.links(directory).items())
        return [name for name, target in found if self._may_show_link(directory, name, target)]

    def _plain_attributes(self, file: WritableFile) -> Attributes:
        if not file.is_link:
            return super()._plain_attributes(file)
        info = self.writer.stat(file.path, follow=False) if file.path is not None else None
        if info is None or not stat.S_ISLNK(info.st_mode):
            raise stale(file.number)
        return Attributes(file.number, False, info.st_size, info.st_mtime_ns, None, info.st_mode)

    def _require_link(self, directory: str, name: bytes, spot: Spot, target: str) -> None:
        """Raise OSError (EPERM) if a symbolic link may not have this name or target.

        A link is refused beside sharded data, under the name of a document, and if it leads out of the source.
        """
        text, number = os.fsdecode(name), self._base_number(directory)
        described = self.documents.is_document(text) or self.documents.is_foreign(text)
        stored = self.writer.local and number is not None and not self.base.is_virtual(number)
        if (
            not self.shows_links
            or not stored
            or spot.kind is not NameKind.PLAIN
            or described
            or self._has_scratch(directory)
        ):
            raise PermissionError(errno.EPERM, "no symbolic links beside sharded data", join(directory, name))
        if not stays_inside(directory, target):
            raise PermissionError(errno.EPERM, "a symbolic link would lead out of the source", join(directory, name))

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """Set the modification time (None: now). For a symbolic link, set the time of the link itself."""
        file = self._files.by_number.get(number)
        if file is None or not file.is_link:
            super().set_times(number, mtime_ns)
        elif file.path is not None:
            self.writer.set_times(file.path, time.time_ns() if mtime_ns is None else mtime_ns, follow=False)

    # ---- what the calls above have in common ----

    @contextmanager
    def _to_change(self, number: int, name: str) -> Iterator[str]:
        with self._passed(number) as path:
            if path is None or name.startswith(OURS) or not name.startswith(USER):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
            yield path

    @contextmanager
    def _passed(self, number: int) -> Iterator[str | None]:
        """Yield a path to a file or directory of a local source; None if the source has no such file.

        The path goes through a descriptor, so it stays valid if the file is renamed.
        """
        with ExitStack() as opened:
            fd = self._open_copy(number)
            if fd is not None:
                opened.callback(os.close, fd)
            elif (path := self._stored_path(number)) is not None:
                with suppress(FileNotFoundError):  # a directory may be shown for its documents but be absent on disk
                    fd = opened.enter_context(self.writer.named(path))
            yield None if fd is None else f"/proc/self/fd/{fd}"

    def _open_copy(self, number: int) -> int | None:
        """Return a duplicate of the descriptor of an open file, else None.

        The duplicate stays valid after the last close of the file.
        """
        with self._lock:
            file = self._files.by_number.get(number)
            return os.dup(file.fd) if file is not None and file.fd >= 0 else None


def _stored(path: str) -> dict[str, bytes]:
    """Return the `user.*` attributes of a file.

    Attributes with shardfs's own prefix are omitted, because programs would take them for generated ones.
    """
    found = {}
    try:
        names = os.listxattr(path)
    except OSError as e:
        if e.errno != errno.EOPNOTSUPP:  # the file system has no extended attributes
            raise
        return {}
    for name in names:
        if name.startswith(USER) and not name.startswith(OURS):
            with suppress(OSError):  # removed since the listing, or unreadable for this user
                found[name] = os.getxattr(path, name)
    return found
