"""What is kept of the documents that programs on a mount have read or written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.write import seen_documents
from shardfs.write.seen_documents import Seen, same_document
from tests.scheduling import explore
from tests.virtual_threads import install
from tests.write import bugs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.scheduling import Schedule


def encoded(**members: Any) -> bytes:
    return json.dumps(members).encode()


OLD, NEW = encoded(shape=[8], a=1), encoded(shape=[16], a=1, native=1)


def test_values_that_programs_outside_have_replaced_are_kept() -> None:
    versions = Seen()
    versions.read("a", OLD)
    assert versions.taken_back("a", OLD, NEW) == []
    versions.read("a", NEW)
    assert versions.taken_back("a", NEW, NEW) == []
    assert versions.taken_back("a", NEW, OLD) == ["native", "shape.0"]
    assert versions.taken_back("a", NEW, encoded(shape=[12], a=2, native=2)) == ["shape.0"]
    assert versions.taken_back("a", NEW, encoded(shape=[4], a=2, native=2)) == []
    assert versions.taken_back("a", NEW, b"no document") == ["native"]
    later = encoded(shape=[20], a=1, native=1)
    versions.wrote("a", later)
    assert versions.taken_back("a", later, encoded(shape=[18], a=1, native=1)) == []
    assert versions.taken_back("a", later, OLD) == ["native", "shape.0"]
    for other in ("b", "a/b"):
        assert versions.taken_back(other, NEW, OLD) == []


def test_a_document_that_was_away_is_another_version() -> None:
    versions = Seen()
    versions.read("a", OLD)
    versions.read("a", None)
    versions.read("a", NEW)
    assert versions.taken_back("a", NEW, OLD) == ["native", "shape.0"]
    versions.wrote("a", None)
    versions.read("a", NEW)
    assert versions.taken_back("a", NEW, OLD) == []


def test_a_change_of_another_document_is_noted_if_the_version_before_is_known() -> None:
    versions = Seen()
    versions.changed("a", OLD, NEW)
    assert "a" not in versions
    versions.read("a", OLD)
    versions.changed("a", json.dumps(json.loads(OLD), indent=1).encode(), NEW)
    assert (versions.latest("a"), versions.taken_back("a", NEW, OLD)) == (NEW, [])
    versions.changed("a", OLD, b"later")
    assert versions.latest("a") == NEW


def try_calls(call: Callable[[Seen, str, bytes], None]) -> int:
    theirs = encoded(shape=[8], a=2)

    def scenario(schedule: Schedule) -> None:
        versions = Seen()
        versions.read("a", OLD)
        schedule.together(lambda: call(versions, "a", NEW), lambda: versions.read("a", theirs))
        assert "a" in versions.taken_back("a", theirs, OLD)

    return explore(scenario, preemptions=1, steps=("write/seen_documents",))


@pytest.mark.parametrize("call", [Seen.read, Seen.wrote])
def test_a_change_is_kept_at_every_moment_of_another_call(
    call: Callable[[Seen, str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert try_calls(call) > 60


def test_a_race_of_two_readers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    bugs.seed(monkeypatch, "a version of a document is noted while another thread compares it")
    with pytest.raises(AssertionError):
        try_calls(Seen.wrote)


def test_memory_is_bounded() -> None:
    versions = Seen()
    large = bytes(seen_documents.MAX_BYTES // 4)
    for n in range(8):
        versions.read(f"{n}", large)
        versions.read("0", large)
    assert [n for n in range(8) if f"{n}" in versions] == [0, 6, 7]
    versions.read("0", encoded(text="x" * (seen_documents.MAX_BYTES // 3)))
    versions.read("0", encoded(text="y" * (seen_documents.MAX_BYTES // 3)))  # the text that was replaced counts, too
    assert [n for n in range(8) if f"{n}" in versions] == [0]


def test_documents_are_compared_by_what_they_say() -> None:
    assert same_document(b'{"a": 1, "b": 2}', b'{"b":2,"a":1}')
    assert not same_document(b'{"a": 1}', b'{"a": true}')
    assert not same_document(b"{", b"{ ")
    assert not same_document(b"[" * 100_000, b"{}")
    assert same_document(b"{", b"{")
    assert not same_document(None, b"{}")
