"""The verb `status`."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.completion import profiles_and_files
from shardfs.cli.printing import echo, write_json
from shardfs.cli.source_options import CommandOptions, is_source, profile_named, source_options
from shardfs.config.parsers import absolute
from shardfs.daemon import status_fields
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted, human_bytes
from shardfs.storage.counters import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.daemon.asking import Mount
    from shardfs.write.recover import Left

INTERVAL_S = 0.5

NAMED = 20
"""At most this many files or shards are named in the output."""


@click.command()
@click.argument("argument", required=False, metavar="[MOUNTPOINT|SOURCE|PROFILE]", shell_complete=profiles_and_files)
@click.option("--wait", is_flag=True, help="Wait until all data is published, or no process publishes it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def status(argument: str | None, wait: bool, as_json: bool, command_options: CommandOptions) -> int:
    """Show the state of mounts, or of the journal of SOURCE.

    Without an argument, of all mounts on this machine; answers within a second. Exit code 1 if a mount is dead, hangs
    or cannot publish, or if files wait in the journal and no process publishes them; 5 if nothing is mounted on
    MOUNTPOINT.
    """
    from shardfs.daemon.asking import mounts

    source = argument
    mountpoint = None if argument is None else os.path.abspath(argument)
    entries = mounts(mountpoint)
    if not entries and argument is not None and (profile := profile_named(argument)) is not None:
        mountpoint, source = os.path.realpath(profile.mountpoint), profile.source
        command_options = command_options.with_profile(profile.name)
        entries = mounts(mountpoint)
    if not entries and source is not None:
        return _status_of_source(source, wait=wait, as_json=as_json, command_options=command_options)
    while wait and any((w := mount.writing) and w["dirty_chunks"] and not w["errors"] for mount in entries):
        time.sleep(INTERVAL_S)
        entries = mounts(mountpoint)
    for mount in entries:
        if as_json:
            snapshot = mount.status or {}
            write_json({**snapshot, "mountpoint": mount.mountpoint, "source": mount.source, "state": mount.state})
        else:
            echo(*_lines(mount))
    if not entries and not as_json:
        echo("nothing is mounted")
    failing = any((w := mount.writing) and (w["errors"] or w["refused"] or w["read_only"]) for mount in entries)
    return ExitCode.PROBLEM if failing or any(mount.is_wrong for mount in entries) else ExitCode.OK


def _status_of_source(source: str, *, wait: bool, as_json: bool, command_options: CommandOptions) -> int:
    """Print the unpublished files in the journal of a source and the process that publishes them."""
    from shardfs.storage.source_locks import journal_directory
    from shardfs.write import recover

    directory = journal_directory(absolute(source), command_options.options().journal)
    journal = recover.read_if_there(directory)
    if journal is None and not is_source(source, command_options.options()):
        if not as_json:
            why = "is not mounted by shardfs, and is no dataset with a journal; `shardfs status` lists the mounts"
            echo(f"{source}: {why}")
        return ExitCode.NOT_MOUNTED
    while wait and journal is not None and journal.owner is not None and journal.waiting:
        time.sleep(INTERVAL_S)
        journal = recover.read_if_there(directory)
    waiting, owner = (journal.waiting, journal.owner) if journal is not None else ([], None)
    if as_json:
        counts = {"files": len(waiting), "conflicts": sum(entry.state == "conflict" for entry in waiting)}
        write_json({"source": absolute(source), "journal": str(directory), "owner": owner, **counts})
    else:
        echo(*_left_lines(source, journal))
    return ExitCode.PROBLEM if waiting and owner is None else ExitCode.OK


def _left_lines(source: str, journal: Left | None) -> Iterator[str]:
    from shardfs.storage.source_locks import describe

    if journal is None or not (waiting := journal.waiting):
        yield f"{source}: all data is published"
        return
    yield f"{source}: {counted(len(waiting), 'unpublished file')} in {journal.directory}"
    nobody = f"no process publishes the data: mount with --rw, or use shardfs recover {source}"
    yield f"  {describe(journal.owner) if journal.owner else nobody}"
    yield from (f"  {entry.path}{f': {entry.why}' if entry.why else ''}" for entry in waiting[:NAMED])
    if len(waiting) > NAMED:
        yield f"  and {len(waiting) - NAMED} more"


def _lines(mount: Mount) -> Iterator[str]:
    s = mount.status
    if s is None:
        yield f"{mount.mountpoint}: {mount.source}: {mount.finding}{f'; {mount.fix}' if mount.fix else ''}"
        return
    yield f"{mount.mountpoint}: {mount.source}"
    memory = f"{human_bytes(s['resident_bytes'])} of memory"
    yield f"  layout {s['layout']}, process {s['pid']}, up {_duration(s['uptime'])}, {memory}"
    yield from (f"  {line}" for line in status_fields.lines("", s))
    for op, errors in s["errors"].items():
        if failures := {name: n for name, n in errors.items() if name not in ORDINARY}:
            yield f"  errors of {op}: {', '.join(f'{name} {n}' for name, n in failures.items())}"
    for op, latency in s["latencies"].items():
        yield f"  {op}: {_latency(latency)}"
    for name, cache in s["caches"].items():
        yield from (f"  {line}" for line in status_fields.lines("caches", cache, cache=name))
    if store := s["store"]:
        yield from (f"  {line}" for line in status_fields.lines("store", store))
        if store["latency"]:
            yield f"  store operations: {_latency(store['latency'])}"
    if writing := s["writing"]:
        yield from (f"  {line}" for line in status_fields.lines("writing", writing, journal=writing["journal"]))
        yield from (f"  {line}" for line in _files(writing))


def _files(w: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the journal, and files of a writable mount that are not published."""
    files = [f"NOT PUBLISHED: {path}: {why}" for path, why in w["errors"].items()]
    files += [f"LOST, REFUSED AT CLOSE: {path or 'more files'}: {why}" for path, why in w["refused_paths"].items()]
    files += [f"belongs to no array: {path}" for path in w["orphan_paths"]]
    yield from w["problems"]
    yield from files[:NAMED]
    if (n := w["failing"] + w["refused"] + w["orphans"]) > NAMED:
        yield f"and {n - NAMED} more"


def _latency(latency: Mapping[str, Any]) -> str:
    half, high = (_seconds(latency[key]) for key in ("median_below", "p99_below"))
    return f"{_seconds(latency['mean'])} on average, half below {half}, 99 % below {high}"


def _seconds(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return "more than a minute"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "us"))
    return f"{seconds * factor:.3g} {unit}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    parts = [(hours // 24, "d"), (hours % 24, "h"), (m, "m"), (s, "s")]
    first = next((i for i, (n, _) in enumerate(parts) if n), 3)
    return " ".join(f"{n}{unit}" for n, unit in parts[first : first + 2])
