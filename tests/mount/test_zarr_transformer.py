"""The Zarr v3 draft of 2022: what zarr-python 2.18 writes sharded, mounted, is what it writes unsharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests.conftest import client_python, run_client
from tests.data_zarr_transformer import contents, parsed, write_variants
from tests.datasets import same
from tests.mount.programs import outcome_of
from tests.mount.web import GUARDED, LISTED, UNLISTED, find_nginx, serving

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.conftest import Mounted
    from tests.data_zarr_transformer import Hierarchy
    from tests.datasets import Array

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]


@pytest.fixture(scope="module")
def hierarchies(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Hierarchy]:
    return write_variants(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def source(hierarchies: Mapping[str, Hierarchy]) -> Path:
    """The directory of all of them: what is what is found out for each directory."""
    return next(iter(hierarchies.values())).path.parent


def read_all(wanted: Sequence[tuple[Path, str]], scratch: Path, sharding: bool = False) -> list[Array | str]:
    """What zarr-python 2.18 reads from each root at a path. It cannot read shards unless it is told to."""
    jobs: list[dict[str, Any]] = []
    for number, (root, path) in enumerate(wanted):
        out, failed = scratch / f"{number}.npy", scratch / f"{number}.failed"
        arguments = [str(root), path, sharding, root.name == "consolidated"]
        jobs.append({"arguments": arguments, "out": str(out), "failed": str(failed)})
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    run_client("read_many", "read_zarr_draft", scratch / "jobs.json", python=client_python("zarr2"), timeout=250)
    return [outcome_of(Path(job["out"]), Path(job["failed"])) for job in jobs]


def wrong(outcomes: Sequence[Array | str], wanted: Sequence[tuple[str, Array]]) -> dict[str, str]:
    out = {}
    for is_, (name, should) in zip(outcomes, wanted, strict=True):
        if isinstance(is_, str):
            out[name] = is_
        elif not same(is_, should):
            out[name] = f"{np.count_nonzero(is_ != should)} of {should.size} elements differ"
    return out


def test_zarr_python_reads_every_array(
    hierarchies: Mapping[str, Hierarchy], source: Path, mounted: Mounted, tmp_path: Path
) -> None:
    arrays = [(h, path, data) for h in hierarchies.values() for path, data in h.arrays.items()]
    assert len(arrays) > 40
    with mounted(source) as mount:
        outcomes = read_all([(mount / h.name, path) for h, path, _ in arrays], tmp_path)
    assert wrong(outcomes, [(f"{h.name} {path}", data) for h, path, data in arrays]) == {}


def test_shards_can_be_read_by_who_knows_them_only(hierarchies: Mapping[str, Hierarchy], tmp_path: Path) -> None:
    """So that they are what they are taken for."""
    arrays = [(h, path, data) for h in hierarchies.values() if h.readable for path, data in h.arrays.items()]
    outcomes = read_all([(h.path, path) for h, path, _ in arrays], tmp_path, sharding=True)
    assert wrong(outcomes, [(f"{h.name} {path}", data) for h, path, data in arrays]) == {}
    (without,) = read_all([(hierarchies["rank_2"].path, "foo/baz")], tmp_path)
    assert isinstance(without, str)


def test_every_hierarchy_through_fsspec(hierarchies: Mapping[str, Hierarchy], source: Path) -> None:
    fs = ShardFileSystem(source=str(source), skip_instance_cache=True)
    for name, hierarchy in hierarchies.items():
        root = f"/{name}/"
        sizes = {path: info["size"] for path, info in fs.find(root, detail=True).items()}
        tree_files = {path.removeprefix(root): fs.cat_file(path) for path in sizes}
        assert parsed(tree_files) == parsed(contents(hierarchy.twin)), name
        assert sizes == {path: len(tree_files[path.removeprefix(root)]) for path in sizes}


def test_one_hierarchy_is_mounted_by_itself(
    hierarchies: Mapping[str, Hierarchy], mounted: Mounted, tmp_path: Path
) -> None:
    for name in ("root", "rank_2"):
        hierarchy = hierarchies[name]
        with mounted(hierarchy.path) as mount:
            assert parsed(contents(mount)) == parsed(contents(hierarchy.twin))
            assert (
                wrong(read_all([(mount, path) for path in hierarchy.arrays], tmp_path), list(hierarchy.arrays.items()))
                == {}
            )


@pytest.mark.parametrize("server", [LISTED, UNLISTED, GUARDED])
def test_over_a_web_server(
    server: str, hierarchies: Mapping[str, Hierarchy], source: Path, mounted: Mounted, tmp_path: Path
) -> None:
    """Also one that lists nothing, or says of what is not there that it is forbidden: documents are the proof."""
    if find_nginx() is None:
        pytest.skip("no nginx")
    hierarchy = hierarchies["group"]
    (tmp_path / "nginx").mkdir()
    with serving(source, tmp_path / "nginx") as web, mounted(web.url("group", server)) as mount:
        for name, content in parsed(contents(hierarchy.twin)).items():
            if server == LISTED or not name.startswith(("data/root/implied", "meta/root/implied")):
                assert parsed({name: (mount / name).read_bytes()}) == {name: content}
        arrays = [(path, data) for path, data in hierarchy.arrays.items() if path.startswith("g/c")]
        assert wrong(read_all([(mount, path) for path, _ in arrays], tmp_path), arrays) == {}
