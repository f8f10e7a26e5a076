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
        self._lock = threading.Lock()  # a document and the descriptions that name it change as one step

    def now(self, tree: ChunkDirs) -> str | None:
        """Return the present `Collection.form` of the array of a tree; None if no document describes the array now.

        An array whose documents this mount has removed keeps its form until there are others. Read the documents, and
        look for others if they have changed. Raise OSError or CorruptShardError if they cannot be read.
        """
        if self._is_described(tree):
            return tree.collection.form
        with self._lock:
            return tree.collection.form if self._is_described(tree) else self._form_in_source(tree)

    def _is_described(self, tree: ChunkDirs) -> bool:
        """Return whether the documents of a tree are the ones known. True for a tree without documents."""
        if tree.description is None:
            return True
        known = tree.description.digests
        present = self._store.documents("", [*known], MAX_DOCUMENT_BYTES)
        return {**dict.fromkeys(known, REMOVED), **digests_of(present)} == known

    def _form_in_source(self, tree: ChunkDirs) -> str | None:
        """Return the form that other documents than the known ones give the array. The caller holds the lock."""
        description = tree.description
        if description is None:
            return tree.collection.form
        dataset = self._read(description.directory, Inherited(scope=description.scope))
        for collection in () if dataset is None else dataset.collections:
            if collection.path == description.path:
                if collection.form == tree.collection.form:
                    tree.description = collection.description
                return collection.form
        return None

    @contextmanager
    def removing(self, path: str) -> Iterator[None]:
        """Note that this mount removes the document at a path of the store, unless the block raises an exception."""
        with self._lock:
            yield
            for tree in self._trees.described_by(path):
                if tree.description is not None:
                    known = {**tree.description.digests, path: REMOVED}
                    tree.description = tree.description._replace(digests=known)


def digests_of(documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a digest of each document."""
    return {path: hashlib.blake2b(raw, digest_size=16).digest() for path, raw in documents.items()}
