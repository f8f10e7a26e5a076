"""Calls in another process: what they return, raise, and what happens when it ends."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from shardfs.codecs import sandbox
from shardfs.codecs.sandbox import Crash, Sandbox


def test_calls() -> None:
    worker = Sandbox()
    pid = worker.call("os", "getpid")
    assert pid not in (os.getpid(), None)
    array = np.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(worker.call("numpy", "negative", array), -array)
    with pytest.raises(ValueError, match="invalid literal"):
        worker.call("builtins", "int", "x")
    assert worker.call("builtins", "print", "not an answer") is None
    assert worker.call("os", "getpid") == pid
    worker.end()


@pytest.mark.parametrize(("module", "function", "args"), [("os", "_exit", (3,)), ("os", "abort", ()), ("os", "x", ())])
def test_a_crash_is_told_and_the_next_call_works(module: str, function: str, args: tuple[int, ...]) -> None:
    worker = Sandbox()
    for _ in range(2):
        with pytest.raises(Crash):
            worker.call(module, function, *args)
        assert worker.call("operator", "add", 1, 2) == 3
    worker.end()


CALLS: list[int] = []


def crash_at_the_second_call() -> int:
    CALLS.append(0)
    if len(CALLS) > 1:
        os.abort()
    return os.getpid()


def test_a_crash_of_a_used_process_does_not_fail_the_call() -> None:
    worker = Sandbox()
    first, second = (worker.call(__name__, crash_at_the_second_call.__name__) for _ in range(2))
    assert first != second
    worker.end()


def test_what_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    worker = Sandbox()
    with pytest.raises(Crash):
        worker.call("time", "sleep", 60)
    worker.end()


def test_memory_is_bounded() -> None:
    worker = Sandbox()
    with pytest.raises(MemoryError):
        worker.call("numpy", "zeros", sandbox.MEMORY)
    worker.end()


def test_threads_get_their_own_answers() -> None:
    worker = Sandbox()
    found: dict[int, int] = {}

    def ask(n: int) -> None:
        for _ in range(50):
            found[n] = worker.call("operator", "neg", n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.end()
    assert found == {n: -n for n in range(4)}
