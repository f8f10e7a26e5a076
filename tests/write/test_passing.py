"""What files of a local source have, and the mount passes through: extended attributes, links of both kinds, room."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.tree import WriteTree, open_write_tree
from tests import handmade
from tests.write.hooks import hooked
from tests.write.semantics.cases import SOURCES, fails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.model.attributes import Attributes
    from shardfs.write.files import WritableFile

NOTE = "user.note"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An array, a file beside it, and a directory with another one."""
    array = {f"a/{path}": data for path, data in SOURCES["zarr"]().items()}
    handmade.write_files(tmp_path / "source", {**array, "d/file": b"content"})
    return tmp_path / "source"


@pytest.fixture
def tree(source: Path, tmp_path: Path) -> Iterator[WriteTree]:
    journal = Journal.open(tmp_path / "journal", str(source), limit_bytes=64 << 20)
    tree = open_write_tree(open_tree(str(source)), journal)
    yield tree
    assert tree.close(20) == []


def number(tree: WriteTree, path: str) -> int:
    file_number = tree.resolve(path).number
    tree.remember(file_number)
    return file_number


def of_users(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}


def test_a_name_that_is_replaced_during_a_listing_is_listed(tree: WriteTree, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"old", b"new"):
        _, handle = tree.create(ROOT, name, os.O_WRONLY | os.O_CREAT, 0o644)
        tree.write(handle, 0, memoryview(name))
        tree.flush(handle)
        tree.release(handle)
    contents = tree._descriptions._contents
    attributes, replaced = contents.attributes, list[int]()

    def raced(file: WritableFile) -> Attributes:
        if file.path == "old" and not replaced:
            replaced.append(file.number)
            tree.rename(ROOT, b"new", ROOT, b"old", False)
        return attributes(file)

    monkeypatch.setattr(contents, "attributes", raced)
    listed = [name for batch in tree.scan(ROOT) for name in batch.names.tolist()]
    assert replaced
    assert b"old" in listed


@pytest.mark.parametrize("value", [b"abc", b"nan", b"inf", b"-1", b"\xff"])
def test_a_time_out_that_is_no_number_of_seconds_is_refused(value: bytes, tree: WriteTree) -> None:
    with pytest.raises(OSError, match=r"user.shardfs.flush takes a number of seconds") as caught:
        tree.set_xattr(ROOT, "user.shardfs.flush", value)
    assert caught.value.errno == errno.EINVAL
    tree.set_xattr(ROOT, "user.shardfs.flush", b"2.5")


def test_directories_that_exchange_names_keep_their_numbers(tree: WriteTree) -> None:
    before = {path: number(tree, path) for path in ("a", "a/zarr.json", "d", "d/file")}
    for old, new in ((b"a", b"t"), (b"d", b"a"), (b"t", b"d")):
        tree.rename(ROOT, old, ROOT, new, False)
    after = {path: tree.resolve(path).number for path in ("d", "d/zarr.json", "a", "a/file")}
    assert list(after.values()) == list(before.values())
    assert tree.read(after["a/file"], 0, 7) == b"content"
    assert json.loads(bytes(tree.read(after["d/zarr.json"], 0, 4096)))["node_type"] == "array"


def test_a_chunk_that_is_closed_while_its_array_is_renamed(tree: WriteTree, source: Path) -> None:
    """It goes where its array is then, and is no conflict."""
    chunk, other = number(tree, "a/c/0/0"), number(tree, "a/c/0/1")
    new = bytes(tree.read(chunk, 0, 4096))[::-1]
    handle = tree.open(chunk, os.O_WRONLY | os.O_TRUNC)
    tree.write(handle, 0, new)
    closing = threading.Thread(target=tree.flush, args=(handle,))

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = function(*args)
        if name == "rename" and args[:2] == ("a", "b"):
            closing.start()
            closing.join(0.5)
            with suppress(OSError):  # who looks now finds nothing, and that is not remembered
                tree.attributes(other)
        return result

    with hooked(hook):
        tree.rename(ROOT, b"a", ROOT, b"b", False)
    closing.join(20)
    tree.release(handle)
    tree.pending.flush()
    assert tree.left() == []
    assert bytes(tree.read(tree.resolve("b/c/0/0").number, 0, 4096)) == new
    assert tree.attributes(other).size == len(new)


# ---- extended attributes


@pytest.mark.parametrize("path", ["d/file", "a/README", "d", "a"])
def test_attributes_are_those_of_the_source(tree: WriteTree, source: Path, path: str) -> None:
    os.setxattr(source / path, "user.before", b"1")
    os.setxattr(source / path, "user.shardfs.shard", b"a lie")
    file_number = number(tree, path)
    tree.set_xattr(file_number, NOTE, b"text")
    assert of_users(source / path) == {"user.before": b"1", NOTE: b"text", "user.shardfs.shard": b"a lie"}
    told = tree.xattrs(file_number)
    assert {**told, "user.before": b"1", NOTE: b"text"} == told
    assert "user.shardfs.shard" not in told
    tree.remove_xattr(file_number, "user.before")
    fails(errno.ENODATA, tree.remove_xattr, file_number, "user.before")
    assert of_users(source / path).keys() == {NOTE, "user.shardfs.shard"}


def test_a_file_has_no_attributes_of_ours(tree: WriteTree, source: Path) -> None:
    """Who copies it with its attributes, as `rsync -X` does, could not set them on the copy."""
    handle = tree.open(file_number := number(tree, "d/file"), os.O_RDWR)
    tree.write(handle, 0, b"new")
    assert tree.xattrs(file_number) == {}
    tree.release(handle)


@pytest.mark.parametrize("path", ["a/c/0/0", "a/zarr.json", "a/c", "a/c/0", ""])
def test_what_the_formats_have_no_room_for(tree: WriteTree, source: Path, path: str) -> None:
    file_number = number(tree, path)
    fails(errno.EOPNOTSUPP, tree.set_xattr, file_number, NOTE, b"1")
    fails(errno.EOPNOTSUPP, tree.remove_xattr, file_number, NOTE)
    assert NOTE not in tree.xattrs(file_number)


@pytest.mark.parametrize("name", ["user.shardfs.state", "user.shardfs.new", "trusted.note", "security.note"])
def test_names_that_are_not_for_programs(tree: WriteTree, source: Path, name: str) -> None:
    file_number = number(tree, "d/file")
    fails(errno.EOPNOTSUPP, tree.set_xattr, file_number, name, b"1")
    fails(errno.EOPNOTSUPP, tree.remove_xattr, file_number, name)
    assert not any(n.startswith(("user.", "trusted.")) for n in os.listxattr(source / "d/file"))


def test_an_open_file_has_them_whatever_its_name_is(tree: WriteTree, source: Path) -> None:
    file_number = number(tree, "d/file")
    handle = tree.open(file_number, os.O_RDONLY)
    tree.rename(number(tree, "d"), b"file", number(tree, ""), b"other", False)
    (source / "d/file").write_bytes(b"another one")
    tree.set_xattr(file_number, NOTE, b"1")
    tree.unlink(number(tree, ""), b"other")
    assert tree.read(file_number, 0, 100) == b"content"
    tree.set_xattr(file_number, NOTE, b"2")
    assert tree.xattrs(file_number) == {NOTE: b"2"}
    assert of_users(source / "d/file") == {}
    tree.release(handle)


def test_nothing_is_set_outside_of_the_source(tree: WriteTree, source: Path, tmp_path: Path) -> None:
    """A directory is swapped for a link when its file is known already."""
    file_number = number(tree, "d/file")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"secret")
    os.setxattr(tmp_path / "outside/file", NOTE, b"secret")
    (source / "d").rename(source / "was")
    (source / "d").symlink_to(tmp_path / "outside")
    fails(errno.EACCES, tree.set_xattr, file_number, NOTE, b"1")
    fails(errno.EACCES, tree.remove_xattr, file_number, NOTE)
    fails(errno.EACCES, tree.xattrs, file_number)
    assert of_users(tmp_path / "outside/file") == {NOTE: b"secret"}


# ---- links


def test_a_link_is_a_copy_with_all_that_a_file_has(tree: WriteTree, source: Path) -> None:
    os.setxattr(source / "d/file", NOTE, b"1")
    (source / "d/file").chmod(0o640)
    os.utime(source / "d/file", ns=(5, 1_234_567_890))
    new_files = tree.link(number(tree, "d/file"), number(tree, "a"), b"linked")
    status = (source / "a/linked").stat()
    assert (new_files.mtime_ns, status.st_mtime_ns, status.st_mode & 0o7777) == (1_234_567_890, 1_234_567_890, 0o640)
    assert ((source / "a/linked").read_bytes(), of_users(source / "a/linked")) == (b"content", {NOTE: b"1"})
    fails(errno.EEXIST, tree.link, number(tree, "d/file"), number(tree, "a"), b"linked")
    tree.truncate(new_files.number, 3, None)
    assert ((source / "a/linked").read_bytes(), (source / "d/file").read_bytes()) == (b"con", b"content")
    assert [name for name in os.listdir(source / "a") if name.startswith(".")] == []


def test_a_link_to_an_open_file_without_a_name(tree: WriteTree, source: Path) -> None:
    handle = tree.open(file_number := number(tree, "d/file"), os.O_RDWR)
    tree.unlink(number(tree, "d"), b"file")
    tree.write(handle, 0, b"CON")
    tree.link(file_number, number(tree, "d"), b"again")
    tree.release(handle)
    assert (source / "d/again").read_bytes() == b"CONtent"


def test_no_bytes_of_it_are_in_memory(tree: WriteTree, source: Path) -> None:
    """A file may be larger than the memory; this one is, but has no bytes."""
    os.truncate(source / "d/file", 1 << 40)

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in ("clone", "copy_file_range", "pwrite"):
            raise OSError(errno.ENOSPC, "so far, and no further")
        return function(*args)

    with hooked(hook):
        fails(errno.ENOSPC, tree.link, number(tree, "d/file"), number(tree, "d"), b"large")
    assert os.listdir(source / "d") == ["file"]


def test_a_link_does_not_take_the_place_of_what_came_meanwhile(tree: WriteTree, source: Path) -> None:
    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "rename_new":
            (source / "d/linked").write_bytes(b"faster")
        return function(*args)

    with hooked(hook):
        fails(errno.EEXIST, tree.link, number(tree, "d/file"), number(tree, "d"), b"linked")
    assert (source / "d/linked").read_bytes() == b"faster"
    assert sorted(os.listdir(source / "d")) == ["file", "linked"]


# ---- room


def test_room_is_made_on_the_disk(tree: WriteTree, source: Path) -> None:
    handle = tree.open(file_number := number(tree, "d/file"), os.O_RDWR)
    tree.allocate(handle, 0, 1 << 20, 1)
    status = (source / "d/file").stat()
    assert (status.st_size, status.st_blocks >= 2048) == (7, True)
    tree.allocate(handle, 0, 1000, 0)
    assert tree.attributes(file_number).size == 1000
    tree.release(handle)
    assert (source / "d/file").read_bytes() == b"content".ljust(1000, b"\0")


@pytest.mark.parametrize("path", ["a/c/0/0", "a/zarr.json"])
def test_no_room_is_made_for_what_is_no_file_of_the_disk(tree: WriteTree, path: str) -> None:
    before = tree.read(number(tree, path), 0, 1 << 20)
    handle = tree.open(number(tree, path), os.O_RDWR)
    fails(errno.EOPNOTSUPP, tree.allocate, handle, 0, 1 << 20, 0)
    tree.release(handle)
    assert tree.read(number(tree, path), 0, 1 << 20) == before


# ---- symbolic links


def test_links_in_the_source_are_followed(tree: WriteTree, source: Path) -> None:
    (source / "latest").symlink_to("a")
    (source / "d/up").symlink_to("../a/zarr.json")
    (source / "d/dangling").symlink_to("nothing")
    assert tree.resolve("latest").directory
    assert tree.resolve("d/up").size == (source / "a/zarr.json").stat().st_size
    fails(errno.ENOENT, tree.resolve, "d/dangling")
    tree.unlink(number(tree, "d"), b"up")
    assert not os.path.lexists(source / "d/up")
    assert (source / "a/zarr.json").exists()


@pytest.mark.parametrize("target", ["../outside/secret", "/etc/passwd", "d/up/../outside/secret", "d/../../outside"])
def test_links_that_lead_out_are_not(tree: WriteTree, source: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    (source / "d/up").symlink_to("..")
    (source / "evil").symlink_to(target)
    fails(errno.EACCES, tree.resolve, "evil")


def test_a_link_is_not_renamed(tree: WriteTree, source: Path) -> None:
    """From another directory it would lead elsewhere."""
    (source / "d/up").symlink_to("../a/README")
    (source / "a/README").write_bytes(b"text")
    (source / "latest").symlink_to("d")
    fails(errno.EPERM, tree.rename, number(tree, "d"), b"up", number(tree, ""), b"up", False)
    fails(errno.EPERM, tree.rename, number(tree, ""), b"latest", number(tree, ""), b"newest", False)
    assert (os.readlink(source / "d/up"), os.readlink(source / "latest")) == ("../a/README", "d")


def test_nothing_is_removed_or_renamed_through_a_link_to_a_directory(tree: WriteTree, source: Path) -> None:
    """`rm -r` of the link would otherwise remove the files of the directory that has them."""
    (source / "latest").symlink_to("a")
    (source / "other").symlink_to("d")
    for directory, name in (("latest/c/0", b"0"), ("latest", b"zarr.json"), ("other", b"file")):
        fails(errno.EROFS, tree.unlink, number(tree, directory), name)
        fails(errno.EROFS, tree.rename, number(tree, directory), name, number(tree, "d"), b"new", False)
    (source / "d/empty/below").mkdir(parents=True)
    (source / "way").symlink_to("d/empty")
    fails(errno.EROFS, tree.rmdir, number(tree, ""), b"way")
    fails(errno.EROFS, tree.rmdir, number(tree, "other"), b"empty")
    assert (source / "d/empty/below").is_dir()
    assert (source / "d/file").read_bytes() == b"content"
    tree.unlink(number(tree, "a/c/0"), b"0")
    tree.unlink(number(tree, "d"), b"file")


def test_mode_and_time_of_a_document_reach_the_source(tree: WriteTree, source: Path) -> None:
    """As of what is copied with them, by programs that set them in the end."""
    file_number = number(tree, "a/zarr.json")
    tree.set_mode(file_number, 0o640)
    tree.set_times(file_number, 1_234_567_890)
    info = (source / "a/zarr.json").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o640, 1_234_567_890)
    assert tree.attributes(file_number).mtime_ns == 1_234_567_890
