"""The layout n5 through mounts, opened by programs that know N5 alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from shardfs.codecs.images import lacking
from tests import datasets
from tests.conftest import MountFailed, client_python, run_client
from tests.mount.programs import dealt, link_tree, run, shardfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.data_n5 import Client
    from tests.datasets import Array, Dataset

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.fuse]

REFUSED = {
    "dtype_complex64": "N5 has no data type complex64",
    "dtype_float16": "N5 has no data type float16",
    "rank_0": "N5 has no arrays without axes",
    "rank_0_v2": "N5 has no arrays without axes",
}

Farm = tuple["Path", "Mapping[str, Dataset]"]

CLIENTS: list[Client] = ["tensorstore", "z5", "n5store"]


@pytest.fixture(scope="module")
def farm(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with all Zarr v3 variants, sharded and (`plain`) not, each under its name."""
    base = tmp_path_factory.mktemp("layout")
    found = {name: dataset("zarr3", name) for name in datasets.ZARR3}
    for name, written in found.items():
        link_tree(written.path, base / "farm/sharded" / name)
        link_tree(written.twin, base / "farm/plain" / name)
    return base / "farm", found


def _wanted(found: Mapping[str, Dataset]) -> dict[str, Array]:
    """What readers must find below the top of the mount: arrays by path; axes reversed, as `read_n5` has them."""
    out = {}
    for name, dataset in found.items():
        for member, data in dataset.arrays.items():
            for form in ("sharded", "plain"):
                shown = f"s{member}" if name == "ome_pyramid" else member
                out["/".join(filter(None, (form, name, shown)))] = data.astype("uint8") if data.dtype == bool else data
    return out


def _wrong(client: Client, mount: Path, wanted: Mapping[str, Array], scratch: Path) -> dict[str, str]:
    """What a client reads otherwise than it should: paths of arrays, x first, and what is the matter."""
    jobs = [
        {"arguments": [client, str(mount), path], "out": str(scratch / f"{i}.npy"), "failed": str(scratch / f"{i}.bad")}
        for i, path in enumerate(wanted)
    ]
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    python = client_python("zarr2") if client == "n5store" else sys.executable
    run_client("read_many", "read_n5", scratch / "jobs.json", python=python, timeout=250)
    wrong = {}
    for i, (path, data) in enumerate(wanted.items()):
        failed, out = scratch / f"{i}.bad", scratch / f"{i}.npy"
        if failed.exists() or not out.exists():
            wrong[path] = failed.read_text() if failed.exists() else "nothing"
        elif not np.array_equal(np.load(out), data, equal_nan=data.dtype.kind == "f"):
            wrong[path] = "other values"
    return wrong


@pytest.mark.parametrize("client", CLIENTS)
def test_client_reads_zarr(client: Client, farm: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, found = farm
    wanted = {path: data.T for path, data in _wanted(found).items() if path.split("/")[1] not in REFUSED}
    assert len(wanted) > 100
    with mounted(root, "--layout", "n5", "-o", "unsupported=skip") as mount:
        assert _wrong(client, mount, dict(dealt(list(wanted.items()), client, CLIENTS)), tmp_path) == {}


@pytest.fixture(scope="module")
def volumes(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """The same with precomputed volumes."""
    base = tmp_path_factory.mktemp("volumes")
    found = {name: dataset("precomputed", name) for name in datasets.PRECOMPUTED}
    for name, written in found.items():
        link_tree(written.path, base / "farm/sharded" / name)
        link_tree(written.twin, base / "farm/plain" / name)
    return base / "farm", found


@pytest.mark.parametrize("client", CLIENTS)
def test_client_reads_precomputed(client: Client, volumes: Farm, mounted: Mounted, tmp_path: Path) -> None:
    root, found = volumes
    wanted: dict[str, Array] = {}
    for name, dataset in found.items():
        scales = json.loads((dataset.path / "info").read_bytes())["scales"]
        deep = any("/" in scale["key"] for scale in scales)
        for number, data in dataset.arrays.items():
            scale = scales[int(number)]
            if scale["encoding"] == "raw" or not lacking(scale["encoding"], data.dtype, data.shape[-1]):
                shown = scale["key"] if deep else f"s{number}"
                array = data[..., 0] if data.shape[-1] == 1 else data
                wanted |= {f"{form}/{name}/{shown}": array for form in ("sharded", "plain")}
    assert len(wanted) > 50
    with mounted(root, "--layout", "n5", "-o", "unsupported=skip") as mount:
        assert _wrong(client, mount, dict(dealt(list(wanted.items()), client, CLIENTS)), tmp_path) == {}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_n5_cannot_say_is_refused(name: str, farm: Farm, mounted: Mounted) -> None:
    with pytest.raises(MountFailed) as refused, mounted(farm[0] / "sharded" / name, "--layout", "n5"):
        pass
    assert f"/: cannot be shown as n5: {REFUSED[name]}" in refused.value.stderr


def test_what_is_skipped_is_told(farm: Farm) -> None:
    told = shardfs("info", farm[0] / "plain", "-o", "layout=n5,unsupported=skip", "--json")
    assert told.returncode == 0, told.stderr
    problems = {p["path"]: (p["why"], p["skipped"]) for p in json.loads(told.stdout)["problems"]}
    assert problems == {name: (f"cannot be shown as n5: {why}", True) for name, why in REFUSED.items()}


@pytest.mark.parametrize(("options", "least", "most"), [((), 0, 17 << 20), (("-o", "direct_io"), 47 << 20, 49 << 20)])
def test_decoded_chunks_that_the_kernel_keeps_are_soon_forgotten(
    options: tuple[str, ...], least: int, most: int, mounted: Mounted, tmp_path: Path
) -> None:
    """And each is decoded once, although many requests ask for its parts."""
    values = np.random.default_rng(3).integers(0, 50, (24, 1 << 20), dtype="<u2")
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=values.shape, dtype="<u2", chunks=(1, 1 << 20), shards=(4, 1 << 20)
    )
    array[:] = values
    with mounted(tmp_path / "a.zarr", "--layout", "n5", *options) as mount:
        run("sh", "-c", f"cat {mount}/0/* | md5sum", timeout=60)
        cache = json.loads(run("cat", mount / ".shardfs/status.json", timeout=60))["caches"]["chunk"]
        assert least <= cache["bytes"] <= most
        assert cache["misses"] == len(values)
        block = subprocess.run(["cat", mount / "0/23"], stdout=subprocess.PIPE, timeout=250, check=True).stdout
        assert np.array_equal(np.frombuffer(block[12:], ">u2"), values[23])
