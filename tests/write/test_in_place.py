"""`inplace=uint64`: shards that are changed where they lie. Every step, every crash and error, who else is there."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.jobs.verify import ShardVerifier
from shardfs.model.changes import Begun
from shardfs.model.shard_format import Put
from shardfs.shards import rewriting
from shardfs.shards.rewriting import StoredShard
from shardfs.storage import syscalls
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
from shardfs.vfs.tree import open_tree
from tests import handmade, handmade_ids
from tests.write.hooks import Recorder, fail, hooked, in_child
from tests.write.steps import Steps, nobody
from tests.write.test_rewriting import precomputed

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path

    from shardfs.model.blobs import Blob, Plan, Stat
    from shardfs.model.collection import Collection
    from shardfs.model.values import Coords

BITS = 2
HEADER = 16 << BITS
IDS = [*range(40), 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
Chunks = dict[Any, bytes]


def chunks_in(shard: bytes, *, deflated: bool = False, meshes: bool = False) -> Chunks:
    """By id, as Neuroglancer's specification has it; of meshes the fragments by (id, 1), too."""
    out: Chunks = {}
    for start, stop in struct.iter_unpack("<QQ", shard[:HEADER]):
        raw = shard[HEADER + start : HEADER + stop]
        assert len(raw) == stop - start
        raw = gzip.decompress(raw) if deflated and raw else raw
        n, key, end = len(raw) // 24, 0, HEADER
        numbers = struct.unpack(f"<{3 * n}Q", raw)
        for delta, gap, size in zip(numbers[:n], numbers[n : 2 * n], numbers[2 * n :], strict=True):
            key, begin = (key + delta) % 2**64, (end + gap) % 2**64
            end = begin + size
            assert HEADER <= begin <= end <= len(shard)
            out[key] = shard[begin:end]
            if meshes:
                (before,) = struct.unpack("<I", shard[end - 4 : end])
                out[key, 1] = shard[begin - before : begin]
    return out


class Place:
    """A directory with one shard."""

    key = "s/0.shard"

    def __init__(self, top: Path, *, index: str = "raw", meshes: bool = False) -> None:
        self.top, self.path, self.deflated, self.meshes = top, top / self.key, index == "gzip", meshes
        self.spec = handmade.sharding(minishard=BITS, shard=0, index=index)
        info = handmade_ids.MESHES if meshes else handmade_ids.SKELETONS
        self.collection: Collection = precomputed({**info, "sharding": self.spec})
        handmade.write_json(top / "s" / "info", {**info, "sharding": self.spec})
        self.old: Chunks = {}
        self.new: Chunks = {}
        self.writer = LocalWriter(LocalStore(str(top)))
        self.writer.update("s/other", Steps(lambda _: None))  # the directory's name is on disk

    def make(self, puts: Chunks, drops: Set[Any] = frozenset(), **how: Any) -> Callable[[Blob | None], Plan | None]:
        def coords(key: Any) -> Coords:
            if isinstance(key, tuple):
                return key
            return (key, 0) if self.meshes else (key,)

        new = {coords(key): Put(data) for key, data in puts.items()}
        return lambda old: StoredShard(self.collection, 0, old).plan(new, set(map(coords, drops)), **how)

    def update(
        self,
        make: Callable[[Blob | None], Plan | None],
        begun: Callable[[Begun], object] = nobody,
        check: Callable[[Blob], object] = nobody,
    ) -> Stat | None:
        def tell(note: Begun) -> None:
            begun(note)

        def look(new: Blob) -> None:
            check(new)

        return self.writer.update(self.key, Steps(make, tell, look, in_place=rewriting.in_place(self.collection)))

    @property
    def found(self) -> Chunks:
        return chunks_in(self.path.read_bytes(), deflated=self.deflated, meshes=self.meshes)

    @property
    def identity(self) -> tuple[int, int, int]:
        info = self.path.stat()
        return info.st_ino, info.st_size, info.st_mtime_ns

    def names(self) -> list[str]:
        return sorted(set(os.listdir(self.top / "s")) - {"info"})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def some(chance: random.Random, turn: int, *, meshes: bool) -> Chunks:
    out: Chunks = {}
    for key in chance.sample(IDS, 5):
        data = b"%d of %d," % (turn, key) * chance.randrange(1, 30)
        out |= {key: handmade_ids.manifest([[len(data)]]), (key, 1): data} if meshes else {key: data}
    return out


# --------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("meshes", [False, True], ids=["skeletons", "meshes"])
@pytest.mark.parametrize("index", ["raw", "gzip"])
def test_rounds_of_changes(index: str, meshes: bool, tmp_path: Path) -> None:
    """The file stays the same one, what was in it stays where it was, and who has an old index reads old chunks."""
    place, chance = Place(tmp_path, index=index, meshes=meshes), random.Random(4)
    wanted: Chunks = {}
    before = b""
    for turn in range(20):
        puts = some(chance, turn, meshes=meshes)
        drops = {key for key in chance.sample(IDS, 3) if key not in puts}
        drops |= {(key, 1) for key in drops} if meshes else set()
        expected = dict(wanted)
        number = place.path.stat().st_ino if before else None
        stat = place.update(place.make(puts, drops))
        wanted = {key: data for key, data in {**wanted, **puts}.items() if key not in drops}
        shard = place.path.read_bytes()
        assert stat == LocalStore(str(tmp_path)).entry(place.key).stat
        assert place.found == wanted
        if before:
            assert place.path.stat().st_ino == number
            assert len(shard) > len(before)
            assert shard[HEADER : len(before)] == before[HEADER:]
            assert chunks_in(before[:HEADER] + shard[HEADER:], deflated=index == "gzip", meshes=meshes) == expected
        before = shard
    assert place.names() == ["0.shard"]
    if not meshes:
        base = {"driver": "file", "path": f"{tmp_path}/s/"}
        store = ts.KvStore.open(
            {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": place.spec}
        ).result()
        natively = {key: store.read(key.to_bytes(8, "big")).result() for key in IDS}
        assert {key: bytes(r.value) for key, r in natively.items() if r.state == "value"} == wanted


def test_a_file_that_gets_no_new_bytes_becomes_another_version_all_the_same(place: Place) -> None:
    """The last chunk of a minishard goes: nothing is written but an empty entry."""
    place.update(place.make({0: b"zero", 1: b"one"}))
    number, size, _ = place.identity
    place.update(place.make({}, {1}))
    assert place.identity[:2] == (number, size + 16)
    assert place.found == {0: b"zero"}
    usage = StoredShard(place.collection, 0, LocalStore(str(place.top)).open(place.key)).usage()
    assert usage.dead == len(b"one") + 24 + 16


def test_times_go_on_where_the_clock_is_coarse(place: Place) -> None:
    """tensorstore tells versions by them."""
    place.update(place.make({0: b"zero"}))
    tick = place.identity[2]

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        out = function(*args)
        if name == "pwrite":
            os.utime(place.path, ns=(tick, tick))
        return out

    with hooked(hook):
        place.update(place.make({0: b"more"}))
    assert place.identity[2] == tick + 1
    assert place.found == {0: b"more"}


@pytest.mark.parametrize("way", ["new", "named twice", "gone", "packed", "not asked for"])
def test_else_it_is_replaced_as_ever(way: str, place: Place) -> None:
    make = place.make({0: b"new"})
    if way != "new":
        place.update(place.make({0: b"zero", 1: b"one"}))
        place.update(place.make({0: b"0"}))
    if way == "named twice":
        os.link(place.path, place.top / "backup")
    if way == "gone":
        make = place.make({}, {0, 1})
    if way == "packed":
        make = place.make({0: b"new"}, pack=True)
    before = place.path.read_bytes() if way != "new" else b""
    with hooked(recorder := Recorder()):
        place.writer.update(place.key, Steps(make, in_place=0 if way == "not asked for" else 16))
    assert {"exchange", "rename_new"} & set(recorder.names)
    if way == "gone":
        assert place.names() == []
    else:
        assert place.found == ({0: b"new"} if way == "new" else {0: b"new", 1: b"one"})
    if way == "named twice":
        assert (place.top / "backup").read_bytes() == before


# ------------------------------------------------------------------------------------------- crashes and errors

OLD: Chunks = {0: b"zero", 1: b"one", 4: b"four", 2: b"two"}
PUTS: Chunks = {0: b"changed", 8: b"added", 2: b"changed, too"}
NEW: Chunks = {0: b"changed", 8: b"added", 2: b"changed, too", 4: b"four"}


def prepared(place: Place) -> Callable[[Blob | None], Plan | None]:
    """The shard as it is at first; and how it is changed, in three minishards."""
    place.path.unlink(missing_ok=True)

    def fragments(data: bytes) -> bytes:
        return data * 10

    def both(chunks: Chunks) -> Chunks:
        if not place.meshes:
            return chunks
        firsts = {key: handmade_ids.manifest([[len(fragments(data))]]) for key, data in chunks.items()}
        return firsts | {(key, 1): fragments(data) for key, data in chunks.items()}

    place.update(place.make(both(OLD)))
    place.old, place.new = both(OLD), both(NEW)
    return place.make(both(PUTS), {1, (1, 1)} if place.meshes else {1})


def is_mixed(place: Place) -> bool:
    """Whether each chunk is the old or the new one, and those of a minishard, and files of a mesh, go together."""
    old, new, present = place.old, place.new, place.found

    def minishard(chunks: Chunks, page: int) -> Chunks:
        return {k: v for k, v in chunks.items() if (k[0] if isinstance(k, tuple) else k) % (1 << BITS) == page}

    return all(minishard(present, page) in (minishard(old, page), minishard(new, page)) for page in range(1 << BITS))


def calls(place: Place) -> list[str]:
    make = prepared(place)
    with hooked(recorder := Recorder()):
        place.update(make)
    assert place.found == place.new
    return recorder.names


@pytest.mark.parametrize("meshes", [False, True], ids=["skeletons", "meshes"])
@pytest.mark.parametrize("behind", [False, True])
def test_killed_at_every_call(behind: bool, meshes: bool, tmp_path: Path) -> None:
    place, log, states = Place(tmp_path, index="gzip", meshes=meshes), tmp_path / "begun", set()
    for at in range(len(calls(place))):
        make = prepared(place)
        log.unlink(missing_ok=True)

        def job(at: int = at, make: Callable[[Blob | None], Plan | None] = make) -> None:
            syscalls.hook = Recorder(at, lambda: os._exit(9), behind=behind)
            place.update(make, lambda begun: log.write_text(json.dumps(begun._asdict())))

        assert in_child(job) == 9, at
        assert is_mixed(place), at
        states.add(tuple(sorted(place.found.items(), key=str)))
        before = place.identity
        for _ in range(2):
            if log.exists():
                place.writer.recover(Begun.from_json(json.loads(log.read_text())))
            assert place.identity == before, at
        place.update(make)
        assert place.found == place.new, at
        inode = place.identity
        place.update(make)
        assert place.identity == inode, at
        assert place.names() == ["0.shard"], at
    assert len(states) == 4  # three entries, one after the other


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_call(number: int, place: Place) -> None:
    """Before an entry is changed it leaves no trace; and trying again does all that was not done."""
    names = calls(place)
    entries = [i for i, name in enumerate(names) if name == "pwrite"][1:]
    for at, name in enumerate(names[:-1]):
        make = prepared(place)
        before, shard = place.identity, place.path.read_bytes()
        with hooked(Recorder(at, fail(number))), pytest.raises(OSError, match=os.strerror(number)):
            place.update(make)
        assert is_mixed(place), name
        if at <= entries[0]:
            assert place.identity == before, name
            assert place.path.read_bytes() == shard, name
        with hooked(recorder := Recorder()):
            place.update(make)
        if at > entries[0]:  # what may have not reached the disk was written once more, as it is
            again = [args for called, args in recorder.calls if called == "pwrite" and args[2] == 0]
            assert len(again[0][1]) == HEADER, name
        assert place.found == place.new, name


def test_a_disk_that_is_full_in_the_middle_of_a_chunk(place: Place) -> None:
    make = prepared(place)
    before = place.identity

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "pwrite" and len(args[1]) > 16:
            function(args[0], args[1][:10], args[2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args)

    for _ in range(3):
        with hooked(hook), pytest.raises(OSError, match="space"):
            place.update(make)
        assert place.identity == before


# ------------------------------------------------------------------------------------------------ who else is there


def put_another_there(place: Place) -> None:
    """A new file, made of the old one by a library that does not lock."""
    rows: list[list[handmade.Entry]] = [[] for _ in range(1 << BITS)]
    for key, data in sorted((place.found | {3: b"theirs"}).items()):
        rows[key % (1 << BITS)].append(handmade.Entry(key, data))
    other = place.path.with_name("other")
    other.write_bytes(handmade.uint64_shard(rows))
    os.rename(other, place.path)


def change_it_too(place: Place, key: int = 3) -> None:
    """As we do, without a lock: it stays the same file."""
    page = key % (1 << BITS)
    chunks = {k: data for k, data in sorted({**place.found, key: b"theirs"}.items()) if k % (1 << BITS) == page}
    start = place.path.stat().st_size - HEADER
    rows, body = [], b"".join(chunks.values())
    for k, data in chunks.items():
        rows.append((k, start, len(data)))
        start += len(data)
    index = handmade.minishard_index(rows)
    with open(place.path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(body + index)
        file.seek(16 * page)
        file.write(struct.pack("<2Q", start, start + len(index)))


def take_it_away(place: Place) -> None:
    place.path.unlink()


@pytest.mark.parametrize("do", [put_another_there, change_it_too])
def test_who_slips_in_loses_nothing(do: Callable[[Place], None], place: Place) -> None:
    """Before each call in turn. But who appends to the same file in the moment in which we do cannot be noticed."""
    names = calls(place)
    for at in range(len(names)):
        if do is change_it_too and at == names.index("pwrite"):
            continue
        make = prepared(place)
        with hooked(Recorder(at, lambda: do(place))):
            place.update(make)
        assert place.found == {**NEW, 3: b"theirs"}, (at, names[at])


def test_who_changes_the_same_minishard_is_noticed_before_its_entry_is_changed(place: Place) -> None:
    names = calls(place)
    writes = [at for at, name in enumerate(names) if name == "pwrite"]
    for at in set(range(len(names))) - {*writes[:2]}:
        make = prepared(place)
        with hooked(Recorder(at, lambda: change_it_too(place, 12))):
            place.update(make)
        assert place.found == {**NEW, 12: b"theirs"}, (at, names[at])


def test_who_removes_it_meanwhile_is_heard(place: Place) -> None:
    names = calls(place)
    for at in range(len(names)):
        make = prepared(place)
        with hooked(Recorder(at, lambda: take_it_away(place))):
            place.update(make)
        assert not place.path.exists() or place.found == PUTS, (at, names[at])


@pytest.mark.parametrize("cached", [False, True])
def test_readers_find_old_or_new_at_every_call(cached: bool, place: Place) -> None:
    """Those of shardfs, who may have opened the file when it was shorter. And `verify` finds no damage."""
    for at, name in enumerate(calls(place)):
        make = prepared(place)
        tree = open_tree(str(place.top / "s"))
        (chunks,) = tree.collections()
        verifier = ShardVerifier(chunks, deep=True)
        tree.store.open("0.shard")

        def look() -> None:
            for key in {*OLD, *NEW}:
                data = chunks.chunks.stored_bytes((key,))  # noqa: B023 - called at once
                assert data in (OLD.get(key), NEW.get(key)), (name, key)  # noqa: B023

        if cached:
            look()
        reading = Looking(at, look)
        with hooked(reading):
            place.update(make)
        look()
        assert verifier.verify(0).findings == []


class Looking(Recorder):
    """Looks before call `at`, and before all that come after it."""

    def __init__(self, at: int, look: Callable[[], None]) -> None:
        super().__init__()
        self._first, self._look = at, look

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if len(self.calls) >= self._first:
            self._look()
        return super().__call__(name, function, args)


def test_verify_looks_again_at_what_changes_meanwhile(place: Place) -> None:
    """It has opened the file when it was shorter than its index is now."""
    make = prepared(place)
    (chunks,) = open_tree(str(place.top / "s")).collections()
    counted: list[int] = []
    verifier = ShardVerifier(chunks, on_chunks=lambda coords, _: counted.append(len(coords)))
    source = chunks.chunks.layer.source
    stored_chunk, turns = source.stored, list[int]()

    def opened(shard: int) -> Blob:
        blob = stored_chunk(shard)
        if not turns:
            place.update(make)
        turns.append(shard)
        return blob

    source.stored = opened  # type: ignore[method-assign]
    report = verifier.verify(0)
    assert report.findings == []
    assert report.tally.chunks == len(NEW)
    assert len(turns) > 1


# -------------------------------------------------------------------------------------------------- the whole of it


def written_to(top: Path, job: Callable[[], None]) -> int:
    """Bytes that reach files below a directory."""
    total = 0

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        nonlocal total
        out = function(*args)
        if name in ("pwrite", "copy_file_range", "clone"):
            fd, size = args[name == "copy_file_range"], args[3] if name == "clone" else out
            total += size if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{top}/") else 0
        return out

    with hooked(hook):
        job()
    return total


def test_what_a_publish_writes(tmp_path: Path) -> None:
    """One chunk of 1,024 in a shard; counted, with the option and without."""
    spec = handmade.sharding(minishard=4, shard=0)
    counted: dict[str, int] = {}
    for inplace in ("never", "uint64"):
        source = tmp_path / inplace
        handmade.write_json(source / "info", handmade.volume_info((128, 128, 64), (8, 8, 16), spec))
        settings = {"journal": str(tmp_path / f"journal-{inplace}"), "inplace": inplace, "idle": "1000"}
        fs = ShardFileSystem(source=str(source), rw=True, write_options=settings, skip_instance_cache=True)
        data = np.zeros((128, 128, 64, 1), np.uint8)
        chunk = np.arange(8 * 8 * 16, dtype=np.uint8)
        for x, y, z in np.ndindex(16, 16, 4):
            name = f"s/{8 * x}-{8 * x + 8}_{8 * y}-{8 * y + 8}_{16 * z}-{16 * z + 16}"
            data[8 * x : 8 * x + 8, 8 * y : 8 * y + 8, 16 * z : 16 * z + 16, 0] = (chunk + x + y).reshape(
                (8, 8, 16), order="F"
            )
            fs.pipe_file(name, (chunk + x + y).tobytes())
        fs.publish(timeout=60)
        (shard,) = source.glob("s/*.shard")
        number = shard.stat().st_ino
        fs.pipe_file("s/0-8_0-8_0-16", bytes(1024))
        data[:8, :8, :16] = 0
        counted[inplace] = written_to(source, lambda: fs.publish(timeout=60))  # noqa: B023 - called at once
        assert (shard.stat().st_ino == number) == (inplace == "uint64")
        assert fs.close(60) == []
        store = {"driver": "file", "path": str(source)}
        values = ts.open({"driver": "neuroglancer_precomputed", "kvstore": store}).result().read().result()
        assert np.array_equal(np.asarray(values), data)
    index = 24 * 64
    assert counted["uint64"] == 1024 + index + 16
    assert counted["never"] > 1024 * 1024
