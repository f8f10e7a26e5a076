"""Writers: replace whole objects of a store without losing the changes of concurrent writers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from shardfs.model.errors import UnsupportedError, errno_of, message
from shardfs.storage.local import LocalStore
from shardfs.storage.remote import FsspecStore
from shardfs.storage.writers.common import Begun, Make, nobody
from shardfs.storage.writers.gcs import GcsObjects
from shardfs.storage.writers.lease import Lease
from shardfs.storage.writers.local import LocalWriter
from shardfs.storage.writers.memory import MemoryObjects
from shardfs.storage.writers.objects import Changed, Objects, ObjectWriter
from shardfs.storage.writers.plain import PlainObjects
from shardfs.storage.writers.s3 import S3Objects

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.model.blobs import Blob, Stat
    from shardfs.storage.store import Store

__all__ = ["Begun", "Make", "Writer", "open_writer"]

log = logging.getLogger(__name__)

_RISK = "-o cas=none mounts it all the same, and concurrent writers may overwrite each other's changes"


class Writer(Protocol):
    """Changes the objects of one store. Thread-safe. Keys are paths in the store.

    `conditional`: an update never overwrites another writer's change if the store can distinguish the two versions.
    `local`: the objects are files of this machine.
    """

    @property
    def conditional(self) -> bool: ...

    @property
    def local(self) -> bool: ...

    def update(
        self,
        key: str,
        make: Make,
        begun: Callable[[Begun], None] = nobody,
        check: Callable[[Blob], None] = nobody,
        in_place: int = 0,
    ) -> Stat | None:
        """Replace the object `key` atomically; return its new `Stat`, None if it was removed.

        Args:
            make: gets the current object (None: absent) and returns the plan of the new one (None: remove). It is
                called again with the current object when another writer changes the object, and when the object's
                directory had to be created.
            begun: called when everything is prepared, right before the switch. After a crash, pass its argument to
                `recover`.
            check: gets the new object before the switch. It raises ValueError if the object is invalid.
            in_place: the size in bytes of the units in which a local file may be changed in place; 0 always replaces
                the object.

        A change in place needs a plan of three parts: new bytes for the beginning, the unchanged rest, and appended
        pieces. The beginning is written last, one unit at a time in any order. A crash may leave a mix of old and new
        units, and unused bytes at the end.

        Raise StaleShardError if other writers keep changing the object, OSError for errors of the store. After an error
        the object is unchanged, unless the store failed after the switch. A repeated update detects that case.
        """

    def require_writable(self, key: str) -> None:
        """Raise OSError if every `update` of this object is certain to fail, such as for a write-protected file."""

    def recover(self, begun: Begun) -> None:
        """Clean up after an interrupted update: finish or undo its switch, and remove its temporary data."""

    def recovered(self) -> None:
        """Declare that `recover` was called for every begun update. Remaining temporary files may now be removed."""

    def close(self) -> None:
        """Release the source for other writable mounts. Afterwards only `close` may be called again."""

    def put(self, key: str, data: bytes) -> Stat:
        """Replace or create the object without regard to its current version."""

    def delete(self, key: str) -> None:
        """Remove the object. Raise FileNotFoundError if it does not exist."""

    def make_directory(self, key: str, mode: int | None = None) -> None:
        """Create a directory. `mode` None applies the umask.

        Raise FileExistsError if the name exists, FileNotFoundError if the parent directory does not.
        """

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory. Raise OSError (ENOTEMPTY) if it has entries."""

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        """Rename a file, or a directory with its contents. `noreplace`: raise FileExistsError if `new` exists."""

    def sync_directory(self, key: str) -> None:
        """Flush a directory: names created, renamed or removed in it survive a power failure after the return."""

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        """Return a descriptor, as `os.open` does, but with exactly this `mode` whatever the umask is.

        For local stores only, like the methods below. Writers of remote stores raise UnsupportedError, except that
        their `link_target` and `links` find no links.
        """

    def stat(self, key: str, *, follow: bool = True) -> os.stat_result:
        """Return the attributes of a file or directory; without `follow`, of a symbolic link itself."""

    def set_mode(self, key: str, mode: int) -> None:
        """Set the permission bits of a file or directory."""

    def set_times(self, key: str, mtime_ns: int, *, follow: bool = True) -> None:
        """Set the modification time of a file or directory; without `follow`, of a symbolic link itself."""

    def make_link(self, key: str, target: str) -> None:
        """Create a symbolic link to `target`. Raise FileExistsError."""

    def link_target(self, key: str) -> str | None:
        """Return the target of a symbolic link; None if `key` is not one."""

    def links(self, key: str) -> dict[str, str]:
        """Return the targets of the symbolic links in a directory, by name."""

    def copy(self, fd: int, key: str) -> None:
        """Create a file with the bytes, mode, times and extended attributes of the open file `fd`.

        Raise FileExistsError.
        """

    def named(self, key: str, *, follow: bool = True) -> AbstractContextManager[int]:
        """Open a file or directory with O_PATH (open(2)): to call `fstat`, or to use its path in /proc/self/fd."""


def open_writer(
    store: Store, *, cas_none: bool = False, replace_links: bool = False, journal: Path | None = None
) -> Writer:
    """Return the writer for `store`. Sends probe requests if the store's abilities are unknown.

    Args:
        cas_none: accept a store without conditional writes, where concurrent writers may overwrite each other's
            changes.
        replace_links: see `LocalWriter`.
        journal: the mount's journal directory, which the caller has locked. If it is given, a remote store is locked,
            too.

    Raise UnsupportedError, with the reason, if the store cannot be written safely; BusyError if another mount has
    locked it.
    """
    if isinstance(store, LocalStore):
        return LocalWriter(store, replace_links=replace_links)
    if not isinstance(store, FsspecStore):
        raise UnsupportedError("this kind of store cannot be written")
    objects, root = _objects(store, cas_none=cas_none), store.path("")
    if not objects.conditional and not cas_none:
        raise UnsupportedError(f"{root}: this store does not heed conditional writes; {_RISK}")
    if objects.conditional and not objects.removes:
        log.warning("this store does not heed conditional deletes: a delete may remove another writer's new version")
    if isinstance(objects, PlainObjects):
        objects.try_writing(root)
    private = isinstance(objects, MemoryObjects)
    if journal is None or private:
        return ObjectWriter(store, objects)
    return ObjectWriter(store, objects, Lease.take(objects, root, journal).free)


def _objects(store: FsspecStore, *, cas_none: bool) -> Objects:
    protocol = store.fs.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    if "memory" in names:
        return MemoryObjects(store.fs)
    if "s3" in names:
        return _tried(S3Objects(store), cas_none=cas_none)
    if "gs" in names:
        return GcsObjects(store.fs, store.patience)
    return PlainObjects(store)


def _tried(objects: S3Objects, *, cas_none: bool) -> S3Objects:
    try:
        objects.try_conditions()
    except (PermissionError, FileNotFoundError):  # cas=none does not help here
        raise
    except (Changed, OSError) as e:
        why = "the store refuses to create a new object" if isinstance(e, Changed) else message(e)
        if not cas_none:
            what = f"cannot find out whether the store heeds conditional requests: {why}"
            raise OSError(errno_of(e), f"{what}. Try again later; {_RISK}") from e
        log.warning("it is not known whether the store heeds conditional requests, so none are sent: %s", why)
        objects.conditional = objects.removes = False
    return objects
