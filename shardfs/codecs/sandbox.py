"""Sandbox processes for libraries that crash on damaged data: the caller gets bytes or an exception instead.

Nothing that a process answers is executed or unpickled: an answer is a status, a length and raw bytes.
`sandbox_process` is the program of a process, and says what it may do.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from queue import Empty, LifoQueue
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SECONDS = 60.0
"""A call that takes longer is killed and reported as a crash."""

PROCESSES = 4
"""Calls at the same time, each in a process of its own: chunks that hang must not delay all other readers."""

REQUEST = Struct("<IQQ")
"""Frame of a request: the sizes of a JSON text (the call), of the bytes behind it, and of the largest answer."""

REPLY = Struct("<BQ")
"""Frame of a reply: a status, and the size of the bytes that follow, which are the result or an error message."""

OK, ERRORS = 0, (ValueError, ImportError, MemoryError)
"""Statuses of replies. Status n > 0 stands for `ERRORS[n - 1]`."""

MAX_MESSAGE = 4096
"""Bytes of an error message."""

_PIPE_BYTES = 1 << 20

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
_START += "from shardfs.codecs.sandbox_process import main; main(**json.loads(sys.argv[2]))"


class Crash(Exception):
    """The sandbox process crashed, timed out, or broke the protocol during the call."""


class Sandbox:
    """A pool of sandbox processes. Each starts when it is needed, and again after a crash. Thread-safe.

    Args:
        modules: what the processes import before they give up their rights. Only functions of these can be called.
        threads: whether a module starts threads. If not, the processes can start neither threads nor processes.
    """

    def __init__(self, modules: Sequence[str], *, threads: bool = False) -> None:
        self._settings = json.dumps({"modules": modules, "threads": threads})
        self._make_workers()

    def _make_workers(self) -> None:
        self._workers = [_Worker(self._settings) for _ in range(PROCESSES)]
        self._free = LifoQueue[_Worker]()  # the last one that was used is the likeliest to have a process
        for worker in self._workers:
            self._free.put(worker)

    def call(
        self, function: Callable[..., Any], payload: bytes | memoryview, arguments: Mapping[str, Any], limit: int
    ) -> bytearray:
        """Return the bytes that `function(payload, **arguments)` returns in a sandbox process; arguments become JSON.

        Raise its ValueError, ImportError or MemoryError, or Crash, also for an answer of more than `limit` bytes. If a
        process crashes that has served other calls, the call is repeated once in a new process: damaged data of an
        earlier call may have corrupted the memory of the old one.
        """
        called = {"module": function.__module__, "function": function.__qualname__, "arguments": arguments}
        text = json.dumps(called).encode()
        worker = self._free.get()
        try:
            return worker.call([REQUEST.pack(len(text), len(payload), limit), text, payload], limit)
        finally:
            self._free.put(worker)

    def kill(self) -> None:
        """Kill all processes, also under a call. The next call starts another."""
        for worker in self._workers:
            worker.kill()
        idle = list[_Worker]()
        with suppress(Empty):
            while True:
                idle.append(self._free.get_nowait())
        for worker in idle:
            worker.close()
            self._free.put(worker)

    def abandon(self) -> None:
        """Leave the processes to the parent after a fork: answers would go to either process."""
        for worker in self._workers:
            worker.abandon()
        self._make_workers()


class _Timeout(Crash):
    pass


class _Worker:
    """One sandbox process, which may be restarted. One call at a time."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, request: Sequence[bytes | memoryview], limit: int) -> bytearray:
        process = self._process
        if process is None:
            return self._ask(self._restarted(), request, limit)
        try:
            return self._ask(process, request, limit)
        except _Timeout:
            raise
        except Crash:
            return self._ask(self._restarted(), request, limit)

    def _restarted(self) -> subprocess.Popen[bytes]:
        """Start the process. It exits when its standard input closes, also because this process ended."""
        self.close()
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        command = [sys.executable, "-I", "-c", _START, paths, self._settings]
        # Without descriptors, environment and terminal of this process.
        self._process = process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", env={}, start_new_session=True,
        )  # fmt: skip
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                with suppress(OSError):  # above the limit of the user
                    fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: Sequence[bytes | memoryview], limit: int) -> bytearray:
        try:
            pipes = _Pipes(process, time.monotonic() + SECONDS)
            for part in request:
                pipes.write(part)
            status, size = REPLY.unpack(pipes.read(REPLY.size))
            if status > len(ERRORS) or size > (limit if status == OK else MAX_MESSAGE):
                raise Crash(f"it answered with status {status} and {size} bytes")
            data = pipes.read(size)
        except (Crash, OSError) as e:
            self.close()
            raise e if isinstance(e, Crash) else Crash(f"exit status {process.returncode}") from None
        if status == OK:
            return data
        raise ERRORS[status - 1](data.decode(errors="replace"))

    def kill(self) -> None:
        """Kill the process, and those that it may have started."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        process = self._process
        self.abandon()
        if process is not None:
            process.wait()

    def abandon(self) -> None:
        """Close the pipes of this side."""
        process, self._process = self._process, None
        for pipe in () if process is None else (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class _Pipes:
    """The pipes to a process. Methods raise Crash at a time of `time.monotonic`, and OSError if the process ends."""

    def __init__(self, process: subprocess.Popen[bytes], end: float) -> None:
        if process.stdin is None or process.stdout is None:
            raise Crash("it has no pipes")
        self._requests = process.stdin.fileno()
        self._replies = process.stdout.fileno()
        self._end = end

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(self._end - time.monotonic(), 0) * 1000):
            raise _Timeout(f"no answer within {SECONDS:g} s")

    def write(self, data: bytes | memoryview) -> None:
        unsent = memoryview(data).cast("B")
        while unsent:
            self._wait(self._requests, select.POLLOUT)
            unsent = unsent[os.write(self._requests, unsent) :]

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        unfilled = memoryview(data)
        while unfilled:
            self._wait(self._replies, select.POLLIN)
            count = os.readv(self._replies, [unfilled])
            if not count:
                raise BrokenPipeError
            unfilled = unfilled[count:]
        return data


SANDBOXES: Mapping[str, Sandbox] = {
    "compresso": Sandbox(("shardfs.codecs.images", "compresso")),
    "crackle": Sandbox(("shardfs.codecs.images", "crackle"), threads=True),
    "fpzip": Sandbox(("shardfs.codecs.images", "fpzip")),
    "imagecodecs._jpegxl": Sandbox(("shardfs.codecs.images", "imagecodecs._jpegxl")),
}
"""The modules that damaged data can crash, or that allocate what a header says, and the processes in which they run."""

for _sandbox in SANDBOXES.values():
    atexit.register(_sandbox.kill)
    os.register_at_fork(after_in_child=_sandbox.abandon)
