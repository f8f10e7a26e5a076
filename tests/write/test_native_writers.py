"""Other programs write the very shards that we update: tensorstore with its locks, others by rename without any."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.blobs import Blob, Plan, Suffix
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
from tests.write.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.model.blobs import Stat

pytestmark = pytest.mark.interop

CHUNKS, ELEMENTS = 64, 16

NATIVE = """
import sys
import numpy as np
import tensorstore as ts
locking = {"file_io_locking": {"mode": sys.argv[3]}}
array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": sys.argv[1]}, "context": locking}).result()
for number in range(int(sys.argv[2])):
    chunk = 2 * (number % 32)
    array[16 * chunk : 16 * (chunk + 1)].write(np.full(16, number + 1, "<i4")).result()
"""

ZARR = """
import sys
import numpy as np
import zarr
array = zarr.open_array(sys.argv[1], mode="r+")
for number in range(int(sys.argv[2])):
    chunk = 2 * (number % 32)
    array[16 * chunk : 16 * (chunk + 1)] = np.full(16, number + 1, "<i4")
"""

COUNTER = """
import sys
import tensorstore as ts
locking = {"file_io_locking": {"mode": sys.argv[3]}}
store = ts.KvStore.open({"driver": "file", "path": sys.argv[1], "context": locking}).result()
for _ in range(int(sys.argv[2])):
    while True:
        old = store.read("shard").result()
        n = int(old.value) if old.state == "value" else 0
        stamp = store.write("shard", str(n + 1).encode(), if_equal=old.stamp.generation).result()
        if stamp.generation:
            break
"""

RENAMER = """
import json, os, sys, time
path = sys.argv[1] + "/shard"
for number in range(1, int(sys.argv[2]) + 1):
    found = json.load(open(path)) if os.path.exists(path) else {}
    with open(path + ".partial", "w") as f:
        json.dump(found | {"theirs": number}, f)
    os.rename(path + ".partial", path)
    time.sleep(0.002 * (number % 2))
"""


tensorstore_modes = pytest.mark.parametrize(("lock", "rounds", "pause"), [("os", 200, 0.0), ("lockfile", 30, 0.02)])
"""`file_io_locking` of tensorstore: a lock on the lock file, or its mere existence, for which tensorstore looks once a
second only. So our pause is outside of the lock."""

Native = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def native() -> Iterator[Native]:
    """Starts a program, which ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


class Mixed:
    """Counts our updates, and how many of them found a version that was not our own."""

    def __init__(self, pause: float = 0.0) -> None:
        self.rounds = self.foreign = 0
        self._pause = pause
        self._last: object = None

    def noted(self, make: Callable[[Blob | None], Plan]) -> Callable[[Blob | None], Plan]:
        def make_and_look(old: Blob | None) -> Plan:
            foreign = old is not None and old.stat().version != self._last
            self.foreign += foreign
            if not foreign and not self._pause:
                time.sleep(0.001)  # that the others have their turn, on a busy machine, too
            return make(old)

        return make_and_look

    def note(self, stat: Stat | None) -> None:
        self.rounds += 1
        self._last = None if stat is None else stat.version
        time.sleep(self._pause)


def sharded_array(path: Path) -> None:
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    inner = {"chunk_shape": [ELEMENTS], "codecs": index[:1], "index_codecs": index}
    metadata = {
        "shape": [CHUNKS * ELEMENTS],
        "data_type": "int32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [CHUNKS * ELEMENTS]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    kvstore = {"driver": "file", "path": str(path)}
    ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}, create=True).result()


def last_rounds(count: int) -> list[int]:
    """The last of `count` rounds in which each of 32 chunks was written; -1 for those that are still zeros."""
    return [max((n for n in range(count) if n % 32 == i), default=-1) for i in range(32)]


@tensorstore_modes
def test_tensorstore_counts_along(lock: str, rounds: int, pause: float, native: Native, tmp_path: Path) -> None:
    """Conditional writes of tensorstore's key-value store on the same object: the sum is exact."""

    def count(old: Blob | None) -> Plan:
        return [str(int(old.read([Suffix(99)])[0]) + 1 if old is not None else 1).encode()]

    writer, mixed, theirs = LocalWriter(LocalStore(str(tmp_path))), Mixed(pause), 0
    while mixed.foreign <= rounds // 10:
        processes = [native(COUNTER, f"{tmp_path}/", rounds // 2, lock) for _ in range(2)]
        while None in [other.poll() for other in processes] or mixed.rounds < rounds:
            mixed.note(writer.update("shard", Steps(mixed.noted(count))))
        assert [other.returncode for other in processes] == [0, 0]
        theirs += rounds // 2 * 2
    assert int((tmp_path / "shard").read_bytes()) == theirs + mixed.rounds


def test_who_renames_without_a_lock_loses_nothing_to_us(
    native: Native, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may overwrite us, since they do not look; we never overwrite them.

    Who replaces it twice while we take one step finds the earlier version beside it, as the log says.
    """

    def with_ours(number: int) -> Callable[[Blob | None], Plan]:
        def make(old: Blob | None) -> Plan:
            found: dict[str, Any] = json.loads(old.read([Suffix(999)])[0]) if old is not None else {}
            seen.append(found.get("theirs", 0))
            return [json.dumps(found | {"ours": number}).encode()]

        return make

    seen: list[int] = []
    writer = LocalWriter(LocalStore(str(tmp_path)))
    other = native(RENAMER, tmp_path, 200)
    rounds = 0
    while other.poll() is None or rounds < 200:
        rounds += 1
        writer.update("shard", Steps(with_ours(rounds)))
    assert other.returncode == 0
    rounds += 1
    writer.update("shard", Steps(with_ours(rounds)))  # they may have overwritten the one before
    assert seen == sorted(seen)
    assert json.loads((tmp_path / "shard").read_bytes()) == {"theirs": 200, "ours": rounds}
    beside = {p.name for p in tmp_path.iterdir()} - {"shard"}
    for name in beside:
        assert f"The earlier version is in {name}" in caplog.text


@pytest.mark.parametrize(
    ("program", "lock", "goal"),
    [(NATIVE, "os", 200), (NATIVE, "lockfile", 30), (ZARR, "", 200)],
    ids=["tensorstore-os", "tensorstore-lockfile", "zarr-python"],
)
def test_the_engine_loses_nothing_of_theirs(
    program: str, lock: str, goal: int, native: Native, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even chunks are theirs, odd ones go through the journal, published every time.

    zarr-python reads shards and writes them whole, without locks: what we published meanwhile is lost to it. If it
    puts an older chunk back into the place of one that we are about to write again, that is a conflict.
    """
    root, rounds = tmp_path / "array", 0
    sharded_array(root)
    settings = {"journal": str(tmp_path / "journals"), "conflict": "fail" if program == NATIVE else "ours"}
    fs = ShardFileSystem(source=str(root), rw=True, write_options=settings, skip_instance_cache=True)
    other = native(program, root, goal, lock)
    while other.poll() is None or rounds < goal:
        chunk = 2 * (rounds % 32) + 1
        fs.pipe_file(f"c/{chunk}", np.full(ELEMENTS, -1 - rounds, "<i4").tobytes())
        fs.publish(timeout=120)
        rounds += 1
        if lock == "lockfile":
            time.sleep(0.02)
    assert other.returncode == 0
    assert fs.close(30) == []
    values = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root)}}).result().read().result()
    chunks = np.asarray(values).reshape(CHUNKS, ELEMENTS).tolist()
    theirs, ours = (last_rounds(count) for count in (goal, rounds))
    assert chunks[::2] == [[n + 1] * ELEMENTS for n in theirs]
    if program == NATIVE:
        assert chunks[1::2] == [[-1 - n] * ELEMENTS for n in ours]
    copies = set(re.findall(r"earlier version is in (\S+)", caplog.text))  # two of theirs came while we put one back
    assert program == ZARR or not copies, "tensorstore waits for our lock"
    assert {p.name for p in (root / "c").iterdir()} == {"0"} | copies
