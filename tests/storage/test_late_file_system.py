"""A source on a web server: which client asks for documents, and when fsspec's file system is made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.storage.late_file_system import LateFileSystem
from shardfs.storage.open_store import open_store
from shardfs.storage.remote import stat_of_info
from shardfs.storage.retry import RetryPolicy, StoreTimeout
from tests.write.object_store import Handler, Object, Server, object_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.storage.http_store import HttpStore

for package in ("obstore", "aiohttp"):
    pytest.importorskip(package)

NAMES = ("zarr.json", "info", ".zarray")


class Noting(Handler):
    """Notes the client and the name of each request. `state.missing` is the status of missing objects."""

    def answer(self) -> None:
        agent = self.headers.get("User-Agent", "").partition("/")[0]
        self.server.state.seen.append((agent, self.path.rpartition("/")[2]))
        if self.path.strip("/") not in self.server.state.objects:
            self.send_response(self.server.state.missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().answer()

    do_GET = do_HEAD = answer


@pytest.fixture
def server() -> Iterator[Any]:
    with object_store(Noting) as server:
        server.seen, server.missing = [], 404  # type: ignore[attr-defined]
        server.put("data/zarr.json", b"{}")
        yield server


def opened(server: Server, *, timeout_s: float = 30) -> HttpStore:
    return open_store(f"{server.url}/data", {}, retry=RetryPolicy(timeout_s, 0))  # type: ignore[return-value]


def clients(server: Any) -> list[str]:
    """Return the clients that have sent requests since the last call, one for each."""
    agents = [agent for agent, _ in server.seen]
    server.seen = []
    return agents


def is_made(store: HttpStore) -> bool:
    return store.fs._made is not None


@pytest.mark.parametrize("missing", [404, 403, 401])
def test_documents_are_asked_for_once(missing: int, server: Any) -> None:
    """Some servers answer 403 for missing names."""
    server.missing = missing
    store = opened(server)
    assert store.documents("", NAMES, 100) == {"zarr.json": b"{}"}
    extra = 0 if missing == 404 else len(NAMES) - 1  # for names that cannot exist
    assert clients(server) == ["object_store"] * (3 + extra)
    assert not is_made(store)
    assert store.documents("sub", NAMES[1:], 100) == {}
    assert clients(server) == ["object_store"] * 2


def test_a_directory_without_documents(server: Any) -> None:
    """Before its first success, obstore may be the reason for a 404: aiohttp is asked as well."""
    store = opened(server)
    assert store.documents("", NAMES[1:], 100) == {}
    assert sorted(clients(server)) == ["Python", "Python", "object_store", "object_store"]
    assert is_made(store)
    store.documents("", NAMES, 100)
    clients(server)
    for status, extra in ((404, 0), (403, 3)):
        server.missing = status
        assert store.documents("sub", NAMES, 100) == {}
        assert clients(server) == ["object_store"] * (3 + extra)


def test_pages_are_left_to_aiohttp(server: Any) -> None:
    """A page beside a document stands for a missing name, whatever type the server gives it."""
    for kind in ("text/html", "text/plain"):
        server.objects["data/info"] = Object(b"<html>not here", {"content-type": kind})
        documents = opened(server).documents("", NAMES, 100)
        assert documents == {"zarr.json": b"{}"} | ({} if kind == "text/html" else {"info": b"<html>not here"})
        assert "Python" in clients(server)


def test_a_document_that_is_larger_than_the_limit_is_cut(server: Any) -> None:
    server.put("data/zarr.json", b"0123456789")
    assert opened(server).documents("", NAMES, 4) == {"zarr.json": b"01234"}


def test_a_server_that_does_not_answer_is_a_timeout(server: Any) -> None:
    store = opened(server, timeout_s=1)
    server.fault = lambda number, name: "hang"
    with pytest.raises(StoreTimeout):
        store.documents("", NAMES, 100)
    assert store.retry.silent
    server.fault = lambda number, name: ""
    assert store.documents("", NAMES, 100) == {"zarr.json": b"{}"}


def test_the_version_of_an_object(server: Any) -> None:
    store = opened(server)
    store.documents("", NAMES, 100)
    clients(server)
    stat = store.stat("zarr.json")
    with pytest.raises(FileNotFoundError):
        store.stat("nothing")
    assert clients(server) == ["object_store"] * 2
    assert not is_made(store)
    assert stat == stat_of_info(store._info("zarr.json")), "aiohttp reports the same"
    server.missing = 405
    clients(server)
    with pytest.raises(OSError, match="405"):
        store.stat("nothing")
    assert clients(server) == ["object_store", "Python", "Python"], "HEAD, HEAD, and GET in its place"


def _variable(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("FSSPEC_HTTP_ENCODED", "true")


def _directory(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("FSSPEC_CONFIG_DIR", str(home))


@pytest.mark.parametrize("configure", [_variable, _directory])
def test_options_of_fsspec_that_are_not_given_here(
    configure: Callable[[pytest.MonkeyPatch, Path], None],
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They may concern obstore, so fsspec is imported to read them."""
    monkeypatch.delitem(sys.modules, "fsspec.config", raising=False)
    assert isinstance(opened(server).fs, LateFileSystem)
    configure(monkeypatch, tmp_path)
    assert not isinstance(opened(server).fs, LateFileSystem)


def test_options_of_a_running_program(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"X-Own": "1"}})
    store = opened(server)
    assert not isinstance(store.fs, LateFileSystem)
    assert store.documents("", NAMES, 100) == {"zarr.json": b"{}"}
