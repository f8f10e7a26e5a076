"""Symbolic links of a local source, which a mount may show as links."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from shardfs.model.kinds import NameKind
from shardfs.vfs.inodes import number_of
from shardfs.write.files import join, stale

if TYPE_CHECKING:
    from shardfs.storage.writers import Writer
    from shardfs.vfs.chunk_dirs import NameMeaning
    from shardfs.write.files import WritableFile
    from shardfs.write.names import Names


def stays_inside(directory: str, target: str) -> bool:
    """Return whether a symbolic link in `directory` resolves inside the source.

    The kernel follows a link relative to the directory of that link. A chain of links therefore stays inside if each
    link does. A `..` after a name is refused, because the name may itself be a link to any directory.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    depth = directory.count("/") + 1 if directory else 0
    return up <= depth and ".." not in parts[up:]


class Links:
    """Symbolic links that are passed through to a local store. Thread-safe."""

    def __init__(self, names: Names, writer: Writer) -> None:
        self._names, self._writer = names, writer

    def target_of(self, number: int) -> bytes:
        """Return the target of a symbolic link.

        Raise OSError (EACCES) if the target is outside of the source; another program may have changed the link.
        """
        file = self._names.files.by_number.get(number)
        if file is None or not file.is_link:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(number))
        target = self._writer.link_target(file.path) if file.path is not None else None
        if target is None:
            raise stale(number)
        if not stays_inside(file.parent or "", target):
            raise PermissionError(errno.EACCES, f"the symbolic link leads out of the source, to {target}", file.path)
        return os.fsencode(target)

    def _may_be_in(self, number: int | None) -> bool:
        """Return whether links are shown in the tree's directory with this inode number."""
        if not self._names.hooks.shows_links or not self._writer.local or number is None:
            return False
        return not self._names.base.is_virtual(number)

    def _is_shown(self, directory: str, name: bytes, target: str) -> bool:
        return stays_inside(directory, target) and self._names.classify_name(directory, name).kind is NameKind.PLAIN

    def find(self, directory: str, number: int, name: bytes) -> WritableFile | None:
        """Return the file for a symbolic link that the mount shows as one, else None.

        The target keeps its own name and inode number.
        """
        if not self._may_be_in(number):
            return None
        path, files = join(directory, name), self._names.files
        target = self._writer.link_target(path)
        if target is None or not self._is_shown(directory, name, target):
            return None
        with self._names.lock:
            known = files.in_directory(directory).get(name)
            if known is None:
                own = number_of(path)
                known = self.add(directory, name, 0 if own in files.by_number else own)
        return known

    def add(self, directory: str, name: bytes, number: int = 0) -> WritableFile:
        """Return a new file for a symbolic link. The caller holds the lock."""
        file = self._names.files.new(directory, name, NameKind.PLAIN, number=number)
        file.is_link = True
        return file

    def in_directory(self, directory: str, number: int) -> list[bytes]:
        """Return the names of symbolic links in a directory that are shown as links."""
        if not self._may_be_in(number):
            return []
        self._names.waiting()
        found = ((os.fsencode(name), target) for name, target in self._writer.links(directory).items())
        return [name for name, target in found if self._is_shown(directory, name, target)]

    def require(self, directory: str, name: bytes, meaning: NameMeaning, target: str, *, described: bool) -> None:
        """Raise OSError (EPERM) if a symbolic link may not have this name or target.

        A link is refused beside sharded data, under the name of a document (`described`), and if it leads out of the
        source.
        """
        fits = meaning.kind is NameKind.PLAIN and not described and not self._names.has_scratch(directory)
        if not fits or not self._may_be_in(self._names.base_number(directory)):
            raise PermissionError(
                errno.EPERM,
                "symbolic links cannot be created beside sharded data or in the place of metadata",
                join(directory, name),
            )
        if not stays_inside(directory, target):
            raise PermissionError(
                errno.EPERM, f"the symbolic link would lead out of the source, to {target}", join(directory, name)
            )
