"""Calls in a process of their own, for libraries that crash on damaged data: the caller gets an error instead."""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

SECONDS = 60.0
"""A call that takes longer is taken for one that never ends."""

MEMORY = 4 << 30
"""Of the process: what a library takes because of what a header says it does not take from others."""


class Crash(Exception):
    """The process ended, or had to be ended, during the call."""


class Apart:
    """A process that is started when it is needed, and again when it has crashed. Thread-safe; one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, module: str, function: str, *args: Any) -> Any:
        """What the function returns. Raise ValueError, ImportError or MemoryError as it does, or Crash."""
        question = pickle.dumps((module, function, args), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self.end()
                self._process = process = _start()
            ok, answer = self._ask(process, question)
        if ok:
            return answer
        raise answer

    def _ask(self, process: subprocess.Popen[bytes], question: bytes) -> tuple[bool, Any]:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if process.stdin is None or process.stdout is None:
                raise EOFError
            process.stdin.write(question)
            process.stdin.flush()
            found: tuple[bool, Any] = pickle.load(process.stdout)
            return found
        except (EOFError, OSError, pickle.UnpicklingError):
            self.end()
            return False, Crash(f"status {process.returncode}")
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """End the process, if there is one; the next call starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what could not be written any more
                if pipe is not None:
                    pipe.close()


def _start() -> subprocess.Popen[bytes]:
    """It ends by itself when its standard input does, which is when its parent ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "shardfs.apart"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env=environment)


def serve() -> None:
    """Answer calls until there are no more, in bounded memory and without leaving core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            module, function, args = pickle.load(questions)
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, getattr(importlib.import_module(module), function)(*args)
        except (ValueError, ImportError, MemoryError) as e:  # anything else ends the process
            answer = False, e
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


APART = Apart()
atexit.register(APART.end)

if __name__ == "__main__":
    serve()
