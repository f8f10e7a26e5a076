"""Documents of N5 as tools write them on a mount, and what becomes of the source's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.create_rules import Rule
from shardfs.formats.n5 import N5
from tests.data_n5 import GZIP, ZLIB, Index, attributes, sharding, transformer

DOCUMENT = "attributes.json"
N5BYTES: Any = {"name": "n5bytes"}
CODEC: Any = {"name": "gzip", "configuration": {"level": 5}}


def coded(*codecs: Any, **members: Any) -> dict[str, Any]:
    chain = [sharding((3, 2), codecs or [N5BYTES, CODEC], Index())]
    return {**attributes((11, 7), (9, 4), "uint16", codecs=chain), **members}


NESTED = attributes(
    (11, 7), (12, 12), "uint16", codecs=[sharding((6, 6), [sharding((3, 2), [N5BYTES, CODEC], Index())], Index())]
)
SEED = {**attributes((11, 7), (3, 2), "uint16", compression=GZIP), "storage_transformers": [transformer((3, 2))]}
SOURCES: dict[str, dict[str, Any]] = {
    "coded": coded(),
    "raw": coded(N5BYTES),
    "checked": coded(N5BYTES, CODEC, {"name": "crc32c"}),
    "headerless": coded({"name": "raw-bytes"}),
    "compression, too": coded(compression={"type": "raw"}),
    "nested": NESTED,
    "seed": SEED,
}


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def shown(source: Any) -> dict[str, Any]:
    dataset = N5.open("a", {DOCUMENT: encoded(source)})
    assert dataset is not None
    assert not dataset.problems
    document: dict[str, Any] = json.loads(dataset.documents[DOCUMENT])
    return document


def edited(source: Any, new: Any, rule: Rule | None = None) -> Any:
    source_documents = {} if source is None else {DOCUMENT: encoded(source)}
    return json.loads(N5.edit("a", source_documents, DOCUMENT, encoded(new), rule)[DOCUMENT])


FREE = {
    "dimensions": st.lists(st.integers(0, 99), min_size=2, max_size=2),
    "units": st.lists(st.text(max_size=2)),
    "offset": st.floats(allow_nan=False),
}


@given(st.sampled_from(list(SOURCES)), st.fixed_dictionaries({}, optional=FREE))
def test_what_is_edited_is_shown_so_and_the_source_stays_sharded(name: str, free: dict[str, Any]) -> None:
    source = SOURCES[name]
    new = shown(source) | free
    new_documents = edited(source, new)
    assert shown(new_documents) == new
    assert new_documents == source | free


def test_what_is_written_back_as_it_was_is_the_source_to_the_byte() -> None:
    raw = b" " + encoded(coded())
    assert N5.edit("a", {DOCUMENT: raw}, DOCUMENT, encoded(shown(coded()))) == {DOCUMENT: raw}


@pytest.mark.parametrize("name", ["coded", "checked", "nested", "seed"])
def test_a_compression_may_be_spelt_otherwise(name: str) -> None:
    new = shown(SOURCES[name]) | {"compression": GZIP | {"level": 9}}
    assert shown(edited(SOURCES[name], new)) == new
    del new["compression"]["useZlib"]
    assert shown(edited(SOURCES[name], new))["compression"]["level"] == 9


REFUSED: dict[str, tuple[str, Any]] = {
    "block size": ("blockSize", {"blockSize": [3, 3]}),
    "type": ("dataType", {"dataType": "uint8"}),
    "rank": ("blockSize has", {"dimensions": [7]}),
    "both ranks": ("the number of axes", {"dimensions": [7], "blockSize": [3]}),
    "no shape": ("dimensions should", {"dimensions": [7, "x"]}),
    "zlib": ("compression", {"compression": ZLIB}),
    "raw": ("compression", {"compression": {"type": "raw"}}),
    "no object": ("compression should", {"compression": "gzip"}),
    "another sharding": ("blockSize", {"blockSize": [3, 4], "codecs": coded()["codecs"]}),
    "transformers": ("blockSize", {"storage_transformers": [transformer((2, 2))], "blockSize": [4, 4]}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("source", ["coded", "seed"])
def test_what_contradicts_the_blocks_is_refused(name: str, source: str) -> None:
    why, members = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        edited(SOURCES[source], shown(SOURCES[source]) | members)


def test_a_dataset_does_not_become_a_group() -> None:
    with pytest.raises(ValueError, match="a group cannot"):
        edited(coded(), {"n5": "4.0.0"})
    for raw in (b"", b"{", b"[]", b'{"a": 1, "a": 2}'):
        with pytest.raises(ValueError, match=r"attributes\.json"):
            N5.edit("a", {DOCUMENT: encoded(coded())}, DOCUMENT, raw)


def test_groups_and_datasets_without_shards_are_their_writers() -> None:
    plain = shown(coded())
    for source, new in (
        (None, {"n5": "2.0.0"}),
        (None, plain),
        ({"x": 1}, plain),
        (plain, plain | {"blockSize": [1, 1]}),
    ):
        assert edited(source, new) == new
    assert N5.edit("a", {}, DOCUMENT, b"no JSON at all") == {DOCUMENT: b"no JSON at all"}
    with pytest.raises(ValueError, match="--create"):
        edited(None, coded())
    assert edited(coded(), coded(x=1)) == coded(x=1)


def test_shards_that_were_created_are_those_of_zarr_with_its_axes_reversed() -> None:
    """No other library reads sharded N5 in the tests; the format is what `sharding_indexed` of Zarr makes of it."""
    new_documents = N5.shard(
        "a", DOCUMENT, encoded(attributes((11, 7), (3, 2), "uint16", compression=GZIP)), Rule("n5")
    )
    assert new_documents is not None
    dataset = N5.open("a", new_documents)
    assert dataset is not None
    facts = dataset.collections[0].facts
    np.testing.assert_array_equal([facts.shape, facts.chunk_shape, facts.shard_shape], [(11, 7), (3, 2), (12, 8)])


# ---- what comes back ----


@pytest.mark.parametrize("name", SOURCES)
def test_a_dataset_that_is_made_anew_is_sharded_as_before(name: str) -> None:
    raw = {DOCUMENT: encoded(SOURCES[name])}
    remembered = N5.sharding(raw)
    assert remembered is not None
    new_documents = N5.shard("a", DOCUMENT, encoded(shown(SOURCES[name])), remembered)
    assert new_documents == raw
    other = shown(SOURCES[name]) | {"blockSize": [5, 5], "dataType": "int8", "compression": {"type": "raw"}}
    new_documents = N5.shard("a", DOCUMENT, encoded(other), remembered)
    assert new_documents is not None
    assert shown(json.loads(new_documents[DOCUMENT])) == other
    with pytest.raises(ValueError, match="axes"):
        N5.shard("a", DOCUMENT, encoded(other | {"dimensions": [1], "blockSize": [1]}), remembered)


def test_nothing_is_remembered_of_what_is_not_sharded() -> None:
    for raw in ({}, {DOCUMENT: b"{"}, {DOCUMENT: b"{}"}, {DOCUMENT: encoded(shown(coded()))}):
        assert N5.sharding(raw) is None
    assert N5.shard("a", DOCUMENT, b'{"n5": "1"}', Rule("n5")) is None
    assert N5.shard("a", DOCUMENT, b"junk", Rule("n5")) is None
    with pytest.raises(ValueError, match="--create"):
        N5.shard("a", DOCUMENT, encoded(SEED), Rule("n5"))
    with pytest.raises(ValueError, match="jpeg"):
        N5.shard("a", DOCUMENT, encoded(attributes((1,), (1,), "uint8", compression={"type": "jpeg"})), Rule("n5"))


def test_a_group_may_become_a_dataset() -> None:
    new = shown(coded())
    assert edited({"n5": "2.0.0"}, new) == new
    assert "codecs" in edited({"n5": "2.0.0"}, new, Rule("n5"))


@pytest.mark.parametrize(
    ("name", "like"),
    [(n, True) for n in ("0", "0/1/2", "12/0")] + [(n, False) for n in ("", "01", "0/", "0.1", "c/0", DOCUMENT)],
)
def test_names_of_blocks(name: str, like: bool) -> None:
    assert N5.chunk_like(name) is like
