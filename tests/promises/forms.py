"""The stored forms, and what their chunks are called and look like in each layout."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests import data_bcolz, data_n5, handmade, handmade_ids
from tests.write.targets import TARGETS, Target, _as_n5, _raw, _zstd
from tests.write.tokens import DTYPE, Array, Coords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ZARR = ("zarr_end", "zarr_start", "zarr_zstd", "zarr_crc", "zarr_nested", "zarr_gzip_after", "zarr_crc_after")
VOLUMES = ("precomputed", "precomputed_gzip")
N5 = ("n5", "n5_start")
AROUND = frozenset({"zarr_gzip_after", "zarr_crc_after"})
"""A codec surrounds the whole shard."""

KINDS = {form: kind for kind in (ZARR[:5], ZARR[5:], VOLUMES, N5, ("bcolz",), ("mesh",)) for form in kind}
"""The forms of each kind. Every promise is tried for each kind, and every form with each other value."""

ANEW = dict(zip(ZARR, ZARR[1:] + ZARR[:1], strict=True)) | dict(
    zip(VOLUMES + N5, VOLUMES[::-1] + N5[::-1], strict=True)
)
"""The form in which another program creates an array anew."""

FULL = frozenset({"bcolz", "mesh"})
"""No chunk is absent: an array of superchunks has all, and a new mesh needs a manifest, too."""


def _superchunks() -> Target:
    """Three chunks in each superchunk. No library reads these files: `data_bcolz.decoded` takes them apart."""
    grid, chunk, per_file = (6,), (8,), 3

    def fill(root: Path, array: Array) -> None:
        chunks = data_bcolz.chunks_of(array, chunk[0])
        data_bcolz.write_superchunks(root / "data", chunks, per_file, data_bcolz.Superchunk())

    def create(root: Path) -> None:
        data_bcolz.write_array(root, np.zeros(grid[0] * chunk[0], DTYPE), chunk[0], per_file)

    def read(root: Path) -> Array:
        files = [root / f"data/__{k}__.bin" for k in (1, 2)]
        return np.frombuffer(b"".join(map(data_bcolz.decoded, files)), DTYPE)

    return Target(
        "bcolz",
        grid,
        chunk,
        "meta/storage",
        lambda c: f"data/__{c[0]}.blp",
        lambda array: data_bcolz.BLP + data_bcolz.compressed(array.tobytes(), 4),
        lambda c: f"data/__{c[0] // per_file + 1}__.bin",
        create,
        fill,
        {"decoded": read},
    )


def _meshes() -> Target:
    """Fragments of 16 bytes before manifests that are all the same. Shards are taken apart here."""
    grid, chunk = (12,), (4,)
    spec = handmade.sharding(minishard=1, shard=1)
    manifest = handmade_ids.manifest([[16]])

    def shard_key(coords: Coords) -> str:
        return handmade.shard_name(handmade.uint64_hash(coords[0], spec)[0], spec["shard_bits"])

    def fill(root: Path, array: Array) -> None:
        shards: dict[str, tuple[dict[int, tuple[bytes, bytes]], ...]] = {"0.shard": ({}, {}), "1.shard": ({}, {})}
        for number, block in target.split(array):
            shards[shard_key((number,))][number % 2][number] = block.tobytes(), manifest
        handmade.write_files(root, {key: handmade_ids.mesh_shard(minishards) for key, minishards in shards.items()})

    def read(root: Path) -> Array:
        out = np.zeros(grid[0] * chunk[0], DTYPE)
        for shard in (root.joinpath("0.shard").read_bytes(), root.joinpath("1.shard").read_bytes()):
            for start, stop in struct.iter_unpack("<QQ", shard[:32]):
                ids, gaps, sizes = np.frombuffer(shard[32 + start : 32 + stop], "<u8").reshape(3, -1)
                ends = np.cumsum(gaps + sizes, dtype=np.uint64)
                for number, end in zip(np.cumsum(ids, dtype=np.uint64).tolist(), ends.tolist(), strict=True):
                    data = shard[32 + end - len(manifest) - 16 : 32 + end]
                    assert data[16:] == manifest
                    out[4 * number : 4 * number + 4] = np.frombuffer(data[:16], DTYPE)
        return out

    target = Target(
        "mesh",
        grid,
        chunk,
        "info",
        lambda c: str(c[0]),
        _raw,
        shard_key,
        lambda root: handmade.write_json(root / "info", {**handmade_ids.MESHES, "sharding": spec}),
        fill,
        {"taken apart": read},
    )
    return target


NATIVE = {name: TARGETS[name] for name in (*ZARR, *VOLUMES, *N5)} | {"bcolz": _superchunks(), "mesh": _meshes()}


class Shown(NamedTuple):
    """What a layout calls chunks and the document, and the bytes of a chunk; None: the stored ones."""

    key: Callable[[Coords], str]
    document: str
    encode: Callable[[Array], bytes] | None


def _slashes(prefix: str, *, turned: bool) -> Callable[[Coords], str]:
    return lambda c: prefix + "/".join(map(str, c[::-1] if turned else c))


def _spans(coords: Coords) -> str:
    """The name of a chunk of a Zarr array in a volume, without the axis z."""
    spans = [(i * c, (i + 1) * c) for i, c in zip(coords[::-1], NATIVE[ZARR[0]].chunk[::-1], strict=True)]
    return "1_1_1/" + "_".join(f"{start}-{stop}" for start, stop in (*spans, (0, 1)))


def _blocks(array: Array) -> bytes:
    """Without the header."""
    return array.astype(">u4").tobytes("F")


LAYOUTS: dict[tuple[str, str], Shown] = {
    **{(form, "zarr2"): Shown(data_n5.key, ".zarray", _zstd if form == "zarr_zstd" else _raw) for form in ZARR},
    **{(form, "n5"): Shown(_slashes("", turned=True), "attributes.json", _as_n5) for form in ZARR},
    **{(form, "precomputed"): Shown(_spans, "info", _raw) for form in ZARR},
    **{(form, "zarr2"): Shown(_slashes("", turned=True), ".zarray", _blocks) for form in N5},
    ("precomputed", "zarr2"): Shown(_slashes("8_8_40/", turned=True), "8_8_40/.zarray", None),
    **{
        (form, "n5"): Shown(
            _slashes("s0/", turned=False), "s0/attributes.json", lambda a: data_n5.header(a.shape) + _blocks(a)
        )
        for form in VOLUMES
    },
    ("bcolz", "zarr2"): Shown(_slashes("", turned=False), ".zarray", lambda a: data_bcolz.compressed(a.tobytes(), 4)),
}


def _in_layout(form: str, layout: str) -> Target:
    key, document, encode = LAYOUTS[form, layout]
    target = NATIVE[form]
    return replace(target, layout=layout, key=key, document=document, encode=encode or target.encode)


SHOWN: dict[tuple[str, str], Target] = {
    **{(form, "native"): target for form, target in NATIVE.items()},
    **{(form, layout): _in_layout(form, layout) for form, layout in LAYOUTS},
}
"""By form and layout."""
