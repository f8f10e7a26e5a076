"""A job that is repeated: it continues what the same job has begun, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from shardfs.cli import commands
from shardfs.jobs.pack_job import Packing
from shardfs.model.errors import UnsupportedError
from shardfs.storage.pack_state import STATE
from tests.datasets import same
from tests.jobs.interrupting import calls_until_end, interrupted
from tests.jobs.packing import pack, pack_in_place
from tests.jobs.test_pack import files, problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


DATA: Any = np.arange(1, 401, dtype="u2").reshape(20, 20)


class Tearing(MemoryFileSystem):  # type: ignore[misc]
    """A store without conditional writes, as SFTP. A file of which the text is `torn` is written half and fails."""

    protocol = "tearing"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    torn: ClassVar[bytes | None] = None

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.store[path2] = self.store.pop(path1)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        is_torn = value == type(self).torn
        super().pipe_file(path, value[: len(value) // 2] if is_torn else value, mode, **kwargs)
        if is_torn:
            raise OSError(errno.EIO, "the connection is lost")


def zarr3(root: Path, **how: Any) -> str:
    """A group with the arrays `a` and `b`; return the name of their documents."""
    group = zarr.create_group(root)
    for name in ("a", "b"):
        group.create_array(name, shape=DATA.shape, chunks=(5, 5), dtype=DATA.dtype, **how)[:] = DATA
    return "zarr.json"


def n5(root: Path) -> str:
    """The same in N5, by tensorstore."""
    (root / "attributes.json").parent.mkdir(parents=True)
    (root / "attributes.json").write_text(json.dumps({"n5": "4.0.0"}))
    for name in ("a", "b"):
        metadata = {"dimensions": [20, 20], "blockSize": [5, 5], "dataType": "uint16", "compression": {"type": "raw"}}
        kvstore = {"driver": "file", "path": str(root / name)}
        ts.open({"driver": "n5", "kvstore": kvstore, "metadata": metadata, "create": True}).result()[...] = DATA
    return "attributes.json"


def run(*command: object) -> Any:
    """Run a command of shardfs; `return_value` of the result is its exit code."""
    return CliRunner().invoke(commands, list(map(str, command)), standalone_mode=False)


def test_a_file_that_was_written_half_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr3(tmp_path / "source")
    (tmp_path / "source/notes").write_bytes(notes := bytes(range(100)))
    fsspec.register_implementation("tearing", Tearing, clobber=True)
    with monkeypatch.context() as patch:
        patch.setattr(Tearing, "torn", notes)
        assert problems(pack(str(tmp_path / "source"), "tearing://target"))
    assert problems(pack(str(tmp_path / "source"), "tearing://target")) == []
    assert Tearing().cat_file("tearing://target/notes") == notes


def read(root: Path, name: str) -> Any:
    """An array of Zarr v3, read by zarr-python."""
    array: Any = zarr.open_array(root / name, mode="r")
    return array[:]


# ---- another plan


@pytest.mark.parametrize("write", [zarr3, n5])
def test_a_job_does_not_take_copied_chunks_for_shards(write: Callable[[Path], str], tmp_path: Path) -> None:
    """The document of an array was missing in the first run, which therefore copied the array's chunk files."""
    source, target = tmp_path / "source", tmp_path / "target"
    document = source / "b" / write(source)
    document.rename(tmp_path / "kept")
    os.mkfifo(source / "pipe")
    assert run("pack", source, target).return_value == 3
    (source / "pipe").unlink()
    (tmp_path / "kept").rename(document)
    before = files(target)
    result = run("pack", source, target)
    assert isinstance(result.exception, FileExistsError)
    assert f"with another plan: b/ is new, b/{document.name} is new" in str(result.exception)
    assert files(target) == before
    shutil.rmtree(target)
    assert run("pack", source, target).return_value == 0
    if write is zarr3:
        assert same(read(target, "b"), DATA)


def test_unpack_does_not_take_copied_shards_for_chunks(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source, shards=(10, 10))
    (source / "b" / "zarr.json").rename(tmp_path / "kept")
    os.mkfifo(source / "pipe")
    assert run("unpack", source, target).return_value == 3
    (source / "pipe").unlink()
    (tmp_path / "kept").rename(source / "b" / "zarr.json")
    result = run("unpack", source, target)
    assert isinstance(result.exception, FileExistsError)
    assert "with another plan: b/ is new, b/zarr.json is new" in str(result.exception)


def test_a_document_that_was_edited_between_two_runs_is_another_plan(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source)
    interrupted(pack(str(source), str(target), chunks_per_shard=(2, 2)), 3)
    array: Any = zarr.open_array(source / "b")
    array.attrs["edited"] = True
    with pytest.raises(FileExistsError, match=r"with another plan: b/zarr.json has changed; repeat that job"):
        list(pack(str(source), str(target), chunks_per_shard=(2, 2)))


def test_a_job_with_other_options_is_refused_by_their_names(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source)
    interrupted(pack(str(source), str(target), chunks_per_shard=(2, 2)), 3)
    with pytest.raises(FileExistsError, match=r"with other options \(chunks_per_shard, array\)"):
        list(pack(str(source), str(target), chunks_per_shard=(2, 1), arrays=["a"]))
    zarr3(tmp_path / "other")
    with pytest.raises(FileExistsError, match="of another source"):
        list(pack(str(tmp_path / "other"), str(target), chunks_per_shard=(2, 2)))
    with pytest.raises(FileExistsError, match="of another kind"):
        run_unpack(tmp_path, target)


def run_unpack(tmp_path: Path, target: Path) -> None:
    zarr3(tmp_path / "sharded", shards=(10, 10))
    result = run("unpack", tmp_path / "sharded", target)
    assert result.exception is not None
    raise result.exception


# ---- finished shards


@pytest.mark.parametrize("remote", [False, True])
def test_an_object_with_the_name_of_a_shard_is_no_finished_shard(remote: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr3(source)
    target = "memory://repeated" if remote else str(tmp_path / "target")
    fs, root = fsspec.core.url_to_fs(target)
    try:
        interrupted(pack(str(source), target, chunks_per_shard=(2, 2)), 2)
        fs.makedirs(f"{root}/b/c/1", exist_ok=True)
        fs.pipe_file(f"{root}/b/c/1/1", b"of another program")
        assert problems(pack(str(source), target, chunks_per_shard=(2, 2))) == []
        if remote:
            fs.get(root, str(tmp_path / "target"), recursive=True)
        assert same(read(tmp_path / "target", "b"), DATA)
    finally:
        if remote:
            fs.rm(root, recursive=True)


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_a_job_begins_anew_in_a_target_whose_files_were_deleted(command: str, tmp_path: Path) -> None:
    """`rm -r TARGET/*` keeps the files whose names begin with a dot: the state and the notes of the job."""
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source, **({"shards": (10, 10)} if command == "unpack" else {}))
    os.mkfifo(source / "pipe")
    assert run(command, source, target).return_value == 3
    (source / "pipe").unlink()
    for path in target.iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path)
    assert run(command, source, target).return_value == 0
    assert same(read(target, "a"), DATA)
    assert same(read(target, "b"), DATA)


@pytest.mark.parametrize("store", ["local", "memory"])
def test_another_file_with_the_name_of_a_shard_is_refused(store: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr.create_array(source / "a", shape=(20,), chunks=(5,), dtype="u2", zarr_format=2)[:] = np.arange(20)
    (source / "a" / "c.0").write_bytes(b"not a chunk of Zarr v2, but the name of a shard of Zarr v3")
    target = str(tmp_path / "target") if store == "local" else "memory://collision"
    (problem,) = problems(pack(str(source), target, chunks_per_shard=(2,)))
    assert (problem.path, problem.damaged) == ("a/c.0", True)
    assert "name of a shard" in problem.why


# ---- finished jobs


@pytest.mark.parametrize("command", ["pack", "unpack"])
@pytest.mark.parametrize("part", [(), ("--part", "2/2")])
def test_a_finished_job_says_so(command: str, part: tuple[str, ...], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source, **({"shards": (10, 10)} if command == "unpack" else {}))
    for number in (1, 2) if part else ():
        assert run(command, source, target, "--part", f"{number}/2").return_value == 0
    if not part:
        assert run(command, source, target).return_value == 0
    before = files(target)
    result = run(command, source, target, *part)
    assert (result.return_value, result.stdout) == (
        0,
        "finished already by an earlier run of this job; nothing was done\n",
    )
    end = json.loads(run(command, source, target, *part, "--json").stdout.splitlines()[-1])
    assert (end["finished"], end["repeated"]) == (True, True)
    assert files(target) == before
    other = run(command, source, target, *(("--array", "a") if command == "pack" else ("--layout", "zarr2")))
    assert isinstance(other.exception, FileExistsError)


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_a_job_that_was_killed_while_it_ended_is_ended(command: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source, **({"shards": (10, 10)} if command == "unpack" else {}))
    os.mkfifo(source / "pipe")
    assert run(command, source, target).return_value == 3
    (source / "pipe").unlink()
    shutil.copytree(target, tmp_path / "unfinished", symlinks=True)
    assert run(command, source, target).return_value == 0
    shutil.copytree(tmp_path / "unfinished" / ".shardfs-pack", target / ".shardfs-pack")
    shutil.copyfile(tmp_path / "unfinished" / STATE, target / STATE)
    assert (target / STATE).exists()
    result = run(command, source, target)
    assert (result.return_value, "finished already" in result.stdout) == (0, True)
    assert [name for name in os.listdir(target) if name.startswith(".shardfs")] == []


@pytest.mark.parametrize("level", ["shardfs", "shardfs/finished"])
def test_notes_that_other_users_could_forge_do_not_count(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source)
    assert run("pack", source, target).return_value == 0
    assert run("pack", source, target).return_value == 0
    (tmp_path / "state" / level).chmod(0o777)
    assert isinstance(run("pack", source, target).exception, FileExistsError)
    assert run("pack", source, tmp_path / "other").return_value == 0  # with a warning
    if os.geteuid() == 0:
        (tmp_path / "state" / level).chmod(0o770)
        os.chown(tmp_path / "state" / level, 0, 65534)
        assert isinstance(run("pack", source, target).exception, FileExistsError)
    (tmp_path / "state" / level).chmod(0o700)
    assert run("pack", source, target).return_value == 0
    assert isinstance(run("pack", source, tmp_path / "other").exception, FileExistsError)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_a_job_that_was_killed_at_any_of_its_last_calls_is_ended(command: str, tmp_path: Path) -> None:
    """The process ends before the call: the last documents, the note that the job is finished, what is removed then."""
    source = tmp_path / "source"
    zarr3(source, **({"shards": (10, 10)} if command == "unpack" else {}))
    expected = tmp_path / "expected" / "target"
    total = calls_until_end(10_000, command, str(source), str(expected))
    assert total is not None
    kills, call = 0, total
    while kills < 3:  # the number of calls differs from run to run
        call -= 1
        target = tmp_path / str(call) / "target"
        kills += calls_until_end(call, command, str(source), str(target)) is None
        result = run(command, source, target)
        assert result.exception is None
        assert result.return_value == 0
        assert sorted(os.listdir(target.parent)) == ["target"]
        assert files(target) == files(expected)


def test_a_target_that_another_program_has_made_is_not_finished(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source)
    list(pack(str(source), str(target)))
    shutil.rmtree(target)
    zarr3(target)
    with pytest.raises(FileExistsError, match="is not empty, and has no unfinished job"):
        list(pack(str(source), str(target)))


@pytest.mark.parametrize("data", ["", "a job"])
def test_a_target_of_something_else_is_refused_before_the_source_is_listed(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing the files of an unsharded source can take hours."""
    source, target = tmp_path / "source", tmp_path / "target"
    zarr3(source)
    if data:
        zarr3(tmp_path / "other")
        next(iter(pack(str(tmp_path / "other"), str(target))))
    else:
        zarr3(target)
    before = files(target)
    monkeypatch.setattr(Packing, "survey", lambda _: pytest.fail("the source was listed"))
    with pytest.raises(FileExistsError, match="unfinished job"):
        list(pack(str(source), str(target)))
    assert files(target) == before


# ---- in place


def test_a_finished_job_in_place_says_so(tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr3(source)
    assert run("pack", "--in-place", source).return_value == 0
    before = files(source)
    result = run("pack", "--in-place", source)
    assert (result.return_value, "finished already" in result.stdout) == (0, True)
    other = run("pack", "--in-place", source, "--array", "a")
    assert isinstance(other.exception, UnsupportedError)
    assert files(source) == before
    assert same(read(source, "a"), DATA)


def test_arrays_that_came_after_a_job_in_place_are_packed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr3(source)
    assert run("pack", "--in-place", source).return_value == 0
    zarr.create_array(source / "new", shape=DATA.shape, chunks=(5, 5), dtype=DATA.dtype)[:] = DATA
    result = run("pack", "--in-place", source)
    assert (result.return_value, "finished already" in result.stdout) == (0, False)
    assert same(read(source, "new"), DATA)


def test_a_job_in_place_that_went_back_says_so(tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr3(source)
    interrupted(pack_in_place(str(source), chunks_per_shard=(2, 2)), 2)
    assert run("pack", "--in-place", "--chunks-per-shard", "2,2", "--abort", source).return_value == 0
    result = run("pack", "--in-place", "--chunks-per-shard", "2,2", "--abort", source)
    assert (result.return_value, "finished already" in result.stdout) == (0, True)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_directory_with_the_name_of_a_chunk_is_refused(in_place: bool, empty: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    zarr3(source)
    (source / "b/c/0/0").unlink()
    (source / "b/c/0/0").mkdir()
    if not empty:
        (source / "b/c/0/0/notes").write_bytes(b"by hand")
    before, places = files(source), ["--in-place", source] if in_place else [source, tmp_path / "target"]
    result = run("pack", *places)
    assert (result.return_value, files(source)) == (3, before)
    assert "b/c/0/0: is a directory, but has the name of a chunk; move it out of the source" in result.stderr
    (source / "b/c/0/0").rename(tmp_path / "moved")
    assert run("pack", *places).return_value == 0
