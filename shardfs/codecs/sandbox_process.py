"""The program of a sandbox process: it imports libraries, gives up what it may do, and serves calls (`sandbox`).

Then it has two pipes, memory and CPU time, each limited, and nothing else that can be taken from it:

- no files and no sockets: no descriptor can be opened, and where the kernel permits it, the root is an empty directory;
- no environment, no terminal, no network interfaces, no capabilities, and no way to get any (`PR_SET_NO_NEW_PRIVS`);
- no other processes: none can be seen, signalled or traced, and none started, unless a library needs threads. The
  process is in a namespace of processes of its own. Root becomes the user `nobody`. For other users, the process is in
  a user namespace of its own. Where the kernel forbids that, the process could still signal and trace other processes
  of the user, and rename or remove the user's files.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import struct
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from shardfs.codecs.sandbox import ERRORS, MAX_MESSAGE, OK, REPLY, REQUEST

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMORY = 4 << 30
"""Address space of the process."""

SLACK = 256 << 20
"""Address space that a call may add whatever the size of its payload and of its answer."""

SHARE = 8
"""Address space that a call may add for each byte of its payload and of the largest answer.

So a damaged header, which may make a library ask for any amount, gets no more than a sound chunk needs.
"""

CPU_S = 600
"""CPU time of the process. It is restarted then."""

THREADS = 1024
"""Threads and processes of the user `nobody`, or of the namespace, if a library needs threads."""

NOBODY = 65534

_NEW_USER, _NEW_IPC, _NEW_NET, _NEW_PID = 0x10000000, 0x08000000, 0x40000000, 0x20000000  # clone(2)
_NO_NEW_PRIVS, _CAPABILITIES_3 = 38, 0x20080522  # prctl(2), capset(2)


def main(modules: Sequence[str], *, threads: bool) -> None:
    """Serve calls of functions of these modules until standard input closes. See `Sandbox`."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # libraries that print must not write among the replies
        os.dup2(null, fd)
    os.close(null)
    libc = ctypes.CDLL(None)
    is_root = os.geteuid() == 0
    # This fails where the kernel or a container forbids namespaces.
    is_apart = libc.unshare(_NEW_IPC | _NEW_NET | _NEW_PID | (0 if is_root else _NEW_USER)) == 0
    if is_apart and (child := os.fork()):  # only children are in the new namespace of processes
        os.close(requests)
        os.close(replies)
        _end_as(child)
    has_user = is_apart or is_root
    os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    os.environ.clear()
    idle = _address_space()
    give_up_rights(libc, is_root=is_root)
    if not threads or has_user:  # else the limit would count all processes of the user
        _limit(resource.RLIMIT_NPROC, THREADS if threads else 0)
    serve(requests, replies, idle)


def _end_as(child: int) -> NoReturn:
    """Wait for the end of a child process, and end this process in the same way."""
    _limit(resource.RLIMIT_CORE, 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def give_up_rights(libc: ctypes.CDLL, *, is_root: bool) -> None:
    """Leave this process without files, user, capabilities and processes. See the list above."""
    with suppress(OSError):
        _hide_files()
    if is_root:
        with suppress(OSError):  # a container may have no such user
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CPU, CPU_S)
    for limit in ("NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE"):
        _limit(getattr(resource, f"RLIMIT_{limit}"), 0)
    libc.capset(struct.pack("<II", _CAPABILITIES_3, 0), bytes(24))
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        sys.exit("the kernel has no PR_SET_NO_NEW_PRIVS")


def _limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _hide_files() -> None:
    """Make an empty directory that has been removed the root. Raise OSError if this process may not."""
    directory = tempfile.mkdtemp(prefix="shardfs-")
    above = os.open(os.path.dirname(directory), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.chdir(directory)
        os.chroot(".")
    finally:
        os.rmdir(os.path.basename(directory), dir_fd=above)
        os.close(above)


def _address_space() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def serve(requests: int, replies: int, idle: int) -> None:
    """Answer the calls that come from one pipe in the other. `idle`: the address space before the first call."""
    while head := _read(requests, REQUEST.size):
        text_size, payload_size, answer_limit = REQUEST.unpack(head)
        limit = min(idle + SLACK + SHARE * (payload_size + answer_limit), MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        text, payload = (_read(requests, size) for size in (text_size, payload_size))
        status, data = _answer(json.loads(text), payload)
        _write(replies, REPLY.pack(status, len(data)))
        _write(replies, data)
        del payload, data
        gc.collect()


def _answer(called: dict[str, Any], payload: bytearray) -> tuple[int, memoryview]:
    """Return status and bytes of a call; exceptions other than `ERRORS` end the process."""
    try:
        module = sys.modules.get(called["module"])
        if module is None:
            raise ImportError(f"{called['module']} is not imported")
        return OK, memoryview(getattr(module, called["function"])(payload, **called["arguments"])).cast("B")
    except ERRORS as e:
        status = next(n for n, kind in enumerate(ERRORS, 1) if isinstance(e, kind))
        return status, memoryview(str(e).encode(errors="replace")[:MAX_MESSAGE])


def _read(fd: int, size: int) -> bytearray:
    """Return bytes of a pipe; nothing if it was closed before them."""
    data = bytearray(size)
    unfilled = memoryview(data)
    while unfilled:
        count = os.readv(fd, [unfilled])
        if not count:
            return bytearray()
        unfilled = unfilled[count:]
    return data


def _write(fd: int, data: bytes | memoryview) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(fd, unsent) :]
