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

from shardfs.vfs.tree import open_tree
from shardfs.write import recover
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests import data_n5, data_zarr_transformer, handmade
from tests.conftest import need_fuse
from tests.mount.programs import shardfs
from tests.write.engines import TreeFiles
from tests.write.mounts import writable
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.blobs import Stat
    from shardfs.model.changes import Change

    Json = dict[str, Any]

ZARR = handmade.zarr_metadata((7, 10), (4, 6), (2, 3)) | {"data_type": "uint8", "attributes": {"old": 0}}
GROUP = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {"old": 0},
    "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {"a": ZARR}},
}
N5 = data_n5.attributes(
    (8, 8), (4, 4), "uint8", codecs=[data_n5.sharding((2, 2), [{"name": "n5bytes"}], data_n5.Index())]
)
INFO = handmade.volume_info((8, 8, 8), (4, 4, 4), handmade.sharding(minishard=0, shard=1))
DRAFT = data_zarr_transformer.array_document((8,), (2,), data_zarr_transformer.sharding(2))
DRAFT_ROOT = data_zarr_transformer.ROOT_DOCUMENT
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
        own_journal = Journal.open(self.journal, str(self.root), limit_bytes=8 << 20, commit_s=0)
        publishing = Publishing(idle_s=1e6, age_s=1e6, **settings)
        tree = open_write_tree(open_tree(str(self.root)), own_journal, publishing=publishing)
        try:
            yield Client(self, TreeFiles(tree, own_journal))
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


def refused(client: Client, doc: Json, *, by_rename: bool = False, **values: Any) -> str:
    """Why the document is refused; the source is as it was."""
    before = (client.source.root / client.source.stored).read_bytes()
    with pytest.raises(OSError, match="read it again") as caught:
        client.write(doc, by_rename=by_rename, **values)
    assert caught.value.errno == errno.ESTALE
    assert (client.source.root / client.source.stored).read_bytes() == before
    return str(caught.value.strerror)


@pytest.mark.parametrize("by_rename", [False, True])
def test_what_another_program_changed_unseen_is_not_overwritten(
    source: Source, by_rename: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(native=1)
        for _ in range(2):  # the kernel repeats a rename that ended with ESTALE
            refused(client, doc, by_rename=by_rename, ours=2)
        assert "another program has changed" in caplog.text
        assert "ours" not in source.members(source.native())
        assert client.tree.left() == [source.shown]
        again = client.read()
        assert source.members(again).items() >= {"native": 1}.items()
        client.write(again, by_rename=by_rename, ours=3)
        assert source.members(source.native()).items() >= {"native": 1, "ours": 3}.items()
        assert client.free().items() >= {"native": 1, "ours": 3}.items()
    (entry,) = (e for e in recover.read(source.journal).entries if e.state != "scratch")
    assert (entry.path, entry.state) == (source.shown, "conflict")


ORDERS = {
    "native read write": True,
    "read native write": False,
    "read write native write": False,  # zarr-python does not read again what it has written
    "read write native read write": True,
    "read native other write": False,
    "read write native other write": False,
    "read native other native other write": False,
    "read native native read write": True,
    "read write write": True,
    "read other write": True,
}
"""Programs read and write on the mount, and one changes the source natively: whether the last write is accepted."""


@pytest.mark.parametrize("order", list(ORDERS))
def test_each_order_of_two_programs(source: Source, order: str) -> None:
    """`other` is another program that reads on the mount what the first one does not know."""
    *before, _ = order.split()
    doc: Json = {}
    with source.opened() as client:
        for number, event in enumerate(before):
            if event == "native":
                source.natively(native=number)
            elif event == "write":
                values: Json = {f"ours{number}": number}
                doc = json.loads(client.edited(doc, **values))
                client.write(doc)
            elif event == "read":
                doc = client.read()
            else:
                client.read()
        if ORDERS[order]:
            client.write(doc, last=1)
            assert source.members(source.native())["last"] == 1
        else:
            refused(client, doc, last=1)
            refused(client, doc)  # as it was read
            assert "last" not in source.members(source.native())
        assert ("native" in source.members(source.native())) is ("native" in order)


def shape(doc: Json, length: int) -> Json:
    return {**doc, "shape": [length, *doc["shape"][1:]]}


@pytest.mark.parametrize(("resized", "cached"), [(14, [7, 8, 13]), (5, [7, 6])])
def test_a_native_resize_is_not_undone(zarr: Source, resized: int, cached: list[int]) -> None:
    """By a program that has the array open since before, and resizes it, or sets an attribute."""
    with zarr.opened() as client:
        doc = client.read()
        (zarr.root / zarr.stored).write_text(json.dumps(shape(zarr.native(), resized)))
        for reads in (False, True):
            if reads:
                again = client.read()
            for length in cached:
                refused(client, shape(doc, length), ours=1)
        assert zarr.native()["shape"][0] == resized
        client.write(shape(again, 21), ours=1)  # a program that has read the document extends the array
        assert zarr.native()["shape"][0] == 21
        assert "shape.0" in refused(client, doc, ours=2)


def test_values_that_another_program_replaced_are_not_given_back(zarr: Source) -> None:
    with zarr.opened() as client:
        client.write(client.read(), removed=1, list=[1, 2], other={"a": 1, "b": "x"})
        doc = client.read()
        native = zarr.native()
        native["attributes"] = {"old": 0, "list": [1, 2, 3], "other": {"a": 1, "b": "y"}, "new": {"deep": True}}
        (zarr.root / zarr.stored).write_text(json.dumps(native))
        again = client.read()
        why = refused(client, doc, ours=1)
        members = "attributes.list.2, attributes.new.deep, attributes.other.b, attributes.removed"
        assert f"a former value of {members}" in why
        client.write(again, old=5, list=[1, 2, 4], other={"a": 1, "b": "z"}, removed=2)
        assert zarr.members(zarr.native())["list"] == [1, 2, 4]


def test_removing_a_document_ends_what_is_known_of_it(zarr: Source) -> None:
    with zarr.opened() as client:
        doc = client.read()
        zarr.natively(native=1)
        client.read()
        client.files.unlink(zarr.shown)
        client.write(doc, ours=2)
        assert zarr.members(zarr.native()) == {"old": 0, "ours": 2}


def test_the_same_document_is_no_conflict(source: Source) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(both=1)
        client.write(doc, both=1)
        assert client.tree.left() == []
        client.write(doc, both=1, ours=2)
        assert source.members(source.native()).items() >= {"both": 1, "ours": 2}.items()
        refused(client, doc, ours=2)  # a third program


@pytest.mark.parametrize("ours", [False, True])
def test_a_user_decides(source: Source, ours: bool) -> None:
    with source.opened() as client:
        doc = client.read()
        source.natively(both=1, native=1)
        refused(client, doc, both=2, ours=2)
    with source.opened() as client:
        assert client.free()["both"] == 1
        assert client.tree.left() == [source.shown]
    recover.decide(source.journal, *(([source.shown], []) if ours else ([], [source.shown])))
    with source.opened() as client:
        assert client.tree.left() == []
        wanted = {"both": 2, "ours": 2} if ours else {"both": 1, "native": 1}
        for present in (client.free(), source.members(source.native())):
            assert {name: present[name] for name in ("both", "ours", "native") if name in present} == wanted


@pytest.mark.parametrize("also_read", [False, True])
def test_ours_wins_if_asked(source: Source, also_read: bool, caplog: pytest.LogCaptureFixture) -> None:
    with source.opened(conflict="ours") as client:
        doc = client.read()
        source.natively(both=1, native=1)
        if also_read:
            client.read()
        client.write(doc, both=2)
        present = source.members(source.native())
        assert (present["both"], "native" in present) == (2, False)
        assert "the document written here replaces it (conflict=ours)" in caplog.text
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
        for ours in (client.edited({**ZARR, "codecs": [{"name": "bytes"}]}, ours=1), b"{}"):
            with pytest.raises(OSError, match="read it again") as caught:
                client.files.write("new/zarr.json", ours)
            assert caught.value.errno == errno.ESTALE
        assert json.loads(new.read_text()) == theirs
        client.files.write("new/zarr.json", json.dumps(theirs, indent=1).encode())  # both programs say the same
        assert client.files.read("new/zarr.json") is not None
        client.files.write("new/zarr.json", json.dumps({**theirs, "attributes": {"theirs": 1, "ours": 2}}).encode())
        assert json.loads(new.read_text())["attributes"] == {"theirs": 1, "ours": 2}


@pytest.mark.parametrize(
    "source", [name for name in FORMATS if name != "bcolz"], indirect=True
)  # it is shown without being stored
def test_what_others_removed_is_not_made_anew(source: Source) -> None:
    with source.opened() as client:
        doc = client.read()
        (source.root / source.stored).unlink()
        with pytest.raises(
            OSError, match="has removed or replaced the document since it was read here; read it again"
        ) as caught:
            client.write(doc, ours=1)
        assert caught.value.errno == errno.ESTALE
        assert not (source.root / source.stored).exists()
        assert client.tree.left() == [source.shown]


def test_a_document_that_contradicts_the_chunks_is_refused(zarr: Source) -> None:
    with zarr.opened() as client:
        doc = client.read()
        zarr.natively(native=1)
        refused(client, {**doc, "data_type": "uint16"})
        with pytest.raises(OSError, match="data type") as caught:
            client.write({**client.read(), "data_type": "uint16"})
        assert caught.value.errno == errno.EINVAL


def test_no_document_is_overwritten_that_comes_between_the_look_and_the_write(
    zarr: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zarr.opened() as client:
        doc = client.read()
        update = client.tree.writer.update

        def late(key: str, change: Change) -> Stat | None:
            monkeypatch.undo()
            zarr.natively(native=1)
            return update(key, change)

        monkeypatch.setattr(client.tree.writer, "update", late)
        with pytest.raises(OSError, match="read it again"):
            client.write(doc, ours=2)
        assert zarr.members(zarr.native()) == {"old": 0, "native": 1}
        assert client.free() == {"old": 0, "native": 1}


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


# ---- mounts


NATIVE = """
import sys, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r+")
a.resize((16, 8))
a.attrs["native"] = 1
"""
OURS = """
import sys, numpy, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r+")
print("ready", flush=True)
for line in sys.stdin:
    name, value = line.split()
    try:
        if name == "append":
            a.append(numpy.full((int(value), 8), 2, "u1"))
        else:
            a.attrs[name] = int(value)
        print("done", flush=True)
    except OSError as e:
        print(e.errno, flush=True)
"""
SHOW = """
import json, sys, zarr
a = zarr.open_array(sys.argv[1] + "/a", mode="r")
print(json.dumps([a.shape, dict(a.attrs), a[:, 0].tolist()]))
"""
CREATE = """
import sys, zarr
zarr.create_array(sys.argv[1] + "/a", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="u1")[:] = 1
"""


def ran(script: str, path: Path) -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, path], capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout or "null")


@contextmanager
def program(path: Path) -> Iterator[Callable[[str], str]]:
    """zarr-python with the array open: the function has it append rows or set an attribute; `done`, or the errno."""
    command = [sys.executable, "-W", "ignore", "-c", OURS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        stdin, stdout = client.stdin, client.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(line: str) -> str:
            print(line, file=stdin, flush=True)
            return str(stdout.readline()).strip()

        assert stdout.readline() == "ready\n"
        yield ask
        stdin.close()
        assert client.wait(60) == 0


@pytest.mark.fuse
@pytest.mark.interop
def test_zarr_python_on_both_sides(tmp_path: Path) -> None:
    """It reads the document of an array once, and writes it for each attribute and each `append`."""
    need_fuse()
    root = tmp_path / "source"
    root.mkdir()
    ran(CREATE, root)
    with writable(root, tmp_path / "top") as mount:
        mount.mount()
        with program(mount.path) as before:
            assert [before(line) for line in ("append 2", "ours 1", "append 2", "ours 2")] == ["done"] * 4
            assert mount.flush().returncode == 0
            assert ran(SHOW, root) == [[12, 8], {"ours": 2}, [1] * 8 + [2] * 4]
            ran(NATIVE, root)
            wanted = [[16, 8], {"ours": 2, "native": 1}, [1] * 8 + [2] * 4 + [0] * 4]
            for also_read in (False, True):
                if also_read:
                    assert ran(SHOW, mount.path) == wanted
                for line in ("ours 2", "ours 3", "append 2", "native 1"):
                    assert before(line) == str(errno.ESTALE), line
                assert ran(SHOW, root) == wanted
            with program(mount.path) as after:
                assert [after(line) for line in ("append 2", "ours 5", "native 6")] == ["done"] * 3
            wanted = [[18, 8], {"ours": 5, "native": 6}, [*wanted[2], 2, 2]]
            assert ran(SHOW, mount.path) == wanted
            assert before("more 3") == str(errno.ESTALE)
        completed = mount.umount()
        assert (completed.returncode, "a/zarr.json" in completed.stderr) == (3, True), completed.stderr
        assert ran(SHOW, root) == wanted
        completed = shardfs("recover", root, "--theirs", "a/zarr.json", "-o", f"journal={mount.journal}")
        assert completed.returncode == 0, completed.stderr


APPEND = """
import sys, warnings, numpy, xarray
warnings.simplefilter("ignore")
for start in (0, 4, 8):
    rows = xarray.DataArray(numpy.arange(start, start + 4), dims="x", name="values", attrs={"rows": start + 4})
    how = {"append_dim": "x"} if start else {"mode": "w"}
    rows.to_dataset().to_zarr(sys.argv[1] + "/table", consolidated=True, zarr_format=3, **how)
"""
ROWS = """
import json, sys, zarr
group = zarr.open_group(sys.argv[1] + "/table", mode="r")
print(json.dumps([group["values"].shape, group["values"][:].tolist()]))
"""


@pytest.mark.fuse
@pytest.mark.interop
def test_xarray_appends_while_no_other_program_writes(tmp_path: Path) -> None:
    """It writes the document of the array, and the consolidated one, once for each append."""
    pytest.importorskip("xarray")
    root = tmp_path / "source"
    root.mkdir()
    with writable(root, tmp_path / "top", "--create", "zarr3:chunks_per_shard=2") as mount:
        mount.mount()
        ran(APPEND, mount.path)
        assert ran(ROWS, mount.path) == [[12], list(range(12))]
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
    assert ran(ROWS, root) == [[12], list(range(12))]
    assert "sharding_indexed" in (root / "table/values/zarr.json").read_text()
