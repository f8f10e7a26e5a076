"""Blosc2 frames: where their chunks lie, and the sparse frame that is shown of them."""

from __future__ import annotations

import builtins
import shutil
import struct
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.blosc2 import BLOSC2
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.model.shard_format import Put, ShardChange
from shardfs.model.write_plan import bytes_of
from shardfs.shards.byte_layouts.blosc2_frame import Frame, Frames, is_contiguous
from shardfs.shards.index_reader import ShardIndexReader
from shardfs.vfs.tree import open_tree
from tests.data_blosc2 import WRITERS, ZEROS, chunk, frame
from tests.suites import Sparse, ViewSuite
from tests.suites.shard_format import MemoryBlob, Sample, ShardFormatSuite
from tests.suites.walking import walk

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.values import Coords
    from tests.suites.shard_format import Extents

CHUNKS = [chunk(bytes([65 + i]) * 10) for i in range(5)]


def _chunks(data: bytes) -> list[bytes | str | None]:
    """The chunk in each slot; None where it is absent, the reason where it is damaged."""
    frame_chunks = Frame(MemoryBlob(data))
    index = frame_chunks.index().checked(len(data))
    out: list[bytes | str | None] = []
    for i in range(len(frame_chunks.offsets)):
        try:
            extent = index.find(i)
            out.append(None if extent is None else data[extent[0] : sum(extent)])
        except ValueError as e:
            out.append(str(e))
    return out


# ------------------------------------------------------------------------------------------------ the suite


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    chunks = draw(st.integers(1, 20))
    extents: dict[Coords, tuple[int, int]] = {}
    position = 0x57 + 10
    for cell in draw(st.permutations(range(chunks)).map(lambda p: p[: draw(st.integers(0, chunks))])):
        size = draw(st.integers(32, 50))
        extents[(cell,)] = (position, size)
        position += size

    def write(placed: Extents) -> bytes:
        parts = [chunk(bytes(size - 32)) for _, size in placed.values()]
        entries = [(cell[0], start - 0x57 - 10) for cell, (start, _) in placed.items()]
        table = [ZEROS] * chunks
        for i, entry in entries:
            table[i] = entry
        return frame(parts, 9, index=chunk(struct.pack(f"<{chunks}q", *table), 8), nbytes=9 * chunks)

    return Sample(Frames(chunks), st.tuples(st.integers(0, chunks - 1)), lambda _: "", write, st.just(extents))


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return samples()


# -------------------------------------------------------------------------------------------------- layouts


def test_chunks_and_special_chunks() -> None:
    chunks = [CHUNKS[0], None, CHUNKS[2], None]
    blob = MemoryBlob(frame(chunks, 10))
    assert _chunks(frame(chunks, 10)) == chunks
    Frame(blob).index()
    assert len(blob.reads) == 3


def test_a_frame_without_chunks() -> None:
    assert _chunks(frame([], 10)) == []
    assert _chunks(frame([], 0)) == []


def test_gaps_and_any_order() -> None:
    step = 4 + len(CHUNKS[0])
    data = frame(CHUNKS, 10, gap=b"hole", entries=[(0, 4 + 4 * step), (4, 4)])
    assert _chunks(data) == [CHUNKS[4], *CHUNKS[1:4], CHUNKS[0]]


def test_the_sparse_frame_numbers_its_files() -> None:
    frame_index = Frame(MemoryBlob(frame([CHUNKS[0], None, CHUNKS[2]], 10))).sparse()
    assert frame_index[0x1A] == 1
    assert struct.unpack(">Q", frame_index[0x10:0x18]) == (len(frame_index),)
    assert struct.pack("<3q", 0, ZEROS, 2) in frame_index
    assert not is_contiguous(frame_index)


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, 10**6, 5 * 42 - 31, 1])
def test_an_offset_that_leads_nowhere_is_damage_to_that_chunk_alone(offset: int) -> None:
    frame_chunks = _chunks(frame(CHUNKS, 10, entries=[(2, offset)]))
    assert [frame_chunks[i] for i in (0, 1, 3, 4)] == [CHUNKS[i] for i in (0, 1, 3, 4)]
    assert isinstance(frame_chunks[2], str)


@pytest.mark.parametrize("size", [0, 31, 5 * 42 + 1, 2**31 - 1, 2**32 - 1])
def test_a_size_that_cannot_be(size: int) -> None:
    spoilt = CHUNKS[2][:12] + size.to_bytes(4, "little") + CHUNKS[2][16:]
    frame_chunks = _chunks(frame([*CHUNKS[:2], spoilt, *CHUNKS[3:]], 10))
    assert isinstance(frame_chunks[2], str)
    assert frame_chunks[3:] == CHUNKS[3:]


def test_a_frame_that_ends_early() -> None:
    data = frame(CHUNKS, 10)
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r"frame|header|expected"):
            Frame(MemoryBlob(data[:cut]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nbytes": 2**62}, "index of"),
        ({"nbytes": -1}, "sizes"),
        ({"index": chunk(b"1234567", 8)}, "index of"),
        ({"index": chunk(bytes(8 * 6), 8)}, "index of"),
        ({"index": b""}, "no Blosc2 chunk"),
        ({"index": b"\x05\x01\x17\x08" + b"\xff" * 12 + bytes(16)}, "no Blosc2 chunk"),
        ({"index": struct.pack("<BBBBIII16x", 5, 1, 0x17, 8, 2**32 - 8, 8, 40) + bytes(8)}, "index of"),
        ({"index": struct.pack("<BBBBIII16x", 5, 1, 0xD7, 8, 40, 40, 72) + bytes(40)}, "built-in codec"),
        ({"index": struct.pack("<BBBBIIIB15x", 5, 1, 0x17, 8, 40, 40, 72, 160) + bytes(40)}, "built-in codec"),
        ({"index": struct.pack("<BBBBIII16x", 5, 1, 0x15, 8, 40, 40, 72) + b"\xff" * 40}, "decoded"),
    ],
)
def test_an_index_that_cannot_be(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Frame(MemoryBlob(frame(CHUNKS, 10, **change)))


@given(st.data())
def test_frames_keep_what_is_not_written(data: st.DataObject) -> None:
    """Also packed ones, and whatever the order of writes: a model of the chunks decides."""
    chunks: list[bytes | None] = data.draw(st.lists(st.none() | st.sampled_from(CHUNKS), min_size=1, max_size=6))
    raw, form = frame(chunks, 10), Frames(len(chunks))
    for _ in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.sets(st.integers(0, len(chunks) - 1)))
        drops = data.draw(st.sets(st.integers(0, len(chunks) - 1))) - slots
        puts = {slot: data.draw(st.sampled_from(CHUNKS)) for slot in slots}
        pack = data.draw(st.booleans())
        change = ShardChange({(0, slot): Put(new) for slot, new in puts.items()}, {(0, slot) for slot in drops}, pack)
        plan = form.rewrite(0, ShardIndexReader(form, 0, MemoryBlob(raw)), change)
        assert plan is not None
        raw = bytes_of(plan, MemoryBlob(raw))
        chunks = [puts.get(i, None if i in drops else old) for i, old in enumerate(chunks)]
        assert _chunks(raw) == chunks
        usage = form.usage(ShardIndexReader(form, 0, MemoryBlob(raw)))
        assert usage.size == len(raw)
        assert not (pack and not puts and usage.dead)


@pytest.mark.parametrize("new", [b"", b"no chunk", chunk(b"too short"), CHUNKS[0] + b"more", CHUNKS[0][:-1]])
def test_what_is_no_chunk_of_the_frame_is_not_written(new: bytes) -> None:
    old = ShardIndexReader(Frames(2), 0, MemoryBlob(frame(CHUNKS[:2], 10)))
    with pytest.raises(UnsupportedError, match="chunk 1"):
        Frames(2).rewrite(0, old, ShardChange({(0, 1): Put(new)}))
    with pytest.raises(UnsupportedError, match="only a program of Blosc2"):
        Frames(2).rewrite(0, None, ShardChange({(0, 1): Put(CHUNKS[0])}))


def test_the_index_that_a_program_writes_must_say_the_same() -> None:
    frame_index = Frame(MemoryBlob(frame(CHUNKS, 10))).sparse()
    zeros = Frame(MemoryBlob(frame([CHUNKS[0], None, *CHUNKS[2:]], 10))).sparse()
    other = Frame(MemoryBlob(frame(CHUNKS[:4], 10))).sparse()
    assert not BLOSC2.differences(frame_index, frame_index)
    assert not BLOSC2.differences(frame_index, zeros)
    assert not BLOSC2.differences(frame_index, frame_index[:0x10] + bytes(8) + frame_index[0x18:]), "not complete yet"
    for wrong in (
        other,
        b"",
        frame_index[:20],
        frame_index.replace(b"\x23", b"\x24"),
        frame_index[:0x32] + b"\x01" + frame_index[0x33:],
    ):
        assert BLOSC2.differences(frame_index, wrong)


def test_a_chunk_that_cannot_be_found_is_dead() -> None:
    spoilt = CHUNKS[2][:12] + (2**24).to_bytes(4, "little") + CHUNKS[2][16:]
    data = frame([*CHUNKS[:2], spoilt, *CHUNKS[3:]], 10)
    usage = Frames(5).usage(ShardIndexReader(Frames(5), 0, MemoryBlob(data)))
    assert (usage.live, usage.dead) == (4 * len(spoilt), len(spoilt))
    assert usage.size == usage.index + usage.live + usage.dead == len(data)


@given(st.data())
def test_any_change_gives_a_frame_or_a_reason(data: st.DataObject) -> None:
    raw = bytearray(frame([*CHUNKS, None], 10))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame_chunks = Frame(MemoryBlob(bytes(raw)))
        index = frame_chunks.index().checked(len(raw))
    except ValueError:
        return
    frame_chunks.sparse()
    frame_chunks.metalayer(b"b2nd")
    for slot in index.all_slots().tolist():
        try:
            start, size = index.extent_at(index.position(slot))
        except ValueError:
            continue
        assert 0 <= start <= start + size <= len(raw)


def test_files_that_are_none() -> None:
    whole = frame(CHUNKS, 10)
    for data in (b"", b"x" * 200, whole[:10], Frame(MemoryBlob(whole)).sparse()):
        assert BLOSC2.open_file("x.b2nd", MemoryBlob(data)) is None


def test_without_the_library_the_problem_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.b2frame").write_bytes(frame(CHUNKS, 10))
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "blosc2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Exception, match=r"pip install blosc2"):
        open_tree(str(tmp_path))


@st.composite
def frames(draw: st.DrawFn) -> Sparse:
    files: dict[str, bytes] = {}
    shown: dict[str, bytes] = {}
    for name in draw(st.sets(st.sampled_from(("a.b2nd", "b/c.b2frame")), min_size=1)):
        chunks = draw(st.lists(st.none() | st.binary(max_size=9).map(chunk), max_size=20))
        files[name] = frame(chunks, 9)
        shown |= {f"{name}/{i:08X}.chunk": c for i, c in enumerate(chunks) if c is not None}
    names = st.integers(0, 20).map("a.b2nd/{:08X}.chunk".format)
    odd = st.sampled_from(("a.b2nd", "a.b2nd/x", "a.b2nd/0000000a.chunk", "a.b2nd/00000000.chunk/x", "b"))
    return Sparse(files, shown, names | odd)


class TestView(ViewSuite):
    def samples(self) -> st.SearchStrategy[Sparse]:
        return frames()


# ---------------------------------------------------------------------------------------------------- trees


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames under `contiguous`, and the same ones under `sparse`, as python-blosc2 writes them."""
    root = tmp_path_factory.mktemp("blosc2")
    for kind in ("contiguous", "sparse"):
        (root / kind).mkdir()
        for name, write in WRITERS.items():
            write(root / kind / name, kind == "contiguous")
    return root


def _numbers(sparse: Path) -> list[int]:
    """The file number of each chunk of a sparse frame."""
    import blosc2

    raw = (sparse / "chunks.b2frame").read_bytes()
    (length,), (nbytes,) = struct.unpack(">i", raw[0x0B:0x0F]), struct.unpack(">q", raw[0x1E:0x26])
    (size,) = struct.unpack_from("<i", raw, length + 12)
    table = blosc2.decompress2(raw[length : length + size]) if nbytes else b""
    return [number for (number,) in struct.iter_unpack("<q", table)]


def _chunk_files(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.endswith(".chunk")}


def test_chunks_are_those_of_the_sparse_twin(written: Path) -> None:
    """Whose writer numbers its files in the order in which it made them, and has an index that says which is which."""
    tree_files = walk(open_tree(str(written / "contiguous")))
    for name in WRITERS:
        for i, number in enumerate(_numbers(written / "sparse" / name)):
            mine = tree_files.get(f"{name}/{i:08X}.chunk")
            twin = written / "sparse" / name / f"{number:08X}.chunk"
            assert mine == (twin.read_bytes() if number >= 0 else None), (name, i)
    assert {n for n in tree_files if not n.endswith(".chunk")} == {f"{name}/chunks.b2frame" for name in WRITERS}


def test_what_is_told_of_them(written: Path) -> None:
    tree = open_tree(str(written / "contiguous"))
    facts = {s.path: (s.shape, s.chunk_shape, s.data_type) for s in tree.survey.summaries()}
    assert facts["ramp.b2nd"] == ((40, 23), (7, 8), "<i4")
    assert facts["named.b2nd"] == ((40, 23), (7, 8), "<i4")
    assert facts["scalar.b2nd"] == ((), (), "<f8")
    assert facts["changed.b2frame"] == ((5980,), (20,), "4 bytes")
    located = tree.locate("ramp.b2nd/0000000A.chunk")
    source_bytes = (written / "contiguous" / located.shard).read_bytes()
    assert source_bytes[located.offset :][: located.size] == (written / "sparse/ramp.b2nd/0000000A.chunk").read_bytes()


def test_sparse_frames_are_as_they_are(written: Path) -> None:
    fs = ShardFileSystem(str(written), skip_instance_cache=True)
    for path in written.glob("sparse/*/*"):
        assert fs.cat_file(f"sparse/{path.parent.name}/{path.name}") == path.read_bytes()


def test_a_store_of_many_frames_is_as_it_is(written: Path, tmp_path: Path) -> None:
    """Its readers look for files; one that is mounted itself is a directory like any other."""
    shutil.copytree(written / "contiguous", tmp_path / "x/tree.b2d/a")
    shutil.copytree(written / "contiguous", tmp_path / "y")
    tree = open_tree(str(tmp_path))
    for name in WRITERS:
        assert not tree.resolve(f"x/tree.b2d/a/{name}").directory
        assert tree.resolve(f"y/{name}").directory
    assert open_tree(str(tmp_path / "x/tree.b2d")).resolve("a/ramp.b2nd").directory


def test_through_fsspec_from_a_remote_store(written: Path) -> None:
    import blosc2

    memory = fsspec.filesystem("memory")
    memory.put(str(written / "contiguous"), "/blosc2-remote", recursive=True)
    try:
        fs = ShardFileSystem("memory://blosc2-remote", skip_instance_cache=True)
        local = walk(open_tree(str(written / "contiguous")))
        assert {n.lstrip("/"): fs.cat_file(n) for n in fs.find("")} == local
    finally:
        memory.rm("/blosc2-remote", recursive=True)
    for name, data in _chunk_files(local).items():
        assert len(blosc2.decompress2(data)) > 0, name


def test_a_damaged_chunk_is_damage_to_that_chunk_alone(tmp_path: Path) -> None:
    (tmp_path / "x.b2frame").write_bytes(frame(CHUNKS, 10, entries=[(1, 2**40)]))
    tree = open_tree(str(tmp_path))
    assert bytes(tree.read(tree.resolve("x.b2frame/00000000.chunk").number, 0, 99)) == CHUNKS[0]
    with pytest.raises(CorruptShardError, match="no whole Blosc2 chunk"):
        tree.resolve("x.b2frame/00000001.chunk")
    names = {n for b in tree.scan(tree.resolve("x.b2frame").number) for n in b.names.tolist()}
    assert names == {b"chunks.b2frame", *(b"%08X.chunk" % i for i in range(5))}
    for absent in ("00000005.chunk", "0000000a.chunk", "0.chunk", "000000001.chunk", "+0000001.chunk"):
        with pytest.raises(FileNotFoundError):
            tree.resolve(f"x.b2frame/{absent}")


def test_a_damaged_frame_is_a_file_and_told(tmp_path: Path) -> None:
    data = frame(CHUNKS, 10)
    (tmp_path / "bad.b2frame").write_bytes(data[:-1])
    (tmp_path / "good.b2frame").write_bytes(data)
    tree = open_tree(str(tmp_path))
    assert bytes(tree.read(tree.resolve("bad.b2frame").number, 0, 10**6)) == data[:-1]
    assert tree.resolve("good.b2frame").directory
    (problem,) = tree.problems()
    assert problem.path == "bad.b2frame"
    assert "but the file has" in problem.why


def test_a_type_that_cannot_be_read_is_told_as_unknown() -> None:
    data = bytearray(frame([], 10))
    assert Frame(MemoryBlob(bytes(data))).metalayer(b"b2nd") is None
    assert np.frombuffer(Frame(MemoryBlob(bytes(data))).sparse(), "u1").size == len(data)
