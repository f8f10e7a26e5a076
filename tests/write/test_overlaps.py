"""Writable mounts of which one shows a part of the other: the second one is refused, and told who is the first."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from shardfs.model.errors import BusyError
from shardfs.storage.source_locks import journal_directory, names
from shardfs.write.journal import Journal, overlaps
from tests.conftest import MountFailed, mount_entry
from tests.datasets import ROOT
from tests.mount.programs import attempt, copy_tree, shardfs
from tests.write.mounts import WritableMount, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

fuse = pytest.mark.fuse


@pytest.fixture
def top(dataset: Get, tmp_path: Path) -> Path:
    """A directory with two arrays, and a link to it."""
    (tmp_path / "link").symlink_to("top")
    for name in ("a", "ab"):
        copy_tree(dataset("zarr3", "default").path, tmp_path / "top" / name)
    return tmp_path / "top"


@contextmanager
def two(first: Path, second: Path, tmp_path: Path, *options: str) -> Iterator[tuple[WritableMount, WritableMount]]:
    """Mounts with journals of their own, as of two users; only the first one is mounted."""
    with writable(first, tmp_path / "1", *options) as one, writable(second, tmp_path / "2") as other:
        one.mount()
        yield one, other


def refused(other: WritableMount, one: WritableMount) -> None:
    with pytest.raises(MountFailed, match=f"by pid {one.pid} at {one.path} "):
        other.mount()


PAIRS = pytest.mark.parametrize(
    ("first", "second"), [("top", "top/a"), ("top/a", "top"), ("link", "top/a"), ("link/a", "top"), ("top/a", "link")]
)


@fuse
@PAIRS
def test_the_second_of_two_that_overlap_is_refused(top: Path, tmp_path: Path, first: str, second: str) -> None:
    with two(tmp_path / first, tmp_path / second, tmp_path) as (one, other):
        with pytest.raises(MountFailed) as caught:
            other.mount()
        assert caught.value.returncode == 4
        why = f"overlaps {(tmp_path / first).resolve()}, which is already mounted rw by pid {one.pid} at {one.path} "
        assert why in caught.value.stderr
        assert os.listdir((tmp_path / second).resolve()).count(".shardfs.lock") == 0
        assert one.umount().returncode == 0
        other.mount()
        assert other.umount().returncode == 0


@fuse
@pytest.mark.parametrize(("first", "second"), [("top", "top/a"), ("top/a", "top")])
def test_it_is_found_below_another_name_of_the_source_too(top: Path, tmp_path: Path, first: str, second: str) -> None:
    """What findmnt shows is only one of the ways."""
    with two(tmp_path / first, tmp_path / second, tmp_path, "-o", "fsname=other") as (one, other):
        refused(other, one)


@fuse
def test_mounts_that_do_not_overlap(top: Path, tmp_path: Path) -> None:
    with two(top / "a", top / "ab", tmp_path) as (one, other):
        other.mount()
        reading = tmp_path / "reading"
        reading.mkdir()
        assert shardfs("mount", top, reading).returncode == 0
        for path in (reading, one.path, other.path):
            assert shardfs("umount", path).returncode == 0


@fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="binds a directory to another place")
@pytest.mark.parametrize(("first", "second"), [("bound/a", "top"), ("top", "bound/a"), ("top/a", "bound")])
def test_a_bound_directory_is_the_same_source(top: Path, tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "bound").mkdir()
    subprocess.run(["mount", "--bind", top, tmp_path / "bound"], check=True)
    try:
        with two(tmp_path / first, tmp_path / second, tmp_path) as (one, other):
            refused(other, one)
    finally:
        subprocess.run(["umount", "-l", tmp_path / "bound"], check=True)


@fuse
@pytest.mark.parametrize("attempts", range(3))
def test_of_two_that_start_together_one_is_mounted(top: Path, tmp_path: Path, attempts: int) -> None:
    with ExitStack() as stack:
        both = [stack.enter_context(writable(s, tmp_path / n)) for n, s in (("1", top), ("2", top / "a"))]
        command = [sys.executable, "-m", "shardfs", "mount", "--rw"]
        processes = [
            subprocess.Popen(
                [*command, "-o", f"journal={m.journal}", str(m.source), str(m.path)], cwd=ROOT, stderr=subprocess.PIPE
            )
            for m in both
        ]
        for process in processes:
            process.communicate(timeout=250)
        mounted = [m.path for m in both if mount_entry(m.path) is not None]
        for path in mounted:
            assert shardfs("umount", path).returncode == 0
        assert sorted(process.returncode for process in processes) == [0, 4]
        assert len(mounted) == 1


# ---------------------------------------------------------------------------------------------- one journal each


def opened(source: str | Path, base: Path) -> Journal:
    return Journal.open(
        journal_directory(str(source), base), str(source), limit_bytes=1 << 20, mountpoint=f"/{base.name}"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://bucket/x", "s3://bucket/x/y/"),
        ("s3://bucket/x/y", "s3://bucket/x"),
        ("https://user:secret@host/x?token=1", "https://host/x/y"),
    ],
)
def test_urls_overlap_by_their_names(first: str, second: str, tmp_path: Path) -> None:
    one = opened(first, tmp_path / "1")
    try:
        with pytest.raises(BusyError, match=r"overlaps \w+://[^@?]+, which is already .* at /1 ") as caught:
            opened(second, tmp_path / "2")
        assert "secret" not in str(caught.value)
        for other in (f"{first}z".replace("?token=1z", "z"), "s3://bucket/z", "gs://bucket/x/y"):
            opened(other, tmp_path / "2").close(clean=True)
    finally:
        one.close(clean=True)
    opened(second, tmp_path / "2").close(clean=True)


def test_a_writer_above_is_found_without_a_look_at_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's, or on another host."""
    monkeypatch.setattr(overlaps, "_owners", lambda: iter(()))
    (tmp_path / "top/a").mkdir(parents=True)
    one = opened(tmp_path / "top", tmp_path / "1")
    with pytest.raises(BusyError, match=f"overlaps {tmp_path / 'top'}, which is already"):
        opened(tmp_path / "top/a", tmp_path / "2")
    one.close(clean=True)
    opened(tmp_path / "top/a", tmp_path / "2").close(clean=True)


@fuse
def test_a_mount_below_is_found_without_a_look_at_its_process(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writable(top / "a", tmp_path / "1") as one:
        one.mount()
        monkeypatch.setattr(overlaps, "_owners", lambda: iter(()))
        with pytest.raises(BusyError, match=f"overlaps {top / 'a'}, which is already .* {one.pid} at {one.path} "):
            opened(top, tmp_path / "2")
        one.kill()
        opened(top, tmp_path / "2").close(clean=True)


def test_names_end_at_a_slash(tmp_path: Path) -> None:
    name, stored_name = names(f"file://{tmp_path}/x../")
    assert name == f"{tmp_path}/x.."
    assert stored_name.endswith("/x..")
    assert attempt("findmnt", "-no", "MAJ:MIN", "-T", tmp_path).stdout.strip() == stored_name.partition(":/")[0]
