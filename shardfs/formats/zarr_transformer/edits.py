"""Translates documents of the draft of 2022 that clients write through a mount back to the stored documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfs.formats.document_edits import ArrayEdits
from shardfs.formats.documents import integers, intelligible, parse_written, require_same
from shardfs.formats.zarr_arrays import object_member
from shardfs.formats.zarr_transformer.stored import (
    CONSOLIDATED,
    FORMAT,
    TRANSFORMERS,
    chunk_grid,
    codec_of,
    item_size,
    split_transformers,
    unshard,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.document_edits import Changes, Document
    from shardfs.model.values import Coords

EXTENSION = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
"""The URL as in zarr-python 2.18, the only library that reads this extension."""


def _is_array(doc: Document) -> bool:
    return "chunk_grid" in doc


def _restore(source: Document, shown_doc: Document, doc: Document) -> Changes:
    rank = len(shown_doc["shape"])
    require_same(len(doc["shape"]), rank, "the number of axes")
    require_same(chunk_grid(doc["chunk_grid"], rank), chunk_grid(shown_doc["chunk_grid"], rank), "chunk_grid")
    require_same(doc["data_type"], shown_doc["data_type"], "the data type")
    for member, default in (("chunk_memory_layout", "C"), ("extensions", []), (TRANSFORMERS, [])):
        require_same(doc.get(member) or default, shown_doc.get(member) or default, member)
    require_same(codec_of(doc), codec_of(shown_doc), "the compressor")
    return {(TRANSFORMERS,): source[TRANSFORMERS]}


def _sizes(doc: Document) -> tuple[Coords, Coords, int]:
    shape = integers(doc["shape"], "shape", 0)
    chunk, _ = chunk_grid(doc["chunk_grid"], len(shape))
    return shape or (1,), chunk or (1,), item_size(doc["data_type"]) or 1


def _shard(doc: Document, per_shard: Coords, words: Mapping[str, str], like: Document | None) -> Changes:
    configuration = {"chunks_per_shard": list(per_shard)}
    shardings = [{"extension": EXTENSION, "type": "indexed", "configuration": configuration}]
    if like is not None:
        _, shardings = split_transformers(like[TRANSFORMERS])
    return {(TRANSFORMERS,): [*(doc.get(TRANSFORMERS) or []), *shardings]}


ARRAYS = ArrayEdits(FORMAT, (TRANSFORMERS,), _is_array, unshard, _restore, _sizes, _shard)


# ---- the document that zarr-python consolidates ----


def copies(raw: bytes | None) -> Mapping[str, Document]:
    """The documents of all arrays in a `.zmetadata` document, by path from the root of the hierarchy."""
    members = object_member(intelligible(CONSOLIDATED, raw), "metadata")
    arrays = {key: doc for key, doc in members.items() if isinstance(doc, dict) and _is_array(doc)}
    return {key: doc for key, doc in arrays.items() if not {"", ".", ".."} & set(key.split("/"))}


def edited_copies(raw: bytes | None, new: bytes, arrays: Mapping[str, bytes | None]) -> bytes:
    """The `.zmetadata` document to store, with arrays as in their stored documents `arrays`.

    For arrays without a stored document, the stored `.zmetadata` document `raw` is used.
    """
    parse_written(CONSOLIDATED, new)
    consolidated = copies(raw)
    return ARRAYS.with_copies(
        new,
        (
            (("metadata", key), copy, intelligible(key, arrays[key]) or consolidated.get(key))
            for key, copy in copies(new).items()
        ),
    )
