"""Sharded N5 through mounts: every variant is read by those who read N5."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_n5
from tests.conftest import run_client
from tests.data_n5 import MEMBER, VARIANTS, Dataset
from tests.datasets import client_python, read_tree, same
from tests.mount.programs import link_tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.data_n5 import Client
    from tests.datasets import Array

pytestmark = [pytest.mark.interop, pytest.mark.slow]

Farm = tuple["Path", "Mapping[str, Dataset]"]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with the containers of all variants, each under its name, and what they are."""
    base = tmp_path_factory.mktemp("n5")
    variants = {name: variant.write(base / name, name) for name, variant in VARIANTS.items()}
    for name, dataset in variants.items():
        link_tree(dataset.path, base / "farm" / name)
    return base / "farm", variants


def _parsed(files: Mapping[str, Any]) -> dict[str, Any]:
    return {n: json.loads(d) if n.endswith("attributes.json") else d for n, d in files.items()}


def _read(client: Client, roots: Mapping[str, Path], scratch: Path) -> dict[str, Array | str]:
    """What one process of `client` reads of each container: an array, or the message of its failure."""
    jobs = [
        {
            "arguments": [client, str(root), MEMBER],
            "out": str(scratch / f"{name}.npy"),
            "failed": str(scratch / f"{name}.failed"),
        }
        for name, root in roots.items()
    ]
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    python = client_python("zarr2") if client == "n5store" else sys.executable
    run_client("read_many", "read_n5", scratch / "jobs.json", python=python, timeout=250)
    outcomes: dict[str, Array | str] = {}
    for name in roots:
        failed = scratch / f"{name}.failed"
        outcomes[name] = failed.read_text() if failed.exists() else np.load(scratch / f"{name}.npy")
    return outcomes


@pytest.mark.fuse
@pytest.mark.parametrize("client", ["tensorstore", "z5", "n5store"])
def test_client_reads_every_variant(client: Client, farm: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, variants = farm
    wanted = {name: d.array for name, d in variants.items() if client in d.readers}
    assert len(wanted) > 40
    with mounted(root) as mount:
        outcomes = _read(client, {name: mount / name for name in wanted}, tmp_path)
    wrong = {n: str(f) for n, f in outcomes.items() if isinstance(f, str) or not same(f, wanted[n])}
    assert wrong == {}


@pytest.mark.fuse
@pytest.mark.parametrize("client", ["tensorstore", "z5", "n5store"])
def test_blocks_of_the_specification_are_read(client: Client, mounted: Mounted, tmp_path: Path) -> None:
    names = [name for name in data_n5.golden() if name.startswith("specification")]
    for name in names:
        container = tmp_path / "farm" / name
        link_tree(data_n5.GOLDEN / name / "stored", container / MEMBER)
        (container / "attributes.json").write_text('{"n5": "4.0.0"}')
    with mounted(tmp_path / "farm") as mount:
        outcomes = _read(client, {name: mount / name for name in names}, tmp_path)
    wanted = np.zeros((2, 4, 3), "uint16")
    wanted[1, 2:4] = np.arange(1, 7).reshape(3, 2).T  # x fastest
    for name, array in outcomes.items():
        assert not isinstance(array, str), f"{name}: {array}"
        assert array.tolist() == wanted.tolist()


@pytest.mark.fuse
def test_a_dataset_is_mounted_by_itself(farm: Farm, mounted: Mounted) -> None:
    """Not in a container: a dataset's directory is the root of the mount."""
    dataset = farm[1]["rank_3"]
    with mounted(dataset.path / MEMBER) as mount:
        assert _parsed(read_tree(mount)) == _parsed(read_tree(dataset.twin / MEMBER))
