"""Programs that know only a layout read and write sources of each format, whose own library reads the result."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import tensorstore as ts
import zarr

from shardfs.formats.registry import sources as source_formats
from shardfs.formats.registry import views
from shardfs.jobs.shared_work import JobSource, verify
from tests import data_bcolz, data_blosc2, data_n5
from tests.clients import read_tensorstore
from tests.conftest import run_client
from tests.data_layouts import Written
from tests.datasets import BLOSC, CRC, LITTLE, ROOT, ZSTD, client_python, ramp, transpose
from tests.handmade import group_document, write_json
from tests.handmade import sharding as volume_sharding
from tests.mount.programs import read_jobs, shardfs
from tests.write.mounts import writable
from tests.write.test_real_writers import read_n5_natively

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.datasets import Array

pytestmark = [pytest.mark.interop]

BLOCKS, SLABS = (7, 9, 10), (11, 5, 6)
"""Shapes of arrays: chunks cut the second ones along the first axis only, as bcolz requires."""


class Source(NamedTuple):
    """An array of the source.

    Args:
        create: writes it in a directory, by a library that is not shardfs, and returns its elements.
        check: reads it there by its own library and compares.
        member: its path below the directory.
        lossy: its chunks cannot be encoded without loss.
    """

    format: str
    create: Callable[[Path], Array]
    check: Callable[[Path, Array, Path], None]
    member: str = ""
    lossy: bool = False


# ---- Zarr v3 and v2


def _zarr3(path: Path, shape: Sequence[int], **how: Any) -> Array:
    data = ramp(shape)
    Written(data, **how).write(path)
    return data


def _zarr2(path: Path, shape: Sequence[int], chunks: Sequence[int]) -> Array:
    data = ramp(shape)
    metadata = {"shape": shape, "chunks": chunks, "dtype": "<u2", "compressor": {"id": "zlib", "level": 3}}
    store = {"driver": "file", "path": f"{path}/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": {**metadata, "dimension_separator": "/"}}
    ts.open(spec, create=True).result().write(data).result()
    return data


def _strings(path: Path) -> Array:
    data = np.array([f"string {i}" for i in range(11)])
    zarr.create_array(path, shape=(11,), chunks=(2,), shards=(6,), dtype="string")[:] = data
    return data


def _by_zarr_python(path: Path, wanted: Array, _: Path) -> None:
    np.testing.assert_array_equal(np.asarray(zarr.open_array(path, mode="r")[:]).tolist(), wanted)


def _by_tensorstore(driver: str, path: Path, wanted: Array, _: Path) -> None:
    np.testing.assert_array_equal(read_tensorstore.read(driver, str(path), None), wanted)


# ---- the draft of 2022


def _draft(path: Path, shape: Sequence[int], chunks: Sequence[int], per: Sequence[int]) -> Array:
    data, top = ramp(shape), path.parent.parent / "draft"
    top.mkdir(exist_ok=True)
    np.save(top / f"{path.name}.npy", data)
    array = {"path": "a", "data": str(top / f"{path.name}.npy"), "chunks": chunks, "chunks_per_shard": [per]}
    (top / "jobs.json").write_text(json.dumps([{"root": str(path), "arrays": [{**array, "gzip": 3}]}]))
    run_client("write_zarr_draft", top / "jobs.json", python=client_python("zarr2"))
    return data


def _by_the_draft(path: Path, wanted: Array, top: Path) -> None:
    out = top / "read.npy"
    run_client("read_zarr_draft", path, out, "--member", "a", "--sharding", python=client_python("zarr2"))
    np.testing.assert_array_equal(np.load(out), wanted)


# ---- precomputed


def _volume(path: Path, shape: Sequence[int], chunk: Sequence[int], encoding: str, dtype: str = "uint16") -> Array:
    data = ramp(shape, dtype)
    scale: dict[str, Any] = {"size": shape[::-1], "chunk_size": chunk[::-1], "resolution": [8, 8, 40]}
    if encoding == "compressed_segmentation":
        scale["compressed_segmentation_block_size"] = [8, 8, 8]
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": dtype, "num_channels": 1, "type": "image"},
        "scale_metadata": {**scale, "encoding": encoding, "sharding": volume_sharding(minishard=1, shard=1)},
    }
    volume = ts.open(spec, create=True).result()
    volume.write(data.T[..., None]).result()
    return np.asarray(volume.read().result())[..., 0].T  # jpeg is lossy


def _by_volumes(path: Path, wanted: Array, _: Path) -> None:
    array = read_tensorstore.read("neuroglancer_precomputed", str(path), 0)
    np.testing.assert_array_equal(array[..., 0].T, wanted)


# ---- N5


def _n5(path: Path, shape: Sequence[int], chunk: Sequence[int], per: Sequence[int]) -> Array:
    variant = data_n5.Variant(tuple(shape[::-1]), tuple(chunk[::-1]), [tuple(per[::-1])], data_n5.GZIP)
    dataset = variant.write(path.parent.parent / "n5" / path.name, path.name)
    shutil.copytree(dataset.path, path)
    return dataset.array.T


def _by_n5(path: Path, wanted: Array, top: Path) -> None:
    read_n5_natively(path, {data_n5.MEMBER: wanted}, top / path.name, x_first=False)


# ---- bcolz and Blosc2


def _superchunks(path: Path, shape: Sequence[int]) -> Array:
    data = ramp(shape)
    data_bcolz.write_array(path, data, 2, 3)
    return data


def _by_superchunks(path: Path, wanted: Array, _: Path) -> None:
    content = b"".join(
        data_bcolz.decoded(path / f"data/__{i}__.bin") for i in range(1, 1 + len(list(path.glob("data/*.bin"))))
    )
    np.testing.assert_array_equal(np.frombuffer(content, wanted.dtype).reshape(wanted.shape), wanted)


def _pack(path: Path) -> Array:
    shutil.copy(ROOT / "tests/golden/bloscpack/array-2d.blp", path)
    data: Array = np.load(ROOT / "tests/golden/bloscpack/array-2d.npy")
    return data


def _by_bloscpack(path: Path, wanted: Array, top: Path) -> None:
    run_client("read_bloscpack", path, top / "read.npy", python=client_python("bcolz"))
    np.testing.assert_array_equal(np.load(top / "read.npy").view(wanted.dtype).reshape(wanted.shape), wanted)


def _frame(path: Path) -> Array:
    path.write_bytes(data_blosc2.frame([data_blosc2.chunk(bytes([i]) * 16) for i in range(3)], 16))
    return np.repeat(np.arange(3, dtype="u1"), 16)


def _by_nothing(path: Path, wanted: Array, _: Path) -> None:
    """No layout shows the source, so that nothing is written."""


CUT, ROWS = (2, 3, 4), (2, 5, 6)
_ZARR3 = partial(Source, "zarr3", check=partial(_by_tensorstore, "zarr3"))
_DRAFT = partial(Source, "zarr3-draft", check=_by_the_draft, member="a")
_VOLUME = partial(Source, "precomputed", check=_by_volumes)
_N5 = partial(Source, "n5", check=_by_n5, member=data_n5.MEMBER)
_ZARR2 = partial(Source, "zarr2", check=partial(_by_tensorstore, "zarr"))
_turned = [transpose(2, 0, 1), LITTLE]

SOURCES: Mapping[str, Source] = {
    "zarr3_zstd_crc": _ZARR3(partial(_zarr3, shape=BLOCKS, chunk=CUT, chain=[LITTLE, ZSTD, CRC], shard=(4, 6, 8))),
    "zarr3_turned": _ZARR3(partial(_zarr3, shape=BLOCKS, chunk=CUT, chain=_turned, shard=(4, 6, 8))),
    "zarr3_blosc_rows": _ZARR3(partial(_zarr3, shape=SLABS, chunk=ROWS, chain=[LITTLE, BLOSC], shard=(6, 5, 6))),
    "zarr3_strings": Source("zarr3", _strings, _by_zarr_python),
    "draft_gzip": _DRAFT(partial(_draft, shape=BLOCKS, chunks=CUT, per=(2, 2, 2))),
    "draft_gzip_rows": _DRAFT(partial(_draft, shape=SLABS, chunks=ROWS, per=(3, 1, 1))),
    "volume_raw": _VOLUME(partial(_volume, shape=BLOCKS, chunk=CUT, encoding="raw")),
    "volume_png_rows": _VOLUME(partial(_volume, shape=SLABS, chunk=ROWS, encoding="png", dtype="uint8")),
    "volume_segments": _VOLUME(
        partial(_volume, shape=BLOCKS, chunk=CUT, encoding="compressed_segmentation", dtype="uint32")
    ),
    "volume_jpeg_rows": _VOLUME(partial(_volume, shape=SLABS, chunk=ROWS, encoding="jpeg", dtype="uint8"), lossy=True),
    "n5_gzip": _N5(partial(_n5, shape=BLOCKS, chunk=CUT, per=(2, 2, 2))),
    "n5_gzip_rows": _N5(partial(_n5, shape=SLABS, chunk=ROWS, per=(3, 1, 1))),
    "superchunks": Source("bcolz", partial(_superchunks, shape=SLABS), _by_superchunks),
    "pack.blp": Source("bloscpack", _pack, _by_bloscpack),
    "frame.b2frame": Source("blosc2", _frame, _by_nothing),
    "zarr2_zlib": _ZARR2(partial(_zarr2, shape=BLOCKS, chunks=CUT)),
    "zarr2_zlib_rows": _ZARR2(partial(_zarr2, shape=SLABS, chunks=ROWS)),
}

# ---- layouts

WRITERS: Mapping[str, Sequence[str]] = {
    "zarr2": ("zarr-python 2.18", "zarr-python 3", "tensorstore", "z5py"),
    "zarr3": ("zarr-python 3", "tensorstore", "z5py"),
    "n5": ("tensorstore", "z5py", "zarr-python 2.18"),
    "precomputed": ("tensorstore", "cloud-volume"),
    "bcolz": ("bcolz-zipline",),
}
PYTHONS: Mapping[str, Any] = {"zarr-python 2.18": "zarr2", "cloud-volume": "cv", "bcolz-zipline": "bcolz"}
NATIVE = {("zarr3", "zarr3"), ("precomputed", "precomputed"), ("n5", "n5"), ("bcolz", "bcolz"), ("bloscpack", "bcolz")}
"""Pairs that the layout shows as the native layout does; docs/formats.md says which programs know them."""

INCAPABLE = {
    ("n5", "zarr2", "z5py"): "it has no big-endian data in Zarr v2",
    ("n5", "zarr3", "z5py"): "it reads and writes big-endian data in Zarr v3 as little-endian",
    ("n5", "n5", "z5py"): "it changes other elements of blocks that are full at the edge of the array",
    ("zarr3", "zarr3", "z5py"): "it has no crc32c and no transpose in Zarr v3",
}
"""Programs that cannot write some arrays of a format, even without shardfs."""

_CUT = ("zarr3_zstd_crc", "zarr3_turned", "draft_gzip", "volume_raw", "volume_segments", "n5_gzip", "zarr2_zlib")
REFUSED = {
    **{("frame.b2frame", layout): "shardfs cannot describe 1 bytes in codecs blosc2" for layout in WRITERS},
    **{("zarr3_strings", layout): "string" for layout in ("n5", "precomputed", "bcolz")},
    **{(name, "bcolz"): "bcolz cuts arrays along the first axis only" for name in _CUT},
}
"""Arrays that a layout cannot show, and a part of the message."""


def _writes(library: str, name: str, layout: str) -> bool:
    """Whether a program can write an array in this layout."""
    if layout == "precomputed" and (SOURCES[name].lossy or (name, library) == ("volume_png_rows", "cloud-volume")):
        return False  # loses values without shardfs, too; needs another package
    if name == "zarr3_strings":
        return library.startswith("zarr-python")
    return (SOURCES[name].format, layout, library) not in INCAPABLE


def _member(source: str, layout: str) -> str:
    """The path of an array below the mount."""
    format, member = SOURCES[source].format, SOURCES[source].member
    if format == "precomputed":
        member = {"precomputed": "", "n5": "s0"}.get(layout, "8_8_40")
    return f"{source}/{member}".rstrip("/")


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Array]]:
    """A directory with all sources, not to be written to, and their elements."""
    root = tmp_path_factory.mktemp("pairs") / "source"
    write_json(root / "zarr.json", group_document())  # z5py opens arrays in a group only
    return root, {name: source.create(root / name) for name, source in SOURCES.items()}


def _overwritten(library: str, layout: str, mount: Path, arrays: Mapping[str, Array], scratch: Path) -> None:
    """Let a program change a box of each array, no two programs the same; `arrays` get the same changes."""
    begin = 1 + WRITERS[layout].index(library) % 3
    names = [name for name in arrays if _writes(library, name, layout)]
    corners = [[[begin, n - 1] for n in arrays[name].shape] for name in names]
    missing = 3 if layout == "precomputed" else 0  # precomputed has at least three axes
    jobs = [
        [library, layout, str(mount), _member(name, layout), [[0, 1]] * (missing - len(box)) + box]
        for name, box in zip(names, corners, strict=True)
    ]
    scratch.mkdir()
    python = client_python(PYTHONS[library]) if library in PYTHONS else None
    for name, box, outcome in zip(names, corners, read_jobs("overwrite", jobs, scratch, python), strict=True):
        if SOURCES[name].lossy:
            assert isinstance(outcome, str), f"{library} has written {name}"
            assert "Read-only file system" in outcome or "cannot open chunk file for writing" in outcome
            continue
        assert not isinstance(outcome, str), f"{library}, {name}: {outcome}"
        inside = tuple(slice(*c) for c in box)
        arrays[name][inside] = np.roll(arrays[name][inside], 1, axis=0)
        np.testing.assert_array_equal(outcome.reshape(arrays[name].shape), arrays[name], err_msg=f"{library}, {name}")


@pytest.mark.every_case
@pytest.mark.fuse
@pytest.mark.parametrize("layout", WRITERS)
def test_programs_write_to_each_source(
    layout: str, source_tree: tuple[Path, Mapping[str, Array]], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(source_tree[0], tmp_path / "source"))
    arrays = {name: data.copy() for name, data in source_tree[1].items() if (name, layout) not in REFUSED}
    options = f"unsupported=skip,log_file={tmp_path / 'log'}"
    with writable(source, tmp_path, "--layout", layout, "-o", options) as mount:
        mount.mount()
        for library in WRITERS[layout]:
            _overwritten(library, layout, mount.path, arrays, tmp_path / library)
        completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    refusals = [line for line in (tmp_path / "log").read_text().splitlines() if "refuses chunks: " in line]
    assert [("jpeg" in line) for line in refusals] == [True] * (layout != "precomputed")
    for name, wanted in arrays.items():
        SOURCES[name].check(source / name, wanted, tmp_path)
    assert [f for report in verify(JobSource.from_url(str(source)), deep=True) for f in report.findings] == []


@pytest.mark.parametrize("layout", WRITERS)
def test_arrays_that_a_layout_cannot_express_are_refused(
    layout: str, source_tree: tuple[Path, Mapping[str, Array]]
) -> None:
    told = shardfs("info", source_tree[0], "-o", f"layout={layout},unsupported=skip", "--json")
    reasons = {p["path"]: p["why"] for p in json.loads(told.stdout)["problems"]}
    refused = {name: why for (name, other), why in REFUSED.items() if other == layout}
    wanted = {f"{name}/{SOURCES[name].member}".rstrip("/"): why for name, why in refused.items()}
    assert reasons.keys() == wanted.keys()
    assert all(why in reasons[path] for path, why in wanted.items()), reasons


# ---- documentation


def written_by(format: str, layout: str) -> str:
    """The last cell of a row in docs/layouts.md."""
    if (format, layout) in NATIVE:
        return "see docs/formats.md"
    arrays = [name for name, source in SOURCES.items() if source.format == format and (name, layout) not in REFUSED]
    programs = ", ".join(w for w in WRITERS[layout] if (format, layout, w) not in INCAPABLE)
    return programs.replace("2.18, zarr-python 3", "2.18 and 3") if arrays else "refused"


def test_the_documentation_names_the_programs_that_write() -> None:
    text = (ROOT / "docs/layouts.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 4]
    names = [name for f in source_formats() for name in f.dataset_formats]
    programs = {(row[0], row[1]): row[-1] for row in rows if row[0] in names}
    assert programs == {(name, layout): written_by(name, layout) for name in names for layout in views()}
