"""What the documents of a source say now about the form of arrays that are shown."""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.vfs.nodes import Inherited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.model.collection import Description
    from shardfs.model.dataset import Dataset
    from shardfs.storage.store import Store
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.chunk_trees import ChunkTrees

REMOVED = b""
"""Takes the place of the digest of a document that this mount has removed."""


class Forms:
    """Compares arrays with their documents in the source. Thread-safe.

    Args:
        read: returns the dataset that the documents in a directory describe now.
    """

    def __init__(self, store: Store, trees: ChunkTrees, read: Callable[[str, Inherited], Dataset | None]) -> None:
        self._store, self._trees, self._read = store, trees, read
        self._removing: list[str] = []  # documents that this mount is removing
        self._lock = threading.Lock()

    def now(self, tree: ChunkDirs) -> str | None:
        """Return the present `Collection.form` of the array of a tree; None if no document describes the array now.

        An array whose documents this mount has removed keeps its form until there are others. Read the documents, and
        look for others if they have changed. Raise OSError or CorruptShardError if they cannot be read.
        """
        while (description := tree.description) is not None and not self._is_stored(description):
            dataset = self._read(description.directory, Inherited(scope=description.scope))
            collections = () if dataset is None else dataset.collections
            present = next((c for c in collections if c.path == description.path), None)
            with self._lock:
                if tree.description is not description:
                    continue  # what was read here may be older
                if present is None:
                    return None if description.digests.keys().isdisjoint(self._removing) else tree.collection.form
                if present.form == tree.collection.form:
                    tree.description = present.description
                return present.form
        return tree.collection.form

    def _is_stored(self, description: Description) -> bool:
        """Return whether the documents in the source are those of the description."""
        known = description.digests
        present = self._store.documents("", [*known], MAX_DOCUMENT_BYTES)
        return {**dict.fromkeys(known, REMOVED), **hashes_of(present)} == known

    @contextmanager
    def removing(self, path: str) -> Iterator[None]:
        """Note that this mount removes the document at a path of the store, unless the block raises an exception."""
        with self._lock:
            self._removing.append(path)
        try:
            yield
            for tree in self._trees.described_by(path):
                with self._lock:
                    if tree.description is not None:
                        known = {**tree.description.digests, path: REMOVED}
                        tree.description = tree.description._replace(digests=known)
        finally:
            with self._lock:
                self._removing.remove(path)


def hashes_of(documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a digest of each document."""
    return {path: hashlib.blake2b(raw, digest_size=16).digest() for path, raw in documents.items()}
