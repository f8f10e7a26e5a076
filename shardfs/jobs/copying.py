"""Making a new dataset: what `pack` and `unpack` have in common.

The work is a list of tasks, one for each shard, that any `concurrent.futures` executor can run. A finished task leaves
a note in the target, so that an interrupted job continues when it is repeated. Documents are written last, so that no
reader sees an array before all its shards exist.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.runs import PackReport, Run
from shardfs.jobs.shared_work import WHOLE, Job, JobPart, JobSource, Task, Unit
from shardfs.jobs.target import JobTarget, is_of, require_room
from shardfs.model import redact
from shardfs.model.changes import Change
from shardfs.model.dataset import Problem
from shardfs.model.errors import BusyError, message
from shardfs.model.kinds import is_in
from shardfs.model.write_plan import size_of, unchanged
from shardfs.storage.source_errors import opening
from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, busy, canonical, journal_directory, read_owner
from shardfs.write.journal import Journal
from shardfs.write.journal.places import is_locked
from shardfs.write.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from shardfs.jobs.target import JobState
    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.values import U64

BATCH = 64
"""Other files that one task copies."""


class ShardsPlan(Protocol):
    """The shards of one array or collection."""

    @property
    def shards(self) -> U64:
        """The numbers of the shards (n,)."""

    @property
    def files(self) -> int:
        """The number of files of the source that the job reads for these shards."""


P = TypeVar("P", bound=ShardsPlan)


@dataclass
class Survey(Generic[P]):
    """What a job finds in its source.

    Args:
        plans: the shards of each array or collection.
        files: the number of other files, which are copied.
        problems: files that are left out; `damaged` ones prevent that the job is finished.
    """

    plans: list[P] = field(default_factory=list)
    files: int = 0
    problems: list[Problem] = field(default_factory=list)


class OpenedJob(ABC):
    """The opened source of a job, and its target, which is opened for writing when it is needed first."""

    def __init__(self, job: CopyJob) -> None:
        self.job = job
        self._target: JobTarget | None = None

    @property
    def target(self) -> JobTarget:
        """The target. A worker continues the job there that the main process has begun: see `JobTarget.open`."""
        return self._target or self.open_target(new=False)

    def open_target(self, *, new: bool) -> JobTarget:
        """Open the target for writing, and return it: see `JobTarget.open` for `new` and the errors."""
        with opening(self.job.target.url):
            self._target = JobTarget.open(self.job.target, self._state(), new=new)
        return self._target

    @abstractmethod
    def _state(self) -> JobState:
        """Return what the job makes, as far as it is known."""

    @abstractmethod
    def survey(self) -> Survey[Any]:
        """List the source; return what the job has to do. Raise UnsupportedError if nothing can be made of the source.

        Raise OSError if it cannot be listed.
        """

    @abstractmethod
    def documents(self) -> Iterable[tuple[str, Callable[[], bytes]]]:
        """Yield the path in the target of each document, and a function that returns its bytes, after `survey`."""

    @abstractmethod
    def other_files(self) -> Iterator[str]:
        """Yield the paths of the other files, which are copied to the same paths, after `survey`."""

    @abstractmethod
    def blob(self, key: str) -> Blob:
        """Return the file of the source that is copied to `key`. Raise OSError if it cannot be opened.

        The store does not keep it open: it is closed with the last reference.
        """


class CopyJob(Job, Protocol):
    """What to pack or unpack, from where to where, and how: hashable, and can be pickled."""

    @property
    def target(self) -> JobSource:
        """Where to write, as workers open it."""

    def opened(self) -> Any:
        """Return the `OpenedJob`, the same one at each call in a process. Raise the errors of its constructor."""


J_contra = TypeVar("J_contra", bound=CopyJob, contravariant=True)


class CopyUnit(Unit[J_contra, PackReport], Protocol[J_contra]):
    """A unit of packing or unpacking to another place. It may be done again after a crash."""

    def problem(self, error: BaseException) -> Problem:
        """Return the problem, `damaged`, of a unit that failed with `error`."""

    def failed(self, job: J_contra, error: BaseException) -> PackReport:
        """Return the report of a failed unit. Raise OSError for a full disk, because all others would fail as well."""
        require_room(error, redact.public_name(job.target.url))
        return PackReport(problems=[self.problem(error)])


class ShardUnit(CopyUnit[J_contra], Protocol[J_contra]):
    """A unit that makes a shard, or the files of shards."""

    @property
    def note(self) -> str:
        """The key of the note in the target that the unit is finished: see `JobTarget.note_task`."""


@dataclass(frozen=True, slots=True)
class OtherFiles(CopyUnit[CopyJob]):
    """Files to be copied unchanged. `keys`: their paths in the target."""

    keys: tuple[str, ...]

    def do(self, job: CopyJob) -> PackReport:
        opened, report = job.opened(), PackReport(files=len(self.keys), objects=len(self.keys))
        for key in self.keys:
            try:
                report.nbytes += _copy(opened, key)
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
            self.file = OpenedFile.from_key(self.job, self.key)
        return [self.file.content]


def _copy(opened: OpenedJob, key: str) -> int:
    """Copy one file unless the target has it; return its size."""
    writer = opened.target.writer
    if not writer.local and opened.target.is_stored(key):
        return 0
    copy = _Copy(opened, key)
    writer.update(key, copy)
    return 0 if copy.file is None else size_of(copy.file.content)


def failure(path: str, error: BaseException) -> Problem:
    """Return the problem, `damaged`, of the file at `path` that could not be packed, unpacked or copied."""
    why = message(error).removeprefix(f"{path}: ")
    if isinstance(error, IsADirectoryError):  # directories themselves are listed
        why = "is a symbolic link to a directory; put the directory in its place, or remove the link"
    return Problem(path, why, damaged=True)


# ---- a whole job ----


class CopyRun(Run):
    """A run that makes a target. The constructor lists the source.

    Args:
        job: what to do.
        part: the part of the job to do. Raise ValueError if there is no such part.
        journals: the base directory of journals; None for the default.

    Raise OSError if source and target are inside each other, BusyError if a mount writes to the source, and the errors
    of `CopyJob.opened` and `OpenedJob.survey`, before anything is written; then the errors of `JobTarget.open`, and
    FileExistsError if the target has other data.
    """

    survey: Survey[Any]

    def __init__(self, job: CopyJob, part: JobPart = WHOLE, journals: str | None = None) -> None:
        if not 1 <= part.number <= part.of:
            raise ValueError(f"part {part.number} of {part.of}: parts are counted from 1")
        _require_apart(job)
        require_idle(job.source.url, journal_directory(job.source.url, journals))
        self.part = part
        self._opened: OpenedJob = job.opened()
        self.job = self._opened.job
        with suppress(FileNotFoundError):  # it is new. If it has other data, do not list the source in vain
            self._opened.open_target(new=False).require_own()
        self.survey = survey = self._opened.survey()
        self.problems = survey.problems
        self.shards = sum(len(plan.shards) for plan in survey.plans)
        self.files = survey.files + sum(plan.files for plan in survey.plans)
        self._target = self._opened.open_target(new=True)
        self._target.require_own()
        self.repeated = self._target.is_finished()

    @abstractmethod
    def _units(self) -> Iterator[ShardUnit[Any]]:
        """Yield the units of all parts, in the same order in every run while no shard is added or removed."""

    def _other_files(self) -> Iterator[str]:
        return self._opened.other_files() if self.survey.files else iter(())  # without any, there is nothing to list

    def _tasks(self) -> Iterator[Task[PackReport]]:
        if not self.repeated:
            units = (unit for unit in self._units() if is_of(self.part, unit.note))
            yield from (Task(self.job, unit) for unit in chain(units, self._copies()))

    def _copies(self) -> Iterator[OtherFiles]:
        keys = (key for key in self._other_files() if is_of(self.part, key))
        while batch := tuple(islice(keys, BATCH)):
            yield OtherFiles(batch)

    def _is_complete(self) -> bool:
        """Return whether all parts have made their objects, and count these."""
        objects = 0
        for unit in self._units():
            if (noted := self._target.noted(unit.note)) is None:
                return False
            objects += noted
        for key in self._other_files():
            if not self._target.is_stored(key):
                return False
            objects += 1
        self.objects = objects
        return True

    def _end(self) -> None:
        ended = self._target.is_ended()  # by another run; this one only removes what it has noted since
        self.finished = self.repeated or self.part == WHOLE or ended or self._is_complete()
        if self.finished and not (self.repeated and ended):
            self._target.finish(self._opened.documents(), (unit.note for unit in self._units()))


def _require_apart(job: CopyJob) -> None:
    source = canonical(job.source.url)
    target = canonical(job.target.url)
    if is_in(source, target) or is_in(target, source):
        why = "the source and the target must not be inside each other; give another target"
        raise OSError(errno.EINVAL, why, redact.public_name(job.target.url))


def require_idle(source: str, journal: Path) -> None:
    """Raise BusyError if a mount writes to the source, or has left data that wait to be published.

    `journal` is the directory of the source's journal, which need not exist.
    """
    for lock in (str(journal / LOCK), os.path.join(canonical(source), SOURCE_LOCK)):
        with suppress(NotADirectoryError):  # the source is a file
            if is_locked(lock):
                raise busy(read_owner(lock), source)
    if journal.exists() and (n := len(Pending(Journal.peek(journal, source).recovered).versions)):
        why = f"{n} files wait to be published first: mount it with --rw, or shardfs recover --apply"
        raise BusyError(errno.EBUSY, why, redact.public_name(source))
