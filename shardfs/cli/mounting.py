"""The verbs `mount` and `umount`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardfs import options
from shardfs.cli.sources import Function, absolute, debug, given_options, opened, source_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.server import FuseSettings
    from shardfs.options import Options, Setting


def _mount_options(function: Function) -> Function:
    """A flag for each option."""
    for setting in reversed(list(options.settings())):
        function = _flag(setting)(function)
    return function


def _flag(setting: Setting) -> Callable[[Function], Function]:
    if setting.value:
        text = f"{setting.help}  [{setting.default}]"
        return click.option(setting.flag, setting.name, metavar=setting.value, help=text)
    off = "" if setting.parse is options.read_only else f"/--no-{setting.flag[2:]}"
    return click.option(setting.flag + off, setting.name, default=None, is_flag=True, help=setting.help)


@click.command()
@click.argument("source")
@click.argument("mountpoint")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground.")
@source_options
@_mount_options
def mount(
    source: str,
    mountpoint: str,
    foreground: bool,
    words: tuple[str, ...],
    storage: tuple[str, ...],
    env: tuple[str, ...],
    **flags: Any,
) -> int:
    """Mount SOURCE, a path or an fsspec URL, on the directory MOUNTPOINT.

    Returns when the mount answers; a daemon then serves it until it is unmounted.
    """
    found = given_options(words, storage, env, flags)
    from shardfs.mount import mount as mount_tree

    return mount_tree(
        absolute(source),
        mountpoint,
        foreground=foreground,
        ready_timeout=found.ready_timeout,
        open_tree=lambda waiting: opened(source, found, waiting=waiting),
        fuse=_fuse_settings(found),
        fsname=found.fsname,
        log_file=found.log_file,
        log_level=found.log_level,
    )


def _fuse_settings(found: Options) -> FuseSettings:
    from shardfs.fuse.server import FuseSettings

    given = {name: getattr(found, name) for name in FuseSettings.__dataclass_fields__}
    for name in ("attr_timeout", "entry_timeout", "negative_timeout"):
        # What the kernel remembers it does not ask for, so nobody would notice that the index is not trusted longer.
        given[name] = min(given[name], found.index_ttl)
    return FuseSettings(**given)


@click.command()
@click.argument("mountpoint")
@click.option("--timeout", default="60", metavar="SECONDS", help="How long to wait until it is gone.  [60]")
@click.option("-l", "--lazy", is_flag=True, help="Detach it now, even if programs still use it.")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=debug, help="Show tracebacks.")
def umount(mountpoint: str, timeout: str, lazy: bool) -> int:
    """Unmount MOUNTPOINT and wait until it is gone. Exit code 1 if it is busy."""
    from shardfs.mount import umount as unmount

    return unmount(mountpoint, timeout=options.finite_seconds(timeout), lazy=lazy)
