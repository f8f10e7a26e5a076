"""Precomputed `info` documents: what they describe, what is shown instead, what is left as it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.model.errors import CorruptShardError
from tests import handmade

if TYPE_CHECKING:
    from shardfs.model.dataset import Dataset

SPEC = handmade.sharding(minishard=2, shard=3, data="gzip")
INFO = handmade.volume_info((10, 7, 5), (4, 4, 4), SPEC)


def _open(document: Any) -> Dataset | None:
    return PRECOMPUTED.open("v", {"info": json.dumps(document).encode()})


def _volume(**scale: Any) -> Dataset:
    dataset = _open(handmade.volume_info((10, 7, 5), (4, 4, 4), scale.pop("spec", SPEC), **scale))
    assert dataset is not None
    return dataset


def test_the_member_sharding_is_deleted_and_nothing_else_changes() -> None:
    document = {"x": 2**64, **INFO, "mesh": "mesh", "scales": [{"first": 1, **INFO["scales"][0], "last": None}]}
    dataset = _open(document)
    assert dataset is not None
    shown_document = json.loads(dataset.documents["info"])
    assert list(shown_document) == list(document)
    scale = {k: v for k, v in document["scales"][0].items() if k != "sharding"}
    assert shown_document == {**document, "scales": [scale]}
    assert list(shown_document["scales"][0]) == list(scale)


def test_scales_that_are_not_sharded_or_not_understood_stay_as_they_are() -> None:
    scale = INFO["scales"][0]
    plain = {**scale, "key": "plain"}
    del plain["sharding"]
    null = {**scale, "key": "null", "sharding": None}
    odd = {**scale, "key": "odd", "sharding": {**SPEC, "hash": "sha256"}}
    dataset = _open({**INFO, "scales": [plain, scale, null, odd, 7]})
    assert dataset is not None
    document = json.loads(dataset.documents["info"])["scales"]
    assert document == [plain, {k: v for k, v in scale.items() if k != "sharding"}, null, odd, 7]
    assert [c.path for c in dataset.collections] == ["s"]
    (problem,) = dataset.problems
    assert problem.path == "v/odd"
    assert problem.why == "info, scale 3: hash should be one of identity, murmurhash3_x86_128, not 'sha256'"


@pytest.mark.parametrize(
    ("document", "is_volume"),
    [
        (INFO, True),
        ({**INFO, "@type": None}, True),
        ({k: v for k, v in INFO.items() if k != "@type"}, True),
        ({"@type": "neuroglancer_segment_properties"}, False),
        ({"@type": "something_else", "scales": []}, False),
        ({"scales": {}}, False),
        ({}, False),
        ([], False),
        ("info", False),
    ],
)
def test_recognised_by_type_or_scales(document: Any, is_volume: bool) -> None:
    assert (_open(document) is not None) == is_volume


@pytest.mark.parametrize("raw", [b"", b"a text", b"\0\1", b"[1]", b'"x"', b"null"])
def test_files_called_info_may_be_anything(raw: bytes) -> None:
    assert PRECOMPUTED.open("v", {"info": raw}) is None


def test_an_info_that_is_cut_off_is_told() -> None:
    with pytest.raises(CorruptShardError, match="v: info: cannot be read"):
        PRECOMPUTED.open("v", {"info": json.dumps(INFO).encode()[:-3]})


@pytest.mark.parametrize("encoding", ["jpeg", "png", "compressed_segmentation", "jxl", "fpzip", "never heard of"])
def test_no_volume_is_refused_for_its_encoding(encoding: str) -> None:
    (collection,) = _volume(encoding=encoding).collections
    assert collection.codecs == (encoding,)


def test_sizes_of_raw_chunks_in_gzip_are_exact_and_clipped() -> None:
    scales = [{**INFO["scales"][0], "sharding": {**SPEC, "data_encoding": "gzip"}}]
    dataset = _open({**INFO, "data_type": "UINT16", "num_channels": 3, "scales": scales})
    assert dataset is not None
    (collection,) = dataset.collections
    assert collection.transform is not None
    cells = np.array([[0, 0, 0], [2, 1, 1]], np.uint64)
    assert collection.transform.sizes(cells, np.zeros(2, np.int64)).tolist() == [64 * 3 * 2, 2 * 3 * 1 * 3 * 2]


@pytest.mark.parametrize("key", ["a", "a/b", "8_8_40", "a/../b", "./a", "..a", "a/", "a//b", "µm"])
def test_keys_inside_the_volume(key: str) -> None:
    assert len(_volume(key=key).collections) == 1


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../a", "a/../..", "/a", "//a", "a/../../b", "a\0b", "\ud800a", "a\udc80", 7, None, ["a"]]
)
def test_keys_that_are_no_path_in_the_volume(key: Any) -> None:
    dataset = _volume(key=key)
    assert dataset.collections == ()
    assert len(dataset.problems) == 1


@pytest.mark.parametrize(
    ("member", "value", "why"),
    [
        ("minishard_bits", 22, r"\[0, 21\]"),
        ("minishard_bits", 60, r"\[0, 21\]"),
        ("minishard_bits", -1, r"\[0, 21\]"),
        ("minishard_bits", True, "should be an integer"),
        ("minishard_bits", 1.0, "should be an integer"),
        ("shard_bits", 64, r"\[0, 62\]"),
        ("preshift_bits", 65, r"\[0, 64\]"),
        ("@type", "other", "sharding @type"),
        ("minishard_index_encoding", "zstd", "one of raw, gzip"),
        ("data_encoding", 3, "one of raw, gzip"),
        ("hash", None, "one of identity"),
    ],
)
def test_sharding_objects_that_cannot_be(member: str, value: Any, why: str) -> None:
    dataset = _volume(spec={**SPEC, member: value})
    assert dataset.collections == ()
    with pytest.raises(ValueError, match=why):
        raise ValueError(dataset.problems[0].why)


@pytest.mark.parametrize("member", ["size", "chunk_sizes", "key", "sharding"])
def test_members_that_are_missing(member: str) -> None:
    scale = {k: v for k, v in INFO["scales"][0].items() if k != member}
    dataset = _open({**INFO, "scales": [scale]})
    assert dataset is not None
    assert dataset.collections == ()
    assert [p.why for p in dataset.problems] == (
        [] if member == "sharding" else [f"info, scale 0: no member '{member}'"]
    )


def test_defaults_and_spelling() -> None:
    spec = {
        k: v for k, v in handmade.sharding(hash="IDENTITY", index="Gzip", data=None).items() if k != "preshift_bits"
    }
    dataset = _volume(spec=spec)
    assert len(dataset.collections) == 1
    del (scale := dict(INFO["scales"][0]))["voxel_offset"]
    found_without = _open({**INFO, "scales": [scale]})
    assert found_without is not None
    assert found_without.collections[0].names.parse(0, b"0-4_0-4_0-4") == 0


def test_the_largest_offsets_have_names() -> None:
    (collection,) = _volume(voxel_offset=[-(2**63), 2**63 - 11, 0]).collections
    (name,) = collection.names.render(0, np.array([0], np.uint64)).tolist()
    assert name == b"-9223372036854775808--9223372036854775804_9223372036854775797-9223372036854775801_0-4"
    assert collection.names.parse(0, name) == 0
