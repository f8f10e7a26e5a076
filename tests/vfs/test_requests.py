"""How many requests a store is asked: cold, warm, for what is missing, for neighbours."""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.zarr3 import ZARR3
from shardfs.shards.open_chunks import open_chunks
from shardfs.storage.cache import ByteLRU
from shardfs.storage.remote import FsspecStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree
from tests import data_n5, handmade, handmade_ids
from tests.data_zarr_transformer import ROOT_DOCUMENT, array_document, named, pack_shards, sharding
from tests.handmade import Entry
from tests.suites.walking import entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardfs.model.dataset import Dataset
    from shardfs.shards.chunk_store import ChunkStore


class Counting:
    """A client that notes each request it sends. Every range of `cat_ranges` is one."""

    protocol = "counting"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._fs = MemoryFileSystem(skip_instance_cache=True)  # the others are shared
        self._fs.store = {}
        for name, data in files.items():
            self._fs.pipe_file(f"/root/{name}", data)
        self.requests: list[tuple[str, str]] = []

    def pop(self) -> list[tuple[str, str]]:
        out, self.requests = self.requests, []
        return out

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> Any:
        self.requests.append(("read", path.rsplit("/", 1)[-1]))
        return self._fs.cat_file(path, start=start, end=end)

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str) -> Any:
        self.requests += [("read", path.rsplit("/", 1)[-1]) for path in paths]
        return self._fs.cat_ranges(paths, starts, ends, on_error=on_error)

    def info(self, path: str) -> Any:
        self.requests.append(("info", path.rsplit("/", 1)[-1]))
        return self._fs.info(path)

    def ls(self, path: str, detail: bool) -> Any:
        self.requests.append(("ls", path.rsplit("/", 1)[-1]))
        return self._fs.ls(path, detail=detail)

    def invalidate_cache(self, path: str) -> None:
        pass

    def _parent(self, path: str) -> str:
        return path.rsplit("/", 1)[0]


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that all memory file systems of the process share."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


def _array(shards: Mapping[str, bytes], location: handmade.Location = "end") -> dict[str, bytes]:
    document = handmade.zarr_metadata((4, 12), (4, 4), (2, 2), location=location)
    return {"zarr.json": json.dumps(document).encode(), **shards}


def _volume(deflate: bool = False) -> dict[str, bytes]:
    """8 ids: shard = bit 2, minishard = bit 0; 1.shard is missing."""
    spec = handmade.sharding(minishard=1, shard=1, preshift=1, index="gzip" if deflate else "raw")
    info = handmade.volume_info((4, 4, 2), (2, 2, 1), spec)
    present: list[list[Entry]] = [[], []]
    for chunk_id in range(8):
        shard, minishard = handmade.uint64_hash(chunk_id, spec)
        if shard == 0:
            present[minishard].append(Entry(chunk_id, bytes([chunk_id]) * 4))
    return {
        "info": json.dumps(info).encode(),
        "s/0.shard": handmade.uint64_shard(present, deflate_index=deflate),
    }


def _store(files: Mapping[str, bytes]) -> tuple[Counting, FsspecStore]:
    fs = Counting(files)
    return fs, FsspecStore(fs, "/root")


def _tree(files: Mapping[str, bytes], ttl: float = math.inf) -> tuple[Counting, Tree]:
    fs, store = _store(files)
    tree = Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20), ttl))
    tree.survey.require_dataset()
    fs.pop()
    return fs, tree


def _chunks(files: Mapping[str, bytes], directory: str = "") -> tuple[Counting, ChunkStore]:
    fs, store = _store(files)
    dataset: Dataset | None
    if "info" in files:
        dataset = PRECOMPUTED.open("", {"info": files["info"]})
    else:
        dataset = ZARR3.open("", {"zarr.json": files["zarr.json"]})
    assert dataset is not None
    return fs, open_chunks(store, directory, "", dataset.collections[0], ByteLRU(1 << 20), ByteLRU(1 << 20))


CHUNKS = [bytes([n]) * 4 for n in range(1, 5)]


@pytest.mark.parametrize("location", ["start", "end"])
def test_an_array(location: handmade.Location) -> None:
    sparse = [CHUNKS[0], None, CHUNKS[2], CHUNKS[3]]
    fs, chunks = _chunks(_array({"c/0/0": handmade.zarr_shard(sparse, location=location)}, location))
    assert chunks.stored_bytes((0, 0)) == CHUNKS[0]
    assert len(fs.pop()) == 2, "cold: the index and the chunk"
    assert chunks.stored_bytes((1, 1)) == CHUNKS[3]
    assert len(fs.pop()) == 1, "warm: the chunk"
    assert chunks.stored_bytes((0, 1)) is None
    assert fs.pop() == [], "missing under a warm index"
    assert chunks.stored_bytes((0, 2)) is None
    assert len(fs.pop()) == 1, "a missing shard"
    assert chunks.stored_bytes((1, 3)) is None
    assert fs.pop() == [], "which is remembered"


@pytest.mark.parametrize("deflate", [False, True])
def test_a_volume(deflate: bool) -> None:
    fs, chunks = _chunks(_volume(deflate), "s")
    assert chunks.stored_bytes((0, 0, 0)) == bytes(4)
    assert len(fs.pop()) == 3, "cold: shard index, minishard index, chunk"
    assert chunks.stored_bytes((1, 0, 0)) == b"\1\1\1\1"
    assert len(fs.pop()) == 1, "warm: the chunk"
    assert chunks.stored_bytes((0, 1, 0)) == b"\2\2\2\2"
    assert len(fs.pop()) == 2, "another minishard: its index and the chunk"
    missing = [(0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
    assert chunks.stored_bytes(missing[0]) is None
    assert len(fs.pop()) == 2, "a missing shard: neither .shard nor the obsolete .index"
    assert [chunks.stored_bytes(c) for c in missing] == [None] * 4
    assert fs.pop() == [], "which is remembered, for all of its minishards"


def test_nested_shards() -> None:
    inner_codec = handmade.zarr_metadata([8], [2], [1])["codecs"]
    document = handmade.zarr_metadata([8], [4], [2], codecs=inner_codec)
    shard = handmade.zarr_shard([handmade.zarr_shard([b"a", b"b"]), handmade.zarr_shard([b"c", None])])
    fs, chunks = _chunks({"zarr.json": json.dumps(document).encode(), "c/0": shard})
    assert chunks.stored_bytes((0,)) == b"a"
    assert len(fs.pop()) == 3, "two indices and the chunk"
    assert chunks.stored_bytes((1,)) == b"b"
    assert len(fs.pop()) == 1
    assert chunks.stored_bytes((2,)) == b"c"
    assert len(fs.pop()) == 2
    assert [chunks.stored_bytes((n,)) for n in (3, 4, 5)] == [None] * 3
    assert len(fs.pop()) == 1, "the outer shard that is missing"


def test_a_tree_asks_once_more_for_the_time_of_a_shard() -> None:
    fs, tree = _tree(_array({"c/0/0": handmade.zarr_shard(CHUNKS)}))
    attributes = tree.resolve("c/0/0")
    assert fs.pop() == [("read", "0"), ("info", "0")]
    assert bytes(tree.read(attributes.number, 0, 9)) == CHUNKS[0]
    assert fs.pop() == [("read", "0")]
    assert bytes(tree.read(attributes.number, 2, 9)) == CHUNKS[0][2:]
    assert fs.pop() == [], "a chunk is read once, in however many pieces"
    tree.resolve("c/1/1")
    with pytest.raises(FileNotFoundError):
        tree.resolve("c/0/9")
    assert fs.pop() == []
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            tree.resolve("c/0/4")
    assert fs.pop() == [("read", "2")]


@pytest.mark.parametrize(
    ("files", "paths", "cold"),
    [
        (_array({"c/0/0": handmade.zarr_shard(CHUNKS)}), ["c/0/0", "c/1/1", "c/0/4"], 2),
        (_volume(False), ["s/0-2_0-2_0-1", "s/2-4_0-2_0-1", "s/0-2_0-2_1-2"], 3),
    ],
)
def test_reading_a_file_by_its_path(files: Mapping[str, bytes], paths: list[str], cold: int) -> None:
    """As `fs.cat(path)` does: no request but those for index and chunk, beyond the first look at its directory."""
    fs, tree = _tree(files)
    tree.number(paths[0])
    fs.pop()
    assert len(tree.read(tree.number(paths[0]), 0, 1 << 62)) == 4
    assert len(fs.pop()) == cold
    assert len(tree.read(tree.number(paths[1]), 0, 1 << 62)) == 4
    assert len(fs.pop()) == 1
    with pytest.raises(FileNotFoundError):
        tree.read(tree.number(paths[2]), 0, 1 << 62)
    fs.pop()
    with pytest.raises(FileNotFoundError):
        tree.read(tree.number(paths[2]), 0, 1 << 62)
    assert fs.pop() == []


def _ids(deflate: bool = False) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Meshes of three ids in one minishard: stored and shown files."""
    meshes: dict[int, tuple[bytes, bytes]] = {}
    contents: dict[str, bytes] = {}
    for number in IDS:
        fragments, manifest = b"%d" % number, handmade_ids.manifest([[len(str(number))]])
        contents |= {str(number): fragments, f"{number}.index": manifest}
        meshes[number] = fragments, gzip.compress(manifest) if deflate else manifest
    info = {**handmade_ids.MESHES, "sharding": handmade.sharding(data="gzip" if deflate else "raw")}
    return {"info": json.dumps(info).encode(), "0.shard": handmade_ids.mesh_shard([meshes, {}])}, contents


@pytest.mark.parametrize("name", ["gzip_tensorstore", "checksum", "headerless_little", "seed_cut"])
@pytest.mark.interop
def test_blocks_of_n5(name: str, tmp_path: Path) -> None:
    """As for arrays; their sizes cost nothing beside the index, whatever is put before them or cut off."""
    dataset = data_n5.VARIANTS[name].write(tmp_path, name)
    rank = dataset.array.ndim
    cold, warm, missing = ("/".join((data_n5.MEMBER, x, *"0" * (rank - 1))) for x in "019")
    files = {str(p.relative_to(dataset.path)): p.read_bytes() for p in dataset.path.rglob("*") if p.is_file()}
    fs, tree = _tree(files)
    tree.number(cold)
    fs.pop()
    size = tree.resolve(cold).size
    assert [kind for kind, _ in fs.pop()] == ["read", "info"]
    assert bytes(tree.read(tree.number(cold), 0, 1 << 62)) == (dataset.twin / cold).read_bytes()
    assert size == (dataset.twin / cold).stat().st_size
    assert len(fs.pop()) == 1
    fs, tree = _tree(files)
    tree.number(cold)
    fs.pop()
    for path, requests in ((cold, 2), (warm, 1)):
        assert bytes(tree.read(tree.number(path), 0, 1 << 62)) == (dataset.twin / path).read_bytes()
        assert len(fs.pop()) == requests
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            tree.read(tree.number(missing), 0, 1)
        assert fs.pop() == []


IDS = (2, 2**63, 2**64 - 2)


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize("order", [IDS, IDS[::-1]])
def test_meshes(order: Sequence[int], deflate: bool) -> None:
    """As for volumes; fragments cost one request more, for the manifest that tells their size."""
    files, contents = _ids(deflate)
    fs, tree = _tree(files)
    cold, warm, last = order

    def cat(name: str) -> int:
        assert bytes(tree.read(tree.number(name), 0, 1 << 62)) == contents[name]
        return len([kind for kind, _ in fs.pop() if kind == "read"])

    with pytest.raises(FileNotFoundError):
        tree.number("missing")
    fs.pop()
    assert cat(f"{cold}.index") == 3, "cold: shard index, minishard index, manifest"
    assert cat(f"{warm}.index") == 1, "warm: the manifest"
    assert cat(str(last)) == 2, "fragments: the manifest, and they"
    for name in ("4", "4.index", str(2**63 + 2), f"{2**63 + 2}.index"):
        with pytest.raises(FileNotFoundError):
            tree.read(tree.number(name), 0, 1)
    assert fs.pop() == [], "missing under a warm index"


def test_meshes_are_looked_up_and_listed() -> None:
    files, contents = _ids()
    fs, tree = _tree(files)
    attributes = {name: tree.lookup(ROOT, name.encode()) for name in contents}
    assert {name: a.size for name, a in attributes.items()} == {name: len(data) for name, data in contents.items()}
    assert sum(kind == "read" for kind, _ in fs.pop()) == 2 + len(IDS), "two indices, and each manifest once"
    assert {name: bytes(tree.read(a.number, 0, 100)) for name, a in attributes.items()} == contents
    assert len(fs.pop()) == 2 * len(IDS)
    assert {e.name.decode() for e in entries(tree, ROOT)} == {"info", *contents}
    assert {kind for kind, _ in fs.pop()} <= {"ls", "info"}, "listing reads no manifest"


def test_a_hierarchy_of_the_draft_of_2022() -> None:
    """Its documents lie elsewhere: they are asked for once, with those that could lie in the directory."""
    shards = named(pack_shards({(i, j): bytes([i, j]) * 2 for i in range(4) for j in range(4)}, (2, 2)))
    document = array_document((4, 4), (1, 1), sharding(2, 2))
    fs, tree = _tree(
        {
            "zarr.json": json.dumps(ROOT_DOCUMENT).encode(),
            "meta/root/a.array.json": json.dumps(document).encode(),
            **{f"data/root/a/{name}": data for name, data in shards.items()},
        }
    )
    tree.number("data/root/a/c0/0")
    fs.pop()
    for name, requests in (("c0/0", 2), ("c1/1", 1), ("c3/3", 2)):
        assert len(tree.read(tree.number(f"data/root/a/{name}"), 0, 1 << 62)) == 4
        assert len(fs.pop()) == requests
    tree.resolve("meta/root/a.array.json")
    fs.pop()
    for _ in range(2):
        assert tree.resolve("meta/root/a.array.json").size < len(json.dumps(document, indent=2))
        assert [kind for kind, _ in fs.pop()] == ["info"], "for its time"


def test_listing_a_row_asks_for_each_shard_once() -> None:
    shards = {f"c/0/{n}": handmade.zarr_shard(CHUNKS) for n in range(3)}
    fs, tree = _tree(_array(shards))
    number = tree.resolve("c/0").number
    assert len(list(entries(tree, number))) == 6
    requests = fs.pop()
    assert [kind for kind, _ in requests].count("read") == 3
    assert [kind for kind, _ in requests].count("info") == 3
    assert len(list(entries(tree, number))) == 6
    assert {kind for kind, _ in fs.pop()} <= {"ls"}
    for e in entries(tree, number):
        tree.lookup(number, e.name)
    assert {kind for kind, _ in fs.pop()} <= {"ls"}


def test_a_directory_that_the_one_around_it_lacks_is_not_listed() -> None:
    fs, tree = _tree(_array({f"c/0/{n}": handmade.zarr_shard(CHUNKS) for n in range(3)}))
    for name in ("c", "c/0", "c/1"):
        list(entries(tree, tree.resolve(name).number))
    assert [name for kind, name in fs.pop() if kind == "ls"] == ["c", "0"]


def test_neighbours_are_fetched_together() -> None:
    shards = {f"c/0/{n}": handmade.zarr_shard(CHUNKS, gap=b"hole") for n in range(2)}
    fs, tree = _tree(_array(shards))
    names = ["c/0/0", "c/0/1", "c/1/0", "c/1/1", "c/0/2", "c/1/3"]
    numbers = [tree.resolve(name).number for name in names]
    fs.pop()
    parts = tree.read_many([(n, 0, 100) for n in numbers] + [(numbers[0], 1, 2)])
    assert parts == [*CHUNKS, CHUNKS[0], CHUNKS[3], CHUNKS[0][1:3]]
    assert len(fs.pop()) == 2, "one for each shard"


def test_a_file_that_is_passed_through_is_asked_for_once() -> None:
    fs, tree = _tree({**_array({"c/0/0": handmade.zarr_shard(CHUNKS)}), "note": b"x" * 1000})
    attributes = tree.lookup(ROOT, b"note")
    fs.pop()
    for offset in range(0, 1000, 100):
        assert bytes(tree.read(attributes.number, offset, 100)) == b"x" * 100
    requests = fs.pop()
    assert [kind for kind, _ in requests].count("read") == 1


def test_directories_in_an_array_are_not_asked_for_documents() -> None:
    """They are full of chunks, where nothing is sharded; and so is `data` of bcolz's."""
    document = handmade.zarr_metadata((4, 12), (4, 4), (2, 2))
    document["codecs"] = document["codecs"][0]["configuration"]["codecs"]
    column = {"column/meta/sizes": b"{}", "column/meta/storage": b"{}", "column/data/__0.blp": b"chunk"}
    plain = {"plain/zarr.json": json.dumps(document).encode(), "plain/c/0/1": b"chunk"}
    fs, tree = _tree({**plain, **column, "s/zarr.json": _array({})["zarr.json"]})
    for directory, file in (("plain/c/0", b"1"), ("column/data", b"__0.blp")):
        number = tree.resolve(directory).number
        fs.pop()
        assert bytes(tree.read(tree.lookup(number, file).number, 0, 9)) == b"chunk"
        assert [name for kind, name in fs.pop() if kind == "read"] == [file.decode()]


def test_looking_up_what_is_not_there_opens_nothing(tmp_path: Path) -> None:
    fs, tree = _tree(_array({"c/0/0": handmade.zarr_shard(CHUNKS)}))
    with pytest.raises(FileNotFoundError):
        tree.lookup(ROOT, b"missing")
    assert fs.pop() == [("info", "missing")]


def test_a_row_of_objects_is_listed_by_one_request() -> None:
    """Whether they exist or not; their sizes are in it, too."""
    document = {
        **handmade.zarr_metadata((4, 400), (2, 2), (2, 2), data_type="uint8"),
        "codecs": [{"name": "bytes"}],
    }
    files = {f"c/1/{n}": bytes(4) for n in range(0, 200, 50)}
    fs, store = _store({"zarr.json": json.dumps(document).encode(), **files})
    tree = Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20), layout="zarr2"))
    tree.survey.require_dataset()
    row = tree.resolve("1")
    fs.pop()
    listed = [(name, size) for b in tree.scan(row.number) for name, size in zip(b.names, b.sizes, strict=True)]
    assert [(name.decode(), int(size)) for name, size in listed] == [(str(n), 4) for n in range(0, 200, 50)]
    assert [kind for kind, _ in fs.pop()] in (["ls"], ["ls", "ls"])  # the second for what is no chunk
