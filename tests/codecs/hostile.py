"""What a decoder that was taken over could try: functions to be called in a sandbox process.

The module imports nothing else, so that a sandbox process starts quickly with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS: list[int] = []

_PROCESS = os.urandom(16)

_LIBC = ctypes.CDLL(None, use_errno=True)


def echo(payload: bytearray, **arguments: Any) -> bytes:
    return json.dumps({"payload": payload.decode(), **arguments}).encode()


def process(payload: bytearray) -> bytes:
    """Return what identifies the process. Its number is 1 in a namespace of processes of its own."""
    return _PROCESS


def fail(payload: bytearray, kind: str) -> bytes:
    raise {"ValueError": ValueError, "ImportError": ImportError, "MemoryError": MemoryError, "KeyError": KeyError}[
        kind
    ](payload.decode())


def end(payload: bytearray, status: int) -> bytes:
    if status:
        os._exit(status)
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.abort()


def crash_at_the_second_call(payload: bytearray) -> bytes:
    CALLS.append(0)
    if len(CALLS) > 1:
        os.abort()
    return process(payload)


def hang(payload: bytearray) -> bytes:
    while True:
        time.sleep(3600)


def allocate(payload: bytearray, nbytes: int) -> bytes:
    return bytes(nbytes)


def print_much(payload: bytearray) -> bytes:
    for stream in (sys.stdout, sys.stderr):
        print("not an answer" * 1000, file=stream, flush=True)
    os.system("echo not an answer")
    return b"answer"


def send(payload: bytearray) -> bytes:
    """Write the payload to all descriptors, in place of an answer."""
    for fd in range(64):
        with contextlib.suppress(OSError):
            os.write(fd, payload)
    return hang(payload)


def attempt(payload: bytearray, path: str, parent: int, port: int) -> bytes:
    """Return as JSON what succeeds of things that a decoder has no need for."""
    attempts: dict[str, Callable[[], object]] = {
        "open": lambda: os.open(path, os.O_RDONLY),
        "create": lambda: os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT),
        "open a device": lambda: os.open("/dev/null", os.O_RDONLY),
        "truncate": lambda: os.truncate(path, 0),
        "unlink": lambda: os.unlink(path),
        "mkdir": lambda: os.mkdir("/tmp/shardfs-hostile"),
        "mkdir here": lambda: os.mkdir("hostile"),
        "list": lambda: os.listdir("/"),
        "leave the root": lambda: os.chroot("../../../.."),
        "connect": lambda: socket.create_connection(("127.0.0.1", port), timeout=1),
        "unix socket": lambda: socket.socketpair(),
        "pipe": os.pipe,
        "signal": lambda: os.kill(parent, 0),
        "fork": _fork,
        "execute": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
        "become root": lambda: os.setresuid(0, 0, 0),
        "raise a limit": lambda: _raise_limit(),
        "environment": lambda: dict(os.environ)["HOME"],
        "C environment": _c_environment,
        "trace": lambda: _traced(parent),
        "write to memory": lambda: _written(parent),
    }
    succeeded = []
    for name, function in attempts.items():
        try:
            function()
        except (OSError, ValueError, KeyError):
            continue
        succeeded.append(name)
    return json.dumps(succeeded).encode()


def _fork() -> None:
    if not os.fork():
        os._exit(0)


def _raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def _c_environment() -> None:
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(_LIBC, "environ")
    if environment[0] is None:
        raise OSError("empty")


def _traced(process: int) -> None:
    if _LIBC.ptrace(16, process, None, None):  # PTRACE_ATTACH
        raise OSError("refused")
    _LIBC.ptrace(17, process, None, None)


def _written(process: int) -> None:
    buffer = ctypes.create_string_buffer(16)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)  # a struct iovec; the address means nothing there
    if _LIBC.process_vm_writev(process, vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError("refused")
