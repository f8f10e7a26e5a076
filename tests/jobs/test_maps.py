"""`info --map` and `--png`: what is counted, and that it is drawn, for grids of every rank and for ids."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.jobs.maps import Bins, ChunkMap, chunk_map, size_bins
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade, handmade_ids
from tests.conftest import _run
from tests.handmade import write_files, write_json, zarr_metadata, zarr_shard

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def mapped(path: Path, rows: int = 100, columns: int = 100) -> ChunkMap:
    (collection,) = Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20))).collections()
    return chunk_map(collection, rows, columns)


def shardfs(*args: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "shardfs", *args], 250)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A grid of 4 x 6 of which column j has chunks of 2**j bytes, and row i lacks the first i."""
    write_json(tmp_path / "zarr.json", zarr_metadata((4, 6), (4, 6), (1, 1)))
    chunks = [bytes(2**j) if j >= i else None for i in range(4) for j in range(6)]
    write_files(tmp_path, {"c/0/0": zarr_shard(chunks, gap=b"??")})
    return tmp_path


def test_chunks_sizes_and_dead_bytes(steps: Path) -> None:
    map_ = mapped(steps)
    exist = np.array([[j >= i for j in range(6)] for i in range(4)])
    assert (map_.shares() == exist).all()
    assert (map_.nbytes == exist * 2 ** np.arange(6)).all()
    assert (map_.total, map_.grid, map_.dead.tolist(), map_.keys) == (18, (4, 6), [36], ["c/0/0"])
    assert [(b.start, b.stop, b.chunks) for b in size_bins(map_, 8)] == [
        (1, 2, 1),
        (2, 4, 2),
        (4, 8, 3),
        (8, 16, 4),
        (16, 32, 4),
        (32, 64, 4),
    ]
    assert sum(b.chunks for b in size_bins(map_, 2)) == 18


@pytest.mark.parametrize(
    ("layout", "grid", "axes"), [("n5", (6, 4), (1, 0)), ("precomputed", (6, 4, 1), (1, 0)), ("zarr2", (4, 6), (0, 1))]
)
def test_a_layout_changes_the_numbers_of_the_axes_but_not_the_picture(
    layout: str, grid: tuple[int, ...], axes: tuple[int, int], steps: Path
) -> None:
    (collection,) = open_tree(str(steps), layout=layout).collections()
    map_ = chunk_map(collection, 100, 100)
    assert map_.grid == grid
    assert map_.rows is not None
    assert map_.columns is not None
    assert (map_.rows.axis, map_.columns.axis) == axes
    assert (map_.chunks == mapped(steps).chunks).all()


def test_large_grids_are_counted_into_bins(steps: Path) -> None:
    map_ = mapped(steps, 2, 3)
    assert map_.shares().tolist() == [[3 / 4, 1, 1], [0, 3 / 4, 1]]


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_bins_are_as_long_as_they_say(chunks: int, bin_limit: int) -> None:
    bins = Bins(0, chunks, min(chunks, bin_limit))
    lengths = bins.lengths()
    assert lengths.sum() == chunks
    assert lengths.min() >= 1
    edges = np.append(0, lengths.cumsum())
    assert (bins.bin_of(edges[:-1, None].astype(np.uint64)) == np.arange(bins.n)).all()
    assert (bins.bin_of(edges[1:, None].astype(np.uint64) - np.uint64(1)) == np.arange(bins.n)).all()


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 5])
def test_any_rank(rank: int, tmp_path: Path) -> None:
    shape = [3, 2, 4, 2, 2][:rank]
    write_json(tmp_path / "zarr.json", zarr_metadata(shape, shape, [1] * rank))
    n = handmade.chunk_count(shape, [1] * rank)
    write_files(tmp_path, {"/".join(["c", *["0"] * rank]): zarr_shard([b"x"] * n)})
    map_ = mapped(tmp_path)
    assert map_.total == map_.chunks.sum() == n
    assert (map_.shares() == 1).all()
    words = shardfs("info", "--map", str(tmp_path))
    assert words.returncode == 0, words.stderr
    assert "██" in words.stdout
    assert "no dead bytes" in words.stdout


def test_a_map_in_shades(steps: Path) -> None:
    lines = shardfs("info", "--map", str(steps)).stdout.splitlines()
    del lines[: next(n for n, line in enumerate(lines) if line.startswith("/: 18 chunks")) - 3]
    assert lines[3].strip() == "/: 18 chunks of 4 x 6 in 1 shard, 17 findings: see `shardfs verify`"
    assert lines[5].strip() == "█" * 72
    assert lines[11].strip() == "·" * 12 + "█" * 60
    assert "c/0/0  " in lines[-2]
    assert "dead bytes: 36 B of" in "".join(lines)


def test_a_map_in_colours(steps: Path) -> None:
    import io

    from rich.console import Console

    from shardfs.cli.info_map import print_map

    out = io.StringIO()
    print_map(Console(file=out, force_terminal=True, color_system="truecolor", width=80), mapped(steps))
    assert out.getvalue().count("▀") == 12 * 36
    assert "\x1b[38;2;253;231;37;48;2;253;231;37m▀" in out.getvalue()


def test_ids_and_empty_collections(tmp_path: Path) -> None:
    handmade_ids.CASES["meshes_sound"](tmp_path / "meshes")
    write_json(tmp_path / "empty" / "zarr.json", zarr_metadata((0, 8), (4, 4), (2, 2)))
    handmade.CASES["volume_ids_of_55_bits"](tmp_path / "volume")
    words = shardfs("info", "--map", str(tmp_path))
    assert words.returncode == 0, words.stderr
    assert "meshes: 5 chunks in 1 shard\n" in words.stdout
    assert "volume/s: 5 chunks of 1048576 x 262144 x 131072 in 3 shards" in words.stdout
    pytest.importorskip("matplotlib")
    drawn = shardfs("info", "--png", str(tmp_path / "x.png"), str(tmp_path))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture(steps: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    drawn = shardfs("info", "--png", str(tmp_path / "x.png"), str(steps))
    assert (drawn.returncode, drawn.stderr) == (0, "")
    pixels = image.imread(tmp_path / "x.png")
    assert pixels.shape[1] == 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100


def test_what_does_not_go_together(steps: Path) -> None:
    assert shardfs("info", "--json", "--map", str(steps)).returncode == 2
