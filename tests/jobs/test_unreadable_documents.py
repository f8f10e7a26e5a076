"""A metadata document that cannot be read is an error with its path; only one that does not exist is absent."""

from __future__ import annotations

import errno
import http.server
import json
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

from shardfs.cli import commands
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import exit_code, message
from shardfs.storage.local import LocalStore
from tests.jobs.test_pack import files
from tests.mount.distant import serving
from tests.mount.programs import errno_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Mounted

NOBODY = 65534

CODES = {"pack": 4, "unpack": 3, "verify": 7}
"""Exit codes for a source with an array whose document cannot be read."""

DATA: Any = np.arange(400, dtype="u2").reshape(20, 20)


def zarr3(root: Path, *, sharded: bool) -> str:
    """A group with the arrays `a` and `b`; return the name of the documents."""
    group = zarr.create_group(root)
    for name in ("a", "b"):
        how: Any = {"shards": (10, 10)} if sharded else {}
        group.create_array(name, shape=DATA.shape, chunks=(5, 5), dtype=DATA.dtype, **how)[:] = DATA
    return "zarr.json"


def zarr2(root: Path, *, sharded: bool) -> str:
    assert not sharded
    group = zarr.create_group(root, zarr_format=2)
    for name in ("a", "b"):
        group.create_array(name, shape=DATA.shape, chunks=(5, 5), dtype=DATA.dtype)[:] = DATA
    return ".zarray"


def n5(root: Path, *, sharded: bool) -> str:
    assert not sharded
    root.mkdir()
    (root / "attributes.json").write_text(json.dumps({"n5": "4.0.0"}))
    for name in ("a", "b"):
        metadata = {"dimensions": [20, 20], "blockSize": [5, 5], "dataType": "uint16", "compression": {"type": "raw"}}
        kvstore = {"driver": "file", "path": str(root / name)}
        ts.open({"driver": "n5", "kvstore": kvstore, "metadata": metadata, "create": True}).result()[...] = DATA
    return "attributes.json"


def dangling(document: Path) -> None:
    document.unlink()
    document.symlink_to("../.git/annex/objects/KEY")


def through_a_file(document: Path) -> None:
    document.unlink()
    document.symlink_to("../../zarr.json/lost" if (document.parents[1] / "zarr.json").exists() else "../x")


def loop(document: Path) -> None:
    document.unlink()
    document.symlink_to(document.name)


def directory(document: Path) -> None:
    document.unlink()
    document.mkdir()


def linked_directory(document: Path) -> None:
    """The whole array is a dangling link."""
    shutil.rmtree(document.parent)
    document.parent.symlink_to("../elsewhere")


def linked_outside(document: Path) -> None:
    """The whole array is outside of the source, where shardfs does not read without `symlinks=follow`."""
    place = document.parents[2] / "outside"
    document.parent.rename(place)
    document.parent.symlink_to(place)


def linked_loop(document: Path) -> None:
    shutil.rmtree(document.parent)
    document.parent.symlink_to(document.parent.name)


BROKEN = [dangling, loop, directory]


def run(*command: object) -> tuple[int, str]:
    """Run a command of shardfs; return its exit code and its texts."""
    result = CliRunner().invoke(commands, list(map(str, command)), standalone_mode=False)
    if isinstance(error := result.exception, Exception):
        return exit_code(error), result.output + message(error)
    return result.return_value, result.output


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("write", [zarr3, zarr2, n5])
def test_pack_refuses_it_and_writes_nothing(
    write: Callable[..., str], broken: Callable[[Path], None], tmp_path: Path
) -> None:
    document = tmp_path / "source" / "b" / write(tmp_path / "source", sharded=False)
    broken(document)
    code, text = run("pack", tmp_path / "source", tmp_path / "target")
    assert code != 0
    assert "b" in text
    assert not list(tmp_path.glob("target/*"))


@pytest.mark.parametrize("broken", [*BROKEN, linked_directory])
@pytest.mark.parametrize("layout", ["native", "zarr2"])
def test_unpack_names_it_and_does_not_copy_shards(layout: str, broken: Callable[[Path], None], tmp_path: Path) -> None:
    document = tmp_path / "source" / "b" / zarr3(tmp_path / "source", sharded=True)
    broken(document)
    code, text = run("unpack", tmp_path / "source", tmp_path / "target", "--layout", layout)
    assert code == 3
    assert "b" in text
    assert not any(name.startswith("b/") for name in files(tmp_path / "target"))
    assert not any(Path(name).name.startswith((".z", "zarr")) for name in files(tmp_path / "target"))


@pytest.mark.parametrize("broken", [*BROKEN, linked_directory, linked_outside, linked_loop])
def test_verify_reports_it(broken: Callable[[Path], None], tmp_path: Path) -> None:
    broken(tmp_path / "source" / "b" / zarr3(tmp_path / "source", sharded=True))
    code, text = run("verify", tmp_path / "source")
    assert code == 7
    assert any(line.startswith("b") and "metadata" in line for line in text.splitlines())


@pytest.mark.every_case
@pytest.mark.parametrize("target", ["../README", ".git/annex/objects/KEY", "lost"])
@pytest.mark.parametrize("place", ["README", ".#README", "a/README"])
def test_verify_accepts_links_that_stand_for_no_array(target: str, place: str, tmp_path: Path) -> None:
    """Only a link beside arrays that leads nowhere may be an array. Those of git-annex are files."""
    zarr3(tmp_path / "source", sharded=True)
    (tmp_path / "README").write_text("outside")
    (tmp_path / "source" / place).symlink_to(target)
    assert run("verify", tmp_path / "source")[0] == (7 if (target, place) == ("lost", "README") else 0)


def test_verify_goes_on_beside_a_directory_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr3(tmp_path / "source", sharded=True)
    (tmp_path / "source/private").mkdir()
    names = LocalStore.names

    def refused(store: LocalStore, key: str, *args: Any) -> Any:
        if key == "private":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), key)
        return names(store, key, *args)

    monkeypatch.setattr(LocalStore, "names", refused)
    code, text = run("verify", tmp_path / "source")
    assert (code in (0, 7), "chunks" in text) == (True, True)


def test_verify_reports_a_scale_of_a_volume_that_is_a_dangling_link(tmp_path: Path) -> None:
    spec = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": str(tmp_path / "source")}}
    sharding = {"@type": "neuroglancer_uint64_sharded_v1", "preshift_bits": 0, "hash": "identity"}
    sharding |= {"minishard_bits": 0, "shard_bits": 1}
    scale = {"size": [20, 20, 1], "chunk_size": [10, 10, 1], "encoding": "raw", "resolution": [1, 1, 1], "key": "s0"}
    metadata = {"type": "image", "data_type": "uint16", "num_channels": 1}
    how = {"multiscale_metadata": metadata, "scale_metadata": scale | {"sharding": sharding}}
    ts.open(spec | how, create=True).result()[...] = DATA[:, :, None, None]
    assert run("verify", tmp_path / "source")[0] == 0
    (tmp_path / "source" / "s0").rename(tmp_path / "elsewhere")
    (tmp_path / "source" / "s0").symlink_to("nowhere")
    code, text = run("verify", tmp_path / "source")
    assert code == 7
    assert "s0" in text


@pytest.mark.parametrize("broken", BROKEN)
def test_the_document_of_the_source_itself_is_named(broken: Callable[[Path], None], tmp_path: Path) -> None:
    broken(tmp_path / "source" / "b" / zarr3(tmp_path / "source", sharded=True))
    code, text = run("info", tmp_path / "source" / "b")
    assert code == 3
    assert "zarr.json" in text


@pytest.mark.parametrize("broken", [dangling, loop])
def test_a_reader_of_a_mount_gets_an_error_instead_of_an_absent_array(
    broken: Callable[[Path], None], tmp_path: Path
) -> None:
    broken(tmp_path / "source" / "b" / zarr3(tmp_path / "source", sharded=True))
    fs = ShardFileSystem(str(tmp_path / "source"), skip_instance_cache=True)
    for path in ("b/zarr.json", "b/c/0/0"):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is compared
            fs.cat_file(path)
        assert caught.value.errno in (errno.EIO, errno.ELOOP)


def test_no_client_reads_fill_values_for_chunks_of_an_array_whose_document_cannot_be_read(tmp_path: Path) -> None:
    """Consolidated metadata describes the array all the same."""
    broken: Callable[[Path], None]
    for broken in (*BROKEN, through_a_file):
        source = tmp_path / broken.__name__
        zarr3(source, sharded=True)
        zarr.consolidate_metadata(source)
        broken(source / "b" / "zarr.json")
        store = zarr.storage.FsspecStore.from_url(f"shardfs::file://{source}")
        array: Any = zarr.open_group(store, mode="r", use_consolidated=True)["b"]
        with pytest.raises(OSError, match="b"):
            array[:]


def test_a_dataset_in_a_file_that_cannot_be_read_is_no_plain_file(place: Path) -> None:
    """Blosc2 has the document in the file."""
    pytest.importorskip("msgpack")
    zarr3(place / "source", sharded=True)
    (place / "source" / "c.b2nd").write_bytes(b"...")
    run("verify", place / "source")  # loads modules, which may be root's alone
    (place / "source" / "c.b2nd").chmod(0)
    with ordinary_user():
        reports = [run("verify", place / "source"), run("info", place / "source" / "c.b2nd")]
    assert [code for code, _ in reports] == [7, 3]
    for _, text in reports:
        assert "c.b2nd" in text
        assert "Permission denied" in text


def test_a_directory_of_chunks_that_is_a_dangling_link_is_not_empty(tmp_path: Path) -> None:
    zarr3(tmp_path / "source", sharded=True)
    (tmp_path / "source" / "b" / "c").rename(tmp_path / "elsewhere")
    (tmp_path / "source" / "b" / "c").symlink_to("nowhere")
    assert run("verify", tmp_path / "source")[0] == 7
    assert run("unpack", tmp_path / "source", tmp_path / "target")[0] == 3


def test_directories_with_common_names_are_no_documents(tmp_path: Path) -> None:
    """Precomputed names its document `info`."""
    zarr3(tmp_path / "source", sharded=True)
    os.makedirs(tmp_path / "source" / "info")
    os.makedirs(tmp_path / "source" / "a" / "meta" / "storage")
    assert run("verify", tmp_path / "source")[0] == 0


# ---- writing


@pytest.mark.parametrize("broken", BROKEN)
def test_nothing_is_written_over_it_or_beside_it(broken: Callable[[Path], None], tmp_path: Path) -> None:
    document = tmp_path / "source" / "b" / zarr3(tmp_path / "source", sharded=True)
    raw = document.read_bytes()
    broken(document)
    before = files(tmp_path / "source")
    options = {"journal": str(tmp_path / "journals"), "create": "zarr3"}
    fs = ShardFileSystem(str(tmp_path / "source"), rw=True, write_options=options, skip_instance_cache=True)
    for path, data in (("b/zarr.json", raw), ("b/c/0/0", b"chunk"), ("b/.zattrs", b"{}"), ("b/d/zarr.json", raw)):
        assert errno_of(partial(fs.pipe_file, path, data)) in (errno.EIO, errno.ELOOP), path
    assert fs.close() == []
    assert files(tmp_path / "source") == before


# ---- no permission


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that an ordinary user owns, and into which no other directory bars the way."""
    with TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        for below in ("state", "target"):
            (place / below).mkdir()
            if os.geteuid() == 0:
                os.chown(place / below, NOBODY, NOBODY)
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
        yield place


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Give up the rights of root, which permissions do not stop."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.mark.parametrize("denied", ["b/zarr.json", "b"])
@pytest.mark.parametrize("command", ["pack", "unpack", "verify"])
def test_a_document_that_the_user_may_not_read_is_an_error(command: str, denied: str, place: Path) -> None:
    zarr3(place / "source", sharded=command != "pack")
    places = [place / "target"] if command != "verify" else []
    run(command, place / "source", *[place / "sound" for _ in places])  # loads modules, which may be root's alone
    (place / "source" / denied).chmod(0)
    with ordinary_user():
        code, text = run(command, place / "source", *places)
    (place / "source" / denied).chmod(0o755)
    assert code == CODES[command], text
    assert "Permission denied" in text
    assert "b" in text
    new_files = files(place / "target")
    assert not any(name.startswith("b/") for name in new_files)
    assert not any(Path(name).name == "zarr.json" for name in new_files)


@pytest.mark.parametrize("denied", ["b/zarr.json", "b"])
def test_a_reader_gets_eacces_for_what_the_user_may_not_read(denied: str, place: Path) -> None:
    zarr3(place / "source", sharded=True)
    (place / "source" / denied).chmod(0)
    with ordinary_user():
        fs = ShardFileSystem(str(place / "source"), skip_instance_cache=True)
        for path in ("b/zarr.json", "b/c/0/0"):
            with pytest.raises(OSError, match="Permission denied"):
                fs.cat_file(path)
        assert fs.cat_file("a/c/0/0")
    (place / "source" / denied).chmod(0o755)


# ---- web servers


@contextmanager
def server(root: Path, denied: Callable[[str], bool]) -> Iterator[str]:
    """A server that answers 403 for some paths."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(root))

        def send_head(self) -> Any:
            if denied(self.path):
                self.send_error(403)
                return None
            return super().send_head()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{web.server_port}"
        finally:
            web.shutdown()
            thread.join()


def test_a_document_that_a_server_denies_is_an_error(tmp_path: Path) -> None:
    zarr3(tmp_path / "source", sharded=False)
    with server(tmp_path / "source", lambda path: path.startswith("/b/zarr.json")) as url:
        code, text = run("pack", url, tmp_path / "target")
    assert code != 0
    assert "b/zarr.json" in text
    assert not list(tmp_path.glob("target/*"))


PATIENCE = ("-o", "store_timeout=3,store_retries=0")

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "403": ({"kind": "status", "status": 403}, "zarr.json"),
    "500": ({"kind": "status", "status": 500}, "500"),
    "silence": ({"kind": "hang"}, "does not answer within 3 s"),
}
"""Answers of a server, and what the error message has."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_document_for_which_a_server_gives_no_answer_is_an_error(fault: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    answer, why = FAULTS[fault]
    for command in ("pack",) if fault == "silence" else ("pack", "unpack", "verify"):  # each waits for 6 s
        source, target = tmp_path / command / "source", tmp_path / command / "target"
        source.parent.mkdir()
        zarr3(source, sharded=command != "pack")
        with serving(source, 0) as store:
            store.fail({"path": "/b/zarr.json", **answer})
            code, text = run(command, *PATIENCE, store.url, *[target] * (command != "verify"))
            assert code == CODES[command], text
            assert why in text
            assert not any(Path(name).name == "zarr.json" for name in files(target))
            if command == "verify":
                assert run("ls", *PATIENCE, store.url, "b")[0] == run("info", *PATIENCE, f"{store.url}/b")[0] == 3


@pytest.mark.fuse
@pytest.mark.slow
def test_a_reader_of_a_mount_gets_etimedout(mounted: Mounted, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    zarr3(tmp_path / "source", sharded=True)
    with serving(tmp_path / "source", 0) as store:
        store.fail({"path": "/b/zarr.json", "kind": "hang"})
        with mounted(store.url, *PATIENCE) as mount:
            assert errno_of((mount / "b/zarr.json").read_bytes) == errno.ETIMEDOUT
            assert errno_of((mount / "b/c/0/0").stat) == errno.ETIMEDOUT
            assert (mount / "a/c/0/0").read_bytes()


def test_a_server_that_denies_all_names_with_a_dot_can_be_read(tmp_path: Path) -> None:
    """As many web servers do, whether these files exist or not."""
    zarr3(tmp_path / "source", sharded=False)
    with server(tmp_path / "source", lambda path: "/." in path) as url:
        code, text = run("pack", url, tmp_path / "target")
    assert code == 0, text
    array: Any = zarr.open_array(tmp_path / "target" / "b", mode="r")
    assert np.array_equal(array[:], DATA)


def test_a_server_that_denies_what_does_not_exist_can_be_read(tmp_path: Path) -> None:
    zarr3(tmp_path / "source", sharded=False)
    root = tmp_path / "source"
    with server(root, lambda path: not (root / path.strip("/")).exists()) as url:
        code, text = run("pack", url, tmp_path / "target")
    assert code == 0, text


@pytest.mark.parametrize("denied", ["b/c", "b/c/0"])
@pytest.mark.parametrize("command", ["unpack", "verify"])
def test_a_directory_of_shards_that_the_user_may_not_list_stops_nothing_else(
    command: str, denied: str, place: Path
) -> None:
    zarr3(place / "source", sharded=True)
    places = [place / "target"] if command == "unpack" else []
    run(command, place / "source", *[place / "sound" for _ in places])  # loads modules, which may be root's alone
    (place / "source" / denied).chmod(0)
    with ordinary_user():
        code, text = run(command, place / "source", *places)
        part = run(command, place / "source", "--shards", "2/2")[0] if command == "verify" else 3
    (place / "source" / denied).chmod(0o755)
    assert (code, part) == (CODES[command], 3), text
    assert f"{denied}: Permission denied" in text
    if command == "verify":
        assert "a: 4 shards" in text
    else:
        chunks = {name for name in files(place / "target") if "/c/" in name}
        assert chunks == {name for name in files(place / "sound") if name.startswith("a/c/")}
        assert run(command, place / "source", *places)[0] == 0, "the same job goes on"
        assert files(place / "target").keys() == files(place / "sound").keys()
