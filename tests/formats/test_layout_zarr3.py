"""The layout zarr3: documents, chunks and images of any described array, read by libraries that know Zarr v3."""

from __future__ import annotations

import bz2
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs.decoders import decode
from shardfs.codecs.encoders import STORED_ENCODERS, store, stored_sizes
from shardfs.model.arrays import Codec
from shardfs.model.errors import UnsupportedError
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests import data_n5
from tests.data_n5 import MEMBER, RAW, VARIANTS, Index, Variant, attributes, key, sharding, shards, transformer
from tests.datasets import PRECOMPUTED, ZARR3, ramp
from tests.handmade import write_files, write_json
from tests.suites.walking import sizes, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.datasets import Array as Data
    from tests.datasets import Dataset


def _zarr3(path: Path, *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout="zarr3", skip_unsupported=skip)


def _parsed(documents: Mapping[str, bytes], path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(documents[f"{path}/zarr.json" if path else "zarr.json"])
    return found


def read_tensorstore(root: Path, member: str) -> Data:
    store = {"driver": "file", "path": f"{root / member}/"}
    found: Data = ts.open({"driver": "zarr3", "kvstore": store}).result().read().result()
    return found


def read_zarr(root: Path, member: str) -> Data:
    return np.asarray(zarr.open_array(str(root / member), mode="r")[...])


def assert_equal(actual: Data, wanted: Data) -> None:
    assert actual.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(actual, wanted)


# ------------------------------------------------------------------------------------- N5 as source: every variant


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_form_of_n5_is_read(name: str, tmp_path: Path) -> None:
    data = VARIANTS[name].write(tmp_path, name).array.T
    for form in ("sharded", "plain"):
        tree_files = walk(_zarr3(tmp_path / form))
        assert not any(path.endswith("attributes.json") for path in tree_files)
        write_files(tmp_path / "shown" / form, tree_files)
        document = _parsed(tree_files, MEMBER)
        assert_equal(read_zarr(tmp_path / "shown" / form, MEMBER), data)
        if not any(c["name"].startswith("numcodecs.") for c in document["codecs"]):
            assert_equal(read_tensorstore(tmp_path / "shown" / form, MEMBER), data)
        assert tree_files[f"{MEMBER}/note"] == b"x"
        assert _parsed(tree_files, "volumes/labels") == _group(user={"n5": [1, 2]})


def _group(**attributes: Any) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


@st.composite
def _n5_datasets(draw: st.DrawFn) -> tuple[Data, dict[str, Any]]:
    rank = draw(st.integers(1, 4))
    chunk = [draw(st.integers(1, 5)) for _ in range(rank)]
    shape = [draw(st.integers(1, 11)) for _ in range(rank)]
    dtype = draw(st.sampled_from(("uint8", "int8", "uint16", "int32", "uint64", "float32", "float64")))
    compression = draw(st.sampled_from((RAW, data_n5.GZIP, data_n5.ZLIB, data_n5.BLOSC, data_n5.ZSTD, data_n5.BZIP2)))
    data = (np.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 2))):
        data[tuple(slice(draw(st.integers(0, n - 1)), draw(st.integers(1, n))) for n in shape)] = 0
    per = [draw(st.integers(1, 3)) for _ in chunk] if draw(st.booleans()) else []
    how = {"chunk": tuple(chunk), "per": tuple(per), "compression": compression, "cut": draw(st.booleans())}
    return data, how


def _cut(block: bytes, position: tuple[int, ...], data: Data, chunk: tuple[int, ...], compression: Any) -> bytes:
    """The block with no more elements than lie in the array, as Java writes it; raw and gzip alone."""
    part = data[tuple(slice(p * c, (p + 1) * c) for p, c in zip(position, chunk, strict=True))]
    payload = part.astype(data.dtype.newbyteorder(">")).tobytes(order="F")
    if compression == data_n5.GZIP:
        payload = store([Codec("gzip")], payload)
    elif compression != RAW:
        return block
    return data_n5.header(part.shape) + payload


@given(_n5_datasets())
def test_any_array_of_n5_is_read_as_zarr(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[Data, dict[str, Any]]
) -> None:
    data, how = written
    path = tmp_path_factory.mktemp("zarr3")
    chunk, per, compression = how["chunk"], how["per"], how["compression"]
    data_n5.write_twin(path / "source", data, chunk, compression, "tensorstore")
    directory = path / "source" / MEMBER
    blocks = data_n5.blocks_of(directory, data.ndim)
    if how["cut"]:
        blocks = {at: _cut(block, at, data, chunk, compression) for at, block in blocks.items()}
        write_files(directory, {key(at): block for at, block in blocks.items()})
    if per:
        for at in blocks:
            (directory / key(at)).unlink()
        write_files(path / "sharded" / MEMBER, {key(at): s for at, s in shards(blocks, per, Index()).items()})
        inner = Variant(data.shape, chunk, [per], compression)._codecs()
        size = [c * n for c, n in zip(chunk, per, strict=True)]
        document = attributes(data.shape, size, data.dtype.name, codecs=[sharding(chunk, inner, Index())])
        write_json(path / "sharded" / MEMBER / "attributes.json", document)
    tree_files = walk(_zarr3(path / ("sharded" if per else "source")))
    write_files(path / "shown", tree_files)
    assert_equal(read_zarr(path / "shown", MEMBER), data.T)
    assert_equal(read_tensorstore(path / "shown", MEMBER), data.T)


# --------------------------------------------------------------------------------------------------- documents

_BIG = {"name": "bytes", "configuration": {"endian": "big"}}


@pytest.mark.parametrize(
    ("compression", "codecs"),
    [
        (RAW, []),
        (data_n5.GZIP, [{"name": "gzip", "configuration": {"level": 5}}]),
        (data_n5.ZLIB, [{"name": "gzip", "configuration": {"level": 5}}]),
        (data_n5.ZSTD, [{"name": "zstd", "configuration": {"level": 3, "checksum": False}}]),
        (
            data_n5.BLOSC,
            [
                {
                    "name": "blosc",
                    "configuration": {
                        "cname": "lz4",
                        "clevel": 5,
                        "shuffle": "shuffle",
                        "typesize": 2,
                        "blocksize": 0,
                    },
                }
            ],
        ),
        (data_n5.BZIP2, []),  # which is not in the specification
    ],
)
def test_payloads_pass_and_headers_go(compression: Any, codecs: list[Any], tmp_path: Path) -> None:
    data = ramp((6, 4), "uint16")
    data_n5.write_twin(tmp_path, data, (3, 2), compression, "tensorstore")
    tree_files = walk(_zarr3(tmp_path))
    assert _parsed(tree_files, MEMBER) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 6],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [_BIG, *codecs],
        "attributes": {},
    }
    for (x, y), block in data_n5.blocks_of(tmp_path / MEMBER, 2).items():
        chunk, payload = tree_files[f"{MEMBER}/c/{y}/{x}"], block[data_n5.header_size(block) :]
        if compression is data_n5.ZLIB:
            assert chunk[10:-8] == payload[2:-4], "the deflated bytes pass"
        elif compression is data_n5.BZIP2:
            assert chunk == bz2.decompress(payload)
        else:
            assert chunk == payload


@pytest.mark.parametrize("compression", [data_n5.GZIP, data_n5.ZSTD, data_n5.BLOSC, data_n5.ZLIB])
def test_blocks_that_were_cut_are_padded_and_all_others_pass(compression: Any, tmp_path: Path) -> None:
    data = ramp((7, 4), "uint16")
    blocks = {}
    chain = [Codec(compression["type"], {"typesize": 2})]
    source_bytes = [Codec("numcodecs.zlib")] if compression is data_n5.ZLIB else chain
    for at in np.ndindex(3, 2):
        part = data[tuple(slice(p * c, (p + 1) * c) for p, c in zip(at, (3, 2), strict=True))]
        blocks[at] = data_n5.header(part.shape) + store(source_bytes, part.astype(">u2").tobytes(order="F"))
    write_json(tmp_path / "a/attributes.json", attributes(data.shape, (3, 2), "uint16", compression=compression))
    write_files(tmp_path / "a", {key(at): block for at, block in blocks.items()})
    tree = _zarr3(tmp_path)
    assert all(size > 0 for _, size in sizes(tree, ROOT))
    tree_files = walk(tree)
    for x, y in np.ndindex(2, 2):
        payload = blocks[x, y][data_n5.header_size(blocks[x, y]) :]
        assert (
            tree_files[f"a/c/{y}/{x}"] == payload
            if source_bytes is chain
            else tree_files[f"a/c/{y}/{x}"][10:-8] == payload[2:-4]
        )
    assert decode(chain, tree_files["a/c/1/2"]) == np.pad(data[6:, 2:], ((0, 2), (0, 0))).astype(">u2").tobytes(
        order="F"
    )
    write_files(tmp_path / "shown", tree_files)
    assert_equal(read_zarr(tmp_path / "shown", "a"), data.T)


def test_images_of_n5_are_told_as_ome_zarr(tmp_path: Path) -> None:
    for i in range(2):
        data = ramp((8 >> i, 6 >> i, 4 >> i), "uint8")
        document = attributes(data.shape, (8, 8, 8), "uint8", compression=RAW)
        write_json(tmp_path / f"image/s{i}/attributes.json", document)
        write_files(tmp_path / f"image/s{i}", {"0/0/0": data_n5.header(data.shape) + data.tobytes(order="F")})
    told = {
        "multiScale": True,
        "axes": ["x", "y", "z"],
        "resolution": [4, 4, 40],
        "units": ["nm", "nm", "nm"],
        "scales": [[1, 1, 1], [2, 2, 2]],
        "user": 5,
    }
    write_json(tmp_path / "image/attributes.json", told)
    tree_files = walk(_zarr3(tmp_path))
    assert [_parsed(tree_files, f"image/s{i}")["dimension_names"] for i in range(2)] == [["z", "y", "x"]] * 2
    parsed_document = _parsed(tree_files, "image")["attributes"]
    assert {name: parsed_document[name] for name in told} == told
    assert parsed_document["ome"]["version"] == "0.5"
    (image,) = parsed_document["ome"]["multiscales"]
    assert image["axes"] == [{"name": n, "type": "space", "unit": "nanometer"} for n in "zyx"]
    assert [d["path"] for d in image["datasets"]] == ["s0", "s1"]
    assert image["datasets"][1]["coordinateTransformations"] == [
        {"type": "scale", "scale": [80.0, 8.0, 8.0]},
        {"type": "translation", "translation": [20.0, 2.0, 2.0]},
    ]
    (tmp_path / "image/s1/attributes.json").unlink()
    assert "ome" not in _parsed(walk(_zarr3(tmp_path)), "image")["attributes"]


def test_axes_and_the_users_attributes_are_kept(tmp_path: Path) -> None:
    user = {"name": "µ", "big": 2**64 - 1, "none": None, "nested": {"a": [1.5]}, "axes": ["x", "y"]}
    write_json(tmp_path / "a/attributes.json", attributes((4, 2), (4, 2), "int8", compression=RAW, **user))
    write_files(
        tmp_path / "deep/er", {"README": b"", "a/attributes.json": (tmp_path / "a/attributes.json").read_bytes()}
    )
    tree_files = walk(_zarr3(tmp_path))
    document = _parsed(tree_files, "a")
    assert document["attributes"] == user
    assert document["dimension_names"] == ["y", "x"]
    assert document["codecs"] == [{"name": "bytes"}]
    assert all(_parsed(tree_files, path) == _group() for path in ("", "deep", "deep/er"))
    assert tree_files["deep/er/README"] == b""


# ------------------------------------------------------------------------------------------------------- precomputed


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_every_form_of_volume_is_read(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    volume = dataset("precomputed", name)
    info = json.loads((volume.path / "info").read_bytes())
    for form in (volume.path, volume.twin):
        tree = _zarr3(form, skip=True)
        assert [p.path for p in tree.problems()] in ([], ["mesh"])
        tree_files = walk(tree)
        assert "info" not in tree_files
        write_files(tmp_path / "shown" / form.name, tree_files)
        (image,) = _parsed(tree_files, "")["attributes"]["ome"]["multiscales"]
        assert [d["path"] for d in image["datasets"]] == [scale["key"] for scale in info["scales"]]
        for mip, data in volume.arrays.items():
            key = info["scales"][int(mip)]["key"]
            wanted = np.asarray(data.T if data.shape[3] > 1 else data[..., 0].T)
            assert_equal(read_zarr(tmp_path / "shown" / form.name, key), wanted)
            assert_equal(read_tensorstore(tmp_path / "shown" / form.name, key), wanted)


def test_where_a_volume_begins_is_told_twice(tmp_path: Path) -> None:
    scale = {
        "key": "4_4_40",
        "size": [5, 4, 3],
        "chunk_sizes": [[4, 4, 4]],
        "resolution": [4, 4, 40],
        "encoding": "raw",
    }
    document = {
        "data_type": "uint8",
        "num_channels": 1,
        "type": "image",
        "scales": [{**scale, "voxel_offset": [-3, 0, 7]}],
    }
    write_json(tmp_path / "info", document)
    write_files(tmp_path / "4_4_40", {"-3-1_0-4_7-10": bytes(range(48)), "1-2_0-4_7-10": bytes(range(12))})
    tree_files = walk(_zarr3(tmp_path))
    assert _parsed(tree_files, "4_4_40")["attributes"] == {"offset": [7, 0, -3]}
    (image,) = _parsed(tree_files, "")["attributes"]["ome"]["multiscales"]
    assert image["datasets"][0]["coordinateTransformations"] == [
        {"type": "scale", "scale": [40.0, 4.0, 4.0]},
        {"type": "translation", "translation": [280.0, 0.0, -12.0]},
    ]
    assert tree_files["4_4_40/c/0/0/0"] == bytes(range(48)) + bytes(16)


# ------------------------------------------------------------------------------------------- Zarr v3, sharded itself


@pytest.mark.parametrize("name", sorted(ZARR3))
def test_of_zarr_itself_it_is_the_native_layout(name: str, dataset: Callable[[str, str], Dataset]) -> None:
    path = dataset("zarr3", name).path
    native = walk(open_tree(str(path)))
    tree_files = walk(_zarr3(path))
    assert {n: d for n, d in tree_files.items() if n in native} == native
    assert {n.rsplit("/", 1)[-1] for n in tree_files.keys() - native.keys()} <= {"zarr.json"}  # of implied groups


def test_what_has_no_description_is_refused_when_mounted(tmp_path: Path) -> None:
    document = attributes((8,), (4,), "object", compression=RAW, storage_transformers=[transformer((2,))])
    write_json(tmp_path / "g/odd/attributes.json", document)
    data_n5.write_twin(tmp_path / "even", ramp((8, 8)), (3, 2), RAW, "tensorstore")
    with pytest.raises(UnsupportedError, match=r"^g/odd: cannot be shown as zarr3: .*object"):
        _zarr3(tmp_path)
    tree = _zarr3(tmp_path, skip=True)
    assert [(p.path, p.skipped) for p in tree.problems()] == [("g/odd", True)]
    assert not any(name.startswith("g/odd") for name in walk(tree))


# --------------------------------------------------------------------------------- codecs that compress nothing


@given(
    st.binary(min_size=1, max_size=300)
    | st.sampled_from([0xFFFF, 0x10000, 128 << 10, (128 << 10) + 1, 300_000]).map(bytes),
    st.lists(st.sampled_from(sorted(STORED_ENCODERS)), max_size=3),
    st.sampled_from((1, 2, 8, 300)),
)
def test_what_is_stored_decodes_and_its_size_is_known(data: bytes, names: list[str], typesize: int) -> None:
    chain = [Codec(name, {"typesize": typesize} if name == "blosc" else {}) for name in names]
    encoded_bytes = store(chain, data)
    assert len(encoded_bytes) == stored_sizes(chain, np.array([len(data)], np.int64))[0]
    assert decode(chain, encoded_bytes) == data
