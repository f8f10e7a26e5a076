"""Decoding for many readers: each chunk once, and with a bound on the memory of all of them together."""

from __future__ import annotations

import gzip
import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from shardfs.codecs.transcode import Transcoder
from shardfs.codecs.zlib_streams import MAX_DECODED
from shardfs.vfs.tree import Tree, open_tree
from tests.datasets import GZIP, LITTLE, ZSTD
from tests.mount.programs import run
from tests.storage.test_byte_budget import totals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Mounted

MIB = 1 << 20
CHUNKS, READERS = 6, 12
DATA = np.random.default_rng(1).integers(0, 50, CHUNKS * MIB, np.uint8).view("<i4")


def _stored(path: Path, codecs: list[Any], around: tuple[Any, ...] = ()) -> Path:
    """An array of six chunks of 1 MiB in one shard."""
    tensorstore = pytest.importorskip("tensorstore")
    sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [MIB // 4], "codecs": codecs}}
    metadata = {
        "shape": [len(DATA)], "data_type": "int32", "codecs": [sharding],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(DATA)]}},
    }  # fmt: skip
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(DATA).result()
    if around:  # which tensorstore does not write around shards
        document = json.loads((path / "zarr.json").read_text())
        document["codecs"] += around
        (path / "zarr.json").write_text(json.dumps(document))
        (path / "c/0").write_bytes(gzip.compress((path / "c/0").read_bytes()))
    return path


def _raw(path: Path, cache: int) -> Tree:
    return open_tree(str(path), layout="zarr2", chunk_codec="raw", chunk_cache_bytes=cache)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of stored chunks that were decoded."""
    sizes: list[int] = []

    def counted(show: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: Any, coords: Any, stored_chunk: bytes) -> Any:
            sizes.append(len(stored_chunk))
            return show(self, coords, stored_chunk)

        return counting

    monkeypatch.setattr(Transcoder, "show", counted(Transcoder.show))
    return sizes


def _read(tree: Tree, name: str, piece: int) -> bytes:
    number, out = tree.resolve(name).number, bytearray()
    while part := tree.read(number, len(out), piece):
        out += part
    return bytes(out)


@pytest.mark.parametrize("codecs", [[LITTLE, ZSTD], [LITTLE, GZIP]], ids=["zstd", "gzip"])
@pytest.mark.parametrize("cache", [64 << 10, 64 * MIB])
def test_readers_of_one_chunk_share_one_decode(
    cache: int, codecs: list[Any], decodes: list[int], tmp_path: Path
) -> None:
    tree = _raw(_stored(tmp_path / "a", codecs), cache)
    barrier = threading.Barrier(READERS)

    def read(_: int) -> bytes:
        barrier.wait(60)
        return _read(tree, "3", 64 << 10)

    with ThreadPoolExecutor(READERS) as pool:
        chunks = list(pool.map(read, range(READERS)))
    assert chunks == [DATA[3 * MIB // 4 : MIB].tobytes()] * READERS
    assert len(decodes) == 1


@pytest.mark.parametrize("around", [(), (GZIP,)], ids=["", "codec around the shard"])
@pytest.mark.parametrize("cache", [64 << 10, 3 * MIB, 10 * MIB])
def test_all_decodes_of_a_tree_share_a_budget(
    cache: int, around: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = totals(monkeypatch)
    tree = _raw(_stored(tmp_path / "a", [LITTLE, ZSTD], around), cache)
    with ThreadPoolExecutor(READERS) as pool:
        chunks = list(pool.map(lambda i: _read(tree, f"{i % CHUNKS}", MIB), range(READERS)))
    assert [len(data) for data in chunks] == [MIB] * READERS
    assert b"".join(chunks[:CHUNKS]) == DATA.tobytes()
    budget = tree.datasets.chunk_cache.decoding
    shard = (tmp_path / "a/c/0").stat().st_size + MAX_DECODED  # its decoded size is not known before
    one = shard if around else 3 * MIB
    assert 2 * MIB < max(recorded) <= max(cache, one)
    assert budget.used == 0


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "min_bytes", "max_bytes"), [((), 0, 17 << 20), (("-o", "direct_io"), 47 << 20, 49 << 20)]
)
def test_decoded_chunks_that_the_kernel_keeps_are_soon_forgotten(
    options: tuple[str, ...], min_bytes: int, max_bytes: int, mounted: Mounted, tmp_path: Path
) -> None:
    """And each is decoded once, although many requests ask for its parts."""
    values = np.random.default_rng(3).integers(0, 50, (24, 1 << 20), dtype="<u2")
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=values.shape, dtype="<u2", chunks=(1, 1 << 20), shards=(4, 1 << 20)
    )
    array[:] = values
    with mounted(tmp_path / "a.zarr", "--layout", "n5", *options) as mount:
        run("sh", "-c", f"cat {mount}/0/* | md5sum", timeout=60)
        cache = json.loads(run("cat", mount / ".shardfs/status.json", timeout=60))["caches"]["chunk"]
        assert min_bytes <= cache["bytes"] <= max_bytes
        assert cache["misses"] == len(values)
        block = subprocess.run(["cat", mount / "0/23"], stdout=subprocess.PIPE, timeout=250, check=True).stdout
        assert np.array_equal(np.frombuffer(block[12:], ">u2"), values[23])
