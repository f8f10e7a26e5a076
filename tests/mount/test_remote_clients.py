"""Programs that read whole datasets through mounts of sources behind HTTP and S3. Every value is that of the writer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.conftest import client_python
from tests.data_layouts import equal
from tests.datasets import read_tree
from tests.mount.distant import in_words, s3_options, s3_server, serving
from tests.mount.programs import link_tree, read_jobs, read_many, run
from tests.mount.test_clients import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Client, Dataset
    from tests.mount.test_clients import Kind

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

SERVED: Mapping[Kind, tuple[str, ...]] = {
    "zarr3": ("zarr_python", "group", "sparse", "nested_gzip_after_inner"),
    "precomputed": ("index_gzip_data_gzip", "two_scales", "sparse_murmur"),
}

Served = tuple["Path", "Mapping[Kind, Mapping[str, Dataset]]"]


@pytest.fixture(scope="module")
def served(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A directory with datasets at KIND/NAME, and what they are."""
    root = tmp_path_factory.mktemp("served")
    datasets = {kind: {name: dataset(kind, name) for name in names} for kind, names in SERVED.items()}
    for kind, variants in datasets.items():
        for name, variant in variants.items():
            link_tree(variant.path, root / kind / name)
    return root, datasets


@pytest.fixture(scope="module", params=["http", pytest.param("s3", marks=pytest.mark.s3)])
def source(request: pytest.FixtureRequest, served: Served) -> Iterator[tuple[str, list[str]]]:
    """The URL of the directory, and what `shardfs mount` needs besides."""
    if request.param == "s3":
        with s3_server(served[0]) as endpoint:
            yield "s3://data", in_words(s3_options(endpoint))
    else:
        pytest.importorskip("aiohttp")
        with serving(served[0], latency_ms=1) as store:
            yield store.url, []


@contextmanager
def mounted_kind(kind: Kind, source: tuple[str, list[str]], mounted: Mounted, *options: str) -> Iterator[Path]:
    url, words = source
    with mounted(f"{url}/{kind}", *words, *options) as mount:
        yield mount


@pytest.mark.parametrize(
    ("kind", "client"),
    [
        ("zarr3", "tensorstore"),
        ("zarr3", "zarr3"),
        ("zarr3", "z5"),
        ("precomputed", "tensorstore"),
        ("precomputed", "cloudvolume"),
    ],
)
def test_a_library_reads_all(
    kind: Kind, client: Client, served: Served, source: tuple[str, list[str]], mounted: Mounted, tmp_path: Path
) -> None:
    wanted = [(d, member) for d in served[1][kind].values() if client in d.readers for member in d.arrays]
    assert len(wanted) > 2
    with mounted_kind(kind, source, mounted) as mount:
        outcomes = read_many(client, [(d, member, mount / d.name) for d, member in wanted], tmp_path)
    told = {(d.name, m): differences(f, d.arrays[m]) for (d, m), f in zip(wanted, outcomes, strict=True)}
    assert told == dict.fromkeys(told, "")


@pytest.mark.parametrize("client", ["zarr2", "gdal"])
def test_a_library_of_zarr_v2_reads_all(
    client: str, served: Served, source: tuple[str, list[str]], mounted: Mounted, tmp_path: Path
) -> None:
    python = client_python("zarr2")
    wanted = {f"{name}/{m}".rstrip("/"): a for name, d in served[1]["zarr3"].items() for m, a in d.arrays.items()}
    if client == "gdal":  # takes what comes before the last two axes for bands
        wanted = {name: array for name, array in wanted.items() if array.ndim == 2}
    assert wanted
    with mounted_kind("zarr3", source, mounted, "--layout", "zarr2") as mount:
        jobs = [[str(mount / name)] if client == "gdal" else [str(mount / name), ""] for name in wanted]
        outcomes = read_jobs(f"read_{client}", jobs, tmp_path, python)
    wrong = {
        name: got if isinstance(got, str) else f"{got.dtype}{got.shape}"
        for (name, array), got in zip(wanted.items(), outcomes, strict=True)
        if isinstance(got, str) or not equal(got[0] if client == "gdal" else got, array)
    }
    assert wrong == {}


@pytest.mark.parametrize("command", [("cp", "-r"), ("rsync", "-a")], ids=" ".join)
@pytest.mark.parametrize("kind", SERVED)
def test_a_copy_is_the_unsharded_dataset(
    kind: Kind,
    command: tuple[str, str],
    served: Served,
    source: tuple[str, list[str]],
    mounted: Mounted,
    tmp_path: Path,
) -> None:
    with mounted_kind(kind, source, mounted) as mount:
        for name in served[1][kind]:
            run(*command, f"{mount / name}/.", tmp_path / name)
    for name, variant in served[1][kind].items():
        assert read_tree(tmp_path / name) == read_tree(variant.twin), name
    run("chmod", "-R", "u+w", tmp_path)
