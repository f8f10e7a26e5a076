"""What the documents of a source say now about the form of arrays that are shown."""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.model.collection import REMOVED
from shardfs.vfs.directory_content import Inherited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.model.collection import Description
    from shardfs.model.dataset import Dataset
    from shardfs.storage.store import Store
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from shardfs.vfs.chunk_trees import ChunkTrees
    from shardfs.vfs.renewals import Renewals


class Forms:
    """Compares arrays with their documents in the source. Thread-safe.

    Args:
        read: returns the dataset that the documents in a directory describe now, given what the directory inherits.
    """

    def __init__(
        self,
        store: Store,
        trees: ChunkTrees,
        renewals: Renewals,
        read: Callable[[str, Inherited], Dataset | None],
    ) -> None:
        self._store = store
        self._trees = trees
        self._renewals = renewals
        self._read = read
        self._removing: list[str] = []  # documents that this mount is removing
        self._lock = threading.Lock()

    def now(self, tree: ChunkDirs) -> str | None:
        """Return the present `Collection.form` of the array of a tree; None if no document describes the array now.

        An array whose documents this mount has removed keeps its form until there are others. Costs one read of the
        documents, and a look for others if they have changed. Raise OSError or CorruptShardError if they cannot be
        read.
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
            if present.form != tree.collection.form or self._trees.describe(tree, description, present):
                return present.form
        return tree.collection.form

    def is_changed(self, tree: ChunkDirs) -> bool:
        """Return whether documents give the array of a tree another form, or another fill value, than the tree shows.

        Raise the errors of `now`.
        """
        form, before = self.now(tree), tree.collection.description
        fill_values = {repr(d.fill_value) for d in (before, tree.description) if d is not None}
        return form != tree.collection.form or len(fill_values) > 1

    def _is_stored(self, description: Description) -> bool:
        """Return whether the documents in the source are those of the description."""
        digests = description.digests
        present = self._store.documents("", [*digests], MAX_DOCUMENT_BYTES)
        return {**dict.fromkeys(digests, REMOVED), **hashes_of(present)} == digests

    @contextmanager
    def removing(self, path: str) -> Iterator[None]:
        """Note that this mount removes the document at a path of the store, unless the block raises an exception."""
        with self._lock:
            self._removing.append(path)
        try:
            yield
            self._renewals.add(path.rpartition("/")[0])  # what was read earlier is not kept
            self._trees.note_removed(path)
        finally:
            with self._lock:
                self._removing.remove(path)


def hashes_of(documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a 16-byte digest of each document, by the same paths."""
    return {path: hashlib.blake2b(raw, digest_size=16).digest() for path, raw in documents.items()}
