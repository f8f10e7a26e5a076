"""Shards and metadata documents put together byte by byte, for what no library writes.

The layouts are those of the Zarr v3 `sharding_indexed` codec and of Neuroglancer's `neuroglancer_uint64_sharded_v1`.
Nothing here uses shardfs, so that it can contradict it.

`CASES` are damaged or odd datasets that must still be served as far as they are sound; `HOSTILE` are metadata documents
that must harm nothing beside them. Each entry writes into a directory and says what a reader must then find.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import mmh3

ABSENT = 2**64 - 1
U64 = 2**64
Json = Any
Checksum = Literal["good", "wrong", "none"]
Location = Literal["start", "end"]


@dataclass(frozen=True)
class Case:
    """What a mount of `path` must show; all names are relative to it."""

    path: Path
    good: Mapping[str, bytes]
    """Files and their exact content."""
    bad: frozenset[str] = frozenset()
    """Reading these fails with EIO."""
    absent: frozenset[str] = frozenset()
    """These do not exist (ENOENT)."""


Write = Callable[[Path], Case]
CASES: dict[str, Write] = {}
HOSTILE: dict[str, Write] = {}


def _case(write: Write) -> Write:
    CASES[write.__name__] = write
    return write


# ---------------------------------------------------------------------------------------------- Zarr v3 shards


def zarr_index(
    entries: Iterable[tuple[int, int]],
    *,
    endian: Literal["little", "big"] = "little",
    checksum: Checksum = "good",
) -> bytes:
    """The index of a shard: (offset, nbytes) of every slot, as given, and the CRC-32C over them."""
    order = "<" if endian == "little" else ">"
    packed = b"".join(struct.pack(f"{order}QQ", *entry) for entry in entries)
    if checksum == "none":
        return packed
    crc = int(google_crc32c.value(packed))
    return packed + struct.pack("<I", crc if checksum == "good" else crc ^ 1)


def zarr_shard(
    chunks: Sequence[bytes | None],
    *,
    location: Location = "end",
    endian: Literal["little", "big"] = "little",
    checksum: Checksum = "good",
    gap: bytes = b"",
    backwards: bool = False,
    entries: Mapping[int, tuple[int, int]] | None = None,
) -> bytes:
    """A shard with one slot per item of `chunks` (None: empty).

    `gap` is put before each chunk, `backwards` stores the last slot first, and `entries` replaces index entries by
    any numbers. Offsets count from the first byte of the shard, wherever the index is.
    """
    index_size = 16 * len(chunks) + (0 if checksum == "none" else 4)
    body = bytearray()
    base = index_size if location == "start" else 0
    extents: dict[int, tuple[int, int]] = {}
    for slot in sorted(range(len(chunks)), reverse=backwards):
        chunk = chunks[slot]
        if chunk is not None:
            body += gap
            extents[slot] = (base + len(body), len(chunk))
            body += chunk
    extents.update(entries or {})
    listed = [extents.get(slot, (ABSENT, ABSENT)) for slot in range(len(chunks))]
    index = zarr_index(listed, endian=endian, checksum=checksum)
    return index + bytes(body) if location == "start" else bytes(body) + index


def zarr_metadata(
    shape: Sequence[int],
    shard: Sequence[int],
    inner: Sequence[int],
    *,
    location: Location = "end",
    index_codecs: Sequence[Json] = (
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ),
    codecs: Sequence[Json] = ({"name": "bytes"},),
    data_type: str = "uint8",
    separator: str = "/",
    **members: Json,
) -> dict[str, Json]:
    """The `zarr.json` of a sharded array; `members` replace or add top-level members."""
    sharding = {
        "chunk_shape": list(inner),
        "codecs": list(codecs),
        "index_codecs": list(index_codecs),
        "index_location": location,
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        **members,
    }


def write_json(path: Path, document: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def group_document(**attributes: Json) -> dict[str, Json]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


# The array of most cases: 4x8 uint8, two shards `c/0/0` and `c/0/1` of 2x2 slots, inner chunks of 2x2 bytes.
# The second shard is always sound: damage in one shard must not reach another.

_SHAPE, _SHARD, _INNER = (4, 8), (4, 4), (2, 2)
_FIRST = [bytes([10 * slot + i for i in range(1, 5)]) for slot in range(4)]
_SECOND = [bytes([100 + 10 * slot + i for i in range(1, 5)]) for slot in range(4)]
_FIRST_KEYS = ("c/0/0", "c/0/1", "c/1/0", "c/1/1")
_SECOND_KEYS = ("c/0/2", "c/0/3", "c/1/2", "c/1/3")


def _zarr_case(
    path: Path,
    first: bytes | None,
    *,
    good: Mapping[int, bytes] | None = None,
    bad: Iterable[int] = (),
    absent: Iterable[int] = (),
    **metadata: Any,
) -> Case:
    """`first` as the first shard beside a sound one; slots of the first shard are named by number."""
    write_json(path / "zarr.json", zarr_metadata(_SHAPE, _SHARD, _INNER, **metadata))
    location: Location = metadata.get("location", "end")
    write_files(path, {"c/0/1": zarr_shard(_SECOND, location=location)})
    if first is not None:
        write_files(path, {"c/0/0": first})
    served = {_FIRST_KEYS[slot]: chunk for slot, chunk in (good or {}).items()}
    served.update(zip(_SECOND_KEYS, _SECOND, strict=True))
    return Case(
        path,
        served,
        frozenset(_FIRST_KEYS[slot] for slot in bad),
        frozenset(_FIRST_KEYS[slot] for slot in absent),
    )


def _zarr(name: str, first: bytes | None, **how: Any) -> Write:
    """Register a case of which nothing but the first shard is to be told."""
    CASES[name] = lambda path: _zarr_case(path, first, **how)
    return CASES[name]


def _all_but(*slots: int) -> dict[int, bytes]:
    return {slot: chunk for slot, chunk in enumerate(_FIRST) if slot not in slots}


zarr_sound = _zarr("zarr_sound", zarr_shard(_FIRST), good=_all_but())
_zarr("zarr_backwards_with_gaps", zarr_shard(_FIRST, gap=b"hole!", backwards=True), good=_all_but())


@_case
def zarr_backwards_with_gaps_start(path: Path) -> Case:
    shard = zarr_shard(_FIRST, gap=b"hole!", backwards=True, location="start") + b"junk after the last chunk"
    return _zarr_case(path, shard, good=_all_but(), location="start")


@_case
def zarr_shared_and_overlapping(path: Path) -> Case:
    # Slot 1 is slot 0's bytes, slot 2 straddles slots 0 and 1 as stored.
    data = b"abcdefgh"
    entries = [(0, 4), (0, 4), (2, 4), (ABSENT, ABSENT)]
    good = {0: b"abcd", 1: b"abcd", 2: b"cdef"}
    return _zarr_case(path, data + zarr_index(entries), good=good, absent=[3])


@_case
def zarr_chunk_covers_index(path: Path) -> Case:
    entries = [(0, 4 + 68), (4, 68), (0, 4), (ABSENT, ABSENT)]
    index = zarr_index(entries)
    good = {0: b"data" + index, 1: index, 2: b"data"}
    return _zarr_case(path, b"data" + index, good=good, absent=[3])


_zarr("zarr_zero_length_chunk", zarr_shard(_FIRST, entries={2: (3, 0)}), good={**_all_but(2), 2: b""})
_zarr("zarr_only_offset_is_ones", zarr_shard(_FIRST, entries={1: (ABSENT, 4)}), good=_all_but(1), bad=[1])
_zarr("zarr_only_nbytes_is_ones", zarr_shard(_FIRST, entries={1: (0, ABSENT)}), good=_all_but(1), bad=[1])


@_case
def zarr_range_past_end(path: Path) -> Case:
    entries = {0: (10**6, 4), 3: (0, 10**6)}
    return _zarr_case(path, zarr_shard(_FIRST, entries=entries), good=_all_but(0, 3), bad=[0, 3])


@_case
def zarr_range_past_end_start(path: Path) -> Case:
    entries = {0: (10**6, 4), 3: (0, 10**6)}
    shard = zarr_shard(_FIRST, entries=entries, location="start")
    return _zarr_case(path, shard, good=_all_but(0, 3), bad=[0, 3], location="start")


@_case
def zarr_range_wraps(path: Path) -> Case:
    # offset + nbytes is 8 modulo 2^64, and 2^63 is negative for whoever reads it as signed.
    entries = {0: (ABSENT - 1, 10), 1: (2**63, 2**63), 2: (2**63 - 1, 1)}
    return _zarr_case(path, zarr_shard(_FIRST, entries=entries), good=_all_but(0, 1, 2), bad=[0, 1, 2])


# Whoever allocates what the index claims is out of memory.
_zarr("zarr_enormous_chunk", zarr_shard(_FIRST, entries={1: (0, 2**40)}), good=_all_but(1), bad=[1])
zarr_wrong_checksum = _zarr("zarr_wrong_checksum", zarr_shard(_FIRST, checksum="wrong"), bad=range(4))


@_case
def zarr_wrong_checksum_start(path: Path) -> Case:
    shard = zarr_shard(_FIRST, checksum="wrong", location="start")
    return _zarr_case(path, shard, bad=range(4), location="start")


# What is left at the end is not the index, and its checksum says so.
_zarr("zarr_truncated", zarr_shard(_FIRST)[:-3], bad=range(4))
# The index is whole and names one chunk that is no longer there.
_zarr("zarr_truncated_start", zarr_shard(_FIRST, location="start")[:-1], good=_all_but(3), bad=[3], location="start")
_zarr("zarr_shorter_than_index", zarr_shard(_FIRST)[-67:], bad=range(4))
_zarr("zarr_shorter_than_index_start", zarr_shard(_FIRST, location="start")[:67], bad=range(4), location="start")
# zarr-python reads the fill value from it; tensorstore raises an error, and so must a mount: data may be lost.
_zarr("zarr_zero_byte_shard", b"", bad=range(4))
_zarr("zarr_zero_byte_shard_start", b"", bad=range(4), location="start")


@_case
def zarr_zero_byte_shard_with_codecs_around(path: Path) -> Case:
    document = zarr_metadata(_SHAPE, _SHARD, _INNER)
    document["codecs"].append({"name": "gzip", "configuration": {"level": 5}})
    write_json(path / "zarr.json", document)
    write_files(path, {"c/0/0": b"", "c/0/1": gzip.compress(zarr_shard(_SECOND))})
    return Case(path, dict(zip(_SECOND_KEYS, _SECOND, strict=True)), bad=frozenset(_FIRST_KEYS))


@_case
def zarr_zero_byte_shard_with_a_checksum_behind(path: Path) -> Case:
    """Only the checksum is there, or not even that."""
    document = zarr_metadata((4, 12), _SHARD, _INNER)
    document["codecs"].append({"name": "crc32c"})
    write_json(path / "zarr.json", document)
    second = zarr_shard(_SECOND)
    whole = second + struct.pack("<I", google_crc32c.value(second))
    write_files(path, {"c/0/0": b"", "c/0/1": whole, "c/0/2": bytes(4)})
    bad = {*_FIRST_KEYS, "c/0/4", "c/0/5", "c/1/4", "c/1/5"}
    return Case(path, dict(zip(_SECOND_KEYS, _SECOND, strict=True)), bad=frozenset(bad))


@_case
def zarr_nested_zero_byte_shard(path: Path) -> Case:
    """The outer index has an entry of 0 bytes for an inner shard."""
    inner_codec = zarr_metadata((4, 4), (2, 2), (1, 1))["codecs"]
    write_json(path / "zarr.json", zarr_metadata((4, 4), (4, 4), (2, 2), codecs=inner_codec))
    sound = zarr_shard([bytes([slot]) for slot in range(4)])
    write_files(path, {"c/0/0": zarr_shard([sound, b"", None, sound])})
    keys = [(y, x) for y in (0, 1) for x in (0, 1)]
    good = {f"c/{top + y}/{top + x}": bytes([i]) for top in (0, 2) for i, (y, x) in enumerate(keys)}
    bad, absent = (frozenset(f"c/{top + y}/{x0 + x}" for y, x in keys) for top, x0 in ((0, 2), (2, 0)))
    return Case(path, good, bad, absent)


_zarr("zarr_missing_shard", None, absent=range(4))
_zarr("zarr_all_slots_empty", zarr_shard([None] * 4), absent=range(4))


@_case
def zarr_garbage_without_checksum(path: Path) -> Case:
    # Nothing but the numbers themselves tells that this index is random.
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    noise = bytes(range(7, 7 + 64))
    case = _zarr_case(path, b"abcd" + noise, bad=range(4), index_codecs=index_codecs)
    write_files(path, {"c/0/1": zarr_shard(_SECOND, checksum="none")})
    return case


@_case
def zarr_bare_string_codec(path: Path) -> Case:
    # The 3.1 specification allows a codec without configuration to be just its name.
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, "crc32c"]
    return _zarr_case(path, zarr_shard(_FIRST), good=_all_but(), index_codecs=index_codecs)


@_case
def zarr_entries_outside_the_array(path: Path) -> Case:
    # Shape 3x5: of the second shard only the left slots lie in the array, and the others may say what they like.
    write_json(path / "zarr.json", zarr_metadata((3, 5), _SHARD, _INNER))
    outside = {1: (ABSENT, 4), 3: (10**9, 10**9)}
    write_files(path, {"c/0/0": zarr_shard(_FIRST), "c/0/1": zarr_shard(_SECOND, entries=outside)})
    # A shard wholly outside, too: it is no chunk of the array, nor a file to pass through.
    write_files(path, {"c/1/0": zarr_shard(_FIRST)})
    good = dict(zip(_FIRST_KEYS, _FIRST, strict=True)) | {"c/0/2": _SECOND[0], "c/1/2": _SECOND[2]}
    return Case(path, good, absent=frozenset({"c/0/3", "c/1/3", "c/2/0", "c/2/1", "c/3/0"}))


@_case
def zarr_shard_is_directory(path: Path) -> Case:
    case = _zarr_case(path, None, bad=range(4))
    (path / "c/0/0").mkdir()
    return case


@_case
def zarr_shard_is_fifo(path: Path) -> Case:
    # Whoever opens it without O_NONBLOCK waits for a writer for ever.
    case = _zarr_case(path, None, bad=range(4))
    os.mkfifo(path / "c/0/0")
    return case


@_case
def zarr_nested_inner_damage(path: Path) -> Case:
    """4x4 shards of 2x2 shards of 1x1 chunks; one of the four inner shards has a wrong checksum."""
    inner_codec = zarr_metadata((4, 4), (2, 2), (1, 1))["codecs"]
    write_json(path / "zarr.json", zarr_metadata((4, 4), (4, 4), (2, 2), codecs=inner_codec))
    inner = [[bytes([1 + 4 * outer + slot]) for slot in range(4)] for outer in range(4)]
    shards = [zarr_shard(chunks, checksum="wrong" if outer == 2 else "good") for outer, chunks in enumerate(inner)]
    write_files(path, {"c/0/0": zarr_shard(shards)})
    keys = {
        (outer, slot): f"c/{2 * (outer // 2) + slot // 2}/{2 * (outer % 2) + slot % 2}"
        for outer, slot in product(range(4), range(4))
    }
    good = {key: inner[outer][slot] for (outer, slot), key in keys.items() if outer != 2}
    return Case(path, good, bad=frozenset(key for (outer, _), key in keys.items() if outer == 2))


@_case
def zarr_deflated_shard_is_a_bomb(path: Path) -> Case:
    """A codec after sharding: the whole stored object is gzip, and the first one would decode to 8 GiB of zeros."""
    document = zarr_metadata(_SHAPE, _SHARD, _INNER)
    document["codecs"].append({"name": "gzip", "configuration": {"level": 5}})
    write_json(path / "zarr.json", document)
    write_files(path, {"c/0/0": gzip_bomb(8 << 30), "c/0/1": gzip.compress(zarr_shard(_SECOND))})
    return Case(path, dict(zip(_SECOND_KEYS, _SECOND, strict=True)), bad=frozenset(_FIRST_KEYS))


def gzip_bomb(size: int) -> bytes:
    """A gzip stream of `size` zero bytes (a whole number of 64 MiB), at a thousandth of the size.

    A run of zeros that ends on a full flush can be repeated, so only the first 64 MiB are ever compressed.
    """
    block = 64 << 20
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    run = deflate.compress(bytes(block)) + deflate.flush(zlib.Z_FULL_FLUSH)
    # The checksum is wrong: nobody gets there within bounds.
    end = deflate.flush() + struct.pack("<II", 0, size % 2**32)
    return b"\x1f\x8b\x08\0\0\0\0\0\x02\xff" + run * (size // block) + end


def write_rectilinear(path: Path, data: bytes) -> dict[str, bytes]:
    """A sharded 10x12 uint8 array on a rectilinear grid of shards, inner chunks 2x3; its presented chunks.

    Rows are cut into shards of 4, 2, 4 (written as [4, 1], 2, 4), columns of 3, 3, 6 (as [3, 2], 6), so that the
    chunks of all shards together lie on a regular grid of 2x3.
    """
    rows, columns, inner = (4, 2, 4), (3, 3, 6), (2, 3)
    grid = {
        "name": "rectilinear",
        "configuration": {"kind": "inline", "chunk_shapes": [[[4, 1], 2, 4], [[3, 2], 6]]},
    }
    write_json(path / "zarr.json", zarr_metadata((10, 12), (1, 1), inner, chunk_grid=grid))
    presented: dict[str, bytes] = {}
    for i, j in product(range(3), range(3)):
        chunks = []
        for y in range(sum(rows[:i]), sum(rows[: i + 1]), 2):
            for x in range(sum(columns[:j]), sum(columns[: j + 1]), 3):
                chunk = b"".join(data[12 * row + x : 12 * row + x + 3] for row in (y, y + 1))
                presented[f"c/{y // 2}/{x // 3}"] = chunk
                chunks.append(chunk)
        write_files(path, {f"c/{i}/{j}": zarr_shard(chunks)})
    return presented


# --------------------------------------------------------------------------------- Neuroglancer uint64 shards


@dataclass(frozen=True)
class Entry:
    """A chunk in a minishard index; without `at` it is stored where the writer is."""

    key: int
    data: bytes
    at: int | None = None
    """Offset after the shard index, if its bytes are somewhere already."""
    size: int | None = None
    """The size to claim instead of the true one."""


def minishard_index(entries: Sequence[tuple[int, int, int]]) -> bytes:
    """The decoded index of (id, offset, size): three rows of differences, all modulo 2^64."""
    ids, offsets, sizes = [], [], []
    last_id = last_end = 0
    for key, offset, size in entries:
        ids.append((key - last_id) % U64)
        offsets.append((offset - last_end) % U64)
        sizes.append(size)
        last_id, last_end = key, (offset + size) % U64
    return struct.pack(f"<{3 * len(ids)}Q", *ids, *offsets, *sizes)


def uint64_shard(
    minishards: Sequence[Sequence[Entry]],
    *,
    deflate_index: bool = False,
    gap: bytes = b"",
    junk: bytes = b"",
    indices_first: bool = False,
    ranges: Mapping[int, tuple[int, int]] | None = None,
    indices: Mapping[int, bytes] | None = None,
) -> bytes:
    """A shard file; entries keep their order in the index, so ids may be unsorted and offsets run backwards.

    `ranges` replaces (start, end) of a minishard's index and `indices` its stored bytes. With `indices_first` the
    minishard indices precede all data, which makes their length known only after a first pass.
    """

    def lay_out(start: int) -> tuple[bytes, list[list[tuple[int, int, int]]]]:
        body = bytearray()
        rows = []
        for entries in minishards:
            row = []
            for entry in entries:
                at = entry.at
                if at is None:
                    body.extend(gap)
                    at = start + len(body)
                    body.extend(entry.data)
                row.append((entry.key, at, len(entry.data) if entry.size is None else entry.size))
            rows.append(row)
        return bytes(body), rows

    def encode(rows: Sequence[Sequence[tuple[int, int, int]]]) -> list[bytes]:
        plain = [minishard_index(row) for row in rows]
        encoded = [gzip.compress(index, mtime=0) if deflate_index and index else index for index in plain]
        return [(indices or {}).get(number, index) for number, index in enumerate(encoded)]

    if indices_first and deflate_index:
        raise ValueError("the length of a compressed index depends on where it is")
    head = sum(map(len, encode(lay_out(0)[1]))) if indices_first else 0
    body, rows = lay_out(head)
    encoded = encode(rows)
    position = 0 if indices_first else len(body)
    bounds = []
    for number, index in enumerate(encoded):
        bound = (position, position + len(index)) if index else (0, 0)
        bounds.append((ranges or {}).get(number, bound))
        position += len(index)
    shard_index = b"".join(struct.pack("<QQ", *bound) for bound in bounds)
    tail = b"".join(encoded)
    return shard_index + (tail + body if indices_first else body + tail) + junk


def split_legacy(shard: Path, minishard_bits: int) -> tuple[Path, Path]:
    """Replace `N.shard` by the obsolete pair `N.index` + `N.data`."""
    content = shard.read_bytes()
    index, data = shard.with_suffix(".index"), shard.with_suffix(".data")
    index.write_bytes(content[: 16 << minishard_bits])
    data.write_bytes(content[16 << minishard_bits :])
    shard.unlink()
    return index, data


def uint64_hash(key: int, spec: Mapping[str, Json]) -> tuple[int, int]:
    """(shard, minishard) of an id."""
    value = key >> spec["preshift_bits"]
    if spec["hash"] != "identity":
        digest = mmh3.hash_bytes(value.to_bytes(8, "little"), 0, x64arch=False)
        value = int.from_bytes(digest[:8], "little")
    minishard = value & ((1 << spec["minishard_bits"]) - 1)
    return (value >> spec["minishard_bits"]) & ((1 << spec["shard_bits"]) - 1), minishard


def shard_name(shard: int, shard_bits: int) -> str:
    return f"{shard:0{max(1, -(-shard_bits // 4))}x}.shard"


def morton(cell: Sequence[int], grid: Sequence[int]) -> int:
    """The compressed Morton code: an axis gives no bits beyond those its last cell needs."""
    code = out = 0
    for bit in range(64):
        for axis, size in enumerate(grid):
            if (size - 1) >> bit:
                code |= (cell[axis] >> bit & 1) << out
                out += 1
    return code


def sharding(
    *,
    preshift: int = 0,
    hash: str = "identity",
    minishard: int = 1,
    shard: int = 0,
    index: str | None = "raw",
    data: str | None = "raw",
) -> dict[str, Json]:
    """A `sharding` object; None leaves an optional member out."""
    spec: dict[str, Json] = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": preshift,
        "hash": hash,
        "minishard_bits": minishard,
        "shard_bits": shard,
    }
    if index is not None:
        spec["minishard_index_encoding"] = index
    if data is not None:
        spec["data_encoding"] = data
    return spec


def volume_info(
    size: Sequence[int], chunk: Sequence[int], spec: Json, /, *, encoding: str = "raw", **scale: Json
) -> dict[str, Json]:
    """The `info` of a uint8 volume with the one scale `s`; `scale` replaces or adds members of it."""
    return {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": "uint8",
        "num_channels": 1,
        "scales": [
            {
                "key": "s",
                "size": list(size),
                "resolution": [1, 1, 1],
                "voxel_offset": [0, 0, 0],
                "chunk_sizes": [list(chunk)],
                "encoding": encoding,
                "sharding": spec,
                **scale,
            }
        ],
    }


# The volume of most cases: 4x4x2 uint8 in chunks of 2x2x1. The grid is 2x2x2, so ids 0..7 are x + 2y + 4z.
# One shard, `s/0.shard`, two minishards: even ids in minishard 0, odd ones in minishard 1.

_CHUNKS = {key: bytes([16 * key + i for i in range(1, 5)]) for key in range(8)}


def _volume_name(key: int) -> str:
    x, y, z = 2 * (key & 1), 2 * (key >> 1 & 1), key >> 2
    return f"s/{x}-{x + 2}_{y}-{y + 2}_{z}-{z + 1}"


def _entries(*keys: int) -> list[Entry]:
    return [Entry(key, _CHUNKS[key]) for key in keys]


_EVEN, _ODD = (0, 2, 4, 6), (1, 3, 5, 7)


def _volume_case(
    path: Path,
    shard: bytes,
    *,
    good: Iterable[int] | Mapping[int, bytes] = range(8),
    bad: Iterable[int] = (),
    absent: Iterable[int] = (),
    spec: Json = None,
    encoding: str = "raw",
) -> Case:
    write_json(path / "info", volume_info((4, 4, 2), (2, 2, 1), spec or sharding(), encoding=encoding))
    write_files(path, {"s/0.shard": shard})
    content = good if isinstance(good, Mapping) else {key: _CHUNKS[key] for key in good}
    return Case(
        path,
        {_volume_name(key): data for key, data in content.items()},
        frozenset(map(_volume_name, bad)),
        frozenset(map(_volume_name, absent)),
    )


def _volume(name: str, shard: bytes, **how: Any) -> Write:
    """Register a case of which nothing but the shard is to be told."""
    CASES[name] = lambda path: _volume_case(path, shard, **how)
    return CASES[name]


volume_sound = _volume("volume_sound", uint64_shard([_entries(*_EVEN), _entries(*_ODD)]))
_volume("volume_unsorted_ids", uint64_shard([_entries(6, 0, 4, 2), _entries(7, 5, 3, 1)]))


@_case
def volume_offsets_run_backwards(path: Path) -> Case:
    data = b"".join(_CHUNKS[key] for key in range(8))
    # The bytes of all chunks stand before both indices, which do not name them in that order.
    orders = ((6, 4, 2, 0), (1, 7, 3, 5))
    indices = [minishard_index([(key, 4 * key, 4) for key in order]) for order in orders]
    bounds = struct.pack("<4Q", 32, 32 + 96, 32 + 96, 32 + 192)
    return _volume_case(path, bounds + data + b"".join(indices))


@_case
def volume_gaps_and_junk(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], gap=b"hole", junk=b"junk after the last byte")
    return _volume_case(path, shard)


_volume("volume_indices_before_data", uint64_shard([_entries(*_EVEN), _entries(*_ODD)], indices_first=True))


@_case
def volume_shared_bytes(path: Path) -> Case:
    even = [Entry(0, _CHUNKS[0]), Entry(2, _CHUNKS[0], at=0), Entry(4, _CHUNKS[0], at=0)]
    good = {0: _CHUNKS[0], 2: _CHUNKS[0], 4: _CHUNKS[0]} | {key: _CHUNKS[key] for key in _ODD}
    return _volume_case(path, uint64_shard([even, _entries(*_ODD)]), good=good, absent=[6])


@_case
def volume_ids_in_the_wrong_minishard(path: Path) -> Case:
    # Readers look where the hash points, so ids 1 and 2 are invisible; 0 is there and in the wrong place as well.
    shard = uint64_shard([_entries(0, 1, 4, 6), [*_entries(2, 3, 5, 7), Entry(0, b"fake")]])
    return _volume_case(path, shard, good=(0, 3, 4, 5, 6, 7), absent=[1, 2])


@_case
def volume_ids_outside_the_grid(path: Path) -> Case:
    """A grid of 3x1x1 has ids of two bits: id 3 names no chunk, nor do ids beyond."""
    write_json(path / "info", volume_info((3, 1, 1), (1, 1, 1), sharding(minishard=0)))
    entries = [Entry(key, bytes([key % 251 + 1])) for key in (0, 1, 2, 3, 4, 2**63, U64 - 1)]
    write_files(path, {"s/0.shard": uint64_shard([entries])})
    good = {f"s/{x}-{x + 1}_0-1_0-1": bytes([x + 1]) for x in range(3)}
    return Case(path, good, absent=frozenset({"s/3-4_0-1_0-1", "s/4-5_0-1_0-1"}))


@_case
def volume_ids_of_55_bits(path: Path) -> Case:
    """A grid of 2^20 x 2^18 x 2^17: its last cell has the id 2^55 - 1, and no listing may count cells.

    Inode numbers are positions in the grid, so this is about as large as a grid can be.
    """
    grid = (2**20, 2**18, 2**17)
    spec = sharding(preshift=1, minishard=2, shard=9, index="gzip")
    write_json(path / "info", volume_info(grid, (1, 1, 1), spec))
    cells = [(0, 0, 0), (1, 0, 0), (5, 7, 11), (2**19, 2**17, 2**16), (2**20 - 1, 2**18 - 1, 2**17 - 1)]
    placed: dict[int, list[list[Entry]]] = {}
    good = {}
    for number, cell in enumerate(cells, 1):
        key = morton(cell, grid)
        shard, minishard = uint64_hash(key, spec)
        placed.setdefault(shard, [[], [], [], []])[minishard].append(Entry(key, bytes([number])))
        good["s/" + "_".join(f"{at}-{at + 1}" for at in cell)] = bytes([number])
    files = {f"s/{shard_name(n, 9)}": uint64_shard(rows, deflate_index=True) for n, rows in placed.items()}
    write_files(path, files)
    return Case(path, good, absent=frozenset({"s/2-3_0-1_0-1", "s/1048576-1048577_0-1_0-1"}))


@_case
def volume_empty_chunk(path: Path) -> Case:
    # Length 0 is present, not absent. The encoding is one that does not say how long a chunk is.
    even = [Entry(0, b""), *_entries(2, 4)]
    good = {0: b"", 2: _CHUNKS[2], 4: _CHUNKS[4]} | {key: _CHUNKS[key] for key in _ODD}
    return _volume_case(path, uint64_shard([even, _entries(*_ODD)]), good=good, absent=[6], encoding="of_my_own")


@_case
def volume_unknown_encoding(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)])
    return _volume_case(path, shard, encoding="an_encoding_of_tomorrow")


@_case
def volume_chunk_past_end(path: Path) -> Case:
    even = [*_entries(0, 2), Entry(4, _CHUNKS[4], at=10**9), Entry(6, _CHUNKS[6], at=0, size=2**40)]
    return _volume_case(path, uint64_shard([even, _entries(*_ODD)]), good=(0, 2, *_ODD), bad=[4, 6])


@_case
def volume_chunk_range_wraps(path: Path) -> Case:
    # The chunk starts before the file; its end, modulo 2^64, is inside.
    even = [*_entries(0, 2), Entry(4, _CHUNKS[4], at=U64 - 100, size=150)]
    return _volume_case(path, uint64_shard([even, _entries(*_ODD)]), good=(0, 2, *_ODD), bad=[4], absent=[6])


@_case
def volume_index_past_end(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], ranges={0: (16, 10**9)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN)


@_case
def volume_index_enormous(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], ranges={0: (0, 2**63)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN)


@_case
def volume_index_ends_before_it_starts(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], ranges={0: (40, 16)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN)


@_case
def volume_index_not_a_multiple_of_24(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], indices={0: bytes(95)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN)


@_case
def volume_index_not_gzip(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], deflate_index=True, indices={0: bytes(96)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN, spec=sharding(index="gzip"))


@_case
def volume_index_gzip_truncated(path: Path) -> Case:
    index = gzip.compress(minishard_index([(key, 4 * i, 4) for i, key in enumerate(_EVEN)]))
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], deflate_index=True, indices={0: index[:-9]})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN, spec=sharding(index="gzip"))


@_case
def volume_index_is_a_bomb(path: Path) -> Case:
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)], deflate_index=True, indices={0: gzip_bomb(8 << 30)})
    return _volume_case(path, shard, good=_ODD, bad=_EVEN, spec=sharding(index="gzip"))


def _deflated(replaced: Mapping[int, bytes]) -> bytes:
    """A shard with `data_encoding: gzip`, some chunks stored as given."""
    contents = {key: replaced.get(key, gzip.compress(data, mtime=0)) for key, data in _CHUNKS.items()}
    return uint64_shard([[Entry(key, contents[key]) for key in keys] for keys in (_EVEN, _ODD)])


@_case
def volume_data_is_a_bomb(path: Path) -> Case:
    good = [key for key in range(8) if key != 2]
    return _volume_case(path, _deflated({2: gzip_bomb(8 << 30)}), good=good, bad=[2], spec=sharding(data="gzip"))


@_case
def volume_data_gzip_damaged(path: Path) -> Case:
    whole = gzip.compress(_CHUNKS[2], mtime=0)
    flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
    replaced = {1: whole[:-9], 2: flipped, 4: b"not gzip at all"}
    good = (0, 3, 5, 6, 7)
    return _volume_case(path, _deflated(replaced), good=good, bad=[1, 2, 4], spec=sharding(data="gzip"))


@_case
def volume_data_gzip_of_two_members(path: Path) -> Case:
    # The last four bytes, which usually are the decoded length, here are the length of the second half.
    halves = gzip.compress(_CHUNKS[2][:2], mtime=0) + gzip.compress(_CHUNKS[2][2:], mtime=0)
    return _volume_case(path, _deflated({2: halves}), spec=sharding(data="gzip"))


_volume("volume_shorter_than_shard_index", uint64_shard([[], []])[:8], good=(), bad=range(8))
_volume("volume_zero_byte_shard", b"", good=(), bad=range(8))


@_case
def volume_legacy_index_of_zero_bytes(path: Path) -> Case:
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]), good=(), bad=range(8))
    split_legacy(path / "s/0.shard", minishard_bits=1)
    (path / "s/0.index").write_bytes(b"")
    return case


@_case
def volume_legacy_data_of_zero_bytes(path: Path) -> Case:
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]), good=(), bad=range(8))
    split_legacy(path / "s/0.shard", minishard_bits=1)
    (path / "s/0.data").write_bytes(b"")
    return case


@_case
def volume_shard_beyond_its_bits(path: Path) -> Case:
    # With no shard bits only 0.shard is a shard; 1.shard and 00.shard merely look like one.
    case = _volume_case(path, uint64_shard([_entries(0, 2), _entries(1)]), good=(0, 1, 2), absent=[3, 4, 5, 6, 7])
    shard = uint64_shard([_entries(4, 6), _entries(3, 5, 7)])
    write_files(path, {"s/1.shard": shard, "s/00.shard": shard, "s/g.shard": shard})
    return case


@_case
def volume_legacy_pair(path: Path) -> Case:
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]))
    split_legacy(path / "s/0.shard", minishard_bits=1)
    return case


@_case
def volume_legacy_pair_beside_shard(path: Path) -> Case:
    # `.shard` wins.
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]))
    split_legacy(path / "s/0.shard", minishard_bits=1)
    fewer = uint64_shard([_entries(0), _entries(7)])
    return _volume_case(case.path, fewer, good=(0, 7), absent=[1, 2, 3, 4, 5, 6])


@_case
def volume_legacy_index_without_data(path: Path) -> Case:
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]), good=(), bad=range(8))
    split_legacy(path / "s/0.shard", minishard_bits=1)[1].unlink()
    return case


@_case
def volume_legacy_data_without_index(path: Path) -> Case:
    case = _volume_case(path, uint64_shard([_entries(*_EVEN), _entries(*_ODD)]), good=(), bad=range(8))
    split_legacy(path / "s/0.shard", minishard_bits=1)[0].unlink()
    return case


@_case
def volume_minimal_sharding_object(path: Path) -> Case:
    # Both encodings default to raw, and Neuroglancer compares names without regard to case.
    shard = uint64_shard([_entries(*_EVEN), _entries(*_ODD)])
    return _volume_case(path, shard, spec=sharding(hash="IDENTITY", index=None, data=None))


# ---------------------------------------------------------------------------------------- hostile metadata

SECRET = b"nobody asked for this file\n"


def _hostile(name: str, damage: Callable[[Path], None]) -> None:
    """Register a case: a group with a sound array `good` beside whatever `damage` puts into `evil`."""

    def write(path: Path) -> Case:
        root = path / "root"
        write_json(root / "zarr.json", group_document(title="one good array, one evil one"))
        good = zarr_sound(root / "good")
        write_files(path, {"secret": SECRET})
        (root / "evil").mkdir()
        damage(root / "evil")
        return Case(root, {f"good/{name}": data for name, data in good.good.items()})

    HOSTILE[name] = write


def _document(name: str, file: str, document: Json) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    _hostile(name, lambda path: write_files(path, {file: text.encode()}))


def _zarr_documents() -> dict[str, Json]:
    def grid(*shape: Json) -> Json:
        return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}

    def plain(**members: Json) -> Json:
        return {**zarr_metadata(_SHAPE, _SHARD, _INNER), **members}

    nested: Json = [{"name": "bytes"}]
    for _ in range(60):
        nested = zarr_metadata((1, 1), (1, 1), (1, 1), codecs=nested)["codecs"]
    huge = zarr_metadata((2**63, 2**63), (2**62, 2**62), (2**61, 2**61))
    rectilinear = {
        "name": "rectilinear",
        "configuration": {"kind": "inline", "chunk_shapes": [[[2, 2**62]], 4]},
    }
    return {
        "shape_2_63": huge,
        "shape_beyond_64_bits": zarr_metadata((2**64, 10**40), (4, 4), (2, 2)),
        "tera_slots_per_shard": zarr_metadata((2**40, 2**40), (2**20, 2**20), (1, 1)),
        "slots_overflow": zarr_metadata((2**62, 2**62), (2**40, 2**40), (1, 1)),
        "many_shards": zarr_metadata((2**60, 2**60), (2, 2), (1, 1)),
        "negative_shape": plain(shape=[-4, 8]),
        "float_shape": plain(shape=[4.0, 8.5]),
        "string_shape": plain(shape="4x8"),
        "null_shape": plain(shape=None),
        "boolean_shape": plain(shape=[True, False]),
        "rank_differs": plain(shape=[4, 8, 12]),
        "rank_1000": zarr_metadata([4] * 1000, [4] * 1000, [2] * 1000),
        "zero_shard": plain(chunk_grid=grid(0, 0)),
        "zero_inner": zarr_metadata(_SHAPE, _SHARD, (0, 2)),
        "negative_inner": zarr_metadata(_SHAPE, _SHARD, (-2, 2)),
        "inner_does_not_divide": zarr_metadata(_SHAPE, _SHARD, (3, 3)),
        "inner_larger_than_shard": zarr_metadata(_SHAPE, _SHARD, (8, 8)),
        "grid_is_list": plain(chunk_grid=[]),
        "grid_is_null": plain(chunk_grid=None),
        "rectilinear_run_2_62": plain(chunk_grid=rectilinear, shape=[2**63 - 2, 8]),
        "codecs_is_object": plain(codecs={"name": "sharding_indexed"}),
        "codecs_is_null": plain(codecs=None),
        "codec_is_number": plain(codecs=[1, 2.5, None, []]),
        "sharding_without_configuration": plain(codecs=[{"name": "sharding_indexed"}]),
        "sharding_configuration_is_list": plain(codecs=[{"name": "sharding_indexed", "configuration": []}]),
        "unknown_codec_before": plain(codecs=[{"name": "example.mystery"}, *plain()["codecs"]]),
        "two_sharding_codecs": plain(codecs=plain()["codecs"] * 2),
        "transpose_not_a_permutation": plain(
            codecs=[{"name": "transpose", "configuration": {"order": [0, 0]}}, *plain()["codecs"]]
        ),
        "transpose_is_string": plain(
            codecs=[{"name": "transpose", "configuration": {"order": "F"}}, *plain()["codecs"]]
        ),
        "index_compressed": zarr_metadata(_SHAPE, _SHARD, _INNER, index_codecs=[{"name": "bytes"}, {"name": "gzip"}]),
        "index_codecs_empty": zarr_metadata(_SHAPE, _SHARD, _INNER, index_codecs=[]),
        "index_location_unknown": json.loads(json.dumps(plain()).replace('"end"', '"middle"')),
        "key_encoding_unknown": plain(chunk_key_encoding={"name": "example.secret"}),
        "key_separator_is_path": plain(chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}}),
        "key_encoding_is_number": plain(chunk_key_encoding=7),
        "storage_transformer": plain(storage_transformers=[{"name": "example.mystery"}]),
        "nested_60_levels": {**plain(), "shape": [1, 1], "chunk_grid": grid(1, 1), "codecs": nested},
        "node_type_unknown": plain(node_type="tensor"),
        "zarr_format_is_string": plain(zarr_format="3"),
        "zarr_format_is_true": plain(zarr_format=True),
        "document_is_list": [],
        "document_is_null": "null",
        "document_is_empty": "",
        "document_is_cut": json.dumps(plain())[:-7],
        "document_has_nan": json.dumps(plain()).replace('"fill_value": 0', '"fill_value": NaN'),
        "document_has_duplicates": json.dumps(plain())[:-1] + ', "shape": [4, 8], "shape": [8, 4]}',
        "number_of_100k_digits": json.dumps(plain()).replace('"fill_value": 0', '"fill_value": ' + "9" * 100_000),
        "exponent_1e999999999": json.dumps(plain()).replace('"shape": [4', '"shape": [1e999999999'),
        "deep_lists": "[" * 100_000 + "]" * 100_000,
        "deep_attributes": json.dumps(plain()).replace(
            '"attributes": {}', '"attributes": ' + '{"a":' * 100_000 + "1" + "}" * 100_000
        ),
        "surrogate_attribute": json.dumps(plain()).replace('"attributes": {}', '"attributes": {"a": "\\ud800"}'),
        "consolidated_is_list": {**group_document(), "consolidated_metadata": []},
        "consolidated_wrong_types": {
            **group_document(),
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": {"a": 1, "../good": plain(), "/": None},
            },
        },
    }


def _volume_documents() -> dict[str, Json]:
    def info(spec: Json = None, **scale: Json) -> Json:
        return volume_info((4, 4, 2), (2, 2, 1), sharding() if spec is None else spec, **scale)

    def top(**members: Json) -> Json:
        return {**info(), **members}

    return {
        "minishard_bits_60": info(sharding(minishard=60)),
        "minishard_bits_32_shard_bits_32": info(sharding(minishard=32, shard=32)),
        "bits_beyond_64": info(sharding(minishard=40, shard=40)),
        "bits_negative": info(sharding(minishard=-1, shard=-1)),
        "bits_2_63": info(sharding(minishard=2**63, shard=2**63)),
        "bits_float": info({**sharding(), "minishard_bits": 1.5}),
        "bits_string": info({**sharding(), "shard_bits": "2"}),
        "preshift_1000": info(sharding(preshift=1000)),
        "hash_unknown": info(sharding(hash="sha256")),
        "sharding_is_list": info([]),
        "sharding_is_string": info("yes"),
        "sharding_type_unknown": info({**sharding(), "@type": "neuroglancer_uint64_sharded_v9"}),
        "sharding_extra_member": info({**sharding(), "surprise": 1}),
        "index_encoding_unknown": info(sharding(index="lzma")),
        "size_2_63": info(size=[2**63, 2**63, 2**63]),
        "size_beyond_64_bits": info(size=[10**40, 4, 2]),
        "size_negative": info(size=[-4, 4, 2]),
        "size_rank_2": info(size=[4, 4]),
        "size_is_null": info(size=None),
        "chunk_zero": info(chunk_sizes=[[0, 0, 0]]),
        "chunk_sizes_empty": info(chunk_sizes=[]),
        "chunk_sizes_two": info(chunk_sizes=[[2, 2, 1], [1, 1, 1]]),
        "chunk_sizes_numbers": info(chunk_sizes=[2, 2, 1]),
        "offset_strings": info(voxel_offset=["a", "b", "c"]),
        "offset_2_63": info(voxel_offset=[2**63, -(2**63), 10**30]),
        "code_beyond_64_bits": info(size=[2**40, 2**40, 2**40], chunk_sizes=[[1, 1, 1]]),
        "key_leaves_the_root": info(key="../../secret"),
        "key_climbs": info(key="../" * 40 + "etc"),
        "key_absolute": info(key="/etc"),
        "key_is_the_root": info(key="."),
        "key_is_empty": info(key=""),
        "key_has_nul": info(key="a\0b"),
        "key_is_long": info(key="k" * 5000),
        "key_is_number": info(key=7),
        "key_is_info": info(key="info"),
        "key_missing": {**info(), "scales": [{"size": [4, 4, 2], "sharding": sharding()}]},
        "keys_collide": {**info(), "scales": info()["scales"] * 2},
        "scales_is_object": top(scales={}),
        "scales_of_numbers": top(scales=[1, None, "a"]),
        "channels_2_63": top(num_channels=2**63),
        "data_type_unknown": top(data_type="quaternion"),
        "many_scales": top(scales=[{**info()["scales"][0], "key": f"s{n}"} for n in range(20_000)]),
        "info_deep": json.dumps(info())[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "info_is_cut": json.dumps(info())[:-3],
        "info_is_binary": "\x00\xff\x00",
    }


for _name, _doc in _zarr_documents().items():
    _document(f"zarr_{_name}", "zarr.json", _doc)
for _name, _doc in _volume_documents().items():
    _document(f"volume_{_name}", "info", _doc)


def _hostile_tree(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    _hostile(damage.__name__, damage)
    return damage


@_hostile_tree
def huge_document(path: Path) -> None:
    """192 MiB of JSON with an attribute that is one list of numbers."""
    head, tail = json.dumps(zarr_metadata(_SHAPE, _SHARD, _INNER)).split('"attributes": {}')
    with (path / "zarr.json").open("w") as file:
        file.write(head + '"attributes": {"a": [0')
        for _ in range(192):
            file.write(",1234567" * (2**20 // 8))
        file.write("]}" + tail)


@_hostile_tree
def document_is_directory(path: Path) -> None:
    (path / "zarr.json").mkdir()


@_hostile_tree
def document_is_fifo(path: Path) -> None:
    os.mkfifo(path / "zarr.json")


@_hostile_tree
def document_is_device(path: Path) -> None:
    (path / "zarr.json").symlink_to("/dev/zero")


@_hostile_tree
def document_is_symlink_to_secret(path: Path) -> None:
    (path / "zarr.json").symlink_to("../../secret")


@_hostile_tree
def symlink_loop(path: Path) -> None:
    (path / "zarr.json").symlink_to("info")
    (path / "info").symlink_to("zarr.json")
    (path / "self").symlink_to(".")


@_hostile_tree
def shard_is_symlink_to_secret(path: Path) -> None:
    """A stored range of a file outside the root, claimed to be a chunk: the file is read as a shard."""
    write_json(path / "zarr.json", zarr_metadata(_SHAPE, _SHARD, _INNER))
    (path / "c/0").mkdir(parents=True)
    (path / "c/0/0").symlink_to("../../../../secret")
    (path / "c/0/1").symlink_to("/dev/zero")


@_hostile_tree
def directory_is_symlink_out(path: Path) -> None:
    (path / "up").symlink_to("../..")
    (path / "etc").symlink_to("/etc")


def chunk_count(shape: Sequence[int], inner: Sequence[int]) -> int:
    """Cells of a grid, for tests that count names."""
    return prod(-(-extent // size) for extent, size in zip(shape, inner, strict=True))
