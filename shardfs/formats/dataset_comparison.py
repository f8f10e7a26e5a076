"""Comparisons of datasets: what their documents mean, whatever their form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardfs.formats import ome
from shardfs.formats.documents import members, print_strict
from shardfs.formats.zarr_metadata import CODEC_PARAMETERS, is_same_element
from shardfs.model.arrays import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.arrays import Array
    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset


def meaning(dataset: Dataset) -> Any:
    """What the documents of a dataset say, in a form that is equal for equal meanings."""
    arrays = [(c.path, c.layers[0].format.key(0), c.array and _plain(c.array)) for c in dataset.all_collections]
    attributes = [*(array.attributes for array in described_arrays(dataset)), ome.as_05(dataset.attributes or {})]
    texts = [json.dumps(members(print_strict(values)), sort_keys=True) for values in attributes]
    return arrays, texts, dataset.multiscales, dataset.problems


def described_arrays(dataset: Dataset | None) -> list[Array]:
    """The arrays of a dataset that have a description."""
    collections = () if dataset is None else dataset.all_collections
    return [c.array for c in collections if c.array is not None]


def keeps_arrays(old: Dataset, new: Dataset, differing: Sequence[str]) -> bool:
    """Whether the arrays in `old` are in `new`, apart from their shapes, names of axes and attributes."""
    new_collections = {c.path: c for c in new.all_collections}
    for old_collection in old.all_collections:
        new_collection = new_collections.get(old_collection.path)
        if new_collection is None or _chunk_names(old_collection) != _chunk_names(new_collection):
            return False
        a = old_collection.array
        b = new_collection.array
        if a is None or b is None:
            return False
        is_filled_alike = a.fill_value == b.fill_value or is_same_element(a.fill_value, b.fill_value, a.data_type)
        if not is_filled_alike or _plain(a) != replace(
            _plain(b), shape=a.shape, names=a.names, fill_value=a.fill_value
        ):
            return False
        # Members outside of the attributes can only change the fill value's attribute.
        members_of_user = {"attributes", *a.attributes, *b.attributes}
        if a.attributes != b.attributes and a.names == b.names and members_of_user.isdisjoint(differing):
            return False
    return True


def keeps_images(old: Dataset, new: Dataset) -> bool:
    """Whether `new` has the images of `old`, in order, each with the same axes and the same levels or more; or none.

    Kinds of images (segmentation or not) count only in datasets without attributes. Further images in `new` do not
    matter.
    """
    pairs = zip(old.multiscales, new.multiscales or old.multiscales, strict=False)
    return len(new.multiscales) not in range(1, len(old.multiscales)) and all(
        a.axes == b.axes and {*a.levels} <= {*b.levels} and (old.attributes or a.segmentation == b.segmentation)
        for a, b in pairs
    )


def _chunk_names(collection: Collection) -> str:
    """The form of the names of chunks."""
    return re.sub("[0-9]+", "", collection.layers[0].format.key(0))


def _plain(array: Array) -> Array:
    """The array without attributes, and with all parameters of its codecs."""
    codecs = tuple(
        Codec(c.name, {**CODEC_PARAMETERS.get(c.name, {}), **c.configuration}) for c in array.encoding.codecs
    )
    return replace(array, attributes={}, encoding=replace(array.encoding, codecs=codecs))


def chunks_of(collection: Collection) -> Any:
    """All on which stored chunks depend: their names, shape and encoding, without parameters that only encoders use."""
    array, names = collection.array, _chunk_names(collection)
    if array is None:
        return names
    encoding = array.encoding
    unused = {name: CODEC_PARAMETERS.get(name, {}) for name, _ in encoding.codecs}
    codecs = [(name, {n: v for n, v in c.items() if n not in unused[name]}) for name, c in encoding.codecs]
    return names, array.chunk, array.data_type, codecs, replace(encoding, codecs=())
