"""bcolz as a layout, and as a source of others: superchunks, bloscpack files, and what bcolz 1.x wrote itself."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from shardfs.model.errors import CorruptShardError, UnsupportedError
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import Tree, open_tree
from tests import data_bcolz
from tests.data_bcolz import BLP, Superchunk, chunks_of, compressed, stored
from tests.data_layouts import BYTE, Grid, Written, arrays, equal, write_zarr
from tests.datasets import BIG, BLOSC, CRC, LITTLE, ZSTD, ramp, transpose
from tests.handmade import group_document, write_files, write_json
from tests.suites.walking import read_all, sizes, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.datasets import Array as Data


def _shown(path: Path, layout: str = "bcolz", *, skip: bool = False) -> Tree:
    return open_tree(str(path), layout=layout, skip_unsupported=skip)


def read(files: Mapping[str, bytes], path: str) -> Data:
    """As bcolz does it: all whole chunks, then what is left from the last one, which may hold more."""
    sizes, storage = (json.loads(files[f"{path}/meta/{name}"]) for name in ("sizes", "storage"))
    shape, dtype, chunklen = sizes["shape"], np.dtype(storage["dtype"]), storage["chunklen"]
    out = np.empty(shape, dtype)
    for i in range(-(-shape[0] // chunklen)):
        chunk = files[f"{path}/data/__{i}.blp"]
        nbytes, cbytes = struct.unpack_from("<I4xI", chunk, 20)
        assert chunk.startswith(BLP)
        assert len(chunk) == 16 + cbytes
        rows = np.frombuffer(blosc.decompress(chunk[16:]), dtype).reshape(-1, *shape[1:])
        part = out[i * chunklen : (i + 1) * chunklen]
        assert len(rows) in (chunklen, len(part))
        assert rows.nbytes == nbytes
        part[...] = rows[: len(part)]
    assert json.loads(files[f"{path}/__attrs__"]) is not None
    return out


# ------------------------------------------------------------------------------------------------------ the layout

_DTYPES = ("bool", "uint8", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64")


@st.composite
def _grids(draw: st.DrawFn) -> Grid:
    """Arrays that are cut along the first axis."""
    shape = [draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 3)))]
    return shape, [draw(st.integers(1, 4)), *(n + draw(st.integers(0, 2)) for n in shape[1:])], {}


@given(arrays(_DTYPES, _grids()))
def test_any_array_of_rows_is_read(tmp_path_factory: pytest.TempPathFactory, written: Written) -> None:
    path = tmp_path_factory.mktemp("bcolz")
    written.write(path / "a")
    assert equal(read(walk(_shown(path)), "a"), written.data)


@pytest.mark.parametrize(
    ("chain", "passes"),
    [
        ([LITTLE, BLOSC], True),
        ([BIG, BLOSC], True),
        ([LITTLE, BLOSC, CRC], True),
        ([LITTLE], False),
        ([LITTLE, ZSTD], False),
        ([transpose(1, 0), LITTLE, BLOSC], False),
        ([LITTLE, CRC, BLOSC], False),
    ],
)
def test_blosc_passes_and_all_else_is_wrapped(chain: list[Any], passes: bool, tmp_path: Path) -> None:
    data = ramp((9, 6), "uint16")
    write_zarr(tmp_path / "a", data, (4, 6), chain, shard=(8, 6))
    tree_files, native = walk(_shown(tmp_path)), walk(open_tree(str(tmp_path)))
    assert tree_files.keys() == {f"a/{n}" for n in ("meta/sizes", "meta/storage", "__attrs__")} | {
        f"a/data/__{i}.blp" for i in range(3)
    }
    for i in range(3):
        chunk = native[f"a/c/{i}/0"]
        if passes:
            assert tree_files[f"a/data/__{i}.blp"] == BLP + chunk[: len(chunk) - 4 * (chain[-1] is CRC)]
        else:
            rows = data[4 * i : 4 * i + 4].astype(">u2" if chain[0] is BIG else "<u2").tobytes()
            assert tree_files[f"a/data/__{i}.blp"] == BLP + stored(rows, 2)


def test_documents(tmp_path: Path) -> None:
    user = {"name": "µ", "none": None, "nested": {"a": [1.5]}}
    write_zarr(tmp_path / "g/a", ramp((9, 6), ">f4"), (4, 6), [BIG, BLOSC], attributes=user)
    write_json(tmp_path / "g/zarr.json", group_document(of="g", inf=float("inf")))
    (tmp_path / "g/README").write_text("kept")
    tree_files = walk(_shown(tmp_path))
    assert json.loads(tree_files["g/a/meta/sizes"]) == {"shape": [9, 6], "nbytes": 216, "cbytes": 216}
    assert json.loads(tree_files["g/a/meta/storage"]) == {
        "dtype": ">f4",
        "cparams": {"clevel": 5, "shuffle": 1, "cname": "lz4", "quantize": 0},
        "chunklen": 4,
        "expectedlen": 9,
        "dflt": 0.0,
    }
    assert json.loads(tree_files["g/a/__attrs__"]) == user
    assert all(
        tree_files[name].isascii() and tree_files[name].endswith(b"\n")
        for name in tree_files
        if "meta" in name or "attrs" in name
    )
    assert json.loads(tree_files["g/__attrs__"]) == {"of": "g", "inf": "Infinity"}
    assert tree_files["g/README"] == b"kept"
    assert not any("zarr" in name for name in tree_files)


@pytest.mark.parametrize(
    ("shape", "chunk", "dtype", "why"),
    [
        (
            (8, 8),
            (4, 4),
            "uint8",
            r"cuts arrays along the first axis only, but an array of \(8, 8\) has chunks of \(4, 4\)",
        ),
        ((), (), "uint8", "has no arrays without axes"),
    ],
)
def test_what_bcolz_has_not_is_refused_when_mounted(
    shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str, why: str, tmp_path: Path
) -> None:
    write_zarr(tmp_path / "g/odd", np.ones(shape, dtype), chunk, [BYTE])
    write_zarr(tmp_path / "g/even", ramp((9,), "uint16"), (4,), [LITTLE])
    with pytest.raises(UnsupportedError, match=rf"^g/odd: cannot be shown as bcolz: bcolz {why}"):
        _shown(tmp_path)
    tree = _shown(tmp_path, skip=True)
    assert [(p.path, p.skipped) for p in tree.problems()] == [("g/odd", True)]
    assert not any(name.startswith("g/odd") for name in walk(tree))


def write_slabs(root: Path, data: Data, thickness: int) -> None:
    """A precomputed volume (z, y, x) in chunks that are cut along z alone."""
    z, y, x = data.shape
    scale = {"key": "slabs", "size": [x, y, z], "chunk_sizes": [[x + 3, y, thickness]]}
    scale |= {"resolution": [1, 1, 1], "encoding": "raw"}
    info = {"data_type": data.dtype.name, "num_channels": 1, "type": "image", "scales": [scale]}
    write_json(root / "info", info)
    starts = range(0, z, thickness)
    names = {a: f"0-{x}_0-{y}_{a}-{min(a + thickness, z)}" for a in starts}
    write_files(root / "slabs", {name: data[a : a + thickness].tobytes() for a, name in names.items()})


def test_slabs_of_a_volume_are_rows(tmp_path: Path) -> None:
    data = ramp((10, 4, 5), "uint16")
    write_slabs(tmp_path, data, 3)
    tree_files = walk(_shown(tmp_path))
    np.testing.assert_array_equal(read(tree_files, "slabs"), data)
    assert tree_files.keys() == {f"slabs/{n}" for n in ("meta/sizes", "meta/storage", "__attrs__")} | {
        f"slabs/data/__{i}.blp" for i in range(4)
    }


def test_no_rows(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", np.zeros((0, 3), "int32"), (4, 3), [LITTLE])
    tree_files = walk(_shown(tmp_path))
    assert tree_files.keys() == {f"a/{n}" for n in ("meta/sizes", "meta/storage", "__attrs__")}
    assert _shown(tmp_path).resolve("a/data").directory


# ------------------------------------------------------------------------------------------------- other layouts


def write_carray(root: Path, data: Data, chunklen: int, *, whole: bool = False, members: Any = None) -> None:
    """An array as bcolz 1.x writes it; `whole` has the last chunk padded."""
    rows = data
    if whole:
        pad = -len(data) % chunklen
        rows = np.concatenate([data, np.zeros((pad, *data.shape[1:]), data.dtype)]).astype(data.dtype)
    sizes = {"shape": list(data.shape), "nbytes": data.nbytes, "cbytes": 0}
    cparams = {"clevel": 5, "shuffle": 1, "cname": "lz4", "quantize": 0}
    storage = {"dtype": data.dtype.str, "cparams": cparams, "chunklen": chunklen, "dflt": 0, **(members or {})}
    write_json(root / "meta/sizes", sizes)
    write_json(root / "meta/storage", storage)
    write_json(root / "__attrs__", {"user": [1]})
    chunks = chunks_of(rows, chunklen, "lz4")
    write_files(root / "data", {f"__{i}.blp": BLP + chunk for i, chunk in enumerate(chunks)})


def _packed(data: Data, chunklen: int, **members: Any) -> bytes:
    told = {"container": "numpy", "dtype": repr(data.dtype.str), "shape": list(data.shape), "order": "C", **members}
    size = chunklen * data[0].nbytes
    chunks = chunks_of(data, chunklen)
    last = size if not len(data) % chunklen else len(data) % chunklen * data[0].nbytes
    return Superchunk(version=3, metadata=json.dumps(told).encode()).write(chunks, (size, last))


def _write(kind: str, path: Path, data: Data, chunklen: int) -> None:
    match kind:
        case "superchunks":
            data_bcolz.write_array(path, data, chunklen, 3, attributes="user: [1]\n")
        case "bloscpack":
            write_files(path.parent, {path.name: _packed(data, chunklen, user=[1])})
        case _:
            write_carray(path, data, chunklen, whole=kind == "whole")


SOURCES = ("superchunks", "bloscpack", "carray", "whole")


@st.composite
def _columns(draw: st.DrawFn) -> tuple[str, Data, int]:
    shape = [draw(st.integers(1, 20)), *draw(st.lists(st.integers(1, 4), max_size=2))]
    dtype = draw(st.sampled_from(("bool", "u1", "i1", "<u2", ">u2", "<i4", ">f4", "<f8")))
    kind = draw(st.sampled_from(SOURCES))
    return kind, (np.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape), draw(st.integers(1, 9))


@given(_columns())
def test_any_array_of_bcolz_is_read_in_other_layouts(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[str, Data, int]
) -> None:
    kind, data, chunklen = written
    path = tmp_path_factory.mktemp("columns")
    _write(kind, path / "source/a.blp", data, chunklen)
    for layout in ("zarr3", "zarr2"):
        tree_files = walk(_shown(path / "source", layout))
        assert not any(
            n.split("/")[-1].endswith((".blp", ".bin")) or "meta/" in n or "attrs__" in n for n in tree_files
        )
        write_files(path / layout, tree_files)
        array = zarr.open_array(str(path / layout / "a.blp"), mode="r")
        assert array.attrs.asdict() == {"user": [1]}
        np.testing.assert_array_equal(np.asarray(array[...]), data)
    write_files(path / "n5", walk(_shown(path / "source", "n5")))
    np.testing.assert_array_equal(_read_n5(path / "n5/a.blp"), data.view("u1") if data.dtype == bool else data)


def _read_n5(path: Path) -> Data:
    import tensorstore as ts

    store = {"driver": "file", "path": f"{path}/"}
    found: Data = ts.open({"driver": "n5", "kvstore": store}).result().read().result()
    return found.T


@pytest.mark.parametrize("kind", SOURCES)
def test_chunks_pass_but_for_the_last(kind: str, tmp_path: Path) -> None:
    data = ramp((10, 3), "uint16")
    _write(kind, tmp_path / "a.blp", data, 4)
    tree_files = walk(_shown(tmp_path, "zarr3"))
    assert [tree_files[f"a.blp/c/{i}/0"] for i in (0, 1)] == chunks_of(
        data, 4, "lz4" if kind in SOURCES[2:] else "blosclz"
    )[:2]
    assert tree_files["a.blp/c/2/0"] == stored(np.pad(data[8:], ((0, 2), (0, 0))).tobytes(), 2)
    assert json.loads(tree_files["a.blp/zarr.json"])["codecs"][-1]["name"] == "blosc"
    assert json.loads(tree_files["a.blp/zarr.json"])["attributes"] == {"user": [1]}


@pytest.mark.parametrize("layout", ["zarr3", "zarr2", "n5"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda chunk: chunk[:10],
        lambda chunk: b"\0" * 16 + chunk[16:],
        lambda chunk: chunk[:-1],
        lambda chunk: chunk[:20] + struct.pack("<I", 2**31) + chunk[24:],
        lambda chunk: chunk[:28] + struct.pack("<I", 2**31) + chunk[32:],
        lambda chunk: BLP + compressed(b"ab" * 7, 2),
    ],
    ids=["short", "magic", "cut", "nbytes", "cbytes", "other"],
)
def test_a_damaged_chunk_harms_nothing_else(layout: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write_carray(tmp_path / "a", ramp((10, 3), "uint16"), 4)
    last = tmp_path / "a/data/__2.blp"
    last.write_bytes(damage(last.read_bytes()))
    tree = _shown(tmp_path, layout)
    names = {"zarr3": ("c/2/0", "c/1/0"), "zarr2": ("2/0", "1/0"), "n5": ("0/2", "0/1")}[layout]
    with pytest.raises(CorruptShardError, match=r"__2\.blp"):
        tree.read(tree.resolve(f"a/{names[0]}").number, 0, 1000)
    assert read_all(tree, tree.resolve(f"a/{names[1]}"))


def test_hostile_sizes_allocate_nothing(tmp_path: Path) -> None:
    write_carray(tmp_path / "a", ramp((10,)), 4, members={"chunklen": 2**62})
    (tmp_path / "a/meta/sizes").write_text(json.dumps({"shape": [2**62 - 1], "nbytes": 0, "cbytes": 0}))
    for layout in ("zarr3", "zarr2", "n5"):
        with suppress(UnsupportedError):
            tree = _shown(tmp_path, layout)
            for e in walk_names(tree):
                with suppress(CorruptShardError, OSError):
                    tree.read(tree.resolve(e).number, 0, 10)


@pytest.mark.parametrize("codec", ["raw", "gzip"])
def test_chunks_are_shown_in_blosc_only(codec: str, tmp_path: Path) -> None:
    write_zarr(tmp_path / "a", ramp((5, 3)), (2, 3), [LITTLE])
    with pytest.raises(UnsupportedError, match=f"Blosc chunks: leave out chunk_codec={codec}"):
        open_tree(str(tmp_path), layout="bcolz", chunk_codec=codec)
    assert walk(open_tree(str(tmp_path), layout="bcolz", chunk_codec="blosc")) == walk(_shown(tmp_path))


def walk_names(tree: Tree) -> list[str]:
    """Every file."""
    return [name for name, _ in sizes(tree, ROOT)]


def test_tables_of_bcolz_are_groups(tmp_path: Path) -> None:
    for name, dtype in (("x", "int32"), ("y", "float64")):
        write_carray(tmp_path / "t" / name, ramp((5,), dtype), 2)
    write_json(tmp_path / "t/__rootdirs__", {"names": ["x", "y"]})
    write_json(tmp_path / "t/__attrs__", {"of": "t"})
    tree_files = walk(_shown(tmp_path, "zarr3"))
    assert json.loads(tree_files["t/zarr.json"])["attributes"] == {"of": "t"}
    assert {"t/x/zarr.json", "t/y/c/2"} <= tree_files.keys()
    assert not any(n.startswith("t/__") for n in tree_files)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"dtype": "object"}, "it holds Python objects"),
        ({"dtype": "|S3"}, "not a number type"),
        ({"dtype": [["x", "<i4"], ["y", "<f8"]]}, "not a number type"),
        ({"chunklen": 0}, "chunklen should be an integer"),
        ({"dtype": None}, "dtype None is unknown"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(members: Any, why: str, tmp_path: Path) -> None:
    write_carray(tmp_path / "g/a", ramp((9,)), 4, members=members)
    with pytest.raises(UnsupportedError, match=rf"^g/a: cannot be shown as zarr3: .*{why}"):
        _shown(tmp_path, "zarr3")


def test_structured_superchunks_and_plain_packs_are_refused(tmp_path: Path) -> None:
    data_bcolz.write_columns(tmp_path / "t", {"x": ramp((9,)), "y": ramp((9,))}, 4, 2, Superchunk())
    with pytest.raises(UnsupportedError, match=r"^t: cannot be shown as zarr3: a structured data type"):
        _shown(tmp_path, "zarr3")
    write_files(tmp_path / "p", {"x.blp": Superchunk(version=3).write([compressed(b"abc"), compressed(b"de")])})
    with pytest.raises(UnsupportedError, match=r"^x.blp: cannot be shown as zarr3: no numpy array"):
        _shown(tmp_path / "p", "zarr3")
