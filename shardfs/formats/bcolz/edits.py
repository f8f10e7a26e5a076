"""Translates documents of bcolz 1.x that clients write through a mount back to the documents of superchunks."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardfs.formats.bcolz.carrays import ATTRS, SIZES, STORAGE
from shardfs.formats.bcolz.stored import ATTRIBUTES
from shardfs.formats.bcolz.values import parsed
from shardfs.formats.documents import integers, naming, parse_written, print_json, require_same
from shardfs.formats.json_text import changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.create_rules import Rule
    from shardfs.model.dataset import Dataset

EDITABLE = (SIZES, STORAGE, ATTRS)

NEEDED = ("dtype", "chunklen")
"""The members of `meta/storage` on which stored chunks depend.

The others affect only new chunks, and superchunks cannot store them.
"""


def edited(dataset: Dataset | None, documents: Mapping[str, bytes], name: str, new: bytes) -> Mapping[str, bytes]:
    """The documents to store when a client writes `new`: see `Format.edit`.

    `dataset` is the dataset that the source's documents describe.
    """
    shown_doc = dataset.documents.get(name) if dataset is not None and dataset.collections else None
    if dataset is None or shown_doc is None:
        return {name: new}
    doc, before = parse_written(name, new), json.loads(shown_doc)
    if doc == before:
        return {}
    with naming(name):
        if name == ATTRS:
            as_in_1x = ATTRIBUTES not in documents and ATTRS in documents
            return {ATTRS: new} if as_in_1x else {ATTRIBUTES: _attributes(documents, before, doc)}
        if len(dataset.collections) > 1:  # bcolz stores a shape for each column
            raise ValueError("a table keeps its rows; only arrays of one column can change their length")
        if name == SIZES:
            return _sizes(documents, before, doc)
        for member in NEEDED:
            require_same(doc[member], before[member], member)
        return {}


def sharded(name: str, new: bytes, rule: Rule) -> Mapping[str, bytes] | None:
    """The document of an array in superchunks: see `Format.shard`. The rule must have `chunks_per_shard`."""
    if name != STORAGE:
        return None
    doc = parse_written(name, new)
    if "superchunksize" in doc:
        raise ValueError("the array has superchunks already")
    return {name: print_json({**doc, "superchunksize": rule.per_shard((0,), 1)[0]})}


def _attributes(documents: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> bytes:
    """The source's attributes with the changed values. Unchanged values keep their types, which the RFC stores, too."""
    source = parsed(documents, ATTRIBUTES) if ATTRIBUTES in documents else {}
    typed = {str(name): value for name, value in source.items()} if isinstance(source, dict) else {}
    return print_json({n: typed[n] if n in typed and n in before and before[n] == v else v for n, v in doc.items()})


def _sizes(documents: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> Mapping[str, bytes]:
    """The document of sizes to store; none if the array keeps its length."""
    shape, old = integers(doc["shape"], "shape", 0), integers(before["shape"], "shape", 0)
    require_same(shape[1:], old[1:], "the shape of a row")
    if shape == old:
        return {}
    new = {name: doc[name] for name in ("shape", "nbytes", "cbytes") if name in doc}
    raw = documents[SIZES]
    if raw.lstrip().startswith(b"{"):
        with suppress(ValueError):  # a document in braces may also be YAML
            return {SIZES: changed(raw, {(name,): value for name, value in new.items()})}
    return {SIZES: print_json({**parsed(documents, SIZES), **new})}
