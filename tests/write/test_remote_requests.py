"""Requests and bytes of publishing to an object store, and what uploads at the same time do to each other."""

from __future__ import annotations

import errno
import json
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.blobs import Suffix
from shardfs.storage.writers.objects import ObjectWriter
from shardfs.storage.writers.s3 import S3Objects
from tests.conftest import need_fuse
from tests.mount.distant import in_words
from tests.write.mounts import writable
from tests.write.object_store import Server
from tests.write.steps import Steps
from tests.write.targets import TARGETS, Target
from tests.write.test_object_writer import s3_store
from tests.write.test_remote_writes import ROOT, Other, arrived, filled, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardfs.model.blobs import Blob, Plan
    from tests.write.mounts import WritableMount

pytestmark = [pytest.mark.s3, pytest.mark.interop]

INDEX = 4 * 16 + 4
"""Bytes of the index of a shard of `TARGETS["zarr_end"]`: four chunks, and a checksum."""


class Traffic:
    """The requests since the last `begin`, without those of the lock object."""

    def __init__(self, server: Server) -> None:
        self._server, self._begin = server, 0

    def begin(self) -> None:
        self._begin = len(self._server.requests)

    def names(self, path: str = "") -> list[str]:
        listed = zip(self._server.requests[self._begin :], self._server.paths[self._begin :], strict=True)
        return [name for name, p in listed if p.startswith(path) and not p.endswith(".shardfs.lock")]

    def nbytes(self, path: str) -> tuple[int, int]:
        """Sent to objects at these paths, and received from them."""
        listed = zip(self._server.bodies[self._begin :], self._server.paths[self._begin :], strict=True)
        matching = [body for body, p in listed if p.startswith(path)]
        return sum(up for up, _ in matching), sum(down for _, down in matching)


@contextmanager
def mounted(server: Server, tmp_path: Path) -> Iterator[WritableMount]:
    need_fuse()
    words = [*in_words({k: v for k, v in server.options().items() if k in ("key", "secret", "client_kwargs")})]
    with writable("s3://data/root", tmp_path, *words, "-o", "idle=3600,age=3600") as mount:  # type: ignore[arg-type]
        mount.mount()
        yield mount
        assert mount.umount().returncode == 0


def store_as_tensorstore(path: Path, data: bytes) -> None:
    """Through a lock file that becomes the chunk, after looks at names that are not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.__lock")
    assert not lock.exists()
    lock.write_bytes(data)
    lock.rename(path)


def numbers_of_a_shard(target: Target) -> tuple[str, list[int]]:
    key, numbers = next(iter(target.shards().items()))
    return f"{ROOT}/{key}", numbers


@pytest.mark.fuse
def test_a_new_shard(server: Server, tmp_path: Path) -> None:
    target, traffic = TARGETS["zarr_end"], Traffic(server)
    filled(target, server, tmp_path / "natively", {})
    key, numbers = numbers_of_a_shard(target)
    with mounted(server, tmp_path) as mount:
        traffic.begin()
        for number in numbers:
            store_as_tensorstore(mount.path / target.path(number), target.shown(1 + number))
        assert mount.flush().returncode == 0
        assert traffic.names(key).count("put_object") == 1
        assert len(traffic.names(key)) <= 3
        assert traffic.names().count("list_objects") <= 1
        assert len(traffic.names()) <= 8
        up, down = traffic.nbytes(key)
        assert (up, down) == (len(server.objects[key].data), down)
    assert (arrived(target, server, tmp_path / "after") == target.array({n: 1 + n for n in numbers})).all()


@pytest.mark.fuse
def test_a_shard_of_which_all_chunks_are_replaced(server: Server, tmp_path: Path) -> None:
    """Only new bytes are sent, and of the old shard only its index is read."""
    target, traffic = TARGETS["zarr_end"], Traffic(server)
    tokens = {number: 1 + number for number in range(len(target.chunks))}
    filled(target, server, tmp_path / "natively", tokens)
    key, numbers = numbers_of_a_shard(target)
    with mounted(server, tmp_path) as mount:
        traffic.begin()
        for number in numbers:
            tokens[number] = 100 + number
            store_as_tensorstore(mount.path / target.path(number), target.shown(tokens[number]))
        assert mount.flush().returncode == 0
        new = sum(len(target.shown(tokens[number])) for number in numbers)
        up, down = traffic.nbytes(key)
        assert up == new + INDEX
        assert up <= 1.1 * new
        assert down <= 3 * INDEX
        assert traffic.names().count("list_objects") <= 1
        assert traffic.names(key).count("put_object") == 1
        assert (mount.path / target.path(numbers[0])).read_bytes() == target.shown(tokens[numbers[0]])
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_many_shards_of_which_all_chunks_are_replaced(server: Server, tmp_path: Path) -> None:
    """The publish of one does not make the others' indices be read again."""
    target, traffic, tokens = TARGETS["zarr_end"], Traffic(server), dict[int, int]()
    filled(target, server, tmp_path / "natively", {number: 1 + number for number in range(len(target.chunks))})
    with opened(server, tmp_path) as fs:
        traffic.begin()
        for numbers in target.shards().values():
            overwrite(fs, target, tokens, numbers)
            fs.publish()
        assert all(len(traffic.names(f"{ROOT}/{key}")) <= 4 for key in target.shards())
        assert traffic.names().count("list_objects") <= 1
        assert sum(traffic.nbytes(f"{ROOT}/{key}")[0] for key in target.shards()) <= 1.1 * sum(
            len(target.shown(token)) for token in tokens.values()
        )
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def overwrite(fs: ShardFileSystem, target: Target, tokens: dict[int, int], numbers: Sequence[int]) -> None:
    for number in numbers:
        tokens[number] = 100 + number
        fs.pipe_file(target.path(number), target.shown(tokens[number]))


@pytest.mark.parametrize("name", ["zarr_end", "zarr_start", "precomputed_gzip"])
def test_a_sparse_shard_is_replaced_as_well(name: str, server: Server, tmp_path: Path) -> None:
    """All chunks that it has, although the array has more."""
    target, traffic = TARGETS[name], Traffic(server)
    key, numbers = numbers_of_a_shard(target)
    present = numbers[:3]
    tokens = {number: 1 + number for number in present}
    filled(target, server, tmp_path / "natively", tokens)
    before = len(server.objects[key].data)
    with opened(server, tmp_path) as fs:
        traffic.begin()
        overwrite(fs, target, tokens, present)
        fs.publish()
        assert len(server.objects[key].data) <= 1.05 * before
        assert traffic.nbytes(key)[0] == len(server.objects[key].data)
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("name", ["zarr_end", "zarr_start", "zarr_gzip_after", "precomputed_gzip", "n5"])
def test_writing_over_a_chunk_does_not_read_it(name: str, server: Server, tmp_path: Path) -> None:
    """Only the index of its shard is received, once. With a codec around the shard, that is the whole shard."""
    target, traffic = TARGETS[name], Traffic(server)
    filled(target, server, tmp_path / "natively", {number: 1 + number for number in range(len(target.chunks))})
    key, (first, *other_numbers, _) = numbers_of_a_shard(target)
    with opened(server, tmp_path) as fs:
        traffic.begin()
        fs.pipe_file(target.path(first), target.shown(100))
        gets = traffic.names(key).count("get_object")
        received = traffic.nbytes(key)[1]
        traffic.begin()
        for number in other_numbers:
            fs.pipe_file(target.path(number), target.shown(100))
        if name == "precomputed_gzip":  # the shard index, and the indices of two minishards
            assert gets + traffic.names(key).count("get_object") <= 5
            assert received + traffic.nbytes(key)[1] < 200
        else:
            assert (gets, received) == (1, len(server.objects[key].data) if name == "zarr_gzip_after" else INDEX)
            assert traffic.nbytes("") == (0, 0)
        if name in ("zarr_end", "zarr_start", "n5"):
            assert traffic.names() == []


@pytest.mark.parametrize(("unchanged", "options"), [(1, {}), (0, {"compact": "never"})])
def test_old_offsets_stay_valid_unless_all_chunks_are_replaced(
    unchanged: int, options: dict[str, str], server: Server, tmp_path: Path
) -> None:
    target = TARGETS["zarr_end"]
    key, numbers = numbers_of_a_shard(target)
    tokens = {number: 1 + number for number in numbers}
    filled(target, server, tmp_path / "natively", tokens)
    before = server.objects[key].data
    with opened(server, tmp_path, **options) as fs:
        overwrite(fs, target, tokens, numbers[unchanged:])
        fs.publish()
    assert server.objects[key].data.startswith(before)
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_chunks_outside_of_the_array_stay(server: Server, tmp_path: Path) -> None:
    """An array has shrunk. As many chunks of a shard are written as it has, but not the same."""
    target = TARGETS["zarr_end"]
    tokens = {number: 1 + number for number, coords in enumerate(target.chunks) if coords[0] == 0}
    filled(target, server, tmp_path / "natively", tokens)
    document = server.objects[f"{ROOT}/{target.document}"].data
    small = json.loads(document)
    small["shape"][1] -= target.chunk[1]
    server.put(f"{ROOT}/{target.document}", json.dumps(small).encode())
    inside = [number for number, coords in enumerate(target.chunks) if coords[0] < 2 and coords[1] == 2]
    with opened(server, tmp_path) as fs:
        overwrite(fs, target, tokens, inside)
        fs.publish()
    server.put(f"{ROOT}/{target.document}", document)
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_a_reader_with_the_old_index_gets_no_wrong_bytes(server: Server, tmp_path: Path) -> None:
    """Each version of a chunk that it reads is one that was there, although chunks lie elsewhere now."""
    target = TARGETS["zarr_end"]
    _, numbers = numbers_of_a_shard(target)
    filled(target, server, tmp_path / "natively", {})
    other, tokens = Other(server, target), dict[int, int]()
    for number in reversed(numbers):  # so that each chunk is where another one will be
        tokens[number] = 1 + number
        other.write(number, tokens[number])
    reader = ShardFileSystem(source="s3://data/root", storage_options=server.options(), skip_instance_cache=True)
    assert reader.cat_file(target.path(numbers[0])) == target.shown(tokens[numbers[0]])
    with opened(server, tmp_path) as fs:
        before = dict(tokens)
        overwrite(fs, target, tokens, numbers)
        fs.publish()
    for number in numbers:
        with suppress(OSError):
            assert reader.cat_file(target.path(number)) in (target.shown(before[number]), target.shown(tokens[number]))


def test_a_shard_that_another_program_has_created(server: Server, tmp_path: Path) -> None:
    """It is expected to be absent, so its content is not asked for before the put, which is refused."""
    target = TARGETS["zarr_end"]
    _, numbers = numbers_of_a_shard(target)
    filled(target, server, tmp_path / "natively", {})
    tokens: dict[int, int] = {}
    with opened(server, tmp_path) as fs:
        overwrite(fs, target, tokens, numbers[:2])
        Other(server, target).write(numbers[3], 600)
        fs.publish()
    tokens[numbers[3]] = 600
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_what_is_stored_already_is_not_stored_again(server: Server, tmp_path: Path) -> None:
    """Chunks of the same size are compared with the stored ones. Of a shard in which all are equal, nothing is sent."""
    target, traffic = TARGETS["zarr_end"], Traffic(server)
    key, numbers = numbers_of_a_shard(target)
    tokens = {number: 1 + number for number in numbers}
    filled(target, server, tmp_path / "natively", tokens)
    before = len(server.objects[key].data)
    with opened(server, tmp_path) as fs:
        fs.pipe_file(target.path(numbers[0]), target.shown(tokens[numbers[0]]))
        traffic.begin()
        fs.publish()
        assert traffic.names(key) == ["get_object"]
        assert traffic.names() == ["get_object"] * 2  # the array's document
        overwrite(fs, target, tokens, numbers[:1])
        fs.pipe_file(target.path(numbers[1]), target.shown(tokens[numbers[1]]))
        fs.publish()
        assert len(server.objects[key].data) == before + len(target.shown(1)) + INDEX
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


@pytest.mark.parametrize("held_before", [False, True])
@pytest.mark.parametrize("fault", ["lost", "late error", "reset", "busy", "cut"])
def test_a_put_that_goes_wrong(fault: str, held_before: bool, server: Server, tmp_path: Path) -> None:
    """Of a shard that is new, and of one that is replaced. Nothing is stored twice, and nobody reports a conflict."""
    target, faults = TARGETS["zarr_end"], [fault]
    key, numbers = numbers_of_a_shard(target)
    tokens = {number: 1 + number for number in numbers} if held_before else {}
    filled(target, server, tmp_path / "natively", tokens)
    with opened(server, tmp_path) as fs:
        server.fault = lambda number, name: faults.pop() if faults and name == "put_object" else ""
        overwrite(fs, target, tokens, numbers)
        with suppress(OSError):
            fs.publish(timeout=120)
        fs.publish(timeout=120)
        assert not faults
        assert len(server.objects[key].data) == sum(len(target.shown(tokens[number])) for number in numbers) + INDEX
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


@pytest.mark.parametrize("held_before", [False, True])
def test_a_crash_after_the_put(
    held_before: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal does not know that the put has succeeded. The next mount finds the chunks in the shard."""
    target = TARGETS["zarr_end"]
    key, numbers = numbers_of_a_shard(target)
    tokens = {number: 1 + number for number in numbers} if held_before else {}
    filled(target, server, tmp_path / "natively", tokens)
    with monkeypatch.context() as patch, opened(server, tmp_path) as fs:
        patch.setattr("shardfs.write.publisher.Publisher._arrived", raises)
        overwrite(fs, target, tokens, numbers)
        with pytest.raises(OSError, match="killed"):
            fs.publish(timeout=30)
    source_bytes = server.objects[key]
    with opened(server, tmp_path) as fs:
        fs.publish(timeout=120)
        assert fs.cat_file(target.path(numbers[0])) == target.shown(tokens[numbers[0]])
    assert server.objects[key] is source_bytes
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def raises(*_: object) -> None:
    raise OSError(errno.EACCES, "killed")


def test_temporary_files_in_the_store_are_not_asked_for(server: Server, tmp_path: Path) -> None:
    target, traffic = TARGETS["zarr_end"], Traffic(server)
    filled(target, server, tmp_path / "natively", {0: 1})
    for name in ("0.__lock", "0.partial/inside"):
        server.put(f"{ROOT}/c/0/{name}", b"left behind")
    with opened(server, tmp_path) as fs:
        assert sorted(path.rpartition("/")[2] for path in fs.ls("c/0", detail=False)) == ["0"]
        traffic.begin()
        assert not fs.exists("c/0/0.__lock")
        assert not fs.exists("c/0/0.partial")
        assert traffic.names() == []


# ---- several shards


class Overlaps:
    """Holds uploads until as many as expected are under way, or so many seconds have passed."""

    def __init__(self, server: Server, expected: int, seconds: float) -> None:
        self._server, self._expected, self._seconds = server, expected, seconds
        self._changed, self._now, self.most = threading.Condition(), 0, 0

    def __call__(self, number: int, name: str) -> str:
        if name == "put_object" and not self._server.paths[number].endswith(".shardfs.lock"):
            with self._changed:
                self._now += 1
                self.most = max(self.most, self._now)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most >= self._expected, self._seconds)
                self._now -= 1
        return ""


def filling(target: Target, fs: ShardFileSystem) -> Mapping[int, int]:
    """Write to all shards, but no shard completely: then it would be published at once."""
    held: dict[int, int] = {}
    overwrite(fs, target, held, [number for numbers in target.shards().values() for number in numbers[1:]])
    return held


@pytest.mark.parametrize("connections", [1, 2, 64])
def test_shards_are_uploaded_at_the_same_time(connections: int, server: Server, tmp_path: Path) -> None:
    target = TARGETS["zarr_end"]
    filled(target, server, tmp_path / "natively", {})
    wanted = min(connections, len(target.shards()))
    with opened(server, tmp_path, connections=str(connections)) as fs:
        server.fault = overlaps = Overlaps(server, wanted, 50)
        tokens = filling(target, fs)
        fs.publish()
        assert overlaps.most == wanted
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_a_shard_that_cannot_be_uploaded_does_not_harm_the_others(server: Server, tmp_path: Path) -> None:
    """They have arrived when the flush reports the error."""
    target = TARGETS["zarr_end"]
    filled(target, server, tmp_path / "natively", {})
    bad, *other_shards = target.shards()

    def forbid(number: int, name: str) -> str:
        return "forbid" if name == "put_object" and server.paths[number] == f"{ROOT}/{bad}" else ""

    with opened(server, tmp_path) as fs:
        server.fault = forbid
        tokens = filling(target, fs)
        with pytest.raises(PermissionError, match=bad):
            fs.publish()
        assert {f"{ROOT}/{key}" for key in other_shards} <= server.objects.keys()
        assert f"{ROOT}/{bad}" not in server.objects
        server.fault = lambda number, name: ""
        fs.publish()
    assert (arrived(target, server, tmp_path / "after") == target.array(tokens)).all()


def test_uploads_share_a_limit_of_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fit. Each holds the pieces and the whole; a larger one is sent alone."""
    monkeypatch.setattr("shardfs.storage.writers.objects.MOST_HELD", 400)
    store = s3_store(server)
    writer = ObjectWriter(store, S3Objects(store))
    server.fault = overlaps = Overlaps(server, 3, 1)
    keys = [f"a/{i}" for i in range(4)]
    threads = [threading.Thread(target=writer.put, args=(key, bytes(100))) for key in keys]
    for thread in threads:
        thread.start()
    writer.put("a/large", bytes(1000))
    for thread in threads:
        thread.join(60)
    assert {f"{ROOT}/{key}" for key in (*keys, "a/large")} <= server.objects.keys()
    assert overlaps.most <= 2


def test_the_end_of_an_object_is_enough(server: Server) -> None:
    store = s3_store(server)
    writer, traffic = ObjectWriter(store, S3Objects(store)), Traffic(server)
    server.put(f"{ROOT}/a/shard", bytes(range(100)))
    got: list[bytes] = []

    def make(old: Blob | None) -> Plan:
        assert old is not None
        got.extend(old.read([Suffix(4), Suffix(10)]))
        return [b"new"]

    traffic.begin()
    writer.update("a/shard", Steps(make, first=Suffix(10)))
    assert got == [bytes(range(96, 100)), bytes(range(90, 100))]
    assert traffic.names() == ["get_object", "put_object"]
    assert traffic.nbytes("") == (3, 10)
    writer.update("a/shard", Steps(lambda old: [b"other"] if old is None else [b"seen"], first=None))
    assert server.objects[f"{ROOT}/a/shard"].data == b"seen"


@pytest.mark.fuse
def test_a_mount_of_moto(moto_url: str, tmp_path: Path) -> None:
    """A new shard, and the same shard with all chunks replaced: its size says which bytes were sent."""
    target, moto = TARGETS["zarr_end"], Server(url=moto_url)
    client = s3_store(moto).fs
    client.call_s3("create_bucket", Bucket="data")
    (tmp_path / "natively").mkdir()
    target.create(tmp_path / "natively")
    client.pipe_file(f"{ROOT}/{target.document}", (tmp_path / "natively" / target.document).read_bytes())
    key, numbers = numbers_of_a_shard(target)
    with mounted(moto, tmp_path) as mount:
        for token in (1, 100):
            for number in numbers:
                store_as_tensorstore(mount.path / target.path(number), target.shown(token + number))
            assert mount.flush().returncode == 0
            assert len(client.cat_file(key)) == sum(len(target.shown(1)) for _ in numbers) + INDEX
    for path in (key, f"{ROOT}/{target.document}"):
        moto.put(path, client.cat_file(path))
    assert (arrived(target, moto, tmp_path / "after") == target.array({n: 100 + n for n in numbers})).all()
