"""`shardfs pack`: copies an unsharded source to a new sharded one. Chunks are copied, not decoded.

The public function is `shardfs.pack`. The work is a list of tasks, one for each shard, that any `concurrent.futures`
executor can run. A finished task leaves a note in the target, so that an interrupted job continues when it is repeated.
Documents are written last, so that no reader sees an array before all its shards exist. `JobRun` does the same for
`unpack`.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from shardfs.jobs.packing import note_of
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource, Task, run
from shardfs.jobs.target import is_of, is_zip, require_room
from shardfs.model import redact
from shardfs.model.blobs import ByteRange, FilePart, read_file
from shardfs.model.changes import FIRST, Change, Whole
from shardfs.model.dataset import Problem
from shardfs.model.errors import BusyError, UnsupportedError, message
from shardfs.model.kinds import is_in
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import size_of, unchanged
from shardfs.shards.rewriting import StoredShard
from shardfs.storage import descriptors
from shardfs.storage.cache import nothing
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalBlob
from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, busy, canonical, journal_directory, read_owner
from shardfs.write.journal import Journal
from shardfs.write.journal.places import is_locked
from shardfs.write.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from shardfs.jobs.packing import Packing, PackJob, SourceSurvey
    from shardfs.jobs.target import JobState, JobTarget
    from shardfs.jobs.zip_target import ZipTarget
    from shardfs.model.blobs import Blob, Bytes, Plan

BATCH = 64
"""Other files that one task copies."""

COPIED_SIZE = 256 << 10
"""Files of at least this size stay open, so that the kernel copies them. Smaller ones are read into memory."""

FIRST_LOADS = 16
"""Files of a remote source that are read at the same time at first; the number doubles up to all connections."""

J = TypeVar("J", bound="OpenedJob")
J_co = TypeVar("J_co", covariant=True, bound="OpenedJob")


@cache
def _descriptors() -> threading.Semaphore:
    """The number of files that all tasks of this process may keep open. Without a free one, files are read."""
    return threading.Semaphore(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 8192) // 4)


class OpenedJob(Protocol):
    """An opened job. `target` is set by `begin`."""

    @property
    def target(self) -> JobTarget | ZipTarget: ...

    def begin(self, *, new: bool) -> None:
        """Open the target for writing: see `JobTarget.begin`."""

    def blob(self, key: str) -> Blob:
        """Open the file of the source that is copied to this key."""

    def finish(self) -> None:
        """Write all documents, and end the job."""


class CopyJob(Hashable, Protocol[J_co]):
    """What to pack or unpack, and how. It can be pickled."""

    @property
    def source(self) -> JobSource: ...

    @property
    def target(self) -> JobSource: ...

    def opened(self) -> J_co:
        """The opened source, once per process. Raises the errors of the job's kind."""

    def state(self) -> JobState:
        """What to make, and how, without the plan."""


@dataclass
class PackReport:
    """What one task has done.

    Args:
        shards: the number of shards, also of those that were packed or unpacked already.
        files: the number of files of the source that the task packed, unpacked or copied.
        objects: the number of files that it made of them.
        nbytes: the size of these files; 0 for those that existed already.
        problems: files that were not packed; `damaged` ones prevent that the job is finished.
    """

    shards: int = 0
    files: int = 0
    objects: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)


class Permit:
    """The right to keep one file open. It is given back with the last reference, as the descriptor itself is."""

    @classmethod
    def take(cls) -> Self | None:
        """Return a permit; None if there is none left."""
        if not _descriptors().acquire(blocking=False):
            return None
        return cls()

    def __del__(self) -> None:
        _descriptors().release()


class OpenedFile(NamedTuple):
    """The content of a file in the source. If `content` is a `FilePart`, `blob` keeps its descriptor open."""

    content: Bytes
    blob: Blob | None = None
    permit: Permit | None = None

    @classmethod
    def of(cls, packing: OpenedJob, key: str) -> OpenedFile:
        """Open or read a file. A remote one that takes several requests is copied to a temporary file first."""
        blob = packing.blob(key)
        is_copied = blob.fd >= 0 and packing.target.writer.local and blob.stat().size >= COPIED_SIZE
        permit = Permit.take() if is_copied else None
        if permit is not None:
            return cls(FilePart(blob.fd, max(blob.base, 0), blob.stat().size), blob, permit)
        if blob.fd >= 0:
            return cls(read_whole(blob, key))
        pieces = _pieces(blob, key)
        first = next(pieces)
        if len(first) < FIRST.stop or (permit := Permit.take()) is None:
            return cls(b"".join([first, *pieces]))
        with TemporaryFile() as file:
            file.writelines(chain([first], pieces))
            file.flush()
            copy = LocalBlob(descriptors.dup(file.fileno()), os.fstat(file.fileno()), nothing)
        return cls(FilePart(copy.fd, 0, copy.stat().size), copy, permit)


def read_whole(blob: Blob, key: str) -> bytes:
    """The bytes of a file in the source. Raise OSError if it becomes shorter meanwhile."""
    if blob.fd < 0:
        return b"".join(_pieces(blob, key))
    size = blob.stat().size
    data = read_file(blob.fd, size, max(blob.base, 0))
    _require_whole(key, len(data), size)
    return data


def _pieces(blob: Blob, key: str) -> Iterator[bytes]:
    """Yield the bytes of a remote file. Raise OSError if it becomes shorter meanwhile.

    One request has at most the size of `FIRST`, so that `store_timeout` holds for files of any size.
    """
    first = blob.read([FIRST])[0]  # then most stores report the size without a request
    size, length = blob.stat().size, len(first)
    yield first
    for start in range(FIRST.stop, size, FIRST.stop):
        piece = blob.read([ByteRange(start, min(start + FIRST.stop, size))])[0]
        length += len(piece)
        yield piece
    _require_whole(key, length, size)


def _require_whole(key: str, length: int, size: int) -> None:
    if length != size:
        raise OSError(errno.EIO, f"{size} bytes expected, {length} found: it changed while it was read", key)


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A task that makes one shard. `chunks` are the numbers of its chunks in the source, 8 bytes each."""

    job: PackJob
    array: str
    shard: int
    chunks: bytes = field(repr=False)

    @property
    def source(self) -> JobSource:
        return self.job.source

    @property
    def files(self) -> int:
        """The number of files that become the shard."""
        return len(self.chunks) // 8

    def __call__(self) -> PackReport:
        report = PackReport(1, self.files, 1)
        packing: Packing = opened_target(self.job)
        note = note_of(self.array, self.shard)
        if packing.target.noted(note) is not None or packing.target.is_ended():
            return report
        array = packing.arrays[self.array]
        key = array.shard_key(self.shard)
        numbers = np.frombuffer(self.chunks, np.uint64)
        load, names = partial(OpenedFile.of, packing), array.files(numbers)
        opened = [file for _, file in load_ahead(packing.store.read_ahead, load, names, first=FIRST_LOADS)]
        contents, report.problems = array.packed(numbers, [file.content for file in opened])
        if any(problem.damaged for problem in report.problems):
            return PackReport(problems=report.problems)
        puts = {cell: Put(content) for cell, content in contents.items()}
        report.nbytes = sum(size_of(put.data) for put in puts.values())
        plan = StoredShard(array.target, self.shard, None).plan(puts, set())
        if plan is not None:
            packing.target.writer.update(key, Whole(plan, first=None))
        packing.target.note_task(note, 1, key)
        return report

    def split(self) -> Sequence[ShardTask]:
        return [self]

    def failed(self, error: BaseException) -> PackReport:
        require_room(error, redact.public_name(self.job.target.url))
        return PackReport(problems=[Problem(self.array, f"shard {self.shard}: {reason(error)}", damaged=True)])


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A task that copies other files."""

    job: CopyJob[Any]
    keys: tuple[str, ...]

    @property
    def source(self) -> JobSource:
        return self.job.source

    @property
    def files(self) -> int:
        """The number of files."""
        return len(self.keys)

    def __call__(self) -> PackReport:
        packing, report = opened_target(self.job), PackReport(files=self.files, objects=self.files)
        for key in self.keys:
            try:
                report.nbytes += _copy(packing, key)
            except OSError as e:
                report.problems += CopyTask(self.job, (key,)).failed(e).problems
        return report

    def split(self) -> Sequence[CopyTask]:
        return [CopyTask(self.job, (key,)) for key in self.keys]

    def failed(self, error: BaseException) -> PackReport:
        require_room(error, redact.public_name(self.job.target.url))
        return PackReport(problems=[failure(self.keys[0], error)])


@dataclass
class _Copy(Change):
    """Copy a file of the source unless the target has it. `file`: the copied file."""

    job: OpenedJob
    key: str
    file: OpenedFile | None = None
    first = None

    def plan(self, old: Blob | None) -> Plan:
        if old is not None:  # the update removes what a killed process has left beside the file
            return unchanged(old.stat().size)
        if self.file is None:  # the writer asks twice if it had to create a directory
            self.file = OpenedFile.of(self.job, self.key)
        return [self.file.content]


def _copy(packing: OpenedJob, key: str) -> int:
    """Copy one file unless the target has it; return its size."""
    writer = packing.target.writer
    if not writer.local and packing.target.is_stored(key):
        return 0
    copy = _Copy(packing, key)
    writer.update(key, copy)
    return 0 if copy.file is None else size_of(copy.file.content)


def reason(error: BaseException) -> str:
    """The reason for a problem."""
    return message(error) or type(error).__name__


def failure(path: str, error: BaseException) -> Problem:
    """The problem of a file that could not be packed, unpacked or copied."""
    why = reason(error).removeprefix(f"{path}: ")
    if isinstance(error, IsADirectoryError):  # directories themselves are listed
        why = "is a symbolic link to a directory; put the directory in its place, or remove the link"
    return Problem(path, why, damaged=True)


def opened_target(job: CopyJob[Any], *, new: bool = False) -> Any:
    """The opened job with its target open for writing, once per process: see `JobTarget.begin`."""
    opened = job.opened()
    if not hasattr(opened, "target"):
        opened.begin(new=new)
    return opened


# ---- a whole job ----


class JobRun(ABC, Generic[J]):
    """A job that is ready to run.

    Attributes:
        problems: the problems of the source that were found while it was listed.
        finished: whether the target is complete.
        repeated: whether an earlier run of the same job has completed the target, so that nothing is left to do.

    Raise BusyError if a mount writes to the source, and the errors of `CopyJob.opened`, before anything is written.
    """

    finished = False

    def __init__(self, job: CopyJob[J], part: JobPart = WHOLE, journals: str | None = None) -> None:
        if not 1 <= part.number <= part.of:
            raise ValueError(f"part {part.number} of {part.of}: parts are counted from 1")
        _require_apart(job)
        require_idle(job.source.url, journal_directory(job.source.url, journals))
        if is_zip(job.target.url) and part != WHOLE:
            raise UnsupportedError("a part of a job cannot be written to a zip file; pack all, or to a directory")
        self.job, self.part = job, part
        self._opened: J
        self.problems = self._begin()
        self.repeated = self._opened.target.is_finished()
        if self._opened.target.is_ended() and not self.repeated:
            why = "is not empty, and has no unfinished job (another job may have completed it); give a new directory"
            raise FileExistsError(errno.EEXIST, why, redact.public_name(job.target.url))

    @abstractmethod
    def _begin(self) -> list[Problem]:
        """List the source, and begin or continue the job in the target.

        Return files that are left out; `damaged` ones prevent that the job is finished.
        """

    @property
    @abstractmethod
    def files(self) -> int:
        """The number of files of the source, apart from documents."""

    @property
    @abstractmethod
    def shards(self) -> int:
        """The number of shards of the sharded dataset."""

    @property
    @abstractmethod
    def objects(self) -> int:
        """The number of files that the target will have, apart from documents, as far as it is known."""

    @abstractmethod
    def _tasks(self) -> Iterator[Task[PackReport]]:
        """Yield the tasks of the part that make shards, or the files of shards."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether all parts have made their objects."""

    @abstractmethod
    def _other_files(self) -> Iterator[str]:
        """Yield the keys in the target of the other files."""

    def run(self, executor: Executor | None = None, workers: int = 1) -> Iterator[PackReport]:
        """Do the work of the part, and yield the reports of its tasks. Write the documents if all parts are done.

        Args:
            executor: runs the tasks. None runs them in this process if `workers` is 1, else in `workers` new processes.
            workers: the number of tasks that the executor can run at a time.
        """
        yield PackReport(problems=self.problems if self.part.number == 1 else [])
        failed = any(p.damaged for p in self.problems)
        if self.repeated:
            if not self._opened.target.is_ended():
                self._opened.finish()  # the earlier run was killed before it had deleted its notes
            self.finished = True
            return
        with self._opened.target.running(executor, workers) as runner:
            if failed and is_zip(self.job.target.url):
                return  # a later run would start over
            for report in run(chain(self._tasks(), self._copies()), runner, workers):
                failed = failed or any(p.damaged for p in report.problems)
                yield report
            ended = self._opened.target.is_ended()  # by another run; this one only removes what it has noted since
            self.finished = not failed and (self.part == WHOLE or ended or self._is_complete())
            if self.finished:
                self._opened.finish()

    def _copies(self) -> Iterator[Task[PackReport]]:
        keys = (key for key in self._other_files() if is_of(self.part, key))
        while batch := tuple(islice(keys, BATCH)):
            yield CopyTask(self.job, batch)


class PackRun(JobRun["Packing"]):
    """Packing that is ready to run."""

    job: PackJob
    survey: SourceSurvey

    def _begin(self) -> list[Problem]:
        self._opened = opened_target(self.job, new=True)
        self.job, self.survey = self._opened.job, self._opened.survey()
        return self.survey.problems

    @property
    def files(self) -> int:
        return self.survey.files + sum(len(plan.chunks) for plan in self.survey.plans)

    @property
    def shards(self) -> int:
        return sum(len(plan.shards) for plan in self.survey.plans)

    @property
    def objects(self) -> int:
        return self.survey.files + self.shards

    def _tasks(self) -> Iterator[ShardTask]:
        for plan in self.survey.plans:
            for shard, chunks in plan:
                if is_of(self.part, plan.array.shard_key(shard)):
                    yield ShardTask(self.job, plan.array.path, shard, chunks.tobytes())

    def _is_complete(self) -> bool:
        target = self._opened.target
        notes = (note_of(plan.array.path, shard) for plan in self.survey.plans for shard in plan.shards.tolist())
        return all(target.noted(note) is not None for note in notes) and all(map(target.is_stored, self._other_files()))

    def _other_files(self) -> Iterator[str]:
        return self._opened.other_files()


def _require_apart(job: CopyJob[Any]) -> None:
    source, target = canonical(job.source.url), canonical(job.target.url)
    if is_in(source, target) or is_in(target, source):
        why = "the source and the target must not be inside each other; give another target"
        raise OSError(errno.EINVAL, why, redact.public_name(job.target.url))


def require_idle(source: str, journal: Path) -> None:
    """Raise BusyError if a mount writes to the source, or has left data that wait to be published."""
    for lock in (str(journal / LOCK), os.path.join(canonical(source), SOURCE_LOCK)):
        with suppress(NotADirectoryError):  # the source is a file
            if is_locked(lock):
                raise busy(read_owner(lock), source)
    if journal.exists() and (n := len(Pending(Journal.peek(journal, source).recovered).versions)):
        why = f"{n} files wait to be published first: mount it with --rw, or shardfs recover --apply"
        raise BusyError(errno.EBUSY, why, redact.public_name(source))
