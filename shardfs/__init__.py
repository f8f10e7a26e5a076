"""The public interface of shardfs, besides its command line and the fsspec protocol `shardfs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Unpack

    from shardfs.jobs.python_api import JobOptions, JobResult

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
    """Context manager that mounts a source in a temporary directory and yields the absolute path of the mount.

    Leaving the block unmounts the source and removes the directory, also after an exception. If this process is killed,
    the daemon does so. The daemon serves programs that still have files open for five more seconds. With `rw=True`, a
    normal exit from the block waits until all written data is published, as long as that makes progress; after an
    exception, the daemon publishes for at most 30 seconds, and the journal keeps the rest.

    Args:
        source: a path or an fsspec URL.
        storage_options: passed to the fsspec file system of the source. The values must be JSON serializable.
        ready_timeout: seconds to wait for the mount before raising TimeoutError.
        options: options from docs/options.md, such as `layout` or `index_cache="1G"`.

    Raises:
        ValueError: an option does not exist or has an invalid value.
        NotADatasetError: the source contains no sharded dataset that shardfs supports, or another writer uses it, or
            the layout cannot show an array.
        MountError: the mount failed, for instance because FUSE is missing.
        TimeoutError: the mount was not ready in time.
        OSError: the source is unreadable, or with `rw=True`, not all data could be published, or a program still uses
            the mount.

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

    return context.mounted(source, storage_options=storage_options, ready_timeout=ready_timeout, options=options)


def pack(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    chunks_per_shard: Sequence[int] = (),
    shard_size: int | None = None,
    arrays: Sequence[str] = (),
    format: str = "",
    transcode: bool = False,
    in_place: bool = False,
    abort: bool = False,
    **options: Unpack[JobOptions],
) -> JobResult:
    """Copy an unsharded dataset to a new sharded one without decoding chunks, as `shardfs pack` does (docs/pack.md).

    Returns counts when the work is done: see `shardfs.jobs.python_api.JobResult`. A finished job that is repeated does
    nothing.

    Args:
        source: a path or an fsspec URL.
        dest: a path or an fsspec URL of a directory that does not exist, is empty, or is left from an interrupted call.
        chunks_per_shard: in the axis order of shapes in documents; for the fastest axes, if there are fewer numbers.
        shard_size: the largest size of a shard in bytes before compression, without `chunks_per_shard`. Without both,
            a shard has at most 1,000 chunks and 1 GiB.
        arrays: the directories of the documents of the arrays to pack, relative to the source; () for all arrays.
        format: the format of `dest`: "zarr3", "n5", "precomputed" or "bcolz"; "" for the source's, and "zarr3" for
            Zarr v2.
        transcode: decode and encode chunks that `dest` cannot have unchanged. Otherwise their arrays are refused.
        in_place: replace the chunk files of a local source, instead of writing to `dest`.
        abort: with `in_place`, go back to the former files.
        options: see `shardfs.jobs.python_api.JobOptions`.

    Raises:
        UnfinishedJobError: some files failed. `dest` has the others, without metadata. Call again to continue.
        UnsupportedError: an array cannot be packed, or there is none (NotADatasetError). Nothing was written.
        BusyError: a mount or another job uses the source, or data wait in its journal.
        OSError: a place cannot be read or written, they are inside each other, or `dest` has data (FileExistsError).
        TypeError: arguments contradict each other.

    Examples:
        >>> shardfs.pack("plain.zarr", "packed.zarr", chunks_per_shard=(2, 2)).shards
        4
    """
    from shardfs.jobs import pack, pack_job, python_api

    how: dict[str, Any] = {"chunks_per_shard": tuple(chunks_per_shard), "shard_bytes": shard_size}
    how["arrays"] = tuple(path.strip("/") for path in arrays)
    if in_place:
        if dest is not None or format or transcode:
            raise TypeError("dest, format and transcode do not go with in_place=True")
        return python_api.in_place(source, options, how, abort=abort)
    if dest is None or abort:
        raise TypeError("give dest, or in_place=True; abort needs in_place=True")
    places = python_api.places(source, dest, options)
    job = pack_job.PackJob(*places, **how, format=format, transcode=transcode)
    return python_api.complete(pack.PackRun(job, python_api.part_of(options)), options)


def unpack(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    layout: str = "native",
    chunk_codec: str | None = None,
    skip_unsupported: bool = False,
    **options: Unpack[JobOptions],
) -> JobResult:
    """Copy a sharded dataset to a new one with one file per chunk, as `shardfs unpack` does (docs/pack.md).

    `dest` gets the files that a mount of the source shows. In the native layout, the bytes of chunks are copied without
    decoding. Call the function again after an error or an interruption: it continues. Returns as `pack` does.

    Args:
        source: a path or an fsspec URL.
        dest: a path or an fsspec URL of a directory that does not exist, is empty, or is left from an interrupted call.
        layout: the layout of the mount: native, zarr2, zarr3, n5, precomputed or bcolz (docs/layouts.md).
        chunk_codec: the option of the mount (docs/options.md): a codec for all chunks, such as "raw".
        skip_unsupported: leave out arrays that the layout cannot show.
        options: see `shardfs.jobs.python_api.JobOptions`.

    Raises:
        UnsupportedError: the layout cannot show an array, or there is none (NotADatasetError). Nothing was written.
        OptionError: there is no such layout, or it does not show chunks in `chunk_codec`.
        Exception: UnfinishedJobError, BusyError and OSError as in `pack`.

    Examples:
        >>> result = shardfs.unpack("brain.zarr", "unpacked.zarr", layout="zarr2")
        >>> zarr.open_array("unpacked.zarr/t1", mode="r").chunks
        (16, 16, 16)
    """
    from shardfs.config import loading
    from shardfs.jobs import python_api, unpack, unpack_job

    loading.check(loading.merged(loading.from_flags({"layout": layout, "chunk_codec": chunk_codec})))
    places = python_api.places(source, dest, options)
    job = unpack_job.UnpackJob(*places, layout, chunk_codec, skip_unsupported)
    return python_api.complete(unpack.UnpackRun(job, python_api.part_of(options)), options)
