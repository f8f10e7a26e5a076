"""A sandbox process for libraries that crash on damaged data: the caller gets an exception instead."""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

SECONDS = 60.0
"""A call that takes longer is killed and reported as a crash."""

MEMORY = 4 << 30
"""Address space limit of the sandbox process: a damaged header may make a library ask for any amount."""


class Crash(Exception):
    """The sandbox process crashed or timed out during the call."""


class Sandbox:
    """The sandbox process. It starts at the first call, and again after a crash. Thread-safe; one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, module: str, function: str, *args: Any) -> Any:
        """Call a function in the sandbox. Pass on its ValueError, ImportError or MemoryError, or raise Crash.

        If a process crashes that has served other calls, the call is repeated once in a new process: damaged data of an
        earlier call may have corrupted the memory of the old one.
        """
        request = pickle.dumps((module, function, args), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            process = self._process
            was_used = process is not None and process.poll() is None
            if process is None or not was_used:
                self.end()
                self._process = process = _start()
            ok, result = self._ask(process, request)
            if was_used and isinstance(result, Crash) and process.returncode != -signal.SIGKILL:  # not for a time-out
                self._process = process = _start()
                ok, result = self._ask(process, request)
        if ok:
            return result
        raise result

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[bool, Any]:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if process.stdin is None or process.stdout is None:
                raise EOFError
            process.stdin.write(request)
            process.stdin.flush()
            reply: tuple[bool, Any] = pickle.load(process.stdout)
            return reply
        except (EOFError, OSError, pickle.UnpicklingError):
            self.end()
            return False, Crash(f"exit status {process.returncode}")
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """Kill the process, if there is one. The next call starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # closing fails if buffered bytes cannot be written
                if pipe is not None:
                    pipe.close()


def _start() -> subprocess.Popen[bytes]:
    """Start the process. It exits when its standard input closes, also because the parent ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "shardfs.codecs.sandbox"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env=environment)


def serve() -> None:
    """Serve calls until standard input closes, with limited memory and without core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write among the replies
    while True:
        try:
            module, function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            reply: tuple[bool, Any] = True, getattr(importlib.import_module(module), function)(*args)
        except (ValueError, ImportError, MemoryError) as e:  # any other exception ends the process
            reply = False, e
        pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
        replies.flush()


SANDBOX = Sandbox()
atexit.register(SANDBOX.end)

if __name__ == "__main__":
    serve()
