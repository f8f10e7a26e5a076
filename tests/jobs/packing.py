"""Jobs with the reports of their tasks, for tests that look at them or give the job up between two tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfs.jobs.in_place import InPlaceRun
from shardfs.jobs.pack import PackRun
from shardfs.jobs.pack_job import PackJob
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from shardfs.storage.pack_state import PACK, UNPACK

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
    places = JobSource.of(source, storage_options), JobSource.of(target)
    job = PackJob(*places, tuple(chunks_per_shard), arrays=tuple(arrays), **how)
    yield from PackRun(job, part).run(executor, workers)


def pack_in_place(source: str, **how: Any) -> Iterator[PackReport]:
    """Pack in place, and yield the report of each task. `how` are arguments of `in_place`."""
    return in_place(source, PACK, **how)


def unpack_in_place(source: str, **how: Any) -> Iterator[PackReport]:
    """Unpack in place, and yield the report of each task. `how` are arguments of `in_place`."""
    return in_place(source, UNPACK, **how)


def in_place(
    source: str,
    command: str,
    *,
    abort: bool = False,
    executor: Executor | None = None,
    workers: int = 1,
    **options: Any,
) -> Iterator[PackReport]:
    """Do a job in place. `options` are those of the command."""
    yield from InPlaceRun(JobSource.of(source), command, abort=abort, options=options).run(executor, workers)
