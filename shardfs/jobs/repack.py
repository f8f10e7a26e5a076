"""`shardfs pack --regions`: puts chunk files into the existing shards of a dataset, such as recomputed chunks.

The public function is `shardfs.pack`. Only the chunks that a file of regions names are replaced, as a writable mount of
the target would replace them: the shard gets the new chunks and a new index, and keeps all other bytes.
"""

from __future__ import annotations

import math
from array import array as typed_array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from shardfs.config.options import Options
from shardfs.jobs.pack import PackReport, failure, read_whole, require_idle
from shardfs.jobs.regions import Box, ChunkRegions, read_expected
from shardfs.jobs.replacing import ChunksPut, ShardReplacer
from shardfs.jobs.shared_work import WHOLE
from shardfs.model.dataset import Problem
from shardfs.model.errors import CorruptShardError, ShardfsError, UnsupportedError
from shardfs.model.grid import ravel, ravel_many, unravel, unravel_many
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import bytes_of, size_of
from shardfs.shards import rewriting
from shardfs.storage.blob_views import READ_ONLY_PAIR
from shardfs.storage.source_errors import opening
from shardfs.storage.source_locks import journal_directory

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from shardfs.jobs.packed_arrays import PackedArray
    from shardfs.jobs.packing import PackJob
    from shardfs.model.arrays import Array
    from shardfs.model.blobs import Bytes
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


class Repacking:
    """The chunks that a file of regions names, with their files in the source, and their shards in the target.

    Raise UnsupportedError if the arrays of source and target differ or cannot be written; ExpectedError for a file that
    is damaged, or about another array; BusyError if a mount writes to the source. Nothing is changed until `run`.

    Attributes:
        shards: the number of shards that were replaced.
    """

    part, shards, finished = WHOLE, 0, False

    def __init__(self, job: PackJob, lines: Iterable[str], found: Options | None = None) -> None:
        self._job, self._options = job, found or Options()
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
        for about, box in read_expected(regions, lines, exact=True):
            if about.tree.path in self._named:
                self._named[about.tree.path].add(box)
            elif not job.arrays:
                self._others.add(about.tree.path)

    @classmethod
    def of_file(cls, job: PackJob, path: str | os.PathLike[str], found: Options | None = None) -> Self:
        """Read a file of regions. Raise OSError if it cannot be opened."""
        with open(path, newline="", errors="surrogateescape") as lines:
            return cls(job, lines, found)

    @property
    def files(self) -> int:
        """The number of chunks that the file of regions names."""
        return sum(named.files for named in self._named.values())

    @property
    def objects(self) -> int:
        """The number of shards that were replaced."""
        return self.shards

    def run(self, executor: Executor | None = None, workers: int = 1) -> Iterator[PackReport]:
        """Replace the chunks. Yield a report for each shard, and for what is left unchanged.

        Raise BusyError if another process writes to the target; ValueError for several workers.
        """
        if executor is not None or workers != 1:
            raise ValueError("chunks are replaced in one process; give neither an executor nor a number of jobs")
        with ShardReplacer.opened(self._tree, self._job.target.url, self._options) as replacer:
            survey, why = self._packing.survey(), "was left unchanged, because the source has no such array"
            others = [Problem(path, why, damaged=True) for path in sorted(self._others)]
            yield PackReport(problems=[*survey.problems, *others])
            for plan in (plan for plan in survey.plans if plan.array.home in self._named):
                for report in self._run(plan.array, plan.chunks, replacer):
                    self.shards += report.shards
                    yield report
        self.finished = True

    def _run(self, array: PackedArray, files: U64, replacer: ShardReplacer) -> Iterator[PackReport]:
        """Replace the chunks of one array. `files` are the numbers of all chunk files of the source."""
        named = self._named[array.home]
        grid = named.regions.tree.chunks.layer.format.grid
        numbers = ravel_many(array.cells(files), grid)
        order = np.argsort(numbers)
        files, numbers = files[order], numbers[order]
        chosen, problems = named.among(numbers)
        yield PackReport(problems=problems)
        files, cells = files[chosen], unravel_many(numbers[chosen], grid)
        homes = rewriting.shards_of(named.regions.tree.collection, cells)
        for shard in np.unique(homes).tolist():
            here = homes == np.uint64(shard)
            chunks = {tuple(c): array.file(n) for c, n in zip(cells[here].tolist(), files[here].tolist(), strict=True)}
            yield self._replaced(array, named, shard, chunks, replacer)

    def _replaced(
        self, array: PackedArray, named: NamedChunks, shard: int, files: Mapping[Coords, str], replacer: ShardReplacer
    ) -> PackReport:
        """Put chunk files, by the coordinates of their chunks, into a shard. Damaged files are reported instead."""
        tree = named.regions.tree
        source, collection = tree.shards.outermost.source, tree.collection
        key = source.key(shard)
        try:
            if source.is_pair(shard):
                raise UnsupportedError(READ_ONLY_PAIR)
            puts, problems = self._puts(array, collection, files)
            if not puts:
                return PackReport(problems=problems)
            replacer.update(key, ChunksPut(collection, shard, puts))
        except CorruptShardError as e:
            why = f"{e.why}; its other chunks would be lost, so files for all of its chunks are needed"
            return PackReport(problems=[Problem(key, why, damaged=True)])
        except (OSError, ShardfsError, ValueError) as e:
            return PackReport(problems=[failure(key, e)])
        nbytes = sum(size_of(put.data) for put in puts.values())
        return PackReport(1, len(puts), nbytes=nbytes, problems=problems)

    def _puts(
        self, array: PackedArray, collection: Collection, files: Mapping[Coords, str]
    ) -> tuple[dict[Coords, Put], list[Problem]]:
        """The chunks that the shard stores for chunk files, and the problems of files that no reader could decode."""
        coords, names = list(files), list(files.values())
        contents: list[Bytes] = [read_whole(self._packing.blob(file), file) for file in names]
        why = "is damaged, so its chunk was left unchanged"
        suspects = dict(array.suspects(np.array(coords, np.uint64), contents))
        problems = [Problem(names[i], f"{why}: {reason}", damaged=True) for i, reason in suspects.items()]
        transform = collection.transform
        return {
            cell: Put(data if transform is None else transform.store(cell, bytes_of(data)))
            for i, (cell, data) in enumerate(zip(coords, contents, strict=True))
            if i not in suspects
        }, problems


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
