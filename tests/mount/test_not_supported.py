"""What shardfs does not do is refused at once, with the reason and the way to do without."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests import handmade
from tests.datasets import GZIP, LITTLE
from tests.mount.programs import attempt, run, shardfs
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("option", ["max_read=65536", "max_readahead=65536", "forget_sharding", "u64=nowrap"])
def test_options_without_users_are_unknown(option: str, tmp_path: Path) -> None:
    done = shardfs("mount", tmp_path, tmp_path, "-o", option)
    assert (done.returncode, done.stderr) == (2, f"shardfs: unknown option {option.partition('=')[0]!r}\n")


@pytest.mark.fuse
def test_shards_in_two_files_are_written_after_unpack_and_pack(tmp_path: Path) -> None:
    case = handmade.CASES["volume_legacy_pair"](tmp_path / "source")
    (index,) = case.path.rglob("*.index")
    name = next(n for n in case.good if index.parent.name in n)
    with writable(case.path, tmp_path / "first") as mount:
        mount.mount()
        done = attempt("cp", "/dev/null", mount.path / name)
        assert done.returncode == 1
        assert "Read-only file system" in done.stderr
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
        done = shardfs("mount", "-o", f"journal={mount.journal}", source, tmp_path / "ro")
        assert (done.returncode, (tmp_path / "ro/c/0/0").read_bytes()) == (0, b"old.")
        assert shardfs("umount", tmp_path / "ro").returncode == 0
        assert "its journal has 1 unpublished file, not shown here" in done.stderr
        assert "`shardfs recover --apply`" in done.stderr
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
        shown = mount.path / "a/.zarray"
        before = shown.read_text()
        with pytest.raises(OSError, match="Invalid argument"):
            shown.write_text(json.dumps({**json.loads(before), "shape": [8, 4], member: value}))
        why = f".zarray: {member}: cannot be changed through a layout; change it in the source, or through a mount"
        assert f"{why} without --layout" in (mount.path / ".shardfs/log").read_text()
        assert shown.read_text() == before
        shown.write_text(json.dumps({**json.loads(before), "shape": [8, 4]}))
        assert mount.umount().returncode == 0
    assert json.loads((source / "a/zarr.json").read_text()) == {**document, "shape": [8, 4]}


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
