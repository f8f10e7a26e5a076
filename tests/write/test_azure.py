"""Arrays in Azure Blob Storage are written, and no other writer's change is lost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import zarr

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import BusyError
from tests.write.azurite import azurite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def account() -> Iterator[str]:
    with azurite() as account:
        yield account


class Place:
    """An array in a container of its own: four chunks in two shards, of which the first chunk is absent."""

    def __init__(self, account: str, top: Path) -> None:
        self.options = {"connection_string": account}
        self.url = f"abfs://c{os.urandom(4).hex()}"
        self.journals = top / "journals"
        fsspec.filesystem("abfs", **self.options).mkdir(self.url.removeprefix("abfs://"))
        self.native("w")[4:] = np.arange(5, 17, dtype=np.uint8)

    def native(self, mode: Any = "r") -> Any:
        """The array, opened by zarr-python without shardfs."""
        url, options = f"{self.url}/a", self.options
        if mode == "w":
            return zarr.create_array(
                url, shape=(16,), chunks=(4,), shards=(8,), dtype="u1", compressors=None, storage_options=options
            )
        return zarr.open_array(url, mode=mode, storage_options=options)

    def open(self, **more: Any) -> ShardFileSystem:
        return ShardFileSystem(
            self.url,
            rw=True,
            write_options={"journal": str(self.journals), **more},
            storage_options=self.options,
            skip_instance_cache=True,
        )


@pytest.fixture
def place(account: str, tmp_path: Path) -> Place:
    pytest.importorskip("adlfs")
    return Place(account, tmp_path)


def test_chunks_are_published_beside_those_of_another_writer(place: Place) -> None:
    fs = place.open(idle="1000", age="1000")
    fs.pipe_file("a/c/0", bytes([50] * 4))
    place.native("r+")[4:8] = 60
    fs.publish(timeout=60)
    assert fs.close(60) == []
    assert place.native()[:].tolist() == [50] * 4 + [60] * 4 + [*range(9, 17)]


def test_a_chunk_that_another_writer_changed_is_a_conflict(place: Place) -> None:
    fs = place.open(idle="1000", age="1000")
    assert fs.cat_file("a/c/1") == bytes([5, 6, 7, 8])
    fs.pipe_file("a/c/1", bytes([50] * 4))
    place.native("r+")[4:8] = 60
    with pytest.raises(OSError, match="another"):
        fs.publish(timeout=60)
    assert fs.close(60) == ["a/c/1"]
    assert place.native()[:].tolist()[4:8] == [60] * 4


def test_one_writable_mount(place: Place, tmp_path: Path) -> None:
    fs = place.open()
    with pytest.raises(BusyError):
        place.open(journal=str(tmp_path / "other"))
    fs.rm_file("a/c/1")
    assert fs.close(60) == []
    assert place.native()[:].tolist()[4:8] == [0] * 4
