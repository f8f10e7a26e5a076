"""fsspec's file system of a store, made when the first request needs it.

Importing it with its client takes longer than all else at the start of a mount. obstore sends the first requests.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardfs.storage.range_client import HARMLESS_HEADERS, PLAIN, gcs_is_open
from shardfs.storage.s3_settings import s3_settings
from shardfs.storage.store import package_for

if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOLS = {
    "http": ("http", "https"), "https": ("http", "https"), "s3": ("s3", "s3a"), "s3a": ("s3", "s3a"),
    "gs": ("gs", "gcs"), "gcs": ("gs", "gcs"),
}  # fmt: skip
"""Scheme of a URL -> the protocols of its file system, for those that may be made late."""


class LateFileSystem:
    """Stands for a file system of fsspec, which the first use of any other attribute creates. Thread-safe.

    That first use may raise whatever `fsspec.core.url_to_fs` raises.

    Args:
        options: storage options of fsspec.
    """

    def __init__(self, protocol: tuple[str, ...], url: str, options: Mapping[str, Any]) -> None:
        self.protocol = protocol
        self.storage_options = options
        self._url = url
        self._made: Any = None
        self._lock = threading.Lock()

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drop cached listings, which a file system that is not made yet does not have."""
        if self._made is not None:
            self._made.invalidate_cache(path)

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._made is None:
                from fsspec.core import url_to_fs

                self._made = without_foreign_headers(url_to_fs(self._url, **self.storage_options)[0])
        return getattr(self._made, name)


def late_file_system(url: str, options: Mapping[str, Any]) -> tuple[LateFileSystem, str] | None:
    """Return the file system of a URL and the path in it; None if the file system must be made at once.

    That is so for other protocols than those of `PROTOCOLS`, if only the client of fsspec knows how to connect, or if
    only fsspec reports what is wrong.
    """
    scheme, separator, path = url.partition("://")
    protocol = PROTOCOLS.get(scheme)
    if protocol is None or not separator or "::" in url or find_spec(package_for(url) or "") is None:
        return None
    if _is_configured(protocol):
        return None
    fs = LateFileSystem(protocol, url, options)
    if "http" in protocol:
        return fs, url
    is_known = s3_settings(options) is not None if "s3" in protocol else gcs_is_open(options)
    path = path.rstrip("/")
    return (fs, path) if is_known and PLAIN.fullmatch(path) else None


def without_foreign_headers(fs: Any) -> Any:
    """Return the same file system of fsspec, which now sends headers that may be secret to the host of the URL only.

    aiohttp follows redirects, and removes only `Authorization` and cookies if they lead to another host.
    """
    if "http" not in fs.protocol:
        return fs
    from aiohttp import TraceConfig
    from yarl import URL

    async def redirected(_session: Any, _context: Any, params: Any) -> None:
        target = params.response.headers.get("Location", "")
        if URL(params.url).join(URL(target)).origin() != URL(params.url).origin():
            for name in [name for name in params.headers if name.lower() not in HARMLESS_HEADERS]:
                del params.headers[name]

    trace = TraceConfig()
    trace.on_request_redirect.append(redirected)
    fs.client_kwargs = {**fs.client_kwargs, "trace_configs": [*fs.client_kwargs.get("trace_configs", ()), trace]}
    return fs


def _is_configured(protocol: tuple[str, ...]) -> bool:
    """Return whether fsspec may have further options for a protocol: in files, variables or `fsspec.config`."""
    if (loaded := sys.modules.get("fsspec.config")) is not None:
        return not loaded.conf.keys().isdisjoint(protocol)
    where = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    return os.path.isdir(where) or any(name.startswith("FSSPEC_") for name in os.environ)
