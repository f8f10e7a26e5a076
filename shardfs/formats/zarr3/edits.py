"""Translates Zarr v3 documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any, cast

from shardfs.formats.documents import UNFIT, integers, intelligible, parse_written, reason, require_same, unsharded
from shardfs.formats.json_text import changed
from shardfs.formats.zarr3.stored import (
    DOCUMENT,
    MAX_NESTING,
    ChunkKeys,
    codec_list,
    item_size,
    named,
    rewritten,
    unshard,
)
from shardfs.formats.zarr_values import transposed
from shardfs.model.grid import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.formats.create_rules import Rule
    from shardfs.formats.json_text import Path

SHARDING = "sharding_indexed"
ENCODERS = {"gzip": ("level",), "zstd": ("level", "checksum"),
            "blosc": ("cname", "clevel", "shuffle", "typesize", "blocksize")}  # fmt: skip
"""Codecs with the parameters that only encoding uses. Clients may change these while chunks are stored."""

INDEX_CODECS = ({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


def references(new: bytes) -> Sequence[str]:
    """The paths of the documents of all arrays in the consolidated metadata of a group."""
    try:
        members = _members(parse_written(DOCUMENT, new))
        names = dict.fromkeys(_name(path) for path, doc in members if doc.get("node_type") == "array")
    except ValueError:
        return ()  # `edited` raises the error
    return [f"{name}/{DOCUMENT}" for name in names if _is_below(name)]


def edited(stored: Mapping[str, bytes], new: bytes, rule: Rule | None) -> bytes:
    """The document to store when a client writes `new`: see `Format.edit`."""
    raw = stored.get(DOCUMENT)
    source = intelligible(DOCUMENT, raw)
    if source is not None and source.get("node_type") == "array":
        return _edited_array(source, raw or b"", new)
    doc = intelligible(DOCUMENT, new)
    if source is not None and rewritten(source) is not source:
        require_zarr3(doc := parse_written(DOCUMENT, new))
    if doc is None or doc.get("zarr_format") != 3:
        return new  # the draft of 2022 uses the name zarr.json, too
    if doc.get("node_type") == "array":
        refuse_shards(doc)
        return new if rule is None else sharded_by_rule(new, rule) or new
    return _edited_group(stored, source or {}, doc, new)


def is_sharded(raw: bytes | None) -> bool:
    """Whether this is the document of a sharded array that the mount shows unsharded."""
    doc = intelligible(DOCUMENT, raw)
    return doc is not None and doc.get("node_type") == "array" and unsharded(unshard, doc) is not None


def require_zarr3(doc: Mapping[str, Any]) -> None:
    """Raise ValueError unless the document is that of a Zarr v3 array or group."""
    if doc.get("zarr_format") != 3 or doc.get("node_type") not in ("array", "group"):
        raise ValueError("zarr_format should be 3, and node_type array or group")


def refuse_shards(doc: dict[str, Any]) -> None:
    """Raise ValueError if a new array is sharded, because its writer would then write shards instead of chunks."""
    if unsharded(unshard, doc) is not None:
        raise ValueError(f"{SHARDING}: the mount shows chunks one by one; create the array without shards (--create)")


# ---- arrays ----


def _edited_array(source: dict[str, Any], raw: bytes, new: bytes) -> bytes:
    found = unsharded(unshard, source)
    if found is None:
        return new
    doc = parse_written(DOCUMENT, new)
    if doc == found[1]:
        return raw
    require_zarr3(doc)
    if doc["node_type"] != "array":
        raise ValueError("a group cannot take the place of an array whose chunks are stored")
    try:
        if all(doc[member] == source[member] for member in ("chunk_grid", "codecs")):
            plain = unshard(doc)  # the client writes a copy of the source's document
            _back(source, found[1], plain[1] if plain is not None else doc)
            return new
        made = changed(new, _back(source, found[1], doc))
        if unshard(parse_written(DOCUMENT, made)) is None:
            raise ValueError("it says nothing of shards")
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e
    return made


def _back(source: dict[str, Any], shown: dict[str, Any], doc: dict[str, Any]) -> dict[Path, Any]:
    """The members to restore in the written document `doc`, so that it describes the shards again.

    Raise one of `UNFIT`, with the reason, if `doc` contradicts the stored chunks.
    """
    rank = len(shown["shape"])
    require_same(len(doc["shape"]), rank, "the number of axes")
    require_same(_chunk_shape(doc), shown["chunk_grid"]["configuration"]["chunk_shape"], "the chunk shape")
    require_same(named(doc["data_type"]), named(shown["data_type"]), "the data type")
    keys = [ChunkKeys(d.get("chunk_key_encoding"), rank).key((1,) * rank) for d in (doc, shown)]
    require_same(keys[0], keys[1], "the key of a chunk")
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers would store chunks elsewhere")
    codecs, size = codec_list(doc["codecs"]), item_size(shown["data_type"])
    told = [_normal(c, rank, size) for c in codecs]
    require_same(told, [_normal(c, rank, size) for c in shown["codecs"]], "the list of codecs")
    values: dict[Path, Any] = {("chunk_grid",): source["chunk_grid"]}
    rest = iter(codecs)
    values["codecs",] = _with_shards(source["codecs"], rest)
    return values


def _chunk_shape(doc: Mapping[str, Any]) -> Any:
    name, configuration = named(doc["chunk_grid"])
    if name != "regular":
        raise ValueError(f"the chunk grid is regular and cannot become {name!r:.80}")
    return configuration["chunk_shape"]


def _normal(codec: Mapping[str, Any], rank: int, item: int | None) -> tuple[str, Any]:
    """The name and parameters of a codec that decoding uses. Codecs with equal results decode bytes equally."""
    name, told = named(codec)
    told = {k: v for k, v in told.items() if k not in ENCODERS.get(name, ())}
    match name:
        case "bytes" | "endian":
            name, told = "bytes", {} if item == 1 else {"endian": "little", **told}
        case "transpose":
            told = {**told, "order": transposed(tuple(range(rank)), told["order"])}
    return name, told


def _with_shards(source: Any, chain: Iterator[dict[str, Any]]) -> list[Any]:
    """The source's sharding codecs, and the codecs after them, around the written codecs of `chain`."""
    at = next((i for i, c in enumerate(source) if named(c)[0] == SHARDING), None)
    if at is None:
        return list(chain)
    configuration = source[at]["configuration"]
    before = list(itertools.islice(chain, at))
    inner = {**configuration, "codecs": _with_shards(configuration["codecs"], chain)}
    return [*before, {**source[at], "configuration": inner}, *source[at + 1 :]]


# ---- groups ----


def _members(doc: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The consolidated documents in a group's document, with their paths in it; nested groups included."""
    consolidated = doc.get("consolidated_metadata")
    found = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    for name, member in found.items() if isinstance(found, dict) else ():
        if isinstance(member, dict):
            path = (*above, "consolidated_metadata", "metadata", name)
            yield path, member
            if member.get("node_type") != "array" and len(path) < 3 * MAX_NESTING:
                yield from _members(member, path)


def _name(path: Path) -> str:
    """The path below the group of the array or group whose consolidated document is at `path`."""
    return "/".join(str(step) for step in path[2::3])


def _is_below(path: str) -> bool:
    return all(part not in ("", ".", "..") and "\0" not in part for part in path.split("/"))


def _edited_group(stored: Mapping[str, bytes], source: Mapping[str, Any], doc: dict[str, Any], new: bytes) -> bytes:
    """The document of a group, with consolidated arrays as in the arrays' own stored documents.

    For arrays without a stored document, the consolidated metadata of `source` is used.
    """
    known = dict(_members(source))
    values: dict[Path, Any] = {}
    for path, member in _members(doc):
        own = intelligible(DOCUMENT, stored.get(f"{_name(path)}/{DOCUMENT}")) or known.get(path)
        if own is not None and member.get("node_type") == "array":
            values |= {(*path, *below): value for below, value in _consolidated(own, member).items()}
    return changed(new, values)


def _consolidated(source: dict[str, Any], member: dict[str, Any]) -> dict[Path, Any]:
    """The changes to the consolidated copy of an array's document. An outdated copy is replaced by `source`."""
    try:
        found = unshard(source) if source.get("node_type") == "array" else None
        return {} if found is None or member == source else _back(source, found[1], member)
    except UNFIT:
        return {(): source}


# ---- new arrays ----


def sharded_by_rule(new: bytes, rule: Rule) -> bytes | None:
    """The document of the new array, sharded by the rule: see `Format.shard`. None for a group."""
    doc = _new_array(new)
    if doc is None:
        return None
    try:
        shape, chunk = integers(doc["shape"], "shape", 0), integers(_chunk_shape(doc), "chunk_shape", 1)
        grid = tuple(ceil_div(n, c) for n, c in zip(shape, chunk, strict=True))
        per = rule.per_shard(grid, math.prod(chunk) * (item_size(doc["data_type"]) or 1))
        return _sharded(doc, new, per, {"index_codecs": INDEX_CODECS, "index_location": "end", **rule.words})
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e


def _new_array(new: bytes) -> dict[str, Any] | None:
    """The document of an unsharded array; None for a group. Raise ValueError for any other document."""
    doc = parse_written(DOCUMENT, new)
    require_zarr3(doc)
    if doc["node_type"] != "array":
        return None
    refuse_shards(doc)
    return doc


def _sharded(doc: dict[str, Any], new: bytes, per_shard: Sequence[int], configuration: Mapping[str, Any]) -> bytes:
    """The document of the array with sharding. Raise one of `UNFIT`, with the reason, if sharding is not possible."""
    chunk = _chunk_shape(doc)
    shard = [n * per for n, per in zip(chunk, per_shard, strict=True)]
    codec = {"name": SHARDING, "configuration": {"chunk_shape": chunk, "codecs": doc["codecs"], **configuration}}
    made = changed(new, {("chunk_grid", "configuration", "chunk_shape"): shard, ("codecs",): [codec]})
    if unshard(json.loads(made)) is None:
        raise ValueError("it cannot be sharded")
    return made


def sharded_as_before(new: bytes, source: bytes) -> bytes | None:
    """The document of the new array, sharded as in the deleted document `source`: see `Format.shard`.

    An equal array gets `source` itself. A different array gets as many chunks per shard. None for a group.
    """
    doc = _new_array(new)
    if doc is None:
        return None
    before = parse_written(DOCUMENT, source)
    try:
        return _edited_array(before, source, new)
    except ValueError:
        pass  # another array
    try:
        found = unshard(before)
        outer = next(c for c in codec_list(before["codecs"]) if c["name"] == SHARDING)["configuration"]
        facts = found[0].facts if found is not None else None
        if facts is None or facts.shard_shape is None or len(facts.shape) != len(doc["shape"]):
            raise ValueError("it has not the axes of the sharded array that was here, nor its grid")
        per = [s // c for s, c in zip(facts.shard_shape, facts.chunk_shape, strict=True)]
        kept = {name: outer[name] for name in ("index_codecs", "index_location") if name in outer}
        return _sharded(doc, new, per, cast("Mapping[str, Any]", kept))
    except UNFIT as e:
        raise ValueError(f"{DOCUMENT}: {reason(e)}") from e
