"""Meshes and skeletons put together byte by byte: damaged, odd and hostile. As in `handmade`, nothing uses shardfs.

`CASES` are those of `handmade` for what is keyed by ids.
"""

from __future__ import annotations

import gzip
import struct
from typing import TYPE_CHECKING, Any

from tests.handmade import Case, Entry, minishard_index, sharding, split_legacy, uint64_shard, write_files, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Json = Any
CASES: dict[str, Callable[[Path], Case]] = {}


def _case(write: Callable[[Path], Case]) -> Callable[[Path], Case]:
    CASES[write.__name__] = write
    return write


def manifest(levels: Sequence[Sequence[int]]) -> bytes:
    """Of a multi-resolution mesh: for each level of detail the sizes of its fragments."""
    count = len(levels)
    out = struct.pack("<6fI", 1, 1, 1, 0, 0, 0, count)
    out += struct.pack(f"<{count}f", *(2**level for level in range(count)))
    out += struct.pack(f"<{3 * count}f", *[0] * 3 * count)
    out += struct.pack(f"<{count}I", *map(len, levels))
    for sizes in levels:
        # Positions of the largest numbers: none must be taken for a size.
        out += struct.pack(f"<{3 * len(sizes)}I", *[2**32 - 1] * 3 * len(sizes))
        out += struct.pack(f"<{len(sizes)}I", *sizes)
    return out


SKELETONS: dict[str, Json] = {"@type": "neuroglancer_skeletons"}
MESHES: dict[str, Json] = {
    "@type": "neuroglancer_multilod_draco",
    "vertex_quantization_bits": 10,
    "transform": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0],
    "lod_scale_multiplier": 1,
}


def mesh_shard(minishards: Sequence[Mapping[int, tuple[bytes, bytes]]], *, deflate_index: bool = False) -> bytes:
    """Of fragments and manifest of each id: the manifest has an entry, the fragments lie right before it."""
    body, indices = b"", []
    for meshes in minishards:
        row = []
        for number, (fragments, manifest_bytes) in meshes.items():
            row.append((number, len(body) + len(fragments), len(manifest_bytes)))
            body += fragments + manifest_bytes
        index = minishard_index(row)
        indices.append(gzip.compress(index, mtime=0) if deflate_index and index else index)
    bounds, position = b"", len(body)
    for index in indices:
        bounds += struct.pack("<QQ", position, position + len(index))
        position += len(index)
    return bounds + body + b"".join(indices)


def _good(number: int, levels: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    size = sum(map(sum, levels))
    return (b"%d" % (number % 10)) * size, manifest(levels)


# The meshes of most cases lie in 0.shard: even ids in minishard 0, odd ones in minishard 1. The odd ones are sound.

_EVEN = {0: _good(0, [[3, 4], [5]]), 2: _good(2, [[6]]), 2**63: _good(2**63, [[1], [0, 2], []])}
_ODD = {1: _good(1, [[7]]), 2**64 - 1: _good(2**64 - 1, [[0], [8]])}


def _shown(meshes: Mapping[int, tuple[bytes, bytes]]) -> dict[str, bytes]:
    out = {}
    for number, (fragments, manifest_bytes) in meshes.items():
        out[str(number)], out[f"{number}.index"] = fragments, manifest_bytes
    return out


def _meshes(
    path: Path,
    even: Mapping[int, tuple[bytes, bytes]],
    *,
    good: Mapping[str, bytes],
    bad: Sequence[str] = (),
    absent: Sequence[str] = (),
    spec: Json = None,
) -> Case:
    write_json(path / "info", {**MESHES, "sharding": spec or sharding()})
    write_files(path, {"0.shard": mesh_shard([even, _ODD])})
    return Case(path, {**good, **_shown(_ODD)}, frozenset(bad), frozenset(absent))


@_case
def meshes_sound(path: Path) -> Case:
    odd_names = (
        "3",
        "3.index",
        "00",
        "01.index",
        "+1",
        "-1",
        "1.",
        ".index",
        str(2**64),
        f"{2**64 + 1}.index",
        "1.INDEX",
    )
    return _meshes(path, _EVEN, good=_shown(_EVEN), absent=odd_names)


@_case
def mesh_without_fragments(path: Path) -> Case:
    """No fragments at all, or only empty ones: the file is there, and empty."""
    even = {0: _good(0, []), 2: _good(2, [[], []]), 4: _good(4, [[0, 0]])}
    return _meshes(path, even, good=_shown(even))


@_case
def mesh_manifest_too_short(path: Path) -> Case:
    fragments, manifest_bytes = _EVEN[2]
    even = {**_EVEN, 2: (fragments, manifest_bytes[:-1]), 4: (b"", manifest_bytes[:27]), 6: (b"", b"")}
    good = _shown(_EVEN) | {"2.index": manifest_bytes[:-1], "4.index": manifest_bytes[:27], "6.index": b""}
    del good["2"]
    return _meshes(path, even, good=good, bad=["2", "4", "6"])


@_case
def mesh_manifest_too_long(path: Path) -> Case:
    fragments, manifest_bytes = _EVEN[2]
    good = _shown(_EVEN) | {"2.index": manifest_bytes + b"\0"}
    del good["2"]
    return _meshes(path, {**_EVEN, 2: (fragments, manifest_bytes + b"\0")}, good=good, bad=["2"])


@_case
def mesh_of_very_many_levels(path: Path) -> Case:
    """Whoever allocates what the manifest claims is out of memory."""
    levels = manifest([])[:24] + b"\xff" * 4
    fragments = manifest([[1]])[:44] + b"\xff" * 4 + bytes(16)
    even = {**_EVEN, 4: (b"", levels), 6: (b"", fragments)}
    good = _shown(_EVEN) | {"4.index": levels, "6.index": fragments}
    return _meshes(path, even, good=good, bad=["4", "6"])


@_case
def mesh_fragments_before_the_shard(path: Path) -> Case:
    """The manifest claims more than there is before it: a byte of the shard's index, and sizes of 4 GiB each."""
    even = {0: (b"abc", manifest([[4]])), 2: (b"", manifest([[2**32 - 1] * 5])), 4: _good(4, [[9]])}
    good = {"0.index": even[0][1], "2.index": even[2][1]} | _shown({4: even[4]})
    return _meshes(path, even, good=good, bad=["0", "2"])


@_case
def mesh_manifests_deflated(path: Path) -> Case:
    """`data_encoding` is around the manifest alone; one is damaged, one is a bomb."""

    def deflated(meshes: Mapping[int, tuple[bytes, bytes]]) -> dict[int, tuple[bytes, bytes]]:
        return {
            n: (fragments, gzip.compress(manifest_bytes, mtime=0)) for n, (fragments, manifest_bytes) in meshes.items()
        }

    damaged = gzip.compress(manifest([[1]]), mtime=0)[:-9]
    even = {**deflated(_EVEN), 4: (b"x", damaged), 6: (b"", b"not gzip")}
    write_json(path / "info", {**MESHES, "sharding": sharding(data="gzip")})
    write_files(path, {"0.shard": mesh_shard([even, deflated(_ODD)])})
    return Case(path, _shown(_EVEN) | _shown(_ODD), frozenset({"4", "4.index", "6", "6.index"}))


@_case
def mesh_fragments_deflated_with_the_manifest(path: Path) -> Case:
    """What a writer leaves that compresses both together: the manifest cannot be told from the fragments."""
    together = gzip.compress(b"fragments" + manifest([[9]]), mtime=0)
    write_json(path / "info", {**MESHES, "sharding": sharding(data="gzip")})
    odd = {n: (fragments, gzip.compress(manifest_bytes)) for n, (fragments, manifest_bytes) in _ODD.items()}
    write_files(path, {"0.shard": mesh_shard([{0: (b"", together)}, odd])})
    return Case(path, {"0.index": b"fragments" + manifest([[9]]), **_shown(_ODD)}, frozenset({"0"}))


@_case
def mesh_index_damaged(path: Path) -> Case:
    """A minishard index that cannot be read hides nothing of the other."""
    case = _meshes(path, _EVEN, good={}, bad=list(_shown(_EVEN)))
    shard = bytearray((path / "0.shard").read_bytes())
    shard[0:16] = struct.pack("<QQ", 2**64 - 1, 5)
    (path / "0.shard").write_bytes(shard)
    return case


@_case
def mesh_zero_byte_shard(path: Path) -> Case:
    case = _meshes(path, _EVEN, good={}, bad=[*_shown(_EVEN), *_shown(_ODD)])
    (path / "0.shard").write_bytes(b"")
    return Case(path, {}, case.bad)


@_case
def mesh_offsets_of_all_ones(path: Path) -> Case:
    """Offset or size -1 in a minishard index, and a range that wraps: what is left of them is no manifest."""
    write_json(path / "info", {**MESHES, "sharding": sharding()})
    odd = mesh_shard([{}, _ODD])
    rows = minishard_index([(0, 2**64 - 1, 4), (2, 0, 2**64 - 1), (4, 2**64 - 8, 16)])
    end = len(odd) - 32
    write_files(path, {"0.shard": struct.pack("<QQ", end, end + len(rows)) + odd[16:] + rows})
    return Case(path, _shown(_ODD), frozenset({"0", "2", "2.index", "4"}))


@_case
def mesh_legacy_pair(path: Path) -> Case:
    """`0.index` is a shard's name here and a mesh's name there: the mesh is shown, of the shard nothing."""
    case = _meshes(path, _EVEN, good=_shown(_EVEN), absent=["0.data", "0.shard"])
    split_legacy(path / "0.shard", minishard_bits=1)
    return case


@_case
def mesh_leftovers_of_another_form(path: Path) -> Case:
    """Unsharded files of meshes, and of none, beside the shards: the shards are what the info document speaks of."""
    case = _meshes(path, _EVEN, good={**_shown(_EVEN), "1.labels": b"[]"}, absent=["3", "3.index"])
    write_files(path, {"3": b"old", "3.index": b"old", "0": b"old", "0.index": b"old", "1.labels": b"[]"})
    return case


@_case
def skeletons_in_the_wrong_place(path: Path) -> Case:
    """Readers look where the hash points."""
    write_json(path / "info", {**SKELETONS, "sharding": sharding(minishard=1, shard=1)})
    first = [[Entry(4, b"four"), Entry(2, b"other shard")], [Entry(1, b"one"), Entry(8, b"other minishard")]]
    write_files(path, {"0.shard": uint64_shard(first), "1.shard": uint64_shard([[Entry(6, b"six")], []])})
    return Case(path, {"4": b"four", "1": b"one", "6": b"six"}, absent=frozenset({"2", "8", "0.shard", "1.shard"}))


@_case
def skeletons_of_one_damaged_minishard(path: Path) -> Case:
    write_json(path / "info", {**SKELETONS, "sharding": sharding(index="gzip")})
    even, odd = [Entry(0, b"zero"), Entry(2, b"two")], [Entry(1, b"one"), Entry(2**64 - 1, b"last")]
    shard = uint64_shard([even, odd], deflate_index=True, indices={0: b"not gzip"})
    write_files(path, {"0.shard": shard})
    return Case(path, {"1": b"one", str(2**64 - 1): b"last"}, bad=frozenset({"0", "2", "4"}))


@_case
def skeletons_zero_byte_shard(path: Path) -> Case:
    write_json(path / "info", {**SKELETONS, "sharding": sharding(minishard=1, shard=1)})
    second = uint64_shard([[Entry(6, b"six")], []])
    write_files(path, {"0.shard": b"", "1.shard": second})
    return Case(path, {"6": b"six"}, bad=frozenset({"0", "1", "4"}))


@_case
def annotations_zero_byte_shard(path: Path) -> Case:
    sharded = sharding(minishard=0)
    level = {"key": "cells", "grid_shape": [2, 1, 1], "chunk_size": [1, 1, 1], "limit": 1, "sharding": sharded}
    by_id = {"key": "by_id", "sharding": sharded}
    write_json(path / "info", {"@type": "neuroglancer_annotations_v1", "by_id": by_id, "spatial": [level]})
    write_files(path, {"cells/0.shard": b"", "by_id/0.shard": b""})
    return Case(path, {}, bad=frozenset({"cells/0_0_0", "cells/1_0_0", "by_id/7"}))


@_case
def annotations_outside_the_grid(path: Path) -> Case:
    """A level of 3x1x2 cells has codes of three bits: those of x = 3 name no cell."""
    spec = sharding(minishard=0)
    level = {"key": "cells", "grid_shape": [3, 1, 2], "chunk_size": [1, 1, 1], "limit": 1, "sharding": spec}
    single = {"key": "single", "grid_shape": [1, 1, 1], "chunk_size": [1, 1, 1], "limit": 1, "sharding": spec}
    write_json(
        path / "info", {"@type": "neuroglancer_annotations_v1", "by_id": {"key": "by_id"}, "spatial": [single, level]}
    )
    # bits, from the lowest: x, z, x
    entries = [Entry(code, b"%d" % code) for code in (*range(8), 8, 2**63)]
    write_files(path, {"cells/0.shard": uint64_shard([entries]), "single/0.shard": uint64_shard([entries])})
    good = {"cells/0_0_0": b"0", "cells/1_0_0": b"1", "cells/0_0_1": b"2", "cells/1_0_1": b"3", "cells/2_0_0": b"4"}
    good |= {"cells/2_0_1": b"6", "single/0_0_0": b"0"}
    absent = {"cells/3_0_0", "cells/3_0_1", "cells/0_1_0", "cells/00_0_0", "cells/0_0", "cells/0", "single/1_0_0"}
    return Case(path, good, absent=frozenset(absent))
