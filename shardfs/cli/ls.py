"""The verb `ls`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from time import localtime, strftime
from typing import TYPE_CHECKING

import click

from shardfs.cli.printing import natural, write
from shardfs.cli.source_options import CommandOptions, open_to_read, source_options
from shardfs.model.errors import ShardfsError
from shardfs.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.attributes import Attributes
    from shardfs.model.listing import Batch
    from shardfs.vfs.tree import Tree


SORTED = 1 << 16
"""`ls` sorts about this many entries of a directory; further entries follow unsorted."""


@click.command()
@click.argument("source")
@click.argument("path", default="")
@click.option("-l", "long", is_flag=True, help="Show kind, exact size and time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def ls(source: str, path: str, long: bool, as_json: bool, command_options: CommandOptions) -> None:
    """List a directory or a file as a mount of SOURCE would show it.

    Names are sorted, numbers in them by value. In a directory of more than 65,536 entries, those that follow are listed
    in the order of the grid, of the shards or of the store.
    """
    tree = open_to_read(source, command_options)
    entry = tree.resolve(path)
    line = _json_line if as_json else _long_line if long else None
    if not entry.directory:
        name = path.rstrip("/").rsplit("/", 1)[-1]
        write(line(name, entry) if line else os.fsencode(name) + b"\n")
        return
    for batch in _ordered(tree.scan(entry.number)):
        entries = _entries(tree, entry.number, batch, exact=long)
        write(b"".join(line(name, a) for name, a in entries) if line else _names(batch))


def _names(batch: Batch) -> bytes:
    names = batch.names.tolist()
    if sys.stdout.isatty():
        names = [printable(os.fsdecode(name)).encode() for name in names]
    return b"\n".join(names) + b"\n"


def _entries(tree: Tree, parent: int, batch: Batch, *, exact: bool) -> Iterator[tuple[str, Attributes]]:
    """Yield names and attributes of a batch.

    With `exact`, looks up sizes that the listing lacks. Unknown sizes are -1.
    """
    from shardfs.model.attributes import Attributes

    columns = (batch.names, batch.numbers, batch.directories, batch.sizes, batch.mtimes_ns)
    for name, *fields in zip(*(column.tolist() for column in columns), strict=True):
        attributes = Attributes(*fields)
        if exact and attributes.size < 0:
            with suppress(OSError, ShardfsError):  # one bad entry must not hide the others
                attributes = tree.lookup(parent, name)
        yield os.fsdecode(name), attributes


def _json_line(name: str, a: Attributes) -> bytes:
    kind, size = "directory" if a.directory else "file", None if a.size < 0 else a.size
    return json.dumps({"name": name, "type": kind, "size": size, "mtime_ns": a.mtime_ns}).encode() + b"\n"


def _long_line(name: str, a: Attributes) -> bytes:
    when = strftime("%Y-%m-%d %H:%M", localtime(a.mtime_ns // 10**9))
    kind, size = "d" if a.directory else "-", a.size if a.size >= 0 else "?"
    return f"{kind} {size:>12} {when} {printable(name)}\n".encode()


def _ordered(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Sort the first entries in natural order, at least `SORTED` of them. Bounds the memory for large directories."""
    import numpy as np

    from shardfs.model.listing import Batch

    first: list[Batch] = []
    while sum(len(batch.names) for batch in first) < SORTED and (batch := next(batches, None)) is not None:
        first.append(batch)
    if first:
        joined = Batch._make((*map(np.concatenate, zip(*(batch[:6] for batch in first), strict=True)), False))
        try:
            order = joined.names.astype(np.int64).argsort(kind="stable")
        except (ValueError, OverflowError):  # not all names are numbers
            keys = [natural(os.fsdecode(name)) for name in joined.names.tolist()]
            order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
        yield joined.only(order)
    yield from batches
