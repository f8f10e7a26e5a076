"""What is open, and not in the journal yet, is given another name: it goes there with that (docs/decisions/0018)."""

from __future__ import annotations

import errno
import gzip
import json
import os
import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.vfs.tree import open_tree
from shardfs.write import buffers
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.write.engines import NEVER, TreeFiles, Whole, mounted
from tests.write.targets import TARGETS, described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TARGET = TARGETS["zarr_end"]
CHUNK = TARGET.path(0)
LOCK = f"{CHUNK}.__lock"
OLD, NEW, NEWER = (TARGET.shown(token) for token in (1, 2, 3))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    TARGET.create(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def files(tmp_path: Path, source: Path) -> Iterator[TreeFiles]:
    with Whole().open(TARGET, source, tmp_path / "journal") as opened:
        yield opened


@pytest.fixture
def remote(tmp_path: Path, source: Path) -> Iterator[TreeFiles]:
    """Of an object store."""
    url = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/zarr.json", (source / "zarr.json").read_bytes())
    journal = Journal.open(tmp_path / "journal", url, limit_bytes=2 << 20, commit_s=0)
    publishing = Publishing(idle_s=NEVER, age_s=NEVER)
    files = TreeFiles(open_write_tree(open_tree(url), journal, publishing=publishing), journal)
    yield files
    assert files.tree.close(20) == []


def unsaved(files: TreeFiles, path: str, data: bytes) -> int:
    """A handle of a file that was written, and not closed."""
    _, handle = files.tree.create(*files._parent(path, make=True), os.O_RDWR | os.O_CREAT, 0o644)
    files.tree.truncate(files.tree.resolve(path).number, 0, handle)
    files.tree.write(handle, 0, data)
    return handle


def close(files: TreeFiles, handle: int) -> None:
    try:
        files.tree.flush(handle)
    finally:
        files.tree.release(handle)


# ------------------------------------------------------------------------------------------------- while it is saved


class WatchedLock:
    """The lock of an open file. `met`: a thread waits for it, or needs it no more."""

    def __init__(self) -> None:
        self._lock, self.met = threading.RLock(), threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if not self._lock.acquire(blocking=False):
            if not blocking:
                return False
            self.met.set()
            self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Meanwhile:
    """At the first call of `place.name`, does another call in another thread, as far as the open file's lock allows."""

    def __init__(self, files: TreeFiles, path: str, place: Any, name: str, other: Callable[[], object]) -> None:
        self._other, self._lock, self._was = other, WatchedLock(), getattr(place, name)
        self._thread = threading.Thread(target=self._run_other, daemon=True)
        self._failures: list[BaseException] = []
        files.tree._descriptions._files.at(path).writeback = self._lock  # type: ignore[union-attr]
        setattr(place, name, self._call)

    def _call(self, *args: Any) -> Any:
        if self._thread.ident is not None:
            return self._was(*args)
        after = self._was.__name__ == "rename"  # the old name is gone from the store, and not yet from the mount
        result = self._was(*args) if after else None
        self._thread.start()
        assert self._lock.met.wait(60)
        return result if after else self._was(*args)

    def _run_other(self) -> None:
        self._run(self._other)
        self._lock.met.set()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as e:  # noqa: BLE001 - raised by `end`
            self._failures.append(e)

    def end(self, call: Callable[[], object]) -> None:
        """Do `call`, and wait for both calls. Raise the errors of both."""
        thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        thread.start()
        for waited in (thread, self._thread):
            waited.join(20)
            assert not waited.is_alive(), "each waits for the other"
        for failure in self._failures:
            raise failure


def test_a_remote_file_that_is_closed_while_it_is_renamed_is_saved_under_its_new_name(remote: TreeFiles) -> None:
    handle = unsaved(remote, "README", OLD)
    remote.tree.flush(handle)

    def write_and_close() -> None:
        remote.tree.write(handle, 0, NEW)
        close(remote, handle)

    meanwhile = Meanwhile(remote, "README", remote.tree._descriptions._writer, "rename", write_and_close)
    meanwhile.end(lambda: remote.rename("README", "NEWS"))
    assert (remote.read("README"), remote.read("NEWS")) == (None, NEW)


@pytest.mark.parametrize("call", ["replace", "unlink", "chunk"])
def test_a_remote_file_that_loses_its_name_while_it_is_closed_does_not_come_back(call: str, remote: TreeFiles) -> None:
    remote.write("NEWS", NEWER)
    handle = unsaved(remote, "README", NEW)
    calls: dict[str, Callable[[], object]] = {
        "replace": lambda: remote.rename("NEWS", "README"),
        "unlink": lambda: remote.unlink("README"),
        "chunk": lambda: remote.rename("README", CHUNK),
    }
    meanwhile = Meanwhile(remote, "README", remote.tree._descriptions._writer, "put", calls[call])
    meanwhile.end(lambda: close(remote, handle))
    assert remote.read("README") == (NEWER if call == "replace" else None)
    assert remote.read(CHUNK) == (NEW if call == "chunk" else None)


def test_a_temporary_file_that_is_closed_while_it_becomes_a_remote_file(remote: TreeFiles, tmp_path: Path) -> None:
    handle = unsaved(remote, LOCK, OLD)

    def write_and_close() -> None:
        remote.tree.write(handle, 0, NEW)
        close(remote, handle)

    meanwhile = Meanwhile(remote, LOCK, remote.tree._descriptions._writer, "put", write_and_close)
    meanwhile.end(lambda: remote.rename(LOCK, "README"))
    assert remote.read("README") == NEW
    assert not fsspec.filesystem("memory").exists(f"/{tmp_path.name}/{LOCK}")


@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_a_document_that_loses_its_name_while_it_is_closed_is_not_stored_later(
    call: str, files: TreeFiles, source: Path
) -> None:
    before = files.read("zarr.json") or b""
    first, last = (described(before, TARGET, number) for number in (7, 8))
    files.write("zarr.json.tmp", last)
    handle = unsaved(files, "zarr.json", first)
    calls: dict[str, Callable[[], object]] = {
        "replace": lambda: files.rename("zarr.json.tmp", "zarr.json"),
        "unlink": lambda: files.unlink("zarr.json"),
    }
    Meanwhile(files, "zarr.json", files.tree.pending, "drain", calls[call]).end(lambda: close(files, handle))
    if call == "replace":
        assert json.loads(files.read("zarr.json") or b"") == json.loads(last)
        assert json.loads((source / "zarr.json").read_bytes())["attributes"] == json.loads(last)["attributes"]
    else:
        assert files.read("zarr.json") is None
        assert not (source / "zarr.json").exists()


def test_a_document_is_renamed_twice_while_it_is_closed(files: TreeFiles, source: Path) -> None:
    text = described(files.read("zarr.json") or b"", TARGET, 7)
    handle = unsaved(files, "zarr.json", text)

    def rename() -> None:
        files.rename("zarr.json", "README")
        files.rename("README", "NEWS")

    Meanwhile(files, "zarr.json", files.tree.pending, "drain", rename).end(lambda: close(files, handle))
    assert files.read("NEWS") == (source / "NEWS").read_bytes()
    assert json.loads((source / "NEWS").read_bytes()) == json.loads(text)
    assert not (source / "zarr.json").exists()


def test_a_directory_is_renamed_while_a_document_in_it_is_closed(tmp_path: Path) -> None:
    group, changed = (b'{"zarr_format": 3, "node_type": "group", "attributes": {"a": %d}}' % a for a in (1, 2))
    (tmp_path / "root/g/array").mkdir(parents=True)
    TARGET.create(tmp_path / "root/g/array")
    for directory in ("root", "root/g"):
        (tmp_path / directory / "zarr.json").write_bytes(group)
    with Whole().open(TARGET, tmp_path / "root", tmp_path / "journal") as files:
        handle = unsaved(files, "g/zarr.json", changed)
        meanwhile = Meanwhile(files, "g/zarr.json", files.tree.pending, "drain", lambda: files.rename("g", "h"))
        meanwhile.end(lambda: close(files, handle))
        assert files.read("h/zarr.json") == changed
    assert (tmp_path / "root/h/zarr.json").read_bytes() == changed
    assert not (tmp_path / "root/g").exists()


# ------------------------------------------------------------------------------------------------- what it becomes


@pytest.mark.parametrize("new", [CHUNK, "c/0/99"])
@pytest.mark.parametrize("before", [None, OLD])
@pytest.mark.parametrize("data", [NEW, b""])
@pytest.mark.parametrize("spill", [buffers.SPILL, 10])
def test_it_survives_a_kill_with_its_new_name(
    new: str, before: bytes | None, data: bytes, spill: int, tmp_path: Path, source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A chunk, or what is outside the grid; whether or not the journal has an earlier version of the lock."""
    monkeypatch.setattr(buffers, "SPILL", spill)
    with Whole().open(TARGET, source, tmp_path / "journal") as files:
        if before is not None:
            files.write(LOCK, before)
        handle = unsaved(files, LOCK, data)
        files.rename(LOCK, new)
        files.tree.write(handle, 0, b"never closed")
        files.die()
    with Whole().open(TARGET, source, tmp_path / "journal") as files:
        assert files.read(new) == data
        assert files.read(LOCK) is None


@pytest.mark.parametrize("present", [None, "", ".gz"])
def test_it_becomes_a_compressed_chunk(present: str | None, tmp_path: Path) -> None:
    """In place of none, of a stored one, or of another one; each is still open."""
    target = TARGETS["precomputed"]
    (tmp_path / "source").mkdir()
    target.create(tmp_path / "source")
    chunk, data = target.path(0), gzip.compress(target.shown(2), mtime=0)
    with Whole().open(target, tmp_path / "source", tmp_path / "journal") as files:
        if present is not None:
            unsaved(files, chunk + present, b"replaced")
        handle = unsaved(files, f"{chunk}.gz.__lock", data)
        files.rename(f"{chunk}.gz.__lock", f"{chunk}.gz")
        assert files.read(f"{chunk}.gz") is None
        if present != "":  # a program that writes the chunk itself sees its own bytes
            assert files.read(chunk) == target.shown(2)
        with pytest.raises(OSError, match="Stale"):
            files.tree.write(handle, 0, b"more")
        close(files, handle)
        files.die()
    with Whole().open(target, tmp_path / "source", tmp_path / "journal") as files:
        assert (files.read(f"{chunk}.gz"), files.read(chunk)) == (None, target.shown(2))
        files.publish()
        assert files.read(chunk) == target.shown(2)


def test_it_becomes_a_document(files: TreeFiles, source: Path) -> None:
    text = described((source / "zarr.json").read_bytes(), TARGET, 7)
    handle = unsaved(files, "zarr.json.__lock", text)
    files.tree.fsync(handle)
    files.rename("zarr.json.__lock", "zarr.json")
    assert (source / "zarr.json").read_bytes() == files.read("zarr.json") == text
    close(files, handle)
    assert files.tree.left() == []


@pytest.mark.parametrize("store", ["files", "remote"])
def test_it_becomes_a_file_of_the_source(store: str, request: pytest.FixtureRequest) -> None:
    files: TreeFiles = request.getfixturevalue(store)
    handle = unsaved(files, "README.tmp", b"12345")
    files.rename("README.tmp", "README")
    files.tree.write(handle, 5, b"678")
    close(files, handle)
    assert files.read("README") == b"12345678"


@pytest.mark.parametrize("name", ["zarr.json.tmp", CHUNK])
def test_an_open_document_becomes_another_file(name: str, files: TreeFiles) -> None:
    text = files.read("zarr.json")
    assert text is not None
    handle = unsaved(files, "zarr.json", text)
    files.rename("zarr.json", name)
    assert files.read(name) == text
    close(files, handle)
    assert files.read(name) == text


@pytest.mark.parametrize("store", ["files", "remote"])
def test_an_open_file_of_the_source_becomes_a_chunk(store: str, request: pytest.FixtureRequest) -> None:
    files: TreeFiles = request.getfixturevalue(store)
    handle = unsaved(files, "README", NEW)
    files.rename("README", CHUNK)
    assert (files.read(CHUNK), files.read("README")) == (NEW, None)
    close(files, handle)
    assert (files.read(CHUNK), files.read("README")) == (NEW, None)


def test_it_waits_for_room_in_the_journal(files: TreeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the journal has an earlier version of it."""
    asked: list[int] = []
    files.write(LOCK, b"short")
    handle = unsaved(files, LOCK, NEW)
    monkeypatch.setattr(files.tree.pending, "make_room", asked.append)
    files.rename(LOCK, CHUNK)
    assert asked == [len(NEW)]
    close(files, handle)


# ------------------------------------------------------------------------------------------------- what comes between


def flush(files: TreeFiles, handle: int) -> bytes:
    files.tree.flush(handle)
    return NEW


def sync(files: TreeFiles, handle: int) -> bytes:
    files.tree.fsync(handle)
    return NEW


def release(files: TreeFiles, handle: int) -> bytes:
    files.tree.release(handle)
    return NEW


def write(files: TreeFiles, handle: int) -> bytes:
    files.tree.write(handle, 0, NEWER)
    return NEWER


def flush_and_write(files: TreeFiles, handle: int) -> bytes:
    files.tree.flush(handle)
    return write(files, handle)


def cut(files: TreeFiles, _handle: int) -> bytes:
    files.tree.truncate(files.tree.resolve(LOCK).number, 5, None)
    return NEW[:5]


def publish(files: TreeFiles, _handle: int) -> bytes:
    files.publish()
    return NEW


def unlink(files: TreeFiles, _handle: int) -> bytes:
    files.unlink(CHUNK)
    return NEW


def replace(files: TreeFiles, _handle: int) -> bytes:
    files.write(f"{CHUNK}.partial", NEWER)
    files.rename(f"{CHUNK}.partial", CHUNK)
    return NEW


def while_renaming(files: TreeFiles, call: str, do: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Rename the lock to the chunk, and do something else right before a call that is made with no lock held; what
    that returns."""
    called, values = getattr(files.tree.pending, call), list[bytes]()

    def calling(*arguments: Any) -> Any:
        if not values:
            values.append(b"")
            values[0] = do()
        return called(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files.tree.pending, call, calling)
        files.rename(LOCK, CHUNK)
    (value,) = values
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("call", "spill"), [("make_room", buffers.SPILL), ("predecessor", 10)])
@pytest.mark.parametrize("former", ["pending", "stored", "open"])
@pytest.mark.parametrize("do", [flush, sync, release, write, flush_and_write, cut, publish, unlink, replace])
def test_between(
    do: Callable[[TreeFiles, int], bytes], former: str, call: str, spill: int, tmp_path: Path, source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The chunk that is replaced is pending, or stored, or written to as well."""
    monkeypatch.setattr(buffers, "SPILL", spill)
    with Whole().open(TARGET, source, tmp_path / "journal") as files:
        files.write(CHUNK, OLD)
        if former == "stored":
            files.publish()
        other = unsaved(files, CHUNK, NEWER) if former == "open" else None
        handle = unsaved(files, LOCK, NEW)
        wanted = while_renaming(files, call, partial(do, files, handle), monkeypatch)
        assert (files.read(CHUNK), files.read(LOCK)) == (wanted, None)
        for opened in (other, None if do is release else handle):
            if opened is not None:
                close(files, opened)
        assert files.read(CHUNK) == wanted
        files.publish()
        assert files.read(CHUNK) == wanted
        files.die()
    with Whole().open(TARGET, source, tmp_path / "journal") as files:
        assert (files.read(CHUNK), files.read(LOCK)) == (wanted, None)


@pytest.mark.parametrize("call", ["make_room", "predecessor"])
@pytest.mark.parametrize("before", [None, NEWER])
def test_one_that_cannot_be_kept_between(
    call: str, before: bytes | None, files: TreeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed, and told that there is no room: then it is what it was before, or nothing."""
    files.write(CHUNK, OLD)
    if before is not None:
        files.write(LOCK, before)
    handle = unsaved(files, LOCK, NEW)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    def fails() -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", full)
            with pytest.raises(OSError, match="full"):
                close(files, handle)
        return before or b""

    with nullcontext() if before is not None else pytest.raises(OSError, match="Stale"):
        while_renaming(files, call, fails, monkeypatch)
    assert (files.read(CHUNK), files.read(LOCK)) == (before or OLD, None)
    files.publish()
    assert files.read(CHUNK) == (before or OLD)


@pytest.mark.parametrize("size", [2, 4, 9])
def test_a_file_that_is_replaced_between_look_up_and_open(size: int, tmp_path: Path) -> None:
    """The kernel looks up the name once more, and finds a file that is replaced, too, before it is opened."""
    handmade.write_json(tmp_path / "a/zarr.json", handmade.zarr_metadata((8, 8), (4, 4), (2, 2)))
    with mounted(tmp_path / "a", tmp_path / "journal") as files:
        files.write("c/0/0", b"1111")
        number = files.tree.resolve("c/0/0").number
        files.tree.remember(number)
        resized = list[int]()
        files.tree.hooks.reshaped = lambda numbers: resized.extend(numbers.tolist())
        for publish in (False, True):
            new = b"23"[publish : publish + 1] * size
            files.write("c/0/x.partial", new)
            files.rename("c/0/x.partial", "c/0/0")
            if publish:
                files.publish()
            resized.clear()
            handle = files.tree.open(number, os.O_RDONLY)
            assert files.tree.read(number, 0, 99) == new
            assert files.tree.attributes(number).size == size
            assert resized == [number]
            files.tree.release(handle)
        files.unlink("c/0/0")
        with pytest.raises(OSError, match="Stale"):
            files.tree.open(number, os.O_RDONLY)
