"""The verbs `status` and `doctor`."""

from __future__ import annotations

import math
import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.completing import profiles_and_files
from shardfs.cli.printing import human_bytes, write_json
from shardfs.cli.sources import absolute, given_options, is_source, profile_named, source_options
from shardfs.storage.counters import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.storage.mount_table import Mount
    from shardfs.write.recover import Left


@click.command()
@click.argument("what", required=False, metavar="[MOUNTPOINT|SOURCE|PROFILE]", shell_complete=profiles_and_files)
@click.option("--wait", is_flag=True, help="Wait until all data is published, or no process publishes it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def status(what: str | None, wait: bool, as_json: bool, **given: Any) -> int:
    """Show the state of mounts, or of the journal of SOURCE.

    Without an argument, of all mounts on this machine; answers within a second. Exit code 1 if a mount is dead, hangs
    or cannot publish, if nothing is mounted on MOUNTPOINT, or if files wait in the journal and no process publishes
    them.
    """
    from shardfs.storage import mount_table

    mountpoint = None if what is None else os.path.abspath(what)
    found = mount_table.mounts(mountpoint)
    if not found and what is not None and (profile := profile_named(what)) is not None:
        mountpoint, what = os.path.realpath(profile.mountpoint), profile.source
        given["words"] = (f"profile={profile.name}", *given["words"])
        found = mount_table.mounts(mountpoint)
    if not found and what is not None:
        return _status_of_source(what, wait=wait, as_json=as_json, **given)
    while wait and any(_publishes(mount) for mount in found):
        time.sleep(LOOK_S)
        found = mount_table.mounts(mountpoint)
    for mount in found:
        if as_json:
            told = mount.status or {}
            write_json({**told, "mountpoint": mount.mountpoint, "source": mount.source, "state": mount.state})
        else:
            click.echo("\n".join(_lines(mount)))
    if not found and not as_json:
        click.echo("nothing is mounted")
    return int(any(mount.state in (mount_table.DEAD, mount_table.HANGS) or _fails(mount) for mount in found))


def _publishes(mount: Mount) -> bool:
    writing = mount.status and mount.status["writing"]
    return bool(writing and writing["dirty_chunks"] and not writing["errors"])


def _fails(mount: Mount) -> bool:
    writing = mount.status and mount.status["writing"]
    return bool(writing and (writing["errors"] or writing["refused"] or writing["read_only"]))


def _status_of_source(what: str, *, wait: bool, as_json: bool, **given: Any) -> int:
    """Print the unpublished files in the journal of a source and the process that publishes them."""
    from shardfs.write import recover
    from shardfs.write.journal import directory_for

    found, _ = given_options(**given, flags={})
    directory = directory_for(absolute(what), found.journal)
    left = recover.look_if_there(directory)
    if left is None and not is_source(what):
        if not as_json:
            click.echo(f"{what}: is not mounted by shardfs, and has no journal; `shardfs status` lists the mounts")
        return 1
    while wait and left is not None and left.owner is not None and left.waiting:
        time.sleep(LOOK_S)
        left = recover.look_if_there(directory)
    waiting, owner = (left.waiting, left.owner) if left is not None else ([], None)
    if as_json:
        counts = {"files": len(waiting), "conflicts": sum(entry.state == "conflict" for entry in waiting)}
        write_json({"source": absolute(what), "journal": str(directory), "owner": owner, **counts})
    else:
        click.echo("\n".join(_left_lines(what, left)))
    return int(bool(waiting) and owner is None)


def _left_lines(what: str, left: Left | None) -> Iterator[str]:
    from shardfs.storage.source_locks import describe

    if left is None or not (waiting := left.waiting):
        yield f"{what}: all data is published"
        return
    yield f"{what}: {len(waiting)} files wait in {left.directory}"
    yield (
        f"  {describe(left.owner)}"
        if left.owner
        else f"  no process publishes them: mount with --rw, or use shardfs recover {what}"
    )
    yield from (f"  {entry.path}{f': {entry.why}' if entry.why else ''}" for entry in waiting[:NAMED])
    if len(waiting) > NAMED:
        yield f"  and {len(waiting) - NAMED} more"


LOOK_S = 0.5

NAMED = 20
"""At most this many files or shards are named in the output."""

_WORDS = {
    "dead": "its daemon has died; `shardfs umount --lazy {0}` removes the mount",
    "hangs": "does not answer; `shardfs umount --lazy {0}` removes the mount",
    "closed": "belongs to another user, and is not open to others",
    "old": "was mounted by a version of shardfs that reports no status",
}


def _lines(mount: Mount) -> Iterator[str]:
    told = mount.status
    if told is None:
        yield f"{mount.mountpoint}: {mount.source}: {_WORDS[mount.state].format(mount.mountpoint)}"
        return
    yield f"{mount.mountpoint}: {mount.source}"
    up = _duration(told["uptime"])
    yield f"  layout {told['layout']}, process {told['pid']}, up {up}, {human_bytes(told['resident_bytes'])} of memory"
    yield f"  requests: {_counts(told['requests'])}"
    for op, errors in told["errors"].items():
        if failures := {name: n for name, n in errors.items() if name not in ORDINARY}:
            yield f"  errors of {op}: {_counts(failures)}"
    yield f"  served: {human_bytes(told['bytes_served'])}"
    if told["waiting"] or told["postponed"]:
        yield f"  waiting for the source: {told['waiting']} requests, and {told['postponed']} for a thread"
    for op, latency in told["latencies"].items():
        yield f"  {op}: {_latency(latency)}"
    for name, cache in told["caches"].items():
        asked = cache["hits"] + cache["misses"]
        share = f"{100 * cache['hits'] / asked:.1f} % of {asked} found" if asked else "not used"
        yield f"  {name} cache: {share}, {human_bytes(cache['bytes'])} of {human_bytes(cache['limit'])}"
    if told["store"]:
        yield from _store_lines(told["store"])
    if told["writing"]:
        yield from _writing_lines(told["writing"])


def _store_lines(store: Mapping[str, Any]) -> Iterator[str]:
    silent = "; THE STORE DOES NOT ANSWER" if store["silent"] else ""
    yield f"  store: {_counts(store['requests'])}; {human_bytes(store['bytes_fetched'])} fetched{silent}"
    if store["latency"]:
        yield f"  store operations: {_latency(store['latency'])}"
    if store["errors"]:
        yield f"  errors of the store: {_counts(store['errors'])}"
    if store["retries"] or store["timeouts"]:
        yield f"  retries: {store['retries']}; time-outs: {store['timeouts']}"


def _writing_lines(w: Mapping[str, Any]) -> Iterator[str]:
    if w["read_only"]:
        yield f"  READ-ONLY NOW: {w['read_only']}"
    yield f"  to be published: {w['dirty_chunks']} chunks of {w['dirty_shards']} shards"
    yield f"  journal: {human_bytes(w['journal_bytes'])} of {human_bytes(w['journal_limit'])} in {w['journal']}"
    per = f", {w['published_bytes'] / w['written_bytes']:.2f} bytes for each" if w["written_bytes"] else ""
    shards = f"{human_bytes(w['published_bytes'])} in {w['published_shards']} shards"
    yield f"  written: {human_bytes(w['written_bytes'])}; published: {shards}{per}"
    told = [f"NOT PUBLISHED: {path}: {why}" for path, why in w["errors"].items()]
    told += [f"LOST, REFUSED AT CLOSE: {path or 'more files'}: {why}" for path, why in w["refused_paths"].items()]
    told += [f"belongs to no array: {path}" for path in w["orphan_paths"]]
    yield from (f"  {line}" for line in [*w["problems"], *told[:NAMED]])
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
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    parts = [(days, "d"), (h, "h"), (m, "m"), (s, "s")]
    first = next((i for i, (n, _) in enumerate(parts) if n), 3)
    return " ".join(f"{n}{unit}" for n, unit in parts[first : first + 2])


@click.command()
@click.argument("what", required=False, metavar="[SOURCE|MOUNTPOINT|PROFILE]", shell_complete=profiles_and_files)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def doctor(what: str | None, as_json: bool, **given: Any) -> int:
    """Find what prevents mounts from working.

    Checks this machine and all mounts, and SOURCE if given. Each problem comes with a remedy. Exit code 1 if there is a
    problem.
    """
    from shardfs.daemon import doctor as work
    from shardfs.model import redact
    from shardfs.storage import mount_table

    found, _ = given_options(**given, flags={})
    mounted = what is not None and bool(mount_table.mounts(os.path.abspath(what)))
    findings = [work.examine_machine(found)]
    if what is not None and not mounted:
        profile = profile_named(what, found.config)
        source = what if profile is None else profile.source
        if profile is not None:
            given["words"] = (f"profile={what}", *given["words"])
            found, _ = given_options(**given, flags={})
        redact.add_secrets(source)
        findings = [work.examine_machine(found), work.examine_source(absolute(source), found)]
    wrong = False
    for finding in chain.from_iterable(findings):
        wrong |= finding.state == work.WRONG
        if as_json:
            write_json(finding._asdict())
        else:
            click.echo(f"{finding.state:5}  {finding.check}: {finding.message}")
            if finding.fix:
                click.echo(f"       -> {finding.fix}")
    return int(wrong)
