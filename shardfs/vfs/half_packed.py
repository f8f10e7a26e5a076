"""The datasets of a source during an in-place job, from the documents of both forms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import join
from shardfs.formats.registry import creating_view, sources
from shardfs.model.collection import Layer
from shardfs.model.errors import UnsupportedError
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.shards.half_packed import HalfPacked
from shardfs.shards.rewriting import unwritable
from shardfs.storage.pack_state import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.collection import Collection
    from shardfs.model.dataset import Dataset
    from shardfs.storage.in_place import InPlaceStore


def half_packed(store: InPlaceStore, path: str, dataset: Dataset) -> Dataset:
    """Return the sharded dataset in a directory with each chunk in a shard or a file, wherever the job has it now.

    Raise UnsupportedError if the plain form of an array is not found, or cannot be turned into chunks of shards.
    """
    if not dataset.collections or not any(join(path, name) in store.sharded for name in _names()):
        return dataset
    plain = _plain(store, path, dataset.format)

    def combined(sharded: Collection) -> Collection:
        files = plain.get(sharded.path)
        if files is not None and not isinstance(files.layers[0].format, Unsharded):
            return sharded  # has shards in both forms, or the job has ended
        if files is None or files.transform is not None or unwritable(sharded) or sharded.lead is not None:
            raise UnsupportedError(f"{path or '/'}: cannot be shown until the job in place has ended")
        format = HalfPacked(files, sharded, partial(_is_sharded, store, path, dataset.format))
        # With a value for `shards`, names of chunk files are hidden where chunks are shown under other names.
        return replace(sharded, layers=(Layer(format),), shards=sharded.stored_at)

    return replace(dataset, collections=tuple(map(combined, dataset.collections)))


def _plain(store: InPlaceStore, path: str, format: str) -> dict[str, Collection]:
    """Return the arrays that the documents of the plain dataset describe, as those of another format, by path."""
    aside = join(PLAIN, path)  # the job may move documents from there or to there meanwhile
    dataset = next(filter(None, (_opened(store, path, at) for at in (aside, path, aside))), None)
    if dataset is not None and dataset.format != format:
        view = creating_view(format)
        dataset = view.show(path, dataset, {}) if view is not None else None
    return {} if dataset is None else {c.path: c for c in (*dataset.collections, *dataset.unsharded)}


def _is_sharded(store: InPlaceStore, path: str, format: str) -> bool:
    dataset = _opened(store, path, path)
    return dataset is not None and dataset.format == format and bool(dataset.collections)


def _opened(store: InPlaceStore, path: str, directory: str) -> Dataset | None:
    """Return the dataset of the documents in a directory; `path` is for messages."""
    documents = store.stored.documents(directory, _names(), MAX_DOCUMENT_BYTES)
    return next((d for f in sources() if (d := f.open(path, documents)) is not None), None)


@cache
def _names() -> Sequence[str]:
    return list(dict.fromkeys(name for f in sources() for name in f.documents))
