"""A real nginx for the length of a test run: several servers of one directory, and a log of what they were asked."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tests.mount.processes import end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LISTED, UNLISTED, GUARDED, HIDDEN, FRONT = "listed", "unlisted", "guarded", "hidden", "front"
"""Servers with directory listings, without them, one that says 403 of what does not exist, one
that says 404 of directories, and one that answers with the same page for each of them."""

_CONFIGURATION = """
{user}
daemon off;
worker_processes 1;
pid {scratch}/nginx.pid;
error_log {scratch}/error.log warn;
events {{ worker_connections 256; }}
http {{
  log_format asked '$request_method $uri $status $http_range';
  access_log {scratch}/access.log asked;
  default_type application/octet-stream;
  add_header Access-Control-Allow-Origin '*';  # as pages of other hosts want it that show data
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  server {{ listen 127.0.0.1:{listed}; root {root}; autoindex on; }}
  server {{ listen 127.0.0.1:{unlisted}; root {root}; }}
  server {{ listen 127.0.0.1:{guarded}; root {root}; error_page 404 = @missing; location @missing {{ return 403; }} }}
  server {{ listen 127.0.0.1:{hidden}; root {root}; if (-d $request_filename) {{ return 404; }} }}
  server {{ listen 127.0.0.1:{front}; root {root}; if (-d $request_filename) {{ return 200 "<a href='/'>home</a>"; }} }}
}}
"""


class Request(NamedTuple):
    method: str
    path: str
    status: int
    range: str


@dataclass
class Web:
    root: Path
    """What is served; a test may put more there."""
    log: Path
    ports: dict[str, int]
    _numbers: Iterator[int] = field(default_factory=count)

    def url(self, path: str = "", server: str = LISTED) -> str:
        return f"http://127.0.0.1:{self.ports[server]}/{path}"

    @contextmanager
    def requests(self) -> Iterator[list[Request]]:
        """What is asked within the block; the list is filled at its end."""
        begin = self._ask_for_mark()
        requests_made: list[Request] = []
        yield requests_made
        finish = self._ask_for_mark()
        lines = self.log.read_text().splitlines()
        for line in lines[lines.index(begin) + 1 : lines.index(finish)]:
            method, path, status, range_ = line.split(" ", 3)
            requests_made.append(Request(method, path, int(status), range_))

    def _ask_for_mark(self) -> str:
        """Ask for something that does not exist and wait for its line: the only worker logs one after the other."""
        path = f"/mark-{next(self._numbers)}"
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(self.url(path[1:]), timeout=250).close()
        line = f"GET {path} 404 -"
        stop = time.monotonic() + 60
        while line not in self.log.read_text().splitlines():
            assert time.monotonic() < stop
            time.sleep(0.01)
        return line


def find_nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def serving(root: Path, scratch: Path) -> Iterator[Web]:
    nginx = find_nginx()
    assert nginx is not None
    for _ in range(3):  # another program may take a port before nginx does
        ports = dict(zip((LISTED, UNLISTED, GUARDED, HIDDEN, FRONT), _free_ports(5), strict=True))
        user = "user root;" if os.geteuid() == 0 else ""  # pytest's directories are closed to others
        text = _CONFIGURATION.format(user=user, scratch=scratch, root=root, **ports)
        configuration = scratch / "nginx.conf"
        configuration.write_text(text)
        command = [nginx, "-p", str(scratch), "-e", str(scratch / "error.log"), "-c", str(configuration)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            if _answers(process, ports[LISTED]):
                yield Web(root, scratch / "access.log", ports)
                return
        finally:
            end(process)
    raise AssertionError((scratch / "error.log").read_text())


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    stop = time.monotonic() + 60
    while time.monotonic() < stop and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.02)
    return False
