"""Reading ahead of programs that read meshes and skeletons in the order of the shards, or by ascending id."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.storage.read_ahead import ReadAhead
from shardfs.storage.retry import RetryPolicy
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree
from tests import handmade, handmade_ids
from tests.suites.walking import entries, read_all
from tests.waiting import settle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardfs.model.blobs import ByteRequest, Stat
    from shardfs.storage.local import LocalBlob

OBJECTS, MINISHARDS, SHARDS = 600, 4, 2
SPEC = handmade.sharding(minishard=2, shard=1)
IDS = random.Random(1).sample(range(1 << 40), OBJECTS)


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (50 + number % 20)


def pages(shard: int) -> list[list[int]]:
    """The ids in each minishard of a shard, ascending."""
    homes = [[i for i in IDS if (i >> 2) % SHARDS == shard and i % MINISHARDS == page] for page in range(MINISHARDS)]
    return [sorted(page) for page in homes]


def write_skeletons(path: Path) -> None:
    handmade.write_json(path / "info", {**handmade_ids.SKELETONS, "sharding": SPEC})
    for shard in range(SHARDS):
        minishards = [[handmade.Entry(i, content(i)) for i in page] for page in pages(shard)]
        handmade.write_files(path, {f"{shard}.shard": handmade.uint64_shard(minishards)})


def write_meshes(path: Path) -> None:
    handmade.write_json(path / "info", {**handmade_ids.MESHES, "sharding": SPEC})
    for shard in range(SHARDS):
        meshes = [{i: (content(i), handmade_ids.manifest([[len(content(i))]])) for i in page} for page in pages(shard)]
        handmade.write_files(path, {f"{shard}.shard": handmade_ids.mesh_shard(meshes)})


class DistantBlob:
    """A local file without a descriptor, whose reads are recorded with the name of the reading thread."""

    fd, file_offset = -1, 0

    def __init__(self, blob: LocalBlob, store: Distant) -> None:
        self._blob, self._store = blob, store

    def stat(self) -> Stat:
        return self._blob.stat()

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        parts = self._blob.read(requests)
        name = threading.current_thread().name
        self._store.requests.append((name, sum(map(len, parts))))
        if name != AHEAD:
            settle(self._store.read_ahead, 0.1)  # what is fetched ahead arrives first, as from a distant store
        return parts


AHEAD = "shardfs-ahead"
"""The name of the threads that fetch ahead."""


class Distant(LocalStore):
    """A local directory that pretends to be remote, and fetches ahead."""

    remote = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.requests = list[tuple[str, int]]()
        self.retry = RetryPolicy()
        self.counters = self.retry.counters
        self.read_ahead: ReadAhead = ReadAhead(1 << 28, 8, self.retry)

    def open(self, key: str) -> DistantBlob:  # type: ignore[override]
        return DistantBlob(super().open(key), self)

    @property
    def own(self) -> int:
        """The number of requests that the reader had to wait for from their beginning."""
        return sum(name != AHEAD for name, _ in self.requests)


def listed(path: Path) -> tuple[Distant, Tree, list[str]]:
    """Return a source whose directory was listed just now, and the names of its objects in that order."""
    store = Distant(path)
    tree = Tree(Datasets(store, ByteLRU(1 << 24), ByteLRU(1 << 24)))
    names = [e.name.decode() for e in entries(tree, 1) if e.name != b"info"]
    store.requests.clear()
    return store, tree, names


def read(tree: Tree, names: Sequence[str]) -> None:
    for name in names:
        if not name.endswith(".index"):
            assert read_all(tree, tree.resolve(name)) == content(int(name))
        else:
            assert read_all(tree, tree.resolve(name))


def test_the_order_of_a_listing_is_the_order_of_the_shards(tmp_path: Path) -> None:
    write_skeletons(tmp_path)
    store, tree, names = listed(tmp_path)
    read(tree, names)
    assert len(names) == OBJECTS
    assert len(store.requests) < OBJECTS / 4
    assert sum(n for _, n in store.requests) == sum(len(content(i)) for i in IDS)
    assert store.counters.figures["bytes_ahead_wasted"] == 0


def test_ascending_ids_follow_the_order_of_each_page(tmp_path: Path) -> None:
    write_skeletons(tmp_path)
    store, tree, names = listed(tmp_path)
    read(tree, sorted(names, key=int))
    assert len(store.requests) < OBJECTS / 2
    assert sum(n for _, n in store.requests) == sum(len(content(i)) for i in IDS)
    assert store.counters.figures["bytes_ahead_wasted"] == 0


def test_random_ids_fetch_next_to_nothing_else(tmp_path: Path) -> None:
    write_skeletons(tmp_path)
    store, tree, names = listed(tmp_path)
    some = random.Random(2).sample(names, 64)
    read(tree, some)
    assert sum(n for _, n in store.requests) < 1.1 * sum(len(content(int(name))) for name in some)


@pytest.mark.parametrize("ascending", [False, True])
def test_meshes_of_two_files_are_fetched_ahead(tmp_path: Path, ascending: bool) -> None:
    write_meshes(tmp_path)
    store, tree, names = listed(tmp_path)
    read(tree, sorted(names, key=lambda name: (int(name.removesuffix(".index")), name)) if ascending else names)
    assert len(names) == 2 * OBJECTS
    assert store.own < OBJECTS / 2
    assert store.counters.figures["bytes_ahead_wasted"] == 0
