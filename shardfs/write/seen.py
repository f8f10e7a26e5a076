"""The versions of metadata documents that programs have read or written on the mount."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from shardfs.formats.json_text import differences
from shardfs.model.kinds import is_in

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 64 << 20
"""Maximum bytes of documents in memory. The least recently used documents are evicted first; a later write to an
evicted document counts as an edit of the version shown by the mount."""

MAX_VERSIONS = 4
"""Maximum number of versions kept of one document."""


class Seen:
    """Versions of each document that programs have read or written here, oldest first. Thread-safe.

    A document has several versions only if another program changed the document in the source in between. A later write
    may then be an edit of any of them (`nearest`).
    """

    def __init__(self) -> None:
        self._versions: OrderedDict[str, list[bytes | None]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, path: str, shown: bytes | None) -> None:
        """Record that a program has read `shown`, or (None) has found no document."""
        known = self._versions.get(path)
        if known is None or known[-1] != shown:
            kept = [] if shown is None else [v for v in known or () if v is not None]
            self._keep(path, [*kept, shown])

    def versions(self, path: str) -> Sequence[bytes | None]:
        """Return the known versions, oldest first; empty if no program has read or written the document here."""
        return self._versions.get(path, ())

    def wrote(self, path: str, base: bytes | None, new: bytes) -> None:
        """Record that a program has replaced the version `base` with its own version `new`."""
        known = self._versions.get(path, [])
        self._keep(path, [*(v for v in known if v is not None and v != base), new])

    def forget(self, directory: str) -> None:
        """Forget all documents in a directory and below, after the directory was removed or renamed."""
        with self._lock:
            for path in [p for p in self._versions if is_in(p, directory)]:
                self._nbytes -= _size(self._versions.pop(path))

    def _keep(self, path: str, versions: Sequence[bytes | None]) -> None:
        with self._lock:
            self._nbytes -= _size(self._versions.pop(path, ()))
            self._versions[path] = list(versions[-MAX_VERSIONS:])
            self._nbytes += _size(self._versions[path])
            while self._nbytes > MAX_BYTES and len(self._versions) > 1:
                self._nbytes -= _size(self._versions.popitem(last=False)[1])


def _size(versions: Sequence[bytes | None]) -> int:
    return sum(100 + len(version or b"") for version in versions)


def nearest(versions: Sequence[bytes | None], new: bytes) -> bytes | None:
    """Return the version from which `new` was made: the one with the fewest differences, the newest of equals.

    If `new` equals any version exactly, return the newest version: the program wants to undo the later changes.
    """
    if len(versions) == 1:
        return versions[0]
    distances = [_distance(version or b"", new) for version in versions]
    least = min(distances)
    return versions[-1] if least == 0 else versions[max(i for i, d in enumerate(distances) if d == least)]


def _distance(old: bytes, new: bytes) -> int:
    """Return how many members differ; a huge number if one of the documents is not JSON."""
    try:
        return len(differences(json.loads(old), json.loads(new)))
    except (ValueError, RecursionError):
        return 1 << 30


def same_document(a: bytes | None, b: bytes | None) -> bool:
    """Return whether two documents have the same JSON values, whatever their formatting."""
    return a == b or (a is not None and b is not None and not _distance(a, b))
