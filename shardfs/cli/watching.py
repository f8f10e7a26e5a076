"""`shardfs status --watch`: the mounts of this machine in a terminal, refreshed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardfs.cli.printing import human_bytes
from shardfs.daemon.health import WRONG, MountView, mount_views
from shardfs.model.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
    for name in ("served", "requests", "index", "chunks", "fetched", "ahead", "disk cache", "to publish", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for view in views:
        now, name = view.mount.status, printable(view.mount.mountpoint)
        cells = [view.mount.state] if now is None else _cells(before.get(view.mount.mountpoint, now), now)
        table.add_row(name, *cells, style="red" if now is None else "")
    return Group(table, *_problems(views)) if views else Text("nothing is mounted")


def _cells(before: Snapshot, now: Snapshot) -> Iterator[str]:
    if before["started"] != now["started"]:  # another daemon
        before = now
    seconds: float = max(now["uptime"] - before["uptime"], 1e-3)

    def rate(of: Callable[[Snapshot], int]) -> float:
        return (of(now) - of(before)) / seconds

    yield f"{human_bytes(rate(lambda s: s['bytes_served']))}/s"
    yield f"{rate(lambda s: sum(s['requests'].values())):.0f}/s"
    for cache in (now["caches"].get(name) for name in ("index", "chunk")):
        yield _share(cache["hits"], cache["misses"]) if cache else "-"
    if (store := now["store"]) is not None:
        yield f"{human_bytes(rate(lambda s: s['store']['bytes_fetched']))}/s"
        yield _share(store["bytes_ahead_used"], store["bytes_ahead_wasted"])
        yield _share(store["disk_cache_hits"], store["disk_cache_misses"])
    else:
        yield from ("-", "-", "-")
    yield counted(now["writing"]["dirty_chunks"], "chunk") if now["writing"] else "-"
    yield human_bytes(now["resident_bytes"])


def _share(part: int, rest: int) -> str:
    return f"{100 * part / (part + rest):.1f} %" if part + rest else "-"


def _problems(views: list[MountView]) -> Iterator[Text]:
    for problem in (problem for view in views for problem in view.problems):
        text = Text(f"\n{problem.state}  ", style="bold red" if problem.state == WRONG else "bold yellow")
        text.append(printable(problem.message), style="default not bold")
        if problem.fix:
            text.append(f"\n       -> {printable(problem.fix)}", style="default not bold")
        yield text
