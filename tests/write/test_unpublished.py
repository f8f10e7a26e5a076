"""What waits in a journal, shown by a tree that is only read: whatever a mount has left there when it was killed."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pytest

from shardfs.config.options import Options
from shardfs.storage import syscalls
from shardfs.storage.source_locks import journal_directory
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from shardfs.write import recover, unpublished
from shardfs.write.open_rw import open_writable
from shardfs.write.unpublished import Unpublished, with_unpublished
from tests import handmade
from tests.mount.programs import copy_tree, errno_of, run
from tests.suites.walking import entries, walk
from tests.waiting import wait_until
from tests.write.engines import TreeFiles, Whole
from tests.write.hooks import Recorder, hooked
from tests.write.journals import make_newer
from tests.write.mounts import writable
from tests.write.targets import TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

NEW, OLD = 9000, 100


class Place:
    """A source in which every other chunk is there, and the journal of a mount that was killed."""

    def __init__(self, target: Target, top: Path) -> None:
        self.target, self.store, self.journals = target, top / "store", top / "journals"
        self.store.mkdir()
        self.journal = journal_directory(str(self.store), self.journals)
        self.journal.mkdir(mode=0o700, parents=True)
        target.create(self.store)
        target.fill(self.store, target.array({n: OLD + n for n in range(0, len(target.chunks), 2)}))

    @contextmanager
    def mount(self) -> Iterator[TreeFiles]:
        """For writing. What is written waits until somebody wants it published."""
        with Whole().open(self.target, self.store, self.journal) as files:
            yield files

    def leave(self, write: Callable[[TreeFiles], None]) -> None:
        with self.mount() as files:
            write(files)
            files.die()

    def put(self, *numbers: int, gone: int | None = None) -> Callable[[TreeFiles], None]:
        """What writes new versions of chunks, and deletes one."""

        def write(files: TreeFiles) -> None:
            for number in numbers:
                files.write(self.target.path(number), self.target.shown(NEW + number))
            if gone is not None:
                files.unlink(self.target.path(gone))

        return write

    def tree(self, look_s: float = 0) -> Tree | Unpublished:
        return with_unpublished(open_tree(str(self.store)), str(self.store), self.journals, look_s=look_s)

    def shown(self, look_s: float = 0) -> Unpublished:
        tree = self.tree(look_s)
        assert isinstance(tree, Unpublished)
        return tree

    def files(self) -> dict[Path, bytes]:
        """All that lies in the source and in the journal."""
        every = (p for top in (self.store, self.journals) for p in top.rglob("*"))
        return {p: p.read_bytes() for p in every if p.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(TARGETS["zarr_end"], tmp_path)


def bytes_of(tree: Tree | Unpublished, path: str) -> bytes:
    found = tree.resolve(path)
    return bytes(tree.read(found.number, 0, found.size + 1))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_it_is_shown_as_the_next_writable_mount_shows_it(name: str, tmp_path: Path) -> None:
    place = Place(TARGETS[name], tmp_path)
    target, last = place.target, len(place.target.chunks) - 1

    def write(files: TreeFiles) -> None:
        place.put(0, 1, last, gone=2)(files)
        files.write(f"{target.path(1)}.0123abcd.partial", b"not finished")
        files.rename(target.path(4), target.path(3))

    place.leave(write)
    before = place.files()
    shown = walk(place.shown())  # type: ignore[arg-type]
    assert place.files() == before
    assert shown[target.path(0)] == target.shown(NEW)
    assert shown[target.path(3)] == target.shown(OLD + 4)
    assert target.path(2) not in shown
    with place.mount() as files:
        assert walk(files.tree) == shown  # type: ignore[arg-type]
        files.publish()
    assert walk(open_tree(str(place.store))) == {p: data for p, data in shown.items() if "partial" not in p}


def test_orphans_and_compressed_chunks_are_shown(tmp_path: Path) -> None:
    place = Place(TARGETS["precomputed"], tmp_path)
    path, data = place.target.path(0), place.target.shown(NEW)
    scale = path.rpartition("/")[0]
    place.leave(lambda files: files.write(f"{path}.gz", gzip.compress(data)))
    place.leave(lambda files: files.write(f"{scale}/900-910_900-910_900-910", b"outside"))
    tree = place.shown()
    assert bytes_of(tree, path) == data
    assert bytes_of(tree, f"{scale}/900-910_900-910_900-910") == b"outside"
    names = [entry.name.decode() for entry in entries(tree, tree.resolve(scale).number)]  # type: ignore[arg-type]
    assert (f"{path}.gz".rpartition("/")[2] in names, path.rpartition("/")[2] in names) == (True, False)


def test_a_directory_that_a_power_failure_took_away_is_shown_around_what_waits(tmp_path: Path) -> None:
    place = Place(TARGETS["precomputed"], tmp_path)
    path = place.target.path(1)
    scale = path.rpartition("/")[0]
    place.leave(place.put(1))
    shutil.rmtree(place.store / scale)
    assert bytes_of(place.shown(), path) == place.target.shown(NEW + 1)
    with place.mount() as files:
        assert files.read(path) == place.target.shown(NEW + 1)
        files.publish()
    assert bytes_of(open_tree(str(place.store)), path) == place.target.shown(NEW + 1)


def test_a_source_need_not_be_a_disk(tmp_path: Path) -> None:
    """Chunks wait in a volume of an object store that has no shard yet, so no directory."""
    source, journals = f"memory://{tmp_path.name}", tmp_path / "journals"
    info = json.dumps(handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding())).encode()
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/info", info)
    options = Options(rw=True, journal=str(journals), idle=3600, age=3600)
    tree = open_writable(open_tree(source), source, options)
    files = TreeFiles(tree, tree.pending._journal)
    files.write("s/0-2_0-2_0-1", b"abcd")
    files.die()
    shown = with_unpublished(open_tree(source), source, journals, look_s=0)
    assert isinstance(shown, Unpublished)
    assert walk(shown) == {"info": bytes_of(open_tree(source), "info"), "s/0-2_0-2_0-1": b"abcd"}  # type: ignore[arg-type]
    assert fsspec.filesystem("memory").find(tmp_path.name) == [f"/{tmp_path.name}/info"]


def test_a_listing_goes_on_at_any_position(tmp_path: Path) -> None:
    place = Place(TARGETS["zarr_one_shard"], tmp_path)  # (8, 8)
    place.leave(place.put(0, 1, 3, gone=2))
    tree = place.shown()
    directory = tree.resolve(place.target.path(0).rpartition("/")[0]).number
    listed = list(entries(tree, directory))  # type: ignore[arg-type]
    assert len(listed) == 5
    for i, entry in enumerate(listed):
        assert list(entries(tree, directory, entry.cookie)) == listed[i + 1 :]  # type: ignore[arg-type]


def test_what_is_in_conflict_is_ours(place: Place) -> None:
    place.leave(place.put(0))
    place.target.fill(place.store, place.target.array({0: 8000}))
    with place.mount() as files:
        with pytest.raises(OSError, match="the stored chunk was at") as failure:
            files.publish()
        assert failure.value.errno == errno.ESTALE
        files.die()
    tree = place.shown()
    assert bytes_of(tree, place.target.path(0)) == place.target.shown(NEW)
    assert tree.xattrs(tree.resolve(place.target.path(0)).number)["user.shardfs.error"]


def test_while_somebody_writes_the_source_alone_is_shown(place: Place) -> None:
    with place.mount() as files:
        place.put(0)(files)
        tree = place.tree()
        assert isinstance(tree, Tree)
        assert bytes_of(tree, place.target.path(0)) == place.target.shown(OLD)


def test_nothing_that_waits_costs_nothing(place: Place) -> None:
    assert isinstance(place.tree(), Tree)
    place.leave(lambda files: files.write(f"{place.target.path(0)}.0123abcd.partial", b"scratch alone"))
    assert isinstance(place.tree(), Tree)


def test_when_somebody_begins_to_write_the_source_alone_is_shown(place: Place) -> None:
    new, old, path = place.target.shown(NEW), place.target.shown(OLD), place.target.path(0)
    place.leave(place.put(0, gone=2))
    tree = place.shown()
    opened = tree.resolve(path)
    assert bytes_of(tree, path) == new
    with place.mount() as files:
        assert bytes_of(tree, path) == old
        assert bytes_of(tree, place.target.path(2)) == place.target.shown(OLD + 2)
        files.write(path, place.target.shown(NEW + 7))
        files.publish()
    assert tree.attributes(opened.number).size == len(new)
    assert bytes(tree.read(opened.number, 0, opened.size)) == new  # who has it open goes on
    fresh = place.tree()
    assert bytes_of(fresh, path) == place.target.shown(NEW + 7)


@pytest.mark.parametrize("change", [recover.discard, recover.salvage])
def test_what_was_put_aside_is_not_shown(place: Place, change: Callable[[Path], object]) -> None:
    place.leave(place.put(0))
    tree = place.shown()
    change(place.journal)
    assert bytes_of(tree, place.target.path(0)) == place.target.shown(OLD)


def test_the_files_of_the_journal_are_let_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpublished, "GRACE_S", 0.0)
    place.leave(place.put(0))
    tree = place.shown()
    opened = tree.resolve(place.target.path(0))
    recover.discard(place.journal)
    for _ in range(2):
        tree.lookup(ROOT, place.target.path(0).split("/")[0].encode())
    with pytest.raises(OSError, match="Stale") as failure:
        tree.read(opened.number, 0, 10)
    assert failure.value.errno == errno.ESTALE
    assert tree._held._peek is None


def test_the_journal_is_not_looked_at_for_each_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.leave(place.put(0))
    tree = place.shown(look_s=1e6)
    monkeypatch.setattr(tree, "_journal_state", lambda: pytest.fail("it was looked at"))
    recover.discard(place.journal)
    assert bytes_of(tree, place.target.path(0)) == place.target.shown(NEW)
    walk(tree)  # type: ignore[arg-type]


def test_who_looks_keeps_nobody_from_writing(place: Place) -> None:
    place.leave(place.put(0))
    with hooked(recorder := Recorder()):
        place.shown()
    assert recorder.calls == []  # nothing is changed, and no lock is taken, not even for a moment
    with place.mount():
        assert recover.look(place.journal).owner is not None


def test_a_lock_is_looked_at_without_being_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    ours, theirs = syscalls.open(path, os.O_RDWR | os.O_CREAT), syscalls.open(path, os.O_RDWR)
    try:
        assert not syscalls.is_locked(ours)
        syscalls.lock(theirs)
        assert syscalls.is_locked(ours)
        syscalls.unlock(theirs)
        assert not syscalls.is_locked(ours)
    finally:
        syscalls.close(ours)
        syscalls.close(theirs)


def test_of_a_damaged_journal_what_is_sound_is_shown(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.leave(place.put(0, 1))
    (segment,) = place.journal.glob("*.wal")
    data = bytearray(segment.read_bytes())
    at = data.index(place.target.shown(NEW))
    data[at] ^= 1
    segment.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        tree = place.shown()
    assert bytes_of(tree, place.target.path(0)) == place.target.shown(OLD)
    assert bytes_of(tree, place.target.path(1)) == place.target.shown(NEW + 1)
    assert "and is damaged" in caplog.text


def _newer(journal: Path) -> None:
    (segment,) = journal.glob("*.wal")
    make_newer(segment)


@pytest.mark.parametrize("spoil", [_newer, lambda journal: journal.chmod(0o755)])
def test_a_journal_that_is_no_good_keeps_nobody_from_reading(
    place: Place, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    place.leave(place.put(0))
    spoil(place.journal)
    with caplog.at_level(logging.WARNING):
        tree = place.tree()
    assert bytes_of(tree, place.target.path(0)) == place.target.shown(OLD)
    told = "its journal cannot be read, so unpublished files are not shown"
    assert told in caplog.text
    assert told in (recover.unpublished(str(place.store), place.journals, "") or ("",))[0]


# ----------------------------------------------------------------------------------------------------- on a mount


@pytest.mark.fuse
@pytest.mark.interop
def test_a_mount_shows_it_until_a_writable_one_begins(
    dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    source = copy_tree(dataset("zarr3", "default").path, tmp_path / "source")
    old = bytes_of(open_tree(str(source)), "c/0/0")
    new, newer = (np.full((2, 3), value, "<u2").tobytes() for value in (7, 8))
    (tmp_path / "new").write_bytes(new)
    (tmp_path / "newer").write_bytes(newer)
    with writable(source, tmp_path / "m", "-o", "idle=1h,age=1h") as mount:
        mount.mount()
        run("cp", tmp_path / "new", mount.path / "c/0/0")
        run("mkdir", mount.path / "c/9")
        run("cp", tmp_path / "new", mount.path / "c/9/9")  # outside the array
        run("rm", mount.path / "c/0/1")
        mount.kill()
        mount.clear()
        with mounted(source, "-o", f"journal={mount.journal},index_ttl=0.1") as reader:
            assert sorted(os.listdir(reader / "c/0")) == ["0", "2", "3"]
            assert "9" in os.listdir(reader / "c")
            assert ((reader / "c/0/0").read_bytes(), (reader / "c/9/9").read_bytes()) == (new, new)
            assert errno_of((reader / "c/0/0").unlink) == errno.EROFS
            with open(reader / "c/0/0", "rb", buffering=0) as opened:
                mount.mount()
                wait_until(lambda: (reader / "c/0/0").read_bytes() == old)
                wait_until(lambda: sorted(os.listdir(reader / "c/0")) == ["0", "1", "2", "3"])
                assert "9" not in os.listdir(reader / "c")
                assert opened.read() == new
            run("cp", tmp_path / "newer", mount.path / "c/0/0")
            assert mount.flush(mount.path / "c/0").returncode == 0
            wait_until(lambda: (reader / "c/0/0").read_bytes() == newer)
            wait_until(lambda: sorted(os.listdir(reader / "c/0")) == ["0", "2", "3"])
