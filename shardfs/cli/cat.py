"""The verb `cat`."""

from __future__ import annotations

import errno

import click

from shardfs.cli.printing import write
from shardfs.cli.source_options import CommandOptions, open_to_read, source_options

PIECE = 8 << 20


@click.command()
@click.argument("source")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@source_options
def cat(source: str, paths: tuple[str, ...], command_options: CommandOptions) -> None:
    """Write the bytes of files as a mount of SOURCE would show them."""
    tree = open_to_read(source, command_options)
    for path in paths:
        entry = tree.resolve(path)
        if entry.directory:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        for offset in range(0, entry.size, PIECE):
            write(tree.read(entry.number, offset, PIECE))
