"""No error vanishes: what failed while publishing is told at the next close, and by `flush`.

What was written stays readable, and is published when the cause is gone.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.shards.rewriting import StoredShard
from shardfs.write.publish_shard import Publishing
from tests.waiting import wait_until
from tests.write.engines import TreeFiles, Whole
from tests.write.faults import Args, Calls, Function, hooked
from tests.write.oracle import found_by
from tests.write.targets import LAYOUTS, TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.model.shard_format import Put

TARGET = TARGETS["zarr_end"]


class Broken(Calls):
    """Calls of this name fail until it is mended."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.mended = name, False

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if name == self.name and not self.mended:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return function(*args)


@pytest.fixture
def broken() -> Iterator[Broken]:
    hook = Broken("exchange")
    with hooked(hook):
        yield hook


@pytest.fixture
def files(tmp_path: Path, broken: Broken) -> Iterator[TreeFiles]:
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    TARGET.create(tmp_path / "store")
    TARGET.fill(tmp_path / "store", TARGET.array({number: 100 + number for number in range(16)}))
    with Whole(Publishing(idle_s=0.01, age_s=0.01)).open(TARGET, tmp_path / "store", tmp_path / "journal") as opened:
        yield opened
        broken.mended = True


def failed_in_background(files: TreeFiles) -> None:
    """Write a chunk, and wait until it could not be published."""
    files.write(TARGET.path(0), TARGET.shown(1000))
    wait_until(lambda: files.tree.pending.state()["errors"])


def opened(files: TreeFiles, number: int) -> int:
    return files.tree.open(files.tree.resolve(TARGET.path(number)).number, os.O_RDWR)


def told(files: TreeFiles, handle: int) -> int | None:
    try:
        files.tree.flush(handle)
    except OSError as e:
        return e.errno
    return None


def test_who_has_the_file_open_is_told_once(files: TreeFiles) -> None:
    early, other = opened(files, 1), opened(files, 10)
    failed_in_background(files)
    assert [told(files, early), told(files, early)] == [errno.EDQUOT, None]
    assert [told(files, other), told(files, other)] == [errno.EDQUOT, None]  # of the same array, in another shard
    for handle in (early, other):
        files.tree.release(handle)


def test_who_opens_it_later_is_told_unless_somebody_was(files: TreeFiles) -> None:
    failed_in_background(files)
    first = opened(files, 0)
    with pytest.raises(OSError, match="quota") as caught:
        files.tree.fsync(first)
    assert caught.value.errno == errno.EDQUOT
    second = opened(files, 0)
    assert told(files, second) is None
    for handle in (first, second):
        files.tree.release(handle)


def test_flush_tells_it_again_and_again_and_all_is_well_in_the_end(
    files: TreeFiles, broken: Broken, tmp_path: Path
) -> None:
    failed_in_background(files)
    for _ in range(3):
        with pytest.raises(OSError, match="quota"):
            files.publish()
        assert files.read(TARGET.path(0)) == TARGET.shown(1000)
        assert found_by(TARGET, "tensorstore", tmp_path / "store")[0][0] == 100
    broken.mended = True
    files.publish()
    assert files.tree.pending.state()["errors"] == {}
    assert found_by(TARGET, "tensorstore", tmp_path / "store")[0][0] == 1000


def test_the_end_does_not_wait_for_what_only_somebody_can_mend(files: TreeFiles, tmp_path: Path) -> None:
    files.write(TARGET.path(0), TARGET.shown(1000))
    shutil.rmtree(tmp_path / "store/c")
    (tmp_path / "store/c").touch()
    start = time.monotonic()
    files.dead = True  # nobody closes it once more
    assert files.tree.close(60) == [TARGET.path(0)]
    assert time.monotonic() - start < 50


def test_no_close_succeeds_while_another_one_may_still_fail_to_save_the_document(
    files: TreeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, number = files.read("zarr.json") or b"", files.tree.resolve("zarr.json").number
    handles = [files.tree.open(number, os.O_RDWR) for _ in range(2)]
    files.tree.write(handles[0], 0, text)
    files.tree.write(handles[1], len(text), b"\n")
    saving, may_fail = threading.Event(), threading.Event()

    def write(*_: object, **__: object) -> None:
        saving.set()
        assert may_fail.wait(60)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.tree.documents, "write", write)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(told, files, handles[0])
        assert saving.wait(60)
        second = pool.submit(told, files, handles[1])
        assert not wait([second], 0.2).done
        may_fail.set()
        assert [first.result(60), second.result(60)] == [errno.EDQUOT, errno.EDQUOT]
    monkeypatch.undo()
    for handle in handles:
        assert told(files, handle) is None
        files.tree.release(handle)
    assert files.read("zarr.json") == text + b"\n"


def test_a_journal_that_is_damaged_meanwhile_is_no_bug(
    files: TreeFiles, broken: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed_in_background(files)
    (segment,) = (tmp_path / "journal").glob("*.wal")
    data = bytearray(segment.read_bytes())
    data[data.index(TARGET.shown(1000))] ^= 1
    with open(segment, "r+b") as file:
        file.write(data)
    broken.mended = True
    with pytest.raises(OSError, match="a record of the journal is damaged"):
        files.publish()
    assert found_by(TARGET, "tensorstore", tmp_path / "store")[0][0] == 100
    assert "bug" not in caplog.text


@pytest.mark.parametrize("name", ["zarr_end", "zarr_crc", "zarr_zstd", "one_shard_as_zarr2", "big_as_n5"])
def test_chunks_that_a_wrong_plan_exchanges_are_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they have the same size and the same CRC-32C, as all bytes have that end in their own one."""
    target = (TARGETS | LAYOUTS)[name]
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    target.create(tmp_path / "store")
    before = target.array({number: 100 + number for number in range(len(target.chunks))})
    target.fill(tmp_path / "store", before)
    plan, (one, other, *_) = StoredShard.plan, next(iter(target.shards().values()))

    def wrong(stored_shard: StoredShard, puts: dict[Any, Put], *args: Any, **options: Any) -> Any:
        return plan(stored_shard, dict(zip(puts, reversed(puts.values()), strict=True)), *args, **options)

    with Whole().open(target, tmp_path / "store", tmp_path / "journal") as files:
        files.write(target.path(one), target.shown(1000))
        files.write(target.path(other), target.shown(1001))
        with monkeypatch.context() as patched:
            patched.setattr(StoredShard, "plan", wrong)
            with pytest.raises(OSError, match="the new shard would not have"):
                files.publish()
            assert (target.readers["tensorstore"](tmp_path / "store") == before).all()
        files.publish()
    tokens = {number: 100 + number for number in range(len(target.chunks))} | {one: 1000, other: 1001}
    assert (target.readers["tensorstore"](tmp_path / "store") == target.array(tokens)).all()


class Flipped(Calls):
    """The first byte of each new shard changes when it is written."""

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        count = function(*args)
        if name in ("pwrite", "copy_file_range"):
            fd, at = (args[1], args[4]) if name == "copy_file_range" else (args[0], args[2])
            if at == 0 and ".shardfs-" in os.readlink(f"/proc/self/fd/{fd}"):
                with open(f"/proc/self/fd/{fd}", "r+b") as file:
                    first = file.read(1)[0]
                    file.seek(0)
                    file.write(bytes([first ^ 1]))
        return count


def test_a_bit_that_changes_on_its_way_into_the_shard_is_found(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    TARGET.create(tmp_path / "store")
    with Whole().open(TARGET, tmp_path / "store", tmp_path / "journal") as files:
        files.write(TARGET.path(0), TARGET.shown(1000))
        with hooked(Flipped()), pytest.raises(OSError, match="the new shard would not have"):
            files.publish()
        assert found_by(TARGET, "tensorstore", tmp_path / "store")[0][0] is None
        files.publish()
    assert found_by(TARGET, "tensorstore", tmp_path / "store")[0][0] == 1000
