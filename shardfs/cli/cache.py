"""The verb `cache`: shows and clears the disk cache for remote sources."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from shardfs.cli import Group
from shardfs.cli.printing import echo, write_json
from shardfs.cli.source_options import decorated
from shardfs.config import loading, parsers
from shardfs.model.text import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from shardfs.storage.disk_cache import DiskCache


@click.group(cls=Group, no_args_is_help=False)
def cache() -> None:
    """Show and clear the disk cache for remote sources.

    Mounts use it with the option cache_dir. They may continue to use it meanwhile.
    """


def _of_directory(function: Callable[..., Any]) -> Callable[..., Any]:
    words = "The directory; default: $SHARDFS_CACHE_DIR, or the user's cache directory."
    return decorated(
        click.option("--cache-dir", metavar="DIRECTORY", help=words),
        click.option("--json", "as_json", is_flag=True, help="A JSON object."),
    )(function)


def _opened(cache_dir: str | None) -> DiskCache | None:
    """Return the cache in a directory; None if there is none."""
    from shardfs.storage.disk_cache import DiskCache, cache_directory

    chosen = loading.merged(loading.from_environment(os.environ)).cache_dir if cache_dir is None else cache_dir
    directory = cache_directory(parsers.cache_directory(chosen or "auto"))
    return DiskCache(directory, 0) if DiskCache.exists(directory) else None


@cache.command()
@_of_directory
def info(cache_dir: str | None, as_json: bool) -> None:
    """Show how much the cache contains."""
    disk_cache = _opened(cache_dir)
    if disk_cache is None:
        _print({"entries": 0, "bytes": 0}, "empty: there is no cache", as_json=as_json)
        return
    entries, nbytes, oldest_ns = disk_cache.usage()
    text = f"{disk_cache.directory}: {counted(entries, 'entry', 'entries')}, {human_bytes(nbytes)}"
    if entries:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(oldest_ns / 1e9))
        text += f", the oldest one last used at {when}"
    values = {"directory": disk_cache.directory, "entries": entries, "bytes": nbytes, "oldest_ns": oldest_ns}
    _print(values, text, as_json=as_json)


@cache.command()
@_of_directory
def clear(cache_dir: str | None, as_json: bool) -> None:
    """Remove all entries."""
    disk_cache = _opened(cache_dir)
    nbytes = 0 if disk_cache is None else disk_cache.clear()
    _print({"bytes_removed": nbytes}, f"{human_bytes(nbytes)} removed", as_json=as_json)


def _print(values: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        write_json(values)
    else:
        echo(text)
