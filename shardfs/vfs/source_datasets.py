"""The datasets of a source as its metadata documents describe them, without a layout."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.model.collection import Description
from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import is_in
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import SourceJobs
from shardfs.vfs.array_forms import hashes_of
from shardfs.vfs.directory_content import DocumentsRead

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardfs.formats.format import Format
    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset, Levels
    from shardfs.storage.store import DirEntry, Store
    from shardfs.vfs.directory_content import Inherited, ScopeAt

LOOK_AHEAD, LOOK_AHEAD_REMOTE = 256, 16
"""Number of subdirectories searched before a plain directory is assumed to lead to a dataset (local, remote stores)."""


REMOTE_DOCUMENTS_S = 1.0
"""Documents of a remote store are read again after this many seconds at the earliest: each lookup may need them."""


class SourceDatasets:
    """Reads documents of a source, and detects the datasets that they describe. Thread-safe.

    Args:
        formats: the formats to detect, in order.
        codec: the only codec in which layouts may show chunks (`Array.codec`); None lets the layout choose.
        drafts: documents taken for the stored ones, by directory and name.
    """

    def __init__(
        self,
        store: Store,
        formats: Sequence[Format],
        codec: str | None,
        drafts: Mapping[str, Mapping[str, bytes]] | None = None,
    ) -> None:
        self.store = store
        self.formats = formats
        self.document_names = document_names(formats)
        self.codec = codec
        self._drafts = drafts or {}
        self._jobs = SourceJobs(store.root) if isinstance(store, LocalStore) else None
        self._thread = threading.local()

    def with_drafts(self, path: str, below: Iterable[str], drafts: Mapping[str, bytes]) -> SourceDatasets:
        """Return these datasets as if a directory and those `below` had only these documents, by relative path."""
        names = self.document_names
        places = {f.removesuffix(n).rstrip("/") for f in drafts for n in names if f"/{f}".endswith(f"/{n}")}
        by_directory = {
            joined(path, at): {n: drafts[f] for n in names if (f := joined(at, n)) in drafts}
            for at in ("", *below, *places)
        }
        return SourceDatasets(self.store, self.formats, self.codec, by_directory)

    # ---- documents ----

    def documents(self, path: str) -> Mapping[str, bytes]:
        """Return the stored metadata documents of a directory by name; empty if there is no such directory.

        Raise OSError.
        """
        return self._drafts[path] if path in self._drafts else self._read(path, self.document_names)

    def _read(self, path: str, names: Sequence[str]) -> dict[str, bytes]:
        documents = self.store.documents(path, names, MAX_DOCUMENT_BYTES)
        if (reads := getattr(self._thread, "reads", None)) is not None:
            reads[path] = DocumentsRead(names, hashes_of(documents))
        return documents

    @contextmanager
    def noting(self) -> Iterator[Mapping[str, DocumentsRead]]:
        """Give the block a mapping in which the documents that this thread reads meanwhile are noted, by directory.

        Blocks of one thread must not be nested.
        """
        self._thread.reads = {}
        try:
            yield self._thread.reads
        finally:
            self._thread.reads = None

    def are_old(self, read_at: float, age_s: float) -> bool:
        """Return whether documents, read at this time of the monotonic clock, are older than `age_s` seconds."""
        return monotonic() - read_at >= max(age_s, REMOTE_DOCUMENTS_S if self.store.remote else 0)

    def have_changed(self, reads: Mapping[str, DocumentsRead]) -> bool:
        """Return whether the source has other documents now than `reads`, by directory. False if it cannot be read.

        In a remote store, only documents that existed are asked for, if there were any.
        """
        with suppress(OSError):
            for path, (names, digests) in reads.items():
                wanted = [*digests] if self.store.remote and digests else names
                if hashes_of(self.store.documents(path, wanted, MAX_DOCUMENT_BYTES)) != digests:
                    return True
        return False

    def is_described(self, path: str, inherited: Inherited) -> bool:
        """Return whether a directory has metadata documents, which proves that it exists."""
        if inherited.closed:
            return False
        return bool(self.documents(path) or (inherited.scope is not None and self._of_scope(path, inherited.scope)))

    def _of_scope(self, path: str, scope: ScopeAt) -> dict[str, bytes]:
        """Return the documents of a scope that describe a directory below."""
        wanted = scope.scope.documents(scope.relative(path))
        return self._read(scope.path, wanted) if wanted else {}

    # ---- datasets ----

    def dataset(self, path: str, inherited: Inherited) -> Dataset | None:
        """Return the dataset that the documents of a directory describe, or else those of the inherited scope.

        Raise CorruptShardError if a document is damaged, and BusyError as `require_no_job` does.
        """
        documents, home, scope = self.documents(path), path, inherited.scope
        dataset = next(self._described(path, documents), None)
        if dataset is None and scope is not None:
            documents, home = self._of_scope(path, scope), scope.path
            dataset = scope.scope.open(path, scope.relative(path), documents)
        self.require_no_job(path, is_array=dataset is not None and bool(dataset.all_collections))
        if dataset is None or not dataset.all_collections:
            return dataset
        digests = hashes_of({joined(home, name): raw for name, raw in documents.items()})
        collections = (
            replace(c, description=Description(path, scope, c.path, digests, c.array and c.array.fill_value))
            for c in dataset.collections
        )
        return replace(dataset, collections=self._in_codec(collections), unsharded=self._in_codec(dataset.unsharded))

    def own_datasets(self, path: str) -> Iterator[Dataset]:
        """Yield what each format takes a directory's own documents for, in the order of `formats`.

        The mount shows the first of these datasets. Raise CorruptShardError if a document is damaged, and OSError.
        """
        yield from self._described(path, self.documents(path))

    def _described(self, path: str, documents: Mapping[str, bytes]) -> Iterator[Dataset]:
        return (dataset for f in self.formats if (dataset := f.open(path, documents)) is not None)

    def _in_codec(self, collections: Iterable[Collection]) -> tuple[Collection, ...]:
        """Return collections that layouts have to show in the chosen codec."""
        if self.codec is None:
            return tuple(collections)
        return tuple(replace(c, array=c.array and replace(c.array, codec=self.codec)) for c in collections)

    def format_of(self, name: str) -> Format:
        """Return the format whose datasets have this `Dataset.format`, which must be one of `formats`."""
        return next(f for f in self.formats if name in f.dataset_formats)

    def require_no_job(self, path: str, *, is_array: bool = False) -> None:
        """Raise BusyError if the array in a directory is in an unfinished job in place; see `pack_state`."""
        if self._jobs is not None and isinstance(self.store, LocalStore):
            self._jobs.require_none(self.store.path(path), is_array=is_array)

    def children(self, path: str, names: Iterable[str], inherited: Inherited) -> Iterator[tuple[str, Dataset | None]]:
        """Yield names of directories below and their datasets; None for a damaged one, or without a dataset."""
        for name in names:
            dataset = None
            with suppress(CorruptShardError):
                dataset = self.dataset(joined(path, name), inherited)
            yield name, dataset

    def levels(self, path: str, levels: Levels, inherited: Inherited) -> dict[str, Array]:
        """Return the arrays in a group that may be levels of an image, by path, in the order of `Levels.paths`.

        Ends at the first path without exactly one array.
        """
        arrays = {}
        for name, dataset in self.children(path, levels.paths(), inherited):
            collections = dataset.all_collections if dataset is not None else ()
            if len(collections) != 1 or collections[0].array is None:
                break
            arrays[name] = collections[0].array
        return arrays

    # ---- directories ----

    def listed(self, path: str) -> Iterator[DirEntry]:
        """Yield the entries of a directory of the store; none if a web server does not list it. Raise OSError.

        Without a list, the documents name all that matters.
        """
        try:
            yield from self.store.scan(path)
        except PermissionError:
            if not self.store.blind:
                raise

    def members(self, path: str, scope: ScopeAt | None) -> Iterator[str]:
        """Yield the names of datasets directly below a directory of a scope.

        The store need not have directories for these datasets.
        """
        if scope is None or not is_in(below := scope.relative(path), scope.scope.data):
            return
        for entry in self.listed(joined(scope.path, scope.scope.listing(below))):
            if (name := scope.scope.member(entry.name, entry.directory)) is not None:
                yield name

    def may_lead_on(self, path: str, inherited: Inherited) -> bool:
        """Return whether a plain directory may lead to a dataset.

        The search is bounded; True if it reaches the limit.
        """
        if next(self.members(path, inherited.scope), None) is not None:
            return True
        queue, count = deque([path]), 0
        limit = LOOK_AHEAD_REMOTE if self.store.remote else LOOK_AHEAD
        while queue:
            at = queue.popleft()
            for entry in self.listed(at):
                if not entry.directory:
                    if any(f.may_hold(entry.name) for f in self.formats):
                        return True
                    continue
                count += 1
                child = joined(at, entry.name)
                if count > limit or self._may_be_dataset(child, inherited):
                    return True
                queue.append(child)
        return False

    def _may_be_dataset(self, path: str, inherited: Inherited) -> bool:
        with suppress(CorruptShardError, OSError):
            return self.dataset(path, inherited) is not None
        return True


def directory_mtime(store: Store, path: str) -> int:
    """Return the modification time of a directory in ns, or that of its nearest parent in the store; 0 if unknown."""
    if store.remote:
        return 0  # object stores have no directories
    while not (mtime_ns := _mtime(store, path)) and path:
        path = path.rpartition("/")[0]
    return mtime_ns


def _mtime(store: Store, path: str) -> int:
    try:
        stat = store.entry(path).stat
    except OSError:
        return 0
    return stat.mtime_ns if stat else 0


def parts_of(path: str) -> tuple[str, ...]:
    """Return the components of a path in a document, which may have empty ones and `.`."""
    return tuple(part for part in path.split("/") if part not in ("", "."))


def joined(path: str, below: str) -> str:
    """Return the path in the store of a path in a document, relative to the directory `path`."""
    return "/".join([*parts_of(path), *parts_of(below)])


def document_names(formats: Sequence[Format]) -> list[str]:
    """Return the names of the metadata documents that these formats read, in order and without duplicates."""
    return list(dict.fromkeys(name for f in formats for name in f.documents))
