"""Mounts of what web servers serve: with listings, without them, with one page for all; with and without ranges."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.conftest import MountFailed, run_client
from tests.mount.programs import attempt
from tests.mount.web_servers import KINDS, Kind, find, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Mounted

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

NAMES = (
    "a b.txt", "a+b.txt", "a&b.txt", "&amp;.txt", "q?.txt", "h#.txt", "ü-日本.txt", "<x>.txt", "it's.txt", 'q"q.txt',
    "semi;colon", "back\\slash", "c:d.txt", "[br].txt", "%41.txt", "100%.txt", "page.html", "~t", "dir.d/in it",
    "100%+ dir/f",
)  # fmt: skip
NOT_UTF8 = "\udcff.bin"
ARRAYS = ("a", "b/c", "b/deep/d", "x y+z%20&é")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that servers can read whose user is not ours, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture(scope="module")
def source(place: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    root = place / "source"
    group = zarr.open_group(str(root), mode="w")
    for name in ARRAYS:
        array = group.create_array(name, shape=(8, 8), chunks=(4, 4), shards=(8, 8), dtype="uint8", compressors=None)
        array[:] = np.arange(64).reshape(8, 8)
    group.create_array("sparse", shape=(8, 8), chunks=(4, 4), shards=(8, 8), dtype="uint8", compressors=None)
    for name in (*NAMES, NOT_UTF8):
        path = root / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"<a href='other'>" + os.fsencode(name))
    (root / "README.md").write_text("hello")
    _open_to_all(root)
    return root


@pytest.fixture
def scratch(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def _open_to_all(root: Path) -> None:
    subprocess.run(["chmod", "-R", "a+rX", str(root)], check=True)


Entries = dict[str, str | int | None]


def look_up(mount: Path, paths: list[str], *, walk: bool) -> tuple[Entries, list[str]]:
    entries, walked = json.loads(run_client("look_up", mount, "walk" if walk else "-", json.dumps(paths)).stdout)
    return {path: entries[path] for path in sorted(entries)}, walked


@pytest.fixture(scope="module")
def trees() -> list[tuple[Entries, list[str]]]:
    return []


@pytest.fixture
def tree(source: Path, mounted: Mounted, trees: list[tuple[Entries, list[str]]]) -> tuple[Entries, list[str]]:
    """What a mount of the directory itself shows, which is not served."""
    if not trees:
        with mounted(source) as mount:
            _, walked = look_up(mount, [], walk=True)
            trees.append(look_up(mount, walked, walk=True))
    return trees[0]


@pytest.mark.parametrize("name", KINDS)
def test_the_tree_is_the_same_whatever_is_looked_up_first(
    name: str, source: Path, tree: tuple[Entries, list[str]], scratch: Path, mounted: Mounted
) -> None:
    kind = KINDS[name]
    if find(kind.program) is None:
        pytest.skip(f"no {kind.program}")
    wanted = {path: entry for path, entry in tree[0].items() if not (kind.utf8 and path.endswith(NOT_UTF8))}
    if not kind.knows:  # of directories without documents
        wanted = {path: entry for path, entry in wanted.items() if not path.startswith("notes")}
    names = ("missing", "b/missing", "b/c/missing", "b/missing/x", "sparse/c/0/1")
    missing = dict.fromkeys(names, errno.ENOENT)
    with serving(kind, source, scratch) as url:
        for seed in range(10 if name == "python-no-redirects" else 3):
            order = [*wanted, *missing]
            random.Random(seed).shuffle(order)
            with mounted(url) as mount:
                entries, walked = look_up(mount, ["README.md", *order], walk=kind.lists)
            assert entries == dict(sorted({**wanted, **missing}.items())), seed
            if kind.lists and not kind.utf8:
                assert walked == tree[1], seed
            elif kind.lists:
                assert {path for path in walked if not path.endswith(".bin")} == wanted.keys(), seed


# ---- byte ranges


@pytest.mark.parametrize("handler", ["Whole", "Unsatisfiable"])
def test_a_server_without_ranges_is_refused_at_once(
    handler: str, source: Path, scratch: Path, mounted: Mounted
) -> None:
    with serving(Kind("python", (handler,)), source, scratch) as url:
        with pytest.raises(MountFailed) as failed, mounted(f"{url}/a"):
            pass
        answer = "416" if handler == "Unsatisfiable" else "200 OK"
        for words in (f"{url}/a/c/0/0", "does not send byte ranges", answer, "nginx"):
            assert words in str(failed.value)
        for verb in (["ls", f"{url}/a"], ["cat", f"{url}/a", "c/0/0"], ["info", f"{url}/a"], ["verify", f"{url}/a"]):
            run = attempt(sys.executable, "-m", "shardfs", *verb)
            assert (run.returncode, run.stdout) == (3, ""), (verb, run)
            assert "does not send byte ranges" in run.stderr


def test_an_archive_on_a_server_without_ranges(source: Path, scratch: Path) -> None:
    """The message names a source that works."""
    root = scratch / "root"
    root.mkdir()
    shutil.make_archive(str(root / "a"), "zip", source / "a")
    with serving(Kind("python", ("Whole",)), root, scratch) as url:
        refused = attempt(sys.executable, "-m", "shardfs", "cat", f"zip::{url}/a.zip", "c/0/0")
        better = f"zip::simplecache::{url}/a.zip"
        assert refused.returncode == 3
        assert "does not send byte ranges" in refused.stderr
        assert better in refused.stderr
        completed = attempt(sys.executable, "-m", "shardfs", "info", better)
        assert (completed.returncode, "zarr3" in completed.stdout) == (0, True), completed


def test_only_documents_without_ranges(
    source: Path, tree: tuple[Entries, list[str]], scratch: Path, mounted: Mounted
) -> None:
    """Shards decide: documents may be made by a program."""
    with serving(Kind("python", ("MadeDocuments",)), source, scratch) as url, mounted(url) as mount:
        assert look_up(mount, ["README.md"], walk=True)[1] == tree[1]
        assert look_up(mount, ["b/c/c/1/1"], walk=False)[0] == {"b/c/c/1/1": tree[0]["b/c/c/1/1"]}


def test_unsharded_chunks_without_ranges(scratch: Path, mounted: Mounted) -> None:
    """They are read as a whole; the log says what is not possible."""
    zarr = pytest.importorskip("zarr")
    root = scratch / "root"
    data = np.random.default_rng(0).integers(0, 255, (2, 12 << 20), np.uint8)  # more than is read at a time
    array = zarr.create_array(str(root), shape=data.shape, chunks=(1, 12 << 20), dtype="uint8", compressors=None)
    array[:] = data
    (root / "large").write_bytes(bytes(40 << 20))
    with (
        serving(Kind("python", ("Whole",)), root, scratch) as url,
        mounted(url, "-o", "layout=zarr2,store_retries=0") as mount,
    ):
        assert "does not send byte ranges" in (mount / ".shardfs/log").read_text()
        for number in (0, 1):
            assert (mount / f"{number}/0").read_bytes() == data[number].tobytes()
        failed = attempt("tail", "-c", "1", mount / "large")
        assert os.strerror(errno.EIO) in failed.stderr
        assert (mount / ".shardfs/log").read_text().count("200 OK with the whole object") == 1


@pytest.fixture
def large(scratch: Path) -> tuple[Path, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """A shard so large that no chunk at its end is cut out of it as a whole."""
    zarr = pytest.importorskip("zarr")
    data = np.random.default_rng(0).integers(0, 255, 24 << 20, np.uint8)
    root = scratch / "root"
    options = {"chunks": (1 << 20,), "shards": data.shape, "dtype": "uint8", "compressors": None}
    zarr.create_array(str(root), shape=data.shape, **options)[:] = data
    return root, data


def test_a_server_that_ignores_ranges_sometimes(
    large: tuple[Path, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]], scratch: Path, mounted: Mounted
) -> None:
    """It is asked again. If that does not help, the error is in the log, once."""
    root, data = large
    with (
        serving(Kind("python", ("SometimesWhole",)), root, scratch) as url,
        mounted(url, "-o", "store_retries=2") as mount,
    ):
        for number in (20, 21, 22):
            assert (mount / f"c/{number}").read_bytes() == data.reshape(24, -1)[number].tobytes()
        assert "byte range" not in (mount / ".shardfs/log").read_text()
        (scratch / "broken").touch()
        for _ in range(3):
            failed = attempt("cat", mount / "c/23")
            assert (failed.stdout, os.strerror(errno.EIO) in failed.stderr) == ("", True)
        log = (mount / ".shardfs/log").read_text()
        assert log.count("does not send byte ranges (it answers 200 OK with the whole object)") == 1
        (scratch / "broken").unlink()
        assert (mount / "c/23").read_bytes() == data.reshape(24, -1)[23].tobytes()
