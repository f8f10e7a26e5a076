"""Queries about a whole source: summaries, the search for a chunk's bytes, and whether there is anything to show."""

from __future__ import annotations

import errno
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.formats.registry import sources, views
from shardfs.model.collection import Facts
from shardfs.model.dataset import Summary, Surroundings
from shardfs.model.errors import NotADatasetError, ShardfsError, UnsupportedError
from shardfs.model.grid import unravel
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.shards.shard_sources import StoreShards
from shardfs.vfs.directory_content import NOTHING_INHERITED
from shardfs.vfs.source_datasets import LOOK_AHEAD, LOOK_AHEAD_REMOTE, SourceDatasets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.dataset import Dataset
    from shardfs.vfs.directories import StoreDirectories
    from shardfs.vfs.discovery import Datasets
    from shardfs.vfs.stored_files import StoredFiles

log = logging.getLogger(__name__)

LOOKED_FOR = "Zarr v3, precomputed, N5, bcolz, Blosc2"

FORMAT_NAMES = {"zarr2": "Zarr v2", "zarr3": "Zarr v3", "zarr3-draft": "Zarr v3 (2022 draft)", "n5": "N5"}
"""Display names of formats in messages, where they differ from the internal names."""

SEARCH_DIRECTORIES = 2_000
"""Number of directories searched before a source without a known dataset is mounted anyway."""

SPREAD = 16
"""Number of grid positions probed for an existing shard."""


class Survey:
    """The queries of `info`, `locate` and the start of a mount."""

    def __init__(self, directories: StoreDirectories, files: StoredFiles, datasets: Datasets) -> None:
        self._directories = directories
        self._files = files
        self._datasets = datasets
        self._source = datasets.source
        self._store = datasets.store

    def chunk_at(self, shard: str, offset: int) -> str | None:
        """Return the shown path of the chunk that covers byte `offset` of a shard object; None if no chunk does.

        `shard` is the object's path in the store. Raise CorruptShardError if its index is damaged.
        """
        for tree in self._directories.collections():
            if (coords := tree.chunks.layer.covering(shard, offset)) is not None:
                return tree.chunk_path(coords)
        return None

    def summaries(self) -> Iterator[Summary]:
        """Yield a summary of each collection, breadth first. Reads every shard index."""
        for tree in self._directories.collections():
            facts = tree.collection.facts
            yield Summary(
                path=tree.path,
                format=tree.collection.format,
                shape=facts.shape,
                chunk_shape=facts.chunk_shape,
                shard_shape=facts.shard_shape,
                data_type=facts.data_type,
                codecs=tree.collection.codecs,
                sharding=facts.sharding,
                grid_chunks=None if tree.by_id else math.prod(tree.chunks.layer.format.grid),
                **tree.chunks.layer.occupancy()._asdict(),
            )

    def unsharded(self) -> Iterator[tuple[str, str, Facts]]:
        """Yield path, format and facts of each array whose chunks are shown as stored, or that shardfs cannot describe.

        The data type of the latter is `unknown (REASON)`.
        """
        for directory in self._directories.walk():
            dataset = directory.content.dataset if directory.content is not None else None
            if dataset is None:
                continue
            for c in dataset.unsharded:
                yield "/".join(filter(None, [directory.shown, c.path])), c.format, c.facts
            if dataset.indescribable and not (dataset.collections or dataset.unsharded):
                yield directory.shown, dataset.format, Facts((), (), None, f"unknown ({dataset.indescribable})", "none")

    # ---- before a mount ----

    def require_dataset(self) -> None:
        """Check that the source can be mounted.

        Raise NotADatasetError if a bounded search finds nothing sharded. Raise another error if the source does not
        exist or its server sends only whole objects. If the source is a file, it must be one that is shown as a
        directory.
        """
        self._open_source_file()
        self._require_sharded()
        self._store.require_ranges(self._some_shards())

    def _open_source_file(self) -> None:
        """Open the source as a file that is shown as a directory.

        For a remote source, this costs a request only if the source has a name that such a file may have.
        """
        root = self._directories.root
        name = self._store.name
        candidates = [f for f in self._source.formats if f.may_hold(name)]
        if (self._store.remote and not candidates) or self._files.entry("", NOTHING_INHERITED).directory:
            return
        root.file = self._files.dataset_in_file("", candidates)
        if root.file is None and not self._datasets.problems:
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory, and no dataset by itself", name)

    def _require_sharded(self) -> None:
        root, opened, is_sharded = self._directories.root, 0, False
        try:
            for directory in self._directories.walk(SEARCH_DIRECTORIES + 1):
                opened += 1
                if directory.content is not None and directory.content.is_sharded:
                    if self._datasets.layout is None:
                        return
                    is_sharded = True  # continue, because the mount must report now what the layout cannot express
        except PermissionError as e:
            if not self._store.blind or root.content is None:
                raise
            if root.content.dataset is None:
                self._store.entry("")  # raises the right error if the source does not exist
                raise
            log.warning("a group whose members are not listed; mounted all the same: %s", e)
            return
        if is_sharded:
            return
        if opened > SEARCH_DIRECTORIES:
            log.warning("nothing sharded among the first %d directories; mounted all the same", SEARCH_DIRECTORIES)
            return
        for problem in self._datasets.problems:
            self._source.require_no_job(problem.path)
        if self._datasets.problems:
            problem = next(iter(self._datasets.problems))
            raise NotADatasetError(f"{problem.path or 'the source'} cannot be shown unsharded: {problem.why}")
        if root.content is not None and root.content.dataset is None and next(self._store.scan(""), None) is None:
            self._store.entry("")  # raises the right error if the source does not exist
            raise NotADatasetError(
                "no sharded dataset found, it is empty: to write a new one, mount it with --rw --create zarr3"
            )
        raise NotADatasetError(f"no sharded dataset found (looked for {LOOKED_FOR}).{self._found_instead()}")

    def _found_instead(self) -> str:
        """Return a sentence about the first unsharded array and the layouts that can show it; empty without one."""
        plain = SourceDatasets(self._store, sources(), None)
        for directory in self._directories.walk(LOOK_AHEAD_REMOTE if self._store.remote else LOOK_AHEAD):
            with suppress(ShardfsError, OSError):
                dataset = plain.dataset(directory.inside, NOTHING_INHERITED)
                if dataset is not None and (dataset.unsharded or (dataset.format == "zarr2" and dataset.closed)):
                    name = FORMAT_NAMES.get(dataset.format, dataset.format)
                    sentence = f" Found: an unsharded {name} array at {directory.shown or 'its root'}; "
                    if layouts := _layouts_of(directory.inside, dataset):
                        return f"{sentence}a mount with -o layout={'|'.join(layouts)} can show it."
                    return f"{sentence}its chunks are plain files already, and no layout can convert it."
        return ""

    def _some_shards(self) -> Iterator[str]:
        """Yield keys of shards that may exist: for each array the first one listed, and others spread over its grid."""
        with suppress(PermissionError):  # some servers do not list the members of a group
            for tree in self._directories.collections():
                shards = tree.shards.outermost
                source = shards.source
                if isinstance(shards.format, Unsharded) or not isinstance(source, StoreShards):
                    continue
                with suppress(PermissionError):
                    if (listed := source.first()) is not None:
                        yield listed
                grid = shards.format.grid
                step = 1 if tree.by_id else max(math.prod(grid) // SPREAD, 1)
                for i in range(0, SPREAD * step if tree.by_id else math.prod(grid), step):
                    yield shards.key_of((i,) if tree.by_id else unravel(i, grid))


def _layouts_of(path: str, dataset: Dataset) -> list[str]:
    """Return the names of the layouts that can show a dataset."""
    layouts = []
    for name, view in views().items():
        with suppress(UnsupportedError):
            if view.show(path, dataset, Surroundings()).collections:
                layouts.append(name)
    return layouts
