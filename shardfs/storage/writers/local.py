"""Files replaced as a whole: made beside the old one, exchanged with it, and looked at before the old one goes.

At every moment there is the old file or the new one under the name, complete and on the disk before it is seen (or, if
that is wanted, the old one is changed step by step: `in_place`). Other writers are kept out by tensorstore's lock on
`<name>.__lock` if they ask for it. If they do not, what comes out of the exchange shows that they were there: their
version is put back, and the update begins anew with it.
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
"""How long the lock of another writer is waited for, in seconds."""

RACE_S = 30.0
"""How long an update begins anew whenever somebody without a lock was faster, in seconds."""

PREFIX, SUFFIX = ".shardfs-", ".tmp"

_NO_SUCH_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""What file systems say that rename, but know nothing of exchanging or of not replacing."""


class LocalWriter:
    """Changes the files below the root of `store`; see `Writer`.

    Args:
        replace_links: an object whose name is a symbolic link is replaced by a file; else it is refused.
        lock_s: how long the lock of another writer is waited for.
        race_s: how long an update is begun anew because another writer was faster.
    """

    local = conditional = True

    def __init__(
        self, store: LocalStore, *, replace_links: bool = False, lock_s: float = LOCK_S, race_s: float = RACE_S
    ) -> None:
        self._store, self._replace_links, self._lock_s, self._race_s = store, replace_links, lock_s, race_s
        self._swept: set[str] | None = None
        self._sweeping = threading.Lock()
        self._lasting = {""}  # directories of which the names are on disk, as those of all above
        self._unsettled: dict[str, Begun] = {}  # by key: an error came after the switch, and another one after that
        self._source = directory_identity(store.root)

    def require_writable(self, key: str) -> None:
        with suppress(FileNotFoundError):  # `update` makes the directory
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
        """Nothing to do: what is locked is so for each update."""

    def _sweep_once(self, directory: str) -> None:
        with self._sweeping:
            if self._swept is not None and directory not in self._swept:
                self._swept.add(directory)
                self.sweep(directory)

    def _make_last(self, directory: str) -> None:
        """Whoever made a directory may have been killed, or told of an error, before its name was on disk."""
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
        """Remove what updates have left in a directory that a crash ended before they began; how many.

        Only after `recover` of all that had begun.
        """
        try:
            at = self._directory(directory)
        except FileNotFoundError:
            return 0
        try:
            return sum(_abandoned(name, at) for name in os.listdir(at) if is_temporary(name))
        finally:
            os.close(at)

    # ---- files that are shown as they are

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
        with self._place(key) as place:  # a link that leads nowhere is something that exists
            fd = syscalls.open(place.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, place.at)
        if stat_module.S_IMODE(os.fstat(fd).st_mode) != mode:  # the umask of whoever asked is in it already
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
                    with suppress(OSError):  # it was removed meanwhile
                        found[name] = os.readlink(name, dir_fd=at)
        finally:
            os.close(at)
        return found

    @contextmanager
    def named(self, key: str, *, follow: bool = True) -> Iterator[int]:
        """A descriptor in name only: opening it does nothing to it, whatever it is."""
        fd = os.open(self._store.path(key), os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            self._store.confined(fd, key)
            yield fd
        finally:
            os.close(fd)

    def _open_existing(self, key: str, flags: int) -> int:
        with self.named(key) as fd:  # looked at, and only then opened for writing
            mode = os.fstat(fd).st_mode
            if not stat_module.S_ISREG(mode):
                number = errno.EISDIR if stat_module.S_ISDIR(mode) else errno.EACCES
                raise OSError(number, os.strerror(number), key)
            return syscalls.open(f"/proc/self/fd/{fd}", flags & ~os.O_NOFOLLOW)

    # ---- where things lie

    def _require_source(self) -> None:
        """Raise OSError (ESTALE) if the source was moved away, or unmounted: its shards are not gone, and what lies
        there by now, if anything, is another source."""
        if self._source is not None and directory_identity(self._store.root) != self._source:
            raise OSError(errno.ESTALE, "the source was moved, removed or unmounted", self._store.root)

    def _directory_of(self, key: str, *, make: bool = False) -> tuple[int, str]:
        """A descriptor of the directory that an object is in, and what it is called there."""
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
        """As tensorstore's file driver locks: who finds another file under the name than the one it has locked waits
        for that one, since the lock's file goes away with the lock (or becomes the object, if tensorstore had it).
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
                with suppress(OSError):  # what is left of it hinders nobody
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
                if identity_at(place.name, place.at) != note.base:  # cut off while it was copied
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
        """`in_place.changed`. What ends it by an error when it is seen by others already is not settled."""

        def noted(note: Begun) -> None:
            begun(note)
            self._unsettled[place.key] = note

        stat = in_its_place.changed(place, old, change, noted, check)
        self._unsettled.pop(place.key, None)
        return stat

    def _switched(self, place: ObjectPlace, note: Begun, begun: Callable[[Begun], None]) -> bool:
        """Whether the object is now what it shall be. If not, somebody else was there first, and no trace of us is
        left."""
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
    """Whether a file may be called so that is on its way to be a shard."""
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
    """A descriptor of the new file, which is complete, checked and on the disk.

    It gets owner, mode and attributes of `old` if it is to be `alike`, else those that umask and directory give.
    """
    alike = alike and old is not None
    fd = syscalls.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 if alike else 0o666, place.at)
    try:
        with suppress(OSError):
            syscalls.lock(fd)  # tells `sweep` that somebody is at it
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
    """Owner, mode and extended attributes (access control lists among them), as far as we may."""
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
    """What is as it should be may be so since a moment ago, when a crash or an error kept it from being synced."""
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
    """Give a file its name, which nothing has."""
    try:
        syscalls.rename_new(temp, place.name, place.at, place.at)
    except OSError as e:
        if e.errno not in _NO_SUCH_RENAME:
            raise
        if identity_at(place.name, place.at) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.key) from None
        syscalls.rename(temp, place.name, place.at, place.at)


def _switched_by_comparing(place: ObjectPlace, note: Begun) -> bool:
    """Where the disk can do no better: who changes the object between these two calls is overwritten."""
    if identity_at(place.name, place.at) != note.base:
        return _settle(place, note)
    if note.temp_ino:
        syscalls.rename(note.temp, place.name, place.at, place.at)
    else:
        syscalls.unlink(place.name, place.at)
    syscalls.fsync_directory(place.at)
    return True


def _settle(place: ObjectPlace, note: Begun) -> bool:
    """Clear away what lies under the temporary name. Whether it was the old version, so that the new one is in place.

    It may be the new one (there was no exchange, or it was undone), or a foreign one, which goes back to its name.
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
        syscalls.fsync_directory(place.at)  # before: else the only version might be the one that is removed
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
        elif found is not None:  # yet another one, and newer
            syscalls.exchange(note.temp, place.name, place.at, place.at)
    syscalls.fsync_directory(place.at)
    if identity_at(note.temp, place.at) is not None:
        log.error("%s: two others have replaced it at once; the earlier version is in %s", place.key, note.temp)


def _abandoned(name: str, at: int) -> bool:
    """Remove a file that is called as ours are, unless somebody is at it."""
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
