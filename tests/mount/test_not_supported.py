"""What shardfs does not do is refused at once, with the reason and the way to do without."""

from __future__ import annotations

import gzip
import json
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from shardfs.storage.pack_state import STATE
from tests import handmade
from tests.conftest import mount_entry
from tests.datasets import GZIP, LITTLE, ROOT, ramp, same
from tests.jobs.interrupting import interrupted
from tests.jobs.packing import pack_in_place
from tests.mount.programs import attempt, run, shardfs
from tests.waiting import wait_until
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Mounted


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("cas=none", "write to a local copy, or to S3, Google Cloud Storage or Azure"),
        ("max_read=65536", "the kernel chooses the size of reads: use `direct_io` or `poll_us`"),
        ("max-readahead=65536", "the kernel chooses how far it reads ahead: use `direct_io` or `poll_us`"),
        ("forget_sharding", "write it again with `create=none`"),
        ("u64=nowrap", "leave the option out"),
    ],
)
def test_a_removed_option_is_refused_with_what_to_do_instead(option: str, instead: str, tmp_path: Path) -> None:
    completed = shardfs("mount", tmp_path, tmp_path, "-o", option)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"shardfs: {option.partition('=')[0]!r} was removed; ")
    assert instead in completed.stderr
    name, _, value = option.partition("=")
    profile = tmp_path / "profile.toml"
    profile.write_text(f"[mount.x]\nsource = '/x'\nmountpoint = '/x'\n{name} = '{value or True}'\n")
    completed = shardfs("config", "check", "--config", profile)
    assert (completed.returncode, instead in completed.stdout + completed.stderr) == (2, True), completed


@pytest.mark.fuse
def test_shards_in_two_files_are_written_after_unpack_and_pack(tmp_path: Path) -> None:
    case = handmade.CASES["volume_legacy_pair"](tmp_path / "source")
    (index,) = case.path.rglob("*.index")
    name = next(n for n in case.good if index.parent.name in n)
    with writable(case.path, tmp_path / "first") as mount:
        mount.mount()
        for suffix in ("", ".gz"):
            completed = attempt("cp", "/dev/null", f"{mount.path / name}{suffix}")
            assert (completed.returncode, "Read-only file system" in completed.stderr) == (1, True)
        log = (mount.path / ".shardfs/log").read_text()
        assert "two files (.index and .data), which shardfs only reads" in log
        assert "`shardfs unpack` and then `shardfs pack`" in log
        assert mount.umount().returncode == 0
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    assert shardfs("unpack", case.path, plain).returncode == 0
    assert shardfs("pack", plain, packed).returncode == 0
    with writable(packed, tmp_path / "second") as mount:
        mount.mount()
        chunk = bytes(reversed((mount.path / name).read_bytes()))
        (mount.path / name).write_bytes(chunk)
        assert mount.umount().returncode == 0
    assert run(sys.executable, "-m", "shardfs", "cat", packed, name).encode() == chunk


@pytest.mark.fuse
def test_a_read_only_mount_shows_the_source_and_names_what_is_unpublished(tmp_path: Path) -> None:
    source = tmp_path / "source"
    handmade.write_json(source / "zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    handmade.write_files(source, {"c/0/0": handmade.zarr_shard([b"old.", None, None, None])})
    with writable(source, tmp_path / "first", "-o", "idle=1000,age=1000") as mount:
        mount.mount()
        (mount.path / "c/0/0").write_bytes(b"new.")
        mount.kill()
        mount.clear()
        (tmp_path / "ro").mkdir()
        completed = shardfs("mount", "-o", f"journal={mount.journal}", source, tmp_path / "ro")
        assert (completed.returncode, (tmp_path / "ro/c/0/0").read_bytes()) == (0, b"old.")
        assert shardfs("umount", tmp_path / "ro").returncode == 0
        assert "its journal has 1 unpublished file, not shown here" in completed.stderr
        assert "`shardfs recover --apply`" in completed.stderr
        assert shardfs("recover", "--apply", "-o", f"journal={mount.journal}", source).returncode == 0
    assert run(sys.executable, "-m", "shardfs", "cat", source, "c/0/0") == "new."


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("member", "value"), [("fill_value", 7), ("compressor", {"id": "gzip", "level": 9}), ("order", "F")]
)
def test_a_layout_resizes_and_describes_arrays_and_changes_nothing_else(
    member: str, value: object, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    document = handmade.zarr_metadata((4, 4), (4, 4), (2, 2), codecs=[LITTLE, GZIP], data_type="uint16")
    handmade.write_json(source / "a/zarr.json", document)
    with writable(source, tmp_path, "--layout", "zarr2") as mount:
        mount.mount()
        document_path = mount.path / "a/.zarray"
        before = document_path.read_text()
        with pytest.raises(OSError, match="Invalid argument"):
            document_path.write_text(json.dumps({**json.loads(before), "shape": [8, 4], member: value}))
        why = f".zarray: {member}: cannot be changed through a layout; change it in the source, or through a mount"
        assert f"{why} without --layout" in (mount.path / ".shardfs/log").read_text()
        assert document_path.read_text() == before
        document_path.write_text(json.dumps({**json.loads(before), "shape": [8, 4]}))
        assert mount.umount().returncode == 0
    assert json.loads((source / "a/zarr.json").read_text()) == {**document, "shape": [8, 4]}


@pytest.mark.fuse
@pytest.mark.parametrize("ours", [False, True])
def test_documents_that_another_program_has_changed_are_not_merged(tmp_path: Path, ours: bool) -> None:
    source = tmp_path / "source/a/zarr.json"
    document = handmade.zarr_metadata((4, 4), (4, 4), (2, 2))
    handmade.write_json(source, document)
    resized = {**document, "shape": [8, 4]}
    with writable(tmp_path / "source", tmp_path) as mount:
        mount.mount()
        document_path, log = mount.path / "a/zarr.json", mount.path / ".shardfs/log"
        before = json.loads(document_path.read_text())
        handmade.write_json(source, resized)
        assert "Stale file handle" in attempt("rm", document_path).stderr
        why = "a/zarr.json: another program has changed the document since it was read here; read it again"
        former = "a/zarr.json: the document has a former value of shape.0, and another program has changed it"

        def is_refused(reason: str) -> bool:
            with pytest.raises(OSError, match="Stale file handle"):
                document_path.write_text(json.dumps({**before, "attributes": {"ours": 1}}))
            assert json.loads(source.read_text()) == resized
            assert json.loads(document_path.read_text())["shape"] == [8, 4]
            return reason in log.read_text()

        assert is_refused(why)
        wait_until(lambda: is_refused(former))  # once the kernel has released the file that was refused first
        again = json.loads(document_path.read_text())
        document_path.write_text(json.dumps({**again, "attributes": {"again": 1}}))
        resized["attributes"] = {"again": 1}
        assert json.loads(source.read_text()) == resized
        completed = mount.umount()
        assert (completed.returncode, "a/zarr.json" in completed.stderr) == (3, True)
        journal = f"journal={mount.journal}"
        assert "a/zarr.json" in shardfs("recover", mount.source, "-o", journal).stdout
        for command in (["--ours" if ours else "--theirs", "a/zarr.json"], ["--apply"]):
            assert shardfs("recover", mount.source, *command, "-o", journal).returncode == 0
    assert json.loads(source.read_text()) == ({**document, "attributes": {"ours": 1}} if ours else resized)


@pytest.mark.fuse
def test_a_document_that_another_program_has_removed_is_not_made_anew(tmp_path: Path) -> None:
    source = tmp_path / "source/a/zarr.json"
    handmade.write_json(source, handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    with writable(tmp_path / "source", tmp_path) as mount:
        mount.mount()
        document_path = mount.path / "a/zarr.json"
        with open(document_path, "r+") as file:
            before = file.read()
            source.unlink()
            file.write(" ")
            with pytest.raises(OSError, match="Stale file handle"):
                file.close()
        why = "another program has removed or replaced the document since it was read here; read it again"
        assert before
        assert why in (mount.path / ".shardfs/log").read_text()
        assert not source.exists()
        assert mount.umount().returncode == 3


@pytest.mark.fuse
def test_a_compressed_chunk_has_no_second_name(tmp_path: Path) -> None:
    source, chunks = tmp_path / "source", [f"s/{x}-{x + 2}_0-2_0-2" for x in (0, 2, 4, 6)]
    handmade.write_json(source / "info", handmade.volume_info((8, 2, 2), (2, 2, 2), handmade.sharding()))
    for n, name in enumerate(chunks):
        handmade.write_files(tmp_path, {f"{name}.gz": gzip.compress(b"%08d" % n)})
    with writable(source, tmp_path) as mount:
        mount.mount()
        (mount.path / "s").mkdir()
        copies = [("sh", "-c", 'cat "$0" > "$1"'), ("cp", "-p"), ("rsync", "-a")]
        copies.append((sys.executable, "-c", "import shutil, sys; shutil.copy2(*sys.argv[1:])"))
        for n, (name, command) in enumerate(zip(chunks, copies, strict=True)):
            completed = attempt(*command, tmp_path / f"{name}.gz", mount.path / f"{name}.gz")
            assert (completed.returncode, "FileNotFoundError" in completed.stderr) == (int(n == 3), n == 3), (
                completed.stderr
            )
            assert "No such file or directory" in attempt("cat", mount.path / f"{name}.gz").stderr
            assert (mount.path / name).read_bytes() == b"%08d" % n
        with pytest.raises(OSError, match="Invalid argument"):
            (mount.path / f"{chunks[0]}.br").write_bytes(b"any")
        assert "cannot decompress .br files" in (mount.path / ".shardfs/log").read_text()
        assert mount.umount().returncode == 3  # a version was refused
    assert [run(sys.executable, "-m", "shardfs", "cat", source, c) for c in chunks] == [f"{n:08}" for n in range(4)]


REPLACE = """
import sys, zarr
zarr.open_group(sys.argv[1], mode="w")
"""


@pytest.mark.fuse
@pytest.mark.interop
def test_links_are_followed_and_cannot_be_made_or_emptied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    handmade.write_json(source / "a/zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    handmade.write_files(source, {"a/c/0/0": handmade.zarr_shard([b"kept", None, None, None])})
    handmade.write_files(
        source, {"notes/text": b"kept", "group/zarr.json": b'{"zarr_format": 3, "node_type": "group"}'}
    )
    (source / "latest").symlink_to("a")
    (source / "group/notes").symlink_to("../notes")
    with writable(source, tmp_path) as mount:
        mount.mount()
        assert (mount.path / "latest/c/0/0").read_bytes() == b"kept"
        assert "Operation not permitted" in attempt("ln", "-s", "a", mount.path / "newest").stderr
        for name in ("latest", "group/notes"):
            assert "Read-only file system" in attempt("rm", "-r", mount.path / name).stderr
        assert attempt(sys.executable, "-c", REPLACE, mount.path / "group").returncode == 1
        assert mount.umount().returncode == 0
    assert (source / "notes/text").read_bytes() == b"kept"
    assert run(sys.executable, "-m", "shardfs", "cat", source, "a/c/0/0") == "kept"


@pytest.mark.fuse
def test_an_array_is_not_read_while_it_is_packed_in_place(tmp_path: Path, mounted: Mounted) -> None:
    source = tmp_path / "source"
    group = zarr.open_group(source, mode="w")
    for name, shards in (("a", None), ("other", (4, 4))):
        group.create_array(name, shape=(8, 8), chunks=(2, 2), shards=shards, dtype="<u2")[:] = ramp((8, 8)) + 1
    interrupted(pack_in_place(str(source), arrays=["a"], chunks_per_shard=(2, 2)), 3)
    why = f"is being packed in place; finish with `shardfs pack --in-place {source}`, or go back with `--abort`"
    (tmp_path / "empty").mkdir()
    for command in ("mount", "ls", "verify"):
        completed = shardfs(command, source / "a", *([tmp_path / "empty"] if command == "mount" else []))
        assert (completed.returncode, f"{source}/a: {why}" in completed.stderr) == (4, True), completed.stderr
    completed = shardfs("cat", source, "a/c/0/0")
    assert (completed.returncode, f"{source}/a: {why}" in completed.stderr) == (4, True), completed.stderr
    completed = shardfs("verify", source)
    assert (completed.returncode, f"a: metadata: {source}/a: {why}" in completed.stdout) == (7, True), completed.stdout
    completed = shardfs("mount", "--rw", source, tmp_path / "empty")
    assert (
        completed.returncode,
        f"{why}; until then, mount read-only; its array cannot be read" in completed.stderr,
    ) == (
        4,
        True,
    ), completed.stderr
    with mounted(source, "-o", "index_ttl=0.05") as mount:
        assert sorted(os.listdir(mount)) == ["a", "other", "zarr.json"]
        assert same(np.asarray(zarr.open_group(mount, mode="r")["other"]), ramp((8, 8)) + 1)
        for name in ("a/zarr.json", "a/c/0/0"):
            assert "Device or resource busy" in attempt("cat", mount / name).stderr
        assert why in (mount / ".shardfs/log").read_text()
        assert shardfs("pack", "--in-place", source, "--abort").returncode == 0
        assert "is mounted at" in shardfs("pack", "--in-place", source).stderr
    assert shardfs("pack", "--in-place", source, "--chunks-per-shard", "2,2").returncode == 0
    assert same(np.asarray(zarr.open_group(source, mode="r")["a"]), ramp((8, 8)) + 1)


@pytest.mark.fuse
def test_a_mount_shows_an_array_when_its_job_in_place_has_ended(tmp_path: Path, mounted: Mounted) -> None:
    source = tmp_path / "source"
    group = zarr.open_group(source, mode="w")
    for name in ("a", "other"):
        shards = (4, 4) if name == "other" else None
        group.create_array(name, shape=(8, 8), chunks=(2, 2), shards=shards, dtype="<u2")[:] = ramp((8, 8)) + 1
    interrupted(pack_in_place(str(source), arrays=["a"], chunks_per_shard=(2, 2)), 3)
    with mounted(source, "-o", "index_ttl=0.05") as mount:
        assert "Device or resource busy" in attempt("cat", mount / "a/zarr.json").stderr
        assert shardfs("pack", "--in-place", source).returncode == 0
        wait_until(lambda: (mount / "a/zarr.json").exists())
        assert same(np.asarray(zarr.open_group(mount, mode="r")["a"]), ramp((8, 8)) + 1)


@pytest.mark.fuse
def test_a_mount_beside_the_beginning_of_a_job_in_place_is_refused(tmp_path: Path) -> None:
    """The job has looked for mounts after this one has opened the source, and before it is there."""
    source, mountpoint = tmp_path / "source", tmp_path / "mnt"
    handmade.write_json(source / "zarr.json", handmade.zarr_metadata((4, 4), (4, 4), (2, 2)))
    mountpoint.mkdir()
    program = f"""\
import sys
from shardfs.cli import run
from shardfs.daemon import mountpoint
from shardfs.storage.pack_state import PACK, PackState, Stage
attach = mountpoint.attach
def begun(*arguments):
    open({str(source / STATE)!r}, "wb").write(PackState(PACK, Stage.BEGUN, [], ["zarr.json"], {{}}).raw())
    return attach(*arguments)
mountpoint.attach = begun
sys.exit(run(sys.argv[1:]))
"""
    completed = attempt(sys.executable, "-c", program, "mount", source, mountpoint, cwd=ROOT)
    assert (completed.returncode, "is being packed in place; finish with" in completed.stderr) == (4, True)
    assert mount_entry(mountpoint) is None
