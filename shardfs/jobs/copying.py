"""Making a new dataset: what `pack` and `unpack` have in common.

The work is a list of tasks, one for each shard, that any `concurrent.futures` executor can run. A finished task leaves
a note in the target, so that an interrupted job continues when it is repeated. Documents are written last, so that no
reader sees an array before all its shards exist.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.runs import PackReport, Run, reason
from shardfs.jobs.shared_work import WHOLE, Job, JobPart, JobSource, Task, Unit
from shardfs.jobs.target import JobTarget, is_of, is_zip, require_room
from shardfs.model import redact
from shardfs.model.changes import Change
from shardfs.model.dataset import Problem
from shardfs.model.errors import BusyError, UnsupportedError
from shardfs.model.kinds import is_in
from shardfs.model.write_plan import size_of, unchanged
from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, busy, canonical, journal_directory, read_owner
from shardfs.write.journal import Journal
from shardfs.write.journal.places import is_locked
from shardfs.write.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.jobs.target import JobState
    from shardfs.jobs.zip_target import ZipTarget
    from shardfs.model.blobs import Blob, Plan

BATCH = 64
"""Other files that one task copies."""

J_contra = TypeVar("J_contra", bound="CopyJob", contravariant=True)


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


class CopyJob(Job, Protocol):
    """What to pack or unpack, and how."""

    @property
    def target(self) -> JobSource: ...

    def opened(self) -> OpenedJob:
        """The opened source, once per process. Raises the errors of the job's kind."""

    def state(self) -> JobState:
        """What to make, and how, without the plan."""


class CopyUnit(Unit[J_contra, PackReport], Protocol[J_contra]):
    """A unit of packing or unpacking to another place."""

    def problem(self, error: BaseException) -> Problem:
        """The problem of a unit that failed with `error`."""

    def failed(self, job: J_contra, error: BaseException) -> PackReport:
        """The report of a failed unit. Raises the error of a full disk."""
        require_room(error, redact.public_name(job.target.url))
        return PackReport(problems=[self.problem(error)])


@dataclass(frozen=True, slots=True)
class OtherFiles(CopyUnit[CopyJob]):
    """Files to be copied unchanged."""

    keys: tuple[str, ...]

    def do(self, job: CopyJob) -> PackReport:
        packing, report = opened_target(job), PackReport(files=len(self.keys), objects=len(self.keys))
        for key in self.keys:
            try:
                report.nbytes += _copy(packing, key)
            except OSError as e:
                report.problems += OtherFiles((key,)).failed(job, e).problems
        return report

    def split(self) -> Sequence[OtherFiles]:
        return [OtherFiles((key,)) for key in self.keys]

    def problem(self, error: BaseException) -> Problem:
        return failure(self.keys[0], error)


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


def failure(path: str, error: BaseException) -> Problem:
    """The problem of a file that could not be packed, unpacked or copied."""
    why = reason(error).removeprefix(f"{path}: ")
    if isinstance(error, IsADirectoryError):  # directories themselves are listed
        why = "is a symbolic link to a directory; put the directory in its place, or remove the link"
    return Problem(path, why, damaged=True)


def opened_target(job: CopyJob, *, new: bool = False) -> Any:
    """The opened job with its target open for writing, once per process: see `JobTarget.begin`."""
    opened = job.opened()
    if not hasattr(opened, "target"):
        opened.begin(new=new)
    return opened


# ---- a whole job ----


class CopyRun(Run):
    """A run that makes a target.

    Raise BusyError if a mount writes to the source, and the errors of `CopyJob.opened`, before anything is written.
    """

    _opened: OpenedJob

    def __init__(self, job: CopyJob, part: JobPart = WHOLE, journals: str | None = None) -> None:
        if not 1 <= part.number <= part.of:
            raise ValueError(f"part {part.number} of {part.of}: parts are counted from 1")
        _require_apart(job)
        require_idle(job.source.url, journal_directory(job.source.url, journals))
        if is_zip(job.target.url) and part != WHOLE:
            raise UnsupportedError("a part of a job cannot be written to a zip file; pack all, or to a directory")
        self.job = job
        self.part = part
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

    @abstractmethod
    def _units(self) -> Iterator[Unit[Any, PackReport]]:
        """Yield the units of the part that make shards, or the files of shards."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether all parts have made their objects."""

    @abstractmethod
    def _other_files(self) -> Iterator[str]:
        """Yield the keys in the target of the other files."""

    def _running(self, executor: Executor | None, workers: int) -> AbstractContextManager[Executor | None]:
        target = self._opened.target
        if self.repeated or isinstance(target, JobTarget):
            return nullcontext(executor)
        return target.running(executor, workers)

    def _tasks(self) -> Iterator[Task[PackReport]]:
        starts_over = is_zip(self.job.target.url) and any(p.damaged for p in self.problems)
        if not self.repeated and not starts_over:
            yield from (Task(self.job, unit) for unit in chain(self._units(), self._copies()))

    def _copies(self) -> Iterator[OtherFiles]:
        keys = (key for key in self._other_files() if is_of(self.part, key))
        while batch := tuple(islice(keys, BATCH)):
            yield OtherFiles(batch)

    def _end(self) -> None:
        ended = self._opened.target.is_ended()  # by another run; this one only removes what it has noted since
        self.finished = self.repeated or self.part == WHOLE or ended or self._is_complete()
        if self.finished and not (self.repeated and ended):
            self._opened.finish()


def _require_apart(job: CopyJob) -> None:
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
