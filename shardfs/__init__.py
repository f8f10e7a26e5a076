"""shardfs: sharded n-d datasets as one file per chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

from shardfs.model.version import __version__ as __version__


def mounted(
    source: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    ready_timeout: float = 60,
    **options: Any,
) -> AbstractContextManager[Path]:
    """Context manager that mounts a source in a temporary directory and yields the path of the mount.

        with shardfs.mounted("s3://bucket/brain.zarr", storage_options={"anon": True}) as path:
            zarr.open_array(path)

    Leaving the block unmounts the source, also after an exception. If this process is killed, the daemon unmounts the
    source. The daemon serves programs that still have files open for five more seconds. With `rw=True`, a
    normal exit from the block waits until all written data is published.

    Args:
        storage_options: passed to the fsspec file system of the source. The values must be JSON serializable.
        ready_timeout: seconds to wait for the mount before raising TimeoutError.
        options: options from docs/options.md, such as `layout` or `index_cache="1G"`.

    Raises:
        ValueError: an option does not exist or has an invalid value.
        OSError: the source is unreadable, the mount failed, or some written data could not be published.
        shardfs.model.errors.UnsupportedError: the source contains no sharded dataset that shardfs supports.
    """
    from shardfs.daemon import context

    return context.mounted(source, storage_options=storage_options, ready_timeout=ready_timeout, given=options)
