"""The verb `compact`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from shardfs.cli.printing import echo, waiting, write_json
from shardfs.cli.source_options import CommandOptions, open_source, source_options
from shardfs.config.parsers import absolute
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted, human_bytes
from shardfs.storage.source_errors import opening

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.jobs.compact import Work
    from shardfs.model.dataset import Problem


@click.command()
@click.argument("source")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what could be saved.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def compact(source: str, dry_run: bool, as_json: bool, command_options: CommandOptions) -> int:
    """Reclaim space from overwritten chunks.

    Rewrites the shards of SOURCE without the bytes that no index leads to. Reads every index, and compares each new
    shard with the old one, chunk by chunk, before replacing it. Programs that cache the positions of chunks read wrong
    bytes afterwards. Exit code 3 if some shards cannot be packed; 4 if another writer uses SOURCE.
    """
    from shardfs.jobs import compact
    from shardfs.model.dataset import Problem

    options = command_options.options()
    tree = open_source(source, options)
    with ExitStack() as stack:
        packer = None
        if not dry_run:
            packer = stack.enter_context(compact.Packer.open(tree, absolute(source), options))
        totals = _Totals(stack.enter_context(waiting("packing" if packer else "reading")), as_json=as_json)
        with opening(source):
            for work in compact.survey(tree):
                if isinstance(work, Problem):
                    totals.problem(work)
                    continue
                outcome = packer.pack(work) if packer else 0
                if isinstance(outcome, Problem):
                    totals.problem(outcome)
                    outcome = 0
                totals.shard(work, outcome)
    totals.print_counts(dry_run)
    return ExitCode.LEFT if totals.faults else ExitCode.OK


class _Totals:
    """Prints results of `compact`: one JSON object per shard, or only the totals as text."""

    def __init__(self, show_progress: Callable[[str], object], *, as_json: bool) -> None:
        self._show_progress = show_progress
        self._as_json = as_json
        self.shards = self.dead = self.saved = self.faults = 0

    def problem(self, problem: Problem) -> None:
        self.faults += not problem.skipped
        if self._as_json:
            write_json({"type": "fault", "where": problem.path, "why": problem.why, "skipped": problem.skipped})
        else:
            echo(f"{problem.path or '/'}: {problem.why}", err=True)

    def shard(self, work: Work, saved: int) -> None:
        size = work.usage.size
        dead = work.usage.dead
        self.shards += 1
        self.dead += dead
        self.saved += saved
        if self._as_json:
            write_json({"type": "shard", "shard": work.key, "size": size, "dead": dead, "saved": saved})
        self._show_progress(f"{counted(self.shards, 'shard')}, {human_bytes(self.saved or self.dead)}")

    def print_counts(self, dry_run: bool) -> None:
        if self._as_json:
            write_json({"type": "end", "shards": self.shards, "dead": self.dead, "saved": self.saved})
        elif dry_run:
            echo(f"{human_bytes(self.dead)} in {counted(self.shards, 'shard')} can be reclaimed")
        else:
            echo(f"{human_bytes(self.saved)} saved in {counted(self.shards, 'shard')}")
