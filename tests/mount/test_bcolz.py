"""Superchunks, bloscpack files and Blosc2 frames through mounts, opened by bcolz and python-blosc2."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_bcolz, data_blosc2
from tests.conftest import run_client
from tests.data_bcolz import Superchunk
from tests.datasets import client_python, read_tree, same
from tests.mount.programs import attempt, run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Mounted
    from tests.datasets import Array

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "bloscpack"


def _read(client: str, python: Path, roots: Mapping[str, Path], scratch: Path, *more: Any) -> dict[str, Array | str]:
    """What one process of a client reads of each tree: an array, or the message of its failure."""
    jobs = [
        {
            "arguments": [str(root), *more],
            "out": str(scratch / f"{n}.npy"),
            "failed": str(scratch / f"{n}.failed"),
        }
        for n, root in enumerate(roots.values())
    ]
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    run_client("read_many", client, scratch / "jobs.json", python=python, timeout=250)
    outcomes: dict[str, Array | str] = {}
    for n, name in enumerate(roots):
        failed = scratch / f"{n}.failed"
        outcomes[name] = failed.read_text() if failed.exists() else np.load(scratch / f"{n}.npy")
    return outcomes


def _different(outcomes: Mapping[str, Array | str], wanted: Mapping[str, Array]) -> dict[str, str]:
    out = {}
    for name, right in wanted.items():
        got = outcomes[name]
        if isinstance(got, str):
            out[name] = got
        elif not same(got, right):
            out[name] = f"{got.dtype}{got.shape} instead of {right.dtype}{right.shape}, or other values"
    return out


# ------------------------------------------------------------------------------------------------ superchunks

_RNG = np.random.default_rng(11)

ARRAYS: dict[str, tuple[Array, int, int, Superchunk, dict[str, Any]]] = {
    # array, rows of a chunk, chunks of a superchunk, how they are written
    "one_axis": (np.arange(1000, dtype="<i4"), 70, 4, Superchunk(), {"attributes": "unit: nm\n"}),
    "whole_chunks": (np.arange(64, dtype="<i8"), 16, 2, Superchunk(checksum=2), {}),
    "tail_of_one": (np.arange(65, dtype="<u2"), 16, 2, Superchunk(checksum=3), {}),
    "one_chunk": (np.arange(5, dtype="u1"), 100, 10, Superchunk(checksum=0), {}),
    "empty": (np.zeros(0, "<f4"), 10, 10, Superchunk(), {}),
    "three_axes": (_RNG.normal(size=(50, 4, 3)), 7, 3, Superchunk(checksum=4, room=20), {"as_json": True}),
    "big_endian": (np.linspace(0, 1, 99).astype(">f8"), 10, 4, Superchunk(checksum=5, slack=33), {}),
    "bool": (_RNG.integers(0, 2, 77).astype("?"), 10, 100, Superchunk(checksum=6, backwards=True), {}),
    "no_offsets": (np.arange(500, dtype="<f4"), 33, 4, Superchunk(checksum=7, offsets=False), {}),
    "unknown_offsets": (np.arange(500), 33, 4, Superchunk(checksum=8, unknown=frozenset((0, 2))), {}),
    "lz4": (_RNG.integers(0, 9, (100, 10), dtype="<i2"), 9, 5, Superchunk(), {"cname": "lz4"}),
    "zstd": (_RNG.integers(0, 9, (100, 10), dtype="<i2"), 9, 5, Superchunk(), {"cname": "zstd"}),
    "text": (np.array([b"a", b"bcd", b""] * 9), 4, 3, Superchunk(), {"as_json": True}),
}

TABLE = {
    "x": np.arange(40, dtype="<i4"),
    "y": {"re": np.linspace(0, 1, 40), "im": np.linspace(1, 2, 40)},
    "flag": np.arange(40) % 3 == 0,
}


def _table() -> Array:
    columns = {"x": TABLE["x"], "y_re": TABLE["y"]["re"], "y_im": TABLE["y"]["im"], "flag": TABLE["flag"]}
    out = np.zeros(40, [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        out[name] = column
    return out


@pytest.fixture(scope="module")
def superchunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """Datasets as the RFC has them, and the values in each."""
    root = tmp_path_factory.mktemp("superchunks")
    wanted = {name: array for name, (array, *_) in ARRAYS.items()}
    for name, (array, rows, per_file, how, more) in ARRAYS.items():
        data_bcolz.write_array(root / name, array, rows, per_file, how, **more)
    data_bcolz.write_columns(root / "table", TABLE, 7, 2, Superchunk(checksum=3, room=2))
    wanted["table"] = _table()
    shutil.copytree(GOLDEN, root / "packs", ignore=shutil.ignore_patterns("*.py", "*.json", "*.npy"))
    for path in GOLDEN.glob("array-*.npy"):
        if path.stem not in ("array-fortran", "array-rows-cut"):  # bcolz has no such arrays
            wanted[f"packs/{path.stem}.blp"] = np.load(path)
    return root, wanted


def test_bcolz_reads_every_variant(
    superchunks: tuple[Path, dict[str, Array]], mounted: Mounted, tmp_path: Path
) -> None:
    root, wanted = superchunks
    python = client_python("bcolz")
    with mounted(root) as mount:
        outcomes = _read("read_bcolz", python, {name: mount / name for name in wanted}, tmp_path)
        attributes = _read("read_bcolz", python, {"one_axis": mount / "one_axis"}, tmp_path, '{"unit": "nm"}')
    assert _different({**outcomes, "again": attributes["one_axis"]}, {**wanted, "again": wanted["one_axis"]}) == {}


def test_a_copy_is_a_dataset_of_bcolz(
    superchunks: tuple[Path, dict[str, Array]], mounted: Mounted, tmp_path: Path
) -> None:
    """And a mount of the copy shows what is in the copy."""
    root, wanted = superchunks
    with mounted(root) as mount:
        run("cp", "-r", mount, tmp_path / "copy")
    outcomes = _read("read_bcolz", client_python("bcolz"), {n: tmp_path / "copy" / n for n in wanted}, tmp_path)
    assert _different(outcomes, wanted) == {}
    # Superchunks are none any more; what bcolz writes is shown as it is.
    data_bcolz.write_array(tmp_path / "copy/sharded", np.arange(9), 2, 2)
    with mounted(tmp_path / "copy") as mount:
        copied = read_tree(tmp_path / "copy")
        tree_files = read_tree(mount)
    assert {n: d for n, d in tree_files.items() if not n.startswith("sharded/")} == {
        n: d for n, d in copied.items() if not n.startswith("sharded/")
    }


@pytest.mark.parametrize("how", [Superchunk(), Superchunk(version=3, checksum=2, metadata=b"{}", room=9)])
def test_bcolz_reads_its_own_documents_beside_superchunks(how: Superchunk, mounted: Mounted, tmp_path: Path) -> None:
    """As for the RFC's words, in version 2 and as bloscpack writes files (3); the documents are shown as they were."""
    python, names = client_python("bcolz"), ("meta/sizes", "meta/storage", "__attrs__")
    arrays = {"a": np.arange(50, dtype=">i4"), "b": _RNG.normal(size=(23, 4))}
    before = {}
    (tmp_path / "source").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        path = tmp_path / "source" / name
        run(python, "-W", "ignore", "-c", data_bcolz.WRITE_1X, tmp_path / f"{name}.npy", path, "8")
        before[name] = {document: json.loads((path / document).read_text()) for document in names}
        before[name]["meta/storage"]["expectedlen"] = len(array)  # the number of rows, in whatever form
        data_bcolz.pack_1x(path, 3, how)
    with mounted(tmp_path / "source") as mount:
        roots = {name: mount / name for name in arrays}
        outcomes = _read("read_bcolz", python, roots, tmp_path, '{"unit": "nm"}')
        documents = {n: {d: json.loads((root / d).read_text()) for d in names} for n, root in roots.items()}
        assert sorted(os.listdir(mount / "b/data")) == ["__0.blp", "__1.blp", "__2.blp"]
    assert _different(outcomes, arrays) == {}
    assert documents == before


def test_blosc_decodes_the_chunks_of_a_pack_without_an_array(
    superchunks: tuple[Path, dict[str, Array]], mounted: Mounted, tmp_path: Path
) -> None:
    root, _ = superchunks
    program = (
        "import sys, blosc; sys.stdout.buffer.write(b''.join("
        "blosc.decompress(open(name, 'rb').read()[16:]) for name in sys.argv[1:]))"
    )
    with mounted(root) as mount:
        for path in sorted(GOLDEN.glob("plain-*.blp")):
            names = [str(mount / "packs" / path.name / f"data/__{i}.blp") for i in range(5)]
            out = tmp_path / "out"
            completed = attempt("sh", "-c", 'out=$1; shift; exec "$@" > "$out"', "sh", out, client_python("bcolz"),
                                "-c", program, *names)  # fmt: skip
            assert completed.returncode == 0, completed.stderr
            assert out.read_bytes() == bytes(i % 256 for i in range(400))


@pytest.mark.parametrize("options", [(), ("--rw",)])
@pytest.mark.parametrize("layout", ["native", "zarr2"])
def test_readers_get_an_error_for_a_lost_superchunk(
    layout: str, options: tuple[str, ...], mounted: Mounted, tmp_path: Path
) -> None:
    """A reader of Zarr would take a file that does not exist for a chunk of fill values."""
    source, client = tmp_path / "source", {"native": "bcolz", "zarr2": "zarr2"}[layout]
    python = client_python("bcolz" if layout == "native" else "zarr2")
    data = np.arange(1, 1001, dtype="<i4")
    for name in ("whole", "lost"):
        data_bcolz.write_array(source / name, data, 64, 4)
    (source / "lost/data/__2__.bin").unlink()
    if options:
        options = (*options, "-o", f"journal={tmp_path / 'journal'}")
    with mounted(source, "--layout", layout, *options) as mount:
        arrays = {name: mount / name for name in ("whole", "lost")}
        more = [""] if layout == "zarr2" else []
        outcomes = _read(f"read_{client}", python, arrays, tmp_path, *more)
        names = "lost/data/__{}.blp" if layout == "native" else "lost/{}"
        errors = {i for i in range(16) if _error_of(mount / names.format(i)) == errno.EIO}
        listed = {path.name for path in (mount / names).parent.iterdir()}
        log = (mount / ".shardfs/log").read_text()
    assert _different(outcomes, {"whole": data}) == {}
    assert isinstance(outcomes["lost"], str)
    assert errors == {4, 5, 6, 7}
    assert {Path(names.format(i)).name for i in range(16)} <= listed
    assert "lost/data/__2__.bin: is missing, but arrays of this format have no absent chunks" in log


def _error_of(path: Path) -> int:
    try:
        path.read_bytes()
    except OSError as e:
        return e.errno or 0
    return 0


# ----------------------------------------------------------------------------------------------------- Blosc2


def test_blosc2_reads_every_variant(mounted: Mounted, tmp_path: Path) -> None:
    root = tmp_path / "frames"
    root.mkdir()
    for name, write in data_blosc2.WRITERS.items():
        write(root / name, True)
    python = Path(sys.executable)
    (tmp_path / "stored").mkdir()
    wanted = _read("read_blosc2", python, {name: root / name for name in data_blosc2.WRITERS}, tmp_path / "stored")
    arrays = {name: array for name, array in wanted.items() if not isinstance(array, str)}
    assert arrays.keys() == wanted.keys()
    (tmp_path / "shown").mkdir()
    with mounted(root) as mount:
        for name in data_blosc2.WRITERS:
            assert (mount / name).is_dir()
        outcomes = _read("read_blosc2", python, {name: mount / name for name in wanted}, tmp_path / "shown")
        told = _read(
            "read_blosc2",
            python,
            {"changed": mount / "changed.b2frame"},
            tmp_path / "shown",
            {"steps": list(range(1000))},
        )
        assert sorted(p.name for p in (mount / "zeros.b2nd").iterdir()) == ["chunks.b2frame"]
    assert _different({**outcomes, **told}, {**arrays, "changed": arrays["changed.b2frame"]}) == {}
