"""Opens the store of a path or URL."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.core import url_to_fs

from shardfs.model.redact import is_path
from shardfs.storage.cache import nothing
from shardfs.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.storage.store import Store

from shardfs.storage.local import LocalStore
from shardfs.storage.range_client import range_client
from shardfs.storage.read_ahead import ReadAhead
from shardfs.storage.remote import FsspecStore


def open_store(
    source: str,
    storage_options: Mapping[str, Any] | None = None,
    waiting: Callable[[], None] = nothing,
    *,
    follow_symlinks: bool = False,
    patience: RetryPolicy | None = None,
    prefetch: int = 0,
    connections: int = 1,
) -> Store:
    """Open the store of a path or an fsspec URL, including chained URLs.

    For remote stores: `patience` says when to retry; up to `prefetch` bytes are fetched before readers ask for them,
    with at most this number of `connections`.

    Raise FileNotFoundError if a local path does not exist.
    """
    first, separator, _ = source.partition("://" if "://" in source else "::")
    if is_path(source) or (separator == "::" and first not in fsspec.available_protocols()):
        return _open_local(source, waiting, follow_symlinks=follow_symlinks)
    patience = patience or RetryPolicy()
    try:
        # Some file systems send requests when they are created, for instance to read the directory of an archive.
        options = _with_connections(source, storage_options or {}, connections) if prefetch else storage_options or {}
        fs, path = patience.run("open", lambda: url_to_fs(source, **options))
    except TypeError as e:  # fsspec's file systems raise this for a missing or unknown option
        raise ValueError(str(e)) from e
    except ValueError as e:  # "The HTTP server doesn't appear to support range requests", "Cannot seek streaming HTTP"
        archive, separator, url = source.partition("::http")
        if not separator or "HTTP" not in str(e):
            raise
        why = "the web server does not send byte ranges, which archives are read by"
        advice = f"to download the archive first, mount {archive}::simplecache::http{url}"
        raise OSError(errno.EOPNOTSUPP, f"{why}; {advice}") from e
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        return _open_local(path, waiting, follow_symlinks=follow_symlinks)
    ahead = ReadAhead(prefetch, connections, patience.counters, waiting) if prefetch else None
    ranges = range_client(fs, path, patience.timeout_s)
    if "http" in fs.protocol:
        from shardfs.storage.web import WebStore

        return WebStore(fs, path, waiting, patience, ahead, ranges)
    return FsspecStore(fs, path, waiting, patience, ahead, ranges)


def _with_connections(source: str, options: Mapping[str, Any], connections: int) -> Mapping[str, Any]:
    """Let s3fs use as many connections as may fetch ahead; its default is 10. The user's own value stays."""
    if not source.startswith(("s3://", "s3a://")):
        return options
    return {**options, "config_kwargs": {"max_pool_connections": connections, **(options.get("config_kwargs") or {})}}


def _open_local(path: str, waiting: Callable[[], None], *, follow_symlinks: bool) -> LocalStore:
    os.stat(path)  # raises the exact error if the path is not accessible
    return LocalStore(path, waiting, follow_symlinks=follow_symlinks)
