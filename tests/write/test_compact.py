"""`shardfs compact`: dead bytes go, chunks stay, and whatever is not as it should be changes nothing."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from shardfs.config.options import Options
from shardfs.jobs import compact
from shardfs.jobs.compact import Packer, Work
from shardfs.jobs.verify import ShardVerifier
from shardfs.model.dataset import Problem
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import size_of
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.source_locks import journal_directory
from shardfs.storage.writers import open_writer
from shardfs.vfs.tree import Tree, open_tree
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.pending import Backlog
from tests.conftest import read_with
from tests.datasets import same
from tests.mount.programs import copy_tree, shardfs
from tests.write.object_store import object_store
from tests.write.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.changes import Begun
    from shardfs.model.collection import Collection
    from tests.datasets import Client, Dataset

    Get = Callable[[str, str], Dataset]

VARIANTS: list[tuple[str, str, Client]] = [
    ("zarr3", "default", "tensorstore"),
    ("zarr3", "index_start", "tensorstore"),
    ("zarr3", "nested", "tensorstore"),
    ("zarr3", "nested_crc32c_after_both", "zarr3"),
    ("zarr3", "rank_1", "zarr3"),
    ("zarr3", "sparse", "tensorstore"),
    ("precomputed", "identity", "tensorstore"),
    ("precomputed", "channels_3", "tensorstore"),
]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where journals lie."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def journal(state: Path, tmp_path: Path) -> Iterator[Journal]:
    source = str(tmp_path / "x")
    new_files = Journal.open(journal_directory(source), source, limit_bytes=64 << 20, commit_s=0)
    yield new_files
    new_files.close(clean=True)


def opened(path: Path) -> Tree:
    return open_tree(str(path), index_cache_bytes=1 << 24, chunk_cache_bytes=1 << 24)


def waste(path: Path) -> int:
    """Write all shards anew until something is dead in each; how many there are."""
    tree, n = opened(path), 0
    writer = open_writer(tree.store)
    for sharded in tree.collections():
        outermost, collection = sharded.shards.outermost, sharded.collection
        first: dict[int, tuple[int, ...]] = {}
        for batch in sharded.chunks.layer.scan(0):
            for coords in batch.coords.tolist():
                first.setdefault(rewriting.shard_of(collection, tuple(coords)), tuple(coords))
        for shard, coords in first.items():
            data = sharded.chunks.stored_bytes(coords)
            assert data is not None
            for changed in (data[::-1], data):
                make = partial(_with, collection, shard, {coords: Put(changed)})
                writer.update(outermost.source.key(shard), Steps(make))
            n += 1
    return n


def _with(collection: Collection, shard: int, puts: dict[tuple[int, ...], Put], old: Blob | None) -> Plan | None:
    return StoredShard(collection, shard, old).plan(puts, set())


def works(path: Path) -> list[Work]:
    return [work for work in compact.survey(opened(path)) if isinstance(work, Work)]


@pytest.mark.parametrize(("format", "name", "client"), VARIANTS)
@pytest.mark.interop
def test_chunks_stay_and_dead_bytes_go(
    format: str, name: str, client: Client, dataset: Get, journal: Journal, tmp_path: Path
) -> None:
    data = dataset(format, name)
    path = copy_tree(data.path, tmp_path / "x")
    n = waste(path)
    before = works(path)
    assert len(before) == n
    packer = Packer(open_writer(opened(path).store), journal)
    for work in before:
        saved = packer.pack(work)
        assert isinstance(saved, int), saved
        assert saved >= work.usage.dead
    assert works(path) == []
    tree = opened(path)
    for collection in tree.collections():
        verifier = ShardVerifier(collection, deep=True)
        for shard in collection.shards.outermost.existing_shards().tolist():
            report = verifier.verify(shard)
            assert (report.findings, report.tally.dead_bytes) == ([], 0)
    member = next(iter(data.arrays))
    assert same(read_with(client, data, path, member), data.arrays[member])


def test_the_command(dataset: Get, tmp_path: Path) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    clean = json.loads(shardfs("compact", "--json", path).stdout.splitlines()[-1])
    assert clean == {"type": "end", "shards": 0, "dead": 0, "saved": 0}
    n = waste(path)
    sizes = {p: p.stat().st_size for p in path.rglob("*") if p.is_file()}
    dry = shardfs("compact", "-n", path)
    assert (dry.returncode, dry.stdout.endswith(f" in {n} shards can be reclaimed\n"), dry.stderr) == (0, True, "")
    assert sizes == {p: p.stat().st_size for p in path.rglob("*") if p.is_file()}
    told = [json.loads(line) for line in shardfs("compact", "--json", path).stdout.splitlines()]
    assert [line["type"] for line in told] == ["shard"] * n + ["end"]
    assert told[-1]["saved"] == sum(sizes.values()) - sum(p.stat().st_size for p in sizes)
    assert sorted(p for p in path.rglob("*") if p.is_file()) == sorted(sizes)  # no lock, no temporary file
    assert shardfs("verify", "--deep", path).returncode == 0


def test_what_is_not_the_same_is_not_put_in_place(
    dataset: Get, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    waste(path)
    work = works(path)[0]
    before = (path / work.key).read_bytes()
    packed = StoredShard(work.tree.collection, work.shard, opened(path).store.open(work.key)).repack()
    assert packed is not None

    def wrong(stored_shard: StoredShard) -> Plan:
        return [bytes(size_of(packed[:1])), *packed[1:]]

    monkeypatch.setattr(StoredShard, "repack", wrong)
    fault = Packer(open_writer(opened(path).store), journal).pack(work)
    assert isinstance(fault, Problem)
    assert (path / work.key).read_bytes() == before
    assert not [name for name in os.listdir((path / work.key).parent) if name.startswith(".shardfs")]


def test_notes_about_an_unfinished_replacement_stay_for_the_next_writer(
    dataset: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    waste(path)
    tree = opened(path)
    with Packer.open(tree, str(path), Options()) as packer, monkeypatch.context() as patch:

        def begin(note: Begun) -> None:
            original(note)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        original = packer._backlog.begin
        patch.setattr(packer._backlog, "begin", begin)
        assert isinstance(packer.pack(works(path)[0]), Problem)
    left = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20)
    assert len(Backlog(left).pending.begun) == 1
    left.close(clean=False)
    with Packer.open(tree, str(path), Options()) as packer:
        assert [isinstance(packer.pack(work), int) for work in works(path)].count(False) == 0
    left = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20)
    assert Backlog(left).pending.begun == {}
    left.close(clean=True)


def test_damage_is_told_and_left(dataset: Get, tmp_path: Path) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    waste(path)
    work = works(path)[0]
    damaged = path / work.key
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    wrong = damaged.read_bytes()
    completed = shardfs("compact", path)
    assert completed.returncode == 3
    assert completed.stderr.startswith(f"{work.key}: ")
    assert damaged.read_bytes() == wrong
    assert len(works(path)) == 0


def test_nobody_else_may_write_meanwhile(dataset: Get, tmp_path: Path) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    new_files = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20)
    try:
        completed = shardfs("compact", path)
        assert (completed.returncode, f"already mounted rw by pid {os.getpid()}" in completed.stderr) == (4, True)
        assert shardfs("compact", "-n", path).returncode == 0
        new_files.append(
            RecordKind.PUT, {"path": "c/0/0", "mtime_ns": 0, "mode": 0, "scratch": False, "base": None}, b"x"
        )
    finally:
        new_files.close(clean=False)
    completed = shardfs("compact", path)
    assert (completed.returncode, "1 files wait to be published first" in completed.stderr) == (3, True)


def test_a_crash_in_between_is_cleared_away(dataset: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_tree(dataset("zarr3", "default").path, tmp_path / "x")
    waste(path)
    work = works(path)[0]
    new_files = Journal.open(journal_directory(str(path)), str(path), limit_bytes=64 << 20, commit_s=0)
    packer = Packer(open_writer(opened(path).store), new_files)

    class Killed(BaseException):
        pass

    def begin(note: Begun) -> None:
        original(note)
        raise Killed

    original = packer._backlog.begin
    with monkeypatch.context() as patch:
        patch.setattr(packer._backlog, "begin", begin)
        patch.setattr("shardfs.storage.syscalls.unlink", lambda *_: None)  # who is killed clears nothing away
        with pytest.raises(Killed):
            packer.pack(work)
    assert [p for p in path.rglob(".shardfs-*")]
    new_files.close(clean=False)
    assert shardfs("compact", path).returncode == 0
    assert works(path) == []
    assert not [p for p in path.rglob(".shardfs-*")]


@pytest.mark.s3
def test_on_an_object_store(dataset: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    data = dataset("zarr3", "default")
    path = copy_tree(data.path, tmp_path / "x")
    n = waste(path)
    names = [str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()]
    with object_store() as server:
        for name in names:
            server.put(f"data/x/{name}", (path / name).read_bytes())
        monkeypatch.setenv("SHARDFS_STORAGE_OPTIONS", json.dumps(server.options()))
        completed = shardfs("compact", "--json", "s3://data/x")
        assert (completed.returncode, completed.stderr) == (0, "")
        told = json.loads(completed.stdout.splitlines()[-1])
        assert (told["shards"], told["saved"] > 0) == (n, True)
        assert sorted(server.objects) == sorted(f"data/x/{name}" for name in names)  # no lock is left
        for name in names:
            (path / name).write_bytes(server.objects[f"data/x/{name}"].data)
    assert shardfs("verify", "--deep", path).returncode == 0
    assert works(path) == []
    assert same(read_with("zarr3", data, path, ""), data.arrays[""])
