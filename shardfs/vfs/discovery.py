"""Find the datasets of a source, directory by directory.

Each directory is opened with the formats and converted by the view of the chosen layout. `ChunkTrees` gives each
sharded collection a `ChunkDirs` tree with inode numbers.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, cast

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import PACKED
from shardfs.formats.registry import creating_view, formats, sources, views
from shardfs.formats.translate import Translation
from shardfs.model.arrays import Multiscale
from shardfs.model.collection import Description
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.shards.shard_indices import DAMAGE_TTL_S
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import SourceJobs
from shardfs.vfs.chunk_trees import ChunkTrees
from shardfs.vfs.forms import Forms, hashes_of
from shardfs.vfs.nodes import CollectionAt, Content, DirectoryNode, Inherited
from shardfs.vfs.renewals import OutdatedError, Renewals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardfs.formats.format import Format
    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Levels, Scope
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import DirEntry, Store
    from shardfs.vfs.nodes import ShownItem

log = logging.getLogger(__name__)

NATIVE = "native"

FORMAT_NAMES = {"zarr2": "Zarr v2", "zarr3": "Zarr v3", "zarr3-draft": "Zarr v3 (2022 draft)", "n5": "N5"}
"""Display names of formats in messages, where they differ from the internal names."""

NOTHING_DESCRIBED = Dataset("")

LOOK_AHEAD, LOOK_AHEAD_REMOTE = 256, 16
"""Number of subdirectories searched before a plain directory is assumed to lead to a dataset (local, remote stores)."""


REMOTE_DOCUMENTS_S = 1.0
"""Documents of a remote store are read again after this many seconds at the earliest: each lookup may need them."""


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
        self._cache.drop(("damage", number))


class Datasets:
    """Opens the directories of a source. Thread-safe.

    Args:
        index_cache: holds shard indices and known damage.
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
        self.store, self._codec, self._ttl = store, chunk_codec, index_ttl_s
        self._jobs = SourceJobs(store.root) if isinstance(store, LocalStore) else None
        self._reading = threading.local()
        self.view = views()[layout] if layout != NATIVE else None
        self.formats = formats() if layout == NATIVE else sources()
        self.layout = next((f for f in self.formats if layout in f.dataset_formats), None)
        self.document_names = _document_names(self.formats)
        consolidation = self.view.show("", None, {}).consolidation if self.view is not None else None
        self.consolidated_names = () if consolidation is None else (consolidation.name,)
        self.layout_documents = () if self.layout is None else (*self.layout.documents, *self.consolidated_names)
        self._skips = skip_unsupported
        self.damage = KnownDamage(index_cache)
        self.trees = ChunkTrees(store, index_cache, chunk_cache, index_ttl_s)
        self.renewals = Renewals()
        self.forms = Forms(store, self.trees, self.renewals, self._stored_dataset)
        self.problems: dict[Problem, None] = {}
        self._instead: Mapping[str, dict[str, bytes]] = {}  # documents taken for the stored ones, by directory

    def documents(self, path: str) -> dict[str, bytes]:
        """Return the stored metadata documents of a directory by name."""
        return self._instead[path] if path in self._instead else self._read(path, self.document_names)

    def _read(self, path: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return stored documents by name, and note them for the directory that this thread opens."""
        documents = self.store.documents(path, names, MAX_DOCUMENT_BYTES)
        self._reading.__dict__.setdefault("documents", {})[path] = names, hashes_of(documents)
        return documents

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
        self._reading.documents = {}
        directory.checked = monotonic()
        try:
            self._set_content(directory, self._described(directory), since)
        except CorruptShardError as e:
            damage = partial(self.damage.put, directory.number, e, DAMAGE_TTL_S)
            self.renewals.keep(directory.path, since, damage)
            raise

    def is_outdated(self, directory: DirectoryNode) -> bool:
        """Return whether the documents that an opened directory was made of have changed in the source.

        They are read again at most every `index_ttl` seconds. False if the source cannot be read. In a remote store,
        only documents that existed are asked for, if there were any.
        """
        content, now, remote = directory.content, monotonic(), self.store.remote
        if content is None or now - directory.checked < max(self._ttl, REMOTE_DOCUMENTS_S if remote else 0.0):
            return False
        directory.checked = now
        with suppress(OSError):
            return any(
                hashes_of(self.store.documents(path, [*digests] if remote and digests else names, MAX_DOCUMENT_BYTES))
                != digests
                for path, (names, digests) in content.read.items()
            )
        return False

    def _described(self, directory: DirectoryNode) -> Dataset | None:
        inherited = directory.inherited.below
        is_described = any(not parts and isinstance(item, CollectionAt) for parts, item in inherited)
        if is_described and self.view is None:
            return None  # a parent's documents describe the chunks here, so this directory's would change nothing
        if directory.inherited.closed:
            return None
        dataset = directory.file or self._stored_dataset(directory.inside, directory.inherited)
        if is_described and dataset is not None and self.view is not None:
            return Dataset(self.view.name, hidden=dataset.format_names, closed=True)
        if self.view is not None and dataset is not None and dataset.scope is not None:
            directory.move(dataset.scope)
            dataset = self._stored_dataset(directory.inside, directory.inherited)
        if dataset is None and (directory.inherited.below or self.view is None or not self._leads_on(directory)):
            return None  # a parent directory already provides the content of this one, or there is no content
        return self._viewed(directory, dataset)

    def translation(self, directory: DirectoryNode) -> Translation | None:
        """Return how the documents that the view shows for a directory become documents of the source.

        None if the view shows the stored documents unchanged.
        """
        dataset = self._stored_dataset(directory.inside, directory.inherited)
        if self.view is None or (dataset is not None and dataset.format == self.view.name):
            return None
        own = () if dataset is None else (*dataset.collections, *dataset.unsharded)
        below = () if dataset is None else tuple(self.view.children(self._situated(directory, dataset)))

        def show(stored: Mapping[str, bytes]) -> Mapping[str, bytes]:
            found = self._with_documents(directory.inside, below, stored)._described(directory)
            return {} if found is None else found.documents

        viewed = self.open(directory).dataset
        homes = {}
        for c in () if viewed is None else viewed.collections:
            levels = (level for level in below if is_in(c.stored_at, level))
            homes[c.path] = "" if any(c.stored_at == o.stored_at for o in own) else next(levels, "")
        layout = cast("Format", self.layout)
        source = layout if dataset is None else next(f for f in self.formats if dataset.format in f.dataset_formats)
        return Translation(layout, source, creating_view(dataset.format if dataset else ""), homes, below, show)

    def _with_documents(self, path: str, below: Iterable[str], stored: Mapping[str, bytes]) -> Datasets:
        """Return these datasets as if a directory and those `below` had the stored documents, by relative path."""
        trial = copy.copy(self)
        trial.problems, trial._skips = {}, False
        names = self.document_names
        places = {f.removesuffix(n).rstrip("/") for f in stored for n in names if f"/{f}".endswith(f"/{n}")}
        trial._instead = {
            _joined(path, at): {n: stored[f] for n in names if (f := _joined(at, n)) in stored}
            for at in ("", *below, *places)
        }
        return trial

    def plain_array(self, path: str) -> tuple[str, list[str]] | None:
        """Return the format of a directory's unsharded array and the layouts that can show it; None if absent."""
        documents = self.store.documents(path, _document_names(sources()), MAX_DOCUMENT_BYTES)
        dataset = next(filter(None, (f.open(path, documents) for f in sources())), None)
        if dataset is None or not (dataset.unsharded or (dataset.format == "zarr2" and dataset.closed)):
            return None
        layouts = []
        for name, view in views().items():
            with suppress(UnsupportedError):
                if view.show(path, dataset, {}).collections:
                    layouts.append(name)
        return FORMAT_NAMES.get(dataset.format, dataset.format), layouts

    def _leads_on(self, directory: DirectoryNode) -> bool:
        """Return whether a plain directory may lead to a dataset.

        The search is bounded; True if it reaches the limit.
        """
        if next(self._members(directory), None) is not None:
            return True
        queue, looked = deque([directory.inside]), 0
        limit = LOOK_AHEAD_REMOTE if self.store.remote else LOOK_AHEAD
        while queue:
            path = queue.popleft()
            for entry in self.listed_by_store(path):
                if not entry.directory:
                    if any(f.may_hold(entry.name) for f in self.formats):
                        return True
                    continue
                looked += 1
                child = f"{path}/{entry.name}" if path else entry.name
                if looked > limit or self._may_be_dataset(child, directory.inherited):
                    return True
                queue.append(child)
        return False

    def _members(self, directory: DirectoryNode) -> Iterator[str]:
        """Yield the names of datasets directly below a directory of a scope.

        The store need not have directories for these datasets.
        """
        if directory.inherited.scope is None:
            return
        scope, base = directory.inherited.scope
        below = _below(directory.inside, base)
        if not is_in(below, scope.data):
            return
        for entry in self.listed_by_store(_joined(base, scope.listing(below))):
            if (name := scope.member(entry.name, entry.directory)) is not None:
                yield name

    def _may_be_dataset(self, path: str, inherited: Inherited) -> bool:
        with suppress(CorruptShardError, OSError):
            return self._stored_dataset(path, inherited) is not None
        return True

    def listed_by_store(self, path: str) -> Iterator[DirEntry]:
        """Yield the entries of a directory; none if a web server does not list it.

        The metadata names all that matters.
        """
        try:
            yield from self.store.scan(path)
        except PermissionError:
            if not self.store.blind:
                raise

    def _stored_dataset(self, path: str, inherited: Inherited) -> Dataset | None:
        """Return the dataset described by the documents or the inherited scope, with the chunk codec applied."""
        documents, directory = self.documents(path), path
        found = next((d for f in self.formats if (d := f.open(path, documents)) is not None), None)
        if found is None and inherited.scope is not None:
            scope, directory = inherited.scope
            documents = self._scope_documents(path, inherited.scope)
            found = scope.open(path, _below(path, directory), documents)
        if found is not None and found.collections:
            digests = hashes_of({_joined(directory, name): raw for name, raw in documents.items()})
            found = replace(found, collections=tuple(
                replace(c, description=Description(
                    path, inherited.scope, c.path, digests, c.array and c.array.fill_value
                ))
                for c in found.collections
            ))  # fmt: skip
        self.require_no_job(path, is_array=found is not None and bool(found.collections or found.unsharded))
        return found if found is None or self._codec is None else _in_codec(found, self._codec)

    def require_no_job(self, path: str, *, is_array: bool = False) -> None:
        """Raise BusyError if the array in a directory is in an unfinished job in place; see `pack_state`."""
        if self._jobs is not None and isinstance(self.store, LocalStore):
            self._jobs.require_none(self.store.path(path), is_array=is_array)

    def _scope_documents(self, path: str, inherited: tuple[Scope, str]) -> dict[str, bytes]:
        scope, base = inherited
        wanted = scope.documents(_below(path, base))
        return self._read(base, wanted) if wanted else {}

    def is_described(self, path: str, inherited: Inherited) -> bool:
        """Return whether a directory has metadata documents, which proves that it exists."""
        if inherited.closed:
            return False
        if self.documents(path):
            return True
        return inherited.scope is not None and bool(self._scope_documents(path, inherited.scope))

    def _viewed(self, directory: DirectoryNode, dataset: Dataset | None) -> Dataset | None:
        """Return the dataset as the view shows it. Raise UnsupportedError if the view cannot express it."""
        if self.view is None:
            return dataset
        if dataset is not None and dataset.levels is not None:
            image = dataset.levels.image(self._levels(directory, dataset.levels))
            dataset = replace(dataset, multiscales=(*dataset.multiscales, *([image] if image is not None else [])))
        if dataset is not None:
            dataset = self._situated(directory, dataset)
        path, below = directory.shown, {}
        for name in self.view.children(dataset) if dataset is not None else ():
            if (found := self._stored_below(directory, name)) is not None:
                below[name] = found
        try:
            self._require_codec(dataset)
            return self.view.show(path, dataset, below)
        except UnsupportedError as e:
            why = f"cannot be shown as {self.view.name}: {e}"
            if not self._skips:
                hint = "; -o unsupported=skip omits it" if path else ""
                raise UnsupportedError(f"{path or '/'}: {why}{hint}") from e
            self.report(Problem(path, why, skipped=True))
            return Dataset("unsupported", hidden_entirely=True, closed=True)

    def _require_codec(self, dataset: Dataset | None) -> None:
        """Raise UnsupportedError if a chunk codec is requested but the view would show the stored chunks unchanged."""
        if self._codec in (None, PACKED) or dataset is None or self.view is None:
            return
        if dataset.format != self.view.name:
            return
        if dataset.collections or dataset.unsharded or dataset.closed:
            why = f"{dataset.format} is shown in its own layout as it is stored"
            raise UnsupportedError(f"{why}: choose another layout, or leave out chunk_codec={self._codec}")

    def _situated(self, directory: DirectoryNode, dataset: Dataset) -> Dataset:
        """Return the dataset with its context.

        An image gets the names beside it; an array gets the image of which it is a level.
        """
        if dataset.multiscales and self.view is not None and self.view.renames:
            names = frozenset(entry.name for entry in self.listed_by_store(directory.inside))
            return replace(dataset, sibling_names=names.union(self._members(directory)))
        images = (item for parts, item in directory.inherited.below if not parts and isinstance(item, Multiscale))
        return replace(dataset, level_of=next(images, None))

    def _stored_below(self, directory: DirectoryNode, name: str) -> Dataset | None:
        with suppress(CorruptShardError):  # opening that directory raises the error
            return self._stored_dataset(_joined(directory.inside, name), directory.inherited)
        return None

    def _levels(self, directory: DirectoryNode, levels: Levels) -> dict[str, Array]:
        out = {}
        for name in levels.paths():
            found = self._stored_below(directory, name)
            stored = (*found.collections, *found.unsharded) if found is not None else ()
            if len(stored) != 1 or stored[0].array is None:
                break
            out[name] = stored[0].array
        return out

    def _set_content(self, directory: DirectoryNode, dataset: Dataset | None, since: int) -> None:
        """Combine a directory's own dataset with the items inherited from its parents."""
        path, here, inherited, own = directory.inside, None, directory.inherited, dataset or NOTHING_DESCRIBED
        documents: dict[str, bytes] = {}
        below: dict[str, list[tuple[tuple[str, ...], ShownItem]]] = {}
        items = [*inherited.below, *self._own(path, own)]
        for parts, item in items:
            if len(parts) == 1 and isinstance(item, bytes):
                # a document from a parent directory describes the whole, so it takes precedence
                documents.setdefault(parts[0], item)
            elif parts:
                below.setdefault(parts[0], []).append((parts[1:], item))
            elif here is None and isinstance(item, CollectionAt):
                here = item
            elif isinstance(item, CollectionAt):
                self.report(Problem(path, "a second sharded collection in the same directory"))
        for problem in own.problems:
            self.report(problem)
        if not (own.closed or own.hidden_entirely):
            # each member is a dataset for layouts; natively, a member need not have shards
            for name in self._members(directory):
                below.setdefault(name, [((), None)] if self.view is None else [])
        placed = [item for _, item in items if isinstance(item, CollectionAt) and item.shards == path]
        shards = tuple(p.collection.layers[0].format for p in placed if p.collection.shards is not None)
        inherited = inherited._replace(closed=inherited.closed or own.closed)
        if own.scope is not None:
            inherited = inherited._replace(scope=(own.scope, path))
        for c in own.unsharded:
            if not c.path and c.shards is None:
                inherited = inherited._replace(cells=(c.names, -1 if c.names.prefix else 0))
        # Without a dataset, a search for datasets below may have read very many documents.
        read = {at: found for at, found in self._reading.documents.items() if dataset is not None or at == path}
        mtime_ns = self.directory_mtime(path) if here else 0

        def install() -> None:
            chunks = self.trees.open(path, directory.shown, here, mtime_ns) if here else None
            directory.content = Content(dataset, chunks, documents, below, shards, inherited, read)

        self.renewals.keep(directory.path, since, install)

    def _own(self, path: str, dataset: Dataset) -> Iterator[tuple[tuple[str, ...], ShownItem]]:
        """Yield the collections, documents and images of a dataset with their paths relative to its directory."""
        for c in dataset.collections:
            yield _parts(c.path), CollectionAt(c, _joined(path, c.stored_at))
        for name, data in dataset.documents.items():
            yield _parts(name), data
        for at, image in dataset.images.items():
            yield _parts(at), image
        if dataset.scope is not None and not self.store.blind:  # the store may not have this directory yet
            yield _parts(dataset.scope.data), None
        if self.store.blind:
            for name in (*dataset.named, *(c.path for c in dataset.unsharded)):
                yield _parts(name), None

    def report(self, problem: Problem) -> None:
        """Record why a directory is not expanded, and log each problem once."""
        if problem not in self.problems:
            self.problems[problem] = None
            log.warning("%s: %s: %s", problem.path or "/", problem.consequence, problem.why)

    def mtime(self, path: str) -> int:
        """Return the modification time of a stored file in ns; 0 if it is unknown."""
        try:
            stat = self.store.entry(path).stat
        except OSError:
            return 0
        return stat.mtime_ns if stat else 0

    def document_mtime(self, path: str) -> int:
        """Return the modification time, in ns, of a generated or rewritten document."""
        if self.view is None and self.store.remote:
            with suppress(OSError):
                return self.store.open(path).stat().mtime_ns  # unlike `entry`, through obstore
            return 0
        return self.directory_mtime(path)

    def directory_mtime(self, path: str) -> int:
        """Return the modification time of a directory in ns: its own, or that of its nearest parent in the store."""
        if self.store.remote:
            return 0  # object stores have no directories
        while not (found := self.mtime(path)) and path:
            path = path.rpartition("/")[0]
        return found


def _in_codec(dataset: Dataset, codec: str) -> Dataset:
    """Return the dataset with a request to layouts to show all its arrays in this codec."""

    def asking(found: Iterable[Collection]) -> tuple[Collection, ...]:
        return tuple(replace(c, array=c.array and replace(c.array, codec=codec)) for c in found)

    return replace(dataset, collections=asking(dataset.collections), unsharded=asking(dataset.unsharded))


def _below(path: str, base: str) -> str:
    """Return the path relative to its ancestor `base`."""
    return path.removeprefix(base).lstrip("/")


def _document_names(formats: Sequence[Format]) -> list[str]:
    """Return the names of the metadata documents that these formats read, in order and without duplicates."""
    return list(dict.fromkeys(name for f in formats for name in f.documents))


def _joined(path: str, below: str) -> str:
    return "/".join([*_parts(path), *_parts(below)])


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in ("", "."))
