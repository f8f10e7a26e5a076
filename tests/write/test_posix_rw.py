"""What POSIX says, and random operations, on real mounts: chunks, and files that are passed through to the source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.conftest import need_fuse
from tests.write.mounts import writable
from tests.write.posix.chunks import COUNT
from tests.write.scale import times
from tests.write.test_changes import SCRIPTS, SOURCE, UNSUPPORTED, can_run, content, program, random_operations, shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.mounts import WritableMount

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

CHUNK = 32


@pytest.fixture
def rw(tmp_path: Path) -> Iterator[WritableMount]:
    """An array of which the first half is written, and a directory that is none of it."""
    zarr = pytest.importorskip("zarr")
    need_fuse()
    source = tmp_path / "source"
    array = zarr.create_array(
        source / "a", shape=(COUNT * CHUNK,), shards=(100 * CHUNK,), chunks=(CHUNK,), dtype="u2", compressors=None
    )
    array[: COUNT // 2 * CHUNK] = np.arange(1, COUNT // 2 * CHUNK + 1)
    (source / "plain").mkdir()
    with writable(source, tmp_path) as mount:
        mount.mount()
        yield mount


def test_chunks_are_files(rw: WritableMount) -> None:
    told = json.loads(program("posix", rw.path / "a" / "c", "--chunks"))
    assert told["ran"] > 30
    assert told["failed"] == {}


@pytest.mark.slow
def test_files_that_are_passed_through(rw: WritableMount) -> None:
    told = json.loads(program("posix", rw.path / "plain"))
    failed = dict(told["failed"])
    assert {name: why for name, why in failed.items() if name not in UNSUPPORTED} == {}
    assert set(failed) == UNSUPPORTED


@pytest.mark.timeout(300 * times())
@pytest.mark.parametrize("path", ["a/c/7", "a/c/700", "plain/file"])
def test_random_operations(rw: WritableMount, path: str) -> None:
    random_operations(rw.path / path, 1, 3000)


@pytest.mark.timeout(300 * times())
@pytest.mark.parametrize("path", ["a/c/7", "plain/file"])
def test_random_operations_with_publishing_between(rw: WritableMount, path: str) -> None:
    from sys import executable

    random_operations(rw.path / path, 2, 1500, "--fresh", f"{executable} -m shardfs flush {rw.path}")


@pytest.mark.parametrize("place", ["plain", "a/c"])
@pytest.mark.parametrize("mode", ["os", "lockfile"])
def test_conditional_writes_of_tensorstore(rw: WritableMount, place: str, mode: str) -> None:
    """To keys that are no chunks: files of the source, and files that are kept for chunks to come."""
    (rw.path / place / "t").mkdir()
    program("clients", f"counters-{mode}", rw.path / place / "t")


@pytest.mark.slow
def test_tools_leave_what_they_leave_on_a_plain_directory(rw: WritableMount, plain: Path) -> None:
    for number, name in enumerate(filter(can_run, SCRIPTS)):
        mounted, wanted = rw.path / "plain" / str(number), plain / str(number)
        for directory in (mounted, wanted):
            directory.mkdir()
            shell(SOURCE, directory)
            shell(SCRIPTS[name], directory)
        assert content(mounted, times=False) == content(wanted, times=False), name
