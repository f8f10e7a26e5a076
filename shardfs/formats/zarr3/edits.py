"""Translates Zarr v3 documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shardfs.formats.document_edits import ArrayEdits, index_parameters
from shardfs.formats.documents import integers, intelligible, parse_written, require_same
from shardfs.formats.json_text import REMOVED, changed, differences
from shardfs.formats.zarr3.stored import (
    DOCUMENT,
    SHARDING,
    chunk_keys,
    codec_list,
    decoding,
    item_size,
    named,
    regular_chunk,
    rewritten,
    unshard,
)
from shardfs.formats.zarr_arrays import MAX_NESTING, object_member

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.formats.create_rules import Rule
    from shardfs.formats.document_edits import Changes, Document
    from shardfs.formats.json_text import Path
    from shardfs.model.values import Coords

COPIES: Path = ("consolidated_metadata", "metadata")
"""Where a group's document has the consolidated documents."""

INDEX_CODECS = ({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


def edited(documents: Mapping[str, bytes], new: bytes, rule: Rule | None) -> bytes:
    """The document to store when a client writes `new`: see `Format.edit`."""
    raw = documents.get(DOCUMENT)
    source = intelligible(DOCUMENT, raw) or {}
    if _is_array(source):
        return ARRAYS.edited(DOCUMENT, raw, new)
    doc = intelligible(DOCUMENT, new)
    if rewritten(source) is not source:
        _require_zarr3(doc := parse_written(DOCUMENT, new))
    if doc is None or doc.get("zarr_format") != 3:
        return new  # the draft of 2022 uses the name zarr.json, too
    if _is_array(doc):
        return ARRAYS.edited(DOCUMENT, None, new, rule)
    return _edited_group(documents, source, doc, new)


def _is_array(doc: Document) -> bool:
    return doc.get("node_type") == "array"


def _require_zarr3(doc: Mapping[str, Any]) -> None:
    if doc.get("zarr_format") != 3 or doc.get("node_type") not in ("array", "group"):
        raise ValueError(f"{DOCUMENT}: zarr_format should be 3, and node_type array or group")


# ---- arrays ----


def _restore(source: Document, shown_doc: Document, doc: Document) -> Changes:
    rank = len(shown_doc["shape"])
    require_same(doc.get("zarr_format"), shown_doc.get("zarr_format"), "zarr_format")
    require_same(len(doc["shape"]), rank, "the number of axes")
    require_same(regular_chunk(doc["chunk_grid"]), regular_chunk(shown_doc["chunk_grid"]), "the chunk shape")
    require_same(named(doc["data_type"]), named(shown_doc["data_type"]), "the data type")
    keys = [chunk_keys(d.get("chunk_key_encoding"), rank).key((1,) * rank) for d in (doc, shown_doc)]
    require_same(keys[0], keys[1], "the key of a chunk")
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers would store chunks elsewhere; leave out storage_transformers")
    codecs, size = codec_list(doc["codecs"]), item_size(shown_doc["data_type"])
    new, old = ([decoding(c, rank, size) for c in chain] for chain in (codecs, shown_doc["codecs"]))
    require_same(new, old, "the list of codecs")
    return {("chunk_grid",): source["chunk_grid"], ("codecs",): _with_shards(source["codecs"], iter(codecs))}


def _with_shards(source: Any, chain: Iterator[dict[str, Any]]) -> list[Any]:
    """The source's sharding codecs, and the codecs after them, around the written codecs of `chain`."""
    at = next((i for i, c in enumerate(source) if named(c)[0] == SHARDING), None)
    if at is None:
        return list(chain)
    configuration = source[at]["configuration"]
    before = list(itertools.islice(chain, at))
    inner = {**configuration, "codecs": _with_shards(configuration["codecs"], chain)}
    return [*before, {**source[at], "configuration": inner}, *source[at + 1 :]]


def _sizes(doc: Document) -> tuple[Coords, Coords, int]:
    _require_zarr3(doc)
    shape, chunk = integers(doc["shape"], "shape", 0), integers(regular_chunk(doc["chunk_grid"]), "chunk_shape", 1)
    return shape, chunk, item_size(doc["data_type"]) or 1


def _shard(doc: Document, per_shard: Coords, words: Mapping[str, str], like: Document | None) -> Changes:
    index = {"index_codecs": INDEX_CODECS, "index_location": "end", **words}
    if like is not None:
        index = index_parameters(codec_list(like["codecs"]))
    chunk = regular_chunk(doc["chunk_grid"])
    codec = {"name": SHARDING, "configuration": {"chunk_shape": chunk, "codecs": doc["codecs"], **index}}
    shard = [n * per for n, per in zip(chunk, per_shard, strict=True)]
    return {("chunk_grid", "configuration", "chunk_shape"): shard, ("codecs",): [codec]}


ARRAYS = ArrayEdits("zarr3", ("chunk_grid", "codecs"), _is_array, unshard, _restore, _sizes, _shard)


# ---- groups ----


def references(new: bytes) -> Sequence[str]:
    """The paths of the documents of all arrays in the consolidated metadata of a group."""
    arrays = (path for path, doc in _copies(intelligible(DOCUMENT, new) or {}) if _is_array(doc))
    names = dict.fromkeys(map(_name, arrays))
    return [f"{name}/{DOCUMENT}" for name in names if _is_below(name)]


def _copies(doc: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Document]]:
    """The consolidated documents in a group's document, with their paths in it; nested groups included."""
    members = object_member(object_member(doc, "consolidated_metadata"), "metadata")
    for name, copy in members.items():
        if isinstance(copy, dict):
            path = (*above, *COPIES, name)
            yield path, copy
            if not _is_array(copy) and len(path) < 3 * MAX_NESTING:
                yield from _copies(copy, path)


def _name(path: Path) -> str:
    """The path below the group of the array or group whose consolidated document is at `path`."""
    return "/".join(str(step) for step in path[2::3])


def _is_below(path: str) -> bool:
    return all(part not in ("", ".", "..") and "\0" not in part for part in path.split("/"))


def with_copy(raw: bytes, below: str, source: bytes | None) -> bytes:
    """The document `raw` of a group with the document at path `below` in its consolidated metadata: see `Format`."""
    doc, name = intelligible(DOCUMENT, raw) or {}, below.removesuffix(f"/{DOCUMENT}")
    if not isinstance(object_member(doc, "consolidated_metadata").get("metadata"), dict):
        return raw
    targets: dict[Path, Any] = {path: copy for path, copy in _copies(doc) if _name(path) == name}
    new: Any = REMOVED
    if source is not None:  # the copy of a group has a member for the groups below, which the group may lack
        new = {member: value for member, value in parse_written(DOCUMENT, source).items() if member != COPIES[0]}
    changes: Changes = {}
    for path, copy in (targets or {(*COPIES, name): REMOVED}).items():
        new_members = differences(copy, new).items()
        changes |= {(*path, *at): value for at, value in new_members if at[:1] != COPIES[:1]}
    return changed(raw, changes) if changes else raw


def _edited_group(documents: Mapping[str, bytes], source: Document, doc: Document, new: bytes) -> bytes:
    """The document of a group, with consolidated arrays as in the arrays' own stored documents.

    For arrays without a stored document, the consolidated metadata of `source` is used.
    """
    consolidated = dict(_copies(source))
    arrays = [(path, copy) for path, copy in _copies(doc) if _is_array(copy)]
    array_documents = {path: intelligible(DOCUMENT, documents.get(f"{_name(path)}/{DOCUMENT}")) for path, _ in arrays}
    return ARRAYS.with_copies(
        new, ((path, copy, array_documents[path] or consolidated.get(path)) for path, copy in arrays)
    )
