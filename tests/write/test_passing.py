"""What files of a local source have, and the mount passes through: extended attributes, links of both kinds, room."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.links import stays_inside
from shardfs.write.tree import WriteTree, open_write_tree
from tests import handmade
from tests.conftest import _run, need_fuse
from tests.write.hooks import hooked
from tests.write.mounts import writable
from tests.write.semantics.cases import SOURCES, fails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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
    tree.hooks.shows_links = True
    yield tree
    assert tree.close(20) == []


def number(tree: WriteTree, path: str) -> int:
    found = tree.resolve(path).number
    tree.remember(found)
    return found


def of_users(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}


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
    there = number(tree, path)
    tree.set_xattr(there, NOTE, b"text")
    assert of_users(source / path) == {"user.before": b"1", NOTE: b"text", "user.shardfs.shard": b"a lie"}
    told = tree.xattrs(there)
    assert {**told, "user.before": b"1", NOTE: b"text"} == told
    assert "user.shardfs.shard" not in told
    tree.remove_xattr(there, "user.before")
    fails(errno.ENODATA, tree.remove_xattr, there, "user.before")
    assert of_users(source / path).keys() == {NOTE, "user.shardfs.shard"}


def test_a_file_has_no_attributes_of_ours(tree: WriteTree, source: Path) -> None:
    """Who copies it with its attributes, as `rsync -X` does, could not set them on the copy."""
    handle = tree.open(there := number(tree, "d/file"), os.O_RDWR)
    tree.write(handle, 0, b"new")
    assert tree.xattrs(there) == {}
    tree.release(handle)


def test_one_may_be_made_or_replaced_alone(tree: WriteTree, source: Path) -> None:
    there = number(tree, "d/file")
    fails(errno.ENODATA, tree.set_xattr, there, NOTE, b"1", os.XATTR_REPLACE)
    tree.set_xattr(there, NOTE, b"2", os.XATTR_CREATE)
    fails(errno.EEXIST, tree.set_xattr, there, NOTE, b"3", os.XATTR_CREATE)
    tree.set_xattr(there, NOTE, b"4", os.XATTR_REPLACE)
    assert of_users(source / "d/file") == {NOTE: b"4"}


@pytest.mark.parametrize("path", ["a/c/0/0", "a/zarr.json", "a/c", "a/c/0", ""])
def test_what_the_formats_have_no_room_for(tree: WriteTree, source: Path, path: str) -> None:
    there = number(tree, path)
    fails(errno.EOPNOTSUPP, tree.set_xattr, there, NOTE, b"1")
    fails(errno.EOPNOTSUPP, tree.remove_xattr, there, NOTE)
    assert NOTE not in tree.xattrs(there)


@pytest.mark.parametrize("name", ["user.shardfs.state", "user.shardfs.new", "trusted.note", "security.note"])
def test_names_that_are_not_for_programs(tree: WriteTree, source: Path, name: str) -> None:
    there = number(tree, "d/file")
    fails(errno.EOPNOTSUPP, tree.set_xattr, there, name, b"1")
    fails(errno.EOPNOTSUPP, tree.remove_xattr, there, name)
    assert not any(n.startswith(("user.", "trusted.")) for n in os.listxattr(source / "d/file"))


def test_an_open_file_has_them_whatever_its_name_is(tree: WriteTree, source: Path) -> None:
    there = number(tree, "d/file")
    handle = tree.open(there, os.O_RDONLY)
    tree.rename(number(tree, "d"), b"file", number(tree, ""), b"other", False)
    (source / "d/file").write_bytes(b"another one")
    tree.set_xattr(there, NOTE, b"1")
    tree.unlink(number(tree, ""), b"other")
    assert tree.read(there, 0, 100) == b"content"
    tree.set_xattr(there, NOTE, b"2")
    assert tree.xattrs(there) == {NOTE: b"2"}
    assert of_users(source / "d/file") == {}
    tree.release(handle)


def test_nothing_is_set_outside_of_the_source(tree: WriteTree, source: Path, tmp_path: Path) -> None:
    """A directory is swapped for a link when its file is known already."""
    there = number(tree, "d/file")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"secret")
    os.setxattr(tmp_path / "outside/file", NOTE, b"secret")
    (source / "d").rename(source / "was")
    (source / "d").symlink_to(tmp_path / "outside")
    fails(errno.EACCES, tree.set_xattr, there, NOTE, b"1")
    fails(errno.EACCES, tree.remove_xattr, there, NOTE)
    fails(errno.EACCES, tree.xattrs, there)
    assert of_users(tmp_path / "outside/file") == {NOTE: b"secret"}


# ---- links


def test_a_link_is_a_copy_with_all_that_a_file_has(tree: WriteTree, source: Path) -> None:
    os.setxattr(source / "d/file", NOTE, b"1")
    (source / "d/file").chmod(0o640)
    os.utime(source / "d/file", ns=(5, 1_234_567_890))
    made = tree.link(number(tree, "d/file"), number(tree, "a"), b"linked")
    found = (source / "a/linked").stat()
    assert (made.mtime_ns, found.st_mtime_ns, found.st_mode & 0o7777) == (1_234_567_890, 1_234_567_890, 0o640)
    assert ((source / "a/linked").read_bytes(), of_users(source / "a/linked")) == (b"content", {NOTE: b"1"})
    fails(errno.EEXIST, tree.link, number(tree, "d/file"), number(tree, "a"), b"linked")
    tree.truncate(made.number, 3, None)
    assert ((source / "a/linked").read_bytes(), (source / "d/file").read_bytes()) == (b"con", b"content")
    assert [name for name in os.listdir(source / "a") if name.startswith(".")] == []


def test_a_link_to_an_open_file_without_a_name(tree: WriteTree, source: Path) -> None:
    handle = tree.open(there := number(tree, "d/file"), os.O_RDWR)
    tree.unlink(number(tree, "d"), b"file")
    tree.write(handle, 0, b"CON")
    tree.link(there, number(tree, "d"), b"again")
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
    handle = tree.open(there := number(tree, "d/file"), os.O_RDWR)
    tree.allocate(handle, 0, 1 << 20, 1)
    found = (source / "d/file").stat()
    assert (found.st_size, found.st_blocks >= 2048) == (7, True)
    tree.allocate(handle, 0, 1000, 0)
    assert tree.attributes(there).size == 1000
    tree.release(handle)
    assert (source / "d/file").read_bytes() == b"content".ljust(1000, b"\0")


@pytest.mark.parametrize("path", ["a/c/0/0", "a/zarr.json"])
def test_no_room_is_made_for_what_is_no_file_of_the_disk(tree: WriteTree, path: str) -> None:
    before = tree.read(number(tree, path), 0, 1 << 20)
    handle = tree.open(number(tree, path), os.O_RDWR)
    fails(errno.EOPNOTSUPP, tree.allocate, handle, 0, 1 << 20, 0)
    tree.release(handle)
    assert tree.read(number(tree, path), 0, 1 << 20) == before


def test_who_reads_only_makes_no_room(tree: WriteTree) -> None:
    handle = tree.open(number(tree, "d/file"), os.O_RDONLY)
    fails(errno.EBADF, tree.allocate, handle, 0, 1000, 0)
    tree.release(handle)


# ---- symbolic links


@pytest.mark.parametrize(
    ("directory", "target", "wanted"),
    [
        ("", "a", True),
        ("", "a/b/./c/", True),
        ("", ".", True),
        ("", "..", False),
        ("", "./../x", False),
        ("d", "..", True),
        ("d", "../x", True),
        ("d", "../../x", False),
        ("d/e", "../../x", True),
        ("d/e", "../../../x", False),
        ("d/e", "x/../y", False),  # x may be a link itself
        ("d/e", "../x/..", False),
        ("d/e", "..x/...", True),
        ("d", "/etc/passwd", False),
        ("d", "//x", False),
    ],
)
def test_where_links_may_lead(directory: str, target: str, wanted: bool) -> None:
    assert stays_inside(directory, target) is wanted


def listed(tree: WriteTree, directory: str) -> dict[bytes, tuple[bool, bool]]:
    """Names, and whether they are directories, or links."""
    found: dict[bytes, tuple[bool, bool]] = {}
    for batch in tree.scan(number(tree, directory)):
        links = batch.links if batch.links is not None else [False] * len(batch.names)
        found |= dict(
            zip(batch.names.tolist(), zip(batch.directories.tolist(), map(bool, links), strict=True), strict=True)
        )
    return found


def test_links_of_the_source_are_shown_as_such(tree: WriteTree, source: Path) -> None:
    """Else chunks had two names, and were written to the same shard under both."""
    (source / "latest").symlink_to("a")
    (source / "d/up").symlink_to("../a/README")
    (source / "d/dangling").symlink_to("nothing")
    for _ in range(2):  # before it was looked up, and then
        assert listed(tree, "")[b"latest"] == (False, True)
        assert listed(tree, "d") == {b"file": (False, False), b"up": (False, True), b"dangling": (False, True)}
        for path, target in (("latest", b"a"), ("d/up", b"../a/README"), ("d/dangling", b"nothing")):
            found = tree.resolve(path)
            assert (stat.S_ISLNK(found.mode), found.directory, found.size) == (True, False, len(target))
            tree.remember(found.number)
            assert tree.read_link(found.number) == target
    tree.unlink(number(tree, ""), b"latest")
    assert not os.path.lexists(source / "latest")
    assert (source / "a/zarr.json").exists()


def test_links_are_followed_where_the_kernel_does_not(tree: WriteTree, source: Path) -> None:
    (source / "latest").symlink_to("a")
    tree.hooks.shows_links = False
    assert tree.resolve("latest").directory
    assert listed(tree, "")[b"latest"] == (True, False)
    fails(errno.EPERM, tree.symlink, number(tree, "d"), b"s", b"file")


@pytest.mark.parametrize("target", ["../outside/secret", "/etc/passwd", "d/up/../outside/secret", "d/../../outside"])
def test_links_that_lead_out_are_not(tree: WriteTree, source: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    (source / "d/up").symlink_to("..")
    (source / "evil").symlink_to(target)
    fails(errno.EACCES, tree.resolve, "evil")
    assert listed(tree, "")[b"evil"] == (False, False)
    fails(errno.EPERM, tree.symlink, number(tree, ""), b"s", target.encode())
    assert not os.path.lexists(source / "s")


def test_a_link_that_is_changed_meanwhile_does_not_lead_out(tree: WriteTree, source: Path) -> None:
    made = tree.symlink(number(tree, "d"), b"s", b"file")
    tree.remember(made.number)
    (source / "d/s").unlink()
    (source / "d/s").symlink_to("../../secret")
    fails(errno.EACCES, tree.read_link, made.number)
    (source / "d/s").unlink()
    fails(errno.ESTALE, tree.read_link, made.number)


def test_a_link_does_not_lead_out_from_where_it_is_moved_to(tree: WriteTree, source: Path) -> None:
    (source / "d/e").mkdir()
    made = tree.symlink(number(tree, "d/e"), b"s", b"../../a")
    tree.remember(made.number)
    fails(errno.EPERM, tree.rename, number(tree, "d/e"), b"s", number(tree, "d"), b"s", False)
    tree.rename(number(tree, "d"), b"e", number(tree, ""), b"e", False)
    fails(errno.EACCES, tree.read_link, made.number)
    assert os.readlink(source / "e/s") == "../../a"


@pytest.mark.parametrize(
    "path", ["a/s", "a/c/s", "a/c/0/s", "a/c/3/3", "a/zarr.json2.partial", "d/zarr.json", "d/.shardfs-x"]
)
def test_no_links_beside_sharded_data(tree: WriteTree, source: Path, path: str) -> None:
    parent, _, name = path.rpartition("/")
    fails(errno.EPERM, tree.symlink, number(tree, parent), name.encode(), b"x")
    tree.symlink(number(tree, "d"), b"s", b"x")
    fails(errno.EPERM, tree.rename, number(tree, "d"), b"s", number(tree, parent), name.encode(), False)
    fails(errno.EPERM, tree.link, number(tree, "d/s"), number(tree, parent), name.encode())
    assert (os.readlink(source / "d/s"), os.path.lexists(source / path)) == ("x", False)


def test_what_a_link_has_not(tree: WriteTree, source: Path) -> None:
    """Nothing reaches the file that it leads to."""
    there = tree.symlink(number(tree, "d"), b"s", b"file").number
    tree.remember(there)
    before = (source / "d/file").stat()
    fails(errno.EOPNOTSUPP, tree.set_xattr, there, NOTE, b"1")
    fails(errno.ELOOP, tree.truncate, there, 0, None)
    fails(errno.ELOOP, tree.open, there, os.O_RDWR)
    tree.set_mode(there, 0o600)
    tree.set_times(there, 5)
    assert (tree.xattrs(there), (source / "d/file").stat()) == ({}, before)
    assert (source / "d/s").lstat().st_mtime_ns == 5


def test_mode_and_time_of_a_document_reach_the_source(tree: WriteTree, source: Path) -> None:
    """As of what is copied with them, by programs that set them in the end."""
    there = number(tree, "a/zarr.json")
    tree.set_mode(there, 0o640)
    tree.set_times(there, 1_234_567_890)
    info = (source / "a/zarr.json").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o640, 1_234_567_890)
    assert tree.attributes(there).mtime_ns == 1_234_567_890


WALK = """if 1:
    import json, os, sys
    os.chdir(sys.argv[1])
    told = {}
    for at, directories, files in os.walk("."):
        for path in (os.path.normpath(os.path.join(at, name)) for name in directories + files):
            try:
                told[path] = os.readlink(path) if os.path.islink(path) else open(path, "rb").read().decode("latin1")
            except OSError as e:
                told[path] = e.errno
    with open("latest/c/0/0", "wb") as f:
        f.write(b"new!")
    told["through"] = open("a/c/0/0").read(), os.stat("a/c/0/0").st_ino == os.stat("latest/c/0/0").st_ino
    print(json.dumps(told))
"""


@pytest.mark.fuse
def test_a_chunk_has_one_name_on_a_mount(source: Path, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "secret").write_bytes(b"secret")
    for name, target in (
        ("latest", "a"),
        ("d/up", "../a/README"),
        ("evil", "../secret"),
        ("worse", "d/up/../../../secret"),
    ):
        (source / name).symlink_to(target)
    with writable(source, tmp_path) as mount:
        mount.mount()
        run = _run([sys.executable, "-c", WALK, mount.path], 60)
        assert run.returncode == 0, run.stderr
        done = mount.umount()
        assert done.returncode == 0, done.stderr
    told = json.loads(run.stdout)
    assert (told["latest"], told["d/up"], told["d/file"]) == ("a", "../a/README", "content")
    assert "secret" not in told.values()
    assert told["evil"] == errno.EACCES
    assert told["through"] == ["new!", True]
    assert (source / "latest").is_symlink()
    stored = open_tree(str(source))
    assert stored.read(stored.number("a/c/0/0"), 0, 10) == b"new!"
