"""Many at a time, or one alone, in all orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardfs.write.rw_lock import RWLock
from tests.scheduling import bool_true, explore
from tests.virtual_threads import install, wait
from tests.write.scale import times

if TYPE_CHECKING:
    from tests.scheduling import Schedule


class House:
    """Who is inside, as the gate lets them in."""

    def __init__(self) -> None:
        self.gate = RWLock()
        self.inside = 0
        self.alone = 0

    def look(self) -> None:
        wait(bool_true)  # another thread may come in now
        assert self.alone <= 1
        assert not (self.alone and self.inside)

    def together(self) -> None:
        with self.gate.shared(), self.gate.shared():
            self.inside += 1
            self.look()
            self.inside -= 1

    def by_itself(self) -> None:
        with self.gate.alone():
            self.alone += 1
            with self.gate.shared():
                self.look()
            self.alone -= 1

    def in_between(self) -> None:
        with self.gate.shared(), self.gate.alone(), self.gate.alone():
            self.alone += 1
            self.look()
            self.alone -= 1


@pytest.mark.every_case
@pytest.mark.parametrize("names", [
    ("together", "together", "by_itself"), ("together", "by_itself", "by_itself"),
    ("in_between", "in_between", "together"),
])  # fmt: skip
def test_who_is_alone_meets_nobody(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    def scenario(schedule: Schedule) -> None:
        house = House()
        schedule.together(*(getattr(house, name) for name in names))
        assert house.gate._inside == house.gate._waiting == 0

    assert explore(scenario, preemptions=1 + (times() > 1)) > 60


def test_an_error_opens_it_again() -> None:
    gate = RWLock()
    for way in (gate.alone, gate.shared):
        try:
            with way():
                raise OSError
        except OSError:
            pass
    with gate.alone():
        pass
