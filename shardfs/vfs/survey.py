"""Queries about a source: the datasets in it, the locations of chunks, and whether there is anything to show."""

from __future__ import annotations

import errno
import logging
import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from shardfs.model.collection import Facts, Located
from shardfs.model.dataset import Problem, Summary
from shardfs.model.errors import NotADatasetError, ShardfsError
from shardfs.model.grid import unravel
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.shards.shard_sources import StoreShards
from shardfs.vfs.calls import Calls
from shardfs.vfs.discovery import LOOK_AHEAD, LOOK_AHEAD_REMOTE
from shardfs.vfs.inodes import TABLE_END
from shardfs.vfs.nodes import ChunkNode, DirectoryNode, Inherited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.dataset import Dataset
    from shardfs.vfs.chunk_dirs import ChunkDirs

log = logging.getLogger(__name__)

LOOKED_FOR = "Zarr v3, precomputed, N5, bcolz, Blosc2"

SEARCH_DIRECTORIES = 2_000
"""Number of directories searched before a source without a known dataset is mounted anyway."""

SPREAD = 16
"""Number of grid positions probed for an existing shard."""


class Survey(Calls):
    """The queries of `info`, `locate`, `verify` and the start of a mount."""

    def _located(self, number: int) -> Located | None:
        """Return the location of the chunk with this inode number; None for any other number."""
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            if chunks.place(number).level < chunks.depth:
                return None
            coords = chunks.coords(number)
        else:
            node = self._nodes.get(number)
            if not isinstance(node, ChunkNode):
                return None
            chunks, coords = node.chunks, node.coords
        if chunks.collection.filler is not None and chunks.chunks.locate(coords) is None:
            return None  # the chunk is shown with the fill value and is not stored
        found, transform = chunks.stored(coords), chunks.transform_of(coords)
        codecs = chunks.collection.codecs if transform is None else (*chunks.collection.codecs, transform.name)
        offset = found.start + max(found.blob.base, 0)
        return Located(chunks.path, coords, chunks.chunks.key_of(coords), offset, found.size, codecs)

    def described(self, directory: int) -> tuple[Dataset | None, ChunkDirs | None]:
        """Return the dataset and the chunk tree of a directory; None for each that the directory does not have."""
        content = self._datasets.open(self._directory(directory))
        return content.dataset, content.chunks

    def locate(self, path: str) -> Located:
        """Return the location of a shown chunk. Raise FileNotFoundError if the path is not a chunk."""
        found = self._located(self.resolve(path).number)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "is not a chunk", path)
        return found

    def chunk_at(self, shard: str, offset: int) -> str | None:
        """Return the shown path of the chunk that covers byte `offset` of a shard object; None if no chunk does."""
        for tree in self.collections():
            if (coords := tree.chunks.covering(shard, offset)) is not None:
                return tree.chunk_path(coords)
        return None

    def collections(self) -> Iterator[ChunkDirs]:
        """Yield all sharded collections. Opens every directory that may hold one."""
        for directory in self._directories():
            if directory.content is not None and directory.content.chunks is not None:
                yield directory.content.chunks

    def collection(self, path: str) -> ChunkDirs:
        """Return the collection shown in a directory. Raise FileNotFoundError if there is none."""
        number = self.resolve(path).number
        node = self._nodes.get(number) if number < TABLE_END else None
        content = self._datasets.open(node) if isinstance(node, DirectoryNode) else None
        if content is None or content.chunks is None:
            raise FileNotFoundError(errno.ENOENT, "no sharded collection", path)
        return content.chunks

    def problems(self) -> list[Problem]:
        """Return the problems found so far: directories that were not expanded, with reasons."""
        return list(self._datasets.problems)

    def summaries(self) -> Iterator[Summary]:
        """Yield a summary of each collection. Reads every shard index."""
        for tree in self.collections():
            facts, occupancy = tree.collection.facts, tree.chunks.occupancy()
            yield Summary(
                path=tree.path,
                format=tree.collection.format,
                shape=facts.shape,
                chunk_shape=facts.chunk_shape,
                shard_shape=facts.shard_shape,
                data_type=facts.data_type,
                codecs=tree.collection.codecs,
                sharding=facts.sharding,
                grid_chunks=None if tree.by_id else math.prod(tree.chunks.format.grid),
                **occupancy._asdict(),
            )

    def unsharded(self) -> Iterator[tuple[str, str, Facts]]:
        """Yield path, format and facts of each array whose chunks are shown as stored."""
        for directory in self._directories():
            dataset = directory.content.dataset if directory.content is not None else None
            if dataset is None:
                continue
            for c in dataset.unsharded:
                yield "/".join(filter(None, [directory.shown, c.path])), c.format, c.facts
            if dataset.indescribable and not (dataset.collections or dataset.unsharded):
                yield directory.shown, dataset.format, Facts((), (), None, f"unknown ({dataset.indescribable})", "none")

    def xattrs(self, number: int) -> dict[str, bytes]:
        """Return the `user.shardfs.*` attributes with the location of a chunk; none for other files."""
        where = self._located(number)
        if where is None:
            return {}
        return {
            "user.shardfs.shard": os.fsencode(where.shard),
            "user.shardfs.offset": b"%d" % where.offset,
            "user.shardfs.nbytes": b"%d" % where.size,
            "user.shardfs.codecs": ",".join(where.codecs).encode(),
        }

    def is_array(self, number: int) -> bool:
        """Return whether an inode number is that of a sharded array's directory."""
        node = self._nodes.get(number) if number < TABLE_END else None
        return isinstance(node, DirectoryNode) and self._datasets.open(node).chunks is not None

    def usage(self, number: int) -> dict[str, bytes]:
        """Return the `user.shardfs.*` attributes with the live and dead bytes of an array.

        Reads each of its indices.
        """
        if not self.is_array(number):
            return {}
        chunks = self.described(number)[1]
        live, dead = chunks.usage() if chunks is not None else (0, 0)
        return {"user.shardfs.live": b"%d" % live, "user.shardfs.dead": b"%d" % dead}

    def require_dataset(self) -> None:
        """Check that the source can be mounted.

        Raise NotADatasetError if a bounded search finds nothing sharded. Raise another error if the source does not
        exist or its server sends only whole objects. If the source is a file, it must be one that is shown as a
        directory.
        """
        self._find_dataset()
        self.store.require_ranges(self._some_shards())

    def _some_shards(self) -> Iterator[str]:
        """Yield keys of shards that may exist: for each array the first one listed, and others spread over its grid."""
        with suppress(PermissionError):  # some servers do not list the members of a group
            for tree in self.collections():
                shards, source = tree.outermost, tree.outermost.source
                if isinstance(shards.format, Unsharded) or not isinstance(source, StoreShards):
                    continue
                with suppress(PermissionError):
                    if (listed := source.first()) is not None:
                        yield listed
                grid = shards.format.grid
                step = 1 if tree.by_id else max(math.prod(grid) // SPREAD, 1)
                for i in range(0, SPREAD * step if tree.by_id else math.prod(grid), step):
                    yield shards.key_of((i,) if tree.by_id else unravel(i, grid))

    def _find_dataset(self) -> None:
        self._open_source_file()
        opened, found = 0, False
        try:
            for directory in self._directories(SEARCH_DIRECTORIES + 1):
                opened += 1
                content = directory.content
                if content is not None and content.is_sharded:
                    if self._datasets.view is None:
                        return
                    found = True  # continue, because the mount must report now what the layout cannot express
        except PermissionError as e:
            root = self._root.content
            if not self.store.blind or root is None:
                raise
            if root.dataset is None:
                self.store.entry("")  # raises the right error if the source does not exist
                raise
            log.warning("a group whose members are not listed; mounted all the same: %s", e)
            return
        if found:
            return
        if opened > SEARCH_DIRECTORIES:
            log.warning("nothing sharded among the first %d directories; mounted all the same", SEARCH_DIRECTORIES)
            return
        if self._datasets.problems:
            problem = next(iter(self._datasets.problems))
            raise NotADatasetError(f"{problem.path or 'the source'} cannot be shown unsharded: {problem.why}")
        root = self._root.content
        if root is not None and root.dataset is None and next(self.store.scan(""), None) is None:
            self.store.entry("")  # raises the right error if the source does not exist
        raise NotADatasetError(f"no sharded dataset found (looked for {LOOKED_FOR}).{self._found_instead()}")

    def _found_instead(self) -> str:
        """Return a sentence about the first unsharded array and the layouts that can show it; empty without one."""
        for directory in self._directories(LOOK_AHEAD_REMOTE if self.store.remote else LOOK_AHEAD):
            with suppress(ShardfsError, OSError):
                if (found := self._datasets.plain_array(directory.inside)) is not None:
                    name, layouts = found
                    told = f" Found: an unsharded {name} array at {directory.shown or 'its root'}; "
                    if layouts:
                        return f"{told}--layout {'|'.join(layouts)} can show it."
                    return f"{told}its chunks are plain files already, and no layout can convert it."
        return ""

    def _open_source_file(self) -> None:
        """Open the source as a file that is shown as a directory.

        For a remote source, this costs a request only if the source has a name that such a file may have.
        """
        candidates = [f for f in self._datasets.formats if f.may_hold(self.store.name)]
        if (self.store.remote and not candidates) or self._entry("", Inherited()).directory:
            return
        self._root.file = self._described_by_itself("", candidates)
        if self._root.file is None and not self._datasets.problems:
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory, and no dataset by itself", self.store.name)
