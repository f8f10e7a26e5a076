"""Zarr v3 as it is stored: what an array's document says, and the same of the array without shards."""

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
"""Of an array's document; others are extensions."""

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
"""Array-to-array codecs that treat each element by itself: doing so before or after cutting chunks is the same."""

KEEP_SIZE = frozenset(("transpose", "bitround", "numcodecs.bitround"))
"""Array-to-array codecs that make as many bytes as they are given."""

_ITEM = re.compile(r"(?:u?int|float|bfloat|complex)(8|16|32|64|128)|r(8|16|24|32|64|128)|bool")
"""Data types whose size in bits is their name; and `bool`, of 8."""

MAX_EDGES = 1_000_000
"""Shards along one axis of a rectilinear grid; their edges are kept in memory."""

MAX_NESTING = 16


def open_group(path: str, doc: dict[str, Any]) -> Dataset:
    """What the document of a group describes, in which others may be consolidated."""
    attributes = _attributes(doc)
    group = Dataset("zarr3", form=FORM, attributes=attributes, multiscales=ome.multiscales(attributes))
    try:
        shown = rewritten(doc)
        return replace(group, documents={DOCUMENT: print_json(shown)}) if shown is not doc else group
    except (ValueError, RecursionError):
        return replace(group, problems=(Problem(path, f"{DOCUMENT}: nested too deeply"),))


def open_array(path: str, doc: dict[str, Any]) -> Dataset:
    """What the document of an array describes, sharded or not; with the reason if it cannot be expanded."""
    array = Dataset("zarr3", closed=True, form=FORM | {"c"})
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
    """The dataset with what the document of its (unsharded) array says, or with the reason why it cannot be told."""
    try:
        array = _array(doc)
        if dataset.collections:
            return replace(dataset, collections=tuple(replace(c, array=array) for c in dataset.collections))
        return replace(dataset, unsharded=(_plain(doc, array),))
    except (*UNFIT, RecursionError) as e:
        return replace(dataset, indescribable=reason(e))


def _array(doc: Mapping[str, Any]) -> Array:
    """What the document of an array in a regular grid of chunks says."""
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
    """Raise ValueError for an extension that readers must know: what it says would be lost in other documents."""
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
    """An array that is not sharded: each chunk is an object by itself."""
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers may store chunks elsewhere")
    keys = ChunkKeys(doc.get("chunk_key_encoding"), len(array.shape))
    facts = Facts(array.shape, array.chunk, None, _data_type(doc["data_type"]), "none")
    codecs = tuple(c["name"] for c in codec_list(doc["codecs"]))
    layer = Layer(Unsharded(array.grid, keys.key, keys.coords))
    return Collection("zarr3", "", keys.names(array.grid), (layer,), codecs, facts, array=array)


def rewritten(doc: dict[str, Any]) -> dict[str, Any]:
    """A group's document with the arrays in its consolidated metadata unsharded; `doc` itself if there are none."""
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
                continue  # the array's own document says so when it is opened
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
    """The state of following a codec chain inwards. All shapes are in array axis order."""

    shape: Coords
    chunk: list[int]
    order: list[int]  # axis i of the current codec is array axis order[i]
    bounds: list[tuple[int, ...]]  # of a rectilinear grid: element positions of the outermost shards' edges
    before: list[dict[str, Any]] = field(default_factory=list)  # array-to-array codecs met on the way
    layers: list[Layer] = field(default_factory=list)


def unshard(doc: Mapping[str, Any]) -> tuple[Collection, dict[str, Any]] | None:
    """The collection an array's document describes, and the document of the same array unsharded.

    None if the array is not sharded. Raise ValueError, TypeError, KeyError or IndexError, with the reason, if it
    cannot be shown unsharded.
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
    """What stored chunks must be; they are full at the edges of the array, too."""
    rest = list(itertools.dropwhile(lambda c: c["name"] in KEEP_SIZE, chain))
    if not rest or rest[0]["name"] not in ("bytes", "endian"):
        return Chain(encoding=rest[0]["name"] if rest else "?")
    around = [Codec(c["name"], c.get("configuration", {})) for c in rest[1:]]
    item = item_size(data_type)
    if item is None or (size := math.prod(chunk) * item) >= 2**62:
        return Chain(around)
    return Chain(around, lambda coords: np.full(len(coords), size, np.uint64))


def item_size(data_type: Any) -> int | None:
    """The bytes of an element; None if the type's name does not tell."""
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
    """Element positions at which the shards of an axis begin, and the end of the last; () if they are regular."""
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
    """Go inside the sharding codec of a chain: add a layer, return the chain of its chunks; None if there is none."""
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
    """The `chunk_key_encoding` of an array: names of chunks, and of shards, which are named alike."""

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
    """An extension point: an object with a name, or (3.1) the bare name."""
    if isinstance(value, str):
        return value, {}
    name, configuration = value["name"], value.get("configuration", {})
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"should have a name and a configuration: {value!r:.80}")
    return name, configuration


def codec_list(codecs: Any) -> list[dict[str, Any]]:
    """Codecs as objects. Raise one of `UNFIT`, with the reason, for what is no such list."""
    for c in listed(codecs, "codecs"):
        named(c)
    return [{"name": c} if isinstance(c, str) else c for c in codecs]


def _data_type(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
