"""Other users, whom `allow_other` lets in, read what they can read in the source, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorstore as ts

if TYPE_CHECKING:
    from tests.conftest import Mounted

NOBODY = 65534

OPTIONS = ("-o", "allow_other,default_permissions")

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as another user"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source that all users may read: an array with 4 shards of 4 chunks each."""
    root = tmp_path / "source"
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    metadata = {
        "shape": [8, 8],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
        "data_type": "uint16",
        "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 2], "codecs": codecs}}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root)}, "metadata": metadata, "create": True}
    ts.open(spec).result()[...] = np.arange(64, dtype=np.uint16).reshape(8, 8)
    change(root, 0o755, 0o644)
    return root


def change(root: Path, directories: int, files: int) -> None:
    for path in (root, *root.rglob("*")):
        path.chmod(directories if path.is_dir() else files)


def as_nobody(mount: Path, *command: str) -> bytes:
    """The output of a program of another user. It begins in the mount, for it may not come from above."""
    completed = subprocess.run(
        command, cwd=mount, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=250, check=False
    )
    return completed.stdout


def below(mount: Path, *, directories: bool) -> list[Path]:
    return sorted(path.relative_to(mount) for path in mount.rglob("*") if path.is_dir() == directories)


def bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


WAYS = [(), ("--rw",)]
LAYOUTS = ["native", "zarr2", "n5", "precomputed"]


@pytest.mark.parametrize("more", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_of_its_owner_alone(layout: str, more: tuple[str, ...], source: Path, mounted: Mounted) -> None:
    change(source, 0o700, 0o600)
    with mounted(source, *OPTIONS, "--layout", layout, *more) as mount:
        files = below(mount, directories=False)
        assert len(files) > 16
        assert {bits(mount / path) for path in files} == {0o600}
        assert {bits(mount / path) for path in (Path(), *below(mount, directories=True))} == {0o700}
        assert as_nobody(mount, "cat", *map(str, files)) == b""
        assert as_nobody(mount, "find", ".") in (b"", b".\n")
        assert all((mount / path).read_bytes() for path in files)


@pytest.mark.parametrize("more", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_of_all_users(layout: str, more: tuple[str, ...], source: Path, mounted: Mounted) -> None:
    with mounted(source, *OPTIONS, "--layout", layout, *more) as mount:
        files = below(mount, directories=False)
        assert {bits(mount / path) for path in files} == {0o644 if more else 0o444}
        assert {bits(mount / path) for path in below(mount, directories=True)} <= {0o755 if more else 0o555}
        assert as_nobody(mount, "cat", *map(str, files)) == b"".join((mount / path).read_bytes() for path in files)


@pytest.mark.parametrize("more", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_shard_of_its_owner_alone(layout: str, more: tuple[str, ...], source: Path, mounted: Mounted) -> None:
    """Its chunks are closed, in listings with attributes and without; those of other shards and documents are not."""
    (source / "c" / "1" / "0").chmod(0o600)
    with mounted(source, *OPTIONS, "--layout", layout, *more) as mount:
        subprocess.run(["ls", "-lR"], cwd=mount, check=True, capture_output=True, timeout=250)
        files = below(mount, directories=False)
        closed = [path for path in files if bits(mount / path) == 0o600]
        assert len(closed) == 4
        if more:
            for path in closed:
                (mount / path).write_bytes((mount / path).read_bytes())
            assert {bits(mount / path) for path in closed} == {0o600}
        for path in files:
            content = (mount / path).read_bytes()
            assert as_nobody(mount, "cat", str(path)) == (b"" if path in closed else content), path


@pytest.mark.parametrize("more", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_of_shards_that_only_its_owner_enters(
    layout: str, more: tuple[str, ...], source: Path, mounted: Mounted
) -> None:
    (source / "c" / "1").chmod(0o700)
    with mounted(source, *OPTIONS, "--layout", layout, *more) as mount:
        files = below(mount, directories=False)
        closed = [path for path in files if not as_nobody(mount, "cat", str(path))]
        assert len(closed) == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_their_owner_alone(layout: str, source: Path, mounted: Mounted) -> None:
    (source / "zarr.json").chmod(0o600)
    with mounted(source, *OPTIONS, "--layout", layout) as mount:
        files = below(mount, directories=False)
        closed = [path.name for path in files if not as_nobody(mount, "cat", str(path))]
        assert set(closed) <= {"zarr.json", ".zarray", ".zattrs", "attributes.json", "info", "provenance"}
        assert closed


def test_the_group_of_a_file(source: Path, mounted: Mounted) -> None:
    """Its bits are for its own group, not for the group that the mount shows."""
    change(source, 0o750, 0o640)
    with mounted(source, *OPTIONS) as mount:
        assert (bits(mount), bits(mount / "zarr.json"), bits(mount / "c/0/0")) == (0o750, 0o640, 0o640)
    with mounted(source, *OPTIONS, "-o", f"gid={NOBODY}") as mount:
        assert (bits(mount), bits(mount / "zarr.json"), bits(mount / "c/0/0")) == (0o700, 0o600, 0o600)
        assert as_nobody(mount, "find", ".") == b""


@pytest.mark.parametrize("more", WAYS)
def test_umask_and_allow_root(more: tuple[str, ...], source: Path, mounted: Mounted) -> None:
    change(source, 0o775, 0o664)
    for words in ("allow_root", "allow_other,default_permissions,umask=077"):
        with mounted(source, "-o", words, *more) as mount:
            for path in (Path(), *below(mount, directories=True), *below(mount, directories=False)):
                assert bits(mount / path) & 0o077 == 0, path


def test_modes_that_the_user_gives(source: Path, mounted: Mounted) -> None:
    change(source, 0o700, 0o600)
    with mounted(source, *OPTIONS, "-o", "file_mode=0440,dir_mode=0550") as mount:
        assert (bits(mount), bits(mount / "zarr.json"), bits(mount / "c/0/0")) == (0o550, 0o440, 0o440)
