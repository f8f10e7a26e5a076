"""fsspec's HTTP file system, made when the first request needs it.

Importing it and aiohttp takes as long as a third of a mount's start, and obstore sends the first requests of a mount.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardfs.storage.range_client import HARMLESS_HEADERS, obstacle_to

if TYPE_CHECKING:
    from collections.abc import Mapping


class LateHttp:
    """Stands for the file system of a web server: all other attributes are those of fsspec's object. Thread-safe."""

    protocol = ("http", "https")

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.storage_options, self._url = options, url
        self._made: Any = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._made is None:
                from fsspec.core import url_to_fs

                self._made = without_foreign_headers(url_to_fs(self._url, **self.storage_options)[0])
        return getattr(self._made, name)


def late_http(url: str, options: Mapping[str, Any]) -> LateHttp | None:
    """Return the file system of a web server; None if it must be made at once.

    That is so if obstore cannot send the first requests, or if only fsspec reports what is wrong.
    """
    if not url.startswith(("http://", "https://")) or "::" in url or find_spec("aiohttp") is None:
        return None
    return None if _is_configured() or obstacle_to("http", options) is not None else LateHttp(url, options)


def without_foreign_headers(fs: Any) -> Any:
    """Return fsspec's HTTP file system, which from now on sends headers that may be secret to the host of the URL only.

    aiohttp follows redirects, and removes only `Authorization` and cookies if they lead to another host.
    """
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


def _is_configured() -> bool:
    """Return whether fsspec may have further options for web servers: in its files, variables or `fsspec.config`."""
    if (loaded := sys.modules.get("fsspec.config")) is not None:
        return not loaded.conf.keys().isdisjoint(LateHttp.protocol)
    where = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    return os.path.isdir(where) or any(name.startswith("FSSPEC_") for name in os.environ)
