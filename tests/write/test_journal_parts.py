"""The parts of a journal, each built alone: the leader of a group commit, the appender, the account, cleaning."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from google_crc32c import value as crc32c

from shardfs.write.journal import Position, RecordKind, cleaning
from shardfs.write.journal.appender import Appender
from shardfs.write.journal.log import Leader
from shardfs.write.journal.places import take
from shardfs.write.journal.reading import read
from shardfs.write.journal.records import HAS_DATA, encode_meta
from shardfs.write.journal.segments import Contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = (bytes(16), "memory://source")


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Contents, Appender]]:
    _, locks = take(tmp_path / "j", "", "")
    contents = Contents(tmp_path / "j", locks)
    yield contents, Appender(contents, SOURCE, 0, 0, 64 << 10)
    contents.close()


def append(appender: Appender, path: str, data: bytes) -> tuple[int, Position]:
    return appender.write(RecordKind.PUT, HAS_DATA, encode_meta({"path": path}), data, crc32c(data))


def test_one_thread_leads_and_the_others_wait_for_what_it_has_done() -> None:
    lock, done = threading.Lock(), threading.Event()
    leader, led = Leader(lock), list[bool]()

    def wait() -> None:
        with leader.lead(done.is_set) as leads:
            led.append(leads)

    with leader.lead() as leads:
        assert leads
        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        done.set()
    for thread in threads:
        thread.join(20)
    assert led == [False] * 4


def test_after_an_error_another_thread_can_lead() -> None:
    leader = Leader(threading.Lock())
    with pytest.raises(OSError, match="broken"), leader.lead():
        raise OSError("broken")
    with leader.lead() as leads:
        assert leads


def test_a_copied_record_is_found_at_its_first_position(parts: tuple[Contents, Appender]) -> None:
    contents, appender = parts
    lsn, position = append(appender, "a", b"1" * 5000)
    appender.copy(lsn, contents.live[lsn])
    segment, part = contents.part(position)
    assert part.start > position.start
    assert os.pread(part.fd, part.size, part.start) == b"1" * 5000
    assert (segment.live, list(contents.live)) == (1, [lsn])


def test_segments_without_live_records_are_freed(parts: tuple[Contents, Appender]) -> None:
    contents, appender = parts
    lsns = [append(appender, str(i), bytes(50_000))[0] for i in range(3)]
    assert len(contents.segments) == 3
    contents.forget(lsns[0])
    cleaning.free(contents, appender)
    assert [segment.live for segment in contents.segments.values()] == [1, 1]
    assert appender.durable == appender.sequence
    contents.forget(lsns[1])
    contents.forget(lsns[2])
    assert cleaning.is_mostly_dead(contents, appender, 64 << 10, hard=False)
    cleaning.renew(contents, appender)
    (last,) = contents.segments
    found = read(contents.directory, None, write=False)
    assert (list(found.files), found.recovered, found.problems) == ([last], [], [])
