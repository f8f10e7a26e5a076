"""Chunks that are written through a layout: what is shown after a close is what the shard will have."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.fuse.invalidation import AttributeCache, Notices
from shardfs.storage.source_locks import journal_directory
from shardfs.vfs.tree import open_tree
from shardfs.write import recover, writeback
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.stored import ANYTHING
from tests import data_n5, handmade
from tests.data_bcolz import BLP, compressed
from tests.data_zarr_transformer import Cells, array_document, named, pack_shards, write_hierarchy
from tests.data_zarr_transformer import sharding as transformer
from tests.datasets import BLOSC, ROOT
from tests.mount.programs import shardfs
from tests.waiting import wait_until
from tests.write.engines import TreeFiles, mounted
from tests.write.places import NEW, Place
from tests.write.targets import LAYOUTS, Target, read_tensorstore, write_tensorstore

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


@pytest.fixture(params=LAYOUTS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(LAYOUTS[request.param], tmp_path, 2)


def test_they_are_shown_again_after_a_kill(place: Place) -> None:
    with place.mount() as files:
        place.put(files, 0, 1, 5)
        files.die()
    with place.mount() as files:
        place.shown(files)
        files.patch(place.target.path(1), 0, place.target.shown(NEW + 7))
        place.held[1] = NEW + 7
        files.die()
    with place.mount() as files:
        place.shown(files)
        files.publish()
        place.shown(files)
    place.natively()


def _closed(files: TreeFiles, path: str, data: bytes) -> str:
    scratch = f"{path}.0123456789abcdef0123456789abcdef.partial"
    files.write(scratch, data)
    return scratch


def test_files_become_chunks_when_they_are_renamed_and_chunks_become_others(place: Place) -> None:
    target = place.target
    with place.mount() as files:
        for n in (0, 1):
            place.held[n] = NEW + n
        files.rename(_closed(files, target.path(0), target.shown(NEW)), target.path(0))
        files.write_locked(target.path(1), target.shown(NEW + 1))
        place.shown(files)
        files.rename(target.path(0), target.path(3))  # pending
        files.rename(target.path(2), target.path(5))  # stored
        files.link(target.path(1), target.path(7))
        place.held |= {3: place.held.pop(0), 5: place.held.pop(2), 7: place.held[1]}
        place.shown(files)
        files.rename(target.path(4), f"{target.path(4)}.partial")
        assert files.read(f"{target.path(4)}.partial") == target.shown(place.held[4])
        files.rename(f"{target.path(4)}.partial", target.path(4))
        files.die()
    with place.mount() as files:
        place.shown(files)
        files.publish()
        place.shown(files)
    place.natively()


@pytest.mark.parametrize("name", ["big_as_n5", "turned_as_n5"])
def test_wrong_bytes_are_refused_and_the_old_chunk_stays(name: str, tmp_path: Path) -> None:
    place = Place(LAYOUTS[name], tmp_path, 2)
    path, data = place.target.path(0), place.target.shown(NEW)
    with place.mount() as files:
        for wrong in (data[:-1], data + b"x", b"x" * len(data)):
            with pytest.raises(OSError, match=r".+") as caught:
                files.write(path, wrong)
            assert caught.value.errno == errno.EINVAL
            assert files.read(path) == place.target.shown(place.held[0])
        assert files.tree.state()["refused"] == 1
        scratch = _closed(files, path, data[:-1])
        with pytest.raises(OSError, match=r".+") as caught:
            files.rename(scratch, path)
        assert caught.value.errno == errno.EINVAL
        assert files.read(scratch) == data[:-1]
        files.unlink(scratch)
        place.shown(files)
        place.put(files, 0)
        assert files.tree.state()["refused"] == 0
        files.publish()
    place.natively()


def test_a_removed_chunk_stays_removed_when_wrong_bytes_are_refused(tmp_path: Path) -> None:
    """Its shard still has it: the removal waits in the journal."""
    place = Place(LAYOUTS["turned_as_n5"], tmp_path, 2)
    path = place.target.path(0)
    with place.mount() as files:
        files.unlink(path)
        del place.held[0]
        with pytest.raises(OSError, match=r".+"):
            files.write(path, b"x")
        assert files.read(path) is None
        assert path.rpartition("/")[2] not in {
            name.decode() for batch in files.tree.scan(files._parent(path)[0]) for name in batch.names.tolist()
        }
        files.publish()
        assert files.read(path) is None
    place.natively()


def test_an_empty_file_waits_for_its_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may truncate a chunk, close the file, and open it again. The old chunk stays in its shard meanwhile."""
    monkeypatch.setattr(writeback, "EMPTY_NS", 0)
    empty = [place.target.path(n) for n in (0, 1, 2)]
    with place.mount() as files:
        for path in empty:
            files.write(path, b"")
        files.publish()
        assert {*files.tree.state()["errors"]} == {*empty}
        files.die()
    place.natively()
    with place.mount() as files:
        assert [files.read(path) for path in empty] == [b"", b"", b""]
        assert b"empty" in files.tree.xattrs(files.tree.number(empty[0]))["user.shardfs.error"]
        files.patch(empty[0], 0, place.target.shown(NEW))
        place.held[0] = NEW
        files.unlink(empty[1])
        files.unlink(empty[2])
        del place.held[2]
        files.publish()
        assert files.tree.state()["errors"] == {}
    place.natively()


def test_bytes_in_the_journal_without_a_note_are_those_of_the_file(place: Place) -> None:
    """They were written before a document said what they are, or by a former shardfs."""
    meta = {
        "mtime_ns": 1,
        "mode": 0o644,
        "scratch": False,
        "base": ANYTHING.to_json(),
        "layout": f"layout={place.target.layout}",
    }
    journal = Journal.open(place.journal, str(place.store), limit_bytes=64 << 20, commit_s=0)
    journal.append(RecordKind.PUT, {"path": place.target.path(0), **meta}, place.target.shown(NEW))
    journal.append(RecordKind.PUT, {"path": place.target.path(2), **meta}, b"no chunk")
    journal.close(clean=False)
    with place.mount() as files:
        assert files.read(place.target.path(0)) == place.target.shown(NEW)
        if place.target.name == "zstd_as_zarr2":
            files.unlink(place.target.path(2))
            del place.held[2]
            files.publish()
        else:
            with pytest.raises(OSError, match=r"bytes|N5|zstd"):
                files.publish()
        place.held[0] = NEW
        assert files.read(place.target.path(0)) == place.target.shown(NEW)
    place.natively()


# ---- layouts and journals ----


def test_a_mount_with_another_layout_waits_until_all_is_published(tmp_path: Path) -> None:
    place = Place(LAYOUTS["turned_as_n5"], tmp_path, 2)
    with place.mount() as files:
        place.put(files, 0)
        files.unlink(place.target.path(2))
        files.die()
    del place.held[2]
    assert recover.read(place.journal).layout == "layout=n5"
    for layout in ("native", "zarr2"):
        other = Place.__new__(Place)
        other.__dict__ |= {**place.__dict__, "target": _with_layout(place.target, layout)}
        with pytest.raises(OSError, match="were written with -o layout=n5: ") as caught, other.mount():
            pass
        assert caught.value.errno == errno.EBUSY
    with place.mount() as files:
        place.shown(files)
        files.publish()
    place.natively()
    with other.mount():
        pass


def _with_layout(target: Target, layout: str) -> Target:
    return replace(target, layout=layout)


def test_recover_needs_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = Place(LAYOUTS["turned_as_n5"], tmp_path, 2)
    place.journal.rmdir()
    place.journal = journal_directory(str(place.store))
    place.journal.mkdir(mode=0o700, parents=True)
    with place.mount() as files:
        place.put(files, 0, 1)
        files.die()
    listed = shardfs("recover", place.store, "--json")
    assert json.loads(listed.stdout.splitlines()[0])["layout"] == "layout=n5"
    assert shardfs("recover", place.store, "--apply").returncode == 0
    place.natively()


def test_the_warning_about_unpublished_files_names_their_layout(tmp_path: Path) -> None:
    place = Place(LAYOUTS["turned_as_n5"], tmp_path, 2)
    place.journal.rmdir()
    place.journal = journal_directory(str(place.store), tmp_path)
    place.journal.mkdir(mode=0o700)
    with place.mount() as files:
        place.put(files, 0, 1)
        files.die()
    warning = recover.unpublished_warning(str(place.store), tmp_path)
    assert warning is not None
    assert "2 unpublished files, not shown here" in warning
    assert warning.endswith("a writable mount with -o layout=n5 publishes them")


# ---- what is shown is not what was written ----


class Array:
    """An array of uint16 in chunks of (4, 4), and its journal."""

    def __init__(
        self, top: Path, layout: str, shape: tuple[int, int], shard: tuple[int, int] | None, **more: Any
    ) -> None:
        self.store, self.layout, self.journal = top / "store", layout, top / "journal"
        document = handmade.zarr_metadata(shape, shard or (4, 4), (4, 4), data_type="uint16", **more)
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if shard is None:
            document["codecs"] = codecs
        else:
            document["codecs"][0]["configuration"]["codecs"] = codecs
        handmade.write_json(self.store / "zarr.json", document)
        self.data = np.arange(1, 1 + shape[0] * shape[1], dtype="<u2").reshape(shape)

    def fill(self) -> None:
        write_tensorstore("zarr3", self.store, self.data)

    def mount(self) -> AbstractContextManager[TreeFiles]:
        return mounted(self.store, self.journal, self.layout)

    def natively(self) -> None:
        np.testing.assert_array_equal(read_tensorstore("zarr3", self.store), self.data)


def _volume(encoding: str, data_type: str) -> dict[str, Any]:
    scale: dict[str, Any] = {"key": "8_8_40", "size": [6, 5, 1], "chunk_sizes": [[4, 4, 1]], "voxel_offset": [0, 0, 0]}
    scale |= {"encoding": encoding, "resolution": [8, 8, 40], "sharding": handmade.sharding(minishard=1, shard=1)}
    info = {"@type": "neuroglancer_multiscale_volume", "type": "image", "data_type": data_type, "num_channels": 1}
    return {**info, "scales": [scale]}


def test_chunks_of_lossy_encodings_cannot_be_opened_for_writing(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    handmade.write_json(tmp_path / "store/info", _volume("jpeg", "uint8"))
    with mounted(tmp_path / "store", tmp_path / "journal", "zarr2") as files:
        with pytest.raises(OSError, match="jpeg") as caught:
            files.write("8_8_40/0/0/0", bytes(16))
        assert caught.value.errno == errno.EROFS
        assert files.read("8_8_40/0/0/0") is None


def test_padding_is_shown_as_it_will_be_in_the_shard(tmp_path: Path) -> None:
    """Precomputed chunks end with the volume, and Zarr's do not: whatever is in the padding is lost at close."""
    data = np.arange(1, 31, dtype="<u2").reshape(1, 5, 6)
    store = tmp_path / "store"
    handmade.write_json(store / "info", _volume("raw", "uint16"))
    write_tensorstore("neuroglancer_precomputed", store, data.T[..., None])
    chunk = np.full((1, 4, 4), 7, "<u2")
    padded = np.zeros_like(chunk)
    padded[:, :1, :2] = 7
    with mounted(store, tmp_path / "journal", "zarr2") as files:
        dropped: list[int] = []
        files.tree.hooks.invalidate_content = dropped.append
        path = "8_8_40/0/1/1"
        parent, name = files._parent(path)
        handle = files.tree.open(files.tree.lookup(parent, name).number, os.O_RDWR)
        files.tree.write(handle, 0, memoryview(chunk.tobytes()))
        number = files.tree.resolve(path).number
        assert files.read(path) == chunk.tobytes()
        files.tree.flush(handle)
        assert files.read(path) == padded.tobytes(), "as soon as it is closed, and not only when it is released"
        assert dropped == [number]
        files.tree.release(handle)
        assert files.read(path) == padded.tobytes()
        files.publish()
        assert files.read(path) == padded.tobytes()
    data[:, 4:, 4:] = 7
    np.testing.assert_array_equal(read_tensorstore("neuroglancer_precomputed", store)[..., 0].T, data)


def test_chunks_that_cloudvolume_compresses(tmp_path: Path) -> None:
    """Any source has the names `X.gz` in this layout, and no source in another."""
    array = Array(tmp_path, "precomputed", (8, 8), (8, 8))
    array.fill()
    chunk = np.full((4, 4), 9, "<u2").tobytes()
    with array.mount() as files:
        files.write("1_1_1/0-4_4-8_0-1.gz", gzip.compress(chunk))
        assert files.read("1_1_1/0-4_4-8_0-1") == chunk
        with pytest.raises(OSError, match=r".+") as caught:
            files.write("1_1_1/0-4_0-4_0-1.gz", gzip.compress(chunk[1:]))
        assert caught.value.errno == errno.EINVAL
        files.publish()
        assert files.read("1_1_1/0-4_4-8_0-1") == chunk
        assert files.read("1_1_1/0-4_4-8_0-1.gz") is None
    array.data[4:, :4] = 9
    array.natively()
    assert sorted(p.name for p in array.store.rglob("*") if p.is_file()) == ["0", "zarr.json"]
    array.layout = "zarr2"
    with array.mount() as files:
        number, name = files._parent("0/0.gz")
        assert files.tree.source_tree.classify_name(number, name).target is None


def test_a_file_has_outdated_pages_until_the_notice_is_sent() -> None:
    """A program that opens it until then must not get them: OPEN is answered without FOPEN_KEEP_CACHE."""
    cache, (reader, writer) = AttributeCache(), os.pipe()
    notices = Notices(writer)
    notices.start()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 12))
    os.set_blocking(writer, True)
    for _ in range(2):
        notices.queue([b"a notice"], cache.drop_pages(7))
    time.sleep(0.05)
    assert 7 in cache.dropping
    os.close(reader)  # the thread gets an error
    wait_until(lambda: 7 not in cache.dropping)
    os.close(writer)


@pytest.mark.parametrize("layout", ["zarr2", "n5"])
def test_arrays_without_shards_are_written_too(layout: str, tmp_path: Path) -> None:
    array = Array(tmp_path, layout, (6, 8), None)
    array.fill()
    big = array.data.astype(">u2") if layout == "n5" else array.data
    chunk = np.full((4, 4), 9, big.dtype)
    with array.mount() as files:
        path = "1/0" if layout == "n5" else "0/1"
        header = data_n5.header((4, 4)) if layout == "n5" else b""
        files.write(path, header + chunk.tobytes())
        files.unlink("0/0")
        assert (files.read(path), files.read("0/0")) == (header + chunk.tobytes(), None)
        files.publish()
        assert (files.read(path), files.read("0/0")) == (header + chunk.tobytes(), None)
    array.data[:4, 4:], array.data[:4, :4] = 9, 0
    array.natively()
    assert sorted(p.name for p in (array.store / "c/0").iterdir()) == ["1"]


def test_a_chunk_that_is_shown_though_it_is_not_stored(tmp_path: Path) -> None:
    """Removing it has no effect, writing it stores it, and removing it then shows the filled one again."""
    array = Array(tmp_path, "zarr2", (8, 8), (8, 8), dimension_names=["y", "x"], fill_value=3)
    array.data[...] = 3
    filled, chunk = np.full((4, 4), 3, "<u2").tobytes(), np.full((4, 4), 9, "<u2").tobytes()
    with array.mount() as files:
        assert files.read("0/0") == filled
        files.unlink("0/0")
        assert files.read("0/0") == filled
        files.write("0/0", chunk)
        files.patch("0/1", 0, chunk)
        assert (files.read("0/0"), files.read("0/1")) == (chunk, chunk)
        files.publish()
        assert (files.read("0/0"), files.read("0/1")) == (chunk, chunk)
        files.unlink("0/0")
        files.publish()
        assert files.read("0/0") == filled
    array.data[:4, 4:] = 9
    array.natively()


def test_a_hierarchy_of_the_draft_in_a_directory(tmp_path: Path) -> None:
    """The layout shows `hierarchy/data/root/a` as `hierarchy/a`."""
    array = array_document((8,), (2,), transformer(2))
    cells: Cells = {(i,): bytes((2 * i, 2 * i + 1)) for i in range(4)}
    shards = {f"a/{name}": data for name, data in named(pack_shards(cells, (2,))).items()}
    write_hierarchy(tmp_path / "store/hierarchy", {"a": array}, shards)
    for token in (b"xy", b"zz"):
        with mounted(tmp_path / "store", tmp_path / "journal", "zarr2") as files:
            assert files.read("hierarchy/a/.zarray") is not None
            files.write("hierarchy/a/2", token)
            assert files.read("hierarchy/a/2") == token
            assert b"2" in {name for batch in files.tree.scan(files.tree.number("hierarchy/a")) for name in batch.names}
            if token == b"zz":
                files.publish()
            else:
                files.die()
    native = open_tree(str(tmp_path / "store"))
    numbers = [native.resolve(f"hierarchy/data/root/a/c{i}").number for i in range(4)]
    assert [bytes(native.read(number, 0, 2)) for number in numbers] == [b"\0\1", b"\2\3", b"zz", b"\6\7"]


DRAFT_CALLS: dict[str, Callable[[TreeFiles, str], object]] = {
    "create": lambda files, at: files.write(f"{at}/new", b"x"),
    "mkdir": lambda files, at: files.tree.mkdir(*files._parent(f"{at}/new"), 0o755),
    "a document": lambda files, at: files.write(f"{at}/.zgroup2", b"{}"),
    "unlink": lambda files, at: files.unlink("h/g/notes"),
    "truncate": lambda files, at: files.write("h/g/notes", b"y"),
    "write": lambda files, at: files.patch("h/g/notes", 0, b"y"),
    "rmdir": lambda files, at: files.tree.rmdir(*files._parent("h/g/sub")),
    "rename": lambda files, at: files.rename("h/g/notes", "elsewhere"),
    "rename of a directory": lambda files, at: files.rename("h/g/sub", "elsewhere"),
    "rename into": lambda files, at: files.rename("plain", f"{at}/new"),
    "rename of a chunk": lambda files, at: files.rename("h/g/a/0", f"{at}/new"),
    "rename of all": lambda files, at: files.rename("h", "elsewhere"),
}


def test_other_files_in_a_hierarchy_of_the_draft_are_read_only(tmp_path: Path) -> None:
    """The layout shows them at another path. Nothing is done half."""
    store = tmp_path / "store"
    write_hierarchy(store / "h", {"g/a": array_document((8,), (2,), transformer(2))}, {})
    (store / "h/data/root/g/sub").mkdir(parents=True)
    (store / "h/data/root/g/notes").write_text("x")
    (store / "plain").write_text("x")
    with mounted(store, tmp_path / "journal", "zarr2") as files:
        files.write("h/g/a/0", b"ab")  # the source has no directory for it yet
        files.publish()
        before = {path: path.is_file() and path.read_bytes() for path in store.rglob("*")}
        for name, directory in product(DRAFT_CALLS, ["h", "h/g", "h/g/a"]):
            with pytest.raises(OSError, match="another path") as caught:
                DRAFT_CALLS[name](files, directory)
            assert caught.value.errno == errno.EROFS, name
        with pytest.raises(PermissionError, match="layouts cannot change that"):
            files.unlink("h/g/a/.zarray")
        files.tree.set_mode(files.tree.number("h/g"), 0o700)
        files.publish()
        assert files.read("h/g/notes") == b"x"
        assert files.read("h/g/a/0") == b"ab"
        assert before == {path: path.is_file() and path.read_bytes() for path in store.rglob("*")}


def test_bcolz_clips_the_last_chunk_when_it_flushes(tmp_path: Path) -> None:
    """Zarr v3's chunk there is full, and shown so; the rows of the array are stored, whichever size is written."""
    array = Array(tmp_path, "bcolz", (6, 4), None)
    document = json.loads((array.store / "zarr.json").read_text())
    document["codecs"].append({**BLOSC, "configuration": {**BLOSC["configuration"], "typesize": 2}})
    handmade.write_json(array.store / "zarr.json", document)
    array.fill()
    for rows in (2, 4):
        last = np.full((rows, 4), rows, "<u2")
        with array.mount() as files:
            files.write("data/__1.blp", BLP + compressed(last.tobytes(), 2))
            with pytest.raises(OSError, match="Blosc chunk of 16 decoded bytes"):
                files.write("data/__1.blp", BLP + compressed(last[:1].tobytes()[:-2], 2))
            files.publish()
        array.data[4:] = rows
        array.natively()


def test_a_file_that_is_shown_as_an_array(tmp_path: Path) -> None:
    """Its directory can be synced, and bcolz may write the compressed size that it has computed."""
    (tmp_path / "store").mkdir()
    shutil.copy(ROOT / "tests/golden/bloscpack/array-2d.blp", tmp_path / "store/a.blp")
    with mounted(tmp_path / "store", tmp_path / "journal", "bcolz") as files:
        files.tree.sync_directory(files.tree.number("a.blp"))
        sizes = json.loads(files.read("a.blp/meta/sizes") or b"")
        files.write("a.blp/meta/sizes", json.dumps({**sizes, "cbytes": 1}).encode())
        with pytest.raises(OSError, match="shape"):
            files.write("a.blp/meta/sizes", json.dumps({**sizes, "shape": [21, 15]}).encode())
    with mounted(tmp_path / "store", tmp_path / "journal", "precomputed") as files:
        files.tree.sync_directory(files.tree.number("a.blp/1_1_1"))
