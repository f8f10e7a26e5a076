"""HTTP server of a mount: `/metrics` for Prometheus, `/` a page for people, `/mounts.json` the data of that page."""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardfs.daemon import status_fields
from shardfs.daemon.health import MountsReport
from shardfs.model.errors import MountError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    _Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
    """As in `socketserver`. This server has only connections of the first kind."""

log = logging.getLogger(__name__)

SLOW_S = 5.0
"""Seconds after which the server closes an idle connection."""

LONGEST_S = 15.0
"""Seconds after which the server closes any connection, also one that sends or reads slowly."""

MOST_CONNECTIONS = 16
"""Further connections are closed at once: each one has a thread, and a client must not exhaust those of the mount."""

METRICS, PAGE, JSON = "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8", "application/json"

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""The page loads nothing but `/mounts.json`."""


class StatusServer:
    """HTTP server of a mount. The constructor opens the listening socket; `start` begins to answer requests."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT. Raises MountError if the server cannot listen there."""
        parts = urlsplit(f"//{address}")
        try:
            host = parts.hostname or "localhost"
            self._server = _Server((host, parts.port or 0), _Handler)
            self._server.names = frozenset((host.lower(), "localhost", socket.gethostname().lower()))
        except (OSError, ValueError) as e:
            number = e.errno if isinstance(e, OSError) else errno.EINVAL
            raise MountError(number, f"cannot listen: {getattr(e, 'strerror', None) or e}", address) from e

    @property
    def address(self) -> str:
        """HOST:PORT of the listening socket, HOST as a number. The kernel has chosen a port if 0 or none was given."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Close the socket of a server that was not started."""
        self._server.server_close()

    def start(self, metrics: Callable[[], bytes]) -> None:
        """Answer requests in a daemon thread that runs until the process exits. `metrics` makes `/metrics`.

        Raise RuntimeError if no thread can be started.
        """
        self._server.pages = {
            "/": (PAGE, _page),
            "/metrics": (METRICS, metrics),
            "/mounts.json": (JSON, MountsReport().as_json),
        }
        threading.Thread(target=self._server.serve_forever, name="shardfs-metrics", daemon=True).start()


def _page() -> bytes:
    page = resources.files(__package__).joinpath("status_page.html").read_text("utf8")
    cells = [
        {**figure._asdict(), **cell._asdict(), "kind": ""} for figure in status_fields.FIGURES for cell in figure.cells
    ]
    return page.replace("FIGURES = []", f"FIGURES = {json.dumps(cells)}").encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    pages: Mapping[str, tuple[str, Callable[[], bytes]]]
    """Path -> content type, and what makes the body."""

    names: frozenset[str]
    """Names of this server in the header Host, beside IP addresses."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connections: dict[socket.socket, float] = {}  # -> when it must be closed
        super().__init__(address, handler)

    def verify_request(self, request: _Request, client_address: object) -> bool:
        if not isinstance(request, socket.socket) or len(self._connections) >= MOST_CONNECTIONS:
            return False
        self._connections[request] = time.monotonic() + LONGEST_S
        return True

    def service_actions(self) -> None:
        """Shut down connections that take too long. `serve_forever` calls this twice a second."""
        for connection, end in list(self._connections.items()):
            if time.monotonic() > end:
                with suppress(OSError):  # the thread of the connection has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: _Request) -> None:
        if isinstance(request, socket.socket):
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log bugs only: a client may close or delay its connection as it likes."""
        if not isinstance(sys.exception(), OSError):
            log.exception("the status page")

    def server_bind(self) -> None:
        # HTTPServer.server_bind would look up the host name of the address, and could block on a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SLOW_S

    def _is_ours(self, host: str) -> bool:
        """Whether a header Host is an IP address or a name of this server.

        A page of another site can read the answers if its name is made to resolve to this machine. Then its browser
        sends that name.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with suppress(ValueError):
            ip_address(name)
            return True
        return name in self.server.names

    def do_GET(self) -> None:
        if not self._is_ours(self.headers.get("Host", "localhost")):
            self.send_error(421, explain="the header Host names another server: use the address, or set metrics_addr")
            return
        if (page := self.server.pages.get(self.path.partition("?")[0])) is None:
            self.send_error(404)
            return
        kind, make = page
        body = make()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
