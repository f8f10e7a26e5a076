"""T26: bits flipped, ends cut, segments missing, swapped, doubled; what other versions of shardfs wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.errors import UnsupportedError
from shardfs.write import recover
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.journal.records import (
    ALIGN,
    HEADER_SIZE,
    RECORD_MAGIC,
    RecordHead,
    SegmentHeader,
    encode_head,
    encode_header,
    encode_meta,
)
from tests.write.journals import SOURCE, content, kill, make_newer, open_journal, put

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parents[1] / "golden" / "journal"


def not_synced(directory: Path) -> None:
    journal = open_journal(directory)
    put(journal, "a", b"1" * 100)
    journal.append(RecordKind.DEL, {"path": "b", "base": [0, 10]})
    put(journal, "c", b"3" * 50)
    kill(journal)


def synced(directory: Path) -> None:
    journal = open_journal(directory)
    put(journal, "a", b"1" * 100)
    journal.append(RecordKind.MOVE, {"from": "a", "to": "b", "lsn": 1})
    journal.sync()
    put(journal, "c", b"3" * 50)
    kill(journal)


def of_two_mounts(directory: Path) -> None:
    for name in "ab":
        journal = open_journal(directory)
        put(journal, name, name.encode() * 60)
        journal.sync()
        put(journal, name * 2)
        journal.close(clean=False)


def places(size: int) -> list[int]:
    """Every byte, but of the header's padding, which one checksum covers, every 37th."""
    return [*range(128), *range(128, HEADER_SIZE - 4, 37), *range(HEADER_SIZE - 4, size)]


def segments(directory: Path, count: int = 3) -> list[Path]:
    """So many, each of one record, all on disk but the last."""
    journal = open_journal(directory, segment_bytes=64 << 10)
    for i in range(count):
        journal.sync()
        put(journal, str(i), bytes([i]) * 60_000)
    kill(journal)
    return wals(directory)


def wals(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.wal"))


def peek(directory: Path) -> tuple[list[tuple[int, RecordKind, str, bytes | None]], list[str], list[str]]:
    with Journal.peek(directory) as found:
        return content(found), found.problems, found.damaged_paths


@pytest.mark.parametrize("make", [not_synced, synced, of_two_mounts])
def test_no_flipped_bit_is_taken_for_truth_or_costs_another_record(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "j")
    right, problems, _ = peek(tmp_path / "j")
    assert problems == []
    for path in wals(tmp_path / "j"):
        data = bytearray(path.read_bytes().rstrip(b"\0"))
        path.write_bytes(data)
        for at in places(len(data)):
            data[at] ^= 1 << at % 8
            path.write_bytes(data)
            records, problems, damaged = peek(tmp_path / "j")
            data[at] ^= 1 << at % 8
            assert set(records) <= set(right)
            missing = [record for record in right if record not in records]
            assert len(missing) <= 1
            assert problems or not (missing or at < HEADER_SIZE)
            assert problems or records == right
            assert set(damaged) <= {"", *"abc", *("aa", "bb")}
        path.write_bytes(data)


@pytest.mark.parametrize("make", [not_synced, synced, of_two_mounts])
def test_what_is_cut_off_costs_only_itself(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "j")
    right, _, _ = peek(tmp_path / "j")
    for path in wals(tmp_path / "j"):
        data = path.read_bytes().rstrip(b"\0")
        ends = [i + 88 for i in range(0, len(data), ALIGN) if data[i : i + 8] == b"\x89sfsREC\n"]
        for size in places(len(data)):
            path.write_bytes(data[:size])
            records, problems, _ = peek(tmp_path / "j")
            missing = [record for record in right if record not in records]
            assert records == [record for record in right if record not in missing]
            assert len(missing) <= sum(end > size - 200 for end in ends)
            assert problems or not missing or path == wals(tmp_path / "j")[-1] or make is of_two_mounts
        path.write_bytes(data)


def test_damage_before_records_that_were_synced_later_is_kept_and_told(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    a, b = put(journal, "g/a", b"1" * 100), put(journal, "g/b", b"2" * 100)
    journal.sync()
    put(journal, "g/c")
    kill(journal)
    assert a.data is not None
    assert b.data is not None
    (path,) = wals(tmp_path / "j")
    with open(path, "r+b") as file:
        file.seek(a.data.start)
        file.write(b"x")
    size = path.stat().st_size
    for _ in range(2):
        journal = open_journal(tmp_path / "j")
        assert [r.meta["path"] for r in journal.recovered] == ["g/b", "g/c"]
        assert journal.damaged_paths == ["g/a"]
        assert "a record is damaged (g/a)" in journal.problems[0]
        assert path.stat().st_size == size  # nothing is cut
        kill(journal)
    journal = open_journal(tmp_path / "j")
    later = put(journal, "later")
    journal.release([r.lsn for r in journal.recovered])
    journal.tidy()
    kill(journal)
    assert [p.name for p in (tmp_path / "j").glob("*.damaged")] == [path.name.replace("wal", "damaged")]
    with Journal.peek(tmp_path / "j") as found:
        assert [r.lsn for r in found.recovered] == [later.lsn]
        assert found.problems == []


def test_a_damaged_head_concerns_nobody_knows_which_path(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    put(journal, "a")
    journal.sync()
    put(journal, "b")
    kill(journal)
    (path,) = wals(tmp_path / "j")
    with open(path, "r+b") as file:
        file.seek(HEADER_SIZE + 20)
        file.write(b"xxxx")
    records, problems, damaged = peek(tmp_path / "j")
    assert [name for _, _, name, _ in records] == ["b"]
    assert problems
    assert damaged == [""]


def test_what_a_power_failure_may_lose_is_told_but_no_damage(tmp_path: Path) -> None:
    """The disk has written a later record, but not the one before; nobody was told that either was on disk."""
    journal = open_journal(tmp_path / "j")
    put(journal, "a")
    journal.sync()
    lost = put(journal, "b", b"2" * 100)
    put(journal, "c")
    kill(journal)
    assert lost.data is not None
    with open(wals(tmp_path / "j")[0], "r+b") as file:
        file.seek(lost.data.start)
        file.write(bytes(100))
    records, problems, damaged = peek(tmp_path / "j")
    assert [name for _, _, name, _ in records] == ["a", "c"]
    assert "not yet on disk" in problems[0]
    assert damaged == []


def test_a_copy_of_a_torn_tail_is_kept(tmp_path: Path) -> None:
    not_synced(tmp_path / "j")
    (path,) = wals(tmp_path / "j")
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-30])
    journal = open_journal(tmp_path / "j")
    assert [r.meta["path"] for r in journal.recovered] == ["a", "b"]
    assert "not whole" in journal.problems[0]
    (torn,) = (tmp_path / "j").glob("*.torn")
    assert data[:-30].endswith(torn.read_bytes())
    assert RECORD_MAGIC in torn.read_bytes()
    kill(journal)
    assert peek(tmp_path / "j")[1] == []


def test_a_missing_segment_is_told(tmp_path: Path) -> None:
    paths = segments(tmp_path / "j")
    paths[1].unlink()
    records, problems, damaged = peek(tmp_path / "j")
    assert [name for _, _, name, _ in records] == ["0", "2"]
    assert "is missing" in "".join(problems)
    assert damaged == [""]


def test_a_missing_first_segment_is_told(tmp_path: Path) -> None:
    paths = segments(tmp_path / "j")
    paths[0].unlink()
    assert peek(tmp_path / "j")[2] == [""]


def test_segments_may_be_swapped_or_doubled(tmp_path: Path) -> None:
    paths = segments(tmp_path / "j")
    right, _, _ = peek(tmp_path / "j")
    paths[0].rename(tmp_path / "j" / "x")
    paths[1].rename(paths[0])
    (tmp_path / "j" / "x").rename(paths[1])
    shutil.copy(paths[2], tmp_path / "j" / "000000000000000f.wal")
    records, problems, damaged = peek(tmp_path / "j")
    assert records == right
    assert len(problems) == 3
    assert damaged == []
    journal = open_journal(tmp_path / "j", segment_bytes=64 << 10)
    assert content(journal) == right
    assert put(journal, "new").lsn > right[-1][0]
    kill(journal)
    assert [name for _, _, name, _ in peek(tmp_path / "j")[0]] == ["0", "1", "2", "new"]


def test_a_segment_that_is_all_zeros_or_nothing_is_not_damage(tmp_path: Path) -> None:
    paths = segments(tmp_path / "j")
    for data in (b"", bytes(100_000)):
        (tmp_path / "j" / "0000000000000004.wal").write_bytes(data)
        records, problems, _ = peek(tmp_path / "j")
        assert len(records) == len(paths)
        assert problems == []


def test_a_segment_cut_exactly_between_records_is_told(tmp_path: Path) -> None:
    paths = segments(tmp_path / "j")
    with open(paths[0], "r+b") as file:
        file.truncate(HEADER_SIZE)
    records, problems, damaged = peek(tmp_path / "j")
    assert [name for _, _, name, _ in records] == ["1", "2"]
    assert problems
    assert damaged == [""]


def test_a_journal_of_another_source_is_refused(tmp_path: Path) -> None:
    not_synced(tmp_path / "j")
    with pytest.raises(OSError, match="journal of another source"):
        open_journal(tmp_path / "j", "memory://other")
    with Journal.peek(tmp_path / "j") as found:  # as somebody who has only the directory
        assert found.source == SOURCE


def test_a_newer_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    synced(tmp_path / "j")
    (path,) = wals(tmp_path / "j")
    make_newer(path)
    before = {name: (tmp_path / "j" / name).read_bytes() for name in os.listdir(tmp_path / "j") if name != "lock"}
    with pytest.raises(UnsupportedError, match="format 2"):
        open_journal(tmp_path / "j")
    with pytest.raises(UnsupportedError, match="format 2"):
        Journal.peek(tmp_path / "j")
    after = {name: (tmp_path / "j" / name).read_bytes() for name in os.listdir(tmp_path / "j") if name != "lock"}
    assert after == before


@given(st.data())
def test_whatever_is_in_a_segment_only_declared_errors_come_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of no meaning, and records with sound checksums that make no sense, as in a copy made by somebody else."""
    directory = tmp_path_factory.mktemp("any")
    whole = bytearray(encode_header(SegmentHeader(bytes(16), 7, 1, 1, 0, "x")))
    numbers = st.sampled_from((0, 1, 2, 5, 2**32, 2**63, 2**64 - 1))
    values = st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda v: st.lists(v, max_size=2), max_leaves=3
    )
    names = st.sampled_from(
        ("path", "from", "to", "lsn", "lsns", "entries", "key", "first", "last", "base", "mtime_ns")
    )
    for _ in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()):
            whole += data.draw(st.binary(max_size=100)).ljust(ALIGN, b"\0")[:ALIGN]
            continue
        meta = encode_meta(data.draw(st.dictionaries(names, values, max_size=4)))
        meta = data.draw(st.sampled_from((meta, meta, meta, b"[" * 100_000)))
        kind, flags, size = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 1)), data.draw(numbers)
        sequence, lsn, durable, oldest = (data.draw(numbers) for _ in range(4))
        at = -(-len(whole) // ALIGN) * ALIGN
        whole = whole.ljust(at, b"\0")
        whole += encode_head(
            RecordHead(kind, flags, len(meta), size, sequence, lsn, 7, 1, at, durable, oldest, 0), meta
        )
        whole += bytes(data.draw(st.sampled_from((0, 24, 200))))
    (directory / "0000000000000001.wal").write_bytes(whole)
    journal_state = recover.read(directory)
    for entry in journal_state.entries:
        assert entry.lsn >= 0
    recover.export(directory, directory / "out")


@pytest.mark.parametrize("release", sorted(path.name for path in GOLDEN.iterdir() if (path / "content.json").exists()))
def test_journals_of_earlier_releases_can_be_read(tmp_path: Path, release: str) -> None:
    shutil.copytree(GOLDEN / release, tmp_path / "j")
    os.chmod(tmp_path / "j", 0o700)
    told = json.loads((GOLDEN / release / "content.json").read_text())
    journal = open_journal(tmp_path / "j")
    assert journal.problems == []
    records = [
        [r.lsn, r.kind.name, r.meta, None if r.data is None else journal.read(r.data).hex()] for r in journal.recovered
    ]
    assert records == told
    journal.close(clean=False)
