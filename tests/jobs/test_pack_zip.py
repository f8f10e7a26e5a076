"""`pack` to a zip file: native readers open it, and it has its name only when it is complete and on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

import shardfs
from shardfs.cli import commands
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs.opened_files import COPIED_SIZE
from shardfs.jobs.shared_work import JobPart
from shardfs.model.errors import BusyError, UnsupportedError
from shardfs.model.write_plan import SPAN
from shardfs.storage import syscalls
from shardfs.storage.writers.zip_file import ZipWriter
from tests.datasets import PRECOMPUTED
from tests.jobs.interrupting import calls_until_end, interrupted
from tests.jobs.packing import pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.datasets import Dataset

HOW: Any = {"chunks_per_shard": (2, 2)}
LARGE, SMALL = (512, 300), (40, 40)  # chunks of 300 KB are copied from open files, those of 3.2 KB from memory
DOCUMENTS = ["zarr.json", "a/zarr.json", "labels/zarr.json", "labels/b/zarr.json"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An OME-Zarr 0.5 image in chunk files, with labels and another file."""
    root = tmp_path / "plain"
    group = zarr.create_group(root, attributes={"ome": {"version": "0.5", "multiscales": []}})
    for name, chunks in (("a", LARGE), ("labels/b", SMALL)):
        shape = tuple(3 * c - 1 for c in chunks)
        array = group.create_array(name, shape=shape, chunks=chunks, dtype="<u2", compressors=None)
        array[:] = values(shape)
    (root / "notes").mkdir()
    (root / "notes" / "x").write_bytes(b"by hand")
    return root


def values(shape: tuple[int, ...]) -> Any:
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint32).reshape(shape).astype("<u2")


def problems(source: Path, target: Path, **how: Any) -> list[str]:
    return [f"{p.path}: {p.why}" for report in pack(str(source), str(target), **HOW, **how) for p in report.problems]


def beside(target: Path) -> list[str]:
    return sorted(os.listdir(target.parent))


# ---- readers


@pytest.mark.parametrize(("name", "workers"), [("x.ozx", 1), ("x.zip", 3)])
def test_native_readers_open_it(name: str, workers: int, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / name
    assert problems(plain, target, workers=workers) == []
    assert beside(target) == ["plain", name]
    stored = zarr.open_group(zarr.storage.ZipStore(target, mode="r"), mode="r")
    for path, chunks in (("a", LARGE), ("labels/b", SMALL)):
        expected = values(tuple(3 * c - 1 for c in chunks))
        array: Any = stored[path]
        assert array.shards == tuple(2 * c for c in chunks)
        assert np.array_equal(array[:], expected)
        spec = {"driver": "zarr3", "kvstore": f"file://{target}|zip:{path}/"}
        assert np.array_equal(ts.open(spec).result().read().result(), expected)
    for source in (f"zip://::{target}", str(target)):
        fs = ShardFileSystem(source, skip_instance_cache=True)
        for file in ("notes/x", "a/c/2/1", "labels/b/c/0/2"):
            assert fs.cat_file(file) == (plain / file).read_bytes()


def test_a_zip_file_is_unpacked(plain: Path, tmp_path: Path) -> None:
    assert problems(plain, tmp_path / "x.ozx") == []
    shardfs.unpack(tmp_path / "x.ozx", tmp_path / "again")
    for file in (p for p in plain.rglob("*") if p.is_file()):
        found = (tmp_path / "again" / file.relative_to(plain)).read_bytes()
        assert found == file.read_bytes() or json.loads(found) == json.loads(file.read_bytes())
    with pytest.raises(UnsupportedError, match="only pack writes zip files"):
        shardfs.unpack(tmp_path / "x.ozx", tmp_path / "again.zip")


def test_entries_are_the_files_of_a_packed_directory(plain: Path, tmp_path: Path) -> None:
    assert problems(plain, tmp_path / "x.ozx") == problems(plain, tmp_path / "directory") == []
    with ZipFile(tmp_path / "x.ozx") as found:
        names = [str(p.relative_to(tmp_path / "directory")) for p in (tmp_path / "directory").rglob("*") if p.is_file()]
        assert sorted(found.namelist()) == sorted(names)
        assert found.namelist()[: len(DOCUMENTS)] == DOCUMENTS
        for entry in found.infolist():
            assert (entry.compress_type, entry.external_attr >> 16) == (ZIP_STORED, 0o100644)
            assert found.read(entry) == (tmp_path / "directory" / entry.filename).read_bytes()  # checks the CRC, too
        assert found.infolist()[0].header_offset == 0
        directory: Any = {"centralDirectory": {"jsonFirst": True}}
        assert json.loads(found.comment) == {"ome": {"version": "0.5", "zipFile": directory}}
        raw, end = (tmp_path / "x.ozx").read_bytes(), 22 + len(found.comment)
    signature, _, at, disks = struct.unpack("<4sLQL", raw[-end - 20 : -end])
    assert (signature, raw[at : at + 4], disks) == (b"PK\6\7", b"PK\6\6", 1)
    assert struct.unpack("<4Q", raw[at + 24 : at + 56])[:2] == (len(names), len(names))


def test_many_entries_have_one_end_record_of_zip64(tmp_path: Path) -> None:
    writer = ZipWriter(str(tmp_path / "x.zip"))
    for i in range(65_600):
        writer.put(f"{i}", b"")
    writer.commit(b"", lambda name: (True, 0, name))
    writer.close()
    assert (tmp_path / "x.zip").read_bytes().count(b"PK\6\6") == 1
    with ZipFile(tmp_path / "x.zip") as found:
        assert len(found.namelist()) == 65_600


def test_a_dataset_without_ome_metadata_is_no_ozx(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\.ozx is for OME-Zarr 0\.5"):
        problems(plain / "labels", tmp_path / "x.ozx")
    assert problems(plain / "labels", tmp_path / "x.zip") == []
    with ZipFile(tmp_path / "x.zip") as found:
        assert (found.comment, found.namelist()[:2]) == (b"", ["zarr.json", "b/zarr.json"])


def test_large_chunks_are_copied_in_pieces(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain / "notes" / "large").write_bytes(b"x" * (2 * SPAN + 1))
    sizes = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        sizes.append(len(args[1]) if name == "pwrite" else 0)
        return function(*args)

    monkeypatch.setattr(syscalls, "hook", hook)
    assert problems(plain, tmp_path / "x.zip") == []
    assert max(sizes) == SPAN


# ---- bad input and bad days


def test_targets_that_are_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"another file")
    (tmp_path / "y.zip").mkdir()
    before = beside(tmp_path / "x.zip")
    for name in ("x.zip", "y.zip"):
        with pytest.raises(FileExistsError, match="exists already"):
            problems(plain, tmp_path / name)
    with pytest.raises(UnsupportedError, match="local path only"):
        list(pack(str(plain), "memory://x.zip"))
    with pytest.raises(UnsupportedError, match="a part of a job"):
        problems(plain, tmp_path / "z.zip", part=JobPart(1, 2))
    with ProcessPoolExecutor(1) as executor, pytest.raises(UnsupportedError, match="threads of one process"):
        problems(plain, tmp_path / "z.zip", executor=executor)
    with pytest.raises(OSError, match="inside each other"):
        problems(plain, plain / "z.zip")
    assert beside(tmp_path / "x.zip") == before
    assert (tmp_path / "x.zip").read_bytes() == b"another file"


def test_a_second_writer_is_refused(plain: Path, tmp_path: Path) -> None:
    first = ZipWriter(str(tmp_path / "x.zip"))
    with pytest.raises(BusyError, match="another process"):
        problems(plain, tmp_path / "x.zip")
    first.close()
    assert problems(plain, tmp_path / "x.zip") == []


def test_a_file_that_cannot_be_read_is_named_and_no_zip_appears(plain: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"y")
    (plain / "a" / "c" / "0" / "0").unlink()
    (plain / "a" / "c" / "0" / "0").symlink_to(outside)
    (plain / "notes" / os.fsdecode(b"\xff")).write_bytes(b"")
    found = problems(plain, tmp_path / "x.zip")
    assert len(found) == 2
    assert "leads out of the source" in found[0]
    assert "is not UTF-8" in found[1]
    assert beside(tmp_path / "x.zip") == ["outside", "plain"]


def test_problems_that_the_listing_shows_are_solved_first(
    dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "source")
    chunk = max(p for p in source.rglob("*") if p.is_file() and p.name != "info")
    chunk.rename(f"{chunk}.gz")
    (report,) = pack(str(source), str(tmp_path / "x.zip"))
    assert report.problems[0].why.startswith("is compressed, unlike other chunk files")
    assert beside(tmp_path / "x.zip") == ["source"]


def test_a_job_that_is_given_up_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    interrupted(pack(str(plain), str(tmp_path / "x.zip"), workers=2, **HOW), 3)
    assert beside(tmp_path / "x.zip") == ["plain"]


@pytest.mark.parametrize("fault", ["full", "shorter"])
def test_a_full_disk_or_a_shortened_source_leaves_nothing(
    fault: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "pwrite" and len(args[1]) > COPIED_SIZE:
            if fault == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for chunk in (plain / "a" / "c").rglob("*"):
                if chunk.is_file():
                    os.truncate(chunk, 1)
        return function(*args)

    monkeypatch.setattr(syscalls, "hook", hook)
    if fault == "full":
        with pytest.raises(OSError, match="free some space"):
            problems(plain, tmp_path / "x.zip")
    else:
        assert any(p.startswith("a: shard 0: ") for p in problems(plain, tmp_path / "x.zip"))
    assert beside(tmp_path / "x.zip") == ["plain"]


def test_the_name_comes_after_the_data(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        calls.append(name)
        return function(*args)

    monkeypatch.setattr(syscalls, "hook", hook)
    problems(plain, tmp_path / "x.zip")
    assert calls[-4:] == ["pwrite", "fsync", "rename_new", "fsync_directory"]


def test_a_killed_pack_starts_over(plain: Path, tmp_path: Path) -> None:
    command = ["pack", str(plain), str(tmp_path / "x.ozx"), "--chunks-per-shard", "2,2"]
    assert problems(plain, tmp_path / "expected.ozx") == []
    total = calls_until_end(10_000, *command)
    assert total is not None
    (tmp_path / "x.ozx").unlink()
    for call in (4, total // 2, total - 4, total - 2):
        assert calls_until_end(call, *command) is None
        assert beside(tmp_path / "x.ozx") == [".shardfs-x.ozx.tmp", "expected.ozx", "plain"]
    assert calls_until_end(total - 1, *command) is None  # before the sync of the directory
    assert beside(tmp_path / "x.ozx") == ["expected.ozx", "plain", "x.ozx"]
    assert calls_until_end(10_000, *command) is not None  # says that the job is finished
    (tmp_path / "x.ozx").unlink()
    assert calls_until_end(10_000, *command) == total
    with ZipFile(tmp_path / "x.ozx") as found, ZipFile(tmp_path / "expected.ozx") as expected:
        assert {n: found.read(n) for n in found.namelist()} == {n: expected.read(n) for n in expected.namelist()}


def test_the_command(plain: Path, tmp_path: Path) -> None:
    command = ["pack", str(plain), str(tmp_path / "x.ozx"), "--jobs", "2"]
    found = CliRunner().invoke(commands, command, standalone_mode=False)
    assert found.stdout.startswith("19 files become 9 (")
    assert found.return_value == 0
