"""`shardfs pack --in-place`: replaces the chunk files of a local source by shards, one shard at a time, or goes back.

    for report in InPlaceRun(JobSource.from_url("/data/brain.zarr")).run(workers=2):
        print(report.files, report.problems)

`shardfs.storage.pack_state` documents the state in the source. Each step can be repeated after a crash. From the first
deleted file to the end, the arrays of the job have no metadata documents, so other libraries raise errors and read no
fill values.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.jobs import finished_jobs
from shardfs.jobs.copying import require_idle
from shardfs.jobs.in_place_shards import LOCK, is_litter, mixed_dataset, require_plain, take_over, working
from shardfs.jobs.pack_job import Packing, PackJob
from shardfs.jobs.runs import PackReport, Run
from shardfs.jobs.shared_work import JobSource, Task, Unit
from shardfs.jobs.target import require_room
from shardfs.model.dataset import Problem
from shardfs.model.errors import BusyError, UnsupportedError, message
from shardfs.model.kinds import OWN_PREFIX, is_in
from shardfs.model.redact import public_name
from shardfs.storage import syscalls
from shardfs.storage.local import LocalStore
from shardfs.storage.mount_table import FS_TYPE, topmost
from shardfs.storage.open_store import open_store
from shardfs.storage.pack_state import DIRECTORY, PACK, PLAIN, ROUTES, SHARDED, STATE, UNPACK, PackState, Stage
from shardfs.storage.regular_files import read_regular
from shardfs.storage.source_locks import SOURCE_LOCK, canonical, journal_directory
from shardfs.storage.writers.local import LocalWriter
from shardfs.write.journal import overlaps
from shardfs.write.journal.places import Lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from shardfs.jobs.copying import Survey
    from shardfs.jobs.pack_arrays import ArrayPlan


@dataclass(frozen=True, slots=True)
class InPlaceJob:
    """A local source to pack in place, or to bring back.

    Args:
        root: the canonical path of the source.
        run: the number of the run that has made the tasks: see `working`.
        direction: PACK or UNPACK.
    """

    source: JobSource
    root: str
    run: int
    direction: str


@dataclass(frozen=True, slots=True)
class ShardInPlace(Unit[InPlaceJob, PackReport]):
    """One shard to pack or to unpack.

    Args:
        array: the path of the array in `PackPlan.arrays`.
        shard: the number of the shard.
        chunks: the numbers of its chunk files to be packed, 8 bytes each in the byte order of the machine.
    """

    array: str
    shard: int
    chunks: bytes = field(default=b"", repr=False)

    def do(self, job: InPlaceJob) -> PackReport:
        with working(job.root, job.run) as dataset:
            array = dataset.plan.arrays[self.array]
            if job.direction == PACK:
                return dataset.pack(array, self.shard, np.frombuffer(self.chunks, np.uint64))
            return dataset.unpack(array, self.shard)

    def failed(self, job: InPlaceJob, error: BaseException) -> PackReport:
        """Return the report of a failed unit. Raise OSError for a full disk, because all others would fail as well."""
        advice = "nothing is lost: free some space and repeat the command, or go back with --abort"
        require_room(error, job.root, advice)
        return PackReport(problems=[Problem(self.array, f"shard {self.shard}: {message(error)}", damaged=True)])


class InPlaceRun(Run):
    """A run of a job in place, which locks the source until `run` has done the work.

    Attributes:
        files: the number of files that the source has had when this run began, apart from documents and shards of
            earlier runs; 0 if only documents and shards are moved.
        objects: the number of files that the source will have of these.
        shards: the number of shards that the tasks make or remove.

    Args:
        abort: go back to the form that the source had before.
        options: those of `PackJob`. If none differs from its default, a job continues with those with which it began.
        journals: the base directory of journals; None for the default.

    Raise OSError if the source is no local directory or is mounted; BusyError if a writable mount or another run uses
    it; the errors of `Packing`; FileExistsError if the unfinished job has other options. In these cases, nothing is
    changed.
    """

    def __init__(
        self,
        source: JobSource,
        *,
        abort: bool = False,
        options: Mapping[str, Any] | None = None,
        journals: str | None = None,
    ) -> None:
        self.source = source
        self.root = canonical(source.url)
        self.number = time.time_ns()
        self._require_directory()
        require_idle(source.url, journal_directory(source.url, journals))
        job = "being changed by shardfs pack --in-place"
        path = os.path.join(self.root, SOURCE_LOCK)
        self._lock: Lock | None = Lock.take(path, "", source.url, fleeting=True, mode=0o644, job=job)
        self.problems = []
        try:
            overlaps.refuse(source.url)
            self._writer = LocalWriter(LocalStore(self.root))
            self._writer.recovered()
            self._survey: Survey[ArrayPlan] | None = None
            self.direction = UNPACK if abort else PACK
            self._state = self._begun(_as_json(options or {}), abort=abort)
            while self._state is not None and self._state.stage in ROUTES[self.direction][:2]:
                self._advance(self._state)
            if self._state is not None and self._state.stage == Stage.MIXED:
                self._count()
            if self._survey is not None:
                self.problems = self._survey.problems
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other jobs use the source. `run` does so at its end."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.free()

    def _end(self) -> None:
        state = self._state
        if state is not None and state.stage == Stage.MIXED:
            self._save(replace(state, stage=state.after()))
        while self._state is not None and self._state.stage != Stage.DONE:
            self._advance(self._state)
        if (state := self._state) is not None:
            finished_jobs.note(self.root, _job(state.options, abort=state.direction == UNPACK), None)
            self._remove(state)
        self.finished = True

    # ---- the beginning ----

    def _require_directory(self) -> None:
        if not isinstance(open_store(self.source.url, json.loads(self.source.options)), LocalStore):
            why = "is no local directory: on other stores a rename is a copy; give a target instead of --in-place"
            raise OSError(errno.EOPNOTSUPP, why, public_name(self.source.url))
        if not os.path.isdir(self.root):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.root)

    def _require_unmounted(self) -> None:
        """Raise BusyError for a mount of the source. The mount would not notice that chunks are moved."""
        for mount in topmost().values():
            other = canonical(mount.source)
            if mount.type == FS_TYPE and (is_in(other, self.root) or is_in(self.root, other)):
                raise BusyError(errno.EBUSY, f"is mounted at {mount.mountpoint}: unmount that first", self.root)

    def _begun(self, options: Mapping[str, Any], *, abort: bool) -> PackState | None:
        """Begin or take over the job. Return None if there is nothing to do."""
        state = PackState.read(self.root)
        if state is not None and state.stage == Stage.BEGUN:
            self._remove(state)
            if abort:
                return None
            options = options or state.options
            state = None
        elif state is not None and state.stage == Stage.DONE and state.direction != self.direction:
            self._remove(state)
            state = None
        if state is None and abort:
            self._sweep()
            self.repeated = finished_jobs.is_noted(self.root, _job(options, abort=True), None)
            if self.repeated:
                return None
            raise FileNotFoundError(errno.ENOENT, "has no unfinished job in place that could be aborted", self.root)
        if state is None:
            self._require_unmounted()
            try:
                return self._new(options)
            except UnsupportedError:  # as when there is nothing left to do
                self.repeated = finished_jobs.is_noted(self.root, _job(options, abort=False), None)
                if not self.repeated:
                    raise
                return None
        if options and options != state.options:
            why = "has an unfinished pack with other options; repeat it without options, or give it --abort"
            raise FileExistsError(errno.EEXIST, why, self.root)
        if state.stage != Stage.DONE:
            take_over(self.root, self.number)
        self._save(replace(state, direction=self.direction))
        return self._state

    def _new(self, options: Mapping[str, Any]) -> PackState | None:
        """Begin to pack, unless some files cannot be packed: write the documents of the sharded dataset."""
        tuples: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        packing = Packing(PackJob(self.source, JobSource.from_url(self._path(SHARDED)), verbatim=True, **tuples))
        self._survey = packing.survey()
        if any(p.damaged for p in self._survey.problems):
            return None
        documents = {key: raw for key, raw in packing.plan.documents.items() if not self._is_stored(key, raw)}
        former = packing.document_names() - packing.plan.documents.keys() | documents.keys()
        plain = sorted(key for key in former if os.path.lexists(self._path(key)))
        self._start(PackState(PACK, Stage.BEGUN, plain, sorted(documents), dict(options)))
        writer = LocalWriter(LocalStore(self._path(SHARDED)))
        for key, raw in documents.items():
            writer.put(key, raw)
        return self._state

    def _start(self, state: PackState) -> None:
        """Save the first state of a job. Raise OSError, before anything is changed, if documents cannot be moved."""
        for key in state.plain:
            self._require_movable(key)
        self._save(state)
        for name in (PLAIN, SHARDED):
            make_directories(self._path(name))
        take_over(self.root, self.number)
        try:
            self._require_unmounted()  # again, because a mount that begins now finds the state and is refused
        except BusyError:
            self._remove(state)
            raise

    def _is_stored(self, key: str, raw: bytes) -> bool:
        """Return whether a document is the same in both forms. The job leaves such a document where it is."""
        with suppress(OSError, ValueError):
            return read_regular(self._path(key), MAX_DOCUMENT_BYTES) == raw
        return False

    def _require_movable(self, key: str) -> None:
        path = self._path(key)
        require_plain(path, key)
        directory = os.path.dirname(path)
        if os.path.realpath(directory) != directory or os.stat(directory).st_dev != os.stat(self.root).st_dev:
            why = "is on another file system or behind a symbolic link, which a job in place does not support"
            raise OSError(errno.EXDEV, why, key)

    # ---- stages ----

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def _save(self, state: PackState) -> None:
        self._writer.put(STATE, state.raw())
        self._state = state

    def _advance(self, state: PackState) -> None:
        """Do what leads from a stage to the next one, for stages without tasks."""
        match state.direction, state.stage:
            case _, Stage.PLAIN:
                self._move(state.plain, *(("", PLAIN) if state.direction == PACK else (PLAIN, "")))
            case "pack", Stage.SHARDED:
                self._move(self._finished_shards(set(state.sharded)), SHARDED, "")
                self._move(state.sharded, SHARDED, "")
            case "unpack", Stage.SHARDED:
                self._move(state.sharded, "", SHARDED)
                dataset = mixed_dataset(self.root, self.number)
                for array in dataset.plan.arrays.values():
                    self._move(dataset.existing_shards(array, dataset.source), "", SHARDED)
        self._save(replace(state, stage=state.after()))

    def _finished_shards(self, documents: set[str]) -> Iterator[str]:
        top = self._path(SHARDED)
        for directory, _, names in os.walk(top):
            for name in names:
                key = os.path.relpath(os.path.join(directory, name), top)
                if key not in documents and not is_litter(name):
                    yield key

    def _move(self, keys: Iterable[str], old: str, new: str) -> None:
        """Rename files from one directory to another. Skip those that an interrupted run has renamed. Sync."""
        touched: set[str] = set()
        for key in keys:
            source, target = self._path(old, key), self._path(new, key)
            if os.path.lexists(source):
                if os.path.lexists(target):
                    why = "is in the way of a file of the job; move it out of the source, and repeat the command"
                    raise FileExistsError(errno.EEXIST, why, target)
                make_directories(os.path.dirname(target))
                syscalls.rename(source, target)
            elif not os.path.lexists(target):
                raise FileNotFoundError(errno.ENOENT, "has vanished; bring it back, and repeat the command", source)
            touched |= {os.path.dirname(source), os.path.dirname(target)}
        for directory in {above for path in touched for above in self._up(path)}:
            with suppress(FileNotFoundError):
                syscalls.fsync_directory(directory)

    def _up(self, path: str) -> Iterator[str]:
        """Yield a directory and those above it, up to the source."""
        while is_in(path, self.root):
            yield path
            path = os.path.dirname(path)

    def _remove(self, state: PackState) -> None:
        """Remove the files of the job, which are copies or former documents."""
        ours = {LOCK, *(f"{PLAIN}/{key}" for key in state.plain), *(f"{SHARDED}/{key}" for key in state.sharded)}
        for directory, _, names in os.walk(self._path(DIRECTORY), topdown=False):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.relpath(path, self.root) not in ours and not is_litter(name):
                    why = "is no file of this job; move it out of the source, and repeat the command"
                    raise OSError(errno.ENOTEMPTY, why, path)
                syscalls.unlink(path)
            syscalls.rmdir(directory)
        syscalls.fsync_directory(self.root)
        self._sweep()
        self._writer.delete(STATE)
        syscalls.fsync_directory(self.root)

    def _sweep(self) -> None:
        """Remove what killed runs have left at the root of the source."""
        with os.scandir(self.root) as entries:
            for e in entries:
                if is_litter(e.name) and e.name.startswith(OWN_PREFIX):
                    syscalls.unlink(e.path)

    # ---- the middle ----

    def _count(self) -> None:
        dataset = mixed_dataset(self.root, self.number)
        if self.direction == UNPACK:
            self.files = self.shards = sum(len(dataset.shard_numbers(array)) for array in dataset.plan.arrays.values())
            return
        self._survey = survey = self._survey or dataset.survey()
        self.files = survey.files + sum(len(plan.chunks) for plan in survey.plans)
        self.shards = sum(len(plan.shards) for plan in survey.plans)
        self.objects = survey.files

    def _tasks(self) -> Iterator[Task[PackReport]]:
        if self._state is None or self._state.stage != Stage.MIXED:
            return
        job = InPlaceJob(self.source, self.root, self.number, self.direction)
        if self.direction == PACK:
            for plan in self._survey.plans if self._survey is not None else ():
                for shard, chunks in plan:
                    yield Task(job, ShardInPlace(plan.array.path, shard, chunks.tobytes()))
            return
        dataset = mixed_dataset(self.root, self.number)
        for path, array in dataset.plan.arrays.items():
            for shard in dataset.shard_numbers(array).tolist():
                yield Task(job, ShardInPlace(path, shard))

    def _left(self) -> list[Problem]:
        """A problem for each chunk file or shard that should be gone. If there is none, the stage is on the disk."""
        if self._state is None or self._state.stage != Stage.MIXED:
            return []
        dataset = mixed_dataset(self.root, self.number)
        keys = dataset.tidy()
        if self.direction == UNPACK:
            keys = [key for array in dataset.plan.arrays.values() for key in dataset.existing_shards(array)]
        why = "appeared while the job ran; repeat the command"
        return [Problem(key, why, damaged=True) for key in keys]


def _job(options: Mapping[str, Any], *, abort: bool) -> bytes:
    """Identifies a job for `finished`."""
    return json.dumps({"options": options, "abort": abort}, sort_keys=True).encode()


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults, as JSON values."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value}


def make_directories(path: str) -> None:
    """Create a directory and those above it where they are missing, and sync the new names. `path` is absolute.

    If a file has one of these names, later calls fail.
    """
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        make_directories(above)
        with suppress(FileExistsError):
            syscalls.mkdir(path)
        syscalls.fsync_directory(above)
