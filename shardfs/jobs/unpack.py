"""`shardfs unpack`: writes the files that a mount of a sharded source shows. In the native layout, chunks are copied.

The work is a list of tasks, one for each shard, that any `concurrent.futures` executor can run. A finished task leaves
an object in the target, so that an interrupted job continues when it is repeated. Documents are written last, so that
no reader sees an array before all its chunks exist.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.copying import CopyRun, CopyUnit, opened_target
from shardfs.jobs.opened_files import COPIED_SIZE, OpenedFile
from shardfs.jobs.runs import PackReport, reason
from shardfs.jobs.shared_work import WHOLE, JobPart
from shardfs.jobs.target import is_of
from shardfs.jobs.unpack_job import ChunkGroup, ShownSurvey, Unpacking, UnpackJob
from shardfs.model.blobs import Content, FilePart
from shardfs.model.dataset import Problem
from shardfs.model.errors import ShardfsError, message
from shardfs.model.write_plan import size_of
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from shardfs.model.values import U64, Coords, Sizes
    from shardfs.vfs.chunk_dirs import ChunkDirs

    Load = Callable[[Sequence[Coords]], Sequence["OpenedFile | Exception | None"]]

MOST_FILES, MOST_BYTES = 512, 8 << 20
"""Chunks that are read and written together: their number, and their stored bytes."""

UNKNOWN = 1 << 18
"""Assumed size of a chunk whose size is unknown."""

MOST_AHEAD = 64 << 20
"""Bytes of chunks of a remote source that are loaded ahead."""


@dataclass(frozen=True, slots=True)
class NewFiles(CopyUnit[UnpackJob]):
    """The chunks of one group, to be written as files."""

    group: ChunkGroup

    def do(self, job: UnpackJob) -> PackReport:
        unpacking: Unpacking = opened_target(job)
        shards = len(self.group.shards) // 8
        if (files := unpacking.target.noted(self.group.note)) is not None:
            return PackReport(shards, shards, files)
        report = PackReport(shards, shards)
        chunks = unpacking.tree.collection(self.group.path)
        try:
            last = self._write(unpacking, chunks, report)
        except ShardfsError as e:
            report.problems.append(Problem(self.group.path, message(e), damaged=True))
        if not report.problems:
            unpacking.target.note_task(self.group.note, report.objects, last)
        return report

    def _batches(self, chunks: ChunkDirs) -> Iterator[tuple[list[Coords], Load]]:
        """Yield coordinates of chunks, and what loads such chunks. Raise CorruptShardError after the last one."""
        filler = chunks.collection.filler
        if filler is not None and self.group.filled:
            coords = self.group.coords(chunks)
            coords = coords[~chunks.chunks.layer.present(coords)[0]]
            sizes = filler.sizes(coords)
            for cells in _slices(coords, sizes):
                yield cells, lambda cells: [OpenedFile(filler.show(cell)) for cell in cells]
            return
        for batch in chunks.shards.stored_in(np.frombuffer(self.group.shards, np.uint64)):
            order = _stored_order(chunks, batch.coords)
            for cells in _slices(batch.coords[order], batch.sizes[order]):
                yield cells, partial(_opened, chunks)

    def _write(self, unpacking: Unpacking, chunks: ChunkDirs, report: PackReport) -> str:
        """Write the chunks, and return the path of the last one; "" if there is none. Unreadable ones are reported."""
        last = ""

        def loaded(slice: tuple[list[Coords], Load]) -> Sequence[OpenedFile | Exception | None]:
            cells, load = slice
            return load(cells)

        for (cells, _), found in load_ahead(
            unpacking.store.read_ahead, loaded, self._batches(chunks), weigh=_weight, most=MOST_AHEAD
        ):
            paths = chunks.chunk_paths(np.array(cells, np.uint64).reshape(len(cells), -1))
            files = list[tuple[str, Content]]()
            for path, one in zip(paths, found, strict=True):
                if isinstance(one, Exception):
                    report.problems.append(Problem(path, message(one), damaged=True))
                elif one is not None:
                    files.append((last := path, one.content))
                    report.objects, report.nbytes = report.objects + 1, report.nbytes + size_of(one.content)
            unpacking.target.writer.create(files)
        return last

    def problem(self, error: BaseException) -> Problem:
        group = self.group
        what = f"filled chunks {group.filled}" if group.filled else f"shard {np.frombuffer(group.shards, np.uint64)[0]}"
        return Problem(group.path, f"{what}: {reason(error)}", damaged=True)


def _stored_order(chunks: ChunkDirs, coords: U64) -> slice | npt.NDArray[np.intp]:
    """Return the positions of these chunks in the order of their bytes in the shard, so that few ranges are read."""
    if chunks.chunks.layer.files > 1:
        return slice(None)
    starts = []
    for cell in coords.tolist():
        found = None
        with suppress(ShardfsError, OSError):  # raised again when the chunk is read
            found = chunks.chunks.layer.locate(tuple(cell))
        starts.append(0 if found is None else found.start)
    return np.argsort(np.array(starts, np.int64), kind="stable")


def _slices(coords: U64, sizes: Sizes) -> Iterator[list[Coords]]:
    """Yield the coordinates in parts of about `MOST_BYTES`, and at most `MOST_FILES` chunks."""
    ends = np.cumsum(np.where(sizes < 0, UNKNOWN, sizes)) // MOST_BYTES
    start = 0
    for stop in (*(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(coords)):
        for at in range(start, stop, MOST_FILES):
            yield list(map(tuple, coords[at : min(at + MOST_FILES, stop)].tolist()))
        start = stop


def _opened(chunks: ChunkDirs, cells: Sequence[Coords]) -> list[OpenedFile | Exception | None]:
    """Return the content of stored chunks, None if they were removed. Large chunks of local shards are not read."""
    if not chunks.chunks.is_cached:  # local, and shown as stored
        return [_in_file(chunks, cell) or _in_memory(*chunks.chunks.whole_many([cell])) for cell in cells]
    return list(map(_in_memory, chunks.chunks.whole_many(cells)))


def _in_file(chunks: ChunkDirs, cell: Coords) -> OpenedFile | None:
    try:
        found = chunks.chunks.layer.locate(cell)
    except (ShardfsError, OSError):  # raised again when it is read
        return None
    if found is None or found.size < COPIED_SIZE or found.checksum is not None or found.blob.fd < 0:
        return None
    return OpenedFile(FilePart(found.blob.fd, found.blob.base + found.start, found.size), found.blob)


def _in_memory(data: bytes | memoryview | Exception | None) -> OpenedFile | Exception | None:
    return data if data is None or isinstance(data, Exception) else OpenedFile(bytes(data))


def _weight(found: Sequence[OpenedFile | Exception | None]) -> int:
    """Return the memory that chunks need until they are written."""
    return sum(len(f.content) for f in found if isinstance(f, OpenedFile) and isinstance(f.content, bytes))


class UnpackRun(CopyRun):
    """Unpacking that is ready to run."""

    job: UnpackJob
    _opened: Unpacking
    survey: ShownSurvey

    def __init__(self, job: UnpackJob, part: JobPart = WHOLE, journals: str | None = None) -> None:
        job.opened().require_shown()
        super().__init__(job, part, journals)

    def _begin(self) -> list[Problem]:
        self.survey = self.job.opened().survey()
        self.shards = sum(len(plan.shards) for plan in self.survey.plans)
        self.files = self.survey.files + self.shards
        self._opened = opened_target(self.job, new=True)
        return self.survey.problems

    def _units(self) -> Iterator[NewFiles]:
        return (NewFiles(group) for group in self.survey.groups() if is_of(self.part, group.note))

    def _is_complete(self) -> bool:
        counts = [self._opened.target.noted(group.note) for group in self.survey.groups()]
        found = [count for count in counts if count is not None]
        self.objects = sum(found) + self.survey.files
        return len(found) == len(counts) and all(map(self._opened.target.is_stored, self._other_files()))

    def _other_files(self) -> Iterator[str]:
        return self._opened.other_files() if self.survey.files else iter(())  # else there is no need to list again
