"""Threads that write, rename and remove chunks of the same shards while these are published all the time.

Each has chunks of its own, and finds them as it left them whenever it looks: by a name, by an open file, in a listing.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.write.files import split
from shardfs.write.pending import HASHES
from shardfs.write.publish_shard import Publishing
from shardfs.write.stored import Stored
from tests.interleaving import interleaved
from tests.write.engines import TreeFiles, Whole
from tests.write.oracle import found_by
from tests.write.scale import times
from tests.write.targets import TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS = ("write/file_calls", "write/journaled", "write/file_kinds")
"""The modules at whose steps another call is made."""

THREADS = 4
SECONDS = 4 * times()
LEAST = 5 * SECONDS
"""Turns of each thread, however slow the machine is."""


class Worker:
    """One thread's chunks, and what they should be."""

    def __init__(self, target: Target, files: TreeFiles, number: int) -> None:
        self.target, self.files = target, files
        self.chance = random.Random(number)
        self.numbers = list(range(number, len(target.chunks), THREADS))
        self.tokens: dict[int, int | None] = {n: 100 + n for n in self.numbers}
        self.token = 1000 + number
        self.turns, self.wrong = 0, ""

    def run(self, end: float) -> None:
        try:
            while time.monotonic() < end or self.turns < LEAST:
                self.turns += 1
                self.chance.choice(
                    [self.write, self.write, self.beside, self.patch, self.unlink, self.swap, self.hold]
                )()
                for number in self.chance.sample(self.numbers, 2):
                    self.look(number)
                if self.turns % 20 == 0:
                    self.list()
        except Exception:  # noqa: BLE001 - whatever it is, the test must hear of it
            self.wrong = traceback.format_exc()

    # ---- what it does ----

    def new(self) -> int:
        self.token += 1000
        return self.token

    def write(self) -> None:
        number = self.chance.choice(self.numbers)
        self.tokens[number] = self.new()
        self.files.write(self.target.path(number), self.target.shown(self.token), sync=self.chance.random() < 0.1)

    def beside(self) -> None:
        number = self.chance.choice(self.numbers)
        path, token = self.target.path(number), self.new()
        self.files.write(f"{path}.{token:032x}.partial", self.target.shown(token))
        self.files.rename(f"{path}.{token:032x}.partial", path)
        self.tokens[number] = token

    def patch(self) -> None:
        number = self.chance.choice(self.numbers)
        if self.tokens[number] is not None:
            self.tokens[number] = self.new()
            self.files.patch(self.target.path(number), 0, self.target.shown(self.token))

    def unlink(self) -> None:
        number = self.chance.choice(self.numbers)
        if self.tokens[number] is not None:
            self.files.unlink(self.target.path(number))
            self.tokens[number] = None

    def swap(self) -> None:
        """Rename one onto another."""
        old, new = self.chance.sample(self.numbers, 2)
        if self.tokens[old] is not None:
            self.files.rename(self.target.path(old), self.target.path(new))
            self.tokens[new], self.tokens[old] = self.tokens[old], None

    def hold(self) -> None:
        """Have it open while it is replaced: the open file stays as it was."""
        number = self.chance.choice(self.numbers)
        token = self.tokens[number]
        if token is None:
            return
        tree, path = self.files.tree, self.target.path(number)
        file_number = tree.resolve(path).number
        tree.remember(file_number)
        handle = tree.open(file_number, os.O_RDONLY)
        self.beside_this(number)
        time.sleep(self.chance.random() * 0.01)
        wanted = self.target.shown(token)
        assert bytes(tree.read(file_number, 0, len(wanted) + 1)) == wanted, f"open file of chunk {number}"
        tree.flush(handle)
        tree.release(handle)
        tree.forget(file_number, 1)

    def beside_this(self, number: int) -> None:
        path, token = self.target.path(number), self.new()
        self.files.write(f"{path}.{token:032x}.partial", self.target.shown(token))
        self.files.rename(f"{path}.{token:032x}.partial", path)
        self.tokens[number] = token

    # ---- what it sees ----

    def look(self, number: int) -> None:
        token = self.tokens[number]
        values = self.files.read(self.target.path(number))
        assert values == (None if token is None else self.target.shown(token)), f"chunk {number}, token {token}"

    def list(self) -> None:
        number = self.chance.choice(self.numbers)
        directory, _, name = self.target.path(number).rpartition("/")
        with suppress(FileNotFoundError):
            parent = self.files.tree.resolve(directory).number
            listed = [os.fsdecode(n) for batch in self.files.tree.scan(parent) for n in batch.names.tolist()]
            assert len(listed) == len(set(listed)), f"listed twice: {sorted(listed)}"
            assert (name in listed) == (self.tokens[number] is not None), f"{name} in {sorted(listed)}"


@pytest.fixture(params=["zarr_end", "zarr_nested", "precomputed_gzip"])
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


@pytest.fixture
def files(target: Target, tmp_path: Path) -> Iterator[TreeFiles]:
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    target.create(tmp_path / "store")
    target.fill(tmp_path / "store", target.array({number: 100 + number for number in range(len(target.chunks))}))
    with Whole(Publishing(idle_s=0.0, age_s=0.005)).open(target, tmp_path / "store", tmp_path / "journal") as opened:
        yield opened


class MeetingLock:
    """A reentrant lock. Before their second use, two threads named `closer` wait for each other."""

    def __init__(self) -> None:
        self._lock, self._meeting, self._uses = threading.RLock(), threading.Barrier(2, timeout=5), Counter[int]()

    def __enter__(self) -> None:
        if threading.current_thread().name == "closer":
            self._uses[threading.get_ident()] += 1
            if self._uses[threading.get_ident()] == 2:
                self._meeting.wait()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("target", [TARGETS["zarr_end"]], ids=["zarr_end"])
def test_two_closes_at_once_save_what_was_written_since_the_last_flush(
    target: Target, files: TreeFiles, tmp_path: Path
) -> None:
    """As data written through a memory mapping, which the kernel sends before it releases the handle."""
    number = files.tree.resolve(target.path(0)).number
    handles = [files.tree.open(number, os.O_RDWR) for _ in range(2)]
    files.tree.write(handles[0], 0, target.shown(7))
    names, lock = files.tree._descriptions._names, MeetingLock()
    names.lock = names.files.by_number[number]._lock = lock  # type: ignore[assignment]
    threads = [threading.Thread(target=files.tree.release, args=(handle,), name="closer") for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert files.read(target.path(0)) == target.shown(7)
    files.publish()
    assert found_by(target, "tensorstore", tmp_path / "store")[0][0] == 7


@pytest.mark.parametrize("target", [TARGETS["zarr_end"]], ids=["zarr_end"])
def test_a_file_is_truncated_while_a_reader_closes_it(target: Target, files: TreeFiles) -> None:
    path = f"{target.path(0)}.partial"
    files.write(path, bytes(5))
    number = files.tree.resolve(path).number
    size = 5

    def truncate() -> None:
        files.tree.truncate(number, size, None)

    def read_and_close() -> None:
        files.tree.release(files.tree.open(number, os.O_RDONLY))

    def lengthen() -> None:
        nonlocal size
        size += 1

    for step in interleaved(truncate, read_and_close, *STEPS, prepare=lengthen):
        assert len(files.read(path) or b"") == size, f"step {step}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", ["close", "rename", "replace", "truncate", "unlink"])
def test_a_close_meets_another_call_at_each_of_its_steps(call: str, tmp_path: Path) -> None:
    """What programs see is what the journal has, and is what one call after the other would leave."""
    target, token, handles = TARGETS["zarr_end"], 1000, [0, 0]
    path, other = target.path(0), target.path(1)
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    target.create(tmp_path / "store")
    with Whole().open(target, tmp_path / "store", tmp_path / "journal") as files:
        tree = files.tree

        def prepare() -> None:
            nonlocal token
            token += 1
            files.write(other, target.shown(1))
            files.write(path, target.shown(2))
            handles[:] = [tree.open(tree.resolve(path).number, os.O_RDWR) for _ in range(2)]
            tree.write(handles[0], 0, target.shown(token))

        def close(handle: int) -> None:
            tree.flush(handle)
            tree.release(handle)

        calls: dict[str, Callable[[], object]] = {
            "close": lambda: close(handles[1]),
            "rename": lambda: files.rename(path, other),
            "replace": lambda: files.rename(other, path),
            "truncate": lambda: tree.truncate(tree.resolve(path).number, 4, None),
            "unlink": lambda: files.unlink(path),
        }
        for step in interleaved(lambda: close(handles[0]), calls[call], *STEPS, prepare=prepare):
            if call != "close":
                close(handles[1])
            expected = {
                "close": (target.shown(token), target.shown(1)),
                "rename": (None, target.shown(token)),
                "replace": (target.shown(1), None),
                "truncate": (target.shown(token)[:4], target.shown(1)),
                "unlink": (None, target.shown(1)),
            }[call]
            versions = tree.pending.backlog.versions
            data = [version and version.data for version in map(versions.get, (path, other))]
            assert (files.read(path), files.read(other)) == expected, f"step {step}"
            assert tuple(part and tree.pending.journal.read(part, 0, part.size) for part in data) == expected, (
                f"step {step}"
            )
        assert step > 100


@pytest.mark.parametrize("replaced", ["another", "its own"])
def test_a_close_reads_a_stored_chunk_again_if_its_own_shard_was_replaced(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, looks, of = TARGETS["zarr_end"], list[object](), Stored.from_target
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    target.create(tmp_path / "store")
    target.fill(tmp_path / "store", target.array({0: 1}))
    with Whole().open(target, tmp_path / "store", tmp_path / "journal") as files:
        pending, path = files.tree.pending, target.path(0)
        chunk = files.tree._descriptions._names.classify_name(*split(path)).target
        assert chunk is not None
        own_key = chunk.tree.shards.key(chunk.tree.shards.number_of(chunk.coords))
        other_key = next(key for key in map(str, count()) if (hash(key) - hash(own_key)) % HASHES)

        def counted(target: Any, *, read: bool) -> Stored:
            looks.append(target)
            return of(target, read=read)

        monkeypatch.setattr(Stored, "from_target", staticmethod(counted))
        predecessor = pending.predecessor(path, chunk)
        pending.backlog.done(own_key if replaced == "its own" else other_key)
        pending.put(predecessor, target.shown(2), 0, 0)
        assert len(looks) == (2 if replaced == "its own" else 1)


@pytest.mark.slow
@pytest.mark.timeout(300 + SECONDS)
def test_each_thread_finds_what_it_wrote(target: Target, files: TreeFiles, tmp_path: Path) -> None:
    workers = [Worker(target, files, number) for number in range(THREADS)]
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=worker.run, args=(end,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 60)
        assert not thread.is_alive()
    assert [worker.wrong for worker in workers if worker.wrong] == []
    files.publish()
    assert files.tree.pending.state()["published_shards"] > 0
    assert files.tree.pending.state()["conflicts"] == 0
    for worker in workers:
        for number in worker.numbers:
            worker.look(number)
    present, torn = found_by(target, "tensorstore", tmp_path / "store")
    assert torn == []
    wanted = {number: token for worker in workers for number, token in worker.tokens.items()}
    assert {number: present[number] for number in wanted} == wanted
