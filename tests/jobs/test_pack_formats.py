"""`pack --format`, and `pack` of meshes, skeletons, annotations and bcolz: other libraries read what it makes."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import google_crc32c
import numcodecs
import numpy as np
import pytest
import tensorstore as ts
import z5py
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shardfs
from shardfs.cli import commands
from shardfs.jobs.shared_work import JobPart
from shardfs.model.errors import UnsupportedError
from tests import data_precomputed_ids
from tests.conftest import read_with, run_client
from tests.data_layouts import Written, arrays, equal
from tests.datasets import PRECOMPUTED, client_python, same
from tests.jobs.packing import pack, pack_in_place
from tests.jobs.test_pack import files, indexed_payloads, parsed, problems, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.data_precomputed_ids import IdDataset
    from tests.datasets import Dataset

    Data = np.ndarray[Any, Any]

DECODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "raw": bytes,
    "gzip": gzip.decompress,
    "bzip2": bz2.decompress,
    "xz": lzma.decompress,
    "zstd": lambda data: bytes(numcodecs.Zstd().decode(data)),
    "blosc": lambda data: bytes(numcodecs.Blosc().decode(data)),
}


def n5_blocks(shard: bytes, count: int) -> list[bytes | None]:
    """The blocks of a shard of N5 4.x, by slot: a reader of its own, from N5's `ShardIndex.java`."""
    index, checksum = shard[-16 * count - 4 : -4], shard[-4:]
    assert struct.pack("<I", google_crc32c.value(index)) == checksum
    entries = struct.unpack(f"<{2 * count}Q", index)
    ranges = zip(entries[::2], entries[1::2], strict=True)
    return [None if start == 2**64 - 1 else shard[start : start + size] for start, size in ranges]


def read_n5(path: Path) -> Data:
    """A sharded dataset of N5 4.x, with axes in C order. Uses no code of shardfs."""
    doc = json.loads((path / "attributes.json").read_bytes())
    (codec,) = doc["codecs"]
    inner = codec["configuration"]
    assert (codec["name"], inner["index_location"], inner["codecs"][0]["name"]) == (
        "sharding_indexed",
        "end",
        "n5bytes",
    )
    shape, shard_shape, block_shape = doc["dimensions"], doc["blockSize"], inner["chunk_shape"][::-1]
    per = [s // b for s, b in zip(shard_shape, block_shape, strict=True)]
    decode = DECODERS[inner["codecs"][1]["name"] if len(inner["codecs"]) > 1 else "raw"]
    out = np.zeros(shape[::-1], doc["dataType"])
    for at in np.ndindex(*(-(-n // s) for n, s in zip(shape, shard_shape, strict=True))):
        file = path.joinpath(*map(str, at))
        blocks = n5_blocks(file.read_bytes(), int(np.prod(per))) if file.exists() else []
        for slot, block in enumerate(blocks):
            if block is None:
                continue
            inside = np.unravel_index(slot, per, order="F")  # the first axis is the fastest
            mode, rank = struct.unpack(">HH", block[:4])
            size = struct.unpack(f">{rank}I", block[4 : 4 + 4 * rank])
            assert (mode, rank) == (0, len(shape))
            data = np.frombuffer(decode(block[4 + 4 * rank :]), np.dtype(doc["dataType"]).newbyteorder(">"))
            first = [(s * p + i) * b for s, p, i, b in zip(at, per, inside, block_shape, strict=True)]
            box = tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))[::-1]
            target = out[box]
            target[...] = data.reshape(size[::-1])[tuple(slice(n) for n in target.shape)]
    return out


def read_precomputed(path: Path, scale: int = 0) -> Data:
    """By tensorstore; axes z, y, x, or c, z, y, x if there are several channels."""
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "scale_index": scale,
    }
    array_values = np.asarray(ts.open(spec).result().read().result()).transpose(3, 2, 1, 0)
    return array_values if len(array_values) > 1 else array_values[0]


def read_zarr3(path: Path) -> Data:
    """By zarr-python, and by tensorstore, which must agree."""
    data = np.asarray(zarr.open_array(path, mode="r")[:])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    assert np.array_equal(data, np.asarray(ts.open(spec).result().read().result()))
    return data


READERS: Mapping[str, Callable[[Path], Data]] = {"zarr3": read_zarr3, "n5": read_n5}


def values(shape: tuple[int, ...] = (24, 16, 32), dtype: str = "u2") -> Data:
    """An array in which a slab of chunks of 8 is zero."""
    data = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
    data[8:16] = 0
    return data


def write_zarr(path: Path, data: Data, codecs: Any, version: Any = 3, **more: Any) -> None:
    compressor = {} if codecs == "auto" else {"compressors": codecs}
    array = zarr.create_array(
        path, shape=data.shape, chunks=(8,) * data.ndim, dtype=data.dtype, zarr_format=version, **compressor, **more
    )
    array[...] = data


def write_n5(path: Path, data: Data, compression: str) -> None:
    """By z5py, whose blocks at the edge are clipped."""
    with z5py.File(str(path), "w", use_zarr_format=False) as file:
        file.create_dataset("a", data=data, chunks=(8,) * data.ndim, compression=compression, n_threads=1)


ZSTD, GZIP, BLOSC = zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec(), zarr.codecs.BloscCodec(cname="lz4")


# ---- chunks that are copied


@pytest.mark.parametrize("codecs", [None, GZIP, ZSTD, BLOSC], ids=["raw", "gzip", "zstd", "blosc"])
@pytest.mark.parametrize("dtype", [">u2", "u1", ">f8"])
def test_zarr3_becomes_n5_with_the_same_payloads(codecs: Any, dtype: str, tmp_path: Path) -> None:
    data = values((20, 16, 30), dtype)
    serializer = zarr.codecs.BytesCodec(endian="big") if dtype != "u1" else "auto"
    write_zarr(tmp_path / "z", data.astype(dtype[-2:]), codecs, serializer=serializer)
    assert problems(pack(str(tmp_path / "z"), str(tmp_path / "n"), format="n5", chunks_per_shard=(2, 2, 2))) == []
    assert np.array_equal(read_n5(tmp_path / "n"), data)
    before = Counter(raw for name, raw in files(tmp_path / "z").items() if name != "zarr.json")
    shards = [raw for name, raw in files(tmp_path / "n").items() if name != "attributes.json"]
    blocks = Counter(block[16:] for shard in shards for block in n5_blocks(shard, 8) if block is not None)
    assert blocks == before


@pytest.mark.parametrize("compression", ["raw", "gzip", "bzip2", "xz", "blosc"])
def test_n5_becomes_zarr3_with_the_same_payloads(compression: str, tmp_path: Path) -> None:
    data = values(dtype="i4")
    write_n5(tmp_path / "n.n5", data, compression)
    assert problems(pack(str(tmp_path / "n.n5"), str(tmp_path / "z"), format="zarr3", chunks_per_shard=(2, 2, 2))) == []
    assert np.array_equal(zarr.open_array(tmp_path / "z" / "a", mode="r")[:], data)
    before = Counter(raw[16:] for name, raw in files(tmp_path / "n.n5").items() if not name.endswith("json"))
    shards = [raw for name, raw in files(tmp_path / "z").items() if "/c/" in name]
    assert sum((indexed_payloads(shard, 8) for shard in shards), Counter[bytes]()) == before


@pytest.mark.parametrize(("codecs", "encoding"), [(None, "raw"), (GZIP, "gzip")], ids=["raw", "gzip"])
def test_chunks_of_zarr_become_precomputed(codecs: Any, encoding: str, tmp_path: Path) -> None:
    data = values()
    write_zarr(tmp_path / "z", data, codecs)
    assert problems(pack(str(tmp_path / "z"), str(tmp_path / "p"), format="precomputed")) == []
    assert np.array_equal(read_precomputed(tmp_path / "p"), data)
    info = json.loads((tmp_path / "p" / "info").read_bytes())
    assert info["scales"][0]["sharding"]["data_encoding"] == encoding
    before = {raw for name, raw in files(tmp_path / "z").items() if name != "zarr.json"}
    shards = b"".join(raw for name, raw in files(tmp_path / "p").items() if name != "info")
    assert all(raw in shards for raw in before)


@pytest.mark.parametrize("name", sorted(PRECOMPUTED))
def test_volumes_become_images(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    sample = dataset("precomputed", name)
    scales = json.loads((sample.twin / "info").read_bytes())["scales"]
    for format in ("zarr3", "n5"):
        target = tmp_path / format
        try:
            assert problems(pack(str(sample.twin), str(target), format=format, transcode=True)) == []
        except UnsupportedError as e:
            assert "encod" in str(e)  # noqa: PT017 - images that this installation cannot decode
            continue
        mesh_files = {n: raw for n, raw in files(sample.twin).items() if n.startswith("mesh/")}
        assert {n: raw for n, raw in files(target).items() if n.startswith("mesh/")} == mesh_files
        for i, scale in enumerate(scales if "tensorstore" in sample.readers else ()):
            level = next(target / name for name in (f"s{i}", scale["key"]) if (target / name).exists())
            array_values = READERS[format](level)
            expected = read_precomputed(sample.twin, i)
            assert np.array_equal(array_values.reshape(expected.shape), expected)


@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(["u1", "i2", "u4", "f8"]),
    compression=st.sampled_from(["raw", "gzip", "bzip2", "xz", "blosc"]),
)
def test_any_n5_becomes_zarr3(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dtype: str, compression: str
) -> None:
    root = tmp_path_factory.mktemp("any")
    data = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
    write_n5(root / "n.n5", data, compression)
    assert problems(pack(str(root / "n.n5"), str(root / "z"), format="zarr3", transcode=True)) == []
    assert np.array_equal(np.asarray(zarr.open_array(root / "z" / "a", mode="r")[...]), data)


def test_images_keep_their_levels_and_get_the_names_of_the_format(tmp_path: Path) -> None:
    from tests.jobs.test_pack import AXES, LEVELS

    group = zarr.open_group(tmp_path / "i", mode="w", zarr_format=2)
    group.attrs["multiscales"] = [{"version": "0.4", "name": "x", "axes": AXES, "datasets": LEVELS}]
    levels = [values(), values()[::2, ::2, ::2].copy()]
    for i, data in enumerate(levels):
        write_zarr(tmp_path / "i" / str(i), data, None, 2)
    (tmp_path / "i" / "0" / "note.txt").write_text("by hand")
    (tmp_path / "i" / "1" / "info").write_text("not of precomputed")
    how: Any = {"transcode": True}
    assert problems(pack(str(tmp_path / "i"), str(tmp_path / "n"), format="n5", **how)) == []
    assert problems(pack(str(tmp_path / "i"), str(tmp_path / "p"), format="precomputed", **how)) == []
    for i, data in enumerate(levels):
        assert np.array_equal(read_n5(tmp_path / "n" / f"s{i}"), data)
        assert np.array_equal(read_precomputed(tmp_path / "p", i), data)
    for target in ("n", "p"):
        assert (tmp_path / target / "0" / "note.txt").read_text() == "by hand"
        assert (tmp_path / target / "1" / "info").read_text() == "not of precomputed"
        assert not any(name.rpartition("/")[2].startswith(".z") for name in files(tmp_path / target))


@pytest.mark.parametrize("format", ["", "n5"])
def test_arrays_that_are_not_named_change_their_format_only(format: str, tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    for name in ("a", "b"):
        write_zarr(tmp_path / "g" / name, values(), None, 2)
    how: Any = {"format": format, "arrays": ["b"], "transcode": True, "chunks_per_shard": (2, 2, 2)}
    assert problems(pack(str(tmp_path / "g"), str(tmp_path / "t"), **how)) == []
    if format:
        assert np.array_equal(read_n5(tmp_path / "t" / "b"), values())
        assert np.array_equal(z5py.File(str(tmp_path / "t"), "r", use_zarr_format=False)["a"][:], values())
    else:
        group: Any = zarr.open_group(tmp_path / "t", mode="r")
        assert (group["a"].shards, group["b"].shards) == (None, (16, 16, 16))
        assert np.array_equal(group["a"][:], values())
        assert np.array_equal(group["b"][:], values())


# ---- chunks that are transcoded


@pytest.mark.parametrize(
    ("source", "format", "array_name"),
    [("<u2", "n5", "all chunks"), ("n5", "zarr3", "chunks at the edge"), ("<u2", "precomputed", "all chunks")],
)
def test_chunks_are_decoded_only_on_request(source: str, format: str, array_name: str, tmp_path: Path) -> None:
    data = values((20, 15, 30))
    if source == "n5":
        write_n5(tmp_path / "s", data, "gzip")
    else:
        write_zarr(tmp_path / "s" / "a", data, ZSTD)
        zarr.open_group(tmp_path / "s", mode="a")
    target = tmp_path / "t"
    with pytest.raises(UnsupportedError, match=f"nothing was packed: a: {array_name}.* --transcode"):
        list(pack(str(tmp_path / "s"), str(target), format=format))
    assert not target.exists()
    assert problems(pack(str(tmp_path / "s"), str(target), format=format, transcode=True)) == []
    if format == "precomputed":
        assert np.array_equal(read_precomputed(target / "a"), data)
        info = json.loads((target / "a" / "info").read_bytes())
        assert info["scales"][0]["sharding"]["data_encoding"] == "gzip"
    else:
        assert np.array_equal(READERS[format](target / "a"), data)
    before, after = (sum(map(len, files(root).values())) for root in (tmp_path / "s", target))
    assert after < 1.5 * before  # chunks stay compressed


def test_a_fill_value_that_the_format_lacks(tmp_path: Path) -> None:
    data = values(dtype="u1") + np.uint8(1)
    write_zarr(tmp_path / "a", data, None, fill_value=1)
    with pytest.raises(UnsupportedError, match="8 chunks are missing"):
        list(pack(str(tmp_path / "a"), str(tmp_path / "n"), format="n5"))
    with zarr.config.set({"array.write_empty_chunks": True}):
        write_zarr(tmp_path / "b", data, None, fill_value=1)
    assert problems(pack(str(tmp_path / "b"), str(tmp_path / "m"), format="n5")) == []
    assert np.array_equal(read_n5(tmp_path / "m"), data)


def test_blocks_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    data = values()
    write_n5(tmp_path / "n.n5", data, "raw")
    block = tmp_path / "n.n5" / "a" / "0" / "0" / "0"
    sound = block.read_bytes()
    block.write_bytes(sound[:-16])  # as long as the chunk without its header
    how: Any = {"format": "zarr3", "chunks_per_shard": (1, 1, 1)}
    (problem,) = problems(pack(str(tmp_path / "n.n5"), str(tmp_path / "z"), **how))
    assert (problem.path, problem.damaged) == ("a/0/0/0", True)
    assert not (tmp_path / "z" / "zarr.json").exists()
    assert not (tmp_path / "z" / "a" / "c" / "0" / "0" / "0").exists()
    block.write_bytes(sound)
    assert problems(pack(str(tmp_path / "n.n5"), str(tmp_path / "z"), **how)) == []
    assert np.array_equal(read_zarr3(tmp_path / "z" / "a"), data)


def test_what_cannot_change_its_format_is_refused(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    write_zarr(tmp_path / "g" / "plain", values(dtype="u1"), None)
    group.create_array("sharded", shape=(64,), chunks=(8,), shards=(32,), dtype="u1")[:] = 1
    with pytest.raises(UnsupportedError, match="sharded: its chunks are in shards already"):
        list(pack(str(tmp_path / "g"), str(tmp_path / "t"), format="n5"))
    shutil.rmtree(tmp_path / "g" / "sharded")
    with pytest.raises(UnsupportedError, match="no unsharded array has its document there"):
        list(pack(str(tmp_path / "g"), str(tmp_path / "t"), format="n5", arrays=["nothing"]))
    write_zarr(tmp_path / "g" / "other", values(dtype="u1"), None)
    with pytest.raises(UnsupportedError, match=r"other: .* omit --array"):
        list(pack(str(tmp_path / "g"), str(tmp_path / "t"), format="precomputed", arrays=["plain"]))
    group.create_array("times", shape=(8,), chunks=(8,), dtype="M8[s]")
    with pytest.raises(UnsupportedError, match="times: "):
        list(pack(str(tmp_path / "g"), str(tmp_path / "t"), format="n5"))
    assert not (tmp_path / "t").exists()


def test_an_array_that_two_formats_describe_is_refused(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", values(dtype="u1"), None)
    (tmp_path / "a" / ".zarray").write_text(json.dumps({"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|u1"}))
    with pytest.raises(UnsupportedError, match="has documents of Zarr v2, too"):
        list(pack(str(tmp_path / "a"), str(tmp_path / "t"), format="n5"))


def test_the_command_has_the_options(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", values(), ZSTD)
    command = ["pack", str(tmp_path / "a"), str(tmp_path / "t"), "--format", "n5"]
    with pytest.raises(UnsupportedError, match="add --transcode"):
        CliRunner().invoke(commands, command, standalone_mode=False, catch_exceptions=False)
    completed = CliRunner().invoke(commands, [*command, "--transcode", "--jobs", "2"], standalone_mode=False)
    assert completed.return_value == 0
    assert np.array_equal(read_n5(tmp_path / "t"), values())


# ---- bcolz


@pytest.mark.parametrize("source", ["zarr3", "bcolz"])
def test_superchunks(source: str, tmp_path: Path) -> None:
    data = np.arange(103, dtype="i4")
    write_zarr(tmp_path / "z", data, BLOSC)
    plain = tmp_path / "z"
    assert problems(pack(str(plain), str(tmp_path / "s"), format="bcolz", chunks_per_shard=(5,))) == []
    if source == "bcolz":  # from the plain files that a mount shows
        for name, raw in shown(tmp_path / "s").items():
            (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "b" / name).write_bytes(raw)
        plain, before = tmp_path / "b", files(tmp_path / "b")
        shutil.rmtree(tmp_path / "s")
        assert problems(pack(str(plain), str(tmp_path / "s"), chunks_per_shard=(5,))) == []
        assert shown(tmp_path / "s").keys() == before.keys()
        assert all(raw == before[name] for name, raw in shown(tmp_path / "s").items() if name.startswith("data"))
    assert sorted(os.listdir(tmp_path / "s" / "data")) == ["__1__.bin", "__2__.bin", "__3__.bin"]
    for name, raw in shown(tmp_path / "s").items():
        (tmp_path / "again" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "again" / name).write_bytes(raw)
    run_client("read_bcolz", tmp_path / "again", tmp_path / "out.npy", python=client_python("bcolz"))
    assert np.array_equal(np.load(tmp_path / "out.npy"), data)


# ---- meshes, skeletons, annotations


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(data_precomputed_ids.DATASETS))
def test_objects_with_ids_keep_every_file(name: str, id_dataset: Callable[[str], IdDataset], tmp_path: Path) -> None:
    sample = id_dataset(name)
    target = tmp_path / "target"
    assert problems(pack(str(sample.twin), str(target))) == []
    assert parsed(shown(target)) == parsed(files(sample.twin))
    assert any(name.endswith(".shard") for name in files(target))
    if sample.reader is not None:
        client, argument = sample.reader
        for path, out in ((sample.twin, "before.npy"), (target, "after.npy")):
            run_client(client, path, tmp_path / out, argument, python=client_python("cv"))
        assert np.array_equal(*(np.load(tmp_path / out) for out in ("before.npy", "after.npy")))


def skeletons(path: Path, ids: list[int], suffix: str = "") -> dict[str, bytes]:
    """A directory of skeletons, perhaps compressed; returns the content by id."""
    path.mkdir(parents=True)
    (path / "info").write_text(json.dumps({"@type": "neuroglancer_skeletons"}))
    bytes_by_id = {str(number): b"skeleton of %d" % number for number in ids}
    for name, data in bytes_by_id.items():
        (path / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    return bytes_by_id


def test_the_number_of_ids_decides_the_number_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfs.jobs.pack_plan.IDS_PER_SHARD", 16)
    monkeypatch.setattr("shardfs.jobs.pack_plan.IDS_PER_MINISHARD", 4)
    bytes_by_id = skeletons(tmp_path / "s", list(range(100)))
    assert problems(pack(str(tmp_path / "s"), str(tmp_path / "t"))) == []
    sharding = json.loads((tmp_path / "t" / "info").read_bytes())["sharding"]
    assert (sharding["shard_bits"], sharding["minishard_bits"]) == (3, 2)
    assert {name: raw for name, raw in shown(tmp_path / "t").items() if name != "info"} == bytes_by_id
    (tmp_path / "s" / "100").write_bytes(b"one more")
    for number in range(101, 200):
        (tmp_path / "s" / str(number)).write_bytes(b"one more")
    with pytest.raises(FileExistsError):
        list(pack(str(tmp_path / "s"), str(tmp_path / "t")))


def test_all_workers_and_parts_use_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_by_id = skeletons(tmp_path / "s", list(range(20000, 40000)))
    for name, how in (("a", {}), ("b", {"workers": 2})):
        assert problems(pack(str(tmp_path / "s"), str(tmp_path / name), **how)) == []  # type: ignore[arg-type]
    for number in (1, 3, 2):
        assert problems(pack(str(tmp_path / "s"), str(tmp_path / "c"), part=JobPart(number, 3))) == []
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c")
    assert len(files(tmp_path / "a")) == 1 + 4
    assert {name: raw for name, raw in shown(tmp_path / "a").items() if name != "info"} == bytes_by_id


def test_a_mesh_with_one_of_its_files_is_named(tmp_path: Path) -> None:
    sample = data_precomputed_ids.DATASETS["nested"](tmp_path)
    mesh = sample.twin / "meshes" / "fine" / "7"
    raw = mesh.read_bytes()
    mesh.unlink()
    (problem,) = problems(pack(str(sample.twin), str(tmp_path / "t")))
    assert (problem.path, problem.damaged) == ("meshes/fine/7", True)
    mesh.write_bytes(raw[:-1])
    problem_list = problems(pack(str(sample.twin), str(tmp_path / "u")))
    assert [p.damaged for p in problem_list] == [True]
    assert "should have 14 bytes" in problem_list[0].why
    assert not (tmp_path / "u" / "info").exists()


# ---- compressed files of CloudVolume


@pytest.mark.parametrize("kind", ["volume", "skeletons"])
def test_gzip_files_become_gzip_chunks(kind: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    plain, target = tmp_path / "x", tmp_path / "t"
    sample = dataset("precomputed", next(n for n in sorted(PRECOMPUTED) if "raw" in n))
    if kind == "volume":
        shutil.copytree(sample.twin, plain)
        for file in [p for p in plain.rglob("*") if p.is_file() and p.name != "info"]:
            Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes(), 1))
            file.unlink()
    else:
        skeletons(plain, [1, 2, 3], ".gz")
    payloads = {raw for name, raw in files(plain).items() if name != "info"}
    assert problems(pack(str(plain), str(target))) == []
    source_bytes = b"".join(raw for name, raw in files(target).items() if name != "info")
    assert all(payload in source_bytes for payload in payloads)
    expected = {n.removesuffix(".gz"): gzip.decompress(raw) for n, raw in files(plain).items() if n.endswith(".gz")}
    assert {name: raw for name, raw in shown(target).items() if name != "info"} == expected
    if kind == "volume":
        assert same(read_with("tensorstore", sample, target), sample.array)


@pytest.mark.interop
def test_a_segmentation_of_cloudvolume_is_packed_as_it_is_written(tmp_path: Path) -> None:
    plain, target, python = tmp_path / "plain", tmp_path / "target", client_python("cv")
    run_client("segmentation", "write", plain, python=python)
    assert sum(name.endswith(".gz") for name in files(plain)) > 20
    assert problems(pack(str(plain), str(target))) == []
    assert {p.name for p in target.rglob("*.shard")} == {"0.shard"}
    assert {Path(name).parent.name for name in files(target) if name.endswith(".gz")} == {"mesh"}
    run_client("segmentation", "compare", plain, target, python=python)


def test_gzip_files_among_others_are_named(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "x")
    chunk = max(p for p in source.rglob("*") if p.is_file() and p.name != "info")
    chunk.rename(f"{chunk}.gz")
    problem_list = problems(pack(str(source), str(tmp_path / "t")))
    assert any(p.damaged and "compress all of them with gzip, or none" in p.why for p in problem_list)


def test_files_in_other_compressions_are_refused(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "x")
    for file in [p for p in source.rglob("*") if p.is_file() and p.name != "info"]:
        file.rename(f"{file}.br")
    with pytest.raises(
        UnsupportedError, match=r"nothing was packed: .*\.br is compressed, and shards can have gzip only"
    ):
        list(pack(str(source), str(tmp_path / "t")))
    assert not (tmp_path / "t").exists()


def test_arrays_of_unknown_data_types_are_named(tmp_path: Path) -> None:
    root, why = zarr.create_group(tmp_path / "a"), "data type 'numpy.datetime64'"
    root.create_array("times", shape=(9,), chunks=(2,), dtype="M8[s]")[:] = np.arange(9)
    for chosen in ([], ["times"]):
        with pytest.raises(UnsupportedError, match=f"times: zarr.json: {why}"):
            list(pack(str(tmp_path / "a"), str(tmp_path / "t"), arrays=chosen))
    root.create_array("numbers", shape=(9,), chunks=(2,), dtype="u2")[:] = np.arange(9)
    (problem,) = problems(pack(str(tmp_path / "a"), str(tmp_path / "t")))
    assert (problem.path, problem.damaged) == ("times", False)
    assert problem.why.startswith(f"was not packed, and keeps its chunk files: zarr.json: {why}")
    assert (tmp_path / "t/times/c/1").read_bytes() == (tmp_path / "a/times/c/1").read_bytes()
    assert same(np.asarray(zarr.open_array(tmp_path / "t/times", mode="r")[:]), np.arange(9).astype("M8[s]"))
    assert problems(pack(str(tmp_path / "a"), str(tmp_path / "n"), arrays=["numbers"])) == []


# ---- bad input


def test_damaged_chunks_are_packed_unchanged_and_named(tmp_path: Path) -> None:
    for name, codecs in (("raw", None), ("blosc", BLOSC), ("zstd", ZSTD), ("gzip", GZIP)):
        write_zarr(tmp_path / "g" / name, values(dtype="u1") + np.uint8(1), codecs)
        chunk = tmp_path / "g" / name / "c" / "0" / "0" / "0"
        chunk.write_bytes(chunk.read_bytes()[:-1] if name in ("raw", "blosc") else b"something else")
    zarr.open_group(tmp_path / "g", mode="a")
    problem_list = problems(pack(str(tmp_path / "g"), str(tmp_path / "t")))
    assert sorted((p.path, p.damaged) for p in problem_list) == [
        (f"{name}/c/0/0/0", False) for name in ("blosc", "gzip", "raw", "zstd")
    ]
    assert parsed(shown(tmp_path / "t")) == parsed(files(tmp_path / "g"))


def test_links_and_unreadable_files(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", values(dtype="u1"), None)
    source_bytes = tmp_path / "a" / "c" / "0" / "0"
    (source_bytes / "0").rename(tmp_path / "a" / "elsewhere")
    (source_bytes / "0").symlink_to("../../../elsewhere")
    (source_bytes / "1").rename(tmp_path / "outside")
    (source_bytes / "1").symlink_to(tmp_path / "outside")
    (tmp_path / "a" / "c" / "0" / "1" / "2").unlink()
    (tmp_path / "a" / "c" / "0" / "1" / "2").symlink_to("nowhere")
    how: Any = {"chunks_per_shard": (1, 1, 1)}
    problem_list = problems(pack(str(tmp_path / "a"), str(tmp_path / "t"), **how))
    assert all(p.damaged for p in problem_list)
    assert [any(word in p.why for p in problem_list) for word in ("leads out of the source", "leads nowhere")] == [
        True,
        True,
    ]
    assert len(problem_list) == 2
    (source_bytes / "1").unlink()
    shutil.copy(tmp_path / "outside", source_bytes / "1")
    (tmp_path / "a" / "c" / "0" / "1" / "2").unlink()
    shutil.copy(tmp_path / "outside", tmp_path / "a" / "c" / "0" / "1" / "2")
    assert problems(pack(str(tmp_path / "a"), str(tmp_path / "t"), **how)) == []
    assert parsed(shown(tmp_path / "t")) == parsed(files(tmp_path / "a"))


@pytest.mark.parametrize("name", ["nested", "bcolz"])
def test_unpack_is_the_inverse(name: str, tmp_path: Path) -> None:
    if name == "nested":
        plain = data_precomputed_ids.DATASETS[name](tmp_path).twin
    else:
        write_zarr(tmp_path / "z", np.arange(103, dtype="i4"), BLOSC)
        plain = tmp_path / "plain"
        shardfs.unpack(tmp_path / "z", plain, layout="bcolz")
    shardfs.pack(plain, tmp_path / "packed")
    shardfs.unpack(tmp_path / "packed", tmp_path / "again")
    assert files(tmp_path / "packed").keys() != files(plain).keys()
    assert as_json(files(tmp_path / "again")) == as_json(files(plain))


def as_json(tree_files: dict[str, bytes]) -> dict[str, Any]:
    """The files, with all documents as JSON."""
    return {name: json.loads(raw) if raw.startswith(b"{") else raw for name, raw in tree_files.items()}


# ---- in place


def test_in_place_only_files_that_stay_unchanged_are_packed(tmp_path: Path) -> None:
    sample = data_precomputed_ids.DATASETS["nested"](tmp_path)
    before = files(sample.twin)
    assert problems(pack_in_place(str(sample.twin))) == []
    after = files(sample.twin)
    assert after.keys() - before.keys() == {"s/0.shard"}
    assert all(
        after[name] == raw for name, raw in before.items() if name not in ("info", *after.keys() ^ before.keys())
    )
    write_zarr(tmp_path / "z", np.arange(103, dtype="i4"), BLOSC)
    list(pack(str(tmp_path / "z"), str(tmp_path / "s"), format="bcolz"))
    for name, raw in shown(tmp_path / "s").items():
        (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / name).write_bytes(raw)
    with pytest.raises(UnsupportedError, match="a job in place does not do"):
        list(pack_in_place(str(tmp_path / "b")))


def test_gzip_files_are_not_packed_in_place(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    source = shutil.copytree(dataset("precomputed", next(iter(PRECOMPUTED))).twin, tmp_path / "x")
    for file in [p for p in source.rglob("*") if p.is_file() and p.name != "info"]:
        file.rename(f"{file}.gz")
    before = files(source)
    with pytest.raises(UnsupportedError, match="a job in place packs uncompressed ones only"):
        list(pack_in_place(str(source)))
    assert files(source) == before


# ---- any array


@given(written=arrays(), format=st.sampled_from(["n5", "precomputed", "bcolz"]), per=st.integers(1, 3))
def test_any_array_is_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory, written: Written, format: str, per: int
) -> None:
    root = tmp_path_factory.mktemp("any")
    replace(written, shard=()).write(root / "a")
    data = written.data.astype("u1") if written.data.dtype == bool else written.data
    how: Any = {"format": format, "chunks_per_shard": (per,) * 4}
    try:
        assert problems(pack(str(root / "a"), str(root / "t"), **how, transcode=True)) == []
    except UnsupportedError:
        return
    if format == "n5":
        assert np.array_equal(read_n5(root / "t"), data, equal_nan=data.dtype.kind == "f")
    elif format == "precomputed":
        volume = read_precomputed(root / "t")
        assert np.array_equal(volume.reshape(data.shape), data, equal_nan=data.dtype.kind == "f")
    else:
        assert_same_rows(root, written.data)
    with suppress(UnsupportedError):  # without transcoding, the result is the same or none
        list(pack(str(root / "a"), str(root / "u"), **how))
        assert files(root / "t") == files(root / "u")


def assert_same_rows(root: Path, data: Data) -> None:
    """Compare superchunks with the data, as the layout `zarr3` shows them: no other program reads superchunks."""
    shown_files = fsspec.filesystem("shardfs", source=str(root / "t"), layout="zarr3", skip_instance_cache=True)
    again = root / "again"
    for name in shown_files.find(""):
        (again / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (again / name.lstrip("/")).write_bytes(shown_files.cat_file(name))
    assert equal(np.asarray(zarr.open_array(again, mode="r")[:]), data)


def test_an_image_of_04_is_valid_in_05(tmp_path: Path) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="ome-zarr-models is not installed")
    from tests.jobs.test_pack import AXES, LEVELS

    for path in ("", "labels/seg"):
        group = zarr.open_group(tmp_path / "i" / path, mode="w", zarr_format=2)
        group.attrs["multiscales"] = [{"version": "0.4", "name": "x", "axes": AXES, "datasets": LEVELS}]
        for level in ("0", "1"):
            write_zarr(tmp_path / "i" / path / level, values(dtype="u4"), "auto", 2)
    zarr.open_group(tmp_path / "i" / "labels", mode="a", zarr_format=2).attrs["labels"] = ["seg"]
    zarr.open_group(tmp_path / "i/labels/seg", mode="a", zarr_format=2).attrs["image-label"] = {"version": "0.4"}
    assert problems(pack(str(tmp_path / "i"), str(tmp_path / "t"))) == []
    for path, kind in (("", "Image"), ("labels", "Labels"), ("labels/seg", "ImageLabel")):
        array_values = models.open_ome_zarr(zarr.open_group(tmp_path / "t" / path, mode="r"))
        assert (type(array_values).__module__.split(".")[1], type(array_values).__name__) == ("v05", kind)


@pytest.mark.interop
@pytest.mark.parametrize("codecs", [None, GZIP], ids=["raw", "gzip"])
def test_cloudvolume_reads_what_was_zarr(codecs: Any, tmp_path: Path) -> None:
    data = values((20, 15, 30))
    write_zarr(tmp_path / "z", data, codecs)
    target = tmp_path / "p"
    assert problems(pack(str(tmp_path / "z"), str(target), format="precomputed", transcode=True)) == []
    how = ["--mip", "0", "--fill-missing"]
    run_client("read_cloudvolume", target, tmp_path / "out.npy", *how, python=client_python("cv"))
    assert np.array_equal(np.load(tmp_path / "out.npy")[..., 0].T, data)
