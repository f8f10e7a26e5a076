"""Precomputed data keyed by ids: manifests, info documents, and views of what other programs wrote."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.precomputed.ids import fragments_size
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.storage.remote import FsspecStore
from shardfs.vfs import chunk_listing
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests import data_precomputed_ids, handmade, handmade_ids
from tests.datasets import read_tree
from tests.storage.test_store import RangeHandler, http_server
from tests.strategies import sparse_annotations, sparse_meshes, sparse_skeletons, uint64_sharded_id_samples
from tests.suites import Sample, ShardFormatSuite, Sparse, ViewSuite
from tests.suites.walking import entries, parsed, read_all, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.dataset import Dataset
    from shardfs.storage.store import Store
    from tests.data_precomputed_ids import IdDataset


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return uint64_sharded_id_samples()


class TestSkeletons(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_skeletons()


class TestMeshes(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_meshes()


class TestAnnotations(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_annotations()


# ---- manifests ----

LEVELS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=6), max_size=6)


@given(LEVELS)
def test_the_size_of_fragments_is_the_sum_of_all(levels: list[list[int]]) -> None:
    assert fragments_size(handmade_ids.manifest(levels)) == sum(map(sum, levels))


@given(LEVELS, st.integers(1, 40), st.binary(min_size=1, max_size=40))
def test_a_manifest_of_another_length_is_none(levels: list[list[int]], cut: int, more: bytes) -> None:
    manifest = handmade_ids.manifest(levels)
    for wrong in (manifest[:-cut], manifest + more):
        with pytest.raises(ValueError, match="manifest"):
            fragments_size(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_not(data: bytes) -> None:
    with suppress(ValueError):
        assert 0 <= fragments_size(data) < 2**64


@pytest.mark.parametrize(
    "manifest",
    [
        handmade_ids.manifest([])[:24] + b"\xff\xff\xff\xff",
        handmade_ids.manifest([[1]])[:44] + b"\xff\xff\xff\xff" + bytes(16),
        handmade_ids.manifest([[1]] * 9)[: 28 + 16 * 9] + b"\xff" * 36 + bytes(16 * 9),
    ],
)
def test_a_manifest_that_claims_billions_allocates_nothing(manifest: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="manifest"):
            fragments_size(manifest)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# ---- info documents ----

SPEC = handmade.sharding(minishard=2, shard=3, data="gzip")
ANNOTATIONS: dict[str, Any] = {
    "@type": "neuroglancer_annotations_v1",
    "dimensions": {"x": [1, "m"]},
    "by_id": {"key": "by_id", "sharding": SPEC},
    "relationships": [{"id": "a", "key": "rel/a", "sharding": SPEC}, {"id": "b", "key": "rel_b"}],
    "spatial": [
        {"key": "spatial0", "grid_shape": [1, 1], "limit": 2**64, "sharding": None},
        {"key": "spatial1", "grid_shape": [5, 3], "chunk_size": [1.5, 2], "sharding": SPEC, "last": 1},
    ],
    "example_member": 2**64,
}


def _open(document: Any) -> Dataset:
    dataset = PRECOMPUTED.open("d", {"info": json.dumps(document).encode()})
    assert dataset is not None
    return dataset


def _shown(document: Any) -> Any:
    return json.loads(_open(document).documents["info"])


@pytest.mark.parametrize("document", [handmade_ids.MESHES, handmade_ids.SKELETONS])
def test_of_meshes_and_skeletons_sharding_alone_is_deleted(document: dict[str, Any]) -> None:
    source_documents = {"first": 2**64, **document, "sharding": SPEC, "mip": 3, "spatial_index": None}
    unsharded = _shown(source_documents)
    assert unsharded == {k: v for k, v in source_documents.items() if k != "sharding"}
    assert list(unsharded) == [k for k in source_documents if k != "sharding"]
    (collection,) = _open(source_documents).collections
    assert collection.path == ""
    assert (collection.lead is not None) == (document is handmade_ids.MESHES)


def test_of_annotations_sharding_is_deleted_where_it_is() -> None:
    unsharded = _shown(ANNOTATIONS)
    wanted = json.loads(json.dumps(ANNOTATIONS))
    for index in (wanted["by_id"], wanted["relationships"][0], wanted["spatial"][1]):
        del index["sharding"]
    assert unsharded == wanted
    assert list(unsharded) == list(wanted)
    assert [c.path for c in _open(ANNOTATIONS).collections] == ["by_id", "rel/a", "spatial1"]


def test_directories_of_plain_chunks_are_not_walked() -> None:
    assert _open(ANNOTATIONS).unwalked == {"by_id", "rel_b", "spatial0", "spatial1"}


def test_one_index_that_is_not_understood_leaves_the_others() -> None:
    odd = {**SPEC, "hash": "sha256"}
    document = {**ANNOTATIONS, "by_id": {"key": "by_id", "sharding": odd}}
    dataset = _open(document)
    assert [c.path for c in dataset.collections] == ["rel/a", "spatial1"]
    assert [(p.path, p.why) for p in dataset.problems] == [
        ("d/by_id", "info, by_id: hash should be one of identity, murmurhash3_x86_128, not 'sha256'")
    ]
    assert json.loads(dataset.documents["info"])["by_id"] == document["by_id"]


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        ([], "list of 1 to 64"),
        ([1] * 65, "list of 1 to 64"),
        ("1_2", "list of 1 to 64"),
        (None, "list of 1 to 64"),
        ([0, 2], r"integer in \[1, "),
        ([2, -1], r"integer in \[1, "),
        ([2.0, 1], r"integer in \[1, "),
        ([2**40, 2**40], "64 is the limit"),
    ],
)
def test_grids_of_annotations_that_cannot_be(grid: Any, why: str) -> None:
    level = {"key": "s", "grid_shape": grid, "sharding": SPEC}
    dataset = _open({**ANNOTATIONS, "spatial": [level]})
    assert len(dataset.collections) == 2
    with pytest.raises(ValueError, match=why):
        raise ValueError(dataset.problems[0].why)


@pytest.mark.parametrize("key", ["", "..", "/a", "a/../..", "a\0b", 7, None, ["a"]])
def test_keys_that_leave_the_directory(key: Any) -> None:
    dataset = _open({**ANNOTATIONS, "by_id": {"key": key, "sharding": SPEC}})
    assert len(dataset.collections) == 2
    assert len(dataset.problems) == 1


@pytest.mark.parametrize("member", ["by_id", "relationships", "spatial"])
@pytest.mark.parametrize("value", [None, 7, "x", {}, []])
def test_members_of_any_type(member: str, value: Any) -> None:
    document = {**ANNOTATIONS, member: value}
    if member != "by_id" and not isinstance(value, list):
        with pytest.raises(CorruptShardError, match="should be a list"):
            _open(document)
    else:
        assert _shown(document)[member] == value


@pytest.mark.parametrize("member", ["relationships", "spatial"])
def test_lists_of_absurd_length(member: str) -> None:
    with pytest.raises(CorruptShardError, match="1000 is the limit"):
        _open({**ANNOTATIONS, member: [{}] * 1001})


@pytest.mark.parametrize("kind", ["neuroglancer_multilod_draco", "neuroglancer_skeletons", "neuroglancer_legacy_mesh"])
@pytest.mark.parametrize("members", [{}, {"sharding": None}])
def test_what_is_not_sharded_is_left_alone(kind: str, members: dict[str, Any]) -> None:
    dataset = _open({"@type": kind, **members})
    assert dataset.collections == ()
    assert dataset.problems == ()
    assert dataset.documents == {}
    assert dataset.closed


@pytest.mark.parametrize("document", [handmade_ids.MESHES, handmade_ids.SKELETONS])
def test_sharding_that_is_not_understood_is_told(document: dict[str, Any]) -> None:
    dataset = _open({**document, "sharding": {**SPEC, "minishard_bits": 33}})
    assert dataset.collections == ()
    assert dataset.documents == {}
    assert [(p.path, p.why) for p in dataset.problems] == [
        ("d", "info: minishard_bits should be an integer in [0, 21], not 33")
    ]


def test_segment_properties_of_any_size_pass_through() -> None:
    begin = b'\n{ "@type" : "neuroglancer_segment_properties", "inline": {"ids": ['
    assert PRECOMPUTED.open("d", {"info": begin + b"1," * 3_000_000 + b"1]}}"}) is None
    assert PRECOMPUTED.open("d", {"info": begin}) is None
    other = {"inline": {"ids": ["1"]}, "@type": "neuroglancer_segment_properties"}
    assert PRECOMPUTED.open("d", {"info": json.dumps(other).encode()}) is None


@pytest.mark.parametrize(
    ("member", "named"),
    [("meshes/fine", ("meshes/fine",)), ("./m/", ("m",)), ("../m", ()), ("", ()), (7, ()), (None, ()), ("a\0", ())],
)
def test_a_volume_names_directories(member: Any, named: tuple[str, ...]) -> None:
    volume = handmade.volume_info((2, 1, 1), (1, 1, 1), SPEC)
    assert _open({**volume, "mesh": member}).named == named


# ---- views ----


def _tree(store: Store) -> Tree:
    return Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20)))


def _remote(path: Path) -> Store:
    return FsspecStore(fsspec.filesystem("file"), str(path))


class Forbidding(RangeHandler):
    """As object stores answer: a directory is nothing."""

    error = 403

    def send_head(self) -> Any:
        if Path(self.translate_path(self.path)).is_dir():
            self.send_error(self.error)
            return None
        return super().send_head()


class Denying(Forbidding):
    error = 404


@pytest.mark.parametrize("handler", [Forbidding, Denying])
@pytest.mark.parametrize("with_sharded_scale", [True, False])
def test_what_a_volume_names_is_found_on_a_store_that_lists_nothing(
    handler: type[Forbidding], with_sharded_scale: bool, tmp_path: Path
) -> None:
    variant = data_precomputed_ids.DATASETS["nested"](tmp_path)
    wanted = read_tree(variant.twin)
    if not with_sharded_scale:
        (variant.path / "info").write_bytes((variant.twin / "info").read_bytes())
    with http_server(variant.path, handler) as (url, _):
        tree = open_tree(url)
        assert {e.name for e in entries(tree, ROOT)} >= {b"meshes", b"deep", b"props"}
        assert {e.name for e in entries(tree, tree.resolve("deep/er").number)} == {b"skeletons"}
        for name in ("meshes/fine/7", "meshes/fine/7.index", "meshes/fine/info", "deep/er/skeletons/7", "props/info"):
            assert parsed({name: read_all(tree, tree.resolve(name))}) == {name: wanted[name]}
        for name in ("meshes/8", "meshes/fine/8", "deep/7", "deep/er/other"):
            with pytest.raises(FileNotFoundError):
                tree.resolve(name)
        assert {c.path for c in tree.collections()} >= {"meshes/fine", "deep/er/skeletons"}


def test_what_a_volume_names_but_has_not_is_not_shown(tmp_path: Path) -> None:
    info = {**handmade.volume_info((2, 1, 1), (1, 1, 1), SPEC), "mesh": "gone/fine"}
    handmade.write_json(tmp_path / "info", info)
    tree = open_tree(str(tmp_path))
    assert {e.name for e in entries(tree, ROOT)} == {b"info", b"s"}
    with pytest.raises(FileNotFoundError):
        tree.resolve("gone")


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(data_precomputed_ids.DATASETS))
def test_the_view_is_the_tree_of_the_twin(name: str, id_dataset: Callable[[str], IdDataset]) -> None:
    variant = id_dataset(name)
    twin = read_tree(variant.twin)
    for store in (LocalStore(str(variant.path)), _remote(variant.path)):
        assert parsed(walk(_tree(store))) == twin


@pytest.mark.interop
def test_manifests_that_igneous_wrote_tell_the_size_of_their_fragments(id_dataset: Callable[[str], IdDataset]) -> None:
    files = sorted((id_dataset("igneous_murmur").twin / "mesh").glob("*.index"))
    assert len(files) == 9
    for file in files:
        assert fragments_size(file.read_bytes()) == file.with_suffix("").stat().st_size


@pytest.mark.parametrize("name", sorted(handmade_ids.CASES))
def test_damage_harms_nothing_beside_it(name: str, tmp_path: Path) -> None:
    case = handmade_ids.CASES[name](tmp_path / "x")
    for store in (LocalStore(str(case.path)), _remote(case.path)):
        tree = _tree(store)
        for file in case.bad:
            with pytest.raises(CorruptShardError) as e:
                read_all(tree, tree.resolve(file))
            assert e.value.why
            assert "0.shard" in str(e.value)
        for file in case.absent:
            with pytest.raises(FileNotFoundError):
                tree.resolve(file)
        assert {file: read_all(tree, tree.resolve(file)) for file in case.good} == dict(case.good)
        listed = _names(tree)
        assert listed >= set(case.good)
        assert listed.isdisjoint(case.absent)


def _names(tree: Tree, number: int = ROOT, path: str = "") -> set[str]:
    out = set()
    for e in entries(tree, number):
        name = f"{path}{e.name.decode()}"
        out |= _names(tree, e.number, f"{name}/") if e.directory else {name}
    return out


@pytest.mark.parametrize("data", ["raw", "gzip"])
def test_a_shard_that_is_replaced(data: str, tmp_path: Path) -> None:
    """By one with a manifest at the same place that says something else."""

    def write(sizes: list[int]) -> dict[str, bytes]:
        fragments, manifest = b"%d" % sizes[0] * sum(sizes), handmade_ids.manifest([sizes])
        source_bytes = gzip.compress(manifest, 0, mtime=0) if data == "gzip" else manifest
        shard = handmade_ids.mesh_shard([{0: (b"-" * (9 - len(fragments)) + fragments, source_bytes)}, {}])
        (tmp_path / "new").write_bytes(shard)
        (tmp_path / "new").rename(tmp_path / "0.shard")
        return {"0": fragments, "0.index": manifest}

    handmade.write_json(tmp_path / "info", {**handmade_ids.MESHES, "sharding": handmade.sharding(data=data)})
    tree = Tree(Datasets(LocalStore(str(tmp_path)), ByteLRU(1 << 20), ByteLRU(0), index_ttl_s=0))
    for sizes in ([3, 4], [1, 2], [4, 3]):
        tree_files = write(sizes)
        assert {name: read_all(tree, tree.resolve(name)) for name in tree_files} == tree_files


def test_a_million_ids_are_listed_in_little_memory(tmp_path: Path) -> None:
    """Each once, ids of 64 bits among them, in memory that an index cache of 1 MiB bounds, begun anywhere."""
    count, minishards = 1_000_000, 256
    ids = np.arange(count, dtype=np.uint64) + np.repeat(np.array([0, 2**63], np.uint64), count // 2)
    rows = [ids[ids % np.uint64(minishards) == np.uint64(m)] for m in range(minishards)]
    indices = [
        np.stack([np.diff(row, prepend=np.uint64(0)), np.zeros_like(row), np.zeros_like(row)]).astype("<u8").tobytes()
        for row in rows
    ]
    ends = np.cumsum([len(index) for index in indices])
    bounds = np.stack([ends - [len(index) for index in indices], ends], axis=1).astype("<u8")
    spec = handmade.sharding(minishard=8)
    handmade.write_json(tmp_path / "info", {**handmade_ids.SKELETONS, "sharding": spec})
    (tmp_path / "0.shard").write_bytes(bounds.tobytes() + b"".join(indices))

    tree = Tree(Datasets(LocalStore(str(tmp_path)), ByteLRU(1 << 20), ByteLRU(0)))
    values = np.concatenate([b.names.astype("S20") for b in tree.scan(ROOT)])
    assert sorted(map(int, values[:-1].tolist())) == ids.tolist()
    assert values[-1] == b"info"
    tracemalloc.start()
    try:
        names, cookie = 0, 0
        for batch in tree.scan(ROOT):
            names, cookie = names + len(batch.names), int(batch.cookies[-1])
            if names > count // 3:
                break
        assert names + sum(len(batch.names) for batch in tree.scan(ROOT, cookie)) == count + 1
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_of_very_many_ids_the_kernel_is_told_the_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_listing, "IDS_WITH_INODES", 3)
    minishards = [[handmade.Entry(2 * i + m, bytes(i)) for i in range(3)] for m in range(2)]
    handmade.write_json(tmp_path / "info", {**handmade_ids.SKELETONS, "sharding": handmade.sharding()})
    handmade.write_files(tmp_path, {"0.shard": handmade.uint64_shard(minishards)})
    batches = [b for b in _tree(LocalStore(str(tmp_path))).scan(ROOT) if b.names[0] != b"info"]
    assert [b.by_name for b in batches] == [False, True]
    assert [b.sizes.tolist() for b in batches] == [[0, 1, 2]] * 2


@pytest.mark.interop
@pytest.mark.parametrize("name", ["igneous_murmur", "neuroglancer_lines", "neuroglancer_points", "nested"])
def test_fsspec_shows_the_twin(name: str, id_dataset: Callable[[str], IdDataset]) -> None:
    variant = id_dataset(name)
    fs = ShardFileSystem(source=str(variant.path), skip_instance_cache=True)
    tree_files = {path.lstrip("/"): fs.cat_file(path) for path in fs.find("")}
    assert parsed(tree_files) == read_tree(variant.twin)
    for path in variant.twin.rglob("*"):
        where = str(path.relative_to(variant.twin))
        if path.is_file() and path.name != "info":
            told, size = fs.info(where), path.stat().st_size
            assert (told["type"], told["size"]) == ("file", size)
            assert fs.cat_file(where, start=size // 3, end=size // 2) == path.read_bytes()[size // 3 : size // 2]
        elif path.is_dir():
            assert {e["name"].rsplit("/", 1)[-1] for e in fs.ls(where)} == {p.name for p in path.iterdir()}
            assert all(
                e["size"] in (None, (path / e["name"].rsplit("/", 1)[-1]).stat().st_size)
                for e in fs.ls(where)
                if e["type"] == "file" and not e["name"].endswith("/info")
            )
