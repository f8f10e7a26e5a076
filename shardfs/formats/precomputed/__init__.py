"""Neuroglancer precomputed: the format of volumes, meshes, skeletons and annotations, and the layout `precomputed`.

https://github.com/google/neuroglancer/tree/master/src/datasource/precomputed (volume.md, meshes.md, skeletons.md,
annotations.md, sharded.md)
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardfs.formats.create_rules import Rule, Sharding
from shardfs.formats.documents import parse_json
from shardfs.formats.format import OfDocuments, Pairing, System
from shardfs.formats.precomputed import edits
from shardfs.formats.precomputed.ids import meshes, open_annotations, open_whole, skeletons
from shardfs.formats.precomputed.parts import FORM, INFO
from shardfs.formats.precomputed.view import children_of, shown_as_volumes
from shardfs.formats.precomputed.volumes import open_volume
from shardfs.model.dataset import Dataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SEGMENT_PROPERTIES = re.compile(rb'\s*\{\s*"@type"\s*:\s*"neuroglancer_segment_properties"')
"""The beginning of an info document of segment properties. It has no shards, and may be too large to parse."""

_BOX = r"-?[0-9]{1,19}--?[0-9]{1,19}"
_ID = r"[0-9]{1,20}(?:\.index|(?:_[0-9]{1,20})*)"
_CHUNK = re.compile(rf"(?:{_BOX}_{_BOX}_{_BOX}|{_ID})(?:\.(?:gz|br|zstd|xz|bz2))?")
"""The names of chunks: boxes of voxels, ids, mesh manifests and cells of annotations.

cloud-volume adds the suffixes of compressed files.
"""


class Precomputed(OfDocuments):
    """The format and the layout `precomputed`."""

    name = "precomputed"
    renames = True
    pairings = (
        Pairing(
            "zarr3",
            "raw little-endian ones pass, cropped where they end with the array; else decoded",
            "tensorstore, cloud-volume, Neuroglancer",
        ),
        Pairing("zarr3-draft", "as Zarr v3's", "tensorstore, cloud-volume"),
        Pairing("precomputed", "the native layout", "see docs/formats.md"),
        Pairing("n5", "raw ones of one byte pass; else turned or decoded", "tensorstore, cloud-volume"),
        Pairing("bcolz", "decoded", "tensorstore, cloud-volume"),
        Pairing("bloscpack", "decoded, if they are rows of an array", "tensorstore, cloud-volume"),
    )
    documents = ("info",)
    systems = (
        System(
            "precomputed",
            "Neuroglancer volumes",
            "`info` with `scales`",
            "the volume: `0-64_0-64_0-16`",
            "tensorstore, cloud-volume",
            "tensorstore, cloud-volume",
        ),
        System(
            "precomputed",
            "Neuroglancer multi-resolution meshes",
            "`info`, `neuroglancer_multilod_draco`",
            "`ID.index` and `ID`",
            "igneous with cloud-volume",
            "cloud-volume",
        ),
        System(
            "precomputed",
            "Neuroglancer skeletons",
            "`info`, `neuroglancer_skeletons`",
            "`ID`",
            "igneous with cloud-volume; tensorstore (shards)",
            "cloud-volume, igneous",
        ),
        System(
            "precomputed",
            "Neuroglancer annotations",
            "`info`, `neuroglancer_annotations_v1`",
            "`ID`, and cells as `1_2_3`",
            "neuroglancer with tensorstore (shards)",
            "neuroglancer",
        ),
    )

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        raw = documents.get("info")
        if raw is None or not raw.lstrip().startswith(b"{") or _SEGMENT_PROPERTIES.match(raw):
            return None  # other programs have files named "info", too
        info = parse_json(path, "info", raw)
        match info.get("@type"):
            case "neuroglancer_multiscale_volume":
                return open_volume(path, info)
            case "neuroglancer_multilod_draco":
                return replace(open_whole(path, info, meshes), indescribable="meshes are no array")
            case "neuroglancer_skeletons":
                return replace(open_whole(path, info, skeletons), indescribable="skeletons are no array")
            case "neuroglancer_annotations_v1":
                return replace(open_annotations(path, info), indescribable="annotations are no array")
            case "neuroglancer_legacy_mesh":
                return Dataset("precomputed", closed=True, format_names=FORM, indescribable="meshes are no array")
            case None if isinstance(info.get("scales"), list):
                return open_volume(path, info)
        return None

    def _open_info(self, raw: bytes) -> Dataset | None:
        return self.open("", {INFO: raw})

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        return {INFO: edits.edited(self._open_info, stored.get(INFO), new, rule)}

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        return Sharding(self.name, stored) if edits.is_sharded(self._open_info, stored.get(INFO)) else None

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        if isinstance(sharding, Rule):
            made = edits.sharded_by_rule(self._open_info, new, sharding)
        else:
            made = edits.sharded_as_before(self._open_info, new, sharding.documents[INFO])
        return None if made is None else {INFO: made}

    def chunk_like(self, name: str) -> bool:
        return _CHUNK.fullmatch(name.rpartition("/")[2]) is not None

    def children(self, dataset: Dataset) -> Sequence[str]:
        return () if dataset.format == self.name else children_of(dataset)

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        if dataset is None:
            return Dataset(self.name)
        return dataset if dataset.format == self.name else shown_as_volumes(dataset, children)


PRECOMPUTED = Precomputed()
