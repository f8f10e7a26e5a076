"""`pack --in-place`: chunk files become shards one after the other, and at any point the job continues or goes back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

from shardfs.cli import commands
from shardfs.jobs.in_place import InPlaceRun
from shardfs.jobs.in_place_shards import MixedDataset
from shardfs.jobs.shared_work import JobSource
from shardfs.model.errors import BusyError
from shardfs.storage import mount_table
from shardfs.storage.pack_state import DIRECTORY, STATE
from shardfs.storage.source_locks import SOURCE_LOCK
from shardfs.storage.writers.lock_file import OWN_MODE
from shardfs.write.journal.places import Lock
from tests import data_n5
from tests.datasets import PRECOMPUTED, ZARR3, Dataset, same
from tests.jobs.interrupting import aborted_and_done, interrupted
from tests.jobs.packing import pack, pack_in_place
from tests.jobs.test_pack import files, ome04, plain, problems, shown, values
from tests.write.faults import FailAt, hooked
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ome04", "plain"]  # fixtures

HOW: Any = {"chunks_per_shard": (5, 3)}


# ---- what other libraries wrote


def there_and_back(root: Path, tmp_path: Path, **how: Any) -> None:
    """Pack in place as `pack` does to another directory; abort in the middle restores the files."""
    list(pack(str(root), str(tmp_path / "packed"), **how))
    aborted_and_done(pack_in_place, root, files, **how)
    assert files(root) == files(tmp_path / "packed")


@pytest.mark.parametrize("name", sorted(set(ZARR3) - {"rectilinear"}))
def test_zarr3(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    sample = dataset("zarr3", name)
    root = shutil.copytree(sample.twin, tmp_path / "x")
    there_and_back(root, tmp_path)
    for member, data in sample.arrays.items():
        assert same(np.asarray(ts.open(sample.spec(root, member)).result().read().result()), data)


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_volumes(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    root = shutil.copytree(dataset("precomputed", name).twin, tmp_path / "x")
    there_and_back(root, tmp_path)


@pytest.mark.parametrize("name", sorted(n for n, v in data_n5.VARIANTS.items() if not v.seed))
def test_n5(name: str, tmp_path: Path) -> None:
    sample = data_n5.VARIANTS[name].write(tmp_path / "made", name)
    root = shutil.copytree(sample.twin, tmp_path / "x")
    there_and_back(root, tmp_path, chunks_per_shard=(2, 1, 2, 1)[: sample.array.ndim])


def test_ome_zarr_04_becomes_05(ome04: Path, tmp_path: Path) -> None:
    there_and_back(ome04, tmp_path, chunks_per_shard=(2, 2, 2))
    group: Any = zarr.open_group(ome04, mode="r")
    assert group.attrs["ome"]["version"] == "0.5"
    for level in ("0", "1"):
        assert same(group[level][:], values()[: 40 // (int(level) + 1)])
    assert (ome04 / "README").read_text() == "an image"
    assert not any(name.startswith((".z", ".shardfs")) for name in os.listdir(ome04))


def test_arrays_that_are_not_named_keep_their_chunk_files(plain: Path, tmp_path: Path) -> None:
    there_and_back(plain, tmp_path, arrays=["b"])
    group: Any = zarr.open_group(plain, mode="r")
    assert (group["a"].shards, group["b"].shards) == (None, (80, 80))
    assert same(group["a"][:], group["b"][:].astype("u2"))


# ---- interruptions


@pytest.mark.timeout(300 + 60 * times())
@pytest.mark.parametrize(("how", "count"), [("kill", 7), ("fail", 12), ("power", 12)])
def test_interruptions(how: str, count: int) -> None:
    count *= times()
    command = [sys.executable, "-m", "tests.jobs.in_place_kills", how, str(count), str(os.getpid())]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280 + 60 * times(), check=False)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["points"] > count // 2


def test_space_is_one_shard(plain: Path) -> None:
    """The data of at most one shard are stored twice."""
    before = files(plain)
    chunks = sum(len(raw) for name, raw in before.items() if name.startswith(("a/c", "b/c")))
    shard = max(15 * len(raw) for name, raw in before.items() if name.startswith("b/c"))
    for abort in (False, True):
        sizes = []
        for _ in pack_in_place(str(plain), abort=True) if abort else pack_in_place(str(plain), **HOW):
            source_bytes = [p for p in plain.rglob("c/*/*") if p.is_file()]
            sizes.append(sum(p.stat().st_size for p in source_bytes))
        assert max(sizes) <= chunks + shard + 16 * (15 * 16 + 4)
        if not abort:
            shutil.rmtree(plain)
            for name, raw in before.items():
                (plain / name).parent.mkdir(parents=True, exist_ok=True)
                (plain / name).write_bytes(raw)
            interrupted(pack_in_place(str(plain), **HOW), 10)


@pytest.mark.slow
@pytest.mark.parametrize("abort", [False, True])
def test_a_killed_process_with_workers_continues(plain: Path, tmp_path: Path, abort: bool) -> None:
    """Workers may outlive the main process for a while, and must not disturb the next run."""
    before = files(plain)
    list(pack(str(plain), str(tmp_path / "packed"), chunks_per_shard=(1, 2)))
    command = [sys.executable, "-m", "shardfs", "pack", "--in-place", str(plain), "--jobs", "2"]
    options = ["--chunks-per-shard", "1,2"]
    for remaining_calls in (160, 80):
        process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and len([p for p in plain.glob("[ab]/c/*/*") if p.is_file()]) > remaining_calls:
            time.sleep(0.005)
        process.kill()
        process.wait()
    assert (plain / STATE).exists()
    last = [*command, "--abort"] if abort else [*command, *options]
    subprocess.run(last, check=True, timeout=250, stdout=subprocess.DEVNULL)
    assert files(plain) == (before if abort else files(tmp_path / "packed"))


def test_tasks_of_an_earlier_run_do_nothing(plain: Path) -> None:
    run = InPlaceRun(JobSource.from_url(str(plain)), options=HOW)
    task = next(run._tasks())
    run.close()
    InPlaceRun(JobSource.from_url(str(plain)), abort=True).close()
    before = files(plain)
    with pytest.raises(BusyError, match="another run of this job has begun"):
        task()
    assert files(plain) == before


# ---- bad input


def test_a_changed_file_is_not_deleted(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed after its shard was written; the next run packs the new bytes."""
    changed = plain / "a" / "c" / "3" / "4"

    def deletable(dataset: MixedDataset, files: list[str]) -> None:
        if "a/c/3/4" in files:
            monkeypatch.undo()
            write = MixedDataset._write_shard

            def write_and_change(*args: Any) -> int:
                monkeypatch.undo()
                size = write(*args)
                changed.write_bytes(b"new")
                return size

            monkeypatch.setattr(MixedDataset, "_write_shard", write_and_change)

    before = {str(p) for p in (plain / "a" / "c").glob("[0-4]/[345]")}
    monkeypatch.setattr(MixedDataset, "_require_deletable", deletable)
    (problem,) = problems(pack_in_place(str(plain), **HOW))
    assert (problem.path, problem.damaged) == ("a/c/3/4", True)
    assert "was changed while it was packed" in problem.why
    assert {str(p) for p in (plain / "a" / "c").rglob("*") if p.is_file()} == before
    assert not (plain / "zarr.json").exists()
    assert problems(pack_in_place(str(plain))) == []
    assert shown(plain)["a/c/3/4"] == b"new"


def test_a_damaged_shard_stops_nothing_else_on_the_way_back(plain: Path) -> None:
    before = files(plain)
    interrupted(pack_in_place(str(plain), **HOW), 10)
    shards = sorted(p for p in (plain / ".shardfs-pack" / "sharded").rglob("c/*/*") if p.is_file())
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (problem,) = problems(pack_in_place(str(plain), abort=True))
    assert problem.damaged
    assert [p for p in (plain / ".shardfs-pack" / "sharded").rglob("c/*/*") if p.is_file()] == shards[:1]
    assert not (plain / "zarr.json").exists()
    shards[0].write_bytes(whole)
    assert problems(pack_in_place(str(plain), abort=True)) == []
    assert files(plain) == before


def test_a_changed_file_is_not_overwritten(plain: Path) -> None:
    """It was changed after its shard was finished, and the job goes back."""
    before = files(plain)
    interrupted(pack_in_place(str(plain), **HOW), 3)
    packed = min(set(before) - set(files(plain)) - {"zarr.json", "a/zarr.json", "b/zarr.json"})
    (plain / packed).parent.mkdir(parents=True, exist_ok=True)
    (plain / packed).write_bytes(b"new")
    (problem,) = problems(pack_in_place(str(plain), abort=True))
    assert "differs from its shard" in problem.why
    assert (plain / packed).read_bytes() == b"new"
    assert problems(pack_in_place(str(plain))) == []
    assert shown(plain)[packed] == b"new"


def test_files_that_cannot_be_packed_stop_their_shard_only(plain: Path, tmp_path: Path) -> None:
    before = files(plain)
    (tmp_path / "inside").write_bytes(b"y")
    link = plain / "a" / "c" / "0" / "0"
    link.rename(plain / "a" / "c" / "kept")
    link.symlink_to("../kept")
    (plain / "a" / "c" / "7" / "70").write_bytes(b"beyond the edge")
    problem_list = {p.path: p for p in problems(pack_in_place(str(plain), **HOW))}
    assert {path: p.damaged for path, p in problem_list.items()} == {"a": True, "a/c/7/70": False}
    assert "a/c/0/0: is a symbolic link" in problem_list["a"].why
    remaining_files = {str(p.relative_to(plain)) for p in plain.glob("[ab]/c/*/*")}
    assert remaining_files == {f"a/c/{y}/{x}" for y in range(5) for x in range(3)} | {"a/c/7/70"}
    link.unlink()
    (plain / "a" / "c" / "kept").rename(link)
    assert [p.path for p in problems(pack_in_place(str(plain), abort=True))] == []
    (plain / "a" / "c" / "7" / "70").unlink()
    assert files(plain) == before


def test_compressed_chunks_of_volumes_are_refused(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "x")
    chunk = max(p for p in source.rglob("*") if p.is_file() and p.name != "info")
    chunk.rename(f"{chunk}.gz")
    before = files(source)
    (problem,) = problems(pack_in_place(str(source)))
    assert problem.damaged
    assert files(source) == before


def test_a_full_disk_ends_the_job(plain: Path) -> None:
    before = files(plain)
    with hooked(FailAt(400, errno.ENOSPC, for_ever=True)) as hook:
        hook.do = partial(full, hook)  # type: ignore[method-assign]
        with pytest.raises(OSError, match="nothing is lost: free some space and repeat the command"):
            list(pack_in_place(str(plain), **HOW))
    assert problems(pack_in_place(str(plain), abort=True)) == []
    assert files(plain) == before


def full(hook: FailAt, number: int, name: str, function: Any, args: Any) -> Any:
    if name == "pwrite" and number >= hook.at:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return function(*args)


def test_sources_that_are_refused(plain: Path, tmp_path: Path) -> None:
    before = files(plain)
    with pytest.raises(OSError, match="is no local directory"):
        list(pack_in_place("memory://x"))
    with pytest.raises(FileNotFoundError, match="no unfinished job in place"):
        list(pack_in_place(str(plain), abort=True))
    (plain / "real").write_bytes((plain / "b" / "zarr.json").read_bytes())
    (plain / "b" / "zarr.json").unlink()
    (plain / "b" / "zarr.json").symlink_to("../real")
    with pytest.raises(OSError, match="is a symbolic link"):
        list(pack_in_place(str(plain)))
    (plain / "b" / "zarr.json").unlink()
    (plain / "real").rename(plain / "b" / "zarr.json")
    assert files(plain) == before
    interrupted(pack(str(plain), str(tmp_path / "target"), **HOW), 3)
    with pytest.raises(FileExistsError, match="is the target of an unfinished pack"):
        list(pack_in_place(str(tmp_path / "target")))


def test_two_jobs_and_writable_mounts_exclude_each_other(plain: Path) -> None:
    before = files(plain)
    lock = Lock.take(str(plain / SOURCE_LOCK), "/mnt", str(plain), fleeting=True, mode=0o644)
    with pytest.raises(BusyError, match="already mounted rw"):
        list(pack_in_place(str(plain)))
    lock.free()
    assert files(plain) == before
    begun: Any = pack_in_place(str(plain), **HOW)
    next(begun)
    for other in (plain, plain / "a"):
        with pytest.raises(BusyError, match="being changed by shardfs pack --in-place by pid"):
            list(pack_in_place(str(other)))
    with pytest.raises(BusyError, match="being changed by shardfs pack --in-place"):
        list(pack(str(plain), str(plain) + "-copy"))
    begun.close()


def test_mounts_of_the_source_are_refused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(plain)
    for source in (plain, plain / "a", plain.parent):
        mount = mount_table.MountInfo("/mnt/x", mount_table.FS_TYPE, str(source))
        monkeypatch.setattr("shardfs.jobs.in_place.topmost", lambda mount=mount: {"/mnt/x": mount})
        with pytest.raises(BusyError, match="is mounted at /mnt/x: unmount that first"):
            list(pack_in_place(str(plain)))
    mount_tables = iter([{}, {"/mnt/x": mount_table.MountInfo("/mnt/x", mount_table.FS_TYPE, str(plain))}])
    monkeypatch.setattr("shardfs.jobs.in_place.topmost", lambda: next(mount_tables))
    with pytest.raises(BusyError, match="is mounted at /mnt/x"):  # mounted when the state was written
        list(pack_in_place(str(plain)))
    assert files(plain) == before


def test_other_options_and_commands_are_refused(plain: Path) -> None:
    interrupted(pack_in_place(str(plain), **HOW), 4)
    with pytest.raises(FileExistsError, match="with other options"):
        list(pack_in_place(str(plain), shard_bytes=1000))
    (plain / STATE).rename(plain / "kept")
    with pytest.raises(FileExistsError, match="is missing: bring that file back"):
        list(pack_in_place(str(plain)))
    (plain / "kept").rename(plain / STATE)
    assert problems(pack_in_place(str(plain))) == []
    assert not (plain / DIRECTORY).exists()


def test_a_document_in_the_way_is_kept(plain: Path) -> None:
    interrupted(pack_in_place(str(plain), **HOW), 4)
    (plain / "zarr.json").write_text("new")
    with pytest.raises(FileExistsError, match="is in the way"):
        list(pack_in_place(str(plain)))
    assert (plain / "zarr.json").read_text() == "new"
    (plain / "zarr.json").unlink()
    assert problems(pack_in_place(str(plain))) == []


# ---- the command


def test_only_lock_files_of_killed_workers_are_removed(plain: Path) -> None:
    """A lock file of another program may be that of a living writer."""
    theirs, ours = (next(plain.glob(f"a/c/{name}")) for name in ("0/0", "0/1"))
    theirs, ours = (path.with_name(f"{path.name}.__lock") for path in (theirs, ours))
    theirs.touch()
    os.close(os.open(ours, os.O_CREAT, OWN_MODE))
    assert problems(pack_in_place(str(plain), arrays=["a"], **HOW)) == []
    assert (theirs.exists(), ours.exists()) == (True, False)


def test_the_command(plain: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(commands, ["pack", str(plain), *words], standalone_mode=False)

    before = files(plain)
    assert "give either DEST or --in-place" in str(run().exception)
    assert "give either DEST or --in-place" in str(run("--in-place", "x").exception)
    assert "--part does not go" in str(run("--in-place", "--part", "1/2").exception)
    assert "--abort needs --in-place" in str(run("--abort", "x").exception)
    interrupted(pack_in_place(str(plain), **HOW), 4)
    assert run("--in-place", "--abort").stdout.startswith("3 files become 45 (")
    assert files(plain) == before
    assert run("--in-place", "--shard-size", "10K").stdout.startswith("201 files become ")
