"""The tree of a source during an in-place job: every state shows the files that it shows before and after."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs.shared_work import JobSource, verify
from shardfs.model.errors import BusyError, UnsupportedError
from shardfs.shards.half_packed import HalfPackedShards
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, PLAIN, STATE, Stage
from shardfs.storage.writers import open_writer
from shardfs.vfs.tree import open_tree
from tests import data_n5
from tests.datasets import ramp
from tests.vfs.half_packed import DOCUMENTS, Job, all_files, files, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Blob
    from shardfs.model.values import Coords
    from tests.datasets import Dataset


def write_zarr(path: Path, zarr_format: Any) -> Path:
    """Arrays with nested and flat names of chunks, a missing chunk, and another file."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    nested = {"name": "v2", "separator": "/"} if zarr_format == 2 else {"name": "default"}
    keys: Any = {"nested": nested, "flat": {"name": "v2", "separator": "."}}
    for name, encoding in keys.items():
        array = group.create_array(name, shape=(10, 9), chunks=(3, 2), dtype="<u2", chunk_key_encoding=encoding)
        array[:] = ramp((10, 9))
        array[3:6, 2:4] = 0
    (path / "nested" / "notes.txt").write_text("x")
    return path


@pytest.fixture(params=["zarr2", "zarr3", "n5", "precomputed", "gzip"])
def job(request: pytest.FixtureRequest, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> Job:
    if request.param in ("zarr2", "zarr3"):
        plain = write_zarr(tmp_path / "plain", int(request.param[-1]))
        return Job.of(plain, tmp_path, chunks_per_shard=(2, 2))
    if request.param == "n5":
        written = data_n5.VARIANTS["rank_3_cut"].write(tmp_path, "n5")
        return Job.of(written.twin, tmp_path / "job", chunks_per_shard=(4, 4, 4))
    if request.param == "gzip":  # the chunk files are not compressed
        given = dataset("precomputed", "index_raw_data_gzip")
        return Job(given.twin, given.path, tmp_path / "source")
    return Job.of(dataset("precomputed", "index_raw_data_raw").twin, tmp_path, chunks_per_shard=(2, 2, 1))


def chunks(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if Path(name).name not in DOCUMENTS}


@pytest.mark.parametrize("direction", ["packing", "unpacking"])
def test_every_state_shows_the_same_files(direction: str, job: Job) -> None:
    wanted, opened, is_over = shown(job.sharded), None, False
    for state in getattr(job, direction)():
        opened = opened or ShardFileSystem(str(job.root), skip_instance_cache=True)
        is_over = is_over or (direction == "unpacking" and state.endswith("is back"))
        if is_over:  # the documents of the sharded dataset disappear
            assert chunks(all_files(opened)) == chunks(wanted), state
        else:
            assert all_files(opened) == wanted, state
            assert shown(job.root) == wanted, state
    assert files(job.root) == files(job.sharded if direction == "packing" else job.plain)


def middle(job: Job, what: str = "half of the files") -> None:
    """Go on to the second state with this description."""
    next(state for state in islice((s for s in job.packing() if what in s), 1, None))


@pytest.fixture
def half(tmp_path: Path) -> Job:
    """Nested and flat arrays of Zarr v3, of which some shards are made, and one of these still has some files."""
    job = Job.of(write_zarr(tmp_path / "plain", 3), tmp_path, chunks_per_shard=(2, 2))
    middle(job)
    return job


@pytest.mark.parametrize("layout", ["zarr2", "n5", "precomputed"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_layouts_show_the_same_files(layout: str, zarr_format: int, tmp_path: Path) -> None:
    job = Job.of(write_zarr(tmp_path / "plain", zarr_format), tmp_path, chunks_per_shard=(2, 2))
    middle(job)
    assert shown(job.root, layout) == shown(job.sharded, layout)


def test_an_array_whose_plain_form_is_unknown_is_refused(half: Job) -> None:
    """Else, chunks that are in no shard yet would be missing."""
    (half.root / PLAIN / "flat/zarr.json").unlink()
    with pytest.raises(UnsupportedError, match="flat: cannot be shown until the job in place has ended"):
        open_tree(str(half.root))


def test_verify_checks_the_chunks_wherever_they_are(half: Job) -> None:
    def reports(root: Path) -> list[Any]:
        return [r.tally for r in verify(JobSource.of(str(root)), deep=True) if not r.findings]

    found = reports(half.root)
    assert sum(tally.chunks for tally in found) == sum(tally.chunks for tally in reports(half.sharded))
    chunk = next(path for path in half.root.joinpath("flat").iterdir() if path.is_file())
    chunk.write_bytes(b"x")
    findings = [f for r in verify(JobSource.of(str(half.root)), deep=True) for f in r.findings]
    assert [f.shard for f in findings] == [f"flat/{chunk.name}"]


def test_no_other_program_writes_to_the_source(half: Job) -> None:
    before = files(half.root)
    with pytest.raises(BusyError, match="end it with shardfs pack --in-place"):
        ShardFileSystem(str(half.root), rw=True, skip_instance_cache=True)
    with pytest.raises(BusyError, match="end it with shardfs pack --in-place"):
        open_writer(open_tree(str(half.root)).store)
    assert files(half.root) == before


def test_a_source_whose_job_has_only_begun_is_refused(half: Job) -> None:
    half.reach(PACK, Stage.BEGUN)
    with pytest.raises(BusyError, match="shardfs pack --in-place begins here"):
        open_tree(str(half.root))


def test_the_unfinished_target_of_pack_is_no_job_in_place(half: Job) -> None:
    (half.sharded / STATE).write_text('{"source": "elsewhere"}')
    assert type(open_tree(str(half.sharded)).store) is LocalStore


def test_no_file_of_the_job_stays_open(half: Job) -> None:
    fs = ShardFileSystem(str(half.root), skip_instance_cache=True)
    assert all_files(fs)
    opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    assert [path for path in opened if path.startswith(str(half.root)) and not path.endswith((".json", ".txt"))] == []


@pytest.mark.parametrize("moved", ["before", "between", "after"])
def test_a_chunk_that_the_job_moves_during_the_search_is_found(
    moved: str, half: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file disappears at one of the searches; by then it is in its shard."""
    fs = ShardFileSystem(str(half.root), skip_instance_cache=True)
    shard, chunks = list(half.shards().items())[-1]
    data = (half.root / chunks[0]).read_bytes()
    stored = HalfPackedShards._in_file

    def search(shards: HalfPackedShards, coords: Coords) -> Blob | None:
        if moved == "before" and (half.root / chunks[0]).exists():
            half.finish(shard, chunks)
        found = stored(shards, coords)
        if moved == "between" and (half.root / chunks[0]).exists():
            half.finish(shard, chunks)
            return None
        return found

    monkeypatch.setattr(HalfPackedShards, "_in_file", search)
    assert fs.cat_file(chunks[0]) == data
    if moved == "after":
        half.finish(shard, chunks)
        assert fs.cat_file(chunks[0]) == data


def test_the_opening_of_another_source_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.of(write_zarr(tmp_path / "plain", 3), tmp_path)
    looks = []

    def look(path: str) -> bool:
        looks.append(path)
        return False

    monkeypatch.setattr("shardfs.storage.in_place.os.path.lexists", look)
    fs = ShardFileSystem(str(job.sharded), skip_instance_cache=True)
    assert type(fs.tree.store) is LocalStore
    assert looks == [str(job.sharded / STATE)]
    all_files(fs)
    assert len(looks) == 1
