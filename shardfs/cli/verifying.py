"""The verb `verify`."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import click

from shardfs.cli.printing import human_bytes, printable, write_json
from shardfs.cli.sources import absolute, given_options, opening, source_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from shardfs.jobs.findings import Damage, Report, ShardTally
    from shardfs.jobs.shared_work import JobPart, Plan

DAMAGED = 7


def _part(_ctx: click.Context, _param: click.Parameter, text: str) -> JobPart:
    from shardfs.jobs.shared_work import JobPart

    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.BadParameter(f"{text!r} is not of the form i/n, with i from 1 to n")
    return JobPart(int(number), int(of))


@click.command()
@click.argument("source")
@click.option("--deep", is_flag=True, help="Read and decode every chunk.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Work in N processes.  [1]")
@click.option("--shards", "part", default="1/1", metavar="I/N", callback=_part, help="Check only part I of N.")
@click.option("--dask", metavar="ADDRESS|FILE", help="Work on a Dask cluster: its scheduler's address or file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line: findings, then counts.")
@source_options
def verify(source: str, deep: bool, jobs: int, part: JobPart, dask: str | None, as_json: bool, **given: Any) -> int:
    """Look for damage in all shards of SOURCE. Exit code 7 if there is any.

    Checks indices, checksums and the first bytes of chunks; see docs/verify.md.
    """
    from shardfs.jobs import shared_work as work

    found, _ = given_options(**given, flags={})
    follow = found.symlinks == "follow"
    what = work.JobSource.of(absolute(source), found.storage_options, follow_symlinks=follow)
    with opening(source):
        plans = list(work.plan(what, part))
        problems = what.tree().problems() if part.number == 1 else []
    with ExitStack() as stack:
        executor, workers = None, jobs
        if dask is not None:
            executor, workers = _dask(dask, stack)
        show = stack.enter_context(_shown(as_json, plans))
        for problem in problems:
            show.finding(work.unreadable(problem))
        for report in work.verify(what, plans, deep=deep, executor=executor, workers=workers):
            show.report(report)
        return DAMAGED if show.end(deep) else 0


def _dask(address: str, stack: ExitStack) -> tuple[Executor, int]:
    """An executor on a Dask cluster, and the number of threads of the cluster."""
    try:
        from distributed import Client
    except ImportError as e:
        raise click.UsageError(f"--dask needs the package distributed: pip install distributed ({e})") from e
    where = {"scheduler_file": address} if os.path.isfile(address) else {"address": address}
    client = stack.enter_context(Client(**where))
    return client.get_executor(retries=2), max(1, sum(client.nthreads().values()))


# ---- output ----


class _Show(Protocol):
    def __enter__(self) -> _Show: ...
    def __exit__(self, *_: object) -> None: ...
    def finding(self, finding: Damage) -> None: ...
    def report(self, report: Report) -> None: ...
    def end(self, deep: bool) -> int:
        """Print the counts; return the number of findings."""


def _shown(as_json: bool, plans: Sequence[Plan]) -> _Show:
    return _AsJson(plans) if as_json else _AsText(plans)


class _Counts:
    """Counts findings. Base class of the output formats."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        from shardfs.jobs.findings import ShardTally

        self.tallies: Mapping[str, ShardTally] = {p.collection: ShardTally() for p in plans}
        self.others = 0

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def report(self, report: Report) -> None:
        self.tallies[report.collection].add(report.tally)
        for finding in report.findings:
            self.tell(finding)

    def finding(self, finding: Damage) -> None:
        self.others += 1
        self.tell(finding)

    def tell(self, finding: Damage) -> None:
        raise NotImplementedError

    @property
    def findings(self) -> int:
        return self.others + sum(t.findings for t in self.tallies.values())


class _AsJson(_Counts):
    def __enter__(self) -> _AsJson:
        return self

    def tell(self, finding: Damage) -> None:
        write_json({"type": "finding", **finding._asdict()})

    def end(self, deep: bool) -> int:
        for path, tally in self.tallies.items():
            write_json({"type": "collection", "collection": path, **asdict(tally)})
        write_json({"type": "end", "deep": deep, "findings": self.findings})
        return self.findings


class _AsText(_Counts):
    """Prints findings as text, and shows a progress bar on a terminal."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__(plans)
        from rich.console import Console

        self._out = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._bar: Any = None
        self._shards = sum(len(p.shards) for p in plans)

    def __enter__(self) -> _AsText:
        if self._out.is_terminal and sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.fields[words]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._out, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._shards, words="shards")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def report(self, report: Report) -> None:
        super().report(report)
        if self._bar is not None:
            words = f"{report.collection or '/'}: {self.findings} findings, shards"
            self._bar.update(self._task, advance=report.tally.shards, words=words)

    def tell(self, finding: Damage) -> None:
        where = finding.shard or finding.collection or "/"
        files = f" ({', '.join(finding.files)})" if finding.files else ""
        self._out.print(
            printable(f"{where}: {finding.kind}: {finding.why}{files}"), style="red" if self._out.is_terminal else None
        )

    def end(self, deep: bool) -> int:
        self.__exit__()
        for path, tally in self.tallies.items():
            self._out.print(printable(f"{path or '/'}: {', '.join(_words(tally))}"))
        return self.findings


def _words(t: ShardTally) -> Iterator[str]:
    yield f"{t.shards} shards ({human_bytes(t.shard_bytes)}), {t.chunks} chunks ({human_bytes(t.stored_bytes)})"
    if t.looked_bytes:
        yield f"{human_bytes(t.looked_bytes)} of them read"
    if t.dead_bytes:
        yield f"{human_bytes(t.dead_bytes)} dead"
    if t.shared_bytes:
        yield f"{human_bytes(t.shared_bytes)} shared by several chunks"
    if t.outside_chunks:
        yield f"{t.outside_chunks} entries beyond the edge of the array"
    if t.unchecked_chunks:
        yield f"{t.unchecked_chunks} chunks not decoded: their decoder is not installed"
    yield f"{t.findings} findings" if t.findings else "sound"
