"""How long a mount that was taken away goes on to publish, and what it says of the rest."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.daemon import shutdown
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine:
    """Publishes one file after the other, each in `each_s` seconds, and then `stuck` ones never."""

    def __init__(self, n: int = 0, each_s: float = 0.0, stuck: int = 0, failure: Exception | None = None) -> None:
        self.files = [f"c/{i}" for i in range(n + stuck)]
        self.each_s, self.stuck, self.failure = each_s, stuck, failure
        self.over, self.looks = threading.Event(), 0
        self.given = 0.0

    def state(self) -> dict[str, Any]:
        return {}

    def left(self) -> list[str]:
        self.looks += 1
        return list(self.files)

    def close(self, timeout: float) -> list[str]:
        self.given = timeout
        while len(self.files) > self.stuck:
            self.pause()
            self.files.pop(0)
        if self.failure is not None:
            raise self.failure
        if self.stuck:
            self.over.wait(60)  # longer than any test lets it
        return self.left()

    def pause(self) -> None:
        self.over.wait(self.each_s)


class Timed(Engine):
    """The same by a clock that nothing else moves. Somebody looks at what is left before it goes on."""

    now = 0.0

    def pause(self) -> None:
        self.now += self.each_s
        before = self.looks
        wait_until(lambda: self.looks > before + 1)  # the one at hand may be older

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "HURRIED_S", 0.3)
    monkeypatch.setattr(shutdown, "INTERVAL_S", 0.02)


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "STALL_S", 0.5)


def never(_seconds: float) -> bool:
    return False


def drained(engine: Engine, *, hurried: bool = False, signalled: Callable[[float], bool] = never) -> tuple[int, float]:
    """What is left, and how long it took."""
    start = time.monotonic()
    remaining = shutdown.drain(engine, hurried=hurried, signalled=signalled, progress=lambda _: None)
    engine.over.set()
    return remaining, time.monotonic() - start


def test_everything_is_published() -> None:
    engine = Engine(5, 0.001)
    assert drained(engine)[0] == 0
    assert engine.given > 3600


@pytest.mark.usefixtures("stalls")
def test_it_goes_on_as_long_as_something_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Timed(8, 0.2)
    monkeypatch.setattr(shutdown, "time", engine)
    assert drained(engine)[0] == 0
    assert engine.now > 1.5  # three times as long as it may stand still


@pytest.mark.usefixtures("stalls")
def test_it_does_not_wait_for_ever() -> None:
    remaining, seconds = drained(Engine(2, 0.01, stuck=3))
    assert remaining >= 3
    assert 0.5 <= seconds < 100


def test_after_a_signal_it_is_short() -> None:
    engine = Engine(1000, 0.1)
    remaining, seconds = drained(engine, hurried=True)
    assert remaining > 0
    assert 0.3 <= seconds < 100
    assert engine.given == 0.3


def test_a_signal_meanwhile_makes_it_short() -> None:
    signals = iter([False, False, True])
    remaining, seconds = drained(Engine(1000, 0.1), signalled=lambda _: next(signals, False))
    assert remaining > 0
    assert seconds < 100


@pytest.mark.usefixtures("stalls")
def test_what_is_left_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert drained(Engine(stuck=25))[0] == 25
    (record,) = caplog.records
    assert record.getMessage().startswith("the journal keeps 25 files: c/0, c/1, ")
    assert record.getMessage().endswith(" and 5 more")


def test_a_failure_is_no_success(caplog: pytest.LogCaptureFixture) -> None:
    assert drained(Engine(stuck=1, failure=OSError(28, "No space left on device")))[0] == 1
    assert "could not be published" in caplog.text
