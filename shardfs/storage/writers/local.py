"""Replace local files atomically: write a new file beside the old one, exchange the two, and verify the outcome.

At every moment the name leads to the old or the new file, complete and on disk. (With `in_place`, an existing file may
instead be changed step by step.)

Cooperating writers are excluded by tensorstore's lock on `<name>.__lock`. The exchange reveals writers that do not take
this lock, because it yields their version instead of the expected one. Their version is then put back, and the update
starts again from it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat as stat_module
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardfs.model.blobs import ByteRange
from shardfs.model.errors import StaleShardError
from shardfs.model.write_plan import is_same
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.local import LocalBlob, stat_of
from shardfs.storage.writers import in_place as in_its_place
from shardfs.storage.writers.common import Begun, Make, nobody
from shardfs.storage.writers.files import ObjectPlace, directory_identity, fill, identity_at, open_old

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.storage.local import LocalStore

log = logging.getLogger("shardfs")

LOCK_S = 120.0
"""Seconds to wait for the lock of another writer."""

RACE_S = 30.0
"""Seconds during which an update is retried because a writer without a lock was faster."""

PREFIX, SUFFIX = ".shardfs-", ".tmp"

_NO_SUCH_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that support rename, but not RENAME_EXCHANGE or RENAME_NOREPLACE."""


class LocalWriter:
    """Changes the files below the root of `store`; see `Writer`.

    Args:
        replace_links: replace a symbolic link by a file. Otherwise an update of the link's name is refused.
        lock_s: seconds to wait for the lock of another writer.
        race_s: seconds during which an update is retried because another writer was faster.
    """

    local = conditional = True

    def __init__(
        self, store: LocalStore, *, replace_links: bool = False, lock_s: float = LOCK_S, race_s: float = RACE_S
    ) -> None:
        self._store, self._replace_links, self._lock_s, self._race_s = store, replace_links, lock_s, race_s
        self._swept: set[str] | None = None
        self._sweeping = threading.Lock()
        self._lasting = {""}  # directories whose names, and those of all parents, are on disk
        # Updates by key that failed after the switch, and whose cleanup failed, too.
        self._unsettled: dict[str, Begun] = {}
        self._source = directory_identity(store.root)

    def require_writable(self, key: str) -> None:
        with suppress(FileNotFoundError):  # `update` creates a missing directory
            at, name = self._directory_of(key)
            try:
                if not os.access(f"/proc/self/fd/{at}", os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "is in a directory that is write-protected", key)
                open_old(self._store, ObjectPlace(key, at, name), replace_links=self._replace_links)
            finally:
                os.close(at)

    def update(
        self,
        key: str,
        make: Make,
        begun: Callable[[Begun], None] = nobody,
        check: Callable[[Blob], None] = nobody,
        in_place: int = 0,
    ) -> Stat | None:
        try:
            at, name = self._directory_of(key)
        except FileNotFoundError:
            self._require_source()
            if make(None) is None:
                return None
            at, name = self._directory_of(key, make=True)
        place = ObjectPlace(key, at, name)
        try:
            self._require_source()
            directory = key.rpartition("/")[0]
            self._sweep_once(directory)
            self._make_last(directory)
            with self._locked(place):
                return self._updated(place, make, begun, check, in_place)
        finally:
            self._store.reopen(key)
            os.close(at)

    def recover(self, begun: Begun) -> None:
        if not begun.temp and not begun.head:
            return
        try:
            at, name = self._directory_of(begun.key)
        except FileNotFoundError:
            return
        try:
            place = ObjectPlace(begun.key, at, name)
            with self._locked(place):
                _settle(place, begun)
        finally:
            self._store.reopen(begun.key)
            os.close(at)

    def recovered(self) -> None:
        self._swept = set()

    def close(self) -> None:
        """Nothing to do: locks are held only during an update."""

    def _sweep_once(self, directory: str) -> None:
        with self._sweeping:
            if self._swept is not None and directory not in self._swept:
                self._swept.add(directory)
                self.sweep(directory)

    def _make_last(self, directory: str) -> None:
        """Fsync the parents of a directory once, so that its name is on disk.

        The process that created the directory may have been killed, or may have got an error, before its fsync.
        """
        if self._store.follow_symlinks:
            return
        above, _, _ = directory.rpartition("/")
        if directory not in self._lasting:
            self._make_last(above)
            at = self._directory(above)
            try:
                syscalls.fsync_directory(at)
            finally:
                os.close(at)
            self._lasting.add(directory)

    def sweep(self, directory: str) -> int:
        """Remove temporary files of updates that a crash ended before they began; return the number of files removed.

        Call this only after `recover` of every begun update.
        """
        try:
            at = self._directory(directory)
        except FileNotFoundError:
            return 0
        try:
            return sum(_abandoned(name, at) for name in os.listdir(at) if is_temporary(name))
        finally:
            os.close(at)

    # ---- plain files

    def put(self, key: str, data: bytes) -> Stat:
        new = self.update(key, lambda _: [data])
        if new is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return new

    def delete(self, key: str) -> None:
        with self._place(key) as place:
            syscalls.unlink(place.name, place.at)

    def make_directory(self, key: str, mode: int | None = None) -> None:
        with self._place(key) as place:
            syscalls.mkdir(place.name, at=place.at)
        if mode is not None:
            self.set_mode(key, mode)

    def remove_directory(self, key: str) -> None:
        with self._place(key) as place:
            syscalls.rmdir(place.name, place.at)

    def rename(self, old: str, new: str, *, noreplace: bool = False) -> None:
        with self._place(old) as a, self._place(new) as b:
            (syscalls.rename_new if noreplace else syscalls.rename)(a.name, b.name, a.at, b.at)

    def sync_directory(self, key: str) -> None:
        at = self._directory(key)
        try:
            syscalls.fsync_directory(at)
        finally:
            os.close(at)

    def open_file(self, key: str, flags: int, mode: int = 0o666) -> int:
        create = flags & os.O_CREAT
        if not (create and flags & os.O_EXCL):
            try:
                return self._open_existing(key, flags & ~os.O_CREAT)
            except FileNotFoundError:
                if not create:
                    raise
        with self._place(key) as place:  # a dangling link counts as existing
            fd = syscalls.open(place.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, place.at)
        # The caller has already applied its umask to `mode`, so undo the effect of this process's umask.
        if stat_module.S_IMODE(os.fstat(fd).st_mode) != mode:
            syscalls.chmod(fd, mode)
        return fd

    def stat(self, key: str, *, follow: bool = True) -> os.stat_result:
        with self.named(key, follow=follow) as fd:
            return os.fstat(fd)

    def set_mode(self, key: str, mode: int) -> None:
        with self.named(key) as fd:
            syscalls.chmod(f"/proc/self/fd/{fd}", mode)

    def set_times(self, key: str, mtime_ns: int, *, follow: bool = True) -> None:
        with self.named(key, follow=follow) as fd:
            syscalls.utime(f"/proc/self/fd/{fd}", mtime_ns, mtime_ns)
        self._store.reopen(key)

    def copy(self, fd: int, key: str) -> None:
        info = os.fstat(fd)
        old, temp = LocalBlob(os.dup(fd), info, nothing), f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        with self._place(key) as place:
            new = _written(place, temp, old, [ByteRange(0, info.st_size)], nobody)
            try:
                syscalls.utime(new, info.st_atime_ns, info.st_mtime_ns)
                _name_new(place, temp)
            except BaseException:
                with suppress(OSError):
                    syscalls.unlink(temp, place.at)
                raise
            finally:
                os.close(new)

    def make_link(self, key: str, target: str) -> None:
        with self._place(key) as place:
            syscalls.symlink(target, place.name, place.at)

    def link_target(self, key: str) -> str | None:
        try:
            with self.named(key, follow=False) as fd:
                return os.readlink("", dir_fd=fd) if stat_module.S_ISLNK(os.fstat(fd).st_mode) else None
        except OSError:
            return None

    def links(self, key: str) -> dict[str, str]:
        found = {}
        try:
            at = self._directory(key)
        except OSError:
            return {}
        try:
            with os.scandir(at) as entries:
                for name in (e.name for e in entries if e.is_symlink()):
                    with suppress(OSError):  # another program has removed the link meanwhile
                        found[name] = os.readlink(name, dir_fd=at)
        finally:
            os.close(at)
        return found

    @contextmanager
    def named(self, key: str, *, follow: bool = True) -> Iterator[int]:
        """Open with O_PATH, which has no side effect on any type of file."""
        fd = os.open(self._store.path(key), os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            self._store.confined(fd, key)
            yield fd
        finally:
            os.close(fd)

    def _open_existing(self, key: str, flags: int) -> int:
        with self.named(key) as fd:  # check the type before opening for writing
            mode = os.fstat(fd).st_mode
            if not stat_module.S_ISREG(mode):
                number = errno.EISDIR if stat_module.S_ISDIR(mode) else errno.EACCES
                raise OSError(number, os.strerror(number), key)
            return syscalls.open(f"/proc/self/fd/{fd}", flags & ~os.O_NOFOLLOW)

    # ---- paths and locks

    def _require_source(self) -> None:
        """Raise OSError (ESTALE) if the source was moved away or unmounted.

        Its shards still exist elsewhere, and a directory that now has its path is another source.
        """
        if self._source is not None and directory_identity(self._store.root) != self._source:
            raise OSError(errno.ESTALE, "the source was moved, removed or unmounted", self._store.root)

    def _directory_of(self, key: str, *, make: bool = False) -> tuple[int, str]:
        """Return a descriptor of the directory that contains an object, and the object's name in that directory."""
        if key:
            parent, _, name = key.rpartition("/")
            if {"", ".", ".."} & set(key.split("/")) or "\0" in key:
                raise PermissionError(errno.EACCES, "is no path in the source", key)
            return self._directory(parent, make=make), name
        parent, name = os.path.split(self._store.path(key))
        return os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name

    def _directory(self, key: str, *, make: bool = False) -> int:
        path = self._store.path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not make or not key:
                raise
            parent, _, name = key.rpartition("/")
            above = self._directory(parent, make=True)
            try:
                with suppress(FileExistsError):
                    syscalls.mkdir(name, at=above)
                syscalls.fsync_directory(above)
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)
        try:
            self._store.confined(fd, key)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def _place(self, key: str) -> Iterator[ObjectPlace]:
        at, name = self._directory_of(key)
        try:
            yield ObjectPlace(key, at, name)
        finally:
            self._store.reopen(key)
            os.close(at)

    @contextmanager
    def _locked(self, place: ObjectPlace) -> Iterator[None]:
        """Hold the lock file `<name>.__lock` by the protocol of tensorstore's file driver.

        The lock file is removed with the lock; tensorstore may also rename the lock file to the object. So after
        locking, check that the name still leads to the locked file. Otherwise lock the file that now has the name.
        """
        name, flags, deadline = f"{place.name}.__lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, self._lock_s
        deadline += time.monotonic()
        fd = syscalls.open(name, flags, 0o666, place.at)
        try:
            while True:
                try:
                    syscalls.lock(fd, wait=max(deadline - time.monotonic(), 0))
                except BlockingIOError:
                    raise TimeoutError(errno.ETIMEDOUT, "another program keeps it locked", place.key) from None
                again = syscalls.open(name, flags, 0o666, place.at)
                if os.path.sameopenfile(fd, again):
                    os.close(again)
                    break
                os.close(fd)
                fd = again
            try:
                yield
            finally:
                with suppress(OSError):  # a leftover lock file blocks no other writer
                    syscalls.unlink(name, place.at)
        finally:
            os.close(fd)

    # ---- one update

    def _updated(
        self,
        place: ObjectPlace,
        make: Make,
        begun: Callable[[Begun], None],
        check: Callable[[Blob], None],
        in_place: int,
    ) -> Stat | None:
        deadline = time.monotonic() + self._race_s
        if place.key in self._unsettled:
            _settle(place, self._unsettled[place.key])
            del self._unsettled[place.key]
        while time.monotonic() < deadline:
            old, base, linked = open_old(self._store, place, replace_links=self._replace_links)
            plan = make(old)
            if is_same(plan, None if old is None else old.stat().size):
                return _made_last(place, old)
            change = None
            if old is not None and plan is not None and not linked:
                change = in_its_place.change_of(plan, old, in_place)
            if old is not None and change is not None:
                if (stat := self._changed(place, old, change, begun, check)) is not None:
                    return stat
                continue
            note = Begun(place.key, base, f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
            if plan is None:
                if self._switched(place, note, begun):
                    return None
                continue
            try:
                fd = _written(place, note.temp, old, plan, check, alike=not linked)
            except OSError:
                # Another writer may have truncated the old file during the copy.
                if identity_at(place.name, place.at) != note.base:
                    continue
                raise
            try:
                new = os.fstat(fd)
                if self._switched(place, note._replace(temp_ino=new.st_ino), begun):
                    return stat_of(new)
            finally:
                os.close(fd)
        raise StaleShardError(f"{place.key}: others do not stop replacing it")

    def _changed(
        self,
        place: ObjectPlace,
        old: LocalBlob,
        change: in_its_place.Change,
        begun: Callable[[Begun], None],
        check: Callable[[Blob], None],
    ) -> Stat | None:
        """Call `in_place.changed`. If it fails after `begun`, the update stays in `_unsettled`."""

        def noted(note: Begun) -> None:
            begun(note)
            self._unsettled[place.key] = note

        stat = in_its_place.changed(place, old, change, noted, check)
        self._unsettled.pop(place.key, None)
        return stat

    def _switched(self, place: ObjectPlace, note: Begun, begun: Callable[[Begun], None]) -> bool:
        """Switch to the new version and return whether the switch succeeded.

        If not, another writer was faster, and nothing of this update remains.
        """
        try:
            if identity_at(place.name, place.at) != note.base:
                return _settle(place, note)
            begun(note)
            return _switch(place, note)
        except BaseException:
            try:
                _settle(place, note)
            except OSError:
                self._unsettled[place.key] = note
            raise


def is_temporary(name: str) -> bool:
    """Return whether the name has the form of an update's temporary files."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def _written(
    place: ObjectPlace,
    temp: str,
    old: LocalBlob | None,
    plan: Plan,
    check: Callable[[Blob], None],
    *,
    alike: bool = True,
) -> int:
    """Write a temporary file and return its descriptor. The file is complete, checked and on disk.

    `alike`: copy owner, mode and extended attributes of `old`. Otherwise the umask and the directory determine them.
    """
    alike = alike and old is not None
    fd = syscalls.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 if alike else 0o666, place.at)
    try:
        with suppress(OSError):
            syscalls.lock(fd)  # keeps `sweep` from removing the file
        fill(fd, old, plan)
        if alike and old is not None:
            _make_alike(fd, old.fd)
        check(LocalBlob(os.dup(fd), os.fstat(fd), nothing))
        syscalls.fsync(fd)
    except BaseException:
        with suppress(OSError):
            syscalls.unlink(temp, place.at)
        os.close(fd)
        raise
    return fd


def _make_alike(fd: int, old: int) -> None:
    """Copy owner, mode and extended attributes (including access control lists) as far as permissions allow."""
    info, mine = os.fstat(old), os.fstat(fd)
    for user, group in ((info.st_uid, -1), (-1, info.st_gid)):
        if (user, group) not in ((mine.st_uid, -1), (-1, mine.st_gid)):
            with suppress(PermissionError):
                syscalls.chown(fd, user, group)
    syscalls.chmod(fd, stat_module.S_IMODE(info.st_mode))
    try:
        names = os.listxattr(old)
    except OSError:
        return
    for name in names:
        try:
            syscalls.setxattr(fd, name, os.getxattr(old, name))
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENODATA):
                raise


# ---- the switch


def _made_last(place: ObjectPlace, old: LocalBlob | None) -> Stat | None:
    """Fsync an unchanged object: an earlier update may have failed or crashed before its own fsync."""
    if old is not None:
        syscalls.fsync(old.fd)
    syscalls.fsync_directory(place.at)
    return None if old is None else old.stat()


def _switch(place: ObjectPlace, note: Begun) -> bool:
    try:
        if note.base is None:
            syscalls.rename_new(note.temp, place.name, place.at, place.at)
        elif note.temp_ino:
            syscalls.exchange(note.temp, place.name, place.at, place.at)
        else:
            syscalls.rename_new(place.name, note.temp, place.at, place.at)
    except (FileExistsError, FileNotFoundError):
        return _settle(place, note)
    except OSError as e:
        if e.errno not in _NO_SUCH_RENAME:
            raise
        return _switched_by_comparing(place, note)
    if note.base is not None:
        return _settle(place, note)
    syscalls.fsync_directory(place.at)
    return True


def _name_new(place: ObjectPlace, temp: str) -> None:
    """Rename a temporary file to its final name. Raise FileExistsError if the name exists."""
    try:
        syscalls.rename_new(temp, place.name, place.at, place.at)
    except OSError as e:
        if e.errno not in _NO_SUCH_RENAME:
            raise
        if identity_at(place.name, place.at) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.key) from None
        syscalls.rename(temp, place.name, place.at, place.at)


def _switched_by_comparing(place: ObjectPlace, note: Begun) -> bool:
    """Switch on a file system without RENAME_EXCHANGE: compare versions, then rename or unlink.

    Another writer's change between these two calls is lost.
    """
    if identity_at(place.name, place.at) != note.base:
        return _settle(place, note)
    if note.temp_ino:
        syscalls.rename(note.temp, place.name, place.at, place.at)
    else:
        syscalls.unlink(place.name, place.at)
    syscalls.fsync_directory(place.at)
    return True


def _settle(place: ObjectPlace, note: Begun) -> bool:
    """Clean up the temporary name; return whether it held the old version, so that the new version is in place.

    The temporary name may also hold the new version (the exchange did not happen or was undone), or a version of
    another writer, which is put back under its own name.
    """
    if note.head:
        in_its_place.made_last(place, note)
        return False
    found = identity_at(note.temp, place.at)
    if found is None:
        return False
    if found[0] == note.temp_ino:
        syscalls.unlink(note.temp, place.at)
        return False
    if found == note.base:
        syscalls.fsync_directory(place.at)  # first, so that the new version is on disk before the old one is removed
        syscalls.unlink(note.temp, place.at)
        return True
    _put_back(place, note)
    return False


def _put_back(place: ObjectPlace, note: Begun) -> None:
    name = identity_at(place.name, place.at)
    if name is None:
        with suppress(FileExistsError):
            syscalls.rename_new(note.temp, place.name, place.at, place.at)
    elif name[0] == note.temp_ino:
        syscalls.exchange(note.temp, place.name, place.at, place.at)
        found = identity_at(note.temp, place.at)
        if found is not None and found[0] == note.temp_ino:
            syscalls.unlink(note.temp, place.at)
        elif found is not None:  # a third version, which is newer
            syscalls.exchange(note.temp, place.name, place.at, place.at)
    syscalls.fsync_directory(place.at)
    if identity_at(note.temp, place.at) is not None:
        log.error("%s: two others have replaced it at once; the earlier version is in %s", place.key, note.temp)


def _abandoned(name: str, at: int) -> bool:
    """Remove a temporary file, unless its writer still holds its lock; return whether it was removed."""
    try:
        fd = syscalls.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, at=at)
    except OSError:
        return False
    try:
        syscalls.lock(fd)
        syscalls.unlink(name, at)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
