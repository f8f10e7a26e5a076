"""The verb `info`."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.printing import echo, natural, write_json
from shardfs.cli.source_options import CommandOptions, open_to_read, source_options
from shardfs.model.text import counted, human_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.model.dataset import Problem
    from shardfs.vfs.tree import Tree


WIDTH = 80


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
    tree = open_to_read(source, command_options)
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

    from shardfs.cli.info_map import map_size, print_map
    from shardfs.jobs.maps import chunk_map

    console = Console(soft_wrap=True, highlight=False)
    for collection in tree.collections():
        console.print()
        print_map(console, chunk_map(collection, *map_size(console)))


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
