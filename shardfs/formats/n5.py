"""N5 datasets in shards, shown as the same datasets with one file per block.

Two kinds: the codec `sharding_indexed` of N5 4.x (https://github.com/saalfeldlab/n5, `codec` and `shard`; there is no
other text), and the storage transformer that the Zarr v3 draft of 2022 had, in an N5 document. All shapes here are in
N5's order: x, the fastest axis, first.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from shardfs.arrays import Codec
from shardfs.codecs import decode
from shardfs.errors import CorruptShardError
from shardfs.formats import UNFIT, System, integers, listed, parse_json, print_json, reason, require_rank
from shardfs.grid import NestedNames, ceil_div, cell_of
from shardfs.model import Collection, Coords, Dataset, Facts, Layer, Problem
from shardfs.shards.sharding_indexed import Axis, IndexEncoding, ShardingIndexed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model import U64, Blob, Sizes, Transform

DOCUMENT = "attributes.json"
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

CRC32C = Codec("crc32c")
SEED_SHARDING = "/sharding/1.0"
"""The end of the transformer's URL, of which there are three spellings."""


class N5Format:
    """See `formats.Format`."""

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

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get(DOCUMENT)
        if raw is None or not raw.lstrip().startswith(b"{"):
            return None
        try:
            doc = parse_json(path, DOCUMENT, raw)
        except CorruptShardError as e:
            # Any group may have one, with what users put there; what lies below it needs it for nothing.
            return Dataset("n5", problems=(Problem(path, f"{DOCUMENT}: {e.why}"),))
        if not _is_dataset(doc):
            return Dataset("n5") if "n5" in doc else None
        try:
            unsharded = _unshard(doc)
            if unsharded is None:
                return Dataset("n5", closed=True)
            collection, shown = unsharded
            return Dataset("n5", (collection,), {DOCUMENT: print_json(shown)}, closed=True)
        except UNFIT as e:
            return Dataset("n5", problems=(Problem(path, f"{DOCUMENT}: {reason(e)}"),), closed=True)


def _is_dataset(doc: Mapping[str, Any]) -> bool:
    encoded = any(name in doc for name in ("compression", "codecs", "compressionType"))
    return encoded and all(name in doc for name in ("dimensions", "blockSize", "dataType"))


def _unshard(doc: Mapping[str, Any]) -> tuple[Collection, dict[str, Any]] | None:
    """The collection that a dataset's document describes, and the document of the same dataset unsharded.

    None if it is not sharded. Raise ValueError, TypeError, KeyError or IndexError, with the reason, if it cannot be
    shown unsharded.
    """
    transformers = doc.get("storage_transformers") or []
    coded = _holds(doc.get("codecs"), lambda c: c.get("name") == "sharding_indexed")
    if not coded and not _holds(transformers, _is_sharding):
        return None
    if coded and transformers:
        raise ValueError("storage transformers may store shards elsewhere")
    shape = integers(doc["dimensions"], "dimensions", 0)
    block = integers(doc["blockSize"], "blockSize", 1)
    require_rank(block, len(shape), "blockSize")
    if not shape:
        raise ValueError("no dimensions")
    return _unshard_codecs(doc, shape, block) if coded else _unshard_seed(doc, shape, block, transformers)


def _holds(listed: Any, is_wanted: Callable[[dict[str, Any]], bool]) -> bool:
    return isinstance(listed, list) and any(isinstance(item, dict) and is_wanted(item) for item in listed)


# ---- N5 4.x ----


def _unshard_codecs(doc: Mapping[str, Any], shape: Coords, shard: Coords) -> tuple[Collection, dict[str, Any]]:
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
    return _collection(layers, compression["type"], facts, transform), shown


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


def _unshard_seed(
    doc: Mapping[str, Any], shape: Coords, block: Coords, transformers: list[Any]
) -> tuple[Collection, dict[str, Any]]:
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
    return _collection([layer], str(kind), facts, None), shown


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
