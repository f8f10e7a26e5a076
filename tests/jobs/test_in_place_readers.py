"""Readers of a source during `pack --in-place` get the whole array or an error."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs.in_place import InPlaceRun
from shardfs.model.errors import BusyError, NotADatasetError
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, STATE, PackState, SourceJobs, Stage, unfinished_jobs
from shardfs.storage.writers import open_writer
from shardfs.vfs.tree import open_tree
from tests import data_n5
from tests.datasets import ramp
from tests.jobs.interrupting import interrupted
from tests.jobs.packing import pack, pack_in_place
from tests.jobs.test_pack import DOCUMENTS, files, plain, problems, shown
from tests.write.faults import Calls, hooked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.datasets import Dataset

__all__ = ["plain"]  # a fixture


class Looking(Calls):
    """Reads a source before some calls that change it."""

    def __init__(self, root: Path, wanted: dict[str, bytes]) -> None:
        super().__init__()
        self.root, self.wanted = root, wanted
        self.refused = self.read = 0

    def do(self, number: int, name: str, function: Any, args: Any) -> Any:
        if name in ("rename", "unlink", "rmdir", "rename_new", "exchange"):
            self.look()
        return function(*args)

    def look(self) -> None:
        try:
            tree_files = shown(self.root)
        except BusyError as e:
            self.refused += "in place; finish with `shardfs" in str(e)
        except NotADatasetError:
            plain = set(files(self.root).values())
            assert set(self.wanted.values()) <= plain, "no error, although some chunks are in shards"
        else:
            assert chunks(tree_files) == self.wanted
            self.read += 1


def chunks(tree_files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in tree_files.items() if name.rpartition("/")[2] not in DOCUMENTS}


def written(kind: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> Path:
    if kind == "n5":
        return data_n5.VARIANTS["rank_3_cut"].write(tmp_path, "n5").twin
    if kind == "precomputed":
        return dataset("precomputed", "index_raw_data_raw").twin
    group = zarr.open_group(tmp_path / "plain", mode="w", zarr_format=2 if kind == "zarr2" else 3)
    array = group.create_array("a", shape=(10, 9), chunks=(3, 3), dtype="<u2")
    array[:] = ramp((10, 9))
    array[3:6, 3:6] = 0
    return tmp_path / "plain"


@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "n5", "precomputed"])
def test_a_reader_gets_the_whole_array_or_an_error(
    kind: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    root = shutil.copytree(written(kind, dataset, tmp_path), tmp_path / "source")
    assert problems(pack(str(root), str(tmp_path / "packed"))) == []
    looking = Looking(root, chunks(shown(tmp_path / "packed")))
    with hooked(looking):
        assert problems(pack_in_place(str(root))) == []
    assert looking.refused > 5
    assert looking.read > 0


@pytest.mark.parametrize("older", [False, True])
def test_the_array_of_the_job_is_refused_and_others_are_read(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older builds moved all documents of the source. Then all its arrays are refused, until the job has ended."""
    root = tmp_path / "source"
    group = zarr.open_group(root, mode="w")
    for name, shards in (("a", None), ("other", (4, 4)), ("plain", None)):
        group.create_array(name, shape=(8, 8), chunks=(2, 2), shards=shards, dtype="<u2")[:] = ramp((8, 8)) + 1
    before = files(root)
    with monkeypatch.context() as former:
        if older:
            former.setattr(InPlaceRun, "_is_stored", lambda *_: False)
        interrupted(pack_in_place(str(root), arrays=["a"], chunks_per_shard=(2, 2)), 3)
    message = re.escape(f"is being packed in place; finish with `shardfs pack --in-place {root}`, or go back")
    for array in ["a", "other", "plain"] if older else ["a"]:
        with pytest.raises(BusyError, match=f"{message} with `--abort`"):
            open_tree(str(root / array))
    if older:
        with pytest.raises(BusyError, match=message):
            open_tree(str(root))
    else:
        for source, prefix in ((root, "other/"), (root / "other", ""), (tmp_path, "source/other/")):
            chunk_files = {name: raw for name, raw in chunks(shown(source)).items() if name.startswith(f"{prefix}c/")}
            assert len(chunk_files) == 16
    for writing in (root, root / "a", root / "other"):
        with pytest.raises(BusyError, match="until then, mount read-only; its array cannot be read"):
            open_writer(LocalStore(str(writing)))
    for abort in (True, False):
        assert problems(pack_in_place(str(root), abort=abort)) == []
        assert len(chunks(shown(root))) == 48
        if abort:
            assert chunks(files(root)).keys() == chunks(before).keys()
            interrupted(pack_in_place(str(root), arrays=["a"], chunks_per_shard=(2, 2)), 3)


def test_a_group_whose_document_changes_stays_a_directory(plain: Path) -> None:
    """Its consolidated metadata describe the array of the job, so no reader may find them meanwhile."""
    list(pack_in_place(str(plain), arrays=["b"], chunks_per_shard=(5, 5)))
    interrupted(pack_in_place(str(plain), arrays=["a"], chunks_per_shard=(5, 5)), 3)
    paths = [tree.path for tree in open_tree(str(plain)).collections()]
    assert (paths, (plain / "zarr.json").exists()) == (["b"], False)
    assert problems(pack_in_place(str(plain))) == []
    group: Any = zarr.open_consolidated(plain)
    assert len(group["a"][:]) == 100


def test_other_jobs_and_sources_are_not_affected(plain: Path, tmp_path: Path) -> None:
    interrupted(pack(str(plain), str(tmp_path / "target"), chunks_per_shard=(5, 5)), 3)
    assert list(unfinished_jobs(str(tmp_path / "target"))) == []
    assert list(unfinished_jobs("s3://bucket/key")) == []
    interrupted(pack_in_place(str(plain), chunks_per_shard=(5, 5)), 3)
    (plain / STATE).write_bytes(b"{")
    with pytest.raises(FileExistsError, match="is damaged"):
        open_tree(str(plain))


FORGED = PackState(PACK, Stage.MIXED, ["source/a/zarr.json"], [], {}).raw()


def put_file(path: Path) -> None:
    path.write_bytes(FORGED)


def put_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(FORGED)
    path.symlink_to(target)


@pytest.mark.parametrize("put", [put_file, put_link, os.mkfifo, os.mkdir])
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755], ids=oct)
def test_a_state_that_another_user_may_have_put_above_a_source_is_ignored(
    put: Callable[[Path], None], mode: int, tmp_path: Path
) -> None:
    """`/tmp` is such a directory above sources."""
    shared = tmp_path / "shared"
    group = zarr.open_group(shared / "source", mode="w")
    group.create_array("a", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="<u2")[:] = ramp((8, 8)) + 1
    put(shared / STATE)
    if mode == 0o755:  # the directory of another user
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(shared, 65534, 65534)
    shared.chmod(mode)
    for source in (shared / "source", shared / "source/a"):
        assert len(chunks(shown(source))) == 16
        open_writer(LocalStore(str(source)))
        assert list(unfinished_jobs(str(source))) == []
    (tmp_path / "link").mkdir()
    (tmp_path / "link/a").symlink_to(shared / "source/a")
    linked = ShardFileSystem(str(tmp_path / "link"), symlinks="follow", skip_instance_cache=True)
    assert len(linked.ls("a/c/0")) == 4


@pytest.mark.parametrize("put", [put_link, os.mkfifo])
def test_a_state_above_a_source_that_cannot_be_read_is_ignored(put: Callable[[Path], None], tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "source", mode="w")
    group.create_array("a", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="<u2")[:] = ramp((8, 8)) + 1
    put(tmp_path / STATE)
    assert len(chunks(shown(tmp_path / "source"))) == 16
    with pytest.raises(PermissionError, match=STATE):
        open_tree(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_job_of_another_user_in_the_source_itself_counts(plain: Path) -> None:
    interrupted(pack_in_place(str(plain), chunks_per_shard=(5, 5)), 3)
    for path in (plain, plain / STATE):
        os.chown(path, 65534, 65534)
    with pytest.raises(BusyError, match="in place; finish with"):
        open_tree(str(plain))


def test_a_job_above_the_source_is_seen_until_it_ends(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "source", mode="w")
    for name in ("a", "other"):
        group.create_array(f"g/{name}", shape=(8, 8), chunks=(2, 2), dtype="<u2")[:] = ramp((8, 8)) + 1
    interrupted(pack_in_place(str(tmp_path / "source"), arrays=["g/a"], chunks_per_shard=(2, 2)), 3)
    jobs = SourceJobs(str(tmp_path / "source/g"))
    with pytest.raises(BusyError, match="in place; finish with"):
        jobs.require_none(str(tmp_path / "source/g/a"), is_array=False)
    jobs.require_none(str(tmp_path / "source/g/other"), is_array=True)
    assert problems(pack_in_place(str(tmp_path / "source"))) == []
    jobs.require_none(str(tmp_path / "source/g/a"), is_array=True)
