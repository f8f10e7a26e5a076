"""The writable tree: creating, renaming and removing names.

A closed chunk goes to the journal as a whole (`OpenFiles`), and from there to its shard (`WriteBuffer`).
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.writers import open_writer
from shardfs.vfs.chunk_dirs import Spot
from shardfs.vfs.inodes import CREATED
from shardfs.write.buffers import Budget
from shardfs.write.documents import Documents
from shardfs.write.files import WritableFile, join, shown_mode
from shardfs.write.overlay import JOURNALED, stale
from shardfs.write.passing import PassedThrough
from shardfs.write.writeback import WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.formats.create_rules import Rules
    from shardfs.model.attributes import Attributes
    from shardfs.model.blobs import Bytes
    from shardfs.vfs.tree import Tree
    from shardfs.write.buffers import Buffer
    from shardfs.write.journal import Journal
    from shardfs.write.pending import Version
    from shardfs.write.publishing import Publishing

log = logging.getLogger(__name__)


class WriteTree(PassedThrough):
    """A writable mount of a source. Thread-safe. It starts with the versions in the journal."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        """Takes the arguments of `OpenFiles`."""
        super().__init__(*parts, **more)
        self._recover()
        self.pending.attach(self._published, self._is_held)

    # ---- names ----

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. A chunk is removed from its shard at the next publishing."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        path = join(directory, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if found.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._waiting()
        opened = self._files.by_number.get(found.number)
        if opened is not None and opened.twin is not None:
            self.unlink(parent, opened.twin.name)
            return
        spot = self._spot_of(directory, name, found)
        if spot.kind is NameKind.HIDDEN:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        if spot.target is not None:
            self.pending.require_writable(spot.target)
        if spot.kind is not NameKind.PLAIN:
            self._keep(found.number)
            if spot.kind is NameKind.DOCUMENT:
                self.documents.remove(directory, os.fsdecode(name))
            with self._gate.shared():  # another thread may have renamed the directory
                self._remove(self._directory(parent), name, found.number, spot)
        else:
            with self._naming():
                self._keep(found.number)
                self.writer.delete(path)
                self._remove(directory, name, found.number, spot)
                self.base.changed(path)
            if self.documents.is_document(os.fsdecode(name)):
                self._described_anew(directory)

    def _spot_of(self, directory: str, name: bytes, found: Attributes) -> Spot:
        """Return the kind and target of an existing file."""
        file = self._files.by_number.get(found.number)
        if file is not None:
            return Spot(file.kind, file.target)
        spot = self.spot(directory, name)
        if spot.kind is NameKind.ORPHAN:  # a chunk outside of the array's new shape
            former = self.base.target_of(found.number)
            return spot if former is None else Spot(NameKind.CHUNK, former)
        return spot

    def _remove(self, directory: str, name: bytes, number: int, spot: Spot) -> None:
        """Remove a name. Open handles keep the bytes of the file."""
        path = join(directory, name)
        self.pending.refused.forget(path)
        with self._lock:
            file = self._files.at(path)
            stored = self.pending.is_stored(path, spot.target)
            if spot.kind in JOURNALED and (stored or self.pending.holds(path)):
                self.pending.drop(path, spot.target if stored else None)
            if file is not None:
                self._part_from_twin(file)
                self._files.unname(file)
            if stored or spot.kind is NameKind.DOCUMENT:
                self._hide(directory, name, spot.target)
            else:
                self._reveal(directory, name, spot.target)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None:
        """Rename a file or directory, atomically for all readers. An existing target is replaced unless `noreplace`.

        A directory is renamed in the store, after the pending versions in it are published.
        """
        source, directory = self._directory(parent), self._directory(new_parent)
        found = self._find(source, parent, name)
        old, new = join(source, name), join(directory, new_name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        there = self._find(directory, new_parent, new_name)
        if there is not None and noreplace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if old == new:
            return
        if found.directory:
            self._waiting()
            self._rename_directory(found, old, new, there)
            return
        if there is not None and there.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
        moved, spot = self._files.by_number.get(found.number), self.spot(directory, new_name)
        if moved is None or not self._moves_quickly(moved, spot):
            self._waiting()
        if moved is not None and moved.twin is not None:
            raise OSError(errno.EXDEV, "has a compressed form, which would stay", old)
        self._prepare(found, moved, spot)
        while True:
            describes = spot.kind is NameKind.DOCUMENT
            if describes:
                self.pending.drain(self.documents.described_by(directory, os.fsdecode(new_name)))
            with self._gate.alone() if describes else self._gate.shared():
                spot = self._spot_to_write(directory, new_name)
                if describes is (spot.kind is NameKind.DOCUMENT):
                    self._rename_file(found, there, source, name, directory, new_name, spot)
                    return

    def _moves_quickly(self, file: WritableFile, spot: Spot) -> bool:
        """Return whether the rename needs no more than a quick journal record."""
        if file.kind not in JOURNALED or spot.kind not in JOURNALED:
            return False
        carried = self._carried(file, spot)
        if carried is None and (file.version is None or file.dirty):
            return False
        return self.pending.is_quick(spot.target, 0 if carried is None else carried.size)

    def _carried(self, file: WritableFile, spot: Spot) -> Buffer | None:
        """Return the buffer of a dirty temporary file that is renamed to a journaled name; else None.

        Its data go to the journal together with the new name, as one record.
        """
        unsaved = file.unsaved()
        carries = unsaved is not None and file.kind is NameKind.SCRATCH and spot.kind in JOURNALED
        return unsaved[0] if unsaved is not None and carries else None

    def _prepare(self, found: Attributes, file: WritableFile | None, spot: Spot) -> None:
        """Save the data of a file before its rename, and make room in the journal.

        The rename itself, which holds locks, then waits for neither.
        """
        carried = file is not None and self._carried(file, spot) is not None
        if file is not None and file.kind in JOURNALED and not carried:
            self._settle(file)
        if spot.kind in JOURNALED and (file is None or file.version is None or carried):
            self.pending.make_room(found.size)

    def _rename_file(
        self, found: Attributes, there: Attributes | None, source: str, name: bytes, directory: str, new_name: bytes,
        spot: Spot,
    ) -> None:  # fmt: skip
        old, new = join(source, name), join(directory, new_name)
        if there is not None:
            spot = self._spot_of(directory, new_name, there)
        if stat.S_ISLNK(found.mode):
            self._require_link(directory, new_name, spot, os.fsdecode(self.read_link(found.number)))
        kinds = {spot.kind, self._spot_of(source, name, found).kind}
        with self._naming() if NameKind.PLAIN in kinds else nullcontext():
            if there is not None:
                self._keep(there.number, replaced=True)
            if kinds == {NameKind.PLAIN}:
                self._rename_plain(found.number, old, new)
            else:
                self._replace(self._adopt(found.number, None), old, directory, new_name, spot)
        if kinds == {NameKind.PLAIN}:
            for above, last in ((source, name), (directory, new_name)):
                if self.documents.is_document(text := os.fsdecode(last)) or self.documents.is_foreign(text):
                    self._described_anew(above)

    def _rename_plain(self, number: int, old: str, new: str) -> None:
        file = self._adopt(number, None)
        self._settle(file)
        directory, _, name = new.rpartition("/")
        self._store_directory(directory)
        self.writer.rename(old, new)
        with self._lock:
            replaced = self._files.at(new)
            if replaced is not None:
                self._files.unname(replaced)
            self._files.rename(file, directory, os.fsencode(name))
        for path in (old, new):
            self.base.changed(path)

    def _replace(self, file: WritableFile, old: str, directory: str, name: bytes, spot: Spot) -> None:
        """Rename a file whose bytes move between the journal, a shard, a document and the store."""
        new = join(directory, name)
        was, had = file.kind, file.target
        source = file.parent or ""
        carried = self._carried(file, spot)
        if was in JOURNALED and carried is None:
            self._settle(file)
        held = carried is not None or (file.version is not None and spot.kind in JOURNALED)
        whole = None if held else self._whole(file)
        self.pending.look(new, spot.target)
        if was is NameKind.DOCUMENT:
            self.documents.require_known(source, os.fsdecode(file.name))
        if spot.kind is NameKind.DOCUMENT or spot.kind is NameKind.PLAIN:
            self._replace_through(file, new, whole or b"", spot)
        with self._lock:
            stored = self.pending.is_stored(old, had)
            self._part_from_twin(file)
            if spot.kind in JOURNALED:
                scratch, carried = spot.kind is NameKind.SCRATCH, self._carried(file, spot)
                data: Bytes | None = whole if carried is None else carried.content()
                if data is None and file.version is None and had is None:
                    raise stale(file.number)  # refused at `close`; the writer got the error
                file.version = self.pending.move(
                    old, new, spot.target, had if stored else None, data, file.mtime_ns, file.mode, scratch=scratch,
                    had=had,
                )  # fmt: skip
                file.dirty = file.dirty and carried is None
                stored = self.pending.holds(old)  # a tombstone
            elif was in JOURNALED and (stored or self.pending.holds(old)):
                self.pending.drop(old, had if stored else None)
                file.version = None
            replaced = self._files.at(new)
            if replaced is not None:
                self._files.unname(replaced)
            self._files.rename(file, directory, name)
            file.kind, file.target = spot.kind, spot.target
            self._supersede(file)
            if spot.kind is not NameKind.DOCUMENT:
                file.frozen = None
            if stored or was is NameKind.DOCUMENT:
                self._hide(source, os.fsencode(old.rpartition("/")[2]), had)
            file.leave_disk()
            self._show_merged(file)
        if was is NameKind.DOCUMENT:
            self.documents.remove(source, old.rpartition("/")[2])
        elif was is NameKind.PLAIN:
            with suppress(FileNotFoundError):  # the writer has already removed a file named like a lock
                self.writer.delete(old)
            self.base.changed(old)

    def _replace_through(self, file: WritableFile, new: str, data: bytes, spot: Spot) -> None:
        before = file.kind
        file.kind = spot.kind
        try:
            self._write_through(file, new, data)
        except BaseException:
            file.kind = before
            raise
        self._dress(file, new)
        with self._lock:
            if file.buffer is not None and not file.writers and not file.merged:
                file.buffer.close()
                file.buffer = None

    def _dress(self, file: WritableFile, path: str) -> None:
        """Set the mode and time of a file in a local store to those set on the mount."""
        if self.writer.local:
            with suppress(FileNotFoundError):  # a document may be stored under another name
                self.writer.set_mode(path, stat.S_IMODE(file.mode) or 0o644)
                self.writer.set_times(path, file.mtime_ns)
            self.base.changed(path)

    def _rename_directory(self, found: Attributes, old: str, new: str, there: Attributes | None) -> None:
        """Publish the pending versions in a directory, then rename it in the store."""
        if there is not None and not there.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), new)
        parents = (self._base_number(old.rpartition("/")[0]), self._base_number(new.rpartition("/")[0]))
        if found.number >= CREATED or None in parents or self.base.is_virtual(found.number):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)
        if any(number is not None and self.base.is_virtual(number) for number in parents):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), new)
        above, _, name = new.rpartition("/")
        kind = self.spot(above, os.fsencode(name)).kind
        if kind is NameKind.HIDDEN:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), new)
        if kind in (NameKind.DIRECTORY, NameKind.CHUNK):  # the source has shards at that path
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), new)
        if there is not None:
            self._remove_directory(there.number, new)
        self.pending.flush(old)
        with self._gate.alone():  # a concurrent close waits, then uses the new path
            self.pending.flush(old)
            if any(path.startswith(f"{old}/") for path in self.pending.versions()):
                raise OSError(errno.EBUSY, "something in it is not published", old)
            self.writer.rename(old, new)
            with self._lock:
                self._files.move_below(old, new)
                self.base.moved(old, new)
                self._paths.clear()
                self._numbers.clear()
                self._base_numbers.clear()
            for path in (old, new):
                self.documents.seen.forget(path)
                self.base.changed(path)
        self._described_anew(new)

    def link(self, number: int, new_parent: int, new_name: bytes) -> Attributes:
        """Create a copy of a file under another name: files here have one name each."""
        directory, source = self._directory(new_parent), self._files.by_number.get(number)
        if source is not None and source.is_link:
            return self.symlink(new_parent, new_name, self.read_link(number))
        if self._find(directory, new_parent, new_name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(new_name))
        self._waiting()
        spot = self._spot_to_write(directory, new_name)
        if spot.kind is NameKind.PLAIN and self.writer.local:
            self._store_directory(directory)
            if self.copy_on_disk(number, path := join(directory, new_name)):
                return self._linked(path)
        return self._link_to_bytes(number, directory, new_name, spot)

    def _linked(self, path: str) -> Attributes:
        """Return the attributes of a file copied on the disk, with an inode number of its own."""
        directory, _, name = path.rpartition("/")
        with self._lock:
            file = self._files.new(directory, os.fsencode(name), NameKind.PLAIN)
        if self.documents.is_document(name) or self.documents.is_foreign(name):
            self._described_anew(directory)
        return self._attributes(file)

    def _link_to_bytes(self, number: int, directory: str, new_name: bytes, spot: Spot) -> Attributes:
        """Copy a file by its bytes, if the source or the copy is not a plain file of a local store."""
        source = self._files.by_number.get(number)
        if source is not None:
            self._settle(source)
            data = bytes(self._read(source, 0, max(self._attributes(source).size, 1)))
        else:
            data = bytes(self.base.read(number, 0, max(self.base.attributes(number).size, 1)))
        self.pending.make_room(len(data))
        path, mode, now = join(directory, new_name), self.attributes(number).mode, time.time_ns()
        file = self._files.unnamed(spot.kind, spot.target)
        file.mode, file.mtime_ns = mode, now
        if spot.kind not in JOURNALED:
            self._write_through(file, path, data)
            self._dress(file, path)
        with self._lock:
            if spot.kind in JOURNALED:
                scratch = spot.kind is NameKind.SCRATCH
                file.version = self.pending.put(path, data, spot.target, now, mode, scratch=scratch)
            self._files.name(file, directory, new_name)
            self._supersede(file)
        if mode and spot.kind is NameKind.PLAIN:
            self.set_mode(file.number, mode)
        return self._attributes(file)

    def mkdir(self, parent: int, name: bytes, mode: int) -> Attributes:
        """Create a directory.

        In a tree of chunks and over a remote store, the directory exists only until the end of the mount.
        """
        directory = self._directory(parent)
        path = join(directory, name)
        if self._find(directory, parent, name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        spot = self.spot(directory, name)
        if spot.kind is NameKind.HIDDEN:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        if spot.kind is NameKind.DIRECTORY:
            self._show(path)
            return self.lookup(parent, name)
        hidden = name.startswith(b".") and self._keeps_hidden(directory)
        if spot.kind is not NameKind.PLAIN or hidden or self._base_number(directory) is None or not self.writer.local:
            with self._lock:
                file = self._files.new(directory, name, NameKind.DIRECTORY)
                file.mode, file.mtime_ns = shown_mode(mode, True), time.time_ns()
            return self._attributes(file)
        self._waiting()
        self._store_directory(directory)
        self.writer.make_directory(path, stat.S_IMODE(mode))
        self.base.changed(path)
        return self.lookup(parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove a directory that shows no entries."""
        directory = self._directory(parent)
        found = self._find(directory, parent, name)
        path = join(directory, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not found.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self._waiting()
        self._remove_directory(found.number, path)

    def _remove_directory(self, number: int, path: str) -> None:
        if any(len(batch.names) for batch in self.scan(number)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.pending.refused.forget_below(path)
        made = self._files.by_number.get(number)
        if made is not None:
            with self._lock:
                self._files.forget_below(path)
                self._files.unname(made)
        self._inhabited.discard(path)
        base = self._base_number(path)
        if base is None:
            return
        if self.base.is_virtual(base):
            self._show(path, shown=False)
            tree = self.base.chunk_tree(base)
            if tree is not None and base == tree.root and self.writer.local:
                with suppress(OSError):  # another array, perhaps with other axes, may have shards of the same names
                    self.pending.flush(path)
                    self._remove_stored(path)
            return
        self.pending.flush(path)
        self._remove_stored(path)
        with self._lock:
            self._files.forget_below(path)
        self.documents.removed(path)
        self._renewed(path)

    def _remove_stored(self, path: str) -> None:
        """Remove a directory and its empty subdirectories from the store.

        Raise OSError (ENOTEMPTY) if a file is in any of them.
        """
        for entry in list(self.store.scan(path)):
            if not entry.directory:
                raise OSError(errno.ENOTEMPTY, f"{entry.name} is in it, which is not shown", path)
            self._remove_stored(join(path, entry.name))
        with suppress(FileNotFoundError):
            self.writer.remove_directory(path)

    def sync_directory(self, number: int) -> None:
        """Make the names in a directory survive a power failure."""
        self._waiting()
        self.pending.sync()
        path = self.path_of(number)
        if self.writer.local and number < CREATED and not self.base.is_virtual(number):
            with suppress(FileNotFoundError):  # documents describe it, but the store does not have it yet
                self.writer.sync_directory(path)

    def set_xattr(self, number: int, name: str, value: bytes, flags: int = 0) -> None:
        """Set an extended attribute; `user.shardfs.flush` publishes pending versions instead.

        Its value is the timeout in seconds; empty or 0 waits without limit. Versions at and below the path are
        published.
        """
        if name != "user.shardfs.flush":
            super().set_xattr(number, name, value, flags)
            return
        self._waiting()
        self.pending.publish(self.path_of(number), float(value or b"0") or None)

    # ---- publishing ----

    def _is_held(self, path: str) -> bool:
        """Return whether a handle has the file open for writing."""
        file = self._files.at(path)
        return file is not None and file.writers > 0

    def _published(self, done: Mapping[str, Version]) -> None:
        """Update the files whose versions are now in their shards. Called without any lock."""
        gone: list[tuple[int, bytes]] = []
        for path in done:
            self._forget_plain(path)
        with self._lock:
            for path, version in done.items():
                parent, _, name = path.rpartition("/")
                file = self._files.at(path)
                if file is None:
                    if version.data is None:
                        raw = os.fsencode(name)
                        self._reveal(parent, raw, self.spot(parent, raw).target)
                    continue
                if file.version is not None and file.version.lsn == version.lsn:
                    gone += self._has_arrived(file, version)
        for number, raw in gone:
            self.invalidate(number, raw)

    def _forget_plain(self, path: str) -> None:
        """Make the kernel drop cached bytes of a chunk that was written under a compressed name.

        The chunk is about to be shown under its plain name, which the kernel may have cached with older bytes.
        """
        file = self._files.at(path)
        if file is None or file.target is None or not file.target.suffix:
            return
        parent, _, name = path.removesuffix(file.target.suffix).rpartition("/")
        number = self._base_number(parent)
        if number is not None:
            with suppress(OSError, CorruptShardError):
                self.drop_content(self.base.lookup(number, os.fsencode(name)).number)

    def _has_arrived(self, file: WritableFile, version: Version) -> list[tuple[int, bytes]]:
        if file.target is not None and file.target.suffix:  # the plain name is shown from now on
            self._part_from_twin(file)
            self._reveal(file.parent or "", file.name, file.target)
            if file.writers:  # open writers make the next version
                self._load(file)
                file.version = None
                return []
            victims = [file]
        else:
            file.known_size = version.data.size if version.data is not None else 0
            file.version = None
            victims = self._files.settle(file) if file.is_settled else []
        return self._let_out(victims)

    # ---- the end ----

    def state(self) -> dict[str, Any]:
        """Return the figures of the write buffer for `status.json`."""
        return self.pending.state()

    def left(self) -> list[str]:
        """Return the paths of versions that are not yet published, or cannot be published."""
        return self.pending.left()

    def close(self, timeout: float) -> list[str]:
        """Close all open files, publish within `timeout` seconds, and close the journal. Return the paths left over.

        The kernel may no longer report the last closes, so open handles are closed here first.
        """
        for handle in list(self._handles):
            try:
                self.flush(handle)
                self.release(handle)
            except OSError as e:
                log.warning("what is open when the mount ends: %s", e)
        self._pass_strays_through()
        try:
            return self.pending.close(timeout)
        finally:
            self.writer.close()


def open_write_tree(
    base: Tree,
    journal: Journal,
    *,
    publishing: Publishing | None = None,
    rules: Rules | None = None,
    remembers: bool = True,
    dirty_bytes: int = 256 << 20,
    cas_none: bool = False,
    replace_links: bool = False,
    waiting: Callable[[], None] = nothing,
) -> WriteTree:
    """Return a writable tree on top of a read-only one. The versions in the journal are pending.

    Args:
        dirty_bytes: memory limit of files open for writing.
        cas_none: accept a store without conditional writes, where concurrent writers could overwrite each other.
        replace_links: passed to `LocalWriter`.
        rules: passed to `Documents`.
        remembers: passed to `Documents`.

    Raise UnsupportedError, with the reason, if the source cannot be written; BusyError if another host writes to it.
    """
    writer = open_writer(base.store, cas_none=cas_none, replace_links=replace_links, journal=journal.directory)
    try:
        pending = WriteBuffer(journal, writer, publishing, waiting)
    except BaseException:
        writer.close()
        raise
    wins = publishing is not None and publishing.conflict == "ours"
    documents = Documents(base, writer, rules, remembers=remembers, wins=wins)
    budget = Budget(dirty_bytes, lambda: syscalls.open_unnamed(str(journal.directory)))
    return WriteTree(base, writer, pending, documents, budget, waiting)
