"""A job of `pack`, and the files of its source: chunk files, and other files, which are copied."""

from __future__ import annotations

import math
import os
from array import array as typed_array
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.formats.layouts import PACKED, join
from shardfs.formats.registry import creating_view
from shardfs.jobs.pack_arrays import ONLY_ONE, ArrayPlan, PackedArray, stray
from shardfs.jobs.pack_plan import ZARR3, PackOptions, PackPlan, has_zarr2
from shardfs.jobs.target import NOTES, JobState, JobTarget, is_zip
from shardfs.jobs.zip_target import ZipTarget
from shardfs.model.dataset import Problem
from shardfs.model.errors import UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, require_settled
from shardfs.storage.source_errors import opening
from shardfs.storage.store import OWN
from shardfs.vfs.discovery import NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from shardfs.model.blobs import Blob
    from shardfs.model.values import U64
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree


@dataclass(frozen=True, slots=True)
class PackJob(PackOptions):
    """What to pack, and how: hashable, and can be pickled."""

    def opened(self) -> Packing:
        """The opened source, once per process. Raises the errors of `Packing`."""
        return _packing(self)

    def state(self) -> JobState:
        """What to pack, and how, without the plan."""
        choices = {
            "chunks_per_shard": self.chunks_per_shard,
            "shard_size": self.shard_bytes,
            "array": sorted(self.arrays),
            "format": self.format,
            "transcode": self.transcode,
        }
        return JobState.of(PACK, self.source, choices)


@lru_cache(2)
def _packing(job: PackJob) -> Packing:
    return Packing(job)


def _tree(job: PackJob, layout: str) -> Tree:
    codec = PACKED if layout != NATIVE else None
    tree = job.source.open(layout=layout, skip_unsupported=True, may_be_empty=True, chunk_codec=codec)
    if layout == ZARR3:
        tree.datasets.shown_datasets.view = creating_view(ZARR3)  # unlike the view of a mount, it keeps all codecs
    return tree


@dataclass
class SourceSurvey:
    """All files of a source.

    Args:
        files: the number of other files, which are copied.
        problems: files that are not packed; `damaged` ones prevent that the job is finished.
        only_chunks: the arrays whose directories have no other files.
    """

    plans: list[ArrayPlan] = field(default_factory=list)
    files: int = 0
    problems: list[Problem] = field(default_factory=list)
    only_chunks: Set[str] = frozenset()


class Packing:
    """An opened job.

    Attributes:
        arrays: the arrays to pack, by path.
        documents: the documents of all datasets in the target, by path.

    Raise UnsupportedError, with all arrays and reasons, if an array cannot be packed; NotADatasetError if the source
    has no unsharded array.
    """

    target: JobTarget | ZipTarget
    """Set by `begin`."""

    def __init__(self, job: PackJob, plan_type: type[PackPlan] = PackPlan) -> None:
        tree = _tree(job, NATIVE)
        plan = plan_type(job, tree.store, translates=False)
        is_zarr2 = not tree.datasets.source.documents("") and has_zarr2(tree.store, "")
        if not is_zarr2:
            plan.add_datasets(tree)
        if plan.is_empty:
            plan = plan_type(job, tree.store, plan.skipped, translates=True)
            plan.add_translated(_tree(job, job.format or ZARR3))
        plan.require_complete()
        plan.correct_copies()
        self.job = replace(job, forms=tuple(sorted(plan.forms.items())))
        self.store: Store = tree.store
        self.arrays = plan.arrays
        self.documents = plan.documents
        self._hidden = plan.hidden
        self._skipped = plan.skipped
        self._homes: dict[str, list[PackedArray]] = {}  # by the directories of their shards
        for array in self.arrays.values():
            self._homes.setdefault(array.home, []).append(array)
        self._survey = SourceSurvey()

    def begin(self, *, new: bool) -> None:
        """Open the target for writing: see `JobTarget.begin` and `ZipTarget.begin`."""
        target = self.job.target
        documents = ((key, raw) for key, raw in self.documents.items() if not self._is_linked(key.rpartition("/")[0]))
        state = self.job.state().planned((path for path in self.arrays if not self._is_linked(path)), documents)
        if is_zip(target.url):
            self.target = ZipTarget.begin(target.url, state, self.documents)
        else:
            with opening(target.url):
                self.target = JobTarget.begin(target, state, new=new)

    def _is_linked(self, path: str) -> bool:
        """Whether a directory is behind a symbolic link. The job cannot end before that link is removed."""
        store = self.store
        return isinstance(store, LocalStore) and os.path.realpath(store.path(path)) != store.path(path)

    # ---- files ----

    def document_names(self) -> set[str]:
        """The paths of documents in the source and in the target. A document need not exist in both."""
        return self._hidden.union(self.documents)

    def survey(self) -> SourceSurvey:
        """List the source."""
        survey, chunks = SourceSurvey(), {path: typed_array("Q") for path in self.arrays}
        for path, why in self._skipped.items():
            if not self.job.arrays or path in self.job.arrays:
                survey.problems.append(Problem(path, f"was not packed, and keeps its chunk files: {why}"))
        with_others = set[str]()
        for array, name, key in self._walk("", None, self._names("")):
            if key.endswith("/"):
                why = "is a directory, but has the name of a chunk; move it out of the source"
                survey.problems.append(Problem(key[:-1], why, damaged=True))
            elif array is not None and (number := array.number(name)) is not None:
                chunks[array.path].append(number)
            elif (problem := self._problem_of(array, name, key)) is None:
                survey.files += 1
                if array is not None:
                    with_others.add(array.path)
            else:
                survey.problems.append(problem)
        for path in self.arrays:
            self._add_plan(survey, self.arrays[path], np.frombuffer(chunks.pop(path), np.uint64))
            while path:
                path = path.rpartition("/")[0]
                with_others.add(path)
        survey.only_chunks = self.arrays.keys() - with_others
        self._survey = survey
        return survey

    def _add_plan(self, survey: SourceSurvey, array: PackedArray, numbers: U64) -> None:
        missing = math.prod(array.source.layers[0].format.grid) - len(numbers)
        if array.source.filler is not None and missing:
            why = f"{missing} chunks are missing, and the format of the target cannot express their fill value"
            raise UnsupportedError(f"nothing was packed: {array.path}: {why}")
        bad = array.incomplete(numbers)
        survey.problems += [Problem(join(array.path, str(n)), ONLY_ONE, damaged=True) for n in bad.tolist()]
        survey.plans.append(ArrayPlan.of(array, numbers[~np.isin(numbers, bad)] if len(bad) else numbers))

    def other_files(self) -> Iterator[str]:
        """Yield the paths of all files that are neither documents of datasets nor chunks of packed arrays."""
        for array, name, key in self._walk("", None, self._names(""), self._survey.only_chunks):
            is_chunk = array is not None and array.number(name) is not None
            if not is_chunk and not key.endswith("/") and self._problem_of(array, name, key) is None:
                yield key

    def _problem_of(self, array: PackedArray | None, name: str, key: str) -> Problem | None:
        """The problem of another file, which has the name of a chunk or a shard; None for all other names."""
        if array is not None and (problem := stray(array, name, key)) is not None:
            return problem
        home = key
        while home:
            home = home.rpartition("/")[0]
            below = key.removeprefix(home).lstrip("/")
            if any(a.target.layers[0].format.shard_of(below) is not None for a in self._homes.get(home, ())):
                why = "is no chunk of the array, but has the name of a shard; rename it, or move it out of the source"
                return Problem(key, why, damaged=True)
        return None

    def _walk(
        self,
        path: str,
        array: PackedArray | None,
        names: Iterable[tuple[str, bool]],
        skipped: Set[str] = frozenset(),
    ) -> Iterator[tuple[PackedArray | None, str, str]]:
        """Yield all files but documents: the array of whose directory it is, the path in this directory, the path.

        Also yield directories with the names of chunks, whose paths end in a slash.
        """
        if path in skipped:
            return
        if array is None and isinstance(self.store, LocalStore):
            require_settled(self.store.root, path)
        array = self.arrays.get(path, array)
        inside = path if array is None else path.removeprefix(array.path).lstrip("/")
        above, name_above = (f"{part}/" if part else "" for part in (path, inside))
        directories = []
        for name, directory in names:
            key = above + name
            if not directory:
                if key not in self.documents and key not in self._hidden:
                    yield array, name_above + name, key
            elif array is not None and array.number(name_above + name) is not None:
                yield array, name_above + name, f"{key}/"
            elif array is None and key in self._hidden and not any(is_in(path, key) for path in self.arrays):
                continue
            elif self.store.remote:
                directories.append(key)
            else:
                yield from self._walk(key, array, self._names(key), skipped)
        for key, entries in load_ahead(self.store.read_ahead, self._names, directories):
            yield from self._walk(key, array, entries, skipped)

    def _names(self, path: str) -> Iterable[tuple[str, bool]]:
        """The names in a directory, and whether each is a directory itself. Links of a local source are files."""
        if isinstance(self.store, LocalStore):
            return self.store.names(path)
        return [(entry.name, entry.directory) for entry in self.store.scan(path)]

    def blob(self, key: str) -> Blob:
        """Open a file of the source. It does not stay open in the store."""
        return self.store.open_once(key) if isinstance(self.store, LocalStore) else self.store.open(key)

    def finish(self) -> None:
        """Write all documents, and end the job."""
        documents = ((key, partial(self.documents.__getitem__, key)) for key in self.documents)
        notes = (note_of(plan.array.path, shard) for plan in self._survey.plans for shard in plan.shards.tolist())
        self.target.finish(documents, notes)


def note_of(array: str, shard: int) -> str:
    """The key of the note in the target that a shard is finished: see `JobTarget.note_task`."""
    return join(NOTES, join(array, f"{OWN}-shards-{shard}"))
