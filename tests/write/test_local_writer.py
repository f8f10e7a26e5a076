"""Files replaced as a whole: every step, every crash, every error, and others who write at the same time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.blobs import Blob, ByteRange, FilePart, Plan, Suffix, whole
from shardfs.model.changes import Begun
from shardfs.model.errors import DanglingLinkError, StaleShardError
from shardfs.model.kinds import is_in
from shardfs.storage import syscalls
from shardfs.storage.local import LocalStore
from shardfs.storage.writers import files
from shardfs.storage.writers.local import LocalWriter
from shardfs.storage.writers.names import temporary_name
from tests.write.hooks import Recorder, fail, hooked, in_child
from tests.write.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "a/shard"
WAYS = ["renamed", "in place"]


@pytest.fixture
def writer(tmp_path: Path) -> LocalWriter:
    (tmp_path / "a").mkdir()
    writer = LocalWriter(LocalStore(str(tmp_path)))
    writer.update(KEY, Steps(lambda _: None))  # the directory's name is on disk
    return writer


def content(blob: Blob | None) -> dict[str, int]:
    return {} if blob is None else json.loads(blob.read([Suffix(1 << 20)])[0])


def with_member(name: str, value: int = 1) -> Callable[[Blob | None], Plan]:
    """An update that keeps what others have put into an object."""
    return lambda old: [json.dumps(content(old) | {name: value}).encode()]


def read(tmp_path: Path) -> dict[str, int] | None:
    try:
        found: dict[str, int] = json.loads((tmp_path / KEY).read_bytes())
    except FileNotFoundError:
        return None
    return found


def replace(tmp_path: Path, name: str, how: str = "renamed") -> None:
    """What other programs do, without locks: read, add, write."""
    path = tmp_path / KEY
    data = json.dumps((read(tmp_path) or {}) | {name: 1}).encode()
    if how == "renamed":
        (tmp_path / "a" / "other.partial").write_bytes(data)
        os.rename(tmp_path / "a" / "other.partial", path)
    else:
        path.write_bytes(data)


def names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "a"))


def test_an_object_is_made_of_all_kinds_of_pieces(writer: LocalWriter, tmp_path: Path) -> None:
    old, contents = os.urandom(300_000), list[bytes]()
    (tmp_path / KEY).write_bytes(old)
    (tmp_path / "journal").write_bytes(bytes(5000) + b"from the journal")
    with open(tmp_path / "journal", "rb") as journal:
        part = FilePart(journal.fileno(), 5000, 16)
        plan: Plan = [ByteRange(0, 300_000), b"one", memoryview(b"two"), part, ByteRange(7, 9), b"", b"end"]
        stat = writer.update(KEY, Steps(lambda _: plan, check=lambda new: contents.append(new.read([Suffix(3)])[0])))
    wanted = old + b"onetwofrom the journal" + old[7:9] + b"end"
    assert (tmp_path / KEY).read_bytes() == wanted
    assert stat == LocalStore(str(tmp_path)).entry(KEY).stat
    assert contents == [b"end"]


def test_many_bytes_in_memory_are_written_in_turn(writer: LocalWriter, tmp_path: Path) -> None:
    pieces = [os.urandom(700_000) for _ in range(5)]
    with hooked(recorder := Recorder()):
        writer.update(KEY, Steps(lambda _: list(pieces)))
    assert (tmp_path / KEY).read_bytes() == b"".join(pieces)
    assert recorder.names.count("pwrite") == 3


def test_many_new_objects_are_on_disk_together(writer: LocalWriter, tmp_path: Path) -> None:
    """Each file is synced, and each directory once. Those that an interrupted run has begun are overwritten."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "0").write_bytes(b"longer than it will be")
    contents = {f"{directory}/{i}": b"%d" % i * i for directory in ("a/b", "new") for i in range(40)}
    synced = []

    def record(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "fsync_directory":
            synced.append(os.readlink(f"/proc/self/fd/{args[0]}"))
        return recorder(name, function, args)

    recorder = Recorder()
    with hooked(record):
        writer.create(list(contents.items()))
    assert {str(tmp_path / "a/b"), str(tmp_path / "new")} <= {*synced}
    assert {key: (tmp_path / key).read_bytes() for key in contents} == contents
    assert recorder.names.count("fsync") == 80
    assert recorder.names[-2:] == ["fsync_directory"] * 2
    assert recorder.names.count("fsync_directory") < 40, "not for each file"
    with hooked(Recorder(2, fail(errno.EIO))), pytest.raises(OSError, match="Input/output"):
        writer.create([("new/0", b"")])


@pytest.mark.parametrize("instead", [False, True])
def test_a_source_that_was_moved_away_has_not_lost_its_objects(tmp_path: Path, instead: bool) -> None:
    """Nothing is a conflict because of that, and nothing goes into what lies there by now."""
    source, away = tmp_path / "source", tmp_path / "away"
    (source / "a").mkdir(parents=True)
    (source / KEY).write_bytes(b"old")
    writer, blobs = LocalWriter(LocalStore(str(source))), list[Blob | None]()
    source.rename(away)
    if instead:
        (source / "a").mkdir(parents=True)

    def make(old: Blob | None) -> Plan:
        blobs.append(old)
        return [b"new"]

    with pytest.raises(OSError, match="the source was moved") as raised:
        writer.update(KEY, Steps(make))
    assert (raised.value.errno, blobs, list(tmp_path.rglob("shard"))) == (errno.ESTALE, [], [away / KEY])
    if instead:
        (source / "a").rmdir()
    away.rename(source)
    writer.update(KEY, Steps(make))
    assert (source / KEY).read_bytes() == b"new"


def test_what_stays_as_it_is_is_not_touched(writer: LocalWriter, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(b"old")
    before = (tmp_path / KEY).stat()
    stat = writer.update(KEY, Steps(lambda old: [ByteRange(0, 3)]))
    assert stat == LocalStore(str(tmp_path)).entry(KEY).stat
    assert (tmp_path / KEY).stat().st_ctime_ns == before.st_ctime_ns


def test_directories_are_made_and_last(writer: LocalWriter, tmp_path: Path) -> None:
    with hooked(recorder := Recorder()):
        assert writer.update("x/y/z", Steps(lambda _: None)) is None
        assert recorder.names == []
        writer.update("x/y/z", Steps(lambda _: [b"1"]))
    assert recorder.names[:4] == ["mkdir", "fsync_directory", "mkdir", "fsync_directory"]
    assert (tmp_path / "x/y/z").read_bytes() == b"1"


def test_mode_and_attributes_stay(writer: LocalWriter, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(b"old")
    os.chmod(tmp_path / KEY, 0o664)
    os.setxattr(tmp_path / KEY, "user.colour", b"red")
    writer.put(KEY, b"new")
    assert (tmp_path / KEY).stat().st_mode & 0o7777 == 0o664
    assert os.getxattr(tmp_path / KEY, "user.colour") == b"red"
    previous = os.umask(0o027)
    try:
        writer.put("a/fresh", b"new")
    finally:
        os.umask(previous)
    assert (tmp_path / "a/fresh").stat().st_mode & 0o7777 == 0o640


def test_a_check_that_fails_changes_nothing(writer: LocalWriter, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(b"old")

    def refuse(new: Blob) -> None:
        raise ValueError("not right")

    with pytest.raises(ValueError, match="not right"):
        writer.update(KEY, Steps(lambda _: [b"new"], check=refuse))
    assert (tmp_path / KEY).read_bytes() == b"old"
    assert names(tmp_path) == ["shard"]


def test_write_protected_files_are_left(writer: LocalWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / KEY).write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(PermissionError, match="write-protected"):
        writer.put(KEY, b"new")
    assert names(tmp_path) == ["shard"]


# ------------------------------------------------------------------------------------------- others at the same time


def steps(tmp_path: Path, job: Callable[[], object], prepare: Callable[[], None]) -> int:
    """How many calls a job makes that nobody disturbs."""
    prepare()
    with hooked(recorder := Recorder()):
        job()
    for name in names(tmp_path):
        os.unlink(tmp_path / "a" / name)
    return len(recorder.calls)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("existing", [True, False])
def test_who_slips_in_loses_nothing(existing: bool, how: str, writer: LocalWriter, tmp_path: Path) -> None:
    """Before each call in turn somebody reads the object, adds something, and writes it, without a lock."""

    def prepare() -> None:
        (tmp_path / KEY).unlink(missing_ok=True)
        if existing:
            replace(tmp_path, "first")

    first = {"first": 1} if existing else {}
    for at in range(steps(tmp_path, lambda: writer.update(KEY, Steps(with_member("ours"))), prepare)):
        prepare()
        with hooked(Recorder(at, lambda: replace(tmp_path, "theirs", how))):
            writer.update(KEY, Steps(with_member("ours")))
        assert read(tmp_path) == first | {"ours": 1, "theirs": 1}, at
        assert names(tmp_path) == ["shard"], at


def test_who_removes_it_meanwhile_is_heard(writer: LocalWriter, tmp_path: Path) -> None:
    def prepare() -> None:
        replace(tmp_path, "first")

    outcomes = set()
    for at in range(steps(tmp_path, lambda: writer.update(KEY, Steps(with_member("ours"))), prepare)):
        prepare()
        with hooked(Recorder(at, lambda: (tmp_path / KEY).unlink())):
            writer.update(KEY, Steps(with_member("ours")))
        outcomes.add(json.dumps(read(tmp_path)))
        assert names(tmp_path) in (["shard"], []), at
    assert outcomes == {'{"ours": 1}', "null"}  # removed before us, or after


@pytest.mark.parametrize("how", WAYS)
def test_a_removal_spares_what_is_new(how: str, writer: LocalWriter, tmp_path: Path) -> None:
    def remove_if_alone(old: Blob | None) -> Plan | None:
        raw = content(old)
        raw.pop("first", None)
        return [json.dumps(raw).encode()] if raw else None

    def prepare() -> None:
        (tmp_path / KEY).unlink(missing_ok=True)
        replace(tmp_path, "first")

    for at in range(steps(tmp_path, lambda: writer.update(KEY, Steps(remove_if_alone)), prepare)):
        prepare()
        with hooked(Recorder(at, lambda: replace(tmp_path, "theirs", how))):
            writer.update(KEY, Steps(remove_if_alone))
        assert "theirs" in (read(tmp_path) or {}), at
        assert names(tmp_path) == ["shard"], at


@pytest.mark.parametrize("removes", [True, False])
def test_a_directory_that_is_created_anew_meanwhile(removes: bool, writer: LocalWriter, tmp_path: Path) -> None:
    """At every call. The update reaches the object in the new directory, or fails and then does so."""

    def anew() -> None:
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").mkdir()
        replace(tmp_path, "anew")

    def change(old: Blob | None) -> Plan | None:
        return None if removes else with_member("ours")(old)

    replace(tmp_path, "theirs")
    with hooked(counting := Recorder()):
        writer.update(KEY, Steps(change))
    for at in range(len(counting.calls)):
        anew()
        with hooked(Recorder(at, anew)):
            try:
                writer.update(KEY, Steps(change))
            except FileNotFoundError:
                writer.update(KEY, Steps(change))
        assert read(tmp_path) == (None if removes else {"ours": 1, "anew": 1}), counting.names[at]
        assert [name for name in names(tmp_path) if name != "shard"] == []


def test_a_directory_is_moved_while_another_thread_writes_elsewhere(
    writer: LocalWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread notes a new directory while this one forgets those that have lost their names."""
    moves = iter(["before"])

    def elsewhere(*args: str) -> bool:
        monkeypatch.undo()
        thread = threading.Thread(target=writer.put, args=("c/shard", b"{}"))
        thread.start()
        thread.join(60)
        return is_in(*args)

    def change(old: Blob | None) -> Plan:
        for name in moves:
            os.rename(tmp_path / "a", tmp_path / name)
            (tmp_path / "a").mkdir()
        return with_member("ours")(old)

    (tmp_path / "c").mkdir()
    monkeypatch.setattr(files, "is_in", elsewhere)
    writer.update(KEY, Steps(change))
    assert read(tmp_path) == {"ours": 1}
    assert (tmp_path / "c/shard").read_bytes() == b"{}"


def test_who_never_stops_is_left_alone(writer: LocalWriter, tmp_path: Path) -> None:
    writer = LocalWriter(LocalStore(str(tmp_path)), race_s=0.1)
    replace(tmp_path, "first")
    exchanges: list[str] = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "exchange":
            exchanges.append(name)
            if len(exchanges) % 2:  # the others are ours, to put theirs back
                replace(tmp_path, "theirs")
        return function(*args)

    with hooked(hook), pytest.raises(StaleShardError):
        writer.update(KEY, Steps(with_member("ours")))
    assert read(tmp_path) == {"first": 1, "theirs": 1}
    assert names(tmp_path) == ["shard"]


def test_two_others_at_once_lose_nothing_on_the_disk(
    writer: LocalWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One right before the exchange, one before the first is put back: the second is the newest, the first is kept."""
    replace(tmp_path, "first")
    exchanges: list[str] = []

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "exchange":
            exchanges.append(name)
            if len(exchanges) <= 2:
                (tmp_path / KEY).unlink()
                replace(tmp_path, f"theirs {len(exchanges)}")
        return function(*args)

    with hooked(hook):
        writer.update(KEY, Steps(with_member("ours")))
    assert read(tmp_path) == {"theirs 2": 1, "ours": 1}
    extra_names = [name for name in names(tmp_path) if name != "shard"]
    assert [json.loads((tmp_path / "a" / name).read_bytes()) for name in extra_names] == [{"theirs 1": 1}]
    assert extra_names[0] in caplog.text


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_disks_without_exchange(number: int, existing: bool, writer: LocalWriter, tmp_path: Path) -> None:
    if existing:
        replace(tmp_path, "first")

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in ("exchange", "rename_new"):
            fail(number)()
        return function(*args)

    with hooked(hook):
        writer.update(KEY, Steps(with_member("ours")))
        assert read(tmp_path) == ({"first": 1} if existing else {}) | {"ours": 1}
        assert names(tmp_path) == ["shard"]
        writer.update(KEY, Steps(lambda _: None))
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------- crashes and errors


SCENARIOS: dict[str, tuple[bool, Callable[[Blob | None], Plan | None], dict[str, int] | None]] = {
    "create": (False, with_member("ours"), {"ours": 1}),
    "replace": (True, with_member("ours"), {"first": 1, "ours": 1}),
    "remove": (True, lambda _: None, None),
}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call(scenario: str, behind: bool, writer: LocalWriter, tmp_path: Path) -> None:
    existing, make, wanted = SCENARIOS[scenario]

    def prepare() -> None:
        if existing:
            (tmp_path / KEY).write_bytes(b'{"first": 1}')
        else:
            (tmp_path / KEY).unlink(missing_ok=True)

    before = {"first": 1} if existing else None
    log = tmp_path / "begun"
    for at in range(steps(tmp_path, lambda: writer.update(KEY, Steps(make)), prepare)):
        prepare()
        log.unlink(missing_ok=True)

        def job(at: int = at) -> None:
            syscalls.hook = Recorder(at, lambda: os._exit(9), behind=behind)
            writer.update(KEY, Steps(make, tell=lambda begun: (log.write_text(json.dumps(begun)), None)[1]))

        assert in_child(job) == 9, at
        assert read(tmp_path) in (before, wanted), at
        contents = read(tmp_path)
        for _ in range(2):  # a second time it does nothing
            if log.exists():
                writer.recover(Begun(*json.loads(log.read_text())))
            writer.temporary_files.sweep("a")
            assert read(tmp_path) == contents, at
            assert set(names(tmp_path)) <= {"shard", "shard.__lock"}, at
        writer.update(KEY, Steps(make))
        assert read(tmp_path) == wanted
        assert names(tmp_path) == (["shard"] if wanted else []), at


def test_killed_with_a_foreign_version_in_hand(writer: LocalWriter, tmp_path: Path) -> None:
    """Between the exchange and the look at what came out, after somebody had slipped in."""
    replace(tmp_path, "first")
    log = tmp_path / "begun"

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != "exchange":
            return function(*args)
        replace(tmp_path, "theirs")
        function(*args)
        os._exit(9)

    def job() -> None:
        syscalls.hook = hook
        writer.update(KEY, Steps(with_member("ours"), tell=lambda begun: (log.write_text(json.dumps(begun)), None)[1]))

    assert in_child(job) == 9
    assert read(tmp_path) == {"first": 1, "ours": 1}
    writer.recover(Begun(*json.loads(log.read_text())))
    assert read(tmp_path) == {"first": 1, "theirs": 1}
    assert names(tmp_path) == ["shard"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_every_call(scenario: str, number: int, writer: LocalWriter, tmp_path: Path) -> None:
    existing, make, wanted = SCENARIOS[scenario]

    def prepare() -> None:
        (tmp_path / KEY).unlink(missing_ok=True)
        if existing:
            replace(tmp_path, "first")

    before = {"first": 1} if existing else None
    silent, told = [], set()
    for at in range(steps(tmp_path, lambda: writer.update(KEY, Steps(make)), prepare)):
        prepare()
        with hooked(recorder := Recorder(at, fail(number))):
            try:
                writer.update(KEY, Steps(make))
                silent.append(recorder.names[at])
            except OSError as e:
                told.add(e.errno)
        assert read(tmp_path) in (before, wanted), at
        assert not any(name.startswith(".shardfs") for name in names(tmp_path)), at
        writer.update(KEY, Steps(make))
        assert read(tmp_path) == wanted
        assert names(tmp_path) == (["shard"] if wanted else []), at
    assert told == {number}
    assert set(silent) <= {"lock", "unlink"}  # of the temporary file; of the lock's


def test_the_name_of_a_new_object_is_on_disk_after_an_update(writer: LocalWriter) -> None:
    with hooked(recorder := Recorder()):
        writer.update(KEY, Steps(lambda _: [b"new"]))
    named = recorder.names.index("rename_new")
    assert "fsync_directory" in recorder.names[named:]


def test_the_first_update_in_a_directory_removes_what_a_crash_left_there(writer: LocalWriter, tmp_path: Path) -> None:
    left = tmp_path / "a" / temporary_name()
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"new version")
    writer.update(KEY, Steps(lambda _: [b"1"]))
    assert left.exists(), "recovery may need it"
    writer.recovered()
    writer.update(KEY, Steps(lambda _: [b"2"]))
    assert not left.exists()


def test_an_error_of_a_version_that_another_writer_replaced_is_no_error(writer: LocalWriter, tmp_path: Path) -> None:
    tries = []

    def check(_: Blob) -> None:
        tries.append(1)
        if len(tries) == 1:
            (tmp_path / "theirs").write_bytes(b"theirs")
            (tmp_path / "theirs").rename(tmp_path / KEY)
            raise OSError(errno.EIO, "the old version is cut off")

    writer.update(KEY, Steps(lambda _: [b"first"]))
    writer.update(KEY, Steps(lambda old: [b"ours after " + (old.read([Suffix(6)])[0] if old else b"")], check=check))
    assert (tmp_path / KEY).read_bytes() == b"ours after theirs"


def test_sweeping_spares_what_somebody_is_at(writer: LocalWriter, tmp_path: Path) -> None:
    (tmp_path / "a/.shardfs-0123456789abcdef.tmp").write_bytes(b"left")

    def make(old: Blob | None) -> Plan:
        return [b"new"]

    swept: list[int] = []
    writer.update(KEY, Steps(make, check=lambda _: swept.append(writer.temporary_files.sweep("a"))))
    assert swept == [1]
    assert names(tmp_path) == ["shard"]
    assert writer.temporary_files.sweep("missing") == 0


# ------------------------------------------------------------------------------------------- locks


@pytest.mark.parametrize("protocol", ["os", "lockfile"])
@pytest.mark.parametrize("written", [b"", b"half of a new sha"])
def test_another_s_lock_is_waited_for(protocol: str, written: bytes, writer: LocalWriter, tmp_path: Path) -> None:
    """tensorstore's lock file is neither used nor removed, whether tensorstore locks it or has only created it."""
    fd = os.open(tmp_path / f"{KEY}.__lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    if protocol == "os":
        syscalls.lock(fd)
    os.write(fd, written)
    impatient = LocalWriter(LocalStore(str(tmp_path)), lock_s=0.05)
    with pytest.raises(TimeoutError, match=r"a/shard.__lock was there for 0.05 s: another program .* remove a/shard"):
        impatient.put(KEY, b"new")
    assert (tmp_path / f"{KEY}.__lock").stat().st_ino == os.fstat(fd).st_ino
    assert (tmp_path / f"{KEY}.__lock").read_bytes() == written
    thread = threading.Thread(target=writer.put, args=(KEY, b"new"))
    thread.start()
    time.sleep(0.05)
    assert names(tmp_path) == ["shard.__lock"]
    # As tensorstore ends: its lock file becomes the object, and only then is it unlocked.
    os.rename(tmp_path / f"{KEY}.__lock", tmp_path / KEY)
    os.close(fd)
    thread.join(30)
    assert (tmp_path / KEY).read_bytes() == b"new"
    assert names(tmp_path) == ["shard"]


def test_the_lock_file_of_a_killed_shardfs_is_taken_over(writer: LocalWriter, tmp_path: Path) -> None:
    def job() -> None:
        LocalWriter(LocalStore(str(tmp_path))).update(KEY, Steps(lambda _: os._exit(9)))

    assert in_child(job) == 9
    assert names(tmp_path) == ["shard.__lock"]
    writer.put(KEY, b"new")
    assert names(tmp_path) == ["shard"]


def test_a_lock_file_that_another_program_took_over_from_a_killed_shardfs_is_left_to_it(tmp_path: Path) -> None:
    """tensorstore locks and fills the file that a killed shardfs has left."""

    def job() -> None:
        LocalWriter(LocalStore(str(tmp_path))).update(KEY, Steps(lambda _: os._exit(9)))

    (tmp_path / "a").mkdir()
    assert in_child(job) == 9
    (tmp_path / f"{KEY}.__lock").write_bytes(b"theirs")
    with pytest.raises(TimeoutError, match="another program"):
        LocalWriter(LocalStore(str(tmp_path)), lock_s=0.05).put(KEY, b"new")
    assert (tmp_path / f"{KEY}.__lock").read_bytes() == b"theirs"


@pytest.mark.parametrize("is_faster", [False, True], ids=["alone", "another program creates it"])
def test_an_object_in_a_new_directory_is_planned_once(is_faster: bool, tmp_path: Path, writer: LocalWriter) -> None:
    """Unless it exists by then: planning reads all chunks of a shard from the journal."""
    before: list[bytes | None] = []

    def make(old: Blob | None) -> Plan:
        before.append(None if old is None else whole(old))
        if is_faster and old is None:
            (tmp_path / "new").mkdir()
            (tmp_path / "new/shard").write_bytes(b"theirs")
        return [b"ours"]

    writer.update("new/shard", Steps(make))
    assert before == ([None, b"theirs"] if is_faster else [None])
    assert (tmp_path / "new/shard").read_bytes() == b"ours"


COUNT = """
import json, sys
from shardfs.model.blobs import Suffix
from shardfs.model.changes import Change
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
writer = LocalWriter(LocalStore(sys.argv[1]))
class Increment(Change):
    def plan(self, old):
        n = json.loads(old.read([Suffix(99)])[0])["n"] if old is not None else 0
        return [json.dumps({"n": n + 1}).encode()]
for _ in range(int(sys.argv[2])):
    writer.update("a/shard", Increment())
"""


def test_many_processes_and_threads_count_exactly(writer: LocalWriter, tmp_path: Path) -> None:
    def count(old: Blob | None) -> Plan:
        return [json.dumps({"n": content(old).get("n", 0) + 1}).encode()]

    def work() -> None:
        for _ in range(25):
            writer.update(KEY, Steps(count))

    processes = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path), "50"]) for _ in range(2)]
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [other.wait(60) for other in processes] == [0, 0]
    assert read(tmp_path) == {"n": 150}
    assert names(tmp_path) == ["shard"]


# ------------------------------------------------------------------------------------------- confinement


@pytest.fixture
def outside(tmp_path: Path, writer: LocalWriter) -> Path:
    """A directory beside the source `tmp_path / "a"`; links in the source lead to it."""
    source, other = tmp_path / "a", tmp_path / "outside"
    other.mkdir()
    (other / "secret").write_bytes(b"secret")
    (source / "link").symlink_to(other)
    (source / "file").symlink_to(other / "secret")
    (source / "dangling").symlink_to(other / "new")
    (source / "sub").mkdir()
    (source / "inside").symlink_to("sub")
    return other


def test_nothing_is_written_outside(tmp_path: Path, outside: Path) -> None:
    writer = LocalWriter(LocalStore(str(tmp_path / "a")))
    before = sorted(os.listdir(outside))
    create = os.O_WRONLY | os.O_CREAT
    tries: list[Callable[[], object]] = [
        lambda: writer.put("link/new", b"x"),
        lambda: writer.put("link/deep/new", b"x"),
        lambda: writer.put("file", b"x"),
        lambda: writer.put("dangling", b"x"),
        lambda: writer.put("../outside/new", b"x"),
        lambda: writer.put("sub/../../outside/new", b"x"),
        lambda: writer.put("/new", b"x"),
        lambda: writer.put("sub//new", b"x"),
        lambda: writer.put("nul\0", b"x"),
        lambda: writer.delete("link/secret"),
        lambda: writer.delete("../outside/secret"),
        lambda: writer.disk.make_directory("link/new"),
        lambda: writer.remove_directory("../outside"),
        lambda: writer.rename("link/secret", "sub/secret"),
        lambda: writer.rename("file", "link/new"),
        lambda: writer.disk.open_file("file", os.O_WRONLY | os.O_TRUNC),
        lambda: writer.disk.open_file("dangling", create),
        lambda: writer.disk.open_file("link/new", create),
        lambda: writer.disk.open_file("link/new", create | os.O_EXCL),
        lambda: writer.recover(Begun("link/secret", None, "secret", (outside / "secret").stat().st_ino)),
    ]
    for i, attempt in enumerate(tries):
        with pytest.raises(OSError) as e:  # noqa: PT011 - of several kinds
            attempt()
        assert e.value.errno in (errno.EACCES, errno.EEXIST, errno.EROFS, errno.EIO), i
        assert sorted(os.listdir(outside)) == before, i
        assert (outside / "secret").read_bytes() == b"secret", i
    with pytest.raises(IsADirectoryError):
        writer.put("", b"x")


def test_nothing_is_created_where_a_dangling_link_leads(tmp_path: Path, outside: Path) -> None:
    """The name exists, and its content is elsewhere (git-annex): see the table in docs/durability.md."""
    (tmp_path / "a/near").symlink_to("sub/new")
    writer = LocalWriter(LocalStore(str(tmp_path / "a")))
    for key in ("dangling", "near"):
        with pytest.raises(DanglingLinkError, match="leads nowhere"):
            writer.disk.open_file(key, os.O_WRONLY | os.O_CREAT)
        with pytest.raises(FileExistsError):
            writer.disk.open_file(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert os.listdir(tmp_path / "a/sub") == []
    assert os.listdir(outside) == ["secret"]


def test_links_inside_are_followed_to_directories(tmp_path: Path, outside: Path) -> None:
    LocalWriter(LocalStore(str(tmp_path / "a"))).put("inside/new", b"x")
    assert (tmp_path / "a/sub/new").read_bytes() == b"x"


def test_a_directory_swapped_for_a_link_meanwhile(tmp_path: Path, outside: Path) -> None:
    """At every call in turn: whatever happens, it happens in the source."""
    source = tmp_path / "a"

    def prepare() -> None:
        for name in ("sub", "was"):
            path = source / name
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                for entry in path.iterdir():
                    entry.unlink()
                path.rmdir()
        (source / "sub").mkdir()
        (source / "sub/shard").write_bytes(b"{}")

    def swap() -> None:
        os.rename(source / "sub", source / "was")
        (source / "sub").symlink_to(outside)

    prepare()
    with hooked(recorder := Recorder()):
        LocalWriter(LocalStore(str(source))).update("sub/shard", Steps(with_member("ours")))
    for at in range(len(recorder.calls)):
        prepare()
        with hooked(Recorder(at, swap)), suppress(PermissionError):  # the directory has no name in the source
            LocalWriter(LocalStore(str(source))).update("sub/shard", Steps(with_member("ours")))
        assert json.loads((source / "was/shard").read_bytes()) == {"ours": 1}
        assert os.listdir(outside) == ["secret"]


# ------------------------------------------------------------------------------------------- passing through


def test_open_file(writer: LocalWriter, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        writer.disk.open_file("f", os.O_RDWR)
    fd = writer.disk.open_file("f", os.O_RDWR | os.O_CREAT, 0o640)
    os.write(fd, b"0123")
    os.close(fd)
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o640
    with pytest.raises(FileExistsError):
        writer.disk.open_file("f", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fd = writer.disk.open_file("f", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"45")
    os.close(fd)
    assert (tmp_path / "f").read_bytes() == b"012345"
    os.close(writer.disk.open_file("f", os.O_WRONLY | os.O_TRUNC))
    assert (tmp_path / "f").read_bytes() == b""
    with pytest.raises(IsADirectoryError):
        writer.disk.open_file("a", os.O_RDONLY)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PermissionError):
        writer.disk.open_file("fifo", os.O_WRONLY)


def test_the_source_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "only").write_bytes(b"old")
    LocalWriter(LocalStore(str(tmp_path / "only"))).put("", b"new")
    assert (tmp_path / "only").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["only"]
