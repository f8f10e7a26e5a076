"""Translates documents that clients write in a layout to documents of the source's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardfs.formats import ome
from shardfs.formats.documents import intelligible, members, print_json, print_strict, require_same
from shardfs.formats.format import Format
from shardfs.formats.json_text import REMOVED, alike, rebased, with_additions
from shardfs.formats.layouts import join
from shardfs.formats.registry import creating_view
from shardfs.formats.zarr_values import CODEC_PARAMETERS, is_same_element
from shardfs.model.arrays import Codec
from shardfs.model.errors import CorruptShardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.formats.create_rules import Rule, Sharding
    from shardfs.formats.format import View
    from shardfs.formats.json_text import Path
    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
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


def translated(layout: Format, view: View, path: str, documents: Documents) -> dict[str, bytes]:
    """The documents of `view`'s format, without shards, that describe what the layout's documents describe.

    `documents` are all documents of the layout for the dataset in directory `path`. Raise ValueError, with the reason,
    if they describe no dataset, or one that the other format cannot express.
    """
    try:
        dataset = _dataset(layout, path, documents)
        if dataset is None:
            raise ValueError("documents that describe a dataset are missing")
        levels = {at: found for at in view.children(dataset) if (found := _opened(layout, path, at, documents))}
        made = dict(view.show(path, dataset, levels).documents)
        for at in {document_place(name, layout.documents)[0] for name in documents} - {""}:
            below = None if view.renames and at in levels else _opened(layout, path, at, documents)
            shown = view.show(join(path, at), below, {}).documents if below is not None else {}
            made = {join(at, name): raw for name, raw in shown.items()} | made
        return made
    except CorruptShardError as e:
        raise ValueError(f"{e.key}: {e.why}") from e
    except UnsupportedError as e:
        raise ValueError(f"{view.name} cannot express it: {e}") from e


def _dataset(layout: Format, path: str, documents: Documents) -> Dataset | None:
    """The dataset of the directory itself, with the image that the attributes of its levels describe."""
    dataset = _opened(layout, path, "", documents)
    if dataset is None or dataset.levels is None:
        return dataset
    image = dataset.levels.image(dict(_levels(layout, path, dataset.levels.paths(), documents)))
    return dataset if image is None else replace(dataset, multiscales=(*dataset.multiscales, image))


def _levels(layout: Format, path: str, names: Iterable[str], documents: Documents) -> Iterator[tuple[str, Array]]:
    for name in names:
        found = _opened(layout, path, name, documents)
        stored = (*found.collections, *found.unsharded) if found is not None else ()
        if len(stored) != 1 or stored[0].array is None:
            return
        yield name, stored[0].array


def _opened(layout: Format, path: str, at: str, documents: Documents) -> Dataset | None:
    """The dataset in the directory `at` below `path`; None if there is none."""
    own = {name: documents[join(at, name)] for name in layout.documents if join(at, name) in documents}
    return layout.open(join(path, at), own) if own else None


# ---- both directions ----


@dataclass(frozen=True)
class Translation(Format):
    """The documents of one dataset of the source, as a layout shows them, for clients that write them.

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

    def shown(self, path: str, stored: Documents, name: str) -> bytes | None:
        try:
            return self.show(stored).get(name)
        except (CorruptShardError, UnsupportedError):
            return None

    def edit(
        self,
        path: str,
        stored: Documents,
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
        before = self._shown_all(stored, name)
        if not (differing := _changed(before.get(name), new)):
            return {}
        others = {n: form.data for n, form in written.items() if n != name and before.get(n) == form.shown}
        base = {**before, **others}
        if name in before and (fixed := self._fixed_members(path, name, base, new, differing)):
            raise ValueError(f"{name}: {', '.join(fixed)}: {FIXED}")
        try:
            made = self._made(path, stored, base, {**base, name: new})
            again = self.show({**stored, **made})
        except (UnsupportedError, ValueError) as e:
            causes = ", ".join(differing) if name in before else "the document"
            raise ValueError(f"{name}: {causes}: {e}") from e
        self._require_shown(path, name, before, new, again)
        return made

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
            found = _opened(self.layout, path, at, {**before, name: new})
        except CorruptShardError:
            return False
        return found is not None and _keeps_arrays(old, found, differing) and _keeps_images(old, found)

    def sources_of(self, path: str, stored: Documents, name: str) -> list[str] | None:
        """The stored documents to delete when a client deletes the shown document `name`.

        None if the dataset still exists without the document; the client then removes all its members. Raise
        ValueError, with the reason, if these stored documents describe other datasets, too, or cannot be changed.
        """
        if name not in (before := self._shown_all(stored, name)):
            return []
        if self.has_source:
            self._writable_view()
        at, _ = self._split(name)
        home, rest = self._home(at), {n: raw for n, raw in before.items() if n != name}
        with suppress(CorruptShardError):
            if _opened(self.layout, path, at, rest) is not None:
                return None
        described = {self._split(n)[0] for n in before}
        alone = all(self._home(other) != home for other in described - {at})
        if not alone or any(self._home(other) != home for other in self.homes.keys() - described):
            raise ValueError("the source's document describes other datasets, too; delete the dataset in the source")
        return [f for n in self.source.documents if (f := join(home, n)) in stored]

    def sharding(self, stored: Documents) -> Sharding | None:
        return self.source.sharding({n: raw for n, raw in stored.items() if n in self.source.documents})

    def has_arrays(self, path: str, documents: Documents) -> bool:
        """Whether documents of the source's format describe an array."""
        with suppress(CorruptShardError):
            dataset = self.source.open(path, documents)
            return dataset is not None and bool(dataset.collections or dataset.unsharded)
        return False

    def is_copy(self, name: str) -> bool:
        """Whether the layout generates this document from documents below."""
        return self._split(name)[1] not in self.layout.documents

    def differences(self, shown: bytes, new: bytes) -> Mapping[Path, Any]:
        """See `Format.differences`. A copied document may have another form, and may be that of a dataset to come."""
        changes = self.layout.differences(shown, new)
        before, after = (json.loads(raw).get(COPIES, {}) for raw in (shown, new))
        same = {name for name in after if name not in before or self._has_copies(before, after, name)}
        return {at: value for at, value in changes.items() if len(at) < 2 or at[0] != COPIES or at[1] not in same}

    def _has_copies(self, before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
        """Whether the copies in both consolidated documents describe the dataset of the document `name` alike."""
        versions = ({n: print_json(document) for n, document in copies.items()} for copies in (before, after))
        a, b = (self._description("", self._split(name)[0], documents) for documents in versions)
        return a is not None and a == b

    def stored_name(self, below: str) -> tuple[str, str]:
        """The directory of a stored document, and its name there."""
        return document_place(below, self.source.documents)

    def _shown_all(self, stored: Documents, name: str) -> Documents:
        """What `show` returns. Raise ValueError, with the reason, if the stored documents cannot be shown."""
        try:
            return self.show(stored)
        except (CorruptShardError, UnsupportedError) as e:
            raise ValueError(f"{name}: {e}") from e

    def _made(self, path: str, stored: Documents, before: Documents, after: Documents) -> dict[str, bytes]:
        """The documents to store: those of the source, with the changes in the translation."""
        view = self._writable_view()
        base = translated(self.layout, view, path, before)
        made: dict[str, bytes] = {}
        for name, raw in translated(self.layout, view, path, after).items():
            if raw == (old := base.get(name, b"{}")):
                continue
            at, document = self.stored_name(name)
            home = self._home(at) if name in base or at in self.homes else at
            now = {n: r for n in self.source.documents if (r := {**stored, **made}.get(join(home, n))) is not None}
            theirs = self.source.shown(join(path, home), now, document)
            wanted = raw if theirs is None else rebased(old, raw, theirs)
            edited = self.source.edit(join(path, home), now, document, wanted)
            made |= {join(home, n): _in_text_of(now.get(n), r) for n, r in edited.items()}
        return made

    def _writable_view(self) -> View:
        """The view of the source's format. Raise ValueError if there is none."""
        if self.view is None:
            found = self.source.dataset_formats[0] if self.has_source else "without a document for this directory"
            raise ValueError(f"the source is {found}, and layouts cannot change that; change the source")
        return self.view

    def _require_shown(self, path: str, name: str, before: Documents, new: bytes, again: Documents) -> None:
        """Raise ValueError, with the members, unless the layout shows the written document `name` in `again`.

        Members may have another form that describes the same dataset, and members may be added. The mount must also
        show documents that were written before that of a new array, which may contradict it.
        """
        shown, old = members(again.get(name)), members(before.get(name))
        written = with_additions(members(new), old, shown)
        at, _ = self._split(name)
        wanted = self._description(path, at, again)
        lost = [m for m in written if m not in shown and written[m] not in (None, [], {})]
        if not lost and self._description(path, at, {**again, name: print_json(written)}) != wanted:
            lost = [m for m in {**written, **shown} if not alike(written.get(m, REMOVED), shown.get(m, REMOVED))]
        if lost:
            form = self.source.dataset_formats[0]
            raise ValueError(f"{name}: {', '.join(lost)}: the source, which is {form}, cannot express this value")
        for array in _arrays(_opened(self.layout, path, at, again)):
            for other in (join(at, document) for document in self.layout.documents):
                a, b = members({**before, name: new}.get(other)), members(again.get(other))
                for m in a.keys() & b.keys() & array.attributes.keys():
                    same = alike(a[m], b[m]) or is_same_element(a[m], b[m], array.data_type)
                    if not same and self._description(path, at, {**again, other: _with(b, m, {})}) == wanted:
                        raise ValueError(f"{name}: {m}: is {a[m]!r:.80} in {other}, but other members say {b[m]!r:.80}")

    def _home(self, at: str) -> str:
        """The directory with the stored document of what the layout shows in directory `at`."""
        return self.homes.get(at, at if at in self.below else "")

    def _split(self, name: str) -> tuple[str, str]:
        return document_place(name, self.layout.documents)

    def _description(self, path: str, at: str, documents: Documents) -> Any:
        """What the documents of one directory say, in a form that is equal for equal meanings."""
        try:
            dataset = _opened(self.layout, path, at, documents)
        except CorruptShardError:
            return None
        if dataset is None:
            return None
        stored = (*dataset.collections, *dataset.unsharded)
        arrays = [(c.path, c.layers[0].format.key(0), c.array and _plain(c.array)) for c in stored]
        described = [*(array.attributes for array in _arrays(dataset)), ome.as_05(dataset.attributes or {})]
        attributes = [json.dumps(members(print_strict(own)), sort_keys=True) for own in described]
        return arrays, attributes, dataset.multiscales, dataset.problems


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

    def _made(self, path: str, stored: Documents, before: Documents, after: Documents) -> dict[str, bytes]:
        if self.view is None:
            raise ValueError("no layout writes the format of new datasets here; give --create, such as --create zarr3")
        made = translated(self.layout, self.view, path, {**self.group, **after})
        with suppress(ValueError, CorruptShardError, UnsupportedError):  # a different array
            before = self.show(self.deleted)
            self._require_chunks(path, before, {**self.group, **after})
            made |= self._as_deleted(path, translated(self.layout, self.view, path, before), made)
        if made:
            return made
        made = {self.source.documents[0]: b"{}\n"}  # of a group without attributes
        group = self.source.open(path, made)
        if group is None or group.attributes is None:
            raise ValueError(f"the format {self.view.name} has no document for it")
        return made

    def _require_chunks(self, path: str, before: Documents, after: Documents) -> None:
        """Raise ValueError if the arrays in both have other chunks."""
        for at in {self._split(name)[0] for name in before}:
            old, new = (_opened(self.layout, path, at, documents) for documents in (before, after))
            arrays = {c.path: c for c in (*new.collections, *new.unsharded)} if new is not None else {}
            for c in (*old.collections, *old.unsharded) if old is not None else ():
                if c.path in arrays:
                    require_same(_chunks_of(arrays[c.path]), _chunks_of(c), "the form of the chunks")

    def _as_deleted(self, path: str, base: Documents, made: Documents) -> Iterator[tuple[str, bytes]]:
        """The documents of the deleted array with the changes from `base` to `made`, which describe equal chunks.

        So the array gets its own codecs again, which the layout may not show.
        """
        for name, raw in made.items():
            theirs = self.source.shown(path, self.deleted, name) if name in self.deleted else None
            if theirs is not None and name in base and self.has_arrays(path, {name: raw}):
                yield name, rebased(base[name], raw, theirs)


def creation(
    layout: Format, layout_view: View, source: Format | None, path: str, deleted: Documents = MappingProxyType({})
) -> Creation:
    """The documents of a new dataset in directory `path`. `source` is None if its format is unknown."""

    def show(stored: Documents) -> Documents:
        is_there = source is not None and any(name in source.documents for name in stored)
        return translated(source, layout_view, path, stored) if source is not None and is_there else {}

    view = None if source is None else creating_view(source.dataset_formats[0])
    group = layout_view.show(path, None, {}).documents
    return Creation(layout, source or layout, view, {}, (), show, group, deleted)


def document_place(name: str, documents: Sequence[str]) -> tuple[str, str]:
    """The directory of a document, and its name there, which may contain slashes."""
    own = next((d for d in documents if name == d or name.endswith(f"/{d}")), name.rpartition("/")[2])
    return name.removesuffix(own).rstrip("/"), own


def _arrays(dataset: Dataset | None) -> list[Array]:
    stored = () if dataset is None else (*dataset.collections, *dataset.unsharded)
    return [c.array for c in stored if c.array is not None]


def _keeps_arrays(old: Dataset, new: Dataset, differing: Sequence[str]) -> bool:
    """Whether the arrays in `old` are in `new`, apart from their shapes, names of axes and attributes."""
    present = {c.path: c for c in (*new.collections, *new.unsharded)}
    for c in (*old.collections, *old.unsharded):
        a, b = c.array, c.path in present and present[c.path].array
        if not a or not b or _chunk_names(c) != _chunk_names(present[c.path]):
            return False
        same = a.fill_value == b.fill_value or is_same_element(a.fill_value, b.fill_value, a.data_type)
        if not same or _plain(a) != replace(_plain(b), shape=a.shape, names=a.names, fill_value=a.fill_value):
            return False
        own = {"attributes", *a.attributes, *b.attributes}  # other members can only change the fill value's attribute
        if a.attributes != b.attributes and a.names == b.names and own.isdisjoint(differing):
            return False
    return True


def _keeps_images(old: Dataset, new: Dataset) -> bool:
    """Whether images in `old` have the same levels in `new`, perhaps with more, or `new` describes no images."""
    pairs = zip(old.multiscales, new.multiscales or old.multiscales, strict=False)
    return len(new.multiscales) not in range(1, len(old.multiscales)) and all(
        a.axes == b.axes and {*a.levels} <= {*b.levels} and (old.attributes or a.segmentation == b.segmentation)
        for a, b in pairs
    )


def _chunk_names(stored: Collection) -> str:
    """The form of the names of chunks."""
    return re.sub("[0-9]+", "", stored.layers[0].format.key(0))


def _plain(array: Array) -> Array:
    """The array without attributes, and with all parameters of its codecs."""
    codecs = tuple(
        Codec(c.name, {**CODEC_PARAMETERS.get(c.name, {}), **c.configuration}) for c in array.encoding.codecs
    )
    return replace(array, attributes={}, encoding=replace(array.encoding, codecs=codecs))


def _chunks_of(stored: Collection) -> Any:
    """All on which stored chunks depend: their names, shape and encoding, without parameters that only encoders use."""
    array, names = stored.array, _chunk_names(stored)
    if array is None:
        return names
    encoding = array.encoding
    unused = {name: CODEC_PARAMETERS.get(name, {}) for name, _ in encoding.codecs}
    codecs = [(name, {n: v for n, v in c.items() if n not in unused[name]}) for name, c in encoding.codecs]
    return names, array.chunk, array.data_type, codecs, replace(encoding, codecs=())


def _in_text_of(old: bytes | None, new: bytes) -> bytes:
    """The document `new`, with the text of `old` where both have equal values."""
    with suppress(ValueError):  # bcolz also has YAML
        return new if old is None else rebased(old, new, old)
    return new


def _changed(old: bytes | None, new: bytes | None) -> list[str]:
    """The members that differ."""
    a, b = members(old), members(new)
    return [name for name in {**a, **b} if not alike(a.get(name, REMOVED), b.get(name, REMOVED))]


def _with(shown: Mapping[str, Any], member: str, written: Mapping[str, Any]) -> bytes:
    """The shown document with one member as in the written one."""
    rest = {name: value for name, value in shown.items() if name != member}
    return print_json(rest if member not in written else {**rest, member: written[member]})
