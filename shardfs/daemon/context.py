"""A mount for the length of a `with` block, from Python: see `mounted`."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shardfs.config import parsers
from shardfs.config.parsers import OptionError
from shardfs.daemon import mount, unmount
from shardfs.daemon.shutdown import HURRIED_S
from shardfs.model.errors import MountError, NotADatasetError
from shardfs.model.redact import public_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ERRORS: dict[int, type[Exception]] = {2: OptionError, 4: NotADatasetError, 5: MountError}
"""Exit code of `shardfs mount` -> what is raised; else it is OSError."""

END_S = mount.LAST_ANSWERS_S + HURRIED_S + 10
"""How long the daemon may take to end."""

PUBLISH_S = 60.0
"""How long nothing may happen while what was written is published."""

# What was asked for comes through standard input, as there may be secrets in it, and everybody can read a command line.
# Standard input ends when the program that mounts is gone, in whatever way; then the mount goes, too.
_DAEMON = """\
import contextlib, json, os, signal, sys, threading

def watch():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)

arguments = json.loads(sys.stdin.readline())
threading.Thread(target=watch, daemon=True).start()
from shardfs.cli import run
code = run(arguments)
for directory in (arguments[-1], os.path.dirname(arguments[-1])):
    with contextlib.suppress(OSError):
        os.rmdir(directory)
os._exit(code)
"""


@contextmanager
def mounted(
    source: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None,
    ready_timeout: float,
    given: Mapping[str, Any],
) -> Iterator[Path]:
    """As `shardfs.mounted` explains; `given` are its further options."""
    base = tempfile.mkdtemp(prefix="shardfs-")
    # Some programs go by the ending of a name.
    name = re.sub(r"[^\w.-]", "_", public_name(os.fspath(source)).rstrip("/").rpartition("/")[2]).lstrip(".") or "mnt"
    mountpoint = os.path.join(os.path.realpath(base), name)
    try:
        os.mkdir(mountpoint)
        with _serving([*_arguments(given), "--", os.fspath(source), mountpoint], storage_options or {}, ready_timeout):
            yield Path(mountpoint)
            if parsers.switch(str(given.get("rw", False))):
                _publish(mountpoint)
    finally:
        _clear(mountpoint)


def _publish(mountpoint: str) -> None:
    """Unmount when all that was written is in the source; raise OSError if that cannot be."""
    code = unmount.umount(mountpoint, timeout=PUBLISH_S, lazy=False, patient=True)
    if code:
        why = {unmount.LEFT: "files stay in the journal", unmount.BUSY: "a program uses the mount"}
        raise OSError(errno.EIO, f"not all is published: {why.get(code, 'nothing happens any more')}", mountpoint)


def _arguments(given: Mapping[str, Any]) -> Iterator[str]:
    yield from ("mount", "--foreground")
    for name, value in given.items():
        text = re.sub(r"([\\,])", r"\\\1", str(value))
        yield from ("-o", f"{name}={text}")


@contextmanager
def _serving(arguments: list[str], storage_options: Mapping[str, Any], ready_timeout: float) -> Iterator[None]:
    """A daemon, of which the mount answers."""
    environ = dict(os.environ)
    if storage_options:
        before = json.loads(environ.get("SHARDFS_STORAGE_OPTIONS") or "{}")
        environ["SHARDFS_STORAGE_OPTIONS"] = json.dumps({**before, **storage_options})
    shown = [public_name(arguments[-2]), arguments[-1]]  # for `ps`; it is not read
    with tempfile.TemporaryFile() as said, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        address = f"shardfs-{secrets.token_hex(16)}"
        told.bind(f"\0{address}")
        environ["NOTIFY_SOCKET"] = f"@{address}"
        daemon = subprocess.Popen(
            [sys.executable, "-c", _DAEMON, *shown],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for whoever uses the mount
        )
        try:
            if daemon.stdin is not None:
                with suppress(BrokenPipeError):
                    daemon.stdin.write(json.dumps(arguments).encode() + b"\n")
                    daemon.stdin.flush()
            _await(daemon, told, said, time.monotonic() + ready_timeout)
            told.close()
            yield
        finally:
            _end(daemon)


def _await(daemon: subprocess.Popen[bytes], told: socket.socket, said: IO[bytes], end: float) -> None:
    """Return when it says that it is ready; raise what it says otherwise."""
    exited = os.pidfd_open(daemon.pid)
    try:
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([told.fileno(), exited], [], [], left)
            if told.fileno() in ready and b"READY=1" in told.recv(4096).split(b"\n"):
                return
            if exited in ready:
                raise _failure(daemon.wait(), said)
    finally:
        os.close(exited)
    raise TimeoutError(errno.ETIMEDOUT, "the mount was not ready in time")


def _failure(code: int, said: IO[bytes]) -> Exception:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    text = lines[-1].removeprefix("shardfs: ") if lines else f"the daemon ended with status {code}"
    return ERRORS.get(code, OSError)(text)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    finally:
        if daemon.stdin is not None:
            with suppress(BrokenPipeError):
                daemon.stdin.close()


def _clear(mountpoint: str) -> None:
    """What the daemon leaves only if it was killed."""
    if unmount.is_mounted(mountpoint):
        unmount.umount(mountpoint, timeout=1, lazy=True)
    for directory in (mountpoint, os.path.dirname(mountpoint)):
        with suppress(OSError):
            os.rmdir(directory)
