"""mount(8) and fstab, through each of the ways in which they find shardfs."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardfs.cli.mount_helper import helper
from tests.datasets import ROOT
from tests.mount.namespace import Namespace, namespace
from tests.mount.programs import copy_tree

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

fuse = pytest.mark.fuse


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path) as new_namespace:
        yield new_namespace


@pytest.fixture
def installed(inside: Namespace) -> Namespace:
    inside.run("shardfs", "install", "--programs", inside.programs)
    return inside


def options_of(inside: Namespace, mountpoint: Path) -> set[str]:
    return set(inside.run("findmnt", "-no", "OPTIONS", mountpoint).strip().split(","))


@fuse
@pytest.mark.parametrize("kind", ["shardfs", "fuse.shardfs"])
def test_mount_of_each_type(kind: str, installed: Namespace, source: Path, mountpoint: Path) -> None:
    words = "ro,_netdev,nofail,noexec,uid=7,x-systemd.automount"
    told = installed.attempt("mount", "-t", kind, "-o", words, source, mountpoint)
    assert (told.returncode, told.stderr) == (0, "")
    assert installed.mounts(mountpoint) == ["fuse.shardfs"]
    assert {"ro", "nosuid", "nodev", "noexec"} <= options_of(installed, mountpoint)
    assert installed.run("stat", "-c", "%u", mountpoint / "zarr.json") == "7\n"
    installed.run("umount", mountpoint)
    assert installed.mounts(mountpoint) == []


@fuse
def test_a_mount_is_writable_by_its_own_word(
    installed: Namespace, source: Path, mountpoint: Path, tmp_path: Path
) -> None:
    copy = copy_tree(source, tmp_path / "own")
    refused = installed.attempt("mount", "-t", "shardfs", copy, mountpoint)  # to which mount(8) adds rw
    assert (refused.returncode, "use -o writable or -o ro" in refused.stderr) == (1, True)
    words = f"writable,_netdev,journal={tmp_path / 'j'}"
    told = installed.attempt("mount", "-t", "shardfs", "-o", words, copy, mountpoint)
    assert (told.returncode, told.stderr) == (0, "")
    assert {"rw", "nosuid", "nodev"} <= options_of(installed, mountpoint)
    installed.run("sh", "-c", f"printf 123456789012 >{mountpoint}/c/0/0")
    installed.run("umount", mountpoint)
    installed.wait_until(lambda: b"123456789012" in (copy / "c/0/0").read_bytes())
    status = installed.run("shardfs", "status", "--wait", "-o", f"journal={tmp_path / 'j'}", copy)
    assert status == f"{copy}: all data is published\n"


@fuse
def test_without_helpers_by_way_of_fuse(inside: Namespace, source: Path, mountpoint: Path) -> None:
    """mount.fuse3(8) looks for `shardfs` where programs of the system are."""
    inside.run("ln", "-s", inside.programs / "shardfs", "/usr/sbin/shardfs")
    inside.run("mount", "-t", "fuse.shardfs", "-o", "ro,_netdev,nofail", source, mountpoint)
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    inside.run("umount", mountpoint)
    refused = inside.attempt("mount", "-t", "shardfs", source, mountpoint)
    assert refused.returncode == 32
    assert "unknown filesystem type" in refused.stderr


@fuse
def test_lines_of_fstab(installed: Namespace, source: Path, tmp_path: Path) -> None:
    lines, places = [], [tmp_path / name for name in ("one", "two", "gone", "later", "with space")]
    kinds = ["shardfs", "fuse.shardfs", "shardfs", "shardfs", "shardfs"]
    for path, kind in zip(places, kinds, strict=True):
        path.mkdir()
        source_path = tmp_path / "none" if path.name == "gone" else source
        more = {"gone": ",nofail", "later": ",noauto,x-systemd.automount"}.get(path.name, "")
        where = str(path).replace(" ", "\\040")
        lines.append(f"{source_path} {where} {kind} ro,_netdev{more},x-systemd.requires-mounts-for=/tmp 0 0\n")
    fstab = tmp_path / "fstab"
    fstab.write_text("".join(lines))
    told = installed.attempt("mount", "-a", "-T", fstab)
    assert "No such file" in told.stderr
    one, two, missing, later, space = places
    assert [len(installed.mounts(path)) for path in (one, two, missing, later)] == [1, 1, 0, 0]
    assert installed.run("cat", space / "zarr.json") == installed.run("cat", one / "zarr.json")
    installed.run("mount", "-T", fstab, later)
    assert installed.mounts(later) == ["fuse.shardfs"]
    again = installed.attempt("mount", "-T", fstab, later)
    assert (again.returncode, "mounted" in again.stderr) == (32, True)


@fuse
def test_secrets_come_from_a_profile(installed: Namespace, source: Path, mountpoint: Path) -> None:
    (installed.config / "shardfs").mkdir()
    file = installed.config / "shardfs/x.toml"
    file.write_text(f'[mount.lab]\nsource = "/x"\nmountpoint = "/y"\numask = "077"\nstorage_options.k = "{"s3cret"}"\n')
    file.chmod(0o600)
    installed.run("mount", "-t", "shardfs", "-o", "ro,profile=lab", f"file://{source}", mountpoint)
    assert installed.run("stat", "-c", "%a", mountpoint / "zarr.json") == "400\n"
    assert "s3cret" not in installed.run("cat", "/proc/mounts")
    assert "s3cret" not in installed.run("sh", "-c", "cat /proc/[0-9]*/cmdline")


@fuse
def test_fake_mounts_nothing_and_home_may_be_empty(installed: Namespace, source: Path, mountpoint: Path) -> None:
    for flags in (["-f"], ["-fv"], ["-fn"], ["-f", "-v", "-s"]):
        installed.run("mount", *flags, "-t", "shardfs", "-o", "ro", source, mountpoint)
    assert installed.mounts(mountpoint) == []
    told = installed.attempt("mount", "-f", "-t", "shardfs", "-o", "ro,atr_timeout=3", source, mountpoint)
    assert (told.returncode, "did you mean 'attr_timeout'" in told.stderr) == (1, True)
    completed = installed.attempt(
        "env", "-i", "HOME=", "/sbin/mount.shardfs", source, mountpoint, "-o", "ro,log_file=~/log"
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert installed.mounts(mountpoint) == ["fuse.shardfs"]


@fuse
def test_a_mount_that_fails(installed: Namespace, mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    told = installed.attempt("mount", "-t", "shardfs", "-o", "ro", tmp_path / "nothing", mountpoint)
    assert (told.returncode, "no sharded" in told.stderr) == (32, True)


# ---- the arguments, without mount(8)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["/x", "/y", "-f"], 0),
        (["/x", "/y", "-sfnv", "-o", "ro,_netdev"], 0),
        (["-o", "ro", "/x", "-f", "/y", "-N", "3", "-t", "shardfs"], 0),
        (["-V"], 0),
        (["/x"], 1),
        (["/x", "/y", "/z", "-f"], 1),
        (["/x", "/y", "-f", "-q"], 1),
        (["/x", "/y", "-f", "-o", "rw"], 1),
        (["/x", "/y", "-f", "-o", "rw,writable,dev,suid"], 0),
        (["/x", "/y", "-f", "-o", "ro,writable"], 1),
        (["/x", "/y", "-f", "-o", "rw,writable,create=zarr4"], 1),
        (["/x", "/y", "-f", "-o", "allow_other"], 1),
        (["/nonexistent/x", "/nonexistent/y"], 32),
    ],
)
def test_arguments(args: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    assert helper(args) == code


# ---- without privileges


@pytest.fixture
def unprivileged(tmp_path: Path, source: Path) -> Iterator[Namespace]:
    """With all that nobody needs in /mnt, as temporary directories and virtualenvs may be closed to others."""
    with namespace(tmp_path) as new_namespace:
        new_namespace.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/mnt")
        new_namespace.run("mkdir", "/mnt/m", "/mnt/home", "/mnt/python", "/mnt/packages", "/mnt/repository")
        new_namespace.run("mount", "--bind", sys.base_prefix, "/mnt/python")
        new_namespace.run("mount", "--bind", sysconfig.get_path("purelib"), "/mnt/packages")
        new_namespace.run("mount", "--bind", ROOT, "/mnt/repository")
        new_namespace.run("cp", "-r", source, "/mnt/x")
        # As udev makes it on machines that people use.
        new_namespace.run("sh", "-c", "mknod -m 666 /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse")
        new_namespace.run("chown", "nobody", "/mnt/m", "/mnt/home")
        yield new_namespace


AS_NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("env", "-u", "XDG_CONFIG_HOME", "-C", "/", "HOME=/mnt/home", "PYTHONPATH=/mnt/repository:/mnt/packages"),
]
SHARDFS = [*AS_NOBODY, "/mnt/python/bin/python3", "-m", "shardfs"]


def need_python_of_nobody(inside: Namespace) -> None:
    can = inside.attempt(*SHARDFS, "ls", "/mnt/x")
    if can.returncode:
        pytest.skip(f"nobody cannot run this Python: {can.stderr}")


@fuse
def test_another_user_mounts_and_unmounts(unprivileged: Namespace) -> None:
    inside, mountpoint = unprivileged, Path("/mnt/m")
    need_python_of_nobody(inside)
    inside.run(*SHARDFS, "mount", "/mnt/x", mountpoint)
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    assert inside.run(*AS_NOBODY, "cat", mountpoint / "zarr.json")
    assert inside.run(*AS_NOBODY, "stat", "-c", "%u", mountpoint / "zarr.json") == "65534\n"
    busy = inside.attempt(*AS_NOBODY, "sh", "-c", f"cd {mountpoint} && {' '.join(SHARDFS[-3:])} umount {mountpoint}")
    assert (busy.returncode, "busy" in busy.stderr) == (4, True)
    inside.run(*SHARDFS, "umount", mountpoint)
    assert inside.mounts(mountpoint) == []


@fuse
def test_another_user_is_told_what_allow_other_needs(unprivileged: Namespace) -> None:
    need_python_of_nobody(unprivileged)
    if "\nuser_allow_other" in Path("/etc/fuse.conf").read_text():
        pytest.skip("allowed here")
    refused = unprivileged.attempt(*SHARDFS, "/mnt/x", "/mnt/m", "-o", "allow_other,default_permissions")
    assert (refused.returncode, "user_allow_other" in refused.stderr) == (5, True)


def denied(completed: subprocess.CompletedProcess[str]) -> bool:
    return completed.returncode != 0 and "Permission denied" in completed.stderr


@fuse
def test_who_may_read_a_mount(unprivileged: Namespace) -> None:
    inside, read = unprivileged, [*AS_NOBODY, "cat", "/mnt/m/zarr.json"]
    for words, open_to_others in [
        ("ro", False),
        ("ro,allow_other,default_permissions", True),
        ("ro,allow_other,default_permissions,umask=077", False),
        ("ro,allow_other,default_permissions,umask=077,uid=65534", True),
        ("ro,allow_root", False),
    ]:
        inside.run("shardfs", "/mnt/x", "/mnt/m", "-o", words)
        completed = inside.attempt(*read)
        assert completed.returncode == 0 if open_to_others else denied(completed), words
        inside.run("shardfs", "umount", "/mnt/m")
