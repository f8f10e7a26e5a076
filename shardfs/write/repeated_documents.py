"""Documents of groups that repeat those of arrays below them, such as consolidated metadata."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.blobs import whole
from shardfs.model.changes import Change
from shardfs.write.files import join

if TYPE_CHECKING:
    from shardfs.model.blobs import Blob, Plan
    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree
    from shardfs.write.name_kind import Document


def update_repetitions(
    base: Tree, writer: Writer, document: Document, made: bytes | None, *, through_layout: bool
) -> set[str]:
    """Update documents of parent groups that repeat this document. Return the directories of those changed.

    Such a group may have repeated the document before the array was sharded. Programs that know only a layout never
    write these groups' documents, so that copies of any document are updated, added, or (None) removed for them.
    """
    changed = set()
    above = document.directory
    while above:
        above = above.rpartition("/")[0]
        repetition = _Repetition(document, made, above, through_layout)
        raw = base.stored_documents(above).get(document.name)
        with suppress(ValueError):  # the document above is invalid, so there is nothing to update
            if raw is not None and repetition.of(raw) != raw:
                writer.update(join(above, document.name), repetition)
                changed.add(above)
    return changed


@dataclass
class _Repetition(Change):
    """Update the document of the group `above`, which repeats another document."""

    document: Document
    made: bytes | None
    above: str
    through_layout: bool

    def of(self, raw: bytes) -> bytes:
        """Return the group's document, whose bytes are `raw`, with the new copy."""
        form, directory, name = self.document
        below = join(directory.removeprefix(self.above).lstrip("/"), name)
        if self.through_layout:
            return form.with_copy(raw, below, self.made)
        if self.made is None or below not in form.references(self.above, name, raw):
            return raw
        return form.edit(self.above, {name: raw, below: self.made}, name, raw)[name]

    def plan(self, old: Blob | None) -> Plan | None:
        return None if old is None else [self.of(whole(old))]
