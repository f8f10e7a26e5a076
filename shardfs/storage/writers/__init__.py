"""Writers: replace whole objects of a store without losing the changes of concurrent writers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardfs.model.errors import UnsupportedError
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import require_finished
from shardfs.storage.remote import FsspecStore
from shardfs.storage.writers.azure import AzureObjects
from shardfs.storage.writers.gcs import GcsObjects
from shardfs.storage.writers.lease import Lease
from shardfs.storage.writers.local import LocalWriter
from shardfs.storage.writers.memory import MemoryObjects
from shardfs.storage.writers.objects import ObjectWriter
from shardfs.storage.writers.plain import PlainObjects
from shardfs.storage.writers.s3 import S3Objects
from shardfs.storage.writers.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.storage.store import Store

__all__ = ["Writer", "open_writer"]

log = logging.getLogger(__name__)

_OBJECTS: dict[str, type[AzureObjects | GcsObjects | MemoryObjects | S3Objects]]
_OBJECTS = {"abfs": AzureObjects, "gs": GcsObjects, "memory": MemoryObjects, "s3": S3Objects}
"""The requests to stores with conditional writes, by fsspec's name of the protocol."""


def open_writer(
    store: Store,
    *,
    alone: bool = False,
    replace_links: bool = False,
    journal: Path | None = None,
    rehearse: bool = False,
) -> Writer:
    """Return the writer for `store`. Sends probe requests if the store's abilities are unknown.

    Args:
        alone: no other program changes the objects that the caller writes, as in a new DEST of `pack`. Then a store
            without conditional writes is accepted.
        replace_links: see `LocalWriter`.
        journal: the mount's journal directory, which the caller has locked. If it is given, a remote store is locked,
            too, until `Writer.close`.
        rehearse: raise the errors of the lock, but take no lock.

    Raise UnsupportedError, with the reason, if the store cannot be written safely; BusyError if another mount has
    locked it, or a local source has an unfinished job in place; OSError if the store does not answer.
    """
    if isinstance(store, LocalStore):
        require_finished(store.root)
        return LocalWriter(store, replace_links=replace_links)
    store = getattr(store, "inner", store)  # a `CachedStore` is written without its cache
    if not isinstance(store, FsspecStore):
        raise UnsupportedError("this kind of store cannot be written; mount it read-only")
    protocols = {store.fs.protocol} if isinstance(store.fs.protocol, str) else set(store.fs.protocol)
    kind = next((kind for protocol, kind in _OBJECTS.items() if protocol in protocols), PlainObjects)
    objects, root = kind(store), store.path("")
    objects.prepare(root, alone=alone)
    if not objects.conditional and not alone:
        why = "this store has no conditional writes, so concurrent writers could overwrite each other's changes"
        error = UnsupportedError(
            f"{root}: {why}; mount it read-only, or write to S3, Google Cloud Storage, Azure or a disk"
        )
        error.source = root
        raise error
    if objects.conditional and not objects.removes:
        log.warning("this store does not heed conditional deletes: a delete may remove another writer's new version")
    if journal is None or objects.private:
        return ObjectWriter(store, objects)
    if rehearse:
        Lease.rehearse(objects, root, journal)
        return ObjectWriter(store, objects)
    return ObjectWriter(store, objects, Lease.take(objects, root, journal).free)
