"""The Zarr v3 draft of 2022: hierarchies that zarr-python 2.18 writes, sharded and not; and shards made by hand.

Nothing here uses shardfs.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.datasets import ROOT, client_python, islands, ramp
from tests.handmade import write_files, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.datasets import Array

Json = Any

URL = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
"""As zarr-python has it; the text of the draft has `/extensions` before the last words, and once a hyphen in them."""

OTHER_URLS = (
    "https://purl.org/zarr/spec/extensions/storage_transformers/sharding/1.0",
    "https://purl.org/zarr/spec/extensions/storage-transformers/sharding/1.0",
)


@dataclass(frozen=True)
class Hierarchy:
    name: str
    path: Path
    """The sharded form."""
    twin: Path
    """The same, unsharded by the same library."""
    arrays: Mapping[str, Array]
    """By path; an array at the root has the path ""."""
    readable: bool
    """Whether zarr-python can read the sharded form itself."""


def _array(path: str, data: Array, chunks: Sequence[int], *chunks_per_shard: Any, **members: Json) -> dict[str, Json]:
    return {"path": path, "data": data, "chunks": chunks, "chunks_per_shard": chunks_per_shard, **members}


def _variants() -> dict[str, dict[str, Json]]:
    plane, cube = ramp((7, 10)), ramp((5, 6, 7), "int32")
    arrays = {
        "rank_0": _array("a", ramp(()), (), ()),
        "rank_0_slots": _array("a", ramp(()), (), (4,)),
        "rank_1": _array("a", ramp((20,)), (3,), 2),
        "rank_1_dot": _array("a", ramp((20,)), (3,), (2,), separator="."),
        "rank_2": _array("foo/baz", plane, (2, 3), (2, 2)),
        "rank_2_dot": _array("foo/baz", plane, (2, 3), (2, 2), separator="."),
        "rank_3": _array("a", cube, (2, 2, 3), (2, 1, 2)),
        "rank_3_dot": _array("a", cube, (2, 2, 3), (1, 3, 2), separator="."),
        "fewer_axes": _array("a", cube, (2, 2, 2), (2,)),
        "large_shard": _array("a", ramp((3, 3)), (2, 2), (4, 8)),
        "gzip": _array("a", plane, (2, 3), (2, 2), gzip=5),
        "fortran": _array("a", plane, (2, 3), (2, 2), order="F"),
        "big_endian": _array("a", plane.astype(">f8"), (2, 3), (2, 2), gzip=1),
        "missing": _array("a", islands((40, 40), "uint8"), (4, 4), (4, 4)),
        "nothing": _array("a", np.zeros((7, 10), "uint8"), (2, 3), (2, 2)),
        # zarr-python takes a chunk out of the index alone, and writes the last one changed at the front.
        "erased": _array("a", plane, (2, 3), (2, 2), erase=[((2, 3), (4, 6)), ((4, 6), (7, 10)), ((0, 0), (1, 1))]),
        "nested": _array("a", ramp((30, 33), "uint8"), (2, 3), (2, 2), (3, 2)),
        "nested_thrice": _array("a", ramp((30,), "uint8"), (2,), (2,), (2,), (3,), gzip=1),
        "behind_another": _array("a", plane, (2, 3), (2, 2), dummy="before"),
        "root": _array("", plane, (2, 3), (2, 2)),
        "root_rank_1": _array("", ramp((20,)), (3,), (2,)),
    }
    group = {
        "groups": ["g", "g/c0", "empty"],
        "arrays": [
            _array("g/c1", plane, (2, 3), (2, 2)),
            _array("g/c0/c2", ramp((20,)), (3,), (2,)),
            _array("g/plain", plane, (2, 3)),
            _array("implied/c0.0", plane, (2, 3), (2, 2), separator="."),
        ],
    }
    return {
        **{name: {"arrays": [array]} for name, array in arrays.items()},
        "group": group,
        "consolidated": {**group, "consolidated": "g"},
        "suffix": {**group, "suffix": ".doc"},
        "suffix_none": {**group, "suffix": ""},
    }


VARIANTS = _variants()


def write_variants(root: Path) -> dict[str, Hierarchy]:
    """All of them, as `root/sharded/NAME` and `root/plain/NAME`. Skips the test if there is no zarr-python 2."""
    jobs: list[dict[str, Json]] = []
    hierarchies = {}
    for name, variant in VARIANTS.items():
        arrays = []
        for number, array in enumerate(variant["arrays"]):
            data = root / f"{name}-{number}.npy"
            np.save(data, array["data"])
            arrays.append({**array, "data": str(data)})
        sharded, plain = root / "sharded" / name, root / "plain" / name
        jobs.append({**variant, "root": str(sharded), "arrays": arrays})
        jobs.append({**variant, "root": str(plain), "arrays": [{**a, "chunks_per_shard": ()} for a in arrays]})
        hierarchies[name] = Hierarchy(name, sharded, plain, {a["path"]: _expected(a) for a in variant["arrays"]}, True)
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = ["-m", "tests.clients.write_zarr_draft", str(root / "jobs.json")]
    subprocess.run([client_python("zarr2"), *command], cwd=ROOT, check=True, timeout=250)
    return {**hierarchies, **_edited(root, hierarchies)}


def _expected(array: Mapping[str, Json]) -> Array:
    data: Array = array["data"].copy()
    for begin, end in array.get("erase", ()):
        data[tuple(map(slice, begin, end))] = 0
    return data


def _edited(root: Path, hierarchies: Mapping[str, Hierarchy]) -> dict[str, Hierarchy]:
    """The same with the other URLs, which zarr-python does not know; and with files that are no part of an array."""
    out = {}
    for number, url in enumerate(OTHER_URLS):
        name = f"url_{number}"
        path, twin = (_copy(tree, root / kind / name) for tree, kind in _forms(hierarchies["group"]))
        for document in (path / "meta").rglob("*.array.json"):
            document.write_text(document.read_text().replace(URL, url))
        out[name] = Hierarchy(name, path, twin, hierarchies["group"].arrays, False)
    path, twin = (_copy(tree, root / kind / "litter") for tree, kind in _forms(hierarchies["group"]))
    for tree in (path, twin):
        litter = ("g/c1/README", "g/c1/c0/README", "g/c1/c00", "g/c1/c0/c1", "g/c1/0", "g/c9", "g/c0/c2/cc", "c0")
        write_files(tree / "data/root", {name: name.encode() for name in litter})
        write_files(tree, {"notes.array.json": b"{", "meta/root/g/notes.json": b"{", "other/g.array.json": b"{"})
    out["litter"] = Hierarchy("litter", path, twin, hierarchies["group"].arrays, True)
    return out


def _forms(hierarchy: Hierarchy) -> tuple[tuple[Path, str], tuple[Path, str]]:
    return (hierarchy.path, "sharded"), (hierarchy.twin, "plain")


def _copy(source: Path, target: Path) -> Path:
    for directory, _, names in os.walk(source):
        for name in names:
            path = Path(directory, name)
            write_files(target, {str(path.relative_to(source)): path.read_bytes()})
    return target


def parsed(files: Mapping[str, bytes]) -> dict[str, Json]:
    """Documents of arrays parsed: writers differ in spaces and order."""
    return {
        n: json.loads(d) if (n.startswith("meta/root") and ".array" in n) or n.endswith(".zmetadata") else d
        for n, d in files.items()
    }


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    paths = (Path(directory, name) for directory, _, names in os.walk(root) for name in names)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


# ----------------------------------------------------------------------------------------------------- by hand

ROOT_DOCUMENT = {
    "extensions": [],
    "metadata_encoding": "https://purl.org/zarr/spec/protocol/core/3.0",
    "metadata_key_suffix": ".json",
    "zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0",
}


def sharding(*chunks_per_shard: int, **members: Json) -> dict[str, Json]:
    """The transformer; `members` replace or add some."""
    return {
        "extension": URL,
        "type": "indexed",
        "configuration": {"chunks_per_shard": list(chunks_per_shard)},
        **members,
    }


def array_document(shape: Sequence[int], chunk: Sequence[int], *transformers: Json, **members: Json) -> dict[str, Json]:
    """`foo.array.json`; `members` replace or add some."""
    return {
        "attributes": {},
        "chunk_grid": {"chunk_shape": list(chunk), "separator": "/", "type": "regular"},
        "chunk_memory_layout": "C",
        "data_type": "u1",
        "extensions": [],
        "fill_value": 0,
        "shape": list(shape),
        "storage_transformers": list(transformers),
        **members,
    }


def write_hierarchy(root: Path, documents: Mapping[str, Json], files: Mapping[str, bytes]) -> None:
    """Documents by path below `meta/root`, without suffix; files by path below `data/root`."""
    write_json(root / "zarr.json", ROOT_DOCUMENT)
    for path, document in documents.items():
        write_json(root / f"meta/root/{path}.array.json", document)
    write_files(root / "data/root", files)


Cells = dict[tuple[int, ...], bytes]


def pack_shards(chunks: Cells, chunks_per_shard: Sequence[int], gap: bytes = b"") -> Cells:
    """The shards that hold these chunks, put together as the draft tells it; chunks lie in the order given."""
    homes: dict[tuple[int, ...], Cells] = {}
    for at, chunk in chunks.items():
        split = [divmod(i, n) for i, n in zip(at, chunks_per_shard, strict=True)]
        homes.setdefault(tuple(q for q, _ in split), {})[tuple(r for _, r in split)] = chunk
    out = {}
    for home, inside in homes.items():
        data, entries = b"", {}
        for at, chunk in inside.items():
            entries[at] = struct.pack("<QQ", len(data), len(chunk))
            data += chunk + gap
        out[home] = data + b"".join(entries.get(at, b"\xff" * 16) for at in product(*map(range, chunks_per_shard)))
    return out


def named(cells: Mapping[tuple[int, ...], bytes], separator: str = "/") -> dict[str, bytes]:
    """What the files are called."""
    return {"c" + separator.join(map(str, at)): data for at, data in cells.items()}
