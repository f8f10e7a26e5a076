"""Documents of superchunks as bcolz writes them on a mount, and what becomes of the source's."""

from __future__ import annotations

import errno
import json
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.formats.bcolz import BCOLZ
from shardfs.formats.create_rules import Rule
from shardfs.model.errors import CorruptShardError
from tests import data_bcolz
from tests.conftest import need_fuse
from tests.datasets import ROOT, client_python
from tests.write.engines import mounted
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

DATA = np.arange(50, dtype="int32")
SIZES, STORAGE, ATTRS, ATTRIBUTES = "meta/sizes", "meta/storage", "__attrs__", "meta/attributes"


def stored(path: Path, *, as_json: bool, attributes: str = "") -> dict[str, bytes]:
    data_bcolz.write_array(path, DATA, 8, 3, as_json=as_json, attributes=attributes or None)
    return {name: (path / name).read_bytes() for name in (SIZES, STORAGE, ATTRIBUTES) if (path / name).exists()}


def shown(documents: dict[str, bytes]) -> dict[str, Any]:
    dataset = BCOLZ.open("a", documents)
    assert dataset is not None
    assert dataset.collections
    return {name: json.loads(raw) for name, raw in dataset.documents.items()}


def edited(documents: dict[str, bytes], name: str, new: Any) -> dict[str, bytes]:
    return dict(BCOLZ.edit("a", documents, name, json.dumps(new).encode()))


@pytest.mark.parametrize("as_json", [False, True])
def test_an_array_grows(tmp_path: Path, as_json: bool) -> None:
    source = stored(tmp_path, as_json=as_json)
    before = shown(source)
    new = before[SIZES] | {"shape": [75], "nbytes": 300, "cbytes": 123}
    new_documents = edited(source, SIZES, new)
    assert shown(source | new_documents) == before | {SIZES: new, STORAGE: before[STORAGE] | {"expectedlen": 75}}
    if as_json:
        assert list(json.loads(new_documents[SIZES])) == list(json.loads(source[SIZES]))
    assert edited(source, SIZES, before[SIZES] | {"cbytes": 1}) == {}
    for name in (SIZES, STORAGE, ATTRS):
        assert edited(source, name, before[name]) == {}
    assert edited(source, STORAGE, before[STORAGE] | {"expectedlen": 99}) == {}


def test_attributes_that_did_not_change_keep_their_types(tmp_path: Path) -> None:
    source = stored(tmp_path, as_json=False, attributes="a: {value: 1, type: int}\nb: {value: x}\nc: [1]\n")
    assert shown(source)[ATTRS] == {"a": 1, "b": "x", "c": [1]}
    new_documents = edited(source, ATTRS, {"a": 1, "b": "y", "d": {"e": 1.5}})
    assert json.loads(new_documents[ATTRIBUTES]) == {"a": {"value": 1, "type": "int"}, "b": "y", "d": {"e": 1.5}}
    assert shown(source | new_documents)[ATTRS] == {"a": 1, "b": "y", "d": {"e": 1.5}}
    assert json.loads(edited(stored(tmp_path / "x", as_json=True), ATTRS, {"a": 1})[ATTRIBUTES]) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "members", "why"),
    [
        (SIZES, {"shape": [50, 2]}, "the shape of a row"),
        (SIZES, {"shape": "x"}, "shape should be a list"),
        (STORAGE, {"chunklen": 4}, "chunklen"),
        (STORAGE, {"dtype": "int64"}, "dtype"),
    ],
)
def test_what_contradicts_the_chunks_is_refused(tmp_path: Path, name: str, members: Any, why: str) -> None:
    source = stored(tmp_path, as_json=False)
    with pytest.raises(ValueError, match=why):
        edited(source, name, shown(source)[name] | members)
    with pytest.raises(ValueError, match=name):
        BCOLZ.edit("a", source, name, b"{")


def test_tables_keep_their_rows(tmp_path: Path) -> None:
    columns = {"x": DATA, "y": DATA.astype("float64")}
    data_bcolz.write_columns(tmp_path, columns, 8, 3, data_bcolz.Superchunk())
    source = {name: (tmp_path / name).read_bytes() for name in (SIZES, STORAGE)}
    with pytest.raises(ValueError, match="keeps its rows"):
        edited(source, SIZES, shown(source)[SIZES] | {"shape": [51]})


def test_arrays_of_bcolz_are_their_writers() -> None:
    assert BCOLZ.edit("a", {}, SIZES, b"?") == {SIZES: b"?"}
    assert BCOLZ.shard("a", SIZES, b"{}", Rule("zarr3")) is None
    assert BCOLZ.sharding({}) is None
    assert [BCOLZ.chunk_like(n) for n in ("data/__0.blp", "a/data/__12.blp", "data/__01.blp", "x.blp")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("described_by", ["the RFC", "bcolz 1.x"])
def test_bcolz_lengthens_an_array_on_a_mount(tmp_path: Path, described_by: str) -> None:
    need_fuse()
    source, python = tmp_path / "source", str(client_python("bcolz"))
    attributes: dict[str, Any] = {"k": {"a": [1.5]}}
    if described_by == "the RFC":
        stored(source / "a", as_json=False)
    else:
        np.save(tmp_path / "data.npy", DATA)
        source.mkdir()
        attributes["unit"] = "nm"
        write = [python, "-W", "ignore", "-c", data_bcolz.WRITE_1X, str(tmp_path / "data.npy"), str(source / "a"), "8"]
        subprocess.run(write, check=True, timeout=250)
        data_bcolz.pack_1x(source / "a", 3, data_bcolz.Superchunk())
    with writable(source, tmp_path) as mount:
        mount.mount()
        command = [python, "-W", "ignore", "-m", "tests.clients.edit_bcolz", str(mount.path / "a")]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert run.returncode == 0, run.stderr
        assert mount.umount().returncode == 0
        mount.mount()
        out = tmp_path / "out.npy"
        read = [python, "-m", "tests.clients.read_bcolz", str(mount.path / "a"), str(out), "--attributes"]
        run = subprocess.run(
            [*read, json.dumps(attributes)], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
        )
        assert mount.umount().returncode == 0
    assert run.returncode == 0, run.stderr
    wanted = np.concatenate([DATA, np.arange(100, 125, dtype="int32")])
    wanted[3:5] = 7
    np.testing.assert_array_equal(np.load(out), wanted)
    assert sorted(p.name for p in (source / "a" / "data").iterdir()) == [f"__{k}__.bin" for k in (1, 2, 3, 4)]
    assert (source / "a" / ATTRIBUTES).exists() == (described_by == "the RFC")


def test_shapes_of_chunks_that_contradict(tmp_path: Path) -> None:
    source = stored(tmp_path, as_json=True)
    storage = json.loads(source[STORAGE])
    dataset = BCOLZ.open("a", {**source, STORAGE: json.dumps({**storage, "chunklen": 9}).encode()})
    assert dataset is not None
    assert [p.why for p in dataset.problems] == [
        "chunkshape is (8,), but chunklen 9: remove one of them from meta/storage"
    ]
    assert shown({**source, STORAGE: json.dumps({**storage, "chunklen": 8}).encode()}) == shown(source)


# ---- superchunks that do not exist


APPEND = """
import bcolz, numpy, sys
array = bcolz.open(sys.argv[1], mode="a")
array.append(numpy.arange(50, 90, dtype="int32"))
array.flush()
"""


@pytest.mark.fuse
@pytest.mark.interop
def test_an_append_makes_superchunks_beside_a_lost_one(tmp_path: Path) -> None:
    need_fuse()
    source, python = tmp_path / "source", str(client_python("bcolz"))
    stored(source / "a", as_json=False)
    (source / "a/data/__1__.bin").unlink()
    with writable(source, tmp_path) as mount:
        mount.mount()
        subprocess.run([python, "-W", "ignore", "-c", APPEND, str(mount.path / "a")], check=True, timeout=250)
        chunks = [mount.path / f"a/data/__{i}.blp" for i in range(12)]
        assert [i for i, chunk in enumerate(chunks) if is_unreadable(chunk)] == [0, 1, 2]
        assert mount.umount().returncode == 0
    assert sorted(p.name for p in (source / "a/data").iterdir()) == [f"__{k}__.bin" for k in (2, 3, 4)]
    values = b"".join(data_bcolz.decoded(source / f"a/data/__{k}__.bin") for k in (2, 3, 4))
    assert values == np.arange(24, 90, dtype="int32").tobytes()


def is_unreadable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError as e:
        return e.errno == errno.EIO
    return False


def test_chunks_that_a_program_removed_are_absent(tmp_path: Path) -> None:
    """Also if the document is written later, as by `rm -r`."""
    source = tmp_path / "source"
    stored(source, as_json=True)
    with mounted(source, tmp_path / "journal") as files:
        files.unlink("data/__6.blp")
        files.publish()
        assert not (source / "data/__3__.bin").exists()
        assert files.read("data/__6.blp") is None
        names = {n for b in files.tree.scan(files.tree.resolve("data").number) for n in b.names.tolist()}
        assert names == {b"__%d.blp" % i for i in range(6)}
    with mounted(source, tmp_path / "journal") as files, pytest.raises(CorruptShardError, match="is missing"):
        files.read("data/__6.blp")


@pytest.mark.fuse
@pytest.mark.interop
def test_an_array_grows_by_a_layout_before_it_has_the_chunks(tmp_path: Path) -> None:
    """zarr 2 writes the length first, and reads a chunk that it changes in part."""
    need_fuse()
    source = tmp_path / "source"
    stored(source / "a", as_json=True)
    program = (
        "import sys, zarr; a = zarr.open_array(sys.argv[1], mode='r+'); a.resize(100);"
        "a[60:90] = 7; a[56:60] = 8; a[50:56] = 9; a[90:100] = 1"
    )
    with writable(source, tmp_path, "--layout", "zarr2") as mount:
        mount.mount()
        subprocess.run([str(client_python("zarr2")), "-c", program, str(mount.path / "a")], check=True, timeout=250)
        assert mount.umount().returncode == 0
    values = b"".join(data_bcolz.decoded(source / f"a/data/__{k}__.bin") for k in range(1, 6))
    wanted = np.concatenate([DATA, [9] * 6, [8] * 4, [7] * 30, [1] * 10]).astype("int32")
    assert np.frombuffer(values, "int32")[:100].tolist() == wanted.tolist()
