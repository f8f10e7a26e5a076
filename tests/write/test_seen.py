"""Which version of a document a program has in mind that writes it."""

from __future__ import annotations

import json
from typing import Any

from shardfs.write import seen
from shardfs.write.seen import Seen, nearest, same_document


def encoded(**members: Any) -> bytes:
    return json.dumps(members).encode()


OLD, NEW = encoded(shape=8, a=1), encoded(shape=16, a=1, native=1)


def test_the_version_is_taken_that_differs_least() -> None:
    assert nearest([OLD, NEW], encoded(shape=8, a=2)) == OLD
    assert nearest([OLD, NEW], encoded(shape=16, a=2, native=1)) == NEW
    assert nearest([OLD, NEW], b"no document") == NEW
    assert nearest([None], OLD) is None


def test_who_writes_an_old_version_again_takes_the_changes_back() -> None:
    assert nearest([OLD, NEW], json.dumps(json.loads(OLD), indent=1).encode()) == NEW


def test_versions_are_kept_if_another_program_wrote_between() -> None:
    known = Seen()
    known.note("a", None)
    known.note("a", OLD)
    known.note("a", OLD)
    assert known.versions("a") == [OLD]
    known.note("a", NEW)
    assert known.versions("a") == [OLD, NEW]
    mine = encoded(shape=8, a=3)
    known.wrote("a", OLD, mine)
    assert known.versions("a") == [NEW, mine]
    known.note("a", None)
    assert known.versions("a") == [None]


def test_a_directory_is_forgotten_with_what_is_below() -> None:
    known = Seen()
    for path in ("a/x", "a/b/x", "ab/x", "x"):
        known.note(path, OLD)
    known.forget("a")
    assert [path for path in ("a/x", "a/b/x", "ab/x", "x") if known.versions(path)] == ["ab/x", "x"]


def test_memory_is_bounded() -> None:
    known = Seen()
    large = bytes(seen.MAX_BYTES // 4)
    for n in range(8):
        known.note(f"{n}", large)
    assert [n for n in range(8) if known.versions(f"{n}")] == [5, 6, 7]
    for n in range(20):
        known.note("many", bytes(n))
    assert len(known.versions("many")) == seen.MAX_VERSIONS


def test_documents_are_compared_by_what_they_say() -> None:
    assert same_document(b'{"a": 1, "b": 2}', b'{"b":2,"a":1}')
    assert not same_document(b'{"a": 1}', b'{"a": true}')
    assert not same_document(b"{", b"{ ")
    assert same_document(b"{", b"{")
    assert not same_document(None, b"{}")
