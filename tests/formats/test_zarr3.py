"""Zarr v3 documents: what they describe, what is shown instead, what is left as it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.zarr3 import ZARR3
from shardfs.model.errors import CorruptShardError
from shardfs.shards.byte_layouts.sharding_indexed import ShardingIndexed
from tests import handmade

if TYPE_CHECKING:
    from shardfs.model.dataset import Dataset


def _open(document: Any) -> Dataset | None:
    return ZARR3.open("a", {"zarr.json": json.dumps(document).encode()})


def _shown(document: Any) -> dict[str, Any]:
    dataset = _open(document)
    assert dataset is not None
    assert not dataset.problems
    shown: dict[str, Any] = json.loads(dataset.documents["zarr.json"])
    return shown


def _problem(document: Any) -> str:
    dataset = _open(document)
    assert dataset is not None
    assert (dataset.collections, dict(dataset.documents)) == ((), {})
    (problem,) = dataset.problems
    assert problem.path == "a"
    return problem.why


SHARDED = handmade.zarr_metadata((7, 10), (4, 6), (2, 3))


def test_only_the_grid_and_the_codecs_change() -> None:
    document = {"b": 1, **SHARDED, "dimension_names": ["y", None], "attributes": {"n": 2**64}, "z": {"deep": [1.5]}}
    unsharded = _shown(document)
    assert list(unsharded) == list(document)
    assert unsharded == {
        **document,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "codecs": [{"name": "bytes"}],
    }


def test_the_example_of_a_transpose() -> None:
    document = handmade.zarr_metadata((8, 12, 16), (4, 6, 8), (4, 2, 3))
    transpose = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
    document["codecs"] = [transpose, *document["codecs"]]
    unsharded = _shown(document)
    assert unsharded["chunk_grid"]["configuration"]["chunk_shape"] == [2, 3, 4]
    assert unsharded["codecs"] == [transpose, {"name": "bytes"}]


@given(st.data())
def test_any_transposes_at_any_depth(data: st.DataObject) -> None:
    """Edges follow their axes: worked out by permuting axis names, innermost shape in array order."""
    rank = data.draw(st.integers(1, 4))
    depth = data.draw(st.integers(1, 3))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    levels = [sizes]
    for _ in range(depth):
        levels.append([s * data.draw(st.integers(1, 3)) for s in levels[-1]])
    levels.reverse()  # shard, ..., innermost; in array axis order
    axes, transposes = list(range(rank)), []
    codecs: list[Any] = []
    chain = codecs
    for level in levels[1:]:
        order = data.draw(st.permutations(range(rank)))
        axes = [axes[i] for i in order]
        transpose = {"name": "transpose", "configuration": {"order": order}}
        transposes.append(transpose)
        inner: list[Any] = []
        sharding = handmade.zarr_metadata((1,), (1,), [level[a] for a in axes])["codecs"][0]
        sharding["configuration"]["codecs"] = inner
        chain += [transpose, sharding]
        chain = inner
    chain.append({"name": "bytes"})
    shape = [data.draw(st.integers(1, 20)) for _ in range(rank)]
    document = {**handmade.zarr_metadata(shape, levels[0], levels[0]), "codecs": codecs}
    unsharded = _shown(document)
    assert unsharded["chunk_grid"]["configuration"]["chunk_shape"] == sizes
    assert unsharded["codecs"] == [*transposes, {"name": "bytes"}]
    dataset = _open(document)
    assert dataset is not None
    grids = [layer.format.grid for layer in dataset.collections[0].layers]
    assert grids == [tuple(-(-n // c) for n, c in zip(shape, level, strict=True)) for level in levels[1:]]


def test_nested_shards_are_flattened_wholly() -> None:
    inner = handmade.zarr_metadata((4, 4), (2, 2), (1, 1))["codecs"]
    document = handmade.zarr_metadata((8, 8), (4, 4), (2, 2), codecs=inner)
    assert _shown(document)["codecs"] == [{"name": "bytes"}]
    dataset = _open(document)
    assert dataset is not None
    assert len(dataset.collections[0].layers) == 2


@pytest.mark.parametrize("name", ["cast_value", "bitround", "numcodecs.fixedscaleoffset"])
def test_codecs_that_treat_each_element_alone_stay(name: str) -> None:
    codec = {"name": name, "configuration": {"x": 1}}
    assert _shown({**SHARDED, "codecs": [codec, *SHARDED["codecs"]]})["codecs"] == [codec, {"name": "bytes"}]


@pytest.mark.parametrize("codec", ["crc32c", {"name": "gzip", "configuration": {"level": 1}}, {"name": "zstd"}])
def test_codecs_after_sharding_are_dropped(codec: Any) -> None:
    assert _shown({**SHARDED, "codecs": [*SHARDED["codecs"], codec]})["codecs"] == [{"name": "bytes"}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"codecs": [{"name": "numcodecs.delta"}, *SHARDED["codecs"]]}, "'numcodecs.delta' before sharding_indexed"),
        ({"codecs": [*SHARDED["codecs"], {"name": "mystery"}]}, "codec 'mystery' around the shard is unknown"),
        ({"chunk_key_encoding": {"name": "zarrs.default_suffix"}}, "chunk_key_encoding should be default or v2"),
        ({"chunk_grid": {"name": "zarrs.regular_bounded", "configuration": {}}}, "unknown chunk grid"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
        ({"shape": [7, 10, 3]}, "has 2 axes, the array 3"),
        ({"shape": [7, True]}, "should hold integers"),
        ({"shape": [7, -1]}, "should hold integers"),
        ({"shape": [2**62, 2**62]}, "beyond any real array"),
    ],
)
def test_what_is_not_understood_is_left_as_it_is(change: dict[str, Any], why: str) -> None:
    assert why in _problem({**SHARDED, **change})


@pytest.mark.parametrize(
    "document",
    [
        {**SHARDED, "codecs": [{"name": "bytes"}]},
        handmade.group_document(a=1),
        {"zarr_format": 3, "node_type": "group", "consolidated_metadata": None},
    ],
)
def test_what_is_not_sharded_is_not_touched(document: Any) -> None:
    dataset = _open(document)
    assert dataset is not None
    assert (dataset.collections, dict(dataset.documents), dataset.problems) == ((), {}, ())


@pytest.mark.parametrize("document", [{"zarr_format": 2}, {"zarr_format": "https://x/3.0"}, [], 3, {}])
def test_other_documents_are_not_of_this_format(document: Any) -> None:
    assert _open(document) is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{", "cannot be read"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"zarr_format": 3, "x": {"a": 1, "a": 1}}', "occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * ((64 << 20) + 1), "more than"),
    ],
)
def test_documents_that_cannot_be_read(raw: bytes, why: str) -> None:
    with pytest.raises(CorruptShardError, match=why) as e:
        ZARR3.open("a", {"zarr.json": raw})
    assert str(e.value).startswith("a: zarr.json: ")


@pytest.mark.parametrize("depth", [100, 300, 450, 600, 900, 990])
def test_a_deep_document_is_shown_or_told(depth: int) -> None:
    deep = json.dumps(SHARDED).replace('"attributes": {}', '"attributes": ' + '{"a":' * depth + "1" + "}" * depth)
    group = json.dumps({**handmade.group_document(), "consolidated_metadata": {"metadata": {"x": {}}}})
    for raw in (deep, group.replace('"x": {}', f'"x": {deep}')):
        try:
            dataset = ZARR3.open("a", {"zarr.json": raw.encode()})
        except CorruptShardError:
            continue
        assert dataset is not None
        if dataset.problems:
            assert "nested too deeply" in dataset.problems[0].why
        else:
            assert dataset.documents


def test_consolidated_metadata_is_rewritten_at_every_level() -> None:
    plain = {**SHARDED, "codecs": [{"name": "bytes"}]}
    broken = {**SHARDED, "codecs": [{"name": "delta"}, *SHARDED["codecs"]]}

    def group(**members: Any) -> dict[str, Any]:
        consolidated = {"kind": "inline", "must_understand": False, "x": 2**65, "metadata": members}
        return {**handmade.group_document(t=1), "consolidated_metadata": consolidated, "after": None}

    inner = group(deep=SHARDED)
    document = group(a=SHARDED, **{"g/b": SHARDED}, g=inner, plain=plain, broken=broken, odd=7, empty=group())
    view = _shown(document)
    unsharded = _shown(SHARDED)
    expected = json.loads(json.dumps(document))
    members = expected["consolidated_metadata"]["metadata"]
    members["a"] = members["g/b"] = unsharded
    members["g"]["consolidated_metadata"]["metadata"]["deep"] = unsharded
    assert view == expected
    assert list(view["consolidated_metadata"]["metadata"]) == list(members)


@pytest.mark.parametrize(
    ("encoding", "coords", "key"),
    [
        ({"name": "default"}, (1, 23), "c/1/23"),
        ("default", (1, 23), "c/1/23"),
        ({"name": "default", "configuration": {"separator": "."}}, (1, 23), "c.1.23"),
        ({"name": "v2"}, (1, 23), "1.23"),
        ({"name": "v2", "configuration": {"separator": "/"}}, (1, 23), "1/23"),
        ({"name": "default"}, (), "c"),
        ({"name": "default", "configuration": {"separator": "."}}, (), "c"),
        ({"name": "v2"}, (), "0"),
    ],
)
def test_keys(encoding: Any, coords: tuple[int, ...], key: str) -> None:
    n = len(coords)
    document = {**handmade.zarr_metadata([4000] * n, [100] * n, [10] * n), "chunk_key_encoding": encoding}
    dataset = _open(document)
    assert dataset is not None
    fmt = dataset.collections[0].layers[0].format
    assert isinstance(fmt, ShardingIndexed)
    shard, _, _ = fmt.place(tuple(c * 10 for c in coords))
    assert fmt.key(shard) == key
    assert fmt.shard_of(key) == shard
    for other in (f"{key}/", f"{key}0000000000000000000000", f"x{key}", key.replace("1", "01") + "x", "", "c/", "c."):
        assert fmt.shard_of(other) is None


@pytest.mark.parametrize(
    "shapes", [[[], 4], [[4], 4], [[4, 4, "x"], 4], [[[4, 2, 1]], 4], [[[4, -1]], 4], [[4, 5], 4], [0, 4], [None, 4]]
)
def test_rectilinear_grids_that_cannot_be(shapes: Any) -> None:
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}
    assert _problem(
        {**SHARDED, "shape": [8, 12], "chunk_grid": grid, "codecs": handmade.zarr_metadata([8], [4], [2, 2])["codecs"]}
    )
