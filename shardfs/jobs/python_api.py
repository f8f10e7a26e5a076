"""The arguments and results that `shardfs.pack` and `shardfs.unpack` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from shardfs.jobs.shared_work import JobPart, JobSource
from shardfs.model.dataset import Problem
from shardfs.model.errors import UnfinishedJobError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from shardfs.jobs.runs import Run

MOST_PROBLEMS = 1000
"""Problems that `complete` lists."""


class JobOptions(TypedDict, total=False):
    """Keyword arguments of `shardfs.pack` and `shardfs.unpack`; all may be omitted.

    Attributes:
        jobs: the number of processes. More than one need `if __name__ == "__main__":` in a script.
        part: (i, n) does part i of n, counted from 1. The part that ends last completes `dest`.
        executor: runs the tasks instead of new processes; `jobs` is then the number of tasks that it runs at a time.
        progress: called in this thread after each task, which is a shard or a batch of other files.
        follow_symlinks: also copy the targets of symbolic links that lead out of the source.
        storage_options: passed to the fsspec file system of the source. The values must be JSON serializable.
        dest_storage_options: the same for `dest`; those of the source if omitted.
    """

    jobs: int
    part: tuple[int, int]
    executor: Executor | None
    progress: Callable[[Progress], object] | None
    follow_symlinks: bool
    storage_options: Mapping[str, Any] | None
    dest_storage_options: Mapping[str, Any] | None


class Progress(NamedTuple):
    """How far a job is.

    Attributes:
        files: the number of files of the source that are finished, also by earlier runs.
        of_files: the number of all files; estimated if this is a part of the job.
        nbytes: the bytes that this run has copied.
    """

    files: int
    of_files: int
    nbytes: int


class JobResult(NamedTuple):
    """What a job, or a part of it, has done.

    Attributes:
        files: the number of files of the source, apart from documents.
        objects: the number of files of the target, apart from documents; after a part, of those that the part made; 0
            if the job had ended before.
        shards: the number of shards that were made or unpacked.
        nbytes: the bytes that were copied; files that existed in the target do not count.
        problems: files that were left out, with reasons.
        finished: whether the target is complete. False after a part, unless it was the last one to end.
    """

    files: int
    objects: int
    shards: int
    nbytes: int
    problems: Sequence[Problem]
    finished: bool


def complete(work: Run, options: JobOptions) -> JobResult:
    """Do all work of the run; return the counts. Raise UnfinishedJobError if some files failed.

    Raise the errors of `Run.run`, and those that `progress` raises.
    """
    progress = options.get("progress")
    nbytes, files, failed, of_files = 0, 0, 0, work.files // work.part.of
    problems = list[Problem]()
    for report in work.run(options.get("executor"), options.get("jobs", 1)):
        files, nbytes = files + report.files, nbytes + report.nbytes
        failed += sum(p.damaged for p in report.problems)
        problems += report.problems[: MOST_PROBLEMS - len(problems)]
        if progress is not None:
            progress(Progress(files, max(files, of_files), nbytes))
    if failed:
        raise UnfinishedJobError(failed, [p for p in problems if p.damaged])
    return JobResult(work.files, work.objects, work.shards, nbytes, problems, work.finished)


def part_of(options: JobOptions) -> JobPart:
    """Return the part to do, by default the whole job."""
    return JobPart(*options.get("part", (1, 1)))


def places(
    source: str | os.PathLike[str], dest: str | os.PathLike[str], options: JobOptions
) -> tuple[JobSource, JobSource]:
    """Return source and target of a job that is not in place, as workers open them."""
    storage = options.get("storage_options")
    return (
        JobSource.from_url(source, storage, follow_symlinks=options.get("follow_symlinks", False)),
        JobSource.from_url(dest, options.get("dest_storage_options") or storage),
    )


def in_place(
    source: str | os.PathLike[str],
    options: JobOptions,
    how: Mapping[str, Any],
    *,
    abort: bool,
) -> JobResult:
    """Pack in place, or go back for `abort`; return what was done. `how` are options of `PackJob`.

    Raise TypeError for options that do not go with it, and the errors of `InPlaceRun` and `complete`.
    """
    from shardfs.jobs.in_place import InPlaceRun

    if options.get("part", (1, 1)) != (1, 1) or options.get("follow_symlinks"):
        raise TypeError("part and follow_symlinks do not go with in_place=True")
    return complete(InPlaceRun(JobSource.from_url(source), abort=abort, options=how), options)
