"""The verb `verify`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click

from shardfs.cli.job_options import RunOptions, run_options, source_of_job
from shardfs.cli.printing import csv_line, write, write_json
from shardfs.cli.source_options import CommandOptions, source_options
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted, human_bytes, printable
from shardfs.storage.source_errors import opening

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardfs.jobs.findings import Damage, Report, ShardTally
    from shardfs.jobs.shared_work import JobPart, JobSource, Plan


@click.command()
@click.argument("source")
@click.option("--deep", is_flag=True, help="Read and decode every chunk.")
@click.option("--regions", is_flag=True, help="Print the damaged chunks and array regions as CSV.")
@click.option("--expect", metavar="all|FILE", help="With --regions: print missing chunks, too.")
@run_options("--shards", "Check only part I of N.", "One JSON object per line: findings, then counts.")
@source_options
def verify(
    source: str,
    deep: bool,
    regions: bool,
    expect: str | None,
    run_options: RunOptions,
    command_options: CommandOptions,
) -> int:
    """Look for damage in all shards of SOURCE. Exit code 7 if there is any.

    Checks indices, checksums and the first bytes of chunks; see docs/verify.md.
    """
    from shardfs.jobs import shared_work as work

    if expect is not None and not regions:
        raise click.UsageError("--expect needs --regions")
    options = command_options.options()
    job_source = source_of_job(source, options)
    part = run_options.part
    as_json = run_options.as_json
    with opening(source):
        plans = list(work.plan(job_source, part))
        unreadable = work.unreadable(job_source) if part.number == 1 else []
    with ExitStack() as stack:
        executor, workers = run_options.executor(stack)
        reports = work.verify(job_source, plans, deep=deep, executor=executor, workers=workers, regions=regions)
        if regions:
            findings = chain(unreadable, (finding for report in reports for finding in report.findings))
            rows = _print_regions(job_source, findings, expect, part, as_json=as_json)
            return ExitCode.DAMAGED if rows else ExitCode.OK
        output = _Output(plans, as_json=as_json)
        with output.progress:
            for finding in unreadable:
                output.problem(finding)
            for report in reports:
                output.report(report)
        return ExitCode.DAMAGED if output.print_counts(deep) else ExitCode.OK


def _print_regions(
    source: JobSource, findings: Iterable[Damage], expect: str | None, part: JobPart, *, as_json: bool
) -> int:
    """Print the regions of these findings, then the missing ones; return their number."""
    from shardfs.jobs import regions

    collections = {tree.path: regions.ChunkRegions(tree) for tree in source.tree().collections()}
    damaged, n = regions.DamagedRegions(collections), 0
    with ExitStack() as stack:
        expected: Iterable[tuple[regions.ChunkRegions, regions.Box]] = ()
        if expect == "all":
            expected = ((c, c.whole) for c in collections.values() if not c.tree.by_id)
        elif expect is not None:
            try:
                lines = stack.enter_context(open(expect, newline="", errors="surrogateescape"))
            except OSError as e:
                raise click.UsageError(f"--expect {expect}: {e.strerror}") from e
            expected = regions.read_expected(collections, lines)
        if not as_json:
            write(csv_line(regions.Region._fields))
        rows = chain(chain.from_iterable(map(damaged.rows, findings)), damaged.rest(), regions.missing(expected, part))
        try:
            for row in rows:
                n += 1
                if as_json:
                    write_json(row._asdict())
                else:
                    write(csv_line(" ".join(map(str, v)) if isinstance(v, tuple) else v for v in row))
        except regions.ExpectedError as e:
            raise click.UsageError(f"--expect {expect}: {e}") from e
    return n


class _Output:
    """Prints findings as they arrive and counts at the end: as JSON, or as text with a progress bar on a terminal."""

    def __init__(self, plans: Sequence[Plan], *, as_json: bool) -> None:
        from rich import progress
        from rich.console import Console

        from shardfs.jobs.findings import ShardTally

        self._as_json = as_json
        self._problems = 0
        self._tallies = {p.collection: ShardTally() for p in plans}
        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self.progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=as_json or not (self._console.is_terminal and sys.stderr.isatty()),
        )
        self._task = self.progress.add_task("shards", total=sum(len(p.shards) for p in plans))

    def report(self, report: Report) -> None:
        self._tallies[report.collection].add(report.tally)
        for finding in report.findings:
            self._print(finding)
        words = f"{report.collection or '/'}: {counted(self._findings, 'finding')}, shards"
        self.progress.update(self._task, advance=report.tally.shards, description=words)

    def problem(self, finding: Damage) -> None:
        """Print a finding that belongs to no shard."""
        self._problems += 1
        self._print(finding)

    def _print(self, finding: Damage) -> None:
        if self._as_json:
            facts = finding._asdict()
            del facts["affected"]
            write_json({"type": "finding", **facts})
            return
        files = f" ({', '.join(finding.files)})" if finding.files else ""
        where = finding.shard or finding.collection or "/"
        self._console.print(printable(f"{where}: {finding.kind}: {finding.why}{files}"), style="red")

    @property
    def _findings(self) -> int:
        return self._problems + sum(t.findings for t in self._tallies.values())

    def print_counts(self, deep: bool) -> int:
        """Print the counts; return the number of findings."""
        for path, tally in self._tallies.items():
            if self._as_json:
                write_json({"type": "collection", "collection": path, **asdict(tally)})
            else:
                self._console.print(printable(f"{path or '/'}: {', '.join(_words(tally))}"))
        if self._as_json:
            write_json({"type": "end", "deep": deep, "findings": self._findings})
        return self._findings


def _words(t: ShardTally) -> Iterator[str]:
    shards, chunks = counted(t.shards, "shard"), counted(t.chunks, "chunk")
    yield f"{shards} ({human_bytes(t.shard_bytes)}), {chunks} ({human_bytes(t.stored_bytes)})"
    if t.looked_bytes:
        yield f"{human_bytes(t.looked_bytes)} of them read"
    if t.dead_bytes:
        yield f"{human_bytes(t.dead_bytes)} dead"
    if t.shared_bytes:
        yield f"{human_bytes(t.shared_bytes)} shared by several chunks"
    if t.outside_chunks:
        yield f"{counted(t.outside_chunks, 'entry', 'entries')} beyond the edge of the array"
    if t.unchecked_chunks:
        yield f"{counted(t.unchecked_chunks, 'chunk')} not decoded: no decoder is installed"
    yield counted(t.findings, "finding") if t.findings else "sound"
