"""The layout bcolz through mounts, opened by bcolz 1.x; and what bcolz wrote in other layouts."""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_bcolz, data_n5, data_zarr_transformer, datasets
from tests.conftest import client_python, run_client
from tests.datasets import BIG, BLOSC, CRC, GZIP, LITTLE, ZSTD, islands, ramp, transpose
from tests.formats.test_layout_bcolz import write_carray, write_slabs
from tests.formats.test_layout_n5 import BYTE, write_zarr
from tests.mount.programs import shardfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Array

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.fuse]

CHAINS: Mapping[str, list[Any]] = {
    "raw": [LITTLE],
    "big": [BIG],
    "blosc": [LITTLE, BLOSC],
    "big_blosc": [BIG, BLOSC],
    "blosc_crc": [LITTLE, BLOSC, CRC],
    "zstd": [LITTLE, ZSTD],
    "gzip_turned": [transpose(1, 0), BIG, GZIP],
}


@pytest.fixture(scope="module")
def zarrs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Array]]:
    """Zarr v3 in shards and not, N5, and the draft of 2022."""
    base, arrays = tmp_path_factory.mktemp("rows"), {}
    for (name, chain), shard in product(CHAINS.items(), ((), (8, 7))):
        path = f"zarr/{name}{'_sharded' if shard else ''}"
        arrays[path] = ramp((21, 7), "uint16")
        write_zarr(base / path, arrays[path], (4, 7), chain, shard=shard)
    for dtype in ("bool", "int8", "float16", "float32", "float64", "complex64", "int64", "uint64"):
        data = ramp((9,), "uint8").astype(dtype)
        arrays[f"dtype/{dtype}"] = data
        write_zarr(base / f"dtype/{dtype}", data, (4,), [LITTLE if data.itemsize > 1 else BYTE], shard=(8,))
    for fill in (0, 7):
        arrays[f"missing/{fill}"] = np.where(islands((40, 3), "int32") > 0, 5, fill).astype("int32")
        write_zarr(base / f"missing/{fill}", arrays[f"missing/{fill}"], (4, 3), [LITTLE, BLOSC], fill_value=fill)
    arrays["wide"] = ramp((9, 3, 2), "uint8")
    write_zarr(base / "wide", arrays["wide"], (4, 5, 2), [BYTE, BLOSC])
    arrays["short"] = ramp((3,), "uint8")
    write_zarr(base / "short", arrays["short"], (10,), [BYTE, BLOSC])
    for compression in (data_n5.RAW, data_n5.BLOSC, data_n5.GZIP):
        container = base / "n5" / compression["type"]
        data_n5.write_twin(container, ramp((7, 21), "uint16"), (7, 4), compression, "z5")
        arrays[f"n5/{compression['type']}/{data_n5.MEMBER}"] = ramp((7, 21), "uint16").T
    arrays["volume/slabs"] = ramp((10, 4, 5), "uint16")
    write_slabs(base / "volume", arrays["volume/slabs"], 3)
    cells: data_zarr_transformer.Cells = {(i,): np.arange(4 * i, 4 * i + 4, dtype="<u2").tobytes() for i in range(5)}
    document = data_zarr_transformer.array_document(
        (18,), (4,), data_zarr_transformer.sharding(2), data_type="<u2", fill_value=3
    )
    files = data_zarr_transformer.named(data_zarr_transformer.pack_shards(cells, (2,)))
    data_zarr_transformer.write_hierarchy(base / "draft", {"a": document}, {f"a/{n}": d for n, d in files.items()})
    arrays["draft/a"] = np.arange(18, dtype="uint16")
    return base, arrays


def test_bcolz_reads_arrays_of_rows(zarrs: tuple[Path, Mapping[str, Array]], mounted: Mounted, tmp_path: Path) -> None:
    root, arrays = zarrs
    with mounted(root, "--layout", "bcolz") as mount:
        found = _read("read_bcolz", [[str(mount / path), ""] for path in arrays], tmp_path, client_python("bcolz"))
    assert _wrong(found, arrays) == {}


def _read(script: str, arguments: list[list[Any]], tmp_path: Path, python: str | Path) -> list[Array | str]:
    jobs = [
        {"arguments": a, "out": str(tmp_path / f"{i}.npy"), "failed": str(tmp_path / f"{i}.bad")}
        for i, a in enumerate(arguments)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_client("read_many", script, tmp_path / "jobs.json", python=python, timeout=250)
    out: list[Array | str] = []
    for i in range(len(jobs)):
        failed = tmp_path / f"{i}.bad"
        out.append(failed.read_text() if failed.exists() else np.load(tmp_path / f"{i}.npy"))
    return out


def _wrong(found: list[Array | str], arrays: Mapping[str, Array]) -> dict[str, str]:
    wrong = {}
    for (path, data), one in zip(arrays.items(), found, strict=True):
        if isinstance(one, str):
            wrong[path] = one
        elif one.dtype.newbyteorder("=") != data.dtype.newbyteorder("=") or not np.array_equal(one, data):
            wrong[path] = f"other values: {one.dtype} {one.shape}"
    return wrong


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Array]]:
    """Superchunks, a bloscpack file of a program of others, and arrays and tables as bcolz 1.x has them."""
    base = tmp_path_factory.mktemp("columns")
    arrays: dict[str, Array] = {}
    for dtype in ("<i4", ">f8", "|u1"):
        name = np.dtype(dtype).name
        data = ramp((21, 3), "uint8").astype(dtype)
        data_bcolz.write_array(base / f"superchunks/{name}", data, 4, 3)
        write_carray(base / f"table/{name}", data, 4)
        arrays |= {f"superchunks/{name}": data, f"table/{name}": data}
    for name in ("array-1d", "array-2d", "array-big-endian", "array-one-chunk"):
        golden = datasets.ROOT / "tests/golden/bloscpack" / name
        (base / f"{name}.blp").symlink_to(golden.with_suffix(".blp"))
        arrays[f"{name}.blp"] = np.load(golden.with_suffix(".npy"))
    (base / "table/__rootdirs__").write_text(json.dumps({"names": ["int32", "float64", "uint8"]}))
    (base / "table/__attrs__").write_text("{}")
    return base, arrays


READERS: Mapping[tuple[str, str], Callable[[Path, str], list[Any]]] = {
    ("zarr3", "read_zarr3"): lambda mount, path: [str(mount), path],
    ("zarr3", "read_tensorstore"): lambda mount, path: ["zarr3", str(mount / path), None],
    ("zarr2", "read_zarr3"): lambda mount, path: [str(mount), path],
    ("zarr2", "read_tensorstore"): lambda mount, path: ["zarr", str(mount / path), None],
    ("n5", "read_n5"): lambda mount, path: ["tensorstore", str(mount), path],
}


@pytest.mark.parametrize(("layout", "script"), sorted(READERS))
def test_bcolz_is_read_in_other_layouts(
    layout: str, script: str, columns: tuple[Path, Mapping[str, Array]], mounted: Mounted, tmp_path: Path
) -> None:
    root, arrays = columns
    with mounted(root, "--layout", layout, "-o", "symlinks=follow") as mount:
        arguments = [READERS[layout, script](mount, path) for path in arrays]
        found = _read(script, arguments, tmp_path, sys.executable)
    turned = [one if isinstance(one, str) or layout != "n5" else one.T for one in found]
    booleans = {path for path, data in arrays.items() if data.dtype == bool} if layout == "n5" else set()  # N5 has none
    wanted = {path: data.view("uint8") if path in booleans else data for path, data in arrays.items()}
    assert _wrong(turned, wanted) == {}


def test_what_is_skipped_is_told(tmp_path: Path) -> None:
    write_zarr(tmp_path / "cut", ramp((8, 8)), (4, 4), [BYTE])
    write_zarr(tmp_path / "rows", ramp((8, 8)), (4, 8), [BYTE])
    told = shardfs("info", tmp_path, "-o", "layout=bcolz,unsupported=skip", "--json")
    assert told.returncode == 0, told.stderr
    (problem,) = json.loads(told.stdout)["problems"]
    assert (problem["path"], problem["skipped"]) == ("cut", True)
    assert "bcolz cuts arrays along the first axis only" in problem["why"]
