"""Reads stored documents of the draft of 2022, and translates those of sharded arrays to unsharded ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardfs.formats import ome, zarr_metadata
from shardfs.formats.documents import (
    choice,
    form_of,
    integers,
    listed,
    mapping,
    parse_json,
    print_json,
    require_rank,
    shown_document,
)
from shardfs.formats.zarr_arrays import (
    MAX_NESTING,
    ChunkKeys,
    chunks_per_shard,
    described_array,
    full_chunks,
    object_member,
    opened,
    unsharded_array,
)
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Dataset, Problem, Scope
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import ceil_div
from shardfs.model.kinds import is_in
from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.codecs.checks import Chain
    from shardfs.model.values import Coords

FORMAT = "zarr3-draft"
DOCUMENT = "zarr.json"
META, DATA = "meta/root", "data/root"
CONSOLIDATED = ".zmetadata"
TRANSFORMERS = "storage_transformers"

_ITEM = re.compile(r"bool|[<>|]?[biufcV]([0-9]{1,4})")
"""Data types whose name ends with their size in bytes, and `bool`, which has one byte."""


@dataclass(frozen=True)
class Hierarchy(Scope):
    """The scope of a hierarchy, whose root has the document `zarr.json`.

    Args:
        suffix: the end of the names of metadata documents, after `.array` and `.group`.
    """

    suffix: str
    data = DATA

    def listing(self, below: str) -> str:
        return META + below.removeprefix(DATA)

    def member(self, name: str, is_directory: bool) -> str | None:
        if is_directory:
            return name  # an implicit group
        ends = (f".{kind}{self.suffix}" for kind in ("array", "group"))
        return next((name.removesuffix(end) for end in ends if name.endswith(end) and name != end), None)

    def documents(self, below: str) -> Sequence[str]:
        if below in ("data", "meta", META):
            return (DOCUMENT,)  # implicit groups
        if is_in(below, META):
            return (f"{below}.group{self.suffix}",)
        if is_in(below, DATA):
            node = META + below.removeprefix(DATA)
            documents = f"{node}.array{self.suffix}", f"{node}.group{self.suffix}"
            return (*documents, DOCUMENT) if below == DATA else documents
        return ()

    def open(self, path: str, below: str, documents: Mapping[str, bytes]) -> Dataset | None:
        if below == "meta" or is_in(below, META):
            return Dataset(FORMAT, rewriter=ArrayDocuments(self.suffix))
        if not is_in(below, DATA):
            return None
        array, group = self.documents(below)[:2]
        if array in documents:
            return _open_array(path, array, documents[array])
        # A name such as c1 in a group is a child of the group, not a chunk.
        return _open_group(path, group, documents[group]) if group in documents else None


def _open_array(path: str, name: str, raw: bytes) -> Dataset:
    doc = parse_json(path, name, raw)
    # The document is not in the directory of the array. `ArrayDocuments` shows it.
    return replace(opened(Dataset(FORMAT, closed=True), path, name, doc, unshard, _unsharded), documents={})


def _open_group(path: str, name: str, raw: bytes) -> Dataset:
    try:
        attributes = object_member(parse_json(path, name, raw), "attributes")
    except CorruptShardError as e:  # datasets below do not depend on the document
        return Dataset(FORMAT, problems=(Problem(path, f"{name}: {e.why}"),))
    return Dataset(FORMAT, attributes=attributes, multiscales=ome.multiscales(attributes))


@dataclass(frozen=True)
class ArrayDocuments:
    """The `Rewriter` of the documents of arrays, and of zarr-python's consolidated document `.zmetadata`."""

    suffix: str

    def applies(self, name: str) -> bool:
        return name.endswith(f".array{self.suffix}") or name == CONSOLIDATED

    def rewrite(self, path: str, name: str, raw: bytes) -> bytes | None:
        doc = parse_json(path, name, raw)
        try:
            document = self._with_members_unsharded(doc) if name == CONSOLIDATED else shown_document(unshard, doc)
            return None if document is None else print_json(document)
        except ValueError:
            return None  # nested too deeply

    def _with_members_unsharded(self, doc: Any) -> dict[str, Any] | None:
        members = object_member(doc, "metadata")
        arrays = {name: member for name, member in members.items() if name.endswith(f".array{self.suffix}")}
        unsharded = {name: shown_document(unshard, member) for name, member in arrays.items()}
        changed = {name: member for name, member in unsharded.items() if member is not None}
        return {**doc, "metadata": {**members, **changed}} if changed else None


# ---- one array ----


def unshard(doc: Any) -> tuple[Collection, dict[str, Any]] | None:
    """The collection that an array's document describes, and the document of the unsharded array.

    None if the array is not sharded. Raise one of `UNFIT`, with the reason, if the array cannot be shown unsharded.
    """
    if not isinstance(doc, dict):
        raise ValueError(f"should be an object, not {type(doc).__name__}")
    transformers = doc.get(TRANSFORMERS)
    if not transformers:
        return None
    other_transformers, shardings = split_transformers(transformers)
    if not shardings:
        return None
    shape = integers(doc["shape"], "shape", 0)
    chunk, separator = chunk_grid(doc["chunk_grid"], len(shape))
    # An array without axes has one chunk, named c0 as in an array with one axis.
    grid = tuple(ceil_div(n, c) for n, c in zip(shape, chunk, strict=True)) or (1,)
    keys = ChunkKeys("c", separator, "", len(grid))
    layers, shard = [], chunk
    for per_shard in (chunks_per_shard(s, len(grid)) for s in shardings):
        layers.append(Layer(_shards(grid, per_shard, keys)))
        grid = tuple(ceil_div(n, per) for n, per in zip(grid, per_shard, strict=True))
        shard = tuple(n * per for n, per in zip(shard, per_shard, strict=False))
    layers.reverse()  # the last transformer in the document is next to the store
    document = {k: v for k, v in doc.items() if k != TRANSFORMERS}
    if other_transformers:
        document = {**doc, TRANSFORMERS: other_transformers}
    collection = Collection(
        format=FORMAT,
        path="",
        names=keys.names(layers[-1].format.grid),
        layers=tuple(layers),
        codecs=_codecs(doc),
        facts=Facts(shape, chunk, shard, _data_type(doc.get("data_type")), _describe(len(layers))),
        check=_check(doc, chunk),
        form=_form(doc, shardings),
    )
    return collection, document


def _form(doc: Mapping[str, Any], shardings: Sequence[Mapping[str, Any]]) -> str:
    """The `Collection.form` of a sharded array."""
    members = [doc.get(name) for name in ("data_type", "chunk_grid", "chunk_memory_layout", "extensions")]
    return form_of(FORMAT, members, codec_of(doc), [s["configuration"] for s in shardings])


def codec_of(doc: Mapping[str, Any]) -> Any:
    """The URL of the compressor, without its parameters, which may change while chunks are stored; None for none."""
    compressor = doc.get("compressor") or None
    return compressor.get("codec") if isinstance(compressor, dict) else compressor


def split_transformers(transformers: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The other transformers, which the shown document keeps, and those for sharding, in their order from the array.

    Raise one of `UNFIT` for an invalid list, and ValueError for another transformer after one for sharding, since it
    could change the names or the content of shards.
    """
    other_transformers: list[Any] = []
    shardings: list[dict[str, Any]] = []
    for t in listed(transformers, TRANSFORMERS):
        extension = t["extension"]
        if not isinstance(extension, str):
            raise ValueError(f"extension should be a URL, not {extension!r:.80}")
        if extension.endswith("/sharding/1.0"):
            shardings.append(t)
        elif shardings:
            raise ValueError(f"the storage transformer {extension!r:.200} between shards and store is unknown")
        elif "/sharding/" in extension:
            raise ValueError(f"sharding of a version that is unknown: {extension!r:.200}; shardfs reads version 1.0")
        else:
            other_transformers.append(t)
    if len(shardings) > MAX_NESTING:
        raise ValueError(f"shards are nested more than {MAX_NESTING} deep")
    return other_transformers, shardings


def chunk_grid(grid: Any, rank: int) -> tuple[Coords, str]:
    """The shape of a chunk, and the separator between the numbers in its name. Raise one of `UNFIT` for other grids."""
    if grid["type"] != "regular":
        raise ValueError(f"unknown chunk grid {grid['type']!r:.80}")
    chunk, separator = integers(grid["chunk_shape"], "chunk_shape", 1), grid.get("separator", "/")
    require_rank(chunk, rank, "chunk_shape")
    return chunk, choice(separator, "separator", "/", ".")


def _shards(grid: Coords, per_shard: Coords, keys: ChunkKeys) -> ShardingIndexed:
    axes = [ShardedAxis(n, per) for n, per in zip(grid, per_shard, strict=True)]
    return ShardingIndexed(axes, range(len(axes)), IndexEncoding(crc32c=False), keys.key, keys.coords)


def _codecs(doc: Mapping[str, Any]) -> tuple[str, ...]:
    """The compressor's name from its URL, such as `.../codec/gzip/1.0`; () without a compressor."""
    url = codec_of(doc)
    return tuple(url.split("/")[-2:-1]) if isinstance(url, str) else ()


def _check(doc: Mapping[str, Any], chunk: Coords) -> Chain:
    around = [Codec(name) for name in _codecs(doc)]
    if doc.get("compressor") is not None and not around:
        around = [Codec("an unknown compressor")]
    return full_chunks(around, chunk, item_size(doc.get("data_type")))


def item_size(data_type: Any) -> int | None:
    """The bytes of an element; None if the name of the data type does not contain the size."""
    match = _ITEM.fullmatch(str(data_type))
    return None if match is None else int(match[1] or 1)


def _describe(depth: int) -> str:
    words = "storage transformer, index at end"
    return words if depth == 1 else f"{words}, nested {depth} deep"


# ---- what other layouts need to know ----


def _unsharded(doc: Mapping[str, Any]) -> Collection:
    """The collection of an unsharded array. Raise one of `UNFIT`, with the reason, if the array is not understood."""
    if doc.get(TRANSFORMERS):
        raise ValueError("a storage transformer may change chunks, and shardfs does not know it")
    rank = len(integers(doc["shape"], "shape", 0))
    chunk, separator = chunk_grid(doc["chunk_grid"], rank)
    dtype, layout = zarr_metadata.number_type(_data_type(doc["data_type"])), doc.get("chunk_memory_layout", "C")
    chain: list[zarr_metadata.Named] = [
        ("transpose", {"order": choice(layout, "chunk_memory_layout", "C", "F")}),
        ("bytes", {"endian": "big" if dtype.str[0] == ">" else "little"}),
    ]
    if (compressor := doc.get("compressor")) is not None:
        chain.append(_compressor(compressor, dtype.itemsize))
    names, attributes = zarr_metadata.split_dimensions(object_member(doc, "attributes"), rank)
    array = described_array(doc, chunk, dtype.newbyteorder("=").str, chain, names, attributes)
    # An array without axes has one chunk, named c0 as in an array with one axis.
    keys = ChunkKeys("c", separator, "", rank or 1)
    return unsharded_array(FORMAT, array, keys, _codecs(doc), _data_type(doc["data_type"]))


def _compressor(value: Any, itemsize: int) -> tuple[str, Mapping[str, Any]]:
    *_, kind, _ = str(value["codec"]).split("/")
    configuration = mapping(value.get("configuration", {}), f"{kind}: configuration")
    return zarr_metadata.of_numcodecs(kind, configuration, itemsize)


# ---- members ----


def _data_type(value: Any) -> str:
    """The name of a data type, which may be an extension with the name as its `type`."""
    return str(value.get("type") if isinstance(value, dict) else value)
