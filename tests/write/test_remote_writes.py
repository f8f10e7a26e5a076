"""All of the writing engine on an object store: what arrives, in how many requests, and what a bad day does to it."""

from __future__ import annotations

import errno
import math
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.formats.registry import formats
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError
from shardfs.model.shard_format import Put
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.retry import RetryPolicy
from shardfs.storage.writers.objects import ObjectWriter
from shardfs.storage.writers.s3 import S3Objects
from shardfs.write.journal import places
from tests import handmade
from tests.conftest import _start_time, need_fuse
from tests.mount.distant import in_words
from tests.waiting import wait_until
from tests.write.mounts import writable
from tests.write.steps import Steps
from tests.write.targets import TARGETS, Target
from tests.write.test_object_writer import s3_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Collection
    from tests.write.object_store import Server
    from tests.write.tokens import Array

pytestmark = [pytest.mark.s3, pytest.mark.interop]

ROOT = "data/root"
STORE_S, PROBE_S = 20, 10.0
"""How long the store is waited for, and how long nobody else may wait, on a busy machine."""


def upload(server: Server, root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            server.put(f"{ROOT}/{path.relative_to(root)}", path.read_bytes())


def filled(target: Target, server: Server, root: Path, tokens: Mapping[int, int]) -> None:
    """The store, with an array that its own library has written."""
    root.mkdir()
    target.create(root)
    if tokens:
        target.fill(root, target.array(tokens))
    upload(server, root)


def arrived(target: Target, server: Server, root: Path) -> Array:
    """What the store has, as read by a library that is not shardfs."""
    for key, stored_object in server.objects.items():
        if not key.rpartition("/")[2].startswith(".shardfs"):
            path = root / key.removeprefix(f"{ROOT}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored_object.data)
    return next(iter(target.readers.values()))(root)


@contextmanager
def opened(server: Server, tmp_path: Path, index_ttl_s: float = math.inf, /, **words: str) -> Iterator[ShardFileSystem]:
    words = {"journal": str(tmp_path / "journals"), "idle": "3600", "age": "3600", **words}
    fs = ShardFileSystem(
        source="s3://data/root",
        storage_options=server.options(),
        rw=True,
        write_options=words,
        index_ttl=index_ttl_s,
        skip_instance_cache=True,
    )
    try:
        yield fs
    finally:
        fs.close(1)


def test_the_lock_in_the_store_is_gone_before_the_journal_that_it_names(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next mount, which has another journal, would wait until the lock is out of date."""
    target, locks, remove = TARGETS["zarr_end"], list[bool](), places.remove

    def looked(*args: Any) -> None:
        locks.append(f"{ROOT}/.shardfs.lock" in server.objects)
        remove(*args)

    monkeypatch.setattr(places, "remove", looked)
    filled(target, server, tmp_path / "natively", {})
    with opened(server, tmp_path) as fs:
        fs.pipe_file(target.path(0), target.shown(7))
        assert f"{ROOT}/.shardfs.lock" in server.objects
        assert fs.close(STORE_S) == []
    assert locks == [False]
    assert list((tmp_path / "journals").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("name", ["zarr_end", "zarr_start", "zarr_gzip_after", "precomputed_gzip", "n5"])
def test_each_shard_is_put_once(name: str, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = TARGETS[name]
    tokens = {number: 1 + number for number in range(0, len(target.chunks), 2)}
    filled(target, server, tmp_path / "natively", tokens)
    with opened(server, tmp_path) as fs:
        server.requests.clear()
        for number in range(0, len(target.chunks), 3):
            tokens[number] = 1000 + number
            fs.pipe_file(target.path(number), target.shown(tokens[number]))
        removed = next(iter(tokens))
        fs.rm_file(target.path(removed))
        del tokens[removed]
        assert server.requests.count("put_object") == 0
        fs.publish()
        shards = {key for key, numbers in target.shards().items() if any(number % 3 == 0 for number in numbers)}
        assert server.requests.count("put_object") == len(shards)
        assert fs.cat_file(target.path(3)) == target.shown(1003)
        tokens[4] = 2000
        fs.pipe_file(target.path(4), target.shown(2000))  # on top of what we have put ourselves
        fs.publish()
    assert "another writer" not in caplog.text
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()
    assert not any("shardfs" in key for key in server.objects)


@pytest.mark.parametrize("seed", range(2))
def test_on_a_bad_day_all_arrives_once(seed: int, server: Server, tmp_path: Path) -> None:
    """One request in four goes wrong, each in its own way."""
    target, chance = TARGETS["zarr_end"], random.Random(seed)
    tokens, told = dict[int, int](), set[int | None]()
    filled(target, server, tmp_path / "natively", tokens)

    def fault(number: int, name: str) -> str:
        return chance.choice(["lost", "reset", "busy", "cut"]) if chance.random() < 0.25 else ""

    with opened(server, tmp_path) as fs:
        server.fault = fault
        for turn in range(3):
            for number in chance.sample(range(len(target.chunks)), 8):
                tokens[number] = 1 + 100 * turn + number
                fs.pipe_file(target.path(number), target.shown(tokens[number]))
            for _ in range(20):
                try:
                    fs.publish(timeout=120)
                    break
                except OSError as e:
                    told.add(e.errno)
        server.fault = lambda number, name: ""
        fs.publish(timeout=120)
    assert errno.ESTALE not in told
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


class Other:
    """Another program that changes single chunks of the same shards, by conditional requests like ours."""

    def __init__(self, server: Server, target: Target) -> None:
        store = s3_store(server, RetryPolicy(10, 0))
        self._target = target
        self._writer = ObjectWriter(store, S3Objects(store))
        documents = {target.document: server.objects[f"{ROOT}/{target.document}"].data}
        datasets = [f.open("", documents) for f in formats() if target.document in f.documents]
        self._collection: Collection = next(d.collections[0] for d in datasets if d is not None and d.collections)

    def write(self, number: int, token: int) -> None:
        coords, collection = self._target.chunks[number], self._collection
        shard = rewriting.shard_of(collection, coords)

        def make(old: Blob | None) -> Plan | None:
            return StoredShard(collection, shard, old).plan({coords: Put(self._target.shown(token))}, set())

        self._writer.update(rewriting.key(collection, shard), Steps(make))


def test_an_entry_that_leaves_the_object_is_damage_of_a_published_chunk(server: Server, tmp_path: Path) -> None:
    """Its size is not known before it is read. The chunk was written and published here."""
    target = TARGETS["zarr_end"]
    key, numbers = next(iter(target.shards().items()))
    filled(target, server, tmp_path / "natively", {number: 1 + number for number in numbers})
    with opened(server, tmp_path, 0.0) as fs:
        fs.pipe_file(target.path(0), target.shown(100))
        fs.publish(timeout=120)
        chunks = [target.shown(1 + number) for number in numbers]
        server.put(f"{ROOT}/{key}", handmade.zarr_shard(chunks, entries={0: (0, 2**44)}))
        with pytest.raises((OSError, CorruptShardError)):
            fs.cat_file(target.path(0), 0, 1 << 20)
        assert fs.cat_file(target.path(1)) == chunks[1]


# ------------------------------------------------------------------------------------------------ T19: through a mount


PROBE = """
import os, sys, time
kind, path = sys.argv[1:]
began = time.monotonic()
if kind == "list":
    assert os.listdir(path)
elif kind == "read":
    assert open(path, "rb").read()
else:
    with open(path, "wb") as file:
        file.write(bytes(1024))
        file.flush()
        os.fsync(file.fileno())
print(time.monotonic() - began)
"""


def probe(kind: str, path: Path) -> float:
    run = subprocess.run([sys.executable, "-IS", "-c", PROBE, kind, path], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "busy", "reset"])
def test_a_mount_answers_while_the_store_does_not(fault: str, server: Server, tmp_path: Path) -> None:
    """A hung store, one that is busy, one that hangs up. What is here is shown, and safe, as ever; then it is put."""
    need_fuse()
    target, tokens = TARGETS["zarr_end"], {0: 1, 1: 2, 5: 6}
    filled(target, server, tmp_path / "natively", tokens)
    words = [*in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})]
    words += ["-o", f"store_timeout={STORE_S},store_retries=1,idle=0.1"]
    with writable("s3://data/root", tmp_path, *words) as mount:  # type: ignore[arg-type]
        mount.mount()
        chunk = [mount.path / target.path(number) for number in range(8)]
        assert chunk[0].read_bytes() == target.shown(1)
        server.fault = lambda number, name: fault
        for turn in range(3):
            tokens[1] = 100 + turn
            chunk[1].write_bytes(target.shown(tokens[1]))
            times = {
                "root": probe("list", mount.path),
                "dirty": probe("read", chunk[1]),
                "clean": probe("read", chunk[0]),
                "fsync": probe("fsync", mount.path / target.path(1)),
            }
            assert max(times.values()) < PROBE_S, times
            chunk[1].write_bytes(target.shown(tokens[1]))
            time.sleep(0.3)
        start = time.monotonic()
        lazy = subprocess.run(["fusermount3", "-uz", str(mount.path)], timeout=250, check=False)
        assert lazy.returncode == 0
        assert time.monotonic() - start < PROBE_S
        server.fault = lambda number, name: ""
        server.released.set()
        wait_until(lambda: _start_time(mount.pid) is None, 60)  # the daemon ends once all is published
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


@pytest.mark.fuse
@pytest.mark.slow
def test_what_did_not_arrive_arrives_at_the_next_mount(server: Server, tmp_path: Path) -> None:
    need_fuse()
    target = TARGETS["zarr_end"]
    filled(target, server, tmp_path / "natively", {0: 1})
    words = [*in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})]
    words += ["-o", f"store_timeout={STORE_S},store_retries=1,idle=0.1"]
    with writable("s3://data/root", tmp_path, *words) as mount:  # type: ignore[arg-type]
        mount.mount()
        server.fault = lambda number, name: "hang" if name == "put_object" else ""
        (mount.path / target.path(3)).write_bytes(target.shown(4))
        time.sleep(0.5)
        mount.kill()
        mount.clear()
        server.fault = lambda number, name: ""
        server.released.set()
        mount.mount()  # the lock object of the one that was killed is no obstacle: the journal is the same
        assert (mount.path / target.path(3)).read_bytes() == target.shown(4)
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
    assert (arrived(target, server, tmp_path / "after") == target.array({0: 1, 3: 4})).all()
    assert not any("shardfs" in key for key in server.objects)
