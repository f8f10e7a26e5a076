"""A job of `pack`, and the files of its source: chunk files, and other files, which are copied."""

from __future__ import annotations

import math
import os
from array import array as typed_array
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.formats.layouts import PACKED, join
from shardfs.jobs.copying import OpenedJob, Survey
from shardfs.jobs.pack_arrays import ONLY_ONE, ArrayPlan, PackedArray, stray
from shardfs.jobs.pack_plan import ZARR3, PackOptions, Planner, has_zarr2
from shardfs.jobs.target import JobState
from shardfs.model.dataset import Problem
from shardfs.model.errors import UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, require_no_job_in
from shardfs.vfs.discovery import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Set

    from shardfs.model.blobs import Blob
    from shardfs.model.values import U64
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree


@dataclass(frozen=True, slots=True)
class PackJob(PackOptions):
    """What to pack, and how: hashable, and can be pickled."""

    def opened(self) -> Packing:
        """Return the opened job, the same one at each call in a process. Raise the errors of `Packing`."""
        return _packing(self)


@lru_cache(2)
def _packing(job: PackJob) -> Packing:
    return Packing(job)


def _tree(job: PackJob, layout: str) -> Tree:
    codec = PACKED if layout != NATIVE else None
    return job.source.open(layout=layout, skip_unsupported=True, may_be_empty=True, chunk_codec=codec)


class Packing(OpenedJob):
    """An opened job of `pack`.

    Attributes:
        store: the store of the source.
        plan: the arrays to pack, and the documents of the target.

    The constructor reads all documents of the source. Raise UnsupportedError, with all arrays and reasons, if an array
    cannot be packed; NotADatasetError if the source has no unsharded array; OSError if it cannot be read.
    """

    job: PackJob

    def __init__(self, job: PackJob, planner_type: type[Planner] = Planner) -> None:
        tree = _tree(job, NATIVE)
        self.store: Store = tree.store
        planner = planner_type(job, self.store, translates=False)
        if tree.datasets.source.documents("") or not has_zarr2(self.store, ""):
            planner.add_datasets(tree)
        if planner.is_empty:
            planner = planner_type(job, self.store, planner.plan.skipped, translates=True)
            planner.add_translated(_tree(job, job.format or ZARR3))
        self.plan = planner.complete()
        super().__init__(replace(job, forms=tuple(sorted(self.plan.forms.items()))))
        self._homes: dict[str, list[PackedArray]] = {}  # by the directories of their shards
        for array in self.plan.arrays.values():
            self._homes.setdefault(array.home, []).append(array)
        self._only_chunks: Set[str] = frozenset()  # the arrays whose directories have no other files

    def _state(self) -> JobState:
        """Return what the job makes, without what is behind symbolic links: it cannot end before these are removed."""
        job = self.job
        plan = self.plan
        choices = {
            "chunks_per_shard": job.chunks_per_shard,
            "shard_size": job.shard_bytes,
            "array": sorted(job.arrays),
            "format": job.format,
            "transcode": job.transcode,
        }
        documents = ((key, raw) for key, raw in plan.documents.items() if not self._is_linked(key.rpartition("/")[0]))
        arrays = (path for path in plan.arrays if not self._is_linked(path))
        return JobState.from_choices(PACK, job.source, choices).planned(arrays, documents)

    def _is_linked(self, path: str) -> bool:
        """Whether a directory is behind a symbolic link."""
        store = self.store
        return isinstance(store, LocalStore) and os.path.realpath(store.path(path)) != store.path(path)

    # ---- files ----

    def document_names(self) -> set[str]:
        """Return the paths that documents of the source and of the target have or may have.

        A path may be in only one of them, or in neither.
        """
        return self.plan.hidden.union(self.plan.documents)

    def survey(self) -> Survey[ArrayPlan]:
        """List the source, and return what it has. Raise UnsupportedError if the target cannot express missing chunks.

        Raise OSError if a directory cannot be listed, BusyError if one has an unfinished job in place.
        """
        arrays, survey = self.plan.arrays, Survey[ArrayPlan]()
        numbers = {path: typed_array("Q") for path in arrays}
        for path, why in self.plan.skipped.items():
            if not self.job.arrays or path in self.job.arrays:
                survey.problems.append(Problem(path, f"was not packed, and keeps its chunk files: {why}"))
        with_others = set[str]()
        for array, name, key in self._walk("", None, self._listed_names("")):
            if key.endswith("/"):
                why = "is a directory, but has the name of a chunk; move it out of the source"
                survey.problems.append(Problem(key[:-1], why, damaged=True))
            elif array is not None and (number := array.number(name)) is not None:
                numbers[array.path].append(number)
            elif (problem := self._problem_of(array, name, key)) is None:
                survey.files += 1
                if array is not None:
                    with_others.add(array.path)
            else:
                survey.problems.append(problem)
        for path, array in arrays.items():
            self._add_plan(survey, array, np.frombuffer(numbers[path], np.uint64))
            while path:
                path = path.rpartition("/")[0]
                with_others.add(path)
        self._only_chunks = arrays.keys() - with_others
        return survey

    def _add_plan(self, survey: Survey[ArrayPlan], array: PackedArray, numbers: U64) -> None:
        missing = math.prod(array.source.layers[0].format.grid) - len(numbers)
        if array.source.filler is not None and missing:
            why = f"{missing} chunks are missing, and the format of the target cannot express their fill value"
            raise UnsupportedError(f"nothing was packed: {array.path}: {why}")
        bad = array.incomplete(numbers)
        survey.problems += [Problem(join(array.path, str(n)), ONLY_ONE, damaged=True) for n in bad.tolist()]
        survey.plans.append(ArrayPlan.from_chunks(array, numbers[~np.isin(numbers, bad)] if len(bad) else numbers))

    def other_files(self) -> Iterator[str]:
        """Yield the paths of all files that are neither documents of datasets nor chunks of packed arrays.

        After `survey`, directories that have only chunks are not listed again.
        """
        for array, name, key in self._walk("", None, self._listed_names(""), self._only_chunks):
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
            require_no_job_in(self.store.root, path)
        array = self.plan.arrays.get(path, array)
        inside = path if array is None else path.removeprefix(array.path).lstrip("/")
        above, name_above = (f"{part}/" if part else "" for part in (path, inside))
        directories = []
        for name, directory in names:
            key = above + name
            if not directory:
                if key not in self.plan.documents and key not in self.plan.hidden:
                    yield array, name_above + name, key
            elif array is not None and array.number(name_above + name) is not None:
                yield array, name_above + name, f"{key}/"
            elif array is None and key in self.plan.hidden and not any(is_in(path, key) for path in self.plan.arrays):
                continue
            elif self.store.remote:
                directories.append(key)
            else:
                yield from self._walk(key, array, self._listed_names(key), skipped)
        for key, entries in load_ahead(self.store.read_ahead, self._listed_names, directories):
            yield from self._walk(key, array, entries, skipped)

    def _listed_names(self, path: str) -> Iterable[tuple[str, bool]]:
        """The names in a directory, and whether each is a directory itself. Links of a local source are files."""
        if isinstance(self.store, LocalStore):
            return self.store.names(path)
        return [(entry.name, entry.directory) for entry in self.store.scan(path)]

    def blob(self, key: str) -> Blob:
        """Return a file of the source, which does not stay open in the store. Raise OSError if it cannot be opened."""
        return self.store.open_once(key) if isinstance(self.store, LocalStore) else self.store.open(key)

    def documents(self) -> Iterable[tuple[str, Callable[[], bytes]]]:
        return ((key, partial(self.plan.documents.__getitem__, key)) for key in self.plan.documents)
