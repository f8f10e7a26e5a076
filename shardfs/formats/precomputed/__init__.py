"""Neuroglancer precomputed: the format of volumes, meshes, skeletons and annotations, and the layout `precomputed`.

https://github.com/google/neuroglancer/tree/master/src/datasource/precomputed (volume.md, meshes.md, skeletons.md,
annotations.md, sharded.md)
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardfs.formats.documents import parse_json
from shardfs.formats.format import Format, View
from shardfs.formats.layouts import levels_below
from shardfs.formats.precomputed.edits import InfoEdits
from shardfs.formats.precomputed.ids import meshes, open_annotations, open_whole, skeletons
from shardfs.formats.precomputed.parts import FORM, INFO
from shardfs.formats.precomputed.view import shown_as_volumes
from shardfs.formats.precomputed.volumes import open_volume
from shardfs.model.dataset import Dataset
from shardfs.model.errors import CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from shardfs.model.dataset import Surroundings

_SEGMENT_PROPERTIES = re.compile(rb'\s*\{\s*"@type"\s*:\s*"neuroglancer_segment_properties"')
"""The beginning of an info document of segment properties. It has no shards, and may be too large to parse."""

_BOX = r"-?[0-9]{1,19}--?[0-9]{1,19}"
_ID = r"[0-9]{1,20}(?:\.index|(?:_[0-9]{1,20})*)"
_CHUNK = re.compile(rf"(?:.*/)?(?:{_BOX}_{_BOX}_{_BOX}|{_ID})(?:\.(?:gz|br|zstd|xz|bz2))?", re.DOTALL)
"""The names of chunks: boxes of voxels, ids, mesh manifests and cells of annotations.

cloud-volume adds the suffixes of compressed files.
"""

_OF_IDS: Mapping[str, tuple[str, Callable[[str, dict[str, Any]], Dataset]]] = {
    "neuroglancer_multilod_draco": ("meshes", partial(open_whole, meshes)),
    "neuroglancer_skeletons": ("skeletons", partial(open_whole, skeletons)),
    "neuroglancer_annotations_v1": ("annotations", open_annotations),
    "neuroglancer_legacy_mesh": ("meshes", lambda _path, _info: Dataset("precomputed", closed=True, format_names=FORM)),
}
"""What a directory holds whose chunks have ids, by the `@type` of the info document, and how it is opened."""


class Precomputed(Format, View):
    """The format and the layout `precomputed`."""

    name = "precomputed"
    renames = True
    documents = ("info",)
    dataset_formats = ("precomputed",)
    chunk_names = _CHUNK

    def __init__(self) -> None:
        self.edits = InfoEdits(lambda raw: self.open("", {INFO: raw}))

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get("info")
        if raw is None or not raw.lstrip().startswith(b"{") or _SEGMENT_PROPERTIES.match(raw):
            return None  # other programs have files named "info", too
        info = parse_json(path, "info", raw)
        kind = info.get("@type")
        if kind == "neuroglancer_multiscale_volume" or (kind is None and isinstance(info.get("scales"), list)):
            return open_volume(path, info)
        elements, open_ids = _OF_IDS.get(str(kind), ("", None))
        return None if open_ids is None else replace(open_ids(path, info), indescribable=f"{elements} are no array")

    def has_objects(self, raw: bytes) -> bool:
        """Whether an info document describes meshes, skeletons or annotations, which are no arrays."""
        with suppress(CorruptShardError):
            return str(parse_json("", INFO, raw).get("@type")) in _OF_IDS
        return False

    def children(self, dataset: Dataset, names: Set[str]) -> Sequence[str]:
        return () if dataset.format == self.name else levels_below(dataset)

    def show(self, path: str, dataset: Dataset | None, around: Surroundings) -> Dataset:
        if dataset is None:
            return Dataset(self.name)
        return dataset if dataset.format == self.name else shown_as_volumes(dataset, around)


PRECOMPUTED = Precomputed()
