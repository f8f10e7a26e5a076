"""Mode, times and extended attributes of files, and the passed-through files of a local source on the disk."""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.kinds import NameKind
from shardfs.storage import descriptors, syscalls
from shardfs.storage.regular_files import open_regular
from shardfs.vfs.inodes import ROOT
from shardfs.write.file_contents import Part
from shardfs.write.files import put_bounded, shown_mode, split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.write.file_kinds import Kinds
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay

USER, OURS = "user.", "user.shardfs."
"""Prefix of extended attributes that programs may set, and the prefix within it that shardfs generates."""

FLUSH = "user.shardfs.flush"
"""Extended attribute that publishes when it is set."""


@dataclass(eq=False)
class FileMetadata(Part):
    """Reads and sets mode, times and extended attributes. Thread-safe."""

    _overlay: Overlay
    _open_files: OpenFiles
    _kinds: Kinds

    # ---- mode and times ----

    def set_mode(self, number: int, mode: int) -> None:
        """Set permission bits; other bits of `mode` are ignored. Those of chunks are kept until the end of the mount.

        Raise OSError if the store refuses, or the file is gone.
        """
        file = self._files.by_number.get(number)
        disk = self._writer.disk
        mode = stat.S_IMODE(mode)
        if file is not None and file.fd >= 0:
            syscalls.chmod(file.fd, mode)
        elif disk is not None and (path := self._stored_path(number, NameKind.PLAIN)) is not None:
            disk.set_mode(path, mode)
        elif file is not None:
            file.set_status(mode=shown_mode(mode, file.kind is NameKind.DIRECTORY))
        else:
            put_bounded(self._names.modes, number, shown_mode(mode, self._source_tree.attributes(number).directory))
        if disk is not None and (document := self._stored_path(number, NameKind.DOCUMENT)) is not None:
            with suppress(FileNotFoundError):
                disk.set_mode(document, mode)

    def set_times(self, number: int, mtime_ns: int | None) -> None:
        """Set the modification time in ns since 1970 (None: now). That of a chunk is kept until the end of the mount.

        Raise OSError as `set_mode`.
        """
        when = time.time_ns() if mtime_ns is None else mtime_ns
        file = self._files.by_number.get(number)
        disk = self._writer.disk
        if file is not None and file.fd >= 0:
            syscalls.utime(file.fd, when, when)
        elif disk is not None and (path := self._stored_path(number, NameKind.PLAIN)) is not None:
            disk.set_times(path, when)
            self._source_tree.changed(path)
        elif file is not None and file.kind is NameKind.DIRECTORY:
            file.set_status(mtime_ns=when)
        elif file is None and self._source_tree.attributes(number).directory:
            put_bounded(self._names.times, number, when)
        else:
            file = self._open_files.adopt(number)
            with self._names.lock:
                file.set_status(mtime_ns=when)
                if file.matches_source:
                    self._kinds.rest(file)
        if disk is not None and (document := self._stored_path(number, NameKind.DOCUMENT)) is not None:
            with suppress(FileNotFoundError):
                disk.set_times(document, when)
                self._source_tree.changed(document)

    def _stored_path(self, number: int, kind: NameKind) -> str | None:
        """Return the path at which the store has a file of this kind, if it has; directories count as `PLAIN`."""
        file = self._files.by_number.get(number)
        if file is not None:
            return file.path if file.kind is kind else None
        if number == ROOT or self._source_tree.is_virtual(number):
            return None
        path = self._names.path_of(number)
        if self._source_tree.attributes(number).directory:
            return path if kind is NameKind.PLAIN and not self._source_tree.directories.is_moved(number) else None
        return path if self._names.classify_name(*split(path)).kind is kind else None

    # ---- extended attributes ----

    def xattrs(self, number: int) -> dict[str, bytes]:
        """Return the extended attributes; for a passed-through file or directory, those stored on the disk.

        shardfs adds attributes to a directory of the source. A file gets none, so that programs can copy all its
        attributes.
        """
        with self._on_disk(number) as path:
            if path is None:
                return self._overlay.own_xattrs(number)
            return {**_stored(path), **({} if number in self._files.by_number else self._overlay.own_xattrs(number))}

    def set_xattr(self, number: int, name: str, value: bytes, flags: int = 0) -> None:
        """Set a `user.*` attribute on a file or directory of a local source; `flags` as for setxattr(2).

        Raise OSError: EOPNOTSUPP for other files and names. `user.shardfs.flush` publishes pending versions at and
        below the path instead. Its value is the timeout in seconds; empty or 0 waits without limit. It raises as
        `WriteBuffer.publish`.
        """
        if name == FLUSH:
            timeout = _seconds(value)
            self._names.before_waiting()
            self._pending.publish(self._names.path_of(number), timeout)
            return
        with self._to_change(number, name) as path:
            syscalls.setxattr(path, name, value, flags)

    def remove_xattr(self, number: int, name: str) -> None:
        """Remove a `user.*` attribute from a file or directory of a local source. Raise OSError as `set_xattr`."""
        with self._to_change(number, name) as path:
            syscalls.removexattr(path, name)

    @contextmanager
    def _to_change(self, number: int, name: str) -> Iterator[str]:
        with self._on_disk(number) as path:
            if path is None or name.startswith(OURS) or not name.startswith(USER):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
            yield path

    # ---- files on the disk ----

    def copy_on_disk(self, number: int, path: str) -> bool:
        """Copy a file of a local source to `path` inside the store. Return False if the file is not stored as such.

        The kernel copies the bytes; no byte passes through shardfs. Raise the errors of `LocalDirectory.copy`.
        """
        with self._on_disk(number) as origin:
            disk = self._writer.disk
            if origin is None or disk is None:
                return False
            fd = open_regular(origin, follow=True)
        try:
            disk.copy(fd, path)
        finally:
            os.close(fd)
        self._source_tree.changed(path)
        return True

    @contextmanager
    def _on_disk(self, number: int) -> Iterator[str | None]:
        """Yield a path to a file or directory of a local source; None if the source has no such file.

        The path goes through a descriptor, so it stays valid if the file is renamed.
        """
        disk = self._writer.disk
        with ExitStack() as opened:
            with self._names.lock:
                file = self._files.by_number.get(number)  # the last close of the file closes its own descriptor
                opened_fd = file.fd if file is not None else -1
                fd = descriptors.dup(opened_fd) if opened_fd >= 0 else None
            if fd is not None:
                opened.callback(os.close, fd)
            elif disk is not None and (stored_path := self._stored_path(number, NameKind.PLAIN)) is not None:
                with suppress(FileNotFoundError):  # a directory may be shown for its documents but be absent on disk
                    fd = opened.enter_context(disk.named(stored_path))
            yield None if fd is None else f"/proc/self/fd/{fd}"


def _stored(path: str) -> dict[str, bytes]:
    """Return the `user.*` attributes of a file.

    Attributes with shardfs's own prefix are omitted, because programs would take them for generated ones.
    """
    attributes = {}
    try:
        names = os.listxattr(path)
    except OSError as e:
        if e.errno != errno.EOPNOTSUPP:  # the file system has no extended attributes
            raise
        return {}
    for name in names:
        if name.startswith(USER) and not name.startswith(OURS):
            with suppress(OSError):  # removed since the listing, or unreadable for this user
                attributes[name] = os.getxattr(path, name)
    return attributes


def _seconds(value: bytes) -> float | None:
    """Return the time-out that is the value of `FLUSH`; None for no limit. Raise OSError (EINVAL) if it is none."""
    try:
        seconds = float(value or b"0")
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise OSError(errno.EINVAL, f"{FLUSH} takes a number of seconds, such as 60; empty or 0 is no limit", value)
    return seconds or None
