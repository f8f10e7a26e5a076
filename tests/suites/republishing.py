"""A sharded dataset written anew, chunk by chunk, in several rounds, through `shardfs.shards.rewriting` alone."""

from __future__ import annotations

import shutil
from random import Random
from typing import TYPE_CHECKING

from shardfs.model.errors import UnsupportedError
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import bytes_of, is_same, size_of
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.superchunk import Pack
from shardfs.shards.rewriting import StoredShard
from shardfs.vfs.tree import open_tree
from tests.suites.shard_format import MemoryBlob
from tests.suites.walking import read_all

if TYPE_CHECKING:
    from collections.abc import Collection as Items
    from collections.abc import Mapping
    from pathlib import Path

    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

Chunks = dict["Coords", bytes]


def republish(source: Path, target: Path, seed: int = 0) -> int:
    """Make `target` a copy of `source` of which no shard is a copy. The number of chunks that it has."""
    shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
    tree = open_tree(str(source))
    random, n = Random(seed), 0
    for chunks in list(tree.collections()):
        chunks_before = {c: read_all(tree, tree.resolve(chunks.chunk_path(c))) for c in _coords(chunks)}
        files = Shards(chunks, target)
        files.clear()
        for puts, drops in _rounds(chunks.collection, chunks_before, random):
            files.write(puts, drops)
        files.repack(random.random() < 0.3)
        n += len(chunks_before)
    return n


def _coords(chunks: ChunkDirs) -> list[Coords]:
    return [tuple(c) for batch in chunks.chunks.layer.scan(0) for c in batch.coords.tolist()]


def _rounds(collection: Collection, chunks: Chunks, random: Random) -> list[tuple[Chunks, set[Coords]]]:
    """Wrong and right ones, some gone again, and the right ones at last."""
    together = 2 if collection.lead is not None else 1  # both files of a chunk
    units = [tuple(sorted(chunks))[i : i + together] for i in range(0, len(chunks), together)]
    wrong = dict(chunks)
    by_size: dict[tuple[int, ...], list[tuple[Coords, ...]]] = {}
    for unit in units:
        by_size.setdefault(tuple(len(chunks[c]) for c in unit), []).append(unit)
    for alike in by_size.values():
        for unit, other in zip(alike, random.sample(alike, len(alike)), strict=True):
            wrong |= {c: chunks[o] for c, o in zip(unit, other, strict=True)}
    if isinstance(collection.layers[0].format, Pack):  # without a gap
        per_file = collection.layers[0].format.per_file
        last = {c for c in chunks if c[0] % per_file == per_file - 1 or c[0] + 1 == len(chunks)}
        last = last if len(chunks) > 1 else set()  # or nothing were left of what stands before them
        return [(wrong, set()), ({}, last), (chunks, set())]
    out: list[tuple[Chunks, set[Coords]]] = []
    for part in (0.6, 0.5, 0.3):
        some = {c for unit in units if random.random() < part for c in unit}
        absent = {c for unit in units if random.random() < 0.2 for c in unit} - some
        out.append(({c: wrong[c] for c in some}, absent))
    return [*out, (chunks, set())]


class Shards:
    """The shard files of a collection, below the target's directory."""

    def __init__(self, chunks: ChunkDirs, target: Path) -> None:
        self._collection, self._target = chunks.collection, target
        self._source = chunks.shards.outermost.source

    def _path(self, shard: int) -> Path:
        key = self._source.key(shard)
        return self._target / key if self._target.is_dir() else self._target

    def clear(self) -> None:
        """Remove all, also those that are two files; but not what is more than its chunks."""
        if type(self._collection.layers[0].format) is Pack:
            return
        for shard in self._source.existing()[0].tolist():
            path = self._path(shard)
            for name in (path.name, f"{path.stem}.index", f"{path.stem}.data"):
                (path.parent / name).unlink(missing_ok=True)

    def write(self, puts: Mapping[Coords, bytes], drops: Items[Coords]) -> None:
        """Publish all changes, shard by shard, and check what is said of them."""
        homes: dict[int, tuple[dict[Coords, Put], set[Coords]]] = {}
        for c, data in puts.items():
            transform = self._collection.transform_of(c)
            stored_chunk = data if transform is None else transform.store(c, data)
            homes.setdefault(rewriting.shard_of(self._collection, c), ({}, set()))[0][c] = Put(stored_chunk)
        for c in drops:
            homes.setdefault(rewriting.shard_of(self._collection, c), ({}, set()))[1].add(c)
        for shard, (changed, drops_of_shard) in homes.items():
            self._write_one(shard, changed, drops_of_shard)

    def _write_one(self, shard: int, puts: Mapping[Coords, Put], drops: set[Coords]) -> None:
        path = self._path(shard)
        blob = MemoryBlob(path.read_bytes()) if path.exists() else None
        if blob is None and path.with_suffix(".data").exists():
            raise UnsupportedError("it is two files")
        plan = StoredShard(self._collection, shard, blob).plan(puts, drops)
        if plan is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes_of(plan, blob))
        new = MemoryBlob(path.read_bytes())
        stored_shard = StoredShard(self._collection, shard, new)
        is_second = [self._collection.lead is not None and c[-1] == 1 for c in puts]  # absent if it is empty
        present = [not second or size_of(put.data) > 0 for second, put in zip(is_second, puts.values(), strict=True)]
        extents = stored_shard.stored_chunks([*puts, *drops])
        assert [e is not None for e in extents] == present + [False] * len(drops)
        again = stored_shard.plan(puts, drops)
        assert is_same(again, new.stat().size), "what is there already is not written again"
        usage = stored_shard.usage()
        assert usage.live >= 0 <= usage.dead
        room = rewriting.slots(self._collection, shard)
        assert room is None or len(puts) <= room

    def repack(self, chosen: bool) -> None:
        """Leave out dead bytes, if chosen."""
        for shard in self._source.existing()[0].tolist() if chosen else ():
            path = self._path(shard)
            blob = MemoryBlob(path.read_bytes())
            plan = StoredShard(self._collection, shard, blob).repack()
            assert plan is not None
            path.write_bytes(bytes_of(plan, blob))
            if not any(layer.codecs or layer.trailer for layer in self._collection.layers):
                assert StoredShard(self._collection, shard, MemoryBlob(path.read_bytes())).usage().dead == 0
