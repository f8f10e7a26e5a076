"""The disk cache: right bytes or none, whatever happens to the disk, to the source or to other processes."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import ByteRange, Stat, Suffix, absolute
from shardfs.model.errors import StaleShardError
from shardfs.storage import cached_store, disk_cache, syscalls
from shardfs.storage import counters as counters_of_stores
from shardfs.storage.cached_store import CachedStore
from shardfs.storage.disk_cache import DiskCache
from shardfs.storage.open_store import open_store
from shardfs.storage.retry import RetryPolicy
from tests.datasets import ROOT
from tests.failing_starts import FailingStarts
from tests.handmade import write_files
from tests.storage.test_store import RangeHandler, http_server
from tests.suites.store import FILES, StoreSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.model.blobs import ByteRequest
    from shardfs.storage.store import Store

KIB = 1 << 10
TAG = b"version".ljust(disk_cache.TAG_BYTES)
LIMIT = 1 << 20


def name(number: int) -> bytes:
    return number.to_bytes(disk_cache.NAME_BYTES, "big")


def stored(cache: DiskCache, number: int, data: bytes, tag: bytes = TAG) -> None:
    cache.put(name(number), tag, data)
    cache.flush(60)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def grown_old(directory: Path, seconds: float = 3600) -> None:
    """Let all entries look as if they were used last long ago."""
    for path in files(directory):
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(str(tmp_path / "cache"), LIMIT)


def test_entries_outlive_the_process_and_are_private(cache: DiskCache, tmp_path: Path) -> None:
    stored(cache, 1, b"one")
    again = DiskCache(str(tmp_path / "cache"), LIMIT)
    assert again.get(name(1)) == (TAG, b"one")
    assert again.get(name(2)) is None
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 40)),
        st.tuples(st.just("get"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("damage"), st.integers(0, 5), st.integers(0, 1 << 20)),
        st.tuples(st.just("shorten"), st.integers(0, 5), st.integers(0, 1 << 20)),
        st.tuples(st.just("exchange"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.just(0), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(actions=ACTIONS)
def test_any_sequence_returns_the_last_bytes_or_nothing(
    actions: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = DiskCache(str(directory), LIMIT)
    last: dict[int, tuple[bytes, bytes]] = {}
    for action, number, value in actions:
        path = directory / disk_cache.FOLDER / disk_cache._path(name(number))
        if action == "put":
            last[number] = bytes([value] * disk_cache.TAG_BYTES), bytes([value]) * value
            stored(cache, number, last[number][1], last[number][0])
            assert cache.get(name(number)) == last[number]
        elif action == "get":
            assert cache.get(name(number)) in (None, last.get(number))
        elif action == "damage" and path.exists():
            data = bytearray(path.read_bytes())
            if data:
                data[value % len(data)] ^= 1 << value % 8
                path.write_bytes(data)
                assert cache.get(name(number)) is None
                assert not path.exists()
        elif action == "shorten" and path.exists():
            size = path.stat().st_size
            os.truncate(path, value % size)
            assert cache.get(name(number)) is None
        elif action == "exchange" and path.exists() and value != number:
            other = directory / disk_cache.FOLDER / disk_cache._path(name(value))
            other.parent.mkdir(exist_ok=True)
            path.rename(other)
            last.pop(value, None)
            assert cache.get(name(value)) is None
        elif action == "evict":
            cache._make_room()
        elif action == "clear":
            cache.clear()
            assert cache.usage().entries == 0


def test_the_least_recently_used_are_evicted(cache: DiskCache, tmp_path: Path) -> None:
    for number in range(10):
        stored(cache, number, bytes(40 * KIB))
    grown_old(tmp_path, 7200)
    assert cache.get(name(0)) is not None  # is young again
    for number in range(10, 30):
        stored(cache, number, bytes(40 * KIB))
    assert cache.usage().nbytes <= LIMIT
    assert cache.get(name(0)) is not None
    assert cache.get(name(1)) is None
    assert cache.get(name(29)) is not None


def test_the_size_is_bounded_while_several_write(tmp_path: Path) -> None:
    several = [DiskCache(str(tmp_path), LIMIT) for _ in range(3)]
    for number in range(200):
        stored(several[number % 3], number, random.randbytes(20 * KIB))
        assert several[0].usage().nbytes <= LIMIT * (1 + len(several) / disk_cache.SHARE)


def test_what_a_killed_process_left_is_evicted(cache: DiskCache, tmp_path: Path) -> None:
    stored(cache, 1, b"x")
    (path,) = files(tmp_path)
    path.with_name(f"{path.name}.0123456789abcdef").write_bytes(bytes(300 * KIB))
    grown_old(tmp_path)
    for number in range(2, 60):
        stored(cache, number, bytes(30 * KIB))
    assert not list(tmp_path.rglob("*.0123456789abcdef"))


def test_the_oldest_of_many_ages_are_evicted(cache: DiskCache, tmp_path: Path) -> None:
    for number in range(64):
        stored(cache, number, b"x")
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (10**9 + 1000 * age, 10**9 + 1000 * age))
    oldest = files(tmp_path)[:8]
    cache.limit = 32 * 4 * KIB
    cache._make_room()
    assert 20 <= cache.usage().entries <= 32
    assert not any(path.exists() for path in oldest)


def test_a_disk_without_room_is_left_alone(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache gives back what other programs need, and does not evict in vain."""
    stored(cache, 1, bytes(20 * KIB))
    monkeypatch.setattr(DiskCache, "_free", lambda _: -10 * KIB)
    cache._room = 0
    stored(cache, 2, bytes(20 * KIB))
    assert cache.get(name(2)) is None
    assert cache.usage().nbytes <= 10 * KIB


@contextmanager
def failing(*names: str, number: int = errno.ENOSPC) -> Iterator[None]:
    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in names:
            raise OSError(number, os.strerror(number))
        return function(*args)

    syscalls.hook = hook
    try:
        yield
    finally:
        syscalls.hook = None


@pytest.mark.parametrize("call", ["open", "mkdir", "write", "rename", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_costs_one_warning(
    call: str, number: int, cache: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(call, number=number), caplog.at_level(logging.WARNING):
        for i in range(3):
            stored(cache, i, b"x" * 100)
            cache._resume = 0  # the pause is over
        assert [cache.get(name(i)) for i in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert str(tmp_path / "cache") in caplog.text
    assert not [path for path in files(tmp_path) if path.stat().st_size]
    stored(cache, 1, b"again")
    assert cache.get(name(1)) == (TAG, b"again")


def test_an_unreadable_entry_is_a_miss(cache: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        stored(cache, number, b"x")
    for path in files(tmp_path):
        path.unlink()
        path.symlink_to("/etc/passwd")
    assert [cache.get(name(number)) for number in range(2)] == [None, None]
    assert len(caplog.records) == 1


def test_nothing_waits_for_a_slow_disk(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_PENDING", 100 * KIB)

    def slow(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        time.sleep(0.02 if name == "write" else 0)
        return function(*args)

    syscalls.hook = slow
    try:
        for number in range(100):
            cache.put(name(number), TAG, bytes(10 * KIB))
            assert cache._pending_bytes <= 100 * KIB
        cache.flush(60)
    finally:
        syscalls.hook = None
    assert 1 <= cache.usage().entries < 100


def test_without_another_thread_nothing_is_kept(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = FailingStarts(monkeypatch)
    monkeypatch.setattr(disk_cache, "MAX_PENDING", 3 * disk_cache._on_disk(1))
    for _ in range(4):
        cache.put(name(1), TAG, b"x")
    starts.fails = False
    stored(cache, 2, b"y")
    assert [cache.get(name(1)), cache.get(name(2))] == [None, (TAG, b"y")]


def test_a_cache_that_others_could_forge_is_refused(tmp_path: Path) -> None:
    (tmp_path / disk_cache.FOLDER).mkdir(mode=0o700)
    (tmp_path / disk_cache.FOLDER).chmod(0o770)
    with pytest.raises(PermissionError, match="no other user"):
        DiskCache(str(tmp_path), LIMIT)
    (tmp_path / disk_cache.FOLDER).rmdir()
    (tmp_path / disk_cache.FOLDER).symlink_to("/tmp")
    with pytest.raises(OSError, match=disk_cache.FOLDER):
        DiskCache(str(tmp_path), LIMIT)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert disk_cache.cache_directory("auto") == "/home/me/.cache/shardfs"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/c")
    assert disk_cache.cache_directory("auto") == "/var/tmp/c/shardfs"
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/shardfs:/var/cache/other")
    assert disk_cache.cache_directory("auto") == "/var/cache/shardfs"
    assert disk_cache.cache_directory("/given") == "/given"


WRITER = """
import random, sys
from shardfs.storage.disk_cache import DiskCache
cache, seed = DiskCache(sys.argv[1], 1 << 20), int(sys.argv[2])
rng = random.Random(seed)
print("ready", flush=True)
for i in range(int(sys.argv[3])):
    number = rng.randrange(100)
    name = number.to_bytes(16, "big")
    found = cache.get(name)
    if found is not None:
        tag, data = found
        assert tag == bytes([len(data) % 251] * 16) and data == name * (len(data) // 16), number
    n = rng.randrange(1, 1000)
    cache.put(name, bytes([16 * n % 251] * 16), name * n)
cache.flush(60)
"""


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """One of them is killed while it writes, and another one clears the cache."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    counts = (3000, 3000, 10**9)
    processes = [
        subprocess.Popen([*command, str(seed), str(n)], cwd=ROOT, stdout=subprocess.PIPE)
        for seed, n in enumerate(counts)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    time.sleep(0.2)
    processes[2].kill()
    cache = DiskCache(str(tmp_path), LIMIT)
    cache.clear()
    for process in processes:
        process.communicate(timeout=250)
    assert [process.returncode for process in processes] == [0, 0, -signal.SIGKILL]
    for number in range(100):
        entry = cache.get(number.to_bytes(16, "big"))
        assert entry is None or entry[1] == number.to_bytes(16, "big") * (len(entry[1]) // 16)
    cache._make_room()
    assert cache.usage().nbytes <= LIMIT


# ---- objects of a store ----


class Tagging(RangeHandler):
    """Sends an ETag with each file, as web servers do."""

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self.send_header("ETag", f'"{path.stat().st_size:x}"')
        super().end_headers()


class TestCachedHttp(StoreSuite):
    """The second store answers from the disk what the first one has read."""

    lists = False

    @pytest.fixture(params=["cold", "warm"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
        write_files(tmp_path / "files", FILES)
        for path in files(tmp_path / "files"):
            os.utime(path, (10**9, 10**9))
        with http_server(tmp_path / "files", Tagging) as (url, _):
            store = open_store(url, retry=RetryPolicy(10, 0), cache_dir=str(tmp_path / "cache"), cache_size=1 << 24)
            assert isinstance(store, CachedStore)
            if request.param == "warm":
                for key, data in FILES.items():
                    store.open(key).read([ByteRange(0, len(data)), Suffix(16), ByteRange(300, 305)])
                store.cache.flush(60)
                assert store.cache.usage().entries > len(FILES)
                store = open_store(url, cache_dir=str(tmp_path / "cache"), cache_size=1 << 24)
            yield store


class Source:
    """A remote store of one object, which changes. Counts the requests for bytes and for the version."""

    remote, blind, name, read_ahead = True, False, "", None

    def __init__(self) -> None:
        self.data, self.version = b"", 0
        self.tag: str | None = "tag"
        self.mtime_ns = 10**18
        self.reads: list[ByteRequest] = []
        self.stats = 0
        self.stat_error: OSError | None = None
        self.tells = True
        """Whether answers to requests for bytes name the version."""
        self.retry = RetryPolicy()

    def replace(self, data: bytes) -> None:
        self.data, self.version = data, self.version + 1

    def stat(self) -> Stat:
        n = len(self.data)
        return Stat(n, self.mtime_ns, (f"{self.tag}{self.version}", None, n) if self.tag else (None, self.mtime_ns, n))

    def open(self, key: str) -> _Object:
        return _Object(self)

    def reopen(self, key: str) -> None:
        pass


class _Object:
    fd, base = -1, 0

    def __init__(self, source: Source) -> None:
        self._source = source
        self.known: Stat | None = None

    def stat(self) -> Stat:
        if self.known is None:
            self._source.stats += 1
            if self._source.stat_error is not None:
                raise self._source.stat_error
            self.known = self._source.stat()
        return self.known

    def read_version(self, requests: Sequence[ByteRequest]) -> tuple[list[bytes], bool]:
        self._source.reads += requests
        tells = self._source.tells and self._source.stat_error is None
        if tells:
            self.known = self.known or self._source.stat()
            self.is_current()
        return [self._source.data[slice(*absolute(r, len(self._source.data)))] for r in requests], tells

    def is_current(self) -> bool:
        if self._source.stat_error is not None:
            raise self._source.stat_error
        if self.known != self._source.stat():
            raise StaleShardError("as told")
        return True


def over(source: Source, cache: DiskCache, url: str = "s3://bucket/a", **options: Any) -> CachedStore:
    return CachedStore(source, cache, url, options, lambda: None)  # type: ignore[arg-type]


@pytest.fixture
def source() -> Source:
    source = Source()
    source.replace(bytes(range(256)) * 16)
    return source


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 300), st.integers(0, 120)).map(lambda t: ByteRange(t[0], t[0] + t[1])),
        st.integers(1, 300).map(Suffix),
    ),
    max_size=5,
)


@given(steps=st.lists(st.one_of(REQUESTS, st.integers(0, 250), st.just("remount")), max_size=12), tells=st.booleans())
def test_any_requests_return_the_bytes_of_the_current_version(
    steps: list[Any], tells: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A number replaces the object by one of so many bytes."""
    source = Source()
    source.tells = tells
    source.replace(random.randbytes(200))
    cache = DiskCache(str(tmp_path_factory.mktemp("cache")), LIMIT)
    store = over(source, cache)
    for step in steps:
        if isinstance(step, int):
            source.replace(random.randbytes(step))
            store.reopen("k")
        elif step == "remount":
            store = over(source, cache)
        else:
            wanted = [source.data[slice(*absolute(r, len(source.data)))] for r in step]
            assert store.open("k").read(step) == wanted
            cache.flush(60)


def test_the_first_reads_ask_for_versions_only_if_no_answer_names_them(source: Source, cache: DiskCache) -> None:
    for tells, stats in ((True, 0), (False, 4)):
        source.tells, source.stats = tells, 0
        store = over(source, cache)
        for key in "abcd":
            blob = store.open(f"{key}{tells}")
            blob.read([ByteRange(0, 10), ByteRange(20, 30)])
            blob.read([ByteRange(50, 60)])
        assert source.stats == stats


def test_cached_bytes_cost_one_open_each_and_no_other_thread(
    source: Source, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only misses, long reads and look-ups after a slow one hand the request over."""
    monkeypatch.setattr(disk_cache, "SLOW_S", 1e9)
    waits, opened, ranges = [0], list[object](), [ByteRange(10 * i, 10 * i + 10) for i in range(20)]
    over(source, cache).open("k").read(ranges)
    cache.flush(60)

    def wait() -> None:
        waits[0] += 1

    blob = CachedStore(source, cache, "s3://bucket/a", {}, wait).open("k")  # type: ignore[arg-type]
    original = os.open

    def open_counted(path: str, flags: int, *args: Any, **options: Any) -> int:
        if not flags & os.O_CREAT:  # else the writing thread keeps the answer with the version
            opened.append(path)
        return original(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_counted)
    for _ in range(3):
        assert [blob.read([r])[0] for r in ranges] == [source.data[r.start : r.stop] for r in ranges]
    assert (waits[0], len(opened)) == (0, 3 * len(ranges))
    blob.read([ByteRange(1, 2)])
    assert waits[0] == 1
    blob.read([ByteRange(0, 1 << 20)])
    assert waits[0] == 3
    monkeypatch.setattr(disk_cache, "SLOW_S", -1.0)
    blob.read(ranges[:1])
    assert waits[0] == 3
    blob.read(ranges[:1])
    assert waits[0] == 4


def test_the_cache_is_warm_until_a_miss(source: Source, cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    store, where = over(source, cache), [ByteRange(0, 10)]
    counters = store.retry.counters
    assert counters.is_cache_warm()
    store.open("k").read(where)
    cache.flush(60)
    blob = store.open("k")
    for _ in range(counters_of_stores.WARM_HITS):
        assert not counters.is_cache_warm()
        blob.read(where)
    monkeypatch.setattr(counters_of_stores, "WARM_S", 0)
    assert counters.is_cache_warm()
    monkeypatch.setattr(counters_of_stores, "WARM_S", 1e9)
    assert not counters.is_cache_warm()


@pytest.mark.parametrize("asks", [False, True])
def test_bytes_are_never_kept_as_those_of_a_later_version(asks: bool, source: Source, cache: DiskCache) -> None:
    """The object is replaced between the request for the bytes and the one for the version."""
    source.tells = False
    store = over(source, cache)
    blob = store.open("k")
    inner, read = blob._inner, blob._inner.read_version

    def then_replaced(requests: Sequence[ByteRequest]) -> tuple[list[bytes], bool]:
        answer = read(requests)
        source.replace(bytes(100))
        blob.stat()
        return answer

    inner.read_version = then_replaced  # type: ignore[method-assign]
    store.asks_for_versions = asks
    with pytest.raises(StaleShardError) if asks else nullcontext():
        blob.read([ByteRange(0, 10)])
    cache.flush(60)
    assert over(source, cache).open("k").read([ByteRange(0, 10)]) == [bytes(10)]


class Describing(RangeHandler):
    """Sends these headers with whole objects, and those with byte ranges."""

    with_object: tuple[str, ...] = ()
    with_range: tuple[str, ...] = ()

    def end_headers(self) -> None:
        mtime = Path(self.translate_path(self.path)).stat().st_mtime
        fields = {"weak": ("ETag", f'W/"{mtime}"'), "strong": ("ETag", f'"{mtime}"')}
        fields["time"] = "Last-Modified", self.date_time_string(mtime)
        for name in self.with_range if "Range" in self.headers else self.with_object:
            super().send_header(*fields[name])
        super().end_headers()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified":  # sent by the base class with whole objects only
            super().send_header(keyword, value)


@pytest.mark.parametrize("with_range", [(), ("time",), ("weak",), ("weak", "time")], ids=str)
@pytest.mark.parametrize("with_object", [("time",), ("weak", "time"), ("strong",)], ids=str)
def test_bytes_are_never_kept_as_those_of_an_earlier_version(
    with_object: tuple[str, ...], with_range: tuple[str, ...], tmp_path: Path
) -> None:
    """The object is replaced by one of the same size after its version was reported, and restored later."""
    path, handler = tmp_path / "files" / "k", type("Handler", (Describing,), {})
    handler.with_object, handler.with_range = with_object, with_range  # type: ignore[attr-defined]
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "cache_size": 1 << 24}

    def replace(data: bytes, when: int) -> None:
        write_files(tmp_path / "files", {"k": data})
        os.utime(path, (when, when))

    with http_server(tmp_path / "files", handler) as (url, _):
        replace(b"1" * 100, 10**9)
        store = open_store(url, **options)
        assert isinstance(store, CachedStore)
        blob = store.open("k")
        blob.stat()
        replace(b"2" * 100, 10**9 + 60)
        with suppress(StaleShardError):
            blob.read([ByteRange(10, 20)])
        store.cache.flush(60)
        replace(b"1" * 100, 10**9)
        for _ in range(2):
            store = open_store(url, **options)
            assert isinstance(store, CachedStore)
            assert store.open("k").read([ByteRange(10, 20)]) == [b"1" * 10]
            store.cache.flush(60)
        assert store.retry.counters.snapshot()["disk_cache_hits"] == (with_object == with_range)


def test_a_client_that_reports_no_versions_keeps_no_bytes_of_another_version(source: Source, cache: DiskCache) -> None:
    source.tells = False
    data, blob = source.data, over(source, cache).open("k")
    blob.read([ByteRange(0, 10)])
    source.replace(bytes(len(data)))
    with pytest.raises(StaleShardError):
        blob.read([ByteRange(20, 30)])
    cache.flush(60)
    source.data, source.version = data, source.version - 1
    assert over(source, cache).open("k").read([ByteRange(20, 30)]) == [data[20:30]]


def test_after_a_remount_only_the_version_is_asked_for(source: Source, cache: DiskCache) -> None:
    requests: list[ByteRequest] = [Suffix(100), ByteRange(0, 1000), ByteRange(1000, 1010)]
    first = over(source, cache).open("k").read(requests)
    cache.flush(60)
    source.reads, source.stats = [], 0
    store = over(source, cache)
    blob = store.open("k")
    assert blob.read(requests) == first
    assert blob.read([ByteRange(0, 10), ByteRange(1000, 1005)]) == [source.data[:10], source.data[1000:1005]]
    assert (source.reads, source.stats) == ([], 1)
    counters = store.retry.counters.snapshot()
    assert (counters["disk_cache_hits"], counters["disk_cache_misses"]) == (5, 3)
    assert counters["bytes_from_disk_cache"] == 100 + 1000 + 10 + 10 + 5


def test_only_what_is_missing_is_fetched(source: Source, cache: DiskCache) -> None:
    store = over(source, cache)
    store.open("k").read([ByteRange(10, 20)])
    cache.flush(60)
    source.reads = []
    parts = store.open("k").read([ByteRange(0, 10), ByteRange(10, 20), ByteRange(10, 40), ByteRange(5, 5)])
    assert parts == [source.data[:10], source.data[10:20], source.data[10:40], b""]
    assert source.reads == [ByteRange(0, 10), ByteRange(10, 40)]


def test_a_replaced_object_is_read_anew(source: Source, cache: DiskCache) -> None:
    store = over(source, cache)
    store.open("k").read([ByteRange(0, 10)])
    cache.flush(60)
    source.replace(b"new bytes!" * 10)
    store.reopen("k")
    assert store.open("k").read([ByteRange(0, 10)]) == [b"new bytes!"]
    assert over(source, cache).open("k").read([ByteRange(0, 10)]) == [b"new bytes!"]


@pytest.mark.parametrize(
    ("tag", "age_s", "is_cached"),
    [
        ("tag", 0, True),
        (None, 3600, True),
        pytest.param(None, 5, False, id="may change again within the same second"),
        pytest.param(None, None, False, id="no time"),
    ],
)
def test_what_has_no_certain_version_is_not_kept(
    tag: str | None, age_s: float | None, is_cached: bool, source: Source, cache: DiskCache
) -> None:
    source.tag = tag
    source.mtime_ns = 0 if age_s is None else int((time.time() - age_s) * 1e9)
    for _ in range(2):
        assert over(source, cache).open("k").read([ByteRange(0, 10)]) == [source.data[:10]]
        cache.flush(60)
    assert len(source.reads) == (1 if is_cached else 2)


def test_a_store_that_refuses_to_name_the_version_is_read(source: Source, cache: DiskCache) -> None:
    source.stat_error = PermissionError(errno.EACCES, "no HEAD for you")
    store = over(source, cache)
    for _ in range(2):
        assert store.open("k").read([ByteRange(0, 10)]) == [source.data[:10]]
    source.stat_error = FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(FileNotFoundError):
        store.open("k").read([ByteRange(0, 10)])


def test_an_index_stays_as_long_as_its_chunks(
    source: Source, cache: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = over(source, cache).open("k")
    blob.read([Suffix(100)])
    blob.read([ByteRange(0, 10)])
    cache.flush(60)
    grown_old(tmp_path)
    blob.read([ByteRange(0, 10)])
    assert len([path for path in files(tmp_path) if time.time() - path.stat().st_mtime < 1000]) == 1
    monkeypatch.setattr(cached_store, "TOUCH_S", 0)
    blob.read([ByteRange(0, 10)])
    assert len([path for path in files(tmp_path) if time.time() - path.stat().st_mtime < 1000]) == 2


def test_sources_share_entries_where_they_are_the_same(source: Source, cache: DiskCache) -> None:
    def requests(url: str, path: str, **options: Any) -> int:
        source.reads = []
        over(source, cache, url, **options).open(path).read([ByteRange(0, 10)])
        cache.flush(60)
        return len(source.reads)

    assert requests("s3://bucket/a", "b/c") == 1
    assert requests("s3://bucket/a/", "b/c") == 0
    assert requests("s3://bucket", "a/b/c") == 0
    assert requests("s3://bucket/a/b/c", "") == 0
    assert requests("s3://bucket/a", "b/d") == 1
    assert requests("s3://bucket/a", "b/c", endpoint_url="http://elsewhere") == 1
    assert requests("https://me:secret@host/a", "b") == 1
    assert requests("https://me:another@host/a", "b") == 0
    assert requests("s3://bucket/a", "b/c", key="me", secret="1") == 1
    assert requests("s3://bucket/a", "b/c", key="me", secret="2") == 0
    assert requests("https://host/a?id=1", "") == 1
    assert requests("https://host/a?id=2", "") == 1


def test_offline_answers_what_is_kept_and_sends_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "files", FILES)
    for path in files(tmp_path / "files"):
        os.utime(path, (10**9, 10**9))
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "cache_size": 1 << 24}
    with http_server(tmp_path / "files", Tagging) as (url, requests):
        store = open_store(url, **options)
        assert isinstance(store, CachedStore)
        listed = sorted(store.scan("a"))
        entry, documents = store.entry("a/digits"), store.documents("a", ["info", "zarr.json", "no"], 100)
        bytes_read = store.open("a/digits").read([ByteRange(0, 100), Suffix(20)])
        for missing in ("a/no", "a/neither"):
            with pytest.raises(FileNotFoundError):
                store.open(missing).read([Suffix(20)])
        store.cache.flush(60)
        requests.clear()
        store = open_store(url, **options, offline=True)
        assert sorted(store.scan("a")) == listed
        assert store.entry("a/digits") == entry
        assert store.documents("a", ["info", "zarr.json", "no"], 100) == documents
        assert store.open("a/digits").read([ByteRange(0, 100), Suffix(20)]) == bytes_read
        for missing in ("a/no", "a/neither"):
            with pytest.raises(FileNotFoundError):
                store.open(missing).read([Suffix(20)])
        store.require_ranges(["a/digits"])
        unknown: list[Callable[[], Any]] = [
            lambda: store.open("a/digits").read([ByteRange(0, 10), ByteRange(200, 300)]),
            lambda: store.open("top").read([Suffix(3)]),
            lambda: store.open("top").stat(),
            lambda: store.entry("a"),
            lambda: store.documents("", ["info"], 100),
            lambda: list(store.scan("")),
        ]
        for ask in unknown:
            with pytest.raises(OSError, match="offline") as failed:
                ask()
            assert failed.value.errno == errno.EHOSTUNREACH
        assert requests == []


def test_offline_mixes_no_versions(source: Source, cache: DiskCache) -> None:
    over(source, cache).open("k").read([ByteRange(0, 10), ByteRange(20, 30)])
    cache.flush(60)
    source.replace(b"new version of the object")
    over(source, cache).open("k").read([ByteRange(0, 10)])
    cache.flush(60)
    store = CachedStore(source, cache, "s3://bucket/a", {}, lambda: None, offline=True)  # type: ignore[arg-type]
    assert store.open("k").read([ByteRange(0, 10)]) == [b"new versio"]
    with pytest.raises(OSError, match="offline"):
        store.open("k").read([ByteRange(20, 30)])


def test_no_cache_for_local_sources_and_chains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "cache_size": 1 << 20}
    code = "import sys; from shardfs.vfs.tree import open_tree; from shardfs.storage import open_store; "
    code += "assert not {m for m in sys.modules if 'disk_cache' in m or 'cached_store' in m}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert not isinstance(open_store(str(tmp_path), **options), CachedStore)
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
        z.writestr("a", b"a")
    assert not isinstance(open_store(f"zip://::file://{tmp_path}/x.zip", **options), CachedStore)
    with pytest.raises(OSError, match="chained"):
        open_store(f"zip://::file://{tmp_path}/x.zip", **options, offline=True)
    assert not (tmp_path / "cache").exists()


def test_a_cache_directory_that_cannot_be_made_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store("memory://x", cache_dir=str(tmp_path / "file" / "below"), cache_size=1 << 20)
    assert not isinstance(store, CachedStore)
    assert "no disk cache" in caplog.text


def test_a_cache_that_is_cleared_while_an_entry_is_written_keeps_the_next_ones(
    cache: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, rename = DiskCache(str(tmp_path / "cache"), LIMIT), syscalls.rename

    def cleared(old: str, new: str, at: int | None = None, new_at: int | None = None) -> None:
        other.clear()
        rename(old, new, at, new_at)

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "rename", cleared)
        stored(cache, 1, b"one")
    assert cache.get(name(1)) is None
    stored(cache, 2, b"two")
    assert cache.get(name(2)) == (TAG, b"two")
