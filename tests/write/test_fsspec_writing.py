"""Writing through fsspec: what file systems are asked for."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import BusyError
from shardfs.write import dirty_shards
from shardfs.write.journal import Journal
from shardfs.write.writeback import WriteBuffer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.vfs.chunk_dirs import Target


@pytest.fixture
def source(tmp_path: Path) -> Path:
    array = zarr.create_array(tmp_path / "s" / "a", shape=(64, 64), chunks=(8, 8), shards=(32, 32), dtype="u2")
    array[:] = np.arange(4096).reshape(64, 64)
    return tmp_path / "s"


@pytest.fixture
def fs(source: Path, tmp_path: Path) -> Iterator[ShardFileSystem]:
    told = {"journal": str(tmp_path / "journals"), "create": "zarr3:chunks_per_shard=4,4"}
    fs = ShardFileSystem(str(source), rw=True, write_options=told, skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.mark.parametrize("renamed", [False, True])
def test_a_chunk_that_goes_while_its_shard_is_published_does_not_come_back(
    renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard gets the chunk after `unlink` or `rename` has looked into it."""
    zarr.create_array(tmp_path / "s/a", shape=(8,), chunks=(1,), shards=(4,), dtype="u1", compressors=None)
    fs = ShardFileSystem(
        str(tmp_path / "s"), rw=True, write_options={"journal": str(tmp_path / "j"), "idle": "1h", "age": "1h"},
        skip_instance_cache=True,
    )  # fmt: skip
    fs.pipe_file("/a/c/0", b"\1")
    publisher, is_stored = threading.Thread(target=fs.publish), WriteBuffer.is_stored

    def too_early(buffer: WriteBuffer, path: str, target: Target | None) -> bool:
        source_bytes = is_stored(buffer, path, target)
        if path == "a/c/0" and not publisher.ident:
            publisher.start()
            wait_until(lambda: buffer.backlog.replaced, 60)
        return source_bytes

    monkeypatch.setattr(WriteBuffer, "is_stored", too_early)
    if renamed:
        fs.mv("/a/c/0", "/a/c/7")
    else:
        fs.rm_file("/a/c/0")
    publisher.join()
    fs.publish()
    fs.close()
    assert np.array_equal(zarr.open_array(tmp_path / "s/a")[:], [0] * 7 + [int(renamed)])


@pytest.mark.parametrize("limit", [None, 999])
def test_a_shard_with_very_many_pending_chunks_is_published(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names and digests take more than a MiB. `limit`: the number of chunks of one publish."""
    if limit is not None:
        monkeypatch.setattr(dirty_shards, "MOST_CHUNKS", limit)
    chunks, name = 3000, "n" * 250
    array = zarr.create_array(
        tmp_path / "s" / name / name, shape=(chunks,), chunks=(1,), shards=(chunks,), dtype="u1", compressors=None
    )
    array[: chunks // 2] = 1
    fs = ShardFileSystem(
        str(tmp_path / "s"), rw=True, write_options={"journal": str(tmp_path / "journals")}, skip_instance_cache=True
    )
    for i in range(chunks):
        fs.pipe_file(f"/{name}/{name}/c/{i}", bytes([i % 251 + 2]))
    fs.publish()
    fs.close()
    assert np.array_equal(zarr.open_array(tmp_path / "s" / name / name)[:], np.arange(chunks) % 251 + 2)


def _encoded(values: np.ndarray[Any, Any]) -> bytes:
    from numcodecs.zstd import Zstd

    return bytes(Zstd(level=0, checksum=False).encode(np.ascontiguousarray(values).tobytes()))


def test_a_new_array_is_sharded(fs: ShardFileSystem, source: Path) -> None:
    store = FsspecStore(_asynchronous(fs), path="/")
    array = zarr.create_array(store, name="new", shape=(40, 40), chunks=(5, 5), dtype="f4")
    array[:] = np.arange(1600).reshape(40, 40)
    fs.publish()
    zarr_array = zarr.open_array(source / "new")
    assert zarr_array.shards == (20, 20)
    assert np.array_equal(zarr_array[:], np.arange(1600).reshape(40, 40))


def test_a_new_group_may_have_a_hidden_name(fs: ShardFileSystem, source: Path) -> None:
    group = zarr.create_group(FsspecStore(_asynchronous(fs), path="/"), path="groups/.new")
    group.create_array("x", shape=(40, 40), chunks=(5, 5), dtype="f4")[:] = 7
    fs.publish()
    assert np.all(zarr.open_array(source / "groups" / ".new" / "x")[:] == 7)


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_chunks_without_elements_stay_out_of_shards(fs: ShardFileSystem, source: Path, shape: tuple[int, ...]) -> None:
    """zarr-python made such arrays until 3.1."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0.0,
    }
    fs.pipe_file("/new/zarr.json", json.dumps(document).encode())
    fs.publish()
    assert json.loads((source / "new/zarr.json").read_text())["codecs"] == document["codecs"]


def _asynchronous(fs: ShardFileSystem) -> Any:
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    return AsyncFileSystemWrapper(fs, asynchronous=True)


def test_files_can_be_changed_in_place(fs: ShardFileSystem) -> None:
    with fs.open("/notes", "wb") as file:
        file.write(b"hello world")
    with fs.open("/notes", "r+b") as file:
        file.seek(6)
        file.write(b"there")
        file.truncate(9)
        file.seek(0)
        assert file.read() == b"hello the"
    with fs.open("/notes", "ab") as file:
        file.write(b"!")
    assert fs.cat_file("/notes") == b"hello the!"
    with pytest.raises(FileExistsError):
        fs.open("/notes", "xb")


@pytest.mark.parametrize("mode", ["r+b", "rb+", "w+b", "wb+", "x+b", "xb+", "a+b", "ab+", "wb", "xb", "ab", "w", "x+"])
def test_modes_are_those_of_python(mode: str, fs: ShardFileSystem, tmp_path: Path) -> None:
    new, plain = ("x" in mode), tmp_path / "plain"
    if not new:
        plain.write_bytes(b"hello")
        fs.pipe_file("/notes", b"hello")
    data: Any = b"abc" if "b" in mode else "abc"
    contents = []
    for file in (plain.open(mode), fs.open("/notes", mode)):
        with file:
            assert file.write(data) == 3
            if "+" in mode:
                file.seek(1)
                contents.append(file.read())
    assert fs.cat_file("/notes") == plain.read_bytes()
    assert len(set(contents)) <= 1


@pytest.mark.parametrize("mode", ["rwb", "wwb", "+b", "b", "bw+", "w++b", "zb"])
def test_modes_that_python_refuses(mode: str, fs: ShardFileSystem) -> None:
    with pytest.raises(ValueError, match="mode"):
        fs.open("/notes", mode)
    assert not fs.exists("/notes")


def test_an_empty_source_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    options = {"journal": str(tmp_path / "journals"), "create": "zarr3"}
    fs = ShardFileSystem(str(tmp_path / "new"), rw=True, write_options=options, skip_instance_cache=True)
    fs.pipe_file("/notes", b"hello")
    assert fs.close() == []
    assert (tmp_path / "new/notes").read_bytes() == b"hello"


def test_trees_are_copied_moved_and_removed(fs: ShardFileSystem, source: Path) -> None:
    fs.cp("/a", "/b", recursive=True)
    assert sorted(fs.find("/b")) == [p.replace("/a", "/b", 1) for p in sorted(fs.find("/a"))]
    fs.publish()
    assert zarr.open_array(source / "b").shards == (32, 32)
    fs.mv("/b", "/c")
    assert np.array_equal(zarr.open_array(source / "c")[:], np.arange(4096).reshape(64, 64))
    fs.rm("/c", recursive=True)
    assert not (source / "c").exists()
    assert not fs.exists("/c")


def test_a_transaction_gives_names_at_its_end(fs: ShardFileSystem) -> None:
    before, new = fs.cat_file("/a/c/1/2"), _encoded(np.full((8, 8), 7, "u2"))
    for failure in (KeyError(), None):
        with suppress(KeyError), fs.transaction:
            with fs.open("/a/c/1/2", "wb") as file:
                file.write(new)
            with fs.open("/a/c/note", "wb") as file:
                file.write(b"note")
            assert (fs.cat_file("/a/c/1/2"), fs.exists("/a/c/note")) == (before, False)
            if failure is not None:
                raise failure
        names = [name for name in fs.find("/a/c") if "." in name]
        assert (fs.exists("/a/c/note"), names) == (failure is None, [])
    assert (fs.cat_file("/a/c/1/2"), fs.cat_file("/a/c/note")) == (new, b"note")


def test_nothing_is_written_behind_the_end(source: Path, tmp_path: Path) -> None:
    """Least of all to files of others, which have the numbers that descriptors of the journal had."""
    asked: dict[str, Any] = {
        "source": str(source),
        "rw": True,
        "write_options": {"journal": str(tmp_path / "journals")},
    }
    closed = fsspec.filesystem("shardfs", **asked)
    closed.pipe_file("/a/c/0/0", b"some bytes")
    assert closed.close(0) == ["a/c/0/0"]
    with ExitStack() as stack:
        open_files = [stack.enter_context(open(tmp_path / f"{i}", "w+b", buffering=0)) for i in range(30)]
        for _ in range(2):
            with pytest.raises(OSError, match="the journal is closed"):
                closed.pipe_file("/a/c/0/0", b"other bytes")
            assert closed.close() == ["a/c/0/0"]
        assert {os.fstat(file.fileno()).st_size for file in open_files} == {0}
    anew = fsspec.filesystem("shardfs", **asked)
    assert anew.cat_file("/a/c/0/0") == b"some bytes"
    assert anew.close() == []


def test_a_closed_file_system_changes_no_file_of_its_former_source(source: Path, tmp_path: Path) -> None:
    """Not even plain ones, for which it needs no journal. Another program may write to the source by then."""
    told = {"journal": str(tmp_path / "journals")}
    fs = ShardFileSystem(str(source), rw=True, write_options=told)
    fs.pipe_file("/notes", b"notes")
    late, unused = fs.open("/late", "wb"), fs.open("/unused", "wb")
    late.write(b"in time")
    assert fs.close() == []
    stored = sorted(str(path) for path in source.rglob("*"))
    changes: list[Callable[[], object]] = [
        lambda: fs.pipe_file("/more", b"more"),
        lambda: fs.mkdir("/directory"),
        lambda: fs.makedirs("/one/two"),
        lambda: fs.rm("/notes"),
        lambda: fs.mv("/notes", "/others"),
        lambda: fs.touch("/notes", truncate=False),
        lambda: late.write(b"too late"),
        lambda: late.truncate(0),
    ]
    for change in changes:
        with pytest.raises(OSError, match=r"closed"):
            change()
    late.close()
    unused.close()
    assert sorted(str(path) for path in source.rglob("*")) == stored
    assert ((source / "late").read_bytes(), fs.cat_file("/notes"), fs.close()) == (b"in time", b"notes", [])


def test_a_file_that_a_closing_file_system_cannot_save_is_an_error_of_its_own_close(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = ShardFileSystem(str(source), rw=True, write_options={"journal": str(tmp_path / "journals")})
    file = fs.open("/a/c/0/0", "wb")
    file.write(b"some bytes")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        assert fs.close() == []
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.close()


def test_threads_that_ask_for_the_same_write_together(source: Path, tmp_path: Path) -> None:
    told = {"journal": str(tmp_path / "journals")}

    def opened() -> ShardFileSystem:
        return ShardFileSystem(str(source), rw=True, write_options=told)

    def write(n: int) -> None:
        opened().pipe_file(f"/a/c/{n}/0", _encoded(np.full((8, 8), n, "u2")))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
        assert pool.submit(opened().close).result() == []
        assert np.array_equal(zarr.open_array(source / "a")[::8, 0], range(8))
        list(pool.map(write, range(8)))  # whoever had it before opens it anew
        assert opened().close() == []


def test_a_forked_process_does_not_write_with_its_parent(source: Path, tmp_path: Path) -> None:
    told = {"journal": str(tmp_path / "journals")}
    fs = ShardFileSystem(str(source), rw=True, write_options=told)
    if not (pid := os.fork()):
        try:
            ShardFileSystem(str(source), rw=True, write_options=told, skip_instance_cache=True)
        except BusyError:
            os._exit(7)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert fs.close() == []


def test_two_cannot_write_at_once(fs: ShardFileSystem, source: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"pid .* this process, by another file system object"):
        ShardFileSystem(str(source), rw=True, write_options={"journal": str(tmp_path / "journals")})


def test_nothing_is_written_without_rw(source: Path) -> None:
    fs = ShardFileSystem(str(source))
    for change in (
        lambda: fs.pipe_file("/a/c/0/0", b""),
        lambda: fs.rm("/a", recursive=True),
        lambda: fs.mkdir("/x"),
        lambda: fs.open("/x", "wb"),
    ):
        with pytest.raises(OSError, match="Read-only") as refused:
            change()
        assert refused.value.errno == errno.EROFS
