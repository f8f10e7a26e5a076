"""Documents of Zarr v3 as tools write them on a mount, and what becomes of the source's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.create_rules import Rule
from shardfs.formats.zarr3 import ZARR3
from tests import datasets, handmade

SHARDED = handmade.zarr_metadata((7, 10), (4, 6), (2, 3))
SHARDED |= {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "data_type": "uint8"}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def shown(source: Any) -> dict[str, Any]:
    dataset = ZARR3.open("a", {"zarr.json": encoded(source)})
    assert dataset is not None
    assert not dataset.problems
    document: dict[str, Any] = json.loads(dataset.documents["zarr.json"])
    return document


def edited(source: Any, new: Any, **others: Any) -> Any:
    source_documents = {} if source is None else {"zarr.json": encoded(source)}
    source_documents |= {name.replace("__", "/"): encoded(doc) for name, doc in others.items()}
    return json.loads(ZARR3.edit("a", source_documents, "zarr.json", encoded(new))["zarr.json"])


# ---- edits ----


def nested() -> dict[str, Any]:
    source = json.loads(json.dumps(SHARDED))
    inner = source["codecs"][0]["configuration"]
    inner["codecs"] = [TRANSPOSE, datasets.sharding((3, 1), [{"name": "bytes"}, {"name": "gzip"}])]
    source["codecs"] = [{"name": "bitround", "configuration": {"keepbits": 3}}, *source["codecs"], {"name": "crc32c"}]
    return dict(source)


def rectilinear() -> dict[str, Any]:
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[4, [2, 3]], 6]}}
    return {**SHARDED, "chunk_grid": grid}


SOURCES = {"plain": SHARDED, "nested": nested(), "rectilinear": rectilinear()}
FREE = {
    "attributes": st.dictionaries(
        st.text(max_size=3), st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
    ),
    "dimension_names": st.lists(st.none() | st.text(max_size=3), min_size=2, max_size=2),
    "fill_value": st.integers(0, 255),
    "shape": st.lists(st.integers(0, 9), min_size=2, max_size=2),
    "own": st.fixed_dictionaries({"must_understand": st.just(False)}),
}


@given(st.sampled_from(list(SOURCES)), st.fixed_dictionaries({}, optional=FREE))
def test_what_is_edited_is_shown_so_and_the_source_stays_sharded(name: str, free: dict[str, Any]) -> None:
    source = SOURCES[name]
    new = shown(source) | free
    new_documents = edited(source, new)
    assert shown(new_documents) == new
    assert (new_documents["codecs"], new_documents["chunk_grid"]) == (source["codecs"], source["chunk_grid"])


def test_what_is_written_back_as_it_was_is_the_source_to_the_byte() -> None:
    raw = b" " + encoded(SHARDED)
    assert ZARR3.edit("a", {"zarr.json": raw}, "zarr.json", encoded(shown(SHARDED))) == {"zarr.json": raw}


def test_bytes_that_no_one_changes_stay() -> None:
    new = encoded(shown(SHARDED) | {"attributes": {"x": 0}}).replace(b'{"x": 0}', b'{"x":1.00e+00}')
    new_documents = ZARR3.edit("a", {"zarr.json": encoded(SHARDED)}, "zarr.json", new)["zarr.json"]
    assert b'"attributes": {"x":1.00e+00}' in new_documents


def test_codecs_may_be_spelt_otherwise_where_it_is_the_same_to_decoders() -> None:
    source = json.loads(json.dumps(nested()))
    new = shown(source)
    assert [c["name"] for c in new["codecs"]] == ["bitround", "transpose", "bytes", "gzip"]
    new["codecs"][1] = {"name": "transpose", "configuration": {"order": [1, 0]}}
    new["codecs"][2] = {"name": "bytes", "configuration": {"endian": "little"}}
    new["codecs"][3] = {"name": "gzip", "configuration": {"level": 9}}
    new_documents = edited(source, new)
    assert shown(new_documents) == new
    assert new_documents["codecs"][2] == {"name": "crc32c"}


def test_the_source_document_itself_may_be_put_there() -> None:
    assert edited(SHARDED, SHARDED | {"attributes": {"a": 1}}) == SHARDED | {"attributes": {"a": 1}}


REFUSED: dict[str, tuple[str, Any]] = {
    "chunk shape": ("the chunk shape", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}}),
    "grid": ("rectilinear", {"chunk_grid": {"name": "rectilinear", "configuration": {}}}),
    "type": ("the data type", {"data_type": "uint16"}),
    "rank": ("the number of axes", {"shape": [7]}),
    "no shape": ("shape should", {"shape": [7, -1]}),
    "keys": ("the key of a chunk", {"chunk_key_encoding": {"name": "v2"}}),
    "codecs": ("the list of codecs", {"codecs": [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]}),
    "order": ("the list of codecs", {"codecs": [TRANSPOSE, {"name": "bytes"}]}),
    "no codecs": ("codecs should be a list", {"codecs": None}),
    "transformers": ("storage transformers", {"storage_transformers": [{"name": "x"}]}),
    "group": ("a group cannot", {"node_type": "group"}),
    "version": ("zarr_format is 3 and cannot become 2", {"zarr_format": 2}),
    "another sharding": ("chunk_grid is", {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 6]}},
        "codecs": SHARDED["codecs"],
    }),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_the_chunks_is_refused(name: str) -> None:
    why, members = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        edited(SHARDED, shown(SHARDED) | members)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_what_is_no_document_is_refused(raw: bytes) -> None:
    for source in (SHARDED, group(a=SHARDED)):
        with pytest.raises(ValueError, match=r"zarr\.json"):
            ZARR3.edit("a", {"zarr.json": encoded(source)}, "zarr.json", raw)
    for documents in ({}, {"zarr.json": b"{"}, {"zarr.json": encoded(INNER)}, {"zarr.json": encoded(shown(SHARDED))}):
        assert ZARR3.edit("a", documents, "zarr.json", raw) == {"zarr.json": raw}


def test_the_draft_is_none_of_its_business() -> None:
    new = {"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0"}
    assert edited(None, new) == new


def test_a_rectilinear_array_cannot_outgrow_its_shards() -> None:
    with pytest.raises(ValueError, match="cover 10 of 11"):
        edited(rectilinear(), shown(rectilinear()) | {"shape": [11, 10]})


def test_arrays_without_shards_are_their_writers() -> None:
    plain = shown(SHARDED)
    for source in (None, plain, {**SHARDED, "codecs": "?"}):
        assert edited(source, plain | {"data_type": "int64"}) == plain | {"data_type": "int64"}
    with pytest.raises(ValueError, match="--create"):
        edited(None, SHARDED)


# ---- groups ----


def group(**members: Any) -> dict[str, Any]:
    metadata = {name.replace("__", "/"): doc for name, doc in members.items()}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": metadata}
    return {"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": consolidated}


INNER = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def test_consolidated_arrays_are_sharded_again() -> None:
    other = SHARDED | {"attributes": {"by": "tool"}}
    new = group(a=shown(SHARDED), b=INNER, b__c=shown(other), plain=shown(SHARDED), gone=shown(SHARDED))
    assert ZARR3.references("", "zarr.json", encoded(new)) == [f"{n}/zarr.json" for n in ("a", "b/c", "plain", "gone")]
    docs = {"a__zarr.json": SHARDED, "b__c__zarr.json": SHARDED, "plain__zarr.json": shown(SHARDED)}
    wanted = group(a=SHARDED, b=INNER, b__c=other, plain=shown(SHARDED), gone=shown(SHARDED))
    for source in (None, INNER, group(a=SHARDED)):
        assert edited(source, new, **docs) == wanted
    assert shown(wanted) == new


def test_what_was_consolidated_serves_where_the_array_is_not_seen() -> None:
    new = group(a=shown(SHARDED) | {"shape": [1, 1]}) | {"attributes": {"x": 1}}
    assert edited(group(a=SHARDED), new) == group(a=SHARDED | {"shape": [1, 1]}) | {"attributes": {"x": 1}}


def test_a_copy_that_is_out_of_date_becomes_the_array_itself() -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
    new = group(a=shown(SHARDED) | {"chunk_grid": grid})
    assert edited(None, new, **{"a__zarr.json": SHARDED}) == group(a=SHARDED)


def test_no_path_leads_out_of_a_group() -> None:
    names = ("../a", "/a", "a//b", ".", "", "a/../../b")
    doc = group() | {"consolidated_metadata": {"metadata": {name: shown(SHARDED) for name in names}}}
    assert ZARR3.references("", "zarr.json", encoded(doc)) == []


# ---- what comes back ----


def test_an_array_that_is_made_anew_is_sharded_as_before() -> None:
    for source in SOURCES.values():
        raw = {"zarr.json": encoded(source)}
        remembered = ZARR3.sharding(raw)
        assert remembered is not None
        assert ZARR3.shard("a", "zarr.json", encoded(shown(source)), remembered) == raw
    assert ZARR3.sharding({"zarr.json": encoded(shown(SHARDED))}) is None
    assert ZARR3.sharding({"zarr.json": encoded(INNER)}) is None
    assert ZARR3.sharding({"zarr.json": b"{"}) is None
    assert ZARR3.sharding({}) is None


def test_another_array_has_as_many_chunks_in_a_shard() -> None:
    remembered = ZARR3.sharding({"zarr.json": encoded(SHARDED)})
    assert remembered is not None
    grid = {"name": "regular", "configuration": {"chunk_shape": [5, 7]}}
    new = shown(SHARDED) | {"chunk_grid": grid, "data_type": "float32", "codecs": [TRANSPOSE, {"name": "bytes"}]}
    new_documents = ZARR3.shard("a", "zarr.json", encoded(new), remembered)
    assert new_documents is not None
    document = json.loads(new_documents["zarr.json"])
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [10, 14]
    assert shown(document) == new
    assert ZARR3.shard("a", "zarr.json", encoded(INNER), remembered) is None
    with pytest.raises(ValueError, match="axes"):
        ZARR3.shard("a", "zarr.json", encoded(new | {"shape": [1]}), remembered)
    with pytest.raises(ValueError, match="--create"):
        ZARR3.shard("a", "zarr.json", encoded(SHARDED), Rule("zarr3"))


@pytest.mark.parametrize(
    ("name", "like"),
    [(n, True) for n in ("c", "c/0/1", "c.0.1", "0.1", "0/1", "c/12", "7", "4913")]
    + [(n, False) for n in ("zarr.json", "c/", "c/0.1", "c0", "01", "c/00", "c/1/x", "d/0", "-1", "")],
)
def test_names_of_chunks(name: str, like: bool) -> None:
    assert ZARR3.chunk_like(name) is like
