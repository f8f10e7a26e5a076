"""The public interface of shardfs, besides its command line and the fsspec protocol `shardfs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.jobs.pack import JobResult, Progress
    from shardfs.jobs.shared_work import JobSource

from shardfs.model.errors import (
    BusyError,
    CorruptShardError,
    MountError,
    NotADatasetError,
    ShardfsError,
    StaleShardError,
    UnfinishedJobError,
    UnfitChunkError,
    UnsupportedError,
)
from shardfs.model.version import __version__

__all__ = [
    "BusyError",
    "CorruptShardError",
    "MountError",
    "NotADatasetError",
    "ShardfsError",
    "StaleShardError",
    "UnfinishedJobError",
    "UnfitChunkError",
    "UnsupportedError",
    "__version__",
    "mounted",
    "pack",
    "unpack",
]


def mounted(
    source: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    ready_timeout: float = 60,
    **options: Any,
) -> AbstractContextManager[Path]:
    """Context manager that mounts a source in a temporary directory and yields the path of the mount.

    Leaving the block unmounts the source, also after an exception. If this process is killed, the daemon unmounts the
    source. The daemon serves programs that still have files open for five more seconds. With `rw=True`, a
    normal exit from the block waits until all written data is published.

    Args:
        source: a path or an fsspec URL.
        storage_options: passed to the fsspec file system of the source. The values must be JSON serializable.
        ready_timeout: seconds to wait for the mount before raising TimeoutError.
        options: options from docs/options.md, such as `layout` or `index_cache="1G"`.

    Raises:
        ValueError: an option does not exist or has an invalid value.
        NotADatasetError: the source contains no sharded dataset that shardfs supports, or another writer uses it.
        MountError: the mount failed, for instance because FUSE is missing.
        TimeoutError: the mount was not ready in time.
        OSError: the source is unreadable, or some written data could not be published.

    Examples:
        The chunks on the mount are those in the shards:

        >>> with shardfs.mounted("brain.zarr") as path:
        ...     array = zarr.open_array(path / "t1", mode="r")
        ...     array.shape, array.chunks, array.shards
        ((64, 64, 64), (16, 16, 16), None)

        With `rw=True`, the block writes into the shards:

        >>> with shardfs.mounted("brain.zarr", rw=True) as path:
        ...     zarr.open_array(path / "t1", mode="r+")[0] = 7
        >>> zarr.open_array("brain.zarr/t1", mode="r")[0, :2, 0].tolist()
        [7, 7]
    """
    from shardfs.daemon import context

    return context.mounted(source, storage_options=storage_options, ready_timeout=ready_timeout, given=options)


def pack(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    chunks_per_shard: Sequence[int] = (),
    shard_size: int | None = None,
    arrays: Sequence[str] = (),
    format: str = "",
    transcode: bool = False,
    jobs: int = 1,
    part: tuple[int, int] = (1, 1),
    executor: Executor | None = None,
    progress: Callable[[Progress], object] | None = None,
    follow_symlinks: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Copy an unsharded dataset to a new sharded one without decoding chunks, as `shardfs pack` does (docs/pack.md).

    Args:
        source: a path or an fsspec URL.
        dest: a path or an fsspec URL of a directory that does not exist, is empty, or is left from an interrupted call.
        chunks_per_shard: in the axis order of shapes in the documents of the source.
        shard_size: the largest size of a shard before compression in bytes, if `chunks_per_shard` is not given.
        arrays: the directories of the documents of the arrays to pack, relative to the source; () for all arrays.
        format, transcode: the options `--format` and `--transcode` of the command (docs/pack.md); "" is no option.
        jobs: the number of processes. Their start needs `if __name__ == "__main__":` in a script.
        part: (i, n) does part i of n, counted from 1. The part that ends last completes `dest`.
        executor: runs the tasks instead of new processes; `jobs` is then the number of tasks that it runs at a time.
        progress: called in this thread after each task, which is a shard or a batch of other files.
        follow_symlinks: also copy the targets of symbolic links that lead out of the source.
        storage_options: passed to the fsspec file system of the source. The values must be JSON serializable.
        dest_storage_options: the same for `dest`; None passes the options of the source.

    Raises:
        UnfinishedJobError: some files failed. `dest` has the others, without metadata. Call again to continue.
        UnsupportedError: an array cannot be packed, or there is none. Nothing was written.
        BusyError: a mount writes to the source, or data wait in its journal.
        OSError: a place cannot be read or written, they are inside each other, or `dest` has data (FileExistsError).

    Examples:
        >>> shardfs.pack("plain.zarr", "packed.zarr", chunks_per_shard=(2, 2)).shards
        4
    """
    from shardfs.jobs.pack import PackRun
    from shardfs.jobs.packing import PackJob
    from shardfs.jobs.shared_work import JobPart

    places = _places(source, dest, storage_options, dest_storage_options, follow_symlinks=follow_symlinks)
    job = PackJob(*places, tuple(chunks_per_shard), shard_size, _stripped(arrays), format, transcode)
    return PackRun(job, JobPart(*part)).complete(executor, jobs, progress)


def unpack(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    layout: str = "native",
    arrays: Sequence[str] = (),
    jobs: int = 1,
    part: tuple[int, int] = (1, 1),
    executor: Executor | None = None,
    progress: Callable[[Progress], object] | None = None,
    chunk_codec: str | None = None,
    skip_unsupported: bool = False,
    follow_symlinks: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Copy a sharded dataset to a new one with one file per chunk, as `shardfs unpack` does (docs/pack.md).

    `dest` gets the files that a mount of the source shows. In the native layout, the bytes of chunks are copied without
    decoding. Call the function again after an error or an interruption: it continues.

    Args:
        layout: the layout of the mount: native, zarr2, zarr3, n5, precomputed or bcolz (docs/layouts.md).
        arrays: the directories of the documents of the arrays to unpack, relative to the source; () for all arrays.
            Other files are copied, and with them other arrays. Only in the native layout.
        chunk_codec: the option of the mount (docs/options.md): a codec for all chunks, such as "raw".
        skip_unsupported: leave out arrays that the layout cannot show.

    The other arguments are those of `pack`.

    Raises:
        UnsupportedError: the layout cannot show an array. Nothing was written.
        Exception: the other exceptions are those of `pack`.

    Examples:
        >>> result = shardfs.unpack("brain.zarr", "unpacked.zarr", layout="zarr2")
        >>> zarr.open_array("unpacked.zarr/t1", mode="r").chunks
        (16, 16, 16)
    """
    from shardfs.jobs.shared_work import JobPart
    from shardfs.jobs.unpack import UnpackRun
    from shardfs.jobs.unpacking import UnpackJob

    places = _places(source, dest, storage_options, dest_storage_options, follow_symlinks=follow_symlinks)
    job = UnpackJob(*places, layout, chunk_codec, skip_unsupported, _stripped(arrays))
    return UnpackRun(job, JobPart(*part)).complete(executor, jobs, progress)


def _places(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    dest_options: Mapping[str, Any] | None,
    *,
    follow_symlinks: bool,
) -> tuple[JobSource, JobSource]:
    from shardfs.jobs.shared_work import JobSource

    dest_options = options if dest_options is None else dest_options
    return JobSource.of(source, options, follow_symlinks=follow_symlinks), JobSource.of(dest, dest_options)


def _stripped(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path.strip("/") for path in paths)
