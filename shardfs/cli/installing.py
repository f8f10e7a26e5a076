"""The verbs `install` and `uninstall`."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.cli.sources import Function
    from shardfs.daemon.install import Item


def _where(function: Function) -> Function:
    for decorate in (
        click.option("--root", default="", metavar="DIR", help="Put DIR before all paths, to build a package."),
        click.option("-n", "--dry-run", is_flag=True, help="Only print what would be done."),
        click.option("--user", is_flag=True, help="Install in your home directory, without the mount(8) helpers."),
    ):
        function = decorate(function)
    return function


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
    from shardfs.cli.completing import register
    from shardfs.daemon.install import items, reload_manager

    register()
    wanted = list(items(_programs(programs), user=user, root=root))
    foreign = [item for item in wanted if not item.is_there() and not item.is_ours()]
    for item in foreign if not force else ():
        click.echo(f"shardfs: {item.path}: was not installed by shardfs; --force replaces it", err=True)
    if foreign and not force:
        return 1
    for item in wanted:
        there = item.is_there()
        if not there and not dry_run:
            with _hint(item, user=user):
                item.place()
        _tell(item, "is up to date" if there else "would be installed" if dry_run else "installed")
    if not dry_run and not root:
        reload_manager(user=user)
    return 0


@click.command()
@_where
def uninstall(user: bool, dry_run: bool, root: str) -> None:
    """Remove the files that `shardfs install` has installed."""
    from shardfs.daemon.install import items, reload_manager

    for item in items(_programs(None), user=user, root=root):
        if not item.path.exists() and not item.path.is_symlink():
            continue
        if not item.is_ours():
            _tell(item, "was not installed by shardfs, and stays")
            continue
        if not dry_run:
            with _hint(item, user=user):
                item.path.unlink()
        _tell(item, "would be removed" if dry_run else "removed")
    if not dry_run and not root:
        reload_manager(user=user)


def _programs(given: str | None) -> Path:
    import sysconfig
    from pathlib import Path

    return Path(given or sysconfig.get_path("scripts")).absolute()


@contextmanager
def _hint(item: Item, *, user: bool) -> Iterator[None]:
    """Context manager that adds advice for unprivileged users to errors about file permissions."""
    try:
        yield
    except OSError as e:
        if user or e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        why = f"cannot be changed ({e.strerror}): run this as root, or use --user for your own home directory"
        raise OSError(e.errno, why, str(item.path)) from e


def _tell(item: Item, what: str) -> None:
    arrow = "" if item.target is None else f" -> {item.target}"
    click.echo(f"{item.path}{arrow}: {what}")
