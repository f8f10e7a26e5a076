"""Zarr v2: the format, whose arrays only layouts convert, and the layout `zarr2`.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardfs.formats.format import NUMBER, Format, View
from shardfs.formats.layouts import levels_below
from shardfs.formats.zarr2.codec_names import ARRAY, DOCUMENTS, FORMAT, GROUP
from shardfs.formats.zarr2.stored import open_node
from shardfs.formats.zarr2.view import CONSOLIDATION, group_documents, shown_as_zarr2
from shardfs.model.dataset import Dataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from shardfs.model.dataset import Surroundings


class Zarr2(Format, View):
    """The format and the layout `zarr2`."""

    name = FORMAT
    consolidation = CONSOLIDATION
    dataset_formats = (FORMAT,)
    chunk_names = re.compile(rf"{NUMBER}(?:(?:/{NUMBER})*|(?:\.{NUMBER})*)")
    documents = DOCUMENTS

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        node_documents = {name: raw for name, raw in documents.items() if name in self.documents}
        return open_node(path, node_documents) if ARRAY in node_documents or GROUP in node_documents else None

    def children(self, dataset: Dataset, names: Set[str]) -> Sequence[str]:
        return levels_below(dataset) if dataset.format != self.name else ()

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        if dataset is None:
            return Dataset(FORMAT, documents=group_documents(None))
        return dataset if dataset.format == self.name else shown_as_zarr2(dataset, is_level=around.level_of is not None)


ZARR2 = Zarr2()
