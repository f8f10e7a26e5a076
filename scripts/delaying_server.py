"""A web server with the latency and the faults of a distant store, which counts what it is asked for.

    python scripts/delaying_server.py DIRECTORY|URL [--latency-ms 20] [--bandwidth-mb 100] [--total-mb 0]

It prints its URL. It serves a directory: byte ranges, If-Match, If-None-Match and listings. Or it passes all requests
on to the server at URL, such as moto's S3. Each answer waits for the latency, then flows at the bandwidth (MB/s, per
connection; 0 is no limit; `--total-mb` is for all connections together). TLS is not modelled.

GET /.requests returns the requests since the last such question, as JSON: method, path, query, range, bytes received
and sent, status, and the seconds at which the request came and its answer began.

PUT /.faults takes a JSON list of faults (the fields of `Fault`), which replaces the list before. These are the kinds:

status    the answer has `status`, `headers` and `body`
hang      there is no answer
reset     the connection is reset
cut       the connection ends in the middle of the body
short     the body ends in the middle, as if it were complete: without Content-Length, so the client cannot know
stall     nothing is sent after half of the body, and the connection stays open
whole     the byte range is ignored
weak      the ETag is weak
untagged  there is no ETag
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import html
import os
import re
import socket
import struct
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

PIECE = 64 << 10

OF_CONNECTIONS = {"host", "connection", "keep-alive", "transfer-encoding", "expect", "date", "server"}
"""Headers that are not passed on."""

OF_BODIES = {"cut", "short", "stall", "whole"}
"""Faults of answers to GET."""


@dataclass
class Fault:
    """What goes wrong with the requests for paths in which the regular expression `path` is found.

    Of these, it hits the `share`, evenly spread, and at most `times`. With `longer`, only ranges of more bytes count.
    """

    kind: str
    path: str = ""
    share: float = 1.0
    times: int = 1 << 62
    longer: int = -1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    seen: int = 0

    def hits(self, request: web.Request) -> bool:
        """Count a request, and return whether the fault hits it."""
        if not re.search(self.path, request.path) or (self.kind in OF_BODIES and request.method != "GET"):
            return False
        start, stop = byte_range(request.headers.get("Range", "bytes=0-0"), 1 << 62) or (0, 0)
        if stop - start <= self.longer:
            return False
        self.seen += 1
        hit = int(self.seen * self.share) > int((self.seen - 1) * self.share)
        return hit and int(self.seen * self.share) <= self.times


class Answer(NamedTuple):
    """An answer before faults. `span`: the range of the object that it contains."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    span: tuple[int, int] = (0, 0)


class DelayingServer:
    """Serves the files below `origin`, or passes requests on to that URL.

    `latency_s` in seconds; `bandwidth` in bytes per second and connection, or 0; `total` the same for all connections.
    """

    def __init__(self, origin: str, latency_s: float, bandwidth: float, total: float = 0) -> None:
        self.origin, self.latency_s, self.bandwidth, self.total = origin, latency_s, bandwidth, total
        self._free = 0.0  # when all connections together may send the next byte
        self.requests: list[dict[str, Any]] = []
        self.faults: list[Fault] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.path == "/.requests":
            requests, self.requests = self.requests, []
            return web.json_response(requests)
        if request.path == "/.faults":
            self.faults = [Fault(**fields) for fields in await request.json()]
            return web.Response()
        came = time.monotonic()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # type: ignore[attr-defined]
            request.writer.output_size = 0
        request["body"] = await request.content.read()
        await asyncio.sleep(self.latency_s)
        fault = next((fault for fault in self.faults if fault.hits(request)), None)
        found = await self._damaged(request, fault)
        sent = found.span[1] - found.span[0] if request.method == "GET" else 0
        row = {"method": request.method, "path": request.path, "query": request.query_string, "status": found.status}
        where = {"start": found.span[0], "stop": found.span[1], "bytes": sent, "received": len(request["body"])}
        self.requests.append({**row, **where, "came": came, "answered": time.monotonic()})
        return await self._send(request, found, fault.kind if fault else "")

    # ---- origins ----

    async def _damaged(self, request: web.Request, fault: Fault | None) -> Answer:
        """Return the answer, with another status, range or tag if the fault says so."""
        if fault is not None and fault.kind == "status":
            return Answer(fault.status, {"Content-Length": str(len(fault.body)), **fault.headers}, fault.body.encode())
        headers = {n: v for n, v in request.headers.items() if n.lower() not in OF_CONNECTIONS}
        if fault is not None and fault.kind == "whole":
            headers.pop("Range", None)
        tagless = fault is not None and fault.kind in ("weak", "untagged")
        if tagless and "If-Match" in headers:  # which only strong tags fulfil
            return Answer(412, {"Content-Length": "0"})
        served = self._passed_on if "://" in self.origin else self._from_directory
        found = await served(request, headers)
        if fault is not None and tagless and "ETag" in found.headers:
            tag = found.headers.pop("ETag")
            found.headers.update({"ETag": f"W/{tag}"} if fault.kind == "weak" else {})
        return found

    async def _from_directory(self, request: web.Request, headers: dict[str, str]) -> Answer:
        path = Path(self.origin) / urllib.parse.unquote(request.path).lstrip("/")
        nothing = {"Content-Length": "0"}
        if path.is_dir():
            page = listing(path)
            return Answer(200, {"Content-Length": str(len(page)), "Content-Type": "text/html"}, page)
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                span = byte_range(headers.get("Range", ""), stat.st_size)
                data = os.pread(file.fileno(), span[1] - span[0], span[0]) if span and request.method == "GET" else b""
        except (FileNotFoundError, NotADirectoryError):
            return Answer(404, nothing)
        tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"'
        known = {"ETag": tag, "Last-Modified": email.utils.formatdate(stat.st_mtime, usegmt=True)}
        if headers.get("If-Match", tag) != tag:
            return Answer(412, nothing)
        if headers.get("If-None-Match") == tag:
            return Answer(304, known)
        if span is None:
            return Answer(416, {**nothing, "Content-Range": f"bytes */{stat.st_size}"})
        known |= {"Accept-Ranges": "bytes", "Content-Length": str(span[1] - span[0])}
        if "Range" not in headers:
            return Answer(200, known, data, span)
        return Answer(206, {**known, "Content-Range": f"bytes {span[0]}-{span[1] - 1}/{stat.st_size}"}, data, span)

    async def _passed_on(self, request: web.Request, headers: dict[str, str]) -> Answer:
        url, body = URL(self.origin + request.raw_path, encoded=True), request["body"]
        async with (
            aiohttp.ClientSession(auto_decompress=False) as client,
            client.request(request.method, url, headers=headers, data=body or None, allow_redirects=False) as answer,
        ):
            data = await answer.read()
            told = {n: v for n, v in answer.headers.items() if n.lower() not in OF_CONNECTIONS}
            told.setdefault("Content-Length", str(len(data)))
            sent = re.match(r"bytes (\d+)-", told.get("Content-Range", ""))
            start = int(sent[1]) if sent else 0
            return Answer(answer.status, told, data, (start, start + len(data)))

    # ---- sending ----

    async def _send(self, request: web.Request, found: Answer, fault: str) -> web.StreamResponse:
        response, body = web.StreamResponse(status=found.status, headers=found.headers), found.body
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            return self._dropped(request, response)
        if fault == "short":
            del response.headers["Content-Length"]
        if fault in ("cut", "short", "stall"):
            body = body[: len(body) // 2]
        await response.prepare(request)
        if request.method != "HEAD":
            await self._flow(response, body)
        if fault == "stall":
            await asyncio.Event().wait()
        if fault == "cut":
            return self._dropped(request, response)
        await response.write_eof()
        return response

    def _dropped(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Close the connection: with RST if nothing was sent, otherwise after what was sent."""
        if request.transport is not None and not response.prepared:
            connection = request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
        elif request.transport is not None:
            request.transport.close()
        return response

    async def _flow(self, response: web.StreamResponse, data: bytes) -> None:
        """Send pieces at the bandwidth."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for at in range(0, len(data), PIECE):
            await response.write(data[at : at + PIECE])
            if self.total:
                self._free = max(self._free, loop.time()) + len(data[at : at + PIECE]) / self.total
                await asyncio.sleep(self._free - loop.time())
            if self.bandwidth and (early := begin + (at + PIECE) / self.bandwidth - loop.time()) > 0:
                await asyncio.sleep(early)


def listing(path: Path) -> bytes:
    """Return the page that lists a directory."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(path))
    links = "".join(f'<a href="{urllib.parse.quote(name)}">{html.escape(name)}</a>\n' for name in names)
    return f"<html><body><a href='../'>../</a>\n{links}</body></html>".encode()


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
    parser.add_argument("origin", metavar="DIRECTORY|URL")
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--bandwidth-mb", type=float, default=100)
    parser.add_argument("--total-mb", type=float, default=0)
    given = parser.parse_args()
    limits = given.latency_ms / 1e3, given.bandwidth_mb * 1e6, given.total_mb * 1e6
    asyncio.run(serve(DelayingServer(given.origin, *limits)))


if __name__ == "__main__":
    main()
