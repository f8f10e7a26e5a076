"""Translates documents of bcolz 1.x that clients write through a mount back to the documents of superchunks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardfs.formats.bcolz.carrays import ATTRS, SIZES, STORAGE
from shardfs.formats.bcolz.stored import ATTRIBUTES
from shardfs.formats.bcolz.values import parsed
from shardfs.formats.documents import UNFIT, integers, parse_written, print_json, reason, require_same
from shardfs.formats.json_text import changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.model.dataset import Dataset

EDITABLE = (SIZES, STORAGE, ATTRS)

MATTERS = ("dtype", "chunklen")
"""The members of `meta/storage` on which stored chunks depend.

The others affect only new chunks, and superchunks cannot store them.
"""


def edited(dataset: Dataset | None, stored: Mapping[str, bytes], name: str, new: bytes) -> Mapping[str, bytes]:
    """The documents to store when a client writes `new`: see `Format.edit`.

    `dataset` is the dataset that the source's documents describe.
    """
    shown = dataset.documents.get(name) if dataset is not None and dataset.collections else None
    if dataset is None or shown is None:
        return {name: new}
    doc, before = parse_written(name, new), json.loads(shown)
    try:
        if doc == before:
            return {}
        if (
            name == ATTRS and ATTRIBUTES not in stored and ATTRS in stored
        ):  # superchunks with attributes as in bcolz 1.x
            return {ATTRS: new}
        if name == ATTRS:
            return {ATTRIBUTES: _attributes(stored, before, doc)}
        if len(dataset.collections) > 1:
            raise ValueError("a table keeps its rows")  # bcolz stores a shape for each column
        if name == STORAGE:
            for member in MATTERS:
                require_same(doc[member], before[member], member)
            return {}
        return _sizes(stored, before, doc)
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e


def _attributes(stored: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> bytes:
    """The source's attributes with the changed values. Unchanged values keep their types, which the RFC stores, too."""
    found = parsed(stored, ATTRIBUTES) if ATTRIBUTES in stored else {}
    told: Mapping[str, Any] = found if isinstance(found, dict) else {}
    kept = {str(name): value for name, value in told.items()}
    return print_json({n: kept[n] if n in kept and n in before and before[n] == v else v for n, v in doc.items()})


def _sizes(stored: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> Mapping[str, bytes]:
    """The document of sizes to store; none if the array keeps its length."""
    shape, was = integers(doc["shape"], "shape", 0), integers(before["shape"], "shape", 0)
    require_same(shape[1:], was[1:], "the shape of a row")
    if shape == was:
        return {}
    new = {name: doc[name] for name in ("shape", "nbytes", "cbytes") if name in doc}
    raw, found = stored[SIZES], parsed(stored, SIZES)
    if raw.lstrip().startswith(b"{"):
        try:
            return {SIZES: changed(raw, {(name,): value for name, value in new.items()})}
        except ValueError:
            pass  # a document in braces may also be YAML
    return {SIZES: print_json({**found, **new})}
