"""Documents of the draft of 2022 that are written through a mount: from what is shown back to what is stored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from shardfs.formats.documents import UNFIT, intelligible, parse_written, reason, require_same, unsharded
from shardfs.formats.json_text import changed
from shardfs.formats.zarr_transformer.stored import CONSOLIDATED, chunk_grid, item_size, split_transformers, unshard
from shardfs.model.grid import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.create_rules import Rule
    from shardfs.formats.json_text import Path

TRANSFORMERS = "storage_transformers"
EXTENSION = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
"""As zarr-python 2.18 spells it, which is the only library that reads it."""


def edited(name: str, raw: bytes | None, new: bytes, rule: Rule | None) -> bytes:
    """See `Format.edit`, of the document of an array."""
    doc, source = parse_written(name, new), intelligible(name, raw)
    found = unsharded(unshard, source)
    if source is None or found is None:
        if source is None:
            _refuse_shards(doc)
        return new if rule is None or source is not None else sharded_by_rule(name, new, rule)
    if doc == found[1]:
        return raw or b""
    if doc.get(TRANSFORMERS) == source[TRANSFORMERS]:  # somebody puts the source's own document there
        doc = {**doc, TRANSFORMERS: found[1].get(TRANSFORMERS)}
    try:
        made = changed(new, _back(source, found[1], doc))
        if unshard(json.loads(made)) is None:
            raise ValueError("it says nothing of shards")
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e
    return made


def is_sharded(name: str, raw: bytes) -> bool:
    """Whether it is the document of an array that is shown without its shards."""
    return unsharded(unshard, intelligible(name, raw)) is not None


def _refuse_shards(doc: dict[str, Any]) -> None:
    """Raise ValueError for a new array in shards: what its writer would go on to write are shards, not chunks."""
    if unsharded(unshard, doc) is not None:
        raise ValueError("the mount shows chunks one by one; create the array without shards (--create)")


def _back(source: Mapping[str, Any], shown: Mapping[str, Any], doc: Mapping[str, Any]) -> dict[Path, Any]:
    """The members to put back into a document, so that it says again how the array is sharded.

    Raise one of `UNFIT`, with the reason, if the document contradicts the chunks that are stored.
    """
    rank = len(shown["shape"])
    require_same(len(doc["shape"]), rank, "the number of axes")
    require_same(chunk_grid(doc["chunk_grid"], rank), chunk_grid(shown["chunk_grid"], rank), "chunk_grid")
    require_same(doc["data_type"], shown["data_type"], "the data type")
    for member, default in (("chunk_memory_layout", "C"), ("extensions", []), (TRANSFORMERS, [])):
        require_same(doc.get(member) or default, shown.get(member) or default, member)
    require_same(_codec(doc), _codec(shown), "the compressor")
    return {(TRANSFORMERS,): source[TRANSFORMERS]}


def _codec(doc: Mapping[str, Any]) -> Any:
    """What compresses chunks, whatever stands there; how well it does is another matter."""
    compressor = doc.get("compressor") or None
    return compressor.get("codec") if isinstance(compressor, dict) else compressor


# ---- what zarr-python consolidates ----


def members(new: bytes) -> list[str]:
    """The documents of arrays that are repeated in one, by path from the root of the hierarchy."""
    arrays = (key for key, doc in _metadata(new).items() if isinstance(doc, dict) and "chunk_grid" in doc)
    return [key for key in arrays if not {"", ".", ".."} & set(key.split("/"))]


def _metadata(raw: bytes | None) -> Mapping[str, Any]:
    found = (intelligible(CONSOLIDATED, raw) or {}).get("metadata")
    return found if isinstance(found, dict) else {}


def edited_members(raw: bytes | None, new: bytes, arrays: Mapping[str, bytes | None]) -> bytes:
    """Arrays in it are again what their own documents say; if those are not known, what the source repeated."""
    doc = parse_written(CONSOLIDATED, new)
    known = _metadata(raw)
    values: dict[Path, Any] = {}
    for key, own in arrays.items():
        source = intelligible(key, own) or known.get(key)
        values |= {("metadata", key, *path): v for path, v in _repeated(source, doc["metadata"][key]).items()}
    return changed(new, values)


def _repeated(source: Any, member: Mapping[str, Any]) -> dict[Path, Any]:
    """What to change in the copy of an array's document. One that is out of date becomes the document itself."""
    try:
        found = unshard(source) if source is not None and source != member else None
        return {} if found is None else _back(source, found[1], member)
    except UNFIT:
        return {(): source}


# ---- new arrays ----


def sharded_by_rule(name: str, new: bytes, rule: Rule) -> bytes:
    """See `Format.shard`."""
    doc = parse_written(name, new)
    _refuse_shards(doc)
    try:
        shape = doc["shape"]
        chunk, _ = chunk_grid(doc["chunk_grid"], len(shape))
        grid = tuple(ceil_div(n, c) for n, c in zip(shape, chunk, strict=True)) or (1,)
        per = rule.per_shard(grid, math.prod(chunk) * (item_size(doc["data_type"]) or 1))
        transformer = {"extension": EXTENSION, "type": "indexed", "configuration": {"chunks_per_shard": list(per)}}
        return _with_sharding(new, doc, [transformer])
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e


def _with_sharding(new: bytes, doc: Mapping[str, Any], shardings: list[Any]) -> bytes:
    """The document with transformers for sharding next to the store. Raise one of `UNFIT` if it cannot be sharded."""
    made = changed(new, {(TRANSFORMERS,): [*(doc.get(TRANSFORMERS) or []), *shardings]})
    if unshard(json.loads(made)) is None:
        raise ValueError("it cannot be sharded")
    return made


def sharded_as_before(name: str, new: bytes, source: bytes) -> bytes:
    """See `Format.shard`. The same array gets the same document, another one as many chunks per shard."""
    doc = parse_written(name, new)
    _refuse_shards(doc)
    try:
        return edited(name, source, new, None)
    except ValueError:
        pass  # another array
    try:
        before = parse_written(name, source)
        require_same(len(doc["shape"]), len(before["shape"]), "the number of axes")
        return _with_sharding(new, doc, split_transformers(before[TRANSFORMERS])[1])
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e
