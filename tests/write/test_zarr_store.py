"""zarr-python's own conformance tests of stores, on one over a source that is written through fsspec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.storage import FsspecStore
from zarr.testing.store import StoreTests

from shardfs.fsspec_fs import ShardFileSystem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[ShardFileSystem]:
    zarr.create_array(tmp_path / "s" / "a", shape=(64, 64), chunks=(8, 8), shards=(32, 32), dtype="u2")
    told = {"journal": str(tmp_path / "journals")}
    fs = ShardFileSystem(str(tmp_path / "s"), rw=True, write_options=told)  # what is pickled is this one again
    yield fs
    fs.close()
    ShardFileSystem.clear_instance_cache()


def _asynchronous(fs: ShardFileSystem) -> Any:
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    return AsyncFileSystemWrapper(fs, asynchronous=True)


class TestStore(StoreTests[FsspecStore, cpu.Buffer]):
    """zarr-python's tests of stores, on one over a writable tree. See its `zarr.testing.store`."""

    store_cls = FsspecStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, fs: ShardFileSystem) -> dict[str, Any]:
        return {"fs": _asynchronous(fs), "path": "/test"}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> FsspecStore:
        return self.store_cls(**store_kwargs)

    async def get(self, store: FsspecStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(store.fs.sync_fs.cat_file(f"{store.path}/{key}"))

    async def set(self, store: FsspecStore, key: str, value: Buffer) -> None:
        store.fs.sync_fs.pipe_file(f"{store.path}/{key}", value.to_bytes())

    def test_store_repr(self, store: FsspecStore) -> None:
        assert "shard" in str(store).lower() or "Fsspec" in str(store)

    def test_store_supports_writes(self, store: FsspecStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: FsspecStore) -> None:
        assert store.supports_listing
