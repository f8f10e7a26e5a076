"""Translates documents that clients write to those of sharded arrays, for formats with one document per array."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.formats.create_rules import Rule, Sharding
from shardfs.formats.documents import UNFIT, intelligible, naming, parse_written, require_same, shown_document
from shardfs.formats.json_text import Path, changed
from shardfs.model.grid import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords

Document: TypeAlias = "dict[str, Any]"
Changes: TypeAlias = "dict[Path, Any]"
"""New values by their paths in a document, as `json_text.changed` takes them."""


@dataclass(frozen=True)
class ArrayEdits:
    """Edits of the documents of one format, each of which describes one array or a group.

    The functions raise one of `UNFIT`, with the reason, for invalid documents.

    Args:
        format: the name of the format.
        members: the members of a document that describe its shards.
        is_array: whether a document describes an array.
        unshard: the collection of a sharded array, and the document that the mount shows; None for other arrays.
        restore: takes a stored document, its shown form, and the form that a client writes. Returns the changes that
            make the written form describe the stored shards. Raises if it contradicts the stored chunks.
        sizes: the shape of an unsharded array, its chunk shape, and the bytes of an element.
        shard: takes the document of an unsharded array, the chunks per shard, the text parameters of a rule, and a
            document whose other parameters the shards get. Returns the changes that shard the array.
        last_is_fastest: the axis order of shapes.
    """

    format: str
    members: tuple[str, ...]
    is_array: Callable[[Document], bool]
    unshard: Callable[[Document], tuple[Collection, Document] | None]
    restore: Callable[[Document, Document, Document], Changes]
    sizes: Callable[[Document], tuple[Coords, Coords, int]]
    shard: Callable[[Document, Coords, Mapping[str, str], Document | None], Changes]
    last_is_fastest: bool = True

    def edited(self, name: str, raw: bytes | None, new: bytes, rule: Rule | None = None) -> bytes:
        """The document to store for the stored one `raw` when a client writes `new`: see `Format.edit`.

        Groups are stored unchanged.
        """
        source = self._array(name, raw)
        shown_doc = self._shown(source)
        if source is not None and shown_doc is not None and raw is not None:
            doc = parse_written(name, new)
            with naming(name):
                return raw if doc == shown_doc else self._restored(source, shown_doc, doc, new)
        if source is None and (created := self._array(name, new)) is not None:
            self._refuse_shards(name, created)
            return new if rule is None else self._sharded(name, created, new, rule)
        return new

    def sharding(self, documents: Mapping[str, bytes]) -> Sharding | None:
        """See `Format.sharding`."""
        sharded = {name: raw for name, raw in documents.items() if self._shown(self._array(name, raw)) is not None}
        return Sharding(self.format, sharded) if sharded else None

    def sharded(self, name: str, new: bytes, like: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The document of a new array with shards: see `Format.shard`.

        An array equal to the deleted array of `like` gets its document verbatim. A different array gets as many
        chunks per shard.
        """
        doc = self._array(name, new)
        template = like if isinstance(like, Rule) else like.documents.get(name)
        if doc is None or template is None:
            return None
        self._refuse_shards(name, doc)
        if isinstance(template, bytes):
            with suppress(ValueError):  # a different array
                return {name: self.edited(name, template, new)}
        return {name: self._sharded(name, doc, new, template)}

    def with_copies(self, new: bytes, copies: Iterable[tuple[Path, Document, Any]]) -> bytes:
        """The document `new` of a group, with copies of array documents in it as their arrays are stored.

        Args:
            new: the document that a client writes.
            copies: the path of each copy in it, the copy, and the stored document of its array.
        """
        changes: Changes = {}
        for path, copy, source in copies:
            changes |= {(*path, *below): value for below, value in self._restored_copy(source, copy).items()}
        return changed(new, changes)

    def _array(self, name: str, raw: bytes | None) -> Document | None:
        """The parsed document of an array; None for anything else."""
        doc = intelligible(name, raw)
        return doc if doc is not None and self.is_array(doc) else None

    def _shown(self, doc: Document | None) -> Document | None:
        """The document that the mount shows for a sharded array; None for one that it shows unchanged."""
        return None if doc is None else shown_document(self.unshard, doc)

    def _refuse_shards(self, name: str, doc: Document) -> None:
        """Raise ValueError if a new array has shards, because its writer would then write shards instead of chunks."""
        if self._shown(doc) is not None:
            raise ValueError(
                f"{name}: the document describes shards ({' or '.join(self.members)}), but clients write chunks; "
                "create the array without shards (the mount option --create shards it in the source)"
            )

    def _restored(self, source: Document, shown_doc: Document, doc: Document, new: bytes) -> bytes:
        if not self.is_array(doc):
            raise ValueError(
                "a group cannot take the place of an array whose chunks are stored; remove the array first"
            )
        unsharded = self.unshard(doc)  # not None if the client writes a copy of the stored document
        changes = self.restore(source, shown_doc, doc if unsharded is None else unsharded[1])
        if unsharded is None:
            return self._changed(new, changes)
        for member in self.members:
            require_same(doc.get(member), source.get(member), member)
        return new

    def _restored_copy(self, source: Any, copy: Document) -> Changes:
        """The changes to the copy of an array's document. An outdated copy is replaced by the stored document."""
        try:
            unsharded = (
                self.unshard(source) if source is not None and source != copy and self.is_array(source) else None
            )
            return {} if unsharded is None else self.restore(source, unsharded[1], copy)
        except UNFIT:
            return {(): source}

    def _sharded(self, name: str, doc: Document, new: bytes, like: Rule | bytes) -> bytes:
        """The document of the array, with shards by a rule, or as in another document."""
        with naming(name):
            shape, chunk, item_size = self.sizes(doc)
            if isinstance(like, Rule):
                grid = tuple(ceil_div(n, c) for n, c in zip(shape, chunk, strict=True))
                per_shard = like.per_shard(grid, math.prod(chunk) * item_size, last_is_fastest=self.last_is_fastest)
                return self._changed(new, self.shard(doc, per_shard, like.words, None))
            before = parse_written(name, like)
            unsharded = self.unshard(before)
            shard = None if unsharded is None else unsharded[0].facts.shard_shape
            if unsharded is None or shard is None:
                raise ValueError("the deleted array had no shards of equal size to repeat; a rule of --create can help")
            require_same(len(shape), len(self.sizes(unsharded[1])[0]), "the number of axes")
            per_shard = tuple(s // c for s, c in zip(shard, unsharded[0].facts.chunk_shape, strict=True))
            return self._changed(new, self.shard(doc, per_shard, {}, before))

    def _changed(self, new: bytes, changes: Changes) -> bytes:
        edited = changed(new, changes)
        if self.unshard(json.loads(edited)) is None:
            raise ValueError(f"this array cannot be sharded: {' or '.join(self.members)} cannot describe its shards")
        return edited


def index_parameters(codecs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters of the shard index in the outermost `sharding_indexed` codec."""
    configuration = next(c for c in codecs if c["name"] == "sharding_indexed")["configuration"]
    return {name: configuration[name] for name in ("index_codecs", "index_location") if name in configuration}
