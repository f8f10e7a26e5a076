"""T3: a model of the engine, in this process and through FUSE; see `model.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.write import model
from tests.write.layout_model import PAIRS, LayoutMachine
from tests.write.model import told
from tests.write.mounts import program
from tests.write.scale import times

if TYPE_CHECKING:
    from pathlib import Path

TestModel = pytest.mark.slow(pytest.mark.timeout(300 + 100 * times())(model.WritingMachine.TestCase))
TestModel.settings = told(60, 30) if times() == 1 else told(100 * times(), 50)

TestTurned = pytest.mark.slow(pytest.mark.timeout(300 + 100 * times())(model.TurnedMachine.TestCase))
TestTurned.settings = told(40, 30) if times() == 1 else told(100 * times(), 50)


@pytest.mark.slow
@pytest.mark.timeout(300 + 100 * times())
@pytest.mark.parametrize("pair", PAIRS)
def test_layouts(pair: str) -> None:
    machine = type("Machine", (LayoutMachine,), {"pair": PAIRS[pair]})
    run_state_machine_as_test(machine, settings=told(5, 20) if times() == 1 else told(20 * times(), 40))


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.timeout(320 * times())
def test_a_mount(tmp_path: Path) -> None:
    """Each mount takes a second or two: it is the number of them that counts."""
    examples, steps = (3, 15) if times() == 1 else (5 * times(), 30)
    much = ["--examples", str(examples), "--steps", str(steps)]
    program("model", tmp_path, *much, timeout=300 * times())
