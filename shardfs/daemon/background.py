"""A daemon in a process of its own: it reports once, by a pipe, that the mount answers or why it failed.

The parent forks the daemon before any code uses fsspec or starts a thread, because fsspec's event loop does not survive
a fork.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from shardfs.daemon import logs, serving
from shardfs.daemon.unmount import unmount
from shardfs.model.errors import exit_code, is_expected, message
from shardfs.model.exit_codes import ExitCode
from shardfs.storage.mount_table import FS_TYPE, mount_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TextIO

    from shardfs.daemon.mount_statistics import Status
    from shardfs.daemon.serving import MountArguments

log = logging.getLogger(__name__)

NO_REPORT = "the daemon ended without a message; its log may tell more"


class Report(NamedTuple):
    """What a daemon reports to the program that started it: 0 and warnings once the mount answers, or the error.

    Args:
        code: the exit code.
        text: messages for the user, one on each line; may be empty.
    """

    code: int
    text: str

    def send(self, pipe: TextIO) -> None:
        """Write the report as JSON, and close the pipe. Does nothing if the pipe is closed: it has had its report."""
        if not pipe.closed:
            with suppress(OSError), pipe:  # the other program may have ended
                json.dump(self, pipe)


def await_report(receive: int, seconds: float) -> Report | None:
    """The report of a daemon from the descriptor `receive` of its pipe, which stays open.

    The text is `NO_REPORT` if the daemon ends without one. None if nothing arrives within `seconds`.
    """
    poller = select.poll()  # unlike `select`, for descriptors of any number
    poller.register(receive, select.POLLIN)
    if not poller.poll(max(seconds, 0) * 1000):
        return None
    with open(receive, closefd=False) as pipe:
        text = pipe.read()
    if not text:
        return Report(ExitCode.PROBLEM, NO_REPORT)
    return Report(*json.loads(text))


def mount_in_background(arguments: MountArguments) -> int:
    """Fork a daemon that serves the mount; return the exit code that it reports: 0 when the mount answers.

    Prints the daemon's warnings or error to standard error. Kills the daemon, and detaches its mount, if the mount does
    not answer within `ready_timeout`, with the code `ExitCode.NOT_READY`, and after Ctrl-C.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the end of this process would search all imported modules for garbage
    receive, send = os.pipe()
    # Block Ctrl-C until the `try` below can kill the child.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _daemon(arguments, os.fdopen(send, "w"), masked)
    os.close(send)
    report = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        report = await_report(receive, arguments.options.ready_timeout)
    finally:  # also after Ctrl-C, which must end the child
        os.close(receive)
        if report is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if arguments.dead is None and mount_type(arguments.mountpoint) == FS_TYPE:
                unmount(arguments.mountpoint, lazy=True)
    if report is None:
        waited = f"not ready within {arguments.options.ready_timeout:g} s"
        report = Report(ExitCode.NOT_READY, f"{arguments.mountpoint}: {waited}: -o ready_timeout=SECONDS waits longer")
    for line in report.text.splitlines():
        sys.stderr.write(f"shardfs: {line}\n")
    return report.code


def _daemon(arguments: MountArguments, pipe: TextIO, masked: Iterable[int]) -> NoReturn:
    """Run the daemon in the forked child, and exit the process."""
    code: int = ExitCode.PROBLEM
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        code = serve_and_report(lambda: arguments, pipe, daemon=True)
    finally:
        logging.shutdown()
        os._exit(code)


def serve_and_report(make_arguments: Callable[[], MountArguments], pipe: TextIO, *, daemon: bool) -> int:
    """Serve a mount, report by the pipe, and return the exit code after the unmount. Raises nothing.

    Args:
        make_arguments: called here, so that its errors are reported, too.
        pipe: gets one `Report`, and is closed then: when the mount answers, or after an error.
        daemon: log to syslog, and detach from the terminal and the session when the mount answers.
    """

    def ready(status: Status) -> None:
        if daemon:
            # Call setsid only now: during an automount, autofs lets only the process group of the automounter
            # access the mountpoint. The helper of mount(8) is in that process group.
            os.setsid()
        Report(0, "".join(f"warning: {problem}\n" for problem in status.problems())).send(pipe)
        if daemon:
            os.chdir("/")
        _silence((0, 1, 2) if daemon else (2,))

    try:
        arguments = make_arguments()
        return serving.serve(arguments, logs.set_up(arguments.logs, daemon=daemon), ready)
    except BaseException as e:
        code = exit_code(e)
        if not is_expected(e):
            log.exception("the daemon ends")
        Report(code, message(e)).send(pipe)
        return code


def _silence(descriptors: Iterable[int]) -> None:
    """Let standard descriptors lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in descriptors:
        os.dup2(null, fd)
    if null > 2:
        os.close(null)
