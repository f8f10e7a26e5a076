"""The verbs that read a source without a mount: `ls`, `cat`, `info`, `locate`."""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from time import localtime, strftime
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.printing import echo, natural, write, write_json
from shardfs.cli.sources import CommandOptions, opened_to_look, source_options
from shardfs.model.errors import ShardfsError
from shardfs.model.text import counted, human_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.model.attributes import Attributes
    from shardfs.model.dataset import Problem
    from shardfs.model.listing import Batch
    from shardfs.vfs.tree import Tree

PIECE, WIDTH = 8 << 20, 80

SORTED = 1 << 16
"""`ls` sorts about this many entries of a directory; further entries follow unsorted."""


@click.command()
@click.argument("source")
@click.argument("path", default="")
@click.option("-l", "long", is_flag=True, help="Show kind, exact size and time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def ls(source: str, path: str, long: bool, as_json: bool, command_options: CommandOptions) -> None:
    """List a directory as a mount of SOURCE would show it.

    Names are sorted, numbers in them by value. In a directory of more than 65,536 entries, those that follow are listed
    in the order of the grid or of the shards.
    """
    tree = opened_to_look(source, command_options)
    entry = tree.resolve(path)
    line = _json_line if as_json else _long_line if long else None
    if not entry.directory:
        name = path.rstrip("/").rsplit("/", 1)[-1]
        write(line(name, entry) if line else os.fsencode(name) + b"\n")
        return
    for batch in _ordered(tree.scan(entry.number)):
        entries = _entries(tree, entry.number, batch, exact=long)
        write(b"".join(line(name, a) for name, a in entries) if line else _names(batch))


@click.command()
@click.argument("source")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@source_options
def cat(source: str, paths: tuple[str, ...], command_options: CommandOptions) -> None:
    """Write the bytes of files as a mount of SOURCE would show them."""
    tree = opened_to_look(source, command_options)
    for path in paths:
        entry = tree.resolve(path)
        if entry.directory:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        for offset in range(0, entry.size, PIECE):
            write(tree.read(entry.number, offset, PIECE))


@click.command()
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@click.option("--map", "as_map", is_flag=True, help="Also draw which chunks exist, their sizes, and dead bytes.")
@click.option("--png", metavar="FILE", help="Draw the same into a PNG file (needs the package matplotlib).")
@source_options
def info(source: str, as_json: bool, as_map: bool, png: str | None, command_options: CommandOptions) -> None:
    """Show the arrays in SOURCE: shapes, types, chunks, bytes.

    Also lists what cannot be shown, and why. Reads every shard index; unsharded arrays are listed without counts.
    """
    if as_json and as_map:
        raise click.UsageError("--json and --map cannot be combined: --png draws a map beside --json")
    if png is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--png needs the package matplotlib: pip install matplotlib")
    tree = opened_to_look(source, command_options)
    collections = _by_path(summary._asdict() for summary in tree.survey.summaries())
    unsharded = _by_path(
        {"path": path, "format": format, **asdict(facts)} for path, format, facts in tree.survey.unsharded()
    )
    problems = tree.problems()
    if as_json:
        arrays = {"collections": collections, "unsharded": unsharded}
        write_json({"source": source, **arrays, "problems": list(map(asdict, problems))})
    else:
        _print_info([*collections, *unsharded], problems)
    if as_map:
        _print_maps(tree)
    if png is not None:
        from shardfs.jobs import pictures
        from shardfs.jobs.maps import chunk_map

        pictures.draw([chunk_map(c, pictures.BINS, pictures.BINS) for c in tree.collections()], png)


def _print_maps(tree: Tree) -> None:
    from rich.console import Console

    from shardfs.cli.mapping import map_size, print_map
    from shardfs.jobs.maps import chunk_map

    console = Console(soft_wrap=True, highlight=False)
    for collection in tree.collections():
        console.print()
        print_map(console, chunk_map(collection, *map_size(console)))


@click.command()
@click.argument("source")
@click.argument("path", required=False)
@click.option("--shard", metavar="KEY", help="Find the chunk in this shard object of SOURCE ...")
@click.option("--offset", type=click.IntRange(0, 2**64 - 1), metavar="BYTE", help="... that covers this byte.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@source_options
def locate(
    source: str, path: str | None, shard: str | None, offset: int | None, as_json: bool, command_options: CommandOptions
) -> None:
    """Show where a chunk is stored, or which chunk covers a byte.

    PATH is a chunk of SOURCE as a mount would show it. SOURCE may also be a chunk on a mount, without PATH.
    """
    if shard is not None and offset is not None and path is None:
        chunk = opened_to_look(source, command_options).survey.chunk_at(shard, offset)
        if chunk is None:
            raise FileNotFoundError(errno.ENOENT, f"no chunk covers byte {offset} of this shard", shard)
        answer: dict[str, Any] = {"path": chunk}
    elif shard is not None or offset is not None:
        raise click.UsageError("locate needs either PATH, or --shard and --offset, or a chunk on a mount")
    elif path is not None:
        answer = opened_to_look(source, command_options).locate(path)._asdict()
    else:
        answer = _located_on_mount(source)
    if as_json:
        write_json(answer)
        return
    for key, value in answer.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        echo(f"{key}: {printable(text)}".rstrip())


def _located_on_mount(path: str) -> dict[str, Any]:
    try:
        shard, offset, size, codecs = (
            os.fsdecode(os.getxattr(path, f"user.shardfs.{name}")) for name in ("shard", "offset", "nbytes", "codecs")
        )
    except OSError as e:
        if e.errno != errno.ENODATA and e.errno != errno.ENOTSUP:
            raise
        raise click.UsageError(f"{path} is not a chunk on a mount: give SOURCE and the PATH of a chunk in it") from None
    return {"shard": shard, "offset": int(offset), "size": int(size), "codecs": tuple(codecs.split(","))}


# ---- output ----


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


def _by_path(arrays: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(arrays, key=lambda array: natural(array["path"]))


def _print_info(collections: list[dict[str, Any]], problems: list[Problem]) -> None:
    for array in _by_path(collections):
        echo(array["path"] or "/")
        for line in _lines(array):
            echo(*click.wrap_text(printable(line), WIDTH, "  ", "    ").splitlines())
    for p in problems:
        echo(f"{p.path or '/'}: {p.consequence}: {p.why}")


def _count(chunks: int, of: int | None) -> str:
    """Text with the number of chunks, and the number in the grid, `of`. None: a collection with ids has no grid."""
    if of is None:
        return counted(chunks, "chunk")
    return f"{chunks} of {counted(of, 'chunk')}" + (f" ({chunks / of:.0%})" if of else "")


def _lines(c: Mapping[str, Any]) -> Iterator[str]:
    """The lines that `info` prints below the path of an array."""
    shape, chunk, shard = (" x ".join(map(str, c[key] or ())) for key in ("shape", "chunk_shape", "shard_shape"))
    words = f"{c['data_type']} {shape}".rstrip(), chunk and f"chunks {chunk}", shard and f"shards {shard}"
    yield ", ".join(filter(None, words))
    sharding = "not sharded" if c["sharding"] == "none" else c["sharding"]
    if "chunks" not in c:
        yield f"{c['format']}: {sharding}, shown as stored"
        return
    yield f"{c['format']}: {sharding}; codecs {', '.join(c['codecs']) or 'none'}"
    chunks = f"{_count(c['chunks'], c['grid_chunks'])}, {human_bytes(c['stored_bytes'])}"
    shards = f", in {counted(c['shards'], 'shard')}, {human_bytes(c['shard_bytes'])}"
    yield chunks + (shards if sharding == c["sharding"] else "")
    if c["damaged"]:
        yield "damaged: some shards or chunks cannot be read; shardfs verify lists them"
