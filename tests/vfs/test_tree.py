"""The tree against what the same writers leave unsharded, and against a dictionary."""

from __future__ import annotations

import errno
import gzip
import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.model.errors import CorruptShardError, NotADatasetError
from shardfs.model.listing import REST
from shardfs.vfs.inodes import ROOT, TABLE_END
from shardfs.vfs.tree import Tree, open_tree
from tests import datasets, handmade
from tests.storage.test_store import http_server
from tests.strategies import sparse_arrays, sparse_volumes
from tests.suites import Sparse, ViewSuite
from tests.suites.walking import entries, parsed, read_all, walk

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from tests.datasets import Dataset

GZIP = b"\x1f\x8b"


def _expected(dataset: Dataset) -> dict[str, Any]:
    return datasets.read_tree(dataset.twin)


def _check_twin(dataset: Dataset, source: str) -> None:
    tree_files, expected = parsed(walk(open_tree(source))), _expected(dataset)
    for name in tree_files.keys() & expected.keys():
        pair = tree_files[name], expected[name]
        # zlib's result may depend on what its buffers held before, so two writes of a chunk are not always equal.
        if pair[0] != pair[1] and all(isinstance(data, bytes) and data.startswith(GZIP) for data in pair):
            tree_files[name], expected[name] = map(gzip.decompress, pair)
    assert tree_files == expected


@pytest.mark.interop
def test_a_zarr_tree_is_its_unsharded_twin(zarr3_dataset: Dataset) -> None:
    _check_twin(zarr3_dataset, str(zarr3_dataset.path))


@pytest.mark.interop
def test_a_volume_is_its_unsharded_twin(precomputed_dataset: Dataset) -> None:
    _check_twin(precomputed_dataset, str(precomputed_dataset.path))


REMOTE = [
    ("zarr3", "default"),
    ("zarr3", "group_consolidated"),
    ("zarr3", "keys_default_dot"),
    ("zarr3", "nested"),
    ("zarr3", "gzip_after"),
    ("zarr3", "crc32c_after"),
    ("zarr3", "nested_gzip_after_inner"),
    ("zarr3", "rank_0"),
    ("zarr3", "rank_1"),
    ("zarr3", "rectilinear"),
    ("precomputed", "two_scales"),
    ("precomputed", "legacy_pair"),
]


@pytest.mark.interop
@pytest.mark.parametrize(("kind", "name"), REMOTE)
@pytest.mark.parametrize("where", ["memory", "file", "zip", "http"])
def test_the_same_tree_over_every_store(dataset: Any, kind: str, name: str, where: str, tmp_path: Path) -> None:
    data = dataset(kind, name)
    if where == "file":
        _check_twin(data, f"file://{data.path}")
    elif where == "memory":
        memory = fsspec.filesystem("memory")
        memory.put(f"{data.path}/", "/twin/", recursive=True)
        try:
            _check_twin(data, "memory://twin")
        finally:
            memory.rm("/twin", recursive=True)
    elif where == "zip":
        with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as z:
            for directory, _, names in os.walk(data.path):
                for file in names:
                    z.write(Path(directory, file), Path(directory, file).relative_to(data.path))
        _check_twin(data, f"zip://::file://{tmp_path}/x.zip")
    else:
        with http_server(data.path) as (url, _):
            _check_over_http(data, url)


def _check_over_http(data: Dataset, url: str) -> None:
    """Every name that the twin has; a plain server lists nothing that could be relied on."""
    tree = open_tree(url) if data.name not in ("group_consolidated",) else open_tree(f"{url}/labels/cells")
    root = data.twin if data.name not in ("group_consolidated",) else data.twin / "labels/cells"
    for name, wanted in datasets.read_tree(root).items():
        assert parsed({name: read_all(tree, tree.resolve(name))}) == {name: wanted}
    with pytest.raises(FileNotFoundError):
        tree.resolve("missing")


# ------------------------------------------------------------------------------------ against a dictionary


class TestArrays(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_arrays()


class TestVolumes(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_volumes()


# ------------------------------------------------------------------------------------------ numbers, paths


def test_numbers_are_stable_and_unique(tmp_path: Path) -> None:
    for name in ("a", "b/deep"):
        handmade.zarr_sound(tmp_path / name)
    handmade.volume_sound(tmp_path / "v")

    def numbers(tree: Tree, number: int = ROOT) -> list[int]:
        out = []
        for e in entries(tree, number):
            out += [e.number, *(numbers(tree, e.number) if e.directory else [])]
        return out

    tree = open_tree(str(tmp_path))
    first = numbers(tree)
    assert len(first) == len(set(first))
    assert numbers(tree) == first
    assert [n for n in numbers(open_tree(str(tmp_path))) if n < TABLE_END] == [n for n in first if n < TABLE_END]


def test_many_volumes_with_meshes_and_skeletons(tmp_path: Path) -> None:
    """Each of their collections of ids takes a large range of inode numbers."""
    sharding = {"@type": "neuroglancer_uint64_sharded_v1", "hash": "identity", "minishard_bits": 1, "shard_bits": 1}
    sharding |= {"preshift_bits": 1}
    for i in range(1000):
        for name, kind in (("mesh", "neuroglancer_multilod_draco"), ("skeletons", "neuroglancer_skeletons")):
            handmade.write_json(tmp_path / f"v{i}/{name}/info", {"@type": kind, "sharding": sharding})
    tree = open_tree(str(tmp_path))
    assert len([*tree.collections()]) == 2000
    assert tree.problems() == []


def test_inode_numbers_may_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfs.vfs.chunk_trees.CREATED", TABLE_END + 100)
    for name in "ab":
        handmade.write_json(tmp_path / name / "zarr.json", handmade.zarr_metadata((8, 8), (4, 4), (1, 1)))
    tree, failures = open_tree(str(tmp_path)), list[OSError]()
    for name in "ab":
        try:
            assert tree.resolve(f"{name}/c/0").directory
        except OSError as e:
            failures.append(e)
    assert [(e.errno, "no inode numbers are left" in str(e)) for e in failures] == [(errno.EOVERFLOW, True)]


def test_a_directory_of_more_arrays_than_recent_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfs.vfs.nodes.RECENT_NODES", 4)
    for i in range(9):
        handmade.zarr_sound(tmp_path / f"a{i}")
    assert sorted(s.path for s in open_tree(str(tmp_path)).survey.summaries()) == [f"a{i}" for i in range(9)]


def test_remembered_nodes_stay_until_they_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfs.vfs.nodes.RECENT_NODES", 4)
    handmade.zarr_sound(tmp_path / "a")
    handmade.write_files(tmp_path, {f"f{i}": b"%d" % i for i in range(20)})
    tree = open_tree(str(tmp_path))
    attributes = tree.lookup(ROOT, b"f0")
    tree.remember(attributes.number)
    for i in range(1, 20):
        tree.lookup(ROOT, b"f%d" % i)
    assert bytes(tree.read(attributes.number, 0, 9)) == b"0"
    forgotten = tree.lookup(ROOT, b"f1").number
    for i in range(2, 20):
        tree.lookup(ROOT, b"f%d" % i)
    with pytest.raises(FileNotFoundError):
        tree.attributes(forgotten)
    tree.remember(attributes.number)
    tree.forget(attributes.number, 1)
    assert tree.attributes(attributes.number).size == 1
    tree.forget(attributes.number, 1)
    for i in range(1, 20):
        tree.lookup(ROOT, b"f%d" % i)
    with pytest.raises(FileNotFoundError):
        tree.attributes(attributes.number)
    tree.forget(ROOT, 100)
    assert tree.attributes(ROOT).directory


def test_a_node_may_be_forgotten_while_it_is_looked_up(tmp_path: Path) -> None:
    """By another thread: the kernel asks anew for a name, and says of what it had before that it is not needed."""
    handmade.zarr_sound(tmp_path / "a")
    handmade.write_files(tmp_path, {"d/file": b"content"})
    tree = open_tree(str(tmp_path))
    number = tree.lookup(ROOT, b"d").number
    tree.remember(number)
    assert tree.lookup(ROOT, b"d").number == number
    tree.forget(number, 1)
    tree.remember(number)
    assert tree.lookup(number, b"file").size == 7


def test_errors_of_paths(tmp_path: Path) -> None:
    handmade.zarr_sound(tmp_path)
    (tmp_path / "note").write_bytes(b"hello")
    tree = open_tree(str(tmp_path))
    for path in ("x", "c/9/9", "c/00/0", "c/x", "../x", "c/..", "c/0/-1"):
        with pytest.raises(FileNotFoundError):
            tree.resolve(path)
    for path in ("c/0/0/x", "note/x", "zarr.json/x"):
        with pytest.raises(NotADirectoryError):
            tree.resolve(path)
    for path in ("note", "c/0/0", "zarr.json"):
        with pytest.raises(NotADirectoryError):
            list(tree.scan(tree.resolve(path).number))
    with pytest.raises(FileNotFoundError):
        tree.locate("note")
    with pytest.raises(FileNotFoundError):
        tree.locate("c/0")
    with pytest.raises(FileNotFoundError):
        tree.attributes(TABLE_END - 1)
    for path in ("", "/", "c", "c/1"):
        with pytest.raises((IsADirectoryError, FileNotFoundError)):
            tree.read(tree.resolve(path).number, 0, 1)


def test_a_source_without_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(NotADatasetError, match="no sharded"):
        open_tree(str(tmp_path))
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata([4], [4], [3]))
    with pytest.raises(NotADatasetError, match="does not consist of chunks of 3"):
        open_tree(str(tmp_path))


def test_foreign_files_are_passed_through_and_shards_are_not(tmp_path: Path) -> None:
    case = handmade.zarr_sound(tmp_path)
    foreign = {"note": b"1", "c/note": b"2", "c/0/note": b"3", "c/00": b"4", "c/deep/er": b"5", "other/c/0/0": b"6"}
    handmade.write_files(tmp_path, foreign)
    tree_files = walk(open_tree(str(tmp_path)))
    del tree_files["zarr.json"]
    assert tree_files == {**case.good, **foreign}


def test_foreign_files_are_resumed_too(tmp_path: Path) -> None:
    handmade.volume_sound(tmp_path)
    handmade.write_files(tmp_path / "s", {f"note{i}": b"" for i in range(30)})
    tree = open_tree(str(tmp_path))
    number = tree.resolve("s").number
    whole = list(entries(tree, number))
    assert len(whole) == 8 + 30
    assert [e.cookie >= REST for e in whole] == [False] * 8 + [True] * 30
    for at, e in enumerate(whole):
        assert list(entries(tree, number, e.cookie)) == whole[at + 1 :]


def test_summaries_count_what_is_there(tmp_path: Path) -> None:
    handmade.zarr_entries_outside_the_array(tmp_path / "a")
    handmade.volume_sound(tmp_path / "v")
    a, v = sorted(open_tree(str(tmp_path)).survey.summaries(), key=lambda s: s.path)
    assert (a.path, a.grid_chunks, a.shards, a.chunks) == ("a", 6, 2, 6)
    assert (v.path, v.grid_chunks, v.shards, v.chunks, v.stored_bytes) == ("v/s", 8, 1, 8, 32)


def test_a_zero_length_axis_can_be_listed_and_counted(tmp_path: Path) -> None:
    for separator in "/.":
        path = tmp_path / f"x{ord(separator)}"
        for name, shape in (("one", [0]), ("two", [0, 7])):
            document = handmade.zarr_metadata(shape, [4] * len(shape), [2] * len(shape), separator=separator)
            handmade.write_json(path / name / "zarr.json", document)
    tree = open_tree(str(tmp_path))
    assert {n.rsplit("/", 1)[-1] for n in walk(tree)} == {"zarr.json"}
    assert [s.chunks for s in tree.survey.summaries()] == [0] * 4


def test_an_absurdly_long_row_is_listed_from_what_the_shards_hold(tmp_path: Path) -> None:
    """Trying every place of a row of 2^50 would never end."""
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata([2, 2**51], [2, 4], [1, 2]))
    shard = handmade.zarr_shard([b"a", None, b"b", b"c"])
    far = 2**49 - 1
    handmade.write_files(tmp_path, {"c/0/0": shard, f"c/0/{far}": shard})
    tree = open_tree(str(tmp_path))
    for row, expected in ((0, [0, 2 * far]), (1, [0, 1, 2 * far, 2 * far + 1])):
        directory = tree.resolve(f"c/{row}").number
        batches = list(tree.scan(directory))
        names = [name for batch in batches for name in batch.names.tolist()]
        assert sorted(int(n) for n in names) == expected
        for batch in batches:
            for name, number in zip(batch.names.tolist(), batch.numbers.tolist(), strict=True):
                assert tree.lookup(directory, name).number == number
        first = next(tree.scan(directory)).cookies.tolist()[0]
        assert sum(len(batch.names) for batch in tree.scan(directory, first)) == len(names) - 1


# ------------------------------------------------------------------------------------------- huge directory


def _dense(path: Path, n: int, per: int) -> None:
    """A 1-d array of `n` one-byte chunks in shards of `per`, all in one flat directory."""
    document = handmade.zarr_metadata([n], [per], [1], separator=".")
    handmade.write_json(path / "zarr.json", document)
    entries = b"".join(struct.pack("<QQ", i, 1) for i in range(per))
    import google_crc32c

    index = entries + struct.pack("<I", google_crc32c.value(entries))
    shard = bytes(i % 251 for i in range(per)) + index
    for i in range(-(-n // per)):
        (path / f"c.{i}").write_bytes(shard)


@pytest.mark.parametrize("n", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_names_in_constant_memory(tmp_path: Path, n: int) -> None:
    _dense(tmp_path, n, 65_536)
    tree = open_tree(str(tmp_path), index_cache_bytes=4 << 20)
    next(tree.scan(ROOT))
    tracemalloc.start()
    try:
        count = last = 0
        middle = 0
        for batch in tree.scan(ROOT):
            assert len(batch.names) <= 4096
            assert int(batch.cookies[0]) > last
            last = int(batch.cookies[-1])
            count += len(batch.names)
            if middle == 0 and count > n // 2:
                middle, middle_count = last, count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == n + 1  # and zarr.json
    assert peak < 16 << 20
    assert sum(len(b.names) for b in tree.scan(ROOT, middle)) == count - middle_count


def test_metadata_keeps_order_and_unknown_members(tmp_path: Path) -> None:
    document = handmade.zarr_metadata((4, 8), (4, 4), (2, 2))
    document = {"x_first": {"must_understand": False}, **document, "attributes": {"z": 2**64 - 1, "a": "\u00b5 \ud800"}}
    raw = json.dumps(document)
    handmade.write_files(tmp_path, {"zarr.json": raw.encode()})
    content = json.loads(read_all(tree := open_tree(str(tmp_path)), tree.resolve("zarr.json")))
    assert list(content) == list(document)
    assert list(content["attributes"]) == ["z", "a"]
    changed = {n for n in document if document[n] != content[n]}
    assert changed == {"chunk_grid", "codecs"}


def test_chunks_of_a_damaged_shard_are_listed_and_cannot_be_opened(tmp_path: Path) -> None:
    """Who copies the directory shall copy what is sound, and learn of the rest."""
    document = handmade.zarr_metadata([16], [4], [1])
    handmade.write_json(tmp_path / "zarr.json", document)
    sound = handmade.zarr_shard([b"a", b"b", None, b"d"])
    handmade.write_files(tmp_path, {"c/0": b"x" * 80, "c/1": sound, "c/note": b"", "c/3": sound})
    (tmp_path / "c/2").mkdir()
    tree = open_tree(str(tmp_path))
    sizes = {e.name: e.size for e in entries(tree, tree.resolve("c").number)}
    assert list(sizes) == [*(b"%d" % i for i in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 15)), b"note"]
    for i in (*range(4), *range(8, 12)):
        assert sizes[b"%d" % i] == -1
        with pytest.raises(CorruptShardError):
            tree.resolve(f"c/{i}")


def test_a_damaged_shard_of_a_volume_is_listed_and_cannot_be_opened(tmp_path: Path) -> None:
    """Which chunks are missing is not known."""
    case = handmade.CASES["volume_index_not_gzip"](tmp_path / "v")
    tree = open_tree(str(case.path))
    directory = tree.resolve("s").number
    sizes = {e.name: e.size for e in entries(tree, directory)}
    assert {n for n, size in sizes.items() if size >= 0} == {n.removeprefix("s/").encode() for n in case.good}
    [shard] = [n for n, size in sizes.items() if size < 0]
    with pytest.raises(CorruptShardError):
        tree.lookup(directory, shard)
    [last] = [e.cookie for e in entries(tree, directory) if e.name == shard]
    assert [batch.names.tolist() for batch in tree.scan(directory, last)] == []


def test_a_directory_in_place_of_a_shard_of_a_volume_is_listed_and_cannot_be_opened(tmp_path: Path) -> None:
    """No index names the chunks that it may hide."""
    handmade.write_json(tmp_path / "info", handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(shard=1)))
    (tmp_path / "s/1.shard").mkdir(parents=True)
    tree = open_tree(str(tmp_path))
    number = tree.resolve("s").number
    assert [(e.name, e.size) for e in entries(tree, number)] == [(b"1.shard", -1)]
    assert len([*tree.survey.summaries()]) == 1
    with pytest.raises(CorruptShardError, match="is a directory"):
        tree.lookup(number, b"1.shard")


def test_a_link_that_leads_nowhere_in_place_of_a_directory_of_shards_is_listed(tmp_path: Path) -> None:
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata([16], [4], [1]))
    (tmp_path / "c").symlink_to("nowhere")
    tree = open_tree(str(tmp_path))
    assert [(e.name, e.size) for e in entries(tree, tree.resolve("c").number)] == [(b"c", -1)]
    with pytest.raises(CorruptShardError, match="leads nowhere"):
        tree.resolve("c/0")


def test_damage_in_an_outer_shard_hides_only_what_lies_in_it(tmp_path: Path) -> None:
    inner_codec = handmade.zarr_metadata([8], [2], [1])["codecs"]
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata([8], [4], [2], codecs=inner_codec))
    shard = handmade.zarr_shard([handmade.zarr_shard([b"a", b"b"]), handmade.zarr_shard([b"c", None])])
    handmade.write_files(tmp_path, {"c/0": b"x" * 100, "c/1": shard})
    tree = open_tree(str(tmp_path))
    names = [e.name for e in entries(tree, tree.resolve("c").number)]
    assert names == [b"4", b"5", b"6", b"0"]
    with pytest.raises(CorruptShardError):
        tree.resolve("c/0")
    assert [s.chunks for s in tree.survey.summaries()] == [3]


def test_a_remote_file_that_was_replaced_is_read_anew_though_its_size_was_dropped_from_the_cache() -> None:
    """The cache may have its bytes for longer than its attributes."""
    memory = fsspec.filesystem("memory")
    memory.pipe({"/replaced/zarr.json": json.dumps(handmade.zarr_metadata([16], [4], [1])).encode()})
    memory.pipe({"/replaced/notes": b"old bytes"})
    tree = open_tree("memory://replaced")
    number = tree.resolve("notes").number
    assert bytes(tree.read(number, 0, 100)) == b"old bytes"
    tree.datasets.chunk_cache.invalidate(("notes", "stat"))
    memory.pipe({"/replaced/notes": b"new bytes"})
    tree.changed("notes")
    assert bytes(tree.read(number, 0, 100)) == b"new bytes"
