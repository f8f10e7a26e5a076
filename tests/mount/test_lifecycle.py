"""How a mount begins and ends: mountpoints of all kinds, the daemon's surroundings, signals, what mount(8) shows."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardfs.daemon import asking, sd_notify, unmount
from shardfs.daemon import mountpoint as mountpoints
from shardfs.daemon.asking import MountState
from shardfs.fuse import libfuse
from shardfs.model.errors import MountError, exit_code
from shardfs.model.redact import public_name
from shardfs.storage.mount_table import elsewhere, mounted_at
from tests.alone import alone
from tests.conftest import _start_time, daemon_pid, mount_entry
from tests.conftest import unmount as clear
from tests.datasets import ROOT
from tests.mount.processes import stopped
from tests.mount.programs import attempt, end, run, shardfs
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Mounted
    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

fuse = pytest.mark.fuse


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    clear(path)


# ------------------------------------------------------------------------------------------------- mountpoints


@fuse
def test_a_link_to_a_directory(source: Path, mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mountpoint)
    assert shardfs("mount", source, tmp_path / "link").returncode == 0
    assert mount_entry(mountpoint) is not None
    assert shardfs("umount", tmp_path / "link").returncode == 0
    assert mount_entry(mountpoint) is None


@fuse
def test_an_open_directory(source: Path, mountpoint: Path) -> None:
    """libfuse would take the path for an open /dev/fuse."""
    fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(fd, True)
    command = [sys.executable, "-m", "shardfs", "mount", str(source), f"/dev/fd/{fd}"]
    try:
        assert subprocess.run(command, cwd=ROOT, pass_fds=[fd], timeout=250, check=False).returncode == 0
    finally:
        os.close(fd)
    assert (mountpoint / "zarr.json").exists()


@contextmanager
def autofs(path: Path) -> Iterator[None]:
    """A trigger on `path` that would hang whoever sets it off, as no daemon answers for it."""
    if os.geteuid() != 0 or "autofs" not in Path("/proc/filesystems").read_text():
        pytest.skip("needs root and autofs")
    libc = ctypes.CDLL(None, use_errno=True)
    receive, send = os.pipe()
    # A process group of its own, so that we are not taken for the daemon, which may pass.
    group = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        words = f"fd={send},pgrp={group.pid},minproto=5,maxproto=5,direct"
        if libc.mount(b"test", os.fsencode(path), b"autofs", 0, words.encode()):
            pytest.skip(f"autofs: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            attempt("umount", path)
    finally:
        end(group)
        os.close(receive)
        os.close(send)


@fuse
def test_an_autofs_trigger_is_free(source: Path, mountpoint: Path) -> None:
    with autofs(mountpoint):
        assert shardfs("mount", source, mountpoint, timeout=20).returncode == 0
        assert (mountpoint / "zarr.json").exists()
        again = shardfs("mount", source, mountpoint, timeout=20)
        assert (again.returncode, "mounted here already" in again.stderr) == (5, True)
        assert shardfs("umount", mountpoint).returncode == 0


@fuse
def test_a_mount_of_another_user(source: Path, mountpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shardfs("mount", source, mountpoint).returncode == 0
    owner = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 65533)
    monkeypatch.setattr(os, "geteuid", lambda: 65533)
    for lazy in (False, True):
        with pytest.raises(MountError, match=f"was mounted by the user {owner}: only that user or root") as refused:
            unmount.umount(str(mountpoint), timeout=5, lazy=lazy)
        assert exit_code(refused.value) == 5
    monkeypatch.undo()
    assert (mountpoint / "zarr.json").exists()
    assert shardfs("umount", mountpoint).returncode == 0


@fuse
def test_without_the_device_doctor_is_named(source: Path, mountpoint: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    hide = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && exec "$@"'
    command = [*alone(), "sh", "-c", hide, "sh", sys.executable, "-m", "shardfs", "mount", str(source), str(mountpoint)]
    completed = attempt(*command, cwd=ROOT)
    assert (completed.returncode, completed.stderr.count("\n")) == (5, 1), completed.stderr
    assert completed.stderr.startswith(f"shardfs: {mountpoint}: cannot mount: ")
    assert "`shardfs doctor`" in completed.stderr


@fuse
def test_a_directory_that_is_not_empty_is_covered(source: Path, mountpoint: Path) -> None:
    (mountpoint / "below").write_text("x")
    assert shardfs("mount", source, mountpoint).returncode == 0
    assert not (mountpoint / "below").exists()
    assert shardfs("umount", mountpoint).returncode == 0
    assert (mountpoint / "below").exists()


@fuse
def test_a_mount_that_would_wait_for_itself_is_refused(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "above" / "source"
    shutil.copytree(source, copy)
    (copy / "below").mkdir()
    link = tmp_path / "link"
    link.symlink_to(copy)
    for address in (str(copy), str(link), f"file://{copy}"):
        for place, why in [
            (copy, "would cover the source"),
            (copy.parent, "would cover the source"),
            (link / "below", "lies in the source"),
        ]:
            completed = shardfs("mount", address, place)
            assert (completed.returncode, why in completed.stderr) == (5, True), (address, place, completed.stderr)


@fuse
def test_standard_streams_may_be_closed(source: Path, mountpoint: Path) -> None:
    program = [sys.executable, "-m", "shardfs", "mount", str(source), str(mountpoint)]
    run("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program, cwd=ROOT, env=None)
    assert (mountpoint / "zarr.json").exists()


# --------------------------------------------------------------------------------------------------- the daemon


@fuse
def test_the_daemon_stands_alone(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        pid = daemon_pid(mount)
        process = Path(f"/proc/{pid}")
        assert os.readlink(process / "cwd") == "/"
        assert [os.readlink(process / f"fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3
        assert os.getsid(pid) == pid
        soft, hard = re.findall(r"Max open files\s+(\S+)\s+(\S+)", (process / "limits").read_text())[0]
        assert (soft, int(hard)) == (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resident = int(re.findall(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())[0])
        assert resident < 120 << 10


@fuse
def test_the_log_of_a_daemon(source: Path, mountpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert shardfs("mount", source, mountpoint, "-o", f"log_file={log},log_level=info").returncode == 0
    pid = daemon_pid(mountpoint)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: _start_time(pid) is None)
    assert f"SIGTERM: unmounting {mountpoint}" in log.read_text()
    assert mount_entry(mountpoint) is None


@fuse
def test_a_long_reason_arrives_whole(mountpoint: Path, tmp_path: Path) -> None:
    name = "/".join(["n" * 200] * 15)
    completed = shardfs("mount", tmp_path / name, mountpoint)
    assert completed.returncode == 3
    assert completed.stderr.count("n" * 200) == 15
    assert "Traceback" not in completed.stderr


@contextmanager
def foreground(source: Path, mountpoint: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "shardfs", "mount", "-f", str(source), str(mountpoint)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: mount_entry(mountpoint) is not None or process.poll() is not None)
        assert (mountpoint / "zarr.json").exists()
        yield process
    finally:
        end(process)
        assert process.stderr is not None
        process.stderr.close()


@fuse
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_unmount(number: signal.Signals, source: Path, mountpoint: Path) -> None:
    with foreground(source, mountpoint) as process:
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
        assert (process.returncode, told) == (0, "")
        assert mount_entry(mountpoint) is None


@fuse
def test_a_service_manager_is_told(
    source: Path, mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        with foreground(source, mountpoint) as process:
            told: list[list[str]] = []
            for _ in range(30):
                told.append(manager.recv(4096).decode().split("\n"))
                if told[-1] == ["STATUS=the mount does not answer"]:  # not within a second, on a busy machine
                    told.pop()
                if len(told) == 2:
                    break
            status = re.compile(rf"STATUS=serving {source} on {mountpoint}: \d+ requests?, [\d.]+ MiB served")
            assert [fields[:-1] for fields in told] == [["READY=1", "WATCHDOG=1"], ["WATCHDOG=1"]]
            assert all(status.fullmatch(fields[-1]) for fields in told), told
            process.send_signal(signal.SIGTERM)
            while told[-1] != ["STOPPING=1", "STATUS=unmounting"]:
                told.append(manager.recv(4096).decode().split("\n"))
            assert process.wait(20) == 0


def test_variables_of_a_manager_are_for_one_process(tmp_path: Path) -> None:
    assert sd_notify.from_environment({"NOTIFY_SOCKET": "relative"}) is None
    address = str(tmp_path / "notify")
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1", "PATH": "/bin"}
    notifier = sd_notify.from_environment(environ)
    assert notifier is not None
    assert environ == {"PATH": "/bin"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        notifier.publishing(1)
        assert b"WATCHDOG" not in manager.recv(4096), "the watchdog waits for another process"


def test_an_answer_that_comes_late_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the watchdog of a busy machine would wait twice as long as the mount has taken."""
    answers: list[int | None] = [0, None, 0]
    told: list[dict[str, str]] = []
    pauses: list[float | None] = []

    class Probe:
        def wait(self, seconds: float) -> int:
            if (code := answers.pop(0)) is None:
                raise subprocess.TimeoutExpired("", seconds)
            return code

    notifier = sd_notify.Notifier("/nobody", 30)

    def tell(**fields: str) -> bool:
        told.append(fields)
        if not answers:
            notifier._over.set()
        return True

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Probe())
    monkeypatch.setattr(notifier, "tell", tell)
    monkeypatch.setattr(notifier._over, "wait", pauses.append)
    notifier._watch("/mnt", lambda: "up")
    first, late, last = told
    assert (first["READY"], last["WATCHDOG"]) == ("1", "1")
    assert late == {"STATUS": "the mount does not answer"}
    assert pauses == [10, 10]  # behind the answers


@fuse
def test_unmounting_ends_the_foreground(source: Path, mountpoint: Path) -> None:
    with foreground(source, mountpoint) as process:
        run("fusermount3", "-u", mountpoint)
        assert process.wait(20) == 0


@fuse
@pytest.mark.slow
def test_a_signal_ends_a_mount_in_use(source: Path, mountpoint: Path) -> None:
    """Nobody can open anything any more at once; who has a file open may go on for a few seconds."""
    with foreground(source, mountpoint) as process:
        fd = os.open(mountpoint / "zarr.json", os.O_RDONLY)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: mount_entry(mountpoint) is None)
        assert process.poll() is None
        assert os.read(fd, 1)
        assert process.wait(20) == 0
        with suppress(OSError):  # nobody is left to be told
            os.close(fd)


MOUNT = """
import os, signal, sys, time
from shardfs.fuse.libfuse import Session
from shardfs.config.options import Options
from shardfs.daemon import serving
from shardfs.daemon.mount import mount
from shardfs.vfs.tree import open_tree

def followed_by(call, number):
    def called(*args):
        done = call(*args)
        if done != 0:  # that is the child of a fork
            os.kill(os.getpid(), number)
        return done
    return called

def run(mountpoint, foreground, open_tree):
    serving.open_mounted = open_tree
    sys.exit(mount("x", mountpoint, Options(), foreground=foreground))
"""


@fuse
@pytest.mark.parametrize("at_once", [False, True])
def test_ctrl_c_while_mounting_ends_the_daemon_too(mountpoint: Path, tmp_path: Path, at_once: bool) -> None:
    """Also right behind the fork."""
    code = f"{MOUNT}if {at_once}: os.fork = followed_by(os.fork, signal.SIGINT)\n"
    code += f"run(sys.argv[1], False, lambda *_: (open({str(tmp_path / 'up')!r}, 'w').close(), time.sleep(60)))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, mountpoint], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if not at_once:
            wait_until((tmp_path / "up").exists)
            process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
        assert in_session(process.pid) == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end(process, signal.SIGKILL)


def in_session(number: int) -> list[int]:
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(ProcessLookupError):
            if os.getsid(int(pid)) == number and _start_time(int(pid)) is not None:
                pids.append(int(pid))
    return pids


@fuse
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_behind_mounting_unmounts(number: signal.Signals, source: Path, mountpoint: Path) -> None:
    code = f"{MOUNT}Session.mount = followed_by(Session.mount, {int(number)})\n"
    code += f"run(sys.argv[1], True, lambda *_: (open_tree({str(source)!r}), None))"
    completed = attempt(sys.executable, "-c", code, mountpoint, cwd=ROOT)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert mount_entry(mountpoint) is None


@fuse
def test_a_daemon_that_hangs_holds_nobody_up(
    source: Path, mountpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mountpoints, "ANSWER_S", 0.5)
    monkeypatch.setattr(unmount, "ANSWER_S", 0.5)
    assert shardfs("mount", source, mountpoint).returncode == 0
    pid = daemon_pid(mountpoint)
    with stopped(pid):
        with pytest.raises(MountError, match="does not answer"):
            mountpoints.check(str(mountpoint), "warn")
        assert unmount.umount(str(mountpoint), timeout=1, lazy=False) == 0
        assert mount_entry(mountpoint) is None
    wait_until(lambda: _start_time(pid) is None)


@fuse
def test_a_mount_that_hangs_is_not_kept_busy_by_the_process_that_asked_it(source: Path, mountpoint: Path) -> None:
    assert shardfs("mount", source, mountpoint).returncode == 0
    mounted = mounted_at(str(mountpoint))
    assert mounted is not None
    with stopped(daemon_pid(mountpoint)):
        assert asking.ask(mounted, 0.5).state is MountState.HANGS
        assert asking._stuck.pop(mounted).returncode == -signal.SIGKILL
    assert shardfs("umount", mountpoint).returncode == 0


@fuse
def test_a_lazy_umount_asks_nobody(source: Path, mountpoint: Path) -> None:
    assert shardfs("mount", source, mountpoint).returncode == 0
    pid = daemon_pid(mountpoint)
    with stopped(pid):
        start_s = time.monotonic()
        assert shardfs("umount", "--lazy", mountpoint).returncode == 0
        assert time.monotonic() - start_s < unmount.ANSWER_S
    wait_until(lambda: _start_time(pid) is None)


@fuse
def test_another_mount_with_the_number_of_one_that_is_gone(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        entry = mounted_at(os.fspath(mount))
        assert entry is not None
        assert elsewhere(entry) is not None
        assert elsewhere(entry._replace(source="/of/one/that/is/gone")) is None


@fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="binds a mount to another place")
def test_a_mount_that_is_somewhere_else_too(source: Path, mountpoint: Path, tmp_path: Path) -> None:
    bound = tmp_path / "bound"
    bound.mkdir()
    assert shardfs("mount", source, mountpoint).returncode == 0
    pid = daemon_pid(mountpoint)
    subprocess.run(["mount", "--bind", mountpoint, bound], check=True)
    try:
        completed = shardfs("umount", "--timeout", "1", mountpoint)
        assert completed.returncode == 5
        assert f"process {pid} serves it at {bound} for process " in completed.stderr
    finally:
        subprocess.run(["umount", bound], check=True)
    wait_until(lambda: _start_time(pid) is None)


@fuse
def test_white_space_that_mountinfo_does_not_escape(source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "a\u00a0b\u2003c"
    mountpoint.mkdir()
    assert shardfs("mount", source, mountpoint).returncode == 0
    assert shardfs("umount", mountpoint).returncode == 0
    assert mount_entry(mountpoint) is None


# ------------------------------------------------------------------------------------------ what mount(8) shows


@fuse
@pytest.mark.parametrize("name", ["a, b", "back\\slash", "tab\there", "line\nbreak", "comma,ro=\\,x", "ümläut"])
def test_the_source_is_shown_as_it_is_called(name: str, source: Path, mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(source)
    assert shardfs("mount", tmp_path / name, mountpoint).returncode == 0
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mountpoint} " in line)
    kind, shown_source, *_ = line.split(" - ")[1].split(" ")
    assert kind == "fuse.shardfs"
    assert re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), shown_source) == str(tmp_path / name)
    assert line.split(" ")[5].split(",")[0] == "ro"


@pytest.mark.parametrize(
    ("source", "public"),
    [
        ("/data/x", "/data/x"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("https://me:secret@host:8080/a?token=secret#secret", "https://host:8080/a"),
        ("zip://::/data/x.zip", "zip://::/data/x.zip"),
        ("zip://x.zarr::https://me:secret@host/a.zip?sig=secret", "zip://x.zarr::https://host/a.zip"),
    ],
)
def test_secrets_are_not_shown(source: str, public: str) -> None:
    assert public_name(source) == public


# ------------------------------------------------------------------------------------------------------ options


@fuse
@pytest.mark.parametrize("words", ["poll_us=200", "direct_io", "threads=1", "attr_timeout=0.5,entry_timeout=0"])
def test_options_change_no_byte(words: str, dataset: Get, mounted: Mounted) -> None:
    data = dataset("zarr3", "zarr_python")
    with mounted(data.path, "-o", words) as mount:
        run("diff", "-r", "--exclude=zarr.json", data.twin, mount)
        run("diff", "-r", "--exclude=zarr.json", data.twin, mount)


@fuse
def test_large_chunks_with_direct_io(mounted: Mounted, tmp_path: Path) -> None:
    from tests import handmade

    chunk = os.urandom(700_001)
    document = handmade.zarr_metadata((1, len(chunk)), (1, len(chunk)), (1, len(chunk)))
    handmade.write_json(tmp_path / "x/zarr.json", document)
    handmade.write_files(tmp_path / "x", {"c/0/0": handmade.zarr_shard([chunk])})
    with mounted(tmp_path / "x", "-o", "direct_io") as mount:
        for _ in range(2):
            assert (mount / "c/0/0").read_bytes() == chunk
        with (mount / "c/0/0").open("rb") as file:
            file.seek(699_000)
            assert file.read() == chunk[699_000:]


@fuse
def test_owners_and_modes(source: Path, mounted: Mounted) -> None:
    with mounted(source, "-o", "uid=12,gid=34,umask=027") as mount:
        for path, mode in ((mount, 0o40550), (mount / "zarr.json", 0o100440)):
            attributes = os.stat(path)
            assert (attributes.st_uid, attributes.st_gid, oct(attributes.st_mode)) == (12, 34, oct(mode))


@fuse
def test_kernel_options_reach_the_kernel(source: Path, mounted: Mounted) -> None:
    with mounted(source, "-o", "noexec,default_permissions,allow_other") as mount:
        words = run("findmnt", "-no", "OPTIONS", mount).strip().split(",")
        assert {"ro", "nosuid", "nodev", "noexec", "default_permissions", "allow_other"} <= set(words)


@fuse
def test_a_mount_that_is_made_writable_still_refuses(source: Path, mounted: Mounted) -> None:
    """The kernel asks us then, instead of refusing by itself."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with mounted(source) as mount:
        if attempt("mount", "-i", "-o", "remount,rw", mount).returncode:
            pytest.skip("cannot be remounted")
        file, missing = mount / "zarr.json", mount / "new"
        changes: list[Callable[[], object]] = [
            lambda: missing.write_bytes(b"x"),
            lambda: missing.mkdir(),
            lambda: missing.symlink_to("x"),
            lambda: os.mkfifo(missing),
            lambda: os.link(file, missing),
            lambda: file.unlink(),
            lambda: (mount / "c").rmdir(),
            lambda: file.rename(missing),
            lambda: file.chmod(0o600),
            lambda: os.utime(file),
            lambda: os.truncate(file, 0),
            lambda: file.write_bytes(b"x"),
            lambda: os.setxattr(file, "user.x", b"y"),
            lambda: os.removexattr(file, "user.x"),
        ]
        for number, change in enumerate(changes):
            with pytest.raises(OSError) as told:  # noqa: PT011
                change()
            assert told.value.errno == errno.EROFS, number
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o444


# ------------------------------------------------------------------------------------------------------ libfuse


def test_libfuse_is_told_where_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    libfuse._libfuse.cache_clear()
    with pytest.raises(MountError, match="apt install fuse3"):
        libfuse.Session(["ro"], 64)
    libfuse._libfuse.cache_clear()


def test_reasons_of_libfuse_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MountError, match="unknown option"):
        libfuse.Session(["ro", "no_such_option"], 64)
    assert capfd.readouterr().err == ""
