"""Translates N5 documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from shardfs.formats.documents import UNFIT, intelligible, parse_written, reason, require_same, unsharded
from shardfs.formats.json_text import REMOVED, changed
from shardfs.formats.n5.stored import is_dataset, is_sharding, shape_and_block, unshard
from shardfs.formats.n5.words import DOCUMENT, ITEM_SIZES
from shardfs.model.grid import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.create_rules import Rule
    from shardfs.formats.json_text import Path

SHARDING, TRANSFORMERS = "sharding_indexed", "storage_transformers"

MATTERS = frozenset(("type", "useZlib"))
"""The members of `compression` that decoding needs. Clients may change the others while blocks are stored."""

INDEX_CODECS = ({"name": "raw-bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


def edited(raw: bytes | None, new: bytes, rule: Rule | None) -> bytes:
    """The document to store when a client writes `new`: see `Format.edit`. Documents of groups are stored unchanged."""
    source = _dataset(raw)
    found = unsharded(unshard, source)
    if source is None or found is None:
        doc = _dataset(new)
        if source is None and doc is not None:
            refuse_shards(doc)
            return new if rule is None else sharded_by_rule(new, rule) or new
        return new
    doc = parse_written(DOCUMENT, new)
    if doc == found[1]:
        return raw or b""
    try:
        if not is_dataset(doc):
            raise ValueError("a group cannot take the place of a dataset whose blocks are stored")
        plain = unshard(doc)  # not None if the client writes a copy of the source's document
        values = _back(source, found[1], doc if plain is None else plain[1])
        if plain is not None:
            for member in ("blockSize", "codecs", TRANSFORMERS):
                require_same(doc.get(member), source.get(member), member)
            return new
        made = changed(new, values)
        if unshard(json.loads(made)) is None:
            raise ValueError("it says nothing of shards")
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e
    return made


def _dataset(raw: bytes | None) -> dict[str, Any] | None:
    """The parsed document of a dataset; None for anything else."""
    doc = intelligible(DOCUMENT, raw)
    return doc if doc is not None and is_dataset(doc) else None


def is_sharded(raw: bytes | None) -> bool:
    """Whether this is the document of a sharded dataset that the mount shows unsharded."""
    return unsharded(unshard, _dataset(raw)) is not None


def refuse_shards(doc: dict[str, Any]) -> None:
    """Raise ValueError if a new dataset is sharded, because its writer would then write shards instead of blocks."""
    if unsharded(unshard, doc) is not None:
        raise ValueError("the mount shows blocks one by one; create the dataset without shards (--create)")


def _back(source: Mapping[str, Any], shown: Mapping[str, Any], doc: Mapping[str, Any]) -> dict[Path, Any]:
    """The members to restore in the written document `doc`, so that it describes the shards again.

    Raise one of `UNFIT`, with the reason, if `doc` contradicts the stored blocks.
    """
    shape_and_block(doc)
    require_same(len(doc["dimensions"]), len(shown["dimensions"]), "the number of axes")
    for member in ("blockSize", "dataType"):
        require_same(doc[member], shown[member], member)
    told, stored = _compression(doc), _compression(shown)
    require_same(_what_matters(told), _what_matters(stored), "compression")
    if TRANSFORMERS in source:
        return {(TRANSFORMERS,): source[TRANSFORMERS]}
    codecs = source["codecs"] if told == stored else _with_compression(source["codecs"], told)
    return {
        ("blockSize",): source["blockSize"],
        ("compression",): source.get("compression", REMOVED),
        ("compressionType",): source.get("compressionType", REMOVED),
        ("codecs",): codecs,
    }


def _compression(doc: Mapping[str, Any]) -> dict[str, Any]:
    found = doc["compression"] if "compression" in doc else {"type": doc.get("compressionType")}
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise ValueError(f"compression should be an object with a type, not {found!r:.80}")
    return found


def _what_matters(compression: Mapping[str, Any]) -> dict[str, Any]:
    return {"useZlib": False} | {name: value for name, value in compression.items() if name in MATTERS}


def _with_compression(codecs: Sequence[Any], compression: Mapping[str, Any]) -> list[Any]:
    """The source's codecs, with the written parameters of the blocks' compression."""
    out = []
    for codec in codecs:
        told = codec.get("configuration", {})
        if codec["name"] == SHARDING:
            told = {**told, "codecs": _with_compression(told["codecs"], compression)}
        elif codec["name"] == compression["type"]:
            told = {**told, **_parameters(compression)}
        out.append({**codec, "configuration": told} if told else codec)
    return out


def _parameters(compression: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in compression.items() if name != "type"}


# ---- new datasets ----


def sharded_by_rule(new: bytes, rule: Rule) -> bytes | None:
    """The document of the new dataset, sharded by the rule as in N5 4.x: see `Format.shard`. None for a group."""
    if (doc := _new_dataset(new)) is None:
        return None
    try:
        shape, block = shape_and_block(doc)
        grid = tuple(ceil_div(n, c) for n, c in zip(shape, block, strict=True))
        block_bytes = math.prod(block) * ITEM_SIZES.get(str(doc["dataType"]), 1)
        per = rule.per_shard(grid, block_bytes, last_is_fastest=False)
        return _in_codecs(new, doc, per, {"index_codecs": INDEX_CODECS, "index_location": "end", **rule.words})
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e


def _new_dataset(new: bytes) -> dict[str, Any] | None:
    """The document of an unsharded dataset; None for anything else. Raise ValueError for a sharded dataset."""
    doc = _dataset(new)
    if doc is not None:
        refuse_shards(doc)
    return doc


def _in_codecs(new: bytes, doc: Mapping[str, Any], per_shard: Sequence[int], configuration: Mapping[str, Any]) -> bytes:
    """The document of the dataset with sharding. Raise one of `UNFIT`, with the reason, if sharding is not possible."""
    if doc.get("codecs"):
        raise ValueError("a dataset with codecs of its own cannot be sharded")
    block, compression = doc["blockSize"], _compression(doc)
    codecs: list[Any] = [{"name": "n5bytes"}]
    if compression["type"] != "raw":
        codecs.append({"name": compression["type"], "configuration": _parameters(compression)})
    codec = {"name": SHARDING, "configuration": {"chunk_shape": block[::-1], "codecs": codecs, **configuration}}
    shard = [n * per for n, per in zip(block, per_shard, strict=True)]
    gone: dict[Path, Any] = {(member,): REMOVED for member in ("compression", "compressionType") if member in doc}
    # Readers that do not support shards refuse documents without `compression`, rather than read shards as blocks.
    made = changed(new, {**gone, ("blockSize",): shard, ("codecs",): [codec]})
    if unshard(json.loads(made)) is None:
        raise ValueError("it cannot be sharded")
    return made


def sharded_as_before(new: bytes, source: bytes) -> bytes | None:
    """The document of the new dataset, sharded as in the deleted document `source`: see `Format.shard`.

    An equal dataset gets `source` itself. A different dataset gets as many blocks per shard. None for a group.
    """
    if (doc := _new_dataset(new)) is None:
        return None
    try:
        return edited(source, new, None)
    except ValueError:
        pass  # another dataset
    try:
        before = parse_written(DOCUMENT, source)
        found = unshard(before)
        facts = found[0].facts if found is not None else None
        if facts is None or facts.shard_shape is None or len(facts.shape) != len(doc["dimensions"]):
            raise ValueError("it has not the axes of the sharded dataset that was here")
        per = [s // c for s, c in zip(facts.shard_shape, facts.chunk_shape, strict=True)]
        if TRANSFORMERS in before:
            transformers = [t for t in before[TRANSFORMERS] if is_sharding(t)]
            return changed(new, {(TRANSFORMERS,): transformers})
        outer = next(c for c in before["codecs"] if c["name"] == SHARDING)["configuration"]
        kept = {name: outer[name] for name in ("index_codecs", "index_location") if name in outer}
        return _in_codecs(new, doc, per, kept)
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e
