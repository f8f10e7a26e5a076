"""Meshes, skeletons and annotations written by other people's writers, sharded and as one file for each id.

As in `datasets`, the unsharded twin is the oracle, and nothing here uses shardfs. `DATASETS` names every variant.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorstore as ts

from tests import handmade, handmade_ids
from tests.clients.write_igneous import LABELS
from tests.datasets import ROOT, client_python

Json = Any
_MURMUR = "murmurhash3_x86_128"
_spec = handmade.sharding


@dataclass(frozen=True)
class IdDataset:
    name: str
    path: Path
    """The sharded form."""
    twin: Path
    """What a view of `path` must look like."""
    reader: tuple[str, str] | None = None
    """The client that reads both forms, and its argument."""


Write = Callable[[Path], IdDataset]
DATASETS: dict[str, Write] = {}


def write_shards(path: Path, spec: Json, values: Mapping[int, bytes]) -> None:
    """By tensorstore, which compresses as `spec` says."""
    base = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": spec}).result()
    with ts.Transaction() as transaction:
        for number, data in values.items():
            store.with_transaction(transaction)[number.to_bytes(8, "big")] = data


def _client(script: str, *arguments: str | Path) -> None:
    subprocess.run(
        [client_python("cv"), "-m", f"tests.clients.{script}", *arguments], cwd=ROOT, check=True, timeout=250
    )


# ---- meshes and skeletons: made by igneous, sharded by cloud-volume ----


def _igneous(root: Path, name: str, meshes: Json, skeletons: Json) -> IdDataset:
    root.mkdir(parents=True, exist_ok=True)
    _client("write_igneous", root, json.dumps(meshes), json.dumps(skeletons))
    return IdDataset(name, root / "sharded", root / "plain", ("read_cloudvolume_ids", json.dumps(LABELS)))


_MESHES: dict[str, tuple[Json, Json]] = {
    "murmur": (
        _spec(hash=_MURMUR, minishard=1, shard=2, index="gzip"),
        _spec(hash=_MURMUR, minishard=2, shard=1, index="gzip", data="gzip"),
    ),
    "identity": (_spec(preshift=1, minishard=2, shard=1), _spec(minishard=0, shard=0)),
    "meshes_only": (_spec(hash=_MURMUR, minishard=0, shard=5), None),
    "skeletons_only": (None, _spec(preshift=3, minishard=1, shard=1, index="gzip")),
}
for _name, (_mesh_spec, _skeleton_spec) in _MESHES.items():
    DATASETS[f"igneous_{_name}"] = partial(
        _igneous, name=f"igneous_{_name}", meshes=_mesh_spec, skeletons=_skeleton_spec
    )


# ---- annotations: written by neuroglancer, each index sharded by tensorstore ----


def _ids(path: Path) -> dict[int, bytes]:
    return {int(file.name): file.read_bytes() for file in path.iterdir()}


def _cells(path: Path, grid: tuple[int, ...]) -> dict[int, bytes]:
    return {handmade.morton(tuple(map(int, f.name.split("_"))), grid): f.read_bytes() for f in path.iterdir()}


def _annotations(root: Path, name: str, kind: str, specs: Mapping[str, Json]) -> IdDataset:
    """`specs`: for the directory of each index that is to be sharded."""
    _client("write_neuroglancer", root / "written")
    twin, path = root / "written" / kind, root / "sharded"
    info = json.loads((twin / "info").read_text())
    indices = [info["by_id"], *info["relationships"], *info["spatial"]]
    for index in indices:
        key = index["key"]
        (path / key).mkdir(parents=True)
        if key not in specs:
            shutil.copytree(twin / key, path / key, dirs_exist_ok=True)
            continue
        index["sharding"] = specs[key]
        values = _cells(twin / key, tuple(index["grid_shape"])) if "grid_shape" in index else _ids(twin / key)
        write_shards(path / key, specs[key], values)
    (path / "info").write_text(json.dumps(info))
    names = {i["key"]: sorted(file.name for file in (twin / i["key"]).iterdir()) for i in indices}
    return IdDataset(name, path, twin, ("read_neuroglancer", json.dumps(names)))


_ALL_LINES = {
    "by_id": _spec(hash=_MURMUR, minishard=2, shard=1, index="gzip", data="gzip"),
    "rel_pre": _spec(preshift=1, minishard=1, shard=2),
    "rel_post": _spec(hash=_MURMUR, minishard=0, shard=0, data="gzip"),
    "spatial0": _spec(minishard=0, shard=0, index="gzip"),
}
_ALL_POINTS = {
    "by_id": _spec(minishard=1, shard=3, index="gzip"),
    "spatial0": _spec(hash=_MURMUR, minishard=1, shard=1),
    "spatial1": _spec(preshift=2, minishard=1, shard=4, data="gzip"),
}
_ANNOTATIONS = {
    "lines": ("lines", _ALL_LINES),
    "lines_by_id_only": ("lines", {"by_id": _ALL_LINES["by_id"]}),
    "lines_a_relationship_only": ("lines", {"rel_post": _ALL_LINES["rel_post"]}),
    "points": ("points", _ALL_POINTS),
    "points_a_level_only": ("points", {"spatial1": _ALL_POINTS["spatial1"]}),
}
for _name, (_kind, _specs) in _ANNOTATIONS.items():
    DATASETS[f"neuroglancer_{_name}"] = partial(_annotations, name=f"neuroglancer_{_name}", kind=_kind, specs=_specs)


# ---- any bytes by id: tensorstore, every combination of hash, bits and encodings ----

IDS = (0, 1, 2, 9, 10, 12345, 2**32, 720575940621826310, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1)


def _skeletons(root: Path, name: str, spec: Json) -> IdDataset:
    values = {number: b"skeleton of %d" % number * (i % 4) for i, number in enumerate(IDS)}
    info = {"@type": "neuroglancer_skeletons", "transform": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0], "big": 2**64 - 1}
    foreign = {"info.txt": b"about it", "0.labels": b"[1]", "00.shard": b"no shard", "0-9_0-9_0-9.spatial": b"{}"}
    handmade.write_files(root / "plain", {**foreign, **{str(number): data for number, data in values.items()}})
    handmade.write_json(root / "plain/info", info)
    handmade.write_files(root / "sharded", foreign)
    handmade.write_json(root / "sharded/info", {**info, "sharding": spec})
    write_shards(root / "sharded", spec, values)
    return IdDataset(name, root / "sharded", root / "plain")


for _hash in ("identity", _MURMUR):
    for _index, _data, _bits in (
        ("raw", "raw", (0, 0, 0)),
        ("gzip", "raw", (3, 2, 3)),
        ("raw", "gzip", (0, 3, 1)),
        ("gzip", "gzip", (1, 1, 2)),
    ):
        _name = f"tensorstore_{_hash[:6]}_{_index}_{_data}"
        _preshift, _minishard, _shard = _bits
        _sharding = _spec(hash=_hash, preshift=_preshift, minishard=_minishard, shard=_shard, index=_index, data=_data)
        DATASETS[_name] = partial(_skeletons, name=_name, spec=_sharding)


# ---- a volume with everything below it, put together by hand ----


def _info(directory: Path, info: Json, form: str, spec: Json) -> None:
    handmade.write_json(directory / "info", {**info, "sharding": spec} if form == "sharded" else info)


def _nested(root: Path, name: str) -> IdDataset:
    """Directories that the volume names, some of two components, beside ones that nobody names."""
    fragments, manifest = b"fragments of 7", handmade_ids.manifest([[9, 5]])
    spec = _spec(minishard=1, shard=1)  # ids 0 and 1 go to 0.shard, 7 to 1.shard; odd ones to the second minishard
    foreign = {
        "old/info": b'{"@type": "neuroglancer_legacy_mesh"}',
        "old/7:0": b'{"fragments": ["a"]}',
        "old/a": b"fragment",
        "older/7:0": b'{"fragments": ["a"]}',
        "props/info": b'{"@type": "neuroglancer_segment_properties", "inline": {"ids": ["7"], "properties": []}}',
        "plain/info": b'{"@type": "neuroglancer_skeletons"}',
        "plain/7": b"a skeleton",
    }
    volume = {
        **handmade.volume_info((2, 1, 1), (1, 1, 1), spec),
        "mesh": "meshes/fine",
        "skeletons": "deep/er/skeletons",
        "segment_properties": "props",
    }
    scale = {k: v for k, v in volume["scales"][0].items() if k != "sharding"}
    voxels = [[handmade.Entry(0, b"a")], [handmade.Entry(1, b"b")]]
    for form in ("sharded", "plain"):
        handmade.write_files(root / form, foreign)
        _info(root / form / "meshes/fine", handmade_ids.MESHES, form, spec)
        for directory in ("deep/er/skeletons", "s/unnamed"):
            _info(root / form / directory, handmade_ids.SKELETONS, form, spec)
    sharded, plain = root / "sharded", root / "plain"
    bones = handmade.uint64_shard([[], [handmade.Entry(7, b"bones")]])
    handmade.write_json(sharded / "info", volume)
    handmade.write_json(plain / "info", {**volume, "scales": [scale]})
    shards = {
        "s/0.shard": handmade.uint64_shard(voxels),
        "meshes/fine/1.shard": handmade_ids.mesh_shard([{}, {7: (fragments, manifest)}]),
        "deep/er/skeletons/1.shard": bones,
        "s/unnamed/1.shard": bones,
    }
    contents = {
        "s/0-1_0-1_0-1": b"a",
        "s/1-2_0-1_0-1": b"b",
        "meshes/fine/7": fragments,
        "meshes/fine/7.index": manifest,
        "deep/er/skeletons/7": b"bones",
        "s/unnamed/7": b"bones",
    }
    handmade.write_files(sharded, shards)
    handmade.write_files(plain, contents)
    return IdDataset(name, sharded, plain)


DATASETS["nested"] = partial(_nested, name="nested")
