"""The verbs `pack` and `unpack`."""

from __future__ import annotations

import resource
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.job_options import RunOptions, run_options, source_of_job, target_of_job
from shardfs.cli.printing import ProgressDisplay, echo, write_json
from shardfs.cli.source_options import CommandOptions, source_options
from shardfs.config import loading, parsers
from shardfs.config.parsers import absolute
from shardfs.model.errors import OptionError
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted, human_bytes
from shardfs.storage.source_errors import opening

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.config.options import Options
    from shardfs.jobs.in_place import InPlaceRun
    from shardfs.jobs.runs import PackReport, Run
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.values import Coords

_run_options = run_options("--part", "Do only part I of N.", "One JSON object per line: problems, then counts.")


def _chunks_per_shard(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Coords:
    from shardfs.formats import create_rules

    try:
        return () if text is None else create_rules.parse_chunks_per_shard(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parsers.size(text)
    except OptionError as e:
        raise click.BadParameter(str(e)) from None


@click.command()
@click.option("--chunks-per-shard", "per_shard", metavar="N,...", callback=_chunks_per_shard, help="Such as 8,8,8.")
@click.option("--shard-size", metavar="SIZE", callback=_size, help="Size of a shard before compression, such as 512M.")
@click.option("--format", type=click.Choice(("zarr3", "n5", "precomputed", "bcolz")), help="Format of DEST.")
@click.option("--transcode", is_flag=True, help="Decode and encode chunks that DEST cannot store unchanged.")
@click.option("--array", "arrays", multiple=True, metavar="PATH", help="Only this array; copy other files.")
@click.option("--in-place", is_flag=True, help="Replace the files of SOURCE instead of writing to DEST.")
@click.option("--abort", is_flag=True, help="With --in-place: go back to the former files of SOURCE.")
@click.argument("source")
@click.argument("dest", required=False)
@_run_options
@source_options
def pack(
    source: str,
    dest: str | None,
    in_place: bool,
    abort: bool,
    per_shard: Coords,
    shard_size: int | None,
    format: str | None,
    transcode: bool,
    arrays: tuple[str, ...],
    run_options: RunOptions,
    command_options: CommandOptions,
) -> int:
    """Turn chunk files into shards, in DEST or --in-place.

    DEST is a directory or a URL. Zarr v2 becomes Zarr v3; Zarr v3, N5, precomputed and bcolz keep their format unless
    you give --format. Copies the bytes of chunks without decoding. Repeat an interrupted command to continue. Exit
    code 3 if some files could not be packed; see docs/pack.md.
    """
    from shardfs.jobs.pack import PackRun
    from shardfs.jobs.pack_job import PackJob

    if per_shard and shard_size is not None:
        raise click.UsageError("--chunks-per-shard and --shard-size exclude each other")
    options = command_options.options()
    arrays = tuple(path.strip("/") for path in arrays)
    if options.chunk_codec is not None or options.unsupported == "skip":
        raise click.UsageError("-o chunk_codec and -o unsupported=skip do not go with pack; see --transcode")
    if _is_in_place(dest, run_options, in_place=in_place, abort=abort):
        if format is not None or transcode:
            raise click.UsageError("--format and --transcode do not go with --in-place; give DEST")
        how = {"chunks_per_shard": per_shard, "shard_bytes": shard_size, "arrays": arrays}
        return _run(source, _in_place(source, options, how, abort=abort), run_options)
    job = PackJob(*_places(source, dest, options), per_shard, shard_size, arrays, format or "", transcode)
    return _run(source, lambda: PackRun(job, run_options.part, options.journal), run_options)


@click.command()
@click.option("--layout", metavar="NAME", help="Files of this layout: native, zarr2, zarr3, n5, precomputed, bcolz.")
@click.argument("source")
@click.argument("dest")
@_run_options
@source_options
def unpack(source: str, dest: str, layout: str | None, run_options: RunOptions, command_options: CommandOptions) -> int:
    """Turn shards into chunk files, in DEST.

    DEST gets the files that a mount of SOURCE shows. Without --layout, copies the bytes of chunks without decoding.
    Repeat an interrupted command to continue. Exit code 3 if some files could not be unpacked; see docs/pack.md.
    """
    from shardfs.jobs.unpack import UnpackRun
    from shardfs.jobs.unpack_job import UnpackJob

    options, _ = command_options.merged({"layout": layout})
    loading.check(options)
    job = UnpackJob(
        *_places(source, dest, options),
        options.layout,
        options.chunk_codec,
        options.unsupported == "skip",
    )
    return _run(source, lambda: UnpackRun(job, run_options.part, options.journal), run_options)


def _places(source: str, dest: str | None, options: Options) -> tuple[JobSource, JobSource]:
    return source_of_job(source, options), target_of_job(dest or "", options)


def _is_in_place(dest: str | None, run_options: RunOptions, *, in_place: bool, abort: bool) -> bool:
    """Whether the job is one in place. Raise UsageError for options that contradict each other."""
    if in_place == (dest is not None):
        raise click.UsageError("give either DEST or --in-place")
    if abort and not in_place:
        raise click.UsageError("--abort needs --in-place; to give up another job, delete DEST")
    if in_place and run_options.part.of > 1:
        raise click.UsageError("--part does not go with --in-place; use --jobs")
    if in_place and run_options.dask is not None:
        raise click.UsageError("--dask does not go with --in-place, which works on one machine; use --jobs")
    return in_place


def _in_place(source: str, options: Options, how: dict[str, Any], *, abort: bool) -> Callable[[], InPlaceRun]:
    from shardfs.jobs.in_place import InPlaceRun
    from shardfs.jobs.shared_work import JobSource

    job = JobSource.from_url(absolute(source))
    return lambda: InPlaceRun(job, abort=abort, options=how, journals=options.journal)


def _run(source: str, prepare: Callable[[], Run], run_options: RunOptions) -> int:
    """Run what `prepare` returns, and print its reports; return the exit code."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for files that the kernel copies; workers inherit it
    with ExitStack() as stack:
        executor, workers = run_options.executor(stack)
        with opening(source):
            work = prepare()
        output = _JobOutput(work, as_json=run_options.as_json)
        stack.enter_context(output.progress)
        try:
            for report in work.run(executor, workers):
                output.report(report)
        except KeyboardInterrupt:
            echo("interrupted: repeat the command to continue", err=True)
            raise
    return output.print_counts()


class _JobOutput:
    """Prints problems as they arrive, and counts at the end, as JSON or text. Text comes with progress."""

    def __init__(self, work: Run, *, as_json: bool) -> None:
        self._work = work
        self._as_json = as_json
        self._nbytes = 0
        self._problems = 0
        self.progress = ProgressDisplay(work.files // work.part.of, enabled=not as_json)

    def report(self, report: PackReport) -> None:
        self._nbytes += report.nbytes
        if report.files:
            self.progress.advance(report.files, report.nbytes)
        for problem in report.problems:
            self._problems += problem.damaged
            if self._as_json:
                write_json({"type": "problem", "path": problem.path, "why": problem.why, "failed": problem.damaged})
            else:
                echo(f"{problem.path or '/'}: {problem.why}", err=True)

    def print_counts(self) -> int:
        """Print the counts; return the exit code."""
        work = self._work
        if self._as_json:
            counts = {"files": work.files, "objects": work.objects, "shards": work.shards, "bytes": self._nbytes}
            counts |= {"problems": self._problems}
            write_json({"type": "end", **counts, "finished": work.finished, "repeated": work.repeated})
        elif work.repeated:
            echo("finished already by an earlier run of this job; nothing was done")
        elif work.finished and not work.files:
            echo("finished")
        elif work.finished:
            become = "file becomes" if work.files == 1 else "files become"
            echo(f"{work.files:,} {become} {work.objects:,} ({human_bytes(self._nbytes)} copied)")
        elif self._problems:
            echo(f"not finished: {counted(self._problems, 'problem')}; solve them, and repeat the command", err=True)
        else:
            echo(f"part {work.part.number} of {work.part.of} is done; the last part to end writes the metadata")
        return ExitCode.LEFT if self._problems else ExitCode.OK
