"""The lock object of a source on an object store: who has it, for how long, and who takes it over."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from shardfs.config.options import Options
from shardfs.model.errors import BusyError
from shardfs.storage.retry import RetryPolicy
from shardfs.storage.writers import lease as lease_module
from shardfs.storage.writers import open_writer
from shardfs.storage.writers.lease import Lease
from shardfs.storage.writers.s3 import S3Objects
from shardfs.write.journal import Journal
from shardfs.write.open_rw import require_writable
from tests.waiting import wait_until
from tests.write.test_object_writer import s3_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.write.object_store import Server

LOCK = "data/root/.shardfs.lock"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Directories of journals that are open: each is another mount's."""
    made: list[Journal] = []

    def make(name: str) -> Path:
        made.append(Journal.open(tmp_path / name, "s3://data/root", limit_bytes=1 << 20, mountpoint=f"/mnt/{name}"))
        return tmp_path / name

    yield make
    for one in made:
        one.close(clean=True)


def take(server: Server, journal: Path) -> Lease:
    store = s3_store(server)
    return Lease.take(S3Objects(store), "data/root", journal)


def test_one_has_it_until_it_is_free(server: Server, journal: Callable[[str], Path]) -> None:
    first = take(server, journal("a"))
    assert json.loads(server.objects[LOCK].data)["mountpoint"] == "/mnt/a"
    with pytest.raises(BusyError, match=r"already mounted rw by pid \d+ at /mnt/a since"):
        take(server, journal("b"))
    first.free()
    assert not server.objects
    take(server, journal("c")).free()


def test_a_look_reports_another_mount_and_changes_nothing(
    server: Server, journal: Callable[[str], Path], tmp_path: Path
) -> None:
    objects = S3Objects(s3_store(server))
    Lease.rehearse(objects, "data/root", tmp_path / "none")
    assert not server.objects
    directory = journal("a")
    lease = take(server, directory)
    before = server.objects[LOCK].data
    for other in (tmp_path / "none", journal("b")):
        with pytest.raises(BusyError, match="at /mnt/a since"):
            Lease.rehearse(objects, "data/root", other)
        with pytest.raises(BusyError, match="overlaps data/root"):
            Lease.rehearse(objects, "data/root/x", other)
    lease._ended.set()
    Lease.rehearse(objects, "data/root", directory)
    assert server.objects[LOCK].data == before
    server.objects[LOCK].written -= 125
    Lease.rehearse(objects, "data/root", tmp_path / "none")
    lease.free()


def test_doctor_reports_a_writable_mount_of_another_host(
    server: Server, journal: Callable[[str], Path], tmp_path: Path
) -> None:
    lease = take(server, journal("a"))
    options = Options(rw=True, journal=str(tmp_path / "journals"))
    with pytest.raises(BusyError, match="at /mnt/a since"):
        require_writable(s3_store(server), "s3://data/root", options)
    lease.free()
    require_writable(s3_store(server), "s3://data/root", options)
    assert LOCK not in server.objects


def test_a_directory_below_is_not_free(server: Server, journal: Callable[[str], Path]) -> None:
    first = take(server, journal("a"))
    objects = S3Objects(s3_store(server))
    with pytest.raises(BusyError, match=r"overlaps data/root, which is already mounted .* at /mnt/a "):
        Lease.take(objects, "data/root/x/y", journal("b"))
    Lease.take(objects, "data/rooted", journal("c")).free()
    first.free()
    Lease.take(objects, "data/root/x/y", journal("d")).free()


def test_a_journal_s_next_owner_need_not_wait(server: Server, journal: Callable[[str], Path]) -> None:
    """After kill -9 the journal is unlocked at once, and so whoever has it next knows that the former owner is dead."""
    directory = journal("a")
    crashed = take(server, directory)
    crashed._ended.set()
    take(server, directory).free()


@pytest.mark.parametrize(("age_s", "free"), [(60, False), (115, False), (125, True), (3600, True), (-3600, False)])
def test_who_says_nothing_for_two_leases_has_lost_it(
    age_s: int, free: bool, server: Server, journal: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    crashed = take(server, journal("a"))
    crashed._ended.set()
    server.objects[LOCK].written -= age_s
    if free:
        take(server, journal("b")).free()
        assert f"{LOCK} was mounted rw by pid" in caplog.text
        assert "has not renewed its lock" in caplog.text
    else:
        with pytest.raises(BusyError):
            take(server, journal("b"))


@pytest.mark.parametrize("hours", [-1, 1])
def test_nobody_s_own_clock_counts(
    hours: int, server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = take(server, journal("a")), journal("b")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    server.clock = real
    with pytest.raises(BusyError):
        take(server, other)
    first.free()


def test_it_is_renewed_and_survives_faults(
    server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_S", 0.05)
    server.fault = lambda number, name: {2: "lost", 4: "reset", 6: "busy"}.get(number, "")
    lease = take(server, journal("a"))
    wait_until(lambda: server.requests.count("put_object") >= 8)
    assert not lease.lost
    lease.free()
    assert not server.objects


def test_a_renewal_whose_answer_is_lost_is_no_take_over(
    server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store executes the request, and is down until the renewal is given up."""
    monkeypatch.setattr(lease_module, "RENEW_S", 0.05)

    def fault(number: int, name: str) -> str:
        puts = server.requests.count("put_object")
        if puts < 2 or "cannot be renewed" in caplog.text:
            return ""
        return "lost" if name == "put_object" and puts == 2 else "busy"

    server.fault = fault
    store = s3_store(server, RetryPolicy(60, 1))
    lease = Lease.take(S3Objects(store), "data/root", journal("a"))
    wait_until(lambda: server.requests.count("put_object") >= 8)
    assert not lease.lost
    lease.free()
    assert "cannot be renewed" in caplog.text
    assert not server.objects


def test_a_store_that_always_refuses_the_lock_is_given_up(
    server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "ATTEMPTS", 3)
    server.fault = lambda number, name: "refuse" if name == "put_object" else ""
    with pytest.raises(BusyError, match="refuses to write the lock object"):
        take(server, journal("a"))


def test_a_journal_that_was_begun_anew_is_its_owner_s_as_well(
    server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock file is another one, so the lock in the store must name that for the next owner not to wait."""
    monkeypatch.setattr(lease_module, "RENEW_S", 0.05)
    directory = journal("a")
    lease = take(server, directory)
    (directory / "lock").rename(directory / "lock.old")
    (directory / "lock").write_bytes((directory / "lock.old").read_bytes())
    number = (directory / "lock").stat().st_ino
    wait_until(lambda: json.loads(server.objects[LOCK].data)["journal"][1] == number)
    lease._ended.set()  # as kill -9 ends it
    lease._thread.join()
    take(server, directory).free()


def test_a_former_owner_notices(
    server: Server, journal: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_S", 0.3)
    first, leases = take(server, journal("a")), list[Lease]()

    def takes_over() -> bool:
        server.objects[LOCK].written -= 500
        with suppress(BusyError):  # it may just have been renewed
            leases.append(take(server, journal("b")))
        return bool(leases)

    wait_until(takes_over)
    wait_until(lambda: first.lost)
    assert "another mount has taken over" in caplog.text
    first.free()
    assert LOCK in server.objects  # it is the other's
    leases[0].free()


def test_of_many_at_once_one_gets_it(server: Server, journal: Callable[[str], Path]) -> None:
    got: list[Lease] = []
    refused: list[BusyError] = []

    def attempt(directory: Path) -> None:
        try:
            got.append(take(server, directory))
        except BusyError as e:
            refused.append(e)

    threads = [threading.Thread(target=attempt, args=(journal(name),)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(got), len(refused)) == (1, 5)
    got[0].free()


def test_writers_of_remote_stores_have_it(server: Server, journal: Callable[[str], Path]) -> None:
    writer = open_writer(s3_store(server), journal=journal("a"))
    with pytest.raises(BusyError):
        open_writer(s3_store(server), journal=journal("b"))
    writer.put("x", b"1")
    writer.close()
    assert list(server.objects) == ["data/root/x"]
