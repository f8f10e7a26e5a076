"""Work on all shards of a source, as tasks for any `concurrent.futures` executor, here or on other machines.

    from shardfs.jobs import shared_work
    source = shared_work.JobSource.from_url("s3://bucket/brain.zarr", {"anon": True})
    with ProcessPoolExecutor(8) as pool:
        for report in shared_work.verify(source, deep=True, executor=pool, workers=8):
            print(report.findings)

A task is a small value that can be pickled. The worker opens the source itself. If a task fails or its worker dies,
the report has a finding for the task, and the other tasks continue.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar

import numpy as np

from shardfs.formats.layouts import join
from shardfs.jobs.findings import Affected, Damage, Report, ShardPart, ShardTally
from shardfs.jobs.verify import ShardVerifier
from shardfs.model import redact
from shardfs.model.errors import CorruptShardError, message
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalStore
from shardfs.storage.open_store import open_store
from shardfs.storage.retry import RETRIES, TIMEOUT_S, RetryPolicy
from shardfs.vfs.tree import open_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardfs.model.collection import ShardSource
    from shardfs.model.values import U64
    from shardfs.storage.store import Store
    from shardfs.vfs.tree import Tree

WINDOW = 16
"""Maximum number of submitted tasks per worker. Bounds the memory for tasks and reports."""

MOST_SHARDS = 64

MOST_SHARDS_REGIONS = 4
"""The same for tasks whose reports name all affected chunks."""

ANNEXED = "/annex/objects/"
"""Part of each link of git-annex."""

MOST_CHUNKS = 1 << 20
"""Chunks whose index entries may be verified at the same time."""

CACHE = 64 << 20
"""The most bytes of each of `CACHES`, because a machine may run many workers."""

CACHES = ("index_cache_bytes", "chunk_cache_bytes", "prefetch_bytes")
"""Arguments of `open_tree`."""


@dataclass(frozen=True, slots=True)
class JobSource:
    """A source that workers can open: hashable, and can be pickled.

    Args:
        url: an absolute path or an fsspec URL.
        options: storage options as a JSON object.
        follow_symlinks: also follow symbolic links that lead out of a local source.
        reading: further arguments of `open_tree` as a JSON object.
        run: identifies the run. A long-lived worker must not reuse a tree that it opened in an earlier run.
    """

    url: str = field(repr=False)
    options: str = field(default="{}", repr=False)  # both may contain secrets, and clusters log the repr of tasks
    follow_symlinks: bool = False
    reading: str = "{}"
    run: int = field(default_factory=time.time_ns)

    @classmethod
    def from_url(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        follow_symlinks: bool = False,
        **reading: Any,
    ) -> JobSource:
        """Return the source at a path or fsspec URL, which is not opened. Raise TypeError for options JSON lacks.

        Args:
            reading: arguments of `open_tree` about stores and caches, such as `store_timeout_s` and `connections`.
        """
        url = os.fspath(url)
        url = os.path.abspath(url) if redact.is_path(url) else url  # a worker may have another current directory
        return cls(url, json.dumps(storage_options or {}), follow_symlinks, json.dumps(reading))

    def target_store(self) -> Store:
        """Return the store, to write to it, with the time-outs and retries of `reading`. Raise OSError if it cannot.

        Raise FileNotFoundError for a local directory that does not exist.
        """
        reading = json.loads(self.reading)
        retry = RetryPolicy(reading.get("store_timeout_s", TIMEOUT_S), reading.get("store_retries", RETRIES))
        return open_store(self.url, json.loads(self.options), retry=retry)

    def tree(self) -> Tree:
        """Return the tree of the source, opened once per process. Raise the errors of `open_tree`."""
        return _tree(self)

    def open(self, **more: Any) -> Tree:
        """Return a new tree of the source. `more` are further arguments of `open_tree`, whose errors are raised.

        Each of its caches has at most `CACHE` bytes.
        """
        reading = dict.fromkeys(CACHES, CACHE) | {"connections": MOST_SHARDS} | json.loads(self.reading)
        reading |= {name: min(reading[name], CACHE) for name in CACHES}
        options = json.loads(self.options)
        return open_tree(self.url, storage_options=options, follow_symlinks=self.follow_symlinks, **reading, **more)


J_contra = TypeVar("J_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")


class Job(Protocol):
    """What is done with all shards of a source, and how: hashable, and can be pickled."""

    @property
    def source(self) -> JobSource:
        """What to read, as workers open it."""


class Unit(Protocol[J_contra, R_co]):
    """What one task does, such as a shard: a small value that can be pickled."""

    def do(self, job: J_contra) -> R_co:
        """Do this part of the job in the calling process; return the report. An exception leads to `failed`."""

    def split(self) -> Sequence[Self]:
        """Return smaller units that do the same; the unit itself if there are none."""
        return [self]

    def failed(self, job: J_contra, error: BaseException) -> R_co:
        """Return the report of a unit that failed with `error`. Raise an error that ends the whole job."""


@dataclass(frozen=True, slots=True)
class Task(Generic[R]):
    """A part of a job, for any executor. Calling the task does it in the calling process."""

    job: Job
    unit: Unit[Any, R]

    def __call__(self) -> R:
        return self.unit.do(self.job)

    def split(self) -> Sequence[Task[R]]:
        """Return smaller tasks that do the same; one task if there are none."""
        return [Task(self.job, unit) for unit in self.unit.split()]

    def failed(self, error: BaseException) -> R:
        """Return the report of the task if it failed with `error`."""
        return self.unit.failed(self.job, error)


@lru_cache(2)
def _tree(source: JobSource) -> Tree:
    return source.open()


class JobPart(NamedTuple):
    """Part `number` of `of` parts of the work, counted from 1."""

    number: int
    of: int


WHOLE = JobPart(1, 1)


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """A source to verify: see `verify`."""

    source: JobSource
    deep: bool = False
    regions: bool = False


@dataclass(frozen=True, slots=True)
class ShardsToVerify(Unit[VerifyJob, Report]):
    """Some outermost shards of one collection, by their numbers. `collection` is its path on a mount."""

    collection: str
    shards: tuple[int, ...]

    def do(self, job: VerifyJob) -> Report:
        report, tree = Report(self.collection), job.source.tree()
        verifier = ShardVerifier(tree.collection(self.collection), deep=job.deep, regions=job.regions)
        pool = None if job.deep else tree.store.read_ahead  # several whole shards would take much memory
        reports = load_ahead(pool, verifier.verify, self.shards, weigh=lambda r: r.tally.chunks, room=MOST_CHUNKS)
        for _, shard_report in reports:
            report.add(shard_report)
        return report

    def split(self) -> list[ShardsToVerify]:
        return [ShardsToVerify(self.collection, (shard,)) for shard in self.shards]

    def failed(self, job: VerifyJob, error: BaseException) -> Report:
        key = job.source.tree().collection(self.collection).shards.outermost.source.key(self.shards[0])
        died = isinstance(error, BrokenExecutor)
        why = "the process that did it died" if died else message(error) or type(error).__name__
        affected = Affected(parts=tuple(ShardPart(0, shard) for shard in self.shards))
        finding = Damage(self.collection, key, "task", f"could not be verified: {why}", (), 1, affected)
        return Report(self.collection, ShardTally(shards=len(self.shards), findings=1), [finding])


def run_task(task: Task[R]) -> R:
    """Run a task in a worker; return its report. A function, because clusters show its name for each task."""
    source = task.job.source
    redact.add_secrets(source.url, json.loads(source.options))
    return task()


class Plan(NamedTuple):
    """The shards of one collection to verify.

    Args:
        collection: the path of the collection on a mount.
        shards: the numbers of its outermost shards in this part (n,), ascending.
        strays: findings about objects that only have names of shards, and directories of shards that may not be listed.
    """

    collection: str
    shards: U64
    strays: tuple[Damage, ...] = ()


def plan(source: JobSource, part: JobPart = WHOLE) -> Iterator[Plan]:
    """Yield a plan for each collection, in the order of paths, with the shards of `part`.

    A local directory of shards that may not be listed becomes a finding, unless there are several parts. Raise the
    other errors of listing.

    Shards are assigned to parts round-robin across all collections. Each shard is in exactly one part, and the parts
    have about the same size. The assignment is the same in every run while no shard is added or removed.
    """
    dealt = 0
    for tree in sorted(source.tree().collections(), key=lambda tree: tree.path):
        source_of_shards = tree.shards.outermost.source
        try:
            shards, faults = source_of_shards.survey()
        except PermissionError as e:  # the other collections can be verified nevertheless
            if source.tree().store.remote or part.of > 1:  # workers that see different shards would not share them
                raise
            shards, faults = np.zeros(0, np.uint64), [CorruptShardError("", tree.path, message(e))]
        first = (part.number - 1 - dealt) % part.of
        dealt += len(shards)
        strays = (_stray(tree.path, source_of_shards, fault) for fault in faults if part.number == 1)
        yield Plan(tree.path, shards[first :: part.of], tuple(strays))


def _stray(collection: str, source: ShardSource, fault: CorruptShardError) -> Damage:
    shard = source.number(fault.key)
    affected = Affected() if shard is None else Affected(parts=(ShardPart(0, shard),))
    return Damage(collection, fault.key, "read", fault.why, (), 1, affected)


def tasks(job: VerifyJob, plans: Iterable[Plan], workers: int = 1) -> Iterator[Task[Report]]:
    """Yield tasks for the shards of these plans, in their order: enough tasks to keep all workers busy.

    A task has at most `MOST_SHARDS` shards, or `MOST_SHARDS_REGIONS` if the job is about regions.
    """
    limit = MOST_SHARDS_REGIONS if job.regions else MOST_SHARDS
    for p in plans:
        per = min(limit, max(1, len(p.shards) // (workers * WINDOW)))
        for i in range(0, len(p.shards), per):
            yield Task(job, ShardsToVerify(p.collection, tuple(p.shards[i : i + per].tolist())))


def verify(
    source: JobSource,
    plans: Iterable[Plan] | None = None,
    *,
    deep: bool = False,
    executor: Executor | None = None,
    workers: int = 1,
    regions: bool = False,
) -> Iterator[Report]:
    """Verify all shards of the plans, by default of the whole source. Yield reports in the order of the shards.

    Errors of the store and of the data become findings. Raise OSError if the executor gave up all tasks.

    Args:
        deep: read and decode every chunk.
        executor: runs the tasks. None runs them in this process if `workers` is 1, else in `workers` new processes.
        workers: number of tasks that the executor can run at a time.
        regions: name all affected chunks in the findings, for `shardfs.jobs.regions`.
    """
    plans = list(plan(source) if plans is None else plans)
    for p in plans:
        if p.strays:
            yield Report(p.collection, ShardTally(findings=len(p.strays)), list(p.strays))
    yield from run(tasks(VerifyJob(source, deep, regions), plans, workers), executor, workers)


def run(work: Iterator[Task[R]], executor: Executor | None = None, workers: int = 1) -> Iterator[R]:
    """Run tasks, and yield their reports in the order of the tasks: see `verify` for the arguments.

    Raise OSError if the executor gave up all tasks. A task that fails is a report: see `Unit.failed`.
    """
    if executor is None and workers == 1:
        for task in work:
            yield _report(task, partial(run_task, task))
        return
    runner: _Runner[R] = _Runner(executor, workers)
    try:
        yield from runner.run(work)
    finally:
        runner.close()


def _report(task: Task[R], call: Callable[[], R]) -> R:
    """Return the report that `call` returns for a task; an exception becomes a finding.

    Raise BrokenExecutor if a worker died, perhaps because of another task; OSError if the executor gave up all tasks.
    """
    try:
        return call()
    except BrokenExecutor:
        raise
    except CancelledError as e:
        raise _lost(e) from e
    except Exception as e:  # noqa: BLE001 - one broken shard must not end the run; the finding contains the error
        return task.failed(e)


def _lost(error: Exception) -> OSError:
    why = (
        "the executor has given up all tasks, as when the scheduler of a Dask cluster ends; repeat the job to continue"
    )
    return OSError(errno.ECONNABORTED, f"{why} ({message(error).rstrip(': ')})")


def unreadable(source: JobSource) -> list[Damage]:
    """Return a finding for each part of the source that cannot be opened, and so cannot be verified.

    Lists all directories of a local source, to find links that lead nowhere.
    """
    tree = source.tree()
    reasons = dict(_lost_links(tree, tree.store)) if isinstance(tree.store, LocalStore) else {}
    reasons |= {problem.path: problem.why for problem in tree.problems()}
    return [Damage(path, "", "metadata", why) for path, why in reasons.items()]


def _lost_links(tree: Tree, store: LocalStore) -> Iterator[tuple[str, str]]:
    """Yield each link that may stand for an array but leads to no directory of the source, and the reason."""
    for directory in tree.directories.walk():
        content = directory.content
        if content is None or content.chunks is not None or (content.dataset is not None and content.dataset.closed):
            continue
        try:
            names = [name for name, _ in store.names(directory.inside) if not name.startswith(".")]
        except OSError:  # another finding is about the directory
            continue
        for name in names:
            path = join(directory.inside, name)
            if _may_be_an_array(store.path(path)):
                try:
                    store.entry(path)
                except OSError as e:
                    yield path, message(e)


def _may_be_an_array(place: str) -> bool:
    """Return whether it is a link that may stand for an array. Links to files do not; git-annex has no others."""
    try:
        return not os.path.isfile(place) and ANNEXED not in os.readlink(place)
    except OSError:  # no link
        return False


# ---- executors


def processes(workers: int) -> Executor:
    """Return an executor of `workers` local processes, to be shut down by the caller.

    They are spawned, because fsspec's threads do not survive a fork.
    """
    context = multiprocessing.get_context("spawn")
    return _Processes(workers, context, initializer=_die_quietly)


class _Processes(ProcessPoolExecutor):
    """Local processes, which Ctrl-C ends without a traceback, also while they start."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        resource_tracker.ensure_running()  # its start would unblock the signal
        # A new process inherits the mask, until it can end quietly. This process gets the signal after the call.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _die_quietly() -> None:
    """End a worker without a traceback at Ctrl-C, which the main process gets, too, or if that process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


class _Runner(Generic[R]):
    """Runs a bounded number of tasks at a time. Replaces its own executor after a worker died, never a given one."""

    def __init__(self, executor: Executor | None, workers: int) -> None:
        self._owned = executor is None
        self._workers = workers
        self._executor = processes(workers) if executor is None else executor

    def run(self, work: Iterator[Task[R]]) -> Iterator[R]:
        """Yield reports in the order of the tasks."""
        submitted: deque[tuple[Task[R], Future[R]]] = deque()
        while True:
            for task in islice(work, self._workers * WINDOW - len(submitted)):
                submitted.append((task, self._submit(task)))
            if not submitted:
                return
            task, future = submitted[0]
            try:
                report = _report(task, future.result)
            except BrokenExecutor as e:
                if self._owned:
                    yield from self._again(submitted)
                    continue
                report = task.failed(e)
            submitted.popleft()
            yield report

    def _submit(self, task: Task[R]) -> Future[R]:
        try:
            return self._executor.submit(run_task, task)
        except BrokenExecutor as e:
            future: Future[R] = Future()
            future.set_exception(e)
            return future
        except Exception as e:
            raise _lost(e) from e

    def _again(self, submitted: deque[tuple[Task[R], Future[R]]]) -> Iterator[R]:
        """Report all submitted tasks after a worker died.

        Any unfinished task may have killed the worker. So each of them runs again alone, then shard by shard if needed.
        """
        self._replace(1)
        for task, future in submitted:
            has_report = future.done() and not future.cancelled() and future.exception() is None
            yield from (future.result(),) if has_report else self._alone(task)
        submitted.clear()
        self._replace(self._workers)

    def _alone(self, task: Task[R]) -> Iterator[R]:
        try:
            yield _report(task, self._submit(task).result)
        except BrokenExecutor as e:
            self._replace(1)
            parts = task.split()
            if len(parts) == 1:
                yield task.failed(e)
                return
            for one in parts:
                yield from self._alone(one)

    def _replace(self, workers: int) -> None:
        self.close()
        self._executor = processes(workers)

    def close(self) -> None:
        if self._owned:
            self._executor.shutdown(cancel_futures=True)
