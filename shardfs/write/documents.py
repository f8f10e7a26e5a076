"""Metadata documents that programs write and remove on a mount, and the documents of the source that they become.

The words of this module:

- A `Document` is named as a program sees it, in the mount's layout.
- Its `sources` are the documents of the source from which the mount makes it, by path below the document's directory.
  Natively, that is the document itself, and the documents that its format needs to change it.
- A change in the source is *unseen* if no program on the mount has read it. A program must not overwrite it.
- A *copy* is a document that repeats others, such as consolidated metadata.

`Documents.write` works in these steps:

1. `document_at` or `new_document` finds out which document the name stands for. 2. An `_Edit` reads the sources,
refuses the document if it would undo an unseen change, and makes the new sources of it. 3. Each source is replaced. If
another program has changed it since step 2, step 2 is repeated for it (`_Edit.content`). 4. `seen` gets what the mount
shows from now on, and the copies in the documents of groups above are updated.

The caller (`Descriptions`) then updates the names in the directories that have another description.
"""

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
from shardfs.write.files import join, put_bounded, upwards
from shardfs.write.name_kind import Document, ExpectedDatasets, document_at, is_document
from shardfs.write.seen_documents import Seen, same_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree

log = logging.getLogger(__name__)

NO_MEMBERS = b"{}"
"""A document without members."""


MAX_FORMS = 1_024
"""Maximum number of directories with remembered forms of a layout's documents. Clients write the documents of an array
soon after each other."""


class UnseenChangeError(OSError):
    """ESTALE: another program has changed a document in the source since a program has read it here."""


class Written(NamedTuple):
    """What writing a document has changed.

    Args:
        shown: the document's bytes as the mount shows them now; None if the tree generates them.
        changed: paths of the directories that may have another description.
    """

    shown: bytes | None
    changed: set[str]


class Documents:
    """Writes and removes documents, and compares them with what programs know.

    Thread-safe, as long as no two threads write to the same directory.

    Args:
        expected: datasets that new documents may describe.
        wins: a written document replaces a version that no program here has read (`conflict=ours`).

    Attributes:
        seen: the versions that programs have read or written here.
    """

    def __init__(self, source_tree: Tree, writer: Writer, expected: ExpectedDatasets, *, wins: bool = False) -> None:
        self._source_tree = source_tree
        self._writer = writer
        self.expected = expected
        self.wins = wins
        self.seen = Seen()
        self._compared: dict[str, tuple[int, float]] = {}  # by path: a hash of the document's sources, and when
        self._written_forms: dict[str, Mapping[str, WrittenForm]] = {}  # by directory and name

    # ---- which documents belong together

    def described_by(self, directory: str, name: str) -> str:
        """Return the directory that a document describes; it may differ from the document's own directory."""
        document = document_at(self._source_tree, directory, name)
        return directory if document is None else document.format.described_by(document.directory, document.name)

    def concerned(self, directory: str, name: str) -> set[str]:
        """Return the directories that may have another description when a document has changed in the source."""
        document = document_at(self._source_tree, directory, name)
        directories = {directory, self.described_by(directory, name)}
        return directories if document is None else {*directories, document.directory}

    def generated_with(self, directory: str, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield directories and names of documents that a layout may generate when a document describes a new dataset.

        These are the other documents of the dataset, and those of the groups above.
        """
        names = self._source_tree.datasets.layout_documents
        if names and document_at(self._source_tree, directory, name) is None:
            for at, other in product(upwards(directory), names):
                if (at, other) != (directory, name):
                    yield at, os.fsencode(other)

    def is_in_a_file(self, directory: str) -> bool:
        """Return whether a directory of the mount is one file in the source, whose documents are made from its header.

        Looks at the name and the entry in the store, not into the file. Raise OSError if the store does not tell.
        """
        if not any(f.may_hold(directory.rpartition("/")[2]) for f in formats()):
            return False
        with suppress(*NOT_FOUND):
            return not self._source_tree.store.entry(directory).directory
        return False

    def _is_generated(self, document: Document) -> bool:
        """Return whether the mount makes a document from a file's header, or as a copy: no change is possible."""
        return document.is_copy or self.is_in_a_file(document.directory)

    def _sources(self, document: Document, data: bytes = b"") -> Mapping[str, bytes]:
        """Return the stored sources of a document, and those that `Format.edit` needs for its new bytes `data`.

        Raise OSError if they cannot be read.
        """
        form, directory, name = document
        paths = {posixpath.normpath(join(directory, n)): n for n in form.references(directory, name, data)}
        inside = [path for path in paths if path.split("/")[0] != ".."]
        referenced = self._source_tree.store.documents("", inside, MAX_DOCUMENT_BYTES) if inside else {}
        return {
            **self._source_tree.datasets.source.documents(directory),
            **{paths[path]: raw for path, raw in referenced.items()},
        }

    # ---- what programs know

    def missed(self, directory: str, name: bytes) -> None:
        """Record that a program has found no document of this name: the program may create the document next."""
        if is_document(text := os.fsdecode(name)):
            self.seen.read(join(directory, text), None)

    def shown(self, path: str) -> bytes | None:
        """Return the bytes of a document as the source's tree shows it; None if there is none.

        Raise CorruptShardError for damaged documents, and OSError if the store fails.
        """
        try:
            number = self._source_tree.resolve(path).number
            return bytes(self._source_tree.read(number, 0, MAX_DOCUMENT_BYTES))
        except NOT_FOUND:
            return None

    def is_changed(self, directory: str, name: str, data: bytes | None) -> bool:
        """Return whether another program has given the source a version other than `data`, which the mount shows.

        `data` None: the mount shows no document. Each version is reported once. A remote store is queried at most every
        `index_ttl` seconds; False in between.
        """
        document = document_at(self._source_tree, directory, name)
        now = time.monotonic()
        if document is None:
            return False
        if document.is_copy:
            return bool(self._source_tree.outdated_below(document.directory, self._source_tree.documents_ttl_s))
        last_hash, when = self._compared.get(document.path, (0, -math.inf))
        if not self._source_tree.may_be_old(now - when) or self._is_generated(document):
            return False
        sources = self._sources(document)
        present_hash = hash(frozenset(sources.items()))
        put_bounded(self._compared, document.path, (present_hash, now))
        form, directory, name = document
        if present_hash == last_hash:
            return False
        described = form.described_by(directory, name)
        return not same_document(form.shown(directory, sources, name), data) or self._source_tree.is_reformed(described)

    def require_known(self, directory: str, name: str) -> None:
        """Raise UnseenChangeError if another program has changed a document since it was read here.

        Raise OSError if its sources cannot be read.
        """
        document = document_at(self._source_tree, directory, name)
        if document is not None and not self._is_generated(document):
            self._require_known(document, self._sources(document))

    def _require_known(self, document: Document, sources: Mapping[str, bytes]) -> None:
        why = self.unseen(document, sources, None)
        if why:
            log.warning("%s: the document is not removed: %s", document.path, why)
            raise UnseenChangeError(errno.ESTALE, why, document.path)

    def unseen(self, document: Document, sources: Mapping[str, bytes], data: bytes | None) -> str:
        """Return why `data` may not replace the stored version, or (None) the version not be removed; "" if it may.

        The reason is a change by another program that the writing program may not know. A version that appeared after
        programs here found or left none may be removed unread. `sources` are the document's present sources. Raise
        OSError if the version that the mount shows cannot be read.
        """
        path = document.path
        theirs = document.format.shown(document.directory, sources, document.name)
        latest = self._latest(path, theirs)
        if same_document(data, theirs) or (data is None and latest is None):
            return ""
        if not same_document(latest, theirs):
            verb = "changed" if theirs is not None else "removed or replaced"
            return f"another program has {verb} the document since it was read here; read it again"
        members = [] if data is None else self.seen.taken_back(path, theirs, data)
        if members:
            why = "another program has changed it since this version was read; read it again"
            return f"the document has a former value of {', '.join(members)}, and {why}"
        return ""

    def _latest(self, path: str, theirs: bytes | None) -> bytes | None:
        """Return the version read or written here last, or the shown one; `theirs` if the shown one is damaged."""
        if path in self.seen:
            return self.seen.latest(path)
        try:
            return self.shown(path)
        except CorruptShardError:  # a write may repair it
            return theirs

    # ---- writing

    def write(self, directory: str, name: str, data: bytes, *, decided: bool = False) -> Written | None:
        """Write a document to the store. Return None, and do nothing, if no format has a document of this name there.

        Raise UnseenChangeError if another program has changed the document since a program has read it here, unless
        `decided`: then the document replaces any stored one. Raise OSError (EINVAL), with the reason in the log, if the
        document contradicts the stored data or the mount generates it. In these cases nothing is changed. Raise the
        errors of `Writer.update`: if the document has several sources, some may be replaced then.
        """
        document = document_at(self._source_tree, directory, name) or self.expected.new_document(directory, name)
        if document is None:
            return None
        if self._is_generated(document):
            self._require_alike(document, data)
            return Written(None if document.is_copy else data, set())
        try:
            edit = _Edit(self, document, data, decided=decided)
            for below in edit.edited:
                if edit.edited[below] != edit.sources.get(below):
                    self._writer.update(join(document.directory, below), Rewrite(partial(edit.content, below)))
        except ValueError as e:
            log.warning("%s: the document is refused, and the old one stays: %s", document.path, e)
            raise OSError(errno.EINVAL, str(e), document.path) from e
        text = self._note_written(edit, data)
        in_layout = isinstance(document.format, Translation)
        changed = {document.directory, document.format.described_by(document.directory, document.name)}
        has_members = _has_members(data)
        if not has_members and not (in_layout and edit.edited):
            return Written(text, set())
        if has_members:
            self.expected.drop_deleted(document)
        for below, raw in edit.edited.items():
            changed |= self._update_copies(document.stored_at(below), raw, through_layout=in_layout)
        return Written(None if in_layout else text, changed)

    def _require_alike(self, document: Document, data: bytes) -> None:
        """Raise OSError (EINVAL) if a generated document says something else than the shown one.

        A consolidated document may lack documents, and may come before all documents.
        """
        path = document.path
        try:
            text = self.shown(path)
            if document.is_copy and text is None:
                return
            changes = document.format.differences(text or b"", data)
        except (ValueError, RecursionError, OSError) as e:
            raise OSError(errno.EINVAL, str(e), path) from e
        lacks = (at for at, value in changes.items() if document.is_copy and value is REMOVED and len(at) <= 2)
        if members := sorted(".".join(map(str, at)) for at in changes.keys() - {*lacks}):
            why = f"the mount generates the document, so {', '.join(members)} cannot be changed here"
            log.warning("%s: the document is refused: %s", path, why)
            raise OSError(errno.EINVAL, why, path)

    def _note_written(self, edit: _Edit, data: bytes) -> bytes:
        """Record in `seen` what the mount shows after an edit: `data`, or another form of it. Return this form.

        Also record the other documents of the directory that programs know: the edit may have changed them.
        """
        form, directory, written = edit.document
        before = edit.sources
        after = {**before, **edit.edited}
        text = form.shown(directory, after, written)
        if text is None or same_document(text, data):
            text = data
        if same_document(form.shown(directory, before, written), text):  # perhaps stored by another program
            self.seen.read(edit.document.path, text)
        else:
            self.seen.wrote(edit.document.path, text)
        documents = form.show(after) if isinstance(form, Translation) else form.documents
        for name in documents:
            if name != written and (path := join(directory, name)) in self.seen:
                self.seen.changed(path, form.shown(directory, before, name), form.shown(directory, after, name))
        if isinstance(form, Translation):
            forms = {**self._written_forms.get(directory, {}), written: WrittenForm(data, text)}
            put_bounded(self._written_forms, directory, forms, MAX_FORMS)
        return text

    def edited(self, document: Document, sources: Mapping[str, bytes], data: bytes) -> Mapping[str, bytes]:
        """Return the sources to store for a written document, by path below its directory.

        Raise ValueError, with the reason, if the document `data` contradicts the stored data.
        """
        form, directory, name = document
        if isinstance(form, Translation):
            edited = form.edit(directory, sources, name, data, written=self._written_forms.get(directory, {}))
            return self._with_shards(document, form, edited, sources)
        if name in sources:
            rules = (r for f, r in self.expected.shardings_for(directory, name) if f is form and isinstance(r, Rule))
            return form.edit(directory, sources, name, data, next(rules, None))
        return self.expected.sharded(directory, name, data) or form.edit(directory, sources, name, data)

    def _with_shards(
        self, document: Document, form: Translation, edited: Mapping[str, bytes], sources: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """Return the sources to store for those that a layout's document becomes: new arrays get shards.

        Raise ValueError if no sharding applies to a new array, because a mount cannot show its chunks in the layout.
        """
        with_shards: dict[str, bytes] = {}
        for below, raw in edited.items():
            _, directory, name = document.stored_at(below)
            is_new = below not in sources or not form.has_arrays(directory, {name: sources[below]})
            sharded = self.expected.sharded(directory, name, raw) if is_new else None
            if is_new and sharded is None and form.has_arrays(directory, {name: raw}):
                raise ValueError("in a layout, new arrays must be sharded, and no rule of --create shards this one")
            with_shards |= {below.removesuffix(name) + n: r for n, r in (sharded or {name: raw}).items()}
        return with_shards

    # ---- removing

    def remove(self, directory: str, name: str) -> set[str]:
        """Delete a document. Return the directories with a new description.

        The sharding of its array is remembered. The array is shown until its directory is removed. Raise the errors of
        `require_known` and `Writer.update`; PermissionError if the layout's document cannot be removed by itself.
        """
        document = document_at(self._source_tree, directory, name)
        if document is None or self._is_generated(document):
            with suppress(FileNotFoundError):  # the mount generates it from other documents, so there is none
                self._writer.delete(join(directory, name))
            return set()
        if isinstance(document.format, Translation):
            return self._remove_translated(document, document.format)
        with self._source_tree.datasets.forms.removing(document.path):
            self._writer.update(document.path, Rewrite(partial(self._before_deletion, document)))
        self.seen.wrote(document.path, None)
        return set()

    def _before_deletion(self, document: Document, raw: bytes | None) -> None:
        """Remember the sharding that a document has, whose stored bytes are `raw`. Raise as `require_known`.

        Returns None, the new content: `Rewrite` then removes the document.
        """
        sources = {n: other for n, other in self._sources(document).items() if n != document.name}
        self._require_known(document, sources if raw is None else {**sources, document.name: raw})
        if raw is not None:
            self.expected.record_deleted(document, {document.name: raw})

    def _remove_translated(self, document: Document, form: Translation) -> set[str]:
        """Delete the sources of a layout's document, or remove from them what the document has."""
        sources = self._sources(document)
        self._require_known(document, sources)
        try:
            paths = form.sources_of(document.directory, sources, document.name)
        except ValueError as e:
            log.warning("%s: the document is not removed: %s", document.path, e)
            raise PermissionError(errno.EPERM, str(e), document.path) from e
        if paths is None:
            written = self.write(document.directory, document.name, NO_MEMBERS, decided=True)
            return set() if written is None else written.changed
        self.expected.record_deleted(document, sources)
        for below in paths:
            path = join(document.directory, below)
            with self._source_tree.datasets.forms.removing(path):
                self._writer.update(path, Removal())
            self._update_copies(document.stored_at(below), None, through_layout=True)
        self.seen.wrote(document.path, None)
        return set()

    # ---- copies in the documents of groups

    def _update_copies(self, source: Document, raw: bytes | None, *, through_layout: bool) -> set[str]:
        """Update documents of parent groups that repeat this one, such as consolidated metadata.

        Return the directories of those changed. Such a group may have repeated the document before the array was
        sharded. Programs that know only a layout never write these groups' documents, so that copies of any document
        are updated, added, or (`raw` None) removed for them.
        """
        changed = set()
        for above in islice(upwards(source.directory), 1, None):
            with_copy = partial(_with_copy, source, raw, above, through_layout)
            group = self._source_tree.datasets.source.documents(above).get(source.name)
            with suppress(ValueError):  # the document above is invalid, so there is nothing to update
                if group is not None and with_copy(group) != group:
                    self._writer.update(join(above, source.name), Rewrite(with_copy))
                    changed.add(above)
        return changed


def _with_copy(
    source: Document, raw: bytes | None, above: str, through_layout: bool, group: bytes | None
) -> bytes | None:
    """Return the bytes `group` of a document in the directory `above`, with a new copy of `source`.

    `raw` are the bytes of `source`; None if it was removed. Raise ValueError if `group` is invalid.
    """
    form, directory, name = source
    below = join(directory.removeprefix(above).lstrip("/"), name)
    if group is not None and through_layout:
        return form.with_copy(group, below, raw)
    if group is None or raw is None or below not in form.references(above, name, group):
        return group
    return form.edit(above, {name: group, below: raw}, name, group)[name]


class _Edit:
    """A document being written: the bytes `data` of a program, and what they make of the document's sources.

    The constructor and `content` raise UnseenChangeError (see `Documents.write`), ValueError if the document
    contradicts the stored data, and OSError. `decided`: no version of another program stops the edit.

    Attributes:
        sources: the documents of the source before the edit, by path below the document's directory.
        edited: those to store, by the same paths.
    """

    def __init__(self, documents: Documents, document: Document, data: bytes, *, decided: bool) -> None:
        self._documents = documents
        self.document = document
        self._data = data
        self._decided = decided
        self.sources = documents._sources(document, data)
        self.edited = self._redo()

    def content(self, below: str, present: bytes | None) -> bytes | None:
        """Return what replaces the source at `below`, given its present bytes; None removes it, or there is none.

        The edit is done again if these are not the bytes of `sources`.
        """
        if present != self.sources.get(below):
            unchanged = {n: raw for n, raw in self.sources.items() if n != below}
            self.sources = unchanged if present is None else {**unchanged, below: present}
            self.edited = self._redo()
        return self.edited.get(below, self.sources.get(below))

    def _redo(self) -> Mapping[str, bytes]:
        why = "" if self._decided else self._documents.unseen(self.document, self.sources, self._data)
        if why and not self._documents.wins:
            raise UnseenChangeError(errno.ESTALE, why, self.document.path)
        edited = self._documents.edited(self.document, self.sources, self._data)
        if why:
            log.warning("%s: %s; the document written here replaces it (conflict=ours)", self.document.path, why)
        return edited


def _has_members(data: bytes) -> bool:
    """Return whether the bytes are a document with contents, not a probe of a name by some program."""
    try:
        return bool(parse_written("", data))
    except ValueError:
        return False
