"""The verbs `install` and `uninstall`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.cli.sources import Function
    from shardfs.install import Item


def _where(function: Function) -> Function:
    for decorate in (
        click.option("--root", default="", metavar="DIR", help="Put this before all paths, to make a package."),
        click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be done."),
        click.option("--user", is_flag=True, help="For yourself, in your home directory; no helpers of mount(8)."),
    ):
        function = decorate(function)
    return function


@click.command()
@_where
@click.option(
    "--programs", metavar="DIR", help="Where the programs are that links and units start.  [those of this Python]"
)
@click.option("--force", is_flag=True, help="Replace files of the same names that shardfs did not place.")
def install(user: bool, dry_run: bool, root: str, programs: str | None, force: bool) -> int:
    """Place the helpers of mount(8), the systemd unit, the manual pages and the completions for shells."""
    from shardfs.install import items, reload_manager

    wanted = list(items(_programs(programs), user=user, root=root))
    foreign = [item for item in wanted if not item.is_there() and not item.is_ours()]
    for item in foreign if not force else ():
        click.echo(f"shardfs: {item.path}: was not placed by shardfs; --force replaces it", err=True)
    if foreign and not force:
        return 1
    for item in wanted:
        _tell(item, "is there" if item.is_there() else "would be placed" if dry_run else "placed")
        if not item.is_there() and not dry_run:
            item.place()
    if not dry_run and not root:
        reload_manager(user=user)
    return 0


@click.command()
@_where
def uninstall(user: bool, dry_run: bool, root: str) -> None:
    """Remove what `shardfs install` has placed."""
    from shardfs.install import items, reload_manager

    for item in items(_programs(None), user=user, root=root):
        if not item.path.exists() and not item.path.is_symlink():
            continue
        if not item.is_ours():
            _tell(item, "was not placed by shardfs, and stays")
            continue
        _tell(item, "would be removed" if dry_run else "removed")
        if not dry_run:
            item.path.unlink()
    if not dry_run and not root:
        reload_manager(user=user)


def _programs(given: str | None) -> Path:
    import sysconfig
    from pathlib import Path

    return Path(given or sysconfig.get_path("scripts")).absolute()


def _tell(item: Item, what: str) -> None:
    arrow = "" if item.target is None else f" -> {item.target}"
    click.echo(f"{item.path}{arrow}: {what}")
