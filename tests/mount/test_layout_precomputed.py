"""The layout precomputed through mounts and fsspec, opened by programs that know Neuroglancer's volumes alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from tests import data_bcolz, data_n5, data_zarr_transformer, datasets
from tests.conftest import MountFailed, client_python
from tests.formats.test_layout_precomputed import as_xyzc
from tests.mount.programs import dealt, link_tree, read_jobs, shardfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array, Dataset

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.fuse]

DATA_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32", "bool")

Farm = tuple["Path", "Mapping[tuple[str, int], Array]"]
"""A directory of datasets, and what must be read of them below a mount: by path and scale; axes x, y, z, channel."""


CHUNKED = ("rank_4", "rank_4_cut", "seed_rank_4")
"""The variants, of Zarr and N5, that have channels in several chunks."""


def _can_be_shown(name: str, data: Array) -> bool:
    return name not in CHUNKED and data.dtype.newbyteorder("=").name in DATA_TYPES and 1 <= data.ndim <= 4


@pytest.fixture(scope="module")
def zarr(dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """All variants of Zarr v3, sharded and (`plain`) not."""
    base, wanted = tmp_path_factory.mktemp("zarr"), {}
    for name in datasets.ZARR3:
        found = dataset("zarr3", name)
        link_tree(found.path, base / "farm/sharded" / name)
        link_tree(found.twin, base / "farm/plain" / name)
        for number, (member, data) in enumerate(found.arrays.items()):
            if not _can_be_shown(name, data) or not data.size:
                continue
            names = json.loads((found.twin / member / "zarr.json").read_bytes()).get("dimension_names")
            in_image = name == "ome_pyramid"
            path = name if in_image else f"{name}/{member}".rstrip("/")
            for form in ("sharded", "plain"):
                wanted[f"{form}/{path}", number if in_image else 0] = as_xyzc(data, [n or "" for n in names or ()])
    return base / "farm", wanted


@pytest.fixture(scope="module")
def n5(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """All variants of N5; axes of N5 are x first."""
    base, wanted = tmp_path_factory.mktemp("n5"), {}
    for name, variant in data_n5.VARIANTS.items():
        found = variant.write(base / "written" / name, name)
        link_tree(found.path, base / "farm/sharded" / name)
        link_tree(found.twin, base / "farm/plain" / name)
        if _can_be_shown(name, found.array):
            for form in ("sharded", "plain"):
                wanted[f"{form}/{name}/{data_n5.MEMBER}", 0] = as_xyzc(found.array.T, ())
    return base / "farm", wanted


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """All hierarchies of the draft of 2022."""
    base, wanted = tmp_path_factory.mktemp("draft"), {}
    (base / "written").mkdir()
    for name, found in data_zarr_transformer.write_variants(base / "written").items():
        link_tree(found.path, base / "farm" / name)
        for path, data in found.arrays.items():
            if _can_be_shown(name, data) and name != "behind_another":  # something that nobody knows
                wanted[f"{name}/{path}".rstrip("/"), 0] = as_xyzc(data, ())
    return base / "farm", wanted


@pytest.fixture(scope="module")
def bcolz(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """Superchunks, and bloscpack files of bloscpack itself."""
    base, arrays = tmp_path_factory.mktemp("bcolz"), {}
    for dtype in DATA_TYPES[:-1]:
        for shape in ((21,), (21, 3), (9, 4, 5)):
            name = f"{dtype}_{len(shape)}"
            arrays[name] = datasets.ramp(shape, "uint8").astype(dtype)
            data_bcolz.write_array(base / name, arrays[name], 4, 3)
    for name in ("array-1d", "array-2d", "array-big-endian", "array-one-chunk"):
        golden = datasets.ROOT / "tests/golden/bloscpack" / name
        (base / f"{name}.blp").symlink_to(golden.with_suffix(".blp"))
        arrays[f"{name}.blp"] = np.load(golden.with_suffix(".npy"))
    return base, {(name, 0): as_xyzc(data, ()) for name, data in arrays.items() if _can_be_shown(name, data)}


def _wrong(client: str, mount: Path, wanted: Mapping[tuple[str, int], Array], scratch: Path) -> dict[Any, str]:
    """What a client reads otherwise than it should, and what is the matter."""
    if client == "tensorstore":
        given = [["neuroglancer_precomputed", str(mount / path), scale] for path, scale in wanted]
        found = read_jobs("read_tensorstore", given, scratch)
    else:
        given = [[str(mount / path), scale, True] for path, scale in wanted]
        found = read_jobs("read_cloudvolume", given, scratch, client_python("cv"))
    wrong = {}
    for (key, data), got in zip(wanted.items(), found, strict=True):
        if isinstance(got, str):
            wrong[key] = got
        elif not np.array_equal(got, data, equal_nan=data.dtype.kind == "f"):
            wrong[key] = f"other values of {got.shape} {got.dtype}"
    return wrong


CLIENTS = ["tensorstore", "cloudvolume"]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("source", "least"), [("zarr", 100), ("n5", 60), ("draft", 20), ("bcolz", 24)])
def test_client_reads(
    source: str, least: int, client: str, mounted: Mounted, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root, wanted = request.getfixturevalue(source)
    assert len(wanted) > least
    with mounted(root, "--layout", "precomputed", "-o", "unsupported=skip,symlinks=follow") as mount:
        assert _wrong(client, mount, dict(dealt(list(wanted.items()), client, CLIENTS)), tmp_path) == {}


def test_fsspec_shows_the_same(zarr: Farm, mounted: Mounted) -> None:
    root = zarr[0] / "sharded/ome_pyramid"
    files = ShardFileSystem(source=str(root), layout="precomputed")
    with mounted(root, "--layout", "precomputed") as mount:
        expected = {str(p.relative_to(mount)): p.read_bytes() for p in mount.rglob("*") if p.is_file()}
    assert {name[1:]: files.cat_file(name) for name in files.find("")} == expected
    assert len(expected) > 30


def test_what_is_left_out_is_told(zarr: Farm) -> None:
    told = shardfs("info", zarr[0] / "plain", "-o", "layout=precomputed,unsupported=skip", "--json")
    problems = {p["path"]: p["why"] for p in json.loads(told.stdout)["problems"] if p["skipped"]}
    assert problems["dtype_float64"] == "cannot be shown as precomputed: precomputed has no data type float64"
    assert problems["rank_4"].endswith("channels are in 3 chunks; precomputed has all channels in one chunk")


def test_a_mount_is_refused(zarr: Farm, mounted: Mounted) -> None:
    with pytest.raises(MountFailed) as refused, mounted(zarr[0] / "plain/dtype_float16", "--layout", "precomputed"):
        pass
    assert "precomputed has no data type float16" in refused.value.stderr
