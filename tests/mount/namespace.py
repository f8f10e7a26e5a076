"""A corner of this machine in which mounts, links in /sbin and a service manager disturb nobody.

Needs root. What is in there sees the same files, but has mounts and processes of its own, and ends with the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.alone import alone
from tests.datasets import ROOT
from tests.mount.programs import PLAIN_ENVIRONMENT, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYSTEMD = "/lib/systemd/systemd"

PROGRAMS = {
    "shardfs": "-m shardfs",
    "mount.shardfs": "-c 'from shardfs.cli.mount_helper import main; main()'",
    "mount.fuse.shardfs": "-c 'from shardfs.cli.mount_helper import main; main()'",
}


class Namespace:
    def __init__(self, scratch: Path, first: int) -> None:
        self.scratch, self._first = scratch, first
        self.programs = scratch / "bin"
        self.config = scratch / "config"
        self.environment = _environment(scratch)

    def attempt(self, *command: str | Path, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in there, whatever its exit status."""
        enter = ["nsenter", f"--target={self._first}", "--mount", "--pid", "--"]
        return attempt(*enter, *command, timeout=timeout, **{"env": self.environment, **options})

    def run(self, *command: str | Path, timeout: float = 60, **options: Any) -> str:
        """The output of a program that must succeed."""
        completed = self.attempt(*command, timeout=timeout, **options)
        assert completed.returncode == 0, (
            f"{command}: status {completed.returncode}\n{completed.stdout}{completed.stderr}\n{self.log()}"
        )
        return completed.stdout

    @contextmanager
    def using(self, path: Path) -> Iterator[subprocess.Popen[str]]:
        """A program in there has a file open, until its standard input ends; then it writes the contents."""
        command = ["nsenter", f"--target={self._first}", "--mount", "--pid", "--", "sh", "-c"]
        command += ['exec 3<"$1" && echo open && read _; cat <&3', "sh", str(path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "open\n"
                yield process
            finally:
                if process.stdin is not None and not process.stdin.closed:
                    process.stdin.close()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()

    def systemctl(self, *words: str | Path, timeout: float = 60) -> str:
        return self.run("systemctl", "--user", "--no-pager", *words, timeout=timeout)

    def show(self, unit: str, name: str) -> str:
        return self.systemctl("show", "--value", "-p", name, unit).strip()

    def mounts(self, path: Path) -> list[str]:
        """The types of the mounts on a path."""
        lines = Path(f"/proc/{self._first}/mountinfo").read_text().splitlines()
        return [line.split(" - ")[1].split()[0] for line in lines if line.split()[4] == str(path)]

    def log(self) -> str:
        """What units said whose standard error is `unit.log`."""
        log = self.scratch / "unit.log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else ""

    def wait_until(self, condition: Callable[[], object], seconds: float = 100) -> None:
        stop = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < stop, self.log()
            time.sleep(0.05)


def _environment(scratch: Path) -> dict[str, str]:
    variables = {k: v for k, v in PLAIN_ENVIRONMENT.items() if not k.startswith(("SHARDFS_", "XDG_", "DBUS_"))}
    return {
        **variables,
        "PATH": f"{scratch / 'bin'}:{variables['PATH']}:/usr/sbin:/sbin",
        "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}",
        "XDG_CONFIG_HOME": str(scratch / "config"),
        "XDG_DATA_HOME": str(scratch / "share"),
    }


@contextmanager
def namespace(scratch: Path, *, manager: bool = False) -> Iterator[Namespace]:
    """A new one, with a user's service manager running in it if wanted."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if manager and not (os.path.exists(SYSTEMD) and shutil.which("systemctl")):
        pytest.skip("no systemd")
    _write_programs(scratch / "bin")
    (scratch / "config/systemd/user").mkdir(parents=True)
    cgroups = _make_cgroups() if manager else []
    separate = alone("--pid", "--fork", "--kill-child")
    command = [*separate, sys.executable, "-m", "tests.mount.inside", str(scratch), *map(str, cgroups)]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, env=_environment(scratch), text=True
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    pytest.skip("no namespace can be made here")
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                inside = Namespace(scratch, int(children.split()[0]))
                if manager:
                    _await_manager(inside)
                yield inside
            finally:
                process.kill()  # and with it all that is in there
    finally:
        _remove_cgroups(cgroups)


def _write_programs(directory: Path) -> None:
    directory.mkdir()
    for name, words in PROGRAMS.items():
        path = directory / name
        path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)


def _await_manager(inside: Namespace) -> None:
    stop = time.monotonic() + 100
    while inside.attempt("systemctl", "--user", "is-system-running", timeout=60).stdout.strip() != "running":
        if time.monotonic() > stop:
            pytest.skip(f"systemd --user does not run here: {inside.log()}")
        time.sleep(0.1)


def _make_cgroups() -> list[Path]:
    """One below ours in each hierarchy that systemd may use. It moves all processes of the cgroup that it begins in."""
    where: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        kind, _, words = after.split(" ", 2)
        if kind == "cgroup2":
            where[""] = before.split()[4]
        elif kind == "cgroup":
            where.update({word: before.split()[4] for word in words.split(",")})
    # The same in all of them: systemd makes what it has in one in others as well.
    directory_name = f"shardfs-test-{os.getpid()}-{time.monotonic_ns()}"
    groups: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        name = names.split(",")[0]
        if name not in ("", "name=systemd", "cpu", "memory", "pids", "blkio") or name not in where:
            continue
        directory = Path(f"{where[name]}{path}", directory_name)
        try:
            directory.mkdir()
        except OSError as e:
            _remove_cgroups(groups)
            pytest.skip(f"no cgroup can be made: {e}")
        groups.append(directory)
    if not groups:
        pytest.skip("no cgroups")
    return groups


def _remove_cgroups(groups: list[Path]) -> None:
    stop = time.monotonic() + 10
    for top in groups:
        while top.exists() and time.monotonic() < stop:
            for directory, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    os.rmdir(directory)
            time.sleep(0.02)
