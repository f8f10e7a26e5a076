"""The draft of 2022 as a source of other layouts: its hierarchy stands at the top, described by documents elsewhere."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any

import fsspec
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.zarr_transformer import Hierarchy
from shardfs.model.errors import UnsupportedError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.open_store import open_store
from shardfs.vfs.directory_content import Inherited
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.nodes import DirectoryNode
from shardfs.vfs.tree import Tree, open_tree
from tests.data_zarr_transformer import Cells, array_document, named, pack_shards, sharding, write_hierarchy
from tests.handmade import write_files, write_json
from tests.suites.walking import walk

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.arrays import Array as Described
    from shardfs.model.dataset import Dataset
    from tests.datasets import Array as Data

CODECS: dict[str, Any] = {
    "gzip": numcodecs.GZip(1),
    "zlib": numcodecs.Zlib(1),
    "bz2": numcodecs.BZ2(1),
    "lzma": numcodecs.LZMA(),
    "lz4": numcodecs.LZ4(),
    "zstd": numcodecs.Zstd(1),
    "blosc": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE),
}
IN_ZARR3 = {name: f"numcodecs.{name}" for name in ("zlib", "bz2", "lzma", "lz4")}


def compressor(name: str) -> dict[str, Any]:
    """As zarr-python 2.18 writes it."""
    configuration = {member: value for member, value in CODECS[name].get_config().items() if member != "id"}
    return {"codec": f"https://purl.org/zarr/spec/codec/{name}/1.0", "configuration": configuration}


def _shown(path: Path, layout: str = "zarr3", *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout=layout, skip_unsupported=skip)


# ------------------------------------------------------------------------------------------------ single documents


def _opened(document: Any) -> Dataset:
    dataset = Hierarchy(".json").open(
        "h/data/root/a", "data/root/a", {"meta/root/a.array.json": json.dumps(document).encode()}
    )
    assert dataset is not None
    return dataset


def _described(**members: Any) -> Described:
    """The same for an array that is sharded and for one that is not."""
    (plain,) = _opened(array_document((7, 10), (2, 3), **members)).unsharded
    (sharded,) = _opened(array_document((7, 10), (2, 3), sharding(2, 2), **members)).collections
    assert plain.array is not None
    assert plain.array == sharded.array
    return plain.array


@pytest.mark.parametrize(
    ("told", "native", "numpy_type"),
    [
        ("bool", "|b1", "|b1"),
        ("i1", "|i1", "|i1"),
        ("|u1", "|u1", "|u1"),
        ("<u2", "<u2", "<u2"),
        (">f8", "<f8", ">f8"),
        ({"extension": "https://example.org/complex", "type": "<c8", "fallback": None}, "<c8", "<c8"),
    ],
)
def test_data_types_have_many_spellings(told: Any, native: str, numpy_type: str) -> None:
    array = _described(data_type=told)
    assert (array.data_type, array.encoding.data_type) == (native, numpy_type)


@pytest.mark.parametrize("told", ["|O", "<M8[ns]", "r16", "<U3", 7, "<f3", {"extension": "x", "type": "|V8"}])
def test_other_data_types_are_not_described(told: Any) -> None:
    for transformers in ((), (sharding(2, 2),)):
        dataset = _opened(array_document((7, 10), (2, 3), *transformers, data_type=told))
        assert "data type" in dataset.indescribable
        assert len(dataset.collections) == len(transformers)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_compressors_are_numcodecs_own(name: str) -> None:
    (codec,) = _described(data_type="<u2", compressor=compressor(name)).encoding.codecs
    assert codec.name == IN_ZARR3.get(name, name)
    if name == "blosc":
        wanted = {"cname": "zstd", "clevel": 3, "shuffle": "bitshuffle", "blocksize": 0, "typesize": 2}
        assert codec.configuration == wanted
    else:
        assert codec.configuration == compressor(name)["configuration"]


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"compressor": {"codec": "https://example.org/codec/zfp/1.0"}}, "compressor .* is unknown"),
        ({"compressor": {"codec": "gzip"}}, "not enough values"),
        ({"compressor": {"codec": "x/gzip/1.0", "configuration": 7}}, "configuration should be an object"),
        ({"chunk_memory_layout": "Z"}, "should be C or F"),
        ({"fill_value": "much"}, "fill_value 'much'"),
        ({"storage_transformers": [{"extension": "x/dummy/1.0", "type": "d"}]}, "storage transformer"),
    ],
)
def test_what_is_unknown_is_not_described(members: Any, why: str, tmp_path: Path) -> None:
    assert _opened(array_document((7, 10), (2, 3), **members)).indescribable
    write_hierarchy(tmp_path, {"g/a": array_document((7, 10), (2, 3), **members)}, {})
    with pytest.raises(UnsupportedError, match=rf"^g/a: cannot be shown as zarr3: meta/root/g/a.array.json: .*{why}"):
        _shown(tmp_path)
    problems = _shown(tmp_path, skip=True).problems()
    assert [(p.path, p.skipped) for p in problems] == [("g/a", True)]


@pytest.mark.parametrize(
    ("data_type", "told", "fill"),
    [
        ("<f4", "NaN", "NaN"),
        (">f8", -0.5, -0.5),
        ("bool", True, True),
        ("i1", -3, -3),
        ("<f4", None, 0),
        ({"extension": "x", "type": "<c8", "fallback": None}, None, [0, 0]),  # readers of Zarr v2 take no bare number
        ("u1", 255, 255),
    ],
)
def test_fill_values(data_type: Any, told: Any, fill: Any) -> None:
    assert _described(data_type=data_type, fill_value=told).fill_value == fill


def test_names_of_axes_are_those_of_xarray() -> None:
    array = _described(attributes={"_ARRAY_DIMENSIONS": ["y", "x"], "user": 1})
    assert (array.names, array.attributes) == (("y", "x"), {"user": 1})
    array = _described(attributes={"_ARRAY_DIMENSIONS": ["y"]})
    assert (array.names, array.attributes) == (None, {"_ARRAY_DIMENSIONS": ["y"]})


def test_memory_layout() -> None:
    assert _described(chunk_memory_layout="F").encoding.order == (1, 0)
    assert _described(chunk_memory_layout="C").encoding.order == (0, 1)


# ----------------------------------------------------------------------------------------------------- hierarchies


@pytest.fixture
def hierarchy(tmp_path: Path) -> Path:
    """Groups, an array in shards, one without shards, one without data; below a directory."""
    documents = {
        "g/a": array_document((7, 10), (2, 3), sharding(2, 2), attributes={"user": [1]}),
        "g/implied/plain": array_document((4,), (2,)),
        "g/nothing": array_document((4,), (2,), fill_value=7),
    }
    cells: Cells = {at: bytes([at[0] * 4 + at[1]]) * 6 for at in product(range(4), range(4))}
    files = {f"g/a/{n}": d for n, d in named(pack_shards(cells, (2, 2))).items()}
    plain = {"g/implied/plain/c0": b"ab", "g/implied/plain/c1": b"cd"}
    write_hierarchy(tmp_path / "h", documents, {**files, **plain, "g/README": b"kept"})
    write_json(tmp_path / "h/meta/root/g.group.json", {"attributes": {"of": "g"}, "extensions": []})
    write_json(tmp_path / "h/meta/root/empty.group.json", {"attributes": {}, "extensions": []})
    (tmp_path / "other").mkdir()
    return tmp_path


def _group(**attributes: Any) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def test_the_hierarchy_stands_where_its_document_lies(hierarchy: Path) -> None:
    tree_files = walk(_shown(hierarchy))
    documents = {name: json.loads(data) for name, data in tree_files.items() if name.endswith("zarr.json")}
    groups = {path.removesuffix("zarr.json"): d for path, d in documents.items() if d["node_type"] == "group"}
    implied = dict.fromkeys(("", "h/", "h/g/implied/", "h/empty/"), _group())
    assert groups == {**implied, "h/g/": _group(of="g")}
    arrays = {path.removesuffix("/zarr.json") for path, d in documents.items() if d["node_type"] == "array"}
    assert arrays == {"h/g/a", "h/g/implied/plain", "h/g/nothing"}
    assert documents["h/g/a/zarr.json"]["attributes"] == {"user": [1]}
    assert {n: d for n, d in tree_files.items() if n not in documents and "/a/" not in n} == {
        "h/g/README": b"kept",
        "h/g/implied/plain/c/0": b"ab",
        "h/g/implied/plain/c/1": b"cd",
    }
    assert sum(n.startswith("h/g/a/c/") for n in tree_files) == 16


def test_it_may_be_the_root(hierarchy: Path) -> None:
    below = {n.removeprefix("h/"): d for n, d in walk(_shown(hierarchy)).items() if n != "zarr.json"}
    assert walk(_shown(hierarchy / "h")) == below


def test_other_layouts(hierarchy: Path) -> None:
    n5 = walk(_shown(hierarchy / "h", "n5"))
    assert {"attributes.json", "g/attributes.json", "g/a/attributes.json", "g/a/3/3", "g/implied/plain/0"} <= n5.keys()
    assert "g/nothing/1" in n5  # of fill value
    zarr2 = walk(_shown(hierarchy / "h", "zarr2"))
    assert {"g/a/.zarray", "g/a/3/3", "g/nothing/.zarray", "g/implied/.zgroup"} <= zarr2.keys()
    consolidated = json.loads(zarr2[".zmetadata"])["metadata"]
    assert {"g/.zattrs", "g/a/.zarray", "g/nothing/.zarray", "empty/.zgroup"} <= consolidated.keys()
    for tree_files in (n5, zarr2):
        assert not any(name.startswith(("data", "meta")) or "zarr.json" in name for name in tree_files)


def test_paths_are_those_that_are_shown(hierarchy: Path) -> None:
    tree = _shown(hierarchy)
    assert {s.path for s in tree.survey.summaries()} == {"h/g/a", "h/g/implied/plain", "h/g/nothing"}
    where = tree.locate("h/g/a/c/1/0")
    assert (where.collection, where.shard) == ("h/g/a", "h/data/root/g/a/c0/0")
    assert tree.survey.chunk_at(where.shard, where.offset) == "h/g/a/c/1/0"
    assert tree.collection("h/g/a").path == "h/g/a"


def test_many_threads_open_it_at_once(hierarchy: Path) -> None:
    wanted = _shown(hierarchy).resolve("h/g/a/c/1/0").size
    for _ in range(20):
        tree = Tree(Datasets(open_store(str(hierarchy)), ByteLRU(1 << 20), ByteLRU(1 << 20), layout="zarr3"))
        with ThreadPoolExecutor(8) as pool:
            entries = pool.map(tree.resolve, ["h/g/a/c/1/0"] * 8)
            assert [one.size for one in entries] == [wanted] * 8


def test_moving_twice_is_moving_once() -> None:
    directory = DirectoryNode(1, "h", Inherited())
    for _ in range(2):
        directory.set_scope(Hierarchy(".json"))
        assert (directory.inside, directory.shown) == ("h/data/root", "h")
    inside = DirectoryNode(2, directory.child_path("g"), directory.inherited)
    assert (inside.path, inside.shown) == ("h/data/root/g", "h/g")


def test_a_store_behind_fsspec(hierarchy: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{hierarchy}/", "draft-remote/", recursive=True)
    try:
        assert walk(open_tree("memory://draft-remote", layout="zarr3")) == walk(_shown(hierarchy))
    finally:
        memory.rm("draft-remote", recursive=True)


def test_the_native_layout_is_as_before(hierarchy: Path) -> None:
    tree_files = walk(open_tree(str(hierarchy)))
    assert {
        "h/zarr.json",
        "h/meta/root/g.group.json",
        "h/data/root/g/a/c3/3",
        "h/data/root/g/README",
    } <= tree_files.keys()
    assert not any(name.startswith("h/g/") for name in tree_files)


def test_an_array_at_the_root_of_a_hierarchy(tmp_path: Path) -> None:
    write_hierarchy(tmp_path, {}, {"c0": b"ab", "c1": b"cd"})
    write_json(tmp_path / "meta/root.array.json", array_document((4,), (2,)))
    tree_files = walk(_shown(tmp_path))
    assert tree_files.keys() == {"zarr.json", "c/0", "c/1"}


def test_a_groups_document_that_cannot_be_read(tmp_path: Path) -> None:
    write_hierarchy(tmp_path, {"g/a": array_document((4,), (2,))}, {"g/a/c0": b"ab"})
    write_files(tmp_path, {"meta/root/g.group.json": b"{"})
    with pytest.raises(UnsupportedError, match=r"^g: .*g\.group\.json: cannot be read"):
        _shown(tmp_path)


# --------------------------------------------------------------------------------------------------------- values


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[Data, dict[str, Any]]:
    rank = draw(st.integers(0, 3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    dtype = draw(st.sampled_from(("bool", "i1", "u1", "<u2", ">u2", "<i4", ">f4", "<f8", "<c8", ">u8")))
    fill = draw(st.sampled_from([0, 1])) if dtype not in ("bool", "<c8") else 0
    data = (np.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 2)) if rank else 0):
        data[tuple(slice(draw(st.integers(0, n - 1)), draw(st.integers(1, n))) for n in shape)] = fill
    how = {
        "chunk": chunk,
        "per": tuple(draw(st.integers(1, 3)) for _ in chunk) if rank and draw(st.booleans()) else (),
        "order": draw(st.sampled_from("CF")),
        "codec": draw(st.sampled_from([None, *CODECS])),
        "separator": draw(st.sampled_from("./")),
        "fill_value": bool(fill) if dtype == "bool" else [fill, fill] if dtype == "<c8" else fill,
    }
    return data, how


def _written(root: Path, data: Data, how: dict[str, Any]) -> None:
    chunk, per, element = how["chunk"], how["per"], np.array(np.max(how["fill_value"])).astype(data.dtype)
    grid = [range(-(-n // c)) for n, c in zip(data.shape, chunk, strict=True)]
    cells = {}
    for at in product(*grid):
        part = data[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk, strict=True))]
        if (part == element).all():
            continue
        block = np.full(chunk, element, data.dtype)
        block[tuple(slice(0, n) for n in part.shape)] = part
        raw = np.frombuffer(block.tobytes(order=how["order"]), block.dtype)
        cells[at or (0,)] = raw.tobytes() if how["codec"] is None else bytes(CODECS[how["codec"]].encode(raw))
    told = data.dtype.str.replace("|", "") if data.dtype.kind != "b" else "bool"
    document = array_document(
        data.shape,
        chunk,
        *([sharding(*per)] if per else []),
        data_type={"extension": "x", "type": told, "fallback": None} if data.dtype.kind == "c" else told,
        chunk_memory_layout=how["order"],
        chunk_grid={"chunk_shape": list(chunk), "separator": how["separator"], "type": "regular"},
        fill_value=how["fill_value"],
        **({} if how["codec"] is None else {"compressor": compressor(how["codec"])}),
    )
    shards = named(pack_shards(cells, per) if per else cells, how["separator"])
    write_hierarchy(root, {"a": document}, {f"a/{name}": shard for name, shard in shards.items()})


@given(_arrays())
def test_any_array_is_read(tmp_path_factory: pytest.TempPathFactory, written: tuple[Data, dict[str, Any]]) -> None:
    data, how = written
    path = tmp_path_factory.mktemp("draft")
    _written(path / "source", data, how)
    for layout in ("zarr3", "zarr2"):
        write_files(path / layout, walk(_shown(path / "source", layout)))
        values = np.asarray(zarr.open_array(str(path / layout / "a"), mode="r")[...])
        np.testing.assert_array_equal(values, data)
