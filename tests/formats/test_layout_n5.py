"""The layout n5: documents, blocks and images of any described array, read by libraries that know N5 alone."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import fsspec
import numcodecs
import numpy as np
import pytest
import tensorstore as ts
import z5py
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs import decoders, encoders
from shardfs.formats import n5_multiscales, ome
from shardfs.formats.n5 import N5
from shardfs.formats.n5.view import shown_encoding
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.arrays import Array, Axis, ChunkEncoding, Codec, Level, Multiscale
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Dataset, Surroundings
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.grid import NestedNames, cell_of
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.vfs.tree import Tree, open_tree
from tests import data_n5
from tests.data_layouts import BYTE, Written, arrays, grids, write_zarr
from tests.data_n5 import MEMBER, VARIANTS, attributes, header
from tests.datasets import BIG, BLOSC, CRC, GZIP, LITTLE, ZSTD, read_tree, transpose
from tests.handmade import group_document, write_files, write_json, zarr_metadata
from tests.suites.view import files
from tests.suites.walking import read_all, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardfs.model.values import Coords
    from tests.datasets import Array as Data


def _n5(path: Path, *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout="n5", skip_unsupported=skip)


def _document(tree: Tree, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_all(tree, tree.resolve(f"{path}/attributes.json")))
    return found


# ------------------------------------------------------------------------------------------------ N5 as source


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, data_n5.Dataset]:
    base = tmp_path_factory.mktemp("variants")
    return {name: variant.write(base / name, name) for name, variant in VARIANTS.items()}


def _read_zarr(path: Path) -> Data:
    found: Data = (
        ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}).result().read().result()
    )
    return found


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_n5_is_shown_as_zarr(name: str, variants: Mapping[str, data_n5.Dataset], tmp_path: Path) -> None:
    """In shards and not: both are described alike."""
    variant = variants[name]
    for source in (variant.path, variant.twin):
        write_files(tmp_path / source.name, walk(open_tree(str(source), layout="zarr2")))
        assert _equal(_read_zarr(tmp_path / source.name / MEMBER), variant.array.T)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_n5_itself_is_shown_as_ever(name: str, variants: Mapping[str, data_n5.Dataset]) -> None:
    assert walk(_n5(variants[name].path)) == walk(open_tree(str(variants[name].path)))
    assert walk(_n5(variants[name].twin)) == read_tree(variants[name].twin)


@pytest.mark.parametrize(
    ("compression", "codec"),
    [
        (data_n5.GZIP, Codec("gzip", {"level": 5})),
        ({"type": "gzip"}, Codec("gzip", {"level": 6})),
        (data_n5.ZLIB, Codec("numcodecs.zlib", {"level": 5})),
        (data_n5.ZSTD, Codec("zstd", {"level": 3, "checksum": False})),
        (data_n5.BZIP2, Codec("numcodecs.bz2", {"level": 9})),
        (data_n5.XZ, Codec("numcodecs.lzma", {"format": 1, "check": -1, "preset": 6, "filters": None})),
        ({"type": "lz4"}, Codec("n5.lz4", {"blockSize": 65536})),
        (
            data_n5.BLOSC,
            Codec("blosc", {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 2, "blocksize": 0}),
        ),
    ],
)
def test_codecs_are_called_as_in_zarr(compression: Any, codec: Codec) -> None:
    array = _described(attributes((11, 7, 5), (3, 2, 1), "int16", compression=compression))
    encoding = ChunkEncoding(">i2", (0, 1, 2), clipped=True, codecs=(codec,), frame="n5")
    assert array == Array((5, 7, 11), (1, 2, 3), "<i2", encoding, (2, 1, 0))
    back = shown_encoding(array)
    assert back == encoding


def _described(document: Any) -> Array:
    dataset = N5.open("a", {"attributes.json": json.dumps(document).encode()})
    assert dataset is not None
    (collection,) = (*dataset.collections, *dataset.unsharded)
    assert collection.array is not None
    return collection.array


def test_the_user_s_attributes_are_told_from_n5_s_own() -> None:
    document = attributes(
        (4,), (2,), "uint8", compressionType="gzip", n5="1", resolution=[4.0], codecs=None, a={"b": 1}
    )
    array = _described(document)
    assert array.attributes == {"resolution": [4.0], "a": {"b": 1}}
    assert array.encoding.codecs == (Codec("gzip", {"level": 6}),)
    assert _described({**document, "axes": ["x"]}).names == ("x",)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"dataType": "string"}, "data type 'string'"),
        ({"dataType": "object"}, "data type 'object'"),
        ({"isLabelMultiset": True}, "label multisets are no array of numbers"),
        ({"compression": {"type": "jpeg"}}, "no compression 'jpeg'"),
        ({"compression": 7}, "compression should be an object"),
        ({"compression": {}}, "no member 'type'"),
        ({"blockSize": [0]}, "blockSize should hold integers"),
        ({"codecs": [{"name": "transpose"}]}, "codec 'transpose'"),
    ],
)
def test_what_cannot_be_described_is_refused_by_other_layouts_alone(
    members: dict[str, Any], why: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "a/attributes.json", {**attributes((4,), (2,), "uint8", compression=data_n5.RAW), **members})
    data_n5.DAMAGED["sound"](tmp_path / "b")
    native = open_tree(str(tmp_path))
    root = {"attributes.json": b'{\n  "n5": "2.0.0"\n}\n'}
    assert walk(_n5(tmp_path)) == root | walk(native)
    assert native.problems() == []
    with pytest.raises(UnsupportedError, match=f"a: cannot be shown as zarr2: .*{why}"):
        open_tree(str(tmp_path), layout="zarr2")


def test_the_lz4_of_java_is_undone(tmp_path: Path) -> None:
    data = np.arange(24, dtype="uint16").reshape(4, 6)
    document = attributes((6, 4), (6, 4), "uint16", compression={"type": "lz4", "blockSize": 65536})
    write_json(tmp_path / "source/a/attributes.json", document)
    write_files(tmp_path / "source/a", {"0/0": header((6, 4)) + data_n5.lz4_blocks(data.astype(">u2").tobytes())})
    write_files(tmp_path / "shown", walk(open_tree(str(tmp_path / "source"), layout="zarr2")))
    assert _equal(_read_zarr(tmp_path / "shown/a"), data)


def test_the_lz4_of_z5_is_undone(tmp_path: Path) -> None:
    data = np.arange(35, dtype="uint16").reshape(5, 7)
    with z5py.N5File(str(tmp_path / "source"), "w") as file:
        file.create_dataset("a", data=data, chunks=(4, 6), compression="lz4")
    write_files(tmp_path / "shown", walk(open_tree(str(tmp_path / "source"), layout="zarr2")))
    assert _equal(_read_zarr(tmp_path / "shown/a"), data)


def test_the_lz4_of_zarr_python_is_undone(tmp_path: Path) -> None:
    data = np.arange(24, dtype="uint16").reshape(4, 6)
    document = attributes((6, 4), (6, 4), "uint16", compression={"type": "lz4", "acceleration": 1})
    write_json(tmp_path / "source/a/attributes.json", document)
    block = header((6, 4)) + bytes(numcodecs.LZ4().encode(data.astype(">u2").tobytes()))
    write_files(tmp_path / "source/a", {"0/0": block})
    write_files(tmp_path / "shown", walk(open_tree(str(tmp_path / "source"), layout="zarr2")))
    np.testing.assert_array_equal(np.asarray(zarr.open_array(tmp_path / "shown/a", mode="r")[...]), data)


@pytest.mark.parametrize("layout", ["n5", "zarr2"])
@pytest.mark.parametrize("name", sorted(data_n5.HOSTILE))
def test_hostile_documents_harm_nothing_beside_them(name: str, layout: str, tmp_path: Path) -> None:
    good = data_n5.DAMAGED["sound"](tmp_path / "good")
    for form, document in (("evil", data_n5.HOSTILE[name]), ("plain", _unsharded(data_n5.HOSTILE[name]))):
        write_json(tmp_path / form / "attributes.json", document)
        write_files(tmp_path / form, {"0/0": b"no block", "1": b"nor this", "x/0": b"nor that"})
    tree = open_tree(str(tmp_path), layout=layout, skip_unsupported=True)
    for path in islice(files(tree), 3000):
        with suppress(CorruptShardError, OSError):
            entry = tree.resolve(path)
            tree.read(entry.number, 0, 100)
    tree_files = read_all(tree, tree.resolve("good/0/0"))
    assert tree_files[-4:] == good.good["0/0"][-4:]


def _unsharded(document: Any) -> Any:
    members = {name: value for name, value in document.items() if name not in ("codecs", "storage_transformers")}
    return {**members, "compression": data_n5.GZIP}


def test_blocks_of_odd_shapes(tmp_path: Path) -> None:
    """Java writes whatever shape it is handed: what that makes of a listing must not be a wrong size."""
    document = attributes((8,), (4,), "uint8", compression=data_n5.ZSTD)
    payload = encoders.encode([Codec("zstd")], b"\x01\x02")
    write_json(tmp_path / "a/attributes.json", document)
    write_files(
        tmp_path / "a", {"0": header((2,)) + payload, "1": header((4,)) + encoders.encode([Codec("zstd")], b"abcd")}
    )
    data_n5.DAMAGED["sound"](tmp_path / "b")
    tree = open_tree(str(tmp_path), layout="zarr2")
    with pytest.raises(OSError, match="before the array grew"):
        read_all(tree, tree.resolve("a/0"))
    assert decoders.decode([Codec("zstd")], read_all(tree, tree.resolve("a/0"))) == b"\x01\x02\0\0"
    assert decoders.decode([Codec("zstd")], read_all(tree, tree.resolve("a/1"))) == b"abcd"
    raw = {"type": "raw"}
    write_json(tmp_path / "a/attributes.json", {**document, "compression": raw})
    write_files(tmp_path / "a", {"0": header((2,)) + b"\x01\x02", "1": header((4,), 4) + b"abcd"})
    tree_files = walk(open_tree(str(tmp_path), layout="zarr2"))
    assert (tree_files["a/0"], tree_files["a/1"]) == (b"\x01\x02\0\0", b"abcd")


# ---------------------------------------------------------------------------------------------- Zarr v3 as source


def _read_tensorstore(container: Path, member: str) -> Data:
    store = {"driver": "file", "path": f"{container / member}/"}
    found: Data = ts.open({"driver": "n5", "kvstore": store}).result().read().result()
    return found.T


def _read_z5(container: Path, member: str) -> Data:
    return np.asarray(z5py.File(str(container), mode="r", use_zarr_format=False)[member][...])


def _shown_as(data: Data) -> Data:
    """What readers of N5 must find."""
    return data.astype("uint8") if data.dtype == bool else data


def _equal(first: Data, right: Data) -> bool:
    return (
        first.shape == right.shape and first.dtype == right.dtype and bool(((first == right) | (first != first)).all())
    )


_DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")


@given(arrays(_DTYPES, grids(least_rank=1)))
def test_any_array_of_zarr_is_read_as_n5(tmp_path_factory: pytest.TempPathFactory, written: Written) -> None:
    data = written.data
    path = tmp_path_factory.mktemp("n5")
    written.write(path / "source" / "a")
    tree = _n5(path / "source")
    write_files(path / "shown", walk(tree))
    assert _equal(_read_tensorstore(path / "shown", "a"), _shown_as(data))
    assert _equal(_read_z5(path / "shown", "a"), _shown_as(data))
    filled = written.members["fill_value"] not in (0, False)
    grid = [-(-n // c) for n, c in zip(data.shape, written.chunk, strict=True)]
    blocks = [name for name in walk(tree) if not name.endswith("attributes.json")]
    assert len(blocks) == math.prod(grid) or not filled


_ISLAND = np.pad(np.arange(1, 25, dtype="uint16").reshape(4, 6), ((0, 5), (3, 5)), constant_values=7)  # 9x14


@pytest.mark.parametrize(
    ("chain", "compression", "passes"),
    [
        ([BIG], {"type": "raw"}, True),
        ([LITTLE], {"type": "raw"}, False),
        ([BIG, GZIP], {"type": "gzip", "level": 5, "useZlib": False}, True),
        ([BIG, ZSTD], {"type": "zstd", "level": 3}, True),
        ([BIG, ZSTD, CRC], {"type": "zstd", "level": 3}, True),
        ([BIG, CRC], {"type": "raw"}, True),
        ([BIG, BLOSC], {"type": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}, True),
        ([LITTLE, GZIP], {"type": "raw"}, False),
        ([BIG, ZSTD, GZIP], {"type": "raw"}, False),
        ([BIG, CRC, GZIP], {"type": "raw"}, False),
        ([transpose(1, 0), BIG], {"type": "raw"}, False),
        ([transpose(1, 0), transpose(1, 0), BIG, GZIP], {"type": "gzip", "level": 5, "useZlib": False}, True),
    ],
)
def test_payloads_pass_where_they_can(chain: list[Any], compression: Any, passes: bool, tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", _ISLAND, (4, 5), chain, shard=(8, 10))
    tree = _n5(tmp_path)
    assert _document(tree, "a") == attributes((14, 9), (5, 4), "uint16", compression=compression)
    tree_files, native = walk(tree), walk(open_tree(str(tmp_path)))
    assert tree_files.keys() == {f"a/{x}/{y}" for x in range(3) for y in range(3)} | {
        "attributes.json",
        "a/attributes.json",
    }
    cut = 4 * sum(c is CRC for c in chain)
    for x, y in np.ndindex(3, 3):
        block, chunk = tree_files[f"a/{x}/{y}"], native[f"a/c/{y}/{x}"]
        if passes:
            assert block == header((5, 4)) + chunk[: len(chunk) - cut]
        else:
            part = _ISLAND[4 * y : 4 * y + 4, 5 * x : 5 * x + 5]
            assert block == header(part.shape[::-1]) + part.astype(">u2").tobytes()


def test_a_root_has_the_version_and_groups_their_attributes(tmp_path: Path) -> None:
    user = {"name": "µ", "big": 2**64 - 1, "none": None, "nested": {"a": [1.5]}}
    write_json(tmp_path / "zarr.json", group_document(root=True))
    write_json(tmp_path / "g/zarr.json", group_document(**user, inf=float("inf")))
    write_json(tmp_path / "empty/zarr.json", group_document())
    write_zarr(tmp_path / "g/a", _ISLAND, (4, 5), [BIG], attributes=user, dimension_names=["y", "x"])
    (tmp_path / "g/README").write_text("kept")
    tree = _n5(tmp_path)
    tree_files = walk(tree)
    assert not any("zarr" in name or name.split("/")[-2:-1] == ["c"] for name in tree_files)
    assert json.loads(tree_files["attributes.json"]) == {"n5": "2.0.0", "root": True}
    assert json.loads(tree_files["g/attributes.json"]) == {**user, "inf": "Infinity"}
    assert "empty/attributes.json" not in tree_files
    assert tree_files["g/README"] == b"kept"
    document = json.loads(tree_files["g/a/attributes.json"])
    assert document["axes"] == ["x", "y"]
    assert {name: document[name] for name in user} == user


def test_an_array_may_be_the_root(tmp_path: Path) -> None:
    write_zarr(tmp_path, _ISLAND, (4, 5), [LITTLE])
    tree = _n5(tmp_path)
    document = json.loads(read_all(tree, tree.resolve("attributes.json")))
    assert document == {"n5": "2.0.0", **attributes((14, 9), (5, 4), "uint16", compression={"type": "raw"})}
    write_files(tmp_path / "shown", walk(tree))
    assert _equal(_read_tensorstore(tmp_path / "shown", "."), _ISLAND)


def test_names_of_n5_win_over_those_of_the_user(tmp_path: Path) -> None:
    user = {"dimensions": "mine", "compression": 7, "n5": "9.0.0", "axes": [1], "codecs": [], "kept": 1}
    write_zarr(tmp_path / "a", _ISLAND, (4, 5), [BIG], attributes=user, dimension_names=["y", "x"])
    tree = _n5(tmp_path)
    n5_attributes = attributes((14, 9), (5, 4), "uint16", compression={"type": "raw"}, axes=["x", "y"])
    assert _document(tree, "a") == {**n5_attributes, "kept": 1}
    assert {p.why.split(":")[0] for p in tree.problems()} == {f"attribute {name!r}" for name in user if name != "kept"}
    assert all(p.path == "a" and p.skipped for p in tree.problems())


@pytest.mark.parametrize(
    ("name", "odd", "fitting"),
    [
        ("units", "K", ["nm", "nm"]),
        ("units", ["nm", 1], ["", "s"]),
        ("resolution", 5, [0.5, 2]),
        ("resolution", [1, 2, 3], [0, 0]),
        ("axes", "x", ["x", "y"]),
        ("axes", ["x", "x"], ["a", "b"]),
    ],
)
def test_attributes_that_readers_of_n5_stumble_over_are_left_out(
    name: str, odd: Any, fitting: Any, tmp_path: Path
) -> None:
    write_zarr(tmp_path / "source/odd", _ISLAND, (4, 5), [BIG], attributes={name: odd, "long_name": "x"})
    write_zarr(tmp_path / "source/fit", _ISLAND, (4, 5), [BIG], attributes={name: fitting})
    tree = _n5(tmp_path / "source")
    write_files(tmp_path / "shown", walk(tree))
    for member in ("odd", "fit"):
        assert _equal(_read_tensorstore(tmp_path / "shown", member), _ISLAND)
    assert name not in _document(tree, "odd")
    assert _document(tree, "odd")["long_name"] == "x"
    assert _document(tree, "fit")[name] == fitting
    assert [(p.path, p.skipped, name in p.why) for p in tree.problems()] == [("odd", True, True)]


def test_a_group_stays_one_whatever_its_attributes_are_called(tmp_path: Path) -> None:
    user = {**attributes((1, 1), (1, 1), "uint8", compression={"type": "raw"}), "n5": "9.0.0"}
    for group in (tmp_path, tmp_path / "g"):
        write_json(group / "zarr.json", group_document(**user, kept=1))
    write_zarr(tmp_path / "g/a", _ISLAND, (4, 5), [BIG])
    tree = _n5(tmp_path)
    assert json.loads(read_all(tree, tree.resolve("attributes.json"))) == {"n5": "2.0.0", "kept": 1}
    assert _document(tree, "g") == {"kept": 1}
    told = {(p.path, p.why.split("'")[1]) for p in tree.problems() if p.skipped}
    assert told == {(path, name) for path in ("", "g") for name in user}
    write_files(tmp_path / "shown", walk(tree))
    assert _equal(_read_z5(tmp_path / "shown", "g/a"), _ISLAND)


def test_names_of_axes_are_told_if_no_two_are_the_same(tmp_path: Path) -> None:
    for name, names in (("same", ["y", "y"]), ("other", ["y", "x"])):
        array = zarr.create_array(
            str(tmp_path / name), shape=_ISLAND.shape, chunks=(4, 5), dtype="uint16", dimension_names=names
        )
        array[...] = _ISLAND
    write_files(tmp_path / "shown", walk(_n5(tmp_path)))
    assert "axes" not in _document(_n5(tmp_path), "same")
    for name in ("same", "other"):
        assert _equal(_read_tensorstore(tmp_path / "shown", name), _ISLAND)


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "gzip", "configuration": {"level": 99}},
        {"name": "blosc", "configuration": {"cname": "unheard-of"}},
        {"name": "blosc", "configuration": {"typesize": 0}},
        {"name": "numcodecs.lzma", "configuration": {"preset": 99}},
    ],
)
def test_parameters_of_which_no_missing_chunk_can_be_made_are_refused(codec: Any, tmp_path: Path) -> None:
    metadata = zarr_metadata((9,), (8,), (4,), data_type="int32", codecs=[BIG, codec], fill_value=7)
    write_json(tmp_path / "a/zarr.json", metadata)
    with pytest.raises(UnsupportedError, match=r"^a: cannot be shown as n5: chunks that are not stored cannot be made"):
        _n5(tmp_path)


@pytest.mark.parametrize("layout", ["n5", "precomputed"])
def test_what_blosc_was_built_without_is_refused_where_it_must_be_undone(layout: str, tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", _ISLAND, (4, 5), [LITTLE, _SNAPPY], shard=(8, 10))
    with pytest.raises(UnsupportedError, match="codec 'blosc' of 'snappy' must be undone, and is unknown"):
        open_tree(str(tmp_path), layout=layout)


def test_but_passes_where_it_need_not_with_missing_chunks_in_another(tmp_path: Path) -> None:
    data = np.full(_ISLAND.shape, 7, "uint16")
    data[0, 0] = 1
    write_zarr(tmp_path / "a", data, (4, 5), [BIG, _SNAPPY], fill_value=7)
    write_files(tmp_path / "shown", walk(_n5(tmp_path)))
    assert _equal(_read_tensorstore(tmp_path / "shown", "a"), data)


_SNAPPY = {"name": "blosc", "configuration": {**BLOSC["configuration"], "cname": "snappy"}}


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("float16", (4,), "N5 has no data type float16"),
        ("complex64", (4,), "N5 has no data type complex64"),
        ("uint8", (), "N5 has no arrays without axes"),
    ],
)
def test_what_n5_cannot_say_is_refused_when_mounted(
    dtype: str, shape: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    chain = [BYTE] if dtype == "uint8" else [LITTLE]
    write_zarr(tmp_path / "g/odd", np.ones(shape, dtype), (2,) * len(shape), chain)
    write_zarr(tmp_path / "g/even", _ISLAND, (4, 5), [LITTLE])
    with pytest.raises(UnsupportedError, match=rf"^g/odd: cannot be shown as n5: {why}"):
        _n5(tmp_path)
    tree = _n5(tmp_path, skip=True)
    assert [(p.path, p.skipped) for p in tree.problems()] == [("g/odd", True)]
    assert why in tree.problems()[0].why
    tree_files = walk(tree)
    assert "g/even/attributes.json" in tree_files
    assert not any(name.startswith("g/odd") for name in tree_files)


def test_a_block_of_fill_value_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zarr(tmp_path / "a", np.full((40, 40), 7, "uint16"), (4, 4), [BIG, GZIP], fill_value=7)
    blocks, encode = [], encoders.encode

    def counted(chain: Sequence[Codec], data: bytes) -> bytes:
        blocks.append(len(data))
        return encode(chain, data)

    monkeypatch.setattr("shardfs.codecs.encoded_chunks.encode", counted)
    assert len(walk(_n5(tmp_path))) == 102
    assert blocks.count(32) == 1


def test_fill_values_that_are_zero_are_not_stored_but_the_other_zero_is(tmp_path: Path) -> None:
    for name, fill in (("zero", 0.0), ("minus", -0.0)):
        write_zarr(tmp_path / name, np.full((4, 4), fill, "float32"), (2, 4), [BIG], fill_value=fill)
    tree_files = walk(_n5(tmp_path))
    documents = {"attributes.json", "zero/attributes.json", "minus/attributes.json"}
    assert tree_files.keys() == documents | {"minus/0/0", "minus/0/1"}
    assert tree_files["minus/0/1"] == header((4, 2)) + np.full(8, -0.0, ">f4").tobytes()


def test_chunks_too_large_to_be_made_are_refused(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", _ISLAND, (4, 5), [BIG, GZIP], fill_value=1)
    document = json.loads((tmp_path / "a/zarr.json").read_bytes())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [2**20, 2**20]
    write_json(tmp_path / "a/zarr.json", document)
    with pytest.raises(UnsupportedError, match="a: cannot be shown as n5: "):
        _n5(tmp_path)


# ---------------------------------------------------------------------------------------------- any described array


@st.composite
def _described_arrays(draw: st.DrawFn) -> tuple[Array, Data]:
    """Arrays of formats as they may be: turned, clipped, framed, with axes that the chunk grid lacks."""
    rank = draw(st.integers(1, 4))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    dtype = np.dtype(draw(st.sampled_from(("bool", "uint8", "uint16", "int32", "float64"))))
    source_bytes = dtype.newbyteorder(draw(st.sampled_from("<>"))).str
    around: list[Codec] = [Codec("gzip", {"level": 1}), Codec("numcodecs.bz2", {"level": 1}), Codec("numcodecs.lzma")]
    around += [Codec("zstd"), Codec("blosc", {"cname": "zstd", "shuffle": "shuffle", "typesize": dtype.itemsize})]
    chain = draw(st.lists(st.sampled_from(around), max_size=2)) + draw(st.sampled_from(([], [Codec("crc32c")])))
    order = tuple(draw(st.permutations(range(rank))))
    frame: Literal["none", "bcolz"] = "bcolz" if draw(st.booleans()) else "none"
    encoding = ChunkEncoding(source_bytes, order, clipped=draw(st.booleans()), codecs=tuple(chain), frame=frame)
    # Of axes with one chunk some need no place in the grid, and those that have one stand in any order.
    placed = [a for a in range(rank) if shape[a] > chunk[a] or draw(st.booleans())]
    mixed = draw(st.permutations(placed))
    axes = tuple(mixed.index(a) if a in placed else None for a in range(rank))
    data = (np.arange(math.prod(shape)) % 100 + 1).astype(dtype).reshape(shape)
    offset = tuple(draw(st.integers(-9, 9)) for _ in shape) if draw(st.booleans()) else None
    fill = draw(st.sampled_from((0, 1)))
    return Array(shape, chunk, dtype.str, encoding, axes, fill, offset=offset, attributes={"user": 1}), data


def _stored(array: Array, data: Data, cell: Coords) -> bytes:
    """A chunk as the array's encoding has it."""
    encoding = array.encoding
    part = data[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, array.chunk, strict=True))]
    if not encoding.clipped:
        whole = np.full(array.chunk, 77).astype(data.dtype)
        whole[tuple(slice(0, n) for n in part.shape)] = part
        part = whole
    payload = np.ascontiguousarray(part.transpose(encoding.order)).astype(encoding.data_type).tobytes()
    frame = b"blpk" + bytes(12) if encoding.frame == "bcolz" else b""
    return frame + encoders.encode(encoding.codecs, payload)


@given(_described_arrays(), st.data())
def test_any_described_array_is_read_as_n5(
    tmp_path_factory: pytest.TempPathFactory, described: tuple[Array, Data], draw: st.DataObject
) -> None:
    array, data = described
    path, rank = tmp_path_factory.mktemp("described"), sum(a is not None for a in array.grid_axes)
    grid = tuple(array.grid[array.grid_axes.index(i)] for i in range(rank))
    layer = Layer(Unsharded(grid, lambda cell: ".".join(map(str, cell)), partial(cell_of, separator=".", rank=rank)))
    facts = Facts(array.shape, array.chunk, None, array.data_type, "none")
    collection = Collection("made", "", NestedNames(grid), (layer,), (), facts, array=array)
    (n5_collection,) = N5.show("a", Dataset("made", unsharded=(collection,), closed=True), Surroundings()).collections
    documents = N5.show("a", Dataset("made", unsharded=(collection,), closed=True), Surroundings()).documents
    wanted = data.copy()
    for cell in np.ndindex(*array.grid):
        place = tuple(cell[array.grid_axes.index(i)] for i in range(rank))
        values = n5_collection.names.values(np.array([place], np.uint64).reshape(1, rank))
        names = [n5_collection.names.render(level, values[:, level])[0].decode() for level in range(len(array.shape))]
        assert names == [str(i) for i in cell[::-1]]
        assert n5_collection.names.coords(tuple(values[0].tolist())) == place
        if draw.draw(st.booleans()):
            source_document = _stored(array, data, cell)
            assert n5_collection.transform is not None
            block = bytes(n5_collection.transform.show(place, source_document))
            told = n5_collection.transform.sizes(
                np.array([place], np.uint64).reshape(1, rank), np.array([len(source_document)])
            )
        else:
            wanted[tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, array.chunk, strict=True))] = array.fill_value
            if n5_collection.filler is None:
                assert not array.fill_value
                continue
            block, told = (
                n5_collection.filler.show(place),
                n5_collection.filler.sizes(np.array([place], np.uint64).reshape(1, rank)),
            )
        assert told.tolist() == [len(block)]
        write_files(path, {"/".join(names): block})
    write_files(path, documents)
    assert _equal(_read_tensorstore(path, "."), _shown_as(wanted))
    document = json.loads(documents["attributes.json"])
    assert document.get("offset") == (list(array.offset[::-1]) if array.offset and any(array.offset) else None)
    assert document["user"] == 1


# ------------------------------------------------------------------------------------------------------- images

_CZYX = (Axis("c", "channel"), Axis("z", "space", "micrometer"), *(Axis(n, "space", "nanometer") for n in "yx"))
_LEVELS = [((2, 8, 12, 16), (1, 2, 40, 30.5)), ((2, 4, 6, 8), (1, 4, 80, 61)), ((2, 2, 3, 4), (1, 8, 160, 122))]


def pyramid(path: Path, names: Sequence[str], *, axes: Sequence[Axis] = _CZYX, **members: Any) -> list[Data]:
    """An OME-Zarr image, of which the last level is not sharded."""
    scales = [s[4 - len(axes) :] for _, s in _LEVELS]
    told = [
        {name: v for name, v in zip(("name", "type", "unit"), (a.name, a.type, a.unit), strict=True) if v} for a in axes
    ]
    steps = [[{"type": "scale", "scale": list(s)}] for s in scales]
    listed = [{"path": n, "coordinateTransformations": t} for n, t in zip(names, steps, strict=True)]
    image = {"version": "0.5", "multiscales": [{"name": "cells", "axes": told, "datasets": listed, **members}]}
    write_json(path / "zarr.json", group_document(ome={**image, "omero": {"channels": []}}, user=1))
    out = []
    for i, (name, (whole, _)) in enumerate(zip(names, _LEVELS, strict=True)):
        shape = whole[4 - len(axes) :]
        out.append((np.arange(math.prod(shape)) + i).astype("uint16").reshape(shape))
        chunk = [min(2, n) for n in shape]
        write_zarr(path / name, out[-1], chunk, [BIG, GZIP], shard=() if i == 2 else [2 * n for n in chunk])
    return out


def test_an_image_is_shown_as_viewers_of_n5_look_for_it(tmp_path: Path) -> None:
    data = pyramid(tmp_path / "source/image", ["0", "1", "2"])
    write_json(tmp_path / "source/image/labels/zarr.json", group_document(labels=[]))
    tree = _n5(tmp_path / "source")
    files = walk(tree)
    assert {name.split("/")[1] for name in files if name.startswith("image/")} == {
        "attributes.json", "labels", "s0", "s1", "s2",
    }  # fmt: skip
    space = {
        "axes": ["x", "y", "z", "c"],
        "units": ["nm", "nm", "um", ""],
        "resolution": [30.5, 40, 2, 1],
    }
    factors = [[1, 1, 1, 1], [2, 2, 2, 1], [4, 4, 4, 1]]
    group = _document(tree, "image")
    assert group == {
        "name": "cells", "multiScale": True, **space, "scales": factors,
        "ome": {"version": "0.5", "omero": {"channels": []}}, "user": 1,
    }  # fmt: skip
    write_files(tmp_path / "shown", files)
    for i, level in enumerate(data):
        document = _document(tree, f"image/s{i}")
        assert {name: document[name] for name in space} == space
        assert document["downsamplingFactors"] == factors[i]
        assert _equal(_read_tensorstore(tmp_path / "shown", f"image/s{i}"), level)
    back = _image(group, *(_document(tree, f"image/s{i}") for i in range(3)))
    assert back is not None
    assert back.axes == _CZYX
    assert [level.path for level in back.levels] == ["s0", "s1", "s2"]
    assert [level.scale for level in back.levels] == [(1, 2, 40, 30.5), (1, 4, 80, 61), (1, 8, 160, 122)]
    for absent_path in ("image/0", "image/0/zarr.json", "image/zarr.json"):
        with pytest.raises(FileNotFoundError):
            tree.resolve(absent_path)


def test_an_image_in_space_has_a_resolution_and_an_offset(tmp_path: Path) -> None:
    axes = [Axis(n, "space", "angstrom") for n in "zyx"]
    moved = [{"type": "translation", "translation": [10, 20, 30]}]
    pyramid(tmp_path / "image", ["s0", "s1", "s2"], axes=axes, coordinateTransformations=moved)
    group = _document(_n5(tmp_path), "image")
    assert group["pixelResolution"] == {"unit": "nm", "dimensions": pytest.approx([3.05, 4, 0.2])}
    assert group["offset"] == [3, 2, 1]
    assert _document(_n5(tmp_path), "image/s1")["offset"] == [3, 2, 1]


def test_a_volume_has_its_scales_as_levels() -> None:
    """Of which a precomputed volume has the collections in the directories below, beside their document."""
    scale_collections, levels = [], []
    for key, n in (("8_8_8", 8), ("16_16_16", 4)):
        encoding = ChunkEncoding("|u1", (0, 1, 2, 3), clipped=True)
        array = Array((1, n, n, n), (1, 4, 4, 4), "|u1", encoding, (None, 2, 1, 0), offset=(0, 3, 2, 1))
        grid = array.grid[:0:-1]
        layer = Layer(Unsharded(grid, lambda _: "x", lambda _: None))
        facts = Facts((n, n, n, 1), (4, 4, 4, 1), None, "uint8", "none")
        scale_collections.append(Collection("made", key, NestedNames(grid), (layer,), (), facts, array=array))
        levels.append(Level(key, (1, 64 / n, 64 / n, 64 / n), (0, 24, 16, 8)))
    axes = (Axis("c", "channel"), *(Axis(name, "space", "nanometer") for name in "zyx"))
    form = frozenset(("info",))
    source = Dataset(
        "made",
        tuple(scale_collections),
        format_names=form,
        attributes={},
        multiscales=(Multiscale("", axes, tuple(levels)),),
    )
    assert list(N5.children(source, set())) == []
    unsharded = N5.show("volume", source, Surroundings())
    assert [(c.path, c.shards) for c in unsharded.collections] == [("s0", "8_8_8"), ("s1", "16_16_16")]
    assert unsharded.hidden == {"info", "8_8_8", "16_16_16"}
    documents = {name: json.loads(raw) for name, raw in unsharded.documents.items()}
    assert documents.keys() == {"attributes.json", "s0/attributes.json", "s1/attributes.json"}
    assert documents["attributes.json"]["scales"] == [[1, 1, 1, 1], [2, 2, 2, 1]]
    assert documents["s1/attributes.json"]["dimensions"] == [4, 4, 4, 1]
    assert documents["s1/attributes.json"]["offset"] == [8, 16, 24, 0]
    assert documents["s1/attributes.json"]["units"] == ["nm", "nm", "nm", ""]
    assert unsharded.collections[1].names.coords((0, 0, 0, 0)) == (0, 0, 0)


def test_an_image_in_a_remote_store(tmp_path: Path) -> None:
    pyramid(tmp_path / "image", ["0", "1", "2"])
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/", "/n5-image/", recursive=True)
    try:
        remote = ShardFileSystem(source="memory://n5-image", layout="n5", skip_instance_cache=True)
        view = {path[1:]: remote.cat_file(path) for path in remote.find("")}
    finally:
        memory.rm("/n5-image", recursive=True)
    assert view == walk(_n5(tmp_path))


@pytest.mark.parametrize("names", [["s1", "s0", "s2"], ["a/0", "a/1", "a/2"]])
def test_an_image_keeps_names_that_cannot_change(names: list[str], tmp_path: Path) -> None:
    data = pyramid(tmp_path / "source/image", names)
    tree = _n5(tmp_path / "source")
    assert "scales" not in _document(tree, "image")
    write_files(tmp_path / "shown", walk(tree))
    for name, level in zip(names, data, strict=True):
        assert _equal(_read_tensorstore(tmp_path / "shown/image", name), level)


def test_an_image_with_a_level_missing_or_refused_is_shown_without_one(tmp_path: Path) -> None:
    pyramid(tmp_path / "image", ["0", "1", "2"])
    shutil.rmtree(tmp_path / "image/1")
    assert walk(_n5(tmp_path)).keys() >= {"image/0/attributes.json", "image/2/attributes.json"}
    write_zarr(tmp_path / "image/1", np.ones(_LEVELS[1][0], "float16"), (1, 2, 2, 2), [LITTLE])
    with pytest.raises(UnsupportedError, match="image/1: cannot be shown as n5: N5 has no data type float16"):
        _n5(tmp_path)
    tree = _n5(tmp_path, skip=True)
    assert {n.split("/")[1] for n in walk(tree) if n.startswith("image/")} == {"attributes.json", "0", "2"}


_PLAIN = attributes((8, 6), (4, 4), "uint8", compression=data_n5.RAW)


def _image(group: Any, *levels: Any) -> Multiscale | None:
    """What a group of N5 says of an image, with levels below."""
    dataset = N5.open("a", {"attributes.json": json.dumps(group).encode()})
    assert dataset is not None
    assert dataset.levels is not None
    assert (dataset.multiscales, dataset.problems) == ((), ())
    return dataset.levels.image(dict(zip(dataset.levels.paths(), map(_described, levels), strict=False)))


_UM = (Axis("y", "space", "micrometer"), Axis("x", "space", "micrometer"))
_RESOLUTION = {"pixelResolution": {"unit": "um", "dimensions": [3, 5]}}
_TRANSFORM = {"axes": ["y", "x"], "units": ["nm", "nm"], "scale": [4, 2], "translate": [0, 1]}


@pytest.mark.parametrize(
    ("group", "below", "axes", "levels"),
    [
        (
            {"scales": [[1, 1], [2, 4]], **_RESOLUTION},
            [{}, {}],
            _UM,
            (Level("s0", (5, 3), (0, 0)), Level("s1", (20, 6), (7.5, 1.5))),
        ),
        (
            {"downsamplingFactors": [[1, 1], [2, 1]], "resolution": [4, 40], "units": ["nm", "s"], "axes": ["x", "t"]},
            [{}, {"downsamplingFactors": [7, 7]}],
            (Axis("t", "time", "second"), Axis("x", "space", "nanometer")),
            (Level("s0", (40, 4), (0, 0)), Level("s1", (40, 8), (0, 2))),
        ),
        (
            {},
            [_RESOLUTION, {"downsamplingFactors": [2, 2], **_RESOLUTION}],
            _UM,
            (Level("s0", (5, 3), (0, 0)), Level("s1", (10, 6), (2.5, 1.5))),
        ),
        (
            {"multiScale": True, "resolution": [2, 1], "offset": [7, 9]},
            [{"resolution": [3, 3]}],
            (Axis("y", "space"), Axis("x", "space")),
            (Level("s0", (1, 2), (9, 7)),),
        ),
        (
            {"multiscales": [{"name": "em", "datasets": [{"path": "fine/s0", "transform": _TRANSFORM}]}]},
            [{}],
            (Axis("y", "space", "nanometer"), Axis("x", "space", "nanometer")),
            (Level("fine/s0", (4, 2), (0, 1)),),
        ),
    ],
)
def test_images_of_n5_are_described(group: Any, below: list[Any], axes: Any, levels: Any, tmp_path: Path) -> None:
    image = _image(group, *({**_PLAIN, **told} for told in below))
    assert image is not None
    assert (image.axes, image.levels) == (axes, levels)
    write_json(tmp_path / "image/attributes.json", group)
    for level, told in zip(levels, below, strict=True):
        write_json(tmp_path / "image" / level.path / "attributes.json", {**_PLAIN, **told})
        write_files(tmp_path / "image" / level.path, {"1/0": header((4, 4)) + bytes(range(16))})
    tree_files = walk(open_tree(str(tmp_path), layout="zarr2"))
    (told,) = ome.multiscales(json.loads(tree_files["image/.zattrs"]))
    assert (told.axes, told.levels) == (axes, levels)
    assert tree_files[f"image/{levels[0].path}/0/1"] == bytes(range(16))
    assert walk(_n5(tmp_path)) == {"attributes.json": b'{\n  "n5": "2.0.0"\n}\n'} | read_tree(tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("group", "below"),
    [
        ({}, [{}]),
        ({}, [_RESOLUTION, {}]),
        ({}, []),
        ({"multiScale": True}, []),
        ({"multiScale": True}, [{}, {}]),  # nobody tells the factors of s1
        ({"scales": [[1, 1], [2, 2]]}, [{}]),  # BigDataViewer has them at the setup, and levels further down
        ({"downsamplingFactors": [[1, 1], [2, 2]], "dataType": "uint8"}, []),
        ({"scales": []}, [{}]),
        ({"scales": [1, 2]}, [{}]),
        ({"scales": [[1, 1], [2]]}, [{}, {}]),
        ({"scales": [[1, 0]]}, [{}]),
        ({"scales": [["1", 1]]}, [{}]),
        ({"scales": [[]]}, [{}]),
        ({"scales": [[1, 1]], "resolution": "4"}, [{}]),
        ({"scales": [[1, 1]], "pixelResolution": [4, 4, 4]}, [{}]),
        ({"scales": [[1, 1]], "units": 7}, [{}]),
        ({"scales": [[1, 1e999]]}, [{}]),
        ({"scales": [[1, 10**400]]}, [{}]),
        ({"scales": [[1, 1], [1e200, 1]], "resolution": [1e200, 1]}, [{}, {}]),
        ({"downsamplingFactors": [2, 2, 2]}, [{}]),
        ({"multiScale": True}, [{"downsamplingFactors": 7}]),
        ({"multiscales": []}, [{}]),
        ({"multiscales": [{"datasets": [{"transform": {}}]}]}, [{}]),
        ({"multiscales": [{"datasets": [{"path": "../x", "transform": _TRANSFORM}]}]}, [{}]),
        ({"multiscales": [{"datasets": [{"path": 7, "transform": _TRANSFORM}]}]}, [{}]),
    ],
)
def test_what_makes_no_sense_is_no_image(group: Any, below: list[Any], tmp_path: Path) -> None:
    levels = [{**_PLAIN, **told} for told in below]
    assert _image(group, *levels) is None
    write_json(tmp_path / "g/attributes.json", group)
    for i, level in enumerate(levels):
        write_json(tmp_path / f"g/s{i}/attributes.json", level)
    data_n5.DAMAGED["sound"](tmp_path / "g/other")
    document = json.loads(walk(open_tree(str(tmp_path), layout="zarr2"))["g/.zattrs"])
    assert document == json.loads(json.dumps(group).replace("Infinity", '"Infinity"'))


@pytest.mark.parametrize("beside", ["s0/attributes.json", "s2/notes/x.txt", "s1"])
def test_an_image_keeps_its_names_where_others_have_the_new_ones(beside: str, tmp_path: Path) -> None:
    data = pyramid(tmp_path / "image", ["0", "1", "2"])
    write_files(tmp_path / "image", {beside: b"{}"})
    tree = _n5(tmp_path)
    tree_files = walk(tree)
    assert tree_files[f"image/{beside}"] == b"{}"
    assert "scales" not in _document(tree, "image")
    assert tree.problems() == []
    write_files(tmp_path / "shown", tree_files)
    for name, level in zip("012", data, strict=True):
        assert _equal(_read_tensorstore(tmp_path / "shown/image", name), level)


def test_levels_that_are_listed_coarse_first_are_shown_finest_first(tmp_path: Path) -> None:
    data = pyramid(tmp_path / "image", ["0", "1", "2"])
    document = json.loads((tmp_path / "image/zarr.json").read_bytes())
    document["attributes"]["ome"]["multiscales"][0]["datasets"].reverse()
    write_json(tmp_path / "image/zarr.json", document)
    tree = _n5(tmp_path)
    assert _document(tree, "image")["scales"] == [[1, 1, 1, 1], [2, 2, 2, 1], [4, 4, 4, 1]]
    assert _document(tree, "image/s0")["dimensions"] == list(data[0].shape[::-1])


def test_what_is_finer_along_one_axis_and_coarser_along_others_is_no_image(tmp_path: Path) -> None:
    levels = tuple(Level(name, scale, (0.0, 0.0)) for name, scale in (("0", (2.0, 1.0)), ("1", (1.0, 4.0))))
    axes = (Axis("y", "space"), Axis("x", "space"))
    assert not n5_multiscales.can_be_written(Multiscale("", axes, levels))
    assert n5_multiscales.can_be_written(Multiscale("", axes, levels[:1]))
    assert not n5_multiscales.can_be_written(Multiscale("", (axes[1], axes[1]), levels[:1]))


def test_images_of_n5_are_finest_first() -> None:
    coarse = {"path": "coarse", "transform": {**_TRANSFORM, "scale": [8, 4]}}
    fine = {"path": "fine", "transform": _TRANSFORM}
    for group, wanted in (
        ({"scales": [[2, 2], [1, 1]]}, ["s1", "s0"]),
        ({"multiscales": [{"datasets": [coarse, fine]}]}, ["fine", "coarse"]),
    ):
        image = _image(group, _PLAIN, _PLAIN)
        assert image is not None
        assert [level.path for level in image.levels] == wanted


def test_axes_that_nobody_names_are_in_the_order_of_ome_zarr() -> None:
    for rank, names in ((2, "yx"), (3, "zyx"), (4, "czyx"), (5, "tczyx")):
        level = attributes((2,) * rank, (2,) * rank, "uint8", compression=data_n5.RAW)
        image = _image({"scales": [[1] * rank]}, level)
        assert image is not None
        assert "".join(axis.name for axis in image.axes) == names


def test_levels_that_differ_beyond_all_floats_are_no_image() -> None:
    def image(*scales: float) -> Multiscale:
        levels = (Level(f"s{i}", (scale,), (0.0,)) for i, scale in enumerate(scales))
        return Multiscale("", (Axis("x", "space", None),), tuple(levels))

    assert not n5_multiscales.can_be_written(image(1e-200, 1e200))
    assert n5_multiscales.can_be_written(image(1e-100, 1e200))
    n5_multiscales.group_attributes(image(1e-100, 1e200))


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e6)] * 3), min_size=1, max_size=4), st.tuples(*[st.floats(-1e6, 1e6)] * 3))
def test_what_is_written_of_an_image_is_read_again(steps: list[tuple[float, ...]], begin: tuple[float, ...]) -> None:
    scales = [tuple(map(sum, zip(*steps[: i + 1], strict=True))) for i in range(len(steps))]  # each larger than before
    axes = tuple(Axis(n, "space", "micrometer") for n in "zyx")
    shifts = [tuple(b + (s - f) / 2 for b, s, f in zip(begin, scale, scales[0], strict=True)) for scale in scales]
    levels = [Level(f"s{i}", s, t) for i, (s, t) in enumerate(zip(scales, shifts, strict=True))]
    image = Multiscale("", axes, tuple(levels))
    told = [n5_multiscales.level_attributes(image, i) for i in range(len(levels))]
    below = [{**attributes((4,) * 3, (2,) * 3, "uint8", compression=data_n5.RAW), **level} for level in told]
    for group in (n5_multiscales.group_attributes(image), {}):
        back = _image(group, *below)
        assert back is not None
        assert back.axes == axes
        for a, b in zip(back.levels, levels, strict=True):
            assert a.scale == pytest.approx(b.scale)
            within = 1e-5 * max(map(abs, (*begin, *b.scale)))
            assert a.translation == pytest.approx(b.translation, rel=1e-6, abs=within)
