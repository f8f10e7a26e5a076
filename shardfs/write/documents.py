"""Metadata documents written on a mount: translating them for the store, and sharding new arrays."""

from __future__ import annotations

import errno
import logging
import math
import os
import posixpath
import time
from contextlib import suppress
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

from shardfs.formats.create_rules import Rule
from shardfs.formats.documents import MAX_DOCUMENT_BYTES, parse_written
from shardfs.formats.json_text import REMOVED
from shardfs.formats.registry import formats
from shardfs.formats.translate import Translation, WrittenForm
from shardfs.model.changes import Removal, Rewrite
from shardfs.model.errors import NOT_FOUND, CorruptShardError
from shardfs.write.files import join, keep, upwards
from shardfs.write.name_kind import MAX_ABOVE, Document, ExpectedDatasets, document_at, is_document
from shardfs.write.seen import Seen, same_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.formats.format import Format
    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree

log = logging.getLogger(__name__)

NOTHING = b"{}"
"""A document without members."""


MAX_FORMS = 1_024
"""Maximum number of directories with remembered forms of a layout's documents. Clients write the documents of an array
soon after each other."""


class UnseenChangeError(OSError):
    """ESTALE: another program has changed a document in the source since a program has read it here."""


class Written(NamedTuple):
    """Result of writing a document.

    `shown` is the document as the mount now shows it, None if the tree generates it; `changed` are the directories with
    a new description.
    """

    shown: bytes | None
    changed: set[str]


class Documents:
    """Writes and removes documents, and finds the kinds of names.

    Thread-safe, as long as no two threads write to the same directory.

    Args:
        expected: datasets that new documents may describe.
        wins: a written document replaces a version that no program here has read (`conflict=ours`).
    """

    def __init__(self, base: Tree, writer: Writer, expected: ExpectedDatasets, *, wins: bool = False) -> None:
        self._base, self._writer, self.expected, self.wins = base, writer, expected, wins
        self._compared: dict[str, tuple[int, float]] = {}  # by path: a hash of the stored documents, and when
        self._forms: dict[str, Mapping[str, WrittenForm]] = {}  # by directory and name
        self.seen = Seen()

    def missed(self, directory: str, name: bytes) -> None:
        """Record that a program has found no document of this name: the program may create the document next."""
        if is_document(text := os.fsdecode(name)):
            self.seen.read(join(directory, text), None)

    def described_by(self, directory: str, name: str) -> str:
        """Return the directory that a document describes; it may differ from the document's own directory."""
        document = document_at(self._base, directory, name)
        return directory if document is None else document.form.described_by(document.directory, document.name)

    def concerned(self, directory: str, name: str) -> set[str]:
        """Return the directories that may have another description when a document has changed in the source."""
        document = document_at(self._base, directory, name)
        found = {directory, self.described_by(directory, name)}
        return found if document is None else {*found, document.directory}

    def stored(self, document: Document, data: bytes = b"") -> Mapping[str, bytes]:
        """Return the documents of the source that `Format.edit` needs, by name."""
        form, directory, name = document
        others = {posixpath.normpath(join(directory, n)): n for n in form.references(directory, name, data)}
        wanted = [path for path in others if path.split("/")[0] != ".."]
        found = self._base.store.documents("", wanted, MAX_DOCUMENT_BYTES) if wanted else {}
        return {**self._base.stored_documents(directory), **{others[path]: raw for path, raw in found.items()}}

    def write(self, directory: str, name: str, data: bytes, *, decided: bool = False) -> Written | None:
        """Write a document to the store. Return None if the format is unknown.

        Raise UnseenChangeError if another program has changed the document since a program has read it here, unless
        `decided`: then the document replaces any stored one. Raise OSError (EINVAL), with the reason in the log, if the
        document contradicts the stored data. In both cases nothing is changed.
        """
        document = document_at(self._base, directory, name) or self.expected.new_document(directory, name)
        if document is None:
            return None
        if self._is_generated(document):
            self._require_alike(document, data)
            return Written(None if document.is_copy else data, set())
        try:
            edit = _Edit(self, document, data, decided=decided)
            self._put(edit)
        except ValueError as e:
            log.warning("%s: the document is refused, and the old one stays: %s", document.path, e)
            raise OSError(errno.EINVAL, str(e), document.path) from e
        form, directory, name = document
        shown = self._note_written(edit, data)
        in_layout, changed = isinstance(form, Translation), {directory, form.described_by(directory, name)}
        if not _has_members(data) and not (in_layout and edit.made):
            return Written(shown, set())
        if _has_members(data):
            self.expected.forget(document)
        for below, raw in edit.made.items():
            copied = document.stored_at(below)
            changed |= update_repetitions(self._base, self._writer, copied, raw, through_layout=in_layout)
        return Written(None if in_layout else shown, changed)

    def generated_with(self, directory: str, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield directories and names of documents that a layout may generate when a document describes a new dataset.

        These are the other documents of the dataset, and those of the groups above.
        """
        names = self._base.datasets.layout_documents
        if names and document_at(self._base, directory, name) is None:
            for at, other in product(upwards(directory), names):
                if (at, other) != (directory, name):
                    yield at, os.fsencode(other)

    def _note_written(self, edit: _Edit, data: bytes) -> bytes:
        """Record what the mount shows after an edit: `data`, or another form of it. Return this form.

        Also record the other documents of the directory that programs know: the edit may have changed them.
        """
        form, directory, written = edit.document
        before, after = edit.stored, {**edit.stored, **edit.made}
        shown = form.shown(directory, after, written)
        if shown is None or same_document(shown, data):
            shown = data
        if same_document(form.shown(directory, before, written), shown):  # perhaps stored by another program
            self.seen.read(edit.document.path, shown)
        else:
            self.seen.wrote(edit.document.path, shown)
        documents = form.show(after) if isinstance(form, Translation) else form.documents
        for name in documents:
            if name != written and (path := join(directory, name)) in self.seen:
                self.seen.changed(path, form.shown(directory, before, name), form.shown(directory, after, name))
        if isinstance(form, Translation):
            forms = {**self._forms.get(directory, {}), written: WrittenForm(data, shown)}
            keep(self._forms, directory, forms, MAX_FORMS)
        return shown

    def _put(self, edit: _Edit) -> None:
        """Replace the documents of the edit in the store. If a document has changed meanwhile, redo the edit on it."""
        for below in edit.made:
            if edit.made[below] != edit.stored.get(below):
                self._writer.update(join(edit.document.directory, below), Rewrite(partial(edit.content, below)))

    def is_changed(self, directory: str, name: str, shown: bytes | None) -> bool:
        """Return whether another program has given the source a version that the mount does not show.

        Each version is reported once. A remote store is queried at most every `index_ttl` seconds.
        """
        document, now = document_at(self._base, directory, name), time.monotonic()
        if document is None:
            return False
        known, when = self._compared.get(document.path, (0, -math.inf))
        if not self._base.may_be_old(now - when) or self._is_generated(document):
            return False
        stored = self.stored(document)
        found = hash(frozenset(stored.items()))
        keep(self._compared, document.path, (found, now))
        form, directory, name = document
        if found == known:
            return False
        described = form.described_by(directory, name)
        return not same_document(form.shown(directory, stored, name), shown) or self._base.is_reformed(described)

    def shown(self, path: str) -> bytes | None:
        """Return a document as the unmodified tree shows it; None if there is none."""
        try:
            number = self._base.resolve(path).number
            return bytes(self._base.read(number, 0, MAX_DOCUMENT_BYTES))
        except NOT_FOUND:
            return None

    def unseen(self, document: Document, stored: Mapping[str, bytes], data: bytes | None) -> str:
        """Return why `data` may not replace the stored version, or (None) the version not be removed; "" if it may.

        The reason is a change by another program that the writing program may not know.
        """
        path, theirs = document.path, document.form.shown(document.directory, stored, document.name)
        known = self._known(path, theirs)
        if same_document(data, theirs) or (data is None and known is None):
            return ""
        if not same_document(known, theirs):
            verb = "changed" if theirs is not None else "removed or replaced"
            return f"another program has {verb} the document since it was read here; read it again"
        members = [] if data is None else self.seen.taken_back(path, theirs, data)
        if members:
            why = "another program has changed it since this version was read; read it again"
            return f"the document has a former value of {', '.join(members)}, and {why}"
        return ""

    def _known(self, path: str, theirs: bytes | None) -> bytes | None:
        """Return the version read or written here last, or the shown one; `theirs` if the shown one is damaged."""
        if path in self.seen:
            return self.seen.latest(path)
        try:
            return self.shown(path)
        except CorruptShardError:  # a write may repair it
            return theirs

    def _is_generated(self, document: Document) -> bool:
        """Return whether no stored document has the contents: the dataset is one file, or the document a copy."""
        return document.is_copy or self.is_in_a_file(document.directory)

    def is_in_a_file(self, directory: str) -> bool:
        """Return whether the directory shows a dataset that is one file, whose documents are made from its header."""
        if not any(f.may_hold(directory.rpartition("/")[2]) for f in formats()):
            return False
        with suppress(*NOT_FOUND):
            return not self._base.store.entry(directory).directory
        return False

    def _require_alike(self, document: Document, data: bytes) -> None:
        """Raise OSError (EINVAL) if a document says something else than the shown one.

        A consolidated document may lack documents, and may come before all documents.
        """
        path = document.path
        try:
            shown = self.shown(path)
            if document.is_copy and shown is None:
                return
            changes = document.form.differences(shown or b"", data)
        except (ValueError, RecursionError, OSError) as e:
            raise OSError(errno.EINVAL, str(e), path) from e
        lacks = (at for at, value in changes.items() if document.is_copy and value is REMOVED and len(at) <= 2)
        if members := sorted(".".join(map(str, at)) for at in changes.keys() - {*lacks}):
            why = f"the mount generates the document, so {', '.join(members)} cannot be changed here"
            log.warning("%s: the document is refused: %s", path, why)
            raise OSError(errno.EINVAL, why, path)

    def made(self, document: Document, stored: Mapping[str, bytes], data: bytes) -> Mapping[str, bytes]:
        """Return the documents to store for a written one, by path below the directory. Raise ValueError."""
        form, directory, name = document
        if isinstance(form, Translation):
            edited = form.edit(directory, stored, name, data, written=self._forms.get(directory, {}))
            return self._with_shards(document, form, edited, stored)
        if name in stored:
            rules = (r for f, r in self.expected.candidates(directory, name) if f is form and isinstance(r, Rule))
            return form.edit(directory, stored, name, data, next(rules, None))
        return self._sharded(directory, name, data) or form.edit(directory, stored, name, data)

    def _with_shards(
        self, document: Document, form: Translation, edited: Mapping[str, bytes], stored: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """Return the documents to store for those that a layout's document becomes: new arrays get shards.

        Raise ValueError if no sharding applies to a new array, because a mount cannot show its chunks in the layout.
        """
        made: dict[str, bytes] = {}
        for below, raw in edited.items():
            _, directory, name = document.stored_at(below)
            is_new = below not in stored or not form.has_arrays(directory, {name: stored[below]})
            sharded = self._sharded(directory, name, raw) if is_new else None
            if is_new and sharded is None and form.has_arrays(directory, {name: raw}):
                raise ValueError("in a layout, new arrays must be sharded, and no rule of --create shards this one")
            made |= {below.removesuffix(name) + n: r for n, r in (sharded or {name: raw}).items()}
        return made

    def _sharded(self, directory: str, name: str, data: bytes) -> Mapping[str, bytes] | None:
        """Return the documents that a rule or a remembered sharding makes of a new one; None if no sharding applies."""
        refused: list[ValueError] = []
        for form, sharding in self.expected.candidates(directory, name):
            try:
                made = form.shard(directory, name, data, sharding)
            except ValueError as e:
                refused.append(e)
                continue
            if made is None:
                continue
            if isinstance(sharding, Rule) and self._has_chunks(form, form.described_by(directory, name)):
                log.warning(
                    "%s: the new array is not sharded, because chunks are already stored in its directory",
                    join(directory, name),
                )
                return None
            return made
        for why in refused:
            log.warning("%s: the new array is not sharded: %s", join(directory, name), why)
        return None

    def _has_chunks(self, form: Format, directory: str, below: str = "") -> bool:
        """Return whether the store has files in the directory that would be mistaken for shards."""
        for entry in self._base.store.scan(join(directory, below)):
            name = join(below, entry.name)
            if form.chunk_like(name) if not entry.directory else self._may_hold_chunks(form, directory, name):
                return True
        return False

    def _may_hold_chunks(self, form: Format, directory: str, below: str) -> bool:
        deep = below.count("/") >= MAX_ABOVE
        return not deep and form.chunk_like(f"{below}/0") and self._has_chunks(form, directory, below)

    def require_known(self, directory: str, name: str) -> None:
        """Raise UnseenChangeError if another program has changed a document since it was read here."""
        document = document_at(self._base, directory, name)
        if document is not None and not self._is_generated(document):
            self._require_known(document, self.stored(document))

    def _require_known(self, document: Document, stored: Mapping[str, bytes]) -> None:
        why = self.unseen(document, stored, None)
        if why:
            log.warning("%s: the document is not removed: %s", document.path, why)
            raise UnseenChangeError(errno.ESTALE, why, document.path)

    def remove(self, directory: str, name: str) -> set[str]:
        """Delete a document. Return the directories with a new description. Raise as `require_known`.

        Remember the sharding of its array if `remembers` is set. The array is shown until its directory is removed.
        """
        document = document_at(self._base, directory, name)
        if document is None or self._is_generated(document):
            with suppress(FileNotFoundError):  # the mount generates it from other documents, so there is none
                self._writer.delete(join(directory, name))
            return set()
        if isinstance(document.form, Translation):
            return self._remove_shown(document, document.form)

        with self._base.datasets.forms.removing(document.path):
            self._writer.update(document.path, Rewrite(partial(self._before_deletion, document)))
        self.seen.wrote(document.path, None)
        return set()

    def _before_deletion(self, document: Document, raw: bytes | None) -> None:
        """Remember the sharding that a document has, whose stored bytes are `raw`. Raise as `require_known`."""
        stored = {n: other for n, other in self.stored(document).items() if n != document.name}
        stored |= {} if raw is None else {document.name: raw}
        self._require_known(document, stored)
        if raw is not None:
            self.expected.remember(document, {document.name: raw})

    def _remove_shown(self, document: Document, form: Translation) -> set[str]:
        """Delete the stored documents of what a layout shows, or remove from them what the document has."""
        stored = self.stored(document)
        self._require_known(document, stored)
        try:
            gone = form.sources_of(document.directory, stored, document.name)
        except ValueError as e:
            log.warning("%s: the document is not removed: %s", document.path, e)
            raise PermissionError(errno.EPERM, str(e), document.path) from e
        if gone is None:
            written = self.write(document.directory, document.name, NOTHING, decided=True)
            return set() if written is None else written.changed
        self.expected.remember(document, stored)
        for below in gone:
            path = join(document.directory, below)
            with self._base.datasets.forms.removing(path):
                self._writer.update(path, Removal())
            update_repetitions(self._base, self._writer, document.stored_at(below), None, through_layout=True)
        self.seen.wrote(document.path, None)
        return set()

    def removed(self, path: str) -> None:
        """Forget the documents read in a removed directory.

        The sharding of a deleted array is kept, because tools delete an array in order to write it anew.
        """
        self._base.store.reopen(path)
        self.seen.forget(path)


class _Edit:
    """A document being written.

    Attributes:
        stored: the documents in the source that the edit needs, by path below the directory.
        made: the documents to store, by path below the directory.

    `content` redoes the edit if the source has changed.
    """

    def __init__(self, documents: Documents, document: Document, data: bytes, *, decided: bool) -> None:
        """Make the edit. Raise as `Documents.write`."""
        self._documents, self.document, self._data, self._decided = documents, document, data, decided
        self.stored = documents.stored(document, data)
        self._make()

    def content(self, below: str, stored: bytes | None) -> bytes | None:
        """Return what replaces the stored document at `below`. If that has changed, redo the edit.

        Raise as `Documents.write`.
        """
        if stored != self.stored.get(below):
            self.stored = {n: raw for n, raw in self.stored.items() if n != below}
            self.stored |= {} if stored is None else {below: stored}
            self._make()
        return self.made.get(below, self.stored.get(below))

    def _make(self) -> None:
        why = "" if self._decided else self._documents.unseen(self.document, self.stored, self._data)
        if why and not self._documents.wins:
            raise UnseenChangeError(errno.ESTALE, why, self.document.path)
        self.made = self._documents.made(self.document, self.stored, self._data)
        if why:
            log.warning("%s: %s; the document written here replaces it (conflict=ours)", self.document.path, why)


def _has_members(data: bytes) -> bool:
    """Return whether the bytes are a document with contents, not a probe of a name by some program."""
    try:
        return bool(parse_written("", data))
    except ValueError:
        return False


def update_repetitions(
    base: Tree, writer: Writer, document: Document, made: bytes | None, *, through_layout: bool
) -> set[str]:
    """Update documents of parent groups that repeat this document, such as consolidated metadata.

    Return the directories of those changed. Such a group may have repeated the document before the array was sharded.
    Programs that know only a layout never write these groups' documents, so that copies of any document are updated,
    added, or (None) removed for them.
    """
    changed = set()
    for above in islice(upwards(document.directory), 1, None):
        repeated = partial(_repeated, document, made, above, through_layout)
        raw = base.stored_documents(above).get(document.name)
        with suppress(ValueError):  # the document above is invalid, so there is nothing to update
            if raw is not None and repeated(raw) != raw:
                writer.update(join(above, document.name), Rewrite(repeated))
                changed.add(above)
    return changed


def _repeated(
    document: Document, made: bytes | None, above: str, through_layout: bool, raw: bytes | None
) -> bytes | None:
    """Return the document of the group `above`, whose bytes are `raw`, with the new copy of another document."""
    form, directory, name = document
    below = join(directory.removeprefix(above).lstrip("/"), name)
    if raw is not None and through_layout:
        return form.with_copy(raw, below, made)
    if raw is None or made is None or below not in form.references(above, name, raw):
        return raw
    return form.edit(above, {name: raw, below: made}, name, raw)[name]
