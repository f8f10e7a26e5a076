"""Threads that write, rename, remove and publish one file leave, in each order, what one call after the other leaves.

Programs see that through the mount, the journal has it, and native readers find it in the store.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.storage import syscalls
from shardfs.storage.retry import RetryPolicy
from shardfs.vfs.tree import open_tree
from shardfs.write.files import split
from shardfs.write.journal import Journal
from shardfs.write.pending import HASHES
from shardfs.write.publish_shard import Publishing
from shardfs.write.stored import Stored
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.scheduling import explore, explore_outcomes
from tests.virtual_threads import install, monotonic
from tests.write import bugs
from tests.write.engines import NEVER, TreeFiles, Whole
from tests.write.oracle import found_by
from tests.write.scale import times
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from pathlib import Path

    from tests.scheduling import Schedule

TARGET = TARGETS["zarr_end"]
PATH, OTHER, THIRD = (TARGET.path(number) for number in (0, 1, 4))
"""Chunks of one shard."""

SHARD = TARGET.shard_key(TARGET.chunks[0])

STEPS = ("write/file_calls", "write/journaled", "write/file_kinds")
"""The modules at whose steps another thread goes on."""

PREEMPTIONS = 1 + (times() > 1)

HANDLES = {"close": 0, "unmap": 0, "sync": 0, "rename open": 0, "close the other": 1, "unmap the other": 1, "write": 1}
"""Which of two handles of `PATH` a call uses. The first one has written what no close has saved yet."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("fsync", "fdatasync", "fsync_directory"):  # no test here ends the machine
        monkeypatch.setattr(syscalls, name, lambda *_: None)


@contextmanager
def local(tmp_path: Path) -> Iterator[TreeFiles]:
    (tmp_path / "store").mkdir()
    (tmp_path / "journal").mkdir(mode=0o700)
    TARGET.create(tmp_path / "store")
    TARGET.fill(tmp_path / "store", TARGET.array({0: 8, 1: 9}))
    with Whole().open(TARGET, tmp_path / "store", tmp_path / "journal") as files:
        yield files


def stored(tmp_path: Path, key: str, *, is_remote: bool) -> bytes | None:
    """The bytes of an object of `local` or `remote`."""
    if is_remote:
        file = fsspec.filesystem("memory").store.get(f"/{tmp_path.name}/{key}")
        return None if file is None else bytes(file.getvalue())
    path = tmp_path / "store" / key
    return path.read_bytes() if path.exists() else None


@contextmanager
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TreeFiles]:
    """Of an object store, whose requests are made in the thread that asks for them."""
    monkeypatch.setattr(RetryPolicy, "run", lambda _self, _kind, method, *args, **named: method(*args, **named))
    with local(tmp_path):
        pass
    url = f"memory://{tmp_path.name}"
    for path in (TARGET.document, SHARD):
        fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{path}", (tmp_path / "store" / path).read_bytes())
    journal = Journal.open(tmp_path / "remote", url, limit_bytes=2 << 20, commit_s=0)
    files = TreeFiles(
        open_write_tree(open_tree(url), journal, publishing=Publishing(idle_s=NEVER, age_s=NEVER)), journal
    )
    yield files
    files.tree.pending.close(0)


def publish(files: TreeFiles) -> None:
    """Publish all that can be, in this thread."""
    pending = files.tree.pending
    pending.shards.ask()
    while (shard := pending.shards.next(monotonic())[0]) is not None:
        try:
            pending.publisher.publish(shard)
        finally:
            pending.shards.release(shard)


class Scene:
    """Files, and calls on one of them by their names.

    `answers` has what each call returned, or the number of its error.
    """

    def __init__(self, files: TreeFiles, names: Sequence[str], path: str = PATH, other: str = OTHER) -> None:
        self.files, self.tree, self.path, self.other = files, files.tree, path, other
        for name in (path, other):
            if files.read(name) is not None:
                files.unlink(name)
        files.write(other, TARGET.shown(1))
        files.write(path, TARGET.shown(2))
        self.number = self.tree.resolve(path).number
        self.answers: dict[str, object] = {}
        self.handles = {
            handle: self.tree.open(self.number, os.O_RDWR)
            for handle in sorted({HANDLES[name] for name in names if name in HANDLES})
        }
        if 0 in self.handles:
            self.tree.write(self.handles[0], 0, TARGET.shown(3))

    def calls(self, name: str) -> list[Callable[[], object]]:
        """The calls of a thread."""
        files, tree, path, other = self.files, self.tree, self.path, self.other
        handle = HANDLES.get(name, 2)
        calls: dict[str, list[Callable[[], object]]] = {
            "close": [partial(self.flush, handle), partial(self.release, handle)],
            "unmap": [partial(self.release, handle)],  # the kernel has sent what was stored through a mapping
            "write": [lambda: tree.write(self.handles[handle], 4, b"word"), partial(self.flush, handle),
                      partial(self.release, handle)],
            "sync": [lambda: tree.fsync(self.handles[handle])],
            "truncate": [lambda: tree.truncate(self.number, 4, None)],
            "read": [partial(self.open, os.O_RDONLY), lambda: bytes(tree.read(self.number, 0, 1 << 20)),
                     partial(self.release, 2)],
            "rewrite": [partial(self.open, os.O_WRONLY | os.O_TRUNC),
                        lambda: tree.write(self.handles[2], 0, TARGET.shown(5)), partial(self.flush, 2),
                        partial(self.release, 2)],
            "write beside": [partial(files.write, THIRD, TARGET.shown(6))],
            "rename": [lambda: files.rename(path, other)],
            "replace": [lambda: files.rename(other, path)],
            "unlink": [lambda: files.unlink(path)],
            "publish": [lambda: publish(files)],
        }  # fmt: skip
        chosen = calls[name.removesuffix(" the other").removesuffix(" open")]
        return [partial(self._answer, f"{name} {number}", call) for number, call in enumerate(chosen)]

    def _answer(self, name: str, call: Callable[[], object], *, again: bool = True) -> None:
        try:
            self.answers[name] = call()
        except OSError as e:
            self.answers[name] = e.errno
            if again and e.errno == errno.ESTALE and name.startswith(("rename", "replace")):  # as the kernel does
                self._answer(name, call, again=False)

    def open(self, flags: int) -> None:
        self.handles[2] = self.tree.open(self.number, flags)

    def flush(self, handle: int) -> None:
        if handle in self.handles:
            self.tree.flush(self.handles[handle])

    def release(self, handle: int) -> None:
        if handle in self.handles:
            self.tree.release(self.handles.pop(handle))

    def end(self) -> tuple[Hashable, Hashable, Hashable]:
        """Close what is open. Return what the calls have answered, what programs see, and what is pending."""
        for handle in list(self.handles):
            self._answer(f"end {handle}", partial(self.flush, handle))
            self.release(handle)
        versions = self.tree.pending.backlog.versions
        data = [version and version.data for version in map(versions.get, (self.path, self.other))]
        return (
            tuple(sorted(self.answers.items())),
            tuple(map(self.files.read, (self.path, self.other))),
            tuple(part and self.tree.pending.journal.read(part, 0, part.size) for part in data),
        )


class NativeReader:
    """What a native reader finds in the shard of the chunks. Each content is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir()
        TARGET.create(root)
        self._tokens: dict[bytes | None, Hashable] = {}

    def tokens(self, content: bytes | None) -> Hashable:
        if content not in self._tokens:
            handmade.write_files(self._root, {} if content is None else {SHARD: content})
            tokens, torn = found_by(TARGET, "tensorstore", self._root)
            self._tokens[content] = tuple(sorted(tokens.items())), tuple(torn)
            (self._root / SHARD).unlink(missing_ok=True)
        return self._tokens[content]


def publish_rest(files: TreeFiles) -> None:
    publish(files)
    for path in files.tree.pending.left():
        version = files.tree.pending.backlog.versions[path]
        assert version.data is not None, path
        assert not version.data.size, f"{path}: {version.conflict}"  # empty files are not published


# ---------------------------------------------------------------------------------------------- one file, open twice

CHUNK_CALLS = [
    ("unmap", "unmap the other"), ("close", "close the other"), ("close", "write"), ("close", "rename"),
    ("close", "replace"), ("close", "truncate"), ("close", "unlink"), ("close", "read"), ("sync", "write"),
    ("truncate", "read"), ("rewrite", "unlink"), ("rewrite", "replace"), ("rename", "rewrite"), ("unmap", "rename"),
    ("truncate", "rename"), ("unlink", "read"),
]  # fmt: skip


def try_calls(names: Sequence[str], tmp_path: Path) -> int:
    with local(tmp_path) as files:

        def scenario(schedule: Schedule) -> Hashable:
            scene = Scene(files, names)
            schedule.together(*map(scene.calls, names))
            return scene.end()

        steps = (*STEPS, "write/files.py") if "unmap" in names else STEPS
        return explore_outcomes(scenario, preemptions=PREEMPTIONS, steps=steps)


@pytest.mark.parametrize("names", CHUNK_CALLS, ids=" and ".join)
def test_calls_on_a_chunk_leave_what_one_after_the_other_leaves(names: Sequence[str], tmp_path: Path) -> None:
    assert try_calls(names, tmp_path) > 60


@pytest.mark.every_case
@pytest.mark.parametrize(("bug", "names"), [
    ("two threads that close a file at once both leave it to the other to save it", ("unmap", "unmap the other")),
    ("a file that is truncated by name is saved by nobody", ("truncate", "read")),
])  # fmt: skip
def test_a_race_on_a_chunk_is_found(
    bug: str, names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs.seed(monkeypatch, bug)
    with pytest.raises(AssertionError, match="is none of"):
        try_calls(names, tmp_path)


# ------------------------------------------------------------------------------------------ while it is published

PUBLISH_CALLS = ["close", "rewrite", "write beside", "rename", "rename open", "replace", "unlink", "read"]


def try_publish(name: str, files: TreeFiles, tmp_path: Path) -> int:
    """Call something while the shard gets two new chunks beside a third one."""
    names = ["publish", name]
    reader = NativeReader(tmp_path / "copy")

    def scenario(schedule: Schedule) -> Hashable:
        for path in (PATH, OTHER, THIRD):
            if files.read(path) is not None:
                files.unlink(path)
        publish(files)  # the shard is removed
        files.write(THIRD, TARGET.shown(4))
        publish_rest(files)
        scene = Scene(files, names)
        schedule.together(*map(scene.calls, names))
        answers, shown, _ = scene.end()
        publish_rest(files)
        return answers, shown, reader.tokens(stored(tmp_path, SHARD, is_remote=files.tree.store.remote))

    return explore_outcomes(scenario, preemptions=PREEMPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISH_CALLS)
def test_calls_during_a_publish_leave_what_one_after_the_other_leaves(name: str, tmp_path: Path) -> None:
    with local(tmp_path) as files:
        assert try_publish(name, files, tmp_path) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rewrite", "write beside", "unlink"])
def test_calls_during_a_remote_publish_leave_what_one_after_the_other_leaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote(tmp_path, monkeypatch) as files:
        assert try_publish(name, files, tmp_path) > 60


@pytest.mark.every_case
@pytest.mark.parametrize(("bug", "name", "is_remote"), [
    ("a chunk that is removed while its shard is published comes back", "unlink", False),
    ("a chunk that a publish has taken counts as absent", "unlink", False),
    ("a published version takes a newer one with it", "rewrite", False),
    ("a file shows the shard although a newer version of it is pending", "rewrite", False),
    ("a chunk of a remote shard that waits while the shard is replaced is in conflict", "write beside", True),
])  # fmt: skip
def test_a_race_with_a_publish_is_found(
    bug: str, name: str, is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs.seed(monkeypatch, bug)
    with remote(tmp_path, monkeypatch) if is_remote else local(tmp_path) as files, pytest.raises(AssertionError):
        try_publish(name, files, tmp_path)


@pytest.mark.parametrize("replaced", ["another", "its own"])
def test_a_close_reads_a_stored_chunk_again_if_its_own_shard_was_replaced(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, of = list[object](), Stored.from_target
    with local(tmp_path) as files:
        pending = files.tree.pending
        chunk = files.tree._descriptions._names.classify_name(*split(PATH)).target
        assert chunk is not None
        own_key = chunk.tree.shards.key(chunk.tree.shards.number_of(chunk.coords))
        other_key = next(key for key in map(str, count()) if (hash(key) - hash(own_key)) % HASHES)

        def counted(target: Any, *, read: bool) -> Stored:
            looks.append(target)
            return of(target, read=read)

        monkeypatch.setattr(Stored, "from_target", staticmethod(counted))
        predecessor = pending.predecessor(PATH, chunk)
        pending.backlog.done(own_key if replaced == "its own" else other_key)
        pending.put(predecessor, TARGET.shown(2), 0, 0)
        assert len(looks) == (2 if replaced == "its own" else 1)


# -------------------------------------------------------------------------------------------------- in an object store

REMOTE_CALLS = [("close", "write"), ("close", "rename"), ("close", "replace"), ("close", "unlink")]


def try_remote(names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> int:
    with remote(tmp_path, monkeypatch) as files:
        put = files.tree.pending._writer.put

        def refused(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def scenario(schedule: Schedule) -> Hashable:
            files.tree.pending._writer.put = put  # type: ignore[method-assign]
            scene = Scene(files, names, "README", "NEWS")
            files.tree.pending._writer.put = refused if refuses else put  # type: ignore[method-assign, assignment]
            schedule.together(*map(scene.calls, names))
            return scene.end(), *(stored(tmp_path, name, is_remote=True) for name in ("README", "NEWS"))

        return explore_outcomes(scenario, preemptions=PREEMPTIONS, steps=(*STEPS, "write/renames"))


@pytest.mark.slow
@pytest.mark.parametrize("names", REMOTE_CALLS, ids=" and ".join)
@pytest.mark.parametrize("refuses", [False, True])
def test_calls_on_a_remote_file_leave_what_one_after_the_other_leaves(
    names: Sequence[str], refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_remote(names, tmp_path, monkeypatch, refuses=refuses) > 60


@pytest.mark.every_case
@pytest.mark.parametrize(("bug", "names", "refuses"), [
    ("two closes write a file to the store at the same time", ("close", "write"), False),
    ("a close succeeds while another one may fail to save the file", ("close", "close the other"), True),
    ("a file that is renamed or removed while it is closed comes back", ("close", "unlink"), False),
])  # fmt: skip
def test_a_race_on_a_remote_file_is_found(
    bug: str, names: Sequence[str], refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs.seed(monkeypatch, bug)
    with pytest.raises(AssertionError, match="is none of"):
        try_remote(names, tmp_path, monkeypatch, refuses=refuses)


# --------------------------------------------------------------------------------------------------------- wake-ups


def try_wakes(paths: Sequence[str], tmp_path: Path) -> int:
    with local(tmp_path) as files:
        publisher = files.tree.pending.publisher

        def scenario(schedule: Schedule) -> None:
            publisher._threads.clear()
            publisher._free = 0
            publisher.start()
            schedule.together(*(
                [partial(files.write, path, TARGET.shown(token)), partial(files.tree.pending.flush, path)]
                for token, path in enumerate(paths, 1)
            ))  # fmt: skip
            assert schedule.elapsed_s < 0.01, "a thread has waited for a wake-up until its time was over"
            assert files.tree.pending.left() == []

        return explore(scenario, preemptions=PREEMPTIONS)


def test_who_waits_for_a_publish_is_woken(tmp_path: Path) -> None:
    assert try_wakes([PATH, OTHER] if times() > 1 else [PATH], tmp_path) > 60


@pytest.mark.every_case
@pytest.mark.parametrize("bug", ["the end of a publish wakes nobody", "publishers are not woken by a flush"])
def test_a_lost_wake_up_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bugs.seed(monkeypatch, bug)
    with pytest.raises(AssertionError):
        try_wakes([PATH], tmp_path)
