"""What a writable mount shows of a source: the unsharded tree with the changes of the mount on top."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.attributes import Attributes
from shardfs.model.errors import CorruptShardError, MayAppearError, ShardfsError
from shardfs.model.kinds import COMPRESSIONS, OWN_PREFIX, NameKind, is_scratch
from shardfs.model.listing import REST, Batch
from shardfs.vfs.inodes import CREATED, ROOT, TABLE_END
from shardfs.write.file_contents import Part
from shardfs.write.files import join, shown_mode, split, stale, upwards
from shardfs.write.names import JOURNALED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.listing import EntryRow
    from shardfs.write.directories import Directories
    from shardfs.write.files import WritableFile

MAX_NAME = 255

OVERLAID = 1 << 61
"""Added to cookies of the tree, so that they follow the cookies of changed entries."""


@dataclass(eq=False)
class Overlay(Part):
    """The read side of a mount with changes. Thread-safe. It has the methods of `Tree`, which are documented there."""

    _directories: Directories

    def __post_init__(self) -> None:
        super().__post_init__()
        self._disk = self._writer.disk
        self.cut: set[str] = set()  # arrays that had another shape before

    def recover(self) -> None:
        """Show the versions in the journal at the start of a mount.

        Versions for an array of another form become conflicts.
        """
        for path, version in sorted(self._pending.backlog.versions.items(), key=lambda item: item[1].lsn):
            if version.is_document:
                continue
            parent, name = split(path)
            meaning = self._names.classify_name(parent, name)
            if self._pending.retarget(path, meaning.target):
                continue
            if version.data is None:
                if meaning.target is not None:
                    self._files.hide(parent, name)
                continue
            kind = meaning.kind if meaning.kind in JOURNALED else NameKind.ORPHAN
            file = self._files.new(parent, name, kind, meaning.target)
            file.commit(version)
            file.set_status(size=-1, mtime_ns=version.mtime_ns, mode=version.mode)
            self.make_parents(parent)

    def make_parents(self, path: str) -> None:
        """Create the directories that the tree lacks above a file in the journal."""
        if path and self._files.at(path) is not None and self._names.source_number(path) is not None:
            self._directories.show(path)  # a directory of this mount that has become one of chunks
        while path and self._files.at(path) is None:
            if self._names.source_number(path) is None:
                self._files.new(*split(path), NameKind.DIRECTORY).set_status(mtime_ns=time.time_ns())
            else:
                self._directories.show_inhabited(path)
            path = path.rpartition("/")[0]

    # ---- names ----

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of a child. Raise FileNotFoundError, another OSError or CorruptShardError.

        MayAppearError: the close of a compressed chunk may create the name at any time, so its absence must not be
        cached.
        """
        directory = self._names.path_of(parent)
        self._names.numbers[directory] = parent
        try:
            entry = self.find(directory, name)
            if entry is None:
                absent = MayAppearError if self._may_be_compressed(directory, name) else FileNotFoundError
                raise absent(errno.ENOENT, "No such file or directory", os.fsdecode(name))
        except FileNotFoundError:
            if name not in self._files.in_directory(directory):  # what the mount itself hides is not absent
                self._names.documents.missed(directory, name)
            raise
        return entry

    def _may_be_compressed(self, directory: str, name: bytes) -> bool:
        """Return whether a program may write a chunk of this name under a name with a compression suffix.

        Also True if the store does not say now.
        """
        number = self._names.source_number(directory)
        try:
            tree = None if number is None else self._source_tree.chunks_in(number)
            if tree is not None and tree.collection.compressible:
                compressed = self._names.classify_name(directory, name + COMPRESSIONS[0].encode())
                return compressed.kind is NameKind.COMPRESSED
        except CorruptShardError:
            return False
        except OSError:
            return True
        return False

    def find(self, directory: str, name: bytes) -> Attributes | None:
        """Return the attributes of a name in a directory, given by its path; None if the mount does not show the name.

        Raise OSError (ENAMETOOLONG, or as the store does), or CorruptShardError.
        """
        if len(name) > MAX_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(name))
        before: WritableFile | None = None
        while True:
            with self._names.lock:  # a name may be moving between files
                names = self._files.in_directory(directory)
                is_changed = name in names
                file = names.get(name)
            if is_changed and file is None:
                return None
            if file is None or file is before:
                break
            try:
                return self._contents.attributes(file)
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
            before = file  # it was just published or replaced
        if name.startswith(OWN_PREFIX.encode()):
            return None
        number = self._names.source_number(directory)
        if number is not None:
            with suppress(FileNotFoundError):
                return self._in_source(directory, number, name)
        return self._outside(directory, name)

    def _in_source(self, directory: str, number: int, name: bytes) -> Attributes | None:
        """Return the attributes of a name in the source; None if hidden. Raise FileNotFoundError if there is none."""
        if self._disk is None and self._is_scratch(directory, name):
            return None  # hidden even if a crashed program has left it in the store, so nothing needs to be asked
        path = join(directory, name)
        entry = self._source_tree.lookup(number, name)
        if self._directories.hides(entry, number, path) or self._is_foreign_scratch(entry, directory, name):
            return None
        entry = self.with_mode(entry, path)
        if entry.number not in self._files.by_number:
            return entry
        # Handles of an older file of this name still refer to it by the number: show the name under a new number.
        meaning = self._names.classify_name(directory, name)
        with self._names.lock:
            if name not in self._files.in_directory(directory):
                file = self._files.new(directory, name, meaning.kind, meaning.target)
                file.set_status(size=entry.size, mtime_ns=entry.mtime_ns, mode=entry.mode)
                return self._contents.attributes(file)
        return self.find(directory, name)  # written or hidden in the meantime

    def _is_foreign_scratch(self, entry: Attributes, directory: str, name: bytes) -> bool:
        """Return whether a name is a temporary file of another program in the source, or a lock of our own."""
        return entry.number < TABLE_END and not entry.directory and self._is_scratch(directory, name)

    def _is_scratch(self, directory: str, name: bytes) -> bool:
        return is_scratch(os.fsdecode(name)) and self._names.classify_name(directory, name).kind is NameKind.SCRATCH

    def _outside(self, directory: str, name: bytes) -> Attributes | None:
        """Return a chunk outside of an array whose shape was cut; it can still be read and deleted. None for others."""
        array = next((at for at in upwards(directory) if at in self.cut), None) if self.cut else None
        if array is None:
            return None
        names = [os.fsencode(part) for part in join(directory, name)[len(array) :].strip("/").split("/")]
        with suppress(OSError, CorruptShardError):
            *formers, present = tuple(self._source_tree.collection(array).shapes)
            for tree in reversed(formers):
                with suppress(FileNotFoundError):
                    entry = tree.find(names)
                    if entry is not None:
                        is_inside = not entry.directory and present.contains(tree.numbers.coords(entry.number))
                        return entry if not is_inside and self._directories.shows(entry) else None
        return None

    def with_mode(self, entry: Attributes, path: str) -> Attributes:
        """Return the attributes with the mode and time that were set on the mount, or that a local store has."""
        mode, when = self._names.modes.get(entry.number, entry.mode), self._names.times.get(entry.number)
        if not mode and path and self._disk is not None and entry.number < TABLE_END:
            with suppress(OSError):
                mode = shown_mode(self._disk.stat(path).st_mode, entry.directory)
        if not mode and when is None:
            return entry
        return entry._replace(mode=mode, mtime_ns=entry.mtime_ns if when is None else when)

    def resolve(self, path: str) -> Attributes:
        """Walk a path from the root and return its attributes. Raise FileNotFoundError or NotADirectoryError."""
        entry = Attributes(ROOT, True, 0, 0)
        for part in filter(None, path.split("/")):
            entry = self.lookup(entry.number, os.fsencode(part))
        return entry if entry.number != ROOT else self.attributes(ROOT)

    def number(self, path: str) -> int:
        """Return the inode number of a file to read. Raise as `resolve`."""
        return self.resolve(path).number

    # ---- files by number ----

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of an inode number.

        Raise OSError (ESTALE) if the number has been freed, else as `Tree.attributes`.
        """
        file = self._files.by_number.get(number)
        if file is not None:
            return self._contents.attributes(file)
        if number >= CREATED:
            raise stale(number)
        return self.with_mode(self._source_tree.attributes(number), self._names.shown_path(number))

    def chunk_number(self, parent: int, name: bytes) -> int | None:
        """Return the inode number of the chunk with this name, whether it exists or not; None for any other name."""
        directory = self._names.path_of(parent)
        names = self._files.in_directory(directory)
        if name in names:
            file = names[name]
            return None if file is None or file.target is None else file.number
        number = self._names.source_number(directory)
        return None if number is None else self._source_tree.chunk_number(number, name)

    def is_chunk(self, number: int) -> bool:
        """Return whether an inode number is that of a chunk, which need not exist."""
        file = self._files.by_number.get(number)
        return self._source_tree.is_chunk(number) if file is None else file.target is not None

    def is_unlinked(self, number: int) -> bool:
        """Return whether a handle has the file open, and the file was removed or replaced."""
        file = self._files.by_number.get(number)
        return file is not None and file.path is None and bool(file.handles)

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes of a file from `offset` on; fewer only at its end.

        Raise as `FileContents.read` or `Tree.read`.
        """
        file = self._files.by_number.get(number)
        if file is None:
            if number >= CREATED:
                raise stale(number)
            return self._source_tree.read(number, offset, size)
        return self._contents.read(file, offset, size)

    def read_many(self, requests: list[tuple[int, int, int]]) -> list[bytes | Exception]:
        """Return the bytes of several (number, offset, size) requests in order; an exception for a failed one."""
        out: list[bytes | Exception] = []
        for request in requests:
            try:
                out.append(bytes(self.read(*request)))
            except (OSError, ShardfsError) as e:
                out.append(e)
        return out

    def own_xattrs(self, number: int) -> dict[str, bytes]:
        """Return the extended attributes `user.shardfs.*`.

        A changed file has its state, the LSN of its version and the error of publishing; an array has the number of
        pending versions.
        """
        file = self._files.by_number.get(number)
        if file is None:
            out = self._source_tree.xattrs(number) if number < CREATED else {}
            if not out and self._source_tree.is_array(number):
                out["user.shardfs.dirty"] = b"%d" % len(self._pending.shards.paths(self._names.path_of(number)))
            return out
        out = {"user.shardfs.state": _state(file)}
        if file.version is not None:
            out["user.shardfs.lsn"] = b"%d" % file.version.lsn
        failure = self._pending.failure(file.path or "")
        if failure is not None:
            out["user.shardfs.error"] = str(failure).encode(errors="replace")
        return out

    def costly_xattrs(self, number: int) -> dict[str, bytes]:
        """Return how many bytes of an array's shards are used and unused by published chunks. Reads every index."""
        return self._source_tree.costly_xattrs(number) if number < CREATED else {}

    # ---- listings ----

    def small_listing(self, number: int, limit: int) -> list[EntryRow] | None:
        """Return all rows of a small unchanged directory, as `scan` would; None for any other."""
        path = self._names.path_of(number)
        if number >= CREATED or self._files.in_directory(path) or self._names.source_number(path) != number:
            return None
        rows = self._source_tree.small_listing(number, limit)
        if rows is None or (rows and rows[0][2]):  # entries may be directories that are not shown
            return None
        return [(*entry[:-1], entry[-1] + OVERLAID) for entry in rows]  # cookies of `scan`

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """Yield the entries of a directory behind `cookie`, without `.` and `..`.

        Changed entries come first, as of the call; entries of the source follow. Raise as `Tree.scan`.
        """
        path = self._names.path_of(number)
        with self._names.lock:
            names = dict(self._files.in_directory(path))
        changed = []
        for name, file in names.items():
            if file is not None and (entry := self._listed(path, name, file)) is not None:
                changed.append((name, entry))
        if cookie < len(changed):
            yield Batch.from_entries(changed[cookie:], cookie)
        source_number = self._names.source_number(path)
        if source_number is None:
            return
        has_scratch = self._names.has_scratch(path)
        for batch in self._source_tree.scan(source_number, max(cookie - OVERLAID, 0)):
            is_rest = batch.cookies >= np.uint64(REST)
            if self._disk is not None and is_rest.any():  # files on a disk have a mode each
                batch = batch._replace(sizes=np.where(is_rest & (batch.numbers < TABLE_END), -1, batch.sizes))
            batch = _without(batch, names, has_scratch=has_scratch, local=self._disk is not None)
            page = self._directories.only_shown(batch, source_number, path)
            if len(page.names):
                if self._names.modes or self._names.times:
                    page = _asked_singly(page, {*self._names.modes, *self._names.times})
                yield page._replace(cookies=page.cookies + np.uint64(OVERLAID))

    def _listed(self, directory: str, name: bytes, file: WritableFile) -> Attributes | None:
        """Return the attributes of a changed file for a listing; None if the name is gone.

        If the attributes cannot be determined, the size is -1, so that the client asks for them and gets the error.
        """
        try:
            return self.find(directory, name)
        except FileNotFoundError:
            return None
        except (OSError, ShardfsError):
            return Attributes(file.number, False, -1, file.mtime_ns, None, file.mode)

    def statvfs(self) -> os.statvfs_result | None:
        """Return the statistics of the journal's file system, or of the store's if less space is free there."""
        ours, theirs = self._pending.statvfs(), self._source_tree.statvfs()
        return ours if theirs is None or ours.f_bavail * ours.f_frsize < theirs.f_bavail * theirs.f_frsize else theirs


def _state(file: WritableFile) -> bytes:
    if file.kind in (NameKind.ORPHAN, NameKind.SCRATCH):
        return file.kind.name.lower().encode()
    if file.dirty:
        return b"open"
    return b"published" if file.version is None else b"journaled"


def _asked_singly(batch: Batch, numbers: set[int]) -> Batch:
    """Return the batch without the sizes of these inode numbers.

    A listing cannot carry a mode or a time that was set on the mount. Size -1 makes the caller fetch the attributes of
    the entry.
    """
    mask = np.isin(batch.numbers, np.array([*numbers], np.uint64))
    return batch._replace(sizes=np.where(mask, -1, batch.sizes)) if mask.any() else batch


def _without(batch: Batch, names: dict[bytes, WritableFile | None], *, has_scratch: bool, local: bool) -> Batch:
    """Return the batch without hidden entries.

    Hidden entries are the given names, the names of shardfs's own files and, with `has_scratch`, temporary files of
    other programs in the source. In a remote source, directories with such names are hidden as well.
    """
    listed = batch.names.tolist()
    keep = np.array([n not in names and not n.startswith(OWN_PREFIX.encode()) for n in listed], np.bool_)
    if has_scratch:
        exempt = batch.directories if local else np.zeros(len(listed), np.bool_)
        rest_rows = np.flatnonzero((batch.cookies >= np.uint64(REST)) & ~exempt).tolist()
        for i in rest_rows:
            keep[i] &= not is_scratch(os.fsdecode(listed[i]))
    return batch if keep.all() else batch.only(keep)
