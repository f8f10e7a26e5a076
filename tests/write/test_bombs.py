"""T18: what is absurd is refused soon, in little memory, and harms nothing beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.datasets import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


class Step(NamedTuple):
    came: str
    seconds: float
    mib: int


def bombed(what: str, directory: Path) -> dict[str, Step]:
    """What came of each; all within bounds."""
    command = [sys.executable, "-m", "tests.write.bombs", what, str(directory)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    steps = {name: Step(*step) for name, step in json.loads(run.stdout)["steps"].items()}
    assert {name: step for name, step in steps.items() if step.seconds >= 2 or step.mib >= 256} == {}
    return steps


@pytest.mark.parametrize("format", ["zarr", "volume", "n5"])
def test_documents(format: str, tmp_path: Path) -> None:
    """One of shards is not replaced by what is absurd; a new one that is no document is a file as any other."""
    steps = bombed(format, tmp_path)
    edited = {name: step.came for name, step in steps.items() if name.startswith("edited")}
    assert edited.pop("edited: a float beyond all") == "done"
    assert set(edited.values()) == {"EINVAL"}
    assert steps["new: 100 MB"].came == "EFBIG"
    assert {step.came for name, step in steps.items() if name.startswith("new")} <= {"done", "EINVAL", "EFBIG"}


def test_shards(tmp_path: Path) -> None:
    """Whoever writes to one that is damaged is told so, or all else in it stays."""
    steps = bombed("shards", tmp_path)
    assert {step.came for step in steps.values()} <= {"done", "EIO", "EROFS", "ENOENT"}
    for name in ("zarr_deflated_shard_is_a_bomb", "zarr_zstd_bomb", "zarr_tera_slots", "volume_index_is_a_bomb"):
        assert steps[f"{name}: write"].came == "EIO"
    for name in ("zarr_all_overlap", "zarr_shared_and_overlapping", "volume_shared_bytes"):
        assert steps[f"{name}: write"].came == "done"
