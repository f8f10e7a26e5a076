"""`pack --regions`: the chunks that a file names are replaced in existing shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardfs.cli.printing import echo, write_json
from shardfs.model.text import human_bytes

if TYPE_CHECKING:
    from shardfs.config.options import Options
    from shardfs.jobs.pack_job import PackJob


def repack(job: PackJob, file: str, options: Options, *, as_json: bool) -> int:
    """Replace the chunks that a file of regions names; return the number of problems."""
    from shardfs.jobs.pack_regions import Repacking
    from shardfs.jobs.regions import ExpectedError
    from shardfs.jobs.runs import PackReport

    try:
        work = Repacking(job, file, options)
    except ExpectedError as e:
        raise click.UsageError(f"--regions {file}: {e}") from e
    total, failed = PackReport(), 0
    for report in work.run():
        total.shards += report.shards
        total.files += report.files
        total.nbytes += report.nbytes
        for problem in report.problems:
            failed += problem.damaged
            if as_json:
                write_json({"type": "problem", "path": problem.path, "why": problem.why, "failed": problem.damaged})
            else:
                echo(f"{problem.path or '/'}: {problem.why}", err=True)
    if as_json:
        counts = {"chunks": total.files, "shards": total.shards, "bytes": total.nbytes}
        write_json({"type": "end", **counts, "problems": failed})
    else:
        echo(f"{total.files:,} chunks replaced in {total.shards:,} shards ({human_bytes(total.nbytes)})")
    return failed
