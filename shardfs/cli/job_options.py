"""Options that jobs share, and what they say: parts of a job, its source and target as workers open them, executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardfs.config.parsers import absolute

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from contextlib import ExitStack

    from shardfs.config.options import Options
    from shardfs.jobs.shared_work import JobPart, JobSource


def part_of(_ctx: click.Context, _param: click.Parameter, text: str) -> JobPart:
    """Parse the value of an option of the form I/N, as a callback of click."""
    from shardfs.jobs.shared_work import JobPart

    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.BadParameter(f"{text!r} is not of the form i/n, with i from 1 to n")
    return JobPart(int(number), int(of))


def source_of_job(source: str, options: Options) -> JobSource:
    """The source as workers open it, with all options for reading it."""
    from shardfs.jobs.shared_work import JobSource

    return JobSource.from_url(
        absolute(source),
        options.storage_options,
        follow_symlinks=options.symlinks == "follow",
        store_timeout_s=options.store_timeout,
        store_retries=options.store_retries,
        index_cache_bytes=options.index_cache,
        chunk_cache_bytes=options.chunk_cache,
        prefetch_bytes=options.prefetch,
        connections=options.connections,
        cache_dir=options.cache_dir,
        cache_size=options.cache_size,
        offline=options.offline,
    )


def target_of_job(target: str, options: Options) -> JobSource:
    """The target as workers open it."""
    from shardfs.jobs.shared_work import JobSource

    retry: dict[str, Any] = {"store_timeout_s": options.store_timeout, "store_retries": options.store_retries}
    return JobSource.from_url(absolute(target), options.storage_options, **retry)


def executor_of(dask: str | None, jobs: int, stack: ExitStack) -> tuple[Executor | None, int]:
    """The executor for the options `--dask` and `--jobs`, and the number of its workers."""
    if dask is None:
        return None, jobs
    from shardfs.jobs.dask_cluster import dask_executor

    try:
        return stack.enter_context(dask_executor(dask))
    except ImportError as e:
        raise click.UsageError(f"--dask needs the package distributed: pip install distributed ({e})") from e
