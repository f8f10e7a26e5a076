"""Translates info documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shardfs.formats.create_rules import MAX_BYTES, MAX_CHUNKS, Rule
from shardfs.formats.documents import UNFIT, integers, listed, parse_written, reason, require_rank, require_same
from shardfs.formats.json_text import changed
from shardfs.formats.precomputed.parts import INFO, key_path
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import MortonCode, ceil_div
from shardfs.shards.byte_layouts.uint64_spec import TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardfs.formats.json_text import Path
    from shardfs.model.dataset import Dataset
    from shardfs.model.values import Coords

    Open: TypeAlias = Callable[[bytes], Dataset | None]

VOLUME, ANNOTATIONS = "neuroglancer_multiscale_volume", "neuroglancer_annotations_v1"
MESHES, SKELETONS = "neuroglancer_multilod_draco", "neuroglancer_skeletons"

MEMBERS = ("chunk_sizes", "encoding", "compressed_segmentation_block_size")
"""The members of a scale on which stored chunks depend. `voxel_offset` changes only the names of chunks, not their ids.
"""

COMPRESSIBLE = ("raw", "compressed_segmentation")
"""The encodings whose chunks gzip makes smaller.

By default, chunks in other encodings and meshes are stored without gzip, as by other writers.
"""

MINISHARD_BITS = 9
"""The largest default of `preshift_bits`: a minishard of at most 512 chunks, whose index takes one read.

tensorstore uses the same number.
"""


Name: TypeAlias = "tuple[str, str]"
"""The kind of a part, and its key."""


class InfoPart(NamedTuple):
    """A part of an info document that may be sharded, with its path in the document."""

    name: Name
    at: Path
    value: dict[str, Any]

    def __str__(self) -> str:
        return " ".join(filter(None, self.name))


class Info:
    """An info document and its parts. Raise ValueError, with the reason, if the parts are not those of its type.

    `type` is "" for files named "info" of other programs.
    """

    def __init__(self, raw: bytes) -> None:
        self.doc = parse_written(INFO, raw)
        self.type = str(self.doc.get("@type", VOLUME if "scales" in self.doc else ""))
        self.parts = [InfoPart((kind, _key(value)), at, value) for kind, at, value in self._listed()]
        self.by_name = {part.name: part.value for part in self.parts}

    def _listed(self) -> Iterator[tuple[str, Path, dict[str, Any]]]:
        found: list[tuple[str, Path, Any]] = []
        if self.type == VOLUME:
            found = [("scale", ("scales", i), v) for i, v in enumerate(listed(self.doc.get("scales"), "scales"))]
        elif self.type in (MESHES, SKELETONS):
            found = [("whole", (), self.doc)]
        elif self.type == ANNOTATIONS:
            if "by_id" in self.doc:
                found = [("by_id", ("by_id",), self.doc["by_id"])]
            for member in ("relationships", "spatial"):
                values = listed(self.doc.get(member, []), member)
                found += [(member, (member, i), v) for i, v in enumerate(values)]
        for kind, at, value in found:
            if not isinstance(value, dict):
                raise ValueError(f"{INFO}: {at[0]} should hold objects, not {value!r:.80}")
            yield kind, at, value


def _key(part: Mapping[str, Any]) -> str:
    try:
        return key_path(part.get("key"))
    except ValueError:
        return ""  # no key, or outside of the directory: the part cannot be sharded


class InfoPair(NamedTuple):
    """A stored info document, and the document that the mount shows for it."""

    stored: Info
    shown: Info

    def hidden(self, name: Name) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The stored part and its `sharding`, if the mount shows the part unsharded; else None."""
        stored, shown = self.stored.by_name.get(name, {}), self.shown.by_name.get(name, {})
        return (stored, stored["sharding"]) if "sharding" in stored.keys() - shown.keys() else None


def _source(open_: Open, raw: bytes | None) -> InfoPair | None:
    """The stored and the shown document; None if the mount shows no part unsharded."""
    if raw is None:
        return None
    try:
        found = open_(raw)
        shown = found.documents.get(INFO) if found is not None else None
        return None if shown is None else InfoPair(Info(raw), Info(shown))
    except (ValueError, CorruptShardError):
        return None  # the mount shows a damaged document unchanged, so that clients can repair it


def is_sharded(open_: Open, raw: bytes | None) -> bool:
    """Whether the mount shows parts of this document unsharded."""
    return _source(open_, raw) is not None


def edited(open_: Open, raw: bytes | None, new: bytes, rule: Rule | None) -> bytes:
    """The document to store when a client writes `new`: see `Format.edit`."""
    source = _source(open_, raw)
    if source is None:
        info = _info(new)
        return new if info is None else _sharded(open_, info, new, None, rule)
    info = Info(new)
    if info.doc == source.shown.doc:
        return raw or b""
    require_same(info.type, source.stored.type, "@type")
    return _sharded(open_, info, new, source, rule)


def sharded_by_rule(open_: Open, new: bytes, rule: Rule) -> bytes | None:
    """The document of the new dataset, sharded by the rule: see `Format.shard`. None if no part is sharded.

    Parts keyed by ids are sharded only if the rule gives numbers of bits, since the number of ids is unknown.
    """
    info = _info(new)
    made = new if info is None else _sharded(open_, info, new, None, rule)
    return None if made == new else made


def sharded_as_before(open_: Open, new: bytes, raw: bytes) -> bytes | None:
    """The document of the new dataset, sharded as in the deleted document `raw`: see `Format.shard`.

    Parts with the same keys are sharded again. A part with other chunks gets shards of as many chunks.
    """
    source, info = _source(open_, raw), _info(new)
    if source is None or info is None or info.type != source.stored.type:
        return None
    return raw if info.doc == source.shown.doc else _sharded(open_, info, new, source, None, again=True)


def _info(new: bytes) -> Info | None:
    """The parsed info document; None if no part of it can be sharded."""
    try:
        info = Info(new)
    except ValueError:
        return None
    return info if info.parts else None


def _sharded(
    open_: Open, info: Info, new: bytes, source: InfoPair | None, rule: Rule | None, *, again: bool = False
) -> bytes:
    """The document with the source's `sharding` in existing parts, and with the rule's in new parts.

    `again` means that no chunks are stored: a part that differs from the source gets an adapted `sharding`.
    """
    values: dict[Path, Any] = {}
    try:
        for part in info.parts:
            told = part.value.get("sharding")
            before = source.stored.by_name.get(part.name) if source is not None else None
            hidden = source.hidden(part.name) if source is not None else None
            if told is not None and told != (before or {}).get("sharding"):
                raise ValueError(f"{part}: the mount shows chunks one by one; create it without shards (--create)")
            spec = told
            if source is not None and hidden is not None:
                spec = _kept(info, source.stored, part, *hidden, again=again)
            elif before is None and rule is not None:
                spec = _new_spec(info, part, rule)
            if spec != told:
                values[*part.at, "sharding"] = spec
        if values:
            new = changed(new, values)
            _require_understood(open_, new, values)
    except UNFIT as e:
        raise ValueError(f"{INFO}: {reason(e)}") from e
    return new


def _require_understood(open_: Open, made: bytes, parts: Iterable[Path]) -> None:
    """Raise ValueError unless the mount will show all these parts of the new document unsharded."""
    try:
        found = open_(made)
    except CorruptShardError as e:
        raise ValueError(e.why) from None
    doc: Any = json.loads(found.documents.get(INFO, made)) if found is not None else {}
    for *at, member in parts:
        if member in reduce(getitem, at, doc):
            why = [problem.why for problem in found.problems] if found is not None else []
            raise ValueError("; ".join(why) or "it cannot be sharded")


# ---- what chunks contradict ----


def _kept(info: Info, stored: Info, part: InfoPart, old: dict[str, Any], spec: Any, *, again: bool) -> Any:
    """The `sharding` of an existing part. Raise one of `UNFIT` if the document contradicts stored chunks."""
    kind, new = part.name[0], part.value
    try:
        if kind == "scale":
            for member in ("data_type", "num_channels"):
                require_same(info.doc.get(member), stored.doc.get(member), member)
            for member in MEMBERS:
                require_same(new.get(member), old.get(member), member)
            _require_size(new, old)
        elif kind == "spatial":
            _require_codes(_cells(new), _cells(old), "grid_shape")
    except UNFIT:
        if not again:
            raise
        inside = spec.get("preshift_bits", 0) + spec["minishard_bits"]
        total = MortonCode(_grid(new) if kind == "scale" else _cells(new)).bits
        return {**spec, "shard_bits": max(total - inside, 0)}
    return spec


def _cells(level: Mapping[str, Any]) -> Coords:
    return integers(level["grid_shape"], "grid_shape", 1)


def _require_size(new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise ValueError if the new size of a scale would change the shape or the id of stored chunks."""
    sizes = [integers(part["size"], "size", 0) for part in (new, old)]
    require_rank(sizes[0], 3, "size")
    for after, before, chunk in zip(*sizes, old["chunk_sizes"][0], strict=True):
        if after != before and min(after, before) % chunk:
            raise ValueError(
                f"size {list(sizes[1])} cannot become {list(sizes[0])}: chunks end with the volume, and would be cut "
                "anew where the smaller size is no multiple of the chunk's"
            )
    _require_codes(_grid(new), _grid(old), "size")


def _require_codes(new: Coords, old: Coords, what: str) -> None:
    require_rank(new, len(old), what)
    if not MortonCode(new).agrees_with(MortonCode(old)):
        raise ValueError(f"a grid of {list(old)} chunks cannot become one of {list(new)}: it would change their ids")


def _grid(scale: Mapping[str, Any]) -> Coords:
    size, chunk = integers(scale["size"], "size", 0), integers(scale["chunk_sizes"][0], "chunk_sizes", 1)
    return tuple(ceil_div(s, c) for s, c in zip(size, chunk, strict=True))


# ---- new parts ----


def _new_spec(info: Info, part: InfoPart, rule: Rule) -> dict[str, Any] | None:
    """The `sharding` of a new part by the rule; None for none. Raise one of `UNFIT` if it cannot be sharded."""
    kind, numbers, total, inside, hashed = part.name[0], rule.numbers, 0, 0, "identity"
    encoding = str(part.value.get("encoding", "")).lower()
    if kind == "scale":
        if len(listed(part.value["chunk_sizes"], "chunk_sizes")) != 1:
            raise ValueError("a scale with several chunk_sizes cannot be sharded")
        total, inside = MortonCode(_grid(part.value)).bits, _bits_inside(info, part.value, rule)
    elif kind == "spatial":
        total = MortonCode(_cells(part.value)).bits
        inside = min(total, MAX_CHUNKS.bit_length() - 1)
    elif numbers:
        hashed = "murmurhash3_x86_128"
    else:
        return None
    plain = info.type == MESHES or (kind == "scale" and encoding not in COMPRESSIBLE)
    preshift = numbers.get("preshift_bits", min(inside, MINISHARD_BITS))
    minishard = numbers.get("minishard_bits", max(inside - preshift, 0))
    return {
        "@type": TYPE,
        "preshift_bits": preshift,
        "hash": rule.words.get("hash", hashed),
        "minishard_bits": minishard,
        "shard_bits": numbers.get("shard_bits", max(total - preshift - minishard, 0)),
        "minishard_index_encoding": rule.words.get("minishard_index_encoding", "gzip"),
        "data_encoding": rule.words.get("data_encoding", "raw" if plain else "gzip"),
    }


def _bits_inside(info: Info, scale: Mapping[str, Any], rule: Rule) -> int:
    """The number of bits of a chunk's id that distinguish the chunks of one shard."""
    told = math.prod(rule.chunks_per_shard)
    if not rule.chunks_per_shard:
        voxels = math.prod(integers(scale["chunk_sizes"][0], "chunk_sizes", 1))
        channels = integers([info.doc.get("num_channels", 1)], "num_channels", 1)[0]
        size = voxels * channels * np.dtype(str(info.doc["data_type"]).lower()).itemsize
        told = max(min(MAX_CHUNKS, MAX_BYTES // size), 1)
    return min(told.bit_length() - 1, MortonCode(_grid(scale)).bits)
