"""N5: the format, which shows sharded datasets with one file for each block, and the layout `n5`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardfs.formats import n5_viewer
from shardfs.formats.create_rules import Rule, Sharding
from shardfs.formats.documents import parse_json, print_strict
from shardfs.formats.format import OfDocuments, Pairing, System
from shardfs.formats.n5 import edits
from shardfs.formats.n5.stored import is_dataset, open_dataset
from shardfs.formats.n5.view import VERSION, image_of, shown_as_n5
from shardfs.formats.n5.words import DOCUMENT, FORM
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCK = re.compile(r"(?:0|[1-9][0-9]{0,18})(?:/(?:0|[1-9][0-9]{0,18}))*")


class N5Format(OfDocuments):
    """The format and the layout `n5`."""

    name = "n5"
    renames = True
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
            # Groups may have this document for users' attributes. Datasets below do not depend on it.
            return Dataset("n5", problems=(Problem(path, f"{DOCUMENT}: {e.why}"),))
        if is_dataset(doc):
            return open_dataset(path, doc)
        if "n5" not in doc and len(documents) > 1:
            return None  # another format's documents are better evidence than this name
        attributes = {name: value for name, value in doc.items() if name != "n5"}
        return Dataset("n5", format_names=FORM, attributes=attributes, levels=n5_viewer.LevelsBelow(attributes))

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        return {DOCUMENT: edits.edited(stored.get(DOCUMENT), new, rule)}

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        return Sharding("n5", stored) if edits.is_sharded(stored.get(DOCUMENT)) else None

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        if isinstance(sharding, Rule):
            made = edits.sharded_by_rule(new, sharding)
        else:
            made = edits.sharded_as_before(new, sharding.documents[DOCUMENT])
        return None if made is None else {DOCUMENT: made}

    def chunk_like(self, name: str) -> bool:
        return _BLOCK.fullmatch(name) is not None

    def children(self, dataset: Dataset) -> Sequence[str]:
        image = None if dataset.format == self.name else image_of(dataset)
        own = {c.path for c in (*dataset.collections, *dataset.unsharded)}
        return [level.path for level in image.levels if level.path not in own] if image is not None else ()

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        if dataset is None:
            return Dataset("n5", documents={} if path else {DOCUMENT: print_strict({"n5": VERSION})})
        if dataset.format == self.name:
            return replace(dataset, collections=dataset.collections or dataset.unsharded)
        return shown_as_n5(path, dataset, children)


N5 = N5Format()
