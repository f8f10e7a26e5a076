"""Zarr v2 as a source: what its documents describe, and how other layouts show it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.zarr2 import ZARR2
from shardfs.formats.zarr2.codec_names import compressor
from shardfs.formats.zarr2.view import shown_as_zarr2
from shardfs.model.arrays import Array, Codec
from shardfs.model.errors import UnsupportedError
from shardfs.vfs.tree import open_tree
from tests.clients.write_zarr2 import VARIANTS, data_of, write
from tests.data_layouts import FILLS, Written, element, equal
from tests.handmade import write_files, write_json
from tests.suites.walking import walk

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.dataset import Dataset


def _document(**members: Any) -> dict[str, Any]:
    usual = {"zarr_format": 2, "shape": [7, 10], "chunks": [2, 3], "dtype": "<u2", "order": "C", "fill_value": 0}
    return {**usual, "compressor": None, "filters": None, "dimension_separator": ".", **members}


def _opened(document: Any, attributes: Any = None) -> Dataset:
    attributes = {} if attributes is None else {".zattrs": json.dumps(attributes).encode()}
    dataset = ZARR2.open("a", {".zarray": json.dumps(document).encode(), **attributes})
    assert dataset is not None
    return dataset


def _array(document: Any, attributes: Any = None) -> Array:
    (collection,) = _opened(document, attributes).unsharded
    assert collection.array is not None
    return collection.array


@pytest.mark.parametrize(
    ("dtype", "native", "numpy_type"),
    [("|b1", "|b1", "|b1"), ("<u2", "<u2", "<u2"), (">f8", "<f8", ">f8"), ("<c8", "<c8", "<c8"),
     ("|S5", "|S5", "|S5"), (">U4", "<U4", ">U4")],
)  # fmt: skip
def test_data_types_are_numpy_s(dtype: str, native: str, numpy_type: str) -> None:
    fill_value = "" if np.dtype(dtype).kind in "SU" else 0
    array = _array(_document(dtype=dtype, fill_value=fill_value))
    assert (array.data_type, array.encoding.data_type) == (native, numpy_type)


def test_strings_of_any_length_have_a_filter() -> None:
    """The fill value 0 is that of zarr-python 2."""
    array = _array(_document(dtype="|O", filters=[{"id": "vlen-utf8"}], fill_value=0, order="F"))
    assert (array.data_type, array.encoding.serializer.name, array.fill_value) == ("|O", "vlen-utf8", "")
    assert array.encoding.order == (1, 0)


@pytest.mark.parametrize(
    "codec",
    [
        Codec("gzip", {"level": 3}),
        Codec("zstd", {"level": 7}),
        Codec("blosc", {"cname": "zstd", "clevel": 3, "shuffle": "bitshuffle", "blocksize": 0}),
        Codec("numcodecs.zlib", {"level": 1}),
        Codec("numcodecs.bz2", {"level": 1}),
        Codec("numcodecs.lz4", {"acceleration": 1}),
        Codec("numcodecs.lzma", {"format": 1, "check": -1, "preset": None, "filters": None}),
    ],
)
def test_a_compressor_is_the_codec_that_is_shown_as_it(codec: Codec) -> None:
    (parsed_codec,) = _array(_document(compressor=compressor(codec))).encoding.codecs
    wanted = {**codec.configuration, "typesize": 2} if codec.name == "blosc" else codec.configuration
    assert parsed_codec == Codec(codec.name, wanted)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"zarr_format": 3}, "zarr_format should be 2"),
        ({"dtype": [["a", "<i4"]]}, r"data type \[\['a', '<i4'\]\] is no number type"),
        ({"dtype": "<M8[s]"}, "data type '<M8.s.' is no number type"),
        ({"dtype": "|V8"}, "is no number type"),
        ({"dtype": "|S0"}, "is no number type"),
        ({"dtype": "<f3"}, "data type"),
        ({"dtype": "|O"}, "objects in the filter vlen-utf8 only"),
        ({"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}]}, "objects in the filter vlen-utf8 only"),
        ({"filters": [{"id": "delta", "dtype": "<u2"}]}, "filter 'delta' is unknown"),
        ({"filters": {"id": "delta"}}, "filters should be a list"),
        ({"compressor": {"id": "imagecodecs_jpeg2k"}}, "compressor or filter 'imagecodecs_jpeg2k' is unknown"),
        ({"compressor": "blosc"}, "should be an object with an id"),
        ({"order": "A"}, "order should be C or F"),
        ({"chunks": [2]}, "chunks has 1 axes, the array 2"),
        ({"chunks": [2, 0]}, "at least 1"),
        ({"shape": None}, "shape should be a list"),
        ({"dimension_separator": "-"}, "dimension_separator should be"),
        ({"fill_value": "much"}, "fill_value 'much'"),
        ({"dtype": "|S3", "fill_value": "no base64"}, "base64"),
    ],
)
def test_what_cannot_be_described_has_its_reason(members: dict[str, Any], why: str, tmp_path: Path) -> None:
    dataset = _opened(_document(**members))
    assert not dataset.unsharded
    assert dataset.indescribable
    write_json(tmp_path / "a/.zarray", _document(**members))
    (tmp_path / "a/0.0").write_bytes(b"chunk")
    Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(tmp_path / "new")
    source_bytes = (tmp_path / "a/.zarray").read_bytes()
    tree_files = walk(open_tree(str(tmp_path), layout="zarr2"))
    assert {name: tree_files[name] for name in ("a/.zarray", "a/0.0")} == {"a/.zarray": source_bytes, "a/0.0": b"chunk"}
    for layout in ("zarr3", "n5", "precomputed", "bcolz"):
        with pytest.raises(UnsupportedError, match=rf"^a: cannot be shown as {layout}: \.zarray: .*{why}"):
            open_tree(str(tmp_path), layout=layout)


@pytest.mark.parametrize("name", [".zarray", ".zattrs"])
def test_a_damaged_document_is_refused_by_other_layouts_alone(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "a/.zarray", _document())
    (tmp_path / "a" / name).write_bytes(b"{")
    Written(np.ones(4, "uint8"), (2,), [{"name": "bytes"}]).write(tmp_path / "new")
    tree = open_tree(str(tmp_path), layout="zarr2")
    assert bytes(tree.read(tree.resolve(f"a/{name}").number, 0, 9)) == b"{"
    with pytest.raises(UnsupportedError, match=rf"^a: cannot be shown as zarr3: \{name}: cannot be read"):
        open_tree(str(tmp_path), layout="zarr3")


def test_documents_that_are_missing_members_have_defaults() -> None:
    document = _document()
    for member in ("dimension_separator", "filters", "order", "fill_value", "compressor"):
        del document[member]
    assert _array(document) == _array(_document())


def test_names_of_axes_are_xarray_s_and_its_marker_is_the_fill_value() -> None:
    dimensions = {"_ARRAY_DIMENSIONS": ["y", "x"]}
    named = _array(_document(dtype="<f4", fill_value=-1.5), {**dimensions, "mine": 1})
    assert named.names == ("y", "x")
    assert named.attributes == {"mine": 1, "_FillValue": "AAAAAAAA+L8="}  # as xarray writes -1.5
    assert _array(_document(fill_value=3), dimensions).attributes == {"_FillValue": 3}
    for fill_value in (None, "NaN"):
        assert _array(_document(dtype="<f4", fill_value=fill_value), dimensions).attributes == {}
    assert _array(_document(fill_value=3), {"_ARRAY_DIMENSIONS": ["y"]}).attributes == {"_ARRAY_DIMENSIONS": ["y"]}


# ------------------------------------------------------------------------------------------ as zarr2 again

_COMPRESSORS = (
    None, {"id": "zstd", "level": 1}, {"id": "gzip", "level": 1}, {"id": "zlib", "level": 1},
    {"id": "bz2", "level": 1}, {"id": "lz4", "acceleration": 1},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
)  # fmt: skip


@st.composite
def _documents(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """The documents of any array that can be described, written as the layout zarr2 writes them."""
    rank = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(("|b1", "|u1", "|i1", "<u2", ">i4", "<f4", ">f8", "<c8", "|S3", "<U2", "|O")))
    kind = np.dtype(dtype).kind
    attributes: dict[str, Any] = draw(st.dictionaries(st.sampled_from(("a", "b")), st.integers(0, 3)))
    names = not rank or draw(st.booleans())
    if names:
        attributes["_ARRAY_DIMENSIONS"] = ["t", "y", "x"][:rank]
    fill_value = draw(st.sampled_from(FILLS.get(kind, ["YWJj"] if kind == "S" else ["", "é"])))
    if names and fill_value != "NaN":
        attributes["_FillValue"] = fill_value
        if isinstance(fill_value, str) and kind == "f":
            del attributes["_FillValue"]
    order = draw(st.sampled_from("CF")) if rank > 1 else "C"
    chunks = [draw(st.integers(2, 4)) for _ in range(rank)]
    document = _document(
        shape=[draw(st.integers(0, 9)) for _ in range(rank)],
        chunks=chunks,
        dtype=dtype,
        order=order,
        fill_value=fill_value,
        filters=[{"id": "vlen-utf8"}] if kind == "O" else None,
        compressor=draw(st.sampled_from(_COMPRESSORS)),
        dimension_separator=draw(st.sampled_from("./")) if rank else ".",
    )
    return document, attributes


@given(_documents())
def test_what_is_described_is_shown_as_it_was_written(documents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    unsharded = shown_as_zarr2(_opened(*documents), is_level=False)
    assert [json.loads(unsharded.documents[name]) for name in (".zarray", ".zattrs")] == list(documents)
    (collection,) = unsharded.collections
    assert collection.transform is None, "the chunks pass"


# ------------------------------------------------------------------------------------------- in other layouts


def test_every_variant_is_shown_as_zarr3(tmp_path: Path) -> None:
    write(tmp_path / "source")
    tree_files = walk(open_tree(str(tmp_path / "source"), layout="zarr3"))
    assert not [name for name in tree_files if name.rsplit("/", 1)[-1].startswith(".z")]
    assert json.loads(tree_files["zarr.json"])["attributes"] == {"note": "of the group"}
    write_files(tmp_path / "shown", tree_files)
    for name in VARIANTS:
        values = np.asarray(zarr.open_array(tmp_path / "shown" / name, mode="r")[...])
        assert equal(values, data_of(name)), name


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 9)) for _ in range(rank)]
    dtype = draw(st.sampled_from(("|b1", "|u1", "<u2", ">i4", "<f4", ">f8")))
    fill = draw(st.sampled_from(FILLS[np.dtype(dtype).kind]))
    metadata = _document(
        shape=shape,
        chunks=[draw(st.integers(1, 4)) for _ in range(rank)],
        dtype=dtype,
        order=draw(st.sampled_from("CF")) if rank > 1 else "C",
        fill_value=fill,
        compressor=draw(
            st.sampled_from((None, {"id": "zlib", "level": 1}, {"id": "zstd", "level": 1}, {"id": "blosc"}))
        ),
        dimension_separator=draw(st.sampled_from("./")),
    )
    data = (np.arange(math.prod(shape)) % 100).astype(np.dtype(dtype).newbyteorder("=")).reshape(shape)
    box = tuple(slice(draw(st.integers(0, n - 1)), draw(st.integers(1, n))) for n in shape)
    data[box] = element(fill, data.dtype)
    return metadata, data


@given(_arrays(), st.sampled_from(("zarr3", "n5")))
def test_any_array_is_read_in_other_layouts(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[dict[str, Any], Any], layout: str
) -> None:
    """Chunks at the edge of an array are full in Zarr v2."""
    metadata, data = written
    path = tmp_path_factory.mktemp("zarr2")
    store = {"driver": "file", "path": f"{path}/source/"}
    ts.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result().write(data).result()
    write_files(path / "shown", walk(open_tree(str(path / "source"), layout=layout)))
    values = (
        ts.open({"driver": layout, "kvstore": {"driver": "file", "path": f"{path}/shown/"}}).result().read().result()
    )
    wanted = data if layout == "zarr3" else data.T.astype("u1") if data.dtype == bool else data.T
    assert equal(np.asarray(values), wanted)


def test_chunks_pass_where_they_can(tmp_path: Path) -> None:
    write(tmp_path / "source")
    tree_files = walk(open_tree(str(tmp_path / "source"), layout="zarr3"))
    for name, passes in (("compressor_zstd", True), ("order_f", True), ("compressor_bz2", False)):
        source_bytes = (tmp_path / "source" / name / "0.1").read_bytes()
        assert (tree_files[f"{name}/c/0/1"] == source_bytes) is passes, name


def test_an_image_is_shown_as_one(tmp_path: Path) -> None:
    axes = [{"name": n, "type": "space", "unit": "nanometer"} for n in "zyx"]
    scales = [{"type": "scale", "scale": [4 << i, 8 << i, 8 << i]} for i in range(2)]
    levels = [{"path": str(i), "coordinateTransformations": [scale]} for i, scale in enumerate(scales)]
    image = {"version": "0.4", "name": "n", "axes": axes, "datasets": levels}
    write_json(tmp_path / "source/.zgroup", {"zarr_format": 2})
    write_json(tmp_path / "source/.zattrs", {"multiscales": [image], "mine": 1})
    for i in range(2):
        array = zarr.create_array(
            tmp_path / f"source/{i}", shape=(8 >> i,) * 3, chunks=(4,) * 3, dtype="u1", zarr_format=2
        )
        array[...] = i + 1
    (zarr3, n5, info) = (walk(open_tree(str(tmp_path / "source"), layout=x)) for x in ("zarr3", "n5", "precomputed"))
    attributes = json.loads(zarr3["zarr.json"])["attributes"]
    del image["version"]
    assert attributes == {"ome": {"version": "0.5", "multiscales": [image]}, "mine": 1}
    assert json.loads(zarr3["1/zarr.json"])["dimension_names"] == ["z", "y", "x"]
    assert json.loads(n5["attributes.json"])["scales"] == [[1, 1, 1], [2, 2, 2]]
    assert [scale["resolution"] for scale in json.loads(info["info"])["scales"]] == [[8, 8, 4], [16, 16, 8]]
