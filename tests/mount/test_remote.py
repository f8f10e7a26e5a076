"""Mounts of what lies behind a network: a web server, an object store, archives."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests.datasets import read_tree, same
from tests.mount.distant import SECRETS, in_words, s3_options, s3_server
from tests.mount.programs import attempt, lines, link_tree, read_many, run
from tests.mount.web import FRONT, GUARDED, HIDDEN, UNLISTED, find_nginx, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.conftest import Mounted
    from tests.datasets import Dataset
    from tests.mount.web import Web

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

SERVED = [
    ("zarr3", "zarr_python"),
    ("zarr3", "sparse"),
    ("zarr3", "group"),
    ("zarr3", "keys_v2_dot"),
    ("zarr3", "nested_gzip_after_inner"),
    ("zarr3", "ome_pyramid"),
    ("precomputed", "index_gzip_data_gzip"),
    ("precomputed", "index_raw_data_raw"),
    ("precomputed", "sparse_murmur"),
    ("precomputed", "two_scales"),
    ("precomputed", "legacy_pair"),
]


@pytest.fixture(scope="module")
def served(
    dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Mapping[str, Dataset]]:
    """A directory with datasets, each under its name."""
    root = tmp_path_factory.mktemp("served")
    variants = {name: dataset(kind, name) for kind, name in SERVED}
    for name, variant in variants.items():
        link_tree(variant.path, root / name)
        with zipfile.ZipFile(root / f"{name}.zip", "w") as archive:
            for path in sorted(variant.path.rglob("*")):
                archive.write(path, path.relative_to(variant.path))
    return root, variants


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a directory of a mount, byte by byte."""
    files = {}
    for directory, _, names in os.walk(root, onerror=raise_it):
        for name in names:
            path = Path(directory, name)
            files[str(path.relative_to(root))] = path.read_bytes()
    return files


def raise_it(error: OSError) -> None:
    raise error


def through_fsspec(source: str, storage_options: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """The same without a mount."""
    fs = ShardFileSystem(source=source, storage_options=storage_options, skip_instance_cache=True)
    assert isinstance(fs, fsspec.AbstractFileSystem)
    return {name.lstrip("/"): fs.cat_file(name) for name in fs.find("")}


def assert_clients_read(variants: Mapping[str, Dataset], mount: Path, scratch: Path) -> None:
    """tensorstore reads every array through the mount."""
    jobs = [(d, member, mount / name) for name, d in variants.items() for member in d.arrays]
    for (variant, member, _), outcome in zip(jobs, read_many("tensorstore", jobs, scratch), strict=True):
        assert not isinstance(outcome, str), (variant.name, member, outcome)
        assert same(outcome, variant.arrays[member]), (variant.name, member)


def mount_line(mount: Path) -> str:
    """What everybody on this machine may see of a mount."""
    return next(line for line in Path("/proc/mounts").read_text().splitlines() if line.split(" ")[1] == str(mount))


# ------------------------------------------------------------------------------------------------------- nginx


@pytest.fixture(scope="module")
def web(served: tuple[Path, Mapping[str, Dataset]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    if find_nginx() is None:
        pytest.skip("no nginx")
    with serving(served[0], tmp_path_factory.mktemp("nginx")) as web:
        yield web


@pytest.mark.parametrize("name", [name for _, name in SERVED])
def test_http_with_listings(
    name: str, web: Web, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted, tmp_path: Path
) -> None:
    variant = served[1][name]
    with mounted(web.url(name)) as mount:
        hidden = (".hidden/notes",)  # nginx does not list such names
        wanted = {path: content for path, content in read_tree(variant.twin).items() if path not in hidden}
        assert read_tree(mount) == wanted
        assert read_tree(mount) == wanted  # from the page cache
        run("cp", "-r", mount, tmp_path / "copy")
        tree_files = contents(mount)
    assert contents(tmp_path / "copy") == tree_files
    assert through_fsspec(web.url(name)) == tree_files
    run("chmod", "-R", "u+w", tmp_path / "copy")


def test_http_without_listings(web: Web, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted) -> None:
    """What the metadata names can be listed and read; what only a listing would tell is reached by its name."""
    variants = served[1]
    with mounted(web.url("sparse", UNLISTED)) as mount:
        twin = variants["sparse"].twin
        for name in lines("find", "c", "-type", "f", cwd=twin):
            assert (mount / name).read_bytes() == (twin / name).read_bytes()
        assert not (mount / "c/1/1").exists()
        assert lines("ls", mount / "c/0") == sorted(os.listdir(twin / "c/0"))
    with mounted(web.url("group", UNLISTED)) as mount:
        twin = variants["group"].twin
        for name in ("labels/cells/c/0/0", "labels/cells/zarr.json", "raw/c/0/0", "README.md", "tables/cells.csv"):
            if name.endswith("zarr.json"):
                assert json.loads((mount / name).read_text()) == json.loads((twin / name).read_text())
            else:
                assert (mount / name).read_bytes() == (twin / name).read_bytes()


@pytest.mark.parametrize("server", [UNLISTED, GUARDED, HIDDEN, FRONT])
def test_http_where_it_is_not_known_which_shards_there_are(
    server: str, web: Web, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted
) -> None:
    """Chunks are read by their names. No list of them is an error, or a copy would lack them without a word."""
    name = "index_raw_data_raw"
    twin = served[1][name].twin
    with mounted(web.url(name, server)) as mount:
        for file in lines("find", "8_8_40", "-type", "f", cwd=twin):
            assert (mount / file).read_bytes() == (twin / file).read_bytes()
        with pytest.raises(PermissionError):
            os.listdir(mount / "8_8_40")
    verified = attempt(sys.executable, "-m", "shardfs", "verify", web.url(name, server))
    assert (verified.returncode, verified.stdout) == (3, "")


def test_http_requests_of_a_mount(web: Web, mounted: Mounted) -> None:
    """Each document is asked for once: whether the server honours byte ranges shows in the answers."""
    with web.requests() as requests, mounted(web.url("zarr_python")):
        pass
    paths = [r.path for r in requests]
    assert {r.method for r in requests} == {"GET"}
    assert "/zarr_python/zarr.json" in paths
    assert len(paths) == len(set(paths)), "nothing is asked for twice"
    assert {r.status for r in requests} == {206, 404}
    assert not any(path.startswith("/zarr_python/c/") for path in paths)
    with mounted(web.url("group")) as mount:
        (mount / "zarr.json").read_bytes()
        with web.requests() as requests:
            os.stat(mount / "README.md")
        assert {(r.method, r.path) for r in requests} == {("HEAD", "/group/README.md")}
        with web.requests() as requests:
            assert not (mount / "tables/cells").exists()
        assert [r.method for r in requests].count("HEAD") <= 2


def test_http_times(web: Web, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted) -> None:
    """HTTP has whole seconds."""
    source = served[1]["zarr_python"].path
    with mounted(web.url("zarr_python")) as mount:
        assert os.stat(mount / "zarr.json").st_mtime == int(os.stat(source / "zarr.json").st_mtime)
        assert os.stat(mount / "c/7/4/2").st_mtime == int(os.stat(source / "c/1/1/1").st_mtime)


def test_http_passwords_are_not_shown(web: Web, mounted: Mounted) -> None:
    url = web.url("zarr_python").replace("http://", "http://me:hush@")
    with mounted(url) as mount:
        assert (mount / "c/0/0/0").stat().st_size
        assert "hush" not in mount_line(mount)


# ------------------------------------------------------------------------------------------------------ S3


@pytest.fixture(scope="module")
def endpoint(served: tuple[Path, Mapping[str, Dataset]]) -> Iterator[str]:
    """moto's server with the datasets in the bucket `data`."""
    with s3_server(served[0]) as url:
        yield url


@pytest.mark.s3
@pytest.mark.parametrize(
    "name", ["zarr_python", "group", "sparse", "index_gzip_data_gzip", "two_scales", "legacy_pair"]
)
def test_s3(
    name: str, endpoint: str, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted, tmp_path: Path
) -> None:
    variant = served[1][name]
    with mounted(f"s3://data/{name}", *in_words(s3_options(endpoint))) as mount:
        assert not any(secret in mount_line(mount) for secret in SECRETS)
        assert read_tree(mount) == read_tree(variant.twin)
        assert lines("ls", "-A", mount) == lines("ls", "-A", variant.twin)
        run("cp", "-r", mount, tmp_path / "copy")
        tree_files = contents(mount)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        assert_clients_read({"": variant}, mount, scratch)
    assert contents(tmp_path / "copy") == tree_files
    assert through_fsspec(f"s3://data/{name}", s3_options(endpoint)) == tree_files
    run("chmod", "-R", "u+w", tmp_path / "copy")


@pytest.mark.s3
def test_s3_options_from_the_environment(
    endpoint: str, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted
) -> None:
    env = {"SHARDFS_STORAGE_OPTIONS": json.dumps(s3_options(endpoint))}
    with mounted("s3://data", env=env) as mount:
        assert {*served[1]} <= {*os.listdir(mount)}
        twin = served[1]["zarr_python"].twin
        assert (mount / "zarr_python/c/1/0/1").read_bytes() == (twin / "c/1/0/1").read_bytes()
        when = mount.joinpath("zarr_python/c/0/0/0").stat().st_mtime
        assert when > 1_600_000_000  # when the object was put there
        assert not any(secret in mount_line(mount) for secret in SECRETS)


# --------------------------------------------------------------------------------------------- chained sources


def test_archives(served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted) -> None:
    root, variants = served
    for name in ("zarr_python", "group", "index_gzip_data_gzip"):
        source = f"zip://::{root / name}.zip"
        with mounted(source) as mount:
            tree_files = contents(mount)
            assert read_tree(mount) == read_tree(variants[name].twin)
        assert through_fsspec(source) == tree_files


def test_archives_on_a_web_server(web: Web, served: tuple[Path, Mapping[str, Dataset]], mounted: Mounted) -> None:
    for source in (
        f"zip://::{web.url('zarr_python.zip')}",
        f"zip://::simplecache::{web.url('zarr_python.zip')}",
    ):
        with mounted(source) as mount:
            assert read_tree(mount) == read_tree(served[1]["zarr_python"].twin)
            assert mount.joinpath("c/0/0/0").stat().st_mtime > 0
