"""Web servers that Debian has, and some that Python makes, each serving a directory on a free port of this machine."""

from __future__ import annotations

import html
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from tests.datasets import ROOT
from tests.mount.processes import end
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Kind(NamedTuple):
    """A web server. `lists`: it sends listings. `knows`: it tells directories without documents from missing names.
    `utf8`: it cannot serve other names."""

    program: str
    command: tuple[str, ...] = ()
    configuration: str = ""
    lists: bool = True
    knows: bool = True
    utf8: bool = False


_NGINX = """
{nginx_user}
daemon off;
pid {scratch}/pid;
error_log {scratch}/errors;
events {{ }}
http {{
  access_log off;
  types {{ text/html html; }}
  default_type application/octet-stream;
  client_body_temp_path {scratch}/1; proxy_temp_path {scratch}/2; fastcgi_temp_path {scratch}/3;
  uwsgi_temp_path {scratch}/4; scgi_temp_path {scratch}/5;
  server {{ listen 127.0.0.1:{port}; root {root}; %s }}
}}
"""
_APACHE = """
ServerRoot {scratch}
ServerName localhost
Listen 127.0.0.1:{port}
PidFile {scratch}/pid
ErrorLog {scratch}/errors
{apache_user}
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule mime_module /usr/lib/apache2/modules/mod_mime.so
LoadModule dir_module /usr/lib/apache2/modules/mod_dir.so
LoadModule autoindex_module /usr/lib/apache2/modules/mod_autoindex.so
TypesConfig /dev/null
AddType text/html .html
DocumentRoot {root}
<Directory {root}>
  Options %s
  IndexOptions Charset=UTF-8 %s
  Require all granted
</Directory>
"""
_LIGHTTPD = """
server.modules = ( "mod_dirlisting" )
server.bind = "127.0.0.1"
server.port = {port}
server.document-root = "{root}"
server.errorlog = "{scratch}/errors"
mimetype.assign = ( ".html" => "text/html", "" => "application/octet-stream" )
dir-listing.encoding = "utf-8"
dir-listing.hide-dotfiles = "disable"
dir-listing.activate = "%s"
"""
_CADDY = """
{{
  admin off
  auto_https off
}}
http://127.0.0.1:{port} {{
  bind 127.0.0.1
  root * {root}
  file_server %s
}}
"""
_PAGE = "location / { try_files $uri /the-only-page.html; } location = /the-only-page.html { alias %s/page.html; }"


def _braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


NGINX = ("nginx", ("-p", "{scratch}", "-e", "{scratch}/errors", "-c", "{configuration}"))
APACHE = ("apache2", ("-X", "-f", "{configuration}"))
LIGHTTPD = ("lighttpd", ("-D", "-f", "{configuration}"))
CADDY = ("caddy", ("run", "--config", "{configuration}", "--adapter", "caddyfile"))
PYTHON = "tests.mount.web_servers"

KINDS = {
    "nginx": Kind(*NGINX, _NGINX % "autoindex on;"),
    "nginx-unlisted": Kind(*NGINX, _NGINX % "", lists=False),
    "nginx-page-for-all": Kind(*NGINX, _NGINX % _braces(_PAGE).replace("%s", "{scratch}"), lists=False, knows=False),
    "apache": Kind(*APACHE, _APACHE % ("+Indexes", "")),
    "apache-fancy": Kind(*APACHE, _APACHE % ("+Indexes", "FancyIndexing HTMLTable")),
    "apache-unlisted": Kind(*APACHE, _APACHE % ("-Indexes", ""), lists=False),
    "lighttpd": Kind(*LIGHTTPD, _LIGHTTPD % "enable", utf8=True),
    "lighttpd-unlisted": Kind(*LIGHTTPD, _LIGHTTPD % "disable", lists=False, utf8=True),
    "caddy": Kind(*CADDY, _CADDY % "browse"),
    "caddy-unlisted": Kind(*CADDY, _CADDY % "", lists=False, knows=False),
    "python": Kind("python", ("Redirecting",), utf8=True),
    "python-no-redirects": Kind("python", ("Direct",)),
    "python-no-redirects-unlisted": Kind("python", ("DirectUnlisted",), lists=False, knows=False),
    "python-page-for-all": Kind("python", ("OnePage",), lists=False, knows=False),
}


@contextmanager
def serving(kind: Kind, root: Path, scratch: Path) -> Iterator[str]:
    """The URL at which a server of this kind serves a directory that every user can read."""
    for _ in range(3):  # another program may take the port before the server does
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        process = subprocess.Popen(
            _command(kind, root, scratch, port), cwd=ROOT, start_new_session=True, env=_environ(scratch)
        )
        try:
            wait_until(lambda port=port, process=process: process.poll() is not None or _answers(port))  # type: ignore[misc]
            if process.poll() is None:
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            end(process)
    errors = scratch / "errors"
    raise AssertionError(errors.read_text() if errors.exists() else kind.program)


def find(program: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    return sys.executable if program == "python" else shutil.which(program, path=path)


def _environ(scratch: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(scratch), "XDG_DATA_HOME": str(scratch), "XDG_CONFIG_HOME": str(scratch)}


def _command(kind: Kind, root: Path, scratch: Path, port: int) -> list[str]:
    program = find(kind.program)
    assert program is not None
    if kind.program == "python":
        return [program, "-m", PYTHON, *kind.command, str(root), str(port)]
    (scratch / "page.html").write_text("<!doctype html><a href='main.js'>start</a>" + " " * 5000)
    is_root = os.geteuid() == 0
    users = {"nginx_user": "user root;", "apache_user": "User www-data\nGroup www-data"}
    values = {"root": root, "scratch": scratch, "port": port, **{k: v if is_root else "" for k, v in users.items()}}
    configuration = scratch / "configuration"
    configuration.write_text(kind.configuration.format(**values))
    return [program, *(word.format(configuration=configuration, **values) for word in kind.command)]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# ---- servers of Python ----


class _Handler(http.server.BaseHTTPRequestHandler):
    """Sends files, and byte ranges of them. Says nothing of their versions."""

    protocol_version = "HTTP/1.1"
    root = Path()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def path_asked_for(self) -> bytes:
        below = unquote(self.path.partition("?")[0], errors="surrogateescape")
        return os.path.normpath(os.fsencode(f"{self.root}{below}"))

    def send_file(self, path: bytes) -> None:
        data = Path(os.fsdecode(path)).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self.send_body(200, data)
            return
        first, last = wanted.groups()
        start = int(first) if first else max(len(data) - int(last), 0)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= stop:
            self.send_body(416, b"", headers={"Content-Range": f"bytes */{len(data)}"})
        else:
            self.send_body(206, data[start:stop], headers={"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def send_body(
        self,
        code: int,
        body: bytes,
        kind: str = "application/octet-stream",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Direct(_Handler):
    """Answers for a directory without a redirect, whether its name ends with a slash or not."""

    lists = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path_asked_for()
        if os.path.isdir(path):
            self.send_directory(path)
        elif os.path.isfile(path):
            self.send_file(path)
        else:
            self.send_nothing()

    def send_nothing(self) -> None:
        self.send_body(404, b"<h1>404 Not Found</h1>", "text/html")

    def send_directory(self, path: bytes) -> None:
        names = sorted(os.listdir(path)) if self.lists else []
        directories = {name for name in names if os.path.isdir(os.path.join(path, name))}
        links = (f'<a href="{html.escape(quote(n))}{"/" if n in directories else ""}">x</a>' for n in names)
        self.send_body(200, "".join(links).encode() or b"<p>welcome</p>", "text/html")


class DirectUnlisted(Direct):
    """Sends the same page for every directory."""

    lists = False


class OnePage(Direct):
    """Sends the same page for everything that is no file."""

    def send_nothing(self) -> None:
        self.send_body(200, b"<!doctype html><p>welcome</p>", "text/html; charset=utf-8")

    def send_directory(self, path: bytes) -> None:
        self.send_nothing()


class Redirecting(_Handler, http.server.SimpleHTTPRequestHandler):
    """The standard library's own server, with byte ranges."""

    def do_GET(self) -> None:
        path = self.path_asked_for()
        if os.path.isfile(path) and "Range" in self.headers:
            self.send_file(path)
        else:
            super().do_GET()


class Whole(Direct):
    """Ignores byte ranges, and says so."""

    def send_file(self, path: bytes) -> None:
        self.send_body(200, Path(os.fsdecode(path)).read_bytes(), headers={"Accept-Ranges": "none"})


class Unsatisfiable(Direct):
    """Answers 416 to every byte range."""

    def send_file(self, path: bytes) -> None:
        if "Range" in self.headers:
            self.send_body(416, b"no", "text/html")
        else:
            super().send_file(path)


class MadeDocuments(Direct):
    """Ignores byte ranges of documents, which a program makes, and honours those of other files."""

    def send_file(self, path: bytes) -> None:
        if path.endswith(b".json"):
            self.send_body(200, Path(os.fsdecode(path)).read_bytes(), "application/json")
        else:
            super().send_file(path)


class SometimesWhole(Direct):
    """Ignores every second byte range of a shard; all of them while there is a file `broken` beside the root."""

    shards = count()

    def send_file(self, path: bytes) -> None:
        broken = self.root.with_name("broken").exists()
        if b"/c/" in path and self.command == "GET" and (broken or next(self.shards) % 2):
            self.send_body(200, Path(os.fsdecode(path)).read_bytes())
        else:
            super().send_file(path)


def _serve(name: str, root: str, port: str) -> None:
    os.chdir(root)
    handler = type(name, (globals()[name],), {"root": Path(root)})
    http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), handler).serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
