"""T9b: power losses under ext4 and XFS, see `disks.py`. Needs root, loop devices, mkfs.ext4 and mkfs.xfs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.alone import alone
from tests.datasets import ROOT
from tests.write.disks import FILE_SYSTEMS

pytestmark = [pytest.mark.fuse, pytest.mark.slow]


def need_disks(kind: str) -> None:
    """Skip where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    if not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices")
    if not shutil.which(FILE_SYSTEMS[kind].make[0]):
        pytest.skip(f"{FILE_SYSTEMS[kind].make[0]} is not installed")
    if subprocess.run([*alone(), "true"], cwd=ROOT, stderr=subprocess.DEVNULL, timeout=10, check=False).returncode:
        pytest.skip("no namespace can be made here")


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["zarr_end", "precomputed"])
@pytest.mark.parametrize("kind", sorted(FILE_SYSTEMS))
def test_a_power_loss_under_a_file_system(kind: str, target: str) -> None:
    need_disks(kind)
    command = [*alone(), sys.executable, "-m", "tests.write.disks", kind, target, "--states=300"]
    run = conftest._run(command, 1100, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    document = json.loads(run.stdout)
    assert document["wrong"] == [], f"{document['failures']} of {document['points']} states: " + "\n".join(
        document["wrong"][:5]
    )
    assert document["points"] == 300
