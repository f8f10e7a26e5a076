"""Opens the directories of a source: what each one shows, from its own documents and from those of its parents.

`SourceDatasets` reads the documents, `ShownDatasets` converts their dataset for the chosen layout, and `ChunkTrees`
gives each sharded collection a `ChunkDirs` tree with inode numbers.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from shardfs.formats.registry import formats, sources, views
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.shards.shard_indices import DAMAGE_TTL_S
from shardfs.vfs.array_forms import Forms
from shardfs.vfs.chunk_trees import ChunkTrees
from shardfs.vfs.directory_content import ChunkLevel, CollectionAt, Content, ScopeAt
from shardfs.vfs.renewals import OutdatedError, Renewals
from shardfs.vfs.shown_datasets import ShownDatasets
from shardfs.vfs.source_datasets import SourceDatasets, directory_mtime, joined, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.formats.translate import Translation
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import Store
    from shardfs.vfs.directory_content import DocumentsRead, Inherited, ItemBelow, ShownDataset
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
        """Raise this error for an inode number for some time."""
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
        chunk_codec: the codec in which the view shows chunks; None: the view chooses.
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
        view = None if layout == NATIVE else views()[layout]
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
        """Return the content of a directory, read at the first call only.

        Raise CorruptShardError if a metadata document is damaged. The error is cached for `DAMAGE_TTL_S` seconds.
        """
        while (content := directory.content) is None:
            self.damage.require_none(directory.number)
            since = self.renewals.count
            with suppress(OutdatedError):  # the documents have changed meanwhile: read them again
                self._open(directory, since)
        return content

    def _open(self, directory: DirectoryNode, since: int) -> None:
        """Set the content of a directory. Raise OutdatedError if a renewal has begun after the number `since`."""
        directory.checked = monotonic()
        try:
            with self.source.noting() as reads:
                self._set_content(directory, self.shown_datasets.open(directory), reads, since)
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

    def _set_content(
        self, directory: DirectoryNode, shown_dataset: ShownDataset, reads: Mapping[str, DocumentsRead], since: int
    ) -> None:
        """Combine what a directory shows of its own dataset with what it inherits from its parents."""
        path, dataset = directory.inside, shown_dataset.dataset or NOTHING_DESCRIBED
        items = [*directory.inherited.below, *self._items(path, shown_dataset)]
        documents, below = _by_name(items)
        if not dataset.closed:
            # Each member is a dataset for layouts: an empty list counts as shown data (`Content.is_sharded`). Natively,
            # a member need not have shards, so None says that there may be only a directory.
            for name in self.source.members(path, directory.inherited.scope):
                below.setdefault(name, [((), None)] if self.layout is None else [])
        collections = [item for parts, item in items if not parts and isinstance(item, CollectionAt)]
        for problem in dataset.problems:
            self.report(problem)
        if len(collections) > 1:
            self.report(Problem(path, "a second sharded collection in the same directory"))
        placed = (item.collection for _, item in items if isinstance(item, CollectionAt) and item.shards == path)
        content = Content(
            shown_dataset,
            documents=documents,
            below=below,
            shards=tuple(c.layers[0].format for c in placed if c.shards is not None),
            passed=_passed_on(path, directory.inherited, dataset),
            # Without a dataset, a search for datasets below may have read very many documents.
            reads={at: read for at, read in reads.items() if shown_dataset.dataset is not None or at == path},
        )
        mtime_ns = directory_mtime(self.store, path) if collections else 0
        install = partial(self._install, directory, content, next(iter(collections), None), mtime_ns)
        self.renewals.keep(directory.path, since, install)

    def _install(
        self, directory: DirectoryNode, content: Content, collection: CollectionAt | None, mtime_ns: int
    ) -> None:
        if collection is not None:
            chunks = self.trees.open(directory.inside, directory.shown, collection, mtime_ns)
            content = replace(content, chunks=chunks)
        directory.content = content

    def _items(self, path: str, shown_dataset: ShownDataset) -> Iterator[ItemBelow]:
        """Yield the collections, documents and images of a dataset with their paths relative to its directory."""
        dataset = shown_dataset.dataset or NOTHING_DESCRIBED
        for c in dataset.collections:
            yield parts_of(c.path), CollectionAt(c, joined(path, c.stored_at))
        for name, raw in dataset.documents.items():
            yield parts_of(name), raw
        for at, image in shown_dataset.images.items():
            yield parts_of(at), image
        if dataset.scope is not None and not self.store.blind:  # the store may not have this directory yet
            yield parts_of(dataset.scope.data), None
        if self.store.blind:
            for name in (*dataset.named, *(c.path for c in dataset.unsharded)):
                yield parts_of(name), None

    def report(self, problem: Problem) -> None:
        """Record why a directory is not expanded, and log each problem once."""
        if problem not in self.problems:
            self.problems[problem] = None
            log.warning("%s: %s: %s", problem.path or "/", problem.consequence, problem.why)


def _by_name(items: Iterable[ItemBelow]) -> tuple[dict[str, bytes], dict[str, list[ItemBelow]]]:
    """Return the documents in a directory by name, and by name what is in its subdirectories."""
    documents: dict[str, bytes] = {}
    below: dict[str, list[ItemBelow]] = {}
    for parts, item in items:
        if len(parts) == 1 and isinstance(item, bytes):
            # a document from a parent directory describes the whole, so it takes precedence
            documents.setdefault(parts[0], item)
        elif parts:
            below.setdefault(parts[0], []).append((parts[1:], item))
    return documents, below


def _passed_on(path: str, inherited: Inherited, dataset: Dataset) -> Inherited:
    """Return what the subdirectories of a directory inherit from it and from its parents."""
    inherited = inherited._replace(closed=inherited.closed or dataset.closed)
    if dataset.scope is not None:
        inherited = inherited._replace(scope=ScopeAt(dataset.scope, path))
    for c in dataset.unsharded:
        if not c.path and c.shards is None:
            inherited = inherited._replace(cells=ChunkLevel(c.names, -1 if c.names.prefix else 0))
    return inherited
