"""Another program changes the documents of an array while programs have its files, directories and listings open."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from shardfs.vfs.tree import open_tree
from tests import handmade
from tests.conftest import need_fuse
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Mounted

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

LITTLE, BIG = ({"name": "bytes", "configuration": {"endian": endian}} for endian in ("little", "big"))
GZIP = {"name": "gzip", "configuration": {"level": 5}}
FORMER: dict[str, Any] = {
    "value": 100,
    "codecs": [LITTLE],
    "index_codecs": [LITTLE],
    "chunk": 2,
    "fill_value": 0,
    "shape": 8,
}

CHANGES: dict[str, dict[str, Any]] = {
    "endianness": {"codecs": [BIG]},
    "codecs": {"codecs": [LITTLE, GZIP]},
    "index_codecs": {"index_codecs": [LITTLE, {"name": "crc32c"}]},
    "chunk": {"chunk": 4},
    "fill_value": {"fill_value": 7, "value": 0},
    "shape": {"shape": 7},
    "larger_shape": {"shape": 13},
    "again": {"value": 0},
}
LAYOUTS = {"native": ("zarr.json", "c/{}"), "zarr2": (".zarray", "{}"), "n5": ("attributes.json", "{}")}


def create(path: Path, change: str = "", **members: Any) -> None:
    """The array anew, as tensorstore creates it. Its last chunk is not stored."""
    form = FORMER | CHANGES.get(change, {}) | members
    value = form["value"]
    shutil.rmtree(path, ignore_errors=True)
    sharding = {
        "chunk_shape": [form["chunk"]], "codecs": form["codecs"], "index_codecs": form["index_codecs"],
        "index_location": "end",
    }  # fmt: skip
    metadata = {
        "shape": [form["shape"]],
        "data_type": "uint16",
        "fill_value": form["fill_value"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    array = ts.open(spec, create=True).result()
    array[:6].write(np.arange(value, value + 6, dtype=np.uint16)).result()


def files_of(source: Path, layout: str, array: str) -> dict[str, bytes]:
    """All chunks and the document, as a new mount shows them."""
    tree, files = open_tree(str(source), layout=layout), {}

    def add(directory: str) -> None:
        for batch in tree.scan(tree.resolve(directory).number):
            for name, is_directory in zip(batch.names.tolist(), batch.directories.tolist(), strict=True):
                path = f"{directory}/{name.decode()}"
                if is_directory:
                    add(path)
                else:
                    number = tree.resolve(path).number
                    files[path.removeprefix(f"{array}/")] = bytes(tree.read(number, 0, 9999))

    add(array)
    return files


def files_in(path: Path) -> dict[str, bytes]:
    """The same through a mount, documents first, as clients read. A file may be replaced while it is read."""
    out = {}
    for directory, _, names in os.walk(path):
        for name in sorted(names, key=str.isdigit):
            file = os.path.join(directory, name)
            with suppress(OSError), open(file, "rb") as opened:  # what is missing is tried again
                data = opened.read()
                assert len(data) == os.fstat(opened.fileno()).st_size
                out[os.path.relpath(file, path)] = data
    return out


class Client:
    """Has a file of an array open, another one mapped into memory, and a directory as working directory."""

    def __init__(self, array: Path, chunks: str) -> None:
        self._opened = os.open(array / chunks.format(0), os.O_RDONLY)
        with open(array / chunks.format(1), "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._directory = os.open((array / chunks).parent, os.O_RDONLY | os.O_DIRECTORY)

    def opened(self) -> bytes | None:
        """None if the bytes are not known any more."""
        try:
            return os.pread(self._opened, 9999, 0)
        except OSError as e:
            if e.errno != errno.ESTALE:
                raise
            return None

    def present(self) -> dict[str, bytes]:
        """The chunks by their names relative to the working directory."""
        files = {}
        for name in os.listdir(self._directory):
            fd = os.open(name, os.O_RDONLY, dir_fd=self._directory)
            with open(fd, "rb") as file:
                files[name] = file.read()
            assert os.stat(name, dir_fd=self._directory).st_size == len(files[name])
        return files

    def close(self) -> None:
        self._map.close()
        os.close(self._opened)
        os.close(self._directory)


@pytest.mark.parametrize("writes", [False, True], ids=["ro", "rw"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_sizes_and_bytes_are_the_new_ones(layout: str, writes: bool, mounted: Mounted, tmp_path: Path) -> None:
    """What is open has the old bytes, or is ESTALE."""
    need_fuse()
    source, (document, chunks) = tmp_path / "source", LAYOUTS[layout]
    handmade.write_json(source / "zarr.json", handmade.group_document())
    for change in CHANGES:
        create(source / change, value=0)
    former = files_of(source, layout, "again")
    options = [*(["--layout", layout] if layout != "native" else []), "-o", "index_ttl=0.2"]
    options += ["--rw", "-o", f"journal={tmp_path / 'journal'}"] if writes else []
    with mounted(source, *options) as mount:
        for change in CHANGES:
            client = Client(mount / change, chunks)
            try:
                numbers = {name: os.stat(mount / change / name).st_ino for name in former if name[-1].isdigit()}
                create(source / change, change)
                wanted = files_of(source, layout, change)
                wait_until(lambda name=change, wanted=wanted: files_in(mount / name) == wanted)  # type: ignore[misc]
                below = len(chunks) - 2
                inside = {name[below:]: data for name, data in wanted.items() if chunks == "{}" or name != document}
                wait_until(lambda client=client, inside=inside: client.present() == inside)  # type: ignore[misc]
                if "shape" not in change:
                    allowed = None, former[chunks.format(0)]
                    wait_until(lambda client=client, allowed=allowed: client.opened() in allowed)  # type: ignore[misc]
                is_new = change != "again" and (layout == "n5" or change != "fill_value")
                for name in numbers.keys() & wanted.keys():
                    assert (os.stat(mount / change / name).st_ino != numbers[name]) == is_new, change
            finally:
                client.close()


@pytest.mark.parametrize("writes", [False, True], ids=["ro", "rw"])
def test_a_consolidated_document_describes_the_present_arrays(writes: bool, mounted: Mounted, tmp_path: Path) -> None:
    """Also for a client that reads no other document, as `zarr.open_consolidated` of zarr-python 2."""
    need_fuse()
    source = tmp_path / "source"
    handmade.write_json(source / "group" / "zarr.json", handmade.group_document())
    create(source / "group" / "a")
    options = ["--layout", "zarr2", "-o", "index_ttl=0.2"]
    options += ["--rw", "-o", f"journal={tmp_path / 'journal'}"] if writes else []

    def wanted() -> bytes:
        tree = open_tree(str(source), layout="zarr2")
        return bytes(tree.read(tree.resolve("group/.zmetadata").number, 0, 1 << 20))

    with mounted(source, *options) as mount:
        document = mount / "group" / ".zmetadata"
        for change in CHANGES:
            assert document.read_bytes() == wanted()
            create(source / "group" / "a", change)
            wait_until(lambda: document.read_bytes() == wanted())
