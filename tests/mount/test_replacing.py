"""A mount in the place of a dead one: clients see an error or the new mount, never the directory below."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shardfs.daemon.asking import MountState, ask
from shardfs.storage import mount_calls
from shardfs.storage.mount_table import MountInfo, mounted_at
from tests.conftest import _kill, _start_time, _wait_gone, daemon_pid, mount_entries, mount_entry
from tests.conftest import unmount as clear
from tests.datasets import ROOT
from tests.mount.processes import end
from tests.mount.programs import attempt, shardfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = [pytest.mark.fuse, pytest.mark.slow]
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may move mounts")

KERNELS = pytest.mark.parametrize("beneath", [True, False], ids=["beneath", "before_6_5"])
BELOW = "below"


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    for _ in range(4):
        clear(path)


def kill(mountpoint: Path) -> None:
    """Leave a dead mount."""
    pid = daemon_pid(mountpoint)
    started = _start_time(pid)
    _kill(pid, started)
    assert _wait_gone(pid, started, 20)


def is_dead(mountpoint: Path) -> bool:
    mount = mounted_at(str(mountpoint))
    return mount is not None and ask(mount, 20).state is MountState.DEAD


def mounts_there(mountpoint: Path) -> int:
    return sum(entry.path == mountpoint for entry in mount_entries())


_START = """\
import sys
from shardfs.storage import mount_calls
if sys.argv.pop(1) == "False":
    mount_calls.BENEATH = 1 << 30  # a flag that the kernel does not know
from shardfs.cli import run
sys.exit(run(sys.argv[1:]))
"""


def mount(source: Path, mountpoint: Path, *options: str, beneath: bool = True) -> subprocess.CompletedProcess[str]:
    """`shardfs mount`, on a kernel that can mount beneath or on one that cannot."""
    words = [str(beneath), "mount", *options, str(source), str(mountpoint)]
    return attempt(sys.executable, "-c", _START, *words, cwd=ROOT)


_LOOK = """\
import errno, os, select, sys
seen, last = set(), False
print("looking", flush=True)
while not last:
    last = bool(select.select([0], [], [], 0)[0])
    try:
        names = os.listdir(sys.argv[1])
        told = "bare" if "below" in names else "mounted"
    except OSError as e:
        told = errno.errorcode[e.errno]
    seen.add(told)
print(*sorted(seen))
"""


@contextmanager
def looking(mountpoint: Path) -> Iterator[Callable[[], list[str]]]:
    """A client that lists the mountpoint without pause; the function returned ends it and returns what it has seen."""
    pipe = subprocess.PIPE
    client = subprocess.Popen([sys.executable, "-c", _LOOK, mountpoint], stdin=pipe, stdout=pipe, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "looking\n"
        yield lambda: client.communicate("end", timeout=250)[0].split()
    finally:
        end(client)


@root
@KERNELS
@pytest.mark.parametrize("times", [1, 2])
def test_no_client_sees_the_directory_below(source: Path, mountpoint: Path, beneath: bool, times: int) -> None:
    (mountpoint / BELOW).touch()
    assert mount(source, mountpoint).returncode == 0
    for _ in range(times):
        kill(mountpoint)
        with looking(mountpoint) as end_looking:
            completed = mount(source, mountpoint, beneath=beneath)
            assert (completed.returncode, "replacing the mount of a dead daemon" in completed.stderr) == (0, True)
            assert (mountpoint / "zarr.json").exists()
            states = end_looking()
            assert "mounted" in states  # the kernel may also answer for a dead mount what it remembers
            assert {*states} <= {"ENOTCONN", "ECONNABORTED", "mounted"}
        assert mounts_there(mountpoint) == (1 if beneath else 2)


@root
@KERNELS
@pytest.mark.parametrize("how", ["shardfs umount", "shardfs umount -l", "umount", "SIGTERM"])
def test_nothing_is_left_when_the_new_mount_ends(source: Path, mountpoint: Path, beneath: bool, how: str) -> None:
    assert mount(source, mountpoint).returncode == 0
    kill(mountpoint)
    assert mount(source, mountpoint, beneath=beneath).returncode == 0
    pid = daemon_pid(mountpoint)
    started = _start_time(pid)
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    elif how == "umount":
        assert attempt("umount", mountpoint).returncode == 0
    else:
        assert shardfs(*how.split()[1:], mountpoint).returncode == 0
        assert mount_entry(mountpoint) is None
    assert _wait_gone(pid, started, 30)
    assert mount_entry(mountpoint) is None


@root
def test_dead_mounts_one_above_the_other_are_unmounted_together(source: Path, mountpoint: Path) -> None:
    assert mount(source, mountpoint).returncode == 0
    kill(mountpoint)
    assert mount(source, mountpoint, beneath=False).returncode == 0
    kill(mountpoint)
    assert (mounts_there(mountpoint), is_dead(mountpoint)) == (2, True)
    assert shardfs("umount", mountpoint).returncode == 0
    assert mount_entry(mountpoint) is None


@pytest.mark.parametrize(
    ("name", "options", "code"), [("missing", (), 3), ("", ("-o", "ready_timeout=0.001"), 6)], ids=["fails", "late"]
)
def test_a_mount_that_fails_leaves_the_dead_one(
    source: Path, mountpoint: Path, name: str, options: tuple[str, ...], code: int
) -> None:
    (mountpoint / BELOW).touch()
    assert mount(source, mountpoint).returncode == 0
    kill(mountpoint)
    with looking(mountpoint) as end_looking:
        assert mount(source / name, mountpoint, *options).returncode == code
        assert "bare" not in end_looking()
    assert is_dead(mountpoint)


_NOT_ROOT = """\
import errno, os, sys
from shardfs.fuse import libfuse

def refuse(path):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)

libfuse.clone = refuse
from shardfs.daemon import mountpoint as mountpoints
unmount = mountpoints.unmount

def unmounted(mountpoint, *, lazy):
    unmount(mountpoint, lazy=lazy)
    open(os.path.join(mountpoint, "written meanwhile"), "w").close()

mountpoints.unmount = unmounted
from shardfs.cli import run
sys.exit(run(sys.argv[1:]))
"""


def test_without_privileges_files_written_meanwhile_are_named(source: Path, mountpoint: Path, tmp_path: Path) -> None:
    """The directory is bare for a moment, as fusermount3 cannot replace a mount."""
    assert mount(source, mountpoint).returncode == 0
    kill(mountpoint)
    words = ["mount", "-o", f"log_file={tmp_path / 'log'}", str(source), str(mountpoint)]
    assert attempt(sys.executable, "-c", _NOT_ROOT, *words, cwd=ROOT).returncode == 0
    assert (mountpoint / "zarr.json").exists()
    assert "the mount hides 1 entry: 'written meanwhile'" in (tmp_path / "log").read_text()
    assert mounts_there(mountpoint) == 1


def test_who_does_not_answer_is_not_dead(tmp_path: Path) -> None:
    """Another user's mount refuses with EACCES; a directory that is no mount has no such file."""
    assert ask(MountInfo(str(tmp_path), "ext4", "x"), 20).state is MountState.OLD


@root
def test_the_topmost_mount_is_not_always_the_last_one(tmp_path: Path) -> None:
    """Linux lists mounts by their numbers, and a mount that was attached beneath has the larger one."""
    libc = ctypes.CDLL(None, use_errno=True)
    above, apart = tmp_path / "above", tmp_path / "apart"
    for path in (above, apart):
        path.mkdir()
        assert libc.mount(path.name.encode(), os.fsencode(path), b"tmpfs", 0, None) == 0
    try:
        copy = mount_calls.clone(str(apart))
        try:
            mount_calls.attach(copy, str(above), beneath=True)
        except OSError as e:
            if e.errno == errno.EINVAL:
                pytest.skip("Linux before 6.5 cannot mount beneath")
            raise
        finally:
            os.close(copy)
        entry = mounted_at(str(above))
        assert entry is not None
        assert entry.source == "above"
        mount_calls.detach(str(above), lazy=False)
        entry = mounted_at(str(above))
        assert entry is not None
        assert entry.source == "apart"
    finally:
        for path in (above, above, apart):
            attempt("umount", path)


@pytest.mark.parametrize("unit", ["shardfs@.service", "user/shardfs@.service"])
def test_a_unit_whose_daemon_crashed_leaves_the_dead_mount(source: Path, mountpoint: Path, unit: str) -> None:
    lines = (ROOT / "systemd" / unit).read_text().splitlines()
    assert not [line for line in lines if line.startswith("ExecStopPost=")]
    (stop,) = (line.partition("=")[2] for line in lines if line.startswith("ExecStop="))
    program = f"{sys.executable} -m shardfs"
    command = shlex.split(stop.replace("$$", "$").replace("%i", str(mountpoint)).replace("/usr/bin/shardfs", program))
    assert mount(source, mountpoint).returncode == 0
    kill(mountpoint)
    assert attempt(*command, cwd=ROOT).returncode == 0
    assert is_dead(mountpoint)
    assert attempt(*command, cwd=ROOT, env={**os.environ, "MAINPID": "1"}).returncode == 0
    assert mount_entry(mountpoint) is None


# ---------------------------------------------------------------------------------- a directory that is not empty


def test_files_that_a_mount_hides_are_named(source: Path, mountpoint: Path) -> None:
    for n in range(7):
        (mountpoint / f"{n}").touch()
    completed = mount(source, mountpoint)
    assert completed.returncode == 0
    assert "the mount hides 7 entries: '0', '1', '2', '3', '4', ..." in completed.stderr
    assert shardfs("umount", mountpoint).returncode == 0
    completed = mount(source, mountpoint, "-o", "nonempty=allow")
    assert (completed.returncode, completed.stderr) == (0, "")


def test_a_directory_with_files_can_be_refused(source: Path, mountpoint: Path) -> None:
    assert mount(source, mountpoint, "-o", "nonempty=refuse").returncode == 0
    assert shardfs("umount", mountpoint).returncode == 0
    (mountpoint / "file").touch()
    completed = mount(source, mountpoint, "-o", "nonempty=refuse")
    assert completed.returncode == 5
    assert "would hide 1 entry: 'file'" in completed.stderr
    assert mount_entry(mountpoint) is None
