"""Shards that are symbolic links, as git-annex and DataLad have them, in a source that is written."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardfs.jobs.verify import ShardVerifier
from shardfs.model.errors import CorruptShardError
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
from shardfs.vfs.tree import open_tree
from shardfs.write.journal import Journal
from shardfs.write.publish_shard import Publishing
from shardfs.write.tree import open_write_tree
from tests import handmade
from tests.conftest import need_fuse
from tests.suites.walking import walk
from tests.write.engines import NEVER, TreeFiles
from tests.write.hooks import Recorder, fail, hooked
from tests.write.mounts import writable
from tests.write.steps import Steps
from tests.write.test_local_writer import names, with_member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ------------------------------------------------------------------------------------------------ the writer


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the source `tmp_path / "a"`; links in the source lead to it."""
    source, other = tmp_path / "a", tmp_path / "outside"
    other.mkdir()
    source.mkdir()
    (other / "secret").write_bytes(b"secret")
    (source / "link").symlink_to(other)
    (source / "file").symlink_to(other / "secret")
    (source / "dangling").symlink_to(other / "new")
    (source / "sub").mkdir()
    (source / "inside").symlink_to("sub")
    return other


def calls(writer: LocalWriter) -> list[Callable[[str], object]]:
    """What is asked before a chunk is taken, and what publishes it."""
    return [writer.require_writable, lambda key: writer.put(key, b"x")]


def test_links_to_directories_are_followed_if_asked_for(tmp_path: Path, outside: Path) -> None:
    writer = LocalWriter(LocalStore(str(tmp_path / "a"), follow_symlinks=True))
    for key in ("link/new", "link/deep/new"):
        writer.require_writable(key)
        writer.put(key, b"new")
        assert (outside / key.removeprefix("link/")).read_bytes() == b"new"
    writer.delete("file")  # the link, not what it leads to
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (tmp_path / "a/file").is_symlink()


@pytest.mark.parametrize("follow", [False, True])
def test_a_file_that_is_a_link_is_refused_before_anything_is_written(
    tmp_path: Path, outside: Path, follow: bool
) -> None:
    (tmp_path / "a/near").symlink_to("sub/real")
    (tmp_path / "a/sub/real").write_bytes(b"real")
    writer = LocalWriter(LocalStore(str(tmp_path / "a"), follow_symlinks=follow))
    for key in ("near", "file", "dangling"):
        for refused in calls(writer):
            with pytest.raises(OSError, match="linked_shards=replace") as e:
                refused(key)
            assert e.value.errno == errno.EROFS
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (outside / "new").exists()
    for key in ("sub/real", "sub/new", "new/new"):
        writer.require_writable(key)


@pytest.mark.parametrize(("key", "follow"), [("near", False), ("near", True), ("file", True)])
def test_a_link_is_replaced_by_a_file_if_asked_for(tmp_path: Path, outside: Path, key: str, follow: bool) -> None:
    target = (tmp_path / "a/sub/real") if key == "near" else outside / "secret"
    target.write_bytes(b'{"first": 1}')
    target.chmod(0o444)  # as git-annex has it
    (tmp_path / "a/near").symlink_to("sub/real")
    writer = LocalWriter(LocalStore(str(tmp_path / "a"), follow_symlinks=follow), replace_links=True)
    writer.require_writable(key)
    writer.update(key, Steps(with_member("ours"), in_place=16))
    path = tmp_path / "a" / key
    assert not path.is_symlink()
    assert json.loads(path.read_bytes()) == {"first": 1, "ours": 1}
    assert path.stat().st_mode & 0o200
    assert target.read_bytes() == b'{"first": 1}'
    assert names(tmp_path) == sorted({"dangling", "file", "inside", "link", "near", "sub"})


def test_a_link_is_removed_with_the_last_chunk_if_asked_for(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "a/near").symlink_to("sub/real")
    (tmp_path / "a/sub/real").write_bytes(b"real")
    writer = LocalWriter(LocalStore(str(tmp_path / "a")), replace_links=True)
    assert writer.update("near", Steps(lambda _: None)) is None
    assert not (tmp_path / "a/near").is_symlink()
    assert (tmp_path / "a/sub/real").read_bytes() == b"real"


def test_links_that_cannot_be_replaced(tmp_path: Path, outside: Path) -> None:
    writer = LocalWriter(LocalStore(str(tmp_path / "a")), replace_links=True)
    for key, number in (("dangling", errno.EROFS), ("file", errno.EACCES), ("link/new", errno.EACCES)):
        for refused in calls(writer):
            with pytest.raises(OSError, match="symbolic link") as e:
                refused(key)
            assert e.value.errno == number
    assert os.listdir(outside) == ["secret"]


def test_who_makes_the_link_lead_elsewhere_meanwhile_loses_nothing(tmp_path: Path) -> None:
    """As `git annex add` or `datalad save` do. Before each call in turn, and an error at each call in turn."""
    source, writer = tmp_path / "a", LocalWriter(LocalStore(str(tmp_path / "a")), replace_links=True)
    source.mkdir()

    def lead_to(content: dict[str, int]) -> None:
        target = source / f"key-{len(os.listdir(source))}"
        target.write_text(json.dumps(content))
        (source / "new").symlink_to(target.name)
        (source / "new").rename(source / "shard")

    def prepare() -> None:
        for path in source.iterdir():
            path.unlink()
        lead_to({"first": 1})

    def slip_in() -> None:
        lead_to({**json.loads((source / "shard").read_bytes()), "theirs": 1})

    prepare()
    with hooked(recorder := Recorder()):
        writer.update("shard", Steps(with_member("ours")))
    for at in range(len(recorder.calls)):
        prepare()
        with hooked(Recorder(at, slip_in)):
            writer.update("shard", Steps(with_member("ours")))
        assert json.loads((source / "shard").read_bytes()) == {"first": 1, "ours": 1, "theirs": 1}, at
        prepare()
        with hooked(Recorder(at, fail(errno.EIO))), suppress(OSError):
            writer.update("shard", Steps(with_member("ours")))
        assert json.loads((source / "shard").read_bytes()) in ({"first": 1}, {"first": 1, "ours": 1}), at
        writer.update("shard", Steps(with_member("ours")))
        assert json.loads((source / "shard").read_bytes()) == {"first": 1, "ours": 1}, at
        assert sorted(os.listdir(source))[0].startswith("key-"), at


def test_what_another_user_protected_is_refused_before_anything_is_written() -> None:
    """As root may write everything, a process of another user is asked."""
    program = (
        "import os, sys\n"
        "from shardfs.storage.local import LocalStore\n"
        "from shardfs.storage.writers.local import LocalWriter\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "for key in sys.argv[2:]:\n"
        "    try: LocalWriter(LocalStore(sys.argv[1])).require_writable(key); print('may be written')\n"
        "    except OSError as e: print(e.strerror)\n"
    )
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        for name, mode in (("open", 0o777), ("closed", 0o755)):
            os.mkdir(f"{top}/{name}")
            Path(top, name, "shard").write_bytes(b"x")
            os.chmod(f"{top}/{name}", mode)
        Path(top, "open", "mine").write_bytes(b"x")
        os.chmod(f"{top}/open/mine", 0o666)
        keys = ["open/mine", "open/new", "open/shard", "closed/new"]
        run = subprocess.run([sys.executable, "-c", program, top, *keys], capture_output=True, text=True, check=True)
    wanted = ["may be written", "may be written", "is write-protected", "is in a directory that is write-protected"]
    assert run.stdout.splitlines() == wanted


# ------------------------------------------------------------------------------------------- chunks in such shards

_CHUNKS = [b"one ", b"two ", b"three", None]
_SHOWN = {"c/0/0": b"one ", "c/0/1": b"two ", "c/1/0": b"three"}


def _annexed(top: Path, *, inside: bool, directory: bool = False) -> Path:
    """An array of two shards, of which the first is a link; or its directory, in which `c/1/0` could be made."""
    source = top / "source"
    handmade.write_json(source / "zarr.json", handmade.zarr_metadata((8, 4), (4, 4), (2, 2)))
    keys = source / "annex" if inside else top / "annex"
    keys.mkdir()
    handmade.write_files(source, {"c/1/0": handmade.zarr_shard(_CHUNKS)})
    if directory:
        (keys / "0").mkdir()
        (source / "c/0").symlink_to(os.path.relpath(keys / "0", source / "c"))
        (keys / "0/0").write_bytes(handmade.zarr_shard(_CHUNKS))
        return source
    (source / "c/0").mkdir()
    (keys / "KEY").write_bytes(handmade.zarr_shard(_CHUNKS))
    (keys / "KEY").chmod(0o444)
    (source / "c/0/0").symlink_to(os.path.relpath(keys / "KEY", source / "c/0"))
    return source


@contextmanager
def _opened(source: Path, *, replace: bool = False, follow: bool = False) -> Iterator[TreeFiles]:
    journal = Journal.open(
        source.parent / "journal", str(source), limit_bytes=2 << 20, reserve_bytes=1 << 18, commit_s=0
    )
    base = open_tree(str(source), follow_symlinks=follow)
    tree = open_write_tree(base, journal, publishing=Publishing(idle_s=NEVER, age_s=NEVER), replace_links=replace)
    try:
        yield TreeFiles(tree, journal)
    finally:
        tree.pending.close(5)


def _changes(files: TreeFiles, name: str, new: str) -> list[Callable[[], object]]:
    return [
        lambda: files.write(name, b"x"),
        lambda: files.write(new, b"x"),
        lambda: files.patch(name, 0, b"x"),
        lambda: files.unlink(name),
        lambda: files.rename(name, "c/2/0"),
        lambda: files.rename("c/2/1", name),
        lambda: files.tree.truncate(files.tree.resolve(name).number, 1, None),
    ]


@pytest.mark.parametrize(("inside", "follow"), [(True, False), (False, True)])
def test_chunks_of_a_shard_that_is_a_link_are_refused_when_they_are_opened(
    inside: bool, follow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _annexed(tmp_path, inside=inside)
    with _opened(source, follow=follow) as files, caplog.at_level(logging.WARNING):
        for change in _changes(files, "c/0/0", "c/1/1"):
            with pytest.raises(OSError, match="linked_shards=replace") as e:
                change()
            assert e.value.errno == errno.EROFS
        files.write("c/2/0", b"new!")  # its shard is a file
        files.publish()
        assert {name: files.read(name) for name in _SHOWN} == _SHOWN
        assert not files.tree.left()
    assert "c/0/0: refuses chunks: is a symbolic link, and -o linked_shards=replace" in caplog.text
    assert (source / "c/0/0").is_symlink()
    assert walk(open_tree(str(source), follow_symlinks=follow))["c/2/0"] == b"new!"


@pytest.mark.parametrize(("inside", "follow"), [(True, False), (False, True)])
def test_a_shard_that_is_a_link_is_replaced_if_asked_for(inside: bool, follow: bool, tmp_path: Path) -> None:
    source = _annexed(tmp_path, inside=inside)
    key = (source if inside else tmp_path) / "annex/KEY"
    before = key.read_bytes()
    with _opened(source, replace=True, follow=follow) as files:
        files.write("c/0/0", b"new!")
        files.publish()
        files.write("c/1/1", b"too")  # now that it is a file
        files.publish()
    assert not (source / "c/0/0").is_symlink()
    assert (key.read_bytes(), key.stat().st_mode & 0o777) == (before, 0o444)
    tree_files = walk(open_tree(str(source)))
    assert {n: tree_files[n] for n in (*_SHOWN, "c/1/1")} == {**_SHOWN, "c/0/0": b"new!", "c/1/1": b"too"}


def test_a_directory_of_shards_that_is_a_link(tmp_path: Path) -> None:
    """Inside of the source shards are replaced where they are; what would be outside is refused when it is opened."""
    (tmp_path / "near").mkdir()
    source = _annexed(tmp_path / "near", inside=True, directory=True)
    with _opened(source) as files:
        files.write("c/0/0", b"new!")
        files.publish()
    assert (source / "c/0").is_symlink()
    assert walk(open_tree(str(source)))["c/0/0"] == b"new!"
    (tmp_path / "far").mkdir()
    source = _annexed(tmp_path / "far", inside=False, directory=True)
    (tmp_path / "far/annex/0/0").unlink()  # so that nothing says what is wrong but the directory
    with _opened(source, replace=True) as files:
        with pytest.raises(PermissionError, match="leads out of the source"):
            files.write("c/0/0", b"new!")
        assert not files.tree.left()
    with _opened(source, follow=True) as files:
        files.write("c/0/0", b"new!")
        files.publish()
    assert (tmp_path / "far/annex/0/0").exists()


@pytest.mark.parametrize("directory", [False, True])
def test_a_link_to_nothing_is_damage_and_no_missing_shard(directory: bool, tmp_path: Path) -> None:
    """As in a clone of a DataLad dataset before `git annex get`: a reader must not take the fill value."""
    source = _annexed(tmp_path, inside=True, directory=directory)
    (source / "annex").rename(source / "elsewhere")
    with _opened(source, replace=True) as files:
        for name in ("c/0/0", "c/1/1"):
            with pytest.raises(CorruptShardError, match="leads nowhere"):
                files.read(name)
            with pytest.raises(CorruptShardError, match="leads nowhere"):
                files.write(name, b"x")
    tree = open_tree(str(source))
    listed = {name.decode() for b in tree.scan(tree.resolve("c/0").number) for name in b.names.tolist()}
    assert listed == {"0", "1"}
    (chunks,) = tree.collections()
    (finding,) = ShardVerifier(chunks).verify(0).findings
    assert (finding.shard, finding.kind) == ("c/0/0", "read")


def test_a_plain_file_that_is_a_link_to_nothing_does_not_exist(tmp_path: Path) -> None:
    source = _annexed(tmp_path, inside=True)
    (source / "notes").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        open_tree(str(source)).resolve("notes")


@pytest.mark.fuse
@pytest.mark.parametrize("options", [[], ["-o", "linked_shards=replace"]], ids=["refuse", "replace"])
def test_through_a_mount(options: list[str], tmp_path: Path) -> None:
    need_fuse()
    source = _annexed(tmp_path, inside=True)
    program = (
        "import os, sys\n"
        "for name in ('c/0/0', 'c/1/1', 'c/2/1'):\n"
        "    try: fd = os.open(name, os.O_WRONLY | os.O_CREAT); os.write(fd, b'new!'); os.close(fd); print(0)\n"
        "    except OSError as e: print(e.errno)\n"
    )
    with writable(source, tmp_path / "at", *options) as mount:
        mount.mount()
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=mount.path, capture_output=True, text=True, timeout=250, check=True
        )
        ended = mount.umount()
    assert ended.returncode == 0, ended.stderr
    refused = 0 if options else errno.EROFS
    assert run.stdout.split() == [str(refused), str(refused), "0"]
    assert (source / "c/0/0").is_symlink() == (not options)
    tree_files = walk(open_tree(str(source)))
    assert tree_files["c/2/1"] == b"new!"
    assert tree_files.get("c/1/1") == (b"new!" if options else None)
    assert tree_files["c/0/0"] == (b"new!" if options else b"one ")
