"""A mount as a Python context manager. The public function is `shardfs.mounted`."""

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
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import public_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ERRORS: dict[int, type[Exception]] = {
    ExitCode.USAGE: OptionError,
    ExitCode.UNSUPPORTED: NotADatasetError,
    ExitCode.NOT_MOUNTED: MountError,
}
"""Exit code of `shardfs mount` -> exception to raise. All other exit codes raise OSError."""

END_S = mount.LAST_ANSWERS_S + HURRIED_S + 10
"""Seconds to wait for the daemon to exit after SIGTERM, before SIGKILL."""

PUBLISH_S = 60.0
"""Seconds that publishing may make no progress before `mounted` gives up."""

# The arguments arrive through standard input because they may contain secrets, and every user can read a command line.
# Standard input reaches its end when the mounting program exits or is killed. The daemon then unmounts.
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
    """Context manager behind `shardfs.mounted`. `given` holds the keyword arguments `options` of that function."""
    base = tempfile.mkdtemp(prefix="shardfs-")
    # Some programs select a format by the file name extension.
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
    """Publish all written data, then unmount. Raise OSError if some data could not be published."""
    code = unmount.umount(mountpoint, timeout=PUBLISH_S, lazy=False, patient=True)
    if code:
        why: dict[int, str] = {ExitCode.LEFT: "files stay in the journal", ExitCode.BUSY: "a program uses the mount"}
        raise OSError(errno.EIO, f"not all is published: {why.get(code, 'nothing happens any more')}", mountpoint)


def _arguments(given: Mapping[str, Any]) -> Iterator[str]:
    yield from ("mount", "--foreground")
    for name, value in given.items():
        text = re.sub(r"([\\,])", r"\\\1", str(value))
        yield from ("-o", f"{name}={text}")


@contextmanager
def _serving(arguments: list[str], storage_options: Mapping[str, Any], ready_timeout: float) -> Iterator[None]:
    """Context manager: start a daemon, wait until its mount answers, and end the daemon on exit."""
    environ = dict(os.environ)
    if storage_options:
        before = json.loads(environ.get("SHARDFS_STORAGE_OPTIONS") or "{}")
        environ["SHARDFS_STORAGE_OPTIONS"] = json.dumps({**before, **storage_options})
    shown = [public_name(arguments[-2]), arguments[-1]]  # shown by `ps`; the daemon ignores these arguments
    with tempfile.TemporaryFile() as errors, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        address = f"shardfs-{secrets.token_hex(16)}"
        notices.bind(f"\0{address}")
        environ["NOTIFY_SOCKET"] = f"@{address}"
        daemon = subprocess.Popen(
            [sys.executable, "-c", _DAEMON, *shown],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C must reach the program that uses the mount, not the daemon
        )
        try:
            if daemon.stdin is not None:
                with suppress(BrokenPipeError):
                    daemon.stdin.write(json.dumps(arguments).encode() + b"\n")
                    daemon.stdin.flush()
            _await(daemon, notices, errors, time.monotonic() + ready_timeout)
            notices.close()
            yield
        finally:
            _end(daemon)


def _await(daemon: subprocess.Popen[bytes], notices: socket.socket, errors: IO[bytes], end: float) -> None:
    """Return when the daemon reports that it is ready. If the daemon exits, raise the error that it printed.

    `end` is a time of `time.monotonic`. Raises TimeoutError when that time has passed.
    """
    exited = os.pidfd_open(daemon.pid)
    try:
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([notices.fileno(), exited], [], [], left)
            if notices.fileno() in ready and b"READY=1" in notices.recv(4096).split(b"\n"):
                return
            if exited in ready:
                code = daemon.wait()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                text = lines[-1].removeprefix("shardfs: ") if lines else f"the daemon ended with status {code}"
                raise ERRORS.get(code, OSError)(text)
    finally:
        os.close(exited)
    raise TimeoutError(errno.ETIMEDOUT, "the mount was not ready in time: a longer ready_timeout waits longer")


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
    """Remove the mount and the directories that a killed daemon leaves behind."""
    if unmount.is_mounted(mountpoint):
        unmount.umount(mountpoint, timeout=1, lazy=True)
    for directory in (mountpoint, os.path.dirname(mountpoint)):
        with suppress(OSError):
            os.rmdir(directory)
