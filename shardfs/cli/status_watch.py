"""`shardfs status --watch`: the mounts of this machine in a terminal, refreshed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardfs.daemon.figures import cells, titles
from shardfs.daemon.health import WRONG, MountView, mount_views
from shardfs.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    Snapshot = Mapping[str, Any]


PERIOD_S = 2.0


def watch(mountpoint: str | None) -> None:
    """Show all mounts, or one, until Ctrl-C. Rates are those since the last refresh."""
    before: dict[str, Snapshot] = {}
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            views = [view for view in mount_views() if mountpoint in (None, view.mount.mountpoint)]
            live.update(shown(views, before), refresh=True)
            before = {v.mount.mountpoint: v.mount.status for v in views if v.mount.status is not None}
            time.sleep(PERIOD_S)


def shown(views: list[MountView], before: Mapping[str, Snapshot]) -> RenderableType:
    """A table of the mounts, and below it their problems. `before`: mountpoint -> the last snapshot."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mount", overflow="fold")
    for title in titles():
        table.add_column(title, justify="right", no_wrap=True)
    for view in views:
        now, name = view.mount.status, printable(view.mount.mountpoint)
        cells = [view.mount.state] if now is None else _cells(before.get(view.mount.mountpoint, now), now)
        table.add_row(name, *cells, style="red" if now is None else "")
    return Group(table, *_problems(views)) if views else Text("nothing is mounted")


def _cells(before: Snapshot, now: Snapshot) -> Iterator[str]:
    if before["started"] != now["started"]:  # another daemon
        before = now
    return cells(before, now, max(now["uptime"] - before["uptime"], 1e-3))


def _problems(views: list[MountView]) -> Iterator[Text]:
    for problem in (problem for view in views for problem in view.problems):
        text = Text(f"\n{problem.state}  ", style="bold red" if problem.state == WRONG else "bold yellow")
        text.append(printable(problem.message), style="default not bold")
        if problem.fix:
            text.append(f"\n       -> {printable(problem.fix)}", style="default not bold")
        yield text
