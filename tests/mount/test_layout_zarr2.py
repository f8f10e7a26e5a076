"""The layout zarr2 through real mounts, opened by programs that know only Zarr v2."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests import data_n5, datasets
from tests.conftest import client_python, run_client
from tests.data_layouts import Written, equal
from tests.datasets import CRC, LITTLE, ZSTD
from tests.handmade import group_document, write_json
from tests.mount.programs import dealt, link_tree, read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.conftest import Mounted, WrittenOnce
    from tests.datasets import Array as Data
    from tests.datasets import Dataset

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]


@pytest.fixture(scope="module")
def farm(
    dataset: Callable[[str, str], Dataset], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Mapping[str, Dataset]]:
    """A directory with all variants of Zarr v3, sharded (`NAME`) and not (`plain/NAME`), and what they are."""
    root, planted = tmp_path_factory.mktemp("farm"), {}
    (root / "plain").mkdir()
    for name in datasets.ZARR3:
        try:
            planted[name] = dataset("zarr3", name)
        except pytest.skip.Exception:  # its writer is not installed
            continue
        link_tree(planted[name].path, root / name)
        link_tree(planted[name].twin, root / "plain" / name)
    return root, planted


NOT_IN_Z5 = frozenset(
    (
        "rank_0",
        "rank_0_v2",
        "index_big_stored",
        "dtype_bool",
        "dtype_float16",
        "dtype_complex64",
        "inner_big_gzip_crc32c",
    )
)


CLIENTS = ["tensorstore", "zarr2", "zarr3", "z5"]


@pytest.mark.parametrize("client", CLIENTS)
def test_every_variant_is_read_by(
    client: str, farm: tuple[Path, Mapping[str, Dataset]], mounted: Mounted, tmp_path: Path
) -> None:
    root, variants = farm
    wanted = [
        (form + name, member, array)
        for name, d in variants.items()
        for member, array in d.arrays.items()
        for form in ("", "plain/")
        if client != "z5" or name not in NOT_IN_Z5
    ]
    assert len(wanted) > 80
    wanted = dealt(wanted, client, CLIENTS)
    with mounted(root, "--layout", "zarr2") as mount:

        def arguments(name: str, member: str) -> Sequence[Any]:
            if client == "tensorstore":
                return ["zarr", str(mount / name / member), None]
            return [str(mount), f"{name}/{member}".rstrip("/")]

        reader = {"tensorstore": "read_tensorstore", "z5": "read_z5"}.get(client, "read_zarr2")
        python = client_python("zarr2") if client == "zarr2" else None
        outcomes = read_jobs(reader, [arguments(name, member) for name, member, _ in wanted], tmp_path, python)
    wrong = {
        name: got if isinstance(got, str) else f"{got.dtype}{got.shape}"
        for (name, _, right), got in zip(wanted, outcomes, strict=True)
        if isinstance(got, str) or not equal(got, right)
    }
    assert wrong == {}


def _from_volumes(base: Path, written_once: WrittenOnce) -> dict[str, Data]:
    """All variants of precomputed volumes, sharded and not. What is lossy, tensorstore reads of the source."""
    arrays = {}
    for name, write in datasets.PRECOMPUTED.items():
        written = written_once.get(f"precomputed-{name}", write)
        for form, path in (("sharded", written.path), ("plain", written.twin)):
            link_tree(path, base / "farm" / form / name)
            scales = json.loads((path / "info").read_bytes())["scales"]
            for number, data in written.arrays.items():
                wanted = data.T if data.shape[3] > 1 else data[..., 0].T
                arrays[f"{form}/{name}/{scales[int(number)]['key']}"] = wanted
    return arrays


def _from_n5(base: Path, written_once: WrittenOnce) -> dict[str, Data]:
    """All variants of N5, sharded and not."""
    arrays = {}
    for name, variant in data_n5.VARIANTS.items():
        written = written_once.get(f"n5-{name}", partial(variant.write, name=name))
        for form, path in (("sharded", written.path), ("plain", written.twin)):
            link_tree(path, base / "farm" / form / name)
            arrays[f"{form}/{name}/{data_n5.MEMBER}"] = written.array.T
    return arrays


@pytest.mark.parametrize("write", [_from_volumes, _from_n5])
def test_other_systems_are_read_by_all(
    write: Callable[[Path, WrittenOnce], dict[str, Data]], written_once: WrittenOnce, mounted: Mounted, tmp_path: Path
) -> None:
    wanted = write(tmp_path, written_once)
    assert len(wanted) > 30
    wrong: dict[str, str] = {}
    with mounted(tmp_path / "farm", "--layout", "zarr2", "-o", "unsupported=skip") as mount:
        for client in CLIENTS[:3]:
            share = dict(dealt(list(wanted.items()), client, CLIENTS[:3]))
            reader = "read_tensorstore" if client == "tensorstore" else "read_zarr2"
            jobs = [["zarr", str(mount / at), None] if client == "tensorstore" else [str(mount), at] for at in share]
            scratch = tmp_path / client
            scratch.mkdir()
            outcomes = read_jobs(reader, jobs, scratch, client_python("zarr2") if client == "zarr2" else None)
            wrong |= {
                f"{client}: {at}": got if isinstance(got, str) else f"{got.dtype}{got.shape}"
                for (at, right), got in zip(share.items(), outcomes, strict=True)
                if isinstance(got, str) or not equal(got, right)
            }
    assert wrong == {}


# ----------------------------------------------------------------------------------------------- real images


def _photo(tmp_path: Path) -> Data:
    run_client("read_ome", "photo", "-", tmp_path / "photo.npy", python=client_python("zarr2"))
    image: Data = np.load(tmp_path / "photo.npy")
    assert image.shape == (512, 512, 3)
    return np.ascontiguousarray(np.moveaxis(image, -1, 0))


def _pyramid(path: Path, image: Data) -> list[Data]:
    """A sharded OME-Zarr 0.5 image in three resolutions, with a label image."""
    levels = [image]
    for _ in range(2):
        c, y, x = levels[-1].shape
        levels.append(levels[-1].reshape(c, y // 2, 2, x // 2, 2).mean((2, 4)).astype(image.dtype))
    _image(
        path, levels, {"omero": {"channels": [{"color": c, "window": WINDOW} for c in ("FF0000", "00FF00", "0000FF")]}}
    )
    write_json(path / "labels/zarr.json", group_document(ome={"version": "0.5", "labels": ["bright"]}))
    _image(path / "labels/bright", [(level > 127).astype("uint8") for level in levels], {"image-label": {}})
    return levels


WINDOW = {"start": 0, "end": 255, "min": 0, "max": 255}


def _image(path: Path, levels: Sequence[Data], members: Mapping[str, Any]) -> None:
    axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space", "unit": "micrometer"} for n in "yx")]
    sets = [
        {"path": f"s{i}", "coordinateTransformations": [{"type": "scale", "scale": [1, 0.5 * 2**i, 0.5 * 2**i]}]}
        for i in range(len(levels))
    ]
    ome = {"version": "0.5", "multiscales": [{"name": "photo", "axes": axes, "datasets": sets}], **members}
    write_json(path / "zarr.json", group_document(ome=ome))
    for i, level in enumerate(levels):
        names = {"dimension_names": ["c", "y", "x"]}
        Written(level, (1, 64, 64), [LITTLE, ZSTD, CRC], (1, 256, 256), names).write(path / f"s{i}")


def test_a_sharded_ome_zarr_05_image_is_one_of_04(mounted: Mounted, tmp_path: Path) -> None:
    levels = _pyramid(tmp_path / "source/image.zarr", _photo(tmp_path))
    native = [zarr.open_array(tmp_path / f"source/image.zarr/s{i}", mode="r")[...] for i in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(native, levels, strict=True))
    with mounted(tmp_path / "source", "--layout", "zarr2") as mount:
        for at, wanted in (("image.zarr", levels), ("image.zarr/labels/bright", [(n > 127) for n in levels])):
            for i, level in enumerate(wanted):
                out, told = tmp_path / f"{i}.npy", tmp_path / "told.json"
                run_client("read_ome", mount / at, str(i), out, "--told", told, python=client_python("zarr2"))
                assert np.array_equal(np.load(out), level)
            assert json.loads(told.read_text()) == {
                "axes": ["c", "y", "x"],
                "scales": [[1, 0.5, 0.5], [1, 1, 1], [1, 2, 2]],
                "version": "0.4",
                "shapes": [[3, 512, 512], [3, 256, 256], [3, 128, 128]],
            }
        run_client("read_gdal", mount / "image.zarr/s0", tmp_path / "gdal.npy", python=client_python("zarr2"))
        assert np.array_equal(np.load(tmp_path / "gdal.npy"), levels[0])
        assert not list(mount.rglob("zarr.json"))


def test_what_is_skipped_is_not_there(mounted: Mounted, tmp_path: Path) -> None:
    Written(np.arange(4, dtype="uint16"), (2,)).write(tmp_path / "source/good")
    write_json(
        tmp_path / "source/bad/zarr.json",
        {**json.loads((tmp_path / "source/good/zarr.json").read_text()), "data_type": "int4"},
    )
    with mounted(tmp_path / "source", "-o", "layout=zarr2,unsupported=skip") as mount:
        assert list((mount / "bad").iterdir()) == []
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{mount}/good/"}}
        assert ts.open(spec).result().read().result().tolist() == [0, 1, 2, 3]
