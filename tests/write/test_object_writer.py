"""Objects replaced by conditional requests: how many it takes, who slips in, what is lost on the way."""

from __future__ import annotations

import errno
import gzip
import json
import os
import threading
import time
import zipfile
from typing import TYPE_CHECKING, Any, cast

import fsspec
import pytest
from fsspec.asyn import sync
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import Blob, ByteRange, FilePart, Piece, Plan, Suffix
from shardfs.model.changes import FIRST, UNREAD
from shardfs.model.errors import StaleShardError, UnsupportedError
from shardfs.model.write_plan import piece_size
from shardfs.storage.open_store import open_store
from shardfs.storage.remote import FsspecStore
from shardfs.storage.retry import RetryPolicy
from shardfs.storage.writers import open_writer
from shardfs.storage.writers.azure import AzureObjects
from shardfs.storage.writers.gcs import GcsObjects
from shardfs.storage.writers.memory import MemoryObjects
from shardfs.storage.writers.objects import ObjectWriter
from shardfs.storage.writers.planned_blob import PlannedBlob
from shardfs.storage.writers.s3 import MultipartLimits, S3Objects, in_parts
from tests.write.azurite import azurite
from tests.write.hooks import Recorder, hooked
from tests.write.object_store import ALL, Object, Server
from tests.write.object_store_gcs import gcs_options, gcs_store
from tests.write.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.blobs import ByteRequest
    from shardfs.model.changes import Begun

KEY = "a/shard"
SMALL = MultipartLimits(min_part=10, max_part=16, max_copy=40, max_whole=30)
CHANGING = ("put_object", "delete_object", "complete_multipart_upload")


class Bench:
    """A writer, and its store as others see it."""

    def __init__(self, store: FsspecStore, writer: ObjectWriter, server: Server | None = None) -> None:
        self.store, self.writer, self.server = store, writer, server
        self.objects = writer._objects

    def get(self) -> bytes | None:
        try:
            self.store.reopen(KEY)
            data: bytes = self.store.fs.cat_file(self.store.path(KEY))
        except FileNotFoundError:
            return None
        return data

    def put(self, data: bytes) -> None:
        self.store.fs.pipe_file(self.store.path(KEY), data)


clients: dict[str, Any] = {}
"""By URL: to make one takes half a second."""


def s3_store(server: Server, retry: RetryPolicy | None = None) -> FsspecStore:
    pytest.importorskip("s3fs")
    if server.url not in clients:
        clients[server.url] = fsspec.filesystem("s3", **server.options())
    return FsspecStore(clients[server.url], "data/root", retry=retry)


def s3_bench(server: Server, limits: MultipartLimits = MultipartLimits(), retry: RetryPolicy | None = None) -> Bench:  # noqa: B008
    store = s3_store(server, retry)
    return Bench(store, ObjectWriter(store, S3Objects(store, limits)), server)


def knows_of_parts(bench: Bench) -> Bench:
    """One that has found out already whether conditions hold for them."""
    bench.writer.put("large", bytes(100))
    bench.writer.delete("large")
    return bench


def memory_bench() -> Bench:
    store = open_store("memory://write-tests/root")
    assert isinstance(store, FsspecStore)
    return Bench(store, ObjectWriter(store, MemoryObjects(store)))


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[Server]:
    with gcs_store() as server:
        yield server


def gcs_bench(server: Server) -> Bench:
    pytest.importorskip("gcsfs")
    server.reset()
    if server.url not in clients:
        clients[server.url] = fsspec.filesystem("gs", **gcs_options(server))
    store = FsspecStore(clients[server.url], "data/root")
    return Bench(store, ObjectWriter(store, GcsObjects(store)), server)


@pytest.fixture(scope="module")
def azure_account() -> Iterator[str]:
    with azurite() as account:
        yield account


def azure_bench(account: str) -> Bench:
    pytest.importorskip("adlfs")
    if account not in clients:
        clients[account] = fsspec.filesystem("abfs", connection_string=account)
    container = f"data-{os.urandom(4).hex()}"
    clients[account].mkdir(container)
    store = FsspecStore(clients[account], f"{container}/root")
    return Bench(store, ObjectWriter(store, AzureObjects(store)))


@pytest.fixture(params=["memory", "s3", "s3 in parts", "moto", "gcs", "azure"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "memory":
        yield memory_bench()
        fsspec.filesystem("memory").store.pop("/write-tests/root/a/shard", None)
    elif request.param == "gcs":
        yield gcs_bench(request.getfixturevalue("gcs_server"))
    elif request.param == "azure":
        yield azure_bench(request.getfixturevalue("azure_account"))
    elif request.param == "moto":
        yield request.getfixturevalue("moto_bench")()
    else:
        limits = SMALL if "parts" in request.param else MultipartLimits()
        yield knows_of_parts(s3_bench(request.getfixturevalue("server"), limits))


@pytest.fixture
def moto_bench(moto_url: str) -> Callable[[], Bench]:
    bucket = f"bucket-{os.urandom(4).hex()}"

    def make() -> Bench:
        pytest.importorskip("s3fs")
        s3_store(Server(url=moto_url)).fs.call_s3("create_bucket", Bucket=bucket)
        store = FsspecStore(clients[moto_url], f"{bucket}/root")
        writer = open_writer(store)
        assert isinstance(writer, ObjectWriter)
        return Bench(store, writer)

    return make


def content(blob: Blob | None) -> dict[str, int]:
    found: dict[str, int] = {} if blob is None else json.loads(blob.read([Suffix(1 << 20)])[0])
    return found


def with_member(name: str, value: int = 1) -> Callable[[Blob | None], Plan]:
    return lambda old: [json.dumps(content(old) | {name: value}).encode()]


def one_more(old: Blob | None) -> Plan:
    """Not to be done twice."""
    return [b"x"] if old is None else [ByteRange(0, old.stat().size), b"x"]


# ------------------------------------------------------------------------------------------------ what all can do


@pytest.mark.parametrize("kind", ["s3", "gcs"])
@pytest.mark.parametrize("call", ["put", "delete", "rename"])
def test_no_byte_of_an_old_object_is_received_to_replace_it(
    call: str, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "gcs":
        bench = gcs_bench(request.getfixturevalue("gcs_server"))
    else:
        bench = s3_bench(request.getfixturevalue("server"))
    server = bench.server
    assert server is not None
    old = os.urandom(1 << 19)
    bench.put(old)
    before = len(server.requests)
    if call == "put":
        bench.writer.put(KEY, b"new")
    elif call == "delete":
        bench.writer.delete(KEY)
    else:
        bench.writer.rename(KEY, "a/other")
    received = sum(down for _, down in server.bodies[before:])
    assert received < 10_000, server.requests[before:]
    assert len(server.requests) - before <= (6 if call == "rename" else 2), server.requests[before:]
    assert bench.get() == (b"new" if call == "put" else None)
    if call == "rename":
        assert bench.store.fs.cat_file(bench.store.path("a/other")) == old


def test_create_replace_remove(bench: Bench, tmp_path: Path) -> None:
    notes: list[Begun] = []
    (tmp_path / "journal").write_bytes(b"-from the journal-")
    stat = bench.writer.update(KEY, Steps(lambda old: [b"0123456789"] if old is None else None, notes.append))
    assert stat is not None
    assert stat.size == 10
    assert bench.get() == b"0123456789"
    with open(tmp_path / "journal", "rb") as journal:
        plan: Plan = [ByteRange(0, 10), FilePart(journal.fileno(), 1, 16), b"", memoryview(b"end"), ByteRange(8, 10)]
        seen: list[bytes] = []
        bench.writer.update(KEY, Steps(lambda old: plan, notes.append, lambda new: seen.extend(new.read([Suffix(4)]))))
    assert bench.get() == b"0123456789from the journalend89"
    assert seen == [b"nd89"]
    assert bench.writer.update(KEY, Steps(lambda old: None, notes.append)) is None
    assert bench.get() is None
    assert bench.writer.update(KEY, Steps(lambda old: None, notes.append)) is None
    assert [note.base is None for note in notes] == [True, False, False]
    assert json.loads(json.dumps(notes)) == [list(note) for note in notes]
    for note in notes:
        bench.writer.recover(note)


def test_a_check_that_fails_changes_nothing(bench: Bench) -> None:
    bench.put(b"old")

    def refuse(new: Blob) -> None:
        raise ValueError("not right")

    with pytest.raises(ValueError, match="not right"):
        bench.writer.update(KEY, Steps(lambda _: [b"new" * 30], check=refuse))
    with pytest.raises(ValueError, match="cannot be noted"):
        bench.writer.update(KEY, Steps(lambda _: [b"new" * 30], tell=raise_value_error))
    assert bench.get() == b"old"
    assert bench.server is None or not bench.server.uploads


def raise_value_error(_: Begun) -> None:
    raise ValueError("cannot be noted")


def test_empty_objects(bench: Bench) -> None:
    bench.put(b"")
    sizes: list[int] = []
    bench.writer.update(KEY, Steps(lambda old: [b"1"] if old and not sizes.append(old.stat().size) else None))  # type: ignore[func-returns-value]
    assert sizes == [0]
    assert bench.get() == b"1"


@pytest.mark.parametrize("existing", [True, False])
def test_who_slips_in_loses_nothing(existing: bool, bench: Bench) -> None:
    """Right before each changing call in turn."""

    def prepare() -> None:
        bench.writer.update(KEY, Steps(lambda _: [b'{"first": 1}'] if existing else None))

    def theirs() -> None:
        bench.put(json.dumps(json.loads(bench.get() or b"{}") | {"theirs": 1}).encode())

    first = {"first": 1} if existing else {}
    prepare()
    with hooked(undisturbed := Recorder()):
        bench.writer.update(KEY, Steps(with_member("ours", 10**20)))
    for at in range(len(undisturbed.calls)):
        prepare()
        with hooked(Recorder(at, theirs)):
            bench.writer.update(KEY, Steps(with_member("ours", 10**20)))
        assert json.loads(bench.get() or b"") == first | {"theirs": 1, "ours": 10**20}, undisturbed.names[at]


def test_a_removal_spares_what_is_new(bench: Bench) -> None:
    bench.put(b"old")
    with hooked(Recorder(0, lambda: bench.put(b"theirs"))):
        bench.writer.update(KEY, Steps(lambda old: None if old and old.read([Suffix(9)]) == [b"old"] else [b"merged"]))
    assert bench.get() == b"merged"
    with hooked(Recorder(0, lambda: bench.store.fs.rm_file(bench.store.path(KEY)))):
        assert bench.writer.update(KEY, Steps(lambda old: None)) is None
    assert bench.get() is None


def test_removed_meanwhile(bench: Bench) -> None:
    bench.put(b"old")
    with hooked(Recorder(0, lambda: bench.store.fs.rm_file(bench.store.path(KEY)))):
        bench.writer.update(KEY, Steps(lambda old: [b"new"] if old is None else [ByteRange(0, 3), b"more" * 10]))
    assert bench.get() == b"new"


def test_two_engines_count_exactly(request: pytest.FixtureRequest, bench: Bench) -> None:
    if "moto" in request.node.name:
        pytest.skip("moto compares and puts in two steps, between which another thread may do the same")

    def work(writer: ObjectWriter) -> None:
        for _ in range(25):
            writer.update(KEY, Steps(lambda old: [str(int(old.read([Suffix(9)])[0]) + 1 if old else 1).encode()]))

    store = bench.store
    threads = [threading.Thread(target=work, args=(w,)) for w in (bench.writer, ObjectWriter(store, bench.objects))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bench.get() == b"50"


def test_passing_through(bench: Bench) -> None:
    writer = bench.writer
    writer.put("d/README", b"text")
    with pytest.raises(OSError, match="not empty"):
        writer.remove_directory("d")
    with pytest.raises(OSError, match=r"cross-device|d") as caught:
        writer.rename("d", "e")
    assert caught.value.errno == errno.EXDEV
    writer.rename("d/README", KEY)
    assert bench.get() == b"text"
    with pytest.raises(FileNotFoundError):
        writer.delete("d/README")
    assert writer.disk is None
    writer.delete(KEY)


@pytest.mark.every_case
@pytest.mark.parametrize("key", ["../x", "/x", "a//x", "a/../../x", "nul\0"])
def test_keys_stay_in_the_source(key: str, bench: Bench) -> None:
    with pytest.raises(PermissionError):
        bench.writer.put(key, b"x")
    with pytest.raises(OSError, match="x") as caught:
        bench.writer.put("\udcff-x", b"x")
    assert caught.value.errno == errno.EILSEQ


# ------------------------------------------------------------------------------------------------ requests


def test_many_new_objects(bench: Bench) -> None:
    contents = {f"many/{i}": b"%d" % i for i in range(40)}
    for _ in range(2):  # the second time, they exist
        bench.writer.create(list(contents.items()))
        assert {key: bench.store.fs.cat_file(bench.store.path(key)) for key in contents} == contents
    if bench.server is not None:
        bench.server.requests.clear()
        bench.writer.create([(f"more/{i}", b"x") for i in range(40)])
        assert bench.server.requests == ["put_object"] * 40


def test_how_many_requests_it_takes(server: Server) -> None:
    writer = s3_bench(server).writer

    def requests(plan: Plan | None) -> list[str]:
        server.requests.clear()
        writer.update(KEY, Steps(lambda old: plan))
        return server.requests

    assert requests(None) == ["get_object"]
    assert requests([b"new"]) == ["get_object", "put_object"]
    assert requests([ByteRange(0, 3), b"more"]) == ["get_object", "put_object"]
    assert requests([ByteRange(0, 7)]) == ["get_object"]  # it stays as it is
    assert requests(None) == ["get_object", "delete_object"]


def test_large_objects_stay_where_they_are(server: Server) -> None:
    """Old bytes of the beginning and the end are copied by the store; of the object, nothing comes but its index."""
    server.min_part = 10
    bench = s3_bench(server, SMALL)
    old = os.urandom(100)
    bench.writer.put("large", bytes(100))  # finds out whether conditions hold for parts
    assert list(server.objects) == ["data/root/large"]
    server.put("data/root/a/shard", old)
    server.requests.clear()
    bench.writer.update(KEY, Steps(lambda blob: [b"index", ByteRange(0, 100), b"chunk"]))
    request_list = list(server.requests)
    assert bench.get() == b"index" + old + b"chunk"
    parts = ["upload_part", "upload_part_copy", "upload_part_copy", "upload_part_copy", "upload_part"]
    assert request_list[:2] == ["get_object", "create_multipart_upload"]
    assert sorted(request_list[2:7]) == sorted(parts)
    assert request_list[7:] == ["complete_multipart_upload"]
    assert not server.uploads


def test_parts_are_sent_only_where_conditions_hold_for_them(server: Server) -> None:
    server.heeds = ALL - {"complete"}
    bench = s3_bench(server, SMALL)
    server.put("data/root/a/shard", bytes(100))
    bench.writer.update(KEY, Steps(lambda old: [ByteRange(0, 100), b"1"]))
    bench.writer.update(KEY, Steps(lambda old: [ByteRange(0, 101), b"2"]))
    assert server.requests.count("create_multipart_upload") == 1
    assert server.requests.count("put_object") == 3
    assert list(server.objects) == ["data/root/a/shard"]
    assert server.objects["data/root/a/shard"].data == bytes(100) + b"12"


def test_what_belongs_to_an_object_stays(server: Server) -> None:
    bench = s3_bench(server)
    words = {"Metadata": {"colour": "red"}, "ContentType": "application/x-shard", "CacheControl": "no-cache"}
    bench.store.fs.call_s3("put_object", Bucket="data", Key="root/a/shard", Body=b"old", **words)
    bench.writer.update(KEY, Steps(lambda old: [b"new"]))
    headers = {k.lower(): v for k, v in server.objects["data/root/a/shard"].headers.items()}
    assert headers["x-amz-meta-colour"] == "red"
    assert headers["content-type"] == "application/x-shard"
    assert headers["cache-control"] == "no-cache"


def test_only_what_is_needed_of_a_large_object(server: Server) -> None:
    bench = s3_bench(server)
    data = os.urandom(5 << 20)
    server.put("data/root/a/shard", data)
    got: list[bytes] = []

    def look(old: Blob | None) -> Plan | None:
        assert old is not None
        got.extend(old.read([ByteRange(2, 6), ByteRange(8, 12), Suffix(4), ByteRange(3_000_000, 3_000_002)]))
        return [ByteRange(0, 3), b"."]

    bench.writer.update(KEY, Steps(look, first=ByteRange(0, 10)))
    assert got == [data[2:6], data[8:12], data[-4:], data[3_000_000:3_000_002]]
    assert bench.get() == data[:3] + b"."


@pytest.mark.parametrize("kind", ["memory", "s3", "gcs"])
def test_no_plan_is_made_of_two_versions(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces an object of which only the first bytes have come: what is made of it is made anew."""
    monkeypatch.setattr("shardfs.storage.writers.objects.FIRST", ByteRange(0, 4))
    if kind == "memory":
        bench = memory_bench()
    elif kind == "gcs":
        bench = gcs_bench(request.getfixturevalue("gcs_server"))
    else:
        bench = s3_bench(request.getfixturevalue("server"))
    bench.put(b"old-old-old-")
    got: list[bytes] = []

    def make(old: Blob | None) -> Plan:
        assert old is not None
        if not got:
            got.append(b"")
            bench.put(b"new-new-new-")
        got.extend(old.read([ByteRange(0, 4)]) + old.read([ByteRange(4, 8), Suffix(4)]))
        return [ByteRange(0, 12), b"."]

    bench.writer.update(KEY, Steps(make, first=ByteRange(0, 4)))
    assert got == [b"", b"new-", b"new-", b"new-"]
    assert bench.get() == b"new-new-new-."
    bench.writer.delete(KEY)


pieces = st.lists(st.tuples(st.sampled_from(["old", "new"]), st.integers(0, 120), st.integers(0, 120)), max_size=8)


@given(pieces)
def test_parts_are_the_plan(drawn: list[tuple[str, int, int]]) -> None:
    old = bytes(range(240))
    plan: list[Piece] = [ByteRange(s, s + n) if kind == "old" else bytes([s] * n) for kind, s, n in drawn]

    def whole(plan: list[Piece]) -> bytes:
        return b"".join(old[p.start : p.stop] if isinstance(p, ByteRange) else bytes(p) for p in plan)

    parts = list(in_parts(plan, SMALL))
    assert b"".join(map(whole, parts)) == whole(plan)
    sizes = [sum(map(piece_size, part)) for part in parts]
    assert all(size >= SMALL.min_part for size in sizes[:-1])
    assert all(sizes)
    for part, size in zip(parts, sizes, strict=True):
        assert size <= (SMALL.max_copy if len(part) == 1 and isinstance(part[0], ByteRange) else 2 * SMALL.max_part)


@given(pieces, st.integers(0, 400), st.integers(0, 400))
def test_a_planned_blob_reads_as_the_object_will(drawn: list[tuple[str, int, int]], start: int, size: int) -> None:
    class Old:
        fd, file_offset = -1, 0

        def read(self, requests: list[ByteRange]) -> list[bytes]:
            return [bytes(range(240))[r.start : r.stop] for r in requests]

    plan: Plan = [ByteRange(s, s + n) if kind == "old" else bytes([s] * n) for kind, s, n in drawn]
    blob = PlannedBlob(plan, Old())  # type: ignore[arg-type]
    whole = blob.bytes(plan)
    assert blob.size == len(whole)
    assert blob.read([ByteRange(start, start + size), Suffix(size)]) == [
        whole[start : start + size],
        whole[max(len(whole) - size, 0) :],
    ]


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("fault", ["lost", "reset", "busy", "cut"])
@pytest.mark.parametrize("limits", [MultipartLimits(), SMALL], ids=["whole", "in parts"])
def test_a_fault_at_every_request(limits: MultipartLimits, fault: str, server: Server) -> None:
    """Answers lost, connections reset, 503, bodies cut off: in the end it has happened exactly once."""
    bench = knows_of_parts(s3_bench(server, limits))
    start = b"0123456789" * 5
    server.put("data/root/a/shard", start)
    server.requests.clear()
    bench.writer.update(KEY, Steps(one_more))
    for at in range(len(server.requests)):
        server.put("data/root/a/shard", start)
        server.requests.clear()
        server.applied.clear()
        server.fault = lambda number, name, at=at: fault if number == at else ""  # type: ignore[misc]
        bench.writer.update(KEY, Steps(one_more))
        server.fault = lambda number, name: ""
        assert bench.get() == start + b"x", at
        assert sum(name in CHANGING for name in server.applied) == 1, at
        # An upload that began, but whose number got lost, nobody can end.
        assert not server.uploads or server.requests.count("create_multipart_upload") > 1
        server.uploads.clear()


@pytest.mark.parametrize("fault", ["lost", "busy"])
def test_faults_of_gcs(fault: str, gcs_server: Server) -> None:
    bench = gcs_bench(gcs_server)
    bench.put(b"0123")
    gcs_server.applied.clear()
    gcs_server.requests.clear()
    first = iter([fault])
    gcs_server.fault = lambda number, name: next(first, "") if name == "put_object" else ""
    bench.writer.update(KEY, Steps(one_more))
    gcs_server.fault = lambda number, name: ""
    assert bench.get() == b"0123x"
    assert gcs_server.applied.count("put_object") == 1
    again, blobs = iter([fault]), list[Blob | None]()
    gcs_server.fault = lambda number, name: next(again, "") if name == "delete_object" else ""
    bench.writer.update(KEY, Steps(blobs.append))
    gcs_server.fault = lambda number, name: ""
    assert len(blobs) == 1
    assert bench.get() is None


@pytest.mark.parametrize("first", [FIRST, Suffix(2), UNREAD])
def test_an_object_that_gcs_decompresses_is_refused(first: ByteRequest, gcs_server: Server) -> None:
    bench = gcs_bench(gcs_server)
    headers = {"told": json.dumps({"contentEncoding": "gzip"})}
    gcs_server.objects[f"data/root/{KEY}"] = Object(b"0123", headers)
    with pytest.raises(OSError, match="stored compressed"):
        bench.writer.update(KEY, Steps(one_more, first=first))
    assert gcs_server.objects[f"data/root/{KEY}"].data == b"0123"


def test_an_object_that_azure_could_decompress_keeps_its_bytes(azure_account: str) -> None:
    bench, data = azure_bench(azure_account), gzip.compress(b"0123")
    from azure.storage.blob import ContentSettings

    async def store() -> None:
        client = cast("AzureObjects", bench.objects)._blob(bench.store.path(KEY))
        await client.upload_blob(data, content_settings=ContentSettings(content_encoding="gzip"))

    sync(bench.store.fs.loop, store)
    bench.writer.update(KEY, Steps(one_more))
    path = bench.store.path(KEY)
    version = bench.objects.head(path)
    assert version is not None
    assert version.size == len(data) + 1
    assert version.facts["content_settings"].content_encoding == "gzip"
    assert bench.objects.read(path, version, [ByteRange(0, version.size)]) == [data + b"x"]


def test_a_lost_answer_and_somebody_else(server: Server) -> None:
    """Ours was applied, its answer lost, and theirs came on top: ours is not taken for applied, nor theirs lost."""
    bench = s3_bench(server)
    server.put("data/root/a/shard", b'{"first": 1}')
    server.requests.clear()

    def fault(number: int, name: str) -> str:
        if name == "put_object" and server.requests.count(name) == 1:
            return "lost"
        if name == "put_object" and server.requests.count(name) == 2:
            server.put("data/root/a/shard", b'{"first": 1, "ours": 1, "theirs": 1}')
        return ""

    server.fault = fault
    bench.writer.update(KEY, Steps(with_member("ours")))
    assert json.loads(bench.get() or b"") == {"first": 1, "ours": 1, "theirs": 1}


def test_a_store_that_stays_busy(server: Server) -> None:
    bench = s3_bench(server, retry=RetryPolicy(timeout_s=60, retries=1))
    bench.writer.put(KEY, b"old")
    server.fault = lambda number, name: "busy" if name == "put_object" else ""
    with pytest.raises(OSError, match=r"busy|SlowDown"):
        bench.writer.put(KEY, b"new")
    server.fault = lambda number, name: ""
    assert bench.get() == b"old"
    bench.writer.put(KEY, b"new")
    assert bench.get() == b"new"


@pytest.mark.parametrize("name", ["head_object", "put_object"])
def test_a_store_that_hangs_is_given_up(name: str, server: Server) -> None:
    bench = s3_bench(server, retry=RetryPolicy(timeout_s=60, retries=0))
    policies = (bench.store.retry, cast("S3Objects", bench.objects)._requests.writing)
    bench.writer.put(KEY, b"old")
    for retry in policies:
        retry.timeout_s = 2
    server.fault = lambda number, asked: "hang" if asked == name else ""
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        bench.writer.put(KEY, b"new")
    assert time.monotonic() - start < 50
    server.released.set()
    server.fault = lambda number, asked: ""
    for retry in policies:
        retry.timeout_s = 60
    bench.writer.put(KEY, b"newer")
    assert bench.get() == b"newer"


def test_who_never_stops_is_left_alone(server: Server) -> None:
    store = s3_store(server)
    writer = ObjectWriter(store, S3Objects(store), race_s=0.2)

    def fault(number: int, name: str) -> str:
        server.put("data/root/a/shard", str(number).encode())
        return ""

    server.fault = fault
    with pytest.raises(StaleShardError):
        writer.update(KEY, Steps(lambda old: [b"ours"]))


def test_uploads_in_parts_are_given_up_at_recovery(server: Server) -> None:
    bench = s3_bench(server, SMALL)
    server.uploads.clear()
    notes: list[Begun] = []
    bench.writer.update(KEY, Steps(lambda _: [b"x" * 50], notes.append))
    bench.writer.recover(notes[0])  # it was completed
    upload = bench.store.fs.call_s3("create_multipart_upload", Bucket="data", Key="root/a/shard")["UploadId"]
    bench.writer.recover(notes[0]._replace(temp=upload))
    assert not server.uploads
    assert bench.get() == b"x" * 50


# ------------------------------------------------------------------------------------------------ what stores can do


@pytest.mark.parametrize("heeds", [ALL, ALL - {"delete"}, ALL - {"put"}, frozenset()])
def test_conditions_are_tried_out(heeds: frozenset[str], server: Server) -> None:
    server.heeds = heeds
    store = s3_store(server)
    objects = S3Objects(store)
    objects.try_conditions()
    assert objects.conditional == ("put" in heeds)
    assert objects.removes == ("delete" in heeds)
    assert not server.objects
    assert len(server.requests) <= 7
    if "put" in heeds:
        open_writer(store)
    else:
        with pytest.raises(UnsupportedError, match="conditional writes"):
            open_writer(store)
    writer = open_writer(store, alone=True)
    writer.put(KEY, b"1")
    server.put("data/root/a/shard", b"2")
    writer.update(KEY, Steps(lambda old: [ByteRange(0, 1), b"3"]))
    assert server.objects["data/root/a/shard"].data == b"23"
    writer.delete(KEY)
    assert not server.objects


class Plain(MemoryFileSystem):  # type: ignore[misc]
    """A store that keeps no conditions and has no tags; moving is copying."""

    protocol = "plain"
    cachable = False
    torn = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs: list[str] = [""]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value[: len(value) - self.torn], mode, **kwargs)


class Moving(Plain):
    """The same, as SFTP: a rename is one."""

    protocol = "moving"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.store[path2] = self.store.pop(path1)


@pytest.mark.parametrize("kind", [Plain, Moving])
def test_any_store_can_be_written_if_asked_for(kind: type[Plain]) -> None:
    fs = kind()
    store = FsspecStore(fs, "/root")
    with pytest.raises(UnsupportedError, match="conditional writes"):
        open_writer(store)
    assert not fs.store
    writer = open_writer(store, alone=True)
    writer.put(KEY, b"0123")
    with hooked(recorder := Recorder()):
        writer.update(KEY, Steps(lambda old: [ByteRange(0, 4), b"56"]))
    assert recorder.names == ["put_object", "rename_object"][: 1 + (kind is Moving)]
    assert fs.cat_file("/root/a/shard") == b"012356"
    fs.torn = 1
    with pytest.raises(OSError, match="something else is there"):
        writer.put(KEY, b"0123456789")
    fs.torn = 0
    if kind is Moving:  # elsewhere it is written in place
        assert fs.cat_file("/root/a/shard") == b"012356"
    fs.pipe_file("/root/a/shard", b"012356")
    writer.update(KEY, Steps(with_member_after_theirs(fs)))
    assert fs.cat_file("/root/a/shard") == b"theirs, ours"
    writer.delete(KEY)
    with pytest.raises(FileNotFoundError):
        writer.delete(KEY)
    assert all(".shardfs-" in name for name in fs.store)  # what was torn


def with_member_after_theirs(fs: Plain) -> Callable[[Blob | None], Plan]:
    """Somebody else writes while the first plan is made."""

    def make(old: Blob | None) -> Plan:
        if old is None or old.read([Suffix(9)]) != [b"theirs"]:
            fs.pipe_file("/root/a/shard", b"theirs")
            return [b"ours"]
        return [ByteRange(0, 6), b", ours"]

    return make


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a", b"1")
    for store in (open_store(f"zip://::file://{tmp_path}/x.zip"), FsspecStore(Refusing(), "/root")):
        with pytest.raises(UnsupportedError, match="conditional writes"):
            open_writer(store)
        with pytest.raises(UnsupportedError, match="cannot be written"):
            open_writer(store, alone=True)


class Refusing(Plain):
    protocol = "refusing"

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError
