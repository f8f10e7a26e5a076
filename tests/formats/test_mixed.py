"""Trees that mix formats: what each directory is, its own documents say."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import blosc
import fsspec
import numpy as np
import pytest

from shardfs.formats.registry import formats, sources, views
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError, NotADatasetError, UnsupportedError
from shardfs.vfs import chunk_trees
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from tests import data_bcolz, data_blosc2, data_n5, handmade, handmade_ids
from tests.data_zarr_transformer import array_document, contents, named, pack_shards, sharding, write_hierarchy
from tests.mount.programs import link_tree, shardfs
from tests.suites.walking import entries, read_all, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from subprocess import CompletedProcess

    from tests.conftest import Mounted
    from tests.datasets import Dataset

GOLDEN = Path(__file__).parents[1] / "golden"


class Planted(NamedTuple):
    """A dataset somewhere in the tree."""

    format: str
    collections: frozenset[str]
    shown: Mapping[str, bytes]
    """Chunks that must be there, and nothing that is called like them."""


@pytest.fixture
def planted(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> dict[str, Planted]:
    """By directory below `tmp_path / "tree"`, some of them in directories of others."""
    root = tmp_path / "tree"
    out = {}

    def plant(path: str, format: str, collections: set[str], tree_files: Mapping[str, bytes]) -> None:
        inside = frozenset(f"{path}/{c}".rstrip("/") for c in collections)
        out[path] = Planted(format, inside, {f"{path}/{name}": data for name, data in tree_files.items()})

    image, volume = dataset("zarr3", "ome_pyramid"), dataset("precomputed", "two_scales")
    link_tree(image.path, root / "lab/image.zarr")
    plant("lab/image.zarr", "zarr3", {"0", "1", "2"}, _chunks(image.twin, "zarr.json"))
    link_tree(volume.path, root / "lab/em")
    plant("lab/em", "precomputed", {"16_16_40"}, _chunks(volume.twin, "info"))
    plant("lab/em/meshes", "precomputed", {""}, handmade_ids.CASES["meshes_sound"](root / "lab/em/meshes").good)
    for name in ("java", "seed", "nested_headerless"):
        stored_files, view = data_n5.golden()[name]
        handmade.write_files(root / f"lab/container.n5/{name}", stored_files)
        chunks = {block: data for block, data in view.items() if block != "attributes.json"}
        plant(f"lab/container.n5/{name}", "n5", {""}, chunks)
    handmade.write_files(root / "lab/container.n5", {"attributes.json": b'{"n5": "4.0.0"}'})
    cells: dict[tuple[int, ...], bytes] = {(i, j): bytes([i, j]) for i in range(3) for j in range(4)}
    stored_files = {f"g/c0/{name}": data for name, data in named(pack_shards(cells, (2, 3))).items()}
    write_hierarchy(root / "old/draft", {"g/c0": array_document((3, 4), (1, 1), sharding(2, 3))}, stored_files)
    view = {f"data/root/g/c0/{name}": data for name, data in named(cells).items()}
    plant("old/draft", "zarr3-draft", {"data/root/g/c0"}, view)
    # A draft describes what is in `data` and `meta`, and nothing beside them.
    plant("old/draft/beside", "zarr3", {""}, handmade.zarr_sound(root / "old/draft/beside").good)
    column = np.arange(50, dtype="<i4")
    data_bcolz.write_array(root / "old/column", column, 7, 5)
    blocks = [data_bcolz.BLP + chunk for chunk in data_bcolz.chunks_of(column, 7)]
    plant("old/column", "bcolz", {"data"}, {f"data/__{i}.blp": chunk for i, chunk in enumerate(blocks)})
    (root / "old/pack.blp").write_bytes((GOLDEN / "bloscpack/plain-crc32.blp").read_bytes())
    pack = open_tree(str(root / "old"))
    blocks = [bytes(pack.read(pack.resolve(f"pack.blp/data/__{i}.blp").number, 0, 1 << 20)) for i in range(5)]
    assert len(b"".join(blosc.decompress(block[16:]) for block in blocks)) == 400
    plant("old/pack.blp", "bloscpack", {"data"}, {f"data/__{i}.blp": block for i, block in enumerate(blocks)})
    blocks = [data_blosc2.chunk(bytes([i]) * 16) for i in range(3)]
    handmade.write_files(root, {"lab/frame.b2frame": data_blosc2.frame(blocks, 16)})
    plant("lab/frame.b2frame", "blosc2", {""}, {f"{i:08d}.chunk": block for i, block in enumerate(blocks)})
    handmade.write_files(root / "v2.zarr", {".zarray": b'{"zarr_format": 2}', "0.0": b"as", "c/0/0": b"it is"})
    return out


def _chunks(twin: Path, document: str) -> dict[str, bytes]:
    return {name: data for name, data in contents(twin).items() if Path(name).name != document}


def test_every_directory_is_shown_as_what_it_is(planted: Mapping[str, Planted], tmp_path: Path) -> None:
    tree = open_tree(str(tmp_path / "tree"))
    tree_files = walk(tree)
    for path, one in planted.items():
        assert {name: tree_files.get(name) for name in one.shown} == one.shown, path
    assert {name: data for name, data in tree_files.items() if name.startswith("v2.zarr/")} == {
        f"v2.zarr/{name}": data for name, data in contents(tmp_path / "tree/v2.zarr").items()
    }
    told = {(summary.path, summary.format) for summary in tree.survey.summaries()}
    wanted = {(path, one.format) for one in planted.values() for path in one.collections}
    assert told == wanted
    assert tree.problems() == []


def test_the_same_through_fsspec_and_a_mount(planted: Mapping[str, Planted], mounted: Mounted, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    tree_files = walk(open_tree(str(source)))
    fs = ShardFileSystem(str(source), skip_instance_cache=True)
    assert {name: fs.cat_file(name) for name in fs.find("")} == {f"/{name}": data for name, data in tree_files.items()}
    with mounted(source) as mount:
        assert contents(mount) == tree_files


def test_info_and_locate_know_each_of_them(planted: Mapping[str, Planted], tmp_path: Path) -> None:
    source = tmp_path / "tree"
    told = _json(shardfs("info", source, "--json"))
    format_by_path = {collection["path"]: collection["format"] for collection in told["collections"]}
    for one in planted.values():
        assert {path: format_by_path.get(path) for path in one.collections} == dict.fromkeys(
            one.collections, one.format
        )
        name = sorted(one.shown)[0]
        where = _json(shardfs("locate", source, name, "--json"))
        assert where["collection"] in one.collections
        assert (source / where["shard"].partition("[")[0]).is_file()
        if "[" in where["shard"]:
            continue  # a place in a shard of a shard has no path
        requests = ("--shard", where["shard"], "--offset", str(where["offset"]))
        assert _json(shardfs("locate", source, *requests, "--json"))["path"] == name


def _json(run: CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    out: dict[str, Any] = json.loads(run.stdout)
    return out


def test_every_registered_system_is_among_them(planted: Mapping[str, Planted]) -> None:
    """Skeletons and annotations are found as meshes are, by documents of their own."""
    assert {one.format for one in planted.values()} == {name for f in formats() for name in f.dataset_formats}


def test_the_documentation_has_a_row_for_each_format_and_layout() -> None:
    text = (Path(__file__).parents[2] / "docs/layouts.md").read_text()
    rows = [tuple(line.split(" | ")[:2]) for line in text.splitlines() if line.startswith("| ")]
    names = [name for f in sources() for name in f.dataset_formats]
    assert [row for row in rows if row[0][2:] in names] == [(f"| {name}", view) for name in names for view in views()]


def test_the_documentation_names_the_documents_of_each_format() -> None:
    text = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    assert all(f"`{f.documents[0]}`" in text for f in formats() if f.documents)


def _frame_beside_an_array(root: Path) -> Mapping[str, bytes]:
    """What is shown of the array; the frame is `x.b2frame`."""
    handmade.write_files(root, {"x.b2frame": data_blosc2.frame([data_blosc2.chunk(bytes(16))] * 30, 16)})
    return handmade.zarr_sound(root / "array").good


def test_a_file_that_cannot_be_opened_as_a_directory_harms_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = _frame_beside_an_array(tmp_path)
    monkeypatch.setattr(chunk_trees, "MAX_NODES", 20)  # of which the array has fewer
    tree = open_tree(str(tmp_path))
    assert {(e.name, e.directory) for e in entries(tree, ROOT)} == {(b"x.b2frame", True), (b"array", True)}
    with pytest.raises(CorruptShardError, match=r"x\.b2frame.*beyond"):
        list(entries(tree, tree.resolve("x.b2frame").number))
    for name, data in good.items():
        assert read_all(tree, tree.resolve(f"array/{name}")) == data
    assert [summary.path for summary in tree.survey.summaries()] == ["array"]
    assert [problem.path for problem in tree.problems()] == ["x.b2frame"]


def test_a_file_that_a_layout_cannot_express_harms_nothing_beside_it(tmp_path: Path) -> None:
    handmade.zarr_sound(tmp_path / "array")
    tree = open_tree(str(tmp_path), layout="zarr2")
    _frame_beside_an_array(tmp_path)  # after the layout was found to be possible
    assert {(e.name, e.directory) for e in entries(tree, ROOT)} >= {(b"x.b2frame", True), (b"array", True)}
    assert tree.resolve("array/.zarray").size > 0
    with pytest.raises(UnsupportedError, match=r"x\.b2frame"):
        list(entries(tree, tree.resolve("x.b2frame").number))


def test_nothing_that_lies_in_an_array_is_a_dataset(tmp_path: Path) -> None:
    """Directories of chunks are many; and `info`, which does not look into arrays, and `ls` are to agree."""
    handmade.zarr_sound(tmp_path / "array")
    stored_files, _ = data_n5.golden()["seed"]
    for name in ("array/other/seed", "column/data/seed"):
        handmade.write_files(tmp_path / name, stored_files)
    handmade.write_files(tmp_path / "column", {"meta/sizes": b"{}", "meta/storage": b"{}", "data/__0.blp": b"x"})
    (tmp_path / "column/data/x.blp").write_bytes((GOLDEN / "bloscpack/plain-crc32.blp").read_bytes())
    tree = open_tree(str(tmp_path))
    told = [summary.path for summary in tree.survey.summaries()]
    tree_files = walk(tree)
    assert told == ["array"]
    inside = {name: data for name, data in contents(tmp_path).items() if "seed" in name or name.startswith("column")}
    assert {name: tree_files.get(name) for name in inside} == inside


FILES = {"plain-crc32.blp": (GOLDEN / "bloscpack/plain-crc32.blp").read_bytes(),
         "x.b2nd": data_blosc2.frame([data_blosc2.chunk(bytes([i]) * 16) for i in range(3)], 16)}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_the_source_may_be_such_a_file(name: str, scheme: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    wanted = {path.removeprefix(f"{name}/"): data for path, data in walk(open_tree(str(tmp_path))).items()}
    assert len(wanted) >= 4
    source = f"{scheme}{tmp_path / name}"
    if scheme:
        fsspec.filesystem("memory").pipe_file(str(tmp_path / name), FILES[name])
    tree = open_tree(source)
    assert walk(tree) == wanted
    assert [summary.shards for summary in tree.survey.summaries()] == [1]
    chunk = next(path for path in wanted if path.endswith(("__1.blp", "01.chunk")))
    assert tree.survey.chunk_at(*tree.locate(chunk)[2:4]) == chunk
    if not scheme:
        assert {e.mtime_ns for e in entries(tree, ROOT)} == {(tmp_path / name).stat().st_mtime_ns}
    else:
        fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_error_of_the_network_does_not_make_such_a_file_a_plain_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    array = handmade.zarr_metadata((4,), (4,), (2,))
    memory.pipe_file("/root/a/zarr.json", json.dumps(array).encode())
    memory.pipe_file(f"/root/{name}", FILES[name])
    read = type(memory).cat_file

    def fail(self: object, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(name):
            raise OSError(errno.EIO, "connection lost", path)
        return read(self, path, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(type(memory), "cat_file", fail)
        tree = open_tree("memory://root")
        assert {e.name: e.size for e in entries(tree, ROOT)}[name.encode()] == -1
        for _ in range(2):
            with pytest.raises(OSError, match="connection lost"):
                tree.resolve(name)
        assert [(p.path, p.damaged) for p in tree.problems()] == [(name, True)]
        with pytest.raises(OSError, match="connection lost"):
            open_tree(f"memory://root/{name}")
    assert tree.resolve(name).directory
    assert {path for path in walk(tree) if path.startswith(f"{name}/")} == {
        f"{name}/{path}" for path in walk(open_tree(f"memory://root/{name}"))
    }


def test_a_mount_of_a_file(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "x.b2nd").write_bytes(FILES["x.b2nd"])
    with mounted(tmp_path / "x.b2nd") as mount:
        assert {path.name for path in mount.iterdir()} == {*(f"0000000{i}.chunk" for i in range(3)), "chunks.b2frame"}
        assert (mount / "00000001.chunk").read_bytes() == data_blosc2.chunk(b"\1" * 16)
        assert os.getxattr(mount / "00000001.chunk", "user.shardfs.shard") == b""


@pytest.mark.parametrize(("name", "chunk"), [("plain-crc32.blp", "data/__0.blp"), ("x.b2nd", "00000001.chunk")])
def test_a_file_of_chunks_that_becomes_empty_under_a_mount_is_damaged(name: str, chunk: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    tree = open_tree(str(tmp_path), index_ttl_s=0)
    entry = tree.resolve(f"{name}/{chunk}")
    assert entry.size
    os.truncate(tmp_path / name, 0)
    with pytest.raises(CorruptShardError, match=name):
        tree.read(entry.number, 0, 10)
    with pytest.raises(CorruptShardError, match=name):
        tree.attributes(entry.number)


def test_any_other_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(FILES["x.b2nd"])
    (tmp_path / "cut.b2nd").write_bytes(FILES["x.b2nd"][:60])
    (tmp_path / "empty.blp").write_bytes(b"")
    for name in ("x.bin", "empty.blp"):
        with pytest.raises(NotADirectoryError, match="no dataset by itself"):
            open_tree(str(tmp_path / name))
    with pytest.raises(NotADatasetError, match="header"):
        open_tree(str(tmp_path / "cut.b2nd"))
