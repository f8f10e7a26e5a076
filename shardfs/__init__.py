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
    """Mount a source in a temporary directory for the length of a `with` block, whose value is the path.

        with shardfs.mounted("s3://bucket/brain.zarr", storage_options={"anon": True}) as path:
            zarr.open_array(path)

    The mount is gone when the block is left, however it is left, and also if this process is killed. Programs that
    still have files open are served for five seconds more. With `rw=True` it ends when all that was written is
    published.

    Args:
        storage_options: for the fsspec file system of the source, as far as JSON can say it.
        ready_timeout: seconds until TimeoutError.
        options: those of docs/options.md, such as `layout` or `index_cache="1G"`.

    Raises:
        ValueError: an option that does not exist, or a value it cannot have.
        OSError: the source cannot be read, or the mount failed; or not all that was written could be published.
        shardfs.model.errors.UnsupportedError: the source is no sharded dataset that shardfs knows.
    """
    from shardfs.daemon import context

    return context.mounted(source, storage_options=storage_options, ready_timeout=ready_timeout, given=options)
