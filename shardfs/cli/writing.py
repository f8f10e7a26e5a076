"""The verb `flush`."""

from __future__ import annotations

import errno
import sys

import click

from shardfs import options
from shardfs.cli.printing import waiting
from shardfs.cli.sources import debug

LEFT, LATE = 3, 5


@click.command()
@click.argument("path")
@click.option("--timeout", default="1h", metavar="SECONDS", help="How long to wait for it.  [1h]")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=debug, help="Show tracebacks.")
def flush(path: str, timeout: str) -> int:
    """Publish what was written to PATH, a mount or anything on it, and wait until it is in the source.

    Exit code 3 if that fails, with the first error; 5 if it takes longer than the time-out.
    """
    from shardfs import mounts

    mountpoint = mounts.mount_of(path)
    if mountpoint is None:
        raise click.UsageError(f"{path} is on no mount of shardfs")
    with waiting("publishing") as tell:

        def look() -> None:
            for mount in mounts.mounts(mountpoint) if sys.stderr.isatty() else ():
                if mount.told and mount.told["writing"]:
                    tell(f"{mount.told['writing']['dirty_chunks']} chunks left")

        try:
            mounts.flush(path, options.positive_seconds(timeout), look)
        except OSError as e:
            if e.errno in (errno.EROFS, errno.ENOTSUP):
                raise click.UsageError(f"{mountpoint} is mounted read-only") from None
            click.echo(f"shardfs: {path}: {e.strerror}", err=True)
            return LATE if e.errno == errno.ETIMEDOUT else LEFT
    return 0
