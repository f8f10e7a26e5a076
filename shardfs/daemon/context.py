"""A mount as a Python context manager. The public function is `shardfs.mounted`."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from shardfs.config import layers, parsers
from shardfs.daemon import mount, unmount
from shardfs.daemon.background import NO_REPORT, await_report, serve_and_report
from shardfs.daemon.serving import LAST_ANSWERS_S
from shardfs.daemon.shutdown import HURRIED_S
from shardfs.model.errors import MountError, NotADatasetError, OptionError
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import add_secrets, public_name, redacted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.daemon.serving import MountArguments

log = logging.getLogger(__name__)

ERRORS: dict[int, type[Exception]] = {
    ExitCode.USAGE: OptionError,
    ExitCode.UNSUPPORTED: NotADatasetError,
    ExitCode.NOT_MOUNTED: MountError,
}
"""Code that the daemon reports -> exception to raise. All other codes raise OSError."""

END_S = LAST_ANSWERS_S + HURRIED_S + 10
"""Seconds to wait for the daemon to exit after SIGTERM, before SIGKILL."""

PUBLISH_S = 60.0
"""Seconds that publishing may make no progress before `mounted` gives up."""

MOST_BYTES = 2000
"""Bytes of the daemon's standard error that an exception has at most."""

_DAEMON = "from shardfs.daemon.context import serve_program; serve_program()"


@contextmanager
def mounted(
    source: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None,
    ready_timeout: float,
    options: Mapping[str, Any],
) -> Iterator[Path]:
    """Context manager behind `shardfs.mounted`, with the arguments of that function."""
    base = tempfile.mkdtemp(prefix="shardfs-")
    # Some programs select a format by the file name extension.
    name = re.sub(r"[^\w.-]", "_", public_name(os.fspath(source)).rstrip("/").rpartition("/")[2]).lstrip(".") or "mnt"
    mountpoint = os.path.join(os.path.realpath(base), name)
    try:
        os.mkdir(mountpoint)
        words = [_word(name, value) for name, value in options.items()]
        with _serving(os.fspath(source), mountpoint, words, storage_options or {}, ready_timeout):
            yield Path(mountpoint)
            if parsers.switch(str(options.get("rw", False))):
                _publish(mountpoint)
    finally:
        _clear(mountpoint)


def _publish(mountpoint: str) -> None:
    """Publish all written data, then unmount. Raise OSError if some data could not be published."""
    code = unmount.umount(mountpoint, timeout=PUBLISH_S, lazy=False, patient=True)
    if code:
        why: dict[int, str] = {ExitCode.LEFT: "files stay in the journal", ExitCode.BUSY: "a program uses the mount"}
        raise OSError(errno.EIO, f"not all is published: {why.get(code, 'nothing happens any more')}", mountpoint)


def _word(name: str, value: object) -> str:
    """An option in the syntax of `-o`."""
    text = re.sub(r"([\\,])", r"\\\1", str(value))
    return f"{name}={text}"


@contextmanager
def _serving(
    source: str, mountpoint: str, words: list[str], storage_options: Mapping[str, Any], ready_timeout: float
) -> Iterator[None]:
    """Context manager: start a daemon, wait until its mount answers, and end the daemon on exit."""
    environ = dict(os.environ)
    if storage_options:
        before = json.loads(environ.get("SHARDFS_STORAGE_OPTIONS") or "{}")
        environ["SHARDFS_STORAGE_OPTIONS"] = json.dumps({**before, **storage_options})
    receive, send = os.pipe()
    with open(receive, "rb"), open(send, "wb") as pipe, tempfile.TemporaryFile() as errors:
        daemon = subprocess.Popen(
            [sys.executable, "-c", _DAEMON, public_name(source), mountpoint],  # the last two for readers of `ps`
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # until the mount answers
            pass_fds=[send],
            start_new_session=True,  # Ctrl-C must reach the program that uses the mount, not the daemon
        )
        try:
            pipe.close()
            if daemon.stdin is not None:
                with suppress(BrokenPipeError):
                    daemon.stdin.write(json.dumps([source, mountpoint, words, send]).encode() + b"\n")
                    daemon.stdin.flush()
            report = await_report(receive, ready_timeout)
            if report is None:
                why = "the mount was not ready in time: a longer ready_timeout waits longer"
                raise TimeoutError(errno.ETIMEDOUT, why)
            if report.code:
                last = _last_lines(errors) if report.text == NO_REPORT else ""
                raise ERRORS.get(report.code, OSError)(report.text + last)
            yield
        finally:
            _end(daemon)


def _last_lines(errors: IO[bytes]) -> str:
    """The last lines that a daemon wrote to standard error, without secrets; they follow a message."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(size - MOST_BYTES, 0))
    text = redacted(errors.read().decode(errors="replace")).strip()
    return f": {text}" if text else ""


def serve_program() -> NoReturn:
    """The daemon's program of `mounted`: serve the mount that a line of JSON on standard input describes, and exit.

    The line is a list: source, mountpoint, words of `-o`, number of the descriptor for the `Report`.

    The arguments arrive through standard input because they may contain secrets, and every user can read a command
    line. Standard input reaches its end when the mounting program exits or is killed. The daemon then unmounts.
    """
    source, mountpoint, words, report = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_after_input, daemon=True).start()

    def arguments() -> MountArguments:
        for word in (source, *words):  # first, since any error may print a URL
            add_secrets(word)
        options, _ = layers.merge(words, (), (), {}, log.warning)
        return mount.checked(parsers.absolute(source), mountpoint, options)

    code = serve_and_report(arguments, os.fdopen(report, "w"), daemon=False)
    for directory in (mountpoint, os.path.dirname(mountpoint)):
        with suppress(OSError):
            os.rmdir(directory)
    os._exit(code)


def _end_after_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


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
