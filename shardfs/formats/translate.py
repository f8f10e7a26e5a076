"""Translates documents that clients write in a layout to documents of the source's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardfs.formats.dataset_comparison import chunks_of, described_arrays, keeps_arrays, keeps_images, meaning
from shardfs.formats.documents import intelligible, members, print_json, require_same
from shardfs.formats.format import Format
from shardfs.formats.json_text import REMOVED, alike, rebased, with_additions
from shardfs.formats.layouts import join
from shardfs.formats.registry import creating_view
from shardfs.formats.zarr_metadata import is_same_element
from shardfs.model.dataset import Surroundings
from shardfs.model.errors import CorruptShardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.formats.create_rules import Rule, Sharding
    from shardfs.formats.format import View
    from shardfs.formats.json_text import Path
    from shardfs.model.arrays import Array
    from shardfs.model.dataset import Dataset

Documents: TypeAlias = Mapping[str, bytes]
"""Documents by their path below the directory of a dataset."""

FIXED = "cannot be changed through a layout; change it in the source, or through a mount without --layout"

COPIES = "metadata"
"""The member of a consolidated document with copies of documents, by path."""

Show: TypeAlias = Callable[[Documents], Documents]
"""Returns the documents that the layout shows for stored documents."""


class WrittenForm(NamedTuple):
    """A document as a client wrote it, and as the layout then showed it.

    A later document may give a meaning to the difference: Zarr v3 has no undefined fill value, so `null` is shown as 0,
    and names of axes, which clients write later, make a 0 the marker of missing values.
    """

    data: bytes
    shown: bytes


NONE_WRITTEN: Mapping[str, WrittenForm] = MappingProxyType({})


# ---- one direction ----


def translated(parser: Format, printer: View, path: str, documents: Documents) -> dict[str, bytes]:
    """The documents of `printer`'s format, without shards, that describe what `parser`'s documents describe.

    `documents` are all documents of `parser`'s format for the dataset in directory `path`. Raise ValueError, with the
    reason, if they describe no dataset, or one that the other format cannot express.
    """
    try:
        dataset = _dataset(parser, path, documents)
        if dataset is None:
            raise ValueError("documents that describe a dataset are missing")
        levels = {
            at: level
            for at in printer.children(dataset, frozenset())
            if (level := _opened(parser, path, at, documents))
        }
        translation = dict(printer.show(path, dataset, Surroundings(levels)).documents)
        for at in {document_place(name, parser.documents)[0] for name in documents} - {""}:
            below = None if printer.renames and at in levels else _opened(parser, path, at, documents)
            if below is not None:
                translated_below = printer.show(join(path, at), below, Surroundings()).documents
                translation = {join(at, name): raw for name, raw in translated_below.items()} | translation
        return translation
    except CorruptShardError as e:
        raise ValueError(f"{e.key}: {e.why}") from e
    except UnsupportedError as e:
        raise ValueError(f"{printer.name} cannot express it: {e}") from e


def _dataset(layout: Format, path: str, documents: Documents) -> Dataset | None:
    """The dataset of the directory itself, with the image that the attributes of its levels describe."""
    dataset = _opened(layout, path, "", documents)
    if dataset is None or dataset.levels is None:
        return dataset
    image = dataset.levels.image(dict(_levels(layout, path, dataset.levels.paths(), documents)))
    return dataset if image is None else replace(dataset, multiscales=(*dataset.multiscales, image))


def _levels(layout: Format, path: str, names: Iterable[str], documents: Documents) -> Iterator[tuple[str, Array]]:
    for name in names:
        dataset = _opened(layout, path, name, documents)
        collections = dataset.all_collections if dataset is not None else ()
        if len(collections) != 1 or collections[0].array is None:
            return
        yield name, collections[0].array


def _opened(layout: Format, path: str, at: str, documents: Documents) -> Dataset | None:
    """The dataset in the directory `at` below `path`; None if there is none."""
    in_directory = {name: documents[join(at, name)] for name in layout.documents if join(at, name) in documents}
    return layout.open(join(path, at), in_directory) if in_directory else None


# ---- both directions ----


@dataclass(frozen=True)
class Translation(Format):
    """The documents of one dataset of the source, as a layout shows them, for clients that write them.

    `sources` are the stored documents, in the source's format. A client sees, and writes, documents of the layout. To
    store what a client wrote, `edit` translates the layout's documents to the source's format twice, without and with
    the written document, and applies the differences to the stored documents. Then `edit` shows the edited documents in
    the layout, and refuses what the client would not get back.

    Paths of documents are relative to the dataset's directory.

    Args:
        layout: the format that parses the layout's documents.
        source: the format of the stored documents; `layout` itself in a directory that has none.
        view: prints documents of the source's format; None if no layout is of this format.
        homes: the directories whose stored documents describe the arrays, by the directories that show these arrays.
        below: directories whose stored documents `show` needs, too.
        show: returns the documents that the layout shows for stored documents.
    """

    layout: Format
    source: Format
    view: View | None
    homes: Mapping[str, str]
    below: Sequence[str]
    show: Show

    @property
    def dataset_formats(self) -> Sequence[str]:
        return self.source.dataset_formats

    @property
    def has_source(self) -> bool:
        """Whether the dataset has documents in the source. A directory above datasets is shown as a group without."""
        return self.source is not self.layout

    def describes(self, name: str) -> bool:
        return self.has_source and name in self.layout.documents

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        return [join(at, document) for at in self.below for document in self.source.documents]

    def described_by(self, path: str, name: str) -> str:
        return join(path, self._split(name)[0])

    def shown(self, path: str, sources: Documents, name: str) -> bytes | None:
        try:
            return self.show(sources).get(name)
        except (CorruptShardError, UnsupportedError):
            return None

    def edit(
        self,
        path: str,
        sources: Documents,
        name: str,
        new: bytes,
        rule: Rule | None = None,
        written: Mapping[str, WrittenForm] = NONE_WRITTEN,
    ) -> dict[str, bytes]:
        """The documents of the source to store when a client replaces the shown document `name` by `new`.

        Only what the client changed is changed in the source, and all other bytes of the source's documents stay.
        An array may get another shape, names of axes and attributes, and an image further levels; a new dataset is
        free. `written` has other documents, by name, that clients wrote in another form than the shown one. Raise
        ValueError, with the members of `name` and the reason, for other changes, and if the source cannot express one.
        """
        shown_before = self._shown_all(sources, name)
        if not (differing := _changed(shown_before.get(name), new)):
            return {}
        written_before = {
            n: form.data for n, form in written.items() if n != name and shown_before.get(n) == form.shown
        }
        before = {**shown_before, **written_before}
        if name in before and (fixed := self._fixed_members(path, name, before, new, differing)):
            raise ValueError(f"{name}: {', '.join(fixed)}: {FIXED}")
        try:
            edits = self._source_edits(path, sources, before, {**before, name: new})
            shown_after = self.show({**sources, **edits})
        except (UnsupportedError, ValueError) as e:
            causes = ", ".join(differing) if name in before else "the document"
            raise ValueError(f"{name}: {causes}: {e}") from e
        self._require_shown(path, name, {**shown_before, name: new}, shown_before, shown_after)
        return edits

    def _fixed_members(
        self, path: str, name: str, before: Documents, new: bytes, differing: Sequence[str]
    ) -> Sequence[str]:
        """The members that differ and cannot be changed; none if `new` keeps the arrays and images of `before`."""
        if self._keeps(path, name, before, new, differing):
            return ()
        old, doc = intelligible("", before[name]), intelligible("", new)
        if old is None or doc is None:
            return differing
        alone = [m for m in differing if not self._keeps(path, name, before, _with(old, m, doc), [m])]
        return alone or differing

    def _keeps(self, path: str, name: str, before: Documents, new: bytes, differing: Sequence[str]) -> bool:
        """Whether the document `new`, which differs in these members, keeps the arrays and images of `before`."""
        at, _ = self._split(name)
        old = _opened(self.layout, path, at, before)
        if old is None:
            return True
        try:
            dataset = _opened(self.layout, path, at, {**before, name: new})
        except CorruptShardError:
            return False
        return dataset is not None and keeps_arrays(old, dataset, differing) and keeps_images(old, dataset)

    def sources_of(self, path: str, sources: Documents, name: str) -> list[str] | None:
        """The stored documents to delete when a client deletes the shown document `name`.

        None if the dataset still exists without the document; the client then removes all its members. Raise
        ValueError, with the reason, if these stored documents describe other datasets, too, or cannot be changed.
        """
        shown_before = self._shown_all(sources, name)
        if name not in shown_before:
            return []
        if self.has_source:
            self._writable_view()
        at, _ = self._split(name)
        with suppress(CorruptShardError):
            if _opened(self.layout, path, at, {n: raw for n, raw in shown_before.items() if n != name}) is not None:
                return None
        home = self._home(at)
        directories = {self._split(n)[0] for n in shown_before}
        is_shared = any(self._home(directory) == home for directory in directories - {at})
        if is_shared or any(self._home(directory) != home for directory in self.homes.keys() - directories):
            raise ValueError("the source's document describes other datasets, too; delete the dataset in the source")
        return [source for n in self.source.documents if (source := join(home, n)) in sources]

    def sharding(self, sources: Documents) -> Sharding | None:
        return self.source.sharding({n: raw for n, raw in sources.items() if n in self.source.documents})

    def has_arrays(self, path: str, documents: Documents) -> bool:
        """Whether documents of the source's format describe an array."""
        with suppress(CorruptShardError):
            dataset = self.source.open(path, documents)
            return dataset is not None and bool(dataset.all_collections)
        return False

    def is_copy(self, name: str) -> bool:
        """Whether the layout generates this document from documents below."""
        return self._split(name)[1] not in self.layout.documents

    def differences(self, old: bytes, new: bytes) -> Mapping[Path, Any]:
        """See `Format.differences`. A copied document may have another form, and may be that of a dataset to come."""
        changes = self.layout.differences(old, new)
        before, after = (json.loads(raw).get(COPIES, {}) for raw in (old, new))
        equivalent = {name for name in after if name not in before or self._has_copies(before, after, name)}
        return {at: value for at, value in changes.items() if len(at) < 2 or at[0] != COPIES or at[1] not in equivalent}

    def _has_copies(self, before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
        """Whether the copies in both consolidated documents describe the dataset of the document `name` alike."""
        versions = ({n: print_json(document) for n, document in copies.items()} for copies in (before, after))
        a, b = (self._meaning("", self._split(name)[0], documents) for documents in versions)
        return a is not None and a == b

    def stored_name(self, below: str) -> tuple[str, str]:
        """The directory of a stored document, and its name there."""
        return document_place(below, self.source.documents)

    def _shown_all(self, sources: Documents, name: str) -> Documents:
        """What `show` returns. Raise ValueError, with the reason, if the stored documents cannot be shown."""
        try:
            return self.show(sources)
        except (CorruptShardError, UnsupportedError) as e:
            raise ValueError(f"{name}: {e}") from e

    def _source_edits(self, path: str, sources: Documents, before: Documents, after: Documents) -> dict[str, bytes]:
        """The documents to store when the layout's documents `before` become `after`."""
        view = self._writable_view()
        old = translated(self.layout, view, path, before)
        edits: dict[str, bytes] = {}
        for name, raw in translated(self.layout, view, path, after).items():
            old_raw = old.get(name, b"{}")
            if raw != old_raw:
                at, document = self.stored_name(name)
                home = self._home(at) if name in old or at in self.homes else at
                edits |= self._rebased(path, home, document, {**sources, **edits}, old_raw, raw)
        return edits

    def _rebased(
        self, path: str, home: str, document: str, sources: Documents, old: bytes, new: bytes
    ) -> dict[str, bytes]:
        """The stored documents in directory `home`, with the changes between two translations of one of them."""
        at_home = {n: raw for n in self.source.documents if (raw := sources.get(join(home, n))) is not None}
        unsharded = self.source.shown(join(path, home), at_home, document)
        wanted = new if unsharded is None else rebased(old, new, unsharded)
        edited = self.source.edit(join(path, home), at_home, document, wanted)
        return {join(home, n): _in_text_of(at_home.get(n), raw) for n, raw in edited.items()}

    def _writable_view(self) -> View:
        """The view of the source's format. Raise ValueError if there is none."""
        if self.view is None:
            form = self.source.dataset_formats[0] if self.has_source else "without a document for this directory"
            raise ValueError(f"the source is {form}, and layouts cannot change that; change the source")
        return self.view

    def _require_shown(
        self, path: str, name: str, written: Documents, shown_before: Documents, shown_after: Documents
    ) -> None:
        """Raise ValueError, with the members, unless the layout shows the written document `name` in `shown_after`.

        Members may have another form that describes the same dataset, and members may be added. The mount must also
        show documents that were written before that of a new array, which may contradict it.
        """
        if lost := self._lost_members(path, name, written, shown_before, shown_after):
            form = self.source.dataset_formats[0]
            raise ValueError(f"{name}: {', '.join(lost)}: the source, which is {form}, cannot express this value")
        at, _ = self._split(name)
        meaning_after = self._meaning(path, at, shown_after)
        for array in described_arrays(_opened(self.layout, path, at, shown_after)):
            for other in (join(at, document) for document in self.layout.documents):
                a, b = members(written.get(other)), members(shown_after.get(other))
                for m in a.keys() & b.keys() & array.attributes.keys():
                    is_equal = alike(a[m], b[m]) or is_same_element(a[m], b[m], array.data_type)
                    if (
                        not is_equal
                        and self._meaning(path, at, {**shown_after, other: _with(b, m, {})}) == meaning_after
                    ):
                        raise ValueError(f"{name}: {m}: is {a[m]!r:.80} in {other}, but other members say {b[m]!r:.80}")

    def _lost_members(
        self, path: str, name: str, written: Documents, shown_before: Documents, shown_after: Documents
    ) -> list[str]:
        """The members of the written document `name` that the layout would not show, or with another meaning."""
        old, new = members(shown_before.get(name)), members(shown_after.get(name))
        complete = with_additions(members(written[name]), old, new)
        missing = [m for m in complete if m not in new and complete[m] not in (None, [], {})]
        if missing:
            return missing
        at, _ = self._split(name)
        meaning_written = self._meaning(path, at, {**shown_after, name: print_json(complete)})
        if meaning_written == self._meaning(path, at, shown_after):
            return []
        return [m for m in {**complete, **new} if not alike(complete.get(m, REMOVED), new.get(m, REMOVED))]

    def _home(self, at: str) -> str:
        """The directory with the stored document of what the layout shows in directory `at`."""
        return self.homes.get(at, at if at in self.below else "")

    def _split(self, name: str) -> tuple[str, str]:
        return document_place(name, self.layout.documents)

    def _meaning(self, path: str, at: str, documents: Documents) -> Any:
        """The `meaning` of the documents of one directory; None if they describe no dataset."""
        try:
            dataset = _opened(self.layout, path, at, documents)
        except CorruptShardError:
            return None
        return None if dataset is None else meaning(dataset)


@dataclass(frozen=True)
class Creation(Translation):
    """The documents of a new dataset that a client creates in a layout, in a directory without a dataset.

    `edit` returns documents of the source's format without shards.

    Args:
        group: the layout's documents of an empty group. Clients may write attributes before the document that they
            belong to.
        deleted: the source's documents of an array that was deleted here. Its shards are still stored.
    """

    group: Documents
    deleted: Documents

    def _source_edits(self, path: str, sources: Documents, before: Documents, after: Documents) -> dict[str, bytes]:
        if self.view is None:
            raise ValueError("no layout writes the format of new datasets here; give --create, such as --create zarr3")
        translation = translated(self.layout, self.view, path, {**self.group, **after})
        with suppress(ValueError, CorruptShardError, UnsupportedError):  # a different array
            shown_deleted = self.show(self.deleted)
            self._require_chunks(path, shown_deleted, {**self.group, **after})
            base = translated(self.layout, self.view, path, shown_deleted)
            translation |= self._as_deleted(path, base, translation)
        if translation:
            return translation
        empty_group = {self.source.documents[0]: b"{}\n"}  # without attributes
        group = self.source.open(path, empty_group)
        if group is None or group.attributes is None:
            raise ValueError(f"the format {self.view.name} has no document for it")
        return empty_group

    def _require_chunks(self, path: str, before: Documents, after: Documents) -> None:
        """Raise ValueError if the arrays in both have other chunks."""
        for at in {self._split(name)[0] for name in before}:
            old, new = (_opened(self.layout, path, at, documents) for documents in (before, after))
            arrays = {c.path: c for c in new.all_collections} if new is not None else {}
            for c in old.all_collections if old is not None else ():
                if c.path in arrays:
                    require_same(chunks_of(arrays[c.path]), chunks_of(c), "the form of the chunks")

    def _as_deleted(self, path: str, base: Documents, translation: Documents) -> Iterator[tuple[str, bytes]]:
        """The deleted array's documents with the changes from `base` to `translation`, which describe equal chunks.

        So the array gets its own codecs again, which the layout may not show.
        """
        for name, raw in translation.items():
            unsharded = self.source.shown(path, self.deleted, name) if name in self.deleted else None
            if unsharded is not None and name in base and self.has_arrays(path, {name: raw}):
                yield name, rebased(base[name], raw, unsharded)


def creation(
    layout: Format, layout_view: View, source: Format | None, path: str, deleted: Documents = MappingProxyType({})
) -> Creation:
    """The documents of a new dataset in directory `path`. `source` is None if its format is unknown."""

    def show(sources: Documents) -> Documents:
        if source is None or not any(name in source.documents for name in sources):
            return {}
        return translated(source, layout_view, path, sources)

    view = None if source is None else creating_view(source.dataset_formats[0])
    group = layout_view.show(path, None, Surroundings()).documents
    return Creation(layout, source or layout, view, {}, (), show, group, deleted)


def document_place(name: str, documents: Sequence[str]) -> tuple[str, str]:
    """The directory of a document, and its name there, which may contain slashes."""
    document = next((d for d in documents if name == d or name.endswith(f"/{d}")), name.rpartition("/")[2])
    return name.removesuffix(document).rstrip("/"), document


def _in_text_of(old: bytes | None, new: bytes) -> bytes:
    """The document `new`, with the text of `old` where both have equal values."""
    with suppress(ValueError):  # bcolz also has YAML
        return new if old is None else rebased(old, new, old)
    return new


def _changed(old: bytes | None, new: bytes | None) -> list[str]:
    """The members that differ."""
    a, b = members(old), members(new)
    return [name for name in {**a, **b} if not alike(a.get(name, REMOVED), b.get(name, REMOVED))]


def _with(old: Mapping[str, Any], member: str, written: Mapping[str, Any]) -> bytes:
    """The shown document with one member as in the written one."""
    document = {name: value for name, value in old.items() if name != member}
    return print_json(document if member not in written else {**document, member: written[member]})
