"""Reads stored Zarr v3 documents, and translates those of sharded arrays to the documents of unsharded arrays."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from shardfs.codecs.checks import Chain
from shardfs.codecs.decoders import can_decode
from shardfs.formats import ome, zarr_values
from shardfs.formats.documents import UNFIT, integer, integers, listed, print_json, reason, require_rank
from shardfs.model.arrays import Array, Codec
from shardfs.model.collection import ChunkNames, Collection, Facts, Layer
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.grid import FlatNames, NestedNames, ceil_div, cell_of
from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.values import Coords

DOCUMENT = "zarr.json"
FORM = frozenset((DOCUMENT,))

MEMBERS = frozenset(
    ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value",
     "attributes", "dimension_names", "storage_transformers")
)  # fmt: skip
"""The members of an array's document that the specification defines; all others are extensions."""

VALUE_WISE = frozenset(
    (
        "cast_value",
        "scale_offset",
        "bitround",
        "numcodecs.bitround",
        "numcodecs.fixedscaleoffset",
        "numcodecs.astype",
    )
)
"""Array-to-array codecs that transform each element separately.

Their results before and after the split into chunks are equal.
"""

KEEP_SIZE = frozenset(("transpose", "bitround", "numcodecs.bitround"))
"""Array-to-array codecs that keep the size of a chunk in bytes."""

_ITEM = re.compile(r"(?:u?int|float|bfloat|complex)(8|16|32|64|128)|r(8|16|24|32|64|128)|bool")
"""Data types whose name has their size in bits, and `bool`, which has 8 bits."""

MAX_EDGES = 1_000_000
"""The largest number of shards along one axis of a rectilinear grid, whose edges are kept in memory."""

MAX_NESTING = 16


def open_group(path: str, doc: dict[str, Any]) -> Dataset:
    """The dataset for a group's document. Consolidated documents of sharded arrays in it are shown unsharded."""
    attributes = _attributes(doc)
    group = Dataset("zarr3", format_names=FORM, attributes=attributes, multiscales=ome.multiscales(attributes))
    try:
        shown = rewritten(doc)
        return replace(group, documents={DOCUMENT: print_json(shown)}) if shown is not doc else group
    except (ValueError, RecursionError):
        return replace(group, problems=(Problem(path, f"{DOCUMENT}: nested too deeply"),))


def open_array(path: str, doc: dict[str, Any]) -> Dataset:
    """The dataset for the document of an array, sharded or not; with a problem if the array cannot be unsharded."""
    array = Dataset("zarr3", closed=True, format_names=FORM | {"c"})
    try:
        unsharded = unshard(doc)
        if unsharded is None:
            return _described(array, doc)
        collection, shown = unsharded
        return _described(replace(array, collections=(collection,), documents={DOCUMENT: print_json(shown)}), shown)
    except UNFIT as e:
        return replace(array, problems=(Problem(path, f"{DOCUMENT}: {reason(e)}"),))


def _attributes(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    found = doc.get("attributes")
    return found if isinstance(found, dict) else {}


# ---- what other layouts need to know ----


def _described(dataset: Dataset, doc: Mapping[str, Any]) -> Dataset:
    """The dataset with the description of its array, from the unsharded document `doc`, or with `indescribable`."""
    try:
        array = _array(doc)
        if dataset.collections:
            return replace(dataset, collections=tuple(replace(c, array=array) for c in dataset.collections))
        return replace(dataset, unsharded=(_plain(doc, array),))
    except (*UNFIT, RecursionError) as e:
        return replace(dataset, indescribable=reason(e))


def _array(doc: Mapping[str, Any]) -> Array:
    """The description of an array with a regular chunk grid. Raise one of `UNFIT` for other arrays."""
    _require_understood(doc)
    shape = integers(doc["shape"], "shape", 0)
    chunk = _regular(doc["chunk_grid"], shape)
    data_type, names = zarr_values.numpy_type(doc["data_type"]), doc.get("dimension_names")
    chain = [(c["name"], c.get("configuration", {})) for c in codec_list(doc["codecs"])]
    named = isinstance(names, list) and len(names) == len(shape) and all(isinstance(n, str | None) for n in names)
    return Array(
        shape,
        chunk,
        data_type,
        zarr_values.chunk_encoding(data_type, len(shape), chain),
        tuple(range(len(shape))),
        zarr_values.fill_value(doc.get("fill_value"), data_type),
        tuple(names) if named and names else None,
        attributes=_attributes(doc),
    )


def _require_understood(doc: Mapping[str, Any]) -> None:
    """Raise ValueError for an extension that readers must understand, because other formats cannot express it."""
    for name, value in doc.items():
        may_be_ignored = value is None or (isinstance(value, dict) and value.get("must_understand") is False)
        if name not in MEMBERS and not may_be_ignored:
            raise ValueError(f"member {name!r:.80} is an extension that must be understood")


def _regular(grid: Any, shape: Coords) -> Coords:
    name, configuration = named(grid)
    if name != "regular":
        raise ValueError(f"chunk grid {name!r:.80} is not regular")
    chunk = integers(configuration["chunk_shape"], "chunk_shape", 1)
    require_rank(chunk, len(shape), "chunk_grid")
    return chunk


def _plain(doc: Mapping[str, Any], array: Array) -> Collection:
    """The collection of an unsharded array, with an object for each chunk."""
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers may store chunks elsewhere")
    keys = ChunkKeys(doc.get("chunk_key_encoding"), len(array.shape))
    facts = Facts(array.shape, array.chunk, None, _data_type(doc["data_type"]), "none")
    codecs = tuple(c["name"] for c in codec_list(doc["codecs"]))
    layer = Layer(Unsharded(array.grid, keys.key, keys.coords))
    return Collection("zarr3", "", keys.names(array.grid), (layer,), codecs, facts, array=array)


def rewritten(doc: dict[str, Any]) -> dict[str, Any]:
    """The group's document with unsharded arrays in its consolidated metadata; `doc` itself without sharded arrays."""
    consolidated = doc.get("consolidated_metadata")
    if not isinstance(consolidated, dict) or not isinstance(consolidated.get("metadata"), dict):
        return doc
    members: dict[str, Any] = consolidated["metadata"]
    changed = {}
    for name, member in members.items():
        if not isinstance(member, dict):
            continue
        if member.get("node_type") == "array":
            try:
                unsharded = unshard(member)
            except UNFIT:
                continue  # opening the array reports the problem
            if unsharded is not None:
                changed[name] = unsharded[1]
        elif (inner := rewritten(member)) is not member:
            changed[name] = inner
    if not changed:
        return doc
    shown = {name: changed.get(name, member) for name, member in members.items()}
    return {**doc, "consolidated_metadata": {**consolidated, "metadata": shown}}


# ---- one array ----


@dataclass
class _Unsharding:
    """The state of a walk through nested sharding codecs, outermost first. All shapes are in array axis order."""

    shape: Coords
    chunk: list[int]
    order: list[int]  # axis i of the current codec is array axis order[i]
    bounds: list[tuple[int, ...]]  # edges of the outermost shards in elements, if the grid is rectilinear
    before: list[dict[str, Any]] = field(default_factory=list)  # array-to-array codecs before sharding codecs
    layers: list[Layer] = field(default_factory=list)


def unshard(doc: Mapping[str, Any]) -> tuple[Collection, dict[str, Any]] | None:
    """The collection that an array's document describes, and the document of the unsharded array.

    None if the array is not sharded. Raise ValueError, TypeError, KeyError or IndexError, with the reason, if the
    array cannot be shown unsharded.
    """
    codecs = codec_list(doc["codecs"])
    if not any(c["name"] == "sharding_indexed" for c in codecs):
        return None
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers may store chunks elsewhere")
    shape = integers(doc["shape"], "shape", 0)
    state = _start(shape, doc["chunk_grid"])
    shard_shape = None if any(state.bounds) else tuple(state.chunk)
    keys = ChunkKeys(doc.get("chunk_key_encoding"), len(shape))
    inner = codecs
    for _ in range(MAX_NESTING):
        step = _enter(state, inner, keys)
        if step is None:
            break
        inner = step
    else:
        raise ValueError(f"shards are nested more than {MAX_NESTING} deep")
    chain = [*state.before, *inner]
    shown = {
        **doc,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": state.chunk}},
        "codecs": chain,
    }
    collection = Collection(
        format="zarr3",
        path="",
        names=keys.names(state.layers[-1].format.grid),
        layers=tuple(state.layers),
        codecs=tuple(c["name"] for c in chain),
        facts=Facts(shape, tuple(state.chunk), shard_shape, _data_type(doc.get("data_type")), _describe(state)),
        check=_check(chain, state.chunk, doc.get("data_type")),
    )
    return collection, shown


def _check(chain: Sequence[Mapping[str, Any]], chunk: Sequence[int], data_type: Any) -> Chain:
    """The check of stored chunks. Chunks have their full size also at the edges of the array."""
    rest = list(itertools.dropwhile(lambda c: c["name"] in KEEP_SIZE, chain))
    if not rest or rest[0]["name"] not in ("bytes", "endian"):
        return Chain(encoding=rest[0]["name"] if rest else "?")
    around = [Codec(c["name"], c.get("configuration", {})) for c in rest[1:]]
    item = item_size(data_type)
    if item is None or (size := math.prod(chunk) * item) >= 2**62:
        return Chain(around)
    return Chain(around, lambda coords: np.full(len(coords), size, np.uint64))


def item_size(data_type: Any) -> int | None:
    """The bytes of an element; None if the name of the data type does not contain the size."""
    match = _ITEM.fullmatch(data_type) if isinstance(data_type, str) else None
    return None if match is None else int(match[1] or match[2] or 8) // 8


def _start(shape: Coords, grid: Any) -> _Unsharding:
    name, configuration = named(grid)
    order = list(range(len(shape)))
    if name == "regular":
        chunk = integers(configuration["chunk_shape"], "chunk_shape", 1)
        require_rank(chunk, len(shape), "chunk_grid")
        return _Unsharding(shape, list(chunk), order, [() for _ in shape])
    if name == "rectilinear":
        edges = configuration["chunk_shapes"]
        require_rank(edges, len(shape), "chunk_grid")
        bounds = [_bounds(e, n) for e, n in zip(edges, shape, strict=True)]
        return _Unsharding(shape, [e if isinstance(e, int) else 0 for e in edges], order, bounds)
    raise ValueError(f"unknown chunk grid {name!r}")


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


def _enter(state: _Unsharding, codecs: list[dict[str, Any]], keys: ChunkKeys) -> list[dict[str, Any]] | None:
    """Add a layer for the chain's sharding codec, and return the codecs inside it; None if the chain has none."""
    at = next((i for i, c in enumerate(codecs) if c["name"] == "sharding_indexed"), None)
    if at is None:
        return None
    for c in codecs[:at]:
        _carry_over(state, c)
    configuration = codecs[at]["configuration"]
    state.layers.append(_layer(state, configuration, codecs[at + 1 :], keys))
    return codec_list(configuration["codecs"])


def _carry_over(state: _Unsharding, codec: dict[str, Any]) -> None:
    name = codec["name"]
    if name == "transpose":
        state.order = list(zarr_values.transposed(tuple(state.order), codec["configuration"]["order"]))
    elif name not in VALUE_WISE:
        raise ValueError(f"codec {name!r} before sharding_indexed may depend on how the array is cut")
    state.before.append(codec)


def _layer(state: _Unsharding, configuration: Any, after: list[dict[str, Any]], keys: ChunkKeys) -> Layer:
    own = integers(configuration["chunk_shape"], "chunk_shape", 1)
    require_rank(own, len(state.shape), "sharding_indexed chunk_shape")
    inner = list(own)
    for i, a in enumerate(state.order):
        inner[a] = own[i]
    axes = [_axis(state, a, c) for a, c in enumerate(inner)]
    state.chunk, state.bounds = inner, [() for _ in inner]
    shards = ShardingIndexed(axes, state.order, _index_encoding(configuration), keys.key, keys.coords)
    if all(c["name"] == "crc32c" for c in after):
        return Layer(shards, trailer=4 * len(after))
    around = tuple(Codec(c["name"], c.get("configuration", {})) for c in after)
    for c in around:
        if not can_decode(c):
            raise ValueError(f"codec {c.name!r} around the shard is unknown")
    return Layer(shards, codecs=around)


def _axis(state: _Unsharding, a: int, inner: int) -> ShardedAxis:
    chunks = ceil_div(state.shape[a], inner)
    edges = state.bounds[a]
    for outer in {b - a for a, b in itertools.pairwise(edges)} if edges else (state.chunk[a],):
        if outer % inner:
            raise ValueError(f"a shard of {outer} elements along axis {a} does not consist of chunks of {inner}")
    return ShardedAxis(chunks, state.chunk[a] // inner, tuple(e // inner for e in edges))


def _index_encoding(configuration: Mapping[str, Any]) -> IndexEncoding:
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location should be start or end, not {location!r}")
    codecs = codec_list(configuration["index_codecs"])
    names = [c["name"] for c in codecs]
    if names[:1] not in (["bytes"], ["endian"]) or names[1:] not in ([], ["crc32c"]):
        raise ValueError(f"index_codecs {names} are none that shardfs knows")
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise ValueError(f"index_codecs: endian should be little or big, not {endian!r}")
    return IndexEncoding(endian, len(names) == 2, cast("Literal['start', 'end']", location))


def _describe(state: _Unsharding) -> str:
    first = cast("ShardingIndexed", state.layers[0].format)
    words = [f"sharding_indexed, index at {first.index.location}"]
    if len(state.layers) > 1:
        words.append(f"nested {len(state.layers)} deep")
    if state.layers[0].codecs:
        words.append("inside " + ", ".join(c.name for c in state.layers[0].codecs))
    return ", ".join(words)


class ChunkKeys:
    """The `chunk_key_encoding` of an array, which gives chunks and shards their names."""

    def __init__(self, encoding: Any, rank: int) -> None:
        name, configuration = named(encoding)
        if name not in ("default", "v2"):
            raise ValueError(f"unknown chunk key encoding {name!r}")
        self._separator = configuration.get("separator", "/" if name == "default" else ".")
        if self._separator not in ("/", "."):
            raise ValueError(f"chunk_key_encoding: separator should be / or ., not {self._separator!r}")
        self._head = "c" + self._separator if name == "default" else ""
        self._scalar = "c" if name == "default" else "0"
        self._rank = rank

    def names(self, grid: Coords) -> ChunkNames:
        if self._separator == "/" and grid:
            return NestedNames(grid, b"c" if self._head else b"")
        return FlatNames(grid, self._head.encode(), self._separator.encode(), self._scalar.encode())

    def key(self, coords: Coords) -> str:
        return self._head + self._separator.join(map(str, coords)) if coords else self._scalar

    def coords(self, key: str) -> Coords | None:
        if not self._rank:
            return () if key == self._scalar else None
        if not key.startswith(self._head):
            return None
        return cell_of(key[len(self._head) :], self._separator, self._rank)


# ---- members ----


def named(value: Any) -> tuple[str, Mapping[str, Any]]:
    """The name and configuration of an extension point, which is an object or, since Zarr 3.1, a bare name."""
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
