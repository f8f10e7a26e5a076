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
    """Write a PNG file with one row for each of the first `MOST` collections."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = maps[:MOST]
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
        figure = Figure(figsize=(10, 3.7 * len(shown)), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08, wspace=0.04)
        rows = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
        for row, found in zip(rows, shown, strict=True):
            _draw_one(row, found)
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None})


def _draw_one(figure: Any, found: ChunkMap) -> None:
    grid = f" of a grid of {' x '.join(map(str, found.grid))}" if found.grid else ""
    words = f"{found.total:,} chunks{grid}, in {len(found.shards):,} shards"
    title = f"{found.path or found.format}: {words}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", color=INK, x=0.01, ha="left")
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1.1])
    exist, size = left.subplots(1, 2)
    _draw_maps(left, exist, size, found)
    sizes, shards = right.subplots(2, 1)
    _draw_sizes(sizes, found)
    _draw_shards(shards, found)


def _draw_maps(figure: Figure, exist: Axes, size: Axes, found: ChunkMap) -> None:
    if found.rows is None or found.columns is None:
        for axes in (exist, size):
            axes.axis("off")
        words = "these chunks have ids,\nand no position in a grid"
        exist.text(0, 1, words, va="top", color=FAINT, transform=exist.transAxes)
        return
    shares = np.ma.masked_equal(found.shares(), 0)
    means = np.ma.masked_array(found.nbytes / np.maximum(found.chunks, 1), found.chunks == 0)
    look = {
        "cmap": "viridis",
        "interpolation": "nearest",
        "extent": (0, found.columns.chunks, found.rows.chunks, 0),
        "aspect": "equal" if 0.2 < found.rows.chunks / found.columns.chunks < 5 else "auto",
        "origin": "upper",
    }
    for axes, values, title in ((exist, shares, "which exist"), (size, means, "mean stored size")):
        axes.set_facecolor(MISSING)
        axes.spines[["top", "right"]].set_visible(True)
        limits = {"vmin": 0, "vmax": 1} if values is shares else {}
        image = axes.imshow(values, **look, **limits)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(f"chunk along axis {max(found.columns.axis, 0)}")
        axes.set_ylabel(f"chunk along axis {found.rows.axis}" if found.rows.axis >= 0 else "")
        axes.locator_params(integer=True, nbins=5)
        bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=30, pad=0.02)
        bar.outline.set_visible(False)
        if values is shares:
            others = len(found.grid) - sum(b.axis >= 0 for b in (found.rows, found.columns))
            bar.set_label("share of the chunks behind each other" if others else "share of the chunks")
            bar.ax.xaxis.set_major_formatter("{x:.0%}")
        else:
            ticks = [t for t in _byte_ticks(float(means.max()) if found.total else 0) if t >= means.min()]
            bar.set_ticks(ticks, labels=[_bytes(t) for t in ticks])


def _byte_ticks(most: float) -> list[int]:
    """A few round numbers of bytes from 0 to at most `most`, for the ticks of an axis."""
    step = 2 ** max(int(most).bit_length() - 2, 0)
    return list(range(0, int(most) + 1, step))


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            break
        n /= 1024
    return f"{n:.3g} {unit}"


def _draw_sizes(axes: Axes, found: ChunkMap) -> None:
    axes.set_title("sizes of chunks", fontsize=9, loc="left")
    bins = size_bins(found, SIZE_BINS)
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


def _draw_shards(axes: Axes, found: ChunkMap) -> None:
    n = len(found.shards)
    dead = int(found.dead.sum())
    share = f": {_bytes(dead)}, {dead / max(int(found.objects.sum()), 1):.1%}" if dead else ": none"
    axes.set_title(f"bytes per shard; dead{share}", fontsize=9, loc="left")
    if not n:
        axes.axis("off")
        return
    bars = min(n, SHARD_BARS)
    home = np.arange(n) * bars // n
    many = np.bincount(home, minlength=bars)
    live, dead_bytes, whole = (np.bincount(home, v, bars) / many for v in (found.stored, found.dead, found.objects))
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
