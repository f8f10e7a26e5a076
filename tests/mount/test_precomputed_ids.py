"""Meshes, skeletons and annotations through real mounts: every file, and what other programs read."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_precomputed_ids
from tests.clients.write_igneous import LABELS
from tests.conftest import client_python, run_client
from tests.mount.programs import link_tree, shardfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import FuseRequests, Mounted
    from tests.data_precomputed_ids import IdDataset

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

Farm = tuple["Path", "Mapping[str, IdDataset]"]


@pytest.fixture(scope="module")
def farm(id_dataset: Callable[[str], IdDataset], tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """A directory with all variants, each under its name, and what they are."""
    root, planted = tmp_path_factory.mktemp("farm"), {}
    for name in data_precomputed_ids.DATASETS:
        try:
            planted[name] = id_dataset(name)
        except pytest.skip.Exception:  # its writer is not installed
            continue
        link_tree(planted[name].path, root / name)
    return root, planted


@pytest.mark.parametrize("client", ["read_cloudvolume_ids", "read_neuroglancer"])
def test_client_reads_what_it_reads_from_twin_and_shards(
    client: str, farm: Farm, mounted: Mounted, tmp_path: Path
) -> None:
    root, variants = farm
    wanted = {n: v for n, v in variants.items() if v.reader is not None and v.reader[0] == client}
    if not wanted:
        client_python("cv")  # skips
    assert len(wanted) > 3
    with mounted(root) as mount:
        jobs = []
        for name, variant in wanted.items():
            arguments = json.loads(variant.reader[1] if variant.reader is not None else "")
            for form, path in (("mount", mount / name), ("twin", variant.twin), ("shards", variant.path)):
                out, failed = str(tmp_path / f"{name}.{form}.npy"), str(tmp_path / f"{name}.{form}.failed")
                jobs.append({"arguments": [str(path), arguments], "out": out, "failed": failed})
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        run_client("read_many", client, tmp_path / "jobs.json", python=client_python("cv"), timeout=250)
    assert [path.read_text() for path in tmp_path.glob("*.failed")] == []
    for name in wanted:
        mount_names, twin, shards = (_read(tmp_path / f"{name}.{form}.npy") for form in ("mount", "twin", "shards"))
        assert len(mount_names) > 10
        assert mount_names == twin == shards


def _read(path: Path) -> Any:
    return json.loads(np.load(path).tobytes())


def test_igneous_finds_all_skeletons_of_a_mount_and_shards_them_again(
    farm: Farm, mounted: Mounted, tmp_path: Path
) -> None:
    root, variants = farm
    python = client_python("cv")
    twin = variants["igneous_murmur"].twin
    (tmp_path / "target").mkdir()
    shutil.copy(twin / "info", tmp_path / "target")
    labels, out = json.dumps(LABELS), tmp_path / "out.npy"
    with mounted(root / "igneous_murmur") as mount:
        run_client("reshard_igneous", mount, tmp_path / "target", out, labels, python=python)
    run_client("read_cloudvolume_ids", twin, tmp_path / "twin.npy", labels, python=python)
    wanted = {key: value for key, value in _read(tmp_path / "twin.npy").items() if key.startswith("skeleton")}
    assert len(wanted) == len(LABELS)
    assert _read(out) == wanted
    with mounted(tmp_path / "target") as mount:
        assert {int(name) for name in os.listdir(mount / "skeletons") if name.isdigit()} == set(LABELS)


def test_every_name_has_a_number_of_its_own(farm: Farm, mounted: Mounted) -> None:
    """Ids of 64 bits do not fit in the numbers by which the kernel knows files; what is listed is what is found."""
    root, variants = farm
    if "igneous_murmur" not in variants:
        client_python("cv")  # skips
    with mounted(root) as mount:
        numbers = set()
        count = 0
        for name in variants:
            for directory, _, names in os.walk(mount / name):
                with os.scandir(directory) as entries:
                    listed = {entry.name: entry.inode() for entry in entries}
                for file in names:
                    count += 1
                    numbers.add(os.stat(os.path.join(directory, file)).st_ino)
                    assert os.stat(os.path.join(directory, file)).st_ino == listed[file]
    assert len(numbers) == count


def test_where_a_file_lies(farm: Farm, mounted: Mounted) -> None:
    """`getfattr`, `locate` and the shard itself agree."""
    root, variants = farm
    if "igneous_murmur" not in variants:
        client_python("cv")  # skips
    source, twin = root / "igneous_murmur", variants["igneous_murmur"].twin
    with mounted(source) as mount:
        for label in (LABELS[0], LABELS[-1]):
            for name in (f"mesh/{label}.index", f"mesh/{label}"):
                where = {
                    k: os.getxattr(mount / name, f"user.shardfs.{k}").decode() for k in ("shard", "offset", "nbytes")
                }
                start, size = int(where["offset"]), int(where["nbytes"])
                shard = (source / where["shard"]).read_bytes()
                assert shard[start : start + size] == (twin / name).read_bytes()
                told = json.loads(shardfs("locate", "--json", source, name).stdout)
                assert (told["shard"], told["offset"], told["size"]) == (where["shard"], start, size)
            output = shardfs("locate", source, "--shard", where["shard"], "--offset", str(start + size)).stdout
            assert output == f"path: mesh/{label}.index\n"


def test_a_mesh_asks_the_kernel_no_more_than_a_plain_file(
    farm: Farm, mounted: Mounted, fuse_requests: FuseRequests
) -> None:
    root, variants = farm
    if "igneous_murmur" not in variants:
        client_python("cv")  # skips
    with mounted(root / "igneous_murmur") as mount:
        label = str(LABELS[-1])
        (mount / "mesh" / str(LABELS[0])).read_bytes()
        with fuse_requests(mount) as counts, (mount / "mesh" / label).open("rb", buffering=0) as file:
            data = file.read()
    assert data == (variants["igneous_murmur"].twin / "mesh" / label).read_bytes()
    assert counts["LOOKUP"] <= 1
    assert counts["READ"] <= 1
    assert sum(counts.values()) <= 6
