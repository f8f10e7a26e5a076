"""The service unit under a real service manager: ready when the mount answers, stop, crash, watchdog."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT
from tests.mount.namespace import Namespace, namespace
from tests.mount.programs import copy_tree
from tests.storage.test_store import RangeHandler
from tests.write.mounts import held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

UNIT = "shardfs@brain.service"

GENERATOR = "/lib/systemd/system-generators/systemd-fstab-generator"


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def inside(tmp_path: Path, mountpoint: Path, source: Path) -> Iterator[Namespace]:
    """With the user's unit installed, and a profile `brain`."""
    with namespace(tmp_path, manager=True) as new_namespace:
        write_profile(new_namespace, source, mountpoint)
        new_namespace.run("shardfs", "install", "--user", "--programs", new_namespace.programs)
        yield new_namespace


def write_profile(inside: Namespace, source: Path | str, mountpoint: Path, *lines: str) -> None:
    directory = inside.config / "shardfs"
    directory.mkdir(exist_ok=True)
    text = "\n".join(["[mount.brain]", f'source = "{source}"', f'mountpoint = "{mountpoint}"', *lines, ""])
    (directory / "config.toml").write_text(text)


def drop_in(inside: Namespace, *lines: str) -> None:
    directory = inside.config / "systemd/user/shardfs@.service.d"
    directory.mkdir(parents=True, exist_ok=True)
    log = f"StandardError=append:{inside.scratch}/unit.log"  # there is no journal in there
    (directory / "test.conf").write_text("\n".join(["[Service]", log, *lines, ""]))
    inside.systemctl("daemon-reload")


def test_start_is_done_when_the_mount_answers(inside: Namespace, source: Path, mountpoint: Path) -> None:
    inside.systemctl("start", UNIT)
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)
    assert inside.show(UNIT, "ActiveState") == "active"
    told = f"serving {source} on {mountpoint}: "
    inside.wait_until(lambda: inside.show(UNIT, "StatusText").startswith(told))
    assert re.search(r" requests?, ", inside.show(UNIT, "StatusText"))
    inside.systemctl("stop", UNIT)
    assert inside.mounts(mountpoint) == []
    assert (inside.show(UNIT, "ActiveState"), inside.show(UNIT, "Result")) == ("inactive", "success")


def test_stop_waits_for_who_uses_the_mount(inside: Namespace, mountpoint: Path) -> None:
    inside.systemctl("start", UNIT)
    with inside.using(mountpoint / "zarr.json") as reader:
        stop = threading.Thread(target=inside.systemctl, args=("stop", UNIT))
        stop.start()
        inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "deactivating")
        stop.join(1)
        assert stop.is_alive()
        assert json.loads(reader.communicate("", timeout=250)[0])
    stop.join(60)
    assert not stop.is_alive()
    assert inside.mounts(mountpoint) == []


@pytest.mark.parametrize("seconds", [1, 8])
def test_stop_waits_until_all_is_published(
    seconds: float, inside: Namespace, source: Path, mountpoint: Path, tmp_path: Path
) -> None:
    """While that takes longer than a unit may take to stop, too."""
    copy = copy_tree(source, tmp_path / "own")
    write_profile(inside, copy, mountpoint, "rw = true", 'idle = "1h"', 'age = "1h"', f'journal = "{tmp_path}/j"')
    drop_in(inside, "TimeoutStopSec=4")
    inside.systemctl("start", UNIT)
    inside.run("sh", "-c", f"printf 123456789012 >{mountpoint}/c/0/0")
    before = (copy / "c/0/0").read_bytes()
    with held(copy / "c/0/0"):
        stop = threading.Thread(target=inside.systemctl, args=("stop", UNIT))
        stop.start()
        inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "deactivating")
        time.sleep(seconds)
        assert (copy / "c/0/0").read_bytes() == before
        assert inside.show(UNIT, "ActiveState") == "deactivating"
    stop.join(60)
    assert b"123456789012" in (copy / "c/0/0").read_bytes()
    assert (inside.show(UNIT, "ActiveState"), inside.show(UNIT, "Result")) == ("inactive", "success")


def test_a_crash_is_cleared_and_the_mount_comes_back(inside: Namespace, mountpoint: Path) -> None:
    drop_in(inside, "RestartSec=0.1")
    inside.systemctl("start", UNIT)
    first = inside.show(UNIT, "MainPID")
    inside.run("kill", "-KILL", first)
    inside.wait_until(lambda: inside.show(UNIT, "MainPID") not in ("0", first))
    inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "active")
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)
    assert inside.show(UNIT, "NRestarts") == "1"
    inside.systemctl("stop", UNIT)
    assert inside.mounts(mountpoint) == []


def test_a_crash_without_a_restart_leaves_the_dead_mount_until_the_next_start(
    inside: Namespace, mountpoint: Path
) -> None:
    """Clients see ENOTCONN, never the directory below, into which they could write."""
    drop_in(inside, "Restart=no")
    inside.systemctl("start", UNIT)
    inside.run("kill", "-KILL", inside.show(UNIT, "MainPID"))
    inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "failed")
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    assert "not connected" in inside.attempt("ls", mountpoint).stderr
    inside.systemctl("start", UNIT)
    assert inside.mounts(mountpoint) == ["fuse.shardfs"]
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)


def test_a_corpse_of_others_is_cleared_by_the_start(inside: Namespace, source: Path, mountpoint: Path) -> None:
    inside.run("shardfs", "mount", source, mountpoint)
    inside.run("sh", "-c", f"kill -KILL $(getfattr --only-values -n user.shardfs.pid {mountpoint})")
    inside.wait_until(lambda: "not connected" in inside.attempt("ls", mountpoint).stderr)
    inside.systemctl("start", UNIT)
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)


def test_what_cannot_be_mounted_fails_and_is_not_tried_again(
    inside: Namespace, mountpoint: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_profile(inside, empty, mountpoint)  # no dataset
    drop_in(inside, "RestartSec=0.1")
    assert inside.attempt("systemctl", "--user", "start", UNIT).returncode != 0
    assert (inside.show(UNIT, "ActiveState"), inside.show(UNIT, "ExecMainStatus")) == ("failed", "4")
    write_profile(inside, empty, mountpoint, "umsk = 0")
    assert inside.attempt("systemctl", "--user", "start", UNIT).returncode != 0
    time.sleep(0.5)
    assert (inside.show(UNIT, "ActiveState"), inside.show(UNIT, "ExecMainStatus")) == ("failed", "2")
    assert "did you mean 'umask'" in inside.log()
    assert inside.mounts(mountpoint) == []


# ---- the watchdog


class _Handler(RangeHandler):
    """Serves files until `hang` is set; then nothing is answered any more."""

    hang: threading.Event

    def do_GET(self) -> None:
        if self.hang.is_set():
            time.sleep(60)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web(root: Path) -> Iterator[tuple[str, threading.Event]]:
    hang = threading.Event()
    handler = type("Handler", (_Handler,), {"hang": hang})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(root)))
    server.daemon_threads = True
    server.requests = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hang
    finally:
        server.shutdown()
        server.server_close()


def test_the_watchdog_is_answered(inside: Namespace, mountpoint: Path) -> None:
    drop_in(inside, "WatchdogSec=6")
    inside.systemctl("start", UNIT)
    pid = inside.show(UNIT, "MainPID")
    time.sleep(8)
    assert (inside.show(UNIT, "MainPID"), inside.show(UNIT, "NRestarts")) == (pid, "0")
    inside.systemctl("stop", UNIT)


def test_the_watchdog_ends_a_daemon_that_serves_nobody(inside: Namespace, source: Path, mountpoint: Path) -> None:
    """It lives, but its only thread waits for a store that says nothing."""
    pytest.importorskip("aiohttp")
    with web(source) as (url, hang):
        write_profile(inside, url, mountpoint, "threads = 1")
        drop_in(inside, "WatchdogSec=3", "Restart=no")
        inside.systemctl("start", UNIT)
        hang.set()
        reader = threading.Thread(target=inside.attempt, args=("cat", mountpoint / "c/0/0"))
        reader.start()
        inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "failed")
        assert inside.show(UNIT, "Result") == "watchdog"
        assert "not connected" in inside.attempt("ls", mountpoint).stderr
        reader.join(30)
        assert not reader.is_alive()


def test_the_watchdog_ends_a_daemon_that_is_stopped(inside: Namespace, mountpoint: Path) -> None:
    drop_in(inside, "WatchdogSec=5", "RestartSec=0.1")
    inside.systemctl("start", UNIT)
    inside.run("kill", f"-{signal.SIGSTOP.value}", inside.show(UNIT, "MainPID"))
    inside.wait_until(lambda: inside.show(UNIT, "NRestarts") != "0")
    inside.wait_until(lambda: inside.show(UNIT, "ActiveState") == "active")
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)


# ---- the units as they are shipped


def test_the_system_unit_serves_with_its_hardening(inside: Namespace, source: Path, mountpoint: Path) -> None:
    """None of it hides the mount from others."""
    inside.run("shardfs", "install", "--programs", inside.programs)
    unit = inside.config / "systemd/user/shardfs@.service"
    unit.write_text(Path(unit).read_text())  # as it was placed by the fixture
    text = inside.run("cat", "/etc/systemd/system/shardfs@.service")
    assert "CapabilityBoundingSet" in text
    unit.write_text(text)
    inside.systemctl("daemon-reload")
    inside.systemctl("start", UNIT)
    assert inside.run("cat", mountpoint / "zarr.json", timeout=60)
    pid = inside.show(UNIT, "MainPID")
    assert {"NoNewPrivs:\t1", "Umask:\t0022"} <= {*inside.run("cat", f"/proc/{pid}/status").splitlines()}
    assert inside.show(UNIT, "DevicePolicy") == "closed"
    assert "/dev/fuse rw" in inside.show(UNIT, "DeviceAllow")
    inside.systemctl("stop", UNIT)
    assert inside.mounts(mountpoint) == []


@pytest.mark.parametrize("unit", ["shardfs@.service", "user/shardfs@.service"])
def test_no_unit_hides_the_mount(unit: str) -> None:
    """By a mount namespace of its own, or by keeping fusermount3 from working."""
    lines = (ROOT / "systemd" / unit).read_text().splitlines()
    names = {line.split("=")[0] for line in lines if "=" in line and not line.startswith("#")}
    assert not {name for name in names if name.startswith(("Private", "Protect", "Bind", "Root", "Inaccessible"))}
    assert not names & {"ReadOnlyPaths", "ReadWritePaths", "DynamicUser", "LogNamespace", "MountFlags"}
    assert "MemoryDenyWriteExecute" not in names
    assert unit == "shardfs@.service" or "NoNewPrivileges" not in names


@pytest.mark.parametrize("kind", ["system", "user"])
def test_the_units_are_sound(kind: str, inside: Namespace, tmp_path: Path) -> None:
    placed = tmp_path / "units"
    placed.mkdir()
    words = ["--user"] if kind == "user" else []
    inside.run("shardfs", "install", *words, "--root", tmp_path / "root", "--programs", inside.programs)
    (unit,) = (tmp_path / "root").rglob("shardfs@.service")
    shutil.copy(unit, placed / "shardfs@brain.service")
    for example in ("mnt-brain.mount", "mnt-brain.automount"):
        shutil.copy(ROOT / "systemd" / example, placed / example)
    told = inside.attempt("systemd-analyze", f"--{kind}", "--man=no", "verify", *placed.iterdir())
    assert (told.returncode, told.stderr) == (0, ""), told.stderr


def test_an_automount_is_triggered(inside: Namespace, source: Path, mountpoint: Path) -> None:
    inside.run("shardfs", "install", "--programs", inside.programs)
    units = inside.config / "systemd/user"
    name = inside.run("systemd-escape", "--path", mountpoint).strip()
    example = (ROOT / "systemd/mnt-brain.mount").read_text().replace("profile=brain", "attr_timeout=5")
    example = example.replace("s3://bucket/brain.zarr", str(source)).replace("/mnt/brain", str(mountpoint))
    (units / f"{name}.mount").write_text(example)
    example = (ROOT / "systemd/mnt-brain.automount").read_text().replace("/mnt/brain", str(mountpoint))
    (units / f"{name}.automount").write_text(example.replace("TimeoutIdleSec=600", "TimeoutIdleSec=2"))
    inside.systemctl("daemon-reload")
    started = inside.attempt("systemctl", "--user", "start", f"{name}.automount")
    if started.returncode:
        pytest.skip(f"no automount here: {started.stderr}")
    assert inside.mounts(mountpoint) == ["autofs"]
    with inside.using(mountpoint / "zarr.json"):
        assert inside.mounts(mountpoint) == ["autofs", "fuse.shardfs"]
        inside.wait_until(lambda: inside.show(f"{name}.mount", "ActiveState") == "active")
    inside.wait_until(lambda: inside.mounts(mountpoint) == ["autofs"])  # nobody uses it
    assert os.fspath(mountpoint / "zarr.json") in inside.run("ls", mountpoint / "zarr.json", timeout=120)
    inside.systemctl("stop", f"{name}.automount", timeout=120)
    assert inside.mounts(mountpoint) == []


@pytest.mark.parametrize("kind", ["shardfs", "fuse.shardfs"])
def test_an_automount_of_fstab_is_triggered(kind: str, inside: Namespace, source: Path, mountpoint: Path) -> None:
    """The line goes through systemd's own generator."""
    if not os.access(GENERATOR, os.X_OK):
        pytest.skip("no systemd-fstab-generator")
    inside.run("shardfs", "install", "--programs", inside.programs)
    fstab, unit_directory = inside.scratch / "fstab", inside.scratch / "generated"
    words = "ro,_netdev,nofail,noauto,x-systemd.automount,x-systemd.idle-timeout=2,uid=7"
    fstab.write_text(f"{source} {mountpoint} {kind} {words} 0 0\n")
    unit_directory.mkdir()
    inside.run(
        GENERATOR,
        unit_directory,
        unit_directory,
        unit_directory,
        env={**inside.environment, "SYSTEMD_FSTAB": str(fstab)},
    )
    for unit in [path for path in unit_directory.iterdir() if path.is_file()]:
        shutil.copy(unit, inside.config / "systemd/user" / unit.name)
    name = inside.run("systemd-escape", "--path", mountpoint).strip()
    inside.systemctl("daemon-reload")
    started = inside.attempt("systemctl", "--user", "start", f"{name}.automount")
    if started.returncode:
        pytest.skip(f"no automount here: {started.stderr}")
    assert inside.mounts(mountpoint) == ["autofs"]
    with inside.using(mountpoint / "zarr.json"):
        assert inside.run("stat", "-c", "%u", mountpoint / "zarr.json", timeout=120) == "7\n"
        assert inside.mounts(mountpoint) == ["autofs", "fuse.shardfs"]
    inside.wait_until(lambda: inside.mounts(mountpoint) == ["autofs"])
    inside.systemctl("stop", f"{name}.automount", timeout=120)
