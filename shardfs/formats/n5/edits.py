"""Translates N5 documents that clients write through a mount back to the stored documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfs.formats.document_edits import ArrayEdits, index_parameters
from shardfs.formats.documents import require_same
from shardfs.formats.json_text import REMOVED
from shardfs.formats.n5.codec_names import ITEM_SIZES, compression_in
from shardfs.formats.n5.stored import is_dataset, is_sharding, shape_and_block, unshard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.document_edits import Changes, Document
    from shardfs.model.values import Coords

SHARDING, TRANSFORMERS = "sharding_indexed", "storage_transformers"

NEEDED = frozenset(("type", "useZlib"))
"""The members of `compression` that decoding needs. Clients may change the others while blocks are stored."""

INDEX_CODECS = ({"name": "raw-bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


def _restore(source: Document, shown_doc: Document, doc: Document) -> Changes:
    shape_and_block(doc)
    require_same(len(doc["dimensions"]), len(shown_doc["dimensions"]), "the number of axes")
    for member in ("blockSize", "dataType"):
        require_same(doc[member], shown_doc[member], member)
    new, old = compression_in(doc), compression_in(shown_doc)
    require_same(_needed(new), _needed(old), "compression")
    if TRANSFORMERS in source:
        return {(TRANSFORMERS,): source[TRANSFORMERS]}
    return {
        ("blockSize",): source["blockSize"],
        ("compression",): source.get("compression", REMOVED),
        ("compressionType",): source.get("compressionType", REMOVED),
        ("codecs",): source["codecs"] if new == old else _with_compression(source["codecs"], new),
    }


def _needed(compression: Mapping[str, Any]) -> dict[str, Any]:
    return {"useZlib": False} | {name: value for name, value in compression.items() if name in NEEDED}


def _with_compression(codecs: Sequence[Any], compression: Mapping[str, Any]) -> list[Any]:
    """The source's codecs, with the written parameters of the blocks' compression."""
    out = []
    for codec in codecs:
        configuration = codec.get("configuration", {})
        if codec["name"] == SHARDING:
            configuration = {**configuration, "codecs": _with_compression(configuration["codecs"], compression)}
        elif codec["name"] == compression["type"]:
            configuration = {**configuration, **_parameters(compression)}
        out.append({**codec, "configuration": configuration} if configuration else codec)
    return out


def _parameters(compression: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in compression.items() if name != "type"}


def _sizes(doc: Document) -> tuple[Coords, Coords, int]:
    return *shape_and_block(doc), ITEM_SIZES.get(str(doc["dataType"]), 1)


def _shard(doc: Document, per_shard: Coords, words: Mapping[str, str], like: Document | None) -> Changes:
    """The changes that shard a dataset as N5 4.x does, or with the transformers of `like`: see `ArrayEdits.shard`."""
    if like is not None and TRANSFORMERS in like:
        return {(TRANSFORMERS,): [t for t in like[TRANSFORMERS] if is_sharding(t)]}
    if doc.get("codecs"):
        raise ValueError("a dataset with codecs of its own cannot be sharded; write `compression` instead of `codecs`")
    index = {"index_codecs": INDEX_CODECS, "index_location": "end", **words}
    if like is not None:
        index = index_parameters(like["codecs"])
    block, compression = doc["blockSize"], compression_in(doc)
    codecs: list[Any] = [{"name": "n5bytes"}]
    if compression["type"] != "raw":
        codecs.append({"name": compression["type"], "configuration": _parameters(compression)})
    codec = {"name": SHARDING, "configuration": {"chunk_shape": block[::-1], "codecs": codecs, **index}}
    # Readers that do not support shards refuse documents without `compression`, rather than read shards as blocks.
    return {
        **{(member,): REMOVED for member in ("compression", "compressionType") if member in doc},
        ("blockSize",): [n * per for n, per in zip(block, per_shard, strict=True)],
        ("codecs",): [codec],
    }


DATASETS = ArrayEdits(
    "n5",
    ("blockSize", "codecs", TRANSFORMERS),
    is_dataset,
    unshard,
    _restore,
    _sizes,
    _shard,
    last_is_fastest=False,
)
