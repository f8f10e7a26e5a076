"""The cases that the quick run tries."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace
from typing import Any

from tests.sampling import MOST, sampled


def cases(test: str, *marks: str, **sizes: int) -> list[Any]:
    """A test with parameters of so many values."""
    return [
        SimpleNamespace(
            nodeid=f"{test}[{'-'.join(map(str, numbers))}]",
            callspec=SimpleNamespace(indices=dict(zip(sizes, numbers, strict=True))),
            get_closest_marker=lambda mark: mark if mark in marks else None,
        )
        for numbers in product(*map(range, sizes.values()))
    ]


def test_few_cases_are_tried_all() -> None:
    assert len(sampled(cases("f", a=2, b=4))) == MOST == 4


def test_fewer_are_tried_if_they_take_long() -> None:
    assert len(sampled(cases("f", "fuse", a=2, b=3))) == 2
    assert len(sampled(cases("f", "fuse", "slow", a=2, b=3))) == 1


def test_each_value_is_tried_and_then_pairs() -> None:
    names = [name[2:-1].split("-") for name in sampled(cases("f", a=4, b=2, c=3))]
    assert len(names) == MOST
    assert [len({case[axis] for case in names}) for axis in range(3)] == [4, 2, 3]
    assert len({(case[1], case[2]) for case in names}) == 4


def test_tests_take_others_of_the_same_values() -> None:
    names = [name.partition("[")[2] for test in "abcdefghijklmnopqrst" for name in sampled(cases(test, form=59))]
    assert len(names) == 20 * MOST
    assert len(set(names)) > 35


def test_the_order_does_not_matter() -> None:
    items = cases("f", a=20, b=3)
    wanted = sampled(items)
    random.Random(0).shuffle(items)
    assert sampled(items) == wanted


def test_cases_that_are_all_promises_stay() -> None:
    assert len(sampled(cases("f", "every_case", a=30))) == 30
