"""Writers: objects of a store replaced as a whole, and nothing lost that others write meanwhile."""

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

    `conditional`: nothing is lost that other writers change meanwhile, if they can be told apart at all.
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
        """Replace the object `key` as a whole, all or nothing; what it is then (None: gone).

        `make` is given the object as it is now (None: absent) and says what it shall be (None: gone). It is called
        again, with what is there by then, if somebody else changed the object meanwhile, and for an object in a
        directory that has to be made first. `begun` is called when all is prepared, right before the switch: after
        a crash, what it was told is what `recover` needs. `check` looks at the new object before the switch and
        raises ValueError if it is not right.

        With `in_place` a file that exists is changed where it lies, if all that shall be is the old bytes with others
        behind them, but for the first piece: that is bytes, which replace as many of the old ones. They are changed so
        many at a time as `in_place` says, in any order, when all else is on the disk; a crash may leave some old and
        some new, and behind the old object what nobody asks for.

        Raise StaleShardError if others do not stop changing it, OSError for what the store says. Then the object is
        as it was, or (the store having failed afterwards) as it should be: an update that is tried again finds out.
        """

    def require_writable(self, key: str) -> None:
        """Raise OSError if it is known that no `update` of this object can succeed, whatever it makes."""

    def recover(self, begun: Begun) -> None:
        """After a crash: leave no trace of an update but what it replaced, or what it should have replaced."""

    def recovered(self) -> None:
        """`recover` was called for all that had begun: what else crashed updates have left may be removed."""

    def close(self) -> None:
        """Let other mounts write to the source. Nothing but `close` may be called after it."""

    def put(self, key: str, data: bytes) -> Stat:
        """Replace or create an object, whatever it is now."""

    def delete(self, key: str) -> None:
        """Raise FileNotFoundError if there is none."""

    def make_directory(self, key: str, mode: int | None = None) -> None:
        """Raise FileExistsError; FileNotFoundError without a directory to make it in.

        `mode` None: as the umask has it.
        """

    def remove_directory(self, key: str) -> None:
        """Raise OSError (ENOTEMPTY) if something is in it."""

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        """A file, or a directory with all that is below."""

    def sync_directory(self, key: str) -> None:
        """What was made, renamed or removed in a directory survives a power failure when this returns."""

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor, as of `os.open`, but the umask does not count. This and those below are of local writers only;
        others raise UnsupportedError."""

    def stat(self, key: str, *, follow: bool = True) -> os.stat_result:
        """Of a file or directory, or of a symbolic link itself."""

    def set_mode(self, key: str, mode: int) -> None:
        """Permission bits of a file or directory."""

    def set_times(self, key: str, mtime_ns: int, *, follow: bool = True) -> None:
        """When a file or directory was changed last, or a symbolic link itself."""

    def make_link(self, key: str, target: str) -> None:
        """A symbolic link. Raise FileExistsError."""

    def link_target(self, key: str) -> str | None:
        """Where a symbolic link leads; None if there is none of this name."""

    def links(self, key: str) -> dict[str, str]:
        """The same of all in a directory."""

    def copy(self, fd: int, key: str) -> None:
        """A new file with bytes, mode, time and attributes of one that is open. Raise FileExistsError."""

    def named(self, key: str, *, follow: bool = True) -> AbstractContextManager[int]:
        """A descriptor of a file or directory that is good for its path in /proc alone: see O_PATH."""


def open_writer(
    store: Store, *, cas_none: bool = False, replace_links: bool = False, journal: Path | None = None
) -> Writer:
    """The writer for `store`; tries what the store can, if that is not known.

    Args:
        cas_none: also if others could lose what they write.
        replace_links: see `LocalWriter`.
        journal: the directory of ours, which is locked. If it is given, a remote store is locked, too.

    Raise UnsupportedError, with the reason, if others could lose what they write; BusyError if the store is locked.
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
    except (PermissionError, FileNotFoundError):  # cas=none does not help
        raise
    except (Changed, OSError) as e:
        why = "the store refuses to create a new object" if isinstance(e, Changed) else message(e)
        if not cas_none:
            what = f"cannot find out whether the store heeds conditional requests: {why}"
            raise OSError(errno_of(e), f"{what}. Try again later; {_RISK}") from e
        log.warning("it is not known whether the store heeds conditional requests, so none are sent: %s", why)
        objects.conditional = objects.removes = False
    return objects
