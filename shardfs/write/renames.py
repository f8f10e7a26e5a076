"""Renaming of files and directories on a writable tree."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from shardfs.model.kinds import NameKind
from shardfs.write.encoding import encode
from shardfs.write.entries import Entries
from shardfs.write.files import join, split, stale
from shardfs.write.names import JOURNALED
from shardfs.write.open_files import require_changeable

if TYPE_CHECKING:
    from shardfs.model.attributes import Attributes
    from shardfs.model.blobs import Bytes
    from shardfs.vfs.chunk_dirs import NameMeaning, Target
    from shardfs.write.buffers import Buffer
    from shardfs.write.encoding import Encoded
    from shardfs.write.files import WritableFile
    from shardfs.write.writeback import Predecessor


class Renames(Entries):
    """Also renames files and directories, and moves their bytes between journal, shard, document and store."""

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, noreplace: bool) -> None:
        """Rename a file or directory, atomically for all readers. An existing target is replaced unless `noreplace`.

        A directory is renamed in the store, after the pending versions in it are published. Raise OSError: EEXIST,
        EISDIR, ENOTDIR or ENOTEMPTY as rename(2), EXDEV for directories of chunks (programs then copy), EPERM or EROFS
        for names that cannot be changed, and the errors of saving the file under its new name.
        """
        source, entry = self.existing(parent, name)
        directory = self._open_files.directory_to_change(new_parent)
        old, new = join(source, name), join(directory, new_name)
        replaced = self._overlay.find(directory, new_name)
        if replaced is not None and noreplace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if old == new:
            return
        if entry.directory:
            self._names.before_waiting()
            self._rename_directory(entry, old, new, replaced)
            return
        if replaced is not None and replaced.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
        moved, meaning = self._files.by_number.get(entry.number), self._names.classify_name(directory, new_name)
        if moved is None or not self._moves_quickly(moved, meaning):
            self._names.before_waiting()
        while not self._try_to_rename(entry, replaced, old, new, meaning):
            meaning = self._names.classify_name(directory, new_name)

    def _try_to_rename(
        self, entry: Attributes, replaced: Attributes | None, old: str, new: str, meaning: NameMeaning
    ) -> bool:
        """Rename a file. Return False if the new name had another meaning than that given, or the file has changed."""
        directory, new_name = split(new)
        file = self._open_files.adopt(entry.number, None)
        given_up = None if replaced is None else self._files.by_number.get(replaced.number)
        with self._names.writeback(file, given_up):
            self._prepare(entry, file, meaning)
            describes = meaning.kind is NameKind.DOCUMENT
            if describes:
                self._pending.drain(self._documents.described_by(directory, os.fsdecode(new_name)))
            with self._names.gate.alone() if describes else self._names.gate.shared():
                meaning = self._open_files.classify_to_write(directory, new_name)
                is_held = self._files.by_number.get(entry.number) is file
                if not is_held or describes is not (meaning.kind is NameKind.DOCUMENT):
                    return False
                self._rename_file(file, replaced, old, new, meaning)
                return True

    def _moves_quickly(self, file: WritableFile, meaning: NameMeaning) -> bool:
        """Return whether the rename needs no more than a quick journal record."""
        if file.kind not in JOURNALED or meaning.kind not in JOURNALED:
            return False
        carried = _carried(file, meaning)
        if carried is None and (file.version is None or file.dirty):
            return False
        if not _keeps_bytes(file.target, meaning.target):
            return False
        return self._pending.is_quick(meaning.target, 0 if carried is None else carried.size)

    def _prepare(self, entry: Attributes, file: WritableFile, meaning: NameMeaning) -> None:
        """Save the data of a file before its rename, and make room in the journal.

        The rename itself, which holds locks, then waits for neither.
        """
        carried = _carried(file, meaning) is not None
        if file.kind is NameKind.PLAIN or (file.kind in JOURNALED and not carried):
            self._kinds.commit(file)
        moves = file.version is not None and _keeps_bytes(file.target, meaning.target)
        if meaning.kind in JOURNALED and (carried or not moves):
            self._pending.make_room(entry.size)

    def _rename_file(
        self, file: WritableFile, replaced: Attributes | None, old: str, new: str, meaning: NameMeaning
    ) -> None:
        (source, name), (directory, new_name) = split(old), split(new)
        if replaced is not None:
            meaning = self.classify(directory, new_name, replaced)
        kind, target, old_kind = file.kind, file.target, self._kinds[file.kind]
        old_kind.require_own_name(old, target)
        kinds = {meaning.kind, kind}
        with self._names.renaming() if NameKind.PLAIN in kinds else nullcontext():
            if replaced is not None:
                self._open_files.keep_readable(replaced.number, replaced=True)
            if kinds == {NameKind.PLAIN}:
                self._rename_plain(file, old, new)
            else:
                old_kind.require_movable(old)
                if self._kinds[meaning.kind].is_journaled:
                    self._move_to_journal(file, old, new, meaning)
                else:
                    self._move_to_store(file, old, new, meaning)
                old_kind.leave(old)
                if target is not None:
                    self.clear(source, name)
        if kinds == {NameKind.PLAIN}:
            for above, last in ((source, name), (directory, new_name)):
                if self._descriptions.changes_kinds(last):
                    self._descriptions.describe_anew(above)

    def _rename_plain(self, file: WritableFile, old: str, new: str) -> None:
        self._descriptions.make_stored_directory(new.rpartition("/")[0])
        self._writer.rename(old, new)
        with self._names.lock:
            self._files.rename(file, *split(new))
        for path in (old, new):
            self._source_tree.changed(path)

    def _move_to_journal(self, file: WritableFile, old: str, new: str, meaning: NameMeaning) -> None:
        old_kind, carried = self._kinds[file.kind], _carried(file, meaning)
        if old_kind.is_journaled and carried is None:
            self._kinds.commit(file)
        converts = not _keeps_bytes(file.target, meaning.target)
        encoded = encode(meaning.target, carried or self._contents.load(file)) if converts else None
        is_kept = carried is not None or file.version is not None or converts
        whole = None if is_kept else self._contents.whole(file)
        predecessor = self._pending.predecessor(new, meaning.target)
        with self._names.lock:
            self._move_version(file, old, predecessor, meaning, whole, encoded)
            hides = old in self._pending.backlog.versions or file.kind is NameKind.DOCUMENT  # the first: a tombstone
            self._take_name(file, old, new, meaning, hides=hides)

    def _move_to_store(self, file: WritableFile, old: str, new: str, meaning: NameMeaning) -> None:
        old_kind = self._kinds[file.kind]
        if old_kind.is_journaled:
            self._kinds.commit(file)
        self._write_through(file, new, self._contents.whole(file), meaning)
        predecessor = self._pending.predecessor(old, file.target)
        with self._names.lock:
            hides = old_kind.drop(predecessor)
            file.publish(None)
            self._take_name(file, old, new, meaning, hides=hides)
        if meaning.kind is NameKind.COMPRESSED:
            self._kinds.compressed.retire(file)

    def _take_name(self, file: WritableFile, old: str, new: str, meaning: NameMeaning, *, hides: bool) -> None:
        """Give a file its new name and kind, with the lock held. `hides`: the tree has a file of the old name."""
        self._files.rename(file, *split(new))
        file.become(meaning.kind, meaning.target)
        if meaning.kind is not NameKind.DOCUMENT:
            file.freeze(None)
        if hides:
            self._files.hide(*split(old))
        file.leave_disk()
        self._descriptions.show_superseding(file)

    def _move_version(
        self, file: WritableFile, old: str, predecessor: Predecessor, meaning: NameMeaning, whole: bytes | None,
        encoded: Encoded | None,
    ) -> None:  # fmt: skip
        """Move the pending version of a file to its new name, or add one with all its bytes. The caller holds the lock.

        If the shard of the old name has the chunk, it is deleted there. `encoded` are the stored bytes, if the mount
        shows others.
        """
        old_target, carried, converts = (
            file.target,
            _carried(file, meaning),
            not _keeps_bytes(file.target, meaning.target),
        )
        if converts:
            carried = carried or self._contents.load(file)
            if encoded is not None and not encoded.is_of(meaning.target, carried):
                encoded = encode(meaning.target, carried)  # another thread has written or saved the file meanwhile
        data: Bytes | None = whole if carried is None else carried.content() if encoded is None else encoded.stored
        if data is None and file.version is None and old_target is None:
            raise stale(file.number)  # refused at `close`; the writer got the error
        version = self._pending.rename(
            old, predecessor, old_target, data, file.mtime_ns, file.mode,
            scratch=meaning.kind is NameKind.SCRATCH, is_encoded=encoded is not None,
        )  # fmt: skip
        file.commit(version, dirty=carried is None)
        if encoded is not None:
            self._kinds.journaled.show(file, encoded)
        if converts and not file.writers:
            file.drop_buffer()

    def _write_through(self, file: WritableFile, new: str, data: bytes, meaning: NameMeaning) -> None:
        before = file.kind
        file.become(meaning.kind, file.target)
        try:
            self._kinds[meaning.kind].write(file, new, data)
            self._kinds[meaning.kind].describe(new)
        except BaseException:
            file.become(before, file.target)
            raise
        self._kinds.copy_status(file, new)
        with self._names.lock:
            if not file.writers and not file.superseded:
                file.drop_buffer()

    def _rename_directory(self, entry: Attributes, old: str, new: str, replaced: Attributes | None) -> None:
        """Publish the pending versions in a directory, then rename it in the store."""
        if replaced is not None and not replaced.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), new)
        numbers = [entry.number, *(self._names.source_number(split(path)[0]) for path in (old, new))]
        if any(number is None or self._source_tree.is_virtual(number) for number in numbers):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)
        old_kind, kind = (self._names.classify_name(*split(path)).kind for path in (old, new))
        require_changeable(NameKind.FIXED if self._source_tree.nodes.has_moved(old) else old_kind, old)
        require_changeable(kind, new)
        self._writer.require_own_name(old)
        if NameKind.DIRECTORY in (old_kind, kind) or kind is NameKind.CHUNK:  # the source has shards at that path
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), new)
        if replaced is not None:
            self.remove_directory(replaced.number, new)
        self._pending.flush(old)
        with self._names.gate.alone():  # a concurrent close waits, then uses the new path
            self._pending.flush(old)
            if any(path.startswith(f"{old}/") for path in list(self._pending.backlog.versions)):
                raise OSError(errno.EBUSY, "writes in the directory could not be published; see `shardfs status`", old)
            self._writer.rename(old, new)
            self._names.move_below(old, new)
            for path in (old, new):
                self._documents.seen.discard_below(path)
                self._source_tree.changed(path)
        self._descriptions.describe_anew(new)


def _keeps_bytes(old: Target | None, new: Target | None) -> bool:
    """Return whether the journal's bytes of a file stay the same when it is renamed."""
    return (old is None or old.is_verbatim) and (new is None or new.is_verbatim)


def _carried(file: WritableFile, meaning: NameMeaning) -> Buffer | None:
    """Return the buffer of a dirty temporary file that is renamed to a journaled name; else None.

    Its data go to the journal together with the new name, as one record.
    """
    unsaved = file.unsaved()
    carries = unsaved is not None and file.kind is NameKind.SCRATCH and meaning.kind in JOURNALED
    return unsaved[0] if unsaved is not None and carries else None
