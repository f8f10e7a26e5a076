"""N5: datasets in shards are shown as the same datasets with one file per block, any others in the layout `n5`.

Two kinds: the codec `sharding_indexed` of N5 4.x (https://github.com/saalfeldlab/n5, `codec` and `shard`; there is no
other text), and the storage transformer that the Zarr v3 draft of 2022 had, in an N5 document. All shapes here are in
N5's order: x, the fastest axis, first.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from shardfs import n5_viewer
from shardfs.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.checks import Blocks, Chain
from shardfs.codecs import decode
from shardfs.errors import CorruptShardError, UnsupportedError
from shardfs.formats import (
    UNFIT,
    OfDocuments,
    Pairing,
    System,
    integers,
    listed,
    parse_json,
    print_json,
    print_strict,
    reason,
    require_rank,
)
from shardfs.grid import MappedNames, NestedNames, ceil_div, cell_of
from shardfs.model import Collection, Coords, Dataset, Facts, Layer, Problem
from shardfs.shards.sharding_indexed import Axis, IndexEncoding, ShardingIndexed
from shardfs.shards.unsharded import Unsharded
from shardfs.transcode import FillValue, fill_element, memory_order, transcoder, without_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardfs.arrays import Multiscale
    from shardfs.model import U64, ChunkCheck, ChunkNames, Sizes, Transform

DOCUMENT = "attributes.json"
VERSION = "2.0.0"
"""Of what layouts show: there is nothing newer in it, and older software reads no newer ones."""

MAX_NESTING = 16

ITEM_SIZES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float32": 4, "float64": 8,
}  # fmt: skip

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "raw": {},
    "gzip": {"level": -1, "useZlib": False},
    "bzip2": {"blockSize": 9},
    "xz": {"preset": 6},
    "lz4": {"blockSize": 65536},
    "blosc": {"cname": "blosclz", "clevel": 6, "shuffle": 0, "blocksize": 0},
    "zstd": {"level": 3},
}
"""The members of `compression` that readers want, with what they are if the codec does not say; tensorstore opens
nothing that has others, z5py and zarr-python nothing that lacks one."""

SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
"""Zarr's words for Blosc's `shuffle`."""

HEADERLESS: Mapping[str, Literal["little", "big"]] = {"raw-bytes": "big", "bytes": "little"}
"""Codecs that write the elements alone, and their byte order if they do not say (n5-zarr's `bytes`: the machine's)."""

FORM = frozenset((DOCUMENT,))
STRUCTURAL = frozenset(
    ("n5", "dimensions", "blockSize", "dataType", "compression", "compressionType", "codecs", "storage_transformers")
)
"""The members of a dataset's document that are not the user's."""

DEFAULT_LEVEL = 6
"""What zlib takes -1 for."""

XZ = 1
"""The number of the container in numcodecs' LZMA."""

CRC32C = Codec("crc32c")
SEED_SHARDING = "/sharding/1.0"
"""The end of the transformer's URL, of which there are three spellings."""


class N5Format(OfDocuments):
    """See `formats.Format` and `formats.View`."""

    name = "n5"
    pairings = (
        Pairing(
            "zarr3",
            "pass behind a header if big-endian or of one byte, in at most one codec that N5 has; else decoded",
            "tensorstore, z5py, zarr-python 2.18",
        ),
        Pairing("zarr3-draft", "as Zarr v3's", "tensorstore"),
        Pairing(
            "precomputed",
            "volumes only: raw ones of one byte pass; else turned or decoded",
            "tensorstore, z5py, zarr-python 2.18",
        ),
        Pairing("n5", "the native layout", "see docs/formats.md"),
        Pairing("bcolz", "Blosc of one byte passes; else decoded", "tensorstore"),
        Pairing("bloscpack", "as bcolz's", "tensorstore"),
    )
    documents = (DOCUMENT,)
    systems = (
        System(
            "n5",
            "N5 4.x `sharding_indexed`",
            "`attributes.json` with `codecs`",
            "plain N5: `0/4/1/7`",
            "N5 (Java), a golden shard; tensorstore, z5py (blocks)",
            "tensorstore, z5py, zarr-python 2",
        ),
        System(
            "n5",
            "N5 with the storage transformer of 2022",
            "`attributes.json` with `storage_transformers`",
            "plain N5: `0/4/1/7`",
            "tensorstore, z5py (blocks)",
            "tensorstore, z5py, zarr-python 2",
        ),
    )

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get(DOCUMENT)
        if raw is None or not raw.lstrip().startswith(b"{"):
            return None
        try:
            doc = parse_json(path, DOCUMENT, raw)
        except CorruptShardError as e:
            # Any group may have one, with what users put there; what lies below it needs it for nothing.
            return Dataset("n5", problems=(Problem(path, f"{DOCUMENT}: {e.why}"),))
        if _is_dataset(doc):
            return _open_dataset(path, doc)
        if "n5" not in doc and len(documents) > 1:
            return None  # a file of this name is no reason to take the directory from another format
        attributes = {name: value for name, value in doc.items() if name != "n5"}
        return Dataset("n5", form=FORM, attributes=attributes, levels=n5_viewer.LevelsBelow(attributes))

    def children(self, dataset: Dataset) -> Sequence[str]:
        image = None if dataset.format == self.name else _image_of(dataset)
        own = {c.path for c in (*dataset.collections, *dataset.unsharded)}
        return [level.path for level in image.levels if level.path not in own] if image is not None else ()

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        if dataset is None:
            return Dataset("n5", documents={} if path else {DOCUMENT: print_strict({"n5": VERSION})})
        if dataset.format == self.name:
            return replace(dataset, collections=dataset.collections or dataset.unsharded)
        return _laid_out(path, dataset, children)


def _open_dataset(path: str, doc: Mapping[str, Any]) -> Dataset:
    dataset = Dataset("n5", closed=True, form=FORM)
    try:
        unsharded = _unshard(doc)
        if unsharded is None:
            return _described(dataset, doc, None)
        collection, shown, chain = unsharded
        dataset = replace(dataset, collections=(collection,), documents={DOCUMENT: print_json(shown)})
        return _described(dataset, shown, chain)
    except UNFIT as e:
        return replace(dataset, problems=(Problem(path, f"{DOCUMENT}: {reason(e)}"),))


def _is_dataset(doc: Mapping[str, Any]) -> bool:
    encoded = any(name in doc for name in ("compression", "codecs", "compressionType"))
    return encoded and all(name in doc for name in ("dimensions", "blockSize", "dataType"))


_Unsharded: TypeAlias = "tuple[Collection, dict[str, Any], Sequence[Codec] | None]"


def _unshard(doc: Mapping[str, Any]) -> _Unsharded | None:
    """The collection that a dataset's document describes, the document of the same dataset unsharded, and the chain
    of codecs of a stored chunk if the document does not tell it.

    None if it is not sharded. Raise one of `UNFIT`, with the reason, if it cannot be shown unsharded.
    """
    transformers = doc.get("storage_transformers") or []
    coded = _holds(doc.get("codecs"), lambda c: c.get("name") == "sharding_indexed")
    if not coded and not _holds(transformers, _is_sharding):
        return None
    if coded and transformers:
        raise ValueError("storage transformers may store shards elsewhere")
    shape, block = _shape_and_block(doc)
    return _unshard_codecs(doc, shape, block) if coded else _unshard_seed(doc, shape, block, transformers)


def _shape_and_block(doc: Mapping[str, Any]) -> tuple[Coords, Coords]:
    shape = integers(doc["dimensions"], "dimensions", 0)
    block = integers(doc["blockSize"], "blockSize", 1)
    require_rank(block, len(shape), "blockSize")
    if not shape:
        raise ValueError("no dimensions")
    return shape, block


def _holds(listed: Any, is_wanted: Callable[[dict[str, Any]], bool]) -> bool:
    return isinstance(listed, list) and any(isinstance(item, dict) and is_wanted(item) for item in listed)


# ---- N5 4.x ----


def _unshard_codecs(doc: Mapping[str, Any], shape: Coords, shard: Coords) -> _Unsharded:
    layers: list[Layer] = []
    codecs, outer = doc["codecs"], shard
    while (chain := _chain(codecs))[0].name == "sharding_indexed":
        if len(layers) == MAX_NESTING:
            raise ValueError(f"shards are nested more than {MAX_NESTING} deep")
        if after := [name for name, _ in chain[1:] if name != "raw"]:
            # N5 itself ignores them, other libraries would apply them to the shard
            raise ValueError(f"codecs {after} after sharding_indexed may or may not be around the shard")
        configuration = chain[0].configuration
        own = integers(configuration["chunk_shape"], "chunk_shape", 1)
        require_rank(own, len(shape), "chunk_shape")
        inner = own[::-1]
        layers.append(_layer(shape, outer, inner, _index_encoding(configuration)))
        codecs, outer = configuration["codecs"], inner
    compression, transform = _plain(chain, outer, doc["dataType"])
    shown: dict[str, Any] = {}
    for name, value in doc.items():
        if name == "blockSize":
            shown[name] = list(outer)
        elif name == "compression" or (name == "codecs" and "compression" not in doc):
            shown["compression"] = compression
        elif name != "codecs":
            shown[name] = value
    words = [f"sharding_indexed, index at {cast('ShardingIndexed', layers[0].format).index.location}"]
    if len(layers) > 1:
        words.append(f"nested {len(layers)} deep")
    facts = Facts(shape, outer, shard, str(doc["dataType"]), ", ".join(words))
    return _collection(layers, compression["type"], facts, transform), shown, chain


def _layer(shape: Coords, shard: Coords, chunk: Coords, index: IndexEncoding, fastest_first: bool = True) -> Layer:
    axes = []
    for a, (extent, outer, inner) in enumerate(zip(shape, shard, chunk, strict=True)):
        if outer % inner:
            raise ValueError(f"a shard of {outer} elements along axis {a} does not consist of chunks of {inner}")
        axes.append(Axis(ceil_div(extent, inner), outer // inner))
    order = range(len(shape))
    return Layer(ShardingIndexed(axes, order[::-1] if fastest_first else order, index, _key, _coords_of(len(shape))))


def _key(coords: Coords) -> str:
    return "/".join(map(str, coords))


def _coords_of(rank: int) -> Callable[[str], Coords | None]:
    return partial(cell_of, separator="/", rank=rank)


def _index_encoding(configuration: Mapping[str, Any]) -> IndexEncoding:
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"index_location should be start or end, not {location!r:.80}")
    codecs = _chain(configuration["index_codecs"])
    names = [name for name, _ in codecs]
    if names[:1] not in (["raw-bytes"], ["bytes"]) or names[1:] not in ([], ["crc32c"]):
        raise ValueError(f"index_codecs {names!r:.80} are none that shardfs knows")
    endian = _endian(*codecs[0])
    return IndexEncoding(endian, len(names) == 2, cast("Literal['start', 'end']", location), either_is_empty=True)


def _endian(codec: str, configuration: Mapping[str, Any]) -> Literal["little", "big"]:
    endian = configuration.get("endian", HEADERLESS[codec])
    if endian not in ("little", "big"):
        raise ValueError(f"{codec}: endian should be little or big, not {endian!r:.80}")
    return cast("Literal['little', 'big']", endian)


# ---- what lies in the shards ----


def _plain(chain: Sequence[Codec], chunk: Coords, data_type: Any) -> tuple[dict[str, Any], Transform | None]:
    """`compression` for the chain of codecs of a chunk, and what makes a plain block of the chunk.

    Raise ValueError if plain N5 has no words for such blocks.
    """
    (first, configuration), *rest = chain
    if first != "n5bytes" and first not in HEADERLESS:
        raise ValueError(f"codec {first!r:.80} is none that shardfs knows")
    rest = [c for c in rest if c.name != "raw"]
    checksum = bool(rest) and rest[-1].name == "crc32c"
    around = rest[:-1] if checksum else rest
    if len(around) > 1:
        raise ValueError(f"plain N5 cannot say codecs {[name for name, _ in around]!r:.200}")
    compression = _compression(*around[0]) if around else {"type": "raw"}
    if first == "n5bytes":
        return compression, PlainBlocks(checksum) if checksum else None
    item = ITEM_SIZES.get(str(data_type))
    if item is None:
        raise ValueError(f"{first} of data type {data_type!r:.80} is nothing that plain N5 knows")
    if len(chunk) >= 2**16 or max(chunk) >= 2**32:
        raise ValueError(f"the header of a block cannot say a size of {chunk!r:.80}")
    swap = item > 1 and _endian(first, configuration) == "little"
    if around and swap:
        raise ValueError("plain N5 has no little-endian blocks, and compressed ones cannot be turned")
    header = struct.pack(f">HH{len(chunk)}I", 0, len(chunk), *chunk)
    nbytes = None if around else item * math.prod(chunk)
    return compression, PlainBlocks(checksum, header, nbytes, item if swap else 1)


def _compression(name: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    known = PARAMETERS.get(name)
    if known is None:
        raise ValueError(f"plain N5 has no compression {name!r:.80} that shardfs knows")
    out: dict[str, Any] = {"type": name}
    for parameter, default in known.items():
        value = configuration.get(parameter, default)
        if parameter == "shuffle" and isinstance(value, str):
            value = SHUFFLES.get(value, value)
        if type(value) is not type(default):
            raise ValueError(f"{name}: {parameter} should be of the kind of {default!r}, not {value!r:.80}")
        out[parameter] = value
    return out


@dataclass(frozen=True)
class PlainBlocks:
    """Makes plain N5 blocks of chunks that have a checksum behind them or no header; a `model.Transform`.

    Args:
        checksum: whether a CRC-32C of what follows the header stands at the end; it is verified and cut off.
        header: what is put before chunks that have none; they are whole, at the edge of the array too.
        nbytes: the size of such a chunk without checksum, if it is known.
        swap: turn the bytes of elements of this size.
    """

    checksum: bool
    header: bytes = b""
    nbytes: int | None = None
    swap: int = 1

    @property
    def name(self) -> str:
        return "+".join((["headerless"] if self.header else []) + (["crc32c"] if self.checksum else []))

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        shown = stored + (len(self.header) - (4 if self.checksum else 0))
        return np.where(shown < len(self.header), -1, shown)

    def show(self, coords: Coords, stored: bytes) -> bytes:
        if not self.header:
            start = _header_size(stored)
            return stored[:start] + decode((CRC32C,), stored[start:])
        payload = decode((CRC32C,), stored) if self.checksum else stored
        if self.nbytes is not None and len(payload) != self.nbytes:
            raise ValueError(f"a chunk without header should have {self.nbytes} bytes, not {len(payload)}")
        if self.swap > 1:
            payload = np.frombuffer(payload, f"<u{self.swap}").astype(f">u{self.swap}").tobytes()
        return self.header + payload


def _header_size(block: bytes) -> int:
    """Of a block of N5: 0 default, 1 varying length, 2 object."""
    mode, rank = int.from_bytes(block[:2], "big"), int.from_bytes(block[2:4], "big")
    if len(block) < 6 or mode > 2:
        raise ValueError(f"no N5 block: mode {mode} in {len(block)} bytes")
    size = (4 + 4 * rank, 8 + 4 * rank, 6)[mode]
    if size > len(block):
        raise ValueError(f"no N5 block: a header of {size} bytes in {len(block)}")
    return size


# ---- the transformer of 2022 ----


def _is_sharding(transformer: dict[str, Any]) -> bool:
    return str(transformer.get("extension")).endswith(SEED_SHARDING)


def _unshard_seed(doc: Mapping[str, Any], shape: Coords, block: Coords, transformers: list[Any]) -> _Unsharded:
    if len(transformers) > 1:
        raise ValueError("other storage transformers may store shards elsewhere")
    kind, configuration = transformers[0].get("type"), transformers[0]["configuration"]
    if kind != "indexed":
        raise ValueError(f"storage transformer: type should be indexed, not {kind!r:.80}")
    given = integers(configuration["chunks_per_shard"], "chunks_per_shard", 1)
    if len(given) > len(shape):
        raise ValueError(f"chunks_per_shard has {len(given)} axes, the array {len(shape)}")
    per = (*given, *(1,) * (len(shape) - len(given)))  # as zarr-python does with the draft
    shard = tuple(b * n for b, n in zip(block, per, strict=True))
    # Unlike in 4.x the last axis is the fastest in the index, as the draft has it.
    layer = _layer(shape, shard, block, IndexEncoding("little", crc32c=False), fastest_first=False)
    compression = doc.get("compression")
    kind = compression.get("type") if isinstance(compression, dict) else doc.get("compressionType", "raw")
    shown = {name: value for name, value in doc.items() if name != "storage_transformers"}
    facts = Facts(shape, block, shard, str(doc["dataType"]), "storage transformer of 2022, index at end")
    return _collection([layer], str(kind), facts, None), shown, None


def _collection(layers: Sequence[Layer], compression: str, facts: Facts, transform: Transform | None) -> Collection:
    return Collection(
        format="n5",
        path="",
        names=NestedNames(layers[-1].format.grid),
        layers=tuple(layers),
        codecs=("n5bytes",) if compression == "raw" else ("n5bytes", compression),
        facts=facts,
        transform=transform,
    )


# ---- what other layouts need to know ----


def _described(dataset: Dataset, doc: Mapping[str, Any], chain: Sequence[Codec] | None) -> Dataset:
    """The dataset with what the document of its (unsharded) array says, or with the reason why it cannot be told.

    `chain` is how chunks are stored, if that is not what the document says.
    """
    try:
        array = _array(doc, _chain_of_blocks(doc) if chain is None else chain)
        if dataset.collections:
            collections = (replace(c, array=array, check=_check(array)) for c in dataset.collections)
            return replace(dataset, collections=tuple(collections))
        return replace(dataset, unsharded=(_stored_plainly(doc, array),))
    except UNFIT as e:
        return replace(dataset, indescribable=f"{DOCUMENT}: {reason(e)}")


def _array(doc: Mapping[str, Any], chain: Sequence[Codec]) -> Array:
    shape, block = _shape_and_block(doc)
    if doc["dataType"] not in ITEM_SIZES:
        raise ValueError(f"data type {doc['dataType']!r:.80} is none of numbers")
    dtype, (first, *rest) = np.dtype(doc["dataType"]), chain
    little = first.name in HEADERLESS and _endian(*first) == "little"
    if first.name != "n5bytes" and first.name not in HEADERLESS:
        raise ValueError(f"codec {first.name!r:.80} is none that shardfs knows")
    framed = first.name == "n5bytes"
    encoding = ChunkEncoding(
        dtype.newbyteorder("<" if little else ">").str,
        tuple(range(len(shape))),
        clipped=framed,  # or not: the block itself tells
        codecs=tuple(_as_in_zarr(c, dtype.itemsize) for c in rest if c.name != "raw"),
        frame="n5" if framed else "none",
    )
    names = n5_viewer.axes_of(doc, len(shape))
    return Array(
        shape[::-1],
        block[::-1],
        dtype.str,
        encoding,
        tuple(range(len(shape)))[::-1],
        names=None if names is None else tuple(names[::-1]),
        attributes={name: value for name, value in doc.items() if name not in STRUCTURAL},
    )


def _check(array: Array) -> ChunkCheck:
    """What stored blocks must be. Those without a header are whole, at the edge of the array too."""
    encoding, itemsize = array.encoding, np.dtype(array.data_type).itemsize
    if encoding.frame == "n5":
        return Blocks(encoding.codecs, array.chunk[::-1], itemsize)
    size = math.prod(array.chunk) * itemsize
    return Chain(encoding.codecs, lambda coords: np.full(len(coords), size, np.uint64))


def _chain_of_blocks(doc: Mapping[str, Any]) -> Sequence[Codec]:
    """The codecs of a dataset that is not sharded: those of N5 4.x, `compression`, or `compressionType` before 1.0."""
    if isinstance(doc.get("codecs"), list):
        return _chain(doc["codecs"])
    compression = doc.get("compression", {"type": doc.get("compressionType")})
    if not isinstance(compression, dict):
        raise ValueError(f"compression should be an object, not {compression!r:.80}")
    parameters = {name: value for name, value in compression.items() if name != "type"}
    kind = Codec(str(compression["type"]), parameters)
    return (Codec("n5bytes"),) if kind.name == "raw" else (Codec("n5bytes"), kind)


def _as_in_zarr(codec: Codec, item: int) -> Codec:
    """The codec that writes the same bytes in Zarr v3; or a name for what Zarr does not have."""
    if codec.name == "crc32c":
        return codec
    told = _compression(codec.name, codec.configuration)
    match codec.name:
        case "gzip":
            level = told["level"] if 0 <= told["level"] <= 9 else DEFAULT_LEVEL
            return Codec("numcodecs.zlib" if told["useZlib"] else "gzip", {"level": level})
        case "zstd":
            return Codec("zstd", {"level": told["level"], "checksum": False})
        case "bzip2":
            return Codec("numcodecs.bz2", {"level": told["blockSize"]})
        case "xz":
            return Codec("numcodecs.lzma", {"format": XZ, "check": -1, "preset": told["preset"], "filters": None})
        case "blosc":
            words = list(SHUFFLES)
            shuffle = words[told["shuffle"]] if 0 <= told["shuffle"] < len(words) else "shuffle"
            members = {"cname": told["cname"], "clevel": told["clevel"], "shuffle": shuffle}
            return Codec("blosc", {**members, "typesize": item, "blocksize": told["blocksize"]})
    return Codec(f"n5.{codec.name}", {name: value for name, value in told.items() if name != "type"})


def _stored_plainly(doc: Mapping[str, Any], array: Array) -> Collection:
    """A dataset that is not sharded: each block is an object by itself."""
    if doc.get("storage_transformers"):
        raise ValueError("storage transformers may store blocks elsewhere")
    grid, rank = array.grid[::-1], len(array.shape)
    facts = Facts(array.shape[::-1], array.chunk[::-1], None, str(doc["dataType"]), "none")
    names = [c.name for c in array.encoding.codecs]
    layer = Layer(Unsharded(grid, _key, _coords_of(rank)))
    return Collection("n5", "", NestedNames(grid), (layer,), ("n5bytes", *names), facts, array=array)


# ---- the layout ----


def _laid_out(path: str, dataset: Dataset, below: Mapping[str, Dataset]) -> Dataset:
    """A dataset of any other format. Raise UnsupportedError, with the reason, for what N5 cannot say."""
    if why := "; ".join(p.why for p in dataset.problems) or dataset.indescribable:
        raise UnsupportedError(why)
    stored = (*dataset.collections, *dataset.unsharded)
    is_array = len(stored) == 1 and not dataset.multiscales
    if dataset.closed and not is_array:
        raise UnsupportedError(f"{dataset.format} does not tell what it is")
    arrays = [_shown(c, "" if is_array else c.path) for c in stored]
    image = None if is_array else _image_of(dataset)
    levels = _levels_of(image, arrays, below) if image is not None else []
    taken = {shown.path for shown in levels}
    members: dict[str, Mapping[str, Any]] = {}
    if not is_array:
        members[""] = _group_members(dataset, image if levels else None)
        arrays = [shown for shown in arrays if shown.path not in taken]
    members |= {shown.path: shown.members() for shown in arrays}
    for i, shown in enumerate(levels):
        name, further = f"s{i}", n5_viewer.level_attributes(cast("Multiscale", image), i)
        level = replace(shown, path=name, further=further)
        members[name] = level.members()
        if shown.path != name or any(shown.stored is c for c in stored):  # else it shows itself, but for its document
            arrays.append(level)
    moved = taken - members.keys()
    if not path:
        members[""] = {"n5": VERSION, **members[""]}
    return Dataset(
        "n5",
        tuple(shown.collection() for shown in arrays),
        {_join(at, DOCUMENT): print_strict(found) for at, found in members.items() if found},
        tuple(problem for shown in arrays for problem in shown.problems(path)),
        closed=dataset.closed,
        unwalked=dataset.unwalked,
        hidden=dataset.hidden | dataset.form | moved,
        scope=dataset.scope,
    )


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _group_members(dataset: Dataset, image: Multiscale | None) -> dict[str, Any]:
    """The attributes of a group. What OME-Zarr says of an image would be half true of s0, s1, ...: it goes."""
    attributes = dict(dataset.attributes or {})
    if image is None:
        return attributes
    attributes.pop("multiscales", None)
    if isinstance(inner := attributes.get("ome"), dict):
        attributes["ome"] = {name: value for name, value in inner.items() if name != "multiscales"}
    told = n5_viewer.group_attributes(image)
    return {**told, **{name: value for name, value in attributes.items() if name not in told}}


# Images


def _image_of(dataset: Dataset) -> Multiscale | None:
    """The image whose levels a group shows as s0, s1, ...: the first, if that can be."""
    if dataset.closed or not dataset.multiscales or not n5_viewer.can_be_written(dataset.multiscales[0]):
        return None
    image = dataset.multiscales[0]
    old = [level.path for level in image.levels]
    new = [f"s{i}" for i in range(len(old))]
    is_free = all(a == b or b not in old for a, b in zip(old, new, strict=True))
    is_here = len(set(old)) == len(old) and not any("/" in name or name in ("", ".", "..") for name in old)
    return image if is_free and is_here else None


def _levels_of(image: Multiscale, arrays: Sequence[_Shown], below: Mapping[str, Dataset]) -> list[_Shown]:
    """The levels of an image, under the names that they have; none if one is not there, or not as N5."""
    own, out = {shown.path: shown for shown in arrays}, []
    for level in image.levels:
        found = own.get(level.path) or _level_below(level.path, below.get(level.path))
        if found is None or len(found.array.shape) != len(image.axes):
            return []
        out.append(found)
    return out


def _level_below(path: str, dataset: Dataset | None) -> _Shown | None:
    stored = () if dataset is None or dataset.problems else (*dataset.collections, *dataset.unsharded)
    if len(stored) != 1:
        return None
    shards = _join(path, stored[0].path if stored[0].shards is None else stored[0].shards)
    try:
        return _shown(replace(stored[0], shards=shards), path)
    except UnsupportedError:
        return None  # the directory itself says why


# Arrays


@dataclass(frozen=True)
class _Shown:
    """An array of any format as an N5 dataset.

    Args:
        path: below the dataset that it is part of.
        further: attributes that the image it belongs to has for it.
    """

    stored: Collection
    path: str
    array: Array
    encoding: ChunkEncoding
    further: Mapping[str, Any] = field(default_factory=dict)

    def collection(self) -> Collection:
        stored, array = self.stored, self.array
        return replace(
            stored,
            path=self.path,
            names=self._names(),
            codecs=("n5bytes", *(str(_compression_of(c)["type"]) for c in self.encoding.codecs)),
            transform=transcoder(array, self.encoding),
            shards=stored.path if stored.shards is None else stored.shards,
            filler=FillValue(array, self.encoding) if _is_filled(array) else None,
        )

    def _names(self) -> ChunkNames:
        axes, rank = self.array.grid_axes[::-1], len(self.stored.layers[-1].format.grid)
        names = NestedNames(self.array.grid[::-1])
        return names if axes == tuple(range(rank)) else MappedNames(names, axes, rank)

    def members(self) -> dict[str, Any]:
        """Of `attributes.json`."""
        own = self._own()
        return {**own, **{name: value for name, value in self.array.attributes.items() if not self._gives_way(name)}}

    def _own(self) -> dict[str, Any]:
        array, around = self.array, self.encoding.codecs
        own: dict[str, Any] = {
            "dimensions": array.shape[::-1],
            "blockSize": array.chunk[::-1],
            "dataType": np.dtype(self.encoding.data_type).name,
            "compression": _compression_of(around[0]) if around else {"type": "raw"},
        }
        if array.names and all(name is not None for name in array.names):
            own["axes"] = array.names[::-1]
        if array.offset is not None and any(array.offset):
            own["offset"] = array.offset[::-1]
        return {**own, **self.further}

    def _gives_way(self, name: str) -> bool:
        return name in STRUCTURAL or name in self._own()

    def problems(self, path: str) -> Iterator[Problem]:
        """The user's attributes that N5 has no place for; `path` is the dataset's."""
        own = self._own()
        for name, value in self.array.attributes.items():
            if self._gives_way(name) and value != own.get(name):
                yield Problem(
                    _join(path, self.path), f"attribute {name!r:.80}: N5 has its own of this name", skipped=True
                )


def _shown(stored: Collection, path: str) -> _Shown:
    """Raise UnsupportedError, with the reason, if N5 has no such arrays."""
    array = stored.array
    if array is None:
        what = f"{stored.facts.data_type or 'what is no array'} in codecs {', '.join(stored.codecs)}"
        raise UnsupportedError(f"{stored.path}: {what} has no description")
    return _Shown(stored, path, array, shown_encoding(array))


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of N5 blocks for which least has to be done. Raise UnsupportedError if there is none."""
    dtype, stored, order = np.dtype(array.data_type), array.encoding, tuple(range(len(array.shape)))
    name = "uint8" if dtype.kind == "b" else dtype.name
    if name not in ITEM_SIZES:
        raise UnsupportedError(f"N5 has no data type {name}")
    if not array.shape:
        raise UnsupportedError("N5 has no arrays without axes")
    if len(array.chunk) >= 2**16 or max(array.chunk) >= 2**32:
        raise UnsupportedError(f"the header of a block cannot say a size of {array.chunk!r:.80}")
    data_type, around = np.dtype(name).newbyteorder(">").str, without_checks(stored.codecs)
    passes = (
        stored.serializer == BYTES
        and stored.data_type in (data_type, dtype.newbyteorder(">").str)
        and memory_order(stored.order, array.chunk) == memory_order(order, array.chunk)
        and (not around or (len(around) == 1 and _is_known(around[0])))
    )
    if passes:
        return ChunkEncoding(data_type, order, clipped=stored.clipped, codecs=around, frame="n5")
    return ChunkEncoding(data_type, order, clipped=True, frame="n5")


def _is_known(codec: Codec) -> bool:
    try:
        _compression_of(codec)
    except ValueError:
        return False
    return True


def _compression_of(codec: Codec) -> dict[str, Any]:
    """`compression` for a codec that is called as in Zarr v3: the inverse of `_as_in_zarr`.

    Raise ValueError if N5 has no such codec.
    """
    told = codec.configuration
    match codec.name:
        case "gzip" | "zstd":
            return _compression(codec.name, {"level": told["level"]} if "level" in told else {})
        case "blosc":
            return _compression("blosc", {"cname": "lz4", "clevel": 5, "shuffle": 1, **told})
        case "numcodecs.zlib":
            return _compression("gzip", {"level": told.get("level", 1), "useZlib": True})
        case "numcodecs.bz2":
            return _compression("bzip2", {"blockSize": told.get("level", 1)})
        case "numcodecs.lzma" if told.get("format", XZ) == XZ:
            return _compression("xz", {} if told.get("preset") is None else {"preset": told["preset"]})
        case "n5.lz4":
            return _compression("lz4", told)
    raise ValueError(f"plain N5 has no codec {codec.name!r:.80}")


def _is_filled(array: Array) -> bool:
    """Whether a chunk that is not stored is something else than zeros, which readers of N5 take a missing block for."""
    return bool(fill_element(array.fill_value, array.data_type) != 0)


# ---- members ----


def _chain(value: Any) -> list[Codec]:
    """Codecs as (name, configuration), at least one."""
    if not (chain := [_named(c) for c in listed(value, "codecs")]):
        raise ValueError("codecs should not be empty")
    return chain


def _named(value: Any) -> Codec:
    """A codec: an object with a name and perhaps a configuration."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a codec should have a name: {value!r:.80}")
    configuration = value.get("configuration", {})
    if not isinstance(configuration, dict):
        raise ValueError(f"{value['name']}: configuration should be an object, not {configuration!r:.80}")
    return Codec(value["name"], configuration)


N5 = N5Format()
