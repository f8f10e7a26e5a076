"""The layout zarr3 through mounts, opened by programs that know Zarr v3."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_n5, data_zarr_transformer, datasets
from tests.conftest import client_python, run_client
from tests.mount.programs import dealt, link_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array, Dataset

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.fuse]

Farm = tuple["Path", "Mapping[str, Array]"]

CLIENTS: Mapping[str, Callable[[Path, str], list[Any]]] = {
    "zarr3": lambda mount, member: [str(mount), member],
    "tensorstore": lambda mount, member: ["zarr3", str(mount / member), None],
    "z5": lambda mount, member: [str(mount), member],
    "zarr2": lambda mount, member: [str(mount), member],
    "n5": lambda mount, member: ["tensorstore", str(mount), member],
}

READERS = ["zarr3", "tensorstore", "z5"]


@pytest.fixture(scope="module")
def n5(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with all variants of N5, sharded and not."""
    base = tmp_path_factory.mktemp("n5")
    arrays = {}
    for name, variant in data_n5.VARIANTS.items():
        dataset = variant.write(base / "written" / name, name)
        for form, path in (("sharded", dataset.path), ("plain", dataset.twin)):
            link_tree(path, base / "farm" / form / name)
            arrays[f"{form}/{name}/{data_n5.MEMBER}"] = dataset.array.T
    return base / "farm", arrays


def reads(client: str, member: str, data: Array) -> bool:
    """Whether a program knows such arrays at all."""
    if client == "z5":  # takes any array of Zarr v3 for little-endian
        return data.dtype.itemsize == 1
    return True


@pytest.mark.parametrize("client", READERS)
def test_client_reads_n5(client: str, n5: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = n5
    wanted = {path: data for path, data in arrays.items() if reads(client, path, data)}
    assert wanted
    with mounted(root, "--layout", "zarr3") as mount:
        assert read_all(client, mount, dict(dealt(list(wanted.items()), client, READERS)), tmp_path) == {}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with hierarchies of the draft of 2022, sharded and not, as zarr-python 2.18 writes them."""
    base = tmp_path_factory.mktemp("draft")
    found = data_zarr_transformer.write_variants(base)
    arrays = {
        "/".join(filter(None, (form, h.name, path))): data
        for h in found.values()
        if h.name != "behind_another"  # a transformer of which nobody knows what it does
        for form in ("sharded", "plain")
        for path, data in h.arrays.items()
    }
    assert len(arrays) > 50
    return base, arrays


@pytest.mark.parametrize("client", READERS)
def test_client_reads_the_draft(client: str, draft: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = draft
    wanted = {path: data for path, data in arrays.items() if reads(client, path, data)}
    with mounted(root, "--layout", "zarr3", "-o", "unsupported=skip") as mount:
        assert read_all(client, mount, wanted, tmp_path) == {}


@pytest.fixture(scope="module")
def volumes(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with all variants of precomputed volumes, sharded and not."""
    base = tmp_path_factory.mktemp("volumes")
    arrays = {}
    for name in datasets.PRECOMPUTED:
        written = dataset("precomputed", name)
        for form, path in (("sharded", written.path), ("plain", written.twin)):
            link_tree(path, base / "farm" / form / name)
            scales = json.loads((path / "info").read_bytes())["scales"]
            for mip, data in written.arrays.items():
                wanted = data.T if data.shape[3] > 1 else data[..., 0].T
                arrays[f"{form}/{name}/{scales[int(mip)]['key']}"] = wanted
    return base / "farm", arrays


@pytest.mark.parametrize("client", READERS)
def test_client_reads_precomputed(client: str, volumes: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = volumes
    with mounted(root, "--layout", "zarr3", "-o", "unsupported=skip") as mount:
        assert read_all(client, mount, dict(dealt(list(arrays.items()), client, READERS)), tmp_path) == {}


@pytest.mark.parametrize("client", ["zarr2", "zarr3"])
def test_client_reads_the_draft_as_zarr2(client: str, draft: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = draft
    with mounted(root, "--layout", "zarr2", "-o", "unsupported=skip") as mount:
        assert read_all(client, mount, arrays, tmp_path) == {}


def test_tensorstore_reads_the_draft_as_n5(draft: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = draft
    wanted = {path: data.T for path, data in arrays.items() if data.shape}
    with mounted(root, "--layout", "n5", "-o", "unsupported=skip") as mount:
        assert read_all("n5", mount, wanted, tmp_path) == {}


def read_all(client: str, mount: Path, wanted: Mapping[str, Array], tmp_path: Path) -> dict[str, str]:
    """What a program reads otherwise, and how."""
    jobs = [
        {
            "arguments": CLIENTS[client](mount, path),
            "out": str(tmp_path / f"{i}.npy"),
            "failed": str(tmp_path / f"{i}.bad"),
        }
        for i, path in enumerate(wanted)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script, python = ("read_zarr3", client_python("zarr2")) if client == "zarr2" else (f"read_{client}", sys.executable)
    run_client("read_many", script, tmp_path / "jobs.json", python=python, timeout=250)
    wrong = {}
    for i, (path, data) in enumerate(wanted.items()):
        failed, out = tmp_path / f"{i}.bad", tmp_path / f"{i}.npy"
        if failed.exists() or not out.exists():
            wrong[path] = failed.read_text() if failed.exists() else "nothing"
        elif not np.array_equal(np.load(out), data, equal_nan=data.dtype.kind in "fc"):
            wrong[path] = "other values"
    return wrong
