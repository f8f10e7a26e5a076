"""bcolz: superchunks, and bloscpack files, shown as the directories that bcolz 1.x writes, a file for each chunk.

The layout of superchunks is that of the "RFC for a persistence layer for bcolz" (bcolz, docs/persistence.rst). That of
bcolz 1.x is in its sources only (`carray_ext.pyx`, `ctable.py`, `attrs.py`). For bloscpack see its README.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.arrays import Codec
from shardfs.checks import Chain
from shardfs.codecs import inflate
from shardfs.errors import CorruptShardError
from shardfs.formats import System, parse_json
from shardfs.grid import NumberedNames, ceil_div
from shardfs.model import U64, Collection, Coords, Dataset, Facts, Layer, Problem, Sizes
from shardfs.shards import BLOSC_HEADER, blosc_size
from shardfs.shards.superchunk import Beginning, Header, Metadata, Pack, Superchunks, is_superchunk, read_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.model import Blob

SIZES, STORAGE, ATTRIBUTES = "meta/sizes", "meta/storage", "meta/attributes"

MAX_YAML_BYTES, MAX_YAML_DEPTH = 256 << 10, 50
"""Real documents have a few lines; reading YAML takes long."""

MAX_PLAIN = 4096
"""YAML has numbers in ways that take long to work out."""

MAX_COLUMNS = 10_000
MAX_ITEM = 2**31 - 1

LIBRARIES = {"fastlz": "blosclz", "blosclz": "blosclz", "lz4": "lz4", "lz4hc": "lz4hc", "snappy": "snappy",
             "zlib": "zlib", "zstd": "zstd"}  # fmt: skip


class BlpHeader:
    """A `model.Transform`: each chunk in a file of its own, behind 16 bytes: magic, version 1, and that it is one."""

    name = "bcolz header"
    head = b"blpk\x01\0\0\0" + (1).to_bytes(8, "little")

    def sizes(self, coords: U64, stored: Sizes) -> Sizes:
        return stored + len(self.head)

    def show(self, coords: Coords, stored: bytes) -> bytes:
        if blosc_size(stored[:BLOSC_HEADER]) != len(stored):
            raise ValueError(f"a Blosc chunk that says another size than {len(stored)} bytes")
        return self.head + stored


class Bcolz:
    """See `formats.Format`."""

    documents = (SIZES, STORAGE, ATTRIBUTES)
    systems = (
        System(
            "bcolz",
            "bcolz superchunks",
            "`meta/sizes`, and `meta/storage` with `superchunksize`",
            "bcolz 1.x: `data/__0.blp`",
            "python-blosc (chunks)",
            "bcolz-zipline",
        ),
        System(
            "bloscpack",
            "bloscpack files",
            "`*.blp`, `*.bp`, and how the file begins",
            "a directory of bcolz 1.x",
            "bloscpack",
            "bcolz-zipline",
        ),
    )

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        if SIZES not in documents or STORAGE not in documents:
            return None
        try:
            sizes, storage = _parsed(documents, SIZES), _parsed(documents, STORAGE)
            if not isinstance(sizes, dict) or not isinstance(storage, dict):
                return None
            if "superchunksize" not in storage:  # bcolz 1.x: a file for each chunk already
                return Dataset("bcolz", closed=True)
            return _open_superchunks(path, sizes, storage, documents)
        except (ValueError, TypeError, KeyError) as e:
            return Dataset("bcolz", problems=(_problem(path, e),), closed=True)

    def may_hold(self, name: str) -> bool:
        # Those in a `data` directory of bcolz's are single chunks; there may be very many of them.
        return name.endswith((".blp", ".bp")) and not re.fullmatch(r"__\d+\.blp", name)

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        head = read_head(blob)
        return _open_packed(Beginning(blob, head)) if is_superchunk(head) else None


# ---- what bcolz 1.x reads ----


class Compression(NamedTuple):
    """What bcolz compresses new chunks with. Reading needs none of it."""

    library: str = "blosclz"
    level: int = 5
    shuffle: int = 1


class Carray(NamedTuple):
    """An array in chunks along the first axis. Sizes are for people."""

    shape: Coords
    chunklen: int
    dtype: np.dtype[Any]
    cbytes: int
    compression: Compression

    @property
    def chunks(self) -> int:
        return ceil_div(self.shape[0], self.chunklen)


def _line(document: Any) -> bytes:
    """JSON as bcolz writes it, and only so can read it: ASCII."""
    return json.dumps(document, ensure_ascii=True).encode("ascii") + b"\n"


def _carray_documents(array: Carray, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    library, level, shuffle = array.compression
    storage = {
        "dtype": _dtype_member(array.dtype),
        "cparams": {"clevel": level, "shuffle": shuffle, "cname": library, "quantize": 0},
        "chunklen": array.chunklen,
        "expectedlen": array.shape[0],
        "dflt": _zero(array.dtype),
    }
    return {
        SIZES: _line({"shape": list(array.shape), "nbytes": nbytes, "cbytes": array.cbytes}),
        STORAGE: _line(storage),
        "__attrs__": _line(attributes),
    }


def _dtype_member(dtype: np.dtype[Any]) -> Any:
    """What numpy makes a dtype of when bcolz hands it over: the list of fields that bcolz itself writes is refused."""
    if dtype.names is None:
        return str(dtype) if dtype.subdtype is None else [_dtype_member(dtype.subdtype[0]), list(dtype.shape)]
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": list(dtype.names),
        "formats": [_dtype_member(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _zero(dtype: np.dtype[Any]) -> Any:
    if dtype.fields is not None and dtype.names is not None:
        return [_zero(dtype.fields[name][0]) for name in dtype.names]
    return {"b": False, "U": "", "S": "", "f": 0.0}.get(dtype.kind, 0)


# ---- superchunks ----


def _open_superchunks(
    path: str, sizes: dict[str, Any], storage: dict[str, Any], documents: Mapping[str, bytes]
) -> Dataset:
    shape, chunkshape = _integers(sizes["shape"], "shape", 0), _integers(storage["chunkshape"], "chunkshape", 1)
    per_file = _integer(storage["superchunksize"], "superchunksize", 1)
    if storage.get("order", "C") != "C":
        raise ValueError(f"order {storage['order']!r}: bcolz has arrays in C order only")
    if not shape or chunkshape[1:] != shape[1:]:
        raise ValueError(f"chunks of {chunkshape} of an array of {shape}: bcolz cuts along the first axis only")
    cbytes = sizes.get("cbytes", 0)
    about = Carray(
        shape, chunkshape[0], np.dtype("u1"), cbytes if isinstance(cbytes, int) else 0, _compression(storage)
    )
    attributes, problems = _attributes(path, documents)
    dtype, endianness = storage["dtype"], storage.get("endianness", "little")
    if endianness not in ("little", "big"):
        raise ValueError(f"endianness should be little or big, not {endianness!r}")
    if not isinstance(dtype, dict):
        array = about._replace(dtype=_dtype(dtype, endianness))
        return Dataset(
            "bcolz",
            (_collection("bcolz", "data", "data", _layers(array, per_file), array),),
            _carray_documents(array, attributes),
            problems,
            closed=True,
        )
    columns = {name: (where, about._replace(dtype=_dtype(d, endianness))) for name, where, d in _columns(dtype)}
    return _table(columns, per_file, attributes, problems)


def _layers(array: Carray, per_file: int) -> tuple[Layer, ...]:
    return (Layer(Superchunks(array.chunks, per_file)),)


def _collection(format: str, path: str, shards: str, layers: tuple[Layer, ...], array: Carray | None) -> Collection:
    chunks = layers[0].format.grid
    shape: Coords = chunks
    chunk: Coords = (1,)
    dtype = "bytes"
    if array is not None:
        shape, chunk, dtype = array.shape, (array.chunklen, *array.shape[1:]), str(array.dtype)
    return Collection(
        format=format,
        path=path,
        shards=shards,
        names=NumberedNames(chunks[0], b"__", b".blp"),
        layers=layers,
        codecs=("blosc",),
        transform=BlpHeader(),
        check=Chain((Codec("blosc"),)),
        facts=Facts(shape, chunk, None, dtype, "superchunks"),
    )


def _table(
    columns: Mapping[str, tuple[str, Carray]], per_file: int, attributes: Any, problems: tuple[Problem, ...]
) -> Dataset:
    """A structured type in column-wise order: a directory for each column."""
    documents = {"__rootdirs__": _line({"names": list(columns)}), "__attrs__": _line(attributes)}
    collections = []
    for name, (where, array) in columns.items():
        documents |= {f"{name}/{document}": data for document, data in _carray_documents(array, {}).items()}
        collections.append(_collection("bcolz", f"{name}/data", f"data/{where}", _layers(array, per_file), array))
    # Who finds these again, in a copy, must not take them for those of superchunks.
    documents |= {d: documents[f"{name}/{d}"] for name in list(columns)[:1] for d in (SIZES, STORAGE)}
    return Dataset("bcolz", tuple(collections), documents, problems, closed=True, hidden=frozenset(("data",)))


def _columns(dtype: Mapping[str, Any], below: str = "", depth: int = 0) -> list[tuple[str, str, Any]]:
    """Name, directory and type of each column; those of a nested type are joined by underscores."""
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
            raise ValueError("no columns, or two of the same name")
    return out


def _compression(storage: Mapping[str, Any]) -> Compression:
    told = storage.get("compression")
    if not isinstance(told, dict):
        return Compression()
    level, filters = told.get("level"), told.get("filters")
    known = level if isinstance(level, int) and 0 <= level <= 9 else 5
    shuffle = 0
    if isinstance(filters, list):
        shuffle = 1 if "shuffle" in filters else 2 if "bitshuffle" in filters else 0
    return Compression(LIBRARIES.get(str(told.get("library")), "blosclz"), known, shuffle)


def _attributes(path: str, documents: Mapping[str, bytes]) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The values of the attributes, without the types that the RFC has beside each."""
    if ATTRIBUTES not in documents:
        return {}, ()
    try:
        told = _parsed(documents, ATTRIBUTES) or {}
        if not isinstance(told, dict):
            raise TypeError(f"should be a mapping, not {type(told).__name__}")
        plain = {str(name): _plain(value) for name, value in told.items()}
        _line(plain)
        return plain, ()
    except TypeError as e:
        return {}, (Problem(path, f"{ATTRIBUTES}: {e}"),)
    except ValueError as e:
        return {}, (_problem(path, e),)


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and "value" in value and value.keys() <= {"value", "type", "dtype"}:
        return value["value"]
    return value


# ---- bloscpack files ----

NUMPY_METADATA = ("container", "dtype", "shape", "order")


def _open_packed(beginning: Beginning) -> Dataset:
    header, size = beginning.header, beginning.size
    metadata = _user_metadata(beginning.metadata())
    if header.chunks > beginning.most():
        raise ValueError(f"{header.chunks} chunks in {size} bytes")
    chunks = header.chunks if header.chunks >= 0 else len(beginning.index())
    layers = (Layer(Pack(chunks, max(chunks, 1))),)
    array = _packed_array(header, chunks, metadata, size)
    attributes = {k: v for k, v in metadata.items() if array is None or k not in NUMPY_METADATA}
    documents = {"__attrs__": _line(attributes)} if array is None else _carray_documents(array, attributes)
    return Dataset("bloscpack", (_collection("bloscpack", "data", "", layers, array),), documents, closed=True)


def _user_metadata(section: Metadata | None) -> dict[str, Any]:
    """What the metadata section says, if it is a JSON object; bloscpack has nothing else."""
    if section is None or section.magic != b"JSON":
        return {}
    data = section.data
    if section.codec:
        data = inflate(data, section.size)
    try:
        found = parse_json("", "metadata", data)
    except CorruptShardError as e:
        raise ValueError(str(e)) from e
    return found if isinstance(found, dict) else {"metadata": found}


def _packed_array(header: Header, chunks: int, metadata: Mapping[str, Any], size: int) -> Carray | None:
    """The array that a bloscpack file holds; None if it holds none, or one that bcolz would have cut otherwise."""
    if metadata.get("container") != "numpy" or not {"shape", "dtype"} <= metadata.keys():
        return None
    shape, dtype = _integers(metadata["shape"], "shape", 0), _packed_dtype(metadata["dtype"])
    row = math.prod(shape[1:]) * dtype.itemsize
    if not shape or not row or (len(shape) > 1 and metadata.get("order", "C") != "C"):
        return None
    chunk_bytes = header.chunk_size if chunks > 1 else shape[0] * row
    chunklen, rest = divmod(chunk_bytes, row)
    array = Carray(shape, chunklen, dtype, size, Compression())
    return array if not rest and chunklen > 0 and array.chunks == chunks else None


def _packed_dtype(text: Any) -> np.dtype[Any]:
    try:
        return _dtype(_literal(text), "little")
    except ValueError:
        return _dtype(text, "little")  # bloscpack before 0.7.2 has no quotes


# ---- values ----


def _parsed(documents: Mapping[str, bytes], name: str) -> Any:
    """A document in JSON or YAML. Raise ValueError with its name and the reason."""
    raw = documents[name]
    if raw.lstrip().startswith(b"{"):
        try:
            return parse_json("", name, raw)
        except CorruptShardError:
            pass  # YAML has mappings in braces, too
    try:
        return parse_yaml(raw)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e


def parse_yaml(raw: bytes) -> Any:
    """A YAML document of plain values, without aliases. Raise ValueError with the reason."""
    if len(raw) > MAX_YAML_BYTES:
        raise ValueError(f"{len(raw)} bytes of YAML; {MAX_YAML_BYTES} is the limit")
    try:
        import yaml
    except ImportError:
        raise ValueError("is YAML, for which PyYAML must be installed: pip install 'shardfs[bcolz]'") from None
    try:
        depth = 0
        for event in yaml.parse(raw, yaml.SafeLoader):  # one by one, so that it ends before it costs anything
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("has aliases, which no such document needs")
            if depth > MAX_YAML_DEPTH:
                raise ValueError("nested too deeply")
            if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > MAX_PLAIN:
                raise ValueError(f"a plain value of {len(event.value)} characters; {MAX_PLAIN} is the limit")
        return yaml.safe_load(raw)
    except yaml.YAMLError as e:
        raise ValueError(f"cannot be read: {' '.join(str(e).split())}") from e


def _integer(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{name} should be an integer of at least {least}, not {value!r:.80}")
    return value


def _integers(value: Any, name: str, least: int) -> Coords:
    """A list, one integer, or what YAML reads a Python tuple as: a text like `(30, 20)`."""
    if isinstance(value, str) and re.fullmatch(r"\(\s*\d{1,20}\s*(,\s*\d{1,20}\s*)*,?\s*\)", value):
        value = [int(n) for n in re.findall(r"\d+", value)]
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, list) or len(value) > 32:
        raise ValueError(f"{name} should be a list of integers, not {value!r:.80}")
    return tuple(_integer(v, name, least) for v in value)


def _dtype(told: Any, endianness: str) -> np.dtype[Any]:
    """A numpy type by name, or by a list of fields. Raise ValueError for what is no type of plain bytes."""
    if isinstance(told, str) and told.startswith("["):
        told = _literal(told)
    if isinstance(told, str) and not re.fullmatch(r"[<>|=]?[A-Za-z]\w{0,30}(\[\w{1,10}\])?", told):
        raise ValueError(f"dtype {told!r:.80} is unknown")
    try:
        dtype = np.dtype(_fields(told) if isinstance(told, list) else str(told))
    except (TypeError, ValueError, SyntaxError, OverflowError) as e:
        raise ValueError(f"dtype {told!r:.80} is unknown: {e}") from e
    if dtype.hasobject or not 0 < dtype.itemsize <= MAX_ITEM:
        raise ValueError(f"dtype {told!r:.80} is no type of plain bytes")
    explicit = isinstance(told, list) or str(told)[0] in "<>|="
    return dtype if explicit or endianness == "little" else dtype.newbyteorder(">")


def _fields(told: list[Any]) -> list[tuple[Any, ...]]:
    """Fields as numpy wants them, tuples, where JSON has lists."""
    out = []
    for field in told:
        if not isinstance(field, list | tuple) or not 2 <= len(field) <= 3 or not isinstance(field[0], str):
            raise ValueError(f"field {field!r:.80} of a dtype")
        inner = _fields(field[1]) if isinstance(field[1], list) else str(field[1])
        rest = [tuple(n) if isinstance(n, list) else n for n in field[2:]]
        out.append((field[0], inner, *rest))
    return out


def _literal(text: Any) -> Any:
    if not isinstance(text, str) or len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{text!r:.80} is no Python literal")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise ValueError(f"{text!r:.80} is no Python literal") from e


def _problem(path: str, error: Exception) -> Problem:
    return Problem(path, f"no member {error}" if isinstance(error, KeyError) else str(error))


BCOLZ = Bcolz()
