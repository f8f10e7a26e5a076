"""What the writing engine makes of what is wrong with its journal."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.write.journal import Journal
from tests.write.engines import Whole
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.write.targets import Target


@pytest.fixture
def target() -> Target:
    return next(iter(TARGETS.values()))


@pytest.fixture
def source(tmp_path: Path, target: Target) -> Path:
    (tmp_path / "source").mkdir()
    target.create(tmp_path / "source")
    return tmp_path / "source"


def test_an_array_with_a_damaged_record_is_read_only(tmp_path: Path, source: Path, target: Target) -> None:
    with Whole().open(target, source, tmp_path / "j") as files:
        files.write(target.path(0), target.shown(1))
        files.write(target.path(1), target.shown(2), sync=True)
        files.write(target.path(2), target.shown(3))
        files.die()
    (segment,) = (tmp_path / "j").glob("*.wal")
    with open(segment, "r+b") as file:
        file.seek(segment.read_bytes().index(target.shown(1)))
        file.write(b"\xff\xff")
    with Whole().open(target, source, tmp_path / "j") as files:
        assert files.read(target.path(1)) == target.shown(2)
        assert files.read(target.path(2)) == target.shown(3)
        with pytest.raises(OSError, match="salvage") as caught:
            files.write(target.path(3), target.shown(4))
        assert caught.value.errno == errno.EROFS
        assert "is damaged" in str(files.tree.pending.state()["problems"])


def test_a_chunk_may_be_published_while_it_is_renamed(
    tmp_path: Path, source: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Whole().open(target, source, tmp_path / "j") as files:
        files.write(target.path(0), target.shown(1))
        pending, rename = files.tree.pending, files.tree.pending.rename
        publishing = threading.Thread(target=files.publish)  # ends only when the rename lets it

        def late(*args: Any, **kwargs: Any) -> object:
            publishing.start()
            end = time.monotonic() + 20
            while target.path(0) in pending.backlog.versions and time.monotonic() < end:
                time.sleep(0.001)
            return rename(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(pending, "rename", late)
            files.rename(target.path(0), target.path(1))
        publishing.join(20)
        for _ in range(2):
            assert files.read(target.path(0)) is None
            assert files.read(target.path(1)) == target.shown(1)
            files.publish()


def test_a_lock_that_the_journal_has_no_room_for_replaces_nothing(
    tmp_path: Path, source: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Whole().open(target, source, tmp_path / "j") as files:
        files.write(target.path(0), target.shown(1))

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", full)
            with pytest.raises(OSError, match="full"):
                files.write_locked(target.path(0), target.shown(2))
        for _ in range(2):
            assert files.read(target.path(0)) == target.shown(1)
            assert files.read(target.path(0) + ".__lock") is None  # it was closed, and could not be kept
            files.publish()
        files.write_locked(target.path(0), target.shown(3))
        assert files.read(target.path(0)) == target.shown(3)
