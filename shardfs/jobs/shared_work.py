"""Work on all shards of a source, as tasks for any `concurrent.futures` executor, here or on other machines.

    from shardfs import jobs
    source = jobs.Source.of("s3://bucket/brain.zarr", {"anon": True})
    with ProcessPoolExecutor(8) as pool:
        for report in jobs.verify(source, deep=True, executor=pool, workers=8):
            print(report.findings)

A task is a small value that can be pickled; whoever runs it opens the source by itself. A task that fails, or whose
worker dies, becomes a finding, and the others go on.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections import deque
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.jobs.verify import Damage, Report, ShardTally, ShardVerifier
from shardfs.model import redact
from shardfs.model.errors import message
from shardfs.vfs.tree import open_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.model.dataset import Problem
    from shardfs.model.values import U64
    from shardfs.vfs.tree import Tree

WINDOW = 16
"""Tasks for each worker that wait or run at a time, so that neither tasks nor reports pile up."""

MOST_SHARDS = 64
CACHE = 64 << 20


@dataclass(frozen=True, slots=True)
class JobSource:
    """What to open, in a form that travels.

    Args:
        options: storage options as a JSON object.
        run: tells runs apart: a worker that lives on must not trust what it has seen of the source in another.
    """

    url: str = field(repr=False)
    options: str = field(default="{}", repr=False)  # neither is for logs, and clusters log the tasks that they get
    follow_symlinks: bool = False
    run: int = field(default_factory=time.time_ns)

    @classmethod
    def of(
        cls, url: str, storage_options: Mapping[str, Any] | None = None, *, follow_symlinks: bool = False
    ) -> JobSource:
        """Of a path or fsspec URL; the storage options must be such that JSON can hold them."""
        return cls(url, json.dumps(storage_options or {}), follow_symlinks)

    def tree(self) -> Tree:
        """Its tree, one for each process. Raises as `open_tree`."""
        return _tree(self)


@lru_cache(2)
def _tree(source: JobSource) -> Tree:
    return open_tree(
        source.url,
        storage_options=json.loads(source.options),
        index_cache_bytes=CACHE,
        chunk_cache_bytes=CACHE,
        follow_symlinks=source.follow_symlinks,
    )


class JobPart(NamedTuple):
    """One of `of` equal parts of the work, counted from 1."""

    number: int
    of: int


WHOLE = JobPart(1, 1)


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Verify some shards of one collection. Called, it does so, wherever that is."""

    source: JobSource
    collection: str
    shards: tuple[int, ...]
    deep: bool = False

    def __call__(self) -> Report:
        report = Report(self.collection)
        verifier = ShardVerifier(self.source.tree().collection(self.collection), deep=self.deep)
        for shard in self.shards:
            report.add(verifier.verify(shard))
        return report

    def split(self) -> Iterator[VerifyTask]:
        """One for each shard."""
        for shard in self.shards:
            yield VerifyTask(self.source, self.collection, (shard,), self.deep)

    def failed(self, error: BaseException) -> Report:
        """The report of a task that did not end."""
        finding = Damage(self.collection, self._key(), "task", f"could not be verified: {_reason(error)}")
        n = len(self.shards)
        return Report(self.collection, ShardTally(shards=n, findings=1), [finding])

    def _key(self) -> str:
        source = self.source.tree().collection(self.collection).chunks
        while source.outer is not None:
            source = source.outer
        return source.source.key(self.shards[0])


def verify_shards(task: VerifyTask) -> Report:
    """What workers run: clusters call a task by the name of its function."""
    redact.remember(task.source.url, json.loads(task.source.options))
    return task()


def _reason(error: BaseException) -> str:
    if isinstance(error, BrokenExecutor):
        return "the process that did it died"
    return message(error) or type(error).__name__


class Plan(NamedTuple):
    """The shards of one collection that are to be looked into; and what is called as a shard is, but is none."""

    collection: str
    shards: U64
    strays: tuple[Damage, ...] = ()


def plan(source: JobSource, part: JobPart = WHOLE) -> Iterator[Plan]:
    """Of all collections; the parts with the same `of` share all shards out, each to one part.

    Shards are dealt round and round, over all collections, so that each part has about as many: it is the same part
    each time as long as no shard is added or removed.
    """
    dealt = 0
    for tree in sorted(source.tree().collections(), key=lambda tree: tree.path):
        outermost = tree.chunks
        while outermost.outer is not None:
            outermost = outermost.outer
        shards, faults = outermost.source.survey()
        first = (part.number - 1 - dealt) % part.of
        dealt += len(shards)
        strays = (Damage(tree.path, fault.key, "read", fault.why) for fault in faults if part.number == 1)
        yield Plan(tree.path, shards[first :: part.of], tuple(strays))


def tasks(source: JobSource, plans: Iterable[Plan], *, deep: bool = False, workers: int = 1) -> Iterator[VerifyTask]:
    """The work of these plans, in pieces that are neither too small to send around nor too few to go round."""
    for p in plans:
        per = min(MOST_SHARDS, max(1, len(p.shards) // (workers * WINDOW)))
        for i in range(0, len(p.shards), per):
            yield VerifyTask(source, p.collection, tuple(p.shards[i : i + per].tolist()), deep)


def verify(
    source: JobSource,
    plans: Iterable[Plan] | None = None,
    *,
    deep: bool = False,
    executor: Executor | None = None,
    workers: int = 1,
) -> Iterator[Report]:
    """Verify what is planned, by default all of a source. Reports come in the order of shards, however it is done.

    Args:
        executor: does the work, of which `workers` pieces may be under way at a time. Without one the work is done
            here if `workers` is 1, else in so many processes.
    """
    plans = list(plan(source) if plans is None else plans)
    for p in plans:
        if p.strays:
            yield Report(p.collection, ShardTally(findings=len(p.strays)), list(p.strays))
    work = tasks(source, plans, deep=deep, workers=workers)
    if executor is None and workers == 1:
        yield from map(_run_here, work)
        return
    runner = _Runner(executor, workers)
    try:
        yield from runner.run(work)
    finally:
        runner.close()


def _run_here(task: VerifyTask) -> Report:
    try:
        return verify_shards(task)
    except Exception as e:  # noqa: BLE001 - one broken shard must not end the run; the finding tells
        return task.failed(e)


def unreadable(problem: Problem) -> Damage:
    """What was not expanded, and so cannot be verified."""
    return Damage(problem.path, "", "metadata", problem.why)


# ---- executors


def processes(workers: int) -> Executor:
    """So many processes on this machine, each started afresh: fsspec's threads survive no fork."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_die_quietly)


def _die_quietly() -> None:
    """Interrupted from the keyboard, all processes of a group are; the first one tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Slot:
    """A task, and the future of its report."""

    __slots__ = ("future", "task")

    def __init__(self, task: VerifyTask, executor: Executor) -> None:
        self.task = task
        try:
            self.future: Future[Report] = executor.submit(verify_shards, task)
        except BrokenExecutor as e:
            self.future = Future()
            self.future.set_exception(e)

    def report(self) -> Report:
        """What it found, or how it failed. Raise BrokenExecutor if somebody else may be to blame for that."""
        try:
            return self.future.result()
        except BrokenExecutor:
            raise
        except Exception as e:  # noqa: BLE001 - whatever a worker raised is told as a finding
            return self.task.failed(e)


class _Runner:
    """Runs tasks, a bounded number at a time. An executor of its own is replaced when a dead worker has broken it."""

    def __init__(self, executor: Executor | None, workers: int) -> None:
        self._owned, self._workers = executor is None, workers
        self._executor = processes(workers) if executor is None else executor

    def run(self, work: Iterator[VerifyTask]) -> Iterator[Report]:
        """Reports, in the order of tasks."""
        slots: deque[_Slot] = deque()
        while True:
            for task in islice(work, self._workers * WINDOW - len(slots)):
                slots.append(_Slot(task, self._executor))
            if not slots:
                return
            try:
                report = slots[0].report()
            except BrokenExecutor as e:
                if self._owned:
                    yield from self._again(slots)
                    continue
                report = slots[0].task.failed(e)
            slots.popleft()
            yield report

    def _again(self, slots: deque[_Slot]) -> Iterator[Report]:
        """After a worker died: any task under way may be to blame, so these are done one by one."""
        self.close()
        self._executor = processes(1)
        for slot in slots:
            done = slot.future.done() and not slot.future.cancelled() and slot.future.exception() is None
            yield from (slot.future.result(),) if done else self._alone(slot.task)
        slots.clear()
        self.close()
        self._executor = processes(self._workers)

    def _alone(self, task: VerifyTask) -> Iterator[Report]:
        try:
            yield _Slot(task, self._executor).report()
        except BrokenExecutor as e:
            self.close()
            self._executor = processes(1)
            if len(task.shards) == 1:
                yield task.failed(e)
                return
            for one in task.split():
                yield from self._alone(one)

    def close(self) -> None:
        if self._owned:
            self._executor.shutdown(cancel_futures=True)
