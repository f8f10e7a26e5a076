"""Reads stored Zarr v3 documents, and translates those of sharded arrays to the documents of unsharded arrays."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.codecs.checks import Chain
from shardfs.codecs.decoders import can_decode
from shardfs.formats import ome, zarr_metadata
from shardfs.formats.documents import (
    choice,
    form_of,
    integer,
    integers,
    listed,
    print_json,
    require_rank,
    shown_document,
)
from shardfs.formats.zarr_arrays import (
    MAX_NESTING,
    ChunkKeys,
    described_array,
    full_chunks,
    object_member,
    opened,
    unsharded_array,
)
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Dataset, Problem
from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed, sharding_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.values import Coords

DOCUMENT = "zarr.json"
SHARDING = "sharding_indexed"
FORM = frozenset((DOCUMENT,))

MEMBERS = frozenset(
    ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value",
     "attributes", "dimension_names", "storage_transformers")
)  # fmt: skip
"""The members of an array's document that the specification defines; all others are extensions."""

VALUE_WISE = frozenset(
    ("cast_value", "scale_offset", "bitround", "numcodecs.bitround", "numcodecs.fixedscaleoffset", "numcodecs.astype")
)
"""Array-to-array codecs with equal results before and after the split into chunks: each element has its own result."""

KEEP_SIZE = frozenset(("transpose", "bitround", "numcodecs.bitround"))
"""Array-to-array codecs that keep the size of a chunk in bytes."""

_ITEM = re.compile(r"(?:u?int|float|bfloat|complex)(8|16|32|64|128)|r(8|16|24|32|64|128)|bool")
"""Data types whose name has their size in bits, and `bool`, which has 8 bits."""

MAX_EDGES = 1_000_000
"""The largest number of shards along one axis of a rectilinear grid, whose edges are kept in memory."""

TRANSFORMED = "storage transformers may store chunks elsewhere, and shardfs does not know them"


def open_group(path: str, doc: dict[str, Any]) -> Dataset:
    """The dataset for a group's document. Consolidated documents of sharded arrays in it are shown unsharded.

    A document nested too deeply is a problem of the dataset, and arrays that cannot be unsharded keep their documents.
    """
    attributes = object_member(doc, "attributes")
    group = Dataset("zarr3", format_names=FORM, attributes=attributes, multiscales=ome.multiscales(attributes))
    try:
        document = rewritten(doc)
        return replace(group, documents={DOCUMENT: print_json(document)}) if document is not doc else group
    except (ValueError, RecursionError):
        return replace(group, problems=(Problem(path, f"{DOCUMENT}: nested too deeply"),))


def open_array(path: str, doc: dict[str, Any]) -> Dataset:
    """The dataset for the document of an array, sharded or not; with a problem if the array cannot be unsharded."""
    return opened(Dataset("zarr3", closed=True, format_names=FORM | {"c"}), path, DOCUMENT, doc, unshard, _unsharded)


def _unsharded(doc: Mapping[str, Any]) -> Collection:
    """The collection of an unsharded array with a regular chunk grid. Raise one of `UNFIT` for other arrays."""
    for name, value in doc.items():
        may_be_ignored = value is None or (isinstance(value, dict) and value.get("must_understand") is False)
        if name not in MEMBERS and not may_be_ignored:
            raise ValueError(f"member {name!r:.80} is an extension that must be understood; shardfs does not know it")
    if doc.get("storage_transformers"):
        raise ValueError(TRANSFORMED)
    rank = len(integers(doc["shape"], "shape", 0))
    chunk = integers(regular_chunk(doc["chunk_grid"]), "chunk_shape", 1)
    require_rank(chunk, rank, "chunk_grid")
    codecs = [Codec(*named(c)) for c in codec_list(doc["codecs"])]
    names = zarr_metadata.axis_names(doc.get("dimension_names"), rank, str | None)
    data_type, attributes = zarr_metadata.numpy_type(doc["data_type"]), object_member(doc, "attributes")
    array = described_array(doc, chunk, data_type, codecs, names, attributes)
    keys = chunk_keys(doc.get("chunk_key_encoding"), rank)
    return unsharded_array("zarr3", array, keys, tuple(c.name for c in codecs), _data_type(doc["data_type"]))


def rewritten(doc: dict[str, Any]) -> dict[str, Any]:
    """The group's document with unsharded arrays in its consolidated metadata; `doc` itself without sharded arrays."""
    consolidated = object_member(doc, "consolidated_metadata")
    members = object_member(consolidated, "metadata")
    changed: dict[str, Any] = {}
    for name, member in members.items():
        if isinstance(member, dict):
            is_array = member.get("node_type") == "array"
            shown_member = shown_document(unshard, member) if is_array else rewritten(member)
            changed |= {} if shown_member is None or shown_member is member else {name: shown_member}
    if not changed:
        return doc
    return {**doc, "consolidated_metadata": {**consolidated, "metadata": {**members, **changed}}}


# ---- one array ----


def unshard(doc: Mapping[str, Any]) -> tuple[Collection, dict[str, Any]] | None:
    """The collection that an array's document describes, and the document of the unsharded array.

    None if the array is not sharded. Raise one of `UNFIT`, with the reason, if it cannot be shown unsharded.
    """
    codecs = codec_list(doc["codecs"])
    if not any(c["name"] == SHARDING for c in codecs):
        return None
    if doc.get("storage_transformers"):
        raise ValueError(TRANSFORMED)
    shape = integers(doc["shape"], "shape", 0)
    shard, bounds = _outer_grid(doc["chunk_grid"], shape)
    keys = chunk_keys(doc.get("chunk_key_encoding"), len(shape))
    layers, chunk, chain = _layers(shape, shard, bounds, codecs, keys)
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    shard_shape = None if any(bounds) else shard
    collection = Collection(
        format="zarr3",
        path="",
        names=keys.names(layers[-1].format.grid),
        layers=layers,
        codecs=tuple(c["name"] for c in chain),
        facts=Facts(shape, chunk, shard_shape, _data_type(doc.get("data_type")), sharding_of(layers)),
        check=_check(chain, chunk, doc.get("data_type")),
        form=_form(doc, codecs, keys.key((1,) * len(shape)), len(shape)),
    )
    return collection, {**doc, "chunk_grid": grid, "codecs": chain}


def regular_chunk(grid: Any) -> Any:
    """The member `chunk_shape` of a regular chunk grid. Raise one of `UNFIT` for another grid."""
    name, configuration = named(grid)
    choice(name, "chunk_grid", "regular")
    return configuration["chunk_shape"]


Bounds: TypeAlias = "Sequence[tuple[int, ...]]"
"""For each axis the edges of shards in elements, if the grid is rectilinear; () for shards of equal size."""


def _outer_grid(grid: Any, shape: Coords) -> tuple[Coords, Bounds]:
    """The shape of the outermost shards, with 0 along axes where shards have different sizes; and their bounds."""
    name, configuration = named(grid)
    if name == "regular":
        chunk = integers(configuration["chunk_shape"], "chunk_shape", 1)
        require_rank(chunk, len(shape), "chunk_grid")
        return chunk, [() for _ in shape]
    if name == "rectilinear":
        edges = configuration["chunk_shapes"]
        require_rank(edges, len(shape), "chunk_grid")
        bounds = [_bounds(e, n) for e, n in zip(edges, shape, strict=True)]
        return tuple(e if isinstance(e, int) else 0 for e in edges), bounds
    raise ValueError(f"unknown chunk grid {name!r:.80}; shardfs knows regular and rectilinear")


def _bounds(edges: Any, extent: int) -> tuple[int, ...]:
    """The first elements of all shards along an axis, and the end of the last shard; () for shards of equal size."""
    if isinstance(edges, int):
        integer(edges, "chunk_shapes", 1)
        return ()
    lengths: list[int] = []
    for e in edges:
        length, count = e if isinstance(e, list) else (e, 1)
        integer(length, "chunk_shapes", 1)
        if integer(count, "chunk_shapes", 1) + len(lengths) > MAX_EDGES:
            raise ValueError(f"chunk_shapes: more than {MAX_EDGES} shards along one axis")
        lengths += [length] * count
    bounds = tuple(itertools.accumulate(lengths, initial=0))
    if bounds[-1] < extent:
        raise ValueError(f"chunk_shapes cover {bounds[-1]} of {extent} elements of an axis")
    return bounds


def _layers(
    shape: Coords, chunk: Coords, bounds: Bounds, codecs: list[dict[str, Any]], keys: ChunkKeys
) -> tuple[tuple[Layer, ...], Coords, list[dict[str, Any]]]:
    """The layers of nested sharding codecs, outermost first; the shape of their chunks; and the codecs of a chunk.

    All shapes but those in the document are in the array's order of axes.
    """
    layers: list[Layer] = []
    before: list[dict[str, Any]] = []  # array-to-array codecs before sharding codecs
    order = tuple(range(len(shape)))  # axis i of the current codec is axis order[i] of the array
    while (at := next((i for i, c in enumerate(codecs) if c["name"] == SHARDING), None)) is not None:
        if len(layers) == MAX_NESTING:
            raise ValueError(f"shards are nested more than {MAX_NESTING} deep")
        for c in codecs[:at]:
            if c["name"] == "transpose":
                order = zarr_metadata.transposed(order, c["configuration"]["order"])
            elif c["name"] not in VALUE_WISE:
                raise ValueError(f"codec {c['name']!r:.80} before sharding_indexed may depend on how the array is cut")
        before += codecs[:at]
        configuration = codecs[at]["configuration"]
        chunk_shape = integers(configuration["chunk_shape"], "chunk_shape", 1)
        require_rank(chunk_shape, len(shape), "sharding_indexed chunk_shape")
        inner = tuple(chunk_shape[order.index(axis)] for axis in range(len(shape)))
        axes = [ShardedAxis.cut(a, *sizes) for a, sizes in enumerate(zip(shape, chunk, inner, bounds, strict=True))]
        shards = ShardingIndexed(axes, order, _index_encoding(configuration), keys.key, keys.coords)
        layers.append(_layer(shards, codecs[at + 1 :]))
        chunk, bounds, codecs = inner, [() for _ in shape], codec_list(configuration["codecs"])
    return tuple(layers), chunk, [*before, *codecs]


def _layer(shards: ShardingIndexed, after: list[dict[str, Any]]) -> Layer:
    """The layer of shards inside the codecs `after` the sharding codec."""
    if all(c["name"] == "crc32c" for c in after):
        return Layer(shards, trailer=4 * len(after))
    around = tuple(Codec(*named(c)) for c in after)
    for c in around:
        if not can_decode(c):
            raise ValueError(f"codec {c.name!r:.80} around the shard is unknown")
    return Layer(shards, codecs=around)


def _index_encoding(configuration: Mapping[str, Any]) -> IndexEncoding:
    location = choice(configuration.get("index_location", "end"), "index_location", "start", "end")
    codecs = codec_list(configuration["index_codecs"])
    names = [c["name"] for c in codecs]
    if names[:1] not in (["bytes"], ["endian"]) or names[1:] not in ([], ["crc32c"]):
        raise ValueError(f"index_codecs {names} are none that shardfs knows")
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    endian = choice(endian, "index_codecs: endian", "little", "big")
    return IndexEncoding(endian, len(names) == 2, location)


def decoding(codec: Mapping[str, Any], rank: int, itemsize: int | None) -> tuple[str, Any]:
    """The name and parameters of a codec that decoding uses. Codecs with equal results decode bytes equally.

    Clients may change the other parameters while chunks are stored. Raise one of `UNFIT` if the codec is invalid.
    """
    name, configuration = named(codec)
    parameters = {k: v for k, v in configuration.items() if k not in zarr_metadata.CODEC_PARAMETERS.get(name, ())}
    match name:
        case "bytes" | "endian":
            return "bytes", {} if itemsize == 1 else {"endian": "little", **parameters}
        case "transpose":
            return name, {**parameters, "order": zarr_metadata.transposed(tuple(range(rank)), parameters["order"])}
    return name, parameters


def _form(doc: Mapping[str, Any], codecs: list[dict[str, Any]], key: str, rank: int) -> str:
    """The `Collection.form` of a sharded array. `key` is the key of one chunk."""
    size = item_size(doc.get("data_type"))

    def stored(chain: list[dict[str, Any]]) -> list[Any]:
        return [sharding(c["configuration"]) if c["name"] == SHARDING else decoding(c, rank, size) for c in chain]

    def sharding(configuration: Mapping[str, Any]) -> list[Any]:
        encoding = _index_encoding(configuration)
        index = encoding.endian, encoding.crc32c, encoding.location
        return [configuration["chunk_shape"], index, stored(codec_list(configuration["codecs"]))]

    grid = named(doc["chunk_grid"])
    return form_of("zarr3", doc.get("data_type"), grid, key, stored(codecs))


def _check(chain: Sequence[Mapping[str, Any]], chunk: Sequence[int], data_type: Any) -> Chain:
    """The check of stored chunks. Chunks have their full size also at the edges of the array."""
    tail = list(itertools.dropwhile(lambda c: c["name"] in KEEP_SIZE, chain))
    if not tail or tail[0]["name"] not in ("bytes", "endian"):
        return Chain(encoding=tail[0]["name"] if tail else "?")
    around = [Codec(*named(c)) for c in tail[1:]]
    return full_chunks(around, chunk, item_size(data_type))


def item_size(data_type: Any) -> int | None:
    """The bytes of an element; None if the name of the data type does not contain the size."""
    match = _ITEM.fullmatch(data_type) if isinstance(data_type, str) else None
    return None if match is None else int(match[1] or match[2] or 8) // 8


def chunk_keys(encoding: Any, rank: int) -> ChunkKeys:
    """The names of chunks and shards by the member `chunk_key_encoding`. Raise one of `UNFIT` if it is invalid."""
    name, configuration = named(encoding)
    is_default = choice(name, "chunk_key_encoding", "default", "v2") == "default"
    separator = configuration.get("separator", "/" if is_default else ".")
    choice(separator, "chunk_key_encoding: separator", "/", ".")
    return ChunkKeys(f"c{separator}", separator, "c", rank) if is_default else ChunkKeys("", separator, "0", rank)


# ---- members ----


def named(value: Any) -> tuple[str, Mapping[str, Any]]:
    """The name and configuration of an extension point, which is an object or, since Zarr 3.1, a bare name.

    Raise one of `UNFIT` for anything else.
    """
    if isinstance(value, str):
        return value, {}
    name, configuration = value["name"], value.get("configuration", {})
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"should have a name and a configuration: {value!r:.80}")
    return name, configuration


def codec_list(codecs: Any) -> list[dict[str, Any]]:
    """The codecs, all as objects. Raise one of `UNFIT`, with the reason, if `codecs` is not a list of codecs."""
    for c in listed(codecs, "codecs"):
        named(c)
    return [{"name": c} if isinstance(c, str) else c for c in codecs]


def _data_type(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
