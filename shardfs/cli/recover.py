"""The verb `recover`: inspects, publishes or discards journals without a mount."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli.printing import echo, waiting, write_json
from shardfs.cli.source_options import CommandOptions, is_source, source_options
from shardfs.config import loading, parsers
from shardfs.config.parsers import absolute
from shardfs.model.errors import ShardfsError, message
from shardfs.model.exit_codes import ExitCode
from shardfs.model.text import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.cli.source_options import Function
    from shardfs.config.options import Options
    from shardfs.write.recover import Left


def _action(name: str, help: str, **more: Any) -> Callable[[Function], Function]:
    return click.option(f"--{name}", "action", flag_value=name, help=help, **more)


def _resolve(name: str, version: str) -> Callable[[Function], Function]:
    words = f"Resolve a conflict, or all below a directory: {version}."
    return click.option(f"--{name}", multiple=True, metavar="PATH", help=words)


@click.command()
@click.argument("source", required=False, metavar="[SOURCE|DIRECTORY]")
@_action("list", "List the contents of the journal (the default).", default=True)
@_action("verify", "Read the whole journal and compare checksums.")
@_action("apply", "Publish what can be published, without a mount.")
@click.option("--export", "out", metavar="DIRECTORY", help="Write the contents to plain files below this directory.")
@_resolve("ours", "publish our version")
@_resolve("theirs", "keep the version in the source")
@_action("salvage", "Move damaged records aside and continue without them.")
@_action("discard", "Move everything aside; it is kept for seven days.")
@click.option("--all", "everything", is_flag=True, help="Without SOURCE: also list journals that need no decision.")
@click.option("--yes", is_flag=True, help="Confirm --discard.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def recover(
    source: str | None,
    action: str,
    out: str | None,
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    everything: bool,
    yes: bool,
    as_json: bool,
    command_options: CommandOptions,
) -> int:
    """Inspect, publish or discard the journal of a mount.

    A mount leaves a journal if data that was written to SOURCE is not published. A DIRECTORY with a journal will do,
    also a copy, or one whose source is gone. Without either, your journals that need a decision are listed, and those
    that are not needed any more are removed. Exit code 3 if something is left that cannot be published, 4 if a mount
    has the journal, 7 if the journal of SOURCE is damaged; without SOURCE, damage is listed only.
    """
    from shardfs.write import recover as work

    options = command_options.options()
    if source is None:
        if action != "list" or out is not None or ours or theirs:
            raise click.UsageError(
                "which journal? Give SOURCE, or the directory of a journal; `shardfs recover` lists them"
            )
        return _list_all(options, everything=everything, as_json=as_json)
    try:
        directory = _find(source, options)
    except FileNotFoundError:
        if out is not None or ours or theirs or not is_source(source, options):
            raise
        echo(f"{source}: nothing to be published: there is no journal of it")
        return ExitCode.OK
    if out is not None:
        return _export(directory, parsers.file_path(out))
    if ours or theirs:
        work.decide(directory, ours, theirs)
        return ExitCode.OK
    if action == "apply":
        return _apply(source, directory, options)
    if action == "salvage":
        return _salvage(directory)
    if action == "discard":
        return _discard(directory, confirmed=yes)
    journal = work.read(directory)
    _list(journal, as_json=as_json)
    return _damage(journal)


def _damage(journal: Left) -> ExitCode:
    return ExitCode.DAMAGED if journal.problems or journal.damaged_paths else ExitCode.OK


def _find(source: str, options: Options) -> Path:
    from shardfs.write import recover as work

    with suppress(FileNotFoundError):
        return work.find(source, options.journal)
    return work.find(absolute(source), options.journal)


def _list_all(options: Options, *, everything: bool, as_json: bool) -> int:
    from shardfs.write import recover as work

    work.sweep(options.journal)
    listed, hidden = 0, 0
    for directory in work.journals(options.journal):
        try:
            journal = work.read_if_there(directory)
        except (OSError, ShardfsError) as e:
            echo(f"shardfs: {directory}: this journal cannot be read: {message(e)}", err=True)
            listed += 1
            continue
        if journal is None:
            continue
        if not (everything or journal.undecided):
            hidden += 1
            continue
        listed += 1
        if as_json:
            write_json(_as_json(journal))
        else:
            echo(f"{journal.source}: {_summary(journal)}", f"  {directory}")
    if not listed and not as_json:
        echo(f"nothing needs a decision; --all lists {counted(hidden, 'more journal')}" if hidden else "no journals")
    return ExitCode.OK


def _as_json(journal: Left) -> dict[str, Any]:
    fields = {**journal._asdict(), "directory": str(journal.directory), "entries": len(journal.entries)}
    return {"type": "journal", **fields}


def _summary(journal: Left) -> str:
    counts = Counter(entry.state for entry in journal.entries)
    words = [f"{n} {state}" for state, n in counts.items()] or ["nothing to be published"]
    if journal.owner is not None:
        from shardfs.storage.source_locks import describe

        words.append(describe(journal.owner))
    return ", ".join([*words, counted(len(journal.problems), "problem")] if journal.problems else words)


def _list(journal: Left, *, as_json: bool) -> None:
    if as_json:
        write_json(_as_json(journal))
        for entry in journal.entries:
            write_json({"type": "file", **entry._asdict()})
        return
    layout = f", written with -o {journal.layout}" if journal.layout else ""
    echo(f"{journal.source}: {_summary(journal)}{layout}; {human_bytes(journal.nbytes)} in {journal.directory}")
    for entry in journal.entries:
        why = f"  ({entry.why})" if entry.why else ""
        echo(f"  {entry.state:<8} {human_bytes(entry.size):>10}  {entry.path}{why}")
    for problem in journal.problems:
        echo(f"  problem: {problem}")
    for path in journal.damaged_paths:
        echo(f"  lost: {path or 'the damaged records do not say which files'}")


def _export(directory: Path, out: str) -> int:
    from shardfs.write import recover as work

    journal, export = work.read(directory), work.export(directory, out)
    echo(f"{counted(export.files, 'file')} in {out}; {len(export.deleted)} deleted")
    for path, why in export.failed.items():
        echo(f"shardfs: {path}: {why}", err=True)
    return ExitCode.LEFT if export.failed else _damage(journal)


def _apply(source: str, directory: Path, options: Options) -> int:
    from shardfs.daemon.opening import open_source, open_to_write
    from shardfs.write import recover as work

    # If the argument is a directory with a journal, the journal names the source.
    is_journal = os.path.realpath(source) == os.path.realpath(directory)
    journal = work.read(directory)
    source = journal.source if is_journal else absolute(source)
    words = loading.from_mount_options([journal.layout or "layout=native"])
    options = replace(options, **{"chunk_codec": None, **words})
    tree = open_source(source, options)
    with waiting("publishing") as show_progress:
        writable = open_to_write(tree, source, options, directory=directory)
        show_progress(counted(len(writable.left()), "file"))
        unpublished = writable.close(options.stall)
    for path in sorted(unpublished):
        failure = writable.pending.failure(path)
        why = "" if failure is None else f": {message(failure)}"
        echo(f"shardfs: {path}: is not published{why}", err=True)
    return ExitCode.LEFT if unpublished else _damage(journal)


def _salvage(directory: Path) -> int:
    from shardfs.write import recover as work

    lost = work.salvage(directory)
    for problem in lost:
        echo(problem)
    echo(f"moved aside in {directory}: {counted(len(lost), 'damaged part')}" if lost else "there is no damage")
    return ExitCode.OK


def _discard(directory: Path, *, confirmed: bool) -> int:
    from shardfs.write import recover as work

    if not confirmed:
        files = counted(len(work.read(directory).entries), "file")
        raise click.UsageError(f"--discard would give up {files} in {directory}: add --yes to confirm")
    aside = work.discard(directory)
    echo("the journal is empty" if aside is None else f"moved aside to {aside}, for seven days")
    return ExitCode.OK
