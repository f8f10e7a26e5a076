"""Jobs with the reports of their tasks, for tests that look at them or give the job up between two tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfs.jobs.in_place import InPlaceRun
from shardfs.jobs.pack import PackRun
from shardfs.jobs.pack_job import PackJob
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from shardfs.jobs.runs import PackReport
    from shardfs.model.values import Coords


def pack(
    source: str,
    target: str,
    *,
    chunks_per_shard: Coords = (),
    arrays: Sequence[str] = (),
    part: JobPart = WHOLE,
    executor: Executor | None = None,
    workers: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Iterator[PackReport]:
    """Run a `PackJob`, of which `how` are further arguments; yield the report of each task."""
    places = JobSource.from_url(source, storage_options), JobSource.from_url(target)
    job = PackJob(*places, tuple(chunks_per_shard), arrays=tuple(arrays), **how)
    yield from PackRun(job, part).run(executor, workers)


def pack_in_place(
    source: str, *, abort: bool = False, executor: Executor | None = None, workers: int = 1, **options: Any
) -> Iterator[PackReport]:
    """Pack in place, or go back, and yield the report of each task. `options` are those of `PackJob`."""
    yield from InPlaceRun(JobSource.from_url(source), abort=abort, options=options).run(executor, workers)
