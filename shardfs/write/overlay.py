"""The writable mount's view of a source: the unsharded tree with the changes of the mount on top.

Paths are paths on the mount; numbers are inode numbers, as in `Tree`. `Tree.spot` documents the kinds of names.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardfs.codecs.decoders import decompressed
from shardfs.model.attributes import Attributes
from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import COMPRESSIONS, OWN, NameKind, is_scratch
from shardfs.model.listing import REST
from shardfs.storage.cache import nothing
from shardfs.vfs.chunk_dirs import Spot
from shardfs.vfs.inodes import CREATED, ROOT, TABLE_END
from shardfs.write.batches import asked_singly, batch_of, with_links, without
from shardfs.write.directories import Directories
from shardfs.write.files import Files, WritableFile, join, shown_mode
from shardfs.write.rw_lock import RWLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.model.listing import Batch, EntryRow
    from shardfs.storage.retry import RetryPolicy
    from shardfs.vfs.chunk_dirs import Target
    from shardfs.vfs.tree import Tree
    from shardfs.write.buffers import Buffer
    from shardfs.write.journal import Position
    from shardfs.write.pending import Version

log = logging.getLogger(__name__)

MAX_NAME = 255
KNOWN_PATHS = 65_536
JOURNALED = (NameKind.CHUNK, NameKind.ORPHAN, NameKind.SCRATCH)  # a tuple: hashing an enum member is a Python call


class PendingWrites(Protocol):
    """The part of `WriteBuffer` that the overlay reads from; documented there."""

    def versions(self) -> dict[str, Version]: ...
    def holds(self, path: str) -> bool: ...
    def drop(self, path: str, target: Target | None) -> None: ...
    def retarget(self, path: str, target: Target | None) -> None: ...
    def read(self, data: Position, offset: int, size: int) -> bytes: ...
    def count(self, path: str) -> int: ...
    def failure(self, path: str) -> BaseException | None: ...
    def statvfs(self) -> os.statvfs_result: ...


class Stored(Protocol):
    """The part of `Writer` that the overlay reads from; documented there."""

    @property
    def local(self) -> bool: ...

    def stat(self, key: str) -> os.stat_result: ...


class Described(Protocol):
    """The part of `Documents` that the overlay reads from; documented there."""

    def kind(self, directory: str, name: str) -> NameKind: ...


class Overlay:
    """The read side of a writable mount. Thread-safe. It has the methods of `Tree`, which are documented there."""

    def __init__(
        self,
        base: Tree,
        writer: Stored,
        pending: PendingWrites,
        documents: Described,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        self.base, self.writer, self.pending, self.documents = base, writer, pending, documents
        self.store = base.store
        self.invalidate: Callable[[int, bytes], None] = lambda parent, name: None
        self.invalidate_content: Callable[[int], None] = lambda number: None
        self.drop_content: Callable[[int], None] = lambda number: None
        self._waiting = waiting
        self._lock = threading.RLock()
        self._names_lock = threading.RLock()
        self._gate = RWLock(waiting)
        self._files = Files()
        self._paths: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._base_numbers: dict[str, int | None] = {}
        self._modes: dict[int, int] = {}  # by inode number of the tree; kept until the end of the mount
        self._times: dict[int, int] = {}  # of directories, until an entry changes
        self._twins: dict[int, WritableFile] = {}  # by inode number of the compressed file
        self._inhabited: set[str] = set()  # named by documents; shown even if missing in the store
        self._cut: set[str] = set()  # arrays that had another shape before
        self._directories = Directories()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Hold the lock under which a passed-through file is renamed on the mount and on the disk as one step.

        The holder may wait for a disk. `_lock` may be acquired inside, never the other way round.
        """
        if not self._names_lock.acquire(blocking=False):
            self._waiting()
            self._names_lock.acquire()
        try:
            yield
        finally:
            self._names_lock.release()

    # ---- what the journal holds ----

    def _recover(self) -> None:
        """Show the versions in the journal. Of several names for one chunk, the one journaled last is shown."""
        for path, version in sorted(self.pending.versions().items(), key=lambda item: item[1].lsn):
            if version.is_document:
                continue
            parent, _, name = path.rpartition("/")
            raw = os.fsencode(name)
            spot = self.spot(parent, raw)
            if version.data is None:
                if spot.target is not None:
                    self._hide(parent, raw, spot.target)
                self.pending.retarget(path, spot.target)
                continue
            kind = spot.kind if spot.kind in JOURNALED else NameKind.ORPHAN
            file = self._files.new(parent, raw, kind, spot.target)
            file.version, file.mode, file.mtime_ns = version, version.mode, version.mtime_ns
            self._supersede(file)
            self.pending.retarget(path, spot.target)
            self._make_parents(parent)

    def _supersede(self, file: WritableFile) -> None:
        """Remove the other names of a chunk, with and without a compression suffix: a chunk has one name.

        The caller holds the lock.
        """
        directory, target = file.parent or "", file.target
        others = target.tree.other_names(file.name) if target is not None else []
        for name in others:
            path, known = join(directory, name), (self._files.directory(directory) or {}).get(name)
            if known is not None:
                if known.handles:
                    self._load(known)
                if self.pending.holds(path):
                    self.pending.drop(path, None)
                self._part_from_twin(known)
                self._files.unname(known)
            if known is not None and directory in self._numbers:
                self.invalidate(self._numbers[directory], name)
        if target is not None and target.suffix:
            self._files.hide(directory, others[0])
            if directory in self._numbers:
                self.invalidate(self._numbers[directory], others[0])

    def _hide(self, directory: str, name: bytes, target: Target | None) -> None:
        """Hide a chunk of the source under all its names. The caller holds the lock."""
        self._files.hide(directory, name)
        if target is not None and target.suffix:
            self._files.hide(directory, target.tree.other_names(name)[0])

    def _load(self, file: WritableFile) -> Buffer:
        """Return the buffer of an open file with all its bytes (`OpenFiles`)."""
        raise NotImplementedError

    def _keep(self, number: int, *, replaced: bool = False) -> None:
        """Keep the bytes of an open file readable (`OpenFiles`)."""
        raise NotImplementedError

    # ---- numbers and paths ----

    def path_of(self, number: int) -> str:
        """Return the path of an inode number. Raise FileNotFoundError if the number has no path."""
        if number == ROOT:
            return ""
        file = self._files.by_number.get(number)
        path = file.path if file is not None else self._paths.get(number)
        if path is None and file is None and number < CREATED:
            path = self.base.shown_path(number) or None
            if path is not None:
                if len(self._paths) >= KNOWN_PATHS:
                    self._paths.clear()
                self._paths[number] = path
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "has no name any more", str(number))
        return path

    def _base_number(self, path: str) -> int | None:
        """Return the inode number of this directory in the tree; None if the tree has no such directory."""
        if path in self._base_numbers:
            return self._base_numbers[path]
        try:
            found = self.base.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if len(self._base_numbers) >= KNOWN_PATHS:
            self._base_numbers.clear()
        number = found.number if found is not None and found.directory else None
        if number is not None:  # a missing directory may appear at any time
            self._base_numbers[path] = number
        return number

    def _renewed(self, path: str) -> list[str]:
        """Look up a directory anew, after a rename or a change of documents. Return the paths of its collections."""
        found = self.base.renew(path)
        self._paths.clear()
        self._base_numbers.clear()
        return found

    def spot(self, directory: str, name: bytes) -> Spot:
        """Return the kind of a name in a directory, and its target if the name is a chunk."""
        if name.startswith(OWN.encode()):
            return Spot(NameKind.HIDDEN)
        number = self._base_number(directory)
        text = os.fsdecode(name)
        if number is None:
            return Spot(self._kind_in_made(directory, text))
        try:
            spot = self.base.spot(number, name)
        except CorruptShardError:  # damaged documents may be repaired
            return Spot(NameKind.PLAIN)
        return Spot(self.documents.kind(directory, text)) if spot.kind is NameKind.PLAIN else spot

    def _kind_in_made(self, directory: str, name: str) -> NameKind:
        """Return the kind of a name in a directory that exists only on the mount."""
        above, number = self._nearest(directory)
        below = directory[len(above) :].strip("/").split("/")
        temporary = any(map(is_scratch, below)) and self._has_scratch(above)
        if temporary or (any(n.startswith(".") for n in below) and self._keeps_hidden(above)):
            return NameKind.SCRATCH
        first = self.base.spot(number, os.fsencode(below[0])).kind
        if first is NameKind.PLAIN:  # an object store has no directories
            return self.documents.kind(directory, name)
        return NameKind.SCRATCH if first is NameKind.SCRATCH or is_scratch(name) else NameKind.ORPHAN

    def _nearest(self, path: str) -> tuple[str, int]:
        """Return path and inode number of the closest directory in the tree: the path itself or one above it."""
        while (number := self._base_number(path)) is None:
            path = path.rpartition("/")[0]
        return path, number

    def _has_scratch(self, directory: str) -> bool:
        """Return whether temporary files in the directory are kept from the store, as in a sharded dataset."""
        return self.spot(directory, b"x.partial").kind is NameKind.SCRATCH

    def _keeps_hidden(self, directory: str) -> bool:
        """Return whether hidden directories in the directory are kept from the store.

        Outside of sharded datasets, a hidden directory may be a group or a directory of the user.
        """
        number = self._base_number(directory)
        with suppress(CorruptShardError):
            return number is not None and self.base.has_chunks(number)
        return False

    def remember(self, number: int) -> None:
        """Count one kernel reference to an inode number, also for files created on the mount."""
        file = self._files.by_number.get(number)
        if file is not None:
            with self._lock:
                file.lookups += 1
        self.base.remember(number)

    def forget(self, number: int, times: int) -> None:
        """Release `times` kernel references. A file without references or handles is freed."""
        file = self._files.by_number.get(number)
        if file is not None:
            with self._lock:
                file.lookups = max(file.lookups - times, 0)
                if file.kind is NameKind.PLAIN and not file.lookups and not file.handles:
                    self._files.unname(file)
                else:
                    self._files.let_go(file)
        self.base.forget(number, times)

    # ---- looking ----

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of a child. Raise FileNotFoundError, another OSError or CorruptShardError."""
        directory = self.path_of(parent)
        self._numbers[directory] = parent
        found = self._find(directory, parent, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fsdecode(name))
        return found

    def _find(self, directory: str, parent: int, name: bytes) -> Attributes | None:
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        before: WritableFile | None = None
        while True:
            with self._lock:  # a name may be moving between files
                names = self._files.directory(directory) or {}
                known = name in names
                file = (names[name] or self._uncompressed(names, name)) if known else None
            if known and file is None:
                return None
            if file is None or file is before:
                break
            try:
                return self._attributes(file)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
            before = file  # it was just published or replaced
        if name.startswith(OWN.encode()):
            return None
        number = self._base_number(directory)
        if number is not None:
            with suppress(FileNotFoundError):
                stored = self._stored(directory, number, name)
                if stat.S_ISLNK(stored.mode):
                    return stored
                shown = self._if_shown(stored)
                if shown is None or self._is_foreign_scratch(shown, directory, name):
                    return None
                if shown.directory and self._is_implied(number, directory, name):
                    return None
                return self._numbered_anew(self._with_mode(shown, join(directory, name)), directory, parent, name)
        return self._outside(directory, name)

    def _stored(self, _directory: str, number: int, name: bytes) -> Attributes:
        """Return the attributes of a name in the source."""
        return self.base.lookup(number, name)

    def _links_in(self, _directory: str, _number: int) -> list[bytes]:
        """Return the names of symbolic links in a directory that are shown as links."""
        return []

    def _uncompressed(self, names: Mapping[bytes, WritableFile | None], name: bytes) -> WritableFile | None:
        """Return a file that shows a pending compressed chunk under its plain name; None if there is none.

        Clients try the names one after another. During publishing, a client could otherwise find none of them.
        """
        twins = (names.get(name + suffix.encode()) for suffix in COMPRESSIONS)
        twin = next((t for t in twins if t is not None and t.target is not None and t.target.suffix), None)
        if twin is None or twin.target is None:
            return None
        with self._lock:
            file = self._twins.get(twin.number)
            if file is None or file.number not in self._files.by_number:  # the kernel has released it
                file = self._twins[twin.number] = self._files.unnamed(NameKind.CHUNK, twin.target._replace(suffix=""))
                file.twin = twin
                self._files.by_number[file.number] = file
        return file

    def _plain_bytes(self, file: WritableFile) -> bytes:
        """Return the decompressed bytes of the last closed version of a file's twin.

        Raise OSError (ESTALE) if that version is gone.
        """
        twin = file.twin
        version = twin.version if twin is not None else None
        if file.frozen is not None and file.version is version:
            return file.frozen
        if twin is None or twin.target is None or version is None or version.data is None:
            raise stale(file.number)
        return decompressed(self.pending.read(version.data, 0, version.data.size), twin.target.suffix)

    def _part_from_twin(self, twin: WritableFile) -> None:
        """Detach the uncompressed view of a chunk that was stored, removed or renamed. The caller holds the lock."""
        file = self._twins.pop(twin.number, None)
        if file is not None:  # open handles keep their bytes; the kernel looks up the name again
            file.twin, file.lookups = None, 0
            self._files.let_go(file)

    def _is_implied(self, number: int, directory: str, name: bytes) -> bool:
        """Return whether only documents name a directory, so the mount does not show it.

        In an object store, a directory that was shown once stays shown when its last object goes.
        """
        path = join(directory, name)
        if path in self._inhabited:
            return False
        if self.base.is_implied(number, os.fsdecode(name)):
            return True
        if not self.writer.local:
            self._inhabited.add(path)
        return False

    def _is_foreign_scratch(self, found: Attributes, directory: str, name: bytes) -> bool:
        """Return whether a name is a temporary file of another program in the source, or a lock of our own."""
        plain = found.number < TABLE_END and not found.directory
        return plain and is_scratch(os.fsdecode(name)) and self.spot(directory, name).kind is NameKind.SCRATCH

    def _numbered_anew(self, found: Attributes, directory: str, parent: int, name: bytes) -> Attributes | None:
        """Return attributes under a new inode number if an older file of this name still uses the number.

        Handles of that older file refer to it by the number.
        """
        if found.number not in self._files.by_number:
            return found
        spot = self.spot(directory, name)
        with self._lock:
            if name not in (self._files.directory(directory) or {}):
                file = self._files.new(directory, name, spot.kind, spot.target)
                file.known_size, file.mtime_ns, file.mode = found.size, found.mtime_ns, found.mode
                return self._attributes(file)
        return self._find(directory, parent, name)  # written or hidden in the meantime

    def _outside(self, directory: str, name: bytes) -> Attributes | None:
        """Return a chunk outside of an array whose shape was cut; it can still be read and deleted. None for others."""
        array = directory if self._cut else ""
        while array and array not in self._cut:
            array = array.rpartition("/")[0]
        if array not in self._cut:
            return None
        names = [os.fsencode(part) for part in join(directory, name)[len(array) :].strip("/").split("/")]
        with suppress(OSError, CorruptShardError):
            for tree in self.base.collection(array).formers():
                with suppress(FileNotFoundError):
                    found = tree.find(names)
                    if found is not None:
                        return self._if_shown(found)
        return None

    def _if_shown(self, found: Attributes) -> Attributes | None:
        """Return the attributes; None for a virtual directory that the mount does not show."""
        tree = self.base.chunk_tree(found.number) if found.directory else None
        if tree is None:
            return found
        with self._lock:
            return found if self._directories.shows(tree, found.number) else None

    def _with_mode(self, found: Attributes, path: str) -> Attributes:
        """Return the attributes with the mode and time that were set on the mount, or that a local store has."""
        mode, when = self._modes.get(found.number, 0), self._times.get(found.number)
        if not mode and path and self.writer.local and found.number < TABLE_END:
            with suppress(OSError):
                mode = shown_mode(self.writer.stat(path).st_mode, found.directory)
        if not mode and when is None:
            return found
        return found._replace(mode=mode, mtime_ns=found.mtime_ns if when is None else when)

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of an inode number. Raise OSError (ESTALE) if the number has been freed."""
        file = self._files.by_number.get(number)
        if file is not None:
            return self._attributes(file)
        if number >= CREATED:
            raise stale(number)
        return self._with_mode(self.base.attributes(number), self.shown_path(number))

    def _attributes(self, file: WritableFile) -> Attributes:
        if file.kind is NameKind.DIRECTORY:
            return Attributes(file.number, True, 0, file.mtime_ns, None, file.mode)
        if file.kind is NameKind.PLAIN and self.writer.local:
            return self._plain_attributes(file)
        if file.twin is not None and file.buffer is None:
            return self._attributes(file.twin)._replace(number=file.number, size=len(self._plain_bytes(file)))
        return Attributes(file.number, False, file.size(), file.mtime_ns, None, file.mode)

    def _plain_attributes(self, file: WritableFile) -> Attributes:
        with self._lock:
            info = os.fstat(file.fd) if file.fd >= 0 else None
        if info is None:
            if file.path is None:
                raise stale(file.number)
            info = self.writer.stat(file.path)
        return Attributes(file.number, False, info.st_size, info.st_mtime_ns, None, shown_mode(info.st_mode))

    def resolve(self, path: str) -> Attributes:
        """Walk a path from the root and return its attributes. Raise FileNotFoundError or NotADirectoryError."""
        found = Attributes(ROOT, True, 0, 0)
        for part in filter(None, path.split("/")):
            found = self.lookup(found.number, os.fsencode(part))
        return found if found.number != ROOT else self.attributes(ROOT)

    def number(self, path: str) -> int:
        """Return the inode number of a file to read."""
        return self.resolve(path).number

    def shown_path(self, number: int) -> str:
        """Return the path of an inode number; empty if the number has none."""
        try:
            return self.path_of(number)
        except FileNotFoundError:
            return ""

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return bytes of a file; fewer than `size` only at its end."""
        file = self._files.by_number.get(number)
        if file is None:
            if number >= CREATED:
                raise stale(number)
            return self.base.read(number, offset, size)
        return self._read(file, offset, size)

    def _whole(self, file: WritableFile) -> bytes:
        return bytes(self._read(file, 0, max(self._attributes(file).size, 1)))

    def _read(self, file: WritableFile, offset: int, size: int) -> bytes | memoryview:
        if file.kind is NameKind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "is a directory", file.path)
        with self._lock:
            if file.buffer is not None:
                return file.buffer.read(offset, size)
            version, target = file.version, file.target
        if file.twin is not None:
            return memoryview(self._plain_bytes(file))[offset : offset + size]
        if file.frozen is not None:
            return memoryview(file.frozen)[offset : offset + size]
        if version is not None and version.data is not None:
            try:
                return self.pending.read(version.data, offset, size)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
                with self._lock:
                    changed = file.version is not version or file.buffer is not None
                    replaced = file.parent is None
                if changed:
                    return self._read(file, offset, size)
                if replaced or target is None:  # else it was just published
                    raise
        if file.fd >= 0:
            return os.pread(file.fd, size, offset)
        if target is not None:
            return target.tree.read_chunk(target.coords, offset, size)
        if file.path is None:
            raise stale(file.number)
        # Look up by path: the tree may have forgotten the kernel's inode number.
        return self.base.read(self.base.resolve(file.path).number, offset, size)

    def read_many(self, requests: list[tuple[int, int, int]]) -> list[bytes | Exception]:
        """Return the bytes of several (number, offset, size) requests; for a failed request, its exception."""
        out: list[bytes | Exception] = []
        for number, offset, size in requests:
            try:
                out.append(bytes(self.read(number, offset, size)))
            except (OSError, CorruptShardError) as e:
                out.append(e)
        return out

    def small_listing(self, number: int, most: int) -> list[EntryRow] | None:
        """Return all rows of a small unchanged directory, as `scan` would; None for any other."""
        path = self.path_of(number)
        if number >= CREATED or self._files.directory(path) is not None or self._base_number(path) != number:
            return None
        found = self.base.small_listing(number, most)
        if found is None or (found and found[0][2]):  # entries may be directories that are not shown
            return None
        return [(*entry[:-1], entry[-1] + OVERLAID) for entry in found]  # cookies of `scan`

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """Yield the entries of a directory behind `cookie`, in pages.

        Changed entries come first, as of the call; entries of the source follow.
        """
        path = self.path_of(number)
        with self._lock:
            names = dict(self._files.directory(path) or {})
        changed = []
        for name, file in names.items():
            if file is not None:
                with suppress(OSError):
                    changed.append((name, self._attributes(file)))
        if cookie < len(changed):
            yield batch_of(changed, cookie)
        base = self._base_number(path)
        if base is None:
            return
        has_scratch, links = self._has_scratch(path), self._links_in(path, base)
        for batch in self.base.scan(base, max(cookie - OVERLAID, 0)):
            others = batch.cookies >= np.uint64(REST)
            if self.writer.local and others.any():  # files on a disk have a mode each
                batch = batch._replace(sizes=np.where(others & (batch.numbers < TABLE_END), -1, batch.sizes))
            if links:
                batch = with_links(batch, links)
            shown = self._only_shown(without(batch, names, has_scratch=has_scratch), base)
            if len(shown.names):
                if self._modes or self._times:
                    shown = asked_singly(shown, {*self._modes, *self._times})
                yield shown._replace(cookies=shown.cookies + np.uint64(OVERLAID))

    def _only_shown(self, batch: Batch, directory: int) -> Batch:
        """Return the batch without virtual directories that the mount does not show."""
        if directory < TABLE_END and batch.directories.any():
            names, made = batch.names.tolist(), ~batch.directories
            for i in np.flatnonzero(batch.directories).tolist():
                made[i] = not self._is_implied(directory, self.path_of(directory), names[i])
            batch = batch if made.all() else batch.only(made)
        virtual = batch.numbers[batch.directories & (batch.numbers >= np.uint64(TABLE_END))]
        tree = self.base.chunk_tree(int(virtual[0])) if len(virtual) else None
        if tree is None:
            return batch
        with self._lock:
            return batch.only(self._directories.shows_many(tree, batch.numbers))

    def xattrs(self, number: int) -> dict[str, bytes]:
        """Return the extended attributes `user.shardfs.*`.

        A changed file has its state, the LSN of its version and the error of publishing; an array has the number of
        pending versions.
        """
        file = self._files.by_number.get(number)
        if file is None:
            out = self.base.xattrs(number) if number < CREATED else {}
            if not out and self.base.is_array(number):
                out["user.shardfs.dirty"] = b"%d" % self.pending.count(self.path_of(number))
            return out
        out = {"user.shardfs.state": self._state(file)}
        if file.version is not None:
            out["user.shardfs.lsn"] = b"%d" % file.version.lsn
        failure = self.pending.failure(file.path or "")
        if failure is not None:
            out["user.shardfs.error"] = str(failure).encode(errors="replace")
        return out

    def usage(self, number: int) -> dict[str, bytes]:
        """Return how many bytes of an array's shards are used and unused by published chunks. Reads every index."""
        return self.base.usage(number) if number < CREATED else {}

    def _state(self, file: WritableFile) -> bytes:
        if file.kind in (NameKind.ORPHAN, NameKind.SCRATCH):
            return file.kind.name.lower().encode()
        if file.dirty:
            return b"open"
        return b"published" if file.version is None else b"journaled"

    def statvfs(self) -> os.statvfs_result | None:
        """Return the smaller of the free space of the journal and of the store."""
        mine, stored = self.pending.statvfs(), self.base.statvfs()
        return mine if stored is None or mine.f_bavail * mine.f_frsize < stored.f_bavail * stored.f_frsize else stored

    def _make_parents(self, path: str) -> None:
        """Create the directories that the tree lacks above a file in the journal."""
        while path and self._files.at(path) is None:
            parent, _, name = path.rpartition("/")
            if self._base_number(path) is None:
                self._files.new(parent, os.fsencode(name), NameKind.DIRECTORY).mtime_ns = time.time_ns()
            else:
                self._inhabited.add(path)  # after a crash the store may lack it
                self._show(path)
            path = parent

    def _show(self, path: str, *, shown: bool = True) -> None:
        number = self._base_number(path)
        tree = self.base.chunk_tree(number) if number is not None else None
        if tree is None or number is None:
            return
        with self._lock:
            self._directories.show(tree, number, shown=shown)

    def caches(self) -> dict[str, dict[str, int]]:
        """Return hits, misses, bytes and limit of each cache."""
        return self.base.caches()

    @property
    def patience(self) -> RetryPolicy | None:
        """Retry policy of the store; None for a store without network access."""
        return self.base.patience


def stale(number: int) -> OSError:
    """Return an OSError (ESTALE) for an inode number without a file. The kernel then looks up the name again."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(number))


OVERLAID = 1 << 61
"""Added to cookies of the tree, so that they follow the cookies of changed entries."""
