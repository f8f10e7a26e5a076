"""What a store's calls may take, what is tried again, and what is not."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from shardfs import patience
from shardfs.model import ByteRange
from shardfs.patience import NoAnswer, Patience, http_status, is_accident
from shardfs.store import FsspecStore, open_store

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.mark.parametrize("error", ACCIDENTS, ids=repr)
def test_accidents_are_tried_again(error: BaseException) -> None:
    assert is_accident(error)


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_what_would_only_be_said_again_is_not(error: BaseException) -> None:
    assert not is_accident(error)


def test_errors_of_aiohttp() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    assert is_accident(aiohttp.ClientPayloadError("cut off"))
    assert is_accident(aiohttp.ServerDisconnectedError())
    assert is_accident(aiohttp.ServerTimeoutError())
    assert not is_accident(aiohttp.InvalidURL("x"))
    assert http_status(RuntimeError()) is None


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)


class Failing:
    """Raises what it is given, one after the other, and then returns `value`."""

    def __init__(self, *errors: Exception, value: object = b"data") -> None:
        self.errors, self.value, self.calls = [*errors], value, 0

    def __call__(self) -> object:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.value


def test_an_accident_is_mended() -> None:
    patient, call = Patience(5, 4), Failing(*[ConnectionResetError()] * 3)
    assert patient.run("read", call) == b"data"
    told = patient.counters.told()
    assert (told["requests"], told["retries"], told["errors"], told["waiting"]) == ({"read": 1}, 3, {}, 0)
    assert sum(told["bins"]) == 1


def test_retries_are_bounded_and_the_error_is_the_last_one() -> None:
    patient, call = Patience(5, 2), Failing(*[Reply(status=503, n=n) for n in range(9)])
    with pytest.raises(Reply) as e:
        patient.run("read", call)
    assert (e.value.n, call.calls) == (2, 3)  # type: ignore[attr-defined]
    assert patient.counters.told()["errors"] == {errno.EIO: 1}


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), Reply(status=404)], ids=repr)
def test_a_clear_answer_costs_one_request(error: Exception) -> None:
    call = Failing(error, error)
    with pytest.raises(type(error)):
        Patience(5, 4).run("read", call)
    assert call.calls == 1


def test_a_list_with_an_accident_in_it_is_asked_for_again() -> None:
    lists = [[b"a", ConnectionResetError()], [b"a", FileNotFoundError()]]
    assert Patience(5, 4).run("read", lambda: lists.pop(0))[0] == b"a"
    assert lists == []
    assert isinstance(Patience(5, 1).run("read", lambda: [Reply(status=500)])[0], Reply)


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(ConnectionError):
        Patience(60, 4).run("read", Failing(*[ConnectionResetError()] * 9))
    assert all(0.05 * 3**n <= pause <= 0.1 * 3**n for n, pause in enumerate(pauses))
    assert len(pauses) == 4


# ---- what never returns


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """A store whose coroutines wait until they are cancelled, while `hangs`."""

    protocol = "hanging"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.begun, self.cancelled = True, 0, 0

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        import asyncio

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


def test_a_coroutine_that_hangs_is_cancelled_and_tried_once_more() -> None:
    fs = Hanging()
    store = FsspecStore(fs, "root", patience=Patience(0.2, 4))
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="does not answer within") as e:
        read(store)
    assert 0.3 < time.monotonic() - began < 2
    assert (e.value.errno, e.value.filename) == (errno.ETIMEDOUT, "root/x")
    assert fs.begun == 2
    time.sleep(0.1)
    assert fs.cancelled == 2
    assert store.patience.counters.told()["timeouts"] == 2


def test_a_client_that_blocks_is_left_alone_and_the_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_THREADS", 3)
    fs = Blocking()
    store = FsspecStore(fs, "root", patience=Patience(0.1, 0))
    before = threading.active_count()
    try:
        assert [error_of(lambda: read(store)) for _ in range(6)] == [errno.ETIMEDOUT] * 6
        assert threading.active_count() <= before + 3
        assert fs.begun == 3
    finally:
        fs.go.set()
    time.sleep(0.2)
    assert read(store) == bytes(3)


def test_a_silent_store_is_asked_one_thing_at_a_time() -> None:
    fs = Hanging()
    store = FsspecStore(fs, "root", patience=Patience(0.3, 0))
    error_of(lambda: read(store))
    assert store.patience.silent
    began, fs.begun = time.monotonic(), 0
    probe = threading.Thread(target=lambda: error_of(lambda: read(store)))
    probe.start()
    while not fs.begun:
        time.sleep(0.001)
    assert {error_of(lambda: read(store)) for _ in range(20)} == {errno.ETIMEDOUT}
    assert time.monotonic() - began < 0.25
    assert fs.begun == 1
    probe.join()
    fs.hangs = False
    assert read(store) == bytes(3)
    assert not store.patience.silent


def test_any_answer_ends_the_silence() -> None:
    patient, wait = Patience(0.1, 0), threading.Event()
    with pytest.raises(NoAnswer):
        patient.run("read", wait.wait, 5)
    assert patient.silent
    with pytest.raises(FileNotFoundError):
        patient.run("read", Failing(FileNotFoundError()))
    assert not patient.silent
    wait.set()


def test_threads_do_not_survive_a_fork() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/forked/x", b"abc")
    store = FsspecStore(fs, "/forked", patience=Patience(5, 0))
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
        with pytest.raises(NoAnswer):
            open_store(url, patience=Patience(0.3, 0))
