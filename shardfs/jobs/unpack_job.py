"""What `unpack` makes of a sharded source: all files that a mount shows. Chunks are found in the shards."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.formats.layouts import join
from shardfs.formats.registry import format_of
from shardfs.jobs.target import NOTES, JobState, JobTarget
from shardfs.model.dataset import Problem
from shardfs.model.errors import CorruptShardError, UnsupportedError, message
from shardfs.model.grid import unravel_many
from shardfs.model.listing import REST
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import UNPACK, require_settled
from shardfs.storage.source_errors import opening
from shardfs.storage.store import OWN
from shardfs.vfs.discovery import NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.formats.format import Format
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.blobs import Blob
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import U64
    from shardfs.storage.store import Store
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.tree import Tree

MOST_OBJECTS = 256
"""Shards of one task if each chunk is an object of its own."""

MOST_FILLED = 4096
"""Chunks of one task that makes the chunks that are not stored."""


@dataclass(frozen=True, slots=True)
class UnpackJob:
    """What to unpack, and how: hashable, and can be pickled.

    Args:
        layout, chunk_codec, skip_unsupported: the options of the mount that shows what is made.
        arrays: the directories of the documents of the arrays to unpack, in the native layout; () for all arrays.
    """

    source: JobSource
    target: JobSource
    layout: str = NATIVE
    chunk_codec: str | None = None
    skip_unsupported: bool = False
    arrays: tuple[str, ...] = ()

    def opened(self) -> Unpacking:
        """The opened source, once per process. Raises the errors of `Unpacking`."""
        return _unpacking(self)

    def state(self) -> JobState:
        """What to unpack, and how, without the plan."""
        choices = {
            "layout": self.layout,
            "chunk_codec": self.chunk_codec,
            "unsupported=skip": self.skip_unsupported,
            "array": sorted(self.arrays),
        }
        return JobState.of(UNPACK, self.source, choices)


@lru_cache(2)
def _unpacking(job: UnpackJob) -> Unpacking:
    return Unpacking(job)


class ChunkGroup(NamedTuple):
    """Chunks of a collection that one task writes.

    Args:
        path: the directory where a mount shows the collection.
        number: distinguishes the group from other groups of the collection.
        shards: the outermost shards, 8 bytes each.
        filled: instead of shards, the numbers of chunks in the shown grid that the layout may have to fill.
    """

    path: str
    number: int
    shards: bytes = b""
    filled: range = range(0)

    @property
    def note(self) -> str:
        """The key of the note in the target that the group is finished: see `JobTarget.note_task`."""
        return join(NOTES, join(self.path, f"{OWN}-{'fill' if self.filled else 'shards'}-{self.number}"))

    def coords(self, chunks: ChunkDirs) -> U64:
        """The coordinates of `filled`."""
        names = chunks.collection.names
        return names.coords_many(unravel_many(np.array(self.filled, np.uint64), names.dims))


class CollectionPlan(NamedTuple):
    """A collection to unpack: its outermost shards, ascending, and the number of chunks if absent ones are filled."""

    path: str
    shards: U64
    shards_per_task: int
    filled: int

    def groups(self) -> Iterator[ChunkGroup]:
        """Yield what each task writes. The groups are the same in every run while no shard is added or removed."""
        numbers = self.shards // np.uint64(self.shards_per_task)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] + np.uint64(1)))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), None], strict=False):
            yield ChunkGroup(self.path, int(numbers[start]), self.shards[start:stop].tobytes())
        for i, first in enumerate(range(0, self.filled, MOST_FILLED)):
            yield ChunkGroup(self.path, i, filled=range(first, min(first + MOST_FILLED, self.filled)))


class ShownFile(NamedTuple):
    """A file that a mount shows and that is no chunk."""

    path: str
    is_document: bool


@dataclass
class ShownSurvey:
    """All that a mount of the source shows.

    Args:
        documents: the paths of metadata documents.
        files: the number of other files, which are copied.
        problems: what is not unpacked; `damaged` ones prevent that the job is finished.
    """

    plans: list[CollectionPlan] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    files: int = 0
    problems: list[Problem] = field(default_factory=list)

    def groups(self) -> Iterator[ChunkGroup]:
        """Yield the groups of all collections."""
        return chain.from_iterable(plan.groups() for plan in self.plans)


class Unpacking:
    """An opened job. `tree` is what a mount shows.

    Raise NotADatasetError if the source has no shards, and UnsupportedError if the layout cannot show an array, or if
    `arrays` names something else.
    """

    target: JobTarget
    """Set by `begin`."""

    def __init__(self, job: UnpackJob) -> None:
        self.job = job
        options = {"layout": job.layout, "chunk_codec": job.chunk_codec, "skip_unsupported": job.skip_unsupported}
        self._survey = ShownSurvey()
        self.tree: Tree = job.source.open(may_be_empty=True, **options)
        self.store: Store = self.tree.store
        datasets = self.tree.datasets
        if job.arrays:
            source = datasets.source
            source.formats = [_Selected(f, frozenset(job.arrays)) for f in source.formats]
            self._require_arrays()
        names = (*datasets.layout_documents, *datasets.source.document_names)
        self._document_names = {name.rpartition("/")[2] for name in names}
        self.tree.survey.require_dataset()

    def _require_arrays(self) -> None:
        if self.job.layout != NATIVE:
            raise UnsupportedError("arrays can be chosen in the native layout only; omit --array or --layout")
        for path in self.job.arrays:
            try:
                dataset = self.tree.directories.content(self.tree.resolve(path).number).dataset
            except FileNotFoundError:
                dataset = None
            if dataset is None or not dataset.collections:
                raise UnsupportedError(f"nothing was unpacked: {path}: no sharded array has its document there")

    def require_shown(self) -> None:
        """Open all directories, unless nothing is refused. Raise UnsupportedError if the layout cannot show one."""
        if self.job.layout != NATIVE and not self.job.skip_unsupported:
            for _ in self.tree.directories.walk():
                pass

    def begin(self, *, new: bool) -> None:
        """Open the target for writing: see `JobTarget.begin`. A new job needs the `survey`."""
        state = self.job.state()
        if new:
            arrays = (plan.path for plan in self._survey.plans)
            state = state.planned(arrays, ((key, self.document(key)) for key in self._survey.documents))
        with opening(self.job.target.url):
            self.target = JobTarget.begin(self.job.target, state, new=new)

    # ---- what a mount shows ----

    def survey(self) -> ShownSurvey:
        """List the source, but no chunks."""
        found = ShownSurvey()
        for item in self._walk(""):
            if isinstance(item, Problem):
                found.problems.append(item)
            elif not isinstance(item, ShownFile):
                found.plans.append(self._plan(item, found.problems))
            elif not item.is_document:
                found.files += 1
            elif (problem := self._problem_of(item.path)) is None:
                found.documents.append(item.path)
            else:
                found.problems.append(problem)
        damaged = {p.path for p in found.problems}
        found.problems += [p for p in self.tree.problems() if p.path not in damaged]
        self._survey = found
        return found

    def _plan(self, chunks: ChunkDirs, problems: list[Problem]) -> CollectionPlan:
        outermost, collection = chunks.shards.outermost, chunks.collection
        shards, faults = outermost.source.survey()
        problems += [Problem(fault.key, fault.why, damaged=True) for fault in faults]
        filled = 0 if collection.filler is None else int(np.prod(collection.names.dims, dtype=object))
        per = MOST_OBJECTS if isinstance(outermost.format, Unsharded) else 1
        return CollectionPlan(chunks.path, shards, per, filled)

    def require_verbatim(self, plans: Sequence[CollectionPlan]) -> None:
        """Raise UnsupportedError, with all reasons, unless `plans` turn shards into files with the bytes of chunks."""
        refused = []
        for plan in plans:
            chunks = self.tree.collection(plan.path)
            if chunks.collection.transform is not None:
                refused.append(f"{plan.path or '/'}: its chunks would change")
            elif isinstance(chunks.shards.outermost.format, Unsharded):
                refused.append(f"{plan.path or '/'}: has no shards, and its files would get other names")
            elif plan.filled and plan.filled > sum(len(found.coords) for found in chunks.shards.stored_in(plan.shards)):
                refused.append(f"{plan.path or '/'}: its missing chunks would become files")
        if refused:
            why = f"in place, the layout {self.job.layout} must keep all chunks unchanged; unpack to another DEST"
            raise UnsupportedError(f"nothing was unpacked: {'; '.join([*refused, why])}")

    def _problem_of(self, document: str) -> Problem | None:
        """The problem of a document that cannot be read."""
        try:
            self.tree.resolve(document)
        except (CorruptShardError, OSError) as e:
            consolidated = document.rpartition("/")[2] in self.tree.datasets.consolidated_names
            if consolidated and isinstance(e, FileNotFoundError):  # it would be too long
                return Problem(document, f"was left out: {message(e)}")
            return Problem(document, message(e), damaged=True)
        return None

    def other_files(self) -> Iterator[str]:
        """Yield the paths of all files that are neither documents nor chunks."""
        return (item.path for item in self._walk("") if isinstance(item, ShownFile) and not item.is_document)

    def _walk(self, path: str) -> Iterator[ChunkDirs | ShownFile | Problem]:
        """Yield what a mount shows in a directory and below: files, and collections instead of their chunks."""
        try:
            number = self.tree.resolve(path).number
            is_virtual = self.tree.is_virtual(number)
            if isinstance(self.store, LocalStore) and not is_virtual:
                require_settled(self.store.root, path)
            chunks = self.tree.chunk_tree(number) if is_virtual else self.tree.directories.content(number).chunks
            if chunks is not None and not is_virtual:
                yield chunks
            for batch in self.tree.scan(number, REST):
                rows = zip(batch.names.tolist(), batch.numbers.tolist(), batch.directories.tolist(), strict=True)
                for name, child, directory in rows:
                    yield from self._shown(join(path, os.fsdecode(name)), child, directory=directory)
            if chunks is not None and (is_virtual or chunks.root is None):
                for entry in self._stored_entries(chunks, number if is_virtual else None):
                    if isinstance(entry, Problem):
                        yield entry
                    else:
                        yield from self._walk(join(path, entry))
        except (CorruptShardError, OSError) as e:
            yield Problem(path, message(e), damaged=True)

    def _shown(self, path: str, number: int, *, directory: bool) -> Iterator[ChunkDirs | ShownFile | Problem]:
        stored = self._stored_path(path, number)
        if not directory:
            yield ShownFile(path, stored is None or path.rpartition("/")[2] in self._document_names)
        elif stored and isinstance(self.store, LocalStore) and os.path.islink(self.store.path(stored)):
            yield Problem(path, "is a symbolic link to a directory; replace it by the directory", damaged=True)
        else:
            yield from self._walk(path)

    def _stored_path(self, path: str, number: int) -> str | None:
        """The path in the store; None for a document of the layout. For a file that cannot be opened, any path."""
        with suppress(FileNotFoundError):  # its number is unknown until it is looked up
            return self.tree.directories.stored_path(number)
        try:
            return self.tree.directories.stored_path(self.tree.resolve(path).number)
        except (CorruptShardError, OSError):
            return path

    def _stored_entries(self, chunks: ChunkDirs, parent: int | None) -> Iterator[str | Problem]:
        """Yield the directories of chunks that are stored, because files that are no chunks may be there.

        Also yield problems of stored files with the names of chunks that are no shards: a mount does not show them.
        """
        place, source = chunks.numbers.place(parent), chunks.shards.outermost.source
        path, single_name = chunks.directory_path(place), chunks.collection.layers[0].single_name
        for entry in self.store.scan(path):
            number = chunks.number(parent, os.fsencode(entry.name)) if entry.directory else None
            if number is not None and number - chunks.first < chunks.directories:
                yield entry.name
            elif (
                chunks.reserved(place.level, entry.name) and source.number(single_name(join(path, entry.name))) is None
            ):
                why = "was left out: it has the name of a chunk, but is no shard of the array"
                yield Problem(join(path, entry.name), why)

    # ---- the target ----

    def blob(self, path: str) -> Blob:
        """Open a file that is shown unchanged. It does not stay open in the store."""
        stored = self.tree.directories.stored_path(self.tree.resolve(path).number)
        if stored is None:
            raise FileNotFoundError(path)
        blob = self.store.open(stored)
        self.store.reopen(stored)
        return blob

    def finish(self) -> None:
        """Write all documents, and end the job."""
        documents = ((path, partial(self.document, path)) for path in self._survey.documents)
        self.target.finish(documents, (group.note for group in self._survey.groups()))

    def document(self, path: str) -> bytes:
        """The bytes of a document in the target."""
        found = self.tree.resolve(path)
        raw = bytes(self.tree.read(found.number, 0, found.size))
        directory, _, name = path.rpartition("/")
        dataset = self.tree.directories.content(self.tree.resolve(directory).number).dataset
        if not self.job.arrays or dataset is None:
            return raw
        return self._with_sharded(format_of(dataset.format), directory, name, raw)

    def _with_sharded(self, format: Format, path: str, name: str, raw: bytes) -> bytes:
        """The document of a group whose copies of documents describe arrays that stay sharded."""
        stored = {}
        for below in format.references(path, name, raw):
            directory, _, document = join(path, below).rpartition("/")
            raw_below = self.tree.datasets.source.documents(directory).get(document)
            if raw_below and directory not in self.job.arrays:
                stored[below] = raw_below
        return format.edit(path, stored, name, raw)[name] if stored else raw


class _Selected:
    """A format whose datasets are sharded in the directories `arrays` only; others are shown as they are stored."""

    def __init__(self, format: Format, arrays: frozenset[str]) -> None:
        self._format, self._arrays = format, arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._format, name)

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """See `Format.open`."""
        found = self._format.open(path, documents)
        if found is not None and found.scope is not None:
            raise UnsupportedError(f"{path or '/'}: single arrays of this format cannot be unpacked; omit --array")
        if found is None or path in self._arrays or not found.collections:
            return found
        return replace(found, collections=(), documents={}, hidden=frozenset(), rewriter=None)

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        """See `Format.open_file`."""
        return self._format.open_file(path, blob) if path in self._arrays else None
