"""The targets of fuzzing, as Hypothesis has it, each for SHARDFS_FUZZ_SECONDS where tests marked `torture` run.

And the program that has atheris call them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import seed

from tests.datasets import ROOT
from tests.fuzzing import guided
from tests.fuzzing.targets import TARGETS, as_hypothesis

if TYPE_CHECKING:
    from pathlib import Path

FUZZ_S = float(os.environ.get("SHARDFS_FUZZ_SECONDS", "60"))
EXAMPLES, FEW = 100, 5


@pytest.mark.torture
@pytest.mark.timeout(FUZZ_S + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_only_declared_errors(name: str) -> None:
    end, rounds = time.monotonic() + FUZZ_S, int.from_bytes(os.urandom(4))
    while time.monotonic() < end:
        rounds += 1
        seed(rounds)(as_hypothesis(TARGETS[name], EXAMPLES))()


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(name: str) -> None:
    """That the targets work at all: the same inputs each time."""
    seed(0)(as_hypothesis(TARGETS[name], FEW))()


# ---- the program


def test_what_fails_is_kept_once_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one(data: bytes) -> None:
        if data == b"wrong":
            raise KeyError
        json.loads(data)

    search = guided.Search(one, tmp_path)
    for data in (b"[]", b"[1", b"wrong", b"[2", b"wrong", b"1"):
        search(data)
    assert sorted(p.read_bytes() for p in tmp_path.iterdir()) == [b"[1", b"wrong"]
    assert capsys.readouterr().err.count("Traceback") == 2


def test_what_takes_long_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "SECONDS", -1.0)
    guided.Search(lambda data: None, tmp_path)(b"slow")
    assert [p.name.split("-")[1] for p in tmp_path.iterdir()] == ["TooLongError"]


@pytest.mark.torture
def test_with_atheris_inputs_are_kept_for_the_next_time(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    run = _fuzzing("documents", "--seconds", "5", SHARDFS_FUZZ_CORPUS=str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "edges reached" in run.stdout
    assert any((tmp_path / "documents").iterdir())


def _fuzzing(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzzing", *args]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=200
    )
