"""What `unpack` makes of a sharded source: all files that a mount shows. Chunks are found in the shards."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.formats.layouts import join
from shardfs.jobs.copying import OpenedJob, Survey
from shardfs.jobs.target import JobState
from shardfs.model.dataset import Problem
from shardfs.model.errors import CorruptShardError, message
from shardfs.model.listing import REST
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import UNPACK, require_no_job_in
from shardfs.vfs.discovery import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.blobs import Blob
    from shardfs.model.values import U64
    from shardfs.storage.store import Store
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.tree import Tree

MOST_OBJECTS = 256
"""Shards of one task if each chunk is an object of its own."""


@dataclass(frozen=True, slots=True)
class UnpackJob:
    """What to unpack, and how: hashable, and can be pickled.

    Args:
        layout, chunk_codec, skip_unsupported: the options of the mount that shows what is made.
    """

    source: JobSource
    target: JobSource
    layout: str = NATIVE
    chunk_codec: str | None = None
    skip_unsupported: bool = False

    def opened(self) -> Unpacking:
        """Return the opened job, the same one at each call in a process. Raise the errors of `Unpacking`."""
        return _unpacking(self)


@lru_cache(2)
def _unpacking(job: UnpackJob) -> Unpacking:
    return Unpacking(job)


class CollectionPlan(NamedTuple):
    """A collection to unpack.

    Args:
        path: the directory where a mount shows the collection.
        shards: the numbers of its outermost shards (n,), ascending.
        shards_per_task: the most shards of one task.
        filled: the number of chunks of the shown grid if the layout fills absent ones; else 0.
    """

    path: str
    shards: U64
    shards_per_task: int
    filled: int

    @property
    def files(self) -> int:
        """The number of files of the source: one for each shard."""
        return len(self.shards)


class ShownFile(NamedTuple):
    """A file that a mount shows and that is no chunk. `is_document`: it is a metadata document, or the layout's."""

    path: str
    is_document: bool


@dataclass
class ShownSurvey(Survey[CollectionPlan]):
    """All that a mount of the source shows. `documents`: the paths of metadata documents."""

    documents: list[str] = field(default_factory=list)


class Unpacking(OpenedJob):
    """An opened job of `unpack`.

    Attributes:
        tree: what a mount of the source shows.
        store: the store of the source.

    The constructor raises NotADatasetError if the source has no shards, and the errors of `open_tree`.
    """

    job: UnpackJob

    def __init__(self, job: UnpackJob) -> None:
        super().__init__(job)
        options = {"layout": job.layout, "chunk_codec": job.chunk_codec, "skip_unsupported": job.skip_unsupported}
        self._survey: ShownSurvey | None = None
        self.tree: Tree = job.source.open(may_be_empty=True, **options)
        self.store: Store = self.tree.store
        names = (*self.tree.datasets.layout_documents, *self.tree.datasets.source.document_names)
        self._document_names = {name.rpartition("/")[2] for name in names}
        self.tree.survey.require_dataset()

    def _require_shown(self) -> None:
        """Open all directories, unless nothing is refused. Raise UnsupportedError if the layout cannot show one."""
        if self.job.layout != NATIVE and not self.job.skip_unsupported:
            for _ in self.tree.directories.walk():
                pass

    def _state(self) -> JobState:
        """Return what the job makes. A worker does not list the source, so it does not know the plan."""
        job = self.job
        choices = {
            "layout": job.layout,
            "chunk_codec": job.chunk_codec,
            "unsupported=skip": job.skip_unsupported,
        }
        state = JobState.from_choices(UNPACK, job.source, choices)
        if self._survey is None:
            return state
        arrays = (plan.path for plan in self._survey.plans)
        return state.planned(arrays, ((key, make()) for key, make in self.documents()))

    # ---- what a mount shows ----

    def survey(self) -> ShownSurvey:
        """List what a mount shows, but no chunks. Raise UnsupportedError if the layout cannot show an array.

        What cannot be read, or may not be listed, is a problem of the survey, `damaged`. Names that are left out are
        problems, too. Raise the other errors of listing shards.
        """
        self._require_shown()
        survey = ShownSurvey()
        for item in self._walk(""):
            if isinstance(item, Problem):
                survey.problems.append(item)
            elif not isinstance(item, ShownFile):
                survey.plans.append(self._plan(item, survey.problems))
            elif not item.is_document:
                survey.files += 1
            elif (problem := self._problem_of(item.path)) is None:
                survey.documents.append(item.path)
            else:
                survey.problems.append(problem)
        damaged = {p.path for p in survey.problems}
        survey.problems += [p for p in self.tree.problems() if p.path not in damaged]
        self._survey = survey
        return survey

    def _plan(self, chunks: ChunkDirs, problems: list[Problem]) -> CollectionPlan:
        outermost = chunks.shards.outermost
        collection = chunks.collection
        try:
            shards, faults = outermost.source.survey()
        except PermissionError as e:  # the array stays in the plan, so that the job can be repeated
            if self.store.remote:
                raise
            shards, faults = np.zeros(0, np.uint64), [CorruptShardError("", chunks.path, message(e))]
        problems += [Problem(fault.key, fault.why, damaged=True) for fault in faults]
        filled = 0 if collection.filler is None else int(np.prod(collection.names.dims, dtype=object))
        per = MOST_OBJECTS if isinstance(outermost.format, Unsharded) else 1
        return CollectionPlan(chunks.path, shards, per, filled)

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
        """Yield the paths of all files that are neither documents nor chunks, as a mount shows them."""
        return (item.path for item in self._walk("") if isinstance(item, ShownFile) and not item.is_document)

    def _walk(self, path: str) -> Iterator[ChunkDirs | ShownFile | Problem]:
        """Yield what a mount shows in a directory and below: files, and collections instead of their chunks."""
        try:
            number = self.tree.resolve(path).number
            is_virtual = self.tree.is_virtual(number)
            if isinstance(self.store, LocalStore) and not is_virtual:
                require_no_job_in(self.store.root, path)
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
        key = self._stored_path(path, number)
        if not directory:
            yield ShownFile(path, key is None or path.rpartition("/")[2] in self._document_names)
        elif key and isinstance(self.store, LocalStore) and os.path.islink(self.store.path(key)):
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
        place, source = chunks.numbers.position(parent), chunks.shards.outermost.source
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
        """Return an opened file that is shown unchanged, by its shown path. It does not stay open in the store.

        Raise OSError, FileNotFoundError for a file that the layout makes.
        """
        key = self.tree.directories.stored_path(self.tree.resolve(path).number)
        if key is None:
            raise FileNotFoundError(path)
        blob = self.store.open(key)
        self.store.reopen(key)
        return blob

    def documents(self) -> Iterable[tuple[str, Callable[[], bytes]]]:
        survey = self._survey or self.survey()
        return ((path, partial(self._document, path)) for path in survey.documents)

    def _document(self, path: str) -> bytes:
        attributes = self.tree.resolve(path)
        return bytes(self.tree.read(attributes.number, 0, attributes.size))
