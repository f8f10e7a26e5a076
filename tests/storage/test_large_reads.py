"""One pread(2) returns at most 2,147,479,552 bytes. Here it returns at most `MOST`, so that small files are large."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from shardfs.model.blobs import ByteRange, FilePart
from shardfs.storage.open_store import open_store
from shardfs.storage.regular_files import read_regular
from shardfs.storage.writers.planned_blob import PlannedBlob
from shardfs.write.buffers import Budget, Buffer
from tests.jobs.packing import pack
from tests.jobs.test_pack import problems

if TYPE_CHECKING:
    from pathlib import Path

MOST = 1000
DATA = bytes(np.random.default_rng(0).integers(0, 256, 3500, np.uint8))


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, start: pread(fd, min(size, MOST), start))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(DATA)
    return tmp_path / "file"


def test_pack(tmp_path: Path) -> None:
    values: Any = np.frombuffer(DATA, "u1")
    zarr.create_array(tmp_path / "source", shape=(3500,), chunks=(1750,), dtype="u1", compressors=None)[:] = values
    assert problems(pack(str(tmp_path / "source"), str(tmp_path / "target"))) == []
    array: Any = zarr.open_array(tmp_path / "target", mode="r")
    assert np.array_equal(array[:], values)


def test_the_plan_of_an_object(file: Path) -> None:
    with file.open("rb") as opened:
        blob = PlannedBlob([FilePart(opened.fileno(), 0, 3500)], None)
        assert blob.read([ByteRange(0, 3500)]) == [DATA]


def test_a_buffer_on_the_disk(file: Path) -> None:
    buffer = Buffer(Budget(0, lambda: os.open(file, os.O_RDWR)), 1 << 20)
    buffer.write(0, DATA)
    assert buffer.read(0, 4000) == DATA
    buffer.close()


def test_a_state_file(file: Path) -> None:
    assert read_regular(str(file), 4000) == DATA


def test_a_chunk_in_a_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/chunk", DATA)
    store = open_store(str(tmp_path / "x.zip"))
    assert store.open("a/chunk").read([ByteRange(1, 3400)]) == [DATA[1:3400]]
