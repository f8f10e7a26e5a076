"""Documents of bcolz that are written through a mount: from those of bcolz 1.x back to those of superchunks."""

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
"""Of `meta/storage`: the other members are about what is yet to be written, and superchunks have no place for them."""


def edited(dataset: Dataset | None, stored: Mapping[str, bytes], name: str, new: bytes) -> Mapping[str, bytes]:
    """See `Format.edit`. `dataset` is what the source's documents describe."""
    shown = dataset.documents.get(name) if dataset is not None and dataset.collections else None
    if dataset is None or shown is None:
        return {name: new}
    doc, before = parse_written(name, new), json.loads(shown)
    try:
        if doc == before:
            return {}
        if name == ATTRS and ATTRIBUTES not in stored and ATTRS in stored:  # superchunks described as by bcolz 1.x
            return {ATTRS: new}
        if name == ATTRS:
            return {ATTRIBUTES: _attributes(stored, before, doc)}
        if len(dataset.collections) > 1:
            raise ValueError("a table keeps its rows")  # each column has a shape of its own for bcolz
        if name == STORAGE:
            for member in MATTERS:
                require_same(doc[member], before[member], member)
            return {}
        return _sizes(stored, before, doc)
    except UNFIT as e:
        raise ValueError(f"{name}: {reason(e)}") from e


def _attributes(stored: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> bytes:
    """The source's attributes with those values that changed; the others keep what the RFC has beside them."""
    found = parsed(stored, ATTRIBUTES) if ATTRIBUTES in stored else {}
    told: Mapping[str, Any] = found if isinstance(found, dict) else {}
    kept = {str(name): value for name, value in told.items()}
    return print_json({n: kept[n] if n in kept and n in before and before[n] == v else v for n, v in doc.items()})


def _sizes(stored: Mapping[str, bytes], before: Mapping[str, Any], doc: Mapping[str, Any]) -> Mapping[str, bytes]:
    """The source's sizes; of an array that is as long as before they stay what they are."""
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
            pass  # YAML has mappings in braces, too
    return {SIZES: print_json({**found, **new})}
