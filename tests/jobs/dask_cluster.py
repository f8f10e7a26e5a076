"""A Dask cluster, and commands that use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Cluster:
    """A Dask scheduler and two workers, each a process."""

    def __init__(self, directory: Path) -> None:
        self.file, self._log = directory / "scheduler.json", directory / "log"
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0")
        self.workers = [self._start("worker", "--nthreads", "1", "--no-nanny") for _ in range(2)]

    def _start(self, verb: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", verb, "--scheduler-file", str(self.file), "--no-dashboard", *more]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    (tmp_path / "dask").mkdir()
    new_files = Cluster(tmp_path / "dask")
    try:
        deadline = time.monotonic() + 60
        while not new_files.file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield new_files
    finally:
        new_files.close()


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a command of `shardfs`. The test ends what still runs."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, connect_s: int = 60) -> subprocess.Popen[str]:
        env = {**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": f"{connect_s}s"}
        command = [sys.executable, "-m", "shardfs", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_chunks(process: subprocess.Popen[str], target: Path, wanted: int) -> None:
    """Wait until the command has written so many shards or chunk files, or has ended."""
    while process.poll() is None and len([p for p in target.rglob("c/*/*") if p.is_file()]) < wanted:
        time.sleep(0.01)
