"""Writable mounts that tests kill, mount again and unmount; and what is written through them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tests import conftest
from tests.conftest import MOUNT_SECONDS, MountFailed, daemon_pid, mount_entry
from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class WritableMount:
    """`source` at `mountpoint`, with its journal in `journal`; mounted more than once, perhaps."""

    def __init__(self, source: Path, top: Path, *options: str) -> None:
        self.source, self.path, self.journal = source, top / "mnt", top / "journals"
        self.options = options
        self.path.mkdir(parents=True)
        self.pid = 0
        self._started: str | None = None

    def mount(self) -> None:
        """Raise MountFailed."""
        command = [sys.executable, "-m", "shardfs", "mount", "--rw", "-o", f"journal={self.journal}", *self.options]
        run = conftest._run([*command, str(self.source), str(self.path)], MOUNT_SECONDS, cwd=ROOT)
        if run.returncode:
            raise MountFailed(run)
        self.pid = daemon_pid(self.path)
        self._started = conftest._start_time(self.pid)

    def kill(self) -> None:
        """As kill -9 does; what is mounted then answers ENOTCONN."""
        conftest._kill(self.pid, self._started)
        if not conftest._wait_gone(self.pid, self._started, 60):
            raise AssertionError(f"the daemon {self.pid} outlives kill -9")

    def clear(self) -> None:
        """Away with the dead mount."""
        conftest._run(["fusermount3", "-uz", str(self.path)], 10)

    def umount(self, timeout: float = conftest.CLIENT_SECONDS) -> subprocess.CompletedProcess[str]:
        """`shardfs umount`, which waits until all is published."""
        return conftest._run([sys.executable, "-m", "shardfs", "umount", str(self.path)], timeout, cwd=ROOT)

    def flush(
        self, path: Path | None = None, timeout: float = conftest.CLIENT_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """`shardfs flush`."""
        command = [sys.executable, "-m", "shardfs", "flush", str(path or self.path)]
        return conftest._run(command, timeout, cwd=ROOT)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.pid:
            conftest._kill(self.pid, self._started)
        for _ in range(5):
            if mount_entry(self.path) is None:
                break
            self.clear()


@contextmanager
def writable(source: Path, top: Path, *options: str) -> Iterator[WritableMount]:
    """Not mounted yet; at the end nothing is left of it, whatever happens."""
    mount = WritableMount(source, top, *options)
    try:
        yield mount
    finally:
        mount.end()


@contextmanager
def client(script: str, *args: object, python: str | Path = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """`tests/clients/<script>.py` with pipes, in a process group of its own, which is ended at last."""
    process = subprocess.Popen(
        [str(python), "-m", f"tests.clients.{script}", *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def program(name: str, *arguments: str | Path, timeout: float = 240) -> str:
    """What `python -m tests.write.NAME` prints; it must succeed."""
    run = conftest._run([sys.executable, "-m", f"tests.write.{name}", *map(str, arguments)], timeout, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def succeeded(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[Any]:
    """What they printed as JSON, if anything; all must end well."""
    out = []
    for process in processes:
        said, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"status {process.returncode}\n{errors[-3000:]}"
        out.append(json.loads(said) if said.strip() else None)
    return out


@contextmanager
def held(shard: Path) -> Iterator[None]:
    """As tensorstore locks a shard that it writes, so that nobody publishes."""
    lock = shard.with_name(f"{shard.name}.__lock")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)
