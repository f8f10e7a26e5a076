"""Pages of a directory listing on a writable mount: changed entries, and the filtered entries of the source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.kinds import OWN, is_scratch
from shardfs.model.listing import REST, Batch

if TYPE_CHECKING:
    from shardfs.model.attributes import Attributes
    from shardfs.write.files import WritableFile


def batch_of(entries: list[tuple[bytes, Attributes]], cookie: int) -> Batch:
    """Return the entries behind the position `cookie` as one page."""
    return Batch.of_entries(entries[cookie:], cookie)


def asked_singly(batch: Batch, numbers: set[int]) -> Batch:
    """Return the batch without the sizes of these inode numbers.

    A listing cannot carry a mode or a time that was set on the mount. Size -1 makes the caller fetch the attributes of
    the entry.
    """
    found = np.isin(batch.numbers, np.array([*numbers], np.uint64))
    return batch._replace(sizes=np.where(found, -1, batch.sizes)) if found.any() else batch


def without(batch: Batch, names: dict[bytes, WritableFile | None], *, has_scratch: bool, local: bool) -> Batch:
    """Return the batch without hidden entries.

    Hidden entries are the given names, the names of shardfs's own files and, with `has_scratch`, temporary files of
    other programs in the source. In a remote source, directories with such names are hidden as well.
    """
    listed = batch.names.tolist()
    keep = np.array([n not in names and not n.startswith(OWN.encode()) for n in listed], np.bool_)
    if has_scratch:
        kept = batch.directories if local else np.zeros(len(listed), np.bool_)
        others = np.flatnonzero((batch.cookies >= np.uint64(REST)) & ~kept).tolist()
        for i in others:
            keep[i] &= not is_scratch(os.fsdecode(listed[i]))
    return batch if keep.all() else batch.only(keep)
