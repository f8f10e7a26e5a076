"""Kinds of names on a writable mount: the kind decides where the bytes of a file go."""

from __future__ import annotations

import re
from enum import Enum, auto


class NameKind(Enum):
    """The kind of a name; docs/durability.md, "Kinds of files", lists them for users."""

    __hash__ = object.__hash__  # that of Enum is a Python call for each look-up in a table

    CHUNK = auto()
    """A chunk in the grid of a sharded array, or an object's id. Written to the journal, then to its shard."""

    COMPRESSED = auto()
    """A chunk that a program compresses itself, named with a suffix of `COMPRESSIONS`. `close` makes it the chunk."""

    ORPHAN = auto()
    """A chunk name outside all known grids. Stays in the journal until a metadata document describes it."""

    SCRATCH = auto()
    """A tool's temporary file beside chunks or documents. Written to the journal only."""

    DOCUMENT = auto()
    """Metadata of sharded data. Translated, then written to the store."""

    PLAIN = auto()
    """Any other file. Written to the store under the same path."""

    FIXED = auto()
    """Any other file in a directory that the store has at another path. Cannot be created, changed or removed."""

    HIDDEN = auto()
    """A name of the sharded form, or of shardfs itself. Not listed, and cannot be created."""

    DIRECTORY = auto()
    """A directory of chunks that the store does not have, or has at another path."""


OWN_PREFIX = ".shardfs"
"""Prefix of the names of shardfs's own files in a source, such as locks and temporary files. Listings omit them."""

COMPRESSIONS = (".gz", ".br", ".zstd", ".xz", ".bz2")
"""Suffixes that cloud-files adds to the names of compressed chunks."""


def compression(name: str) -> str:
    """Return the suffix of a compression at the end of a name; "" without one."""
    return next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")


LOCK_ENDING = ".__lock"
"""Ending of tensorstore's lock file of an object, which it fills and renames to the name without the ending."""

_SCRATCH = re.compile(
    r".*\.partial|.*\.__lock|.*#\d+|\..+\.[A-Za-z0-9]{6}|\.~tmp~|\.rsync-partial|.*\.tmp|.*\.part|tmp.{8}|sed.{6}"
    r"|\..*\.sw.|.*~|\..*\.un~|\.goutputstream-.*",
    re.DOTALL,
)
"""Lock files, and temporary files that tools rename once they are complete: those of zarr-python, tensorstore,
object_store, rsync, rclone, sed, vim, Python's tempfile and GLib."""


def is_in(path: str, directory: str) -> bool:
    """Whether a path is `directory` or below it."""
    return path == directory or not directory or path.startswith(f"{directory}/")


def is_scratch(name: str) -> bool:
    """Whether the name looks like a tool's temporary or lock file."""
    return _SCRATCH.fullmatch(name) is not None
