"""Info documents as tools write them on a mount, and what becomes of the source's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.create_rules import Rule, parse
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.model.grid import MortonCode
from tests import handmade
from tests.strategies import cells, grids

SPEC = handmade.sharding(preshift=1, minishard=2, shard=3, index="gzip", data="gzip")
VOLUME = handmade.volume_info((16, 16, 12), (4, 4, 2), SPEC)
SCALE: dict[str, Any] = VOLUME["scales"][0]
TWO = {**VOLUME, "scales": [{**SCALE, "key": "a/b"}, {k: v for k, v in SCALE.items() if k != "sharding"}]}
MESHES = {"@type": "neuroglancer_multilod_draco", "vertex_quantization_bits": 10, "sharding": SPEC}
SKELETONS = {"@type": "neuroglancer_skeletons", "transform": [1.0], "sharding": SPEC}
ANNOTATIONS = {
    "@type": "neuroglancer_annotations_v1",
    "by_id": {"key": "by_id", "sharding": SPEC},
    "relationships": [{"id": "r", "key": "r", "sharding": SPEC}, {"id": "q", "key": "q"}],
    "spatial": [{"key": "s0", "grid_shape": [2, 2, 4], "chunk_size": [1, 1, 1], "limit": 1, "sharding": SPEC}],
}
SOURCES: dict[str, dict[str, Any]] = {
    "volume": VOLUME, "two": TWO, "meshes": MESHES, "skeletons": SKELETONS, "annotations": ANNOTATIONS
}  # fmt: skip


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def shown(source: Any) -> dict[str, Any]:
    dataset = PRECOMPUTED.open("a", {"info": encoded(source)})
    assert dataset is not None
    assert not dataset.problems
    document: dict[str, Any] = json.loads(dataset.documents.get("info", encoded(source)))
    return document


def edited(source: Any, new: Any, rule: Rule | None = None) -> Any:
    source_documents = {} if source is None else {"info": encoded(source)}
    return json.loads(PRECOMPUTED.edit("a", source_documents, "info", encoded(new), rule)["info"])


FREE = st.dictionaries(st.text(max_size=3).map("x".__add__), st.integers() | st.floats(allow_nan=False))


@given(st.sampled_from(list(SOURCES)), FREE)
def test_what_is_edited_is_shown_so_and_the_source_stays_sharded(name: str, free: dict[str, Any]) -> None:
    source = SOURCES[name]
    assert edited(source, shown(source) | free) == source | free


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_back_as_it_was_is_the_source_to_the_byte(name: str) -> None:
    raw = b" " + encoded(SOURCES[name])
    assert PRECOMPUTED.edit("a", {"info": raw}, "info", encoded(shown(SOURCES[name]))) == {"info": raw}
    assert edited(SOURCES[name], SOURCES[name] | {"x": 1}) == SOURCES[name] | {"x": 1}


def scaled(document: dict[str, Any], **members: Any) -> dict[str, Any]:
    first, *other_scales = document["scales"]
    return {**document, "scales": [{**first, **members}, *other_scales]}


def test_scales_are_told_by_their_keys() -> None:
    plain = [{**shown(VOLUME)["scales"][0], "key": key} for key in ("new", "a/b", "s")]
    new = {**shown(TWO), "scales": plain}
    new_documents = edited(TWO, new)
    assert ["sharding" in scale for scale in new_documents["scales"]] == [False, True, False]
    assert shown(new_documents) == new
    assert edited(TWO, {**new, "scales": plain[2:]}) == {**new, "scales": plain[2:]}
    new_documents = edited(TWO, new, Rule("precomputed"))
    assert ["sharding" in scale for scale in new_documents["scales"]] == [True, True, False]
    assert shown(new_documents) == new


@pytest.mark.parametrize("size", [(16, 16, 16), (16, 16, 8), (12, 16, 12), (13, 16, 12), (16, 20, 12), (16, 32, 12)])
def test_a_volume_may_grow_and_shrink(size: tuple[int, ...]) -> None:
    """As long as no chunk that is stored was cut by its edge, or will be; and no id changes."""
    old = MortonCode((4, 4, 6))
    new = MortonCode([-(-s // c) for s, c in zip(size, (4, 4, 2), strict=True)])
    common = [min(a, b) for a, b in zip(old.grid, new.grid, strict=True)]
    is_same = all(old.encode(cell) == new.encode(cell) for cell in np.ndindex(*common))
    document = scaled(shown(VOLUME), size=list(size))
    if is_same and size[0] != 13:
        assert edited(VOLUME, document) == scaled(VOLUME, size=list(size))
    else:
        with pytest.raises(ValueError, match=r"would change their ids|would be cut anew"):
            edited(VOLUME, document)
    assert is_same == (size[1] == 16)


@given(st.data(), grids(rank=3, bits=30), grids(rank=3, bits=30))
def test_codes_agree_exactly_if_they_do(data: st.DataObject, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    codes = MortonCode(one), MortonCode(other)
    common = [min(a, b) for a, b in zip(one, other, strict=True)]
    if codes[0].agrees_with(codes[1]):
        cell = data.draw(cells(common))
        assert codes[0].encode(cell) == codes[1].encode(cell)
    else:
        corners = [[1 << i for i in range((n - 1).bit_length())] for n in common]
        units = [tuple(v if a == axis else 0 for a in range(3)) for axis in range(3) for v in corners[axis]]
        assert any(codes[0].encode(cell) != codes[1].encode(cell) for cell in units)
    assert codes[0].agrees_with(codes[1]) == codes[1].agrees_with(codes[0])


REFUSED: dict[str, tuple[str, Any]] = {
    "chunk": ("chunk_sizes", scaled(shown(VOLUME), chunk_sizes=[[4, 4, 4]])),
    "encoding": ("encoding", scaled(shown(VOLUME), encoding="jpeg")),
    "size": ("size should", scaled(shown(VOLUME), size=[1, "2", 3])),
    "rank": ("size has 2 axes", scaled(shown(VOLUME), size=[1, 2])),
    "type": ("data_type", shown(VOLUME) | {"data_type": "uint16"}),
    "channels": ("num_channels", shown(VOLUME) | {"num_channels": 2}),
    "kind": ("@type", shown(MESHES)),
    "no scales": ("scales should be a list", shown(VOLUME) | {"scales": None}),
    "no scale": ("should hold objects", shown(VOLUME) | {"scales": [1]}),
    "another sharding": ("--create", scaled(VOLUME, sharding=SPEC | {"shard_bits": 4})),
    "a new sharded scale": ("--create", {**VOLUME, "scales": [SCALE, {**SCALE, "key": "t"}]}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_the_chunks_is_refused(name: str) -> None:
    why, new = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        edited(VOLUME, new)


def test_the_cells_of_annotations_keep_their_ids() -> None:
    def with_cells(shape: list[int]) -> dict[str, Any]:
        (level,) = ANNOTATIONS["spatial"]
        assert isinstance(level, dict)
        return {
            **shown(ANNOTATIONS),
            "spatial": [{k: v for k, v in level.items() if k != "sharding"} | {"grid_shape": shape}],
        }

    assert edited(ANNOTATIONS, with_cells([2, 2, 5]))["spatial"][0]["sharding"] == SPEC
    with pytest.raises(ValueError, match="change their ids"):
        edited(ANNOTATIONS, with_cells([3, 2, 4]))


def test_what_is_no_sharded_info_is_its_writers() -> None:
    for raw in (b"", b"info", b"[]", b'{"a": 1, "a": 2}', b'{"@type": "neuroglancer_legacy_mesh"}', b'{"scales": 3}'):
        assert PRECOMPUTED.edit("a", {}, "info", raw) == {"info": raw}
        assert PRECOMPUTED.shard("a", "info", raw, Rule("precomputed")) is None
        assert PRECOMPUTED.sharding({"info": raw}) is None
    plain = shown(VOLUME)
    assert edited(None, plain) == plain
    assert edited(plain, scaled(plain, chunk_sizes=[[1, 1, 1]])) == scaled(plain, chunk_sizes=[[1, 1, 1]])
    with pytest.raises(ValueError, match="--create"):
        edited(None, VOLUME)
    for raw in (b"", b"{"):
        with pytest.raises(ValueError, match="info"):
            PRECOMPUTED.edit("a", {"info": encoded(VOLUME)}, "info", raw)


# ---- what is new ----


def bits(rule: str, source: dict[str, Any]) -> tuple[Any, ...]:
    (rule_,) = parse(rule).rules
    new_documents = PRECOMPUTED.shard("a", "info", encoded(source), rule_)
    assert new_documents is not None
    new = json.loads(new_documents["info"])
    assert shown(new) == source
    part = new if "sharding" in new else new["scales"][0] if "scales" in new else new["spatial"][0]
    spec = part["sharding"]
    words = (spec["hash"][:6], spec["data_encoding"])
    return (spec["preshift_bits"], spec["minishard_bits"], spec["shard_bits"], *words)


def test_sizes_of_shards() -> None:
    volume = shown(handmade.volume_info((1000, 1000, 500), (64, 64, 64), SPEC))  # 16 x 16 x 8 chunks
    assert bits("precomputed", volume) == (9, 0, 2, "identi", "gzip")
    assert bits("precomputed:chunks_per_shard=16x16x8", volume) == (9, 2, 0, "identi", "gzip")
    assert bits("precomputed:chunks_per_shard=5x3", volume) == (3, 0, 8, "identi", "gzip")
    assert bits("precomputed:chunks_per_shard=1", volume) == (0, 0, 11, "identi", "gzip")
    assert bits("precomputed:minishard_bits=3,preshift_bits=4", volume) == (4, 3, 4, "identi", "gzip")
    assert bits("precomputed:data_encoding=raw", scaled(volume, encoding="jpeg")) == (9, 0, 2, "identi", "raw")
    assert bits("precomputed", scaled(volume, encoding="jpeg")) == (9, 0, 2, "identi", "raw")
    assert bits("precomputed", scaled(volume, chunk_sizes=[[512, 512, 512]]))[:3] == (2, 0, 0)
    large = shown(handmade.volume_info((4096, 4096, 4096), (512, 512, 512), SPEC))  # 128 MiB each
    assert bits("precomputed", large)[:3] == (3, 0, 6)
    assert bits("precomputed:shard_bits=3,minishard_bits=2", shown(SKELETONS)) == (0, 2, 3, "murmur", "gzip")
    assert bits("precomputed:shard_bits=3,hash=identity", shown(MESHES)) == (0, 0, 3, "identi", "raw")
    assert bits("precomputed", shown(ANNOTATIONS)) == (4, 0, 0, "identi", "gzip")
    assert PRECOMPUTED.shard("a", "info", encoded(shown(MESHES)), Rule("precomputed")) is None


def test_what_cannot_be_sharded_is_said() -> None:
    several = scaled(shown(VOLUME), chunk_sizes=[[4, 4, 4], [8, 8, 8]])
    with pytest.raises(ValueError, match="several chunk_sizes"):
        PRECOMPUTED.shard("a", "info", encoded(several), Rule("precomputed"))
    with pytest.raises(ValueError, match="cannot be a path below the directory"):
        PRECOMPUTED.shard("a", "info", encoded(scaled(shown(VOLUME), key="../s")), Rule("precomputed"))
    with pytest.raises(ValueError, match="shard_bits"):
        bits("precomputed:shard_bits=63,minishard_bits=20", shown(SKELETONS))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_made_anew_is_sharded_as_before(name: str) -> None:
    raw = {"info": encoded(SOURCES[name])}
    remembered = PRECOMPUTED.sharding(raw)
    assert remembered is not None
    assert PRECOMPUTED.shard("a", "info", encoded(shown(SOURCES[name])), remembered) == raw
    assert PRECOMPUTED.shard("a", "info", b'{"@type": "neuroglancer_legacy_mesh"}', remembered) is None


def test_another_volume_is_sharded_as_well() -> None:
    remembered = PRECOMPUTED.sharding({"info": encoded(VOLUME)})
    assert remembered is not None
    new = shown(scaled(VOLUME, size=[100, 90, 80], chunk_sizes=[[8, 8, 8]], encoding="jpeg")) | {"data_type": "uint16"}
    new_documents = PRECOMPUTED.shard("a", "info", encoded(new), remembered)
    assert new_documents is not None
    spec = json.loads(new_documents["info"])["scales"][0]["sharding"]
    assert spec == SPEC | {"shard_bits": 4 + 4 + 4 - 3}
    assert shown(json.loads(new_documents["info"])) == new


@pytest.mark.parametrize(
    ("name", "like"),
    [
        (n, True)
        for n in ("0-64_0-64_0-16", "k/-3-1_100-104_7-11", "k/0-1_0-1_0-1.gz", "12", "12.index", "s/1_2_3", "12.gz")
    ]
    + [(n, False) for n in ("info", "0.shard", "12:0", "0-64_0-64", "12.gz.tmp", "provenance", "")],
)
def test_names_of_chunks(name: str, like: bool) -> None:
    assert PRECOMPUTED.chunk_like(name) is like
