"""The layout zarr2: documents, chunks and images of any described array, read by libraries that know Zarr v2."""

from __future__ import annotations

import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs import decoders, encoded_chunks
from shardfs.formats.layouts import CODECS
from shardfs.formats.zarr2.codec_names import compressor
from shardfs.formats.zarr2.view import shown_encoding
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.arrays import Array, ChunkEncoding, Codec
from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests.data_layouts import BYTE, Written, arrays, element, equal
from tests.datasets import BIG, BLOSC, CRC, GZIP, LITTLE, ZSTD, transpose
from tests.handmade import group_document, write_files, write_json, zarr_metadata
from tests.suites.walking import entries, walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.vfs.directory_content import Content
    from shardfs.vfs.nodes import DirectoryNode
    from tests.datasets import Array as Data
    from tests.datasets import Dataset


def _zarr2(path: Path, *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout="zarr2", skip_unsupported=skip)


def _shown(path: Path) -> dict[str, Any]:
    """Every file, documents parsed."""
    files = walk(_zarr2(path))
    return {name: json.loads(data) if "/.z" in f"/{name}" else data for name, data in files.items()}


def _read_tensorstore(path: Path) -> Data:
    store = {"driver": "file", "path": f"{path}/"}
    found: Data = ts.open({"driver": "zarr", "kvstore": store}).result().read().result()
    return found


def _read_zarr(path: Path) -> Data:
    return np.asarray(zarr.open_array(path, mode="r", zarr_format=2)[...])


# ---------------------------------------------------------------------------------------------------- arrays


@given(arrays())
def test_any_array_of_zarr_v3_is_read_as_v2(tmp_path_factory: pytest.TempPathFactory, written: Written) -> None:
    path = tmp_path_factory.mktemp("zarr2")
    written.write(path / "source")
    tree_files = walk(_zarr2(path / "source"))
    write_files(path / "shown", tree_files)
    assert equal(_read_tensorstore(path / "shown"), written.data)
    assert equal(_read_zarr(path / "shown"), written.data)
    assert not [name for name in tree_files if name == "zarr.json" or name.split("/")[0].startswith("c")]


def test_every_variant_is_read_as_v2(zarr3_dataset: Dataset, tmp_path: Path) -> None:
    for form, path in (("sharded", zarr3_dataset.path), ("plain", zarr3_dataset.twin)):
        write_files(tmp_path / form, walk(_zarr2(path)))
        for member, wanted in zarr3_dataset.arrays.items():
            assert equal(_read_zarr(tmp_path / form / member), wanted)
            assert equal(_read_tensorstore(tmp_path / form / member), wanted)
        assert not list((tmp_path / form).rglob("zarr.json"))


@pytest.mark.parametrize(
    ("chain", "expected", "passes"),
    [
        ([LITTLE], None, True),
        ([BIG], None, True),
        ([LITTLE, CRC], None, True),
        ([LITTLE, GZIP], {"id": "gzip", "level": 5}, True),
        ([LITTLE, GZIP, CRC], {"id": "gzip", "level": 5}, True),
        ([LITTLE, ZSTD], {"id": "zstd", "level": 3}, True),
        ([LITTLE, BLOSC], {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}, True),
        ([transpose(1, 0), LITTLE, ZSTD], {"id": "zstd", "level": 3}, True),
        ([transpose(1, 0), transpose(1, 0), LITTLE, ZSTD], {"id": "zstd", "level": 3}, True),
        ([LITTLE, ZSTD, GZIP], None, False),
        ([LITTLE, CRC, GZIP], None, False),
    ],
)
def test_payloads_pass_where_they_can(chain: list[Any], expected: Any, passes: bool, tmp_path: Path) -> None:
    data = np.arange(48, dtype="uint16").reshape(6, 8) + 1
    Written(data, (2, 4), chain, (4, 8)).write(tmp_path / "sharded")
    Written(data, (2, 4), chain).write(tmp_path / "plain")
    source_bytes = (tmp_path / "plain/c/1/1").read_bytes()
    for form in ("sharded", "plain"):
        tree_files = _shown(tmp_path / form)
        assert tree_files[".zarray"]["compressor"] == expected
        assert tree_files[".zarray"]["filters"] is None
        assert tree_files[".zarray"]["order"] == ("F" if chain[0] == transpose(1, 0) and chain[1] == LITTLE else "C")
        if passes:
            assert tree_files["1/1"] == source_bytes[: -4 if chain[-1] == CRC else None]
        else:
            assert tree_files["1/1"] == data[2:4, 4:].tobytes()


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Codec("numcodecs.bz2", {"level": 3}), {"id": "bz2", "level": 3}),
        (Codec("numcodecs.zlib", {"level": 3}), {"id": "zlib", "level": 3}),
        (
            Codec("numcodecs.lzma", {"format": 1, "preset": 2}),
            {"id": "lzma", "format": 1, "preset": 2, "check": -1, "filters": None},
        ),
        (Codec("numcodecs.lz4", {"acceleration": 1}), {"id": "lz4", "acceleration": 1}),
        (Codec("zstd", {"level": 3, "checksum": True}), {"id": "zstd", "level": 3}),
        (Codec("n5.lz4"), None),
        (Codec("bz2"), None),
        (Codec("numcodecs.shuffle", {"elementsize": 4}), None),
    ],
)
def test_codecs_are_called_as_in_v2(codec: Codec, expected: Any) -> None:
    assert compressor(codec) == expected


@pytest.mark.parametrize("name", ["BZ2", "LZMA", "Zlib", "LZ4", "Zstd", "GZip", "Blosc"])
def test_codecs_of_numcodecs_pass(name: str, tmp_path: Path) -> None:
    data = np.arange(30, dtype="int32")
    compressor = getattr(zarr.codecs.numcodecs, name)()
    for form, shards in (("plain", None), ("sharded", (20,))):
        array = zarr.create_array(
            tmp_path / form, shape=(30,), chunks=(10,), shards=shards, dtype="int32", compressors=compressor
        )
        array[...] = data
        tree_files = walk(_zarr2(tmp_path / form))
        if name != "GZip":  # which tells when it was made
            assert [tree_files[f"{i}"] for i in range(3)] == [
                (tmp_path / f"plain/c/{i}").read_bytes() for i in range(3)
            ]
        write_files(tmp_path / f"shown-{form}", tree_files)
        assert equal(_read_zarr(tmp_path / f"shown-{form}"), data)
        assert json.loads(tree_files[".zarray"])["compressor"]["id"] == name.lower()


def test_clipped_chunks_are_padded_and_others_pass() -> None:
    """Where the size of a chunk that has to grow could not be told without work, none is shown compressed."""

    def shown(shape: tuple[int, ...], *names: str) -> ChunkEncoding:
        source_bytes = ChunkEncoding(">u2", (0, 1), clipped=True, codecs=tuple(map(Codec, names)))
        return shown_encoding(Array(shape, (4, 4), "<u2", source_bytes, (0, 1)))

    assert shown((8, 8), "gzip") == ChunkEncoding(">u2", (0, 1), codecs=(Codec("gzip"),))
    assert shown((8, 7), "gzip") == ChunkEncoding(">u2", (0, 1), codecs=(Codec("gzip"),))
    assert shown((8, 7), "numcodecs.bz2") == ChunkEncoding("<u2", (0, 1))
    assert shown((8, 7)) == ChunkEncoding(">u2", (0, 1))


@pytest.mark.parametrize(("separator", "name"), [("/", "default"), (".", "default"), ("/", "v2"), (".", "v2")])
def test_keys_keep_their_separator(separator: str, name: str, tmp_path: Path) -> None:
    keys = {"name": name, "configuration": {"separator": separator}}
    data = np.ones((4, 4), "uint8")
    Written(data, (2, 2), [{"name": "bytes"}], (4, 4), {"chunk_key_encoding": keys}).write(tmp_path)
    tree_files = _shown(tmp_path)
    assert tree_files[".zarray"]["dimension_separator"] == separator
    assert sorted(tree_files) == [".zarray", ".zattrs", *(f"{i}{separator}{j}" for i in (0, 1) for j in (0, 1))]


def test_a_document(tmp_path: Path) -> None:
    members = {
        "fill_value": "0x7fc00001",
        "dimension_names": ["y", "x"],
        "attributes": {"units": "V", "_ARRAY_DIMENSIONS": ["a", "b"]},
    }
    Written(np.zeros((5, 3), "float32"), (2, 3), [BIG, ZSTD], (4, 3), members).write(tmp_path)
    tree_files = _shown(tmp_path)
    assert tree_files[".zarray"] == {
        "zarr_format": 2,
        "shape": [5, 3],
        "chunks": [2, 3],
        "dtype": ">f4",
        "order": "C",
        "fill_value": "NaN",
        "dimension_separator": "/",
        "filters": None,
        "compressor": {"id": "zstd", "level": 3},
    }
    assert tree_files[".zattrs"] == {"units": "V", "_ARRAY_DIMENSIONS": ["y", "x"]}


@pytest.mark.parametrize(
    ("told", "marker"),
    [("AAAAgB2vFUQ=", float(np.float32(1e20))), (-9.5, -9.5), ("AAAA", "AAAA"), ("-1", "-1")],
)
def test_what_marks_missing_values_is_a_number(told: Any, marker: Any, tmp_path: Path) -> None:
    """xarray writes that of floats in base64."""
    for name, dtype in (("float", "float32"), ("int", "int16")):
        Written(np.ones(3, dtype), (2,), members={"attributes": {"_FillValue": told}}).write(tmp_path / name)
    documents = _shown(tmp_path)
    assert documents["float/.zattrs"] == {"_FillValue": marker}
    assert documents["int/.zattrs"] == {"_FillValue": told}


NAN = "AAAAAAAA+H8="


@pytest.mark.parametrize(
    ("dtype", "zarr3_fill", "attributes", "fill_value", "fills"),
    [
        ("int16", 0, {}, None, True),
        ("int16", 7, {"_FillValue": -9999}, -9999, True),
        ("int16", -9999, {"_FillValue": -9999}, -9999, False),
        ("int16", 0, {"_FillValue": "no number"}, None, True),
        ("float32", 0.0, {}, None, True),
        ("float32", "NaN", {}, "NaN", False),
        ("float32", "NaN", {"_FillValue": NAN}, "NaN", False),
        ("float32", 0.0, {"_FillValue": NAN}, "NaN", True),
        ("float32", "NaN", {"_FillValue": "AAAAAAAA8D8="}, 1.0, True),
        ("complex64", [0, 0], {"_FillValue": ["AAAAAAAA8D8=", NAN]}, [1.0, "NaN"], True),
        ("bool", False, {}, None, True),
    ],
)
def test_the_fill_value_is_the_mark_of_missing_values(
    dtype: str, zarr3_fill: Any, attributes: Any, fill_value: Any, fills: bool, tmp_path: Path
) -> None:
    """Whatever readers would take the fill value for; chunks that are not stored are shown if it is not theirs."""
    data = np.full((4, 2), element(zarr3_fill, dtype), dtype)
    data[0] = 1
    members = {"fill_value": zarr3_fill, "attributes": attributes}
    for name, names in (("named", ["y", "x"]), ("half", ["y", None]), ("unnamed", None)):
        more = {"dimension_names": names} if names else {}
        Written(data, (1, 2), [LITTLE] if data.itemsize > 1 else [BYTE], (2, 2), members | more).write(tmp_path / name)
    tree_files = walk(_zarr2(tmp_path))
    assert json.loads(tree_files["named/.zarray"])["fill_value"] == fill_value
    assert {name for name in tree_files if name.startswith("named/") and "/.z" not in name} == {
        f"named/{i}/0" for i in range(4 if fills else 1)
    }
    assert b"".join(tree_files[f"named/{i}/0"] for i in range(4 if fills else 1)) == data[: 4 if fills else 1].tobytes()
    for name in ("half", "unnamed"):
        assert json.loads(tree_files[f"{name}/.zarray"])["fill_value"] == zarr3_fill
        assert f"{name}/3/0" not in tree_files
    assert fill_value != "NaN" or "_FillValue" not in json.loads(tree_files["named/.zattrs"])


def test_missing_chunks_of_a_store_behind_a_network_are_filled_too(tmp_path: Path) -> None:
    """There, chunks that are asked for together are fetched together."""
    members = {"dimension_names": ["x"], "fill_value": 7}
    Written(np.array([1, 7, 3], "uint8"), (1,), [BYTE], (3,), members).write(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/filled.zarr", recursive=True)
    try:
        view = ShardFileSystem("memory://filled.zarr", layout="zarr2")
        assert view.cat(["0", "1", "2"]) == {"/0": b"\1", "/1": b"\7", "/2": b"\3"}
    finally:
        memory.rm("/filled.zarr", recursive=True)


def test_levels_of_images_keep_their_fill_value(tmp_path: Path) -> None:
    axes = [{"name": name, "type": "space"} for name in "yx"]
    levels = [{"path": "s0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1]}]}]
    image = {"version": "0.5", "multiscales": [{"name": "i", "axes": axes, "datasets": levels}]}
    write_json(tmp_path / "zarr.json", group_document(ome=image))
    data = np.zeros((4, 2), "uint8")
    Written(data, (1, 2), [BYTE], (2, 2), {"dimension_names": ["y", "x"]}).write(tmp_path / "s0")
    tree_files = _shown(tmp_path)
    assert tree_files["s0/.zarray"]["fill_value"] == 0
    assert not [name for name in tree_files if name.startswith("s0/") and "/.z" not in name]


def test_a_missing_chunk_that_is_too_large_to_be_made_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Perhaps all are stored, and nobody sees that one is missing."""
    members = {"dimension_names": ["x"], "codecs": [LITTLE, GZIP], "shape": [1 << 28]}
    grid = {"name": "regular", "configuration": {"chunk_shape": [1 << 27]}}
    write_json(tmp_path / "zarr.json", _plain(**members, chunk_grid=grid))
    write_files(tmp_path, {"c/0": b"stored"})
    tree = _zarr2(tmp_path)
    assert {e.name: e.size for e in entries(tree, ROOT)}[b"1"] == -1
    assert bytes(tree.read(tree.resolve("0").number, 0, 9)) == b"stored"
    with pytest.raises(UnsupportedError, match="limit"):
        tree.resolve("1")


@pytest.mark.parametrize(("member", "dtype"), [("fixed_length_utf32", "<U3"), ("null_terminated_bytes", "S3")])
def test_strings_of_one_length_pass(member: str, dtype: str, tmp_path: Path) -> None:
    data = np.array(["a", "", "abc", ""], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python says that the specification does not have them yet
        zarr.create_array(tmp_path / "source", data=data, chunks=(1,), shards=(2,), dimension_names=["x"])
        assert json.loads((tmp_path / "source/zarr.json").read_text())["data_type"]["name"] == member
    write_files(tmp_path / "shown", walk(_zarr2(tmp_path / "source")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _read_zarr(tmp_path / "shown").tolist() == data.tolist()


# --------------------------------------------------------------------------------- the codec that is asked for


@given(arrays(), st.sampled_from(("zarr2", "zarr3", "n5")), st.sampled_from(sorted(CODECS)))
def test_any_array_in_the_codec_that_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, written: Written, layout: str, codec: str
) -> None:
    """Of Zarr v3, which layout `zarr3` shows as it is stored."""
    path = tmp_path_factory.mktemp("codec")
    written.write(path / "source")
    if layout == "zarr3":
        with pytest.raises(UnsupportedError, match=f"leave out chunk_codec={codec}"):
            open_tree(str(path / "source"), layout=layout, chunk_codec=codec)
        return
    try:
        tree = open_tree(str(path / "source"), layout=layout, chunk_codec=codec)
    except UnsupportedError:
        assert layout == "n5"
        return
    tree_files = walk(tree)
    write_files(path / "shown", tree_files)
    if layout == "zarr2":
        told = json.loads(tree_files[".zarray"])["compressor"]
        assert (told or {"id": "raw"})["id"] == codec
        assert equal(_read_zarr(path / "shown"), written.data)
        return
    assert json.loads(tree_files["attributes.json"])["compression"]["type"] == codec.replace("zlib", "gzip")
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/shown/"}}
    values = ts.open(spec).result().read().result().T
    assert np.array_equal(values.astype(written.data.dtype), written.data, equal_nan=written.data.dtype.kind == "f")


def test_strings_are_not_shown_in_another_codec(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_array(tmp_path, shape=(2,), chunks=(2,), dtype="string")[...] = np.array(["a", "b"], object)
    assert json.loads(walk(open_tree(str(tmp_path), layout="zarr2", chunk_codec="zstd"))[".zarray"])["compressor"]
    with pytest.raises(UnsupportedError, match="strings of any length are shown only in the codec"):
        open_tree(str(tmp_path), layout="zarr2", chunk_codec="raw")


def test_an_array_without_axes_says_that_it_has_none(tmp_path: Path) -> None:
    Written(np.array(2.5), ()).write(tmp_path)
    assert _shown(tmp_path)[".zattrs"] == {"_ARRAY_DIMENSIONS": []}


def test_names_that_some_axes_lack_are_left_out(tmp_path: Path) -> None:
    Written(np.ones((5, 3), "uint8"), (2, 3), [{"name": "bytes"}], (), {"dimension_names": ["y", None]}).write(tmp_path)
    assert _shown(tmp_path)[".zattrs"] == {}


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        ("bool", True, True),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("float16", "0x3c00", 1.0),
        ("float32", "0x7f800000", "Infinity"),
        ("float32", "0xffc00000", "NaN"),
        ("float64", "0x3ff8000000000000", 1.5),
        ("float64", "-Infinity", "-Infinity"),
        ("complex64", ["0x3fc00000", "NaN"], [1.5, "NaN"]),
        ("int8", None, 0),
        ("bool", None, False),
    ],
)
def test_fill_values(data_type: str, value: Any, expected: Any, tmp_path: Path) -> None:
    doc = _plain(data_type=data_type, fill_value=value)
    write_json(tmp_path / "zarr.json", doc)
    fill = _shown(tmp_path)[".zarray"]["fill_value"]
    assert fill == expected
    assert type(fill) is type(expected)


# --------------------------------------------------------------------------------------------------- refused


def _plain(**members: Any) -> dict[str, Any]:
    """The document of an array of four elements in chunks of two, not sharded."""
    return {
        **zarr_metadata((4,), (2,), (2,), data_type="uint16"),
        "codecs": [LITTLE],
        **members,
    }


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "data type": ({"data_type": "int4"}, "data type 'int4'"),
    "structure": ({"data_type": {"name": "struct", "configuration": {"fields": []}}}, "data type 'struct'"),
    "strings of no length": ({"data_type": "fixed_length_utf32"}, "data type 'fixed_length_utf32'"),
    "bytes": (
        {"data_type": {"name": "null_terminated_bytes", "configuration": {"length_bytes": -1}}},
        "data type 'null_terminated_bytes'",
    ),
    "times": ({"data_type": "numpy.datetime64"}, "data type 'numpy.datetime64'"),
    "raw bits": ({"data_type": "r16"}, "data type 'r16'"),
    "strings in bytes": ({"data_type": "string", "fill_value": ""}, "codec 'bytes' cannot make bytes of strings"),
    "codec": ({"codecs": [LITTLE, {"name": "example.pack"}]}, "codec 'example.pack' must be undone"),
    "serializer": ({"codecs": [{"name": "example.image"}]}, "codec 'example.image' must be undone"),
    "filter": ({"codecs": [{"name": "numcodecs.delta"}, LITTLE]}, "codec 'numcodecs.delta'"),
    "grid": ({"chunk_grid": {"name": "example.grid", "configuration": {}}}, "chunk grid 'example.grid'"),
    "keys": (
        {"chunk_key_encoding": {"name": "example.keys"}},
        "chunk_key_encoding should be default or v2, not 'example.keys'",
    ),
    "fill value": ({"fill_value": 300, "data_type": "uint8"}, "fill_value 300"),
    "no byte order": ({"codecs": [{"name": "bytes"}]}, "endian"),
    "extension": ({"example.ext": {"name": "x"}}, "member 'example.ext' is an extension that must be understood"),
    "transformer": ({"storage_transformers": [{"name": "example"}]}, "storage transformers"),
    "too large": (
        {"codecs": [LITTLE, CRC, GZIP], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 30]}}},
        "limit",
    ),
}


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_what_cannot_be_said_is_refused_with_path_and_reason(name: str, tmp_path: Path) -> None:
    members, why = _REFUSED[name]
    write_json(tmp_path / "group/bad/zarr.json", _plain(**members))
    Written(np.ones(4, "uint16"), (2,)).write(tmp_path / "group/good")
    with pytest.raises(UnsupportedError, match=f"^group/bad: cannot be shown as zarr2: .*{why}"):
        _zarr2(tmp_path)


def test_extensions_that_need_not_be_understood_are_left_out(tmp_path: Path) -> None:
    write_json(tmp_path / "zarr.json", _plain(**{"example.ext": {"must_understand": False}, "none": None}))
    assert _shown(tmp_path).keys() == {".zarray", ".zattrs"}


def test_or_left_out_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_json(tmp_path / "a/bad/zarr.json", _plain(data_type="int4"))
    (tmp_path / "a/bad/c").mkdir()
    Written(np.ones(4, "uint16"), (2,)).write(tmp_path / "a/good")
    with caplog.at_level(logging.WARNING):
        tree = _zarr2(tmp_path, skip=True)
        tree_files = walk(tree)
    assert sorted(tree_files) == [".zgroup", ".zmetadata", *(f"a/{n}" for n in (".zgroup", ".zmetadata"))] + [
        f"a/good/{n}" for n in (".zarray", ".zattrs", "0", "1")
    ]
    assert sorted(json.loads(tree_files[".zmetadata"])["metadata"]) == [
        ".zgroup", "a/.zgroup", "a/good/.zarray", "a/good/.zattrs",
    ]  # fmt: skip
    (problem,) = tree.problems()
    assert problem.path == "a/bad"
    assert problem.skipped
    assert "a/bad: not shown: cannot be shown as zarr2: zarr.json: data type 'int4'" in caplog.text


def test_a_source_without_data_is_still_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(NotADatasetError):
        _zarr2(tmp_path)


# ---------------------------------------------------------------------------------------------------- groups


def _tree(root: Path) -> None:
    write_json(root / "g/zarr.json", group_document(title="t", odd=float("nan")))
    Written(np.ones((4, 4), "uint8"), (2, 2), [{"name": "bytes"}], (4, 4)).write(root / "g/a")
    Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(root / "plain/deep/b")
    (root / "notes/more").mkdir(parents=True)
    (root / "notes/readme.txt").write_text("hello")


def test_every_directory_on_the_way_to_an_array_is_a_group(tmp_path: Path) -> None:
    _tree(tmp_path)
    tree_files = _shown(tmp_path)
    groups = sorted(name for name in tree_files if name.endswith(".zgroup"))
    assert groups == [".zgroup", "g/.zgroup", "plain/.zgroup", "plain/deep/.zgroup"]
    assert tree_files["notes/readme.txt"] == b"hello"
    assert tree_files["g/.zattrs"] == {"title": "t", "odd": "NaN"}


def test_one_read_opens_the_hierarchy(tmp_path: Path) -> None:
    _tree(tmp_path / "source")
    tree_files = _shown(tmp_path / "source")
    for at in ("", "g/", "plain/", "plain/deep/"):
        document = tree_files[f"{at}.zmetadata"]
        assert document["zarr_consolidated_format"] == 1
        documents = {name.removeprefix(at): data for name, data in tree_files.items() if name.startswith(at)}
        wanted = {n: d for n, d in documents.items() if n.rsplit("/", 1)[-1] in (".zarray", ".zgroup", ".zattrs")}
        assert document["metadata"] == wanted
    assert "g/a/.zmetadata" not in tree_files
    write_files(tmp_path / "shown", walk(_zarr2(tmp_path / "source")))
    opened = zarr.open_consolidated(tmp_path / "shown", mode="r", zarr_format=2)
    assert sorted(name for name, _ in opened.members(max_depth=None)) == [
        "g",
        "g/a",
        "plain",
        "plain/deep",
        "plain/deep/b",
    ]


def test_what_zarr_v2_left_behind_is_there_once(tmp_path: Path) -> None:
    """As when the documents of a hierarchy were migrated, and the old ones kept."""
    _tree(tmp_path)
    for name in (".zgroup", ".zattrs", ".zmetadata"):
        (tmp_path / "g" / name).write_text('{"old": 1}')
    tree = _zarr2(tmp_path)
    listed = [e.name for e in entries(tree, tree.resolve("g").number)]
    assert sorted(listed) == [b".zattrs", b".zgroup", b".zmetadata", b"a"]
    assert b"old" not in b"".join(data for name, data in walk(tree).items() if name.startswith("g/.z"))


def test_too_much_to_be_told_in_one_file_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(9):
        Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(tmp_path / f"a{i}")
    tree = _zarr2(tmp_path)
    monkeypatch.setattr("shardfs.vfs.directories.MAX_CONSOLIDATED", 5)
    looked: list[str] = []
    opened = tree.datasets.open

    def counted(directory: DirectoryNode) -> Content:
        looked.append(directory.path)
        return opened(directory)

    monkeypatch.setattr(tree.datasets, "open", counted)
    for limit in (9, 3):
        with pytest.raises(FileNotFoundError, match="too much lies below"):
            tree.resolve(".zmetadata")
        assert len(looked) <= limit
        looked.clear()


def test_zarr_v2_that_is_stored_stays(tmp_path: Path) -> None:
    old = zarr.create_group(tmp_path / "old.zarr", zarr_format=2, attributes={"mine": 1})
    old.create_array("x", shape=(4,), chunks=(2,), dtype="uint16")[...] = [1, 2, 3, 4]
    Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(tmp_path / "new")
    tree_files = walk(_zarr2(tmp_path))
    source_documents = {
        f"old.zarr/{p.relative_to(tmp_path / 'old.zarr')}": p.read_bytes()
        for p in (tmp_path / "old.zarr").rglob("*")
        if p.is_file()
    }
    assert {
        n: d for n, d in tree_files.items() if n.startswith("old") and not n.endswith(".zmetadata")
    } == source_documents
    assert json.loads(tree_files[".zmetadata"])["metadata"]["old.zarr/x/.zarray"]["shape"] == [4]


def test_listing_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is stored: not even to tell sizes, which `ls -l` wants."""
    data = np.ones((8, 8), "uint16")
    for name, chain in (
        ("crc", [LITTLE, ZSTD, CRC]),
        ("two", [LITTLE, ZSTD, GZIP]),
        ("turned", [transpose(1, 0), BIG, CRC]),
    ):
        Written(data, (2, 2), chain, (4, 4)).write(tmp_path / name)
    sizes: dict[str, int] = {}
    undone: list[Any] = []
    for name, decode in decoders.DECODERS.items():

        def counted(*given: Any, decode: Callable[..., bytes] = decode, name: str = name) -> bytes:
            undone.append(name)
            return decode(*given)

        monkeypatch.setitem(decoders.DECODERS, name, counted)
    monkeypatch.setattr(encoded_chunks, "require_crc32c", lambda data: undone.append("crc32c"))
    fs = ShardFileSystem(str(tmp_path), "zarr2", skip_instance_cache=True)
    for path, told in fs.find("", detail=True).items():
        sizes[path] = told["size"]
    assert undone == []
    assert len([p for p in sizes if "/." not in p]) == 48
    for path, size in sizes.items():
        assert len(fs.cat_file(path)) == size
    assert len(undone) >= 48


def test_documents_have_the_time_of_their_directory(tmp_path: Path) -> None:
    _tree(tmp_path)
    tree = _zarr2(tmp_path)
    for path, directory in (("g/a/.zarray", "g/a"), (".zmetadata", "")):
        assert tree.resolve(path).mtime_ns == (tmp_path / directory).stat().st_mtime_ns


# ---------------------------------------------------------------------------------------------------- images

_AXES = [{"name": "c", "type": "channel"}, {"name": "y", "type": "space", "unit": "micrometer"}]
_LEVELS = [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 0.5]}]}]
_IMAGE = {"name": "n", "axes": _AXES, "datasets": _LEVELS}


@pytest.mark.parametrize(
    ("ome", "expected"),
    [
        (
            {"multiscales": [_IMAGE], "omero": {"channels": [], "version": "0.5"}},
            {"multiscales": [{"version": "0.4", **_IMAGE}], "omero": {"version": "0.4", "channels": []}},
        ),
        ({"labels": ["cells"]}, {"labels": ["cells"]}),
        ({"image-label": {"colors": []}}, {"image-label": {"version": "0.4", "colors": []}}),
        ({"plate": {"rows": [], "version": "0.5"}}, {"plate": {"version": "0.4", "rows": []}}),
        ({"well": {"images": [{"path": "0"}]}}, {"well": {"version": "0.4", "images": [{"path": "0"}]}}),
        ({"bioformats2raw.layout": 3}, {"bioformats2raw.layout": 3}),
        ({"series": ["0", "1"]}, {"series": ["0", "1"]}),
    ],
)  # fmt: skip
def test_ome_zarr_05_is_shown_as_04(ome: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    attributes = {"mine": [1], "ome": {"version": "0.5", **ome}}
    write_json(tmp_path / "zarr.json", group_document(**attributes))
    Written(np.ones((1, 4), "uint8"), (1, 2), [{"name": "bytes"}]).write(tmp_path / "0")
    assert _shown(tmp_path)[".zattrs"] == {"mine": [1], **expected}


def test_another_version_is_left_alone(tmp_path: Path) -> None:
    """0.6 says in other words where an image lies; who reads 0.4 must not take them for its own."""
    attributes = {"ome": {"version": "0.6.dev1", "multiscales": []}}
    write_json(tmp_path / "zarr.json", group_document(**attributes))
    Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(tmp_path / "0")
    assert _shown(tmp_path)[".zattrs"] == attributes


def test_fsspec_takes_the_layout_and_what_to_do_with_the_rest(tmp_path: Path) -> None:
    Written(np.arange(4, dtype="uint16"), (2,)).write(tmp_path / "good")
    write_json(tmp_path / "bad/zarr.json", _plain(data_type="int4"))
    with pytest.raises(UnsupportedError, match="bad"):
        ShardFileSystem(str(tmp_path), layout="zarr2", skip_instance_cache=True)
    fs = ShardFileSystem(str(tmp_path), layout="zarr2", unsupported="skip", skip_instance_cache=True)
    assert sorted(fs.ls("", detail=False)) == ["/.zgroup", "/.zmetadata", "/bad", "/good"]
    assert fs.cat_file("/good/1") == np.array([2, 3], "<u2").tobytes()
