"""Zarr v3: shows arrays with the `sharding_indexed` codec as unsharded arrays, and describes all arrays for layouts.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html and .../v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardfs.formats.documents import parse_json
from shardfs.formats.format import NUMBER, Format
from shardfs.formats.zarr3.edits import ARRAYS, edited, references, with_copy
from shardfs.formats.zarr3.stored import DOCUMENT, MAX_EDGES, open_array, open_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.formats.create_rules import Rule
    from shardfs.model.dataset import Dataset

__all__ = ("MAX_EDGES", "ZARR3", "Zarr3")


class Zarr3(Format):
    """The format of Zarr v3 datasets."""

    documents = (DOCUMENT,)
    edits = ARRAYS
    dataset_formats = ("zarr3",)
    chunk_names = re.compile(rf"c|(?:c/|){NUMBER}(?:/{NUMBER})*|(?:c\.|){NUMBER}(?:\.{NUMBER})*")

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get(DOCUMENT)
        if raw is None:
            return None
        doc = parse_json(path, DOCUMENT, raw)
        if not isinstance(doc, dict) or doc.get("zarr_format") != 3:
            return None  # in the draft of 2022, zarr_format is a URL
        return open_array(path, doc) if doc.get("node_type") == "array" else open_group(path, doc)

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        return references(new)

    def edit(
        self, path: str, documents: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        return {DOCUMENT: edited(documents, new, rule)}

    def with_copy(self, raw: bytes, below: str, source: bytes | None) -> bytes:
        return with_copy(raw, below, source)


ZARR3 = Zarr3()
