"""A document that is written is refused with ValueError, or what comes of it can be opened, edited and shown."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from shardfs.formats.create_rules import Rule
from shardfs.formats.registry import format_of
from shardfs.formats.zarr_transformer import META, ZARR_TRANSFORMER, ArrayDocuments
from shardfs.formats.zarr_transformer.stored import CONSOLIDATED
from shardfs.model.errors import CorruptShardError, UnsupportedError
from tests import data_n5, handmade
from tests.data_zarr_transformer import array_document, sharding
from tests.fuzzing.inputs import Draw, bent
from tests.strategies import json_paths, json_values, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORMATS = {"zarr": "zarr3", "volume": "precomputed", "n5": "n5"}
DRAFT = ZARR_TRANSFORMER.dataset_formats[0]

ZARR = handmade.zarr_metadata((16, 16), (8, 8), (2, 2))
VOLUME = handmade.volume_info(
    (16, 16, 12), (4, 4, 2), handmade.sharding(preshift=1, minishard=2, shard=3, index="gzip")
)
N5 = data_n5.attributes(
    (12, 12), (6, 6), "uint16", codecs=[data_n5.sharding((3, 3), [{"name": "n5bytes"}], data_n5.Index())]
)
PLAIN: dict[str, tuple[str, Any]] = {
    "zarr": (
        "zarr.json",
        {
            **ZARR,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
            "codecs": [{"name": "bytes"}],
        },
    ),
    "volume": ("info", {**VOLUME, "scales": [{k: v for k, v in VOLUME["scales"][0].items() if k != "sharding"}]}),
    "n5": (
        "attributes.json",
        {"dimensions": [12, 12], "blockSize": [3, 3], "dataType": "uint16", "compression": {"type": "raw"}},
    ),
}
SHARDED = {"zarr": ("zarr.json", ZARR), "volume": ("info", VOLUME), "n5": ("attributes.json", N5)}


VALUES = json_values | st.sampled_from((10**400, -(10**400), 1e308, 5e-324))
"""Also numbers that no float is, or of which no product is."""


def altered(draw: Draw, document: Any) -> bytes:
    """The document with other values in it, of any type; sometimes not even JSON."""
    for _ in range(draw.draw(st.integers(0, 3))):
        paths = json_paths(document)
        if not paths:
            break
        document = replaced(document, draw.draw(st.sampled_from(paths)), draw.draw(VALUES))
    raw = json.dumps(document).encode()
    return bent(draw, raw) if draw.draw(st.integers(0, 4)) == 0 else raw


@dataclass(frozen=True)
class Kind:
    """Documents of one format, as they are stored in a directory, by path below it; `plain` is one without shards."""

    format: str
    directory: str
    stored: Mapping[str, Any]
    plain: Any = None

    @cached_property
    def shown(self) -> Mapping[str, Any]:
        """The documents that a mount shows, and so lets be written."""
        raw = {name: json.dumps(doc).encode() for name, doc in self.stored.items()}
        if self.format == DRAFT:
            rewritten = {name: ArrayDocuments(".json").rewrite("", name, data) for name, data in raw.items()}
            return {name: json.loads(data) for name, data in rewritten.items() if data is not None}
        opened = format_of(self.format).open(self.directory, raw)
        assert opened is not None
        return {name: json.loads(data) for name, data in opened.documents.items()}


GZIP = {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0", "configuration": {"level": 1}}
ARRAY = array_document((7, 10), (2, 3), sharding(2, 2), compressor=GZIP)
GROUP = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": {"metadata": {"b": ZARR, "c/d": ZARR}}}
STORAGE = {"dtype": "uint8", "chunkshape": [8], "superchunksize": 3, "compression": {"library": "lz4", "level": 5}}
KINDS = [
    *(Kind(FORMATS[kind], "a", {name: sharded}, PLAIN[kind][1]) for kind, (name, sharded) in SHARDED.items()),
    Kind("zarr3", "a", {"zarr.json": GROUP, "b/zarr.json": ZARR}),
    Kind(DRAFT, META, {"a.array.json": ARRAY}, {**ARRAY, "storage_transformers": []}),
    Kind(DRAFT, "", {CONSOLIDATED: {"metadata": {f"{META}/a.array.json": ARRAY}}, f"{META}/a.array.json": ARRAY}),
    Kind("bcolz", "a", {
        "meta/sizes": {"shape": [50], "nbytes": 50, "cbytes": 9},
        "meta/storage": STORAGE,
        "meta/attributes": {"a": {"value": 1, "type": "int"}, "b": "x"},
    }),
]  # fmt: skip


MEMBERS = (
    "attributes", "chunk_key_encoding", "compression", "consolidated_metadata", "dimension_names",
    "downsamplingFactors", "codecs", "compressor", "extensions", "hidden", "index_codecs", "index_location",
    "mesh", "minishard_index_encoding", "multiscales", "ome", "order", "preshift_bits", "resolution",
    "segment_properties", "sharding", "skeletons", "storage_transformers", "voxel_offset", "zarr_format",
    "@type", "dtype", "endianness", "configuration", "name",
)  # fmt: skip
"""Names that mean something somewhere."""


def _with_members(draw: Draw, document: Any) -> Any:
    """The document, sometimes with more members: `altered` changes only those that there are."""
    for _ in range(draw.draw(st.sampled_from((0, 0, 1, 2)))):
        objects = [path for path in [(), *json_paths(document)] if isinstance(_at(document, path), dict)]
        path = draw.draw(st.sampled_from(objects))
        member = {draw.draw(st.sampled_from(MEMBERS)): draw.draw(VALUES)}
        document = replaced(document, path, {**_at(document, path), **member})
    return document


def _at(document: Any, path: Sequence[Any]) -> Any:
    for name in path:
        document = document[name]
    return document


def written(draw: Draw) -> None:
    kind = draw.draw(st.sampled_from(KINDS))
    form, directory = format_of(kind.format), kind.directory
    sound = draw.draw(st.integers(0, 2))
    files = {n: json.dumps(doc).encode() if sound else altered(draw, doc) for n, doc in kind.stored.items()}
    name = draw.draw(st.sampled_from(sorted(kind.shown)))
    candidates = [doc for doc in (kind.shown[name], kind.plain, kind.stored.get(name)) if doc is not None]
    raw = altered(draw, _with_members(draw, draw.draw(st.sampled_from(candidates))))
    rule = Rule(kind.format)
    makers: list[Callable[[], Mapping[str, bytes] | None]] = [
        lambda: form.edit(directory, files, name, raw),
        lambda: form.edit(directory, files, name, raw, rule),
        lambda: form.edit(directory, {}, name, raw),
        lambda: form.shard(directory, name, raw, rule),
    ]
    for make in makers:
        try:
            documents = make()
        except (ValueError, UnsupportedError):
            continue
        if documents is not None:
            with suppress(CorruptShardError):
                form.open(directory, {**files, **documents})
    with suppress(ValueError):
        form.references(directory, name, raw)
    again = form.sharding({**files, name: raw})
    if again is not None:
        with suppress(ValueError):
            form.shard(directory, name, json.dumps(kind.plain or kind.shown[name]).encode(), again)
