"""What a mount finds out about an object store before it writes: definite answers decide, faults never do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shardfs.model.changes import Begun
from shardfs.model.errors import UnsupportedError
from shardfs.storage.remote import FsspecStore
from shardfs.storage.retry import RetryPolicy
from shardfs.storage.writers import open_writer
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.objects import ABANDONED_S, ObjectWriter
from shardfs.storage.writers.s3 import S3Objects
from tests.conftest import MountFailed, need_fuse
from tests.mount.distant import in_words
from tests.write.mounts import writable
from tests.write.object_store import ALL, Object, Server
from tests.write.steps import Steps
from tests.write.targets import TARGETS
from tests.write.test_object_writer import KEY, SMALL, Moving, s3_store
from tests.write.test_remote_writes import filled

if TYPE_CHECKING:
    from pathlib import Path


def tried(server: Server, retry: RetryPolicy | None = None) -> S3Objects:
    objects = S3Objects(s3_store(server, retry))
    objects.try_conditions()
    return objects


@pytest.mark.parametrize("heeds", [ALL, ALL - {"delete"}, ALL - {"put"}], ids=["all", "no delete", "no put"])
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "reset", "busy", "error", "late error"])
def test_a_fault_at_any_request_of_the_probe_changes_nothing(fault: str, heeds: frozenset[str], server: Server) -> None:
    server.heeds = heeds
    tried(server)
    for at in range(len(server.requests)):
        server.reset()
        server.heeds = heeds
        server.fault = lambda number, name, at=at: fault if number == at else ""  # type: ignore[misc]
        s3_objects = tried(server)
        assert len(server.requests) > at, "the fault was not reached"
        assert (s3_objects.conditional, s3_objects.removes) == ("put" in heeds, "delete" in heeds), at
        assert not server.objects


@pytest.mark.parametrize(
    ("name", "fault"), [("put_object", "error"), ("delete_object", "error"), ("delete_object", "reset")]
)
def test_a_fault_that_persists_refuses_the_mount(fault: str, name: str, server: Server) -> None:
    server.fault = lambda number, asked: fault if asked == name else ""
    store = s3_store(server, RetryPolicy(60, 1))
    with pytest.raises(OSError, match=r"heeds conditional requests.*Try again later"):
        open_writer(store)


def test_a_writer_alone_accepts_a_fault_that_persists(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.fault = lambda number, name: "error" if name == "delete_object" else ""
    writer = open_writer(s3_store(server, RetryPolicy(60, 1)), alone=True)
    assert "not known whether the store heeds conditional requests" in caplog.text
    server.fault = lambda number, name: ""
    writer.put(KEY, b"1")
    writer.delete(KEY)


@pytest.mark.parametrize("status", [400, 501])
@pytest.mark.parametrize("kind", ["put", "delete"])
def test_a_condition_that_the_store_rejects_is_one_it_does_not_heed(
    kind: str, status: int, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.rejects = {kind: status}
    s3_objects = tried(server)
    assert (s3_objects.conditional, s3_objects.removes) == (kind != "put", kind != "delete")
    assert not server.objects
    if kind == "put":
        with pytest.raises(UnsupportedError, match=r"data/root: .*conditional writes"):
            open_writer(s3_store(server))
    else:
        open_writer(s3_store(server))
        assert "does not heed conditional deletes" in caplog.text


def test_a_new_object_that_is_always_refused_has_a_message(server: Server) -> None:
    server.fault = lambda number, name: "refuse" if name == "put_object" else ""
    with pytest.raises(OSError, match="refuses to create a new object"):
        open_writer(s3_store(server))


def test_a_delete_that_is_refused_for_the_right_version_is_not_conditional(server: Server) -> None:
    server.fault = lambda number, name: "refuse" if name == "delete_object" and number < 6 else ""
    objects = tried(server)
    assert server.requests.count("delete_object") == 3
    assert (objects.conditional, objects.removes) == (True, False)


def test_probes_of_earlier_mounts_are_removed(server: Server) -> None:
    """Only those that no mount can need any more, and nothing else."""
    old, new, other, deep = (f"data/root/{temporary_name()}" for _ in range(4))
    other_objects = [new, f"{other}x", "data/root/.shardfs-notes.tmp", f"data/root/a/{deep.rpartition('/')[2]}"]
    for path in (old, *other_objects):
        server.objects[path] = Object(b"1", {})
        server.objects[path].written -= 2 * ABANDONED_S if path != new else ABANDONED_S / 2
    open_writer(s3_store(server))
    assert sorted(server.objects) == sorted(other_objects)


def test_a_mount_without_the_right_to_list_probes_all_the_same(server: Server) -> None:
    server.fault = lambda number, name: "forbid" if name == "list_objects" else ""
    assert tried(server).removes


def test_probes_of_a_store_that_is_only_compared_are_removed() -> None:
    fs = Moving()
    fs.pipe_file("/root/.shardfs-0123456789abcdef.tmp", b"old")
    fs.pipe_file("/root/.shardfs-0123456789abcde0.tmp", b"new")
    (old, _) = fs.store.values()
    old.created = old.created.replace(year=2001)
    open_writer(FsspecStore(fs, "/root"), alone=True)
    assert list(fs.store) == ["/root/.shardfs-0123456789abcde0.tmp"]


class Faulty(Moving):
    """Each call named in `lost` is executed once, and its answer lost; all of those in `down` fail."""

    protocol = "faulty"

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.lost, self.down = set[str](), set[str]()

    def _call(self, name: str, *args: object, **kwargs: object) -> None:
        if name in self.down:
            raise ConnectionResetError("down")
        getattr(super(), name)(*args, **kwargs)
        if name in self.lost:
            self.lost.remove(name)
            raise ConnectionResetError("lost")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        self._call("pipe_file", path, value, mode, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: object) -> None:
        if path1 not in self.store:
            raise FileNotFoundError(path1)
        self._call("mv", path1, path2, **kwargs)

    def rm_file(self, path: str) -> None:
        if path not in self.store:
            raise FileNotFoundError(path)
        self._call("rm_file", path)


@pytest.mark.parametrize("name", ["pipe_file", "mv", "rm_file"])
def test_lost_answers_of_a_store_that_is_only_compared(name: str) -> None:
    fs = Faulty()
    fs.lost = {name}
    writer = open_writer(FsspecStore(fs, "/root"), alone=True)
    writer.put(KEY, b"1")
    writer.put(KEY, b"2")
    assert fs.store[f"/root/{KEY}"].getvalue() == b"2"
    fs.lost = {name}
    writer.delete(KEY)
    assert not fs.store
    assert fs.lost == ({name} - {"rm_file"})


@pytest.mark.parametrize("name", ["pipe_file", "rm_file"])
def test_a_store_that_is_down_is_not_one_that_cannot_be_written(name: str) -> None:
    fs = Faulty()
    fs.down = {name}
    with pytest.raises(OSError, match=r"down.*Try again later"):
        open_writer(FsspecStore(fs, "/root", retry=RetryPolicy(60, 1)), alone=True)


def test_a_crash_leaves_no_temporary_file_beside_the_shard() -> None:
    fs = Faulty()
    writer, notes = open_writer(FsspecStore(fs, "/root", retry=RetryPolicy(60, 0)), alone=True), list[Begun]()
    fs.down = {"mv"}
    with pytest.raises(OSError, match="down"):
        writer.update(KEY, Steps(lambda _: [b"1"], notes.append))
    assert len(fs.store) == 1
    writer.recover(notes[0])
    assert not fs.store


# ---- uploads in parts


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "reset", "busy", "error", "late error"])
def test_a_fault_at_any_request_of_the_probe_of_parts(fault: str, holds: bool, server: Server) -> None:
    for at in range(9):
        server.reset()
        server.heeds = ALL if holds else ALL - {"complete"}
        server.fault = lambda number, name, at=at: fault if number == at else ""  # type: ignore[misc]
        store = s3_store(server)
        writer = ObjectWriter(store, S3Objects(store, SMALL))
        writer.put(KEY, bytes(100))
        assert list(server.objects) == [f"data/root/{KEY}"], at
        server.requests.clear()
        server.fault = lambda number, name: ""
        writer.put(KEY, bytes(100))
        assert ("complete_multipart_upload" in server.requests) is holds, at


def test_a_store_that_rejects_conditions_of_parts_is_sent_whole_objects(server: Server) -> None:
    server.rejects = {"complete": 501}
    store = s3_store(server)
    writer = ObjectWriter(store, S3Objects(store, SMALL))
    writer.put(KEY, bytes(100))
    assert server.objects[f"data/root/{KEY}"].data == bytes(100)
    assert server.requests.count("complete_multipart_upload") == 1


# ---- own effects


@pytest.mark.parametrize("fault", ["lost", "late error"])
def test_a_delete_whose_answer_is_lost_is_done_once(fault: str, server: Server) -> None:
    """The repetition is refused, as the object is gone; nobody else has done that."""
    writer = ObjectWriter(s3_store(server), tried(server))
    writer.put(KEY, b"1")
    server.missing = 412
    seen: list[object] = []
    first = iter([fault])
    server.fault = lambda number, name: next(first, "") if name == "delete_object" else ""
    writer.update(KEY, Steps(lambda old: seen.append(old)))
    assert len(seen) == 1
    assert not server.objects


def test_what_happened_is_not_guessed_while_the_store_does_not_say(server: Server) -> None:
    """A refused repetition and a look that fails: an error to try again after, not another writer's change."""
    writer = ObjectWriter(s3_store(server, RetryPolicy(60, 1)), tried(server))
    first = iter(["lost"])

    def fault(number: int, name: str) -> str:
        return next(first, "") if name == "put_object" else "busy" if name == "head_object" else ""

    server.fault = fault
    with pytest.raises(OSError, match="Service Unavailable"):
        writer.put(KEY, b"1")


# ---- through the command line


@pytest.mark.fuse
def test_a_mount_survives_lost_answers_and_refuses_what_it_cannot_know(server: Server, tmp_path: Path) -> None:
    """With botocore's own retries, which are below those of shardfs."""
    need_fuse()
    target = TARGETS["zarr_end"]
    filled(target, server, tmp_path / "natively", {0: 1})
    words = in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})
    with writable("s3://data/root", tmp_path, *words, "-o", "store_retries=1") as mount:  # type: ignore[arg-type]
        for name, fault in (("put_object", "lost"), ("put_object", "late error"), ("delete_object", "lost")):
            first = iter([fault])
            server.fault = lambda number, asked, name=name, first=first: next(first, "") if asked == name else ""  # type: ignore[misc]
            mount.mount()
            assert next(first, None) is None, "the fault was not reached"
            assert mount.umount().returncode == 0
            assert not any("shardfs" in key for key in server.objects)
        server.fault = lambda number, asked: "error" if asked == "delete_object" else ""
        with pytest.raises(MountFailed) as refused:
            mount.mount()
        said = str(refused.value)
        assert "Traceback" not in said
        assert re.search(r"heeds conditional requests.*InternalError", said)
        assert refused.value.returncode == 3
        server.fault = lambda number, asked: ""
        server.heeds = ALL - {"put"}
        with pytest.raises(MountFailed, match=r"no conditional writes.*mount it read-only, or write to S3") as refused:
            mount.mount()
        assert refused.value.returncode == 4
