"""The Zarr v3 draft of 2022: what its documents describe, and its shards against an independent packer."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.zarr_transformer import META, ZARR_TRANSFORMER, ArrayDocuments, Hierarchy
from shardfs.model.errors import CorruptShardError, NotADatasetError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.storage.remote import FsspecStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests.data_zarr_transformer import (
    OTHER_URLS,
    ROOT_DOCUMENT,
    URL,
    Cells,
    array_document,
    named,
    pack_shards,
    sharding,
    write_hierarchy,
)
from tests.handmade import ABSENT, write_files, zarr_index
from tests.storage.test_store import http_server
from tests.strategies import json_paths, json_values, replaced
from tests.suites import Sample, ShardFormatSuite, Sparse, ViewSuite
from tests.suites.walking import entries, read_all, walk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Coords
    from tests.suites.shard_format import Extents

SHARDED = array_document((7, 10), (2, 3), sharding(2, 2))
DUMMY = {"extension": "https://purl.org/zarr/spec/storage_transformers/dummy/1.0", "type": "dummy_type"}


def _open(document: Any, below: str = "data/root/a", suffix: str = ".json") -> Dataset | None:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    scope = Hierarchy(suffix)
    return scope.open(f"h/{below}", below, {scope.documents(below)[0]: raw})


def _collection(document: Any) -> Collection:
    dataset = _open(document)
    assert dataset is not None
    assert not dataset.problems
    (collection,) = dataset.collections
    return collection


def _shown(document: Any) -> dict[str, Any]:
    unsharded = ArrayDocuments(".json").rewrite("x", "a.array.json", json.dumps(document).encode())
    assert unsharded is not None
    out: dict[str, Any] = json.loads(unsharded)
    return out


def _problem(document: Any) -> str:
    dataset = _open(document)
    assert dataset is not None
    assert dataset.collections == ()
    assert ArrayDocuments(".json").rewrite("x", "a.array.json", json.dumps(document).encode()) is None
    (problem,) = dataset.problems
    assert problem.path == "h/data/root/a"
    assert problem.why.startswith("meta/root/a.array.json: ")
    return problem.why


# ------------------------------------------------------------------------------------------------- documents


def test_only_the_transformer_goes() -> None:
    document = {"b": 1, **SHARDED, "attributes": {"n": 2**64}, "z": {"deep": [1.5]}}
    unsharded = _shown(document)
    assert unsharded == {k: v for k, v in document.items() if k != "storage_transformers"}
    assert list(unsharded) == [k for k in document if k != "storage_transformers"]


def test_other_transformers_stay_in_their_order() -> None:
    document = array_document((7, 10), (2, 3), DUMMY, {**DUMMY, "n": 2}, sharding(2, 2), sharding(2, 1))
    assert _shown(document) == {**document, "storage_transformers": [DUMMY, {**DUMMY, "n": 2}]}


@pytest.mark.parametrize("url", [URL, *OTHER_URLS, "https://example.org/sharding/1.0"])
def test_every_spelling_of_the_extension(url: str) -> None:
    assert _collection(array_document((7, 10), (2, 3), sharding(2, 2, extension=url))).layers


def test_the_example_of_shape_7_10() -> None:
    collection = _collection(SHARDED)
    fmt = collection.layers[0].format
    assert fmt.key(fmt.place((3, 3))[0]) == "c1/1"
    assert fmt.place((3, 3))[2] == 3
    assert fmt.page_request(0, 0, None).size == 64  # type: ignore[union-attr]
    assert (collection.facts.shape, collection.facts.chunk_shape, collection.facts.shard_shape) == (
        (7, 10),
        (2, 3),
        (4, 6),
    )


@pytest.mark.parametrize(
    ("per_shard", "padded"), [([2], (2, 1, 1)), ([], (1, 1, 1)), (2, (2, 1, 1)), ([1, 2, 3], (1, 2, 3))]
)
def test_axes_that_are_not_named_are_not_sharded(per_shard: Any, padded: Coords) -> None:
    document = array_document((6, 6, 6), (1, 1, 1), sharding(configuration={"chunks_per_shard": per_shard}))
    assert _collection(document).facts.shard_shape == padded


@pytest.mark.parametrize(
    ("shape", "separator", "coords", "key"),
    [
        ((), "/", (0,), "c0"),
        ((), ".", (0,), "c0"),
        ((400,), "/", (23,), "c23"),
        ((400, 400), "/", (1, 23), "c1/23"),
        ((400, 400), ".", (1, 23), "c1.23"),
        ((400, 400, 400), "/", (1, 23, 4), "c1/23/4"),
    ],
)
def test_keys(shape: Coords, separator: str, coords: Coords, key: str) -> None:
    grid = {"type": "regular", "chunk_shape": [1] * len(shape), "separator": separator}
    collection = _collection(array_document(shape, (), sharding(*(4 for _ in shape)), chunk_grid=grid))
    fmt = collection.layers[0].format
    shard = fmt.place(tuple(c * 4 for c in coords))[0]
    assert fmt.key(shard) == key
    assert fmt.shard_of(key) == shard
    for other in (key[1:], f"{key}/", f"{key}.", f"c{key}", "c", "", "c/", key.replace("c", "c/"), "c01", "c99999"):
        assert fmt.shard_of(other) is None


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("document", "why"),
    [
        (array_document((7, 10), (2, 3), sharding(2, 2), DUMMY), "between shards and store is unknown"),
        (array_document((7, 10), (2, 3), sharding(2, 2, extension=URL[:-1] + "1")), "a version that is unknown"),
        (array_document((7, 10), (2, 3), sharding(2, 2, extension=7)), "should be a URL"),
        (array_document((7, 10), (2, 3), {"type": "indexed"}), "no member 'extension'"),
        (array_document((7, 10), (2, 3), sharding(2, 2, type="other")), "type of shards should be indexed"),
        (array_document((7, 10), (2, 3), {"extension": URL, "type": "indexed"}), "no member 'configuration'"),
        (array_document((7, 10), (2, 3), sharding(2, 2, 1)), "chunks_per_shard has 3 axes, the array 2"),
        (array_document((7, 10), (2, 3), sharding(-1, 2)), "at least 1, not -1"),
        (array_document((7, 10), (2, 3), sharding(0, 2)), "at least 1, not 0"),
        (array_document((7, 10), (2, 3), sharding(2**62, 2**62)), "needs an index above the limit"),
        (array_document((7,), (2,), sharding(2**22)), "needs an index above the limit"),
        (array_document((7, 10), (2, 3), sharding(configuration={"chunks_per_shard": "22"})), "hold integers"),
        (array_document((7, 10), (2, 3), sharding(configuration={"chunks_per_shard": [2.0]})), "hold integers"),
        (array_document((7, 10), (2, 3), sharding(configuration={"chunks_per_shard": None})), "hold integers"),
        (array_document((7, 10), (2, 3), sharding(configuration=[])), "indices must be integers"),
        (array_document((7, 10), (2,), sharding(2, 2)), "chunk_shape has 1 axes, the array 2"),
        (array_document((7, 10), (0, 3), sharding(2, 2)), "chunk_shape should hold integers"),
        (array_document((7, -1), (2, 3), sharding(2, 2)), "shape should hold integers"),
        (array_document((2**62, 2**62), (1, 1), sharding(1, 1)), "beyond any real array"),
        (array_document((7,), (2,), *[sharding(1)] * 17), "nested more than 16 deep"),
        ({**SHARDED, "chunk_grid": {"type": "odd"}}, "unknown chunk grid"),
        ({**SHARDED, "chunk_grid": None}, "not subscriptable"),
        ({**SHARDED, "chunk_grid": {**SHARDED["chunk_grid"], "separator": "/../"}}, "separator should be"),
        ({**SHARDED, "storage_transformers": {"a": 1}}, "storage_transformers should be a list"),
        ({**SHARDED, "storage_transformers": [3]}, "not subscriptable"),
        ([SHARDED], "should be an object"),
        ({k: v for k, v in SHARDED.items() if k != "shape"}, "no member 'shape'"),
    ],
)
def test_what_is_not_understood_is_left_as_it_is(document: Any, why: str) -> None:
    assert why in _problem(document)


@pytest.mark.parametrize("transformers", [[], [DUMMY], None])
def test_what_is_not_sharded_is_not_touched(transformers: Any) -> None:
    document = {**SHARDED, "storage_transformers": transformers}
    dataset = _open(document)
    assert dataset is not None
    assert (dataset.collections, dataset.problems, dataset.closed) == ((), (), True)
    assert ArrayDocuments(".json").rewrite("x", "a.array.json", json.dumps(document).encode()) is None


@pytest.mark.parametrize(
    "document", [{"zarr_format": 3}, {"zarr_format": "3"}, {"zarr_format": 2}, {}, [], 3, {"zarr_format": ["a://b"]}]
)
def test_other_documents_are_not_of_this_format(document: Any) -> None:
    assert ZARR_TRANSFORMER.open("a", {"zarr.json": json.dumps(document).encode()}) is None
    assert ZARR_TRANSFORMER.open("a", {}) is None


@pytest.mark.parametrize("suffix", ["/../secret", 7, None, "a\0b"])
def test_a_suffix_that_is_none(suffix: Any) -> None:
    raw = json.dumps({**ROOT_DOCUMENT, "metadata_key_suffix": suffix}).encode()
    dataset = ZARR_TRANSFORMER.open("a", {"zarr.json": raw})
    assert dataset is not None
    assert dataset.scope is None
    assert "metadata_key_suffix should be the end of a name" in dataset.problems[0].why


def test_where_documents_are_looked_for() -> None:
    scope = Hierarchy(".x")
    assert scope.documents("data/root/a/b") == ("meta/root/a/b.array.x", "meta/root/a/b.group.x")
    assert scope.documents("data/root") == ("meta/root.array.x", "meta/root.group.x", "zarr.json")
    assert scope.documents("data/roots") == scope.documents("other") == scope.documents("metadata") == ()
    assert scope.open("h/data/rooted", "data/rooted", {}) is None
    group = scope.open("h/data/root/a", "data/root/a", {"meta/root/a.group.x": b"{}"})
    assert group is not None
    assert not group.collections


@pytest.mark.parametrize(("raw", "why"), [(b"{", "cannot be read"), (b"[" * 100_000, "nested too deeply")])
def test_documents_that_cannot_be_read(raw: bytes, why: str) -> None:
    with pytest.raises(CorruptShardError, match=why) as e:
        _open(raw)
    assert str(e.value).startswith("h/data/root/a: meta/root/a.array.json: ")
    with pytest.raises(CorruptShardError, match=why):
        ArrayDocuments(".json").rewrite("h/meta/root", "a.array.json", raw)


@pytest.mark.parametrize("depth", [100, 300, 450, 600, 900, 990])
def test_a_deep_document_is_shown_with_its_chunks_or_not_at_all(depth: int) -> None:
    text = json.dumps(SHARDED).replace('"attributes": {}', '"attributes": ' + '{"a":' * depth + "1" + "}" * depth)
    try:
        dataset = _open(text.encode())
        unsharded = ArrayDocuments(".json").rewrite("x", "a.array.json", text.encode())
    except CorruptShardError:
        return
    assert dataset is not None
    assert bool(dataset.collections) == (unsharded is not None) == (not dataset.problems)


def test_consolidated_metadata_is_rewritten() -> None:
    members = {
        "zarr.json": ROOT_DOCUMENT,
        f"{META}/a.array.json": SHARDED,
        f"{META}/b.array.json": array_document((4,), (2,)),
        f"{META}/evil.array.json": array_document((4,), (2,), sharding(-1)),
        f"{META}/odd.array.json": 7,
        f"{META}/g.group.json": SHARDED,
    }
    document = {"zarr_consolidated_format": 1, "metadata": members}
    raw = ArrayDocuments(".json").rewrite("x", ".zmetadata", json.dumps(document).encode())
    assert raw is not None
    shown_document = json.loads(raw)
    assert shown_document == {**document, "metadata": {**members, f"{META}/a.array.json": _shown(SHARDED)}}
    assert list(shown_document["metadata"]) == list(members)
    without: list[Any] = [{}, [], {"metadata": 3}, {"metadata": {"a": SHARDED}}]
    for nothing in without:
        assert ArrayDocuments(".json").rewrite("x", ".zmetadata", json.dumps(nothing).encode()) is None


@given(st.data())
def test_wrong_types_anywhere_in_metadata(data: st.DataObject) -> None:
    document: Any = array_document((7, 10), (2, 3), DUMMY, sharding(2, 2), sharding(2, 1))
    for _ in range(data.draw(st.integers(1, 2))):
        document = replaced(document, data.draw(st.sampled_from(json_paths(document))), data.draw(json_values))
    with suppress(CorruptShardError):
        dataset = _open(document)
        assert dataset is not None
        raw = ArrayDocuments(".json").rewrite("x", "a.array.json", json.dumps(document).encode())
        assert (raw is not None) == bool(dataset.collections)
        for collection in dataset.collections:
            for layer in collection.layers:
                if all(layer.format.grid):
                    shard, _, _ = layer.format.place(tuple(n - 1 for n in layer.format.grid))
                    assert layer.format.shard_of(layer.format.key(shard)) == shard


# ---------------------------------------------------------------------------------------------------- shards


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Of any rank and separator, with shards that reach beyond the array."""
    axes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4)), max_size=4))
    separator = draw(st.sampled_from("/."))
    shape, chunk, per_shard = ([a[i] for a in axes] for i in range(3))
    grid = {"type": "regular", "chunk_shape": chunk, "separator": separator}
    collection = _collection(array_document(shape, chunk, sharding(*per_shard), chunk_grid=grid))
    cells = [range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)] or [range(1)]
    per = per_shard or [1]

    def home(cell: Coords) -> str:
        return "c" + separator.join(str(i // n) for i, n in zip(cell, per, strict=True))

    def shard(extents: Extents) -> bytes:
        placed = {tuple(i % n for i, n in zip(cell, per, strict=True)): e for cell, e in extents.items()}
        slots = [placed.get(at, (ABSENT, ABSENT)) for at in product(*map(range, per))]
        return bytes(sum(size for _, size in extents.values())) + zarr_index(slots, checksum="none")

    strategy = st.tuples(*(st.integers(0, len(c) - 1) for c in cells))
    return Sample(collection.layers[0].format, strategy, home, shard)


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return samples()


@st.composite
def sparse_hierarchies(draw: st.DrawFn) -> Sparse:
    """One array, sparse, of any rank, at any place, with shards in shards."""
    rank, depth = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    shape, chunk = ([draw(st.integers(1, top)) for _ in range(rank)] for top in (9, 3))
    per_shard = [[draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(depth)]
    separator, path = draw(st.sampled_from("/.")), draw(st.sampled_from(("", "/a", "/g/c0", "/c1/c2.3")))
    grid = [-(-n // c) for n, c in zip(shape, chunk, strict=True)] or [1]
    cells = list(product(*map(range, grid)))
    chunks: Cells = {cell: draw(st.binary(max_size=6)) for cell in draw(st.permutations(cells))[: draw(_some(cells))]}
    shards = chunks
    for per in per_shard:
        shards = pack_shards(shards, per or [1], draw(st.sampled_from((b"", b"gap"))))
    chunk_grid = {"type": "regular", "chunk_shape": chunk, "separator": separator}
    document = array_document(shape, chunk, *(sharding(*per) for per in per_shard), chunk_grid=chunk_grid)

    def files(cells: Cells) -> dict[str, bytes]:
        return {f"data/root{path}/{name}": content for name, content in named(cells, separator).items()}

    documents = {"zarr.json": ROOT_DOCUMENT, f"meta/root{path}.array.json": document}
    source_documents = {name: json.dumps(content).encode() for name, content in documents.items()} | files(shards)
    near = st.tuples(*(st.integers(0, n + 1) for n in grid)).map(lambda cell: next(iter(files({cell: b""}))))
    odd = st.sampled_from(("data", "meta/root", "c0", "data/root/c", "data/root/c0", "data/root/a/c0/00", "data/c0"))
    return Sparse(source_documents, files(chunks), near | odd)


def _some(cells: Sequence[object]) -> st.SearchStrategy[int]:
    return st.integers(0, len(cells))


class TestView(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_hierarchies()


def _files() -> tuple[dict[str, Any], dict[str, bytes], dict[str, bytes]]:
    """Documents, what is stored and what is shown."""
    chunks: Cells = {(i, j): b"%d-%d" % (i, j) for i in range(4) for j in range(4)}
    flat: Cells = {(i,): b"n%d" % i for i in range(5)}
    documents = {"a": SHARDED, "g/c1": array_document((5,), (1,), sharding(2)), "g/plain": array_document((2,), (1,))}
    source_documents = {
        **{f"a/{name}": data for name, data in named(pack_shards(chunks, (2, 2))).items()},
        **{f"g/c1/{name}": data for name, data in named(pack_shards(flat, (2,))).items()},
        "g/plain/c0": b"as it is",
    }
    view = {
        **{f"a/{name}": data for name, data in named(chunks).items()},
        **{f"g/c1/{name}": data for name, data in named(flat).items()},
        "g/plain/c0": b"as it is",
    }
    return documents, source_documents, {f"data/root/{name}": data for name, data in view.items()}


@pytest.mark.parametrize("where", ["memory", "http"])
def test_the_same_over_a_network(where: str, tmp_path: Path) -> None:
    documents, stored_files, tree_files = _files()
    write_hierarchy(tmp_path, documents, stored_files)
    for group in ("g", "a/b"):  # a plain web server does not know directories: the documents are the proof
        write_files(tmp_path, {f"meta/root/{group}.group.json": b'{"attributes": {}}'})
    if where == "memory":
        memory = fsspec.filesystem("memory")
        memory.put(f"{tmp_path}/", "/draft/", recursive=True)
        try:
            tree = open_tree("memory://draft")
            assert {n: d for n, d in walk(tree).items() if n.startswith("data/")} == tree_files
        finally:
            memory.rm("/draft", recursive=True)
    with http_server(tmp_path) as (url, _):
        tree = open_tree(url)
        for name, content in tree_files.items():
            assert read_all(tree, tree.resolve(name)) == content
        assert json.loads(read_all(tree, tree.resolve("meta/root/g/c1.array.json"))) == _shown(documents["g/c1"])
        for name in ("meta/root/missing.array.json", "data/root/missing", "meta/root/x", "data/x", "data/root/a/c9/0"):
            with pytest.raises(FileNotFoundError):
                tree.resolve(name)


@pytest.mark.parametrize("remote", [False, True])
def test_arrays_without_a_chunk_are_there(remote: bool, tmp_path: Path) -> None:
    """Documents alone say so: no directory of `data` may exist yet, or only that of another array."""
    documents = {"a": SHARDED, "g/b": SHARDED, "plain": array_document((2,), (1,))}
    write_hierarchy(tmp_path, documents, {})
    some: list[Cells] = [{}, {(3, 3): b"x"}]
    for chunks in some:
        shards = named(pack_shards(chunks, (2, 2)))
        write_files(tmp_path, {f"data/root/a/{name}": shard for name, shard in shards.items()})
        store = FsspecStore(fsspec.filesystem("file"), str(tmp_path)) if remote else LocalStore(str(tmp_path))
        tree = Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20)))
        tree.survey.require_dataset()
        assert [(s.path, s.grid_chunks) for s in tree.survey.summaries()] == [
            ("data/root/a", 16),
            ("data/root/g/b", 16),
        ]
        assert tree.resolve("data/root/g/b/c3").directory
        assert {e.name.decode() for e in entries(tree, tree.resolve("data/root").number)} == {"a", "g", "plain"}
        for name in ("data/root/x", "data/root/g/a", "data/root/g/b/c0/0"):
            with pytest.raises(FileNotFoundError):
                tree.resolve(name)


def test_a_document_that_another_program_changes_is_read_again(tmp_path: Path) -> None:
    documents, stored_files, _ = _files()
    write_hierarchy(tmp_path, documents, stored_files)
    tree, name = open_tree(str(tmp_path), index_ttl_s=0), "meta/root/a.array.json"

    def shape_of(number: int) -> list[int]:
        shape: list[int] = json.loads(bytes(tree.read(number, 0, 9999)))["shape"]
        return shape

    former = tree.resolve(name).number
    tree.remember(former)  # a program has the document open
    assert shape_of(former) == [7, 10]
    (tmp_path / name).write_text(json.dumps({**SHARDED, "shape": [5, 10]}))
    present = tree.resolve(name).number
    assert (shape_of(present), shape_of(former)) == ([5, 10], [7, 10])
    assert tree.resolve(name).number == present


def test_a_hierarchy_of_plain_arrays_is_nothing_to_mount(tmp_path: Path) -> None:
    write_hierarchy(tmp_path, {"plain": array_document((2,), (1,))}, {})
    with pytest.raises(NotADatasetError):
        open_tree(str(tmp_path))


def test_damage_is_told_and_harms_nothing_beside_it(tmp_path: Path) -> None:
    chunks: Cells = {(i,): b"chunk%d" % i for i in range(10)}
    shards = named(pack_shards(chunks, (2,)))
    shards["c0"] = shards["c0"][:-1]  # the index is not where it should be
    shards["c1"] = b"short"
    shards["c2"] = shards["c2"][:-16] + zarr_index([(0, 2**40)], checksum="none")
    shards["c3"] = shards["c3"][:-16] + zarr_index([(ABSENT, 6)], checksum="none")
    shards["c4"] = b""
    write_hierarchy(tmp_path, {"a": array_document((10,), (1,), sharding(2))}, {f"a/{n}": d for n, d in shards.items()})
    tree = open_tree(str(tmp_path))
    for name in ("c0", "c1", "c2", "c3", "c5", "c7", "c8", "c9"):
        with pytest.raises(CorruptShardError) as e:
            read_all(tree, tree.resolve(f"data/root/a/{name}"))
        assert e.value.where == "data/root/a"
        assert e.value.key == f"data/root/a/c{int(name[1:]) // 2}"
    for name in ("c4", "c6"):
        assert read_all(tree, tree.resolve(f"data/root/a/{name}")) == b"chunk" + name[1:].encode()
    assert read_all(tree, tree.resolve("zarr.json"))


def test_damaged_documents_harm_nothing_beside_them(tmp_path: Path) -> None:
    documents, stored_files, tree_files = _files()
    write_hierarchy(tmp_path, documents, {**stored_files, "evil/c0": b"x", "odd/c0": b"y", "huge/c0": b"z"})
    write_hierarchy(tmp_path, {"huge": array_document((2**63 - 1,), (1,), sharding(2**20))}, {})
    write_files(tmp_path / "meta/root", {"evil.array.json": b"[" * 10**5, "odd.array.json": b'{"a": 1, "a": 2}'})
    tree = open_tree(str(tmp_path))
    for name, content in tree_files.items():
        assert read_all(tree, tree.resolve(name)) == content
    listed = {e.name.decode() for e in entries(tree, tree.resolve("meta/root").number)}
    assert listed == {"a.array.json", "g", "evil.array.json", "odd.array.json", "huge.array.json"}
    for name in ("evil", "odd"):
        with pytest.raises(CorruptShardError, match=r"too deeply|occurs twice"):
            tree.resolve(f"meta/root/{name}.array.json")
    for name in ("evil", "odd", "huge"):
        with pytest.raises(CorruptShardError):
            tree.resolve(f"data/root/{name}/c0")
    assert len(list(tree.survey.summaries())) == 2
    assert {p.path for p in tree.problems()} == {f"data/root/{name}" for name in ("evil", "odd", "huge")}


def test_only_where_a_document_says_so_names_with_c_are_chunks(tmp_path: Path) -> None:
    documents, stored_files, tree_files = _files()
    write_hierarchy(
        tmp_path, documents, {**stored_files, "c0/notes": b"1", "g/c7": b"2", "a/cc1": b"3", "a/c0/x": b"4"}
    )
    tree = open_tree(str(tmp_path))
    chunk_files = {n: d for n, d in walk(tree).items() if n.startswith("data/")}
    beside = {"c0/notes": b"1", "g/c7": b"2", "a/cc1": b"3", "a/c0/x": b"4"}
    assert chunk_files == tree_files | {f"data/root/{name}": data for name, data in beside.items()}
    assert {e.name for e in entries(tree, ROOT)} == {b"zarr.json", b"meta", b"data"}


def test_a_hierarchy_without_shards_is_refused(tmp_path: Path) -> None:
    write_hierarchy(tmp_path, {"a": array_document((2,), (1,))}, {"a/c0": b"x"})
    with pytest.raises(NotADatasetError):
        open_tree(str(tmp_path))
