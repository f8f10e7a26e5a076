"""What a name on a writable mount stands for, and so where its bytes go."""

from __future__ import annotations

import re
from enum import Enum, auto


class Kind(Enum):
    """See docs/durability.md, "Kinds of files"."""

    CHUNK = auto()
    """In the grid of a sharded array, or an id: the journal, then its shard."""

    ORPHAN = auto()
    """Called as a chunk is, but outside the grid, or nothing describes it yet: the journal, until something does."""

    SCRATCH = auto()
    """A temporary name of a tool, beside chunks or documents: the journal only."""

    DOCUMENT = auto()
    """Describes sharded data: translated, then written to the store."""

    PLAIN = auto()
    """Anything else: the store, under the same path."""

    HIDDEN = auto()
    """Belongs to the sharded form, or to shardfs: neither shown nor made."""

    DIRECTORY = auto()
    """A virtual directory of chunks."""


OWN = ".shardfs"
"""What names of shardfs's own begin with."""

COMPRESSIONS = (".gz", ".br", ".zstd", ".xz", ".bz2")
"""Suffixes that cloud-files adds to the names of the chunks that it compresses."""

_SCRATCH = re.compile(
    r".*\.partial|.*\.__lock|.*#\d+|\..+\.[A-Za-z0-9]{6}|\.~tmp~|\.rsync-partial|.*\.tmp|.*\.part|tmp.{8}|sed.{6}"
    r"|\..*\.sw.|.*~|\..*\.un~|\.goutputstream-.*",
    re.DOTALL,
)
"""How tools call what they rename when it is complete, and their locks: zarr-python, tensorstore, object_store, rsync,
rclone, sed, vim, Python's tempfile, GLib."""


LOCK = b".__lock"
"""What tensorstore adds to a name for the file that it locks, fills, and renames to that name."""


def is_scratch(name: str) -> bool:
    """Whether tools call their temporary files so."""
    return _SCRATCH.fullmatch(name) is not None
