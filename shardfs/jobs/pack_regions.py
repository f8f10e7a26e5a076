"""`shardfs pack --regions`: puts chunk files into the existing shards of a dataset, such as recomputed chunks.

The public function is `shardfs.pack`. Only the chunks that a file of regions names are replaced, as a writable mount of
the target would replace them: the shard gets the new chunks and a new index, and keeps all other bytes.
"""

from __future__ import annotations

import math
from array import array as typed_array
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shardfs.config.options import Options
from shardfs.jobs.copying import failure, require_idle
from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.regions import Box, ChunkRegions, read_expected
from shardfs.jobs.runs import PackReport, Run
from shardfs.jobs.shard_replacer import ChunksPut, ShardReplacer
from shardfs.jobs.shared_work import Task, Unit
from shardfs.model.dataset import Problem
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.grid import ravel, ravel_many, unravel, unravel_many
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import bytes_of, size_of
from shardfs.shards import rewriting
from shardfs.storage.blob_views import READ_ONLY_PAIR
from shardfs.storage.source_errors import opening
from shardfs.storage.source_locks import journal_directory

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from shardfs.jobs.pack_arrays import ArrayPlan, PackedArray
    from shardfs.jobs.pack_job import PackJob
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Bool, Coords


@dataclass
class NamedChunks:
    """The chunks of one array that a file of regions names: 8 bytes for each single one, and boxes of several."""

    regions: ChunkRegions
    single: typed_array[int] = field(default_factory=lambda: typed_array("Q"))
    boxes: list[Box] = field(default_factory=list)

    @property
    def files(self) -> int:
        """The number of these chunks. Several rows may name the same chunk."""
        return len(self.single) + sum(math.prod(box.dims) for box in self.boxes)

    def add(self, box: Box) -> None:
        n = math.prod(box.dims)
        if n == 1:
            self.single.append(ravel(box.first, self.regions.grid))
        elif n:
            self.boxes.append(box)

    def among(self, stored: U64) -> tuple[Bool, list[Problem]]:
        """Which of these chunks are named; and a problem for each named chunk or box that is not complete there.

        Args:
            stored: the numbers of chunks, ascending.
        """
        single = np.frombuffer(self.single, np.uint64)
        named = np.isin(stored, single)
        problems = [self._lacking(number) for number in np.setdiff1d(single, stored).tolist()]
        for box in self.boxes:
            last = tuple(stop - 1 for stop in box.stop)
            ends = np.array([ravel(cell, self.regions.grid) for cell in (box.first, last)], np.uint64)
            low, high = int(stored.searchsorted(ends[0])), int(stored.searchsorted(ends[1], "right"))
            cells = unravel_many(stored[low:high], self.regions.grid)
            inside = (cells >= np.array(box.first, np.uint64)).all(axis=1)
            inside &= (cells < np.array(box.stop, np.uint64)).all(axis=1)
            named[low:high] |= inside
            if (found := int(np.count_nonzero(inside))) < math.prod(box.dims):
                problems.append(self._incomplete(box, found))
        return named, problems

    def _lacking(self, number: int) -> Problem:
        cell = unravel(number, self.regions.grid)
        row = self.regions.box_row(Box(cell, tuple(c + 1 for c in cell)), "", "")
        return Problem(row.chunk, "was left unchanged, because the source has no file for it", damaged=True)

    def _incomplete(self, box: Box, found: int) -> Problem:
        row = self.regions.box_row(box, "", "")
        where = f"from {row.start} to {row.stop}" if row.start else "of the file of regions"
        why = f"the source has files for {found} of the {math.prod(box.dims)} chunks {where}; the others were left"
        return Problem(row.collection, f"{why} unchanged", damaged=True)


@dataclass(frozen=True, slots=True)
class ChunksOfShard(Unit["Repacking", PackReport]):
    """Chunk files to put into one shard, by the coordinates of their chunks."""

    array: PackedArray
    shard: int
    files: Mapping[Coords, str]

    def do(self, job: Repacking) -> PackReport:
        return job.replaced(self)

    def failed(self, job: Repacking, error: BaseException) -> PackReport:
        key = job.shard_key(self)
        if isinstance(error, CorruptShardError):
            why = f"{error.why}; its other chunks would be lost, so files for all of its chunks are needed"
            return PackReport(problems=[Problem(key, why, damaged=True)])
        return PackReport(problems=[failure(key, error)])


class Repacking(Run):
    """The chunks that the file of regions `path` names, with their files in the source, and their shards in the target.

    Raise OSError if a file cannot be read; UnsupportedError if the arrays of source and target differ or cannot be
    written; ExpectedError for a file that is damaged, or about another array; BusyError if a mount writes to the
    source. Nothing is changed until `run`, which raises BusyError if another process writes to the target, and
    ValueError for several workers.
    """

    _replacer: ShardReplacer
    _files: Sequence[tuple[PackedArray, U64, U64]]
    """The numbers of the chunk files of each array, and the coordinates of their chunks in the target."""

    def __init__(self, job: PackJob, path: str | os.PathLike[str], options: Options | None = None) -> None:
        self._job = job
        self._options = options or Options()
        require_idle(job.source.url, journal_directory(job.source.url, self._options.journal))
        self._packing = job.opened()
        with opening(job.target.url):
            self._tree = job.target.open()
        regions = {tree.path: ChunkRegions(tree) for tree in self._tree.collections()}
        # Meshes, skeletons and annotations are no arrays. They are refused only if they are asked for.
        arrays = [a for a in self._packing.arrays.values() if job.arrays or a.target.array is not None]
        for array in arrays:
            _require_alike(array, regions)
        self._named = {array.home: NamedChunks(regions[array.home]) for array in arrays}
        self._others = set[str]()
        with open(path, newline="", errors="surrogateescape") as lines:
            for about, box in read_expected(regions, lines, exact=True):
                if about.tree.path in self._named:
                    self._named[about.tree.path].add(box)
                elif not job.arrays:
                    self._others.add(about.tree.path)
        self.files = sum(named.files for named in self._named.values())

    def _add(self, report: PackReport) -> None:
        self.shards += report.shards
        self.objects += report.shards

    @property
    def source(self) -> JobSource:
        """The source of the chunk files."""
        return self._job.source

    @contextmanager
    def _running(self, executor: Executor | None, workers: int) -> Iterator[None]:
        if executor is not None or workers != 1:
            raise ValueError("chunks are replaced in one process; give neither an executor nor a number of jobs")
        with ShardReplacer.opened(self._tree, self._job.target.url, self._options) as self._replacer:
            survey, why = self._packing.survey(), "was left unchanged, because the source has no such array"
            others = [Problem(path, why, damaged=True) for path in sorted(self._others)]
            self.problems = [*survey.problems, *others]
            self._files = [self._chosen(plan) for plan in survey.plans if plan.array.home in self._named]
            yield None

    def _chosen(self, plan: ArrayPlan) -> tuple[PackedArray, U64, U64]:
        """The chunk files that are named. Adds a problem for each named chunk without one."""
        named, files = self._named[plan.array.home], plan.chunks
        grid = named.regions.tree.chunks.layer.format.grid
        numbers = ravel_many(plan.array.cells(files), grid)
        order = np.argsort(numbers)
        files, numbers = files[order], numbers[order]
        chosen, problems = named.among(numbers)
        self.problems += problems
        return plan.array, files[chosen], unravel_many(numbers[chosen], grid)

    def _tasks(self) -> Iterator[Task[PackReport]]:
        for array, files, cells in self._files:
            homes = rewriting.shards_of(self._named[array.home].regions.tree.collection, cells)
            for shard in np.unique(homes).tolist():
                here = homes == np.uint64(shard)
                rows = zip(cells[here].tolist(), files[here].tolist(), strict=True)
                chunks = {tuple(cell): array.file(number) for cell, number in rows}
                yield Task(self, ChunksOfShard(array, shard, chunks))

    def _end(self) -> None:
        self.finished = True

    def shard_key(self, chunks: ChunksOfShard) -> str:
        """The path of a shard in the target."""
        return self._named[chunks.array.home].regions.tree.shards.outermost.source.key(chunks.shard)

    def replaced(self, chunks: ChunksOfShard) -> PackReport:
        """Put chunk files into a shard. Damaged files are reported instead."""
        tree = self._named[chunks.array.home].regions.tree
        if tree.shards.outermost.source.is_pair(chunks.shard):
            raise UnsupportedError(READ_ONLY_PAIR)
        open_files = list[OpenedFile]()
        puts, problems = self._puts(chunks.array, tree.collection, chunks.files, open_files)
        if not puts:
            return PackReport(problems=problems)
        self._replacer.update(self.shard_key(chunks), ChunksPut(tree.collection, chunks.shard, puts))
        nbytes = sum(size_of(put.data) for put in puts.values())
        return PackReport(1, len(puts), nbytes=nbytes, problems=problems)

    def _puts(
        self, array: PackedArray, collection: Collection, files: Mapping[Coords, str], open_files: list[OpenedFile]
    ) -> tuple[dict[Coords, Put], list[Problem]]:
        """The chunks that the shard stores for chunk files, and the problems of files that no reader could decode.

        Those of files that stay open are valid while `open_files` exists.
        """
        puts: dict[Coords, Put] = {}
        problems: list[Problem] = []
        transform = collection.transform
        for cell, name in files.items():
            file = OpenedFile.of(self._packing, name)
            reason = dict(array.suspects(np.array([cell], np.uint64), [file.content])).get(0)
            if reason is not None:
                problems.append(Problem(name, f"is damaged, so its chunk was left unchanged: {reason}", damaged=True))
            elif transform is None:
                open_files.append(file)
                puts[cell] = Put(file.content)
            else:
                puts[cell] = Put(transform.store(cell, bytes_of(file.content)))
        return puts, problems


def _require_alike(array: PackedArray, regions: Mapping[str, ChunkRegions]) -> None:
    """Raise UnsupportedError unless the target's array can have the chunk files of the source."""
    name = array.home or "/"
    if array.home not in regions:
        raise UnsupportedError(f"{name}: the target has no sharded array there")
    target = regions[array.home].tree.collection
    if why := rewriting.unwritable(target):
        raise UnsupportedError(f"{name}: {why}")
    if array.source.transform is not None or array.target.transform is not None:
        raise UnsupportedError(f"{name}: its chunk files would have to be converted; give uncompressed ones")
    if array.target.array is None or target.array is None:
        raise UnsupportedError(f"{name}: is of a kind that cannot be compared with that of the target")
    ours, theirs = _chunks(array.target.array, array.target), _chunks(target.array, target)
    if ours != theirs:
        differing = ", ".join(f"{n}: {ours[n]}, not {theirs[n]}" for n in ours if ours[n] != theirs[n])
        raise UnsupportedError(f"{name}: its chunks are not those of the target ({differing})")


def _chunks(array: Array, collection: Collection) -> dict[str, object]:
    """What determines the bytes of chunk files. `collection` may convert them to stored chunks."""
    encoding = array.encoding if collection.transform is None else replace(array.encoding, codecs=())
    return {"shape": array.shape, "chunks": array.chunk, "offset": array.offset, "encoding": encoding}
