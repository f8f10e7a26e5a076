"""Which cases of a test the quick run tries: a few of many, the same ones in every process and in every run.

Of a test with many cases, those are tried that have each value of each parameter once, if so many are enough, and then
those that have new pairs of values: at most `MOST`, or fewer if they take long. Each test takes others, so that a form
of data that one leaves out is in another one. `pytest.mark.every_case` keeps all.
"""

from __future__ import annotations

import zlib
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST = 4
MOST_LONG = {"slow": 1, "fuse": 2, "s3": 2, "interop": 2}
"""The same for tests with these markers: each of their cases takes a second or more, or several if `slow`."""

Value = tuple[str, int]
"""A parameter and the number of its value."""


def sampled(items: Iterable[pytest.Item]) -> set[str]:
    """Return the node ids of the cases that the quick run tries."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        tests.setdefault(name if item.get_closest_marker("every_case") is None else item.nodeid, []).append(item)
    return {item.nodeid for cases in tests.values() for item in _few(cases)}


def _few(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    limit = min((n for mark, n in MOST_LONG.items() if cases[0].get_closest_marker(mark)), default=MOST)
    if len(cases) <= limit:
        return cases
    untried = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    tried = list[pytest.Item]()
    values, pairs = set[Value](), set[tuple[Value, Value]]()
    while len(tried) < limit:
        best = max(untried, key=lambda item: (len(_values(item) - values), len(_pairs(item) - pairs)))
        untried.remove(best)
        tried.append(best)
        values |= _values(best)
        pairs |= _pairs(best)
    return tried


def _values(item: pytest.Item) -> set[Value]:
    return set(item.callspec.indices.items())  # type: ignore[attr-defined]


def _pairs(item: pytest.Item) -> set[tuple[Value, Value]]:
    return set(combinations(sorted(_values(item)), 2))
