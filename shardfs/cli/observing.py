"""The verbs `status` and `doctor`."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.completing import profiles_and_files
from shardfs.cli.printing import echo, human_bytes, write_json
from shardfs.cli.sources import Given, is_source, profile_named, source_options
from shardfs.config.parsers import absolute
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted
from shardfs.storage.counters import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.daemon.asking import Mount
    from shardfs.write.recover import Left

LOOK_S = 0.5

NAMED = 20
"""At most this many files or shards are named in the output."""


@click.command()
@click.argument("argument", required=False, metavar="[MOUNTPOINT|SOURCE|PROFILE]", shell_complete=profiles_and_files)
@click.option("--wait", is_flag=True, help="Wait until all data is published, or no process publishes it.")
@click.option("--watch", "again", is_flag=True, help="Show rates and problems in the terminal until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def status(argument: str | None, wait: bool, again: bool, as_json: bool, given: Given) -> int:
    """Show the state of mounts, or of the journal of SOURCE.

    Without an argument, of all mounts on this machine; answers within a second. Exit code 1 if a mount is dead, hangs
    or cannot publish, or if files wait in the journal and no process publishes them; 5 if nothing is mounted on
    MOUNTPOINT.
    """
    from shardfs.daemon.asking import mounts

    source = argument
    mountpoint = None if argument is None else os.path.abspath(argument)
    if again:
        return _watch(mountpoint, alone=not (wait or as_json))
    found = mounts(mountpoint)
    if not found and argument is not None and (profile := profile_named(argument)) is not None:
        mountpoint, source = os.path.realpath(profile.mountpoint), profile.source
        given = given.with_profile(profile.name)
        found = mounts(mountpoint)
    if not found and source is not None:
        return _status_of_source(source, wait=wait, as_json=as_json, given=given)
    while wait and any((w := mount.writing) and w["dirty_chunks"] and not w["errors"] for mount in found):
        time.sleep(LOOK_S)
        found = mounts(mountpoint)
    for mount in found:
        if as_json:
            snapshot = mount.status or {}
            write_json({**snapshot, "mountpoint": mount.mountpoint, "source": mount.source, "state": mount.state})
        else:
            echo(*_lines(mount))
    if not found and not as_json:
        echo("nothing is mounted")
    failing = any((w := mount.writing) and (w["errors"] or w["refused"] or w["read_only"]) for mount in found)
    return int(failing or any(mount.is_wrong for mount in found))


def _watch(mountpoint: str | None, *, alone: bool) -> int:
    if not alone:
        raise click.UsageError("--watch excludes --json and --wait")
    if not sys.stdout.isatty():
        raise click.UsageError("--watch needs a terminal; see --json for programs")
    from shardfs.cli.watching import watch

    with suppress(KeyboardInterrupt):
        watch(mountpoint)
    return 0


def _status_of_source(source: str, *, wait: bool, as_json: bool, given: Given) -> int:
    """Print the unpublished files in the journal of a source and the process that publishes them."""
    from shardfs.storage.source_locks import journal_directory
    from shardfs.write import recover

    directory = journal_directory(absolute(source), given.options().journal)
    left = recover.look_if_there(directory)
    if left is None and not is_source(source, given.options()):
        if not as_json:
            why = "is not mounted by shardfs, and is no dataset with a journal; `shardfs status` lists the mounts"
            echo(f"{source}: {why}")
        return ExitCode.NOT_MOUNTED
    while wait and left is not None and left.owner is not None and left.waiting:
        time.sleep(LOOK_S)
        left = recover.look_if_there(directory)
    waiting, owner = (left.waiting, left.owner) if left is not None else ([], None)
    if as_json:
        counts = {"files": len(waiting), "conflicts": sum(entry.state == "conflict" for entry in waiting)}
        write_json({"source": absolute(source), "journal": str(directory), "owner": owner, **counts})
    else:
        echo(*_left_lines(source, left))
    return int(bool(waiting) and owner is None)


def _left_lines(source: str, left: Left | None) -> Iterator[str]:
    from shardfs.storage.source_locks import describe

    if left is None or not (waiting := left.waiting):
        yield f"{source}: all data is published"
        return
    yield f"{source}: {counted(len(waiting), 'unpublished file')} in {left.directory}"
    nobody = f"no process publishes the data: mount with --rw, or use shardfs recover {source}"
    yield f"  {describe(left.owner) if left.owner else nobody}"
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
    yield f"  requests: {_counts(s['requests'])}"
    for op, errors in s["errors"].items():
        if failures := {name: n for name, n in errors.items() if name not in ORDINARY}:
            yield f"  errors of {op}: {_counts(failures)}"
    yield f"  served: {human_bytes(s['bytes_served'])}"
    if s["waiting"] or s["postponed"]:
        yield f"  waiting for the source: {counted(s['waiting'], 'request')}, and {s['postponed']} for a thread"
    for op, latency in s["latencies"].items():
        yield f"  {op}: {_latency(latency)}"
    for name, cache in s["caches"].items():
        lookups = cache["hits"] + cache["misses"]
        share = f"{100 * cache['hits'] / lookups:.1f} % of {lookups} found" if lookups else "not used"
        yield f"  {name} cache: {share}, {human_bytes(cache['bytes'])} of {human_bytes(cache['limit'])}"
    if s["store"]:
        yield from _store_lines(s["store"])
    if s["writing"]:
        yield from _writing_lines(s["writing"])


def _store_lines(store: Mapping[str, Any]) -> Iterator[str]:
    silent = "; THE STORE DOES NOT ANSWER" if store["silent"] else ""
    yield f"  store: {_counts(store['requests'])}; {human_bytes(store['bytes_fetched'])} fetched{silent}"
    if store["bytes_ahead_used"] or store["bytes_ahead_wasted"]:
        used, wasted = human_bytes(store["bytes_ahead_used"]), human_bytes(store["bytes_ahead_wasted"])
        yield f"  fetched ahead: {used} read, {wasted} not read"
    if lookups := store["disk_cache_hits"] + store["disk_cache_misses"]:
        share, nbytes = store["disk_cache_hits"] / lookups, human_bytes(store["bytes_from_disk_cache"])
        yield f"  disk cache: {100 * share:.1f} % of {lookups} found, {nbytes} read"
    if store["latency"]:
        yield f"  store operations: {_latency(store['latency'])}"
    if store["errors"]:
        yield f"  errors of the store: {_counts(store['errors'])}"
    if store["retries"] or store["timeouts"]:
        yield f"  retries: {store['retries']}; time-outs: {store['timeouts']}"


def _writing_lines(w: Mapping[str, Any]) -> Iterator[str]:
    if w["read_only"]:
        yield f"  READ-ONLY NOW: {w['read_only']}"
    yield f"  to be published: {counted(w['dirty_chunks'], 'chunk')} of {counted(w['dirty_shards'], 'shard')}"
    yield f"  journal: {human_bytes(w['journal_bytes'])} of {human_bytes(w['journal_limit'])} in {w['journal']}"
    shards = f"{human_bytes(w['published_bytes'])} in {counted(w['published_shards'], 'shard')}"
    has_ratio = w["written_bytes"] and w["published_shards"]  # only deletions are published without written bytes
    per = f", {w['published_bytes'] / w['written_bytes']:.2f} bytes for each" if has_ratio else ""
    yield f"  written: {human_bytes(w['written_bytes'])}; published: {shards}{per}"
    files = [f"NOT PUBLISHED: {path}: {why}" for path, why in w["errors"].items()]
    files += [f"LOST, REFUSED AT CLOSE: {path or 'more files'}: {why}" for path, why in w["refused_paths"].items()]
    files += [f"belongs to no array: {path}" for path in w["orphan_paths"]]
    yield from (f"  {line}" for line in [*w["problems"], *files[:NAMED]])
    if (n := w["failing"] + w["refused"] + w["orphans"]) > NAMED:
        yield f"  and {n - NAMED} more"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n) or "none"


def _latency(latency: Mapping[str, Any]) -> str:
    half, most = (_seconds(latency[key]) for key in ("median_below", "p99_below"))
    return f"{_seconds(latency['mean'])} on average, half below {half}, 99 % below {most}"


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


@click.command()
@click.argument("argument", required=False, metavar="[SOURCE|MOUNTPOINT|PROFILE]", shell_complete=profiles_and_files)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def doctor(argument: str | None, as_json: bool, given: Given) -> int:
    """Find what prevents mounts from working.

    Checks this machine and all mounts, and SOURCE if given. Each problem comes with a remedy. Exit code 1 if there is a
    problem.
    """
    from shardfs.daemon import doctor as work
    from shardfs.daemon.asking import mounts
    from shardfs.daemon.health import WRONG
    from shardfs.model import redact

    found, source = given.options(), argument
    if argument is not None and mounts(os.path.abspath(argument)):
        source = None  # `examine_machine` checks all mounts
    elif argument is not None and (profile := profile_named(argument, found.config)) is not None:
        source, found = profile.source, given.with_profile(argument).options()
    findings = work.examine_machine(found)
    if source is not None:
        redact.add_secrets(source)
        findings = chain(findings, work.examine_source(absolute(source), found))
    wrong = False
    for finding in findings:
        wrong |= finding.state == WRONG
        if as_json:
            write_json(finding._asdict())
        else:
            echo(f"{finding.state:5}  {finding.check}: {finding.message}")
            if finding.fix:
                echo(f"       -> {finding.fix}")
    return int(wrong)
