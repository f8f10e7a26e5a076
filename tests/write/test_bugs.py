"""The bugs that are seeded can still be put into the sources."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT
from tests.write.bugs import BUGS, Bug, edited

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.every_case
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_fits_the_sources(bug: Bug, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shardfs", tmp_path / "shardfs", ignore=shutil.ignore_patterns("__pycache__"))
    edited(tmp_path, bug)
    changed = [
        p for p in (tmp_path / "shardfs").rglob("*.py") if p.read_text() != (ROOT / p.relative_to(tmp_path)).read_text()
    ]
    assert changed
    for path in changed:
        compile(path.read_text(), path, "exec")
