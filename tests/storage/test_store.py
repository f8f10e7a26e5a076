"""Stores: the conformance suite over local files, memory, zip and http; and what only one of them has."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import socket
import threading
import zipfile
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.byte_ranges import coalesce
from shardfs.model.errors import message
from shardfs.storage import html_links, local
from shardfs.storage.blob_views import BytesBlob, PairBlob, SliceBlob
from shardfs.storage.local import LocalStore
from shardfs.storage.open_store import open_store
from shardfs.storage.remote import FsspecStore
from shardfs.storage.retry import RetryPolicy
from tests.handmade import write_files
from tests.suites.store import DIGITS, FILES, StoreSuite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.model.blobs import ByteRequest
    from shardfs.storage.store import Store


class RangeHandler(SimpleHTTPRequestHandler):
    """The standard library's server, with byte ranges; `requests` of the server collects what was asked."""

    ranges = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        self.server.requests.append((self.command, unquote(self.path), self.headers.get("Range")))  # type: ignore[attr-defined]
        if wanted is None or not self.ranges or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        first, last = wanted.groups()
        start = max(len(data) - int(last), 0) if not first else int(first)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start:stop])

    def do_HEAD(self) -> None:
        self.server.requests.append((self.command, unquote(self.path), None))  # type: ignore[attr-defined]
        super().do_HEAD()


class WithoutRanges(RangeHandler):
    ranges = False


@contextmanager
def http_server(root: Path, handler: type[RangeHandler] = RangeHandler) -> Iterator[tuple[str, list[Any]]]:
    """The URL of a server of a directory, and the list of requests it was sent."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(root)))
    server.requests = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.requests  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class TestLocal(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        write_files(tmp_path, FILES)
        return open_store(str(tmp_path))


class TestFileUrl(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        write_files(tmp_path, FILES)
        return open_store(f"file://{tmp_path}")


class TestMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        fs = fsspec.filesystem("memory")
        for name, data in FILES.items():
            fs.pipe_file(f"/suite/{name}", data)
        yield open_store("memory://suite")
        fs.rm("/suite", recursive=True)


class TestZip(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as z:
            for name, data in FILES.items():
                z.writestr(name, data)
        return open_store(f"zip://::file://{tmp_path}/x.zip")


class TestZipDirectory(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
            for name, data in FILES.items():
                z.writestr(f"deep/in/{name}", data)
        return open_store(f"zip://deep/in::file://{tmp_path}/x.zip")


class TestHttp(StoreSuite):
    lists = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        write_files(tmp_path, FILES)
        with http_server(tmp_path) as (url, _):
            yield open_store(url)


def web_store(url: str) -> Store:
    return open_store(url, retry=RetryPolicy(10, 0))


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    """Unless what it sends as a whole is short."""
    write_files(tmp_path, {**FILES, "large": bytes(20 << 20)})
    with http_server(tmp_path, WithoutRanges) as (url, _):
        blob = web_store(url).open("a/digits")
        assert blob.read([ByteRange(5, 9), ByteRange(1 << 21, 1 << 22), Suffix(3)]) == [DIGITS[5:9], b"", DIGITS[-3:]]
        assert blob.read([Suffix(1 << 20)]) == [DIGITS]
        large = web_store(url).open("large")
        requests: list[list[ByteRequest]] = [[Suffix(5)], [ByteRange(19 << 20, 20 << 20)]]
        requests.append([ByteRange(0, 9), ByteRange(19 << 20, 20 << 20)])
        for request in requests:
            with pytest.raises(ConnectionError, match="does not send byte ranges") as failed:
                large.read(request)
            assert failed.value.errno == errno.EIO


def answering(status: int, headers: Mapping[str, str], body: bytes, *, times: int = 1) -> type[RangeHandler]:
    """A server that says the same of everything; the body is sent so many times. What was sent is counted."""

    class Handler(RangeHandler):
        sent = 0

        def do_GET(self) -> None:
            self.server.requests.append((self.command, unquote(self.path), self.headers.get("Range")))  # type: ignore[attr-defined]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):
                for _ in range(times if self.command == "GET" else 0):
                    self.wfile.write(body)
                    type(self).sent += len(body)

        do_HEAD = do_GET

    return Handler


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Range": "bytes 0-3/20"}, "Content-Range 'bytes 0-3/20'"),
        ({"Content-Range": "bytes 5-6/20"}, "Content-Range 'bytes 5-6/20'"),
        ({"Content-Range": "bytes 5-9/20"}, "Content-Range 'bytes 5-9/20'"),
        ({"Content-Range": "bytes 6-9/*"}, "Content-Range"),
        ({}, "Content-Range None"),
        ({"Content-Range": "bytes 5-8/20", "Content-Encoding": "gzip"}, "gzip"),
    ],
)
def test_other_bytes_than_those_asked_for_are_an_error(headers: Mapping[str, str], words: str, tmp_path: Path) -> None:
    with http_server(tmp_path, answering(206, headers, b"abcd")) as (url, requests):
        with pytest.raises(OSError, match=re.escape(words)):
            web_store(url).open("x").read([ByteRange(5, 9)])
        requests.clear()
        with pytest.raises(OSError, match="byte ranges"):
            open_store(url, retry=RetryPolicy(10, 1)).open("x").read([ByteRange(5, 9)])
        by_obstore = importlib.util.find_spec("obstore") is not None
        assert len(requests) == by_obstore + 2, "it is asked again"


@pytest.mark.parametrize("headers", [{}, {"Content-Length": str(4 << 30)}])
def test_a_whole_object_is_not_read_to_its_end(headers: Mapping[str, str], tmp_path: Path) -> None:
    handler = answering(200, headers, bytes(1 << 20), times=4 << 10)
    with http_server(tmp_path, handler) as (url, _):
        blob = web_store(url).open("x")
        assert blob.read([ByteRange(5, 9)]) == [bytes(4)]
        assert web_store(url).documents("", ["x"], 10) == {"x": bytes(11)}
        for request in (Suffix(9), ByteRange(1 << 40, (1 << 40) + 9)):
            with pytest.raises(OSError, match="byte ranges"):
                blob.read([request])
    assert handler.sent < 256 << 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [416, 501])
def test_documents_are_read_where_ranges_are_refused(status: int, tmp_path: Path) -> None:
    class Refusing(RangeHandler):
        def do_GET(self) -> None:
            if "Range" in self.headers:
                self.send_error(status)
            else:
                super().do_GET()

    write_files(tmp_path, FILES)
    with http_server(tmp_path, Refusing) as (url, _):
        store = web_store(url)
        assert store.documents("a", ["info", "zarr.json", "missing"], 100) == {"zarr.json": b"{}", "info": b'{"a": 1}'}
        with pytest.raises(OSError, match=f"it answers {status}"):
            store.open("a/digits").read([Suffix(5)])
        with pytest.raises(OSError, match=f"it answers {status}"):
            store.require_ranges(["missing", "a/b/empty", "a/digits"])


PAGE = b"<!doctype html><form>name and password</form>"


def test_a_page_in_place_of_documents_is_no_document(tmp_path: Path) -> None:
    html = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(PAGE))}
    expected = pytest.raises(OSError, match="HTML page instead of a metadata document")
    with http_server(tmp_path, answering(200, html, PAGE)) as (url, _), expected:
        web_store(url).documents("", ["zarr.json"], 100)

    class LogIn(RangeHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/login"):
                self.send_response(200)
                for name, value in html.items():
                    self.send_header(name, value)
            else:
                self.send_response(302)
                self.send_header("Location", "/login?from=here")
                self.send_header("Content-Length", "0")
            self.end_headers()
            if self.path.startswith("/login") and self.command == "GET":
                self.wfile.write(PAGE)

        do_HEAD = do_GET

    with http_server(tmp_path, LogIn) as (url, _):
        store = web_store(url)
        calls = store.open("x").stat, partial(store.open("x").read, [Suffix(3)]), partial(store.entry, "x")
        for call in (*calls, partial(store.documents, "", ["zarr.json"], 9), partial(next, store.scan("x"), None)):
            with pytest.raises(PermissionError, match=r"redirects to the page http://127.0.0.1:\d+/login; "):
                call()


LISTINGS = {
    '<a href="a/">a</a> <A HREF=\'b\'>b</A><a title="x" href=c%20d>': {"a": True, "b": False, "c d": False},
    '<a href="?C=N;O=D">Name</a><a href="../">up</a><a href="/">home</a><a href="/x/">here</a><a href="#top">': {},
    '<a href="/x/absolute"><a href="http://h:1/x/full/"><a href="//h:1/x/host"><a href="http://other/x/no">':
        {"absolute": False, "full": True, "host": False},
    '<a href="below/it"><a href="./point"><a href="/xy/no"><a href="mailto:me"><a href="http://[broken">':
        {"point": False},
    '<a href="a%3Fb"><a href="h%23"><a href="p%25"><a href="a+b"><a href="&amp;amp;"><a href="%2e%2e"><a href="s%2Fs">':
        {"a?b": False, "h#": False, "p%": False, "a+b": False, "&amp;": False},
    '<a href="twice"><a href="twice/">twice</a><a href="%C3%BC"><a href="ü2"><a href="%FF">':
        {"twice": True, "ü": False, "ü2": False, "\udcff": False},
    '<a href="it\'s"><a href=\'q"q\'><!-- <a href="no"> -->': {"it's": False, 'q"q': False},
}  # fmt: skip


@pytest.mark.parametrize("page", LISTINGS)
def test_names_in_a_listing(page: str) -> None:
    links = html_links.PageLinks()
    links.feed(page)
    for url in ("http://h:1/x/", "http://h:1/x"):
        assert html_links.names_in(links.targets, url) == LISTINGS[page]


def test_http_asks_one_range_for_neighbours(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    with http_server(tmp_path) as (url, requests):
        parts = open_store(url).open("a/digits").read([ByteRange(100, 110), ByteRange(10, 20), ByteRange(300, 310)])
        assert parts == [DIGITS[100:110], DIGITS[10:20], DIGITS[300:310]]
        assert [r for _, _, r in requests] == ["bytes=10-309"]


def test_paths_with_pattern_characters_are_names(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/x[1]*?/info", b"{}")
    assert open_store("memory://x[1]*?").documents("", ["zarr.json", "info"], 10) == {"info": b"{}"}
    fs.rm_file("/x[1]*?/info")


def test_the_source_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_store(str(tmp_path / "missing"))


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_the_source_may_be_a_file(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    if scheme == "memory://":
        fsspec.filesystem("memory").pipe_file(str(path), b"content")
    store = open_store(f"{scheme}{path}")
    assert store.name == "file"
    assert not store.entry("").directory
    assert store.open("").read([ByteRange(0, 9)]) == [b"content"]
    assert list(store.scan("")) == []
    with pytest.raises((FileNotFoundError, NotADirectoryError)):
        store.entry("below")
    if scheme == "memory://":
        fsspec.filesystem("memory").rm_file(str(path))


class BrokenClient:
    """A store's client with exceptions of its own."""

    protocol = "broken"

    def _fail(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("the client has fallen over")

    info = cat_file = cat_ranges = ls = cat = _fail


def test_what_a_client_raises_becomes_an_os_error() -> None:
    store = FsspecStore(BrokenClient(), "root")
    blob = store.open("a")
    for call in (
        lambda: blob.read([ByteRange(0, 1)]),
        lambda: blob.read([ByteRange(0, 1), ByteRange(3, 5)]),
        lambda: blob.read([Suffix(4)]),
        blob.stat,
        lambda: store.entry("a"),
        lambda: list(store.scan("a")),
        lambda: store.documents("a", ["x", "y"], 5),
        lambda: store.documents("a", ["x"], 5),
    ):
        with pytest.raises(OSError, match="fallen over") as e:
            call()
        assert e.value.errno == errno.EIO


class BothClient:
    """An object store with the keys `root/a` and `root/a/b`."""

    protocol = "both"

    def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
        return [
            {"name": "root/a", "type": "file", "size": 3},
            {"name": "root/a", "type": "directory", "size": 0},
            {"name": "root/c", "type": "file", "size": 3},
        ]


def test_a_name_is_listed_once() -> None:
    entries = [(entry.name, entry.directory) for entry in FsspecStore(BothClient(), "root").scan("")]
    assert entries == [("a", True), ("c", False)]


def test_what_is_missing_is_named_and_said_to_be() -> None:
    fsspec.filesystem("memory").pipe_file("/named/a", b"x")
    store = open_store("memory://named")
    for ask in (lambda: store.open("b").stat(), lambda: store.open("b").read([ByteRange(0, 1)])):
        with pytest.raises(FileNotFoundError) as missing:
            ask()
        assert message(missing.value) == "/named/b: No such file or directory"


# ---- coalescing ----

ranges = st.builds(lambda a, n: ByteRange(a, a + n), st.integers(0, 200), st.integers(0, 30))


@given(st.lists(ranges, max_size=30), st.integers(0, 20), st.integers(1, 60))
def test_coalesced_ranges_cover_all_and_keep_the_limits(wanted: list[ByteRange], gap: int, limit: int) -> None:
    merged = coalesce(wanted, gap, limit)
    assert sorted(m for _, members in merged for m in members) == list(range(len(wanted)))
    for whole, members in merged:
        assert all(whole.start <= wanted[m].start and wanted[m].stop <= whole.stop for m in members)
        assert whole.stop - whole.start <= max(limit, *(wanted[m].stop - wanted[m].start for m in members))
        covered = {b for m in members for b in range(wanted[m].start, wanted[m].stop + gap + 1)}
        assert covered >= set(range(whole.start, whole.stop))


def test_coalescing_many_ranges_is_not_quadratic() -> None:
    merged = coalesce([ByteRange(i, i + 1) for i in range(100_000)], 0, 1 << 30)
    assert [(whole, len(members)) for whole, members in merged] == [((0, 100_000), 100_000)]


# ---- parts of blobs ----


def test_slices_bytes_and_pairs(tmp_path: Path) -> None:
    write_files(tmp_path, {"whole": DIGITS, "x.index": DIGITS[:100], "x.data": DIGITS[100:]})
    store = LocalStore(str(tmp_path))
    whole = store.open("whole")
    pair = PairBlob(store.open("x.index"), store.open("x.data"), 100)
    n = len(DIGITS)
    requests: list[ByteRequest] = [ByteRange(10, 20), ByteRange(100, 130), Suffix(7), ByteRange(n - 2, n + 9)]
    assert pair.read(requests) == whole.read(requests)
    assert pair.stat().size == n
    assert os.pread(pair.fd, 5, pair.file_offset + 200) == DIGITS[200:205]
    part = SliceBlob(SliceBlob(whole, 50, 1000), 10, 100)
    assert part.stat().size == 100
    assert part.read([ByteRange(0, 5), Suffix(5), ByteRange(90, 400), ByteRange(500, 600)]) == [
        DIGITS[60:65],
        DIGITS[155:160],
        DIGITS[150:160],
        b"",
    ]
    assert os.pread(part.fd, 5, part.file_offset) == DIGITS[60:65]
    blob = BytesBlob(b"0123456789", whole)
    assert blob.read([ByteRange(2, 4), Suffix(3), Suffix(100), ByteRange(8, 20)]) == [
        b"23",
        b"789",
        b"0123456789",
        b"89",
    ]
    assert (blob.stat().size, blob.stat().version) == (10, whole.stat().version)


# ---- local files ----


def test_links_that_leave_the_source_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"secret": b"s", "root/inside": b"i", "rootsibling/x": b"s"})
    root = tmp_path / "root"
    (root / "file").symlink_to("../secret")
    (root / "dir").symlink_to("..")
    (root / "sibling").symlink_to("../rootsibling")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "fine").symlink_to("inside")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    store = LocalStore(str(root))
    for key in ("file", "dir", "sibling", "absolute", "dir/secret", "sibling/x", "..", "../secret"):
        with pytest.raises(PermissionError):
            store.entry(key)
        with pytest.raises(PermissionError):
            store.open(key).stat()
        if key in ("dir", "sibling", ".."):
            with pytest.raises(PermissionError):
                list(store.scan(key))
    with pytest.raises(PermissionError):
        store.documents("", ["file"], 10)
    assert store.open("fine").read([ByteRange(0, 9)]) == [b"i"]
    listed = {e.name: e for e in store.scan("")}
    assert set(listed) == {"inside", "file", "dir", "sibling", "absolute", "fine", "dangling", "loop"}
    assert {n for n, e in listed.items() if e.stat is not None} == {"inside", "fine"}
    assert not any(e.directory for e in listed.values())
    following = LocalStore(str(root), follow_symlinks=True)
    assert following.open("file").read([ByteRange(0, 9)]) == [b"s"]


def test_a_link_to_the_source_itself_is_followed(tmp_path: Path) -> None:
    write_files(tmp_path / "real", {"x": b"1"})
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/self").symlink_to(".")
    store = LocalStore(str(tmp_path / "link"))
    assert store.open("self/self/x").read([ByteRange(0, 1)]) == [b"1"]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "socket"))
    (tmp_path / "null").symlink_to("/dev/null")
    store = LocalStore(str(tmp_path))
    for key in ("fifo", "socket", "null"):
        with pytest.raises(OSError) as e:  # noqa: PT011 - the errno is what counts
            store.open(key)
        assert e.value.errno in (errno.EACCES, errno.ENXIO)
        with pytest.raises(PermissionError):
            store.entry(key)


def test_descriptors_are_bounded_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_DESCRIPTORS", 10)
    write_files(tmp_path, {str(i): b"%d" % i for i in range(50)})
    store, before = LocalStore(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for i in range(50):
            assert store.open(str(i)).read([ByteRange(0, 9)]) == [b"%d" % i]
    assert len(os.listdir("/proc/self/fd")) <= before + 10
    del store
    assert len(os.listdir("/proc/self/fd")) <= before


def test_most_descriptors_are_left_to_the_program_that_shardfs_is_a_part_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 4096))
    write_files(tmp_path, {str(i): b"%d" % i for i in range(50)})
    store, before = LocalStore(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    for i in range(50):
        assert store.open(str(i)).read([ByteRange(0, 9)]) == [b"%d" % i]
    assert len(os.listdir("/proc/self/fd")) <= before + 10


def test_an_open_blob_keeps_the_version_it_was_opened_with(tmp_path: Path) -> None:
    write_files(tmp_path, {"x": b"old"})
    store = LocalStore(str(tmp_path))
    blob = store.open("x")
    write_files(tmp_path, {"y": b"new!"})
    (tmp_path / "y").rename(tmp_path / "x")
    assert blob.read([ByteRange(0, 9)]) == store.open("x").read([ByteRange(0, 9)]) == [b"old"]
    store.reopen("x")
    assert store.open("x").read([ByteRange(0, 9)]) == [b"new!"]
    assert store.open("x").stat().version != blob.stat().version


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe")
    write_files(tmp_path, {name: b"x"})
    store = LocalStore(str(tmp_path))
    assert [e.name for e in store.scan("")] == [name]
    assert store.open(name).read([Suffix(1)]) == [b"x"]


def test_waiting_is_called_before_a_directory_is_read(tmp_path: Path) -> None:
    calls: list[int] = []
    store = LocalStore(str(tmp_path), lambda: calls.append(1))
    list(store.scan(""))
    assert calls


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_what_is_being_written_is_not_listed(scheme: str, tmp_path: Path) -> None:
    names = ["a", ".b", ".shardfs.lock", ".shardfs-0123456789abcdef.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"1")
        fsspec.filesystem("memory").pipe_file(f"{tmp_path}/{name}", b"1")
    assert {entry.name for entry in open_store(f"{scheme}{tmp_path}").scan("")} == {"a", ".b"}
    fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


def test_what_is_replaced_while_it_is_opened_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"shard": b"old"})
    store = LocalStore(str(tmp_path))

    def replaced(key: str) -> Any:
        blob = LocalStore._open(store, key)
        write_files(tmp_path, {"new": b"newer"})
        os.replace(tmp_path / "new", tmp_path / "shard")
        store.reopen(key)
        return blob

    with monkeypatch.context() as patch:
        patch.setattr(store, "_open", replaced)
        assert store.open("shard").stat().size == 3
    assert store.open("shard").stat().size == 5


def test_s3_has_as_many_connections_as_may_fetch_ahead() -> None:
    pytest.importorskip("s3fs")
    own_options = {"config_kwargs": {"max_pool_connections": 7}}
    for options, expected in (({}, 32), (own_options, 7), ({"config_kwargs": {"retries": {"mode": "standard"}}}, 32)):
        store = open_store("s3://bucket/a", {"anon": True, **options}, prefetch=1 << 20, connections=32)
        assert isinstance(store, FsspecStore)
        assert store.fs.config_kwargs["max_pool_connections"] == expected
        assert store.fs.config_kwargs.items() >= options.get("config_kwargs", {}).items()


# ---- redirects ----


class Redirecting(RangeHandler):
    """Sends all requests on to another host, whose URL is the attribute `target` of the server."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.server.target}{self.path}")  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET


class Listening(RangeHandler):
    """Remembers the headers of requests."""

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.requests.append(dict(self.headers))  # type: ignore[attr-defined]
        return parsed


@pytest.mark.parametrize("lead", ["headers", "client_kwargs"])
def test_headers_with_secrets_stay_with_the_host_of_the_url(lead: str, tmp_path: Path) -> None:
    """A server that redirects to another host does not get them there; the same host does after a redirect."""
    write_files(tmp_path, {"a/x": b"0123456789"})
    secrets = {"X-Api-Key": "k-e-y", "Authorization": "Bearer t", "Cookie": "c=1"}
    options: dict[str, Any] = {"headers": secrets} if lead == "headers" else {"client_kwargs": {"headers": secrets}}
    with http_server(tmp_path, Listening) as (far_url, headers), redirecting(tmp_path, far_url) as near_url:
        assert open_store(f"{far_url}/a", options).open("x").read([ByteRange(2, 5)]) == [b"234"]
        assert all(h["X-Api-Key"] == "k-e-y" for h in headers if isinstance(h, dict))
        del headers[:]
        store = open_store(f"{near_url}/a", options)
        assert store.open("x").read([ByteRange(2, 5)]) == [b"234"]
        assert store.documents("", ["x"], 100) == {"x": b"0123456789"}
        assert store.open("x").stat().size == 10
        assert headers
        for sent in (h for h in headers if isinstance(h, dict)):
            assert not {"X-Api-Key", "Authorization", "Cookie"} & set(sent), sent


@contextmanager
def redirecting(root: Path, target: str) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Redirecting, directory=str(root)))
    server.requests = []  # type: ignore[attr-defined]
    server.target = target  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
