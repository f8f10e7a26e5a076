"""Files of a local source that are passed through: what they have, and files in the formats have not."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs import disk
from shardfs.writing.open_files import OpenFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

USER, OURS = "user.", "user.shardfs."
"""What names of extended attributes begin with: those that programs may set, and among them those that we make up."""


class PassedThrough(OpenFiles):
    """Extended attributes, room on the disk. Thread-safe."""

    def xattrs(self, number: int) -> dict[str, bytes]:
        """As `Overlay.xattrs`; of a file or directory of the source, those that it has there."""
        with self._passed(number) as path:
            return super().xattrs(number) if path is None else {**_stored(path), **self._told(number)}

    def _told(self, number: int) -> dict[str, bytes]:
        """What we tell of a directory of the source: nothing of a file, so that its attributes can be copied."""
        return {} if number in self._files.by_number else super().xattrs(number)

    def set_xattr(self, number: int, name: str, value: bytes, flags: int = 0) -> None:
        """An attribute `user.*` of a file or directory of a local source; `flags` as those of setxattr(2)."""
        with self._to_change(number, name) as path:
            disk.setxattr(path, name, value, flags)

    def remove_xattr(self, number: int, name: str) -> None:
        """The same, away with it."""
        with self._to_change(number, name) as path:
            disk.removexattr(path, name)

    def copy_on_disk(self, number: int, path: str) -> bool:
        """Make a file as this one is, if it is one of a local source; whether it is. No byte of it comes to us."""
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
        """Have room for these bytes, or what else the mode of fallocate(2) says."""
        file = self._writable(handle).file
        if file is None or file.fd < 0:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._waiting()
        disk.allocate(file.fd, offset, size, mode)

    @contextmanager
    def _to_change(self, number: int, name: str) -> Iterator[str]:
        with self._passed(number) as path:
            if path is None or name.startswith(OURS) or not name.startswith(USER):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
            yield path

    @contextmanager
    def _passed(self, number: int) -> Iterator[str | None]:
        """A path that leads to a file or directory of a local source, and to no other, whatever it is called by now.

        None if the source has no such file.
        """
        with ExitStack() as opened:
            fd = self._open_copy(number)
            if fd is not None:
                opened.callback(os.close, fd)
            elif (path := self._stored_path(number)) is not None:
                with suppress(FileNotFoundError):  # a directory that is shown, since documents tell of it
                    fd = opened.enter_context(self.writer.named(path))
            yield None if fd is None else f"/proc/self/fd/{fd}"

    def _open_copy(self, number: int) -> int | None:
        """Another descriptor of a file that is open on the disk: who closes it last must not take this one away."""
        with self._lock:
            file = self._files.by_number.get(number)
            return os.dup(file.fd) if file is not None and file.fd >= 0 else None


def _stored(path: str) -> dict[str, bytes]:
    """What programs have set of a file. What somebody has called as we call ours would be taken for it."""
    found = {}
    try:
        names = os.listxattr(path)
    except OSError as e:
        if e.errno != errno.EOPNOTSUPP:  # this disk has none
            raise
        return {}
    for name in names:
        if name.startswith(USER) and not name.startswith(OURS):
            with suppress(OSError):  # somebody was faster, or may read it and we may not
                found[name] = os.getxattr(path, name)
    return found
