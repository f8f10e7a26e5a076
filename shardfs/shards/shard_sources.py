"""Sources of the shards of a layer: objects of a store, or chunks of the outer layer."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.model.collection import MISSING, ShardSource
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import ravel_many, unravel
from shardfs.shards.outer_codecs import unwrapped
from shardfs.storage.blob_views import WITHOUT_DATA, EitherBlob, PairBlob, SliceBlob
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardfs.model.blobs import Blob, Stat
    from shardfs.model.collection import Layer, Pair
    from shardfs.model.values import U64, Coords
    from shardfs.shards.chunk_layer import ChunkLayer
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.store import DirEntry, Store


log = logging.getLogger(__name__)

MOST_MISSING = 20
"""Missing shards that a survey names."""


class _ShardNames(NamedTuple):
    """What is at the names of shards.

    Attributes:
        shards: the numbers of the files, ascending.
        directories: the numbers and names of the directories in place of a file.
        faults: errors for directories of shards that cannot be opened.
    """

    shards: U64
    directories: dict[int, str]
    faults: list[CorruptShardError]

    @property
    def taken(self) -> U64:
        """The numbers of the shards whose name is that of a file or directory, ascending."""
        return np.union1d(self.shards, np.array(list(self.directories), np.uint64))


class StoreShards(ShardSource):
    """Shards that are objects of a store."""

    def __init__(self, store: Store, directory: str, layer: Layer, cache: ByteLRU) -> None:
        self._store = store
        self.layer = layer
        self._cache = cache
        self.required = layer.required
        # A shard without a key is the file at the directory's path; that file is shown as a directory.
        self._prefix = f"{directory}/" if directory and layer.format.key(0) else directory

    @property
    def is_local(self) -> bool:
        return not self._store.remote

    def key(self, shard: int) -> str:
        return self._prefix + self.layer.format.key(shard)

    def move(self, old: str, new: str) -> None:
        self._prefix = new + self._prefix[len(old) :]

    def number(self, key: str) -> int | None:
        return self.layer.format.shard_of(key.removeprefix(self._prefix)) if key.startswith(self._prefix) else None

    def unwrap(self, shard: int, blob: Blob) -> Blob:
        return unwrapped(self.layer, blob, self.key(shard), self._cache)

    def stored(self, shard: int) -> Blob:
        key, pair = self.key(shard), self.layer.pair
        if pair is None:
            return self._store.open(key)
        stem = key.rsplit(".", 1)[0]

        def open_pair() -> Blob:
            return self._open_pair(stem, pair)

        try:
            blob = self._store.open(key)
        except FileNotFoundError:
            return open_pair()
        return EitherBlob(blob, open_pair) if self._store.remote else blob

    def _open_pair(self, stem: str, pair: Pair) -> Blob:
        """Return the shard stored as two files. Raise FileNotFoundError if both are missing, ValueError if one is."""
        try:
            index = self._store.open(stem + pair.head)
        except FileNotFoundError:
            if self._exists(stem + pair.body):
                raise ValueError("has no file of its index beside that of data") from None
            raise
        try:
            return PairBlob(index, self._store.open(stem + pair.body), pair.head_bytes)
        except FileNotFoundError:
            raise ValueError(WITHOUT_DATA) from None

    def is_pair(self, shard: int) -> bool:
        pair, key = self.layer.pair, self.key(shard)
        if pair is None or self._exists(key):
            return False
        stem = key.rsplit(".", 1)[0]
        return self._exists(stem + pair.head) or self._exists(stem + pair.body)

    def _exists(self, key: str) -> bool:
        try:
            self._store.open(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def reopen(self, shard: int) -> None:
        self._store.reopen(self.key(shard))

    def allow_missing(self, first: int) -> None:
        self.required = min(self.required, first)

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        names = self._shard_names()
        # A directory counts, because opening it tells what is wrong; for a remote store, there is no object.
        shards = names.taken if self.is_local else names.shards
        damage = [*names.faults, *self._missing(shards)]
        for error in damage:
            log.warning("%s", error)
        return shards, next(iter(damage), None)

    def first(self) -> str | None:
        """Return the key of the shard that the store lists first; None if it lists none."""
        if not self.layer.format.key(0):
            return self._prefix
        shards = (name for name, directory in self._names() if not directory and self._shard_of(name) is not None)
        return next((self._prefix + name for name in shards), None)

    def exists(self) -> bool:
        """Return whether there is a shard; always True for shards without a key. The result is not cached.

        An object store has no empty directories, so one listing of the top directory is enough there. Elsewhere names
        are listed until the first shard. Raise OSError if the store cannot be listed.
        """
        first, _, below = self.layer.format.key(0).partition("/")
        if not below or not self._store.remote or self._store.blind:
            return self.first() is not None
        listed = (e.name for e in self._store.scan(self._prefix.rstrip("/")) if e.directory)
        return any(name == first or self.layer.format.shard_of(f"{name}/{below}") is not None for name in listed)

    def survey(self) -> tuple[U64, list[CorruptShardError]]:
        names = self._shard_names()
        faults = [
            CorruptShardError("", self._prefix + name, "should be a file, but is a directory")
            for name in names.directories.values()
        ]
        return names.shards, [*names.faults, *faults, *self._missing(names.taken)]

    def _missing(self, shards: U64) -> list[CorruptShardError]:
        """Return errors for the first required shards that are not among `shards`."""
        present = set(shards.tolist())
        missing = (shard for shard in range(self.required) if shard not in present)
        return [
            CorruptShardError(self._prefix.rstrip("/"), self.key(shard), MISSING)
            for shard in islice(missing, MOST_MISSING)
        ]

    def _shard_names(self) -> _ShardNames:
        if not self.layer.format.key(0):
            return _ShardNames(np.zeros(1, np.uint64), {}, [])
        shards: set[int] = set()
        directories: dict[int, str] = {}
        faults: list[CorruptShardError] = []
        for name, directory in self._names(faults):
            shard = self._shard_of(name)
            if directory and shard is not None:
                directories[shard] = name
            elif shard is not None:
                shards.add(shard)
        return _ShardNames(np.array(sorted(shards), np.uint64), directories, faults)

    def _names(self, faults: list[CorruptShardError] | None = None) -> Iterator[tuple[str, bool]]:
        """Yield every name at the depth of shards, relative to the collection, and whether it is a directory.

        `faults` gets local directories of shards that cannot be opened, such as dangling links.
        """
        return self._walk("", self._entries(""), self.layer.format.key(0).count("/"), [] if faults is None else faults)

    def listed(self, parent: str) -> dict[str, Stat | None]:
        """Return the attributes of all objects in a directory by name; None where the store lists names only.

        Empty if there is no such directory. `parent` is relative to the directory of the collection.
        """
        where = f"{self._prefix}{parent}".rstrip("/")
        return {e.name: e.stat for e in self._store.scan(where) if not e.directory}

    def _walk(
        self, below: str, entries: Iterable[DirEntry], depth: int, faults: list[CorruptShardError]
    ) -> Iterator[tuple[str, bool]]:
        if not depth:
            yield from ((below + e.name, e.directory) for e in entries)
            return
        directories = self._directories(below, entries, faults)
        for directory, inside in load_ahead(self._store.read_ahead, self._entries, directories, first=4):
            yield from self._walk(directory, inside, depth - 1, faults)

    def _directories(self, below: str, entries: Iterable[DirEntry], faults: list[CorruptShardError]) -> Iterator[str]:
        for e in entries:
            path = f"{below}{e.name}/"
            if e.directory:
                yield path
            elif e.stat is None and not self._store.remote:
                names = self.layer.format.key(0).split("/")[path.count("/") :]
                if self._shard_of(path + "/".join(names)) is not None:
                    why = "should be a directory of shards, but cannot be opened; is it a link that leads nowhere?"
                    faults.append(CorruptShardError("", self._prefix + path.rstrip("/"), why))

    def _entries(self, below: str) -> Iterable[DirEntry]:
        entries = self._store.scan(f"{self._prefix}{below}".rstrip("/"))
        return list(entries) if self._store.remote else entries  # the request is sent when the first one is needed

    def _shard_of(self, name: str) -> int | None:
        """Return the shard that a file, or one of two files, belongs to; None for other names."""
        return self.layer.format.shard_of(self.layer.single_name(name))


class NestedShards(ShardSource):
    """Shards that are chunks of an outer layer."""

    def __init__(self, outer: ChunkLayer, layer: Layer, cache: ByteLRU) -> None:
        self._outer = outer
        self._grid = outer.format.grid
        self._cache = cache
        self.layer = layer

    @property
    def is_local(self) -> bool:
        return self._outer.source.is_local

    def key(self, shard: int) -> str:
        coords = unravel(shard, self._grid)
        return f"{self._outer.key_of(coords)}[{','.join(map(str, coords))}]"

    def number(self, key: str) -> None:
        return None  # no path names an inner shard

    def unwrap(self, shard: int, blob: Blob) -> Blob:
        return unwrapped(self.layer, blob, self.key(shard), self._cache)

    def stored(self, shard: int) -> Blob:
        coords = unravel(shard, self._grid)
        chunk = self._outer.locate(coords)
        if chunk is None:
            raise FileNotFoundError(self.key(shard))
        return SliceBlob(*chunk[:3])

    def reopen(self, shard: int) -> None:
        self._outer.invalidate_shard(unravel(shard, self._grid))

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        numbers = [np.empty(0, np.uint64)]
        damage: CorruptShardError | None = None
        try:
            for batch in self._outer.scan(0):
                sound = batch.sizes >= 0
                numbers.append(ravel_many(batch.coords[sound], self._grid))
                for coords in batch.coords[~sound][:1].tolist():
                    damage = self._damage_at(tuple(coords)) or damage
        except CorruptShardError as e:
            damage = e
        return np.unique(np.concatenate(numbers)), damage

    def _damage_at(self, coords: Coords) -> CorruptShardError | None:
        try:
            self._outer.locate(coords)
        except CorruptShardError as e:
            return e
        return None
