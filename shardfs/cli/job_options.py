"""Options that jobs share, and what they say: workers, parts of a job, its source and target as workers open them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from shardfs.cli.source_options import decorated
from shardfs.config.parsers import absolute

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from contextlib import ExitStack

    from shardfs.config.options import Options
    from shardfs.jobs.shared_work import JobPart, JobSource


class RunOptions(NamedTuple):
    """How a verb runs a job.

    Args:
        jobs: the number of local processes, from 1; not used with `dask`.
        dask: the address or the scheduler file of a Dask cluster; None for local processes.
        part: the part of the job to do.
        as_json: print JSON instead of text.
    """

    jobs: int
    dask: str | None
    part: JobPart
    as_json: bool

    def executor(self, stack: ExitStack) -> tuple[Executor | None, int]:
        """The executor for `run` of a job, which `stack` closes, and the number of its workers.

        None stands for local processes. Raise UsageError without the package distributed, and the errors of
        `dask_executor`.
        """
        if self.dask is None:
            return None, self.jobs
        from shardfs.jobs.dask_cluster import dask_executor

        try:
            return stack.enter_context(dask_executor(self.dask))
        except ImportError as e:
            raise click.UsageError(f"--dask needs the package distributed: pip install distributed ({e})") from e


def run_options(part: str, part_help: str, json_help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the options of all jobs. The function gets `run_options`.

    `part` is the name of the option for the part to do, and `part_help` and `json_help` are the help of two options.
    """

    def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def verb(jobs: int, dask: str | None, part: JobPart, as_json: bool, **arguments: Any) -> Any:
            return function(run_options=RunOptions(jobs, dask, part, as_json), **arguments)

        return decorated(
            click.option(
                "--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Work in N processes.  [1]"
            ),
            click.option(
                "--dask", metavar="ADDRESS|FILE", help="Work on a Dask cluster: its scheduler's address or file."
            ),
            click.option(part, "part", default="1/1", metavar="I/N", callback=_parse_part, help=part_help),
            click.option("--json", "as_json", is_flag=True, help=json_help),
        )(verb)

    return with_options


def _parse_part(_ctx: click.Context, _param: click.Parameter, text: str) -> JobPart:
    """Parse the value of an option of the form I/N, as a callback of click."""
    from shardfs.jobs.shared_work import JobPart

    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.BadParameter(f"{text!r} is not of the form i/n, with i from 1 to n")
    return JobPart(int(number), int(of))


def source_of_job(source: str, options: Options) -> JobSource:
    """The source as workers open it, with all options for reading it. Raise OptionError for an empty path."""
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
    """The target as workers open it, with the storage options of the source. Raise OptionError for an empty path."""
    from shardfs.jobs.shared_work import JobSource

    retry: dict[str, Any] = {"store_timeout_s": options.store_timeout, "store_retries": options.store_retries}
    return JobSource.from_url(absolute(target), options.storage_options, **retry)
