"""Chunks that come before their document, at the same time, or that are none after all."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.config.options import Options
from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write import recover
from shardfs.write.names import Names
from shardfs.write.open_rw import open_writable
from tests import handmade
from tests.suites.walking import entries
from tests.write.mounts import writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardfs.vfs.chunk_dirs import NameMeaning
    from shardfs.write.tree import WriteTree

PLAIN: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [8, 8],
    "data_type": "uint8",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "codecs": [{"name": "bytes"}],
    "fill_value": 0,
}
NAMES = [f"c.{y}.{x}" for y in range(4) for x in range(4)]


@contextmanager
def tree_of(tmp_path: Path, rules: str) -> Iterator[WriteTree]:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    options = Options(rw=True, journal=str(tmp_path / "journals"), create=rules, idle=60, age=60)
    tree = open_writable(open_tree(str(source), may_be_empty=True), str(source), options)
    try:
        yield tree
    finally:
        tree.close(20)


def put(tree: WriteTree, directory: int, name: str, data: bytes, *, by_rename: bool = False) -> None:
    temporary = f"{name}.0123abcd.partial" if by_rename else name
    _, handle = tree.create(directory, temporary.encode(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        tree.write(handle, 0, data)
        tree.flush(handle)
    finally:
        tree.release(handle)
    if by_rename:
        tree.rename(directory, temporary.encode(), directory, name.encode(), False)


def files(source: Path) -> dict[str, bytes]:
    return {p.relative_to(source).as_posix(): p.read_bytes() for p in source.rglob("*") if p.is_file()}


@pytest.mark.parametrize("by_rename", [False, True])
def test_no_chunk_slips_past_its_document(tmp_path: Path, by_rename: bool) -> None:
    before, rounds = sys.getswitchinterval(), 12
    sys.setswitchinterval(1e-5)
    try:
        with tree_of(tmp_path, "zarr3:chunks_per_shard=4x4") as tree:
            for n in range(rounds):
                directory = tree.mkdir(ROOT, f"a{n}".encode(), 0o755).number
                threads = [
                    threading.Thread(
                        target=put, args=(tree, directory, name, name.encode()[-4:]), kwargs={"by_rename": by_rename}
                    )
                    for name in NAMES
                ]
                document = threading.Thread(target=put, args=(tree, directory, "zarr.json", json.dumps(PLAIN).encode()))
                for thread in (*threads[:8], document, *threads[8:]):
                    thread.start()
                for thread in (*threads, document):
                    thread.join(30)
                    assert not thread.is_alive()
            tree.pending.flush()
            assert tree.left() == []
    finally:
        sys.setswitchinterval(before)
    for n in range(rounds):
        tree_files = files(tmp_path / "source" / f"a{n}")
        assert set(tree_files) == {"zarr.json", "c.0.0"}
        assert tree_files["c.0.0"] != b""
        assert all(name.encode()[-4:] in tree_files["c.0.0"] for name in NAMES)


def test_what_is_no_chunk_goes_where_it_belongs(tmp_path: Path) -> None:
    """Those of Zarr v2, of an array that cannot be sharded, and files that are nobody's."""
    rectilinear = PLAIN | {
        "chunk_grid": {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [2, 2]}}
    }
    with tree_of(tmp_path, "zarr3") as tree:
        for name, document, data in (
            ("v2", ".zarray", b'{"zarr_format": 2}'),
            ("odd", "zarr.json", json.dumps(rectilinear).encode()),
        ):
            directory = tree.mkdir(ROOT, name.encode(), 0o755).number
            put(tree, directory, "0.1", b"first")
            assert not (tmp_path / "source" / name / "0.1").exists()
            put(tree, directory, document, data)
            put(tree, directory, "0.2", b"second", by_rename=True)
            assert files(tmp_path / "source" / name) == {document: data, "0.1": b"first", "0.2": b"second"}
            assert bytes(tree.read(tree.resolve(f"{name}/0.1").number, 0, 99)) == b"first"
        scans = tree.mkdir(ROOT, b"7", 0o755).number
        put(tree, scans, "1", b"scan")
        put(tree, scans, "draft.tmp", b"somebody's own")
        assert tree.left() == ["7/1"]
        assert "7/draft.tmp" not in files(tmp_path / "source")  # it may be a document to come
    assert files(tmp_path / "source")["7/1"] == b"scan"
    assert files(tmp_path / "source")["7/draft.tmp"] == b"somebody's own"


def test_an_object_store_has_no_directories(tmp_path: Path) -> None:
    """A scale is there when somebody makes its directory, or has put a chunk there."""
    info = handmade.volume_info((4, 4, 2), (2, 2, 1), None)
    del info["scales"][0]["sharding"]
    source, store = f"memory://{tmp_path.name}", fsspec.filesystem("memory")
    options = Options(rw=True, journal=str(tmp_path / "journals"), create="precomputed;zarr3", idle=60, age=60)
    for again in (False, True):
        tree = open_writable(open_tree(source, may_be_empty=True), source, options)
        if not again:
            volume = tree.mkdir(ROOT, b"v", 0o755).number
            put(tree, volume, "info", json.dumps(info).encode())
            with pytest.raises(FileNotFoundError):
                tree.lookup(volume, b"s")
            put(tree, tree.mkdir(volume, b"s", 0o755).number, "0-2_0-2_0-1", b"abcd")
        file_number = tree.resolve("v/s/0-2_0-2_0-1").number
        assert bytes(tree.read(file_number, 0, 9)) == b"abcd"
        assert tree.close(20) == []
    assert store.find(tmp_path.name) == [f"/{tmp_path.name}/v/info", f"/{tmp_path.name}/v/s/0.shard"]


def test_what_lies_outside_of_an_array_stays_in_the_journal(tmp_path: Path) -> None:
    handmade.write_json(tmp_path / "source" / "a" / "zarr.json", handmade.zarr_metadata((8, 8), (4, 4), (2, 2)))
    with tree_of(tmp_path, "zarr3") as tree:
        array = tree.lookup(ROOT, b"a").number
        put(tree, tree.mkdir(tree.mkdir(array, b"c", 0o755).number, b"0", 0o755).number, "9", b"far")
        put(tree, array, "zarr.tmp", b"left by a tool")
        assert tree.left() == ["a/c/0/9"]
    assert set(files(tmp_path / "source")) == {"a/zarr.json"}


def test_an_array_that_comes_where_another_was_has_its_own_chunks(tmp_path: Path) -> None:
    """The other was renamed, but is still open."""
    source = tmp_path / "source"
    metadata = handmade.zarr_metadata((8,), (4,), (2,))
    for name, chunks in (("a", [b"aa", b"AA"]), ("b", [b"bbb", b"BBBB"])):
        handmade.write_json(source / name / "zarr.json", metadata)
        handmade.write_files(source / name, {"c/0": handmade.zarr_shard(chunks)})
    with tree_of(tmp_path, "") as tree:

        def read(path: str) -> bytes:
            return bytes(tree.read(tree.resolve(path).number, 0, 9))

        assert read("a/c/0") == b"aa"
        tree.rename(ROOT, b"a", ROOT, b"x", False)
        tree.rename(ROOT, b"b", ROOT, b"a", False)
        assert (read("a/c/0"), read("a/c/1")) == (b"bbb", b"BBBB")
        assert (read("x/c/0"), read("x/c/1")) == (b"aa", b"AA")


@pytest.mark.parametrize("length", [4, 0])
def test_a_directory_of_chunks_outlives_the_shape_of_its_array(length: int, tmp_path: Path) -> None:
    """Who cuts an array, deletes its last chunk, and then removes the directory does so."""
    source = tmp_path / "source"
    handmade.write_json(source / "a" / "zarr.json", handmade.zarr_metadata((8,), (4,), (2,)))
    with tree_of(tmp_path, "") as tree:
        array = tree.lookup(ROOT, b"a").number
        chunks = tree.mkdir(array, b"c", 0o755).number
        put(tree, chunks, "0", b"1234")
        document = json.loads(bytes(tree.read(tree.resolve("a/zarr.json").number, 0, 9999)))
        put(tree, array, "zarr.json", json.dumps({**document, "shape": [length]}).encode(), by_rename=True)
        tree.unlink(tree.lookup(array, b"c").number, b"0")
        tree.pending.flush()
        assert {entry.name for entry in entries(tree, array)} == {b"c", b"zarr.json"}  # type: ignore[arg-type]
        tree.rmdir(array, b"c")
        assert {entry.name for entry in entries(tree, array)} == {b"zarr.json"}  # type: ignore[arg-type]
    assert set(files(source / "a")) == {"zarr.json"}


def test_chunks_of_an_array_that_was_deleted_may_come_before_its_document(tmp_path: Path) -> None:
    """As git and tar write them: under names that its shards have, too."""
    source = tmp_path / "source"
    handmade.write_json(source / "a" / "zarr.json", handmade.zarr_metadata((8, 8), (4, 4), (2, 2)))
    with tree_of(tmp_path, "") as tree:
        array = tree.lookup(ROOT, b"a").number
        view = bytes(tree.read(tree.resolve("a/zarr.json").number, 0, 9999))
        tree.unlink(array, b"zarr.json")
        tree.rmdir(ROOT, b"a")
        array = tree.mkdir(ROOT, b"a", 0o755).number
        row = tree.mkdir(tree.mkdir(array, b"c", 0o755).number, b"0", 0o755).number
        put(tree, row, "1", b"1234", by_rename=True)
        assert files(source / "a") == {}
        put(tree, array, "zarr.json", view)
        assert bytes(tree.read(tree.resolve("a/c/0/1").number, 0, 9)) == b"1234"
        tree.pending.flush()
        assert set(files(source / "a")) == {"zarr.json", "c/0/0"}


@pytest.mark.parametrize("failing", [b"c.0.0", b"c.1.0", b"c.3.3"])
def test_a_document_describes_all_chunks_or_none(
    failing: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the name of one chunk means cannot be told for now: a document above cannot be read.

    The document is in the store by then, so it is neither refused nor lost.
    """
    classify = Names.classify_name

    def fail(names: Names, directory: str, name: bytes) -> NameMeaning:
        if name == failing and names.source_number(directory) and (tmp_path / "source/a/zarr.json").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), "zarr.json")
        return classify(names, directory, name)

    with tree_of(tmp_path, "zarr3:chunks_per_shard=4x4") as tree:
        directory = tree.mkdir(ROOT, b"a", 0o755).number
        for name in NAMES:
            put(tree, directory, name, name.encode()[-4:])
        with monkeypatch.context() as patch:
            patch.setattr(Names, "classify_name", fail)
            with pytest.raises(OSError, match="Input/output error"):
                put(tree, directory, "zarr.json", json.dumps(PLAIN).encode())
            assert tree.state()["orphans"] == len(NAMES)
        assert "the document is stored" in caplog.text
        assert "lost" not in caplog.text
        assert tree.state()["refused"] == 0
        put(tree, directory, "zarr.json", json.dumps(PLAIN).encode())
        tree.pending.flush()
        assert tree.left() == []
    assert set(files(tmp_path / "source" / "a")) == {"zarr.json", "c.0.0"}


BOXES = [f"{x}-{x + 2}_0-2_0-2" for x in (0, 2, 4, 6)]


def test_compressed_chunks_may_come_before_their_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `cp -r` copies them: closed, still open, open once more, and one that is not compressed at all."""
    closed, opened, again, bad = (f"{box}.gz".encode() for box in BOXES)
    info = json.dumps(handmade.volume_info((8, 2, 2), (2, 2, 2), None)).encode()
    with tree_of(tmp_path, "precomputed:chunks_per_shard=4") as tree:
        volume = tree.mkdir(ROOT, b"v", 0o755).number
        scale = tree.mkdir(volume, b"s", 0o755).number
        for name, data in ((closed, gzip.compress(b"closed..")), (again, gzip.compress(b"again...")), (bad, b"bad")):
            put(tree, scale, name.decode(), data)
        handles = [tree.create(scale, name, os.O_RDWR | os.O_CREAT, 0o644)[1] for name in (opened, again)]
        data = gzip.compress(b"opened..")
        tree.write(handles[0], 0, data[:9])
        put(tree, volume, "info", info)
        scale = tree.resolve("v/s").number
        tree.write(handles[0], 9, data[9:])
        for handle in handles:
            tree.flush(handle)
            tree.release(handle)
        for box, content in zip(BOXES, (b"closed..", b"opened..", b"again..."), strict=False):
            assert bytes(tree.read(tree.resolve(f"v/s/{box}").number, 0, 9)) == content
        assert {entry.name for entry in entries(tree, scale)} == {*map(str.encode, BOXES[:3]), bad}  # type: ignore[arg-type]
        tree.pending.flush()
        assert tree.left() == [f"v/s/{bad.decode()}"]
        assert f"v/s/{bad.decode()}: cannot be a compressed chunk, so it stays in the journal" in caplog.text
    source = open_tree(str(tmp_path / "source"))
    numbers = [source.resolve(f"v/s/{box}").number for box in BOXES[:3]]
    assert [bytes(source.read(n, 0, 9)) for n in numbers] == [b"closed..", b"opened..", b"again..."]


@pytest.mark.fuse
def test_compressed_chunks_get_their_document_between_two_mounts(tmp_path: Path) -> None:
    """From another program, after a crash. The chunk that was closed last counts."""
    source, info = tmp_path / "source", handmade.volume_info((8, 2, 2), (2, 2, 2), handmade.sharding())
    source.mkdir()
    with writable(source, tmp_path, "--create", "precomputed:chunks_per_shard=4") as mount:
        mount.mount()
        scale = mount.path / "v/s"
        scale.mkdir(parents=True)
        for data in (b"first...", b"second.."):
            (scale / f"{BOXES[0]}.gz").write_bytes(gzip.compress(data))
        mount.kill()
        mount.clear()
        handmade.write_json(source / "v/info", info)
        mount.mount()
        assert ((scale / BOXES[0]).read_bytes(), os.listdir(scale)) == (b"second..", [BOXES[0]])
        assert mount.umount().returncode == 0
    assert b"second.." in files(source)["v/s/0.shard"]


@pytest.mark.parametrize(("above", "separator"), [("c/0", "/"), ("", ".")])
def test_an_array_that_has_chunks_in_the_source_is_not_sharded_by_a_rule(
    tmp_path: Path, above: str, separator: str
) -> None:
    """As git, and editors that keep a backup, write the document of an unsharded array: it goes, and comes anew."""
    encoding = {"name": "default" if separator == "/" else "v2", "configuration": {"separator": separator}}
    document, chunk = PLAIN | {"chunk_key_encoding": encoding}, "1" if above else "0.1"
    directory = tmp_path / "source" / "a" / above
    directory.mkdir(parents=True)
    (directory / chunk).write_bytes(b"1234")
    with tree_of(tmp_path, "zarr3:chunks_per_shard=2x2") as tree:
        put(tree, tree.lookup(ROOT, b"a").number, "zarr.json", json.dumps(document).encode())
        file_number = tree.resolve(f"a/{above}/{chunk}").number
        assert bytes(tree.read(file_number, 0, 9)) == b"1234"
    assert json.loads((tmp_path / "source" / "a" / "zarr.json").read_bytes()) == document


# ---- another program has written the same name


@pytest.fixture(params=["local", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    (tmp_path / "source").mkdir()
    return str(tmp_path / "source")


@contextmanager
def mount_of(source: str, tmp_path: Path, conflict: str = "fail") -> Iterator[WriteTree]:
    journals = str(tmp_path / "journals")
    options = Options(rw=True, journal=journals, create="zarr3", idle=60, age=60, conflict=conflict)
    tree = open_writable(open_tree(source, may_be_empty=True), source, options)
    try:
        yield tree
    finally:
        tree.close(20)


def write_orphan(tree: WriteTree, data: bytes, directory: bytes = b"7", name: str = "1") -> None:
    put(tree, tree.mkdir(ROOT, directory, 0o755).number, name, data)


@pytest.mark.parametrize(("choice", "wanted"), [("ours", b"ours"), ("theirs", b"theirs")])
def test_a_file_of_another_program_is_not_overwritten(source: str, choice: str, wanted: bytes, tmp_path: Path) -> None:
    fs, root = fsspec.url_to_fs(source)
    with mount_of(source, tmp_path) as tree:
        write_orphan(tree, b"ours")
        fs.makedirs(f"{root}/7", exist_ok=True)
        fs.pipe_file(f"{root}/7/1", b"theirs")
        assert tree.close(20) == ["7/1"]
        assert "another program" in str(tree.pending.failure("7/1"))
    assert fs.cat_file(f"{root}/7/1") == b"theirs"
    with mount_of(source, tmp_path) as tree:  # the conflict stays until a user decides
        assert bytes(tree.read(tree.resolve("7/1").number, 0, 9)) == b"ours"
    recover.decide(recover.find(source, str(tmp_path / "journals")), **{choice: ["7/1"]})
    with mount_of(source, tmp_path) as tree:
        assert tree.close(20) == []
    assert fs.cat_file(f"{root}/7/1") == wanted


def test_it_is_overwritten_if_the_user_says_so(source: str, tmp_path: Path) -> None:
    fs, root = fsspec.url_to_fs(source)
    with mount_of(source, tmp_path, "ours") as tree:
        write_orphan(tree, b"ours")
        fs.makedirs(f"{root}/7", exist_ok=True)
        fs.pipe_file(f"{root}/7/1", b"theirs")
        assert tree.close(20) == []
    assert fs.cat_file(f"{root}/7/1") == b"ours"


def test_it_is_not_overwritten_when_a_document_says_that_it_is_no_chunk(source: str, tmp_path: Path) -> None:
    fs, root = fsspec.url_to_fs(source)
    with mount_of(source, tmp_path) as tree:
        write_orphan(tree, b"ours", b"v2", "0.1")
        fs.makedirs(f"{root}/v2", exist_ok=True)
        fs.pipe_file(f"{root}/v2/0.1", b"theirs")
        put(tree, tree.resolve("v2").number, ".zarray", b'{"zarr_format": 2}')
        assert tree.left() == ["v2/0.1"]
    assert fs.cat_file(f"{root}/v2/0.1") == b"theirs"


@pytest.mark.parametrize("theirs", [b"", b"theirs"])
@pytest.mark.parametrize("by_rename", [False, True])
def test_a_file_that_was_there_is_overwritten_if_it_is_unchanged(
    source: str, by_rename: bool, theirs: bytes, tmp_path: Path
) -> None:
    """As if `cp -r` is repeated. `theirs`: what another program writes after that."""
    fs, root = fsspec.url_to_fs(source)
    fs.makedirs(f"{root}/7", exist_ok=True)
    fs.pipe_file(f"{root}/7/1", b"earlier")
    with mount_of(source, tmp_path) as tree:
        put(tree, tree.resolve("7").number, "1", b"ours", by_rename=by_rename)
        put(tree, tree.resolve("7").number, "1", b"ours again", by_rename=by_rename)
        if theirs:
            fs.pipe_file(f"{root}/7/1", theirs)
        assert tree.close(20) == (["7/1"] if theirs else [])
    assert fs.cat_file(f"{root}/7/1") == (theirs or b"ours again")


@pytest.mark.parametrize("is_overwritten", [False, True])
@pytest.mark.parametrize("way", ["unlink", "rename to a plain name", "rename to an orphan"])
def test_a_file_of_the_source_that_no_document_describes_can_be_taken_away(
    source: str, way: str, is_overwritten: bool, tmp_path: Path
) -> None:
    fs, root = fsspec.url_to_fs(source)
    fs.makedirs(f"{root}/7", exist_ok=True)
    fs.pipe_file(f"{root}/7/1", b"theirs")
    fs.pipe_file(f"{root}/7/2", b"stays")
    moved = {"unlink": "", "rename to a plain name": "readme", "rename to an orphan": "3"}[way]
    with mount_of(source, tmp_path) as tree:
        directory = tree.resolve("7").number
        if is_overwritten:
            put(tree, directory, "1", b"ours")
        if moved:
            tree.rename(directory, b"1", directory, moved.encode(), False)
        else:
            tree.unlink(directory, b"1")
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                tree.lookup(directory, b"1")
        assert not fs.exists(f"{root}/7/1")
        assert tree.close(20) == []
    data = b"ours" if is_overwritten else b"theirs"
    assert {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(f"{root}/7")} == {
        "2": b"stays",
        **({moved: data} if moved else {}),
    }
