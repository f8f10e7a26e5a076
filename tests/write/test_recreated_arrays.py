"""Another program creates an array anew, in another form, while a mount shows it and has chunks to publish."""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import subprocess
import sys
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
from shardfs.write.publish_shard import Publishing
from tests import handmade
from tests.conftest import need_fuse
from tests.data_n5 import Index, attributes, header, sharding
from tests.waiting import wait_until
from tests.write import engines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Mounted
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


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "absent"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_chunks_of_the_former_array_are_conflicts(change: str, layout: str, is_stored: bool, tmp_path: Path) -> None:
    """Their bytes are in the journal in the form of the former array."""
    theirs = list(range(10, 18)) if is_stored else None
    with place(tmp_path, layout, list(range(8)) if is_stored else None) as files:
        for i in (0, 3):
            files.write("a/" + PATHS[layout].format(i), chunk(layout, 200, 201))
        create(tmp_path / "store/a", change, theirs)
        refused(files)
        assert natively(tmp_path / "store/a") == (theirs or [0] * 8)
        versions = files.tree.pending.backlog.versions
        assert len(versions) == 2
        assert all(version.obsolete for version in versions.values())
    with engines.mounted(tmp_path / "store", tmp_path / "journal", layout) as files:
        refused(files)
        assert natively(tmp_path / "store/a") == (theirs or [0] * 8)


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


def test_nothing_is_published_while_the_array_has_no_document(tmp_path: Path) -> None:
    """The other program may be about to create it anew."""
    with place(tmp_path, "native", list(range(8))) as files:
        files.write("a/c/0", chunk("native", 200, 201))
        shutil.rmtree(tmp_path / "store/a")
        with pytest.raises(OSError, match="no document") as caught:
            files.publish()
        assert caught.value.errno == errno.ESTALE
        assert not (tmp_path / "store/a").exists()
        create(tmp_path / "store/a", "codecs", list(range(10, 18)))
        refused(files)
        assert natively(tmp_path / "store/a") == list(range(10, 18))


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


@pytest.mark.parametrize("conflict", ["fail", "ours"])
def test_a_deletion_is_a_conflict_too(conflict: str, tmp_path: Path) -> None:
    create(tmp_path / "a", "former", list(range(8)))
    settings = Publishing(idle_s=1e6, age_s=1e6, conflict=conflict)
    with engines.mounted(tmp_path / "a", tmp_path / "journal", "native", settings) as files:
        files.unlink("c/0")
        create(tmp_path / "a", "index_codecs", list(range(10, 18)))
        refused(files)
    assert natively(tmp_path / "a") == list(range(10, 18))


def test_recover_publishes_no_chunk_of_the_former_array(tmp_path: Path) -> None:
    with place(tmp_path, "native", list(range(8))) as files:
        files.write("a/c/0", chunk("native", 200, 201))
        create(tmp_path / "store/a", "codecs", list(range(10, 18)))
        refused(files)
    with pytest.raises(OSError, match="--export") as caught:
        recover.decide(tmp_path / "journal", ours=["a"])
    assert caught.value.errno == errno.EINVAL
    assert recover.export(tmp_path / "journal", tmp_path / "out").files == 1
    assert (tmp_path / "out/a/c/0").read_bytes() == chunk("native", 200, 201)
    recover.decide(tmp_path / "journal", theirs=["."])
    with engines.mounted(tmp_path / "store", tmp_path / "journal", "native") as files:
        files.publish()
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_that_is_only_read_shows_the_new_chunks(change: str, layout: str, tmp_path: Path) -> None:
    create(tmp_path / "store/a", "former", list(range(8)))
    (tmp_path / "store/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    tree = open_tree(str(tmp_path / "store"), layout=layout, index_ttl_s=0)
    names = ["a/" + PATHS[layout].format(i) for i in range(4)]
    assert [bytes(tree.read(tree.resolve(n).number, 0, 99)) for n in names[:1]] == [chunk(layout, 0, 1)]
    create(tmp_path / "store/a", change, list(range(10, 18)))
    fresh = open_tree(str(tmp_path / "store"), layout=layout)
    for name in (f"a/{DOCUMENTS[layout]}", *names):
        wanted = fresh.resolve(name)
        entry = tree.resolve(name)
        assert entry.size == wanted.size
        assert bytes(tree.read(entry.number, 0, 999)) == bytes(fresh.read(wanted.number, 0, 999))


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


# ---- other formats


def create_volume(path: Path, values: int, **sharding: Any) -> None:
    """As tensorstore creates it."""
    shutil.rmtree(path, ignore_errors=True)
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": "uint16", "num_channels": 1, "type": "image"},
        "scale_metadata": {
            "key": "s",
            "size": [4, 4, 4],
            "chunk_size": [2, 2, 2],
            "resolution": [1, 1, 1],
            "encoding": "raw",
            "sharding": {
                "@type": "neuroglancer_uint64_sharded_v1",
                "preshift_bits": 1,
                "hash": "identity",
                "minishard_bits": 1,
                "shard_bits": 1,
                "minishard_index_encoding": "raw",
                "data_encoding": "raw",
                **sharding,
            },
        },
    }
    array = ts.open(spec, create=True).result()
    array.write(np.full(array.shape, values, np.uint16)).result()


def volume(path: Path) -> set[int]:
    values = ts.open({"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()
    return {*np.asarray(values.read().result()).ravel().tolist()}


@pytest.mark.parametrize(
    "change",
    [
        {"minishard_index_encoding": "gzip"}, {"data_encoding": "gzip"}, {"hash": "murmurhash3_x86_128"},
        {"minishard_bits": 0, "shard_bits": 2},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
@pytest.mark.parametrize(
    ("layout", "document"), [("native", "info"), ("zarr2", "s/.zarray"), ("n5", "s0/attributes.json")]
)
def test_a_volume_with_another_sharding(layout: str, document: str, change: dict[str, Any], tmp_path: Path) -> None:
    create_volume(tmp_path / "v", 1)
    with engines.mounted(tmp_path / "v", tmp_path / "journal", layout) as files:
        paths = [path for path in every(files) if "/" in path and path not in (document, "s/.zattrs")]
        assert len(paths) == 8
        data = files.read(paths[0])
        assert data is not None
        reopen(files, document)
        files.write(paths[0], data)
        create_volume(tmp_path / "v", 2, **change)
        refused(files)
        assert volume(tmp_path / "v") == {2}
        reopen(files, document)
        with mounted_anew(tmp_path / "v", layout) as tree:
            for path in paths:
                entry = tree.resolve(path)
                assert files.read(path) == bytes(tree.read(entry.number, 0, entry.size)) != data


def every(files: TreeFiles, directory: str = "") -> list[str]:
    out = []
    for batch in files.tree.scan(files.tree.resolve(directory).number):
        for name, is_directory in zip(batch.names.tolist(), batch.directories.tolist(), strict=True):
            path = f"{directory}/{name.decode()}".lstrip("/")
            out += every(files, path) if is_directory else [path]
    return sorted(out)


@pytest.mark.parametrize("layout", ["native", "zarr2"])
def test_an_n5_dataset_with_other_codecs(layout: str, tmp_path: Path) -> None:
    def codecs(compressed: bool) -> Any:
        inner = [{"name": "n5bytes"}, *([{"name": "gzip", "configuration": {"level": 5}}] if compressed else [])]
        return [sharding((2,), inner, Index())]

    document, name = {"native": "attributes.json", "zarr2": ".zarray"}[layout], "0"
    handmade.write_json(tmp_path / "d/attributes.json", attributes((4,), (4,), "uint16", codecs=codecs(True)))
    with engines.mounted(tmp_path / "d", tmp_path / "first", "native") as files:
        files.write("0", header((2,)) + gzip.compress(bytes([0, 1, 0, 2])))
        files.publish()
    with engines.mounted(tmp_path / "d", tmp_path / "journal", layout) as files:
        reopen(files, document)
        data = files.read(name)
        assert data is not None
        files.write(name, data)
        (tmp_path / "d/0").unlink()
        handmade.write_json(tmp_path / "d/attributes.json", attributes((4,), (4,), "uint16", codecs=codecs(False)))
        refused(files)
        assert not (tmp_path / "d/0").exists()
        reopen(files, document)
        new = header((2,)) + bytes([0, 3, 0, 4]) if layout == "native" else np.array([3, 4], ">u2").tobytes()
        with pytest.raises(OSError, match="created the array anew"):  # of the former version, once
            files.write(name, new)
        files.publish()
    assert header((2,)) + bytes([0, 3, 0, 4]) in (tmp_path / "d/0").read_bytes()


# ---- through the kernel

READS = """
import json, sys, tensorstore as ts
spec = json.loads(sys.argv[1])
for line in sys.stdin:
    found = ts.open(spec, recheck_cached_metadata="open", recheck_cached_data="open").result()
    print(json.dumps(found.read().result().tolist()), flush=True)
"""


@pytest.mark.fuse
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writes", [False, True])
def test_a_reader_gets_the_new_elements(layout: str, writes: bool, mounted: Mounted, tmp_path: Path) -> None:
    """It opens the array again, and the kernel knows names, sizes, bytes and absent chunks of the former one."""
    need_fuse()
    create(tmp_path / "store/a", "former", [0, 1, 2, 3, 0, 0, 0, 0])
    (tmp_path / "store/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    driver = {"native": "zarr3", "zarr2": "zarr", "n5": "n5"}[layout]
    options = [*(["--layout", layout] if layout != "native" else []), "-o", "index_ttl=0.5"]
    options += ["--rw", "-o", f"journal={tmp_path / 'journal'}"] if writes else []
    with mounted(tmp_path / "store", *options) as path:
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/a/"}}
        with subprocess.Popen(
            [sys.executable, "-c", READS, json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            asks, answers = client.stdin, client.stdout

            def read() -> list[int]:
                print("again", file=asks, flush=True)
                found: list[int] = json.loads(answers.readline())
                return found

            assert read() == [0, 1, 2, 3, 0, 0, 0, 0]
            for form, values in (("endianness", list(range(10, 18))), ("index_codecs", list(range(20, 28)))):
                create(tmp_path / "store/a", form, values)
                wait_until(lambda wanted=values: read() == wanted)  # type: ignore[misc]
