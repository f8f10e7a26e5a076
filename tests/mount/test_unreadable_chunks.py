"""Chunks of which the mount cannot find out whether they exist: a damaged index, a refusal, a store that is silent.

Programs that ask for the attributes of a chunk first, and take any error for "there is none", must not read fills.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_n5, handmade
from tests.conftest import client_python
from tests.data_layouts import BYTE, Written
from tests.datasets import ZSTD
from tests.mount.distant import serving
from tests.mount.programs import errno_of, read_jobs
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Mounted

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

DATA = (np.arange(64, dtype="uint8") + 1).reshape(8, 8)
"""No element is a fill value."""

SHARDS = {
    "zarr3": "a/c/0/1",
    "n5": f"{data_n5.MEMBER}/1/0",
    "precomputed": "s/0.shard",
}
"""A shard of each dataset that `write` writes."""


def write(form: str, path: Path) -> Path:
    """Write a dataset and return one of its shards."""
    if form == "zarr3":
        Written(DATA, (2, 2), (BYTE, ZSTD), (4, 4)).write(path / "a")
        handmade.write_json(path / "zarr.json", handmade.group_document())
    elif form == "n5":
        variant = data_n5.Variant((8, 8), (2, 2), [(2, 2)], dtype="uint8", data=lambda shape, dtype: DATA)
        variant.write(path.with_suffix(".written"), "n5").path.rename(path)
    else:
        handmade.volume_sound(path)
    return path / SHARDS[form]


def _cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-9])


def _lose_content(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to(".git/annex/objects/gone")


def _make_directory(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {"cut": _cut, "lost": _lose_content, "directory": _make_directory}

READERS: dict[tuple[str, str], Callable[[Path], list[str]]] = {
    ("zarr3", "zarr2"): lambda root: ["read_zarr2", str(root / "a"), ""],
    ("zarr3", "n5"): lambda root: ["read_n5", "n5store", str(root.parent), f"{root.name}/a"],
    ("n5", "native"): lambda root: ["read_n5", "n5store", str(root), data_n5.MEMBER],
    ("n5", "zarr2"): lambda root: ["read_zarr2", str(root / data_n5.MEMBER), ""],
    ("precomputed", "zarr2"): lambda root: ["read_zarr2", str(root / "s"), ""],
}
"""Functions of zarr-python 2, which asks for the attributes of a chunk first, and arguments; by format and layout."""


@pytest.mark.parametrize(("form", "layout"), READERS)
def test_zarr_python_2_gets_an_error(form: str, layout: str, mounted: Mounted, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, damage in DAMAGE.items():
        damage(write(form, source / name))
    write(form, source / "sound")
    if form == "zarr3":
        handmade.write_json(source / "zarr.json", handmade.group_document())
    with mounted(source, "--layout", layout) as mount:
        jobs = [READERS[form, layout](mount / name) for name in ("sound", *DAMAGE)]
        sound, *outcomes = read_jobs(jobs[0][0], [job[1:] for job in jobs], tmp_path, client_python("zarr2"))
    assert not isinstance(sound, str), sound
    assert sound.all()
    for name, outcome in zip(DAMAGE, outcomes, strict=True):
        assert "Input/output error" in outcome, f"{name}: {outcome}"


@pytest.mark.parametrize("options", [(), ("--rw",)])
@pytest.mark.parametrize("form", SHARDS)
def test_its_name_is_a_file_that_cannot_be_read(
    form: str, options: tuple[str, ...], mounted: Mounted, tmp_path: Path
) -> None:
    _cut(write(form, tmp_path / "source"))
    chunks = {"zarr3": "a/c/1/2", "n5": f"{data_n5.MEMBER}/2/1", "precomputed": "s/2-4_0-2_0-1"}
    directory, name = os.path.split(chunks[form])
    with mounted(tmp_path / "source", *options) as mount:
        path = mount / directory / name
        assert path.is_file()
        assert path.stat().st_size == 1 << 20
        assert errno_of(path.read_bytes) == errno.EIO
        with path.open("rb") as file:
            assert errno_of(lambda: os.pread(file.fileno(), 10, 5000)) == errno.EIO
        assert os.path.isfile(path)
        assert name in os.listdir(mount / directory) or form == "precomputed"  # its index hides which chunks exist
        assert errno_of((mount / directory / "77").stat) == errno.ENOENT


def test_what_can_be_read_again_is_whole(mounted: Mounted, tmp_path: Path) -> None:
    """The kernel knows no size that would cut it, neither in a file that was opened before."""
    shard = write("zarr3", tmp_path / "source")
    sound = shard.read_bytes()
    _cut(shard)
    data = np.arange(1 << 21, dtype="uint8") | 1
    Written(data, (1 << 21,), (BYTE,), (1 << 21,)).write(tmp_path / "source/large")
    large = tmp_path / "source/large/c/0"
    content = large.read_bytes()
    large.write_bytes(content[:-1])
    with mounted(tmp_path / "source", "-o", "index_ttl=0.1") as mount:
        small, whole = mount / "a/c/1/2", mount / "large/c/0"
        with whole.open("rb", 0) as file:
            assert errno_of(lambda: file.read(10)) == errno.EIO
            assert small.is_file()
            shard.write_bytes(sound)
            large.write_bytes(content)
            wait_until(lambda: errno_of(lambda: os.pread(file.fileno(), 10, 0)) in (None, errno.ESTALE))
        wait_until(lambda: errno_of(whole.read_bytes) is None, 30)
        assert whole.read_bytes() == data.tobytes()
        assert whole.stat().st_size == 1 << 21
        wait_until(lambda: errno_of(small.read_bytes) is None, 30)
        assert len(small.read_bytes()) == small.stat().st_size < 100


def test_it_cannot_be_written_over_or_removed(mounted: Mounted, tmp_path: Path) -> None:
    """What is in the shard beside it would be lost."""
    shard = write("zarr3", tmp_path / "source")
    _cut(shard)
    damaged = shard.read_bytes()
    with mounted(tmp_path / "source", "--rw", "-o", f"journal={tmp_path / 'journal'}") as mount:
        chunk, sound = mount / "a/c/1/2", mount / "a/c/0/0"
        other = mount / "a/c/0/.tmp"
        other.write_bytes(b"x" * 13)
        assert errno_of(lambda: chunk.write_bytes(b"x")) == errno.EIO
        assert errno_of(lambda: os.truncate(chunk, 1)) == errno.EIO
        assert errno_of(lambda: sound.rename(chunk)) == errno.EIO
        assert errno_of(lambda: other.rename(chunk)) == errno.EIO
        assert errno_of(chunk.unlink) == errno.EIO
        assert sound.is_file()
        other.unlink()
    assert shard.read_bytes() == damaged


FAULTS: dict[str, dict[str, Any]] = {
    "403": {"kind": "status", "status": 403},
    "503": {"kind": "status", "status": 503},
    "silence": {"kind": "hang"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_zarr_python_2_gets_an_error_of_a_store_that(fault: str, mounted: Mounted, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write("zarr3", tmp_path / "source")
    with (
        serving(tmp_path / "source", 1) as store,
        mounted(f"{store.url}/a", "--layout", "zarr2", "-o", "store_timeout=1,store_retries=1") as mount,
    ):
        store.fail({"path": "/c/", **FAULTS[fault]})
        [failed] = read_jobs("read_zarr2", [[str(mount), ""]], tmp_path, client_python("zarr2"))
        store.fail()
        # The kernel has the size of an unreadable chunk for a second, and reading it is ESTALE until then.
        wait_until(lambda: all(errno_of(chunk.read_bytes) is None for chunk in mount.glob("[0-9]*/*")), 30)
        (tmp_path / "again").mkdir()
        [outcome] = read_jobs("read_zarr2", [[str(mount), ""]], tmp_path / "again", client_python("zarr2"))
    assert isinstance(failed, str), failed
    assert any(text in failed for text in ("Input/output error", "Permission denied", "timed out"))
    assert np.array_equal(outcome, DATA)
