"""The entry point for containers, as the first process of a namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.alone import alone
from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = pytest.mark.fuse

SEPARATE = alone("--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@contextmanager
def container(
    tmp_path: Path, source: Path | str, *command: str, behind_mounting: str = "true"
) -> Iterator[subprocess.Popen[str]]:
    """The last is what the shell does then, of which the parent is the entry point."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/shardfs"
    mount = f'PYTHONPATH={ROOT} {sys.executable} -m shardfs "$@" || exit; [ "$1" != mount ] || {behind_mounting}'
    program.write_text(f"#!/bin/sh\n{mount}\n")
    program.chmod(0o755)
    mountpoint = str(tmp_path / "mnt")
    os.mkdir(mountpoint)
    # What is left when the script has ended can still be seen in its namespace.
    script = 'mnt=$1; shift; sh "$@"; echo status $?; grep -c " $mnt " /proc/mounts'
    words = [*SEPARATE, "sh", "-c", script, "sh", mountpoint, str(ROOT / "scripts/entrypoint.sh")]
    words += [str(source), mountpoint, *command]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def entry_point(process: subprocess.Popen[str]) -> int:
    """Its number, outside."""
    return child_of(child_of(process.pid))


def run_first(urgent: int, other: int) -> None:
    """Let the one process run whenever it can, and only then the other."""
    cpu = min(os.sched_getaffinity(0))
    for pid in urgent, other:
        os.sched_setaffinity(pid, {cpu})
    try:
        os.sched_setscheduler(urgent, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        pytest.skip("needs the right to real-time scheduling")


def test_the_mount_is_there_for_the_command(source: Path, tmp_path: Path) -> None:
    with container(tmp_path, source, "sh", "-c", f"test -s {tmp_path}/mnt/zarr.json && exit 7") as process:
        out, error = process.communicate(timeout=250)
    assert (out, error) == ("status 7\n0\n", "")


def test_a_mount_that_fails_runs_nothing(tmp_path: Path) -> None:
    with container(tmp_path, tmp_path / "none", "echo", "ran") as process:
        out, error = process.communicate(timeout=250)
    assert out == "status 3\n0\n"
    assert "No such file" in error


@pytest.mark.parametrize("at_once", [False, True], ids=["in its time", "before the script goes on"])
def test_sigterm_ends_the_command_then_the_mount(source: Path, tmp_path: Path, at_once: bool) -> None:
    file = "/dev/null" if at_once else f"{tmp_path}/mnt/zarr.json"  # to wait for the mount would let the script go on
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(sys.argv[1]).close() or 9)); "
    program += "print('up', flush=True); signal.pause()"
    with container(tmp_path, source, sys.executable, "-c", program, file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        script = entry_point(process)
        if at_once:
            run_first(child_of(script), script)
        start_s = time.monotonic()
        os.kill(script, signal.SIGTERM)
        out, error = process.communicate(timeout=250)
    assert (out, error) == ("status 9\n0\n", "")
    assert time.monotonic() - start_s < 30


def test_sigterm_while_it_is_mounted_ends_the_command_and_the_mount(source: Path, tmp_path: Path) -> None:
    with container(tmp_path, source, "sleep", "60", behind_mounting="kill -TERM $PPID") as process:
        out, error = process.communicate(timeout=250)
    assert (out, error) == ("status 143\n0\n", "")


def test_a_mount_in_the_foreground_as_the_first_process(source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root")
    words = [
        *SEPARATE,
        sys.executable,
        "-m",
        "shardfs",
        "mount",
        "-f",
        "--log-level=info",
        str(source),
        str(mountpoint),
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert "is mounted on" in process.stderr.readline()
        os.kill(child_of(process.pid), signal.SIGTERM)
        assert process.wait(20) == 0
        assert "SIGTERM: unmounting" in process.stderr.read()
