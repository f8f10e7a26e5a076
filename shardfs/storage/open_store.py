"""Opens the store of a path or URL."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any

from shardfs.model.errors import message
from shardfs.model.redact import is_path, public_name
from shardfs.storage.cache import nothing
from shardfs.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.storage.remote import FsspecStore
    from shardfs.storage.store import Store

from shardfs.storage.kernel_read_ahead import KernelReadAhead, is_slow
from shardfs.storage.local import LocalStore
from shardfs.storage.read_ahead import ReadAhead

log = logging.getLogger(__name__)


def open_store(
    source: str,
    storage_options: Mapping[str, Any] | None = None,
    waiting: Callable[[], None] = nothing,
    *,
    follow_symlinks: bool = False,
    retry: RetryPolicy | None = None,
    prefetch: int = 0,
    connections: int = 1,
    cache_dir: str | None = None,
    cache_size: int = 0,
    offline: bool = False,
) -> Store:
    """Open the store of a path or an fsspec URL, including chained URLs. The path may be that of a zip file.

    Args:
        storage_options: of fsspec's file system; unused for paths.
        waiting: called before any call that may wait for a disk or a network.
        follow_symlinks: a local path: whether links may lead out of it.
        retry: a remote store: when requests are repeated.
        prefetch: the most bytes that are fetched before readers ask for them, or, for slow local stores, that the
            kernel reads ahead; 0 for none.
        connections: the most requests under way for that.
        cache_dir: the directory that keeps what was read from a remote store, at most `cache_size` bytes; None for no
            cache, `auto` as in `cache_directory`. If it cannot be used, the log says so, and there is none.
        offline: send no request.

    Raise FileNotFoundError if a local path does not exist; ValueError for an unknown protocol or storage option;
    ImportError if a package is missing; OSError if the store cannot be opened. Callers wrap it in `opening`, which
    names the source.
    """
    if _is_zip_file(source):
        source = f"zip://::{os.path.abspath(source)}"
    first, separator, _ = source.partition("://" if "://" in source else "::")
    if is_path(source) or (separator == "::" and not _is_protocol(first)):
        return _open_local(source, waiting, prefetch, follow_symlinks=follow_symlinks)
    retry = retry or RetryPolicy()
    if offline and "::" in source:
        why = "chained sources are not kept in the disk cache, so there is nothing to read with -o offline"
        raise OSError(errno.EHOSTUNREACH, why, public_name(source))
    options = _with_connections(source, storage_options or {}, connections) if prefetch else storage_options or {}
    fs, path = _file_system(source, options, retry)
    if fs is None:
        return _open_local(path, waiting, prefetch, follow_symlinks=follow_symlinks)
    store = _store_of(fs, path, waiting, retry, prefetch, connections)
    if not cache_dir and not offline:
        return store
    return _with_cache(store, cache_dir or "auto", cache_size, source, storage_options or {}, waiting, offline=offline)


def _is_zip_file(source: str) -> bool:
    """Return whether a source is the path of a zip file, which can be opened without `zip://`."""
    return source.lower().endswith((".zip", ".ozx")) and "::" not in source and os.path.isfile(source)


def _is_protocol(word: str) -> bool:
    import fsspec

    return word in fsspec.available_protocols()


def _file_system(source: str, options: Mapping[str, Any], retry: RetryPolicy) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, None if it is that of the local disk, and the path in it."""
    from shardfs.storage.late_file_system import late_file_system, without_foreign_headers

    if (late := late_file_system(source, options)) is not None:
        return late
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        # Some file systems send requests when they are created, for instance to read the directory of an archive.
        fs, path = retry.run("open", lambda: url_to_fs(source, **options))
        return None if isinstance(fs, LocalFileSystem) else without_foreign_headers(fs), path
    except TypeError as e:  # fsspec's file systems raise this for a missing or unknown option
        raise ValueError(str(e)) from e
    except ValueError as e:  # "The HTTP server doesn't appear to support range requests", "Cannot seek streaming HTTP"
        archive, separator, url = source.partition("::http")
        if not separator or "HTTP" not in str(e):
            raise
        why = "the web server does not send byte ranges, which archives are read by"
        advice = f"to download the archive first, mount {archive}::simplecache::http{url}"
        raise OSError(errno.EOPNOTSUPP, f"{why}; {advice}") from e


def _store_of(
    fs: Any, path: str, waiting: Callable[[], None], retry: RetryPolicy, prefetch: int, connections: int
) -> FsspecStore:
    """Return the store of a remote file system. Its modules are imported here, because local mounts need none."""
    from shardfs.storage.range_client import range_client
    from shardfs.storage.remote import FsspecStore

    ahead = ReadAhead(prefetch, connections, retry, waiting) if prefetch else None
    ranges = range_client(fs, path, retry.timeout_s)
    if "http" in fs.protocol:
        from shardfs.storage.http_store import HttpStore

        return HttpStore(fs, path, waiting, retry, ahead, ranges)
    if "zip" in fs.protocol:
        from shardfs.storage.zip_store import ZipStore

        return ZipStore(fs, path, waiting, retry, ahead, ranges)
    return FsspecStore(fs, path, waiting, retry, ahead, ranges)


def _with_cache(
    store: FsspecStore,
    directory: str,
    limit: int,
    source: str,
    options: Mapping[str, Any],
    waiting: Callable[[], None],
    *,
    offline: bool,
) -> Store:
    """Keep what is read on the disk. Log why, and return the store itself, if that is not possible."""
    from shardfs.storage.cached_store import CachedStore
    from shardfs.storage.disk_cache import DiskCache, cache_directory

    if "::" in source and not offline:
        # Members of archives have no version of their own, and other chains have a cache.
        log.info("%s: chained sources are not kept in the disk cache", public_name(source))
        return store
    try:
        cache = DiskCache(cache_directory(directory), limit)
    except OSError as e:
        if offline:
            raise
        log.warning("no disk cache: %s", message(e))
        return store
    return CachedStore(store, cache, source, options, waiting, offline=offline)


def _with_connections(source: str, options: Mapping[str, Any], connections: int) -> Mapping[str, Any]:
    """Let s3fs use as many connections as may fetch ahead; its default is 10. The user's own value stays."""
    if not source.startswith(("s3://", "s3a://")):
        return options
    return {**options, "config_kwargs": {"max_pool_connections": connections, **(options.get("config_kwargs") or {})}}


def _open_local(path: str, waiting: Callable[[], None], prefetch: int, *, follow_symlinks: bool) -> LocalStore:
    os.stat(path)  # raises the exact error if the path is not accessible
    ahead = KernelReadAhead(prefetch, waiting) if prefetch and is_slow(path) else None
    return LocalStore(path, waiting, ahead, follow_symlinks=follow_symlinks)
