"""N5: the format, which shows sharded datasets with one file for each block, and the layout `n5`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardfs.formats import n5_multiscales
from shardfs.formats.documents import parse_json, print_strict
from shardfs.formats.format import NUMBER, Format, View
from shardfs.formats.n5.codec_names import DOCUMENT, FORM
from shardfs.formats.n5.edits import DATASETS
from shardfs.formats.n5.stored import is_dataset, open_dataset
from shardfs.formats.n5.view import VERSION, image_of, shown_as_n5
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from shardfs.model.dataset import Surroundings


class N5Format(Format, View):
    """The format and the layout `n5`."""

    name = "n5"
    renames = True
    documents = (DOCUMENT,)
    edits = DATASETS
    dataset_formats = ("n5",)
    chunk_names = re.compile(rf"{NUMBER}(?:/{NUMBER})*")

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
        attributes = {name: value for name, value in doc.items() if name != "n5" or path}
        return Dataset("n5", format_names=FORM, attributes=attributes, levels=n5_multiscales.LevelsBelow(attributes))

    def children(self, dataset: Dataset, names: Set[str]) -> Sequence[str]:
        image = None if dataset.format == self.name else image_of(dataset, names)
        paths = {c.path for c in dataset.all_collections}
        return [level.path for level in image.levels if level.path not in paths] if image is not None else ()

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        if dataset is None:
            return Dataset("n5", documents={} if path else {DOCUMENT: print_strict({"n5": VERSION})})
        if dataset.format == self.name:
            return replace(dataset, collections=dataset.collections or dataset.unsharded)
        return shown_as_n5(path, dataset, around)


N5 = N5Format()
