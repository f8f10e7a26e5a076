"""`unpack`: sharded sources that other libraries wrote become the plain files that a mount shows."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import z5py
import zarr
from click.testing import CliRunner

import shardfs
from shardfs.cli import commands
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs import shared_work
from shardfs.jobs.pack import PackRun
from shardfs.jobs.pack_job import PackJob
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from shardfs.jobs.target import JobTarget
from shardfs.jobs.unpack import UnpackRun
from shardfs.jobs.unpack_job import UnpackJob
from shardfs.model.errors import BusyError, NotADatasetError, OptionError, UnfinishedJobError, UnsupportedError
from shardfs.storage import syscalls
from shardfs.storage.source_locks import SOURCE_LOCK
from shardfs.write.journal.places import Lock
from tests import data_bcolz, data_blosc2, data_n5, data_precomputed_ids, data_zarr_transformer
from tests.datasets import PRECOMPUTED, ZARR3, Dataset, ramp, same
from tests.jobs.dask_cluster import cluster, started
from tests.jobs.interrupting import interrupted
from tests.jobs.test_pack import files, parsed
from tests.write.faults import hooked
from tests.write.powerloss import Recorder, walk_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.jobs.python_api import Progress
    from shardfs.jobs.runs import PackReport
    from shardfs.model.dataset import Problem
    from tests.data_precomputed_ids import IdDataset

__all__ = ["cluster", "started"]  # fixtures


def shown(root: Path, layout: str = "native", **options: Any) -> dict[str, bytes]:
    """All files that a mount shows."""
    fs = ShardFileSystem(str(root), layout, skip_instance_cache=True, **options)
    return {name.lstrip("/"): fs.cat_file(name) for name in fs.find("")}


def unpacked(source: Path | str, target: Path, *, part: JobPart = WHOLE, workers: int = 1, **how: Any) -> UnpackRun:
    """Run a job to its end; assert that nothing was left out, except on request."""
    run = UnpackRun(UnpackJob(JobSource.from_url(source), JobSource.from_url(target), **how), part)
    assert [p for report in run.run(workers=workers) for p in report.problems if not p.skipped] == []
    return run


def problems(source: Path, target: Path, **how: Any) -> list[Problem]:
    run = UnpackRun(UnpackJob(JobSource.from_url(source), JobSource.from_url(target), **how))
    return [problem for report in run.run() for problem in report.problems]


# ---- what other libraries wrote


@pytest.mark.parametrize("name", sorted(ZARR3))
def test_zarr3_equals_what_its_writer_writes_unsharded(
    name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    sample, target = dataset("zarr3", name), tmp_path / "target"
    assert unpacked(sample.path, target).finished
    assert parsed(files(target)) == parsed(files(sample.twin))
    for member, data in sample.arrays.items() if "tensorstore" in sample.readers else ():
        assert same(np.asarray(ts.open(sample.spec(target, member)).result().read().result()), data)


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_volumes_equal_what_their_writer_writes_unsharded(
    name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    sample, target = dataset("precomputed", name), tmp_path / "target"
    assert unpacked(sample.path, target).finished
    assert parsed(files(target)) == parsed(files(sample.twin))


@pytest.mark.parametrize("name", sorted(data_n5.VARIANTS))
def test_n5_equals_what_its_writer_writes_unsharded(name: str, tmp_path: Path) -> None:
    sample, target = data_n5.VARIANTS[name].write(tmp_path, name), tmp_path / "target"
    unpacked(sample.path, target)
    assert parsed(files(target)) == parsed(files(sample.twin))
    if "z5" in sample.readers:
        values = z5py.File(str(target), mode="r", use_zarr_format=False)[data_n5.MEMBER][...].T
        assert same(np.asarray(values), sample.array)
    if "tensorstore" in sample.readers:
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{target / data_n5.MEMBER}/"}}
        assert same(np.asarray(ts.open(spec).result().read().result()), sample.array)


@pytest.mark.parametrize("name", sorted(data_precomputed_ids.DATASETS))
def test_meshes_skeletons_and_annotations_equal_what_their_writers_write(
    name: str, id_dataset: Callable[[str], IdDataset], tmp_path: Path
) -> None:
    sample = id_dataset(name)
    unpacked(sample.path, tmp_path / "target")
    assert files(tmp_path / "target") == shown(sample.path)
    chunks = {name: raw for name, raw in files(sample.twin).items() if Path(name).name != "info"}
    assert chunks.items() <= files(tmp_path / "target").items()


@pytest.mark.interop
def test_the_draft_of_2022_is_unpacked_as_a_mount_shows_it(tmp_path: Path) -> None:
    for sample in data_zarr_transformer.write_variants(tmp_path).values():
        for layout in ("native", "zarr2"):
            target = tmp_path / layout / sample.name
            refused = [p for p in problems(sample.path, target, layout=layout, skip_unsupported=True) if not p.skipped]
            litter = sample.name == "litter" and layout == "zarr2"
            assert [p.path for p in refused] == (["data/root/g/c1/0"] if litter else [])  # it has the name of a chunk
            assert files(target) == shown(sample.path, layout, unsupported="skip"), sample.name


@pytest.mark.parametrize("name", sorted(data_blosc2.WRITERS))
def test_blosc2_is_unpacked_as_a_mount_shows_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data_blosc2.WRITERS[name](tmp_path / "source" / name, True)
    unpacked(tmp_path / "source", tmp_path / "target")
    assert files(tmp_path / "target") == shown(tmp_path / "source")
    unpacked(tmp_path / "source" / name, tmp_path / "alone")  # the source is the file itself
    assert files(tmp_path / "alone") == shown(tmp_path / "source" / name)


@pytest.fixture
def superchunks(tmp_path: Path) -> Path:
    """An array of bcolz, whose last chunk is not full."""
    data_bcolz.write_array(tmp_path / "superchunks", np.arange(1, 47, dtype="<i4").reshape(23, 2), 4, 3)
    return tmp_path / "superchunks"


# ---- layouts


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A group of Zarr v3 with two arrays in 8 shards, absent chunks and absent shards, and other files."""
    root = tmp_path / "sharded"
    group = zarr.create_group(root)
    for name, dtype in (("a", "u2"), ("b", "u4")):
        array = group.create_array(name, shape=(100, 100), chunks=(10, 10), shards=(50, 30), dtype=dtype)
        array[:] = VALUES.astype(dtype)
    zarr.consolidate_metadata(root)
    (root / "notes").mkdir()
    (root / "notes" / "x").write_bytes(b"x" * 300_000)
    (root / "a" / "c" / "1" / "by hand").write_bytes(b"y")
    return root


VALUES = np.arange(1, 10001).reshape(100, 100)
VALUES[50:, :70] = 0
CHUNKS = 2 * (100 - 5 * 7)


@pytest.mark.parametrize("layout", ["native", "zarr2", "zarr3", "n5", "precomputed", "bcolz"])
def test_every_layout_is_unpacked_as_a_mount_shows_it(
    layout: str, sharded: Path, superchunks: Path, tmp_path: Path
) -> None:
    for source in (superchunks,) if layout == "bcolz" else (sharded, superchunks):
        target = tmp_path / "target" / source.name
        unpacked(source, target, layout=layout)
        assert files(target) == shown(source, layout)


def test_chunks_that_a_layout_fills_are_written(tmp_path: Path) -> None:
    """xarray would take missing chunks for missing values, so the layout shows them."""
    array = zarr.create_array(
        tmp_path / "source", shape=(90, 90), chunks=(1, 1), shards=(9, 9), dtype="i4", fill_value=7,
        dimension_names=("y", "x"), attributes={"_FillValue": -1},
    )  # fmt: skip
    array[:9, :9] = 3
    run = unpacked(tmp_path / "source", tmp_path / "target", layout="zarr2")
    tree_files = files(tmp_path / "target")
    assert tree_files == shown(tmp_path / "source", "zarr2")
    assert run.objects == len([n for n in tree_files if not n.startswith(".z")]) == 8100


def test_options_of_a_mount_hold(sharded: Path, tmp_path: Path) -> None:
    zarr.create_array(sharded / "b" / "text", shape=(4,), chunks=(2,), shards=(4,), dtype="datetime64[s]")
    shutil.move(sharded / "b" / "text", sharded / "times")
    with pytest.raises(UnsupportedError, match="times"):
        unpacked(sharded, tmp_path / "target", layout="n5")
    assert not (tmp_path / "target").exists()
    places = JobSource.from_url(sharded), JobSource.from_url(tmp_path / "target")
    run = UnpackRun(UnpackJob(*places, "n5", "raw", skip_unsupported=True))
    assert [p.path for report in run.run() for p in report.problems if p.skipped] == ["times"]
    assert files(tmp_path / "target") == shown(sharded, "n5", chunk_codec="raw", unsupported="skip")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layout", "codec"), [("bcolz", "raw"), ("precomputed", "gzip"), ("zarr3", "zlib"), ("native", "raw")]
)
def test_codecs_that_a_layout_lacks(layout: str, codec: str, sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"chunk_codec={codec}: the layout {layout} shows chunks only"):
        shardfs.unpack(sharded, tmp_path / "target", layout=layout, chunk_codec=codec)
    assert not (tmp_path / "target").exists()


# ---- pack, then unpack


def test_every_format_packed_and_unpacked_is_the_original(
    dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    """Volumes, N5, meshes, skeletons, annotations."""
    n5 = next(name for name, variant in sorted(data_n5.VARIANTS.items()) if not variant.seed)
    twins = [dataset("precomputed", name).twin for name in sorted(PRECOMPUTED)[:4]]
    twins += [data_n5.VARIANTS[n5].write(tmp_path / "n5", n5).twin]
    for name in ("neuroglancer_lines", "tensorstore_identi_raw_raw", "nested"):
        twins.append(data_precomputed_ids.DATASETS[name](tmp_path / name).twin)
    for number, twin in enumerate(twins):
        packed, again = tmp_path / f"packed {number}", tmp_path / f"again {number}"
        shardfs.pack(twin, packed)
        assert parsed(files(packed)) != parsed(files(twin))
        shardfs.unpack(packed, again)
        assert parsed(files(again)) == parsed(files(twin)), twin


def test_zarr2_packed_and_unpacked_is_the_original(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "a", zarr_format=2, attributes={"who": "me"})
    array = group.create_array("x/y", shape=(100, 100), chunks=(10, 10), dtype="u2", order="F", attributes={"b": 1})
    array[:50] = VALUES[:50]
    (tmp_path / "a" / "x" / "README").write_text("by hand")
    result = shardfs.pack(tmp_path / "a", tmp_path / "b", chunks_per_shard=(3, 2))
    assert (result.files, result.finished) == (51, True)
    assert shardfs.unpack(tmp_path / "b", tmp_path / "c", layout="zarr2").objects == 51
    before, after = files(tmp_path / "a"), files(tmp_path / "c")
    documents = {name for name in after if Path(name).name.startswith(".z")}
    assert {n: after[n] for n in after.keys() - documents} == {
        n: raw for n, raw in before.items() if not Path(n).name.startswith(".z")
    }
    for name in (n for n in before if Path(n).name in (".zattrs", ".zgroup")):
        assert json.loads(after[name]) == json.loads(before[name])
    values = zarr.open_group(tmp_path / "c", mode="r", zarr_format=2)["x/y"]
    assert isinstance(values, zarr.Array)
    assert (values.metadata.to_dict(), values.attrs.asdict()) == (array.metadata.to_dict(), {"b": 1})
    assert same(np.asarray(values[:]), np.asarray(array[:]))


# ---- sharing the work out


def test_an_interrupted_job_continues(sharded: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    job = UnpackJob(JobSource.from_url(sharded), JobSource.from_url(target))
    interrupted(UnpackRun(job).run(), 4)
    assert not list(target.rglob("zarr.json"))
    with pytest.raises(FileExistsError, match="other options"):
        unpacked(sharded, target, layout="zarr2")
    before = {name: os.stat(target / name).st_ino for name in files(target)}
    (target / "b").mkdir(exist_ok=True)
    reports: list[PackReport] = list(
        UnpackRun(UnpackJob(JobSource.from_url(sharded), JobSource.from_url(target))).run()
    )
    assert sum(report.shards for report in reports) == 12
    assert sum(report.shards for report in reports if report.nbytes) == 12 - 3
    assert files(target) == shown(sharded)
    assert {name: os.stat(target / name).st_ino for name in before if "/c/" in name}.items() <= before.items()


def test_a_chunk_that_an_interrupted_task_has_begun_is_written_again(sharded: Path, tmp_path: Path) -> None:
    target, longer = tmp_path / "target", b"z" * 5000
    run = UnpackRun(UnpackJob(JobSource.from_url(sharded), JobSource.from_url(target)))
    (target / "a" / "c" / "0").mkdir(parents=True)
    (target / "a" / "c" / "0" / "0").write_bytes(longer)
    (target / "a" / "c" / "0" / "1").write_bytes(b"")
    list(run.run())
    assert files(target) == shown(sharded)


def test_a_job_continues_after_a_power_loss(tmp_path: Path) -> None:
    """Whatever the disk may have left at any time: an array that has its document is complete."""
    data = np.arange(1, 145, dtype="u2").reshape(12, 12)
    array = zarr.create_array(tmp_path / "source" / "a", shape=(12, 12), chunks=(3, 3), shards=(6, 6), dtype="u2")
    array[:] = data
    (tmp_path / "source" / "README").write_text("beside")
    wanted, target, lost = shown(tmp_path / "source"), tmp_path / "target", tmp_path / "lost"
    target.mkdir()
    recorder = Recorder([target])
    with hooked(recorder):
        unpacked(tmp_path / "source", target)
    states = [state for _, state in walk_states(recorder, more=1, seed=0)]
    for state in random.Random(0).sample(states, 60):
        state.write({str(target): lost})
        if (lost / "a" / "zarr.json").exists():
            assert same(np.asarray(zarr.open_array(lost / "a", mode="r")[:]), data), state.what
        with suppress(FileExistsError):  # the job has ended
            unpacked(tmp_path / "source", lost)
        assert files(lost) == wanted, state.what
        shutil.rmtree(lost)


# ---- the same work done twice


@pytest.mark.parametrize(("workers", "first_tasks"), [(1, 0), (1, 5), (1, 99), (2, 0)])
@pytest.mark.parametrize("kind", [PackRun, UnpackRun])
def test_another_run_completes_the_job_meanwhile(
    kind: Any, workers: int, first_tasks: int, sharded: Path, tmp_path: Path
) -> None:
    """Workers, which may open the target only then, and all tasks that are left do the same once more."""
    if kind is PackRun:
        shardfs.unpack(sharded, tmp_path / "plain")
    source, job = (tmp_path / "plain", PackJob) if kind is PackRun else (sharded, UnpackJob)
    target = tmp_path / "target"
    runs = [kind(job(JobSource.from_url(source), JobSource.from_url(target))) for _ in range(2)]
    slower = runs[1].run(workers=workers)
    reports = list(islice(slower, first_tasks))
    list(runs[0].run())
    wanted = files(target)
    reports += slower
    assert [p for report in reports for p in report.problems] == []
    assert [(run.finished, run.files, run.objects) for run in runs] == [(True, runs[0].files, runs[0].objects)] * 2
    assert files(target) == wanted
    assert parsed(shown(target) if kind is PackRun else wanted) == parsed(shown(sharded))
    assert kind(job(JobSource.from_url(source), JobSource.from_url(target))).repeated


@pytest.mark.parametrize("part", [WHOLE, JobPart(1, 2)])
def test_another_run_ends_the_job_while_a_task_notes_that_it_is_finished(
    part: JobPart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr.create_array(tmp_path / "source", shape=(40,), chunks=(5,), shards=(10,), dtype="u1")[:] = 1
    note, calls = JobTarget.note_task, 0
    for at in count():
        job = UnpackJob(JobSource.from_url(tmp_path / "source"), JobSource.from_url(tmp_path / "target"))
        numbers, faster = count(), UnpackRun(job)

        def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...], *, at: int = at) -> Any:
            if next(numbers) == at:  # noqa: B023 - called within this iteration
                monkeypatch.undo()
                list(faster.run())  # noqa: B023
            return function(*args)

        def noted(target: JobTarget, *args: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(syscalls, "hook", hook)
                note(target, *args)

        monkeypatch.setattr(JobTarget, "note_task", noted)
        unpacked(tmp_path / "source", tmp_path / "target", part=part)
        monkeypatch.undo()
        if not faster.finished:
            break
        assert files(tmp_path / "target") == shown(tmp_path / "source")
        assert not list((tmp_path / "target").glob(".shardfs*"))
        shutil.rmtree(tmp_path / "target")
        calls += 1
    assert calls > 20


# ---- bad input


def spoil(shard: Path) -> bytes:
    """Damage the index at the end of a shard; return the shard."""
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-20] + bytes(20))
    return raw


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_shard_stops_only_itself(workers: int, sharded: Path, tmp_path: Path) -> None:
    wanted, target = shown(sharded), tmp_path / "target"
    raw = spoil(sharded / "a" / "c" / "0" / "1")
    run = UnpackRun(UnpackJob(JobSource.from_url(sharded), JobSource.from_url(target)))
    problem_list = [problem for report in run.run(workers=workers) for problem in report.problems]
    assert {(p.path.rpartition("/")[0] or p.path)[:1] for p in problem_list} == {"a"}
    assert all(p.damaged for p in problem_list)
    assert not run.finished
    broken = {f"a/c/{i}/{j}" for i in range(5) for j in range(3, 6)}
    documents = {name for name in wanted if name.endswith("zarr.json")}
    assert {n: r for n, r in files(target).items() if not n.startswith(".shardfs")} == {
        n: raw for n, raw in wanted.items() if n not in broken | documents
    }
    (sharded / "a" / "c" / "0" / "1").write_bytes(raw)
    unpacked(sharded, target)
    assert files(target) == wanted


def test_a_broken_chunk_is_named_and_the_others_of_its_shard_are_written(sharded: Path, tmp_path: Path) -> None:
    shard = sharded / "b" / "c" / "0" / "0"
    raw = shard.read_bytes()
    index = np.frombuffer(raw[-4 - 16 * 15 : -4], "<u8").copy()
    where = slice(int(index[2]) + 4, int(index[2]) + 12)
    spoilt = bytearray(raw)
    spoilt[where] = bytes(8)
    shard.write_bytes(spoilt)
    problem_list = problems(sharded, tmp_path / "target", layout="n5")
    assert [p.path for p in problem_list] == ["b/1/0"]
    assert problems(sharded, tmp_path / "copied") == []  # natively, chunks are copied as they are


def test_a_source_without_shards_is_refused(sharded: Path, tmp_path: Path) -> None:
    shardfs.unpack(sharded, tmp_path / "plain")
    with pytest.raises(NotADatasetError, match="no sharded dataset found"):
        shardfs.unpack(tmp_path / "plain", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_writable_mount_of_the_source_is_refused(sharded: Path, tmp_path: Path) -> None:
    lock = Lock.take(str(sharded / SOURCE_LOCK), "/mnt", str(sharded), fleeting=True, mode=0o644)
    try:
        with pytest.raises(BusyError, match="already mounted rw"):
            shardfs.unpack(sharded, tmp_path / "target")
    finally:
        lock.free()
    assert not (tmp_path / "target").exists()


def test_files_that_cannot_be_unpacked_are_named(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"y")
    (sharded / "around").symlink_to(".")
    (sharded / "notes" / "link").symlink_to(outside)
    os.mkfifo(sharded / "pipe")
    (sharded / "b" / "c" / "1" / "0").mkdir()
    with pytest.raises(UnfinishedJobError, match="4 problems") as failed:
        shardfs.unpack(sharded, tmp_path / "target")
    assert {p.path for p in failed.value.problems} == {"around", "notes/link", "pipe", "b/c/1/0"}
    assert not list((tmp_path / "target").rglob("zarr.json"))
    for name in ("around", "notes/link", "pipe"):
        (sharded / name).unlink()
    (sharded / "b" / "c" / "1" / "0").rmdir()
    assert shardfs.unpack(sharded, tmp_path / "target").finished
    assert files(tmp_path / "target") == shown(sharded)


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "fsync_directory"])
@pytest.mark.parametrize("verb", [shardfs.pack, shardfs.unpack])
def test_a_full_disk_ends_the_job_at_once(
    call: str, verb: Any, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verb is shardfs.pack:
        shardfs.unpack(sharded, tmp_path / "plain")
    source, calls = tmp_path / "plain" if verb is shardfs.pack else sharded, count()

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == call and next(calls) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args)

    monkeypatch.setattr(syscalls, "hook", hook)
    with pytest.raises(OSError, match="free some space and repeat it"):
        verb(source, tmp_path / "target")
    assert next(calls) < 5 + 20, "one failure for each file that is written at the same time"
    monkeypatch.setattr(syscalls, "hook", None)
    assert verb(source, tmp_path / "target").finished
    target_files, source_files = (shown, files) if verb is shardfs.pack else (files, shown)
    assert parsed(target_files(tmp_path / "target")) == parsed(source_files(source))


def test_a_signal_or_an_exception_of_the_callback_ends_the_job_which_continues(sharded: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.files > 5:
            raise KeyboardInterrupt

    for jobs in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            shardfs.unpack(sharded, tmp_path / "target", jobs=jobs, progress=stop)
    shardfs.unpack(sharded, tmp_path / "target")
    assert files(tmp_path / "target") == shown(sharded)


# ---- the command line, Python, remote stores


def test_the_command_line(sharded: Path, tmp_path: Path) -> None:
    command = ["unpack", str(sharded), str(tmp_path / "target"), "--layout", "zarr2", "--json"]
    completed = CliRunner().invoke(commands, command, standalone_mode=False)
    (end,) = map(json.loads, completed.stdout.splitlines())
    assert (end["files"], end["objects"], end["shards"], end["finished"]) == (13, CHUNKS + 1, 12, True)
    assert completed.return_value == 0
    raw = spoil(sharded / "a" / "c" / "0" / "1")
    command = ["unpack", str(sharded), str(tmp_path / "native")]
    completed = CliRunner().invoke(commands, command, standalone_mode=False)
    assert completed.return_value == 3
    assert "problems; solve them, and repeat the command" in completed.stderr
    (sharded / "a" / "c" / "0" / "1").write_bytes(raw)
    completed = CliRunner().invoke(commands, command, standalone_mode=False)
    assert completed.stdout.startswith(f"14 files become {CHUNKS + 2} (")


def test_progress_is_reported(sharded: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = shardfs.unpack(sharded, tmp_path / "target", progress=seen.append)
    assert (seen[-1].files, seen[-1].of_files) == (result.files, result.files) == (14, 14)
    assert (
        seen[-1].nbytes
        == result.nbytes
        == sum(len(raw) for name, raw in files(tmp_path / "target").items() if not name.endswith("zarr.json"))
    )
    assert [p.files for p in seen] == sorted(p.files for p in seen)
    seen.clear()
    packed = shardfs.pack(tmp_path / "target", tmp_path / "again", chunks_per_shard=(5, 3), progress=seen.append)
    assert (seen[-1].files, packed.objects) == (packed.files, 14)
    refused: list[dict[str, Any]] = [{}, {"dest": "x", "in_place": True}, {"dest": "x", "abort": True}]
    for how in refused:
        with pytest.raises(TypeError, match="in_place=True"):
            shardfs.pack(tmp_path / "target", **how)
    with pytest.raises(ValueError, match="part"):
        shardfs.unpack(sharded, tmp_path / "more", part=(3, 2))


def test_in_place(sharded: Path, tmp_path: Path) -> None:
    plain, before = shown(sharded), parsed(files(sharded))
    assert shardfs.unpack(sharded, tmp_path / "plain").finished
    assert shardfs.pack(tmp_path / "plain", chunks_per_shard=(5, 3), in_place=True, jobs=2).finished
    assert parsed(files(tmp_path / "plain")).keys() == before.keys()
    assert shown(tmp_path / "plain") == plain


def test_remote_stores(sharded: Path, tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(sharded), "/unpack/source", recursive=True)
    try:
        run = unpacked("memory://unpack/source", tmp_path / "local")
        assert files(tmp_path / "local") == shown(sharded)
        retry = run.job.opened().tree.retry
        assert retry is not None
        reads, nbytes = retry.counters.requests["read"], retry.counters.figures["bytes_fetched"]
        assert reads <= 2 * run.shards + 2, "an index and all chunks of a shard, and other files"
        assert nbytes <= 1.1 * sum(map(len, files(sharded).values()))
        shardfs.unpack(sharded, "memory://unpack/target", layout="n5")
        source_documents = {
            name.removeprefix("/unpack/target/"): fs.cat_file(name) for name in fs.find("/unpack/target")
        }
        assert source_documents == shown(sharded, "n5")
    finally:
        fs.rm("/unpack", recursive=True)


def test_large_chunks_are_copied_by_the_kernel(tmp_path: Path) -> None:
    data = ramp((1024, 1024), "uint8")
    array = zarr.create_array(tmp_path / "a", shape=data.shape, chunks=(512, 1024), shards=data.shape, dtype="u1",
                              compressors=None)  # fmt: skip
    array[:] = data
    result = shardfs.unpack(tmp_path / "a", tmp_path / "b")
    assert (result.objects, result.nbytes) == (2, data.nbytes)
    assert (tmp_path / "b/c/0/0").read_bytes() + (tmp_path / "b/c/1/0").read_bytes() == data.tobytes()


# ---- files with the names of chunks


@pytest.mark.parametrize("name", ["c/99", "c/99/0", "c/0/99", "c/3/3"])
def test_files_with_the_names_of_chunks_are_named(name: str, tmp_path: Path) -> None:
    """A mount does not show them: 3/3 is in the grid of chunks, but beyond that of shards."""
    source, target = tmp_path / "source", tmp_path / "target"
    zarr.create_array(source / "a", shape=(20, 20), chunks=(5, 5), shards=(10, 10), dtype="u1")[:] = 1
    (source / "a" / name).parent.mkdir(parents=True, exist_ok=True)
    (source / "a" / name).write_bytes(b"left from a larger array")
    reports = list(UnpackRun(UnpackJob(JobSource.from_url(source), JobSource.from_url(target))).run())
    (problem,) = [problem for report in reports for problem in report.problems]
    assert f"a/{name}".startswith(problem.path)
    assert (problem.damaged, "has the name of a chunk" in problem.why) == (False, True)
    assert sum(1 for path in target.rglob("c/*/*") if path.is_file()) == 16


def test_a_lost_superchunk_is_damage(tmp_path: Path) -> None:
    """Arrays of bcolz have no absent chunks."""
    source = tmp_path / "source"
    data_bcolz.write_array(source, np.arange(1000, dtype="<u4"), 64, 5)
    (source / "data" / "__2__.bin").unlink()
    (source / "data" / "__4.blp").write_bytes(b"of bcolz 1.x")
    reports = list(UnpackRun(UnpackJob(JobSource.from_url(source), JobSource.from_url(tmp_path / "target"))).run())
    problems = {problem.path: problem.damaged for report in reports for problem in report.problems}
    assert problems == {"data/__2__.bin": True, "data/__4.blp": False}
    damage = [f for report in shared_work.verify(JobSource.from_url(source)) for f in report.findings]
    assert [(f.shard, f.kind) for f in damage] == [("data/__2__.bin", "read")]
