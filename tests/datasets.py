"""Datasets written by other people's writers, sharded and, by the same writer, as one file per chunk.

The unsharded twin is the oracle: a view of the sharded form must have the same files with the same bytes and the same
metadata documents. Nothing here uses shardfs. `ZARR3` and `PRECOMPUTED` name every variant for parametrised tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts
import z5py
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

from tests import handmade

Json = Any
Array = npt.NDArray[Any]
Client = Literal["tensorstore", "zarr3", "dask", "z5", "cloudvolume"]

ROOT = Path(__file__).resolve().parent.parent


def client_python(name: Literal["cv", "zarr2", "bcolz"]) -> Path:
    """The Python that has the libraries of `scripts/lock/NAME.in`. Skips the test if there is none.

    `scripts/test.sh` makes one virtualenv for each list, because they cannot share one. `SHARDFS_<NAME>_PYTHON` may say
    where it is.
    """
    variable = f"SHARDFS_{name.upper()}_PYTHON"
    python = Path(os.environ.get(variable) or ROOT / f".venv-{name}" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no {python} (see {variable})")
    return python


@dataclass(frozen=True)
class Dataset:
    name: str
    format: Literal["zarr3", "precomputed"]
    path: Path
    """The sharded form."""
    twin: Path
    """The same data written unsharded by the same library: what a view of `path` must look like."""
    arrays: Mapping[str, Array]
    """Per member (Zarr: path below `path`, "" is `path` itself; precomputed: scale number), as its writer reads it."""
    readers: frozenset[Client]
    """Clients that can read the unsharded form."""
    shard_readers: frozenset[Client]
    """Clients that can read the sharded form itself."""
    lossy: bool = False
    """Decoders differ: compare what a client reads from a view with what the same client reads from the twin."""
    fill_missing: bool = False
    """Chunks are missing: cloud-volume must be told to accept that."""
    foreign: frozenset[str] = frozenset()
    """Files in `path` that are no part of an array."""

    @property
    def array(self) -> Array:
        return next(iter(self.arrays.values()))

    def spec(self, path: Path | None = None, member: str | None = None) -> dict[str, Json]:
        """tensorstore's spec to open a member of this dataset at `path` (a mount of it, or its twin)."""
        root = self.path if path is None else path
        name = next(iter(self.arrays)) if member is None else member
        if self.format == "zarr3":
            return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root / name}/"}}
        store = {"driver": "file", "path": f"{root}/"}
        return {"driver": "neuroglancer_precomputed", "kvstore": store, "scale_index": int(name)}


Write = Callable[[Path], Dataset]
ZARR3: dict[str, Write] = {}
PRECOMPUTED: dict[str, Write] = {}


def read_tree(root: Path) -> dict[str, Json]:
    """Every file below `root`; metadata documents parsed, because writers differ in spaces and order."""
    files: dict[str, Json] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            data = path.read_bytes()
            files[str(path.relative_to(root))] = json.loads(data) if name in ("zarr.json", "info") else data
    return files


def same(one: Array, other: Array) -> bool:
    """Equal in shape and in every byte, NaN or not."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


# ------------------------------------------------------------------------------------------------ array data


def ramp(shape: Sequence[int], dtype: str = "uint16") -> Array:
    """No element is zero, so no chunk is all fill value."""
    count = prod(shape)
    if dtype == "bool":
        return np.ones(shape, bool)
    values = np.arange(count, dtype=np.uint64) % (120 if dtype.endswith("int8") else 30_000) + 1
    return values.astype(dtype).reshape(shape)


def islands(shape: Sequence[int], dtype: str = "uint16") -> Array:
    """Zero but for a block at the origin and the very last element."""
    data = np.zeros(shape, dtype)
    data[tuple(slice(0, 2) for _ in shape)] = 7
    data[tuple(-1 for _ in shape)] = 9
    return data


def zeros(shape: Sequence[int], dtype: str = "uint16") -> Array:
    return np.zeros(shape, dtype)


# --------------------------------------------------------------------------------------------------- Zarr v3

LITTLE: Json = {"name": "bytes", "configuration": {"endian": "little"}}
BIG: Json = {"name": "bytes", "configuration": {"endian": "big"}}
CRC: Json = {"name": "crc32c"}
GZIP: Json = {"name": "gzip", "configuration": {"level": 5}}
ZSTD: Json = {"name": "zstd", "configuration": {"level": 3, "checksum": True}}
BLOSC: Json = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 2, "blocksize": 0},
}


def transpose(*order: int) -> Json:
    return {"name": "transpose", "configuration": {"order": list(order)}}


def sharding(
    inner: Sequence[int],
    codecs: Sequence[Json] = (LITTLE,),
    index: Sequence[Json] = (LITTLE, CRC),
    location: str | None = None,
) -> Json:
    """The codec; `location` None leaves the member out, which means the end."""
    configuration: dict[str, Json] = {
        "chunk_shape": list(inner),
        "codecs": list(codecs),
        "index_codecs": list(index),
    }
    if location is not None:
        configuration["index_location"] = location
    return {"name": "sharding_indexed", "configuration": configuration}


@dataclass(frozen=True)
class _Zarr:
    """An array for tensorstore to write twice: in shards, and as chunks of `inner` (both in array axis order)."""

    shape: Sequence[int]
    shard: Sequence[int]
    inner: Sequence[int]
    codecs: Sequence[Json]
    plain: Sequence[Json] = (LITTLE,)
    """The codecs of the unsharded form."""
    dtype: str = "uint16"
    data: Callable[[Sequence[int], str], Array] = ramp
    members: Mapping[str, Json] = field(default_factory=dict)
    unread: frozenset[Client] = frozenset()
    """Clients that cannot read the unsharded form."""
    unread_sharded: frozenset[Client] = frozenset()
    """Clients that can read the unsharded form only."""


_ZARR_CLIENTS: frozenset[Client] = frozenset({"tensorstore", "zarr3", "dask", "z5"})
_Z5: frozenset[Client] = frozenset({"z5"})
_ZARR_PYTHON: frozenset[Client] = frozenset({"zarr3", "dask"})


def _write_tensorstore(path: Path, variant: _Zarr, chunk: Sequence[int], codecs: Sequence[Json]) -> Array:
    metadata = {
        "shape": list(variant.shape),
        "data_type": variant.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if variant.dtype == "bool" else 0,
        "codecs": list(codecs),
        **variant.members,
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    array = ts.open(spec, create=True).result()
    data = variant.data(variant.shape, variant.dtype)
    array.write(data).result()
    return data


def _zarr_pair(root: Path, name: str, variant: _Zarr) -> Dataset:
    path, twin = root / "sharded", root / "plain"
    data = _write_tensorstore(path, variant, variant.shard, variant.codecs)
    _write_tensorstore(twin, variant, variant.inner, variant.plain)
    readers = _ZARR_CLIENTS - variant.unread
    return Dataset(name, "zarr3", path, twin, {"": data}, readers, readers - variant.unread_sharded)


_FLAT = ((7, 10), (4, 6), (2, 3))  # a shape that is a multiple of neither shard nor inner chunk
_CUBE = ((7, 9, 10), (4, 6, 8))


def _keys(name: str, separator: str | None) -> Mapping[str, Json]:
    encoding: dict[str, Json] = {"name": name}
    if separator is not None:
        encoding["configuration"] = {"separator": separator}
    return {"chunk_key_encoding": encoding}


def _dtype(dtype: str, fill_value: Json, unread: frozenset[Client] = frozenset()) -> _Zarr:
    codecs = [{"name": "bytes"}] if np.dtype(dtype).itemsize == 1 else [LITTLE]
    members = {"fill_value": fill_value}
    return _Zarr(*_FLAT, [sharding((2, 3), codecs)], codecs, dtype, members=members, unread=unread)


_FILTERS = {
    "gzip": [LITTLE, GZIP],
    "zstd": [LITTLE, ZSTD],
    "blosc": [LITTLE, BLOSC],
    "crc32c": [LITTLE, CRC],
    "big_gzip_crc32c": [BIG, GZIP, CRC],
    "zstd_gzip": [LITTLE, ZSTD, GZIP],
}

# z5 knows no crc32c and only one compressor per chain (nor, below, rank 0, some data types, a NaN given in bits).
_NOT_IN_Z5 = {name: _Z5 for name in ("crc32c", "big_gzip_crc32c", "zstd_gzip")}

_VARIANTS: dict[str, _Zarr] = {
    "default": _Zarr(*_FLAT, [sharding((2, 3))]),
    "index_start": _Zarr(*_FLAT, [sharding((2, 3), location="start")], unread_sharded=_Z5),
    "index_end_said": _Zarr(*_FLAT, [sharding((2, 3), location="end")]),
    "index_big": _Zarr(*_FLAT, [sharding((2, 3), index=[BIG])], unread_sharded=_Z5),
    "index_big_crc_start": _Zarr(*_FLAT, [sharding((2, 3), index=[BIG, CRC], location="start")], unread_sharded=_Z5),
    "index_little": _Zarr(*_FLAT, [sharding((2, 3), index=[LITTLE])], unread_sharded=_Z5),
    **{
        f"inner_{name}": _Zarr(*_FLAT, [sharding((2, 3), chain)], chain, unread=_NOT_IN_Z5.get(name, frozenset()))
        for name, chain in _FILTERS.items()
    },
    # Axis order of the codec: (8, 4, 6) in chunks of (4, 2, 3), so (2, 3, 4) in the order of the array.
    "transpose_before": _Zarr(
        *_CUBE,
        (2, 3, 4),
        [transpose(2, 0, 1), sharding((4, 2, 3))],
        [transpose(2, 0, 1), LITTLE],
        unread=_Z5,
        unread_sharded=_ZARR_PYTHON,
    ),
    "transpose_before_twice": _Zarr(
        *_CUBE,
        (2, 3, 4),
        [transpose(2, 0, 1), transpose(1, 0, 2), sharding((2, 4, 3))],
        [transpose(2, 0, 1), transpose(1, 0, 2), LITTLE],
        unread=_Z5,
        unread_sharded=_ZARR_PYTHON,
    ),
    "transpose_inside": _Zarr(
        *_CUBE,
        (2, 3, 4),
        [sharding((2, 3, 4), [transpose(2, 0, 1), LITTLE])],
        [transpose(2, 0, 1), LITTLE],
        unread=_Z5,
    ),
    "nested": _Zarr(
        (17, 15), (8, 8), (2, 2), [sharding((4, 4), [sharding((2, 2), location="start")])], unread_sharded=_Z5
    ),
    "nested_three": _Zarr(
        (17, 15),
        (8, 8),
        (1, 2),
        [sharding((4, 8), [sharding((4, 4), [sharding((1, 2), [LITTLE, GZIP])], index=[BIG])])],
        [LITTLE, GZIP],
        unread_sharded=_Z5,
    ),
    # Outer: (8, 4, 6) in chunks of (4, 2, 3); transposed again: (2, 4, 3) in chunks of (1, 2, 3), so in the order of
    # the array (1, 3, 2).
    "nested_transposes": _Zarr(
        *_CUBE,
        (1, 3, 2),
        [
            transpose(2, 0, 1),
            sharding((4, 2, 3), [transpose(1, 0, 2), sharding((1, 2, 3), [transpose(2, 1, 0), LITTLE])]),
        ],
        [transpose(2, 0, 1), transpose(1, 0, 2), transpose(2, 1, 0), LITTLE],
        unread=_Z5,
        unread_sharded=_ZARR_PYTHON,
    ),
    "nested_sparse": _Zarr(
        (20, 20), (8, 8), (2, 2), [sharding((4, 4), [sharding((2, 2))])], data=islands, unread_sharded=_Z5
    ),
    "keys_default_slash": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("default", "/")),
    "keys_default_unsaid": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("default", None)),
    "keys_default_dot": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("default", ".")),
    "keys_v2_dot": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("v2", ".")),
    "keys_v2_unsaid": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("v2", None)),
    "keys_v2_slash": _Zarr(*_FLAT, [sharding((2, 3))], members=_keys("v2", "/")),
    "rank_0": _Zarr((), (), (), [sharding(())], unread=_Z5),
    "rank_0_v2": _Zarr((), (), (), [sharding(())], members=_keys("v2", "."), unread=_Z5),
    "rank_1": _Zarr((100,), (32,), (8,), [sharding((8,))]),
    "rank_4": _Zarr((3, 5, 4, 7), (2, 4, 4, 4), (1, 2, 2, 4), [sharding((1, 2, 2, 4), [LITTLE, GZIP])], [LITTLE, GZIP]),
    "empty_axis": _Zarr((0, 10), (4, 6), (2, 3), [sharding((2, 3))]),
    "shard_larger_than_array": _Zarr((3, 2), (16, 16), (2, 4), [sharding((2, 4))]),
    "one_chunk_per_shard": _Zarr((9, 9), (4, 4), (4, 4), [sharding((4, 4))]),
    # 20 inner chunks per axis over shards of 8: the keys c/10/... sort before c/2/...
    "two_digit_keys": _Zarr((40, 40), (16, 16), (2, 2), [sharding((2, 2))]),
    "sparse": _Zarr((20, 24), (8, 8), (2, 4), [sharding((2, 4))], data=islands),
    "all_fill": _Zarr((20, 24), (8, 8), (2, 4), [sharding((2, 4))], data=zeros),
    "dtype_bool": _dtype("bool", False, unread=_Z5),
    "dtype_int8": _dtype("int8", -1),
    "dtype_uint64": _dtype("uint64", 2**64 - 1),
    "dtype_int32": _dtype("int32", -(2**31)),
    "dtype_float16": _dtype("float16", "Infinity", unread=_Z5),
    "dtype_float32": _dtype("float32", "NaN"),
    "dtype_float64": _dtype("float64", "0x7ff8000000000001", unread=_Z5),
    "dtype_complex64": _dtype("complex64", [1.5, "-Infinity"], unread=_Z5),
    "members": _Zarr(
        *_FLAT,
        [sharding((2, 3))],
        members={
            "dimension_names": ["y", None],
            "attributes": {
                "big": 2**64 - 1,
                "text": "µm \u2028",
                "nested": {"z": [1, {"a": None}], "a": 1.5},
            },
            "storage_transformers": [],
            "example_extension": {"must_understand": False, "level": 3},
        },
    ),
}


def _register(registry: dict[str, Write], name: str) -> Callable[[Callable[[Path, str], Dataset]], None]:
    def keep(write: Callable[[Path, str], Dataset]) -> None:
        registry[name] = lambda root: write(root, name)

    return keep


for _key, _variant in _VARIANTS.items():
    _register(ZARR3, _key)(partial(_zarr_pair, variant=_variant))


# What tensorstore does not write: codecs after sharding. zarr-python warns that it reads whole shards then.


def _write_zarr_python(path: Path, chunk: Sequence[int], codecs: Sequence[Any]) -> Array:
    data = ramp((7, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = zarr.create(
            store=path,
            shape=data.shape,
            chunks=tuple(chunk),
            dtype=data.dtype,
            codecs=codecs,
            zarr_format=3,
            fill_value=0,
        )
        array[...] = data
    return data


def _zarr_python_pair(root: Path, name: str, codecs: Sequence[Any], plain: Sequence[Any]) -> Dataset:
    path, twin = root / "sharded", root / "plain"
    data = _write_zarr_python(path, (4, 6), codecs)
    _write_zarr_python(twin, (2, 3), plain)
    z5 = _Z5 if any(isinstance(codec, Crc32cCodec) for codec in plain) else frozenset()
    return Dataset(name, "zarr3", path, twin, {"": data}, _ZARR_CLIENTS - z5, _ZARR_PYTHON)


_PLAIN = ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec()])
_AFTER: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "gzip_after": ([_PLAIN, GzipCodec()], [BytesCodec()]),
    "crc32c_after": ([_PLAIN, Crc32cCodec()], [BytesCodec()]),
    "zstd_crc32c_after": ([_PLAIN, ZstdCodec(), Crc32cCodec()], [BytesCodec()]),
    # Not gzip inside: zarr-python writes the time into its header, so the chunks of the twin would be others.
    "gzip_after_zstd_inside": (
        [ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec(), ZstdCodec(level=1)]), GzipCodec()],
        [BytesCodec(), ZstdCodec(level=1)],
    ),
    "gzip_after_index_start": (
        [ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec()], index_location="start"), GzipCodec()],
        [BytesCodec()],
    ),
    # Each inner shard of 4x3 is compressed as a whole inside the outer shard.
    "nested_gzip_after_inner": (
        [ShardingCodec(chunk_shape=(4, 3), codecs=[_PLAIN, GzipCodec()])],
        [BytesCodec()],
    ),
    "nested_crc32c_after_both": (
        [ShardingCodec(chunk_shape=(4, 3), codecs=[_PLAIN, Crc32cCodec()]), Crc32cCodec()],
        [BytesCodec()],
    ),
}
for _key, (_codecs, _chain) in _AFTER.items():
    _register(ZARR3, _key)(partial(_zarr_python_pair, codecs=_codecs, plain=_chain))


@_register(ZARR3, "zarr_python")
def _zarr_python_default(root: Path, name: str) -> Dataset:
    """Its usual writer: zstd inside, chunks of a shard in Morton order."""
    path, twin, data = root / "sharded", root / "plain", ramp((30, 20, 10), "float32")
    for target, shards in ((path, (16, 16, 8)), (twin, None)):
        array = zarr.create_array(target, shape=data.shape, chunks=(4, 4, 4), shards=shards, dtype=data.dtype)
        array[...] = data
    return Dataset(name, "zarr3", path, twin, {"": data}, _ZARR_CLIENTS, _ZARR_CLIENTS)


@_register(ZARR3, "z5py")
def _z5py(root: Path, name: str) -> Dataset:
    data = ramp((20, 30), "uint32")
    for target, shards in ((root / "sharded", (8, 16)), (root / "plain", None)):
        # Given an empty directory z5py would start an N5 container.
        handmade.write_json(target / "zarr.json", handmade.group_document())
        file = z5py.File(target, mode="a", use_zarr_format=True, zarr_format=3)
        file.create_dataset("a", data=data, chunks=(4, 4), shards=shards, compression="gzip")
    clients = _ZARR_CLIENTS
    return Dataset(name, "zarr3", root / "sharded", root / "plain", {"a": data}, clients, clients)


@_register(ZARR3, "rectilinear")
def _rectilinear(root: Path, name: str) -> Dataset:
    """Sharded by hand; no writer here knows the grid. The view is a regular array, which tensorstore writes."""
    path, twin = root / "sharded", root / "plain"
    data = ramp((10, 12), "uint8")
    handmade.write_rectilinear(path, data.tobytes())
    variant = _Zarr((10, 12), (2, 3), (2, 3), [{"name": "bytes"}], dtype="uint8")
    _write_tensorstore(twin, variant, variant.inner, variant.codecs)
    # tensorstore leaves out what is the default; the document by hand says it.
    keys = {"name": "default", "configuration": {"separator": "/"}}
    _add_members(twin / "zarr.json", {"attributes": {}, "chunk_key_encoding": keys})
    return Dataset(name, "zarr3", path, twin, {"": data}, _ZARR_CLIENTS, frozenset())


# Groups


def _litter(root: Path, arrays: Sequence[str]) -> frozenset[str]:
    """Files of other people, which pass through: also inside an array and among its chunks."""
    files = {
        "README.md": b"# not metadata\n",
        ".hidden/notes": b"",
        "tables/cells.csv": b"id,x\n1,2\n",
        "tables/c/0/0": b"looks like a chunk, but no array is here",
    }
    for array in arrays:
        files[f"{array}/README"] = b"about this array\n"
        files[f"{array}/c/README"] = b"about its chunks\n"
        files[f"{array}/c/00/1"] = b"no chunk: keys have no leading zeros\n"
        files[f"{array}/c.0.0"] = b"no chunk: the separator of this array is another\n"
    handmade.write_files(root, files)
    return frozenset(files)


def _add_members(path: Path, members: Mapping[str, Json]) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **members}))


def _write_group(root: Path, sharded: bool) -> dict[str, Array]:
    """root: `raw` (never sharded), `labels/` with `cells` and `deep/er` (sharded), consolidated at two levels."""
    arrays = {
        "labels/cells": ramp((7, 10)),
        "labels/deep/er": ramp((20,), "uint32"),
        "raw": ramp((8, 8), "uint8"),
    }
    top = zarr.create_group(root, attributes={"title": "a group", "size": 2**64 - 1})
    labels = top.create_group("labels", attributes={"source": {"by": "hand"}})
    cells = labels.create_array(
        "cells",
        shape=(7, 10),
        chunks=(2, 3),
        shards=(4, 6) if sharded else None,
        dtype="uint16",
        attributes={"colour": "blue"},
        dimension_names=["y", "x"],
        fill_value=0,
    )
    deep = labels.create_group("deep").create_array(
        "er", shape=(20,), chunks=(2,), shards=(8,) if sharded else None, dtype="uint32", fill_value=0
    )
    raw = top.create_array("raw", shape=(8, 8), chunks=(4, 4), dtype="uint8", fill_value=0)
    for array, name in ((cells, "labels/cells"), (deep, "labels/deep/er"), (raw, "raw")):
        array[...] = arrays[name]
    return arrays


def _write_litter_group(root: Path, sharded: bool) -> tuple[dict[str, Array], frozenset[str]]:
    arrays = _write_group(root, sharded)
    _add_members(root / "labels/cells/zarr.json", {"example_extension": {"must_understand": False, "big": 2**63 + 1}})
    return arrays, _litter(root, ["labels/cells"])


@_register(ZARR3, "group")
def _group(root: Path, name: str) -> Dataset:
    arrays, foreign = _write_litter_group(root / "sharded", sharded=True)
    _write_litter_group(root / "plain", sharded=False)
    clients = _ZARR_CLIENTS
    return Dataset(name, "zarr3", root / "sharded", root / "plain", arrays, clients, clients, foreign=foreign)


def _write_consolidated(root: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for target, sharded in ((root / "sharded", True), (root / "plain", False)):
        arrays = _write_group(target, sharded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(str(target / "labels"))
            zarr.consolidate_metadata(str(target))
    return arrays


@_register(ZARR3, "group_consolidated")
def _group_consolidated(root: Path, name: str) -> Dataset:
    """Every array's document is in `labels/zarr.json` and again in the root's: all copies must be rewritten."""
    arrays = _write_consolidated(root)
    return Dataset(name, "zarr3", root / "sharded", root / "plain", arrays, _ZARR_CLIENTS, _ZARR_CLIENTS)


@_register(ZARR3, "group_members")
def _group_members(root: Path, name: str) -> Dataset:
    """Unknown members in groups and in consolidated documents; zarr-python opens no group that has any."""
    arrays = _write_consolidated(root)
    extension = {"example_extension": {"must_understand": False, "big": 2**64 - 1}}
    for target in (root / "sharded", root / "plain"):
        document = json.loads((target / "zarr.json").read_text())
        document["consolidated_metadata"]["metadata"]["labels/cells"].update(extension)
        (target / "zarr.json").write_text(json.dumps({**document, **extension}))
        _add_members(target / "labels/zarr.json", extension)
    clients = _ZARR_CLIENTS - {"zarr3"}
    return Dataset(name, "zarr3", root / "sharded", root / "plain", arrays, clients, clients)


@_register(ZARR3, "ome_pyramid")
def _ome_pyramid(root: Path, name: str) -> Dataset:
    """Three levels in one group; the last is smaller than its only shard."""
    full = ramp((40, 56), "uint8")
    arrays = {"0": full, "1": full[::2, ::2].copy(), "2": full[::16, ::32].copy()}
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "yx"]
    scales = [
        {"path": path, "coordinateTransformations": [{"type": "scale", "scale": [factor, factor]}]}
        for path, factor in (("0", 0.5), ("1", 1.0), ("2", 8.0))
    ]
    ome = {"version": "0.5", "multiscales": [{"name": "image", "axes": axes, "datasets": scales}]}
    for target, shards in ((root / "sharded", (32, 32)), (root / "plain", None)):
        group = zarr.create_group(target, attributes={"ome": ome})
        for path, data in arrays.items():
            group.create_array(
                path,
                shape=data.shape,
                chunks=(8, 8),
                shards=shards,
                dtype="uint8",
                dimension_names=["y", "x"],
            )[...] = data
    return Dataset(name, "zarr3", root / "sharded", root / "plain", arrays, _ZARR_CLIENTS, _ZARR_CLIENTS)


# ----------------------------------------------------------------------------------------------- precomputed


@dataclass(frozen=True)
class _Volume:
    """A volume for tensorstore to write twice, with and without `sharding`; its size is not a multiple of the chunk."""

    sharding: Json
    size: Sequence[int] = (10, 7, 5)
    chunk: Sequence[int] = (4, 4, 4)
    offset: Sequence[int] = (0, 0, 0)
    channels: int = 1
    dtype: str = "uint16"
    encoding: str = "raw"
    kind: str = "image"
    data: Callable[[Sequence[int], str], Array] = ramp
    scale: Mapping[str, Json] = field(default_factory=dict)
    resolution: Sequence[int] = (8, 8, 40)
    unread: frozenset[Client] = frozenset()
    unread_sharded: frozenset[Client] = frozenset()


_VOLUME_CLIENTS: frozenset[Client] = frozenset({"tensorstore", "cloudvolume"})
_CLOUDVOLUME: frozenset[Client] = frozenset({"cloudvolume"})


def _write_volume(path: Path, volume: _Volume, sharded: bool) -> Array:
    """Write one scale (the first creates the volume) and give back what tensorstore reads, jpeg being lossy."""
    scale = {
        "size": list(volume.size),
        "chunk_size": list(volume.chunk),
        "voxel_offset": list(volume.offset),
        "encoding": volume.encoding,
        "resolution": list(volume.resolution),
        **volume.scale,
    }
    if sharded:
        scale["sharding"] = volume.sharding
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {
            "data_type": volume.dtype,
            "num_channels": volume.channels,
            "type": volume.kind,
        },
        "scale_metadata": scale,
    }
    store = ts.open(spec, create=True).result()
    store.write(volume.data((*volume.size, volume.channels), volume.dtype)).result()
    return np.asarray(store.read().result())


def _volume_pair(root: Path, name: str, volume: _Volume) -> Dataset:
    path, twin = root / "sharded", root / "plain"
    data = _write_volume(path, volume, sharded=True)
    _write_volume(twin, volume, sharded=False)
    return Dataset(
        name,
        "precomputed",
        path,
        twin,
        {"0": data},
        _VOLUME_CLIENTS - volume.unread,
        _VOLUME_CLIENTS - volume.unread - volume.unread_sharded,
        lossy=volume.encoding == "jpeg",
        fill_missing=volume.data is not ramp,
    )


_spec = handmade.sharding
_MURMUR = "murmurhash3_x86_128"
_FINE = ((21, 13, 9), (2, 2, 2))  # 11 x 7 x 5 chunks

_VOLUMES: dict[str, _Volume] = {
    "identity": _Volume(_spec(preshift=1, minishard=1, shard=2)),
    "murmur": _Volume(_spec(hash=_MURMUR, minishard=1, shard=2)),
    "negative_offset": _Volume(_spec(minishard=1, shard=1), offset=(-3, 100, -2_000_000)),
    **{
        f"bits_{preshift}_{minishard}_{shard}_{hash_}": _Volume(
            _spec(preshift=preshift, hash=full, minishard=minishard, shard=shard),
            *_FINE,
            dtype="uint8",
            unread_sharded=_CLOUDVOLUME if preshift == 64 else frozenset(),
        )
        for hash_, full in (("identity", "identity"), ("murmur", _MURMUR))
        for preshift, minishard, shard in ((0, 0, 0), (0, 1, 3), (3, 0, 5), (2, 3, 2), (0, 3, 5), (64, 1, 1))
    },
    **{
        f"index_{index}_data_{data}": _Volume(
            _spec(preshift=1, minishard=2, shard=1, index=index, data=data),
            size=(17, 9, 10),
            offset=(-5, 3, 0),
        )
        for index in ("raw", "gzip")
        for data in ("raw", "gzip")
    },
    "channels_3": _Volume(_spec(minishard=1, shard=1, data="gzip"), channels=3),
    "uint8": _Volume(_spec(minishard=1, shard=1), dtype="uint8"),
    "uint64": _Volume(_spec(minishard=1, shard=1), dtype="uint64", kind="segmentation"),
    "float32": _Volume(_spec(minishard=1, shard=1, data="gzip"), dtype="float32", channels=2),
    "jpeg": _Volume(_spec(minishard=1, shard=1), dtype="uint8", encoding="jpeg", size=(40, 33, 9), chunk=(16, 16, 4)),
    "jpeg_3": _Volume(
        _spec(minishard=1, shard=1, data="gzip"),
        dtype="uint8",
        encoding="jpeg",
        channels=3,
        size=(40, 33, 9),
        chunk=(16, 16, 4),
        scale={"jpeg_quality": 90},
    ),
    # cloud-volume needs an extra for png.
    "png": _Volume(_spec(minishard=1, shard=1), dtype="uint8", encoding="png", unread=_CLOUDVOLUME),
    "png_16": _Volume(_spec(minishard=1, shard=1), encoding="png", unread=_CLOUDVOLUME),
    **{
        f"compressed_segmentation_{dtype}_{channels}": _Volume(
            _spec(preshift=1, minishard=1, shard=1, index="gzip", data="gzip"),
            size=(30, 20, 17),
            chunk=(16, 16, 16),
            offset=(-7, 0, 1),
            dtype=dtype,
            channels=channels,
            encoding="compressed_segmentation",
            kind="segmentation",
            scale={"compressed_segmentation_block_size": [8, 8, 8]},
        )
        for dtype, channels in (("uint64", 1), ("uint32", 1), ("uint32", 2))
    },
    "sparse": _Volume(_spec(minishard=1, shard=5), *_FINE, data=islands),
    "sparse_murmur": _Volume(_spec(hash=_MURMUR, minishard=3, shard=5, index="gzip"), *_FINE, data=islands),
    "all_zero": _Volume(_spec(minishard=1, shard=1), data=zeros),
    "one_chunk": _Volume(_spec(minishard=0, shard=0), size=(3, 2, 1)),
    # One axis has a single chunk and gives the code no bit.
    "flat": _Volume(_spec(minishard=1, shard=2), size=(37, 4, 11)),
}

for _key, _volume in _VOLUMES.items():
    _register(PRECOMPUTED, _key)(partial(_volume_pair, volume=_volume))


@_register(PRECOMPUTED, "two_scales")
def _two_scales(root: Path, name: str) -> Dataset:
    """Only the coarse scale is sharded, and other directories and files lie beside the scales."""
    fine = _Volume(None, offset=(-4, 2, 0))
    coarse = _Volume(
        _spec(minishard=1, shard=1),
        size=(5, 4, 5),
        chunk=(2, 2, 2),
        offset=(-2, 1, 0),
        resolution=(16, 16, 40),
    )
    arrays: dict[str, Array] = {}
    foreign: dict[str, bytes] = {
        "provenance": b'{"sources": []}',
        "mesh/info": b'{"@type": "neuroglancer_legacy_mesh"}',
        "mesh/7:0": b'{"fragments": ["7:0:0-4_0-4_0-4"]}',
        "mesh/7:0:0-4_0-4_0-4": b"fragment",
        "16_16_40/notes.txt": b"beside shards",
        "16_16_40/00000000.shard.txt": b"no shard",
    }
    for path, sharded in ((root / "sharded", True), (root / "plain", False)):
        _write_volume(path, fine, sharded=False)
        _write_volume(path, coarse, sharded)
        _add_members(path / "info", {"mesh": "mesh", "example_member": {"big": 2**64 - 1}})
        handmade.write_files(path, foreign)
    for index in range(2):
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{root}/plain/"},
            "scale_index": index,
        }
        arrays[str(index)] = np.asarray(ts.open(spec).result().read().result())
    return Dataset(
        name,
        "precomputed",
        root / "sharded",
        root / "plain",
        arrays,
        _VOLUME_CLIENTS,
        _VOLUME_CLIENTS,
        foreign=frozenset(foreign),
    )


@_register(PRECOMPUTED, "both_scales_sharded")
def _both_scales_sharded(root: Path, name: str) -> Dataset:
    """Two scales with unlike sharding, the second one below a key of two components."""
    fine = _Volume(_spec(minishard=2, shard=1, data="gzip"))
    coarse = _Volume(
        _spec(hash=_MURMUR, minishard=0, shard=3),
        size=(5, 4, 3),
        chunk=(2, 2, 2),
        resolution=(16, 16, 80),
        scale={"key": "coarse/16nm"},
    )
    arrays: dict[str, Array] = {}
    for path, sharded in ((root / "sharded", True), (root / "plain", False)):
        arrays = {str(number): _write_volume(path, volume, sharded) for number, volume in enumerate((fine, coarse))}
    return Dataset(name, "precomputed", root / "sharded", root / "plain", arrays, _VOLUME_CLIENTS, _VOLUME_CLIENTS)


@_register(PRECOMPUTED, "legacy_pair")
def _legacy_pair(root: Path, name: str) -> Dataset:
    """The obsolete `N.index` and `N.data`, which no current reader looks for."""
    dataset = _volume_pair(
        root, name, _Volume(_spec(minishard=2, shard=2, index="gzip", data="gzip"), size=(21, 13, 9))
    )
    for shard in dataset.path.rglob("*.shard"):
        handmade.split_legacy(shard, minishard_bits=2)
    return replace(dataset, shard_readers=frozenset())


def _write_cloudvolume(root: Path, name: str, hash_: str, encoding: str) -> Dataset:
    """cloud-volume puts all data first and all indices last, and compresses with its own gzip."""
    python = client_python("cv")
    data = ramp((40, 30, 20, 1), "uint32")
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / "data.npy", data)
    spec = _spec(hash=hash_, preshift=1, minishard=2, shard=2, index="gzip", data="gzip")
    arguments = [str(root), json.dumps(spec), encoding]
    subprocess.run([python, "-m", "tests.clients.write_cloudvolume", *arguments], cwd=ROOT, check=True, timeout=250)
    return Dataset(name, "precomputed", root / "sharded", root / "plain", {"0": data}, _VOLUME_CLIENTS, _VOLUME_CLIENTS)


for _encoding in ("raw", "compressed_segmentation"):
    for _short, _hash in (("identity", "identity"), ("murmur", _MURMUR)):
        _register(PRECOMPUTED, f"cloudvolume_{_encoding}_{_short}")(
            partial(_write_cloudvolume, hash_=_hash, encoding=_encoding)
        )
