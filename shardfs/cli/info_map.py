"""`info --map`: prints a map of chunks with coloured half blocks, or with shades on terminals without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.text import counted, human_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from rich.console import Console
    from rich.text import Text

    from shardfs.jobs.maps import ChunkMap

    Shares = npt.NDArray[np.float64]

SHADES = "·░▒▓█"
"""Characters for shares of existing chunks: none, up to a third, up to two thirds, more, all."""

COLOURS = ((38, 38, 46), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""RGB colours for shares: dark grey for none, then points of the viridis colour map to interpolate between."""

LARGEST = 6
"""Maximum width and height of a chunk in pixels, for small grids."""

ROWS, COLUMNS, BARS = 48, 96, 12


def map_size(console: Console) -> tuple[int, int]:
    """The most rows and columns of a map, in pixels. A pixel is half a character with colours, else two characters."""
    columns = max(16, min(console.width - 4, COLUMNS))
    return (ROWS, columns) if console.color_system is not None else (ROWS // 2, columns // 2)


def print_map(console: Console, chunk_map: ChunkMap) -> None:
    """Print a map of `map_size`, its legend, sizes of chunks and dead bytes of a collection; no map of one with ids."""
    from rich.text import Text

    console.print(Text(_title(chunk_map), style="bold"))
    if chunk_map.rows is not None and chunk_map.columns is not None:
        coloured = console.color_system is not None
        pixels = _enlarged(chunk_map.shares(), *map_size(console))
        console.print(Text(f"  {_axes(chunk_map)}"))
        for line in _half_blocks(pixels) if coloured else _shaded(pixels):
            console.print(Text("  ") + line)
        console.print(Text("  ") + _legend(coloured))
    for words in (*_sizes(chunk_map), *_dead(chunk_map)):
        console.print(Text(f"  {words}"))
    console.print()


def _title(chunk_map: ChunkMap) -> str:
    grid = f" of {' x '.join(map(str, chunk_map.grid))}" if chunk_map.grid else ""
    chunks, shards = counted(chunk_map.total, "chunk"), counted(len(chunk_map.shards), "shard")
    words = f"{printable(chunk_map.path or '/')}: {chunks}{grid} in {shards}"
    return f"{words}, {counted(chunk_map.findings, 'finding')}: see `shardfs verify`" if chunk_map.findings else words


def _axes(chunk_map: ChunkMap) -> str:
    rows = chunk_map.rows
    columns = chunk_map.columns
    if rows is None or columns is None:
        return ""
    down = f"axis {rows.axis} downwards, " if rows.axis >= 0 else ""
    right = f"axis {columns.axis} to the right" if columns.axis >= 0 else "one chunk"
    stacked_axes = [str(axis) for axis in range(len(chunk_map.grid)) if axis not in (rows.axis, columns.axis)]
    stacked = f", all of axis {' and '.join(stacked_axes)} on top of each other" if stacked_axes else ""
    return f"{down}{right}{stacked}"


def _enlarged(shares: Shares, rows: int, columns: int) -> Shares:
    """Enlarge a map by the largest integer factor that fits, up to `LARGEST`."""
    k = max(1, min(rows // shares.shape[0], columns // shares.shape[1], LARGEST))
    return shares.repeat(k, axis=0).repeat(k, axis=1)


def _half_blocks(pixels: Shares) -> Iterator[Text]:
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    if len(pixels) % 2:
        pixels = np.concatenate([pixels, np.full((1, pixels.shape[1]), -1)])
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        line = Text()
        for a, b in zip(upper, lower, strict=True):
            below = Color.from_rgb(*_colour(b)) if b >= 0 else None
            line.append("▀", Style(color=Color.from_rgb(*_colour(a)), bgcolor=below))
        yield line


def _colour(share: float) -> tuple[float, float, float]:
    if share <= 0:
        return COLOURS[0]
    place = min(share, 1) * (len(COLOURS) - 2) + 1  # so the smallest share differs from none
    i = min(int(place), len(COLOURS) - 2)
    r, g, b = (x + (y - x) * (place - i) for x, y in zip(COLOURS[i], COLOURS[i + 1], strict=True))
    return r, g, b


def _shaded(pixels: Shares) -> Iterator[Text]:
    from rich.text import Text

    # Each character twice, because characters are twice as high as wide.
    levels = np.where(pixels >= 1, 4, np.where(pixels > 0, 1 + np.minimum(pixels * 3, 2).astype(int), 0))
    for row in levels.tolist():
        yield Text("".join(2 * SHADES[level] for level in row))


def _legend(coloured: bool) -> Text:
    from rich.style import Style
    from rich.text import Text

    line = Text("none exist ")
    if coloured:
        for i in range(9):
            r, g, b = (int(c) for c in _colour(i / 8))
            line.append("█", Style(color=f"rgb({r},{g},{b})"))
    else:
        line.append("· ░▒▓ █")
    return line + Text(" all exist")


def _sizes(chunk_map: ChunkMap) -> Iterator[str]:
    from shardfs.jobs.maps import size_bins

    bins = size_bins(chunk_map, BARS)
    if not bins:
        return
    yield from ("", "sizes of chunks, as they are stored")
    highest, labels = max(b.chunks for b in bins), [f"from {human_bytes(b.start)}" for b in bins]
    for label, b in zip(labels, bins, strict=True):
        yield f"{label:>{max(map(len, labels))}}  {_bar(b.chunks / highest)} {b.chunks}"


def _bar(share: float, length: int = 32) -> str:
    """A bar in steps of an eighth of a character. A share above 0 gives at least one step."""
    eighths = max(round(share * 8 * length), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1 : eighths % 8]


def _dead(chunk_map: ChunkMap) -> Iterator[str]:
    dead, objects = int(chunk_map.dead.sum()), int(chunk_map.objects.sum())
    yield ""
    if not dead:
        yield f"no dead bytes in {human_bytes(objects)}"
        return
    shards = counted(int(np.count_nonzero(chunk_map.dead)), "shard")
    share = f"{dead / objects:.1%}" if objects else ""
    yield f"dead bytes: {human_bytes(dead)} of {human_bytes(objects)} ({share}), in {shards}; most in"
    worst = np.argsort(-chunk_map.dead, kind="stable")[: len(chunk_map.keys)].tolist()
    width = max(map(len, chunk_map.keys))
    for key, i in zip(chunk_map.keys, worst, strict=True):
        part = int(chunk_map.dead[i]) / max(int(chunk_map.objects[i]), 1)
        yield f"{key:<{width}}  {_bar(part)} {human_bytes(int(chunk_map.dead[i]))} ({part:.1%})"
