"""The kernel reads chunks of slow local sources ahead: it is advised of what a plane needs, and of nothing else."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.storage import kernel_read_ahead, mount_table
from shardfs.storage.mount_table import MountInfo
from shardfs.vfs.tree import open_tree
from tests import handmade
from tests.mount.test_server import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.storage.read_ahead import ReadAhead
    from shardfs.vfs.tree import Tree

T = TypeVar("T")

N, NBYTES = 8, 20**3
CHUNKS = [bytes([i % 251]) * NBYTES for i in range(N**3)]
PLANES = {
    "z": [(3, y, x) for y, x in itertools.product(range(N), range(N))],
    "y": [(z, 3, x) for z, x in itertools.product(range(N), range(N))],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    handmade.write_json(tmp_path / "zarr.json", handmade.zarr_metadata((N * 20,) * 3, (N * 20,) * 3, (20, 20, 20)))
    handmade.write_files(tmp_path, {"c/0/0/0": handmade.zarr_shard([*CHUNKS])})
    return tmp_path


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The bytes of which the kernel was advised. The reader waits for the advice, so that the result is exact."""
    ranges: list[range] = []

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert (os.fstat(fd).st_size, advice) == (len(handmade.zarr_shard([*CHUNKS])), os.POSIX_FADV_WILLNEED)
        ranges.append(range(offset, offset + length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(kernel_read_ahead.KernelReadAhead, "start", at_once)
    return ranges


def at_once(ahead: ReadAhead, job: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(job())
    return future


def as_type(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = path.stat().st_dev
    mounted = MountInfo("/", name, "x", device=f"{os.major(device)}:{os.minor(device)}")
    monkeypatch.setattr(mount_table, "entries", lambda: iter([mounted]))


def numbers(tree: Tree, plane: str) -> list[int]:
    return [tree.resolve("c/{}/{}/{}".format(*coords)).number for coords in PLANES[plane]]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
@pytest.mark.parametrize("plane", PLANES)
def test_a_plane_of_a_slow_source(
    kind: str, plane: str, source: Path, advised: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_type(kind, source, monkeypatch)
    tree = open_tree(str(source), prefetch_bytes=1 << 28)
    starts = [((z * N + y) * N + x) * NBYTES for z, y, x in PLANES[plane]]
    needed = {at for start in starts for at in range(start, start + NBYTES)}
    with serving(tree) as kernel:
        for number, (z, y, x) in zip(numbers(tree, plane), PLANES[plane], strict=True):
            for offset in (0, 4096):
                assert kernel.read(number, offset, 4096).body == CHUNKS[(z * N + y) * N + x][offset : offset + 4096]
    assert all(len(part) <= kernel_read_ahead.ADVICE for part in advised)
    places = [at for part in advised for at in part]
    assert len(places) > 0.8 * len(needed)
    assert len(places) == len(set(places))
    assert set(places) <= needed


@pytest.mark.parametrize(("kind", "prefetch"), [("ext4", 1 << 28), ("tmpfs", 1 << 28), ("fuseblk", 1), ("nfs4", 0)])
def test_no_other_source(
    kind: str, prefetch: int, source: Path, advised: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_type(kind, source, monkeypatch)
    tree = open_tree(str(source), prefetch_bytes=prefetch)
    assert tree.store.read_ahead is None
    assert tree.note_read is None
    with serving(tree) as kernel:
        for number in numbers(tree, "z"):
            kernel.read(number, 0, 4096)
    assert advised == []


def test_chunks_at_random_places(source: Path, advised: list[range], monkeypatch: pytest.MonkeyPatch) -> None:
    as_type("nfs", source, monkeypatch)
    tree = open_tree(str(source), prefetch_bytes=1 << 28)
    assert tree.note_read is not None
    for i in range(0, N**3, 37):
        tree.note_read(tree.resolve(f"c/{i // 64}/{i // 8 % 8}/{i % 8}").number)
    tree.note_read(1)
    assert advised == []


def test_damage_is_reported_by_the_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_type("nfs", source, monkeypatch)
    tree = open_tree(str(source), prefetch_bytes=1 << 28)
    number = tree.number("c/1/1/1")
    (source / "c/0/0/0").write_bytes(b"no shard")
    assert tree.note_read is not None
    tree.note_read(number)
    with pytest.raises(CorruptShardError):
        tree.read(number, 0, 1)
