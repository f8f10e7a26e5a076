"""Commands of shardfs in forks of a process that has imported their modules, for most of their time is importing.

Libraries of clients start threads when they are imported, which a fork does not have.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AT_START = ("FSSPEC_", "LANG", "LC_", "LD_", "OMP", "OPENBLAS", "PYTHON")
"""Beginnings of the names of environment variables that Python and libraries read when they start."""


class Zygote:
    """A process of `tests.zygote`, which runs one command at a time."""

    def __init__(self, python: str, environment: Mapping[str, str], *clients: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-m", "tests.zygote", str(theirs.fileno()), *clients]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # a fork has no other threads
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._requests = ours
        self.lock = threading.Lock()

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int], timeout: float
    ) -> int | None:
        """Return the exit code of a command; `-SIGALRM` if it has not ended in time, None if it was not started."""
        data = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        try:
            self._requests.settimeout(60)
            socket.send_fds(self._requests, [data], list(files))
            pid = int(self._requests.recv(20))
        except (OSError, ValueError):
            self.end()
            return None
        self._requests.settimeout(timeout)
        with suppress(TimeoutError):
            code = self._requests.recv(20)
            if not code:  # the process that forks has ended
                self.end()
            return int(code or -signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._requests.settimeout(2)
        try:
            self._requests.recv(20)
        except TimeoutError:
            self.end()
        return -signal.SIGALRM

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


_zygotes: dict[tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]], Zygote] = {}


def run(
    command: Sequence[str | Path],
    timeout: float,
    out: IO[Any],
    err: IO[Any],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> int | None:
    """Run `PYTHON -m shardfs ARGUMENT...` in a fork.

    Returns:
        The exit code; `-SIGALRM` if the command has not ended in time, and None if it is another one, or has options
        other than its environment.
    """
    words = [str(word) for word in command]
    if words[1:3] != ["-m", "shardfs"] or (cwd or Path.cwd()) != ROOT or options:
        return None
    environment = dict(os.environ if env is None else env)
    start = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(AT_START)))
    clients = ("clients",) if any(re.search(r"(?<!file)://", word) for word in words) else ()
    key = words[0], start, clients
    zygote = _zygotes.get(key)
    if zygote is None or zygote.ended:
        zygote = _zygotes[key] = Zygote(words[0], environment, *clients)
    if not zygote.lock.acquire(blocking=False):
        return None
    try:
        return zygote.run(words[3:], environment, (out.fileno(), err.fileno()), timeout)
    finally:
        zygote.lock.release()


@atexit.register
def _end() -> None:
    for zygote in _zygotes.values():
        zygote.end()
