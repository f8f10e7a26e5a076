"""Another program creates an array anew, in another form, while a mount shows it and has chunks to publish."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from shardfs.model.errors import StaleShardError
from shardfs.vfs import chunk_trees
from shardfs.vfs.tree import open_tree
from shardfs.write import recover
from tests.write import engines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.engines import TreeFiles

pytestmark = pytest.mark.interop

LITTLE, BIG = ({"name": "bytes", "configuration": {"endian": endian}} for endian in ("little", "big"))
CRC = {"name": "crc32c"}
GZIP = {"name": "gzip", "configuration": {"level": 5}}

FORMS: dict[str, tuple[list[Any], list[Any], str]] = {
    "former": ([LITTLE], [LITTLE], "end"),
    "endianness": ([BIG], [LITTLE], "end"),
    "codecs": ([LITTLE, GZIP], [LITTLE], "end"),
    "index_codecs": ([LITTLE], [LITTLE, CRC], "end"),
    "index_endianness": ([LITTLE], [BIG], "end"),
    "index_location": ([LITTLE], [LITTLE], "start"),
}
"""Codecs of chunks and of indices, and where an index is."""

CHANGES = [name for name in FORMS if name != "former"]
LAYOUTS = ["native", "zarr2", "n5"]
DOCUMENTS = {"native": "zarr.json", "zarr2": ".zarray", "n5": "attributes.json"}
PATHS = {"native": "c/{}", "zarr2": "{}", "n5": "{}"}


def spec(path: Path, form: str, chunk: int = 2) -> dict[str, Any]:
    codecs, index, location = FORMS[form]
    sharding = {"chunk_shape": [chunk], "codecs": codecs, "index_codecs": index, "index_location": location}
    metadata = {
        "shape": [8],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}


def create(path: Path, form: str, values: list[int] | None = None, chunk: int = 2) -> None:
    """The array anew, as tensorstore creates it."""
    shutil.rmtree(path, ignore_errors=True)
    array = ts.open(spec(path, form, chunk), create=True).result()
    if values is not None:
        array.write(np.array(values, np.uint16)).result()


def natively(path: Path) -> list[int]:
    array_values = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()
    values: list[int] = array_values.read().result().tolist()
    return values


def chunk(layout: str, *values: int) -> bytes:
    """A chunk of the former array, as clients of the layout write it."""
    if layout == "n5":
        return bytes([0, 0, 0, 1, 0, 0, 0, len(values)]) + np.array(values, ">u2").tobytes()
    return np.array(values, "<u2").tobytes()


@contextmanager
def place(tmp_path: Path, layout: str, values: list[int] | None) -> Iterator[TreeFiles]:
    create(tmp_path / "store/a", "former", values)
    (tmp_path / "store/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with engines.mounted(tmp_path / "store", tmp_path / "journal", layout) as files:
        yield files


def refused(files: TreeFiles) -> str:
    with pytest.raises(OSError, match="another program") as caught:
        files.publish()
    assert caught.value.errno == errno.ESTALE
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_program_that_reads_the_document_gets_the_new_chunks(change: str, layout: str, tmp_path: Path) -> None:
    """The document of a layout need not show the difference."""
    with place(tmp_path, layout, list(range(8))) as files:
        document, name = f"a/{DOCUMENTS[layout]}", "a/" + PATHS[layout].format(0)
        reopen(files, document)
        former = files.tree.resolve(name).number
        assert files.read(name) == chunk(layout, 0, 1)
        files.write("a/" + PATHS[layout].format(1), chunk(layout, 200, 201))
        create(tmp_path / "store/a", change, list(range(10, 18)))
        reopen(files, document)
        with mounted_anew(tmp_path / "store", layout) as tree:
            wanted = [bytes(tree.read(tree.resolve(n).number, 0, 99)) for n in (name, "a/" + PATHS[layout].format(1))]
        assert [files.read(name), files.read("a/" + PATHS[layout].format(1))] == wanted
        assert files.tree.resolve(name).number != former
        with suppress(StaleShardError):  # unless the chunk is in memory
            assert bytes(files.tree.read(former, 0, 99)) == chunk(layout, 0, 1)
        with pytest.raises(OSError, match="Stale") as caught:
            files.tree.open(former, 0)
        assert caught.value.errno == errno.ESTALE
        refused(files)
        files.write(name, wanted[1])
        files.tree.pending.drain("")
        assert natively(tmp_path / "store/a") == [12, 13, *range(12, 18)]


def reopen(files: TreeFiles, path: str) -> None:
    """As a program that opens a file; it opens it again if it is stale, as the kernel does."""
    for _ in range(2):
        with suppress(OSError):
            files.tree.release(files.tree.open(files.tree.resolve(path).number, 0))
            return
    raise AssertionError(path)


@contextmanager
def mounted_anew(store: Path, layout: str) -> Iterator[Any]:
    yield open_tree(str(store), layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_a_program_writes_meanwhile_is_a_conflict(layout: str, tmp_path: Path) -> None:
    """It has opened the file before, and writes it as the former document says."""
    name = "a/" + PATHS[layout].format(0)
    with place(tmp_path, layout, list(range(8))) as files:
        reopen(files, f"a/{DOCUMENTS[layout]}")
        parent, last = files._parent(name)
        _, handle = files.tree.create(parent, last, 0o1002, 0o644)
        files.tree.write(handle, 0, chunk(layout, 200, 201))
        create(tmp_path / "store/a", "endianness", list(range(10, 18)))
        reopen(files, f"a/{DOCUMENTS[layout]}")
        files.tree.flush(handle)
        files.tree.release(handle)
        refused(files)
        assert natively(tmp_path / "store/a") == list(range(10, 18))


def test_other_members_of_the_document_are_no_conflict(tmp_path: Path) -> None:
    """Nor is another spelling of the codecs, or another shape."""
    with place(tmp_path, "native", list(range(8))) as files:
        files.write("a/c/0", chunk("native", 200, 201))
        path = tmp_path / "store/a/zarr.json"
        document = json.loads(path.read_text())
        document |= {"attributes": {"x": 1}, "shape": [12]}
        document["codecs"][0]["configuration"] |= {"index_location": "end"}
        path.write_text(json.dumps(document))
        files.publish()
    assert natively(tmp_path / "store/a") == [200, 201, *range(2, 8), 0, 0, 0, 0]


@contextmanager
def two_arrays(tmp_path: Path) -> Iterator[TreeFiles]:
    """Pending chunks of the arrays `a` and `b`, whose documents another program has changed."""
    for name in "ab":
        create(tmp_path / "store" / name, "former", list(range(8)))
    with engines.mounted(tmp_path / "store", tmp_path / "journal") as files:
        for name in "ab":
            files.write(f"{name}/c/0", chunk("native", 200, 201))
            path = tmp_path / "store" / name / "zarr.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"attributes": {"x": 1}}))
        yield files


def test_a_document_that_cannot_be_read_stops_no_other_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, released = threading.Event(), threading.Event()
    with two_arrays(tmp_path) as files, ThreadPoolExecutor() as threads:
        documents = files.tree.source_tree.store.documents

        def hangs(directory: str, *args: Any) -> dict[str, bytes]:
            if directory == "a":
                hanging.set()
                assert released.wait(60)
            return documents(directory, *args)

        monkeypatch.setattr(files.tree.source_tree.store, "documents", hangs)
        first = threads.submit(files.tree.pending.drain, "a")
        try:
            assert hanging.wait(60)
            files.tree.pending.drain("b", 30)
            reopen(files, "b/zarr.json")
            files.unlink("b/zarr.json")
            assert not first.done()
        finally:
            released.set()
        first.result(60)
    assert natively(tmp_path / "store/a") == [200, 201, *range(2, 8)]


def test_a_document_that_cannot_be_removed_stops_no_other_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, released = threading.Event(), threading.Event()
    with two_arrays(tmp_path) as files, ThreadPoolExecutor() as threads:
        reopen(files, "a/zarr.json")
        update = files.tree.writer.update

        def hangs(key: str, *args: Any, **options: Any) -> Any:
            if key == "a/zarr.json":
                hanging.set()
                assert released.wait(60)
            return update(key, *args, **options)

        monkeypatch.setattr(files.tree.writer, "update", hangs)
        first = threads.submit(files.unlink, "a/zarr.json")
        try:
            assert hanging.wait(60)
            files.tree.pending.drain("b", 30)
            assert not first.done()
        finally:
            released.set()
        first.result(60)
    assert natively(tmp_path / "store/b") == [200, 201, *range(2, 8)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_whose_document_this_mount_has_removed_keeps_its_form(layout: str, tmp_path: Path) -> None:
    """`cp` writes chunks before the document, and other programs remove the document before the chunks."""
    names = [PATHS[layout].format(i) for i in range(3)]
    with place(tmp_path, layout, list(range(8))) as files:
        view = files.read(f"a/{DOCUMENTS[layout]}")
        assert view is not None
        files.write(f"a/{names[0]}", chunk(layout, 200, 201))
        files.unlink(f"a/{DOCUMENTS[layout]}")
        files.write(f"a/{names[1]}", chunk(layout, 202, 203))
        files.publish()
        files.write(f"a/{names[2]}", chunk(layout, 204, 205))
        files.write(f"a/{DOCUMENTS[layout]}", view)
        files.publish()
    assert natively(tmp_path / "store/a") == [*range(200, 206), 6, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_program_creates_an_array_whose_document_this_mount_has_removed(layout: str, tmp_path: Path) -> None:
    with place(tmp_path, layout, list(range(8))) as files:
        files.unlink(f"a/{DOCUMENTS[layout]}")
        files.write("a/" + PATHS[layout].format(0), chunk(layout, 200, 201))
        create(tmp_path / "store/a", "codecs", list(range(10, 18)))
        refused(files)
    assert natively(tmp_path / "store/a") == list(range(10, 18))


def test_a_version_chosen_before_the_array_was_created_anew_is_not_published(tmp_path: Path) -> None:
    with place(tmp_path, "native", list(range(8))) as files:
        files.write("a/c/0", chunk("native", 200, 201))
        files.die()
    create(tmp_path / "store/a", "former", list(range(20, 28)))
    with engines.mounted(tmp_path / "store", tmp_path / "journal", "native") as files:
        with pytest.raises(OSError, match="stored chunk was changed"):
            files.publish()
        files.die()
    recover.decide(tmp_path / "journal", ours=["."])
    create(tmp_path / "store/a", "codecs", list(range(10, 18)))
    with engines.mounted(tmp_path / "store", tmp_path / "journal", "native") as files:
        refused(files)
    assert natively(tmp_path / "store/a") == list(range(10, 18))


def test_a_tree_that_is_only_read_shows_an_array_with_other_chunks(tmp_path: Path) -> None:
    create(tmp_path / "a", "former", list(range(8)))
    tree = open_tree(str(tmp_path / "a"), index_ttl_s=0)
    assert tree.resolve("c/0").size == 4
    create(tmp_path / "a", "former", list(range(10, 18)), chunk=4)
    assert bytes(tree.read(tree.resolve("c/1").number, 0, 99)) == np.arange(14, 18, dtype="<u2").tobytes()
    with pytest.raises(FileNotFoundError):
        tree.resolve("c/2")


def test_resized_arrays_leave_few_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of earlier shapes stay valid, within a limit."""
    monkeypatch.setattr(chunk_trees, "MAX_FORMER", 5)
    create(tmp_path / "a", "former", list(range(8)))
    with engines.mounted(tmp_path / "a", tmp_path / "journal", "zarr2") as files:
        number = files.tree.resolve("1").number
        for size in range(9, 30):
            assert (bytes(files.tree.read(number, 0, 99)) if size < 15 else b"\2\0\3\0") == chunk("zarr2", 2, 3)
            files.write(".zarray", json.dumps({**json.loads(files.read(".zarray") or b""), "shape": [size]}).encode())
        with pytest.raises(OSError, match="created anew") as caught:
            files.tree.read(number, 0, 99)
        assert caught.value.errno == errno.ESTALE
        trees = files.tree.source_tree.datasets.trees
        assert len(trees._trees) == 6 == len(trees.below("")[0].shapes)
        assert files.read("1") == chunk("zarr2", 2, 3)
