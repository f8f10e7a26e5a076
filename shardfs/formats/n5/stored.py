"""Reads stored N5 documents, and translates those of sharded datasets to the documents of unsharded datasets.

There are two kinds of sharded datasets: those with the codec `sharding_indexed` of N5 4.x, which only its source code
defines (https://github.com/saalfeldlab/n5, `codec` and `shard`), and those with the storage transformer of the Zarr v3
draft of 2022 in an N5 document. All shapes here are in N5's order, with x, the fastest axis, first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from shardfs.codecs import n5_blocks
from shardfs.codecs.checks import Blocks
from shardfs.codecs.decoders import decode
from shardfs.codecs.encoders import encode
from shardfs.formats import n5_multiscales
from shardfs.formats.documents import (
    choice,
    form_of,
    integers,
    require_rank,
)
from shardfs.formats.n5 import codec_names
from shardfs.formats.n5.codec_names import DOCUMENT, FIRST_CODECS, ITEM_SIZES, chain_of, endian_of, has_header
from shardfs.formats.zarr_arrays import MAX_NESTING, ChunkKeys, chunks_per_shard, full_chunks, opened
from shardfs.model.arrays import Array, ChunkEncoding, Codec
from shardfs.model.collection import Collection, Facts, Layer, Transform
from shardfs.model.dataset import Dataset
from shardfs.model.grid import NestedNames
from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed, sharding_of
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.collection import ChunkCheck
    from shardfs.model.values import U64, Coords, Sizes

CRC32C = Codec("crc32c")

SEED_SHARDING = "/sharding/1.0"
"""The end of the transformer's URL, which all its three spellings have."""


def open_dataset(path: str, doc: Mapping[str, Any]) -> Dataset:
    """The dataset for its document, sharded or not; with a problem if the dataset cannot be unsharded."""
    dataset = Dataset("n5", closed=True, format_names=codec_names.FORM)
    dataset = opened(dataset, path, DOCUMENT, doc, unshard, partial(_unsharded, doc))
    collections = (c if c.array is None else replace(c, check=_check(c.array)) for c in dataset.collections)
    return replace(dataset, collections=tuple(collections))


def is_dataset(doc: Mapping[str, Any]) -> bool:
    """Whether this is the document of a dataset, not of a group."""
    encoded = any(name in doc for name in ("compression", "codecs", "compressionType"))
    return encoded and all(name in doc for name in ("dimensions", "blockSize", "dataType"))


_Unsharded: TypeAlias = "tuple[Collection, dict[str, Any]]"


def unshard(doc: Mapping[str, Any]) -> _Unsharded | None:
    """The collection that a dataset's document describes, and the document of the unsharded dataset.

    None if the dataset is not sharded. Raise one of `UNFIT`, with the reason, if it cannot be shown unsharded.
    """
    transformers = doc.get("storage_transformers") or []
    coded = _holds(doc.get("codecs"), lambda c: c.get("name") == "sharding_indexed")
    if not coded and not _holds(transformers, is_sharding):
        return None
    if coded and transformers:
        raise ValueError("storage transformers may store shards elsewhere")
    shape, block = shape_and_block(doc)
    return _unshard_codecs(doc, shape, block) if coded else _unshard_seed(doc, shape, block, transformers)


def shape_and_block(doc: Mapping[str, Any]) -> tuple[Coords, Coords]:
    """The shape and block size in a dataset's document. Raise one of `UNFIT`, with the reason, if they are invalid."""
    shape = integers(doc["dimensions"], "dimensions", 0)
    block = integers(doc["blockSize"], "blockSize", 1)
    require_rank(block, len(shape), "blockSize")
    if not shape:
        raise ValueError("dimensions should have at least one axis")
    return shape, block


def _holds(listed: Any, is_wanted: Callable[[dict[str, Any]], bool]) -> bool:
    return isinstance(listed, list) and any(isinstance(element, dict) and is_wanted(element) for element in listed)


def _unshard_codecs(doc: Mapping[str, Any], shape: Coords, shard: Coords) -> _Unsharded:
    layers: list[Layer] = []
    codecs, outer = doc["codecs"], shard
    while (chain := chain_of(codecs))[0].name == "sharding_indexed":
        if len(layers) == MAX_NESTING:
            raise ValueError(f"shards are nested more than {MAX_NESTING} deep")
        (_, configuration), after = chain
        if after:
            # N5 itself ignores these codecs, other libraries would apply them to the shard.
            raise ValueError(f"codecs {_names(after)} after sharding_indexed may or may not be around the shard")
        chunk_shape = integers(configuration["chunk_shape"], "chunk_shape", 1)
        require_rank(chunk_shape, len(shape), "chunk_shape")
        inner = chunk_shape[::-1]
        per_shard = [a // b for a, b in zip(outer, inner, strict=True)]
        layers.append(_layer(shape, outer, inner, _index_encoding(configuration, per_shard)))
        codecs, outer = configuration["codecs"], inner
    compression, transform = _plain(*chain, outer, doc["dataType"])
    document: dict[str, Any] = {}
    for name, value in doc.items():
        if name == "blockSize":
            document[name] = list(outer)
        elif name == "compression" or (name == "codecs" and "compression" not in doc):
            document["compression"] = compression
        elif name != "codecs":
            document[name] = value
    facts = Facts(shape, outer, shard, str(doc["dataType"]), sharding_of(layers))
    form = form_of("n5", doc["dataType"], shard, _form(doc["codecs"]))
    return _collection(layers, compression["type"], facts, transform, form), document


def _layer(shape: Coords, shard: Coords, chunk: Coords, index: IndexEncoding, fastest_first: bool = True) -> Layer:
    axes = [ShardedAxis.cut(a, *sizes) for a, sizes in enumerate(zip(shape, shard, chunk, strict=True))]
    order = range(len(shape))
    keys = _keys(len(shape))
    return Layer(ShardingIndexed(axes, order[::-1] if fastest_first else order, index, keys.key, keys.coords))


def _keys(rank: int) -> ChunkKeys:
    return ChunkKeys("", "/", "", rank)


def _index_encoding(configuration: Mapping[str, Any], per_shard: Sequence[int]) -> IndexEncoding:
    """The encoding of the index of shards with `per_shard` chunks along each axis.

    N5 4.x writes the index as a block of uint64 with an axis of length 2 before the others (`ShardIndex.java`,
    `N5BlockCodecs.java`): `n5bytes` gives this block its header. A checksum covers only the bytes behind the header.
    """
    location = choice(configuration.get("index_location", "end"), "index_location", "start", "end")
    first, around = chain_of(configuration["index_codecs"])
    if first.name not in FIRST_CODECS or _names(around) not in ([], ["crc32c"]):
        names = _names([first, *around])
        raise ValueError(f"index_codecs {names!r:.80} are none of {', '.join(FIRST_CODECS)}, with or without crc32c")
    framed = has_header(first)
    header = _default_header((2, *per_shard)) if framed else b""
    return IndexEncoding("big" if framed else endian_of(*first), bool(around), location, True, header)


def _names(codecs: Sequence[Codec]) -> list[str]:
    return [codec.name for codec in codecs]


def _plain(
    first: Codec, tail: Sequence[Codec], chunk: Coords, data_type: Any
) -> tuple[dict[str, Any], Transform | None]:
    """The member `compression` for a chunk's codecs, and the transform from chunks to plain N5 blocks, if needed.

    Raise ValueError if plain N5 cannot express such blocks.
    """
    framed, checksum = has_header(first), _names(tail[-1:]) == ["crc32c"]
    around = tail[:-1] if checksum else tail
    if len(around) > 1:
        raise ValueError(f"plain N5 cannot express codecs {_names(around)!r:.200}: it has at most one")
    compression = codec_names.compression_as(*around[0]) if around else {"type": "raw"}
    if framed:
        return compression, PlainBlocks(checksum) if checksum else None
    itemsize = ITEM_SIZES.get(str(data_type))
    if itemsize is None:
        raise ValueError(f"plain N5 has no blocks of data type {data_type!r:.80} in codec {first.name}")
    header = _default_header(chunk)
    swap = itemsize > 1 and endian_of(*first) == "little"
    if around and swap:
        raise ValueError(
            "plain N5 has no little-endian blocks, and the byte order of compressed blocks cannot be reversed"
        )
    nbytes = None if around else itemsize * math.prod(chunk)
    return compression, PlainBlocks(checksum, header, nbytes, itemsize if swap else 1)


def _default_header(size: Coords) -> bytes:
    """The header of a block of this size in N5's default mode. Raise ValueError if the size does not fit into it."""
    if len(size) >= 2**16 or max(size) >= 2**32:
        raise ValueError(f"blocks of {size!r:.80} are too large for the header of an N5 block")
    return n5_blocks.header_of(size)


@dataclass(frozen=True)
class PlainBlocks(Transform):
    """Makes plain N5 blocks of chunks with a checksum or without a header.

    Args:
        checksum: whether chunks end with a CRC-32C of the bytes after the header. It is verified and removed.
        header: the header to add to chunks without one. Such chunks are full also at the edge of the array.
        nbytes: the size of a chunk without header and checksum, if it is known.
        swap: the item size for reversing the byte order; 1 for no change.
    """

    checksum: bool
    header: bytes = b""
    nbytes: int | None = None
    swap: int = 1
    unwritable: ClassVar[None] = None

    @property
    def name(self) -> str:
        return "+".join((["headerless"] if self.header else []) + (["crc32c"] if self.checksum else []))

    def sizes(self, coords: U64, stored_sizes: Sizes) -> Sizes:
        shown_sizes = stored_sizes + (len(self.header) - (4 if self.checksum else 0))
        return np.where(shown_sizes < len(self.header), -1, shown_sizes)

    def show(self, coords: Coords, stored_bytes: bytes) -> bytes:
        if not self.header:
            start = n5_blocks.parse_header(stored_bytes).size
            return stored_bytes[:start] + decode((CRC32C,), stored_bytes[start:])
        payload = decode((CRC32C,), stored_bytes) if self.checksum else stored_bytes
        if self.nbytes is not None and len(payload) != self.nbytes:
            raise ValueError(f"a chunk without header should have {self.nbytes} bytes, not {len(payload)}")
        if self.swap > 1:
            payload = np.frombuffer(payload, f"<u{self.swap}").astype(f">u{self.swap}").tobytes()
        return self.header + payload

    def work(self, coords: Coords, stored_size: int) -> int:
        return 2 * (len(self.header) + stored_size)

    def store(self, coords: Coords, shown_bytes: bytes) -> bytes:
        start = n5_blocks.parse_header(shown_bytes).size
        if not self.header:
            return shown_bytes[:start] + encode((CRC32C,), shown_bytes[start:])
        header, payload = shown_bytes[:start], shown_bytes[start:]
        if header != self.header:
            payload = self._whole(header, payload)
        if self.nbytes is not None and len(payload) != self.nbytes:
            raise ValueError(f"a block should have {self.nbytes} bytes behind its header, not {len(payload)}")
        if self.swap > 1:
            payload = np.frombuffer(payload, f">u{self.swap}").astype(f"<u{self.swap}").tobytes()
        return encode((CRC32C,), payload) if self.checksum else payload

    def is_exact(self, coords: Coords, shown_bytes: bytes) -> bool:
        return shown_bytes.startswith(self.header)

    def _whole(self, header: bytes, payload: bytes) -> bytes:
        """The elements of a block that is cropped at the edge of the array, as many writers do, padded to full size."""
        whole, shape = (n5_blocks.parse_header(h).shape for h in (self.header, header))
        if (
            self.nbytes is None
            or header[:4] != self.header[:4]
            or any(a > b for a, b in zip(shape, whole, strict=True))
        ):
            raise ValueError(
                f"the block has the shape {shape}; it should be {whole}, or smaller in default mode without compression"
            )
        itemsize = self.nbytes // math.prod(whole)
        if len(payload) != itemsize * math.prod(shape):
            raise ValueError(f"a block of {shape} should have {itemsize * math.prod(shape)} bytes, not {len(payload)}")
        out = np.zeros(whole[::-1], f"V{itemsize}")
        out[tuple(slice(n) for n in shape[::-1])] = np.frombuffer(payload, f"V{itemsize}").reshape(shape[::-1])
        return out.tobytes()


def is_sharding(transformer: dict[str, Any]) -> bool:
    """Whether this is the sharding storage transformer of 2022."""
    return str(transformer.get("extension")).endswith(SEED_SHARDING)


def _unshard_seed(doc: Mapping[str, Any], shape: Coords, block: Coords, transformers: list[Any]) -> _Unsharded:
    if len(transformers) > 1:
        raise ValueError("other storage transformers may store shards elsewhere")
    per = chunks_per_shard(transformers[0], len(shape))
    shard = tuple(b * n for b, n in zip(block, per, strict=True))
    # In the draft the last axis varies fastest in the index, in N5 4.x the first.
    layer = _layer(shape, shard, block, IndexEncoding("little", crc32c=False), fastest_first=False)
    compression = codec_names.compression_in(doc)
    document = {name: value for name, value in doc.items() if name != "storage_transformers"}
    facts = Facts(shape, block, shard, str(doc["dataType"]), "storage transformer of 2022, index at end")
    form = form_of("n5 of 2022", doc["dataType"], block, per, compression["type"], compression.get("useZlib", False))
    return _collection([layer], compression["type"], facts, None, form), document


def _form(codecs: Any) -> list[Any]:
    """What the codecs of blocks, shards and indices say about stored bytes, for `Collection.form`."""
    first, tail = chain_of(codecs)
    out: list[Any] = []
    for name, configuration in (first, *tail):
        if name == "sharding_indexed":
            location, index = configuration.get("index_location", "end"), _form(configuration["index_codecs"])
            out.append([configuration["chunk_shape"], location, index, _form(configuration["codecs"])])
        else:
            endian = endian_of(name, configuration) if name in codec_names.HEADERLESS else ""
            out.append([name, endian, configuration.get("useZlib", False)])
    return out


def _collection(
    layers: Sequence[Layer], compression: str, facts: Facts, transform: Transform | None, form: str
) -> Collection:
    return Collection(
        format="n5",
        path="",
        names=NestedNames(layers[-1].format.grid),
        layers=tuple(layers),
        codecs=("n5bytes",) if compression == "raw" else ("n5bytes", compression),
        facts=facts,
        transform=transform,
        form=form,
    )


def _array(doc: Mapping[str, Any], first: Codec, tail: Sequence[Codec]) -> Array:
    shape, block = shape_and_block(doc)
    if doc["dataType"] not in ITEM_SIZES:
        raise ValueError(f"data type {doc['dataType']!r:.80} is not a number type of N5")
    if doc.get("isLabelMultiset") is True:  # Paintera's blocks of bytes, of any length and for all data types
        raise ValueError("label multisets are no array of numbers")
    dtype, framed = np.dtype(doc["dataType"]), has_header(first)
    little = not framed and endian_of(*first) == "little"
    encoding = ChunkEncoding(
        dtype.newbyteorder("<" if little else ">").str,
        tuple(range(len(shape))),
        clipped=framed,  # edge blocks may also be full, as their headers say
        codecs=tuple(codec_names.as_in_zarr(c, dtype.itemsize) for c in tail),
        frame="n5" if framed else "none",
    )
    names = n5_multiscales.axes_of(doc, len(shape))
    return Array(
        shape[::-1],
        block[::-1],
        dtype.str,
        encoding,
        tuple(range(len(shape)))[::-1],
        names=None if names is None else tuple(names[::-1]),
        attributes={name: value for name, value in doc.items() if name not in codec_names.STRUCTURAL},
    )


def _check(array: Array) -> ChunkCheck:
    """The check of stored blocks. Blocks without a header have their full size also at the edge of the array."""
    encoding, itemsize = array.encoding, np.dtype(array.data_type).itemsize
    if encoding.frame == "n5":
        return Blocks(encoding.codecs, array.chunk[::-1], itemsize)
    return full_chunks(encoding.codecs, array.chunk, itemsize)


def _chain_of_blocks(doc: Mapping[str, Any]) -> tuple[Codec, Sequence[Codec]]:
    """The first codec of stored blocks, and the others: `codecs` of N5 4.x, or `compression` in its older forms."""
    if isinstance(codecs := doc.get("codecs"), list):
        while (chain := chain_of(codecs))[0].name == "sharding_indexed":
            codecs = chain[0].configuration["codecs"]
        return chain
    compression = codec_names.compression_in(doc)
    kind = Codec(compression["type"], {name: value for name, value in compression.items() if name != "type"})
    return Codec("n5bytes"), [] if kind.name == "raw" else [kind]


def _unsharded(doc: Mapping[str, Any], shown_doc: Mapping[str, Any]) -> Collection:
    """The collection of the unsharded dataset that `shown_doc` describes. Its blocks have the codecs in `doc`."""
    array = _array(shown_doc, *_chain_of_blocks(doc))
    if shown_doc.get("storage_transformers"):
        raise ValueError("storage transformers may store blocks elsewhere")
    grid, keys = array.grid[::-1], _keys(len(array.shape))
    facts = Facts(array.shape[::-1], array.chunk[::-1], None, str(doc["dataType"]), "none")
    codecs = ("n5bytes", *_names(array.encoding.codecs))
    layer = Layer(Unsharded(grid, keys.key, keys.coords))
    return Collection("n5", "", keys.names(grid), (layer,), codecs, facts, array=array)
