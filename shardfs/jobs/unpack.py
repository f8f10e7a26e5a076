"""`shardfs unpack`: writes the files that a mount of a sharded source shows. In the native layout, chunks are copied.

The public function is `shardfs.unpack`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.copying import CopyRun, ShardUnit
from shardfs.jobs.opened_files import COPIED_SIZE, OpenedFile
from shardfs.jobs.runs import PackReport
from shardfs.jobs.target import note_of
from shardfs.model.blobs import Content, FilePart
from shardfs.model.dataset import Problem
from shardfs.model.errors import ShardfsError, message
from shardfs.model.grid import unravel_many
from shardfs.model.write_plan import size_of
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.jobs.unpack_job import CollectionPlan, ShownSurvey, Unpacking, UnpackJob
    from shardfs.model.values import Coords, Sizes
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.shards.stored_chunk import StoredChunk
    from shardfs.vfs.chunk_dirs import ChunkDirs

    Loaded = Sequence["OpenedFile | Exception | None"]
    """The contents of chunks, the errors of those that cannot be read, and None for those that were removed."""

MOST_FILES, MOST_BYTES = 512, 8 << 20
"""Chunks that are read and written together: their number, and their stored bytes."""

MOST_FILLED = 4096
"""Chunks of one task that makes the chunks that are not stored."""

UNKNOWN = 1 << 18
"""Assumed size of a chunk whose size is unknown."""

MOST_AHEAD = 64 << 20
"""Bytes of chunks of a remote source that are loaded ahead."""


@dataclass(frozen=True, slots=True)
class NewFiles(ShardUnit["UnpackJob"]):
    """Chunks of a collection that are to be written as files.

    Args:
        path: the directory where a mount shows the collection.
        number: distinguishes the unit from other units of the collection.
        shards: the numbers of the outermost shards, 8 bytes each in the byte order of the machine.
        filled: instead of shards, the numbers of chunks in the shown grid that the layout may have to fill.
    """

    path: str
    number: int
    shards: bytes = field(default=b"", repr=False)
    filled: range = range(0)

    @property
    def note(self) -> str:
        return note_of(self.path, f"{'fill' if self.filled else 'shards'}-{self.number}")

    def do(self, job: UnpackJob) -> PackReport:
        unpacking = job.opened()
        shards = len(self.shards) // 8
        if (files := unpacking.target.noted(self.note)) is not None:
            return PackReport(shards, shards, files)
        report = PackReport(shards, shards)
        try:
            last = self._write(unpacking, report)
        except ShardfsError as e:
            report.problems.append(Problem(self.path, message(e), damaged=True))
        if not report.problems:
            unpacking.target.note_task(self.note, report.objects, last)
        return report

    def _write(self, unpacking: Unpacking, report: PackReport) -> str:
        """Write the chunks, and return the path of the last one; "" if there is none. Unreadable ones are reported."""
        last, chunks = "", unpacking.tree.collection(self.path)
        parts = _filled(chunks, self.filled) if self.filled else _stored(chunks, self.shards)
        pool = unpacking.store.read_ahead
        for part, contents in load_ahead(pool, lambda part: part.load(), parts, weigh=_weight, room=MOST_AHEAD):
            paths = chunks.chunk_paths(np.array(part.cells, np.uint64).reshape(len(part.cells), -1))
            files = list[tuple[str, Content]]()
            for path, content in zip(paths, contents, strict=True):
                if isinstance(content, Exception):
                    report.problems.append(Problem(path, message(content), damaged=True))
                elif content is not None:
                    files.append((last := path, content.content))
                    report.objects += 1
                    report.nbytes += size_of(content.content)
            unpacking.target.writer.create(files)
        return last

    def problem(self, error: BaseException) -> Problem:
        numbers = f"filled chunks {self.filled}" if self.filled else f"shard {np.frombuffer(self.shards, np.uint64)[0]}"
        return Problem(self.path, f"{numbers}: {message(error)}", damaged=True)


def units_of(plan: CollectionPlan) -> Iterator[NewFiles]:
    """Yield what each task writes: first the stored chunks, then the filled ones.

    The units are the same in every run while no shard is added or removed.
    """
    numbers = plan.shards // np.uint64(plan.shards_per_task)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] + np.uint64(1)))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), None], strict=False):
        yield NewFiles(plan.path, int(numbers[start]), plan.shards[start:stop].tobytes())
    for i, first in enumerate(range(0, plan.filled, MOST_FILLED)):
        yield NewFiles(plan.path, i, filled=range(first, min(first + MOST_FILLED, plan.filled)))


@dataclass(frozen=True, slots=True)
class _ChunkFiles:
    """Chunks that are read and written together, and what returns their contents."""

    cells: Sequence[Coords]
    load: Callable[[], Loaded]


def _filled(chunks: ChunkDirs, numbers: range) -> Iterator[_ChunkFiles]:
    """Yield those of these chunks of the shown grid that are not stored, and that the layout fills."""
    names = chunks.collection.names
    filler = chunks.collection.filler
    if filler is None:
        return
    coords = names.coords_many(unravel_many(np.array(numbers, np.uint64), names.dims))
    coords = coords[~chunks.chunks.layer.present(coords)[0]]
    cells = list(map(tuple, coords.tolist()))
    for part in _slices(filler.sizes(coords)):
        yield _ChunkFiles(cells[part], partial(_shown, filler.show, cells[part]))


def _shown(show: Callable[[Coords], bytes], cells: Sequence[Coords]) -> Loaded:
    return [OpenedFile(show(cell)) for cell in cells]


def _stored(chunks: ChunkDirs, shards: bytes) -> Iterator[_ChunkFiles]:
    """Yield the chunks of outermost shards. Raise CorruptShardError after the last one if others may be missing."""
    store = chunks.chunks
    locates = store.is_local or store.layer.files == 1  # the place of a remote second file costs a request
    for batch in chunks.shards.stored_in(np.frombuffer(shards, np.uint64)):
        coords = list(map(tuple, batch.coords.tolist()))
        places = [_place(store, cell) if locates else None for cell in coords]
        starts = np.array([0 if place is None else place.start for place in places], np.int64)
        order = np.argsort(starts, kind="stable")  # in the order of the bytes, few ranges are read
        for part in _slices(batch.sizes[order]):
            cells = [coords[i] for i in order[part].tolist()]
            yield _ChunkFiles(cells, partial(_opened, store, cells, [places[i] for i in order[part].tolist()]))


def _place(store: ChunkStore, cell: Coords) -> StoredChunk | None:
    with suppress(ShardfsError, OSError):  # raised again when the chunk is read
        return store.layer.locate(cell)
    return None


def _slices(sizes: Sizes) -> Iterator[slice]:
    """Yield parts of about `MOST_BYTES`, and at most `MOST_FILES` chunks, given the size of each chunk."""
    ends = np.cumsum(np.where(sizes < 0, UNKNOWN, sizes)) // MOST_BYTES
    start = 0
    for stop in (*(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(sizes)):
        for at in range(start, stop, MOST_FILES):
            yield slice(at, min(at + MOST_FILES, stop))
        start = stop


def _opened(store: ChunkStore, cells: Sequence[Coords], places: Sequence[StoredChunk | None]) -> Loaded:
    """Return the contents of stored chunks. Large chunks of local shards are not read."""
    if not store.is_local:
        return list(map(_in_memory, store.whole_many(cells)))
    return [_local(store, cell, place) for cell, place in zip(cells, places, strict=True)]


def _local(store: ChunkStore, cell: Coords, place: StoredChunk | None) -> OpenedFile | Exception | None:
    is_copied = place is not None and not store.is_cached and place.size >= COPIED_SIZE
    if place is not None and is_copied and place.checksum is None and place.blob.fd >= 0:
        return OpenedFile(FilePart(place.blob.fd, place.blob.file_offset + place.start, place.size), place.blob)
    try:
        return _in_memory(store.whole(cell, place))
    except (ShardfsError, OSError) as e:
        return e


def _in_memory(data: bytes | memoryview | Exception | None) -> OpenedFile | Exception | None:
    return data if data is None or isinstance(data, Exception) else OpenedFile(bytes(data))


def _weight(contents: Loaded) -> int:
    """Return the memory that chunks need until they are written."""
    return sum(len(f.content) for f in contents if isinstance(f, OpenedFile) and isinstance(f.content, bytes))


class UnpackRun(CopyRun):
    """Unpacking that is ready to run. The constructor is that of `CopyRun`."""

    survey: ShownSurvey

    def _units(self) -> Iterator[NewFiles]:
        return (unit for plan in self.survey.plans for unit in units_of(plan))
