"""What a store's calls may take, what is tried again, and what is not."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from shardfs.model.blobs import ByteRange
from shardfs.storage import daemon_threads, retry
from shardfs.storage.daemon_threads import DaemonThreads
from shardfs.storage.open_store import open_store
from shardfs.storage.remote import FsspecStore
from shardfs.storage.retry import RetryPolicy, StoreTimeout, http_status, is_transient
from tests.failing_starts import FailingStarts
from tests.mount.distant import serving
from tests.scheduling import explore
from tests.virtual_threads import Thread, install, sleep
from tests.waiting import wait_until
from tests.write import bugs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from tests.scheduling import Schedule


class Reply(Exception):
    """As a client raises it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(str(attributes))
        self.__dict__.update(attributes)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def boto(code: str, status: int) -> Reply:
    return Reply(response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}})


ACCIDENTS = [
    Reply(status=500), Reply(status=503), Reply(status=429), Reply(status_code=502), Reply(code=504),
    boto("SlowDown", 503), boto("ThrottlingException", 400), caused(OSError(errno.EBUSY, "x"), boto("SlowDown", 503)),
    ConnectionResetError(), BrokenPipeError(), TimeoutError(), OSError(errno.EHOSTUNREACH, "x"),
    caused(FileNotFoundError("as HTTPFileSystem.info says"), Reply(status=503)),
    caused(FileNotFoundError("the same"), ConnectionResetError()),
]  # fmt: skip
FINAL = [
    Reply(status=404), Reply(status=403), Reply(status=401), Reply(status=416), Reply(status=501), Reply(status=400),
    boto("NoSuchKey", 404), caused(PermissionError(), boto("AccessDenied", 403)), FileNotFoundError(),
    PermissionError(), IsADirectoryError(), OSError(errno.EIO, "x"), OSError("without a number"), ValueError(),
    RuntimeError("fallen over"), OSError(errno.ENOSPC, "x"),
    caused(FileNotFoundError("as HTTPFileSystem.info says"), Reply(status=404)),
]  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("error", ACCIDENTS, ids=repr)
def test_accidents_are_tried_again(error: BaseException) -> None:
    assert is_transient(error)


@pytest.mark.every_case
@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_what_would_only_be_said_again_is_not(error: BaseException) -> None:
    assert not is_transient(error)


def test_errors_of_aiohttp() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    assert is_transient(aiohttp.ClientPayloadError("cut off"))
    assert is_transient(aiohttp.ServerDisconnectedError())
    assert is_transient(aiohttp.ServerTimeoutError())
    assert not is_transient(aiohttp.InvalidURL("x"))
    assert http_status(RuntimeError()) is None


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


class Failing:
    """Raises what it is given, one after the other, and then returns `value`."""

    def __init__(self, *errors: Exception, value: object = b"data") -> None:
        self.errors, self.value, self.calls = [*errors], value, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.value


def test_an_accident_is_mended() -> None:
    patient, call = RetryPolicy(5, 4), Failing(*[ConnectionResetError()] * 3)
    assert patient.run("read", call) == b"data"
    told = patient.counters.snapshot()
    assert (told["requests"], told["retries"], told["errors"], told["waiting"]) == ({"read": 1}, 3, {}, 0)
    assert sum(told["bins"]) == 1


def test_retries_are_bounded_and_the_error_is_the_last_one() -> None:
    patient, call = RetryPolicy(5, 2), Failing(*[Reply(status=503, n=n) for n in range(9)])
    with pytest.raises(Reply) as e:
        patient.run("read", call)
    assert (e.value.n, call.calls) == (2, 3)  # type: ignore[attr-defined]
    assert patient.counters.snapshot()["errors"] == {errno.EIO: 1}


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), Reply(status=404)], ids=repr)
def test_a_clear_answer_costs_one_request(error: Exception) -> None:
    call = Failing(error, error)
    with pytest.raises(type(error)):
        RetryPolicy(5, 4).run("read", call)
    assert call.calls == 1


def test_a_list_with_an_accident_in_it_is_asked_for_again() -> None:
    lists = [[b"a", ConnectionResetError()], [b"a", FileNotFoundError()]]
    assert RetryPolicy(5, 4).run("read", lambda: lists.pop(0))[0] == b"a"
    assert lists == []
    assert isinstance(RetryPolicy(5, 1).run("read", lambda: [Reply(status=500)])[0], Reply)


def test_an_optional_operation_is_tried_once_and_makes_no_other_fail() -> None:
    patient, call = RetryPolicy(0.05, 4), Failing(ConnectionResetError(), ConnectionResetError())
    with pytest.raises(ConnectionResetError), patient.optional():
        patient.run("read", call)
    assert call.calls == 1
    hung = threading.Event()
    with pytest.raises(StoreTimeout), patient.optional():
        patient.run("read", hung.wait)
    assert not patient.silent
    assert patient.run("read", call) == b"data"
    patient.retries = 0
    with pytest.raises(StoreTimeout):
        patient.run("read", hung.wait)
    with pytest.raises(StoreTimeout, match="another request"), patient.optional():
        patient.run("read", call)
    assert patient.run("read", call) == b"data"
    hung.set()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "x"), BlockingIOError(errno.EAGAIN, "x"), OSError(errno.EBUSY, "x"),
        caused(FileNotFoundError(errno.ENOENT, "as HTTPFileSystem.info says"), Reply(status=503)), Reply(status=503),
    ],
    ids=repr,
)  # fmt: skip
def test_readers_get_eio_for_errors_of_the_network(error: Exception) -> None:
    class Broken:
        cat_file = staticmethod(Failing(error))

    assert error_of(lambda: read(FsspecStore(Broken(), "root", retry=RetryPolicy(5, 0)))) == errno.EIO


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(ConnectionError):
        RetryPolicy(60, 4).run("read", Failing(*[ConnectionResetError()] * 9))
    assert all(0.05 * 3**n <= pause <= 0.1 * 3**n for n, pause in enumerate(pauses))
    assert len(pauses) == 4


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("0", 0), ("600", 50), ("a date", 20), ("soon", 0), ("", 0)],
)
def test_the_server_says_how_long_to_wait(value: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "time", lambda: 10.0**9)
    value = formatdate(10**9 + 20, usegmt=True) if value == "a date" else value
    answer = boto("SlowDown", 503)
    answer.response["ResponseMetadata"]["HTTPHeaders"] = {"retry-after": value}  # type: ignore[attr-defined]
    busy = OSError(errno.EBUSY, "as s3fs says")
    busy.__cause__ = answer
    for error in (Reply(status=429, headers={"retry-after": value}), answer, busy):
        RetryPolicy(60, 4).run("read", Failing(error))
        RetryPolicy(60, 4).run("read", lambda replies=[[error, b""], [b""]]: replies.pop(0))
    assert len(pauses) == 6
    assert all(seconds <= pause <= max(2 * seconds, 1) for pause in pauses)
    assert all(pause <= 2 * 60 - retry.BOUND * 60 for pause in pauses)  # an attempt still fits in


def test_a_web_server_says_how_long_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    (tmp_path / "x").write_bytes(b"data")
    with serving(tmp_path, 0) as served:
        served.fail({"kind": "status", "status": 429, "headers": {"Retry-After": "9"}, "times": 1})
        assert not open_store(served.url).entry("x").directory
    assert 9 in pauses


# ---- what never returns


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """A store whose coroutines wait until they are cancelled, while `hangs`."""

    protocol = "hanging"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.begun, self.cancelled = True, 0, 0

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self.begun += 1
        try:
            while self.hangs:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return bytes(100)[start:end]


class Blocking:
    """The same without coroutines: it cannot be cancelled."""

    protocol = "blocking"

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), 0

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.begun += 1
        self.go.wait(20)
        return bytes(end - start)


def read(store: FsspecStore) -> bytes:
    return store.open("x").read([ByteRange(0, 3)])[0]


def error_of(call: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as e:  # noqa: PT011 - the errno is what counts
        call()
    return e.value.errno


def test_a_coroutine_that_hangs_is_cancelled_and_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = Hanging()
    submit = asyncio.run_coroutine_threadsafe

    def begin(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        """What is cancelled has begun, and takes no longer than it may, however busy the machine is."""
        before, future = fs.begun, submit(coroutine, loop)
        wait_until(lambda: fs.begun > before)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin)
    monkeypatch.setattr(retry, "clock", lambda: 0.2 * fs.begun)
    store = FsspecStore(fs, "root", retry=RetryPolicy(0.2, 4))
    start_s = time.monotonic()
    with pytest.raises(StoreTimeout, match="does not answer within") as e:
        read(store)
    assert 0.3 < time.monotonic() - start_s < 60
    assert (e.value.errno, e.value.filename) == (errno.ETIMEDOUT, "root/x")
    assert fs.begun == 2
    wait_until(lambda: fs.cancelled == 2)
    assert store.retry.counters.snapshot()["timeouts"] == 2


def test_a_client_that_blocks_is_left_alone_and_the_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MOST_THREADS", 3)
    fs = Blocking()
    store = FsspecStore(fs, "root", retry=RetryPolicy(0.1, 0))
    before = threading.active_count()
    try:
        assert [error_of(lambda: read(store)) for _ in range(6)] == [errno.ETIMEDOUT] * 6
        assert threading.active_count() <= before + 3
        wait_until(lambda: fs.begun == 3)
    finally:
        fs.go.set()
    store.retry.timeout_s = 30
    assert read(store) == bytes(3)


def test_a_call_waits_for_no_thread_that_has_taken_another_one() -> None:
    threads, call_runs, go = DaemonThreads("shardfs-store", 64), threading.Event(), threading.Event()
    before = set(threading.enumerate())

    class Jobs(queue.SimpleQueue[Any]):
        """The first call is slow to come out."""

        def get(self, *args: Any, **named: Any) -> Any:
            job = super().get(*args, **named)
            if not call_runs.is_set():
                call_runs.set()
                go.wait(60)
            return job

    threads._jobs = Jobs()
    try:
        first = threads.submit(lambda: 1)
        assert call_runs.wait(60)
        assert threads.submit(lambda: 2).result(60) == 2
        assert not first.done()
    finally:
        go.set()
    assert first.result(60) == 1
    assert threads.submit(lambda: 3).result(60) == 3
    assert len([x for x in set(threading.enumerate()) - before if x.name.startswith("shardfs-store")]) == 2


def test_threads_without_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sources which nobody uses any more keep none."""
    monkeypatch.setattr(daemon_threads, "IDLE_S", 0.01)
    threads = DaemonThreads("shardfs-store", 64)
    assert [threads.submit(lambda n=n: n).result(60) for n in range(3)] == [0, 1, 2]  # type: ignore[misc]
    wait_until(lambda: threads.count == 0)
    assert threads.submit(lambda: 3).result(60) == 3


def try_idle_threads(monkeypatch: pytest.MonkeyPatch, *, can_start: bool) -> int:
    """A call comes when a thread without calls is about to end, and perhaps no other one can be started."""
    install(monkeypatch)
    start = Thread.start
    starts: list[Thread] = []

    def start_once(thread: Thread) -> None:
        if starts and not can_start:
            raise RuntimeError("can't start new thread")
        starts.append(thread)
        start(thread)

    monkeypatch.setattr(Thread, "start", start_once)
    outcomes = set[str]()

    def scenario(schedule: Schedule) -> None:
        starts.clear()
        threads = DaemonThreads("shardfs-store", 64)

        def call() -> None:
            assert threads.submit(lambda: 1).result(1) == 1
            sleep(daemon_threads.IDLE_S)
            try:
                assert threads.submit(lambda: 2, may_wait=False).result(1) == 2
                outcomes.add("done")
            except BlockingIOError:
                outcomes.add("refused")

        schedule.together(call)
        assert threads.count <= 1

    number = explore(scenario, preemptions=2)
    assert outcomes == ({"done"} if can_start else {"done", "refused"})
    return number


@pytest.mark.parametrize("can_start", [True, False])
def test_a_call_is_done_or_refused_when_the_last_thread_is_about_to_end(
    can_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_idle_threads(monkeypatch, can_start=can_start) > 20


def test_a_thread_that_ends_although_it_has_a_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bugs.seed(monkeypatch, "a thread ends although it has just got a call")
    with pytest.raises(TimeoutError):
        try_idle_threads(monkeypatch, can_start=True)


def test_calls_wait_for_the_first_thread_if_no_other_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, go = DaemonThreads("shardfs-store", 64), threading.Event()
    first = threads.submit(lambda: go.wait(60))
    starts = FailingStarts(monkeypatch)
    futures = [threads.submit(lambda n=n: n) for n in range(3)]  # type: ignore[misc]
    go.set()
    assert [first.result(60), *(other.result(60) for other in futures)] == [True, 0, 1, 2]
    starts.fails = False
    go.clear()
    threads.submit(lambda: go.wait(60))
    assert threads.submit(lambda: 4).result(60) == 4, "the threads that failed to start do not count as idle"
    go.set()


def test_a_request_is_repeated_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fails with what to do if there is none at last. The threads that failed to start are not waited for."""
    starts, fs = FailingStarts(monkeypatch), Blocking()
    fs.go.set()
    store = FsspecStore(fs, "root", retry=RetryPolicy(30, 1))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(OSError, match="cannot start a thread for a request: can't start new thread; raise `ulimit -u`"):
        read(store)
    monkeypatch.setattr(time, "sleep", lambda _: setattr(starts, "fails", False))
    assert read(store) == bytes(3)


def test_a_silent_store_is_asked_one_thing_at_a_time() -> None:
    fs = Hanging()
    store = FsspecStore(fs, "root", retry=RetryPolicy(0.3, 0))
    error_of(lambda: read(store))
    assert store.retry.silent
    store.retry.timeout_s, fs.begun = 60, 0
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(read, store)
        wait_until(lambda: fs.begun)
        assert {error_of(lambda: read(store)) for _ in range(20)} == {errno.ETIMEDOUT}
        assert (fs.begun, probe.done()) == (1, False)  # nobody has waited for it
        fs.hangs = False
        assert probe.result() == bytes(3)
    assert not store.retry.silent


def test_any_answer_ends_the_silence() -> None:
    patient, wait = RetryPolicy(0.1, 0), threading.Event()
    with pytest.raises(StoreTimeout):
        patient.run("read", wait.wait, 5)
    assert patient.silent
    with pytest.raises(FileNotFoundError):
        patient.run("read", Failing(FileNotFoundError()))
    assert not patient.silent
    wait.set()


def test_threads_do_not_survive_a_fork() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/forked/x", b"abc")
    store = FsspecStore(fs, "/forked", retry=RetryPolicy(5, 0))
    assert read(store) == b"abc"
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if read(store) == b"abc" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    fs.rm("/forked", recursive=True)


def test_an_archive_whose_server_says_nothing() -> None:
    """It is read when its file system is made."""
    pytest.importorskip("aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"zip://::http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        with pytest.raises(StoreTimeout):
            open_store(url, retry=RetryPolicy(0.3, 0))
