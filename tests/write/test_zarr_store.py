"""T4: zarr-python's own tests of stores, on one that is written through fsspec, and on files of a mount."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import zarr
from zarr.core.buffer import Buffer, cpu
from zarr.storage import FsspecStore
from zarr.testing.store import StoreTests

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests.write import zarr_machines
from tests.write.mounts import program, writable
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES, STEPS = (6, 15) if times() == 1 else (10 * times(), 50)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    zarr.create_array(tmp_path / "s" / "a", shape=(64, 64), chunks=(8, 8), shards=(32, 32), dtype="u2")
    return tmp_path / "s"


@pytest.fixture
def fs(source: Path, tmp_path: Path) -> Iterator[ShardFileSystem]:
    told = {"journal": str(tmp_path / "journals")}
    fs = ShardFileSystem(str(source), rw=True, write_options=told)  # what is pickled is this one again
    yield fs
    fs.close()
    ShardFileSystem.clear_instance_cache()


def _asynchronous(fs: ShardFileSystem) -> Any:
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    return AsyncFileSystemWrapper(fs, asynchronous=True)


@pytest.mark.anyio
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


class Clearable(FsspecStore):
    """The original's `clear` ends at the first directory with something in it: what is in there has gone with it."""

    async def clear(self) -> None:
        if await self.fs._exists(self.path):
            await self.fs._rm(self.path, recursive=True)


@pytest.mark.slow
@pytest.mark.timeout(320 * times())
@pytest.mark.parametrize("machine", sorted(zarr_machines.MACHINES))
def test_state_machines_through_fsspec(machine: str, source: Path, tmp_path: Path) -> None:
    told = {"journal": str(tmp_path / "journals"), "create": "zarr3"}
    fs = ShardFileSystem(str(source), rw=True, write_options=told, skip_instance_cache=True)

    def make(number: int) -> Any:
        store = Clearable(_asynchronous(fs), path=f"/{number}")
        return zarr_machines.MACHINES[machine](store, fs.publish, source / str(number))

    try:
        zarr_machines.run(make, EXAMPLES, STEPS)
    finally:
        fs.close()


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.timeout(320 * times())
@pytest.mark.parametrize("machine", sorted(zarr_machines.MACHINES))
def test_state_machines_on_a_mount(machine: str, source: Path, tmp_path: Path) -> None:
    with writable(source, tmp_path, "--create", "zarr3") as mount:
        mount.mount()
        much = ["--examples", str(EXAMPLES // 2), "--steps", str(STEPS)]
        program("zarr_machines", machine, mount.path, source, *much, timeout=300 * times())
        assert mount.umount().returncode in (0, 3)
