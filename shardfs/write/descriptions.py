"""Effects of metadata documents on names: a new document turns some files into chunks, and others into plain files.

A document reaches this module in two ways:

- A program closes it: `write_document` writes it to the store with `Documents`.
- Another program has changed it in the source, which `note_read` or a refused write finds out. The mount then shows the
  source's version (`_follow_source`).

In both cases `describe_anew` reads the documents of the directory again, and gives each changed file of the mount the
kind that its name has now:

| the file was | its name is now | what happens |
|---|---|---|
| an orphan (a chunk that no document describes) | a chunk | it becomes the chunk, and is published |
| an orphan | a plain file | a *stray*: it is written to the store under its own name |
| a chunk | a chunk of an array in another shape | it gets the new target; a layout may show other bytes: *reshaped* |
| a chunk | a chunk of an array in another form (codecs, shards) | *obsolete*: a conflict; the source's chunk is shown |
| a chunk | outside of the new shape | it stays a chunk of the former shape's tree, and can be read and deleted |
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.model.changes import Change
from shardfs.model.errors import NOT_FOUND, CorruptShardError, ShardfsError, errno_of, message
from shardfs.model.kinds import NameKind
from shardfs.write.documents import UnseenChangeError
from shardfs.write.file_contents import MAX_DOCUMENT, Part
from shardfs.write.files import WritableFile, join, split, stale
from shardfs.write.name_kind import FOREIGN, is_document
from shardfs.write.stored import NOTHING, conflicts, digest_of, digest_of_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from shardfs.model.attributes import Attributes
    from shardfs.model.blobs import Blob, Plan
    from shardfs.vfs.chunk_dirs import ChunkDirs, NameMeaning, Target
    from shardfs.write.journaled import CompressedKind
    from shardfs.write.open_files import OpenFiles
    from shardfs.write.overlay import Overlay
    from shardfs.write.pending import Version
    from shardfs.write.stored import Stored

log = logging.getLogger(__name__)

DESCRIBED = (NameKind.CHUNK, NameKind.ORPHAN, NameKind.COMPRESSED)
"""Kinds of files that another document may give another kind."""


class _LeftToDo(NamedTuple):
    """What follows once the files have their kinds. The words are those of the table at the top.

    Args:
        obsolete: the paths of obsolete versions, each with its file; None for a removed chunk.
        reshaped: the inode numbers of reshaped chunks.
    """

    obsolete: list[tuple[str, WritableFile | None]]
    strays: list[WritableFile]
    reshaped: list[int]


@dataclass(eq=False)
class Descriptions(Part):
    """Writes documents, and updates the names that they describe. Thread-safe."""

    _overlay: Overlay
    _open_files: OpenFiles
    _compressed: CompressedKind

    def publish_chosen(self) -> None:
        """Write the documents chosen with `shardfs recover --ours` to the source, at the start of a mount.

        A document that cannot be written stays in the journal, with a warning in the log.
        """
        for path, version in list(self._pending.backlog.versions.items()):
            if version.is_document and not version.conflict and version.data is not None:
                self._publish_chosen(path, version, self._pending.journal.read(version.data, 0, MAX_DOCUMENT))

    def _publish_chosen(self, path: str, version: Version, data: bytes) -> None:
        directory, _, name = path.rpartition("/")
        try:
            written = self._documents.write(directory, name, data, decided=True)
        except OSError as e:
            log.warning("%s: the chosen document could not be published and stays in the journal: %s", path, e.strerror)
            if e.errno == errno.EINVAL:  # the document contradicts the source: a user decides
                self._pending.keep(path, data, str(e), version.mtime_ns, version.mode)
            return
        self._pending.drop(path)
        for changed in written.changed if written is not None else ():
            self._names.renew(changed)

    def write_document(self, file: WritableFile, directory: str, name: str, data: bytes, *, has_name: bool) -> bool:
        """Write a document to the store and describe its datasets anew. Return False if the format is unknown.

        The name-space lock is held exclusively, so that no other thread creates a file that the document might
        describe. Raise the errors of `Documents.write`. After an UnseenChangeError, the mount shows the source's
        version, and the one written here stays in the journal for `shardfs recover`.

        Args:
            file: gets the document as its bytes.
            has_name: the file is at that path already, so nothing is written if a rename has moved it. False: the
                caller gives it the name after this call.
        """
        try:
            with self._names.gate.alone():
                if has_name and file.path != join(directory, name):
                    return True
                absent = self._absent_beside(directory, name)
                written = self._documents.write(directory, name, data)
                if written is None:
                    return False
                file.freeze(written.shown, superseded=written.shown is not data)
                self.describe_written(join(directory, name), written.changed)
                self._hide_generated(absent)
        except UnseenChangeError as e:
            path, why = join(directory, name), str(e.strerror)
            log.warning("%s: %s; choose a document with `shardfs recover --ours` or `--theirs`", path, why)
            self._pending.keep(path, data, why, file.mtime_ns, file.mode)
            self._follow_source(directory, name)
            raise
        return True

    def describe_written(self, document: str, changed: Iterable[str]) -> None:
        """Describe the directories `changed` anew, because the store has a new version of `document` (a path) now.

        After an error the names there keep their kinds. The `close` or `fsync` under way returns the error.
        """
        for path in changed:
            try:
                self.describe_anew(path)
            except (OSError, ShardfsError) as e:
                why = f"the document is stored, but names at {path or '/'} keep their kinds, because {message(e)}"
                log.warning("%s: %s. Write the document again when this is mended", document, why)
                self._pending.failures.record(document, OSError(errno_of(e), why, document))

    def _absent_beside(self, directory: str, name: str) -> list[tuple[str, bytes]]:
        """Return directory and name of documents that do not exist and that a layout may generate with a new one."""
        absent = []
        for at, other in self._documents.generated_with(directory, name):
            with suppress(*NOT_FOUND):
                if self._overlay.find(at, other) is None:
                    absent.append((at, other))
        return absent

    def _hide_generated(self, absent: Iterable[tuple[str, bytes]]) -> None:
        """Hide documents that the layout has generated: the program that copies a dataset creates them next.

        cp would fail if they existed. The next mount shows them.
        """
        for at, name in absent:
            number = self._names.source_number(at)
            with suppress(OSError, CorruptShardError):
                if number is not None and self._source_tree.lookup(number, name) is not None:
                    with self._names.lock:
                        if name not in self._files.in_directory(at):
                            self._files.hide(at, name)

    def note_read(self, file: WritableFile | None, number: int) -> None:
        """Record the version of a document that a program is about to read. Do nothing for other files.

        `number` is the inode number, and `file` is None if the file was not changed on the mount. Raise OSError
        (ESTALE) if the source has another version than the mount shows. The kernel then looks up the name again and
        gets the new version.
        """
        if file is not None and (file.kind is not NameKind.DOCUMENT or file.writers or file.path is None):
            return
        path = self._names.path_of(number)
        directory, raw = split(path)
        name = os.fsdecode(raw)
        if not is_document(name) or self._names.classify_name(directory, raw).kind is not NameKind.DOCUMENT:
            return
        self._names.before_waiting()
        size = self._overlay.attributes(number).size
        if size > MAX_DOCUMENT:
            return
        data = bytes(self._overlay.read(number, 0, max(size, 1)))
        if self._documents.is_changed(directory, name, data):
            log.info("%s: another program has changed the document; the mount shows the new version", path)
            self._follow_source(directory, name)
            raise stale(number)
        self._documents.seen.read(path, data)

    def _follow_source(self, directory: str, name: str) -> None:
        """Show the source's version of a document that another program has changed."""
        path = join(directory, name)
        entry: Attributes | None = None
        data: bytes | None = None
        with suppress(OSError, CorruptShardError):
            self._open_files.keep_readable(self._overlay.number(path))
        with self._names.gate.alone():
            for at in self._documents.concerned(directory, name):
                self.describe_anew(at)
            self._source_tree.changed(path)
        with suppress(OSError, CorruptShardError):
            entry = self._overlay.with_mode(self._source_tree.resolve(path), path)
            data = self._documents.shown(path)
        with self._names.lock:
            file = self._files.at(path)
            if file is None or not file.writers:
                self._replace(path, file, data)
            else:
                file.freeze(data, superseded=True)
            file = self._files.at(path)
            if file is not None and entry is not None:
                file.set_status(mtime_ns=entry.mtime_ns, mode=entry.mode)

    def show_superseding(self, file: WritableFile) -> None:
        """Show the source's document if it supersedes the one written here, unless a program still writes to the file.

        The caller holds the lock.
        """
        if file.superseded and not file.writers and file.path is not None:
            self._replace(file.path, file, file.frozen)

    def _replace(self, path: str, old: WritableFile | None, data: bytes | None) -> None:
        """Replace the file at a path by a document with the bytes `data`; None shows what the source has.

        `old` is the changed file there; None if there is none, or the name is hidden. The caller holds the lock. The
        new file gets another inode number, because the kernel may have cached size and bytes of the old one.
        """
        if old is not None:
            old.discard()
            self._files.unname(old)
        if data is None:
            self._files.reveal(*split(path))
        else:
            new = self._files.new(*split(path), NameKind.DOCUMENT)
            new.freeze(data)
            if old is not None:
                new.set_status(mtime_ns=old.mtime_ns, mode=old.mode)
            self._files.settle(new)
        self._names.invalidate(*split(path))

    def describe_anew(self, directory: str) -> None:
        """Read the documents of a directory again, and give the files in it and below the kinds of their names now.

        The table at the top of this module has the cases. Change no file and raise OSError if a document that decides
        the kind of a name cannot be read.
        """
        formers = self._former_trees(self._names.renew(directory))
        left_to_do = _LeftToDo([], [], [])
        with self._names.lock:
            meanings = [
                (join(parent, name), file, self._names.classify_name(parent, name))
                for parent, name, file in self._files.below(directory)
                if file is None or file.kind in DESCRIBED
            ]
            for path, file, meaning in meanings:
                self._take_meaning(path, file, meaning, formers, left_to_do)
            for path, file in left_to_do.obsolete:
                self._replace(path, file, None)
        if left_to_do.reshaped:
            self._names.hooks.reshaped(np.array(left_to_do.reshaped, np.uint64))
        for file in left_to_do.strays:
            self._pass_through(file)
        self.convert_compressed_orphans(directory)

    def _take_meaning(
        self, path: str, file: WritableFile | None, meaning: NameMeaning, formers: Set[ChunkDirs], left_to_do: _LeftToDo
    ) -> None:
        """Give a changed name the kind and target that documents give it now. The caller holds the lock.

        `file` is None for a hidden name: a chunk was removed here. `formers` are the trees of former shapes.
        """
        target = self._pending.shards.target(path) if file is None else file.target
        if meaning.target is None and target is not None and target.tree in formers:
            return  # outside of the new shape
        is_reformed = _is_reformed(target, meaning.target)
        if is_reformed and file is not None and file.dirty:
            return  # the program that closes the file gets the error
        if self._pending.retarget(path, meaning.target) or is_reformed:
            left_to_do.obsolete.append((path, file))
        elif file is not None and meaning.kind in (NameKind.CHUNK, NameKind.ORPHAN):
            if _is_reshaped(target, meaning.target):
                _forget_shown(file)
                left_to_do.reshaped.append(file.number)
            file.become(meaning.kind, meaning.target)
            self._overlay.make_parents(split(path)[0])
        elif file is not None and file.kind is NameKind.ORPHAN and meaning.kind is NameKind.PLAIN:
            left_to_do.strays.append(file)

    def convert_compressed_orphans(self, directory: str = "") -> None:
        """Make chunks of the orphans in a directory and below whose names are now those of compressed chunks.

        Programs closed them before a document described them. One that cannot be decompressed stays in the journal,
        with a warning in the log.
        """
        with self._names.lock:
            orphans = [f for *_, f in self._files.below(directory) if f is not None and f.kind is NameKind.ORPHAN]
        for file in orphans:
            path = file.path or ""
            if self._names.classify_name(*split(path)).kind is not NameKind.COMPRESSED:
                continue
            data = None if file.version is None else file.version.data
            try:
                if data is not None:
                    self._compressed.write(file, path, self._pending.journal.read(data))
            except (OSError, CorruptShardError) as e:
                log.warning("%s: cannot be a compressed chunk, so it stays in the journal: %s", path, e)
                continue
            with self._names.lock:
                file.become(NameKind.COMPRESSED, None)
                if not file.writers:
                    self._files.unname(file)
                    self._names.invalidate(*split(path))

    def changes_kinds(self, name: bytes) -> bool:
        """Return whether a passed-through file with this name changes what other names in its directory are."""
        text = os.fsdecode(name)
        return is_document(text) or text == FOREIGN

    def _pass_through(self, file: WritableFile) -> None:
        """Write a file to the store under its own name: it was kept as a chunk of a future array, but is no chunk."""
        path = file.path
        version = None if path is None else self._pending.backlog.versions.get(path)
        if path is None or (version is not None and version.conflict):
            return
        try:
            data = self._contents.whole(file)
            self.make_stored_directory(path.rpartition("/")[0])
            base = NOTHING if version is None else version.base
            self._writer.update(path, _PassedThrough(path, data, base, wins=self._documents.wins))
        except UnseenChangeError as e:
            log.warning("%s: %s", path, e.strerror)
            self._pending.publisher.refuse(path, str(e.strerror))
            return
        except (OSError, ShardfsError, ValueError) as e:
            log.warning(
                "%s: no dataset has this file, but it could not be stored and stays in the journal: %s", path, e
            )
            return
        with self._names.lock:
            file.become(NameKind.PLAIN, None)
            file.publish(None, len(data))
            self._pending.drop(path)
        if file.mtime_ns and (disk := self._writer.disk) is not None:
            disk.set_times(path, file.mtime_ns)
        self._source_tree.changed(path)

    def pass_strays_through(self) -> None:
        """Write orphaned chunks and temporary files to the store under their own names, at unmount.

        This applies to names that no metadata document describes and that no shard can have. Such temporary files have
        no sharded dataset beside them, so they may be files of the user.
        """
        for parent, name, file in list(self._files.below("")):
            path = join(parent, name)
            is_kept = file is not None and file.kind in (NameKind.ORPHAN, NameKind.SCRATCH)
            if file is None or not is_kept or path not in self._pending.backlog.versions:
                continue
            with suppress(OSError, CorruptShardError):
                if self._names.is_plain_in_source(path):
                    self._pass_through(file)

    def _former_trees(self, paths: Iterable[str]) -> set[ChunkDirs]:
        """Return the trees of the arrays at these paths in former shapes.

        Note in `Overlay.cut` which arrays have some.
        """
        every: set[ChunkDirs] = set()
        for path in paths:
            formers: list[ChunkDirs] = []
            with suppress(OSError, CorruptShardError):
                formers = self._source_tree.collection(path).shapes[:-1]
            if formers:
                self._overlay.cut.add(path)
            else:
                self._overlay.cut.discard(path)
            every.update(formers)
        return every

    def make_stored_directory(self, path: str) -> None:
        """Create a directory and its parents in a local store, if missing.

        A file of the store is about to be created in the directory, which was so far virtual or outside of the grid.
        """
        disk = self._writer.disk
        if not path or disk is None:
            return
        number = self._names.source_number(path)
        if number is not None and not self._source_tree.is_virtual(number):
            return
        self.make_stored_directory(path.rpartition("/")[0])
        with suppress(FileExistsError):
            disk.make_directory(path)
            self._source_tree.changed(path)


@dataclass
class _PassedThrough(Change):
    """Give the source a file that was written over `base`, unless another program has changed the file since.

    Raise UnseenChangeError in that case, unless it `wins`.
    """

    path: str
    data: bytes
    base: Stored
    wins: bool

    def plan(self, old: Blob | None) -> Plan:
        version = None if old is None else old.stat().version
        base = self.base.including(digest_of_pieces([self.data]))  # a crash may have ended an earlier attempt
        if conflicts({"": base}, frozenset(), version, lambda keys: {key: digest_of(old) for key in keys}):
            why = "another program has written this file to the source, too"
            if not self.wins:
                raise UnseenChangeError(errno.ESTALE, f"{why}. Use shardfs recover --ours or --theirs", self.path)
            log.warning("%s: %s; conflict=ours replaces its version", self.path, why)
        return [self.data]


def _is_reshaped(old: Target | None, new: Target | None) -> bool:
    """Return whether the file of a chunk has changed with its array: layouts crop or pad chunks at the edge."""
    if old is None or new is None or new.is_verbatim:
        return False
    before = old.tree.collection.array
    after = new.tree.collection.array
    if before is None or after is None:
        return False
    return (before.inside(old.coords), before.fill_value) != (after.inside(new.coords), after.fill_value)


def _is_reformed(old: Target | None, new: Target | None) -> bool:
    """Return whether the chunks of an array are stored in another form than before."""
    return old is not None and new is not None and old.tree.collection.form != new.tree.collection.form


def _forget_shown(file: WritableFile) -> None:
    """Show a chunk as its array's new shape says. Bytes that a client has written and not closed are kept."""
    file.set_status(size=-1)
    if not file.dirty:
        file.drop_buffer()
