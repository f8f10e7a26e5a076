"""The rules of `--create`, and the sizes of shards that nobody told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.create_rules import MAX_BYTES, MAX_CHUNKS, Rule, parse


def test_the_first_rule_that_fits_counts() -> None:
    rules = parse("labels/**=zarr3:chunks_per_shard=8,8; raw/*=none;n5:chunks_per_shard=2x4,index_location=start;zarr3")
    first = rules.match("labels/a/b", "zarr3")
    assert first is not None
    assert first.chunks_per_shard == (8, 8)
    assert rules.match("raw/a", "zarr3") is None
    assert rules.match("raw/a", "n5") is None
    other = rules.match("raw/a/b", "n5")
    assert other == Rule("n5", "**", (2, 4), {"index_location": "start"})
    assert rules.match("x", "zarr3") == Rule("zarr3")
    assert rules.match("", "precomputed") is None
    assert parse("").match("a", "zarr3") is None


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**", "", True),
        ("a/**", "a/b/c", True),
        ("a/**", "ab", False),
        ("**/s0", "s0", True),
        ("**/s0", "a/b/s0", True),
        ("**/s0", "a/bs0", False),
        ("*/s?", "a/s1", True),
        ("*/s?", "a/b/s1", False),
        ("a.b[0]", "a.b[0]", True),
        ("/a/", "a", True),
    ],
)
def test_patterns(pattern: str, path: str, fits: bool) -> None:
    (rule,) = parse(f"{pattern}=zarr3").rules
    assert rule.matches(path) is fits


def test_parameters_of_ids() -> None:
    (rule,) = parse("precomputed:minishard_bits=3,shard_bits=2,hash=identity,data_encoding=raw").rules
    assert rule.numbers == {"minishard_bits": 3, "shard_bits": 2}
    assert rule.words == {"hash": "identity", "data_encoding": "raw"}
    assert parse("zarr3:chunks_per_shard=auto").rules == (Rule("zarr3"),)


@pytest.mark.parametrize(
    "text",
    ["zarr4", "zarr3:chunks_per_shard=0", "zarr3:chunks_per_shard=", "zarr3:shard_bits=3", "zarr3:index_location=top",
     "zarr3:8,8", "precomputed:shard_bits=65", "precomputed:shard_bits=-1", "none:chunks_per_shard=1", "a=b=zarr"],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no rule|is no parameter of a|should be numbers"):
        parse(text)


@given(st.lists(st.integers(0, 10**6), max_size=5), st.integers(0, 2**31), st.booleans())
def test_shards_are_powers_of_two_within_bounds(grid: list[int], chunk_bytes: int, last: bool) -> None:
    per = Rule("zarr3").per_shard(tuple(grid), chunk_bytes, last_is_fastest=last)
    assert all(n & (n - 1) == 0 for n in per)
    assert all(n == 1 or cells == 0 or n <= cells for n, cells in zip(per, grid, strict=True))
    assert math.prod(per) <= MAX_CHUNKS
    assert math.prod(per) == 1 or math.prod(per) * chunk_bytes <= MAX_BYTES
    grows = any(cells == 0 or n * 2 <= cells for n, cells in zip(per, grid, strict=True))
    assert not grows or math.prod(per) * 2 > min(MAX_CHUNKS, MAX_BYTES // max(chunk_bytes, 1))


def test_the_fastest_axes_come_first() -> None:
    assert Rule("zarr3").per_shard((100, 100, 100), 1) == (8, 8, 8)
    assert Rule("zarr3").per_shard((100, 100), 1 << 27) == (2, 4)
    assert Rule("zarr3").per_shard((100, 100), 1 << 27, last_is_fastest=False) == (4, 2)
    assert Rule("zarr3").per_shard((1, 100, 3), 1 << 20) == (1, 256 // 4, 2)
    assert Rule("zarr3").per_shard((), 1) == ()


def test_what_is_told_is_told_of_the_fastest_axes() -> None:
    rule = Rule("zarr3", chunks_per_shard=(2, 4, 8))
    assert rule.per_shard((9, 9, 9, 9), 1) == (1, 2, 4, 8)
    assert rule.per_shard((9,), 1) == (8,)
    assert rule.per_shard((9, 9, 9, 9), 1, last_is_fastest=False) == (2, 4, 8, 1)
    assert rule.per_shard((9,), 1, last_is_fastest=False) == (2,)
