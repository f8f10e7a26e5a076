"""The layout precomputed: documents, chunks and images of any described array, read by libraries that know it alone."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import compresso
import crackle
import fpzip
import imagecodecs
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.vfs.tree import Tree, open_tree
from tests.data_layouts import BYTE, Grid, Written, arrays, write_zarr
from tests.datasets import BIG, CRC, GZIP, LITTLE, PRECOMPUTED, ZSTD, transpose
from tests.handmade import group_document, write_files, write_json
from tests.suites.walking import read_all, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.datasets import Array as Data
    from tests.datasets import Dataset


def _precomputed(path: Path, *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout="precomputed", skip_unsupported=skip)


def _info(tree: Tree, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_all(tree, tree.resolve(f"{path}/info".lstrip("/"))))
    return found


def _read(path: Path, scale: int = 0) -> Data:
    """Axes x, y, z, channel, from where the volume begins."""
    store = {"driver": "file", "path": f"{path}/"}
    spec = {"driver": "neuroglancer_precomputed", "kvstore": store, "scale_index": scale}
    return np.asarray(ts.open(spec).result().read().result())


# ------------------------------------------------------------------------------------------------ Zarr v3 as source

_DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32")
_NAMES: list[tuple[str, ...]] = [
    *[("x",), ("y", "x"), ("x", "y"), ("i", "j"), ("z", "y", "x"), ("x", "y", "z"), ("y", "z", "x"), ("z", "x")],
    *[("c", "z", "y", "x"), ("z", "y", "x", "c"), ("x", "C", "y"), ("channel", "x")],
    *[("t", "c", "z", "y", "x"), ("c", "time", "x", "y", "z"), ("a", "z", "y", "x"), ("a", "b", "c", "d")],
]


def as_xyzc(data: Data, names: Sequence[str]) -> Data:
    """The same as readers of precomputed see it. Axes that nobody names are z, y and x, behind one of channels."""
    roles = [{"channel": "c", "time": "t"}.get(name.lower(), name.lower()) for name in names]
    if not roles or not set(roles) <= set("xyzct"):
        named_roles = [role for role in roles if role in ("c", "t")]
        free = ["z", "y", "x"] if named_roles else ["c", "z", "y", "x"]
        free = free[len(free) - (data.ndim - len(named_roles)) :]
        roles = [role if role in ("c", "t") else free.pop(0) for role in roles or [""] * data.ndim]
    elements = data.astype("uint8") if data.dtype == bool else data
    for role in "xyzct":
        if role not in roles:
            elements, roles = elements[..., None], [*roles, role]
    return elements.transpose([roles.index(role) for role in "xyzct"])[..., 0]


@st.composite
def _grids(draw: st.DrawFn) -> Grid:
    """All channels are in one chunk, and there is one point in time."""
    names = draw(st.sampled_from(_NAMES))
    shape = [1 if name in ("t", "time") else draw(st.integers(1, 9)) for name in names]
    chunk = [draw(st.integers(1, 4)) for _ in names]
    for axis, name in enumerate(names):
        if name in ("c", "C", "channel", "a"):
            shape[axis] = draw(st.integers(1, 3))
            chunk[axis] = draw(st.integers(shape[axis], 3))
    return shape, chunk, {"dimension_names": names}


@given(arrays(_DTYPES, _grids()))
def test_any_array_of_zarr_is_read_as_precomputed(tmp_path_factory: pytest.TempPathFactory, written: Written) -> None:
    path = tmp_path_factory.mktemp("precomputed")
    written.write(path / "source" / "a")
    tree = _precomputed(path / "source")
    write_files(path / "shown", walk(tree))
    expected = as_xyzc(written.data, written.members["dimension_names"])
    values = _read(path / "shown/a")
    assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(values, expected)


_RAMP = np.arange(1, 7 * 9 * 14 + 1, dtype="uint16").reshape(7, 9, 14)  # z, y, x


@pytest.mark.parametrize(
    ("chain", "passes"),
    [
        ([LITTLE], True),
        ([LITTLE, CRC], True),
        ([BIG], False),
        ([LITTLE, GZIP], False),
        ([transpose(2, 1, 0), LITTLE], False),
        ([transpose(2, 1, 0), transpose(2, 1, 0), LITTLE], True),
    ],
)
def test_chunks_pass_where_they_can(chain: list[Any], passes: bool, tmp_path: Path) -> None:
    write_zarr(tmp_path, _RAMP, (4, 4, 5), chain, shard=(8, 8, 10))
    tree = _precomputed(tmp_path)
    assert _info(tree) == {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": "uint16",
        "num_channels": 1,
        "scales": [
            {
                "key": "1_1_1",
                "size": [14, 9, 7],
                "resolution": [1, 1, 1],
                "voxel_offset": [0, 0, 0],
                "chunk_sizes": [[5, 4, 4]],
                "encoding": "raw",
            }
        ],
    }
    tree_files, native = walk(tree), walk(open_tree(str(tmp_path)))
    assert len(tree_files) == 1 + 3 * 3 * 2
    cut = 4 * sum(c is CRC for c in chain)
    for z, y, x in np.ndindex(2, 3, 3):
        part = _RAMP[4 * z : 4 * z + 4, 4 * y : 4 * y + 4, 5 * x : 5 * x + 5]
        ends = (min(5 * x + 5, 14), min(4 * y + 4, 9), min(4 * z + 4, 7))
        document = tree_files[f"1_1_1/{5 * x}-{ends[0]}_{4 * y}-{ends[1]}_{4 * z}-{ends[2]}"]
        assert document == part.tobytes()
        if part.size == 80 and passes:
            chunk = native[f"c/{z}/{y}/{x}"]
            assert document == chunk[: len(chunk) - cut]


@pytest.mark.parametrize(
    ("data", "chunk", "members", "why"),
    [
        (np.ones((2, 2), "int64"), (2, 2), {}, "precomputed has no data type int64"),
        (np.ones((2, 2), "float64"), (2, 2), {}, "precomputed has no data type float64"),
        (np.ones((2, 2), "float16"), (2, 2), {}, "precomputed has no data type float16"),
        (np.ones((2, 2), "complex64"), (2, 2), {}, "precomputed has no data type complex64"),
        (np.ones((), "uint8"), (), {}, "precomputed has no arrays without axes"),
        (
            np.ones((3, 2, 2, 2), "uint8"),
            (3, 2, 2, 2),
            {"dimension_names": ["t", "z", "y", "x"]},
            "axis 't' has 3 elements; precomputed has no such axis",
        ),
        (
            np.ones((3, 2, 2, 2, 2), "uint8"),
            (3, 2, 2, 2, 2),
            {},
            "axis 'number 0' has 3 elements; precomputed has no such axis",
        ),
        (
            np.ones((5, 2, 2, 2), "uint8"),
            (2, 2, 2, 2),
            {},
            "its 5 channels are in 3 chunks; precomputed has all channels in one chunk",
        ),
    ],
)
def test_what_precomputed_cannot_say_is_refused_when_mounted(
    data: Data, chunk: Sequence[int], members: Any, why: str, tmp_path: Path
) -> None:
    write_zarr(tmp_path / "g/odd", data, chunk, [LITTLE if data.itemsize > 1 else BYTE], **members)
    write_zarr(tmp_path / "g/even", _RAMP, (4, 4, 5), [LITTLE])
    with pytest.raises(UnsupportedError, match=rf"^g/odd: cannot be shown as precomputed: {why}"):
        _precomputed(tmp_path)
    tree = _precomputed(tmp_path, skip=True)
    assert [(p.path, p.skipped) for p in tree.problems()] == [("g/odd", True)]
    assert why in tree.problems()[0].why
    tree_files = walk(tree)
    assert "g/even/info" in tree_files
    assert not any(name.startswith("g/odd") for name in tree_files)


# --------------------------------------------------------------------------------------------------- images


def _ome(levels: Sequence[tuple[str, Sequence[float], Sequence[float]]], **image_label: Any) -> dict[str, Any]:
    axes = [{"name": n, "type": "space", "unit": "micrometer"} for n in "zyx"]
    datasets = [
        {
            "path": path,
            "coordinateTransformations": [
                {"type": "scale", "scale": scale},
                {"type": "translation", "translation": shift},
            ],
        }
        for path, scale, shift in levels
    ]
    members = {"image-label": image_label} if image_label else {}
    return group_document(ome={"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}], **members})


def test_an_image_is_a_volume_of_many_scales(tmp_path: Path) -> None:
    levels = [
        ("s1", [0.08, 0.016, 0.016], [10.02, 0.004, 0.004]),
        ("0", [0.04, 0.008, 0.008], [10.0, 0.0, 0.0]),
        ("deep/2", [0.16, 0.032, 0.032], [10.0, 0.0, 0.0]),  # not where it should be: by strides, as many write them
        ("3", [0.16, 0.032, 0.032], [10.06, 0.012, 0.012]),
    ]
    data = {"0": _RAMP, "s1": _RAMP[::2, ::2, ::2], "deep/2": _RAMP[::4, ::4, ::4], "3": _RAMP[::4, ::4, ::4] + 1}
    write_json(tmp_path / "image/zarr.json", _ome(levels))
    for path, level in data.items():
        write_zarr(tmp_path / "image" / path, level, (4, 4, 5), [LITTLE, ZSTD], shard=(8, 8, 10))
    (tmp_path / "image/README").write_text("kept")
    (tmp_path / "plain").mkdir()
    tree = _precomputed(tmp_path)
    scales = _info(tree, "image")["scales"]
    assert [s["key"] for s in scales] == ["8_8_40", "16_16_80", "32_32_160", "32_32_160_1"]
    assert [s["resolution"] for s in scales] == [[8, 8, 40], [16, 16, 80], [32, 32, 160], [32, 32, 160]]
    assert [s["voxel_offset"] for s in scales] == [[0, 0, 250], [0, 0, 125], [0, 0, 62], [0, 0, 62]]
    tree_files = walk(tree)
    assert tree_files["image/README"] == b"kept"
    assert not any("zarr" in name for name in tree_files)
    assert not any(name.startswith(("image/0/", "image/s1/")) for name in tree_files)
    write_files(tmp_path / "shown", tree_files)
    for number, path in enumerate(("0", "s1", "deep/2", "3")):
        np.testing.assert_array_equal(_read(tmp_path / "shown/image", number)[..., 0], data[path].T)


@pytest.mark.parametrize("names", [["8_8_40", "16_16_80"], ["16_16_80", "x"], ["x", "8_8_40"]])
def test_levels_that_are_called_as_scales_are(names: list[str], tmp_path: Path) -> None:
    """What is in their directories is in no scale's."""
    write_json(
        tmp_path / "zarr.json",
        _ome([(n, [s * 0.04, s * 0.008, s * 0.008], [0.0] * 3) for n, s in zip(names, (1, 2), strict=True)]),
    )
    data = dict(zip(names, (_RAMP, _RAMP[::2, ::2, ::2]), strict=True))
    for path, level in data.items():
        write_zarr(tmp_path / path, level, (4, 4, 5), [LITTLE, ZSTD], shard=(8, 8, 10))
    tree = _precomputed(tmp_path)
    keys = {scale["key"] for scale in _info(tree)["scales"]}
    tree_files = walk(tree)
    write_files(tmp_path / "shown", tree_files)
    for number, level in enumerate(data.values()):
        np.testing.assert_array_equal(_read(tmp_path / "shown", number)[..., 0], level.T)
    assert {name for name in tree_files if name.rpartition("/")[0] not in keys} == {"info"}


@pytest.mark.parametrize("beside", ["8_8_40", "8_8_40/deep/notes", "8_8_40_1/x"])
def test_what_is_called_as_a_scale_would_be_keeps_its_name(beside: str, tmp_path: Path) -> None:
    write_json(tmp_path / "zarr.json", _ome([("0", [0.04, 0.008, 0.008], [0.0] * 3)]))
    write_zarr(tmp_path / "0", _RAMP, (4, 4, 5), [LITTLE])
    write_files(tmp_path, {beside: b"mine"})
    tree = _precomputed(tmp_path)
    tree_files = walk(tree)
    (scale,) = _info(tree)["scales"]
    assert scale["key"] == ("8_8_40_1" if "40_1" not in beside else "8_8_40")
    assert tree_files[beside] == b"mine"
    assert sorted({name.split("/")[0] for name in tree_files}) == sorted({"info", beside.split("/")[0], scale["key"]})


def test_levels_that_are_shown_by_themselves_lie_where_their_image_says(tmp_path: Path) -> None:
    """Those further down, and those of a second image; that of another shape is in no place that anybody tells."""
    document = _ome([("deep/0", [0.04, 0.008, 0.008], [0.0, 0.0, 0.08]), ("deep/1", [0.08, 0.016, 0.016], [0.0] * 3)])
    second = [("0", [0.1, 0.1, 0.1], [0.5, 0.0, 0.0]), ("flat", [0.1] * 3, [0.0] * 3), ("gone", [0.1] * 3, [0.0] * 3)]
    document["attributes"]["ome"]["multiscales"] += _ome(second)["attributes"]["ome"]["multiscales"]
    write_json(tmp_path / "zarr.json", document)
    for name in ("deep/0", "deep/1", "0"):
        write_zarr(tmp_path / name, _RAMP, (4, 4, 5), [LITTLE], shard=(8, 8, 10))
    write_zarr(tmp_path / "flat", _RAMP[0], (4, 5), [LITTLE])
    tree = _precomputed(tmp_path)
    scales_by_name = {}
    for name in ("", "deep/0", "deep/1", "0", "flat"):
        scales = _info(tree, name)["scales"]
        scales_by_name[name] = [(s["key"], s["resolution"], s["voxel_offset"]) for s in scales]
    fine, coarse = ("8_8_40", [8, 8, 40], [10, 0, 0]), ("16_16_80", [16, 16, 80], [0, 0, 0])
    assert scales_by_name == {
        "": [fine, coarse],
        "deep/0": [fine],
        "deep/1": [coarse],
        "0": [("100_100_100", [100] * 3, [0, 0, 5])],
        "flat": [("1_1_1", [1, 1, 1], [0, 0, 0])],
    }
    write_files(tmp_path / "shown", walk(tree))
    np.testing.assert_array_equal(_read(tmp_path / "shown/0")[..., 0], _RAMP.T)
    assert not (tmp_path / "shown/gone").exists()


def test_the_fill_value_minus_zero_is_made(tmp_path: Path) -> None:
    write_zarr(tmp_path, np.full((2, 2, 2), -0.0, "float32"), (2, 2, 2), [LITTLE], fill_value=-0.0)
    assert walk(_precomputed(tmp_path))["1_1_1/0-2_0-2_0-2"] == np.full(8, -0.0, "<f4").tobytes()


def test_labels_are_segmentations_and_so_are_large_unsigned_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "labels/zarr.json", _ome([("0", [1.0] * 3, [0.0] * 3)], version="0.5"))
    write_zarr(tmp_path / "labels/0", _RAMP, (4, 4, 5), [LITTLE])
    write_json(tmp_path / "image/zarr.json", _ome([("0", [1.0] * 3, [0.0] * 3)]))
    write_zarr(tmp_path / "image/0", _RAMP, (4, 4, 5), [LITTLE])
    write_zarr(tmp_path / "ids", _RAMP.astype("uint64"), (4, 4, 5), [LITTLE])
    tree = _precomputed(tmp_path)
    types = {path: _info(tree, path)["type"] for path in ("labels", "image", "ids")}
    assert types == {"labels": "segmentation", "image": "image", "ids": "segmentation"}


def test_an_image_that_lacks_a_level_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "zarr.json", _ome([("0", [1.0] * 3, [0.0] * 3), ("1", [2.0] * 3, [0.0] * 3)]))
    write_zarr(tmp_path / "0", _RAMP, (4, 4, 5), [LITTLE])
    with pytest.raises(UnsupportedError, match=r"^/: cannot be shown as precomputed: 1: no array is there"):
        _precomputed(tmp_path)


# ------------------------------------------------------------------------------------------------ other sources


def test_n5_tells_resolution_and_axes(tmp_path: Path) -> None:
    members = {"resolution": [8, 8, 40], "units": ["nm", "nm", "nm"], "axes": ["x", "y", "z"], "offset": [80, 0, -400]}
    written: list[tuple[str, int, dict[str, Any]]] = [
        ("pyramid/s0", 1, {}),
        ("pyramid/s1", 2, {}),
        ("alone", 1, members),
        ("coarse", 2, {"downsamplingFactors": [2, 2, 1]}),
    ]
    for name, by, further in written:
        data = _RAMP[:, ::by, ::by]
        store = {"driver": "file", "path": f"{tmp_path}/{name}/"}
        metadata = {"dimensions": data.shape[::-1], "blockSize": [5, 4, 4], "dataType": "uint16", **further}
        metadata["compression"] = {"type": "gzip"}
        spec = {"driver": "n5", "kvstore": store, "metadata": metadata}
        ts.open(spec, create=True).result().write(data.T).result()
    write_json(tmp_path / "attributes.json", {"n5": "2.0.0"})
    write_json(
        tmp_path / "pyramid/attributes.json",
        {"scales": [[1, 1, 1], [2, 2, 1]], "pixelResolution": {"unit": "um", "dimensions": [0.008, 0.008, 0.04]}},
    )
    tree = _precomputed(tmp_path)
    (alone,) = _info(tree, "alone")["scales"]
    assert (alone["resolution"], alone["voxel_offset"]) == ([8, 8, 40], [10, 0, -10])
    assert _info(tree, "coarse")["scales"][0]["resolution"] == [2, 2, 1]
    scales = _info(tree, "pyramid")["scales"]
    assert [s["resolution"] for s in scales] == [[8, 8, 40], [16, 16, 40]]
    assert [s["voxel_offset"] for s in scales] == [[0, 0, 0], [0, 0, 0]]
    tree_files = walk(tree)
    assert not any("attributes.json" in name for name in tree_files)
    write_files(tmp_path / "shown", tree_files)
    np.testing.assert_array_equal(_read(tmp_path / "shown/alone")[..., 0], _RAMP.T)
    np.testing.assert_array_equal(_read(tmp_path / "shown/pyramid", 1)[..., 0], _RAMP[:, ::2, ::2].T)


# ------------------------------------------------------------------------------------------- precomputed as source


DRIVERS = {"zarr2": "zarr", "zarr3": "zarr3", "n5": "n5"}


def _read_shown(layout: str, path: Path) -> Data:
    store = {"driver": "file", "path": f"{path}/"}
    found: Data = np.asarray(ts.open({"driver": DRIVERS[layout], "kvstore": store}).result().read().result())
    return found if layout == "n5" else found.T


@pytest.mark.parametrize(
    ("layout", "name"), list(zip(itertools.cycle(("n5", "zarr2")), sorted(PRECOMPUTED), strict=False))
)
def test_every_variant_of_precomputed_is_read_in_other_layouts(
    layout: str, name: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    """As zarr3 in `test_layout_zarr3.py`. Lossy ones give what tensorstore reads of the source."""
    precomputed_dataset = dataset("precomputed", name)
    for number, expected in precomputed_dataset.arrays.items():
        for source in (precomputed_dataset.path, precomputed_dataset.twin):
            tree = open_tree(str(source), layout=layout, skip_unsupported=True)
            tree_files = walk(tree)
            out = tmp_path / source.name / number
            write_files(out, tree_files)
            scale = json.loads((source / "info").read_bytes())["scales"][int(number)]
            level = next(path for path in (out / f"s{number}", out / scale["key"]) if path.exists())
            values = _read_shown(layout, level)
            np.testing.assert_array_equal(values if values.ndim == 4 else values[..., None], expected)
            assert "info" not in tree_files


def _encoders() -> dict[str, tuple[Data, Callable[[Data], bytes]]]:
    """Encodings that tensorstore has not: what is written (x, y, z), and by what."""
    labels = (np.indices((20, 13, 6)).sum(axis=0) // 5).astype("uint32")
    return {
        "compresso": (labels, lambda part: bytes(compresso.compress(np.asfortranarray(part)))),
        "crackle": (labels, lambda part: bytes(crackle.compress(np.asfortranarray(part)))),
        "fpzip": (np.sin(labels).astype("float32"), lambda part: bytes(fpzip.compress(part[..., None], order="F"))),
        "jxl": (
            labels.astype("uint8"),
            lambda part: bytes(imagecodecs.jpegxl_encode(part.T.reshape(-1, part.shape[0]), lossless=True)),
        ),
    }


@pytest.mark.parametrize("encoding", sorted(_encoders()))
@pytest.mark.parametrize("layout", sorted(DRIVERS))
def test_encodings_that_need_a_library_are_read_in_other_layouts(encoding: str, layout: str, tmp_path: Path) -> None:
    data, encode = _encoders()[encoding]
    scale = {"key": "s", "size": data.shape, "chunk_sizes": [[8, 8, 4]], "resolution": [1, 1, 1], "encoding": encoding}
    info = {"type": "image", "data_type": data.dtype.name, "num_channels": 1, "scales": [scale]}
    write_json(tmp_path / "volume/info", info)
    for corner in itertools.product(range(0, 20, 8), range(0, 13, 8), range(0, 6, 4)):
        part = data[tuple(slice(a, a + n) for a, n in zip(corner, (8, 8, 4), strict=True))]
        name = "_".join(f"{a}-{a + n}" for a, n in zip(corner, part.shape, strict=True))
        write_files(tmp_path / "volume/s", {name: encode(part)})
    tree = open_tree(str(tmp_path / "volume"), layout=layout)
    write_files(tmp_path / "shown", walk(tree))
    np.testing.assert_array_equal(_read_shown(layout, tmp_path / "shown" / ("s0" if layout == "n5" else "s")), data)


_BY_ID: dict[str, Any] = {"sharding": None, "by_id": {"key": "by_id"}, "relationships": [], "spatial": []}


@pytest.mark.parametrize("layout", sorted(DRIVERS))
@pytest.mark.parametrize(
    ("kind", "plural"),
    [
        ("legacy_mesh", "meshes"),
        ("multilod_draco", "meshes"),
        ("skeletons", "skeletons"),
        ("annotations_v1", "annotations"),
    ],
)
def test_what_lies_beside_a_volume_and_is_no_array_is_refused(
    kind: str, plural: str, layout: str, tmp_path: Path
) -> None:
    scale = {"key": "s", "size": [9, 9, 9], "chunk_sizes": [[8, 8, 4]], "resolution": [1, 1, 1], "encoding": "raw"}
    write_json(tmp_path / "info", {"type": "image", "data_type": "uint8", "num_channels": 1, "scales": [scale]})
    write_files(tmp_path, {"s/0-8_0-8_0-4": bytes(256), "beside/1": b"x", "beside/by_id/1": b"x"})
    write_json(tmp_path / "beside/info", {"@type": f"neuroglancer_{kind}", **_BY_ID})
    with pytest.raises(
        UnsupportedError,
        match=f"^beside: cannot be shown as {layout}: {plural} are no array; -o unsupported=skip omits it$",
    ):
        open_tree(str(tmp_path), layout=layout)
    tree = open_tree(str(tmp_path), layout=layout, skip_unsupported=True)
    assert not any(name.startswith("beside") for name in walk(tree))
    assert [(p.path, p.skipped) for p in tree.problems()] == [("beside", True)]


def test_a_source_whose_library_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = {"key": "s", "size": [9, 9, 9], "chunk_sizes": [[8, 8, 4]], "resolution": [1, 1, 1], "encoding": "crackle"}
    info = {"type": "image", "data_type": "uint8", "num_channels": 1, "scales": [scale]}
    write_json(tmp_path / "info", info)
    (tmp_path / "s").mkdir()
    monkeypatch.setitem(sys.modules, "crackle", None)
    with pytest.raises(UnsupportedError, match="needs crackle-codec: pip install"):
        open_tree(str(tmp_path), layout="zarr2")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("resolution", [1, 1]),
        ("resolution", [10**400, 1, 1]),
        ("resolution", [0, 1, 1]),
        ("resolution", [1e999, 1, 1]),
        ("resolution", None),
        ("resolution", ["x", 1, 1]),
        ("size", [2**63, 1, 1]),
        ("size", "abc"),
        ("chunk_sizes", []),
        ("chunk_sizes", [[0, 1, 1]]),
        ("chunk_sizes", [[2**40, 2**40, 2**40]]),
        ("voxel_offset", [1.5, 0, 0]),
        ("key", "../x"),
        ("key", 7),
        ("encoding", "zfpc"),
        ("encoding", None),
        ("encoding", "compressed_segmentation"),
        ("compressed_segmentation_block_size", [0, 1, 1]),
    ],
)
def test_hostile_scales_are_refused_in_layouts(member: str, value: Any, tmp_path: Path) -> None:
    encoding = "compressed_segmentation" if member.startswith("compressed") else "raw"
    scale = {"key": "s", "size": [9, 9, 9], "chunk_sizes": [[8, 8, 4]], "resolution": [1, 1, 1], "encoding": encoding}
    write_json(tmp_path / "info", {"data_type": "uint32", "num_channels": 1, "scales": [{**scale, member: value}]})
    (tmp_path / "s").mkdir()
    for layout in DRIVERS:
        with pytest.raises(UnsupportedError):
            open_tree(str(tmp_path), layout=layout)
    with pytest.raises(NotADatasetError, match="no sharded dataset"):  # which is no reason to complain
        open_tree(str(tmp_path))
