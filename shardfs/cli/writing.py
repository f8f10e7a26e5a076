"""The verbs that publish or rewrite: `flush`, `compact`."""

from __future__ import annotations

import errno
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.printing import human_bytes, waiting, write_json
from shardfs.cli.sources import absolute, debug, given_options, opened, opening, source_options
from shardfs.config import parsers

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.jobs.compact import CompactProblem, Work

LEFT, LATE = 3, 5


@click.command()
@click.argument("path")
@click.option("--timeout", default="1h", metavar="SECONDS", help="How long to wait.  [1h]")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=debug, help="Show tracebacks.")
def flush(path: str, timeout: str) -> int:
    """Publish the data written below PATH, and wait.

    PATH is a mount, or a file or directory on a mount. Exit code 3 if publishing fails, with the first error; 5 if it
    takes longer than the time-out.
    """
    from shardfs.storage import mount_table

    mountpoint = mount_table.mount_of(path)
    if mountpoint is None:
        raise click.UsageError(f"{path} is not on a mount of shardfs: `shardfs status` lists the mounts")
    try:
        with waiting("publishing") as tell:
            mount_table.flush(path, parsers.positive_seconds(timeout), lambda: _tell(mountpoint, tell))
    except OSError as e:
        if e.errno in (errno.EROFS, errno.ENOTSUP):
            raise click.UsageError(f"{mountpoint} is mounted read-only") from None
        more = "" if e.errno == errno.ETIMEDOUT else f"; shardfs status {mountpoint} names the files and the reasons"
        click.echo(f"shardfs: {path}: {e.strerror}{more}", err=True)
        return LATE if e.errno == errno.ETIMEDOUT else LEFT
    return 0


def _tell(mountpoint: str, tell: Callable[[str], object]) -> None:
    """Report the number of unpublished chunks, if standard error is a terminal."""
    from shardfs.storage import mount_table

    for mount in mount_table.mounts(mountpoint) if sys.stderr.isatty() else ():
        if mount.status and mount.status["writing"]:
            tell(f"{mount.status['writing']['dirty_chunks']} chunks left")


@click.command()
@click.argument("source")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what could be saved.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def compact(source: str, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Reclaim space from overwritten chunks.

    Rewrites the shards of SOURCE without the bytes that no index leads to. Reads every index, and compares each new
    shard with the old one, chunk by chunk, before replacing it. Programs that cache the positions of chunks read wrong
    bytes afterwards. Exit code 3 if some shards cannot be packed; 4 if another writer uses SOURCE.
    """
    from shardfs.jobs import compact
    from shardfs.storage.writers import open_writer
    from shardfs.write.open_rw import open_journal

    found, _ = given_options(**given, flags={})
    tree = opened(source, found)
    with ExitStack() as stack:
        packer = None
        if not dry_run:
            journal = open_journal(absolute(source), found)
            # Without a packer, the journal contains unpublished files.
            stack.callback(lambda: journal.close(clean=packer is not None))
            links, cas_none = found.linked_shards == "replace", found.cas == "none"
            writer = open_writer(tree.store, cas_none=cas_none, replace_links=links, journal=journal.directory)
            stack.callback(writer.close)
            packer = compact.Packer(writer, journal)
        tell = stack.enter_context(waiting("packing" if packer else "reading"))
        shown = _Packed(tell, as_json=as_json)
        with opening(source):
            for work in compact.survey(tree):
                shown.show(work, packer.pack(work) if packer and isinstance(work, compact.Work) else None)
    shown.end(dry_run)
    return LEFT if shown.faults else 0


class _Packed:
    """Prints results of `compact`: one JSON object per shard, or only the totals as text."""

    def __init__(self, tell: Callable[[str], object], *, as_json: bool) -> None:
        self._tell, self._as_json = tell, as_json
        self.shards = self.dead = self.saved = self.faults = 0

    def show(self, work: Work | CompactProblem, outcome: int | CompactProblem | None) -> None:
        from shardfs.jobs.compact import CompactProblem

        fault = work if isinstance(work, CompactProblem) else outcome if isinstance(outcome, CompactProblem) else None
        if fault is not None:
            self.faults += not fault.skipped
            if self._as_json:
                write_json({"type": "fault", **fault._asdict()})
            else:
                click.echo(f"{fault.where or '/'}: {fault.why}", err=True)
        if not isinstance(work, CompactProblem):
            self.shards, self.dead = self.shards + 1, self.dead + work.usage.dead
            saved = outcome if isinstance(outcome, int) else 0
            self.saved += saved
            if self._as_json:
                size, dead = work.usage.size, work.usage.dead
                write_json({"type": "shard", "shard": work.key, "size": size, "dead": dead, "saved": saved})
        self._tell(f"{self.shards} shards, {human_bytes(self.saved or self.dead)}")

    def end(self, dry_run: bool) -> None:
        if self._as_json:
            write_json({"type": "end", "shards": self.shards, "dead": self.dead, "saved": self.saved})
        elif dry_run:
            click.echo(f"{human_bytes(self.dead)} in {self.shards} shards can be reclaimed")
        else:
            click.echo(f"{human_bytes(self.saved)} saved in {self.shards} shards")
