"""`pack`: unsharded sources that other libraries wrote become sharded ones with the same chunk bytes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numcodecs
import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

import shardfs
from shardfs import cli
from shardfs.cli import commands
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs.pack import PackRun
from shardfs.jobs.pack_job import PackJob
from shardfs.jobs.shared_work import JobPart, JobSource
from shardfs.model.errors import BusyError, UnsupportedError
from shardfs.storage.pack_state import STATE
from shardfs.storage.source_locks import SOURCE_LOCK
from shardfs.write.journal.places import Lock
from tests import data_n5
from tests.conftest import read_with
from tests.datasets import PRECOMPUTED, ZARR3, Dataset, same
from tests.jobs.interrupting import interrupted
from tests.jobs.packing import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardfs.jobs.runs import PackReport
    from shardfs.model.dataset import Problem

DOCUMENTS = {"zarr.json", "info", "attributes.json"}


def files(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def parsed(tree_files: dict[str, bytes]) -> dict[str, Any]:
    """The files, with documents as JSON."""
    return {name: json.loads(raw) if Path(name).name in DOCUMENTS else raw for name, raw in tree_files.items()}


def shown(root: Path) -> dict[str, bytes]:
    """All files that a mount shows."""
    fs = ShardFileSystem(str(root), skip_instance_cache=True)
    return {name.lstrip("/"): fs.cat_file(name) for name in fs.find("")}


def problems(reports: Iterable[PackReport]) -> list[Problem]:
    return [problem for report in reports for problem in report.problems]


def indexed_payloads(shard: bytes, chunks: int) -> Counter[bytes]:
    """The chunks of a `sharding_indexed` shard whose index with CRC is at its end. Uses no code of shardfs."""
    index = struct.unpack(f"<{2 * chunks}Q", shard[-16 * chunks - 4 : -4])
    entries = zip(index[::2], index[1::2], strict=True)
    return Counter(shard[start : start + size] for start, size in entries if start != 2**64 - 1)


# ---- what other libraries wrote


@pytest.mark.parametrize("name", sorted(ZARR3))
def test_zarr3_keeps_every_file(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    sample = dataset("zarr3", name)
    target = tmp_path / "target"
    try:
        assert problems(pack(str(sample.twin), str(target))) == []
    except UnsupportedError:
        assert name == "rectilinear"
        return
    assert parsed(shown(target)) == parsed(files(sample.twin))
    for member, data in sample.arrays.items():
        read = np.asarray(ts.open(sample.spec(target, member)).result().read().result())
        assert same(read, data)


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_volumes_keep_every_file(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    sample = dataset("precomputed", name)
    target = tmp_path / "target"
    assert problems(pack(str(sample.twin), str(target))) == []
    assert parsed(shown(target)) == parsed(files(sample.twin))
    for member in sample.arrays if "tensorstore" in sample.readers else ():
        before, after = (ts.open(sample.spec(path, member)).result().read().result() for path in (sample.twin, target))
        assert same(np.asarray(before), np.asarray(after))


@pytest.mark.parametrize("name", sorted(n for n, v in data_n5.VARIANTS.items() if not v.seed))
def test_n5_keeps_every_file(name: str, tmp_path: Path) -> None:
    sample = data_n5.VARIANTS[name].write(tmp_path, name)
    target = tmp_path / "target"
    assert problems(pack(str(sample.twin), str(target), chunks_per_shard=(2, 1, 2, 1)[: sample.array.ndim])) == []
    assert parsed(shown(target)) == parsed(files(sample.twin))
    document = json.loads((target / data_n5.MEMBER / "attributes.json").read_bytes())
    chunks = document["codecs"][0]["configuration"]["chunk_shape"]
    per_shard = int(np.prod([b // c for b, c in zip(document["blockSize"], chunks[::-1], strict=True)]))
    blocks = data_n5.blocks_of(sample.twin / data_n5.MEMBER, sample.array.ndim)
    packed = data_n5.blocks_of(target / data_n5.MEMBER, sample.array.ndim)
    payloads = sum((indexed_payloads(shard, per_shard) for shard in packed.values()), Counter[bytes]())
    assert payloads == Counter(blocks.values())
    for cell, block in blocks.items():
        home = tuple(i // (b // c) for i, b, c in zip(cell, document["blockSize"], chunks[::-1], strict=True))
        assert block in indexed_payloads(packed[home], per_shard)


@pytest.mark.interop
def test_cloudvolume_reads_a_packed_volume(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    sample = dataset("precomputed", next(n for n in sorted(PRECOMPUTED) if "raw" in n))
    list(pack(str(sample.twin), str(tmp_path / "target")))
    assert same(read_with("cloudvolume", sample, tmp_path / "target"), sample.array)


# ---- Zarr v2

AXES: Any = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
LEVELS: Any = [
    {"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": [2.0**i] * 3}]} for i in range(2)
]


@pytest.fixture
def ome04(tmp_path: Path) -> Path:
    """An OME-Zarr 0.4 image with chunks in several codecs, some of which are missing, and other files."""
    root = tmp_path / "image.zarr"
    group = zarr.open_group(root, mode="w", zarr_format=2)
    group.attrs["multiscales"] = [{"version": "0.4", "name": "x", "axes": AXES, "datasets": LEVELS}]
    for level, how in (("0", {"order": "F"}), ("1", {"chunk_key_encoding": {"name": "v2", "separator": "/"}})):
        data = values()[: 40 // (int(level) + 1)]
        array = group.create_array(level, shape=data.shape, chunks=(8, 8, 8), dtype=data.dtype, **how)
        array[:] = data
    (root / "0" / "note.txt").write_text("by hand")
    (root / "README").write_text("an image")
    return root


def values() -> Any:
    data = np.random.default_rng(0).integers(0, 9, (40, 30, 20), np.uint16)
    data[16:32] = 0  # a slab of chunks that are not stored
    return data


def test_ome_zarr_04_becomes_05(ome04: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    reports = list(pack(str(ome04), str(target), chunks_per_shard=(2, 2, 2)))
    assert problems(reports) == []
    group = zarr.open_group(target, mode="r")
    ome: Any = group.attrs["ome"]
    assert (ome["version"], ome["multiscales"][0]["axes"]) == ("0.5", AXES)
    for level in ("0", "1"):
        array: Any = group[level]
        assert array.shards == (16, 16, 16)
        assert array.metadata.dimension_names == ("z", "y", "x")
        assert same(array[:], values()[: 40 // (int(level) + 1)])
    assert (target / "0" / "note.txt").read_text() == "by hand"
    assert (target / "README").read_text() == "an image"
    chunks = {p for p in files(ome04) if Path(p).name[0].isdecimal()}
    assert sum(report.files for report in reports) == len(chunks) + 2
    payloads = Counter(files(ome04)[name] for name in chunks)
    shards = [raw for name, raw in files(target).items() if "/c" in name]
    assert sum((indexed_payloads(shard, 8) for shard in shards), Counter[bytes]()) == payloads
    assert not any(name.startswith((".z", ".shardfs")) for name in os.listdir(target))


def zarr2(path: Path, data: Any, **how: Any) -> None:
    """An array of Zarr v2 in chunks of 10."""
    array = zarr.create_array(path, shape=data.shape, chunks=(10,) * data.ndim, dtype=data.dtype, zarr_format=2, **how)
    array[...] = data


CODECS: dict[str, Any] = {
    "raw": {"compressors": None},
    **{c.codec_id: {"compressors": c} for c in (numcodecs.Zlib(), numcodecs.LZ4(), numcodecs.BZ2(), numcodecs.Zstd())},
    "crc32": {"filters": [numcodecs.CRC32()]},
    "shuffle": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.GZip()},
}


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_of_zarr2_is_kept(name: str, tmp_path: Path) -> None:
    data = np.arange(50, dtype=">u4")
    zarr2(tmp_path / "a", data, **CODECS[name])
    assert problems(pack(str(tmp_path / "a"), str(tmp_path / "b"), chunks_per_shard=(8,))) == []
    assert np.array_equal(np.asarray(zarr.open_array(tmp_path / "b", mode="r")[:]), data)
    payloads = Counter(raw for file, raw in files(tmp_path / "a").items() if file.isdecimal())
    assert indexed_payloads((tmp_path / "b" / "c.0").read_bytes(), 8) == payloads


def test_arrays_that_zarr3_cannot_express_are_refused(tmp_path: Path) -> None:
    zarr2(tmp_path / "a" / "good", np.arange(50))
    zarr2(tmp_path / "a" / "times", np.arange(50).astype("M8[s]"))
    with pytest.raises(UnsupportedError, match=r"nothing was packed: times: .*; .* move them out of"):
        list(pack(str(tmp_path / "a"), str(tmp_path / "b")))
    assert not (tmp_path / "b").exists()


# ---- sharing the work out


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A consolidated group of Zarr v3 with two arrays, and 200 chunk files."""
    root = tmp_path / "plain"
    group = zarr.create_group(root)
    for name, dtype in (("a", "u2"), ("b", "u4")):
        array = group.create_array(name, shape=(100, 100), chunks=(10, 10), dtype=dtype)
        array[:] = np.arange(1, 10001, dtype=dtype).reshape(100, 100)
    zarr.consolidate_metadata(root)
    (root / "notes").mkdir()
    (root / "notes" / "x").write_bytes(b"x" * 300_000)
    return root


def test_every_way_to_share_the_work_makes_the_same_files(plain: Path, tmp_path: Path) -> None:
    how: Any = {"chunks_per_shard": (5, 3)}
    alone = tmp_path / "alone"
    reports = list(pack(str(plain), str(alone), **how))
    assert (sum(r.files for r in reports), sum(r.shards for r in reports)) == (201, 16)
    with ThreadPoolExecutor(3) as threads:
        assert problems(pack(str(plain), str(tmp_path / "threads"), executor=threads, workers=3, **how)) == []
    assert problems(pack(str(plain), str(tmp_path / "two"), workers=2, **how)) == []
    for number in (3, 1, 2):
        assert not (tmp_path / "parts" / "zarr.json").exists()
        assert problems(pack(str(plain), str(tmp_path / "parts"), part=JobPart(number, 3), **how)) == []
    for name in ("threads", "two", "parts"):
        assert files(tmp_path / name) == files(alone)
    group: Any = zarr.open_consolidated(alone)
    assert group["a"].shards == (50, 30)
    assert parsed(shown(alone)) == parsed(files(plain))


def test_an_interrupted_job_continues(plain: Path, tmp_path: Path) -> None:
    how: Any = {"chunks_per_shard": (5, 5)}
    list(pack(str(plain), str(tmp_path / "alone"), **how))
    interrupted(pack(str(plain), str(tmp_path / "target"), **how), 4)
    assert not (tmp_path / "target" / "zarr.json").exists()
    before = {name: os.stat(tmp_path / "target" / name).st_ino for name in files(tmp_path / "target")}
    with pytest.raises(FileExistsError, match="with other options"):
        list(pack(str(plain), str(tmp_path / "target")))
    reports = list(pack(str(plain), str(tmp_path / "target"), **how))
    assert sum(report.shards for report in reports if report.nbytes) == 8 - 3
    assert files(tmp_path / "target") == files(tmp_path / "alone")
    earlier_shards = {
        name: os.stat(tmp_path / "target" / name).st_ino for name in before if (tmp_path / "target" / name).exists()
    }
    assert earlier_shards.items() <= before.items()


@pytest.mark.slow
def test_a_worker_that_sees_another_target_fails(plain: Path, tmp_path: Path) -> None:
    """Its shards would be missing in the target of the main process, and be read as fill values."""
    run = PackRun(PackJob(JobSource.from_url(str(plain)), JobSource.from_url(str(tmp_path / "target"))))
    task, elsewhere = next(run._tasks()), tmp_path / "elsewhere"
    task_elsewhere = replace(task, job=replace(run.job, target=JobSource.from_url(str(elsewhere))))
    with pytest.raises(FileNotFoundError):
        task_elsewhere()
    elsewhere.mkdir()
    with pytest.raises(FileNotFoundError, match="must have the same path or URL for all workers"):
        task_elsewhere()
    assert list(elsewhere.iterdir()) == []
    assert problems(run.run()) == []


def test_a_killed_job_continues(plain: Path, tmp_path: Path) -> None:
    list(pack(str(plain), str(tmp_path / "alone"), chunks_per_shard=(2, 1)))
    target = tmp_path / "target"
    command = [sys.executable, "-m", "shardfs", "pack", str(plain), str(target), "--chunks-per-shard", "2,1"]
    for wanted in (1, 30, 60):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and len([p for p in target.rglob("c/*/*") if p.is_file()]) < wanted:
            pass
        process.kill()
        process.wait()
    subprocess.run(command, check=False, timeout=250, stdout=subprocess.DEVNULL)
    assert files(target) == files(tmp_path / "alone")


def test_arrays_that_are_not_named_are_copied(plain: Path, tmp_path: Path) -> None:
    assert problems(pack(str(plain), str(tmp_path / "target"), arrays=["b"])) == []
    group: Any = zarr.open_group(tmp_path / "target", mode="r")
    assert (group["a"].shards, group["b"].shards) == (None, (80, 80))
    assert same(group["a"][:], group["b"][:].astype("u2"))
    assert (tmp_path / "target/a/c/3/4").read_bytes() == (plain / "a/c/3/4").read_bytes()


# ---- bad input


@pytest.mark.parametrize("job", [shardfs.pack, shardfs.unpack])
@pytest.mark.parametrize(
    ("where", "why"),
    [("full", "is not empty"), ("plain/inside", "inside each other"), (".", "inside each other")],
)
def test_targets_that_are_refused(
    job: Callable[[Path, Path], object], where: str, why: str, plain: Path, tmp_path: Path
) -> None:
    zarr.create_array(plain / "sharded", shape=(4,), chunks=(1,), shards=(2,), dtype="u1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    before = files(tmp_path)
    with pytest.raises(OSError, match=why):
        job(plain, tmp_path / where)
    assert files(tmp_path) == before


@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_errors_of_the_target_name_the_target(
    verb: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = plain
    if verb == "unpack":
        source = tmp_path / "sharded"
        assert shardfs.pack(plain, source).finished
    foreign = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})
    errors = [foreign("no credentials"), PermissionError("Access Denied"), UnsupportedError("cannot be written")]
    for error in (*errors, ImportError("Install s3fs")):

        def fail(*_args: Any, error: Exception = error, **_kwargs: Any) -> None:
            raise error

        monkeypatch.setattr("shardfs.jobs.target.open_writer", fail)
        cli.run([verb, str(source), "memory://dest"])
        told = capsys.readouterr().err
        assert told.startswith("shardfs: memory://dest: "), told
        assert str(error) in told
        assert str(source) not in told


@pytest.mark.parametrize("name", ["x.zip", "x.ozx"])
def test_no_zip_file_is_written(name: str, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no zip file is written; give a directory"):
        shardfs.pack(plain, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_source_without_unsharded_arrays_is_refused(plain: Path, tmp_path: Path) -> None:
    list(pack(str(plain), str(tmp_path / "target")))
    for source, arrays in ((tmp_path / "target", []), (plain, ["a", "nothing"])):
        with pytest.raises(UnsupportedError, match="no unsharded array"):
            list(pack(str(source), str(tmp_path / "again"), arrays=arrays))
    assert not (tmp_path / "again").exists()


def test_an_array_that_two_formats_describe_is_refused(plain: Path, tmp_path: Path) -> None:
    (plain / "b" / ".zarray").write_text(json.dumps({"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|u1"}))
    with pytest.raises(UnsupportedError, match="nothing was packed: b: has documents of Zarr v2, too"):
        list(pack(str(plain), str(tmp_path / "target")))


def test_a_directory_below_with_an_unfinished_job_is_not_copied_in_part(plain: Path, tmp_path: Path) -> None:
    (plain / "other").mkdir()
    (plain / "other" / STATE).write_text("{}")
    with pytest.raises(BusyError, match="unfinished pack or unpack"):
        list(pack(str(plain), str(tmp_path / "target")))


def test_a_writable_mount_of_the_source_is_refused(plain: Path, tmp_path: Path) -> None:
    lock = Lock.take(str(plain / SOURCE_LOCK), "/mnt", str(plain), fleeting=True, mode=0o644)
    try:
        with pytest.raises(BusyError, match="already mounted rw"):
            list(pack(str(plain), str(tmp_path / "target")))
    finally:
        lock.free()
    assert not (tmp_path / "target").exists()


def test_files_that_cannot_be_packed_are_named(plain: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"y")
    (plain / "a" / "c" / "0" / "0").unlink()
    (plain / "a" / "c" / "0" / "0").symlink_to(outside)
    (plain / "a" / "c" / "7" / "70").write_bytes(b"beyond the edge")
    (plain / "b" / "c" / "0" / "0").write_bytes(b"short")
    (plain / "b" / "c" / "0" / "1").write_bytes(b"")
    (plain / "around").symlink_to(".")
    os.mkfifo(plain / "pipe")
    how: Any = {"chunks_per_shard": (5, 5)}
    problem_list = {p.path: p for p in problems(pack(str(plain), str(tmp_path / "target"), **how))}
    assert {path: p.damaged for path, p in problem_list.items()} == {
        "a": True, "a/c/7/70": False, "around": True, "b/c/0/0": False, "b/c/0/1": False, "pipe": True
    }  # fmt: skip
    assert "leads out of the source" in problem_list["a"].why
    assert problem_list["around"].why.startswith("is a symbolic link to a directory")
    assert problem_list["pipe"].why == "is neither a file nor a directory"
    assert not (tmp_path / "target" / "zarr.json").exists()
    for name in ("around", "pipe", "a/c/0/0"):
        (plain / name).unlink()
    assert [p.path for p in problems(pack(str(plain), str(tmp_path / "target"), **how))] == ["a/c/7/70"]
    (plain / "a" / "c" / "7" / "70").unlink()
    assert parsed(shown(tmp_path / "target")) == parsed(files(plain))
    assert shown(tmp_path / "target")["b/c/0/0"] == b"short"


def test_compressed_chunks_of_volumes_are_refused(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "x")
    chunk = max(p for p in source.rglob("*") if p.is_file() and p.name != "info")
    chunk.rename(f"{chunk}.gz")
    (problem,) = problems(pack(str(source), str(tmp_path / "target")))
    assert problem.damaged
    assert problem.path.endswith(".gz")
    assert not (tmp_path / "target" / "info").exists()


# ---- the command


def test_the_command_prints_problems_and_counts(plain: Path, tmp_path: Path) -> None:
    (plain / "around").symlink_to(".")
    command = ["pack", str(plain), str(tmp_path / "target"), "--shard-size", "10K"]
    completed = CliRunner().invoke(commands, [*command, "--json"], standalone_mode=False)
    lines = [json.loads(line) for line in completed.stdout.splitlines()]
    assert [(line["type"], line.get("path")) for line in lines] == [("problem", "around"), ("end", None)]
    assert (completed.return_value, lines[1]["finished"]) == (3, False)
    (plain / "around").unlink()
    completed = CliRunner().invoke(commands, command, standalone_mode=False)
    assert completed.stdout.startswith("201 files become ")
    assert completed.return_value == 0


class Unconditional(MemoryFileSystem):  # type: ignore[misc]
    """A store without conditional writes."""

    protocol = "unconditional"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("unconditional://")))


@pytest.mark.parametrize("protocol", ["memory", "unconditional"])
def test_a_remote_target(protocol: str, plain: Path, tmp_path: Path) -> None:
    fsspec.register_implementation("unconditional", Unconditional, clobber=True)
    fs = fsspec.filesystem(protocol)
    assert problems(pack(str(plain), f"{protocol}://packed", chunks_per_shard=(5, 5))) == []
    list(pack(str(plain), str(tmp_path / "local"), chunks_per_shard=(5, 5)))
    try:
        source_documents = {name.removeprefix("/packed/"): fs.cat_file(name) for name in fs.find("/packed")}
        assert source_documents == files(tmp_path / "local")
    finally:
        fs.rm("/packed", recursive=True)
