"""Zarr v3: shows arrays with the `sharding_indexed` codec as unsharded arrays, and describes all arrays for layouts.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html and .../v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardfs.formats.create_rules import Rule, Sharding
from shardfs.formats.documents import parse_json
from shardfs.formats.format import OfDocuments
from shardfs.formats.zarr3 import edits
from shardfs.formats.zarr3.stored import DOCUMENT, MAX_EDGES, MAX_NESTING, open_array, open_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.dataset import Dataset

__all__ = ("MAX_EDGES", "MAX_NESTING", "ZARR3", "Zarr3")

_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_CHUNK = re.compile(rf"c|(?:c/|){_NUMBER}(?:/{_NUMBER})*|(?:c\.|){_NUMBER}(?:\.{_NUMBER})*")
"""Chunk keys in all encodings that `stored.ChunkKeys` supports."""


class Zarr3(OfDocuments):
    """The format of Zarr v3 datasets."""

    documents = (DOCUMENT,)
    dataset_formats = ("zarr3",)

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get(DOCUMENT)
        if raw is None:
            return None
        doc = parse_json(path, DOCUMENT, raw)
        if not isinstance(doc, dict) or doc.get("zarr_format") != 3:
            return None  # in the draft of 2022, zarr_format is a URL
        return open_array(path, doc) if doc.get("node_type") == "array" else open_group(path, doc)

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        return edits.references(new)

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        return {DOCUMENT: edits.edited(stored, new, rule)}

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        return Sharding("zarr3", stored) if edits.is_sharded(stored.get(DOCUMENT)) else None

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        if isinstance(sharding, Rule):
            made = edits.sharded_by_rule(new, sharding)
        else:
            made = edits.sharded_as_before(new, sharding.documents[DOCUMENT])
        return None if made is None else {DOCUMENT: made}

    def chunk_like(self, name: str) -> bool:
        return _CHUNK.fullmatch(name) is not None


ZARR3 = Zarr3()
