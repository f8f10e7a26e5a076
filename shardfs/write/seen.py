"""The versions of documents on which programs base what they write."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from shardfs.formats.json_text import alike, differences

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 64 << 20
"""Documents kept in memory. The ones used least recently go first; their next writer is taken to know what is shown."""

MAX_VERSIONS = 4
"""Of one document."""


class Seen:
    """For each document, the versions that programs have read or written here, oldest first. Thread-safe.

    Several versions of a document are kept only if another program changed it in the source in between. A writer then
    may have either in mind (`nearest`).
    """

    def __init__(self) -> None:
        self._versions: OrderedDict[str, list[bytes | None]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, path: str, shown: bytes | None) -> None:
        """A program has read the document, or (None) has seen that there is none."""
        known = self._versions.get(path)
        if known is None or known[-1] != shown:
            kept = [] if shown is None else [v for v in known or () if v is not None]
            self._keep(path, [*kept, shown])

    def versions(self, path: str) -> Sequence[bytes | None]:
        """Those of a document; none if no program has read or written it here."""
        return self._versions.get(path, ())

    def wrote(self, path: str, base: bytes | None, new: bytes) -> None:
        """The program that had `base` in mind knows its own document from now on."""
        known = self._versions.get(path, [])
        self._keep(path, [*(v for v in known if v is not None and v != base), new])

    def forget(self, directory: str) -> None:
        """The documents in a directory and below are others from now on."""
        with self._lock:
            for path in [p for p in self._versions if not directory or p.startswith(f"{directory}/")]:
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
    """The version that `new` is an edit of.

    A program that writes an old version again, exactly, has the newest in mind: it takes the changes back.
    """
    if len(versions) == 1:
        return versions[0]
    distances = [_distance(version or b"", new) for version in versions]
    least = min(distances)
    return versions[-1] if least == 0 else versions[max(i for i, d in enumerate(distances) if d == least)]


def _distance(old: bytes, new: bytes) -> int:
    try:
        return len(differences(json.loads(old), json.loads(new)))
    except (ValueError, RecursionError):
        return 1 << 30


def same_document(a: bytes | None, b: bytes | None) -> bool:
    """Whether two documents say the same, whatever they look like."""
    if a == b or a is None or b is None:
        return a == b
    try:
        return alike(json.loads(a), json.loads(b))
    except (ValueError, RecursionError):
        return False
