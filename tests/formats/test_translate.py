"""Documents that clients write in a layout, and what becomes of the source's documents."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.bcolz import BCOLZ_SOURCE
from shardfs.formats.n5 import N5
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.registry import views
from shardfs.formats.translate import Translation, WrittenForm
from shardfs.formats.zarr2 import ZARR2
from shardfs.formats.zarr3 import ZARR3
from shardfs.model.dataset import Surroundings
from tests.data_n5 import Index, attributes, sharding
from tests.datasets import BLOSC, CRC, GZIP, LITTLE
from tests.handmade import zarr_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.format import Format

    Documents = Mapping[str, bytes]

LAYOUTS: Mapping[str, Format] = {
    "zarr2": ZARR2,
    "zarr3": ZARR3,
    "n5": N5,
    "precomputed": PRECOMPUTED,
    "bcolz": BCOLZ_SOURCE,
}


def translation(layout: str, source: Format) -> Translation:
    """Of an array in a directory of its own, without anything above or below it."""

    def show(source_documents: Documents) -> Documents:
        dataset = source.open("a", source_documents)
        assert dataset is not None
        return views()[layout].show("a", dataset, Surroundings()).documents

    return Translation(LAYOUTS[layout], source, views()[source.dataset_formats[0]], {}, (), show)


def zarr3(**members: Any) -> bytes:
    shape, shard, inner = members.pop("shape", (8, 6)), members.pop("shard", (4, 6)), members.pop("inner", (2, 3))
    codecs = members.pop("codecs", [LITTLE, GZIP, CRC])
    new_files = zarr_metadata(
        shape, shard, inner, codecs=codecs, data_type=members.pop("data_type", "uint16"), **members
    )
    return json.dumps(new_files).encode()


def n5(**members: Any) -> bytes:
    codecs = [sharding((3, 2), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 5}}], Index())]
    return json.dumps(attributes((8, 6), (6, 4), "uint16", codecs=codecs, **members)).encode()


SOURCES: Mapping[str, tuple[Format, str]] = {"zarr3": (ZARR3, "zarr.json"), "n5": (N5, "attributes.json")}
WHERE: Mapping[str, tuple[str, str, str]] = {
    "zarr2": (".zarray", "shape", ".zattrs"),
    "zarr3": ("zarr.json", "shape", "zarr.json"),
    "n5": ("attributes.json", "dimensions", "attributes.json"),
}
"""By layout: the document of the shape, its member, and the document of the user's attributes."""

PAIRS = [("zarr2", "zarr3"), ("n5", "zarr3"), ("zarr2", "n5"), ("zarr3", "n5")]

KEPT = b'"kept":   [1.500, {"deep" : 1e2}, 12345678901234567890]'
"""An attribute in a text that no JSON library prints."""

NAMES = st.text("abcdefg", min_size=1, max_size=3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ATTRIBUTES = st.dictionaries(NAMES, VALUES, max_size=4)


def with_text(raw: bytes) -> bytes:
    """The document with the attribute `KEPT`, and with a member that no layout shows."""
    doc = json.loads(raw)
    if "node_type" in doc:
        hidden = b'"x_extension":  {"must_understand": false, "n": 2.50}, "attributes": {' + KEPT
        return raw.replace(b'"attributes": {', hidden + (b", " if doc["attributes"] else b""))
    return b"{" + KEPT + b", " + raw[1:]


def with_attributes(doc: dict[str, Any], layout: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The shown document with these user attributes, and no others but `kept`."""
    if layout == "zarr3":
        return {**doc, "attributes": {"kept": doc["attributes"]["kept"], **wanted}}
    return {n: v for n, v in doc.items() if len(n) > 3} | dict(wanted)


@pytest.mark.parametrize(("layout", "source"), PAIRS)
@given(st.data())
def test_any_shape_and_attributes_come_back_and_all_other_bytes_stay(
    layout: str, source: str, data: st.DataObject
) -> None:
    form, name = SOURCES[source]
    before = data.draw(ATTRIBUTES)
    new_files = zarr3(attributes=before) if source == "zarr3" else n5(**before)
    source_documents = {name: with_text(new_files)}
    through = translation(layout, form)
    shape, attrs = data.draw(st.lists(st.integers(1, 99), min_size=2, max_size=2)), data.draw(ATTRIBUTES)
    where, member, other_names = WHERE[layout]
    resized = {**json.loads(through.show(source_documents)[where]), member: shape}
    source_documents |= through.edit("a", source_documents, where, json.dumps(resized).encode())
    written = with_attributes(json.loads(through.show(source_documents)[other_names]), layout, attrs)
    source_documents |= through.edit("a", source_documents, other_names, json.dumps(written).encode())
    again = through.show(source_documents)
    assert json.loads(again[where])[member] == shape
    assert json.loads(again[other_names]) == written
    assert KEPT in source_documents[name]
    assert (b'"x_extension":  {"must_understand": false, "n": 2.50}' in source_documents[name]) is (source == "zarr3")
    old, new = json.loads(new_files), json.loads(source_documents[name])
    assert {m: new[m] for m in ("chunk_grid", "codecs", "blockSize", "dataType", "data_type") if m in old} == {
        m: old[m] for m in ("chunk_grid", "codecs", "blockSize", "dataType", "data_type") if m in old
    }
    assert not through.edit("a", source_documents, other_names, again[other_names])


STRUCTURAL: Mapping[str, Mapping[str, list[Any]]] = {
    "zarr2": {
        "chunks": [[4, 3], [2], [2, 0], "x", None],
        "dtype": [">u2", "<i2", "<u4", "|O", 5],
        "order": ["F", "X"],
        "compressor": [None, {"id": "zlib", "level": 5}, {"id": "blosc"}, {"level": 1}],
        "filters": [[{"id": "delta", "dtype": "<u2"}]],
        "dimension_separator": [".", "-"],
        "shape": [[8], [8, 6, 1], [-1, 6], "x"],
        "zarr_format": [3],
        "unknown": [1],
    },
    "n5": {
        "blockSize": [[4, 3], [2], [2, 0], "x", None],
        "dataType": ["int16", "uint32", "object", 5],
        "compression": [{"type": "raw"}, {"type": "zstd", "level": 3}, {"type": "gzip", "useZlib": True}, 1],
        "dimensions": [[8], [8, 6, 1], [-1, 6], "x"],
    },
    "zarr3": {
        "chunk_grid": [{"name": "regular", "configuration": {"chunk_shape": [4, 3]}}, {"name": "x"}],
        "data_type": ["int16", "uint32", "x"],
        "codecs": [[LITTLE], [GZIP], []],
        "chunk_key_encoding": [{"name": "v2"}],
        "fill_value": [3],
        "shape": [[8], [8, 6, 1], [-1, 6]],
        "storage_transformers": [[{"name": "x"}]],
        "unknown": [1],
    },
}


FIXED: Mapping[str, Mapping[str, list[Any]]] = {
    "zarr2": {"fill_value": [7, None], "compressor": [{"id": "gzip", "level": 9}]},
    "n5": {"compression": [{"type": "gzip", "level": 9}]},
    "zarr3": {"fill_value": [7], "codecs": [[LITTLE, {"name": "gzip", "configuration": {"level": 9}}]]},
}


@pytest.mark.parametrize(("layout", "source"), PAIRS)
def test_a_fill_value_and_parameters_of_codecs_are_changed_in_the_source(layout: str, source: str) -> None:
    """Even if the source could express them. A new shape in the same document is refused, too."""
    form, name = SOURCES[source]
    source_documents = {name: zarr3(fill_value=5) if source == "zarr3" else n5()}
    through, (where, shape, _) = translation(layout, form), WHERE[layout]
    document = json.loads(through.show(source_documents)[where])
    for member, values in FIXED[layout].items():
        for value in (v for v in values if v is not None or source == "zarr3"):
            written = {**document, shape: [9, 9], member: value}
            with pytest.raises(
                ValueError, match=f"{where}: {member}: cannot be changed through a layout; change it in"
            ):
                through.edit("a", source_documents, where, json.dumps(written).encode())


def test_the_marker_of_missing_values_is_no_fill_value_to_change() -> None:
    """An array with names of axes, but without a marker, is shown with the fill value null."""
    source_documents, through = {"zarr.json": zarr3(dimension_names=["y", "x"])}, translation("zarr2", ZARR3)
    document = json.loads(through.show(source_documents)[".zarray"])
    assert document["fill_value"] is None
    for value in (0, 7):
        with pytest.raises(ValueError, match=r"^\.zarray: fill_value: cannot be changed through a layout"):
            through.edit("a", source_documents, ".zarray", json.dumps({**document, "fill_value": value}).encode())


@pytest.mark.parametrize(("layout", "source"), PAIRS)
def test_what_contradicts_the_chunks_is_refused_by_name(layout: str, source: str) -> None:
    form, name = SOURCES[source]
    source_documents = {name: zarr3() if source == "zarr3" else n5()}
    through = translation(layout, form)
    where = WHERE[layout][0]
    document = json.loads(through.show(source_documents)[where])
    for member, values in STRUCTURAL[layout].items():
        for value in (v for v in values if v != document.get(member)):
            with pytest.raises(ValueError, match=rf"^{where.replace('.', '[.]')}: .*{member}"):
                through.edit("a", source_documents, where, json.dumps({**document, member: value}).encode())
    for raw in (b"", b"[]", b"{", b"{}"):
        with pytest.raises(ValueError, match=r"document|shape|blockSize"):
            through.edit("a", source_documents, where, raw)


EQUAL_FORMS: Mapping[str, tuple[bytes, Mapping[str, Any]]] = {
    "zstd": (
        zarr3(codecs=[LITTLE, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}]),
        {"compressor": {"id": "zstd", "level": 3, "checksum": False}},
    ),
    "float": (zarr3(data_type="float32", fill_value=0), {"fill_value": 0.0}),
    "nan": (zarr3(data_type="float32", fill_value="0x7fc00001"), {"fill_value": "NaN"}),
    "no filters": (zarr3(), {"filters": []}),
    "blosc": (zarr3(codecs=[LITTLE, BLOSC]), {}),
    "lzma": (
        zarr3(codecs=[LITTLE, {"name": "numcodecs.lzma", "configuration": {}}]),
        {"compressor": {"id": "lzma", "format": 1, "check": -1, "preset": None, "filters": None}},
    ),
    "bz2": (zarr3(codecs=[LITTLE, {"name": "numcodecs.bz2", "configuration": {}}]), {"compressor": {"id": "bz2"}}),
    "decoded": (zarr3(codecs=[{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE, GZIP, GZIP]), {}),
}


@pytest.mark.parametrize("name", EQUAL_FORMS)
def test_members_in_another_form_of_the_same_meaning_are_no_change(name: str) -> None:
    """zarr 2.18 writes the whole .zarray when it resizes an array."""
    raw, members = EQUAL_FORMS[name]
    source_documents, through = {"zarr.json": raw}, translation("zarr2", ZARR3)
    written = {**json.loads(through.show(source_documents)[".zarray"]), **members, "shape": [9, 6]}
    new_documents = through.edit(
        "a", source_documents, ".zarray", json.dumps(written, sort_keys=True, indent=4).encode()
    )
    assert json.loads(new_documents["zarr.json"]) == {**json.loads(raw), "shape": [9, 6]}


def test_names_of_axes_are_written_as_dimension_names() -> None:
    source_documents, through = {"zarr.json": zarr3(fill_value=7)}, translation("zarr2", ZARR3)
    source_documents |= through.edit(
        "a", source_documents, ".zattrs", b'{"_ARRAY_DIMENSIONS": ["y", "x"], "units": "m"}'
    )
    doc = json.loads(source_documents["zarr.json"])
    assert doc["dimension_names"] == ["y", "x"]
    assert doc["attributes"]["units"] == "m"
    assert "_ARRAY_DIMENSIONS" not in doc["attributes"]
    with pytest.raises(ValueError, match="_ARRAY_DIMENSIONS"):
        translation("zarr2", N5).edit("a", {"attributes.json": n5()}, ".zattrs", b'{"_ARRAY_DIMENSIONS": ["y", "y"]}')


@pytest.mark.parametrize("data_type", ["int32", "float32", "complex64", "bool"])
@pytest.mark.parametrize("remembered", [True, False])
def test_an_undefined_fill_value_is_no_marker_of_missing_values(data_type: str, remembered: bool) -> None:
    """xarray writes names of axes after the document of the array, and means 0 in the array's document as a marker."""
    source_documents, through = {"zarr.json": zarr3(data_type=data_type, fill_value=0)}, translation("zarr2", ZARR3)
    unsharded = through.show(source_documents)[".zarray"]
    written = json.dumps({**json.loads(unsharded), "fill_value": None}).encode()
    assert through.edit("a", source_documents, ".zarray", written) in ({}, source_documents)
    forms = {".zarray": WrittenForm(written, unsharded)} if remembered else {}
    source_documents |= through.edit(
        "a", source_documents, ".zattrs", b'{"_ARRAY_DIMENSIONS": ["y", "x"]}', written=forms
    )
    assert ("_FillValue" in json.loads(source_documents["zarr.json"])["attributes"]) is not remembered
    assert (json.loads(through.show(source_documents)[".zarray"])["fill_value"] is None) is remembered


@pytest.mark.parametrize("names", [None, ["y", "x"]])
def test_a_marker_of_missing_values_that_contradicts_the_fill_value_is_refused(names: list[str] | None) -> None:
    """In an array whose axes have names, Zarr v2 has both in one value. Programs may write it in another form."""
    named = {} if names is None else {"dimension_names": names, "attributes": {"_FillValue": 0.1}}
    source_documents = {"zarr.json": zarr3(data_type="float32", fill_value=0.1, **named)}
    through = translation("zarr2", ZARR3)
    for value, fits in ((0.1, True), (0.10000000149011612, True), (0.2, False), ("x", False), ([1], False)):
        written = json.dumps({"_ARRAY_DIMENSIONS": ["y", "x"], "_FillValue": value}).encode()
        if fits:
            new_documents = {**source_documents, **through.edit("a", source_documents, ".zattrs", written)}
            assert json.loads(through.show(new_documents)[".zattrs"]) == {
                "_ARRAY_DIMENSIONS": ["y", "x"],
                "_FillValue": 0.1,
            }
        else:
            with pytest.raises(ValueError, match=r"^\.zattrs: _FillValue: .* but other members say 0\.1"):
                through.edit("a", source_documents, ".zattrs", written)


@pytest.mark.parametrize("value", [0.1, 0.10000000149011612, 0.2, "x"])
def test_a_marker_of_missing_values_that_comes_before_a_contradicting_array_is_refused(value: Any) -> None:
    array = translation("zarr2", ZARR3).show({"zarr.json": zarr3(data_type="float32", fill_value=0.1)})[".zarray"]
    attributes = {"_FillValue": value, "note": [value]}
    for names, fits in (({}, True), ({"_ARRAY_DIMENSIONS": ["y", "x"]}, isinstance(value, float) and value < 0.2)):
        group = {"zarr_format": 3, "node_type": "group", "attributes": {**attributes, **names}}
        source_documents = {"zarr.json": json.dumps(group).encode()}
        through = translation("zarr2", ZARR3)
        if fits:
            document = json.loads(through.edit("a", source_documents, ".zarray", array)["zarr.json"])
            assert document["attributes"]["note"] == [value]
        else:
            with pytest.raises(
                ValueError, match=r"^\.zarray: _FillValue: is .* in \.zattrs, but other members say 0\.1"
            ):
                through.edit("a", source_documents, ".zarray", array)


@pytest.mark.parametrize(
    ("stored_value", "view_value"), [("", "AAAAAA=="), ("YWI=", "YWIAAA=="), ("YWIAAA==", "YWIAAA==")]
)
def test_fill_values_of_bytes_have_the_size_of_an_element(stored_value: str, view_value: str) -> None:
    """tensorstore refuses shorter ones; zarr-python 2.18 writes shorter ones."""
    type_ = {"name": "null_terminated_bytes", "configuration": {"length_bytes": 4}}
    source_documents, through = (
        {"zarr.json": zarr3(data_type=type_, fill_value=stored_value)},
        translation("zarr2", ZARR3),
    )
    before = json.loads(through.show(source_documents)[".zarray"])
    assert before["fill_value"] == view_value
    for value in (view_value, stored_value):
        written = json.dumps({**before, "fill_value": value, "shape": [9, 6]}).encode()
        document = json.loads(through.edit("a", source_documents, ".zarray", written)["zarr.json"])
        assert document == {**json.loads(source_documents["zarr.json"]), "shape": [9, 6]}


@pytest.mark.parametrize("names", [None, ["y", "x"]])
def test_an_undefined_fill_value_does_not_change_another_one(names: list[str] | None) -> None:
    named = {} if names is None else {"dimension_names": names}
    source_documents, through = {"zarr.json": zarr3(fill_value=9, **named)}, translation("zarr2", ZARR3)
    written = json.dumps(
        {**json.loads(through.show(source_documents)[".zarray"]), "shape": [9, 6], "fill_value": None}
    ).encode()
    if names is None:
        with pytest.raises(ValueError, match=r"^\.zarray: fill_value: cannot be changed through a layout"):
            through.edit("a", source_documents, ".zarray", written)
    else:
        document = json.loads(through.edit("a", source_documents, ".zarray", written)["zarr.json"])
        assert document == {**json.loads(source_documents["zarr.json"]), "shape": [9, 6]}


def test_a_volume_of_an_array_with_more_axes_is_refused() -> None:
    through, members = translation("precomputed", ZARR3), {"dimension_names": [*"tczyx"]}
    source_documents = {
        "zarr.json": zarr3(shape=(1, 1, 8, 6, 6), shard=(1, 1, 4, 6, 6), inner=(1, 1, 2, 3, 3), **members)
    }
    info = json.loads(through.show(source_documents)["info"])
    info["scales"][0]["size"] = [6, 6, 9]
    with pytest.raises(ValueError, match="info: scales: axis 't' has 9 elements"):
        through.edit("a", source_documents, "info", json.dumps(info).encode())


def test_what_is_deleted() -> None:
    source_documents, through = {"zarr.json": zarr3(attributes={"a": 1})}, translation("zarr2", ZARR3)
    assert through.sources_of("a", source_documents, ".zarray") == ["zarr.json"]
    assert through.sources_of("a", source_documents, ".zattrs") is None
    assert through.sources_of("a", source_documents, "missing") == []
