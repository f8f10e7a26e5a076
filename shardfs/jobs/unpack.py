"""`shardfs unpack`: writes the files that a mount of a sharded source shows. In the native layout, chunks are copied.

The work is a list of tasks, one for each shard, that any `concurrent.futures` executor can run. A finished task leaves
an object in the target, so that an interrupted job continues when it is repeated. Documents are written last, so that
no reader sees an array before all its chunks exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.pack import COPIED_SIZE, JobRun, OpenedFile, PackReport, opened_target
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from shardfs.jobs.target import is_of
from shardfs.jobs.unpacking import ChunkGroup, ShownSurvey, Unpacking, UnpackJob
from shardfs.model.blobs import FilePart
from shardfs.model.dataset import Problem
from shardfs.model.errors import ShardfsError, message
from shardfs.model.write_plan import size_of
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.pack_state import STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from shardfs.model.values import U64, Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

MOST_FILES, MOST_BYTES = 512, 32 << 20
"""Chunks are written together until they are so many files, or need so much memory."""

MOST_AHEAD = 64 << 20
"""Bytes of chunks of a remote source that are loaded ahead."""


@dataclass(frozen=True, slots=True)
class UnpackTask:
    """A task that writes the chunks of one group."""

    job: UnpackJob
    group: ChunkGroup

    @property
    def source(self) -> JobSource:
        return self.job.source

    def __call__(self) -> PackReport:
        unpacking: Unpacking = opened_target(self.job)
        shards = len(self.group.shards) // 8
        if (done := unpacking.done(self.group)) is not None:
            return PackReport(shards, shards, done)
        report = PackReport(shards, shards)
        chunks = unpacking.tree.collection(self.group.path)
        try:
            for coords, load in self._batches(chunks):
                self._write(unpacking, chunks, coords, load, report)
        except ShardfsError as e:
            report.problems.append(Problem(self.group.path, message(e), damaged=True))
        if not report.problems and unpacking.target.is_stored(STATE):
            unpacking.target.writer.put(self.group.mark, b"%d" % report.objects)
        return report

    def _batches(self, chunks: ChunkDirs) -> Iterator[tuple[U64, Callable[[Coords], OpenedFile | None]]]:
        """Yield coordinates of chunks, and what opens such a chunk. Raise CorruptShardError after the last one."""
        filler = chunks.collection.filler
        if filler is not None and self.group.filled:
            coords = self.group.coords(chunks)
            yield coords[~chunks.chunks.present(coords)[0]], lambda cell: OpenedFile(filler.show(cell))
            return
        for batch in chunks.shards.stored_in(np.frombuffer(self.group.shards, np.uint64)):
            yield batch.coords, partial(_opened, chunks)

    def _write(
        self,
        unpacking: Unpacking,
        chunks: ChunkDirs,
        coords: U64,
        load: Callable[[Coords], OpenedFile | None],
        report: PackReport,
    ) -> None:
        """Write chunks. Unreadable ones are reported."""

        def loaded(cell: Sequence[int]) -> OpenedFile | Problem | None:
            try:
                return load(tuple(cell))
            except (ShardfsError, OSError) as e:
                return Problem(chunks.chunk_path(tuple(cell)), message(e), damaged=True)

        files, held = list[tuple[str, OpenedFile]](), 0
        pool, cells, paths = unpacking.store.read_ahead, coords.tolist(), iter(chunks.chunk_paths(coords))
        for _, found in load_ahead(pool, loaded, cells, first=4, weigh=_weight, most=MOST_AHEAD):
            path = next(paths)
            if isinstance(found, Problem):
                report.problems.append(found)
            elif found is not None:
                files.append((path, found))
                held += _weight(found)
                report.objects, report.nbytes = report.objects + 1, report.nbytes + size_of(found.content)
            if len(files) >= MOST_FILES or held >= MOST_BYTES:
                _create(unpacking, files)
                files, held = [], 0
        _create(unpacking, files)

    def split(self) -> Sequence[UnpackTask]:
        return [self]

    def failed(self, error: BaseException) -> PackReport:
        group = self.group
        what = f"filled chunks {group.filled}" if group.filled else f"shard {np.frombuffer(group.shards, np.uint64)[0]}"
        why = message(error) or type(error).__name__
        return PackReport(problems=[Problem(group.path, f"{what}: {why}", damaged=True)])


def _opened(chunks: ChunkDirs, coords: Coords) -> OpenedFile | None:
    """Return the content of a stored chunk; None if it was removed. Large chunks of local shards are not read."""
    if not chunks.shown.is_cached:  # local, and shown as stored
        found = chunks.chunks.locate(coords)
        if found is not None and found.size >= COPIED_SIZE and found.checksum is None and found.blob.fd >= 0:
            return OpenedFile(FilePart(found.blob.fd, found.blob.base + found.start, found.size), found.blob)
    data = chunks.shown.whole(coords)
    return None if data is None else OpenedFile(bytes(data))


def _create(unpacking: Unpacking, files: Sequence[tuple[str, OpenedFile]]) -> None:
    if files:
        unpacking.target.writer.create([(path, found.content) for path, found in files])


def _weight(found: OpenedFile | Problem | None) -> int:
    """Return the memory that a chunk needs until it is written."""
    return len(found.content) if isinstance(found, OpenedFile) and isinstance(found.content, bytes) else 1


class UnpackRun(JobRun[Unpacking]):
    """Unpacking that is ready to run."""

    job: UnpackJob
    survey: ShownSurvey

    def __init__(self, job: UnpackJob, part: JobPart = WHOLE, journals: str | None = None) -> None:
        job.opened().require_shown()
        self._objects = 0
        super().__init__(job, part, journals)

    def _survey(self) -> list[Problem]:
        self.survey = self._opened.survey()
        return self.survey.problems

    @property
    def files(self) -> int:
        return self.survey.files + self.shards

    @property
    def shards(self) -> int:
        return sum(len(plan.shards) for plan in self.survey.plans)

    @property
    def objects(self) -> int:
        return self._objects

    def run(self, executor: Executor | None = None, workers: int = 1) -> Iterator[PackReport]:
        for report in super().run(executor, workers):
            self._objects += report.objects
            yield report

    def _tasks(self) -> Iterator[UnpackTask]:
        return (UnpackTask(self.job, group) for group in self.survey.groups() if is_of(self.part, group.mark))

    def _is_complete(self) -> bool:
        counts = list(map(self._opened.done, self.survey.groups()))
        found = [count for count in counts if count is not None]
        self._objects = sum(found) + self.survey.files
        return len(found) == len(counts) and all(map(self._opened.target.is_stored, self._other_files()))

    def _other_files(self) -> Iterator[str]:
        return self._opened.other_files()
