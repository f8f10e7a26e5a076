"""The fsspec file system: the same names and bytes as the tree, from Python, dask and zarr-python."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tomllib
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError, NotADatasetError
from tests import handmade_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

zarr = pytest.importorskip("zarr")

if "shardfs" not in fsspec.available_protocols():  # a checkout that is not installed has no entry points
    fsspec.register_implementation("shardfs", ShardFileSystem)

VALUES = np.arange(100 * 90, dtype=np.uint16).reshape(100, 90)
VALUES[40:80, 40:80] = 0  # a shard that is not there


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A group with a sharded array, and one that is not sharded."""
    path = str(tmp_path_factory.mktemp("fsspec") / "x.zarr")
    group = zarr.open_group(path, mode="w")
    how: dict[str, Any] = {"shape": (100, 90), "chunks": (10, 10), "dtype": "u2"}
    group.create_array("deep/sharded", shards=(40, 40), attributes={"unit": "nm"}, **how)[:] = VALUES
    group.create_array("deep/plain", **how)[:] = VALUES
    return path


@pytest.fixture(scope="module")
def unsharded(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The chunks that zarr-python writes for the same array without sharding, by path in the array."""
    path = tmp_path_factory.mktemp("unsharded")
    array = zarr.create_array(path, shape=(100, 90), chunks=(10, 10), dtype="u2")
    array[:] = VALUES
    return {str(p.relative_to(path)): p.read_bytes() for p in (path / "c").rglob("*") if p.is_file()}


@pytest.fixture
def fs(source: str) -> Iterator[ShardFileSystem]:
    yield ShardFileSystem(source=source)
    ShardFileSystem.clear_instance_cache()


def test_lists_what_an_unsharded_writer_would_have_left(fs: ShardFileSystem, unsharded: dict[str, bytes]) -> None:
    assert fs.ls("", detail=False) == ["/zarr.json", "/deep"]
    assert sorted(fs.ls("deep", detail=False)) == ["/deep/plain", "/deep/sharded", "/deep/zarr.json"]
    entries = fs.find("deep/sharded/c", detail=True)
    assert {n.removeprefix("/deep/sharded/"): i["size"] for n, i in entries.items()} == {
        name: len(data) for name, data in unsharded.items()
    }
    assert fs.glob("deep/sharded/c/*/8") == sorted(f"/deep/sharded/c/{i}/8" for i in range(10))
    assert fs.du("deep/sharded/c") == sum(map(len, unsharded.values()))


def test_reads_the_chunks_that_an_unsharded_writer_writes(fs: ShardFileSystem, unsharded: dict[str, bytes]) -> None:
    for name, data in unsharded.items():
        assert fs.cat_file(f"deep/sharded/{name}") == data


def test_info(fs: ShardFileSystem, source: str) -> None:
    shard = os.stat(f"{source}/deep/sharded/c/0/0")
    entry = fs.info("shardfs://deep/sharded/c/0/1")
    assert entry["name"] == "/deep/sharded/c/0/1"
    assert entry["type"] == "file"
    assert entry["mtime"] == pytest.approx(shard.st_mtime)
    assert fs.modified("deep/sharded/c/0/1").timestamp() == pytest.approx(shard.st_mtime, abs=1e-5)
    assert fs.info("/deep/sharded/")["type"] == "directory"
    assert fs.isfile("deep/sharded/c/0/1")
    assert fs.isdir("deep/sharded/c/0")
    assert fs.exists("")
    assert fs.ls("deep/sharded/c/0/1") == [entry]
    assert fs.ls("deep/sharded/c/0/1", detail=False) == ["/deep/sharded/c/0/1"]


def test_one_bad_entry_does_not_hide_the_others(source: str, tmp_path: Path) -> None:
    shutil.copytree(f"{source}/deep/sharded", tmp_path / "x")
    (tmp_path / "x" / "broken").symlink_to("nowhere")
    entries = {entry["name"]: entry for entry in ShardFileSystem(source=str(tmp_path / "x")).ls("")}
    assert set(entries) == {"/zarr.json", "/c", "/broken"}
    assert entries["/broken"]["size"] is None


@pytest.mark.parametrize("path", ["nothing", "deep/sharded/c/4/4", "deep/sharded/c/10/0", "zarr.json/x", "../x.zarr"])
def test_what_is_not_there_is_not_there(fs: ShardFileSystem, path: str) -> None:
    assert not fs.exists(path)
    assert not fs.isfile(path)
    with pytest.raises((FileNotFoundError, NotADirectoryError)):
        fs.cat_file(path)


@pytest.mark.parametrize(
    "bounds", [(None, None), (3, 9), (-5, None), (None, -5), (-9, -3), (0, 10**6), (9, 3), (10**6, None)]
)
def test_parts_of_a_file_are_as_those_of_a_slice(fs: ShardFileSystem, bounds: tuple[Any, Any]) -> None:
    whole = fs.cat_file("deep/sharded/c/0/1")
    assert fs.cat_file("deep/sharded/c/0/1", *bounds) == whole[slice(*bounds)]
    assert fs.cat_ranges(["deep/sharded/c/0/1"], *bounds) == [whole[slice(*bounds)]]


def test_many_ranges_at_once(fs: ShardFileSystem, unsharded: dict[str, bytes]) -> None:
    names = sorted(unsharded)
    starts, ends = [i % 7 for i in range(len(names))], [None if i % 2 else 20 for i in range(len(names))]
    wanted = [unsharded[n][s:e] for n, s, e in zip(names, starts, ends, strict=True)]
    assert fs.cat_ranges([f"deep/sharded/{n}" for n in names], starts, ends) == wanted


def test_a_failure_among_many_is_returned_or_raised(fs: ShardFileSystem) -> None:
    paths = ["deep/sharded/c/4/4", "deep/sharded/c/0/0", "deep"]
    missing, data, directory = fs.cat_ranges(paths, 0, 4)
    assert isinstance(missing, FileNotFoundError)
    assert data == fs.cat_file(paths[1])[:4]
    assert isinstance(directory, IsADirectoryError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 4, on_error="raise")


def test_damage_among_many_is_returned_too(source: str, tmp_path: Path) -> None:
    """Also if the size of the damaged chunk is needed to find the range."""
    shutil.copytree(source, tmp_path / "x")
    shard = tmp_path / "x/deep/sharded/c/0/1"
    shard.write_bytes(shard.read_bytes()[:-4])
    fs = ShardFileSystem(str(tmp_path / "x"), skip_instance_cache=True)
    paths = ["deep/sharded/c/0/0", "deep/sharded/c/0/4"]
    for start, end in ((0, None), (2, None), (0, 4), (-4, None)):
        good, bad = fs.cat_ranges(paths, start, end)
        assert good == fs.cat_file(paths[0])[start:end]
        assert isinstance(bad, CorruptShardError)
        with pytest.raises(CorruptShardError):
            fs.cat_ranges(paths, start, end, on_error="raise")


@pytest.mark.parametrize("ttl", ["10m", "0.5", "forever", 10, 0.25, 1e-7, float("inf")])
def test_times_are_numbers_or_texts(source: str, ttl: float | str) -> None:
    fs = ShardFileSystem(source, index_ttl=ttl, skip_instance_cache=True)
    assert len(fs.cat_file("deep/sharded/c/0/0")) == len(fs.cat_file("deep/sharded/c/0/0"))
    assert fs.options.index_ttl == {"10m": 600, "0.5": 0.5, "forever": float("inf")}.get(str(ttl), ttl)


def test_texts_that_are_no_value_are_refused(source: str) -> None:
    wrong: list[dict[str, Any]]
    wrong = [{"index_ttl": "soon"}, {"index_ttl": -1}, {"index_ttl": float("nan")}, {"rw": "maybe"}, {"symlinks": "x"}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options)).replace("_", ".")):
            ShardFileSystem(source, skip_instance_cache=True, **options)
    assert not ShardFileSystem(source, rw="false", skip_instance_cache=True).options.rw  # type: ignore[arg-type]


def test_many_manifests_that_are_stored_compressed(tmp_path: Path) -> None:
    """Each is decoded before it is read, so they have no common object."""
    case, memory = handmade_ids.mesh_manifests_deflated(tmp_path), fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/meshes", recursive=True)
    try:
        fs = ShardFileSystem("memory://meshes", skip_instance_cache=True)
        assert fs.cat_ranges([f"/{name}" for name in case.good], 0, None) == list(case.good.values())
    finally:
        memory.rm("/meshes", recursive=True)


@pytest.mark.parametrize("path", ["/deep", "/deep/sharded/c", "/deep/sharded/c/3"])
def test_directories_are_not_read(fs: ShardFileSystem, path: str) -> None:
    for read in (fs.cat_file, fs.open, lambda path: fs.cat_file(path, 1, 2)):
        with pytest.raises(IsADirectoryError) as refused:
            read(path)
        assert refused.value.filename.strip("/") == path.strip("/")


def test_files_can_be_opened_and_sought(fs: ShardFileSystem) -> None:
    whole = fs.cat_file("deep/sharded/c/0/1")
    with fs.open("deep/sharded/c/0/1") as file:
        file.seek(5)
        assert file.read(7) == whole[5:12]
        file.seek(-3, os.SEEK_END)
        assert file.read() == whole[-3:]
    with fs.open("deep/sharded/zarr.json", "r") as text:
        assert '"unit"' in text.read()


@pytest.mark.parametrize(
    "change",
    [
        lambda fs: fs.open("deep/new", "wb"),
        lambda fs: fs.open("deep/sharded/c/0/0", "ab"),
        lambda fs: fs.pipe("deep/new", b"x"),
        lambda fs: fs.pipe_file("deep/new", b"x"),
        lambda fs: fs.put_file(__file__, "deep/new"),
        lambda fs: fs.touch("deep/new"),
        lambda fs: fs.mkdir("new"),
        lambda fs: fs.makedirs("new/new"),
        lambda fs: fs.rm("deep", recursive=True),
        lambda fs: fs.rm_file("zarr.json"),
        lambda fs: fs.rmdir("deep"),
        lambda fs: fs.copy("zarr.json", "new"),
        lambda fs: fs.mv("zarr.json", "new"),
    ],
)
def test_every_change_is_refused(fs: ShardFileSystem, change: Callable[[ShardFileSystem], object]) -> None:
    with pytest.raises(OSError, match="Read-only file system") as failure:
        change(fs)
    assert failure.value.errno == errno.EROFS


def test_the_installed_package_registers_the_protocol() -> None:
    with open(f"{os.path.dirname(__file__)}/../../pyproject.toml", "rb") as file:
        specs = tomllib.load(file)["project"]["entry-points"]["fsspec.specs"]
    assert specs == {"shardfs": f"{ShardFileSystem.__module__}:{ShardFileSystem.__name__}"}


def test_chained_urls(source: str) -> None:
    data = ShardFileSystem(source=source).cat_file("deep/sharded/c/0/0")
    with fsspec.open(f"shardfs://deep/sharded/c/0/0::file://{source}") as file:
        assert file.read() == data
    fs, root = fsspec.core.url_to_fs(f"shardfs::{source}")
    assert root == ""
    assert fs.cat_file("deep/sharded/c/0/0") == data


def test_a_source_in_another_fsspec_file_system(source: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(source, "/copied.zarr", recursive=True)
    try:
        wanted = ShardFileSystem(source=source)
        for fs in (
            ShardFileSystem(source="memory://copied.zarr"),
            fsspec.core.url_to_fs("shardfs::memory://copied.zarr")[0],
        ):
            assert fs.find("") == wanted.find("")
            assert fs.cat_file("deep/sharded/c/0/1") == wanted.cat_file("deep/sharded/c/0/1")
    finally:
        memory.rm("/copied.zarr", recursive=True)


def test_a_source_in_an_archive(source: str, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "x"), "zip", source)
    data = ShardFileSystem(source=source).cat_file("deep/sharded/c/0/1")
    with fsspec.open(f"shardfs://deep/sharded/c/0/1::zip://::file://{archive}") as file:
        assert file.read() == data
    assert ShardFileSystem(source=f"zip://::{archive}").cat_file("deep/sharded/c/0/1") == data


def test_sources_that_are_none_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ShardFileSystem(source=str(tmp_path / "nothing"))
    with pytest.raises(NotADatasetError):
        ShardFileSystem(source=str(tmp_path))
    with pytest.raises(ValueError, match="needs a source"):
        ShardFileSystem()
    with pytest.raises(ValueError, match="layout"):
        ShardFileSystem(source=str(tmp_path), layout="zarr9")


def test_instances_are_shared_and_can_be_sent(fs: ShardFileSystem, source: str) -> None:
    assert ShardFileSystem(source=source) is fs
    assert pickle.loads(pickle.dumps(fs)) is fs
    ShardFileSystem.clear_instance_cache()
    sent = pickle.loads(pickle.dumps(fs))
    assert sent is not fs
    assert sent == fs
    assert sent.cat_file("zarr.json") == fs.cat_file("zarr.json")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_instance_is_usable_after_a_fork(fs: ShardFileSystem) -> None:
    data, tree = fs.cat_file("deep/sharded/c/0/1"), fs.tree
    child = os.fork()
    if not child:
        ok = fs.cat_file("deep/sharded/c/0/1") == data and fs.tree is not tree
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fs.tree is tree


@pytest.mark.interop
def test_zarr_python_opens_it_in_one_line(source: str) -> None:
    array = zarr.open_array(f"shardfs::file://{source}/deep/sharded", mode="r")
    assert array.shards is None
    assert array.chunks == (10, 10)
    assert array.attrs["unit"] == "nm"
    _same(array[:], VALUES)


@pytest.mark.interop
def test_zarr_python_walks_the_groups(source: str) -> None:
    group = zarr.open_group(f"shardfs::file://{source}", mode="r")
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["deep", "deep/plain", "deep/sharded"]
    _same(group["deep/sharded"][35:45, 35:45], VALUES[35:45, 35:45])
    _same(group["deep/plain"][:], VALUES)
    store = zarr.storage.FsspecStore.from_url("shardfs://", storage_options={"source": source}, read_only=True)
    _same(zarr.open_array(store, path="deep/sharded", mode="r")[:], VALUES)


@pytest.mark.interop
def test_dask_reads_it(source: str) -> None:
    da = pytest.importorskip("dask.array")
    array = da.from_zarr(zarr.open_array(f"shardfs::file://{source}/deep/sharded", mode="r"))
    _same(array.compute(scheduler="threads"), VALUES)
    assert array.chunksize == (10, 10)


def _same(array: npt.NDArray[np.uint16], wanted: npt.NDArray[np.uint16]) -> None:
    np.testing.assert_array_equal(array, wanted)
