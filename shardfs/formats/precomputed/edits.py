"""Translates info documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shardfs.formats.create_rules import MAX_CHUNKS, Rule, Sharding
from shardfs.formats.documents import (
    UNFIT,
    integer,
    integers,
    listed,
    naming,
    parse_written,
    require_rank,
    require_same,
)
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

VOLUME, ANNOTATIONS = "neuroglancer_multiscale_volume", "neuroglancer_annotations_v1"
MESHES, SKELETONS = "neuroglancer_multilod_draco", "neuroglancer_skeletons"

LISTS = {VOLUME: {"scale": "scales"}, ANNOTATIONS: {"relationships": "relationships", "spatial": "spatial"}}
"""The lists of parts in documents of each type, by the kind of their parts."""

GRIDS = {"scale": "size", "spatial": "grid_shape"}
"""The kinds of parts whose chunks are numbered in a grid, with the member that determines the grid."""

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
        with naming(INFO):
            self.parts = list(self._listed())
        self.by_name = {part.name: part.value for part in self.parts}

    def _listed(self) -> Iterator[InfoPart]:
        if self.type in (MESHES, SKELETONS):
            yield _part("whole", (), self.doc)
        if self.type == ANNOTATIONS and "by_id" in self.doc:
            yield _part("by_id", ("by_id",), self.doc["by_id"])
        for kind, member in LISTS.get(self.type, {}).items():
            for i, value in enumerate(listed(self.doc.get(member, None if kind == "scale" else []), member)):
                yield _part(kind, (member, i), value)


def _part(kind: str, at: Path, value: Any) -> InfoPart:
    if not isinstance(value, dict):
        raise ValueError(f"{at[0]} should hold objects, not {value!r:.80}")
    key = ""  # without a valid key, the part cannot be sharded
    with suppress(ValueError):
        key = key_path(value.get("key"))
    return InfoPart((kind, key), at, value)


class InfoPair(NamedTuple):
    """A stored info document, and the document that the mount shows for it."""

    stored: Info
    shown: Info

    def hidden(self, name: Name) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The stored part and its `sharding`, if the mount shows the part unsharded; else None."""
        part, shown_part = self.stored.by_name.get(name, {}), self.shown.by_name.get(name, {})
        return (part, part["sharding"]) if "sharding" in part.keys() - shown_part.keys() else None


@dataclass(frozen=True)
class InfoEdits:
    """The `Edits` of info documents.

    Args:
        open: the dataset that an info document describes.
    """

    open: Callable[[bytes], Dataset | None]

    def _source(self, raw: bytes | None) -> InfoPair | None:
        """The stored and the shown document; None if the mount shows no part unsharded."""
        with suppress(ValueError, CorruptShardError):  # the mount shows a damaged document unchanged, for repairs
            if raw is not None and (dataset := self.open(raw)) is not None and INFO in dataset.documents:
                return InfoPair(Info(raw), Info(dataset.documents[INFO]))
        return None

    def edited(self, name: str, raw: bytes | None, new: bytes, rule: Rule | None = None) -> bytes:
        """The document to store when a client writes `new`: see `Edits`."""
        source = self._source(raw)
        if source is None:
            info = _info(new)
            return new if info is None else self._sharded(info, new, None, rule)
        info = Info(new)
        if raw is not None and info.doc == source.shown.doc:
            return raw
        with naming(INFO):
            require_same(info.type, source.stored.type, "@type")
        return self._sharded(info, new, source, rule)

    def sharding(self, documents: Mapping[str, bytes]) -> Sharding | None:
        """The stored document, if the mount shows parts of it unsharded: see `Edits`."""
        return None if self._source(documents.get(INFO)) is None else Sharding("precomputed", documents)

    def sharded(self, name: str, new: bytes, like: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The document of a new dataset with shards: see `Edits`. None if no part is sharded.

        A rule shards parts keyed by ids only if it gives numbers of bits, since the number of ids is unknown. A deleted
        dataset shards parts with the same keys. A part with other chunks gets shards of as many chunks.
        """
        info = _info(new)
        if info is None:
            return None
        if isinstance(like, Rule):
            sharded = self._sharded(info, new, None, like)
            return None if sharded == new else {INFO: sharded}
        source = self._source(like.documents[INFO])
        if source is None or info.type != source.stored.type:
            return None
        if info.doc == source.shown.doc:
            return {INFO: like.documents[INFO]}
        return {INFO: self._sharded(info, new, source, None, again=True)}

    def _sharded(
        self, info: Info, new: bytes, source: InfoPair | None, rule: Rule | None, *, again: bool = False
    ) -> bytes:
        """The document with the source's `sharding` in existing parts, and with the rule's in new parts.

        `again` means that no chunks are stored: a part that differs from the source gets an adapted `sharding`.
        """
        changes: dict[Path, Any] = {}
        with naming(INFO):
            for part in info.parts:
                written = part.value.get("sharding")
                before = source.stored.by_name.get(part.name) if source is not None else None
                hidden = source.hidden(part.name) if source is not None else None
                if written is not None and written != (before or {}).get("sharding"):
                    raise ValueError(
                        f"{part}: sharding describes shards, but a mount takes single chunks; "
                        "create it without shards (the mount option --create shards it in the source)"
                    )
                spec = written
                if source is not None and hidden is not None:
                    spec = _kept(info, source.stored, part, *hidden, again=again)
                elif before is None and rule is not None:
                    spec = _new_spec(info, part, rule)
                if spec != written:
                    changes[*part.at, "sharding"] = spec
            if changes:
                new = changed(new, changes)
                self._require_understood(new, changes)
        return new

    def _require_understood(self, new: bytes, parts: Iterable[Path]) -> None:
        """Raise ValueError unless the mount will show all these parts of the new document unsharded."""
        try:
            dataset = self.open(new)
        except CorruptShardError as e:
            raise ValueError(e.why) from None
        doc: Any = json.loads(dataset.documents.get(INFO, new)) if dataset is not None else {}
        for *at, member in parts:
            if member in reduce(getitem, at, doc):
                problems = [problem.why for problem in dataset.problems] if dataset is not None else []
                raise ValueError("; ".join(problems) or f"{'.'.join(map(str, at))}: it cannot be sharded")


def _info(new: bytes) -> Info | None:
    """The parsed info document; None if no part of it can be sharded."""
    with suppress(ValueError):
        info = Info(new)
        return info if info.parts else None
    return None


# ---- what chunks contradict ----


def _kept(info: Info, source: Info, part: InfoPart, old: dict[str, Any], spec: Any, *, again: bool) -> Any:
    """The `sharding` of an existing part. Raise one of `UNFIT` if the document contradicts stored chunks."""
    kind, new = part.name[0], part.value
    try:
        if kind == "scale":
            for member in ("data_type", "num_channels"):
                require_same(info.doc.get(member), source.doc.get(member), member)
            for member in MEMBERS:
                require_same(new.get(member), old.get(member), member)
            _require_size(new, old)
        if kind in GRIDS:
            _require_codes(_grid(kind, new), _grid(kind, old), GRIDS[kind])
    except UNFIT:
        if not again:
            raise
        inside = spec.get("preshift_bits", 0) + spec["minishard_bits"]
        return {**spec, "shard_bits": max(MortonCode(_grid(kind, new)).bits - inside, 0)}
    return spec


def _require_size(new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise ValueError if the new size of a scale would change the shape of stored chunks."""
    sizes = [integers(part["size"], "size", 0) for part in (new, old)]
    require_rank(sizes[0], 3, "size")
    for after, before, chunk in zip(*sizes, old["chunk_sizes"][0], strict=True):
        if after != before and min(after, before) % chunk:
            raise ValueError(
                f"size {list(sizes[1])} cannot become {list(sizes[0])}: chunks end with the volume, and would be cut "
                f"anew; along each axis that changes, the smaller size should be a multiple of {chunk}"
            )


def _require_codes(new: Coords, old: Coords, member: str) -> None:
    require_rank(new, len(old), member)
    if not MortonCode(new).agrees_with(MortonCode(old)):
        raise ValueError(
            f"{member}: a grid of {list(old)} chunks cannot become one of {list(new)}, which would change their ids; "
            "keep it, or write a new array"
        )


def _grid(kind: str, part: Mapping[str, Any]) -> Coords:
    """The numbers of chunks of a scale along its axes, or of cells of a level of annotations."""
    if kind == "spatial":
        return integers(part["grid_shape"], "grid_shape", 1)
    size, chunk = integers(part["size"], "size", 0), integers(part["chunk_sizes"][0], "chunk_sizes", 1)
    return tuple(ceil_div(s, c) for s, c in zip(size, chunk, strict=True))


# ---- new parts ----


def _new_spec(info: Info, part: InfoPart, rule: Rule) -> dict[str, Any] | None:
    """The `sharding` of a new part by the rule; None for none. Raise one of `UNFIT` if it cannot be sharded."""
    kind, numbers, total, inside, hashed = part.name[0], rule.numbers, 0, 0, "identity"
    encoding = str(part.value.get("encoding", "")).lower()
    if kind == "scale" and len(listed(part.value["chunk_sizes"], "chunk_sizes")) != 1:
        raise ValueError("a scale with several chunk_sizes cannot be sharded; write a scale for each of them")
    if kind in GRIDS:
        total = MortonCode(_grid(kind, part.value)).bits
        chunks = _chunks_per_shard(info, part.value, rule) if kind == "scale" else MAX_CHUNKS
        inside = min(chunks.bit_length() - 1, total)
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


def _chunks_per_shard(info: Info, scale: Mapping[str, Any], rule: Rule) -> int:
    if rule.chunks_per_shard:
        return math.prod(rule.chunks_per_shard)
    voxels = math.prod(integers(scale["chunk_sizes"][0], "chunk_sizes", 1))
    channels = integer(info.doc.get("num_channels", 1), "num_channels", 1)
    size = voxels * channels * np.dtype(str(info.doc["data_type"]).lower()).itemsize
    return rule.most(size)
