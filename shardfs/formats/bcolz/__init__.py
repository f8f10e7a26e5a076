"""bcolz: the format of superchunks and bloscpack files, and the layout `bcolz`.

Both show arrays as the directories that bcolz 1.x writes, with a file for each chunk.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardfs.formats.bcolz import edits
from shardfs.formats.bcolz.carrays import ATTRS, COLUMNS, SIZES, STORAGE, attributes_of, open_carray
from shardfs.formats.bcolz.stored import ATTRIBUTES, open_packed, open_superchunks
from shardfs.formats.bcolz.values import parsed
from shardfs.formats.bcolz.view import shown_as_bcolz
from shardfs.formats.create_rules import Rule
from shardfs.formats.documents import UNFIT, reason
from shardfs.formats.format import NUMBER, Format, View
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.shards.byte_layouts.superchunk import Beginning, is_superchunk, read_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.create_rules import Sharding
    from shardfs.formats.json_text import Path
    from shardfs.model.blobs import Blob
    from shardfs.model.dataset import Surroundings

COMPRESSED = "cbytes"
"""The member for the total compressed size of all chunks."""


class Bcolz(Format, View):
    """The format and the layout `bcolz`.

    Args:
        documents: the names of the documents that `open` needs. The native layout needs fewer than other layouts.
    """

    name = "bcolz"
    dataset_formats = ("bcolz", "bloscpack")
    chunk_names = re.compile(rf"(?:.*/)?data/__{NUMBER}\.blp", re.DOTALL)

    def __init__(self, *documents: str) -> None:
        self.documents = documents

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        if SIZES not in documents or STORAGE not in documents:
            return _open_table(path, documents) if COLUMNS in documents else None
        try:
            sizes, storage = parsed(documents, SIZES), parsed(documents, STORAGE)
            if not isinstance(sizes, dict) or not isinstance(storage, dict):
                return None
            if "superchunksize" not in storage:  # bcolz 1.x: a file for each chunk already
                return open_carray(path, sizes, storage, documents.get(ATTRS))
            return open_superchunks(path, sizes, storage, documents)
        except UNFIT as e:
            return Dataset(self.name, problems=(Problem(path, reason(e)),), closed=True)

    def may_hold(self, name: str) -> bool:
        # bcolz names single chunks like this. They are not opened, because a `data` directory may have very many.
        return name.endswith((".blp", ".bp")) and not re.fullmatch(r"__\d+\.blp", name)

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        head = read_head(blob)
        return open_packed(Beginning(blob, head)) if is_superchunk(head) else None

    def describes(self, name: str) -> bool:
        return name in edits.EDITABLE

    def edit(
        self, path: str, documents: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        return edits.edited(self.open(path, documents), documents, name, new)

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        return edits.sharded(name, new, sharding) if isinstance(sharding, Rule) else None

    def differences(self, old: bytes, new: bytes) -> Mapping[Path, Any]:
        return {at: value for at, value in super().differences(old, new).items() if at != (COMPRESSED,)}

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        if dataset is None:
            return Dataset(self.name)
        return dataset if dataset.format in (self.name, "bloscpack") else shown_as_bcolz(dataset)


def _open_table(path: str, documents: Mapping[str, bytes]) -> Dataset:
    """The dataset of a bcolz 1.x table, whose columns are arrays in subdirectories."""
    table = Dataset("bcolz", format_names=frozenset((ATTRS, COLUMNS)))
    try:
        return replace(table, attributes=attributes_of(path, documents.get(ATTRS, b"{}")))
    except CorruptShardError as e:
        return replace(table, problems=(Problem(path, f"{ATTRS}: {e.why}"),))


BCOLZ = Bcolz(SIZES, STORAGE, ATTRIBUTES, ATTRS)
BCOLZ_SOURCE = Bcolz(SIZES, STORAGE, ATTRIBUTES, ATTRS, COLUMNS)
"""The format for other layouts: also detects tables of bcolz 1.x, which the native layout shows unchanged."""
