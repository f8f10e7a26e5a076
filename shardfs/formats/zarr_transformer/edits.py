"""Translates documents of the draft of 2022 that clients write through a mount back to the stored documents."""

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
"""The URL as in zarr-python 2.18, the only library that reads this extension."""


def edited(name: str, raw: bytes | None, new: bytes, rule: Rule | None) -> bytes:
    """The document of an array to store when a client writes `new`: see `Format.edit`."""
    doc, source = parse_written(name, new), intelligible(name, raw)
    found = unsharded(unshard, source)
    if source is None or found is None:
        if source is None:
            _refuse_shards(doc)
        return new if rule is None or source is not None else sharded_by_rule(name, new, rule)
    if doc == found[1]:
        return raw or b""
    if doc.get(TRANSFORMERS) == source[TRANSFORMERS]:  # the client writes a copy of the source's document
        doc = {**doc, TRANSFORMERS: found[1].get(TRANSFORMERS)}
    try:
        made = changed(new, _back(source, found[1], doc))
        if unshard(json.loads(made)) is None:
            raise ValueError("it says nothing of shards")
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e
    return made


def is_sharded(name: str, raw: bytes) -> bool:
    """Whether this is the document of a sharded array that the mount shows unsharded."""
    return unsharded(unshard, intelligible(name, raw)) is not None


def _refuse_shards(doc: dict[str, Any]) -> None:
    """Raise ValueError if a new array is sharded, because its writer would then write shards instead of chunks."""
    if unsharded(unshard, doc) is not None:
        raise ValueError("the mount shows chunks one by one; create the array without shards (--create)")


def _back(source: Mapping[str, Any], shown: Mapping[str, Any], doc: Mapping[str, Any]) -> dict[Path, Any]:
    """The members to restore in the written document `doc`, so that it describes the shards again.

    Raise one of `UNFIT`, with the reason, if `doc` contradicts the stored chunks.
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
    """The codec of the member `compressor`, without its parameters, which may change while chunks are stored."""
    compressor = doc.get("compressor") or None
    return compressor.get("codec") if isinstance(compressor, dict) else compressor


# ---- what zarr-python consolidates ----


def members(new: bytes) -> list[str]:
    """The paths, from the root of the hierarchy, of the documents of all arrays in a `.zmetadata` document."""
    arrays = (key for key, doc in _metadata(new).items() if isinstance(doc, dict) and "chunk_grid" in doc)
    return [key for key in arrays if not {"", ".", ".."} & set(key.split("/"))]


def _metadata(raw: bytes | None) -> Mapping[str, Any]:
    found = (intelligible(CONSOLIDATED, raw) or {}).get("metadata")
    return found if isinstance(found, dict) else {}


def edited_members(raw: bytes | None, new: bytes, arrays: Mapping[str, bytes | None]) -> bytes:
    """The `.zmetadata` document to store, with arrays as in the stored documents `arrays`.

    For arrays without a stored document, the stored `.zmetadata` document `raw` is used.
    """
    doc = parse_written(CONSOLIDATED, new)
    known = _metadata(raw)
    values: dict[Path, Any] = {}
    for key, own in arrays.items():
        source = intelligible(key, own) or known.get(key)
        values |= {("metadata", key, *path): v for path, v in _repeated(source, doc["metadata"][key]).items()}
    return changed(new, values)


def _repeated(source: Any, member: Mapping[str, Any]) -> dict[Path, Any]:
    """The changes to the consolidated copy of an array's document. An outdated copy is replaced by `source`."""
    try:
        found = unshard(source) if source is not None and source != member else None
        return {} if found is None else _back(source, found[1], member)
    except UNFIT:
        return {(): source}


# ---- new arrays ----


def sharded_by_rule(name: str, new: bytes, rule: Rule) -> bytes:
    """The document of the new array, sharded by the rule: see `Format.shard`."""
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
    """The document with sharding transformers added next to the store. Raise one of `UNFIT` if that is not possible."""
    made = changed(new, {(TRANSFORMERS,): [*(doc.get(TRANSFORMERS) or []), *shardings]})
    if unshard(json.loads(made)) is None:
        raise ValueError("it cannot be sharded")
    return made


def sharded_as_before(name: str, new: bytes, source: bytes) -> bytes:
    """The document of the new array, sharded as in the deleted document `source`: see `Format.shard`.

    An equal array gets `source` itself. A different array gets as many chunks per shard.
    """
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
