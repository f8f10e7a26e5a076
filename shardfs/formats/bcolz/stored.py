"""Opens superchunks and bloscpack files, which have many chunks in a file.

The "RFC for a persistence layer for bcolz" (bcolz, docs/persistence.rst) defines superchunks. bloscpack's README
defines bloscpack files.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardfs.codecs.checks import Chain
from shardfs.codecs.zlib_streams import inflate
from shardfs.formats import zarr_metadata
from shardfs.formats.bcolz import carrays
from shardfs.formats.bcolz.carrays import (
    ATTRS,
    COLUMNS,
    SIZES,
    STORAGE,
    Carray,
    Compression,
    carray_documents,
    json_line,
)
from shardfs.formats.bcolz.values import MAX_YAML_DEPTH, integers, literal, numpy_dtype, parsed
from shardfs.formats.documents import choice, form_of, integer, mapping, parse_json, reason
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import NumberedNames, ceil_div
from shardfs.shards.byte_layouts.superchunk import Beginning, Metadata, Pack, SuperchunkHeader, Superchunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.model.values import Coords

ATTRIBUTES = "meta/attributes"

KEPT = ("cparams", "dflt")
"""The members of `meta/storage` that bcolz 1.x defines and the mount shows with their stored values."""

MAX_COLUMNS = 10_000

LIBRARIES = {"fastlz": "blosclz", "blosclz": "blosclz", "lz4": "lz4", "lz4hc": "lz4hc", "snappy": "snappy",
             "zlib": "zlib", "zstd": "zstd"}  # fmt: skip


def _described(dataset: Dataset, array: Carray | None, attributes: Mapping[str, Any]) -> Dataset:
    """The dataset with the description of its only array for other layouts, or with `indescribable`."""
    (collection,) = dataset.collections
    try:
        if array is None:
            raise ValueError("no numpy array, or one whose chunks are not whole rows")
        description = carrays.described(array, "none", attributes)
    except ValueError as e:
        return replace(dataset, indescribable=str(e))
    return replace(dataset, collections=(replace(collection, array=description),), format_names=carrays.FORM)


# ---- superchunks ----


def open_superchunks(
    path: str, sizes: Mapping[str, Any], storage: Mapping[str, Any], documents: Mapping[str, bytes]
) -> Dataset:
    """The dataset of an array or table in superchunks.

    Raise ValueError, TypeError or KeyError if the mount cannot show the dataset as one of bcolz 1.x.
    """
    shape = integers(sizes["shape"], "shape", 0)
    chunkshape = _chunkshape(storage, shape)
    per_file = integer(storage["superchunksize"], "superchunksize", 1)
    if storage.get("order", "C") != "C":
        raise ValueError(f"order should be C, the only one that bcolz 1.x has, not {storage['order']!r:.80}")
    if not shape or not chunkshape or chunkshape[1:] != shape[1:]:
        raise ValueError(
            f"bcolz cuts arrays along the first axis only, but an array of {shape} has chunks of {chunkshape}"
        )
    cbytes = sizes.get("cbytes", 0)
    about = Carray(
        shape, chunkshape[0], np.dtype("u1"), cbytes if isinstance(cbytes, int) else 0, _compression(storage)
    )
    attributes, problems = _attributes(path, documents)
    dtype, endianness = storage["dtype"], choice(storage.get("endianness", "little"), "endianness", "little", "big")
    if not isinstance(dtype, dict):
        array = about._replace(dtype=numpy_dtype(dtype, endianness))
        collection = _collection("bcolz", "data", "data", _layers(array, per_file), array)
        shown_documents = carray_documents(array, attributes)
        shown_documents[STORAGE] = json_line(
            {**json.loads(shown_documents[STORAGE]), **{m: storage[m] for m in KEPT if m in storage}}
        )
        return _described(Dataset("bcolz", (collection,), shown_documents, problems, closed=True), array, attributes)
    columns = {name: (where, about._replace(dtype=numpy_dtype(d, endianness))) for name, where, d in _columns(dtype)}
    return _table(columns, per_file, attributes, problems)


def _chunkshape(storage: Mapping[str, Any], shape: Coords) -> Coords:
    """The RFC's `chunkshape`, or the chunk shape from `chunklen` of bcolz 1.x, the number of rows in a chunk."""
    if "chunklen" not in storage:
        return integers(storage["chunkshape"], "chunkshape", 1)
    rows = integer(storage["chunklen"], "chunklen", 1)
    chunkshape = integers(storage["chunkshape"], "chunkshape", 1) if "chunkshape" in storage else (rows, *shape[1:])
    if chunkshape[:1] != (rows,):
        raise ValueError(f"chunkshape is {chunkshape}, but chunklen {rows}: remove one of them from {STORAGE}")
    return chunkshape


def _layers(array: Carray, per_file: int) -> tuple[Layer, ...]:
    return (Layer(Superchunks(array.chunks, per_file), required=ceil_div(array.chunks, per_file)),)


def _collection(format: str, path: str, shards: str, layers: tuple[Layer, ...], array: Carray | None) -> Collection:
    chunks = layers[0].format.grid
    shape: Coords = chunks
    chunk: Coords = (1,)
    dtype = "bytes"
    if array is not None:
        shape, chunk, dtype = array.shape, (array.chunklen, *array.shape[1:]), str(array.dtype)
    per_file = layers[0].format.per_file if isinstance(layers[0].format, Superchunks) else 0
    return Collection(
        format=format,
        path=path,
        shards=shards,
        names=NumberedNames(chunks[0], carrays.HEAD, carrays.TAIL),
        layers=layers,
        codecs=("blosc",),
        transform=carrays.BlpHeader(),
        check=Chain((Codec("blosc"),)),
        facts=Facts(shape, chunk, None, dtype, "superchunks" if format == "bcolz" else "one file"),
        form=form_of(format, dtype, chunk, per_file) if per_file else "",
    )


def _table(
    columns: Mapping[str, tuple[str, Carray]], per_file: int, attributes: Any, problems: tuple[Problem, ...]
) -> Dataset:
    """The dataset of a table, which is shown with a directory for each column."""
    documents = {COLUMNS: json_line({"names": list(columns)}), ATTRS: json_line(attributes)}
    collections = []
    for name, (where, array) in columns.items():
        documents |= {f"{name}/{document}": data for document, data in carray_documents(array, {}).items()}
        collections.append(_collection("bcolz", f"{name}/data", f"data/{where}", _layers(array, per_file), array))
    # The first column's documents replace the table's own, so that a copy of the table does not count as superchunks.
    documents |= {d: documents[f"{name}/{d}"] for name in list(columns)[:1] for d in (SIZES, STORAGE)}
    return Dataset(
        "bcolz",
        tuple(collections),
        documents,
        problems,
        closed=True,
        hidden=frozenset(("data",)),
        indescribable="a structured data type",
    )


def _columns(dtype: Mapping[str, Any], below: str = "", depth: int = 0) -> list[tuple[str, str, Any]]:
    """The name, directory and type of each column. Names of nested columns are joined by underscores."""
    out = []
    for key, value in dtype.items():
        where = f"{below}/{key}" if below else str(key)
        if isinstance(value, dict) and depth < MAX_YAML_DEPTH:
            out += _columns(value, where, depth + 1)
        else:
            out.append((where.replace("/", "_"), where, value))
    if len(out) > MAX_COLUMNS:
        raise ValueError(f"more than {MAX_COLUMNS} columns")
    if not depth:
        names = [name for name, _, _ in out]
        for name in names:
            if not re.fullmatch(r"[^\W\d_]\w*", name) or keyword.iskeyword(name):
                raise ValueError(f"column {name!r:.80} is no name that bcolz accepts")
        if len(set(names)) != len(names) or not names:
            raise ValueError("dtype should have columns, and no two of the same name")
    return out


def _compression(storage: Mapping[str, Any]) -> Compression:
    """The compression from the RFC's member `compression`, or else from `cparams` of bcolz 1.x."""
    compression = storage.get("compression")
    if not isinstance(compression, dict):
        return carrays.compression_of(storage)
    level, filters = compression.get("level"), compression.get("filters")
    filters = filters if isinstance(filters, list) else []
    shuffle = next((zarr_metadata.SHUFFLES.index(name) for name in ("shuffle", "bitshuffle") if name in filters), 0)
    clevel = level if isinstance(level, int) and 0 <= level <= 9 else 5
    return Compression(LIBRARIES.get(str(compression.get("library")), "blosclz"), clevel, shuffle)


def _attributes(path: str, documents: Mapping[str, bytes]) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The values of the attributes, without their types, which the RFC stores, too; and problems.

    If `meta/attributes` does not exist, the attributes come from `__attrs__` of bcolz 1.x.
    """
    if ATTRIBUTES not in documents:
        try:
            return dict(carrays.attributes_of(path, documents.get(ATTRS, b"{}"))), ()
        except CorruptShardError as e:
            return {}, (Problem(path, f"{ATTRS}: {e.why}"),)
    try:
        members = mapping(parsed(documents, ATTRIBUTES) or {}, ATTRIBUTES)
        plain = {str(name): _plain(value) for name, value in members.items()}
        json_line(plain)
        return plain, ()
    except TypeError as e:
        return {}, (Problem(path, f"{ATTRIBUTES}: {e}"),)
    except ValueError as e:
        return {}, (Problem(path, reason(e)),)


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and "value" in value and value.keys() <= {"value", "type", "dtype"}:
        return value["value"]
    return value


# ---- bloscpack files ----

NUMPY_METADATA = ("container", "dtype", "shape", "order")


def open_packed(beginning: Beginning) -> Dataset:
    """The dataset with the only array of a bloscpack file, of which the first bytes were read.

    Raise ValueError, with the reason, if the file is damaged.
    """
    header = beginning.header
    size = beginning.size
    metadata = _user_metadata(beginning.metadata())
    if header.chunks > beginning.most():
        raise ValueError(f"{header.chunks} chunks in {size} bytes")
    chunks = header.chunks if header.chunks >= 0 else len(beginning.index())
    layers = (Layer(Pack(chunks, max(chunks, 1))),)
    array = _packed_array(header, chunks, metadata, size)
    attributes = {k: v for k, v in metadata.items() if array is None or k not in NUMPY_METADATA}
    documents = {ATTRS: json_line(attributes)} if array is None else carray_documents(array, attributes)
    collection = _collection("bloscpack", "data", "", layers, array)
    return _described(Dataset("bloscpack", (collection,), documents, closed=True), array, attributes)


def _user_metadata(section: Metadata | None) -> dict[str, Any]:
    """The JSON object in the metadata section; {} if there is none. bloscpack writes only JSON."""
    if section is None or section.magic != b"JSON":
        return {}
    data = section.data
    if section.codec:
        data = inflate(data, section.size)
        if len(data) != section.size:
            raise ValueError(f"{section.size} bytes of metadata expected after decompression, {len(data)} found")
    try:
        value = parse_json("", "metadata", data)
    except CorruptShardError as e:
        raise ValueError(str(e)) from e
    return value if isinstance(value, dict) else {"metadata": value}


def _packed_array(header: SuperchunkHeader, chunks: int, metadata: Mapping[str, Any], size: int) -> Carray | None:
    """The array in a bloscpack file; None if there is none, or if its chunks are not whole rows, as bcolz needs."""
    if metadata.get("container") != "numpy" or not {"shape", "dtype"} <= metadata.keys():
        return None
    shape, dtype = integers(metadata["shape"], "shape", 0), _packed_dtype(metadata["dtype"])
    row = math.prod(shape[1:]) * dtype.itemsize
    if not shape or not row or (len(shape) > 1 and metadata.get("order", "C") != "C"):
        return None
    chunk_bytes = header.chunk_size if chunks > 1 else shape[0] * row
    chunklen, remainder = divmod(chunk_bytes, row)
    array = Carray(shape, chunklen, dtype, size, Compression())
    return array if not remainder and chunklen > 0 and array.chunks == chunks else None


def _packed_dtype(text: Any) -> np.dtype[Any]:
    try:
        return numpy_dtype(literal(text), "little")
    except ValueError:
        return numpy_dtype(text, "little")  # bloscpack before 0.7.2 writes no quotes
