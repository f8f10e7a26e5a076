"""The verb `pack`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from shardfs.cli.jobs import part_of
from shardfs.cli.printing import human_bytes, printable, write_json
from shardfs.cli.sources import Given, absolute, opening, source_options
from shardfs.config import parsers

if TYPE_CHECKING:
    from shardfs.jobs.pack import PackReport, PackRun
    from shardfs.jobs.shared_work import JobPart
    from shardfs.model.values import Coords

UNFINISHED = 3
"""Exit code if some files could not be packed."""


def _chunks_per_shard(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Coords:
    from shardfs.formats import create_rules

    try:
        return () if text is None else create_rules.parse_chunks_per_shard(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _size(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parsers.size(text)
    except parsers.OptionError as e:
        raise click.BadParameter(str(e)) from None


@click.command()
@click.argument("source")
@click.argument("dest")
@click.option("--chunks-per-shard", "per_shard", metavar="N,...", callback=_chunks_per_shard, help="Such as 8,8,8.")
@click.option("--shard-size", metavar="SIZE", callback=_size, help="Size of a shard before compression, such as 512M.")
@click.option("--array", "arrays", multiple=True, metavar="PATH", help="Pack this array only, and copy other files.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Work in N processes.  [1]")
@click.option("--part", default="1/1", metavar="I/N", callback=part_of, help="Do only part I of N.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line: problems, then counts.")
@source_options
def pack(
    source: str,
    dest: str,
    per_shard: Coords,
    shard_size: int | None,
    arrays: tuple[str, ...],
    jobs: int,
    part: JobPart,
    as_json: bool,
    given: Given,
) -> int:
    """Copy an unsharded SOURCE to a new sharded DEST.

    Zarr v2 becomes Zarr v3; Zarr v3, N5 and precomputed volumes keep their format. Copies the bytes of chunks without
    decoding. Repeat an interrupted command to continue. Exit code 3 if some files could not be packed; see
    docs/pack.md.
    """
    from shardfs.jobs.pack import PackRun
    from shardfs.jobs.packing import PackJob
    from shardfs.jobs.shared_work import JobSource

    if per_shard and shard_size is not None:
        raise click.UsageError("--chunks-per-shard and --shard-size exclude each other")
    found = given.options()
    follow = found.symlinks == "follow"
    job = PackJob(
        JobSource.of(absolute(source), found.storage_options, follow_symlinks=follow),
        JobSource.of(absolute(dest), found.storage_options),
        per_shard,
        shard_size,
        tuple(path.strip("/") for path in arrays),
    )
    with opening(source):
        work = PackRun(job, part, found.journal)
    output = _PackOutput(work, as_json=as_json)
    with output.progress:
        for report in work.run(workers=jobs):
            output.report(report)
    return output.end()


class _PackOutput:
    """Prints problems as they arrive and counts at the end: as JSON, or as text with a progress bar on a terminal."""

    def __init__(self, work: PackRun, *, as_json: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._work, self._as_json, self._nbytes, self._problems = work, as_json, 0, 0
        console = Console(stderr=True)
        self.progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=as_json or not (console.is_terminal and sys.stderr.isatty()),
        )
        self._task = self.progress.add_task("files", total=work.files // work.part.of)

    def report(self, report: PackReport) -> None:
        self._nbytes += report.nbytes
        self.progress.update(self._task, advance=report.files, description=f"{human_bytes(self._nbytes)}, files")
        for problem in report.problems:
            self._problems += problem.damaged
            if self._as_json:
                write_json({"type": "problem", "path": problem.path, "why": problem.why, "failed": problem.damaged})
            else:
                click.echo(printable(f"{problem.path or '/'}: {problem.why}"), err=True)

    def end(self) -> int:
        """Print the counts; return the exit code."""
        work = self._work
        if self._as_json:
            counts = {"files": work.files, "objects": work.objects, "shards": work.shards, "bytes": self._nbytes}
            write_json({"type": "end", **counts, "problems": self._problems, "finished": work.finished})
        elif work.finished:
            click.echo(f"{work.files:,} files become {work.objects:,} ({human_bytes(self._nbytes)} copied)")
        elif self._problems:
            click.echo(f"not finished: {self._problems} problems; solve them, and repeat the command", err=True)
        else:
            click.echo(f"part {work.part.number} of {work.part.of} is done; the last part to end writes the metadata")
        return UNFINISHED if self._problems else 0
