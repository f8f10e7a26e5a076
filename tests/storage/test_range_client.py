"""Byte ranges through obstore: which options it takes over, how it fails, and which version of an object is read."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.errors import StaleShardError, errno_of
from shardfs.storage import range_client, retry
from shardfs.storage.open_store import open_store
from shardfs.storage.retry import RetryPolicy, StoreTimeout
from tests import handmade
from tests.datasets import ROOT
from tests.mount.distant import s3_options, s3_server
from tests.waiting import wait_until
from tests.write.azurite import azurite
from tests.write.object_store import Handler, Object, QuietServer, Server, object_store
from tests.write.object_store_gcs import GcsHandler, gcs_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardfs.storage.remote import FsspecStore

for package in ("obstore", "s3fs", "aiohttp"):
    pytest.importorskip(package)

OBSTORE, DIGITS = "object_store", b"0123456789"


class Recording(Handler):
    """Notes the headers of every request."""

    def answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.state.seen.append({"method": self.command, "path": self.path, **headers})
        super().answer()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


class Tagging(Recording):
    """An object's header `tagged` says which ETag is sent: weak or none."""

    def get_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = state.objects.get(path)
        tagged = target.headers.get("tagged", "strong") if target is not None else "strong"
        if tagged != "strong":
            del self.headers["If-Match"]
        status, headers, data = super().get_object(state, path, query, body)
        headers.pop("tagged", None)
        if tagged == "weak":
            headers["ETag"] = f"W/{headers['ETag']}"
        elif tagged == "none":
            del headers["ETag"]
        return status, headers, data

    head_object = get_object


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server() -> Iterator[Server]:
    with object_store(Tagging) as server:
        server.seen = []  # type: ignore[attr-defined]
        server.put("data/x", DIGITS)
        yield server


def seen(server: Server) -> list[dict[str, str]]:
    """Return the headers of the requests since the last call."""
    requests: list[dict[str, str]] = server.seen  # type: ignore[attr-defined]
    server.seen = []  # type: ignore[attr-defined]
    return requests


def opened(source: str, *, timeout_s: float = 30, retries: int = 0, **options: Any) -> FsspecStore:
    options["skip_instance_cache"] = True
    store = open_store(source, options, retry=RetryPolicy(timeout_s, retries))
    return store  # type: ignore[return-value]


def source_of(kind: str, server: Server, path: str = "data") -> tuple[str, dict[str, Any]]:
    """Return the URL and the storage options of a path in the server."""
    if kind == "http":
        return f"{server.url}/{path}", {"skip_instance_cache": True}
    options = server.options()
    del options["config_kwargs"]  # which would let botocore repeat requests
    return f"s3://{path}", options


def read(store: FsspecStore, key: str = "x") -> bytes:
    return store.open(key).read([ByteRange(2, 5)])[0]


def agent(request: Mapping[str, str]) -> str:
    return request.get("user-agent", "").partition("/")[0]


# ---- objects that are stored compressed (`Content-Encoding`)


DOCUMENT = json.dumps(handmade.zarr_metadata((4, 4), (4, 4), (2, 2))).encode()
COMPRESSED = gzip.compress(DOCUMENT)


def assert_documents_are_those_of_fsspec(source: str, options: dict[str, Any], wanted: bytes) -> None:
    """The name of the object is `zarr.json`. As chunks, its bytes are those that are stored."""
    store = opened(source, **options)
    path = store.path("zarr.json")
    assert store.fs.cat_ranges([path], [0], [1000]) == [wanted]
    assert store.documents("", ["zarr.json", "nothing"], 999) == {"zarr.json": wanted}
    assert store.open("zarr.json").read([ByteRange(2, 5)]) == [COMPRESSED[2:5]]


def test_compressed_documents_in_s3(tmp_path: Path) -> None:
    with s3_server(tmp_path) as url:
        options = s3_options(url)
        opened("s3://data", **options).fs.pipe_file("data/zarr.json", COMPRESSED, ContentEncoding="gzip")
        assert_documents_are_those_of_fsspec("s3://data", options, COMPRESSED)


def test_compressed_documents_in_gcs(google: Server) -> None:
    google.objects["data/zarr.json"] = Object(COMPRESSED, {"Content-Encoding": "gzip"})
    assert_documents_are_those_of_fsspec("gs://data", gcs_options(google), DOCUMENT)


def test_compressed_documents_in_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    blob = pytest.importorskip("azure.storage.blob")
    with azurite() as account:
        client = blob.BlobServiceClient.from_connection_string(account).create_container("data")
        settings = blob.ContentSettings(content_encoding="gzip")
        client.upload_blob("zarr.json", COMPRESSED, content_settings=settings)
        client.close()
        assert_documents_are_those_of_fsspec("abfs://data", {"connection_string": account}, DOCUMENT)


# ---- which version is read


def array(*chunks: bytes, gap: bytes = b"", backwards: bool = False) -> dict[str, bytes]:
    """Return the files of an array of one shard with four chunks."""
    document = handmade.zarr_metadata((4, 4), (4, 4), (2, 2))
    shard = handmade.zarr_shard(chunks, gap=gap, backwards=backwards)
    return {"zarr.json": json.dumps(document).encode(), "c/0/0": shard}


ONE = array(*(bytes([n]) * 4 for n in range(4)))
OTHER = array(*(bytes([n + 10]) * 4 for n in range(4)), backwards=True)
LARGER = array(*(bytes([n + 10]) * 4 for n in range(4)), gap=b"-", backwards=True)


def put(server: Server, files: Mapping[str, bytes], tagged: str = "strong") -> None:
    for name, data in files.items():
        server.objects[f"data/a/{name}"] = Object(data, {"tagged": tagged})


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_chunk_of_a_new_shard_takes_two_requests_and_the_next_one_takes_one(kind: str, server: Server) -> None:
    put(server, ONE)
    source, options = source_of(kind, server, "data/a")
    fs = ShardFileSystem(source=source, storage_options=options, skip_instance_cache=True)
    fs.cat_file("zarr.json")
    fs.info("c/0")  # the directories of chunks
    seen(server)
    assert fs.info("c/0/0")["size"] == 4
    assert fs.info("c/0/0")["mtime"] is not None
    assert fs.cat_file("c/0/0") == bytes(4)
    cold = seen(server)
    assert [(r["method"], r["path"], agent(r)) for r in cold] == [("GET", "/data/a/c/0/0", OBSTORE)] * 2
    assert ["if-match" in r for r in cold] == [False, True]
    assert fs.info("c/1/1")["size"] == 4
    assert fs.cat_file("c/1/1") == bytes([3]) * 4
    assert [(r["method"], agent(r), "if-match" in r) for r in seen(server)] == [("GET", OBSTORE, True)]


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
@pytest.mark.parametrize(("tagged", "new"), [("strong", OTHER), ("strong", LARGER), ("weak", LARGER), ("none", LARGER)])
def test_a_shard_that_is_replaced_after_its_index_was_read(
    client: str, tagged: str, new: Mapping[str, bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client == "fsspec":
        monkeypatch.setattr(range_client.RangeClient, "suits", lambda self, path: False)
    put(server, ONE, tagged)
    source, options = source_of("http", server, "data/a")
    fs = ShardFileSystem(source=source, storage_options=options, skip_instance_cache=True)
    assert fs.cat_file("c/0/0") == bytes(4)
    put(server, new, tagged)
    assert fs.cat_file("c/0/1") == bytes([11]) * 4
    assert fs.cat_file("c/1/1") == bytes([13]) * 4


def test_a_shard_that_is_always_replaced_is_stale(server: Server) -> None:
    put(server, ONE)
    source, options = source_of("s3", server, "data/a")
    fs = ShardFileSystem(source=source, storage_options=options, skip_instance_cache=True)
    assert fs.cat_file("c/0/0") == bytes(4)
    server.fault = lambda number, name: "refuse" if number % 2 == 0 and name == "get_object" else ""
    server.requests.clear()
    with pytest.raises((OSError, StaleShardError)) as e:
        fs.cat_file("c/0/1")
    assert errno_of(e.value) == errno.ESTALE
    server.fault = lambda number, name: ""
    assert fs.cat_file("c/0/1") == bytes([1]) * 4


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_blob_reads_one_version(kind: str, server: Server) -> None:
    source, options = source_of(kind, server)
    store = opened(source, **options)
    blob = store.open("x")
    assert blob.read([Suffix(3)]) == [b"789"]
    assert [r["method"] for r in seen(server)] == ["GET"]
    stat = blob.stat()
    assert (stat.size, seen(server)) == (10, [])
    assert stat == store.open("x").stat(), "the same as without reading"
    server.put("data/x", b"abcdefghij")
    with pytest.raises(StaleShardError, match="was replaced"):
        blob.read([ByteRange(0, 3)])
    with pytest.raises(StaleShardError, match="was replaced"):
        blob.read([ByteRange(0, 3), ByteRange(8, 10)])
    assert store.open("x").read([ByteRange(0, 3), Suffix(2)]) == [b"abc", b"ij"]


def test_a_server_that_ignores_the_condition_is_noticed(server: Server) -> None:
    class Ignoring(Recording):
        def get_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
            del self.headers["If-Match"]
            return super().get_object(state, path, query, body)

    with object_store(Ignoring) as ignoring:
        ignoring.seen = []  # type: ignore[attr-defined]
        ignoring.put("data/x", DIGITS)
        blob = opened(f"{ignoring.url}/data").open("x")
        blob.read([ByteRange(0, 3)])
        ignoring.put("data/x", b"abcdefghij")
        with pytest.raises(StaleShardError):
            blob.read([ByteRange(0, 3)])


# ---- failures


@pytest.mark.parametrize("kind", ["http", "s3"])
@pytest.mark.parametrize("fault", ["busy", "error", "reset", "cut"])
def test_accidents_are_retried(kind: str, fault: str, server: Server) -> None:
    source, options = source_of(kind, server)
    store = opened(source, retries=3, **options)
    assert read(store) == b"234"
    server.requests.clear()
    server.fault = lambda number, name: fault if number < 2 else ""
    assert read(store) == b"234"
    counters = store.retry.counters.snapshot()
    other_agents = [agent(r) for r in seen(server) if r["method"] == "GET" and agent(r) != OBSTORE]
    is_left = kind == "http" and fault == "busy"  # only aiohttp reports how long to wait
    assert len(other_agents) == (2 if is_left else 0)
    assert (counters["retries"], counters["errors"], counters["timeouts"]) == (1 if is_left else 2, {}, 0)


def test_the_document_of_a_web_server_that_fails_is_asked_for_no_more_often(server: Server) -> None:
    """aiohttp repeats nothing by itself, so it would only ask as often once more."""
    store = opened(f"{server.url}/data", retries=2)
    read(store)
    server.requests.clear()
    server.fault = lambda number, name: "error"
    with pytest.raises(OSError, match="500"):
        store.documents("a", ["zarr.json"], 3)
    assert len(server.requests) == 3


def test_a_server_says_how_long_to_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore does not report it, so the other client asks again, and then waits as long as the server wants."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    store = opened(f"{server.url}/data", retries=3)
    read(store)
    server.requests.clear()
    server.retry_after = "9"
    server.fault = lambda number, name: "busy" if number < 2 else ""
    assert read(store) == b"234"
    assert [pause for pause in pauses if pause >= 1] == [9]
    assert len(server.requests) == 3
    server.requests.clear()
    server.fault = lambda number, name: ""
    seen(server)
    assert read(store) == b"234"
    assert [agent(r) for r in seen(server)] == [OBSTORE], "the next request is the fast client's"


def test_documents_are_asked_for_again_when_the_server_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.retry_after = "9"
    server.fault = lambda number, name: "busy" if number < 2 else ""
    store = opened(f"{server.url}/data", retries=3)
    assert store.documents("", ["x"], 3) == {"x": b"0123"}
    assert [pause for pause in pauses if pause >= 1] == [9]


@pytest.mark.parametrize(("retries", "count"), [(0, 1), (2, 3)])
def test_a_server_that_is_busy_for_ever(retries: int, count: int, server: Server) -> None:
    source, options = source_of("s3", server)
    store = opened(source, retries=retries, **options)
    read(store)
    server.fault = lambda number, name: "busy"
    server.requests.clear()
    with pytest.raises(OSError, match="503") as e:
        read(store)
    assert e.value.errno == errno.EIO
    assert server.requests == ["get_object"] * count


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_silent_server_is_a_timeout(kind: str, server: Server) -> None:
    source, options = source_of(kind, server)
    store = opened(source, timeout_s=2.0, retries=4, **options)
    read(store)
    server.requests.clear()
    server.fault = lambda number, name: "hang"
    with pytest.raises(StoreTimeout, match=r"does not answer within 2(\.0)? s") as e:
        read(store)
    assert str(e.value.filename).endswith("data/x")
    assert len(server.requests) <= 2, "an operation takes about twice the time-out"
    assert store.retry.silent
    server.fault = lambda number, name: ""
    assert read(store) == b"234"
    assert not store.retry.silent


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_missing_and_forbidden_objects(kind: str, server: Server) -> None:
    source, options = source_of(kind, server)
    store = opened(source, **options)
    for _ in range(2):  # before and after the first success
        with pytest.raises(FileNotFoundError):
            read(store, "nothing")
        assert read(store) == b"234"
    assert store.open("x").read([ByteRange(20, 30)]) == [b""]
    assert store.open("x").read([ByteRange(8, 30)]) == [b"89"]
    server.fault = lambda number, name: "forbid"
    with pytest.raises(PermissionError):
        read(store)
    server.fault = lambda number, name: ""
    seen(server)
    assert read(store) == b"234"
    assert [agent(r) for r in seen(server)] == [OBSTORE], "the other client had no success either"


def test_s3_is_asked_once_for_a_missing_object(server: Server) -> None:
    source, options = source_of("s3", server)
    store = opened(source, **options)
    seen(server)
    with pytest.raises(FileNotFoundError):
        read(store, "nothing")
    assert [agent(r) for r in seen(server)] == [OBSTORE]


@pytest.mark.parametrize("headers", [{"content-type": "text/html"}, {"content-encoding": "gzip"}])
def test_answers_that_may_be_no_bytes_of_the_object_are_left_to_aiohttp(
    headers: dict[str, str], server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.objects["data/x"] = Object(DIGITS, headers)
    store = opened(f"{server.url}/data")
    caplog.set_level(logging.INFO, "shardfs")
    if "content-encoding" in headers:
        with pytest.raises(OSError, match="encoding 'gzip'"):
            read(store)
        return
    assert read(store) == b"234"
    assert "obstore cannot" in caplog.text
    seen(server)
    assert read(store) == b"234"
    assert [agent(r) for r in seen(server)] == ["Python"], "obstore is not asked again"


def test_a_forked_process_uses_fsspec(server: Server) -> None:
    store = opened(f"{server.url}/data")
    assert read(store) == b"234"
    assert [agent(r) for r in seen(server)] == [OBSTORE]
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if read(opened(f"{server.url}/data")) == b"234" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert OBSTORE not in [agent(r) for r in seen(server)]


WITH_REQUESTS_UNDER_WAY = """
import sys, threading
from shardfs.model.blobs import ByteRange
from shardfs.storage.open_store import open_store
blob = open_store(sys.argv[1], {}).open("x")
blob.read([ByteRange(2, 5)])
begun = threading.Semaphore(0)
def read(ranges):
    while True:
        begun.release()
        blob.read(ranges)
for n in range(8):
    ranges = [ByteRange(2, 5), ByteRange(4 << 20, 5 << 20)][: 1 + n % 2]
    threading.Thread(target=read, args=[ranges], daemon=True).start()
for _ in range(50):
    begun.acquire()
print("end", flush=True)
"""


def test_a_program_that_ends_while_requests_are_under_way(server: Server) -> None:
    server.put("data/x", bytes(6 << 20))
    command = [sys.executable, "-c", WITH_REQUESTS_UNDER_WAY, f"{server.url}/data"]
    for _ in range(2):
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "end\n", "")


def test_keys_that_clients_encode_differently_are_left_to_fsspec(server: Server) -> None:
    for kind in ("http", "s3"):
        source, options = source_of(kind, server)
        store = opened(source, **options)
        for key in ("a b", "a%20b", "a#b", "a?b", "é", "a//b"):
            server.put(f"data/{key}", DIGITS)
            if kind == "s3" or "//" not in key:
                assert read(store, key) == b"234"
                assert agent(seen(server)[-1]) != OBSTORE


def test_without_obstore(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_client, "find_spec", lambda name: None)
    for kind in ("http", "s3"):
        source, options = source_of(kind, server)
        with pytest.raises(ImportError, match="obstore is not installed"):
            opened(source, **options)
    assert seen(server) == []


# ---- options


def assert_through_obstore(server: Server, source: str, **options: Any) -> dict[str, str]:
    """Read bytes with these options. Return the headers of the request."""
    assert read(opened(source, **options)) == b"234"
    request = seen(server)[-1]
    assert agent(request) == OBSTORE
    return request


def merged(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**options, **more, "client_kwargs": {**options["client_kwargs"], **more.get("client_kwargs", {})}}


S3_OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Mapping[str, str]], bool]]] = {
    "key": ({}, lambda h: "Credential=not-a-real-key-id/" in h["authorization"]),
    "token": ({"token": "session"}, lambda h: h["x-amz-security-token"] == "session"),
    "anon": ({"anon": True, "key": None, "secret": None}, lambda h: "authorization" not in h),
    "requester_pays": ({"requester_pays": True}, lambda h: h["x-amz-request-payer"] == "requester"),
    "region": ({"client_kwargs": {"region_name": "eu-central-1"}}, lambda h: "/eu-central-1/" in h["authorization"]),
    "caches": ({"default_fill_cache": False, "default_cache_type": "none"}, lambda h: True),
    "timeouts": ({"config_kwargs": {"connect_timeout": 3, "max_pool_connections": 3}}, lambda h: True),
    "verify": ({"client_kwargs": {"verify": False}}, lambda h: True),
    "addressing": ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, lambda h: True),  # usual for MinIO
}


@pytest.mark.parametrize("name", S3_OPTIONS)
def test_s3_options(name: str, server: Server) -> None:
    more, is_sent = S3_OPTIONS[name]
    assert is_sent(assert_through_obstore(server, "s3://data", **merged(server.options(), **more)))


@pytest.mark.parametrize("where", ["endpoint_url", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_s3_endpoint(where: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"key": "k", "secret": "s"}
    if where.startswith("AWS"):
        monkeypatch.setenv(where, server.url)
    else:
        options[where] = server.url
    assert_through_obstore(server, "s3://data", **options)


def test_s3_credentials_and_region_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "t"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    request = assert_through_obstore(server, "s3://data", endpoint_url=server.url)
    assert "Credential=k/" in request["authorization"]
    assert "/eu-north-1/" in request["authorization"]
    assert request["x-amz-security-token"] == "t"


def test_s3_profile(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = {server.url}\n")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = k\naws_secret_access_key = s\n")
    request = assert_through_obstore(server, "s3://data", profile="lab")
    assert "Credential=k/" in request["authorization"]
    assert "/eu-west-3/" in request["authorization"]


class Role(BaseHTTPRequestHandler):
    """Credentials of a role, of which each answer is another version that soon expires."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.given += 1  # type: ignore[attr-defined]
        expiration = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        names = {"AccessKeyId": f"k{self.server.given}", "SecretAccessKey": "s", "Token": "t"}  # type: ignore[attr-defined]
        data = json.dumps({**names, "Expiration": expiration}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[Any]:
    server = QuietServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_s3_credentials_that_expire(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore gets them from the container, and refreshes them."""
    with serving(Role) as role:
        role.given = 0
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{role.server_address[1]}/")
        store = opened("s3://data", endpoint_url=server.url)
        keys = set()

        def refreshed() -> bool:
            assert read(store) == b"234"
            request = seen(server)[-1]
            assert agent(request) == OBSTORE
            keys.add(request["authorization"].partition("/")[0])
            return len(keys) > 1

        wait_until(refreshed)


class Proxy(BaseHTTPRequestHandler):
    """Answers every request itself, and counts them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(206)
        for name, value in {"Content-Range": "bytes 2-4/10", "Content-Length": "3", "ETag": '"x"'}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(b"234")


def test_a_proxy_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs heeds it, and so does obstore. fsspec's HTTP file system does so with `trust_env` only."""
    with serving(Proxy) as proxy:
        proxy.asked = []
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        options = merged(server.options(), client_kwargs={"endpoint_url": "http://store.invalid"})
        assert read(opened("s3://data", **options)) == b"234"
        assert proxy.asked == ["http://store.invalid/data/x"]
        assert read(opened(f"{server.url}/data")) == b"234"
        assert [agent(r) for r in seen(server)] == ["Python"]
        assert len(proxy.asked) == 1
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert_through_obstore(server, "s3://data", **server.options())
        assert len(proxy.asked) == 1
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name)
        trusting = opened("http://store.invalid/data", client_kwargs={"trust_env": True})
        assert read(trusting) == b"234"
        assert proxy.asked[1:] == ["http://store.invalid/data/x"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, with its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate_of_host = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(certificate_of_host.public_bytes(pem) + key.private_bytes(pem, *form))
    (path.parent / "ca.pem").write_bytes(certificate_of_host.public_bytes(pem))
    return path


@pytest.fixture
def secure(certificate: Path, server: Server) -> Iterator[Server]:
    """The same server with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(Recording, context) as listening:
        listening.state = server
        server.url = f"https://127.0.0.1:{listening.server_address[1]}"
        yield server


@pytest.mark.parametrize("how", ["verify", "AWS_CA_BUNDLE", "off"])
def test_s3_certificates(how: str, secure: Server, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = str(certificate.parent / "ca.pem")
    options = secure.options()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError):  # noqa: PT011 - nobody knows the certificate
        read(opened("s3://data", **options))
    if how == "AWS_CA_BUNDLE":
        monkeypatch.setenv(how, bundle)
    else:
        options = merged(options, client_kwargs={"verify": bundle if how == "verify" else False})
    assert_through_obstore(secure, "s3://data", **options)


@pytest.mark.parametrize("how", ["SSL_CERT_FILE", "off"])
def test_http_certificates(how: str, secure: Server, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"ssl": False} if how == "off" else {}
    if how != "off":
        monkeypatch.setenv(how, str(certificate.parent / "ca.pem"))
    assert_through_obstore(secure, f"{secure.url}/data", **options)


@pytest.mark.parametrize(
    "options", [{"headers": {"Accept-Language": "de"}}, {"client_kwargs": {"headers": {"Accept-Language": "de"}}}]
)
def test_http_headers(options: dict[str, Any], server: Server) -> None:
    request = assert_through_obstore(server, f"{server.url}/data", **options)
    assert (request["accept-language"], request["accept-encoding"]) == ("de", "identity")


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "cache_regions": ("s3", {"cache_regions": True}),
    "session": ("s3", {"session": None}),
    "s3_additional_kwargs.SSECustomerKey": ("s3", {"s3_additional_kwargs": {"SSECustomerKey": "k"}}),
    "config_kwargs.s3.use_accelerate_endpoint": ("s3", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}),
    "client_kwargs.auth": ("http", {"client_kwargs": {"auth": None}}),
    "encoded": ("http", {"encoded": True}),
    "params": ("http", {"params": {"token": "1"}}),
    "session_kwargs": ("gs", {"session_kwargs": {}}),
    "location_mode": ("az", {"location_mode": "secondary"}),
    "asynchronous": ("az", {"asynchronous": True}),  # adlfs would print an error at the end of the program
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_option_that_the_client_does_not_know_is_an_error(name: str, server: Server) -> None:
    kind, more = UNKNOWN[name]
    source, options = source_of(kind, server)
    if kind in ("gs", "az"):
        pytest.importorskip({"gs": "gcsfs", "az": "adlfs"}[kind])
        source, options = f"{kind}://data", {"token": "anon"} if kind == "gs" else azure_options(server)
    with pytest.raises(ValueError, match=f"unknown storage option '{name}' for .*; docs/stores.md"):
        opened(source, **{**options, **more})
    assert seen(server) == []


def test_options_of_s3fs_for_writing_are_no_concern_of_reading(server: Server) -> None:
    more = {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}, "version_aware": True}
    assert_through_obstore(server, "s3://data", **server.options(), **more)


def test_a_password_in_the_url_falls_back(server: Server) -> None:
    assert read(opened(f"{server.url}/data".replace("//", "//me:hush@"))) == b"234"
    request = seen(server)[-1]
    assert "authorization" in request
    assert agent(request) != OBSTORE


# ---- Google Cloud Storage


class Google(Recording, GcsHandler):
    """The JSON API, of which gcsfs makes use, and the XML API, of which obstore does."""

    def path_of(self) -> str:
        return unquote(super().path_of()).lstrip("/")

    def called(self, query: Mapping[str, str]) -> str:
        path = urlsplit(self.path).path
        return super().called(query) if "storage/v1" in path else "get_object"

    def get_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        status, headers, data = super().get_object(state, path, query, body)
        return status, headers | {"x-goog-generation": str(state.objects[path].number), "ETag": '"other"'}, data


@pytest.fixture
def google() -> Iterator[Server]:
    pytest.importorskip("gcsfs")
    with object_store(Google) as server:
        server.seen = []  # type: ignore[attr-defined]
        server.put("data/x", DIGITS)
        yield server


def test_gcs_reads_one_generation(google: Server) -> None:
    store = opened("gs://data", **gcs_options(google))
    blob = store.open("x")
    assert blob.read([Suffix(3)]) == [b"789"]
    assert blob.read([ByteRange(0, 3), ByteRange(5, 6)]) == [b"012", b"5"]
    generation = google.objects["data/x"].number
    assert [(agent(r), r["path"], "authorization" in r) for r in seen(google) if "/x" in r["path"]] == [
        (OBSTORE, "/data/x", False),
        (OBSTORE, f"/data/x?generation={generation}", False),
    ]
    assert blob.stat().version == store.open("x").stat().version, "gcsfs reports the same"
    google.put("data/x", b"abcdefghij")
    with pytest.raises(StaleShardError, match="was replaced"):
        blob.read([ByteRange(0, 3)])
    assert store.open("x").read([ByteRange(0, 3)]) == [b"abc"]


def test_gcs_credentials(google: Server) -> None:
    credentials = pytest.importorskip("google.oauth2.credentials")
    token = credentials.Credentials("secret-token", expiry=datetime.now() + timedelta(hours=20))
    store = opened("gs://data", **{**gcs_options(google), "token": token})
    assert read(store) == b"234"
    request = seen(google)[-1]
    assert (agent(request), request["authorization"]) == (OBSTORE, "Bearer secret-token")


@pytest.mark.parametrize(("payer", "project"), [(True, "test"), ("another", "another")])
def test_gcs_with_a_requester_who_pays(payer: bool | str, project: str, google: Server) -> None:
    assert read(opened("gs://data", **gcs_options(google), requester_pays=payer)) == b"234"
    request = seen(google)[-1]
    assert (agent(request), request["x-goog-user-project"]) == (OBSTORE, project)


# ---- Azure


KEY = "bm90LWEtcmVhbC1rZXk="


def azure_options(server: Server, **more: str) -> dict[str, Any]:
    parts = {"BlobEndpoint": server.url, "AccountName": "lab", **more}
    return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}


@pytest.fixture
def azure(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same server: the requests of obstore for byte ranges look alike in both interfaces."""
    pytest.importorskip("adlfs")
    for name in [n for n in os.environ if n.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    return server


@pytest.mark.parametrize("protocol", ["az", "abfs", "abfss"])
def test_azure_reads_one_version(protocol: str, azure: Server) -> None:
    store = opened(f"{protocol}://data", **azure_options(azure, AccountKey=KEY))
    blob = store.open("x")
    assert blob.read([Suffix(3)]) == [b"789"]
    assert blob.read([ByteRange(0, 3)]) == [b"012"]
    assert [(agent(r), r["method"], r["path"], "if-match" in r) for r in seen(azure)] == [
        (OBSTORE, "HEAD", "/data/x", False),
        (OBSTORE, "GET", "/data/x", True),
        (OBSTORE, "GET", "/data/x", True),
    ]
    azure.put("data/x", b"abcdefghij")
    with pytest.raises(StaleShardError, match="was replaced"):
        blob.read([ByteRange(0, 3)])
    assert store.open("x").read([ByteRange(0, 3)]) == [b"abc"]


class Bearer:
    """A credential of azure-identity, in the form for asyncio."""

    async def get_token(self, *scopes: str, **_: Any) -> Any:
        assert scopes == (range_client.AZURE_SCOPE,)
        return SimpleNamespace(token="secret-token", expires_on=2**33)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["account_key", "environment", "sas_token", "credential", "anon"])
def test_azure_credentials(name: str, azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = azure_options(azure)
    if name == "account_key":
        options = azure_options(azure, AccountKey=KEY)
    elif name == "environment":
        options = {}
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_options(azure, AccountKey=KEY)["connection_string"])
    elif name == "sas_token":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "of-another-account")
        options = azure_options(azure, SharedAccessSignature="sv=2022-11-02&sig=c2lnbmF0dXJl")
    store = opened("az://data", **options)
    if name == "credential":
        store.fs.service_client.credential = Bearer()
    assert read(store) == b"234"
    request = seen(azure)[-1]
    assert agent(request) == OBSTORE
    authorization = request.get("authorization", "")
    wanted = {"account_key": "SharedKey lab:", "environment": "SharedKey lab:", "credential": "Bearer secret-token"}
    assert authorization.startswith(wanted.get(name, ""))
    assert bool(authorization) == (name in wanted)
    assert ("sig=c2lnbmF0dXJl" in request["path"]) == (name == "sas_token")
