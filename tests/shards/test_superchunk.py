"""Superchunks and bloscpack files: where their chunks lie, by whatever way that is written down."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blosc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.shard_format import ShardChange
from shardfs.shards.byte_layouts.single_page import MAX_BLOSC_CHUNKS
from shardfs.shards.byte_layouts.superchunk import Beginning, Pack, Superchunks, is_superchunk, parse_header
from shardfs.shards.index_reader import ShardIndexReader
from tests.data_bcolz import SUMS, Superchunk, metadata_section, stored
from tests.suites.shard_format import Extents, MemoryBlob, Sample, ShardFormatSuite

if TYPE_CHECKING:
    from shardfs.model.shard_format import ShardIndex
    from shardfs.model.values import Coords

GOLDEN = Path(__file__).parents[1] / "golden" / "bloscpack"
MADE: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())["files"]


def _index(data: bytes, limit: int = MAX_BLOSC_CHUNKS) -> ShardIndex:
    return Beginning(MemoryBlob(data)).index(limit).checked(len(data))


def _chunks(data: bytes) -> list[bytes | None]:
    """The chunk in each slot, verified; None where it is damaged."""
    index = _index(data)
    kind = Beginning(MemoryBlob(data)).header.checksum
    out: list[bytes | None] = []
    for i in range(len(index)):
        try:
            start, size = index.extent_at(i)
            chunk = data[start : start + size]
            kind.verify(chunk, data[start + size : start + size + kind.size])
            out.append(chunk)
        except ValueError:
            out.append(None)
    return out


# ------------------------------------------------------------------------------------------------ the suite


@st.composite
def samples(draw: st.DrawFn, *, packs: bool = False) -> Sample:
    """Superchunks of any kind of checksum, or packs. Without offsets chunks lie side by side, with them anywhere."""
    chunks, checksum = draw(st.integers(1, 20)), draw(st.integers(0, 8))
    per_file = chunks if packs else draw(st.integers(1, 6))
    offsets, room = draw(st.booleans()), draw(st.integers(0, 3))
    shard = draw(st.integers(0, (chunks - 1) // per_file))
    slots = range(draw(st.integers(0, min(per_file, chunks - shard * per_file))))
    position = 32 + (8 * (len(slots) + room) if offsets else 0)
    extents: dict[Coords, tuple[int, int]] = {}
    for slot in draw(st.permutations(slots)) if offsets else slots:
        size = draw(st.integers(16, 40))
        extents[(shard * per_file + slot,)] = (position, size)
        position += size + len(SUMS[checksum](b"")) + (draw(st.integers(0, 5)) if offsets else 0)

    def write(placed: Extents) -> bytes:
        table = [start for _, (start, _) in sorted(placed.items())]
        head = struct.pack("<4sBBBBiiqq", b"blpk", 3 if packs else 2, offsets, checksum, 1, -1, -1, len(table), room)
        out = bytearray(head + (struct.pack(f"<{len(table) + room}q", *table, *[-1] * room) if offsets else b""))
        for start, size in placed.values():
            chunk = stored(bytes(size - 16))
            chunk += SUMS[checksum](chunk)
            out.extend(bytes(max(0, start + len(chunk) - len(out))))
            out[start : start + len(chunk)] = chunk
        return bytes(out)

    return Sample(
        Pack(chunks, per_file) if packs else Superchunks(chunks, per_file),
        st.tuples(st.integers(0, chunks - 1)),
        lambda cell: "" if packs else f"__{cell[0] // per_file + 1}__.bin",
        write,
        st.just(extents),
    )


class TestSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return samples()


class TestPackSuite(ShardFormatSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return samples(packs=True)


# ----------------------------------------------------------------------------------------------- real files


@pytest.mark.parametrize("name", sorted(MADE))
def test_what_bloscpack_wrote(name: str) -> None:
    data = (GOLDEN / f"{name}.blp").read_bytes()
    golden = MADE[name]
    chunks = _chunks(data)
    assert None not in chunks
    content = b"".join(blosc.decompress(chunk) for chunk in chunks if chunk)
    if "bytes" in golden:
        assert content == bytes(i % 256 for i in range(golden["bytes"]))
    else:
        assert content == np.load(GOLDEN / golden["array"]).tobytes("A")
    beginning = Beginning(MemoryBlob(data))
    assert beginning.header.checksum.name == golden.get("checksum", "adler32").lower()
    assert (beginning.metadata() is not None) == (golden.get("metadata") is not None or "array" in golden)


@pytest.mark.parametrize("name", sorted(MADE))
def test_each_byte_of_a_chunk_is_verified(name: str) -> None:
    """But for those of its size: a chunk cannot be found without them."""
    data = (GOLDEN / f"{name}.blp").read_bytes()
    index = _index(data)
    if Beginning(MemoryBlob(data)).header.checksum.size == 0:
        return
    last = len(index) - 1
    start, size = index.extent_at(last)
    for at in {start, start + 1, start + 16, start + size - 1, start + size}:
        spoilt = bytearray(data)
        spoilt[at] ^= 0x40
        chunks = _chunks(bytes(spoilt))
        assert [i for i, chunk in enumerate(chunks) if chunk is None] == [last]


def test_a_file_of_many_chunks_takes_two_reads() -> None:
    blob = MemoryBlob(Superchunk().write([stored(bytes(100_000))] * 30))
    assert len(Beginning(blob).index()) == 30
    assert len(blob.reads) == 2
    assert sum(r.stop - r.start for r in blob.reads[1]) == 30 * 16


def test_small_chunks_without_offsets_are_not_read_one_by_one() -> None:
    blob = MemoryBlob(Superchunk(offsets=False).write([stored(bytes(84))] * 5000))
    assert len(Beginning(blob).index()) == 5000
    assert len(blob.reads) < 15


# -------------------------------------------------------------------------------- what writers need not know

CHUNKS = [stored(bytes([65 + i]) * (i + 1)) for i in range(5)]


@pytest.mark.parametrize("checksum", range(9))
@pytest.mark.parametrize("unknown", [{0}, {4}, {1, 2}, {0, 1, 3}, set(range(5))])
def test_offsets_that_are_unknown_are_found_by_walking(checksum: int, unknown: set[int]) -> None:
    how = Superchunk(checksum=checksum, unknown=frozenset(unknown), room=2)
    assert _chunks(how.write(CHUNKS)) == CHUNKS


@pytest.mark.parametrize("checksum", range(9))
def test_a_number_of_chunks_that_is_unknown(checksum: int) -> None:
    how = Superchunk(checksum=checksum, offsets=False, told=-1)
    assert _chunks(how.write(CHUNKS)) == CHUNKS


@pytest.mark.parametrize("metadata", [None, b'{"a": 1}', b'{"long": "' + b"x" * 100_000 + b'"}'])
@pytest.mark.parametrize("offsets", [True, False])
def test_metadata_lies_before_the_offsets(metadata: bytes | None, *, offsets: bool) -> None:
    data = Superchunk(metadata=metadata, offsets=offsets, room=4).write(CHUNKS)
    assert _chunks(data) == CHUNKS
    content = Beginning(MemoryBlob(data)).metadata()
    assert (content is None) == (metadata is None)


def test_a_table_beyond_the_first_read() -> None:
    data = Superchunk(room=20_000, slack=9).write(CHUNKS)
    assert _chunks(data) == CHUNKS


def test_slack_and_any_order() -> None:
    assert _chunks(Superchunk(slack=100, backwards=True, checksum=5).write(CHUNKS)) == CHUNKS


def test_chunks_may_share_bytes() -> None:
    data = Superchunk(checksum=0).write(CHUNKS[:3])
    first = struct.unpack_from("<q", data, 32)[0]
    assert _chunks(Superchunk(checksum=0, entries=((2, first),)).write(CHUNKS[:3])) == [*CHUNKS[:2], CHUNKS[0]]


# --------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("offset", [0, 31, 32, 2**62, 2**63 - 1, -2, -(2**63), 10**6])
def test_an_offset_that_leads_nowhere_is_damage_to_that_chunk_alone(offset: int) -> None:
    chunks = _chunks(Superchunk(entries=((2, offset),)).write(CHUNKS))
    assert chunks == [*CHUNKS[:2], None, *CHUNKS[3:]]


def test_behind_a_damaged_chunk_the_others_are_damaged_where_there_are_no_offsets() -> None:
    data = bytearray(Superchunk(offsets=False, checksum=0).write(CHUNKS))
    at = data.index(CHUNKS[2])
    data[at + 12 : at + 16] = bytes(4)
    assert _chunks(bytes(data)) == [*CHUNKS[:2], None, None, None]


@pytest.mark.parametrize("size", [0, 15, 2**31, 2**32 - 1])
@pytest.mark.parametrize("offsets", [True, False])
def test_a_size_that_cannot_be(size: int, *, offsets: bool) -> None:
    data = bytearray(Superchunk(offsets=offsets).write(CHUNKS))
    at = data.index(CHUNKS[4])
    data[at + 12 : at + 16] = size.to_bytes(4, "little")
    assert _chunks(bytes(data)) == [*CHUNKS[:4], None]


@pytest.mark.parametrize("cut", [1, 4, 5, 20, 30])
def test_a_file_that_ends_early_lacks_its_last_chunks(cut: int) -> None:
    data = Superchunk(checksum=1).write(CHUNKS)
    chunks = _chunks(data[:-cut])
    assert chunks[4] is None
    assert chunks[:3] == CHUNKS[:3]


@pytest.mark.parametrize("told", [2**62, 2**63 - 1, 2**31, MAX_BLOSC_CHUNKS + 1, -2, -(2**63)])
@pytest.mark.parametrize("offsets", [True, False])
def test_an_absurd_number_of_chunks_is_refused_at_once(told: int, *, offsets: bool) -> None:
    data = Superchunk(told=told, offsets=offsets).write(CHUNKS)
    before = time.process_time()
    with pytest.raises(ValueError, match="chunks"):
        _index(data)
    assert time.process_time() - before < 1


def test_more_chunks_than_a_file_may_have() -> None:
    for how in (Superchunk(), Superchunk(offsets=False), Superchunk(offsets=False, told=-1)):
        with pytest.raises(ValueError, match="chunks"):
            _index(how.write(CHUNKS), limit=4)
        assert len(_index(how.write(CHUNKS), limit=5)) == 5


@pytest.mark.parametrize("room", [2**62, 2**63 - 1, -1, -(2**63)])
def test_room_for_any_number_of_chunks_costs_nothing(room: int) -> None:
    data = bytearray(Superchunk(room=0).write(CHUNKS))
    data[24:32] = struct.pack("<q", room)
    assert _chunks(bytes(data)) == CHUNKS


@pytest.mark.parametrize("room", [10**4, 2**35, 2**62, 2**63 - 1])
def test_a_table_beyond_the_end_is_not_written_anew(room: int) -> None:
    data = bytearray(Superchunk(room=0).write(CHUNKS))
    data[24:32] = struct.pack("<q", room)
    pack = Pack(5, 5)
    old = ShardIndexReader(pack, 0, MemoryBlob(bytes(data)))
    with pytest.raises(ValueError, match="bytes before its chunks"):
        pack.rewrite(0, old, ShardChange(drops={(0, 4)}))
    assert pack.usage(old).index == len(data)


@pytest.mark.parametrize("cut", range(32))
def test_a_header_that_is_cut_off(cut: int) -> None:
    with pytest.raises(ValueError, match=r"header should have|starts with"):
        _index(Superchunk().write(CHUNKS)[:cut])


@pytest.mark.parametrize(
    ("at", "byte", "why"),
    [(0, 0, "starts with"), (4, 1, "version"), (4, 4, "version"), (5, 4, "options"), (6, 9, "checksum")],
)
def test_a_header_of_another_kind(at: int, byte: int, why: str) -> None:
    data = bytearray(Superchunk().write(CHUNKS))
    data[at] = byte
    with pytest.raises(ValueError, match=why):
        parse_header(bytes(data))


def test_the_single_chunks_of_bcolz_are_none() -> None:
    assert not is_superchunk(b"blpk\x01\0\0\0\x01\0\0\0\0\0\0\0" + CHUNKS[0])
    assert not is_superchunk(b"")
    assert not is_superchunk(b"blpk")
    assert is_superchunk(Superchunk().write(CHUNKS))


def test_metadata_that_is_damaged_hides_no_chunk() -> None:
    data = Superchunk(metadata=b'{"a": 1}').write(CHUNKS)
    spoilt = data.replace(metadata_section(b'{"a": 1}')[32:40], b"~~~~~~~~")
    assert spoilt != data
    assert _chunks(spoilt) == CHUNKS
    with pytest.raises(ValueError, match="crc32"):
        Beginning(MemoryBlob(spoilt)).metadata()


@given(st.binary(max_size=200), st.sampled_from((b"", b"blpk\x02", b"blpk\x03\x01\x01\x01", b"blpk\x02\x02\x02\x01")))
def test_any_bytes_give_an_index_or_a_reason(tail: bytes, head: bytes) -> None:
    data = head + tail
    try:
        index = _index(data)
    except ValueError:
        return
    for i in range(len(index)):
        try:
            start, size = index.extent_at(i)
        except ValueError:
            continue
        assert 0 <= start <= start + size <= len(data)


@given(
    st.lists(st.binary(max_size=20), max_size=6),
    st.integers(0, 8),
    st.integers(0, 3),
    st.integers(0, 9),
    st.booleans(),
    st.data(),
)
def test_whatever_was_written_is_found(
    contents: list[bytes], checksum: int, room: int, slack: int, offsets: bool, data: st.DataObject
) -> None:
    chunks = [stored(c) for c in contents]
    if offsets:
        unknown = data.draw(st.sets(st.sampled_from(range(len(chunks))))) if chunks and not slack else set()
        backwards = not unknown and data.draw(st.booleans())
        how = Superchunk(checksum=checksum, room=room, slack=slack, unknown=frozenset(unknown), backwards=backwards)
    else:
        how = Superchunk(checksum=checksum, offsets=False, told=data.draw(st.sampled_from((None, -1))))
    assert _chunks(how.write(chunks)) == chunks
