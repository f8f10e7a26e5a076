"""Datasets that xarray wrote to sharded Zarr v3, read through the layout zarr2 by programs that know only Zarr v2."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conftest import client_python, run_client
from tests.mount.programs import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array as Data

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xarray") / "numbers"
    run_client("write_xarray", path)
    return path


@pytest.fixture(scope="module")
def strings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xarray") / "strings"
    run_client("write_xarray", path, "--strings")
    return path


def _described(path: Path, out: Path, *more: str, python: str | Path = sys.executable) -> Any:
    run_client("describe_xarray", path, out, *more, python=python)
    return json.loads(out.read_text())


@pytest.mark.parametrize("codec", ["stored", "raw", "gzip", "zlib", "zstd", "blosc"])
def test_xarray_reads_the_same_with_default_settings(
    codec: str, numbers: Path, mounted: Mounted, tmp_path: Path
) -> None:
    wanted = _described(numbers, tmp_path / "native.json")
    assert len(wanted["variables"]) == 16
    options = [] if codec == "stored" else ["-o", f"chunk_codec={codec}"]
    with mounted(numbers, "--layout", "zarr2", *options) as mount:
        for python in (sys.executable, client_python("zarr2")):
            assert _described(mount, tmp_path / "shown.json", python=python) == wanted
        for path in mount.rglob("*"):
            assert path.is_dir() or path.stat().st_size == len(path.read_bytes())


def test_xarray_reads_the_same_strings_and_scalars(strings: Path, mounted: Mounted, tmp_path: Path) -> None:
    wanted = _described(strings, tmp_path / "native.json")
    assert len(wanted["variables"]) == 26
    with mounted(strings, "--layout", "zarr2") as mount:
        for python in (sys.executable, client_python("zarr2")):
            assert _described(mount, tmp_path / "shown.json", python=python) == wanted


@pytest.mark.parametrize("codec", ["stored", "raw", "blosc"])
def test_netcdf_reads_the_same(codec: str, numbers: Path, mounted: Mounted, tmp_path: Path) -> None:
    """NCZarr has no codec `gzip`, from whatever source."""
    wanted = _described(numbers, tmp_path / "native.json")
    options = [] if codec == "stored" else ["-o", f"chunk_codec={codec}"]
    with mounted(numbers, "--layout", "zarr2", *options) as mount:
        description = _described(mount, tmp_path / "nc.json", "--engine", "netcdf4", python=client_python("zarr2"))
    assert description == wanted


def _decoded(numbers: Path, tmp_path: Path) -> dict[str, Data]:
    """The planes of the dataset, as xarray reads them from the source."""
    variables = _described(numbers, tmp_path / "native.json")["variables"]
    planes = {name: v for name, v in variables.items() if v["dims"] == ["time", "x"]}
    return {
        name: np.array(json.loads(v["values"].replace("nan", "NaN")), np.float64).reshape(6, 8)
        for name, v in planes.items()
    }


def test_gdal_masks_what_is_missing_and_nothing_else(numbers: Path, mounted: Mounted, tmp_path: Path) -> None:
    wanted = _decoded(numbers, tmp_path)
    assert len(wanted) == 9
    with mounted(numbers, "--layout", "zarr2") as mount:
        for name, right in wanted.items():
            out = tmp_path / f"{name}.npy"
            run_client("read_gdal", mount / name, out, "--decoded", python=client_python("zarr2"))
            np.testing.assert_allclose(np.load(out)[0], right, rtol=1e-6)


# ------------------------------------------------------------------------------------------- programs of Debian


def _cdl(text: str, variable: str) -> list[float]:
    """The values of a variable in the output of ncdump; a value that is missing is `_`."""
    values = text.split(f"\n {variable} =", 1)[1].split(";", 1)[0]
    return [float("nan" if v.strip() in ("_", "NaN") else v) for v in values.split(",")]


def test_ncdump_of_debian_reads_uncompressed_chunks(numbers: Path, mounted: Mounted, tmp_path: Path) -> None:
    """netCDF-C 4.9.0 has no filter for Zstandard there, and prints what is stored without a word."""
    if shutil.which("ncdump") is None:
        pytest.skip("the package netcdf-bin is not installed")
    wanted = _decoded(numbers, tmp_path)
    wanted["packed"] = (wanted["packed"] - 1) / 0.01  # ncdump prints what is packed
    wanted["packed_without_mark"] = wanted["packed_without_mark"] / 0.5
    with mounted(numbers, "-o", "layout=zarr2,chunk_codec=raw") as mount:
        text = run("ncdump", f"file://{mount}#mode=zarr,file")
        run("nccopy", f"file://{mount}#mode=zarr,file", tmp_path / "copy.nc")
    for dump in (text, run("ncdump", tmp_path / "copy.nc")):
        for name, right in wanted.items():
            missing = -1e30 if name == "marked" else np.nan
            read = np.array(_cdl(dump, name)).reshape(6, 8)
            np.testing.assert_allclose(np.where(read == missing, np.nan, read), right, rtol=1e-5)


def test_gdal_of_debian_reads_planes(numbers: Path, mounted: Mounted, tmp_path: Path) -> None:
    if shutil.which("gdal_translate") is None:
        pytest.skip("the package gdal-bin is not installed")
    wanted = _decoded(numbers, tmp_path)
    with mounted(numbers, "--layout", "zarr2") as mount:
        for name in ("measured", "few", "few_floats", "filled", "flags"):
            out = tmp_path / f"{name}.xyz"
            run("gdal_translate", "-q", "-of", "XYZ", f'ZARR:"{mount}":/{name}', out)
            np.testing.assert_allclose(np.loadtxt(out, usecols=2).reshape(6, 8), wanted[name], rtol=1e-6)
