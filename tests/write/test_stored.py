"""The one judge of whether a stored chunk is unchanged."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import google_crc32c
import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.write.stored import ABSENT, ANYTHING, NOT_NOTED, NOTHING, Stored, conflicts, digest_of
from tests.suites.shard_format import MemoryBlob

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardfs.model.blobs import Stat
    from shardfs.vfs.chunk_dirs import Target

V1, V2 = (1, 7, 100), (1, 8, 100)


class Second(MemoryBlob):
    """A chunk in the second version of a shard."""

    def stat(self) -> Stat:
        return super().stat()._replace(version=V2)


class Shortened(MemoryBlob):
    """A chunk of which another program cuts off the last byte."""

    def stat(self) -> Stat:
        return super().stat()._replace(size=len(self._data) + 1)


def judged(base: Stored, now: str, version: Any = V2, *, removed: bool = False) -> str | None:
    def digests(keys: Collection[str]) -> dict[str, str]:
        return dict.fromkeys(keys, now)

    return conflicts({"x": base}, {"x"} if removed else set(), version, digests).get("x")


@pytest.mark.parametrize(
    ("base", "now", "version"),
    [
        (Stored(V1, ()), "anything", V1),
        (Stored(V1, ("a",)), "a", V2),
        (Stored(V1, ("a", "b")), "b", V2),
        (Stored(None, ("a",)), "a", None),
        (NOTHING, ABSENT, V2),
        (NOTHING, ABSENT, None),
        (ANYTHING, "b", V2),
    ],
)
def test_what_is_known_to_be_unchanged(base: Stored, now: str, version: Any) -> None:
    assert judged(base, now, version) is None


@pytest.mark.parametrize(
    ("base", "now", "version"),
    [
        (Stored(V1, ("a",)), "b", V2),
        (Stored(V1, ("a",)), ABSENT, None),
        (NOTHING, "a", V1),
        (Stored(V1, ()), "a", V2),
        (Stored(V1, ()), ABSENT, None),
        (Stored(None, ()), "a", None),
        (NOT_NOTED, "a", V1),
    ],
)
def test_everything_else_is_a_conflict(base: Stored, now: str, version: Any) -> None:
    assert judged(base, now, version)


def test_a_chunk_is_followed_with_a_digest_if_one_was_noted() -> None:
    chunk = Second(b"chunk")
    for before in (Stored(V2), Stored(V2, ("a",))):
        assert before.followed(chunk) is before
    assert Stored(V1).followed(chunk) == Stored(V2)
    assert Stored(V1, ("a",)).followed(chunk) == Stored(V2, (digest_of(chunk),))
    assert Stored(V1, ("a",)).followed(None) == NOTHING


def test_an_error_names_a_chunk_that_is_shortened_while_it_is_read() -> None:
    shards = SimpleNamespace(stored_chunk=lambda _: Shortened(b"chunk"), number_of=lambda _: 0, key=lambda _: "c/0/1")
    tree = SimpleNamespace(is_frozen=False, path="a", shards=shards)
    with pytest.raises(CorruptShardError, match=re.escape("c/0/1: chunk (3, 4): 6 bytes expected")):
        Stored.from_target(cast("Target", SimpleNamespace(tree=tree, coords=(3, 4))))


def test_only_known_bytes_are_the_same() -> None:
    assert Stored(V1, ("a", "b")).is_same(Stored(V2, ("b",)))
    for before, now in (((), ()), (("a",), ()), ((), ("a",)), (("a",), ("b",))):
        assert not Stored(V1, before).is_same(Stored(V2, now))


def test_a_chunk_that_both_have_removed_is_no_conflict() -> None:
    for base in (Stored(V1, ("a",)), Stored(V1), NOTHING):
        assert judged(base, ABSENT, removed=True) is None
        assert judged(base, "b", removed=True)


def test_bytes_with_their_own_checksum_have_different_digests() -> None:
    chunks = [data + int(google_crc32c.value(data)).to_bytes(4, "little") for data in (b"one", b"two")]
    assert len({google_crc32c.value(chunk) for chunk in chunks}) == 1
    digests = {digest_of(MemoryBlob(chunk)) for chunk in chunks}
    assert len(digests) == 2
    assert {len(bytes.fromhex(digest)) for digest in digests} == {16}


@pytest.mark.parametrize("value", [NOTHING, ANYTHING, NOT_NOTED, Stored(((1, 2), ("x", None)), ("a", ABSENT))])
def test_it_is_kept_in_the_journal(value: Stored) -> None:
    assert Stored.from_json(json.loads(json.dumps(value.to_json()))) == value
    assert Stored.from_json(value.to_json()) == value


@pytest.mark.parametrize(
    "value", [[0, 10], [0, 10, 99], "?", 7, {}, {"digests": "a"}, {"digests": [1]}, {"version": 1}]
)
def test_what_other_releases_have_noted_is_not_known(value: Any) -> None:
    assert not Stored.from_json(value).digests
    assert judged(Stored.from_json(value), "a")
