"""The versions of metadata documents that programs have read or written on the mount."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.json_text import alike
from shardfs.model.bounded_json import load_json
from shardfs.model.kinds import is_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.formats.json_text import Path

MAX_BYTES = 64 << 20
"""Maximum bytes of documents in memory. The least recently used documents are evicted first; the version of an evicted
document that the mount shows counts as read."""


class OutsideChange(NamedTuple):
    """Another program has changed a value in the source: its path, and the JSON texts before and after (None: none)."""

    at: Path
    before: str | None
    after: str | None

    def is_back(self, value: str | None) -> bool:
        """Return whether a value takes the change back, as a whole or (a number) in part."""
        if value == self.before:
            return True
        with suppress(TypeError, ValueError):  # no numbers
            number, before, after = (float(text or "") for text in (value, self.before, self.after))
            return before <= number < after or after < number <= before
        return False


class _Document(NamedTuple):
    """What programs on the mount know of one document.

    `shown` is the version read or written last; None if a program has found no document. `present` is the version read
    or written last, whatever was found later. `changes` are those by programs outside of the mount.
    """

    shown: bytes | None = None
    present: bytes | None = None
    changes: frozenset[OutsideChange] = frozenset()

    @property
    def nbytes(self) -> int:
        return 100 + len(self.present or b"") + sum(200 + len(repr(change)) for change in self.changes)


UNKNOWN = _Document()


class Seen:
    """The version of each document that a program has read or written here last. Thread-safe.

    A program may write a version that it has cached, after another program of this mount has read a newer one. So the
    changes by programs outside of the mount are kept, too.
    """

    def __init__(self) -> None:
        self._documents: OrderedDict[str, _Document] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.RLock()

    def read(self, path: str, document: bytes | None) -> None:
        """Record that a program has read `document`, or (None) has found no document.

        If it is not the version noted last, then a program outside of the mount has changed the document.
        """
        with self._lock:
            former = self._documents.get(path, UNKNOWN)
            changes = former.changes
            if None not in (document, former.present) and document != former.present:
                changes |= _changes(former.present, document)
            self._keep(path, _Document(document, former.present if document is None else document, changes))

    def wrote(self, path: str, document: bytes | None) -> None:
        """Record that a program has written a document, which is now shown as `document`, or (None) has removed it."""
        with self._lock:
            changes = frozenset[OutsideChange]() if document is None else self._documents.get(path, UNKNOWN).changes
            self._keep(path, _Document(document, document, changes))

    def changed(self, path: str, before: bytes | None, after: bytes | None) -> None:
        """Record that writing another document has changed this one, if programs know the version before."""
        with self._lock:
            if path in self and same_document(self.latest(path), before):
                self.wrote(path, after)

    def __contains__(self, path: str) -> bool:
        return path in self._documents

    def latest(self, path: str) -> bytes | None:
        """Return the version read or written last; None if a program has found no document, or none is noted."""
        return self._documents.get(path, UNKNOWN).shown

    def taken_back(self, path: str, current: bytes | None, new: bytes) -> list[str]:
        """Return the members of `current` in which `new` takes changes by programs outside of the mount back.

        A number between the values before and after a change takes it back in part: an array that two programs extend
        must not become shorter.
        """
        changes = self._documents.get(path, UNKNOWN).changes
        old, values = (_leaves(current), _leaves(new)) if changes else ({}, {})
        back = {c.at for c in changes if values.get(c.at) != old.get(c.at) and c.is_back(values.get(c.at))}
        return sorted(".".join(map(str, at)) for at in back)

    def discard_below(self, directory: str) -> None:
        """Forget all documents in a directory and below, after the directory was removed or renamed."""
        with self._lock:
            for path in [p for p in self._documents if is_in(p, directory)]:
                self._nbytes -= self._documents.pop(path).nbytes

    def _keep(self, path: str, document: _Document) -> None:
        """Note what is known of a document, and evict others. The caller holds the lock."""
        if path in self._documents:
            self._nbytes -= self._documents.pop(path).nbytes
        self._documents[path] = document
        self._nbytes += document.nbytes
        while self._nbytes > MAX_BYTES and len(self._documents) > 1:
            self._nbytes -= self._documents.popitem(last=False)[1].nbytes


def _changes(old: bytes | None, new: bytes | None) -> frozenset[OutsideChange]:
    before, after = _leaves(old), _leaves(new)
    return frozenset(OutsideChange(at, before.get(at), after.get(at)) for at, _ in before.items() ^ after.items())


def _leaves(raw: bytes | None) -> dict[Path, str]:
    """Return the JSON text of each value of a document that is no object and no list, by path.

    The result is empty for a document that is not JSON, or is too large.
    """
    try:
        return dict(_texts(load_json(raw or b"", MAX_DOCUMENT_BYTES), ()))
    except (ValueError, RecursionError):
        return {}


def _texts(value: Any, at: Path) -> Iterator[tuple[Path, str]]:
    if not isinstance(value, (dict, list)):
        yield at, json.dumps(value)
        return
    for name, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _texts(below, (*at, name))


def same_document(a: bytes | None, b: bytes | None) -> bool:
    """Return whether two documents have the same JSON values, whatever their formatting."""
    if a == b or a is None or b is None:
        return a == b
    try:
        return alike(*(load_json(raw, MAX_DOCUMENT_BYTES) for raw in (a, b)))
    except (ValueError, RecursionError):
        return False
