"""`verify --regions`: the rows of damaged and missing chunks, in elements, and expected chunks from a file."""

from __future__ import annotations

import csv
import io
import json
import sys
import tracemalloc
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs import regions, shared_work
from shardfs.jobs.regions import Box, ChunkRegions, DamagedRegions, ExpectedError, Region
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from tests import data_bcolz, data_n5, handmade, handmade_ids
from tests.conftest import _run
from tests.handmade import Entry, uint64_shard, volume_info, write_files, write_json, zarr_metadata, zarr_shard

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable
    from pathlib import Path

CASES = {**handmade.CASES, **handmade_ids.CASES, **{f"n5_{name}": case for name, case in data_n5.DAMAGED.items()}}


def collections(path: Path) -> dict[str, ChunkRegions]:
    return {tree.path: ChunkRegions(tree) for tree in JobSource.from_url(str(path)).tree().collections()}


def damaged(path: Path, *, deep: bool = False, workers: int = 1) -> list[Region]:
    damaged_regions = DamagedRegions(collections(path))
    out: list[Region] = []
    for report in shared_work.verify(JobSource.from_url(str(path)), deep=deep, regions=True, workers=workers):
        for finding in report.findings:
            out += damaged_regions.rows(finding)
    return [*out, *damaged_regions.rest()]


def missing(path: Path, part: JobPart = WHOLE) -> list[Region]:
    return list(regions.missing(((c, c.whole) for c in collections(path).values() if not c.tree.by_id), part))


def boxes(rows: Iterable[Region]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(row.chunk, row.start, row.stop) for row in rows]


def elements(rows: Iterable[Region]) -> set[tuple[int, ...]]:
    """All elements of these rows. Fails if two rows have the same element."""
    out: set[tuple[int, ...]] = set()
    for row in rows:
        box = Box(row.start, row.stop)
        cells = {tuple(map(sum, zip(row.start, cell, strict=True))) for cell in np.ndindex(box.dims)}
        assert not out & cells
        out |= cells
    return out


def write_array(path: Path, shape: tuple[int, ...], shards: dict[str, bytes], per: int = 2, chunk: int = 2) -> None:
    rank = len(shape)
    write_json(path / "zarr.json", zarr_metadata(shape, (per * chunk,) * rank, (chunk,) * rank))
    write_files(path, shards)


# ---- damaged


def test_damaged_chunks_are_written_again_through_a_writable_mount(tmp_path: Path) -> None:
    """Those of a damaged index after their shard was removed."""
    values = np.arange(64, dtype="u2").reshape(8, 8)
    for name, shards in (("plain", None), ("sharded", (4, 4))):
        codecs: Any = {"compressors": zarr.codecs.Crc32cCodec(), "shards": shards}
        zarr.create_array(tmp_path / name, shape=(8, 8), chunks=(2, 2), dtype="u2", **codecs)[:] = values
    for shard, at in (("c/0/0", 0), ("c/1/1", -1)):
        raw = bytearray((tmp_path / "sharded" / shard).read_bytes())
        raw[at] ^= 1
        (tmp_path / "sharded" / shard).write_bytes(raw)
    rows = damaged(tmp_path / "sharded", deep=True)
    (tmp_path / "sharded" / "c/1/1").unlink()
    options = {"journal": str(tmp_path / "journals")}
    fs = ShardFileSystem(str(tmp_path / "sharded"), rw=True, write_options=options, skip_instance_cache=True)
    for start, stop in ((row.start, row.stop) for row in rows):
        for i, j in product(*(range(a // 2, b // 2) for a, b in zip(start, stop, strict=True))):
            fs.pipe_file(f"c/{i}/{j}", (tmp_path / "plain" / f"c/{i}/{j}").read_bytes())
    assert fs.close() == []
    assert len(rows) == 2
    assert damaged(tmp_path / "sharded", deep=True) == []
    assert np.array_equal(zarr.open_array(tmp_path / "sharded", mode="r")[:], values)


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_unreadable_chunk_is_in_a_damaged_region(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "x")
    rows, arrays = damaged(case.path, deep=True), collections(case.path)
    if any(c.tree.by_id for c in arrays.values()):
        assert all(row.start == row.stop == () for row in rows if arrays[row.collection].tree.by_id)
        return
    named = {row.chunk for row in rows}
    for file in case.bad:
        path = next(p for p in sorted(arrays, reverse=True) if file.startswith(p))
        box = arrays[path].named(file.removeprefix(path).strip("/").split("/"))
        assert box is not None
        one = arrays[path].box_row(box, "", "")
        inside = any(
            row.collection == path
            and all(a <= b for a, b in zip(row.start, one.start, strict=True))
            and all(a >= b for a, b in zip(row.stop, one.stop, strict=True))
            for row in rows
            if row.start
        )
        assert file in named or inside


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zarr_range_past_end", [("c/0/0", (0, 0), (2, 2)), ("c/1/1", (2, 2), (4, 4))]),
        ("zarr_wrong_checksum", [("", (0, 0), (4, 4))]),
        ("zarr_shard_is_fifo", [("", (0, 0), (4, 4))]),
        ("zarr_shard_is_directory", [("", (0, 0), (4, 4))]),
        ("zarr_deflated_shard_is_a_bomb", [("", (0, 0), (4, 4))]),
        ("n5_index_checksum_wrong", [("", (0, 0), (4, 4))]),
        ("n5_nested_index_wrong", [("", (2, 0), (4, 4))]),
        ("n5_range_past_end", [("0/0", (0, 0), (2, 2)), ("1/1", (2, 2), (4, 4))]),
        ("mesh_manifest_too_long", [("2.index", (), ())]),
        ("skeletons_zero_byte_shard", [("", (), ())]),
    ],
)
def test_regions_of_damage(name: str, expected: list[object], tmp_path: Path) -> None:
    rows = damaged(CASES[name](tmp_path / "x").path)
    assert boxes(rows) == expected
    assert {row.status for row in rows} == {"damaged"}


def test_regions_end_at_the_edge_of_the_array(tmp_path: Path) -> None:
    broken = zarr_shard([b"abcd"] * 4, checksum="wrong")
    cut = zarr_shard([b"abcd", b"ab", b"abcd", b"abcd"])
    write_array(tmp_path, (7, 5), {"c/1/1": broken, "c/1/0": broken, "c/0/1": cut, "c/0/0": zarr_shard([b"abcd"] * 4)})
    assert boxes(damaged(tmp_path)) == [("", (4, 0), (7, 4)), ("", (4, 4), (7, 5))]
    write_files(tmp_path, {"c/0/0": cut, "c/1/1": zarr_shard([b"ab", b"abcd", b"ab", b"abcd"])})
    assert boxes(damaged(tmp_path)) == [
        ("c/0/1", (0, 2), (2, 4)),
        ("", (4, 0), (7, 4)),
        ("c/2/2", (4, 4), (6, 5)),
        ("c/3/2", (6, 4), (7, 5)),
    ]


def test_shards_of_a_rectilinear_grid(tmp_path: Path) -> None:
    handmade.write_rectilinear(tmp_path, bytes(range(120)))
    shards = [p for p in tmp_path.glob("c/*/*") if p.is_file()]
    assert damaged(tmp_path) == []
    for shard in shards:
        shard.write_bytes(b"")
    rows = damaged(tmp_path)
    assert len(rows) == len(shards)
    assert elements(rows) == set(np.ndindex(10, 12))


def test_a_volume_has_its_own_order_of_axes_and_offset(tmp_path: Path) -> None:
    spec = handmade.sharding(minishard=0, shard=1, preshift=2)
    write_json(tmp_path / "info", volume_info((6, 4, 3), (2, 2, 1), spec, voxel_offset=[10, -4, 100]))
    write_files(tmp_path, {"s/0.shard": uint64_shard([[Entry(0, b"abcd"), Entry(1, b"a")]])})
    assert boxes(damaged(tmp_path)) == [("s/12-14_-4--2_100-101", (12, -4, 100), (14, -2, 101))]
    absent = missing(tmp_path)
    assert len(elements(absent)) == 6 * 4 * 3 - 8
    assert all(row.chunk.startswith("s/") for row in absent)


def test_n5_has_its_fastest_axis_first(tmp_path: Path) -> None:
    data_n5.DAMAGED["sound"](tmp_path / "x")  # 8 x 4 elements, shards of 4 x 4
    (tmp_path / "x/1/0").write_bytes(b"")
    assert boxes(damaged(tmp_path / "x")) == [("", (4, 0), (8, 4))]
    (tmp_path / "x/1/0").unlink()
    assert boxes(missing(tmp_path / "x")) == [("", (4, 0), (8, 4))]


def test_chunks_of_rows_have_all_axes_of_the_array(tmp_path: Path) -> None:
    data_bcolz.write_array(tmp_path / "x", np.arange(100 * 3, dtype="<u4").reshape(100, 3), 8, 5)
    (arrays,) = collections(tmp_path / "x").values()
    files = sorted(p for p in (tmp_path / "x/data").iterdir())
    assert damaged(tmp_path / "x", deep=True) == []
    assert missing(tmp_path / "x") == []
    files[1].write_bytes(b"")
    assert boxes(damaged(tmp_path / "x")) == [("", (40, 0), (80, 3))]
    assert arrays.touching((41, 0), (49, 1)) == Box((5, 0), (7, 1))


def test_numbered_chunks_have_the_axes_of_their_array(tmp_path: Path) -> None:
    blosc2 = pytest.importorskip("blosc2")
    path = str(tmp_path / "a.b2nd")
    blosc2.asarray(np.arange(7 * 9).reshape(7, 9), chunks=(3, 4), blocks=(3, 4), urlpath=path, contiguous=True)
    (arrays,) = collections(tmp_path).values()
    assert missing(tmp_path) == []
    assert arrays.chunk_row((5,), "", "")[3:5] == ((3, 8), (6, 9))
    assert arrays.shard_box(0, 0) == arrays.whole == Box((0, 0), (3, 3))
    assert elements(arrays.box_row(tile, "", "") for tile in arrays.tiles(arrays.whole)) == set(np.ndindex(7, 9))


def test_a_damaged_page_or_shard_of_scattered_chunks_has_a_row_for_each_chunk(tmp_path: Path) -> None:
    spec = handmade.sharding(minishard=1, shard=1)
    write_json(tmp_path / "info", volume_info((8, 4, 1), (2, 2, 1), spec))
    sound = [[Entry(0, b"abcd"), Entry(4, b"abcd")], [Entry(1, b"abcd"), Entry(5, b"abcd")]]
    write_files(tmp_path, {"s/0.shard": uint64_shard(sound, indices={1: b"damaged"}), "s/1.shard": b""})
    assert elements(damaged(tmp_path)) == {
        (x, y, z) for x, y, z in np.ndindex(8, 4, 1) if y // 2 == 1 or x // 2 in (1, 3)
    }


def test_all_damaged_chunks_of_a_shard_are_listed(tmp_path: Path) -> None:
    """Also those of findings that are only counted, and those of shards in a shard."""
    write_array(tmp_path / "a", (200,), {"c/0": zarr_shard([b"abc"] * 100)}, per=100)
    assert [row.start[0] for row in damaged(tmp_path / "a")] == list(range(0, 200, 2))
    duplicates = {i: (0, 2) for i in range(10)} | {10: (1, 2)}
    write_array(tmp_path / "c", (200,), {"c/0": zarr_shard([b"ab"] * 100, entries=duplicates)}, per=100)
    assert {row.start[0] for row in damaged(tmp_path / "c")} == set(range(0, 22, 2))
    overlapping = {i: (i // 2, 2) for i in range(100)}
    write_array(tmp_path / "b", (200,), {"c/0": zarr_shard([b"ab"] * 100, entries=overlapping)}, per=100)
    assert {row.start[0] for row in damaged(tmp_path / "b")} == set(range(0, 200, 2))


# ---- missing


def test_every_missing_element_has_one_row(tmp_path: Path) -> None:
    half = zarr_shard([b"abcd", None, None, b"abcd"])
    write_array(tmp_path, (7, 9), {"c/0/0": half, "c/1/1": zarr_shard([b"abcd"] * 4)})
    rows = missing(tmp_path)
    assert rows[:3] == [
        Region("", "c/0/1", "missing", (0, 2), (2, 4), ""),
        Region("", "c/1/0", "missing", (2, 0), (4, 2), ""),
        Region("", "", "missing", (0, 4), (4, 8), ""),
    ]
    present = {(y, x) for y, x in np.ndindex(7, 9) if x < 8 and y // 4 == x // 4 and (y > 3 or y // 2 == x // 2)}
    assert elements(rows) == set(np.ndindex(7, 9)) - present
    parts = [row for i in (1, 2, 3) for row in missing(tmp_path, JobPart(i, 3))]
    assert sorted(parts) == sorted(rows)


def test_damaged_chunks_are_not_missing(tmp_path: Path) -> None:
    for name in ("zarr_wrong_checksum", "zarr_range_past_end", "zarr_shard_is_fifo", "zarr_sound"):
        assert missing(handmade.CASES[name](tmp_path / name).path) == []


def test_a_large_grid_needs_little_memory(tmp_path: Path) -> None:
    shard = zarr_shard([b"abcdefgh" if i == 7 else None for i in range(1000)])
    write_array(tmp_path, (200, 200, 200), {"c/3/4/5": shard, "c/0/0/0": shard}, per=10)
    tracemalloc.start()
    try:
        chunks = rows = 0
        chunk_regions = collections(tmp_path)[""]
        for row in regions.missing([(chunk_regions, chunk_regions.whole)], WHOLE):
            chunks += int(np.prod(np.subtract(row.stop, row.start) // 2))
            rows += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (chunks, rows) == (10**6 - 2, 998 + 2 * 999)
    assert peak < 32 << 20  # a list of the grid would take more than 100 MiB


# ---- expected chunks


def test_expected_chunks_by_name_or_region(tmp_path: Path) -> None:
    write_array(tmp_path / "a", (8, 8), {"c/0/0": zarr_shard([b"abcd", None, None, b"abcd"])})
    arrays = collections(tmp_path)

    def look(*lines: str) -> list[str]:
        return [row.chunk for row in regions.missing(regions.read_expected(arrays, lines), WHOLE)]

    assert look("chunk\n", "a/c/0/0\n", "a/c/0/1\n", "a/c/3/3\n") == ["a/c/0/1", "a/c/3/3"]
    assert look("start,stop\n", "0 0,3 2\n") == ["a/c/1/0"]
    assert look('{"collection": "a", "start": [1, 3], "stop": [2, 4]}\n') == ["a/c/0/1"]
    assert look("chunk,start,stop\n", ",,\n") == []
    for wrong in (
        ["name\n"],
        ["chunk\n", "a/c/4/0\n"],
        ["start,stop\n", "0,4\n"],
        ["collection,start,stop\n", "b,0,1\n"],
    ):
        with pytest.raises(ExpectedError):
            look(*wrong)
    for wrong in (["start,stop\n", "0 x,4 4\n"], ['{"start": 3}\n'], ["{no json\n"], [""]):
        with pytest.raises(ExpectedError):
            look(*wrong)


def test_expected_meshes(tmp_path: Path) -> None:
    case = handmade_ids.CASES["mesh_manifest_too_long"](tmp_path / "x")
    arrays = collections(case.path)
    lines = ["chunk\n", "2.index\n", "3.index\n"]
    rows = list(regions.missing(regions.read_expected(arrays, lines), WHOLE))
    assert rows == [Region("", "3.index", "missing", (), (), "")]


def shardfs(*args: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "shardfs", "verify", *args], 250)


def test_the_command_reads_what_it_prints(tmp_path: Path) -> None:
    for name in ("zarr_range_past_end", "zarr_wrong_checksum", "volume_zero_byte_shard", "volume_gaps_and_junk"):
        handmade.CASES[name](tmp_path / "s" / name)
    source = str(tmp_path / "s")
    write_array(tmp_path / "s" / "a, b", (8, 8), {"c/0/0": zarr_shard([b"abcd", None, None, b"abcd"])})
    once = shardfs(source, "--regions", "--expect", "all")
    rows = list(csv.DictReader(io.StringIO(once.stdout)))
    assert once.returncode == 7
    assert {row["status"] for row in rows} == {"damaged", "missing"}
    assert rows[0].keys() == dict.fromkeys(Region._fields).keys()
    assert ("a, b/c/0/1", "0 2", "2 4") in [(row["chunk"], row["start"], row["stop"]) for row in rows]
    (tmp_path / "rows.csv").write_text(once.stdout)
    assert shardfs(source, "--regions", "--expect", str(tmp_path / "rows.csv"), "--jobs", "2").stdout == once.stdout
    as_json = shardfs(source, "--regions", "--expect", "all", "--json")
    assert len(as_json.stdout.splitlines()) == len(rows)
    assert json.loads(as_json.stdout.splitlines()[0])["start"] == list(map(int, rows[0]["start"].split()))
    (tmp_path / "rows.json").write_text(as_json.stdout)
    assert shardfs(source, "--regions", "--expect", str(tmp_path / "rows.json")).stdout == once.stdout
    parts = [
        shardfs(source, "--regions", "--expect", "all", "--shards", f"{i}/2").stdout.splitlines()[1:] for i in (1, 2)
    ]
    assert sorted(line for part in parts for line in part) == sorted(once.stdout.splitlines()[1:])


def test_exit_codes(tmp_path: Path) -> None:
    sound = str(handmade.CASES["zarr_sound"](tmp_path / "x").path)
    completed = shardfs(sound, "--regions", "--expect", "all")
    assert (completed.returncode, completed.stdout) == (0, "collection,chunk,status,start,stop,reason\n")
    assert shardfs(sound, "--expect", "all").returncode == 2
    assert shardfs(sound, "--regions", "--expect", str(tmp_path / "none")).returncode == 2
    (tmp_path / "wrong").write_text("chunk\nc/9/9\n")
    wrong = shardfs(sound, "--regions", "--expect", str(tmp_path / "wrong"))
    assert wrong.returncode == 2
    assert "row 1" in wrong.stderr
