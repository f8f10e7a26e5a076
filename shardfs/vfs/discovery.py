"""Opens the directories of a source: finds out what each one shows, and keeps that as its `Content`.

`Datasets.open` works in these steps:

1. `ShownDatasets` reads the documents of the directory with `SourceDatasets`, and converts the dataset that they
   describe for the chosen layout. The result is the directory's *own* dataset.
2. A dataset says what is shown in its directory and below: collections, documents, names of further datasets
   (`ItemBelow`). The items of the own dataset are added to those that datasets of the parents have for this directory
   (`Inherited.below`). Items in subdirectories are passed on to these.
3. A collection in the directory gets a `ChunkDirs` tree with inode numbers from `ChunkTrees`.

Other programs may change documents meanwhile. If a renewal of the directory has begun since step 1 (`Renewals`), the
result is thrown away, and all steps are repeated.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from shardfs.formats.layouts import PACKED
from shardfs.formats.registry import creating_view, formats, sources, views
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.shards.shard_indices import DAMAGE_TTL_S
from shardfs.vfs.array_forms import Forms
from shardfs.vfs.chunk_trees import ChunkTrees
from shardfs.vfs.directory_content import ChunkLevel, CollectionAt, Content, ItemBelow, ScopeAt
from shardfs.vfs.renewals import OutdatedError, Renewals
from shardfs.vfs.shown_datasets import ShownDatasets
from shardfs.vfs.source_datasets import SourceDatasets, directory_mtime, joined, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardfs.formats.translate import Translation
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import Store
    from shardfs.vfs.directory_content import DocumentsRead, Inherited, ShownDataset
    from shardfs.vfs.nodes import DirectoryNode

log = logging.getLogger(__name__)

NATIVE = "native"

NOTHING_DESCRIBED = Dataset("")


class KnownDamage:
    """Errors about damaged data by inode number, cached so that lookups of the same name do not read the data again."""

    def __init__(self, cache: ByteLRU) -> None:
        self._cache = cache

    def require_none(self, number: int) -> None:
        """Raise the cached error of an inode number, if there is one."""
        damage = self._cache.peek(("damage", number))
        if damage is not None:
            raise damage.with_traceback(None)

    def put(self, number: int, error: CorruptShardError, seconds: float) -> None:
        """Let `require_none` raise this error for an inode number, for so many seconds."""
        self._cache.get(("damage", number), lambda: (error, 1000, seconds))

    def invalidate(self, number: int) -> None:
        """Drop the error of an inode number."""
        self._cache.invalidate(("damage", number))


class Datasets:
    """Opens the directories of a source. Thread-safe.

    Args:
        index_cache: holds shard indices, known damage, and names of directories.
        chunk_cache: holds chunks, and attributes and windows of remote files.
        index_ttl_s: seconds for which what is in the caches stays valid.
        layout: the name of a view, or `NATIVE`. The attribute `layout` is the format of its documents.
            `layout_documents` are the names of all documents that it shows, `consolidated_names` of generated ones.
        chunk_codec: the codec in which the view shows chunks; None: the view chooses. `PACKED`: that of the source,
            as new arrays have it.
        skip_unsupported: report directories that the view cannot express as problems instead of raising an error.
    """

    def __init__(
        self,
        store: Store,
        index_cache: ByteLRU,
        chunk_cache: ByteLRU,
        index_ttl_s: float = math.inf,
        layout: str = NATIVE,
        *,
        skip_unsupported: bool = False,
        chunk_codec: str | None = None,
    ) -> None:
        self.store = store
        self.index_cache = index_cache
        self.chunk_cache = chunk_cache
        self.ttl_s = index_ttl_s
        view = None
        if layout != NATIVE:  # the view of new arrays, unlike that of a mount, keeps all codecs
            view = creating_view(layout) if chunk_codec == PACKED else views()[layout]
        self.source = SourceDatasets(store, formats() if layout == NATIVE else sources(), chunk_codec)
        self.layout = None if layout == NATIVE else self.source.format_of(layout)
        self.consolidated_names = () if view is None or view.consolidation is None else (view.consolidation.name,)
        self.layout_documents = () if self.layout is None else (*self.layout.documents, *self.consolidated_names)
        self.shown_datasets = ShownDatasets(self.source, view, self.report if skip_unsupported else None)
        self.damage = KnownDamage(index_cache)
        self.trees = ChunkTrees(store, index_cache, chunk_cache, index_ttl_s)
        self.renewals = Renewals()
        self.forms = Forms(store, self.trees, self.renewals, self.source.dataset)
        self.problems: dict[Problem, None] = {}

    def open(self, directory: DirectoryNode) -> Content:
        """Return the content of a directory, read at the first call and at the first one after each renewal.

        Raise CorruptShardError if a metadata document is damaged: the error is cached for `DAMAGE_TTL_S` seconds. Raise
        UnsupportedError if the layout cannot express the dataset, BusyError for an array in an unfinished job, and
        OSError if the store fails.
        """
        while (content := directory.content) is None:
            self.damage.require_none(directory.number)
            since = self.renewals.count
            with suppress(OutdatedError):  # the documents have changed meanwhile: read them again
                self._open(directory, since)
        return content

    def _open(self, directory: DirectoryNode, since: int) -> None:
        """Set the content of a directory, or cache the error if its documents are damaged.

        Raise OutdatedError instead if metadata of the directory has changed since the renewal number `since`.
        """
        directory.checked = monotonic()
        try:
            with self.source.noting() as reads:
                shown_dataset = self.shown_datasets.open(directory)
                items = [*directory.inherited.below, *self._own_items(directory.inside, shown_dataset)]
                content = self._content(directory, shown_dataset, items, reads)
            collection = self._collection(directory.inside, items)
            mtime_ns = 0 if collection is None else directory_mtime(self.store, directory.inside)
            install = partial(self._install, directory, content, collection, mtime_ns)
            self.renewals.keep(directory.path, since, install)
        except CorruptShardError as e:
            damage = partial(self.damage.put, directory.number, e, DAMAGE_TTL_S)
            self.renewals.keep(directory.path, since, damage)
            raise

    def is_outdated(self, directory: DirectoryNode, age_s: float) -> bool:
        """Return whether the documents that an opened directory was made of have changed in the source.

        They are read again if they were read more than `age_s` seconds ago.
        """
        content = directory.content
        if content is None or not self.source.are_old(directory.checked, age_s):
            return False
        directory.checked = monotonic()
        return self.source.have_changed(content.reads)

    def translation(self, directory: DirectoryNode) -> Translation | None:
        """Return how documents that a layout shows for a directory become documents of the source.

        None if they are the stored documents.
        """
        return None if self.layout is None else self.shown_datasets.translation(directory, self.open(directory).dataset)

    def _content(
        self,
        directory: DirectoryNode,
        shown_dataset: ShownDataset,
        items: Sequence[ItemBelow],
        reads: Mapping[str, DocumentsRead],
    ) -> Content:
        """Return the content of a directory, yet without the tree of its collection. Report problems of its dataset.

        `items` are those of its own dataset and of its parents' datasets; `reads` are the documents read for it.
        """
        path, dataset = directory.inside, shown_dataset.dataset or NOTHING_DESCRIBED
        for problem in dataset.problems:
            self.report(problem)
        documents, below = _by_name(items)
        if not dataset.closed:
            for name in self.source.members(path, directory.inherited.scope):
                # In a layout, each member is a dataset: an empty list counts as shown data (`Content.is_sharded`).
                # Natively, a member may be a directory without shards.
                below.setdefault(name, [] if self.layout is not None else [ItemBelow((), None)])
        stored_here = (
            at.item.collection for at in items if isinstance(at.item, CollectionAt) and at.item.directory == path
        )
        return Content(
            shown_dataset,
            documents=documents,
            below=below,
            hidden_shards=tuple(c.layers[0].format for c in stored_here if c.shards is not None),
            passed=_passed_on(path, directory.inherited, dataset),
            # Without a dataset, a search for datasets below may have read very many documents.
            reads={at: read for at, read in reads.items() if shown_dataset.dataset is not None or at == path},
        )

    def _collection(self, path: str, items: Iterable[ItemBelow]) -> CollectionAt | None:
        """Return the first collection shown in a directory itself; None without one. Report a second one."""
        collections = [at.item for at in items if not at.parts and isinstance(at.item, CollectionAt)]
        if len(collections) > 1:
            self.report(Problem(path, "a second sharded collection in the same directory"))
        return collections[0] if collections else None

    def _install(
        self, directory: DirectoryNode, content: Content, collection: CollectionAt | None, mtime_ns: int
    ) -> None:
        """Set the content of a directory, with the tree of its collection. `Renewals.keep` calls this."""
        if collection is not None:
            chunks = self.trees.open(directory.inside, directory.shown, collection, mtime_ns)
            content = replace(content, chunks=chunks)
        directory.content = content

    def _own_items(self, path: str, shown_dataset: ShownDataset) -> Iterator[ItemBelow]:
        """Yield what a directory's own dataset shows there and below."""
        dataset = shown_dataset.dataset or NOTHING_DESCRIBED
        for c in dataset.collections:
            yield ItemBelow(parts_of(c.path), CollectionAt(c, joined(path, c.stored_at)))
        for name, raw in dataset.documents.items():
            yield ItemBelow(parts_of(name), raw)
        for at, image in shown_dataset.images.items():
            yield ItemBelow(parts_of(at), image)
        if dataset.scope is not None and not self.store.blind:  # the store may not have this directory yet
            yield ItemBelow(parts_of(dataset.scope.data), None)
        if self.store.blind:
            for name in (*dataset.named, *(c.path for c in dataset.unsharded)):
                yield ItemBelow(parts_of(name), None)

    def report(self, problem: Problem) -> None:
        """Record why a directory is not expanded, and log each problem once."""
        if problem not in self.problems:
            self.problems[problem] = None
            log.warning("%s: %s: %s", problem.path or "/", problem.consequence, problem.why)


def _by_name(items: Iterable[ItemBelow]) -> tuple[dict[str, bytes], dict[str, list[ItemBelow]]]:
    """Return the documents in a directory by name, and by name what is in its subdirectories.

    The paths of the latter are relative to the subdirectory.
    """
    documents: dict[str, bytes] = {}
    below: dict[str, list[ItemBelow]] = {}
    for parts, item in items:
        if len(parts) == 1 and isinstance(item, bytes):
            # a document from a parent directory describes the whole, so it takes precedence
            documents.setdefault(parts[0], item)
        elif parts:
            below.setdefault(parts[0], []).append(ItemBelow(parts[1:], item))
    return documents, below


def _passed_on(path: str, inherited: Inherited, dataset: Dataset) -> Inherited:
    """Return what the subdirectories of a directory inherit from it and from its parents, apart from `below`.

    `Content.inherited` adds that, for each subdirectory.
    """
    inherited = inherited._replace(closed=inherited.closed or dataset.closed)
    if dataset.scope is not None:
        inherited = inherited._replace(scope=ScopeAt(dataset.scope, path))
    for c in dataset.unsharded:
        if not c.path and c.shards is None:
            inherited = inherited._replace(cells=ChunkLevel(c.names, -1 if c.names.prefix else 0))
    return inherited
