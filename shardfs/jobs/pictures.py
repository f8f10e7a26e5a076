"""`info --png`: pictures of existing chunks, chunk sizes and shard contents. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.jobs.maps import PER_OCTAVE, size_bins

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardfs.jobs.maps import ChunkMap

BINS = 512
"""Maximum number of rows and of columns of a map."""

MOST = 8
"""Maximum number of collections in one picture."""

SIZE_BINS, SHARD_BARS = 24, 160

INK, FAINT = "#24292f", "#8c959f"
LIVE, INDEX, DEAD = "#3b6fb6", "#c9d4e3", "#d1495b"
MISSING = "#ececf0"


def draw(maps: Sequence[ChunkMap], file: str) -> None:
    """Write a PNG file with one row for each of the first `MOST` collections, and replace any file of this name.

    Raise ImportError without the package matplotlib, and OSError if the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = maps[:MOST]
    look = {
        "font.size": 8.5,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(look):
        figure = Figure(figsize=(10, 3.7 * len(drawn)), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.04)
        rows = figure.subfigures(len(drawn), 1, squeeze=False)[:, 0]
        for row, counts in zip(rows, drawn, strict=True):
            _draw_one(row, counts)
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None})


def _draw_one(figure: Any, counts: ChunkMap) -> None:
    grid = f" of a grid of {' x '.join(map(str, counts.grid))}" if counts.grid else ""
    words = f"{counts.total:,} chunks{grid}, in {len(counts.shards):,} shards"
    title = f"{counts.path or counts.format}: {words}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", color=INK, x=0.01, ha="left")
    maps, bars = figure.subfigures(1, 2, width_ratios=[2, 1.1])
    exist, size = maps.subplots(1, 2)
    _draw_maps(maps, exist, size, counts)
    sizes, shards = bars.subplots(2, 1)
    _draw_sizes(sizes, counts)
    _draw_shards(shards, counts)


def _draw_maps(figure: Figure, exist: Axes, size: Axes, counts: ChunkMap) -> None:
    if counts.rows is None or counts.columns is None:
        for axes in (exist, size):
            axes.axis("off")
        words = "these chunks have ids,\nand no position in a grid"
        exist.text(0, 1, words, va="top", color=FAINT, transform=exist.transAxes)
        return
    shares = np.ma.masked_equal(counts.shares(), 0)
    means = np.ma.masked_array(counts.nbytes / np.maximum(counts.chunks, 1), counts.chunks == 0)
    look = {
        "cmap": "viridis",
        "interpolation": "nearest",
        "extent": (0, counts.columns.chunks, counts.rows.chunks, 0),
        "aspect": "equal" if 0.2 < counts.rows.chunks / counts.columns.chunks < 5 else "auto",
        "origin": "upper",
    }
    for axes, values, title in ((exist, shares, "which exist"), (size, means, "mean stored size")):
        axes.set_facecolor(MISSING)
        axes.spines[["top", "right"]].set_visible(True)
        limits = {"vmin": 0, "vmax": 1} if values is shares else {}
        image = axes.imshow(values, **look, **limits)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(f"chunk along axis {max(counts.columns.axis, 0)}")
        axes.set_ylabel(f"chunk along axis {counts.rows.axis}" if counts.rows.axis >= 0 else "")
        axes.locator_params(integer=True, nbins=5)
        bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=30, pad=0.02)
        bar.outline.set_visible(False)
        if values is shares:
            summed = len(counts.grid) - sum(b.axis >= 0 for b in (counts.rows, counts.columns))
            bar.set_label("share of the chunks behind each other" if summed else "share of the chunks")
            bar.ax.xaxis.set_major_formatter("{x:.0%}")
        else:
            ticks = [t for t in _byte_ticks(float(means.max()) if counts.total else 0) if t >= means.min()]
            bar.set_ticks(ticks, labels=[_bytes(t) for t in ticks])


def _byte_ticks(limit: float) -> list[int]:
    """A few round numbers of bytes from 0 to at most `limit`, for the ticks of an axis."""
    step = 2 ** max(int(limit).bit_length() - 2, 0)
    return list(range(0, int(limit) + 1, step))


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            break
        n /= 1024
    return f"{n:.3g} {unit}"


def _draw_sizes(axes: Axes, counts: ChunkMap) -> None:
    axes.set_title("sizes of chunks", fontsize=9, loc="left")
    bins = size_bins(counts, SIZE_BINS)
    if not bins:
        axes.axis("off")
        return
    at = np.arange(len(bins))
    axes.bar(at + 0.5, [b.chunks for b in bins], width=0.92, color=LIVE)
    step = max(1, -(-len(bins) // 5))
    ticks = [*range(0, len(bins) + 1, step)]
    edges = [b.start for b in bins] + [bins[-1].stop]
    axes.set_xticks(ticks, [_bytes(edges[i]) for i in ticks])
    axes.set_xlim(-0.1, max(len(bins), PER_OCTAVE) + 0.1)
    axes.set_ylabel("chunks")
    axes.locator_params(axis="y", integer=True, nbins=4)


def _draw_shards(axes: Axes, counts: ChunkMap) -> None:
    n = len(counts.shards)
    dead = int(counts.dead.sum())
    share = f": {_bytes(dead)}, {dead / max(int(counts.objects.sum()), 1):.1%}" if dead else ": none"
    axes.set_title(f"bytes per shard; dead{share}", fontsize=9, loc="left")
    if not n:
        axes.axis("off")
        return
    bars = min(n, SHARD_BARS)
    home = np.arange(n) * bars // n
    many = np.bincount(home, minlength=bars)
    live, dead_bytes, whole = (np.bincount(home, v, bars) / many for v in (counts.stored, counts.dead, counts.objects))
    at = np.arange(bars)
    axes.bar(at, live, width=0.86, color=LIVE, label="chunks")
    axes.bar(at, np.maximum(whole - live - dead_bytes, 0), width=0.86, bottom=live, color=INDEX, label="index")
    axes.bar(at, dead_bytes, width=0.86, bottom=whole - dead_bytes, color=DEAD, label="dead")
    axes.set_xlabel(f"{n:,} shards" if n == bars else f"{n:,} shards, several to a bar: means")
    axes.set_xticks([])
    ticks = _byte_ticks(float(whole.max()))
    axes.set_ylim(0, float(whole.max()) * 1.35 or 1)
    axes.set_yticks(ticks, [_bytes(t) for t in ticks])
    axes.legend(ncols=3, frameon=False, fontsize=7.5, loc="upper left", handlelength=1, borderaxespad=0)
