"""N5 documents, blocks and shards: what they describe, what is shown instead, what is left as it is."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.documents import parse_json
from shardfs.formats.n5 import N5
from shardfs.formats.n5.stored import PlainBlocks
from shardfs.formats.n5_multiscales import LevelsBelow
from shardfs.model.dataset import Dataset
from shardfs.model.errors import CorruptShardError
from shardfs.shards.byte_layouts.sharding_indexed import ShardingIndexed
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.storage.remote import FsspecStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree, open_tree
from tests import data_n5
from tests.data_n5 import GZIP, RAW, Index, attributes, header, key, sharding, transformer
from tests.datasets import ROOT as REPOSITORY
from tests.datasets import read_tree
from tests.handmade import write_files, write_json
from tests.strategies import cells, json_paths, json_values, replaced
from tests.suites import Sample, ShardFormatSuite, Sparse, ViewSuite
from tests.suites.walking import read_all, walk
from tests.vfs.test_bad_input import exercise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.model.values import Coords
    from tests.suites.shard_format import Extents

N5BYTES: Any = {"name": "n5bytes"}
CRC: Any = {"name": "crc32c"}
CODEC: Any = {"name": "gzip", "configuration": {"level": 5}}
BIG: Any = {"name": "raw-bytes", "configuration": {"endian": "big"}}
LITTLE: Any = {"name": "raw-bytes", "configuration": {"endian": "little"}}


def _sharded(*codecs: Any, data_type: str = "uint16", **members: Any) -> dict[str, Any]:
    """The dataset of formats' usual example, 11x7 in shards of 9x4 and chunks of 3x2."""
    chain = [sharding((3, 2), codecs or [N5BYTES, CODEC], Index())]
    return {**attributes((11, 7), (9, 4), data_type, codecs=chain), **members}


SEED = {
    **attributes((11, 7), (3, 2), "uint16", compression=GZIP),
    "storage_transformers": [transformer((3, 2))],
}


def _open(document: Any) -> Dataset:
    dataset = N5.open("a", {"attributes.json": json.dumps(document).encode()})
    assert dataset is not None
    return dataset


def _shown(document: Any) -> dict[str, Any]:
    dataset = _open(document)
    assert dataset.problems == ()
    assert dataset.closed
    shown: dict[str, Any] = json.loads(dataset.documents["attributes.json"])
    return shown


def _problem(document: Any) -> str:
    dataset = _open(document)
    assert (dataset.collections, dict(dataset.documents)) == ((), {})
    (problem,) = dataset.problems
    assert problem.path == "a"
    return problem.why


# ---------------------------------------------------------------------------------------------------- documents


def test_only_the_block_size_and_the_codecs_change() -> None:
    document = {"first": 1, **_sharded(), "n5": "4.0.0", "user": {"z": [2**64, {"a": None}], "codecs": [1]}}
    unsharded = _shown(document)
    assert list(unsharded) == ["compression" if name == "codecs" else name for name in document]
    document["compression"] = GZIP
    del document["codecs"]
    assert unsharded == {**document, "blockSize": [3, 2]}


def test_a_compression_beside_codecs_is_replaced() -> None:
    document = {"compression": {"type": "xz", "preset": 1}, **_sharded(), "after": 1}
    unsharded = _shown(document)
    assert list(unsharded) == ["compression", "dataType", "dimensions", "blockSize", "after"]
    assert unsharded["compression"] == GZIP


def test_the_seed_loses_its_transformer_alone() -> None:
    document = {**SEED, "compression": {"type": "odd"}, "user": 1}
    unsharded = _shown(document)
    assert list(unsharded) == [name for name in document if name != "storage_transformers"]
    assert unsharded == {name: document[name] for name in unsharded}
    assert "blockSize" in unsharded


@pytest.mark.parametrize(
    ("name", "configuration", "parameters"),
    [
        ("raw", {}, {}),
        ("gzip", {"level": 5}, {"level": 5, "useZlib": False}),
        ("gzip", {}, {"level": -1, "useZlib": False}),
        ("gzip", {"useZlib": True, "level": 2}, {"level": 2, "useZlib": True}),
        ("bzip2", {}, {"blockSize": 9}),
        ("xz", {"preset": 3}, {"preset": 3}),
        ("lz4", {}, {"blockSize": 65536}),
        ("zstd", {"level": 7, "checksum": True, "nbWorkers": 2}, {"level": 7}),
        (
            "blosc",
            {"nthreads": 8, "cname": "zstd", "clevel": 3, "shuffle": "bitshuffle", "typesize": 2},
            {"cname": "zstd", "clevel": 3, "shuffle": 2, "blocksize": 0},
        ),
        ("blosc", {"shuffle": 1}, {"cname": "blosclz", "clevel": 6, "shuffle": 1, "blocksize": 0}),
    ],
)
def test_a_compression_has_all_parameters_and_no_others(
    name: str, configuration: dict[str, Any], parameters: dict[str, Any]
) -> None:
    compression = _shown(_sharded(N5BYTES, {"name": name, "configuration": configuration}))["compression"]
    assert compression == {"type": name, **parameters}
    assert next(iter(compression)) == "type"


def test_the_codec_raw_is_none() -> None:
    raw = {"name": "raw"}
    document = _sharded(N5BYTES, raw, CODEC, raw, CRC, raw)
    document["codecs"].append(raw)
    assert _shown(document)["compression"] == GZIP


def test_nested_shards_are_flattened_wholly() -> None:
    document = attributes((20, 15), (8, 4), "uint8", codecs=[
        sharding((4, 4), [sharding((2, 4), [sharding((1, 2), [N5BYTES], Index())], Index())], Index())
    ])  # fmt: skip
    unsharded = _shown(document)
    assert (unsharded["blockSize"], unsharded["compression"]) == ([1, 2], RAW)
    (collection,) = _open(document).collections
    assert [layer.format.grid for layer in collection.layers] == [(5, 4), (10, 4), (20, 8)]


@pytest.mark.parametrize(
    "document",
    [
        attributes((11, 7), (3, 2), "uint16", compression=GZIP),
        attributes((11, 7), (3, 2), "uint16", compressionType="gzip"),
        attributes((11, 7), (3, 2), "uint16", codecs=[N5BYTES, CODEC]),
        attributes((11, 7), (3, 2), "uint16", codecs="a word of the user's", storage_transformers=7, compression=RAW),
        attributes((11, 7), (3, 2), "uint16", compression=GZIP, storage_transformers=[]),
        attributes((11, 7), (3, 2), "uint16", compression=GZIP, storage_transformers=[{"extension": "x/other/1.0"}]),
    ],
)
def test_what_is_not_sharded_is_not_touched(document: Any) -> None:
    dataset = _open(document)
    assert (dataset.collections, dict(dataset.documents), dataset.problems) == ((), {}, ())
    assert dataset.closed


def test_a_root_and_a_group() -> None:
    root = _open({"n5": "4.0.0", "dimensions": [3]})
    assert (root.format, root.collections, dict(root.documents), root.closed) == ("n5", (), {}, False)
    assert root.attributes == {"n5": "4.0.0", "dimensions": [3]}
    others: list[Any] = [{"a": 1}, {"dimensions": [1], "blockSize": [1]}, {"codecs": []}]
    for other in others:
        form = frozenset(("attributes.json",))
        assert _open(other) == Dataset("n5", format_names=form, attributes=other, levels=LevelsBelow(other))
        beside = {"attributes.json": json.dumps(other).encode(), "info": b"{}"}
        assert N5.open("a", beside) is None
    assert N5.open("a", {"attributes.json": b"[1, 2]"}) is None
    assert N5.open("a", {}) is None


def test_a_version_stays() -> None:
    assert _shown({"n5": "4.0.0", **_sharded()})["n5"] == "4.0.0"


def _with(document: dict[str, Any], **configuration: Any) -> dict[str, Any]:
    """With other members in the sharding codec's configuration."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    changed["codecs"][0]["configuration"].update(configuration)
    return changed


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("document", "why"),
    [
        (_sharded(N5BYTES, CODEC, {"name": "zstd"}), "plain N5 cannot express codecs ['gzip', 'zstd']"),
        (_sharded(N5BYTES, CRC, CODEC), "plain N5 cannot express codecs ['crc32c', 'gzip']"),
        (_sharded(N5BYTES, CRC, CRC), "plain N5 has no compression 'crc32c'"),
        (_sharded(N5BYTES, {"name": "mystery"}), "plain N5 has no compression 'mystery'"),
        (_sharded({"name": "transpose"}, N5BYTES), "codec 'transpose'"),
        (_sharded(CODEC), "codec 'gzip'"),
        (_sharded(LITTLE, CODEC), "byte order of compressed blocks cannot be reversed"),
        (_sharded(BIG, data_type="string"), "of data type 'string'"),
        (_sharded(BIG, data_type="object"), "of data type 'object'"),
        (_sharded({"name": "bytes"}, CODEC), "byte order of compressed blocks cannot be reversed"),
        (_sharded({"name": "bytes", "configuration": {"endian": "middle"}}), "endian should be little or big"),
        (_sharded(N5BYTES, {"name": "gzip", "configuration": {"level": "5"}}), "gzip: level should be"),
        (_sharded(N5BYTES, {"name": "gzip", "configuration": {"level": True}}), "gzip: level should be"),
        (_sharded(N5BYTES, {"name": "blosc", "configuration": {"shuffle": "odd"}}), "blosc: shuffle should be"),
        (_sharded(codecs=[*_sharded()["codecs"], CODEC]), "codecs ['gzip'] after sharding_indexed"),
        (_sharded(codecs=[{"name": "transpose"}, *_sharded()["codecs"]]), "codec 'transpose'"),
        (_sharded(storage_transformers=[{"a": 1}]), "storage transformers may store shards elsewhere"),
        (_with(_sharded(), chunk_shape=[2, 4]), "a shard of 9 elements along axis 0 does not consist of chunks of 4"),
        (_with(_sharded(), chunk_shape=[2, 3, 1]), "chunk_shape has 3 axes, the array 2"),
        (_with(_sharded(), chunk_shape=[2, 0]), "chunk_shape should hold integers"),
        (_with(_sharded(), chunk_shape=[2, 12]), "does not consist of chunks of 12"),
        (_with(_sharded(), codecs=[]), "codecs should not be empty"),
        (_with(_sharded(), index_location="middle"), "index_location should be start or end"),
        (_with(_sharded(), index_codecs=[N5BYTES, CRC, CRC]), "index_codecs ['n5bytes', 'crc32c', 'crc32c'] are none"),
        (_with(_sharded(), index_codecs=[CRC]), "index_codecs ['crc32c'] are none"),
        (_with(_sharded(), index_codecs=[BIG, CODEC]), "index_codecs ['raw-bytes', 'gzip'] are none"),
        (_with(_sharded(), index_codecs=[]), "codecs should not be empty"),
        (_sharded(dimensions=[11, 7, 3]), "blockSize has 2 axes, the array 3"),
        (_sharded(dimensions=[11, -1]), "dimensions should hold integers"),
        (_sharded(dimensions=[11, True]), "dimensions should hold integers"),
        (_sharded(dimensions=11), "dimensions should be a list"),
        (_sharded(dimensions=[2**62, 2**62]), "beyond any real array"),
        (
            {**attributes((), (), "uint8", codecs=[sharding((), [N5BYTES], Index())])},
            "dimensions should have at least one axis",
        ),
        ({**SEED, "storage_transformers": [transformer((3, 2)), {"a": 1}]}, "other storage transformers"),
        ({**SEED, "storage_transformers": [{**transformer((3, 2)), "type": "x"}]}, "type of shards should be indexed"),
        ({**SEED, "storage_transformers": [transformer((3, 2, 1))]}, "chunks_per_shard has 3 axes, the array 2"),
        ({**SEED, "storage_transformers": [transformer((3, 0))]}, "chunks_per_shard should hold integers"),
    ],
)
def test_what_is_not_understood_is_left_as_it_is(document: Any, why: str) -> None:
    assert why in _problem(document)


def test_a_header_that_cannot_be_written() -> None:
    size = (2**32, 1)
    assert "too large for the header of an N5 block" in _problem(
        attributes(size, size, "uint8", codecs=[sharding(size, [BIG], Index())])
    )
    assert _shown(attributes(size, size, "uint8", codecs=[sharding(size, [N5BYTES], Index())]))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{", "cannot be read"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_documents_that_cannot_be_read(raw: bytes, why: str) -> None:
    dataset = N5.open("a", {"attributes.json": raw})
    assert dataset is not None
    (problem,) = dataset.problems
    assert problem.path == "a"
    assert problem.why.startswith("attributes.json: ")
    assert why in problem.why
    assert not dataset.closed


_NESTED = attributes((20, 15), (8, 4), "uint16", codecs=[
    sharding((4, 4), [sharding((2, 2), [LITTLE, CRC], Index())], Index())
])  # fmt: skip


@pytest.mark.parametrize("document", [_sharded(), _NESTED, SEED], ids=["sharded", "nested", "seed"])
@given(st.data())
def test_wrong_types_anywhere_in_metadata(document: Any, data: st.DataObject) -> None:
    values = json_values | st.sampled_from(("n5bytes", "raw-bytes", "end", "indexed"))
    for _ in range(data.draw(st.integers(1, 2))):
        document = replaced(document, data.draw(st.sampled_from(json_paths(document))), data.draw(values))
    dataset = N5.open("x", {"attributes.json": json.dumps(document).encode()})
    if dataset is None:
        return
    for unsharded in dataset.documents.values():
        again = N5.open("x", {"attributes.json": unsharded})
        assert again is not None
        assert again.collections == ()
        assert parse_json("x", "attributes.json", unsharded)
    for collection in dataset.collections:
        fmt = collection.layers[-1].format
        for cell in ((0,) * len(fmt.grid), tuple(n - 1 for n in fmt.grid)):
            if all(fmt.grid):
                shard = fmt.place(cell)[0]
                assert fmt.shard_of(fmt.key(shard)) == shard


@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode))
def test_any_bytes_for_a_document(raw: bytes) -> None:
    for data in (raw, b"{" + raw):
        N5.open("x", {"attributes.json": data})


# ------------------------------------------------------------------------------------------------------- layout


@st.composite
def n5_samples(draw: st.DrawFn) -> Sample:
    """Shards of either kind, as their documents describe them, beside the writer of the tests."""
    rank = draw(st.integers(1, 4))
    chunk = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    per = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 20)) for _ in range(rank))
    seed = draw(st.booleans())
    index = data_n5.SEED_INDEX
    size = tuple(c * p for c, p in zip(chunk, per, strict=True))
    if not seed:
        index = Index(
            draw(st.sampled_from(("little", "big"))), draw(st.booleans()), draw(st.sampled_from(("start", "end")))
        )
        document = attributes(shape, size, "uint8", codecs=[sharding(chunk, [N5BYTES], index)])
    else:
        document = attributes(shape, chunk, "uint8", compression=RAW, storage_transformers=[transformer(per)])
    (collection,) = _open(document).collections
    (layer,) = collection.layers
    assert isinstance(layer.format, ShardingIndexed)

    def home(cell: Coords) -> str:
        return key(c // p for c, p in zip(cell, per, strict=True))

    def shard(extents: Extents) -> bytes:
        local = {tuple(c % p for c, p in zip(cell, per, strict=True)): extent for cell, extent in extents.items()}
        entries = {data_n5.slot_of(position, per, index.fastest): extent for position, extent in local.items()}
        body = bytes(sum(n for _, n in extents.values()))
        empty = data_n5.shard({}, per, index, entries=entries)
        return empty + body if index.location == "start" else body + empty

    grid = tuple(math.ceil(n / c) for n, c in zip(shape, chunk, strict=True))
    assert collection.facts.shard_shape == size
    assert layer.format.grid == grid
    return Sample(layer.format, cells(grid), home, shard)


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return n5_samples()


def test_the_example_of_n5_java() -> None:
    # chunk (3, 1) of shards of (3, 2) chunks: shard (1, 0), local (0, 1), slot 3
    (collection,) = _open(_sharded()).collections
    fmt = collection.layers[0].format
    shard, _, slot = fmt.place((3, 1))
    assert (fmt.key(shard), slot) == ("1/0", 3)


def test_the_axes_of_the_seed_are_as_listed() -> None:
    (collection,) = _open(SEED).collections
    fmt = collection.layers[0].format
    assert [fmt.place((3 + x, y))[2] for x, y in product(range(3), range(2))] == list(range(6))
    assert fmt.page_request(0, 0, None).size == 16 * 6  # type: ignore[union-attr]


@pytest.mark.parametrize(("given_per", "per"), [([], (1, 1)), ([4], (4, 1)), ([4, 3], (4, 3))])
def test_chunks_per_shard_may_be_shorter_than_the_rank(given_per: list[int], per: tuple[int, int]) -> None:
    for url in (data_n5.SEED_URL, "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"):
        document = {**SEED, "storage_transformers": [transformer(given_per, url)]}
        (collection,) = _open(document).collections
        assert collection.facts.shard_shape == (3 * per[0], 2 * per[1])


# ------------------------------------------------------------------------------------------------------- blocks


def _transform(*codecs: Any, data_type: str = "uint16") -> PlainBlocks:
    (collection,) = _open(_sharded(*codecs, data_type=data_type)).collections
    assert isinstance(collection.transform, PlainBlocks)
    return collection.transform


@pytest.mark.parametrize("chain", [[N5BYTES], [N5BYTES, CODEC], [N5BYTES, {"name": "raw"}]])
def test_blocks_of_n5_pass_through(chain: list[Any]) -> None:
    (collection,) = _open(_sharded(*chain)).collections
    assert collection.transform is None


@pytest.mark.parametrize(
    "block",
    [header((3, 2)) + b"payload", header((3, 2)), header((4,), 5) + b"12345", data_n5.object_block(b"123")],
)
def test_a_checksum_behind_a_block_is_verified_and_cut(block: bytes) -> None:
    transform = _transform(N5BYTES, CODEC, CRC)
    source_bytes = data_n5.block_with_crc(block)
    assert transform.show((0, 0), source_bytes) == block
    assert transform.sizes(np.zeros((1, 2), np.uint64), np.array([len(source_bytes)])).tolist() == [len(block)]
    for i in (0, len(source_bytes) - 5, len(source_bytes) - 1):
        damaged = bytearray(source_bytes)
        damaged[i] ^= 0x40
        if i >= data_n5.header_size(block) or i == 0:
            with pytest.raises(ValueError, match=r"crc32c|not an N5 block"):
                transform.show((0, 0), bytes(damaged))


@given(st.binary(max_size=30))
def test_any_bytes_for_a_chunk(source_bytes: bytes) -> None:
    for transform in (_transform(N5BYTES, CRC), _transform(LITTLE, CRC), _transform(LITTLE), _transform(BIG, CODEC)):
        sizes = transform.sizes(np.zeros((1, 2), np.uint64), np.array([len(source_bytes)]))
        try:
            unsharded = transform.show((0, 0), source_bytes)
        except ValueError:
            continue
        assert sizes.tolist() == [len(unsharded)]


def test_chunks_without_a_header_get_one() -> None:
    elements = struct.pack("<6H", *range(6))
    block = header((3, 2)) + struct.pack(">6H", *range(6))
    assert _transform(LITTLE).show((0, 0), elements) == block
    assert _transform({"name": "bytes"}).show((0, 0), elements) == block
    assert _transform(LITTLE, CRC).show((0, 0), elements + data_n5.crc32c(elements)) == block
    for codec in (BIG, {"name": "raw-bytes"}):
        assert _transform(codec).show((0, 0), block[12:]) == block
        assert _transform(codec, CODEC).show((0, 0), b"any gzip") == header((3, 2)) + b"any gzip"
    assert _transform(LITTLE, CODEC, data_type="uint8").show((0, 0), b"any") == header((3, 2)) + b"any"
    for size in (0, 11, 13):
        with pytest.raises(ValueError, match=f"should have 12 bytes, not {size}"):
            _transform(LITTLE).show((0, 0), bytes(size))


def test_what_is_undone_is_named() -> None:
    names = [_transform(*chain).name for chain in ([N5BYTES, CRC], [LITTLE], [LITTLE, CRC])]
    assert names == ["crc32c", "headerless", "headerless+crc32c"]


# -------------------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("name", sorted(data_n5.golden()))
def test_golden_files(name: str) -> None:
    stored_files, tree_files = data_n5.golden()[name]
    for form, files in (("stored", stored_files), ("shown", tree_files)):
        root = data_n5.GOLDEN / name / form
        assert {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()} == files
    tree = open_tree(str(data_n5.GOLDEN / name / "stored"))
    assert _parsed(walk(tree)) == _parsed(tree_files)
    assert [s.format for s in tree.survey.summaries()] == ["n5"]


def _parsed(files: dict[str, bytes]) -> dict[str, Any]:
    return {n: json.loads(d) if n.endswith("attributes.json") else d for n, d in files.items()}


@pytest.mark.interop
def test_the_shards_of_n5_are_those_of_zarr_with_its_axes_reversed(tmp_path: Path) -> None:
    """An array that tensorstore writes in shards is an N5 dataset if its document says the same in N5's words."""
    data = np.arange(1, 9 * 8 + 1, dtype=">u2").reshape(9, 8)  # whole chunks
    codecs = [{"name": "bytes", "configuration": {"endian": "big"}}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, CRC]
    configuration = {"chunk_shape": [3, 2], "codecs": codecs, "index_codecs": index, "index_location": "end"}
    codec = {"name": "sharding_indexed", "configuration": configuration}
    metadata = {
        "shape": [9, 8],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 4]}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}},
        "codecs": [codec],
    }
    store = {"driver": "file", "path": f"{tmp_path}/zarr/"}
    ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result().write(data).result()
    for y, x in product(range(2), range(2)):
        write_files(tmp_path / "n5", {f"{x}/{y}": (tmp_path / f"zarr/{y}/{x}").read_bytes()})
    write_json(tmp_path / "n5/attributes.json", attributes((8, 9), (4, 6), "uint16", codecs=[codec]))
    blocks: dict[Coords, bytes] = {
        (x, y): data[3 * y : 3 * y + 3, 2 * x : 2 * x + 2].tobytes() for x, y in product(range(4), range(3))
    }
    tree_files = walk(open_tree(f"{tmp_path}/n5"))
    del tree_files["attributes.json"]
    assert tree_files == {key(p): header((2, 3)) + data for p, data in blocks.items()}
    shards = data_n5.shards(blocks, (2, 2), Index())
    assert {key(p): d for p, d in shards.items()} == {
        f"{x}/{y}": (tmp_path / f"n5/{x}/{y}").read_bytes() for x, y in product(range(2), range(2))
    }


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(data_n5.VARIANTS))
def test_a_container_is_its_unsharded_twin(name: str, tmp_path: Path) -> None:
    dataset = data_n5.VARIANTS[name].write(tmp_path, name)
    tree = open_tree(str(dataset.path))
    assert _parsed(walk(tree)) == _parsed(read_tree(dataset.twin))
    assert tree.problems() == []


@st.composite
def sparse_n5(draw: st.DrawFn) -> Sparse:
    """Sparse datasets of opaque chunks, some shards missing, of both kinds, nested or not, with every transform."""
    rank = draw(st.integers(1, 3))
    chunk = tuple(draw(st.integers(1, 2)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    grid = tuple(math.ceil(n / c) for n, c in zip(shape, chunk, strict=True))
    kind = draw(st.sampled_from(("plain", "checksum", "headerless", "seed")))
    source_documents, view = {}, {}
    for cell in product(*map(range, grid)):
        payload = draw(st.none() | st.binary(max_size=6))
        if payload is None:
            continue
        view[cell] = payload if kind in ("plain", "seed") else header(chunk) + payload
        source_documents[cell] = data_n5.block_with_crc(view[cell]) if kind == "checksum" else payload
    raw = {key(cell): data for cell, data in source_documents.items()}
    first = {"headerless": BIG}.get(kind, N5BYTES)
    codecs = [first, CODEC, CRC] if kind == "checksum" else [first, CODEC]
    size, depth = chunk, 1 if kind == "seed" else draw(st.integers(1, 2))
    for _ in range(depth):
        per = tuple(draw(st.integers(1, 3)) for _ in range(rank))
        index = draw(st.sampled_from((Index(), Index(location="start"), Index("big", checksum=False))))
        index = data_n5.SEED_INDEX if kind == "seed" else index
        source_documents = data_n5.shards(source_documents, per, index, gap=draw(st.sampled_from((b"", b"gap"))))
        codecs = [sharding(size, codecs, index)]
        size = tuple(s * n for s, n in zip(size, per, strict=True))
    document = attributes(shape, size, "uint8", codecs=codecs)
    if kind == "seed":
        document = attributes(shape, chunk, "uint8", compression=GZIP, storage_transformers=[transformer(per)])
    near = st.tuples(*(st.integers(0, n + 1) for n in grid)).map(key)
    odd = st.sampled_from(("0", "00", "0/00", "0/0/0/0", "attributes.json", "x", "0/x", "c/0", "+1"))
    return Sparse(
        {"attributes.json": json.dumps(document).encode(), **{key(p): data for p, data in source_documents.items()}},
        {key(p): data for p, data in view.items()},
        near | odd,
        raw,
    )


class TestView(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return sparse_n5()


# ------------------------------------------------------------------------------------------- damage, hostility


def _tree(path: Path) -> Tree:
    return Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20)))


def _remote_tree(path: Path) -> Tree:
    """As over a network, where an object's size is not known."""
    return Tree(Datasets(FsspecStore(fsspec.filesystem("file"), str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20)))


@pytest.mark.parametrize("open_", [_tree, _remote_tree])
@pytest.mark.parametrize("name", sorted(data_n5.DAMAGED))
def test_damage_harms_nothing_beside_it(name: str, open_: Callable[[Path], Tree], tmp_path: Path) -> None:
    case = data_n5.DAMAGED[name](tmp_path)
    tree = open_(case.path)
    for file in case.bad:
        with pytest.raises(CorruptShardError) as e:
            read_all(tree, tree.resolve(file))
        assert e.value.key in ("0/0", "0/0[1,0]")
        assert e.value.why
    for file in case.absent:
        with pytest.raises(FileNotFoundError):
            tree.resolve(file)
    assert {file: read_all(tree, tree.resolve(file)) for file in case.good} == dict(case.good)
    assert open_(case.path).problems() == []


@pytest.mark.parametrize("name", sorted(data_n5.HOSTILE))
def test_hostile_documents_harm_nothing_beside_them(name: str, tmp_path: Path) -> None:
    exercise(data_n5.hostile(tmp_path, data_n5.HOSTILE[name]))
    tree = _tree(tmp_path)
    list(tree.survey.summaries())
    assert read_all(tree, tree.resolve("good/0/0")) == (data_n5.DAMAGED["sound"](tmp_path / "again").good)["0/0"]


_ALL_HOSTILE = """
import resource, sys, time
from pathlib import Path
from tests import data_n5
from tests.limits import usual_seconds
from tests.vfs.test_bad_input import exercise
import numpy, shardfs.vfs.tree, google_crc32c, mmh3, numcodecs, blosc  # what a mount has loaded when it starts
cases = [data_n5.hostile(Path(sys.argv[1], name), d) for name, d in data_n5.HOSTILE.items()]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
for case in cases:
    exercise(case)
spent, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(usual_seconds(spent), (most - before) >> 10)
"""


@pytest.mark.slow
def test_all_hostile_documents_take_little_time_and_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ALL_HOSTILE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seconds, mib = map(float, run.stdout.split())
    assert seconds < 2 * len(data_n5.HOSTILE)
    assert mib < 256


@pytest.mark.parametrize("raw", [b"{", b'{"n5": "4.0.0", "n5": 1}', b"\xff", b"", b"[1]", b"{}", b'{"n5": []}'])
def test_a_root_that_cannot_be_read_harms_nothing_below_it(raw: bytes, tmp_path: Path) -> None:
    case = data_n5.DAMAGED["sound"](tmp_path / "deep/down")
    write_files(tmp_path, {"attributes.json": raw})
    tree = _tree(tmp_path)
    tree_files = walk(tree)
    assert tree_files.pop("attributes.json") == raw
    assert {n: tree_files[f"deep/down/{n}"] for n in case.good} == dict(case.good)
    assert [s.path for s in tree.survey.summaries()] == ["deep/down"]


def test_where_a_transformed_block_lies(tmp_path: Path) -> None:
    data_n5.VARIANTS["headerless_little_checksum"].write(tmp_path, "x")
    located = open_tree(str(tmp_path / "sharded")).locate(f"{data_n5.MEMBER}/1/1/1")
    assert (located.size, located.codecs) == (2 * 3 * 2 * 2 + 4, ("n5bytes", "headerless+crc32c"))
    assert located.shard == f"{data_n5.MEMBER}/0/1/0"
