"""Zarr v2 as a source: what zarr-python 2.18 wrote, through mounts, read by programs that know another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from tests.clients.write_zarr2 import VARIANTS, data_of
from tests.conftest import client_python, run_client
from tests.data_layouts import Written, equal
from tests.datasets import ramp
from tests.formats.test_layout_precomputed import as_xyzc
from tests.mount.programs import read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.fuse]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All variants, beside an array of Zarr v3, as the layout zarr2 has nothing to do for Zarr v2 alone."""
    path = tmp_path_factory.mktemp("zarr2") / "source"
    run_client("write_zarr2", path, python=client_python("zarr2"))
    Written(ramp((4,), "uint16"), (2,)).write(path / "beside")
    return path


N5 = ("uint8", "int8", "uint16", "int32", "uint64", "int64", "float32", "float64", "bool")
VOLUMES = ("uint8", "int8", "uint16", "int32", "uint64", "float32", "bool")


def _as_n5(data: Array) -> Array | None:
    return (data.astype("u1") if data.dtype == bool else data).T if data.shape and data.dtype.name in N5 else None


def _as_zyxc(data: Array) -> Array | None:
    return as_xyzc(data, ()) if data.shape and data.dtype.name in VOLUMES else None


def _of_bytes(data: Array) -> Array | None:
    return data if data.dtype.itemsize == 1 and data.dtype.kind in "ui" and data.shape else None  # see docs/layouts.md


def _of_numbers(data: Array) -> Array | None:
    return data if data.dtype.kind in "biufc" else None


def _as_rows(data: Array) -> Array | None:
    return data if data.ndim == 1 or data.shape[1:] == (3,) else None


Reader = tuple[
    str,
    "Callable[[Path, str], Sequence[Any]]",
    "Callable[[Array], Array | None]",
    Literal["cv", "zarr2", "bcolz"] | None,
]
READERS: Mapping[tuple[str, str], Reader] = {
    ("zarr3", "zarr3"): ("read_zarr3", lambda root, name: [str(root), name], lambda data: data, None),
    ("zarr3", "tensorstore"): (
        "read_tensorstore", lambda root, name: ["zarr3", str(root / name), None], _of_numbers, None,
    ),
    ("zarr3", "z5py"): ("read_z5", lambda root, name: [str(root), name], _of_bytes, None),
    ("n5", "tensorstore"): ("read_n5", lambda root, name: ["tensorstore", str(root), name], _as_n5, None),
    ("n5", "z5py"): ("read_n5", lambda root, name: ["z5", str(root), name], _as_n5, None),
    ("n5", "zarr-python 2.18"): ("read_n5", lambda root, name: ["n5store", str(root), name], _as_n5, "zarr2"),
    ("precomputed", "tensorstore"): (
        "read_tensorstore", lambda root, name: ["neuroglancer_precomputed", str(root / name), 0], _as_zyxc, None,
    ),
    ("precomputed", "cloud-volume"): (
        "read_cloudvolume", lambda root, name: [str(root / name), 0, True], _as_zyxc, "cv",
    ),
    ("bcolz", "bcolz-zipline"): ("read_bcolz", lambda root, name: [str(root / name), ""], _as_rows, "bcolz"),
    ("zarr2", "zarr-python 2.18"): (
        "read_zarr2", lambda root, name: [str(root / name), ""], lambda data: data, "zarr2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "program"), READERS)
def test_zarr_v2_is_read(layout: str, program: str, written: Path, mounted: Mounted, tmp_path: Path) -> None:
    reader, arguments, as_read, needs = READERS[layout, program]
    wanted = {name: data for name in VARIANTS if (data := as_read(data_of(name))) is not None}
    assert wanted
    with mounted(written, "--layout", layout, "-o", "unsupported=skip") as mount:
        python = client_python(needs) if needs else None
        outcomes = read_jobs(reader, [arguments(mount, name) for name in wanted], tmp_path, python)
    wrong = {
        name: got if isinstance(got, str) else f"other values: {got.dtype}{got.shape}"
        for (name, data), got in zip(wanted.items(), outcomes, strict=True)
        if isinstance(got, str) or not equal(got, np.asarray(data))
    }
    assert wrong == {}
