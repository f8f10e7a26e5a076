"""Datasets of all formats, published chunk by chunk, and read by those who know nothing of shardfs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardfs.jobs.shared_work import JobSource, verify
from shardfs.vfs.tree import open_tree
from tests import data_bcolz, data_n5, data_precomputed_ids, data_zarr_transformer, datasets, handmade
from tests.clients import read_tensorstore, read_zarr3
from tests.conftest import read_with, run_client
from tests.datasets import client_python, same
from tests.suites.republishing import republish
from tests.suites.walking import walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.data_precomputed_ids import IdDataset
    from tests.data_zarr_transformer import Hierarchy
    from tests.datasets import Array, Client, Dataset

GOLDEN = Path(__file__).parents[1] / "golden"


def _published(source: Path, target: Path) -> Path:
    """What shardfs shows of it is the same, and sound."""
    republish(source, target)
    assert walk(open_tree(str(target))) == walk(open_tree(str(source)))
    assert [f for report in verify(JobSource.from_url(str(target)), deep=True) for f in report.findings] == []
    return target


def _read_here(client: Client, dataset: Dataset, path: Path, member: str) -> Array:
    """Not in another process, which takes a second to start."""
    if client == "tensorstore" and dataset.format == "precomputed":
        return read_tensorstore.read("neuroglancer_precomputed", str(path), int(member))
    if client == "tensorstore":
        return read_tensorstore.read("zarr3", str(path / member), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_zarr3.read(str(path), member)


def _assert_read(clients: frozenset[Client], dataset: Dataset, path: Path) -> None:
    for client in sorted(clients & dataset.shard_readers):
        read = _read_here if client in ("tensorstore", "zarr3") else read_with
        for member, data in dataset.arrays.items():
            wanted = read(client, dataset, dataset.path, member) if dataset.lossy else data
            assert same(read(client, dataset, path, member), wanted), (client, member)


@pytest.mark.parametrize("name", sorted(datasets.ZARR3))
def test_zarr(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    written = dataset("zarr3", name)
    _assert_read(frozenset(("tensorstore", "zarr3")), written, _published(written.path, tmp_path / "published"))


@pytest.mark.interop
@pytest.mark.parametrize("name", ["default", "inner_gzip", "sparse"])
def test_zarr_is_read_by_z5py(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    written = dataset("zarr3", name)
    _assert_read(frozenset(("z5",)), written, _published(written.path, tmp_path / "published"))


@pytest.mark.parametrize("name", sorted(datasets.PRECOMPUTED))
def test_volumes(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    written = dataset("precomputed", name)
    _assert_read(frozenset(("tensorstore",)), written, _published(written.path, tmp_path / "published"))


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["murmur", "index_gzip_data_gzip", "sparse_murmur", "negative_offset", "two_scales", "flat"]
)
def test_volumes_are_read_by_cloudvolume(name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    written = dataset("precomputed", name)
    _assert_read(frozenset(("cloudvolume",)), written, _published(written.path, tmp_path / "published"))


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(data_precomputed_ids.DATASETS))
def test_meshes_skeletons_and_annotations(name: str, id_dataset: Callable[[str], IdDataset], tmp_path: Path) -> None:
    written = id_dataset(name)
    published = _published(written.path, tmp_path / "published")
    if written.reader is not None:
        script, argument = written.reader
        read = [tmp_path / "original.npy", tmp_path / "published.npy"]
        for path, out in zip((written.path, published), read, strict=True):
            run_client(script, path, out, argument, python=client_python("cv"))
        assert same(*map(np.load, read))


@pytest.mark.parametrize("name", sorted(data_n5.VARIANTS))
def test_n5(name: str, tmp_path: Path) -> None:
    _published(data_n5.VARIANTS[name].write(tmp_path, name).path, tmp_path / "published")


@pytest.mark.parametrize("name", sorted(data_n5.golden()))
def test_n5_as_java_wrote_it(name: str, tmp_path: Path) -> None:
    stored_files, _ = data_n5.golden()[name]
    handmade.write_files(tmp_path / "source", stored_files)
    _published(tmp_path / "source", tmp_path / "published")


@pytest.fixture(scope="module")
def hierarchies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hierarchy]:
    return data_zarr_transformer.write_variants(tmp_path_factory.mktemp("draft"))


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(data_zarr_transformer.VARIANTS.keys() - {"nothing"}))
def test_the_draft_of_2022(name: str, hierarchies: dict[str, Hierarchy], tmp_path: Path) -> None:
    written, out = hierarchies[name], tmp_path / "read.npy"
    published = _published(written.path, tmp_path / "published")
    for member, wanted in written.arrays.items() if name in ("group", "nested") else ():
        python = client_python("zarr2")
        run_client("read_zarr_draft", published, out, "--member", member, "--sharding", python=python)
        assert same(np.load(out), wanted), member


@pytest.mark.parametrize("checksum", [0, 1, 8])
def test_superchunks(checksum: int, tmp_path: Path) -> None:
    data = np.arange(300, dtype="<i4").reshape(100, 3)
    how = data_bcolz.Superchunk(checksum=checksum, slack=3, backwards=True)
    data_bcolz.write_array(tmp_path / "source", data, 7, 4, how)
    _published(tmp_path / "source", tmp_path / "published")


@pytest.mark.parametrize("path", sorted((GOLDEN / "bloscpack").glob("*.blp")), ids=lambda path: path.stem)
def test_bloscpack_files_are_what_they_were(path: Path, tmp_path: Path) -> None:
    republish(path, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
