"""Words in messages agree with the numbers before them."""

from __future__ import annotations

from shardfs.model.text import counted


def test_one_has_no_s() -> None:
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
