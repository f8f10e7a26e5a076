"""The verbs `install` and `uninstall`."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import click

from shardfs.cli.printing import echo
from shardfs.cli.source_options import decorated
from shardfs.model.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.daemon.install import Item

_where = decorated(
    click.option("--user", is_flag=True, help="Install in your home directory, without the mount(8) helpers."),
    click.option("-n", "--dry-run", is_flag=True, help="Only print what would be done."),
    click.option("--root", default="", metavar="DIR", help="Put DIR before all paths, to build a package."),
)


@click.command()
@_where
@click.option(
    "--programs", metavar="DIR", help="The directory of the programs that links and units start.  [that of this Python]"
)
@click.option("--force", is_flag=True, help="Replace files with the same names that shardfs did not install.")
def install(user: bool, dry_run: bool, root: str, programs: str | None, force: bool) -> int:
    """Install mount(8) helpers, units, manual pages, completions.

    Without --user, the files are for all users of this machine, and only root can install them.
    """
    from shardfs.cli.completion import register
    from shardfs.daemon.install import items, reload_manager

    register()
    wanted = list(items(_programs(programs), user=user, root=root))
    foreign = [] if force else [item for item in wanted if not item.is_there() and not item.is_ours()]
    for item in foreign:
        echo(f"shardfs: {item.path}: was not installed by shardfs; --force replaces it", err=True)
    if foreign:
        return ExitCode.PROBLEM
    for item in wanted:
        if item.is_there():
            _print(item, "is up to date")
        else:
            _change(item, item.install, "installed", user=user, dry_run=dry_run)
    if not dry_run and not root:
        reload_manager(user=user)
    return ExitCode.OK


@click.command()
@_where
def uninstall(user: bool, dry_run: bool, root: str) -> None:
    """Remove the files that `shardfs install` has installed."""
    from shardfs.daemon.install import items, reload_manager

    for item in items(_programs(None), user=user, root=root):
        if not item.path.exists() and not item.path.is_symlink():
            continue
        if item.is_ours():
            _change(item, item.path.unlink, "removed", user=user, dry_run=dry_run)
        else:
            _print(item, "was not installed by shardfs, and stays")
    if not dry_run and not root:
        reload_manager(user=user)


def _programs(directory: str | None) -> Path:
    import sysconfig
    from pathlib import Path

    return Path(directory or sysconfig.get_path("scripts")).absolute()


def _change(item: Item, change: Callable[[], None], outcome: str, *, user: bool, dry_run: bool) -> None:
    """Make a change unless `dry_run` is set, and print it. Errors about permissions advise unprivileged users."""
    try:
        if not dry_run:
            change()
    except OSError as e:
        if user or e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        why = f"cannot be changed ({e.strerror}): run this as root, or use --user for your own home directory"
        raise OSError(e.errno, why, str(item.path)) from e
    _print(item, f"would be {outcome}" if dry_run else outcome)


def _print(item: Item, state: str) -> None:
    arrow = "" if item.target is None else f" -> {item.target}"
    echo(f"{item.path}{arrow}: {state}")
