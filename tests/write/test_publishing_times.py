"""When shards are published: however often a chunk is written, and whoever has it open."""

from __future__ import annotations

import gzip
import os
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest

from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Job, Publishing
from shardfs.write.stored import digest_of
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.failing_starts import FailingStarts
from tests.suites.shard_format import MemoryBlob
from tests.write.faults import Frozen, hooked
from tests.write.semantics import cases
from tests.write.semantics.calls import InProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.write.writeback import WriteBuffer
    from tests.write.semantics.cases import Place

IDLE_S, AGE_S, NEVER_S = 0.3, 1.0, 600.0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """The array of a source of this kind, below `a`."""
    trees = []

    def make(kind: str) -> Place:
        root = tmp_path / "source"
        handmade.write_files(root, {f"a/{path}": data for path, data in cases.SOURCES[kind]().items()})
        journal = Journal.open(tmp_path / "journal", str(root), limit_bytes=64 << 20)
        tree = open_write_tree(open_tree(str(root)), journal, publishing=Publishing(idle_s=IDLE_S, age_s=AGE_S))
        trees.append(tree)
        calls = InProcess(tree)
        return cases.Place(calls, "a", lambda path: (root / path).read_bytes() if (root / path).exists() else None)

    yield make
    for tree in trees:
        assert tree.close(20) == []


def pending_of(x: Place) -> WriteBuffer:
    pending: WriteBuffer = cast("InProcess", x.calls).tree.pending
    return pending


def test_a_close_stops_the_threads_although_the_journal_cannot_be_synced(tmp_path: Path) -> None:
    root = tmp_path / "source"
    handmade.write_files(root, {f"a/{path}": data for path, data in cases.SOURCES["zarr"]().items()})
    journal = Journal.open(tmp_path / "journal", str(root), limit_bytes=64 << 20, commit_s=0)
    threads = set(threading.enumerate())
    tree = open_write_tree(open_tree(str(root)), journal, publishing=Publishing(idle_s=NEVER_S))
    cases.Place(InProcess(tree), "a", lambda _: None).put("c/3/3", b"last")
    with hooked(Frozen()), pytest.raises(OSError, match="cannot be written to disk"):
        tree.close(600)
    assert not [x for x in set(threading.enumerate()) - threads if x.name.startswith("shardfs-publish")]
    assert tree.close(0) == ["a/c/3/3"]


def test_shards_are_published_one_after_the_other_if_no_second_thread_can_be_started(
    opened: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = opened("zarr")
    FailingStarts(monkeypatch)
    for name in ("c/0/0", "c/3/3"):
        x.put(name, b"abcd")
    pending_of(x).drain("", 60)
    assert b"abcd" in (x.source("c/0/0") or b"")
    assert b"abcd" in (x.source("c/1/1") or b"")


def test_a_chunk_that_is_written_all_the_time_is_published_when_it_is_old(opened: Callable[[str], Place]) -> None:
    x, numbers = opened("zarr"), count()
    pending_of(x).shards.settings = Publishing(idle_s=NEVER_S, age_s=AGE_S)

    def is_published() -> bool:
        x.put("c/3/3", b"%04d" % next(numbers))
        return x.source("c/1/1") is not None

    cases.until(is_published)


def test_a_chunk_that_somebody_holds_open_waits(opened: Callable[[str], Place]) -> None:
    x = opened("zarr")
    with x.opened("c/3/3", cases.NEW) as fd:
        x.calls.write(fd, b"half")
        x.calls.fsync(fd)
        x.put("c/2/2", b"abcd")
        cases.until(lambda: x.source("c/1/1") is not None)
        assert b"half" not in (x.source("c/1/1") or b"")
        x.calls.pwrite(fd, b"full", 0)
    cases.until(lambda: b"full" in (x.source("c/1/1") or b""))


def test_a_complete_shard_is_published_once(opened: Callable[[str], Place]) -> None:
    """Of the chunk that makes it complete it is known last that it is closed."""
    x = opened("zarr")
    pending_of(x).shards.settings = Publishing(idle_s=NEVER_S, age_s=NEVER_S)
    for name in ("c/2/2", "c/2/3", "c/3/2"):
        x.put(name, b"abcd")
    with x.opened("c/3/3", cases.NEW) as fd:
        x.calls.write(fd, b"last")
        x.calls.fsync(fd)
        time.sleep(IDLE_S / 3)
        assert x.source("c/1/1") is None
    cases.until(lambda: x.source("c/1/1") is not None)
    assert b"last" in (x.source("c/1/1") or b"")


def test_a_chunk_that_is_written_while_it_arrives_is_no_conflict(
    opened: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the new version's forerunner lies is noted at the moment at which that counts as published."""
    x, writers = opened("zarr"), list[threading.Thread]()
    real = Job.done

    def done(*args: Any) -> Any:
        outcome = real(*args)
        if not writers and b"abcd" in (x.source("c/1/1") or b""):  # not yet done
            writers.append(threading.Thread(target=x.put, args=("c/3/3", b"next")))
            writers[0].start()
            writers[0].join(0.3)
        return outcome

    monkeypatch.setattr(Job, "done", done)
    pending = pending_of(x)
    pending.shards.settings = Publishing(idle_s=NEVER_S, age_s=NEVER_S)
    x.put("c/3/3", b"abcd")
    x.publish()
    writers[0].join()
    assert pending.backlog.versions["a/c/3/3"].base.digests == (digest_of(MemoryBlob(b"abcd")),)
    x.publish()


def test_names_of_one_chunk_take_turns_while_it_is_published(opened: Callable[[str], Place]) -> None:
    """Plain and compressed, written, read and removed by threads: whoever has written last is right."""
    x, stop, wrong = opened("precomputed"), threading.Event(), list[str]()
    name, written = "s/2-4_0-2_0-2", [b""]

    def read() -> None:
        while not stop.is_set():
            before = written[0]
            try:
                content = x.get(name)
            except OSError as e:
                wrong.append(str(e))
                continue
            if len(content) != 8 or content < before:
                wrong.append(f"{content!r} after {before!r}")

    x.put(name, b"%08d" % 0)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for n in range(1, 120):
        data = b"%08d" % n
        if n % 3:
            x.put(f"{name}.gz", gzip.compress(data))
        else:
            temporary = "s/x.partial"
            x.put(temporary, data)
            x.rename(temporary, name)
        written[0] = data
        if n % 5 == 0:
            x.publish()
    stop.set()
    for thread in readers:
        thread.join()
    assert sorted(set(wrong)) == []
    x.publish()
    assert x.get(name) == b"%08d" % 119
    assert b"%08d" % 119 in (x.source("s/0.shard") or b"")
    assert os.fsdecode(name) == name
