"""Another program changes metadata documents in the source, beside programs that change them on a writable mount."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.vfs.tree import open_tree
from shardfs.write import recover
from shardfs.write.journal import Journal
from shardfs.write.publishing import Publishing
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.conftest import need_fuse
from tests.write.engines import TreeFiles
from tests.write.mounts import writable
from tests.write.object_store import object_store
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.write.object_store import Server

    Json = dict[str, Any]

ZARR = handmade.zarr_metadata((7, 10), (4, 6), (2, 3)) | {"data_type": "uint8", "attributes": {"old": 0}}
GROUP = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {"old": 0},
    "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {"a": ZARR}},
}
N5 = {
    "dimensions": [8, 8],
    "blockSize": [4, 4],
    "dataType": "uint8",
    "codecs": [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [2, 2],
                "codecs": [{"name": "n5bytes"}],
                "index_codecs": [{"name": "raw-bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                "index_location": "end",
            },
        }
    ],
}
SCALE = {
    "key": "1_1_1",
    "size": [8, 8, 8],
    "chunk_sizes": [[4, 4, 4]],
    "encoding": "raw",
    "resolution": [1, 1, 1],
    "sharding": {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 0,
        "hash": "identity",
        "minishard_bits": 0,
        "shard_bits": 1,
    },
}
INFO = {"type": "image", "data_type": "uint8", "num_channels": 1, "scales": [SCALE]}
DRAFT = {
    "shape": [8],
    "data_type": "|u1",
    "chunk_grid": {"type": "regular", "chunk_shape": [2], "separator": "/"},
    "chunk_memory_layout": "C",
    "fill_value": 0,
    "extensions": [],
    "attributes": {},
    "storage_transformers": [
        {
            "extension": "https://purl.org/zarr/spec/storage_transformers/sharding/1.0",
            "type": "indexed",
            "configuration": {"chunks_per_shard": [2]},
        }
    ],
}
DRAFT_ROOT = {
    "zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0",
    "metadata_encoding": "https://purl.org/zarr/spec/protocol/core/3.0",
    "metadata_key_suffix": ".json",
    "extensions": [],
}
BCOLZ: dict[str, Json] = {
    "meta/sizes": {"shape": [8], "nbytes": 8, "cbytes": 0},
    "meta/storage": {"dtype": "uint8", "chunkshape": [2], "superchunksize": 2, "dflt": 0, "expectedlen": 8},
    "meta/attributes": {"old": 0},
}

FORMATS: dict[str, tuple[dict[str, Json], str, str, tuple[str, ...]]] = {
    "zarr": ({"a/zarr.json": ZARR}, "a/zarr.json", "a/zarr.json", ("attributes",)),
    "zarr consolidated": ({"zarr.json": GROUP, "a/zarr.json": ZARR}, "zarr.json", "zarr.json", ("attributes",)),
    "zarr group": ({"g/zarr.json": {**GROUP, "consolidated_metadata": None}, "a/zarr.json": ZARR},
                   "g/zarr.json", "g/zarr.json", ("attributes",)),
    "n5": ({"a/attributes.json": N5}, "a/attributes.json", "a/attributes.json", ()),
    "precomputed": ({"a/info": INFO}, "a/info", "a/info", ()),
    "draft": ({"zarr.json": DRAFT_ROOT, "meta/root/a.array.json": DRAFT},
              "meta/root/a.array.json", "meta/root/a.array.json", ("attributes",)),
    "draft consolidated": (
        {"zarr.json": DRAFT_ROOT, "meta/root/a.array.json": DRAFT,
         "meta/root/consolidated/.zmetadata": {"metadata": {"meta/root/a.array.json": DRAFT}}},
        "meta/root/consolidated/.zmetadata", "meta/root/consolidated/.zmetadata", ()),
    "bcolz": ({f"a/{name}": doc for name, doc in BCOLZ.items()}, "a/__attrs__", "a/meta/attributes", ()),
}  # fmt: skip
"""Of a dataset: what is stored, a document as it is shown and the one it is made of, and where free members are."""


class Source:
    """A dataset on a local disk, another program that changes its document, and a writable tree of it."""

    def __init__(self, name: str, top: Path) -> None:
        self.root, self.journal = top / "store", top / "journal"
        self.journal.mkdir(mode=0o700)
        documents, self.shown, self.stored, self.at = FORMATS[name]
        for path, doc in documents.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(json.dumps(doc))
        if name.startswith("draft"):
            (self.root / "data/root/a").mkdir(parents=True)

    def members(self, doc: Json) -> Json:
        """Those of a document that anybody may change."""
        for name in self.at:
            doc = doc[name]
        return doc

    def natively(self, **values: Any) -> None:
        """Another program replaces the document in the source."""
        doc = self.native()
        self.members(doc).update(values)
        beside = self.root / f"{self.stored}.beside"
        beside.write_text(json.dumps(doc))
        beside.rename(self.root / self.stored)

    def native(self) -> Json:
        found: Json = json.loads((self.root / self.stored).read_text())
        return found

    @contextmanager
    def opened(self, **settings: Any) -> Iterator[Client]:
        held = Journal.open(self.journal, str(self.root), limit_bytes=8 << 20, commit_s=0)
        publishing = Publishing(idle_s=1e6, age_s=1e6, **settings)
        tree = open_write_tree(open_tree(str(self.root)), held, publishing=publishing)
        try:
            yield Client(self, TreeFiles(tree, held))
        finally:
            tree.close(5)


class Client:
    """A program on the mount."""

    def __init__(self, source: Source, files: TreeFiles) -> None:
        self.source, self.files, self.tree = source, files, files.tree

    def read(self) -> Json:
        """Open the document and read it, as the kernel does it: after ESTALE the name is looked up anew."""
        for attempt in range(2):
            number = self.tree.resolve(self.source.shown).number
            try:
                handle = self.tree.open(number, os.O_RDONLY)
            except OSError as e:
                if e.errno != errno.ESTALE or attempt:
                    raise
                continue
            found: Json = json.loads(bytes(self.tree.read(number, 0, self.tree.attributes(number).size)))
            self.tree.release(handle)
            return found
        raise AssertionError

    def edited(self, doc: Json, **values: Any) -> bytes:
        new: Json = json.loads(json.dumps(doc))
        self.source.members(new).update(values)
        return json.dumps(new).encode()

    def write(self, doc: Json, *, by_rename: bool = False, **values: Any) -> None:
        data = self.edited(doc, **values)
        if not by_rename:
            self.files.write(self.source.shown, data)
            return
        temporary = f"{self.source.shown}.partial"
        self.files.write(temporary, data)
        self.files.rename(temporary, self.source.shown)

    def free(self) -> Json:
        return self.source.members(self.read())


@pytest.fixture(params=list(FORMATS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return Source(request.param, tmp_path)


@pytest.fixture
def zarr(tmp_path: Path) -> Source:
    return Source("zarr", tmp_path)


def test_what_is_consolidated_stays_sharded(tmp_path: Path) -> None:
    source = Source("draft consolidated", tmp_path)
    with source.opened() as client:
        client.write(client.read(), ours=1)
    assert source.native() == {"metadata": {"meta/root/a.array.json": DRAFT}, "ours": 1}


@pytest.mark.parametrize("by_rename", [False, True])
def test_changes_of_both_are_kept(source: Source, by_rename: bool) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(native=1)
        client.write(doc, by_rename=by_rename, ours=2)
        assert source.members(source.native()).items() >= {"native": 1, "ours": 2}.items()
        assert client.free().items() >= {"native": 1, "ours": 2}.items()
        client.write(client.read(), native=3)
        assert source.members(source.native())["native"] == 3


def test_a_program_that_does_not_read_again_keeps_what_others_wrote(source: Source) -> None:
    """zarr-python reads the document of an array once, and writes it anew for each attribute."""
    with source.opened() as client:
        doc = client.read()
        source.natively(native=1)
        client.write(doc, ours=2)
        client.read()  # another program
        client.write(doc, ours=2, more=3)
        assert source.members(source.native()).items() >= {"native": 1, "ours": 2, "more": 3}.items()


def test_what_was_read_again_may_be_taken_back(source: Source) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(native=1)
        again = client.read()
        assert source.members(again)["native"] == 1
        client.write(doc)
        assert "native" not in source.members(source.native())


@pytest.mark.parametrize("by_rename", [False, True])
def test_what_both_changed_is_kept_twice(source: Source, by_rename: bool, caplog: pytest.LogCaptureFixture) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(both=1, native=1)
        for _ in range(2):  # the kernel repeats a rename that ended with ESTALE
            with pytest.raises(OSError, match="both") as caught:
                client.write(doc, by_rename=by_rename, both=2, ours=2)
            assert caught.value.errno == errno.ESTALE
        assert "another program has changed" in caplog.text
        found = source.members(source.native())
        assert (found["both"], found["native"], "ours" in found) == (1, 1, False)
        assert client.free() == source.members(client.read())
        assert client.free()["both"] == 1
        assert client.tree.left() == [source.shown]
        client.write(client.read(), both=3)
        assert source.members(source.native())["both"] == 3
    (entry,) = (e for e in recover.look(source.journal).entries if e.state != "scratch")
    assert (entry.path, entry.state) == (source.shown, "conflict")


@pytest.mark.parametrize("ours", [False, True])
def test_a_user_decides(source: Source, ours: bool) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(both=1, native=1)
        with pytest.raises(OSError, match="both"):
            client.write(doc, both=2, ours=2)
    with source.opened() as client:
        assert client.free()["both"] == 1
        assert client.tree.left() == [source.shown]
    recover.decide(source.journal, *(([source.shown], []) if ours else ([], [source.shown])))
    with source.opened() as client:
        assert client.tree.left() == []
        wanted = {"both": 2, "ours": 2, "native": 1} if ours else {"both": 1, "native": 1}
        for found in (client.free(), source.members(source.native())):
            assert {name: found[name] for name in ("both", "ours", "native") if name in found} == wanted


def test_ours_wins_if_asked(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    with source.opened(conflict="ours") as client:
        doc = client.read()
        source.natively(both=1, native=1)
        client.write(doc, both=2)
        assert source.members(source.native()).items() >= {"both": 2, "native": 1}.items()
        assert "replaces" in caplog.text
        assert client.tree.left() == []


def test_it_is_shown_when_it_is_opened_next(source: Source) -> None:
    with source.opened() as client:
        assert "native" not in client.free()
        number = client.tree.resolve(source.shown).number
        handle = client.tree.open(number, os.O_RDONLY)
        before = bytes(client.tree.read(number, 0, 1 << 20))
        source.natively(native=1)
        assert client.free()["native"] == 1
        assert client.tree.resolve(source.shown).number != number  # the kernel keeps bytes and sizes by number
        assert bytes(client.tree.read(number, 0, 1 << 20)) == before  # of the file that is open
        client.tree.release(handle)


@pytest.mark.parametrize("also_read", [False, True])
def test_what_others_changed_is_not_removed_unread(source: Source, also_read: bool) -> None:
    with source.opened() as client:
        client.read()
        source.natively(native=1)
        if also_read:
            client.read()
            client.files.unlink(source.shown)
            assert client.files.read(source.shown) is None
            return
        with pytest.raises(OSError, match="another program") as caught:
            client.files.unlink(source.shown)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="another program"):
            client.files.rename(source.shown, f"{source.shown}.old")
        assert source.members(source.native())["native"] == 1


def test_what_others_made_meanwhile_is_not_overwritten(zarr: Source, tmp_path: Path) -> None:
    new = zarr.root / "new/zarr.json"
    new.parent.mkdir()
    with zarr.opened() as client:
        assert client.files.read("new/zarr.json") is None
        theirs = {"zarr_format": 3, "node_type": "group", "attributes": {"theirs": 1}}
        new.write_text(json.dumps(theirs))
        with pytest.raises(OSError, match="node_type") as caught:
            client.files.write("new/zarr.json", client.edited({**ZARR, "codecs": [{"name": "bytes"}]}, ours=1))
        assert caught.value.errno == errno.ESTALE
        assert json.loads(new.read_text()) == theirs
        client.files.write("new/zarr.json", json.dumps({**theirs, "attributes": {"ours": 2}}).encode())
        assert json.loads(new.read_text())["attributes"] == {"theirs": 1, "ours": 2}


@pytest.mark.parametrize(
    "source", [name for name in FORMATS if name != "bcolz"], indirect=True
)  # it is shown without being stored
def test_what_others_removed_is_not_made_anew(source: Source) -> None:
    with source.opened() as client:
        doc = client.read()
        (source.root / source.stored).unlink()
        with pytest.raises(OSError, match="the whole document") as caught:
            client.write(doc, ours=1)
        assert caught.value.errno == errno.ESTALE
        assert not (source.root / source.stored).exists()
        assert client.tree.left() == [source.shown]


def test_a_document_that_contradicts_the_chunks_is_refused_all_the_same(zarr: Source) -> None:
    with zarr.opened() as client:
        doc = client.read()
        zarr.natively(native=1)
        with pytest.raises(OSError, match="data type") as caught:
            client.write({**doc, "data_type": "uint16"})
        assert caught.value.errno == errno.EINVAL
        assert client.tree.left() == []


def test_no_document_is_overwritten_that_comes_between_the_look_and_the_write(
    zarr: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zarr.opened() as client:
        doc = client.read()
        update = client.tree.writer.update

        def late(key: str, make: Callable[[Any], Any], *rest: Any) -> Any:
            monkeypatch.undo()
            zarr.natively(native=1)
            return update(key, make, *rest)

        monkeypatch.setattr(client.tree.writer, "update", late)
        client.write(doc, ours=2)
        assert zarr.members(zarr.native()) == {"old": 0, "native": 1, "ours": 2}
        assert client.free() == {"old": 0, "native": 1, "ours": 2}


def test_chunks_are_found_that_a_larger_shape_has(tmp_path: Path) -> None:
    target = TARGETS["zarr_end"]
    zarr = Source("zarr", tmp_path)
    zarr.shown = zarr.stored = target.document
    (tmp_path / "target").mkdir()
    zarr.root = tmp_path / "target"
    target.create(zarr.root)
    target.fill(zarr.root, target.array({0: 1}))
    with zarr.opened() as client:
        client.files.write(target.path(0), target.shown(5))
        doc = zarr.native()
        doc["shape"] = [2 * n for n in doc["shape"]]
        (zarr.root / zarr.stored).write_text(json.dumps(doc))
        assert client.read()["shape"] == doc["shape"]
        outside = "c/" + "/".join(str(n) for n in target.grid)
        client.files.write(outside, target.shown(7))
        client.tree.pending.flush()
        assert client.tree.left() == []


def test_a_chunk_that_waits_is_compared_after_the_shape_has_changed(tmp_path: Path) -> None:
    target = TARGETS["zarr_end"]
    zarr = Source("zarr", tmp_path)
    zarr.shown = zarr.stored = target.document
    zarr.root = tmp_path / "target"
    zarr.root.mkdir()
    target.create(zarr.root)
    target.fill(zarr.root, target.array({0: 1}))
    with zarr.opened() as client:
        client.files.write(target.path(0), target.shown(5))
        target.fill(zarr.root, target.array({0: 9}))
        doc = zarr.native()
        doc["shape"] = [2 * n for n in doc["shape"]]
        (zarr.root / zarr.stored).write_text(json.dumps(doc))
        client.tree.store.reopen(next(iter(target.shards())))  # as it is when many shards are open
        client.read()
        with pytest.raises(OSError, match="the stored chunk"):
            client.tree.pending.flush()


# ---- object stores


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("s3fs")
    with object_store() as found:
        yield found


@pytest.mark.s3
@pytest.mark.parametrize("overlap", [False, True])
def test_object_stores(server: Server, tmp_path: Path, overlap: bool) -> None:
    server.reset()
    key = "data/root/a/zarr.json"
    server.put(key, json.dumps(ZARR).encode())
    fs = ShardFileSystem(
        source="s3://data/root", storage_options=server.options(), rw=True, skip_instance_cache=True,
        write_options={"journal": str(tmp_path / "journals"), "idle": "3600", "age": "3600"},
    )  # fmt: skip

    def natively(**values: Any) -> None:
        doc = json.loads(server.objects[key].data)
        doc["attributes"].update(values)
        server.put(key, json.dumps(doc).encode())

    try:
        doc = json.loads(fs.cat_file("a/zarr.json"))
        natively(native=1)

        def fault(number: int, name: str) -> str:
            if name == "put_object" and "late" not in json.loads(server.objects[key].data)["attributes"]:
                natively(late=1)  # between the look and the write
            return ""

        server.fault = fault
        doc["attributes"] = {"old": 0, "ours": 2} | ({"native": 2} if overlap else {})
        if overlap:
            with pytest.raises(OSError, match=r"attributes\.native") as caught:
                fs.pipe_file("a/zarr.json", json.dumps(doc).encode())
            assert caught.value.errno == errno.ESTALE
            assert json.loads(server.objects[key].data)["attributes"] == {"old": 0, "native": 1}
        else:
            fs.pipe_file("a/zarr.json", json.dumps(doc).encode())
            wanted = {"old": 0, "native": 1, "late": 1, "ours": 2}
            assert json.loads(server.objects[key].data)["attributes"] == wanted
            assert json.loads(fs.cat_file("a/zarr.json"))["attributes"] == wanted
    finally:
        server.fault = lambda number, name: ""
        fs.close(1)
        server.reset()


# ---- mounts


NATIVE = """
import sys, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r+")
a.resize((16, 16))
a.attrs["native"] = 1
"""
OURS = """
import sys, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r+")
print("ready", flush=True)
for line in sys.stdin:
    name, value = line.split()
    try:
        a.attrs[name] = int(value)
        print("done", flush=True)
    except OSError as e:
        print(e.errno, flush=True)
"""
SHOW = """
import json, sys, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r")
print(json.dumps([a.shape, dict(a.attrs)]))
"""
CREATE = """
import sys, zarr
zarr.create_array(sys.argv[1] + "/a", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="u1")[:] = 1
"""


def ran(script: str, path: Path) -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, path], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout or "null")


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.parametrize("opened_before", [False, True])
def test_zarr_python_on_both_sides(tmp_path: Path, opened_before: bool) -> None:
    need_fuse()
    root = tmp_path / "source"
    root.mkdir()
    ran(CREATE, root)
    with writable(root, tmp_path / "top") as mount:
        mount.mount()
        assert ran(SHOW, mount.path) == [[8, 8], {}]
        if not opened_before:
            ran(NATIVE, root)
        command = [sys.executable, "-W", "ignore", "-c", OURS, str(mount.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            stdin, stdout = client.stdin, client.stdout
            assert stdin is not None
            assert stdout is not None

            def told(line: str) -> str:
                print(line, file=stdin, flush=True)
                return str(stdout.readline()).strip()

            assert stdout.readline() == "ready\n"
            if opened_before:
                ran(NATIVE, root)
            assert told("ours 2") == "done"
            wanted = [[16, 16], {"native": 1, "ours": 2}]
            assert ran(SHOW, root) == wanted
            assert ran(SHOW, mount.path) == wanted
            assert told("more 3") == "done"
            wanted = [[16, 16], {"native": 1, "ours": 2, "more": 3}]
            assert ran(SHOW, root) == wanted
            assert ran(SHOW, mount.path) == wanted
            if opened_before:
                assert told("native 5") == str(errno.ESTALE)
                assert ran(SHOW, root) == wanted
                assert ran(SHOW, mount.path) == wanted
            stdin.close()
            assert client.wait(60) == 0
        done = mount.umount()
        assert done.returncode == (3 if opened_before else 0), done.stderr
        assert ran(SHOW, root) == wanted
