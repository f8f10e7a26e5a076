"""The layout `n5`: shows arrays and images of other formats as N5 datasets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardfs.codecs.encoded_chunks import without_checks
from shardfs.codecs.transcode import memory_order
from shardfs.formats import n5_multiscales
from shardfs.formats.documents import print_strict
from shardfs.formats.layouts import PlacedArray, arrays_of, from_above, join, laid_out, shown, zero_fillers
from shardfs.formats.n5.codec_names import DOCUMENT, ITEM_SIZES, STRUCTURAL, compression_of
from shardfs.formats.zarr_metadata import name_of
from shardfs.model.arrays import BYTES, Array, ChunkEncoding, Codec
from shardfs.model.dataset import Problem
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import NestedNames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from shardfs.model.arrays import Multiscale
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset, Surroundings

VERSION = "2.0.0"
"""The N5 version of shown containers. They use no newer features, and older software refuses newer versions."""

KNOWN_VERSIONS = ("1.", "2.", "3.", "4.")
"""How the versions begin that programs write today."""


def shown_as_n5(path: str, dataset: Dataset, around: Surroundings) -> Dataset:
    """The dataset in this layout. Raise UnsupportedError, with the reason, if N5 cannot express it."""
    is_array, placed = arrays_of(dataset)
    arrays = [_ShownDataset.from_collection(c, at, shown_encoding) for c, at in placed]
    image = None if is_array else image_of(dataset, around.names)
    levels = _levels_of(image, arrays, around.below) if image is not None else []
    level_paths = {level.path for level in levels}
    members: dict[str, Mapping[str, Any]] = {}
    if not is_array:
        members[""] = _group_members(dataset, image if levels else None)
        arrays = [array for array in arrays if array.path not in level_paths]
    members |= {array.path: array.members() for array in arrays}
    for i, shown_array in enumerate(levels):
        name, further = f"s{i}", n5_multiscales.level_attributes(cast("Multiscale", image), i)
        level = replace(shown_array, path=name, further=further)
        members[name] = level.members()
        # A level below that keeps its name is shown from its own directory; only its document changes.
        if shown_array.path != name or any(shown_array.stored is c for c, _ in placed):
            arrays.append(level)
    moved = level_paths - members.keys()
    if not path:
        members[""] = {"n5": VERSION, **members[""]}
    documents = {join(at, DOCUMENT): print_strict(document) for at, document in members.items() if document}
    problems = [problem for array in arrays for problem in array.problems(path)]
    if not is_array:
        attributes = (dataset.attributes or {}).items()
        problems += [_hidden_attribute(path, name) for name, value in attributes if not _is_of_user(name, value)]
    collections = (array.collection() for array in arrays)
    return laid_out("n5", dataset, collections, documents, problems=problems, hidden=moved)


def _group_members(dataset: Dataset, image: Multiscale | None) -> dict[str, Any]:
    """The attributes of a group, with the image's N5 attributes and without members that would make it a dataset.

    OME-Zarr's description of a shown image is removed, because its paths are not s0, s1, ...
    """
    attributes = {n: value for n, value in (dataset.attributes or {}).items() if _is_of_user(n, value)}
    if image is None:
        return attributes
    attributes.pop("multiscales", None)
    if isinstance(inner := attributes.get("ome"), dict):
        attributes["ome"] = {name: value for name, value in inner.items() if name != "multiscales"}
    generated = n5_multiscales.group_attributes(image)
    return {**generated, **{name: value for name, value in attributes.items() if name not in generated}}


def _is_of_user(name: str, value: Any) -> bool:
    """Whether a group of N5 may have this attribute: the user's own, or the version that a program gave a container."""
    return name not in STRUCTURAL or (name == "n5" and isinstance(value, str) and value[:2] in KNOWN_VERSIONS)


def image_of(dataset: Dataset, names: Set[str]) -> Multiscale | None:
    """The image whose levels a group shows as s0, s1, ...: the first image, or None if N5 cannot express it so.

    `names` are all names in the directory of the group.
    """
    if dataset.closed or not dataset.multiscales or not n5_multiscales.can_be_written(dataset.multiscales[0]):
        return None
    image = dataset.multiscales[0]
    old = [level.path for level in image.levels]
    new = [f"s{i}" for i in range(len(old))]
    is_free = all(a == b or b not in names | set(old) for a, b in zip(old, new, strict=True))
    is_here = len(set(old)) == len(old) and not any("/" in name or name in ("", ".", "..") for name in old)
    return image if is_free and is_here else None


def _levels_of(image: Multiscale, arrays: Sequence[_ShownDataset], below: Mapping[str, Dataset]) -> list[_ShownDataset]:
    """The levels of an image under their present names; none if N5 cannot show every level."""
    by_path, out = {array.path: array for array in arrays}, []
    for level in image.levels:
        shown_array = by_path.get(level.path) or _level_below(level.path, below.get(level.path))
        if shown_array is None or len(shown_array.array.shape) != len(image.axes):
            return []
        out.append(shown_array)
    return out


def _level_below(path: str, dataset: Dataset | None) -> _ShownDataset | None:
    collections = () if dataset is None or dataset.problems else dataset.all_collections
    if len(collections) != 1:
        return None
    try:
        return _ShownDataset.from_collection(from_above(path, collections[0]), path, shown_encoding)
    except UnsupportedError:
        return None  # showing the level's own directory reports the reason


@dataclass(frozen=True)
class _ShownDataset(PlacedArray):
    """An array shown as an N5 dataset. `further` are attributes from the image that has the array as a level."""

    further: Mapping[str, Any] = field(default_factory=dict)

    def collection(self) -> Collection:
        array = self.array
        encoding = self.encoding
        names, axes = NestedNames(array.grid[::-1]), array.grid_axes[::-1]
        codecs = ("n5bytes", *(str(compression_of(c)["type"]) for c in encoding.codecs))
        return shown(self.stored, self.path, encoding, names, axes, codecs, *zero_fillers(array, encoding))

    @cached_property
    def own(self) -> Mapping[str, Any]:
        """The members of `attributes.json` that do not come from the user."""
        array = self.array
        around = self.encoding.codecs
        members: dict[str, Any] = {
            "dimensions": array.shape[::-1],
            "blockSize": array.chunk[::-1],
            "dataType": np.dtype(self.encoding.data_type).name,
            "compression": compression_of(around[0]) if around else {"type": "raw"},
        }
        if array.names and None not in array.names and len(set(array.names)) == len(array.names):
            members["axes"] = array.names[::-1]
        if array.offset is not None and any(array.offset):
            members["offset"] = array.offset[::-1]
        return {**members, **self.further}

    @cached_property
    def kept(self) -> Mapping[str, Any]:
        """The user's attributes that N5 can store beside its own members."""
        rank = len(self.array.shape)
        reserved = {*STRUCTURAL, *self.own}
        attributes = self.array.attributes.items()
        return {n: value for n, value in attributes if n not in reserved and n5_multiscales.is_accepted(n, value, rank)}

    def members(self) -> dict[str, Any]:
        """The members of `attributes.json`."""
        return {**self.own, **self.kept}

    def problems(self, path: str) -> Iterator[Problem]:
        """A problem for each user attribute that N5 cannot store; `path` is the path of the dataset."""
        for name, value in self.array.attributes.items():
            if name not in self.kept and value != self.own.get(name):
                yield _hidden_attribute(join(path, self.path), name)


def _hidden_attribute(path: str, attribute: str) -> Problem:
    return Problem(path, f"attribute {attribute!r:.80}: N5 has its own of this name", skipped=True)


def shown_encoding(array: Array) -> ChunkEncoding:
    """The encoding of N5 blocks with the fewest conversions. Raise UnsupportedError if N5 cannot store the array."""
    dtype, stored_encoding, order = np.dtype(array.data_type), array.encoding, tuple(range(len(array.shape)))
    name = "uint8" if dtype.kind == "b" else name_of(array.data_type)
    if name not in ITEM_SIZES:
        raise UnsupportedError(f"N5 has no data type {name}")
    if not array.shape:
        raise UnsupportedError("N5 has no arrays without axes")
    if len(array.chunk) >= 2**16 or max(array.chunk) >= 2**32:
        raise UnsupportedError(f"chunks of {array.chunk!r:.80} are too large for the header of an N5 block")
    data_type, around = np.dtype(name).newbyteorder(">").str, without_checks(stored_encoding.codecs)
    passes = (
        stored_encoding.serializer == BYTES
        and stored_encoding.data_type in (data_type, dtype.newbyteorder(">").str)
        and memory_order(stored_encoding.order, array.chunk) == memory_order(order, array.chunk)
        and (not around or (len(around) == 1 and _is_known(around[0])))
    )
    if passes:
        return ChunkEncoding(data_type, order, clipped=stored_encoding.clipped, codecs=around, frame="n5")
    return ChunkEncoding(data_type, order, clipped=True, frame="n5")


def _is_known(codec: Codec) -> bool:
    try:
        return bool(compression_of(codec))
    except ValueError:
        return False
