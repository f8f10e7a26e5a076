"""The verbs `mount` and `umount`."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shardfs import options
from shardfs.cli.printing import human_bytes, waiting
from shardfs.cli.sources import (
    Function,
    absolute,
    configured,
    debug,
    given_options,
    opened_to_mount,
    opened_to_write,
    source_options,
)
from shardfs.masking import public_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from shardfs.fuse.settings import FuseSettings
    from shardfs.options import Options, Setting
    from shardfs.tree import Tree
    from shardfs.writing.overlay import Overlay
    from shardfs.writing.tree import WriteTree

log = logging.getLogger(__name__)


# Not click.Path: it looks at what it is given, and a mountpoint may hang whoever looks at it.


def _profiles_and_files(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from shardfs.config import read

    names = [name for name in read(os.environ.get("SHARDFS_CONFIG")).profiles if name.startswith(begun)]
    return [*(CompletionItem(name) for name in names), CompletionItem(begun, type="file")]


def _directories(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(begun, type="dir")]


def _mount_options(function: Function) -> Function:
    """A flag for each option."""
    for setting in reversed(list(options.settings())):
        function = _flag(setting)(function)
    return function


def _flag(setting: Setting) -> Callable[[Function], Function]:
    if setting.value:
        text = f"{setting.help}  [{setting.default}]"
        return click.option(setting.flag, setting.name, metavar=setting.value, help=text)
    off = "/--ro" if setting.name == "rw" else f"/--no-{setting.flag[2:]}"
    return click.option(setting.flag + off, setting.name, default=None, is_flag=True, help=setting.help)


@click.command()
@click.argument("source", required=False, shell_complete=_profiles_and_files)
@click.argument("mountpoint", required=False, shell_complete=_directories)
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground.")
@source_options
@_mount_options
def mount(
    source: str | None,
    mountpoint: str | None,
    foreground: bool,
    words: tuple[str, ...],
    storage: tuple[str, ...],
    env: tuple[str, ...],
    **flags: Any,
) -> int:
    """Mount SOURCE, a path or an fsspec URL, on the directory MOUNTPOINT.

    A single word instead of both is the name of a profile in the configuration files, which has them.

    Returns when the mount answers; a daemon then serves it until it is unmounted.
    """
    if source is not None and mountpoint is None:
        flags["profile"] = _only_profile(source, flags["profile"])
    found, profile = given_options(words, storage, env, flags)
    if source is None or mountpoint is None:
        if profile is None:
            raise click.UsageError(_NEEDED)
        source, mountpoint = profile.source, profile.mountpoint
    return start(source, mountpoint, found, foreground=foreground)


def start(source: str, mountpoint: str, found: Options, *, foreground: bool) -> int:
    """Mount it; the exit code. Raise OptionError, before anything else, if the options do not go together."""
    check(found)
    if not found.rw:
        found = _looked_for_journal(source, found)
    from shardfs.logs import Logs
    from shardfs.mount import mount as mount_tree

    def open_tree(waiting: Callable[[], None]) -> tuple[Tree | Overlay, WriteTree | None]:
        if not found.rw:
            return _opened_to_read(source, found, waiting), None
        tree = opened_to_write(source, found, os.path.realpath(mountpoint), waiting)
        return tree, tree

    return mount_tree(
        absolute(source),
        mountpoint,
        foreground=foreground,
        ready_timeout=found.ready_timeout,
        open_tree=open_tree,
        fuse=_fuse_settings(found),
        fsname=found.fsname,
        layout=found.layout,
        told=Logs(found.log_file, found.log_level, found.log_format),
        access_log=found.access_log,
        metrics_addr=found.metrics_addr,
    )


def _looked_for_journal(source: str, found: Options) -> Options:
    """Tell of what was written to the source, and nobody publishes. The options under which it can be shown, too."""
    from shardfs.recover import LOOK_S, unpublished

    shown = found.layout == "native"
    told = unpublished(absolute(source), found.journal, shown=shown)
    if told is None:
        return found
    click.echo(f"shardfs: warning: {public_name(source)}: {told}", err=True)
    return replace(found, index_ttl=min(found.index_ttl, LOOK_S)) if shown else found


def _opened_to_read(source: str, found: Options, waiting: Callable[[], None]) -> Tree | Overlay:
    """The tree; with what waits in its journal, if the kernel will not remember that for ever."""
    from shardfs.recover import LOOK_S, unpublished
    from shardfs.writing.unpublished import with_unpublished

    tree, path = opened_to_mount(source, found, waiting), absolute(source)
    if found.layout == "native" and found.index_ttl <= LOOK_S:
        return with_unpublished(tree, path, found.journal, look_s=found.index_ttl, waiting=waiting)
    if (told := unpublished(path, found.journal)) is not None:
        log.warning("%s: %s", public_name(source), told)
    return tree


def check(found: Options) -> None:
    """As `options.check`, and what is known of higher floors only."""
    from shardfs.create_rules import parse

    options.check(found)
    try:
        parse(found.create or "")
    except ValueError as e:
        raise options.OptionError(f"create: {e}") from None


_NEEDED = "mount needs SOURCE and MOUNTPOINT, or the name of a profile"


def _only_profile(word: str, given: str | None) -> str:
    """The word, if it can be the name of a profile."""
    from shardfs.config import NAME

    if given is not None or not re.fullmatch(NAME, word):
        raise click.UsageError(f"{word!r} stands alone: {_NEEDED}")
    return word


def _fuse_settings(found: Options) -> FuseSettings:
    from shardfs.fuse.settings import FuseSettings

    given = {name: getattr(found, name) for name in FuseSettings.__dataclass_fields__ if name != "keep_listings"}
    given["keep_listings"] = found.index_ttl == math.inf
    if found.allow_root:
        # To the kernel either nobody else may in or all, and libfuse's own check sees only what the kernel still asks
        # for. Owner and mode it looks at always, and root may do what the owner may.
        given.update(allow_other=True, default_permissions=True, umask=found.umask | 0o077)
    for name, mode in (("file_mode", 0o644), ("dir_mode", 0o755)):
        if given[name] is None:
            given[name] = mode if found.rw else mode & ~0o222
    for name in ("attr_timeout", "entry_timeout", "negative_timeout"):
        # What the kernel remembers it does not ask for, so nobody would notice that the index is not trusted longer.
        given[name] = min(given[name], found.index_ttl)
    return FuseSettings(**given)


@click.command()
@click.argument("mountpoint", shell_complete=_profiles_and_files)
@click.option("--timeout", default="60", metavar="SECONDS", help="How long to wait until it is gone.  [60]")
@click.option("-l", "--lazy", is_flag=True, help="Detach it now, even if programs still use it.")
@click.option("--patient", is_flag=True, help="While it is busy, try again until the timeout.")
@click.option("--if-mounted", is_flag=True, help="It is no error if nothing is mounted there.")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=debug, help="Show tracebacks.")
def umount(mountpoint: str, timeout: str, lazy: bool, patient: bool, if_mounted: bool) -> int:
    """Unmount MOUNTPOINT, or that of the profile of this name, and wait until it is gone.

    A writable mount publishes first what was written. The time-out counts anew while that goes on. Exit code 3 if files
    stay in the journal, which are named; 4 if the mount is busy; 5 if the daemon has not ended in time.
    """
    from shardfs import unmount

    if "/" not in mountpoint and not unmount.is_mounted(mountpoint):
        profile = configured(os.environ.get("SHARDFS_CONFIG"), mountpoint).profiles.get(mountpoint)
        mountpoint = mountpoint if profile is None else profile.mountpoint
    if if_mounted and not unmount.is_mounted(mountpoint):
        return 0
    with waiting("publishing") as tell:
        return unmount.umount(
            mountpoint,
            timeout=options.finite_seconds(timeout),
            lazy=lazy,
            patient=patient,
            tell=lambda n: tell(f"at most {human_bytes(n)} left"),
        )
