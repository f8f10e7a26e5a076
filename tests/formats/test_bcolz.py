"""bcolz and bloscpack documents: what they describe, what is shown instead, what is left as it is."""

from __future__ import annotations

import builtins
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blosc
import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.bcolz import BCOLZ
from shardfs.formats.bcolz.values import parse_yaml
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.remote import FsspecStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests import data_bcolz
from tests.data_bcolz import BLP, Superchunk, compressed, metadata_section, sizes_yaml, storage_yaml, stored
from tests.strategies import json_paths, json_values, replaced
from tests.suites import Sparse, ViewSuite
from tests.suites.shard_format import MemoryBlob
from tests.suites.walking import entries, walk
from tests.vfs.test_requests import Counting
from tests.vfs.test_requests import own_memory as own_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.dataset import Dataset

SIZES: dict[str, Any] = {"shape": [100, 3], "nbytes": 1200, "cbytes": 700}
STORAGE: dict[str, Any] = {
    "dtype": "int32",
    "chunkshape": [7, 3],
    "superchunksize": 4,
    "compression": {"library": "zlib", "level": 9, "filters": ["bitshuffle"]},
}


def _open(sizes: Any = SIZES, storage: Any = STORAGE, attributes: Any = None) -> Dataset | None:
    told = {"meta/sizes": sizes, "meta/storage": storage, "meta/attributes": attributes}
    raw = {k: v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in told.items() if v is not None}
    return BCOLZ.open("a", raw)


def _shown(*args: Any, **kwargs: Any) -> dict[str, Any]:
    dataset = _open(*args, **kwargs)
    assert dataset is not None
    assert not dataset.problems
    return {name: json.loads(data) for name, data in dataset.documents.items()}


def _problem(*args: Any, **kwargs: Any) -> str:
    dataset = _open(*args, **kwargs)
    assert dataset is not None
    assert (dataset.collections, dict(dataset.documents)) == ((), {})
    (problem,) = dataset.problems
    assert problem.path == "a"
    return problem.why


def test_the_documents_are_those_that_bcolz_writes() -> None:
    assert _shown() == {
        "meta/sizes": {"shape": [100, 3], "nbytes": 1200, "cbytes": 700},
        "meta/storage": {
            "dtype": "int32",
            "cparams": {"clevel": 9, "shuffle": 2, "cname": "zlib", "quantize": 0},
            "chunklen": 7,
            "expectedlen": 100,
            "dflt": 0,
        },
        "__attrs__": {},
    }


def test_the_example_of_the_rfc() -> None:
    sizes = b"shape: (5000000000,)\nnbytes: 5000000000\ncbytes: 24328038\n"
    storage = b"""dtype:
    col1: int8
    col2: float32
chunkshape: (30,)
superchunksize: 10    # max. number of chunks in a single file
endianness: big       # default: little
order: C              # default: C
compression:
    library: blosclz  # could be zlib, fastlz or others
    level: 5
    filters: [shuffle, truncate]  # order matters
"""
    attributes = b"""temperature:
    value: 23.5
    type: scalar
    dtype: float32
ids:
    value: [1,3,6,10]
    type: array
    dtype: int32
"""
    unsharded = _shown(sizes, storage, attributes)
    assert unsharded["__rootdirs__"] == {"names": ["col1", "col2"]}
    assert unsharded["__attrs__"] == {"temperature": 23.5, "ids": [1, 3, 6, 10]}
    assert unsharded["col1/meta/storage"]["dtype"] == "int8"
    assert unsharded["col2/meta/storage"]["dtype"] == ">f4"
    assert unsharded["col2/meta/sizes"]["shape"] == [5_000_000_000]
    dataset = _open(sizes, storage, attributes)
    assert dataset is not None
    assert [(c.path, c.shards) for c in dataset.collections] == [("col1/data", "data/col1"), ("col2/data", "data/col2")]
    assert dataset.collections[0].layers[0].format.grid == (166_666_667,)


def test_nested_columns_are_shown_flat() -> None:
    storage = {**STORAGE, "dtype": {"a": "int8", "b": {"c": "<f8", "d": {"e": "bool"}}}}
    dataset = _open(storage=storage)
    assert dataset is not None
    assert {c.path: c.shards for c in dataset.collections} == {
        "a/data": "data/a",
        "b_c/data": "data/b/c",
        "b_d_e/data": "data/b/d/e",
    }
    assert dataset.hidden == {"data"}


def test_a_copy_of_what_is_shown_is_left_alone() -> None:
    for dtype in ("int32", {"a": "int8", "b": "int16"}):
        unsharded = _shown(storage={**STORAGE, "dtype": dtype})
        again = _open(unsharded["meta/sizes"], unsharded["meta/storage"])
        assert again is not None
        assert (again.collections, dict(again.documents), again.hidden) == ((), {}, frozenset())


@pytest.mark.parametrize(
    ("told", "endianness", "dtype_name"),
    [
        ("int32", None, "int32"),
        ("int32", "big", ">i4"),
        ("<i4", "big", "int32"),
        (">i4", None, ">i4"),
        ("bool", "big", "bool"),
        ("|S7", None, "|S7"),
        ("<U5", None, "<U5"),
        ("datetime64[ns]", None, "datetime64[ns]"),
        ("complex64", None, "complex64"),
        (
            "[('x', '<i4'), ('y', '>f8')]",
            None,
            {"names": ["x", "y"], "formats": ["int32", ">f8"], "offsets": [0, 4], "itemsize": 12},
        ),
        (
            [["x", "<i2", 3], ["y", [["z", "u1"]]]],
            None,
            {
                "names": ["x", "y"],
                "formats": [["int16", [3]], {"names": ["z"], "formats": ["uint8"], "offsets": [0], "itemsize": 1}],
                "offsets": [0, 6],
                "itemsize": 7,
            },
        ),
    ],
)
def test_types(told: Any, endianness: str | None, dtype_name: Any) -> None:
    storage = {**STORAGE, "dtype": told, **({"endianness": endianness} if endianness else {})}
    assert _shown(storage=storage)["meta/storage"]["dtype"] == dtype_name


@pytest.mark.parametrize("shape", ["(100,)", "(100)", "100", [100], "( 100 , )"])
def test_shapes_as_people_write_them(shape: Any) -> None:
    sizes = f"shape: {shape}\nnbytes: 1\ncbytes: 1\n".encode()
    assert _shown(sizes, {**STORAGE, "chunkshape": 7})["meta/sizes"]["shape"] == [100]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "storage", "why"),
    [
        ({}, {"chunkshape": [7, 2]}, "along the first axis only"),
        ({}, {"chunkshape": [7]}, "along the first axis only"),
        ({"shape": []}, {"chunkshape": []}, "along the first axis only"),
        ({"shape": [50]}, {"chunkshape": []}, "along the first axis only"),
        ({}, {"chunkshape": [0, 3]}, "at least 1"),
        ({}, {"order": "F"}, "order should be C"),
        ({}, {"dtype": "object"}, "it holds Python objects, or no bytes"),
        ({}, {"dtype": "O"}, "it holds Python objects, or no bytes"),
        ({}, {"dtype": "int33"}, "unknown"),
        ({}, {"dtype": "V999999999999999"}, "unknown"),
        ({}, {"dtype": "i4,f8"}, "unknown"),
        ({}, {"dtype": "S0"}, "it holds Python objects, or no bytes"),
        ({}, {"dtype": 7}, "unknown"),
        ({}, {"dtype": None}, "unknown"),
        ({}, {"dtype": "[('x', __import__('os'))]"}, "malformed"),
        ({}, {"dtype": "[" * 5000}, "no Python literal"),
        ({}, {"dtype": [["x", "O"]]}, "it holds Python objects, or no bytes"),
        ({}, {"dtype": [["x", "i4", [2**31, 2**31]]]}, "dtype"),
        ({}, {"dtype": {"_a": "int8"}}, "no name"),
        ({}, {"dtype": {"../x": "int8"}}, "no name"),
        ({}, {"dtype": {"class": "int8"}}, "no name"),
        ({}, {"dtype": {}}, "should have columns"),
        ({}, {"dtype": {"a": {"b": "int8"}, "a_b": "int8"}}, "same name"),
        ({}, {"endianness": "middle"}, "endianness"),
        ({}, {"superchunksize": 0}, "at least 1"),
        ({}, {"superchunksize": 2**64}, "superchunksize"),
        ({}, {"superchunksize": True}, "superchunksize"),
        ({"shape": [2**63, 3]}, {}, "shape"),
        ({"shape": [-1, 3]}, {}, "shape"),
        ({"shape": [1.5, 3]}, {}, "shape"),
        ({"shape": "(1, 2); x"}, {}, "shape"),
    ],
)
def test_what_is_not_understood_is_left_as_it_is(sizes: dict[str, Any], storage: dict[str, Any], why: str) -> None:
    assert why in _problem({**SIZES, **sizes}, {**STORAGE, **storage})


@pytest.mark.parametrize("member", ["shape", "chunkshape", "dtype"])
def test_members_that_must_be_there(member: str) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != member}
    storage = {k: v for k, v in STORAGE.items() if k != member}
    assert _problem(sizes, storage) == f"no member '{member}'"


def test_attributes_that_cannot_be_read_are_told_and_the_data_is_shown() -> None:
    for attributes in (b"[1, 2]", b"a: *b", b"a: 2001-01-01", b"a: !!python/object:os.system x", b"{", b"\xff\xfe\x00"):
        dataset = _open(attributes=attributes)
        assert dataset is not None
        assert len(dataset.problems) == 1
        assert "meta/attributes" in dataset.problems[0].why
        assert dataset.documents["__attrs__"] == b"{}\n"
        assert dataset.collections


@pytest.mark.parametrize("documents", [{}, {"meta/sizes": b"{}"}, {"meta/storage": b"{}"}])
def test_what_is_no_bcolz(documents: dict[str, bytes]) -> None:
    assert BCOLZ.open("a", documents) is None


@given(st.data())
def test_any_value_in_the_documents_is_shown_or_told(data: st.DataObject) -> None:
    documents = {"sizes": SIZES, "storage": STORAGE, "attributes": {"a": {"value": 1}}}
    path = data.draw(st.sampled_from([p for p in json_paths(documents) if len(p) > 1]))
    changed = replaced(documents, path, data.draw(json_values))
    dataset = _open(changed["sizes"], changed["storage"], changed["attributes"])
    assert dataset is None or dataset.collections or dataset.problems


# ----------------------------------------------------------------------------------------------------- YAML


BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("j"))
)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (BOMB, "aliases"),
        (b"a: &x [*x]", "aliases"),
        (b"[" * 200_000, "deeply"),
        (b"{" * 200_000, "deeply"),
        (b"- " * 100_000, "deeply"),
        (b"a: " * 1000, "cannot be read"),
        (b"#" * (300 << 10), "limit"),
        (b"a: " + b"9" * 100_000, "limit"),
        (b"a: " + b"1:" * 50_000 + b"1", "limit"),
        (b"!!python/object/apply:os.system ['true']", "cannot be read"),
        (b"\x00", "cannot be read"),
        (b"a: b: c", "cannot be read"),
        (b"? [1, 2]\n: 3", "cannot be read"),
        (b"a: 1\nb: 2\n---\nc: 3\n", "cannot be read"),
    ],
)
def test_hostile_yaml(raw: bytes, why: str) -> None:
    before = time.process_time()
    with pytest.raises(ValueError, match=why):
        parse_yaml(raw)
    assert time.process_time() - before < 10


def test_without_a_yaml_library_json_is_read_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    assert _shown()["meta/sizes"]["shape"] == [100, 3]
    why = _problem(b"shape: (100, 3)\n")
    assert "meta/sizes: is YAML" in why
    assert "pip install pyyaml" in why


# ------------------------------------------------------------------------------------------ bloscpack files


def _open_file(data: bytes) -> Dataset | None:
    return BCOLZ.open_file("x.blp", MemoryBlob(data))


def _packed(metadata: Any, chunks: int, chunk_size: int, last: int) -> Dataset:
    raw = Superchunk(version=3, metadata=json.dumps(metadata).encode())
    dataset = _open_file(raw.write([stored(bytes(chunk_size))] * chunks, (chunk_size, last)))
    assert dataset is not None
    return dataset


ARRAY = {"container": "numpy", "dtype": "'<i4'", "shape": [10, 3], "order": "C"}


def test_an_array_in_whole_rows_is_shown_as_one() -> None:
    dataset = _packed({**ARRAY, "unit": "m"}, 4, 36, 12)
    assert json.loads(dataset.documents["meta/storage"])["chunklen"] == 3
    assert json.loads(dataset.documents["__attrs__"]) == {"unit": "m"}
    assert dataset.collections[0].facts.shape == (10, 3)


@pytest.mark.parametrize(
    ("change", "chunks", "size"),
    [
        ({}, 4, 40),
        ({}, 3, 36),
        ({"order": "F"}, 4, 36),
        ({"shape": []}, 1, 4),
        ({"shape": [10, 0]}, 1, 4),
        ({"container": "other"}, 4, 36),
        ({"shape": None}, 4, 36),
    ],
)
def test_what_is_no_array_in_whole_rows_is_shown_as_chunks(change: dict[str, Any], chunks: int, size: int) -> None:
    told = {k: v for k, v in {**ARRAY, **change}.items() if v is not None}
    dataset = _packed(told, chunks, size, 4)
    assert set(dataset.documents) == {"__attrs__"}
    assert json.loads(dataset.documents["__attrs__"]) == told
    assert dataset.collections[0].layers[0].format.grid == (chunks,)


@pytest.mark.parametrize("name", ["x.blp", "x.bp", "__0.bp", "__0__.blp"])
def test_files_that_may_be_packs(name: str) -> None:
    assert BCOLZ.may_hold(name)


@pytest.mark.parametrize("name", ["x.blp.txt", "x", "__0.blp", "__1234567.blp"])
def test_files_that_are_not_even_looked_at(name: str) -> None:
    assert not BCOLZ.may_hold(name)


@pytest.mark.parametrize("data", [b"", b"blpk", BLP + stored(b"x"), b"no pack at all", b"blpk\x09" + bytes(40)])
def test_files_that_are_none(data: bytes) -> None:
    assert _open_file(data) is None


@pytest.mark.parametrize(
    "section",
    [
        metadata_section(b'{"a": 1}', checksum=8)[:-1] + b"?",
        metadata_section(b"{", checksum=0),
        metadata_section(b"{}", checksum=0).replace(b"\x02\0\0\0", b"\xff\xff\xff\xff", 1),
        metadata_section(b"x" * 100, checksum=0)[:40],
    ],
)
def test_metadata_that_is_damaged(section: bytes) -> None:
    data = bytearray(Superchunk(version=3).write([stored(b"x")]))
    data[5] |= 2
    with pytest.raises(ValueError, match=r"metadata|zlib|sha512|expected"):
        _open_file(bytes(data[:32]) + section + bytes(data[32:]))


@pytest.mark.parametrize("told", [2**62, 2**63 - 1, 2**21 + 1, -2])
def test_a_pack_of_an_absurd_number_of_chunks(told: int, tmp_path: Path) -> None:
    """It is a file, and what lies beside it is listed all the same."""
    (tmp_path / "bad.blp").write_bytes(Superchunk(version=3, told=told).write([stored(b"x")]))
    (tmp_path / "good.blp").write_bytes(Superchunk(version=3).write([stored(b"x")]))
    tree = open_tree(str(tmp_path))
    assert not tree.resolve("bad.blp").directory
    assert set(walk(tree)) == {"bad.blp", "good.blp/__attrs__", "good.blp/data/__0.blp"}
    assert [p.path for p in tree.problems()] == ["bad.blp"]


@given(st.data())
def test_any_metadata_of_a_pack_is_shown_or_told(data: st.DataObject) -> None:
    told = replaced(ARRAY, data.draw(st.sampled_from([(), *json_paths(ARRAY)])), data.draw(json_values))
    raw = Superchunk(version=3, metadata=json.dumps(told).encode())
    try:
        dataset = _open_file(raw.write([stored(bytes(36))] * 4, (36, 12)))
    except ValueError:
        return
    assert dataset is not None


# ---------------------------------------------------------------------------------------------------- trees


def _write_example(root: Path) -> dict[str, bytes]:
    """A dataset of two superchunks; and what its chunks must be shown as."""
    array = np.arange(50, dtype="<i4")
    data_bcolz.write_array(root, array, 7, 5, Superchunk(checksum=3, slack=4))
    chunks = data_bcolz.chunks_of(array, 7)
    return {f"data/__{i}.blp": BLP + chunk for i, chunk in enumerate(chunks)}


def test_the_tree(tmp_path: Path) -> None:
    root = tmp_path / "a"
    chunks = _write_example(root)
    (root / "meta/masks").write_bytes(b"kept")
    (root / "data/notes.txt").write_bytes(b"beside")
    tree = open_tree(str(tmp_path))
    view = {name.removeprefix("a/"): data for name, data in walk(tree).items()}
    assert {n: d for n, d in view.items() if n.endswith(".blp")} == chunks
    other_files = {"meta/sizes", "meta/storage", "__attrs__", "meta/masks", "data/notes.txt"}
    assert set(view) == set(chunks) | other_files
    located = tree.locate("a/data/__6.blp")
    assert located.shard == "a/data/__2__.bin"
    assert located.size == len(chunks["data/__6.blp"]) - 16
    stored_there = (root / "data/__2__.bin").read_bytes()[located.offset :][: located.size]
    assert BLP + stored_there == chunks["data/__6.blp"]
    assert tree.survey.chunk_at(located.shard, located.offset + 3) == "a/data/__6.blp"
    (summary,) = tree.survey.summaries()
    assert (summary.chunks, summary.shards, summary.shape) == (8, 2, (50,))


def test_through_fsspec(tmp_path: Path) -> None:
    chunks = _write_example(tmp_path / "a")
    pack = Path(__file__).parents[1] / "golden/bloscpack/array-2d.blp"
    shutil.copy(pack, tmp_path / "pack.blp")
    fs = ShardFileSystem(str(tmp_path), skip_instance_cache=True)
    assert fs.cat([f"a/{name}" for name in chunks]) == {f"/a/{name}": data for name, data in chunks.items()}
    assert sorted(fs.ls("a/data", detail=False)) == sorted(f"/a/{name}" for name in chunks)
    assert fs.size("a/data/__0.blp") == len(chunks["data/__0.blp"])
    array = np.load(pack.with_suffix(".npy"))
    storage = json.loads(fs.cat("pack.blp/meta/storage"))
    names = [f"pack.blp/data/__{i}.blp" for i in range(4)]
    rows = [blosc.decompress(fs.cat(name)[16:]) for name in names]
    assert np.array_equal(np.frombuffer(b"".join(rows), storage["dtype"]).reshape(20, 15), array)


def test_remote_bytes_are_the_same(tmp_path: Path) -> None:
    local = tmp_path / "local"
    chunks = _write_example(local / "a")
    shutil.copy(Path(__file__).parents[1] / "golden/bloscpack/plain-sha256.blp", local / "p.blp")
    memory = fsspec.filesystem("memory")
    memory.put(str(local), "/bcolz-remote", recursive=True)
    try:
        remote = walk(open_tree("memory://bcolz-remote"))
        assert remote == walk(open_tree(str(local)))
        assert {n.removeprefix("a/") for n in remote} >= chunks.keys()
    finally:
        memory.rm("/bcolz-remote", recursive=True)


def _spoil(root: Path, name: str, change: Callable[[bytearray], None]) -> None:
    data = bytearray((root / name).read_bytes())
    change(data)
    (root / name).write_bytes(bytes(data))


def test_a_checksum_that_fails_is_damage_to_that_chunk_alone(tmp_path: Path) -> None:
    chunks = _write_example(tmp_path)
    at = (tmp_path / "data/__1__.bin").read_bytes().index(chunks["data/__2.blp"][16:])

    def flip(data: bytearray) -> None:
        data[at + 20] ^= 1

    _spoil(tmp_path, "data/__1__.bin", flip)
    tree = open_tree(str(tmp_path))
    for name, wanted in chunks.items():
        entry = tree.resolve(name)
        assert entry.size == len(wanted)  # listing and stat read no chunk
        if name == "data/__2.blp":
            with pytest.raises(CorruptShardError, match="md5"):
                tree.read(entry.number, 0, 10**6)
        else:
            assert bytes(tree.read(entry.number, 0, 10**6)) == wanted


@pytest.mark.parametrize("header", [b"", b"blpk", b"x" * 40, b"blpk\x02\x01\x01\x01" + bytes(8) + b"\x7f" * 16])
def test_a_superchunk_that_is_damaged_is_listed_and_reading_it_fails(tmp_path: Path, header: bytes) -> None:
    chunks = _write_example(tmp_path)
    (tmp_path / "data/__1__.bin").write_bytes(header)
    tree = open_tree(str(tmp_path))
    names = {n for b in tree.scan(tree.resolve("data").number) for n in b.names.tolist()}
    assert names == {n.removeprefix("data/").encode() for n in chunks}
    for i in range(5):
        with pytest.raises(CorruptShardError, match=r"__1__\.bin"):
            tree.resolve(f"data/__{i}.blp")
    assert bytes(tree.read(tree.resolve("data/__5.blp").number, 0, 999)) == chunks["data/__5.blp"]


def test_a_chunk_of_an_absurd_size_is_neither_allocated_nor_waited_for(tmp_path: Path) -> None:
    array = np.arange(10, dtype="u1")
    data_bcolz.write_array(tmp_path, array, 10, 1)
    chunk = bytearray(compressed(array.tobytes()))
    chunk[12:16] = (2**31 - 1).to_bytes(4, "little")
    path = tmp_path / "data/__1__.bin"
    path.write_bytes(Superchunk(checksum=0).write([bytes(chunk)]))
    with path.open("r+b") as file:
        file.truncate(2**32)  # so that the size could be true
    tree = open_tree(str(tmp_path))
    entry = tree.resolve("data/__0.blp")
    with pytest.raises(CorruptShardError, match="limit"):
        tree.read(entry.number, 0, 10)


def test_a_grid_of_absurd_size_lists_what_is_there(tmp_path: Path) -> None:
    data_bcolz.write_array(tmp_path, np.arange(20, dtype="u1"), 4, 2)
    (tmp_path / "meta/sizes").write_text(sizes_yaml((2**57,), 2**57, 1))
    (tmp_path / "meta/storage").write_text(storage_yaml("uint8", (4,), 2))
    tree = open_tree(str(tmp_path))
    names = [n for b in tree.scan(tree.resolve("data").number) for n in b.names.tolist()]
    assert sorted(names) == [*(b"__%d.blp" % i for i in range(5)), b"__4__.bin"]
    with pytest.raises(CorruptShardError, match=r"data/__4__.bin: is missing"):
        tree.resolve("data/__4__.bin")


# ---------------------------------------------------------------------------------------------------- lost files


@pytest.mark.parametrize("layout", ["native", "zarr2", "zarr3", "n5", "precomputed"])
@pytest.mark.parametrize("url", ["", "memory://lost"])
def test_a_chunk_of_a_lost_superchunk_is_damaged(
    url: str, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = (20, 1, 1) if layout == "precomputed" else (20,)
    data_bcolz.write_array(tmp_path, np.arange(1, 21, dtype="u1").reshape(shape), 4, 2)
    if url:
        fsspec.filesystem("memory").put(f"{tmp_path}/", "lost", recursive=True)
    lost, superchunk_bytes = tmp_path / "data/__2__.bin", (tmp_path / "data/__2__.bin").read_bytes()
    fs = fsspec.filesystem("memory") if url else fsspec.filesystem("file")
    path = "/lost/data/__2__.bin" if url else str(lost)
    try:
        whole = open_tree(url or str(tmp_path), layout=layout)
        chunks = {name: whole.resolve(name).size for name in _chunk_names(whole)}
        assert _counts(whole) == [(5, 3, False)]
        fs.rm(path)
        tree = open_tree(url or str(tmp_path), layout=layout, index_ttl_s=0.01)
        assert sorted(_chunk_names(tree)) == sorted(chunks)
        messages = {}
        for name in chunks:
            try:
                tree.resolve(name)
            except CorruptShardError as e:
                messages[name] = str(e)
        assert len(messages) == 2
        assert all("data/__2__.bin: is missing" in why for why in messages.values())
        assert "data/__2__.bin: is missing" in caplog.text
        summaries = [(s.chunks, s.shards, s.damaged) for t in (tree, whole) for s in t.survey.summaries()]
        assert summaries == [(3, 2, True), (5, 3, False)]
        fs.pipe_file(path, superchunk_bytes)
        tree = open_tree(url or str(tmp_path), layout=layout)
        assert {name: tree.resolve(name).size for name in chunks} == chunks
    finally:
        if url:
            fs.rm("/lost", recursive=True)


def _counts(tree: Tree) -> list[tuple[int, int, bool]]:
    return [(summary.chunks, summary.shards, summary.damaged) for summary in tree.survey.summaries()]


def _chunk_names(tree: Tree) -> list[str]:
    """The paths of the five chunks."""
    paths, out = [""], []
    while paths:
        path = paths.pop()
        for batch in tree.scan(tree.resolve(path).number):
            for name, directory in zip(batch.names.tolist(), batch.directories.tolist(), strict=True):
                child = f"{path}/{name.decode()}".lstrip("/")
                if directory:
                    paths.append(child)
                elif any(c.isdigit() for c in name.decode()) and "json" not in child:
                    out.append(child)
    return out


# ---------------------------------------------------------------------------------------------------- views


@st.composite
def superchunks(draw: st.DrawFn) -> Sparse:
    """Superchunks of any kind of checksum, with offsets or without. None is missing, which is damage."""
    chunks = [stored(c) for c in draw(st.lists(st.binary(max_size=9), max_size=9))]
    per_file, how = draw(st.integers(1, 4)), draw(_hows())
    sizes, storage = {**SIZES, "shape": [3 * len(chunks)]}, {**STORAGE, "chunkshape": [3], "superchunksize": per_file}
    files = {"meta/sizes": json.dumps(sizes).encode(), "meta/storage": json.dumps(storage).encode()}
    raw: dict[str, bytes] = {}
    for k, i in enumerate(range(0, len(chunks), per_file), 1):
        files[f"data/__{k}__.bin"] = how.write(chunks[i : i + per_file])
        raw |= {f"data/__{i + j}.blp": chunk for j, chunk in enumerate(chunks[i : i + per_file])}
    odd = st.sampled_from(
        ("data", "data/__1__.bin", "data/__00.blp", "data/__+1.blp", "data/__.blp", "meta", "__attrs__")
    )
    names = st.integers(-1, 10).map("data/__{}.blp".format) | odd
    return Sparse(files, {name: BLP + chunk for name, chunk in raw.items()}, names, raw)


@st.composite
def packs(draw: st.DrawFn) -> Sparse:
    files: dict[str, bytes] = {}
    raw: dict[str, bytes] = {}
    for name in draw(st.sets(st.sampled_from(("a.blp", "b.bp", "c/d.blp")), min_size=1)):
        chunks = [stored(c) for c in draw(st.lists(st.binary(max_size=9), max_size=6))]
        files[name] = replace(draw(_hows()), version=3).write(chunks)
        raw |= {f"{name}/data/__{i}.blp": chunk for i, chunk in enumerate(chunks)}
    names = st.tuples(st.sampled_from(("a.blp", "b.bp")), st.integers(0, 6)).map(lambda n: f"{n[0]}/data/__{n[1]}.blp")
    odd = st.sampled_from(("a.blp", "a.blp/data", "a.blp/data/__1__.bin", "a.blp/x", "a.blp/data/x/y", "c"))
    return Sparse(files, {name: BLP + chunk for name, chunk in raw.items()}, names | odd, raw)


def _hows() -> st.SearchStrategy[Superchunk]:
    sums = st.integers(0, 8)
    with_offsets = st.builds(
        Superchunk, checksum=sums, room=st.integers(0, 3), slack=st.integers(0, 3), backwards=st.booleans()
    )
    return with_offsets | st.builds(Superchunk, checksum=sums, offsets=st.just(False), told=st.sampled_from((None, -1)))


class TestSuperchunkView(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return superchunks()


class TestPackView(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return packs()


# ------------------------------------------------------------------------------------------------- requests


def _counted(source: Path) -> tuple[Counting, Tree]:
    files = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    fs = Counting(files)
    tree = Tree(Datasets(FsspecStore(fs, "/root"), ByteLRU(1 << 20), ByteLRU(1 << 20)))
    tree.survey.require_dataset()
    fs.pop()
    return fs, tree


def test_a_cold_chunk_costs_four_requests_and_a_warm_one_one(tmp_path: Path) -> None:
    """Cold: the superchunk's size, its offsets, the sizes of all its chunks, which lie close, and the chunk."""
    chunks = _write_example(tmp_path)
    fs, tree = _counted(tmp_path)
    directory = tree.resolve("data").number
    fs.pop()

    def read(name: str) -> bytes:
        entry = tree.lookup(directory, name.removeprefix("data/").encode())
        return bytes(tree.read(entry.number, 0, entry.size))

    assert read("data/__0.blp") == chunks["data/__0.blp"]
    assert sorted(fs.pop()) == [("info", "__1__.bin"), *[("read", "__1__.bin")] * 3]
    assert read("data/__3.blp") == chunks["data/__3.blp"]
    assert fs.pop() == [("read", "__1__.bin")]


def test_listing_packs_costs_two_requests_each(tmp_path: Path) -> None:
    for i in range(3):
        shutil.copy(Path(__file__).parents[1] / "golden/bloscpack/array-1d.blp", tmp_path / f"{i}.blp")
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    fs = Counting(files)
    tree = Tree(Datasets(FsspecStore(fs, "/root"), ByteLRU(1 << 20), ByteLRU(1 << 20)))
    tree.attributes(ROOT)
    names = [e.name for e in entries(tree, ROOT)]
    assert names == [b"0.blp", b"1.blp", b"2.blp"]
    requests = [request for request in fs.pop() if request[1].endswith(".blp")]
    assert sorted(requests) == sorted((kind, f"{i}.blp") for i in range(3) for kind in ("info", "read"))
