"""Documents of a layout that describe a new dataset become documents of another format, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardfs.formats.registry import sources, views
from shardfs.formats.translate import Creation, creation


def _creation(layout: str, source: str | None) -> Creation:
    formats = {name: f for f in sources() for name in f.dataset_formats}
    return creation(formats[layout], views()[layout], formats[source] if source else None, "a")


def _zarray(**members: Any) -> dict[str, Any]:
    usual = {"zarr_format": 2, "shape": [70, 90], "chunks": [10, 10], "dtype": ">u2", "order": "C", "fill_value": 0}
    codecs = {"filters": None, "compressor": {"id": "gzip", "level": 5}}
    return {**usual, **codecs, "dimension_separator": "/", **members}


_SCALE = {"key": "8_8_40", "size": [70, 50, 20], "resolution": [8, 8, 40], "voxel_offset": [0, 0, 0]}
_SCALE |= {"chunk_sizes": [[16, 16, 8]], "encoding": "raw"}
_VOLUME = {"type": "image", "data_type": "uint8", "num_channels": 1, "scales": [_SCALE]}
_N5 = {
    "dimensions": [7, 9],
    "blockSize": [2, 3],
    "dataType": "uint16",
    "compression": {"type": "bzip2", "blockSize": 9},
}


@pytest.mark.parametrize(
    ("layout", "source", "name", "document", "document_names"),
    [
        ("zarr2", "zarr3", ".zarray", _zarray(), ["zarr.json"]),
        ("zarr2", "zarr3", ".zarray", _zarray(compressor={"id": "lz4", "acceleration": 1}, order="F"), ["zarr.json"]),
        ("zarr2", "zarr3", ".zarray", _zarray(compressor=None, dimension_separator=".", dtype="<f4"), ["zarr.json"]),
        ("zarr2", "zarr3", ".zarray", _zarray(shape=[], chunks=[]), ["zarr.json"]),
        ("zarr2", "zarr3", ".zarray", _zarray(dtype="|O", filters=[{"id": "vlen-utf8"}], fill_value=""), ["zarr.json"]),
        ("zarr2", "zarr3", ".zgroup", {"zarr_format": 2}, ["zarr.json"]),
        ("zarr2", "zarr3", ".zattrs", {"written": "first"}, ["zarr.json"]),
        ("zarr2", "n5", ".zarray", _zarray(), ["attributes.json"]),
        ("zarr2", "n5", ".zgroup", {"zarr_format": 2}, ["attributes.json"]),
        ("n5", "zarr3", "attributes.json", _N5, ["zarr.json"]),
        ("n5", "zarr3", "attributes.json", {"n5": "2.0.0"}, ["zarr.json"]),
        ("n5", "zarr3", "attributes.json", {"mine": 1}, ["zarr.json"]),
        ("precomputed", "zarr3", "info", _VOLUME, ["8_8_40/zarr.json", "zarr.json"]),
        ("precomputed", "n5", "info", _VOLUME, ["attributes.json", "s0/attributes.json"]),
    ],
)
def test_documents_that_the_source_can_express(
    layout: str, source: str, name: str, document: dict[str, Any], document_names: list[str]
) -> None:
    form = _creation(layout, source)
    documents = form.edit("a", {}, name, json.dumps(document).encode())
    assert sorted(documents) == document_names
    again = json.loads(form.show(documents).get(name, b"{}"))
    for member, value in document.items():
        assert member == "n5" or again[member] == value, member
    if layout != "precomputed":  # whose arrays have documents in other directories
        assert form.has_arrays("a", documents) is (name == ".zarray" or "dimensions" in document)


@pytest.mark.parametrize(
    ("layout", "source", "name", "document", "why"),
    [
        ("zarr2", None, ".zarray", _zarray(), "--create"),
        ("zarr2", None, ".zgroup", {"zarr_format": 2}, "--create"),
        ("zarr2", "zarr3-draft", ".zarray", _zarray(), "--create"),
        ("zarr2", "n5", ".zarray", _zarray(dtype="<u2"), "dtype.*: the source, which is n5, cannot express"),
        ("zarr2", "n5", ".zarray", _zarray(fill_value=7), "fill_value: the source, which is n5, cannot express"),
        ("zarr2", "n5", ".zarray", _zarray(dimension_separator="."), "dimension_separator: the source, which is n5"),
        ("zarr2", "precomputed", ".zgroup", {"zarr_format": 2}, "no document for it"),
        ("zarr2", "precomputed", ".zarray", _zarray(), "shape.*: the source, which is precomputed, cannot"),
        ("zarr2", "zarr3", ".zarray", _zarray(dtype=[["a", "<i4"]]), "no number type"),
        ("zarr2", "zarr3", ".zarray", {"zarr_format": 2}, "shape"),
        ("precomputed", "zarr3", "info", {**_VOLUME, "scales": [{**_SCALE, "encoding": "jpeg"}]}, "scales"),
    ],
)
def test_documents_that_are_refused(
    layout: str, source: str | None, name: str, document: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        _creation(layout, source).edit("a", {}, name, json.dumps(document).encode())
