"""Looks into a source: what is in it, where chunks lie, whether there is anything to show at all."""

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
"""How many directories are looked into before a source is mounted on trust."""

SPREAD = 16
"""How many places of a grid are looked at for a shard that exists."""


class Survey(Calls):
    """What `info`, `locate`, `verify` and the start of a mount ask of a tree."""

    def _located(self, number: int) -> Located | None:
        """Where the chunk of this number lies; None for anything else."""
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
            return None  # it is shown, and lies nowhere
        found, transform = chunks.stored(coords), chunks.transform_of(coords)
        codecs = chunks.collection.codecs if transform is None else (*chunks.collection.codecs, transform.name)
        offset = found.start + max(found.blob.base, 0)
        return Located(chunks.path, coords, chunks.chunks.key_of(coords), offset, found.size, codecs)

    def described(self, directory: int) -> tuple[Dataset | None, ChunkDirs | None]:
        """What a directory of the store turned out to be, and the chunks shown in it."""
        content = self._datasets.open(self._directory(directory))
        return content.dataset, content.chunks

    def locate(self, path: str) -> Located:
        """Where a shown chunk lies. Raise FileNotFoundError for what is no chunk."""
        found = self._located(self.resolve(path).number)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "is not a chunk", path)
        return found

    def chunk_at(self, shard: str, offset: int) -> str | None:
        """The shown path of the chunk that covers byte `offset` of a shard object; None if none does."""
        for tree in self.collections():
            if (coords := tree.chunks.covering(shard, offset)) is not None:
                return tree.chunk_path(coords)
        return None

    def collections(self) -> Iterator[ChunkDirs]:
        """All sharded collections; looks into every directory that may hold some."""
        for directory in self._directories():
            if directory.content is not None and directory.content.chunks is not None:
                yield directory.content.chunks

    def collection(self, path: str) -> ChunkDirs:
        """The collection shown in this directory. Raise FileNotFoundError if there is none."""
        number = self.resolve(path).number
        node = self._nodes.get(number) if number < TABLE_END else None
        content = self._datasets.open(node) if isinstance(node, DirectoryNode) else None
        if content is None or content.chunks is None:
            raise FileNotFoundError(errno.ENOENT, "no sharded collection", path)
        return content.chunks

    def problems(self) -> list[Problem]:
        """What was not expanded so far, and why."""
        return list(self._datasets.problems)

    def summaries(self) -> Iterator[Summary]:
        """One for each collection; reads every shard index."""
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
        """The path, format and facts of each array whose chunks are shown as they are stored."""
        for directory in self._directories():
            dataset = directory.content.dataset if directory.content is not None else None
            if dataset is None:
                continue
            for c in dataset.unsharded:
                yield "/".join(filter(None, [directory.shown, c.path])), c.format, c.facts
            if dataset.indescribable and not (dataset.collections or dataset.unsharded):
                yield directory.shown, dataset.format, Facts((), (), None, f"unknown ({dataset.indescribable})", "none")

    def xattrs(self, number: int) -> dict[str, bytes]:
        """`user.shardfs.*` of a chunk: where it lies."""
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
        """Whether it is the directory of something sharded."""
        node = self._nodes.get(number) if number < TABLE_END else None
        return isinstance(node, DirectoryNode) and self._datasets.open(node).chunks is not None

    def usage(self, number: int) -> dict[str, bytes]:
        """`user.shardfs.*` of the directory of an array that cost a look at each of its indices."""
        if not self.is_array(number):
            return {}
        chunks = self.described(number)[1]
        live, dead = chunks.usage() if chunks is not None else (0, 0)
        return {"user.shardfs.live": b"%d" % live, "user.shardfs.dead": b"%d" % dead}

    def require_dataset(self) -> None:
        """Raise NotADatasetError if a bounded look around finds nothing sharded, another error if the source is not
        there or its server sends only whole objects.

        If the source is a file, it must be one that is shown as a directory.
        """
        self._find_dataset()
        self.store.require_ranges(self._some_shards())

    def _some_shards(self) -> Iterator[str]:
        """Keys of shards that may exist: of each array the one listed first, and others spread over its grid."""
        with suppress(PermissionError):  # the members of a group are not listed
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
                    found = True  # look on: what the layout cannot express must be told now
        except PermissionError as e:
            root = self._root.content
            if not self.store.blind or root is None:
                raise
            if root.dataset is None:
                self.store.entry("")  # says so if it does not exist
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
            self.store.entry("")  # says so if it does not exist
        raise NotADatasetError(f"no sharded dataset found (looked for {LOOKED_FOR}).{self._found_instead()}")

    def _found_instead(self) -> str:
        """A sentence on the first unsharded array in the source and the layouts that can show it; empty if none."""
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
        """A remote source is asked what it is only if its name may be that of such a file."""
        candidates = [f for f in self._datasets.formats if f.may_hold(self.store.name)]
        if (self.store.remote and not candidates) or self._entry("", Inherited()).directory:
            return
        self._root.file = self._described_by_itself("", candidates)
        if self._root.file is None and not self._datasets.problems:
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory, and no dataset by itself", self.store.name)
