"""Mutants: a few of them are found, those that were explained still exist, and each operator changes what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT

pytest.importorskip("cosmic_ray")

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutation.__main__ import CONFIG
from tests.mutation.operators import mutants

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("shardfs/write/stored.py", "shardfs/shards/byte_layouts/uint64_spec.py")
"""Of each, one mutant is tried: always the same until the file is changed."""


def test_a_few_mutants_are_found(tmp_path: Path) -> None:
    command = [
        "sh",
        str(ROOT / "scripts/mutate"),
        "--session",
        str(tmp_path / "session"),
        "--trust",
        "--sample",
        "1",
        *FILES,
    ]
    environment = {**os.environ, "SHARDFS_VENV": sys.prefix}
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(re.findall(r"  killed .* tests/\S+::", run.stdout)) == len(FILES), run.stdout


def test_each_mutant_that_is_explained_exists() -> None:
    explained = {entry["mutant"] for entry in tomllib.loads(CONFIG.read_text()).get("explained", ())}
    files = {name.partition(" ")[0] for name in explained}
    assert explained <= {mutant.job_id for file in files for mutant in mutants(file)}


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("Negate", "if a or b:\n    pass\n", "if not (a or b):\n    pass\n"),
        ("Negate", "x = a if b else c\n", "x = a if not (b) else c\n"),
        ("ReplaceIn", "x = a in b\n", "x = a not in b\n"),
        ("ReplaceIn", "x = a not in b\n", "x = a in b\n"),
        ("RemoveStatement", "if a:\n    sync(a)\n", "if a:\n    pass\n"),
        ("RemoveStatement", "a.b = c\n", "pass\n"),
    ],
)
def test_what_an_operator_changes(operator: str, before: str, after: str) -> None:
    assert mutate_code(before, get_operator(f"own/{operator}")(), 0) == after


def test_code_that_does_nothing_has_no_mutants(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("def f(a: int | None, *, b: bool | None) -> int | None:\n    _log.debug('%d', a + 1)\n")
    assert mutants(str(file)) == []
