"""Arrays that get another shape while a layout shows them: chunks at the former edge have other bytes then."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st

from shardfs.codecs.transcode import Transcoder, transcoder
from shardfs.model.arrays import Array, ChunkEncoding, Codec
from shardfs.vfs.clipped_blocks import edges
from shardfs.vfs.tree import open_tree
from tests import handmade
from tests.codecs.chunk_model import Case, alike, cases, coords_of, fill_of, taken_in
from tests.conftest import client_python, need_fuse
from tests.data_bcolz import BLP, compressed
from tests.data_n5 import Index, attributes, header, sharding
from tests.datasets import ROOT
from tests.write.engines import mounted
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.write.files import WritableFile


def test_a_path_has_the_present_chunk_and_files_that_are_open_keep_their_bytes(tmp_path: Path) -> None:
    """The chunk has a number for each shape. The kernel is told once that names stand for other files."""
    store = tmp_path / "store"
    array = zarr.create_array(store, shape=(10,), chunks=(4,), shards=(8,), dtype="<u2", fill_value=5, compressors=None)
    array[:] = 3
    sizes = {9: 1, 10: 2, 11: 3, 12: 4}
    with mounted(store, tmp_path / "journal", "n5") as files:
        told: list[set[bytes]] = []
        files.tree.hooks.names_changed = lambda directory, names: told.append({*names})
        numbers: dict[int, bytes] = {}
        for count, size in enumerate((10, 11, 12, 9, 10)):
            document = json.loads(files.read("attributes.json") or b"")
            files.write("attributes.json", json.dumps({**document, "dimensions": [size]}).encode())
            assert told == [{b"0", b"1", b"2"}] * count
            present = files.tree.resolve("2")
            assert present.number not in numbers
            data = files.read("2")
            assert data is not None
            assert data.startswith(header((sizes[size],)) + b"\0\3")
            numbers[present.number] = data
            for number, former in numbers.items():
                assert files.tree.attributes(number).size == len(former)
                assert bytes(files.tree.read(number, 0, 100)) == former
        files.write("2", header((2,)) + bytes([0, 7, 0, 8]))
        document = json.loads(files.read("attributes.json") or b"")
        files.write("attributes.json", json.dumps({**document, "dimensions": [11]}).encode())
        assert files.read("2") == header((3,)) + bytes([0, 7, 0, 8, 0, 5])
        assert files.tree.resolve("2").size == 14


@pytest.mark.parametrize("call", ["write", "truncate"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_change_of_a_chunk_while_its_array_grows_is_kept(
    call: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the former shape are dropped while, or right after, another thread reads them for a change."""
    store = tmp_path / "store"
    array = zarr.create_array(store, shape=(10,), chunks=(4,), shards=(8,), dtype="<u2", fill_value=5, compressors=None)
    array[:] = 3
    with mounted(store, tmp_path / "journal", "n5") as files:
        document = json.loads(files.read("attributes.json") or b"")
        contents = files.tree._descriptions._contents
        name, wanted = ("load", "_read_whole")[moment == "before"], header((3,)) + bytes([0, 3, 0, 3, 0, 7])
        original = getattr(contents, name)

        def raced(file: WritableFile) -> Any:
            content = original(file)
            monkeypatch.undo()
            files.write("attributes.json", json.dumps({**document, "dimensions": [11]}).encode())
            return content

        number = files.tree.resolve("2").number
        handle = files.tree.open(number, os.O_RDWR)
        monkeypatch.setattr(contents, name, raced)
        if call == "truncate":
            files.tree.truncate(number, len(wanted), handle)
            assert files.tree.read(number, 0, 100) == header((3,)) + bytes([0, 3, 0, 3, 0, 5])
        files.tree.write(handle, len(wanted) - 2, bytes([0, 7]))
        files.tree.flush(handle)
        files.tree.release(handle)
        assert files.read("2") == wanted


@given(cases(), st.data())
def test_blocks_of_n5_that_a_former_edge_has_cut_are_padded(case: Case, data: st.DataObject) -> None:
    old = replace(case.array, encoding=replace(case.array.encoding, frame="n5", clipped=True))
    new = replace(old, shape=tuple(n + data.draw(st.integers(0, 5)) for n in old.shape))
    transform = transcoder(new, case.shown)
    assume(transform is not None)
    assert isinstance(transform, Transcoder)
    transform.clipped.update(edges(old))
    fill = fill_of(old.fill_value)
    elements = np.full(new.shape, fill, case.data.dtype)
    elements[tuple(map(slice, old.shape))] = case.data
    former, grown = replace(case, array=old), replace(case, array=new, data=elements)
    for cell in former.cells():
        block, coords = former.stored(cell), coords_of(old, cell)
        wanted = elements[grown.box(cell)] if case.shown.clipped else grown.padded(cell, fill)
        unsharded = bytes(transform.show(coords, block))
        assert alike(taken_in(unsharded, case.shown, wanted.shape), wanted)
        size = transform.sizes(np.array([coords], np.uint64), np.array([len(block)], np.int64))[0]
        assert size in (-1, len(unsharded))


def test_an_n5_dataset_grows_in_another_layout(tmp_path: Path) -> None:
    """The last block was cut, and has the size of a whole one only when a program writes it again."""
    store = tmp_path / "store"
    codecs = [sharding((4,), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 5}}], Index())]
    handmade.write_json(store / "attributes.json", attributes((6,), (8,), "uint16", codecs=codecs))
    with mounted(store, tmp_path / "journal", "native") as files:
        files.write("1", header((2,)) + gzip.compress(bytes([0, 3, 0, 4])))
        files.publish()
    with mounted(store, tmp_path / "journal", "zarr2") as files:
        number = files.tree.resolve("1").number
        for size in (7, 8, 100):
            document = json.loads(files.read(".zarray") or b"")
            files.write(".zarray", json.dumps({**document, "shape": [size]}).encode())
            chunk = files.read("1") or b""
            assert gzip.decompress(chunk) == bytes([0, 3, 0, 4, 0, 0, 0, 0])
            assert files.tree.attributes(number).size == files.tree.resolve("1").size == len(chunk)
        written = gzip.compress(bytes(range(8)))
        files.write("1", written)
        files.publish()
        assert files.read("1") == written
        assert files.tree.resolve("1").size == len(written)


def _grown_n5(path: Path) -> None:
    """The blocks at x = 1 and at y = 4 ended with the array before it grew."""
    codecs = [sharding((2, 2), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 5}}], Index())]
    handmade.write_json(path / "attributes.json", attributes((3, 9), (4, 4), "uint8", codecs=codecs))
    with mounted(path, path.parent / "journal", "native") as files:
        for x, y in product(range(2), range(5)):
            shape = min(2, 3 - 2 * x), min(2, 9 - 2 * y)
            files.write(f"{x}/{y}", header(shape) + gzip.compress(bytes([x + 2 * y + 1] * (shape[0] * shape[1]))))
        files.publish()
    handmade.write_json(path / "attributes.json", attributes((6, 12), (4, 4), "uint8", codecs=codecs))


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("layout", ["zarr2", "zarr3"])
def test_blocks_that_were_cut_before_the_array_grew(layout: str, writes: bool, tmp_path: Path) -> None:
    """Nothing but the block tells that it is smaller: its first reader has to open it again."""
    _grown_n5(tmp_path / "store")
    with ExitStack() as stack:
        if writes:
            tree: Any = stack.enter_context(mounted(tmp_path / "store", tmp_path / "journal", layout)).tree
        else:
            tree = open_tree(str(tmp_path / "store"), layout=layout)
        told: set[int] = set()
        setattr(tree.hooks, "reshaped" if writes else "resized", lambda numbers: told.update(numbers.tolist()))
        for y, x in product(range(5), range(2)):
            number = tree.resolve(f"{y}/{x}" if layout == "zarr2" else f"c/{y}/{x}").number
            if (y, x) in ((0, 1), (4, 0)):
                with pytest.raises(OSError, match="open it again") as caught:
                    tree.read(number, 0, 100)
                assert caught.value.errno == errno.ESTALE
            assert (number in told) is (x == 1 or y == 4)
            data = bytes(tree.read(number, 0, 100))
            assert len(data) == tree.attributes(number).size
            block = np.zeros((2, 2), "u1")
            block[: 9 - 2 * y, : 3 - 2 * x] = x + 2 * y + 1
            assert gzip.decompress(data) == block.tobytes()


@pytest.mark.fuse
@pytest.mark.parametrize("options", [(), ("--rw",)])
def test_programs_read_blocks_that_were_cut_before_the_array_grew(options: tuple[str, ...], tmp_path: Path) -> None:
    need_fuse()
    _grown_n5(tmp_path / "store")
    script = (
        "for i in 1 2; do for f in 0/0 0/1 1/1 2/1 4/0 4/1; do cat $f | gzip -dc | od -An -tx1 || exit 1; done; done"
    )
    with writable(tmp_path / "store", tmp_path, "--layout", "zarr2", *options) as mount:
        mount.mount()
        run = subprocess.run(
            ["sh", "-c", script], cwd=mount.path, capture_output=True, text=True, timeout=250, check=False
        )
        assert run.returncode == 0
        assert run.stderr.count("Stale file handle") <= 2  # the kernel may read again by itself
        assert [line.split() for line in run.stdout.splitlines()[-6:]] == [
            ["01"] * 4, ["02", "00"] * 2, ["04", "00"] * 2, ["06", "00"] * 2, ["09", "09", "00", "00"],
            ["0a", "00", "00", "00"],
        ]  # fmt: skip


def test_a_filled_chunk_disappears_with_its_filler(tmp_path: Path) -> None:
    """A program that has it open keeps its bytes."""
    document = handmade.zarr_metadata((4, 4), (4, 4), (2, 2), fill_value=5, dimension_names=["y", "x"])
    handmade.write_json(tmp_path / "store/zarr.json", document)
    with mounted(tmp_path / "store", tmp_path / "journal", "zarr2") as files:
        number = files.tree.number("1/1")
        files.write("0/1", b"abcd")
        assert files.read("1/1") == b"\5\5\5\5"
        for name, member in ((".zarray", {"shape": [6, 6]}), (".zattrs", {"_FillValue": 5})):
            files.write(name, json.dumps({**json.loads(files.read(name) or b""), **member}).encode())
        assert [files.read(name) for name in ("1/1", "2/2", "0/1")] == [None, None, b"abcd"]
        assert bytes(files.tree.read(number, 0, 4)) == b"\5\5\5\5"
        with pytest.raises(OSError, match="Stale"):
            files.tree.open(number, 0)
        files.publish()
        assert files.read("0/1") == b"abcd"


FILLED = """
import json, os, pathlib, sys, time
top, source = map(pathlib.Path, sys.argv[1:])

def change(name, **members):
    path = top / "a" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))

def read(path):
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None

def comes(wanted, *names):
    end = time.monotonic() + 100
    for name in names:
        path = top / "a" / name
        while read(path) != wanted:
            assert time.monotonic() < end, (name, wanted)
            time.sleep(0.01)

if (top / "a/.zarray").exists():
    comes(b"\\5\\5\\5\\5", "0/0", "1/1")
    comes(None, "2/0", "0/2")
    change(".zarray", shape=[6, 6])
    comes(b"\\5\\5\\5\\5", "2/0", "0/2", "2/2", "0/0")
    change(".zattrs", _FillValue=5)
    comes(None, "2/0", "0/0")
else:
    comes(b"\\0\\0\\0\\2\\0\\0\\0\\2\\0\\0\\0\\2\\5\\5\\5\\5", "0/0", "1/1")
    source.write_text(source.read_text().replace('"fill_value": 5', '"fill_value": 7'))
    change("attributes.json", user=1)
    comes(b"\\0\\0\\0\\2\\0\\0\\0\\2\\0\\0\\0\\2\\7\\7\\7\\7", "0/0", "1/1")
"""


@pytest.mark.fuse
@pytest.mark.parametrize("layout", ["zarr2", "n5"])
def test_filled_chunks_follow_shape_and_fill_value(layout: str, tmp_path: Path) -> None:
    """The kernel may have cached that a chunk does not exist, or its former bytes."""
    need_fuse()
    document = handmade.zarr_metadata((4, 4), (4, 4), (2, 2), fill_value=5, dimension_names=["y", "x"])
    handmade.write_json(tmp_path / "source/zarr.json", handmade.group_document())
    handmade.write_json(tmp_path / "source/a/zarr.json", document)
    with writable(tmp_path / "source", tmp_path, "--layout", layout) as mount:
        mount.mount()
        command = [sys.executable, "-c", FILLED, str(mount.path), str(tmp_path / "source/a/zarr.json")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        assert mount.umount().returncode == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_chunks_of_bcolz_say_how_many_rows_they_have(rows: int) -> None:
    """The last chunk is written before the length of the array, and may be too short or too long until then."""
    plain, blosc = ChunkEncoding("<u2", (0,)), (Codec("blosc", {"cname": "lz4", "clevel": 5, "shuffle": 1}),)
    view = ChunkEncoding("<u2", (0,), clipped=True, codecs=blosc, frame="bcolz")
    elements = np.arange(1, 1 + rows, dtype="<u2")
    chunk = BLP + compressed(elements.tobytes(), 2)
    padded = np.concatenate([elements, np.full(4 - rows, 9, "<u2")]).tobytes()
    assert Transcoder(Array((10,), (4,), "<u2", plain, (0,), 9), view).store((2,), chunk) == padded
    assert Transcoder(Array((12,), (4,), "<u2", view, (0,), 9), plain).show((2,), chunk) == padded
    clipped = Transcoder(Array((10,), (4,), "<u2", replace(plain, clipped=True), (0,), 9), view)
    if rows == 3:
        with pytest.raises(ValueError, match="3 rows is too large: the array has 2 there"):
            clipped.store((2,), chunk)
    else:
        assert clipped.store((2,), chunk) == padded[:4]


@pytest.mark.fuse
@pytest.mark.interop
@pytest.mark.parametrize("tool", ["n5", "bcolz"])
def test_programs_grow_an_array_whose_last_chunk_is_not_full(tool: str, tmp_path: Path) -> None:
    need_fuse()
    if tool == "n5":
        pytest.importorskip("z5py")
    python = sys.executable if tool == "n5" else str(client_python("bcolz"))
    array = zarr.create_group(tmp_path / "source").create_array("a", shape=(10,), chunks=(4,), shards=(8,), dtype="<u2")
    array[:] = 3
    with writable(tmp_path / "source", tmp_path, "--layout", tool) as mount:
        mount.mount()
        command = [python, "-W", "ignore", "-m", "tests.clients.grow_in_layout", tool, str(mount.path)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        assert mount.umount().returncode == 0
    nine = [3] * 9
    grown = [[3, *nine], [*nine, 8, 0], [*nine, 8, 0, 0], nine, [*nine, 8, 6], [*nine, 8, 6]]
    rows = [3] * 10
    appended = [rows := (rows + [size] * size)[: size if size < 0 else None] for size in (1, 3, 1, -2, -3, 6)]
    expected = grown if tool == "n5" else appended
    assert json.loads(run.stdout) == expected
    assert np.asarray(zarr.open_array(tmp_path / "source/a")[:]).tolist() == expected[-1]
