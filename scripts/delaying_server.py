"""A web server of one directory with the latency of a distant store, which counts what it is asked for.

    python scripts/delaying_server.py DIRECTORY [--latency-ms 20] [--bandwidth-mb 100]

It prints its URL. Each answer waits for the latency, then flows at the bandwidth (MB/s, per connection; 0 is no limit).
GET /.requests returns the requests since the last such question, as JSON: method, path, range, bytes sent, status, and
the seconds at which the request came and its answer began.
It honours byte ranges, If-Match and If-None-Match, and lists directories. TLS and throttling are not modelled.
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import html
import os
import re
import time
import urllib.parse
from pathlib import Path
from typing import Any

from aiohttp import web

PIECE = 64 << 10


class DelayingServer:
    """Serves the files below `root`. `latency_s` in seconds; `bandwidth` in bytes per second and connection, or 0."""

    def __init__(self, root: Path, latency_s: float, bandwidth: float) -> None:
        self.root, self.latency_s, self.bandwidth = root, latency_s, bandwidth
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.path == "/.requests":
            requests, self.requests = self.requests, []
            return web.json_response(requests)
        request["came"] = time.monotonic()
        await asyncio.sleep(self.latency_s)
        path = self.root / urllib.parse.unquote(request.path).lstrip("/")
        if path.is_dir():
            return self._counted(request, (0, 0), self._listing(path))
        try:
            attributes = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return self._counted(request, (0, 0), web.Response(status=404))
        tag = f'"{attributes.st_mtime_ns:x}-{attributes.st_size:x}-{attributes.st_ino:x}"'
        headers = {
            "ETag": tag,
            "Last-Modified": email.utils.formatdate(attributes.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if request.headers.get("If-Match", tag) != tag:
            return self._counted(request, (0, 0), web.Response(status=412))
        if request.headers.get("If-None-Match") == tag:
            return self._counted(request, (0, 0), web.Response(status=304, headers=headers))
        span = byte_range(request.headers.get("Range", ""), attributes.st_size)
        if span is None:
            return self._counted(request, (0, 0), web.Response(status=416))
        start, stop = span
        status = 206 if "Range" in request.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{attributes.st_size}"
        headers["Content-Length"] = str(stop - start)
        response = self._counted(request, span, web.StreamResponse(status=status, headers=headers))
        await response.prepare(request)
        if request.method == "GET":
            with path.open("rb") as file:
                await self._send(response, os.pread(file.fileno(), stop - start, start))
        await response.write_eof()
        return response

    def _counted(self, request: web.Request, span: tuple[int, int], response: web.StreamResponse) -> web.StreamResponse:
        sent = span[1] - span[0] if request.method == "GET" else 0
        row = {"method": request.method, "path": request.path, "start": span[0], "stop": span[1]}
        seconds = {"came": request["came"], "answered": time.monotonic()}
        self.requests.append({**row, **seconds, "bytes": sent, "status": response.status})
        return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        """Send pieces at the bandwidth."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for at in range(0, len(data), PIECE):
            await response.write(data[at : at + PIECE])
            if self.bandwidth and (early := begin + (at + PIECE) / self.bandwidth - loop.time()) > 0:
                await asyncio.sleep(early)

    def _listing(self, path: Path) -> web.Response:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(path))
        links = "".join(f'<a href="{urllib.parse.quote(name)}">{html.escape(name)}</a>\n' for name in names)
        return web.Response(text=f"<html><body><a href='../'>../</a>\n{links}</body></html>", content_type="text/html")


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of the range that a Range header asks for; None if it lies beyond the end."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if found is None:
        return 0, size
    first, last = found.groups()
    if not first:
        return max(size - int(last), 0), size
    if int(first) >= size:
        return None
    return int(first), min(int(last) + 1, size) if last else size


async def serve(server: DelayingServer) -> None:
    """Serve until the process is ended. Prints the URL first."""
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--bandwidth-mb", type=float, default=100)
    options = parser.parse_args()
    asyncio.run(serve(DelayingServer(options.directory, options.latency_ms / 1e3, options.bandwidth_mb * 1e6)))


if __name__ == "__main__":
    main()
