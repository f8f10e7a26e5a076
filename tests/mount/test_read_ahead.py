"""Mounts of a store with latency: how many requests whole arrays, planes and random chunks take."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.data_layouts import write_zarr
from tests.datasets import LITTLE
from tests.mount.distant import serving
from tests.mount.programs import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.mount.distant import Store

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

SHAPE, CHUNK, SHARD = (64, 256, 256), (16, 16, 16), (32, 128, 128)
GRID = tuple(n // c for n, c in zip(SHAPE, CHUNK, strict=True))
SHARDS = 8
CHUNK_BYTES = 2 * 16**3
ALL = list(itertools.product(*map(range, GRID)))
DATA = np.arange(np.prod(SHAPE), dtype=np.uint16).reshape(SHAPE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("aiohttp")
    root = tmp_path_factory.mktemp("distant")
    write_zarr(root / "a", DATA, CHUNK, [LITTLE], shard=SHARD)
    with serving(root) as store:
        yield store


def read(mount: Path, chunks: Sequence[Sequence[int]], threads: int = 1) -> None:
    """Read chunk files, and compare them with the array."""

    def one(chunk: Sequence[int]) -> None:
        voxels = np.frombuffer((mount / "c" / "/".join(map(str, chunk))).read_bytes(), np.uint16).reshape(CHUNK)
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(chunk, CHUNK, strict=True))
        np.testing.assert_array_equal(voxels, DATA[box])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, chunks))


def nbytes(requests: Sequence[dict[str, Any]]) -> int:
    return sum(r["bytes"] for r in requests)


INDICES = SHARDS * (16 * 2 * 8 * 8 + 4)
"""Bytes of the indices of all shards."""


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_a_whole_array_takes_few_requests(threads: int, store: Store, mounted: Mounted) -> None:
    with mounted(f"{store.url}/a") as mount:
        store.requests()
        read(mount, ALL, threads)
        requests = store.requests()
        status = json.loads((mount / ".shardfs/status.json").read_text())
    assert len(requests) < len(ALL) / 2
    assert nbytes(requests) < 1.3 * DATA.nbytes + INDICES
    assert status["store"]["bytes_ahead_used"] > 0.7 * DATA.nbytes


def test_a_copy_takes_few_requests(store: Store, mounted: Mounted, tmp_path: Path) -> None:
    with mounted(f"{store.url}/a") as mount:
        store.requests()
        run("cp", "-r", mount / "c", tmp_path / "c")
        requests = store.requests()
    read(tmp_path, ALL)
    assert len(requests) < len(ALL) / 2
    shutil.rmtree(tmp_path / "c")


def test_a_shard_that_was_replaced_is_read_anew(mounted: Mounted, tmp_path: Path) -> None:
    """What was fetched ahead of the old shard is not served once the index of the new one is known."""
    pytest.importorskip("aiohttp")
    path = tmp_path / "served" / "a"
    write_zarr(path, np.arange(256, dtype=np.uint16), (4,), [LITTLE], shard=(128,))
    with serving(tmp_path / "served") as store, mounted(f"{store.url}/a", "-o", "index_ttl=0") as mount:
        for i in range(20):
            assert np.frombuffer((mount / f"c/{i}").read_bytes(), "u2")[0] == 4 * i
        write_zarr(path, np.arange(256, dtype=np.uint16) + 1000, (4,), [LITTLE], shard=(128,))
        for i in range(20, 64):
            assert np.frombuffer((mount / f"c/{i}").read_bytes(), "u2")[0] == 4 * i + 1000
