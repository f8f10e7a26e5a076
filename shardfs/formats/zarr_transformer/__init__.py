"""The Zarr v3 draft of 2022: shows arrays that a storage transformer shards as arrays without the transformer.

Sharding storage transformer 1.0, editor's draft of 18 February 2022,
https://purl.org/zarr/spec/extensions/storage-transformers/sharding/1.0, as zarr-python 2.18 writes and reads it.

Metadata and chunks are in separate trees: `meta/root/foo.array.json` describes the array in `data/root/foo`. Chunks and
shards have names such as `c1/2` or `c1.2`, without a separator after the c.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from shardfs.formats.documents import parse_json, parse_written
from shardfs.formats.format import NUMBER, Format
from shardfs.formats.zarr_transformer.edits import ARRAYS, copies, edited_copies
from shardfs.formats.zarr_transformer.stored import (
    CONSOLIDATED,
    DATA,
    DOCUMENT,
    FORMAT,
    META,
    ArrayDocuments,
    Hierarchy,
)
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.create_rules import Rule

__all__ = ("META", "ZARR_TRANSFORMER", "ArrayDocuments", "Hierarchy", "ZarrTransformer")

_ARRAY = re.compile(r"(?:.*/)?[^/]+\.array(?:\.[^/]*)?", re.DOTALL)
"""The names of the documents of arrays. The suffix after `.array` is the same in a whole hierarchy."""


class ZarrTransformer(Format):
    """The format of hierarchies of the Zarr v3 draft of 2022."""

    documents = (DOCUMENT,)
    edits = ARRAYS
    dataset_formats = (FORMAT,)
    chunk_names = re.compile(rf"c{NUMBER}(?:(?:/{NUMBER})*|(?:\.{NUMBER})*)")

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get(DOCUMENT)
        if raw is None:
            return None
        doc = parse_json(path, DOCUMENT, raw)
        version = doc.get("zarr_format") if isinstance(doc, dict) else None
        if not isinstance(version, str) or "://" not in version:
            return None  # in the final Zarr v3, zarr_format is the number 3
        suffix = doc.get("metadata_key_suffix", ".json")
        if not isinstance(suffix, str) or "/" in suffix or "\0" in suffix:
            why = f"{DOCUMENT}: metadata_key_suffix should be the end of a name, not {suffix!r:.80}"
            return Dataset(FORMAT, problems=(Problem(path, why),))
        return Dataset(FORMAT, scope=Hierarchy(suffix))

    def describes(self, name: str) -> bool:
        return name == CONSOLIDATED or _is_array(name)

    def described_by(self, path: str, name: str) -> str:
        if not _is_array(name):
            return path
        root = _root(path)
        node = f"/{path}/{name}".removeprefix(f"{root}/{META}")
        return f"{root}/{DATA}{node[: node.rindex('.array')]}".lstrip("/")

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        if name != CONSOLIDATED:
            return (name,)
        return [name, *_arrays_in(path, new).values()]

    def shown(self, path: str, documents: Mapping[str, bytes], name: str) -> bytes | None:
        raw = documents.get(name)
        if raw is None or not self.describes(name):
            return raw
        array = name if _is_array(name) else next(iter(copies(raw)), "")
        try:
            return ArrayDocuments(array.rpartition(".array")[2]).rewrite(path, name, raw) or raw
        except CorruptShardError:
            return raw

    def edit(
        self, path: str, documents: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        if name != CONSOLIDATED:
            parse_written(name, new)  # the name shows that this should be a document of the draft
            return {name: ARRAYS.edited(name, documents.get(name), new, rule)}
        arrays = {key: documents.get(document) for key, document in _arrays_in(path, new).items()}
        return {name: edited_copies(documents.get(name), new, arrays)}


def _is_array(name: str) -> bool:
    return _ARRAY.fullmatch(name) is not None


def _arrays_in(path: str, consolidated: bytes) -> Mapping[str, str]:
    """The documents of arrays that a `.zmetadata` document copies: paths relative to `path`, by path from the root."""
    root = _root(path)
    return {key: posixpath.relpath(f"{root}/{key}", f"/{path}") for key in copies(consolidated)}


def _root(path: str) -> str:
    """The root of the hierarchy that contains a directory of documents, with a leading slash."""
    top = META.partition("/")[0]
    inside = f"/{path}/".rpartition(f"/{META}/")
    return inside[0] if inside[1] else f"/{path}".removesuffix(f"/{top}")


ZARR_TRANSFORMER = ZarrTransformer()
